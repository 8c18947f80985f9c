//! Losslessly compressed BFloat16 model weights: the container format and its SDK.
pub mod bf16;
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
pub mod constants;
pub mod demo;
pub mod dtype;
pub mod encoding;
pub mod error;
pub mod format;
#[cfg(feature = "cudarc")]
pub mod gpu;
pub mod huffman;
pub mod io;
pub mod open;
mod parallel;
pub mod paths;
pub mod progress;
pub mod source;
pub mod write;

/// The command uses the library by its name, as others do.
#[cfg(feature = "cli")]
extern crate self as df11;

pub use dtype::Dtype;
pub use error::{Error, Result};
pub use open::{Block, BlockLayout, Encoding, Level, Model, Models, OpenOptions, Tensor, open};
pub use progress::{Observer, Stage};
pub use source::{Source, Sources};
pub use write::{
    CompressOptions, DecompressOptions, Estimate, Layout, Report, Restored, compress, compress_all, convert,
    convert_all, decompress, decompress_all, estimate, estimate_all, estimate_headers,
};

/// The examples of the documentation are tests too.
#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Documentation;
