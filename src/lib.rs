//! Losslessly compressed BFloat16 model weights: the container format and its SDK.
//!
//! In short: [`open()`] a container, and decode the tensors that you need.
//!
//! ```
//! # fn main() -> df11::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let checkpoint = df11::hazmat::demo::tiny_checkpoint(folder.path())?;
//! # let container = folder.path().join("tiny.df11");
//! use df11::{CompressOptions, Source};
//!
//! // A safetensors file, or a folder of the Hub, becomes a container.
//! let source = Source::open(&checkpoint)?;
//! let report = df11::compress(&source, &container, &CompressOptions::default(), &())?;
//! println!("{:.2} bits per weight instead of 16", report.bits_per_weight());
//!
//! // All weights of one tensor. Every bit is that of the original.
//! let model = df11::open(&container)?;
//! let tensor = model.tensor("model.embed_tokens.weight")?;
//! let weights: Vec<df11::half::bf16> = tensor.decode()?;
//! # assert_eq!(weights.len() as u64, tensor.elements());
//! # Ok(())
//! # }
//! ```
//!
//! # The idea
//!
//! A BF16 weight has a sign bit, eight exponent bits and seven mantissa bits. Signs and mantissas
//! of trained weights look random; no code makes them smaller. Exponents do not: a tensor has a few
//! dozen different ones, and a handful of these make up nearly all of it. An exponent carries only
//! about 2.6 bits of information in its eight bits. So the exponents are Huffman-coded, the other
//! eight bits are stored as they are, and a weight takes about 10.6 bits. Nothing is rounded.
//!
//! Huffman codes must be read from the start, one after the other, but a GPU has thousands of
//! threads. A container therefore records where in the codes each thread begins;
//! [encodings](Encoding) differ in how they record it. For the same reason any
//! [slice](Tensor::slice) of a tensor decodes without the rest.
//!
//! # What is where
//!
//! - [`open()`] returns a [`Model`]: [blocks](Block) of [tensors](Tensor), decoded on request.
//!   Opening costs microseconds per tensor; [`Model::verify`] reads everything.
//! - [`compress()`], [`convert`] and [`decompress`] make containers and original files;
//!   [`estimate`] computes the sizes beforehand. If a path may hold several models (a pipeline of
//!   diffusers), use the functions with `_all`.
//! - [`source`] reads the input of compression.
//! - `gpu` (feature `cuda`) keeps models compressed in GPU memory, decodes them there, and
//!   multiplies by them directly.
//! - An [`Observer`] reports progress and cancels; [`Error`] says what went wrong and what to do.
//! - [`hazmat`] exports the internal parts, for tools. Any version may change them.

mod bf16;
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
mod constants;
mod demo;
mod dtype;
mod encoding;
mod error;
mod float;
mod format;
#[cfg(feature = "cudarc")]
pub mod gpu;
pub mod hazmat;
mod huffman;
mod io;
mod open;
mod parallel;
mod paths;
mod platform;
mod progress;
pub mod source;
#[cfg(feature = "remote")]
mod store;
mod temporary;
mod write;

/// The command uses the library by its name, as others do.
#[cfg(feature = "cli")]
extern crate self as df11;

/// The crate of the type that tensors are decoded to, `half::bf16`.
pub use half;

pub use dtype::Dtype;
pub use error::{Error, Result};
pub use io::ReadAt;
pub use open::{
    Block, BlockLayout, Element, Encoding, Level, Model, Models, OpenOptions, Tensor, TensorSlice,
    Verification, is_compressed, open,
};
pub use progress::{Observer, Stage};
pub use source::{folder::Source, pipeline::Sources};
pub use write::{
    Card, CompressOptions, DecompressOptions, Estimate, Layout, Report, Restored, compress,
    compress_all, convert, convert_all, decompress, decompress_all, estimate, estimate_all,
};

/// The examples of the documentation are tests too.
#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Documentation;
