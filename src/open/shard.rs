//! One open container: its bytes, its directory, and the chunks that have been checked.

#[cfg(feature = "cudarc")]
use std::collections::HashMap;
#[cfg(feature = "remote")]
use std::sync::Weak;
use std::{
    borrow::Cow,
    fmt,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, atomic::AtomicU64},
};

use super::kept::KeptChunks;
#[cfg(feature = "remote")]
use super::{cache::Cache, filling::Filler};
use crate::{
    Error, Result,
    constants::{CHECKSUM_CHUNK_BYTES, HEAD_BYTES, HEADER_BYTES},
    encoding::stored::ReadBase,
    format::{
        Directory, Header,
        records::{SectionRecord, section_name},
    },
    io::ReadAt,
    parallel,
};

/// Locks against checking one chunk twice at the same time; more than there are threads.
pub(super) const LOCKS: usize = 64;

/// One container of a model.
pub struct Shard {
    pub(super) path: PathBuf,
    pub(super) reader: Arc<dyn ReadAt>,
    /// Whether reads wait for a network.
    pub(super) is_far: bool,
    pub(super) directory: Directory,
    directory_range: Range<u64>,
    pub(super) check_checksums: bool,
    /// Where each chunk lies in the container, in the order of the directory's checksums.
    pub(super) chunks: Vec<Range<u64>>,
    /// A bit for each chunk whose checksum was found right.
    pub(super) checked: Vec<AtomicU64>,
    pub(super) locks: Vec<Mutex<()>>,
    /// The chunks that came last over a network, checked.
    pub(super) kept: Arc<KeptChunks>,
    /// Chunks on a local disk.
    #[cfg(feature = "remote")]
    pub(super) cache: Option<Arc<Cache>>,
    /// Work that fills it with chunks of this container.
    #[cfg(feature = "remote")]
    pub(super) fillers: Mutex<Vec<Weak<Filler>>>,
    /// Parts read so far, by the index of their chunk, of chunks that are read in parts.
    #[cfg(feature = "cudarc")]
    pub(super) parts: Mutex<HashMap<usize, Vec<ReadChunk>>>,
    /// The bases of its tensors in `delta`, once they were looked for.
    bases: Option<Arc<dyn FindBase>>,
    /// The tensors of each file, by index; listed when a file is first restored or verified.
    tensors_of_files: OnceLock<Vec<Vec<usize>>>,
}

/// Finds the tensors from which those of a container, by index, are differences.
pub(super) trait FindBase: fmt::Debug + Send + Sync {
    /// Checks that a tensor's base is here and has the hash that the tensor records.
    fn check(&self, shard: &Shard, tensor: usize) -> Result<()>;

    /// Checks it, and prepares it for reading.
    fn prepare<'m>(&'m self, shard: &'m Shard, tensor: usize) -> Result<Box<dyn ReadBase + 'm>>;
}

#[cfg(feature = "cudarc")]
/// Bytes of a chunk that were read, by their place in the container, and their checksum.
pub(super) struct ReadChunk {
    pub(super) range: Range<u64>,
    pub(super) hasher: crc32fast::Hasher,
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Shard {
    /// Reads and validates header, footer and directory (section 9, level open).
    pub(super) fn open(
        path: PathBuf,
        reader: Box<dyn ReadAt>,
        check_checksums: bool,
    ) -> Result<Self> {
        let (header, directory) =
            open_directory(reader.as_ref(), &path).map_err(|error| error.in_file(&path))?;
        let sections = directory.sections.iter();
        let chunks: Vec<_> = sections
            .flat_map(|section| {
                parallel::cut(section.offset.get()..section.end(), CHECKSUM_CHUNK_BYTES, 1)
            })
            .collect();
        let start = header.directory_offset.get();
        Ok(Self {
            path,
            is_far: reader.read_ahead(&[]).is_some(),
            reader: reader.into(),
            directory,
            directory_range: start..start + header.directory_length.get(),
            check_checksums,
            checked: (0..chunks.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            chunks,
            locks: (0..LOCKS).map(|_| Mutex::new(())).collect(),
            kept: Arc::default(),
            #[cfg(feature = "remote")]
            cache: None,
            #[cfg(feature = "remote")]
            fillers: Mutex::default(),
            #[cfg(feature = "cudarc")]
            parts: Mutex::default(),
            bases: None,
            tensors_of_files: OnceLock::new(),
        })
    }

    /// The container's path, or the name it was opened under.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The container's length, in bytes.
    pub fn file_length(&self) -> u64 {
        self.reader.size()
    }

    /// All bytes of the container if it is mapped into memory, unchecked; None if it is not.
    /// Waits for those that come over a network.
    ///
    /// # Errors
    /// [`Error::Io`] if they do not come.
    pub fn mapping(&self) -> Result<Option<&[u8]>> {
        self.wait_whole()?;
        Ok(self.reader.view(0, self.reader.size()))
    }

    /// The address of the mapping. What comes over a network is there as soon as it was checked.
    pub fn address(&self) -> Option<usize> {
        self.reader.address()
    }

    /// Whether its bytes still come over a network to the address.
    pub fn is_coming(&self) -> bool {
        self.reader.address().is_some() && self.reader.view(0, 0).is_none()
    }

    pub(super) fn wait_whole(&self) -> Result<()> {
        self.reader.wait_whole().map_err(|error| Error::io("reading", &self.path, error))
    }

    /// Hands on all bytes of the container, unchecked, at most 1 MiB at a time. They are read: of a
    /// file that has become shorter this is an error.
    pub(crate) fn stream(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut bytes = Vec::new();
        parallel::cut(0..self.file_length(), CHECKSUM_CHUNK_BYTES, 1).try_for_each(|part| {
            bytes.resize((part.end - part.start) as usize, 0);
            self.read_into(part.start, &mut bytes)?;
            take(&bytes)
        })
    }

    /// Finds the bases of its tensors in `delta`.
    pub(super) fn bases(&self) -> Result<&dyn FindBase> {
        self.bases.as_deref().ok_or_else(|| {
            Error::no_base("a base was not looked for", "open the model, not its container alone")
        })
    }

    pub(super) fn set_bases(&mut self, bases: Arc<dyn FindBase>) {
        self.bases = Some(bases);
    }

    /// The validated directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The tensors that came from a file, by index, ascending by name.
    pub(super) fn tensors_of(&self, file: usize) -> &[usize] {
        let lists = self.tensors_of_files.get_or_init(|| {
            let mut lists = vec![Vec::new(); self.directory.files.len()];
            for (index, tensor) in self.directory.tensors.iter().enumerate() {
                lists[tensor.file.get() as usize].push(index);
            }
            lists
        });
        &lists[file]
    }

    /// Where the directory lies in the container, in bytes.
    pub fn directory_range(&self) -> Range<u64> {
        self.directory_range.clone()
    }

    /// An error about the bytes of a section, or between two, from this place on.
    pub(super) fn corrupt(&self, at: u64, problem: impl std::fmt::Display) -> Error {
        let directory = &self.directory;
        let before = directory.sections.iter().take_while(|section| section.offset.get() <= at);
        let error = match before.last().filter(|section| at < section.end()) {
            None => Error::corrupt("space between sections", at, problem),
            Some(section) => {
                let kind = section_name(section.kind.get()).unwrap_or("unknown");
                let block = section.block_index().map(|block| &directory.blocks[block as usize]);
                let of = |block| format!(" of block {}", directory.block_name(block));
                let place = format!("{kind} section{}", block.map_or_else(String::new, of));
                Error::corrupt(place, at - section.offset.get(), problem)
            }
        };
        error.in_file(&self.path)
    }

    /// Compares the hash of decoded bytes with that of the original.
    pub(super) fn check_hash(
        &self,
        what: impl std::fmt::Display,
        found: blake3::Hash,
        recorded: [u8; 32],
    ) -> Result<()> {
        Error::unless(found == recorded, || {
            Error::corrupt(what, 0, "its bytes do not have the hash in the directory")
                .remedied("the container is damaged, fetch or make it again")
                .in_file(&self.path)
        })
    }

    /// Reads bytes of the container from a place on. Nothing is checked.
    pub(super) fn read_into(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let read = self.reader.read_exact_at(at, out);
        read.map_err(|error| Error::io("reading", &self.path, error))
    }

    /// Bytes of the container. Nothing is checked.
    pub(super) fn read_unchecked(&self, place: Range<u64>) -> Result<Cow<'_, [u8]>> {
        fetch(self.reader.as_ref(), &self.path, place)
    }

    /// Bytes of an array, `range` counted from its start. The checksums of all chunks that they
    /// touch are checked the first time they are read. Without copying where the container is
    /// mapped; else they are read into `scratch`, whose length does not matter and which is worth
    /// keeping: fresh memory costs more than the read.
    ///
    /// # Panics
    /// If the array does not exist or the range exceeds it.
    pub(crate) fn read_array_with<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &'s mut Vec<u8>,
    ) -> Result<&'s [u8]> {
        let place = self.place_in(array, &range);
        if let Some(view) = self.view_checked(&place)? {
            return Ok(view);
        }
        let part = self.read_checked(&place, scratch)?;
        Ok(&scratch[part])
    }

    /// Like [`Shard::read_array_with`], with memory of its own.
    pub(crate) fn read_array(&self, array: usize, range: Range<u64>) -> Result<Cow<'_, [u8]>> {
        let place = self.place_in(array, &range);
        if let Some(view) = self.view_checked(&place)? {
            return Ok(Cow::Borrowed(view));
        }
        let mut bytes = Vec::new();
        let part = self.read_checked(&place, &mut bytes)?;
        bytes.truncate(part.end);
        bytes.drain(..part.start);
        Ok(Cow::Owned(bytes))
    }

    pub(super) fn read_whole_array(&self, array: usize) -> Result<Cow<'_, [u8]>> {
        self.read_array(array, 0..self.directory.arrays[array].length.get())
    }

    pub(super) fn section_of(&self, array: usize) -> &SectionRecord {
        &self.directory.sections[self.directory.arrays[array].section.get() as usize]
    }

    pub(super) fn place_of(&self, array: usize) -> Range<u64> {
        let record = &self.directory.arrays[array];
        let start = self.section_of(array).offset.get() + record.offset.get();
        start..start + record.length.get()
    }

    /// Where some of an array's bytes lie in the container.
    pub(super) fn place_in(&self, array: usize, range: &Range<u64>) -> Range<u64> {
        let Range { start, end } = self.place_of(array);
        assert!(range.start <= range.end && range.end <= end - start, "range within the array");
        start + range.start..start + range.end
    }

    /// Bytes of one section, if they are mapped; their chunks have been checked.
    fn view_checked(&self, place: &Range<u64>) -> Result<Option<&[u8]>> {
        let view = self.reader.view(place.start, place.end - place.start);
        if view.is_some() {
            self.check(place)?;
        }
        Ok(view)
    }

    /// Reads bytes of one section into `scratch`, widened to whole chunks if one must be
    /// checked, so that nothing is read twice. Returns where in `scratch` they are.
    pub(super) fn read_checked(
        &self,
        place: &Range<u64>,
        scratch: &mut Vec<u8>,
    ) -> Result<Range<usize>> {
        if self.is_far && self.check_checksums {
            return self.read_far(place, scratch);
        }
        let unchecked: Vec<usize> = self.unchecked_chunks(place).collect();
        let mut wide = place.clone();
        for &chunk in &unchecked {
            let chunk = &self.chunks[chunk];
            wide = wide.start.min(chunk.start)..wide.end.max(chunk.end);
        }
        let part = |place: &Range<u64>| {
            (place.start - wide.start) as usize..(place.end - wide.start) as usize
        };
        let length = (wide.end - wide.start) as usize;
        if scratch.len() < length {
            scratch.resize(length, 0);
        }
        self.read_into(wide.start, &mut scratch[..length])?;
        for &chunk in &unchecked {
            self.accept_checksum(chunk, crc32fast::hash(&scratch[part(&self.chunks[chunk])]))?;
        }
        Ok(part(place))
    }
}

/// Bytes of a container, without copying if it is mapped. The caller has checked the range
/// against its size.
fn fetch<'a>(reader: &'a dyn ReadAt, path: &Path, range: Range<u64>) -> Result<Cow<'a, [u8]>> {
    let length = range.end - range.start;
    if let Some(view) = reader.view(range.start, length) {
        return Ok(Cow::Borrowed(view));
    }
    let mut bytes = vec![0; length as usize];
    reader
        .read_exact_at(range.start, &mut bytes)
        .map_err(|error| Error::io("reading", path, error))?;
    Ok(Cow::Owned(bytes))
}

/// Steps 1 to 9 of level open.
fn open_directory(reader: &dyn ReadAt, path: &Path) -> Result<(Header, Directory)> {
    let size = reader.size();
    let head = fetch(reader, path, 0..size.min(HEAD_BYTES))?;
    Header::check_version(&head)?;
    if size < HEAD_BYTES + HEADER_BYTES {
        let problem = format!("{size} bytes are too few for a df11 file: it is truncated");
        return Err(Error::corrupt("file", 0, problem).remedied("fetch it again"));
    }
    let (header_bytes, rest) =
        head.split_first_chunk().expect("the head is longer than the header");
    let header = Header::parse(header_bytes)?;
    header.check_placement(size)?;
    check_zero("head", HEADER_BYTES, rest)?;
    let start = header.directory_offset.get();
    let tail = fetch(reader, path, start..size)?;
    let (directory, padding) = tail.split_at(header.directory_length.get() as usize);
    let (padding, footer) = padding.split_at(padding.len() - HEADER_BYTES as usize);
    Error::unless(footer == header_bytes, || {
        Error::corrupt("footer", header.footer_offset(), "it is not a copy of the header")
    })?;
    check_zero("space after the directory", start + directory.len() as u64, padding)?;
    if crc32fast::hash(directory) != header.directory_checksum.get() {
        let error = Error::corrupt("directory", 0, "its checksum does not match");
        return Err(error.remedied("the file is damaged"));
    }
    Ok((header, Directory::parse(directory, start)?))
}

/// Padding must be zero.
fn check_zero(place: &str, offset: u64, bytes: &[u8]) -> Result<()> {
    let Some(position) = bytes.iter().position(|&byte| byte != 0) else { return Ok(()) };
    Err(Error::corrupt(place, offset + position as u64, "padding is not zero"))
}
