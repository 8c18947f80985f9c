//! The original files of a model, and what the prefix of a weights file says of its tensors.

use std::{borrow::Cow, io, sync::Arc};

use super::{Shard, Tensor};
use crate::{
    Dtype, Error, Result,
    format::records::{ArrayRecord, FILE_BESIDE, FILE_WEIGHTS, FileRecord, TensorRecord},
    io::ReadAt,
    source::{Header, HeaderTensor, WeightsFile},
};

/// A file that a model was made of. Cheap to copy.
#[derive(Clone, Copy)]
pub(crate) struct OriginalFile<'m> {
    shard: &'m Shard,
    index: usize,
}

impl<'m> OriginalFile<'m> {
    pub(super) fn new(shard: &'m Shard, index: usize) -> Self {
        Self { shard, index }
    }

    /// The container that records it.
    pub(crate) fn shard(&self) -> &'m Shard {
        self.shard
    }

    pub(crate) fn record(&self) -> &'m FileRecord {
        &self.shard.directory().files[self.index]
    }

    pub(crate) fn path(&self) -> &'m str {
        self.shard.directory().file_path(self.record())
    }

    /// In bytes.
    pub(crate) fn length(&self) -> u64 {
        self.record().length.get()
    }

    pub(crate) fn is_weights(&self) -> bool {
        self.record().kind == FILE_WEIGHTS
    }

    /// Whether it lies beside the containers, and in none.
    pub(crate) fn is_beside(&self) -> bool {
        self.record().kind == FILE_BESIDE
    }

    /// Compares the hash of bytes that should be its own.
    pub(crate) fn check_hash(&self, hash: blake3::Hash) -> Result<()> {
        if hash == self.record().hash {
            return Ok(());
        }
        Err(self.shard.wrong_hash(format_args!("file {:?}", self.path())))
    }

    /// Hands on the bytes of a side file that is stored, some at a time.
    pub(crate) fn stream(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.record().array_range().try_for_each(|array| self.shard.stream_array(array, &mut take))
    }

    /// The tensors of a weights file, ascending by name.
    pub(super) fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'m>> + use<'m> {
        let shard = self.shard;
        shard.tensors_of(self.index).iter().map(|&index| Tensor::new(shard, index))
    }

    /// The length of a weights file's prefix, in bytes.
    pub(super) fn prefix_length(&self) -> u64 {
        self.array().length.get()
    }

    /// The array of a weights file: its prefix.
    fn array(&self) -> &'m ArrayRecord {
        &self.shard.directory().arrays[self.record().array_range().start]
    }

    /// The bytes of a weights file before its tensors.
    pub(super) fn prefix(&self) -> Result<Cow<'m, [u8]>> {
        self.shard.read_whole_array(self.record().array_range().start)
    }

    /// Reads the prefix of a weights file and checks that it describes the tensors of the directory
    /// (spec/format.md, section 7). Only the prefix can be read from the result.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a wrong prefix; [`Error::Unsupported`] for one with a dtype of a
    /// newer version; [`Error::Io`].
    pub(crate) fn description(&self) -> Result<WeightsFile> {
        let reader = PrefixReader { bytes: self.check_header()?, length: self.length() };
        WeightsFile::parse(self.path(), Arc::new(reader)).map_err(|error| match error {
            Error::Unsupported { .. } => error,
            error => self.wrong_prefix(error),
        })
    }

    /// Checks that the header of a weights file describes the tensors of the directory, those of a
    /// newer version too. Returns the prefix.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a wrong prefix; [`Error::Io`].
    pub(super) fn check_header(&self) -> Result<Vec<u8>> {
        let (directory, path) = (self.shard.directory(), self.path());
        let bytes = self.prefix()?.into_owned();
        let header =
            Header::read(path, &bytes, self.length()).map_err(|error| self.wrong_prefix(error))?;
        for tensor in &header.tensors {
            let found = directory.find_tensor(&tensor.name).map(|index| &directory.tensors[index]);
            if !found.is_some_and(|record| self.has(record, tensor, bytes.len() as u64)) {
                let name = &tensor.name;
                let problem = format!("directory and header of {path:?} differ in tensor {name:?}");
                return Err(self.wrong_prefix(problem));
            }
        }
        let (count, described) = (self.tensors().len(), header.tensors.len());
        if count == described {
            return Ok(bytes);
        }
        Err(self.wrong_prefix(format_args!(
            "the header of {path:?} has {described} tensors, the directory {count}"
        )))
    }

    /// Whether record and header describe one tensor of this file. The header was checked for
    /// itself, so its lengths are those of its dtypes and shapes.
    fn has(&self, record: &TensorRecord, tensor: &HeaderTensor, prefix: u64) -> bool {
        record.file.get() == self.index as u64
            && Dtype::from_id(record.dtype.get()) == tensor.dtype()
            && record.dimensions() == tensor.shape
            && record.file_offset.get().checked_sub(prefix) == Some(tensor.data.start)
    }

    fn wrong_prefix(&self, problem: impl std::fmt::Display) -> Error {
        Error::corrupt("prefix section", self.array().offset.get(), problem)
    }
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
