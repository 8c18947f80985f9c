//! Structures that the host passes to the decode kernels: the mirror of `kernels/common.cuh` and of
//! each encoding's own header. A test compares sizes with the kernels' (`module`).

use std::ops::Range;

use cudarc::driver::{DeviceRepr, sys::CUdeviceptr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::linear::task::{STRIP_ROWS, TILE_COLUMNS};
use crate::constants::GAP_BYTES_PER_THREAD;
use crate::float::{Bf16OfE4m3, E4m3, E5m2, F16, F32, F32OfBf16, F32OfF16, Float as _, FloatSplit};

const TILE_ELEMENTS: u64 = STRIP_ROWS * TILE_COLUMNS;

/// Number of decode kernels: one of `gap` for each number of bytes per thread, that of `tile`, then
/// [`FLOATS`].
pub(super) const KERNELS: usize = TILE_KERNEL + 1 + FLOATS.len();
pub(super) const TILE_KERNEL: usize = GAP_BYTES_PER_THREAD.len();

/// Other floats than BF16 in tiles, by the names of their kernels.
pub(super) const FLOATS: [(FloatSplit, &str); 7] = [
    (E4m3::SPLIT, "e4m3"),
    (E5m2::SPLIT, "e5m2"),
    (F16::SPLIT, "f16"),
    (Bf16OfE4m3::SPLIT, "bf16_of_e4m3"),
    (F32::SPLIT, "f32"),
    (F32OfF16::SPLIT, "f32_of_f16"),
    (F32OfBf16::SPLIT, "f32_of_bf16"),
];

/// The kernel that decodes tiles of floats that are split like this.
pub(super) fn kernel_of(split: FloatSplit) -> usize {
    if split == FloatSplit::BF16 {
        return TILE_KERNEL;
    }
    let float = FLOATS.iter().position(|(known, _)| *known == split);
    TILE_KERNEL + 1 + float.expect("each split has a kernel")
}

/// Bytes of decode tables, multiples of 16.
pub(super) const GAP_TABLE_BYTES: u64 = 16_880;
pub(super) const TILE_TABLE_BYTES: u64 = 16_384;

/// A task of any encoding, as bytes in device memory.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct DecodeTask([u64; 16]);

/// A tensor in `gap`, or a range of its elements, to decode. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct GapTask {
    pub(super) gaps: u64,
    pub(super) output_offsets: u64,
    pub(super) bitstream: u64,
    pub(super) plane: u64,
    pub(super) table: u64,
    /// Offset of `element_begin` from the launch's output, in bytes.
    pub(super) output: u64,
    pub(super) elements: u64,
    pub(super) bit_count: u64,
    pub(super) element_begin: u64,
    pub(super) element_end: u64,
    pub(super) first_thread_block: u64,
    pub(super) thread_blocks: u64,
    pub(super) first_unit: u64,
    pub(super) threads_per_block: u32,
    pub(super) reserved: u32,
    pub(super) reserved2: [u64; 2],
}

/// A tensor in the `tile` encoding, or a part of it, to decode. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct TileTask {
    pub(super) bits: u64,
    pub(super) records: u64,
    pub(super) plane: u64,
    pub(super) table: u64,
    /// Offset of row 0, column 0, wanted or not, from the launch's output, in bytes; modulo 2^64.
    pub(super) output: u64,
    pub(super) bits_bytes: u64,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) element_begin: u64,
    pub(super) element_end: u64,
    pub(super) column_begin: u64,
    pub(super) column_end: u64,
    pub(super) pitch: u64,
    pub(super) first_unit: u32,
    pub(super) tiles: u32,
    pub(super) first_row: u32,
    pub(super) first_column: u32,
    pub(super) across: u32,
    /// 0 if tiles have one row.
    pub(super) tiles_across: u32,
}

/// Device addresses of the arrays of a tensor in tiles.
#[derive(Clone, Copy, Debug)]
pub struct TileAddresses {
    /// Device address of the records; a multiple of 16.
    pub records: CUdeviceptr,
    /// Device address of the bitstream; a multiple of 16.
    pub bitstream: CUdeviceptr,
    /// Bytes of the bitstream; a multiple of 16.
    pub bitstream_bytes: u64,
    /// Device address of the plane; a multiple of 16.
    pub plane: CUdeviceptr,
    /// Device address of the decode table that
    /// [`Device::build_tables`](super::Device::build_tables) made; a multiple of 16.
    pub table: CUdeviceptr,
    /// The most bytes of bitstream that a tile takes
    /// ([`Arrays::staged_bytes`](crate::encoding::tile::Arrays::staged_bytes)). A smaller number
    /// makes decoding wrong, and sets the status.
    pub staged_bytes: u32,
}

/// Arrays that a task decodes, and the shape of the matrix that the kernel assumes.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileSource {
    pub(super) arrays: TileAddresses,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Tiles in a row of tiles of the tensor; 0 if tiles have one row.
    pub(super) tiles_across: u64,
    pub(super) split: FloatSplit,
}

impl TileTask {
    /// A task that decodes the elements that are in the wanted columns, dense, to byte `output` of
    /// the launch's output. Earlier tasks have `first_unit` tiles.
    pub(super) fn new(
        source: &TileSource,
        elements: &Range<u64>,
        wanted: &Range<u64>,
        output: u64,
        first_unit: u64,
    ) -> Self {
        let TileSource { arrays, rows, columns, tiles_across, split } = *source;
        let cut = |range: &Range<u64>, each| range.start / each..range.end.div_ceil(each);
        let (down, across) = if tiles_across == 0 {
            (0..1, cut(elements, TILE_ELEMENTS))
        } else {
            (cut(elements, STRIP_ROWS * columns), cut(wanted, TILE_COLUMNS))
        };
        let pitch = wanted.end - wanted.start;
        let place = elements.start / columns * pitch + elements.start % columns;
        let width = across.end - across.start;
        // No truncation: a tensor has fewer than 2^32 tiles, and so has a launch.
        Self {
            bits: arrays.bitstream,
            records: arrays.records,
            plane: arrays.plane,
            table: arrays.table,
            output: output.wrapping_sub(split.bytes() as u64 * place),
            bits_bytes: arrays.bitstream_bytes,
            rows,
            columns,
            element_begin: elements.start,
            element_end: elements.end,
            column_begin: wanted.start,
            column_end: wanted.end,
            pitch,
            first_unit: first_unit as u32,
            tiles: ((down.end - down.start) * width) as u32,
            first_row: down.start as u32,
            first_column: across.start as u32,
            across: width as u32,
            tiles_across: tiles_across as u32,
        }
    }
}

// SAFETY: `repr(C)`, only numbers, as in `kernels/tile_task.cuh`.
#[expect(unsafe_code, reason = "arguments of kernels, by value")]
unsafe impl DeviceRepr for TileTask {}

/// Most tasks of a launch that takes them by value.
pub(super) const FEW_TASKS: usize = 8;

/// Tasks of experts, and the experts that a router chose: `ChooseTask` of `kernels/float.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ChooseTask {
    pub(super) tasks: u64,
    /// The address of each task's expert, less than `expert_count`.
    pub(super) experts: u64,
    /// The address of a task's bytes for the numbers of the launch, and of room for all tasks.
    pub(super) chosen: u64,
    pub(super) ids: u64,
    pub(super) map: u64,
    pub(super) id_count: u64,
    pub(super) map_count: u64,
    pub(super) task_count: u32,
    pub(super) expert_count: u32,
    /// 1 if ids have 64 bits.
    pub(super) wide: u32,
}

// SAFETY: `repr(C)`, only numbers, as in `kernels/float.cu`.
#[expect(unsafe_code, reason = "an argument of a kernel, by value")]
unsafe impl DeviceRepr for ChooseTask {}

/// Device addresses of a decode table and of its codebook, as the kernels take them.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub struct TableAddresses {
    /// Device address of the codebook; a multiple of 2.
    pub codebook: CUdeviceptr,
    /// Device address of the table, [`Device::table_bytes`](super::Device::table_bytes) long; a
    /// multiple of 16.
    pub table: CUdeviceptr,
    /// Bytes of the codebook.
    pub codebook_bytes: u64,
}
