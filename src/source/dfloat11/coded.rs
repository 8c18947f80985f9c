//! The coded weights of one block. Any range of them can be read.
//!
//! ```text
//! encoded_exponent   | thread block 0: threads × 8 bytes | thread block 1 | .. | last: the rest
//! codes              ccccc|ccc cc|cc..                 cc|c                       cccppp
//!                         ^ into the next thread: its gap ^ into the next block      ^ padding
//! output_positions   0                                   first weight here .. number of weights
//! ```
//! Codes have at most 32 bits, so that a code begins in each thread and its gap fits 5 bits. A last
//! thread block in which no code begins, and which padding does not reach either, has no position.
//! So there are as many positions as thread blocks, or one more.
//!
//! A range is decoded from the start of its thread block, whose codes are in order, so only the
//! first gap is needed. All gaps are compared nevertheless, and each thread block must end where
//! the next one begins.

use std::sync::Arc;

use super::table::{self, AGAIN};
use crate::{Error, Result, bf16, io::ReadAt};

pub(super) const BYTES_PER_THREAD: u64 = 8;
const THREAD_BITS: u64 = 8 * BYTES_PER_THREAD;
const GAP_BITS: u64 = 5;
const POSITION_BYTES: u64 = 4;
/// Bytes that one look at the stream takes: a thread's, and what its last code may take of the
/// next.
const LOOK_BYTES: u64 = 16;

/// An array of a checkpoint: a range of a file.
pub(super) struct FileRange {
    /// Its name in messages.
    pub(super) path: String,
    pub(super) reader: Arc<dyn ReadAt>,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl FileRange {
    /// An error about its bytes from this one on.
    pub(super) fn damaged(&self, offset: u64, problem: impl std::fmt::Display) -> Error {
        Error::corrupt(&self.path, offset, problem).remedied(AGAIN)
    }

    /// This many bytes from `offset` on; zeros follow the last that it has.
    pub(super) fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        let there = length.min(self.length.saturating_sub(offset)) as usize;
        let read = self.reader.read_exact_at(self.offset + offset, &mut bytes[..there]);
        read.map_err(|source| Error::io("reading", &self.path, source))?;
        Ok(bytes)
    }
}

/// A block's arrays, whose sizes agree.
pub(super) struct CodedBlock {
    codes: FileRange,
    plane: FileRange,
    gaps: FileRange,
    table: table::LutTree,
    threads_per_block: u64,
    /// The first weight of each thread block, and the number of weights; they ascend.
    positions: Vec<u32>,
}

/// Reads positions: they ascend from 0 to the number of weights, and each code has a bit at least.
fn read_positions(array: &FileRange, weights: u64, block_bits: u64) -> Result<Vec<u32>> {
    let bytes = array.read(0, array.length)?;
    let positions = bytes.as_chunks().0.iter().map(|&position| u32::from_le_bytes(position));
    let positions: Vec<u32> = positions.collect();
    let mut before = 0;
    for (index, &position) in positions.iter().enumerate() {
        let (offset, position) = (POSITION_BYTES * index as u64, u64::from(position));
        if position < before || position > weights || index == 0 && position != 0 {
            let problem =
                format!("must ascend from 0 to {weights}, and {position} follows {before}");
            return Err(array.damaged(offset, problem));
        }
        if position - before > block_bits {
            let problem = "the thread block has more weights than bits";
            return Err(array.damaged(offset - POSITION_BYTES, problem));
        }
        before = position;
    }
    if before != weights {
        let problem = format!("must end with the number of weights, {weights}");
        return Err(array.damaged(array.length - POSITION_BYTES, problem));
    }
    Ok(positions)
}

impl CodedBlock {
    /// Checks the arrays (codes, plane, LUTs, positions, gaps), and reads the LUTs and all
    /// positions: 4 bytes for some 25 KB of weights.
    pub(super) fn open(arrays: [FileRange; 5], threads_per_block: u64) -> Result<Self> {
        let [codes, plane, luts, positions, gaps] = arrays;
        // A LUT for each value that can be a pointer, LUT 0, the lengths; more cannot be used.
        let most = (table::MAX_ROWS * table::ENTRIES) as u64 + 1;
        let bytes = luts.read(0, luts.length.min(most))?;
        let table = table::LutTree::new(&luts.path, &bytes)?;
        let block_bytes = threads_per_block * BYTES_PER_THREAD;
        let blocks = codes.length.div_ceil(block_bytes);
        let gap_bytes = (GAP_BITS * threads_per_block * blocks).div_ceil(8);
        if gaps.length != gap_bytes {
            let problem = format!("must be {gap_bytes} bytes for {blocks} thread blocks");
            return Err(gaps.damaged(gaps.length, problem));
        }
        let allowed = [POSITION_BYTES * blocks.max(1), POSITION_BYTES * (blocks + 1)];
        if !allowed.contains(&positions.length) {
            let [least, most] = allowed;
            let problem = format!("must be {least} or {most} bytes for {blocks} thread blocks");
            return Err(positions.damaged(positions.length, problem));
        }
        let positions = read_positions(&positions, plane.length, 8 * block_bytes)?;
        Ok(Self { codes, plane, gaps, table, threads_per_block, positions })
    }

    pub(super) const fn weights(&self) -> u64 {
        self.plane.length
    }

    const fn block_bytes(&self) -> u64 {
        self.threads_per_block * BYTES_PER_THREAD
    }

    /// Fills `buf` with bytes of the block's weights, of which `from` is the first.
    pub(super) fn read(&self, from: u64, buf: &mut [u8]) -> Result<()> {
        let (mut at, end) = (from, from + buf.len() as u64);
        while at < end {
            let weights = self.decode(at / 2, end.div_ceil(2))?;
            let weights = &weights[(at % 2) as usize..];
            let buf = &mut buf[(at - from) as usize..];
            let count = weights.len().min(buf.len());
            buf[..count].copy_from_slice(&weights[..count]);
            at += count as u64;
        }
        Ok(())
    }

    /// The bytes of weights `first..until`, as far as they are in the thread block of the first.
    fn decode(&self, first: u64, until: u64) -> Result<Vec<u8>> {
        let next = self.positions.partition_point(|&start| u64::from(start) <= first);
        let [start, end] = [next - 1, next].map(|at| u64::from(self.positions[at]));
        let (index, until) = (next as u64 - 1, until.min(end));
        // With the bytes that the last code may take.
        let codes = self.block_bytes() + LOOK_BYTES;
        let codes = self.codes.read(index * self.block_bytes(), codes)?;
        let gaps = self.read_gaps(index)?;
        let mut exponents = vec![0; (until - start) as usize];
        let bit = self.decode_codes(index, &codes, &gaps, &mut exponents)?;
        if until == end {
            let next_gap = gaps.last().filter(|_| end < self.weights());
            self.check_end(index, bit, next_gap)?;
        }
        let plane = self.plane.read(first, until - first)?;
        let mut weights = vec![0; 2 * plane.len()];
        bf16::merge(&exponents[(first - start) as usize..], &plane, &mut weights);
        Ok(weights)
    }

    /// The gaps of a thread block and the next one's first; missing ones are 0.
    fn read_gaps(&self, index: u64) -> Result<Vec<u64>> {
        let first = GAP_BITS * self.threads_per_block * index;
        let bits = first % 8 + GAP_BITS * (self.threads_per_block + 1);
        let bytes = self.gaps.read(first / 8, bits.div_ceil(8) + 1)?;
        let gap = |thread| {
            let bit = first % 8 + GAP_BITS * thread;
            let at = (bit / 8) as usize;
            let two = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
            u64::from(two >> (16 - GAP_BITS - bit % 8) & 0x1F)
        };
        Ok((0..=self.threads_per_block).map(gap).collect())
    }

    /// Decodes as many codes of a thread block as there is room for. Returns the bit after the last
    /// one, counted from the start of the thread block.
    fn decode_codes(
        &self,
        index: u64,
        codes: &[u8],
        gaps: &[u64],
        exponents: &mut [u8],
    ) -> Result<u64> {
        let mut left = exponents.iter_mut();
        let mut bit = gaps[0];
        for (thread, gap) in (0..self.threads_per_block).zip(gaps) {
            if left.len() == 0 {
                return Ok(bit);
            }
            let start = thread * THREAD_BITS;
            if bit != start + gap {
                let problem =
                    format!("the gap of thread {thread} is not where its first code begins");
                let first = index * self.threads_per_block;
                return Err(self.gaps.damaged(GAP_BITS * (first + thread) / 8, problem));
            }
            let look = codes[(start / 8) as usize..].first_chunk().expect("16 bytes more");
            let mut look = u128::from_be_bytes(*look) << (bit - start);
            while bit < start + THREAD_BITS {
                let Some(exponent) = left.next() else { return Ok(bit) };
                let (value, length) = self
                    .table
                    .find((look >> 96) as u32)
                    .map_err(|no_code| self.no_code(index, bit, &no_code))?;
                *exponent = value;
                look <<= length;
                bit += u64::from(length);
            }
        }
        if left.len() == 0 { Ok(bit) } else { Err(self.wrong_end(index)) }
    }

    /// A thread block ends where the next one begins, or with the stream.
    fn check_end(&self, index: u64, bit: u64, next_gap: Option<&u64>) -> Result<()> {
        let block_bits = 8 * self.block_bytes();
        let good = if let Some(gap) = next_gap {
            bit == block_bits + gap
        } else {
            let padding = (8 * self.codes.length).checked_sub(index * block_bits + bit);
            padding.is_some_and(|padding| padding < 8)
        };
        if good { Ok(()) } else { Err(self.wrong_end(index)) }
    }

    fn wrong_end(&self, index: u64) -> Error {
        let problem = format!("thread block {index} does not end where the next begins");
        self.codes.damaged((index + 1) * self.block_bytes(), problem)
    }

    fn no_code(&self, index: u64, bit: u64, no_code: &table::InvalidCode) -> Error {
        match no_code {
            table::InvalidCode::Unused => {
                let byte = index * self.block_bytes() + bit / 8;
                self.codes.damaged(byte, "no code begins with these bits")
            }
            table::InvalidCode::Ambiguous => Error::unsupported(
                format!(
                    "{}: an exponent of 240 or more that looks like a pointer between the LUTs",
                    self.codes.path
                ),
                "the DFloat11 package has lost such weights; compress the original BF16 files",
            ),
        }
    }
}
