//! Options for opening models.

use std::path::PathBuf;
#[cfg(feature = "remote")]
use std::time::Duration;

#[cfg(feature = "remote")]
use super::cache::CacheFolder;
#[cfg(feature = "remote")]
use crate::store::Patience;

/// Options for opening a model.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub(super) memory_map: bool,
    pub(super) checksums: bool,
    pub(super) base: Option<PathBuf>,
    /// The number of models that have this one as their base.
    pub(super) depth: usize,
    #[cfg(feature = "remote")]
    pub(super) in_memory: bool,
    #[cfg(feature = "remote")]
    pub(super) patience: Patience,
    #[cfg(feature = "remote")]
    pub(super) cache: Option<CacheFolder>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Map the container, and check checksums.
    pub const fn new() -> Self {
        Self {
            memory_map: true,
            checksums: true,
            base: None,
            depth: 0,
            #[cfg(feature = "remote")]
            in_memory: false,
            #[cfg(feature = "remote")]
            patience: Patience::DEFAULT,
            #[cfg(feature = "remote")]
            cache: None,
        }
    }

    /// Whether remote containers are fetched completely into memory, as if they were mapped.
    /// Opening starts the fetch. A read of a tensor waits for its bytes, which are requested next,
    /// and gets the error of the first container that fails. Otherwise (the default) bytes are
    /// fetched when they are read. Local files are read into memory if they are not mapped either
    /// ([`memory_map`](Self::memory_map)).
    #[cfg(feature = "remote")]
    #[must_use]
    pub const fn in_memory(mut self, in_memory: bool) -> Self {
        self.in_memory = in_memory;
        self
    }

    /// Keeps fetched chunks in a folder of at most about this many bytes, for later runs and other
    /// processes. Without this option, the environment variable `DF11_CACHE` names the folder and
    /// `DF11_CACHE_BYTES` (64 GiB by default) its size; without the variable nothing is kept. Local
    /// files do not use the cache.
    ///
    /// Several processes may share a folder. Each counts the chunks of the others every 64 MiB, so
    /// the folder may exceed its size by that much for a while. Chunks are checked at every read.
    #[cfg(feature = "remote")]
    #[must_use]
    pub fn cache(mut self, folder: impl Into<PathBuf>, most: u64) -> Self {
        self.cache = Some(CacheFolder { folder: folder.into(), most });
        self
    }

    /// How long a store may be silent (30 s) before a request is made again, and how many requests
    /// for the same bytes may fail (6) before reading them fails.
    #[cfg(feature = "remote")]
    #[must_use]
    pub const fn patience(mut self, stall: Duration, tries: u32) -> Self {
        self.patience = Patience { stall, tries, ..self.patience };
        self
    }

    /// The base of a model that was compressed against one: its folder, its container or
    /// safetensors file, or its name in the cache of the Hub (`org/name`). Without this option the
    /// base is looked for where the model says; if it is missing, tensors that need it return
    /// [`Error::NoBase`](crate::Error::NoBase). Other models ignore it.
    #[must_use]
    pub fn base(mut self, base: impl Into<PathBuf>) -> Self {
        self.base = Some(base.into());
        self
    }

    /// Whether to map containers into memory (the default), or to read from them on demand. Reading
    /// copies, but a file that shrinks meanwhile is an [`Error::Io`](crate::Error::Io).
    #[must_use]
    pub const fn memory_map(mut self, memory_map: bool) -> Self {
        self.memory_map = memory_map;
        self
    }

    /// Whether to check the checksum of each 1 MiB chunk the first time that it is read (the
    /// default).
    #[must_use]
    pub const fn checksums(mut self, checksums: bool) -> Self {
        self.checksums = checksums;
        self
    }
}
