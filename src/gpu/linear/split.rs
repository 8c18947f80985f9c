//! How thread blocks share matrices, which depends only on the matrices' shapes
//! (`kernels/linear_task.cuh`).

use super::task::{BAND_ROWS, MATRICES, Order, ROWS, STRIP_ROWS, tiles_across};
use crate::gpu::fit::LANES;

/// Every split of K but the last has a multiple of this many columns.
pub(super) const SPLIT_COLUMNS: u64 = 64;
/// Most splits of K.
pub(super) const MAX_SPLITS: u64 = 64;

/// Columns of each split of K but the last, which has the rest, in blocks of [`SPLIT_COLUMNS`].
pub(super) const fn split_blocks(columns: u64, splits: u64) -> u64 {
    columns.div_ceil(SPLIT_COLUMNS).div_ceil(splits)
}

/// Whether each split has columns if K is cut into this many.
pub(super) const fn has_columns(columns: u64, splits: u64) -> bool {
    splits <= MAX_SPLITS
        && (splits - 1) * split_blocks(columns, splits) < columns.div_ceil(SPLIT_COLUMNS)
}

/// Most splits of strips that a block multiplies at once, by up to [`ROWS`] rows of x in the order
/// of a plan of the sum. With several bands of [`BAND_ROWS`] rows it has as many warps.
const ORDER_UNITS: u64 = 6;
/// The same for a band of more rows: shared memory then has room for three stages or more.
const ORDER_UNITS_OF_MORE_ROWS: u64 = 4;
/// Warps of such a block that bring data to the others. Each unit has two of these for each band.
const ORDER_HELPERS: u64 = 8;
/// Values also compiled into the kernels.
pub(super) const ORDER_SPLIT: [u64; 2] = [ORDER_UNITS, ORDER_HELPERS];
/// Most blocks of [`SPLIT_COLUMNS`] that a chain should have: this many take as long as reading.
const ORDER_CHAIN: u64 = 64;

/// How blocks multiply by all matrices of a launch, in the order of a plan of the sum.
#[derive(Clone, Debug)]
pub(super) struct OrderPlan {
    pub(super) matrices: Vec<Order>,
    /// Splits of strips at once, and at most of one strip.
    pub(super) units: u64,
    pub(super) pass_splits: u64,
    pub(super) strips: u64,
    pub(super) blocks: u64,
    /// Bands of [`BAND_ROWS`] rows of x.
    bands: u64,
}

impl OrderPlan {
    /// Plans the product of up to `x_rows` rows by matrices with these rows and `columns` columns,
    /// on a GPU that runs `blocks` blocks at once. Each matrix has the splits that a caller asks
    /// for, or 0 for the fastest.
    pub(super) fn new(
        shapes: impl Iterator<Item = (u64, u64)>,
        columns: u64,
        x_rows: u64,
        blocks: u32,
    ) -> Self {
        let bands = x_rows.div_ceil(BAND_ROWS);
        let max_units = match bands {
            1 if x_rows > ROWS => ORDER_UNITS_OF_MORE_ROWS,
            bands => ORDER_UNITS / bands,
        };
        let (mut matrices, mut strips) = (Vec::new(), 0);
        for (rows, wish) in shapes {
            let splits = if wish > 0 { wish } else { fast_splits(rows, columns) };
            // No truncation: a matrix has at most 2^27 strips, and fewer than 2^32 columns.
            matrices.push(Order {
                first_strip: strips as u32,
                splits: splits as u32,
                length: split_blocks(columns, splits) as u32,
                pass_splits: splits.div_ceil(splits.div_ceil(max_units)) as u32,
                strips: 1,
            });
            strips += rows.div_ceil(STRIP_ROWS);
        }
        let blocks = strips.min(blocks.into()).max(1);
        let most = strips.div_ceil(blocks);
        // Takes as many strips at once as there is room for, evenly.
        let at_once = |matrix: &Order| {
            let room = max_units / u64::from(matrix.pass_splits);
            if matrix.has_passes() { 1 } else { most.div_ceil(most.div_ceil(room)) }
        };
        let units = matrices.iter().map(|matrix| at_once(matrix) * u64::from(matrix.pass_splits));
        let units = units.max().unwrap_or(1);
        for matrix in &mut matrices {
            let strips = if matrix.has_passes() { 1 } else { units as u32 / matrix.pass_splits };
            matrix.strips = (0x1_0000 / matrix.pass_splits + 1) << 8 | strips;
        }
        let pass_splits = matrices.iter().map(|matrix| matrix.pass_splits).max().unwrap_or(1);
        Self { matrices, units, pass_splits: pass_splits.into(), strips, blocks, bands }
    }

    /// Threads per block.
    pub(super) fn threads(&self) -> u32 {
        (ORDER_HELPERS + 2 * self.bands * self.units) as u32 * LANES
    }
}

/// The number of splits with which the product is fastest, by shape alone, so that bits are the
/// same whatever else a launch multiplies by. No chain is long, and units are no more than there is
/// room for.
fn fast_splits(rows: u64, columns: u64) -> u64 {
    let strips = rows.div_ceil(STRIP_ROWS).div_ceil(BLOCKS);
    let blocks = columns.div_ceil(SPLIT_COLUMNS);
    let most = (ORDER_UNITS / strips.min(ORDER_UNITS)).max(1);
    let wanted = blocks.div_ceil(ORDER_CHAIN).clamp(1, most);
    (1..=wanted).rev().find(|&splits| has_columns(columns, splits)).unwrap_or(1)
}

/// Items come in groups of this size, and so do blocks.
pub(super) const GROUP: u64 = 4;
/// Strips that are shared out in slices are fewer than these: the multiprocessors of an H100 or
/// H200.
pub(super) const BLOCKS: u64 = 132;
const MAX_SLICES: u64 = 16;
/// Fewer slices cost more than they save, because their sums meet late.
const MIN_SLICES: u64 = 4;
const MIN_SLICE_TILES: u64 = 4;
/// Most items of the tail: `BLOCKS` and some more.
const MAX_TAIL_ITEMS: u64 = BLOCKS + 8;

/// How blocks share the strips of a matrix for up to 16 rows of x: as items.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// Strips that are one item each.
    pub whole_strips: u64,
    /// Strips after them, rounded up to a group, each of several items: slices of its columns.
    tail: u64,
    /// Number of slices.
    pub slices: u64,
}

impl Split {
    /// Shares a matrix of this shape, which alone decides, for the multiprocessors of the GPUs that
    /// we have.
    pub const fn new(rows: u64, columns: u64) -> Self {
        let (strips, tiles) = (rows.div_ceil(STRIP_ROWS), tiles_across(columns));
        let (tail, mut slices) = ((strips % BLOCKS).next_multiple_of(GROUP), 1);
        while slices < MAX_SLICES
            && tail * slices * 2 <= MAX_TAIL_ITEMS
            && tiles >= slices * MIN_SLICE_TILES
        {
            slices *= 2;
        }
        if slices < MIN_SLICES {
            slices = 1;
        }
        Self { whole_strips: strips - strips % BLOCKS, tail, slices }
    }

    /// Number of items.
    pub const fn items(self) -> u64 {
        self.whole_strips + self.tail * self.slices
    }

    /// Number of items whose sums meet in memory.
    pub const fn partials(self) -> u64 {
        if self.slices > 1 { self.tail * self.slices } else { 0 }
    }
}

/// Counters per matrix, for the strips of its tail.
pub(super) const MATRIX_COUNTERS: u64 = BLOCKS;
/// Counters that a launch needs.
pub(super) const COUNTERS: u64 = MATRICES as u64 * MATRIX_COUNTERS;

#[cfg(test)]
mod tests {
    use super::{GROUP, MATRIX_COUNTERS, MAX_TAIL_ITEMS, OrderPlan, Split, has_columns};

    /// Asserts that it holds for matrices of many shapes.
    fn of_all_shapes(rows: impl Iterator<Item = u64>, holds: impl Fn(u64, u64) -> bool) {
        for rows in rows {
            for columns in (8..40_000).step_by(1016) {
                assert!(holds(rows, columns), "{rows} x {columns}");
            }
        }
    }

    #[test]
    fn strips_are_shared_out_in_groups() {
        of_all_shapes((1..20_000).step_by(31), |rows, columns| {
            let split = Split::new(rows, columns);
            let (tail, items) = (rows.div_ceil(32) - split.whole_strips, split.items());
            tail < MATRIX_COUNTERS
                && split.tail.abs_diff(tail) < GROUP
                && items.is_multiple_of(GROUP)
                && items > 0
                && split.partials() <= MAX_TAIL_ITEMS
        });
        let of = |rows, columns| {
            let split = Split::new(rows, columns);
            [split.whole_strips, split.items(), split.partials()]
        };
        assert_eq!([of(4224, 4096), of(4096, 4096)], [[132, 132, 0], [0, 128, 0]]);
        assert_eq!(of(32, 4096), [0, 32, 32]);
        assert_eq!([of(28_672, 4096), of(32, 520)], [[792, 792 + 104, 0], [0, 4, 0]]);
    }

    #[test]
    fn splits_of_strips_are_shared_out_among_blocks() {
        let planned = |shapes: &[(u64, u64)], columns, x_rows| {
            let few = OrderPlan::new(shapes.iter().copied(), columns, x_rows, 132);
            let each = few.matrices.iter();
            let each =
                each.map(|m| [m.splits, m.length, m.pass_splits, m.strips & 0xff, m.first_strip]);
            ([few.units, few.pass_splits, few.strips, few.blocks], each.collect::<Vec<_>>())
        };
        let of = |shapes: &[(u64, u64)], columns| planned(shapes, columns, 16);
        assert_eq!(of(&[(6144, 1)], 4096), ([2, 1, 192, 132], vec![[1, 64, 1, 2, 0]]));
        assert_eq!(of(&[(4096, 2)], 4096), ([2, 2, 128, 128], vec![[2, 32, 2, 1, 0]]));
        // Seven strips of a block in two rounds; splits in two passes.
        assert_eq!(of(&[(28_672, 1)], 4096), ([4, 1, 896, 132], vec![[1, 64, 1, 4, 0]]));
        assert_eq!(of(&[(5120, 10)], 25_600), ([5, 5, 160, 132], vec![[10, 40, 5, 1, 0]]));
        assert_eq!(planned(&[(5120, 10)], 25_600, 32).1, [[10, 40, 4, 1, 0]]);
        // Bands share a block's warps.
        assert_eq!(planned(&[(5120, 10)], 25_600, 64).1, [[10, 40, 3, 1, 0]]);
        let bands = OrderPlan::new([(6144, 1)].into_iter(), 4096, 64, 132);
        assert_eq!((bands.units, bands.threads()), (2, (8 + 2 * 2 * 2) * 32));
        let (all, each) = of(&[(1024, 2), (33, 3), (160, 10)], 4096);
        assert_eq!(all, [5, 5, 39, 39]);
        assert_eq!(each, [[2, 32, 2, 2, 0], [3, 22, 3, 1, 32], [10, 7, 5, 1, 34]]);
        // 0 gives any number that the shape allows.
        let (_, each) = of(&[(1, 0), (40_000, 0)], 8);
        assert!(each.iter().all(|matrix| matrix[0] == 1));
        assert!([(4096, 64), (1288, 7), (8, 1)].into_iter().all(|(k, s)| has_columns(k, s)));
        assert!([(4096, 65), (1288, 8), (8, 2)].into_iter().all(|(k, s)| !has_columns(k, s)));
    }
}
