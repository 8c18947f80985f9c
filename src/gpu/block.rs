//! Decoding of blocks and rows, on the caller's stream.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ptr::null_mut, sync::Arc};

use cudarc::driver::{
    CudaStream, CudaViewMut, DevicePtrMut, DeviceSlice,
    sys::{self, CUdeviceptr, CUstreamCaptureStatus},
};

use super::{
    Device, Status,
    fault::OrFault,
    launches::Launches,
    memory::Buffer,
    model::{BlockEntry, Inner, Program, TensorEntry},
};
use crate::{BlockLayout, Dtype, Error, Result};

/// A tensor of a model on a GPU. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct GpuTensor<'m> {
    name: &'m str,
    entry: &'m TensorEntry,
}

impl<'m> GpuTensor<'m> {
    pub(super) fn new(name: &'m str, entry: &'m TensorEntry) -> Self {
        Self { name, entry }
    }

    /// Its name.
    pub fn name(&self) -> &'m str {
        self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Its dimensions, outermost first.
    pub fn shape(&self) -> &'m [u64] {
        &self.entry.shape
    }

    /// The size of its decoded bytes.
    pub fn byte_length(&self) -> u64 {
        self.entry.bytes
    }
}

/// A block of a model on a GPU. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct GpuBlock<'m> {
    model: &'m Inner,
    entry: &'m BlockEntry,
}

impl<'m> GpuBlock<'m> {
    pub(super) fn new(model: &'m Inner, entry: &'m BlockEntry) -> Self {
        Self { model, entry }
    }

    /// Its name.
    pub fn name(&self) -> &'m str {
        &self.entry.name
    }

    /// The GPU on which it is decoded.
    pub fn device(&self) -> &'m Device {
        &self.model.part(self.entry.part).0.device
    }

    /// Whether it stays on the host and is copied to the GPU ahead of each use.
    pub fn is_streamed(&self) -> bool {
        matches!(self.entry.program, Program::Streamed { .. })
    }

    /// Its tensors, in the order of [`GpuBlock::layout`].
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = GpuTensor<'m>> + use<'m> {
        let model = self.model;
        self.entry.tensors.iter().map(|name| model.tensor(name))
    }

    /// Where each tensor goes in the output: as [`Block::layout`](crate::Block::layout).
    pub fn layout(&self) -> &'m BlockLayout {
        &self.entry.layout
    }

    /// Puts the decoding of all its tensors on a stream: one launch for each encoding, and number of bytes a thread, that its tensors
    /// have (usually one), and a copy for each tensor that is stored as it is.
    ///
    /// Neither allocates nor waits. The first [`BlockLayout::bytes`] of `output` get the tensors, as [`GpuBlock::layout`] says; bytes
    /// between tensors stay as they are. A malformed stream sets `status`, and the output then holds anything; the call itself cannot
    /// see it. A streamed block arrives first, unless the one before it was just decoded, and then the next one starts to arrive.
    ///
    /// # Errors
    /// [`Error::Parameter`] where the output is too small, misaligned (256 bytes), or not of the stream's context, or the stream is not
    /// of the block's device; [`Error::Gpu`] where the driver refuses.
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        into_view(self.entry.layout.bytes, output, stream, |pointer| {
            // SAFETY: `into_view` lends a buffer of the block's size until its events say that the work is done; the model and the
            // status wait for the context before they are freed.
            unsafe { self.decode_into_raw(pointer, stream, status) }
        })
    }

    /// As [`GpuBlock::decode_into`], to any device address: a buffer that another library owns, or work that a CUDA graph captures.
    /// Captured decoding of a streamed block reads it in place, over the bus.
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into`], but that the buffer's size and context are not known.
    ///
    /// # Safety
    /// `output` has [`BlockLayout::bytes`] of memory that the block's device may write, and nobody else uses it until the work is
    /// done. Of a captured graph, each replay needs that, and that the model and the status word still live.
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let (part, tasks) = self.model.part(self.entry.part);
        check_contexts(&part.device, stream, status)?;
        // SAFETY: the caller's promise, and the check above; the model keeps tasks, sections and tables.
        let run = |launches: &Launches| unsafe {
            launches.run(&part.device, tasks.pointer(), output, stream, status)
        };
        match (&self.entry.program, &part.streamer) {
            (Program::Streamed { turn, slots, .. }, Some(streamer)) if capture_of(stream)?.is_none() => {
                streamer.with_block(*turn, stream, |slot| run(&slots[slot]))
            }
            (Program::Resident(launches) | Program::Streamed { in_place: launches, .. }, _) => run(launches),
        }
    }
}

/// Rows of a tensor of a model on a GPU, ready to be decoded. Keeps the model alive.
#[derive(Debug)]
pub struct GpuRows {
    launches: Launches,
    tasks: Buffer,
    part: usize,
    model: Arc<Inner>,
}

impl GpuRows {
    pub(super) fn new(model: Arc<Inner>, part: usize, launches: Launches, tasks: Buffer) -> Self {
        Self { launches, tasks, part, model }
    }

    /// Bytes of the decoded rows.
    pub fn bytes(&self) -> u64 {
        self.launches.bytes()
    }

    /// Puts the decoding of the rows on a stream, as [`GpuBlock::decode_into`]. Where the rows start on a multiple of 16 elements it is
    /// faster.
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into`].
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        into_view(self.bytes(), output, stream, |pointer| {
            // SAFETY: as in `GpuBlock::decode_into`.
            unsafe { self.decode_into_raw(pointer, stream, status) }
        })
    }

    /// As [`GpuBlock::decode_into_raw`].
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into_raw`].
    ///
    /// # Safety
    /// As [`GpuBlock::decode_into_raw`], with [`GpuRows::bytes`] of output, and this value in the place of the model.
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let (part, _) = self.model.part(self.part);
        check_contexts(&part.device, stream, status)?;
        // SAFETY: the caller's promise, and the check above; this value keeps the tasks, and the model what they point to.
        unsafe { self.launches.run(&part.device, self.tasks.pointer(), output, stream, status) }
    }
}

/// Lends an output of the caller to `decode`, if it is large enough and of the stream's context.
fn into_view(
    bytes: u64,
    output: &mut CudaViewMut<'_, u8>,
    stream: &CudaStream,
    decode: impl FnOnce(CUdeviceptr) -> Result<()>,
) -> Result<()> {
    if (output.len() as u64) < bytes {
        let problem = format!("the output has {} bytes of {bytes}", output.len());
        return Err(Error::parameter(problem, "ask for the size"));
    }
    // Streams and buffers of two wrappers of one context do not wait for each other.
    if !Arc::ptr_eq(output.stream().context(), stream.context()) {
        let problem = "output and stream come from different contexts";
        return Err(Error::parameter(problem, "make both with Device::context of one device"));
    }
    let (pointer, _record) = output.device_ptr_mut(stream);
    decode(pointer)
}

fn check_contexts(device: &Device, stream: &CudaStream, status: &Status) -> Result<()> {
    let context = device.context().cu_ctx();
    if stream.context().cu_ctx() == context && status.context().cu_ctx() == context {
        return Ok(());
    }
    let problem = "the stream or the status belongs to another device or context than what is decoded";
    Err(Error::parameter(problem, "make it with the context of the block's device"))
}

/// The number of the CUDA graph capture that takes what is put on the stream, if there is one.
pub(super) fn capture_of(stream: &CudaStream) -> Result<Option<u64>> {
    let action = "asking whether a graph is captured";
    stream.context().bind_to_thread().or_fault(action)?;
    let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let (to_status, to_id, stream) = (&raw mut status, &raw mut id, stream.cu_stream());
    // SAFETY: the driver writes a status and a number, for which there is room; the other results may be left out.
    let answer = unsafe {
        sys::cuStreamGetCaptureInfo_v2(stream, to_status, to_id, null_mut(), null_mut(), null_mut())
    };
    answer.result().or_fault(action)?;
    Ok((status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE).then_some(id))
}
