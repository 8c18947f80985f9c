//! What each block of a model needs on a GPU, told by the directories alone.

use super::coding::Coding;
use crate::{
    Block, Model, Result, Tensor,
    constants::{SECTION_ALIGNMENT, align},
};

/// A section: the index of its shard, and its own.
pub(super) type SectionId = (usize, usize);
/// A tensor: the index of its shard, and its own.
pub(super) type TensorId = (usize, usize);

/// What decoding one block takes.
#[derive(Debug)]
pub(super) struct Needs {
    /// The sections that hold its tensors' arrays, ascending; codebooks are not needed on a GPU. No other block has arrays there.
    pub(super) sections: Vec<SectionId>,
    /// Their bytes in device memory.
    pub(super) section_bytes: u64,
    /// Its coded tensors, which need a decode table each.
    pub(super) coded: Vec<(TensorId, Coding)>,
    /// Tensors, of which each takes a task or a copy.
    pub(super) tensors: u64,
    /// Bytes of the block when it is decoded.
    pub(super) decoded_bytes: u64,
}

/// The tensor that holds a tensor's bytes.
pub(super) fn target_of(model: &Model, (shard, index): TensorId) -> TensorId {
    (shard, model.tensor_at((shard, index)).target().index())
}

/// Bytes of a section in its container.
pub(super) fn section_length(model: &Model, (shard, section): SectionId) -> u64 {
    model.shards()[shard].directory().sections[section].length.get()
}

/// Bytes that a section takes in device memory.
pub(super) fn section_bytes(model: &Model, section: SectionId) -> u64 {
    let length = section_length(model, section);
    // No overflow: the sections of a file lie below 2^63.
    align(length, SECTION_ALIGNMENT).unwrap_or(length)
}

/// The needs of all blocks, in the model's order.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version.
pub(super) fn of_blocks(model: &Model) -> Result<Vec<Needs>> {
    model.blocks().map(|block| Needs::of(model, block)).collect()
}

impl Needs {
    fn of(model: &Model, block: Block<'_>) -> Result<Self> {
        let ids = block.tensor_ids();
        ids.iter().try_for_each(|&id| model.tensor_at(id).check_known())?;
        let arrays = ids.iter().flat_map(|&(shard, index)| {
            let tensor = model.tensor_at((shard, index));
            let directory = tensor.shard().directory();
            arrays_of(&tensor).map(move |array| (shard, directory.arrays[array].section.get() as usize))
        });
        let mut sections: Vec<SectionId> = arrays.collect();
        sections.sort_unstable();
        sections.dedup();
        let coded = |&id: &TensorId| Coding::of(model.tensor_at(id).encoding()).map(|coding| (id, coding));
        Ok(Self {
            section_bytes: sections.iter().map(|&section| section_bytes(model, section)).sum(),
            sections,
            coded: ids.iter().filter_map(coded).collect(),
            tensors: ids.len() as u64,
            decoded_bytes: block.layout()?.bytes,
        })
    }
}

/// The arrays of a tensor that a GPU reads; none of an alias, whose target is in the same block (spec/format.md, section 6).
fn arrays_of(tensor: &Tensor<'_>) -> std::ops::Range<usize> {
    let arrays = tensor.record().array_range();
    if Coding::of(tensor.encoding()).is_some() { arrays.start + 1..arrays.end } else { arrays }
}
