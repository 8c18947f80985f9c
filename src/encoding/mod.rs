//! How tensors are stored: one folder an encoding, with pure functions between the weights of a
//! tensor and its arrays. What reads stored tensors knows an encoding by the traits in [`stored`].

pub mod gap;
pub mod stored;
pub mod tile;
