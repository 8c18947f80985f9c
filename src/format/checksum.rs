//! Computes the checksums of a section that is written in pieces, in any order (spec/format.md,
//! section 4).

use std::collections::BTreeMap;

use crc32fast::Hasher;

use crate::{constants::CHECKSUM_CHUNK_BYTES, parallel};

/// Collects the CRC-32 of the pieces of one section and joins them into the checksums of its
/// chunks.
///
/// Pieces come in any order and from any thread's buffer; memory is about 100 bytes for every piece
/// that has not met its neighbours. Bytes that no piece covers are zeros (the space between
/// arrays).
#[derive(Clone, Debug, Default)]
pub struct SectionChecksums {
    /// The start of each run in its section, in bytes, with the run's CRC. Runs never cross a
    /// chunk's end.
    runs: BTreeMap<u64, CrcRun>,
}

#[derive(Clone, Debug)]
struct CrcRun {
    length: u64,
    crc: Hasher,
}

/// The CRC-32 of one piece of a section, cut at the ends of chunks: runs, and where each starts, in
/// bytes.
#[derive(Debug, Default)]
pub struct PieceChecksum(Vec<(u64, CrcRun)>);

impl PieceChecksum {
    /// Computes the CRCs of `bytes`, which lie at `offset` in their section. This is where the time
    /// goes (26 GB/s per core); call it where the bytes are still in the cache.
    pub fn new(offset: u64, bytes: &[u8]) -> Self {
        let all = offset..offset + bytes.len() as u64;
        let parts = parallel::cut(all, CHECKSUM_CHUNK_BYTES, CHECKSUM_CHUNK_BYTES).map(|part| {
            let mut crc = Hasher::new();
            crc.update(&bytes[(part.start - offset) as usize..(part.end - offset) as usize]);
            (part.start, CrcRun { length: part.end - part.start, crc })
        });
        Self(parts.collect())
    }
}

impl SectionChecksums {
    /// Adds a piece. Pieces must not overlap.
    pub fn add(&mut self, piece: PieceChecksum) {
        for (mut start, mut run) in piece.0 {
            if let Some((&before, left)) = self.runs.range_mut(..start).next_back()
                && before + left.length == start
                && !start.is_multiple_of(CHECKSUM_CHUNK_BYTES)
            {
                left.crc.combine(&run.crc);
                left.length += run.length;
                run = left.clone();
                start = before;
            }
            let end = start + run.length;
            if !end.is_multiple_of(CHECKSUM_CHUNK_BYTES)
                && let Some(right) = self.runs.remove(&end)
            {
                run.crc.combine(&right.crc);
                run.length += right.length;
            }
            self.runs.insert(start, run);
        }
    }

    /// The checksums of all chunks of a section of `section_length` bytes.
    pub fn finish(mut self, section_length: u64) -> Vec<u32> {
        let chunks = parallel::cut(0..section_length, CHECKSUM_CHUNK_BYTES, 1);
        chunks.map(|chunk| self.chunk(chunk.start, chunk.end)).collect()
    }

    fn chunk(&mut self, start: u64, end: u64) -> u32 {
        let mut crc = Hasher::new();
        let mut position = start;
        while position < end {
            if let Some(run) = self.runs.remove(&position) {
                crc.combine(&run.crc);
                position += run.length;
            } else {
                let next = self.runs.range(position..end).next().map_or(end, |(&next, _)| next);
                crc.update(&vec![0; (next - position) as usize]);
                position = next;
            }
        }
        crc.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_any_order_give_the_checksum_of_the_whole() {
        let chunk = CHECKSUM_CHUNK_BYTES as usize;
        let length = 2 * chunk + 777;
        let mut section: Vec<u8> = (0..length).map(|i| (i * 7 + i / 251) as u8).collect();
        // Between the second and the third piece lie zeros that no piece covers.
        let cuts = [0, 100, 4096, 4352, chunk - 1, chunk + 1, 2 * chunk, length];
        section[4096..4352].fill(0);
        let expected: Vec<u32> = section.chunks(chunk).map(crc32fast::hash).collect();
        for rotation in 0..cuts.len() - 1 {
            let mut checksums = SectionChecksums::default();
            for i in 0..cuts.len() - 1 {
                let i = (i * 3 + rotation) % (cuts.len() - 1);
                if cuts[i] != 4096 {
                    checksums
                        .add(PieceChecksum::new(cuts[i] as u64, &section[cuts[i]..cuts[i + 1]]));
                }
            }
            assert_eq!(checksums.finish(length as u64), expected);
        }
    }
}
