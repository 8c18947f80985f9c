//! The bytes of an original weights file, in the file's order and in bounded memory: what restores
//! files and proves identity.

use std::{mem, ops::Range, sync::Arc};

use rayon::prelude::*;

use super::{Decoder, OriginalFile, PreparedTensor, Tensor, reader::PIECE_BYTES};
use crate::{Error, Result, parallel};

/// Decodes a weights file, some MiB at a time.
pub(crate) struct FilePieces<'m> {
    file: OriginalFile<'m>,
    decoder: &'m dyn Decoder,
    /// The tensors of the file, in its order.
    tensors: Vec<Tensor<'m>>,
    /// The tensor to go on with, and from which of its bytes on.
    next: (usize, u64),
    started: bool,
    prepared: Option<(usize, Arc<dyn PreparedTensor + 'm>)>,
}

/// Called with bytes of the file and their offset in it, by the thread that decoded them, while
/// they are in that thread's cache.
pub(crate) type Made<'a> = &'a (dyn Fn(u64, &[u8]) -> Result<()> + Sync);

/// Consecutive bytes of a file, and the tensors that they belong to.
pub(crate) struct Batch<'m> {
    /// The bytes.
    pub(crate) bytes: Vec<u8>,
    /// The bytes of `bytes` that belong to each tensor; the prefix to none.
    pub(crate) parts: Vec<TensorPart<'m>>,
}

/// Part of a tensor.
#[derive(Clone)]
pub(crate) struct TensorPart<'m> {
    pub(crate) tensor: Tensor<'m>,
    /// Its bytes, counted from the tensor's start.
    pub(crate) range: Range<u64>,
    prepared: Arc<dyn PreparedTensor + 'm>,
}

impl TensorPart<'_> {
    /// Whether it is the last one of its tensor.
    pub(crate) fn is_last(&self) -> Result<bool> {
        Ok(self.range.end == self.tensor.byte_length()?)
    }

    /// Checks all of the index that decoding this part does not use.
    pub(super) fn verify_index(&self) -> Result<()> {
        self.prepared.verify_index(self.range.clone())
    }
}

impl<'m> FilePieces<'m> {
    /// Prepares a weights file and checks that its tensors cover it (section 7), and that all can
    /// be decoded.
    pub(crate) fn new(file: OriginalFile<'m>, decoder: &'m dyn Decoder) -> Result<Self> {
        let with_length = |tensor: Tensor<'m>| Ok((tensor, tensor.byte_length()?));
        let mut tensors: Vec<_> = file.tensors().map(with_length).collect::<Result<_>>()?;
        // A tensor without bytes goes before what starts where it does.
        tensors.sort_by_key(|(tensor, length)| (tensor.record().file_offset.get(), *length));
        check_cover(file, &tensors)?;
        file.tensors().try_for_each(|tensor| tensor.check_known())?;
        let tensors = tensors.into_iter().filter(|&(_, length)| length > 0);
        let tensors = tensors.map(|(tensor, _)| tensor).collect();
        Ok(Self { file, decoder, tensors, next: (0, 0), started: false, prepared: None })
    }

    /// The next bytes of the file, in a buffer of any content: the prefix alone, then a piece for
    /// each thread; `None` at the end.
    pub(crate) fn next_batch(
        &mut self,
        mut bytes: Vec<u8>,
        made: Made<'_>,
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
    /// a grain where that is more.
    fn take_parts(&mut self) -> Result<Vec<TensorPart<'m>>> {
        let threads = rayon::current_num_threads() as u64;
        let (mut parts, mut taken) = (Vec::new(), 0);
        while let Some(&tensor) = self.tensors.get(self.next.0) {
            let (index, start) = self.next;
            let prepared = self.prepare(index, tensor)?;
            let (length, grain) = (tensor.byte_length()?, prepared.grain());
            let room = (PIECE_BYTES.max(grain) * threads).saturating_sub(taken);
            let mut end = parallel::piece_end(start, length, PIECE_BYTES, grain);
            if end - start > room {
                // A cut goes between grains, and so between elements.
                end = (start + room) / grain * grain;
            }
            if end <= start {
                break;
            }
            parts.push(TensorPart { tensor, range: start..end, prepared });
            taken += end - start;
            self.next = if end == length { (index + 1, 0) } else { (index, end) };
        }
        Ok(parts)
    }

    /// Prepares a tensor, or finds that it is.
    fn prepare(
        &mut self,
        index: usize,
        tensor: Tensor<'m>,
    ) -> Result<Arc<dyn PreparedTensor + 'm>> {
        if let Some((_, prepared)) = self.prepared.as_ref().filter(|(of, _)| *of == index) {
            return Ok(Arc::clone(prepared));
        }
        let prepared: Arc<dyn PreparedTensor + 'm> = self.decoder.prepare(tensor)?.into();
        self.prepared = Some((index, Arc::clone(&prepared)));
        Ok(prepared)
    }
}

/// Tensors with their lengths in bytes cover the file after its prefix.
fn check_cover(file: OriginalFile<'_>, tensors: &[(Tensor<'_>, u64)]) -> Result<()> {
    let hole = |position: u64| {
        let path = file.path();
        let problem = format!("no tensor, or more than one, holds byte {position} of {path:?}");
        Err(Error::corrupt("directory", 0, problem).in_file(file.shard().path()))
    };
    let mut position = file.prefix_length();
    for (tensor, length) in tensors {
        let start = tensor.record().file_offset.get();
        if start != position {
            return hole(position);
        }
        position += length;
    }
    if position == file.length() { Ok(()) } else { hole(position) }
}
