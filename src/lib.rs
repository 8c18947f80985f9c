//! Losslessly compressed BFloat16 model weights: the container format and its SDK.
pub mod dtype;
pub mod error;
pub mod progress;
pub use dtype::Dtype;
pub use error::{Error, Result};
