//! What decodes tensors into host memory: the seam through which verification gets its bytes.

use std::{fmt::Debug, ops::Range};

use rayon::prelude::*;

use super::{
    Tensor,
    reader::{PIECE_BYTES, TensorReader},
};
use crate::{Result, parallel};

/// Decodes tensors into host memory: [`Cpu`], or with the feature `cuda` a GPU (`gpu::GpuDecoder`).
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// use df11::{Level, hazmat::Cpu};
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
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version; whatever
    /// keeps the decoder from reading it.
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>>;
}

/// A tensor from which any number of threads read at once.
pub trait PreparedTensor: Send + Sync {
    /// Bytes of the tensor that are decoded together: parts that are cut at multiples of it decode
    /// nothing twice. Any other range can be read too. More than some MiB only for matrices with
    /// rows of some 10,000 weights in the `tile` encoding.
    fn grain(&self) -> u64 {
        2
    }

    /// Decodes a range of the tensor's bytes, which begins and ends between elements, into `out`,
    /// which is as long.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) where the container is damaged; whatever else
    /// keeps the decoder from it.
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()>;

    /// Checks the gaps and output offsets of a range against the codes, as far as
    /// [`read`](Self::read) does not.
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

/// Cuts a range into those of pieces, each for one thread.
pub(super) fn ranges(range: Range<u64>, grain: u64) -> impl Iterator<Item = Range<u64>> {
    parallel::cut(range, PIECE_BYTES, grain)
}

/// Cuts a range, and the bytes that it decodes to, into pieces.
pub(super) fn pieces(
    range: Range<u64>,
    grain: u64,
    out: &mut [u8],
) -> Vec<(Range<u64>, &mut [u8])> {
    let ranges: Vec<_> = ranges(range, grain).collect();
    let parts: Vec<_> =
        parallel::split(out, ranges.iter().map(|range| range.end - range.start)).collect();
    ranges.into_iter().zip(parts).collect()
}

/// Decodes a range of the tensor's bytes on all threads.
pub(super) fn read_parallel(
    tensor: &dyn PreparedTensor,
    range: Range<u64>,
    out: &mut [u8],
) -> Result<()> {
    let pieces = pieces(range, tensor.grain(), out);
    pieces.into_par_iter().try_for_each(|(range, out)| tensor.read(range, out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_each_other_and_end_at_grains() {
        let length = 5 * PIECE_BYTES + 1234;
        for grain in [2, 96, 300_000, PIECE_BYTES, 3 * PIECE_BYTES, 10 * PIECE_BYTES] {
            for start in [0, 2, 299_998, PIECE_BYTES + 2] {
                let mut out = vec![0; (length - start) as usize];
                let mut end = start;
                for (range, out) in pieces(start..length, grain, &mut out) {
                    assert_eq!((range.start, range.end - range.start), (end, out.len() as u64));
                    assert!(
                        range.end == length || range.end.is_multiple_of(grain),
                        "{range:?} of {grain}"
                    );
                    assert!(!out.is_empty() && out.len() as u64 <= grain.max(PIECE_BYTES));
                    end = range.end;
                }
                assert_eq!(end, length);
            }
        }
    }
}
