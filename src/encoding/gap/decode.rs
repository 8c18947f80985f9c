//! Decoding spans of thread blocks, and checking all of the index, of which decoding uses but the
//! starts of thread blocks.

use std::ops::Range;

use super::{
    index::{Crossings, GROUP},
    lanes::{ExponentRun, LANES, Lane, NoCode, run},
    sizes::GapSizes,
};
use crate::{
    Error, Result, bf16,
    constants::{GAP_THREADS_PER_BYTE, OUTPUT_OFFSET_BYTES},
    huffman::{CodeLengths, Luts, SymbolTable, bits::is_zero_from},
};

/// Consecutive thread blocks of a tensor, with just the bytes that decoding them needs.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Which thread blocks of the tensor.
    pub thread_blocks: Range<u64>,
    /// The bytes [`GapSizes::gaps_of`] of the gap array.
    pub gaps: &'a [u8],
    /// The bytes [`GapSizes::output_offsets_of`] of the output offsets.
    pub output_offsets: &'a [u8],
    /// The bytes [`GapSizes::bitstream_of`] of the bitstream.
    pub bitstream: &'a [u8],
}

impl Span<'_> {
    /// Checks that the arrays have the sizes that the layout gives them.
    fn check(&self, sizes: &GapSizes) -> Result<()> {
        let fits = |array: &[u8], range: Range<u64>| array.len() as u64 == range.end - range.start;
        let fit = fits(self.gaps, sizes.gaps_of(&self.thread_blocks)?)
            && fits(self.output_offsets, sizes.output_offsets_of(&self.thread_blocks)?)
            && fits(self.bitstream, sizes.bitstream_of(&self.thread_blocks)?)
            && usize::try_from(8 * self.bitstream.len() as u64).is_ok();
        Error::unless(fit, || {
            let problem = "the arrays of a span have other sizes than its layout";
            Error::parameter(problem, "pass the parts that it names")
        })
    }

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

    /// A thread block of a checked span, checked as far as the index alone allows.
    fn lane(&self, sizes: &GapSizes, thread_block: u64) -> Result<Lane> {
        let at = thread_block * OUTPUT_OFFSET_BYTES as u64;
        let corrupt = |problem: &str| Err(Error::corrupt("output offsets", at, problem));
        let offsets = self.output_offsets.as_chunks::<OUTPUT_OFFSET_BYTES>().0;
        let offset = |thread_block: u64| {
            u64::from_le_bytes(offsets[(thread_block - self.thread_blocks.start) as usize])
        };
        let (element, next) = (offset(thread_block), offset(thread_block + 1));
        let bits = self.boundary(sizes, thread_block)..self.boundary(sizes, thread_block + 1);
        if thread_block == 0 && (element, bits.start) != (0, 0) {
            return corrupt("the first thread block must start at the first weight, with gap 0");
        }
        if thread_block + 1 == sizes.thread_block_count() && next != sizes.elements() {
            return corrupt("the last entry must be the number of elements");
        }
        if element > next || next > sizes.elements() {
            return corrupt("entries must ascend to the number of elements");
        }
        let count = next - element;
        if bits.end.checked_sub(bits.start).is_none_or(|bits| count > bits as u64) {
            return corrupt("the thread block has more codes than bits");
        }
        Ok(Lane::new(element, count as usize, bits))
    }
}

/// Tensors of fewer weights are decoded code by code: the table would cost more than it saves.
const SYMBOL_TABLE_ELEMENTS: u64 = 1 << 14;

/// Decodes the weights of one tensor; share it between threads.
///
/// Any bytes are safe to decode: every read stays in its array, every write in the output, each
/// step consumes a bit or more, and codes that do not end where the index says are an error.
#[derive(Clone, Debug)]
pub struct GapDecoder {
    lengths: CodeLengths,
    luts: Luts,
    table: Option<SymbolTable>,
    sizes: GapSizes,
}

impl GapDecoder {
    /// Derives the tables of a tensor: some microseconds, for a big tensor some tens.
    pub fn new(lengths: &CodeLengths, sizes: &GapSizes) -> Self {
        let luts = Luts::new(lengths);
        let table = (sizes.elements() >= SYMBOL_TABLE_ELEMENTS).then(|| SymbolTable::new(&luts));
        Self { lengths: lengths.clone(), luts, table, sizes: *sizes }
    }

    /// Decodes a range of weights, all of whose codes start in the span, into little-endian BF16
    /// (`2n` bytes for `n` weights); `plane` holds their `n` plane bytes.
    ///
    /// Every thread block of the span is decoded to its end, so the cost is that of the span, plus
    /// that of merging the range.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the index contradicts itself or the codes, where a code is none, or
    /// where padding is not zero; then `weights` holds anything. [`Error::Parameter`] if a slice
    /// has another size than the range or the span asks for.
    pub fn decode(
        &self,
        span: &Span<'_>,
        elements: Range<u64>,
        plane: &[u8],
        weights: &mut [u8],
    ) -> Result<()> {
        let fits = elements.end.checked_sub(elements.start) == Some(plane.len() as u64)
            && weights.len() == 2 * plane.len();
        Error::unless(fits, || {
            let problem = "plane and output have other sizes than the range";
            Error::parameter(problem, "pass n and 2n bytes")
        })?;
        Error::unless(elements.end <= self.sizes.elements(), || {
            Error::parameter("no such range of weights", "ask for weights that exist")
        })?;
        let mut merged = 0;
        self.walk(span, |decoded| {
            let end = decoded.element + decoded.exponents.len() as u64;
            let (from, to) = (decoded.element.max(elements.start), end.min(elements.end));
            if from < to {
                let here = (from - decoded.element) as usize..(to - decoded.element) as usize;
                let there = (from - elements.start) as usize..(to - elements.start) as usize;
                merged += there.len();
                let weights = &mut weights[2 * there.start..2 * there.end];
                bf16::merge(&decoded.exponents[here], &plane[there], weights);
            }
            Ok(())
        })?;
        Error::unless(merged == plane.len(), || {
            let at = 8 * span.thread_blocks.start;
            Error::corrupt("output offsets", at, "the thread blocks hold other weights")
        })
    }

    /// Decodes the exponents of a span, handing them on in pieces: in order within a thread block,
    /// and thread blocks in any order.
    fn walk(
        &self,
        span: &Span<'_>,
        mut hand: impl FnMut(ExponentRun<'_>) -> Result<()>,
    ) -> Result<()> {
        span.check(&self.sizes)?;
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
            self.advance(&mut lanes, stream).map_err(|at| self.no_code(span, at))?;
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
                        lane.walk(&self.luts, stream).map_err(|at| self.no_code(span, at))?;
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
    fn advance(&self, lanes: &mut [Lane], stream: &[u8]) -> Result<(), NoCode> {
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
        let behind = (end - span.first_bit(&self.sizes)) as usize;
        Error::unless(is_zero_from(span.bitstream, behind), || {
            Error::corrupt("bitstream", end / 8, "the bits behind the last code are not zero")
        })
    }

    fn no_code(&self, span: &Span<'_>, at: NoCode) -> Error {
        let byte = (span.first_bit(&self.sizes) + at.bit as u64) / 8;
        Error::corrupt("bitstream", byte, "the codes do not lead to the next boundary of the index")
    }

    /// Checks every gap and output offset of a span against the codes, and all that
    /// [`decode`](Self::decode) checks.
    ///
    /// The gap and the output offset with which a span starts are checked with the span before it;
    /// so verifying all spans of a tensor checks its whole index. Costs about twice as much as
    /// decoding.
    ///
    /// Output offsets need no check of their own: the first must be 0, and decoding counts the
    /// codes from each thread block's first boundary to the next.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the byte of the array at fault; [`Error::Parameter`] if the span's
    /// arrays have other sizes than its layout.
    pub fn verify_index(&self, span: &Span<'_>) -> Result<()> {
        let mut crossings = Crossings::new(self.sizes.geometry().thread_bits() as usize);
        self.walk(span, |decoded| self.check_boundaries(span, &decoded, &mut crossings))?;
        let is_last = span.thread_blocks.end == self.sizes.thread_block_count();
        match span.gaps.last() {
            Some(&last) if is_last => self.sizes.check_unused_gap(last),
            _ => Ok(()),
        }
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
