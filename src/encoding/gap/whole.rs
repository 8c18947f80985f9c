//! Whole tensors in memory: what tests and small tools want.

use std::ops::Range;

use super::{
    GapDecoder, GapSizes, Geometry, PlacedBytes, PortionEncoder, PortionInput, PortionOutput, Span,
};
use crate::Result;
use crate::encoding::part;
use crate::huffman::{CodeLengths, Histogram, codebook};

/// The five arrays of a tensor, and the numbers that its directory record holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedTensor {
    /// Elements, bits, threads.
    pub sizes: GapSizes,
    /// Code lengths and LUTs.
    pub codebook: Vec<u8>,
    /// Half a byte a thread.
    pub gaps: Vec<u8>,
    /// 8 bytes a thread block, and 8 more.
    pub output_offsets: Vec<u8>,
    /// Whole threads.
    pub bitstream: Vec<u8>,
    /// One byte a weight.
    pub plane: Vec<u8>,
}

/// Encodes `n` little-endian BF16 weights (`2n` bytes) in portions of `portion_elements`, which do
/// not change the result.
///
/// # Errors
/// [`Error::Parameter`](crate::Error::Parameter) where there are no weights, an odd byte or no
/// elements a portion.
pub fn encode_tensor(
    weights: &[u8],
    geometry: Geometry,
    portion_elements: usize,
) -> Result<EncodedTensor> {
    let odd = !weights.len().is_multiple_of(2) || portion_elements == 0;
    let weights = if odd { &[] } else { weights };
    let histogram = Histogram::of(weights);
    let lengths = CodeLengths::from_histogram(&histogram)?;
    let sizes = GapSizes::plan(&lengths, &histogram, geometry)?;
    let zeros = |bytes: u64| vec![0; bytes as usize];
    let mut tensor = EncodedTensor {
        sizes,
        codebook: codebook(&lengths),
        gaps: zeros(sizes.gaps_bytes()),
        output_offsets: zeros(sizes.output_offsets_bytes()),
        bitstream: zeros(sizes.bitstream_bytes()),
        plane: zeros(sizes.plane_bytes()),
    };
    let encoder = PortionEncoder::new(&lengths, &sizes);
    let mut output = PortionOutput::default();
    let (mut first, mut start_bit) = (0, 0);
    while 2 * first < weights.len() {
        let elements = portion_elements.min(weights.len() / 2 - first);
        let end = first + elements;
        let end_bit = start_bit + lengths.bits(&Histogram::of(&weights[2 * first..2 * end]))?;
        let lookahead = (2 * (end + geometry.lookahead())).min(weights.len());
        let weights = &weights[2 * first..lookahead];
        encoder.encode(
            &PortionInput { weights, elements, first_element: first as u64, start_bit, end_bit },
            &mut output,
        )?;
        put(&mut tensor.gaps, output.gaps());
        put(&mut tensor.output_offsets, output.output_offsets());
        put(&mut tensor.bitstream, output.bitstream());
        put(&mut tensor.plane, output.plane());
        (first, start_bit) = (end, end_bit);
    }
    Ok(tensor)
}

fn put(array: &mut [u8], piece: PlacedBytes<'_>) {
    if !piece.bytes.is_empty() {
        let at = piece.offset as usize;
        array[at..at + piece.bytes.len()].copy_from_slice(piece.bytes);
    }
}

impl EncodedTensor {
    /// The parts of the arrays for a span of thread blocks.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the span is empty or reaches beyond the
    /// tensor, or an array is shorter than its size.
    pub fn span(&self, thread_blocks: Range<u64>) -> Result<Span<'_>> {
        let sizes = &self.sizes;
        Ok(Span {
            gaps: part(&self.gaps, sizes.gaps_of(&thread_blocks)?)?,
            output_offsets: part(&self.output_offsets, sizes.output_offsets_of(&thread_blocks)?)?,
            bitstream: part(&self.bitstream, sizes.bitstream_of(&thread_blocks)?)?,
            thread_blocks,
        })
    }

    /// Decodes a range of weights into little-endian BF16.
    ///
    /// # Errors
    /// As [`GapDecoder::decode`], and [`Error::Corrupt`](crate::Error::Corrupt) for a bad codebook.
    pub fn decode(&self, elements: Range<u64>) -> Result<Vec<u8>> {
        let decoder = GapDecoder::new(&crate::huffman::read_codebook(&self.codebook)?, &self.sizes);
        self.sizes.check_output_offsets(&self.output_offsets)?;
        let thread_blocks = self.sizes.thread_blocks_of(&self.output_offsets, &elements)?;
        let span = self.span(thread_blocks)?;
        let plane = &self.plane[elements.start as usize..elements.end as usize];
        let mut weights = vec![0; 2 * plane.len()];
        decoder.decode(&span, elements, plane, &mut weights)?;
        Ok(weights)
    }
}
