//! The exponent code: how often each exponent occurs, how long its code is, and the tables that
//! write and read it.
//!
//! `Histogram → CodeLengths → Codes` (to write) or `Luts`, `SymbolTable` (to read). The code is
//! canonical, so the lengths alone define it; everything else is derived.

pub mod bits;
mod codes;
mod histogram;
mod lengths;
mod lut;
pub(crate) mod package_merge;
mod symbol_table;

pub(crate) use codes::assign;
pub use codes::{Code, Codes};
pub use histogram::Histogram;
pub use lengths::CodeLengths;
pub use lut::{Luts, codebook, read_codebook, verify_codebook};
pub use symbol_table::{SYMBOLS_PER_ENTRY, SymbolTable, TABLE_BITS};
