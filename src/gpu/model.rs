//! A model on GPUs: its blocks and tensors by name.

use std::{collections::HashMap, ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, CudaViewMut, sys::CUdeviceptr};

use super::program::{Cut, GpuProgram};
use super::{
    device::Device, fault::refuse, part::DevicePart, placement::Plan, status::Status,
    stored::Stored,
};
use crate::open::{Slice, none_such};
use crate::{BlockLayout, Dtype, Result};

/// A model whose blocks are compressed in the memory of GPUs, or pinned on the host if the GPUs are
/// too small, ready to be decoded.
///
/// On the GPUs it takes as many bytes as its sections in the containers, and 17 kB of decode table
/// per tensor; a matrix in the [fast layout](super::Preference::Fast) takes that layout and nothing
/// else. On the host it takes 8 bytes per thread block (0.1 % of containers in `gap`), codebooks
/// (some kB per tensor in `tile`), the directory's names, and what is [streamed](Plan::host_bytes).
/// It does not need the [`Model`](crate::Model) any more, but keeps a container with streamed
/// blocks mapped. `Send` and `Sync`: any number of threads may decode on any streams at once.
/// Clones are the same model. Dropping the last one waits for the GPUs.
#[derive(Clone, Debug)]
pub struct GpuModel {
    pub(super) inner: Arc<ModelInner>,
}

#[derive(Debug)]
pub(super) struct ModelInner {
    pub(super) plan: Plan,
    /// Loaded blocks, and their tensors, block by block.
    pub(super) blocks: Vec<LoadedBlock>,
    pub(super) tensors: Vec<LoadedTensor>,
    pub(super) block_names: Names,
    pub(super) tensor_names: Names,
    pub(super) parts: Vec<Arc<DevicePart>>,
    pub(super) copied_bytes: u64,
}

/// Index of each name in the model, or `None` for what the plan left out.
pub(super) type Names = HashMap<String, Option<usize>>;

#[derive(Debug)]
pub(super) struct LoadedBlock {
    pub(super) name: String,
    pub(super) tensors: Range<usize>,
    pub(super) layout: BlockLayout,
    pub(super) program: GpuProgram,
}

#[derive(Debug)]
pub(super) struct LoadedTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Range of its decoded bytes in its block.
    pub(super) place: Range<u64>,
    /// Index of its block among the loaded ones.
    pub(super) block: usize,
    pub(super) stored: Arc<Stored>,
}

impl ModelInner {
    /// Finds the tensor with this name, and its block.
    pub(super) fn tensor(&self, name: &str) -> Result<(&LoadedTensor, &LoadedBlock)> {
        let tensor = &self.tensors[find(&self.tensor_names, "tensor", name)?];
        Ok((tensor, &self.blocks[tensor.block]))
    }
}

fn find(all: &Names, what: &str, name: &str) -> Result<usize> {
    match all.get(name) {
        Some(&Some(found)) => Ok(found),
        Some(None) => {
            let problem = format!("{what} {name:?} is not loaded: the plan leaves its block out");
            refuse(problem, "load the model by a plan that places that block")
        }
        None => Err(none_such(what, name)),
    }
}

impl GpuModel {
    /// The GPUs that hold it, in the order given.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Device> {
        self.inner.parts.iter().map(|part| &part.device)
    }

    /// The plan that says where its blocks are.
    pub fn plan(&self) -> &Plan {
        &self.inner.plan
    }

    /// Bytes that it takes on all GPUs: sections, slots, decode tables and tasks.
    pub fn device_bytes(&self) -> u64 {
        let held: u64 = self.inner.parts.iter().map(|part| part.bytes()).sum();
        held + self.inner.blocks.iter().map(|block| block.program.tasks.bytes()).sum::<u64>()
    }

    /// Bytes of streamed blocks that are copies, because their containers' mappings could not be
    /// pinned.
    pub fn copied_bytes(&self) -> u64 {
        self.inner.copied_bytes
    }

    /// All loaded blocks, in the order in which the model runs them.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = GpuBlock<'_>> {
        (0..self.inner.blocks.len()).map(|index| self.block_at(index))
    }

    pub(super) fn block_at(&self, index: usize) -> GpuBlock<'_> {
        let entry = &self.inner.blocks[index];
        GpuBlock { entry, tensors: &self.inner.tensors[entry.tensors.clone()] }
    }

    /// The block with this name. Constant time.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model has no such block, or the plan
    /// [left it out](Plan::of).
    pub fn block(&self, name: &str) -> Result<GpuBlock<'_>> {
        Ok(self.block_at(find(&self.inner.block_names, "block", name)?))
    }

    /// The tensor with this name. Constant time.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model has no such tensor, or the plan
    /// [left its block out](Plan::of).
    pub fn tensor(&self, name: &str) -> Result<GpuTensor<'_>> {
        Ok(GpuTensor { entry: self.inner.tensor(name)?.0 })
    }

    /// The size in bytes of a buffer that can hold any loaded block, decoded.
    pub fn largest_block_bytes(&self) -> u64 {
        self.inner.blocks.iter().map(|block| block.layout.bytes).max().unwrap_or(0)
    }

    /// Prepares decoding of tensors of any blocks on one GPU to chosen places of one output, with
    /// as many launches as for a block. Allocates 128 bytes of device memory per piece (three times
    /// that if streamed), and waits for their upload; the result can be reused.
    ///
    /// Tensors of one streamed block come through its slots, as [`GpuBlock::decode_into`] says.
    /// Tensors of several streamed blocks, and rows that are less than half of a block, are read in
    /// place, over the bus.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if there is no piece, no such tensor or no
    /// such row, a tensor is not loaded, a row does not fill whole bytes, the tensors lie on
    /// several GPUs, or an offset is not a multiple of 16; [`Error::Gpu`](crate::Error::Gpu).
    pub fn program(&self, pieces: &[Piece<'_>]) -> Result<GpuProgram> {
        let find = |piece: &Piece<'_>| {
            let (entry, block) = self.inner.tensor(piece.tensor)?;
            let slice = Slice::new(piece.tensor, entry.dtype, &entry.shape, &piece.ranges)?;
            Ok((entry, block, Cut { stored: &entry.stored, slice, to: piece.offset }))
        };
        let found = pieces.iter().map(find).collect::<Result<Vec<_>>>()?;
        let Some((first, block, _)) = found.first() else {
            return refuse("there is nothing to decode", "name one tensor or more");
        };
        let part = &block.program.part;
        let is_far = |block: &LoadedBlock| !Arc::ptr_eq(&block.program.part, part);
        if let Some((other, ..)) = found.iter().find(|(_, block, _)| is_far(block)) {
            let (one, other) = (&first.name, &other.name);
            let problem = format!("the tensors {one:?} and {other:?} lie on different GPUs");
            return refuse(problem, "make a program for each GPU");
        }
        // Copying a streamed block to a slot pays off for more than a few rows of tensors of that
        // block alone. (The block's other tensors are then there for the next program.)
        let wanted =
            found.iter().fold(0, |sum: u64, (.., cut)| sum.saturating_add(cut.slice.bytes()));
        let few =
            pieces.iter().any(|piece| !piece.ranges.is_empty()) && wanted < block.layout.bytes / 2;
        let is_whole = found.iter().all(|(entry, ..)| entry.block == first.block);
        let turn = block.program.turn.filter(|_| is_whole && !few);
        found.iter().try_for_each(|(entry, _, cut)| cut.check(&entry.name))?;
        let cuts: Vec<Cut<'_>> = found.into_iter().map(|(.., cut)| cut).collect();
        GpuProgram::new(part, turn, &cuts)
    }

    /// Prepares decoding of rows of one tensor like [`GpuModel::program`]: of all weights whose
    /// index in the first dimension lies in `rows`.
    ///
    /// # Errors
    /// Same as [`GpuModel::program`].
    pub fn rows(&self, tensor: &str, rows: Range<u64>) -> Result<GpuProgram> {
        self.program(&[Piece::new(tensor, 0).rows(rows)])
    }
}

/// A tensor, or a slice of it, that a [`GpuProgram`] decodes to one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<'n> {
    tensor: &'n str,
    /// Ranges of indices in the first dimensions.
    ranges: Vec<Range<u64>>,
    offset: u64,
}

impl<'n> Piece<'n> {
    /// All of a tensor, written to the output from byte `offset` on: a multiple of 16, unless the
    /// tensor is stored as it is.
    #[must_use]
    pub const fn new(tensor: &'n str, offset: u64) -> Self {
        Self { tensor, ranges: Vec::new(), offset }
    }

    /// Limits it to the weights whose index in the first dimension lies in `rows`. Faster if they
    /// start on a multiple of 16 elements.
    #[must_use]
    pub fn rows(self, rows: Range<u64>) -> Self {
        self.slice(&[rows])
    }

    /// Limits it to a slice, dense as [`Tensor::slice`](crate::Tensor::slice) returns it.
    ///
    /// In a matrix in tiles, only the tiles that hold the slice are decoded, all in the launch of
    /// the others. Fastest are multiples of 32 rows and 256 columns, and rows of the slice with a
    /// multiple of 16 bytes. In other coded tensors, a slice that is not contiguous is decoded row
    /// by row: each row costs a thread block or more, and must have a multiple of 16 bytes; convert
    /// such containers to the `tile` layout.
    #[must_use]
    pub fn slice(self, ranges: &[Range<u64>]) -> Self {
        Self { ranges: ranges.to_vec(), ..self }
    }
}

/// A tensor of a model on a GPU. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct GpuTensor<'m> {
    entry: &'m LoadedTensor,
}

impl<'m> GpuTensor<'m> {
    /// Its name.
    pub fn name(&self) -> &'m str {
        &self.entry.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Its dimensions, outermost first.
    pub fn shape(&self) -> Vec<u64> {
        self.entry.shape.clone()
    }

    /// The number of its decoded bytes.
    pub fn byte_length(&self) -> u64 {
        self.entry.place.end - self.entry.place.start
    }
}

/// A block of a model on a GPU. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct GpuBlock<'m> {
    entry: &'m LoadedBlock,
    tensors: &'m [LoadedTensor],
}

impl<'m> GpuBlock<'m> {
    /// Its name.
    pub fn name(&self) -> &'m str {
        &self.entry.name
    }

    /// The GPU on which it is decoded.
    pub fn device(&self) -> &'m Device {
        self.entry.program.device()
    }

    /// Whether it stays on the host and is copied to the GPU before each use.
    pub fn is_streamed(&self) -> bool {
        self.entry.program.is_streamed()
    }

    /// Its tensors, in the order of [`GpuBlock::layout`].
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = GpuTensor<'m>> + use<'m> {
        self.tensors.iter().map(|entry| GpuTensor { entry })
    }

    /// The place of each tensor in the output, as in [`Block::layout`](crate::Block::layout).
    pub fn layout(&self) -> &'m BlockLayout {
        &self.entry.layout
    }

    /// Puts the decoding of all its tensors on a stream: one launch for each encoding, and number
    /// of bytes per thread, of its tensors (usually one), and a copy for each tensor that is stored
    /// as it is.
    ///
    /// Neither allocates nor waits. The tensors fill the first [`BlockLayout::bytes`] of `output`,
    /// as [`GpuBlock::layout`] says; bytes between tensors stay as they are. A malformed stream
    /// sets `status`, and the output then holds anything; the call itself cannot see it. A streamed
    /// block is copied first, unless decoding the block before it has started that; then the copy
    /// of the next one starts.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the output is too small, misaligned (256
    /// bytes), or not of the stream's context, or the stream is not of the block's device;
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        self.entry.program.decode_into(output, stream, status)
    }

    /// Decodes like [`GpuBlock::decode_into`], to any device address: a buffer that another library
    /// owns, or work that a CUDA graph captures. Captured decoding of a streamed block reads it in
    /// place, over the bus.
    ///
    /// # Errors
    /// Same as [`GpuBlock::decode_into`], except that the buffer's size and context are not
    /// checked.
    ///
    /// # Safety
    /// `output` has [`BlockLayout::bytes`] of memory that the block's device may write, and nothing
    /// else uses it until the work is done. Each replay of a captured graph needs the same, and
    /// needs the model and the status word to be alive.
    #[expect(unsafe_code, reason = "launches")]
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the caller's promise; the model keeps the program.
        unsafe { self.entry.program.decode_into_raw(output, stream, status) }
    }
}
