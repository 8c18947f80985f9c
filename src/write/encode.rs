//! Second pass: all jobs of a plan, on all threads, each to its place in the container.

use super::{
    analysis::{Coding, MIN_CHUNK_BYTES},
    output::Output,
    plan::{Job, Plan},
};
use crate::{
    Error, Result,
    encoding::gap::{ChunkEncoder, ChunkInput, ChunkOutput, Piece},
    huffman::Histogram,
    io::{FileReader, ReadAt},
    parallel,
    progress::{Observer, advance},
    source::{SideFile, SourceTensor, WeightsFile},
};

/// Bytes of a side file that are copied in one go.
const COPY_BYTES: u64 = 1 << 20;

/// What a thread keeps from job to job: about 4 MiB.
#[derive(Default)]
struct Worker {
    input: Vec<u8>,
    output: ChunkOutput,
    /// The tables of the tensor of the last chunk, and the tensor's first array, by which it is known.
    encoder: Option<(usize, ChunkEncoder)>,
}

/// Does all jobs of a plan.
pub(super) fn encode(plan: &Plan<'_>, output: &Output, observer: &dyn Observer) -> Result<()> {
    parallel::for_each(plan.jobs.len(), Worker::default, |worker, index| {
        worker.run(&plan.jobs[index], output, observer)
    })
}

impl Worker {
    fn run(&mut self, job: &Job<'_>, output: &Output, observer: &dyn Observer) -> Result<()> {
        match *job {
            Job::Bytes { array, ref bytes } => output.write_array(array, 0, bytes),
            Job::Prefix { array, file } => output.write_array(array, 0, &file.prefix),
            Job::Raw { array, file, tensor, offset, length } => {
                self.input.resize(length as usize, 0);
                file.read_exact_at(tensor.offset + offset, &mut self.input)?;
                output.write_array(array, offset, &self.input)?;
                advance(observer, length)
            }
            Job::Side { array, file } => self.side(array, file, output),
            Job::Chunk { first_array, file, tensor, coding, chunk } => {
                self.chunk(first_array, file, tensor, coding, chunk, output, observer)
            }
        }
    }

    fn side(&mut self, array: usize, file: &SideFile, output: &Output) -> Result<()> {
        let reader = FileReader::open(&file.file)?;
        let mut offset = 0;
        while offset < file.length {
            self.input.resize(COPY_BYTES.min(file.length - offset) as usize, 0);
            reader
                .read_exact_at(offset, &mut self.input)
                .map_err(|error| Error::io("reading", &file.file, error))?;
            output.write_array(array, offset, &self.input)?;
            offset += self.input.len() as u64;
        }
        Ok(())
    }

    /// Encodes a chunk in parts of at most [`MIN_CHUNK_BYTES`]; only tensors of more than 4 GiB have chunks of several.
    #[expect(clippy::too_many_arguments, reason = "they are one job")]
    fn chunk(
        &mut self,
        first_array: usize,
        file: &WeightsFile,
        tensor: &SourceTensor,
        coding: &Coding,
        chunk: usize,
        output: &Output,
        observer: &dyn Observer,
    ) -> Result<()> {
        if self.encoder.as_ref().is_none_or(|&(array, _)| array != first_array) {
            self.encoder = Some((first_array, ChunkEncoder::new(&coding.lengths, &coding.layout)));
        }
        let first = chunk as u64 * coding.chunk_bytes;
        let end = tensor.length.min(first + coding.chunk_bytes);
        let (mut start, mut bit) = (first, coding.chunk_bits[chunk]);
        while start < end {
            let length = MIN_CHUNK_BYTES.min(end - start);
            self.read(file, tensor, coding, start, length)?;
            let is_last = start + length == end;
            let end_bit = if is_last {
                coding.chunk_bits[chunk + 1]
            } else {
                bit + coding.lengths.bits(&Histogram::of(&self.input[..length as usize]))?
            };
            let input = ChunkInput {
                weights: &self.input,
                elements: length as usize / 2,
                first_element: start / 2,
                start_bit: bit,
                end_bit,
            };
            let (_, encoder) = self.encoder.as_ref().expect("it was just made");
            encoder.encode(&input, &mut self.output).map_err(|error| changed(file, tensor, error))?;
            self.write(first_array, output)?;
            advance(observer, length)?;
            (start, bit) = (start + length, end_bit);
        }
        Ok(())
    }

    /// Reads part of a tensor and what the encoder must see behind it.
    fn read(
        &mut self,
        file: &WeightsFile,
        tensor: &SourceTensor,
        coding: &Coding,
        start: u64,
        length: u64,
    ) -> Result<()> {
        let lookahead = 2 * coding.layout.geometry().lookahead() as u64;
        let length = (length + lookahead).min(tensor.length - start);
        self.input.resize(length as usize, 0);
        file.read_exact_at(tensor.offset + start, &mut self.input)
    }

    fn write(&self, first_array: usize, output: &Output) -> Result<()> {
        let put = |array: usize, piece: Piece<'_>| {
            if piece.bytes.is_empty() {
                Ok(())
            } else {
                output.write_array(first_array + array, piece.offset, piece.bytes)
            }
        };
        put(1, self.output.gaps())?;
        put(2, self.output.output_offsets())?;
        put(3, self.output.bitstream())?;
        put(4, self.output.plane())
    }
}

/// Weights that are not those of the first pass.
fn changed(file: &WeightsFile, tensor: &SourceTensor, error: Error) -> Error {
    match error {
        Error::Parameter { problem, .. } => Error::parameter(
            format!(
                "{}: tensor {:?} changed while it was being compressed ({problem})",
                file.path, tensor.name
            ),
            "compress again, with nothing else writing to the source",
        ),
        other => other,
    }
}
