//! The launch of one kernel: up to eight matrices of one residence; x and y of a call.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ptr::{from_mut, from_ref};
use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{
    CUdeviceptr, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle as Swizzle, cuTensorMapEncodeTiled,
};

use super::kernels::{LinearKernels, OrderKernels};
use super::many::{Many, WIDE_COLUMNS, WIDE_SPLITS};
use super::prefetch::{NextReads, first_reads};
use super::split::{COUNTERS, Few, MATRIX_COUNTERS, SPLIT_COLUMNS, Split, has_columns};
use super::task::{
    LinearLaunch, LinearMatrix, LinearPrefetch, MATRICES, PARTIAL_BYTES, PREFETCHES, ROWS, XMap,
};
use super::{decoded::Rounds, matrix::Matrix};
use crate::Result;
use crate::gpu::{fault::OrFault, needs::Residence, status::Status};

/// Bytes of counters, with which a workspace begins: for all products, which can share one.
const COUNTER_BYTES: u64 = (4 * COUNTERS).next_multiple_of(256);

/// Rows of x: BF16, row-major, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct LinearInput {
    pub(super) pointer: CUdeviceptr,
    pub(super) rows: u64,
    pub(super) pitch: u64,
}

impl LinearInput {
    /// From this device address on, with `pitch` elements from the start of a row to that of the
    /// next. Fast if address and pitch are multiples of 16 bytes.
    pub const fn new(pointer: CUdeviceptr, rows: u64, pitch: u64) -> Self {
        Self { pointer, rows, pitch }
    }
}

/// Where a product with one matrix goes: BF16, row-major, in device memory, as many rows as x.
#[derive(Clone, Copy, Debug)]
pub struct LinearOutput {
    pub(super) pointer: CUdeviceptr,
    pub(super) pitch: u64,
    pub(super) bias: CUdeviceptr,
    pub(super) splits: u64,
}

impl LinearOutput {
    /// From this device address on, with `pitch` elements from the start of a row to that of the
    /// next: products with several matrices may lie side by side.
    pub const fn new(pointer: CUdeviceptr, pitch: u64) -> Self {
        Self { pointer, pitch, bias: 0, splits: 0 }
    }

    /// Adds to each row the BF16 values at this device address, one for each row of the matrix,
    /// before the sum is rounded. 0 is none.
    #[must_use]
    pub const fn bias(self, pointer: CUdeviceptr) -> Self {
        Self { bias: pointer, ..self }
    }

    /// Adds in the order of a library of BLAS that cuts K, the columns of the matrix, into this
    /// many splits (the *plan of the sum*). Split i of s has the columns from i · U to before
    /// (i + 1) · U, where U is ⌈⌈K / 64⌉ / s⌉ · 64. Each is one chain of tensor-core products of 16
    /// columns, first to last, from an f32 zero; splits are added in order in f32, then the bias,
    /// and the sum is rounded once. 0, as without this: the splits with which the product is
    /// fastest, in whatever order.
    ///
    /// [`Linear::keeps_order`](super::Linear::keeps_order) tells which orders there are kernels
    /// for; [`Linear::multiply`](super::Linear::multiply) refuses others.
    #[must_use]
    pub const fn splits(self, count: u64) -> Self {
        Self { splits: count, ..self }
    }
}

#[derive(Debug)]
pub(super) struct ProductLaunch {
    /// The most rows of x at once.
    pub(super) most_rows: u64,
    /// For matrices as stored: the most bytes of its bitstream that a tile takes.
    staged: Option<u32>,
    /// Which of the matrices, in the order of the launch.
    order: Vec<usize>,
    /// Without what a call brings; `counters` counts from the workspace, modulo 2^64.
    arguments: LinearLaunch,
    /// Items whose sums meet in the workspace.
    partials: u64,
    /// Items for more than [`ROWS`] rows of x by matrices as stored, and places for their sums.
    rounds: Rounds,
    /// Rows of each matrix, in the order of the launch.
    rows: Vec<u64>,
    /// Multiprocessors of the GPU.
    processors: u64,
    /// Whether there are kernels for it: [`LinearKernels::order`].
    keeps_order: bool,
    /// What the launch after it reads first.
    next_reads: Arc<NextReads>,
}

impl ProductLaunch {
    /// As many as these matrices need.
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

    fn new(kernels: &LinearKernels, order: &[usize], matrices: &[Matrix]) -> Self {
        let staged = order.iter().filter_map(|&at| matrices[at].staged_bytes()).max();
        let most_rows = kernels.most_rows(staged);
        let shape = |at: usize| (matrices[at].row_count(), matrices[at].column_count());
        let split = |at: usize| Split::new(shape(at).0, shape(at).1);
        // Kernels number the counters by strips, and use those of tails alone: numbers start so far
        // before the workspace that the tail of each matrix has its counters there.
        let before = order.iter().map(|&at| split(at).whole_strips).max().unwrap_or(0);
        let rows: Vec<_> = order.iter().map(|&at| shape(at).0).collect();
        let mut arguments = LinearLaunch {
            columns: matrices[order[0]].column_count() as u32,
            matrix_count: order.len() as u32,
            counters: (4 * before).wrapping_neg(),
            ..LinearLaunch::default()
        };
        let (mut partials, mut rounds) = (0, Rounds { items: 0, places: 0 });
        for ((number, task), &at) in (0..).zip(&mut arguments.matrices).zip(order) {
            let split = split(at);
            // No overflow: a matrix has at most 2^27 strips, and few more items.
            *task = LinearMatrix {
                whole_strips: split.whole_strips as u32,
                slices: split.slices as u32,
                first_item: arguments.items,
                first_strip: (before - split.whole_strips + number * MATRIX_COUNTERS) as u32,
                first_partial: partials as u32,
                ..matrices[at].task()
            };
            arguments.items += split.items() as u32;
            partials += split.partials();
            let Rounds { items, places } = Rounds::new(shape(at).0, shape(at).1);
            (rounds.items, rounds.places) = (rounds.items + items, rounds.places + places);
        }
        let (order, keeps_order) = (order.to_vec(), kernels.order.is_some());
        let processors = kernels.tiles.processors.into();
        Self {
            most_rows,
            staged,
            order,
            arguments,
            partials,
            rounds,
            rows,
            processors,
            keeps_order,
            next_reads: Arc::default(),
        }
    }

    /// Bytes of a workspace for up to this many rows of x.
    pub(super) fn workspace_bytes(&self, rows: u64) -> u64 {
        // Kernels of more rows may need less; but it may serve fewer rows.
        let few = if rows == 0 { 0 } else { self.partials * PARTIAL_BYTES };
        let at_once = rows.min(self.most_rows);
        let more = match self.staged {
            Some(_) if at_once > ROWS => self.rounds.places * Rounds::place_bytes(rows),
            Some(_) => 0,
            None => Many::partial_bytes(&self.rows, at_once, self.processors),
        };
        match few.max(more) {
            0 => 0,
            partials => COUNTER_BYTES + partials,
        }
    }

    /// Whether it adds in the order of these splits of each of all matrices for this many rows of
    /// x, of which each call of [`ProductLaunch::run`] gets no more than
    /// [`ProductLaunch::most_rows`].
    pub(super) fn keeps_order(&self, rows: u64, splits: &[u64]) -> bool {
        let (most, last) = (rows.min(self.most_rows), rows % self.most_rows);
        self.order.iter().map(|&at| splits[at]).filter(|&splits| splits > 0).all(|splits| {
            has_columns(self.arguments.columns.into(), splits)
                && [most, last].into_iter().all(|rows| self.keeps_order_of(rows, splits))
        })
    }

    /// Whether the kernel for this many rows of x adds in the order of a caller's splits.
    fn keeps_order_of(&self, rows: u64, splits: u64) -> bool {
        rows == 0
            || self.is_few(rows)
            || self.keeps_order && self.staged.is_none() && splits <= WIDE_SPLITS
    }

    /// Whether the kernel for this many rows of x is that of [`Few`].
    fn is_few(&self, rows: u64) -> bool {
        self.keeps_order && self.staged.is_none() && rows <= ROWS
    }

    /// Puts it on the stream, for no more rows than [`ProductLaunch::most_rows`]; the product of
    /// the first one is row `first` of the outputs.
    ///
    /// # Safety
    /// As [`Linear::multiply`](super::Linear::multiply), which has checked the arguments and keeps
    /// the matrices.
    pub(super) unsafe fn run(
        &self,
        kernels: &LinearKernels,
        x: LinearInput,
        (outputs, first): (&[LinearOutput], u64),
        workspace: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // Matrices are whole before a launch can name them: kernels may begin early.
        let (early, mut arguments) = (kernels.early, self.arguments);
        (arguments.x, arguments.x_pitch, arguments.x_rows) = (x.pointer, x.pitch, x.rows as u32);
        arguments.partials = workspace + COUNTER_BYTES;
        arguments.status = status.device_pointer();
        for (matrix, &at) in arguments.matrices.iter_mut().zip(&self.order) {
            let LinearOutput { pointer, pitch, bias, .. } = outputs[at];
            (matrix.y, matrix.y_pitch, matrix.bias) = (pointer + 2 * first * pitch, pitch, bias);
        }
        let has_order = self.order.iter().any(|&at| outputs[at].splits > 0);
        if let Some(order) = kernels.order.as_ref().filter(|_| has_order && self.is_few(x.rows)) {
            // SAFETY: the caller's promise.
            return unsafe { self.run_few(order, kernels.early, x, outputs, arguments, stream) };
        }
        if x.rows <= ROWS {
            arguments.counters = arguments.counters.wrapping_add(workspace);
            let Some(staged) = self.staged else {
                let kernel = kernels.fast(x.rows);
                let blocks = arguments.items.min(kernel.blocks);
                // SAFETY: arrays, columns and items are those of matrices that the caller keeps;
                // counters are zero, since kernels leave them so; the rest is the caller's promise.
                return unsafe { kernel.run(early, stream, blocks, &arguments) };
            };
            // SAFETY: as above; there are no more rows than `most_rows` said.
            return unsafe { kernels.tiles.multiply(early, staged, stream, &arguments) };
        }
        if let Some(staged) = self.staged {
            arguments.counters = workspace;
            let decoded = kernels.decoded.as_ref().expect("most_rows says whether there are some");
            // SAFETY: as above; each matrix has as many counters as `COUNTERS` says.
            return unsafe {
                decoded.multiply(early, staged, stream, self.rounds.items, &arguments)
            };
        }
        arguments.counters = workspace;
        // SAFETY: the caller's promise.
        unsafe { self.run_many(kernels, x, outputs, arguments, stream) }
    }
}

impl ProductLaunch {
    /// Rows of the matrices, and the splits that outputs wish for.
    fn wishes<'a>(
        &'a self,
        outputs: &'a [LinearOutput],
    ) -> impl Iterator<Item = (u64, u64)> + Clone + 'a {
        self.rows.iter().copied().zip(self.order.iter().map(|&at| outputs[at].splits))
    }

    /// Prefetches of a launch that runs now with these splits.
    fn prefetches(
        &self,
        order: &OrderKernels,
        arguments: &LinearLaunch,
        splits: impl Iterator<Item = u64> + Clone,
    ) -> [LinearPrefetch; PREFETCHES] {
        let matrices = &arguments.matrices[..self.order.len()];
        let columns = arguments.columns.into();
        order.last.follow(&self.next_reads, first_reads(matrices, columns, splits))
    }

    /// Puts it on the stream, for more than [`ROWS`] rows of x by the fast layout.
    ///
    /// # Safety
    /// As [`ProductLaunch::run`], which has filled in the arguments.
    unsafe fn run_many(
        &self,
        kernels: &LinearKernels,
        x: LinearInput,
        outputs: &[LinearOutput],
        mut arguments: LinearLaunch,
        stream: &CudaStream,
    ) -> Result<()> {
        let columns = arguments.columns;
        let many = Many::new(self.wishes(outputs), columns.into(), x.rows, self.processors);
        arguments.splits = many.splits;
        arguments.wide_strips = many.strips as u32;
        arguments.share_stages = many.share_stages as u32;
        if let Some(map) = map_of(x, columns, many.band_rows as u32)? {
            (arguments.x_map, arguments.x_mapped) = (map, 1);
        }
        if let Some(order) = &kernels.order {
            let splits = many.splits.into_iter().map(u64::from);
            arguments.prefetches = self.prefetches(order, &arguments, splits);
        }
        let (kernel, cluster) = (kernels.fast(many.class), many.cluster as u32);
        // SAFETY: arrays and columns are those of matrices that the caller keeps; each split has
        // columns and a block of a cluster; the workspace has room for the sums of as many blocks,
        // and its counters are zero, since kernels leave them so; the rest is the caller's promise.
        unsafe {
            kernel.run_clusters(cluster, kernels.early, stream, many.blocks as u32, &arguments)
        }
    }

    /// Puts it on the stream, for rows of which [`ProductLaunch::is_few`] says yes.
    ///
    /// # Safety
    /// As [`ProductLaunch::run`], which has filled in the arguments.
    unsafe fn run_few(
        &self,
        order: &OrderKernels,
        early: bool,
        x: LinearInput,
        outputs: &[LinearOutput],
        mut arguments: LinearLaunch,
        stream: &CudaStream,
    ) -> Result<()> {
        let (class, kernel) = order.of(x.rows);
        let few = Few::new(self.wishes(outputs), arguments.columns.into(), kernel.blocks);
        (arguments.few_units, arguments.few_splits) = (few.units as u32, few.pass_splits as u32);
        arguments.few_each = (few.strips / few.blocks) as u32;
        arguments.few_more = (few.strips % few.blocks) as u32;
        for (task, few) in arguments.matrices.iter_mut().zip(&few.matrices) {
            (task.slices, task.whole_strips) = (few.splits as u32, few.length as u32);
            (task.first_item, task.first_strip) = (few.first_strip as u32, few.pass_splits as u32);
            // Both are small.
            task.first_partial = ((0x1_0000 / few.pass_splits + 1) << 8 | few.strips) as u32;
        }
        if let Some(map) = map_of_blocks(x, arguments.columns, class as u32)? {
            (arguments.x_map, arguments.x_mapped) = (map, 1);
        }
        let blocks = few.blocks as u32;
        arguments.prefetches =
            self.prefetches(order, &arguments, few.matrices.iter().map(|few| few.splits));
        // SAFETY: arrays and columns are those of matrices that the caller keeps; each split has
        // columns, and a block threads for as many units; the rest is the caller's promise.
        unsafe { kernel.run_with(few.threads(), early, stream, blocks, &arguments) }
    }
}

const ELEMENT: u64 = 2;
/// Alignment of addresses and pitches, in bytes.
const ALIGNMENT: u64 = 16;
/// Pitches must be less, in bytes.
const PITCH_END: u64 = 1 << 40;
const _: () = assert!(size_of::<XMap>() == size_of::<CUtensorMap>());

/// Blocks of columns that a box of few rows has.
const FEW_BLOCKS: u32 = 2;

/// Map of these rows of x in boxes of `box_rows` rows, as `kernels/linear_task.cuh` asks. `None` if
/// x is not aligned: kernels read it slowly then.
pub(super) fn map_of(x: LinearInput, columns: u32, box_rows: u32) -> Result<Option<XMap>> {
    let sizes = [u64::from(columns), x.rows];
    encode(x, sizes, [x.pitch * ELEMENT], [WIDE_COLUMNS as u32, box_rows])
}

/// Map of up to [`ROWS`] rows of x: columns of a block, rows, blocks. `None` as in [`map_of`].
fn map_of_blocks(x: LinearInput, columns: u32, box_rows: u32) -> Result<Option<XMap>> {
    let blocks = u64::from(columns) / SPLIT_COLUMNS;
    if blocks == 0 {
        return Ok(None);
    }
    let pitches = [x.pitch * ELEMENT, SPLIT_COLUMNS * ELEMENT];
    encode(
        x,
        [SPLIT_COLUMNS, x.rows, blocks],
        pitches,
        [SPLIT_COLUMNS as u32, box_rows, FEW_BLOCKS],
    )
}

/// A map of x with sizes and boxes in elements of each dimension, and pitches in bytes of all but
/// the first.
fn encode<const DIMENSIONS: usize, const PITCHES: usize>(
    x: LinearInput,
    sizes: [u64; DIMENSIONS],
    pitches: [u64; PITCHES],
    boxes: [u32; DIMENSIONS],
) -> Result<Option<XMap>> {
    const { assert!(PITCHES + 1 == DIMENSIONS) };
    if !(x.pointer | pitches[0]).is_multiple_of(ALIGNMENT) || pitches[0] >= PITCH_END {
        return Ok(None);
    }
    let mut map = XMap::default();
    let every = [1_u32; DIMENSIONS];
    // SAFETY: the map has its size and alignment; there are as many sizes, boxes and strides as
    // dimensions, and one pitch less. The driver reads nothing of x.
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
    Ok(Some(map))
}
