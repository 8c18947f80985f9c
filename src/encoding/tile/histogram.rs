//! Counts pairs of exponents.

use super::geometry::PAIRS;
use crate::constants::SYMBOLS;
use crate::{
    Error, Result,
    float::{Float, FloatSplit, load, with_float},
    huffman,
};

/// Neighbouring pairs count in different tables: a counter raised twice in a row waits for its own
/// store.
const TABLES: usize = 2;
/// Weights whose exponents are taken in one go, by vector instructions; an even number.
const BLOCK: usize = 1024;
/// Weights that are counted before the counters of 32 bits are emptied.
const MAX_COUNTED: usize = 1 << 30;

/// How often each pair of exponents occurs, first weight in the low byte; half a MiB.
#[derive(Clone, Debug)]
pub struct PairHistogram {
    /// Counters of 32 bits: those of the common pairs stay in the first-level cache.
    tables: [Vec<u32>; TABLES],
    /// Weights that the tables have counted, or some more.
    counted: usize,
    /// Counts from before and of others; empty if there are none.
    sums: Vec<u64>,
    /// The bits that some exponent has. Counters of higher exponents are not touched.
    seen: u8,
    /// The last weight of a tensor with an odd number; its pair is counted too.
    odd: Option<u8>,
    /// The bits that some weight has.
    set_bits: u32,
}

/// A histogram of nothing. Its memory comes when it is touched.
impl Default for PairHistogram {
    fn default() -> Self {
        let tables = [vec![0; PAIRS], vec![0; PAIRS]];
        Self { tables, counted: 0, sums: Vec::new(), seen: 0, odd: None, set_bits: 0 }
    }
}

impl PairHistogram {
    /// The histogram with these counts, of pair 0 and on: what another device has counted.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless there are 65,536 of them.
    pub fn from_counts(counts: Vec<u64>) -> Result<Self> {
        if counts.len() == PAIRS {
            return Ok(Self { sums: counts, seen: u8::MAX, ..Self::default() });
        }
        let problem = format!("{} counts of pairs of exponents", counts.len());
        Err(Error::parameter(problem, "pass 65,536 of them"))
    }

    /// Counts `n` more little-endian BF16 weights (`2n` bytes), consecutive ones from an even
    /// element on. An odd last weight, which only the end of a tensor may have, counts as a pair
    /// with itself.
    ///
    /// # Panics
    /// If the length is odd.
    pub fn add(&mut self, weights: &[u8]) {
        self.add_floats(FloatSplit::BF16, weights);
    }

    /// As [`add`](Self::add), of floats that are split in this way.
    ///
    /// # Panics
    /// As [`add`](Self::add), where bytes of a weight are missing.
    pub fn add_floats(&mut self, split: FloatSplit, weights: &[u8]) {
        assert!(weights.len().is_multiple_of(split.bytes()), "weights are whole");
        with_float!(split, F => weights.chunks(BLOCK * F::SPLIT.bytes()).for_each(|block| {
            if self.counted + BLOCK > MAX_COUNTED {
                self.empty();
            }
            self.counted += BLOCK;
            self.add_block::<F>(block);
        }));
    }

    fn add_block<F: Float>(&mut self, block: &[u8]) {
        let [evens, odds] = self.tables.each_mut().map(|table| {
            let table: &mut [u32; PAIRS] = table.first_chunk_mut().expect("as many pairs");
            table
        });
        let mut exponents = [0; BLOCK + 1];
        let count = block.len() / F::SPLIT.bytes();
        F::exponents(block, &mut exponents[..count]);
        if count % 2 == 1 {
            self.odd = Some(exponents[count - 1]);
            exponents[count] = exponents[count - 1];
        }
        let (twos, one) = exponents[..count.next_multiple_of(2)].as_chunks::<2>().0.as_chunks();
        for [first, second] in twos {
            evens[usize::from(u16::from_le_bytes(*first))] += 1;
            odds[usize::from(u16::from_le_bytes(*second))] += 1;
        }
        for pair in one {
            evens[usize::from(u16::from_le_bytes(*pair))] += 1;
        }
        self.seen = exponents[..count].iter().fold(self.seen, |all, one| all | one);
        let (words, rest) = block.as_chunks();
        let set = words.iter().fold(load(rest, 0), |set, word| set | u64::from_le_bytes(*word));
        self.set_bits |= F::any_of(set);
    }

    /// Moves all counts to where they have 64 bits.
    fn empty(&mut self) {
        self.sums = (0..=u16::MAX).map(|pair| self.count(pair)).collect();
        self.tables.iter_mut().for_each(|table| table.fill(0));
        self.counted = 0;
    }

    /// The bits that some weight has.
    pub(crate) fn set_bits(&self) -> u32 {
        self.set_bits
    }

    /// Adds the counts of another part of the tensor.
    pub fn merge(&mut self, other: &Self) {
        self.sums.resize(PAIRS, 0);
        for (pair, count) in other.used() {
            self.sums[usize::from(pair)] += count;
        }
        self.seen |= other.seen;
        self.odd = self.odd.or(other.odd);
        self.set_bits |= other.set_bits;
    }

    /// How often a pair occurs.
    pub fn count(&self, pair: u16) -> u64 {
        let pair = usize::from(pair);
        let counted = self.tables.iter().map(|table| u64::from(table[pair]));
        counted.sum::<u64>() + self.sums.get(pair).copied().unwrap_or(0)
    }

    /// The pairs that occur, ascending, each with its count.
    pub fn used(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        let rows = (0..=self.seen).filter(|&second| self.has_second(second)).map(u16::from);
        let pairs = rows
            .flat_map(|second| (0..=self.seen).map(move |first| second << 8 | u16::from(first)));
        pairs.map(|pair| (pair, self.count(pair))).filter(|&(_, count)| count > 0)
    }

    /// Whether a pair with this second exponent occurs; most do not, and are seen by vectors.
    fn has_second(&self, second: u8) -> bool {
        let start = usize::from(second) * SYMBOLS;
        let row = start..start + SYMBOLS;
        let any = |table: &Vec<u32>| table[row.clone()].iter().fold(0, |all, one| all | one) > 0;
        self.tables.iter().any(any)
            || self.sums.get(row).is_some_and(|row| row.iter().any(|&count| count > 0))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outlast_the_tables() {
        let weights: Vec<u8> =
            (0..9999u16).flat_map(|at| at.wrapping_mul(at).to_le_bytes()).collect();
        let mut histogram = PairHistogram::default();
        histogram.add(&weights);
        let once: Vec<(u16, u64)> = histogram.used().collect();
        histogram.counted = MAX_COUNTED;
        histogram.add(&weights);
        let twice: Vec<(u16, u64)> = once.iter().map(|&(pair, count)| (pair, 2 * count)).collect();
        assert_eq!(histogram.used().collect::<Vec<_>>(), twice);
        assert!(histogram.counted < MAX_COUNTED && histogram.sums.len() == PAIRS);
    }
}
