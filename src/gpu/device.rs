//! Finds and opens the machine's GPUs, without a panic whatever is missing. Measures the maximum
//! rates of GPU and bus, for comparison with decoding and loading.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::fault::{ANOTHER_GPU, OrFault, gpu, refuse};
use super::memory::Buffer;
use super::pinned::{Pinned, PinnedRange};
use super::{driver, linear::kernels::LinearKernels, module::Kernels};
use crate::{Result, parallel};

/// Bytes of pinned memory from which an upload is measured.
const PINNED_BYTES: u64 = 256 << 20;
/// The compute capability that the kernels are compiled for.
const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// Properties that the driver reports of a GPU before it is used.
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
    /// The version of CUDA that the driver supports, major and minor.
    pub driver: (i32, i32),
}

/// All GPUs that the driver reports, in its order. Starts nothing on them.
///
/// # Errors
/// [`Error::Gpu`](crate::Error::Gpu) without a driver of CUDA 12.0 that starts and shows a GPU.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let version = driver::start()?;
    let count = result::device::get_count().or_fault("counting the GPUs")?;
    if count == 0 {
        return Err(driver::no_gpu());
    }
    (0..count).map(|ordinal| info(ordinal, driver::major_minor(version))).collect()
}

fn info(ordinal: i32, driver: (i32, i32)) -> Result<DeviceInfo> {
    let action = "asking for a GPU's properties";
    let device = result::device::get(ordinal).or_fault(action)?;
    let attribute = |attribute| {
        // SAFETY: the driver gave the handle out, and handles of devices stay valid.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.or_fault(action)
    };
    // SAFETY: as above.
    let memory = unsafe { result::device::total_mem(device) };
    Ok(DeviceInfo {
        ordinal: ordinal.unsigned_abs() as usize,
        name: result::device::get_name(device).or_fault(action)?,
        total_memory: memory.or_fault(action)? as u64,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver,
    })
}

/// A GPU in use: its primary context (the one that PyTorch uses too), kernels and pinned memory.
///
/// Cheap to clone; clones are the same device. `Send` and `Sync`. Pinned memory that a load used is
/// kept for the next load until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<DeviceInner>,
}

#[derive(Debug)]
struct DeviceInner {
    info: DeviceInfo,
    kernels: Kernels,
    /// Kernels that multiply, loaded at their first use.
    linear: OnceLock<LinearKernels>,
    /// The stream of loads. A second one makes them slower, because the copies of both compete.
    copies: Arc<CudaStream>,
    spare_buffers: Mutex<Vec<Pinned>>,
}

impl Device {
    /// Opens a GPU by its number and loads the kernels. For compute capability 9.0 the crate has
    /// machine code; for others the driver compiles the kernels the first time (about a second; it
    /// keeps the result on disk).
    ///
    /// # Errors
    /// Same as [`devices`]; [`Error::Parameter`](crate::Error::Parameter) if there is no such GPU;
    /// [`Error::Gpu`](crate::Error::Gpu) below compute capability 8.0, or if it does not start.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::open_with_shared_memory(ordinal, u32::MAX)
    }

    /// Opens the first GPU on which the kernels run.
    ///
    /// # Errors
    /// If the kernels run on none of them, the error of [`Device::open`] for the first one.
    pub fn first() -> Result<Self> {
        let mut refused = None;
        for info in devices()? {
            match Self::open(info.ordinal) {
                Ok(device) => return Ok(device),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        // The driver shows one or more GPUs, or says why it does not.
        Err(refused.unwrap_or_else(driver::no_gpu))
    }

    /// Opens a GPU as if its blocks had at most this many bytes of shared memory, like small GPUs;
    /// for tests.
    ///
    /// # Errors
    /// Same as [`Device::open`].
    #[doc(hidden)]
    pub fn open_with_shared_memory(ordinal: usize, bytes: u32) -> Result<Self> {
        let mut all = devices()?;
        if ordinal >= all.len() {
            let problem = format!("there is no GPU {ordinal}");
            return refuse(problem, format!("their numbers are 0..{}", all.len()));
        }
        let info = all.swap_remove(ordinal);
        if info.compute_capability < MIN_CAPABILITY {
            let (major, minor) = info.compute_capability;
            let problem = format!("{} has compute capability {major}.{minor}", info.name);
            return Err(gpu(problem, ANOTHER_GPU));
        }
        let context = CudaContext::new(ordinal).or_fault("starting the GPU")?;
        let copies = context.new_stream().or_fault("making a stream")?;
        let kernels = Kernels::load(&copies, bytes)?;
        let (linear, spare_buffers) = (OnceLock::new(), Mutex::default());
        Ok(Self { inner: Arc::new(DeviceInner { info, kernels, linear, copies, spare_buffers }) })
    }

    /// Properties that the driver reports of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Free memory, in bytes.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver does not answer.
    pub fn free_memory(&self) -> Result<u64> {
        let (free, _) = self.context().mem_get_info().or_fault("asking for free memory")?;
        Ok(free as u64)
    }

    /// The primary context, for streams and buffers. Its `wrap_borrowed_stream` takes a stream of
    /// another library.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.inner.copies.context()
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.inner.kernels
    }

    /// Loads the kernels that multiply at the first call.
    pub(super) fn linear_kernels(&self) -> Result<&LinearKernels> {
        if let Some(kernels) = self.inner.linear.get() {
            return Ok(kernels);
        }
        // If two threads load them at once, one drops its own.
        let DeviceInner { copies, kernels, info, .. } = &*self.inner;
        let kernels = LinearKernels::load(copies, kernels, info.driver)?;
        Ok(self.inner.linear.get_or_init(|| kernels))
    }

    pub(super) fn new_stream(&self) -> Result<Arc<CudaStream>> {
        self.context().new_stream().or_fault("making a stream")
    }

    /// Makes an event in which nothing is recorded yet; it does not note the time.
    pub(super) fn new_event(&self) -> Result<CudaEvent> {
        self.context().new_event(None).or_fault("making an event")
    }

    pub(super) fn copies(&self) -> &CudaStream {
        &self.inner.copies
    }

    /// Whether both are clones of one device.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The pinned buffers that are kept between loads.
    pub(super) fn spare_buffers(&self) -> MutexGuard<'_, Vec<Pinned>> {
        parallel::lock(&self.inner.spare_buffers)
    }

    /// Allocates this many bytes of device memory, with any content.
    pub(super) fn allocate(&self, bytes: u64, what: &str) -> Result<Buffer> {
        Buffer::new(self.context(), bytes).map_err(|error| {
            // The free memory tells why the driver refuses; asking for it takes a while.
            let Some(free) = self.free_memory().ok().filter(|&free| bytes > free) else {
                return error;
            };
            let problem =
                format!("{what} needs {bytes} bytes, and {} has {free} free", self.info().name);
            gpu(problem, "free memory on the GPU, or keep blocks on the host (Plan::fit)")
        })
    }

    /// Pins host memory, so that kernels of all GPUs can read it over the bus. They must not write
    /// to it.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses: the memory shares a page with
    /// pinned memory, or is not ordinary memory.
    ///
    /// # Safety
    /// The memory must live until the result is dropped and all work that reads it is done.
    pub unsafe fn pin(&self, address: *mut c_void, bytes: usize) -> Result<PinnedRange> {
        // SAFETY: the caller's promise.
        unsafe { PinnedRange::new(self.context(), address, bytes, true) }
    }

    /// Measures how many seconds a copy of this many bytes takes within device memory; it reads and
    /// writes each byte once. Allocates twice as much; choose more than the cache holds.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the memory does not suffice or the GPU fails.
    pub fn measure_copy(&self, bytes: u64) -> Result<f64> {
        let from = self.allocate(bytes, "measuring a copy")?;
        let to = self.allocate(bytes, "measuring a copy")?;
        let stream = self.copies();
        from.clear(stream)?;
        to.clear(stream)?;
        let start = timestamp(stream)?;
        // SAFETY: both allocations have as many bytes and live until the events are waited for.
        let copied = unsafe {
            let (to, from) = (to.pointer(), from.pointer());
            result::memcpy_dtod_async(to, from, bytes as usize, stream.cu_stream())
        };
        copied.or_fault("copying on the GPU")?;
        seconds_between(&start, &timestamp(stream)?)
    }

    /// Measures how many seconds a plain copy of this many bytes takes from pinned host memory to
    /// the device. Allocates as much on the device, and up to 256 MiB of pinned memory.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the memory does not suffice or the GPU fails.
    pub fn measure_upload(&self, bytes: u64) -> Result<f64> {
        let to = self.allocate(bytes, "measuring an upload")?;
        let from = Pinned::new(self.context(), bytes.min(PINNED_BYTES) as usize)?;
        let stream = self.copies();
        let start = timestamp(stream)?;
        for at in (0..bytes).step_by(PINNED_BYTES as usize) {
            let count = (bytes - at).min(PINNED_BYTES) as usize;
            // SAFETY: the allocation has as many bytes and lives until the events are waited for.
            unsafe { from.copy(count, to.pointer() + at, stream) }?;
        }
        seconds_between(&start, &timestamp(stream)?)
    }
}

/// Records an event that notes the time at which the stream reaches it.
///
/// # Errors
/// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
pub fn timestamp(stream: &CudaStream) -> Result<CudaEvent> {
    stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).or_fault("recording an event")
}

/// Waits for the second of two [`timestamp`]s and returns the seconds of work between them.
///
/// # Errors
/// [`Error::Gpu`](crate::Error::Gpu) if something on the GPU failed.
pub fn seconds_between(start: &CudaEvent, end: &CudaEvent) -> Result<f64> {
    Ok(f64::from(start.elapsed_ms(end).or_fault("timing")?) / 1e3)
}
