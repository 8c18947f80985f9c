//! Reading through the cache of chunks, and whole containers.

use std::{
    any::Any,
    ops::Range,
    sync::{Arc, Weak},
};

use super::{
    cache::{Cache, ChunkKey},
    filling::{Filling, LotChunk},
    shard::Shard,
};
use crate::{
    Error, Result, constants::CHECKSUM_CHUNK_BYTES, io::ReadAt, parallel, store::memory_of,
};

/// Bytes that are copied at once of a container that goes to memory.
const WHOLE_PART_BYTES: u64 = 8 << 20;
/// The longest array that is wanted before longer ones.
const SMALL_BYTES: u64 = 1 << 20;

impl Shard {
    fn key(&self, chunk: usize) -> ChunkKey {
        let record = &self.directory().shard;
        ChunkKey {
            identity: record.identity,
            name: self.path().to_owned(),
            shard: record.shard_index.get(),
            chunk,
            checksum: self.directory().checksums[chunk].get(),
        }
    }

    /// A chunk from the cache or from beyond a network, checked.
    pub(super) fn brought_chunk(&self, chunk: usize) -> Result<Vec<u8>> {
        let Some(cache) = &self.cache else { return self.fetched_chunk(chunk) };
        let (key, range) = (self.key(chunk), &self.chunks[chunk]);
        let find = || cache.find(&key, range.end - range.start);
        if let Some(bytes) = find() {
            self.accept_checksum(chunk, key.checksum)?;
            return Ok(bytes);
        }
        let claim = cache.claim(&key);
        let _claim = claim.map_err(|error| Error::io("reading", self.path(), error))?;
        if let Some(bytes) = find() {
            self.accept_checksum(chunk, key.checksum)?;
            return Ok(bytes);
        }
        let bytes = self.fetched_chunk(chunk)?;
        cache.add(&key, &bytes);
        Ok(bytes)
    }

    /// Fetches ranges ahead of reads, in this order, to memory or to the cache.
    pub(super) fn bring(&self, ranges: &[Range<u64>]) -> Option<Box<dyn Any + Send + Sync>> {
        match &self.cache {
            Some(cache) => self.fill(cache, ranges),
            None => self.reader.read_ahead(ranges),
        }
    }

    /// Fills the cache with what it lacks of these ranges, in this order, while they are read.
    /// None if somebody does already.
    fn fill(
        &self,
        cache: &Arc<Cache>,
        ranges: &[Range<u64>],
    ) -> Option<Box<dyn Any + Send + Sync>> {
        let chunks: Vec<usize> = ranges.iter().flat_map(|range| self.chunks_of(range)).collect();
        let mut fillers = parallel::lock(&self.fillers);
        fillers.retain(|filler| filler.strong_count() > 0);
        let mut others = fillers.iter().filter_map(Weak::upgrade);
        if chunks.is_empty() || others.any(|filler| filler.covers(&chunks)) {
            return None;
        }
        let (cache, kept) = (Arc::clone(cache), Arc::clone(&self.kept));
        let chunk = |number| LotChunk { key: self.key(number), range: self.chunks[number].clone() };
        let chunks = chunks.into_iter().map(chunk);
        let filling = Filling::start(cache, kept, Arc::clone(&self.reader), chunks);
        fillers.push(Arc::downgrade(&filling.0));
        Some(Box::new(filling))
    }

    /// Tells fillers which chunk is read now.
    pub(super) fn tell_fillers(&self, chunk: usize) {
        let fillers = parallel::lock(&self.fillers);
        fillers.iter().filter_map(Weak::upgrade).for_each(|filler| filler.move_to(chunk));
    }

    /// The places of arrays that are wanted before long ones: loaders read codebooks, records and
    /// small tensors when they plan.
    fn small_arrays(&self) -> Vec<Range<u64>> {
        let places = (0..self.directory().arrays.len()).map(|array| self.place_of(array));
        places.filter(|place| place.end - place.start <= SMALL_BYTES).collect()
    }

    /// Has the container in memory, where its bytes come while it is read.
    pub(super) fn bring_whole(&mut self) -> Result<()> {
        self.reader = self.read_whole()?.into();
        self.is_far = false;
        Ok(())
    }

    /// All bytes of the container, which come to memory. Chunks are checked as far as there is a
    /// cache.
    fn read_whole(&self) -> Result<Box<dyn ReadAt>> {
        let of_file = |error| Error::io("reading", self.path(), error);
        if self.cache.is_none()
            && let Some(whole) = self.reader.bring_whole(&self.small_arrays())
        {
            return whole.map_err(of_file);
        }
        let length = self.file_length();
        let mut bytes = memory_of(length).map_err(of_file)?;
        let _ahead = self.bring(&self.chunks);
        for (index, chunk) in self.chunks.iter().enumerate() {
            self.append_until(chunk.start, &mut bytes)?;
            if self.cache.is_some() {
                bytes.extend_from_slice(&self.far_chunk(index)?);
            } else {
                bytes.extend_from_slice(&self.fetched_chunk(index)?);
            }
        }
        self.append_until(length, &mut bytes)?;
        Ok(Box::new(bytes))
    }

    /// Reads what follows the bytes that are here.
    fn append_until(&self, end: u64, bytes: &mut Vec<u8>) -> Result<()> {
        let rest = bytes.len() as u64..end;
        parallel::cut(rest, WHOLE_PART_BYTES, CHECKSUM_CHUNK_BYTES).try_for_each(|part| {
            bytes.resize(part.end as usize, 0);
            self.read_into(part.start, &mut bytes[part.start as usize..])
        })
    }
}
