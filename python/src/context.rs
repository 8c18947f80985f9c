//! The CUDA context of the calling thread, which is other libraries' too.
#![expect(unsafe_code, reason = "a call of the driver")]

use std::ptr::null_mut;

use df11::gpu::cudarc::driver::{result::ctx, sys::CUcontext};

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

impl Drop for Visit {
    fn drop(&mut self) {
        if current() != self.0 {
            // SAFETY: it was current before, and whoever made it keeps it, or it is null, which leaves the thread without one. A driver that
            // refuses says so at the next call.
            unsafe { ctx::set_current(self.0) }.ok();
        }
    }
}
