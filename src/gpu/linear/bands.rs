//! How thread blocks share matrices in the fast layout for more than [`ROWS`](super::task::ROWS)
//! rows of x, in bands of these rows (`kernels/linear_task.cuh`). The result's bits depend only on
//! splits; the rest is chosen for speed.

use super::split::{BLOCKS, has_columns, split_blocks};
use super::task::{MATRICES, STRIP_ROWS};

/// Most splits of a matrix's columns, and most blocks per cluster.
pub(super) const FAST128_SPLITS: u64 = 8;
/// Columns per stage.
pub(super) const FAST128_COLUMNS: u64 = 64;
/// Most strips per block, for [`FAST128_CLASSES`].
const FAST128_STRIPS: u64 = 8;
/// Strips per group, for [`FAST256_CLASSES`]. Groups of [`HALF_STRIPS`] decode more slowly for each
/// product, but there are twice as many of them for the multiprocessors.
const FAST256_STRIPS: u64 = 4;
const HALF_STRIPS: u64 = 2;
/// Bytes of the sums that a block with groups of [`FAST256_STRIPS`] keeps in memory or hands over.
const FAST256_PARTIAL_BYTES: u64 = 3 * FAST256_STRIPS * STRIP_ROWS * FAST256_CLASSES[1] * 4;
/// Values also compiled into the kernels.
pub(super) const BAND_SPLIT: [u64; 7] = [
    FAST128_STRIPS,
    FAST256_STRIPS,
    HALF_STRIPS,
    FAST128_COLUMNS,
    FAST128_SPLITS,
    FAST256_CLASSES[1],
    FAST256_PARTIAL_BYTES,
];

/// Most rows of x per band, of each kernel whose blocks have strips of one split.
pub(super) const FAST128_CLASSES: [u64; 3] = [32, 64, 128];
/// Most rows of x per band, of each kernel whose blocks have even shares of all stages; for more
/// than 128 rows of x.
pub(super) const FAST256_CLASSES: [u64; 2] = [192, 256];
/// Most rows of x that one launch multiplies. 12 bands by 11 shares are all 132 blocks that an H100
/// or H200 runs at once. Several launches take less time than one with more rows, probably because
/// L2 does not hold the columns of x that its blocks read
/// (`benches/record/2026-11-28-many-rows-h100.md`).
pub(super) const LAUNCH_ROWS: u64 = 12 * FAST256_CLASSES[1];
/// Most splits to choose from if the caller asks for none.
const FREE_SPLITS: u64 = 4;

/// Clusters of 1 to [`FAST128_SPLITS`] blocks that an H100 runs at once, on [`BLOCKS`]
/// multiprocessors.
const CLUSTERS: [u64; FAST128_SPLITS as usize] = [132, 66, 39, 30, 22, 17, 15, 15];
/// Nanoseconds per stage on an H100, for each of [`FAST128_CLASSES`]: a fixed part, and a part per
/// strip (`benches/record/2026-11-26-exact-order-wide.md`).
const FAST128_STAGE: [(u64, u64); 3] = [(110, 53), (110, 64), (120, 84)];
/// Nanoseconds per stage, for each of [`FAST256_CLASSES`], with groups of [`FAST256_STRIPS`] on an
/// H100 and of [`HALF_STRIPS`] on an H200 (`benches/record/2026-11-29-half-groups-h200.md`).
const FAST256_STAGE: [u64; 2] = [600, 720];
const HALF_STAGE: [u64; 2] = [340, 440];
/// Nanoseconds per block besides its stages; additional ones if sums meet in a cluster, and if a
/// chain is handed over.
const ENDS: u64 = 4000;
const MEETING: u64 = 1500;
const HANDING: u64 = 15_000;
/// Percent of [`FAST256_STAGE`] that a stage takes if shares end inside a group, for x of at most
/// this many bytes, as measured (`benches/record/2026-11-28-many-rows-h100.md`). Blocks of
/// different shares then read different columns of x, of which L2 (50 MB) holds a part.
const HANDED_STAGE: [(u64, u64); 3] = [(16 << 20, 100), (40 << 20, 120), (u64::MAX, 190)];

/// How a launch multiplies 17 or more rows of x by matrices in the fast layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BandPlan {
    /// Splits of the columns of each matrix.
    pub splits: [u8; MATRICES],
    /// The kernel: 32, 64, 128, 192 or 256 rows of x.
    pub class: u64,
    /// Rows of x per band; the last band may have fewer.
    pub band_rows: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Blocks per cluster; from class 192 on two blocks share x.
    pub cluster: u64,
    /// Most strips per block; from class 192 on per group.
    pub strips: u64,
    /// Stages per share from class 192 on, otherwise 0.
    pub share_stages: u64,
    /// Expected nanoseconds.
    pub time: u64,
}

impl BandPlan {
    /// Whether the kernel is one for groups of [`HALF_STRIPS`].
    pub(super) fn has_half_groups(&self) -> bool {
        self.share_stages > 0 && self.strips == HALF_STRIPS
    }

    /// Rows of x that one copy brings.
    pub(super) fn box_rows(&self) -> u64 {
        if self.share_stages > 0 { self.band_rows / self.cluster } else { self.band_rows }
    }

    /// Plans the product by up to eight matrices with these rows and `columns` columns, and
    /// 17 to 3072 rows of x, on a GPU that runs `processors` blocks at once. Each matrix has the
    /// splits that a caller asks for, or 0 for the fastest, which do not depend on `processors`.
    pub fn new(
        matrices: impl Iterator<Item = (u64, u64)>,
        columns: u64,
        x_rows: u64,
        processors: u64,
    ) -> Self {
        let mut resolved = [(0, 1); MATRICES];
        let mut count = 0;
        for (to, (rows, wish)) in resolved.iter_mut().zip(matrices) {
            *to = (rows, if wish > 0 { wish } else { fastest_splits(rows, columns, x_rows) });
            count += 1;
        }
        let matrices = &resolved[..count];
        Shapes { matrices, columns, x_rows, processors: processors.max(1) }.fastest()
    }

    /// Most bytes of sums in memory, of matrices with these rows and up to this many rows of x.
    pub(super) fn partial_bytes(
        rows: impl Iterator<Item = u64>,
        x_rows: u64,
        processors: u64,
    ) -> u64 {
        if x_rows <= FAST128_CLASSES[2] {
            return 0;
        }
        let groups: u64 = rows.map(|rows| rows.div_ceil(FAST256_STRIPS * STRIP_ROWS)).sum();
        let bands = x_rows.min(LAUNCH_ROWS).div_ceil(FAST256_CLASSES[0]);
        (groups * bands).min(processors.max(bands)) * FAST256_PARTIAL_BYTES
    }
}

/// The number of splits with which the product is fastest, by shape and by the next larger number
/// of rows that [`Linear`](super::Linear) documents.
fn fastest_splits(rows: u64, columns: u64, x_rows: u64) -> u64 {
    let classes = FAST128_CLASSES.into_iter().chain(FAST256_CLASSES);
    let x_rows = classes
        .clone()
        .find(|&class| x_rows <= class)
        .unwrap_or_else(|| x_rows.next_multiple_of(FAST256_CLASSES[1]));
    let time = |&splits: &u64| {
        let matrices = &[(rows, splits)];
        Shapes { matrices, columns, x_rows, processors: BLOCKS }.fastest().time
    };
    let splits = (1..=FREE_SPLITS).filter(|&splits| has_columns(columns, splits));
    splits.min_by_key(time).unwrap_or(1)
}

/// The matrices and rows of x of a launch.
struct Shapes<'a> {
    /// Rows and splits of each matrix.
    matrices: &'a [(u64, u64)],
    columns: u64,
    x_rows: u64,
    processors: u64,
}

impl Shapes<'_> {
    fn fastest(&self) -> BandPlan {
        let most = self.matrices.iter().map(|&(_, splits)| splits).max().unwrap_or(1);
        // A larger cluster than the most splits need is useful only if other matrices have fewer
        // splits.
        let alike = self.matrices.iter().all(|&(_, splits)| splits == most);
        let clusters = most..=if alike { most } else { FAST128_SPLITS };
        let mut all = Vec::with_capacity(64);
        for class in 0..FAST128_CLASSES.len() {
            for cluster in clusters.clone() {
                // Even: a group of warps takes as long for one strip as for two.
                let strips = (2..=FAST128_STRIPS).step_by(2);
                all.extend(strips.map(|strips| self.fast_128(class, cluster, strips)));
            }
        }
        if self.x_rows > FAST128_CLASSES[2] {
            for class in 0..FAST256_CLASSES.len() {
                all.push(self.fast_256(class, HALF_STRIPS, HALF_STAGE[class]));
                all.push(self.fast_256(class, FAST256_STRIPS, FAST256_STAGE[class]));
            }
        }
        all.into_iter().min_by_key(|plan| plan.time).expect("each class has some")
    }

    fn bands(&self, class: u64) -> u64 {
        self.x_rows.div_ceil(class).max(1)
    }

    fn launch(&self, class: u64, blocks: u64, time: u64) -> BandPlan {
        let mut splits = [1; MATRICES];
        for (to, &(_, own)) in splits.iter_mut().zip(self.matrices) {
            *to = own as u8;
        }
        let band_rows = self.x_rows.div_ceil(self.bands(class)).next_multiple_of(8);
        let (cluster, strips, share_stages) = (1, 0, 0);
        BandPlan { splits, class, band_rows, blocks, cluster, strips, share_stages, time }
    }

    /// The plan for a kernel of [`FAST128_CLASSES`].
    fn fast_128(&self, class: usize, cluster: u64, strips: u64) -> BandPlan {
        let (rows, (least, each)) = (FAST128_CLASSES[class], FAST128_STAGE[class]);
        let clusters = self.matrices.iter().map(|&(rows, splits)| {
            rows.div_ceil(STRIP_ROWS).div_ceil(strips).div_ceil(cluster / splits)
        });
        let clusters = clusters.sum::<u64>() * self.bands(rows);
        let at_once = (CLUSTERS[cluster as usize - 1] * self.processors / BLOCKS).max(1);
        let block = |splits| {
            let meeting = if splits > 1 { MEETING } else { 0 };
            split_blocks(self.columns, splits) * (least + each * strips) + ENDS + meeting
        };
        let block = self.matrices.iter().map(|&(_, splits)| block(splits)).max().unwrap_or(0);
        let time = clusters.div_ceil(at_once) * block;
        BandPlan { cluster, strips, ..self.launch(rows, clusters * cluster, time) }
    }

    /// The plan for a kernel of [`FAST256_CLASSES`]. `strips`: of a group; `stage`: nanoseconds.
    fn fast_256(&self, class: usize, strips: u64, stage: u64) -> BandPlan {
        let rows = FAST256_CLASSES[class];
        let (bands, group) = (self.bands(rows), self.columns.div_ceil(FAST128_COLUMNS));
        let groups = self.matrices.iter().map(|(rows, _)| rows.div_ceil(strips * STRIP_ROWS));
        let all = groups.sum::<u64>() * group;
        let even = all.div_ceil((self.processors / bands).max(1)).max(group);
        let whole = even.next_multiple_of(group);
        let x_bytes = 2 * self.x_rows * self.columns;
        let handed = HANDED_STAGE.into_iter().find(|&(most, _)| x_bytes <= most);
        let (_, percent) = handed.expect("the last one is for any x");
        let (whole_time, cut_time) = (whole * stage, even * stage * percent / 100 + HANDING);
        let (share_stages, time) =
            if cut_time < whole_time { (even, cut_time) } else { (whole, whole_time) };
        let time = time + ENDS;
        let blocks = all.div_ceil(share_stages) * bands;
        let plan = BandPlan { strips, share_stages, ..self.launch(rows, blocks, time) };
        // Blocks that share x read it at the same time, and each half is whole groups of 8 rows.
        let is_paired = share_stages == whole
            && all.is_multiple_of(2 * share_stages)
            && plan.band_rows.is_multiple_of(16);
        BandPlan { cluster: if is_paired { 2 } else { 1 }, ..plan }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        BLOCKS, BandPlan, FAST128_CLASSES, FAST128_SPLITS, FAST128_STRIPS, LAUNCH_ROWS,
        fastest_splits,
    };
    use crate::gpu::linear::split::has_columns;

    fn of(rows: u64, columns: u64, splits: u64, x_rows: u64) -> BandPlan {
        BandPlan::new([(rows, splits)].into_iter(), columns, x_rows, BLOCKS)
    }

    #[test]
    fn blocks_have_all_strips_of_all_bands() {
        for rows in (1..200_000).step_by(21_001) {
            for columns in (8..40_000).step_by(6120) {
                for x_rows in [17, 32, 33, 100, 128, 129, 200, 384, 1000, LAUNCH_ROWS] {
                    for splits in
                        (0..=FAST128_SPLITS).filter(|&s| s == 0 || has_columns(columns, s))
                    {
                        check(of(rows, columns, splits, x_rows), rows, columns, x_rows);
                    }
                }
            }
        }
    }

    fn check(plan: BandPlan, rows: u64, columns: u64, x_rows: u64) {
        let shape = format!("{rows} x {columns}, {x_rows} rows: {plan:?}");
        let splits = u64::from(plan.splits[0]);
        let bands = x_rows.div_ceil(plan.class);
        assert!(has_columns(columns, splits), "{shape}");
        assert!(plan.band_rows <= plan.class.next_multiple_of(8), "{shape}");
        assert!((plan.band_rows * (bands - 1)..plan.band_rows * bands).contains(&(x_rows - 1)));
        assert!(i32::try_from(plan.blocks).is_ok(), "{shape}");
        if plan.share_stages > 0 {
            let stages = columns.div_ceil(64);
            let all = rows.div_ceil(32 * plan.strips) * stages;
            assert!(x_rows > FAST128_CLASSES[2] && plan.share_stages >= stages, "{shape}");
            assert!(plan.blocks <= BLOCKS && plan.blocks / bands * plan.share_stages >= all);
            let bytes = plan.blocks * 98_304 * plan.strips;
            if plan.cluster > 1 {
                let shares = plan.blocks / bands;
                assert_eq!((plan.cluster, shares * plan.share_stages), (2, all), "{shape}");
                assert!(shares.is_multiple_of(2) && plan.band_rows.is_multiple_of(16), "{shape}");
                assert!(plan.share_stages.is_multiple_of(stages), "{shape}");
            }
            assert!(
                bytes <= BandPlan::partial_bytes([rows].into_iter(), x_rows, BLOCKS),
                "{shape}"
            );
        } else {
            let groups = plan.blocks / bands / plan.cluster * (plan.cluster / splits);
            assert!(groups * plan.strips >= rows.div_ceil(32), "{shape}");
            assert!((1..=FAST128_STRIPS).contains(&plan.strips) && plan.cluster <= FAST128_SPLITS);
        }
    }

    #[test]
    fn shapes_have_the_fastest_ways() {
        let fast_128 = |rows, columns, splits, x_rows| {
            let plan = of(rows, columns, splits, x_rows);
            (plan.class, plan.strips, plan.cluster, plan.blocks)
        };
        assert_eq!(fast_128(6144, 4096, 1, 32), (32, 2, 1, 96));
        assert_eq!(fast_128(4096, 14_336, 2, 64), (64, 2, 2, 128));
        assert_eq!(fast_128(4096, 14_336, 4, 32), (32, 6, 4, 88));
        assert_eq!(fast_128(28_672, 4096, 1, 128), (128, 8, 1, 112));
        assert_eq!(fast_128(4096, 4096, 1, 256), (128, 2, 1, 128));
        assert_eq!(fast_128(6144, 4096, 1, 512), (128, 6, 1, 128));
        let fast_256 = |rows, columns, x_rows| {
            let plan = of(rows, columns, 1, x_rows);
            assert!(!plan.has_half_groups());
            (plan.class, plan.share_stages, plan.blocks)
        };
        assert_eq!(fast_256(28_672, 4096, 256), (256, 128, 112));
        assert_eq!(fast_256(4096, 14_336, 2048), (256, 448, 128));
        // x is larger than L2, so no share ends inside a group.
        assert_eq!(fast_256(4096, 14_336, 2304), (192, 672, 132));
        assert_eq!(fast_256(4096, 14_336, LAUNCH_ROWS), (256, 672, 132));
        assert_eq!(fast_256(6144, 4096, LAUNCH_ROWS), (192, 384, 128));
        // Groups of four strips would occupy 64 multiprocessors.
        let half = of(4096, 14_336, 1, 384);
        assert!(half.has_half_groups());
        assert_eq!((half.class, half.share_stages, half.blocks), (192, 224, 128));
        // Bands of 192 rows: each of two blocks brings 96 for both.
        assert_eq!((half.cluster, half.box_rows()), (2, 96));
        // Two blocks multiply one group, one after the other.
        assert_eq!(fast_256(6144, 4096, 1024), (256, 94, 132));
    }

    #[test]
    fn matrices_with_other_splits_share_a_launch() {
        let shapes = [(4096, 2), (1024, 3), (1024, 3)];
        let plan = BandPlan::new(shapes.into_iter(), 4096, 24, BLOCKS);
        assert_eq!(plan.splits[..4], [2, 3, 3, 1]);
        assert!(plan.cluster >= 3);
        // The fastest splits are those of each matrix alone, on all GPUs.
        let free = |rows| fastest_splits(rows, 4096, 32);
        let both = BandPlan::new([(4096, 0), (1024, 0)].into_iter(), 4096, 17, 80);
        assert_eq!(both.splits[..2], [free(4096) as u8, free(1024) as u8]);
        assert_eq!(fastest_splits(32, 64, 17), 1);
    }
}
