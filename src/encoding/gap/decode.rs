//! Decodes ranges of thread blocks, and checks the whole index, although decoding uses only the
//! starts of thread blocks.

use std::{borrow::Cow, ops::Range};

use super::{
    index::{Crossings, GROUP},
    lanes::{ExponentRun, LANES, Lane, Misread, run},
    sizes::{BITSTREAM, CODEBOOK, GAPS, GapSizes, OUTPUT_OFFSETS, PLANE},
};
use crate::{
    Error, Result, bf16,
    constants::{GAP_THREADS_PER_BYTE, OUTPUT_OFFSET_BYTES},
    encoding::stored::{
        CodedSizes, DecodeArrays, ReadArrays, SECTION_BITSTREAM, SECTION_CODEBOOK, SECTION_INDEX,
        SECTION_PLANE, Scratch,
    },
    huffman::{self, CodeLengths, Luts, SymbolTable, bits::is_zero_from},
};

impl CodedSizes for GapSizes {
    fn parameters(&self) -> [u64; 4] {
        let geometry = self.geometry();
        let (bytes, threads) = (geometry.bytes_per_thread(), geometry.threads_per_block());
        [bytes.into(), threads.into(), self.bit_count(), 0]
    }

    fn elements(&self) -> u64 {
        self.elements()
    }

    fn arrays(&self) -> Vec<(u32, u64)> {
        let kinds =
            [SECTION_CODEBOOK, SECTION_INDEX, SECTION_INDEX, SECTION_BITSTREAM, SECTION_PLANE];
        kinds.into_iter().zip(self.array_lengths()).collect()
    }

    fn prepare<'m>(&self, arrays: &dyn ReadArrays<'m>) -> Result<Box<dyn DecodeArrays + 'm>> {
        let lengths = huffman::read_codebook(&self.read_whole(arrays, CODEBOOK)?)?;
        let output_offsets = self.read_whole(arrays, OUTPUT_OFFSETS)?;
        self.check_output_offsets(&output_offsets)?;
        let luts = Luts::new(&lengths);
        let table = (self.elements() >= SYMBOL_TABLE_ELEMENTS).then(|| SymbolTable::new(&luts));
        Ok(Box::new(GapDecoder { lengths, luts, table, sizes: *self, output_offsets }))
    }

    fn verify_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<()> {
        huffman::verify_codebook(&self.read_whole(arrays, CODEBOOK)?)?;
        let end = self.array_lengths()[GAPS];
        let last_gaps = arrays.read(GAPS, end - 1..end)?;
        let is_used = self.thread_count() % GAP_THREADS_PER_BYTE != 1;
        Error::unless(is_used || last_gaps[0] >> 4 == 0, || {
            Error::corrupt("gaps", end - 1, "the unused last gap is not zero")
        })
    }
}

/// Consecutive thread blocks of a tensor, with just the bytes that decoding them needs.
struct Span<'a> {
    thread_blocks: Range<u64>,
    gaps: &'a [u8],
    output_offsets: &'a [[u8; OUTPUT_OFFSET_BYTES]],
    bitstream: &'a [u8],
}

impl Span<'_> {
    /// The gap of a thread, counted from the first one of the span.
    fn gap(&self, thread: u64) -> usize {
        let byte = self.gaps[(thread / GAP_THREADS_PER_BYTE) as usize];
        usize::from(byte >> (4 * (thread % GAP_THREADS_PER_BYTE)) & 0xF)
    }

    /// The first bit of the span, counted from the start of the tensor's bitstream.
    fn first_bit(&self, sizes: &GapSizes) -> u64 {
        self.thread_blocks.start * sizes.geometry().thread_block_bits()
    }

    /// The first boundary at or after the start of a thread block, in bits from the start of the
    /// span; the end of the last code for the thread block after the last.
    fn boundary(&self, sizes: &GapSizes, thread_block: u64) -> usize {
        if thread_block == sizes.thread_block_count() {
            return (sizes.bit_count() - self.first_bit(sizes)) as usize;
        }
        let blocks = thread_block - self.thread_blocks.start;
        let threads = blocks * u64::from(sizes.geometry().threads_per_block());
        (blocks * sizes.geometry().thread_block_bits()) as usize + self.gap(threads)
    }

    /// A thread block, checked as far as the index alone allows.
    fn lane(&self, sizes: &GapSizes, thread_block: u64) -> Result<Lane> {
        let corrupt = |problem: &str| {
            let at = thread_block * OUTPUT_OFFSET_BYTES as u64;
            Err(Error::corrupt("output offsets", at, problem))
        };
        let at = (thread_block - self.thread_blocks.start) as usize;
        let [element, next] = [at, at + 1].map(|at| u64::from_le_bytes(self.output_offsets[at]));
        let bits = self.boundary(sizes, thread_block)..self.boundary(sizes, thread_block + 1);
        if thread_block == 0 && bits.start != 0 {
            return corrupt("the first thread block must start with gap 0");
        }
        let Some(count) = next.checked_sub(element).filter(|_| next <= sizes.elements()) else {
            return corrupt("entries must ascend to the number of elements");
        };
        if bits.end.checked_sub(bits.start).is_none_or(|bits| count > bits as u64) {
            return corrupt("the thread block has more codes than bits");
        }
        Ok(Lane::new(element, count as usize, bits))
    }
}

/// Tensors of fewer weights are decoded code by code: the table would cost more than it saves.
const SYMBOL_TABLE_ELEMENTS: u64 = 1 << 14;

/// A tensor prepared for decoding.
struct GapDecoder<'m> {
    lengths: CodeLengths,
    luts: Luts,
    table: Option<SymbolTable>,
    sizes: GapSizes,
    /// They ascend from 0 to the number of elements, so the thread blocks that are found for a
    /// range of weights hold all of it.
    output_offsets: Cow<'m, [u8]>,
}

impl DecodeArrays for GapDecoder<'_> {
    /// Every thread block that holds some of the weights is decoded to its end.
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        let Scratch { index, bitstream, plane } = scratch;
        let span = self.span(arrays, &elements, index, bitstream)?;
        let plane = arrays.read_with(PLANE, elements.clone(), plane)?;
        assert_eq!(out.len(), 2 * plane.len(), "two bytes for each weight");
        let mut merged = 0;
        self.walk(&span, |decoded| {
            let end = decoded.element + decoded.exponents.len() as u64;
            let (from, to) = (decoded.element.max(elements.start), end.min(elements.end));
            if from < to {
                let here = (from - decoded.element) as usize..(to - decoded.element) as usize;
                let there = (from - elements.start) as usize..(to - elements.start) as usize;
                merged += there.len();
                let weights = &mut out[2 * there.start..2 * there.end];
                bf16::merge(&decoded.exponents[here], &plane[there], weights);
            }
            Ok(())
        })?;
        Error::unless(merged == plane.len(), || {
            let at = OUTPUT_OFFSET_BYTES as u64 * span.thread_blocks.start;
            Error::corrupt("output offsets", at, "the thread blocks hold other weights")
        })
    }

    /// The gap and the output offset with which a span starts are checked with the span before it;
    /// so verifying all of a tensor in parts checks its whole index.
    ///
    /// Output offsets need no check of their own: decoding counts the codes from each thread
    /// block's first boundary to the next.
    fn verify(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let span = self.span(arrays, &elements, &mut scratch.index, &mut scratch.bitstream)?;
        let mut crossings = Crossings::new(self.sizes.geometry().thread_bits() as usize);
        self.walk(&span, |decoded| self.check_boundaries(&span, &decoded, &mut crossings))
    }
}

impl GapDecoder<'_> {
    /// The thread blocks that hold these weights.
    fn span<'s>(
        &'s self,
        arrays: &'s dyn ReadArrays<'_>,
        elements: &Range<u64>,
        gaps: &'s mut Vec<u8>,
        bitstream: &'s mut Vec<u8>,
    ) -> Result<Span<'s>> {
        let thread_blocks = self.sizes.thread_blocks_of(&self.output_offsets, elements)?;
        let [of_gaps, of_bitstream] = self.sizes.parts_of(&thread_blocks);
        let bits = 8 * (of_bitstream.end - of_bitstream.start);
        Error::check_limit("the bits of thread blocks to decode at once", bits, usize::MAX as u64)?;
        let offsets = self.output_offsets.as_chunks().0;
        Ok(Span {
            gaps: arrays.read_with(GAPS, of_gaps, gaps)?,
            output_offsets: &offsets[thread_blocks.start as usize..=thread_blocks.end as usize],
            bitstream: arrays.read_with(BITSTREAM, of_bitstream, bitstream)?,
            thread_blocks,
        })
    }

    /// Decodes the exponents of a span, handing them on in pieces: in order within a thread block,
    /// and thread blocks in any order.
    fn walk(
        &self,
        span: &Span<'_>,
        mut hand: impl FnMut(ExponentRun<'_>) -> Result<()>,
    ) -> Result<()> {
        let stream = span.bitstream;
        let mut waiting = span.thread_blocks.clone();
        let mut lanes: Vec<Lane> = Vec::with_capacity(LANES);
        loop {
            for thread_block in waiting.by_ref().take(LANES - lanes.len()) {
                lanes.push(span.lane(&self.sizes, thread_block)?);
            }
            if lanes.is_empty() {
                break;
            }
            self.advance(&mut lanes, stream).map_err(|at| self.misread(span, at))?;
            for lane in &mut lanes {
                hand(lane.hand_on())?;
            }
            let mut at = 0;
            while at < lanes.len() {
                if self.table.is_some() && !lanes[at].is_near_its_end(stream) {
                    at += 1;
                    continue;
                }
                let mut lane = lanes.swap_remove(at);
                loop {
                    let done =
                        lane.walk(&self.luts, stream).map_err(|at| self.misread(span, at))?;
                    hand(lane.hand_on())?;
                    if done {
                        break;
                    }
                }
            }
        }
        self.check_padding(span)
    }

    /// Takes the lanes some way with the table: together where all are busy, else one after the
    /// other.
    fn advance(&self, lanes: &mut [Lane], stream: &[u8]) -> Result<(), Misread> {
        let Some(table) = &self.table else { return Ok(()) };
        if let Ok(lanes) = <&mut [Lane; LANES]>::try_from(&mut *lanes) {
            return run(lanes, table, &self.luts, stream);
        }
        lanes
            .iter_mut()
            .try_for_each(|lane| run(std::array::from_mut(lane), table, &self.luts, stream))
    }

    fn check_padding(&self, span: &Span<'_>) -> Result<()> {
        if span.thread_blocks.end < self.sizes.thread_block_count() {
            return Ok(());
        }
        let end = self.sizes.bit_count();
        let after = (end - span.first_bit(&self.sizes)) as usize;
        Error::unless(is_zero_from(span.bitstream, after), || {
            Error::corrupt("bitstream", end / 8, "the bits after the last code are not zero")
        })
    }

    fn misread(&self, span: &Span<'_>, at: Misread) -> Error {
        let byte = (span.first_bit(&self.sizes) + at.bit as u64) / 8;
        Error::corrupt("bitstream", byte, "the codes do not lead to the next boundary of the index")
    }

    /// Checks the threads into which these codes cross.
    fn check_boundaries(
        &self,
        span: &Span<'_>,
        decoded: &ExponentRun<'_>,
        crossings: &mut Crossings,
    ) -> Result<()> {
        let thread_bits = self.sizes.geometry().thread_bits() as usize;
        let lengths = self.lengths.as_bytes();
        let length = |exponent: u8| usize::from(lengths[usize::from(exponent)]);
        let mut bit = decoded.bit;
        // A boundary at the very start was checked as the end of the code before it.
        let mut thread = bit / thread_bits + 1;
        let (groups, rest) = decoded.exponents.as_chunks::<GROUP>();
        for (group, exponents) in groups.iter().enumerate() {
            crossings.note(bit, group);
            bit += exponents.iter().map(|&exponent| length(exponent)).sum::<usize>();
        }
        while thread * thread_bits <= bit {
            let (boundary, _) = crossings.find(thread * thread_bits, decoded.exponents, lengths);
            self.check_gap(span, thread, boundary - thread * thread_bits)?;
            thread += 1;
        }
        for &exponent in rest {
            bit += length(exponent);
            if let Some(gap) = bit.checked_sub(thread * thread_bits) {
                self.check_gap(span, thread, gap)?;
                thread += 1;
            }
        }
        Ok(())
    }

    /// Checks the gap of a thread, counted from the first one of the span.
    fn check_gap(&self, span: &Span<'_>, thread: usize, gap: usize) -> Result<()> {
        let first = span.thread_blocks.start * u64::from(self.sizes.geometry().threads_per_block());
        let index = first + thread as u64;
        let holds = index >= self.sizes.thread_count() || span.gap(thread as u64) == gap;
        Error::unless(holds, || {
            let problem = format!("the gap of thread {index} must be {gap}");
            Error::corrupt("gaps", index / GAP_THREADS_PER_BYTE, problem)
        })
    }
}
