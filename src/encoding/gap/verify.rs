//! Checking all of the index, of which decoding uses but the starts of thread blocks.

use super::crossings::{Crossings, GROUP};
use super::lanes::Decoded;
use super::{Decoder, Span};
use crate::format::constants::{GAP_THREADS_PER_BYTE, OUTPUT_OFFSET_BYTES};
use crate::{Error, Result};

impl Decoder {
    /// Checks every gap and output offset of a span against the codes, and all that [`decode`](Self::decode)
    /// checks.
    ///
    /// The gap and the output offset with which a span starts are checked with the span before it; so
    /// verifying all spans of a tensor checks its whole index. Costs about twice as much as decoding.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the byte of the array at fault; [`Error::Parameter`] where the span's arrays
    /// have other sizes than its layout.
    pub fn verify_index(&self, span: &Span<'_>) -> Result<()> {
        let mut crossings = Crossings::new(self.layout.geometry().thread_bits() as usize);
        self.walk(span, |decoded| self.check_boundaries(span, &decoded, &mut crossings))?;
        let threads = self.layout.thread_count();
        let is_last = span.thread_blocks.end == self.layout.thread_block_count();
        if is_last
            && threads % GAP_THREADS_PER_BYTE == 1
            && span.gaps.last().is_some_and(|last| last >> 4 != 0)
        {
            return Err(Error::corrupt(
                "gaps",
                self.layout.gaps_bytes() - 1,
                "the unused last gap is not zero",
            ));
        }
        Ok(())
    }

    /// Checks the threads into which these codes cross.
    fn check_boundaries(
        &self,
        span: &Span<'_>,
        decoded: &Decoded<'_>,
        crossings: &mut Crossings,
    ) -> Result<()> {
        let thread_bits = self.layout.geometry().thread_bits() as usize;
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
            let (boundary, next) = crossings.find(thread * thread_bits, decoded.exponents, lengths);
            self.check_thread(
                span,
                thread as u64,
                boundary - thread * thread_bits,
                decoded.element + next as u64,
            )?;
            thread += 1;
        }
        for (&exponent, next) in rest.iter().zip((GROUP * groups.len()) as u64 + 1..) {
            bit += length(exponent);
            if let Some(gap) = bit.checked_sub(thread * thread_bits) {
                self.check_thread(span, thread as u64, gap, decoded.element + next)?;
                thread += 1;
            }
        }
        Ok(())
    }

    /// Checks the gap of a thread, counted from the first one of the span, and its thread block's output
    /// offset.
    fn check_thread(&self, span: &Span<'_>, thread: u64, gap: usize, element: u64) -> Result<()> {
        let threads_per_block = u64::from(self.layout.geometry().threads_per_block());
        let first = span.thread_blocks.start * threads_per_block;
        if first + thread >= self.layout.thread_count() {
            return Ok(());
        }
        if span.gap(thread) != gap {
            let byte = (first + thread) / GAP_THREADS_PER_BYTE;
            let problem = format!("the gap of thread {} must be {gap}", first + thread);
            return Err(Error::corrupt("gaps", byte, problem));
        }
        let thread_block = span.thread_blocks.start + thread / threads_per_block;
        if thread.is_multiple_of(threads_per_block) && span.output_offset(thread_block) != element {
            let problem = format!("the output offset of thread block {thread_block} must be {element}");
            return Err(Error::corrupt("output offsets", thread_block * OUTPUT_OFFSET_BYTES as u64, problem));
        }
        Ok(())
    }
}
