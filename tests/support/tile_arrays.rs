//! Encodes the arrays of `tile` and `float` bit by bit, from sections 6.4 and 6.5 of the
//! specification alone: what the test vectors are made with. Each step can be edited before the
//! next, so that a test breaks one rule.
//!
//! weights → [`Tile`]s of pairs → with a [`Codebook`], [`Bits`] of each tile → [`Arrays`]
#![allow(dead_code, unreachable_pub, reason = "each user needs another part")]

use std::collections::{BTreeMap, BTreeSet};

pub const LANES: usize = 32;
const MAX_CODE_LENGTH: u16 = 12;
const ESCAPE: u32 = 1 << 16;

/// How a pair is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pair {
    /// The code, or the escape and the value if the pair has no code.
    Coded(u16),
    /// After the escape in any case.
    Escaped(u16),
}

impl Pair {
    pub fn value(self) -> u16 {
        match self {
            Self::Coded(value) | Self::Escaped(value) => value,
        }
    }
}

/// A tile before it is coded.
#[derive(Clone, Debug)]
pub struct Tile {
    pub lanes: [Vec<Pair>; LANES],
    pub plane: Vec<u8>,
}

/// How a float is split (6.5).
#[derive(Clone, Copy, Debug)]
pub struct Split {
    pub bits: u32,
    pub exponent: u32,
    pub zero_bits: u32,
}

impl Split {
    pub const BF16: Self = Self { bits: 16, exponent: 8, zero_bits: 0 };

    /// The split of a dtype, by its id.
    pub fn of(dtype: u32, zero_bits: u64) -> Self {
        let (bits, exponent) = match dtype {
            7 => (8, 5),
            8 => (8, 4),
            14 => (16, 5),
            15 => (16, 8),
            18 => (32, 8),
            other => panic!("dtype {other} is not coded"),
        };
        Self { bits, exponent, zero_bits: zero_bits as u32 }
    }

    fn exponent(self, weight: u32) -> u16 {
        (weight >> (self.bits - 1 - self.exponent)) as u16 & ((1 << self.exponent) - 1)
    }

    /// The kept bits of a unit's weights, whole bytes.
    fn plane(self, unit: &[u32]) -> Vec<u8> {
        let mantissa = self.bits - 1 - self.exponent;
        let kept = |&weight: &u32| {
            let stored = (self.zero_bits..mantissa).chain([self.bits - 1]);
            stored.map(move |bit| weight >> bit & 1 == 1)
        };
        bytes(&unit.iter().flat_map(kept).collect::<Vec<bool>>())
    }
}

/// Cuts BF16 weights, as bytes, into tiles (*Tiles*, *Units*, *Pairs*, *Plane*).
pub fn tiles(weights: &[u8], tile_columns: usize, columns: usize) -> Vec<Tile> {
    tiles_of(weights, Split::BF16, tile_columns, columns)
}

/// Cuts floats, as bytes, into tiles.
pub fn tiles_of(weights: &[u8], split: Split, tile_columns: usize, columns: usize) -> Vec<Tile> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
    let weights: Vec<u32> = weights.chunks_exact(split.bits as usize / 8).map(word).collect();
    let (rows, tile_rows) = (weights.len() / columns, 8192 / tile_columns);
    let mut tiles = Vec::new();
    for first_row in (0..rows).step_by(tile_rows) {
        for first_column in (0..columns).step_by(tile_columns) {
            let unit = |row: usize, column: usize| -> &[u32] {
                let (row, column) = (first_row + row, first_column + column);
                let inside = row < rows && column < columns;
                let end = (column + 8).min(columns);
                if inside { &weights[row * columns + column..row * columns + end] } else { &[] }
            };
            tiles.push(tile(split, tile_columns, unit));
        }
    }
    tiles
}

/// The tile of which `unit` has the units, by row and column.
fn tile<'a>(split: Split, tile_columns: usize, unit: impl Fn(usize, usize) -> &'a [u32]) -> Tile {
    let mut tile = Tile { lanes: std::array::from_fn(|_| Vec::new()), plane: Vec::new() };
    let matrix = tile_columns == 256;
    let (bands, js) = if matrix { (4, 8) } else { (1, 32) };
    for band in 0..bands {
        for k in 0..js / 2 {
            for lane in 0..LANES {
                for j in [2 * k, 2 * k + 1] {
                    let unit = if matrix {
                        unit(8 * band + lane / 4, 32 * j + 8 * (lane % 4))
                    } else {
                        unit(0, 256 * j + 8 * lane)
                    };
                    let exponent = |weight: &u32| split.exponent(*weight);
                    for pair in unit.chunks(2) {
                        let second = pair.last().unwrap_or(&0);
                        tile.lanes[lane]
                            .push(Pair::Coded(exponent(&pair[0]) | exponent(second) << 8));
                    }
                    tile.plane.extend(split.plane(unit));
                }
            }
        }
    }
    tile
}

/// Which pairs have codes, and of which lengths.
#[derive(Clone, Debug)]
pub struct Codebook {
    /// 0: there is none.
    pub escape: u16,
    /// Length and value, as they are stored: in ascending order.
    pub pairs: Vec<(u16, u16)>,
}

impl Codebook {
    pub fn new(escape: u16, pairs: impl IntoIterator<Item = (u16, u16)>) -> Self {
        let mut pairs: Vec<(u16, u16)> = pairs.into_iter().collect();
        pairs.sort_unstable();
        Self { escape, pairs }
    }

    /// Reads an array whose rules have been checked.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let words: Vec<u16> =
            bytes.chunks_exact(2).map(|word| u16::from_le_bytes([word[0], word[1]])).collect();
        let (head, values) = words.split_at(1 + usize::from(MAX_CODE_LENGTH));
        let lengths = (1..=MAX_CODE_LENGTH).zip(&head[1..]);
        let lengths =
            lengths.flat_map(|(length, &count)| std::iter::repeat_n(length, count.into()));
        Self::new(head[0], lengths.zip(values.iter().copied()))
    }

    /// Codes for the pairs that occur at least `least` times, by package-merge; the others are
    /// escaped.
    pub fn of(tiles: &[Tile], least: u64) -> Self {
        let mut counts = BTreeMap::<u16, u64>::new();
        for pair in tiles.iter().flat_map(|tile| tile.lanes.iter().flatten()) {
            *counts.entry(pair.value()).or_default() += 1;
        }
        let (coded, rare): (Vec<_>, Vec<_>) =
            counts.into_iter().partition(|&(_, count)| count >= least);
        let mut symbols: Vec<(u64, u32)> =
            coded.into_iter().map(|(value, count)| (count, value.into())).collect();
        let escapes: u64 = rare.iter().map(|&(_, count)| count).sum();
        symbols.extend((escapes > 0).then_some((escapes, ESCAPE)));
        let lengths = code_lengths(&symbols);
        let escape = lengths.get(&ESCAPE).copied().unwrap_or(0);
        let pairs = lengths.into_iter().filter(|&(value, _)| value != ESCAPE);
        Self::new(escape, pairs.map(|(value, length)| (length, value as u16)))
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut words = vec![self.escape];
        words.extend((1..=MAX_CODE_LENGTH).map(|length| {
            self.pairs.iter().filter(|&&(of_pair, _)| of_pair == length).count() as u16
        }));
        words.extend(self.pairs.iter().map(|&(_, value)| value));
        words.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    /// The bits of each code, the first one first.
    fn codes(&self) -> BTreeMap<u32, Vec<bool>> {
        let escape = (self.escape > 0).then_some((self.escape, ESCAPE));
        let all = self.pairs.iter().map(|&(length, value)| (length, value.into())).chain(escape);
        let all: BTreeSet<(u16, u32)> = all.collect();
        // Each code is a number of twelve bits, of which the first ones count.
        let mut next = 0u32;
        let code = |(length, value): (u16, u32)| {
            let bits = (0..length).map(|i| next >> (MAX_CODE_LENGTH - 1 - i) & 1 == 1).collect();
            next += 1 << (MAX_CODE_LENGTH - length);
            (value, bits)
        };
        all.into_iter().map(code).collect()
    }
}

/// The bytes of a codebook with these numbers, right or wrong: how many pairs have each length, and
/// values.
pub fn codebook_of(escape: u16, counts: &[(usize, u16)], values: &[u16]) -> Vec<u8> {
    let mut words = vec![0; 1 + usize::from(MAX_CODE_LENGTH)];
    words[0] = escape;
    for &(length, count) in counts {
        words[length] = count;
    }
    words.extend(values);
    words.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Optimal lengths of at most twelve bits for symbols with their counts.
fn code_lengths(symbols: &[(u64, u32)]) -> BTreeMap<u32, u16> {
    if let [(_, only)] = symbols {
        return BTreeMap::from([(*only, 1)]);
    }
    let mut leaves: Vec<(u64, Vec<u32>)> =
        symbols.iter().map(|&(count, value)| (count, vec![value])).collect();
    leaves.sort();
    let mut packages: Vec<(u64, Vec<u32>)> = Vec::new();
    for _ in 0..MAX_CODE_LENGTH {
        let mut merged = [leaves.clone(), packages].concat();
        merged.sort();
        packages = merged
            .chunks_exact(2)
            .map(|two| (two[0].0 + two[1].0, [&two[0].1[..], &two[1].1[..]].concat()))
            .collect();
    }
    let mut lengths = BTreeMap::new();
    for value in packages.iter().take(symbols.len() - 1).flat_map(|(_, values)| values) {
        *lengths.entry(*value).or_default() += 1;
    }
    lengths
}

/// The bits of a tile, and its record except for the offset.
#[derive(Clone, Debug)]
pub struct Bits {
    pub lanes: [Vec<bool>; LANES],
    pub least: u64,
    pub shift: u32,
    pub excess: [u64; LANES],
    pub plane: Vec<u8>,
}

impl Bits {
    pub fn new(tile: &Tile, codebook: &Codebook) -> Self {
        let codes = codebook.codes();
        let escaped = |value: u16| {
            let bits = (0..16).map(move |bit| value >> bit & 1 == 1);
            codes[&ESCAPE].iter().copied().chain(bits).collect()
        };
        let bits = |pair: &Pair| -> Vec<bool> {
            match *pair {
                Pair::Coded(value) => {
                    codes.get(&value.into()).cloned().unwrap_or_else(|| escaped(value))
                }
                Pair::Escaped(value) => escaped(value),
            }
        };
        let lanes = tile.lanes.each_ref().map(|lane| lane.iter().flat_map(bits).collect());
        let mut new =
            Self { lanes, least: 0, shift: 0, excess: [0; LANES], plane: tile.plane.clone() };
        new.describe(0);
        new
    }

    /// Makes the record that a writer must, except for a `shift` of at least this.
    pub fn describe(&mut self, shift: u32) {
        let lengths = self.lanes.each_ref().map(|lane| lane.len() as u64);
        self.least = *lengths.iter().min().unwrap();
        let excess = |shift: u32| lengths.map(|length| (length - self.least).div_ceil(1 << shift));
        self.shift =
            (shift..8).find(|&shift| excess(shift).iter().all(|&excess| excess < 64)).unwrap();
        self.excess = excess(self.shift);
    }

    pub fn length(&self, lane: usize) -> u64 {
        self.least + (self.excess[lane] << self.shift)
    }

    /// All bits, those of each lane cut or filled to the length of the record.
    fn bits(&self) -> Vec<bool> {
        let mut bits = Vec::new();
        for (lane, stored) in self.lanes.iter().enumerate() {
            let end = bits.len() + self.length(lane) as usize;
            bits.extend(stored);
            bits.resize(end, false);
        }
        bits.resize(bits.len().next_multiple_of(8), false);
        bits
    }

    fn record(&self, offset: u64) -> Vec<u8> {
        let mut bits = Vec::new();
        let mut put =
            |value: u64, count: u32| bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
        put(offset, 48);
        put(self.least, 13);
        put(self.shift.into(), 3);
        self.excess.iter().for_each(|&excess| put(excess, 6));
        bytes(&bits)
    }
}

fn bytes(bits: &[bool]) -> Vec<u8> {
    bits.chunks(8)
        .map(|byte| byte.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit)))
        .collect()
}

/// The arrays and parameters of a tensor.
#[derive(Clone, Debug)]
pub struct Arrays {
    pub codebook: Vec<u8>,
    pub records: Vec<u8>,
    pub bitstream: Vec<u8>,
    pub plane: Vec<u8>,
    pub parameters: [u64; 3],
    /// The fourth parameter of `float`.
    pub zero_bits: u64,
}

impl Arrays {
    pub fn new(tile_columns: usize, columns: usize, codebook: &Codebook, tiles: &[Bits]) -> Self {
        let (mut bits, mut records, mut plane) = (Vec::new(), Vec::new(), Vec::new());
        for tile in tiles {
            records.extend(tile.record(bits.len() as u64));
            bits.extend(tile.bits());
            plane.extend(&tile.plane);
        }
        let bit_count = bits.len() as u64;
        records.extend(bit_count.to_le_bytes());
        records.extend([0; 24]);
        bits.resize(bits.len().next_multiple_of(128), false);
        Self {
            codebook: codebook.to_bytes(),
            records,
            bitstream: bytes(&bits),
            plane,
            parameters: [tile_columns as u64, columns as u64, bit_count],
            zero_bits: 0,
        }
    }

    /// Codes for the pairs that occur at least `least` times.
    pub fn of(weights: &[u8], tile_columns: usize, columns: usize, least: u64) -> Self {
        let tiles = tiles(weights, tile_columns, columns);
        Self::with(&tiles, tile_columns, columns, &Codebook::of(&tiles, least))
    }

    /// The same for floats.
    pub fn of_floats(
        weights: &[u8],
        split: Split,
        (tile_columns, columns): (usize, usize),
        least: u64,
    ) -> Self {
        let tiles = tiles_of(weights, split, tile_columns, columns);
        let arrays = Self::with(&tiles, tile_columns, columns, &Codebook::of(&tiles, least));
        Self { zero_bits: split.zero_bits.into(), ..arrays }
    }

    pub fn with(tiles: &[Tile], tile_columns: usize, columns: usize, codebook: &Codebook) -> Self {
        let bits: Vec<Bits> = tiles.iter().map(|tile| Bits::new(tile, codebook)).collect();
        Self::new(tile_columns, columns, codebook, &bits)
    }

    pub fn list(&self) -> [&[u8]; 4] {
        [&self.codebook, &self.records, &self.bitstream, &self.plane]
    }
}
