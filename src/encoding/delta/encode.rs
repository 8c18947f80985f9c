//! Encodes weights as segments. Raw bits are written forwards; the states take tokens from the last
//! to the first, because decoding returns them in reverse order.

use super::{
    codebook::{CHUNK, Codebook, Differences, FREQUENCY_BITS, MAX_CONTEXTS, TOTAL, context},
    sizes::{DeltaSizes, SEGMENT_ALIGNMENT, segment_elements},
    token::{ESCAPE, TOKEN_BITS, difference, differences_of, token},
};
use crate::{
    Result, bf16, dtype,
    encoding::stored::{EncodedTensor, changed},
    huffman::bits::End,
};

/// States of a segment.
pub(super) const STATES: usize = 4;
/// Weights between two places at which states take words.
pub(super) const UNIT: usize = 8;
/// The least state, with which a segment ends. No state reaches 2^32 times it.
pub(super) const MIN_STATE: u64 = 1 << 31;
/// Bits of a word.
pub(super) const WORD_BITS: u32 = u32::BITS;
/// Symbols of all contexts.
const SYMBOLS: usize = MAX_CONTEXTS << TOKEN_BITS;
/// States stay below 2^this.
const STATE_BITS: u32 = MIN_STATE.trailing_zeros() + WORD_BITS;

/// How a state takes a token of a context.
///
/// Q: Why is this fast? It divides by multiplication: the reciprocal is rounded up, and its error
/// is too small to change a quotient of states, which are below 2^63.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    reciprocal: u64,
    frequency: u16,
    /// The frequency of all tokens but this.
    complement: u16,
    /// The sum of the frequencies of tokens before.
    bias: u16,
    shift: u8,
}

impl Symbol {
    /// The symbol of no weight; it changes no state.
    const NONE: Self = Self::new(TOTAL as u16, 0);

    const fn new(frequency: u16, start: u16) -> Self {
        let complement = TOTAL as u16 - frequency;
        if frequency == 1 {
            // The reciprocal would need a bit more. Quotients are less by one, which the bias adds.
            return Self {
                reciprocal: u64::MAX,
                frequency,
                complement,
                bias: start + complement,
                shift: 0,
            };
        }
        let shift = (frequency - 1).ilog2();
        let reciprocal = (1u128 << (u64::BITS + shift)).div_ceil(frequency as u128);
        Self {
            reciprocal: reciprocal as u64,
            frequency,
            complement,
            bias: start,
            shift: shift as u8,
        }
    }

    /// The state from which decoding takes this token and the state before.
    #[inline]
    fn add_to(self, state: u64) -> u64 {
        let product = u128::from(state) * u128::from(self.reciprocal);
        let quotient = (product >> u64::BITS) as u64 >> self.shift;
        state + u64::from(self.bias) + quotient * u64::from(self.complement)
    }
}

/// The raw bits of a token in a context.
#[derive(Clone, Copy, Debug)]
struct RawBits {
    /// The difference that they are added to.
    least: u16,
    count: u8,
    /// Whether the code has neither the token nor an escape.
    is_missing: bool,
}

/// The symbols of a code, and their raw bits.
fn tables(codebook: &Codebook) -> (Box<[Symbol; SYMBOLS]>, Box<[RawBits; SYMBOLS]>) {
    const MISSING: RawBits = RawBits { least: 0, count: u16::BITS as u8, is_missing: true };
    let (mut symbols, mut raw_bits) = (vec![Symbol::NONE; SYMBOLS], vec![MISSING; SYMBOLS]);
    // The escape comes last in each context.
    for (context, token, frequency, start) in codebook.entries() {
        let of_context = context << TOKEN_BITS..(context + 1) << TOKEN_BITS;
        let of_token = of_context.start + usize::from(token);
        let (least, count) = differences_of(token);
        let own = RawBits { least, count: count as u8, is_missing: false };
        let is_own = |&at: &usize| at == of_token || token == ESCAPE && raw_bits[at].is_missing;
        let all: Vec<usize> = of_context.filter(is_own).collect();
        for at in all {
            (symbols[at], raw_bits[at]) = (Symbol::new(frequency, start), own);
        }
    }
    let symbols = symbols.try_into().expect("as many symbols");
    (symbols, raw_bits.try_into().expect("as many symbols"))
}

/// Encodes the segments of a tensor.
#[derive(Debug)]
pub struct Encoder {
    codebook: Codebook,
    /// Tokens that a context lacks have the symbol of its escape.
    symbols: Box<[Symbol; SYMBOLS]>,
    raw_bits: Box<[RawBits; SYMBOLS]>,
    /// The symbol of each weight of the segment that is encoded.
    chosen: Vec<u16>,
    /// Room for its words; the last one comes first.
    words: Vec<u32>,
    raw: Vec<u8>,
}

impl Encoder {
    /// Prepares for a tensor with this code.
    pub fn new(codebook: &Codebook) -> Self {
        let (symbols, raw_bits) = tables(codebook);
        let (chosen, words, raw) = (Vec::new(), Vec::new(), Vec::new());
        Self { codebook: codebook.clone(), symbols, raw_bits, chosen, words, raw }
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
        self.choose(base, weights)?;
        let (states, count) = self.encode_chosen();
        let given = &self.words[..count];
        let start = out.len();
        out.extend((count as u32).to_le_bytes());
        out.extend(states.iter().flat_map(|state| state.to_le_bytes()));
        let words = out.len();
        out.resize(words + size_of::<u32>() * count, 0);
        let places = out[words..].as_chunks_mut().0.iter_mut();
        places.zip(given.iter().rev()).for_each(|(to, word)| *to = word.to_le_bytes());
        out.extend(&self.raw);
        out.resize(start + (out.len() - start).next_multiple_of(SEGMENT_ALIGNMENT as usize), 0);
        Ok(())
    }

    /// Finds the symbol of each weight, and writes the raw bits.
    fn choose(&mut self, base: &[u8], weights: &[u8]) -> Result<()> {
        let Self { codebook, raw_bits, chosen, raw, .. } = self;
        let (top, last) = (codebook.top(), codebook.last());
        chosen.resize(weights.len() / 2, 0);
        let (mut end, mut is_missing) = (End::default(), false);
        let pairs = base.chunks(2 * CHUNK).zip(weights.chunks(2 * CHUNK));
        for ((base, weights), chosen) in pairs.zip(chosen.chunks_mut(CHUNK)) {
            let mut differences = [0; CHUNK];
            let pairs = base.as_chunks().0.iter().zip(weights.as_chunks().0);
            for ((base, weight), (own, symbol)) in
                pairs.zip(differences.iter_mut().zip(&mut *chosen))
            {
                let (base, weight) = (u16::from_le_bytes(*base), u16::from_le_bytes(*weight));
                *own = difference(base, weight);
                let context = u16::from(context(top, last, bf16::exponent(base)));
                *symbol = context << TOKEN_BITS | u16::from(token(*own));
            }
            // Raw bits are rare or many: those that have some are listed without a branch.
            let (mut places, mut count) = ([0; CHUNK], 0);
            for (at, symbol) in (0u16..).zip(&*chosen) {
                places[count % CHUNK] = at;
                count += usize::from(raw_bits[usize::from(*symbol) % SYMBOLS].count > 0);
            }
            raw.resize(end.bit / 8 + size_of::<u16>() * count + End::SLACK, 0);
            for &at in &places[..count] {
                let at = usize::from(at) % CHUNK;
                let own = raw_bits[usize::from(chosen[at]) % SYMBOLS];
                is_missing |= own.is_missing;
                let bits = differences[at].wrapping_sub(own.least);
                end.push(raw, bits.into(), own.count.into()).expect("room for all");
            }
        }
        raw.truncate(end.bit.div_ceil(8));
        if is_missing { Err(changed()) } else { Ok(()) }
    }

    /// Encodes the symbols, from the last to the first; returns the states, and how many words they
    /// gave.
    ///
    /// Q: Why is this fast? Four states are computed side by side, and whether a state gives a word
    /// is no branch.
    fn encode_chosen(&mut self) -> ([u64; STATES], usize) {
        let mut states = [MIN_STATE; STATES];
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
            let words = self.words[count..].first_chunk_mut().expect("room for a word a state");
            count += put_unit(&self.symbols, unit, &mut states, words);
        }
        (states, count)
    }
}

/// Adds the symbols of a unit to the states; the number of words that these gave.
#[inline]
fn put_unit(
    symbols: &[Symbol; SYMBOLS],
    chosen: &[u16; UNIT],
    states: &mut [u64; STATES],
    words: &mut [u32; STATES],
) -> usize {
    let mut count = 0;
    for (at, state) in states.iter_mut().enumerate().rev() {
        let own = [at, at + STATES].map(|at| symbols[usize::from(chosen[at]) % SYMBOLS]);
        count += put(own, state, &mut words[count % STATES]);
    }
    count
}

/// Adds the two symbols of a state in a unit; the number of words that it gave first, so that it
/// does not grow too large.
#[inline]
fn put([first, second]: [Symbol; 2], state: &mut u64, word: &mut u32) -> usize {
    let share = u64::from(first.frequency) * u64::from(second.frequency);
    let is_large = *state >= share << (STATE_BITS - 2 * FREQUENCY_BITS);
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
        fn any_weights_come_back(
            pairs in prop::collection::vec((any::<u16>(), any::<u16>()), 1..3000),
        ) {
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
    fn segments_come_back_alone_and_in_pairs() {
        for count in [300_001, 524_288, 700_007, 1_100_003] {
            let base: Vec<u16> = (0..count).map(|at: u32| (at % 90 + 0x3E00) as u16).collect();
            let step = |at: u32| (at.wrapping_mul(2_654_435_761) >> 25).wrapping_sub(60) as i16;
            let near = base.iter().zip(0..).map(|(base, at)| base.wrapping_add_signed(step(at)));
            comes_back(&base, &near.collect::<Vec<_>>());
        }
    }

    #[test]
    fn weights_of_another_code_are_refused() {
        let mut differences = Differences::default();
        differences.add(&[0, 0x3F], &[0, 0x3F]);
        let mut encoder = Encoder::new(&Codebook::new(&differences));
        encoder.encode_segment(&[0, 0x3F], &[0, 0x3F], &mut Vec::new()).unwrap();
        assert!(encoder.encode_segment(&[0, 0x3F], &[1, 0x3F], &mut Vec::new()).is_err());
    }

    #[test]
    fn multiplication_divides() {
        let most = MIN_STATE << WORD_BITS;
        let near = |state: u64| [state - 1, state, state + 1];
        for frequency in 1..=TOTAL as u16 {
            let symbol = Symbol::new(frequency, TOTAL as u16 - frequency);
            let (frequency, start) = (u64::from(frequency), TOTAL - u64::from(frequency));
            let multiples = [1, 2, most / frequency / 2, most / frequency - 1];
            let states = multiples.into_iter().flat_map(|count| near(count * frequency));
            for state in states.chain([1, MIN_STATE, most - 1]) {
                let (quotient, rest) = (state / frequency, state % frequency);
                // A state that is given a token leaves room for it.
                if (1..most).contains(&state) && quotient < u64::MAX >> FREQUENCY_BITS {
                    assert_eq!(symbol.add_to(state), quotient * TOTAL + rest + start);
                }
            }
        }
    }
}
