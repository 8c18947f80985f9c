//! Computes what each block of a model needs on a GPU, from the directories alone.

use super::linear::task::{ENTRY_BYTES, fast_bytes, good_exceptions};
use super::task::{GAP_TABLE_BYTES, TILE_TABLE_BYTES};
use crate::constants::{ARRAY_ALIGNMENT, SECTION_ALIGNMENT, align};
use crate::{Block, Encoding, Model, Result, Tensor, encoding::tile::TileSizes, format::Coded};

/// Most columns of a matrix that is loaded fast: a strip with more might not fit a slot.
const MAX_LOADED_COLUMNS: u64 = 1 << 16;

/// The index of a shard, and of a section, tensor or array in its directory. The compiler takes
/// these for one type.
pub(super) type SectionId = (usize, usize);
pub(super) type TensorId = (usize, usize);
pub(super) type ArrayId = (usize, usize);

/// How a [`Matrix`](super::Matrix) lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Residence {
    /// In the arrays of the container, about 10.6 bits per weight: the smallest.
    Stored,
    /// In the fast layout, about 12.1 bits per weight: the fastest to multiply by.
    Fast,
}

/// Memory and tasks that decoding one block takes.
#[derive(Debug)]
pub(super) struct Needs {
    pub(super) stored: Footprint,
    /// Footprint with its matrices in the fast layout; `None` if it has no such matrix.
    pub(super) fast: Option<Footprint>,
    /// Number of tensors; each takes a task or a copy.
    pub(super) tensors: u64,
    pub(super) decoded_bytes: u64,
}

/// Sections and arrays of a block in device memory, each with its size there.
#[derive(Debug, Default)]
pub(super) struct Footprint {
    /// Whole sections, ascending, except codebooks: the host reads these, and copies what decode
    /// tables are made of. All arrays of these sections belong to this block.
    pub(super) sections: Vec<(SectionId, u64)>,
    /// Arrays of other sections.
    pub(super) arrays: Vec<(ArrayId, u64)>,
    /// Matrices for the fast layout. The room also suffices for one that has too many exceptions
    /// and stays as stored.
    pub(super) matrices: Vec<(TensorId, u64)>,
    /// Decode tables of tensors that kernels decode, and tensors that the host decodes.
    pub(super) tables: Vec<(TensorId, u64)>,
    /// Most bytes of everything except decode tables, whether matrices become fast or stay as
    /// stored.
    pub(super) bytes: u64,
    /// Bytes of the containers that loading it reads.
    pub(super) loaded_bytes: u64,
}

/// Length of a section in its container, in bytes.
pub(super) fn section_length(model: &Model, (shard, section): SectionId) -> u64 {
    model.shards()[shard].directory().sections[section].length.get()
}

pub(super) fn array_length(model: &Model, (shard, array): ArrayId) -> u64 {
    model.shards()[shard].directory().arrays[array].length.get()
}

/// Bytes that an array takes in device memory, a multiple of [`ARRAY_ALIGNMENT`].
pub(super) fn array_bytes(model: &Model, array: ArrayId) -> u64 {
    array_length(model, array).next_multiple_of(ARRAY_ALIGNMENT)
}

/// The needs of each block; [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a
/// newer version.
pub(super) fn of_blocks(model: &Model) -> Result<Vec<Needs>> {
    let of = |block: Block<'_>| {
        let ids = block.tensor_ids();
        ids.iter().try_for_each(|&id| model.tensor_at(id).check_known())?;
        Ok(Needs {
            stored: Footprint::stored(model, ids),
            fast: Footprint::fast(model, ids)?,
            tensors: ids.len() as u64,
            decoded_bytes: block.layout()?.bytes,
        })
    };
    model.blocks().map(of).collect()
}

impl Needs {
    /// The footprint with its matrices in this residence.
    pub(super) fn footprint(&self, residence: Residence) -> &Footprint {
        let fast = self.fast.as_ref().filter(|_| residence == Residence::Fast);
        fast.unwrap_or(&self.stored)
    }
}

impl Footprint {
    fn stored(model: &Model, ids: &[TensorId]) -> Self {
        let section = |(shard, array): ArrayId| {
            let directory = model.shards()[shard].directory();
            (shard, directory.arrays[array].section.get() as usize)
        };
        let arrays = ids.iter().flat_map(|&id| arrays_of(model, id));
        let mut sections: Vec<SectionId> = arrays.map(section).collect();
        sections.sort_unstable();
        sections.dedup();
        let bytes = |id| {
            let length = section_length(model, id);
            // No overflow: the sections of a file lie below 2^63.
            align(length, SECTION_ALIGNMENT).unwrap_or(length)
        };
        let loaded = sections.iter().map(|&id| section_length(model, id));
        let decoded = ids.iter().filter_map(|&id| decoded_length(model, id));
        let loaded_bytes = loaded.chain(decoded).sum();
        let sections: Vec<_> = sections.into_iter().map(|id| (id, bytes(id))).collect();
        let tables = ids.iter().filter_map(|&id| table_of(model, id)).collect();
        let bytes = sections.iter().map(|(_, bytes)| bytes).sum();
        Self { sections, tables, bytes, loaded_bytes, ..Self::default() }
    }

    fn fast(model: &Model, ids: &[TensorId]) -> Result<Option<Self>> {
        let mut all = Self::default();
        for &id in ids {
            let tensor = model.tensor_at(id);
            if tensor.encoding() == Encoding::Alias {
                continue;
            }
            let lengths = arrays_of(model, id).map(|array| array_length(model, array));
            all.loaded_bytes += lengths.chain(decoded_length(model, id)).sum::<u64>();
            let arrays = arrays_of(model, id).map(|array| (array, array_bytes(model, array)));
            let stored: u64 = arrays.clone().map(|(_, bytes)| bytes).sum();
            let Some(sizes) = fast_sizes(&tensor)? else {
                all.arrays.extend(arrays);
                all.tables.extend(table_of(model, id));
                all.bytes += stored;
                continue;
            };
            let strips_bytes = fast_bytes(sizes.geometry().rows(), sizes.geometry().columns());
            let place_bytes = strips_bytes.max(stored + TILE_TABLE_BYTES);
            let place_bytes = place_bytes.next_multiple_of(ARRAY_ALIGNMENT);
            all.matrices.push((id, place_bytes));
            let exceptions = ENTRY_BYTES * good_exceptions(sizes.elements());
            all.bytes += place_bytes + exceptions.next_multiple_of(ARRAY_ALIGNMENT);
        }
        Ok((!all.matrices.is_empty()).then_some(all))
    }

    pub(super) fn table_bytes(&self) -> u64 {
        self.tables.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// The sizes of a tensor that becomes fast while it is loaded, unless it has too many exceptions.
fn fast_sizes(tensor: &Tensor<'_>) -> Result<Option<TileSizes>> {
    let Some(Coded::Tile(sizes) | Coded::Float(sizes)) = tensor.coded()? else { return Ok(None) };
    let geometry = sizes.geometry();
    let is_matrix = sizes.split().is_bf16()
        && geometry.is_matrix_of(&tensor.shape())
        && geometry.columns() <= MAX_LOADED_COLUMNS
        && u32::try_from(geometry.elements()).is_ok();
    Ok(is_matrix.then_some(sizes))
}

/// Whether the host decodes tensors of an encoding.
const fn is_decoded(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Delta)
}

/// Bytes of a tensor that the host decodes, because no kernel does.
pub(super) fn decoded_length(model: &Model, id: TensorId) -> Option<u64> {
    let tensor = model.tensor_at(id);
    is_decoded(tensor.encoding()).then(|| tensor.byte_length().unwrap_or(0))
}

/// The decode table of a tensor, if a kernel decodes the tensor; or the place of a decoded one.
fn table_of(model: &Model, id: TensorId) -> Option<(TensorId, u64)> {
    match model.tensor_at(id).encoding() {
        Encoding::Gap => Some((id, GAP_TABLE_BYTES)),
        Encoding::Tile | Encoding::Float => Some((id, TILE_TABLE_BYTES)),
        Encoding::Delta => {
            let bytes = decoded_length(model, id)?.next_multiple_of(ARRAY_ALIGNMENT);
            Some((id, bytes))
        }
        Encoding::Alias | Encoding::Raw | Encoding::Unknown(_) => None,
    }
}

/// The arrays of a tensor that a GPU reads. An alias has none: its target is in the same block
/// (spec/format.md, section 6). Nor has a tensor that the host decodes. The host reads codebooks.
pub(super) fn arrays_of(model: &Model, id: TensorId) -> impl Iterator<Item = ArrayId> + Clone {
    let arrays = model.tensor_at(id).record().array_range();
    let on_host = match model.tensor_at(id).encoding() {
        encoding if is_decoded(encoding) => arrays.len(),
        _ => usize::from(table_of(model, id).is_some()),
    };
    (arrays.start + on_host..arrays.end).map(move |array| (id.0, array))
}
