//! BF16 weights in device memory to the fast layout, in memory of the caller.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ops::Range;

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{
    matrix::{Matrix, within},
    packer::{Entries, Packer},
    task::{STRIP_ROWS, good_exceptions},
};
use crate::{Error, Result, gpu::Device};

/// Makes a matrix in the fast layout of BF16 weights, some rows at a time, in memory of the caller:
/// the same bytes in every run.
///
/// Device memory of its own: 4 bytes for each exception that is good, one of 256 weights.
#[derive(Debug)]
pub struct FastPacker {
    packer: Packer,
    entries: Entries,
    shape: (u64, u64),
}

impl FastPacker {
    /// For a matrix of these rows and columns at `strips`, a multiple of 16. Puts the counter's
    /// beginning on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`] for no weights or 2^32 and more, or a misaligned address;
    /// [`Error::Gpu`].
    ///
    /// # Safety
    /// `strips` has [`Matrix::fast_bytes`] of device memory, which nobody else uses until the last
    /// work of this value is done.
    pub unsafe fn new(
        device: &Device,
        (rows, columns): (u64, u64),
        strips: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<Self> {
        let weights = rows.checked_mul(columns).and_then(|weights| u32::try_from(weights).ok());
        let Some(weights) = weights.filter(|&weights| weights > 0 && strips.is_multiple_of(16))
        else {
            let problem = format!("{rows} x {columns} weights cannot be packed at {strips:#x}");
            return Err(Error::parameter(
                problem,
                "take fewer rows, and memory that begins on 256 bytes",
            ));
        };
        let entries = Entries::new(device, good_exceptions(weights.into()))?;
        let packer = Packer::new((rows, columns), strips, &entries, stream)?;
        Ok(Self { packer, entries, shape: (rows, columns) })
    }

    /// Puts the packing of some rows on the stream: they follow those before, and end on a multiple
    /// of 32 or with the last one.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows; [`Error::Gpu`].
    ///
    /// # Safety
    /// `weights` is device memory with the rows, row by row, dense, when the stream comes to it;
    /// that and `self` live until then.
    pub unsafe fn pack(
        &self,
        rows: Range<u64>,
        weights: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<()> {
        let rows = within(&rows, self.shape.0, STRIP_ROWS, "rows")?;
        // SAFETY: the caller's promise.
        unsafe { self.packer.pack(&rows, weights, &self.entries, stream) }
    }

    /// Waits for all rows; how many exceptions there are, if they are no more than
    /// [`Matrix::good_exceptions`].
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn exceptions(&self, stream: &CudaStream) -> Result<Option<u64>> {
        let count = self.entries.count(stream)?;
        Ok(Some(count).filter(|&count| count <= self.entries.capacity()))
    }

    /// Puts the copying of this many exceptions on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more than there can be; [`Error::Gpu`].
    ///
    /// # Safety
    /// `to` is device memory of 4 bytes for each; that and `self` live until the stream is done.
    pub unsafe fn take(&self, exceptions: u64, to: CUdeviceptr, stream: &CudaStream) -> Result<()> {
        if exceptions > self.entries.capacity() {
            let problem = format!("{exceptions} exceptions");
            return Err(Error::parameter(problem, "take as many as FastPacker::exceptions says"));
        }
        // SAFETY: the caller's promise.
        unsafe { self.entries.copy(exceptions, to, stream) }
    }

    /// Bytes that the matrix takes, except its exceptions.
    pub const fn bytes(&self) -> u64 {
        Matrix::fast_bytes(self.shape.0, self.shape.1)
    }
}
