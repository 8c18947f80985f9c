//! Decoding spans of thread blocks.

use std::ops::Range;

use super::lanes::{ExponentRun, LANES, Lane, NoCode, run};
use super::{GapSizes, Span};
use crate::huffman::bits::is_zero_from;
use crate::huffman::{CodeLengths, Luts, SymbolTable};
use crate::{Error, Result, bf16};

/// Tensors of fewer weights are decoded code by code: the table would cost more than it saves.
const SYMBOL_TABLE_ELEMENTS: u64 = 1 << 14;

/// Decodes the weights of one tensor; share it between threads.
///
/// Any bytes are safe to decode: every read stays in its array, every write in the output, each
/// step consumes a bit or more, and codes that do not end where the index says are an error.
#[derive(Clone, Debug)]
pub struct GapDecoder {
    pub(super) lengths: CodeLengths,
    luts: Luts,
    table: Option<SymbolTable>,
    pub(super) sizes: GapSizes,
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
        let count = plane.len() as u64;
        if elements.end.checked_sub(elements.start) != Some(count)
            || weights.len() / 2 != plane.len()
        {
            return Err(Error::parameter(
                "plane and output have other sizes than the range",
                "pass n and 2n bytes",
            ));
        }
        if !weights.len().is_multiple_of(2) || elements.end > self.sizes.elements() {
            return Err(Error::parameter("no such range of weights", "ask for weights that exist"));
        }
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
        if merged == plane.len() {
            return Ok(());
        }
        Err(Error::corrupt(
            "output offsets",
            8 * span.thread_blocks.start,
            "the thread blocks hold other weights",
        ))
    }

    /// Decodes the exponents of a span, handing them on in pieces: in order within a thread block,
    /// and thread blocks in any order.
    pub(super) fn walk(
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
                lanes.push(Lane::new(span.block_codes(&self.sizes, thread_block)?));
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
        if is_zero_from(span.bitstream, (end - span.first_bit(&self.sizes)) as usize) {
            return Ok(());
        }
        Err(Error::corrupt("bitstream", end / 8, "the bits behind the last code are not zero"))
    }

    fn no_code(&self, span: &Span<'_>, at: NoCode) -> Error {
        let byte = (span.first_bit(&self.sizes) + at.bit as u64) / 8;
        Error::corrupt("bitstream", byte, "the codes do not lead to the next boundary of the index")
    }
}
