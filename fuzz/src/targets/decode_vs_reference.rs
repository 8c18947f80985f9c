//! The fast decoder against the reference, on the arrays of a valid tensor that were changed in any
//! way.
//!
//! Agreement means, for a tensor whose arrays have the lengths that its parameters ask for (for
//! others both report an error):
//!
//! 1. The fast decoder gives the whole tensor if and only if the reference does, the codebook has
//!    as many LUTs as its code lengths need, and all bits from `bit_count` on are zero; the bytes
//!    are the same. (The reference leaves the last two to verification, and the format leaves it to
//!    a decoder when to look.) Otherwise it reports Corrupt.
//! 2. If the reference gives the whole tensor, the fast decoder gives the same bytes for any range
//!    of it, except with a wrong number of LUTs, or if it reads the last thread block and bits
//!    after `bit_count` are not zero. If the reference gives nothing, a range gives bytes or is
//!    Corrupt: what is wrong may lie outside it.
//! 3. Verification, of all weights at once or in two parts, passes if and only if
//!    `array_witness::verify_gap` does.

use crate::{
    array_witness,
    bytes::{self, Bytes},
    compare::{self, Judgement},
    tensors,
};
use df11::{
    Error, Result,
    hazmat::gap::{
        BITSTREAM, CODEBOOK, EncodedTensor, GAPS, GapSizes, OUTPUT_OFFSETS, PLANE, encode_tensor,
    },
};

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let geometry = tensors::geometry(&mut bytes);
    let cuts = [bytes.u16().into(), bytes.u16().into(), bytes.u16().into()];
    let weights = tensors::weights(&mut bytes, 1 << 16);
    let encoded = encode_tensor(&weights, geometry, weights.len()).expect("weights encode");
    let mut subject = Subject::new(&encoded);
    let changes = bytes::change(&mut bytes, 32, |bytes| subject.change(bytes));
    subject.check(cuts, changes == 0);
}

/// Five arrays and three parameters that may fit each other or not.
struct Subject {
    arrays: [Vec<u8>; 5],
    parameters: [u64; 3],
}

const BIT_COUNT: usize = 2;

impl Subject {
    fn new(tensor: &EncodedTensor) -> Self {
        let (arrays, parameters) = array_witness::of(tensor);
        Self { arrays: arrays.map(<[u8]>::to_vec), parameters }
    }

    /// One change, from some of the fuzzer's bytes.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let operation = bytes.u8() % 14;
        match operation {
            0..=4 => bytes::flip(&mut self.arrays[usize::from(operation)], bytes),
            5 => {
                // Two exponents exchange their code lengths: another complete code.
                let (a, b) = (bytes.u8().into(), bytes.u8().into());
                if self.arrays[CODEBOOK].len() >= 256 {
                    self.arrays[CODEBOOK].swap(a, b);
                }
            }
            6 => self.change_gap(bytes),
            7 => self.change_output_offset(bytes),
            8 => {
                let bits = &mut self.parameters[BIT_COUNT];
                *bits = bits.wrapping_add(bytes.u8().into()).wrapping_sub(128);
            }
            9 => {
                let parameter = bytes.index(3);
                let values = [0, 8, 16, 32, 64, 128, 256, 512, 1024, u64::MAX];
                self.parameters[parameter] = bytes.pick(&values);
            }
            10 => bytes::resize(&mut self.arrays[bytes.index(5)], bytes),
            11 => self.refresh_luts(),
            12 => self.end_at_thread_block(bytes.index(64)),
            _ => self.drop_elements_of(bytes.index(64)),
        }
    }

    fn change_gap(&mut self, bytes: &mut Bytes<'_>) {
        let threads = 2 * self.arrays[GAPS].len();
        // Half of the changes hit the start of a thread block, where gaps count.
        let choice = bytes.u16();
        let thread = usize::from(choice / 2)
            * if choice.is_multiple_of(2) { 1 } else { self.parameters[1] as usize % 2048 };
        let value = bytes.u8() & 15;
        if threads > 0 {
            let (byte, shift) = (thread % threads / 2, thread % 2 * 4);
            self.arrays[GAPS][byte] = self.arrays[GAPS][byte] & !(15 << shift) | value << shift;
        }
    }

    fn change_output_offset(&mut self, bytes: &mut Bytes<'_>) {
        let entries = self.entries();
        if !entries.is_empty() {
            let (at, from) = (bytes.index(entries.len()), bytes.index(entries.len()));
            let value = match bytes.u16() {
                u16::MAX => u64::MAX,
                by => entries[from].wrapping_add(by.into()).wrapping_sub(1 << 14),
            };
            self.arrays[OUTPUT_OFFSETS][8 * at..][..8].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Makes the LUTs those that follow from the code lengths.
    fn refresh_luts(&mut self) {
        let codebook = &mut self.arrays[CODEBOOK];
        if let Some(lengths) = codebook.first_chunk().copied() {
            codebook.truncate(256);
            codebook.extend(df11_reference::luts(&lengths));
        }
    }

    fn entries(&self) -> Vec<u64> {
        let entries = self.arrays[OUTPUT_OFFSETS].as_chunks().0;
        entries.iter().map(|entry| u64::from_le_bytes(*entry)).collect()
    }

    fn set_entries(&mut self, entries: &[u64]) {
        self.arrays[OUTPUT_OFFSETS] =
            entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    }

    /// Ends the tensor after the code that reaches into a thread block: what is left is valid, and
    /// its last thread block holds no element.
    fn end_at_thread_block(&mut self, block: usize) {
        let [bytes_per_thread, threads_per_block, _] = self.parameters;
        let mut entries = self.entries();
        let threads = threads_per_block.wrapping_mul(block as u64);
        let Some(&gap) = self.arrays[GAPS].get((threads / 2) as usize).filter(|_| block > 0) else {
            return;
        };
        let stream = bytes_per_thread.saturating_mul(threads + 1);
        let reach = u64::from(gap & 15);
        if reach == 0
            || entries.len() < block + 2
            || stream > self.arrays[BITSTREAM].len() as u64
            || entries[block] > self.arrays[PLANE].len() as u64
        {
            return;
        }
        self.parameters[BIT_COUNT] = 8 * bytes_per_thread * threads + reach;
        entries.truncate(block + 1);
        entries.push(entries[block]);
        self.arrays[PLANE].truncate(entries[block] as usize);
        self.set_entries(&entries);
        self.arrays[GAPS].truncate((threads / 2) as usize);
        self.arrays[GAPS].push(gap & 15);
        self.arrays[BITSTREAM].truncate(stream as usize);
        for bit in self.parameters[BIT_COUNT]..8 * stream {
            self.arrays[BITSTREAM][(bit / 8) as usize] &= !(1 << (bit % 8));
        }
    }

    /// Takes the elements of a thread block out of plane and output offsets, and leaves its codes.
    fn drop_elements_of(&mut self, block: usize) {
        let mut entries = self.entries();
        let plane = &mut self.arrays[PLANE];
        if entries.len() < block + 2 {
            return;
        }
        let Some(count) = entries[block + 1].checked_sub(entries[block]) else { return };
        if count < plane.len() as u64 {
            plane.truncate(plane.len() - count as usize);
            entries[block + 1..].iter_mut().for_each(|entry| *entry = entry.wrapping_sub(count));
            self.set_entries(&entries);
        }
    }

    /// The tensor as the fast decoder sees it, if parameters and lengths fit each other.
    fn tensor(&self) -> Result<EncodedTensor> {
        let lengths = self.arrays.each_ref().map(|array| array.len() as u64);
        let sizes = GapSizes::of_record(self.parameters, lengths[PLANE], lengths[CODEBOOK])?;
        if lengths != sizes.array_lengths() {
            return Err(Error::corrupt("arrays", 0, "lengths"));
        }
        Ok(EncodedTensor { sizes, arrays: self.arrays.clone() })
    }

    fn check(&self, cuts: [u64; 3], valid: bool) {
        let arrays = self.arrays.each_ref().map(Vec::as_slice);
        let reference = df11_reference::decode_gap(arrays, self.parameters);
        let witness = array_witness::verify_gap(arrays, self.parameters);
        let tensor = match self.tensor() {
            Ok(tensor) => tensor,
            Err(error) => {
                assert!(reference.is_err(), "only the reference accepts the lengths: {error}");
                return;
            }
        };
        let judgement = Judgement { valid, reference, witness };
        let luts = self.luts_are_as_many_as_needed();
        let zeros = array_witness::zeros_after(&self.arrays[BITSTREAM], self.parameters[BIT_COUNT]);
        let count = tensor.sizes.elements();
        judgement.whole(tensor.decode(0..count), luts && zeros);
        let range = compare::range(count, [cuts[0], cuts[1]]);
        let entries = self.entries();
        let reads_last = range.end == count || range.end > entries[entries.len() - 2];
        judgement.part(tensor.decode(range.clone()), range, luts && (zeros || !reads_last));
        judgement.verification(array_witness::verify(&tensor, [count]));
        judgement.verification(array_witness::verify(&tensor, [cuts[2] % count, count]));
    }

    fn luts_are_as_many_as_needed(&self) -> bool {
        let lengths = self.arrays[CODEBOOK].first_chunk();
        lengths.is_some_and(|lengths| {
            df11_reference::luts(lengths).len() + 256 == self.arrays[CODEBOOK].len()
        })
    }
}
