//! Weights become segments. Raw bits are written forwards; the states take tokens from the last to
//! the first, since they give them back in the reverse order.

use super::{
    codebook::{Codebook, Differences, FREQUENCY_BITS, MAX_CONTEXTS, TOTAL},
    sizes::{DeltaSizes, SEGMENT_ALIGNMENT, segment_elements},
    token::{ESCAPE, difference, differences_of, token},
};
use crate::{Result, bf16, dtype, encoding::stored::EncodedTensor};

/// States of a segment.
pub(super) const STATES: usize = 4;
/// Weights between two places at which states take words.
pub(super) const UNIT: usize = 8;
/// The least state, with which a segment ends. No state reaches 2^32 times it.
pub(super) const LEAST: u64 = 1 << 31;
/// Bits of a word.
pub(super) const WORD_BITS: u32 = u32::BITS;
/// Bits of a token in the index of a symbol.
const TOKEN_BITS: u32 = 7;

/// Symbols of all contexts.
const SYMBOLS: usize = MAX_CONTEXTS << TOKEN_BITS;
/// States stay below 2^this.
const MOST_BITS: u32 = LEAST.trailing_zeros() + WORD_BITS;

/// Frequency of a token in a context, and the sum of those before; 0 if it is not in the code.
#[derive(Clone, Copy, Default)]
struct Symbol {
    frequency: u16,
    start: u16,
}

impl Symbol {
    /// That of no weight, which changes no state.
    const NONE: Self = Self { frequency: TOTAL as u16, start: 0 };

    #[inline]
    fn add_to(self, state: u64) -> u64 {
        let (frequency, start) = (u64::from(self.frequency), u64::from(self.start));
        let (quotient, rest) = (state / frequency, state % frequency);
        (quotient << FREQUENCY_BITS) + rest + start
    }
}

/// Encodes the segments of a tensor.
#[derive(Debug)]
pub struct Encoder {
    codebook: Codebook,
    symbols: Box<[Symbol; SYMBOLS]>,
    /// Of the segment that is encoded: the symbol of each weight, and words, the last one first.
    chosen: Vec<u16>,
    words: Vec<u32>,
}

impl std::fmt::Debug for Symbol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} from {}", self.frequency, self.start)
    }
}

impl Encoder {
    /// Prepares for a tensor with this code.
    pub fn new(codebook: &Codebook) -> Self {
        let mut symbols = Box::new([Symbol::default(); SYMBOLS]);
        for (context, token, frequency, start) in codebook.entries() {
            symbols[context << TOKEN_BITS | usize::from(token)] = Symbol { frequency, start };
        }
        let (chosen, words) = (Vec::new(), Vec::new());
        Self { codebook: codebook.clone(), symbols, chosen, words }
    }

    /// Appends a segment: weights, little-endian, beside those of the base.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if a weight has no symbol: then the code is
    /// not that of the weights.
    ///
    /// # Panics
    /// If the base has not as many weights.
    pub fn encode_segment(&mut self, base: &[u8], weights: &[u8], out: &mut Vec<u8>) -> Result<()> {
        assert_eq!(base.len(), weights.len(), "as many weights as the base has");
        let start = out.len();
        out.resize(start + size_of::<u32>() + STATES * size_of::<u64>(), 0);
        let mut raw = Vec::new();
        self.choose(base, weights, &mut raw)?;
        let states = self.encode_chosen();
        let (count, head) = out[start..].split_at_mut(size_of::<u32>());
        count.copy_from_slice(&(self.words.len() as u32).to_le_bytes());
        for (bytes, state) in head.chunks_exact_mut(size_of::<u64>()).zip(states) {
            bytes.copy_from_slice(&state.to_le_bytes());
        }
        out.extend(self.words.iter().rev().flat_map(|word| word.to_le_bytes()));
        out.extend(raw);
        out.resize(start + (out.len() - start).next_multiple_of(SEGMENT_ALIGNMENT as usize), 0);
        Ok(())
    }

    /// Finds the symbol of each weight, and writes the raw bits.
    fn choose(&mut self, base: &[u8], weights: &[u8], raw: &mut Vec<u8>) -> Result<()> {
        let (mut held, mut bits) = (0u64, 0);
        let mut is_known = true;
        let (top, last) = (self.codebook.top(), self.codebook.last());
        self.chosen.clear();
        let pairs = base.as_chunks().0.iter().zip(weights.as_chunks().0);
        self.chosen.extend(pairs.map(|(base, weight)| {
            let (base, weight) = (u16::from_le_bytes(*base), u16::from_le_bytes(*weight));
            let difference = difference(base, weight);
            let context = super::codebook::context(top, last, bf16::exponent(base));
            let symbol = |token: u8| usize::from(context) << TOKEN_BITS | usize::from(token);
            let mut token = token(difference);
            if self.symbols[symbol(token)].frequency == 0 {
                token = ESCAPE;
                is_known &= self.symbols[symbol(token)].frequency > 0;
            }
            let (least, count) = differences_of(token);
            if count > 0 {
                held |= u64::from(difference - least) << bits;
                bits += count;
                while bits >= u8::BITS {
                    raw.push(held as u8);
                    (held, bits) = (held >> u8::BITS, bits - u8::BITS);
                }
            }
            symbol(token) as u16
        }));
        if bits > 0 {
            raw.push(held as u8);
        }
        if is_known { Ok(()) } else { Err(crate::encoding::stored::changed()) }
    }

    /// Encodes the symbols, from the last to the first; returns the states.
    ///
    /// Q: Why is this fast? Four divisions of four states run side by side, and whether a state
    /// gives a word is no branch.
    fn encode_chosen(&mut self) -> [u64; STATES] {
        let mut states = [LEAST; STATES];
        let (units, last) = self.chosen.as_chunks::<UNIT>();
        // A state gives at most a word in a unit.
        self.words.resize(STATES * (units.len() + 1), 0);
        let symbol = |at: u16| self.symbols[usize::from(at) % SYMBOLS];
        let mut count = 0;
        for (at, state) in states.iter_mut().enumerate().rev() {
            let (first, second) = (last.get(at), last.get(at + STATES));
            let own = [first, second].map(|at| at.map_or(Symbol::NONE, |&at| symbol(at)));
            count += put(own, state, &mut self.words[count]);
        }
        for unit in units.iter().rev() {
            for (at, state) in states.iter_mut().enumerate().rev() {
                let own = [symbol(unit[at]), symbol(unit[at + STATES])];
                count += put(own, state, &mut self.words[count]);
            }
        }
        self.words.truncate(count);
        states
    }
}

/// Adds the two symbols of a state in a unit; the number of words that it gave first, so that it
/// does not grow too large.
#[inline]
fn put([first, second]: [Symbol; 2], state: &mut u64, word: &mut u32) -> usize {
    let share = u64::from(first.frequency) * u64::from(second.frequency);
    let is_large = *state >= share << (MOST_BITS - 2 * FREQUENCY_BITS);
    *word = *state as u32;
    *state = if is_large { *state >> WORD_BITS } else { *state };
    *state = first.add_to(second.add_to(*state));
    usize::from(is_large)
}

/// Encodes a tensor of this shape against its base, whose hash it records.
///
/// # Errors
/// [`Error::Corrupt`](crate::Error::Corrupt) for a tensor without weights.
///
/// # Panics
/// If base and weights are not as many as the shape says.
pub fn encode_tensor(
    base: &[u8],
    weights: &[u8],
    shape: &[u64],
) -> Result<EncodedTensor<DeltaSizes, 3>> {
    assert_eq!(weights.len() as u64, 2 * dtype::elements(shape)?, "weights of the shape");
    let mut differences = Differences::default();
    differences.add(base, weights);
    let codebook = Codebook::new(&differences);
    let mut encoder = Encoder::new(&codebook);
    let (mut records, mut bitstream) = (0u64.to_le_bytes().to_vec(), Vec::new());
    let each = 2 * segment_elements(shape) as usize;
    for (base, weights) in base.chunks(each).zip(weights.chunks(each)) {
        encoder.encode_segment(base, weights, &mut bitstream)?;
        records.extend((bitstream.len() as u64).to_le_bytes());
    }
    let codebook = codebook.to_bytes();
    let hash = *blake3::hash(base).as_bytes();
    let elements = weights.len() as u64 / 2;
    let lengths = (codebook.len() as u64, bitstream.len() as u64);
    let sizes = DeltaSizes::new(hash, (shape, elements), lengths.0, lengths.1)?;
    Ok(EncodedTensor { sizes, arrays: [codebook, records, bitstream] })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::WithBase, *};
    use crate::encoding::stored::{CodedSizes, Scratch};

    fn bytes(weights: &[u16]) -> Vec<u8> {
        weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()
    }

    /// Encodes, and decodes all and a part.
    fn comes_back(base: &[u16], weights: &[u16]) {
        let (base, weights) = (bytes(base), bytes(weights));
        let count = weights.len() as u64 / 2;
        let encoded = encode_tensor(&base, &weights, &[count]).unwrap();
        let arrays = WithBase { arrays: encoded.views(), base: &base };
        let decoder = encoded.sizes.prepare(&arrays).unwrap();
        for range in [0..count, count / 3..count - count / 3, count - 1..count] {
            let mut out = vec![0; 2 * (range.end - range.start) as usize];
            decoder.decode(&arrays, range.clone(), &mut Scratch::default(), &mut out).unwrap();
            let wanted = &weights[2 * range.start as usize..2 * range.end as usize];
            assert!(out == wanted, "{range:?} of {count}");
        }
    }

    proptest! {
        #[test]
        fn any_weights_come_back(pairs in prop::collection::vec((any::<u16>(), any::<u16>()), 1..3000)) {
            let (base, weights): (Vec<u16>, Vec<u16>) = pairs.into_iter().unzip();
            comes_back(&base, &weights);
        }

        #[test]
        fn near_weights_come_back(
            pairs in prop::collection::vec((0x3A00u16..0x3F80, -3i16..300), 1..3000),
        ) {
            let near = |&(base, step): &(u16, i16)| base.wrapping_add_signed(step / 97);
            let weights: Vec<u16> = pairs.iter().map(near).collect();
            comes_back(&pairs.iter().map(|pair| pair.0).collect::<Vec<_>>(), &weights);
        }
    }

    #[test]
    fn every_pattern_comes_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let others: Vec<u16> = all.iter().map(|weight| weight.wrapping_mul(40_503)).collect();
        comes_back(&all, &others);
        comes_back(&all, &all);
        let ends: Vec<u16> = all.iter().rev().copied().collect();
        comes_back(&all, &ends);
    }

    #[test]
    fn weights_of_another_code_are_refused() {
        let mut differences = Differences::default();
        differences.add(&[0, 0x3F], &[0, 0x3F]);
        let mut encoder = Encoder::new(&Codebook::new(&differences));
        encoder.encode_segment(&[0, 0x3F], &[0, 0x3F], &mut Vec::new()).unwrap();
        assert!(encoder.encode_segment(&[0, 0x3F], &[1, 0x3F], &mut Vec::new()).is_err());
    }
}
