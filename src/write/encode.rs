//! Second pass: all jobs of a plan, on all threads, each to its place in the container.

use super::{
    coding::Coding,
    fingerprint::{Fingerprint, Shared},
    gap::{self, MIN_PORTION_BYTES},
    input::{Side, Weights, changed},
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
    source::SourceTensor,
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
    file: &'a Weights<'a>,
    tensor: &'a SourceTensor,
    /// What has been read of it.
    seen: &'a Shared,
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
    let pass = Pass {
        reads: &plan.reads,
        seen: plan.reads.iter().map(|_| Shared::default()).collect(),
        output,
        observer,
    };
    parallel::for_each(plan.jobs.len(), Worker::default, |worker, index| {
        worker.run(&plan.jobs[index], &pass)
    })?;
    let mut all = plan.reads.iter().zip(&pass.seen);
    match all.find(|(read, seen)| seen.get() != read.fingerprint) {
        Some((Read { file, tensor, .. }, _)) => {
            Err(changed(format_args!("{}: tensor {:?}", file.file.path, tensor.name)))
        }
        None => Ok(()),
    }
}

/// The second pass over all tensors of a container.
struct Pass<'a> {
    reads: &'a [Read<'a>],
    /// What it has read of each.
    seen: Vec<Shared>,
    output: &'a Output,
    observer: &'a dyn Observer,
}

impl<'a> Pass<'a> {
    fn target(&'a self, read: usize, first_array: usize) -> Target<'a> {
        let Read { file, tensor, .. } = self.reads[read];
        let Self { output, observer, .. } = *self;
        Target { first_array, file, tensor, seen: &self.seen[read], output, observer }
    }
}

impl Worker {
    fn run(&mut self, job: &Job<'_>, pass: &Pass<'_>) -> Result<()> {
        let output = pass.output;
        match *job {
            Job::Bytes { array, ref bytes } => output.write_array(array, 0, bytes),
            Job::Prefix { array, file } => output.write_array(array, 0, &file.file.prefix),
            Job::Raw { array, read, ref range } => {
                let (offset, length) = (range.start, range.end - range.start);
                self.input.resize(length as usize, 0);
                let target = pass.target(read, array);
                target.file.read(target.tensor.offset + offset, &mut self.input)?;
                target.seen.add(Fingerprint::of(offset, &self.input));
                output.write_array(array, offset, &self.input)?;
                advance(pass.observer, length)
            }
            Job::Side { array, file } => side(array, file, output),
            Job::Portion { first_array, read, coding, portion } => {
                let target = pass.target(read, first_array);
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
        let end = target.tensor.length.min(first + coding.portion_bytes);
        let mut bit = coding.portion_bits[portion];
        let each = MIN_PORTION_BYTES.next_multiple_of(coding.piece_bytes);
        for part in parallel::cut(first..end, each, 1) {
            let (start, length) = (part.start, part.end - part.start);
            self.read(target, coding, start, length)?;
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
            self.write(target.first_array, target.output)?;
            advance(target.observer, length)?;
            bit = end_bit;
        }
        Ok(())
    }

    /// Reads part of a tensor and what the encoder must see after it.
    fn read(
        &mut self,
        target: Target<'_>,
        coding: &gap::GapCoding,
        start: u64,
        length: u64,
    ) -> Result<()> {
        let (lookahead, part) = (2 * coding.sizes.geometry().lookahead() as u64, length as usize);
        let length = (length + lookahead).min(target.tensor.length - start);
        self.input.resize(length as usize, 0);
        target.file.read(target.tensor.offset + start, &mut self.input)?;
        target.seen.add(Fingerprint::of(start, &self.input[..part]));
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
        let read = |range: std::ops::Range<u64>, weights: &mut Vec<u8>| {
            weights.resize((range.end - range.start) as usize, 0);
            target.file.read(target.tensor.offset + range.start, weights)?;
            target.seen.add(Fingerprint::of(range.start, weights));
            Ok(())
        };
        let mut write = |at: [u64; 3], strips: &EncodedStrips| {
            target.output.write_array(
                target.first_array + tile_arrays::RECORDS,
                at[0],
                &strips.records,
            )?;
            target.output.write_array(
                target.first_array + tile_arrays::BITSTREAM,
                at[1],
                &strips.bitstream,
            )?;
            target.output.write_array(
                target.first_array + tile_arrays::PLANE,
                at[2],
                &strips.plane,
            )?;
            advance(target.observer, 2 * strips.plane.len() as u64)
        };
        coding
            .encode_portion(&encoder, portion, &mut self.scratch, &read, &mut write)
            .map_err(|error| target.changed(error))?;
        self.tile = Some((target.first_array, encoder));
        Ok(())
    }

    fn write(&self, first_array: usize, output: &Output) -> Result<()> {
        let put = |array: usize, piece: PlacedBytes<'_>| {
            if piece.bytes.is_empty() {
                Ok(())
            } else {
                output.write_array(first_array + array, piece.offset, piece.bytes)
            }
        };
        put(gap_arrays::GAPS, self.output.gaps())?;
        put(gap_arrays::OUTPUT_OFFSETS, self.output.output_offsets())?;
        put(gap_arrays::BITSTREAM, self.output.bitstream())?;
        put(gap_arrays::PLANE, self.output.plane())
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
        match error {
            Error::Parameter { .. } => {
                changed(format_args!("{}: tensor {:?}", self.file.file.path, self.tensor.name))
            }
            other => other,
        }
    }
}
