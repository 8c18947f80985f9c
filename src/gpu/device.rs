//! The GPUs of the machine: looked for without a panic, whatever is missing.

use std::{
    panic::catch_unwind,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{
    CudaContext, CudaStream, result,
    sys::{self, CUdevice_attribute as Attribute},
};

use super::{
    fault::{OrFault, gpu},
    memory::Buffer,
    module::Kernels,
    pinned::Pinned,
};
use crate::{Error, Result};

/// The driver's version from which on the kernels load, as the driver numbers it: CUDA 12.0.
const MIN_DRIVER: i32 = 12000;
/// The compute capability that the kernels are compiled for.
const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// What the driver says of a GPU before it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The number by which [`Device::open`] opens it.
    pub ordinal: usize,
    /// The product's name.
    pub name: String,
    /// All its memory, in bytes.
    pub total_memory: u64,
    /// Major and minor compute capability; the kernels need 8.0.
    pub compute_capability: (i32, i32),
    /// The version of CUDA that the driver knows, major and minor.
    pub driver: (i32, i32),
}

/// All GPUs that the driver shows, in its order. Starts nothing on them; some milliseconds the first time.
///
/// # Errors
/// [`Error::Gpu`] where there is no driver, it is older than CUDA 12.0, or it shows no GPU.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let driver = driver()?;
    let count = CudaContext::device_count().or_fault("counting the GPUs")?;
    if count == 0 {
        return Err(gpu("the driver shows no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES"));
    }
    (0..count).map(|ordinal| info(ordinal, driver)).collect()
}

fn info(ordinal: i32, driver: i32) -> Result<DeviceInfo> {
    let action = "asking for a GPU's properties";
    let device = result::device::get(ordinal).or_fault(action)?;
    let attribute = |attribute| {
        // SAFETY: the driver gave the handle out, and handles of devices stay valid.
        #[expect(unsafe_code, reason = "a call of the driver")]
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.or_fault(action)
    };
    // SAFETY: as above.
    #[expect(unsafe_code, reason = "a call of the driver")]
    let memory = unsafe { result::device::total_mem(device) };
    Ok(DeviceInfo {
        ordinal: ordinal.unsigned_abs() as usize,
        name: result::device::get_name(device).or_fault(action)?,
        total_memory: memory.or_fault(action)? as u64,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver: (driver / 1000, driver % 1000 / 10),
    })
}

/// Loads and starts the driver; its version.
fn driver() -> Result<i32> {
    // SAFETY: loading the driver's library runs its constructors, which NVIDIA ships for that.
    #[expect(unsafe_code, reason = "loading a library")]
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Err(gpu(
            "no NVIDIA driver on this machine",
            "install one (R525 or newer), or decode on the CPU",
        ));
    }
    // Looking up a function that a library lacks panics: a driver from before such a function, or a stub.
    catch_unwind(start).unwrap_or_else(|_| {
        Err(gpu("the NVIDIA driver lacks functions of CUDA 12", "install a driver of R525 or newer"))
    })
}

fn start() -> Result<i32> {
    result::init().or_fault("starting the NVIDIA driver")?;
    let mut version = 0;
    // SAFETY: the driver writes one int, for which there is room.
    #[expect(unsafe_code, reason = "a call of the driver")]
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    answer.result().or_fault("asking for the driver's version")?;
    if version < MIN_DRIVER {
        let problem = format!("the NVIDIA driver knows CUDA {}.{}", version / 1000, version % 1000 / 10);
        return Err(gpu(problem, "install one of CUDA 12.0 (R525) or newer"));
    }
    Ok(version)
}

/// A GPU in use: its primary context (the one that PyTorch uses too), the kernels, and pinned memory for loading.
///
/// Cheap to clone; clones are the same device. `Send` and `Sync`. Pinned memory that a load used is kept for the next load until the
/// last clone is dropped.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    info: DeviceInfo,
    kernels: Kernels,
    /// Of loads: two, so that one copy starts while another one ends.
    streams: [Arc<CudaStream>; 2],
    staging: Mutex<Vec<Pinned>>,
    context: Arc<CudaContext>,
}

impl Device {
    /// Opens a GPU by its number and loads the kernels, which the driver compiles for it the first time (about a second; it keeps
    /// the result on disk), but for compute capability 9.0, for which machine code is at hand.
    ///
    /// # Errors
    /// As [`devices`]; [`Error::Parameter`] where there is no such GPU; [`Error::Gpu`] where it is older than compute capability 8.0
    /// (Ampere), or does not start.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::open_with_shared_memory(ordinal, u32::MAX)
    }

    /// Opens a GPU as if its blocks had no more shared memory than this many bytes, so that tests decode as small GPUs do.
    ///
    /// # Errors
    /// As [`Device::open`].
    #[doc(hidden)]
    pub fn open_with_shared_memory(ordinal: usize, bytes: u32) -> Result<Self> {
        let mut all = devices()?;
        if ordinal >= all.len() {
            let problem = format!("there is no GPU {ordinal}");
            return Err(Error::parameter(problem, format!("their numbers are 0..{}", all.len())));
        }
        let info = all.swap_remove(ordinal);
        if info.compute_capability < MIN_CAPABILITY {
            let (major, minor) = info.compute_capability;
            let problem = format!("{} has compute capability {major}.{minor}", info.name);
            return Err(gpu(problem, "decode on the CPU, or on a GPU of 8.0 (Ampere) or newer"));
        }
        let context = CudaContext::new(ordinal).or_fault("starting the GPU")?;
        let stream = || context.new_stream().or_fault("making a stream");
        let streams = [stream()?, stream()?];
        let kernels = Kernels::load(&context, bytes)?;
        Ok(Self { inner: Arc::new(Inner { info, kernels, streams, staging: Mutex::default(), context }) })
    }

    /// What the driver says of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Memory that is free now, in bytes.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver does not answer.
    pub fn free_memory(&self) -> Result<u64> {
        let (free, _) = self.inner.context.mem_get_info().or_fault("asking for free memory")?;
        Ok(free as u64)
    }

    /// The primary context, for streams and buffers. A stream of another library comes in through its `wrap_borrowed_stream`.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.inner.kernels
    }

    pub(super) fn streams(&self) -> &[Arc<CudaStream>; 2] {
        &self.inner.streams
    }

    /// The pinned buffers that are kept between loads.
    pub(super) fn staging(&self) -> MutexGuard<'_, Vec<Pinned>> {
        self.inner.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Device memory of this many bytes, of any content.
    pub(super) fn allocate(&self, bytes: u64, what: &str) -> Result<Buffer> {
        let free = self.free_memory()?;
        if bytes > free {
            let problem = format!("{what} needs {bytes} bytes, and {} has {free} free", self.info().name);
            return Err(gpu(problem, "free memory on the GPU, or take a smaller model or another GPU"));
        }
        Buffer::new(&self.inner.context, bytes)
    }
}
