//! Encoding strip by strip: parallel, in bounded memory, and with the same bytes for any order.

use super::{Codebook, Geometry};
use crate::Result;

/// Encodes the strips of one tensor; share it between threads.
#[derive(Clone, Debug)]
pub struct Encoder {
    geometry: Geometry,
}

/// What strips add to the arrays of their tensor; reuse it, it keeps its buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedStrips {
    /// 32 bytes a tile; with the tensor's last strip 32 more, the last record.
    pub records: Vec<u8>,
    /// The bits of the tiles, whole bytes; with the tensor's last strip zeros up to a multiple of 16.
    pub bitstream: Vec<u8>,
    /// One byte a weight.
    pub plane: Vec<u8>,
}

impl EncodedStrips {
    /// Forgets the strips and keeps the memory.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bitstream.clear();
        self.plane.clear();
    }
}

impl Encoder {
    /// Prepares the table of a tensor: some ten microseconds.
    pub fn new(_codebook: &Codebook, geometry: Geometry) -> Self {
        Self { geometry }
    }

    /// The bytes of bitstream that a strip takes (without the zeros behind the tensor's last), from which the
    /// places of all strips follow: the bit count is 8 times their sum.
    ///
    /// # Errors
    /// As [`encode_strip`](Self::encode_strip).
    pub fn strip_bytes(&self, strip: u64, weights: &[u8]) -> Result<u64> {
        let _ = (strip, weights, self.geometry);
        todo!()
    }

    /// Encodes a strip, whose bits begin at byte `first_byte` of the bitstream, and appends it to `output`.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) where there is no such strip or `weights` are not as many
    /// as it has, and where a pair occurs that the codebook has no code for, as when the source changed between
    /// two passes. Then `output` holds nothing of use.
    pub fn encode_strip(
        &self,
        strip: u64,
        weights: &[u8],
        first_byte: u64,
        output: &mut EncodedStrips,
    ) -> Result<()> {
        let _ = (strip, weights, first_byte, output);
        todo!()
    }
}
