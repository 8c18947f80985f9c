//! Pinned host memory, from which copies to the GPU run at the bus's full rate.
#![expect(
    unsafe_code,
    reason = "calls of the driver, and parts of shared memory, each with its proof"
)]

use std::{ffi::c_void, sync::Arc};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, result,
    sys::{self, CUdeviceptr},
};
use memmap2::MmapMut;
use rayon::prelude::*;

use super::fault::{OrFault, gpu};
use crate::Result;

/// Alignment and size of the large pages that the system may hand out.
const LARGE_PAGE: usize = 2 << 20;
/// The smallest page of any system.
const PAGE: usize = 4096;

/// A pinned buffer. It knows the last copy from it, and waits for that before it is changed or
/// freed.
#[derive(Debug)]
pub(super) struct Pinned {
    region: Arc<Region>,
    /// Where it starts in the region. No other buffer shares its bytes.
    start: usize,
    bytes: usize,
    copied: CudaEvent,
}

/// Memory that the driver has pinned, for some buffers.
///
/// Ordinary memory that is then registered at once: 64 MiB of it took 2.5 ms on an H200's host,
/// with large pages, where `cuMemHostAlloc` took 25 ms, and buffers that were registered one by one
/// from many threads three times as long (benches/record/2026-11-20-loader-h200.md).
#[derive(Debug)]
struct Region {
    memory: MmapMut,
    /// Where the buffers start, on a large page where there is one.
    start: usize,
}

impl Region {
    fn new(context: &CudaContext, bytes: usize) -> Result<Self> {
        let action = "allocating pinned memory";
        context.bind_to_thread().or_fault(action)?;
        let slack = if bytes < LARGE_PAGE { 0 } else { LARGE_PAGE };
        let mut memory = MmapMut::map_anon(bytes + slack)
            .map_err(|error| gpu(format!("{action}: {error}"), "free memory on the host"))?;
        let start = if slack == 0 { 0 } else { memory.as_ptr().align_offset(LARGE_PAGE) };
        #[cfg(target_os = "linux")]
        memory.advise(memmap2::Advice::HugePage).ok();
        // The system hands pages out here, to many threads at once; the driver would take them one
        // after the other.
        let pages = memory[start..start + bytes].par_chunks_mut(LARGE_PAGE);
        pages.for_each(|page| page.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0));
        let place = memory[start..].as_mut_ptr().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the context is current, and the range lies in the mapping; `Drop` unregisters it
        // before it is unmapped.
        let answer = unsafe { sys::cuMemHostRegister_v2(place, bytes, flags) };
        answer.result().or_fault(action)?;
        Ok(Self { memory, start })
    }

    fn place(&self, offset: usize) -> *mut u8 {
        self.memory[self.start + offset..].as_ptr().cast_mut()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `new` registered it, and the buffers, which are gone, waited for their copies.
        let _ = unsafe { sys::cuMemHostUnregister(self.place(0).cast()) };
    }
}

impl Pinned {
    /// Allocates a buffer of zeros.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        Ok(Self::several(context, 1, bytes)?.remove(0))
    }

    /// Allocates buffers of zeros, of as many bytes each.
    pub(super) fn several(
        context: &Arc<CudaContext>,
        count: usize,
        bytes: usize,
    ) -> Result<Vec<Self>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let room = bytes.max(1).next_multiple_of(PAGE);
        let region = Arc::new(Region::new(context, count * room)?);
        let buffer = |at| {
            let copied = context.new_event(None).or_fault("making an event")?;
            Ok(Self { region: Arc::clone(&region), start: at * room, bytes, copied })
        };
        (0..count).map(buffer).collect()
    }

    /// Its bytes, once the last copy is done.
    pub(super) fn bytes(&mut self) -> Result<&mut [u8]> {
        self.copied.synchronize().or_fault("waiting for a copy")?;
        // SAFETY: the bytes lie in the region, which `self` keeps; they are no other buffer's, and
        // `self` is borrowed for as long. No copy reads them any more.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.region.place(self.start), self.bytes) })
    }

    /// Its bytes, to look at.
    pub(super) fn view(&self) -> &[u8] {
        // SAFETY: as above; copies from the buffer may read them at the same time.
        unsafe { std::slice::from_raw_parts(self.region.place(self.start), self.bytes) }
    }

    /// Starts to copy its first `count` bytes to the device.
    ///
    /// # Safety
    /// `to` has room for as many bytes of device memory until the stream is synchronised.
    pub(super) unsafe fn copy(
        &self,
        count: usize,
        to: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<()> {
        let action = "copying to the GPU";
        stream.context().bind_to_thread().or_fault(action)?;
        // SAFETY: the source stays until the event below, for which `bytes` and `drop` wait; the
        // caller promises the destination.
        let copied =
            unsafe { result::memcpy_htod_async(to, &self.view()[..count], stream.cu_stream()) };
        copied.or_fault(action)?;
        self.copied.record(stream).or_fault(action)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A context that has failed has nothing running, and reports its failure to the next
        // caller.
        self.copied.synchronize().ok();
    }
}
