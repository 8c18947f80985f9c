//! What the host hands to the kernels: the mirror of `kernels/task.cuh` and of each encoding's own.
//! Sizes are compared with the kernels' when they are loaded.

use std::ops::Range;

use cudarc::driver::{DeviceRepr, sys::CUdeviceptr};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, transmute};

/// A task of any encoding, as it lies in device memory.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Task([u64; 16]);

impl From<GapTask> for Task {
    fn from(task: GapTask) -> Self {
        transmute!(task)
    }
}

impl From<TileTask> for Task {
    fn from(task: TileTask) -> Self {
        transmute!(task)
    }
}

/// One tensor in the `gap` encoding, or a range of its elements, to decode. Pointers are device
/// addresses.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct GapTask {
    pub(super) gaps: u64,
    pub(super) output_offsets: u64,
    pub(super) bitstream: u64,
    pub(super) plane: u64,
    pub(super) table: u64,
    /// Of `element_begin`, counted from the launch's output.
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

/// One tensor in the `tile` encoding, or a part of it, to decode. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct TileTask {
    pub(super) bits: u64,
    pub(super) records: u64,
    pub(super) plane: u64,
    pub(super) table: u64,
    /// Of row 0, column 0, wanted or not, counted from the launch's output; modulo 2^64.
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
    /// 0 where tiles have one row.
    pub(super) tiles_across: u32,
}

/// Device addresses of the arrays of a tensor in tiles, and of its decode table.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileArrays {
    pub(super) records: CUdeviceptr,
    pub(super) bitstream: CUdeviceptr,
    pub(super) plane: CUdeviceptr,
    pub(super) table: CUdeviceptr,
}

/// What a task decodes from: the arrays, and the matrix for which the kernel shall take them.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileSource {
    pub(super) arrays: TileArrays,
    pub(super) bits_bytes: u64,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Tiles of the tensor in a row of tiles; 0 where tiles have one row.
    pub(super) tiles_across: u64,
}

/// Tiles, by the rows and columns of them.
#[derive(Clone, Debug)]
pub(super) struct Tiles {
    pub(super) rows: Range<u64>,
    pub(super) columns: Range<u64>,
}

impl Tiles {
    pub(super) fn count(&self) -> u64 {
        (self.rows.end - self.rows.start) * (self.columns.end - self.columns.start)
    }
}

impl TileTask {
    /// Decodes those of these elements that are in these columns, which lie in the tiles, to
    /// `output` of the launch's, dense. All tasks before have this many tiles.
    pub(super) fn new(
        source: &TileSource,
        elements: &Range<u64>,
        wanted: &Range<u64>,
        tiles: &Tiles,
        output: u64,
        first_unit: u64,
    ) -> Self {
        let TileSource { arrays, bits_bytes, rows, columns, tiles_across } = *source;
        let pitch = wanted.end - wanted.start;
        let place = elements.start / columns * pitch + elements.start % columns;
        // No truncation: a tensor has fewer than 2^32 tiles, and so has a launch.
        Self {
            bits: arrays.bitstream,
            records: arrays.records,
            plane: arrays.plane,
            table: arrays.table,
            output: output.wrapping_sub(2 * place),
            bits_bytes,
            rows,
            columns,
            element_begin: elements.start,
            element_end: elements.end,
            column_begin: wanted.start,
            column_end: wanted.end,
            pitch,
            first_unit: first_unit as u32,
            tiles: tiles.count() as u32,
            first_row: tiles.rows.start as u32,
            first_column: tiles.columns.start as u32,
            across: (tiles.columns.end - tiles.columns.start) as u32,
            tiles_across: tiles_across as u32,
        }
    }
}

/// The most tasks of a launch that takes them by value.
pub(super) const FEW_TASKS: usize = 8;

/// Tasks of a launch, by value.
#[derive(Clone, Copy, Debug, FromBytes, Immutable)]
#[repr(C)]
pub(super) struct FewTasks([TileTask; FEW_TASKS]);

impl FewTasks {
    /// # Panics
    /// If they are more than [`FEW_TASKS`].
    pub(super) fn new(tasks: &[TileTask]) -> Self {
        let mut few = Self::new_zeroed();
        few.0[..tasks.len()].copy_from_slice(tasks);
        few
    }
}

// SAFETY: `repr(C)`, numbers alone, as `kernels/tile_task.cuh` has them.
#[expect(unsafe_code, reason = "arguments of kernels, by value")]
unsafe impl DeviceRepr for FewTasks {}

/// Where the codebook of a tensor is and where its decode table goes.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct TableTask {
    pub(super) codebook: u64,
    pub(super) table: u64,
    pub(super) codebook_bytes: u64,
}

/// The bits of the status word, with what they say.
pub(super) const PROBLEMS: [(u32, &str); 9] = [
    (1, "bits that are no code"),
    (2, "a thread that does not end where the next one starts"),
    (4, "a thread block with another number of codes than its output offsets say"),
    (8, "output offsets that do not hold the elements asked for"),
    (16, "a lane whose codes have not as many bits as its tile's record says"),
    (32, "a tile whose lanes have not the bits between its offset and the next one"),
    (64, "a pair of one weight with two exponents"),
    (128, "a tile of the fast layout whose exceptions do not exist"),
    (256, "an index or an offset of a row that does not exist"),
];
