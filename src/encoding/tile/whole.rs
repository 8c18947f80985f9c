//! Whole tensors in memory: what tests and small tools want.

use std::ops::Range;

use super::{Codebook, EncodedStrips, Encoder, Geometry, PairHistogram, Sizes, Span, TileDecoder};
use crate::{Error, Result, encoding::part, parallel};

/// The four arrays of a tensor, and the numbers that its directory record holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedTensor {
    /// Elements, bits, tiles.
    pub sizes: Sizes,
    /// The code.
    pub codebook: Vec<u8>,
    /// 32 bytes a tile, and 32 more.
    pub records: Vec<u8>,
    /// The bits of all tiles.
    pub bitstream: Vec<u8>,
    /// One byte a weight.
    pub plane: Vec<u8>,
}

/// Encodes `n` little-endian BF16 weights (`2n` bytes), strip by strip.
///
/// # Errors
/// [`Error::Parameter`] if `weights` are not as many as the geometry's elements.
pub fn encode_tensor(weights: &[u8], geometry: Geometry) -> Result<EncodedTensor> {
    if weights.len() as u64 != 2 * geometry.elements() {
        return Err(Error::parameter(
            "the weights are not those of the geometry",
            "pass a whole tensor",
        ));
    }
    let mut histogram = PairHistogram::new();
    histogram.add(weights);
    let codebook = Codebook::from_histogram(&histogram)?;
    let encoder = Encoder::new(&codebook, geometry);
    let mut output = EncodedStrips::default();
    let mut bytes = 0;
    for (strip, weights) in (0..).zip(weights.chunks(2 * geometry.strip_elements() as usize)) {
        encoder.encode_strip(strip, weights, bytes, &mut output)?;
        bytes += encoder.strip_bytes(strip, weights)?;
    }
    let codebook = codebook.to_bytes();
    let sizes = Sizes::new(geometry, 8 * bytes, codebook.len() as u64)?;
    let EncodedStrips { records, bitstream, plane } = output;
    Ok(EncodedTensor { sizes, codebook, records, bitstream, plane })
}

impl EncodedTensor {
    /// The parts of the arrays that some strips need.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the strips are none or reach beyond the tensor, or an array is
    /// shorter than its size; [`Error::Corrupt`] as [`Sizes::bitstream_of`].
    pub fn span(&self, strips: Range<u64>) -> Result<Span<'_>> {
        let records = part(&self.records, self.sizes.records_of(&strips)?)?;
        let bitstream = part(&self.bitstream, self.sizes.bitstream_of(records, &strips)?)?;
        let plane = part(&self.plane, self.sizes.plane_of(&strips)?)?;
        Ok(Span { strips, records, bitstream, plane })
    }

    /// Decodes a range of weights into little-endian BF16.
    ///
    /// # Errors
    /// As [`TileDecoder::decode_strips`], [`Codebook::from_bytes`] and [`span`](Self::span).
    pub fn decode(&self, elements: Range<u64>) -> Result<Vec<u8>> {
        let decoder = TileDecoder::new(&Codebook::from_bytes(&self.codebook)?, &self.sizes);
        let span = self.span(self.sizes.strips_of(&elements)?)?;
        let mut weights = vec![0; 2 * (elements.end - elements.start) as usize];
        decoder.decode_strips(&span, elements, &mut weights)?;
        Ok(weights)
    }

    /// Verifies all strips, `strips_a_span` at a time.
    ///
    /// # Errors
    /// As [`TileDecoder::verify_strips`], [`Codebook::from_bytes`] and [`span`](Self::span).
    pub fn verify(&self, strips_a_span: u64) -> Result<()> {
        let decoder = TileDecoder::new(&Codebook::from_bytes(&self.codebook)?, &self.sizes);
        parallel::cut(0..self.sizes.strip_count(), strips_a_span, 1)
            .try_for_each(|strips| decoder.verify_strips(&self.span(strips)?))
    }
}
