//! One kernel's launch: up to eight matrices of one residence, with x and y of a call.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ptr::{from_mut, from_ref};
use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{
    CUdeviceptr, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle as Swizzle, cuTensorMapEncodeTiled,
};

use super::bands::{BandPlan, FAST128_COLUMNS, FAST128_SPLITS};
use super::kernels::{LinearKernels, OrderKernels};
use super::prefetch::{NextReads, first_reads};
use super::split::{COUNTERS, MATRIX_COUNTERS, OrderPlan, SPLIT_COLUMNS, Split, has_columns};
use super::task::{
    BAND_ROWS, Fast16, Fast128, Fast256, Items, LinearLaunch, LinearMatrix, LinearPrefetch,
    MATRICES, ORDER_ROWS, Order64, PARTIAL_BYTES, PREFETCHES, ProductMatrix, ROWS, STRIP_ROWS,
    Splits, Tile16, Tile64, XMap,
};
use super::{matrix::Matrix, tile64::Rounds};
use crate::Result;
use crate::gpu::{fault::OrFault, needs::Residence, status::Status};

/// Bytes of counters at the beginning of a workspace. Products share the workspace.
const COUNTER_BYTES: u64 = (4 * COUNTERS).next_multiple_of(256);

/// Rows of x: BF16, row-major, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct LinearInput {
    pub(super) pointer: CUdeviceptr,
    pub(super) rows: u64,
    pub(super) pitch: u64,
}

impl LinearInput {
    /// Rows from this device address on, with `pitch` elements from the start of one row to that of
    /// the next. Fast if address and pitch are multiples of 16 bytes.
    pub const fn new(pointer: CUdeviceptr, rows: u64, pitch: u64) -> Self {
        Self { pointer, rows, pitch }
    }
}

/// Destination of the product with one matrix: BF16, row-major, in device memory, with the rows of
/// x.
#[derive(Clone, Copy, Debug)]
pub struct LinearOutput {
    pub(super) pointer: CUdeviceptr,
    pub(super) pitch: u64,
    pub(super) bias: CUdeviceptr,
    pub(super) splits: u64,
}

impl LinearOutput {
    /// Rows from this device address on, with `pitch` elements from the start of one row to that of
    /// the next: products with several matrices may lie side by side.
    pub const fn new(pointer: CUdeviceptr, pitch: u64) -> Self {
        Self { pointer, pitch, bias: 0, splits: 0 }
    }

    /// Adds to each row the BF16 values at this device address, one for each row of the matrix,
    /// before the sum is rounded. 0 is none.
    #[must_use]
    pub const fn bias(self, pointer: CUdeviceptr) -> Self {
        Self { bias: pointer, ..self }
    }

    /// Adds in the order of a BLAS library that cuts K, the columns of the matrix, into this many
    /// splits (the *plan of the sum*). Split i of s has the columns from i · U to before (i + 1) ·
    /// U, where U is ⌈⌈K / 64⌉ / s⌉ · 64. Each split is one chain of tensor-core products of 16
    /// columns, first to last, from an f32 zero; splits are added in order in f32, then the bias,
    /// and the sum is rounded once. 0, the default, takes the splits with which the product is
    /// fastest, in any order.
    ///
    /// [`Linear::keeps_order`](super::Linear::keeps_order) tells for which orders there are
    /// kernels; [`Linear::multiply`](super::Linear::multiply) refuses others.
    #[must_use]
    pub const fn splits(self, count: u64) -> Self {
        Self { splits: count, ..self }
    }
}

/// One launch of a call of [`Linear::multiply`](super::Linear::multiply).
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    /// At most [`ProductLaunch::max_rows`] rows.
    pub(super) x: LinearInput,
    pub(super) outputs: &'a [LinearOutput],
    /// Row of the outputs that is the product of the first row of x.
    pub(super) first: u64,
    pub(super) workspace: CUdeviceptr,
    pub(super) stream: &'a CudaStream,
    pub(super) status: &'a Status,
}

impl Call<'_> {
    const fn partials(&self) -> CUdeviceptr {
        self.workspace + COUNTER_BYTES
    }
}

#[derive(Debug)]
pub(super) struct ProductLaunch {
    /// The most rows of x at once.
    pub(super) max_rows: u64,
    /// For matrices as stored: most bytes of bitstream that a tile takes.
    staged: Option<u32>,
    /// Indices of its matrices, in the order of the launch.
    order: Vec<usize>,
    /// These matrices and their rows.
    matrices: Vec<(LinearMatrix, u64)>,
    columns: u32,
    /// How blocks share them for up to [`ROWS`] rows of x, as items.
    shares: Vec<Items>,
    items: u32,
    /// Number of items whose sums meet in the workspace.
    partials: u64,
    /// Where the items' counters begin, from the workspace on, modulo 2^64.
    counters: u64,
    /// Items for more than [`ROWS`] rows of x by matrices as stored, and places for their sums.
    rounds: Rounds,
    /// Number of the GPU's multiprocessors.
    processors: u64,
    /// Whether there are kernels for the order of a plan of the sum: [`LinearKernels::order`].
    keeps_order: bool,
    /// First reads of the launch that follows it.
    next_reads: Arc<NextReads>,
}

impl ProductLaunch {
    /// Makes as many launches as these matrices need.
    pub(super) fn all(kernels: &LinearKernels, matrices: &[Matrix]) -> Vec<Self> {
        let mut launches = Vec::new();
        for residence in [Residence::Stored, Residence::Fast] {
            let all = (0..matrices.len()).filter(|&at| matrices[at].residence() == residence);
            for order in all.collect::<Vec<_>>().chunks(MATRICES) {
                launches.push(Self::new(kernels, order, matrices));
            }
        }
        launches
    }

    fn new(kernels: &LinearKernels, order: &[usize], all: &[Matrix]) -> Self {
        let staged = order.iter().filter_map(|&at| all[at].staged_bytes()).max();
        let matrices: Vec<_> =
            order.iter().map(|&at| (all[at].task(), all[at].row_count())).collect();
        let columns = all[order[0]].column_count();
        let splits: Vec<_> = matrices.iter().map(|&(_, rows)| Split::new(rows, columns)).collect();
        // Kernels number the counters by strips, and use only those of tails: numbers start so far
        // before the workspace that each matrix's tail has its counters inside it.
        let before = splits.iter().map(|split| split.whole_strips).max().unwrap_or(0);
        let (mut items, mut partials, mut shares) = (0, 0, Vec::new());
        for (number, split) in (0..).zip(&splits) {
            // No overflow: a matrix has at most 2^27 strips, and few more items.
            shares.push(Items {
                first_item: items,
                whole_strips: split.whole_strips as u32,
                slices: split.slices as u32,
                first_strip: (before - split.whole_strips + number * MATRIX_COUNTERS) as u32,
                first_partial: partials as u32,
            });
            items += split.items() as u32;
            partials += split.partials();
        }
        Self {
            max_rows: kernels.max_rows(staged),
            staged,
            order: order.to_vec(),
            rounds: Rounds::sum(matrices.iter().map(|&(_, rows)| Rounds::new(rows, columns))),
            matrices,
            columns: columns as u32,
            shares,
            items,
            partials,
            counters: (4 * before).wrapping_neg(),
            processors: kernels.tiles.processors.into(),
            keeps_order: kernels.order.is_some(),
            next_reads: Arc::default(),
        }
    }

    /// Bytes of workspace for up to this many rows of x.
    pub(super) fn workspace_bytes(&self, rows: u64) -> u64 {
        // Kernels for more rows may need less; but the workspace may serve fewer rows.
        let few = if rows == 0 { 0 } else { self.partials * PARTIAL_BYTES };
        let at_once = rows.min(self.max_rows);
        let more = match self.staged {
            Some(_) if at_once > ROWS => self.rounds.places * Rounds::place_bytes(rows),
            Some(_) => 0,
            None => BandPlan::partial_bytes(self.rows(), at_once, self.processors),
        };
        match few.max(more) {
            0 => 0,
            partials => COUNTER_BYTES + partials,
        }
    }

    /// Whether it adds in the order of these splits, one number for each of all matrices, for this
    /// many rows of x. Each call of [`ProductLaunch::run`] gets at most
    /// [`ProductLaunch::max_rows`] of them.
    pub(super) fn keeps_order(&self, rows: u64, splits: &[u64]) -> bool {
        let (most, last) = (rows.min(self.max_rows), rows % self.max_rows);
        self.order.iter().map(|&at| splits[at]).filter(|&splits| splits > 0).all(|splits| {
            has_columns(self.columns.into(), splits)
                && [most, last].into_iter().all(|rows| self.keeps_order_of(rows, splits))
        })
    }

    /// Whether the kernel for this many rows of x adds in the order of a caller's splits.
    fn keeps_order_of(&self, rows: u64, splits: u64) -> bool {
        let keeps_order = self.keeps_order && self.staged.is_none();
        rows == 0 || keeps_order && (rows <= ORDER_ROWS || splits <= FAST128_SPLITS)
    }

    /// Whether the kernel for this many rows of x and these splits is that of [`OrderPlan`]. Its
    /// blocks have all splits of a strip, and each warp loads all of its band of x. With more than
    /// [`ROWS`] rows the other kernel, whose blocks have a split each, is faster with three splits
    /// or more, and with more than [`BAND_ROWS`] if some block has more than one split of a strip.
    /// It takes up to [`FAST128_SPLITS`].
    fn is_in_order(&self, rows: u64, mut splits: impl Iterator<Item = u64> + Clone) -> bool {
        let all_have = |most| splits.clone().all(|splits| splits <= most);
        let is_fastest = if rows <= BAND_ROWS {
            rows <= ROWS || all_have(ORDER_SPLITS)
        } else {
            all_have(1) && self.strips() <= self.processors
        };
        let is_only = splits.any(|splits| splits > FAST128_SPLITS);
        let is_possible = self.keeps_order && self.staged.is_none() && rows <= ORDER_ROWS;
        is_possible && (is_fastest || is_only)
    }

    /// Rows of the matrices.
    fn rows(&self) -> impl Iterator<Item = u64> + Clone + '_ {
        self.matrices.iter().map(|&(_, rows)| rows)
    }

    /// Strips of all matrices.
    fn strips(&self) -> u64 {
        self.rows().map(|rows| rows.div_ceil(STRIP_ROWS)).sum()
    }

    /// Rows of the matrices, and the splits that outputs ask for.
    fn wishes<'a>(
        &'a self,
        outputs: &'a [LinearOutput],
    ) -> impl Iterator<Item = (u64, u64)> + Clone + 'a {
        self.rows().zip(self.order.iter().map(|&at| outputs[at].splits))
    }

    /// The argument of a kernel whose blocks share each matrix like this.
    fn argument<M: Copy + Default, T>(
        &self,
        call: &Call<'_>,
        shares: impl IntoIterator<Item = M>,
        of: T,
    ) -> LinearLaunch<M, T> {
        let mut matrices = [ProductMatrix::default(); MATRICES];
        let all = self.matrices.iter().zip(&self.order).zip(shares);
        for (to, ((&(matrix, rows), &at), share)) in matrices.iter_mut().zip(all) {
            let LinearOutput { pointer, pitch, bias, .. } = call.outputs[at];
            let y = pointer + 2 * call.first * pitch;
            *to = ProductMatrix { matrix, y, y_pitch: pitch, bias, rows: rows as u32, share };
        }
        LinearLaunch {
            x: call.x.pointer,
            x_pitch: call.x.pitch,
            x_rows: call.x.rows as u32,
            columns: self.columns,
            matrix_count: self.matrices.len() as u32,
            status: call.status.device_pointer(),
            matrices,
            of,
        }
    }

    /// Puts it on the stream.
    ///
    /// # Safety
    /// Same as [`Linear::multiply`](super::Linear::multiply), which has checked the arguments and
    /// keeps the matrices.
    pub(super) unsafe fn run(&self, kernels: &LinearKernels, call: &Call<'_>) -> Result<()> {
        // Matrices are complete before a launch can name them, so kernels may begin early.
        let (early, stream, rows) = (kernels.early, call.stream, call.x.rows);
        let splits = self.wishes(call.outputs).map(|(_, splits)| splits);
        let is_in_order = splits.clone().any(|splits| splits > 0) && self.is_in_order(rows, splits);
        if let Some(order) = kernels.order.as_ref().filter(|_| is_in_order) {
            // SAFETY: the caller's promise.
            return unsafe { self.run_order(order, early, call) };
        }
        let shares = self.shares.iter().copied();
        let (items, partials) = (self.items, call.partials());
        let counters = self.counters.wrapping_add(call.workspace);
        match self.staged {
            None if rows <= ROWS => {
                let of = Fast16 { counters, partials, items };
                let kernel = kernels.fast(rows);
                let blocks = items.min(kernel.blocks);
                // SAFETY: the caller keeps the matrices of these arrays, columns and items;
                // counters are zero, because kernels leave them so; the rest is the caller's
                // promise.
                unsafe { kernel.run(early, stream, blocks, &self.argument(call, shares, of)) }
            }
            // SAFETY: the caller's promise.
            None => unsafe { self.run_bands(kernels, call) },
            Some(staged) if rows <= ROWS => {
                let of = Tile16 { counters, partials, items, ..Tile16::default() };
                let argument = self.argument(call, shares, of);
                // SAFETY: as above; there are no more rows than `max_rows` said.
                unsafe { kernels.tiles.multiply(early, staged, stream, argument) }
            }
            Some(staged) => {
                let of = Tile64 { counters: call.workspace, partials, stages: 0 };
                let argument = self.argument(call, [(); MATRICES], of);
                let tile_64 = kernels.tile_64.as_ref();
                let tile_64 = tile_64.expect("max_rows says whether there are some");
                // SAFETY: as above; each matrix has as many counters as `COUNTERS` says.
                unsafe { tile_64.multiply(early, staged, stream, self.rounds.items, argument) }
            }
        }
    }

    /// Prefetches of a launch with these splits that runs now.
    fn prefetches(
        &self,
        order: &OrderKernels,
        splits: impl Iterator<Item = u64> + Clone,
    ) -> [LinearPrefetch; PREFETCHES] {
        let first = first_reads(&self.matrices, self.columns.into(), splits);
        order.last.follow(&self.next_reads, first)
    }

    /// Puts it on the stream, for more than [`ROWS`] rows of x by the fast layout.
    ///
    /// # Safety
    /// Same as [`ProductLaunch::run`].
    unsafe fn run_bands(&self, kernels: &LinearKernels, call: &Call<'_>) -> Result<()> {
        let wishes = self.wishes(call.outputs);
        let plan = BandPlan::new(wishes, self.columns.into(), call.x.rows, self.processors);
        let (x_map, x_mapped) = map_of(call.x, self.columns, plan.box_rows() as u32)?;
        let splits = plan.splits.into_iter().map(u64::from);
        let prefetches = kernels.order.as_ref().map(|order| self.prefetches(order, splits));
        let prefetches = prefetches.unwrap_or_default();
        let splits = plan.splits.map(|splits| Splits(splits.into()));
        let (early, stream) = (kernels.early, call.stream);
        let (cluster, blocks) = (plan.cluster as u32, plan.blocks as u32);
        if plan.share_stages == 0 {
            let of = Fast128 { x_map, prefetches, x_mapped, strips: plan.strips as u32 };
            let (kernel, argument) = (kernels.fast(plan.class), self.argument(call, splits, of));
            // SAFETY: the caller keeps the matrices of these arrays and columns; each split has
            // columns and a block of a cluster; the rest is the caller's promise.
            return unsafe {
                kernel.run_as((kernel.threads, cluster), early, stream, blocks, &argument)
            };
        }
        let (counters, partials) = (call.workspace, call.partials());
        let share_stages = plan.share_stages as u32;
        let of = Fast256 { x_map, counters, partials, x_mapped, share_stages };
        let half = plan.has_half_groups();
        let kernel = if half { kernels.half(plan.class) } else { kernels.fast(plan.class) };
        // SAFETY: as above; the workspace has room for the sums of as many blocks, and its counters
        // are zero, because kernels leave them so.
        unsafe {
            let argument = self.argument(call, splits, of);
            kernel.run_as((kernel.threads, cluster), early, stream, blocks, &argument)
        }
    }

    /// Puts it on the stream, for rows that [`ProductLaunch::is_in_order`] accepts.
    ///
    /// # Safety
    /// Same as [`ProductLaunch::run`].
    unsafe fn run_order(&self, order: &OrderKernels, early: bool, call: &Call<'_>) -> Result<()> {
        let (class, kernel) = order.of(call.x.rows);
        let plan =
            OrderPlan::new(self.wishes(call.outputs), self.columns.into(), class, kernel.blocks);
        let (x_map, x_mapped) = map_of_blocks(call.x, self.columns, class as u32)?;
        let splits = plan.matrices.iter().map(|matrix| matrix.splits.into());
        let of = Order64 {
            x_map,
            prefetches: self.prefetches(order, splits),
            x_mapped,
            units: plan.units as u32,
            splits: plan.pass_splits as u32,
            each: (plan.strips / plan.blocks) as u32,
            more: (plan.strips % plan.blocks) as u32,
        };
        let argument = self.argument(call, plan.matrices.iter().copied(), of);
        // SAFETY: the caller keeps the matrices of these arrays and columns; each split has
        // columns, and a block has threads for as many units; the rest is the caller's promise.
        unsafe {
            let shape = (plan.threads(), 1);
            kernel.run_as(shape, early, call.stream, plan.blocks as u32, &argument)
        }
    }
}

/// Most splits of products of 17 to [`BAND_ROWS`] rows that the kernel of [`OrderPlan`] does faster
/// than the one for more rows (benches/record/2026-11-27-chain.md).
const ORDER_SPLITS: u64 = 2;
const ELEMENT: u64 = 2;
/// Alignment of addresses and pitches, in bytes.
const ALIGNMENT: u64 = 16;
/// Pitches must be smaller than this, in bytes.
const PITCH_END: u64 = 1 << 40;
const _: () = assert!(size_of::<XMap>() == size_of::<CUtensorMap>());

/// Blocks of columns per box of few rows.
const ORDER_BLOCKS: u32 = 2;

/// The map of these rows of x in boxes of `box_rows` rows, as `kernels/linear_task.cuh` asks.
/// 0 instead of 1 beside it if x is not aligned: kernels then read it slowly.
fn map_of(x: LinearInput, columns: u32, box_rows: u32) -> Result<(XMap, u32)> {
    let sizes = [u64::from(columns), x.rows];
    encode(x, sizes, [x.pitch * ELEMENT], [FAST128_COLUMNS as u32, box_rows])
}

/// The map of up to [`ORDER_ROWS`] rows of x: columns of a block, rows, blocks; 1 or 0 as in
/// [`map_of`].
fn map_of_blocks(x: LinearInput, columns: u32, box_rows: u32) -> Result<(XMap, u32)> {
    let blocks = u64::from(columns) / SPLIT_COLUMNS;
    if blocks == 0 {
        return Ok((XMap::default(), 0));
    }
    let pitches = [x.pitch * ELEMENT, SPLIT_COLUMNS * ELEMENT];
    encode(
        x,
        [SPLIT_COLUMNS, x.rows, blocks],
        pitches,
        [SPLIT_COLUMNS as u32, box_rows, ORDER_BLOCKS],
    )
}

/// A map of x with the size and the box of each dimension in elements, and the pitch of each but
/// the first in bytes.
fn encode<const DIMENSIONS: usize, const PITCHES: usize>(
    x: LinearInput,
    sizes: [u64; DIMENSIONS],
    pitches: [u64; PITCHES],
    boxes: [u32; DIMENSIONS],
) -> Result<(XMap, u32)> {
    const { assert!(PITCHES + 1 == DIMENSIONS) };
    let mut map = XMap::default();
    if !(x.pointer | pitches[0]).is_multiple_of(ALIGNMENT) || pitches[0] >= PITCH_END {
        return Ok((map, 0));
    }
    let every = [1_u32; DIMENSIONS];
    // SAFETY: the map has its size and alignment; each dimension has a size, a box and a stride,
    // and each but the first a pitch. The driver reads nothing of x.
    let result = unsafe {
        cuTensorMapEncodeTiled(
            from_mut(&mut map).cast::<CUtensorMap>(),
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DIMENSIONS as u32,
            x.pointer as *mut _,
            from_ref(&sizes).cast(),
            from_ref(&pitches).cast(),
            from_ref(&boxes).cast(),
            from_ref(&every).cast(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    result.result().or_fault("describing x to the GPU")?;
    Ok((map, 1))
}
