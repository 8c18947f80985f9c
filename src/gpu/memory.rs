//! Device memory that is freed only when nothing on the GPU can still use it: `cuMemFree` waits for
//! all work. `cuCtxSynchronize` is never called, because it would break captures of other threads.
#![expect(unsafe_code, reason = "calls of the driver, each with its proof")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys::CUdeviceptr};
use zerocopy::{Immutable, IntoBytes};

use super::fault::OrFault;
use crate::{Result, constants::ARRAY_ALIGNMENT};

/// Device memory: an allocation or a part of one. Each part keeps the allocation.
///
/// No events track it: launches that use it may run on any stream, so dropping the last part of an
/// allocation waits for the whole context.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    allocation: Arc<Allocation>,
    pointer: CUdeviceptr,
    bytes: u64,
}

#[derive(Debug)]
struct Allocation {
    context: Arc<CudaContext>,
    pointer: CUdeviceptr,
}

impl Buffer {
    /// Allocates memory with any content. The pointer is a multiple of 256.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<Self> {
        let action = "allocating device memory";
        context.bind_to_thread().or_fault(action)?;
        // SAFETY: the context is current. Nobody reads the memory before it is written: uploads
        // write all of it that is used.
        let pointer = unsafe { result::malloc_sync(bytes.max(1) as usize) }.or_fault(action)?;
        let allocation = Arc::new(Allocation { context: Arc::clone(context), pointer });
        Ok(Self { allocation, pointer, bytes })
    }

    /// Allocates and copies from the host; returns when that and earlier work on the stream are
    /// done.
    pub(super) fn of<T: IntoBytes + Immutable>(stream: &CudaStream, values: &[T]) -> Result<Self> {
        let buffer = Self::new(stream.context(), size_of_val(values) as u64)?;
        let action = "copying to the GPU";
        // Copies on a stream and waits for it: what `cuMemcpyHtoD` copies from pageable memory may
        // still be in flight when it returns (CUDA driver API, "API synchronization behavior"), and
        // our streams do not wait for the default one.
        // SAFETY: it is as large as `values`, which are borrowed until the copy is done.
        let copied = unsafe {
            result::memcpy_htod_async(buffer.pointer, values.as_bytes(), stream.cu_stream())
        };
        // Waits after a failure too: the copy may have begun.
        let done = stream.synchronize();
        copied.and(done).or_fault(action)?;
        Ok(buffer)
    }

    pub(super) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    pub(super) fn context(&self) -> &CudaContext {
        &self.allocation.context
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part of its bytes, which keeps the allocation too.
    pub(super) fn part(&self, start: u64, bytes: u64) -> Self {
        assert!(start + bytes <= self.bytes, "a part of the memory");
        Self { allocation: Arc::clone(&self.allocation), pointer: self.pointer + start, bytes }
    }

    /// Cuts bytes off its front, rounded up to where the next part may begin.
    pub(super) fn take(&mut self, bytes: u64) -> Self {
        let taken = self.part(0, bytes);
        let whole = bytes.next_multiple_of(ARRAY_ALIGNMENT).min(self.bytes);
        *self = self.part(whole, self.bytes - whole);
        taken
    }

    /// Reads its first word after earlier work on the stream, for which it waits.
    pub(super) fn read_word(&self, stream: &CudaStream) -> Result<u32> {
        let mut word = [0; 4];
        self.read_at(0, stream, &mut word)?;
        Ok(u32::from_ne_bytes(word))
    }

    /// Copies bytes from `start` on to the host after earlier work on the stream, and waits.
    pub(super) fn read_at(&self, start: u64, stream: &CudaStream, out: &mut [u8]) -> Result<()> {
        let rest = self.bytes.checked_sub(start).expect("a start within");
        assert!(out.len() as u64 <= rest, "no more than there is");
        let action = "copying from the GPU";
        self.context().bind_to_thread().or_fault(action)?;
        // SAFETY: the source holds as many bytes, and `out` is borrowed until the stream is
        // synchronised below.
        let copied =
            unsafe { result::memcpy_dtoh_async(out, self.pointer + start, stream.cu_stream()) };
        copied.and_then(|()| stream.synchronize()).or_fault(action)
    }

    /// Fills it with zeros, and waits.
    pub(super) fn clear(&self, stream: &CudaStream) -> Result<()> {
        let action = "clearing device memory";
        self.context().bind_to_thread().or_fault(action)?;
        // SAFETY: it has as many bytes and lives until the synchronisation below.
        let cleared = unsafe {
            result::memset_d8_async(self.pointer, 0, self.bytes as usize, stream.cu_stream())
        };
        cleared.and_then(|()| stream.synchronize()).or_fault(action)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A context that has failed runs nothing, and reports its failure to the next caller.
        self.context.bind_to_thread().ok();
        // SAFETY: `new` allocated it with `cuMemAlloc`, and nothing has freed it. For such memory
        // `cuMemFree` waits for all work of the context (CUDA driver API, section Memory
        // Management: only memory from `cuMemAllocAsync` is freed without waiting).
        // `cuCtxSynchronize` would wait too, but break the captures of other threads.
        unsafe { result::free_sync(self.pointer) }.ok();
    }
}
