//! The container as bytes: header, directory, checksums. These are pure functions between bytes and
//! structs, without I/O.

mod check;
pub mod checksum;
pub mod directory;
pub mod header;
mod parse;
pub mod records;

pub(crate) use directory::Coded;
pub use directory::{Directory, IdentifiedFile, identity};
pub use header::Header;
