//! Sections that stay on the host, pinned, for GPUs that are too small.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::{ffi::c_void, sync::Arc};

use cudarc::driver::{
    CudaContext,
    sys::{self, CUdeviceptr},
};
use rayon::prelude::*;

use super::{Device, fault::OrFault, pinned::Pinned};
use crate::{
    Result,
    constants::{CHECKSUM_CHUNK_BYTES, SECTION_ALIGNMENT},
    io::ReadAt,
    open::Shard,
};

/// A section in pinned host memory, whose checksums are right.
///
/// The container's mapping itself where the driver registers that: then nothing is copied, and the memory is the system's page cache.
/// Else a copy.
pub(super) struct HostSection {
    memory: Memory,
    context: Arc<CudaContext>,
}

enum Memory {
    Copied(Pinned),
    Mapped { place: *mut c_void, bytes: usize, _owner: Arc<dyn ReadAt> },
}

// SAFETY: the memory is only read, by any thread or GPU, and `_owner`, which keeps it, is Send and Sync itself.
unsafe impl Send for HostSection {}
// SAFETY: as above.
unsafe impl Sync for HostSection {}

impl std::fmt::Debug for HostSection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostSection").finish_non_exhaustive()
    }
}

impl HostSection {
    /// Pins a section, and checks its checksums. For all GPUs, whichever of them `device` is.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt), [`Error::Io`](crate::Error::Io), [`Error::Gpu`](crate::Error::Gpu).
    pub(super) fn new(device: &Device, shard: &Shard, section: usize) -> Result<Self> {
        let context = Arc::clone(device.context());
        if let Some((view, owner)) = shard.view_section(section)
            && let Some(memory) = register(&context, view, owner)
        {
            let section_memory = Self { memory, context };
            shard.check_section(section)?;
            return Ok(section_memory);
        }
        let length = shard.directory().sections[section].length.get();
        let mut pinned = Pinned::new(&context, length as usize)?;
        let pieces = pinned.bytes()?[..length as usize].par_chunks_mut(CHECKSUM_CHUNK_BYTES as usize);
        pieces.enumerate().try_for_each(|(chunk, out)| {
            let start = chunk as u64 * CHECKSUM_CHUNK_BYTES;
            shard.read_chunks(section, start..start + out.len() as u64, out)
        })?;
        Ok(Self { memory: Memory::Copied(pinned), context })
    }

    /// Whether it is the container's mapping, and no copy.
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.memory, Memory::Mapped { .. })
    }

    /// Its bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Copied(pinned) => pinned.view(),
            // SAFETY: `register` took place and length from a view into `_owner`. As all reads of mappings: bytes may be anything, and
            // nobody truncates the file (`open`).
            Memory::Mapped { place, bytes, .. } => unsafe {
                std::slice::from_raw_parts(place.cast::<u8>(), *bytes)
            },
        }
    }

    /// The address under which kernels of a GPU read it in place, over the bus.
    pub(super) fn device_pointer(&self, device: &Device) -> Result<CUdeviceptr> {
        let action = "mapping pinned memory";
        device.context().bind_to_thread().or_fault(action)?;
        let mut pointer = 0;
        let place = self.bytes().as_ptr().cast_mut().cast();
        // SAFETY: the memory is registered, and the driver writes one address, for which there is room.
        let answer = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut pointer, place, 0) };
        answer.result().or_fault(action)?;
        Ok(pointer)
    }
}

/// Registers mapped memory for reading; `None` where the driver does not, or another model has registered it already.
fn register(context: &CudaContext, view: &[u8], owner: Arc<dyn ReadAt>) -> Option<Memory> {
    // Memory that shares a page with something else cannot be registered twice.
    if view.is_empty() || !(view.as_ptr() as usize).is_multiple_of(SECTION_ALIGNMENT as usize) {
        return None;
    }
    context.bind_to_thread().ok()?;
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE
        | sys::CU_MEMHOSTREGISTER_DEVICEMAP
        | sys::CU_MEMHOSTREGISTER_READ_ONLY;
    let (place, bytes) = (view.as_ptr().cast_mut().cast::<c_void>(), view.len());
    // SAFETY: the range is readable memory that `owner` keeps; with this flag the GPU only reads it. `Drop` unregisters it first.
    let answer = unsafe { sys::cuMemHostRegister_v2(place, bytes, flags) };
    answer.result().ok()?;
    Some(Memory::Mapped { place, bytes, _owner: owner })
}

impl Drop for HostSection {
    fn drop(&mut self) {
        let Memory::Mapped { place, .. } = self.memory else { return };
        self.context.bind_to_thread().ok();
        // SAFETY: `register` registered it. What read it needed device memory of its model too, which is freed before this, and that
        // waits for all work.
        let _ = unsafe { sys::cuMemHostUnregister(place) };
    }
}
