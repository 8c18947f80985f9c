//! How tensors are stored: pure functions between weights and the arrays of a section, without I/O.
pub mod gap;
pub mod tile;
