//! How a bitstream is cut into threads and thread blocks, and what follows: the length of each
//! array, and the parts of arrays that a span of thread blocks needs.

use std::ops::Range;

use crate::{
    Error, Result,
    constants::{
        CODE_LENGTHS_BYTES, GAP_BYTES_PER_THREAD, GAP_DEFAULT_BYTES_PER_THREAD,
        GAP_DEFAULT_THREADS_PER_BLOCK, GAP_THREADS_PER_BLOCK, GAP_THREADS_PER_BYTE, LUT_BYTES,
        MAX_CODE_LENGTH, MAX_LUTS, OUTPUT_OFFSET_BYTES,
    },
    encoding::stored::check_range,
    huffman::{CodeLengths, Histogram, Luts},
};

/// The bitstream bytes of a thread and the threads of a thread block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    bytes_per_thread: u32,
    threads_per_block: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self {
            bytes_per_thread: GAP_DEFAULT_BYTES_PER_THREAD,
            threads_per_block: GAP_DEFAULT_THREADS_PER_BLOCK,
        }
    }
}

impl Geometry {
    /// A geometry of 8, 16, 32 or 64 bytes a thread and 64, 128, 256, 512 or 1024 threads a thread
    /// block.
    ///
    /// # Errors
    /// [`Error::Parameter`] for any other numbers.
    pub fn new(bytes_per_thread: u32, threads_per_block: u32) -> Result<Self> {
        let exists = GAP_BYTES_PER_THREAD.contains(&bytes_per_thread)
            && GAP_THREADS_PER_BLOCK.contains(&threads_per_block);
        Error::unless(exists, || {
            let problem = format!(
                "no geometry has {bytes_per_thread} bytes a thread and {threads_per_block} threads \
                a block"
            );
            let remedy =
                format!("choose from {GAP_BYTES_PER_THREAD:?} and {GAP_THREADS_PER_BLOCK:?}");
            Error::parameter(problem, remedy)
        })?;
        Ok(Self { bytes_per_thread, threads_per_block })
    }

    /// The geometry that the directory of a file states.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers that [`new`](Self::new) refuses.
    pub fn from_parameters(bytes_per_thread: u64, threads_per_block: u64) -> Result<Self> {
        // Numbers beyond u32 are refused as 0 is.
        let narrow = |value: u64| u32::try_from(value).unwrap_or(0);
        Self::new(narrow(bytes_per_thread), narrow(threads_per_block))
    }

    /// Bitstream bytes a thread.
    pub const fn bytes_per_thread(self) -> u32 {
        self.bytes_per_thread
    }

    /// Threads a thread block.
    pub const fn threads_per_block(self) -> u32 {
        self.threads_per_block
    }

    /// Bits a thread.
    pub const fn thread_bits(self) -> u64 {
        8 * self.bytes_per_thread as u64
    }

    /// Bits a thread block.
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

/// How many weights, bits, threads and thread blocks a tensor has; every size follows.
///
/// Always consistent: no method overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GapSizes {
    geometry: Geometry,
    elements: u64,
    bit_count: u64,
    lut_count: u64,
}

impl GapSizes {
    /// The layout that the directory of a file states.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there are no elements, a LUT count outside 1..=128, or a bit count
    /// that no codes of 1..=16 bits add up to; [`Error::Limit`] if a size exceeds 2^63 bytes.
    pub fn new(geometry: Geometry, elements: u64, bit_count: u64, lut_count: u64) -> Result<Self> {
        let corrupt = |problem: String| Error::corrupt("gap layout", 0, problem);
        if elements == 0 {
            return Err(corrupt("a tensor without elements must be raw".into()));
        }
        if !(1..=MAX_LUTS as u64).contains(&lut_count) {
            return Err(corrupt(format!("{lut_count} LUTs where 1..={MAX_LUTS} are allowed")));
        }
        Error::check_limit("the element count of a BF16 tensor", elements, 1 << 59)?;
        if !(elements..=elements * u64::from(MAX_CODE_LENGTH)).contains(&bit_count) {
            return Err(corrupt(format!(
                "{elements} codes of 1..=16 bits cannot take {bit_count} bits"
            )));
        }
        Ok(Self { geometry, elements, bit_count, lut_count })
    }

    /// The number of LUTs in a codebook array of this many bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no codebook has this size.
    pub fn lut_count_of(codebook_bytes: u64) -> Result<u64> {
        let (lengths, lut) = (CODE_LENGTHS_BYTES as u64, LUT_BYTES as u64);
        match codebook_bytes.checked_sub(lengths) {
            Some(luts) if luts > 0 && luts % lut == 0 => Ok(luts / lut),
            _ => {
                let problem = format_args!("a codebook of {codebook_bytes} bytes");
                Err(Error::corrupt("gap layout", 0, problem))
            }
        }
    }

    /// The layout of a tensor with this histogram under this code.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the histogram is empty or has an exponent without a code;
    /// [`Error::Limit`] as [`new`](Self::new).
    pub fn plan(lengths: &CodeLengths, histogram: &Histogram, geometry: Geometry) -> Result<Self> {
        let elements = histogram.total();
        if elements == 0 {
            let problem = "a tensor without elements has no gap encoding";
            return Err(Error::parameter(problem, "store it raw"));
        }
        Self::new(geometry, elements, lengths.bits(histogram)?, Luts::new(lengths).len() as u64)
    }

    /// Threads and thread blocks.
    pub const fn geometry(&self) -> Geometry {
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

    /// The LUTs of the codebook.
    pub const fn lut_count(&self) -> u64 {
        self.lut_count
    }

    /// The number of threads.
    pub const fn thread_count(&self) -> u64 {
        self.bit_count.div_ceil(self.geometry.thread_bits())
    }

    /// The number of thread blocks.
    pub const fn thread_block_count(&self) -> u64 {
        self.bit_count.div_ceil(self.geometry.thread_block_bits())
    }

    /// The size of the codebook array, in bytes.
    pub const fn codebook_bytes(&self) -> u64 {
        CODE_LENGTHS_BYTES as u64 + LUT_BYTES as u64 * self.lut_count
    }

    /// The size of the gap array, in bytes: half a byte a thread, rounded up.
    pub const fn gaps_bytes(&self) -> u64 {
        self.thread_count().div_ceil(GAP_THREADS_PER_BYTE)
    }

    /// The size of the output offsets, in bytes: 8 a thread block and 8 more.
    pub const fn output_offsets_bytes(&self) -> u64 {
        OUTPUT_OFFSET_BYTES as u64 * (self.thread_block_count() + 1)
    }

    /// The size of the bitstream, in bytes: whole threads.
    pub const fn bitstream_bytes(&self) -> u64 {
        self.thread_count() * self.geometry.bytes_per_thread() as u64
    }

    /// The size of the sign/mantissa plane, in bytes: one a weight.
    pub const fn plane_bytes(&self) -> u64 {
        self.elements
    }

    /// The size of all five arrays, in bytes, without alignment.
    pub const fn encoded_bytes(&self) -> u64 {
        self.codebook_bytes()
            + self.gaps_bytes()
            + self.output_offsets_bytes()
            + self.bitstream_bytes()
            + self.plane_bytes()
    }

    /// The bytes of the output offset array that a span of thread blocks needs: those of its thread
    /// blocks and the next.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the span is empty or reaches beyond the tensor; so for the other
    /// two.
    pub fn output_offsets_of(&self, thread_blocks: &Range<u64>) -> Result<Range<u64>> {
        self.check_span(thread_blocks)?;
        let entry = OUTPUT_OFFSET_BYTES as u64;
        Ok(thread_blocks.start * entry..(thread_blocks.end + 1) * entry)
    }

    /// The bytes of the gap array that a span needs: those of its threads, and one more where
    /// thread blocks follow.
    ///
    /// # Errors
    /// As [`output_offsets_of`](Self::output_offsets_of).
    pub fn gaps_of(&self, thread_blocks: &Range<u64>) -> Result<Range<u64>> {
        self.check_span(thread_blocks)?;
        let block_bytes = u64::from(self.geometry.threads_per_block()) / GAP_THREADS_PER_BYTE;
        Ok(thread_blocks.start * block_bytes
            ..(thread_blocks.end * block_bytes + 1).min(self.gaps_bytes()))
    }

    /// The bytes of the bitstream that a span needs: those of its threads, and two more (the end of
    /// its last code) where thread blocks follow.
    ///
    /// # Errors
    /// As [`output_offsets_of`](Self::output_offsets_of).
    pub fn bitstream_of(&self, thread_blocks: &Range<u64>) -> Result<Range<u64>> {
        self.check_span(thread_blocks)?;
        let block_bytes = self.geometry.thread_block_bits() / 8;
        Ok(thread_blocks.start * block_bytes
            ..(thread_blocks.end * block_bytes + 2).min(self.bitstream_bytes()))
    }

    fn check_span(&self, span: &Range<u64>) -> Result<()> {
        check_range("thread blocks", span, self.thread_block_count())
    }

    /// Checks the whole array of output offsets as far as that goes without decoding: it ascends
    /// from 0 to the number of elements, and no thread block is empty but the last one, which may
    /// hold only the end of a code.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the byte at fault; [`Error::Parameter`] if the array has another
    /// size.
    pub fn check_output_offsets(&self, output_offsets: &[u8]) -> Result<()> {
        let entries = self.entries_of(output_offsets)?;
        let corrupt = |at: usize, problem: &str| {
            Err(Error::corrupt("output offsets", (at * OUTPUT_OFFSET_BYTES) as u64, problem))
        };
        let (first, last) = (entries.first().copied(), entries.last().copied());
        if first != Some(0u64.to_le_bytes()) {
            return corrupt(0, "the first thread block must start at the first weight");
        }
        if last != Some(self.elements.to_le_bytes()) {
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

    /// Checks the half of the gap array's last byte that is no thread's gap, if there is one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is not zero.
    pub fn check_unused_gap(&self, last_byte: u8) -> Result<()> {
        let holds = self.thread_count() % GAP_THREADS_PER_BYTE != 1 || last_byte >> 4 == 0;
        Error::unless(holds, || {
            Error::corrupt("gaps", self.gaps_bytes() - 1, "the unused last gap is not zero")
        })
    }

    /// The thread blocks whose codes hold a range of weights, found by bisection in the whole array
    /// of output offsets. With the last weight comes a last thread block that holds none.
    ///
    /// For an array that [`check_output_offsets`](Self::check_output_offsets) refuses the answer
    /// may be wrong.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the range is empty or reaches beyond the tensor, or the array has
    /// another size.
    pub fn thread_blocks_of(
        &self,
        output_offsets: &[u8],
        elements: &Range<u64>,
    ) -> Result<Range<u64>> {
        check_range("elements", elements, self.elements)?;
        let entries = self.entries_of(output_offsets)?;
        let entries = &entries[..entries.len() - 1];
        let before = |at: u64| entries.partition_point(|entry| u64::from_le_bytes(*entry) < at);
        let start = before(elements.start + 1).max(1) - 1;
        if elements.end == self.elements {
            return Ok(start as u64..self.thread_block_count());
        }
        Ok(start as u64..before(elements.end).max(start + 1) as u64)
    }

    fn entries_of<'a>(&self, output_offsets: &'a [u8]) -> Result<&'a [[u8; OUTPUT_OFFSET_BYTES]]> {
        Error::unless(output_offsets.len() as u64 == self.output_offsets_bytes(), || {
            Error::parameter("the output offsets have another size", "pass the whole array")
        })?;
        Ok(output_offsets.as_chunks().0)
    }
}
