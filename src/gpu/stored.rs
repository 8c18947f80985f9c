//! Tensors as a GPU needs them: where their arrays lie in sections, wherever those lie.

mod gap;
mod tile;

use std::{borrow::Cow, collections::HashMap, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

pub(super) use gap::StoredGap;
pub(super) use tile::StoredTile;

use super::{
    coding::KernelEncoding,
    linear::FastArrays,
    needs::{ArrayId, SectionId, TensorId},
    task::Task,
};
use crate::{
    Encoding, Model, Result, Tensor,
    encoding::stored::ReadArrays as _,
    format::Coded,
    open::{Rect, Shard},
};

/// The widest rows of which columns are copied at once, in bytes: the driver bears no longer pitch.
const MOST_PITCH: u64 = i32::MAX as u64;

/// Device addresses of arrays, and of decode tables, on one GPU.
pub(super) trait Addresses {
    /// The device address of the array at this place.
    fn array(&self, place: ArrayPlace) -> CUdeviceptr;
    /// The device address of a coded tensor's decode table.
    fn table(&self, tensor: TensorId) -> CUdeviceptr;
    /// The arrays of a tensor that lies in the fast layout there.
    fn fast(&self, _: TensorId) -> Option<&Arc<FastArrays>> {
        None
    }
}

/// Where an array lies in its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ArrayPlace {
    pub(super) section: SectionId,
    /// From the section's start.
    pub(super) offset: u64,
}

impl ArrayPlace {
    /// Of a tensor's array, counted from its first one.
    fn of(tensor: &Tensor<'_>, shard: usize, array: usize) -> Self {
        Self::of_array(tensor.shard(), (shard, tensor.record().array_range().start + array))
    }

    /// Of an array of this shard.
    pub(super) fn of_array(shard: &Shard, (number, array): ArrayId) -> Self {
        let record = &shard.directory().arrays[array];
        Self { section: (number, record.section.get() as usize), offset: record.offset.get() }
    }
}

/// A tensor's bytes, as they are stored; of no alias.
#[derive(Debug)]
pub(super) enum Stored {
    /// No bytes.
    Empty,
    /// The bytes themselves.
    Raw(ArrayPlace),
    /// The arrays of an encoding with kernels.
    Coded(Box<dyn CodedTensor>),
}

/// A tensor that a kernel decodes.
pub(super) trait CodedTensor: std::fmt::Debug + Send + Sync {
    fn coding(&self) -> KernelEncoding;

    /// Which of the decode kernels.
    fn kernel(&self) -> usize;

    /// What its decode table is made of.
    fn codebook(&self) -> &[u8];

    /// Shared memory that each warp of its kernel needs for it, in bytes, besides what it always
    /// takes.
    fn staged_bytes(&self) -> u32 {
        0
    }

    /// Whether one task decodes this rectangle of its bytes; any does that lies in one piece.
    fn takes(&self, rect: &Rect) -> bool {
        rect.is_run()
    }

    /// Itself, if it is in tiles.
    fn as_tile(&self) -> Option<&StoredTile> {
        None
    }

    /// The task that decodes a rectangle that it [takes](Self::takes) to `output`, after others of
    /// this many units, and its own units.
    fn task(
        &self,
        rect: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &dyn Addresses,
    ) -> Result<(Task, u64)>;
}

/// Tensors that are no aliases.
pub(super) type Tensors = HashMap<TensorId, Arc<Stored>>;

/// Of these tensors all that are no aliases. Codebooks, output offsets and the records' offsets are
/// validated, unless a test wants none of that.
///
/// # Errors
/// [`Error::Corrupt`] if one is malformed; [`Error::Io`].
pub(super) fn read_all(
    model: &Model,
    tensors: impl Iterator<Item = TensorId>,
    validate: bool,
) -> Result<Tensors> {
    let all: Vec<TensorId> =
        tensors.filter(|&id| model.tensor_at(id).encoding() != Encoding::Alias).collect();
    let stored =
        all.into_par_iter().map(|id| Ok((id, Arc::new(Stored::read(model, id, validate)?))));
    stored.collect()
}

impl Stored {
    fn read(model: &Model, id: TensorId, validate: bool) -> Result<Self> {
        let tensor = model.tensor_at(id);
        Ok(match tensor.coded()? {
            Some(Coded::Gap(sizes)) => {
                Self::Coded(Box::new(StoredGap::read(&tensor, id, sizes, validate)?))
            }
            Some(Coded::Tile(sizes)) => {
                Self::Coded(Box::new(StoredTile::read(&tensor, id, sizes, validate)?))
            }
            None if tensor.byte_length()? == 0 => Self::Empty,
            None => Self::Raw(ArrayPlace::of(&tensor, id.0, 0)),
        })
    }

    #[cfg(test)]
    pub(super) fn raw_at(section: usize, offset: u64) -> Self {
        Self::Raw(ArrayPlace { section: (0, section), offset })
    }

    /// Whether a rectangle of its bytes is decoded at once; any is that lies in one piece.
    pub(super) fn takes(&self, rect: &Rect) -> bool {
        match self {
            Self::Coded(coded) => coded.takes(rect),
            Self::Raw(_) | Self::Empty => rect.is_run() || rect.width <= MOST_PITCH,
        }
    }

    /// For a kernel, if it is coded.
    pub(super) fn coded(&self) -> Option<&dyn CodedTensor> {
        match self {
            Self::Coded(coded) => Some(&**coded),
            _ => None,
        }
    }
}

/// An array of this many bytes.
fn whole_array<'m>(tensor: &Tensor<'m>, array: usize, bytes: u64) -> Result<Cow<'m, [u8]>> {
    tensor.arrays().read(array, 0..bytes).map_err(|error| tensor.locate(error))
}
