//! The kernels: PTX that is part of this crate, loaded into a context and compared with what the host knows of it.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::Arc;

use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg,
        sys::{CUdevice_attribute as DeviceAttribute, CUdeviceptr, CUfunction_attribute as Attribute},
    },
    nvrtc::Ptx,
};

use super::{
    fault::{OrFault, gpu},
    fit::{Demand, Fit, LANES},
    memory::Buffer,
    task::{GapTableTask, GapTask, TABLE_BYTES},
};
use crate::{Error, Result, constants::GAP_BYTES_PER_THREAD};

const GAP_PTX: &str = include_str!("../../kernels/ptx/gap.ptx");
/// The same as machine code for compute capability 9.0, which needs no compiling when it is loaded.
const GAP_SM_90: &[u8] = include_bytes!("../../kernels/ptx/gap.sm_90.cubin");
/// The numbers that `df11_gap_constants` writes.
const CONSTANTS: usize = 12;
const TABLE_THREADS: u32 = 256;

/// All kernels in one context.
#[derive(Debug)]
pub(super) struct Kernels {
    tables: CudaFunction,
    /// For each of [`GAP_BYTES_PER_THREAD`].
    decode: [Decode; GAP_BYTES_PER_THREAD.len()],
    /// Multiprocessors of this GPU.
    processors: u32,
    /// Shared memory that a block may have.
    room: u32,
}

/// The decode kernel of one number of bytes a thread.
#[derive(Debug)]
struct Decode {
    function: CudaFunction,
    demand: Demand,
    /// None where not even one warp fits this GPU.
    fit: Option<Fit>,
}

/// A launch of a decode kernel, but for output, status and stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    /// Which of [`GAP_BYTES_PER_THREAD`].
    pub(super) kernel: usize,
    /// The index of its first task.
    pub(super) first_task: u64,
    pub(super) task_count: u32,
    /// The sum of the tasks' thread blocks.
    pub(super) unit_count: u64,
}

impl Kernels {
    /// Loads them, and has blocks fit `most_shared` bytes of shared memory even where the GPU has more.
    pub(super) fn load(stream: &Arc<CudaStream>, most_shared: u32) -> Result<Self> {
        let context = stream.context();
        let module = load_module(context)?;
        let function = |name: &str| module.load_function(name).or_fault(name);
        let constants = read_constants(stream, &function("df11_gap_constants")?)?;
        let attribute = |attribute| context.attribute(attribute).or_fault("asking for a GPU's properties");
        let processors = attribute(DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let room = attribute(DeviceAttribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let room = room.unsigned_abs().min(most_shared);
        let mut decode = Vec::with_capacity(GAP_BYTES_PER_THREAD.len());
        for (index, bytes) in GAP_BYTES_PER_THREAD.into_iter().enumerate() {
            let [warp, most_warps] = [4, 8].map(|group| constants[group + index]);
            decode.push(Decode::prepare(
                function(&format!("df11_gap_decode_{bytes}"))?,
                warp,
                most_warps,
                room,
            )?);
        }
        let decode = decode.try_into().expect("one for each number of bytes");
        Ok(Self { tables: function("df11_gap_tables")?, decode, processors, room })
    }

    /// That the decode kernel runs on this GPU.
    pub(super) fn check(&self, kernel: usize) -> Result<()> {
        self.fit(kernel).map(drop)
    }

    fn fit(&self, kernel: usize) -> Result<Fit> {
        let Decode { fit, demand, .. } = &self.decode[kernel];
        fit.ok_or_else(|| {
            let (needed, room) = (demand.with(1), self.room);
            gpu(
                format!("a kernel needs {needed} bytes of shared memory a block and this GPU has {room}"),
                "compress with fewer bytes a thread, decode on the CPU, or take another GPU",
            )
        })
    }

    /// Builds decode tables, and waits.
    pub(super) fn build_tables(&self, stream: &CudaStream, tasks: &Buffer) -> Result<()> {
        let count = tasks.bytes() / size_of::<GapTableTask>() as u64;
        if count == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (count as u32, 1, 1),
            block_dim: (TABLE_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let pointer = tasks.pointer();
        let mut launch = stream.launch_builder(&self.tables);
        launch.arg(&pointer);
        // SAFETY: one block a task; each task names 256 code lengths (a codebook's length is checked) and room for a table, both in
        // allocations that outlive the synchronisation below. The kernel accepts any lengths.
        let launched = unsafe { launch.launch(config) };
        launched.or_fault("launching df11_gap_tables")?;
        stream.synchronize().or_fault("building decode tables")
    }

    /// Launches a decode kernel.
    ///
    /// # Safety
    /// Until the kernel is done: the launch's tasks among those at `tasks` are as `kernels/gap_task.cuh` asks (section arrays of the sizes that the layout gives, in
    /// memory of this context), `output` added to each task's output has room for its range and is a multiple of 16, `status` is a
    /// word of device memory.
    pub(super) unsafe fn decode(
        &self,
        stream: &CudaStream,
        plan: &Launch,
        tasks: CUdeviceptr,
        output: CUdeviceptr,
        status: CUdeviceptr,
    ) -> Result<()> {
        let (kernel, fit) = (&self.decode[plan.kernel], self.fit(plan.kernel)?);
        let blocks = u64::from(self.processors) * u64::from(fit.blocks);
        let config = LaunchConfig {
            grid_dim: (plan.unit_count.min(blocks) as u32, 1, 1),
            block_dim: (fit.warps * LANES, 1, 1),
            shared_mem_bytes: fit.warps * kernel.demand.warp,
        };
        let tasks = tasks + plan.first_task * size_of::<GapTask>() as u64;
        let mut launch = stream.launch_builder(&kernel.function);
        launch.arg(&tasks).arg(&plan.task_count).arg(&plan.unit_count).arg(&status).arg(&output);
        // SAFETY: the arguments are those of the kernel's declaration, the configuration follows what it said in `df11_gap_constants`,
        // and the caller promises the rest. Loads are bounded by the task's arrays and stores by its range, whatever the stream holds.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).or_fault("launching a decode kernel")
    }
}

/// The machine code where there is some for this GPU, else what the driver makes of the PTX.
fn load_module(context: &Arc<CudaContext>) -> Result<Arc<CudaModule>> {
    let capability = context.compute_capability().or_fault("asking for a GPU's properties")?;
    if capability == (9, 0)
        && let Ok(module) = context.load_module(Ptx::from_binary(GAP_SM_90.to_vec()))
    {
        return Ok(module);
    }
    context.load_module(Ptx::from_src(GAP_PTX)).or_fault("loading the kernels")
}

impl Decode {
    /// Lets the kernel have its shared memory, and asks the driver how it fits.
    fn prepare(function: CudaFunction, warp: u32, most_warps: u32, room: u32) -> Result<Self> {
        let action = "preparing a decode kernel";
        let block = function.shared_size_bytes().or_fault(action)?.unsigned_abs();
        let demand = Demand { block, warp, most_warps };
        let most = room.saturating_sub(block).min(most_warps * warp).cast_signed();
        let set = |attribute, value| function.set_attribute(attribute, value).or_fault(action);
        set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)?;
        set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        let fit = demand.fill(room, |warps| {
            let (threads, bytes) = (warps * LANES, (warps * warp) as usize);
            function.occupancy_max_active_blocks_per_multiprocessor(threads, bytes, None).or_fault(action)
        })?;
        Ok(Self { function, demand, fit })
    }
}

/// What the kernels were compiled with; the sizes of what both sides know must be equal.
fn read_constants(stream: &Arc<CudaStream>, function: &CudaFunction) -> Result<[u32; CONSTANTS]> {
    let mut constants = [0; CONSTANTS];
    let buffer = Buffer::of(stream, &constants)?;
    let pointer = buffer.pointer();
    let mut launch = stream.launch_builder(function);
    launch.arg(&pointer);
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel writes 12 words, for which there is room; the buffer outlives the copy below, which waits.
    let launched = unsafe { launch.launch(one) };
    launched.or_fault("launching df11_gap_constants")?;
    buffer.read(stream, &mut constants)?;
    let sizes = [size_of::<GapTask>() as u64, TABLE_BYTES, size_of::<GapTableTask>() as u64];
    let equal = constants.iter().zip(sizes).all(|(&theirs, ours)| u64::from(theirs) == ours);
    if equal { Ok(constants) } else { Err(mismatch(&constants)) }
}

fn mismatch(constants: &[u32]) -> Error {
    let problem =
        format!("the kernels' structures have {:?} bytes, not those of this crate", &constants[..3]);
    gpu(problem, "build df11 again with the kernels of its own version")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{CONSTANTS, GapTableTask, GapTask, TABLE_BYTES};

    #[test]
    fn the_kernels_structures_are_those_of_this_crate() {
        let manifest: Value = serde_json::from_str(include_str!("../../kernels/ptx/manifest.json")).unwrap();
        let constants = manifest["modules"]["gap.ptx"]["constants"].as_array().unwrap();
        assert_eq!(constants.len(), CONSTANTS);
        let sizes = [size_of::<GapTask>() as u64, TABLE_BYTES, size_of::<GapTableTask>() as u64];
        assert!(constants.iter().zip(sizes).all(|(theirs, ours)| theirs.as_u64() == Some(ours)));
    }
}
