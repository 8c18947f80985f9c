//! The gap encoding and the pure functions under it, where no container is needed. Whole containers
//! are proven by spec/vectors and tests/hostile.rs, arrays of all kinds by tests/codec.rs.

use df11_reference::{Kind, canonical_codes, crc32, decode_gap, luts};

/// Code lengths from pairs of exponent and length.
fn lengths(pairs: impl IntoIterator<Item = (u8, u8)>) -> [u8; 256] {
    let mut lengths = [0; 256];
    pairs.into_iter().for_each(|(exponent, length)| lengths[usize::from(exponent)] = length);
    lengths
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
    let codes = canonical_codes(&example).unwrap();
    assert_eq!(codes[10..18], expected);
    assert!(codes[..10].iter().chain(&codes[18..]).all(|&code| code == 0), "do not occur");
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

/// Arrays and parameters of three weights.
fn by_hand() -> ([Vec<u8>; 5], [u64; 3]) {
    // Codes: 127 is 0, 125 is 10, 126 is 11. Bits in stream order: 0 10 11, hence the byte 0b11010.
    let lengths = lengths([(127, 1), (125, 2), (126, 2)]);
    // A code that starts with 0 is 127, one with 10 (bits are looked up from the lowest) is 125.
    let lut = [1 << 8 | 127, 2 << 8 | 125, 1 << 8 | 127, 2 << 8 | 126u16].map(u16::to_le_bytes);
    let codebook = [&lengths[..], &lut.concat().repeat(64)].concat();
    let bitstream = vec![0b11010, 0, 0, 0, 0, 0, 0, 0];
    let offsets = [0u64, 3].into_iter().flat_map(u64::to_le_bytes).collect();
    ([codebook, vec![0], offsets, bitstream, vec![0x00, 0xC0, 0x7F]], [8, 64, 5])
}

fn decode(arrays: &[Vec<u8>; 5], parameters: [u64; 3]) -> df11_reference::Result<Vec<u8>> {
    decode_gap(arrays.each_ref().map(Vec::as_slice), parameters)
}

#[test]
fn a_tensor_made_by_hand() {
    let (arrays, parameters) = by_hand();
    assert_eq!(arrays[0][256..], luts(arrays[0][..256].try_into().unwrap()));
    // 1.0, -0.375 (sign, mantissa 1.5, exponent -2), and the largest below 1.0.
    let expected = [0x3F80u16, 0xBEC0, 0x3F7F].into_iter().flat_map(u16::to_le_bytes);
    assert_eq!(decode(&arrays, parameters).unwrap(), expected.collect::<Vec<u8>>());
}

#[test]
fn parameters_out_of_range_never_panic() {
    let (arrays, [t, b, bit_count]) = by_hand();
    let odd = [0, 1, 7, 9, 63, 1 << 32, 1 << 61, 1 << 63, u64::MAX - 7, u64::MAX];
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
            let error = decode(&arrays, [t, b, bit_count]).unwrap_err();
            assert_eq!(error.kind, Kind::Corrupt);
        }
    }
}

/// 1024 weights in two thread blocks. Every code has eight bits, and that of exponent 0 is 0.
fn two_thread_blocks() -> [Vec<u8>; 5] {
    let codebook = [&[8; 256][..], &luts(&[8; 256])].concat();
    let offsets = [0u64, 512, 1024].into_iter().flat_map(u64::to_le_bytes).collect();
    [codebook, vec![0; 64], offsets, vec![0; 1024], vec![0; 1024]]
}

#[test]
fn thread_blocks_follow_each_other() {
    let good = two_thread_blocks();
    assert_eq!(decode(&good, [8, 64, 8192]).unwrap(), [0; 2048]);
    let late = "6.3: a thread block does not end where the next one starts";
    for (array, at, byte, rule) in [
        (1, 0, 1, "6.3: gap(0) is not 0"),
        (1, 32, 1, late),
        (2, 0, 1, "6.3: output offsets do not start at 0"),
        (2, 8, 1, late),
        (2, 15, 1, "an index, an offset or a count leads outside"),
        (2, 17, 1, "6.3: output offsets descend"),
        (2, 17, 3, late),
        (2, 17, 5, "an index, an offset or a count leads outside"),
    ] {
        let mut arrays = good.clone();
        arrays[array][at] = byte;
        let error = decode(&arrays, [8, 64, 8192]).unwrap_err();
        assert_eq!(error.message, rule, "array {array}, byte {at}");
    }
}
