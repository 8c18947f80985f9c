//! Compares the specification with the code, and the test vectors with their readers.

#[path = "spec/bincode_witness.rs"]
mod bincode_witness;
#[path = "support/container.rs"]
mod container;
#[path = "spec/examples.rs"]
mod examples;
#[path = "spec/vectors.rs"]
mod read_vectors;
#[path = "spec/tables.rs"]
mod tables;
#[path = "support/vectors/mod.rs"]
mod vectors;
