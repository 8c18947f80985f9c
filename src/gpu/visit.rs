//! The CUDA context of the calling thread, which is other libraries' too.

use std::ptr::null_mut;

use cudarc::driver::{result::ctx, sys::CUcontext};

/// Puts the calling thread's current context back when it is dropped: calls make that of a
/// [`Device`](super::Device) current, and PyTorch takes that for another `torch.cuda.set_device`.
/// Only if there is a driver ([`devices`](super::devices)).
#[derive(Debug)]
pub struct Visit(CUcontext);

impl Visit {
    /// Notes the current context.
    #[expect(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Self {
        Self(current())
    }
}

/// Null where there is none, and where the driver does not answer.
fn current() -> CUcontext {
    ctx::get_current().ok().flatten().unwrap_or(null_mut())
}

impl Drop for Visit {
    #[expect(unsafe_code, reason = "a call of the driver")]
    fn drop(&mut self) {
        if current() != self.0 {
            // SAFETY: it was current before, and whoever made it keeps it, or it is null, which
            // leaves the thread without one. A driver that refuses says so at the next call.
            unsafe { ctx::set_current(self.0) }.ok();
        }
    }
}
