//! Writing: `first pass → plan → second pass → container`, and back to the original files.

mod analysis;
mod arrays;
mod compress;
mod encode;
mod folder;
mod output;
mod plan;
mod report;
mod restore;

pub use compress::{CompressOptions, Layout, compress, estimate};
pub use report::Report;
pub use restore::{DecompressOptions, decompress};
