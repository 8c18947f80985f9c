//! Ends waits for the network when the process is asked to stop.

use std::{
    cell::RefCell,
    io,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// How long a wait goes on after the process was asked to stop.
pub(super) const TICK: Duration = Duration::from_millis(100);

static IS_STOPPED: RwLock<fn() -> bool> = RwLock::new(|| false);

/// Ends the waits of this process for stores, with [`Error::Cancelled`](crate::Error::Cancelled),
/// while a function answers `true`. Each thread that waits asks it ten times a second.
pub fn end_waits_when(is_stopped: fn() -> bool) {
    *IS_STOPPED.write().unwrap_or_else(PoisonError::into_inner) = is_stopped;
}

thread_local! {
    /// Whether the work of this thread has become needless.
    static IS_OVER: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Does work on this thread, whose waits for stores end when `is_over` is set, in the same way.
pub(crate) fn end_waits_with<T>(is_over: &Arc<AtomicBool>, work: impl FnOnce() -> T) -> T {
    IS_OVER.with(|own| own.replace(Some(Arc::clone(is_over))));
    let done = work();
    IS_OVER.with(RefCell::take);
    done
}

/// # Errors
/// [`io::ErrorKind::Interrupted`] if waits shall end.
pub(crate) fn check() -> io::Result<()> {
    let is_stopped = *IS_STOPPED.read().unwrap_or_else(PoisonError::into_inner);
    let is_over = |over: &Arc<AtomicBool>| over.load(Ordering::Relaxed);
    if is_stopped() || IS_OVER.with(|over| over.borrow().as_ref().is_some_and(is_over)) {
        return Err(io::ErrorKind::Interrupted.into());
    }
    Ok(())
}
