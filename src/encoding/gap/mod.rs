//! The `gap` encoding (spec/format.md, "Encoding gap"), after DFloat11 (arXiv 2504.11651).
//!
//! The codes of a tensor's exponents follow each other in one bitstream. It is cut, as a GPU reads
//! it, into *threads* of equally many bytes and *thread blocks* of equally many threads. A
//! *boundary* is a bit position at which a code starts, or the end of the last code. A thread's
//! *gap* is the distance from its first bit to the next boundary; a thread block's *output offset*
//! is the index of the first weight whose code starts in it (or after it).
//!
//! ```text
//! bitstream       ··|code|code|co·de|code|code|c·ode|..|code|0000    T bytes per thread
//! thread            0              1               2
//! gap               0              2               3
//! ```

mod decode;
mod encode;
mod index;
mod lanes;
mod sizes;
mod writer;

pub use encode::{PortionEncoder, PortionInput, PortionOutput, encode_tensor};
pub use sizes::{
    BITSTREAM, CODEBOOK, EncodedTensor, GAPS, GapGeometry, GapSizes, OUTPUT_OFFSETS, PLANE,
};
