//! A model's entry in the cache of the Hugging Face Hub, of which one snapshot is the model.
//!
//! ```text
//! models--org--name/
//!   blobs/                  contents, by their hashes
//!   refs/main               the commit that a branch names
//!   snapshots/COMMIT/       the model: links to blobs
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// The snapshot of an entry's root: that of `refs/main`, else the only one; `None` for any other folder.
///
/// # Errors
/// [`Error::Parameter`] if there are several snapshots and no `refs/main` among them, or none; [`Error::Io`].
pub(super) fn snapshot(root: &Path) -> Result<Option<PathBuf>> {
    let snapshots = root.join("snapshots");
    if !root.join("blobs").is_dir() || !snapshots.is_dir() {
        return Ok(None);
    }
    if let Ok(commit) = fs::read_to_string(root.join("refs/main")) {
        let commit = commit.trim();
        // A name and no path.
        if !commit.is_empty() && !commit.contains(['/', '.']) && snapshots.join(commit).is_dir() {
            return Ok(Some(snapshots.join(commit)));
        }
    }
    let listing = |error| Error::io("listing", &snapshots, error);
    let entries = fs::read_dir(&snapshots).map_err(listing)?.collect::<std::io::Result<Vec<_>>>();
    let mut folders: Vec<PathBuf> = entries.map_err(listing)?.iter().map(fs::DirEntry::path).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    match &folders[..] {
        [only] => Ok(Some(only.clone())),
        [] => Err(Error::parameter(
            format!("{} is a cache entry of the Hub without a snapshot", root.display()),
            "fetch the model with hf download",
        )),
        several => {
            let names: Vec<String> = several.iter().map(|path| path.display().to_string()).collect();
            Err(Error::parameter(
                format!(
                    "{} is a cache entry of the Hub with {} snapshots, and refs/main names none of them",
                    root.display(),
                    several.len()
                ),
                format!("name one: {}", names.join(", ")),
            ))
        }
    }
}
