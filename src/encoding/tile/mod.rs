//! The `tile` encoding (spec/format.md, "Encoding tile"): made for warps that decode a tile into
//! registers.
//!
//! A tensor is a matrix, cut into *tiles* of 32 rows × 256 columns, or a vector, cut into tiles of
//! 8192 weights. A tile has 32 *lanes*, as a warp has; each lane has its own stretch of bits and,
//! of a whole tile, 256 weights in 32 *units* of 8 neighbours. A code stands for a *pair* of
//! neighbouring exponents. A *strip* is the smallest run of consecutive weights that is made of
//! whole tiles; its parts of all arrays are consecutive, so strips are encoded and decoded alone
//! and in any order.
//!
//! ```text
//! tile, first 8 of 32 rows         record of the tile (32 bytes)
//! row 0  l0 l1 l2 l3 | l0 l1 ...    offset | least | shift | excess of lane 0 .. 31
//! row 1  l4 l5 l6 l7 | l4 l5 ...    bitstream of the tile
//! ...                               lane 0 | 00 | lane 1 | 0 | ... | lane 31 | 000
//! ```

mod ahead;
mod choice;
mod codebook;
mod coded;
mod decode;
mod encode;
mod exponents;
mod geometry;
mod histogram;
mod lanes;
mod matrix;
mod record;
mod sizes;
mod stage;
mod staging;
pub(crate) mod stored;
mod table;
mod wanted;
mod whole;
mod window;
mod writer;

pub use codebook::Codebook;
pub use decode::{Span, TileDecoder};
pub use encode::{EncodedStrips, Encoder};
pub use geometry::Geometry;
pub use histogram::PairHistogram;
pub(crate) use matrix::cut;
pub use matrix::{Arrays, OwnedArrays};
pub use sizes::Sizes;
#[cfg(feature = "cudarc")]
pub(crate) use staging::rebase;
pub(crate) use staging::{check_offsets, staged_bytes};
pub use whole::{EncodedTensor, encode_tensor};

/// Weights of a whole tile.
pub(crate) const TILE_ELEMENTS: u64 = 8192;
/// The two widths of a tile.
pub(crate) const TILE_COLUMNS: [u64; 2] = [256, TILE_ELEMENTS];
/// Weights of a whole unit.
const UNIT: usize = 8;
/// Lanes of a tile.
const LANES: usize = 32;
/// Weights of a lane of a whole tile.
const LANE_ELEMENTS: usize = TILE_ELEMENTS as usize / LANES;
/// Units of a lane of a whole tile.
const LANE_UNITS: usize = LANE_ELEMENTS / UNIT;
/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 32;
/// The longest code, in bits.
const MAX_CODE_BITS: u8 = 12;
/// Bits of a value after the code of the escape.
const VALUE_BITS: u8 = 16;
/// The most bits of a pair.
const MAX_PAIR_BITS: usize = (MAX_CODE_BITS + VALUE_BITS) as usize;
/// The most bits that a lane's pairs have.
const MAX_LANE_BITS: usize = LANE_ELEMENTS / 2 * MAX_PAIR_BITS;
/// A lane is longer than its pairs by at most this many bits: a step of 2^7, less one.
const MAX_SLACK: usize = 127;
/// The most bytes of a tile, padding included.
const MAX_TILE_BYTES: usize = (LANES * (MAX_LANE_BITS + MAX_SLACK)).div_ceil(8);
/// The number of different pairs.
const PAIRS: usize = 1 << 16;
