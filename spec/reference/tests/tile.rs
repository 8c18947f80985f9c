//! The tile encoding, where no container is needed. Whole containers are proven by spec/vectors and
//! tests/hostile.rs, arrays of all kinds by tests/codec.rs.

use df11_reference::{Kind, decode_tile};

fn little_endian(words: &[u16]) -> Vec<u8> {
    words.iter().copied().flat_map(u16::to_le_bytes).collect()
}

/// 17 weights: two units of lanes 0 and 1, and one weight in lane 2.
fn weights() -> Vec<u16> {
    let second = [0x3F00, 0x3F80, 0x3F80, 0x3F80, 0xBEFF, 0x0001, 0x3F80, 0xBF81];
    [&[0x3F80; 8], &second[..], &[0x3F81]].concat()
}

/// The four arrays of the weights, and the parameters.
fn by_hand() -> ([Vec<u8>; 4], [u64; 3]) {
    let codebook = little_endian(&[1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x7F7E, 0x7F7F]);
    // Codes by length, then value: the escape is 0; 0x7F7E is 10, 0x7F7F is 11. Lane 0: 11 11 11
    // 11. Lane 1: 10 11 0 and 0x007D, the lowest bit first (125, 0), 11. Lane 2: 11. Others: none.
    let lanes = ["11111111", "10110101111100000000011", "11"];
    // All other lanes have no bits: least is 0, shift 0, and the excesses are the lengths.
    let mut records = vec![0; 64];
    for (lane, bits) in lanes.iter().enumerate() {
        for bit in 0..6 {
            let at = 64 + 6 * lane + bit;
            records[at / 8] |= ((bits.len() >> bit & 1) as u8) << (at % 8);
        }
    }
    records[32] = 40; // 33 bits are 5 bytes
    let mut bitstream = vec![0; 16];
    for (at, bit) in lanes.concat().bytes().enumerate() {
        bitstream[at / 8] |= (bit - b'0') << (at % 8);
    }
    let plane = weights().iter().map(|word| (word >> 8 & 0x80 | word & 0x7F) as u8).collect();
    ([codebook, records, bitstream, plane], [8192, 17, 40])
}

fn decode(arrays: &[Vec<u8>; 4], parameters: [u64; 3]) -> df11_reference::Result<Vec<u8>> {
    decode_tile(arrays.each_ref().map(Vec::as_slice), parameters)
}

#[test]
fn a_tensor_made_by_hand() {
    let (arrays, parameters) = by_hand();
    assert_eq!(decode(&arrays, parameters).unwrap(), little_endian(&weights()));
}

#[test]
fn parameters_and_lengths_are_checked() {
    let (arrays, parameters) = by_hand();
    for value in [0, 1, 7, 9, 25, 1 << 32, 1 << 48, 1 << 61, u64::MAX - 7, u64::MAX] {
        for at in 0..3 {
            let mut parameters = parameters;
            parameters[at] = value;
            decode(&arrays, parameters).unwrap_err();
        }
    }
    for array in 0..4 {
        for longer in [false, true] {
            let mut arrays = arrays.clone();
            let length = if longer { arrays[array].len() + 1 } else { arrays[array].len() - 1 };
            arrays[array].resize(length, 0);
            assert_eq!(decode(&arrays, parameters).unwrap_err().kind, Kind::Corrupt);
        }
    }
}
