//! Copies of files in an output, and whether its disk has room.

use std::path::Path;

use blake3::Hasher;

use super::{folder::ModelFolder, temporary::parent_of};
use crate::{
    Error, Result,
    io::{FileReader, ReadAt},
};

/// Copies a file into the folder, and compares its hash if one is known. Returns its length in
/// bytes.
pub(super) fn copy(
    from: &Path,
    folder: &ModelFolder<'_>,
    path: &str,
    expected: Option<&[u8; 32]>,
) -> Result<u64> {
    let source = FileReader::open(from)?;
    let mut hasher = Hasher::new();
    folder.fill(path, |write| {
        source.stream(source.size(), |bytes| {
            hasher.update(bytes);
            write(bytes)
        })?;
        if expected.is_none_or(|expected| hasher.finalize() == *expected) {
            return Ok(source.size());
        }
        let problem = format!("{} changed while it was copied", from.display());
        Err(Error::parameter(problem, "try again when nothing writes to it"))
    })
}

/// Refuses to begin what the disk of an output has no room for.
#[cfg(unix)]
pub(super) fn check_space(out: &Path, bytes: u64) -> Result<()> {
    let folder = parent_of(out);
    // Where the system does not tell, writing will.
    let Ok(disk) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if bytes <= free {
        return Ok(());
    }
    let problem = format!("{bytes} bytes are to be written, and {free} are free");
    let full = std::io::Error::new(std::io::ErrorKind::StorageFull, problem);
    Err(Error::io("looking at the disk of", folder, full))
}

#[cfg(not(unix))]
pub(super) fn check_space(_: &Path, _: u64) -> Result<()> {
    Ok(())
}
