//! A temporary file with the segments that the first pass has encoded, until the second pass copies
//! them. All places depend on the lengths of segments, which are known only after encoding.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    Error, Result,
    platform::{read_exact_at, write_all_at},
    temporary::{TemporaryFile, file_beside},
};

/// A temporary file to which all threads append.
#[derive(Debug)]
pub(super) struct Spill {
    file: TemporaryFile,
    path: PathBuf,
    end: AtomicU64,
}

/// Where bytes are in a spill, and their checksum.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spilled {
    at: u64,
    checksum: u32,
}

impl Spill {
    /// Makes one in the folder of an output; it is deleted when this is dropped.
    pub(super) fn beside(output: &Path) -> Result<Self> {
        let file = file_beside(output)?;
        let path = file.file.path().to_owned();
        Ok(Self { file, path, end: AtomicU64::new(0) })
    }

    /// Appends bytes, and returns where they are.
    pub(super) fn add(&self, bytes: &[u8]) -> Result<Spilled> {
        let at = self.end.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        write_all_at(self.file.file.as_file(), bytes, at)
            .map_err(|error| Error::io("writing", &self.path, error))?;
        Ok(Spilled { at, checksum: crc32fast::hash(bytes) })
    }

    /// Fills `bytes` with those that were added.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if they cannot be read, or are others.
    pub(super) fn read(&self, spilled: Spilled, bytes: &mut [u8]) -> Result<()> {
        let read = read_exact_at(self.file.file.as_file(), bytes, spilled.at);
        let checked = read.and_then(|()| {
            if crc32fast::hash(bytes) == spilled.checksum {
                return Ok(());
            }
            Err(io::Error::new(io::ErrorKind::InvalidData, "its bytes have changed"))
        });
        checked.map_err(|error| Error::io("reading", &self.path, error))
    }

    /// Where the next bytes will be, while no thread appends.
    pub(super) fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// Forgets what is from a place on, while no thread appends: the room is used again.
    pub(super) fn forget(&self, from: u64) {
        self.end.store(from, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_the_file_goes() {
        let folder = tempfile::tempdir().unwrap();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let spill = Spill::beside(&folder.path().join("out.df11")).unwrap();
        let read = |spilled, length| {
            let mut bytes = vec![0; length];
            spill.read(spilled, &mut bytes).map(|()| bytes)
        };
        let first = spill.add(b"kept").unwrap();
        let end = spill.end();
        let forgotten = spill.add(b"forgotten").unwrap();
        spill.forget(end);
        let second = spill.add(b"taken").unwrap();
        assert_eq!((forgotten.at, second.at), (end, end));
        assert_eq!(read(first, 4).unwrap(), b"kept");
        assert_eq!(read(second, 5).unwrap(), b"taken");
        for other in [forgotten, Spilled { at: 1 << 20, ..second }] {
            assert!(matches!(read(other, 9), Err(Error::Io { .. })));
        }
        // A lock of Windows is a file.
        assert_eq!(files(), if cfg!(windows) { 2 } else { 1 });
        drop(spill);
        assert_eq!(files(), 0);
    }
}
