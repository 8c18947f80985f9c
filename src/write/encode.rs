//! Second pass: all jobs of a plan, on all threads, each to its place in the container.

use super::{
    coding::Coding,
    gap::{self, MIN_CHUNK_BYTES},
    input::{Side, Weights},
    output::Output,
    plan::{Job, Plan},
    tile,
};
use crate::{
    Error, Result,
    encoding::{
        gap::{ChunkEncoder, ChunkInput, ChunkOutput, Piece},
        tile::{EncodedStrips, Encoder},
    },
    huffman::Histogram,
    parallel,
    progress::{Observer, advance},
    source::SourceTensor,
};

/// What a thread keeps from job to job: about 4 MiB.
#[derive(Default)]
struct Worker {
    input: Vec<u8>,
    output: ChunkOutput,
    scratch: tile::Scratch,
    /// The tables of the tensor of the last chunk, and the tensor's first array, by which it is known.
    gap: Option<(usize, ChunkEncoder)>,
    tile: Option<(usize, Encoder)>,
}

/// A tensor that is being encoded.
#[derive(Clone, Copy)]
struct Target<'a> {
    first_array: usize,
    file: &'a Weights<'a>,
    tensor: &'a SourceTensor,
    output: &'a Output,
    observer: &'a dyn Observer,
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
            Job::Prefix { array, file } => output.write_array(array, 0, &file.file.prefix),
            Job::Raw { array, file, tensor, offset, length } => {
                self.input.resize(length as usize, 0);
                file.read(tensor.offset + offset, &mut self.input)?;
                output.write_array(array, offset, &self.input)?;
                advance(observer, length)
            }
            Job::Side { array, file } => side(array, file, output),
            Job::Chunk { first_array, file, tensor, coding, chunk } => {
                let target = Target { first_array, file, tensor, output, observer };
                match coding {
                    Coding::Gap(coding) => self.gap_chunk(target, coding, chunk),
                    Coding::Tile(coding) => self.tile_chunk(target, coding, chunk),
                }
            }
        }
    }

    /// Encodes a chunk in parts of at most [`MIN_CHUNK_BYTES`]; only tensors of more than 4 GiB have chunks of several, and those that come
    /// from long strips.
    fn gap_chunk(&mut self, target: Target<'_>, coding: &gap::Coding, chunk: usize) -> Result<()> {
        if self.gap.as_ref().is_none_or(|&(array, _)| array != target.first_array) {
            self.gap = Some((target.first_array, ChunkEncoder::new(&coding.lengths, &coding.layout)));
        }
        let first = chunk as u64 * coding.chunk_bytes;
        let end = target.tensor.length.min(first + coding.chunk_bytes);
        let (mut start, mut bit) = (first, coding.chunk_bits[chunk]);
        while start < end {
            let length = MIN_CHUNK_BYTES.next_multiple_of(coding.piece_bytes).min(end - start);
            self.read(target, coding, start, length)?;
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
            let (_, encoder) = self.gap.as_ref().expect("it was just made");
            encoder.encode(&input, &mut self.output).map_err(|error| target.changed(error))?;
            self.write(target.first_array, target.output)?;
            advance(target.observer, length)?;
            (start, bit) = (start + length, end_bit);
        }
        Ok(())
    }

    /// Reads part of a tensor and what the encoder must see behind it.
    fn read(&mut self, target: Target<'_>, coding: &gap::Coding, start: u64, length: u64) -> Result<()> {
        let lookahead = 2 * coding.layout.geometry().lookahead() as u64;
        let length = (length + lookahead).min(target.tensor.length - start);
        self.input.resize(length as usize, 0);
        target.file.read(target.tensor.offset + start, &mut self.input)
    }

    fn tile_chunk(&mut self, target: Target<'_>, coding: &tile::Coding, chunk: usize) -> Result<()> {
        let encoder = match self.tile.take() {
            Some((array, encoder)) if array == target.first_array => encoder,
            _ => coding.encoder()?,
        };
        let read = |range: std::ops::Range<u64>, weights: &mut Vec<u8>| {
            weights.resize((range.end - range.start) as usize, 0);
            target.file.read(target.tensor.offset + range.start, weights)
        };
        let mut write = |at: [u64; 3], strips: &EncodedStrips| {
            target.output.write_array(target.first_array + 1, at[0], &strips.records)?;
            target.output.write_array(target.first_array + 2, at[1], &strips.bitstream)?;
            target.output.write_array(target.first_array + 3, at[2], &strips.plane)?;
            advance(target.observer, 2 * strips.plane.len() as u64)
        };
        coding
            .encode_chunk(&encoder, chunk, &mut self.scratch, &read, &mut write)
            .map_err(|error| target.changed(error))?;
        self.tile = Some((target.first_array, encoder));
        Ok(())
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

fn side(array: usize, file: &Side<'_>, output: &Output) -> Result<()> {
    let mut offset = 0;
    file.read(|bytes| {
        output.write_array(array, offset, bytes)?;
        offset += bytes.len() as u64;
        Ok(())
    })
    .map(drop)
}

impl Target<'_> {
    /// Weights that are not those of the first pass.
    fn changed(&self, error: Error) -> Error {
        let (path, name) = (&self.file.file.path, &self.tensor.name);
        match error {
            Error::Parameter { problem, .. } => Error::parameter(
                format!("{path}: tensor {name:?} changed while it was being compressed ({problem})"),
                "compress again, with nothing else writing to the source",
            ),
            other => other,
        }
    }
}
