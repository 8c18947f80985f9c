//! Keeps fetched chunks on a local disk, for later runs and for other processes. The cache is off
//! unless somebody names a folder.
//!
//! ```text
//! FOLDER/HASH/SHARD-CHUNK-CHECKSUM.chunk     the bytes of one chunk
//! FOLDER/HASH/NN.lock                        locked while a process fetches some chunks
//! ```
//! HASH covers the container's name and the model's identity: a store that claims the identity of
//! another store's model cannot supply chunks of that model.
//!
//! A rename makes each file appear complete, and every read checks it: a damaged file is removed,
//! and the chunk is fetched again. The least recently used chunks are removed first. The crate
//! `cacache` was rejected: it brings its own hashes, index and runtime, and has no size limit.

use std::{
    env,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock},
    thread,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    Error, Result,
    io::read_regular,
    parallel, platform,
    store::check_interrupt,
    temporary::{file_beside, remove_leftovers},
};

/// Bytes of a cache whose size nobody has said.
const DEFAULT_BYTES: u64 = 64 << 30;
/// Bytes that a process adds before it counts what others have added.
const UNCOUNTED_BYTES: u64 = 64 << 20;
/// A cache that is full is emptied to this share, in percent.
const LEFT_PERCENT: u64 = 90;
const ENDING: &str = "chunk";
/// Chunks that are fetched together.
pub(super) const LOT_CHUNKS: usize = 16;
/// Locks of a model. Lots that share one are fetched one after the other.
const CLAIMS: u64 = 64;
/// How long another process is waited for, and how often it is looked at.
const LONGEST_CLAIM: Duration = Duration::from_secs(60);
const CLAIM_PAUSE: Duration = Duration::from_millis(10);

/// Which chunk: of this model, in this shard of this name, with this number and this checksum.
pub(super) struct ChunkKey {
    pub(super) identity: [u8; 32],
    pub(super) name: PathBuf,
    pub(super) shard: u64,
    pub(super) chunk: usize,
    pub(super) checksum: u32,
}

/// A folder of chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheFolder {
    pub(crate) folder: PathBuf,
    /// Bytes that it may have.
    pub(crate) most: u64,
}

static CHOSEN: OnceLock<(PathBuf, Option<u64>)> = OnceLock::new();

/// Chooses the cache of this process, for models that are opened without one of their own. The
/// first choice stays. `None` bytes stand for those of `DF11_CACHE_BYTES`, or for 64 GiB.
pub fn choose_cache(folder: &Path, most: Option<u64>) {
    let _ = CHOSEN.set((folder.to_owned(), most));
}

impl CacheFolder {
    /// The cache that the process or the environment has: `DF11_CACHE` and `DF11_CACHE_BYTES`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for an invalid number.
    pub(super) fn chosen() -> Result<Option<Self>> {
        let named = || {
            let folder = env::var_os("DF11_CACHE").filter(|folder| !folder.is_empty())?;
            Some((folder.into(), None))
        };
        let Some((folder, most)) = CHOSEN.get().cloned().or_else(named) else { return Ok(None) };
        let most = most.map_or_else(bytes_of_environment, Ok)?;
        Ok(Some(Self { folder, most }))
    }
}

fn bytes_of_environment() -> Result<u64> {
    let Ok(text) = env::var("DF11_CACHE_BYTES") else { return Ok(DEFAULT_BYTES) };
    text.parse().map_err(|_| {
        let problem = format!("DF11_CACHE_BYTES is {text:?}");
        Error::parameter(problem, "set it to a number of bytes")
    })
}

/// An open cache.
#[derive(Debug)]
pub(super) struct Cache {
    place: CacheFolder,
    count: Mutex<Count>,
}

#[derive(Debug, Default)]
struct Count {
    /// Bytes when all files were counted, and those that this process has added since.
    counted: u64,
    added: u64,
}

impl Cache {
    /// Makes the folder if it is missing, and removes from it what is too much.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be made or listed.
    pub(super) fn open(place: CacheFolder) -> Result<Self> {
        let folder = &place.folder;
        fs::create_dir_all(folder).map_err(|error| Error::io("creating", folder, error))?;
        let cache = Self { place, count: Mutex::default() };
        cache.sweep(&mut parallel::lock(&cache.count))?;
        Ok(cache)
    }

    fn path_of(&self, key: &ChunkKey) -> PathBuf {
        let mut model = blake3::Hasher::new();
        model.update(&key.identity).update(key.name.as_os_str().as_encoded_bytes());
        let model = model.finalize().to_hex();
        let name = format!("{}-{}-{:08x}.{ENDING}", key.shard, key.chunk, key.checksum);
        self.place.folder.join(&model[..]).join(name)
    }

    /// The bytes of a chunk of this length, if they are here and right.
    pub(super) fn find(&self, key: &ChunkKey, length: u64) -> Option<Vec<u8>> {
        let path = self.path_of(key);
        if !path.exists() {
            return None;
        }
        let bytes = read_regular(&path, length).ok();
        let is_right = |bytes: &Vec<u8>| {
            bytes.len() as u64 == length && crc32fast::hash(bytes) == key.checksum
        };
        if let Some(bytes) = bytes.filter(is_right) {
            let touched = File::options().append(true).open(&path);
            let _ = touched.and_then(|file| file.set_modified(SystemTime::now()));
            return Some(bytes);
        }
        // Another process may have put the right bytes there meanwhile: then they are fetched
        // once more.
        let _ = fs::remove_file(&path);
        None
    }

    /// Keeps other processes and threads from fetching the chunks near this one, until the answer
    /// is dropped: waits until nobody else does. None if the file system has no locks, or another
    /// process is slow: then a chunk may be fetched twice.
    ///
    /// # Errors
    /// [`io::ErrorKind::Interrupted`] if waits shall end.
    pub(super) fn claim(&self, key: &ChunkKey) -> io::Result<Option<File>> {
        let number = (key.shard + (key.chunk / LOT_CHUNKS) as u64) % CLAIMS;
        let path = platform::long(&self.path_of(key)).with_file_name(format!("{number:02}.lock"));
        let start = Instant::now();
        loop {
            let opened = fs::create_dir_all(path.parent().unwrap_or(&path))
                .and_then(|()| File::options().append(true).create(true).open(&path));
            match opened.and_then(|file| platform::lock(file, &path)) {
                Ok(None) if start.elapsed() < LONGEST_CLAIM => {
                    check_interrupt()?;
                    thread::sleep(CLAIM_PAUSE);
                }
                claim => return Ok(claim.ok().flatten()),
            }
        }
    }

    /// Whether a chunk seems to be here, by its name alone.
    pub(super) fn has(&self, key: &ChunkKey) -> bool {
        self.path_of(key).exists()
    }

    /// Keeps a chunk. A disk that is full or fails costs a later run its time, and nothing else.
    pub(super) fn add(&self, key: &ChunkKey, bytes: &[u8]) {
        let length = bytes.len() as u64;
        if length > self.place.most {
            return;
        }
        let mut count = parallel::lock(&self.count);
        if (count.added >= UNCOUNTED_BYTES
            || count.counted + count.added + length > self.place.most)
            && self.sweep(&mut count).is_err()
        {
            return;
        }
        if write(&self.path_of(key), bytes).is_some() {
            count.added += length;
        }
    }

    /// Counts all chunks; of too many, those go that were used longest ago.
    fn sweep(&self, count: &mut Count) -> Result<()> {
        let listing = |error| Error::io("listing", &self.place.folder, error);
        let mut all = Vec::new();
        for folder in fs::read_dir(&self.place.folder).map_err(listing)? {
            let folder = folder.map_err(listing)?.path();
            if !is_of_cache(&folder) {
                continue;
            }
            let _ = remove_leftovers(&folder);
            // Another process may have removed it.
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let is_chunk = entry.path().extension().is_some_and(|ending| ending == ENDING);
                if let (true, Ok(found)) = (is_chunk, entry.metadata()) {
                    all.push((found.modified().ok(), found.len(), entry.path()));
                }
            }
        }
        let mut bytes: u64 = all.iter().map(|(_, length, _)| length).sum();
        if bytes + UNCOUNTED_BYTES.min(self.place.most / 10) > self.place.most {
            all.sort_unstable();
            let left = self.place.most / 100 * LEFT_PERCENT;
            for (_, length, path) in all {
                if bytes <= left {
                    break;
                }
                if fs::remove_file(path).is_ok() {
                    bytes -= length;
                }
            }
        }
        *count = Count { counted: bytes, added: 0 };
        Ok(())
    }
}

/// Whether a folder has a name that only a cache gives: other files beside it are somebody's.
fn is_of_cache(folder: &Path) -> bool {
    folder
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn write(path: &Path, bytes: &[u8]) -> Option<()> {
    let mut temporary = file_beside(path).ok()?;
    temporary.file.write_all(bytes).ok()?;
    temporary.file.persist(platform::long(path)).ok()?;
    Some(())
}
