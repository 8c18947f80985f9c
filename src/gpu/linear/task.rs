//! Structures that the host passes to the kernels that multiply and transcode: the mirror of
//! `kernels/linear_task.cuh`. Loading the kernels compares the sizes. Pointers are device
//! addresses, pitches count elements.
#![expect(unsafe_code, reason = "arguments of kernels, by value")]

use cudarc::driver::DeviceRepr;
use zerocopy::{Immutable, IntoBytes};

pub(in crate::gpu) const STRIP_ROWS: u64 = 32;
pub(in crate::gpu) const TILE_COLUMNS: u64 = 256;
const STEP_COLUMNS: u64 = 32;
/// Bytes per step of a strip: plane and codes.
const STEP_BYTES: u64 = 1536;
/// Most columns of a matrix in the fast layout: patch numbers count no further.
pub(super) const MAX_COLUMNS: u64 = 1 << 29;
/// Bytes of a whole tile's data in the fast layout.
pub(super) const TILE_BYTES: u64 = TILE_COLUMNS / STEP_COLUMNS * STEP_BYTES;
pub(super) const HEAD_BYTES: u64 = 8;
/// Bytes per exception of the fast layout.
pub(in crate::gpu) const ENTRY_BYTES: u64 = 4;

pub(super) const MATRICES: usize = 8;
/// Most matrices of the next product whose weights a launch prefetches into L2.
pub(super) const PREFETCHES: usize = 4;
/// Most rows of x of a launch; in the fast layout more with compute capability 9.0.
pub(super) const ROWS: u64 = 16;
/// Most rows of x of the smaller one of two kernels.
pub(super) const ROWS_8: u64 = 8;
/// Most rows of x that the kernels for few rows multiply in the order of a plan of the sum.
pub(super) const ORDER_ROWS: u64 = 64;
/// Most rows of x that a warp of these kernels multiplies.
pub(super) const BAND_ROWS: u64 = 32;
/// Bytes of an item's sums, for each [`ROWS`] rows of x.
pub(super) const PARTIAL_BYTES: u64 = STRIP_ROWS * ROWS * 4;
/// Warps per block of the kernels that count and pack; each has one tile.
pub(super) const PACK_WARPS: u64 = 4;
/// Threads of the scanning kernel's only block.
pub(super) const SCAN_THREADS: u32 = 1024;
/// Warps per block of the kernel that unpacks; each has one tile.
pub(super) const UNPACK_WARPS: u64 = 8;

pub(super) const fn tiles_across(columns: u64) -> u64 {
    columns.div_ceil(TILE_COLUMNS)
}

/// Bytes of a strip's data in the fast layout.
pub(super) const fn strip_bytes(columns: u64) -> u64 {
    columns.div_ceil(STEP_COLUMNS) * STEP_BYTES
}

/// Bytes of a strip's heads in the fast layout.
pub(super) const fn strip_head_bytes(columns: u64) -> u64 {
    tiles_across(columns) * HEAD_BYTES
}

/// Patches for which a strip has room, per tile and in all.
const TILE_PATCHES: u64 = 4;
const MAX_PATCHES: u64 = 512;
const PATCH_BYTES: u64 = 20;

/// Bytes of a strip's patches in the fast layout.
pub(super) const fn strip_patch_bytes(columns: u64) -> u64 {
    let places = TILE_PATCHES * tiles_across(columns);
    PATCH_BYTES * if places < MAX_PATCHES { places } else { MAX_PATCHES }
}

/// Device memory of the strips of a matrix in the fast layout, in bytes.
pub(in crate::gpu) const fn fast_bytes(rows: u64, columns: u64) -> u64 {
    let strip = strip_bytes(columns) + strip_patch_bytes(columns) + strip_head_bytes(columns);
    rows.div_ceil(STRIP_ROWS) * strip
}

/// Exceptions that the fast layout bears well among this many weights: one of 256, which takes an
/// eighth of a bit per weight.
pub(in crate::gpu) const fn good_exceptions(weights: u64) -> u64 {
    weights / 256
}

/// A matrix of a launch.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C, align(16))]
pub(super) struct LinearMatrix {
    pub(super) data: u64,
    pub(super) index: u64,
    pub(super) rest: u64,
    /// The decode table of `tile`, or the patches of the fast layout.
    pub(super) table: u64,
    pub(super) rest_count: u64,
    /// Columns of the matrix from which this is a slice; its own if it is none.
    pub(super) whole_columns: u32,
    /// First column of the slice in that matrix: a multiple of 256.
    pub(super) first_column: u32,
}

/// A matrix, the place of its product, and how blocks share it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct ProductMatrix<T> {
    pub(super) matrix: LinearMatrix,
    pub(super) y: u64,
    pub(super) y_pitch: u64,
    pub(super) bias: u64,
    pub(super) rows: u32,
    pub(super) share: T,
}

/// How blocks share a matrix as items: [`Split`](super::split::Split).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Items {
    pub(super) first_item: u32,
    pub(super) whole_strips: u32,
    pub(super) slices: u32,
    /// Index of the counter of its first strip.
    pub(super) first_strip: u32,
    pub(super) first_partial: u32,
}

/// How blocks share a matrix in the order of a plan of the sum:
/// [`OrderPlan`](super::split::OrderPlan).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Order {
    /// Strips of all matrices before.
    pub(super) first_strip: u32,
    pub(super) splits: u32,
    /// Length of each split but the last, in blocks of
    /// [`SPLIT_COLUMNS`](super::split::SPLIT_COLUMNS).
    pub(super) length: u32,
    /// Splits at once; if there are more than units, some at a time, in passes.
    pub(super) pass_splits: u32,
    /// Most strips at once, and from bit 8 on 2^16 / `pass_splits` + 1.
    pub(super) strips: u32,
}

impl Order {
    pub(super) const fn has_passes(self) -> bool {
        self.splits > self.pass_splits
    }
}

/// Splits of a matrix's columns.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Splits(pub(super) u32);

/// A `CUtensorMap`, by which the GPU copies x in boxes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct XMap(pub(super) [u64; 16]);

/// Bytes to bring to L2: pieces of `bytes` bytes, some in each strip; multiples of 16. A hint.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct LinearPrefetch {
    pub(super) data: u64,
    /// Bytes from one strip to the next, and from one split of a strip to the next.
    pub(super) strip_pitch: u64,
    pub(super) split_pitch: u32,
    /// Pieces per strip.
    pub(super) splits: u32,
    pub(super) pieces: u32,
    pub(super) bytes: u32,
}

/// The argument of a kernel that multiplies. `T`: what its family reads besides.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct LinearLaunch<M, T> {
    pub(super) x: u64,
    pub(super) x_pitch: u64,
    pub(super) x_rows: u32,
    pub(super) columns: u32,
    pub(super) matrix_count: u32,
    pub(super) status: u64,
    pub(super) matrices: [ProductMatrix<M>; MATRICES],
    pub(super) of: T,
}

/// Up to [`ROWS`] rows of x by the fast layout.
pub(super) type Fast16Launch = LinearLaunch<Items, Fast16>;
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Fast16 {
    pub(super) counters: u64,
    pub(super) partials: u64,
    pub(super) items: u32,
}

/// Up to [`ROWS`] rows by matrices as stored.
pub(super) type Tile16Launch = LinearLaunch<Items, Tile16>;
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Tile16 {
    pub(super) counters: u64,
    pub(super) partials: u64,
    pub(super) items: u32,
    /// Items whose sums a block has in flight at once, 1 or 2.
    pub(super) sets: u32,
    /// Decode tables that a block holds at once, 1, 2 or 4.
    pub(super) tables: u32,
    /// Bytes of a slot, which holds a tile's bits.
    pub(super) slot_bytes: u32,
}

/// More rows by matrices as stored.
pub(super) type Tile64Launch = LinearLaunch<(), Tile64>;
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Tile64 {
    pub(super) counters: u64,
    pub(super) partials: u64,
    /// Stages of decoded weights.
    pub(super) stages: u32,
}

/// Up to [`ORDER_ROWS`] rows by the fast layout in the order of a plan of the sum.
pub(super) type OrderLaunch = LinearLaunch<Order, Order64>;
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Order64 {
    pub(super) x_map: XMap,
    pub(super) prefetches: [LinearPrefetch; PREFETCHES],
    /// 1 if `x_map` is set.
    pub(super) x_mapped: u32,
    /// Splits of strips that a block multiplies at once, and most of one strip.
    pub(super) units: u32,
    pub(super) splits: u32,
    /// Strips of each block, and number of blocks with one more.
    pub(super) each: u32,
    pub(super) more: u32,
}

/// 17 or more rows by the fast layout, in bands of up to 128.
pub(super) type Fast128Launch = LinearLaunch<Splits, Fast128>;
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Fast128 {
    pub(super) x_map: XMap,
    pub(super) prefetches: [LinearPrefetch; PREFETCHES],
    /// 1 if `x_map` is set.
    pub(super) x_mapped: u32,
    /// Strips per block.
    pub(super) strips: u32,
}

/// 129 or more rows by the fast layout, in bands of up to 256.
pub(super) type Fast256Launch = LinearLaunch<Splits, Fast256>;
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Fast256 {
    pub(super) x_map: XMap,
    pub(super) counters: u64,
    pub(super) partials: u64,
    /// 1 if `x_map` is set.
    pub(super) x_mapped: u32,
    pub(super) share_stages: u32,
}

pub(in crate::gpu) const MAX_EXPERTS: usize = 1024;
/// Fewest places of one expert that a block multiplies at once.
pub(super) const MIN_CHUNK: u64 = 8;

/// A launch of the kernel that multiplies by experts.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct GroupedLaunch {
    pub(super) x: u64,
    pub(super) x_pitch: u64,
    pub(super) x_index: u64,
    pub(super) offsets: u64,
    pub(super) blocks: u64,
    pub(super) end: u64,
    pub(super) factors: u64,
    pub(super) matrices: u64,
    pub(super) y: u64,
    pub(super) y_pitch: u64,
    pub(super) status: u64,
    pub(super) x_rows: u32,
    pub(super) columns: u32,
    pub(super) rows: u32,
    pub(super) places: u32,
    pub(super) experts: u32,
    pub(super) slots: u32,
    pub(super) share: u32,
    pub(super) reserved: u32,
    /// If `matrices` is 0: one matrix with the rows of all experts.
    pub(super) whole: LinearMatrix,
}

/// A range of whole strips to transcode from BF16.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct PackTask {
    pub(super) weights: u64,
    pub(super) pitch: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) heads: u64,
    pub(super) data: u64,
    pub(super) entries: u64,
    pub(super) capacity: u64,
    pub(super) total: u64,
    pub(super) patches: u64,
}

/// A part of a matrix in the fast layout to decode.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct UnpackTask {
    pub(super) data: u64,
    pub(super) heads: u64,
    pub(super) entries: u64,
    pub(super) entry_count: u64,
    /// Device address of row 0, column 0, wanted or not; modulo 2^64.
    pub(super) output: u64,
    pub(super) pitch: u64,
    pub(super) element_begin: u64,
    pub(super) element_end: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) column_begin: u32,
    pub(super) column_end: u32,
    pub(super) first_strip: u32,
    pub(super) first_tile: u32,
    pub(super) across: u32,
    pub(super) tiles: u32,
    pub(super) status: u64,
}

/// Rows of a matrix to decode, by their indices.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct GatherTask {
    pub(super) matrix: LinearMatrix,
    pub(super) indices: u64,
    pub(super) output: u64,
    pub(super) pitch: u64,
    pub(super) status: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) count: u32,
    /// 1 if indices have 64 bits.
    pub(super) wide: u32,
}

// SAFETY: `repr(C)` with the alignment and the fields of `kernels/linear_task.cuh`, only numbers.
unsafe impl DeviceRepr for Fast16Launch {}
// SAFETY: as above.
unsafe impl DeviceRepr for Tile16Launch {}
// SAFETY: as above.
unsafe impl DeviceRepr for Tile64Launch {}
// SAFETY: as above.
unsafe impl DeviceRepr for OrderLaunch {}
// SAFETY: as above.
unsafe impl DeviceRepr for Fast128Launch {}
// SAFETY: as above.
unsafe impl DeviceRepr for Fast256Launch {}
// SAFETY: as above.
unsafe impl DeviceRepr for GroupedLaunch {}
// SAFETY: as above.
unsafe impl DeviceRepr for PackTask {}
// SAFETY: as above.
unsafe impl DeviceRepr for UnpackTask {}
// SAFETY: as above.
unsafe impl DeviceRepr for GatherTask {}
