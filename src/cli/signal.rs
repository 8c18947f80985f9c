//! Signals that ask the command to stop.

use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicUsize, Ordering},
};

use df11::hazmat::platform::watch_stops;

/// Ctrl-C, as on all systems.
const SIGINT: u8 = 2;

/// The signal that asked the command to stop, or 0. Long work looks at it between pieces.
static SIGNAL: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

pub(super) fn is_interrupted() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0
}

/// The exit code of an interrupted command, as shells number it: 130 after Ctrl-C, 143 after
/// SIGTERM.
pub(super) fn interrupted_code() -> u8 {
    let signal = SIGNAL.load(Ordering::Relaxed) as u8;
    128 + if signal == 0 { SIGINT } else { signal }
}

/// Takes over the signals. Without a handler, a signal ends the process at once.
pub(super) fn take_over() {
    watch_stops(&SIGNAL);
    #[cfg(feature = "remote")]
    df11::hazmat::end_waits_when(is_interrupted);
}
