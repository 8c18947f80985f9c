//! The reference decoder of the df11 format: what `spec/format.md` says, in the order in which it
//! says it.
//!
//! Clear rather than fast: it decodes bit by bit from the code lengths. Every fast path is tested
//! against it. It checks what section 9 demands of *open* and *load*, and no more; it has no
//! dependencies, hence no BLAKE3. No input makes it panic. Numbers in comments and messages are
//! sections of the specification.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod code;
mod delta;
mod float;
mod gap;
mod open;
mod record;
mod tile;

pub use delta::decode_delta;
pub use float::decode_float;
pub use gap::{canonical_codes, decode_gap, luts};
pub use open::{Container, TensorInfo};
pub use tile::decode_tile;

/// The problem of a file (1, *How a reader reports a problem*). An overflow is Corrupt here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The file may be valid, but needs a newer reader.
    Unsupported,
    /// A rule of the specification is broken.
    Corrupt,
    /// A limit of the specification is exceeded.
    Limit,
}

/// A problem in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The sort of problem.
    pub kind: Kind,
    /// The section and its rule, for people.
    pub message: &'static str,
}

/// The result of every function that reads a file.
pub type Result<T> = std::result::Result<T, Error>;

impl Kind {
    /// An error of this kind, unless the rule holds.
    fn unless(self, holds: bool, message: &'static str) -> Result<()> {
        if holds { Ok(()) } else { Err(Error { kind: self, message }) }
    }
}

fn require(holds: bool, message: &'static str) -> Result<()> {
    Kind::Corrupt.unless(holds, message)
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

/// The CRC-32/ISO-HDLC of `bytes` (1), bit by bit.
#[must_use]
pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xEDB8_8320 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
