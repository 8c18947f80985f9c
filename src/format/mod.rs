//! The container's bytes (spec/format.md): constants and records, without I/O.
pub mod constants;
