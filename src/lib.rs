//! Losslessly compressed BFloat16 model weights: the container format and its SDK.
pub mod bf16;
pub mod dtype;
pub mod encoding;
pub mod error;
pub mod format;
pub mod huffman;
pub mod progress;
pub use dtype::Dtype;
pub use error::{Error, Result};
