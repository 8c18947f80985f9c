//! BF16 weights to the fast layout, some strips at a time: of a matrix that is stored on the GPU,
//! which is decoded for that, and of a caller.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::fast::{Packer, Strips};
use super::matrix::{Matrix, MatrixArrays, within};
use super::task::{MOST_COLUMNS, STRIP_ROWS, fast_bytes, good_exceptions};
use crate::gpu::fault::{OrFault, refuse};
use crate::gpu::{device::Device, status::Status};
use crate::{Result, parallel};

/// Decoded weights at a time, in bytes.
const SCRATCH_BYTES: u64 = 64_000_000;

/// Result of [`Matrix::to_fast`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Transcoded {
    /// The same weights in the fast layout.
    Fast(Matrix),
    /// More exceptions than were allowed: the matrix stays as it is.
    TooManyExceptions {
        /// Weights whose exponent lies outside the 16 that the codes of its tile express.
        exceptions: u64,
        /// As many were allowed.
        most: u64,
    },
}

impl Matrix {
    /// The same weights in the fast layout, in device memory of their own: made on the GPU, the
    /// same bytes in every run. Waits until that is done. `most_exceptions`: 4 bytes each;
    /// [`Matrix::good_exceptions`] is a good number.
    ///
    /// Device memory meanwhile: besides the result, decoded weights of some strips (at most 64 MB),
    /// and 4 bytes for each of `most_exceptions`. What is fast already comes back as it is.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a matrix of more than 2^20 columns or 2^32
    /// weights or more; [`Error::Corrupt`](crate::Error::Corrupt) if the stored weights contradict
    /// themselves; [`Error::Gpu`](crate::Error::Gpu).
    pub fn to_fast(&self, most_exceptions: u64) -> Result<Transcoded> {
        if matches!(self.arrays, MatrixArrays::Fast(_)) {
            return Ok(Transcoded::Fast(self.clone()));
        }
        let (device, rows, columns) = (self.device(), self.row_count(), self.column_count());
        if 2 * STRIP_ROWS * columns > SCRATCH_BYTES || u32::try_from(rows * columns).is_err() {
            let weights = format!("{:?} has {rows} x {columns} weights", self.name);
            let problem = format!("{weights}, too many to be transcoded at once");
            return refuse(problem, "take fewer of its rows or columns, or multiply as stored");
        }
        let stream = &*device.new_stream()?;
        // Rows that are decoded at once.
        let each = STRIP_ROWS * (SCRATCH_BYTES / (2 * STRIP_ROWS * columns));
        let mut packer = Packer::new(device, most_exceptions.min(rows * columns))?;
        let bytes = fast_bytes(rows, columns);
        let memory = device.allocate(bytes, "a matrix in the fast layout")?;
        let scratch = device.allocate(2 * columns * rows.min(each), "weights to transcode")?;
        let strips = Strips { rows, columns, address: memory.pointer() };
        packer.begin(stream)?;
        let (status, weights) = (Status::new(device)?, scratch.pointer());
        for rows in parallel::cut(0..rows, each, 1) {
            // SAFETY: the scratch has room for the rows, and only this stream uses it. Its and all
            // other memory is freed only after the context is idle.
            unsafe { self.decode(&rows, &(0..columns), weights, stream, &status) }?;
            // SAFETY: the weights are there, after the decoding on the same stream. Lives as above.
            unsafe { packer.pack(&strips, &rows, weights, stream) }?;
        }
        let outcome = packer.finish(strips, memory, most_exceptions, false, stream)?;
        status.check(stream)?;
        stream.synchronize().or_fault("copying on the GPU")?;
        Ok(match outcome {
            Ok(arrays) => Transcoded::Fast(Self::fast(Arc::clone(&self.name), &Arc::new(arrays))),
            Err(exceptions) => Transcoded::TooManyExceptions { exceptions, most: most_exceptions },
        })
    }

    /// As [`Matrix::to_fast`] with [`Matrix::good_exceptions`], or itself as stored if it has more;
    /// [`Matrix::residence`] tells which.
    ///
    /// # Errors
    /// As [`Matrix::to_fast`].
    pub fn to_fast_or_stored(&self) -> Result<Self> {
        Ok(match self.to_fast(self.good_exceptions())? {
            Transcoded::Fast(fast) => fast,
            Transcoded::TooManyExceptions { .. } => self.clone(),
        })
    }

    /// As many exceptions as the fast layout bears well: one of 256 weights, which takes an eighth
    /// of a bit a weight.
    pub fn good_exceptions(&self) -> u64 {
        // No overflow: a tensor has less than 2^45 weights.
        good_exceptions(self.row_count() * self.column_count())
    }
}

/// Makes a matrix in the fast layout of BF16 weights, some rows at a time, in memory of the caller:
/// the same bytes in every run.
///
/// Device memory of its own: 4 bytes for each exception that is good, one of 256 weights.
#[derive(Debug)]
pub struct FastPacker {
    strips: Strips,
    packer: Packer,
}

impl FastPacker {
    /// Prepares packing a matrix of these rows and columns to `strips`, a multiple of 16. Puts the
    /// counter's beginning on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for no weights or 2^32 and more, more than
    /// 2^29 columns, or a misaligned address; [`Error::Gpu`](crate::Error::Gpu).
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
        let fits = columns <= MOST_COLUMNS && strips.is_multiple_of(16);
        let Some(weights) = weights.filter(|&weights| weights > 0 && fits) else {
            let problem = format!("{rows} x {columns} weights cannot be packed at {strips:#x}");
            return refuse(problem, "take fewer rows, and memory that begins on 256 bytes");
        };
        let packer = Packer::new(device, good_exceptions(weights.into()))?;
        packer.begin(stream)?;
        Ok(Self { strips: Strips { rows, columns, address: strips }, packer })
    }

    /// Puts the packing of some rows on the stream: they follow those before, and end on a multiple
    /// of 32 or with the last one.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for other rows;
    /// [`Error::Gpu`](crate::Error::Gpu).
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
        let rows = within(&rows, self.strips.rows, STRIP_ROWS, "rows")?;
        // SAFETY: the caller's promise.
        unsafe { self.packer.pack(&self.strips, &rows, weights, stream) }
    }

    /// Waits for all rows; how many exceptions there are, if they are no more than
    /// [`Matrix::good_exceptions`].
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn exceptions(&self, stream: &CudaStream) -> Result<Option<u64>> {
        let count = self.packer.count(stream)?;
        Ok(Some(count).filter(|&count| count <= self.packer.capacity()))
    }

    /// Puts the copying of this many exceptions on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for more than there can be;
    /// [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// `to` is device memory of 4 bytes for each; that and `self` live until the stream is done.
    pub unsafe fn take(&self, exceptions: u64, to: CUdeviceptr, stream: &CudaStream) -> Result<()> {
        if exceptions > self.packer.capacity() {
            let problem = format!("{exceptions} exceptions");
            return refuse(problem, "take as many as FastPacker::exceptions says");
        }
        // SAFETY: the caller's promise.
        unsafe { self.packer.copy(exceptions, to, stream) }
    }

    /// Bytes that the matrix takes, except its exceptions.
    pub const fn bytes(&self) -> u64 {
        fast_bytes(self.strips.rows, self.strips.columns)
    }
}
