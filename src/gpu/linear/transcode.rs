//! Transcodes BF16 weights to the fast layout, some strips at a time: a caller's weights, or those
//! of a matrix as stored on the GPU, which it decodes.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::fast::{Packer, Strips};
use super::matrix::{Matrix, MatrixArrays, within};
use super::task::{MAX_COLUMNS, STRIP_ROWS, fast_bytes, good_exceptions};
use crate::gpu::fault::{OrFault, refuse};
use crate::gpu::{device::Device, status::Status};
use crate::{Result, parallel};

/// Bytes of weights that are decoded at a time.
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
        /// The number that was allowed.
        most: u64,
    },
}

impl Matrix {
    /// The same weights in the fast layout, in device memory of their own, made on the GPU; every
    /// run gives the same bytes. Waits until that is done. `most_exceptions` takes 4 bytes each;
    /// [`Matrix::good_exceptions`] is a good number.
    ///
    /// Device memory needed meanwhile, besides the result: decoded weights of some strips (at most
    /// 64 MB), and 4 bytes for each of `most_exceptions`. A matrix that is already fast is returned
    /// as it is.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a matrix of other weights than BF16, of
    /// more than 2^20 columns or 2^32
    /// weights or more; [`Error::Corrupt`](crate::Error::Corrupt) if the stored weights contradict
    /// themselves; [`Error::Gpu`](crate::Error::Gpu).
    pub fn to_fast(&self, most_exceptions: u64) -> Result<Transcoded> {
        if matches!(self.arrays, MatrixArrays::Fast(_)) {
            return Ok(Transcoded::Fast(self.clone()));
        }
        if !self.split().is_bf16() {
            return refuse("the weights are not BF16", "decode the matrix, and use the result");
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
            // SAFETY: the scratch has room for the rows, and only this stream uses it. All memory
            // is freed only after the context is idle.
            unsafe { self.decode(&rows, &(0..columns), weights, stream, &status) }?;
            // SAFETY: the decoding on the same stream has written the weights. Lifetimes as above.
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

    /// The fast layout from [`Matrix::to_fast`] with [`Matrix::good_exceptions`], or the matrix
    /// itself as stored if it has more; [`Matrix::residence`] tells which.
    ///
    /// # Errors
    /// Same as [`Matrix::to_fast`].
    pub fn to_fast_or_stored(&self) -> Result<Self> {
        Ok(match self.to_fast(self.good_exceptions())? {
            Transcoded::Fast(fast) => fast,
            Transcoded::TooManyExceptions { .. } => self.clone(),
        })
    }

    /// Exceptions that the fast layout bears well: one of 256 weights, which takes an eighth of a
    /// bit per weight.
    pub fn good_exceptions(&self) -> u64 {
        // No overflow: a tensor has less than 2^45 weights.
        good_exceptions(self.row_count() * self.column_count())
    }
}

/// Packs BF16 weights into a matrix in the fast layout, some rows at a time, in memory of the
/// caller. Every run gives the same bytes.
///
/// Takes device memory of its own: 4 bytes for each good exception, one of 256 weights.
#[derive(Debug)]
pub struct FastPacker {
    strips: Strips,
    packer: Packer,
}

impl FastPacker {
    /// Prepares packing a matrix of these rows and columns to `strips`, a multiple of 16. Puts the
    /// reset of the counter on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for no weights, 2^32 weights or more, more
    /// than 2^29 columns, or a misaligned address; [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// `strips` has [`Matrix::fast_bytes`] of device memory, which nothing else uses until the last
    /// work of this value is done.
    pub unsafe fn new(
        device: &Device,
        (rows, columns): (u64, u64),
        strips: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<Self> {
        let weights = rows.checked_mul(columns).and_then(|weights| u32::try_from(weights).ok());
        let fits = columns <= MAX_COLUMNS && strips.is_multiple_of(16);
        let Some(weights) = weights.filter(|&weights| weights > 0 && fits) else {
            let problem = format!("{rows} x {columns} weights cannot be packed at {strips:#x}");
            return refuse(problem, "take fewer rows, and memory that begins on 256 bytes");
        };
        let packer = Packer::new(device, good_exceptions(weights.into()))?;
        packer.begin(stream)?;
        Ok(Self { strips: Strips { rows, columns, address: strips }, packer })
    }

    /// Puts the packing of some rows on the stream: they follow the earlier ones, and end on a
    /// multiple of 32 or with the last row.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for other rows;
    /// [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// `weights` is device memory that holds the rows, row by row, dense, when the stream reaches
    /// this; it and `self` live until then.
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

    /// Waits for all rows; returns the number of exceptions if it is at most
    /// [`Matrix::good_exceptions`].
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn exceptions(&self, stream: &CudaStream) -> Result<Option<u64>> {
        let count = self.packer.count(stream)?;
        Ok(Some(count).filter(|&count| count <= self.packer.capacity()))
    }

    /// Puts the copy of this many exceptions on the stream.
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
}
