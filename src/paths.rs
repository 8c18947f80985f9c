//! Names of files: what they tell, and the rule for paths that a container holds: shards and side files, relative to the folder of the model.

use std::path::Path;

use crate::{Error, Result, constants::MAX_NAME_BYTES};

/// Checks that a path is relative, `/`-separated and cannot leave the folder it is joined to.
///
/// Components are neither empty nor `.` nor `..`; control characters, backslashes and colons are
/// forbidden, since some systems read them as something else than part of a name. Cost: one pass.
///
/// # Errors
/// [`Error::Limit`] where the path is longer than [`MAX_NAME_BYTES`]; [`Error::Corrupt`] where it breaks
/// another rule, with the offset of the offending byte in the path.
pub fn check_path(path: &str) -> Result<()> {
    if path.len() as u64 > MAX_NAME_BYTES {
        return Err(Error::limit("the length of a path in bytes", path.len() as u64, MAX_NAME_BYTES));
    }
    let corrupt =
        |offset: usize, problem: &str| Err(Error::corrupt(format!("path {path:?}"), offset as u64, problem));
    if let Some((offset, _)) = path.char_indices().find(|&(_, c)| matches!(c, '\\' | ':') || c.is_control()) {
        return corrupt(offset, "a backslash, a colon or a control character");
    }
    let mut offset = 0;
    for component in path.split('/') {
        match component {
            "" => return corrupt(offset, "an empty component"),
            "." | ".." => return corrupt(offset, "a `.` or `..` component"),
            _ => offset += component.len() + 1,
        }
    }
    Ok(())
}

/// Whether a path is that of a container, or of an output that is to be one.
pub(crate) fn is_container(path: impl AsRef<Path>) -> bool {
    has_extension(path, "df11")
}

/// Whether a path is that of a safetensors file.
pub(crate) fn is_safetensors(path: impl AsRef<Path>) -> bool {
    has_extension(path, "safetensors")
}

/// Whether a path ends in this extension, without its dot.
pub(crate) fn has_extension(path: impl AsRef<Path>, extension: &str) -> bool {
    path.as_ref().extension().is_some_and(|found| found == extension)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_inside_pass() {
        for path in ["a", "a/b.json", "...", "..a/.b", "ünï/ço dé", &"x".repeat(4096)] {
            check_path(path).unwrap();
        }
    }

    #[test]
    fn paths_that_escape_fail_at_their_byte() {
        for (path, at) in [
            ("", 0),
            ("/a", 0),
            ("a/", 2),
            ("a//b", 2),
            (".", 0),
            ("a/..", 2),
            ("../a", 0),
            ("a/./b", 2),
            ("a\\b", 1),
            ("c:b", 1),
            ("a\0", 1),
            ("a\nb", 1),
            ("a\u{85}", 1),
        ] {
            match check_path(path) {
                Err(Error::Corrupt { offset, .. }) => assert_eq!(offset, at, "{path:?}"),
                other => panic!("{path:?}: {other:?}"),
            }
        }
        assert!(matches!(check_path(&"x".repeat(4097)), Err(Error::Limit { value: 4097, .. })));
    }
}
