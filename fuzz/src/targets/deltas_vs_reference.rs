//! The fast decoder of differences against the reference, on the arrays of a valid tensor that were
//! changed, or with another base.
//!
//! Agreement means, for a tensor whose arrays have the lengths that its parameters ask for (for
//! others both report an error):
//!
//! 1. The fast decoder gives the whole tensor if and only if the reference does, and the bytes are
//!    the same. Otherwise it reports Corrupt.
//! 2. If the reference gives the whole tensor, the fast decoder gives the same bytes for any range
//!    of it. If the reference gives nothing, a range gives bytes or is Corrupt: what is wrong may
//!    lie outside it.
//! 3. What was not changed decodes to the weights that went in.

use std::ops::Range;

use df11::{
    Error, Result,
    hazmat::{
        delta::{self, BITSTREAM, CODEBOOK, DeltaSizes, RECORDS, WithBase},
        stored::{CodedSizes, Scratch},
    },
};

use crate::{
    bytes::{self, Bytes, Random},
    compare::{self, Judgement},
    tensors,
};

/// Bytes of a record.
const RECORD_BYTES: usize = 8;
/// Bytes of a codebook before the tokens of its first context, and of a token there.
const CONTEXT_BYTES: usize = 3;
/// Numbers of a segment before its words: their count, and two for each of four states.
const HEAD_NUMBERS: usize = 1 + 2 * 4;

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let choice = bytes.u8();
    let cuts = [bytes.u16().into(), bytes.u16().into()];
    let mut base = tensors::weights(&mut bytes, 1 << 16);
    if choice >= 0xF8 {
        // More than a segment, which is rare: it takes a hundred times as long.
        base = base.iter().copied().cycle().take((2 << 18) + base.len()).collect();
    }
    let weights = tune(choice % 8, &base, &mut bytes);
    let shape = [weights.len() as u64 / 2];
    let encoded = delta::encode_tensor(&base, &weights, &shape).expect("weights encode");
    let mut subject = Subject { arrays: encoded.arrays, base, shape };
    let changes = bytes::change(&mut bytes, 32, |bytes| subject.change(bytes));
    subject.check(cuts, (changes == 0).then_some(&weights));
}

/// Weights that differ from their base in one of some ways.
fn tune(choice: u8, base: &[u8], bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut random = Random(bytes.u64());
    let (rarity, size) = (bytes.u8(), u32::from(bytes.u8() % 16));
    let change = |weight: &[u8; 2]| {
        let (weight, drawn) = (u16::from_le_bytes(*weight), random.draw());
        let step = (drawn >> 32) as u16 >> (15 - size);
        let is_changed = (drawn as u8) >= rarity;
        let changed = match choice {
            0 => weight,
            1 => weight.wrapping_add(step),
            2 => weight.wrapping_sub(step),
            3 => weight ^ step,
            4 => weight ^ 1 << size,
            5 => step,
            6 => weight.wrapping_add(1 << (drawn.leading_zeros() % 16)),
            _ => weight ^ 0x8000,
        };
        if is_changed { changed } else { weight }.to_le_bytes()
    };
    base.as_chunks().0.iter().flat_map(change).collect()
}

/// Three arrays and a base that may fit each other or not.
struct Subject {
    arrays: [Vec<u8>; 3],
    base: Vec<u8>,
    shape: [u64; 1],
}

impl Subject {
    /// One change, from some of the fuzzer's bytes.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let operation = bytes.u8() % 9;
        match operation {
            0..=2 => bytes::flip(&mut self.arrays[usize::from(operation)], bytes),
            3 => bytes::flip(&mut self.base, bytes),
            4 => bytes::resize(&mut self.arrays[bytes.index(3)], bytes),
            5 => self.move_frequency(bytes),
            6 => self.change_record(bytes),
            7 => self.change_head(bytes),
            _ => self.end_otherwise(bytes),
        }
    }

    /// Some of the frequency of a token goes to another one, so that the sum stays.
    fn move_frequency(&mut self, bytes: &mut Bytes<'_>) {
        let (a, b, by) = (bytes.index(105), bytes.index(105), u16::from(bytes.u8()));
        let Some(tokens) = self.arrays[CODEBOOK].get_mut(CONTEXT_BYTES..) else { return };
        let tokens = tokens.as_chunks_mut::<3>().0;
        let count = tokens.len().max(1);
        let mut add = |at: usize, by: u16| {
            if let Some([_, low, high]) = tokens.get_mut(at % count) {
                [*low, *high] = u16::from_le_bytes([*low, *high]).wrapping_add(by).to_le_bytes();
            }
        };
        add(a, by);
        add(b, by.wrapping_neg());
    }

    /// A segment begins elsewhere.
    fn change_record(&mut self, bytes: &mut Bytes<'_>) {
        let (at, by) = (bytes.u8(), (4 * u64::from(bytes.u8())).wrapping_sub(512));
        let records = self.arrays[RECORDS].as_chunks_mut::<RECORD_BYTES>().0;
        if let Some(record) = bytes::at(records, at) {
            *record = u64::from_le_bytes(*record).wrapping_add(by).to_le_bytes();
        }
    }

    /// Another count of words, or another state.
    fn change_head(&mut self, bytes: &mut Bytes<'_>) {
        let (at, by) = (bytes.u8(), u32::from(bytes.u8()).wrapping_sub(128));
        let numbers = self.arrays[BITSTREAM].as_chunks_mut::<4>().0;
        let held = numbers.len().min(HEAD_NUMBERS);
        if let Some(number) = bytes::at(&mut numbers[..held], at) {
            *number = u32::from_le_bytes(*number).wrapping_add(by).to_le_bytes();
        }
    }

    /// The last segment has numbers more or less, and its record says so.
    fn end_otherwise(&mut self, bytes: &mut Bytes<'_>) {
        let (by, value) = (4 * usize::from(bytes.u8() % 16), bytes.u32());
        let bitstream = &mut self.arrays[BITSTREAM];
        let length = (bitstream.len() + by).saturating_sub(32);
        bitstream.resize(length, 0);
        if let Some(last) = bitstream.as_chunks_mut::<4>().0.last_mut() {
            *last = value.to_le_bytes();
        }
        if let Some(record) = self.arrays[RECORDS].as_chunks_mut::<RECORD_BYTES>().0.last_mut() {
            *record = (length as u64).to_le_bytes();
        }
    }

    fn views(&self) -> [&[u8]; 3] {
        self.arrays.each_ref().map(Vec::as_slice)
    }

    /// The sizes as the fast decoder sees them, if all lengths fit each other.
    fn sizes(&self) -> Result<DeltaSizes> {
        let lengths = self.views().map(|array| array.len() as u64);
        let of = (&self.shape[..], self.shape[0]);
        let sizes = DeltaSizes::new([0; 32], of, lengths[CODEBOOK], lengths[BITSTREAM])?;
        let expected = sizes.arrays().into_iter().map(|(_, length)| length);
        if !expected.eq(lengths) {
            return Err(Error::corrupt("arrays", 0, "lengths"));
        }
        Ok(sizes)
    }

    fn decode(&self, sizes: &DeltaSizes, range: Range<u64>) -> Result<Vec<u8>> {
        let arrays = WithBase { arrays: self.views(), base: &self.base };
        let mut out = vec![0; 2 * (range.end - range.start) as usize];
        sizes.prepare(&arrays)?.decode(&arrays, range, &mut Scratch::default(), &mut out)?;
        Ok(out)
    }

    fn check(&self, cuts: [u64; 2], unchanged: Option<&Vec<u8>>) {
        let reference = df11_reference::decode_delta(self.views(), &self.base, &self.shape);
        if let Some(weights) = unchanged {
            assert!(reference.as_ref().ok() == Some(weights), "the reference decodes others");
        }
        let sizes = match self.sizes() {
            Ok(sizes) => sizes,
            Err(error) => {
                assert!(reference.is_err(), "only the reference accepts the lengths: {error}");
                return;
            }
        };
        let judgement = Judgement { valid: unchanged.is_some(), reference, witness: Ok(()) };
        let count = self.shape[0];
        judgement.whole(self.decode(&sizes, 0..count), true);
        let range = compare::range(count, cuts);
        judgement.part(self.decode(&sizes, range.clone()), range, true);
    }
}
