//! The targets: each runs one input, and panics if its property does not hold.

pub mod decode_vs_reference;
pub mod deltas_vs_reference;
pub mod import_raw;
pub mod import_structured;
pub mod open_raw;
pub mod open_structured;
pub mod roundtrip;
pub mod safetensors_in;
pub mod tiles_vs_reference;
