//! From what is stored on the GPU to the fast layout: some strips at a time are decoded to memory
//! and packed.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::Arc;

use super::{
    fast::{FastOutcome, Packer, Strips},
    matrix::{Matrix, MatrixArrays},
    task::{STRIP_ROWS, fast_bytes, good_exceptions},
};
use crate::{
    Result,
    gpu::{
        fault::{OrFault, refuse},
        memory::DeviceRegion,
        status::Status,
    },
    parallel,
};

/// Decoded weights at a time, in bytes.
const SCRATCH_BYTES: u64 = 64_000_000;

/// What [`Matrix::to_fast`] gives.
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
        Ok(match self.transcode(most_exceptions)? {
            FastOutcome::Fast(arrays) => {
                Transcoded::Fast(Self::fast(Arc::clone(&self.name), &Arc::new(arrays)))
            }
            FastOutcome::TooMany(exceptions) => {
                Transcoded::TooManyExceptions { exceptions, most: most_exceptions }
            }
            FastOutcome::TooWide => {
                let (name, rows, columns) = (&self.name, self.row_count(), self.column_count());
                let problem = format!(
                    "{name:?} has {rows} x {columns} weights, too many to be transcoded at once"
                );
                let remedy = "take fewer of its rows or columns, or multiply as stored";
                return refuse(problem, remedy);
            }
        })
    }

    /// Waits until it is done.
    fn transcode(&self, most: u64) -> Result<FastOutcome> {
        let (device, rows, columns) = (self.device(), self.row_count(), self.column_count());
        let stream = &*device.new_stream()?;
        if 2 * STRIP_ROWS * columns > SCRATCH_BYTES || u32::try_from(rows * columns).is_err() {
            return Ok(FastOutcome::TooWide);
        }
        // Rows that are decoded at once.
        let each = STRIP_ROWS * (SCRATCH_BYTES / (2 * STRIP_ROWS * columns));
        let mut packer = Packer::new(device, most.min(rows * columns))?;
        let bytes = fast_bytes(rows, columns);
        let memory = DeviceRegion::from(device.allocate(bytes, "a matrix in the fast layout")?);
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
        let outcome = packer.finish(strips, memory, most, false, stream)?;
        status.check(stream)?;
        stream.synchronize().or_fault("copying on the GPU")?;
        Ok(outcome)
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
