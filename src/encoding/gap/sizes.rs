//! How a bitstream is cut into threads and thread blocks, the resulting length of each array, and
//! the parts of arrays that thread blocks need.

use std::ops::Range;

use crate::{
    Error, Result,
    constants::{
        CODE_LENGTHS_BYTES, GAP_BYTES_PER_THREAD, GAP_DEFAULT_BYTES_PER_THREAD,
        GAP_DEFAULT_THREADS_PER_BLOCK, GAP_THREADS_PER_BLOCK, GAP_THREADS_PER_BYTE, LUT_BYTES,
        MAX_CODE_LENGTH, MAX_LUTS, OUTPUT_OFFSET_BYTES,
    },
    encoding::stored::{self, check_range},
};

/// The bitstream bytes of a thread and the threads of a thread block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GapGeometry {
    bytes_per_thread: u32,
    threads_per_block: u32,
}

impl Default for GapGeometry {
    fn default() -> Self {
        Self {
            bytes_per_thread: GAP_DEFAULT_BYTES_PER_THREAD,
            threads_per_block: GAP_DEFAULT_THREADS_PER_BLOCK,
        }
    }
}

impl GapGeometry {
    /// A geometry of 8, 16, 32 or 64 bytes per thread and 64, 128, 256, 512 or 1024 threads per
    /// thread block.
    ///
    /// # Errors
    /// [`Error::Parameter`] for any other numbers.
    pub fn new(bytes_per_thread: u32, threads_per_block: u32) -> Result<Self> {
        let exists = GAP_BYTES_PER_THREAD.contains(&bytes_per_thread)
            && GAP_THREADS_PER_BLOCK.contains(&threads_per_block);
        Error::unless(exists, || {
            let problem = format!(
                "no geometry has {bytes_per_thread} bytes per thread and {threads_per_block} \
                 threads per block"
            );
            let remedy =
                format!("choose from {GAP_BYTES_PER_THREAD:?} and {GAP_THREADS_PER_BLOCK:?}");
            Error::parameter(problem, remedy)
        })?;
        Ok(Self { bytes_per_thread, threads_per_block })
    }

    /// Bitstream bytes per thread.
    pub const fn bytes_per_thread(self) -> u32 {
        self.bytes_per_thread
    }

    /// Threads a thread block.
    pub const fn threads_per_block(self) -> u32 {
        self.threads_per_block
    }

    /// Bits per thread.
    pub const fn thread_bits(self) -> u64 {
        8 * self.bytes_per_thread as u64
    }

    /// Bits per thread block.
    pub const fn thread_block_bits(self) -> u64 {
        self.thread_bits() * self.threads_per_block as u64
    }

    /// Bits of a couple: the threads whose gaps share a byte, which is what a portion owns whole.
    pub const fn couple_bits(self) -> u64 {
        GAP_THREADS_PER_BYTE * self.thread_bits()
    }

    /// The weights that an encoder must see after a portion: as many as a couple of one-bit codes
    /// holds, at most 1024.
    pub const fn lookahead(self) -> usize {
        self.couple_bits() as usize
    }
}

/// The number of the codebook among a tensor's arrays: code lengths and LUTs.
pub const CODEBOOK: usize = 0;
/// The number of the gap array: half a byte per thread.
pub const GAPS: usize = 1;
/// The number of the output offsets: 8 bytes per thread block, and 8 more.
pub const OUTPUT_OFFSETS: usize = 2;
/// The number of the bitstream: whole threads of bytes.
pub const BITSTREAM: usize = 3;
/// The number of the plane: one byte per weight.
pub const PLANE: usize = 4;

/// A tensor whose arrays lie in memory.
pub type EncodedTensor = stored::EncodedTensor<GapSizes, 5>;

/// How many weights, bits, threads and thread blocks a tensor has; every size follows.
///
/// Always consistent: no method overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GapSizes {
    geometry: GapGeometry,
    elements: u64,
    bit_count: u64,
    codebook_bytes: u64,
}

impl GapSizes {
    /// The sizes that the directory of a file states.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there are no elements, no codebook has this size, or no codes of
    /// 1..=16 bits add up to the bit count; [`Error::Limit`] if a size exceeds 2^63 bytes.
    pub fn new(
        geometry: GapGeometry,
        elements: u64,
        bit_count: u64,
        codebook_bytes: u64,
    ) -> Result<Self> {
        let corrupt = |problem: String| Error::corrupt("gap layout", 0, problem);
        if elements == 0 {
            return Err(corrupt("a tensor without elements must be raw".into()));
        }
        let (lengths, lut) = (CODE_LENGTHS_BYTES as u64, LUT_BYTES as u64);
        let allowed = lengths + lut..=lengths + lut * MAX_LUTS as u64;
        if !allowed.contains(&codebook_bytes) || !(codebook_bytes - lengths).is_multiple_of(lut) {
            return Err(corrupt(format!(
                "a codebook of {codebook_bytes} bytes, not 256 and 1..={MAX_LUTS} LUTs of 512"
            )));
        }
        Error::check_limit("the element count of a BF16 tensor", elements, 1 << 59)?;
        if !(elements..=elements * u64::from(MAX_CODE_LENGTH)).contains(&bit_count) {
            return Err(corrupt(format!(
                "{elements} codes of 1..=16 bits cannot take {bit_count} bits"
            )));
        }
        Ok(Self { geometry, elements, bit_count, codebook_bytes })
    }

    /// Sizes of a tensor whose record has these parameters, and whose codebook has
    /// `codebook_bytes`.
    ///
    /// # Errors
    /// Like [`new`](Self::new); [`Error::Parameter`] as [`GapGeometry::new`].
    pub fn of_record(
        [bytes_per_thread, threads_per_block, bit_count]: [u64; 3],
        elements: u64,
        codebook_bytes: u64,
    ) -> Result<Self> {
        // Numbers beyond u32 are refused as 0 is.
        let narrow = |value: u64| u32::try_from(value).unwrap_or(0);
        let geometry = GapGeometry::new(narrow(bytes_per_thread), narrow(threads_per_block))?;
        Self::new(geometry, elements, bit_count, codebook_bytes)
    }

    /// Threads and thread blocks.
    pub const fn geometry(&self) -> GapGeometry {
        self.geometry
    }

    /// The number of weights.
    pub const fn elements(&self) -> u64 {
        self.elements
    }

    /// The bits of all codes.
    pub const fn bit_count(&self) -> u64 {
        self.bit_count
    }

    /// The number of threads.
    pub const fn thread_count(&self) -> u64 {
        self.bit_count.div_ceil(self.geometry.thread_bits())
    }

    /// The number of thread blocks.
    pub const fn thread_block_count(&self) -> u64 {
        self.bit_count.div_ceil(self.geometry.thread_block_bits())
    }

    /// The lengths of its arrays in bytes.
    pub const fn array_lengths(&self) -> [u64; 5] {
        let threads = self.thread_count();
        [
            self.codebook_bytes,
            threads.div_ceil(GAP_THREADS_PER_BYTE),
            OUTPUT_OFFSET_BYTES as u64 * (self.thread_block_count() + 1),
            threads * self.geometry.bytes_per_thread() as u64,
            self.elements,
        ]
    }

    /// The parts of gaps and bitstream that some thread blocks need: those of their threads, and
    /// if thread blocks follow, the next one's first gap and two more bytes of the bitstream, into
    /// which the last code may reach.
    pub(super) fn parts_of(&self, thread_blocks: &Range<u64>) -> [Range<u64>; 2] {
        let [_, gaps, _, bitstream, _] = self.array_lengths();
        let part = |each: u64, more: u64, all: u64| {
            thread_blocks.start * each..(thread_blocks.end * each + more).min(all)
        };
        let threads = u64::from(self.geometry.threads_per_block());
        [
            part(threads / GAP_THREADS_PER_BYTE, 1, gaps),
            part(self.geometry.thread_block_bits() / 8, 2, bitstream),
        ]
    }

    /// Checks the whole array of output offsets as far as that goes without decoding: it ascends
    /// from 0 to the number of elements, and no thread block is empty but the last one, which may
    /// hold only the end of a code.
    pub(crate) fn check_output_offsets(&self, output_offsets: &[u8]) -> Result<()> {
        let entries = output_offsets.as_chunks().0;
        let corrupt = |at: usize, problem: &str| {
            Err(Error::corrupt("output offsets", (at * OUTPUT_OFFSET_BYTES) as u64, problem))
        };
        if entries.first() != Some(&0u64.to_le_bytes()) {
            return corrupt(0, "the first thread block must start at the first weight");
        }
        if entries.last() != Some(&self.elements.to_le_bytes()) {
            return corrupt(entries.len() - 1, "the last entry must be the number of elements");
        }
        for (at, pair) in (1..).zip(entries.windows(2)) {
            let [before, entry] = [pair[0], pair[1]].map(u64::from_le_bytes);
            if before > entry || (before == entry && at + 1 < entries.len()) {
                return corrupt(at, "entries must ascend to the number of elements");
            }
        }
        Ok(())
    }

    /// The thread blocks whose codes hold a range of weights, found by bisection in the whole array
    /// of output offsets, which must be [checked](Self::check_output_offsets). With the last weight
    /// comes a last thread block that holds none.
    pub(crate) fn thread_blocks_of(
        &self,
        output_offsets: &[u8],
        elements: &Range<u64>,
    ) -> Result<Range<u64>> {
        check_range("elements", elements, self.elements)?;
        let entries = &output_offsets.as_chunks().0[..self.thread_block_count() as usize];
        let before = |at: u64| entries.partition_point(|entry| u64::from_le_bytes(*entry) < at);
        let start = before(elements.start + 1).max(1) - 1;
        if elements.end == self.elements {
            return Ok(start as u64..self.thread_block_count());
        }
        Ok(start as u64..before(elements.end).max(start + 1) as u64)
    }
}
