//! An original weights file as its prefix describes it, whose tensors are stored in a container.

use std::{io, sync::Arc};

use super::Shard;
use crate::{Error, Result, io::ReadAt, source::WeightsFile};

/// Reads the prefix of a weights file and checks that it describes the same tensors as the directory (spec/format.md, section 7). Only the
/// prefix can be read from the result.
///
/// # Errors
/// [`Error::Corrupt`] for a wrong prefix; [`Error::Unsupported`] for one that names a dtype of a newer version; [`Error::Io`].
pub(crate) fn original(shard: &Shard, file: usize) -> Result<WeightsFile> {
    let directory = shard.directory();
    let record = &directory.files[file];
    let path = directory.file_path(record);
    let array = record.array_range().start;
    let length = directory.arrays[array].length.get();
    let bytes = shard.read_array(array, 0..length)?.into_owned();
    let reader = Arc::new(PrefixReader { bytes, length: record.length.get() });
    let wrong = |problem: String| wrong_prefix(shard, file, problem);
    let header = WeightsFile::parse(path, reader).map_err(|error| match error {
        Error::Unsupported { .. } => error,
        error => wrong(error.to_string()),
    })?;
    if header.prefix.len() as u64 != length {
        return Err(wrong(format!("the prefix of {path:?} has {} bytes, not {length}", header.prefix.len())));
    }
    for tensor in &header.tensors {
        let found = directory.find_tensor(&tensor.name).map(|index| &directory.tensors[index]);
        let same = found.is_some_and(|record| {
            record.file.get() == file as u64
                && record.dtype.get() == tensor.dtype.id()
                && record.dimensions() == tensor.shape
                && record.file_offset.get() == tensor.offset
        });
        if !same {
            return Err(wrong(format!(
                "directory and header of {path:?} differ in tensor {:?}",
                tensor.name
            )));
        }
    }
    let count = shard.tensors_of(file).len();
    if count == header.tensors.len() {
        return Ok(header);
    }
    Err(wrong(format!("the header of {path:?} has {} tensors, the directory {count}", header.tensors.len())))
}

/// An error about the prefix of a weights file.
pub(super) fn wrong_prefix(shard: &Shard, file: usize, problem: impl std::fmt::Display) -> Error {
    let directory = shard.directory();
    let array = directory.files[file].array_range().start;
    Error::corrupt("prefix section", directory.arrays[array].offset.get(), problem)
}

/// A weights file of which only the prefix is there.
struct PrefixReader {
    bytes: Vec<u8>,
    length: u64,
}

impl ReadAt for PrefixReader {
    fn size(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.bytes.read_exact_at(offset, buf)
    }
}
