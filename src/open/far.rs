//! Reads remote containers chunk by chunk, and checks each chunk whenever it arrives.

use std::{ops::Range, sync::Arc};

use super::shard::{LOCKS, Shard};
use crate::{Result, parallel};

/// Bytes of a read up to which its chunks are fetched one after the other.
const ALONE_BYTES: u64 = 4 << 20;

impl Shard {
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

    /// A remote chunk, fetched again and checked.
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
