//! Tensors as a GPU needs them: the addresses of their arrays, and the tasks that decode parts of
//! them.

use std::{collections::HashMap, ops::Range, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;
use zerocopy::transmute;

use super::linear::fast::FastArrays;
use super::needs::{ArrayId, SectionId, TensorId};
use super::task::{DecodeTask, GapTask, TileAddresses, TileSource, TileTask, kernel_of};
use crate::constants::{CODE_LENGTHS_BYTES, GAP_BYTES_PER_THREAD};
use crate::encoding::gap::{self, GapSizes};
use crate::encoding::stored::CodedSizes;
use crate::encoding::tile::{self, Codebook, TileSizes};
use crate::open::Rect;
use crate::{Error, Model, Result, Tensor, format::Coded, huffman};

/// Longest rows of which columns are copied at once, in bytes: the driver takes no longer pitch.
const MAX_PITCH: u64 = i32::MAX as u64;

/// Device addresses of sections, arrays and decode tables on one GPU.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Sections in device memory, or on the host, read in place.
    pub(super) sections: HashMap<SectionId, CUdeviceptr>,
    /// Arrays whose sections are not held.
    pub(super) arrays: HashMap<ArrayId, CUdeviceptr>,
    pub(super) tables: HashMap<TensorId, CUdeviceptr>,
    /// Matrices in the fast layout; nothing else of them is held.
    pub(super) fast: HashMap<TensorId, Arc<FastArrays>>,
}

/// [`Held`], with a streamed block in a slot, if there is one.
pub(super) struct Addresses<'h> {
    pub(super) held: &'h Held,
    pub(super) slot: HashMap<SectionId, CUdeviceptr>,
}

impl Addresses<'_> {
    pub(super) fn array(&self, at: ArrayPlace) -> CUdeviceptr {
        let section = self.slot.get(&at.section).or_else(|| self.held.sections.get(&at.section));
        section.map_or_else(|| self.held.arrays[&at.id], |section| section + at.offset)
    }
}

/// An array's section, and its distance from that section's start in the container.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayPlace {
    id: ArrayId,
    section: SectionId,
    offset: u64,
}

/// A tensor's bytes as they are stored; never an alias.
#[derive(Debug)]
pub(super) enum Stored {
    Empty,
    Raw(ArrayPlace),
    /// Decoded by the host, since no kernel decodes its encoding.
    Decoded(TensorId),
    /// The arrays of an encoding with kernels.
    Coded(CodedTensor),
}

/// The sizes of a tensor that a kernel decodes.
#[derive(Debug)]
enum Sizes {
    Gap(GapSizes),
    /// BF16 and other floats.
    Tile(TileSizes),
}

/// A tensor that a kernel decodes.
#[derive(Debug)]
pub(super) struct CodedTensor {
    pub(super) id: TensorId,
    sizes: Sizes,
    /// The codebook, from which its decode table is built.
    pub(super) codebook: Box<[u8]>,
    /// Places of its other arrays, in their order.
    places: Vec<ArrayPlace>,
    /// Output offsets of `gap`, on the host, to find the thread blocks of a range.
    output_offsets: Box<[u8]>,
    /// Bytes of shared memory that a warp needs for it besides what it always takes: for tiles, the
    /// most bytes of bitstream that a tile takes.
    pub(super) staged_bytes: u32,
}

/// Tensors that are not aliases.
pub(super) type Tensors = HashMap<TensorId, Arc<Stored>>;

impl Stored {
    /// Reads what the host keeps of a tensor. Validates codebooks, output offsets and the records'
    /// offsets, unless a test turns that off.
    pub(super) fn read(model: &Model, id: TensorId, validate: bool) -> Result<Self> {
        let tensor = &model.tensor_at(id);
        Ok(match tensor.coded()? {
            Some(Coded::Delta(_)) => Self::Decoded(id),
            Some(Coded::Gap(sizes)) => {
                Self::Coded(CodedTensor::read(tensor, id, Sizes::Gap(sizes), validate)?)
            }
            Some(Coded::Tile(sizes) | Coded::Float(sizes)) => {
                Self::Coded(CodedTensor::read(tensor, id, Sizes::Tile(sizes), validate)?)
            }
            None if tensor.byte_length()? == 0 => Self::Empty,
            None => Self::Raw(place(tensor, id, 0)),
        })
    }

    /// Whether one task decodes a rectangle of its bytes; always if it is contiguous.
    pub(super) fn takes(&self, rect: &Rect) -> bool {
        match self {
            Self::Coded(coded) => {
                let sizes = coded.tile_sizes();
                rect.is_run() || sizes.is_some_and(|sizes| has_rows_of(sizes, rect.width))
            }
            Self::Raw(_) | Self::Decoded(_) | Self::Empty => {
                rect.is_run() || rect.width <= MAX_PITCH
            }
        }
    }

    pub(super) fn coded(&self) -> Option<&CodedTensor> {
        if let Self::Coded(coded) = self { Some(coded) } else { None }
    }
}

/// The place of a tensor's array, counted from its first one.
fn place(tensor: &Tensor<'_>, (shard, _): TensorId, array: usize) -> ArrayPlace {
    let array = tensor.record().array_range().start + array;
    let record = &tensor.shard().directory().arrays[array];
    let section = (shard, record.section.get() as usize);
    ArrayPlace { id: (shard, array), section, offset: record.offset.get() }
}

impl CodedTensor {
    fn read(tensor: &Tensor<'_>, id: TensorId, sizes: Sizes, validate: bool) -> Result<Self> {
        let locate = |error| tensor.locate(error);
        let (codebook, output_offsets, staged_bytes): (Box<[u8]>, Box<[u8]>, _) = match &sizes {
            Sizes::Gap(sizes) => {
                let read = |array| sizes.read_whole(tensor, array).map_err(locate);
                let codebook = read(gap::CODEBOOK)?;
                let output_offsets = read(gap::OUTPUT_OFFSETS)?;
                if validate {
                    huffman::read_codebook(&codebook).map_err(locate)?;
                    sizes.check_output_offsets(&output_offsets).map_err(locate)?;
                }
                (codebook[..CODE_LENGTHS_BYTES].into(), output_offsets.into_owned().into(), 0)
            }
            Sizes::Tile(sizes) => {
                let read = |array| sizes.read_whole(tensor, array).map_err(locate);
                let codebook = read(tile::CODEBOOK)?;
                // Not kept: the numbers of a range give its tiles.
                let records = read(tile::RECORDS)?;
                if validate {
                    Codebook::from_bytes(&codebook).map_err(locate)?;
                    tile::check_offsets(sizes, &records).map_err(locate)?;
                }
                (codebook.into_owned().into(), Box::default(), tile::staged_bytes(&records))
            }
        };
        let arrays = 1..tensor.record().array_range().len();
        let places = arrays.map(|array| place(tensor, id, array)).collect();
        Ok(Self { id, sizes, codebook, places, output_offsets, staged_bytes })
    }

    /// The decode kernel that it needs.
    pub(super) fn kernel(&self) -> usize {
        let bytes = match &self.sizes {
            Sizes::Gap(sizes) => sizes.geometry().bytes_per_thread(),
            Sizes::Tile(sizes) => return kernel_of(sizes.split()),
        };
        let kernel = GAP_BYTES_PER_THREAD.iter().position(|&known| known == bytes);
        kernel.expect("geometries are checked")
    }

    fn weight_bytes(&self) -> u64 {
        match &self.sizes {
            Sizes::Gap(sizes) => sizes.weight_bytes(),
            Sizes::Tile(sizes) => sizes.weight_bytes(),
        }
    }

    pub(super) fn tile_sizes(&self) -> Option<&TileSizes> {
        if let Sizes::Tile(sizes) = &self.sizes { Some(sizes) } else { None }
    }

    /// Device addresses of a tensor in tiles with these sizes.
    pub(super) fn tile_addresses(
        &self,
        sizes: &TileSizes,
        addresses: &Addresses<'_>,
    ) -> TileAddresses {
        let [records, bitstream, plane] = self.addresses(addresses);
        TileAddresses {
            records,
            bitstream,
            bitstream_bytes: sizes.array_lengths()[tile::BITSTREAM],
            plane,
            table: addresses.held.tables[&self.id],
            staged_bytes: self.staged_bytes,
        }
    }

    fn addresses<const ARRAYS: usize>(&self, all: &Addresses<'_>) -> [CUdeviceptr; ARRAYS] {
        std::array::from_fn(|array| all.array(self.places[array]))
    }

    /// Makes the task that decodes a rectangle that it [takes](Stored::takes) to `output`, after
    /// tasks with `first_unit` units; also returns its own units. A unit of a launch is a thread
    /// block of `gap` or a tile, not a unit of a tile (spec/terms.md).
    pub(super) fn task(
        &self,
        rect: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &Addresses<'_>,
    ) -> Result<(DecodeTask, u64)> {
        let elements = rect.elements(self.weight_bytes());
        let sizes = match &self.sizes {
            Sizes::Gap(sizes) => sizes,
            Sizes::Tile(sizes) => {
                sizes.strips_of(&elements)?;
                let (source, wanted) = self.tile_source(sizes, rect, addresses);
                let task = TileTask::new(&source, &elements, &wanted, output, first_unit);
                let units = u64::from(task.tiles);
                let what = "tiles of one launch on the GPU";
                Error::check_limit(what, first_unit + units, u32::MAX.into())?;
                return Ok((transmute!(task), units));
            }
        };
        let thread_blocks = sizes.thread_blocks_of(&self.output_offsets, &elements)?;
        let what = "thread blocks of a tensor on the GPU";
        Error::check_limit(what, thread_blocks.end, u32::MAX.into())?;
        let units = thread_blocks.end - thread_blocks.start;
        let [gaps, output_offsets, bitstream, plane] = self.addresses(addresses);
        let task = GapTask {
            gaps,
            output_offsets,
            bitstream,
            plane,
            table: addresses.held.tables[&self.id],
            output,
            elements: sizes.elements(),
            bit_count: sizes.bit_count(),
            element_begin: elements.start,
            element_end: elements.end,
            first_thread_block: thread_blocks.start,
            thread_blocks: units,
            first_unit,
            threads_per_block: sizes.geometry().threads_per_block(),
            ..GapTask::default()
        };
        Ok((transmute!(task), units))
    }

    /// The width that the kernel assumes for the matrix, and the wanted columns.
    fn tile_source(
        &self,
        sizes: &TileSizes,
        rect: &Rect,
        addresses: &Addresses<'_>,
    ) -> (TileSource, Range<u64>) {
        let (geometry, each) = (sizes.geometry(), self.weight_bytes());
        let (columns, wanted) =
            if has_rows_of(sizes, rect.width) && !(is_vector(sizes) && rect.is_run()) {
                (rect.width / each, rect.columns.start / each..rect.columns.end / each)
            } else {
                (geometry.columns(), 0..geometry.columns())
            };
        let source = TileSource {
            arrays: self.tile_addresses(sizes, addresses),
            rows: geometry.elements() / columns,
            columns,
            tiles_across: if is_vector(sizes) { 0 } else { geometry.strip_tiles() },
            split: sizes.split(),
        };
        (source, wanted)
    }
}

fn is_vector(sizes: &TileSizes) -> bool {
    sizes.geometry().tile_rows() == 1
}

/// Whether columns of rows of this many bytes can be decoded: rows of its matrix, or any rows of a
/// vector whose indices the kernel can divide.
fn has_rows_of(sizes: &TileSizes, width: u64) -> bool {
    if is_vector(sizes) {
        u32::try_from(sizes.elements()).is_ok()
    } else {
        width == sizes.weight_bytes() * sizes.geometry().columns()
    }
}

/// Tensors of one block, whose arrays lie in as many sections, 256 bytes from their starts.
#[cfg(test)]
pub(super) mod samples {
    use super::{ArrayPlace, CodedTensor, Sizes, Stored};
    use crate::encoding::{gap, tile};

    fn place(section: usize) -> ArrayPlace {
        ArrayPlace { id: (0, section), section: (0, section), offset: 256 }
    }

    pub(in crate::gpu) fn raw_at(section: usize, offset: u64) -> Stored {
        Stored::Raw(ArrayPlace { offset, ..place(section) })
    }

    fn coded(id: usize, sizes: Sizes, output_offsets: Vec<u8>, staged_bytes: u32) -> Stored {
        let places = [0, 1, 2, 3].map(place).into();
        let (codebook, output_offsets) = (Box::default(), output_offsets.into());
        let id = (0, id);
        Stored::Coded(CodedTensor { id, sizes, codebook, places, output_offsets, staged_bytes })
    }

    pub(in crate::gpu) fn gap(weights: &[u8], bytes_per_thread: u32) -> Stored {
        let geometry = gap::GapGeometry::new(bytes_per_thread, 64).unwrap();
        let tensor = gap::encode_tensor(weights, geometry, 1000).unwrap();
        let [_, _, output_offsets, ..] = tensor.arrays;
        coded(0, Sizes::Gap(tensor.sizes), output_offsets, 0)
    }

    /// One row of tiles.
    pub(in crate::gpu) fn tile(weights: &[u8]) -> Stored {
        let geometry = tile::TileGeometry::vector(weights.len() as u64 / 2).unwrap();
        let tensor = tile::encode_tensor(weights, geometry).unwrap();
        let staged_bytes = tile::staged_bytes(&tensor.arrays[tile::RECORDS]);
        coded(1, Sizes::Tile(tensor.sizes), Vec::new(), staged_bytes)
    }
}
