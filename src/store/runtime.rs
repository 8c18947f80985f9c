//! The runtime for requests: some threads in each process that opens a store.

use std::{num::NonZero, ops::RangeInclusive, thread};

use tokio::runtime::{Builder, Handle, Runtime};

use crate::{Error, Result, parallel::PerProcess};

/// The fewest and the most threads that wait for sockets, decrypt and copy. A thread takes some
/// 0.8 GB/s without TLS (benches/record/2026-11-28-loading.md).
const THREADS: RangeInclusive<usize> = 2..=8;

/// The runtime of this process.
///
/// # Errors
/// [`Error::Parameter`] if the system refuses threads.
pub(super) fn handle() -> Result<&'static Handle> {
    static RUNTIMES: PerProcess<Runtime> = PerProcess::new();
    RUNTIMES.get(start).map(Runtime::handle)
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
