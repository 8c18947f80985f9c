//! A stored tensor in the `gap` encoding: its five arrays, and how ranges of it are read.

use std::{borrow::Cow, ops::Range};

use super::{GapDecoder, GapSizes, Geometry, Span};
use crate::{
    Result,
    encoding::stored::{ArrayKind, CodedSizes, DecodeArrays, ReadArrays, Scratch},
    huffman,
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
