//! The fast decoder of tiles against the reference, on the arrays of a valid tensor that were
//! changed.
//!
//! Agreement means, for a tensor whose arrays have the lengths that its parameters ask for (for
//! others both report an error):
//!
//! 1. The fast decoder gives the whole tensor if and only if the reference does, and the bytes are
//!    the same. Otherwise it reports Corrupt. (The format lets a decoder report what only
//!    verification must; this one does not.)
//! 2. If the reference gives the whole tensor, the fast decoder gives the same bytes for any range
//!    of it. If the reference gives nothing, a range gives bytes or is Corrupt: what is wrong may
//!    lie outside it.
//! 3. Verification, of all strips at once or of some at a time, passes if and only if
//!    `array_witness::verify_tile` does.

use crate::{
    array_witness,
    bytes::{self, Bytes},
    compare::{self, Judgement},
    tensors,
};
use df11::{
    Error, Result,
    hazmat::tile::{BITSTREAM, CODEBOOK, EncodedTensor, PLANE, RECORDS, TileSizes, encode_tensor},
};

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let choice = bytes.u8();
    let cuts = [bytes.u16().into(), bytes.u16().into(), bytes.u16().into()];
    let mut weights = tensors::weights(&mut bytes, 1 << 16);
    let Some(geometry) = tensors::tile_geometry(choice, &mut weights) else { return };
    let mut subject = Subject::new(&encode_tensor(&weights, geometry).expect("weights encode"));
    let changes = bytes::change(&mut bytes, 32, |bytes| subject.change(bytes));
    subject.check(cuts, changes == 0);
}

/// Four arrays and three parameters that may fit each other or not.
struct Subject {
    arrays: [Vec<u8>; 4],
    parameters: [u64; 3],
}

const TILE_COLUMNS: usize = 0;
const COLUMNS: usize = 1;
const BIT_COUNT: usize = 2;
const LANES: u32 = 32;

/// A tile's record as one number.
#[derive(Clone, Copy)]
struct Record(u64, [u8; 24]);

impl Record {
    const LEAST: u32 = 48;
    const SHIFT: u32 = 61;

    fn excess(&self, lane: u32) -> u8 {
        let places = 6 * lane..6 * lane + 6;
        let bits = places.map(|place| self.1[place as usize / 8] >> (place % 8) & 1);
        bits.zip(0..).map(|(bit, at)| bit << at).sum()
    }

    fn set_excess(&mut self, lane: u32, excess: u8) {
        for bit in 0..6 {
            let (byte, at) = ((6 * lane + bit) as usize / 8, (6 * lane + bit) % 8);
            self.1[byte] = self.1[byte] & !(1 << at) | (excess >> bit & 1) << at;
        }
    }

    fn least(&self) -> u64 {
        self.0 >> Self::LEAST & 0x1FFF
    }

    fn length(&self, lane: u32) -> u64 {
        self.least() + (u64::from(self.excess(lane)) << (self.0 >> Self::SHIFT))
    }
}

impl Subject {
    fn new(tensor: &EncodedTensor) -> Self {
        let (arrays, parameters) = array_witness::of(tensor);
        Self { arrays: arrays.map(<[u8]>::to_vec), parameters }
    }

    /// One change, from some of the fuzzer's bytes.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let operation = bytes.u8() % 14;
        match operation {
            0..=3 => bytes::flip(&mut self.arrays[usize::from(operation)], bytes),
            4 => {
                let bits = &mut self.parameters[BIT_COUNT];
                *bits = bits.wrapping_add(8 * u64::from(bytes.u8())).wrapping_sub(1024);
            }
            5 => {
                let parameter = bytes.index(3);
                let values = [0, 8, 16, 24, 64, 256, 264, 8192, 1 << 48, u64::MAX];
                self.parameters[parameter] = bytes.pick(&values);
            }
            6 => bytes::resize(&mut self.arrays[bytes.index(4)], bytes),
            7 => self.change_code(bytes),
            8 => self.change_record(bytes.u16(), |record| {
                record.0 = match bytes.u8() % 3 {
                    0 => record.0.wrapping_add((8 * u64::from(bytes.u8())).wrapping_sub(1024)),
                    1 => record
                        .0
                        .wrapping_add(u64::from(bytes.u8()).wrapping_sub(128) << Record::LEAST),
                    _ => record.0.wrapping_add(u64::from(bytes.u8()) << Record::SHIFT),
                }
            }),
            9 => self.change_record(bytes.u16(), |record| {
                // Length goes from one lane to another one.
                let (a, b) = (u32::from(bytes.u8()) % LANES, u32::from(bytes.u8()) % LANES);
                let by = 1 + bytes.u8() % 3;
                record.set_excess(a, record.excess(a).wrapping_add(by));
                record.set_excess(b, record.excess(b).wrapping_sub(by));
            }),
            10 => self.change_record(bytes.u16(), lower_least),
            11 => self.mark_end_of_lane(bytes),
            12 => self.escape(bytes),
            _ => self.cut_otherwise(bytes),
        }
    }

    /// Another code, of which some are complete.
    fn change_code(&mut self, bytes: &mut Bytes<'_>) {
        let (a, b) = (bytes.index(40), bytes.index(40));
        let how = bytes.u8();
        let words = self.arrays[CODEBOOK].as_chunks().0;
        let mut words: Vec<_> = words.iter().map(|two| u16::from_le_bytes(*two)).collect();
        if words.len() < 13 {
            return;
        }
        let values = words.len() - 13;
        match how % 3 {
            0 if values > 0 => words.swap(13 + a % values, 13 + b % values),
            0 | 1 => {
                words[a % 13] = words[a % 13].wrapping_add(u16::from(how / 3)).wrapping_sub(32);
            }
            _ => {
                // A code gives way to two longer ones, one of them of a value that may be new.
                let length = 1 + a % 11;
                if words[length] > 0 {
                    words[length] -= 1;
                    words[length + 1] = words[length + 1].wrapping_add(2);
                    let place =
                        13 + (1..=length).map(|length| usize::from(words[length])).sum::<usize>();
                    words.insert(place.min(words.len()), u16::from(how) << 8 | b as u16);
                }
            }
        }
        self.arrays[CODEBOOK] = words.into_iter().flat_map(u16::to_le_bytes).collect();
    }

    fn record(&self, tile: usize) -> Option<Record> {
        let record = self.arrays[RECORDS].as_chunks::<32>().0.get(tile)?;
        let (head, excesses) = record.split_first_chunk().expect("32 bytes");
        Some(Record(u64::from_le_bytes(*head), excesses.try_into().expect("24 bytes")))
    }

    fn change_record(&mut self, choice: u16, change: impl FnOnce(&mut Record)) {
        let tile = usize::from(choice) % (self.arrays[RECORDS].len() / 32).max(1);
        let Some(mut record) = self.record(tile) else { return };
        change(&mut record);
        let bytes = &mut self.arrays[RECORDS][32 * tile..][..32];
        bytes[..8].copy_from_slice(&record.0.to_le_bytes());
        bytes[8..].copy_from_slice(&record.1);
    }

    /// Sets one of the last bits of a lane, or of a tile.
    fn mark_end_of_lane(&mut self, bytes: &mut Bytes<'_>) {
        let (tile, lane, back) =
            (bytes.index((self.arrays[RECORDS].len() / 32).max(1)), bytes.u8(), bytes.u8());
        let Some(record) = self.record(tile) else { return };
        let lengths: u64 = (0..=u32::from(lane) % LANES).map(|lane| record.length(lane)).sum();
        let end = (record.0 % (1 << 48)).saturating_add(lengths);
        // After the last lane of a tile up to 7 bits follow.
        let bit = end.saturating_add(7).saturating_sub((back % 72).into());
        if let Some(byte) = self.arrays[BITSTREAM].get_mut((bit / 8) as usize) {
            *byte |= 1 << (bit % 8);
        }
    }

    /// Codes the weights again with an escape where there need not be one.
    fn escape(&mut self, bytes: &mut Bytes<'_>) {
        let (pair, every) = (u64::from(bytes.u16()), u64::from(bytes.u8()));
        let arrays = self.arrays.each_ref().map(Vec::as_slice);
        let Ok(weights) = df11_reference::decode_tile(arrays, self.parameters) else { return };
        if arrays[CODEBOOK][..2] != [0, 0] {
            let columns = [self.parameters[TILE_COLUMNS], self.parameters[COLUMNS]];
            let escaped = |at| {
                if every < 128 { at == pair } else { at % (every - 127) == pair % (every - 127) }
            };
            let coded = array_witness::encode_tile(&weights, arrays[CODEBOOK], columns, escaped);
            self.parameters[BIT_COUNT] = coded.parameters[2];
            self.arrays[RECORDS] = coded.records;
            self.arrays[BITSTREAM] = coded.bitstream;
            self.arrays[PLANE] = coded.plane;
        }
    }

    /// Takes the tensor for a matrix of other columns, the arrays being as they were.
    fn cut_otherwise(&mut self, bytes: &mut Bytes<'_>) {
        let elements = self.arrays[PLANE].len() as u64;
        let columns = 8 * (1 + u64::from(bytes.u8()));
        let narrow = elements.is_multiple_of(columns) && bytes.u8().is_multiple_of(2);
        (self.parameters[TILE_COLUMNS], self.parameters[COLUMNS]) =
            if narrow { (256, columns) } else { (8192, elements) };
    }

    /// The tensor as the fast decoder sees it, if parameters and lengths fit each other.
    fn tensor(&self) -> Result<EncodedTensor> {
        let lengths = self.arrays.each_ref().map(|array| array.len() as u64);
        let sizes = TileSizes::of_record(self.parameters, lengths[PLANE], lengths[CODEBOOK])?;
        if lengths != sizes.array_lengths() {
            return Err(Error::corrupt("arrays", 0, "lengths"));
        }
        Ok(EncodedTensor { sizes, arrays: self.arrays.clone() })
    }

    fn check(&self, cuts: [u64; 3], valid: bool) {
        let arrays = self.arrays.each_ref().map(Vec::as_slice);
        let reference = df11_reference::decode_tile(arrays, self.parameters);
        let witness = array_witness::verify_tile(arrays, self.parameters);
        let tensor = match self.tensor() {
            Ok(tensor) => tensor,
            Err(error) => {
                assert!(reference.is_err(), "only the reference accepts the lengths: {error}");
                return;
            }
        };
        let judgement = Judgement { valid, reference, witness };
        let count = tensor.sizes.elements();
        judgement.whole(tensor.decode(0..count), true);
        let range = compare::range(count, [cuts[0], cuts[1]]);
        judgement.part(tensor.decode(range.clone()), range, true);
        let strips = (1 + cuts[2] % 4) * tensor.sizes.geometry().strip_elements();
        let ends = (0..count).step_by(strips as usize).chain([count]);
        judgement.verification(array_witness::verify(&tensor, [count]));
        judgement.verification(array_witness::verify(&tensor, ends));
    }
}

/// The same lengths from a smaller `least`.
fn lower_least(record: &mut Record) {
    let shift = record.0 >> Record::SHIFT;
    if (0..LANES).all(|lane| record.excess(lane) < 63) && record.least() >= 1 << shift {
        (0..LANES).for_each(|lane| record.set_excess(lane, record.excess(lane) + 1));
        record.0 -= 1 << (Record::LEAST + shift as u32);
    }
}
