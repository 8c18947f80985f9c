//! Copies of files in an output, and whether its disk has room.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

use blake3::Hasher;

use super::{folder::ModelFolder, temporary::parent_of};
use crate::{Error, Result, io::open_regular};

/// Copies a file into the folder, and compares its hash if one is known. Returns its length in
/// bytes.
pub(super) fn copy(
    from: &Path,
    folder: &ModelFolder<'_>,
    path: &str,
    expected: Option<&[u8; 32]>,
) -> Result<u64> {
    let mut source = open_regular(from)?;
    let (mut target, to) = folder.create_file(path)?;
    let mut hasher = Hasher::new();
    let mut tee = Tee { target: &mut target, hasher: &mut hasher };
    let bytes =
        io::copy(&mut source, &mut tee).map_err(|error| Error::io("copying to", &to, error))?;
    if expected.is_some_and(|expected| hasher.finalize() != *expected) {
        let problem = format!("{} changed while it was copied", from.display());
        return Err(Error::parameter(problem, "try again when nothing writes to it"));
    }
    target.sync_all().map_err(|error| Error::io("syncing", &to, error))?;
    Ok(bytes)
}

/// Writes to a file and hashes what it writes.
struct Tee<'a> {
    target: &'a mut File,
    hasher: &'a mut Hasher,
}

impl Write for Tee<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.target.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
    }
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
    Err(Error::io(
        "looking at the disk of",
        folder,
        io::Error::new(io::ErrorKind::StorageFull, problem),
    ))
}

#[cfg(not(unix))]
pub(super) fn check_space(_: &Path, _: u64) -> Result<()> {
    Ok(())
}
