//! The runtime for requests: some threads in each process that opens a store.

use std::{num::NonZero, ops::RangeInclusive, process, sync::OnceLock, thread};

use tokio::runtime::{Builder, Handle, Runtime};

use crate::{Error, Result};

/// The fewest and the most threads that wait for sockets, decrypt and copy. A thread takes some
/// 0.8 GB/s without TLS (benches/record/2026-11-28-loading.md).
const THREADS: RangeInclusive<usize> = 2..=8;

/// A process and its runtime, and those of a process that was forked from it, as of
/// [`pool`](crate::parallel::pool).
struct OwnedRuntime {
    process: u32,
    runtime: Runtime,
    next: OnceLock<Box<Self>>,
}

static RUNTIMES: OnceLock<Box<OwnedRuntime>> = OnceLock::new();

/// The runtime of this process.
///
/// # Errors
/// [`Error::Parameter`] if the system refuses threads.
pub(super) fn handle() -> Result<&'static Handle> {
    let (process, mut slot) = (process::id(), &RUNTIMES);
    loop {
        match slot.get() {
            Some(owned) if owned.process == process => return Ok(owned.runtime.handle()),
            Some(owned) => slot = &owned.next,
            None => {
                let runtime = start()?;
                // Another thread may have been faster; then this runtime ends.
                let _ =
                    slot.set(Box::new(OwnedRuntime { process, runtime, next: OnceLock::new() }));
            }
        }
    }
}

fn start() -> Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    let threads = thread::available_parallelism().map_or(*THREADS.start(), NonZero::get);
    builder
        .worker_threads(threads.clamp(*THREADS.start(), *THREADS.end()))
        .thread_name("df11-store")
        .enable_all();
    builder.build().map_err(|error| {
        let problem = format!("cannot start threads that fetch: {error}");
        Error::parameter(problem, "allow the process more threads")
    })
}
