//! The gap encoding, and the pure functions under it.

mod common;

use common::{bytes, codes, encode, ladder, lengths};
use df11_reference::{Kind, canonical_codes, crc32, decode_gap, luts};

fn decode(arrays: &[Vec<u8>; 5], parameters: [u64; 3]) -> df11_reference::Result<Vec<u8>> {
    decode_gap(arrays.each_ref().map(Vec::as_slice), parameters)
}

fn check(weights: &[u16], lengths: &[u8; 256], t: u64, b: u64) {
    let (arrays, parameters) = encode(weights, lengths, t, b);
    assert_eq!(decode(&arrays, parameters).unwrap(), bytes(weights), "T {t}, B {b}");
}

/// Weights with the exponents of a code, in an order without a pattern.
fn sample(lengths: &[u8; 256], count: usize) -> Vec<u16> {
    let used: Vec<u16> = (0..256).filter(|&e| lengths[usize::from(e)] > 0).collect();
    let mut state = 1u64;
    let weight = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        used[(state >> 40) as usize % used.len()] << 7 | (state >> 32) as u16 & 0x807F
    };
    (0..count).map(weight).collect()
}

/// The most LUTs that a code can have: 127 pairs of codes of 9 bits.
fn most_luts() -> [u8; 256] {
    lengths((0..=255).map(|exponent| {
        (
            exponent,
            if exponent == 7 {
                1
            } else if exponent == 9 {
                8
            } else {
                9
            },
        )
    }))
}

#[test]
fn crc_has_its_check_value() {
    assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    assert_eq!(crc32(b""), 0);
}

#[test]
fn codes_are_those_of_rfc_1951() {
    // The example of section 3.2.2 there.
    let example = lengths([(10, 3), (11, 3), (12, 3), (13, 3), (14, 3), (15, 2), (16, 4), (17, 4)]);
    let expected = [0b010, 0b011, 0b100, 0b101, 0b110, 0b00, 0b1110, 0b1111];
    assert_eq!(canonical_codes(&example).unwrap()[10..18], expected);
    for lengths in [ladder(), most_luts(), [8; 256], lengths([(200, 1)])] {
        let number =
            |code: &Vec<bool>| code.iter().fold(0, |number, &bit| number << 1 | u16::from(bit));
        let expected: Vec<u16> = codes(&lengths).iter().map(number).collect();
        assert_eq!(canonical_codes(&lengths).unwrap().to_vec(), expected);
    }
}

#[test]
fn lengths_that_make_no_code_are_corrupt() {
    let bad = [
        [0; 256],
        [1; 256],
        [255; 256],
        [7; 256],
        [9; 256],
        lengths([(3, 2)]),
        lengths([(3, 16)]),
        lengths([(3, 1), (4, 2)]),
        lengths((0..17).map(|i| (i, i + 1))),
        lengths([(0, 1), (1, 1), (2, 16)]),
    ];
    for lengths in bad {
        assert_eq!(canonical_codes(&lengths).unwrap_err().kind, Kind::Corrupt);
        assert!(luts(&lengths).is_empty());
    }
}

#[test]
fn luts_follow_from_the_lengths() {
    for lengths in
        [ladder(), most_luts(), [8; 256], lengths([(200, 1)]), lengths([(0, 1), (255, 1)])]
    {
        assert_eq!(luts(&lengths), common::luts(&lengths));
    }
    assert_eq!(luts(&most_luts()).len(), 128 * 512);
}

#[test]
fn a_tensor_made_by_hand() {
    // Codes: 127 is 0, 125 is 10, 126 is 11. Bits in stream order: 0 10 11, hence the byte 0b11010.
    let lengths = lengths([(127, 1), (125, 2), (126, 2)]);
    let codebook = [&lengths[..], &common::luts(&lengths)].concat();
    let stream = vec![0b11010, 0, 0, 0, 0, 0, 0, 0];
    let offsets = [0u64, 3].into_iter().flat_map(u64::to_le_bytes).collect();
    let arrays = [codebook, vec![0], offsets, stream, vec![0x00, 0xC0, 0x7F]];
    // 1.0, -0.375 (sign, mantissa 1.5, exponent -2), and the largest below 1.0.
    assert_eq!(decode(&arrays, [8, 64, 5]).unwrap(), bytes(&[0x3F80, 0xBEC0, 0x3F7F]));
}

#[test]
fn all_patterns_come_back() {
    let weights: Vec<u16> = (0..=u16::MAX).collect();
    for lengths in [[8; 256], most_luts()] {
        for (t, b) in [(8, 64), (16, 128), (32, 256), (64, 512), (64, 1024)] {
            check(&weights, &lengths, t, b);
        }
    }
}

#[test]
fn a_single_exponent_comes_back() {
    let single = lengths([(127, 1)]);
    // Around a byte, a thread, a thread block.
    for count in [1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 9000] {
        check(&sample(&single, count), &single, 8, 64);
    }
    let (mut arrays, parameters) = encode(&sample(&single, 9), &single, 8, 64);
    arrays[3][1] |= 1;
    assert_eq!(decode(&arrays, parameters).unwrap_err().message, "6.3: no code matches");
}

#[test]
fn last_threads_come_back_whole_or_not() {
    // Codes of 16 bits cross the borders of threads by up to 15 bits; counts end everywhere in a
    // thread.
    for lengths in [ladder(), lengths([(0, 1), (255, 1)]), [8; 256]] {
        (1..200).for_each(|count| check(&sample(&lengths, count), &lengths, 8, 64));
        (2000..2010).for_each(|count| check(&sample(&lengths, count), &lengths, 8, 64));
    }
    let longest: Vec<u16> =
        (0..2000).map(|i| if i % 65 == 0 { 120 << 7 } else { 136 << 7 }).collect();
    check(&longest, &ladder(), 8, 64);
    let (arrays, _) = encode(&longest, &ladder(), 8, 64);
    assert!(arrays[1].iter().any(|gaps| gaps >> 4 == 15), "the largest gap occurs");
}

#[test]
fn a_thread_block_without_elements_comes_back() {
    // The last code starts one bit before the second thread block and ends in it.
    let mut weights = vec![120u16 << 7; 8 * 8 * 64 - 1];
    weights.push(136 << 7);
    check(&weights, &ladder(), 8, 64);
    let (arrays, _) = encode(&weights, &ladder(), 8, 64);
    assert_eq!(arrays[2].len(), 24);
    assert_eq!(arrays[2][8..16], arrays[2][16..24]);
}

/// Every flipped bit of every array: an error, or a tensor of the same length.
#[test]
fn flipped_bits_never_panic() {
    let weights = sample(&ladder(), 1200);
    let (arrays, parameters) = encode(&weights, &ladder(), 8, 64);
    for (array, length) in arrays.iter().map(Vec::len).enumerate() {
        for bit in (0..8 * length).filter(|bit| array < 3 || bit % 7 == 0) {
            let mut flipped = arrays.clone();
            flipped[array][bit / 8] ^= 1 << (bit % 8);
            let decoded = decode(&flipped, parameters);
            assert!(decoded.as_ref().map_or(true, |bytes| bytes.len() == 2400));
            assert!(
                array > 0 || bit < 2048 || decoded.unwrap() == bytes(&weights),
                "LUTs are not used"
            );
        }
    }
}

#[test]
fn parameters_out_of_range_never_panic() {
    let (arrays, [t, b, bit_count]) = encode(&sample(&ladder(), 500), &ladder(), 8, 64);
    let odd = [0, 1, 7, 9, 63, 128, 1 << 32, 1 << 61, 1 << 63, u64::MAX - 7, u64::MAX];
    for value in odd {
        for parameters in [[value, b, bit_count], [t, value, bit_count], [t, b, value], [value; 3]]
        {
            decode(&arrays, parameters).unwrap_err();
        }
    }
    for array in 0..5 {
        for longer in [false, true] {
            let mut arrays = arrays.clone();
            let length = if longer { arrays[array].len() + 1 } else { arrays[array].len() - 1 };
            arrays[array].resize(length, 0);
            assert_eq!(decode(&arrays, [t, b, bit_count]).unwrap_err().kind, Kind::Corrupt);
        }
    }
}

#[test]
fn decoding_checks_what_it_must() {
    let weights = sample(&[8; 256], 2000);
    let (arrays, parameters) = encode(&weights, &[8; 256], 8, 64);
    let message = |array: usize, at: usize, byte: u8| {
        let mut arrays = arrays.clone();
        arrays[array][at] = byte;
        decode(&arrays, parameters).unwrap_err().message
    };
    assert!(message(1, 0, 1).contains("gap(0)"));
    assert!(message(1, 32, 1).contains("next one starts"));
    assert!(message(2, 0, 1).contains("start at 0"));
    assert!(message(2, 8, 1).contains("next one starts"));
    assert!(message(2, 15, 1).contains("leads outside"));
    assert!(message(2, 16, 255).contains("next one starts"));
    assert!(message(2, 17, 0).contains("descend"));
    assert!(message(2, 32, 0xCF).contains("next one starts"));
    assert!(message(0, 0, 9).contains("complete code"));
}
