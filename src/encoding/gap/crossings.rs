//! Finds the codes that cross from one thread into the next, without a branch for each.
//!
//! A thread has at least 64 bits and a group of four codes at most 64, so the last group that
//! starts in a thread is the one that crosses into the next. Every group leaves its place in the
//! slot of the thread in which it starts; what remains there is the crossing group. (Verification
//! makes 3.5 GB/s of BF16 so, and 2.5 with a comparison for each code, which is taken once in fifty
//! at times that nobody can foresee.)

use crate::constants::SYMBOLS;

/// Codes in a group.
pub(super) const GROUP: usize = 4;
/// The most codes of a piece, between whose groups crossings are looked for; their exponents stay
/// in the L1 cache.
pub(super) const PIECE: usize = 4096;
const GROUPS: usize = PIECE / GROUP;
/// Slots for the threads of a piece: at most `GROUPS + 1`, of 64 bits or more.
const SLOTS: usize = 2 * GROUPS;

/// The place of the last group that starts in each thread, as `start bit × GROUPS + group`.
pub(super) struct Crossings {
    last_groups: [u64; SLOTS],
    /// The binary logarithm of the bits a thread.
    shift: u32,
}

impl Crossings {
    /// For threads of 64, 128, 256 or 512 bits.
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
