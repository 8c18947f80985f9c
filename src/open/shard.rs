//! One open container: its bytes, its directory, and which of its chunks have been checked.

#[cfg(feature = "cudarc")]
use std::collections::HashMap;
use std::{
    borrow::Cow,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rayon::prelude::*;

use crate::{
    Error, Result,
    constants::{CHECKSUM_CHUNK_BYTES, HEAD_BYTES, HEADER_BYTES},
    format::{Directory, Header, directory::chunk_count, records::section_name},
    io::ReadAt,
    parallel,
};

/// Locks against checking one chunk twice at the same time; more than there are threads.
const LOCKS: usize = 64;

/// One container of a model.
pub struct Shard {
    pub(super) path: PathBuf,
    pub(super) reader: Arc<dyn ReadAt>,
    pub(super) directory: Directory,
    directory_range: Range<u64>,
    pub(super) check_checksums: bool,
    /// Index in the directory's checksums of each section's first chunk.
    pub(super) first_chunks: Vec<usize>,
    /// A bit for each chunk whose checksum was found right.
    checked: Vec<AtomicU64>,
    locks: Vec<Mutex<()>>,
    /// Of chunks that are read in parts, by their index, the parts so far.
    #[cfg(feature = "cudarc")]
    pub(super) parts: Mutex<HashMap<usize, Vec<ReadChunk>>>,
    /// The tensors of each file, by index; listed when a file is first restored or verified.
    tensors_of_files: OnceLock<Vec<Vec<usize>>>,
}

#[cfg(feature = "cudarc")]
/// Bytes of a chunk that were read, from and to these places of their section, and their checksum.
pub(super) struct ReadChunk {
    pub(super) range: Range<u64>,
    pub(super) hasher: crc32fast::Hasher,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
        let mut chunks = 0;
        let first_chunks = directory
            .sections
            .iter()
            .map(|section| {
                let first = chunks;
                chunks += chunk_count(section.length.get()) as usize;
                first
            })
            .collect();
        let start = header.directory_offset.get();
        Ok(Self {
            path,
            reader: reader.into(),
            directory,
            directory_range: start..start + header.directory_length.get(),
            check_checksums,
            first_chunks,
            checked: (0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            locks: (0..LOCKS).map(|_| Mutex::new(())).collect(),
            #[cfg(feature = "cudarc")]
            parts: Mutex::default(),
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

    /// All bytes of the container where it is mapped into memory, unchecked; None if it is not.
    pub fn mapping(&self) -> Option<&[u8]> {
        self.reader.view(0, self.reader.size())
    }

    /// An array in this mapping, unchecked.
    pub(crate) fn view_array(&self, array: usize) -> Option<&[u8]> {
        let record = &self.directory.arrays[array];
        let section = &self.directory.sections[record.section.get() as usize];
        self.reader.view(section.offset.get() + record.offset.get(), record.length.get())
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

    /// An error about bytes of a section, from `offset` in it on.
    pub(crate) fn corrupt(
        &self,
        section: usize,
        offset: u64,
        problem: impl std::fmt::Display,
    ) -> Error {
        let record = &self.directory.sections[section];
        let kind = section_name(record.kind.get()).unwrap_or("unknown");
        let place = match record.block_index() {
            None => format!("{kind} section"),
            Some(block) => {
                let name = self.directory.block_name(&self.directory.blocks[block as usize]);
                format!("{kind} section of block {name}")
            }
        };
        Error::corrupt(place, offset, problem).in_file(&self.path)
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

    /// Bytes of the container outside sections: padding. Nothing is checked.
    pub(super) fn read_unchecked(&self, range: Range<u64>) -> Result<Cow<'_, [u8]>> {
        fetch(self.reader.as_ref(), &self.path, range)
    }

    /// Bytes of an array, `range` counted from its start. The checksums of all chunks that they
    /// touch are checked the first time they are read. Without copying where the container is
    /// mapped; else they are read into `scratch`, whose length does not matter and which is worth
    /// keeping: fresh memory costs more than the read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a checksum does not match; [`Error::Io`].
    ///
    /// # Panics
    /// Where the array does not exist or the range exceeds it.
    pub(crate) fn read_array_with<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &'s mut Vec<u8>,
    ) -> Result<&'s [u8]> {
        let (section, range) = self.in_section(array, range);
        if let Some(view) = self.view_section_range(section, &range)? {
            return Ok(view);
        }
        let part = self.read_section(section, range, scratch)?;
        Ok(&scratch[part])
    }

    /// As [`Shard::read_array_with`], with memory of its own.
    pub(crate) fn read_array(&self, array: usize, range: Range<u64>) -> Result<Cow<'_, [u8]>> {
        let (section, range) = self.in_section(array, range);
        if let Some(view) = self.view_section_range(section, &range)? {
            return Ok(Cow::Borrowed(view));
        }
        let mut bytes = Vec::new();
        let part = self.read_section(section, range, &mut bytes)?;
        bytes.truncate(part.end);
        bytes.drain(..part.start);
        Ok(Cow::Owned(bytes))
    }

    /// All bytes of an array.
    pub(super) fn read_whole_array(&self, array: usize) -> Result<Cow<'_, [u8]>> {
        self.read_array(array, 0..self.directory.arrays[array].length.get())
    }

    /// Hands on all bytes of an array, some at a time.
    pub(crate) fn stream_array(
        &self,
        array: usize,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let length = self.directory.arrays[array].length.get();
        let mut scratch = Vec::new();
        parallel::cut(0..length, CHECKSUM_CHUNK_BYTES, 1)
            .try_for_each(|range| take(self.read_array_with(array, range, &mut scratch)?))
    }

    /// The section of an array, and where in it some of the array's bytes are.
    fn in_section(&self, array: usize, range: Range<u64>) -> (usize, Range<u64>) {
        let record = &self.directory.arrays[array];
        assert!(
            range.start <= range.end && range.end <= record.length.get(),
            "range within the array"
        );
        let start = record.offset.get();
        (record.section.get() as usize, start + range.start..start + range.end)
    }

    /// Bytes of a section that is mapped, whose chunks have been checked.
    fn view_section_range(&self, section: usize, range: &Range<u64>) -> Result<Option<&[u8]>> {
        let base = self.directory.sections[section].offset.get();
        let view = self.reader.view(base + range.start, range.end - range.start);
        if view.is_some() {
            self.check_range(section, range)?;
        }
        Ok(view)
    }

    /// Bytes of a section whose checksums are of no interest.
    pub(super) fn read_section_unchecked(
        &self,
        section: usize,
        range: Range<u64>,
    ) -> Result<Cow<'_, [u8]>> {
        let base = self.directory.sections[section].offset.get();
        self.read_unchecked(base + range.start..base + range.end)
    }

    /// The chunks of a section that a range touches and that were not checked yet; none if
    /// checksums are of no interest.
    pub(super) fn unchecked_chunks(
        &self,
        section: usize,
        range: &Range<u64>,
    ) -> impl Iterator<Item = u64> + use<'_> {
        let first = range.start / CHECKSUM_CHUNK_BYTES;
        let end = if self.check_checksums { range.end.div_ceil(CHECKSUM_CHUNK_BYTES) } else { 0 };
        (first..end)
            .filter(move |&chunk| !self.is_checked(self.first_chunks[section] + chunk as usize))
    }

    fn is_checked(&self, index: usize) -> bool {
        self.checked[index / 64].load(Ordering::Acquire) >> (index % 64) & 1 == 1
    }

    /// The bytes of one chunk, counted from its section's start.
    pub(super) fn chunk_range(&self, section: usize, chunk: u64) -> Range<u64> {
        let length = self.directory.sections[section].length.get();
        let start = chunk * CHECKSUM_CHUNK_BYTES;
        start..length.min(start + CHECKSUM_CHUNK_BYTES)
    }

    fn check_range(&self, section: usize, range: &Range<u64>) -> Result<()> {
        self.unchecked_chunks(section, range).try_for_each(|chunk| self.check_chunk(section, chunk))
    }

    /// Checks one chunk of a mapped section, unless another thread did so meanwhile.
    pub(super) fn check_chunk(&self, section: usize, chunk: u64) -> Result<()> {
        let index = self.first_chunks[section] + chunk as usize;
        let _lock = parallel::lock(&self.locks[index % LOCKS]);
        if self.is_checked(index) {
            return Ok(());
        }
        let bytes = self.read_section_unchecked(section, self.chunk_range(section, chunk))?;
        self.accept_checksum(section, chunk, crc32fast::hash(&bytes))
    }

    /// Compares the checksum of a chunk's bytes, and remembers that it is right.
    pub(super) fn accept_checksum(&self, section: usize, chunk: u64, checksum: u32) -> Result<()> {
        let index = self.first_chunks[section] + chunk as usize;
        if checksum != self.directory.checksums[index].get() {
            let problem = "the checksum of the 1 MiB from here on does not match; the file is \
            damaged, fetch it again";
            return Err(self.corrupt(section, chunk * CHECKSUM_CHUNK_BYTES, problem));
        }
        self.checked[index / 64].fetch_or(1 << (index % 64), Ordering::Release);
        Ok(())
    }

    /// Reads a range into `scratch`, widened to whole chunks where one must be checked, so that
    /// nothing is read twice. Returns where in `scratch` the range is.
    fn read_section(
        &self,
        section: usize,
        range: Range<u64>,
        scratch: &mut Vec<u8>,
    ) -> Result<Range<usize>> {
        let unchecked: Vec<u64> = self.unchecked_chunks(section, &range).collect();
        let mut wide = range.clone();
        for &chunk in &unchecked {
            let chunk = self.chunk_range(section, chunk);
            wide = wide.start.min(chunk.start)..wide.end.max(chunk.end);
        }
        let part = |range: Range<u64>| {
            (range.start - wide.start) as usize..(range.end - wide.start) as usize
        };
        let length = (wide.end - wide.start) as usize;
        if scratch.len() < length {
            scratch.resize(length, 0);
        }
        let base = self.directory.sections[section].offset.get();
        self.reader
            .read_exact_at(base + wide.start, &mut scratch[..length])
            .map_err(|error| Error::io("reading", &self.path, error))?;
        for &chunk in &unchecked {
            let bytes = &scratch[part(self.chunk_range(section, chunk))];
            self.accept_checksum(section, chunk, crc32fast::hash(bytes))?;
        }
        Ok(part(range))
    }

    /// Checks the chunks of an array that were not checked yet.
    pub(crate) fn check_array(&self, array: usize) -> Result<()> {
        let all = 0..self.directory.arrays[array].length.get();
        let (section, range) = self.in_section(array, all);
        self.check_range(section, &range)
    }

    /// Checks every chunk again, in parallel, whatever was checked before.
    pub(super) fn check_all_chunks(&self, done: &(dyn Fn(u64) -> Result<()> + Sync)) -> Result<()> {
        let chunks: Vec<(usize, u64)> = self
            .directory
            .sections
            .iter()
            .enumerate()
            .flat_map(|(section, record)| {
                (0..chunk_count(record.length.get())).map(move |chunk| (section, chunk))
            })
            .collect();
        chunks.into_par_iter().try_for_each(|(section, chunk)| {
            let bytes = self.read_section_unchecked(section, self.chunk_range(section, chunk))?;
            self.accept_checksum(section, chunk, crc32fast::hash(&bytes))?;
            done(bytes.len() as u64)
        })
    }
}

/// Bytes of a container, without copying where it is mapped. The caller has checked the range
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
        let problem =
            format!("{size} bytes are too few for a df11 file; it is truncated, fetch it again");
        return Err(Error::corrupt("file", 0, problem));
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
        Error::corrupt("footer", header.footer_offset(), "it is no copy of the header")
    })?;
    check_zero("space after the directory", start + directory.len() as u64, padding)?;
    if crc32fast::hash(directory) != header.directory_checksum.get() {
        return Err(Error::corrupt("directory", 0, "its checksum does not match")
            .remedied("the file is damaged"));
    }
    Ok((header, Directory::parse(directory, start)?))
}

/// Padding must be zero.
pub(super) fn check_zero(place: &str, offset: u64, bytes: &[u8]) -> Result<()> {
    let Some(position) = bytes.iter().position(|&byte| byte != 0) else { return Ok(()) };
    Err(Error::corrupt(place, offset + position as u64, "padding is not zero"))
}
