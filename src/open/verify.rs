//! Verification (spec/format.md, section 9): structure, checksums, or everything.

use std::ops::Range;

use blake3::Hasher;
use rayon::prelude::*;

use super::{
    added,
    beside::{self, Beside},
    decoder::{Cpu, Decoder},
    model::Model,
    original::{FilePieces, OriginalFile, TensorPart, hash},
    shard::Shard,
};
use crate::{
    Error, Result,
    constants::HEAD_BYTES,
    format::{self, IdentifiedFile},
    progress::{Observer, advance},
};

/// How much is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Directory, prefixes, and zeros between arrays and sections. The cost grows with the
    /// directory.
    Structure,
    /// Also the checksums of all stored bytes; runs at the speed of memory.
    Checksums,
    /// Everything: LUTs, indexes, and the hashes of all decoded tensors and original files.
    Full,
}

/// Result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// Tensors whose hashes match; 0 below [`Level::Full`].
    pub tensors: u64,
    /// Original files whose hashes match, so that they would be restored byte for byte.
    pub files: u64,
    /// Decoded bytes of those tensors.
    pub bytes: u64,
    /// Sentences on what could not be checked, because it needs a newer version or another shard.
    pub unchecked: Vec<String>,
}

impl Model {
    /// Verifies all open shards.
    ///
    /// # Errors
    /// [`Error::Corrupt`] at the first problem; [`Error::Io`]; [`Error::Cancelled`].
    pub fn verify(&self, level: Level, observer: &dyn Observer) -> Result<Verification> {
        self.verify_with(level, &Cpu, observer)
    }

    /// Like [`Model::verify`], with a decoder other than the CPU: then the hashes prove that *this
    /// decoder* gives the original. Structure, checksums and codebooks are checked on the CPU in
    /// any case. Below [`Level::Full`] nothing is decoded.
    ///
    /// # Errors
    /// Like [`Model::verify`], and the decoder's errors.
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
                .files()
                .filter(OriginalFile::is_weights)
                .fold(0, |sum: u64, file| sum.saturating_add(file.length())),
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
        self.verify_shards(level, decoder, observer, &mut verification)?;
        let compared = added::verify(self, level == Level::Full)?;
        verification.tensors += compared.tensors;
        verification.bytes += compared.bytes;
        verification.unchecked.extend(compared.unchecked);
        if level == Level::Full {
            self.verify_beside(&mut verification)?;
            self.verify_identity(&mut verification)?;
        }
        Ok(verification)
    }

    fn verify_shards(
        &self,
        level: Level,
        decoder: &dyn Decoder,
        observer: &dyn Observer,
        found: &mut Verification,
    ) -> Result<()> {
        self.shards().iter().try_for_each(|shard| {
            let verify = ShardVerifier { shard, level, decoder, observer, found };
            verify.run().map_err(|error| error.in_file(shard.path()))
        })
    }

    /// The side files beside the containers.
    fn verify_beside(&self, found: &mut Verification) -> Result<()> {
        let Some(root) = self.side_folder()? else {
            let count = self.files_beside().count();
            if count > 0 {
                let what = format!(
                    "{count} side files beside the container, since its folder is not open"
                );
                found.unchecked.push(what);
            }
            return Ok(());
        };
        for file in self.files_beside() {
            match beside::find(root, file)? {
                Beside::Original(_) | Beside::Marked(_) => found.files += 1,
                other => return Err(other.refused(file)),
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
        Error::unless(format::identity(files) == *self.identity().as_bytes(), || {
            let problem = "the identity is not that of the model's files";
            Error::corrupt("directory", 0, problem).in_file(self.shards()[0].path())
        })
    }
}

/// Verifies everything in the open containers, but no files beside them. It works for a model in
/// use, even if other files have the containers' names by now.
///
/// # Errors
/// Like [`Model::verify`].
pub fn verify_containers(model: &Model, observer: &dyn Observer) -> Result<Verification> {
    let mut verification = Verification::default();
    model.verify_shards(Level::Full, &Cpu, observer, &mut verification)?;
    model.verify_identity(&mut verification)?;
    Ok(verification)
}

struct ShardVerifier<'a, 'm> {
    shard: &'m Shard,
    level: Level,
    decoder: &'a dyn Decoder,
    observer: &'a dyn Observer,
    found: &'a mut Verification,
}

impl ShardVerifier<'_, '_> {
    fn run(mut self) -> Result<()> {
        self.padding()?;
        let stored = self.shard.files().filter(|file| !file.is_beside());
        let (weights, side): (Vec<_>, Vec<_>) = stored.partition(OriginalFile::is_weights);
        for file in &weights {
            file.check_header()?;
        }
        // From afar bytes come once: those that decoding does not read are checked at the end.
        let checks_last = self.shard.is_far && self.level == Level::Full;
        if self.level > Level::Structure && !checks_last {
            let (observer, counts) = (self.observer, self.level == Level::Checksums);
            let done = |bytes| advance(observer, if counts { bytes } else { 0 });
            self.shard.check_all_chunks(&done)?;
        }
        if self.level < Level::Full {
            let covered = |&file| match FilePieces::new(file, self.decoder) {
                Err(error) if !error.is_incomplete() => Err(error),
                _ => Ok(()),
            };
            return weights.iter().try_for_each(covered);
        }
        let ahead = self.shard.expect_codebooks();
        for tensor in self.shard.tensors() {
            if let Some(sizes) = tensor.coded()? {
                // Also the last half byte of the gaps, which no thread reads.
                let verified = sizes.verify_codebook(&tensor);
                verified.map_err(|error| tensor.locate(error))?;
            }
        }
        drop(ahead);
        side.iter().try_for_each(|&file| self.side(file))?;
        weights.iter().try_for_each(|&file| self.weights(file))?;
        if checks_last { self.shard.check_other_chunks() } else { Ok(()) }
    }

    /// Zeros between arrays, and between sections.
    fn padding(&self) -> Result<()> {
        let gaps = self.gaps();
        let _ahead = self.shard.expect(&gaps);
        gaps.into_iter().try_for_each(|gap| self.zeros(gap))
    }

    /// The places between arrays, and between sections.
    fn gaps(&self) -> Vec<Range<u64>> {
        let directory = self.shard.directory();
        let mut ends: Vec<u64> =
            directory.sections.iter().map(|section| section.offset.get()).collect();
        let mut gaps = Vec::new();
        for (index, array) in directory.arrays.iter().enumerate() {
            let (place, end) =
                (self.shard.place_of(index), &mut ends[array.section.get() as usize]);
            gaps.push(*end..place.start);
            *end = place.end;
        }
        let mut end = HEAD_BYTES;
        for section in &directory.sections {
            gaps.push(end..section.offset.get());
            end = section.end();
        }
        gaps.push(end..self.shard.directory_range().start);
        gaps.retain(|gap| !gap.is_empty());
        gaps
    }

    fn zeros(&self, place: Range<u64>) -> Result<()> {
        let start = place.start;
        let bytes = self.shard.read_unchecked(place)?;
        let at = bytes.iter().position(|&byte| byte != 0);
        at.map_or(Ok(()), |at| Err(self.shard.corrupt(start + at as u64, "padding is not zero")))
    }

    fn side(&mut self, file: OriginalFile<'_>) -> Result<()> {
        let mut hasher = Hasher::new();
        file.stream(|bytes| {
            hasher.update(bytes);
            Ok(())
        })?;
        self.found.files += 1;
        file.check_hash(hasher.finalize())
    }

    /// Decodes a weights file once, and compares the hashes of its tensors and its own.
    fn weights(&mut self, file: OriginalFile<'_>) -> Result<()> {
        let (pieces, is_whole) = match FilePieces::new(file, self.decoder) {
            Ok(pieces) => (pieces, true),
            Err(Error::Unsupported { what, .. } | Error::NoBase { what, .. }) => {
                self.found.unchecked.push(format!("file {:?}: {what}", file.path()));
                (FilePieces::of_known(file, self.decoder), false)
            }
            Err(error) => return Err(error),
        };
        let (mut file_hasher, mut tensor_hasher) = (Hasher::new(), Hasher::new());
        let (observer, found) = (self.observer, &mut *self.found);
        pieces.for_each(|batch| {
            let (index, (tensors, ())) = rayon::join(
                || {
                    batch
                        .parts
                        .par_iter()
                        .try_for_each(|part| part.prepared.verify_index(part.range.clone()))
                },
                || {
                    rayon::join(
                        || hash_parts(&mut tensor_hasher, &batch.parts, &batch.bytes),
                        || hash(&mut file_hasher, &batch.bytes),
                    )
                },
            );
            index?;
            found.tensors += tensors?;
            found.bytes += batch.bytes.len() as u64;
            advance(observer, batch.bytes.len() as u64)
        })?;
        if !is_whole {
            return Ok(());
        }
        self.found.files += 1;
        file.check_hash(file_hasher.finalize())
    }
}

/// Hashes parts of tensors; returns how many tensors were completed, and found right.
fn hash_parts(hasher: &mut Hasher, parts: &[TensorPart<'_>], mut bytes: &[u8]) -> Result<u64> {
    let (mut completed, mut length) = (0, 0);
    for (after, part) in (1..).zip(parts) {
        length += (part.range.end - part.range.start) as usize;
        let is_last = part.range.end == part.tensor.byte_length()?;
        // Parts of one tensor follow each other; hashed at once they occupy more threads.
        if !is_last && after < parts.len() {
            continue;
        }
        let (head, tail) = bytes.split_at(length);
        hash(hasher, head);
        (bytes, length) = (tail, 0);
        if is_last {
            part.tensor.check_hash(hasher.finalize())?;
            hasher.reset();
            completed += 1;
        }
    }
    Ok(completed)
}

/// Coded bytes per thread below which the CPU has verified a model sooner than a GPU. An H200's
/// host needed 0.35 s to start the GPU and to end, and then verified 2.9 GB/s with 2 threads and
/// 9.8 with 16, and the CPU did 1.3 and 6.7. Measure again with `benches/gpu_commands.py` if
/// a GPU starts or loads faster.
const SMALL_BYTES: u64 = 400_000_000;

/// Whether the threads of the current rayon pool have verified a model before a GPU has started.
/// Nobody then needs to look for one, which takes time too. The cost grows with the number of
/// tensors.
pub fn is_small(model: &Model) -> bool {
    let coded = model.tensors().filter(|tensor| matches!(tensor.coded(), Ok(Some(_))));
    let bytes = coded.filter_map(|tensor| tensor.byte_length().ok()).fold(0, u64::saturating_add);
    bytes < SMALL_BYTES.saturating_mul(rayon::current_num_threads() as u64)
}
