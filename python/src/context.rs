//! Streams of other libraries.
#![expect(unsafe_code, reason = "streams of other libraries")]

use std::sync::Arc;

use df11::{
    gpu::{
        Device, Status,
        cudarc::driver::{CudaStream, sys::CUstream},
    },
    hazmat::gpu::Visit,
};

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
    /// The stream is one of the device's primary context (0 is its default stream), and lives as
    /// long as the result.
    pub(crate) unsafe fn new(device: &Device, status: &'s Status, stream: usize) -> Self {
        let visit = Visit::new();
        // SAFETY: the caller's promise. Wrapping allocates some bytes and asks the driver nothing.
        let stream = unsafe { device.context().wrap_borrowed_stream(stream as CUstream) };
        Self { stream, status, _visit: visit }
    }
}
