//! The fast decoder of `float` against the reference, on the arrays of a valid tensor of any of its
//! dtypes that were changed. What agreement means says `tiles_vs_reference`; what the encoding has
//! in common with `tile` is changed there in more ways.

use crate::{
    array_witness,
    bytes::{self, Bytes},
    compare::{self, Judgement},
    tensors,
};
use df11::{
    Dtype, Error, Result,
    hazmat::tile::{
        CODEBOOK, EncodedTensor, FloatSplit, PLANE, TileGeometry, TileSizes, encode_floats,
    },
};

const DTYPES: [Dtype; 5] =
    [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::F16, Dtype::BF16, Dtype::F32];

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let dtype = bytes.pick(&DTYPES);
    let split = bytes.pick(FloatSplit::all_of(dtype));
    let choice = bytes.u8();
    let cuts = [bytes.u16().into(), bytes.u16().into(), bytes.u16().into()];
    let mut weights = tensors::weights(&mut bytes, 1 << 14);
    let Some(geometry) = tensors::tile_geometry(choice, &mut weights) else { return };
    let weights = floats(split, &weights);
    let mut subject = Subject::new(dtype, split, &weights, geometry);
    let changes = bytes::change(&mut bytes, 32, |bytes| subject.change(bytes));
    subject.check(cuts, changes == 0);
}

/// Floats with the exponents of BF16 weights, as far as they have such, and their other bits.
fn floats(split: FloatSplit, weights: &[u8]) -> Vec<u8> {
    let weights = weights.as_chunks().0.iter().map(|two| u32::from(u16::from_le_bytes(*two)));
    let float = |weight: u32| {
        let exponent = FloatSplit::BF16.exponent(weight) % (1 << (split.exponent_bits() - 1));
        let kept = FloatSplit::BF16.kept(weight).wrapping_mul(0x1_0101);
        split.weight(exponent, kept % (1 << split.kept_bits()))
    };
    weights.flat_map(|weight| float(weight).to_le_bytes()[..split.bytes()].to_vec()).collect()
}

/// Four arrays and four parameters that may fit each other or not.
struct Subject {
    dtype: Dtype,
    elements: u64,
    arrays: [Vec<u8>; 4],
    parameters: [u64; 4],
}

impl Subject {
    fn new(dtype: Dtype, split: FloatSplit, weights: &[u8], geometry: TileGeometry) -> Self {
        let EncodedTensor { sizes, arrays } =
            encode_floats(weights, split, geometry).expect("weights encode");
        let split = u64::from(split.zero_bits());
        let [tile_columns, columns, bit_count] =
            [geometry.tile_columns(), geometry.columns(), sizes.bit_count()];
        let parameters = [tile_columns, columns, bit_count, split];
        Self { dtype, elements: geometry.elements(), arrays, parameters }
    }

    /// One change, from some of the fuzzer's bytes.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let operation = bytes.u8() % 9;
        match operation {
            0..=3 => bytes::flip(&mut self.arrays[usize::from(operation)], bytes),
            4 => bytes::resize(&mut self.arrays[bytes.index(4)], bytes),
            5 => {
                let values = [0, 4, 8, 12, 13, 16, 24, 64, 256, 8192, 1 << 48, u64::MAX];
                self.parameters[bytes.index(4)] = bytes.pick(&values);
            }
            6 => self.dtype = bytes.pick(Dtype::ALL),
            // A pair that the dtype may not have.
            7 => {
                let at = 26 + 2 * bytes.index(300);
                if let Some(value) = self.arrays[CODEBOOK].get_mut(at) {
                    *value ^= bytes.u8();
                }
            }
            _ => {
                if let Some(last) = self.arrays[PLANE].last_mut() {
                    *last |= bytes.u8();
                }
            }
        }
    }

    /// The tensor as the fast decoder sees it, if parameters and lengths fit each other.
    fn tensor(&self) -> Result<EncodedTensor> {
        let corrupt = |problem| Error::corrupt("arrays", 0, problem);
        let [parameters @ .., zero_bits] = self.parameters;
        let split = FloatSplit::of(self.dtype, zero_bits).ok_or_else(|| corrupt("split"))?;
        let lengths = self.arrays.each_ref().map(|array| array.len() as u64);
        let sizes = TileSizes::of_record(parameters, self.elements, lengths[CODEBOOK])?;
        let sizes = sizes.split_as(split);
        if lengths != sizes.array_lengths() {
            return Err(corrupt("lengths"));
        }
        Ok(EncodedTensor { sizes, arrays: self.arrays.clone() })
    }

    fn check(&self, cuts: [u64; 3], valid: bool) {
        let arrays = self.arrays.each_ref().map(Vec::as_slice);
        let (parameters, dtype, elements) = (self.parameters, self.dtype.id(), self.elements);
        let reference = df11_reference::decode_float(arrays, parameters, dtype, elements);
        let tensor = match self.tensor() {
            Ok(tensor) => tensor,
            Err(error) => {
                assert!(reference.is_err(), "only the reference accepts the lengths: {error}");
                return;
            }
        };
        let witness = array_witness::verify_float(arrays, parameters, dtype, elements);
        let weight_bytes = tensor.sizes.split().bytes() as u64;
        let judgement = Judgement { valid, reference, witness, weight_bytes };
        judgement.whole(tensor.decode(0..elements), true);
        let range = compare::range(elements, [cuts[0], cuts[1]]);
        judgement.part(tensor.decode(range.clone()), range, true);
        // Exponents that the dtype lacks are found by decoding alone.
        let verify = |ends: &mut dyn Iterator<Item = u64>| {
            tensor.decode(0..elements).and_then(|_| array_witness::verify(&tensor, ends))
        };
        let strips = (1 + cuts[2] % 4) * tensor.sizes.geometry().strip_elements();
        judgement.verification(verify(&mut std::iter::once(elements)));
        let mut ends = (0..elements).step_by(strips as usize).chain([elements]);
        judgement.verification(verify(&mut ends));
    }
}
