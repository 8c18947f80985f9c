//! Decodes segments: states give tokens, tokens give differences, and these are added to the base.

use std::{borrow::Cow, ops::Range};

use super::{
    codebook::{Codebook, FREQUENCY_BITS, MAX_CONTEXTS, TOTAL, context},
    encode::{MIN_STATE, STATES, UNIT, WORD_BITS},
    sizes::{BITSTREAM, CODEBOOK, DeltaSizes, MIN_SEGMENT_BYTES, RECORD_BYTES, RECORDS},
    token::{KINDS, LOOKED_AT, apply, with_raw_bits},
};
use crate::{
    Error, Result, bf16,
    encoding::stored::{
        CodedSizes, DecodeArrays, ReadArrays, ReadBase, SECTION_BITSTREAM, SECTION_CODEBOOK,
        SECTION_INDEX, Scratch, check_range,
    },
    huffman::bits::{PEEK_BITS, is_zero_from, peek_at_end},
    parallel,
};

/// Weights whose contexts and tokens are in buffers at a time: these fit the first-level cache.
const CHUNK: usize = 1024;
/// Weights that are decoded at a time if they are not wanted: whole units.
const SKIPPED_ELEMENTS: u64 = 1 << 15;
/// Entries of all contexts, and more: any `u16` names one, which spares a check.
const ENTRIES: usize = 1 << u16::BITS;
const _: () = assert!(MAX_CONTEXTS << FREQUENCY_BITS <= ENTRIES);
/// Tokens whose raw bits one load has.
const RAW_TOKENS: usize = PEEK_BITS / u16::BITS as usize;
/// The token of a context without tokens.
const NONE: u8 = u8::MAX >> 1;

/// A state's next token and its change, by context and the state's lowest bits.
struct Entries {
    /// The token's frequency, and the distance from its first bits to these.
    changes: Box<[(u16, u16); ENTRIES]>,
    tokens: Box<[u8; ENTRIES]>,
}

impl Entries {
    fn new(codebook: &Codebook) -> Self {
        let mut changes = boxed((0, 0));
        let mut tokens = boxed(NONE);
        for (context, token, frequency, start) in codebook.entries() {
            let first = context << FREQUENCY_BITS | usize::from(start);
            for (at, distance) in (first..).zip(0..frequency) {
                (changes[at], tokens[at]) = ((frequency, distance), token);
            }
        }
        Self { changes, tokens }
    }
}

fn boxed<T: Copy>(entry: T) -> Box<[T; ENTRIES]> {
    vec![entry; ENTRIES].try_into().unwrap_or_else(|_| unreachable!("as many entries"))
}

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

    /// Two segments, which are decoded side by side.
    fn grain(&self) -> u64 {
        2 * size_of::<u16>() as u64 * self.segment_elements()
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
    entries: Entries,
    base: Box<dyn ReadBase + 'm>,
}

impl<'m> DeltaDecoder<'m> {
    pub(super) fn new(
        sizes: DeltaSizes,
        codebook: &Codebook,
        base: Box<dyn ReadBase + 'm>,
    ) -> Self {
        let entries = Entries::new(codebook);
        Self { sizes, top: codebook.top(), last: codebook.last(), entries, base }
    }

    /// Decodes the wanted weights of a segment, to `out`.
    fn part(
        &self,
        mut segment: OpenSegment<'_>,
        all: &Range<u64>,
        wanted: &Range<u64>,
        scratch: &mut Vec<u8>,
        mut out: &mut [u8],
    ) -> Result<()> {
        let mut decode = |part: Range<u64>, out: &mut [u8]| {
            self.base.read(part, out)?;
            self.apply([&mut segment], [out])
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
        if wanted.end == all.end { segment.finish() } else { Ok(()) }
    }

    /// Where segments from this one on lie in the bitstream.
    fn places<const N: usize>(
        &self,
        arrays: &dyn ReadArrays<'_>,
        first: u64,
        index: &mut Vec<u8>,
    ) -> Result<[Range<u64>; N]> {
        let range = first * RECORD_BYTES..(first + N as u64 + 1) * RECORD_BYTES;
        let records = arrays.read_with(RECORDS, range, index)?.as_chunks().0;
        let mut places = [const { 0..0 }; N];
        for ((segment, place), at) in (first..).zip(&mut places).zip(0..) {
            *place = self.sizes.place(segment, &[records[at], records[at + 1]])?;
        }
        Ok(places)
    }

    /// Decodes two segments that follow each other, to `out`.
    fn pair(
        &self,
        mut pair: [OpenSegment<'_>; 2],
        all: &[Range<u64>; 2],
        out: &mut [u8],
    ) -> Result<()> {
        self.base.read(all[0].start..all[1].end, out)?;
        let [first, second] = &mut pair;
        let (out, last) = out.split_at_mut(2 * (all[0].end - all[0].start) as usize);
        // The last segment of a tensor may be shorter.
        let together = out.len().min(last.len()) / (2 * CHUNK) * (2 * CHUNK);
        let (out, rest) = out.split_at_mut(together);
        let (last, last_rest) = last.split_at_mut(together);
        self.apply([first, second], [out, last])?;
        self.apply([first], [rest])?;
        self.apply([second], [last_rest])?;
        pair.iter().try_for_each(OpenSegment::finish)
    }

    /// Turns weights of the base into those that differ by the next tokens of their segments: as
    /// many of each segment. All but the last ones of a segment must be whole units.
    ///
    /// Q: Why is this fast? A state waits for its entry, and for the words that all states of its
    /// segment took. A core computes the states of two segments meanwhile.
    fn apply<const N: usize>(
        &self,
        mut segments: [&mut OpenSegment<'_>; N],
        mut weights: [&mut [u8]; N],
    ) -> Result<()> {
        let mut buffers = [const { Buffers::new() }; N];
        while !weights[0].is_empty() {
            let bytes = weights[0].len().min(2 * CHUNK);
            let mut own = weights.each_mut().map(|weights| {
                weights.split_off_mut(..bytes).expect("as many").as_chunks_mut::<2>().0
            });
            for (buffers, weights) in buffers.iter_mut().zip(&own) {
                for (first, weight) in buffers.firsts.iter_mut().zip(weights.iter()) {
                    let exponent = bf16::exponent(u16::from_le_bytes(*weight));
                    *first = u16::from(context(self.top, self.last, exponent)) << FREQUENCY_BITS;
                }
            }
            tokens(&mut segments, &self.entries, &mut buffers, bytes / 2);
            for ((segment, buffers), weights) in segments.iter_mut().zip(&mut buffers).zip(&mut own)
            {
                segment.differences(buffers, bytes / 2)?;
                segment.check()?;
                for (weight, difference) in weights.iter_mut().zip(&buffers.differences) {
                    *weight = apply(u16::from_le_bytes(*weight), *difference).to_le_bytes();
                }
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
        let Scratch { index, bitstream, plane, .. } = scratch;
        let each = self.sizes.segment_elements();
        let mut segments = elements.start / each..elements.end.div_ceil(each);
        while let Some(segment) = segments.next() {
            let all = self.sizes.segment(segment);
            let wanted = elements.start.max(all.start)..elements.end.min(all.end);
            let next = segments.clone().next().map(|next| self.sizes.segment(next));
            if let Some(next) = next.filter(|next| wanted == all && next.end <= elements.end) {
                segments.next();
                let mine = out.split_off_mut(..2 * (next.end - all.start) as usize);
                let places = self.places::<2>(arrays, segment, index)?;
                let read = places[0].start..places[1].end;
                let bytes = arrays.read_with(BITSTREAM, read.clone(), bitstream)?;
                let (first, second) = bytes.split_at((places[1].start - read.start) as usize);
                let pair = [
                    OpenSegment::new(first, read.start)?,
                    OpenSegment::new(second, places[1].start)?,
                ];
                self.pair(pair, &[all, next], mine.expect("room for all"))?;
            } else {
                let mine = out.split_off_mut(..2 * (wanted.end - wanted.start) as usize);
                let [place] = self.places(arrays, segment, index)?;
                let bytes = arrays.read_with(BITSTREAM, place.clone(), bitstream)?;
                let segment = OpenSegment::new(bytes, place.start)?;
                self.part(segment, &all, &wanted, plane, mine.expect("room for all"))?;
            }
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
    /// Its place in the bitstream.
    at: u64,
    states: [u64; STATES],
    words: &'a [[u8; 4]],
    raw: &'a [u8],
    /// The next word.
    word: usize,
    /// The next raw bit.
    bit: usize,
}

impl<'a> OpenSegment<'a> {
    /// Begins the one at this place of the bitstream.
    fn new(bytes: &'a [u8], at: u64) -> Result<Self> {
        const HEAD: usize = MIN_SEGMENT_BYTES as usize;
        let corrupt = |problem| corrupt(at, problem);
        let head = bytes.split_first_chunk::<HEAD>();
        let (head, rest) = head.ok_or_else(|| corrupt("a segment ends early"))?;
        let (count, states) = head.split_first_chunk().expect("the head is longer");
        let mut states = states.as_chunks().0.iter().map(|state| u64::from_le_bytes(*state));
        let states = std::array::from_fn(|_| states.next().unwrap_or_default());
        let count = u32::from_le_bytes(*count) as usize;
        let (words, _) = rest.as_chunks();
        let words = words.split_at_checked(count);
        let (words, _) = words.ok_or_else(|| corrupt("a segment has fewer words"))?;
        let is_within = |state| (MIN_STATE..MIN_STATE << WORD_BITS).contains(state);
        let are_within = states.iter().all(is_within);
        Error::unless(are_within, || corrupt("a state is not within 2^31 to 2^63"))?;
        Ok(Self { at, states, words, raw: &rest[4 * count..], word: 0, bit: 0 })
    }

    /// The differences of tokens.
    #[inline]
    fn differences(&mut self, buffers: &mut Buffers, count: usize) -> Result<()> {
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
                let mut raw = self.peek();
                for _ in 0..RAW_TOKENS {
                    let at = rest.trailing_zeros() as usize % LOOKED_AT;
                    let kind = KINDS[usize::from(tokens[at])];
                    is_none |= kind.is_none;
                    differences[at] = kind.least + (raw as u16 & kind.mask);
                    raw >>= kind.bits % u64::BITS as u8;
                    self.bit += usize::from(kind.bits);
                    rest &= rest - 1;
                    if rest == 0 {
                        break;
                    }
                }
            }
        }
        Error::unless(!is_none, || corrupt(self.at, "a weight has a context without tokens"))
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

    /// Checks that no more than it has was decoded.
    fn check(&self) -> Result<()> {
        let is_within = self.word <= self.words.len() && self.bit <= 8 * self.raw.len();
        Error::unless(is_within, || corrupt(self.at, "a segment ends before its weights"))
    }

    /// Checks that all of it was decoded.
    fn finish(&self) -> Result<()> {
        let ends = self.word == self.words.len() && self.states == [MIN_STATE; STATES];
        Error::unless(ends, || {
            corrupt(self.at, "the states of a segment do not end with its words")
        })?;
        let rest = 8 * self.raw.len() - self.bit;
        let ends = rest < 32 && is_zero_from(self.raw, self.bit);
        Error::unless(ends, || corrupt(self.at, "the raw bits of a segment do not end with it"))
    }
}

fn corrupt(at: u64, problem: &'static str) -> Error {
    Error::corrupt("bitstream", at, problem)
}

/// Decodes the tokens of some weights of segments, as many of each.
#[inline]
fn tokens<const N: usize>(
    segments: &mut [&mut OpenSegment<'_>; N],
    entries: &Entries,
    buffers: &mut [Buffers; N],
    count: usize,
) {
    let mut states = segments.each_ref().map(|segment| segment.states);
    let mut next = segments.each_ref().map(|segment| segment.word);
    let words = segments.each_ref().map(|segment| segment.words);
    let (units, rest) = (count / UNIT, count % UNIT);
    for unit in 0..units {
        for own in 0..N {
            let Buffers { firsts, tokens, .. } = &mut buffers[own];
            let firsts = &firsts.as_chunks::<UNIT>().0[unit % (CHUNK / UNIT)];
            let tokens = &mut tokens.as_chunks_mut::<UNIT>().0[unit % (CHUNK / UNIT)];
            for (at, (first, token)) in firsts.iter().zip(tokens).enumerate() {
                *token = step(entries, *first, &mut states[own][at % STATES]);
            }
            let at = next[own];
            next[own] += match words[own].get(at..at + STATES).and_then(<[_]>::first_chunk) {
                Some(words) => refill(&mut states[own], words),
                None => refill(&mut states[own], &last_words(words[own], at)),
            };
        }
    }
    for own in 0..if rest > 0 { N } else { 0 } {
        let Buffers { firsts, tokens, .. } = &mut buffers[own];
        let last = UNIT * units..count;
        for (at, (first, token)) in firsts[last.clone()].iter().zip(&mut tokens[last]).enumerate() {
            *token = step(entries, *first, &mut states[own][at % STATES]);
        }
        next[own] += refill(&mut states[own], &last_words(words[own], next[own]));
    }
    for ((segment, states), word) in segments.iter_mut().zip(states).zip(next) {
        (segment.states, segment.word) = (states, word);
    }
}

/// The next token of a state, in the context with this first entry.
#[inline]
fn step(entries: &Entries, first: u16, state: &mut u64) -> u8 {
    let slot = *state as u16 & (TOTAL as u16 - 1);
    let at = usize::from(first | slot);
    let (frequency, distance) = entries.changes[at];
    *state = u64::from(frequency) * (*state >> FREQUENCY_BITS) + u64::from(distance);
    entries.tokens[at]
}

/// Adds the next words to those states that are small, without a branch; the number of words taken.
#[inline]
fn refill(states: &mut [u64; STATES], words: &[[u8; 4]; STATES]) -> usize {
    let mut taken = 0;
    for state in states {
        let word = u32::from_le_bytes(words[taken % STATES]);
        let is_small = *state < MIN_STATE;
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
