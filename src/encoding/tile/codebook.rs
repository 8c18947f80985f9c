//! The code over pairs of exponents: which pairs have codes, and how long these are.
//!
//! ```text
//! bytes 0..2    length of the escape, 0 where there is none
//! bytes 2..26   numbers of pairs with codes of 1, 2, .., 12 bits
//! bytes 26..    these pairs, u16 each, by length and then by value
//! ```

use super::table::Table;
use super::{MAX_CODE_BITS, PAIRS, PairHistogram, VALUE_BITS, choice};
use crate::huffman::{Code, assign};
use crate::{Error, Result};

const COUNTS: usize = MAX_CODE_BITS as usize;
/// Bytes of an escape's length, a number or a value.
pub(super) const VALUE_BYTES: usize = 2;
/// Bytes before the values.
pub(super) const HEAD_BYTES: usize = VALUE_BYTES * (1 + COUNTS);
/// Where escape and pair stand in the order of codes of one length: pairs by their value, then the
/// escape.
pub(super) type Value = u32;
/// The escape's value.
pub(super) const ESCAPE: Value = 1 << VALUE_BITS;

/// A code over pairs of exponents.
///
/// Always a usable code of at most 12 bits: it fills the code space exactly (Kraft's sum is 1), or
/// has a single pair, or the escape alone, of one bit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codebook {
    /// 0 where there is no escape.
    escape: u8,
    /// The pairs that have codes, ascending by length and then by value.
    pairs: Vec<u16>,
    /// Where the pairs with codes of 1, 2, .. bits end.
    ends: [usize; COUNTS],
}

impl Codebook {
    /// A code that gives these weights few bits, the codebook's own among them, and few escapes: of
    /// those that a search over the number of pairs with codes tries. A function of the counts
    /// alone; costs less than a millisecond on trained weights, at most some.
    ///
    /// # Errors
    /// [`Error::Parameter`] where the histogram is empty.
    pub fn from_histogram(histogram: &PairHistogram) -> Result<Self> {
        let (escape, mut pairs) = choice::choose(histogram).ok_or_else(|| {
            Error::parameter("a tensor without elements has no code", "store it raw")
        })?;
        pairs.sort_unstable_by_key(|&(pair, length)| (length, pair));
        let end = |bits: usize| pairs.partition_point(|&(_, length)| usize::from(length) <= bits);
        let ends = std::array::from_fn(|at| end(at + 1));
        Ok(Self { escape, pairs: pairs.into_iter().map(|(pair, _)| pair).collect(), ends })
    }

    /// Reads and checks a codebook array.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the byte at fault.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = |value: usize, problem: &str| {
            Error::corrupt("codebook", (value * VALUE_BYTES) as u64, problem)
        };
        let (words, rest) = bytes.as_chunks::<VALUE_BYTES>();
        let Some((&[escape, counts @ ..], values)) = words.split_first_chunk::<{ 1 + COUNTS }>()
        else {
            return Err(corrupt(words.len(), "must begin with 13 numbers"));
        };
        let number = |word: [u8; 2]| usize::from(u16::from_le_bytes(word));
        let mut sum = 0;
        let ends = counts.map(|count| {
            sum += number(count);
            sum
        });
        if values.len() != sum || !rest.is_empty() {
            return Err(corrupt(words.len(), "must have as many values as its numbers add up to"));
        }
        let escape = number(escape);
        if escape > COUNTS {
            return Err(corrupt(0, "the escape has at most 12 bits"));
        }
        let book = Self {
            escape: escape as u8,
            pairs: values.iter().map(|&word| u16::from_le_bytes(word)).collect(),
            ends,
        };
        let space = 1usize << COUNTS;
        let kraft: usize = book.lengths().map(|(_, length)| space >> length).sum();
        let is_single = book.lengths().map(|(_, length)| length).eq([1]);
        if kraft != space && !is_single {
            return Err(corrupt(0, "the codes do not fill the code space exactly"));
        }
        let mut seen = vec![false; PAIRS];
        let mut start = 0;
        for end in ends {
            if let Some(at) = book.pairs[start..end].windows(2).position(|pair| pair[0] >= pair[1])
            {
                return Err(corrupt(
                    1 + COUNTS + start + at + 1,
                    "values must ascend within a length",
                ));
            }
            start = end;
        }
        for (at, &pair) in book.pairs.iter().enumerate() {
            if std::mem::replace(&mut seen[usize::from(pair)], true) {
                return Err(corrupt(1 + COUNTS + at, "a value occurs twice"));
            }
        }
        Ok(book)
    }

    /// The codebook array.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + VALUE_BYTES * self.pairs.len());
        bytes.extend(u16::from(self.escape).to_le_bytes());
        let mut start = 0;
        for end in self.ends {
            bytes.extend(((end - start) as u16).to_le_bytes());
            start = end;
        }
        bytes.extend(self.pairs.iter().flat_map(|pair| pair.to_le_bytes()));
        bytes
    }

    /// What each pair is written as, from pair 0 on: the number of its bits in the low 16 bits, and
    /// these bits above, the first one lowest. Pairs that cannot be written have 64 bits.
    pub fn entries(&self) -> Vec<u64> {
        Table::new(self).into()
    }

    /// Whether a pair has a code.
    pub(super) fn contains(&self, pair: u16) -> bool {
        let mut start = 0;
        self.ends.iter().any(|&end| {
            let values = &self.pairs[start..end];
            start = end;
            values.binary_search(&pair).is_ok()
        })
    }

    /// Pairs and escape with their lengths, in the order of their codes.
    fn lengths(&self) -> impl Iterator<Item = (Value, u8)> + '_ {
        (1..=MAX_CODE_BITS).flat_map(move |length| {
            let at = usize::from(length) - 1;
            let start = if at == 0 { 0 } else { self.ends[at - 1] };
            let pairs = self.pairs[start..self.ends[at]].iter().map(|&pair| Value::from(pair));
            pairs.chain((self.escape == length).then_some(ESCAPE)).map(move |value| (value, length))
        })
    }

    /// Pairs and escape with their codes, as RFC 1951 section 3.2.2 assigns them.
    pub(super) fn codes(&self) -> impl Iterator<Item = (Value, Code)> + '_ {
        assign(self.lengths())
    }

    /// The bits that the codes of these weights take, those of escaped pairs with their values;
    /// `None` where a pair occurs that has no code, and there is no escape.
    pub fn expected_bits(&self, histogram: &PairHistogram) -> Option<u64> {
        let escaped = if self.escape == 0 { 0 } else { self.escape + VALUE_BITS };
        let mut lengths = vec![escaped; PAIRS];
        for (value, length) in self.lengths().filter(|&(value, _)| value != ESCAPE) {
            lengths[value as usize] = length;
        }
        histogram.used().try_fold(0u64, |bits, (pair, count)| {
            let length = lengths[usize::from(pair)];
            (length > 0).then(|| bits + count * u64::from(length))
        })
    }
}
