//! The index: the places where codes cross from one thread into the next. The encoder and
//! verification find them; the encoder collects them as gaps and output offsets.

use std::ops::Range;

use super::sizes::GapGeometry;
use crate::constants::{GAP_THREADS_PER_BYTE, OUTPUT_OFFSET_BYTES, SYMBOLS};

/// Codes in a group.
pub(super) const GROUP: usize = 4;
/// The most codes of a piece, between whose groups crossings are looked for; their exponents stay
/// in the L1 cache.
pub(super) const PIECE: usize = 4096;
const GROUPS: usize = PIECE / GROUP;
/// Slots for the threads of a piece: at most `GROUPS + 1`, of 64 bits or more.
const SLOTS: usize = 2 * GROUPS;

/// Finds the codes that cross from one thread into the next, without a branch for each.
///
/// A thread has at least 64 bits and a group of four codes at most 64, so the last group that
/// starts in a thread is the one that crosses into the next. Every group leaves its place in the
/// slot of the thread in which it starts; what remains there is the crossing group. (Verification
/// makes 3.5 GB/s of BF16 so, and 2.5 with a comparison for each code, which is taken once in fifty
/// at times that nobody can foresee.)
pub(super) struct Crossings {
    /// The place of the last group that starts in each thread, as `start bit × GROUPS + group`.
    last_groups: [u64; SLOTS],
    /// The binary logarithm of the bits per thread.
    shift: u32,
}

impl Crossings {
    /// Prepares for threads of 64, 128, 256 or 512 bits.
    pub(super) const fn new(thread_bits: usize) -> Self {
        Self { last_groups: [0; SLOTS], shift: thread_bits.ilog2() }
    }

    /// Notes that a group of the piece starts at a bit.
    #[inline]
    pub(super) fn note(&mut self, bit: usize, group: usize) {
        self.last_groups[(bit >> self.shift) % SLOTS] = (bit as u64) * GROUPS as u64 + group as u64;
    }

    /// The first boundary at or after a thread's first bit, and the index in the piece of the
    /// exponent that starts there. A group of this piece must cross that bit.
    pub(super) fn find(
        &self,
        threshold: usize,
        exponents: &[u8],
        lengths: &[u8; SYMBOLS],
    ) -> (usize, usize) {
        let place = self.last_groups[((threshold >> self.shift) - 1) % SLOTS];
        let (group, mut bit) = (place as usize % GROUPS, (place / GROUPS as u64) as usize);
        let ends = exponents.as_chunks::<GROUP>().0[group].map(|exponent| {
            bit += usize::from(lengths[usize::from(exponent)]);
            bit
        });
        let crossing = ends[..GROUP - 1].iter().filter(|&&end| end < threshold).count();
        (ends[crossing % GROUP], group * GROUP + crossing + 1)
    }
}

/// The gaps and output offsets that a portion owns.
#[derive(Debug, Default)]
pub(super) struct IndexArrays {
    pub(super) gaps: Vec<u8>,
    pub(super) output_offsets: Vec<u8>,
}

/// Takes note of the first boundary in or after each owned thread, thread by thread.
pub(super) struct Tracker<'a> {
    arrays: &'a mut IndexArrays,
    /// The first owned thread, and those whose boundaries are still to come.
    first: u64,
    threads: Range<u64>,
    pub(super) thread_bits: usize,
    threads_per_block: u64,
    /// The bit at or after which the next boundary is wanted, counted as the caller counts: the
    /// next thread's first one. `usize::MAX` where no thread is left.
    pub(super) threshold: usize,
}

impl<'a> Tracker<'a> {
    /// Starts for the owned threads, an even first one, whose first bit is `threshold`.
    pub(super) fn new(
        arrays: &'a mut IndexArrays,
        geometry: GapGeometry,
        threads: Range<u64>,
        threshold: usize,
    ) -> Self {
        let count = threads.end.saturating_sub(threads.start);
        arrays.gaps.clear();
        arrays.gaps.resize(count.div_ceil(GAP_THREADS_PER_BYTE) as usize, 0);
        arrays.output_offsets.clear();
        let mut tracker = Self {
            arrays,
            thread_bits: geometry.thread_bits() as usize,
            threads_per_block: u64::from(geometry.threads_per_block()),
            threshold,
            first: threads.start,
            threads,
        };
        tracker.stop_at_the_end();
        tracker
    }

    /// Notes that the first boundary at or after the threshold is `bit`, where the weight `element`
    /// starts.
    pub(super) fn cross(&mut self, bit: usize, element: u64) {
        let thread = self.threads.start;
        if self.threads.is_empty() {
            return;
        }
        let at = ((thread - self.first) / GAP_THREADS_PER_BYTE) as usize;
        self.arrays.gaps[at] |=
            ((bit - self.threshold) as u8) << (4 * (thread % GAP_THREADS_PER_BYTE));
        if thread.is_multiple_of(self.threads_per_block) {
            self.push_output_offset(element);
        }
        self.threads.start += 1;
        self.threshold += self.thread_bits;
        self.stop_at_the_end();
    }

    fn stop_at_the_end(&mut self) {
        if self.threads.is_empty() {
            self.threshold = usize::MAX;
        }
    }

    /// Appends an output offset.
    pub(super) fn push_output_offset(&mut self, element: u64) {
        self.arrays.output_offsets.extend_from_slice(&element.to_le_bytes()[..OUTPUT_OFFSET_BYTES]);
    }

    /// Whether every owned thread's boundary was noted.
    pub(super) fn is_complete(&self) -> bool {
        self.threads.is_empty()
    }
}
