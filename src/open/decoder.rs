//! What decodes tensors into host memory: the seam through which verification and restoring get their bytes.

use std::{fmt::Debug, ops::Range};

use rayon::prelude::*;

use super::{
    Tensor,
    reader::{PIECE_BYTES, TensorReader},
};
use crate::Result;

/// Decodes tensors into host memory: [`Cpu`], or with the feature `cuda` a GPU (`gpu::GpuDecoder`).
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::demo::tiny_container(folder.path())?;
/// use df11::{Level, open::Cpu};
///
/// let model = df11::open(&path)?;
/// assert_eq!(model.verify_with(Level::Full, &Cpu, &())?, model.verify(Level::Full, &())?);
/// # Ok(())
/// # }
/// ```
pub trait Decoder: Debug + Send + Sync {
    /// Prepares a tensor: what its parts have in common is done once.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version; whatever keeps the decoder from reading it.
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>>;
}

/// A tensor from which any number of threads read at once.
pub trait PreparedTensor: Send + Sync {
    /// Decodes a range of the tensor's bytes, which begins and ends between elements, into `out`, which is as long.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) where the container is damaged; whatever else keeps the decoder from it.
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()>;

    /// Checks the gaps and output offsets of a range against the codes, as far as [`read`](Self::read) does not.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn verify_index(&self, range: Range<u64>) -> Result<()>;
}

/// Decodes on the CPU, each part on the thread that asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu;

impl Decoder for Cpu {
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>> {
        Ok(Box::new(TensorReader::new(&tensor)?))
    }
}

impl PreparedTensor for TensorReader<'_> {
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        TensorReader::read(self, range, out)
    }

    fn verify_index(&self, range: Range<u64>) -> Result<()> {
        TensorReader::verify_index(self, range)
    }
}

/// Cuts a range into pieces, each for one thread.
pub(super) fn pieces(range: Range<u64>, out: &mut [u8]) -> Vec<(Range<u64>, &mut [u8])> {
    let starts = (range.start..range.end).step_by(PIECE_BYTES as usize);
    let pieces = out.chunks_mut(PIECE_BYTES as usize);
    starts.zip(pieces).map(|(start, piece)| (start..start + piece.len() as u64, piece)).collect()
}

/// Decodes a range of the tensor's bytes on all threads.
pub(super) fn read_parallel(tensor: &dyn PreparedTensor, range: Range<u64>, out: &mut [u8]) -> Result<()> {
    pieces(range, out).into_par_iter().try_for_each(|(range, out)| tensor.read(range, out))
}
