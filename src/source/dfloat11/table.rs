//! The code of a block, from its LUTs.
//!
//! ```text
//! level 0   LUT 0, indexed by bits 0..8: an exponent (of 1..=8 bits), or 256 − r: go to LUT r
//! level 1   LUT r, indexed by bits 8..16: an exponent (of 9..=16 bits), or a pointer .. level 3
//! ```
//! Pointers are 240..=255 and so are some exponents. The code length of an exponent fixes its
//! level, so a value at another level is a pointer. If a LUT has no such pointer, the values that
//! could lead to it are ambiguous. This happens, for example, if 255 leads to LUT 1 and infinities
//! have a code of 8 bits or fewer. A stream that reaches such an entry is rejected.
//!
//! The package repeats the entry before in entries that no code reaches. Such entries may have any
//! value; a stream that reaches one is rejected. In one case, which the package does not write,
//! they matter: if they lead to a LUT from a lower level than codes do, the LUT counts as one of
//! that level, and streams whose codes lead there are rejected.

use crate::{Error, Result};

/// The remedy for a damaged checkpoint.
pub(super) const AGAIN: &str = "download the checkpoint again";

pub(super) const ENTRIES: usize = 256;
/// The longest code, in bits.
pub(super) const MAX_BITS: u8 = 32;
const LEVELS: u8 = 4;
/// The smallest pointer.
const FIRST_POINTER: u8 = 240;
/// One LUT, and the lengths.
const MIN_ROWS: usize = 2;
/// LUT 0, those that pointers can name, and the lengths.
pub(super) const MAX_ROWS: usize = 18;
/// Bits that index the table of short codes: 8 KiB.
const SHORT_BITS: u32 = 12;

/// `0` nothing, [`AMBIGUOUS`], `POINTER | LUT`, or `length << 8 | exponent`.
type LutEntry = u16;
const POINTER: LutEntry = 0x8000;
const AMBIGUOUS: LutEntry = 0x4000;

/// Look-up tables whose entries say what they are.
pub(super) struct LutTree {
    luts: Vec<[LutEntry; ENTRIES]>,
    /// Exponents with codes of up to [`SHORT_BITS`] bits, by the next bits of the stream; 0 for
    /// others.
    short: Vec<LutEntry>,
}

/// Why the bits of a stream are no code.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum InvalidCode {
    Unused,
    Ambiguous,
}

impl LutTree {
    /// Reads the rows of `luts`: LUTs, then code lengths.
    pub(super) fn new(place: &str, bytes: &[u8]) -> Result<Self> {
        let (rows, rest) = bytes.as_chunks::<ENTRIES>();
        if !rest.is_empty() || !(MIN_ROWS..=MAX_ROWS).contains(&rows.len()) {
            let problem = format!("must be {MIN_ROWS} to {MAX_ROWS} rows of 256 bytes");
            return Err(Error::corrupt(place, bytes.len() as u64, problem).remedied(AGAIN));
        }
        let (lengths, rows) = rows.split_last().expect("two rows or more");
        if let Some(at) = lengths.iter().position(|&length| length > MAX_BITS) {
            let at = (rows.len() * ENTRIES + at) as u64;
            return Err(Error::corrupt(place, at, "a code length exceeds 32 bits").remedied(AGAIN));
        }
        let levels = levels(rows, lengths);
        let entry = |row: usize, level: u8, value: u8| {
            let target = pointed(value).and_then(|target| Some((target, *levels.get(target)?)));
            match (is_exponent(lengths, level, value), target) {
                (true, Some((target, None))) if target > row => AMBIGUOUS,
                (true, _) => {
                    LutEntry::from(lengths[usize::from(value)]) << 8 | LutEntry::from(value)
                }
                (false, Some((target, Some(below)))) if below == level + 1 => {
                    POINTER | target as LutEntry
                }
                (false, _) => 0,
            }
        };
        let luts =
            rows.iter().zip(&levels).enumerate().map(|(row, (values, level))| match *level {
                Some(level) => values.map(|value| entry(row, level, value)),
                None => [0; ENTRIES],
            });
        let mut table = Self { luts: luts.collect(), short: Vec::new() };
        table.short = (0..1 << SHORT_BITS).map(|index| table.short_entry(index)).collect();
        Ok(table)
    }

    /// The code that streams beginning with these [`SHORT_BITS`] bits begin with, if it is no
    /// longer and the same whatever follows. Below a prefix that it shares with the package's end
    /// mark, which has no entries, remains of another code would answer for some of the streams.
    fn short_entry(&self, index: u32) -> LutEntry {
        let with = |next: u32| self.walk(index << (32 - SHORT_BITS) | next << 16);
        match with(0) {
            Ok((exponent, length))
                if u32::from(length) <= SHORT_BITS
                    && (1..1 << (16 - SHORT_BITS)).all(|next| with(next) == with(0)) =>
            {
                LutEntry::from(length) << 8 | LutEntry::from(exponent)
            }
            _ => 0,
        }
    }

    /// The exponent and the length of the code, 1..=32, at the start of a stream whose next 32 bits
    /// are `bits`.
    #[inline]
    pub(super) fn find(&self, bits: u32) -> Result<(u8, u8), InvalidCode> {
        match self.short[(bits >> (32 - SHORT_BITS)) as usize] {
            0 => self.walk(bits),
            entry => Ok((entry as u8, (entry >> 8) as u8)),
        }
    }

    fn walk(&self, bits: u32) -> Result<(u8, u8), InvalidCode> {
        let mut lut = 0;
        for byte in bits.to_be_bytes() {
            match self.luts[lut][usize::from(byte)] {
                0 => return Err(InvalidCode::Unused),
                AMBIGUOUS => return Err(InvalidCode::Ambiguous),
                pointer if pointer >= POINTER => lut = usize::from(pointer & !POINTER),
                entry => return Ok((entry as u8, (entry >> 8) as u8)),
            }
        }
        Err(InvalidCode::Unused)
    }
}

/// The level of each LUT that a pointer leads to. Pointers lead to later rows, since LUTs stand in
/// ascending order of their levels.
fn levels(rows: &[[u8; ENTRIES]], lengths: &[u8; ENTRIES]) -> Vec<Option<u8>> {
    let mut levels = vec![None; rows.len()];
    levels[0] = Some(0);
    for (row, values) in rows.iter().enumerate() {
        let Some(level) = levels[row].filter(|&level| level + 1 < LEVELS) else { continue };
        for &value in values.iter().filter(|&&value| !is_exponent(lengths, level, value)) {
            if let Some(target) =
                pointed(value).filter(|target| (row + 1..rows.len()).contains(target))
            {
                levels[target].get_or_insert(level + 1);
            }
        }
    }
    levels
}

/// The LUT that a value leads to, if it is a pointer.
fn pointed(value: u8) -> Option<usize> {
    (value >= FIRST_POINTER).then(|| ENTRIES - usize::from(value))
}

/// Whether the code of an exponent ends at this level.
fn is_exponent(lengths: &[u8; ENTRIES], level: u8, exponent: u8) -> bool {
    lengths[usize::from(exponent)].checked_sub(1).is_some_and(|bits| bits / 8 == level)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `0` → 120, `1000_0000 0` → 255, `1000_0000 1` → `rare`.
    fn rows(rare: u8, length: u8) -> Vec<u8> {
        let mut rows = [[120; ENTRIES], [255; ENTRIES], [0; ENTRIES]];
        rows[0][128..].fill(255);
        rows[1][128..].fill(rare);
        rows[2][120] = 1;
        rows[2][255] = 9;
        rows[2][usize::from(rare)] = length;
        rows.concat()
    }

    #[test]
    fn lengths_tell_exponents_from_pointers() {
        let table = LutTree::new("luts", &rows(254, 9)).unwrap();
        assert_eq!(table.find(0), Ok((120, 1)));
        assert_eq!(table.find(0x8000_0000), Ok((255, 9)));
        assert_eq!(table.find(0x8080_0000), Ok((254, 9)));
    }

    #[test]
    fn remains_of_other_codes_do_not_answer() {
        // 1000_0000 → LUT 1: 0 → 130 (9 bits), 1000 0000 → none (the end mark), 1000 0001 → 131 (16
        // bits).
        let mut rows = [[120; ENTRIES], [130; ENTRIES], [0; ENTRIES]];
        rows[0][128..].fill(255);
        rows[1][0x81..].fill(131);
        (rows[2][120], rows[2][130], rows[2][131]) = (1, 9, 16);
        let table = LutTree::new("luts", rows.as_flattened()).unwrap();
        assert_eq!(table.find(0x8070_0000), Ok((130, 9)));
        assert_eq!(table.find(0x8081_0000), Ok((131, 16)));
    }

    #[test]
    fn what_cannot_be_told_is_not_guessed() {
        let table = LutTree::new("luts", &rows(255, 3)).unwrap();
        assert_eq!(table.find(0), Ok((120, 1)));
        assert_eq!(
            table.find(0x8000_0000),
            Err(InvalidCode::Ambiguous),
            "LUT 1, or an exponent of 3 bits"
        );
    }

    #[test]
    fn circles_and_wrong_sizes() {
        let mut rows = [[255; ENTRIES], [255; ENTRIES], [0; ENTRIES]];
        rows[1][..].fill(254);
        assert_eq!(
            LutTree::new("luts", rows.as_flattened()).unwrap().find(0),
            Err(InvalidCode::Unused)
        );
        for length in [0, 255, 256, 511, 513] {
            assert!(matches!(LutTree::new("luts", &vec![0; length]), Err(Error::Corrupt { .. })));
        }
        rows[2][7] = 33;
        assert!(matches!(
            LutTree::new("luts", rows.as_flattened()),
            Err(Error::Corrupt { offset: 519, .. })
        ));
    }
}
