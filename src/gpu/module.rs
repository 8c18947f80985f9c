//! The kernels: machine code and PTX of this crate, loaded into a context. A test compares them
//! with the host's constants.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::{Arc, Mutex, OnceLock};
use std::{collections::HashMap, fmt::Debug};

use cudarc::driver::sys::{
    CUdevice_attribute as DeviceAttribute, CUdeviceptr, CUfunction_attribute as Attribute,
};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use zerocopy::FromBytes;

use super::fault::{OrFault, gpu};
use super::fit::{Demand, Fit, LANES};
use super::memory::Buffer;
use super::task::{
    ChooseTask, DecodeTask, FEW_TASKS, FLOATS, KERNELS, TILE_KERNEL, TableAddresses, TileTask,
};
use crate::{Error, Result, constants::GAP_BYTES_PER_THREAD, parallel};

const GAP_PTX: &str = include_str!("../../kernels/ptx/gap.ptx");
const GAP_SM_90: &[u8] = include_bytes!("../../kernels/ptx/gap.sm_90.cubin");
const TILE_PTX: &str = include_str!("../../kernels/ptx/tile.ptx");
const TILE_SM_90: &[u8] = include_bytes!("../../kernels/ptx/tile.sm_90.cubin");
const FLOAT_PTX: &str = include_str!("../../kernels/ptx/float.ptx");
const FLOAT_SM_90: &[u8] = include_bytes!("../../kernels/ptx/float.sm_90.cubin");
const TABLE_THREADS: u32 = 256;
/// Warps of the kernel that chooses experts.
const CHOOSE_WARPS: u32 = 16;
/// For each decode kernel: bytes of shared memory per warp, most warps per thread block, and how
/// many are good. `Constants` of `kernels/gap.cu`, `tile.cu` and `float.cu` have the same numbers;
/// a test compares these and all structures that both sides have.
pub(super) const DEMANDS: [[u32; 3]; KERNELS] = [
    [1984, 16, 16],
    [3904, 16, 16],
    [7744, 12, 12],
    [15_424, 12, 12],
    [32, 24, 8],
    [32, 24, 8],
    [32, 24, 8],
    [32, 24, 8],
    [32, 24, 8],
    [32, 20, 8],
    [32, 20, 8],
    [32, 24, 8],
];

/// All kernels in one context.
#[derive(Debug)]
pub(super) struct Kernels {
    /// Decode kernels by their numbers, except those of other floats.
    decode: Vec<Decode>,
    /// Decode kernels of other floats, loaded at their first use.
    floats: OnceLock<Floats>,
    stream: Arc<CudaStream>,
    /// Number of multiprocessors.
    pub(super) processors: u32,
    /// Shared memory that a thread block may have, in bytes.
    pub(super) room: u32,
    /// Fits by kernel and by bytes that each warp stages; a model's blocks often need the same
    /// ones.
    fits: Mutex<HashMap<(usize, u32), Fit>>,
}

#[derive(Debug)]
struct Floats {
    decode: Vec<Decode>,
    /// The kernel that copies the tasks of chosen experts.
    choose: CudaFunction,
}

#[derive(Debug)]
struct Decode {
    function: CudaFunction,
    /// The same kernel with tasks by value, which needs the same resources; for tiles alone.
    few: Option<CudaFunction>,
    /// The kernel that builds its decode tables.
    tables: CudaFunction,
    /// Its demand if warps stage nothing.
    demand: Demand,
}

/// A launch of a decode kernel, except for output, status and stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeLaunch {
    /// The number of the decode kernel.
    pub(super) kernel: usize,
    pub(super) fit: Fit,
    pub(super) first_task: u64,
    pub(super) task_count: u32,
    /// Sum of the tasks' thread blocks or tiles.
    pub(super) unit_count: u64,
}

impl Kernels {
    /// Loads the kernels; thread blocks use at most `max_shared` bytes of shared memory, even if
    /// there is more.
    pub(super) fn load(stream: &Arc<CudaStream>, max_shared: u32) -> Result<Self> {
        let context = stream.context();
        let attribute = |attribute| -> Result<u32> {
            let value = context.attribute(attribute).or_fault("asking for a GPU's properties")?;
            Ok(value.unsigned_abs())
        };
        let processors = attribute(DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let room = DeviceAttribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let room = attribute(room)?.min(max_shared);
        let gap = Module::load(stream, "gap", GAP_PTX, GAP_SM_90)?;
        let tile = Module::load(stream, "tile", TILE_PTX, TILE_SM_90)?;
        let prepare = |(kernel, demand)| match GAP_BYTES_PER_THREAD.get(kernel) {
            Some(bytes) => {
                let names = [&format!("decode_{bytes}"), "tables"];
                Decode::prepare(&gap, names, None, demand, room)
            }
            None => Decode::prepare(&tile, ["decode", "tables"], Some("decode_few"), demand, room),
        };
        let decode = DEMANDS[..=TILE_KERNEL].iter().copied().enumerate();
        let decode = decode.map(prepare).collect::<Result<_>>()?;
        let (floats, stream) = (OnceLock::new(), Arc::clone(stream));
        let fits = Mutex::default();
        Ok(Self { decode, floats, stream, processors, room, fits })
    }

    /// A decode kernel by its number.
    fn decode_kernel(&self, kernel: usize) -> Result<&Decode> {
        match kernel.checked_sub(self.decode.len()) {
            None => Ok(&self.decode[kernel]),
            Some(float) => Ok(&self.floats()?.decode[float]),
        }
    }

    fn floats(&self) -> Result<&Floats> {
        if let Some(floats) = self.floats.get() {
            return Ok(floats);
        }
        // If two threads load them at once, one drops its own.
        let module = Module::load(&self.stream, "float", FLOAT_PTX, FLOAT_SM_90)?;
        let prepare = |((_, name), demand): ((_, &str), &[u32; 3])| {
            let names = ["decode", "tables", "decode_few"].map(|what| format!("{what}_{name}"));
            let [decode, tables, few] = names.each_ref().map(String::as_str);
            Decode::prepare(&module, [decode, tables], Some(few), *demand, self.room)
        };
        let decode = FLOATS.into_iter().zip(&DEMANDS[self.decode.len()..]).map(prepare);
        let decode = decode.collect::<Result<_>>()?;
        let floats = Floats { decode, choose: module.function("choose")? };
        Ok(self.floats.get_or_init(|| floats))
    }

    /// Fits a decode kernel to this GPU if each warp stages this many bytes.
    pub(super) fn fit(&self, kernel: usize, staged_bytes: u32) -> Result<Fit> {
        let mut fits = parallel::lock(&self.fits);
        if let Some(&fit) = fits.get(&(kernel, staged_bytes)) {
            return Ok(fit);
        }
        let Decode { function, demand, .. } = self.decode_kernel(kernel)?;
        let demand = Demand { warp: demand.warp + staged_bytes, ..*demand };
        let fit = demand.fill(self.room, |warps| {
            let (threads, bytes) = (warps * LANES, (warps * demand.warp) as usize);
            let blocks =
                function.occupancy_max_active_blocks_per_multiprocessor(threads, bytes, None);
            blocks.or_fault("asking how a kernel fits a GPU")
        })?;
        let Some(fit) = fit else {
            let (needed, room) = (demand.with(1), self.room);
            let kernel = format!("a kernel needs {needed} bytes of shared memory a block");
            let remedy = "compress as gap with fewer bytes per thread, decode on the CPU, or take \
                          another GPU";
            return Err(gpu(format!("{kernel} and this GPU has {room}"), remedy));
        };
        fits.insert((kernel, staged_bytes), fit);
        Ok(fit)
    }

    /// Builds tables of a decode kernel, and waits.
    pub(super) fn build_tables(
        &self,
        kernel: usize,
        stream: &CudaStream,
        tables: &[TableAddresses],
    ) -> Result<()> {
        if tables.is_empty() {
            return Ok(());
        }
        let tasks = Buffer::of(stream, tables)?;
        let (config, pointer) = (config(tables.len() as u32, TABLE_THREADS, 0), tasks.pointer());
        let mut launch = stream.launch_builder(&self.decode_kernel(kernel)?.tables);
        launch.arg(&pointer);
        // SAFETY: one block per task; each task names a codebook with its length (in `gap` at least
        // 256 bytes, which is checked) and room for a table of its encoding, both in allocations
        // that outlive the synchronisation below. The kernels accept any content.
        let launched = unsafe { launch.launch(config) };
        launched.or_fault("launching a kernel of decode tables")?;
        stream.synchronize().or_fault("building decode tables")
    }

    /// Launches the kernel that copies tasks of chosen experts, for a decode kernel of a float of 8
    /// bits on the same stream, whose launch then has 0 tasks.
    ///
    /// # Safety
    /// Until both kernels are done, memory of this context at the task's addresses is as
    /// `kernels/float.cu` says of `ChooseTask`, and nothing else uses `chosen`.
    pub(super) unsafe fn choose(&self, stream: &CudaStream, task: &ChooseTask) -> Result<()> {
        let mut launch = stream.launch_builder(&self.floats()?.choose);
        launch.arg(task);
        // SAFETY: the argument matches the kernel's declaration; the rest is the caller's promise.
        // The kernel follows no id that names no expert.
        let launched = unsafe { launch.launch(config(1, CHOOSE_WARPS * LANES, 0)) };
        launched.map(drop).or_fault("launching the kernel that chooses experts")
    }

    /// Launches a decode kernel. A launch of floats of 8 bits with 0 tasks takes those that
    /// `choose` has copied.
    ///
    /// # Safety
    /// Until the kernel is done: the launch's tasks among those at `tasks` are as
    /// `kernels/gap_task.cuh` or `tile_task.cuh` asks (section arrays of the sizes that the layout
    /// gives, in memory of this context; warps' shared memory for the tiles of all tasks), `output`
    /// added to each task's output has room for its range and is a multiple of 16, `status` is a
    /// word of device memory.
    pub(super) unsafe fn decode(
        &self,
        stream: &CudaStream,
        plan: &DecodeLaunch,
        tasks: CUdeviceptr,
        output: CUdeviceptr,
        status: CUdeviceptr,
    ) -> Result<()> {
        let kernel = self.decode_kernel(plan.kernel)?;
        let config = self.config(plan.fit, plan.unit_count);
        let tasks = tasks + plan.first_task * size_of::<DecodeTask>() as u64;
        let mut launch = stream.launch_builder(&kernel.function);
        launch.arg(&tasks).arg(&plan.task_count).arg(&plan.unit_count).arg(&status).arg(&output);
        // SAFETY: the arguments match the kernel's declaration, the configuration follows
        // `DEMANDS`, which a test compares with its module's constants, and the caller promises the
        // rest. The task's arrays bound loads and its range bounds stores, whatever the stream
        // holds.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).or_fault("launching a decode kernel")
    }

    /// Launches a decode kernel of tiles, by its number, with 1 to [`FEW_TASKS`] tasks.
    /// `staged_bytes`: most bytes of bitstream that one of their tiles takes.
    ///
    /// # Safety
    /// Same as [`decode`](Self::decode), for these tasks.
    pub(super) unsafe fn decode_few(
        &self,
        stream: &CudaStream,
        kernel: usize,
        tasks: &[TileTask],
        staged_bytes: u32,
        output: CUdeviceptr,
        status: CUdeviceptr,
    ) -> Result<()> {
        let units = tasks.iter().map(|task| u64::from(task.tiles)).sum();
        let config = self.config(self.fit(kernel, staged_bytes)?, units);
        let few_kernel = self.decode_kernel(kernel)?.few.as_ref().expect("a kernel of tiles");
        let (mut few, count) = ([TileTask::default(); FEW_TASKS], tasks.len() as u32);
        few[..tasks.len()].copy_from_slice(tasks);
        let mut launch = stream.launch_builder(few_kernel);
        launch.arg(&few).arg(&count).arg(&units).arg(&status).arg(&output);
        // SAFETY: as in `decode`; the driver has copied the arguments when the call returns.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).or_fault("launching a decode kernel")
    }

    fn config(&self, fit: Fit, units: u64) -> LaunchConfig {
        let most = u64::from(self.processors) * u64::from(fit.thread_blocks);
        config(units.min(most) as u32, fit.warps * LANES, fit.shared)
    }
}

/// A configuration: blocks, threads per block, and dynamic shared memory per block.
pub(super) fn config(blocks: u32, threads: u32, shared_mem_bytes: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes }
}

/// Kernels that were compiled together, in one context.
pub(super) struct Module<'s> {
    /// Its name, which the names of its kernels contain.
    name: &'static str,
    stream: &'s Arc<CudaStream>,
    loaded: Arc<CudaModule>,
}

impl<'s> Module<'s> {
    /// Loads the machine code, which is for compute capability 9.0 and needs no compiling, if it
    /// fits this GPU; otherwise the PTX, which the driver compiles.
    pub(super) fn load(
        stream: &'s Arc<CudaStream>,
        name: &'static str,
        ptx: &'static str,
        sm_90: &[u8],
    ) -> Result<Self> {
        let context = stream.context();
        let capability = context.compute_capability().or_fault("asking for a GPU's properties")?;
        let binary = (capability == (9, 0)).then(|| Ptx::from_binary(sm_90.to_vec()));
        let loaded = match binary.and_then(|binary| context.load_module(binary).ok()) {
            Some(loaded) => loaded,
            None => context.load_module(Ptx::from_src(ptx)).or_fault("loading the kernels")?,
        };
        Ok(Self { name, stream, loaded })
    }

    pub(super) fn function(&self, name: &str) -> Result<CudaFunction> {
        let name = format!("df11_{}_{name}", self.name);
        self.loaded.load_function(&name).or_fault(&name)
    }

    /// The constants with which it was compiled; `T` has the same fields.
    pub(super) fn constants<T: FromBytes>(&self) -> Result<T> {
        let name = format!("df11_{}_constants", self.name);
        let symbol = self.loaded.get_global(&name, self.stream).or_fault(&name)?;
        let copied = self.stream.clone_dtoh(&symbol);
        let bytes: Vec<u8> =
            self.stream.synchronize().and(copied).or_fault("copying from the GPU")?;
        T::read_from_bytes(&bytes).map_err(|_| {
            mismatch(&format_args!("{} bytes of constants", bytes.len()), &size_of::<T>())
        })
    }
}

impl Decode {
    /// Lets a kernel use as much shared memory as a thread block may. `names`: its own, and that of
    /// the kernel that builds its tables; `few`: that of the kernel with tasks by value; `demand`
    /// is one of [`DEMANDS`].
    fn prepare(
        module: &Module<'_>,
        names: [&str; 2],
        few: Option<&str>,
        demand: [u32; 3],
        room: u32,
    ) -> Result<Self> {
        let (function, tables) = (module.function(names[0])?, module.function(names[1])?);
        let few = few.map(|name| module.function(name)).transpose()?;
        let action = "preparing a decode kernel";
        let thread_block = function.shared_size_bytes().or_fault(action)?.unsigned_abs();
        let [warp, max_warps, good_warps] = demand;
        for kernel in std::iter::once(&function).chain(&few) {
            allow_shared(kernel, room.saturating_sub(thread_block), action)?;
        }
        let demand = Demand { thread_block, warp, max_warps, good_warps };
        Ok(Self { function, few, tables, demand })
    }
}

/// Lets blocks of a kernel use this much dynamic shared memory, and a multiprocessor all that it
/// can.
pub(super) fn allow_shared(function: &CudaFunction, bytes: u32, action: &str) -> Result<()> {
    let set = |attribute, value| function.set_attribute(attribute, value).or_fault(action);
    set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes.cast_signed())?;
    set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
}

pub(super) fn agree<T: Debug + PartialEq>(theirs: &T, ours: &T) -> Result<()> {
    if theirs == ours { Ok(()) } else { Err(mismatch(theirs, ours)) }
}

fn mismatch(theirs: &impl Debug, ours: &impl Debug) -> Error {
    let problem = format!("the kernels were made for {theirs:?}, this crate for {ours:?}");
    gpu(problem, "build df11 again with the kernels of its own version")
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fmt::Debug, fs};

    use serde_json::Value;
    use zerocopy::{FromBytes, IntoBytes as _};

    use super::{CHOOSE_WARPS, ChooseTask, DEMANDS, GAP_BYTES_PER_THREAD, TableAddresses};
    use crate::gpu::linear::task::MAX_EXPERTS;
    use crate::gpu::task::{DecodeTask, FEW_TASKS, FLOATS, GAP_TABLE_BYTES, TILE_TABLE_BYTES};

    /// Values compiled into the kernels of `gap`: `Constants` of `kernels/gap.cu`.
    #[derive(Debug, FromBytes)]
    #[repr(C)]
    struct GapConstants {
        bytes: Bytes,
        warp: [u32; GAP_BYTES_PER_THREAD.len()],
        max_warps: [u32; GAP_BYTES_PER_THREAD.len()],
    }

    /// Values compiled into the kernels of `tile`: `Constants` of `kernels/tile.cu`.
    #[derive(Debug, FromBytes)]
    #[repr(C)]
    struct TileConstants {
        bytes: Bytes,
        few_tasks: u32,
        warp: u32,
        max_warps: u32,
        good_warps: u32,
    }

    /// Values compiled into the kernels of other floats: `Constants` of `kernels/float.cu`.
    #[derive(Debug, FromBytes)]
    #[repr(C)]
    struct FloatConstants {
        bytes: Bytes,
        few_tasks: u32,
        warp: u32,
        good_warps: u32,
        max_warps: [u32; FLOATS.len()],
        splits: [[u32; 3]; FLOATS.len()],
        choose_task: u32,
        choose_warps: u32,
        max_experts: u32,
    }

    /// Bytes of an encoding's structures that both sides have.
    #[derive(Debug, FromBytes, PartialEq)]
    #[repr(C)]
    struct Bytes {
        task: u32,
        table: u32,
        table_task: u32,
    }

    impl Bytes {
        const fn of(table_bytes: u64) -> Self {
            Self {
                task: size_of::<DecodeTask>() as u32,
                table: table_bytes as u32,
                table_task: size_of::<TableAddresses>() as u32,
            }
        }
    }

    /// The constants with which a module was compiled, from the manifest. Its source names the
    /// fields as `T` does, in this order.
    pub(in crate::gpu) fn constants<T: FromBytes + Debug>(module: &str, target: &str) -> T {
        let manifest = include_str!("../../kernels/ptx/manifest.json");
        let manifest: Value = serde_json::from_str(manifest).unwrap();
        let words = manifest["modules"][format!("{module}.ptx")][target].as_array().unwrap();
        let words: Vec<u32> = words.iter().map(|word| word.as_u64().unwrap() as u32).collect();
        let constants = T::read_from_bytes(words.as_bytes()).unwrap();
        let root = env!("CARGO_MANIFEST_DIR");
        let source = fs::read_to_string(format!("{root}/kernels/{module}.cu")).unwrap();
        let (_, fields) = source.split_once("\nstruct Constants {").unwrap();
        let (fields, _) = fields.split_once("\n};").unwrap();
        let names = fields.lines().filter_map(|line| line.trim_start().strip_prefix("u32 "));
        let names = names.map(|line| line.split([' ', '[']).next().unwrap());
        let ours = format!("{constants:#?}");
        let ours = ours.lines().filter_map(|line| line.trim_start().split_once(": "));
        let ours = ours.filter(|(_, value)| !value.ends_with('{')).map(|(name, _)| name);
        assert_eq!(names.collect::<Vec<_>>(), ours.collect::<Vec<_>>(), "kernels/{module}.cu");
        constants
    }

    #[test]
    fn the_kernels_are_those_of_this_crate() {
        let gap: GapConstants = constants("gap", "constants");
        assert_eq!(gap.bytes, Bytes::of(GAP_TABLE_BYTES));
        let tile: TileConstants = constants("tile", "constants");
        assert_eq!(tile.bytes, Bytes::of(TILE_TABLE_BYTES));
        assert_eq!(tile.few_tasks as usize, FEW_TASKS);
        let float: FloatConstants = constants("float", "constants");
        assert_eq!(float.bytes, Bytes::of(TILE_TABLE_BYTES));
        assert_eq!(float.few_tasks as usize, FEW_TASKS);
        let choose = [float.choose_task, float.choose_warps, float.max_experts].map(|n| n as usize);
        assert_eq!(choose, [size_of::<ChooseTask>(), CHOOSE_WARPS as usize, MAX_EXPERTS]);
        let splits = FLOATS
            .map(|(split, _)| [split.bytes() as u32, split.exponent_bits(), split.kept_bits()]);
        assert_eq!(float.splits, splits);
        let floats = float.max_warps.map(|most| [float.warp, most, float.good_warps]);
        let gap = gap.warp.into_iter().zip(gap.max_warps).map(|(warp, most)| [warp, most, most]);
        let tile = [tile.warp, tile.max_warps, tile.good_warps];
        assert_eq!(gap.chain([tile]).chain(floats).collect::<Vec<_>>(), DEMANDS);
    }
}
