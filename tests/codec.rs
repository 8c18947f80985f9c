//! All encodings against the reference decoder and a witness, for many distributions and sizes.
//! Tests of one encoding alone are in `codec`. The test vectors have arrays that break one rule;
//! fuzz targets try any weights, ranges, chunks and damage.

#[path = "codec/delta.rs"]
mod delta;
#[path = "codec/float.rs"]
mod float;
#[path = "codec/gap.rs"]
mod gap;
#[path = "../benches/support/normal.rs"]
mod normal;
#[path = "codec/tile.rs"]
mod tile;
#[path = "support/array_witness.rs"]
mod witness;

use std::fmt::Debug;

use df11::{Error, Result, hazmat::bf16};
use normal::Random;

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
