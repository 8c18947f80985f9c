//! One object of a store, whose bytes many threads can read.

use std::{
    any::Any,
    fmt, io,
    ops::Range,
    sync::{
        Arc, Mutex, Weak,
        mpsc::{self, RecvTimeoutError},
    },
};

use bytes::BytesMut;
use object_store::path::Path;
use tokio::runtime::Handle;

use super::{
    ahead::{AheadQueue, Queues},
    arrival::Arrivals,
    fetch::{ObjectSource, PinnedObject, ended_early, read_exact},
    interrupt, runtime,
};
use crate::{Error, Result, constants::HEAD_BYTES, error::io_remedied, io::ReadAt, parallel};

/// The longest request for bytes that nobody said would be read.
const REQUEST_BYTES: u64 = 64 << 20;

/// An object, pinned: all its bytes are of the version that was there when it was opened.
pub(crate) struct Object {
    pinned: PinnedObject,
    head: BytesMut,
    plans: Mutex<Vec<Weak<AheadQueue>>>,
    queues: Arc<Queues>,
    arrivals: Arc<Arrivals>,
    name: String,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object").field("size", &self.pinned.version.size).finish_non_exhaustive()
    }
}

impl Object {
    /// Fetches the first bytes of an object, and learns its version. `name` is for errors. One
    /// request.
    ///
    /// # Errors
    /// [`Error::Io`], with what to do.
    pub(super) fn open(
        source: ObjectSource,
        (queues, arrivals): (Arc<Queues>, Arc<Arrivals>),
        name: &str,
    ) -> Result<Self> {
        let handle = runtime::handle()?;
        let first = source.clone();
        let found = wait(handle, async move { first.fetch(0..HEAD_BYTES, None).await });
        let (head, version) = found.map_err(|error| Error::io("opening", name, error))?;
        let pinned = PinnedObject::new(source, version, handle);
        let (plans, name) = (Mutex::default(), name.to_owned());
        Ok(Self { pinned, head, plans, queues, arrivals, name })
    }

    /// Reads bytes that are held or planned; None if they are neither.
    fn read_known(&self, offset: u64, out: &mut [u8]) -> Option<io::Result<usize>> {
        if let Some(head) = self.head.get(offset as usize..).filter(|head| !head.is_empty()) {
            let count = head.len().min(out.len());
            out[..count].copy_from_slice(&head[..count]);
            return Some(Ok(count));
        }
        let plans: Vec<_> = parallel::lock(&self.plans).iter().filter_map(Weak::upgrade).collect();
        plans.iter().find_map(|plan| plan.read(offset, out))
    }

    /// Fetches some bytes at once: at most one request's.
    fn fetch(&self, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let count = REQUEST_BYTES.min(out.len() as u64);
        let pinned = self.pinned.clone();
        let fetch = async move { pinned.fetch(offset..offset + count).await };
        out[..count as usize].copy_from_slice(&wait(self.pinned.handle, fetch)?);
        Ok(count as usize)
    }
}

impl ReadAt for Object {
    fn size(&self) -> u64 {
        self.pinned.version.size
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.pinned.check_process()?;
        read_exact(self.size(), offset, buf, |at, rest| {
            self.read_known(at, rest).unwrap_or_else(|| self.fetch(at, rest))
        })
    }

    fn bring_whole(&self, first: &[Range<u64>]) -> Option<io::Result<Box<dyn ReadAt>>> {
        let begun = self.pinned.check_process();
        let begun =
            begun.and_then(|()| self.arrivals.begin(self.pinned.clone(), &self.name, first));
        Some(begun.map(|object| Box::new(object) as _))
    }

    fn read_ahead(&self, ranges: &[Range<u64>]) -> Option<Box<dyn Any + Send + Sync>> {
        let plan = AheadQueue::new(self.pinned.clone(), Arc::clone(&self.queues), ranges);
        let mut plans = parallel::lock(&self.plans);
        plans.retain(|plan| plan.strong_count() > 0);
        plans.push(Arc::downgrade(&plan));
        Some(Box::new(plan))
    }
}

/// All bytes of a small object. `name` is for errors.
///
/// # Errors
/// [`Error::Io`], also if it has more than `most`.
pub(super) fn read_small(source: &ObjectSource, name: &str, most: u64) -> Result<Vec<u8>> {
    read_up_to(source, name, most)?.map_err(|length| {
        let problem =
            format!("it has {length} bytes, and at most {most} were expected; check the name");
        Error::io("reading", name, io_remedied(io::ErrorKind::InvalidData, problem))
    })
}

/// All bytes of an object that has at most `most`, or the length of another.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn read_up_to(
    source: &ObjectSource,
    name: &str,
    most: u64,
) -> Result<std::result::Result<Vec<u8>, u64>> {
    let source = source.clone();
    let found = wait(runtime::handle()?, async move { source.fetch_all(most).await });
    let found = found.map_err(|error| Error::io("reading", name, error))?;
    Ok(found.map(Vec::from))
}

/// The path of an object in its store.
///
/// # Errors
/// [`Error::Parameter`] for a path that no store has.
pub(super) fn path_of(path: &str) -> Result<Path> {
    Path::parse(path).map_err(|_| {
        let problem = format!("{path:?} is not the path of an object");
        Error::parameter(problem, "name an object without empty parts, . and ..")
    })
}

/// Runs a request and waits for it, also inside another runtime. The wait ends if the process is
/// asked to stop.
pub(super) fn wait<T: Send + 'static>(
    handle: &Handle,
    work: impl Future<Output = io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    wait_watched(handle, work, interrupt::check)
}

/// The same, but the wait ends if `check`, which is called ten times per second, returns an error.
pub(super) fn wait_watched<T: Send + 'static>(
    handle: &Handle,
    work: impl Future<Output = io::Result<T>> + Send + 'static,
    mut check: impl FnMut() -> io::Result<()>,
) -> io::Result<T> {
    let (send, receive) = mpsc::sync_channel(1);
    let task = handle.spawn(async move {
        let _ = send.send(work.await);
    });
    loop {
        match receive.recv_timeout(interrupt::TICK) {
            Ok(found) => return found,
            Err(RecvTimeoutError::Timeout) => {
                check().inspect_err(|_| task.abort())?;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(ended_early()),
        }
    }
}
