//! The reference decoder of the df11 format: what `spec/format.md` says, in the order in which it says it.
//!
//! Clear rather than fast: it decodes bit by bit from the code lengths. Every fast path is tested against it. It has
//! no dependencies, hence no BLAKE3: it checks everything but hashes and the identity. No input makes it panic.
//! Numbers in comments and messages are sections of the specification.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod container;
mod crc;
mod directory;
mod gap;
mod record;

pub use container::{Container, TensorInfo};
pub use crc::crc32;
pub use gap::{canonical_codes, decode_gap, luts, verify_gap};

/// What is wrong with a file (1, *How a reader reports a problem*).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The file may be valid, but needs a newer reader.
    Unsupported,
    /// A rule of the specification is broken.
    Corrupt,
    /// A limit of the specification is exceeded, or arithmetic overflows, or the caller asks for what is not there.
    Limit,
}

/// A problem in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What sort of problem.
    pub kind: Kind,
    /// The section and the rule behind it, for people.
    pub message: String,
}

/// The result of every function that reads a file.
pub type Result<T> = std::result::Result<T, Error>;

impl Kind {
    fn error(self, message: &str) -> Error {
        Error { kind: self, message: message.into() }
    }

    /// An error of this kind, unless the rule holds.
    fn unless(self, holds: bool, rule: &str) -> Result<()> {
        if holds { Ok(()) } else { Err(self.error(rule)) }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Error {}
