//! Products with compressed matrices: `y = x Wᵀ (+ bias)` in BF16, without decoding W to memory.
//!
//! ```text
//! GpuModel::matrix → Matrix (as stored) → to_fast → Matrix (fast) → Linear::new → Linear::multiply
//!                    rows, columns                  rows, columns   workspace     on a stream
//! ```
//!
//! A [`Matrix`] knows where its compressed arrays are, and keeps them alive. The fast layout
//! (`spec/gpu.md`, part 6) takes about 12.1 bits per weight and is not part of the file format:
//! [`transcode`] makes it on the GPU from stored arrays, or [`arrival`] while a model is loaded.

pub(super) mod arrival;
mod bands;
mod crossover;
mod decode;
mod experts;
pub(super) mod fast;
mod grouped;
pub(super) mod kernels;
mod launch;
mod matrix;
mod multiply;
mod prefetch;
mod product;
mod split;
pub(super) mod task;
mod tile64;
mod tiles;
mod transcode;

pub use bands::BandPlan;
pub use decode::Indices;
pub use experts::{Choices, ExpertDecoder};
pub use grouped::{GroupedLinear, Routing};
pub use launch::{LinearInput, LinearOutput};
pub use matrix::Matrix;
pub use product::Linear;
pub use split::Split;
pub use tile64::Tile64Demand;
pub use tiles::{BlockShape, BlockWork, Tile2, TileDemand};
pub use transcode::{FastPacker, Transcoded};
