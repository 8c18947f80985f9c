//! Encoding portion by portion: parallel, in bounded memory, and with the same bytes however the
//! tensor is cut.
//!
//! The bitstream is owned in *couples* of two threads, which share a gap byte. A portion owns the
//! couples whose first bit lies in its codes. It writes each of them whole, with the codes of a few
//! weights after the portion, and leaves out the bits before its first couple, which belong to the
//! portion before. So portions write disjoint bytes.
//!
//! ```text
//! weights    ······|  portion            |lookahead|··
//! couples    |     c0    |     c1    |     c2    |     c3    |
//! owned                  |###########|###########|
//! ```

use std::ops::Range;

use super::{
    index::{GROUP, IndexArrays, PIECE, Tracker},
    sizes::{GapSizes, Geometry},
    writer::{PairTable, Writer},
};
use crate::{
    Error, Result, bf16,
    constants::{GAP_THREADS_PER_BYTE, MAX_CODE_LENGTH, OUTPUT_OFFSET_BYTES},
    huffman::{CodeLengths, Codes},
};

/// Tensors of fewer weights are written symbol by symbol: the pair table would cost more than it
/// saves.
const PAIR_TABLE_ELEMENTS: u64 = 1 << 14;

/// Encodes the portions of one tensor; share it between threads.
#[derive(Clone, Debug)]
pub struct PortionEncoder {
    lengths: CodeLengths,
    codes: Codes,
    pairs: Option<PairTable>,
    sizes: GapSizes,
}

/// One portion of a tensor: consecutive weights, and some that follow them.
#[derive(Clone, Copy, Debug)]
pub struct PortionInput<'a> {
    /// Little-endian weights, two bytes each: those of the portion, then the next
    /// [`Geometry::lookahead`] ones, or all to the end of the tensor where there are fewer. More do
    /// no harm.
    pub weights: &'a [u8],
    /// The number of weights in the portion, at least 1.
    pub elements: usize,
    /// The index of the portion's first weight in the tensor.
    pub first_element: u64,
    /// The bit at which the portion's first code starts: the bits of all portions before it.
    pub start_bit: u64,
    /// The bit after the portion's last code: `start_bit` plus [`CodeLengths::bits`] of the
    /// portion's histogram.
    pub end_bit: u64,
}

/// What one portion adds to the arrays of its tensor; reuse it, it keeps its buffers.
#[derive(Debug, Default)]
pub struct PortionOutput {
    stream: Vec<u8>,
    owned: Range<usize>,
    bitstream_offset: u64,
    index: IndexArrays,
    gaps_offset: u64,
    output_offsets_offset: u64,
    plane: Vec<u8>,
    plane_offset: u64,
}

/// Bytes, and where in their array they belong.
#[derive(Clone, Copy, Debug)]
pub struct PlacedBytes<'a> {
    /// The byte of the array at which the piece starts.
    pub offset: u64,
    /// Its bytes; possibly none.
    pub bytes: &'a [u8],
}

impl PortionOutput {
    /// Bytes of the bitstream.
    pub fn bitstream(&self) -> PlacedBytes<'_> {
        PlacedBytes { offset: self.bitstream_offset, bytes: &self.stream[self.owned.clone()] }
    }

    /// Bytes of the gap array.
    pub fn gaps(&self) -> PlacedBytes<'_> {
        PlacedBytes { offset: self.gaps_offset, bytes: &self.index.gaps }
    }

    /// Bytes of the output offsets.
    pub fn output_offsets(&self) -> PlacedBytes<'_> {
        PlacedBytes { offset: self.output_offsets_offset, bytes: &self.index.output_offsets }
    }

    /// Bytes of the plane.
    pub fn plane(&self) -> PlacedBytes<'_> {
        PlacedBytes { offset: self.plane_offset, bytes: &self.plane }
    }
}

/// The bits and threads that a portion owns.
struct Ownership {
    /// The couple boundary at or before the portion's first bit, from which bits are counted.
    base: u64,
    /// Owned threads, an even first one; empty if the portion lies within one couple.
    threads: Range<u64>,
}

impl Ownership {
    fn new(sizes: &GapSizes, start_bit: u64, end_bit: u64) -> Self {
        let couple_bits = sizes.geometry().couple_bits();
        let first = start_bit.div_ceil(couple_bits) * GAP_THREADS_PER_BYTE;
        let end = (end_bit.div_ceil(couple_bits) * GAP_THREADS_PER_BYTE).min(sizes.thread_count());
        Self { base: start_bit / couple_bits * couple_bits, threads: first..end.max(first) }
    }

    /// The owned bits, counted from the base.
    fn bits(&self, geometry: Geometry) -> Range<usize> {
        let bit = |thread: u64| (thread * geometry.thread_bits() - self.base) as usize;
        bit(self.threads.start)..bit(self.threads.end)
    }
}

impl PortionEncoder {
    /// Prepares the tables of a tensor: some microseconds, for a big tensor some tens.
    pub fn new(lengths: &CodeLengths, sizes: &GapSizes) -> Self {
        let codes = Codes::new(lengths);
        let pairs = (sizes.elements() >= PAIR_TABLE_ELEMENTS).then(|| PairTable::new(&codes));
        Self { lengths: lengths.clone(), codes, pairs, sizes: *sizes }
    }

    /// Encodes one portion into `output`, in one pass over its weights; memory grows to about 1.5
    /// bytes a weight.
    ///
    /// Bytes come out only for weights that have codes and that end at the bit that the histograms
    /// promised.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the portion does not fit the layout or lacks lookahead, and if its
    /// weights are not those of the histograms, as when the source changed between two passes. Then
    /// `output` holds nothing of use.
    pub fn encode(&self, input: &PortionInput<'_>, output: &mut PortionOutput) -> Result<()> {
        let is_last = self.check(input)?;
        let geometry = self.sizes.geometry();
        let ownership = Ownership::new(&self.sizes, input.start_bit, input.end_bit);
        let owned = ownership.bits(geometry);
        let end = (input.end_bit - ownership.base) as usize;
        self.place(input, &ownership, output);
        output.stream.resize(owned.end.max(end).div_ceil(8) + Writer::SLACK, 0);

        let start = (input.start_bit - ownership.base) as usize;
        let threads = ownership.threads.clone();
        let mut tracker = Tracker::new(&mut output.index, geometry, threads, owned.start);
        if start == owned.start {
            tracker.cross(start, input.first_element);
        }
        let mut writer = Writer::new(&mut output.stream, start, tracker);
        let elements = is_last.then_some(self.sizes.elements());
        self.write(input, &mut output.plane, &mut writer, end, owned.end)
            .and_then(|()| writer.finish(owned.end, elements))
            .ok_or_else(changed)?;
        output.owned = owned.start / 8..owned.end / 8;
        Ok(())
    }

    /// Checks a portion against the layout; whether it is the last one.
    fn check(&self, input: &PortionInput<'_>) -> Result<bool> {
        let misfit = |problem: &str| {
            Err(Error::parameter(problem, "cut the tensor into consecutive portions"))
        };
        let held = (input.weights.len() / 2) as u64;
        let elements = input.elements as u64;
        let rest = self
            .sizes
            .elements()
            .checked_sub(input.first_element)
            .and_then(|rest| rest.checked_sub(elements));
        let Some(rest) = rest.filter(|_| elements > 0 && input.weights.len().is_multiple_of(2))
        else {
            return misfit("a portion is empty or reaches beyond its tensor");
        };
        if held < elements + rest.min(self.sizes.geometry().lookahead() as u64)
            || held > elements + rest
        {
            return misfit("a portion has too few or too many weights after it");
        }
        if input.start_bit >= input.end_bit
            || input.end_bit > self.sizes.bit_count()
            || (input.first_element == 0) != (input.start_bit == 0)
            || input.end_bit - input.start_bit > u64::from(MAX_CODE_LENGTH) * elements
            || input.elements > usize::MAX / 32
        {
            return misfit("the bits of a portion do not fit its tensor");
        }
        if (rest == 0) != (input.end_bit == self.sizes.bit_count()) {
            return Err(changed());
        }
        Ok(rest == 0)
    }

    /// Where the pieces of the portion belong in their arrays.
    fn place(&self, input: &PortionInput<'_>, ownership: &Ownership, output: &mut PortionOutput) {
        let geometry = self.sizes.geometry();
        let first = ownership.threads.start;
        output.bitstream_offset = first * u64::from(geometry.bytes_per_thread());
        output.gaps_offset = first / GAP_THREADS_PER_BYTE;
        let thread_block = first.div_ceil(u64::from(geometry.threads_per_block()));
        output.output_offsets_offset = thread_block * OUTPUT_OFFSET_BYTES as u64;
        output.plane_offset = input.first_element;
        output.plane.resize(input.elements, 0);
    }

    /// Writes the portion, to the bit `end`, and what of the lookahead its last owned couple holds;
    /// `None` if the weights are not those that the histograms counted.
    fn write(
        &self,
        input: &PortionInput<'_>,
        plane: &mut [u8],
        writer: &mut Writer<'_>,
        end: usize,
        owned_end: usize,
    ) -> Option<()> {
        let (weights, lookahead) = input.weights.split_at(2 * input.elements);
        let mut element = input.first_element;
        let mut exponents = [0; PIECE];
        for (weights, plane) in weights.chunks(2 * PIECE).zip(plane.chunks_mut(PIECE)) {
            let exponents = &mut exponents[..plane.len()];
            bf16::split(weights, exponents, plane);
            let grouped = if self.pairs.is_some() { plane.len() / GROUP * GROUP } else { 0 };
            if let Some(pairs) = &self.pairs {
                writer.push_groups(pairs, &self.lengths, &exponents[..grouped], element)?;
            }
            element += grouped as u64;
            for &exponent in &exponents[grouped..] {
                element += 1;
                writer.push(self.codes.get(exponent), element)?;
            }
        }
        if writer.bit() != end {
            return None;
        }
        for weight in lookahead.as_chunks::<2>().0 {
            if writer.bit() >= owned_end {
                break;
            }
            element += 1;
            writer.push(self.codes.get(bf16::exponent(u16::from_le_bytes(*weight))), element)?;
        }
        Some(())
    }
}

fn changed() -> Error {
    Error::parameter(
        "the weights are not those of their histogram",
        "keep the source unchanged while it is read",
    )
}
