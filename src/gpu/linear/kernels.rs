//! The kernels that multiply and transcode, loaded when they are first asked for.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, LaunchConfig, sys::CUfunction_attribute as Attribute,
};

use super::{
    Matrix, Residence,
    crossover::{Crossover, Gpu},
    decoded::{DECODED_CLASSES, DECODED_CONSTANTS, DecodedKernels},
    multiply::{Multiply, run},
    split::{
        Bands, GROUP, LARGE_CLASSES, LARGE_ROWS, LARGE_SPLIT, WIDE_CLASSES, WIDE_CLUSTER,
        WIDE_SPLIT,
    },
    task::{
        FEW_ROWS, GatherTask, GroupedLaunch, LEAST_CHUNK, LinearLaunch, MATRICES, MOST_EXPERTS,
        PACK_WARPS, PARTIAL_BYTES, PackTask, ROWS, SCAN_THREADS, SIZES, STRIP_ROWS, UNPACK_WARPS,
        UnpackTask, tiles_across,
    },
    tiles::{Staged, TILE_CONSTANTS, TileKernels},
};
use crate::{
    Error, Result,
    gpu::{
        fault::{OrFault, gpu},
        fit::LANES,
        module::{Kernels, load_module, read_constants},
    },
};

const PTX: &str = include_str!("../../../kernels/ptx/linear.ptx");
const SM_90: &[u8] = include_bytes!("../../../kernels/ptx/linear.sm_90a.cubin");
/// How many numbers the kernel of constants writes.
const CONSTANTS: usize = DECODED_AT + DECODED_CONSTANTS;
/// From where on they are the shared memory of a block that multiplies, by rows of x.
const SHARED_AT: usize = 16;
/// From where on they are that of the kernels for more rows, [`WIDE_CLASSES`], and their threads.
/// Zeros if there are none.
const WIDE_AT: usize = SHARED_AT + ROWS as usize;
/// From where on they say how matrices are shared out for more rows.
const WIDE_SPLIT_AT: usize = WIDE_AT + 2;
/// As [`WIDE_AT`], of the kernels of [`LARGE_CLASSES`].
const LARGE_AT: usize = WIDE_SPLIT_AT + WIDE_SPLIT.len();
/// As [`WIDE_SPLIT_AT`], for as many.
const LARGE_SPLIT_AT: usize = LARGE_AT + 2;
/// From where on they are of the kernels for matrices as stored.
const TILE_AT: usize = LARGE_SPLIT_AT + LARGE_SPLIT.len();
/// From where on they are of those for more rows.
const DECODED_AT: usize = TILE_AT + TILE_CONSTANTS;
/// The version of CUDA from which on drivers capture launches that begin early.
const EARLY_DRIVER: (i32, i32) = (12, 3);

/// All of them in one context.
#[derive(Debug)]
pub(in crate::gpu) struct LinearKernels {
    /// For each number of rows of x from 1 on.
    fast: Vec<Multiply>,
    /// For more rows, if there are such kernels for this GPU.
    wide: Option<Wide>,
    tiles: TileKernels,
    /// For more rows by matrices as stored, if there are such kernels for this GPU.
    decoded: Option<DecodedKernels>,
    grouped: Multiply,
    count: CudaFunction,
    scan: CudaFunction,
    pack: CudaFunction,
    unpack: CudaFunction,
    gather: CudaFunction,
    /// Shared memory of a block that counts.
    count_bytes: u32,
    /// Whether a kernel that multiplies may begin while the one before it ends.
    early: bool,
    crossover: Crossover,
}

/// The kernels for more than [`ROWS`] rows of x.
#[derive(Debug)]
struct Wide {
    /// For each of [`WIDE_CLASSES`].
    classes: Vec<Multiply>,
    /// For each of [`LARGE_CLASSES`].
    large: Vec<Multiply>,
}

/// Those for matrices in the fast layout. None if this GPU's code has none, or its blocks have too
/// little shared memory.
fn load_wide(
    function: impl Fn(&str) -> Result<CudaFunction>,
    constants: &[u32],
    others: &Kernels,
) -> Result<Option<Wide>> {
    if constants[WIDE_AT + 1] == 0 {
        return Ok(None);
    }
    let prepare = |classes: &[u64], at: usize| {
        let (shared, threads) = (constants[at], constants[at + 1]);
        let kernel =
            |rows| Multiply::prepare(function(&format!("fast_{rows}"))?, threads, shared, others);
        classes.iter().map(kernel).collect::<Result<Vec<_>>>()
    };
    let (classes, large) = (prepare(&WIDE_CLASSES, WIDE_AT)?, prepare(&LARGE_CLASSES, LARGE_AT)?);
    let fit = classes.iter().chain(&large).all(|kernel| kernel.blocks > 0);
    Ok(fit.then_some(Wide { classes, large }))
}

impl LinearKernels {
    /// Loads them beside those that decode. `driver`: the version of CUDA that it knows.
    pub(in crate::gpu) fn load(
        stream: &Arc<CudaStream>,
        others: &Kernels,
        driver: (i32, i32),
    ) -> Result<Self> {
        let module = load_module(stream.context(), PTX, SM_90)?;
        let function = |name: &str| {
            let name = format!("df11_linear_{name}");
            module.load_function(&name).or_fault(&name)
        };
        let constants = read_constants(stream, &function("constants")?, CONSTANTS, &SIZES)?;
        check_constants(&constants)?;
        let [threads, early, count_bytes, grouped_bytes] = [6, 7, 9, 15].map(|at| constants[at]);
        let [few, most] = [function("fast_8")?, function("fast_16")?];
        // The most rows last, which need the most shared memory.
        let multiply = |(rows, &shared): (u64, &u32)| {
            let function = if rows <= FEW_ROWS { &few } else { &most };
            Multiply::prepare(function.clone(), threads, shared, others)
        };
        let fast = (1..=ROWS).zip(&constants[SHARED_AT..]).map(multiply).collect::<Result<_>>()?;
        let wide = load_wide(function, &constants, others)?;
        let tiles = TileKernels::load(function, &constants[TILE_AT..], others)?;
        let decoded = DecodedKernels::load(function, &constants[DECODED_AT..], others)?;
        let grouped = Multiply::prepare(function("grouped")?, threads, grouped_bytes, others)?;
        let count = function("count")?;
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        count.set_attribute(most, count_bytes.cast_signed()).or_fault("preparing a kernel")?;
        let [scan, pack] = [function("scan")?, function("pack")?];
        let [unpack, gather] = [function("unpack")?, function("gather")?];
        let early = early == 1 && driver >= EARLY_DRIVER;
        let crossover = Crossover::of(Gpu::of(stream.context())?);
        Ok(Self {
            fast,
            wide,
            tiles,
            decoded,
            grouped,
            count,
            scan,
            pack,
            unpack,
            gather,
            count_bytes,
            early,
            crossover,
        })
    }

    /// Whether the kernel that multiplies by experts fits this GPU.
    pub(super) fn has_grouped(&self) -> bool {
        self.grouped.blocks > 0
    }

    /// From how many rows of x on decoding a matrix first is faster.
    pub(super) fn crossover_rows(&self, matrix: &Matrix) -> u64 {
        self.crossover.rows(matrix.residence())
    }

    /// Multiprocessors of the GPU.
    pub(super) fn processors(&self) -> u32 {
        self.tiles.processors()
    }

    /// The most rows of x that one launch multiplies by matrices in the fast layout, or by such
    /// ones as stored; 0 if the kernels do not fit this GPU.
    pub(super) fn most_rows(&self, staged: Option<Staged>) -> u64 {
        match staged {
            Some(_) if self.decoded.is_some() => DECODED_CLASSES[DECODED_CLASSES.len() - 1],
            Some(staged) => self.tiles.most_rows(staged),
            None if self.fast.iter().any(|kernel| kernel.blocks == 0) => 0,
            None if self.wide.is_some() => LARGE_ROWS,
            None => ROWS,
        }
    }

    /// Puts a product on the stream.
    ///
    /// # Safety
    /// The launch is as `kernels/linear_task.cuh` asks with 1 to [`ROWS`] rows of x, and no
    /// more than [`most_rows`](Self::most_rows) says of the same matrices; all that it points to
    /// lives until the kernel is done.
    pub(super) unsafe fn multiply(
        &self,
        staged: Option<Staged>,
        stream: &CudaStream,
        launch: &LinearLaunch,
    ) -> Result<()> {
        if let Some(staged) = staged {
            // SAFETY: the caller's promise; matrices are whole before a launch can name them.
            return unsafe { self.tiles.multiply(self.early, staged, stream, launch) };
        }
        let kernel = &self.fast[launch.x_rows as usize - 1];
        // SAFETY: as above.
        unsafe { kernel.run(self.early, stream, launch.items, launch) }
    }

    /// Puts a product of more rows on the stream, by matrices in the fast layout.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), with more than [`ROWS`] rows of x and no more than the last
    /// of [`WIDE_CLASSES`]; the items, strips and parts are those of
    /// [`Wide`](super::split::Wide).
    pub(super) unsafe fn multiply_wide(
        &self,
        stream: &CudaStream,
        items: u64,
        launch: &LinearLaunch,
    ) -> Result<()> {
        let rows = u64::from(launch.x_rows);
        let kernel =
            WIDE_CLASSES.iter().zip(&self.wide().classes).find(|&(&class, _)| rows <= class);
        let (_, kernel) = kernel.expect("no more rows than the last class has");
        // SAFETY: the caller's promise; matrices are whole before a launch can name them.
        unsafe { kernel.run_blocks(self.early, stream, (items * WIDE_CLUSTER) as u32, launch) }
    }

    /// Puts a product of more rows on the stream, by matrices as stored.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), with more than [`ROWS`] rows of x and no more than
    /// [`most_rows`](Self::most_rows); the items are those of [`Rounds`](super::decoded::Rounds).
    pub(super) unsafe fn multiply_decoded(
        &self,
        staged: Staged,
        stream: &CudaStream,
        items: u64,
        launch: &LinearLaunch,
    ) -> Result<()> {
        let kernels =
            self.decoded.as_ref().expect("most_rows says whether there are kernels for this many");
        // SAFETY: the caller's promise; matrices are whole before a launch can name them.
        unsafe { kernels.multiply(self.early, staged, stream, items, launch) }
    }

    /// Likewise, of up to [`LARGE_ROWS`] rows of x.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), with no more than [`LARGE_ROWS`] rows of x, in these bands;
    /// the matrices and items are those of [`Large`](super::split::Large).
    pub(super) unsafe fn multiply_large(
        &self,
        stream: &CudaStream,
        bands: Bands,
        launch: &LinearLaunch,
    ) -> Result<()> {
        // SAFETY: the caller's promise; matrices are whole before a launch can name them.
        unsafe { self.wide().large[bands.class()].run(self.early, stream, launch.items, launch) }
    }

    fn wide(&self) -> &Wide {
        self.wide.as_ref().expect("most_rows says whether there are kernels for this many")
    }

    /// Puts a product with experts on the stream.
    ///
    /// # Safety
    /// The launch is as `kernels/linear_task.cuh` asks, with at least one place; all that it points
    /// to lives until the kernel is done. [`has_grouped`](Self::has_grouped) said yes.
    pub(super) unsafe fn multiply_grouped(
        &self,
        stream: &CudaStream,
        launch: &GroupedLaunch,
    ) -> Result<()> {
        let GroupedLaunch { places, experts, rows, .. } = *launch;
        // Items, if each expert begins a chunk of its own.
        let chunks = u64::from(places).div_ceil(LEAST_CHUNK) + u64::from(experts.min(places));
        let items = chunks * u64::from(rows).div_ceil(STRIP_ROWS);
        let items = u32::try_from(items).unwrap_or(u32::MAX);
        // SAFETY: the caller's promise; it waits for the kernel before it at once.
        unsafe { self.grouped.run(self.early, stream, items, launch) }
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
        let one = LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (SCAN_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's promise; a warp a tile, and the shared memory that the kernels'
        // constants say.
        unsafe { run(&self.count, stream, each_tile(self.count_bytes), task) }?;
        // SAFETY: as above, after the counts, which it adds.
        unsafe { run(&self.scan, stream, one, task) }?;
        // SAFETY: as above, after the sums, by which it finds the places of exceptions.
        unsafe { run(&self.pack, stream, each_tile(0), task) }
    }

    /// Puts the decoding of a part of a matrix in the fast layout on the stream.
    ///
    /// # Safety
    /// As [`pack`](Self::pack).
    pub(super) unsafe fn unpack(&self, stream: &CudaStream, task: &UnpackTask) -> Result<()> {
        let config = LaunchConfig {
            grid_dim: (task.tiles.div_ceil(UNPACK_WARPS as u32), 1, 1),
            block_dim: (UNPACK_WARPS as u32 * LANES, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's promise; a warp a tile.
        unsafe { run(&self.unpack, stream, config, task) }
    }

    /// Puts the decoding of rows by their indices on the stream; this many blocks.
    ///
    /// # Safety
    /// As [`pack`](Self::pack), of a matrix of this residence; the blocks are those of
    /// [`gather_blocks`].
    pub(super) unsafe fn gather(
        &self,
        residence: Residence,
        stream: &CudaStream,
        task: &GatherTask,
        blocks: u32,
    ) -> Result<()> {
        let kernel = match residence {
            Residence::Stored => self.tiles.gather(),
            Residence::Fast => &self.gather,
        };
        let config = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (UNPACK_WARPS as u32 * LANES, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's promise; a warp for each tile that a row crosses.
        unsafe { run(kernel, stream, config, task) }
    }
}

/// That kernels do not fit a GPU.
pub(super) fn too_little_shared_memory() -> Error {
    let problem = "blocks of this GPU have too little shared memory for the kernels that multiply";
    gpu(problem, "decode the matrices and multiply then, or take another GPU")
}

/// Blocks that decode this many rows, a warp for each tile that a row crosses; none if they are too
/// many.
pub(super) fn gather_blocks(count: u64, columns: u64) -> Option<u32> {
    u32::try_from(count).ok()?;
    let blocks = count.checked_mul(tiles_across(columns))?.div_ceil(UNPACK_WARPS);
    i32::try_from(blocks).ok().map(i32::unsigned_abs)
}

/// Blocks of this many warps for the tiles of a matrix, of which there are fewer than 2^32.
fn blocks(rows: u32, columns: u32, warps: u64) -> u32 {
    (u64::from(rows).div_ceil(STRIP_ROWS) * tiles_across(columns.into())).div_ceil(warps) as u32
}

/// That both sides mean the same by what is no size of a structure.
fn check_constants(constants: &[u32]) -> Result<()> {
    let few =
        [PACK_WARPS, UNPACK_WARPS, PARTIAL_BYTES, MATRICES as u64, GROUP, MOST_EXPERTS as u64];
    let ours = [&few[..], &WIDE_SPLIT, &LARGE_SPLIT].concat();
    let few = [8, 10, 11, 12, 13, 14].into_iter();
    let at = few.chain(WIDE_SPLIT_AT..LARGE_AT).chain(LARGE_SPLIT_AT..TILE_AT);
    let theirs = at.map(|at| u64::from(constants[at]));
    let theirs: Vec<u64> = theirs.collect();
    if ours == theirs {
        return Ok(());
    }
    let problem = format!("the kernels that multiply count by {theirs:?}, this crate by {ours:?}");
    Err(gpu(problem, "build df11 again with the kernels of its own version"))
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
            let theirs: Vec<u32> =
                theirs.iter().map(|word| word.as_u64().unwrap() as u32).collect();
            assert_eq!(theirs.len(), CONSTANTS);
            assert!(theirs.iter().zip(SIZES).all(|(&theirs, ours)| u64::from(theirs) == ours));
            check_constants(&theirs).unwrap();
        }
    }
}
