//! An output folder while it is being filled: a temporary folder that becomes the real one when it is whole.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use tempfile::{NamedTempFile, TempDir};

use super::output::sync_folder;
use crate::{Error, Result, paths::check_path};

/// Hidden, and not named after the output, whose name may be as long as the file system allows.
const TEMPORARY_PREFIX: &str = ".df11-";
const TEMPORARY_SUFFIX: &str = ".part";

/// A folder being filled. Dropped before [`OutputFolder::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(super) struct OutputFolder {
    folder: TempDir,
    path: PathBuf,
}

impl OutputFolder {
    /// Creates the temporary folder beside `path`.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let parent = parent_of(path);
        if path.file_name().is_none() {
            let problem = format!("{} names no folder", path.display());
            return Err(Error::parameter(problem, "give the output a name"));
        }
        let folder = temporary(0o777)
            .tempdir_in(parent)
            .map_err(|error| Error::io("creating a folder in", parent, error))?;
        Ok(Self { folder, path: path.to_owned() })
    }

    /// Where the folder is until it is finished.
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The place of a file in the folder, whose own folder is made.
    pub(super) fn path_of(&self, relative: &str) -> Result<PathBuf> {
        check_path(relative)?;
        let path = self.folder.path().join(relative);
        let parent = parent_of(&path);
        fs::create_dir_all(parent).map_err(|error| Error::io("creating", parent, error))?;
        Ok(path)
    }

    /// Writes a file into the folder, in place of one that is there.
    pub(super) fn write(&self, bytes: &[u8], relative: &str) -> Result<()> {
        let path = self.path_of(relative)?;
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        });
        written.map_err(|error| Error::io("writing", &path, error))
    }

    /// Gives the folder its name, in place of what has it.
    pub(super) fn finish(self) -> Result<()> {
        let path = self.path;
        let renaming = |error| Error::io("renaming to", &path, error);
        // What is replaced is moved aside first and deleted last: at every moment one of the two is whole.
        let aside = if path.symlink_metadata().is_ok() {
            let aside = tempfile::Builder::new()
                .prefix(".df11-old.")
                .tempdir_in(parent_of(&path))
                .map_err(renaming)?;
            fs::rename(&path, aside.path().join("old")).map_err(renaming)?;
            Some(aside)
        } else {
            None
        };
        if let Err(error) = fs::rename(self.folder.path(), &path) {
            if let Some(aside) = &aside {
                fs::rename(aside.path().join("old"), &path).map_err(renaming)?;
            }
            return Err(renaming(error));
        }
        let _ = self.folder.keep();
        sync_folder(&path);
        Ok(())
    }
}

/// Makes temporary files or folders. They are private unless told otherwise, but what becomes a result is as accessible as anything new: `mode`,
/// less what the process's umask takes.
fn temporary(mode: u32) -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY_PREFIX).suffix(TEMPORARY_SUFFIX);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(mode));
    }
    #[cfg(not(unix))]
    let _ = mode;
    builder
}

/// A temporary file in the folder of `path`; deleted when dropped.
pub(super) fn temporary_beside(path: &Path) -> Result<NamedTempFile> {
    let folder = parent_of(path);
    temporary(0o666).tempfile_in(folder).map_err(|error| Error::io("creating a file in", folder, error))
}

/// The folder that holds `path`.
pub(super) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
