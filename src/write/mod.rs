//! Writing: `first pass → plan → second pass → container`, and back to the original files.
//!
//! # Bytes do not depend on threads
//!
//! A tensor is cut into *portions* of elements, whatever the number of threads. The first pass
//! counts the bits of each portion, so each portion knows its first bit. A portion of `gap` owns
//! whole *couples* of the bitstream (two threads whose gaps share a byte). It leaves the couple in
//! which it starts to the portion before, which reads some weights ahead to finish it. No two
//! portions write the same byte, so any thread may write any portion at any time. Checksums of
//! pieces are joined afterwards.
//!
//! A *strip* of `tile` fills whole bytes of each array. `coding` says why its bits are measured. A
//! *segment* of `delta` is a portion too. Only its encoding tells its length, so the first pass
//! encodes it, into a temporary file, and the second pass copies it.
//!
//! # Memory
//!
//! Compression needs some MiB per thread, and about 0.02 % of the model for its work list and
//! directory. Decompression needs some MiB per thread, `open` a few times the directory. The size
//! of the largest tensor matters in two cases: a caller of `decode` supplies buffers of its size,
//! and a thread works on whole strips of 32 rows, which take up to 0.25 KiB per column (measured:
//! 32 MiB per thread at 131,072 columns). The writer cuts a matrix of more than 262,144 columns as
//! a vector.
//!
//! # Which models
//!
//! A path holds one model, or the components of a pipeline. Files that belong to no component form
//! a model without weights, which comes last: its container lists the others, so a missing one is
//! noticed. Only an archive (`Sources::open_all_files`) keeps weights that an index does not name.
//! There a tensor that equals another one becomes its alias.
//!
//! # Outputs
//!
//! A container is written to a hidden temporary file with a header that says *unfinished*. Then
//! come directory and footer, a sync, the header, a sync, verification, and the rename. A folder is
//! filled under a temporary name and renamed whole. Its containers are closed between the second
//! pass and their seal (directory, footer and header), so a model may have more shards than a
//! process may have open files. A failure or a cancellation before the rename removes the temporary
//! files. Every file and folder of an output is created anew, so a disk on which two names are one
//! file is noticed, and the output refused.

mod analysis;
mod base;
mod card;
mod coding;
mod compress;
mod copy;
mod destination;
mod encode;
mod estimate;
mod fingerprint;
mod folder;
mod input;
mod install;
mod options;
mod pieces;
mod plan;
mod replace;
mod report;
mod restore;
mod spill;
#[cfg(feature = "remote")]
mod upload;

pub use card::Loading;
pub use compress::{compress, compress_all, convert, convert_all};
pub use copy::{container_path, copy};
pub use destination::Destination;
pub use estimate::{Estimate, estimate, estimate_all};
pub use install::SaveTarget;
pub use options::{Card, CompressOptions, DecompressOptions, Layout};
pub use pieces::MIN_CODED_BYTES;
pub use replace::{check_replaceable, earlier_containers};
pub use report::Report;
pub use restore::{Restored, decompress, decompress_all};
