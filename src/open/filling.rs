//! Fills a cache ahead of reads: if several processes share it, one of them fetches each chunk.
//!
//! ```text
//! lots      | 0 | 1 | 2 | 3 | 4 | 5 | …     16 chunks at most: one request
//!             ↑       └── a thread each: claim the lot, fetch what the cache lacks, keep it
//!             read now
//! ```

use std::{
    collections::HashMap,
    io,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    cache::{Cache, ChunkKey, FillAhead, LOT_CHUNKS},
    kept::KeptChunks,
    shard::Shard,
};
use crate::{io::ReadAt, parallel, store::end_waits_with};

/// Lots that are filled beyond the one that is read, each by a thread.
const AHEAD: usize = 8;
/// Bytes between two chunks that are fetched with them, since another request would take longer.
const GAP_BYTES: u64 = 64 << 10;
/// How long a thread waits before it looks whether it is still wanted.
const TICK: Duration = Duration::from_millis(100);

/// Chunks of one container that will be read, in lots.
pub(super) struct Filler {
    cache: Arc<Cache>,
    kept: Arc<KeptChunks>,
    reader: Arc<dyn ReadAt>,
    name: PathBuf,
    identity: [u8; 32],
    shard: u64,
    lots: Vec<Vec<LotChunk>>,
    /// The lot of each chunk.
    lot_of: HashMap<usize, usize>,
    state: Mutex<FillerState>,
    changed: Condvar,
    is_over: Arc<AtomicBool>,
}

struct LotChunk {
    number: usize,
    range: Range<u64>,
    checksum: u32,
}

#[derive(Default)]
struct FillerState {
    /// The next lot to fill, and the last one that was read.
    next: usize,
    read: usize,
}

/// A filler that works until this is dropped.
struct Filling(Arc<Filler>);

impl Drop for Filling {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        self.0.changed.notify_all();
    }
}

impl Shard {
    /// Fills the cache with what it lacks of these ranges, in this order, while they are read.
    /// None if somebody does already.
    pub(super) fn fill(
        &self,
        cache: &Arc<Cache>,
        ranges: &[Range<u64>],
    ) -> Option<Box<dyn std::any::Any + Send + Sync>> {
        let chunks: Vec<usize> = ranges.iter().flat_map(|range| self.chunks_of(range)).collect();
        let mut fillers = parallel::lock(&self.fillers);
        fillers.retain(|filler| filler.strong_count() > 0);
        let mut others = fillers.iter().filter_map(Weak::upgrade);
        if chunks.is_empty() || others.any(|filler| filler.covers(&chunks)) {
            return None;
        }
        let filler = Arc::new(Filler::new(self, cache, &chunks));
        let weak = Arc::downgrade(&filler);
        fillers.push(weak);
        for _ in 0..AHEAD.min(filler.lots.len()) {
            let filler = Arc::clone(&filler);
            let work = move || end_waits_with(&filler.is_over, || filler.work());
            // Without threads chunks are fetched when they are read.
            let _ = thread::Builder::new().name("df11-cache".to_owned()).spawn(work);
        }
        Some(Box::new(Filling(filler)))
    }

    /// Tells fillers which chunk is read now.
    pub(super) fn tell_fillers(&self, chunk: usize) {
        let fillers = parallel::lock(&self.fillers);
        fillers.iter().filter_map(Weak::upgrade).for_each(|filler| filler.move_to(chunk));
    }
}

impl FillAhead for Filler {
    fn covers(&self, chunks: &[usize]) -> bool {
        chunks.iter().all(|chunk| self.lot_of.contains_key(chunk))
    }

    fn move_to(&self, chunk: usize) {
        let Some(&lot) = self.lot_of.get(&chunk) else { return };
        let mut state = parallel::lock(&self.state);
        // A lot far ahead is read by itself: whoever comes to it in order has it filled.
        if lot > state.read && lot <= state.next + AHEAD {
            state.read = lot;
            self.changed.notify_all();
        }
    }
}

impl Filler {
    fn new(shard: &Shard, cache: &Arc<Cache>, chunks: &[usize]) -> Self {
        let (mut lots, mut lot_of) = (Vec::<Vec<LotChunk>>::new(), HashMap::new());
        let (directory, mut before) = (shard.directory(), None);
        for &number in chunks {
            if lot_of.contains_key(&number) {
                continue;
            }
            if before.replace(number / LOT_CHUNKS) != Some(number / LOT_CHUNKS) {
                lots.push(Vec::new());
            }
            lot_of.insert(number, lots.len() - 1);
            let checksum = directory.checksums[number].get();
            let range = shard.chunks[number].clone();
            lots.last_mut().expect("one was pushed").push(LotChunk { number, range, checksum });
        }
        let record = &directory.shard;
        Self {
            cache: Arc::clone(cache),
            kept: Arc::clone(&shard.kept),
            reader: Arc::clone(&shard.reader),
            name: shard.path().to_owned(),
            identity: record.identity,
            shard: record.shard_index.get(),
            lots,
            lot_of,
            state: Mutex::default(),
            changed: Condvar::new(),
            is_over: Arc::default(),
        }
    }

    /// Fills lots until all are. A fault ends it: then reads meet the same one, and tell it.
    fn work(&self) {
        while self.next().is_some_and(|lot| self.fill(lot).unwrap_or(false)) {}
    }

    fn next(&self) -> Option<&[LotChunk]> {
        let mut state = parallel::lock(&self.state);
        while !self.is_over.load(Ordering::Relaxed) {
            let lot = self.lots.get(state.next)?;
            if state.next <= state.read + AHEAD {
                state.next += 1;
                return Some(lot);
            }
            let waited = self.changed.wait_timeout(state, TICK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    fn key(&self, chunk: &LotChunk) -> ChunkKey<'_> {
        ChunkKey {
            identity: &self.identity,
            name: &self.name,
            shard: self.shard,
            chunk: chunk.number,
            checksum: chunk.checksum,
        }
    }

    /// Fetches the chunks of a lot that the cache lacks. Whether it has them now.
    fn fill(&self, lot: &[LotChunk]) -> io::Result<bool> {
        let missing = || lot.iter().filter(|chunk| !self.cache.has(&self.key(chunk)));
        let Some(first) = missing().next() else { return Ok(true) };
        let _claim = self.cache.claim(&self.key(first))?;
        let missing: Vec<&LotChunk> = missing().collect();
        let is_near = |a: &&LotChunk, b: &&LotChunk| {
            b.range.start.checked_sub(a.range.end).is_some_and(|gap| gap <= GAP_BYTES)
        };
        for some in missing.chunk_by(is_near) {
            let (start, end) = (some[0].range.start, some[some.len() - 1].range.end);
            let mut bytes = vec![0; (end - start) as usize];
            self.reader.read_exact_at(start, &mut bytes)?;
            for chunk in some {
                let place =
                    (chunk.range.start - start) as usize..(chunk.range.end - start) as usize;
                if !self.keep(chunk, &bytes[place]) {
                    return Ok(false);
                }
            }
        }
        Ok(missing.last().is_none_or(|last| self.cache.has(&self.key(last))))
    }

    /// Keeps a chunk, if it is right.
    fn keep(&self, chunk: &LotChunk, bytes: &[u8]) -> bool {
        let is_right = crc32fast::hash(bytes) == chunk.checksum;
        if is_right {
            self.cache.add(&self.key(chunk), bytes);
            self.kept.add(&self.name, chunk.number, &Arc::new(bytes.to_vec()));
        }
        is_right
    }
}
