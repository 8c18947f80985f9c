//! The end of waits for the network, when the process is asked to stop.

use std::{
    io,
    sync::{PoisonError, RwLock},
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

/// # Errors
/// [`io::ErrorKind::Interrupted`] if waits shall end.
pub(super) fn check() -> io::Result<()> {
    let is_stopped = *IS_STOPPED.read().unwrap_or_else(PoisonError::into_inner);
    if is_stopped() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
}
