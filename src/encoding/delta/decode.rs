//! Segments become weights: tokens by the states, then differences, added to the base.

use std::{borrow::Cow, ops::Range};

use super::{
    codebook::{Codebook, FREQUENCY_BITS, MAX_CONTEXTS, TOTAL, context},
    encode::{LEAST, STATES, UNIT, WORD_BITS},
    sizes::{BITSTREAM, CODEBOOK, DeltaSizes, MIN_SEGMENT_BYTES, RECORD_BYTES, RECORDS},
    token::{KINDS, LOOKED_AT, apply, with_raw_bits},
};
use crate::{
    Error, Result, bf16,
    encoding::stored::{
        CodedSizes, DecodeArrays, ReadArrays, ReadBase, SECTION_BITSTREAM, SECTION_CODEBOOK,
        SECTION_INDEX, Scratch, check_range,
    },
    huffman::bits::{is_zero_from, peek_at_end},
    parallel,
};

/// Weights whose contexts and tokens are in buffers at a time: these fit the first-level cache.
const CHUNK: usize = 1024;
/// Weights that are decoded at a time where they are not wanted: whole units.
const SKIPPED_ELEMENTS: u64 = 1 << 15;
/// Entries of all contexts.
const ENTRIES: usize = MAX_CONTEXTS << FREQUENCY_BITS;
/// The token of a context without tokens.
const NONE: u8 = u8::MAX >> 1;

/// A state's next token and its change, by the state's lowest bits: `frequency << 20 | distance <<
/// 8 | token`. The distance is from the token's first bits to these.
type Entry = u32;

const DISTANCE_SHIFT: u32 = 8;
const FREQUENCY_SHIFT: u32 = 20;

impl CodedSizes for DeltaSizes {
    fn parameters(&self) -> [u64; 4] {
        let base = self.base();
        std::array::from_fn(|at| u64::from_le_bytes(base.as_chunks().0[at]))
    }

    fn elements(&self) -> u64 {
        self.elements
    }

    fn arrays(&self) -> Vec<(u32, u64)> {
        vec![
            (SECTION_CODEBOOK, self.codebook_bytes),
            (SECTION_INDEX, RECORD_BYTES * (self.segment_count() + 1)),
            (SECTION_BITSTREAM, self.bitstream_bytes),
        ]
    }

    fn grain(&self) -> u64 {
        2 * self.segment_elements()
    }

    fn prepare<'m>(&self, arrays: &dyn ReadArrays<'m>) -> Result<Box<dyn DecodeArrays + 'm>> {
        let codebook = Codebook::from_bytes(&self.read_whole(arrays, CODEBOOK)?)?;
        Ok(Box::new(DeltaDecoder::new(*self, &codebook, arrays.base()?)))
    }

    fn verify_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<()> {
        let codebook: Cow<'_, [u8]> = self.read_whole(arrays, CODEBOOK)?;
        Codebook::from_bytes(&codebook).map(drop)
    }
}

/// Decodes the segments of a tensor.
pub(super) struct DeltaDecoder<'m> {
    sizes: DeltaSizes,
    top: u8,
    last: u8,
    entries: Box<[Entry; ENTRIES]>,
    base: Box<dyn ReadBase + 'm>,
}

impl<'m> DeltaDecoder<'m> {
    pub(super) fn new(
        sizes: DeltaSizes,
        codebook: &Codebook,
        base: Box<dyn ReadBase + 'm>,
    ) -> Self {
        let mut entries: Box<[Entry; ENTRIES]> =
            vec![Entry::from(NONE); ENTRIES].try_into().expect("as many entries");
        for (context, token, frequency, start) in codebook.entries() {
            let first = context << FREQUENCY_BITS | usize::from(start);
            let own = &mut entries[first..first + usize::from(frequency)];
            for (distance, entry) in (0..).zip(own) {
                let frequency = Entry::from(frequency) << FREQUENCY_SHIFT;
                *entry = frequency | distance << DISTANCE_SHIFT | Entry::from(token);
            }
        }
        Self { sizes, top: codebook.top(), last: codebook.last(), entries, base }
    }

    /// Decodes the wanted weights of a segment, to `out`.
    fn segment(
        &self,
        (segment, at): (&[u8], u64),
        all: &Range<u64>,
        wanted: &Range<u64>,
        scratch: &mut Vec<u8>,
        mut out: &mut [u8],
    ) -> Result<()> {
        let corrupt = |problem| Error::corrupt("bitstream", at, problem);
        let mut segment = OpenSegment::new(segment).map_err(corrupt)?;
        let mut decode = |part: Range<u64>, out: &mut [u8]| {
            self.base.read(part, out)?;
            self.apply(&mut segment, out).map_err(corrupt)
        };
        let unit = wanted.start - (wanted.start - all.start) % UNIT as u64;
        for part in parallel::cut(all.start..unit, SKIPPED_ELEMENTS, 1) {
            scratch.resize(2 * (part.end - part.start) as usize, 0);
            decode(part, scratch)?;
        }
        let mut start = wanted.start;
        if unit < start {
            // States take words after whole units, so the first one is decoded whole.
            let end = all.end.min(unit + UNIT as u64);
            scratch.resize(2 * (end - unit) as usize, 0);
            decode(unit..end, scratch)?;
            let end = end.min(wanted.end);
            let part = 2 * (start - unit) as usize..2 * (end - unit) as usize;
            let first = out.split_off_mut(..part.len()).expect("room for all");
            first.copy_from_slice(&scratch[part]);
            start = end;
        }
        if start < wanted.end {
            decode(start..wanted.end, out)?;
        }
        if wanted.end == all.end { segment.finish().map_err(corrupt) } else { Ok(()) }
    }

    /// Turns weights of the base into those that differ by the next tokens of a segment. All but
    /// the last ones of a segment must be whole units.
    fn apply(&self, segment: &mut OpenSegment<'_>, weights: &mut [u8]) -> Result<(), &'static str> {
        let mut buffers = Buffers::new();
        for weights in weights.as_chunks_mut::<2>().0.chunks_mut(CHUNK) {
            for (first, weight) in buffers.firsts.iter_mut().zip(weights.iter()) {
                let exponent = bf16::exponent(u16::from_le_bytes(*weight));
                *first = u16::from(context(self.top, self.last, exponent)) << FREQUENCY_BITS;
            }
            segment.tokens(&self.entries, &mut buffers, weights.len());
            segment.differences(&mut buffers, weights.len())?;
            segment.check()?;
            for (weight, difference) in weights.iter_mut().zip(&buffers.differences) {
                *weight = apply(u16::from_le_bytes(*weight), *difference).to_le_bytes();
            }
        }
        Ok(())
    }
}

impl DecodeArrays for DeltaDecoder<'_> {
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        mut out: &mut [u8],
    ) -> Result<()> {
        check_range("elements", &elements, self.sizes.elements)?;
        assert_eq!(out.len() as u64, 2 * (elements.end - elements.start), "bytes of the weights");
        let each = self.sizes.segment_elements();
        for segment in elements.start / each..elements.end.div_ceil(each) {
            let all = self.sizes.segment(segment);
            let (start, end) = (elements.start.max(all.start), elements.end.min(all.end));
            let mine = out.split_off_mut(..2 * (end - start) as usize).expect("room for all");
            let range = segment * RECORD_BYTES..(segment + 2) * RECORD_BYTES;
            let records = arrays.read_with(RECORDS, range, &mut scratch.index)?;
            let records = [0, 1].map(|at| records.as_chunks().0[at]);
            let place = self.sizes.place(segment, &records)?;
            let bytes = arrays.read_with(BITSTREAM, place.clone(), &mut scratch.bitstream)?;
            self.segment((bytes, place.start), &all, &(start..end), &mut scratch.plane, mine)?;
        }
        Ok(())
    }

    /// Decoding checks everything.
    fn verify(&self, _: &dyn ReadArrays<'_>, _: Range<u64>, _: &mut Scratch) -> Result<()> {
        Ok(())
    }
}

/// Contexts, tokens and differences of some weights of a segment.
struct Buffers {
    /// The first entry of each one's context.
    firsts: [u16; CHUNK],
    tokens: [u8; CHUNK],
    differences: [u16; CHUNK],
}

impl Buffers {
    const fn new() -> Self {
        Self { firsts: [0; CHUNK], tokens: [0; CHUNK], differences: [0; CHUNK] }
    }
}

/// A segment that is being decoded.
struct OpenSegment<'a> {
    states: [u64; STATES],
    words: &'a [[u8; 4]],
    raw: &'a [u8],
    /// The next word.
    word: usize,
    /// The next raw bit.
    bit: usize,
}

impl<'a> OpenSegment<'a> {
    /// Begins one; or what is wrong with it.
    fn new(bytes: &'a [u8]) -> Result<Self, &'static str> {
        const HEAD: usize = MIN_SEGMENT_BYTES as usize;
        let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or("a segment ends early")?;
        let (count, states) = head.split_first_chunk().expect("the head is longer");
        let mut states = states.as_chunks().0.iter().map(|state| u64::from_le_bytes(*state));
        let states = std::array::from_fn(|_| states.next().unwrap_or_default());
        let count = u32::from_le_bytes(*count) as usize;
        let (words, _) = rest.as_chunks();
        let (words, _) = words.split_at_checked(count).ok_or("a segment has fewer words")?;
        if states.iter().any(|state| !(LEAST..LEAST << WORD_BITS).contains(state)) {
            return Err("a state is not within 2^31 to 2^63");
        }
        Ok(Self { states, words, raw: &rest[4 * count..], word: 0, bit: 0 })
    }

    /// Decodes the tokens of some weights.
    #[inline]
    fn tokens(&mut self, entries: &[Entry; ENTRIES], buffers: &mut Buffers, count: usize) {
        let mut states = self.states;
        let mut next = self.word;
        let (firsts, rest) = buffers.firsts[..count].as_chunks::<UNIT>();
        let (tokens, last) = buffers.tokens[..count].as_chunks_mut::<UNIT>();
        for (firsts, tokens) in firsts.iter().zip(tokens) {
            for (at, (first, token)) in firsts.iter().zip(tokens).enumerate() {
                *token = step(entries, *first, &mut states[at % STATES]);
            }
            next += match self.words.get(next..next + STATES).and_then(<[_]>::first_chunk) {
                Some(words) => refill(&mut states, words),
                None => refill(&mut states, &last_words(self.words, next)),
            };
        }
        for (at, (first, token)) in rest.iter().zip(last).enumerate() {
            *token = step(entries, *first, &mut states[at % STATES]);
        }
        if !rest.is_empty() {
            next += refill(&mut states, &last_words(self.words, next));
        }
        (self.states, self.word) = (states, next);
    }

    /// The differences of tokens; or what is wrong.
    #[inline]
    fn differences(&mut self, buffers: &mut Buffers, count: usize) -> Result<(), &'static str> {
        let Buffers { tokens, differences, .. } = buffers;
        tokens[count..].fill(0);
        for (difference, token) in differences.iter_mut().zip(tokens.iter()) {
            *difference = u16::from(*token);
        }
        let mut is_none = false;
        let parts = tokens.as_chunks::<LOOKED_AT>().0.iter();
        for (tokens, differences) in parts.zip(differences.as_chunks_mut::<LOOKED_AT>().0) {
            let mut rest = with_raw_bits(tokens);
            while rest != 0 {
                let at = rest.trailing_zeros() as usize % LOOKED_AT;
                rest &= rest - 1;
                let kind = KINDS[usize::from(tokens[at]) % KINDS.len()];
                is_none |= kind.is_none;
                let raw = self.peek() & ((1 << kind.bits) - 1);
                self.bit += usize::from(kind.bits);
                differences[at] = kind.least + raw as u16;
            }
        }
        if is_none { Err("a weight has a context without tokens") } else { Ok(()) }
    }

    /// The next raw bits, and zeros after the last one.
    #[inline]
    fn peek(&self) -> u64 {
        let at = self.bit / 8;
        match self.raw.get(at..at + 8).and_then(<[_]>::first_chunk) {
            Some(bytes) => u64::from_le_bytes(*bytes) >> (self.bit % 8),
            None => peek_at_end(self.raw, self.bit),
        }
    }

    /// Checks that no more than it has was decoded; or what is wrong.
    fn check(&self) -> Result<(), &'static str> {
        let is_within = self.word <= self.words.len() && self.bit <= 8 * self.raw.len();
        if is_within { Ok(()) } else { Err("a segment ends before its weights") }
    }

    /// Checks that all of it was decoded; or what is wrong.
    fn finish(&self) -> Result<(), &'static str> {
        if self.word != self.words.len() || self.states != [LEAST; STATES] {
            return Err("the states of a segment do not end with its words");
        }
        let rest = 8 * self.raw.len() - self.bit;
        if rest >= 32 || !is_zero_from(self.raw, self.bit) {
            return Err("the raw bits of a segment do not end with it");
        }
        Ok(())
    }
}

/// The next token of a state, in the context with this first entry.
#[inline]
fn step(entries: &[Entry; ENTRIES], first: u16, state: &mut u64) -> u8 {
    let slot = *state as usize & (TOTAL as usize - 1);
    let entry = entries[(usize::from(first) | slot) % ENTRIES];
    let distance = entry >> DISTANCE_SHIFT & (TOTAL as Entry - 1);
    *state = u64::from(entry >> FREQUENCY_SHIFT) * (*state >> FREQUENCY_BITS) + u64::from(distance);
    entry as u8
}

/// Adds the next words to those states that are small, without a branch; the number of words taken.
#[inline]
fn refill(states: &mut [u64; STATES], words: &[[u8; 4]; STATES]) -> usize {
    let mut taken = 0;
    for state in states {
        let word = u32::from_le_bytes(words[taken % STATES]);
        let is_small = *state < LEAST;
        let filled = *state << WORD_BITS | u64::from(word);
        *state = if is_small { filled } else { *state };
        taken += usize::from(is_small);
    }
    taken
}

/// Words of which some may be after the last one: zeros, with which the states do not end as they
/// must.
#[cold]
fn last_words(words: &[[u8; 4]], next: usize) -> [[u8; 4]; STATES] {
    std::array::from_fn(|at| words.get(next + at).copied().unwrap_or_default())
}

/// The arrays of a tensor, and its base, in memory.
#[derive(Clone, Copy, Debug)]
pub struct WithBase<'m> {
    /// Codebook, records, bitstream.
    pub arrays: [&'m [u8]; 3],
    /// The weights of the base, little-endian.
    pub base: &'m [u8],
}

impl<'m> ReadArrays<'m> for WithBase<'m> {
    fn read(&self, array: usize, range: Range<u64>) -> Result<Cow<'m, [u8]>> {
        self.arrays.read(array, range)
    }

    fn base(&self) -> Result<Box<dyn ReadBase + 'm>> {
        Ok(Box::new(self.base))
    }
}

#[doc(hidden)]
impl ReadBase for &[u8] {
    fn read(&self, elements: Range<u64>, out: &mut [u8]) -> Result<()> {
        let bytes = self.get(2 * elements.start as usize..2 * elements.end as usize);
        let bytes = bytes.ok_or_else(|| {
            Error::parameter("the base has fewer weights", "pass all weights of the base")
        })?;
        out.copy_from_slice(bytes);
        Ok(())
    }
}
