//! Chunks of a container: their checksums, and which chunks have passed the check. Chunks of remote
//! containers are fetched one by one, and each is checked whenever it arrives.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use rayon::prelude::*;

use super::shard::{LOCKS, Shard};
use crate::{Result, parallel};

/// Bytes of a read up to which its chunks are fetched one after the other.
const ALONE_BYTES: u64 = 4 << 20;

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

    /// Reads bytes of one section that come over a network: each chunk whole, checked when it
    /// comes, and kept for a while, since other bytes of it are mostly wanted next.
    pub(super) fn read_far(
        &self,
        place: &Range<u64>,
        scratch: &mut Vec<u8>,
    ) -> Result<Range<usize>> {
        let length = (place.end - place.start) as usize;
        let _ahead = (length as u64 > ALONE_BYTES).then(|| self.expect_place(place));
        scratch.resize(length.max(scratch.len()), 0);
        for chunk in self.chunks_of(place) {
            let (bytes, from) = (self.far_chunk(chunk)?, self.chunks[chunk].start);
            let part = place.start.max(from)..place.end.min(self.chunks[chunk].end);
            let to = (part.start - place.start) as usize..(part.end - place.start) as usize;
            let from = (part.start - from) as usize;
            scratch[to.clone()].copy_from_slice(&bytes[from..from + to.len()]);
        }
        Ok(0..length)
    }

    /// A chunk from beyond a network, checked.
    pub(super) fn far_chunk(&self, chunk: usize) -> Result<Arc<Vec<u8>>> {
        let _lock = parallel::lock(&self.locks[chunk % LOCKS]);
        #[cfg(feature = "remote")]
        self.tell_fillers(chunk);
        if let Some(bytes) = self.kept.find(&self.path, chunk) {
            return Ok(bytes);
        }
        let bytes = Arc::new(self.brought_chunk(chunk)?);
        self.kept.add(&self.path, chunk, &bytes);
        Ok(bytes)
    }

    #[cfg(not(feature = "remote"))]
    fn brought_chunk(&self, chunk: usize) -> Result<Vec<u8>> {
        self.fetched_chunk(chunk)
    }

    /// A chunk from beyond a network, anew and checked.
    pub(super) fn fetched_chunk(&self, chunk: usize) -> Result<Vec<u8>> {
        let bytes = self.read_unchecked(self.chunks[chunk].clone())?.into_owned();
        self.accept_checksum(chunk, crc32fast::hash(&bytes))?;
        Ok(bytes)
    }

    /// Checks the chunks that nobody has checked yet.
    pub(super) fn check_other_chunks(&self) -> Result<()> {
        let unchecked = (0..self.chunks.len()).filter(|&chunk| !self.is_checked(chunk));
        let unchecked: Vec<usize> = unchecked.collect();
        let places: Vec<_> = unchecked.iter().map(|&chunk| self.chunks[chunk].clone()).collect();
        let _ahead = self.expect(&places);
        unchecked.into_iter().try_for_each(|chunk| self.check_chunk(chunk))
    }
}
