//! Finds and starts the driver and checks its functions and its version, without a panic whatever
//! is missing; asks it about the calling thread and about streams.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::{env, ptr::null_mut, sync::OnceLock};

use cudarc::driver::result::{self, ctx};
use cudarc::driver::sys::{self, CUcontext, CUresult, CUstreamCaptureStatus};
use cudarc::driver::{CudaStream, DriverError};
use libloading::{Library, Symbol};

use super::fault::{NEWER_DRIVER, OrFault, gpu};
use crate::{Error, Result};

/// The oldest version of CUDA with which the kernels load, 12.0, as the driver numbers it. Bindings
/// of another major version (feature `cudarc`) may call functions that came with that version.
const MIN_VERSION: i32 = match sys::CUDA_VERSION / 1000 {
    0..=12 => 12000,
    major => major.cast_signed() * 1000,
};
/// Names of the driver's library, in the order in which cudarc tries them.
const LIBRARY_NAMES: [&str; 3] = ["libcuda.so", "libcuda.so.1", "nvcuda.dll"];
const NO_DRIVER: &str = "install one of CUDA 12.0 (R525) or newer, start containers with GPUs \
(--gpus all), or decode on the CPU";

/// Functions that this crate and its command call. The binding panics if the library lacks a
/// function, so all are looked up before the first call; `tests/stand_in.rs` runs on these.
const FUNCTIONS: &str = "
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString cuDeviceGet cuDeviceGetAttribute
    cuDeviceGetCount cuDeviceGetName cuDeviceTotalMem_v2 cuDevicePrimaryCtxRetain
    cuDevicePrimaryCtxRelease_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize cuStreamCreate
    cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent cuStreamGetCaptureInfo_v2 cuEventCreate
    cuEventDestroy_v2 cuEventElapsedTime cuEventRecord cuEventSynchronize cuModuleLoadData
    cuModuleUnload cuModuleGetFunction cuModuleGetGlobal_v2 cuFuncGetAttribute cuFuncSetAttribute
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuLaunchKernel cuLaunchKernelEx
    cuTensorMapEncodeTiled cuMemGetInfo_v2 cuMemAlloc_v2 cuMemAllocAsync cuMemFree_v2
    cuMemFreeAsync cuMemHostRegister_v2 cuMemHostUnregister cuMemHostGetDevicePointer_v2
    cuMemcpyAsync cuMemcpy2DAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2
    cuMemsetD8Async
";

/// Whether this machine has an NVIDIA driver. Nobody expects a GPU without one; if there is one and
/// [`devices`](super::devices) fails, something must be fixed. Takes some milliseconds.
pub fn has_driver() -> bool {
    library().is_some()
}

/// The driver's library. cudarc shows it only if cudarc itself loads the driver, which another
/// crate of the build may have changed (feature `cudarc`).
fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let find = || {
        LIBRARY_NAMES.iter().find_map(|name| {
            // SAFETY: loading runs the library's constructors, which NVIDIA ships for that.
            unsafe { Library::new(*name) }.ok()
        })
    };
    LIBRARY.get_or_init(find).as_ref()
}

/// Looks up a function of the driver by name, because bindings of some versions of CUDA lack it.
///
/// # Safety
/// `T` is the type of the function.
unsafe fn function<T>(name: &str) -> Result<Symbol<'static, T>> {
    // SAFETY: the caller's promise.
    let found = library().and_then(|library| unsafe { library.get::<T>(name) }.ok());
    found.ok_or_else(|| too_old(&format!("lacks the function {name}")))
}

/// Loads and starts the driver; returns its version.
pub(super) fn start() -> Result<i32> {
    if !has_driver() {
        return Err(gpu("no NVIDIA driver on this machine", NO_DRIVER));
    }
    for name in FUNCTIONS.split_whitespace() {
        // SAFETY: nothing is called or read at the address.
        unsafe { function::<*const ()>(name) }?;
    }
    let mut version = 0;
    // SAFETY: there is room for the int that the driver writes; it need not be started for this.
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    answer.result().or_fault("asking for the driver's version")?;
    if version < MIN_VERSION {
        let (major, minor) = major_minor(version);
        return Err(too_old(&format!("knows CUDA {major}.{minor}")));
    }
    match result::init() {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Err(no_gpu()),
        answer => answer.or_fault("starting the NVIDIA driver").map(|()| version),
    }
}

/// Splits the driver's number of a version into major and minor.
pub(super) fn major_minor(version: i32) -> (i32, i32) {
    (version / 1000, version % 1000 / 10)
}

fn too_old(problem: &str) -> Error {
    gpu(format!("the NVIDIA driver {problem}"), NEWER_DRIVER)
}

/// The error for a driver that works and shows no GPU.
pub(super) fn no_gpu() -> Error {
    match env::var_os("CUDA_VISIBLE_DEVICES") {
        Some(visible) => {
            let visible = visible.to_string_lossy();
            let problem = format!("the driver shows no GPU, with CUDA_VISIBLE_DEVICES={visible:?}");
            gpu(problem, "unset CUDA_VISIBLE_DEVICES, or name GPUs in it that nvidia-smi lists")
        }
        None => gpu(
            "the driver shows no GPU",
            "check that nvidia-smi lists one, and that a container was started with it (--gpus \
            all)",
        ),
    }
}

/// Restores the calling thread's current context when it is dropped. Calls make the context of a
/// [`Device`](super::Device) current, which PyTorch takes for another `torch.cuda.set_device`.
/// Needs a driver ([`devices`](super::devices)).
#[derive(Debug)]
pub struct Visit(CUcontext);

impl Visit {
    /// Notes the current context.
    #[expect(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Self {
        Self(current())
    }
}

/// The current context; null if there is none or the driver does not answer.
fn current() -> CUcontext {
    ctx::get_current().ok().flatten().unwrap_or(null_mut())
}

impl Drop for Visit {
    fn drop(&mut self) {
        if current() != self.0 {
            // SAFETY: it was current before, and its maker keeps it, or it is null, which leaves
            // the thread without one. A driver that refuses says so at the next call.
            unsafe { ctx::set_current(self.0) }.ok();
        }
    }
}

/// The number of the CUDA graph capture that records this stream's work, if there is one.
pub(super) fn capture_of(stream: &CudaStream) -> Result<Option<u64>> {
    stream.context().bind_to_thread().or_fault("asking whether a graph is captured")?;
    // SAFETY: a stream of a context that is current.
    unsafe { capture_of_raw(stream.cu_stream()) }
}

/// The number of the CUDA graph capture on a stream of any library, if there is one. Each capture
/// of the process has another number.
///
/// # Errors
/// [`Error::Gpu`] if the driver refuses.
///
/// # Safety
/// The stream exists, and its context is the calling thread's current one.
pub unsafe fn capture_of_raw(stream: sys::CUstream) -> Result<Option<u64>> {
    let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY: the function's type, as CUDA 11.3 to 12.9 declare it.
    let ask = unsafe { function::<CaptureInfo>("cuStreamGetCaptureInfo_v2") }?;
    // SAFETY: there is room for status and number; the driver skips results that are null.
    let answer =
        unsafe { ask(stream, &raw mut status, &raw mut id, null_mut(), null_mut(), null_mut()) };
    answer.result().or_fault("asking whether a graph is captured")?;
    Ok((status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE).then_some(id))
}

/// `cuStreamGetCaptureInfo_v2`, which bindings of CUDA 13 lack and its drivers have.
type CaptureInfo = unsafe extern "C" fn(
    sys::CUstream,
    *mut CUstreamCaptureStatus,
    *mut sys::cuuint64_t,
    *mut sys::CUgraph,
    *mut *const sys::CUgraphNode,
    *mut usize,
) -> sys::CUresult;
