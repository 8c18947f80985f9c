//! Writing: `first pass → plan → second pass → container`, and back to the original files.

mod analysis;
mod arrays;
mod coding;
mod compress;
mod config;
mod encode;
mod folder;
mod gap;
mod input;
mod outline;
mod output;
mod plan;
mod replace;
mod report;
mod restore;
mod tile;

pub use compress::{CompressOptions, Estimate, Layout, compress, convert, estimate, estimate_headers};
pub use replace::check_replaceable;
pub use report::Report;
pub use restore::{DecompressOptions, decompress};
