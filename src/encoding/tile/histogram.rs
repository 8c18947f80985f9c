//! Counting pairs of exponents.

use super::geometry::PAIRS;
use crate::constants::SYMBOLS;
use crate::{Error, Result, bf16, huffman};

/// Neighbouring pairs count in different tables: a counter raised twice in a row waits for its own
/// store.
const TABLES: usize = 2;

/// How often each pair of exponents occurs, first weight in the low byte; 1 MiB.
#[derive(Clone, Debug)]
pub struct PairHistogram {
    tables: [Vec<u64>; TABLES],
    /// The last weight of a tensor with an odd number; its pair is counted too.
    odd: Option<u8>,
}

/// A histogram of nothing. Its memory comes when it is touched.
impl Default for PairHistogram {
    fn default() -> Self {
        Self { tables: [vec![0; PAIRS], vec![0; PAIRS]], odd: None }
    }
}

impl PairHistogram {
    /// The histogram with these counts, of pair 0 and on: what another device has counted.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless there are 65,536 of them.
    pub fn from_counts(counts: Vec<u64>) -> Result<Self> {
        if counts.len() == PAIRS {
            return Ok(Self { tables: [counts, vec![0; PAIRS]], odd: None });
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

    /// Adds the counts of another part of the tensor.
    pub fn merge(&mut self, other: &Self) {
        for (table, other) in self.tables.iter_mut().zip(&other.tables) {
            for (sum, count) in table.iter_mut().zip(other) {
                *sum += count;
            }
        }
        self.odd = self.odd.or(other.odd);
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
