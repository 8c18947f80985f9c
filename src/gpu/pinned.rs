//! Pinned host memory, from which copies to the GPU run at the bus's full rate.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, HostSlice, PinnedHostSlice, result, sys::CUdeviceptr};

use super::fault::OrFault;
use crate::Result;

/// A pinned buffer. It knows the last copy from it, and waits for that before it changes or is freed.
#[derive(Debug)]
pub(super) struct Pinned {
    bytes: PinnedHostSlice<u8>,
}

impl Pinned {
    /// Allocates; a fraction of a millisecond a MiB, so keep it.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        // No flags: write-combined memory, the other choice, is too slow for checksums.
        // SAFETY: any bytes are valid, and the system hands out cleared pages.
        let bytes = unsafe { context.alloc_pinned_with_flags(bytes, 0) };
        Ok(Self { bytes: bytes.or_fault("allocating pinned memory")? })
    }

    /// Its bytes, once the last copy from them is done.
    pub(super) fn bytes(&mut self) -> Result<&mut [u8]> {
        self.bytes.as_mut_slice().or_fault("waiting for a copy to the GPU")
    }

    /// Starts to copy its first `count` bytes to the device.
    ///
    /// # Safety
    /// `to` has room for as many bytes of device memory until the stream is synchronised.
    pub(super) unsafe fn copy(&self, count: usize, to: CUdeviceptr, stream: &CudaStream) -> Result<()> {
        // SAFETY: the slice is only read here; its record, dropped last, makes `bytes` and drop wait for the copy.
        let (bytes, record) = unsafe { self.bytes.stream_synced_slice(stream) };
        // SAFETY: the source stays until the event that `record` sets on the stream; the caller promises the destination.
        let copied = unsafe { result::memcpy_htod_async(to, &bytes[..count], stream.cu_stream()) };
        drop(record);
        copied.or_fault("copying to the GPU")
    }
}
