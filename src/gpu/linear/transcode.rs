//! From what is stored on the GPU to the fast layout: some strips at a time are decoded to memory
//! and packed.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ops::Range;

use cudarc::driver::CudaStream;

use super::{
    fast::FastArrays,
    packer::{Entries, Outcome, Packer},
    stored::TileMatrix,
    task::STRIP_ROWS,
};
use crate::{
    Result,
    gpu::{
        Status,
        fault::OrFault,
        memory::{Buffer, Region},
    },
    parallel,
};

/// Decoded weights at a time, in bytes.
const SCRATCH_BYTES: u64 = 64_000_000;

/// A transcoding under way.
struct Transcoder<'m> {
    matrix: &'m TileMatrix,
    scratch: Buffer,
    packer: Packer,
    strips: Region,
    entries: Entries,
    status: Status,
}

/// Waits until it is done.
pub(super) fn transcode(matrix: &TileMatrix, most: u64) -> Result<Outcome> {
    let stream = matrix.device.new_stream()?;
    let rows = matrix.rows.end - matrix.rows.start;
    let columns = matrix.columns.end - matrix.columns.start;
    if 2 * STRIP_ROWS * columns > SCRATCH_BYTES || u32::try_from(rows * columns).is_err() {
        return Ok(Outcome::TooWide);
    }
    let each = STRIP_ROWS * (SCRATCH_BYTES / (2 * STRIP_ROWS * columns));
    let transcoder = Transcoder::new(matrix, (rows, columns), each, most, &stream)?;
    parallel::cut(0..rows, each, 1).try_for_each(|rows| transcoder.run(&rows, columns, &stream))?;
    transcoder.finish(most, &stream)
}

impl<'m> Transcoder<'m> {
    /// `each`: rows that are decoded at once.
    fn new(
        matrix: &'m TileMatrix,
        (rows, columns): (u64, u64),
        each: u64,
        most: u64,
        stream: &CudaStream,
    ) -> Result<Self> {
        let device = &matrix.device;
        let entries = Entries::new(device, most.min(rows * columns))?;
        let bytes = FastArrays::strips_bytes(rows, columns);
        let strips = Region::from(device.allocate(bytes, "a matrix in the fast layout")?);
        Ok(Self {
            matrix,
            scratch: device.allocate(2 * columns * rows.min(each), "weights to transcode")?,
            packer: Packer::new((rows, columns), strips.pointer(), &entries, stream)?,
            strips,
            entries,
            status: Status::new(device)?,
        })
    }

    /// Puts decoding and packing of some strips on the stream.
    fn run(&self, rows: &Range<u64>, columns: u64, stream: &CudaStream) -> Result<()> {
        let weights = self.scratch.pointer();
        // SAFETY: the scratch has room for the rows, and only this stream uses it. `self` keeps
        // everything; each of its buffers waits for the context before it is freed.
        unsafe { self.matrix.decode((rows, &(0..columns)), weights, stream, &self.status) }?;
        // SAFETY: the weights are there, after the decoding on the same stream. Lives as above.
        unsafe { self.packer.pack(rows, weights, &self.entries, stream) }
    }

    /// Waits, and keeps the exceptions that there are.
    fn finish(mut self, most: u64, stream: &CudaStream) -> Result<Outcome> {
        let outcome = self.packer.finish(self.strips, &mut self.entries, most, false, stream)?;
        self.status.check(stream)?;
        stream.synchronize().or_fault("copying on the GPU")?;
        Ok(outcome)
    }
}
