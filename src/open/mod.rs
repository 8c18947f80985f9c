//! Opening: `open → validate → views → decode`.

pub(crate) mod beside;
mod block;
pub(crate) mod card;
mod columns;
mod decoder;
mod exponents;
mod head;
mod model;
mod models;
mod original;
mod pieces;
mod reader;
mod shard;
mod size;
mod slice;
mod tensor;
mod tensor_slice;
mod tiles;
mod verify;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

pub use block::{Block, BlockLayout};
pub use decoder::{Cpu, Decoder, PreparedTensor};
pub use exponents::{code_lengths, histogram};
pub use model::Model;
#[cfg(feature = "cudarc")]
pub(crate) use model::none_such;
pub use models::Models;
pub(crate) use models::{list_of_components, listed_components};
pub(crate) use original::OriginalFile;
pub(crate) use pieces::FilePieces;
#[cfg(feature = "cudarc")]
pub(crate) use reader::PIECE_BYTES;
pub use shard::Shard;
pub use size::is_small;
#[cfg(feature = "cudarc")]
pub(crate) use slice::{Rect, Slice};
pub use tensor::{Encoding, Tensor};
pub use tensor_slice::{Element, TensorSlice};
pub use tiles::Tiles;
pub use verify::{Level, Verification};

use crate::{
    Error, Result,
    io::{FileReader, ReadAt, open_regular},
    paths::{PIPELINE, is_container, is_safetensors},
    source::HIDDEN,
};

/// Opens a model: a container, or a folder with all its shards. Equals
/// `OpenOptions::new().open(path)`.
///
/// Reads and validates headers and directories; the cost grows with the number of tensors and not
/// with their size. Containers are mapped into memory: **they must not be truncated or changed
/// while they are open** (a truncated file would end the process with SIGBUS). Writing the same
/// model again with this crate is safe, since it renames a new file over the old one. Where files
/// change in place, use [`OpenOptions::memory_map`].
///
/// # Errors
/// [`Error::Io`], [`Error::Unsupported`], [`Error::Corrupt`] or [`Error::Limit`], with the file's
/// name; [`Error::Parameter`] if a folder holds no container, or shards of different models.
pub fn open(path: impl AsRef<Path>) -> Result<Model> {
    OpenOptions::new().open(path)
}

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    memory_map: bool,
    checksums: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Map the container, and check checksums.
    pub const fn new() -> Self {
        Self { memory_map: true, checksums: true }
    }

    /// Whether to map containers into memory (the default), or to read from them on demand. Reading
    /// copies, but a file that shrinks meanwhile is an [`Error::Io`].
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

    /// Opens a container, or a folder with all its shards, its subfolders included. See [`open`].
    ///
    /// # Errors
    /// As [`open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Model> {
        let path = path.as_ref();
        let metadata =
            fs::metadata(path).map_err(|error| Error::io("opening", shown(path, &error), error))?;
        if !metadata.is_dir() {
            return Model::new(vec![self.shard(path)?], None);
        }
        if path.join(PIPELINE).is_file() {
            let problem = format!("{} holds a pipeline, which is several models", path.display());
            let remedy = "name the folder of one of its components, or use what takes a pipeline";
            return Err(Error::parameter(problem, remedy));
        }
        let paths = containers(path)?;
        if paths.is_empty() {
            let problem = format!("{} holds no .df11 file", path.display());
            return Err(Error::parameter(problem, "name a container, or compress a model first"));
        }
        let shards = paths.iter().map(|path| self.shard(path)).collect::<Result<_>>()?;
        Model::new(shards, Some(path.to_owned()))
    }

    /// Opens containers that are no files: bytes in memory, or a remote store. `name` stands for
    /// the path in errors.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open_readers(&self, readers: Vec<(PathBuf, Box<dyn ReadAt>)>) -> Result<Model> {
        if readers.is_empty() {
            let problem = "a model has at least one container";
            return Err(Error::parameter(problem, "pass one or more readers"));
        }
        let shards = readers
            .into_iter()
            .map(|(name, reader)| Shard::open(name, reader, self.checksums))
            .collect::<Result<_>>()?;
        Model::new(shards, None)
    }

    fn shard(&self, path: &Path) -> Result<Shard> {
        let reader: Box<dyn ReadAt> =
            if self.memory_map { Box::new(map(path)?) } else { Box::new(FileReader::open(path)?) };
        Shard::open(path.to_owned(), reader, self.checksums)
    }
}

/// A mapped file. Views come from the mapping; bulk copies are reads, which cost no page faults.
struct Mapped {
    map: memmap2::Mmap,
    file: FileReader,
}

impl ReadAt for Mapped {
    fn size(&self) -> u64 {
        self.map.len() as u64
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(offset, buf)
    }

    fn view(&self, offset: u64, length: u64) -> Option<&[u8]> {
        self.map.view(offset, length)
    }
}

/// Maps a whole file. The only unsafe code of the CPU path.
#[expect(unsafe_code, reason = "a mapping is as stable as its file")]
fn map(path: &Path) -> Result<Mapped> {
    let file = open_regular(path)?;
    // SAFETY: the mapping is read-only. All code that reads it accepts any bytes, bounds every
    // access by the length that was mapped, and decodes without relying on bytes that it read
    // before being the same (the directory is copied at once). That nobody truncates the file
    // meanwhile is the documented contract of `open`, as for every library that maps files
    // (memmap2, `Mmap`, section Safety).
    let map = unsafe { memmap2::Mmap::map(&file) };
    let map = map.map_err(|error| Error::io("mapping", path, error))?;
    Ok(Mapped { map, file: FileReader::new(path, file)? })
}

/// Hashes bytes on all threads of the pool.
pub(crate) fn hash(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    if rayon::current_num_threads() == 1 {
        hasher.update(bytes);
    } else {
        hasher.update_rayon(bytes);
    }
}

/// Whether a path is what [`open`] takes and [`Source::open`](crate::Source::open) does not: by its
/// name a container, or a folder that holds some and no safetensors file.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be read.
pub fn is_compressed(path: impl AsRef<Path>) -> Result<bool> {
    let path = path.as_ref();
    if !path.is_dir() {
        return Ok(is_container(path));
    }
    let (found, _) = crate::source::walk(path)?;
    let mut paths = found.iter().map(|file| &file.path);
    Ok(paths.clone().any(is_container) && !paths.any(is_safetensors))
}

/// The path, for a message; one that is not here and reads like a repository's name, with how to
/// get that.
fn shown(path: &Path, error: &io::Error) -> PathBuf {
    let parts: Vec<_> = path.iter().filter_map(|part| part.to_str()).collect();
    let is_word =
        |part: &&str| part.chars().all(|char| char.is_ascii_alphanumeric() || "-_.".contains(char));
    match parts[..] {
        [owner, name]
            if error.kind() == io::ErrorKind::NotFound
                && [owner, name].iter().all(is_word)
                && !is_container(name)
                && !Path::new(owner).exists() =>
        {
            format!(
                "{owner}/{name} (a repository of the Hub? hf download {owner}/{name} \
            --local-dir {name})"
            )
            .into()
        }
        _ => path.to_owned(),
    }
}

/// All containers below a folder, ascending by path.
fn containers(folder: &Path) -> Result<Vec<PathBuf>> {
    let (found, left_out) = crate::source::walk(folder)?;
    let mut others = left_out.iter().filter(|other| other.reason != HIDDEN);
    if let Some(other) = others.find(|other| is_container(&other.path)) {
        let problem = format!("{}: {}", folder.join(&other.path).display(), other.reason);
        return Err(Error::parameter(problem, "fetch the file again, or remove it"));
    }
    Ok(found.into_iter().filter(|file| is_container(&file.path)).map(|file| file.file).collect())
}
