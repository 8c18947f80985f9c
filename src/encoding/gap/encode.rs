//! Encodes portion by portion: in parallel, in bounded memory, and with the same bytes however the
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
    sizes::{
        BITSTREAM, CODEBOOK, EncodedTensor, GAPS, GapGeometry, GapSizes, OUTPUT_OFFSETS, PLANE,
    },
    writer::{PairTable, Writer},
};
use crate::{
    Error, Result, bf16,
    constants::{GAP_THREADS_PER_BYTE, MAX_CODE_LENGTH, OUTPUT_OFFSET_BYTES},
    encoding::stored::changed,
    huffman::{self, CodeLengths, Codes, Histogram},
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
    /// [`GapGeometry::lookahead`] ones, or all to the end of the tensor if there are fewer. More
    /// do no harm.
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

/// Bytes that one portion adds to the arrays of its tensor; reuse it, it keeps its buffers.
#[derive(Debug, Default)]
pub struct PortionOutput {
    index: IndexArrays,
    stream: Vec<u8>,
    /// The bytes of the stream that the portion owns.
    owned: Range<usize>,
    plane: Vec<u8>,
    /// Where gaps, output offsets, bitstream and plane go in their arrays.
    offsets: [u64; 4],
}

impl PortionOutput {
    /// Arrays, by their numbers, with the byte at which the portion's part of them starts, and its
    /// bytes; possibly none.
    pub fn parts(&self) -> [(usize, u64, &[u8]); 4] {
        let [gaps, output_offsets, bitstream, plane] = self.offsets;
        [
            (GAPS, gaps, &self.index.gaps),
            (OUTPUT_OFFSETS, output_offsets, &self.index.output_offsets),
            (BITSTREAM, bitstream, &self.stream[self.owned.clone()]),
            (PLANE, plane, &self.plane),
        ]
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
    /// bytes per weight.
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
        let couple_bits = geometry.couple_bits();
        // Bits are counted from the start of the couple in which the portion starts.
        let base = input.start_bit / couple_bits * couple_bits;
        let [start, end] = [input.start_bit, input.end_bit].map(|bit| (bit - base) as usize);
        let threads = self.owned_threads(input);
        let [owned_start, owned_end] = [threads.start, threads.end]
            .map(|thread| (thread * geometry.thread_bits() - base) as usize);
        output.stream.resize(owned_end.max(end).div_ceil(8) + Writer::SLACK, 0);
        output.owned = owned_start / 8..owned_end / 8;
        output.plane.resize(input.elements, 0);
        output.offsets = [
            threads.start / GAP_THREADS_PER_BYTE,
            threads.start.div_ceil(u64::from(geometry.threads_per_block()))
                * OUTPUT_OFFSET_BYTES as u64,
            threads.start * u64::from(geometry.bytes_per_thread()),
            input.first_element,
        ];
        let mut tracker = Tracker::new(&mut output.index, geometry, threads, owned_start);
        if start == owned_start {
            tracker.cross(start, input.first_element);
        }
        let mut writer = Writer::new(&mut output.stream, start, tracker);
        let elements = is_last.then_some(self.sizes.elements());
        self.write(input, &mut output.plane, &mut writer, end, owned_end)
            .and_then(|()| writer.finish(owned_end, elements))
            .ok_or_else(changed)
    }

    /// The threads that a portion owns, an even first one; none if it lies within one couple.
    fn owned_threads(&self, input: &PortionInput<'_>) -> Range<u64> {
        let couple_bits = self.sizes.geometry().couple_bits();
        let first = input.start_bit.div_ceil(couple_bits) * GAP_THREADS_PER_BYTE;
        let end = input.end_bit.div_ceil(couple_bits) * GAP_THREADS_PER_BYTE;
        first..end.min(self.sizes.thread_count()).max(first)
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

/// Encodes `n` little-endian BF16 weights (`2n` bytes) in portions of `portion_elements`, which do
/// not change the result.
///
/// # Errors
/// [`Error::Parameter`] if there are no weights, an odd byte or no elements a portion.
pub fn encode_tensor(
    weights: &[u8],
    geometry: GapGeometry,
    portion_elements: usize,
) -> Result<EncodedTensor> {
    let odd = !weights.len().is_multiple_of(2) || portion_elements == 0;
    let weights = if odd { &[] } else { weights };
    let histogram = Histogram::of(weights);
    let lengths = CodeLengths::from_histogram(&histogram)?;
    let codebook = huffman::codebook(&lengths);
    let (elements, bits) = (histogram.total(), lengths.bits(&histogram)?);
    let sizes = GapSizes::new(geometry, elements, bits, codebook.len() as u64)?;
    let mut arrays = sizes.array_lengths().map(|bytes| vec![0; bytes as usize]);
    arrays[CODEBOOK] = codebook;
    let encoder = PortionEncoder::new(&lengths, &sizes);
    let mut output = PortionOutput::default();
    let (mut first, mut start_bit) = (0, 0);
    while 2 * first < weights.len() {
        let elements = portion_elements.min(weights.len() / 2 - first);
        let end = first + elements;
        let end_bit = start_bit + lengths.bits(&Histogram::of(&weights[2 * first..2 * end]))?;
        let lookahead = (2 * (end + geometry.lookahead())).min(weights.len());
        let weights = &weights[2 * first..lookahead];
        encoder.encode(
            &PortionInput { weights, elements, first_element: first as u64, start_bit, end_bit },
            &mut output,
        )?;
        for (array, at, bytes) in output.parts() {
            // A portion that owns no thread may start after all of them.
            if !bytes.is_empty() {
                arrays[array][at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
            }
        }
        (first, start_bit) = (end, end_bit);
    }
    Ok(EncodedTensor { sizes, arrays })
}
