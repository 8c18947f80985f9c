//! Fetches one range: each retry continues where the last attempt broke off.

use std::{
    io,
    ops::Range,
    process,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use futures_util::StreamExt;
use object_store::{GetOptions, GetResult, ObjectStore, ObjectStoreExt, path::Path};
use tokio::{runtime::Handle, sync::Semaphore, time};

use super::fault::{CHANGED, Fault};
use crate::{constants::MAX_SHARDS, error::io_remedied};

/// Bytes that a try must bring in each [`Patience::stall`], and that make it count as no failure.
const PROGRESS_BYTES: usize = 16 << 10;
/// Requests of one place that are under way at once, at most.
pub(super) const MAX_REQUESTS: usize = 32;

/// How long answers are waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// How long an answer may bring nothing.
    pub(crate) stall: Duration,
    /// Tries that may fail one after the other.
    pub(crate) tries: u32,
    /// The pause after the first of them; each later one is twice as long.
    pub(crate) pause: Duration,
}

impl Patience {
    pub(crate) const DEFAULT: Self =
        Self { stall: Duration::from_secs(30), tries: 6, pause: Duration::from_millis(200) };
}

/// Which bytes an object has: what tells one version of it from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) size: u64,
    etag: Option<String>,
    /// If there is no ETag: in seconds since 1970.
    modified: Option<i64>,
}

impl Version {
    pub(super) fn of(result: &GetResult) -> Self {
        let etag = result.meta.e_tag.clone();
        let modified = etag.is_none().then(|| result.meta.last_modified.timestamp());
        Self { size: result.meta.size, etag, modified }
    }
}

/// An object and the way to it.
#[derive(Clone)]
pub(super) struct ObjectSource {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    pub(super) patience: Patience,
    pub(super) requests: Arc<Semaphore>,
}

/// An object at the version that was found first.
#[derive(Clone)]
pub(super) struct PinnedObject {
    pub(super) source: ObjectSource,
    pub(super) version: Version,
    /// The runtime of its requests.
    pub(super) handle: &'static Handle,
    /// Sockets do not outlive a fork.
    process: u32,
}

impl PinnedObject {
    pub(super) fn new(source: ObjectSource, version: Version, handle: &'static Handle) -> Self {
        Self { source, version, handle, process: process::id() }
    }

    /// Fetches a range.
    pub(super) async fn fetch(&self, range: Range<u64>) -> io::Result<BytesMut> {
        self.source.fetch(range, Some(&self.version)).await.map(|(bytes, _)| bytes)
    }

    /// The same, into `bytes`, which is empty and has room for the range.
    pub(super) async fn fetch_into(
        &self,
        range: Range<u64>,
        bytes: &mut BytesMut,
    ) -> io::Result<()> {
        self.source.fetch_into(range, Some(&self.version), bytes).await.map(drop)
    }

    /// Requests end with the process that made them.
    pub(super) fn check_process(&self) -> io::Result<()> {
        if self.process == process::id() {
            return Ok(());
        }
        let problem = "it was opened before this process was forked; open it in this one";
        Err(io_remedied(io::ErrorKind::Other, problem))
    }
}

impl ObjectSource {
    /// Fetches a range, of a pinned version if there is one. Returns the version too.
    pub(super) async fn fetch(
        &self,
        range: Range<u64>,
        pinned: Option<&Version>,
    ) -> io::Result<(BytesMut, Version)> {
        let mut bytes = BytesMut::with_capacity((range.end - range.start) as usize);
        let version = self.fetch_into(range, pinned, &mut bytes).await?;
        Ok((bytes, version))
    }

    /// The same, into `bytes`, which is empty and has room for the range.
    async fn fetch_into(
        &self,
        range: Range<u64>,
        pinned: Option<&Version>,
        bytes: &mut BytesMut,
    ) -> io::Result<Version> {
        let mut found = pinned.cloned();
        let mut failed = FailedTries::none(self.patience);
        loop {
            let before = bytes.len();
            let rest = range.start + before as u64..range.end;
            let Err(fault) = self.try_fetch(rest, &mut found, bytes).await else {
                return Ok(found.expect("an answer has a version"));
            };
            if bytes.len() - before >= PROGRESS_BYTES {
                failed = FailedTries::none(self.patience);
            }
            failed.add(fault).await?;
        }
    }

    /// Makes one request. The bytes that it has received stay in `bytes`.
    async fn try_fetch(
        &self,
        range: Range<u64>,
        pinned: &mut Option<Version>,
        bytes: &mut BytesMut,
    ) -> Result<(), Fault> {
        let _permit = self.requests.acquire().await;
        let options = GetOptions::new().with_range(Some(range.clone()));
        let answer = self.in_time(self.store.get_opts(&self.path, options)).await?;
        let answer = answer.map_err(|error| Fault::of_range(error, pinned.is_some()))?;
        let version = Version::of(&answer);
        match pinned {
            Some(pinned) if *pinned != version => {
                return Err(Fault::lasting(io::ErrorKind::InvalidData, CHANGED));
            }
            pinned => *pinned = Some(version),
        }
        let length = answer.range.end - answer.range.start;
        self.take_body(answer, length as usize, bytes).await
    }

    /// Reads a body of this length. A fault after its last byte is ignored.
    async fn take_body(
        &self,
        answer: GetResult,
        length: usize,
        bytes: &mut BytesMut,
    ) -> Result<(), Fault> {
        let end = bytes.len() + length;
        let taken = self.take_parts(answer, length, bytes).await;
        if length > 0 && bytes.len() == end { Ok(()) } else { taken }
    }

    async fn take_parts(
        &self,
        answer: GetResult,
        length: usize,
        bytes: &mut BytesMut,
    ) -> Result<(), Fault> {
        let start = bytes.len();
        let mut body = answer.into_stream();
        let (mut since, mut had) = (Instant::now(), start);
        while let Some(part) = self.in_time(body.next()).await? {
            let part = part.map_err(Fault::from)?;
            if part.len() > length - (bytes.len() - start) {
                bytes.truncate(start);
                return Err(wrong_length("more"));
            }
            bytes.extend_from_slice(&part);
            if since.elapsed() >= self.patience.stall {
                Self::check_progress(bytes.len() - had)?;
                (since, had) = (Instant::now(), bytes.len());
            }
        }
        if bytes.len() - start == length { Ok(()) } else { Err(wrong_length("fewer")) }
    }

    fn check_progress(bytes: usize) -> Result<(), Fault> {
        if bytes >= PROGRESS_BYTES {
            return Ok(());
        }
        Err(Fault::passing(io::ErrorKind::TimedOut, "the answer was too slow"))
    }

    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T, Fault> {
        let late = |_| Fault::passing(io::ErrorKind::TimedOut, "the server did not answer in time");
        time::timeout(self.patience.stall, work).await.map_err(late)
    }

    /// All of an object that has at most `most` bytes, or the length of another.
    pub(super) async fn fetch_all(&self, most: u64) -> io::Result<Result<BytesMut, u64>> {
        retry(self.patience, || self.try_fetch_all(most)).await
    }

    async fn try_fetch_all(&self, most: u64) -> Result<Result<BytesMut, u64>, Fault> {
        let answer = self.in_time(self.store.get(&self.path)).await?.map_err(Fault::from)?;
        let length = answer.meta.size;
        if length > most {
            return Ok(Err(length));
        }
        let mut bytes = BytesMut::new();
        self.take_body(answer, length as usize, &mut bytes).await?;
        Ok(Ok(bytes))
    }

    /// The paths of all objects in a folder.
    pub(super) async fn list(&self) -> io::Result<Vec<String>> {
        retry(self.patience, || self.try_list()).await
    }

    async fn try_list(&self) -> Result<Vec<String>, Fault> {
        let prefix = (self.path != Path::default()).then_some(&self.path);
        let (mut all, mut paths) = (self.store.list(prefix), Vec::new());
        while let Some(found) = self.in_time(all.next()).await? {
            paths.push(found.map_err(Fault::from)?.location.to_string());
            if paths.len() as u64 > 2 * MAX_SHARDS {
                let problem = "it lists more files than a model has; name the model's own folder";
                return Err(Fault::lasting(io::ErrorKind::InvalidData, problem));
            }
        }
        Ok(paths)
    }
}

/// Makes a request until it succeeds, or fails for good.
pub(super) async fn retry<T, F>(patience: Patience, attempt: impl Fn() -> F) -> io::Result<T>
where
    F: Future<Output = Result<T, Fault>>,
{
    let mut failed = FailedTries::none(patience);
    loop {
        match attempt().await {
            Ok(found) => return Ok(found),
            Err(fault) => failed.add(fault).await?,
        }
    }
}

/// Tries that failed one after the other.
pub(super) struct FailedTries {
    patience: Patience,
    count: u32,
    pause: Duration,
}

impl FailedTries {
    pub(super) fn none(patience: Patience) -> Self {
        Self { patience, count: 0, pause: patience.pause }
    }

    /// Waits before the next try, unless this fault is the last.
    pub(super) async fn add(&mut self, fault: Fault) -> io::Result<()> {
        self.count += 1;
        if !fault.is_passing || self.count >= self.patience.tries {
            return Err(fault.after(self.count));
        }
        time::sleep(self.pause).await;
        self.pause = self.pause.saturating_mul(2);
        Ok(())
    }
}

/// Fills `buf` with bytes of an object of this size, from `offset` on. `read` reads as many as it
/// has at once, and answers their number.
pub(super) fn read_exact(
    size: u64,
    offset: u64,
    buf: &mut [u8],
    read: impl Fn(u64, &mut [u8]) -> io::Result<usize>,
) -> io::Result<()> {
    let end = offset.checked_add(buf.len() as u64);
    if end.is_none_or(|end| end > size) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut done = 0;
    while done < buf.len() {
        done += read(offset + done as u64, &mut buf[done..])?;
    }
    Ok(())
}

/// An empty vector with room for this many bytes.
///
/// # Errors
/// [`io::ErrorKind::OutOfMemory`].
pub(crate) fn memory_of(bytes: u64) -> io::Result<Vec<u8>> {
    let mut memory = Vec::new();
    let room = usize::try_from(bytes).ok().and_then(|room| memory.try_reserve_exact(room).ok());
    room.map(|()| memory).ok_or_else(|| {
        let problem = format!(
            "it takes {bytes} bytes of memory; put the container on a local disk, and open it there"
        );
        io_remedied(io::ErrorKind::OutOfMemory, problem)
    })
}

/// The error of a request that was aborted, or returned too few bytes.
pub(super) fn ended_early() -> io::Error {
    io_remedied(io::ErrorKind::Other, "the request ended early; open the container again")
}

fn wrong_length(than: &str) -> Fault {
    let text = format!("the server sent {than} bytes than it was asked for");
    Fault::passing(io::ErrorKind::UnexpectedEof, text)
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::SystemTime;

    use futures_util::stream;
    use object_store::{Attributes, GetResultPayload, ObjectMeta, memory::InMemory};
    use tokio::runtime;

    use super::*;
    use crate::store::runtime::handle;

    /// An object of these bytes in a store, and this many requests at once.
    pub(in crate::store) fn stored(bytes: Vec<u8>, requests: usize) -> PinnedObject {
        let (store, path) = (Arc::new(InMemory::new()), Path::from("x"));
        let requests = Arc::new(Semaphore::new(requests));
        let patience = Patience::DEFAULT;
        let source = ObjectSource { store: store.clone(), path: path.clone(), patience, requests };
        let put_and_ask = async {
            store.put(&path, bytes.into()).await.unwrap();
            Version::of(&store.get_opts(&path, GetOptions::new()).await.unwrap())
        };
        let handle = handle().unwrap();
        PinnedObject::new(source, handle.block_on(put_and_ask), handle)
    }

    fn source() -> ObjectSource {
        let (store, requests) = (Arc::new(InMemory::new()), Arc::new(Semaphore::new(1)));
        ObjectSource { store, path: Path::from("x"), patience: Patience::DEFAULT, requests }
    }

    /// An answer of these parts, of which None is a broken connection.
    fn answer(parts: &'static [Option<&'static [u8]>]) -> GetResult {
        let broken = || object_store::Error::Generic { store: "x", source: "broken".into() };
        let parts = parts.iter().map(move |part| part.map(Into::into).ok_or_else(broken));
        let payload = GetResultPayload::Stream(stream::iter(parts).boxed());
        let (location, last_modified) = (Path::from("x"), SystemTime::UNIX_EPOCH.into());
        let meta = ObjectMeta { location, last_modified, size: 4, e_tag: None, version: None };
        GetResult { payload, meta, range: 0..4, attributes: Attributes::new() }
    }

    /// Takes a body of four bytes.
    fn taken(parts: &'static [Option<&'static [u8]>]) -> Result<BytesMut, Fault> {
        let mut bytes = BytesMut::from("-");
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(source().take_body(answer(parts), 4, &mut bytes)).map(|()| bytes)
    }

    #[test]
    fn a_fault_after_the_last_byte_is_none() {
        assert_eq!(taken(&[Some(b"ab"), Some(b"cd"), None]).unwrap(), "-abcd");
        assert!(taken(&[Some(b"abc"), None]).is_err());
        assert!(taken(&[Some(b"abcd"), Some(b"e")]).is_err());
        assert!(taken(&[]).is_err());
    }
}
