//! Memory of the host that others own, pinned for GPUs to read.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::{ffi::c_void, sync::Arc};

use cudarc::driver::{CudaContext, sys};

use super::{Device, fault::OrFault};
use crate::Result;

/// Memory of the host that [`Device::pin`] pinned, until this is dropped.
#[derive(Debug)]
pub struct PinnedRange {
    address: usize,
    context: Arc<CudaContext>,
}

impl Device {
    /// Pins memory of the host, so that kernels of all GPUs read it over the bus, and may write
    /// none of it.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) where the driver refuses: the memory shares a page with
    /// some that is pinned, or is no ordinary memory.
    ///
    /// # Safety
    /// The memory is there until the result is dropped, and until all work that reads it is done.
    pub unsafe fn pin(&self, address: *mut c_void, bytes: usize) -> Result<PinnedRange> {
        let action = "pinning memory of the host";
        let context = Arc::clone(self.context());
        context.bind_to_thread().or_fault(action)?;
        // Mappings of files that were opened for reading can be pinned in no other way.
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE
            | sys::CU_MEMHOSTREGISTER_DEVICEMAP
            | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the caller's promise; `Drop` unregisters it.
        let answer = unsafe { sys::cuMemHostRegister_v2(address, bytes, flags) };
        answer.result().or_fault(action)?;
        Ok(PinnedRange { address: address as usize, context })
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        self.context.bind_to_thread().ok();
        // SAFETY: `pin` registered it, and its caller's promise says that nothing reads it any
        // more.
        let _ = unsafe { sys::cuMemHostUnregister(self.address as *mut c_void) };
    }
}
