//! From what is stored to the fast layout, on the GPU: some strips at a time are decoded to memory,
//! counted, and packed.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ops::Range;

use cudarc::driver::{CudaStream, result};

use super::{
    fast::{FastArrays, Places},
    matrix::StoredMatrix,
    task::{ENTRY_BYTES, PackTask, STRIP_ROWS},
};
use crate::{
    Error, Result,
    gpu::{
        Status,
        fault::OrFault,
        memory::Buffer,
        route::{Ready, Route},
    },
};

/// Decoded weights at a time, in bytes.
const SCRATCH_BYTES: u64 = 64_000_000;

pub(super) enum Outcome {
    Fast(FastArrays),
    /// With so many exceptions.
    TooMany(u64),
}

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
    strips: Buffer,
    /// Room for as many exceptions as are allowed.
    entries: Buffer,
    /// The number of exceptions so far.
    total: Buffer,
    status: Status,
}

/// Waits until it is done.
pub(super) fn transcode(matrix: &StoredMatrix, name: &str, most: u64) -> Result<Outcome> {
    let stream = matrix.part().device.new_stream()?;
    let transcoder = Transcoder::new(matrix, name, most, &stream)?;
    for step in &transcoder.steps {
        transcoder.run(step, &stream)?;
    }
    transcoder.finish(most, &stream)
}

impl<'m> Transcoder<'m> {
    fn new(matrix: &'m StoredMatrix, name: &str, most: u64, stream: &CudaStream) -> Result<Self> {
        let (rows, columns) = (matrix.row_count(), matrix.column_count());
        let strip_bytes = 2 * STRIP_ROWS * columns;
        if strip_bytes > SCRATCH_BYTES || u32::try_from(rows * columns).is_err() {
            let problem =
                format!("{name:?} has {rows} x {columns} weights, too many to be transcoded at once");
            return Err(Error::parameter(
                problem,
                "take fewer of its rows or columns, or multiply as stored",
            ));
        }
        let each = STRIP_ROWS * (SCRATCH_BYTES / strip_bytes);
        let (part, mut tasks) = (matrix.part(), Vec::new());
        let step = |first| {
            let rows = first..rows.min(first + each);
            let decode = Route::new(part, None, &[matrix.cut_of(&rows)?], &mut tasks)?;
            Ok(Step { rows, decode })
        };
        let steps = (0..rows).step_by(each as usize).map(step).collect::<Result<_>>()?;
        let device = &part.device;
        Ok(Self {
            matrix,
            steps,
            tasks: Buffer::of(stream, &tasks)?,
            scratch: device.allocate(2 * columns * rows.min(each), "weights to transcode")?,
            strips: FastArrays::allocate(device, rows, columns)?,
            entries: device.allocate(most.min(rows * columns) * ENTRY_BYTES, "exceptions")?,
            total: Buffer::of(stream, &[0_u32])?,
            status: Status::new(device)?,
        })
    }

    /// Puts decoding and transcoding of some strips on the stream.
    fn run(&self, step: &Step, stream: &CudaStream) -> Result<()> {
        let (part, columns) = (self.matrix.part(), self.matrix.column_count());
        let ready = Ready { route: &step.decode, part, tasks: self.tasks.pointer() };
        let weights = self.scratch.pointer();
        // SAFETY: the scratch has room for the step's rows, and only this stream uses it. `self`
        // keeps everything; each of its buffers waits for the context before it is freed.
        unsafe { ready.decode_into_raw(weights, stream, &self.status) }?;
        let strip = step.rows.start / STRIP_ROWS;
        let places = Places::new(self.strips.pointer(), self.matrix.row_count(), columns, strip);
        let task = PackTask {
            weights,
            pitch: columns,
            rows: (step.rows.end - step.rows.start) as u32,
            columns: columns as u32,
            heads: places.heads,
            data: places.data,
            entries: self.entries.pointer(),
            capacity: self.entries.bytes() / ENTRY_BYTES,
            total: self.total.pointer(),
            reserved: 0,
        };
        // SAFETY: the weights are there, after the decoding on the same stream; data and heads have
        // room for all strips of the matrix, of which these are some; exceptions that do not fit
        // the capacity are not written. Lives as above.
        unsafe { part.device.linear_kernels()?.pack(stream, &task) }
    }

    /// Waits, and keeps the exceptions that there are.
    fn finish(self, most: u64, stream: &CudaStream) -> Result<Outcome> {
        let mut total = [0_u32];
        self.total.read(stream, &mut total)?;
        self.status.check(stream)?;
        let total = u64::from(total[0]);
        if total > most {
            return Ok(Outcome::TooMany(total));
        }
        let (device, action) = (&self.matrix.part().device, "copying on the GPU");
        let entries = device.allocate(total * ENTRY_BYTES, "exceptions")?;
        if total > 0 {
            let bytes = entries.bytes() as usize;
            // SAFETY: both have as many bytes, and live until the stream is synchronised below.
            let copied = unsafe {
                result::memcpy_dtod_async(
                    entries.pointer(),
                    self.entries.pointer(),
                    bytes,
                    stream.cu_stream(),
                )
            };
            copied.or_fault(action)?;
        }
        stream.synchronize().or_fault(action)?;
        let (rows, columns) = (self.matrix.row_count(), self.matrix.column_count());
        Ok(Outcome::Fast(FastArrays { device: device.clone(), rows, columns, strips: self.strips, entries }))
    }
}
