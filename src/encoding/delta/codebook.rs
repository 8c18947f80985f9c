//! The code of a tensor: the frequencies of tokens in each context, which are counted, rounded with
//! integer arithmetic only, and stored.

use super::token::{ESCAPE, TOKENS, difference, token};
use crate::{Error, Result, bf16};

/// The most contexts.
pub(super) const MAX_CONTEXTS: usize = 16;
/// Frequencies of a context add up to 2^this.
pub(super) const FREQUENCY_BITS: u32 = 11;
/// The sum of the frequencies of a context.
pub(super) const TOTAL: u64 = 1 << FREQUENCY_BITS;
/// Bytes before the first context.
const HEAD_BYTES: usize = 2;
/// Bytes of a token and its frequency.
const ENTRY_BYTES: usize = 3;
/// The fewest bytes: of one context with one token.
pub(super) const MIN_BYTES: u64 = (HEAD_BYTES + 1 + ENTRY_BYTES) as u64;
/// The most bytes.
pub(super) const MAX_BYTES: u64 = (HEAD_BYTES + MAX_CONTEXTS * (1 + TOKENS * ENTRY_BYTES)) as u64;
/// A token that is rarer in its context than one in 2^this is escaped: a frequency costs all
/// others more.
const RARE_BITS: u32 = 14;
/// Weights whose tokens are found at a time: LLVM does so for many at once.
pub(super) const CHUNK: usize = 1024;
/// The highest exponents together that share context 0 are at most one weight in 2^this.
const TOP_BITS: u32 = 10;

/// The context of a weight whose base has this exponent.
#[inline]
pub(super) fn context(top: u8, last: u8, exponent: u8) -> u8 {
    top.saturating_sub(exponent).min(last)
}

/// Frequencies of the tokens of a context; those of tokens that it lacks are 0.
type Frequencies = [u16; TOKENS];

/// The code of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codebook {
    /// Weights whose base has this exponent or a higher one have context 0.
    top: u8,
    /// By context.
    contexts: Vec<Frequencies>,
}

/// How often each token occurs at each exponent of the base.
#[derive(Clone)]
pub struct Differences(Box<[[u64; TOKENS]; 256]>);

impl Default for Differences {
    fn default() -> Self {
        Self(vec![[0; TOKENS]; 256].try_into().expect("as many as there are exponents"))
    }
}

impl std::fmt::Debug for Differences {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Differences").finish_non_exhaustive()
    }
}

impl Differences {
    /// Counts weights, little-endian, beside those of the base.
    ///
    /// # Panics
    /// If they are not as many.
    pub fn add(&mut self, base: &[u8], weights: &[u8]) {
        assert_eq!(base.len(), weights.len(), "as many weights as the base has");
        let counts = self.0.as_flattened_mut();
        for (base, weights) in base.chunks(2 * CHUNK).zip(weights.chunks(2 * CHUNK)) {
            let mut places = [0; CHUNK];
            let pairs = base.as_chunks().0.iter().zip(weights.as_chunks().0);
            for (place, (base, weight)) in places.iter_mut().zip(pairs) {
                let (base, weight) = (u16::from_le_bytes(*base), u16::from_le_bytes(*weight));
                let token = u16::from(token(difference(base, weight)));
                *place = u16::from(bf16::exponent(base)) * TOKENS as u16 + token;
            }
            places[..weights.len() / 2].iter().for_each(|at| counts[usize::from(*at)] += 1);
        }
    }

    /// Adds the counts of other weights.
    pub fn merge(&mut self, other: &Self) {
        let counts = self.0.as_flattened_mut().iter_mut();
        counts.zip(other.0.as_flattened()).for_each(|(count, other)| *count += other);
    }

    /// The highest exponent above which there are hardly any weights.
    fn top(&self) -> u8 {
        let weights = |counts: &[u64; TOKENS]| counts.iter().sum::<u64>();
        let all: u64 = self.0.iter().map(weights).sum();
        let mut above = 0;
        let top = (0..256).rev().find(|&exponent| {
            above += weights(&self.0[exponent]);
            above << TOP_BITS > all
        });
        top.unwrap_or_default() as u8
    }
}

impl Codebook {
    /// The code of counted differences.
    pub fn new(differences: &Differences) -> Self {
        let top = differences.top();
        let mut counts = [[0; TOKENS]; MAX_CONTEXTS];
        for (exponent, own) in (0..=u8::MAX).zip(differences.0.iter()) {
            let context = context(top, MAX_CONTEXTS as u8 - 1, exponent);
            let sums = counts[usize::from(context)].iter_mut();
            sums.zip(own).for_each(|(sum, count)| *sum += count);
        }
        let used = counts.iter().rposition(|counts| counts.iter().any(|&count| count > 0));
        let contexts = counts[..=used.unwrap_or(0)].iter().map(frequencies).collect();
        Self { top, contexts }
    }

    /// The bits of counted differences, without those of segments; an estimate.
    pub fn expected_bits(&self, differences: &Differences) -> f64 {
        let mut bits = 0.0;
        for (exponent, counts) in (0..=u8::MAX).zip(differences.0.iter()) {
            let frequencies = &self.contexts[usize::from(self.context(exponent))];
            for (token, &count) in (0..).zip(counts).filter(|(_, count)| **count > 0) {
                let token = if frequencies[usize::from(token)] == 0 { ESCAPE } else { token };
                let (_, raw) = super::token::differences_of(token);
                let share = f64::from(frequencies[usize::from(token)].max(1)) / TOTAL as f64;
                bits += count as f64 * (f64::from(raw) - share.log2());
            }
        }
        bits
    }

    /// The context of a weight whose base has this exponent.
    #[inline]
    pub(super) fn context(&self, exponent: u8) -> u8 {
        context(self.top, self.last(), exponent)
    }

    pub(super) fn top(&self) -> u8 {
        self.top
    }

    /// The last context.
    pub(super) fn last(&self) -> u8 {
        self.contexts.len() as u8 - 1
    }

    /// Tokens of each context, with frequency and the sum of those before.
    pub(super) fn entries(&self) -> impl Iterator<Item = (usize, u8, u16, u16)> {
        self.contexts.iter().enumerate().flat_map(|(context, frequencies)| {
            let used = (0..).zip(frequencies).filter(|(_, frequency)| **frequency > 0);
            used.scan(0, move |start, (token, &frequency)| {
                *start += frequency;
                Some((context, token, frequency, *start - frequency))
            })
        })
    }

    /// As stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.top, self.contexts.len() as u8];
        for frequencies in &self.contexts {
            let used = || (0..).zip(frequencies).filter(|(_, frequency)| **frequency > 0);
            bytes.push(used().count() as u8);
            for (token, frequency) in used() {
                bytes.push(token);
                bytes.extend(frequency.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads and checks a stored one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a rule of it is broken.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = |problem: &str| Error::corrupt("codebook", 0, problem);
        let (&[top, count], mut rest) =
            bytes.split_first_chunk().ok_or_else(|| corrupt("it ends early"))?;
        let is_possible = (1..=MAX_CONTEXTS).contains(&usize::from(count));
        Error::unless(is_possible, || corrupt("there must be 1 to 16 contexts"))?;
        let contexts = (0..count).map(|_| read_context(&mut rest).map_err(corrupt));
        let contexts = contexts.collect::<Result<_>>()?;
        Error::unless(rest.is_empty(), || corrupt("bytes follow the last context"))?;
        Ok(Self { top, contexts })
    }
}

/// Takes a context from the start of stored bytes; or what is wrong.
fn read_context(bytes: &mut &[u8]) -> Result<Frequencies, &'static str> {
    let mut frequencies = [0; TOKENS];
    let count = bytes.split_off_first().ok_or("it ends before a context")?;
    let entries = bytes.split_off(..usize::from(*count) * ENTRY_BYTES).ok_or("it ends early")?;
    let (mut next, mut sum) = (0, 0);
    for &[token, low, high] in entries.as_chunks().0 {
        let frequency = u16::from_le_bytes([low, high]);
        if token < next || token > ESCAPE {
            return Err("tokens must ascend, up to the escape");
        }
        if frequency == 0 || u64::from(frequency) > TOTAL {
            return Err("a frequency is not within 1 to 2048");
        }
        (next, sum) = (token + 1, sum + u64::from(frequency));
        frequencies[usize::from(token)] = frequency;
    }
    if *count > 0 && sum != TOTAL {
        return Err("the frequencies of a context do not add up to 2048");
    }
    Ok(frequencies)
}

/// Rounds counts so that they add up to [`TOTAL`]; all are 0 if no token occurs.
fn frequencies(counts: &[u64; TOKENS]) -> Frequencies {
    let all: u64 = counts.iter().sum();
    let (mut counts, mut frequencies) = (*counts, [0; TOKENS]);
    let escape = usize::from(ESCAPE);
    for token in 0..escape {
        if u128::from(counts[token]) << RARE_BITS < u128::from(all) {
            counts[escape] += std::mem::take(&mut counts[token]);
        }
    }
    let exact = |count: u64| u128::from(count) * u128::from(TOTAL);
    for (frequency, &count) in frequencies.iter_mut().zip(&counts).filter(|(_, count)| **count > 0)
    {
        *frequency = (exact(count) / u128::from(all)).max(1) as u16;
    }
    // The tokens that were rounded most get the rest. The most frequent ones, which lose least,
    // give back what is too much.
    let sum =
        |frequencies: &Frequencies| frequencies.iter().map(|&one| u64::from(one)).sum::<u64>();
    while all > 0 && sum(&frequencies) != TOTAL {
        let rest = |token: &usize| {
            let given = u128::from(frequencies[*token]) * u128::from(all);
            exact(counts[*token]).cast_signed() - given.cast_signed()
        };
        let used = (0..TOKENS).filter(|&token| counts[token] > 0);
        if sum(&frequencies) < TOTAL {
            let most = used.rev().max_by_key(rest).expect("a token occurs");
            frequencies[most] += 1;
        } else {
            let most = used.rev().max_by_key(|&token| frequencies[token]);
            frequencies[most.expect("a token occurs")] -= 1;
        }
    }
    frequencies
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pairs: &[(usize, u64)]) -> [u64; TOKENS] {
        let mut counts = [0; TOKENS];
        for &(token, count) in pairs {
            counts[token] = count;
        }
        counts
    }

    #[test]
    fn frequencies_add_up() {
        assert_eq!(frequencies(&counts(&[])), [0; TOKENS]);
        assert_eq!(frequencies(&counts(&[(7, 3)]))[7], 2048);
        let all: Vec<(usize, u64)> = (0..TOKENS).map(|token| (token, 1)).collect();
        let skewed = [(0, u64::MAX >> 16), (1, 1), (2, 1 << 40)];
        for pairs in [&all[..], &skewed, &[(0, 1), (1, 1), (2, 1)], &[(0, 9_999), (1, 1)]] {
            let frequencies = frequencies(&counts(pairs));
            assert_eq!(frequencies.iter().map(|&one| u64::from(one)).sum::<u64>(), TOTAL);
        }
        // A token too rare for a frequency is escaped.
        assert_eq!(frequencies(&counts(&skewed))[1], 0);
        assert_eq!(frequencies(&counts(&skewed))[usize::from(ESCAPE)], 1);
    }

    #[test]
    fn a_codebook_comes_back() {
        let mut differences = Differences::default();
        let weights: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let others: Vec<u8> = weights.iter().rev().copied().collect();
        differences.add(&weights, &others);
        differences.add(&weights, &weights);
        let codebook = Codebook::new(&differences);
        let bytes = codebook.to_bytes();
        assert_eq!(Codebook::from_bytes(&bytes).unwrap(), codebook);
        assert!(bytes.len() as u64 <= MAX_BYTES);
        for length in 0..bytes.len() {
            assert!(Codebook::from_bytes(&bytes[..length]).is_err());
        }
        assert!(Codebook::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }
}
