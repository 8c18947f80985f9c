//! Blocks of a model on GPUs, and their decoding on the caller's stream.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaStream, CudaViewMut, sys::CUdeviceptr};

use super::{
    Device, Status,
    loaded::{BlockEntry, Inner, TensorEntry},
    route::Ready,
};
use crate::{BlockLayout, Dtype, Result};

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
    pub fn shape(&self) -> Vec<u64> {
        self.entry.shape.clone()
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
        self.entry.route.turn().is_some()
    }

    /// Its tensors, in the order of [`GpuBlock::layout`].
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = GpuTensor<'m>> + use<'m> {
        let model = self.model;
        self.entry.tensors.iter().map(|name| {
            let (name, entry) = model.own_tensor(name);
            GpuTensor::new(name, entry)
        })
    }

    /// Where each tensor goes in the output: as [`Block::layout`](crate::Block::layout).
    pub fn layout(&self) -> &'m BlockLayout {
        &self.entry.layout
    }

    /// Puts the decoding of all its tensors on a stream: one launch for each encoding, and number
    /// of bytes a thread, that its tensors have (usually one), and a copy for each tensor that is
    /// stored as it is.
    ///
    /// Neither allocates nor waits. The first [`BlockLayout::bytes`] of `output` get the tensors,
    /// as [`GpuBlock::layout`] says; bytes between tensors stay as they are. A malformed stream
    /// sets `status`, and the output then holds anything; the call itself cannot see it. A streamed
    /// block arrives first, unless the one before it was just decoded, and then the next one starts
    /// to arrive.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) where the output is too small, misaligned (256
    /// bytes), or not of the stream's context, or the stream is not of the block's device;
    /// [`Error::Gpu`](crate::Error::Gpu) where the driver refuses.
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the model and the status wait for the context before they are freed.
        unsafe { self.ready().decode_into(output, stream, status) }
    }

    /// As [`GpuBlock::decode_into`], to any device address: a buffer that another library owns, or
    /// work that a CUDA graph captures. Captured decoding of a streamed block reads it in place,
    /// over the bus.
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into`], but that the buffer's size and context are not known.
    ///
    /// # Safety
    /// `output` has [`BlockLayout::bytes`] of memory that the block's device may write, and nobody
    /// else uses it until the work is done. Of a captured graph, each replay needs that, and that
    /// the model and the status word still live.
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the caller's promise; the model keeps tasks, sections and tables.
        unsafe { self.ready().decode_into_raw(output, stream, status) }
    }

    fn ready(&self) -> Ready<'m> {
        let (part, tasks) = self.model.part(self.entry.part);
        Ready { route: &self.entry.route, part, tasks: tasks.pointer() }
    }
}
