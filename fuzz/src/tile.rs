//! Weights as arrays of `tile` under any codebook, by the encoder that the tests' vectors are made
//! with.
//!
//! The rules of section 6.4 leave one way to code weights with a codebook, so a tensor is valid if
//! and only if it decodes, and its weights, coded again, are its arrays.

#[path = "../../tests/support/tile_arrays.rs"]
#[allow(missing_docs, reason = "documented there, for tests")]
mod arrays;

pub use arrays::Arrays;
use arrays::{Codebook, Pair, tiles};

/// Codes weights (little-endian) with a codebook that has a code for each pair, or an escape.
///
/// `tile_columns` and `columns` are those of a valid tensor. Also escapes the pairs with a code
/// that `escaped` names by their number in the order of the bitstream: what results decodes and
/// does not verify.
pub fn encode(
    weights: &[u8],
    codebook: &[u8],
    [tile_columns, columns]: [u64; 2],
    escaped: impl Fn(u64) -> bool,
) -> Arrays {
    let (tile_columns, columns) = (tile_columns as usize, columns as usize);
    let mut tiles = tiles(weights, tile_columns, columns);
    let pairs = tiles.iter_mut().flat_map(|tile| tile.lanes.iter_mut().flatten());
    for (pair, _) in pairs.zip(0..).filter(|&(_, number)| escaped(number)) {
        *pair = Pair::Escaped(pair.value());
    }
    Arrays::with(&tiles, tile_columns, columns, &Codebook::from_bytes(codebook))
}
