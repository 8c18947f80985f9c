//! The encoder's table: one look-up gives the bits of a pair.

use super::codebook::ESCAPE;
use super::{Codebook, PAIRS};

/// The bits of all pairs, 512 KiB of which a trained tensor touches some 10.
///
/// ```text
/// index   first exponent in the low byte, second in the high one, as they stand in memory
/// entry   bits 0..16    length, 1..=28; so the sum of a lane's 128 entries holds its length there
///         bits 16..44   the pair's code, or the escape's and above it the pair; first bits lowest
///         bit  56       NONE: there is neither; then the length is more than a unit has
/// ```
#[derive(Clone, Debug)]
pub(super) struct Table {
    entries: Box<[u64; PAIRS]>,
}

const NONE: u64 = 1 << 56;
/// More than any four pairs fit into one store.
const NONE_LENGTH: u64 = 64;

impl Table {
    pub(super) fn new(codebook: &Codebook) -> Self {
        let entries = match codebook.codes().find(|&(value, _)| value == ESCAPE) {
            None => vec![NONE | NONE_LENGTH; PAIRS],
            Some((_, escape)) => (0..u64::from(ESCAPE))
                .map(|pair| {
                    entry(
                        u64::from(escape.bits) | pair << escape.length,
                        escape.length + super::VALUE_BITS,
                    )
                })
                .collect(),
        };
        let mut entries: Box<[u64; PAIRS]> =
            entries.into_boxed_slice().try_into().expect("the slice has this length");
        for (value, code) in codebook.codes().filter(|&(value, _)| value != ESCAPE) {
            entries[value as usize] = entry(u64::from(code.bits), code.length);
        }
        Self { entries }
    }

    /// The entry of two neighbouring exponents.
    #[inline]
    pub(super) fn get(&self, pair: u16) -> u64 {
        self.entries[usize::from(pair)]
    }

    /// The entries of the four pairs of a unit.
    #[inline]
    pub(super) fn unit(&self, exponents: u64) -> [u64; 4] {
        [0, 16, 32, 48].map(|shift| self.get((exponents >> shift) as u16))
    }
}

impl From<Table> for Vec<u64> {
    fn from(table: Table) -> Self {
        table.entries.to_vec()
    }
}

fn entry(bits: u64, length: u8) -> u64 {
    bits << 16 | u64::from(length)
}

/// The number of bits of an entry, or of a sum of entries.
#[inline]
pub(super) const fn length(sum: u64) -> usize {
    (sum % (1 << 16)) as usize
}

/// Whether one of the entries of a sum has no code.
#[inline]
pub(super) const fn is_none(sum: u64) -> bool {
    sum >= NONE
}

/// The bits of an entry.
#[inline]
pub(super) const fn bits(entry: u64) -> u64 {
    entry >> 16
}
