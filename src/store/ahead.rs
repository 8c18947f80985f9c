//! Fetches ranges that are wanted soon before they are read, joined to pieces, in bounded memory.
//!
//! ```text
//! batches    | 0 | 1 | 2 | 3 | 4 | 5 | …       about 32 MiB each, in the order of reading
//!              ↑   └BEHIND┘ ↑ └ AHEAD  ┘
//!              freed        read now     fetched meanwhile
//! ```
//! Each read that has to wait makes AHEAD longer, up to 512 MiB. So a server that answers late, or
//! sends slowly on each connection, gets more requests at once.

use std::{
    collections::VecDeque,
    io,
    ops::Range,
    ptr,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
};

use bytes::{Bytes, BytesMut};
use tokio::task::AbortHandle;

use super::{
    batches::{QueuePiece, plan},
    fetch::{PinnedObject, ended_early},
    interrupt,
};
use crate::{error::io_remedied, parallel};

/// Bytes of a batch, at least, and for each thread that may read.
const BATCH_BYTES: u64 = 32 << 20;
const THREAD_BYTES: u64 = 2 << 20;
/// Batches that are fetched beyond the one that is read at first, and kept before it.
const AHEAD: usize = 3;
const BEHIND: usize = 2;
/// Bytes of the batches that are fetched beyond the one that is read, at most.
const AHEAD_BYTES: u64 = 512 << 20;
/// Bytes that the queues of a place hold, at most, besides the queue that is read.
const OTHERS_BYTES: u64 = 256 << 20;

/// The queues of a place, the one that was read last first.
pub(super) struct Queues {
    recent: Mutex<VecDeque<Weak<AheadQueue>>>,
    others_bytes: u64,
}

impl Default for Queues {
    fn default() -> Self {
        Self { recent: Mutex::default(), others_bytes: OTHERS_BYTES }
    }
}

impl Queues {
    /// Puts a queue first, since it is read; frees those that then are too many.
    fn put_first(&self, queue: &Arc<AheadQueue>) {
        let mut recent = parallel::lock(&self.recent);
        let is_it = |other: &Weak<AheadQueue>| ptr::eq(other.as_ptr(), Arc::as_ptr(queue));
        if recent.front().is_some_and(is_it) {
            return;
        }
        recent.retain(|other| other.strong_count() > 0 && !is_it(other));
        let mut bytes = 0;
        for other in recent.iter().filter_map(Weak::upgrade) {
            let mut state = parallel::lock(&other.state);
            bytes += other.held_bytes(&state);
            if bytes > self.others_bytes {
                other.free(&mut state);
            }
        }
        recent.push_front(Arc::downgrade(queue));
    }
}

/// Pieces of one object, and which of them are here.
pub(super) struct AheadQueue {
    pieces: Vec<QueuePiece>,
    /// The pieces of each batch, by index.
    batches: Vec<Vec<usize>>,
    max_ahead: usize,
    state: Mutex<QueueState>,
    changed: Condvar,
    object: PinnedObject,
    queues: Arc<Queues>,
}

#[derive(Default)]
struct QueueState {
    bytes: Vec<PieceBytes>,
    /// The last batch that was read, the first that is kept, and the first that is not yet wanted.
    read: usize,
    kept: usize,
    next: usize,
    /// Batches beyond [`AHEAD`], since reads waited.
    more: usize,
    tasks: Vec<AbortHandle>,
}

#[derive(Default)]
enum PieceBytes {
    #[default]
    Away,
    Coming,
    Here(Bytes),
    Failed(io::ErrorKind, String),
}

impl AheadQueue {
    /// Plans to read these ranges in this order. Nothing is fetched before the first is read.
    pub(super) fn new(
        object: PinnedObject,
        queues: Arc<Queues>,
        ranges: &[Range<u64>],
    ) -> Arc<Self> {
        let least = BATCH_BYTES.max(THREAD_BYTES * rayon::current_num_threads() as u64);
        let (pieces, batches) = plan(ranges, least);
        let mut state = QueueState::default();
        state.bytes.resize_with(pieces.len(), PieceBytes::default);
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let max_ahead = AHEAD.max((AHEAD_BYTES / least) as usize);
        Arc::new(Self { pieces, batches, max_ahead, state, changed, object, queues })
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
        self.queues.put_first(self);
        let mut state = parallel::lock(&self.state);
        self.move_to(*batch, &mut state);
        if matches!(state.bytes[index], PieceBytes::Coming) && AHEAD + state.more < self.max_ahead {
            state.more += 1;
            self.move_to(*batch, &mut state);
        }
        loop {
            match &state.bytes[index] {
                PieceBytes::Away => return None,
                PieceBytes::Coming => {
                    if let Err(stopped) = interrupt::check() {
                        return Some(Err(stopped));
                    }
                    let waited = self.changed.wait_timeout(state, interrupt::TICK);
                    (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
                }
                PieceBytes::Failed(kind, text) => {
                    return Some(Err(io_remedied(*kind, text)));
                }
                PieceBytes::Here(bytes) => {
                    let bytes = bytes.clone();
                    drop(state);
                    let bytes = &bytes[(offset - range.start) as usize..];
                    let count = bytes.len().min(out.len());
                    out[..count].copy_from_slice(&bytes[..count]);
                    return Some(Ok(count));
                }
            }
        }
    }

    fn held_bytes(&self, state: &QueueState) -> u64 {
        let held = self.pieces.iter().zip(&state.bytes);
        let held = held.filter(|(_, bytes)| !matches!(bytes, PieceBytes::Away));
        held.map(|(piece, _)| piece.range.end - piece.range.start).sum()
    }

    /// Frees all pieces. They are fetched again from the batch on that is read next.
    fn free(&self, state: &mut QueueState) {
        state.tasks.drain(..).for_each(|task| task.abort());
        state.bytes.fill_with(PieceBytes::default);
        (state.kept, state.next) = (state.read, state.read);
        self.changed.notify_all();
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
        let last = state.read + AHEAD + state.more;
        while state.next < self.batches.len() && state.next <= last {
            self.batches[state.next].iter().for_each(|&piece| self.begin(piece, state));
            state.next += 1;
        }
    }

    fn begin(self: &Arc<Self>, index: usize, state: &mut QueueState) {
        state.bytes[index] = PieceBytes::Coming;
        let (object, range) = (self.object.clone(), self.pieces[index].range.clone());
        let coming = ComingPiece { to: Arc::downgrade(self), index };
        let fetch = async move { coming.take(object.fetch(range).await) };
        let task = self.object.handle.spawn(fetch);
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
    fn take(&self, found: io::Result<BytesMut>) {
        let Some(ahead) = self.to.upgrade() else { return };
        let mut state = parallel::lock(&ahead.state);
        if matches!(state.bytes[self.index], PieceBytes::Coming) {
            state.bytes[self.index] = match found {
                Ok(bytes) => PieceBytes::Here(bytes.freeze()),
                Err(error) => PieceBytes::Failed(error.kind(), error.to_string()),
            };
        }
        drop(state);
        ahead.changed.notify_all();
    }
}

impl Drop for ComingPiece {
    fn drop(&mut self) {
        self.take(Err(ended_early()));
    }
}

impl Drop for AheadQueue {
    fn drop(&mut self) {
        parallel::lock(&self.state).tasks.iter().for_each(AbortHandle::abort);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;
    use crate::store::fetch::tests::stored;

    /// Ten batches of one byte each, and as many requests at once.
    fn ten_batches(requests: usize) -> Arc<AheadQueue> {
        batches_among(&Arc::default(), requests)
    }

    fn batches_among(queues: &Arc<Queues>, requests: usize) -> Arc<AheadQueue> {
        let pieces = (0..10).map(|at| QueuePiece { range: at..at + 1, batch: at as usize });
        let mut state = QueueState::default();
        state.bytes.resize_with(10, PieceBytes::default);
        Arc::new(AheadQueue {
            pieces: pieces.collect(),
            batches: (0..10).map(|at| vec![at]).collect(),
            max_ahead: AHEAD + 1,
            state: Mutex::new(state),
            changed: Condvar::new(),
            object: stored(b"0123456789".to_vec(), requests),
            queues: Arc::clone(queues),
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
    fn reads_that_wait_fetch_more() {
        let queue = ten_batches(0);
        let read = |at| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.read(at, &mut [0]).unwrap().unwrap())
        };
        let next = || parallel::lock(&queue.state).next;
        let first = read(0);
        while next() < AHEAD + 2 {
            thread::yield_now();
        }
        let others = [read(0), read(1)];
        while next() < AHEAD + 3 {
            thread::yield_now();
        }
        queue.object.source.requests.add_permits(10);
        assert_eq!(first.join().unwrap() + others.map(|read| read.join().unwrap()).len(), 3);
        assert_eq!(next(), AHEAD + 3);
    }

    #[test]
    fn queues_that_others_followed_are_freed() {
        let queues = Arc::new(Queues { recent: Mutex::default(), others_bytes: 2 + AHEAD as u64 });
        let all: Vec<_> = (0..3).map(|_| batches_among(&queues, 1)).collect();
        let mut byte = [0];
        for at in 0..4 {
            for (index, queue) in all.iter().enumerate() {
                assert_eq!(queue.read(at, &mut byte).unwrap().unwrap(), 1);
                assert_eq!(byte[0], b'0' + at as u8, "{index}");
                let others = (1..3).map(|next| &all[(index + next) % 3]);
                let held = others.map(|other| other.held_bytes(&parallel::lock(&other.state)));
                assert!(held.sum::<u64>() <= 2 + AHEAD as u64);
            }
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
}
