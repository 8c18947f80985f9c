//! What the GPU and the bus can do at most, measured: the limits beside which decoding and loading
//! are judged.
#![expect(unsafe_code, reason = "copies whose content nobody reads")]

use cudarc::driver::{CudaEvent, CudaStream, result, sys::CUevent_flags};

use super::{Device, fault::OrFault, pinned::Pinned};
use crate::Result;

/// Pinned memory from which an upload is measured.
const PINNED_BYTES: u64 = 256 << 20;

/// An event that notes the time at which the stream reaches it.
///
/// # Errors
/// [`Error::Gpu`](crate::Error::Gpu) where the driver refuses.
pub fn timestamp(stream: &CudaStream) -> Result<CudaEvent> {
    stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).or_fault("recording an event")
}

/// Seconds of work between two [`timestamp`]s; waits for the second one.
///
/// # Errors
/// [`Error::Gpu`](crate::Error::Gpu) where something on the GPU failed.
pub fn seconds_between(start: &CudaEvent, end: &CudaEvent) -> Result<f64> {
    Ok(f64::from(start.elapsed_ms(end).or_fault("timing")?) / 1e3)
}

impl Device {
    /// Seconds that a copy of this many bytes takes within device memory, which reads and writes
    /// each once. Allocates twice as much; take more than the cache holds.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) where the memory does not suffice or the GPU fails.
    pub fn measure_copy(&self, bytes: u64) -> Result<f64> {
        let from = self.allocate(bytes, "measuring a copy")?;
        let to = self.allocate(bytes, "measuring a copy")?;
        let stream = self.copies();
        from.clear(stream)?;
        to.clear(stream)?;
        let start = timestamp(stream)?;
        // SAFETY: both allocations have as many bytes and live until the events are waited for.
        let copied = unsafe {
            result::memcpy_dtod_async(
                to.pointer(),
                from.pointer(),
                bytes as usize,
                stream.cu_stream(),
            )
        };
        copied.or_fault("copying on the GPU")?;
        seconds_between(&start, &timestamp(stream)?)
    }

    /// Seconds that a plain copy of this many bytes takes from pinned host memory to the device.
    /// Allocates as much there, and up to 256 MiB of pinned memory.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) where the memory does not suffice or the GPU fails.
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
