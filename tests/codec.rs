//! Both encodings against the reference decoder and a witness, for many distributions and sizes.
//! What only one of them has is in `codec/gap.rs` and `codec/tile.rs`. Arrays that break one rule
//! are among the test vectors; any weights, ranges, chunks and damage are what fuzz targets try.

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

/// An encoded tensor, as tests of any encoding see it.
trait Encoded: Clone + Debug + PartialEq {
    type Geometry: Copy + Debug;

    /// Encodes by the crate, and checks that the arrays have the sizes that the crate tells.
    fn encode(weights: &[u8], geometry: Self::Geometry) -> Self;
    fn elements(&self) -> u64;
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

/// The error's place.
fn place<T: Debug>(result: Result<T>) -> String {
    let Err(Error::Corrupt { place, .. }) = result else { panic!("{result:?}") };
    place
}
