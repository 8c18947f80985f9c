//! Chunks of a container: their checksums, and which chunks have passed the check.

use std::{ops::Range, sync::atomic::Ordering};

use rayon::prelude::*;

use super::shard::{LOCKS, Shard};
use crate::{Result, parallel};

impl Shard {
    /// The chunks that bytes of one section touch.
    pub(super) fn chunks_of(&self, place: &Range<u64>) -> impl Iterator<Item = usize> + use<'_> {
        let first = self.chunks.partition_point(|chunk| chunk.end <= place.start);
        let end = place.end;
        let chunks = self.chunks[first..].iter().take_while(move |chunk| chunk.start < end);
        (first..).zip(chunks).map(|(index, _)| index)
    }

    /// Chunks of `place` that have not been checked; of a remote container all, because they are
    /// fetched again each time. None if checksums are not checked.
    pub(super) fn unchecked_chunks(
        &self,
        place: &Range<u64>,
    ) -> impl Iterator<Item = usize> + use<'_> {
        let chunks = self.check_checksums.then(|| self.chunks_of(place));
        chunks.into_iter().flatten().filter(|&chunk| self.is_far || !self.is_checked(chunk))
    }

    pub(super) fn is_checked(&self, chunk: usize) -> bool {
        self.checked[chunk / 64].load(Ordering::Acquire) >> (chunk % 64) & 1 == 1
    }

    /// Checks the chunks that bytes of one section touch, and that were not checked yet.
    pub(super) fn check(&self, place: &Range<u64>) -> Result<()> {
        self.unchecked_chunks(place).try_for_each(|chunk| self.check_chunk(chunk))
    }

    /// Checks the chunks of an array that were not checked yet.
    pub(crate) fn check_array(&self, array: usize) -> Result<()> {
        self.check(&self.place_of(array))
    }

    /// Checks one chunk, unless another thread did so meanwhile.
    pub(super) fn check_chunk(&self, chunk: usize) -> Result<()> {
        let _lock = parallel::lock(&self.locks[chunk % LOCKS]);
        if self.is_checked(chunk) { Ok(()) } else { self.check_again(chunk).map(drop) }
    }

    /// Checks one chunk, whatever was checked before; its length in bytes.
    fn check_again(&self, chunk: usize) -> Result<u64> {
        let bytes = self.read_unchecked(self.chunks[chunk].clone())?;
        self.accept_checksum(chunk, crc32fast::hash(&bytes))?;
        Ok(bytes.len() as u64)
    }

    /// Checks every chunk again, in parallel.
    pub(super) fn check_all_chunks(&self, done: &(dyn Fn(u64) -> Result<()> + Sync)) -> Result<()> {
        let _ahead = self.expect_chunks();
        let chunks = (0..self.chunks.len()).par_bridge();
        chunks.try_for_each(|chunk| done(self.check_again(chunk)?))
    }

    /// Compares the checksum of a chunk's bytes, and remembers that it is right.
    pub(super) fn accept_checksum(&self, chunk: usize, checksum: u32) -> Result<()> {
        if checksum != self.directory.checksums[chunk].get() {
            let problem =
                "the checksum of the 1 MiB from here on does not match: the file is damaged";
            return Err(self.corrupt(self.chunks[chunk].start, problem).remedied("fetch it again"));
        }
        self.checked[chunk / 64].fetch_or(1 << (chunk % 64), Ordering::Release);
        Ok(())
    }
}
