//! Uploads files to a store, all or nothing: large files in parts, several at once.

use std::{
    borrow::Cow,
    hash::{BuildHasher as _, RandomState},
    io, mem,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::{
    Attribute, AttributeValue, GetOptions, MultipartId, ObjectStore, ObjectStoreExt as _, PutMode,
    PutOptions, PutPayload,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use tokio::time;

use super::{
    fault::Fault,
    fetch::{ObjectSource, Patience, retry},
    interrupt,
    object::{wait, wait_watched},
    runtime,
};
use crate::{
    Error, Result,
    constants::HEAD_BYTES,
    io::{FileReader, ReadAt as _},
    parallel,
};

/// Bytes of a part, at least; a store takes up to [`MAX_PARTS`].
const PART_BYTES: u64 = 16 << 20;
const MAX_PARTS: u64 = 10_000;
/// Names a small object's mark. Azure wants letters and digits alone.
const MARK: Attribute = Attribute::Metadata(Cow::Borrowed("df11upload"));
/// Parts of one object that are sent at once.
const AT_ONCE: usize = 6;
/// How long sending one part may take, in times of the patience for an answer.
const STALLS: u32 = 10;

/// A store that takes objects.
pub(super) trait Store: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Store for T {}

/// An object that is put.
#[derive(Clone)]
struct Upload {
    store: Arc<dyn Store>,
    path: Path,
    patience: Patience,
    file: Arc<FileReader>,
    sent: Arc<AtomicU64>,
    /// A random number that a small object has as metadata: other runs put the same bytes.
    mark: u64,
}

/// Where an object is put.
pub(super) struct UploadTarget {
    pub(super) store: Arc<dyn Store>,
    pub(super) path: Path,
    pub(super) patience: Patience,
    /// For errors.
    pub(super) name: String,
}

impl UploadTarget {
    /// Puts a file where nothing is. Tells how many bytes more were sent, and ends if the answer to
    /// that is an error.
    ///
    /// # Errors
    /// [`Error::Exists`]; [`Error::Io`]; [`Error::Cancelled`]; that of `advance`.
    pub(super) fn put(
        self,
        file: &std::path::Path,
        mut advance: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let file = Arc::new(FileReader::open(file)?);
        let Self { store, path, patience, name } = self;
        let mark = RandomState::new().hash_one(file.size());
        let upload = Upload { store, path, patience, file, sent: Arc::default(), mark };
        let (mut stopped, mut told) = (None, 0);
        let mut tell = || {
            let now = upload.sent.load(Ordering::Relaxed);
            let more = now - mem::replace(&mut told, now);
            advance(more).map_err(|error| {
                stopped = Some(error);
                io::Error::from(io::ErrorKind::Interrupted)
            })
        };
        let put = upload.put(&mut tell).and_then(|()| tell());
        put.map_err(|error| match (stopped, error.kind()) {
            (Some(stopped), _) => stopped,
            (None, io::ErrorKind::AlreadyExists) => Error::Exists { path: name },
            (None, _) => Error::io("uploading", name, error),
        })
    }

    /// Removes the object.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn remove(self) -> Result<()> {
        let Self { store, path, patience, name } = self;
        let work = async move {
            retry(patience, || async { store.delete(&path).await.map_err(Fault::from) }).await
        };
        unhurried(patience, work).map_err(|error| Error::io("removing", name, error))
    }
}

impl Upload {
    fn put(&self, tell: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        if self.file.size() <= PART_BYTES {
            let this = self.clone();
            return watched(tell, async move { this.put_small().await });
        }
        let this = self.clone();
        let id = watched(tell, async move {
            let create = || this.in_time(this.store.create_multipart(&this.path));
            retry(this.patience, create).await
        })?;
        let (this, of) = (self.clone(), id.clone());
        let put = watched(tell, async move { this.put_parts(of).await });
        if put.is_err() {
            // Stores keep the parts of an upload that nobody ends, and have them paid for.
            let this = self.clone();
            let _ = unhurried(self.patience, async move {
                let aborted = this.store.abort_multipart(&this.path, &id).await;
                aborted.map_err(io::Error::other)
            });
        }
        put
    }

    async fn put_small(&self) -> io::Result<()> {
        let payload = self.read(0..self.file.size())?;
        let tries = AtomicU64::new(0);
        let put = || async {
            tries.fetch_add(1, Ordering::Relaxed);
            let attributes = [(MARK, self.mark.to_string())].into_iter().collect();
            let options = PutOptions { mode: PutMode::Create, attributes, ..Default::default() };
            let sent = self.store.put_opts(&self.path, payload.clone(), options);
            self.in_time(sent).await.map(drop)
        };
        match retry(self.patience, put).await {
            // An earlier try may have put it, and its answer was lost.
            Err(error)
                if (may_have_succeeded(&error)
                    || error.kind() == io::ErrorKind::AlreadyExists && tries.into_inner() > 1)
                    && self.is_there().await => {}
            done => done?,
        }
        self.sent.fetch_add(self.file.size(), Ordering::Relaxed);
        Ok(())
    }

    /// Whether the object that is there was put by this upload.
    async fn is_there(&self) -> bool {
        let get = || async {
            let options = GetOptions { head: true, ..GetOptions::default() };
            self.in_time(self.store.get_opts(&self.path, options)).await
        };
        let found = retry(self.patience, get).await;
        let mark = AttributeValue::from(self.mark.to_string());
        found.is_ok_and(|found| found.attributes.get(&MARK) == Some(&mark))
    }

    async fn put_parts(&self, id: MultipartId) -> io::Result<()> {
        let size = self.file.size();
        let each = PART_BYTES.max(size.div_ceil(MAX_PARTS));
        let parts = parallel::cut(0..size, each, 1).enumerate();
        let put = parts.map(|(at, range)| self.put_part(&id, at, range));
        let parts: Vec<PartId> = stream::iter(put).buffered(AT_ONCE).try_collect().await?;
        if self.length().await?.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let complete = || async {
            let done = self.store.complete_multipart(&self.path, &id, parts.clone());
            self.in_time(done).await.map(drop)
        };
        match retry(self.patience, complete).await {
            // An earlier try may have ended the upload, and its answer been lost.
            Err(error)
                if (may_have_succeeded(&error) || error.kind() == io::ErrorKind::NotFound)
                    && self.is_whole().await =>
            {
                Ok(())
            }
            done => done,
        }
    }

    /// Whether the object that is there has the length and the first bytes of the file. Those of a
    /// container have the checksum of its directory, which has those of all other bytes.
    async fn is_whole(&self) -> bool {
        let head = 0..self.file.size().min(HEAD_BYTES);
        let Ok(wanted) = self.read(head.clone()) else { return false };
        let get = || async {
            let options = GetOptions::new().with_range(Some(head.clone()));
            let answer = self.in_time(self.store.get_opts(&self.path, options)).await?;
            let size = answer.meta.size;
            Ok((size, self.in_time(answer.bytes()).await?))
        };
        let found = retry(self.patience, get).await;
        found.is_ok_and(|(size, bytes)| {
            size == self.file.size() && wanted.into_iter().flatten().eq(bytes)
        })
    }

    async fn put_part(&self, id: &MultipartId, at: usize, range: Range<u64>) -> io::Result<PartId> {
        let (payload, length) = (self.read(range.clone())?, range.end - range.start);
        let put = || async {
            let sent = self.store.put_part(&self.path, id, at, payload.clone());
            self.in_time(sent).await
        };
        let part = retry(self.patience, put).await?;
        self.sent.fetch_add(length, Ordering::Relaxed);
        Ok(part)
    }

    fn read(&self, range: Range<u64>) -> io::Result<PutPayload> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.file.read_exact_at(range.start, &mut bytes)?;
        Ok(bytes.into())
    }

    /// The length of the object that is there.
    async fn length(&self) -> io::Result<Option<u64>> {
        find_length(&self.store, &self.path, self.patience).await
    }

    async fn in_time<T>(
        &self,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Fault> {
        within(self.patience.stall.saturating_mul(STALLS), work).await
    }
}

/// Whether a request that failed so may have had its effect.
fn may_have_succeeded(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionReset, Other, TimedOut};
    matches!(error.kind(), ConnectionReset | Other | TimedOut)
}

async fn within<T>(
    most: Duration,
    work: impl Future<Output = object_store::Result<T>>,
) -> Result<T, Fault> {
    let late = |_| Fault::passing(io::ErrorKind::TimedOut, "the server took too long");
    Ok(time::timeout(most, work).await.map_err(late)??)
}

/// Waits, and tells meanwhile what was sent.
fn watched<T: Send + 'static>(
    tell: &mut dyn FnMut() -> io::Result<()>,
    work: impl Future<Output = io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    let handle = runtime::handle().map_err(io::Error::other)?;
    wait_watched(handle, work, || interrupt::check().and_then(|()| tell()))
}

/// Waits even if the process is asked to stop, because this cleans up; but not for long.
fn unhurried<T: Send + 'static>(
    patience: Patience,
    work: impl Future<Output = io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    const MAX: Duration = Duration::from_secs(10);
    let handle = runtime::handle().map_err(io::Error::other)?;
    let most = MAX.min(patience.stall);
    let work = async move {
        time::timeout(most, work).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    };
    wait_watched(handle, work, || Ok(()))
}

/// The length of an object, if it is there.
pub(super) fn length_of(source: &ObjectSource) -> io::Result<Option<u64>> {
    let ObjectSource { store, path, patience, .. } = source.clone();
    let handle = runtime::handle().map_err(io::Error::other)?;
    wait(handle, async move { find_length(&store, &path, patience).await })
}

async fn find_length<S: ObjectStore + ?Sized>(
    store: &Arc<S>,
    path: &Path,
    patience: Patience,
) -> io::Result<Option<u64>> {
    let head = || async { Ok(within(patience.stall, store.head(path)).await?.size) };
    match retry(patience, head).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}
