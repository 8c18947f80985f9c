//! Collects the gaps and output offsets that a portion owns while its bits are written.

use std::ops::Range;

use super::Geometry;
use crate::constants::{GAP_THREADS_PER_BYTE, OUTPUT_OFFSET_BYTES};

/// The index arrays of a portion, filled thread by thread.
#[derive(Debug, Default)]
pub(super) struct IndexArrays {
    pub(super) gaps: Vec<u8>,
    pub(super) output_offsets: Vec<u8>,
}

/// Takes note of the first boundary in or after each owned thread.
pub(super) struct Tracker<'a> {
    arrays: &'a mut IndexArrays,
    /// The first owned thread, and those whose boundaries are still to come.
    first: u64,
    threads: Range<u64>,
    thread_bits: usize,
    threads_per_block: u64,
    /// The next thread's first bit, counted as the caller counts; nothing where no thread is left.
    threshold: usize,
}

impl<'a> Tracker<'a> {
    /// Starts for the owned threads, an even first one, whose first bit is `threshold`.
    pub(super) fn new(
        arrays: &'a mut IndexArrays,
        geometry: Geometry,
        threads: Range<u64>,
        threshold: usize,
    ) -> Self {
        arrays.gaps.clear();
        arrays.gaps.resize(
            (threads.end.saturating_sub(threads.start)).div_ceil(GAP_THREADS_PER_BYTE) as usize,
            0,
        );
        arrays.output_offsets.clear();
        let mut tracker = Self {
            arrays,
            thread_bits: geometry.thread_bits() as usize,
            threads_per_block: u64::from(geometry.threads_per_block()),
            threshold,
            first: threads.start,
            threads,
        };
        tracker.stop_at_the_end();
        tracker
    }

    /// The bit at or after which the next boundary is wanted.
    pub(super) const fn threshold(&self) -> usize {
        self.threshold
    }

    /// Bits a thread.
    pub(super) const fn thread_bits(&self) -> usize {
        self.thread_bits
    }

    /// Notes that the first boundary at or after the threshold is `bit`, where the weight `element`
    /// starts.
    pub(super) fn cross(&mut self, bit: usize, element: u64) {
        let thread = self.threads.start;
        if self.threads.is_empty() {
            return;
        }
        let at = ((thread - self.first) / GAP_THREADS_PER_BYTE) as usize;
        self.arrays.gaps[at] |=
            ((bit - self.threshold) as u8) << (4 * (thread % GAP_THREADS_PER_BYTE));
        if thread.is_multiple_of(self.threads_per_block) {
            self.push_output_offset(element);
        }
        self.threads.start += 1;
        self.threshold += self.thread_bits;
        self.stop_at_the_end();
    }

    fn stop_at_the_end(&mut self) {
        if self.threads.is_empty() {
            self.threshold = usize::MAX;
        }
    }

    /// Appends an output offset.
    pub(super) fn push_output_offset(&mut self, element: u64) {
        self.arrays.output_offsets.extend_from_slice(&element.to_le_bytes()[..OUTPUT_OFFSET_BYTES]);
    }

    /// Whether every owned thread's boundary was noted.
    pub(super) fn is_complete(&self) -> bool {
        self.threads.is_empty()
    }
}
