//! Checking all of the index, of which decoding uses but the starts of thread blocks.

use super::crossings::{Crossings, GROUP};
use super::lanes::ExponentRun;
use super::{GapDecoder, Span};
use crate::constants::GAP_THREADS_PER_BYTE;
use crate::{Error, Result};

impl GapDecoder {
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
        if index < self.sizes.thread_count() && span.gap(thread as u64) != gap {
            let problem = format!("the gap of thread {index} must be {gap}");
            return Err(Error::corrupt("gaps", index / GAP_THREADS_PER_BYTE, problem));
        }
        Ok(())
    }
}
