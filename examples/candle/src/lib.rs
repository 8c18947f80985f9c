//! Inference on candle from weights that stay compressed: as files lie mapped on the CPU, or as
//! they lie in the memory of a GPU.
//!
//! ```text
//! Weights::open → var_builder → norms, biases: small tensors, decoded once
//!               → Linear, Embedding: compressed, decoded where they are used
//! ```
//!
//! With [`Mode::Exact`] a weight is decoded to a temporary tensor before each product, which candle
//! then makes as from BF16 weights: logits have the same bits. With [`Mode::Fused`] a GPU
//! multiplies few rows without decoding to memory: sums have another order.

mod embedding;
#[cfg(feature = "cuda")]
mod gpu;
mod linear;
mod llama;
mod weights;

pub use embedding::Embedding;
pub use linear::Linear;
pub use llama::{Cache, Llama};
pub use weights::{Mode, Weights};
