//! A tensor in the `gap` encoding by its five arrays: how ranges of it are read where it is
//! stored, and whole tensors in memory, which tests and small tools want.

use std::{borrow::Cow, ops::Range};

use super::{
    decode::{GapDecoder, Span},
    encode::{PlacedBytes, PortionEncoder, PortionInput, PortionOutput},
    sizes::{GapSizes, Geometry},
};
use crate::{
    Result,
    encoding::stored::{ArrayKind, CodedSizes, DecodeArrays, ReadArrays, Scratch, part},
    huffman::{self, CodeLengths, Histogram},
};

// Its arrays by number, in the order of a tensor's record.
pub(crate) const CODEBOOK: usize = 0;
pub(crate) const GAPS: usize = 1;
pub(crate) const OUTPUT_OFFSETS: usize = 2;
pub(crate) const BITSTREAM: usize = 3;
pub(crate) const PLANE: usize = 4;

impl GapSizes {
    /// Of a tensor whose record has these parameters, and whose codebook has as many bytes.
    pub(crate) fn of_record(
        [bytes_per_thread, threads_per_block, bit_count]: [u64; 3],
        elements: u64,
        codebook_bytes: u64,
    ) -> Result<Self> {
        let geometry = Geometry::from_parameters(bytes_per_thread, threads_per_block)?;
        Self::new(geometry, elements, bit_count, Self::lut_count_of(codebook_bytes)?)
    }
}

impl CodedSizes for GapSizes {
    fn parameters(&self) -> [u64; 3] {
        let geometry = self.geometry();
        let (bytes, threads) = (geometry.bytes_per_thread(), geometry.threads_per_block());
        [bytes.into(), threads.into(), self.bit_count()]
    }

    fn arrays(&self) -> Vec<(ArrayKind, u64)> {
        vec![
            (ArrayKind::Codebook, self.codebook_bytes()),
            (ArrayKind::Index, self.gaps_bytes()),
            (ArrayKind::Index, self.output_offsets_bytes()),
            (ArrayKind::Bitstream, self.bitstream_bytes()),
            (ArrayKind::Plane, self.plane_bytes()),
        ]
    }

    fn prepare<'m>(&self, arrays: &dyn ReadArrays<'m>) -> Result<Box<dyn DecodeArrays + 'm>> {
        let codebook = arrays.read(CODEBOOK, 0..self.codebook_bytes())?;
        let output_offsets = arrays.read(OUTPUT_OFFSETS, 0..self.output_offsets_bytes())?;
        let lengths = huffman::read_codebook(&codebook)?;
        self.check_output_offsets(&output_offsets)?;
        let decoder = GapDecoder::new(&lengths, self);
        Ok(Box::new(GapArrays { sizes: *self, decoder, output_offsets }))
    }

    fn verify_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<()> {
        let codebook = arrays.read(CODEBOOK, 0..self.codebook_bytes())?;
        let end = self.gaps_bytes();
        let last_gaps = arrays.read(GAPS, end - 1..end)?;
        huffman::verify_codebook(&codebook)?;
        self.check_unused_gap(last_gaps[0])
    }
}

/// A tensor prepared for decoding.
struct GapArrays<'m> {
    sizes: GapSizes,
    decoder: GapDecoder,
    output_offsets: Cow<'m, [u8]>,
}

impl GapArrays<'_> {
    /// Fetches the span that holds these elements; `work` gets it and scratch for the plane.
    fn with_span(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: &Range<u64>,
        scratch: &mut Scratch,
        work: impl FnOnce(&Span<'_>, &mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let Scratch { index, bitstream, plane } = scratch;
        let (sizes, locate) = (&self.sizes, |error| arrays.locate(error));
        let thread_blocks =
            sizes.thread_blocks_of(&self.output_offsets, elements).map_err(locate)?;
        let offsets = sizes.output_offsets_of(&thread_blocks)?;
        let output_offsets = &self.output_offsets[offsets.start as usize..offsets.end as usize];
        let gaps = arrays.read_with(GAPS, sizes.gaps_of(&thread_blocks)?, index)?;
        let range = sizes.bitstream_of(&thread_blocks)?;
        let bitstream = arrays.read_with(BITSTREAM, range, bitstream)?;
        work(&Span { thread_blocks, gaps, output_offsets, bitstream }, plane).map_err(locate)
    }
}

impl DecodeArrays for GapArrays<'_> {
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        self.with_span(arrays, &elements, scratch, |span, scratch| {
            let plane = arrays.read_with(PLANE, elements.clone(), scratch)?;
            self.decoder.decode(span, elements.clone(), plane, out)
        })
    }

    fn verify(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.with_span(arrays, &elements, scratch, |span, _| self.decoder.verify_index(span))
    }
}

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
        codebook: huffman::codebook(&lengths),
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
        let decoder = GapDecoder::new(&huffman::read_codebook(&self.codebook)?, &self.sizes);
        self.sizes.check_output_offsets(&self.output_offsets)?;
        let span = self.span(self.sizes.thread_blocks_of(&self.output_offsets, &elements)?)?;
        let plane = &self.plane[elements.start as usize..elements.end as usize];
        let mut weights = vec![0; 2 * plane.len()];
        decoder.decode(&span, elements, plane, &mut weights)?;
        Ok(weights)
    }
}
