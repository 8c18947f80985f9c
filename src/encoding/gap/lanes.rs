//! The fast decoder: several thread blocks at once, several exponents per look-up.
//!
//! A look-up waits for the one before it (8 cycles on Zen 5), so one stream leaves the core idle.
//! The index says where every thread block starts and where its weights go, so [`LANES`] thread
//! blocks are decoded in turns, look-up by look-up; one load of bits serves [`LOOKUPS`] look-ups.
//! Exponents are collected in a buffer of L1 size, and vectorised code merges them with the plane.
//!
//! Measured on one Zen 5 core at 3.75 GHz, in GB of BF16 per second in cache, for N(0, 0.02²) /
//! with per-row scales; chosen: 6.8 / 5.8.
//!
//! | rejected | GB/s |
//! |---|---|
//! | all look-ups of a lane before those of the next | 4.9 / 4.0 |
//! | count and consumed bits in two sums | 6.4 / 5.4 |
//! | 2, 3 lanes (looked up lane by lane) | 3.7 / 3.2, 4.3 / 3.5 |
//! | 6, 8 lanes | 6.0 / 5.0, 5.8 / 4.6 |
//! | 4 look-ups per load | 5.9 / 5.0 |
//! | tables of 12 bits, 4 look-ups, 4 or 6 lanes | 5.9 / 4.9, 6.3 / 5.5, built in twice the time |
//! | tables of 10 bits (looked up lane by lane) | 3.9 / 3.3 |
//! | scratch of 512, 2048, 4096 exponents | as good; to uncached memory 4.3, 4.2, 4.4 for 4.6 |

use std::ops::Range;

use crate::huffman::{
    Luts, SYMBOLS_PER_ENTRY, SymbolTable, TABLE_BITS,
    bits::{PEEK_BITS, peek, peek_at_end},
};

/// Thread blocks decoded at once.
pub(super) const LANES: usize = 4;
/// Look-ups for each load of bits.
const LOOKUPS: usize = 5;
/// The most exponents that a step (the look-ups of one load) yields.
const STEP_SYMBOLS: usize = LOOKUPS * SYMBOLS_PER_ENTRY;
/// The most bits that a step consumes: a long code instead of the last look-up, or less.
const STEP_BITS: usize = (LOOKUPS - 1) * TABLE_BITS as usize + 16;
const _: () = assert!(LOOKUPS * TABLE_BITS as usize <= PEEK_BITS && STEP_BITS >= 56);
/// Exponents that a lane holds before they are handed on.
const SCRATCH: usize = 1024;
/// Each look-up stores 8 bytes, of which the count says how many are exponents.
const STORE: usize = 8;

/// A bitstream has no code at a bit, or one that ends after its thread block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Misread {
    /// The bit, from the start of the span.
    pub(super) bit: usize,
}

/// A thread block that is being decoded, and its exponents that were not yet handed on.
pub(super) struct Lane {
    bit: usize,
    end: usize,
    /// The weights still to come, with those in the scratch.
    left: usize,
    element: u64,
    filled: usize,
    first_bit: usize,
    scratch: [u8; SCRATCH + STORE],
}

/// Some decoded exponents.
pub(super) struct ExponentRun<'a> {
    /// The index of the first one's weight in the tensor.
    pub(super) element: u64,
    /// The bit at which its code starts, from the start of the span.
    pub(super) bit: usize,
    pub(super) exponents: &'a [u8],
}

impl Lane {
    /// A thread block of `left` weights, the first one with this index, whose codes have these
    /// bits, no fewer than weights and counted from the start of the span.
    pub(super) const fn new(element: u64, left: usize, bits: Range<usize>) -> Self {
        let Range { start: bit, end } = bits;
        let scratch = [0; SCRATCH + STORE];
        Self { bit, end, left, element, filled: 0, first_bit: bit, scratch }
    }

    /// The steps that are surely within the thread block, the stream and the scratch.
    fn steps(&self, stream: &[u8]) -> usize {
        // A step starts at least STEP_BITS before `readable`, where 8 bytes follow.
        let readable = (8 * stream.len()).saturating_sub(8);
        let bits = self.end.min(readable).saturating_sub(self.bit);
        let room = self.left.min(SCRATCH) - self.filled;
        (bits / STEP_BITS).min(room / STEP_SYMBOLS)
    }

    /// Whether the end is too near for a step.
    pub(super) fn is_near_its_end(&self, stream: &[u8]) -> bool {
        self.steps(stream) == 0
    }

    /// Hands on what was decoded.
    pub(super) fn hand_on(&mut self) -> ExponentRun<'_> {
        let decoded = ExponentRun {
            element: self.element,
            bit: self.first_bit,
            exponents: &self.scratch[..self.filled],
        };
        self.element += self.filled as u64;
        self.left -= self.filled;
        self.first_bit = self.bit;
        self.filled = 0;
        decoded
    }

    /// Decodes the rest code by code, up to what the scratch holds; whether that was all.
    pub(super) fn walk(&mut self, luts: &Luts, stream: &[u8]) -> Result<bool, Misread> {
        while self.filled < self.left.min(SCRATCH) {
            self.long_code(luts, stream)?;
        }
        if self.filled == self.left && self.bit != self.end {
            return Err(Misread { bit: self.bit });
        }
        Ok(self.filled == self.left)
    }

    /// Decodes one code, of any length.
    #[inline(never)]
    fn long_code(&mut self, luts: &Luts, stream: &[u8]) -> Result<(), Misread> {
        let misread = Misread { bit: self.bit };
        let bits = if self.bit / 8 + 8 <= stream.len() {
            peek(stream, self.bit)
        } else {
            peek_at_end(stream, self.bit)
        };
        let (symbol, length) = luts.find(bits as u16).ok_or(misread)?;
        let bit = self.bit + usize::from(length);
        if bit > self.end {
            return Err(misread);
        }
        self.scratch[self.filled] = symbol;
        self.filled += 1;
        self.bit = bit;
        Ok(())
    }
}

/// Decodes all lanes until one is full or near its end.
pub(super) fn run<const N: usize>(
    lanes: &mut [Lane; N],
    table: &SymbolTable,
    luts: &Luts,
    stream: &[u8],
) -> Result<(), Misread> {
    loop {
        let steps = lanes.iter().map(|lane| lane.steps(stream)).min().unwrap_or(0);
        if steps == 0 {
            return Ok(());
        }
        for _ in 0..steps {
            step(lanes, table, luts, stream)?;
        }
    }
}

/// One load and its look-ups in each lane. Scratch and stream have room for it: [`Lane::steps`].
#[inline]
fn step<const N: usize>(
    lanes: &mut [Lane; N],
    table: &SymbolTable,
    luts: &Luts,
    stream: &[u8],
) -> Result<(), Misread> {
    let mut entries = [0; N];
    let mut bits = [0; N];
    // The number of exponents × 256 plus the bits consumed, which both grow by one addition of an
    // entry's upper bytes.
    let mut sums = [0; N];
    for ((bits, sum), lane) in bits.iter_mut().zip(&mut sums).zip(&*lanes) {
        *bits = peek(stream, lane.bit);
        *sum = (lane.filled as u64) << 8;
    }
    for _ in 0..LOOKUPS {
        let states = entries.iter_mut().zip(&mut bits).zip(&mut sums);
        for (((entry, bits), sum), lane) in states.zip(&mut *lanes) {
            *entry = table.get(*bits);
            let at = (*sum >> 8) as usize % SCRATCH;
            lane.scratch[at..at + STORE].copy_from_slice(&entry.to_le_bytes());
            *bits >>= (*entry >> 48) % 64;
            *sum += *entry >> 48;
        }
    }
    for (sum, lane) in sums.iter().zip(&mut *lanes) {
        lane.bit += usize::from(*sum as u8);
        lane.filled = (*sum >> 8) as usize;
    }
    // An entry that consumes nothing repeats itself, so the last one tells of a long code anywhere
    // in the step.
    for (entry, lane) in entries.iter().zip(lanes) {
        if entry >> 48 == 0 {
            lane.long_code(luts, stream)?;
        }
    }
    Ok(())
}
