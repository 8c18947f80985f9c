//! Writing: `first pass → plan → second pass → container`, and back to the original files.

mod analysis;
mod arrays;
mod coding;
mod compress;
mod encode;
mod folder;
mod gap;
mod input;
mod outline;
mod output;
mod plan;
mod report;
mod restore;
mod tile;

pub use compress::{CompressOptions, Estimate, Layout, compress, convert, estimate, estimate_headers};
pub use report::Report;
pub use restore::{DecompressOptions, decompress};
