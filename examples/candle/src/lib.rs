//! Inference on candle from weights that stay compressed: in mapped files on the CPU, or in the
//! memory of a GPU.
//!
//! ```text
//! Weights::open → var_builder → norms, biases: small tensors, decoded once
//!               → Linear, Embedding: compressed, decoded where they are used
//! ```
//!
//! With [`Mode::Exact`] a weight is decoded to a temporary tensor before each product, and candle
//! multiplies as by BF16 weights: logits have the same bits. With [`Mode::Fused`] a GPU multiplies
//! a few rows without decoding to memory: sums have another order.

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
