//! From what is stored on the GPU to the fast layout: some strips at a time are decoded to memory and
//! packed.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ops::Range;

use cudarc::driver::CudaStream;

use super::{
    fast::FastArrays,
    matrix::StoredMatrix,
    packer::{Entries, Outcome, Packer},
    task::STRIP_ROWS,
};
use crate::{
    Result,
    gpu::{
        Status,
        fault::OrFault,
        memory::Buffer,
        route::{Ready, Route},
    },
};

/// Decoded weights at a time, in bytes.
const SCRATCH_BYTES: u64 = 64_000_000;

/// Some whole strips, and what decodes them.
struct Step {
    rows: Range<u64>,
    decode: Route,
}

/// A transcoding under way.
struct Transcoder<'m> {
    matrix: &'m StoredMatrix,
    steps: Vec<Step>,
    /// Of the decodings.
    tasks: Buffer,
    scratch: Buffer,
    packer: Packer,
    entries: Entries,
    status: Status,
}

/// Waits until it is done.
pub(super) fn transcode(matrix: &StoredMatrix, most: u64) -> Result<Outcome> {
    let stream = matrix.part().device.new_stream()?;
    let (rows, columns) = (matrix.row_count(), matrix.column_count());
    if 2 * STRIP_ROWS * columns > SCRATCH_BYTES || u32::try_from(rows * columns).is_err() {
        return Ok(Outcome::TooWide);
    }
    let transcoder = Transcoder::new(matrix, most, &stream)?;
    for step in &transcoder.steps {
        transcoder.run(step, &stream)?;
    }
    transcoder.finish(most, &stream)
}

impl<'m> Transcoder<'m> {
    fn new(matrix: &'m StoredMatrix, most: u64, stream: &CudaStream) -> Result<Self> {
        let (rows, columns) = (matrix.row_count(), matrix.column_count());
        let each = STRIP_ROWS * (SCRATCH_BYTES / (2 * STRIP_ROWS * columns));
        let (part, mut tasks) = (matrix.part(), Vec::new());
        let step = |first| {
            let rows = first..rows.min(first + each);
            let decode = Route::new(part, None, &[matrix.cut_of(&rows)?], &mut tasks)?;
            Ok(Step { rows, decode })
        };
        let steps = (0..rows).step_by(each as usize).map(step).collect::<Result<_>>()?;
        let device = &part.device;
        let entries = Entries::new(device, most.min(rows * columns))?;
        let bytes = FastArrays::strips_bytes(rows, columns);
        let strips = device.allocate(bytes, "a matrix in the fast layout")?;
        Ok(Self {
            matrix,
            steps,
            tasks: Buffer::of(stream, &tasks)?,
            scratch: device.allocate(2 * columns * rows.min(each), "weights to transcode")?,
            packer: Packer::new((rows, columns), strips.into(), &entries, stream)?,
            entries,
            status: Status::new(device)?,
        })
    }

    /// Puts decoding and packing of some strips on the stream.
    fn run(&self, step: &Step, stream: &CudaStream) -> Result<()> {
        let ready = Ready { route: &step.decode, part: self.matrix.part(), tasks: self.tasks.pointer() };
        let weights = self.scratch.pointer();
        // SAFETY: the scratch has room for the step's rows, and only this stream uses it. `self`
        // keeps everything; each of its buffers waits for the context before it is freed.
        unsafe { ready.decode_into_raw(weights, stream, &self.status) }?;
        // SAFETY: the weights are there, after the decoding on the same stream. Lives as above.
        unsafe { self.packer.pack(&step.rows, weights, &self.entries, stream) }
    }

    /// Waits, and keeps the exceptions that there are.
    fn finish(mut self, most: u64, stream: &CudaStream) -> Result<Outcome> {
        let outcome = self.packer.finish(&mut self.entries, most, false, stream)?;
        self.status.check(stream)?;
        stream.synchronize().or_fault("copying on the GPU")?;
        Ok(outcome)
    }
}
