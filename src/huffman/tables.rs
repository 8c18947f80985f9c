//! The tables of a code: hierarchical LUTs, which a codebook array stores after the code lengths,
//! and the table of the fast decoder, where one look-up decodes all codes that fit its index.
//!
//! ```text
//! LUT 0, indexed by the next 8 bits   0x0LSS  code of L ≤ 8 bits for the exponent SS
//!                                     0x00KK  longer codes: LUT KK, indexed by the next 8 bits
//!                                     0x0000  no code (only in a one-symbol code)
//! LUT 1.., by their prefixes          0xLLSS  code of LL = 9..=16 bits in all for the exponent SS
//! ```

use super::code::{CodeLengths, Codes};
use crate::{
    Error, Result,
    constants::{CODE_LENGTHS_BYTES, LUT_BITS, LUT_BYTES, LUT_ENTRIES, LUT_ENTRY_BYTES},
};

/// The LUTs of a code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Luts {
    luts: Vec<[u16; LUT_ENTRIES]>,
}

impl Luts {
    /// Builds the LUTs, in some thousand steps.
    pub(crate) fn new(lengths: &CodeLengths) -> Self {
        let codes = Codes::new(lengths);
        let mut luts = vec![[0; LUT_ENTRIES]];
        let mut prefixes: Vec<usize> = codes
            .used()
            .filter(|(_, code)| code.length > LUT_BITS)
            .map(|(_, code)| usize::from(code.bits) % LUT_ENTRIES)
            .collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        for (prefix, reference) in prefixes.into_iter().zip(1..) {
            luts[0][prefix] = reference;
            luts.push([0; LUT_ENTRIES]);
        }
        for (symbol, code) in codes.used() {
            let entry = u16::from(code.length) << 8 | u16::from(symbol);
            let bits = usize::from(code.bits);
            let (lut, first, length) = if code.length <= LUT_BITS {
                (0, bits, code.length)
            } else {
                let reference = usize::from(luts[0][bits % LUT_ENTRIES]);
                (reference, bits / LUT_ENTRIES, code.length - LUT_BITS)
            };
            luts[lut].iter_mut().skip(first).step_by(1 << length).for_each(|slot| *slot = entry);
        }
        Self { luts }
    }

    /// The number of LUTs, 1..=128.
    pub(crate) fn len(&self) -> usize {
        self.luts.len()
    }

    /// The exponent and the length of the code at the start of a stream whose next 16 bits are
    /// `bits`; `None` if there is no such code.
    #[inline]
    pub(crate) fn find(&self, bits: u16) -> Option<(u8, u8)> {
        let entry = self.luts[0][usize::from(bits) % LUT_ENTRIES];
        let entry = match entry {
            0 => return None,
            reference @ 1..=0xFF => {
                self.luts[usize::from(reference)][usize::from(bits) / LUT_ENTRIES]
            }
            entry => entry,
        };
        Some((entry as u8, (entry >> 8) as u8))
    }
}

/// The codebook array of a code: 256 bytes of code lengths, then 512 bytes a LUT.
pub fn codebook(lengths: &CodeLengths) -> Vec<u8> {
    let luts = Luts::new(lengths);
    let mut bytes = Vec::with_capacity(CODE_LENGTHS_BYTES + LUT_BYTES * luts.len());
    bytes.extend_from_slice(lengths.as_bytes());
    bytes.extend(luts.luts.iter().flatten().flat_map(|entry| entry.to_le_bytes()));
    bytes
}

/// Reads the code lengths of a codebook array and checks them, and the number of LUTs; not what the
/// LUTs hold.
///
/// # Errors
/// [`Error::Corrupt`] with the byte at fault.
pub fn read_codebook(codebook: &[u8]) -> Result<CodeLengths> {
    let (lengths, luts) = codebook.split_at_checked(CODE_LENGTHS_BYTES).unwrap_or((codebook, &[]));
    let lengths = CodeLengths::from_bytes(lengths)?;
    Error::unless(luts.len() == LUT_BYTES * Luts::new(&lengths).len(), || {
        let problem = "must have as many LUTs of 512 bytes as its code lengths need";
        Error::corrupt("codebook", codebook.len() as u64, problem)
    })?;
    Ok(lengths)
}

/// Checks a whole codebook array: its code lengths, and that its LUTs are the ones that follow from
/// them.
pub(crate) fn verify_codebook(bytes: &[u8]) -> Result<()> {
    let expected = codebook(&read_codebook(bytes)?);
    match bytes.iter().zip(&expected).position(|(stored, expected)| stored != expected) {
        None => Ok(()),
        Some(at) => {
            let entry = (at - CODE_LENGTHS_BYTES) / LUT_ENTRY_BYTES;
            let problem = format!(
                "entry {} of LUT {} disagrees with the code lengths",
                entry % LUT_ENTRIES,
                entry / LUT_ENTRIES
            );
            Err(Error::corrupt("codebook", at as u64, problem))
        }
    }
}

/// The number of bits that index the table.
///
/// 11 bits make 16 KiB, a third of an L1 cache; see the decoder for what other widths cost.
pub(crate) const TABLE_BITS: u8 = 11;
/// The most exponents that one look-up decodes.
pub(crate) const SYMBOLS_PER_ENTRY: usize = 6;
const ENTRIES: usize = 1 << TABLE_BITS;

/// A table of several exponents an entry, derived from a code.
///
/// ```text
/// entry   bytes 0..6  exponents, the first in byte 0
///         byte 6      bits consumed
///         byte 7      exponents decoded, 1..=6; 0 (and 0 consumed) if the next code is longer
/// ```
/// A look-up of an entry that consumes nothing finds itself again, so a caller may check the last
/// of several look-ups only.
#[derive(Clone, Debug)]
pub(crate) struct SymbolTable {
    entries: Box<[u64; ENTRIES]>,
}

impl SymbolTable {
    /// Builds the table, in about 20 µs.
    pub(crate) fn new(luts: &Luts) -> Self {
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
    pub(crate) fn get(&self, bits: u64) -> u64 {
        self.entries[bits as usize % ENTRIES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::MAX_LUTS;

    #[test]
    fn a_one_symbol_code_has_holes() {
        let mut lengths = [0; 256];
        lengths[200] = 1;
        let luts = Luts::new(&CodeLengths::from_bytes(&lengths).unwrap());
        assert_eq!(
            (luts.len(), luts.find(0), luts.find(2), luts.find(1)),
            (1, Some((200, 1)), Some((200, 1)), None)
        );
    }

    #[test]
    fn long_codes_share_luts_by_prefix() {
        // Lengths 1, 2, .., 15, 16, 16: one prefix of eight ones leads to codes of 9..=16 bits.
        let mut lengths = [0; 256];
        (0..17).for_each(|symbol| lengths[symbol] = (symbol as u8 + 1).min(16));
        let lengths = CodeLengths::from_bytes(&lengths).unwrap();
        let luts = Luts::new(&lengths);
        assert_eq!((luts.len(), luts.luts[0][255]), (2, 1));
        assert_eq!(luts.find(u16::MAX), Some((16, 16)));
        assert_eq!(luts.find(u16::MAX >> 1), Some((15, 16)));
        let mut bytes = codebook(&lengths);
        assert_eq!(bytes.len(), 256 + 2 * 512);
        verify_codebook(&bytes).unwrap();
        bytes[256 + 512 + 9] ^= 1;
        assert!(read_codebook(&bytes).is_ok());
        assert!(matches!(verify_codebook(&bytes), Err(Error::Corrupt { offset: 777, .. })));
        assert!(read_codebook(&bytes[..256 + 512]).is_err());
        assert!(read_codebook(&bytes[..256]).is_err());
    }

    #[test]
    fn the_most_luts() {
        // 127 prefixes of 8 bits with two codes of 9 bits each, and two codes for the other 129
        // prefixes.
        let mut lengths = [9; 256];
        lengths[..2].copy_from_slice(&[1, 8]);
        let lengths = CodeLengths::from_bytes(&lengths).unwrap();
        assert_eq!(Luts::new(&lengths).len(), MAX_LUTS);
        verify_codebook(&codebook(&lengths)).unwrap();
    }
}
