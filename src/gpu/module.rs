//! The kernels: PTX that is part of this crate, loaded into a context and compared with what the
//! host knows of it.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use cudarc::{
    driver::{
        CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg,
        sys::{
            CUdevice_attribute as DeviceAttribute, CUdeviceptr, CUfunction_attribute as Attribute,
        },
    },
    nvrtc::Ptx,
};

use super::{
    coding::{CODINGS, KERNELS, KernelEncoding, TILE_KERNEL},
    fault::{OrFault, gpu},
    fit::{Demand, Fit, LANES},
    memory::Buffer,
    task::{FEW_TASKS, FewTasks, TableTask, Task, TileTask},
};
use crate::{Error, Result, constants::GAP_BYTES_PER_THREAD, parallel};

/// The kernels of one encoding.
struct Source {
    /// In the names of its kernels.
    name: &'static str,
    ptx: &'static str,
    /// The same as machine code for compute capability 9.0, which needs no compiling when it is
    /// loaded.
    sm_90: &'static [u8],
    /// How many numbers its kernel of constants writes.
    constants: usize,
}

const fn source(coding: KernelEncoding) -> Source {
    match coding {
        KernelEncoding::Gap => Source {
            name: "gap",
            ptx: include_str!("../../kernels/ptx/gap.ptx"),
            sm_90: include_bytes!("../../kernels/ptx/gap.sm_90.cubin"),
            constants: 12,
        },
        KernelEncoding::Tile => Source {
            name: "tile",
            ptx: include_str!("../../kernels/ptx/tile.ptx"),
            sm_90: include_bytes!("../../kernels/ptx/tile.sm_90.cubin"),
            constants: 8,
        },
    }
}

const TABLE_THREADS: u32 = 256;

/// All kernels in one context.
#[derive(Debug)]
pub(super) struct Kernels {
    /// For each of [`CODINGS`].
    tables: [CudaFunction; CODINGS.len()],
    decode: [Decode; KERNELS],
    /// That of `tile` with tasks by value: as much of everything as the other one.
    decode_few: CudaFunction,
    /// Multiprocessors of this GPU.
    processors: u32,
    /// Shared memory that a thread block may have.
    room: u32,
    /// By kernel and bytes that each warp stages: blocks of a model ask for the same ones over and
    /// over.
    shapes: Mutex<HashMap<(usize, u32), Shape>>,
}

/// A decode kernel.
#[derive(Debug)]
struct Decode {
    function: CudaFunction,
    /// Of warps that stage nothing.
    demand: Demand,
}

/// The thread blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    fit: Fit,
    /// Dynamic shared memory of one.
    shared: u32,
}

/// A launch of a decode kernel, except for output, status and stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    /// Which of the decode kernels.
    pub(super) kernel: usize,
    pub(super) shape: Shape,
    /// The index of its first task.
    pub(super) first_task: u64,
    pub(super) task_count: u32,
    /// The sum of the tasks' thread blocks or tiles.
    pub(super) unit_count: u64,
}

impl Kernels {
    /// Loads them, and has thread blocks fit `most_shared` bytes of shared memory even if the GPU
    /// has more.
    pub(super) fn load(stream: &Arc<CudaStream>, most_shared: u32) -> Result<Self> {
        let context = stream.context();
        let attribute =
            |attribute| context.attribute(attribute).or_fault("asking for a GPU's properties");
        let processors =
            attribute(DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let room =
            attribute(DeviceAttribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let room = room.unsigned_abs().min(most_shared);
        let (mut tables, mut decode) =
            (Vec::with_capacity(CODINGS.len()), Vec::with_capacity(KERNELS));
        let mut few = None;
        for coding in CODINGS {
            let source = source(coding);
            let module = load_module(context, source.ptx, source.sm_90)?;
            let function = |name: &str| {
                let name = format!("df11_{}_{name}", source.name);
                module.load_function(&name).or_fault(&name)
            };
            let constants =
                read_constants(stream, &function("constants")?, source.constants, &sizes(coding))?;
            match coding {
                KernelEncoding::Gap => {
                    for (index, bytes) in GAP_BYTES_PER_THREAD.into_iter().enumerate() {
                        let [warp, most_warps] = [4, 8].map(|group| constants[group + index]);
                        let function = function(&format!("decode_{bytes}"))?;
                        decode.push(Decode::prepare(
                            function,
                            [warp, most_warps, most_warps],
                            room,
                        )?);
                    }
                }
                KernelEncoding::Tile => {
                    let demand = [4, 5, 6].map(|at| constants[at]);
                    if constants[7] as usize != FEW_TASKS {
                        return Err(mismatch(&constants));
                    }
                    decode.push(Decode::prepare(function("decode")?, demand, room)?);
                    few = Some(Decode::prepare(function("decode_few")?, demand, room)?.function);
                }
            }
            tables.push(function("tables")?);
        }
        let tables = tables.try_into().expect("one for each encoding");
        let decode = decode.try_into().expect("as many as counted");
        let decode_few = few.expect("tiles are an encoding");
        Ok(Self { tables, decode, decode_few, processors, room, shapes: Mutex::default() })
    }

    /// Multiprocessors of this GPU.
    pub(super) fn processors(&self) -> u32 {
        self.processors
    }

    /// Shared memory that a thread block may have, in bytes.
    pub(super) fn room(&self) -> u32 {
        self.room
    }

    /// How the thread blocks of a decode kernel fill this GPU if each warp stages this many bytes.
    ///
    /// # Errors
    /// [`Error::Gpu`] if not even one warp fits.
    pub(super) fn shape(&self, kernel: usize, staged_bytes: u32) -> Result<Shape> {
        let mut shapes = parallel::lock(&self.shapes);
        if let Some(&shape) = shapes.get(&(kernel, staged_bytes)) {
            return Ok(shape);
        }
        let shape = self.find_shape(kernel, staged_bytes)?;
        shapes.insert((kernel, staged_bytes), shape);
        Ok(shape)
    }

    /// Asks the driver for each number of warps.
    fn find_shape(&self, kernel: usize, staged_bytes: u32) -> Result<Shape> {
        let Decode { function, demand } = &self.decode[kernel];
        let demand = Demand { warp: demand.warp + staged_bytes, ..*demand };
        let fit = demand.fill(self.room, |warps| {
            let (threads, bytes) = (warps * LANES, (warps * demand.warp) as usize);
            let blocks =
                function.occupancy_max_active_blocks_per_multiprocessor(threads, bytes, None);
            blocks.or_fault("asking how a kernel fits a GPU")
        })?;
        let fit = fit.ok_or_else(|| {
            let (needed, room) = (demand.with(1), self.room);
            gpu(
                format!(
                    "a kernel needs {needed} bytes of shared memory a block and this GPU has {room}"
                ),
                "compress as gap with fewer bytes a thread, decode on the CPU, or take another GPU",
            )
        })?;
        Ok(Shape { fit, shared: fit.warps * demand.warp })
    }

    /// Builds decode tables, of one task or more, and waits.
    pub(super) fn build_tables(
        &self,
        coding: KernelEncoding,
        stream: &CudaStream,
        tasks: &Buffer,
    ) -> Result<()> {
        let count = tasks.bytes() / size_of::<TableTask>() as u64;
        let config = LaunchConfig {
            grid_dim: (count as u32, 1, 1),
            block_dim: (TABLE_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let pointer = tasks.pointer();
        let mut launch = stream.launch_builder(&self.tables[coding as usize]);
        launch.arg(&pointer);
        // SAFETY: one block a task; each task names a codebook with its length (of `gap` at least
        // 256 bytes, which is checked) and room for a table of its encoding, both in allocations
        // that outlive the synchronisation below. The kernels accept any content.
        let launched = unsafe { launch.launch(config) };
        launched.or_fault("launching a kernel of decode tables")?;
        stream.synchronize().or_fault("building decode tables")
    }

    /// Launches a decode kernel.
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
        plan: &Launch,
        tasks: CUdeviceptr,
        output: CUdeviceptr,
        status: CUdeviceptr,
    ) -> Result<()> {
        let (kernel, config) =
            (&self.decode[plan.kernel], self.config(plan.shape, plan.unit_count));
        let tasks = tasks + plan.first_task * size_of::<Task>() as u64;
        let mut launch = stream.launch_builder(&kernel.function);
        launch.arg(&tasks).arg(&plan.task_count).arg(&plan.unit_count).arg(&status).arg(&output);
        // SAFETY: the arguments are those of the kernel's declaration, the configuration follows
        // what its module's constants say, and the caller promises the rest. Loads are bounded by
        // the task's arrays and stores by its range, whatever the stream holds.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).or_fault("launching a decode kernel")
    }

    /// Launches the decode kernel of tiles with one task or more, at most [`FEW_TASKS`].
    /// `staged_bytes`: what a tile of them takes of its bitstream, at most.
    ///
    /// # Safety
    /// As [`decode`](Self::decode), of these tasks.
    pub(super) unsafe fn decode_few(
        &self,
        stream: &CudaStream,
        tasks: &[TileTask],
        staged_bytes: u32,
        output: CUdeviceptr,
        status: CUdeviceptr,
    ) -> Result<()> {
        let units = tasks.iter().map(|task| u64::from(task.tiles)).sum();
        let config = self.config(self.shape(TILE_KERNEL, staged_bytes)?, units);
        let (few, count) = (FewTasks::new(tasks), tasks.len() as u32);
        let mut launch = stream.launch_builder(&self.decode_few);
        launch.arg(&few).arg(&count).arg(&units).arg(&status).arg(&output);
        // SAFETY: as in `decode`; the driver has copied the arguments when the call returns.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).or_fault("launching a decode kernel")
    }

    fn config(&self, Shape { fit, shared }: Shape, units: u64) -> LaunchConfig {
        let most = u64::from(self.processors) * u64::from(fit.thread_blocks);
        LaunchConfig {
            grid_dim: (units.min(most) as u32, 1, 1),
            block_dim: (fit.warps * LANES, 1, 1),
            shared_mem_bytes: shared,
        }
    }
}

/// The machine code if there is some for this GPU, else what the driver makes of the PTX.
pub(super) fn load_module(
    context: &Arc<CudaContext>,
    ptx: &'static str,
    sm_90: &[u8],
) -> Result<Arc<CudaModule>> {
    let capability = context.compute_capability().or_fault("asking for a GPU's properties")?;
    if capability == (9, 0)
        && let Ok(module) = context.load_module(Ptx::from_binary(sm_90.to_vec()))
    {
        return Ok(module);
    }
    context.load_module(Ptx::from_src(ptx)).or_fault("loading the kernels")
}

impl Decode {
    /// Lets the kernel have as much shared memory as a thread block may. `numbers`: bytes a warp,
    /// the most warps of a thread block, and how many are good.
    fn prepare(function: CudaFunction, numbers: [u32; 3], room: u32) -> Result<Self> {
        let action = "preparing a decode kernel";
        let thread_block = function.shared_size_bytes().or_fault(action)?.unsigned_abs();
        let [warp, most_warps, good_warps] = numbers;
        let set = |attribute, value| function.set_attribute(attribute, value).or_fault(action);
        let most = room.saturating_sub(thread_block).cast_signed();
        set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)?;
        set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        Ok(Self { function, demand: Demand { thread_block, warp, most_warps, good_warps } })
    }
}

/// What the kernels were compiled with: `count` words, of which the first must be these sizes.
pub(super) fn read_constants(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    count: usize,
    sizes: &[u64],
) -> Result<Vec<u32>> {
    let mut constants = vec![0; count];
    let buffer = Buffer::of(stream, &constants)?;
    let pointer = buffer.pointer();
    let mut launch = stream.launch_builder(function);
    launch.arg(&pointer);
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel writes as many words as its source lists, for which there is room; the
    // buffer outlives the copy below, which waits.
    let launched = unsafe { launch.launch(one) };
    launched.or_fault("launching a kernel of constants")?;
    buffer.read(stream, &mut constants)?;
    let equal = constants.iter().zip(sizes).all(|(&theirs, &ours)| u64::from(theirs) == ours);
    if equal { Ok(constants) } else { Err(mismatch(&constants[..sizes.len()])) }
}

/// The first of an encoding's constants: bytes of a task, a decode table, and a task of tables.
const fn sizes(coding: KernelEncoding) -> [u64; 3] {
    [size_of::<Task>() as u64, coding.table_bytes(), size_of::<TableTask>() as u64]
}

fn mismatch(theirs: &[u32]) -> Error {
    let problem = format!("the kernels' structures have {theirs:?} bytes, not those of this crate");
    gpu(problem, "build df11 again with the kernels of its own version")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{CODINGS, sizes, source};

    #[test]
    fn the_kernels_structures_are_those_of_this_crate() {
        let manifest: Value =
            serde_json::from_str(include_str!("../../kernels/ptx/manifest.json")).unwrap();
        for coding in CODINGS {
            let source = source(coding);
            let constants = &manifest["modules"][format!("{}.ptx", source.name)]["constants"];
            let constants = constants.as_array().unwrap();
            assert_eq!(constants.len(), source.constants);
            let sizes = sizes(coding);
            assert!(
                constants.iter().zip(sizes).all(|(theirs, ours)| theirs.as_u64() == Some(ours))
            );
        }
    }
}
