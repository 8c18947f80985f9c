//! Decoding spans of strips.

use std::ops::Range;

use super::{Codebook, Sizes};
use crate::Result;

/// Consecutive strips of a tensor, with just the bytes that decoding them needs.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Which strips of the tensor.
    pub strips: Range<u64>,
    /// The bytes [`Sizes::records_of`] of the records.
    pub records: &'a [u8],
    /// The bytes [`Sizes::bitstream_of`] of the bitstream.
    pub bitstream: &'a [u8],
    /// The bytes [`Sizes::plane_of`] of the plane.
    pub plane: &'a [u8],
}

/// Decodes the weights of one tensor; share it between threads.
///
/// Any bytes are safe to decode: every read stays in its array, every write in the output, and each step
/// consumes a bit or more.
#[derive(Clone, Debug)]
pub struct Decoder {
    sizes: Sizes,
}

impl Decoder {
    /// Derives the table of a tensor: some microseconds.
    pub fn new(_codebook: &Codebook, sizes: &Sizes) -> Self {
        Self { sizes: *sizes }
    }

    /// Decodes a range of weights of the span's strips into little-endian BF16, two bytes each.
    ///
    /// Tiles that hold none of them are not decoded; the cost is that of the others.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) where the records contradict themselves or the codes, or a code
    /// is none; then `weights` holds anything. [`Error::Parameter`](crate::Error::Parameter) where a slice has
    /// another size than the range or the span asks for.
    pub fn decode_strips(&self, span: &Span<'_>, elements: Range<u64>, weights: &mut [u8]) -> Result<()> {
        let _ = (span, elements, weights, self.sizes);
        todo!()
    }

    /// Checks everything about a span's strips that the specification demands, with what
    /// [`decode_strips`](Self::decode_strips) checks; costs about as much as decoding.
    ///
    /// # Errors
    /// As [`decode_strips`](Self::decode_strips).
    pub fn verify_strips(&self, span: &Span<'_>) -> Result<()> {
        let _ = span;
        todo!()
    }
}
