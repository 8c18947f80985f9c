//! An original weights file as its prefix describes it, whose tensors are stored in a container.

use std::{io, sync::Arc};

use super::Shard;
use crate::{
    Dtype, Error, Result,
    format::records::TensorRecord,
    io::ReadAt,
    source::{Header, HeaderTensor, WeightsFile},
};

/// Reads the prefix of a weights file and checks that it describes the tensors of the directory
/// (spec/format.md, section 7). Only the prefix can be read from the result.
///
/// # Errors
/// [`Error::Corrupt`] for a wrong prefix; [`Error::Unsupported`] for one with a dtype of a newer
/// version; [`Error::Io`].
pub(crate) fn original(shard: &Shard, file: usize) -> Result<WeightsFile> {
    let prefix = check_header(shard, file)?;
    let record = &shard.directory().files[file];
    let reader = Arc::new(PrefixReader { bytes: prefix, length: record.length.get() });
    WeightsFile::parse(shard.directory().file_path(record), reader).map_err(|error| match error {
        Error::Unsupported { .. } => error,
        error => wrong_prefix(shard, file, error),
    })
}

/// Checks that the header of a weights file describes the tensors of the directory, those of a
/// newer version too. Returns the prefix.
///
/// # Errors
/// [`Error::Corrupt`] for a wrong prefix; [`Error::Io`].
pub(super) fn check_header(shard: &Shard, file: usize) -> Result<Vec<u8>> {
    let directory = shard.directory();
    let record = &directory.files[file];
    let path = directory.file_path(record);
    let array = record.array_range().start;
    let length = directory.arrays[array].length.get();
    let bytes = shard.read_array(array, 0..length)?.into_owned();
    let wrong = |problem: String| wrong_prefix(shard, file, problem);
    let header = Header::read(path, &bytes, record.length.get())
        .map_err(|error| wrong(error.to_string()))?;
    for tensor in &header.tensors {
        let found = directory.find_tensor(&tensor.name).map(|index| &directory.tensors[index]);
        if !found.is_some_and(|record| is_same(record, tensor, file, length)) {
            let name = &tensor.name;
            return Err(wrong(format!(
                "directory and header of {path:?} differ in tensor {name:?}"
            )));
        }
    }
    let (count, described) = (shard.tensors_of(file).len(), header.tensors.len());
    if count == described {
        return Ok(bytes);
    }
    Err(wrong(format!("the header of {path:?} has {described} tensors, the directory {count}")))
}

/// Whether record and header describe one tensor. The header was checked for itself, so its lengths
/// are those of its dtypes and shapes.
fn is_same(record: &TensorRecord, tensor: &HeaderTensor, file: usize, prefix: u64) -> bool {
    record.file.get() == file as u64
        && Dtype::from_id(record.dtype.get()) == tensor.dtype()
        && record.dimensions() == tensor.shape
        && record.file_offset.get().checked_sub(prefix) == Some(tensor.data.start)
}

/// An error about the prefix of a weights file.
fn wrong_prefix(shard: &Shard, file: usize, problem: impl std::fmt::Display) -> Error {
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
