//! The kernels that multiply and transcode, loaded at their first use.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, sys::CUfunction_attribute as Attribute};
use zerocopy::FromBytes;

use super::bands::{BAND_SPLIT, FAST128_CLASSES, FAST256_CLASSES, LAUNCH_ROWS};
use super::crossover::crossover;
use super::multiply::{Multiply, run};
use super::prefetch::LastLaunch;
use super::split::{GROUP, ORDER_SPLIT};
use super::task::{
    BAND_ROWS, Fast16Launch, Fast128Launch, Fast256Launch, GatherTask, GroupedLaunch, LinearMatrix,
    MATRICES, MAX_EXPERTS, MIN_CHUNK, ORDER_ROWS, OrderLaunch, PACK_WARPS, PARTIAL_BYTES, PackTask,
    ROWS, ROWS_8, SCAN_THREADS, STRIP_ROWS, Tile16Launch, Tile64Launch, UNPACK_WARPS, UnpackTask,
    tiles_across,
};
use super::tile64::{TILE64_CLASSES, Tile64Demand, Tile64Kernels};
use super::tiles::{Tile2, TileDemand, TileKernels};
use crate::gpu::fault::{OrFault, gpu};
use crate::gpu::module::{Kernels, Module, agree, config};
use crate::gpu::{fit::LANES, needs::Residence};
use crate::{Error, Result};

const PTX: &str = include_str!("../../../kernels/ptx/linear.ptx");
const SM_90: &[u8] = include_bytes!("../../../kernels/ptx/linear.sm_90a.cubin");
/// Most rows of x of each kernel that multiplies by the fast layout.
const CLASSES: [u64; 2] = [ROWS_8, ROWS];
/// The first version of CUDA whose drivers capture launches that begin early.
const EARLY_DRIVER: (i32, i32) = (12, 3);

/// Values compiled into the kernels: `Constants` of `kernels/linear.cu`. Fields with `threads` are
/// per thread block; fields with `bytes` are its dynamic shared memory.
#[derive(Debug, FromBytes)]
#[repr(C)]
struct Constants {
    agreed: Agreed,
    threads: u32,
    /// 1 if a launch may begin while the previous one ends (programmatic stream serialization): the
    /// kernel waits before it touches anything but the matrices.
    early: u32,
    fast_bytes: [u32; 2],
    grouped_threads: u32,
    grouped_bytes: u32,
    grouped_rows: [u32; 3],
    /// For the order of a plan of the sum; 0 if compiled for another target.
    order_threads: u32,
    order_bytes: u32,
    count_bytes: u32,
    /// For more rows of x; 0 if compiled for another target, like all that follows.
    fast_128_bytes: u32,
    fast_128_threads: u32,
    fast_256_bytes: u32,
    /// With groups of half as many strips, then with all.
    fast_256_threads: [u32; 2],
    tile: TileDemand,
    tile_2: Tile2,
    tile_64: Tile64Demand,
}

/// Values that both sides compute with: sizes of structures, and how blocks share products.
#[derive(Debug, FromBytes, PartialEq)]
#[repr(C)]
struct Agreed {
    structures: [u32; 11],
    warps: [u32; 2],
    partial_bytes: u32,
    matrices: u32,
    group: u32,
    max_experts: u32,
    order_split: [u32; 2],
    many_split: [u32; 7],
}

impl Agreed {
    fn ours() -> Self {
        Self {
            structures: [
                size_of::<Fast16Launch>(),
                size_of::<Tile16Launch>(),
                size_of::<Tile64Launch>(),
                size_of::<OrderLaunch>(),
                size_of::<Fast128Launch>(),
                size_of::<Fast256Launch>(),
                size_of::<GroupedLaunch>(),
                size_of::<LinearMatrix>(),
                size_of::<PackTask>(),
                size_of::<UnpackTask>(),
                size_of::<GatherTask>(),
            ]
            .map(|bytes| bytes as u32),
            warps: [PACK_WARPS as u32, UNPACK_WARPS as u32],
            partial_bytes: PARTIAL_BYTES as u32,
            matrices: MATRICES as u32,
            group: GROUP as u32,
            max_experts: MAX_EXPERTS as u32,
            order_split: ORDER_SPLIT.map(|number| number as u32),
            many_split: BAND_SPLIT.map(|number| number as u32),
        }
    }
}

/// All kernels that multiply and transcode, in one context.
#[derive(Debug)]
pub(in crate::gpu) struct LinearKernels {
    /// Kernels for the fast layout, each with the most rows of x that it multiplies: [`CLASSES`],
    /// and [`FAST128_CLASSES`] and [`FAST256_CLASSES`] if this GPU has such kernels and room for
    /// them.
    fast: Vec<(u64, Multiply)>,
    /// Kernels for [`FAST256_CLASSES`] with groups of half as many strips, if this GPU has them.
    half: Vec<(u64, Multiply)>,
    pub(super) tiles: TileKernels,
    /// Kernels for more rows by matrices as stored, if this GPU has them.
    pub(super) tile_64: Option<Tile64Kernels>,
    /// Kernels for experts, each with the most places of one that a block multiplies at once.
    grouped: Vec<(u64, Multiply)>,
    count: CudaFunction,
    scan: CudaFunction,
    pack: CudaFunction,
    patch: CudaFunction,
    unpack: CudaFunction,
    gather: CudaFunction,
    count_bytes: u32,
    /// Whether a kernel that multiplies may begin while the previous one ends.
    pub(super) early: bool,
    /// Kernels for up to [`ORDER_ROWS`] rows by the fast layout in the order of a plan of the sum,
    /// if this GPU has them; grouped products then have the order of one split.
    pub(super) order: Option<OrderKernels>,
    /// The result of [`crossover`].
    pub(super) crossover: [u64; 2],
}

impl LinearKernels {
    /// Loads them beside the decode kernels. `driver`: the version of CUDA that the driver
    /// supports.
    pub(in crate::gpu) fn load(
        stream: &Arc<CudaStream>,
        others: &Kernels,
        driver: (i32, i32),
    ) -> Result<Self> {
        let module = Module::load(stream, "linear", PTX, SM_90)?;
        let constants: Constants = module.constants()?;
        agree(&constants.agreed, &Agreed::ours())?;
        let Constants { threads, early, count_bytes, .. } = constants;
        let prepare = |kind, rows: u64, threads, shared| {
            let kernel = module.function(&format!("{kind}_{rows}"))?;
            Ok((rows, Multiply::prepare(kernel, threads, shared, others)?))
        };
        let (mut fast, mut half) = (Vec::new(), Vec::new());
        for (rows, shared) in CLASSES.into_iter().zip(constants.fast_bytes) {
            fast.push(prepare("fast", rows, threads, shared)?);
        }
        let order = OrderKernels::load(&module, &constants, others)?;
        if constants.fast_128_threads > 0 {
            let Constants {
                fast_128_threads,
                fast_128_bytes,
                fast_256_threads,
                fast_256_bytes,
                ..
            } = constants;
            let fast_128 =
                FAST128_CLASSES.map(|rows| prepare("fast", rows, fast_128_threads, fast_128_bytes));
            let fast_256 = |kind, threads| {
                FAST256_CLASSES.map(|rows| prepare(kind, rows, threads, fast_256_bytes))
            };
            let whole = fast_128.into_iter().chain(fast_256("fast", fast_256_threads[1]));
            let whole = whole.collect::<Result<Vec<_>>>()?;
            let halves =
                fast_256("half", fast_256_threads[0]).into_iter().collect::<Result<Vec<_>>>()?;
            if whole.iter().chain(&halves).all(|(_, kernel)| kernel.blocks > 0) {
                fast.extend(whole);
                half = halves;
            }
        }
        let tiles = TileKernels::load(&module, constants.tile, constants.tile_2, others)?;
        let tile_64 = Tile64Kernels::load(&module, constants.tile_64, others)?;
        let function = |name| module.function(name);
        let Constants { grouped_threads, grouped_bytes, grouped_rows, .. } = constants;
        let mut grouped = Vec::new();
        for rows in grouped_rows.into_iter().filter(|&rows| rows > 0) {
            let kernel = module.function(&format!("grouped_{rows}"))?;
            let kernel = Multiply::prepare(kernel, grouped_threads, grouped_bytes, others)?;
            grouped.push((rows.into(), kernel));
        }
        let count = function("count")?;
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        count.set_attribute(most, count_bytes.cast_signed()).or_fault("preparing a kernel")?;
        Ok(Self {
            fast,
            half,
            tiles,
            tile_64,
            grouped,
            count,
            scan: function("scan")?,
            pack: function("pack")?,
            patch: function("patch")?,
            unpack: function("unpack")?,
            gather: function("gather")?,
            count_bytes,
            early: early == 1 && driver >= EARLY_DRIVER,
            order,
            crossover: crossover(stream.context())?,
        })
    }

    /// Checks that the kernels that multiply by experts fit this GPU; returns whether they keep
    /// the order of one split, and how many places their blocks have.
    pub(super) fn check_grouped(&self) -> Result<(bool, Vec<u64>)> {
        if self.grouped.iter().any(|(_, kernel)| kernel.blocks == 0) {
            return Err(too_little_shared_memory());
        }
        Ok((self.order.is_some(), self.grouped.iter().map(|&(rows, _)| rows).collect()))
    }

    /// The most rows of x that one launch multiplies by matrices in the fast layout, or, with
    /// `staged`, by matrices as stored; 0 if the kernels do not fit this GPU.
    pub(super) fn max_rows(&self, staged: Option<u32>) -> u64 {
        match staged {
            Some(_) if self.tile_64.is_some() => TILE64_CLASSES[TILE64_CLASSES.len() - 1],
            Some(staged) => self.tiles.max_rows(staged),
            None if self.fast.iter().any(|(_, kernel)| kernel.blocks == 0) => 0,
            None if self.fast.iter().any(|(rows, _)| *rows > ROWS) => LAUNCH_ROWS,
            None => ROWS,
        }
    }

    /// Kernel for this many rows of x per band, in the fast layout.
    pub(super) fn fast(&self, x_rows: u64) -> &Multiply {
        of_rows(&self.fast, x_rows).1
    }

    /// The same, for groups of half as many strips.
    pub(super) fn half(&self, x_rows: u64) -> &Multiply {
        of_rows(&self.half, x_rows).1
    }

    /// Puts a product with experts on the stream, in blocks of `each` places.
    ///
    /// # Safety
    /// The launch is as `kernels/linear_task.cuh` asks, with at least one place; all that it points
    /// to lives until the kernel is done. [`check_grouped`](Self::check_grouped) named `each`.
    pub(super) unsafe fn multiply_grouped(
        &self,
        stream: &CudaStream,
        each: u64,
        launch: &GroupedLaunch,
    ) -> Result<()> {
        let kernel = self.grouped.iter().find(|&&(rows, _)| rows == each);
        let (_, kernel) = kernel.expect("check_grouped named it");
        let GroupedLaunch { places, experts, rows, .. } = *launch;
        // Number of items if each expert begins a chunk of its own; slots may be one by one.
        let chunks = u64::from(places).div_ceil(MIN_CHUNK) + u64::from(experts.min(places));
        let items = chunks * u64::from(rows).div_ceil(STRIP_ROWS);
        let blocks = items.min(kernel.blocks.into()) as u32;
        // SAFETY: the caller's promise; the kernel first waits for the one before it.
        unsafe { kernel.run(self.early, stream, blocks, launch) }
    }

    /// Puts the transcoding of a range of strips on the stream.
    ///
    /// # Safety
    /// The task is as `kernels/linear_task.cuh` asks, and all that it points to lives until the
    /// kernels are done.
    pub(super) unsafe fn pack(&self, stream: &CudaStream, task: &PackTask) -> Result<()> {
        // Fewer than 2^32.
        let tiles = u64::from(task.rows).div_ceil(STRIP_ROWS) * tiles_across(task.columns.into());
        let blocks = tiles.div_ceil(PACK_WARPS) as u32;
        let each_tile = |shared| config(blocks, PACK_WARPS as u32 * LANES, shared);
        // SAFETY: the caller's promise; a warp per tile, and the kernels' shared memory.
        unsafe { run(&self.count, false, stream, each_tile(self.count_bytes), task) }?;
        // SAFETY: as above, after the counts, which it adds up.
        unsafe { run(&self.scan, false, stream, config(1, SCAN_THREADS, 0), task) }?;
        // SAFETY: as above, after the sums, which give the places of exceptions.
        unsafe { run(&self.pack, false, stream, each_tile(0), task) }?;
        let strips = u64::from(task.rows).div_ceil(STRIP_ROWS).div_ceil(PACK_WARPS) as u32;
        let each_strip = config(strips, PACK_WARPS as u32 * LANES, 0);
        // SAFETY: as above, after the exceptions, which it puts into products; a warp per strip.
        unsafe { run(&self.patch, false, stream, each_strip, task) }
    }

    /// Puts the decoding of a part of a matrix in the fast layout on the stream.
    ///
    /// # Safety
    /// Same as [`pack`](Self::pack).
    pub(super) unsafe fn unpack(&self, stream: &CudaStream, task: &UnpackTask) -> Result<()> {
        let blocks = task.tiles.div_ceil(UNPACK_WARPS as u32);
        let config = config(blocks, UNPACK_WARPS as u32 * LANES, 0);
        // SAFETY: the caller's promise; a warp per tile.
        unsafe { run(&self.unpack, false, stream, config, task) }
    }

    /// Puts the decoding of rows by their indices on the stream, in this many blocks.
    ///
    /// # Safety
    /// Same as [`pack`](Self::pack), for this residence; [`gather_blocks`] gives the blocks.
    pub(super) unsafe fn gather(
        &self,
        residence: Residence,
        stream: &CudaStream,
        task: &GatherTask,
        blocks: u32,
    ) -> Result<()> {
        let kernel = match residence {
            Residence::Stored => &self.tiles.gather,
            Residence::Fast => &self.gather,
        };
        let config = config(blocks, UNPACK_WARPS as u32 * LANES, 0);
        // SAFETY: the caller's promise; a warp for each tile that a row crosses.
        unsafe { run(kernel, false, stream, config, task) }
    }
}

/// Most rows of x of each kernel that multiplies few rows in the order of a plan of the sum.
const ORDER_CLASSES: [u64; 4] = [ROWS_8, ROWS, BAND_ROWS, ORDER_ROWS];

/// Kernels that multiply up to [`ORDER_ROWS`] rows in the order of a plan of the sum.
#[derive(Debug)]
pub(super) struct OrderKernels {
    kernels: Vec<(u64, Multiply)>,
    /// The last launch of these kernels, or of those for more rows.
    pub(super) last: LastLaunch,
}

impl OrderKernels {
    fn load(module: &Module<'_>, constants: &Constants, others: &Kernels) -> Result<Option<Self>> {
        let Constants { order_threads, order_bytes, .. } = *constants;
        if order_threads == 0 {
            return Ok(None);
        }
        let prepare = |rows: u64| {
            let function = module.function(&format!("order_{rows}"))?;
            Ok((rows, Multiply::prepare(function, order_threads, order_bytes, others)?))
        };
        let kernels = ORDER_CLASSES.into_iter().map(prepare).collect::<Result<Vec<_>>>()?;
        let fit = kernels.iter().all(|(_, kernel)| kernel.blocks > 0);
        Ok(fit.then(|| Self { kernels, last: LastLaunch::default() }))
    }

    /// The kernel for `x_rows` rows of x, up to [`ORDER_ROWS`], and the most rows that it
    /// multiplies.
    pub(super) fn of(&self, x_rows: u64) -> (u64, &Multiply) {
        of_rows(&self.kernels, x_rows)
    }
}

/// The first kernel for this many rows, and its most rows.
fn of_rows(kernels: &[(u64, Multiply)], x_rows: u64) -> (u64, &Multiply) {
    let &(class, ref kernel) = kernels
        .iter()
        .find(|&&(class, _)| x_rows <= class)
        .expect("max_rows says for how many there are kernels");
    (class, kernel)
}

/// The error for a GPU that the kernels do not fit.
pub(super) fn too_little_shared_memory() -> Error {
    let problem = "blocks of this GPU have too little shared memory for the kernels that multiply";
    gpu(problem, "decode the matrices and multiply then, or take another GPU")
}

/// Blocks that decode this many rows, a warp for each tile of a row; `None` if too many.
pub(super) fn gather_blocks(count: u64, columns: u64) -> Option<u32> {
    u32::try_from(count).ok()?;
    let blocks = count.checked_mul(tiles_across(columns))?.div_ceil(UNPACK_WARPS);
    i32::try_from(blocks).ok().map(i32::unsigned_abs)
}

#[cfg(test)]
mod tests {
    use super::{Agreed, Constants};
    use crate::gpu::module::tests::constants;

    #[test]
    fn the_kernels_constants_are_those_of_this_crate() {
        for target in ["constants", "hopper_constants"] {
            assert_eq!(constants::<Constants>("linear", target).agreed, Agreed::ours());
        }
    }
}
