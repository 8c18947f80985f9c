//! Kernels that multiply: how their thread blocks fill the GPU, and their launches.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ptr::{from_ref, null_mut};

use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDim,
};
use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::split::GROUP;
use crate::Result;
use crate::gpu::fault::OrFault;
use crate::gpu::module::{Kernels, allow_shared, config};

const PREPARING: &str = "preparing a kernel that multiplies";

/// A kernel that multiplies some number of rows.
#[derive(Debug)]
pub(super) struct Multiply {
    function: CudaFunction,
    pub(super) threads: u32,
    shared: u32,
    /// Blocks that the GPU runs at once, in groups; 0 if the kernel does not fit the GPU.
    pub(super) blocks: u32,
}

impl Multiply {
    /// Puts this many of its thread blocks on the stream; with `early` it may begin while the
    /// previous kernel ends.
    ///
    /// # Safety
    /// Same as [`run`].
    pub(super) unsafe fn run<T: DeviceRepr>(
        &self,
        early: bool,
        stream: &CudaStream,
        blocks: u32,
        argument: &T,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run_as((self.threads, 1), early, stream, blocks, argument) }
    }

    /// Runs it like [`Multiply::run`], with this many threads per block and blocks per cluster.
    ///
    /// # Safety
    /// Same as [`run`]; and the kernel takes such blocks and clusters.
    pub(super) unsafe fn run_as<T: DeviceRepr>(
        &self,
        (threads, cluster): (u32, u32),
        early: bool,
        stream: &CudaStream,
        blocks: u32,
        argument: &T,
    ) -> Result<()> {
        let config = config(blocks, threads, self.shared);
        let attributes = Attributes { early, cluster };
        // SAFETY: the caller's promise; shared memory as the kernels' constants say.
        unsafe { run_with(&self.function, attributes, stream, config, argument) }
    }

    /// Gives the kernel its shared memory, and counts the blocks that run at once.
    pub(super) fn prepare(
        function: CudaFunction,
        threads: u32,
        shared: u32,
        others: &Kernels,
    ) -> Result<Self> {
        let block = function.shared_size_bytes().or_fault(PREPARING)?.unsigned_abs() + shared;
        let mut blocks = 0;
        if block <= others.room {
            allow_shared(&function, shared, PREPARING)?;
            let each = function.occupancy_max_active_blocks_per_multiprocessor(
                threads,
                shared as usize,
                None,
            );
            blocks = each.or_fault(PREPARING)? * others.processors / GROUP as u32 * GROUP as u32;
        }
        Ok(Self { function, threads, shared, blocks })
    }
}

/// Lets each kernel use as much dynamic shared memory as a block of any of them may have; returns
/// that.
pub(super) fn allow_max_shared(functions: &[&CudaFunction], others: &Kernels) -> Result<u32> {
    let mut room = others.room;
    for function in functions {
        let block = function.shared_size_bytes().or_fault(PREPARING)?.unsigned_abs();
        room = room.min(others.room.saturating_sub(block));
    }
    functions.iter().try_for_each(|function| allow_shared(function, room, PREPARING))?;
    Ok(room)
}

/// Puts a kernel on the stream; with `early` it may begin while the previous one on the stream
/// ends: programmatic stream serialization.
///
/// # Safety
/// The argument and the configuration are the kernel's, and all that the argument points to lives
/// until it is done. If it begins early: until it waits for the previous kernel, it touches only
/// what existed before that one began.
pub(super) unsafe fn run<T: DeviceRepr>(
    function: &CudaFunction,
    early: bool,
    stream: &CudaStream,
    config: LaunchConfig,
    argument: &T,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { run_with(function, Attributes { early, cluster: 1 }, stream, config, argument) }
}

/// Attributes of a launch.
#[derive(Clone, Copy)]
struct Attributes {
    /// Whether it may begin while the previous kernel ends.
    early: bool,
    /// Blocks per cluster.
    cluster: u32,
}

impl Attributes {
    fn list(self) -> Vec<CUlaunchAttribute> {
        use CUlaunchAttributeID::{
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as EARLY,
        };
        let zero = CUlaunchAttributeValue { pad: [0; 64] };
        let (mut early, mut cluster) = (zero, zero);
        early.programmaticStreamSerializationAllowed = 1;
        cluster.clusterDim = ClusterDim { x: self.cluster, y: 1, z: 1 };
        let all = [(self.early, EARLY, early), (self.cluster > 1, CLUSTER, cluster)];
        let wanted = all.into_iter().filter(|&(is_wanted, ..)| is_wanted);
        wanted.map(|(_, id, value)| CUlaunchAttribute { id, pad: [0; 4], value }).collect()
    }
}

/// Puts a kernel on the stream, with attributes.
///
/// # Safety
/// Same as [`run`].
unsafe fn run_with<T: DeviceRepr>(
    function: &CudaFunction,
    attributes: Attributes,
    stream: &CudaStream,
    config: LaunchConfig,
    argument: &T,
) -> Result<()> {
    let (action, mut attributes) = ("launching a kernel", attributes.list());
    if attributes.is_empty() {
        let mut launch = stream.launch_builder(function);
        launch.arg(argument);
        // SAFETY: the caller's promise. The driver has copied the argument when the call returns.
        let launched = unsafe { launch.launch(config) };
        return launched.map(drop).or_fault(action);
    }
    stream.context().bind_to_thread().or_fault(action)?;
    let config = sys::CUlaunchConfig {
        gridDimX: config.grid_dim.0,
        gridDimY: config.grid_dim.1,
        gridDimZ: config.grid_dim.2,
        blockDimX: config.block_dim.0,
        blockDimY: config.block_dim.1,
        blockDimZ: config.block_dim.2,
        sharedMemBytes: config.shared_mem_bytes,
        hStream: stream.cu_stream(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    };
    let mut arguments = [from_ref(argument).cast_mut().cast()];
    let (function, arguments) = (function.cu_function(), arguments.as_mut_ptr());
    // SAFETY: the caller's promise. The driver has copied the argument and read the configuration
    // when the call returns, and writes to neither.
    let launched =
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, arguments, null_mut()) };
    launched.result().or_fault(action)
}
