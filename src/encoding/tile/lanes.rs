//! Decoding lanes: one look-up a pair, several lanes in turns.
//!
//! A look-up waits for the one before it, so the lanes of a tile take turns. Measured on one Zen 5 core (virtual,
//! shared), GB of BF16 a second of verification, N(0, 0.02²); chosen: 7.0.
//!
//! | rejected | GB/s |
//! |---|---|
//! | 4 lanes | 5.4 |
//! | 8 lanes, all look-ups of a lane before those of the next | 5.3 |
//! | lengths summed, entries joined to find others | 5.6 |
//! | every lane's unit decoded again where one met an escape | 6.4 |
//!
//! ```text
//! entry of the table, indexed by the next 12 bits
//!   bits 0..8    length of the code, 1..=12; 0 with OTHER
//!   bit  15      OTHER: the code of the escape, or none
//!   bits 16..32  the pair
//! ```

use super::codebook::ESCAPE;
use super::{Codebook, MAX_CODE_BITS, MAX_LANE_BITS, UNIT, VALUE_BITS};
use crate::huffman::Code;
use crate::huffman::bits::{PEEK_BITS, peek};

const ENTRIES: usize = 1 << MAX_CODE_BITS;
const OTHER: u32 = 1 << 15;
/// Pairs of a unit, which one load of bits serves.
const UNIT_PAIRS: usize = UNIT / 2;
const _: () = assert!(UNIT_PAIRS * MAX_CODE_BITS as usize <= PEEK_BITS);
/// Set above the bits that are looked up; the zeros above it then tell how many were consumed.
const MARK: u64 = 1 << 63;
const _: () = assert!(UNIT_PAIRS * (MAX_CODE_BITS as usize) < 63);
/// Bytes that must follow the start of any lane: those of the longest, and a load.
pub(super) const READ_BYTES: usize = MAX_LANE_BITS / 8 + 8;

/// The decoder's table of a code, 16 KiB.
#[derive(Clone, Debug)]
pub(super) struct Lookup {
    entries: Box<[u32; ENTRIES]>,
    /// The code of the escape.
    escape: Option<Code>,
    codebook: Codebook,
}

/// A stretch of bits has no code at a bit, or an escaped pair that has a code.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoCode {
    /// The bit, from the start of the stream.
    pub(super) bit: usize,
    pub(super) problem: &'static str,
}

impl Lookup {
    pub(super) fn new(codebook: &Codebook) -> Self {
        let mut entries = Box::new([OTHER; ENTRIES]);
        let mut escape = None;
        for (value, code) in codebook.codes() {
            if value == ESCAPE {
                escape = Some(code);
                continue;
            }
            let entry = value << 16 | u32::from(code.length);
            entries
                .iter_mut()
                .skip(usize::from(code.bits))
                .step_by(1 << code.length)
                .for_each(|slot| *slot = entry);
        }
        Self { entries, escape, codebook: codebook.clone() }
    }

    /// The entry for a stream whose next bits are `bits`.
    #[inline]
    fn get(&self, bits: u64) -> u32 {
        self.entries[bits as usize % ENTRIES]
    }

    /// Decodes a pair and moves behind it. With `VERIFY`, one that is escaped must have no code.
    fn pair<const VERIFY: bool>(&self, stream: &[u8], bit: &mut usize) -> Result<u16, NoCode> {
        let bits = peek(stream, *bit);
        let entry = self.get(bits);
        if entry & OTHER == 0 {
            *bit += (entry % 256) as usize;
            return Ok((entry >> 16) as u16);
        }
        let no_code = |problem| NoCode { bit: *bit, problem };
        // Other entries are all the escape's, but in a code of a single pair.
        let escape = self.escape.filter(|escape| bits % (1 << escape.length) == u64::from(escape.bits));
        let escape = escape.ok_or(no_code("there is no such code"))?;
        let pair = (bits >> escape.length) as u16;
        if VERIFY && self.codebook.contains(pair) {
            return Err(no_code("an escaped pair has a code"));
        }
        *bit += usize::from(escape.length + VALUE_BITS);
        Ok(pair)
    }

    #[inline(never)]
    fn unit<const VERIFY: bool>(&self, stream: &[u8], bit: &mut usize) -> Result<[u8; UNIT], NoCode> {
        let mut unit = [0; UNIT];
        for pair in unit.as_chunks_mut::<2>().0 {
            *pair = self.pair::<VERIFY>(stream, bit)?.to_le_bytes();
        }
        Ok(unit)
    }

    /// Decodes `pairs` pairs of one lane from a bit on, as many as its units hold; the bit behind them.
    pub(super) fn lane<const VERIFY: bool>(
        &self,
        stream: &[u8],
        bit: usize,
        pairs: usize,
        units: &mut [[[u8; UNIT]; 1]],
    ) -> Result<usize, NoCode> {
        let (whole, rest) = units.split_at_mut(pairs / UNIT_PAIRS);
        let [mut bit] = self.lanes::<1, VERIFY>(stream, [bit], whole)?;
        for pair in rest
            .as_flattened_mut()
            .as_flattened_mut()
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .take(pairs % UNIT_PAIRS)
        {
            *pair = self.pair::<VERIFY>(stream, &mut bit)?.to_le_bytes();
        }
        Ok(bit)
    }

    /// Decodes units of some lanes, each from its bit on; the bits behind them.
    ///
    /// The stream has [`READ_BYTES`] more behind the start of each.
    pub(super) fn lanes<const N: usize, const VERIFY: bool>(
        &self,
        stream: &[u8],
        mut bits: [usize; N],
        units: &mut [[[u8; UNIT]; N]],
    ) -> Result<[usize; N], NoCode> {
        for units in units {
            let mut words = bits.map(|bit| peek(stream, bit) | MARK);
            let mut others = 0;
            for turn in 0..UNIT_PAIRS {
                for (word, unit) in words.iter_mut().zip(&mut *units) {
                    let entry = self.get(*word);
                    *word >>= entry % 64;
                    // An entry that consumes nothing repeats itself.
                    if turn == UNIT_PAIRS - 1 {
                        others |= entry;
                    }
                    unit[2 * turn..2 * turn + 2].copy_from_slice(&((entry >> 16) as u16).to_le_bytes());
                }
            }
            if others & OTHER == 0 {
                for (bit, word) in bits.iter_mut().zip(words) {
                    *bit += word.leading_zeros() as usize;
                }
                continue;
            }
            for ((bit, unit), word) in bits.iter_mut().zip(units).zip(words) {
                // Of the lanes that met no such entry, one that will with its next pair is decoded again too.
                if self.get(word) & OTHER == 0 {
                    *bit += word.leading_zeros() as usize;
                } else {
                    *unit = self.unit::<VERIFY>(stream, bit)?;
                }
            }
        }
        Ok(bits)
    }
}
