//! Splits BF16 weights into exponents and plane, and joins them again.
//!
//! ```text
//! weight, little-endian u16   s eeeeeeee mmmmmmm
//! exponent byte                 eeeeeeee           entropy-coded
//! plane byte                  s          mmmmmmm   kept as it is
//! ```
//!
//! Both functions compile to SSE2 code on plain x86-64 (16 weights per iteration) and touch each
//! byte once. LLVM vectorises loops over zipped chunks with one weight per iteration, but not loops
//! that index.

/// The exponent of a weight.
#[inline]
pub const fn exponent(weight: u16) -> u8 {
    (weight >> 7) as u8
}

/// The plane byte of a weight: its sign above its mantissa.
#[inline]
pub const fn plane_byte(weight: u16) -> u8 {
    ((weight >> 8) & 0x80) as u8 | (weight & 0x7F) as u8
}

/// The weight with this exponent and plane byte.
#[inline]
pub const fn weight(exponent: u8, plane_byte: u8) -> u16 {
    let plane = plane_byte as u16;
    ((plane & 0x80) << 8) | ((exponent as u16) << 7) | (plane & 0x7F)
}

/// Splits `n` little-endian weights (`2n` bytes) into `n` exponents and `n` plane bytes.
///
/// # Panics
/// If the three lengths disagree.
#[inline]
pub fn split(weights: &[u8], exponents: &mut [u8], plane: &mut [u8]) {
    let (weights, rest) = weights.as_chunks::<2>();
    assert!(rest.is_empty() && weights.len() == exponents.len() && weights.len() == plane.len());
    for ((bytes, exponent_out), plane_out) in weights.iter().zip(exponents).zip(plane) {
        let word = u16::from_le_bytes(*bytes);
        *exponent_out = exponent(word);
        *plane_out = plane_byte(word);
    }
}

/// Merges `n` exponents and `n` plane bytes into `n` little-endian weights (`2n` bytes).
///
/// # Panics
/// If the three lengths disagree.
#[inline]
pub fn merge(exponents: &[u8], plane: &[u8], weights: &mut [u8]) {
    let (weights, rest) = weights.as_chunks_mut::<2>();
    assert!(rest.is_empty() && weights.len() == exponents.len() && weights.len() == plane.len());
    for ((bytes, &exponent), &plane) in weights.iter_mut().zip(exponents).zip(plane) {
        *bytes = weight(exponent, plane).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_comes_back() {
        let weights: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let (mut exponents, mut plane) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        split(&weights, &mut exponents, &mut plane);
        assert_eq!((exponents[0x3F80], plane[0x3F80]), (127, 0));
        assert_eq!((exponents[0x8001], plane[0x8001]), (0, 0x81));
        let mut merged = vec![0; 1 << 17];
        merge(&exponents, &plane, &mut merged);
        assert_eq!(merged, weights);
    }
}
