//! The last step of every output: its name, which nothing else may have, and which lasts.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use tempfile::NamedTempFile;

use super::{
    replace::check_file,
    temporary::{file_beside, parent_of},
};
use crate::{Error, Result};

/// Refuses an output that exists.
pub(super) fn check_absent(out: &Path, overwrite: bool) -> Result<()> {
    if !overwrite && out.symlink_metadata().is_ok() {
        return Err(exists(out));
    }
    Ok(())
}

fn exists(out: &Path) -> Error {
    let problem = format!("{} exists", out.display());
    Error::parameter(problem, "choose another output, or replace it with --force")
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
    let renamed = if overwrite { file.persist(to) } else { file.persist_noclobber(to) };
    renamed.map_err(|error| renaming(to, error.error))?;
    sync_parent(to)
}

/// Writes a small file, which appears under its name when it is whole; in place of what has it only
/// with `overwrite`.
///
/// # Errors
/// [`Error::Parameter`] where the name is taken; [`Error::Io`].
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
    #[cfg(unix)]
    if let Some(result) = with_flag(from, to, rustix::fs::RenameFlags::NOREPLACE) {
        return result;
    }
    // The folder that is made here is ours, or there is one already; a rename replaces it only
    // while it is empty. Where a folder cannot be replaced at all, as on Windows, it is not made.
    if cfg!(unix) {
        fs::create_dir(to)?;
    }
    fs::rename(from, to).inspect_err(|_| {
        if cfg!(unix) {
            let _ = fs::remove_dir(to);
        }
    })
}

/// Exchanges two names in one step; None where the system or the file system cannot.
pub(super) fn exchange(a: &Path, b: &Path) -> Option<io::Result<()>> {
    #[cfg(unix)]
    return with_flag(a, b, rustix::fs::RenameFlags::EXCHANGE);
    #[cfg(not(unix))]
    {
        let _ = (a, b);
        None
    }
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn with_flag(from: &Path, to: &Path, flag: rustix::fs::RenameFlags) -> Option<io::Result<()>> {
    use rustix::io::Errno;
    match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flag) {
        Err(Errno::NOSYS | Errno::INVAL | Errno::NOTSUP) => None,
        result => Some(result.map_err(io::Error::from)),
    }
}

#[cfg(all(unix, not(any(target_os = "linux", target_os = "android", target_vendor = "apple"))))]
fn with_flag(_: &Path, _: &Path, _: ()) -> Option<io::Result<()>> {
    None
}

/// Makes the names in the folder of `path` last.
pub(super) fn sync_parent(path: &Path) -> Result<()> {
    sync_folder(parent_of(path))
}

/// Makes the names in a folder last, where the system and the file system can.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if !cannot_sync(&error) => Err(Error::io("syncing", folder, error)),
        _ => Ok(()),
    }
}

/// Whether folders cannot be synced here, or may not be opened: then the system decides when.
fn cannot_sync(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}
