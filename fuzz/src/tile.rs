//! The tile encoding (section 6.4) written anew, from weights to arrays: slow, bit by bit, with any codebook.
//!
//! Its rules leave one way to code weights with a codebook, so a tensor is valid if and only if it decodes, and its weights, coded
//! again, are its arrays.

use std::collections::HashMap;

const LANES: u64 = 32;
/// The value of the escape, after those of all pairs.
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

/// Neighbouring weights of one row: band, `j`, the first element and the one after the last.
type Unit = (u64, u64, u64, u64);

/// Weights, and how they are cut into tiles.
struct Matrix<'a> {
    weights: &'a [u8],
    tile_columns: u64,
    columns: u64,
    rows: u64,
}

impl Matrix<'_> {
    fn tiles(&self) -> u64 {
        self.columns.div_ceil(self.tile_columns) * self.rows.div_ceil(8192 / self.tile_columns)
    }

    /// The units of a lane, in its order.
    fn units(&self, tile: u64, lane: u64) -> Vec<Unit> {
        let narrow = self.tile_columns == 256;
        let across = self.columns.div_ceil(self.tile_columns);
        let (first_row, first_column) =
            (8192 / self.tile_columns * (tile / across), self.tile_columns * (tile % across));
        let mut units = Vec::new();
        for b in 0..if narrow { 4 } else { 1 } {
            for j in 0..if narrow { 8 } else { 32 } {
                let (row, column) = if narrow {
                    (8 * b + lane / 4, 32 * j + 8 * (lane % 4))
                } else {
                    (0, 256 * j + 8 * lane)
                };
                let (row, column) = (first_row + row, first_column + column);
                if row < self.rows && column < self.columns {
                    let first = row * self.columns + column;
                    units.push((b, j, first, first + (self.columns - column).min(8)));
                }
            }
        }
        units
    }

    fn exponent(&self, element: u64) -> u32 {
        let weight = &self.weights[2 * element as usize..][..2];
        u32::from(weight[1] << 1 | weight[0] >> 7)
    }

    fn sign_mantissa(&self, element: u64) -> u8 {
        let weight = &self.weights[2 * element as usize..][..2];
        weight[1] & 0x80 | weight[0] & 0x7F
    }

    /// The values of the pairs of a lane.
    fn pairs(&self, units: &[Unit]) -> Vec<u32> {
        let of_unit = |&(_, _, first, end): &Unit| {
            let second = move |element: u64| (element + 1).min(end - 1);
            (first..end).step_by(2).map(move |at| self.exponent(at) + 256 * self.exponent(second(at)))
        };
        units.iter().flat_map(of_unit).collect()
    }

    /// The plane of a tile, by the units of its lanes.
    fn plane(&self, lanes: &[Vec<Unit>]) -> Vec<u8> {
        let mut plane = Vec::new();
        for (b, k) in (0..4).flat_map(|b| (0..16).map(move |k| (b, k))) {
            for units in lanes {
                for &(_, _, first, end) in units.iter().filter(|unit| (unit.0, unit.1 / 2) == (b, k)) {
                    plane.extend((first..end).map(|element| self.sign_mantissa(element)));
                }
            }
        }
        plane
    }
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
    let matrix = Matrix { weights, tile_columns, columns, rows: weights.len() as u64 / 2 / columns };
    let codes = codes(codebook);
    let mut number = 0;
    let mut bits_of = |units: &Vec<Unit>| {
        let mut bits = Bits::default();
        for value in matrix.pairs(units) {
            let own = codes.get(&value).filter(|_| !escaped(number));
            let &(length, code) = own.unwrap_or_else(|| &codes[&ESCAPE]);
            (0..length).rev().for_each(|bit| bits.push(code >> bit & 1 == 1));
            if own.is_none() {
                bits.number(value.into(), 16);
            }
            number += 1;
        }
        bits
    };
    let (mut records, mut bitstream, mut plane) = (Bits::default(), Bits::default(), Vec::new());
    for tile in 0..matrix.tiles() {
        let lanes: Vec<_> = (0..LANES).map(|lane| matrix.units(tile, lane)).collect();
        put_tile(&lanes.iter().map(&mut bits_of).collect::<Vec<_>>(), &mut records, &mut bitstream);
        plane.extend(matrix.plane(&lanes));
    }
    let bit_count = bitstream.count;
    records.number(bit_count, 48);
    records.zeros_to(256 * (matrix.tiles() + 1));
    bitstream.zeros_to(bit_count.next_multiple_of(128));
    Coded { records: records.bytes, bitstream: bitstream.bytes, plane, bit_count }
}

/// Puts the record of a tile and the bits of its lanes after those of the tiles before it.
fn put_tile(lanes: &[Bits], records: &mut Bits, bitstream: &mut Bits) {
    let least = lanes.iter().map(|lane| lane.count).min().expect("32 lanes");
    let excess = |lane: &Bits, shift: u32| (lane.count - least).div_ceil(1 << shift);
    let suits = |shift: &u32| lanes.iter().all(|lane| excess(lane, *shift) <= 63);
    let shift = (0..8).find(suits).expect("a lane has at most 3584 bits");
    records.number(bitstream.count, 48);
    records.number(least, 13);
    records.number(shift.into(), 3);
    for lane in lanes {
        records.number(excess(lane, shift), 6);
        let end = bitstream.count + least + (excess(lane, shift) << shift);
        (0..lane.count).for_each(|bit| bitstream.push(lane.bytes[(bit / 8) as usize] >> (bit % 8) & 1 == 1));
        bitstream.zeros_to(end);
    }
    bitstream.zeros_to(bitstream.count.next_multiple_of(8));
}
