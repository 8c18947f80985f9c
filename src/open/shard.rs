//! One open container: its bytes, its directory, and which of its chunks have been checked.

#[cfg(feature = "cudarc")]
use std::collections::HashMap;
use std::{
    borrow::Cow,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Tensor,
    head::{fetch, open_directory},
};
#[cfg(feature = "cudarc")]
use crate::constants::ARRAY_ALIGNMENT;
use crate::{
    Error, Result,
    constants::CHECKSUM_CHUNK_BYTES,
    format::{Directory, directory::chunk_count, records::section_name},
    io::ReadAt,
    parallel,
};

/// Locks against checking one chunk twice at the same time; more than there are threads.
const LOCKS: usize = 64;

/// Bytes that are checked while they are in the cache of the core that read them.
#[cfg(feature = "cudarc")]
const CACHED_BYTES: usize = 256 << 10;

/// One container of a model.
pub struct Shard {
    path: PathBuf,
    reader: Arc<dyn ReadAt>,
    directory: Directory,
    directory_range: Range<u64>,
    check_checksums: bool,
    /// Index in the directory's checksums of each section's first chunk.
    first_chunks: Vec<usize>,
    /// A bit for each chunk whose checksum was found right.
    checked: Vec<AtomicU64>,
    locks: Vec<Mutex<()>>,
    /// Of chunks that are read in parts, by their index, the parts so far.
    #[cfg(feature = "cudarc")]
    parts: Mutex<HashMap<usize, Vec<ReadChunk>>>,
    /// The tensors of each file, by index; listed when a file is first restored or verified.
    tensors_of_files: OnceLock<Vec<Vec<usize>>>,
}

/// Bytes of a chunk that were read, from and to these places of their section, and their checksum.
#[cfg(feature = "cudarc")]
struct ReadChunk {
    range: Range<u64>,
    hasher: crc32fast::Hasher,
}

/// Bytes of a section: in a mapping, or in the caller's scratch.
enum Located<'s> {
    View(&'s [u8]),
    Scratch(Range<usize>),
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

    /// The tensor with this name.
    pub(crate) fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.directory.find_tensor(name).map(|index| Tensor::new(self, index))
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
        let place = record.block_index().map_or_else(
            || format!("{kind} section"),
            |block| {
                format!(
                    "{kind} section of block {}",
                    self.directory.block_name(&self.directory.blocks[block as usize])
                )
            },
        );
        Error::corrupt(place, offset, problem).in_file(&self.path)
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
        Ok(match self.locate_array(array, range, scratch)? {
            Located::View(view) => view,
            Located::Scratch(part) => &scratch[part],
        })
    }

    /// As [`Shard::read_array_with`], with memory of its own.
    pub(crate) fn read_array(&self, array: usize, range: Range<u64>) -> Result<Cow<'_, [u8]>> {
        let mut scratch = Vec::new();
        Ok(match self.locate_array(array, range, &mut scratch)? {
            Located::View(view) => Cow::Borrowed(view),
            Located::Scratch(part) => {
                scratch.truncate(part.end);
                scratch.drain(..part.start);
                Cow::Owned(scratch)
            }
        })
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

    fn locate_array<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &mut Vec<u8>,
    ) -> Result<Located<'s>> {
        let record = &self.directory.arrays[array];
        assert!(
            range.start <= range.end && range.end <= record.length.get(),
            "range within the array"
        );
        let (section, start) = (record.section.get() as usize, record.offset.get());
        let range = start + range.start..start + range.end;
        let base = self.directory.sections[section].offset.get();
        let Some(view) = self.reader.view(base + range.start, range.end - range.start) else {
            return self.read_section(section, range, scratch).map(Located::Scratch);
        };
        if self.check_checksums {
            for chunk in self.unchecked_chunks(section, &range) {
                self.check_chunk(section, chunk)?;
            }
        }
        Ok(Located::View(view))
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

    /// The chunks of a section that a range touches and that were not checked yet.
    fn unchecked_chunks(
        &self,
        section: usize,
        range: &Range<u64>,
    ) -> impl Iterator<Item = u64> + use<'_> {
        let chunks = range.start / CHECKSUM_CHUNK_BYTES..range.end.div_ceil(CHECKSUM_CHUNK_BYTES);
        chunks.filter(move |&chunk| !self.is_checked(self.first_chunks[section] + chunk as usize))
    }

    fn is_checked(&self, index: usize) -> bool {
        self.checked[index / 64].load(Ordering::Acquire) >> (index % 64) & 1 == 1
    }

    /// The bytes of one chunk, counted from its section's start.
    fn chunk_range(&self, section: usize, chunk: u64) -> Range<u64> {
        let length = self.directory.sections[section].length.get();
        let start = chunk * CHECKSUM_CHUNK_BYTES;
        start..length.min(start + CHECKSUM_CHUNK_BYTES)
    }

    /// Checks one chunk of a mapped section, unless another thread did so meanwhile.
    fn check_chunk(&self, section: usize, chunk: u64) -> Result<()> {
        let index = self.first_chunks[section] + chunk as usize;
        let _lock = self.locks[index % LOCKS].lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_checked(index) {
            return Ok(());
        }
        let range = self.chunk_range(section, chunk);
        let base = self.directory.sections[section].offset.get();
        let bytes = self.read_unchecked(base + range.start..base + range.end)?;
        self.accept_chunk(section, chunk, &bytes)
    }

    /// Compares the checksum of a chunk's bytes, and remembers that it is right.
    fn accept_chunk(&self, section: usize, chunk: u64, bytes: &[u8]) -> Result<()> {
        self.accept_checksum(section, chunk, crc32fast::hash(bytes))
    }

    fn accept_checksum(&self, section: usize, chunk: u64, checksum: u32) -> Result<()> {
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
        let unchecked: Vec<u64> = if self.check_checksums {
            self.unchecked_chunks(section, &range).collect()
        } else {
            Vec::new()
        };
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
            self.accept_chunk(section, chunk, &scratch[part(self.chunk_range(section, chunk))])?;
        }
        Ok(part(range))
    }

    /// Copies whole chunks of a section, checking all their checksums, whatever was checked before.
    /// `range` starts at a chunk and ends at one, or at the section's end.
    #[cfg(feature = "cudarc")]
    pub(crate) fn read_chunks(
        &self,
        section: usize,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        self.copy_section(section, range.clone(), &range, out)
    }

    /// Copies bytes of an array, `range` counted from its start. Of them `counted` are those that
    /// no other call counts: when all bytes of a chunk have been, its checksum is checked. So what
    /// is read in parts is read once. [`Shard::check_array`] checks what is left.
    #[cfg(feature = "cudarc")]
    pub(crate) fn read_array_part(
        &self,
        array: usize,
        range: &Range<u64>,
        counted: &Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let record = &self.directory.arrays[array];
        let (section, start, length) =
            (record.section.get() as usize, record.offset.get(), record.length.get());
        assert!(range.start <= range.end && range.end <= length, "range within the array");
        let within = |range: &Range<u64>| start + range.start..start + range.end;
        self.copy_section(section, within(range), &within(counted), out)?;
        if !self.check_checksums || counted.end < length {
            return Ok(());
        }
        // The padding up to the next array, which nobody else reads.
        let end = self.directory.sections[section].length.get();
        let padding = start + length..end.min((start + length).next_multiple_of(ARRAY_ALIGNMENT));
        let mut bytes = [0; ARRAY_ALIGNMENT as usize];
        let bytes = &mut bytes[..(padding.end - padding.start) as usize];
        self.copy_section(section, padding.clone(), &padding, bytes)
    }

    /// Checks the chunks of an array that were not checked yet.
    pub(crate) fn check_array(&self, array: usize) -> Result<()> {
        if !self.check_checksums {
            return Ok(());
        }
        let record = &self.directory.arrays[array];
        let (section, start) = (record.section.get() as usize, record.offset.get());
        let range = start..start + record.length.get();
        self.unchecked_chunks(section, &range)
            .try_for_each(|chunk| self.check_chunk(section, chunk))
    }

    /// Copies bytes of a section, and counts some of them towards the checksums of their chunks.
    #[cfg(feature = "cudarc")]
    fn copy_section(
        &self,
        section: usize,
        range: Range<u64>,
        counted: &Range<u64>,
        mut out: &mut [u8],
    ) -> Result<()> {
        let base = self.directory.sections[section].offset.get();
        let mut at = range.start;
        while at < range.end {
            let chunk = at / CHECKSUM_CHUNK_BYTES;
            let whole = self.chunk_range(section, chunk);
            let (first, end) = (at, whole.end.min(range.end));
            let (now, rest) = out.split_at_mut((end - at) as usize);
            let counts = counted.start.max(first)..counted.end.min(end);
            let mut hasher = crc32fast::Hasher::new();
            for part in now.chunks_mut(CACHED_BYTES) {
                self.reader
                    .read_exact_at(base + at, part)
                    .map_err(|error| Error::io("reading", &self.path, error))?;
                let next = at + part.len() as u64;
                if self.check_checksums && counts.start < next && at < counts.end {
                    let (from, to) = (counts.start.max(at) - at, counts.end.min(next) - at);
                    hasher.update(&part[from as usize..to as usize]);
                }
                at = next;
            }
            if self.check_checksums && !counts.is_empty() {
                self.count_part(section, chunk, ReadChunk { range: counts, hasher })?;
            }
            out = rest;
        }
        Ok(())
    }

    /// Checks a chunk's checksum if that was its last part.
    #[cfg(feature = "cudarc")]
    fn count_part(&self, section: usize, chunk: u64, part: ReadChunk) -> Result<()> {
        let whole = self.chunk_range(section, chunk);
        if part.range == whole {
            return self.accept_checksum(section, chunk, part.hasher.finalize());
        }
        let index = self.first_chunks[section] + chunk as usize;
        let mut all = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = all.entry(index).or_default();
        parts.push(part);
        if parts.iter().map(|part| part.range.end - part.range.start).sum::<u64>()
            < whole.end - whole.start
        {
            return Ok(());
        }
        let mut parts = all.remove(&index).unwrap_or_default();
        drop(all);
        parts.sort_by_key(|part| part.range.start);
        // Of a second load at the same time some parts are here twice: then `check_array` checks
        // the chunk.
        if !parts.is_sorted_by(|one, other| one.range.end == other.range.start) {
            return Ok(());
        }
        let mut hasher = crc32fast::Hasher::new();
        for part in &parts {
            hasher.combine(&part.hasher);
        }
        self.accept_checksum(section, chunk, hasher.finalize())
    }

    /// All bytes of a section where they lie in memory, and what keeps them there.
    #[cfg(feature = "cudarc")]
    pub(crate) fn view_section(&self, section: usize) -> Option<(&[u8], Arc<dyn ReadAt>)> {
        let record = &self.directory.sections[section];
        let view = self.reader.view(record.offset.get(), record.length.get())?;
        Some((view, Arc::clone(&self.reader)))
    }

    /// Checks the chunks of a section that were not checked yet, in parallel.
    #[cfg(feature = "cudarc")]
    pub(crate) fn check_section(&self, section: usize) -> Result<()> {
        use rayon::prelude::*;
        if !self.check_checksums {
            return Ok(());
        }
        let all = 0..self.directory.sections[section].length.get();
        let chunks: Vec<u64> = self.unchecked_chunks(section, &all).collect();
        chunks.into_par_iter().try_for_each(|chunk| self.check_chunk(section, chunk))
    }

    /// Checks every chunk again, in parallel, whatever was checked before.
    pub(super) fn check_all_chunks(&self, done: &(dyn Fn(u64) -> Result<()> + Sync)) -> Result<()> {
        use rayon::prelude::*;
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
            let range = self.chunk_range(section, chunk);
            let base = self.directory.sections[section].offset.get();
            let bytes = self.read_unchecked(base + range.start..base + range.end)?;
            self.accept_chunk(section, chunk, &bytes)?;
            done(range.end - range.start)
        })
    }
}

#[cfg(all(test, feature = "cudarc"))]
mod tests {
    use std::path::PathBuf;

    use super::{CHECKSUM_CHUNK_BYTES, PoisonError, Shard};
    use crate::{Error, OpenOptions, Result};

    /// Reads all arrays of all sections in parts of this many bytes, the last ones first; each part
    /// has some bytes of the one after.
    fn read_in_parts(shard: &Shard, each: u64) -> Result<()> {
        for (array, record) in shard.directory.arrays.iter().enumerate().rev() {
            let length = record.length.get();
            let starts: Vec<u64> = (0..length).step_by(each as usize).collect();
            for start in starts.into_iter().rev() {
                let (end, more) = (length.min(start + each), length.min(start + each + 7));
                let mut out = vec![0; (more - start) as usize];
                shard.read_array_part(array, &(start..more), &(start..end), &mut out)?;
                assert!(out == *shard.read_array(array, start..more).unwrap());
            }
        }
        Ok(())
    }

    fn open(bytes: &[u8]) -> Shard {
        Shard::open(PathBuf::from("sample"), Box::new(bytes.to_vec()), true).unwrap()
    }

    fn sample() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::read(crate::demo::tiny_container(folder.path()).unwrap()).unwrap()
    }

    #[test]
    fn chunks_that_are_read_in_parts_are_checked_once_all_are_there() {
        let bytes = sample();
        for each in
            [1000, 4096, CHECKSUM_CHUNK_BYTES, CHECKSUM_CHUNK_BYTES + 333, u64::from(u32::MAX)]
        {
            let shard = open(&bytes);
            read_in_parts(&shard, each).unwrap();
            assert!(
                shard.parts.lock().unwrap_or_else(PoisonError::into_inner).is_empty(),
                "{each}"
            );
            let sections = shard.directory.sections.len();
            assert!((0..sections).all(|section| {
                let length = shard.directory.sections[section].length.get();
                shard.unchecked_chunks(section, &(0..length)).count() == 0
            }));
        }
    }

    #[test]
    fn damage_is_noticed_in_whatever_part_it_lies() {
        let bytes = sample();
        let good = open(&bytes);
        for section in &good.directory.sections {
            let (start, length) = (section.offset.get(), section.length.get());
            for at in [start, start + length / 2, start + length - 1] {
                let mut damaged = bytes.clone();
                damaged[at as usize] ^= 1;
                let shard = open(&damaged);
                let all = (0..shard.directory.arrays.len()).collect::<Vec<_>>();
                let result = read_unverified(&shard)
                    .and_then(|()| all.iter().try_for_each(|&array| shard.check_array(array)));
                assert!(matches!(result, Err(Error::Corrupt { .. })), "byte {at}");
            }
        }
    }

    /// As above, in one size, with nothing to compare.
    fn read_unverified(shard: &Shard) -> Result<()> {
        for (array, record) in shard.directory.arrays.iter().enumerate() {
            let length = record.length.get();
            for start in (0..length).step_by(5000) {
                let range = start..length.min(start + 5000);
                let mut out = vec![0; (range.end - range.start) as usize];
                shard.read_array_part(array, &range, &range, &mut out)?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_chunk_that_two_read_at_once_is_checked_at_the_end() {
        let bytes = sample();
        let model =
            OpenOptions::new().open_readers(vec![(PathBuf::from("x"), Box::new(bytes))]).unwrap();
        let shard = &model.shards()[0];
        let array = (0..shard.directory.arrays.len())
            .max_by_key(|&array| shard.directory.arrays[array].length.get())
            .unwrap();
        let length = shard.directory.arrays[array].length.get();
        let mut out = vec![0; (length / 2) as usize];
        for _ in 0..3 {
            shard.read_array_part(array, &(0..length / 2), &(0..length / 2), &mut out).unwrap();
        }
        shard.check_array(array).unwrap();
        assert!(out == *shard.read_array(array, 0..length / 2).unwrap());
    }
}
