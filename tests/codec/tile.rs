//! Tests of `tile` alone: units, lanes, tiles, strips, pairs and their escape.

use super::{
    every_pattern, normal, place, weights_of,
    witness::{self, codebook_of},
};
use df11::{
    Error, Result,
    hazmat::{
        huffman::Histogram,
        tile::{
            BITSTREAM, CODEBOOK, Codebook, EncodedStrips, EncodedTensor, Encoder, PLANE,
            PairHistogram, RECORDS, TileGeometry, encode_tensor,
        },
    },
};

/// Encodes weights, and has all readers agree on them.
fn check(weights: &[u8], geometry: TileGeometry) -> EncodedTensor {
    let tensor = encode_tensor(weights, geometry).unwrap();
    let (sizes, (arrays, parameters)) = (tensor.sizes, witness::of(&tensor));
    assert_eq!(arrays.map(|array| array.len() as u64), sizes.array_lengths());
    assert!(df11_reference::decode_tile(arrays, parameters).unwrap() == weights, "{geometry:?}");
    assert_eq!(witness::verify_tile(arrays, parameters), Ok(()), "{geometry:?}");
    assert!(tensor.decode(0..sizes.elements()).unwrap() == weights, "{geometry:?}");
    for each in [1, 3, 1000] {
        verify(&tensor, each).unwrap();
    }
    tensor
}

/// Verifies some strips at a time.
fn verify(tensor: &EncodedTensor, each: usize) -> Result<()> {
    let (geometry, count) = (tensor.sizes.geometry(), tensor.sizes.elements());
    let ends = (0..count).step_by(geometry.strip_elements() as usize * each);
    witness::verify(tensor, ends.chain([count]))
}

fn matrix(rows: u64, columns: u64) -> TileGeometry {
    TileGeometry::new(256, columns, rows * columns).unwrap()
}

fn vector(elements: u64) -> TileGeometry {
    TileGeometry::vector(elements).unwrap()
}

fn geometries(elements: u64) -> Vec<TileGeometry> {
    [8, 128, 256, 1024, 8192]
        .into_iter()
        .filter(|columns| elements.is_multiple_of(*columns))
        .map(|columns| matrix(elements / columns, columns))
        .chain([vector(elements)])
        .collect()
}

fn normal(elements: u64) -> Vec<u8> {
    let mut weights = normal::weights(elements, 1, elements.next_multiple_of(2) as usize, |_| 0.02);
    weights.truncate(2 * elements as usize);
    weights
}

#[test]
fn every_pattern_in_every_geometry() {
    for geometry in geometries(1 << 16) {
        check(&every_pattern(), geometry);
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
fn escapes_only() {
    // Every pair at most once: values cost more than they save.
    let exponents =
        (0..16_384u64).map(|at| if at % 2 == 0 { (at / 2 % 256) as u8 } else { (at / 512) as u8 });
    for geometry in geometries(16_384) {
        let tensor = check(&weights_of(exponents.clone(), 2), geometry);
        assert_eq!(tensor.arrays[CODEBOOK][..2], [1, 0]);
        assert_eq!(tensor.arrays[CODEBOOK].len(), 26);
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
        assert!(rare == 1 || tensor.arrays[RECORDS].chunks(32).any(|record| record[7] >> 5 > 0));
    }
}

#[test]
fn geometry_of_shapes() {
    let choose = |shape: &[u64]| {
        let geometry = TileGeometry::choose(shape).unwrap();
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
    assert!(matches!(TileGeometry::choose(&[4, 0]), Err(Error::Parameter { .. })));
    assert!(matches!(TileGeometry::choose(&[u64::MAX, 256]), Err(Error::Parameter { .. })));
}

#[test]
fn sizes_of_parts() {
    let good = encode_tensor(&normal(65 * 384), matrix(65, 384)).unwrap();
    let sizes = good.sizes;
    let geometry = sizes.geometry();
    assert_eq!((geometry.tile_count(), geometry.strip_count()), (6, 3));
    assert_eq!(sizes.array_lengths()[RECORDS], 224);
    assert_eq!(sizes.elements_of(&(1..3)).unwrap(), 12_288..24_960);
    assert_eq!(sizes.records_of(&(1..2)).unwrap(), 64..160);
    assert_eq!(sizes.strips_of(&(12_287..12_289)).unwrap(), 0..2);
    for bad in [0..0, 2..4, 3..4, 2..2] {
        assert!(matches!(sizes.elements_of(&bad), Err(Error::Parameter { .. })));
        assert!(matches!(
            sizes.bitstream_of(&good.arrays[RECORDS], &bad),
            Err(Error::Parameter { .. })
        ));
    }
    assert!(matches!(sizes.strips_of(&(24_959..24_961)), Err(Error::Parameter { .. })));
}

#[test]
fn the_code_is_a_good_one() {
    let weights = normal(1 << 22);
    let mut histogram = PairHistogram::default();
    histogram.add(&weights);
    assert_eq!(histogram.exponents(), Histogram::of(&weights));
    let bits = Codebook::from_histogram(&histogram).unwrap().expected_bits(&histogram).unwrap();
    let (bits, entropy) = (bits as f64 / f64::from(1 << 22), histogram.exponents().entropy());
    assert!(bits > entropy && bits < entropy + 0.028, "{bits} {entropy}");

    let mut parts = PairHistogram::default();
    for part in weights[..2 * 10_001].chunks(2 * 3_334) {
        let mut histogram = PairHistogram::default();
        histogram.add(part);
        parts.merge(&histogram);
    }
    assert_eq!(parts.exponents(), Histogram::of(&weights[..2 * 10_001]));
    assert!(matches!(
        Codebook::from_histogram(&PairHistogram::default()),
        Err(Error::Parameter { .. })
    ));
    assert_eq!(
        Codebook::from_bytes(&codebook_of(0, &[(1, 1)], &[7])).unwrap().expected_bits(&histogram),
        None
    );
}

#[test]
fn escapes_are_rare() {
    // One lane with an escape makes all 32 lanes of a GPU wait.
    let mut histogram = PairHistogram::default();
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
    let mut histogram = PairHistogram::default();
    histogram.add(&weights_of([100, 100, 101, 101, 102, 102], 1));
    let geometry = matrix(64, 256);
    let encoder = Encoder::new(&Codebook::from_histogram(&histogram).unwrap(), geometry);
    let few = Codebook::from_bytes(&codebook_of(0, &[(1, 1)], &[0x7575])).unwrap();
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

/// Errors say which array is wrong; which rule is checked when, the test vectors show.
#[test]
fn errors_name_the_array() {
    let good = encode_tensor(&normal(64 * 512), matrix(64, 512)).unwrap();
    let refused = |array: &str, damage: &dyn Fn(&mut EncodedTensor)| {
        let mut bad = good.clone();
        damage(&mut bad);
        assert_eq!(place(bad.decode(0..good.sizes.elements())), array);
        assert_eq!(place(verify(&bad, 1)), array);
        assert_eq!(place(verify(&bad, 2)), array);
    };
    refused("records", &|bad| bad.arrays[RECORDS][32] ^= 8);
    refused("records", &|bad| bad.arrays[RECORDS][128] ^= 8);
    // One bit from a lane to its neighbour.
    refused("bitstream", &|bad| {
        let four = u32::from_le_bytes(bad.arrays[RECORDS][8..12].try_into().unwrap());
        let four = if four & 63 < 63 && four >> 6 & 63 > 0 { four + 1 - 64 } else { four - 1 + 64 };
        bad.arrays[RECORDS][8..11].copy_from_slice(&four.to_le_bytes()[..3]);
    });
    let mut bad = good.clone();
    bad.arrays[RECORDS][32 * 3] ^= 8;
    // A tile that does not need the damaged record is decoded all the same.
    assert!(bad.decode(0..256).is_ok());
    assert_eq!(place(bad.decode(32 * 512..32 * 512 + 1)), "records");
    // This decodes, but must not verify.
    let mut bad = good.clone();
    assert_ne!(bad.sizes.bit_count() % 128, 0);
    *bad.arrays[BITSTREAM].last_mut().unwrap() |= 0x80;
    assert!(bad.decode(0..good.sizes.elements()).is_ok());
    assert_eq!(place(verify(&bad, 1)), "bitstream");
}

/// Weights of one strip and of several, in tiles that are whole and that are not.
fn strips() -> impl Iterator<Item = (Vec<u8>, TileGeometry)> {
    let geometries =
        [matrix(65, 384), matrix(200, 56), matrix(31, 8), vector(1), vector(8193), vector(40_001)];
    geometries.into_iter().map(|geometry| (normal(geometry.elements()), geometry))
}

#[test]
fn any_order_of_strips_gives_the_same_bytes() {
    for (weights, geometry) in strips() {
        let whole = encode_tensor(&weights, geometry).unwrap();
        let encoder =
            Encoder::new(&Codebook::from_bytes(&whole.arrays[CODEBOOK]).unwrap(), geometry);
        let strips: Vec<&[u8]> = weights.chunks(2 * geometry.strip_elements() as usize).collect();
        let mut places = vec![0];
        for (strip, weights) in strips.iter().enumerate() {
            places.push(places[strip] + encoder.strip_bytes(strip as u64, weights).unwrap());
        }
        assert_eq!(8 * places[strips.len()], whole.sizes.bit_count());
        let mut output = EncodedStrips::default();
        for strip in (0..strips.len()).rev() {
            output.clear();
            encoder.encode_strip(strip as u64, strips[strip], places[strip], &mut output).unwrap();
            let number = strip as u64..strip as u64 + 1;
            let records = whole.sizes.records_of(&number).unwrap();
            let plane = whole.sizes.elements_of(&number).unwrap();
            for (array, at, bytes) in [
                (RECORDS, records.start, &output.records),
                (BITSTREAM, places[strip], &output.bitstream),
                (PLANE, plane.start, &output.plane),
            ] {
                assert!(whole.arrays[array][at as usize..].starts_with(bytes));
            }
            let is_last = strip + 1 == strips.len();
            assert_eq!(output.plane.len() as u64, plane.end - plane.start);
            let more = if is_last { 0 } else { 32 };
            assert_eq!(output.records.len() as u64, records.end - records.start - more);
            assert!(is_last || output.bitstream.len() as u64 == places[strip + 1] - places[strip]);
        }
    }
}

/// A range decodes whatever of its strips it leaves out.
#[test]
fn any_range_is_decoded() {
    for (weights, geometry) in strips() {
        let tensor = encode_tensor(&weights, geometry).unwrap();
        let (count, row) = (geometry.elements(), geometry.columns());
        let ranges = [(0, 1), (count / 3, count / 2 + 1), (count - 1, count), (row / 2, 3 * row)];
        for (start, end) in ranges.map(|(start, end)| (start, end.min(count))) {
            let part = &weights[2 * start as usize..2 * end as usize];
            assert!(tensor.decode(start..end).unwrap() == part, "{geometry:?} {start}..{end}");
        }
    }
}
