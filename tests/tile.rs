//! The tile encoding against a bit-by-bit reader written from the specification alone, for many
//! shapes and distributions, and against hostile arrays.

#[path = "../benches/support/normal.rs"]
mod normal;

use df11::hazmat::tile::{
    Codebook, EncodedStrips, EncodedTensor, Encoder, Geometry, PairHistogram, Sizes, TileDecoder,
    encode_tensor,
};
use df11::{Error, hazmat::bf16};
use normal::Random;
use proptest::prelude::*;

/// Reads arrays as section 6.4 says, bit by bit, checking all of its rules.
struct Oracle<'a> {
    tensor: &'a EncodedTensor,
    /// (length, code with its first bit highest, value), the escape having the value 65536.
    codes: Vec<(u32, u32, u32)>,
    has_code: Vec<bool>,
}

impl<'a> Oracle<'a> {
    fn new(tensor: &'a EncodedTensor) -> Self {
        let words: Vec<u32> = tensor
            .codebook
            .chunks(2)
            .map(|word| u32::from(u16::from_le_bytes([word[0], word[1]])))
            .collect();
        let (mut codes, mut next, mut at, mut has_code) = (vec![], 0, 13, vec![false; 65536]);
        for length in 1..=12 {
            let values = &words[at..at + words[length as usize] as usize];
            at += values.len();
            assert!(values.is_sorted());
            for value in values.iter().copied().chain((words[0] == length).then_some(65536)) {
                codes.push((length, next, value));
                next += 1;
                if value < 65536 {
                    assert!(!std::mem::replace(&mut has_code[value as usize], true));
                }
            }
            next *= 2;
        }
        assert_eq!(at, words.len());
        let kraft: u32 = codes.iter().map(|code| 4096 >> code.0).sum();
        assert!(kraft == 4096 || (codes.len() == 1 && codes[0].0 == 1));
        Self { tensor, codes, has_code }
    }

    fn bit(&self, bit: usize) -> u32 {
        u32::from(self.tensor.bitstream[bit / 8] >> (bit % 8) & 1)
    }

    fn field(&self, record: usize, from: usize, bits: usize) -> usize {
        let bit =
            |at: usize| usize::from(self.tensor.records[32 * record + at / 8] >> (at % 8) & 1);
        (0..bits).map(|at| bit(from + at) << at).sum()
    }

    fn pair(&self, bit: &mut usize) -> u32 {
        let (mut code, mut length) = (0, 0);
        loop {
            code = code * 2 + self.bit(*bit);
            length += 1;
            *bit += 1;
            if let Some(found) =
                self.codes.iter().find(|found| (found.0, found.1) == (length, code))
            {
                if found.2 < 65536 {
                    return found.2;
                }
                let value = (0..16).map(|at| self.bit(*bit + at) << at).sum();
                *bit += 16;
                assert!(!self.has_code[value as usize]);
                return value;
            }
            assert!(length < 12);
        }
    }

    fn decode(&self) -> Vec<u8> {
        let geometry = self.tensor.sizes.geometry();
        let (wide, columns) = (geometry.tile_columns() as usize, geometry.columns() as usize);
        let elements = geometry.elements() as usize;
        let (high, rows) = (8192 / wide, elements / columns);
        let (across, down) = (columns.div_ceil(wide), rows.div_ceil(high));
        let mut weights = vec![0xAA; 2 * elements];
        let mut offset = 0;
        for tile in 0..across * down {
            let (row, column) = (high * (tile / across), wide * (tile % across));
            let (height, width) = (high.min(rows - row), wide.min(columns - column));
            let (least, shift) = (self.field(tile, 48, 13), self.field(tile, 61, 3));
            assert_eq!(self.field(tile, 0, 48), offset);
            let lanes: Vec<_> = (0..32).map(|lane| units(wide, lane, height, width)).collect();
            let (mut bits, mut exponents) = (vec![], std::collections::HashMap::new());
            for (lane, units) in lanes.iter().enumerate() {
                let mut bit = offset;
                for &(_, _, r, c, count) in units {
                    for at in (0..count).step_by(2) {
                        let pair = self.pair(&mut bit);
                        exponents.insert((r, c + at), pair as u8);
                        if at + 1 < count {
                            exponents.insert((r, c + at + 1), (pair >> 8) as u8);
                        } else {
                            assert_eq!(pair % 256, pair / 256);
                        }
                    }
                }
                bits.push(bit - offset);
                let length = least + (self.field(tile, 64 + 6 * lane, 6) << shift);
                assert!((bit..offset + length).all(|bit| self.bit(bit) == 0));
                assert!(offset + length >= bit && offset + length - bit < 1 << shift);
                offset += length;
            }
            while offset % 8 > 0 {
                assert_eq!(self.bit(offset), 0);
                offset += 1;
            }
            let (min, max) = (*bits.iter().min().unwrap(), *bits.iter().max().unwrap());
            assert_eq!(least, min);
            assert_eq!(shift, (0..8).find(|shift| (max - min).div_ceil(1 << shift) <= 63).unwrap());
            let mut plane = row * columns + column * height;
            for band in 0..8 {
                for k in 0..16 {
                    for units in &lanes {
                        for &(_, _, r, c, count) in
                            units.iter().filter(|unit| unit.0 == band && unit.1 / 2 == k)
                        {
                            for at in 0..count {
                                let weight =
                                    bf16::weight(exponents[&(r, c + at)], self.tensor.plane[plane]);
                                plane += 1;
                                let to = 2 * ((row + r) * columns + column + c + at);
                                weights[to..to + 2].copy_from_slice(&weight.to_le_bytes());
                            }
                        }
                    }
                }
            }
        }
        assert_eq!(self.field(across * down, 0, 48), offset);
        assert!((48..256).all(|bit| self.field(across * down, bit, 1) == 0));
        assert_eq!(self.tensor.sizes.bit_count(), offset as u64);
        assert_eq!(self.tensor.bitstream.len(), offset.div_ceil(128) * 16);
        assert!((offset..8 * self.tensor.bitstream.len()).all(|bit| self.bit(bit) == 0));
        weights
    }
}

/// The units of a lane, as (band, j, row, first column, weights).
fn units(
    wide: usize,
    lane: usize,
    height: usize,
    width: usize,
) -> Vec<(usize, usize, usize, usize, usize)> {
    let mut units = vec![];
    for band in 0..if wide == 256 { 4 } else { 1 } {
        for j in 0..if wide == 256 { 8 } else { 32 } {
            let (row, column) = if wide == 256 {
                (8 * band + lane / 4, 32 * j + 8 * (lane % 4))
            } else {
                (0, 256 * j + 8 * lane)
            };
            if row < height && column < width {
                units.push((band, j, row, column, 8.min(width - column)));
            }
        }
    }
    units
}

fn check(weights: &[u8], geometry: Geometry) -> EncodedTensor {
    let tensor = encode_tensor(weights, geometry).unwrap();
    assert!(Oracle::new(&tensor).decode() == weights, "{geometry:?}");
    assert!(tensor.decode(0..geometry.elements()).unwrap() == weights, "{geometry:?}");
    let sizes = tensor.sizes;
    let arrays =
        [&tensor.codebook, &tensor.records, &tensor.bitstream, &tensor.plane].map(Vec::as_slice);
    let parameters = [geometry.tile_columns(), geometry.columns(), sizes.bit_count()];
    assert!(df11_reference::decode_tile(arrays, parameters).unwrap() == weights, "{geometry:?}");
    assert_eq!(tensor.records.len() as u64, sizes.records_bytes());
    assert_eq!(tensor.bitstream.len() as u64, sizes.bitstream_bytes());
    assert_eq!(tensor.plane.len() as u64, sizes.plane_bytes());
    for strips in [1, 3, 1000] {
        tensor.verify(strips).unwrap();
    }
    tensor
}

fn matrix(rows: u64, columns: u64) -> Geometry {
    Geometry::new(256, columns, rows * columns).unwrap()
}

fn vector(elements: u64) -> Geometry {
    Geometry::vector(elements).unwrap()
}

fn geometries(elements: u64) -> Vec<Geometry> {
    [8, 128, 256, 1024, 8192]
        .into_iter()
        .filter(|columns| elements.is_multiple_of(*columns))
        .map(|columns| matrix(elements / columns, columns))
        .chain([vector(elements)])
        .collect()
}

fn weights_of(exponents: impl IntoIterator<Item = u8>, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    exponents
        .into_iter()
        .flat_map(|exponent| bf16::weight(exponent, random.next() as u8).to_le_bytes())
        .collect()
}

fn normal(elements: u64) -> Vec<u8> {
    let mut weights = normal::weights(elements, 1, elements.next_multiple_of(2) as usize, |_| 0.02);
    weights.truncate(2 * elements as usize);
    weights
}

#[test]
fn every_pattern_in_every_geometry() {
    let weights: Vec<u8> =
        (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40503).to_le_bytes()).collect();
    for geometry in geometries(1 << 16) {
        check(&weights, geometry);
    }
    let ordered: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for geometry in geometries(1 << 16) {
        check(&ordered, geometry);
    }
}

#[test]
fn vectors_around_units_lanes_and_tiles() {
    for count in
        (1..40).chain([255, 256, 257, 511, 512, 513, 1024, 8191, 8192, 8193, 8200, 16_384, 20_001])
    {
        check(&normal(count), vector(count));
    }
}

#[test]
fn matrices_around_tiles() {
    for columns in [8, 16, 56, 64, 72, 128, 192, 248, 256, 264, 320, 384, 896] {
        for rows in [1, 2, 7, 8, 9, 16, 31, 32, 33, 40, 65] {
            check(&normal(rows * columns), matrix(rows, columns));
        }
    }
}

#[test]
fn one_pair_only() {
    for count in [1, 2, 7, 8192, 10_240] {
        for geometry in geometries(count) {
            let tensor = check(&weights_of(std::iter::repeat_n(255, count as usize), 1), geometry);
            assert!(tensor.codebook.len() <= 28);
        }
    }
}

#[test]
fn escapes_only() {
    // Every pair at most once: values cost more than they save.
    let exponents =
        (0..16_384u64).map(|at| if at % 2 == 0 { (at / 2 % 256) as u8 } else { (at / 512) as u8 });
    for geometry in geometries(16_384) {
        let tensor = check(&weights_of(exponents.clone(), 2), geometry);
        assert_eq!(tensor.codebook[..2], [1, 0]);
        assert_eq!(tensor.codebook.len(), 26);
    }
}

#[test]
fn rows_of_very_different_scales_need_a_shift() {
    for rare in [1, 7, 100] {
        let exponents = (0..8192u64 * 8).map(|at| match at / 256 % rare {
            0 => (at.wrapping_mul(0x9E37_79B9) >> 13) as u8,
            _ => 120,
        });
        let tensor = check(&weights_of(exponents, 3), matrix(256, 256));
        assert!(rare == 1 || tensor.records.chunks(32).any(|record| record[7] >> 5 > 0));
    }
}

#[test]
fn geometry_of_shapes() {
    let choose = |shape: &[u64]| {
        let geometry = Geometry::choose(shape).unwrap();
        (geometry.tile_columns(), geometry.columns(), geometry.tile_count(), geometry.strip_count())
    };
    assert_eq!(choose(&[4096, 4096]), (256, 4096, 2048, 128));
    assert_eq!(choose(&[33, 384]), (256, 384, 4, 2));
    assert_eq!(choose(&[3, 11, 384]), (256, 384, 4, 2));
    assert_eq!(choose(&[64, 16, 3, 3]), (256, 144, 2, 2));
    assert_eq!(choose(&[8192]), (8192, 8192, 1, 1));
    assert_eq!(choose(&[15, 4096]), (8192, 61_440, 8, 8));
    assert_eq!(choose(&[4096, 120]), (8192, 491_520, 60, 60));
    assert_eq!(choose(&[]), (8192, 1, 1, 1));
    assert!(matches!(Geometry::choose(&[4, 0]), Err(Error::Parameter { .. })));
    assert!(matches!(Geometry::choose(&[u64::MAX, 256]), Err(Error::Parameter { .. })));
    for (tile_columns, columns, elements) in [
        (128, 128, 4096),
        (256, 4, 64),
        (256, 12, 144),
        (256, 256, 100),
        (8192, 64, 128),
        (256, 8, 0),
        (8192, 0, 0),
        (256, 0, 8),
    ]
    .into_iter()
    .chain([(256, 8, 8 << 40), (8192, 1 << 46, 1 << 46), (256, u64::MAX - 7, u64::MAX - 7)])
    {
        assert!(matches!(
            Geometry::new(tile_columns, columns, elements),
            Err(Error::Corrupt { .. })
        ));
    }
}

#[test]
fn sizes_of_parts() {
    let good = encode_tensor(&normal(65 * 384), matrix(65, 384)).unwrap();
    let sizes = good.sizes;
    assert_eq!((sizes.tile_count(), sizes.strip_count(), sizes.records_bytes()), (6, 3, 224));
    assert_eq!(sizes.elements_of(&(1..3)).unwrap(), 12_288..24_960);
    assert_eq!(sizes.records_of(&(1..2)).unwrap(), 64..160);
    assert_eq!(sizes.strips_of(&(12_287..12_289)).unwrap(), 0..2);
    for bad in [0..0, 2..4, 3..4, 2..2] {
        assert!(matches!(sizes.elements_of(&bad), Err(Error::Parameter { .. })));
        assert!(matches!(sizes.bitstream_of(&good.records, &bad), Err(Error::Parameter { .. })));
    }
    assert!(matches!(sizes.strips_of(&(24_959..24_961)), Err(Error::Parameter { .. })));
    let geometry = sizes.geometry();
    for (bits, codebook) in
        [(0, 26), (4, 26), (1 << 48, 26), (64, 24), (64, 27), (64, 26 + 2 * 4097)]
    {
        assert!(matches!(Sizes::new(geometry, bits, codebook), Err(Error::Corrupt { .. })));
    }
    assert!(Sizes::new(geometry, (1 << 48) - 8, 26 + 2 * 4096).is_ok());
}

fn book(escape: u16, counts: &[(usize, u16)], values: &[u16]) -> Vec<u8> {
    let mut words = vec![0; 13];
    words[0] = escape;
    for &(length, count) in counts {
        words[length] = count;
    }
    words.extend(values);
    words.iter().flat_map(|word: &u16| word.to_le_bytes()).collect()
}

#[test]
fn each_rule_of_the_codebook_is_checked() {
    let all: Vec<u16> = (0..4096).map(|value| value * 16).collect();
    for good in [
        book(1, &[], &[]),
        book(0, &[(1, 1)], &[7]),
        book(1, &[(1, 1)], &[7]),
        book(2, &[(1, 1), (2, 1)], &[9, 7]),
        book(0, &[(12, 4096)], &all),
        book(12, &[(12, 4095)], &all[1..]),
    ] {
        assert_eq!(Codebook::from_bytes(&good).unwrap().to_bytes(), good);
    }
    let mut short = book(0, &[(1, 2)], &[1, 2]);
    short.pop();
    for bad in [
        vec![],
        vec![0; 25],
        short,
        book(0, &[], &[]),
        book(13, &[], &[]),
        book(2, &[], &[]),
        book(0, &[(2, 1)], &[7]),
        book(0, &[(1, 1)], &[]),
        book(0, &[(1, 1)], &[7, 8]),
        book(0, &[(1, 2)], &[8, 7]),
        book(0, &[(1, 2)], &[7, 7]),
        book(0, &[(1, 1), (2, 2)], &[7, 7, 8]),
        book(0, &[(1, 1), (2, 1)], &[7, 8]),
        book(1, &[(1, 2)], &[7, 8]),
        book(12, &[(12, 4096)], &all),
        book(0, &[(1, 3)], &[1, 2, 3]),
        book(0x100, &[], &[]),
    ] {
        assert!(matches!(Codebook::from_bytes(&bad), Err(Error::Corrupt { .. })), "{bad:?}");
    }
}

#[test]
fn the_code_is_a_good_one() {
    let weights = normal(1 << 22);
    let mut histogram = PairHistogram::new();
    histogram.add(&weights);
    assert_eq!(histogram.exponents(), df11::hazmat::huffman::Histogram::of(&weights));
    let bits = Codebook::from_histogram(&histogram).unwrap().expected_bits(&histogram).unwrap();
    let (bits, entropy) = (bits as f64 / f64::from(1 << 22), histogram.exponents().entropy());
    assert!(bits > entropy && bits < entropy + 0.028, "{bits} {entropy}");

    let mut parts = PairHistogram::new();
    for part in weights[..2 * 10_001].chunks(2 * 3_334) {
        let mut histogram = PairHistogram::new();
        histogram.add(part);
        parts.merge(&histogram);
    }
    assert_eq!(parts.exponents(), df11::hazmat::huffman::Histogram::of(&weights[..2 * 10_001]));
    assert!(matches!(
        Codebook::from_histogram(&PairHistogram::new()),
        Err(Error::Parameter { .. })
    ));
    assert_eq!(
        Codebook::from_bytes(&book(0, &[(1, 1)], &[7])).unwrap().expected_bits(&histogram),
        None
    );
}

#[test]
fn escapes_are_rare() {
    // Of 32 lanes a GPU lets all wait for one that has an escape.
    let mut histogram = PairHistogram::new();
    histogram.add(&normal(1 << 22));
    let book = Codebook::from_histogram(&histogram).unwrap().to_bytes();
    let coded: std::collections::HashSet<u16> =
        book[26..].as_chunks().0.iter().map(|&pair| u16::from_le_bytes(pair)).collect();
    let rare = histogram.used().filter(|(pair, _)| !coded.contains(pair));
    let share = rare.map(|(_, count)| count).sum::<u64>() as f64 / f64::from(1 << 21);
    assert!(share > 0.0 && share < 0.0004, "{share}");
}

#[test]
fn a_changed_source_is_noticed() {
    let weights = normal(64 * 256);
    let mut histogram = PairHistogram::new();
    histogram.add(&weights_of([100, 100, 101, 101, 102, 102], 1));
    let geometry = matrix(64, 256);
    let encoder = Encoder::new(&Codebook::from_histogram(&histogram).unwrap(), geometry);
    let few = Codebook::from_bytes(&book(0, &[(1, 1)], &[0x7575])).unwrap();
    let encoder = if encoder.strip_bytes(0, &weights[..2 * 8192]).is_ok() {
        Encoder::new(&few, geometry)
    } else {
        encoder
    };
    let mut output = EncodedStrips::default();
    assert!(matches!(encoder.strip_bytes(0, &weights[..2 * 8192]), Err(Error::Parameter { .. })));
    assert!(matches!(
        encoder.encode_strip(0, &weights[..2 * 8192], 0, &mut output),
        Err(Error::Parameter { .. })
    ));
    for (strip, bytes) in [(0, 2 * 8191), (2, 2 * 8192), (1, 0), (0, 4 * 8192), (u64::MAX, 0)] {
        assert!(matches!(
            encoder.strip_bytes(strip, &weights[..bytes]),
            Err(Error::Parameter { .. })
        ));
    }
}

fn corrupt<T: std::fmt::Debug>(result: &df11::Result<T>, place: &str) {
    let Err(Error::Corrupt { place: found, .. }) = result else { panic!("{result:?}") };
    assert_eq!(found, place);
}

/// Damaged arrays that decoding must refuse, and with it verification.
#[test]
fn each_rule_of_decoding_is_checked() {
    let good = encode_tensor(&normal(64 * 512), matrix(64, 512)).unwrap();
    let all = 0..good.sizes.elements();
    let refused = |place: &str, damage: &dyn Fn(&mut EncodedTensor)| {
        let mut bad = good.clone();
        damage(&mut bad);
        corrupt(&bad.decode(all.clone()), place);
        corrupt(&bad.verify(1), place);
        corrupt(&bad.verify(2), place);
    };
    refused("records", &|bad| bad.records[0] ^= 8);
    refused("records", &|bad| bad.records[0] ^= 1);
    refused("records", &|bad| bad.records[32] ^= 8);
    refused("records", &|bad| bad.records[32] ^= 1);
    refused("records", &|bad| bad.records[37] ^= 0x40);
    refused("records", &|bad| bad.records[64] ^= 8);
    refused("records", &|bad| bad.records[6] ^= 8);
    refused("records", &|bad| bad.records[20] ^= 0x20);
    refused("records", &|bad| bad.records[128] ^= 8);
    (6..32).for_each(|at| refused("records", &|bad| bad.records[128 + at] ^= 0x10));
    // One bit from a lane to its neighbour.
    refused("bitstream", &|bad| {
        let four = u32::from_le_bytes(bad.records[8..12].try_into().unwrap());
        let four = if four & 63 < 63 && four >> 6 & 63 > 0 { four + 1 - 64 } else { four - 1 + 64 };
        bad.records[8..11].copy_from_slice(&four.to_le_bytes()[..3]);
    });
    let mut bad = good.clone();
    bad.records[32 * 3] ^= 8;
    // A tile that does not need the damaged record is decoded all the same.
    assert!(bad.decode(0..256).is_ok());
    corrupt(&bad.decode(32 * 512..32 * 512 + 1), "records");

    // Two different exponents of an odd last weight, and a code that is none.
    let codebook = Codebook::from_bytes(&book(0, &[(1, 2)], &[0x0101, 0x0201])).unwrap();
    let geometry = vector(1);
    let sizes = Sizes::new(geometry, 8, 30).unwrap();
    let mut output = EncodedStrips::default();
    Encoder::new(&codebook, geometry).encode_strip(0, &weights_of([1], 1), 0, &mut output).unwrap();
    let EncodedStrips { records, mut bitstream, plane } = output;
    assert_eq!(bitstream[0], 0);
    bitstream[0] = 1;
    let bad = EncodedTensor { sizes, codebook: codebook.to_bytes(), records, bitstream, plane };
    corrupt(&bad.decode(0..1), "bitstream");
    let single = EncodedTensor {
        codebook: book(0, &[(1, 1)], &[0x0101]),
        sizes: Sizes::new(geometry, 8, 28).unwrap(),
        ..bad
    };
    corrupt(&single.decode(0..1), "bitstream");
}

/// Arrays that decode, but that verification must refuse.
#[test]
fn each_rule_of_verification_is_checked() {
    // Zeros after the last tile.
    let mut bad = encode_tensor(&normal(1001), vector(1001)).unwrap();
    assert_ne!(bad.sizes.bit_count() % 128, 0);
    *bad.bitstream.last_mut().unwrap() |= 0x80;
    assert!(bad.decode(0..1001).unwrap() == normal(1001));
    corrupt(&bad.verify(1), "bitstream");
    // Zeros after the pairs of a lane.
    let found = (0..20).map(lane_ends).sum::<usize>();
    assert!(found > 10, "{found}");

    // Lengths that are not the writer's: least one lower, all excesses one higher.
    let zeros = weights_of(std::iter::repeat_n(120, 8192), 5);
    let mut bad = encode_tensor(&zeros, vector(8192)).unwrap();
    assert_eq!(bad.records[6], 128);
    bad.records[6] = 127;
    bad.records[8..32]
        .as_chunks_mut::<3>()
        .0
        .iter_mut()
        .for_each(|three| *three = [0x41, 0x10, 0x04]);
    assert!(bad.decode(0..8192).unwrap() == zeros);
    corrupt(&bad.verify(1), "records");

    // A pair with a code that is escaped.
    let geometry = vector(2);
    let escaped = EncodedTensor {
        sizes: Sizes::new(geometry, 24, 28).unwrap(),
        codebook: book(1, &[(1, 1)], &[0x0101]),
        records: [[0; 32], [0; 32]].concat(),
        bitstream: [vec![1 | 2, 2, 0], vec![0; 13]].concat(),
        plane: vec![0; 2],
    };
    let mut escaped = EncodedTensor { records: escaped.records.clone(), ..escaped };
    escaped.records[8] = 17;
    escaped.records[32] = 24;
    assert!(escaped.decode(0..2).unwrap() == weights_of_plane([1, 1]));
    corrupt(&escaped.verify(1), "bitstream");
    escaped.bitstream[0] = 1 | 4;
    assert!(escaped.decode(0..2).unwrap() == weights_of_plane([2, 1]));
    escaped.verify(1).unwrap();
}

/// Sets the last bit of each lane of a tile that needs a shift; for how many lanes that was no bit
/// of a pair.
fn lane_ends(seed: u64) -> usize {
    let mut random = Random(seed);
    let exponents: Vec<u8> = (0..64 * 256)
        .map(|at| if at / 256 == 9 { (random.next() >> (60 - seed % 4)) as u8 } else { 120 })
        .collect();
    let weights = weights_of(exponents, seed);
    let good = encode_tensor(&weights, matrix(64, 256)).unwrap();
    let head = u64::from_le_bytes(good.records[..8].try_into().unwrap());
    assert!(head >> 61 > 0);
    let (mut end, mut found) = (0, 0);
    for lane in 0..32 {
        let at = 8 + lane / 4 * 3;
        let four =
            u32::from_le_bytes([good.records[at], good.records[at + 1], good.records[at + 2], 0]);
        end += (head >> 48 & 0x1FFF) as usize
            + ((four >> (6 * (lane % 4)) & 63) << (head >> 61)) as usize;
        let mut bad = good.clone();
        bad.bitstream[(end - 1) / 8] |= 1 << ((end - 1) % 8);
        if bad != good && bad.decode(0..64 * 256).is_ok_and(|decoded| decoded == weights) {
            corrupt(&bad.verify(1), "bitstream");
            found += 1;
        }
    }
    found
}

fn weights_of_plane(exponents: [u8; 2]) -> Vec<u8> {
    exponents.iter().flat_map(|&exponent| bf16::weight(exponent, 0).to_le_bytes()).collect()
}

fn exponents() -> impl Strategy<Value = Vec<u8>> {
    let skewed =
        (1u32..40, 0u8..=255, 1usize..24_000, any::<u64>()).prop_map(|(skew, top, count, seed)| {
            let mut random = Random(seed);
            let mut draw = || ((random.next() | 1 << 20).leading_zeros() * 10 / skew) as u8;
            (0..count).map(|_| top.wrapping_sub(draw())).collect()
        });
    prop_oneof![3 => skewed, 1 => prop::collection::vec(any::<u8>(), 1..3000)]
}

/// Weights and a geometry for them, some of them cut off where need be.
fn tensors() -> impl Strategy<Value = (Vec<u8>, Geometry)> {
    (exponents(), prop::option::of(1u64..60), any::<u64>()).prop_map(
        |(mut exponents, columns, seed)| {
            let columns =
                columns.map(|units| 8 * units).filter(|&columns| columns <= exponents.len() as u64);
            let Some(columns) = columns else {
                let geometry = vector(exponents.len() as u64);
                return (weights_of(exponents, seed), geometry);
            };
            let rows = exponents.len() as u64 / columns;
            exponents.truncate((rows * columns) as usize);
            (weights_of(exponents, seed), matrix(rows, columns))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_tensor_comes_back((weights, geometry) in tensors()) {
        check(&weights, geometry);
    }

    #[test]
    fn any_order_of_strips_gives_the_same_bytes((weights, geometry) in tensors(), seed: u64) {
        let whole = encode_tensor(&weights, geometry).unwrap();
        let encoder = Encoder::new(&Codebook::from_bytes(&whole.codebook).unwrap(), geometry);
        let strips: Vec<&[u8]> = weights.chunks(2 * geometry.strip_elements() as usize).collect();
        let mut places = vec![0];
        for (strip, weights) in strips.iter().enumerate() {
            places.push(places[strip] + encoder.strip_bytes(strip as u64, weights).unwrap());
        }
        prop_assert_eq!(8 * places[strips.len()], whole.sizes.bit_count());
        let mut order: Vec<usize> = (0..strips.len()).collect();
        order.sort_by_key(|&strip| Random(seed ^ strip as u64).next());
        let mut output = EncodedStrips::default();
        for strip in order {
            output.clear();
            encoder.encode_strip(strip as u64, strips[strip], places[strip], &mut output).unwrap();
            let span = whole.span(strip as u64..strip as u64 + 1).unwrap();
            let is_last = strip + 1 == strips.len();
            prop_assert!(span.bitstream == output.bitstream);
            prop_assert!(span.plane == output.plane);
            let own = span.records.len() - if is_last { 0 } else { 32 };
            prop_assert!(span.records[..own] == output.records);
        }
    }

    #[test]
    fn any_range_is_a_slice_of_the_whole((weights, geometry) in tensors(), a: usize, b: usize, more: u64) {
        let count = weights.len() / 2;
        let (a, b) = (a % count, b % count);
        let (start, end) = (a.min(b), a.max(b) + 1);
        let tensor = encode_tensor(&weights, geometry).unwrap();
        let elements = start as u64..end as u64;
        prop_assert!(tensor.decode(elements.clone()).unwrap() == weights[2 * start..2 * end]);
        // The same from a span of more strips.
        let strips = tensor.sizes.strips_of(&elements).unwrap();
        let wider = strips.start - more % (strips.start + 1)
            ..strips.end + (more >> 32) % (tensor.sizes.strip_count() - strips.end + 1);
        let decoder = TileDecoder::new(&Codebook::from_bytes(&tensor.codebook).unwrap(), &tensor.sizes);
        let mut output = vec![0; 2 * (end - start)];
        decoder.decode_strips(&tensor.span(wider).unwrap(), elements, &mut output).unwrap();
        prop_assert!(output == weights[2 * start..2 * end]);
    }

    /// Arbitrary damage: an error, or weights that the damaged arrays do stand for; never a panic.
    #[test]
    fn damage_is_harmless(
        (weights, geometry) in tensors(), range in any::<(usize, usize)>(),
        hits in prop::collection::vec((0u8..4, any::<usize>(), any::<u8>()), 1..6),
    ) {
        let mut tensor = encode_tensor(&weights, geometry).unwrap();
        for (array, at, value) in hits {
            let array = match array {
                0 => &mut tensor.codebook,
                1 => &mut tensor.records,
                2 => &mut tensor.bitstream,
                _ => &mut tensor.plane,
            };
            let at = at % array.len();
            array[at] ^= value;
        }
        let count = weights.len() / 2;
        let start = range.0 % count;
        let end = start + 1 + range.1 % (count - start);
        only_corrupt(tensor.decode(0..count as u64));
        only_corrupt(tensor.decode(start as u64..end as u64));
        only_corrupt(tensor.verify(2));
        if tensor.verify(1).is_ok() {
            // A tensor that verifies is the only one for its weights and code.
            prop_assert!(Oracle::new(&tensor).decode() == tensor.decode(0..count as u64).unwrap());
        }
    }

    #[test]
    fn noise_is_harmless((weights, geometry) in tensors(), seed: u64, keep: bool) {
        let mut tensor = encode_tensor(&weights, geometry).unwrap();
        let mut random = Random(seed);
        tensor.bitstream.fill_with(|| random.next() as u8);
        if !keep {
            tensor.records.fill_with(|| random.next() as u8);
        }
        only_corrupt(tensor.decode(0..tensor.sizes.elements()));
        only_corrupt(tensor.verify(1));
    }

    #[test]
    fn noise_as_a_codebook_is_harmless(escape in 0u16..14, counts in prop::collection::vec(0u16..3, 12), values in prop::collection::vec(any::<u16>(), 0..20)) {
        let mut words = vec![escape];
        words.extend(counts);
        words.extend(values);
        let bytes: Vec<u8> = words.into_iter().flat_map(u16::to_le_bytes).collect();
        only_corrupt(Codebook::from_bytes(&bytes));
    }
}

fn only_corrupt<T>(result: df11::Result<T>) {
    if let Err(error) = result {
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}
