//! Writes codes and notes where they cross into another thread.
//!
//! Four weights at a time: two look-ups in the pair table make one piece of bits, which joins the
//! bits of the byte begun and is stored as 8 bytes, of which whole ones are kept.
//!
//! Measured on one Zen 5 core, GB of BF16 a second for all of encoding N(0, 0.02²); chosen: 3.3.
//! Rejected: the hot loop inlined in its caller, which then lacks registers, 2.0; crossings
//! resolved by a branch for each code of the group, 2.6.

use super::crossings::{Crossings, GROUP};
use super::pair_table::{self, PairTable, VALID};
use super::tracker::Tracker;
use crate::huffman::{Code, CodeLengths};

/// The most bits that fit beside the up to 7 of a byte begun.
const MOST_BITS: usize = 56;

/// The end of a bitstream that is being written.
pub(super) struct Writer<'a> {
    stream: &'a mut [u8],
    end: End,
    tracker: Tracker<'a>,
    crossings: Crossings,
}

#[derive(Clone, Copy)]
struct End {
    /// The bits written, counted from the start of the buffer.
    bit: usize,
    /// The `bit % 8` bits of the byte begun.
    begun: u64,
}

impl End {
    /// Appends up to [`MOST_BITS`] bits; `None` if the buffer is full.
    #[inline]
    fn push(&mut self, stream: &mut [u8], bits: u64, length: usize) -> Option<()> {
        let held = self.bit % 8;
        self.begun |= bits << held;
        let at = self.bit / 8;
        stream.get_mut(at..at + 8)?.copy_from_slice(&self.begun.to_le_bytes());
        self.bit += length;
        self.begun >>= (held + length) & !7;
        Some(())
    }
}

impl<'a> Writer<'a> {
    /// Bytes that the buffer needs after its last code.
    pub(super) const SLACK: usize = 16;

    /// Starts at a bit of a buffer; what stands before it is not defined.
    pub(super) fn new(stream: &'a mut [u8], bit: usize, tracker: Tracker<'a>) -> Self {
        let crossings = Crossings::new(tracker.thread_bits());
        Self { stream, end: End { bit, begun: 0 }, tracker, crossings }
    }

    /// The bits written, counted from the start of the buffer.
    pub(super) const fn bit(&self) -> usize {
        self.end.bit
    }

    /// Writes one code, after which the weight `next` starts; false if it is none or the buffer is
    /// full.
    pub(super) fn push(&mut self, code: Code, next: u64) -> bool {
        let written = self.end.push(self.stream, u64::from(code.bits), usize::from(code.length));
        if self.end.bit >= self.tracker.threshold() {
            self.tracker.cross(self.end.bit, next);
        }
        written.is_some() && code.length > 0
    }

    /// Writes the codes of at most [`PIECE`] exponents, a multiple of [`GROUP`], the first of which
    /// is weight `element`; false where one has no code or the buffer is full.
    pub(super) fn push_groups(
        &mut self,
        pairs: &PairTable,
        lengths: &CodeLengths,
        exponents: &[u8],
        element: u64,
    ) -> bool {
        let Some(end) = write_groups(self.end, pairs, exponents, self.stream, &mut self.crossings)
        else {
            return false;
        };
        self.end = end;
        while self.tracker.threshold() <= end.bit {
            let (bit, next) =
                self.crossings.find(self.tracker.threshold(), exponents, lengths.as_bytes());
            self.tracker.cross(bit, element + next as u64);
        }
        true
    }

    /// Fills the rest of the owned bytes with zeros, and appends the last output offset; false if a
    /// boundary is missing.
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

/// The hot loop: writes the groups and notes where each starts.
///
/// Kept apart, or the compiler runs out of registers for it.
#[inline(never)]
fn write_groups(
    mut end: End,
    pairs: &PairTable,
    exponents: &[u8],
    stream: &mut [u8],
    crossings: &mut Crossings,
) -> Option<End> {
    let mut valid = VALID;
    for (group, exponents) in exponents.as_chunks::<GROUP>().0.iter().enumerate() {
        let exponents = u32::from_le_bytes(*exponents);
        let (first, second) = (pairs.get(exponents as u16), pairs.get((exponents >> 16) as u16));
        valid &= first & second;
        crossings.note(end.bit, group);
        let length = pair_table::length(first + second);
        if length <= MOST_BITS {
            let bits = pair_table::bits(first) | pair_table::bits(second) << (first % 64);
            end.push(stream, bits, length)?;
        } else {
            end.push(stream, pair_table::bits(first), pair_table::length(first))?;
            end.push(stream, pair_table::bits(second), pair_table::length(second))?;
        }
    }
    (valid == VALID).then_some(end)
}
