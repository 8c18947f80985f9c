//! Calls the library without the interpreter's lock, on separate threads, with progress; Ctrl-C
//! ends a call. The library's errors become the exceptions of `df11/_errors.py`.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use df11::{
    Error, Observer, Stage,
    hazmat::{io_remedy, pool},
};
use pyo3::{exceptions::PyKeyboardInterrupt, intern, prelude::*};

/// Longest time until Ctrl-C or progress is noticed.
const TICK: Duration = Duration::from_millis(50);

/// Does what takes seconds at most, unless it waits for a store: only such waits end on Ctrl-C.
pub(crate) fn briefly<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> df11::Result<T> + Send,
) -> PyResult<T> {
    let (result, failure) = attended(py, work, || Ok(()), || {});
    failure.map_or_else(|| result.or_raise(py), Err)
}

/// Does long work. `progress` is the caller's argument (`df11/_progress.py` says what it may be);
/// it is called on this thread. This thread also checks for signals, which end the work; the caller
/// gets the exceptions that they raise.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&dyn Observer) -> df11::Result<T> + Send,
) -> PyResult<T> {
    let helper = py.import(intern!(py, "df11._progress"))?;
    let watcher = helper.call_method1(intern!(py, "watcher"), (progress,))?;
    let watcher = Some(&watcher).filter(|watcher| !watcher.is_none());
    let watch = Watch::default();
    let tell = || watch.tell(watcher);
    let cancel = || watch.cancelled.store(true, Ordering::Relaxed);
    let (result, mut failure) = attended(py, || work(&watch), tell, cancel);
    if failure.is_none() {
        failure = watch.tell(watcher).err();
    }
    let closed =
        watcher.map_or(Ok(()), |watcher| watcher.call_method0(intern!(py, "close")).map(drop));
    match failure {
        Some(failure) => Err(failure),
        None => result.or_raise(py).and_then(|value| closed.map(|()| value)),
    }
}

/// Does work on the pool's threads. Meanwhile this thread looks for signals, and calls `attend`;
/// the first failure of either cancels the work, and is returned.
fn attended<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> df11::Result<T> + Send,
    mut attend: impl FnMut() -> PyResult<()>,
    cancel: impl Fn(),
) -> (df11::Result<T>, Option<PyErr>) {
    let pool = match pool() {
        Ok(pool) => pool,
        Err(error) => return (Err(error), None),
    };
    // Nothing is sent: one end is dropped when the work has ended, also by a panic.
    let (working, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let tick = || {
        let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout)
    };
    let (mut result, mut failure, mut stop) = (None, None, None);
    pool.in_place_scope(|scope| {
        scope.spawn(|_| {
            let _working = working;
            result = Some(work());
        });
        while py.detach(tick) {
            if failure.is_some() {
                continue;
            }
            if let Err(signal) = py.check_signals() {
                (failure, stop) = (Some(signal), Some(Stop::new()));
            } else {
                failure = attend().err();
            }
            if failure.is_some() {
                cancel();
            }
        }
    });
    drop(stop);
    (result.expect("the work has ended"), failure)
}

/// Calls whose thread has got a signal, and that have not ended.
static STOPS: AtomicUsize = AtomicUsize::new(0);

/// Ends waits for stores until it is dropped: those of all threads, since nothing tells which of
/// them wait for this one.
struct Stop;

impl Stop {
    fn new() -> Self {
        STOPS.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        STOPS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether waits for stores shall end.
pub(crate) fn is_stopped() -> bool {
    STOPS.load(Ordering::Relaxed) > 0
}

/// Progress that work tells, for the caller's thread to pass on.
#[derive(Default)]
struct Watch {
    total: AtomicU64,
    done: AtomicU64,
    /// The index among [`STAGES`].
    stage: AtomicUsize,
    cancelled: AtomicBool,
}

/// Stages with their names in Python.
const STAGES: [(Stage, &str); 7] = [
    (Stage::Analyse, "analyse"),
    (Stage::Encode, "encode"),
    (Stage::Decode, "decode"),
    (Stage::Verify, "verify"),
    (Stage::Load, "load"),
    (Stage::Fetch, "fetch"),
    (Stage::Upload, "upload"),
];

impl Watch {
    fn tell(&self, watcher: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(watcher) = watcher else { return Ok(()) };
        let (_, stage) = STAGES[self.stage.load(Ordering::Relaxed)];
        let total = self.total.load(Ordering::Relaxed);
        // Headers are verified too, and not counted.
        let done = self.done.load(Ordering::Relaxed).min(total);
        watcher.call1((stage, done, total)).map(drop)
    }
}

impl Observer for Watch {
    fn begin(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }

    fn enter(&self, stage: Stage) {
        if let Some(index) = STAGES.iter().position(|&(known, _)| known == stage) {
            self.stage.store(index, Ordering::Relaxed);
        }
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// Results of the library, on their way to Python.
pub(crate) trait OrRaise<T> {
    /// The exception that says the same.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for df11::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}

/// The exception's class tells who is at fault.
fn raise(py: Python<'_>, error: &Error) -> PyErr {
    if matches!(error, Error::Cancelled) {
        return PyKeyboardInterrupt::new_err(());
    }
    let exception = || -> PyResult<Bound<'_, PyAny>> {
        let class = py.import(intern!(py, "df11._errors"))?.getattr(class(error))?;
        let (message, remedy) = message(error);
        let exception = class.call1((message,))?;
        exception.setattr("remedy", remedy)?;
        match error {
            Error::Io { source, .. } => exception.setattr("errno", source.raw_os_error())?,
            Error::Corrupt { place, offset, .. } => {
                exception.setattr("place", place)?;
                exception.setattr("offset", offset)?;
            }
            _ => {}
        }
        Ok(exception)
    };
    exception().map_or_else(|failure| failure, PyErr::from_value)
}

/// The message of an exception, and the remedy at its end, if it has one.
fn message(error: &Error) -> (String, Option<String>) {
    let missing = match error {
        Error::Unsupported { remedy, .. }
        | Error::NoBase { remedy, .. }
        | Error::Parameter { remedy, .. }
        | Error::Gpu { remedy, .. }
        | Error::Corrupt { remedy: Some(remedy), .. } => {
            return (error.to_string(), Some(remedy.clone()));
        }
        Error::Exists { path } => {
            let remedy = "choose another output, or replace it with overwrite=True";
            return (format!("{path} exists; {remedy}"), Some(remedy.to_owned()));
        }
        Error::Io { source, .. } => io_remedy(source),
        Error::Corrupt { .. } => Some("download it or compress the model again"),
        Error::Limit { .. } => Some("section 1 of the format specification lists all limits"),
        _ => None,
    };
    let end = missing.map_or_else(String::new, |remedy| format!("; {remedy}"));
    (format!("{error}{end}"), missing.map(str::to_owned))
}

const fn class(error: &Error) -> &'static str {
    match error {
        Error::Io { .. } => "IoError",
        Error::Unsupported { .. } => "UnsupportedError",
        Error::NoBase { .. } => "NoBaseError",
        Error::Corrupt { .. } => "CorruptError",
        Error::Limit { .. } => "LimitError",
        Error::Parameter { .. } | Error::Exists { .. } => "ParameterError",
        Error::Gpu { .. } => "GpuError",
        _ => "Error",
    }
}

/// The error for an unknown word from the caller.
pub(crate) fn unknown_word(py: Python<'_>, what: &str, word: &str, words: &str) -> PyErr {
    raise(py, &Error::parameter(format!("{what} {word:?} is not known"), format!("choose {words}")))
}
