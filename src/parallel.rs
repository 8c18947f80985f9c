//! Lets all threads of the current rayon pool work on numbered pieces, which they take in order.
//!
//! The order keeps reads and writes near each other in their files; rayon's own splitting would
//! start at several distant places.

use std::{
    ops::Range,
    process,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{Error, Result};

/// A value for this process, and one for each process that is forked from it: threads do not
/// outlive a fork. Waits for no lock that a parent could have held.
pub(crate) struct PerProcess<T>(OnceLock<Box<Owned<T>>>);

struct Owned<T> {
    process: u32,
    value: T,
    next: PerProcess<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// The value of this process, which `make` makes the first time.
    pub(crate) fn get(&self, make: impl Fn() -> Result<T>) -> Result<&T> {
        let (process, mut slot) = (process::id(), self);
        loop {
            match slot.0.get() {
                Some(owned) if owned.process == process => return Ok(&owned.value),
                Some(owned) => slot = &owned.next,
                None => {
                    let owned = Owned { process, value: make()?, next: Self::new() };
                    // Another thread may have been faster; then this value is dropped.
                    let _ = slot.0.set(Box::new(owned));
                }
            }
        }
    }
}

/// The pool of this process, until it ends: one thread for each core, or as many as
/// `RAYON_NUM_THREADS` says. A forked process has no threads of its parent's pool, nor of rayon's
/// global one, and gets a pool of its own.
///
/// # Errors
/// [`Error::Parameter`] if the system refuses threads.
pub fn pool() -> Result<&'static ThreadPool> {
    static POOLS: PerProcess<ThreadPool> = PerProcess::new();
    POOLS.get(|| {
        ThreadPoolBuilder::new().build().map_err(|error| {
            let problem = format!("cannot start threads: {error}");
            Error::parameter(problem, "set RAYON_NUM_THREADS to fewer")
        })
    })
}

/// Calls `work` once for each index below `count`. Each thread makes its own `state` once and
/// reuses it.
///
/// # Errors
/// The error with the lowest index among those that happened; pieces that had not begun are then
/// skipped.
pub(crate) fn for_each<S>(
    count: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let run = || {
        let mut state = state();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            if let Err(error) = work(&mut state, index) {
                next.store(count, Ordering::Relaxed);
                let mut failure = lock(&failure);
                if failure.as_ref().is_none_or(|&(first, _)| index < first) {
                    *failure = Some((index, error));
                }
                return;
            }
        }
    };
    rayon::scope(|scope| {
        for _ in 1..rayon::current_num_threads().min(count) {
            scope.spawn(|_| run());
        }
        run();
    });
    failure
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .map_or(Ok(()), |(_, error)| Err(error))
}

/// All values, or the first failure that is not merely the consequence of another one.
#[cfg(any(feature = "cudarc", feature = "remote", test))]
pub(crate) fn first_cause<T>(results: impl IntoIterator<Item = Result<T>>) -> Result<Vec<T>> {
    let is_cause = |result: &Result<T>| !matches!(result, Ok(_) | Err(Error::Cancelled));
    let (causes, others): (Vec<_>, Vec<_>) = results.into_iter().partition(is_cause);
    causes.into_iter().chain(others).collect()
}

/// Locks what stays right when a thread that holds it panics.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cuts a range into pieces of about this length, which end at multiples of `grain` or with it.
pub(crate) fn cut(range: Range<u64>, length: u64, grain: u64) -> impl Iterator<Item = Range<u64>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = start.saturating_add(length) / grain * grain;
        // A grain may be longer than a piece.
        let end = if end > start { end } else { (start / grain + 1).saturating_mul(grain) };
        let piece = start..end.min(range.end);
        start = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Cuts a buffer into parts of these lengths in bytes, one after the other, each for whichever
/// thread takes it.
///
/// # Panics
/// If the buffer is shorter than they are together.
pub(crate) fn split(
    buffer: &mut [u8],
    lengths: impl IntoIterator<Item = u64>,
) -> impl Iterator<Item = &mut [u8]> {
    lengths.into_iter().scan(buffer, |rest, length| {
        Some(rest.split_off_mut(..length as usize).expect("the buffer has as many bytes"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn parts_lie_one_after_the_other() {
        let mut buffer = *b"abcdef";
        let parts: Vec<&mut [u8]> = split(&mut buffer, [2, 0, 3]).collect();
        assert_eq!(parts, [&b"ab"[..], b"", b"cde"]);
    }

    #[test]
    fn every_index_once_and_the_first_error() {
        let sum = AtomicU64::new(0);
        for_each(
            1000,
            || (),
            |(), i| {
                sum.fetch_add(i as u64, Ordering::Relaxed);
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(sum.into_inner(), 499_500);
        let result = for_each(
            1000,
            || (),
            |(), i| if i >= 7 { Err(Error::corrupt("x", i as u64, "")) } else { Ok(()) },
        );
        assert!(matches!(result, Err(Error::Corrupt { offset: 7, .. })), "{result:?}");
    }

    #[test]
    fn the_cause_is_reported_and_not_its_consequences() {
        let results = [
            Ok(()),
            Err(Error::Cancelled),
            Err(Error::corrupt("x", 0, "y")),
            Err(Error::Cancelled),
        ];
        assert!(matches!(first_cause(results), Err(Error::Corrupt { .. })));
        assert!(first_cause([Ok(()), Ok(())]).is_ok());
        assert!(matches!(first_cause([Err::<(), _>(Error::Cancelled)]), Err(Error::Cancelled)));
    }
}
