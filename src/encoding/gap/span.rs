//! A span of thread blocks, with the parts of the arrays that decoding it needs.

use std::ops::Range;

use super::GapSizes;
use crate::constants::{GAP_THREADS_PER_BYTE, OUTPUT_OFFSET_BYTES};
use crate::{Error, Result};

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

/// The codes of one thread block, checked as far as the index alone allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockCodes {
    /// Its first boundary, in bits from the start of the span's bitstream.
    pub(super) start: usize,
    /// The first boundary of the next thread block, or the end of the last code.
    pub(super) end: usize,
    /// The index of its first weight in the tensor.
    pub(super) element: u64,
    /// The number of its weights, at most `end - start`.
    pub(super) count: usize,
}

impl Span<'_> {
    /// Checks that the arrays have the sizes that the layout gives them.
    pub(super) fn check(&self, sizes: &GapSizes) -> Result<()> {
        let fits = |array: &[u8], range: Range<u64>| array.len() as u64 == range.end - range.start;
        if fits(self.gaps, sizes.gaps_of(&self.thread_blocks)?)
            && fits(self.output_offsets, sizes.output_offsets_of(&self.thread_blocks)?)
            && fits(self.bitstream, sizes.bitstream_of(&self.thread_blocks)?)
            && usize::try_from(8 * self.bitstream.len() as u64).is_ok()
        {
            return Ok(());
        }
        Err(Error::parameter(
            "the arrays of a span have other sizes than its layout",
            "pass the parts that it names",
        ))
    }

    /// The index of the first weight of a thread block of the span, or of the one after it.
    pub(super) fn output_offset(&self, thread_block: u64) -> u64 {
        let entries = self.output_offsets.as_chunks::<OUTPUT_OFFSET_BYTES>().0;
        u64::from_le_bytes(entries[(thread_block - self.thread_blocks.start) as usize])
    }

    /// The gap of a thread, counted from the first one of the span.
    pub(super) fn gap(&self, thread: u64) -> usize {
        let byte = self.gaps[(thread / GAP_THREADS_PER_BYTE) as usize];
        usize::from(byte >> (4 * (thread % GAP_THREADS_PER_BYTE)) & 0xF)
    }

    /// The first bit of the span, counted from the start of the tensor's bitstream.
    pub(super) fn first_bit(&self, sizes: &GapSizes) -> u64 {
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

    /// Where the codes of a thread block of a checked span lie.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if gaps and output offsets contradict each other or the layout.
    pub(super) fn block_codes(&self, sizes: &GapSizes, thread_block: u64) -> Result<BlockCodes> {
        let corrupt = |problem: &str| {
            Err(Error::corrupt(
                "output offsets",
                thread_block * OUTPUT_OFFSET_BYTES as u64,
                problem,
            ))
        };
        let (element, next) =
            (self.output_offset(thread_block), self.output_offset(thread_block + 1));
        let (start, end) =
            (self.boundary(sizes, thread_block), self.boundary(sizes, thread_block + 1));
        if thread_block == 0 && (element, start) != (0, 0) {
            return corrupt("the first thread block must start at the first weight, with gap 0");
        }
        if thread_block + 1 == sizes.thread_block_count() && next != sizes.elements() {
            return corrupt("the last entry must be the number of elements");
        }
        if element > next || next > sizes.elements() {
            return corrupt("entries must ascend to the number of elements");
        }
        let count = next - element;
        match end.checked_sub(start) {
            Some(bits) if count <= bits as u64 => {
                Ok(BlockCodes { start, end, element, count: count as usize })
            }
            _ => corrupt("the thread block has more codes than bits"),
        }
    }
}
