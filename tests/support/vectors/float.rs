//! Containers with `float` tensors that every reader must accept.

use df11::Dtype;

use super::Vectors;
use crate::container::{
    FLOATS, Item, normal_weights,
    tile_arrays::{Arrays, Codebook, Split, tiles_of},
};

pub(super) fn make(to: &mut Vectors) {
    places(to);
    values(to);
    codes(to);
    tensors(to);
}

/// Weights with exponents that fall off as those of trained weights do, and any other bits.
pub(super) fn floats((dtype, zero_bits): (Dtype, u64), count: usize, seed: u64) -> Vec<u8> {
    let Split { bits, exponent, .. } = Split::of(dtype.id(), zero_bits);
    let mantissa = bits - 1 - exponent;
    let mut state = seed | 1;
    let word = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let middle = (1 << (exponent - 1)) - 1;
        let less = (state >> 32 | 1 << 31).trailing_zeros().min(20).min(middle);
        let rest = (state >> 11) as u32 & !(((1 << exponent) - 1) << mantissa);
        rest >> zero_bits << zero_bits | (middle - less) << mantissa
    };
    words(bits, (0..count).map(word))
}

/// Words of so many bits, little-endian.
fn words(bits: u32, words: impl Iterator<Item = u32>) -> Vec<u8> {
    words.flat_map(|word| word.to_le_bytes()[..bits as usize / 8].to_vec()).collect()
}

fn name((dtype, zero_bits): (Dtype, u64)) -> String {
    format!("{}.{zero_bits}", dtype.name())
}

pub(super) fn matrix(of: (Dtype, u64), rows: u64, columns: u64) -> Item {
    let data = floats(of, (rows * columns) as usize, rows + columns);
    let shape = [rows, columns];
    Item::floats(&name(of), of.0, &shape, data, ((256, columns), of.1, 2))
}

fn vector(of: (Dtype, u64), elements: u64) -> Item {
    let (data, name) = (floats(of, elements as usize, elements), format!("{elements:05}"));
    Item::floats(&name, of.0, &[elements], data, ((8192, elements), of.1, 2))
}

/// Whole and partial tiles and units.
fn places(to: &mut Vectors) {
    for of in FLOATS {
        let name = name(of).to_ascii_lowercase();
        let odd = [1, 2, 3, 5, 7, 8, 9, 17, 255, 300, 513, 8192, 8197];
        to.items(&format!("float-odd-{name}"), &odd.map(|elements| vector(of, elements)));
    }
    to.items("float-whole", &FLOATS.map(|of| matrix(of, 32, 256)));
    to.items("float-edges", &FLOATS.map(|of| matrix(of, 41, 264)));
    to.items("float-smallest", &FLOATS.map(|of| matrix(of, 1, 8)));
}

/// All bits that floats have, and those of F32 that conversions and arithmetic change.
fn values(to: &mut Vectors) {
    let all = |dtype: Dtype, count: u32, columns| {
        let data = words(dtype.bits() as u32, (0..count).map(|at| at.wrapping_mul(40_503) % count));
        let shape = [u64::from(count) / columns, columns];
        Item::floats(dtype.name(), dtype, &shape, data, ((256, columns), 0, 2))
    };
    let special: Vec<u32> = [
        0,
        1,
        0x007F_FFFF,
        0x0080_0000,
        0x3F80_0000,
        0x7F7F_FFFF,
        0x7F80_0000,
        0x7F80_0001,
        0x7FBF_FFFF,
        0x7FC0_0000,
        0x7FFF_FFFF,
    ]
    .into_iter()
    .flat_map(|word| [word, word | 1 << 31])
    .collect();
    let count = special.len() as u64;
    let special = Item::floats(
        "special",
        Dtype::F32,
        &[count],
        words(32, special.into_iter()),
        ((8192, count), 0, 2),
    );
    to.items("float-all-f8", &[all(Dtype::F8_E4M3, 256, 16), all(Dtype::F8_E5M2, 256, 16)]);
    to.items("float-all-f16", &[all(Dtype::F16, 1 << 16, 256)]);
    to.items("float-special", &[special]);
}

/// Pairs without a code, pairs that no float of the dtype has, and zero bits that a writer may
/// leave.
fn codes(to: &mut Vectors) {
    let of = (Dtype::F8_E4M3, 0);
    let data = floats(of, 600, 3);
    let item = |name: &str, data: &[u8], least| {
        Item::floats(name, of.0, &[data.len() as u64], data.into(), ((8192, 600), 0, least))
    };
    let codebook = Codebook::new(2, [(1, 0x0707), (3, 0xFFFF), (3, 0x0610)]);
    let tiles = tiles_of(&data, Split::of(of.0.id(), 0), 8192, 600);
    let unused = Arrays::with(&tiles, 8192, 600, &codebook);
    let unused = Item { store: crate::container::Store::Encoded(unused), ..item("w", &data, 2) };
    let zeros = floats((Dtype::F32, 16), 600, 5);
    let kept = |name: &str, zero_bits| {
        Item::floats(name, Dtype::F32, &[600], zeros.clone(), ((8192, 600), zero_bits, 2))
    };
    to.items("float-escape-only", &[item("w", &data, u64::MAX)]);
    to.items("float-one-pair", &[item("w", &[0x38; 600], 1)]);
    to.items("float-unused", &[unused]);
    to.items("float-zero-bits-kept", &[kept("kept", 0), kept("some", 13)]);
}

fn tensors(to: &mut Vectors) {
    let f32 = matrix((Dtype::F32, 0), 40, 24);
    let mixed = [
        f32.clone(),
        Item::in_tiles("a.bf16", &[40, 24], normal_weights(960, 7), (256, 24), 2),
        Item::raw("b", Dtype::F32, &[2], (1..9).collect()),
        f32.alias("c"),
        matrix((Dtype::F8_E4M3, 0), 33, 8).in_block("other"),
    ];
    let scalar = Item::floats("w", Dtype::F16, &[], vec![0, 0x3C], ((8192, 1), 0, 1));
    to.items("float-mixed", &mixed);
    to.items("float-scalar", &[scalar]);
}
