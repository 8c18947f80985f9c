//! Both encodings against the reference decoder and a witness, for many distributions, sizes and
//! ranges, and against hostile arrays. What only one of them has is in `codec/gap.rs` and
//! `codec/tile.rs`; arrays that break one rule are among the test vectors.

#[path = "codec/gap.rs"]
mod gap;
#[path = "../benches/support/normal.rs"]
mod normal;
#[path = "codec/tile.rs"]
mod tile;
#[path = "support/array_witness.rs"]
mod witness;

use std::{fmt::Debug, ops::Range};

use df11::{Error, Result, hazmat::bf16};
use normal::Random;
use proptest::prelude::*;

/// An encoded tensor, as tests of any encoding see it.
trait Encoded: Clone + Debug + PartialEq {
    type Geometry: Copy + Debug;

    /// Encodes by the crate, and checks that the arrays have the sizes that the crate tells.
    fn encode(weights: &[u8], geometry: Self::Geometry) -> Self;
    fn elements(&self) -> u64;
    fn arrays(&mut self) -> Vec<&mut Vec<u8>>;
    fn decode(&self, elements: Range<u64>) -> Result<Vec<u8>>;
    /// Verifies some thread blocks, or strips, at a time.
    fn verify(&self, each: u64) -> Result<()>;
    /// What the reference decoder makes of the arrays.
    fn reference(&self) -> df11_reference::Result<Vec<u8>>;
    fn witness(&self) -> witness::Result;
}

/// Encodes weights, and has all readers agree on them.
fn check<E: Encoded>(weights: &[u8], geometry: E::Geometry) -> E {
    let tensor = E::encode(weights, geometry);
    assert!(tensor.reference().unwrap() == weights, "{geometry:?}");
    assert_eq!(tensor.witness(), Ok(()), "{geometry:?}");
    assert!(tensor.decode(0..tensor.elements()).unwrap() == weights, "{geometry:?}");
    for each in [1, 3, 1000] {
        tensor.verify(each).unwrap();
    }
    tensor
}

fn weights_of(exponents: impl IntoIterator<Item = u8>, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    exponents
        .into_iter()
        .flat_map(|exponent| bf16::weight(exponent, random.next() as u8).to_le_bytes())
        .collect()
}

/// Every weight once, in an order without a pattern.
fn every_pattern() -> Vec<u8> {
    (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40503).to_le_bytes()).collect()
}

fn exponents() -> impl Strategy<Value = Vec<u8>> {
    let skewed =
        (1u32..40, 0u8..=255, 1usize..24_000, any::<u64>()).prop_map(|(skew, top, count, seed)| {
            let mut random = Random(seed);
            // Geometric: each exponent 2^(skew/10) times rarer than the one above it.
            let mut draw = || ((random.next() | 1 << 20).leading_zeros() * 10 / skew) as u8;
            (0..count).map(|_| top.wrapping_sub(draw())).collect()
        });
    prop_oneof![3 => skewed, 1 => prop::collection::vec(any::<u8>(), 1..3000)]
}

/// Any range is a slice of the whole.
fn check_range<E: Encoded>(weights: &[u8], geometry: E::Geometry, range: (usize, usize)) {
    let elements = range_of(weights.len() / 2, range);
    let tensor = E::encode(weights, geometry);
    let part = 2 * elements.start as usize..2 * elements.end as usize;
    assert!(tensor.decode(elements).unwrap() == weights[part]);
}

/// A range of some elements, from two numbers.
fn range_of(count: usize, (a, b): (usize, usize)) -> Range<u64> {
    let (a, b) = (a % count, b % count);
    a.min(b) as u64..a.max(b) as u64 + 1
}

/// Damage to bytes of some arrays: what decodes is what the reference makes of the arrays, what
/// verifies is what the witness finds right; all else is an error, and never a panic.
fn check_damage<E: Encoded>(mut tensor: E, range: (usize, usize), hits: &[(usize, usize, u8)]) {
    for &(array, at, value) in hits {
        let mut arrays = tensor.arrays();
        let count = arrays.len();
        let array = &mut *arrays[array % count];
        let at = at % array.len();
        array[at] ^= value;
    }
    check_hostile(&tensor, range);
}

fn check_hostile<E: Encoded>(tensor: &E, range: (usize, usize)) {
    let whole = tensor.decode(0..tensor.elements());
    if let (Ok(ours), Ok(theirs)) = (&whole, tensor.reference()) {
        assert!(*ours == theirs);
    }
    only_corrupt(whole);
    only_corrupt(tensor.decode(range_of(tensor.elements() as usize, range)));
    let verified = tensor.verify(2);
    assert_eq!(verified.is_ok(), tensor.witness().is_ok(), "{verified:?}");
    only_corrupt(verified);
}

/// Arrays of noise from this one on, except the last one, which any bytes may be.
fn noisy<E: Encoded>(mut tensor: E, seed: u64, from: usize) -> E {
    let mut random = Random(seed);
    let mut arrays = tensor.arrays();
    arrays.pop();
    arrays.into_iter().skip(from).for_each(|array| array.fill_with(|| random.next() as u8));
    tensor
}

fn only_corrupt<T>(result: Result<T>) {
    if let Err(error) = result {
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

/// The error's place.
fn place<T: Debug>(result: Result<T>) -> String {
    let Err(Error::Corrupt { place, .. }) = result else { panic!("{result:?}") };
    place
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_tensor_comes_back((weights, gap) in gap::tensors(), (more, tile) in tile::tensors()) {
        check::<gap::EncodedTensor>(&weights, gap);
        check::<tile::EncodedTensor>(&more, tile);
    }

    #[test]
    fn any_range_is_a_slice_of_the_whole(
        (weights, gap) in gap::tensors(), (more, tile) in tile::tensors(), range: (usize, usize),
    ) {
        check_range::<gap::EncodedTensor>(&weights, gap, range);
        check_range::<tile::EncodedTensor>(&more, tile, range);
    }

    #[test]
    fn damage_is_harmless(
        (weights, gap) in gap::tensors(), (more, tile) in tile::tensors(), range: (usize, usize),
        hits in prop::collection::vec(any::<(usize, usize, u8)>(), 1..6),
    ) {
        check_damage(gap::EncodedTensor::encode(&weights, gap), range, &hits);
        check_damage(tile::EncodedTensor::encode(&more, tile), range, &hits);
    }

    /// In the bitstream, and in the index too.
    #[test]
    fn noise_is_harmless(
        (weights, gap) in gap::tensors(), (more, tile) in tile::tensors(), seed: u64, index: bool,
    ) {
        let gap = gap::EncodedTensor::encode(&weights, gap);
        check_hostile(&noisy(gap, seed, if index { 1 } else { 3 }), (0, 0));
        let tile = tile::EncodedTensor::encode(&more, tile);
        check_hostile(&noisy(tile, seed, if index { 1 } else { 2 }), (0, 0));
    }
}
