//! Second pass: all jobs of a plan, on all threads, each to its place in the container.

use std::ops::Range;

use super::{
    coding::Coding,
    fingerprint::Fingerprint,
    gap::{self, MIN_PORTION_BYTES},
    input::{Side, changed},
    output::Output,
    plan::{ContainerPlan, Job, Read},
    tile,
};
use crate::{
    Error, Result,
    encoding::{
        gap::{PlacedBytes, PortionEncoder, PortionInput, PortionOutput, stored as gap_arrays},
        tile::{EncodedStrips, Encoder, stored as tile_arrays},
    },
    huffman::Histogram,
    parallel,
    progress::{Observer, advance},
};

/// What a thread keeps from job to job: about 4 MiB.
#[derive(Default)]
struct Worker {
    input: Vec<u8>,
    output: PortionOutput,
    scratch: tile::Scratch,
    /// The tables of the tensor of the last portion, and the tensor's first array, by which it is
    /// known.
    gap: Option<(usize, PortionEncoder)>,
    tile: Option<(usize, Encoder)>,
}

/// A tensor that is being encoded.
#[derive(Clone, Copy)]
struct Target<'a> {
    first_array: usize,
    read: &'a Read<'a>,
    output: &'a Output,
    observer: &'a dyn Observer,
}

/// Does all jobs of a plan.
///
/// # Errors
/// [`Error::Parameter`] if the source is not what the first pass has read; what reading and
/// writing answer.
pub(super) fn encode(
    plan: &ContainerPlan<'_>,
    output: &Output,
    observer: &dyn Observer,
) -> Result<()> {
    parallel::for_each(plan.jobs.len(), Worker::default, |worker, index| {
        worker.run(&plan.jobs[index], &plan.reads, output, observer)
    })?;
    match plan.reads.iter().find(|read| read.seen.get() != read.fingerprint) {
        Some(read) => Err(read.changed()),
        None => Ok(()),
    }
}

impl Worker {
    fn run(
        &mut self,
        job: &Job<'_>,
        reads: &[Read<'_>],
        output: &Output,
        observer: &dyn Observer,
    ) -> Result<()> {
        match *job {
            Job::Codebook { array, coding } => output.write_array(array, 0, &coding.codebook()),
            Job::Prefix { array, file } => output.write_array(array, 0, &file.file.prefix),
            Job::Raw { array, read, ref range } => {
                let target = Target { first_array: array, read: &reads[read], output, observer };
                target.read(range.clone(), 0, &mut self.input)?;
                target.write(0, range.start, &self.input)?;
                advance(observer, self.input.len() as u64)
            }
            Job::Side { array, file } => side(array, file, output),
            Job::Portion { first_array, read, coding, portion } => {
                let target = Target { first_array, read: &reads[read], output, observer };
                match coding {
                    Coding::Gap(coding) => self.gap_portion(target, coding, portion),
                    Coding::Tile(coding) => self.tile_portion(target, coding, portion),
                }
            }
        }
    }

    /// Encodes a portion, in parts of [`MIN_PORTION_BYTES`] or little more; only tensors of more
    /// than 4 GiB have portions of several parts, and those that come from long strips.
    fn gap_portion(
        &mut self,
        target: Target<'_>,
        coding: &gap::GapCoding,
        portion: usize,
    ) -> Result<()> {
        if self.gap.as_ref().is_none_or(|&(array, _)| array != target.first_array) {
            self.gap =
                Some((target.first_array, PortionEncoder::new(&coding.lengths, &coding.sizes)));
        }
        let first = portion as u64 * coding.portion_bytes;
        let end = target.read.tensor.length.min(first + coding.portion_bytes);
        let mut bit = coding.portion_bits[portion];
        let each = MIN_PORTION_BYTES.next_multiple_of(coding.piece_bytes);
        let lookahead = 2 * coding.sizes.geometry().lookahead() as u64;
        for part in parallel::cut(first..end, each, 1) {
            let (start, length) = (part.start, part.end - part.start);
            target.read(part.clone(), lookahead, &mut self.input)?;
            let end_bit = if part.end == end {
                coding.portion_bits[portion + 1]
            } else {
                bit + coding.lengths.bits(&Histogram::of(&self.input[..length as usize]))?
            };
            let input = PortionInput {
                weights: &self.input,
                elements: length as usize / 2,
                first_element: start / 2,
                start_bit: bit,
                end_bit,
            };
            let (_, encoder) = self.gap.as_ref().expect("it was just made");
            encoder.encode(&input, &mut self.output).map_err(|error| target.changed(error))?;
            target.put(gap_arrays::GAPS, self.output.gaps())?;
            target.put(gap_arrays::OUTPUT_OFFSETS, self.output.output_offsets())?;
            target.put(gap_arrays::BITSTREAM, self.output.bitstream())?;
            target.put(gap_arrays::PLANE, self.output.plane())?;
            advance(target.observer, length)?;
            bit = end_bit;
        }
        Ok(())
    }

    fn tile_portion(
        &mut self,
        target: Target<'_>,
        coding: &tile::TileCoding,
        portion: usize,
    ) -> Result<()> {
        let encoder = match self.tile.take() {
            Some((array, encoder)) if array == target.first_array => encoder,
            _ => coding.encoder()?,
        };
        let read = |range, weights: &mut Vec<u8>| target.read(range, 0, weights);
        let mut write = |at: [u64; 3], strips: &EncodedStrips| {
            target.write(tile_arrays::RECORDS, at[0], &strips.records)?;
            target.write(tile_arrays::BITSTREAM, at[1], &strips.bitstream)?;
            target.write(tile_arrays::PLANE, at[2], &strips.plane)?;
            advance(target.observer, 2 * strips.plane.len() as u64)
        };
        coding
            .encode_portion(&encoder, portion, &mut self.scratch, &read, &mut write)
            .map_err(|error| target.changed(error))?;
        self.tile = Some((target.first_array, encoder));
        Ok(())
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
    /// Reads a range of the tensor's bytes into `bytes`, and up to `lookahead` more, which are of
    /// another range.
    fn read(&self, range: Range<u64>, lookahead: u64, bytes: &mut Vec<u8>) -> Result<()> {
        let Read { file, tensor, seen, .. } = self.read;
        let end = tensor.length.min(range.end + lookahead);
        bytes.resize((end - range.start) as usize, 0);
        file.read(tensor.offset + range.start, bytes)?;
        let own = &bytes[..(range.end - range.start) as usize];
        seen.add(Fingerprint::of(range.start, own));
        Ok(())
    }

    /// Writes bytes of one of the tensor's arrays, if there are any.
    fn write(&self, array: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.output.write_array(self.first_array + array, offset, bytes)
    }

    fn put(&self, array: usize, piece: PlacedBytes<'_>) -> Result<()> {
        self.write(array, piece.offset, piece.bytes)
    }

    /// Weights that are not those of the first pass.
    fn changed(&self, error: Error) -> Error {
        match error {
            Error::Parameter { .. } => self.read.changed(),
            other => other,
        }
    }
}

impl Read<'_> {
    fn changed(&self) -> Error {
        changed(format_args!("{}: tensor {:?}", self.file.file.path, self.tensor.name))
    }
}
