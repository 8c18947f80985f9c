//! Writes codes, and records where they cross into another thread.
//!
//! Four weights are written at a time: two look-ups in the pair table give their bits, which are
//! appended to those of the unfinished byte and stored as 8 bytes, of which the complete ones
//! count.
//!
//! Measured on one Zen 5 core, in GB of BF16 per second for all of encoding N(0, 0.02²); chosen:
//! 3.3. Rejected: 2.0 with the hot loop inlined in its caller, which then lacks registers; 2.6 with
//! a branch for each code of the group to resolve crossings.

use super::index::{Crossings, GROUP, Tracker};
use crate::huffman::{
    Code, CodeLengths, Codes,
    bits::{End, PUSH_BITS},
};

/// The end of a bitstream that is being written.
pub(super) struct Writer<'a> {
    stream: &'a mut [u8],
    end: End,
    tracker: Tracker<'a>,
    crossings: Crossings,
}

impl<'a> Writer<'a> {
    /// Bytes that the buffer needs after its last code.
    pub(super) const SLACK: usize = 16;

    /// Starts at a bit of a buffer; what stands before it is not defined.
    pub(super) fn new(stream: &'a mut [u8], bit: usize, tracker: Tracker<'a>) -> Self {
        let crossings = Crossings::new(tracker.thread_bits);
        Self { stream, end: End { bit, begun: 0 }, tracker, crossings }
    }

    /// The bits written, counted from the start of the buffer.
    pub(super) const fn bit(&self) -> usize {
        self.end.bit
    }

    /// Writes one code, after which the weight `next` starts; `None` if it is none or the buffer is
    /// full.
    pub(super) fn push(&mut self, code: Code, next: u64) -> Option<()> {
        let written = self.end.push(self.stream, u64::from(code.bits), usize::from(code.length));
        if self.end.bit >= self.tracker.threshold {
            self.tracker.cross(self.end.bit, next);
        }
        written.filter(|()| code.length > 0)
    }

    /// Writes the codes of at most [`PIECE`](super::index::PIECE) exponents, a multiple of
    /// [`GROUP`], the first of which is weight `element`; `None` if one has no code or the
    /// buffer is full.
    pub(super) fn push_groups(
        &mut self,
        pairs: &PairTable,
        lengths: &CodeLengths,
        exponents: &[u8],
        element: u64,
    ) -> Option<()> {
        self.end = write_groups(self.end, pairs, exponents, self.stream, &mut self.crossings)?;
        while self.tracker.threshold <= self.end.bit {
            let (bit, next) =
                self.crossings.find(self.tracker.threshold, exponents, lengths.as_bytes());
            self.tracker.cross(bit, element + next as u64);
        }
        Some(())
    }

    /// Fills the rest of the owned bytes with zeros, and appends the last output offset; `None` if
    /// a boundary is missing.
    pub(super) fn finish(mut self, owned_end: usize, elements: Option<u64>) -> Option<()> {
        if let Some(padding) = self.stream.get_mut(self.end.bit / 8..owned_end.div_ceil(8)) {
            padding.fill(0);
            if let Some(byte) = padding.first_mut() {
                *byte = self.end.begun as u8;
            }
        }
        if let Some(elements) = elements {
            self.tracker.push_output_offset(elements);
        }
        self.tracker.is_complete().then_some(())
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
    let (bits, length) = (PairTable::bits, PairTable::length);
    let mut valid = VALID;
    for (group, exponents) in exponents.as_chunks::<GROUP>().0.iter().enumerate() {
        let exponents = u32::from_le_bytes(*exponents);
        let (first, second) = (pairs.get(exponents as u16), pairs.get((exponents >> 16) as u16));
        valid &= first & second;
        crossings.note(end.bit, group);
        if length(first + second) <= PUSH_BITS {
            let both = bits(first) | bits(second) << (first % 64);
            end.push(stream, both, length(first + second))?;
        } else {
            end.push(stream, bits(first), length(first))?;
            end.push(stream, bits(second), length(second))?;
        }
    }
    (valid == VALID).then_some(end)
}

const ENTRIES: usize = 1 << 16;

/// The encoder's table: one look-up gives the codes of two exponents. A trained tensor touches some
/// 10 of its 512 KiB.
///
/// ```text
/// index   first exponent in the low byte, second in the high one, as they stand in memory
/// entry   bits 0..6   length of both codes, 2..=32; the low 7 bits of the sum of two are theirs
///         bit  7      VALID: both exponents have a code
///         bits 8..40  both codes, the first lowest
/// ```
#[derive(Clone, Debug)]
pub(super) struct PairTable {
    entries: Box<[u64; ENTRIES]>,
}

/// Set in the entries of pairs that have codes.
const VALID: u64 = 1 << 7;

impl PairTable {
    pub(super) fn new(codes: &Codes) -> Self {
        // Zeroed memory comes lazily: only the pages of used pairs are ever touched.
        let entries = vec![0; ENTRIES].into_boxed_slice();
        let mut entries: Box<[u64; ENTRIES]> =
            entries.try_into().expect("the slice has this length");
        for (second, after) in codes.used() {
            for (first, before) in codes.used() {
                let bits = u64::from(before.bits) | u64::from(after.bits) << before.length;
                let length = u64::from(before.length + after.length);
                entries[usize::from(u16::from_le_bytes([first, second]))] =
                    bits << 8 | VALID | length;
            }
        }
        Self { entries }
    }

    /// The entry of two neighbouring exponents.
    #[inline]
    fn get(&self, pair: u16) -> u64 {
        self.entries[usize::from(pair)]
    }

    /// The number of bits of an entry, or of a sum of two entries.
    #[inline]
    const fn length(sum: u64) -> usize {
        (sum % VALID) as usize
    }

    /// The bits of an entry.
    #[inline]
    const fn bits(entry: u64) -> u64 {
        entry >> 8
    }
}
