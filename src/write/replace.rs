//! What may be replaced on a person's word. [`compress`](super::compress) and the like replace whatever has the output's name; people mistype.

use std::{fs, path::Path};

use crate::{Error, Result, paths::has_extension};

/// Refuses an output that would delete the source, or a folder that holds no file with this extension, and so is no
/// earlier output. For callers that let people replace outputs.
///
/// # Errors
/// [`Error::Parameter`].
pub fn check_replaceable(source: &Path, out: &Path, extension: &str) -> Result<()> {
    let (Ok(source), Ok(target)) = (source.canonicalize(), out.canonicalize()) else { return Ok(()) };
    if source.starts_with(&target) {
        let problem = format!("{} is the source or holds it", out.display());
        return Err(Error::parameter(problem, "choose another output"));
    }
    let single = has_extension(out, extension);
    if target.is_dir() == single {
        let (there, wanted) = if single { ("folder", "file") } else { ("file", "folder") };
        let problem = format!("{} is a {there}, and the output would be a {wanted}", out.display());
        return Err(Error::parameter(problem, "choose another output"));
    }
    if target.is_dir() && !is_empty(&target) && !holds(&target, extension) {
        let problem =
            format!("{} is a folder without .{extension} files, so no earlier output", out.display());
        return Err(Error::parameter(problem, "choose another output, or delete the folder yourself"));
    }
    Ok(())
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

/// Whether a folder, or a folder in it, holds such a file.
fn holds(folder: &Path, extension: &str) -> bool {
    fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => holds(&path, extension),
                Ok(_) => has_extension(path, extension),
                Err(_) => false,
            }
        })
    })
}
