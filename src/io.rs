//! Positional reads from files and from memory: the one way in which this crate reads bytes.

use std::{fs::File, io, path::Path};

use crate::{Error, Result};

/// Bytes of a known length that many threads may read at once, each at its own offset.
///
/// Implemented by [`FileReader`], and by everything that is already bytes in memory: `Vec<u8>`, `[u8]`,
/// a memory map.
pub trait ReadAt: Send + Sync {
    /// The length in bytes, fixed when the reader was made. Constant time.
    fn size(&self) -> u64;

    /// Fills `buf` with the bytes from `offset` on. One system call on a file, a copy in memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] where fewer bytes than `buf.len()` follow `offset`, and whatever the
    /// system reports.
    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// The same bytes without a copy, where they lie in memory and within [`size`](Self::size). Constant time.
    fn view(&self, _offset: u64, _length: u64) -> Option<&[u8]> {
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

/// A file read by position; it holds one file handle and no buffer.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    len: u64,
}

impl FileReader {
    /// Opens a file for reading and notes its length.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be opened; [`Error::Parameter`] where it is not a regular file, since
    /// reading a pipe or a device would block or never end.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(|source| Error::io("opening", path, source))?;
        if !metadata.is_file() {
            return Err(Error::parameter(
                format!("{} is not a regular file", path.display()),
                "name a file that lies on a disk",
            ));
        }
        let file = File::open(path).map_err(|source| Error::io("opening", path, source))?;
        Self::new(file).map_err(|source| Error::io("reading the length of", path, source))
    }

    /// Takes over an open file.
    ///
    /// # Errors
    /// What the system reports when asked for the length.
    pub fn new(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self { file, len })
    }
}

impl ReadAt for FileReader {
    fn size(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        read_file(&self.file, offset, buf)
    }
}

#[cfg(unix)]
fn read_file(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buf, offset)
}

/// Windows moves the file's cursor as well, but reads at the offset asked for, so threads do not disturb
/// each other.
#[cfg(windows)]
fn read_file(file: &File, mut offset: u64, mut buf: &mut [u8]) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !buf.is_empty() {
        match file.seek_read(buf, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                buf = &mut buf[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to a file, from `offset` on; other threads may write elsewhere in it at the same time.
#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// As on Unix; the file's cursor moves as well.
#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !bytes.is_empty() {
        match file.seek_write(bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
            assert!(matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput));
        }
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
