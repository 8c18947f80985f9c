//! How matrices are shared out among blocks, by their shapes alone (`kernels/linear_task.cuh`).

use super::task::{MATRICES, STRIP_ROWS, tiles_across};
use crate::gpu::fit::LANES;

/// Columns of which a split of K has a multiple, except the last one.
pub(super) const SPLIT_COLUMNS: u64 = 64;
/// Splits of K, at most.
pub(super) const MOST_SPLITS: u64 = 64;

/// Columns of each split of K but the last, which has the rest, by [`SPLIT_COLUMNS`].
pub(super) const fn split_blocks(columns: u64, splits: u64) -> u64 {
    columns.div_ceil(SPLIT_COLUMNS).div_ceil(splits)
}

/// Whether each of so many splits of K has columns.
pub(super) const fn has_columns(columns: u64, splits: u64) -> bool {
    splits <= MOST_SPLITS
        && (splits - 1) * split_blocks(columns, splits) < columns.div_ceil(SPLIT_COLUMNS)
}

/// Splits of strips that a block multiplies at once, at most, by up to
/// [`ROWS`](super::task::ROWS) rows of x in the order of a plan of the sum.
const FEW_UNITS: u64 = 6;
/// Warps of such a block that ask for what the others multiply; these are two for each unit.
const FEW_ASKING: u64 = 4;
/// What of this the kernels' constants tell.
pub(super) const FEW_SPLIT: [u64; 2] = [FEW_UNITS, FEW_ASKING];
/// Blocks of [`SPLIT_COLUMNS`] that one chain had better not exceed: it takes as long as reading.
const FEW_CHAIN: u64 = 64;

/// How blocks multiply by a matrix in the fast layout in the order of a plan of the sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FewMatrix {
    pub(super) splits: u64,
    /// Of all splits but the last, in blocks of [`SPLIT_COLUMNS`].
    pub(super) length: u64,
    /// Splits at once; more than [`FEW_UNITS`] come in passes.
    pub(super) pass_splits: u64,
    /// Strips at once, at most.
    pub(super) strips: u64,
    /// Strips of all matrices before.
    pub(super) first_strip: u64,
}

/// Likewise, by all matrices of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Few {
    pub(super) matrices: Vec<FewMatrix>,
    /// Splits of strips at once, and of one strip.
    pub(super) units: u64,
    pub(super) pass_splits: u64,
    pub(super) strips: u64,
    pub(super) blocks: u64,
}

impl Few {
    /// Of matrices with these rows and the splits that a caller wishes, 0 for the fastest, and as
    /// many columns, on a GPU that runs this many blocks at once.
    pub(super) fn new(shapes: impl Iterator<Item = (u64, u64)>, columns: u64, blocks: u32) -> Self {
        let (mut matrices, mut strips) = (Vec::new(), 0);
        for (rows, wish) in shapes {
            let splits = if wish > 0 { wish } else { fast_splits(rows, columns) };
            matrices.push(FewMatrix {
                splits,
                length: split_blocks(columns, splits),
                pass_splits: splits.div_ceil(splits.div_ceil(FEW_UNITS)),
                strips: 1,
                first_strip: strips,
            });
            strips += rows.div_ceil(STRIP_ROWS);
        }
        let blocks = strips.min(blocks.into()).max(1);
        let most = strips.div_ceil(blocks);
        // As many strips at once as there is room for, evenly.
        let at_once = |matrix: &FewMatrix| {
            let room = FEW_UNITS / matrix.pass_splits;
            if matrix.splits > FEW_UNITS { 1 } else { most.div_ceil(most.div_ceil(room)) }
        };
        let units = matrices.iter().map(|matrix| at_once(matrix) * matrix.pass_splits);
        let units = units.max().unwrap_or(1);
        for matrix in &mut matrices {
            if matrix.splits <= FEW_UNITS {
                matrix.strips = units / matrix.pass_splits;
            }
        }
        let pass_splits = matrices.iter().map(|matrix| matrix.pass_splits).max().unwrap_or(1);
        Self { matrices, units, pass_splits, strips, blocks }
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> u32 {
        (FEW_ASKING + 2 * self.units) as u32 * LANES
    }
}

/// With how many splits the product is fastest, by shape alone, so that bits are the same whatever
/// else a launch multiplies by: no chain is long, and units are no more than there is room for.
fn fast_splits(rows: u64, columns: u64) -> u64 {
    let strips = rows.div_ceil(STRIP_ROWS).div_ceil(BLOCKS);
    let blocks = columns.div_ceil(SPLIT_COLUMNS);
    let most = (FEW_UNITS / strips.min(FEW_UNITS)).max(1);
    let wanted = blocks.div_ceil(FEW_CHAIN).clamp(1, most);
    (1..=wanted).rev().find(|&splits| has_columns(columns, splits)).unwrap_or(1)
}

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

/// How the strips of a matrix are shared out among blocks: `linear_split` of the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// Strips that are an item each.
    pub(super) whole_strips: u64,
    /// Strips after them, rounded up to a group, each of several items: slices of its columns.
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

/// Counters of a matrix: of the strips of its tail.
pub(super) const MATRIX_COUNTERS: u64 = BLOCKS;
/// Counters that a launch needs.
pub(super) const COUNTERS: u64 = MATRICES as u64 * MATRIX_COUNTERS;

/// Strips of a block, at most, that multiplies by more than [`ROWS`](super::task::ROWS) rows of x.
const WIDE_STRIPS: u64 = 8;
/// Columns of a stage.
pub(super) const WIDE_COLUMNS: u64 = 64;
/// Blocks of a cluster.
pub(super) const WIDE_CLUSTER: u64 = 4;
/// That an H200 runs at once, of [`BLOCKS`] multiprocessors.
const WIDE_CLUSTERS: u64 = 30;
/// Of a block: fewer take as long.
const WIDE_LEAST_STRIPS: u64 = 4;
/// What the ends of a block's work take, in times of one strip's stage.
const WIDE_ENDS: u64 = 25;
/// And more if sums of parts meet.
const WIDE_MEETING: u64 = 20;
/// What of this the kernels' constants tell.
pub(super) const WIDE_SPLIT: [u64; 7] = [
    WIDE_STRIPS,
    WIDE_COLUMNS,
    WIDE_CLUSTER,
    WIDE_CLUSTERS,
    WIDE_LEAST_STRIPS,
    WIDE_ENDS,
    WIDE_MEETING,
];
/// Rows of x up to which each kernel multiplies.
pub(super) const WIDE_CLASSES: [u64; 3] = [32, 64, 128];

/// Clusters for a matrix: `wide_items` of the kernels.
const fn wide_items(rows: u64, parts: u64, strips: u64) -> u64 {
    let groups = rows.div_ceil(STRIP_ROWS).div_ceil(strips);
    (groups * parts).div_ceil(WIDE_CLUSTER)
}

/// `wide_time` of the kernels.
const fn wide_time(items: u64, columns: u64, parts: u64, strips: u64, clusters: u64) -> u64 {
    let each = if strips < WIDE_LEAST_STRIPS { WIDE_LEAST_STRIPS } else { strips };
    let ends = if parts > 1 { WIDE_ENDS + WIDE_MEETING } else { WIDE_ENDS };
    items.div_ceil(clusters) * (columns.div_ceil(WIDE_COLUMNS).div_ceil(parts) * each + ends)
}

/// In how many parts a matrix's columns are multiplied, by its shape alone, so that bits are the
/// same on all GPUs: `wide_parts` of the kernels.
fn wide_parts(rows: u64, columns: u64) -> u64 {
    let parts = (0..=WIDE_CLUSTER.ilog2()).map(|power| 1_u64 << power);
    let all = parts.flat_map(|parts| (1..=WIDE_STRIPS).map(move |strips| (parts, strips)));
    // The first one of the fastest.
    let time = |&(parts, strips): &(u64, u64)| {
        wide_time(wide_items(rows, parts, strips), columns, parts, strips, WIDE_CLUSTERS)
    };
    all.min_by_key(time).map_or(1, |(parts, _)| parts)
}

/// How matrices of a launch are shared out among clusters for more than
/// [`ROWS`](super::task::ROWS) rows of x.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wide {
    /// In how many parts the columns of each are multiplied.
    pub(super) parts: [u8; MATRICES],
    pub(super) strips: u64,
    pub(super) items: u64,
}

impl Wide {
    /// Of up to [`MATRICES`] matrices with these rows and as many columns, on a GPU with this many
    /// multiprocessors.
    pub(super) fn new(rows: &[u64], columns: u64, processors: u32) -> Self {
        let mut parts = [0; MATRICES];
        for (parts, &rows) in parts.iter_mut().zip(rows) {
            *parts = wide_parts(rows, columns) as u8;
        }
        let each = || rows.iter().zip(parts).map(|(&rows, parts)| (rows, u64::from(parts)));
        let items =
            |strips: u64| each().map(|(rows, parts)| wide_items(rows, parts, strips)).sum::<u64>();
        // That the GPU runs at once: `wide_clusters` of the kernels.
        let clusters = (u64::from(processors) * WIDE_CLUSTERS / BLOCKS).max(1);
        let time = |&strips: &u64| {
            each()
                .map(|(_, parts)| wide_time(items(strips), columns, parts, strips, clusters))
                .max()
        };
        // Even: a group of warps takes as long for one strip as for two.
        let strips = (2..=WIDE_STRIPS).step_by(2).min_by_key(time).unwrap_or(WIDE_STRIPS);
        Self { parts, strips, items: items(strips) }
    }
}

/// Rows of a band of x, at most, of the kernels for more rows than the last of [`WIDE_CLASSES`].
pub(super) const LARGE_CLASSES: [u64; 2] = [192, 256];
/// Strips of a group, whose stages follow each other.
const LARGE_STRIPS: u64 = 4;
/// A share has a multiple of these.
const LARGE_STAGES: u64 = 8;
/// Of x, at most.
const LARGE_BANDS: u64 = 8;
/// Rows of x that one launch multiplies, at most.
pub(super) const LARGE_ROWS: u64 = LARGE_BANDS * LARGE_CLASSES[1];
/// What sums of a share take that meet in memory.
pub(super) const LARGE_PARTIAL_BYTES: u64 = 2 * LARGE_STRIPS * STRIP_ROWS * LARGE_CLASSES[1] * 4;
/// What of this the kernels' constants tell.
pub(super) const LARGE_SPLIT: [u64; 5] =
    [LARGE_STRIPS, LARGE_STAGES, LARGE_PARTIAL_BYTES, LARGE_CLASSES[1], LARGE_BANDS];
/// Items of one launch, at most: those of two large matrices.
const MOST_ITEMS: u64 = 2 * BLOCKS;

/// Rows of x in bands with blocks of their own: `large_bands`, `large_band_rows` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bands {
    pub(super) count: u64,
    /// Of one; the last one may have fewer.
    pub(super) rows: u64,
}

impl Bands {
    /// Of no more than [`LARGE_ROWS`] rows of x.
    pub(super) fn new(x_rows: u64) -> Self {
        let count = x_rows.div_ceil(LARGE_CLASSES[1]).max(1);
        Self { count, rows: x_rows.div_ceil(count).next_multiple_of(8) }
    }

    pub(super) const fn class(self) -> usize {
        if self.rows <= LARGE_CLASSES[0] { 0 } else { 1 }
    }

    /// Blocks' work on a matrix, at most [`BLOCKS`]: each band of `large_shares` of the kernels.
    const fn items(self, rows: u64, columns: u64) -> u64 {
        let groups = rows.div_ceil(STRIP_ROWS).div_ceil(LARGE_STRIPS);
        let stages = groups * columns.div_ceil(WIDE_COLUMNS);
        stages.div_ceil(stages.div_ceil(BLOCKS / self.count).next_multiple_of(LARGE_STAGES))
            * self.count
    }
}

/// A launch of a kernel for more than the last of [`WIDE_CLASSES`] rows of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Large {
    /// The first of its matrices, and the one after the last.
    pub(super) matrices: (usize, usize),
    pub(super) items: u64,
}

impl Large {
    /// Launches for matrices with these rows and as many columns, few enough in each to bound what
    /// they need of a workspace.
    pub(super) fn all(rows: &[u64], columns: u64, bands: Bands) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (at, &rows) in rows.iter().enumerate() {
            let items = bands.items(rows, columns);
            match all.last_mut() {
                Some(last) if last.items + items <= MOST_ITEMS => {
                    *last = Self { matrices: (last.matrices.0, at + 1), items: last.items + items };
                }
                _ => all.push(Self { matrices: (at, at + 1), items }),
            }
        }
        all
    }

    /// The most items of a launch for up to this many rows of x.
    pub(super) fn most_items(rows: &[u64], columns: u64, x_rows: u64) -> u64 {
        let bands = (1..=Bands::new(x_rows).count).map(|count| Bands { count, rows: 0 });
        let all = bands.flat_map(|bands| Self::all(rows, columns, bands));
        all.map(|launch| launch.items).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        BLOCKS, Bands, Few, GROUP, LARGE_CLASSES, LARGE_ROWS, Large, MATRIX_COUNTERS, MOST_ITEMS,
        MOST_TAIL_ITEMS, Split, WIDE_STRIPS, Wide, has_columns, wide_items,
    };

    /// That it holds for matrices of many shapes.
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
                && split.partials() <= MOST_TAIL_ITEMS
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
        let of = |shapes: &[(u64, u64)], columns| {
            let few = Few::new(shapes.iter().copied(), columns, 132);
            let each = few.matrices.iter();
            let each = each.map(|m| [m.splits, m.length, m.pass_splits, m.strips, m.first_strip]);
            ([few.units, few.pass_splits, few.strips, few.blocks], each.collect::<Vec<_>>())
        };
        assert_eq!(of(&[(6144, 1)], 4096), ([2, 1, 192, 132], vec![[1, 64, 1, 2, 0]]));
        assert_eq!(of(&[(4096, 2)], 4096), ([2, 2, 128, 128], vec![[2, 32, 2, 1, 0]]));
        // Seven strips of a block in two rounds; splits in two passes.
        assert_eq!(of(&[(28_672, 1)], 4096), ([4, 1, 896, 132], vec![[1, 64, 1, 4, 0]]));
        assert_eq!(of(&[(5120, 10)], 25_600), ([5, 5, 160, 132], vec![[10, 40, 5, 1, 0]]));
        let (all, each) = of(&[(1024, 2), (33, 3), (160, 10)], 4096);
        assert_eq!(all, [6, 5, 39, 39]);
        assert_eq!(each, [[2, 32, 2, 3, 0], [3, 22, 3, 2, 32], [10, 7, 5, 1, 34]]);
        // 0 is any number that the shape bears.
        let (_, each) = of(&[(1, 0), (40_000, 0)], 8);
        assert!(each.iter().all(|matrix| matrix[0] == 1));
        assert!([(4096, 64), (1288, 7), (8, 1)].into_iter().all(|(k, s)| has_columns(k, s)));
        assert!([(4096, 65), (1288, 8), (8, 2)].into_iter().all(|(k, s)| !has_columns(k, s)));
    }

    #[test]
    fn strips_are_shared_out_among_clusters() {
        of_all_shapes((1..200_000).step_by(3001), |rows, columns| {
            let Wide { parts, strips, items } = Wide::new(&[rows], columns, 132);
            let blocks = items * 4 / u64::from(parts[0]);
            matches!(parts[0], 1 | 2 | 4)
                && (1..=WIDE_STRIPS).contains(&strips)
                && items > 0
                && blocks * strips >= rows.div_ceil(32)
        });
        let of = |rows, columns| {
            let wide = Wide::new(&[rows], columns, 132);
            (u64::from(wide.parts[0]), wide.strips, wide.items)
        };
        assert_eq!([of(6144, 4096), of(4096, 4096)], [(4, 8, 24), (4, 6, 22)]);
        assert_eq!([of(28_672, 4096), of(4096, 14_336)], [(1, 8, 28), (4, 6, 22)]);
        assert_eq!(of(32, 256), (1, 2, 1));
        // Parts are those of each matrix alone; strips are those of all together.
        let both = Wide::new(&[4096, 1024, 1024], 4096, 132);
        assert_eq!(both.parts[..4], [4, 4, 4, 0]);
        assert_eq!((both.strips, both.items), (8, 16 + 4 + 4));
        // With fewer multiprocessors more strips a block, and as many parts.
        let few = Wide::new(&[4096], 4096, 80);
        assert_eq!((few.parts[0], few.strips, few.items), (4, 8, 16));
        assert_eq!(Wide::new(&[4096], 4096, 1).parts[0], 4);
        assert_eq!(wide_items(33, 2, 1), 1);
    }

    #[test]
    fn rows_of_x_come_in_bands() {
        let of = |x_rows| {
            let bands = Bands::new(x_rows);
            (bands.count, bands.rows, LARGE_CLASSES[bands.class()])
        };
        assert_eq!([of(129), of(192)], [(1, 136, 192), (1, 192, 192)]);
        assert_eq!([of(193), of(256)], [(1, 200, 256), (1, 256, 256)]);
        assert_eq!([of(257), of(384)], [(2, 136, 192), (2, 192, 192)]);
        assert_eq!([of(512), of(2048)], [(2, 256, 256), (8, 256, 256)]);
        for x_rows in 129..=LARGE_ROWS {
            let Bands { count, rows } = Bands::new(x_rows);
            assert!(rows <= 256 && (rows * (count - 1)..rows * count).contains(&(x_rows - 1)));
        }
    }

    #[test]
    fn stages_are_shared_out_among_blocks() {
        let bands = [192, 256, 384, 512, 700, 1024, LARGE_ROWS].map(Bands::new);
        of_all_shapes((1..200_000).step_by(3001), |rows, columns| {
            let few = |items| (1..=BLOCKS.min(MATRIX_COUNTERS)).contains(&items);
            bands.iter().all(|bands| few(bands.items(rows, columns)))
        });
        let of = |rows, columns, x_rows| Bands::new(x_rows).items(rows, columns);
        assert_eq!([of(6144, 4096, 256), of(4096, 4096, 256)], [128; 2]);
        assert_eq!([of(28_672, 4096, 256), of(4096, 14_336, 256)], [128; 2]);
        assert_eq!([of(1, 8, 256), of(128, 1024, 256), of(1024, 4096, 256)], [1, 2, 64]);
        assert_eq!([of(6144, 4096, 192), of(4096, 4096, 384), of(28_672, 4096, 512)], [128; 3]);
        let all = |rows: &[u64]| Large::all(rows, 4096, Bands::new(256));
        let launch = |first, end, items| Large { matrices: (first, end), items };
        assert_eq!(all(&[4096, 1024, 1024]), [launch(0, 3, 256)]);
        assert_eq!(all(&[14_336, 14_336, 14_336]), [launch(0, 2, 256), launch(2, 3, 128)]);
        assert!(all(&[14_336; 8]).iter().all(|launch| launch.items <= MOST_ITEMS));
        // What is enough for some rows of x is enough for fewer.
        let most = |x_rows| Large::most_items(&[4096, 1024, 1024], 4096, x_rows);
        for x_rows in (129..LARGE_ROWS).step_by(61) {
            let launches = Large::all(&[4096, 1024, 1024], 4096, Bands::new(x_rows));
            assert!(launches.iter().all(|launch| launch.items <= most(x_rows)), "{x_rows}");
            assert!(most(x_rows) <= most(x_rows + 61));
        }
    }
}
