//! Counting pairs of exponents.

use super::geometry::{PAIRS, UNIT};
use crate::constants::SYMBOLS;
use crate::{
    Error, Result, bf16,
    float::{Float, FloatSplit, with_float},
    huffman,
};

/// Neighbouring pairs count in different tables: a counter raised twice in a row waits for its own
/// store.
const TABLES: usize = 2;

/// How often each pair of exponents occurs, first weight in the low byte; 1 MiB.
#[derive(Clone, Debug)]
pub struct PairHistogram {
    tables: [Vec<u64>; TABLES],
    /// The last weight of a tensor with an odd number; its pair is counted too.
    odd: Option<u8>,
    /// The bits that some weight has, of another float than BF16.
    set_bits: u32,
}

/// A histogram of nothing. Its memory comes when it is touched.
impl Default for PairHistogram {
    fn default() -> Self {
        Self { tables: [vec![0; PAIRS], vec![0; PAIRS]], odd: None, set_bits: 0 }
    }
}

impl PairHistogram {
    /// The histogram with these counts, of pair 0 and on: what another device has counted.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless there are 65,536 of them.
    pub fn from_counts(counts: Vec<u64>) -> Result<Self> {
        if counts.len() == PAIRS {
            return Ok(Self { tables: [counts, vec![0; PAIRS]], ..Self::default() });
        }
        let problem = format!("{} counts of pairs of exponents", counts.len());
        Err(Error::parameter(problem, "pass 65,536 of them"))
    }

    /// Counts `n` more little-endian weights (`2n` bytes), consecutive ones from an even element
    /// on. An odd last weight, which only the end of a tensor may have, counts as a pair with
    /// itself.
    ///
    /// # Panics
    /// Where the length is odd.
    pub fn add(&mut self, weights: &[u8]) {
        assert!(weights.len().is_multiple_of(2), "weights are two bytes each");
        let [first, second] = &mut self.tables;
        let (groups, rest) = weights.as_chunks::<8>();
        for group in groups {
            let word = u64::from_le_bytes(*group) >> 7;
            let pair = |word: u64| (word as usize & 0xFF) | (word as usize >> 8 & 0xFF00);
            first[pair(word)] += 1;
            second[pair(word >> 32)] += 1;
        }
        let exponent = |bytes: [u8; 2]| bf16::exponent(u16::from_le_bytes(bytes));
        let (pair, odd) = rest.as_chunks::<4>();
        for &[a, b, c, d] in pair {
            first[usize::from(u16::from_le_bytes([exponent([a, b]), exponent([c, d])]))] += 1;
        }
        if let &[a, b] = odd {
            let odd = exponent([a, b]);
            first[usize::from(u16::from_le_bytes([odd; 2]))] += 1;
            self.odd = Some(odd);
        }
    }

    /// As [`add`](Self::add), of floats that are split in this way.
    ///
    /// # Panics
    /// As [`add`](Self::add), where bytes of a weight are missing.
    pub fn add_floats(&mut self, split: FloatSplit, weights: &[u8]) {
        assert!(weights.len().is_multiple_of(split.bytes()), "weights are whole");
        if split == FloatSplit::BF16 {
            return self.add(weights);
        }
        with_float!(split, F => self.add_units::<F>(weights));
    }

    fn add_units<F: Float>(&mut self, weights: &[u8]) {
        let mut units = weights.chunks_exact(UNIT * F::SPLIT.bytes());
        for unit in &mut units {
            self.add_unit::<F>(F::load(unit), UNIT);
        }
        let rest = units.remainder();
        self.add_unit::<F>(F::load(rest), rest.len() / F::SPLIT.bytes());
    }

    #[inline]
    fn add_unit<F: Float>(&mut self, weights: [u32; UNIT], count: usize) {
        self.set_bits |= weights.iter().fold(0, |bits, weight| bits | weight);
        let exponents = weights.map(|weight| F::SPLIT.exponent(weight));
        for (at, pair) in exponents.as_chunks::<2>().0[..count / 2].iter().enumerate() {
            self.tables[at % TABLES][usize::from(u16::from_le_bytes(*pair))] += 1;
        }
        if count % 2 == 1 {
            let odd = exponents[count - 1];
            self.tables[0][usize::from(u16::from_le_bytes([odd; 2]))] += 1;
            self.odd = Some(odd);
        }
    }

    /// The bits that some weight of [`add_floats`](Self::add_floats) has.
    pub(crate) fn set_bits(&self) -> u32 {
        self.set_bits
    }

    /// Adds the counts of another part of the tensor.
    pub fn merge(&mut self, other: &Self) {
        for (table, other) in self.tables.iter_mut().zip(&other.tables) {
            for (sum, count) in table.iter_mut().zip(other) {
                *sum += count;
            }
        }
        self.odd = self.odd.or(other.odd);
        self.set_bits |= other.set_bits;
    }

    /// How often a pair occurs.
    pub fn count(&self, pair: u16) -> u64 {
        self.tables.iter().map(|table| table[usize::from(pair)]).sum()
    }

    /// The pairs that occur, ascending, each with its count.
    pub fn used(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        (0..=u16::MAX).map(|pair| (pair, self.count(pair))).filter(|&(_, count)| count > 0)
    }

    /// The histogram of single exponents, for reports and entropies.
    pub fn exponents(&self) -> huffman::Histogram {
        let mut counts = [0; SYMBOLS];
        for (pair, count) in self.used() {
            pair.to_le_bytes().iter().for_each(|&exponent| counts[usize::from(exponent)] += count);
        }
        if let Some(odd) = self.odd {
            counts[usize::from(odd)] -= 1;
        }
        counts.into()
    }
}
