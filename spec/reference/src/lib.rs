//! Reference decoder.
