//! The encoding `delta` (spec/format.md, 6.6): a BF16 tensor as its differences from the tensor of
//! the same name in another model, its *base*.
//!
//! A difference counts the BF16 values between two weights. A fine-tune changes all its weights by
//! about the same amount, which is few BF16 values for a large weight and many for a small one. The
//! exponent of the base tells how many to expect, and is the *context* of the code. Most
//! differences of a short fine-tune are 0, which should take far less than a bit, so the code is
//! rANS. Four states take weights in turn, and a core computes them in parallel.
//!
//! ```text
//! base     b0 b1 b2 b3 b4 b5 b6 b7 | b8 ...
//! state     0  1  2  3  0  1  2  3 |  0 ...     after eight weights each takes a word, or none
//! segment  words | states | words | raw bits
//! ```
//! *Segments* of about 2^18 weights are coded and decoded independently.
//!
//! Q: Why is this fast? The four states stay in registers, nothing branches, and contexts and sums
//! are computed for many weights at once.

mod codebook;
mod decode;
mod encode;
mod sizes;
mod token;

pub use codebook::{Codebook, Differences};
pub use decode::WithBase;
pub use encode::{Encoder, encode_tensor};
pub use sizes::{BITSTREAM, CODEBOOK, DeltaSizes, RECORDS, segment_elements};
