//! A block of an open model.

use std::ops::Range;

use rayon::prelude::*;

use super::{Cpu, Decoder, Model, PreparedTensor, Tensor, decoder::pieces, model::BlockEntry};
use crate::{
    Error, Result,
    constants::{ARRAY_ALIGNMENT, align},
};

/// The tensors that a model uses together, usually one transformer layer. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Block<'m> {
    model: &'m Model,
    entry: &'m BlockEntry,
}

/// Where each tensor of a block goes in one buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Size of the buffer, in bytes.
    pub bytes: u64,
    /// The bytes of each tensor, in the order of [`Block::tensors`]. Each starts on a multiple of
    /// 256: libraries choose their kernels by alignment, and so may a result's bits depend on it.
    pub tensors: Vec<Range<u64>>,
}

impl<'m> Block<'m> {
    pub(super) fn new(model: &'m Model, entry: &'m BlockEntry) -> Self {
        Self { model, entry }
    }

    /// Its name.
    pub fn name(&self) -> &'m str {
        &self.entry.name
    }

    /// Its tensors, shard by shard, ascending by name in each.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'m>> + use<'m> {
        let model = self.model;
        self.entry
            .tensors
            .iter()
            .map(move |&(shard, index)| Tensor::new(&model.shards()[shard], index))
    }

    /// Shard and index of each of its tensors, in the order of [`Block::tensors`].
    #[cfg(feature = "cudarc")]
    pub(crate) fn tensor_ids(&self) -> &'m [(usize, usize)] {
        &self.entry.tensors
    }

    /// Bytes of all its arrays.
    pub fn stored_bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Where each tensor goes in a buffer for [`Block::decode_into`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a tensor has a dtype of a newer version; [`Error::Limit`] if the
    /// size exceeds 2^64 − 1.
    pub fn layout(&self) -> Result<BlockLayout> {
        let mut bytes = 0u64;
        let mut tensors = Vec::with_capacity(self.entry.tensors.len());
        for tensor in self.tensors() {
            // Tensors that cannot be decoded, and aliases, may be of any size.
            let length = tensor.byte_length()?;
            let range =
                align(bytes, ARRAY_ALIGNMENT).and_then(|at| Some(at..at.checked_add(length)?));
            let range = range.ok_or_else(|| Error::overflow("the size of a block in bytes"))?;
            bytes = range.end;
            tensors.push(range);
        }
        Ok(BlockLayout { bytes, tensors })
    }

    /// Decodes all tensors into one buffer of [`BlockLayout::bytes`], on all threads. Bytes between
    /// tensors become zero.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a buffer of another length; otherwise as
    /// [`Tensor::decode_into`].
    pub fn decode_into(&self, buffer: &mut [u8]) -> Result<()> {
        self.decode_with(&Cpu, buffer)
    }

    /// As [`Block::decode_into`], with another decoder than the CPU.
    ///
    /// # Errors
    /// As [`Block::decode_into`], and what the decoder answers.
    pub fn decode_with(&self, decoder: &dyn Decoder, buffer: &mut [u8]) -> Result<()> {
        let layout = self.layout()?;
        if buffer.len() as u64 != layout.bytes {
            let (name, needed, given) = (self.name(), layout.bytes, buffer.len());
            let problem = format!("block {name:?} needs a buffer of {needed} bytes, not {given}");
            return Err(Error::parameter(problem, "ask Block::layout for the size"));
        }
        let tensors: Vec<Box<dyn PreparedTensor + '_>> =
            self.tensors().map(|tensor| decoder.prepare(tensor)).collect::<Result<_>>()?;
        let mut parts = Vec::new();
        let (mut rest, mut position) = (buffer, 0);
        for (tensor, range) in tensors.iter().zip(&layout.tensors) {
            let (padding, after) = rest.split_at_mut((range.start - position) as usize);
            padding.fill(0);
            let (out, after) = after.split_at_mut((range.end - range.start) as usize);
            let length = out.len() as u64;
            let pieces = pieces(0..length, tensor.grain(), out).into_iter();
            parts.extend(pieces.map(|(range, out)| (tensor, range, out)));
            (rest, position) = (after, range.end);
        }
        parts.into_par_iter().try_for_each(|(tensor, range, out)| tensor.read(range, out))
    }
}
