//! Containers with `tile` tensors that every reader must accept.

use df11::Dtype;

use super::{Vector, valid::fibonacci_weights};
use crate::container::{
    Item, Model, normal_weights,
    tile_arrays::{Arrays, Bits, Codebook, tiles},
    weights,
};

fn vector(name: &str, about: &str, items: &[Item]) -> Vector {
    let model = Model::new(items, &[]);
    Vector::valid(name, about, &model, model.build(), |_| false)
}

/// A matrix in tiles of 32 x 256, with codes for the pairs that occur twice.
fn matrix(name: &str, rows: u64, columns: u64) -> Item {
    let data = normal_weights((rows * columns) as usize, rows + columns);
    Item::in_tiles(name, &[rows, columns], data, (256, columns), 2)
}

/// A vector in tiles of 1 x 8192.
fn linear(name: &str, elements: u64) -> Item {
    Item::in_tiles(
        name,
        &[elements],
        normal_weights(elements as usize, elements),
        (8192, elements),
        2,
    )
}

/// A vector of these weights under this code.
fn coded(name: &str, data: Vec<u8>, codebook: &Codebook) -> Item {
    let elements = data.len() / 2;
    let arrays = Arrays::with(&tiles(&data, 8192, elements), 8192, elements, codebook);
    Item::encoded(name, &[elements as u64], data, arrays)
}

pub(super) fn vectors() -> Vec<Vector> {
    [places(), codes(), lengths(), tensors()].into_iter().flatten().collect()
}

/// Whole and partial tiles.
fn places() -> Vec<Vector> {
    let edges = [
        matrix("both", 40, 264),
        matrix("columns.2", 3, 16),
        matrix("lower", 33, 256),
        matrix("narrow", 40, 8),
        matrix("one-row", 1, 1000),
        matrix("right", 32, 248),
        matrix("smallest", 1, 8),
    ];
    let counts = [2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 255, 256, 257, 263, 264, 511, 513, 2047];
    let odd: Vec<Item> = counts.iter().map(|&count| linear(&format!("w.{count}"), count)).collect();
    vec![
        vector("tile-whole", "four whole tiles of 32 x 256", &[matrix("w", 64, 512)]),
        vector(
            "tile-edges",
            "tiles that are partial at the right, below, at both, or all over",
            &edges,
        ),
        vector("tile-row", "one whole tile of 1 x 8192", &[linear("w", 8192)]),
        vector(
            "tile-rows",
            "tiles of 1 x 8192, the last of which has few weights, one, or all but one",
            &[linear("w.8191", 8191), linear("w.8193", 8193), linear("w.8211", 8211)],
        ),
        vector(
            "tile-one-weight",
            "tensors of one weight: a pair of its exponent twice",
            &[
                Item::in_tiles("scalar", &[], weights([130]), (8192, 1), 1),
                Item::in_tiles("vector", &[1], weights([131]), (8192, 1), 1),
                Item::in_tiles("vector.escaped", &[1], weights([132]), (8192, 1), 2),
            ],
        ),
        vector("tile-odd", "last units of one to eight weights, in one lane or another", &odd),
    ]
}

fn codes() -> Vec<Vector> {
    let all: Vec<u8> =
        (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40_503).to_le_bytes()).collect();
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
    let unused = [(2, pair), (2, 0x00FF), (3, 0), (3, 0xFFFF)];
    vec![
        vector(
            "tile-all-patterns",
            "every BF16 bit pattern once: nearly all pairs are escaped",
            &[Item::in_tiles("w", &[256, 256], all, (256, 256), 2)],
        ),
        vector(
            "tile-one-pair",
            "one pair only: its code is the bit 0",
            &[
                Item::in_tiles("w", &[10, 60], single(), (8192, 600), 1),
                Item::in_tiles("x", &[25, 24], single(), (256, 24), 1),
            ],
        ),
        vector(
            "tile-escape-only",
            "no pair has a code: the escape is the bit 0",
            &[Item::in_tiles("w", &[600], normal_weights(600, 31), (8192, 600), u64::MAX)],
        ),
        vector(
            "tile-escapes",
            "codes for frequent pairs only",
            &[Item::in_tiles("w", &[40, 64], normal_weights(2560, 32), (256, 64), 40)],
        ),
        vector(
            "tile-code-lengths",
            "codes of all lengths from 1 to 12 bits",
            &[coded("w", ladder.clone(), &lengths)],
        ),
        vector(
            "tile-4096-pairs",
            "4096 pairs with codes of 12 bits",
            &[coded("w", uniform, &most)],
        ),
        vector(
            "tile-unused",
            "codes of pairs that do not occur, and an escape that is not used",
            &[
                coded("w", single(), &Codebook::new(2, unused)),
                coded("x", single(), &Codebook::new(1, [(1, pair)])),
            ],
        ),
        vector(
            "tile-escape-of-12-bits",
            "pairs of 28 bits",
            &[coded("w", ladder, &Codebook::new(12, escape_of_12_bits(&lengths)))],
        ),
    ]
}

/// The code, but that the first of its pairs with 12 bits has none.
fn escape_of_12_bits(codebook: &Codebook) -> Vec<(u16, u16)> {
    let mut pairs = codebook.pairs.clone();
    let first = pairs.iter().position(|&(length, _)| length == 12).unwrap();
    pairs.remove(first);
    pairs
}

/// Lengths of lanes that differ much.
fn lengths() -> Vec<Vector> {
    // Lane 0 has all of its 256 weights escaped after 12 bits, the others have one bit a pair.
    let lane = |at: u32| at / 8 % 32;
    let longest =
        weights((0..7944u32).map(|at| if lane(at) == 0 { 200 + (at % 50) as u8 } else { 127 }));
    let ladder = (1..=11).map(|length| (length, if length == 1 { 127 | 127 << 8 } else { length }));
    let code = Codebook::new(12, ladder.chain([(12, 12)]));
    let items = [coded("w", longest, &code)];
    vec![
        vector(
            "tile-shift",
            "rows with exponents of their own: lanes differ by more than 63 bits",
            &[uneven("w", 70, 512)],
        ),
        vector(
            "tile-longest-lane",
            "a lane of 3584 bits among those of 124 and 128: shift is 6",
            &items,
        ),
    ]
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

fn tensors() -> Vec<Vector> {
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
    vec![
        vector(
            "tile-dimensions",
            "columns that are the last dimension, several, or none",
            &dimensions,
        ),
        vector("tile-mixed", "tile, gap, raw and an alias of tile in one block", &mixed),
    ]
}
