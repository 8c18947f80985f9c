//! Pinned host memory, from which copies to the GPU run at the bus's full rate: buffers, memory
//! that others own, and whole sections.
#![expect(
    unsafe_code,
    reason = "calls of the driver, and parts of shared memory, each with its proof"
)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::{any::Any, ffi::c_void, slice, sync::Arc};

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};
use memmap2::MmapMut;
use rayon::prelude::*;

use super::fault::{OrFault, gpu};
use super::memory::Buffer;
use crate::constants::{CHECKSUM_CHUNK_BYTES, SECTION_ALIGNMENT};
use crate::{Result, open::Shard, platform};

/// Alignment and size of the large pages that the system may hand out.
const LARGE_PAGE: usize = 2 << 20;
/// The smallest page of any system.
const PAGE: usize = 4096;

/// Host memory that is pinned until this is dropped; [`Device::pin`](super::Device::pin) makes it.
#[derive(Debug)]
pub struct PinnedRange {
    address: usize,
    bytes: usize,
    context: Arc<CudaContext>,
}

impl PinnedRange {
    /// Pins memory, so that kernels of all GPUs can read it over the bus. `is_read_only`: no kernel
    /// writes to it. Mappings of files that were opened for reading can be pinned only so.
    ///
    /// # Safety
    /// The memory must live until the result is dropped and all work that uses it is done.
    pub(super) unsafe fn new(
        context: &Arc<CudaContext>,
        address: *mut c_void,
        bytes: usize,
        is_read_only: bool,
    ) -> Result<Self> {
        let action = "pinning memory of the host";
        context.bind_to_thread().or_fault(action)?;
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if is_read_only {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        // SAFETY: the context is current; the caller's promise; `Drop` unregisters it.
        let answer = unsafe { sys::cuMemHostRegister_v2(address, bytes, flags) };
        answer.result().or_fault(action)?;
        Ok(Self { address: address as usize, bytes, context: Arc::clone(context) })
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        self.context.bind_to_thread().ok();
        // SAFETY: `new` registered it, and its caller's promise says that nothing uses it any more.
        let _ = unsafe { sys::cuMemHostUnregister(self.address as *mut c_void) };
    }
}

/// A pinned buffer. It waits for the last copy from it before it is changed or freed.
#[derive(Debug)]
pub(super) struct Pinned {
    /// Address in the region; no other buffer shares its bytes.
    address: usize,
    bytes: usize,
    copied: CudaEvent,
    _region: Arc<PinnedRegion>,
}

/// Pinned memory and its owner. Fields are dropped in order, so it is unpinned before the owner
/// frees it.
#[derive(Debug)]
pub(super) struct PinnedRegion {
    pinned: PinnedRange,
    _owner: Box<dyn Any + Send + Sync>,
}

impl PinnedRegion {
    /// Allocates and pins memory for buffers, on a large page if there is one.
    ///
    /// Registers ordinary memory in one call: 64 MiB took 2.5 ms on an H200's host, with large
    /// pages; `cuMemHostAlloc` took 25 ms, and registering buffers one by one from many threads
    /// took three times as long (benches/record/2026-11-20-loader-h200.md).
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        let slack = if bytes < LARGE_PAGE { 0 } else { LARGE_PAGE };
        let memory = MmapMut::map_anon(bytes + slack);
        let problem = |error| format!("allocating pinned memory: {error}");
        let mut memory = memory.map_err(|error| gpu(problem(error), "free memory on the host"))?;
        let start = if slack == 0 { 0 } else { memory.as_ptr().align_offset(LARGE_PAGE) };
        platform::in_large_pages(&memory);
        // The system hands pages out here, to many threads at once; the driver would take them one
        // after the other.
        let pages = memory[start..start + bytes].par_chunks_mut(LARGE_PAGE);
        pages.for_each(|page| page.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0));
        let place = memory[start..].as_mut_ptr().cast();
        // SAFETY: the range lies in the mapping, which is dropped after the result; the buffers,
        // which keep both, wait for their copies.
        let pinned = unsafe { PinnedRange::new(context, place, bytes, false) }?;
        Ok(Self { pinned, _owner: Box::new(memory) })
    }
}

impl Pinned {
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        Ok(Self::several(context, 1, bytes)?.remove(0))
    }

    /// Allocates buffers of zeros, all of the same size.
    pub(super) fn several(
        context: &Arc<CudaContext>,
        count: usize,
        bytes: usize,
    ) -> Result<Vec<Self>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let room = bytes.max(1).next_multiple_of(PAGE);
        let region = Arc::new(PinnedRegion::new(context, count * room)?);
        let buffer = |at| {
            let copied = context.new_event(None).or_fault("making an event")?;
            let address = region.pinned.address + at * room;
            Ok(Self { address, bytes, copied, _region: Arc::clone(&region) })
        };
        (0..count).map(buffer).collect()
    }

    /// Its bytes, once the last copy is done.
    pub(super) fn bytes(&mut self) -> Result<&mut [u8]> {
        self.copied.synchronize().or_fault("waiting for a copy")?;
        // SAFETY: the bytes lie in the region, which `self` keeps; they are no other buffer's, and
        // `self` is borrowed for as long. No copy reads them any more.
        Ok(unsafe { slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) })
    }

    pub(super) fn view(&self) -> &[u8] {
        // SAFETY: as above; copies from the buffer may read them at the same time.
        unsafe { slice::from_raw_parts(self.address as *const u8, self.bytes) }
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
        copied.and_then(|()| self.copied.record(stream)).or_fault(action)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A context that has failed runs nothing, and reports its failure to the next caller.
        self.copied.synchronize().ok();
    }
}

/// A word in pinned memory that kernels of one GPU write over the bus, and that the host reads at
/// any time. A GPU's atomic operations on such memory are atomic among its own threads (CUDA C++
/// Programming Guide, "Mapped Memory"), and a kernel's writes are visible once it is done.
#[derive(Debug)]
pub(super) struct HostWord {
    /// Dropped first, because freeing device memory waits for all work of the context: no kernel
    /// writes to the region after it is unpinned.
    _fence: Buffer,
    region: PinnedRegion,
    pointer: CUdeviceptr,
}

impl HostWord {
    /// Makes a word that is 0.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let region = PinnedRegion::new(context, PAGE)?;
        let pointer = device_pointer(context, region.pinned.address)?;
        Ok(Self { _fence: Buffer::new(context, 1)?, region, pointer })
    }

    /// Its address for kernels.
    pub(super) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    pub(super) fn context(&self) -> &CudaContext {
        &self.region.pinned.context
    }

    /// Its value so far.
    pub(super) fn load(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Returns its value so far, and sets it to 0. Bits that a kernel sets at this moment may be
    /// lost.
    pub(super) fn take(&self) -> u32 {
        if self.load() == 0 { 0 } else { self.word().swap(0, Ordering::AcqRel) }
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the region begins with it, on a page, and lives as long as `self`. The host
        // accesses it by this alone; what a GPU writes at the same time is a whole word.
        unsafe { AtomicU32::from_ptr(self.region.pinned.address as *mut u32) }
    }
}

/// The address under which kernels of a GPU reach pinned memory.
fn device_pointer(context: &CudaContext, address: usize) -> Result<CUdeviceptr> {
    let action = "mapping pinned memory";
    context.bind_to_thread().or_fault(action)?;
    let mut pointer = 0;
    // SAFETY: the memory is registered, and there is room for the address.
    let answer =
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut pointer, address as *mut c_void, 0) };
    answer.result().or_fault(action)?;
    Ok(pointer)
}

/// A section that stays on the host because GPUs are too small: pinned and checked.
#[derive(Debug)]
pub(super) enum HostSection {
    Copied(Pinned),
    /// The container's mapping itself, if the driver registers it: then nothing is copied, and the
    /// memory is the system's page cache.
    Mapped(PinnedRegion),
}

impl HostSection {
    /// Pins a section, and checks its checksums. All GPUs can read it, whichever context this is.
    pub(super) fn new(context: &Arc<CudaContext>, shard: &Shard, section: usize) -> Result<Self> {
        // Memory that shares a page with something else cannot be pinned twice.
        let is_alone =
            |view: &[u8]| (view.as_ptr() as usize).is_multiple_of(SECTION_ALIGNMENT as usize);
        let mapped = shard.view_section(section)?;
        if let Some((view, owner)) = mapped.filter(|(view, _)| !view.is_empty() && is_alone(view)) {
            let (place, bytes) = (view.as_ptr().cast_mut().cast(), view.len());
            // SAFETY: `owner` keeps the readable range until it is unpinned. Its readers also need
            // device memory of their model, which is freed before this, and freeing it waits for
            // all work.
            let pinned = unsafe { PinnedRange::new(context, place, bytes, true) };
            // The driver may refuse, and another model may have pinned it already.
            if let Ok(pinned) = pinned {
                shard.check_section(section)?;
                return Ok(Self::Mapped(PinnedRegion { pinned, _owner: Box::new(owner) }));
            }
        }
        let length = shard.directory().sections[section].length.get() as usize;
        let mut pinned = Pinned::new(context, length)?;
        let pieces = pinned.bytes()?[..length].par_chunks_mut(CHECKSUM_CHUNK_BYTES as usize);
        pieces.enumerate().try_for_each(|(chunk, out)| {
            let start = chunk as u64 * CHECKSUM_CHUNK_BYTES;
            shard.read_chunks(section, start..start + out.len() as u64, out)
        })?;
        Ok(Self::Copied(pinned))
    }

    /// Host memory that it takes besides the container's mapping.
    pub(super) fn copied_bytes(&self) -> u64 {
        if let Self::Copied(pinned) = self { pinned.bytes as u64 } else { 0 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Copied(pinned) => pinned.view(),
            // SAFETY: `new` took it from a view into the owner. Bytes of a mapping may always be
            // anything, and nobody truncates the file (`open`).
            Self::Mapped(PinnedRegion { pinned, .. }) => unsafe {
                slice::from_raw_parts(pinned.address as *const u8, pinned.bytes)
            },
        }
    }

    /// The address under which kernels of a GPU read it in place, over the bus.
    pub(super) fn device_pointer(&self, context: &CudaContext) -> Result<CUdeviceptr> {
        device_pointer(context, self.bytes().as_ptr() as usize)
    }
}
