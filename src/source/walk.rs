//! The regular files of a folder, each with the path it would have in a container.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::folder::LeftOut;
use crate::{
    Error, Result,
    paths::{check_path, is_safetensors},
};

/// A regular file, or a link to one.
pub(crate) struct Found {
    /// Relative, `/`-separated and accepted by [`check_path`].
    pub(crate) path: String,
    pub(crate) file: PathBuf,
    /// In bytes.
    pub(crate) length: u64,
}

/// All files below `root` in bytewise order of their paths, and what was passed over.
///
/// Links to files are followed, since the Hugging Face cache consists of them; links to folders are not, since
/// they may form a circle. Hidden files and folders are passed over: `.git` and `.cache` are no part of a
/// model, and `.env` must not end up in a container.
pub(crate) fn walk(root: &Path) -> Result<(Vec<Found>, Vec<LeftOut>)> {
    let mut walk =
        Walk { found: Vec::new(), left_out: Vec::new(), folders: vec![(root.to_owned(), String::new())] };
    while let Some((folder, prefix)) = walk.folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|source| Error::io("listing", &folder, source))? {
            let entry = entry.map_err(|source| Error::io("listing", &folder, source))?;
            walk.visit(&entry, &prefix)?;
        }
    }
    walk.found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((walk.found, walk.left_out))
}

struct Walk {
    found: Vec<Found>,
    left_out: Vec<LeftOut>,
    folders: Vec<(PathBuf, String)>,
}

impl Walk {
    fn visit(&mut self, entry: &fs::DirEntry, prefix: &str) -> Result<()> {
        let file = entry.path();
        let name = entry.file_name();
        let path = format!("{prefix}{}", name.to_string_lossy());
        let kind = entry.file_type().map_err(|source| Error::io("looking at", &file, source))?;
        if path[prefix.len()..].starts_with('.') {
            self.leave_out(path, "hidden");
        } else if name.to_str().is_none() || check_path(&path).is_err() {
            self.leave_out_unless_weights(path, "its name is not portable")?;
        } else if kind.is_dir() {
            self.folders.push((file, path + "/"));
        } else {
            self.visit_file(file, path)?;
        }
        Ok(())
    }

    fn visit_file(&mut self, file: PathBuf, path: String) -> Result<()> {
        match fs::metadata(&file) {
            Ok(metadata) if metadata.is_file() => {
                self.found.push(Found { path, file, length: metadata.len() });
                Ok(())
            }
            Ok(metadata) if metadata.is_dir() => {
                self.leave_out(path, "a link to a folder");
                Ok(())
            }
            Ok(_) => self.leave_out_unless_weights(path, "not a regular file"),
            Err(_) => {
                self.leave_out_unless_weights(path, "a link that leads nowhere, or that may not be read")
            }
        }
    }

    fn leave_out(&mut self, path: String, reason: &str) {
        self.left_out.push(LeftOut { path, reason: reason.to_owned() });
    }

    /// A model must not lose weights without notice.
    fn leave_out_unless_weights(&mut self, path: String, reason: &str) -> Result<()> {
        if is_safetensors(&path) {
            return Err(Error::parameter(
                format!("{path:?}: {reason}"),
                "download the file again, or rename it",
            ));
        }
        self.leave_out(path, reason);
        Ok(())
    }
}
