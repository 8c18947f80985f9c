//! Ranges that are wanted soon: joined to pieces, fetched before they are read, in bounded memory.
//!
//! ```text
//! batches    | 0 | 1 | 2 | 3 | 4 | 5 | …       about 32 MiB each, in the order of reading
//!              ↑   └BEHIND┘ ↑ └ AHEAD  ┘
//!              freed        read now     fetched meanwhile
//! ```

use std::{
    collections::BTreeMap,
    io, mem,
    ops::Range,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
};

use tokio::{runtime::Handle, task::AbortHandle};

use super::fetch::{ObjectSource, Version};
use crate::parallel;

/// Bytes of a batch, at least, and for each thread that may read.
const BATCH_BYTES: u64 = 32 << 20;
const THREAD_BYTES: u64 = 2 << 20;
/// Batches that are fetched beyond the one that is read, and kept before it.
const AHEAD: usize = 3;
const BEHIND: usize = 2;
/// The longest piece: one request.
const PIECE_BYTES: u64 = 16 << 20;
/// Bytes between two ranges that are fetched with them, since another request would take longer.
const GAP_BYTES: u64 = 64 << 10;

/// Pieces of one object, and which of them are here.
pub(super) struct AheadQueue {
    pieces: Vec<QueuePiece>,
    /// The pieces of each batch, by index.
    batches: Vec<Vec<usize>>,
    state: Mutex<QueueState>,
    changed: Condvar,
    fetcher: Fetcher,
}

/// What fetches pieces.
pub(super) struct Fetcher {
    pub(super) source: ObjectSource,
    pub(super) version: Version,
    pub(super) handle: &'static Handle,
}

/// A range that one request brings, and the batch that it is of.
struct QueuePiece {
    range: Range<u64>,
    batch: usize,
}

#[derive(Default)]
struct QueueState {
    bytes: Vec<PieceBytes>,
    /// The last batch that was read, the first that is kept, and the first that is not yet wanted.
    read: usize,
    kept: usize,
    next: usize,
    tasks: Vec<AbortHandle>,
}

#[derive(Default)]
enum PieceBytes {
    #[default]
    Away,
    Coming,
    Here(Arc<Vec<u8>>),
    Failed(io::ErrorKind, String),
}

impl AheadQueue {
    /// Plans to read these ranges in this order. Nothing is fetched before the first is read.
    pub(super) fn new(fetcher: Fetcher, ranges: &[Range<u64>]) -> Arc<Self> {
        let least = BATCH_BYTES.max(THREAD_BYTES * rayon::current_num_threads() as u64);
        let (pieces, batches) = plan(ranges, least);
        let mut state = QueueState::default();
        state.bytes.resize_with(pieces.len(), PieceBytes::default);
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Arc::new(Self { pieces, batches, state, changed, fetcher })
    }

    /// Copies what a piece has from this offset on, and waits for it: the number of bytes. None if
    /// the bytes are in no piece that is here or comes.
    pub(super) fn read(self: &Arc<Self>, offset: u64, out: &mut [u8]) -> Option<io::Result<usize>> {
        let after = self.pieces.partition_point(|piece| piece.range.start <= offset);
        let index = after.checked_sub(1)?;
        let QueuePiece { range, batch } = &self.pieces[index];
        if offset >= range.end {
            return None;
        }
        let mut state = parallel::lock(&self.state);
        self.move_to(*batch, &mut state);
        loop {
            match &state.bytes[index] {
                PieceBytes::Away => return None,
                PieceBytes::Coming => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                PieceBytes::Failed(kind, text) => {
                    return Some(Err(io::Error::new(*kind, text.clone())));
                }
                PieceBytes::Here(bytes) => {
                    let bytes = Arc::clone(bytes);
                    drop(state);
                    let bytes = &bytes[(offset - range.start) as usize..];
                    let count = bytes.len().min(out.len());
                    out[..count].copy_from_slice(&bytes[..count]);
                    return Some(Ok(count));
                }
            }
        }
    }

    /// Frees batches that were read, and begins to fetch those that are next.
    fn move_to(self: &Arc<Self>, batch: usize, state: &mut QueueState) {
        // A batch far ahead is read by itself: whoever comes to it in order has it fetched.
        if batch > state.next + AHEAD {
            return;
        }
        state.read = state.read.max(batch);
        while state.kept + BEHIND < state.read {
            for &piece in &self.batches[state.kept] {
                state.bytes[piece] = PieceBytes::Away;
            }
            state.kept += 1;
        }
        // Nobody would free a batch before those that are kept.
        state.next = state.next.max(state.kept);
        while state.next < self.batches.len() && state.next <= state.read + AHEAD {
            self.batches[state.next].iter().for_each(|&piece| self.begin(piece, state));
            state.next += 1;
        }
    }

    fn begin(self: &Arc<Self>, index: usize, state: &mut QueueState) {
        state.bytes[index] = PieceBytes::Coming;
        let Fetcher { source, version, handle } = &self.fetcher;
        let (source, version) = (source.clone(), version.clone());
        let range = self.pieces[index].range.clone();
        let coming = ComingPiece { to: Arc::downgrade(self), index };
        let task = handle.spawn(async move {
            let found = source.fetch(range, Some(&version)).await;
            coming.take(found.map(|(bytes, _)| bytes));
        });
        state.tasks.retain(|task| !task.is_finished());
        state.tasks.push(task.abort_handle());
    }
}

/// A piece that is fetched. However its task ends, nobody waits for it afterwards.
struct ComingPiece {
    to: Weak<AheadQueue>,
    index: usize,
}

impl ComingPiece {
    /// Puts fetched bytes where they are waited for, if anybody still waits.
    fn take(&self, found: io::Result<Vec<u8>>) {
        let Some(ahead) = self.to.upgrade() else { return };
        let mut state = parallel::lock(&ahead.state);
        if matches!(state.bytes[self.index], PieceBytes::Coming) {
            state.bytes[self.index] = match found {
                Ok(bytes) => PieceBytes::Here(Arc::new(bytes)),
                Err(error) => PieceBytes::Failed(error.kind(), error.to_string()),
            };
        }
        drop(state);
        ahead.changed.notify_all();
    }
}

impl Drop for ComingPiece {
    fn drop(&mut self) {
        self.take(Err(io::Error::other("the request ended early; open the container again")));
    }
}

impl Drop for AheadQueue {
    fn drop(&mut self) {
        parallel::lock(&self.state).tasks.iter().for_each(AbortHandle::abort);
    }
}

/// Cuts ranges into batches of this many bytes, and each batch into pieces: what lies side by side
/// in the object is one piece, up to [`PIECE_BYTES`]. No byte is in two pieces.
fn plan(ranges: &[Range<u64>], least: u64) -> (Vec<QueuePiece>, Vec<Vec<usize>>) {
    let mut plan = QueuePlan::default();
    for range in ranges.iter().flat_map(|range| parallel::cut(range.clone(), least, 1)) {
        plan.add(range, least);
    }
    plan.end_batch();
    let QueuePlan { mut pieces, count, .. } = plan;
    pieces.sort_by_key(|piece| piece.range.start);
    let mut batches = vec![Vec::new(); count];
    for (index, piece) in pieces.iter().enumerate() {
        batches[piece.batch].push(index);
    }
    (pieces, batches)
}

/// A plan that grows by ranges.
#[derive(Default)]
struct QueuePlan {
    pieces: Vec<QueuePiece>,
    /// Whole batches.
    count: usize,
    /// The batch that grows, and its bytes.
    batch: Vec<Range<u64>>,
    bytes: u64,
    /// The bytes that some batch has: starts and ends of ranges that do not touch.
    taken: BTreeMap<u64, u64>,
}

impl QueuePlan {
    fn add(&mut self, range: Range<u64>, least: u64) {
        for part in self.take(range) {
            self.bytes += part.end - part.start;
            self.batch.push(part);
        }
        if self.bytes >= least {
            self.end_batch();
        }
    }

    /// The parts of a range that no batch has; now one has them.
    fn take(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut parts, mut at) = (Vec::new(), range.start);
        let mut whole = range.clone();
        while let Some((&start, &end)) = self.taken.range(..=range.end).next_back() {
            if end < range.start {
                break;
            }
            self.taken.remove(&start);
            parts.push(start..end);
            whole = whole.start.min(start)..whole.end.max(end);
        }
        self.taken.insert(whole.start, whole.end);
        let mut free = Vec::new();
        for part in parts.into_iter().rev() {
            free.push(at..part.start.max(at));
            at = part.end.max(at);
        }
        free.push(at..range.end.max(at));
        free.retain(|part| !part.is_empty());
        free
    }

    fn is_free(&self, range: &Range<u64>) -> bool {
        let before = self.taken.range(..range.end).next_back();
        before.is_none_or(|(_, &end)| end <= range.start)
    }

    /// Joins the ranges of a batch to pieces.
    fn end_batch(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let mut batch = mem::take(&mut self.batch);
        batch.sort_by_key(|range| range.start);
        let mut whole: Vec<Range<u64>> = Vec::new();
        for range in batch {
            match whole.last_mut() {
                Some(last) if self.is_near(last.end..range.start) => last.end = range.end,
                _ => whole.push(range),
            }
        }
        let pieces = whole.into_iter().flat_map(|range| parallel::cut(range, PIECE_BYTES, 1));
        self.pieces.extend(pieces.map(|range| QueuePiece { range, batch: self.count }));
        (self.bytes, self.count) = (0, self.count + 1);
    }

    /// Whether to fetch the bytes between two ranges with them.
    fn is_near(&mut self, gap: Range<u64>) -> bool {
        if gap.is_empty() {
            return true;
        }
        let is_near = gap.end - gap.start <= GAP_BYTES && self.is_free(&gap);
        if is_near {
            self.take(gap);
        }
        is_near
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use object_store::{
        GetOptions, ObjectStore as _, ObjectStoreExt as _, memory::InMemory, path::Path,
    };
    use tokio::sync::Semaphore;

    use super::*;
    use crate::store::{Patience, object::wait, runtime};

    const MIB: u64 = 1 << 20;

    fn ranges_of(ranges: &[Range<u64>], least: u64) -> Vec<(usize, Range<u64>)> {
        let (pieces, _) = plan(ranges, least);
        pieces.into_iter().map(|piece| (piece.batch, piece.range)).collect()
    }

    #[test]
    fn neighbours_are_one_piece_and_no_byte_is_fetched_twice() {
        let near = [0..1000, 900..2000, 5000..6000, 10 * MIB..10 * MIB + 1, 1500..5500];
        assert_eq!(ranges_of(&near, MIB), [(0, 0..6000), (0, 10 * MIB..10 * MIB + 1)]);
        let apart = [0..MIB, 2 * MIB..3 * MIB, MIB / 2..5 * MIB / 2];
        let found = ranges_of(&apart, MIB);
        assert_eq!(found, [(0, 0..MIB), (2, MIB..2 * MIB), (1, 2 * MIB..3 * MIB)]);
    }

    #[test]
    fn long_ranges_are_several_batches_and_pieces() {
        let found = ranges_of(&[7..7 + 80 * MIB], 32 * MIB);
        let batches: Vec<_> = found.iter().map(|(batch, _)| *batch).collect();
        assert_eq!(batches, [0, 0, 1, 1, 2]);
        assert!(found.windows(2).all(|pair| pair[0].1.end == pair[1].1.start));
        assert_eq!((found[0].1.start, found[4].1.end), (7, 7 + 80 * MIB));
    }

    /// Ten batches of one byte each, and so many requests at once.
    fn ten_batches(requests: usize) -> Arc<AheadQueue> {
        let (store, path) = (Arc::new(InMemory::new()), Path::from("x"));
        let handle = runtime::handle().unwrap();
        let (requests, patience) = (Arc::new(Semaphore::new(requests)), Patience::DEFAULT);
        let source = ObjectSource { store: store.clone(), path: path.clone(), patience, requests };
        let put_and_ask = async move {
            store.put(&path, b"0123456789".as_slice().into()).await.map_err(io::Error::other)?;
            let found = store.get_opts(&path, GetOptions::new()).await;
            Ok(Version::of(&found.map_err(io::Error::other)?))
        };
        let version = wait(handle, put_and_ask).unwrap();
        let pieces = (0..10).map(|at| QueuePiece { range: at..at + 1, batch: at as usize });
        let mut state = QueueState::default();
        state.bytes.resize_with(10, PieceBytes::default);
        Arc::new(AheadQueue {
            pieces: pieces.collect(),
            batches: (0..10).map(|at| vec![at]).collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            fetcher: Fetcher { source, version, handle },
        })
    }

    #[test]
    fn a_jump_leaves_no_batch_behind() {
        let (queue, mut byte) = (ten_batches(1), [0]);
        for at in [AHEAD, AHEAD + 2] {
            assert_eq!(queue.read(at as u64, &mut byte).unwrap().unwrap(), 1);
            assert_eq!(byte[0], b'0' + at as u8);
        }
        let state = parallel::lock(&queue.state);
        assert_eq!(state.kept, AHEAD + 2 - BEHIND);
        for piece in &state.bytes[..state.kept] {
            assert!(matches!(piece, PieceBytes::Away));
        }
    }

    #[test]
    fn a_task_that_ends_early_is_not_waited_for() {
        let queue = ten_batches(0);
        let mut state = parallel::lock(&queue.state);
        queue.move_to(0, &mut state);
        state.tasks.iter().for_each(AbortHandle::abort);
        drop(state);
        let (send, found) = mpsc::channel();
        thread::spawn(move || send.send(queue.read(0, &mut [0])));
        let found = found.recv_timeout(Duration::from_secs(30)).expect("an answer");
        assert!(found.unwrap().unwrap_err().to_string().contains("ended early"));
    }

    #[test]
    fn random_ranges_are_covered_once() {
        let mut seed = 1u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let ranges: Vec<_> = (0..20)
                .map(|_| {
                    let start = next(3000) * 1000;
                    start..start + next(200_000)
                })
                .collect();
            let found = ranges_of(&ranges, 100_000);
            assert!(found.windows(2).all(|pair| pair[0].1.end <= pair[1].1.start));
            for at in ranges.iter().flat_map(|range| range.clone().step_by(997)) {
                assert!(found.iter().any(|(_, piece)| piece.contains(&at)), "{at}");
            }
        }
    }
}
