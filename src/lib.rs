//! Losslessly compressed BFloat16 model weights: the container format and its SDK.
pub mod dtype;
pub mod error;
pub mod io;
pub mod paths;
pub mod progress;
pub mod source;
pub use dtype::Dtype;
pub use error::{Error, Result};
