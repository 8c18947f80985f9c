//! Floats as bits: how a float of each dtype is split into its exponent, which is coded, and its
//! kept bits, which are stored as they are (spec/format.md, section 6.5).
//!
//! ```text
//! F8_E4M3  s eeee mmm                              kept bits: s mmm
//! F16      s eeeee mmmmmmmmmm                                 s mmmmmmmmmm
//! F32      s eeeeeeee mmmmmmm 0000000000000000                s mmmmmmm      (16 zero bits)
//! ```
//! BF16 in `tile` has a split too, that of [`bf16`](crate::bf16).

use crate::Dtype;

/// Weights of a unit, whose kept bits are packed together.
pub(crate) const UNIT: usize = 8;
/// Room for the kept bits of a unit, of any split.
pub(crate) const MAX_KEPT_BYTES: usize = 24;
/// Room for the weights of a unit, of any dtype.
pub(crate) const MAX_UNIT_BYTES: usize = 4 * UNIT;

/// How a float is split. Its mantissa ends with zero bits, as many as are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FloatSplit {
    bytes: u8,
    exponent_bits: u8,
    kept_bits: u8,
}

/// The splits of each dtype, those with the most zero bits first.
const SPLITS: [(Dtype, &[FloatSplit]); 5] = [
    (Dtype::F8_E4M3, &[E4m3::SPLIT]),
    (Dtype::F8_E5M2, &[E5m2::SPLIT]),
    (Dtype::F16, &[F16::SPLIT]),
    (Dtype::BF16, &[Bf16OfE4m3::SPLIT]),
    (Dtype::F32, &[F32OfBf16::SPLIT, F32OfF16::SPLIT, F32::SPLIT]),
];

impl FloatSplit {
    /// The split of BF16 in `tile`: no zero bits.
    pub const BF16: Self = Bf16::SPLIT;

    const fn new(bytes: u8, exponent_bits: u8, kept_bits: u8) -> Self {
        Self { bytes, exponent_bits, kept_bits }
    }

    /// The splits that `float` allows for a dtype, those with the most zero bits first; none for a
    /// dtype that it does not store.
    pub fn all_of(dtype: Dtype) -> &'static [Self] {
        SPLITS.iter().find(|(of, _)| *of == dtype).map_or(&[], |(_, splits)| splits)
    }

    /// The split of a dtype with so many zero bits, if `float` allows it.
    pub fn of(dtype: Dtype, zero_bits: u64) -> Option<Self> {
        let splits = Self::all_of(dtype).iter();
        splits.copied().find(|split| u64::from(split.zero_bits()) == zero_bits)
    }

    /// The split with the most zero bits that weights allow which together have these bits set.
    pub(crate) fn choose(dtype: Dtype, set_bits: u32) -> Option<Self> {
        let mut splits = Self::all_of(dtype).iter();
        splits.find(|split| set_bits.trailing_zeros() >= split.zero_bits()).copied()
    }

    /// Bytes of a weight.
    pub const fn bytes(self) -> usize {
        self.bytes as usize
    }

    /// Bits of the exponent.
    pub const fn exponent_bits(self) -> u32 {
        self.exponent_bits as u32
    }

    /// Bits of a weight that are stored as they are.
    pub const fn kept_bits(self) -> u32 {
        self.kept_bits as u32
    }

    /// The lowest bits, which are zero in all weights.
    pub const fn zero_bits(self) -> u32 {
        8 * self.bytes as u32 - self.exponent_bits() - self.kept_bits()
    }

    /// Bytes of the plane of so many weights, of which the last ones may be a part of a unit.
    ///
    /// Never overflows for weights that a tensor has: they have more bits than their kept ones.
    pub const fn plane_bytes(self, weights: u64) -> u64 {
        (weights * self.kept_bits as u64).div_ceil(8)
    }

    /// The lowest bit of the exponent.
    const fn mantissa_bits(self) -> u32 {
        self.kept_bits() - 1 + self.zero_bits()
    }

    /// The exponent of a weight.
    pub const fn exponent(self, weight: u32) -> u8 {
        (weight >> self.mantissa_bits() & ((1 << self.exponent_bits) - 1)) as u8
    }

    /// The kept bits of a weight.
    pub const fn kept(self, weight: u32) -> u32 {
        let sign = weight >> (8 * self.bytes as u32 - 1);
        sign << (self.kept_bits - 1) | weight >> self.zero_bits() & self.magnitude()
    }

    /// The weight of an exponent and kept bits.
    pub const fn weight(self, exponent: u8, kept: u32) -> u32 {
        let sign = kept >> (self.kept_bits - 1) << (8 * self.bytes as u32 - 1);
        sign | (exponent as u32) << self.mantissa_bits()
            | (kept & self.magnitude()) << self.zero_bits()
    }

    /// The kept bits except for the sign.
    const fn magnitude(self) -> u32 {
        (1 << (self.kept_bits - 1)) - 1
    }
}

/// Whether exponents of tensors of a dtype are coded, if that makes them smaller.
pub fn is_coded(dtype: Dtype) -> bool {
    dtype == Dtype::BF16 || !FloatSplit::all_of(dtype).is_empty()
}

/// A split that is known when the code is compiled: [`with_float`] finds it.
pub(crate) trait Float {
    const SPLIT: FloatSplit;

    /// The weights of a unit, or the fewer ones that there are, and zeros.
    #[inline]
    fn load(weights: &[u8]) -> [u32; UNIT] {
        let mut words = [0; UNIT];
        let weights = weights.chunks_exact(Self::SPLIT.bytes());
        for (word, weight) in words.iter_mut().zip(weights) {
            *word = Self::word(weight);
        }
        words
    }

    /// The bits of one weight, which has as many bytes as its dtype.
    #[inline]
    fn word(weight: &[u8]) -> u32 {
        let each = Self::SPLIT.bytes();
        let mut bytes = [0; 4];
        bytes[..each].copy_from_slice(&weight[..each]);
        u32::from_le_bytes(bytes)
    }

    /// The weights of a unit as bytes, of which the first ones count.
    #[inline]
    fn store(words: [u32; UNIT]) -> [u8; MAX_UNIT_BYTES] {
        let mut weights = [0; MAX_UNIT_BYTES];
        let bytes = Self::SPLIT.bytes();
        for (weight, word) in weights.chunks_exact_mut(bytes).zip(words) {
            weight.copy_from_slice(&word.to_le_bytes()[..bytes]);
        }
        weights
    }

    /// The weights of a unit as bytes, of which the first ones count: of exponents that the dtype
    /// has, and the bytes of the kept bits.
    #[inline]
    fn join(exponents: [u8; UNIT], packed: &[u8]) -> [u8; MAX_UNIT_BYTES] {
        let split = Self::SPLIT;
        if split.bytes() > 1 {
            let kept = Self::unpack(packed);
            return Self::store(std::array::from_fn(|at| split.weight(exponents[at], kept[at])));
        }
        let sign = 1 << (split.kept_bits() - 1);
        let kept = spread(packed, split.kept_bits());
        let signs = (kept & in_each(8, sign)) << (8 - split.kept_bits());
        let exponents = u64::from_le_bytes(exponents) << split.mantissa_bits();
        let mut weights = [0; MAX_UNIT_BYTES];
        let joined = signs | exponents | kept & in_each(8, sign - 1);
        weights[..UNIT].copy_from_slice(&joined.to_le_bytes());
        weights
    }

    /// The kept bits of a unit as bytes, of which the first ones count.
    #[inline]
    fn pack(words: [u32; UNIT]) -> [u8; MAX_KEPT_BYTES] {
        let bits = Self::SPLIT.kept_bits();
        let kept = words.map(|word| Self::SPLIT.kept(word));
        let mut packed = [0; MAX_KEPT_BYTES];
        if bits == 24 {
            let [a, b, c, d, e, f, g, h] = kept.map(u64::from);
            let words = [
                a | b << 24 | c << 48,
                c >> 16 | d << 8 | e << 32 | f << 56,
                f >> 8 | g << 16 | h << 40,
            ];
            for (bytes, word) in packed.as_chunks_mut().0.iter_mut().zip(words) {
                *bytes = word.to_le_bytes();
            }
            return packed;
        }
        let half = |from: usize| {
            (0..4).fold(0, |sum: u64, at| sum | u64::from(kept[from + at]) << (bits * at as u32))
        };
        let both = u128::from(half(0)) | u128::from(half(4)) << (4 * bits);
        packed[..16].copy_from_slice(&both.to_le_bytes());
        packed
    }

    /// The kept bits of a unit from its bytes: as many as a weight has kept bits.
    ///
    /// Q: Why is this fast? Words are loaded from where they are. A copy would be read before it
    /// has left the core.
    #[inline]
    fn unpack(packed: &[u8]) -> [u32; UNIT] {
        let bits = Self::SPLIT.kept_bits();
        let word = |at: usize| u64::from_le_bytes(packed[at..at + 8].try_into().expect("8 bytes"));
        let mask = (1 << bits) - 1;
        if bits == 24 {
            let [a, b, c] = [word(0), word(8), word(16)];
            let kept = [a, a >> 24, a >> 48 | b << 16, b >> 8, b >> 32, b >> 56 | c << 8, c >> 16];
            return std::array::from_fn(|at| {
                kept.get(at).map_or(c >> 40, |kept| *kept) as u32 & mask
            });
        }
        let halves = if bits >= 8 {
            let last = packed.len() - 8;
            [word(0), word(last) >> (4 * bits - 8 * last as u32)]
        } else {
            let all = packed.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
            [all, all >> (4 * bits)]
        };
        std::array::from_fn(|at| (halves[at / 4] >> (bits * (at as u32 % 4))) as u32 & mask)
    }
}

/// The kept bits of a unit of one-byte weights, a byte for each weight.
#[inline]
fn spread(packed: &[u8], bits: u32) -> u64 {
    let all = packed.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
    // Halves of a word move apart, then halves of these, then of those.
    [4, 2, 1].into_iter().fold(all, |word, weights| {
        let (own, room) = (weights * bits, weights * 8);
        (word | word << (room - own)) & in_each(room, (1 << own) - 1)
    })
}

/// The same number in each part of a word that has so many bits.
#[inline]
const fn in_each(bits: u32, number: u64) -> u64 {
    u64::MAX / (u64::MAX >> (u64::BITS - bits)) * number
}

/// Bytes of a weight, bits of its exponent, and kept bits.
pub(crate) enum KnownSplit<const BYTES: u8, const EXPONENT: u8, const KEPT: u8> {}

impl<const BYTES: u8, const EXPONENT: u8, const KEPT: u8> Float
    for KnownSplit<BYTES, EXPONENT, KEPT>
{
    const SPLIT: FloatSplit = FloatSplit::new(BYTES, EXPONENT, KEPT);
}

macro_rules! floats {
    ($($(#[$about:meta])* $name:ident = $bytes:literal, $exponent:literal, $kept:literal;)*) => {
        $(
            $(#[$about])*
            pub(crate) type $name = KnownSplit<$bytes, $exponent, $kept>;
        )*

        /// Evaluates an expression in which a type is the [`Float`](crate::float::Float) of a
        /// split.
        macro_rules! with_float {
            ($split:expr, $float:ident => $body:expr) => {
                match $split {
                    $(split if split == <$crate::float::$name as $crate::float::Float>::SPLIT => {
                        type $float = $crate::float::$name;
                        $body
                    })*
                    other => unreachable!("{other:?} is in the table of floats"),
                }
            };
        }
    };
}

floats! {
    Bf16 = 2, 8, 8;
    E4m3 = 1, 4, 4;
    E5m2 = 1, 5, 3;
    F16 = 2, 5, 11;
    /// Seven mantissa bits, of which the last four are zero.
    Bf16OfE4m3 = 2, 8, 4;
    F32 = 4, 8, 24;
    F32OfF16 = 4, 8, 11;
    F32OfBf16 = 4, 8, 8;
}

#[expect(clippy::single_component_path_imports, reason = "it gives the macro a path")]
pub(crate) use with_float;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// All words, or of 32 bits those of some mantissas; with the zero bits of a split.
    fn words(split: FloatSplit) -> Vec<u32> {
        let words: Vec<u32> = match split.bytes() {
            1 => (0..1 << 8).collect(),
            2 => (0..1 << 16).collect(),
            _ => (0..1 << 20)
                .map(|at: u32| at << 12 | at.wrapping_mul(2_654_435_761) >> 20)
                .collect(),
        };
        words.into_iter().map(|word| word >> split.zero_bits() << split.zero_bits()).collect()
    }

    /// All splits: those of other floats, and BF16's.
    pub(crate) fn splits() -> impl Iterator<Item = FloatSplit> {
        let all = SPLITS.iter().flat_map(|(_, splits)| splits.iter().copied());
        all.chain([FloatSplit::BF16])
    }

    fn comes_back<F: Float>() {
        for unit in words(F::SPLIT).as_chunks::<UNIT>().0 {
            let packed = F::pack(*unit);
            let bytes = F::SPLIT.plane_bytes(UNIT as u64) as usize;
            assert!(packed[bytes..].iter().all(|&byte| byte == 0));
            let kept = F::unpack(&packed[..bytes]);
            assert_eq!(bytes as u32, F::SPLIT.kept_bits());
            let weights =
                std::array::from_fn(|at| F::SPLIT.weight(F::SPLIT.exponent(unit[at]), kept[at]));
            assert_eq!(weights, *unit);
            let stored = F::store(weights);
            let exponents = unit.map(|word| F::SPLIT.exponent(word));
            assert_eq!(F::join(exponents, &packed[..bytes]), stored);
            assert_eq!(F::load(&stored[..UNIT * F::SPLIT.bytes()]), *unit);
            assert_eq!(
                F::load(&stored[..3 * F::SPLIT.bytes()])[..4],
                [unit[0], unit[1], unit[2], 0]
            );
        }
    }

    #[test]
    fn every_pattern_comes_back() {
        for split in splits() {
            with_float!(split, F => comes_back::<F>());
        }
    }

    #[test]
    fn bf16_has_the_plane_of_tiles() {
        for word in 0..=u16::MAX {
            let split = FloatSplit::BF16;
            assert_eq!(split.exponent(word.into()), crate::bf16::exponent(word));
            let plane_byte = u32::from(crate::bf16::plane_byte(word));
            assert_eq!(split.kept(word.into()), plane_byte);
        }
    }

    #[test]
    fn exponents_do_not_depend_on_zero_bits() {
        for (_, splits) in SPLITS {
            for word in words(splits[0]) {
                let exponents = splits.iter().map(|split| split.exponent(word));
                assert!(exponents.into_iter().all(|exponent| exponent == splits[0].exponent(word)));
            }
        }
    }

    #[test]
    fn the_most_zero_bits_are_chosen() {
        let zero_bits = |dtype, bits| FloatSplit::choose(dtype, bits).map(FloatSplit::zero_bits);
        assert_eq!(zero_bits(Dtype::F32, 0x3F80_0000), Some(16));
        assert_eq!(zero_bits(Dtype::F32, 0x3F80_8000), Some(13));
        assert_eq!(zero_bits(Dtype::F32, 0x3F80_1000), Some(0));
        assert_eq!(zero_bits(Dtype::F32, 0), Some(16));
        assert_eq!(zero_bits(Dtype::F8_E4M3, 0x80), Some(0));
        assert_eq!(zero_bits(Dtype::F64, 0), None);
        assert_eq!(FloatSplit::of(Dtype::F32, 12), None);
        assert_eq!(FloatSplit::of(Dtype::F32, u64::MAX), None);
    }

    /// The bound on the size of restored tensors rests on this (spec/rationale.md, "Limits").
    #[test]
    fn a_quarter_of_a_weight_is_kept_at_least() {
        for split in splits() {
            assert!(split.kept_bits() as usize >= 2 * split.bytes(), "{split:?}");
        }
    }
}
