//! The encoder's table: one look-up gives the codes of two exponents.

use crate::huffman::Codes;

const ENTRIES: usize = 1 << 16;

/// The codes of all pairs of exponents that a code has, 512 KiB of which a trained tensor touches
/// some 10.
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
pub(super) const VALID: u64 = 1 << 7;

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
    pub(super) fn get(&self, pair: u16) -> u64 {
        self.entries[usize::from(pair)]
    }
}

/// The number of bits of an entry, or of a sum of two entries.
#[inline]
pub(super) const fn length(sum: u64) -> usize {
    (sum % VALID) as usize
}

/// The bits of an entry.
#[inline]
pub(super) const fn bits(entry: u64) -> u64 {
    entry >> 8
}
