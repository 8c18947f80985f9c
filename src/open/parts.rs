//! Reads for a GPU: whole chunks, or arrays in parts, which are checked when all have been read.

use std::{ops::Range, sync::Arc};

use rayon::prelude::*;

use super::shard::{ReadChunk, Shard};
use crate::{Result, constants::ARRAY_ALIGNMENT, io::ReadAt, parallel};

/// Bytes in memory, and what keeps them there.
type SectionView<'s> = (&'s [u8], Arc<dyn ReadAt>);

/// Bytes that are checked while they are in the cache of the core that read them.
const CACHED_BYTES: usize = 256 << 10;

impl Shard {
    /// Copies whole chunks of a section, checking all their checksums, whatever was checked before.
    /// `range` starts at a chunk and ends at one, or at the section's end.
    pub(crate) fn read_chunks(
        &self,
        section: usize,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let start = self.directory.sections[section].offset.get();
        let place = start + range.start..start + range.end;
        self.copy(&place, &place, out)
    }

    /// Copies bytes of an array, `range` counted from its start. No other call counts the bytes in
    /// `counted`: when all bytes of a chunk have been counted, its checksum is checked. So what is
    /// read in parts is read once. [`Shard::check_array`] checks what is left.
    pub(crate) fn read_array_part(
        &self,
        array: usize,
        range: &Range<u64>,
        counted: &Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let (end, counted) = (self.place_of(array).end, self.place_in(array, counted));
        self.copy(&self.place_in(array, range), &counted, out)?;
        if !self.check_checksums || counted.end < end {
            return Ok(());
        }
        // The padding up to the next array, which nobody else reads.
        let padding = end..end.next_multiple_of(ARRAY_ALIGNMENT).min(self.section_of(array).end());
        let mut bytes = [0; ARRAY_ALIGNMENT as usize];
        self.copy(&padding, &padding, &mut bytes[..(padding.end - padding.start) as usize])
    }

    /// Copies bytes of one section, and counts some of them towards the checksums of their chunks.
    fn copy(&self, place: &Range<u64>, counted: &Range<u64>, mut out: &mut [u8]) -> Result<()> {
        if self.is_far {
            let mut bytes = Vec::new();
            let part = self.read_checked(place, &mut bytes)?;
            out.copy_from_slice(&bytes[part]);
            return Ok(());
        }
        for chunk in self.chunks_of(place) {
            let overlap = |one: &Range<u64>, other: &Range<u64>| {
                one.start.max(other.start)..one.end.min(other.end)
            };
            let now = overlap(place, &self.chunks[chunk]);
            let counts = if self.check_checksums { overlap(counted, &now) } else { 0..0 };
            let bytes = out.split_off_mut(..(now.end - now.start) as usize).expect("room for all");
            let mut hasher = crc32fast::Hasher::new();
            for (at, part) in
                (now.start..).step_by(CACHED_BYTES).zip(bytes.chunks_mut(CACHED_BYTES))
            {
                self.read_into(at, part)?;
                let part_counts = overlap(&counts, &(at..at + part.len() as u64));
                if !part_counts.is_empty() {
                    let (from, to) = (part_counts.start - at, part_counts.end - at);
                    hasher.update(&part[from as usize..to as usize]);
                }
            }
            if !counts.is_empty() {
                self.count_part(chunk, ReadChunk { range: counts, hasher })?;
            }
        }
        Ok(())
    }

    /// Checks a chunk's checksum if that was its last part.
    fn count_part(&self, chunk: usize, part: ReadChunk) -> Result<()> {
        let whole = &self.chunks[chunk];
        if part.range == *whole {
            return self.accept_checksum(chunk, part.hasher.finalize());
        }
        let mut all = parallel::lock(&self.parts);
        let parts = all.entry(chunk).or_default();
        parts.push(part);
        if parts.iter().map(|part| part.range.end - part.range.start).sum::<u64>()
            < whole.end - whole.start
        {
            return Ok(());
        }
        let mut parts = all.remove(&chunk).unwrap_or_default();
        drop(all);
        parts.sort_by_key(|part| part.range.start);
        // Two loads at the same time leave some parts here twice: then `check_array` checks the
        // chunk.
        if !parts.is_sorted_by(|one, other| one.range.end == other.range.start) {
            return Ok(());
        }
        let mut hasher = crc32fast::Hasher::new();
        for part in parts {
            hasher.combine(&part.hasher);
        }
        self.accept_checksum(chunk, hasher.finalize())
    }

    /// All bytes of a section if they are in memory, and what keeps them there.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if they come over a network and do not come.
    pub(crate) fn view_section(&self, section: usize) -> Result<Option<SectionView<'_>>> {
        self.wait_whole()?;
        let record = &self.directory.sections[section];
        let view = self.reader.view(record.offset.get(), record.length.get());
        Ok(view.map(|view| (view, Arc::clone(&self.reader))))
    }

    /// Checks the chunks of a section that were not checked yet, in parallel.
    pub(crate) fn check_section(&self, section: usize) -> Result<()> {
        let record = &self.directory.sections[section];
        let chunks: Vec<usize> =
            self.unchecked_chunks(&(record.offset.get()..record.end())).collect();
        chunks.into_par_iter().try_for_each(|chunk| self.check_chunk(chunk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, OpenOptions, constants::CHECKSUM_CHUNK_BYTES};
    use std::path::PathBuf;

    /// Reads all arrays of all sections in parts of this many bytes, the last ones first; each part
    /// has some bytes of the one after. Compares what is not damaged.
    fn read_in_parts(shard: &Shard, each: u64, is_damaged: bool) -> Result<()> {
        for (array, record) in shard.directory.arrays.iter().enumerate().rev() {
            let length = record.length.get();
            let starts: Vec<u64> = (0..length).step_by(each as usize).collect();
            for start in starts.into_iter().rev() {
                let (end, more) = (length.min(start + each), length.min(start + each + 7));
                let mut out = vec![0; (more - start) as usize];
                shard.read_array_part(array, &(start..more), &(start..end), &mut out)?;
                assert!(is_damaged || out == *shard.read_array(array, start..more).unwrap());
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
            read_in_parts(&shard, each, false).unwrap();
            assert!(parallel::lock(&shard.parts).is_empty(), "{each}");
            assert_eq!(shard.unchecked_chunks(&(0..bytes.len() as u64)).count(), 0);
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
                let result = read_in_parts(&shard, 5000, true)
                    .and_then(|()| all.iter().try_for_each(|&array| shard.check_array(array)));
                assert!(matches!(result, Err(Error::Corrupt { .. })), "byte {at}");
            }
        }
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
