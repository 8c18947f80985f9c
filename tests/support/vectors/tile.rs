//! Containers with `tile` tensors that every reader must accept.

use df11::Dtype;

use super::{
    Vectors,
    valid::{every_pattern, fibonacci_weights},
};
use crate::container::{
    Item, normal_weights,
    tile_arrays::{Arrays, Bits, Codebook, tiles},
    weights,
};

pub(super) fn make(to: &mut Vectors) {
    places(to);
    codes(to);
    lengths(to);
    tensors(to);
}

/// A matrix in tiles of 32 x 256, with codes for the pairs that occur twice.
fn matrix(name: &str, rows: u64, columns: u64) -> Item {
    let data = normal_weights((rows * columns) as usize, rows + columns);
    Item::in_tiles(name, &[rows, columns], data, (256, columns), 2)
}

/// A vector in tiles of 1 x 8192.
fn linear(elements: u64) -> Item {
    let (name, data) = (format!("w.{elements}"), normal_weights(elements as usize, elements));
    Item::in_tiles(&name, &[elements], data, (8192, elements), 2)
}

/// A vector of these weights under this code.
fn coded(name: &str, data: Vec<u8>, codebook: &Codebook) -> Item {
    let elements = data.len() / 2;
    let arrays = Arrays::with(&tiles(&data, 8192, elements), 8192, elements, codebook);
    Item::encoded(name, &[elements as u64], data, arrays)
}

/// Whole and partial tiles.
fn places(to: &mut Vectors) {
    let edges = [
        matrix("both", 40, 264),
        matrix("columns.2", 3, 16),
        matrix("lower", 33, 256),
        matrix("narrow", 40, 8),
        matrix("one-row", 1, 1000),
        matrix("right", 32, 248),
        matrix("smallest", 1, 8),
    ];
    let odd = [2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 255, 256, 257, 263, 264, 511, 513, 2047];
    // A pair of an exponent twice; the last one's is escaped.
    let one = |name: &str, shape: &[u64], exponent, least| {
        Item::in_tiles(name, shape, weights([exponent]), (8192, 1), least)
    };
    let ones = [
        one("scalar", &[], 130, 1),
        one("vector", &[1], 131, 1),
        one("vector.escaped", &[1], 132, 2),
    ];
    to.items("tile-whole", &[matrix("w", 64, 512)]);
    to.items("tile-edges", &edges);
    to.items("tile-row", &[Item { name: "w".into(), ..linear(8192) }]);
    to.items("tile-rows", &[8191, 8193, 8211].map(linear));
    to.items("tile-one-weight", &ones);
    to.items("tile-odd", &odd.map(linear));
}

fn codes(to: &mut Vectors) {
    let single = || weights(std::iter::repeat_n(127, 600));
    let pair = 127 | 127 << 8;
    let uniform = weights((0..8200u32).map(|at| (at * 37 % 64) as u8 + 90));
    let most = Codebook::new(
        0,
        (0..64).flat_map(|a| (0..64).map(move |b| (12, (a + 90) | (b + 90) << 8))),
    );
    // Pairs of one exponent twice: counts 1, 1, 2, 3, 5, …; the two of them that occur once are the
    // escape's.
    let ladder = fibonacci_weights(13);
    let ladder: Vec<u8> = ladder.chunks(2).flat_map(|weight| [weight, weight].concat()).collect();
    let lengths = Codebook::of(&tiles(&ladder, 8192, ladder.len() / 2), 1);
    assert_eq!(lengths.pairs.last().unwrap().0, 12);
    // The same code, except that the first of its pairs with 12 bits has none.
    let mut escaped = Codebook { escape: 12, ..lengths.clone() };
    escaped.pairs.remove(lengths.pairs.iter().position(|&(length, _)| length == 12).unwrap());
    let unused = [(2, pair), (2, 0x00FF), (3, 0), (3, 0xFFFF)];
    let one_pair = [
        Item::in_tiles("w", &[10, 60], single(), (8192, 600), 1),
        Item::in_tiles("x", &[25, 24], single(), (256, 24), 1),
    ];
    let no_code = Item::in_tiles("w", &[600], normal_weights(600, 31), (8192, 600), u64::MAX);
    let frequent = Item::in_tiles("w", &[40, 64], normal_weights(2560, 32), (256, 64), 40);
    let unused = [
        coded("w", single(), &Codebook::new(2, unused)),
        coded("x", single(), &Codebook::new(1, [(1, pair)])),
    ];
    let all = Item::in_tiles("w", &[256, 256], every_pattern(), (256, 256), 2);
    to.items("tile-all-patterns", &[all]);
    to.items("tile-one-pair", &one_pair);
    to.items("tile-escape-only", &[no_code]);
    to.items("tile-escapes", &[frequent]);
    to.items("tile-code-lengths", &[coded("w", ladder.clone(), &lengths)]);
    to.items("tile-4096-pairs", &[coded("w", uniform, &most)]);
    to.items("tile-unused", &unused);
    to.items("tile-escape-of-12-bits", &[coded("w", ladder, &escaped)]);
}

/// Lengths of lanes that differ much.
fn lengths(to: &mut Vectors) {
    // Lane 0 has all of its 256 weights escaped after 12 bits, the others have one bit a pair.
    let lane = |at: u32| at / 8 % 32;
    let longest =
        weights((0..7944u32).map(|at| if lane(at) == 0 { 200 + (at % 50) as u8 } else { 127 }));
    let ladder = (1..=11).map(|length| (length, if length == 1 { 127 | 127 << 8 } else { length }));
    let code = Codebook::new(12, ladder.chain([(12, 12)]));
    to.items("tile-shift", &[uneven("w", 70, 512)]);
    to.items("tile-longest-lane", &[coded("w", longest, &code)]);
}

/// A matrix of which rows have few exponents or many.
fn uneven(name: &str, rows: u64, columns: u64) -> Item {
    let spread = |at: u64| [1, 2, 5, 40][(at / columns * 7 % 4) as usize];
    let mut state = 1u64;
    let exponent = |at: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        120 - ((state >> 40) % spread(at)) as u8
    };
    let data = weights((0..rows * columns).map(exponent));
    let item = Item::in_tiles(name, &[rows, columns], data, (256, columns), 3);
    let tiles = tiles(&item.data, 256, columns as usize);
    let codebook = Codebook::of(&tiles, 3);
    assert!(tiles.iter().all(|tile| Bits::new(tile, &codebook).shift > 0));
    item
}

fn tensors(to: &mut Vectors) {
    let shaped = |name: &str, shape: &[u64], parameters: (u64, u64)| {
        let count = shape.iter().product::<u64>() as usize;
        Item::in_tiles(name, shape, normal_weights(count, 33), parameters, 2)
    };
    let dimensions = [
        shaped("a.stack", &[3, 20, 40], (256, 40)),
        shaped("b.convolution", &[34, 5, 2, 8], (256, 80)),
        shaped("c.eight", &[2, 1, 3, 1, 2, 5, 1, 2], (8192, 120)),
        shaped("d.no-dimension", &[6, 40], (256, 16)),
        shaped("e.one-row", &[6, 40], (256, 240)),
        shaped("f.odd", &[7, 9, 11], (8192, 693)),
        shaped("g.linear", &[16, 16], (8192, 256)),
    ];
    let first = shaped("a", &[40, 24], (256, 24));
    let mixed = [
        first.clone(),
        Item::gap("b", &[20, 30], normal_weights(600, 34), (8, 64)),
        Item::raw("c", Dtype::F32, &[2], (1..9).collect()),
        shaped("d", &[333], (8192, 333)),
        first.alias("e"),
        shaped("f", &[33, 8], (256, 8)).in_block("other"),
    ];
    to.items("tile-dimensions", &dimensions);
    to.items("tile-mixed", &mixed);
}
