//! The library from outside.

#[path = "support/container.rs"]
mod container;
#[path = "library/copies.rs"]
mod copies;
#[path = "library/decoder.rs"]
mod decoder;
#[path = "library/delta.rs"]
mod delta;
#[path = "library/estimate.rs"]
mod estimate;
#[path = "support/files.rs"]
mod files;
#[path = "library/grouping.rs"]
mod grouping;
#[path = "library/hostile.rs"]
mod hostile;
#[cfg(feature = "cuda")]
#[path = "library/plan.rs"]
mod plan;
#[path = "library/roundtrip.rs"]
mod roundtrip;
#[path = "library/side_files.rs"]
mod side_files;
#[path = "library/slices.rs"]
mod slices;
#[path = "library/source.rs"]
mod source;
#[path = "library/zero_bits.rs"]
mod zero_bits;
