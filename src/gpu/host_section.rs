//! Sections that stay on the host, pinned, for GPUs that are too small.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use rayon::prelude::*;

use super::{Device, fault::OrFault, pinned::Pinned, pinned_range::PinnedRange};
use crate::{
    Result,
    constants::{CHECKSUM_CHUNK_BYTES, SECTION_ALIGNMENT},
    io::ReadAt,
    open::Shard,
};

/// A section in pinned host memory, whose checksums are right.
///
/// The container's mapping itself where the driver registers that: then nothing is copied, and the
/// memory is the system's page cache. Else a copy.
pub(super) struct HostSection {
    memory: Memory,
}

enum Memory {
    Copied(Pinned),
    /// Pinned no longer before the owner lets it go: fields are dropped in order.
    Mapped {
        _pinned: PinnedRange,
        place: *const u8,
        bytes: usize,
        _owner: Arc<dyn ReadAt>,
    },
}

// SAFETY: the memory is only read, by any thread or GPU, and `_owner`, which keeps it, is Send and
// Sync itself.
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
    /// [`Error::Corrupt`](crate::Error::Corrupt), [`Error::Io`](crate::Error::Io),
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub(super) fn new(device: &Device, shard: &Shard, section: usize) -> Result<Self> {
        if let Some((view, owner)) = shard.view_section(section)
            && let Some(memory) = pin(device, view, owner)
        {
            let section_memory = Self { memory };
            shard.check_section(section)?;
            return Ok(section_memory);
        }
        let length = shard.directory().sections[section].length.get();
        let mut pinned = Pinned::new(device.context(), length as usize)?;
        let pieces =
            pinned.bytes()?[..length as usize].par_chunks_mut(CHECKSUM_CHUNK_BYTES as usize);
        pieces.enumerate().try_for_each(|(chunk, out)| {
            let start = chunk as u64 * CHECKSUM_CHUNK_BYTES;
            shard.read_chunks(section, start..start + out.len() as u64, out)
        })?;
        Ok(Self { memory: Memory::Copied(pinned) })
    }

    /// Whether it is the container's mapping, and no copy.
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.memory, Memory::Mapped { .. })
    }

    /// Its bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Copied(pinned) => pinned.view(),
            // SAFETY: `pin` took place and length from a view into `_owner`. As all reads of
            // mappings: bytes may be anything, and nobody truncates the file (`open`).
            Memory::Mapped { place, bytes, .. } => unsafe {
                std::slice::from_raw_parts(*place, *bytes)
            },
        }
    }

    /// The address under which kernels of a GPU read it in place, over the bus.
    pub(super) fn device_pointer(&self, device: &Device) -> Result<CUdeviceptr> {
        let action = "mapping pinned memory";
        device.context().bind_to_thread().or_fault(action)?;
        let mut pointer = 0;
        let place = self.bytes().as_ptr().cast_mut().cast();
        // SAFETY: the memory is registered, and the driver writes one address, for which there is
        // room.
        let answer = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut pointer, place, 0) };
        answer.result().or_fault(action)?;
        Ok(pointer)
    }
}

/// Pins mapped memory; `None` if the driver does not, or another model has pinned it already.
fn pin(device: &Device, view: &[u8], owner: Arc<dyn ReadAt>) -> Option<Memory> {
    // Memory that shares a page with something else cannot be pinned twice.
    if view.is_empty() || !(view.as_ptr() as usize).is_multiple_of(SECTION_ALIGNMENT as usize) {
        return None;
    }
    let (place, bytes) = (view.as_ptr(), view.len());
    // SAFETY: the range is readable memory that `owner` keeps until it is unpinned. What reads it
    // needs device memory of its model too, which is freed before this, and that waits for all
    // work.
    let pinned = unsafe { device.pin(place.cast_mut().cast(), bytes) }.ok()?;
    Some(Memory::Mapped { _pinned: pinned, place, bytes, _owner: owner })
}
