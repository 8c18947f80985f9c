//! The tile encoding.

#[path = "../../../tests/support/tile_arrays.rs"]
mod tile;

use df11_reference::{Kind, decode_tile};
use tile::{Arrays, Bits, Codebook, LANES, Pair, Tile, tiles};

fn decode(arrays: &Arrays) -> df11_reference::Result<Vec<u8>> {
    decode_tile(arrays.list(), arrays.parameters)
}

fn message(arrays: &Arrays) -> &'static str {
    let error = decode(arrays).unwrap_err();
    assert_eq!(error.kind, Kind::Corrupt);
    error.message
}

/// Weights whose exponents are few, or many, in an order without a pattern.
fn sample(count: usize, exponents: u32) -> Vec<u8> {
    let mut state = 1u64;
    let weight = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let exponent = 124 - (state >> 32 | 1 << 31).trailing_zeros().min(exponents) as u16;
        exponent << 7 | (state >> 16) as u16 & 0x807F
    };
    (0..count).map(weight).flat_map(u16::to_le_bytes).collect()
}

fn check(weights: &[u8], tile_columns: usize, columns: usize, least: u64) {
    let arrays = Arrays::of(weights, tile_columns, columns, least);
    let decoded = decode(&arrays)
        .unwrap_or_else(|error| panic!("{} of {columns}: {error}", weights.len() / 2));
    assert!(decoded == weights, "{} of {columns}", weights.len() / 2);
}

#[test]
fn matrices_come_back() {
    let shapes = [
        (32, 256),
        (64, 512),
        (33, 256),
        (31, 264),
        (1, 8),
        (40, 8),
        (3, 248),
        (9, 1000),
        (70, 520),
        (1, 8192),
    ];
    for (rows, columns) in shapes {
        for least in [1, 2, 5] {
            check(&sample(rows * columns, 20), 256, columns, least);
        }
    }
}

#[test]
fn rows_of_any_length_come_back() {
    for count in
        (1..40).chain([255, 256, 257, 511, 513, 2047, 2049, 8191, 8192, 8193, 8199, 16385, 20000])
    {
        check(&sample(count, 20), 8192, count, 2);
    }
}

#[test]
fn all_patterns_come_back() {
    let all: Vec<u8> =
        (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40_503).to_le_bytes()).collect();
    check(&all, 256, 256, 2);
    check(&all, 8192, 1 << 16, 2);
}

#[test]
fn a_single_pair_and_a_single_escape_come_back() {
    for count in [1, 2, 8191, 8192, 8200] {
        check(&sample(count, 0), 8192, count, 1);
        check(&sample(count, 0), 8192, count, u64::MAX);
        let escapes = Arrays::of(&sample(count, 20), 8192, count, u64::MAX);
        assert_eq!(escapes.codebook.len(), 26);
        assert_eq!(decode(&escapes).unwrap(), sample(count, 20));
    }
    let mut arrays = Arrays::of(&sample(64, 0), 8192, 64, 1);
    arrays.bitstream[0] |= 2;
    assert_eq!(message(&arrays), "6.4: no code matches");
}

#[test]
fn a_tensor_made_by_hand() {
    // 17 weights: two units of lanes 0 and 1, and one weight in lane 2.
    let weights =
        [[0x3F80u16; 8], [0x3F00, 0x3F80, 0x3F80, 0x3F80, 0xBEFF, 0x0001, 0x3F80, 0xBF81]].concat();
    let weights = [&weights[..], &[0x3F81]].concat();
    let codebook = [1u16, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7F7E, 0x7F7F];
    // Codes by length, then value: the escape is 0; 0x7F7E is 10, 0x7F7F is 11. Lane 0: 11 11 11
    // 11. Lane 1: 10 11 0 and 0x007D, the lowest bit first (125, 0), 11. Lane 2: 11. Others: none.
    let bits: Vec<u8> = "1111111110110101111100000000011 11"
        .bytes()
        .filter(|&byte| byte != b' ')
        .map(|b| b - 48)
        .collect();
    let lengths: [usize; 3] = [8, 23, 2];
    assert_eq!(bits.len(), lengths.iter().sum::<usize>());
    // All other lanes have no bits: least is 0, shift 0, and the excesses are the lengths.
    let mut record = [0u8; 32];
    for (lane, length) in lengths.into_iter().enumerate() {
        for bit in 0..6 {
            let at = 64 + 6 * lane + bit;
            record[at / 8] |= ((length >> bit & 1) as u8) << (at % 8);
        }
    }
    let mut last = [0u8; 32];
    last[0] = 40; // 33 bits are 5 bytes
    let mut bitstream = [0u8; 16];
    for (at, bit) in bits.into_iter().enumerate() {
        bitstream[at / 8] |= bit << (at % 8);
    }
    let plane: Vec<u8> =
        weights.iter().map(|weight| (weight >> 8 & 0x80 | weight & 0x7F) as u8).collect();
    let codebook: Vec<u8> = codebook.into_iter().flat_map(u16::to_le_bytes).collect();
    let records = [record, last].concat();
    let decoded = decode_tile([&codebook, &records, &bitstream, &plane], [8192, 17, 40]).unwrap();
    assert_eq!(decoded, weights.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<u8>>());
}

#[test]
fn the_plane_has_its_order() {
    let weights = sample(64 * 512, 20);
    let arrays = Arrays::of(&weights, 256, 512, 2);
    let byte = |row: usize, column: usize| {
        let at = 2 * (512 * row + column);
        weights[at + 1] & 0x80 | weights[at] & 0x7F
    };
    // Tile 3 begins at row 32 and column 256; m is a weight of lane l.
    let start = 32 * 512 + 256 * 32;
    for (l, m) in (0..32).flat_map(|l| (0..256).map(move |m| (l, m))) {
        let (b, j) = (m / 64, m / 8 % 8);
        let expected = byte(32 + 8 * b + l / 4, 256 + 32 * j + 8 * (l % 4) + m % 8);
        assert_eq!(arrays.plane[start + 512 * (m / 16) + 16 * l + m % 16], expected);
    }
}

/// Four tiles of 32 x 256 with lanes that differ: shift is not 0.
fn uneven() -> (Vec<Tile>, Codebook) {
    let mut weights = sample(64 * 512, 20);
    for row in (0..64).step_by(8) {
        weights[1024 * row..1024 * row + 1024].copy_from_slice(&sample(512, 1));
    }
    let tiles = tiles(&weights, 256, 512);
    let codebook = Codebook::of(&tiles, 3);
    (tiles, codebook)
}

fn edited(edit: impl FnOnce(&mut Vec<Bits>)) -> Arrays {
    let (tiles, codebook) = uneven();
    let mut bits: Vec<Bits> = tiles.iter().map(|tile| Bits::new(tile, &codebook)).collect();
    assert!(bits.iter().all(|tile| tile.shift > 0));
    edit(&mut bits);
    Arrays::new(256, 512, &codebook, &bits)
}

#[test]
fn lengths_of_lanes_are_checked() {
    let wrong = "6.4: a lane is too short or too long";
    decode(&edited(|_| {})).unwrap();
    for lane in 0..LANES {
        let longest = (0..LANES).max_by_key(|&lane| edited_bits().lanes[lane].len()).unwrap();
        let more = edited(|tiles| tiles[1].excess[lane] += u64::from(lane != longest));
        assert!(lane == longest || message(&more) == wrong);
        if edited_bits().excess[lane] > 0 {
            assert!(decode(&edited(|tiles| tiles[1].excess[lane] -= 1)).is_err());
        }
    }
    // What a writer must not do, and a decoder does not see.
    decode(&edited(|tiles| tiles[2].describe(6))).unwrap();
    decode(&edited(|tiles| tiles[2].describe(7))).unwrap();
}

fn edited_bits() -> Bits {
    let (tiles, codebook) = uneven();
    Bits::new(&tiles[1], &codebook)
}

#[test]
fn records_are_checked() {
    let good = edited(|_| {});
    let set = |record: usize, byte: usize, value: u8| {
        let mut arrays = good.clone();
        arrays.records[32 * record + byte] = value;
        message(&arrays)
    };
    let start = "6.4: a tile does not start where the one before ends";
    assert_eq!(set(0, 0, 8), start);
    assert_eq!(set(1, 0, good.records[32] + 8), start);
    assert_eq!(set(1, 0, good.records[32] + 1), start);
    assert_eq!(set(2, 5, 255), start);
    assert_eq!(set(4, 0, good.records[128] ^ 8), "6.4: the last offset is not bit_count");
    assert_eq!(set(4, 6, 1), "6.4: the last record has more than an offset");
    assert_eq!(set(4, 31, 128), "6.4: the last record has more than an offset");
    let mut more = good.clone();
    more.parameters[2] += 8;
    assert!(
        message(&more).contains("length of an array")
            || message(&more).contains("end at bit_count")
    );
}

#[test]
fn odd_units_are_checked() {
    let weights = sample(8193, 0);
    let mut tiles = tiles(&weights, 8192, 8193);
    assert_eq!(tiles[1].lanes[0], [Pair::Coded(124 | 124 << 8)]);
    tiles[1].lanes[0][0] = Pair::Coded(124 | 123 << 8);
    let arrays = Arrays::with(&tiles, 8192, 8193, &Codebook::of(&tiles, 1));
    assert_eq!(message(&arrays), "6.4: the last pair of an odd unit has two exponents");
}

#[test]
fn codebooks_are_checked() {
    let (tiles, codebook) = uneven();
    let good = Arrays::with(&tiles, 256, 512, &codebook);
    let with = |words: &[u16]| {
        let mut arrays = good.clone();
        arrays.codebook = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        message(&arrays)
    };
    let code = |escape: u16, counts: [u16; 12], values: &[u16]| {
        with(&[&[escape], &counts[..], values].concat())
    };
    let one = |length: usize, count: u16| {
        let mut counts = [0; 12];
        counts[length - 1] = count;
        counts
    };
    let incomplete = "6.4: the lengths make no complete code";
    assert_eq!(code(0, [0; 12], &[]), incomplete);
    assert_eq!(code(2, [0; 12], &[]), incomplete);
    assert_eq!(code(0, one(2, 1), &[5]), incomplete);
    assert_eq!(code(1, one(1, 2), &[5, 6]), incomplete);
    assert_eq!(code(1, one(2, 1), &[5]), incomplete);
    assert_eq!(code(13, one(1, 2), &[5, 6]), "6.4: length of the escape");
    assert_eq!(code(0, one(1, 2), &[6, 5]), "6.4: order of the codebook");
    assert_eq!(code(0, one(1, 2), &[6, 6]), "6.4: order of the codebook");
    assert_eq!(code(0, one(1, 2), &[5, 6, 7]), "6.4: the codebook has more values than codes");
    assert_eq!(code(0, one(1, 3), &[5, 6]), "an index, an offset or a count leads outside");
    assert_eq!(code(0, one(1, u16::MAX), &[5, 6]), "an index, an offset or a count leads outside");
    let mut counts = one(1, 1);
    counts[1] = 2;
    assert_eq!(code(0, counts, &[6, 5, 6]), "6.4: a pair occurs twice in the codebook");
    let most: Vec<u16> = (0..4096).collect();
    assert_ne!(code(0, one(12, 4096), &most), incomplete);
}

/// Every flipped bit of codebook and records, and some of the bitstream: an error, or a tensor of
/// the same length.
#[test]
fn flipped_bits_never_panic() {
    let weights = sample(16 * 264 + 264, 20);
    for (tile_columns, columns) in [(256, 264), (8192, 17 * 264)] {
        let good = Arrays::of(&weights, tile_columns, columns, 2);
        let lengths = good.list().map(<[u8]>::len);
        for (array, length) in lengths.into_iter().enumerate().take(3) {
            for bit in (0..8 * length).filter(|bit| bit % [1, 1, 13][array] == 0) {
                let mut flipped = good.clone();
                let bytes = [&mut flipped.codebook, &mut flipped.records, &mut flipped.bitstream]
                    .into_iter()
                    .nth(array);
                bytes.unwrap()[bit / 8] ^= 1 << (bit % 8);
                let decoded = decode(&flipped);
                assert!(decoded.is_err() || array != 1, "bit {bit} of the records");
                assert!(decoded.map_or(true, |bytes| bytes.len() == weights.len()));
            }
        }
    }
}

#[test]
fn parameters_and_lengths_are_checked() {
    let good = Arrays::of(&sample(40 * 24, 20), 256, 24, 2);
    decode(&good).unwrap();
    let odd = [0, 1, 7, 9, 25, 40, 1 << 32, 1 << 48, 1 << 61, u64::MAX - 7, u64::MAX];
    for value in odd {
        for at in 0..3 {
            let mut arrays = good.clone();
            arrays.parameters[at] = value;
            decode(&arrays).unwrap_err();
        }
    }
    let parameters = |parameters: [u64; 3]| message(&Arrays { parameters, ..good.clone() });
    let bits = good.parameters[2];
    assert_eq!(parameters([512, 24, bits]), "6.4: tile_columns");
    assert_eq!(parameters([8192, 24, bits]), "6.4: columns");
    assert_eq!(parameters([256, 12, bits]), "6.4: columns");
    assert_eq!(parameters([256, 56, bits]), "6.4: columns");
    assert_eq!(parameters([256, 0, bits]), "6.4: columns");
    assert_eq!(parameters([256, 24, bits - 1]), "6.4: bit_count");
    assert_eq!(parameters([256, 24, 0]), "6.4: bit_count");
    assert_eq!(parameters([256, 24, 472]), "6.4: bit_count");
    assert_ne!(parameters([256, 24, 480]), "6.4: bit_count");
    assert_eq!(parameters([256, 24, 1 << 48]), "6.4: bit_count");
    for array in 0..4 {
        for longer in [false, true] {
            let mut lists = good.list().map(<[u8]>::to_vec);
            let length = if longer { lists[array].len() + 1 } else { lists[array].len() - 1 };
            lists[array].resize(length, 0);
            let lists = lists.each_ref().map(Vec::as_slice);
            assert_eq!(decode_tile(lists, good.parameters).unwrap_err().kind, Kind::Corrupt);
        }
    }
}
