//! The code for pairs of exponents: which pairs have codes, the lengths of the codes, and the
//! encoder's table of them.
//!
//! ```text
//! bytes 0..2    length of the escape, 0 if there is none
//! bytes 2..26   numbers of pairs with codes of 1, 2, .., 12 bits
//! bytes 26..    these pairs, u16 each, by length and then by value
//! ```

use super::{
    geometry::{MAX_CODE_BITS, PAIRS, UNIT, VALUE_BITS},
    histogram::PairHistogram,
};
use crate::{
    Error, Result,
    huffman::{Code, assign, is_complete, least_bits, package_merge},
};

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
    /// 0 if there is no escape.
    escape: u8,
    /// The pairs that have codes, ascending by length and then by value.
    pairs: Vec<u16>,
    /// Where the pairs with codes of up to 0, 1, 2, .. bits end.
    ends: [usize; COUNTS + 1],
}

impl Codebook {
    /// A code that gives these weights few bits, the codebook's own among them, and few escapes: of
    /// those that a search over the number of pairs with codes tries. A function of the counts
    /// alone; costs less than a millisecond on trained weights, at most some.
    ///
    /// # Errors
    /// [`Error::Parameter`] where the histogram is empty.
    pub fn from_histogram(histogram: &PairHistogram) -> Result<Self> {
        let (escape, mut pairs) = choose(histogram).ok_or_else(|| {
            Error::parameter("a tensor without elements has no code", "store it raw")
        })?;
        pairs.sort_unstable_by_key(|&(pair, length)| (length, pair));
        let end = |bits: usize| pairs.partition_point(|&(_, length)| usize::from(length) <= bits);
        let ends = std::array::from_fn(end);
        Ok(Self { escape, pairs: pairs.into_iter().map(|(pair, _)| pair).collect(), ends })
    }

    /// Reads and checks a codebook array.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the byte at fault.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = |value: usize, problem: &str| {
            Err(Error::corrupt("codebook", (value * VALUE_BYTES) as u64, problem))
        };
        let (words, rest) = bytes.as_chunks::<VALUE_BYTES>();
        let words: Vec<u16> = words.iter().map(|&word| u16::from_le_bytes(word)).collect();
        let Some((&[escape, counts @ ..], pairs)) = words.split_first_chunk::<{ 1 + COUNTS }>()
        else {
            return corrupt(words.len(), "must begin with 13 numbers");
        };
        let mut ends = [0; COUNTS + 1];
        for (at, count) in counts.into_iter().enumerate() {
            ends[at + 1] = ends[at] + usize::from(count);
        }
        if pairs.len() != ends[COUNTS] || !rest.is_empty() {
            return corrupt(words.len(), "must have as many values as its numbers add up to");
        }
        if usize::from(escape) > COUNTS {
            return corrupt(0, "the escape has at most 12 bits");
        }
        let book = Self { escape: escape as u8, pairs: pairs.to_vec(), ends };
        if !is_complete(book.lengths().map(|(_, length)| length)) {
            return corrupt(0, "the codes do not fill the code space exactly");
        }
        let descends = |at: &usize| !ends.contains(at) && pairs[at - 1] >= pairs[*at];
        if let Some(at) = (1..pairs.len()).find(descends) {
            return corrupt(1 + COUNTS + at, "values must ascend within a length");
        }
        let mut seen = vec![false; PAIRS];
        let mut values = pairs.iter();
        match values.position(|&pair| std::mem::replace(&mut seen[usize::from(pair)], true)) {
            Some(at) => corrupt(1 + COUNTS + at, "a value occurs twice"),
            None => Ok(book),
        }
    }

    /// The codebook array.
    pub fn to_bytes(&self) -> Vec<u8> {
        let counts = self.groups().map(|(_, pairs)| pairs.len() as u16);
        let head = std::iter::once(u16::from(self.escape)).chain(counts);
        head.chain(self.pairs.iter().copied()).flat_map(u16::to_le_bytes).collect()
    }

    /// Codes of all pairs, from pair 0 on: the number of a pair's bits in the low 16 bits, and
    /// these bits above, the first one lowest. Pairs that cannot be written have 64 bits.
    pub fn entries(&self) -> Vec<u64> {
        let number = |entry: &Entry| u64::from(entry.bits) << 16 | u64::from(entry.length.min(64));
        Table::new(self).entries.iter().map(number).collect()
    }

    /// Whether a pair has a code.
    pub(super) fn contains(&self, pair: u16) -> bool {
        self.groups().any(|(_, pairs)| pairs.binary_search(&pair).is_ok())
    }

    /// The pairs with codes of each length, ascending.
    fn groups(&self) -> impl Iterator<Item = (u8, &[u16])> + Clone {
        let groups = (1..=MAX_CODE_BITS).zip(self.ends.windows(2));
        groups.map(|(length, ends)| (length, &self.pairs[ends[0]..ends[1]]))
    }

    /// Pairs and escape with their lengths, in the order of their codes.
    fn lengths(&self) -> impl Iterator<Item = (Value, u8)> + Clone {
        self.groups().flat_map(|(length, pairs)| {
            let pairs = pairs.iter().map(|&pair| Value::from(pair));
            pairs.chain((self.escape == length).then_some(ESCAPE)).map(move |value| (value, length))
        })
    }

    /// Pairs and escape with their codes, as RFC 1951 section 3.2.2 assigns them.
    pub(super) fn codes(&self) -> impl Iterator<Item = (Value, Code)> {
        assign(self.lengths())
    }

    /// The bits that the codes of these weights take, those of escaped pairs with their values;
    /// `None` if a pair occurs that has no code, and there is no escape.
    pub fn expected_bits(&self, histogram: &PairHistogram) -> Option<u64> {
        let all: u64 = histogram.used().map(|(_, count)| count).sum();
        let (mut bits, mut escaped) = (0, all);
        for (length, pairs) in self.groups() {
            let count: u64 = pairs.iter().map(|&pair| histogram.count(pair)).sum();
            bits += count * u64::from(length);
            escaped -= count;
        }
        bits += escaped * u64::from(self.escape + VALUE_BITS);
        (escaped == 0 || self.escape > 0).then_some(bits)
    }
}

/// Codes of the longest length fill the code space.
const MAX_SYMBOLS: usize = 1 << MAX_CODE_BITS;
/// A pair this many times rarer than a code of the longest length suits is escaped in any case.
const RAREST: u64 = 64;
/// Bits that an escape counts as more than it takes. The products' kernels decode one by a branch
/// that the whole warp takes, and are 2 to 3 % faster with codes chosen so.
const ESCAPE_COST: u64 = 20;
/// For fewer escapes a tensor's bits may grow by one in this many.
const EXCESS_SHARE: u64 = 256;
/// Times that the bracket is halved.
const HALVINGS: usize = 4;

/// Lengths of the escape, 0 if there is none, and of the pairs that have codes.
type ChosenLengths = (u8, Vec<(u16, u8)>);

/// Which pairs have codes: the choice with the least cost; `None` if nothing was counted.
///
/// A rare pair costs less as an escape and 16 bits than as a code of 12 bits, which takes space
/// from all others, and 16 bits of codebook. With `k` codes the commonest `k` pairs have them, the
/// lower of two equally common ones first; then package-merge finds the best lengths, with all
/// other pairs as one symbol. The bits fall and then rise with `k`, up to noise; so `k` is
/// bracketed by halves and quarters of the rarest pair's count, and the bracket halved. An escape
/// counts as more bits than it takes, since it costs a kernel time.
fn choose(histogram: &PairHistogram) -> Option<ChosenLengths> {
    let mut pairs: Vec<(u16, u64)> = histogram.used().collect();
    // Ascending counts, as package-merge wants them; the first pairs are escaped.
    // One number is compared without a branch.
    pairs.sort_unstable_by_key(|&(pair, count)| u128::from(count) << 16 | u128::from(!pair));
    let total: u64 = pairs.iter().map(|&(_, count)| count).sum();
    if pairs.is_empty() {
        return None;
    }
    let share = total >> MAX_CODE_BITS;
    let least = |threshold: u64| pairs.partition_point(|&(_, count)| count < threshold);
    let mut candidates = vec![0, pairs.len()];
    candidates.extend(
        (0..).map(|at| (4 * share) >> at).take_while(|&least| least > share / RAREST).map(least),
    );
    // Small tensors: a value costs 16 bits of codebook, whatever its share.
    candidates.extend([2, 3].map(least));
    candidates.retain(|&escaped| pairs.len() - escaped + usize::from(escaped > 0) <= MAX_SYMBOLS);
    candidates.push(pairs.len().saturating_sub(MAX_SYMBOLS - 1).min(pairs.len()));
    candidates.sort_unstable();
    candidates.dedup();
    let mut tried: Vec<Tried> =
        candidates.into_iter().map(|escaped| Tried::new(&pairs, escaped)).collect();
    for _ in 0..HALVINGS {
        let at = best(&tried);
        let sides = [at.checked_sub(1), Some(at + 1)].into_iter().flatten();
        let middle = |side: &Tried| usize::midpoint(side.escaped, tried[at].escaped);
        let middles: Vec<usize> = sides.filter_map(|side| tried.get(side)).map(middle).collect();
        for escaped in middles {
            if let Err(place) = tried.binary_search_by_key(&escaped, |one| one.escaped) {
                tried.insert(place, Tried::new(&pairs, escaped));
            }
        }
    }
    Some(lengths(&pairs, tried[best(&tried)].escaped))
}

/// The size and cost of a code in which this many pairs are escaped.
struct Tried {
    escaped: usize,
    /// Bits of all pairs and of the codebook's values.
    bits: u64,
    /// `bits`, and [`ESCAPE_COST`] for each pair that is escaped.
    cost: u64,
}

impl Tried {
    fn new(pairs: &[(u16, u64)], escaped: usize) -> Self {
        let (rare, coded) = pairs.split_at(escaped);
        let rare_count: u64 = rare.iter().map(|&(_, count)| count).sum();
        let mut counts: Vec<u64> = coded.iter().map(|&(_, count)| count).collect();
        if escaped > 0 {
            counts.insert(counts.partition_point(|&count| count < rare_count), rare_count);
        }
        let values = rare_count + coded.len() as u64;
        let bits = least_bits(&counts, MAX_CODE_BITS) + values * u64::from(VALUE_BITS);
        Self { escaped, bits, cost: bits + rare_count * ESCAPE_COST }
    }
}

/// The one with the least cost of those that take few bits more than the fewest; 0 if there are
/// none.
fn best(tried: &[Tried]) -> usize {
    let fewest = tried.iter().map(|one| one.bits).min().unwrap_or(0);
    let most = fewest + fewest / EXCESS_SHARE;
    let small = (0..tried.len()).filter(|&at| tried[at].bits <= most);
    small.min_by_key(|&at| tried[at].cost).unwrap_or(0)
}

/// The lengths where the first pairs are escaped.
fn lengths(pairs: &[(u16, u64)], escaped: usize) -> ChosenLengths {
    let (rare, coded) = pairs.split_at(escaped);
    let mut counts: Vec<u64> = coded.iter().map(|&(_, count)| count).collect();
    if escaped > 0 {
        counts.push(rare.iter().map(|&(_, count)| count).sum());
    }
    let mut lengths = package_merge(&counts, MAX_CODE_BITS);
    let escape = if escaped > 0 { lengths.pop() } else { None };
    (escape.unwrap_or(0), coded.iter().map(|&(pair, _)| pair).zip(lengths).collect())
}

/// The bits of all pairs, 512 KiB of which a trained tensor touches some 10: first exponent in the
/// low byte of an index, second in the high one, as they stand in memory.
#[derive(Clone, Debug)]
pub(super) struct Table {
    entries: Box<[Entry; PAIRS]>,
}

/// The bits that are written for a pair, and their number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// The pair's code, or the escape's and above it the pair; first bits lowest.
    pub(super) bits: u32,
    /// 1..=28, so the sum of a lane's is below [`NONE`], which stands where there is neither.
    pub(super) length: u32,
}

/// More than a lane has.
pub(super) const NONE: u32 = 1 << 16;

impl Table {
    pub(super) fn new(codebook: &Codebook) -> Self {
        let entries = match codebook.codes().find(|&(value, _)| value == ESCAPE) {
            None => vec![Entry { bits: 0, length: NONE }; PAIRS],
            Some((_, escape)) => (0..ESCAPE)
                .map(|pair| Entry {
                    bits: u32::from(escape.bits) | pair << escape.length,
                    length: u32::from(escape.length + VALUE_BITS),
                })
                .collect(),
        };
        let mut entries: Box<[Entry; PAIRS]> =
            entries.into_boxed_slice().try_into().expect("the slice has this length");
        for (value, code) in codebook.codes().filter(|&(value, _)| value != ESCAPE) {
            entries[value as usize] =
                Entry { bits: u32::from(code.bits), length: u32::from(code.length) };
        }
        Self { entries }
    }

    /// The entry of two neighbouring exponents.
    #[inline]
    pub(super) fn get(&self, pair: [u8; 2]) -> Entry {
        self.entries[usize::from(u16::from_le_bytes(pair))]
    }

    /// The entries of the four pairs of a unit.
    #[inline]
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "by value, measuring takes 10 % longer")]
    pub(super) fn unit(&self, exponents: &[u8; UNIT]) -> [Entry; 4] {
        let (pairs, _) = exponents.as_chunks();
        std::array::from_fn(|pair| self.get(pairs[pair]))
    }
}
