//! Products with compressed matrices: `y = x Wᵀ (+ bias)`, x and y BF16, without decoding W to
//! memory.
//!
//! ```text
//! GpuModel::matrix → Matrix (as stored) → to_fast → Matrix (fast) → Linear::new → Linear::multiply
//!                    rows, columns                  rows, columns   workspace     on a stream
//! ```
//!
//! A [`Matrix`] tells where its compressed arrays lie, and keeps them. The fast layout
//! (`kernels/linear_task.cuh`) has about 12.1 bits a weight and is no part of the file format:
//! [`transcode`] makes it on the GPU from what is stored.

mod crossover;
mod decoded;
mod fast;
mod gather;
mod grouped;
mod kernels;
mod launch;
mod map;
mod matrix;
mod multiply;
mod pack;
mod packer;
mod product;
mod split;
mod stored;
mod task;
mod tiles;
mod transcode;
mod upload;

pub(super) use fast::FastArrays;
pub use gather::Indices;
pub use grouped::{GroupedLinear, Routing};
pub(super) use kernels::LinearKernels;
pub use matrix::{Matrix, Residence, TileAddresses, Transcoded};
pub use pack::FastPacker;
pub(super) use packer::Outcome;
pub use product::{Linear, LinearInput, LinearOutput};
pub(super) use upload::{FastLoad, Wanted, fast_sizes, most_exceptions_bytes, upload};
