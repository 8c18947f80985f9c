//! What the host hands to the kernels that multiply and transcode: the mirror of
//! `kernels/linear_task.cuh`. Sizes are compared with the kernels' when they are loaded.
#![expect(unsafe_code, reason = "arguments of kernels, by value")]

use cudarc::driver::DeviceRepr;
use zerocopy::{Immutable, IntoBytes};

/// Rows of a strip.
pub(super) const STRIP_ROWS: u64 = 32;
/// Columns of a tile.
pub(super) const TILE_COLUMNS: u64 = 256;
/// Columns of a step of the fast layout.
const STEP_COLUMNS: u64 = 32;
/// Bytes of a step of a strip: plane and codes.
const STEP_BYTES: u64 = 1536;
/// Bytes of a whole tile's data in the fast layout.
pub(super) const TILE_BYTES: u64 = TILE_COLUMNS / STEP_COLUMNS * STEP_BYTES;
/// Bytes of a tile's head in the fast layout.
pub(super) const HEAD_BYTES: u64 = 8;
/// Bytes of an exception of the fast layout.
pub(super) const ENTRY_BYTES: u64 = 4;

/// Matrices of a launch, at most.
pub(super) const MATRICES: usize = 8;
/// Rows of x of a launch, at most.
pub(super) const ROWS: u64 = 16;
/// Bytes of the sums of an item.
pub(super) const PARTIAL_BYTES: u64 = STRIP_ROWS * ROWS * 4;
/// Warps of a block of the kernels that count and pack, a tile each.
pub(super) const PACK_WARPS: u64 = 4;
/// Threads of the only block of the kernel that scans.
pub(super) const SCAN_THREADS: u32 = 1024;
/// Warps of a block of the kernel that unpacks, a tile each.
pub(super) const UNPACK_WARPS: u64 = 8;

/// Items come in groups, and blocks too.
pub(super) const GROUP: u64 = 4;
/// The most strips that are shared out in slices, and one: the multiprocessors of an H100 or H200.
const BLOCKS: u64 = 132;
const MOST_SLICES: u64 = 16;
/// Fewer cost more than they save: their sums meet late.
const LEAST_SLICES: u64 = 4;
const LEAST_TILES_A_SLICE: u64 = 4;
/// The tail has no more items than these: `BLOCKS` and some.
const MOST_TAIL_ITEMS: u64 = BLOCKS + 8;

/// Tiles of a strip.
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

/// How the strips of a matrix are shared out among blocks, by its shape alone: `linear_split` of
/// the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// Strips that are an item each.
    pub(super) whole_strips: u64,
    /// Strips after them, rounded up to a group, of which each is several items: slices of its
    /// columns.
    tail: u64,
    pub(super) slices: u64,
}

impl Split {
    pub(super) const fn new(rows: u64, columns: u64) -> Self {
        let (strips, tiles) = (rows.div_ceil(STRIP_ROWS), tiles_across(columns));
        let (tail, mut slices) = ((strips % BLOCKS).next_multiple_of(GROUP), 1);
        while slices < MOST_SLICES
            && tail * slices * 2 <= MOST_TAIL_ITEMS
            && tiles >= slices * LEAST_TILES_A_SLICE
        {
            slices *= 2;
        }
        if slices < LEAST_SLICES {
            slices = 1;
        }
        Self { whole_strips: strips - strips % BLOCKS, tail, slices }
    }

    pub(super) const fn items(self) -> u64 {
        self.whole_strips + self.tail * self.slices
    }

    /// Items whose sums meet in memory.
    pub(super) const fn partials(self) -> u64 {
        if self.slices > 1 { self.tail * self.slices } else { 0 }
    }
}

/// Counters that a launch needs: of each matrix for the strips of its tail.
pub(super) const COUNTERS: u64 = MATRICES as u64 * BLOCKS;
/// Counters of a matrix.
pub(super) const MATRIX_COUNTERS: u64 = BLOCKS;

/// One matrix of a launch, and where its product goes. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C, align(16))]
pub(super) struct LinearMatrix {
    pub(super) data: u64,
    pub(super) index: u64,
    pub(super) rest: u64,
    /// The decode table of `tile`; 0 for the fast layout.
    pub(super) table: u64,
    pub(super) rest_count: u64,
    pub(super) bias: u64,
    pub(super) y: u64,
    /// In elements.
    pub(super) y_pitch: u64,
    pub(super) rows: u32,
    pub(super) whole_strips: u32,
    pub(super) slices: u32,
    pub(super) first_item: u32,
    /// The counter of its first strip.
    pub(super) first_strip: u32,
    pub(super) first_partial: u32,
    /// Of the matrix of which this is a slice, or this one's.
    pub(super) whole_columns: u32,
    /// Of the same: a multiple of 256.
    pub(super) first_column: u32,
}

/// A launch of a kernel that multiplies. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct LinearLaunch {
    pub(super) x: u64,
    /// In elements.
    pub(super) x_pitch: u64,
    pub(super) x_rows: u32,
    pub(super) columns: u32,
    pub(super) matrix_count: u32,
    pub(super) items: u32,
    pub(super) counters: u64,
    pub(super) partials: u64,
    pub(super) status: u64,
    pub(super) reserved: u64,
    pub(super) matrices: [LinearMatrix; MATRICES],
}

/// Experts of a mixture, at most.
pub(super) const MOST_EXPERTS: usize = 1024;
/// Places of one expert that a block multiplies at once, at least.
pub(super) const LEAST_CHUNK: u64 = 8;

/// A launch of the kernel that multiplies by experts. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct GroupedLaunch {
    pub(super) x: u64,
    /// In elements.
    pub(super) x_pitch: u64,
    pub(super) x_index: u64,
    pub(super) offsets: u64,
    pub(super) matrices: u64,
    pub(super) y: u64,
    /// In elements.
    pub(super) y_pitch: u64,
    pub(super) status: u64,
    pub(super) x_rows: u32,
    pub(super) columns: u32,
    pub(super) rows: u32,
    pub(super) places: u32,
    pub(super) experts: u32,
    pub(super) reserved: [u32; 3],
}

/// A range of whole strips to transcode from BF16. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct PackTask {
    pub(super) weights: u64,
    /// In elements.
    pub(super) pitch: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) heads: u64,
    pub(super) data: u64,
    pub(super) entries: u64,
    pub(super) capacity: u64,
    pub(super) total: u64,
    pub(super) reserved: u64,
}

/// A matrix in the fast layout to decode. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct UnpackTask {
    pub(super) data: u64,
    pub(super) heads: u64,
    pub(super) entries: u64,
    pub(super) entry_count: u64,
    pub(super) output: u64,
    /// In elements.
    pub(super) pitch: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) whole_columns: u32,
    pub(super) reserved: [u32; 3],
    pub(super) status: u64,
}

/// Rows of a matrix in the fast layout to decode, by their indices. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub(super) struct GatherTask {
    pub(super) data: u64,
    pub(super) index: u64,
    pub(super) rest: u64,
    pub(super) table: u64,
    pub(super) rest_count: u64,
    pub(super) indices: u64,
    pub(super) output: u64,
    /// In elements.
    pub(super) pitch: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) count: u32,
    /// 1 if indices have 64 bits.
    pub(super) wide: u32,
    pub(super) whole_columns: u32,
    pub(super) first_column: u32,
    pub(super) status: u64,
}

// SAFETY: `repr(C)` with the alignment and the fields of `kernels/linear_task.cuh`, all of them
// numbers.
unsafe impl DeviceRepr for LinearLaunch {}
// SAFETY: as above.
unsafe impl DeviceRepr for GroupedLaunch {}
// SAFETY: as above.
unsafe impl DeviceRepr for PackTask {}
// SAFETY: as above.
unsafe impl DeviceRepr for UnpackTask {}
// SAFETY: as above.
unsafe impl DeviceRepr for GatherTask {}

/// The first of the kernels' constants.
pub(super) const SIZES: [u64; 6] = [
    size_of::<LinearLaunch>() as u64,
    size_of::<LinearMatrix>() as u64,
    size_of::<PackTask>() as u64,
    size_of::<UnpackTask>() as u64,
    size_of::<GroupedLaunch>() as u64,
    size_of::<GatherTask>() as u64,
];

#[cfg(test)]
mod tests {
    use super::{GROUP, MATRIX_COUNTERS, MOST_TAIL_ITEMS, Split};

    #[test]
    fn strips_are_shared_out_in_groups() {
        for rows in (1..20_000).step_by(31) {
            for columns in (8..40_000).step_by(1016) {
                let split = Split::new(rows, columns);
                let tail = rows.div_ceil(32) - split.whole_strips;
                assert!(tail < MATRIX_COUNTERS && split.tail.abs_diff(tail) < GROUP, "{rows} x {columns}");
                assert!(split.items().is_multiple_of(GROUP) && split.items() > 0, "{rows} x {columns}");
                assert!(split.partials() <= MOST_TAIL_ITEMS, "{rows} x {columns}");
            }
        }
        let of = |rows, columns| {
            let split = Split::new(rows, columns);
            [split.whole_strips, split.items(), split.partials()]
        };
        assert_eq!([of(4224, 4096), of(4096, 4096), of(32, 4096)], [[132, 132, 0], [0, 128, 0], [0, 32, 32]]);
        assert_eq!([of(28_672, 4096), of(32, 520)], [[792, 792 + 104, 0], [0, 4, 0]]);
    }
}
