//! A model on GPUs: its blocks and tensors, and rows of them.

use std::{ops::Range, sync::Arc};

use super::{
    Device, GpuBlock, GpuProgram, GpuTensor, Matrix, Piece, Plan, loaded::Inner, memory::Buffer,
    part::Part,
};
use crate::Result;

/// A model whose blocks lie compressed in the memory of GPUs, or pinned on the host where those are
/// too small, ready to be decoded.
///
/// On the GPUs it holds what the sections take in the containers, and 17 kB of decode table a
/// tensor (of matrices in the [fast layout](super::Preference::Fast) that layout, and nothing
/// else); on the host 8 bytes a thread block (0.1 % of containers in `gap`), codebooks (some kB a
/// tensor in `tile`), the directory's names, and what is [streamed](Plan::host_bytes). It does not
/// need the [`Model`](crate::Model) any more, but keeps a container that is streamed mapped. `Send`
/// and `Sync`: any number of threads may decode on any streams at once. Clones are the same model.
/// Dropping the last one waits for the GPUs.
#[derive(Clone, Debug)]
pub struct GpuModel {
    inner: Arc<Inner>,
}

impl GpuModel {
    pub(super) fn new(inner: Inner) -> Self {
        Self { inner: Arc::new(inner) }
    }

    /// The GPUs that it lies on, as they were given.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Device> {
        self.inner.parts.iter().map(|part| &part.device)
    }

    /// Where its blocks lie.
    pub fn plan(&self) -> &Plan {
        &self.inner.plan
    }

    /// Device memory that it holds on all GPUs for sections, slots, decode tables and tasks, in
    /// bytes.
    pub fn device_bytes(&self) -> u64 {
        let parts: u64 = self.inner.parts.iter().map(Part::bytes).sum();
        parts + self.inner.tasks.iter().map(Buffer::bytes).sum::<u64>()
    }

    /// Host memory that holds copies of streamed blocks because their containers' mappings could
    /// not be pinned, in bytes.
    pub fn copied_bytes(&self) -> u64 {
        self.inner.copied_bytes
    }

    /// All blocks that are loaded, in the order in which the model runs them.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = GpuBlock<'_>> {
        self.inner.blocks.iter().map(|entry| GpuBlock::new(&self.inner, entry))
    }

    /// The block with this name. Constant time.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model has no such block, or the plan
    /// [left it out](Plan::of).
    pub fn block(&self, name: &str) -> Result<GpuBlock<'_>> {
        Ok(GpuBlock::new(&self.inner, self.inner.block_named(name)?))
    }

    /// The tensor with this name. Constant time.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model has no such tensor, or the plan
    /// [left its block out](Plan::of).
    pub fn tensor(&self, name: &str) -> Result<GpuTensor<'_>> {
        let (name, entry) = self.inner.tensor(name)?;
        Ok(GpuTensor::new(name, entry))
    }

    /// The size of a buffer into which any block that is loaded can be decoded, in bytes.
    pub fn largest_block_bytes(&self) -> u64 {
        self.inner.blocks.iter().map(|block| block.layout.bytes).max().unwrap_or(0)
    }

    /// Prepares decoding of tensors that lie on one GPU, of any blocks, to chosen places of one
    /// output: as many launches as for a block. Allocates some device memory, 128 bytes a piece
    /// (three times that if streamed), and waits for its upload; the result can be used any number
    /// of times.
    ///
    /// Tensors of one streamed block come through its slots, as [`GpuBlock::decode_into`] says;
    /// those of several, and less than half of a block where rows are asked for, are read in place,
    /// over the bus.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if there is no piece, no such tensor or no
    /// such row, a tensor is not loaded, a row does not fill whole bytes, the tensors lie on
    /// several GPUs, or an offset is no multiple of 16; [`Error::Gpu`](crate::Error::Gpu).
    pub fn program(&self, pieces: &[Piece<'_>]) -> Result<GpuProgram> {
        GpuProgram::new(&self.inner, pieces)
    }

    /// As [`GpuModel::program`], for rows of one tensor: all weights whose index in the first
    /// dimension lies in `rows`.
    ///
    /// # Errors
    /// As [`GpuModel::program`].
    pub fn rows(&self, tensor: &str, rows: Range<u64>) -> Result<GpuProgram> {
        self.program(&[Piece::new(tensor, 0).rows(rows)])
    }

    /// A BF16 matrix as it is stored, to multiply by without decoding it: in tiles of 32 x 256, and
    /// resident. Of a tensor with more than two dimensions, the matrix as which it is stored. Takes
    /// 128 bytes of device memory for a task, and waits for their upload; the first call for a
    /// device loads the kernels that multiply.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model has no such tensor, or has it in
    /// another form, streamed, or not loaded; [`Error::Limit`](crate::Error::Limit) from 2^32 rows
    /// or columns on; [`Error::Gpu`](crate::Error::Gpu).
    pub fn matrix(&self, tensor: &str) -> Result<Matrix> {
        Matrix::stored(&self.inner, tensor)
    }
}
