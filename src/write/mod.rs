//! Writing: `first pass → plan → second pass → container`, and back to the original files.

mod analysis;
mod blocks;
mod card;
mod coding;
mod compress;
mod config;
mod encode;
mod estimate;
mod fingerprint;
mod folder;
mod gap;
mod input;
mod loading;
mod options;
mod outline;
mod output;
mod plan;
mod planned;
mod rename;
mod replace;
mod report;
mod restore;
mod sections;
mod temporary;
mod tile;

pub use analysis::MIN_CODED_BYTES;
pub use card::Card;
pub use compress::{compress, compress_all, convert, convert_all};
pub use estimate::{Estimate, estimate, estimate_all, estimate_headers};
pub use loading::Loading;
pub use options::{CompressOptions, DecompressOptions, Layout};
pub use rename::write_file;
pub use replace::check_replaceable;
pub use report::Report;
pub use restore::{Restored, decompress, decompress_all};
pub use temporary::{Leftover, leftovers, remove_leftovers};
