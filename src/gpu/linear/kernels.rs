//! The kernels that multiply and transcode, loaded when they are first asked for.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys::CUfunction_attribute as Attribute,
};

use super::task::{
    GROUP, GatherTask, LinearLaunch, MATRICES, PACK_WARPS, PARTIAL_BYTES, PackTask, ROWS, SCAN_THREADS,
    SIZES, STRIP_ROWS, UNPACK_WARPS, UnpackTask, tiles_across,
};
use crate::{
    Result,
    gpu::{
        fault::{OrFault, gpu},
        fit::LANES,
        module::{Kernels, load_module, read_constants},
    },
};

const PTX: &str = include_str!("../../../kernels/ptx/linear.ptx");
const SM_90: &[u8] = include_bytes!("../../../kernels/ptx/linear.sm_90a.cubin");
/// How many numbers the kernel of constants writes.
const CONSTANTS: usize = SHARED_AT + ROWS as usize + MORE_ROWS;
/// From where on they are the shared memory of a block that multiplies, by rows of x.
const SHARED_AT: usize = 16;
/// As many follow, of kernels for more rows.
const MORE_ROWS: usize = 5;
/// Rows of x that the smaller one of two kernels multiplies.
const FEW_ROWS: u64 = 8;

/// All of them in one context.
#[derive(Debug)]
pub(in crate::gpu) struct LinearKernels {
    /// For each number of rows of x from 1 on.
    fast: Vec<Multiply>,
    count: CudaFunction,
    scan: CudaFunction,
    pack: CudaFunction,
    unpack: CudaFunction,
    gather: CudaFunction,
    /// Shared memory of a block that counts.
    count_bytes: u32,
}

/// A kernel that multiplies some number of rows.
#[derive(Debug)]
struct Multiply {
    function: CudaFunction,
    threads: u32,
    /// Dynamic shared memory of a block.
    shared: u32,
    /// Blocks that the GPU runs at once, in groups; of a kernel that does not fit it none.
    blocks: u32,
}

impl LinearKernels {
    /// Loads them beside those that decode.
    pub(in crate::gpu) fn load(stream: &Arc<CudaStream>, others: &Kernels) -> Result<Self> {
        let module = load_module(stream.context(), PTX, SM_90)?;
        let function = |name: &str| {
            let name = format!("df11_linear_{name}");
            module.load_function(&name).or_fault(&name)
        };
        let constants = read_constants(stream, &function("constants")?, CONSTANTS, &SIZES)?;
        check_constants(&constants)?;
        let [threads, count_bytes] = [6, 9].map(|at| constants[at]);
        let [few, most] = [function("fast_8")?, function("fast_16")?];
        // The most rows last, which need the most shared memory.
        let multiply = |(rows, &shared): (u64, &u32)| {
            let function = if rows <= FEW_ROWS { &few } else { &most };
            Multiply::prepare(function.clone(), threads, shared, others)
        };
        let fast = (1..=ROWS).zip(&constants[SHARED_AT..]).map(multiply).collect::<Result<_>>()?;
        let count = function("count")?;
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        count.set_attribute(most, count_bytes.cast_signed()).or_fault("preparing a kernel")?;
        let [scan, pack] = [function("scan")?, function("pack")?];
        let [unpack, gather] = [function("unpack")?, function("gather")?];
        Ok(Self { fast, count, scan, pack, unpack, gather, count_bytes })
    }

    /// That the kernels that multiply run on this GPU.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if its blocks have too little shared memory.
    pub(super) fn check(&self) -> Result<()> {
        let Some(kernel) = self.fast.iter().find(|kernel| kernel.blocks == 0) else { return Ok(()) };
        let problem =
            format!("a kernel that multiplies needs {} bytes of shared memory a block", kernel.shared);
        Err(gpu(problem, "decode the matrix and multiply then, or take another GPU"))
    }

    /// Puts a product on the stream.
    ///
    /// # Safety
    /// The launch is as `kernels/linear_task.cuh` asks with 1 to
    /// [`ROWS`] rows of x; all that it points to lives until the kernel is done.
    /// [`check`](Self::check) said yes.
    pub(super) unsafe fn multiply(&self, stream: &CudaStream, launch: &LinearLaunch) -> Result<()> {
        let kernel = &self.fast[launch.x_rows as usize - 1];
        let config = LaunchConfig {
            grid_dim: (launch.items.min(kernel.blocks), 1, 1),
            block_dim: (kernel.threads, 1, 1),
            shared_mem_bytes: kernel.shared,
        };
        // SAFETY: the caller's promise; threads and shared memory are what the kernels' constants
        // say.
        unsafe { run(&kernel.function, stream, config, launch) }
    }

    /// Puts the transcoding of a range of strips on the stream.
    ///
    /// # Safety
    /// The task is as `kernels/linear_task.cuh` asks, and all that it points to lives until the
    /// kernels are done.
    pub(super) unsafe fn pack(&self, stream: &CudaStream, task: &PackTask) -> Result<()> {
        let each_tile = |shared_mem_bytes| LaunchConfig {
            grid_dim: (blocks(task.rows, task.columns, PACK_WARPS), 1, 1),
            block_dim: (PACK_WARPS as u32 * LANES, 1, 1),
            shared_mem_bytes,
        };
        let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (SCAN_THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the caller's promise; a warp a tile, and the shared memory that the kernels'
        // constants say.
        unsafe { run(&self.count, stream, each_tile(self.count_bytes), task) }?;
        // SAFETY: as above, after the counts, which it adds.
        unsafe { run(&self.scan, stream, one, task) }?;
        // SAFETY: as above, after the sums, by which it finds the places of exceptions.
        unsafe { run(&self.pack, stream, each_tile(0), task) }
    }

    /// Puts the decoding of a matrix in the fast layout on the stream.
    ///
    /// # Safety
    /// As [`pack`](Self::pack).
    pub(super) unsafe fn unpack(&self, stream: &CudaStream, task: &UnpackTask) -> Result<()> {
        let config = LaunchConfig {
            grid_dim: (blocks(task.rows, task.columns, UNPACK_WARPS), 1, 1),
            block_dim: (UNPACK_WARPS as u32 * LANES, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's promise; a warp a tile.
        unsafe { run(&self.unpack, stream, config, task) }
    }

    /// Puts the decoding of rows by their indices on the stream; this many blocks.
    ///
    /// # Safety
    /// As [`pack`](Self::pack); the blocks are those of [`gather_blocks`].
    pub(super) unsafe fn gather(&self, stream: &CudaStream, task: &GatherTask, blocks: u32) -> Result<()> {
        let config = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (UNPACK_WARPS as u32 * LANES, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's promise; a warp for each tile that a row crosses.
        unsafe { run(&self.gather, stream, config, task) }
    }
}

/// Blocks that decode so many rows, a warp for each tile that a row crosses; none if they are too
/// many.
pub(super) fn gather_blocks(count: u64, columns: u64) -> Option<u32> {
    u32::try_from(count).ok()?;
    let blocks = count.checked_mul(tiles_across(columns))?.div_ceil(UNPACK_WARPS);
    i32::try_from(blocks).ok().map(i32::unsigned_abs)
}

/// Blocks of so many warps for the tiles of a matrix, of which there are fewer than 2^32.
fn blocks(rows: u32, columns: u32, warps: u64) -> u32 {
    (u64::from(rows).div_ceil(STRIP_ROWS) * tiles_across(columns.into())).div_ceil(warps) as u32
}

/// # Safety
/// The argument and the configuration are those of the kernel, and all that the argument points to
/// lives until it is done.
unsafe fn run<T: DeviceRepr>(
    function: &CudaFunction,
    stream: &CudaStream,
    config: LaunchConfig,
    argument: &T,
) -> Result<()> {
    let mut launch = stream.launch_builder(function);
    launch.arg(argument);
    // SAFETY: the caller's promise. The driver has copied the argument when the call returns.
    let launched = unsafe { launch.launch(config) };
    launched.map(drop).or_fault("launching a kernel")
}

/// That both sides mean the same by what is no size of a structure.
fn check_constants(constants: &[u32]) -> Result<()> {
    let ours = [PACK_WARPS, UNPACK_WARPS, PARTIAL_BYTES, MATRICES as u64, GROUP];
    let theirs = [8, 10, 11, 12, 13].map(|at| u64::from(constants[at]));
    if ours == theirs {
        return Ok(());
    }
    let problem = format!("the kernels that multiply count by {theirs:?}, this crate by {ours:?}");
    Err(gpu(problem, "build df11 again with the kernels of its own version"))
}

impl Multiply {
    /// Lets the kernel have its shared memory, and counts its blocks.
    fn prepare(function: CudaFunction, threads: u32, shared: u32, others: &Kernels) -> Result<Self> {
        let action = "preparing a kernel that multiplies";
        let block = function.shared_size_bytes().or_fault(action)?.unsigned_abs() + shared;
        let mut blocks = 0;
        if block <= others.room() {
            let set = |attribute, value| function.set_attribute(attribute, value).or_fault(action);
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared.cast_signed())?;
            set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
            let each =
                function.occupancy_max_active_blocks_per_multiprocessor(threads, shared as usize, None);
            blocks = each.or_fault(action)? * others.processors() / GROUP as u32 * GROUP as u32;
        }
        Ok(Self { function, threads, shared, blocks })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{CONSTANTS, SIZES, check_constants};

    #[test]
    fn the_kernels_constants_are_those_of_this_crate() {
        let manifest = include_str!("../../../kernels/ptx/manifest.json");
        let manifest: Value = serde_json::from_str(manifest).unwrap();
        for target in ["constants", "hopper_constants"] {
            let theirs = manifest["modules"]["linear.ptx"][target].as_array().unwrap();
            let theirs: Vec<u32> = theirs.iter().map(|word| word.as_u64().unwrap() as u32).collect();
            assert_eq!(theirs.len(), CONSTANTS);
            assert!(theirs.iter().zip(SIZES).all(|(&theirs, ours)| u64::from(theirs) == ours));
            check_constants(&theirs).unwrap();
        }
    }
}
