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
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    cache::{Cache, ChunkKey, LOT_CHUNKS},
    kept::KeptChunks,
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
    lots: Vec<Vec<LotChunk>>,
    /// The lot of each chunk.
    lot_of: HashMap<usize, usize>,
    state: Mutex<FillerState>,
    changed: Condvar,
    is_over: Arc<AtomicBool>,
}

pub(super) struct LotChunk {
    pub(super) key: ChunkKey,
    pub(super) range: Range<u64>,
}

#[derive(Default)]
struct FillerState {
    /// The next lot to fill, and the last one that was read.
    next: usize,
    read: usize,
}

/// A filler that works until this is dropped.
pub(super) struct Filling(pub(super) Arc<Filler>);

impl Drop for Filling {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        self.0.changed.notify_all();
    }
}

impl Filling {
    /// Begins to fill the cache with what it lacks of these chunks, in this order.
    pub(super) fn start(
        cache: Arc<Cache>,
        kept: Arc<KeptChunks>,
        reader: Arc<dyn ReadAt>,
        chunks: impl Iterator<Item = LotChunk>,
    ) -> Self {
        let (lots, lot_of) = in_lots(chunks);
        let (state, changed, is_over) = Default::default();
        let filler = Filler { cache, kept, reader, lots, lot_of, state, changed, is_over };
        let filler = Arc::new(filler);
        for _ in 0..AHEAD.min(filler.lots.len()) {
            let filler = Arc::clone(&filler);
            let work = move || end_waits_with(&filler.is_over, || filler.work());
            // Without threads chunks are fetched when they are read.
            let _ = thread::Builder::new().name("df11-cache".to_owned()).spawn(work);
        }
        Self(filler)
    }
}

impl Filler {
    /// Whether all of these chunks are among those that it brings.
    pub(super) fn covers(&self, chunks: &[usize]) -> bool {
        chunks.iter().all(|chunk| self.lot_of.contains_key(chunk))
    }

    /// Notes that a chunk is read now.
    pub(super) fn move_to(&self, chunk: usize) {
        let Some(&lot) = self.lot_of.get(&chunk) else { return };
        let mut state = parallel::lock(&self.state);
        // A lot far ahead is read by itself: whoever comes to it in order has it filled.
        if lot > state.read && lot <= state.next + AHEAD {
            state.read = lot;
            self.changed.notify_all();
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

    /// Fetches the chunks of a lot that the cache lacks. Whether it has them now.
    fn fill(&self, lot: &[LotChunk]) -> io::Result<bool> {
        let missing = || lot.iter().filter(|chunk| !self.cache.has(&chunk.key));
        let Some(first) = missing().next() else { return Ok(true) };
        let _claim = self.cache.claim(&first.key)?;
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
        Ok(missing.last().is_none_or(|last| self.cache.has(&last.key)))
    }

    /// Keeps a chunk, if it is right.
    fn keep(&self, chunk: &LotChunk, bytes: &[u8]) -> bool {
        let is_right = crc32fast::hash(bytes) == chunk.key.checksum;
        if is_right {
            self.cache.add(&chunk.key, bytes);
            self.kept.add(&chunk.key.name, chunk.key.chunk, &Arc::new(bytes.to_vec()));
        }
        is_right
    }
}

/// Chunks in lots, each once, and the lot of each.
fn in_lots(chunks: impl Iterator<Item = LotChunk>) -> (Vec<Vec<LotChunk>>, HashMap<usize, usize>) {
    let (mut lots, mut lot_of) = (Vec::<Vec<LotChunk>>::new(), HashMap::new());
    let mut before = None;
    for chunk in chunks {
        let number = chunk.key.chunk;
        if lot_of.contains_key(&number) {
            continue;
        }
        if before.replace(number / LOT_CHUNKS) != Some(number / LOT_CHUNKS) {
            lots.push(Vec::new());
        }
        lot_of.insert(number, lots.len() - 1);
        lots.last_mut().expect("one was pushed").push(chunk);
    }
    (lots, lot_of)
}
