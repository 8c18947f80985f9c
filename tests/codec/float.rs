//! Parts that only `float` has: the splits of dtypes, and planes of whole bytes for each unit.

use super::{normal::Random, place, witness};
use df11::{
    Dtype, Error,
    hazmat::{
        stored::{CodedSizes, Scratch},
        tile::{
            BITSTREAM, EncodedTensor, FloatSplit, PLANE, TileGeometry, encode_floats, encode_tensor,
        },
    },
};

const DTYPES: [Dtype; 5] = [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::F16, Dtype::BF16, Dtype::F32];

fn splits() -> impl Iterator<Item = (Dtype, FloatSplit)> {
    DTYPES
        .into_iter()
        .flat_map(|dtype| FloatSplit::all_of(dtype).iter().map(move |&split| (dtype, split)))
}

/// Weights with any bits, except for zero bits; most exponents are near each other.
fn floats(split: FloatSplit, count: u64) -> Vec<u8> {
    let mut random = Random(count + 7);
    let word = |_| {
        let (random, kept) = (random.next(), random.next() as u32);
        let middle = (1u32 << (split.exponent_bits() - 1)) - 1;
        let less = (random as u32).trailing_zeros();
        let rare = if (random >> 40).is_multiple_of(64) { random as u32 >> 8 } else { 0 };
        let exponent = (middle.saturating_sub(less) ^ rare) % (1 << split.exponent_bits());
        split.weight(exponent as u8, kept % (1 << split.kept_bits()))
    };
    (0..count).map(word).flat_map(|word| word.to_le_bytes()[..split.bytes()].to_vec()).collect()
}

/// Encodes weights, and has all readers agree on them, whole and in parts.
fn check(dtype: Dtype, split: FloatSplit, weights: &[u8], geometry: TileGeometry) {
    let tensor = encode_floats(weights, split, geometry).unwrap();
    let (sizes, elements) = (tensor.sizes, geometry.elements());
    let (arrays, parameters) = (tensor.views(), sizes.parameters());
    let about = format!("{dtype:?} {split:?} {geometry:?}");
    assert_eq!(arrays.map(|array| array.len() as u64), sizes.array_lengths(), "{about}");
    let again = df11_reference::decode_float(arrays, parameters, dtype.id(), elements);
    assert!(again.unwrap() == weights, "{about}");
    let verified = witness::verify_float(arrays, parameters, dtype.id(), elements);
    assert_eq!(verified, Ok(()), "{about}");
    assert!(tensor.decode(0..elements).unwrap() == weights, "{about}");
    let (from, to) = (elements / 3, elements - elements / 5);
    let part = from as usize * split.bytes()..to as usize * split.bytes();
    assert!(tensor.decode(from..to).unwrap() == weights[part], "{about}");
    verify(&tensor).unwrap();
}

fn verify(tensor: &EncodedTensor) -> df11::Result<()> {
    let (geometry, count) = (tensor.sizes.geometry(), tensor.sizes.elements());
    let ends = (0..count).step_by(geometry.strip_elements() as usize);
    witness::verify(tensor, ends.chain([count]))
}

#[test]
fn every_word_of_eight_and_sixteen_bits() {
    for (dtype, split) in splits().filter(|(dtype, _)| dtype.bits() <= 16) {
        let count = 1u32 << dtype.bits();
        let word =
            |at: u32| (at.wrapping_mul(40_503) % count) >> split.zero_bits() << split.zero_bits();
        let words = (0..count).flat_map(|at| word(at).to_le_bytes()[..split.bytes()].to_vec());
        let words: Vec<u8> = words.collect();
        let count = u64::from(count);
        for columns in [8, 64, 256] {
            let geometry = TileGeometry::new(256, columns, count).unwrap();
            check(dtype, split, &words, geometry);
        }
        check(dtype, split, &words, TileGeometry::vector(count).unwrap());
    }
}

#[test]
fn special_values_of_f32() {
    let split = FloatSplit::of(Dtype::F32, 0).unwrap();
    let words =
        [0, 1, 0x007F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FC0_0001, 0x7FFF_FFFF, 0x3F80_0001];
    let weights: Vec<u8> = words
        .iter()
        .flat_map(|&word: &u32| [word, word | 1 << 31])
        .flat_map(u32::to_le_bytes)
        .collect();
    check(Dtype::F32, split, &weights, TileGeometry::vector(16).unwrap());
}

#[test]
fn vectors_around_units_lanes_and_tiles() {
    for (dtype, split) in splits() {
        for count in (1..20).chain([255, 256, 257, 299, 300, 513, 8191, 8192, 8193, 8205]) {
            check(dtype, split, &floats(split, count), TileGeometry::vector(count).unwrap());
        }
    }
}

#[test]
fn matrices_around_tiles() {
    for (dtype, split) in splits() {
        for (rows, columns) in [(1, 8), (7, 72), (8, 64), (32, 256), (33, 264), (65, 896)] {
            let geometry = TileGeometry::new(256, columns, rows * columns).unwrap();
            check(dtype, split, &floats(split, rows * columns), geometry);
        }
    }
}

#[test]
fn columns_are_decoded_alone() {
    for (_, split) in splits() {
        let (rows, columns, each) = (70, 520, split.bytes());
        let weights = floats(split, rows * columns);
        let geometry = TileGeometry::new(256, columns, rows * columns).unwrap();
        let tensor = encode_floats(&weights, split, geometry).unwrap();
        let decoder = tensor.sizes.prepare(&tensor.views()).unwrap();
        for (of_rows, of_columns) in [(3..40, 5..300), (32..64, 256..512), (69..70, 519..520)] {
            let count = (of_rows.end - of_rows.start) * (of_columns.end - of_columns.start);
            let mut out = vec![0; each * count as usize];
            let part = (of_rows.clone(), of_columns.clone(), columns);
            let scratch = &mut Scratch::default();
            decoder.decode_columns(&tensor.views(), part, scratch, &mut out).unwrap();
            let expected = of_rows.flat_map(|row| {
                let at = |column| each * (row * columns + column) as usize;
                weights[at(of_columns.start)..at(of_columns.end)].to_vec()
            });
            assert!(out == expected.collect::<Vec<u8>>(), "{split:?}");
        }
    }
}

/// BF16 with its own split is `tile`, byte for byte.
#[test]
fn bf16_is_as_it_was() {
    let weights = floats(FloatSplit::BF16, 40 * 264);
    let geometry = TileGeometry::new(256, 264, 40 * 264).unwrap();
    let tile = encode_tensor(&weights, geometry).unwrap();
    assert!(encode_floats(&weights, FloatSplit::BF16, geometry).unwrap() == tile);
    let reference = witness::encode_tile(&weights, &tile.arrays[0], [256, 264], |_| false);
    assert!(reference.list() == tile.views());
}

#[test]
fn exponents_that_a_dtype_lacks_are_an_error() {
    let split = FloatSplit::of(Dtype::F8_E4M3, 0).unwrap();
    let wide = FloatSplit::of(Dtype::F16, 0).unwrap();
    // The bits of exponents up to 31, read as those of E4M3.
    let geometry = TileGeometry::vector(4000).unwrap();
    let tensor = encode_floats(&floats(wide, 4000), wide, geometry).unwrap();
    let plane = vec![0; split.plane_bytes(4000) as usize];
    let [codebook, records, bitstream, _] = tensor.arrays;
    let sizes = tensor.sizes.split_as(split);
    let tensor = EncodedTensor { sizes, arrays: [codebook, records, bitstream, plane] };
    assert_eq!(place(tensor.decode(0..4000)), "bitstream");
    let parameters = sizes.parameters();
    let arrays = tensor.views();
    assert!(df11_reference::decode_float(arrays, parameters, Dtype::F8_E4M3.id(), 4000).is_err());
}

#[test]
fn damage_is_an_error_or_other_weights() {
    for (_, split) in splits() {
        let weights = floats(split, 5000);
        let geometry = TileGeometry::vector(5000).unwrap();
        let good = encode_floats(&weights, split, geometry).unwrap();
        for array in 0..4 {
            for at in (0..good.arrays[array].len()).step_by(37) {
                let mut bad = good.clone();
                bad.arrays[array][at] ^= 0x11;
                match bad.decode(0..5000) {
                    Ok(decoded) => assert!(decoded != weights || verify(&bad).is_err()),
                    Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "{error}"),
                }
            }
        }
    }
}

#[test]
fn bits_after_a_unit_are_verified() {
    let split = FloatSplit::of(Dtype::F8_E5M2, 0).unwrap();
    let geometry = TileGeometry::vector(299).unwrap();
    let mut tensor = encode_floats(&floats(split, 299), split, geometry).unwrap();
    // The last unit has three weights of three bits, after eleven whole ones.
    tensor.arrays[PLANE][11 * 3 + 1] |= 0x80;
    assert_eq!(place(verify(&tensor)), "plane");
    assert!(!tensor.arrays[BITSTREAM].is_empty());
}
