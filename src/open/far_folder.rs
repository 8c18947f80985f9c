//! Side files beside containers that lie beyond a network.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use tempfile::TempDir;

use super::{beside::MARK_BYTES, original::OriginalFile};
use crate::{Error, Result, source::MAX_SIDE_BYTES, store::Place};

/// The folder of a model beyond a network: files beside its containers are fetched when they are
/// first asked for.
#[derive(Debug)]
pub(super) struct FarFolder {
    place: Arc<Place>,
    /// Where it lies in the place, with a `/` at the end unless it is all of it.
    prefix: String,
    fetched: OnceLock<TempDir>,
}

impl FarFolder {
    pub(super) fn new(place: &Arc<Place>, prefix: &str) -> Self {
        Self { place: Arc::clone(place), prefix: prefix.to_owned(), fetched: OnceLock::new() }
    }

    /// Its name, which begins the names of the containers in it.
    pub(super) fn name(&self) -> PathBuf {
        self.place.name_of(&self.prefix).into()
    }

    /// A local folder with the side files that a model records, as far as they are there.
    pub(super) fn fetch<'m>(&self, files: impl Iterator<Item = OriginalFile<'m>>) -> Result<&Path> {
        if self.fetched.get().is_none() {
            let folder = tempfile::tempdir()
                .map_err(|error| Error::io("creating a folder in", std::env::temp_dir(), error))?;
            for file in files {
                self.fetch_file(file, folder.path())?;
            }
            // Another thread may have been faster.
            let _ = self.fetched.set(folder);
        }
        Ok(self.fetched.get().expect("it was set").path())
    }

    fn fetch_file(&self, file: OriginalFile<'_>, folder: &Path) -> Result<()> {
        Error::check_limit(
            format_args!("the length in bytes of {:?} beside the containers", file.path()),
            file.length(),
            MAX_SIDE_BYTES,
        )?;
        let path = format!("{}{}", self.prefix, file.path());
        let bytes = match self.place.read(&path, file.length() + MARK_BYTES) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(());
            }
            found => found?,
        };
        let to = folder.join(file.path());
        let parent = to.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&to, bytes))
            .map_err(|error| Error::io("writing", &to, error))
    }
}
