//! How matrices are shared out among blocks, as `kernels/linear_task.cuh` has it: by their shapes
//! alone.

use super::task::{MATRICES, STRIP_ROWS, tiles_across};

/// Items come in groups, and blocks too.
pub(super) const GROUP: u64 = 4;
/// The most strips that are shared out in slices, and one: the multiprocessors of an H100 or H200.
pub(super) const BLOCKS: u64 = 132;
const MOST_SLICES: u64 = 16;
/// Fewer cost more than they save: their sums meet late.
const LEAST_SLICES: u64 = 4;
const LEAST_TILES_A_SLICE: u64 = 4;
/// The tail has no more items than these: `BLOCKS` and some.
const MOST_TAIL_ITEMS: u64 = BLOCKS + 8;

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

/// Counters of a matrix: of the strips of its tail, or of ranges for each block of a cluster.
pub(super) const MATRIX_COUNTERS: u64 = BLOCKS;
/// Counters that a launch needs.
pub(super) const COUNTERS: u64 = MATRICES as u64 * MATRIX_COUNTERS;

/// Rows of a matrix that a cluster of blocks multiplies by more than
/// [`MORE_ROWS`](super::task::MORE_ROWS) rows of
/// x: an item.
const WIDE_ITEM_ROWS: u64 = 256;
/// Columns of a stage of an item.
const WIDE_COLUMNS: u64 = 128;
/// Blocks of a cluster.
pub(super) const WIDE_CLUSTER: u64 = 2;
/// At most.
const WIDE_RANGES: u64 = BLOCKS / WIDE_CLUSTER;
/// Of a share, if there are that many.
const WIDE_LEAST_STAGES: u64 = 4;
/// What of this the kernels' constants tell.
pub(super) const WIDE_SPLIT: [u64; 4] = [WIDE_ITEM_ROWS, WIDE_COLUMNS, WIDE_RANGES, WIDE_LEAST_STAGES];
/// Rows of x up to which each kernel multiplies.
pub(super) const WIDE_CLASSES: [u64; 2] = [64, 128];

/// How matrices of a launch are shared out among clusters for more rows of x: the sums of
/// `wide_split` of the kernels, by shapes alone.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wide {
    /// A cluster's work: a share of the items that are not whole, and whole items.
    pub(super) ranges: u64,
    /// Parts of items, whose sums meet in memory.
    partials: u64,
}

impl Wide {
    /// And a matrix more.
    #[must_use]
    pub(super) const fn and(self, rows: u64, columns: u64) -> Self {
        let (items, stages) = (rows.div_ceil(WIDE_ITEM_ROWS), columns.div_ceil(WIDE_COLUMNS));
        let rest = items % WIDE_RANGES;
        let most = (rest * stages).div_ceil(WIDE_LEAST_STAGES);
        let shares = if most < WIDE_RANGES { most } else { WIDE_RANGES };
        let ranges = if items < WIDE_RANGES { shares } else { WIDE_RANGES };
        Self { ranges: self.ranges + ranges, partials: self.partials + rest + shares }
    }

    /// Of sums of parts, for this many rows of x.
    pub(super) fn partial_bytes(self, x_rows: u64) -> u64 {
        self.partials * WIDE_ITEM_ROWS * wide_class(x_rows) * 4
    }

    /// Of x as the kernels want it.
    pub(super) fn arranged_bytes(columns: u64, x_rows: u64) -> u64 {
        columns.next_multiple_of(WIDE_COLUMNS) * wide_class(x_rows) * 2
    }
}

/// Rows for which the kernel of this many rows of x has room.
fn wide_class(x_rows: u64) -> u64 {
    let most = WIDE_CLASSES[WIDE_CLASSES.len() - 1];
    WIDE_CLASSES.into_iter().find(|&class| x_rows <= class).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::{GROUP, MATRIX_COUNTERS, MOST_TAIL_ITEMS, Split, WIDE_CLUSTER, WIDE_RANGES, Wide};

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

    #[test]
    fn stages_are_shared_out_in_ranges() {
        for rows in (1..200_000).step_by(3001) {
            for columns in (8..40_000).step_by(1016) {
                let Wide { ranges, partials } = Wide::default().and(rows, columns);
                assert!(ranges > 0 && ranges * WIDE_CLUSTER <= MATRIX_COUNTERS, "{rows} x {columns}");
                assert!(partials < 2 * WIDE_RANGES, "{rows} x {columns}");
            }
        }
        let of = |rows, columns| {
            let wide = Wide::default().and(rows, columns);
            [wide.ranges, wide.partials]
        };
        assert_eq!([of(4096, 4096), of(28_672, 4096), of(32, 520)], [[66, 82], [66, 112], [2, 3]]);
        assert_eq!([of(256 * 66, 4096), of(256 * 67, 4096)], [[66, 0], [66, 9]]);
        let both = Wide::default().and(4096, 4096).and(32, 520);
        assert_eq!((both.ranges, both.partial_bytes(33)), (68, 85 * 256 * 64 * 4));
        assert_eq!((Wide::arranged_bytes(520, 33), Wide::arranged_bytes(512, 128)), (640 * 128, 512 * 256));
    }
}
