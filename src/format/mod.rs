//! The container as bytes: header, directory, checksums. Pure functions between bytes and structs,
//! no I/O.

pub mod checksum;
mod coded;
pub mod directory;
pub mod header;
pub mod identity;
mod parse;
pub mod records;
mod validate;
mod validate_sections;
mod validate_tensors;

pub(crate) use coded::{Coded, section_of};
pub use directory::Directory;
pub use header::Header;
pub use identity::{IdentifiedFile, identity};
