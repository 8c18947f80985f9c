//! The exponent code: how often each exponent occurs, how long its code is, and the tables that
//! write and read it.
//!
//! `Histogram → CodeLengths → Codes`. The code is canonical, so the lengths alone define it; the
//! tables of readers are derived from them too.

pub(crate) mod bits;
mod code;
mod histogram;
mod tables;

pub use code::{Code, CodeLengths, Codes};
pub(crate) use code::{assign, is_complete, least_bits, package_merge};
pub use histogram::Histogram;
pub(crate) use tables::{Luts, SYMBOLS_PER_ENTRY, SymbolTable, TABLE_BITS, verify_codebook};
pub use tables::{codebook, read_codebook};
