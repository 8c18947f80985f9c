//! The float encoding (6.5): tile for other floats than BF16.

use crate::code::number;
use crate::tile::{array_lengths, decode};
use crate::{Result, require};

/// How a float is split: bytes, and bits of its exponent and of what is kept (*Split*).
pub(crate) struct Split {
    bytes: u64,
    exponent: u64,
    pub(crate) kept: u64,
}

impl Split {
    /// The split of a dtype, by its id, with so many zero bits.
    pub(crate) fn new(dtype: u32, zero_bits: u64) -> Result<Self> {
        let (bytes, exponent, allowed): (_, _, &[u64]) = match dtype {
            7 => (1, 5, &[0]),
            8 => (1, 4, &[0]),
            14 => (2, 5, &[0]),
            15 => (2, 8, &[4]),
            18 => (4, 8, &[0, 13, 16]),
            _ => (1, 0, &[]),
        };
        require(allowed.contains(&zero_bits), "6.5: dtype or zero_bits")?;
        Ok(Self { bytes, exponent, kept: 8 * bytes - exponent - zero_bits })
    }

    /// The weight of an exponent and kept bits, little-endian; four bytes, of which the first ones
    /// count.
    fn weight(&self, exponent: u8, kept: u64) -> [u8; 4] {
        let mantissa = 8 * self.bytes - 1 - self.exponent;
        let (sign, rest) = (kept >> (self.kept - 1), kept % (1 << (self.kept - 1)));
        let low = rest << (mantissa + 1 - self.kept);
        ((sign << (8 * self.bytes - 1) | u64::from(exponent) << mantissa | low) as u32)
            .to_le_bytes()
    }
}

/// Decodes a tensor of so many elements of a dtype, by its id: `arrays` and `parameters` are those
/// of section 6, in its order. Returns the weights, little-endian.
///
/// # Errors
/// Corrupt where a rule of *Decoding* is broken, or a parameter or the length of an array is wrong.
pub fn decode_float(
    arrays: [&[u8]; 4],
    parameters: [u64; 4],
    dtype: u32,
    elements: u64,
) -> Result<Vec<u8>> {
    let [tile @ .., zero_bits] = parameters;
    let split = Split::new(dtype, zero_bits)?;
    let lengths = array_lengths(arrays[0].len() as u64, elements, tile, split.kept)?;
    require(arrays.map(|array| array.len() as u64) == lengths, "6.4: length of an array")?;
    let mut weights = vec![0; (split.bytes * elements) as usize];
    decode(arrays, tile, elements, |unit, exponents| {
        // The byte after those of the units before.
        let first = (unit.plane * split.kept).next_multiple_of(8);
        for (i, &exponent) in (0..).zip(exponents) {
            require(u64::from(exponent) < 1 << split.exponent, "6.5: exponent")?;
            let kept = number(arrays[3], first + split.kept * i, split.kept)?;
            let at = (split.bytes * (unit.element + i)) as usize;
            let bytes = split.bytes as usize;
            weights[at..at + bytes].copy_from_slice(&split.weight(exponent, kept)[..bytes]);
        }
        Ok(())
    })?;
    Ok(weights)
}
