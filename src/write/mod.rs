//! Writing: `first pass → plan → second pass → container`, and back to the original files.

mod analysis;
mod card;
mod coding;
mod compress;
mod copy;
mod encode;
mod estimate;
mod folder;
mod input;
mod install;
mod options;
mod plan;
mod replace;
mod report;
mod restore;
mod temporary;

pub use analysis::MIN_CODED_BYTES;
pub use card::Loading;
pub use compress::{compress, compress_all, convert, convert_all};
pub use copy::copy;
pub use estimate::{Estimate, estimate, estimate_all};
pub use install::SaveTarget;
pub use options::{Card, CompressOptions, DecompressOptions, Layout};
pub use replace::{check_replaceable, earlier_containers};
pub use report::Report;
pub use restore::{Restored, decompress, decompress_all};
pub use temporary::{Leftover, TemporaryFolder, leftovers, remove_leftovers, write_file};
