//! Second pass: writes all bytes of a plan to their places in the container, those of tensors on
//! all threads.

use std::{
    fs::File,
    ops::Range,
    path::PathBuf,
    sync::{Mutex, PoisonError, atomic::Ordering},
};

use zerocopy::{IntoBytes, little_endian::U32};

use super::{
    coding::{Coding, MIN_PORTION_BYTES, groups, portion_bytes, strips},
    fingerprint::fingerprint,
    plan::{ContainerPlan, Contents, PlannedEncoding, PlannedTensor, RAW_PART_BYTES},
    spill::Spill,
};
use crate::{
    Error, Result,
    encoding::{
        delta::{self, DeltaSizes},
        gap::{GapSizes, PortionEncoder, PortionInput, PortionOutput},
        tile::{self, Codebook, EncodedStrips, Encoder},
    },
    format::{
        Coded, Directory, Header,
        checksum::{PieceChecksum, SectionChecksums},
        directory::ShardRecord,
    },
    huffman::{self, CodeLengths, Histogram},
    parallel,
    platform::write_all_at,
    progress::{Observer, advance},
};

/// Buffers that a thread keeps from job to job: about 4 MiB.
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
    spill: Option<&'a Spill>,
    observer: &'a dyn Observer,
}

/// Writes the arrays of a container: the files' own, which are the first ones, then the tensors'.
pub(super) fn encode(
    contents: &Contents<'_>,
    plan: &ContainerPlan<'_>,
    (output, spill): (&ContainerOutput, Option<&Spill>),
    observer: &dyn Observer,
) -> Result<()> {
    let weights = contents.weights.len();
    let side = contents.side.iter().filter(|file| contents.stores_side && file.length > 0);
    let side: Vec<_> = side.collect();
    let files = weights + side.len();
    let tensors = plan.tensors.iter();
    let parts: Vec<(&PlannedTensor<'_>, usize)> = tensors
        .flat_map(|planned| (0..planned.part_count()).map(move |part| (planned, part)))
        .collect();
    parallel::for_each(files + parts.len(), Worker::default, |worker, index| {
        if index < weights {
            return output.write_array(index, 0, &contents.weights[index].file.prefix);
        }
        if index < files {
            let mut offset = 0;
            let read = side[index - weights].read(|bytes| {
                output.write_array(index, offset, bytes)?;
                offset += bytes.len() as u64;
                Ok(())
            });
            return read.map(drop);
        }
        let (planned, part) = parts[index - files];
        worker.run(Target { planned, output, spill, observer }, part)
    })?;
    let changed = plan.tensors.iter().find(|tensor| !tensor.is_as_analysed());
    changed.map_or(Ok(()), |tensor| Err(tensor.changed()))
}

impl Worker {
    /// Encodes a part of a tensor: of a coded one a portion, with the first of which goes the
    /// codebook.
    fn run(&mut self, target: Target<'_>, part: usize) -> Result<()> {
        let coding = match target.planned.encoding {
            PlannedEncoding::Alias(_) => {
                return advance(target.observer, target.planned.tensor.length);
            }
            PlannedEncoding::Raw => {
                let start = part as u64 * RAW_PART_BYTES;
                let end = target.planned.tensor.length.min(start + RAW_PART_BYTES);
                target.read(start..end, 0, &mut self.input)?;
                target.write(0, start, &self.input)?;
                return advance(target.observer, self.input.len() as u64);
            }
            PlannedEncoding::Coded(coding) => coding,
        };
        if part == 0 {
            target.write(0, 0, &coding.codebook)?;
        }
        let encoded = match &coding.sizes {
            Coded::Gap(sizes) => self.gap_portion(target, coding, sizes, part),
            Coded::Tile(sizes) | Coded::Float(sizes) => {
                self.tile_portion(target, coding, sizes, part)
            }
            Coded::Delta(sizes) => self.delta_portion(target, coding, sizes, part),
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
            for (array, at, bytes) in self.portion.parts() {
                target.write(array, at, bytes)?;
            }
            advance(target.observer, length)?;
            bit = end_bit;
        }
        Ok(())
    }

    /// Copies a segment, with the record of its start; with that of the last one goes its end.
    fn delta_portion(
        &mut self,
        target: Target<'_>,
        coding: &Coding,
        sizes: &DeltaSizes,
        segment: usize,
    ) -> Result<()> {
        let (start, end) = (coding.portion_starts[segment], coding.portion_starts[segment + 1]);
        self.input.resize((end - start) as usize, 0);
        let spill = target.spill.expect("the first pass has spilled the segments");
        spill.read(coding.spilled[segment], &mut self.input)?;
        target.write(delta::BITSTREAM, start, &self.input)?;
        let mut records = start.to_le_bytes().to_vec();
        if segment + 1 == coding.portion_count() {
            records.extend(end.to_le_bytes());
        }
        target.write(delta::RECORDS, 8 * segment as u64, &records)?;
        let elements = sizes.segment(segment as u64);
        advance(target.observer, 2 * (elements.end - elements.start))
    }

    fn tile_portion(
        &mut self,
        target: Target<'_>,
        coding: &Coding,
        sizes: &tile::TileSizes,
        portion: usize,
    ) -> Result<()> {
        let geometry = sizes.geometry();
        let split = sizes.split();
        let new = || {
            let codebook = Codebook::from_bytes(&coding.codebook)?;
            Ok(Encoder::new(&codebook, geometry).split_as(split))
        };
        let encoder = kept(&mut self.tile, target, new)?;
        let mut byte = coding.portion_starts[portion];
        // The last portion ends with the array, which is a number of whole words.
        let end = match portion + 1 {
            next if next == coding.portion_count() => sizes.array_lengths()[tile::BITSTREAM],
            next => coding.portion_starts[next],
        };
        let output = &mut self.strips;
        for (group, range) in groups(geometry, split, portion) {
            output.clear();
            target.read(range, 0, &mut self.input)?;
            for (strip, weights) in strips(geometry, split, group.clone(), &self.input) {
                let at = byte + output.bitstream.len() as u64;
                encoder.encode_strip(strip, weights, at, output)?;
            }
            let next = byte + output.bitstream.len() as u64;
            if next > end {
                return Err(target.planned.changed());
            }
            let (records, plane) = (sizes.records_of(&group)?, sizes.plane_of(&group)?);
            target.write(tile::RECORDS, records.start, &output.records)?;
            target.write(tile::BITSTREAM, byte, &output.bitstream)?;
            target.write(tile::PLANE, plane.start, &output.plane)?;
            advance(target.observer, self.input.len() as u64)?;
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
) -> Result<&'a mut T> {
    let array = target.planned.first_array;
    if tables.as_ref().is_none_or(|(of, _)| *of != array) {
        *tables = Some((array, new()?));
    }
    Ok(&mut tables.as_mut().expect("they were just made").1)
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

/// A container being written.
#[derive(Debug)]
pub(super) struct ContainerOutput {
    /// The file; `None` while it is closed.
    file: Option<File>,
    path: PathBuf,
    pub(super) directory: Directory,
    directory_offset: u64,
    checksums: Vec<Mutex<SectionChecksums>>,
}

impl ContainerOutput {
    /// Begins a new file, which is or will be at `path`, with the header of an unfinished
    /// container, and takes the plan's directory.
    pub(super) fn new(file: File, path: PathBuf, plan: &mut ContainerPlan<'_>) -> Result<Self> {
        let directory = std::mem::take(&mut plan.directory);
        let sections = directory.sections.len();
        let output = Self {
            file: Some(file),
            path,
            directory,
            directory_offset: plan.directory_offset,
            checksums: (0..sections).map(|_| Mutex::default()).collect(),
        };
        output.write_at(0, Header::unfinished().as_bytes())?;
        Ok(output)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        write_all_at(self.file(), bytes, offset)
            .map_err(|error| Error::io("writing", &self.path, error))
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("it is open while it is written")
    }

    /// Writes bytes of an array, `offset` counted from the array's start. Any thread may write any
    /// part once.
    ///
    /// # Panics
    /// If the bytes exceed the array.
    pub(super) fn write_array(&self, array: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let record = &self.directory.arrays[array];
        assert!(offset + bytes.len() as u64 <= record.length.get(), "bytes within their array");
        let section = record.section.get() as usize;
        let in_section = record.offset.get() + offset;
        self.write_at(self.directory.sections[section].offset.get() + in_section, bytes)?;
        let piece = PieceChecksum::new(in_section, bytes);
        parallel::lock(&self.checksums[section]).add(piece);
        Ok(())
    }

    /// Closes a file that is at its path until it is sealed, since a model may have more shards
    /// than a process may have files open.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Writes directory, footer and header, and makes sure that they are on the disk.
    pub(super) fn seal(&mut self, shard: ShardRecord) -> Result<()> {
        if self.file.is_none() {
            let file = File::options().write(true).open(&self.path);
            self.file = Some(file.map_err(|error| Error::io("opening", &self.path, error))?);
        }
        for (section, checksums) in self.directory.sections.iter().zip(self.checksums.drain(..)) {
            let checksums = checksums.into_inner().unwrap_or_else(PoisonError::into_inner);
            let checksums = checksums.finish(section.length.get());
            self.directory.checksums.extend(checksums.into_iter().map(U32::new));
        }
        let (header, bytes) = seal(&mut self.directory, self.directory_offset, shard)?;
        self.write_at(self.directory_offset, &bytes)?;
        self.write_at(header.footer_offset(), header.as_bytes())?;
        self.sync()?;
        self.write_at(0, header.as_bytes())?;
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        self.file().sync_all().map_err(|error| Error::io("syncing", &self.path, error))
    }

    /// The sealed file.
    pub(super) fn into_file(self) -> File {
        self.file.expect("it is open since it was sealed")
    }
}

/// Makes a directory with all its checksums that of one shard of a model. Returns header and
/// directory as they are stored.
pub(super) fn seal(
    directory: &mut Directory,
    directory_offset: u64,
    shard: ShardRecord,
) -> Result<(Header, Vec<u8>)> {
    directory.shard = shard;
    let bytes = directory.to_bytes();
    let header = Header::complete(directory_offset, &bytes)?.with_minor(directory.version_minor());
    Ok((header, bytes))
}
