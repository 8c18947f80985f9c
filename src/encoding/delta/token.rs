//! Differences as tokens: small ones have one each, larger ones share one by their highest bits.

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
/// The number of tokens.
pub(super) const TOKENS: usize = ESCAPE as usize + 1;

/// Maps weights to numbers in the order of their values: negative ones descend.
#[inline]
const fn order(weight: u16) -> u16 {
    weight ^ ((weight as i16 >> 15) as u16 | 0x8000)
}

/// The weight at a place of the order.
#[inline]
const fn weight_at(order: u16) -> u16 {
    order ^ (!(order as i16 >> 15) as u16 | 0x8000)
}

/// The difference of a weight from its base: 0, −1, 1, −2, … in the order become 0, 1, 2, 3, …
#[inline]
pub(super) const fn difference(base: u16, weight: u16) -> u16 {
    let signed = order(weight).wrapping_sub(order(base)) as i16;
    ((signed << 1) ^ (signed >> 15)) as u16
}

/// The weight that differs from its base by this.
#[inline]
pub(super) const fn apply(base: u16, difference: u16) -> u16 {
    let signed = (difference >> 1) ^ 0u16.wrapping_sub(difference & 1);
    weight_at(order(base).wrapping_add(signed))
}

/// The token of a difference.
#[inline]
pub(super) const fn token(difference: u16) -> u8 {
    let difference = difference as u32;
    if difference < DIRECT {
        return difference as u8;
    }
    let highest = difference.ilog2();
    let high = difference >> (highest - HIGH_BITS) & ((1 << HIGH_BITS) - 1);
    (DIRECT + ((highest - DIRECT_BITS) << HIGH_BITS) + high) as u8
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

/// Whether tokens of a byte each all stand for themselves; a bit is set where one does not.
#[inline]
pub(super) const fn with_raw_bits(tokens: [u8; 8]) -> u64 {
    u64::from_le_bytes(tokens) & u64::from_le_bytes([DIRECT as u8; 8])
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
            assert_eq!(with_raw_bits([token(value); 8]) != 0, bits > 0);
            for base in [0, 1, 0x3F80, 0x7FFF, 0x8000, 0xBF80, 0xFFFF] {
                assert_eq!(difference(base, apply(base, value)), value);
            }
        }
        assert_eq!(differences_of(ESCAPE), (0, 16));
        assert_eq!(with_raw_bits([ESCAPE; 8]).count_ones(), 8);
    }
}
