//! The last step of every output: its name, which nothing else may have, and which lasts.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use tempfile::{NamedTempFile, PersistError};

use super::temporary::{file_beside, is_temporary, parent_of};
use crate::{Error, Result};

/// Refuses an output that exists, and one that the next run would take for a leftover.
pub(super) fn check_absent(out: &Path, overwrite: bool) -> Result<()> {
    if is_temporary(out) {
        let problem =
            format!("{} is a name of temporary files, which other runs remove", out.display());
        return Err(Error::parameter(problem, "choose another output"));
    }
    if !overwrite && out.symlink_metadata().is_ok() {
        return Err(exists(out));
    }
    Ok(())
}

/// Refuses to replace a pipe, a device or a socket by a file.
pub(super) fn check_file(out: &Path) -> Result<()> {
    match fs::metadata(out) {
        Ok(metadata) if !metadata.is_file() => {
            let problem = format!("{} is no regular file", out.display());
            Err(Error::parameter(problem, "choose another output"))
        }
        _ => Ok(()),
    }
}

fn exists(out: &Path) -> Error {
    Error::Exists { path: out.display().to_string() }
}

/// The error of a rename; a name that another has taken meanwhile is one that exists.
pub(super) fn renaming(to: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => exists(to),
        _ => Error::io("renaming to", to, error),
    }
}

/// Gives a file its name; in place of what has it only with `overwrite`.
pub(super) fn file(file: NamedTempFile, to: &Path, overwrite: bool) -> Result<()> {
    let renamed = if overwrite { file.persist(to) } else { keeping(file, to) };
    renamed.map_err(|error| renaming(to, error.error))?;
    sync_parent(to)
}

/// Gives a file a name that nothing has, on file systems too that have neither a rename that keeps
/// what is there nor hard links: there an empty file, which only one run can create, holds the
/// name.
fn keeping(file: NamedTempFile, to: &Path) -> std::result::Result<fs::File, PersistError> {
    let PersistError { error, file } = match file.persist_noclobber(to) {
        Err(refused) if may_be_lacking(&refused.error) => refused,
        result => return result,
    };
    if fs::File::create_new(to).is_err() {
        return Err(PersistError { error, file });
    }
    file.persist(to).inspect_err(|_| {
        let _ = fs::remove_file(to);
    })
}

/// Whether a file system may lack what was asked for: hard links, or folders that can be opened and
/// synced. A folder that may not be written or opened answers the same.
fn may_be_lacking(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Writes a small file, which appears under its name when it is whole; in place of what has it only
/// with `overwrite`.
///
/// # Errors
/// [`Error::Parameter`] if the name is taken; [`Error::Io`].
pub fn write_file(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    check_absent(path, overwrite)?;
    check_file(path)?;
    let mut temporary = file_beside(path)?;
    let written = temporary.write_all(bytes).and_then(|()| temporary.as_file().sync_all());
    written.map_err(|error| Error::io("writing", path, error))?;
    file(temporary, path, overwrite)
}

/// Gives a folder a name that nothing has.
pub(super) fn folder(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(result) = rename_with(from, to, false) {
        return result;
    }
    // The folder that is made here is ours, or there is one already; a rename replaces it only
    // while it is empty. Windows replaces no folder, so that none is made there.
    if cfg!(unix) {
        fs::create_dir(to)?;
    }
    fs::rename(from, to).inspect_err(|_| {
        if cfg!(unix) {
            let _ = fs::remove_dir(to);
        }
    })
}

/// Exchanges two names in one step; None if the system or the file system cannot.
pub(super) fn exchange(a: &Path, b: &Path) -> Option<io::Result<()>> {
    rename_with(a, b, true)
}

/// Keeps what has the new name, or exchanges both; None if the system or the file system cannot.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn rename_with(from: &Path, to: &Path, exchange: bool) -> Option<io::Result<()>> {
    use rustix::{
        fs::{CWD, RenameFlags, renameat_with},
        io::Errno,
    };
    let flag = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
    match renameat_with(CWD, from, CWD, to, flag) {
        Err(Errno::NOSYS | Errno::INVAL | Errno::NOTSUP) => None,
        result => Some(result.map_err(io::Error::from)),
    }
}

/// Other systems have no such renames.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn rename_with(_: &Path, _: &Path, _: bool) -> Option<io::Result<()>> {
    None
}

/// Makes the names in the folder of `path` last.
pub(super) fn sync_parent(path: &Path) -> Result<()> {
    sync_folder(parent_of(path))
}

/// Makes the names in a folder last, where the system and the file system can; elsewhere the system
/// decides when.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if !may_be_lacking(&error) => Err(Error::io("syncing", folder, error)),
        _ => Ok(()),
    }
}
