//! Verification (spec/format.md, section 9): structure, checksums, or everything.

use std::ops::Range;

use blake3::Hasher;
use rayon::prelude::*;

use super::{
    Cpu, Decoder, FilePieces, Model, Shard, Tensor,
    beside::{self, Beside},
    decoder::read_parallel,
    head::check_zero,
    original::check_header,
    pieces::TensorPart,
};
use crate::{
    Error, Result,
    constants::HEAD_BYTES,
    format::{
        self, IdentifiedFile,
        records::{FILE_SIDE, FILE_WEIGHTS},
    },
    progress::{Observer, advance},
};

/// How much is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Directory, prefixes, and zeros between arrays and sections. The cost grows with the
    /// directory.
    Structure,
    /// The checksums of all stored bytes too; at the speed of memory.
    Checksums,
    /// Everything: LUTs, indexes, and the hashes of all decoded tensors and original files.
    Full,
}

/// What was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// Tensors whose hashes match; 0 below [`Level::Full`].
    pub tensors: u64,
    /// Original files whose hashes match, so that they would be restored byte for byte.
    pub files: u64,
    /// Decoded bytes of those tensors.
    pub bytes: u64,
    /// What could not be checked, because it needs a newer version or another shard.
    pub unchecked: Vec<String>,
}

impl Model {
    /// Verifies all open shards.
    ///
    /// # Errors
    /// [`Error::Corrupt`] at the first thing that is wrong; [`Error::Io`]; [`Error::Cancelled`].
    pub fn verify(&self, level: Level, observer: &dyn Observer) -> Result<Verification> {
        self.verify_with(level, &Cpu, observer)
    }

    /// As [`Model::verify`], with another decoder than the CPU: then the hashes prove that what
    /// *it* decodes is the original. Structure, checksums and codebooks are checked on the CPU in
    /// any case. Below [`Level::Full`] nothing is decoded.
    ///
    /// # Errors
    /// As [`Model::verify`], and what the decoder answers.
    pub fn verify_with(
        &self,
        level: Level,
        decoder: &dyn Decoder,
        observer: &dyn Observer,
    ) -> Result<Verification> {
        observer.begin(self.verify_bytes(level));
        observer.enter(crate::Stage::Verify);
        self.verify_stage(level, decoder, observer)
    }

    /// The bytes that verification tells an observer of.
    fn verify_bytes(&self, level: Level) -> u64 {
        let bytes = |shard: &Shard| match level {
            Level::Structure => 0,
            Level::Checksums => {
                shard.directory().sections.iter().map(|section| section.length.get()).sum()
            }
            Level::Full => shard
                .directory()
                .files
                .iter()
                .filter(|file| file.kind == FILE_WEIGHTS)
                .fold(0, |sum: u64, file| sum.saturating_add(file.length.get())),
        };
        // Lengths of original files are whatever the directory says, until they are restored.
        self.shards().iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// [`Model::verify_with`] as part of longer work.
    pub(crate) fn verify_stage(
        &self,
        level: Level,
        decoder: &dyn Decoder,
        observer: &dyn Observer,
    ) -> Result<Verification> {
        let mut verification = Verification::default();
        for shard in self.shards() {
            let verify = Verify { shard, level, decoder, observer, found: &mut verification };
            verify.run().map_err(|error| error.in_file(shard.path()))?;
        }
        if level == Level::Full {
            self.verify_beside(&mut verification)?;
            self.verify_identity(&mut verification)?;
        }
        Ok(verification)
    }

    /// The side files beside the containers.
    fn verify_beside(&self, found: &mut Verification) -> Result<()> {
        let Some(root) = self.folder() else {
            let count = beside::recorded(self).count();
            if count > 0 {
                let what = format!(
                    "{count} side files beside the container, since its folder is not open"
                );
                found.unchecked.push(what);
            }
            return Ok(());
        };
        for (shard, index) in beside::recorded(self) {
            let record = &shard.directory().files[index];
            let path = shard.directory().file_path(record);
            match beside::find(root, path, record)? {
                Beside::Original(_) | Beside::Marked(_) => found.files += 1,
                Beside::Changed(_) => return Err(beside::refused(shard, path, beside::CHANGED)),
                Beside::Missing => return Err(beside::refused(shard, path, beside::MISSING)),
            }
        }
        Ok(())
    }

    fn verify_identity(&self, found: &mut Verification) -> Result<()> {
        if !self.is_complete() {
            found.unchecked.push("the model's identity, because shards are missing".to_owned());
            return Ok(());
        }
        let files = self.shards().iter().flat_map(|shard| IdentifiedFile::of(shard.directory()));
        if format::identity(files) == *self.identity().as_bytes() {
            return Ok(());
        }
        let problem = "the identity is not that of the model's files";
        Err(Error::corrupt("directory", 0, problem).in_file(self.shards()[0].path()))
    }
}

struct Verify<'a, 'm> {
    shard: &'m Shard,
    level: Level,
    decoder: &'a dyn Decoder,
    observer: &'a dyn Observer,
    found: &'a mut Verification,
}

impl Verify<'_, '_> {
    fn run(mut self) -> Result<()> {
        self.padding()?;
        let files = &self.shard.directory().files;
        let of = |kind: u32| (0..files.len()).filter(move |&file| files[file].kind == kind);
        let (weights, side): (Vec<usize>, Vec<usize>) =
            (of(FILE_WEIGHTS).collect(), of(FILE_SIDE).collect());
        for &file in &weights {
            check_header(self.shard, file)?;
        }
        if self.level == Level::Structure {
            return weights.iter().try_for_each(|&file| self.cover(file));
        }
        let (observer, counts) = (self.observer, self.level == Level::Checksums);
        self.shard.check_all_chunks(&|bytes| advance(observer, if counts { bytes } else { 0 }))?;
        if self.level == Level::Checksums {
            return weights.iter().try_for_each(|&file| self.cover(file));
        }
        self.codebooks()?;
        side.iter().try_for_each(|&file| self.side(file))?;
        weights.iter().try_for_each(|&file| self.weights(file))
    }

    fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        (0..self.shard.directory().tensors.len()).map(|index| Tensor::new(self.shard, index))
    }

    fn tensors_of(&self, file: usize) -> impl Iterator<Item = Tensor<'_>> {
        self.shard.tensors_of(file).iter().map(|&index| Tensor::new(self.shard, index))
    }

    /// Zeros between sections, and between arrays.
    fn padding(&self) -> Result<()> {
        let directory = self.shard.directory();
        let mut ends: Vec<u64> = vec![0; directory.sections.len()];
        for array in &directory.arrays {
            let section = array.section.get() as usize;
            let offset = array.offset.get();
            let bytes = self.shard.read_section_unchecked(section, ends[section]..offset)?;
            if let Some(position) = bytes.iter().position(|&byte| byte != 0) {
                return Err(self.shard.corrupt(
                    section,
                    ends[section] + position as u64,
                    "padding is not zero",
                ));
            }
            ends[section] = offset + array.length.get();
        }
        let mut end = HEAD_BYTES;
        for section in &directory.sections {
            self.space(end..section.offset.get())?;
            end = section.end();
        }
        self.space(end..self.shard.directory_range().start)
    }

    /// Zeros between two sections.
    fn space(&self, range: Range<u64>) -> Result<()> {
        let start = range.start;
        check_zero("space between sections", start, &self.shard.read_unchecked(range)?)
    }

    fn cover(&self, file: usize) -> Result<()> {
        match FilePieces::new(self.shard, file, self.decoder) {
            Ok(_) | Err(Error::Unsupported { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Codebooks, and what of the index no thread reads.
    fn codebooks(&self) -> Result<()> {
        for tensor in self.tensors() {
            if let Some(sizes) = tensor.coded()? {
                let verified = sizes.verify_codebook(&tensor.arrays());
                verified.map_err(|error| tensor.locate(error))?;
            }
        }
        Ok(())
    }

    fn side(&mut self, file: usize) -> Result<()> {
        let directory = self.shard.directory();
        let record = &directory.files[file];
        let mut hasher = Hasher::new();
        for array in record.array_range() {
            self.shard.stream_array(array, |bytes| {
                hasher.update(bytes);
                Ok(())
            })?;
        }
        self.found.files += 1;
        compare(&hasher, &record.hash, || format!("file {:?}", directory.file_path(record)))
    }

    /// Decodes a weights file once, and compares the hashes of its tensors and its own.
    fn weights(&mut self, file: usize) -> Result<()> {
        let directory = self.shard.directory();
        let record = &directory.files[file];
        let path = directory.file_path(record);
        let pieces = match FilePieces::new(self.shard, file, self.decoder) {
            Ok(pieces) => pieces,
            Err(Error::Unsupported { what, .. }) => {
                self.found.unchecked.push(format!("file {path:?}: {what}"));
                return self.supported_tensors(file);
            }
            Err(error) => return Err(error),
        };
        let (mut file_hasher, mut tensor_hasher) = (Hasher::new(), Hasher::new());
        let (observer, found) = (self.observer, &mut *self.found);
        pieces.for_each(|batch| {
            let (index, (tensors, ())) = rayon::join(
                || batch.parts.par_iter().try_for_each(TensorPart::verify_index),
                || {
                    rayon::join(
                        || hash_parts(&mut tensor_hasher, &batch.parts, &batch.bytes),
                        || super::hash(&mut file_hasher, &batch.bytes),
                    )
                },
            );
            index?;
            found.tensors += tensors?;
            found.bytes += batch.bytes.len() as u64;
            advance(observer, batch.bytes.len() as u64)
        })?;
        self.found.files += 1;
        self.empty_tensors(file)?;
        compare(&file_hasher, &record.hash, || format!("file {path:?}"))
    }

    /// Tensors without bytes are in no batch.
    fn empty_tensors(&mut self, file: usize) -> Result<()> {
        let empty = Hasher::new();
        let mut count = 0;
        for tensor in self.tensors_of(file) {
            if tensor.byte_length()? == 0 {
                compare(&empty, &tensor.record().hash, || format!("tensor {:?}", tensor.name()))?;
                count += 1;
            }
        }
        self.found.tensors += count;
        Ok(())
    }

    /// The tensors of a file that cannot be restored as a whole.
    fn supported_tensors(&mut self, file: usize) -> Result<()> {
        let mut count = 0;
        for tensor in self.tensors_of(file) {
            let prepared = match self.decoder.prepare(tensor) {
                Ok(prepared) => prepared,
                Err(Error::Unsupported { .. }) => continue,
                Err(error) => return Err(error),
            };
            let length = tensor.byte_length()?;
            let mut bytes = vec![0; length as usize];
            read_parallel(&*prepared, 0..length, &mut bytes)?;
            prepared.verify_index(0..length)?;
            let mut hasher = Hasher::new();
            super::hash(&mut hasher, &bytes);
            compare(&hasher, &tensor.record().hash, || format!("tensor {:?}", tensor.name()))?;
            count += 1;
        }
        self.found.tensors += count;
        Ok(())
    }
}

/// Hashes parts of tensors; returns how many tensors were completed, and found right.
fn hash_parts(hasher: &mut Hasher, parts: &[TensorPart<'_>], mut bytes: &[u8]) -> Result<u64> {
    let (mut completed, mut length) = (0, 0);
    for (after, part) in (1..).zip(parts) {
        length += (part.range.end - part.range.start) as usize;
        let is_last = part.is_last()?;
        // Parts of one tensor follow each other; hashed at once they occupy more threads.
        if !is_last && after < parts.len() {
            continue;
        }
        let (head, tail) = bytes.split_at(length);
        super::hash(hasher, head);
        (bytes, length) = (tail, 0);
        if is_last {
            compare(hasher, &part.tensor.record().hash, || {
                format!("tensor {:?}", part.tensor.name())
            })?;
            hasher.reset();
            completed += 1;
        }
    }
    Ok(completed)
}

fn compare(hasher: &Hasher, expected: &[u8; 32], what: impl Fn() -> String) -> Result<()> {
    if hasher.finalize() == *expected { Ok(()) } else { Err(wrong_hash(what())) }
}

/// An error about decoded bytes that are not those of the original.
pub(crate) fn wrong_hash(place: impl std::fmt::Display) -> Error {
    Error::corrupt(place, 0, "its bytes do not have the hash in the directory")
        .remedied("the container is damaged, fetch or make it again")
}
