//! The tile encoding (section 6.4) written anew, from weights to arrays: slow, bit by bit, with any codebook.
//!
//! Its rules leave one way to code weights with a codebook, so a tensor is valid if and only if it decodes, and its weights, coded
//! again, are its arrays.

use std::collections::HashMap;

const LANES: u64 = 32;
/// The value of the escape, behind those of all pairs.
const ESCAPE: u32 = 1 << 16;

/// Records, bitstream and plane.
#[derive(Debug, PartialEq, Eq)]
pub struct Coded {
    /// 32 bytes a tile, and 32 more.
    pub records: Vec<u8>,
    /// The bits of all tiles.
    pub bitstream: Vec<u8>,
    /// One byte a weight.
    pub plane: Vec<u8>,
    /// The bits of all tiles, their number.
    pub bit_count: u64,
}

/// Bits in the order of a file.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    count: u64,
}

impl Bits {
    fn push(&mut self, bit: bool) {
        if self.count.is_multiple_of(8) {
            self.bytes.push(0);
        }
        let last = self.bytes.len() - 1;
        self.bytes[last] |= u8::from(bit) << (self.count % 8);
        self.count += 1;
    }

    /// A number, from its least significant bit on.
    fn number(&mut self, value: u64, bits: u32) {
        (0..bits).for_each(|bit| self.push(value >> bit & 1 == 1));
    }

    fn zeros_to(&mut self, count: u64) {
        while self.count < count {
            self.push(false);
        }
    }
}

/// The codes of a codebook whose rules have been checked: for each value the length and the code, the first bit highest.
fn codes(codebook: &[u8]) -> HashMap<u32, (u32, u32)> {
    let words: Vec<u32> =
        codebook.chunks_exact(2).map(|two| u32::from(u16::from_le_bytes([two[0], two[1]]))).collect();
    let (head, mut values) = words.split_at(13);
    let (mut codes, mut next) = (HashMap::new(), 0);
    for length in 1..=12 {
        next *= 2;
        let (these, rest) = values.split_at(head[length as usize] as usize);
        let escape = (head[0] == length).then_some(ESCAPE);
        for value in these.iter().copied().chain(escape) {
            codes.insert(value, (length, next));
            next += 1;
        }
        values = rest;
    }
    codes
}

/// The weights of a unit: band, `j`, and first and last element and one.
type Unit = (u64, u64, u64, u64);

/// The units of a lane, in its order.
fn units(tile_columns: u64, columns: u64, rows: u64, tile: u64, lane: u64) -> Vec<Unit> {
    let across = columns.div_ceil(tile_columns);
    let (first_row, first_column) = (8192 / tile_columns * (tile / across), tile_columns * (tile % across));
    let mut units = Vec::new();
    for b in 0..if tile_columns == 256 { 4 } else { 1 } {
        for j in 0..if tile_columns == 256 { 8 } else { 32 } {
            let (row, column) = if tile_columns == 256 {
                (first_row + 8 * b + lane / 4, first_column + 32 * j + 8 * (lane % 4))
            } else {
                (0, first_column + 256 * j + 8 * lane)
            };
            if row < rows && column < columns {
                let first = row * columns + column;
                units.push((b, j, first, first + (columns - column).min(8)));
            }
        }
    }
    units
}

/// Codes weights (little-endian) with a codebook that has a code for each pair, or an escape.
///
/// `tile_columns` and `columns` are those of a valid tensor. Also escapes the pairs with a code that `escaped` names by their
/// number in the order of the bitstream, which makes the result one that decodes and does not verify.
pub fn encode(
    weights: &[u8],
    codebook: &[u8],
    [tile_columns, columns]: [u64; 2],
    escaped: impl Fn(u64) -> bool,
) -> Coded {
    let codes = codes(codebook);
    let exponent = |element: u64| {
        let weight = &weights[2 * element as usize..][..2];
        u32::from(weight[1] << 1 | weight[0] >> 7)
    };
    let sign_mantissa = |element: u64| {
        let weight = &weights[2 * element as usize..][..2];
        weight[1] & 0x80 | weight[0] & 0x7F
    };
    let rows = weights.len() as u64 / 2 / columns;
    let tiles = columns.div_ceil(tile_columns) * rows.div_ceil(8192 / tile_columns);
    let (mut records, mut bitstream, mut plane, mut pairs) =
        (Bits::default(), Bits::default(), Vec::new(), 0);
    for tile in 0..tiles {
        let lanes: Vec<_> = (0..LANES).map(|lane| units(tile_columns, columns, rows, tile, lane)).collect();
        let lane_bits = |units: &Vec<Unit>| {
            let mut bits = Bits::default();
            for &(_, _, first, end) in units {
                for element in (first..end).step_by(2) {
                    let value = exponent(element) + 256 * exponent((element + 1).min(end - 1));
                    let own = codes.get(&value).filter(|_| !escaped(pairs));
                    let &(length, code) = own.unwrap_or_else(|| &codes[&ESCAPE]);
                    (0..length).rev().for_each(|bit| bits.push(code >> bit & 1 == 1));
                    if own.is_none() {
                        bits.number(value.into(), 16);
                    }
                    pairs += 1;
                }
            }
            bits
        };
        let coded: Vec<Bits> = lanes.iter().map(lane_bits).collect();
        let least = coded.iter().map(|lane| lane.count).min().expect("32 lanes");
        let excess = |lane: &Bits, shift: u32| (lane.count - least).div_ceil(1 << shift);
        let shift =
            (0..).find(|&shift| coded.iter().all(|lane| excess(lane, shift) <= 63)).expect("a large one");
        records.number(bitstream.count, 48);
        records.number(least, 13);
        records.number(shift.into(), 3);
        for lane in &coded {
            records.number(excess(lane, shift), 6);
            let end = bitstream.count + least + (excess(lane, shift) << shift);
            (0..lane.count)
                .for_each(|bit| bitstream.push(lane.bytes[(bit / 8) as usize] >> (bit % 8) & 1 == 1));
            bitstream.zeros_to(end);
        }
        bitstream.zeros_to(bitstream.count.next_multiple_of(8));
        for (b, k) in (0..4).flat_map(|b| (0..16).map(move |k| (b, k))) {
            for units in &lanes {
                for &(_, _, first, end) in units.iter().filter(|unit| (unit.0, unit.1 / 2) == (b, k)) {
                    plane.extend((first..end).map(sign_mantissa));
                }
            }
        }
    }
    let bit_count = bitstream.count;
    records.number(bit_count, 48);
    records.zeros_to(256 * (tiles + 1));
    bitstream.zeros_to(bit_count.next_multiple_of(128));
    Coded { records: records.bytes, bitstream: bitstream.bytes, plane, bit_count }
}
