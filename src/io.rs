//! Positional reads from files and from memory. This crate reads bytes in no other way.

use std::{
    any::Any,
    fs::File,
    io::{self, Read},
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::SystemTime,
};

use crate::{
    Error, Result,
    constants::CHECKSUM_CHUNK_BYTES,
    error::io_remedied,
    parallel,
    platform::{self, read_exact_at},
};

/// Bytes of a known length that many threads may read at once, each at its own offset.
///
/// Implemented by [`FileReader`], and by everything that is already bytes in memory: `Vec<u8>`,
/// `[u8]`, a memory map.
pub trait ReadAt: Send + Sync {
    /// The length in bytes, fixed when the reader was made. Constant time.
    fn size(&self) -> u64;

    /// Fills `buf` with the bytes from `offset` on. One system call on a file, a copy in memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if fewer bytes than `buf.len()` follow `offset`, and
    /// whatever the system reports.
    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// The same bytes without a copy, if they are in memory and within [`size`](Self::size).
    /// Constant time.
    fn view(&self, _offset: u64, _length: u64) -> Option<&[u8]> {
        None
    }

    /// Begins to fetch all [`size`](Self::size) bytes to memory, by requests that run at once, the
    /// ranges `first` before the rest. Reads of the answer wait for their bytes. None where a read
    /// waits for no network.
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`].
    #[doc(hidden)]
    fn bring_whole(&self, _first: &[Range<u64>]) -> Option<io::Result<Box<dyn ReadAt>>> {
        None
    }

    /// Waits until views can be had, if the bytes are on their way into memory.
    ///
    /// # Errors
    /// The errors of reading.
    #[doc(hidden)]
    fn wait_whole(&self) -> io::Result<()> {
        Ok(())
    }

    /// The address at which the bytes lie, or will lie, in memory. They may be read when they have
    /// been read through this, or checked. None if there are no views.
    #[doc(hidden)]
    fn address(&self) -> Option<usize> {
        self.view(0, self.size()).map(|bytes| bytes.as_ptr() as usize)
    }

    /// Fetches the bytes of these ranges ahead of reads, in this order and in bounded memory, until
    /// the result is dropped. `None` if reads do not use a network.
    fn read_ahead(&self, _ranges: &[Range<u64>]) -> Option<Box<dyn Any + Send + Sync>> {
        None
    }
}

impl<T: AsRef<[u8]> + Send + Sync + ?Sized> ReadAt for T {
    fn size(&self) -> u64 {
        self.as_ref().len() as u64
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = self.view(offset, buf.len() as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(bytes);
        Ok(())
    }

    fn view(&self, offset: u64, length: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(length).ok()?)?;
        self.as_ref().get(start..end)
    }
}

/// A file read by position, without a buffer.
///
/// It holds one file handle, unless half of those that the process may have are held by readers
/// already: then it opens the file for each read, and refuses a file that is not the same anymore.
#[derive(Debug)]
pub struct FileReader {
    path: PathBuf,
    kept: Option<Kept>,
    stamp: Stamp,
}

impl FileReader {
    /// Opens a file for reading and notes its length.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened; [`Error::Parameter`] if it is not a regular file,
    /// since reading a pipe or a device would block or never end.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::new(path, open_regular(path)?)
    }

    /// Takes over an open file.
    pub(crate) fn new(path: &Path, file: File) -> Result<Self> {
        let stamp =
            Stamp::of(&file).map_err(|error| Error::io("reading the length of", path, error))?;
        let path = std::path::absolute(path).map_err(|error| Error::io("finding", path, error))?;
        Ok(Self { path, kept: Kept::new(file), stamp })
    }

    /// Hands on its first `length` bytes, at most 1 MiB at a time.
    ///
    /// # Errors
    /// [`Error::Io`], also if there are fewer; what `take` answers.
    pub(crate) fn stream(
        &self,
        length: u64,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        parallel::cut(0..length, CHECKSUM_CHUNK_BYTES, 1).try_for_each(|part| {
            bytes.resize((part.end - part.start) as usize, 0);
            self.read_exact_at(part.start, &mut bytes)
                .map_err(|error| Error::io("reading", &self.path, error))?;
            take(&bytes)
        })
    }

    fn reopen(&self) -> io::Result<File> {
        let file = platform::open_without_waiting(&self.path)?;
        if Stamp::of(&file)? == self.stamp {
            return Ok(file);
        }
        Err(io_remedied(
            io::ErrorKind::Other,
            "it was replaced or changed while it was open; open it again",
        ))
    }
}

/// Identifies a file when it is opened again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    length: u64,
    modified: Option<SystemTime>,
    /// Device and number of the file.
    file: [u64; 2],
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let file = platform::file_id(file)?;
        Ok(Self { length: metadata.len(), modified: metadata.modified().ok(), file })
    }
}

/// The number of handles that readers keep.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// A handle that is counted.
#[derive(Debug)]
struct Kept(File);

impl Kept {
    /// Keeps the file; None if enough are kept: then it is closed.
    fn new(file: File) -> Option<Self> {
        let kept = Self(file);
        (KEPT.fetch_add(1, Ordering::Relaxed) < max_kept()).then_some(kept)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        KEPT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Half of the handles that this process may have, so that as many are left for all else.
fn max_kept() -> usize {
    const MAX: usize = 4096;
    platform::max_open_files().map_or(MAX, |limit| MAX.min(limit as usize / 2))
}

/// Opens a regular file for reading, and never waits for the other end of a pipe.
///
/// # Errors
/// Like [`FileReader::open`].
pub(crate) fn open_regular(path: &Path) -> Result<File> {
    let opening = |source| Error::io("opening", path, source);
    // Before as well: opening a device may do something, and a socket cannot be opened.
    check_regular(path, &std::fs::metadata(path).map_err(opening)?)?;
    let file = platform::open_without_waiting(path).map_err(opening)?;
    check_regular(path, &file.metadata().map_err(opening)?)?;
    Ok(file)
}

fn check_regular(path: &Path, metadata: &std::fs::Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let problem = format!("{} is not a regular file", path.display());
    Err(Error::parameter(problem, "name a file that lies on a disk"))
}

/// All bytes of a regular file, which has at most `most`.
///
/// # Errors
/// Like [`FileReader::open`], and [`Error::Limit`] if it has more, whatever length it tells.
pub(crate) fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = open_regular(path)?.take(most.saturating_add(1));
    file.read_to_end(&mut bytes).map_err(|error| Error::io("reading", path, error))?;
    let what = format_args!("{}: its length in bytes", path.display());
    Error::check_limit(what, bytes.len() as u64, most)?;
    Ok(bytes)
}

impl ReadAt for FileReader {
    fn size(&self) -> u64 {
        self.stamp.length
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match &self.kept {
            Some(Kept(file)) => read_exact_at(file, buf, offset),
            None => read_exact_at(&self.reopen()?, buf, offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(reader: &dyn ReadAt) {
        let mut two = [0; 2];
        assert_eq!(reader.size(), 5);
        reader.read_exact_at(3, &mut two).unwrap();
        assert_eq!(&two, b"lo");
        reader.read_exact_at(5, &mut []).unwrap();
        for offset in [4, 6, u64::MAX] {
            let error = reader.read_exact_at(offset, &mut two).unwrap_err();
            assert!(matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput
            ));
        }
    }

    #[test]
    fn no_more_is_read_than_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(read_regular(&path, 5).unwrap(), b"12345");
        assert!(matches!(read_regular(&path, 4), Err(Error::Limit { value: 5, limit: 4, .. })));
    }

    #[test]
    fn files_and_memory_read_alike() {
        let memory = b"hello".to_vec();
        check(&memory);
        assert_eq!(memory.view(1, 3), Some(&b"ell"[..]));
        assert_eq!(memory.view(1, 5), None);
        assert_eq!(memory.view(u64::MAX, 2), None);

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hello");
        std::fs::write(&path, b"hello").unwrap();
        let file = FileReader::open(&path).unwrap();
        check(&file);
        assert_eq!(file.view(0, 1), None);
        assert!(matches!(FileReader::open(folder.path()), Err(Error::Parameter { .. })));
        assert!(matches!(FileReader::open(path.join("x")), Err(Error::Io { .. })));
    }
}
