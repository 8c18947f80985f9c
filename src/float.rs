//! Floats as bits: how a float of each dtype is split into its exponent, which is coded, and its
//! kept bits, which are stored as they are (spec/format.md, section 6.5).
//!
//! ```text
//! F8_E4M3  s eeee mmm                              kept bits: s mmm
//! F16      s eeeee mmmmmmmmmm                                 s mmmmmmmmmm
//! F32      s eeeeeeee mmmmmmm 0000000000000000                s mmmmmmm      (16 zero bits)
//! ```
//! BF16 in `tile` is split too, as in [`bf16`](crate::bf16).

use crate::{Dtype, bf16};

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

    /// The split of a dtype with this many zero bits, if `float` allows it.
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

    /// Whether weights are BF16, with or without zero bits.
    pub const fn is_bf16(self) -> bool {
        self.bytes == 2 && self.exponent_bits == 8
    }

    /// Bytes of the plane of this many weights, of which the last ones may be a part of a unit.
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
    /// The kept bits of a weight except for its sign.
    const MAGNITUDE: u64 = Self::SPLIT.magnitude() as u64;
    /// Kept bits of the weights of a word of 64 bits.
    const WORD_BITS: usize = Self::SPLIT.kept_bits() as usize * 8 / Self::SPLIT.bytes();

    /// Takes the exponents of as many weights as there is room for.
    #[inline]
    fn exponents(weights: &[u8], exponents: &mut [u8]) {
        each_weight::<Self>(weights, exponents, |word| Self::SPLIT.exponent(word));
    }

    /// The bits that some weight of a word has.
    #[inline]
    fn any_of(word: u64) -> u32 {
        let (room, own) = (8 * Self::SPLIT.bytes() as u32, 32 - 8 * Self::SPLIT.bytes() as u32);
        (0..u64::BITS / room).fold(0, |bits, at| bits | (word >> (room * at)) as u32) << own >> own
    }

    /// Packs the kept bits of a unit: as many bytes as a weight has kept bits.
    ///
    /// Q: Why is this fast? Weights of a word are packed in it, all at once: neighbours move
    /// together, then neighbouring pairs, and so on.
    #[inline]
    fn pack(unit: &[u8], packed: &mut [u8]) {
        let (room, own) = (8 * Self::SPLIT.bytes() as u32, Self::SPLIT.kept_bits());
        if own == 8 {
            return each_weight::<Self>(unit, packed, |word| Self::SPLIT.kept(word) as u8);
        }
        let mut all = [0; MAX_KEPT_BYTES / 8];
        for (at, word) in unit.as_chunks().0.iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            let magnitude = word >> Self::SPLIT.zero_bits() & in_each(room, Self::MAGNITUDE);
            let sign = word >> (room - own) & in_each(room, 1 << (own - 1));
            let (word, bit) = (gather(magnitude | sign, room, own), at * Self::WORD_BITS);
            all[bit / 64] |= word << (bit % 64);
            if bit % 64 + Self::WORD_BITS > 64 {
                all[bit / 64 + 1] |= word >> (64 - bit % 64);
            }
        }
        for (bytes, word) in packed[..own as usize].chunks_mut(8).zip(all) {
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
    }

    /// Joins the exponents of a unit with its kept bits, at an index of packed units. The exponents
    /// stand where those of BF16 do; those of weights of one byte are [bare](bare_exponents).
    ///
    /// Q: Why is this fast? It undoes the steps of packing, word by word. And words are loaded from
    /// where they are: a copy would be read before it has left the core.
    #[inline]
    fn join(exponents: &[u8], packed: &[u8], index: usize, unit: &mut [u8]) {
        let room = 8 * Self::SPLIT.bytes() as u32;
        if Self::SPLIT.kept_bits() == 8 {
            let packed = &packed[UNIT * index..][..UNIT];
            let is_bf16 = Self::SPLIT.is_bf16();
            let join = if is_bf16 { join_bf16 } else { join_bytes::<Self> };
            return join(exponents, packed, unit);
        }
        for (at, word) in unit.as_chunks_mut().0.iter_mut().enumerate() {
            let exponents = match room {
                8 => load(exponents, 0),
                16 => load(exponents, 8 * at) >> 7 & in_each(16, 0xFF),
                _ => {
                    spread(load(exponents, 8 * (at / 2)) >> (32 * (at % 2) + 7) & 0xFF_00FF, 16, 32)
                }
            };
            let first_bit = UNIT * Self::SPLIT.kept_bits() as usize * index;
            let kept = Self::unpack(packed, first_bit + at * Self::WORD_BITS);
            *word = (exponents << Self::SPLIT.mantissa_bits() | kept).to_le_bytes();
        }
    }

    /// A word of weights without their exponents, whose kept bits start at a bit.
    #[inline]
    fn unpack(packed: &[u8], bit: usize) -> u64 {
        let (room, own) = (8 * Self::SPLIT.bytes() as u32, Self::SPLIT.kept_bits());
        let start = (bit / 8).min(packed.len().saturating_sub(8));
        let bits = load(packed, start) >> (bit - 8 * start);
        let kept = spread(bits & ((1 << Self::WORD_BITS) - 1), own, room);
        let [sign, top] = [own, room - Self::SPLIT.zero_bits()].map(|bits| 1 << (bits - 1));
        // A sign is carried to its place by a sum.
        let kept = kept + in_each(room, top - sign);
        (kept & in_each(room, top | Self::MAGNITUDE)) << Self::SPLIT.zero_bits()
    }
}

/// Takes exponents out of words in which they stand where those of BF16 do.
#[inline]
pub(crate) fn bare_exponents(placed: &[u8], exponents: &mut [u8]) {
    for (exponent, word) in exponents.iter_mut().zip(placed.as_chunks().0) {
        *exponent = bf16::exponent(u16::from_le_bytes(*word));
    }
}

/// Joins the placed exponents of a unit with kept bits that are a byte for each weight.
#[inline]
fn join_bytes<F: Float + ?Sized>(placed: &[u8], packed: &[u8], unit: &mut [u8]) {
    let each = F::SPLIT.bytes();
    let weights = unit.chunks_exact_mut(each).zip(placed.as_chunks().0).zip(packed);
    for ((weight, word), kept) in weights {
        let joined = F::SPLIT.weight(bf16::exponent(u16::from_le_bytes(*word)), u32::from(*kept));
        weight.copy_from_slice(&joined.to_le_bytes()[..each]);
    }
}

/// Joins the placed exponents of a unit of BF16 with its plane.
///
/// Q: Why byte by byte? A vector of 16, in which each byte of the plane stands twice. In words the
/// compiler makes vectors only of references, and not of all; of bytes it makes them of any.
#[inline]
fn join_bf16(placed: &[u8], plane: &[u8], unit: &mut [u8]) {
    const EXPONENT: [u8; 2] = 0x7F80_u16.to_le_bytes();
    let placed: &[u8; 2 * UNIT] = placed.try_into().expect("exponents of a unit");
    let plane: &[u8; UNIT] = plane.try_into().expect("the plane of a unit");
    let joined: [u8; 2 * UNIT] =
        std::array::from_fn(|at| placed[at] & EXPONENT[at % 2] | plane[at / 2] & !EXPONENT[at % 2]);
    unit.copy_from_slice(&joined);
}

/// Computes a byte of each weight, as many as there is room for.
///
/// Q: Why is this fast? The compiler makes vector instructions of a flat loop over weights of a
/// known size.
#[inline]
fn each_weight<F: Float + ?Sized>(weights: &[u8], bytes: &mut [u8], byte: impl Fn(u32) -> u8) {
    let each = F::SPLIT.bytes();
    for (out, weight) in bytes.iter_mut().zip(weights.chunks_exact(each)) {
        let mut word = [0; 4];
        word[..each].copy_from_slice(weight);
        *out = byte(u32::from_le_bytes(word));
    }
}

/// Eight bytes from a place on, or the fewer ones that there are, and zeros.
#[inline]
pub(crate) fn load(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..at + 8) {
        Some(word) => u64::from_le_bytes(word.try_into().expect("8 bytes")),
        None => bytes[at..].iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte)),
    }
}

/// Moves parts of a word together: each has `room` bits, of which the lowest `own` may be set.
#[inline]
fn gather(mut word: u64, room: u32, own: u32) -> u64 {
    let mut parts = 1;
    while room > own && room * parts < u64::BITS {
        let low = in_each(2 * room * parts, (1 << (own * parts)) - 1);
        word = word & low | word >> ((room - own) * parts) & low << (own * parts);
        parts *= 2;
    }
    word
}

/// Moves parts of a word apart, as they were before [`gather`]: halves, then halves of these.
#[inline]
fn spread(mut word: u64, own: u32, room: u32) -> u64 {
    let mut parts = u64::BITS / room / 2;
    while room > own && parts > 0 {
        let low = in_each(2 * room * parts, (1 << (own * parts)) - 1);
        word = word & low | (word & low << (own * parts)) << ((room - own) * parts);
        parts /= 2;
    }
    word
}

/// The same number in each part of a word that has this many bits.
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
        let each = F::SPLIT.bytes();
        let bytes = |word: &u32| word.to_le_bytes().into_iter().take(each);
        for words in words(F::SPLIT).as_chunks::<UNIT>().0 {
            let unit: Vec<u8> = words.iter().flat_map(bytes).collect();
            let (own, _) = words.split_at(8 / each);
            let word = load(&unit, 0);
            assert_eq!(F::any_of(word), own.iter().fold(0, |bits, word| bits | word));
            let mut exponents = [0; UNIT];
            F::exponents(&unit, &mut exponents);
            assert_eq!(exponents, words.map(|word| F::SPLIT.exponent(word)));
            let mut packed = vec![0; F::SPLIT.plane_bytes(UNIT as u64) as usize];
            assert_eq!(packed.len() as u32, F::SPLIT.kept_bits());
            F::pack(&unit, &mut packed);
            for (at, word) in words.iter().enumerate() {
                let bits = F::SPLIT.kept_bits() as usize;
                let bit = |bit: usize| u32::from(packed[bit / 8] >> (bit % 8) & 1);
                let kept = (0..bits).map(|own| bit(at * bits + own) << own).sum::<u32>();
                assert_eq!(kept, F::SPLIT.kept(*word));
                assert_eq!(F::SPLIT.weight(exponents[at], kept), *word);
            }
            let placed =
                exponents.map(|exponent| (u16::from(exponent) << 7 | 0x807F).to_le_bytes());
            let mut joined = vec![0; unit.len()];
            let mut exponents = placed.as_flattened().to_vec();
            if each == 1 {
                exponents.truncate(UNIT);
                bare_exponents(placed.as_flattened(), &mut exponents);
            }
            let twice = [&packed[..], &packed].concat();
            for (packed, index) in [(&packed, 0), (&twice, 0), (&twice, 1)] {
                F::join(&exponents, packed, index, &mut joined);
                assert_eq!(joined, unit);
            }
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
