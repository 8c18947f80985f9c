//! Counts pairs of exponents.

use super::geometry::{PAIRS, UNIT};
use crate::constants::SYMBOLS;
use crate::{
    Error, Result,
    float::{Float, FloatSplit, load, with_float},
    huffman,
};

/// Neighbouring pairs count in different tables: a counter raised twice in a row waits for its own
/// store.
const TABLES: usize = 2;

/// How often each pair of exponents occurs, first weight in the low byte; 1 MiB.
#[derive(Clone, Debug)]
pub struct PairHistogram {
    tables: [Vec<u64>; TABLES],
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
        Self { tables, seen: 0, odd: None, set_bits: 0 }
    }
}

impl PairHistogram {
    /// The histogram with these counts, of pair 0 and on: what another device has counted.
    ///
    /// # Errors
    /// [`Error::Parameter`] unless there are 65,536 of them.
    pub fn from_counts(counts: Vec<u64>) -> Result<Self> {
        if counts.len() == PAIRS {
            let tables = [counts, vec![0; PAIRS]];
            return Ok(Self { tables, seen: u8::MAX, ..Self::default() });
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
        with_float!(split, F => self.add_units::<F>(weights));
    }

    fn add_units<F: Float>(&mut self, weights: &[u8]) {
        let [first, second] =
            self.tables.each_mut().map(|table| table.first_chunk_mut().expect("as many pairs"));
        let tables: [&mut [u64; PAIRS]; TABLES] = [first, second];
        let (each, mut set, mut seen) = (F::SPLIT.bytes(), 0, 0);
        let mut units = weights.chunks_exact(UNIT * each);
        for unit in &mut units {
            for (at, word) in unit.as_chunks().0.iter().enumerate() {
                let word = u64::from_le_bytes(*word);
                let pairs = F::pairs(word);
                (set, seen) = (set | word, seen | pairs);
                for pair in 0..4 / each {
                    let place = usize::from((pairs >> (16 * each * pair)) as u16);
                    tables[(4 / each * at + pair) % TABLES][place] += 1;
                }
            }
        }
        let rest = units.remainder();
        let (mut exponents, count) = ([0; UNIT], rest.len() / each);
        F::exponents(rest, &mut exponents[..count]);
        if count % 2 == 1 {
            self.odd = Some(exponents[count - 1]);
            exponents[count] = exponents[count - 1];
        }
        for pair in &exponents.as_chunks().0[..count.div_ceil(2)] {
            tables[0][usize::from(u16::from_le_bytes(*pair))] += 1;
        }
        seen |= u64::from_le_bytes(exponents);
        self.seen = seen.to_le_bytes().iter().fold(self.seen, |all, one| all | one);
        set = rest.chunks(8).fold(set, |set, word| set | load(word, 0));
        self.set_bits |= F::any_of(set);
    }

    /// The bits that some weight has.
    pub(crate) fn set_bits(&self) -> u32 {
        self.set_bits
    }

    /// Adds the counts of another part of the tensor.
    pub fn merge(&mut self, other: &Self) {
        for (pair, count) in other.used() {
            self.tables[0][usize::from(pair)] += count;
        }
        self.seen |= other.seen;
        self.odd = self.odd.or(other.odd);
        self.set_bits |= other.set_bits;
    }

    /// How often a pair occurs.
    pub fn count(&self, pair: u16) -> u64 {
        self.tables.iter().map(|table| table[usize::from(pair)]).sum()
    }

    /// The pairs that occur, ascending, each with its count.
    pub fn used(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        let seconds = (0..=self.seen).map(|second| u16::from(second) << 8);
        let pairs =
            seconds.flat_map(|second| (0..=self.seen).map(move |first| second | u16::from(first)));
        pairs.map(|pair| (pair, self.count(pair))).filter(|&(_, count)| count > 0)
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
