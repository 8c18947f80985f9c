//! Which pairs have codes.
//!
//! A rare pair costs less as an escape and 16 bits than as a code of 12 bits, which takes space
//! from all others, and 16 bits of codebook. With `k` codes the commonest `k` pairs have them, the
//! lower of two equally common ones first; then package-merge finds the best lengths, with all
//! other pairs as one symbol. The bits fall and then rise with `k`, up to noise; so `k` is
//! bracketed by halves and quarters of the rarest pair's count, and the bracket halved. An escape
//! counts as more bits than it takes, since it costs a kernel time.

use super::{MAX_CODE_BITS, PairHistogram, VALUE_BITS};
use crate::huffman::package_merge::code_lengths;

/// Codes of the longest length fill the code space.
const MAX_SYMBOLS: usize = 1 << MAX_CODE_BITS;
/// A pair this many times rarer than a code of the longest length suits is escaped in any case.
const RAREST: u64 = 64;
/// Bits that an escape counts as more than it takes. The products' kernels decode one by a branch
/// that the whole warp takes, and are 2 to 3 % faster with codes chosen so.
const ESCAPE_COST: u64 = 20;
/// For fewer escapes a tensor's bits may grow by this share.
const MOST_MORE: u64 = 256;
/// Times that the bracket is halved.
const HALVINGS: usize = 4;

/// Lengths of the escape, 0 if there is none, and of the pairs that have codes.
type Choice = (u8, Vec<(u16, u8)>);

/// The choice with the least cost; `None` if nothing was counted.
pub(super) fn choose(histogram: &PairHistogram) -> Option<Choice> {
    let mut pairs: Vec<(u16, u64)> = histogram.used().collect();
    // Ascending counts, as package-merge wants them; the first pairs are escaped.
    pairs.sort_by_key(|&(pair, count)| (count, std::cmp::Reverse(pair)));
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
        let here = tried[at].escaped;
        // The higher place first: an insertion there does not move the lower one.
        let sides = [
            (at + 1, tried.get(at + 1)),
            (at, at.checked_sub(1).and_then(|below| tried.get(below))),
        ];
        for (place, between) in
            sides.map(|(place, side)| (place, side.map(|side| usize::midpoint(side.escaped, here))))
        {
            if let Some(between) =
                between.filter(|&between| tried.iter().all(|one| one.escaped != between))
            {
                tried.insert(place, Tried::new(&pairs, between));
            }
        }
    }
    Some(lengths(&pairs, tried[best(&tried)].escaped))
}

/// What a number of escaped pairs costs.
struct Tried {
    escaped: usize,
    /// Of all pairs and of the codebook's values.
    bits: u64,
    /// Likewise, with what escapes count more.
    cost: u64,
}

impl Tried {
    fn new(pairs: &[(u16, u64)], escaped: usize) -> Self {
        let (escape, coded) = lengths(pairs, escaped);
        let (rare, common) = pairs.split_at(escaped);
        let value = u64::from(VALUE_BITS);
        let rare_count: u64 = rare.iter().map(|&(_, count)| count).sum();
        let common_bits: u64 = coded
            .iter()
            .zip(common)
            .map(|(&(_, length), &(_, count))| count * u64::from(length))
            .sum();
        let bits =
            rare_count * (u64::from(escape) + value) + common_bits + value * coded.len() as u64;
        Self { escaped, bits, cost: bits + rare_count * ESCAPE_COST }
    }
}

/// The one with the least cost of those that take few bits more than the fewest; 0 if there are
/// none.
fn best(tried: &[Tried]) -> usize {
    let fewest = tried.iter().map(|one| one.bits).min().unwrap_or(0);
    let most = fewest + fewest / MOST_MORE;
    let small = (0..tried.len()).filter(|&at| tried[at].bits <= most);
    small.min_by_key(|&at| tried[at].cost).unwrap_or(0)
}

/// The lengths where the first pairs are escaped.
fn lengths(pairs: &[(u16, u64)], escaped: usize) -> Choice {
    let (rare, coded) = pairs.split_at(escaped);
    let mut counts: Vec<u64> = coded.iter().map(|&(_, count)| count).collect();
    if escaped > 0 {
        counts.push(rare.iter().map(|&(_, count)| count).sum());
    }
    let mut lengths = code_lengths(&counts, MAX_CODE_BITS);
    let escape = if escaped > 0 { lengths.pop() } else { None };
    (escape.unwrap_or(0), coded.iter().map(|&(pair, _)| pair).zip(lengths).collect())
}
