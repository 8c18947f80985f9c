//! Fetches whole objects into memory, and lets readers use them while they arrive.
//!
//! ```text
//! objects    |==|========|====|========|   |========|==|========|
//! requests    1     3      4      5            6      2     7        32 at once
//! ```
//! The ranges that the caller names come first, for all objects of a place, and then the rest in
//! order. If a reader waits for a piece, that piece is fetched next. If one object fails, all
//! fetching ends.

use std::{
    collections::VecDeque,
    io, mem,
    ops::Range,
    ptr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard,
        RwLockWriteGuard, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use bytes::{Bytes, BytesMut};
use tokio::task::AbortHandle;

use super::{
    batches::plan_whole,
    fetch::{MAX_REQUESTS, PinnedObject, ended_early, memory_of, read_exact},
    interrupt,
};
use crate::{error::io_remedied, io::ReadAt, parallel};

/// The pieces of a place's objects that are fetched whole.
#[derive(Default)]
pub(super) struct Arrivals {
    state: Mutex<ArrivalState>,
    changed: Condvar,
}

#[derive(Default)]
struct ArrivalState {
    /// Pieces that no request fetches yet, in their order: those that are wanted first, and others.
    wanted: VecDeque<Piece>,
    others: VecDeque<Piece>,
    tasks: Vec<(Weak<Arriving>, AbortHandle)>,
    under_way: usize,
    failure: Option<ArrivalFailure>,
}

/// A piece of an object, by its index.
type Piece = (Weak<Arriving>, usize);

/// Why nothing more comes, and of which object.
struct ArrivalFailure {
    name: String,
    kind: io::ErrorKind,
    text: String,
}

/// An object that comes.
struct Arriving {
    arrivals: Arc<Arrivals>,
    name: String,
    pinned: PinnedObject,
    /// Where its bytes will be.
    address: usize,
    pieces: Vec<Range<u64>>,
    parts: Vec<RwLock<ArrivingPart>>,
    /// Parts that are not here.
    missing: AtomicUsize,
    whole: OnceLock<BytesMut>,
    /// Whether nobody reads it any more. Its requests end then, which is no failure.
    is_left: AtomicBool,
}

/// Memory of a piece. All parts of an object are one allocation.
enum ArrivingPart {
    Empty(BytesMut),
    /// A request fills it.
    Coming,
    Here(BytesMut),
    /// It belongs to the whole.
    Joined,
}

/// The bytes of an object that comes.
pub(super) struct ArrivingObject(Arc<Arriving>);

impl Arrivals {
    /// Begins to fetch an object into memory, the ranges `first` before the rest. `name` is for
    /// errors of others.
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`].
    pub(super) fn begin(
        self: &Arc<Self>,
        pinned: PinnedObject,
        name: &str,
        first: &[Range<u64>],
    ) -> io::Result<ArrivingObject> {
        // By way of `Bytes` the empty vector becomes a `BytesMut` with its capacity.
        let size = pinned.version.size;
        let mut rest = BytesMut::from(Bytes::from(memory_of(size)?));
        rest.reserve(size as usize);
        let (pieces, wanted) = plan_whole(first, size);
        let address = rest.as_ptr() as usize;
        let parts = pieces.iter().map(|piece| {
            let next = rest.split_off((piece.end - piece.start) as usize);
            RwLock::new(ArrivingPart::Empty(mem::replace(&mut rest, next)))
        });
        let parts: Vec<_> = parts.collect();
        let object = Arc::new(Arriving {
            arrivals: Arc::clone(self),
            name: name.to_owned(),
            pinned,
            address,
            missing: AtomicUsize::new(parts.len()),
            pieces,
            parts,
            whole: OnceLock::new(),
            is_left: AtomicBool::new(false),
        });
        if object.parts.is_empty() {
            object.join();
        }
        let mut state = parallel::lock(&self.state);
        let (mut early, mut late) = (Vec::new(), Vec::new());
        for (index, wanted) in wanted.into_iter().enumerate() {
            let list = if wanted { &mut early } else { &mut late };
            list.push((Arc::downgrade(&object), index));
        }
        state.wanted.extend(early);
        state.others.extend(late);
        state.start();
        drop(state);
        Ok(ArrivingObject(object))
    }

    /// Notes that a request ended, and makes another one.
    fn end(self: &Arc<Self>, failure: Option<ArrivalFailure>) {
        let mut state = parallel::lock(&self.state);
        state.under_way -= 1;
        if let Some(failure) = failure {
            state.failure.get_or_insert(failure);
            state.tasks.drain(..).for_each(|(_, task)| task.abort());
            (state.wanted, state.others) = Default::default();
        }
        state.start();
        drop(state);
        self.changed.notify_all();
    }
}

impl ArrivalState {
    /// Makes as many requests as there may be at once.
    fn start(&mut self) {
        self.tasks.retain(|(_, task)| !task.is_finished());
        while self.under_way < MAX_REQUESTS && self.failure.is_none() {
            let Some((object, index)) = self.wanted.pop_front().or_else(|| self.others.pop_front())
            else {
                break;
            };
            let Some(object) = object.upgrade() else { continue };
            let mut part = write(&object.parts[index]);
            let ArrivingPart::Empty(room) = mem::replace(&mut *part, ArrivingPart::Coming) else {
                unreachable!("a piece is fetched once")
            };
            drop(part);
            let task = object.pinned.handle.spawn(object.fetch(index, room));
            self.tasks.push((Arc::downgrade(&object), task.abort_handle()));
            self.under_way += 1;
        }
    }
}

impl Arriving {
    /// Fills the room of a piece.
    fn fetch(
        self: &Arc<Self>,
        index: usize,
        mut room: BytesMut,
    ) -> impl Future<Output = ()> + use<> {
        let (pinned, range) = (self.pinned.clone(), self.pieces[index].clone());
        let arrivals = Arc::clone(&self.arrivals);
        let request = Request { arrivals, object: Arc::downgrade(self), index, found: None };
        async move {
            let length = (range.end - range.start) as usize;
            let fetched = pinned.fetch_into(range, &mut room).await;
            let is_whole = room.len() == length;
            let found = fetched.and_then(|()| is_whole.then_some(room).ok_or_else(ended_early));
            request.end(found);
        }
    }

    /// Makes one of all parts, which are here: they lie side by side, so nothing is copied.
    fn join(&self) {
        let mut parts: Vec<_> = self.parts.iter().map(write).collect();
        let bytes =
            parts.iter_mut().map(|part| match mem::replace(&mut **part, ArrivingPart::Joined) {
                ArrivingPart::Here(bytes) => bytes,
                _ => unreachable!("all parts are here"),
            });
        let whole = bytes.reduce(|mut whole, part| {
            whole.unsplit(part);
            whole
        });
        let _ = self.whole.set(whole.unwrap_or_default());
    }

    fn is(self: &Arc<Self>, other: &Weak<Self>) -> bool {
        ptr::eq(other.as_ptr(), Arc::as_ptr(self))
    }

    /// Copies what a piece has from a place in the object on, and waits for it: the number of
    /// bytes.
    fn read(self: &Arc<Self>, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        if self.whole.get().is_none() {
            self.pinned.check_process()?;
        }
        let index = self.pieces.partition_point(|piece| piece.end <= offset);
        let piece = &self.pieces[index];
        let count = out.len().min((piece.end - offset) as usize);
        let from = (offset - piece.start) as usize;
        loop {
            if let Some(whole) = self.whole.get() {
                out.copy_from_slice(&whole[offset as usize..][..out.len()]);
                return Ok(out.len());
            }
            if let ArrivingPart::Here(bytes) = &*read(&self.parts[index]) {
                out[..count].copy_from_slice(&bytes[from..from + count]);
                return Ok(count);
            }
            self.wait_for(index)?;
        }
    }

    /// Waits until a piece has arrived, and requests it next.
    fn wait_for(self: &Arc<Self>, index: usize) -> io::Result<()> {
        let mut state = parallel::lock(&self.arrivals.state);
        self.hurry(index, &mut state);
        let is_away =
            || matches!(&*read(&self.parts[index]), ArrivingPart::Empty(_) | ArrivingPart::Coming);
        self.wait_while(is_away, state)
    }

    fn wait_while(
        &self,
        is_missing: impl Fn() -> bool,
        mut state: MutexGuard<'_, ArrivalState>,
    ) -> io::Result<()> {
        while is_missing() {
            if let Some(failure) = &state.failure {
                return Err(failure.error(&self.name));
            }
            interrupt::check()?;
            let waited = self.arrivals.changed.wait_timeout(state, interrupt::TICK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Puts a piece before all others, if no request fetches it yet.
    fn hurry(self: &Arc<Self>, index: usize, state: &mut ArrivalState) {
        let is_it = |(object, other): &Piece| *other == index && self.is(object);
        if !matches!(&*read(&self.parts[index]), ArrivingPart::Empty(_)) {
            return;
        }
        let take =
            |list: &mut VecDeque<Piece>| list.iter().position(is_it).and_then(|at| list.remove(at));
        if let Some(piece) = take(&mut state.wanted).or_else(|| take(&mut state.others)) {
            state.wanted.push_front(piece);
        }
    }
}

/// Nobody reads it any more. Its pieces are left out when they are next.
impl Drop for ArrivingObject {
    fn drop(&mut self) {
        let Self(object) = self;
        // In a process that was forked, a thread that is not there may hold the lock.
        if object.whole.get().is_none() && object.pinned.check_process().is_ok() {
            object.is_left.store(true, Ordering::Release);
            let state = parallel::lock(&object.arrivals.state);
            let own = state.tasks.iter().filter(|(other, _)| object.is(other));
            own.for_each(|(_, task)| task.abort());
        }
    }
}

impl ArrivalFailure {
    /// The failure as an error of reading this object.
    fn error(&self, name: &str) -> io::Error {
        let Self { name: failed, kind, text } = self;
        if failed == name {
            return io_remedied(*kind, text);
        }
        io_remedied(*kind, format!("{failed}, which is fetched with it: {text}"))
    }
}

/// A request for a piece. However its task ends, nobody waits for it afterwards.
struct Request {
    arrivals: Arc<Arrivals>,
    object: Weak<Arriving>,
    index: usize,
    found: Option<io::Result<BytesMut>>,
}

impl Request {
    fn end(mut self, found: io::Result<BytesMut>) {
        self.found = Some(found);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let found = self.found.take().unwrap_or_else(|| Err(ended_early()));
        let failure = self.object.upgrade().and_then(|object| match found {
            Ok(bytes) => {
                *write(&object.parts[self.index]) = ArrivingPart::Here(bytes);
                if object.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
                    object.join();
                }
                None
            }
            Err(_) if object.is_left.load(Ordering::Acquire) => None,
            Err(error) => {
                let (name, kind) = (object.name.clone(), error.kind());
                Some(ArrivalFailure { name, kind, text: error.to_string() })
            }
        });
        self.arrivals.end(failure);
    }
}

impl ReadAt for ArrivingObject {
    fn size(&self) -> u64 {
        self.0.pinned.version.size
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        read_exact(self.size(), offset, buf, |at, rest| self.0.read(at, rest))
    }

    fn view(&self, offset: u64, length: u64) -> Option<&[u8]> {
        self.0.whole.get()?.view(offset, length)
    }

    fn wait_whole(&self) -> io::Result<()> {
        let Self(object) = self;
        if object.whole.get().is_some() {
            return Ok(());
        }
        object.pinned.check_process()?;
        let state = parallel::lock(&object.arrivals.state);
        object.wait_while(|| object.whole.get().is_none(), state)
    }

    fn address(&self) -> Option<usize> {
        Some(self.0.address)
    }
}

fn read(part: &RwLock<ArrivingPart>) -> RwLockReadGuard<'_, ArrivingPart> {
    part.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(part: &RwLock<ArrivingPart>) -> RwLockWriteGuard<'_, ArrivingPart> {
    part.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{batches::SHORT_PIECE_BYTES as PIECE_BYTES, fetch::tests::stored};

    const SIZE: usize = 2 * PIECE_BYTES as usize + 1001;

    /// An object of pseudo-random bytes in a store, and this many requests at once.
    fn object(length: usize, requests: usize) -> (PinnedObject, Vec<u8>) {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        (stored(bytes.clone(), requests), bytes)
    }

    fn begin(arrivals: &Arc<Arrivals>, pinned: &PinnedObject) -> io::Result<ArrivingObject> {
        arrivals.begin(pinned.clone(), "x", &[])
    }

    #[test]
    fn parts_become_one_allocation() {
        for length in [1, 1000, PIECE_BYTES as usize, SIZE] {
            let (pinned, wanted) = object(length, 8);
            let object = begin(&Arc::default(), &pinned).unwrap();
            let mut read = vec![0; length];
            object.read_exact_at(0, &mut read).unwrap();
            assert!(read == wanted, "{length}");
            object.wait_whole().unwrap();
            let view = object.view(0, length as u64).unwrap();
            assert!(view == wanted && view.as_ptr() as usize == object.address().unwrap());
            assert_eq!(object.0.whole.get().unwrap().capacity(), length);
            object.read_exact_at(length as u64 - 1, &mut read[..1]).unwrap();
            assert_eq!(read[0], wanted[length - 1]);
            assert!(object.read_exact_at(length as u64, &mut read[..1]).is_err());
        }
        let (mut large, _) = object(1, 8);
        large.version.size = i64::MAX as u64;
        let error = begin(&Arc::default(), &large).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    }

    #[test]
    fn nothing_is_seen_before_it_is_here() {
        let (pinned, wanted) = object(SIZE, 0);
        let object = begin(&Arc::default(), &pinned).unwrap();
        assert!(object.view(0, 1).is_none());
        let mut last = [0];
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| object.read_exact_at(SIZE as u64 - 1, &mut last));
            std::thread::sleep(2 * interrupt::TICK);
            assert!(!reading.is_finished());
            pinned.source.requests.add_permits(1);
            reading.join().unwrap().unwrap();
        });
        assert_eq!(last[0], wanted[SIZE - 1]);
    }

    #[test]
    fn what_is_waited_for_is_next() {
        let ((pinned, wanted), arrivals) = (object(SIZE, 8), Arc::<Arrivals>::default());
        parallel::lock(&arrivals.state).under_way = MAX_REQUESTS;
        let first = PIECE_BYTES + 1..PIECE_BYTES + 2;
        let object = arrivals.begin(pinned, "x", &[first]).unwrap();
        let mut state = parallel::lock(&arrivals.state);
        let last = object.0.pieces.len() - 1;
        object.0.hurry(last, &mut state);
        object.0.hurry(last, &mut state);
        let order = state.wanted.iter().chain(&state.others).map(|(_, index)| *index);
        let order: Vec<_> = order.map(|index| object.0.pieces[index].start).collect();
        let starts = [2 * PIECE_BYTES + 2, PIECE_BYTES + 1, 0, PIECE_BYTES, PIECE_BYTES + 2];
        assert_eq!(order, starts);
        drop(state);
        // The requests that were said to be under way end.
        (0..MAX_REQUESTS).for_each(|_| arrivals.end(None));
        object.wait_whole().unwrap();
        assert!(object.view(0, SIZE as u64).unwrap() == wanted);
    }

    #[test]
    fn a_fault_of_one_ends_all() {
        let ((pinned, _), arrivals) = (object(SIZE, 0), Arc::default());
        let waiting = begin(&arrivals, &pinned).unwrap();
        let (mut changed, _) = object(10, 1);
        changed.version.size = 11;
        let failed = arrivals.begin(changed, "failed", &[]).unwrap();
        let text =
            |object: &ArrivingObject| object.read_exact_at(0, &mut [0]).unwrap_err().to_string();
        assert!(text(&waiting).starts_with("failed, which is fetched with it: "));
        assert!(text(&failed).contains("open it again"), "{}", text(&failed));
        assert!(waiting.wait_whole().is_err() && waiting.view(0, 1).is_none());
    }

    #[test]
    fn requests_end_with_their_object() {
        let ((pinned, _), arrivals) = (object(SIZE, 0), Arc::default());
        let left = begin(&arrivals, &pinned).unwrap();
        // As if a request ended while the object is being dropped.
        let kept = Arc::clone(&left.0);
        drop(left);
        let (other, wanted) = object(SIZE, 1);
        let next = begin(&arrivals, &other).unwrap();
        next.wait_whole().unwrap();
        assert!(next.view(0, SIZE as u64).unwrap() == wanted);
        assert_eq!(parallel::lock(&arrivals.state).under_way, 0);
        drop(kept);
    }
}
