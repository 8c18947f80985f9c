//! How tensors are stored: one folder an encoding, with pure functions between weights and the
//! arrays of a section. What reads stored tensors knows an encoding by the traits in [`stored`].

pub mod gap;
pub mod stored;
pub mod tile;
