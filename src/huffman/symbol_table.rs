//! The table of the fast decoder: one look-up decodes all the codes that fit its index.
//!
//! ```text
//! entry   bytes 0..6  exponents, the first in byte 0
//!         byte 6      bits consumed
//!         byte 7      exponents decoded, 1..=6; 0 (and 0 consumed) if the next code is longer
//! ```
//! A look-up of an entry that consumes nothing finds itself again, so a caller may check the last
//! of several look-ups only.

use super::Luts;

/// The number of bits that index the table.
///
/// 11 bits make 16 KiB, a third of an L1 cache; see the decoder for what other widths cost.
pub const TABLE_BITS: u8 = 11;
/// The most exponents that one look-up decodes.
pub const SYMBOLS_PER_ENTRY: usize = 6;
const ENTRIES: usize = 1 << TABLE_BITS;

/// A table of several exponents an entry, derived from a code.
#[derive(Clone, Debug)]
pub struct SymbolTable {
    entries: Box<[u64; ENTRIES]>,
}

impl SymbolTable {
    /// Builds the table, in about 20 µs.
    pub fn new(luts: &Luts) -> Self {
        let mut entries = Box::new([0; ENTRIES]);
        for (index, entry) in entries.iter_mut().enumerate() {
            *entry = Self::entry(luts, index as u16);
        }
        Self { entries }
    }

    fn entry(luts: &Luts, index: u16) -> u64 {
        let mut bytes = [0; 8];
        let (mut consumed, mut count) = (0, 0);
        while count < SYMBOLS_PER_ENTRY && consumed < TABLE_BITS {
            let Some((symbol, length)) = luts.find(index >> consumed) else { break };
            if consumed + length > TABLE_BITS {
                break;
            }
            bytes[count] = symbol;
            consumed += length;
            count += 1;
        }
        bytes[6] = consumed;
        bytes[7] = count as u8;
        u64::from_le_bytes(bytes)
    }

    /// The entry for a stream whose next bits are `bits`.
    #[inline]
    pub fn get(&self, bits: u64) -> u64 {
        self.entries[bits as usize % ENTRIES]
    }
}
