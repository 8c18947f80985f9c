//! Second pass: all bytes of a plan, each to its place in the container; of tensors on all threads.

use std::{ops::Range, sync::atomic::Ordering};

use super::{
    analysis::fingerprint,
    coding::{Coding, MIN_PORTION_BYTES, groups, portion_bytes, strips},
    output::ContainerOutput,
    plan::{ContainerPlan, Contents},
    tensors::{PlannedEncoding, PlannedTensor},
};
use crate::{
    Error, Result,
    encoding::{
        gap::{GapSizes, PortionEncoder, PortionInput, PortionOutput, stored as gap_arrays},
        tile::{self, Codebook, EncodedStrips, Encoder, stored as tile_arrays},
    },
    format::Coded,
    huffman::{self, CodeLengths, Histogram},
    parallel,
    progress::{Observer, advance},
};

/// What a thread keeps from job to job: about 4 MiB.
#[derive(Default)]
struct Worker {
    input: Vec<u8>,
    portion: PortionOutput,
    strips: EncodedStrips,
    /// The tables of the tensor of the last portion, and the tensor's first array, by which it is
    /// known.
    gap: Option<(usize, (CodeLengths, PortionEncoder))>,
    tile: Option<(usize, Encoder)>,
}

/// A tensor that is being encoded.
#[derive(Clone, Copy)]
struct Target<'a> {
    planned: &'a PlannedTensor<'a>,
    output: &'a ContainerOutput,
    observer: &'a dyn Observer,
}

/// Writes the arrays of a container: the files' own, which are the first ones, then the tensors'.
///
/// # Errors
/// [`Error::Parameter`] if the source is not what the first pass has read; what reading and
/// writing answer.
pub(super) fn encode(
    contents: &Contents<'_>,
    plan: &ContainerPlan<'_>,
    output: &ContainerOutput,
    observer: &dyn Observer,
) -> Result<()> {
    for (array, file) in contents.weights.iter().enumerate() {
        output.write_array(array, 0, &file.file.prefix)?;
    }
    let side = contents.side.iter().filter(|file| file.length > 0);
    for (array, file) in (contents.weights.len()..).zip(side) {
        let mut offset = 0;
        file.read(|bytes| {
            output.write_array(array, offset, bytes)?;
            offset += bytes.len() as u64;
            Ok(())
        })?;
    }
    let tensors = plan.tensors.iter();
    let parts: Vec<(&PlannedTensor<'_>, usize)> = tensors
        .flat_map(|planned| (0..planned.part_count()).map(move |part| (planned, part)))
        .collect();
    parallel::for_each(parts.len(), Worker::default, |worker, index| {
        let (planned, part) = parts[index];
        worker.run(Target { planned, output, observer }, part)
    })?;
    let changed = plan.tensors.iter().find(|tensor| !tensor.is_as_analysed());
    changed.map_or(Ok(()), |tensor| Err(tensor.changed()))
}

impl Worker {
    /// Encodes a part of a tensor; with the first one of a coded tensor goes the codebook.
    fn run(&mut self, target: Target<'_>, part: usize) -> Result<()> {
        let coding = match target.planned.encoding {
            PlannedEncoding::Alias(_) => return Ok(()),
            PlannedEncoding::Raw => {
                let range = target.planned.raw_part(part);
                target.read(range.clone(), 0, &mut self.input)?;
                target.write(0, range.start, &self.input)?;
                return advance(target.observer, self.input.len() as u64);
            }
            PlannedEncoding::Coded(coding) => coding,
        };
        if part == 0 {
            target.write(0, 0, &coding.codebook)?;
        }
        let encoded = match &coding.sizes {
            Coded::Gap(sizes) => self.gap_portion(target, coding, sizes, part),
            Coded::Tile(sizes) => self.tile_portion(target, coding, sizes, part),
        };
        // Weights that the code has no room for are not those of the first pass.
        encoded.map_err(|error| match error {
            Error::Parameter { .. } => target.planned.changed(),
            other => other,
        })
    }

    /// Encodes a portion, in parts of [`MIN_PORTION_BYTES`] or little more; only tensors of more
    /// than 4 GiB have portions of several parts, and those that come from long strips.
    fn gap_portion(
        &mut self,
        target: Target<'_>,
        coding: &Coding,
        sizes: &GapSizes,
        portion: usize,
    ) -> Result<()> {
        let new = || {
            let lengths = huffman::read_codebook(&coding.codebook)?;
            let encoder = PortionEncoder::new(&lengths, sizes);
            Ok((lengths, encoder))
        };
        let (lengths, encoder) = kept(&mut self.gap, target, new)?;
        let length = target.planned.tensor.length;
        let portion_bytes = portion_bytes(length, coding.piece_bytes);
        let first = portion as u64 * portion_bytes;
        let end = length.min(first + portion_bytes);
        let mut bit = coding.portion_starts[portion];
        let each = MIN_PORTION_BYTES.next_multiple_of(coding.piece_bytes);
        let lookahead = 2 * sizes.geometry().lookahead() as u64;
        for part in parallel::cut(first..end, each, 1) {
            let (start, length) = (part.start, part.end - part.start);
            target.read(part.clone(), lookahead, &mut self.input)?;
            let end_bit = if part.end == end {
                coding.portion_starts[portion + 1]
            } else {
                bit + lengths.bits(&Histogram::of(&self.input[..length as usize]))?
            };
            let input = PortionInput {
                weights: &self.input,
                elements: length as usize / 2,
                first_element: start / 2,
                start_bit: bit,
                end_bit,
            };
            encoder.encode(&input, &mut self.portion)?;
            for (array, piece) in [
                (gap_arrays::GAPS, self.portion.gaps()),
                (gap_arrays::OUTPUT_OFFSETS, self.portion.output_offsets()),
                (gap_arrays::BITSTREAM, self.portion.bitstream()),
                (gap_arrays::PLANE, self.portion.plane()),
            ] {
                target.write(array, piece.offset, piece.bytes)?;
            }
            advance(target.observer, length)?;
            bit = end_bit;
        }
        Ok(())
    }

    fn tile_portion(
        &mut self,
        target: Target<'_>,
        coding: &Coding,
        sizes: &tile::Sizes,
        portion: usize,
    ) -> Result<()> {
        let geometry = sizes.geometry();
        let new = || Ok(Encoder::new(&Codebook::from_bytes(&coding.codebook)?, geometry));
        let encoder = kept(&mut self.tile, target, new)?;
        let mut byte = coding.portion_starts[portion];
        // The last portion ends with the array, which is a number of whole words.
        let end = match portion + 1 {
            next if next == coding.portion_count() => sizes.bitstream_bytes(),
            next => coding.portion_starts[next],
        };
        let output = &mut self.strips;
        for (group, range) in groups(geometry, portion) {
            output.clear();
            target.read(range, 0, &mut self.input)?;
            for (strip, weights) in strips(geometry, group.clone(), &self.input) {
                let at = byte + output.bitstream.len() as u64;
                encoder.encode_strip(strip, weights, at, output)?;
            }
            let next = byte + output.bitstream.len() as u64;
            if next > end {
                return Err(target.planned.changed());
            }
            let (records, plane) = (sizes.records_of(&group)?, sizes.plane_of(&group)?);
            target.write(tile_arrays::RECORDS, records.start, &output.records)?;
            target.write(tile_arrays::BITSTREAM, byte, &output.bitstream)?;
            target.write(tile_arrays::PLANE, plane.start, &output.plane)?;
            advance(target.observer, 2 * output.plane.len() as u64)?;
            byte = next;
        }
        if byte == end { Ok(()) } else { Err(target.planned.changed()) }
    }
}

/// The tables of a tensor, made if those of another one are there.
fn kept<'a, T>(
    tables: &'a mut Option<(usize, T)>,
    target: Target<'_>,
    new: impl FnOnce() -> Result<T>,
) -> Result<&'a T> {
    let array = target.planned.first_array;
    if tables.as_ref().is_none_or(|(of, _)| *of != array) {
        *tables = Some((array, new()?));
    }
    Ok(&tables.as_ref().expect("they were just made").1)
}

impl Target<'_> {
    /// Reads a range of the tensor's bytes into `bytes`, and up to `lookahead` more, which are of
    /// another range.
    fn read(&self, range: Range<u64>, lookahead: u64, bytes: &mut Vec<u8>) -> Result<()> {
        let PlannedTensor { file, tensor, seen, .. } = self.planned;
        let end = tensor.length.min(range.end + lookahead);
        bytes.resize((end - range.start) as usize, 0);
        file.read(tensor.offset + range.start, bytes)?;
        let own = &bytes[..(range.end - range.start) as usize];
        seen.fetch_xor(fingerprint(range.start, own), Ordering::Relaxed);
        Ok(())
    }

    /// Writes bytes of one of the tensor's arrays, if there are any.
    fn write(&self, array: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.output.write_array(self.planned.first_array + array, offset, bytes)
    }
}
