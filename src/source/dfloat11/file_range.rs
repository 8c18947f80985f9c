//! An array of a checkpoint, where it lies.

use std::{io, sync::Arc};

use crate::{Error, Result, io::ReadAt};

/// The remedy for a damaged checkpoint.
pub(super) const AGAIN: &str = "download the checkpoint again";

/// A range of a file.
pub(super) struct FileRange {
    /// What it is, for messages.
    pub(super) path: String,
    pub(super) reader: Arc<dyn ReadAt>,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl FileRange {
    /// An error about its bytes from this one on.
    pub(super) fn damaged(&self, offset: u64, problem: impl std::fmt::Display) -> Error {
        Error::corrupt(&self.path, offset, problem).remedied(AGAIN)
    }

    /// Fills `buf` with the bytes from `offset` on; an error if it has fewer.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let inside = offset.checked_add(buf.len() as u64).is_some_and(|end| end <= self.length);
        let read = if inside {
            self.reader.read_exact_at(self.offset + offset, buf)
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        };
        read.map_err(|source| Error::io("reading", &self.path, source))
    }
}
