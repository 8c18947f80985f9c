//! The encodings `tile` and `float` (spec/format.md, 6.4 and 6.5): made for warps that decode a
//! tile into registers.
//!
//! A tensor is a matrix, cut into *tiles* of 32 rows × 256 columns, or a vector, cut into tiles of
//! 8192 weights. A tile has 32 *lanes*, as a warp does. Each lane has its own stretch of bits and,
//! in a whole tile, 256 weights in 32 *units* of 8 neighbours. A code stands for a *pair* of
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

mod arrays;
mod codebook;
mod coded;
mod decode;
mod encode;
mod geometry;
mod histogram;
mod lanes;
mod plane;
mod record;
mod sizes;

pub use crate::float::FloatSplit;
pub use arrays::{Arrays, OwnedArrays};
pub(crate) use arrays::{cut, cut_lengths};
pub use codebook::Codebook;
pub use encode::{EncodedStrips, Encoder, encode_floats, encode_tensor};
#[cfg(feature = "cudarc")]
pub(crate) use geometry::RECORD_BYTES;
pub use geometry::TileGeometry;
pub use histogram::PairHistogram;
#[cfg(feature = "cudarc")]
pub(crate) use record::rebase;
pub(crate) use record::staged_bytes;
pub(crate) use sizes::check_offsets;
pub use sizes::{BITSTREAM, CODEBOOK, EncodedTensor, PLANE, RECORDS, TileSizes};
