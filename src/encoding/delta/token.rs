//! Tokens of differences: each small difference has its own; larger ones with the same highest bits
//! share one.

/// Differences below this one have a token of their own.
const DIRECT: u32 = 64;
/// The highest bit of [`DIRECT`].
const DIRECT_BITS: u32 = DIRECT.trailing_zeros();
/// Bits after the highest one that a token has.
const HIGH_BITS: u32 = 2;
/// Bits of a difference.
const BITS: u32 = u16::BITS;
/// The token before a difference whose own token is not in the code.
pub(super) const ESCAPE: u8 = (DIRECT + ((BITS - DIRECT_BITS) << HIGH_BITS)) as u8;
/// Bits of a token.
pub(super) const TOKEN_BITS: u32 = u8::BITS - 1;
/// The number of tokens.
pub(super) const TOKENS: usize = ESCAPE as usize + 1;

/// All bits set, or none.
#[inline]
const fn ones_if(is_set: bool) -> u16 {
    0u16.wrapping_sub(is_set as u16)
}

/// Maps weights to numbers in the order of their values: negative ones descend.
#[inline]
const fn order(weight: u16) -> u16 {
    weight ^ (ones_if(weight >> 15 != 0) | 0x8000)
}

/// The weight at a place of the order.
#[inline]
const fn weight_at(order: u16) -> u16 {
    order ^ (ones_if(order >> 15 == 0) | 0x8000)
}

/// The difference of a weight from its base: 0, −1, 1, −2, … in the order become 0, 1, 2, 3, …
#[inline]
pub(super) const fn difference(base: u16, weight: u16) -> u16 {
    let signed = order(weight).wrapping_sub(order(base));
    (signed << 1) ^ ones_if(signed >> 15 != 0)
}

/// The weight that differs from its base by this.
#[inline]
pub(super) const fn apply(base: u16, difference: u16) -> u16 {
    let signed = (difference >> 1) ^ ones_if(difference & 1 != 0);
    weight_at(order(base).wrapping_add(signed))
}

/// The token of a difference. A large one and its bits are the float's exponent and mantissa, which
/// LLVM computes for many at once.
#[inline]
pub(super) const fn token(difference: u16) -> u8 {
    const DROPPED_BITS: u32 = f32::MANTISSA_DIGITS - 1 - HIGH_BITS;
    const FIRST: u32 = (DIRECT as f32).to_bits() >> DROPPED_BITS;
    let large =
        DIRECT.wrapping_add(((difference as f32).to_bits() >> DROPPED_BITS).wrapping_sub(FIRST));
    let difference = difference as u32;
    (if difference < DIRECT { difference } else { large }) as u8
}

/// The smallest difference of a token, and the number of raw bits that are added to it.
pub(super) const fn differences_of(token: u8) -> (u16, u32) {
    let token = token as u32;
    if token < DIRECT {
        return (token as u16, 0);
    }
    if token >= ESCAPE as u32 {
        return (0, BITS);
    }
    let highest = ((token - DIRECT) >> HIGH_BITS) + DIRECT_BITS;
    let high = (token - DIRECT) & ((1 << HIGH_BITS) - 1);
    (((1 << HIGH_BITS | high) << (highest - HIGH_BITS)) as u16, highest - HIGH_BITS)
}

/// The differences of a token.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    /// The smallest one.
    pub(super) least: u16,
    /// The number of raw bits that are added to it, and as many bits set.
    pub(super) bits: u8,
    pub(super) mask: u16,
    /// Whether there is no such token.
    pub(super) is_none: bool,
}

/// By token; bytes that are not tokens have an entry too.
pub(super) const KINDS: [Kind; 1 << u8::BITS] = {
    let mut kinds = [Kind { least: 0, bits: 0, mask: 0, is_none: true }; 1 << u8::BITS];
    let mut token = 0;
    while token < TOKENS {
        let (least, bits) = differences_of(token as u8);
        let mask = ((1u32 << bits) - 1) as u16;
        kinds[token] = Kind { least, bits: bits as u8, mask, is_none: false };
        token += 1;
    }
    kinds
};

/// Tokens that [`with_raw_bits`] looks at.
pub(super) const LOOKED_AT: usize = u64::BITS as usize;

/// A bit for each of some tokens: 0 if it stands for itself.
#[inline]
pub(super) fn with_raw_bits(tokens: &[u8; LOOKED_AT]) -> u64 {
    const ONES: u64 = u64::MAX / 0xFF;
    /// Multiplied, the lowest bits of 8 bytes become the highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let bits = |tokens: &[u8; 8]| {
        let own = u64::from_le_bytes(*tokens) >> DIRECT_BITS & ONES;
        own.wrapping_mul(GATHER) >> (u64::BITS - 8)
    };
    let parts = tokens.as_chunks().0.iter().enumerate();
    parts.fold(0, |all, (at, tokens)| all | bits(tokens) << (8 * at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_the_order_differ_by_one() {
        let weight = |value: f32| half::bf16::from_f32(value).to_bits();
        assert_eq!(difference(weight(1.0), weight(1.0)), 0);
        assert_eq!(difference(weight(1.0), 0x3F81), 2);
        assert_eq!(difference(weight(1.0), 0x3F7F), 1);
        assert_eq!(difference(weight(-1.0), 0xBF81), 1);
        assert_eq!(difference(0x0000, 0x8000), 1);
        assert_eq!(difference(0x7FFF, 0xFFFF), 2);
        for weight in 0..=u16::MAX {
            assert_eq!(weight_at(order(weight)), weight);
        }
    }

    #[test]
    fn every_difference_comes_back() {
        for value in 0..=u16::MAX {
            let (least, bits) = differences_of(token(value));
            assert!(value >= least && u32::from(value - least) < 1 << bits, "{value}");
            let kind = KINDS[usize::from(token(value))];
            assert_eq!((kind.least, u32::from(kind.bits), kind.is_none), (least, bits, false));
            for base in [0, 1, 0x3F80, 0x7FFF, 0x8000, 0xBF80, 0xFFFF] {
                assert_eq!(difference(base, apply(base, value)), value);
            }
        }
        assert_eq!(differences_of(ESCAPE), (0, 16));
        assert!(KINDS[TOKENS..].iter().all(|kind| kind.is_none));
    }

    #[test]
    fn tokens_with_raw_bits_are_found() {
        for at in 0..LOOKED_AT {
            let mut tokens = [DIRECT as u8 - 1; LOOKED_AT];
            assert_eq!(with_raw_bits(&tokens), 0);
            tokens[at] = if at % 2 == 0 { DIRECT as u8 } else { ESCAPE };
            assert_eq!(with_raw_bits(&tokens), 1 << at);
        }
    }
}
