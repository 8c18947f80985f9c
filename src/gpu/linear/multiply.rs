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
    threads: u32,
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
        unsafe { self.run_with(self.threads, early, stream, blocks, argument) }
    }

    /// Runs it like [`Multiply::run`], with this many threads per block.
    ///
    /// # Safety
    /// Same as [`run`]; and the kernel takes that many.
    pub(super) unsafe fn run_with<T: DeviceRepr>(
        &self,
        threads: u32,
        early: bool,
        stream: &CudaStream,
        blocks: u32,
        argument: &T,
    ) -> Result<()> {
        let config = config(blocks, threads, self.shared);
        // SAFETY: the caller's promise; shared memory as the kernels' constants say.
        unsafe { run(&self.function, early, stream, config, argument) }
    }

    /// Runs it like [`Multiply::run`], in clusters of this many blocks.
    ///
    /// # Safety
    /// Same as [`run`]; and the kernel takes such clusters.
    pub(super) unsafe fn run_clusters<T: DeviceRepr>(
        &self,
        cluster: u32,
        early: bool,
        stream: &CudaStream,
        blocks: u32,
        argument: &T,
    ) -> Result<()> {
        let config = config(blocks, self.threads, self.shared);
        let mut attributes = Vec::with_capacity(2);
        attributes.extend(early.then(early_attribute));
        attributes.extend((cluster > 1).then(|| cluster_attribute(cluster)));
        // SAFETY: the caller's promise; threads and shared memory as the kernels' constants say.
        unsafe { run_as(&self.function, &mut attributes, stream, config, argument) }
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
pub(super) fn allow_most_shared(functions: &[&CudaFunction], others: &Kernels) -> Result<u32> {
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
    let action = "launching a kernel";
    if !early {
        let mut launch = stream.launch_builder(function);
        launch.arg(argument);
        // SAFETY: the caller's promise. The driver has copied the argument when the call returns.
        let launched = unsafe { launch.launch(config) };
        return launched.map(drop).or_fault(action);
    }
    // SAFETY: the caller's promise.
    unsafe { run_as(function, &mut [early_attribute()], stream, config, argument) }
}

/// The attribute of a launch that may begin while the previous kernel ends.
fn early_attribute() -> CUlaunchAttribute {
    let mut value = CUlaunchAttributeValue { pad: [0; 64] };
    value.programmaticStreamSerializationAllowed = 1;
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    CUlaunchAttribute { id, pad: [0; 4], value }
}

/// The attribute of a launch in clusters of this many blocks.
fn cluster_attribute(blocks: u32) -> CUlaunchAttribute {
    let mut value = CUlaunchAttributeValue { pad: [0; 64] };
    value.clusterDim = ClusterDim { x: blocks, y: 1, z: 1 };
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    CUlaunchAttribute { id, pad: [0; 4], value }
}

/// Puts a kernel on the stream, with attributes.
///
/// # Safety
/// Same as [`run`].
unsafe fn run_as<T: DeviceRepr>(
    function: &CudaFunction,
    attributes: &mut [CUlaunchAttribute],
    stream: &CudaStream,
    config: LaunchConfig,
    argument: &T,
) -> Result<()> {
    let action = "launching a kernel";
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
