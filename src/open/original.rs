//! The original files of a model: what the prefix of a weights file says about its tensors, and the
//! file's bytes, in order and in bounded memory, to restore it and to check its hash.

use std::{borrow::Cow, mem, ops::Range, sync::Arc};

use rayon::prelude::*;

use super::{
    ahead::ReadAhead,
    decoder::{Decoder, PIECE_BYTES, PreparedTensor},
    shard::Shard,
    tensor::Tensor,
};
use crate::{
    Dtype, Error, Result,
    constants::CHECKSUM_CHUNK_BYTES,
    format::records::{ArrayRecord, FILE_BESIDE, FILE_WEIGHTS, FileRecord, TensorRecord},
    parallel,
    source::{HeaderTensor, SourceTensor, WeightsFile, read_header},
};

/// A file that a model was made of. Cheap to copy.
#[derive(Clone, Copy)]
pub(crate) struct OriginalFile<'m> {
    shard: &'m Shard,
    index: usize,
}

impl Shard {
    /// The original files that it records, in the order of the directory.
    pub(super) fn files(&self) -> impl Iterator<Item = OriginalFile<'_>> {
        (0..self.directory.files.len()).map(|index| OriginalFile { shard: self, index })
    }
}

impl<'m> OriginalFile<'m> {
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
        self.shard.check_hash(format_args!("file {:?}", self.path()), hash, self.record().hash)
    }

    /// Hands on the bytes of a side file that is stored, some at a time.
    pub(crate) fn stream(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut scratch = Vec::new();
        self.record().array_range().try_for_each(|array| {
            let length = self.shard.directory().arrays[array].length.get();
            parallel::cut(0..length, CHECKSUM_CHUNK_BYTES, 1).try_for_each(|range| {
                take(self.shard.read_array_with(array, range, &mut scratch)?)
            })
        })
    }

    /// The tensors of a weights file, ascending by name.
    pub(super) fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'m>> + use<'m> {
        let shard = self.shard;
        shard.tensors_of(self.index).iter().map(|&index| Tensor::new(shard, index))
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
    /// (spec/format.md, section 7). Nothing can be read from the result.
    pub(crate) fn description(&self) -> Result<WeightsFile> {
        let (prefix, header) = self.check_header()?;
        WeightsFile::described(self.path(), Arc::new(Vec::new()), self.length(), prefix, header)
    }

    /// Checks that the header of a weights file describes the tensors of the directory, those of a
    /// newer version too. Returns the prefix, and the tensors in it.
    pub(super) fn check_header(&self) -> Result<(Vec<u8>, Vec<HeaderTensor>)> {
        let (directory, path) = (self.shard.directory(), self.path());
        let bytes = self.prefix()?.into_owned();
        let header =
            read_header(path, &bytes, self.length()).map_err(|error| self.wrong_prefix(error))?;
        for tensor in &header {
            let found = directory.find_tensor(&tensor.name).map(|index| &directory.tensors[index]);
            if !found.is_some_and(|record| self.has(record, tensor, bytes.len() as u64)) {
                let name = &tensor.name;
                let problem = format!("directory and header of {path:?} differ in tensor {name:?}");
                return Err(self.wrong_prefix(problem));
            }
        }
        let (count, described) = (self.tensors().len(), header.len());
        Error::unless(count == described, || {
            self.wrong_prefix(format_args!(
                "the header of {path:?} has {described} tensors, the directory {count}"
            ))
        })?;
        Ok((bytes, header))
    }

    /// Whether record and header describe one tensor of this file. The header was checked for
    /// itself, so its lengths are those of its dtypes and shapes.
    fn has(&self, record: &TensorRecord, tensor: &HeaderTensor, prefix: u64) -> bool {
        record.file.get() == self.index as u64
            && Dtype::from_id(record.dtype.get()) == tensor.dtype()
            && record.dimensions() == tensor.shape
            && record.file_offset.get().checked_sub(prefix) == Some(tensor.data.0)
    }

    fn wrong_prefix(&self, problem: impl std::fmt::Display) -> Error {
        Error::corrupt("prefix section", self.array().offset.get(), problem)
    }
}

/// Decodes a weights file, some MiB at a time.
pub(crate) struct FilePieces<'m> {
    file: OriginalFile<'m>,
    decoder: &'m dyn Decoder,
    /// The tensors of the file, in its order.
    tensors: Vec<Tensor<'m>>,
    /// The tensor to go on with, and from which of its bytes on.
    next: (usize, u64),
    started: bool,
    /// Told when the first tensor is read.
    ahead: Option<ReadAhead>,
    prepared: Option<(usize, Arc<dyn PreparedTensor + 'm>)>,
}

/// Consecutive bytes of a file, and the tensors that they belong to.
pub(crate) struct Batch<'m> {
    pub(crate) bytes: Vec<u8>,
    /// The bytes of `bytes` that belong to each tensor; the prefix to none.
    pub(crate) parts: Vec<TensorPart<'m>>,
}

/// Part of a tensor; all of one without bytes.
pub(crate) struct TensorPart<'m> {
    pub(crate) tensor: Tensor<'m>,
    /// Its bytes, counted from the tensor's start.
    pub(crate) range: Range<u64>,
    pub(super) prepared: Arc<dyn PreparedTensor + 'm>,
}

impl<'m> FilePieces<'m> {
    /// Prepares a weights file and checks that its tensors cover it (section 7), and that all can
    /// be decoded.
    pub(crate) fn new(file: OriginalFile<'m>, decoder: &'m dyn Decoder) -> Result<Self> {
        let place = |tensor: Tensor<'m>| {
            Ok((tensor.record().file_offset.get(), tensor.byte_length()?, tensor))
        };
        let mut tensors: Vec<_> = file.tensors().map(place).collect::<Result<_>>()?;
        // A tensor without bytes goes before what starts where it does.
        tensors.sort_by_key(|&(start, length, _)| (start, length));
        let places = tensors.iter().map(|&(start, length, _)| (start, length));
        check_cover(file, places)?;
        file.tensors().try_for_each(|tensor| tensor.check_known())?;
        let tensors = tensors.into_iter().map(|(.., tensor)| tensor).collect();
        Ok(Self {
            file,
            decoder,
            tensors,
            next: (0, 0),
            started: false,
            ahead: None,
            prepared: None,
        })
    }

    /// Prepares what this version knows of a file that cannot be restored as a whole: some tensors,
    /// in the order of the directory, without the prefix.
    pub(super) fn of_known(file: OriginalFile<'m>, decoder: &'m dyn Decoder) -> Self {
        let tensors = file.tensors().filter(|tensor| tensor.check_known().is_ok()).collect();
        Self { file, decoder, tensors, next: (0, 0), started: true, ahead: None, prepared: None }
    }

    /// The next bytes of the file, in a buffer of any content: the prefix alone, then a piece for
    /// each thread; `None` at the end. `made` is called with bytes and their offset in the file, by
    /// the thread that decoded them, while they are in its cache.
    pub(crate) fn next_batch(
        &mut self,
        mut bytes: Vec<u8>,
        made: &(dyn Fn(u64, &[u8]) -> Result<()> + Sync),
    ) -> Result<Option<Batch<'m>>> {
        if !self.started {
            self.started = true;
            bytes.clear();
            bytes.extend_from_slice(&self.file.prefix()?);
            made(0, &bytes)?;
            return Ok(Some(Batch { bytes, parts: Vec::new() }));
        }
        let parts = self.take_parts()?;
        if parts.is_empty() {
            return Ok(None);
        }
        let lengths = parts.iter().map(|part| part.range.end - part.range.start);
        bytes.resize(lengths.clone().sum::<u64>() as usize, 0);
        let outputs: Vec<_> = parts.iter().zip(parallel::split(&mut bytes, lengths)).collect();
        outputs.into_par_iter().try_for_each(|(part, out)| {
            part.prepared.read(part.range.clone(), out)?;
            made(part.tensor.record().file_offset.get() + part.range.start, out)
        })?;
        Ok(Some(Batch { bytes, parts }))
    }

    /// Hands all batches to `take`, in order, and decodes the next one meanwhile; with one thread,
    /// afterwards.
    pub(super) fn for_each(
        mut self,
        mut take: impl FnMut(&Batch<'m>) -> Result<()> + Send,
    ) -> Result<()> {
        let mut batch = Batch { bytes: Vec::new(), parts: Vec::new() };
        let mut spare = Vec::new();
        loop {
            let buffer = mem::take(&mut spare);
            let (taken, next) =
                rayon::join(|| take(&batch), || self.next_batch(buffer, &|_, _| Ok(())));
            taken?;
            let Some(next) = next? else { return Ok(()) };
            spare = mem::replace(&mut batch, next).bytes;
        }
    }

    /// The parts of the next batch: together as many bytes as there are threads, times a piece, or
    /// a grain if that is more. A cut goes between grains, and so between elements.
    fn take_parts(&mut self) -> Result<Vec<TensorPart<'m>>> {
        let tensors = &self.tensors;
        self.ahead.get_or_insert_with(|| ReadAhead::of(tensors.iter().copied()));
        let threads = rayon::current_num_threads() as u64;
        let (mut parts, mut taken) = (Vec::new(), 0);
        while let Some(&tensor) = self.tensors.get(self.next.0) {
            let (index, start) = self.next;
            let prepared = match &self.prepared {
                Some((of, prepared)) if *of == index => Arc::clone(prepared),
                _ => self.decoder.prepare(tensor)?.into(),
            };
            self.prepared = Some((index, Arc::clone(&prepared)));
            let (length, grain) = (tensor.byte_length()?, prepared.grain());
            let room = (PIECE_BYTES.max(grain) * threads).saturating_sub(taken);
            if room < grain {
                break;
            }
            let mut ranges = parallel::cut(start..length, PIECE_BYTES.min(room), grain);
            let range = ranges.next().unwrap_or_default();
            taken += range.end - range.start;
            self.next = if range.end == length { (index + 1, 0) } else { (index, range.end) };
            parts.push(TensorPart { tensor, range, prepared });
        }
        Ok(parts)
    }
}

/// Tensors that start here and have these lengths, in bytes, cover the file after its prefix.
fn check_cover(file: OriginalFile<'_>, places: impl Iterator<Item = (u64, u64)>) -> Result<()> {
    let mut position = file.array().length.get();
    for (start, length) in places.chain([(file.length(), 0)]) {
        if start != position {
            let path = file.path();
            let problem = format!("no tensor, or more than one, holds byte {position} of {path:?}");
            return Err(Error::corrupt("directory", 0, problem).in_file(file.shard().path()));
        }
        position += length;
    }
    Ok(())
}

/// The hash of a tensor of a safetensors file, of which it reads 4 MiB at a time.
pub(super) fn hash_tensor(file: &WeightsFile, tensor: &SourceTensor) -> Result<blake3::Hash> {
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), Vec::new());
    for part in parallel::cut(0..tensor.length, 4 << 20, 1) {
        bytes.resize((part.end - part.start) as usize, 0);
        file.read_exact_at(tensor.offset + part.start, &mut bytes)?;
        hash(&mut hasher, &bytes);
    }
    Ok(hasher.finalize())
}

/// Hashes bytes on all threads of the pool.
pub(crate) fn hash(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    if rayon::current_num_threads() == 1 {
        hasher.update(bytes);
    } else {
        hasher.update_rayon(bytes);
    }
}
