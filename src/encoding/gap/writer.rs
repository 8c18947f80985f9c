//! Writes codes and notes where they cross into another thread.
//!
//! Four weights at a time: two look-ups in the pair table make one piece of bits, which joins the bits of the byte begun and
//! is stored as 8 bytes, of which whole ones are kept. A group is at most 64 bits, so it crosses into at most one thread,
//! whose gap is found in a second pass over a list that grows without a branch.

use super::pair_table::{self, PairTable, VALID};
use super::tracker::Tracker;
use crate::huffman::{Code, Codes};

/// Weights written at a time.
pub(super) const GROUP: usize = 4;
/// Weights between two passes over the list of crossings; their exponents stay in the L1 cache.
pub(super) const PIECE: usize = 4096;
const GROUPS: usize = PIECE / GROUP;
/// The most bits that fit beside the up to 7 of a byte begun.
const MOST_BITS: usize = 56;

/// The end of a bitstream that is being written.
pub(super) struct Writer<'a> {
    stream: &'a mut [u8],
    end: End,
    tracker: Tracker<'a>,
}

#[derive(Clone, Copy)]
struct End {
    /// The bits written, counted from the start of the buffer.
    bit: usize,
    /// The `bit % 8` bits of the byte begun.
    begun: u64,
}

impl End {
    /// Appends up to [`MOST_BITS`] bits; `None` where the buffer is full.
    #[inline]
    fn push(&mut self, stream: &mut [u8], bits: u64, length: usize) -> Option<()> {
        let held = self.bit % 8;
        self.begun |= bits << held;
        *stream.get_mut(self.bit / 8..)?.first_chunk_mut()? = self.begun.to_le_bytes();
        self.bit += length;
        self.begun >>= (held + length) & !7;
        Some(())
    }
}

impl<'a> Writer<'a> {
    /// Bytes that the buffer needs behind its last code.
    pub(super) const SLACK: usize = 16;

    /// Starts at a bit of a buffer; what stands before it is not defined.
    pub(super) const fn new(stream: &'a mut [u8], bit: usize, tracker: Tracker<'a>) -> Self {
        Self { stream, end: End { bit, begun: 0 }, tracker }
    }

    /// The bits written, counted from the start of the buffer.
    pub(super) const fn bit(&self) -> usize {
        self.end.bit
    }

    /// Writes one code, behind which the weight `next` starts; false where it is none or the buffer is full.
    pub(super) fn push(&mut self, code: Code, next: u64) -> bool {
        let written = self.end.push(self.stream, u64::from(code.bits), usize::from(code.length));
        if self.end.bit >= self.tracker.threshold() {
            self.tracker.cross(self.end.bit, next);
        }
        written.is_some() && code.length > 0
    }

    /// Writes the codes of at most [`PIECE`] exponents, a multiple of [`GROUP`], the first of which is weight `element`;
    /// false where one has no code or the buffer is full.
    pub(super) fn push_groups(
        &mut self,
        pairs: &PairTable,
        codes: &Codes,
        exponents: &[u8],
        element: u64,
    ) -> bool {
        let mut crossings = [0; GROUPS];
        let Some(count) = self.write_groups(pairs, exponents, &mut crossings) else { return false };
        let groups = exponents.as_chunks::<GROUP>().0;
        for crossing in &crossings[..count] {
            let group = crossing % GROUPS;
            let mut bit = crossing / GROUPS;
            let mut next = element + (group * GROUP) as u64;
            for &exponent in &groups[group] {
                if bit < self.tracker.threshold() {
                    bit += usize::from(codes.get(exponent).length);
                    next += 1;
                }
            }
            self.tracker.cross(bit, next);
        }
        true
    }

    /// The hot loop: writes the groups and lists `start bit × GROUPS + group` of those that cross into a thread.
    fn write_groups(
        &mut self,
        pairs: &PairTable,
        exponents: &[u8],
        crossings: &mut [usize; GROUPS],
    ) -> Option<usize> {
        let Self { stream, end, tracker } = self;
        let mut now = *end;
        let (mut valid, mut count) = (VALID, 0);
        let (thread_bits, mut threshold) = (tracker.thread_bits(), tracker.threshold());
        for (group, [a, b, c, d]) in exponents.as_chunks::<GROUP>().0.iter().enumerate() {
            let (first, second) = (pairs.get(*a, *b), pairs.get(*c, *d));
            valid &= first & second;
            crossings[count % GROUPS] = now.bit * GROUPS + group;
            let (first_length, second_length) = (pair_table::length(first), pair_table::length(second));
            let length = first_length + second_length;
            if length <= MOST_BITS {
                let bits = pair_table::bits(first) | pair_table::bits(second) << first_length;
                now.push(stream, bits, length)?;
            } else {
                now.push(stream, pair_table::bits(first), first_length)?;
                now.push(stream, pair_table::bits(second), second_length)?;
            }
            let crossed = now.bit >= threshold;
            count += usize::from(crossed);
            threshold = threshold.wrapping_add(if crossed { thread_bits } else { 0 });
        }
        *end = now;
        (valid == VALID).then_some(count)
    }

    /// Fills the rest of the owned bytes with zeros, and appends the last output offset; false where a boundary is missing.
    pub(super) fn finish(mut self, owned_end: usize, elements: Option<u64>) -> bool {
        if let Some(padding) = self.stream.get_mut(self.end.bit / 8..owned_end.div_ceil(8)) {
            padding.fill(0);
            if let Some(byte) = padding.first_mut() {
                *byte = self.end.begun as u8;
            }
        }
        if let Some(elements) = elements {
            self.tracker.push_output_offset(elements);
        }
        self.tracker.is_complete()
    }
}
