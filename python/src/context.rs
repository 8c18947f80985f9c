//! The CUDA context of the calling thread, which is other libraries' too.
#![expect(unsafe_code, reason = "a call of the driver, and streams of other libraries")]

use std::{ptr::null_mut, sync::Arc};

use df11::gpu::{
    Device, Status,
    cudarc::driver::{
        CudaStream,
        result::ctx,
        sys::{CUcontext, CUstream},
    },
};

/// Puts the calling thread's current context back when it is dropped: the library makes its own current, and PyTorch takes that for
/// another `torch.cuda.set_device`. Only while a [`Device`](df11::gpu::Device) is open, so that there is a driver.
pub(crate) struct Visit(CUcontext);

impl Visit {
    pub(crate) fn new() -> Self {
        Self(current())
    }
}

/// Null where there is none, and where the driver does not answer.
fn current() -> CUcontext {
    ctx::get_current().ok().flatten().unwrap_or(null_mut())
}

/// A stream of the caller, for as long as a call lasts, and the status of its device.
pub(crate) struct OnStream<'s> {
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) status: &'s Status,
    _visit: Visit,
}

impl<'s> OnStream<'s> {
    /// Goes to a stream of a device.
    ///
    /// # Safety
    /// The stream is one of the device's primary context (0 is its default stream), and lives as long as the result.
    pub(crate) unsafe fn new(device: &Device, status: &'s Status, stream: usize) -> Self {
        let visit = Visit::new();
        // SAFETY: the caller's promise. Wrapping allocates some bytes and asks the driver nothing.
        let stream = unsafe { device.context().wrap_borrowed_stream(stream as CUstream) };
        Self { stream, status, _visit: visit }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if current() != self.0 {
            // SAFETY: it was current before, and whoever made it keeps it, or it is null, which leaves the thread without one. A driver that
            // refuses says so at the next call.
            unsafe { ctx::set_current(self.0) }.ok();
        }
    }
}
