//! Tensors as a GPU needs them: where their arrays lie in sections, wherever those lie.

use std::{borrow::Cow, collections::HashMap, ops::Range, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::{
    coding::{KernelEncoding, TILE_KERNEL},
    linear::FastArrays,
    needs::{ArrayId, SectionId, TensorId},
    task::{GapTask, Task, TileArrays, TileSource, TileTask, Tiles},
};
use crate::{
    Encoding, Error, Model, Result, Tensor,
    constants::{CODE_LENGTHS_BYTES, GAP_BYTES_PER_THREAD},
    encoding::{
        gap::GapSizes,
        stored::ReadArrays as _,
        tile::{self, Codebook, Sizes},
    },
    format::Coded,
    huffman,
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

    /// Whether one task decodes a part of its bytes; any does that lies in one piece.
    fn takes(&self, part: &Rect) -> bool {
        part.is_run()
    }

    /// Itself, if it is in tiles.
    fn as_tile(&self) -> Option<&StoredTile> {
        None
    }

    /// The task that decodes a part that it [takes](Self::takes) to `output`, after others of this
    /// many units, and its own units.
    fn task(
        &self,
        part: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &dyn Addresses,
    ) -> Result<(Task, u64)>;
}

#[derive(Debug)]
pub(super) struct StoredGap {
    id: TensorId,
    layout: GapSizes,
    gaps: ArrayPlace,
    output_offsets: ArrayPlace,
    bitstream: ArrayPlace,
    plane: ArrayPlace,
    /// On the host, to find the thread blocks of a range.
    host_offsets: Box<[u8]>,
    code_lengths: Box<[u8; CODE_LENGTHS_BYTES]>,
}

#[derive(Debug)]
pub(super) struct StoredTile {
    id: TensorId,
    sizes: Sizes,
    records: ArrayPlace,
    bitstream: ArrayPlace,
    plane: ArrayPlace,
    codebook: Box<[u8]>,
    staged_bytes: u32,
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
            Some(Coded::Gap(layout)) => {
                Self::Coded(Box::new(StoredGap::read(&tensor, id, layout, validate)?))
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

    /// Whether a part of its bytes is decoded at once; any is that lies in one piece.
    pub(super) fn takes(&self, part: &Rect) -> bool {
        match self {
            Self::Coded(coded) => coded.takes(part),
            Self::Raw(_) | Self::Empty => part.is_run() || part.width <= MOST_PITCH,
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

impl StoredGap {
    fn read(tensor: &Tensor<'_>, id: TensorId, layout: GapSizes, validate: bool) -> Result<Self> {
        let codebook = whole_array(tensor, 0, layout.codebook_bytes())?;
        let host_offsets = whole_array(tensor, 2, layout.output_offsets_bytes())?;
        if validate {
            let checked = huffman::read_codebook(&codebook)
                .and_then(|_| layout.check_output_offsets(&host_offsets));
            checked.map_err(|error| tensor.locate(error))?;
        }
        let code_lengths = codebook.first_chunk().expect("the layout's codebook has code lengths");
        let [gaps, output_offsets, bitstream, plane] =
            [1, 2, 3, 4].map(|array| ArrayPlace::of(tensor, id.0, array));
        Ok(Self {
            id,
            layout,
            gaps,
            output_offsets,
            bitstream,
            plane,
            code_lengths: Box::new(*code_lengths),
            host_offsets: host_offsets.into_owned().into(),
        })
    }

    /// A tensor of one block with these weights, whose arrays lie in as many sections.
    #[cfg(test)]
    pub(super) fn of(weights: &[u8], bytes_per_thread: u32) -> Self {
        let geometry = crate::encoding::gap::Geometry::new(bytes_per_thread, 64).unwrap();
        let tensor = crate::encoding::gap::encode_tensor(weights, geometry, 1000).unwrap();
        let place = |section| ArrayPlace { section: (0, section), offset: 256 };
        Self {
            id: (0, 0),
            layout: tensor.layout,
            gaps: place(0),
            output_offsets: place(1),
            bitstream: place(2),
            plane: place(3),
            host_offsets: tensor.output_offsets.into(),
            code_lengths: Box::new([0; CODE_LENGTHS_BYTES]),
        }
    }
}

impl CodedTensor for StoredGap {
    fn coding(&self) -> KernelEncoding {
        KernelEncoding::Gap
    }

    fn kernel(&self) -> usize {
        let bytes = self.layout.geometry().bytes_per_thread();
        GAP_BYTES_PER_THREAD
            .iter()
            .position(|&known| known == bytes)
            .expect("geometries are checked")
    }

    fn codebook(&self) -> &[u8] {
        &*self.code_lengths
    }

    fn task(
        &self,
        part: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &dyn Addresses,
    ) -> Result<(Task, u64)> {
        let elements = part.elements();
        let thread_blocks = self.layout.thread_blocks_of(&self.host_offsets, &elements)?;
        if thread_blocks.end > u64::from(u32::MAX) {
            let count = thread_blocks.end;
            return Err(Error::limit(
                "thread blocks of a tensor on the GPU",
                count,
                u32::MAX.into(),
            ));
        }
        let units = thread_blocks.end - thread_blocks.start;
        let task = GapTask {
            gaps: addresses.array(self.gaps),
            output_offsets: addresses.array(self.output_offsets),
            bitstream: addresses.array(self.bitstream),
            plane: addresses.array(self.plane),
            table: addresses.table(self.id),
            output,
            elements: self.layout.elements(),
            bit_count: self.layout.bit_count(),
            element_begin: elements.start,
            element_end: elements.end,
            first_thread_block: thread_blocks.start,
            thread_blocks: units,
            first_unit,
            threads_per_block: self.layout.geometry().threads_per_block(),
            ..GapTask::default()
        };
        Ok((task.into(), units))
    }
}

impl StoredTile {
    fn read(tensor: &Tensor<'_>, id: TensorId, sizes: Sizes, validate: bool) -> Result<Self> {
        let codebook = whole_array(tensor, 0, sizes.codebook_bytes())?;
        // Not kept: the tiles of a range follow from its numbers.
        let records = tensor.arrays().read(1, 0..sizes.records_bytes())?;
        if validate {
            let checked =
                Codebook::from_bytes(&codebook).and_then(|_| tile::check_offsets(&sizes, &records));
            checked.map_err(|error| tensor.locate(error))?;
        }
        let [records_place, bitstream, plane] =
            [1, 2, 3].map(|array| ArrayPlace::of(tensor, id.0, array));
        Ok(Self {
            id,
            sizes,
            records: records_place,
            bitstream,
            plane,
            staged_bytes: tile::staged_bytes(&records) as u32,
            codebook: codebook.into_owned().into(),
        })
    }

    /// As [`StoredGap::of`], of one row of tiles.
    #[cfg(test)]
    pub(super) fn of(weights: &[u8]) -> Self {
        let geometry = tile::Geometry::vector(weights.len() as u64 / 2).unwrap();
        let tensor = tile::encode_tensor(weights, geometry).unwrap();
        let place = |section| ArrayPlace { section: (0, section), offset: 256 };
        Self {
            id: (0, 1),
            sizes: tensor.sizes,
            records: place(0),
            bitstream: place(1),
            plane: place(2),
            staged_bytes: tile::staged_bytes(&tensor.records) as u32,
            codebook: tensor.codebook.into(),
        }
    }
}

impl StoredTile {
    pub(super) fn arrays(&self, addresses: &dyn Addresses) -> TileArrays {
        TileArrays {
            records: addresses.array(self.records),
            bitstream: addresses.array(self.bitstream),
            plane: addresses.array(self.plane),
            table: addresses.table(self.id),
        }
    }

    pub(super) fn id(&self) -> TensorId {
        self.id
    }

    /// Its tiles, and the sizes of its arrays.
    pub(super) fn sizes(&self) -> &Sizes {
        &self.sizes
    }
}

impl CodedTensor for StoredTile {
    fn coding(&self) -> KernelEncoding {
        KernelEncoding::Tile
    }

    fn kernel(&self) -> usize {
        TILE_KERNEL
    }

    fn codebook(&self) -> &[u8] {
        &self.codebook
    }

    fn staged_bytes(&self) -> u32 {
        self.staged_bytes
    }

    fn as_tile(&self) -> Option<&StoredTile> {
        Some(self)
    }

    fn takes(&self, part: &Rect) -> bool {
        part.is_run() || self.has_rows_of(part.width)
    }

    fn task(
        &self,
        part: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &dyn Addresses,
    ) -> Result<(Task, u64)> {
        let (geometry, elements) = (self.sizes.geometry(), part.elements());
        // As wide as the kernel shall take the matrix for, and which columns are wanted.
        let (columns, wanted) =
            if self.has_rows_of(part.width) && !(self.is_vector() && part.is_run()) {
                (part.width / 2, part.columns.start / 2..part.columns.end / 2)
            } else {
                (geometry.columns(), 0..geometry.columns())
            };
        let tiles = self.tiles(&elements, &wanted)?;
        let most = u64::from(u32::MAX);
        let behind = first_unit + tiles.count();
        if behind > most {
            return Err(Error::limit("tiles of one launch on the GPU", behind, most));
        }
        let source = TileSource {
            arrays: self.arrays(addresses),
            bits_bytes: self.sizes.bitstream_bytes(),
            rows: geometry.elements() / columns,
            columns,
            tiles_across: if self.is_vector() { 0 } else { geometry.strip_tiles() },
        };
        let task = TileTask::new(&source, &elements, &wanted, &tiles, output, first_unit);
        Ok((task.into(), tiles.count()))
    }
}

impl StoredTile {
    fn is_vector(&self) -> bool {
        self.sizes.geometry().tile_rows() == 1
    }

    /// Whether columns of rows of this many bytes can be decoded: those of its matrix, or any of a
    /// vector whose indices the kernel can divide.
    fn has_rows_of(&self, width: u64) -> bool {
        if self.is_vector() {
            u32::try_from(self.sizes.elements()).is_ok()
        } else {
            width == 2 * self.sizes.geometry().columns()
        }
    }

    /// The tiles that hold a range of elements, and of it some columns. Those of a vector are all
    /// in one row.
    fn tiles(&self, elements: &Range<u64>, columns: &Range<u64>) -> Result<Tiles> {
        let strips = self.sizes.strips_of(elements)?;
        if self.is_vector() {
            return Ok(Tiles { rows: 0..1, columns: strips });
        }
        let each = self.sizes.geometry().tile_columns();
        Ok(Tiles { rows: strips, columns: columns.start / each..columns.end.div_ceil(each) })
    }
}
