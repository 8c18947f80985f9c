//! The delta encoding (6.6): differences from another tensor.

use crate::code::number;
use crate::record::{Field, slice};
use crate::{Result, require};

const ESCAPE: u8 = 104;
const STATES: usize = 4;
const MIN_STATE: u64 = 1 << 31;

/// Tokens of a context, each with its frequency and its start (*Codebook*).
type Context = Vec<(u8, u64, u64)>;

/// Weights of each segment but the last (*Segments*).
fn segment_elements(shape: &[u64]) -> u64 {
    let first = if shape.len() > 3 { 1 } else { shape.len().saturating_sub(1) };
    match shape[first..].iter().fold(32u64, |rows, &size| rows.saturating_mul(size)) {
        rows if rows > 1 << 23 => 1 << 18,
        rows => (1u64 << 18).next_multiple_of(rows),
    }
}

/// Whether a tensor may have arrays of these lengths (6.6).
pub(crate) fn has_lengths(shape: &[u64], elements: u64, lengths: [u64; 3]) -> bool {
    let [codebook, records, bitstream] = lengths;
    let segments = elements.div_ceil(segment_elements(shape));
    let long = bitstream % 4 == 0 && bitstream >= 36 * segments;
    elements > 0 && (6..=5058).contains(&codebook) && records == 8 * (segments + 1) && long
}

/// `top`, and the contexts (*Codebook*).
fn read_codebook(mut bytes: &[u8]) -> Result<(u8, Vec<Context>)> {
    let (top, count) = (u8::read(&mut bytes)?, u8::read(&mut bytes)?);
    require((1..=16).contains(&count), "6.6: count of contexts")?;
    let mut contexts = Vec::new();
    for _ in 0..count {
        let (mut context, mut start, mut next) = (Context::new(), 0, 0);
        for _ in 0..u8::read(&mut bytes)? {
            let (token, frequency) = (u8::read(&mut bytes)?, u64::from(u16::read(&mut bytes)?));
            require((next..=ESCAPE).contains(&token), "6.6: a token")?;
            require((1..=2048).contains(&frequency), "6.6: a frequency")?;
            context.push((token, frequency, start));
            (start, next) = (start + frequency, token + 1);
        }
        require(context.is_empty() || start == 2048, "6.6: sum of frequencies")?;
        contexts.push(context);
    }
    require(bytes.is_empty(), "6.6: bytes after the last context")?;
    Ok((top, contexts))
}

/// The number of a weight in the order of all (*Differences*).
fn order(weight: u16) -> u16 {
    if weight < 0x8000 { weight ^ 0x8000 } else { !weight }
}

/// The weight of a base and a difference (*Differences*).
fn weight(base: u16, z: u16) -> u16 {
    let d = if z.is_multiple_of(2) { z / 2 } else { (z / 2 + 1).wrapping_neg() };
    let sum = order(base).wrapping_add(d);
    if sum < 0x8000 { !sum } else { sum ^ 0x8000 }
}

/// The difference of a token, and its raw bits (*Tokens*).
fn difference(token: u8, raw: &[u8], bit: &mut u64) -> Result<u16> {
    let (first, bits) = match u32::from(token) {
        token @ 0..64 => (token, 0),
        token @ 64..104 => {
            let n = (token - 64) / 4 + 6;
            ((1 << n) + (((token - 64) % 4) << (n - 2)), n - 2)
        }
        _ => (0, 16),
    };
    let value = number(raw, *bit, bits.into())?;
    *bit += u64::from(bits);
    Ok((u64::from(first) + value) as u16)
}

/// Decodes a segment: the weights of the base become others (*Decoding*).
fn decode_segment(
    mut bytes: &[u8],
    (top, contexts): &(u8, Vec<Context>),
    weights: &mut [[u8; 2]],
) -> Result<()> {
    let count = u32::read(&mut bytes)?;
    let mut states = <[u64; STATES]>::read(&mut bytes)?;
    let right = states.iter().all(|state| (MIN_STATE..MIN_STATE << 32).contains(state));
    require(right, "6.6: a state at the start")?;
    let mut words = slice(bytes, 0, 4 * u64::from(count))?;
    let raw = &bytes[words.len()..];
    let mut bit = 0;
    for unit in weights.chunks_mut(8) {
        for (i, bytes) in unit.iter_mut().enumerate() {
            let base = u16::from_le_bytes(*bytes);
            let context = top.saturating_sub((base >> 7) as u8).min(contexts.len() as u8 - 1);
            let state = &mut states[i % STATES];
            let slot = *state % 2048;
            let found = contexts[usize::from(context)].iter().rfind(|token| token.2 <= slot);
            require(found.is_some(), "6.6: a context without tokens")?;
            let (token, frequency, start) = *found.unwrap_or(&(0, 0, 0));
            *state = frequency * (*state / 2048) + slot - start;
            *bytes = weight(base, difference(token, raw, &mut bit)?).to_le_bytes();
        }
        for state in states.iter_mut().filter(|state| **state < MIN_STATE) {
            *state = *state << 32 | u64::from(u32::read(&mut words)?);
        }
    }
    require(states == [MIN_STATE; STATES] && words.is_empty(), "6.6: end of the states")?;
    let rest = 8 * raw.len() as u64 - bit;
    require(rest < 32 && number(raw, bit, rest)? == 0, "6.6: end of the raw bits")
}

/// Decodes a tensor of this shape: `arrays` are those of section 6, in its order; `base` are the
/// weights of its base, little-endian. Returns the weights, little-endian.
///
/// # Errors
/// Corrupt where a rule of *Decoding* is broken, or the length of an array is wrong.
pub fn decode_delta(arrays: [&[u8]; 3], base: &[u8], shape: &[u64]) -> Result<Vec<u8>> {
    let [codebook, mut records, bitstream] = arrays;
    let lengths = arrays.map(|array| array.len() as u64);
    let elements = base.len() as u64 / 2;
    require(has_lengths(shape, elements, lengths), "6.6: length of an array")?;
    let code = read_codebook(codebook)?;
    let mut weights = base.as_chunks::<2>().0.to_vec();
    let mut start = u64::read(&mut records)?;
    require(start == 0, "6.6: the first record")?;
    for weights in weights.chunks_mut(segment_elements(shape) as usize) {
        let end = u64::read(&mut records)?;
        let right = end % 4 == 0 && end.checked_sub(start).is_some_and(|bytes| bytes >= 36);
        require(right, "6.6: a record")?;
        decode_segment(slice(bitstream, start, end - start)?, &code, weights)?;
        start = end;
    }
    require(start == bitstream.len() as u64, "6.6: the last record")?;
    Ok(weights.into_flattened())
}
