//! Side files beside remote containers.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::{beside::MARK_BYTES, original::OriginalFile};
use crate::{
    Error, Result,
    paths::{RENAME, check_nameable},
    source::MAX_SIDE_BYTES,
    store::Place,
    temporary::{TemporaryFolder, folder_for_fetched},
};

/// The folder of a remote model: files beside its containers are fetched on first use.
#[derive(Debug)]
pub(super) struct FarFolder {
    place: Place,
    fetched: OnceLock<TemporaryFolder>,
}

impl FarFolder {
    pub(super) fn new(place: Place) -> Self {
        Self { place, fetched: OnceLock::new() }
    }

    /// Its name, which begins the names of the containers in it.
    pub(super) fn name(&self) -> PathBuf {
        self.place.name_of("").into()
    }

    /// A local folder with these side files, as far as they are there.
    pub(super) fn fetch<'m>(&self, files: impl Iterator<Item = OriginalFile<'m>>) -> Result<&Path> {
        if self.fetched.get().is_none() {
            let folder = folder_for_fetched()?;
            self.fetch_recorded(files, folder.path())?;
            // Another thread may have been faster.
            let _ = self.fetched.set(folder);
        }
        Ok(self.fetched.get().expect("it was set").path())
    }

    /// Fetches side files that containers record into a local folder, as far as they are there.
    pub(super) fn fetch_recorded<'m>(
        &self,
        mut files: impl Iterator<Item = OriginalFile<'m>>,
        folder: &Path,
    ) -> Result<()> {
        files.try_for_each(|file| {
            Error::check_limit(
                format_args!("the length in bytes of {:?} beside the containers", file.path()),
                file.length(),
                MAX_SIDE_BYTES,
            )?;
            self.fetch_file(file.path(), file.length() + MARK_BYTES, folder)
        })
    }

    /// Fetches a file of at most this many bytes, if it is there.
    pub(super) fn fetch_file(&self, path: &str, most: u64, folder: &Path) -> Result<()> {
        check_nameable(path, RENAME)?;
        let Some(bytes) = self.place.read_if_there(path, most)? else { return Ok(()) };
        let to = folder.join(path);
        let parent = to.parent().unwrap_or(folder);
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&to, bytes))
            .map_err(|error| Error::io("writing", &to, error))
    }
}
