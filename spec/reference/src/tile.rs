//! The tile encoding (6.4).

use std::collections::BTreeSet;

use crate::Kind::Corrupt;
use crate::record::{Field, item, slice};
use crate::{Error, Result};

const LANES: u64 = 32;
const RECORD_BYTES: u64 = 32;
const MAX_CODE_LENGTH: u16 = 12;
/// The value of the escape, after all those of pairs.
const ESCAPE: u32 = 1 << 16;

/// The tensor as a matrix, cut into tiles (*Tiles*).
struct Matrix {
    tile_columns: u64,
    columns: u64,
    rows: u64,
}

/// Neighbouring weights of one row, eight or fewer (*Units*).
struct Unit {
    lane: u64,
    element: u64,
    weights: u64,
}

impl Matrix {
    fn new(tile_columns: u64, columns: u64, elements: u64) -> Result<Self> {
        let right = match tile_columns {
            256 => columns > 0 && columns.is_multiple_of(8) && elements.is_multiple_of(columns),
            8192 => columns == elements,
            _ => return Err(Error { kind: Corrupt, message: "6.4: tile_columns" }),
        };
        Corrupt.unless(right, "6.4: columns")?;
        let matrix = Self { tile_columns, columns, rows: elements / columns };
        Corrupt.unless(matrix.tile_count() < 1 << 32, "6.4: tile_count")?;
        Ok(matrix)
    }

    fn tile_rows(&self) -> u64 {
        8192 / self.tile_columns
    }

    fn across(&self) -> u64 {
        self.columns.div_ceil(self.tile_columns)
    }

    fn tile_count(&self) -> u64 {
        self.across() * self.rows.div_ceil(self.tile_rows())
    }

    /// Row and column in its tile of unit `j` of a lane in a band.
    fn place(&self, band: u64, j: u64, lane: u64) -> (u64, u64) {
        if self.tile_columns == 256 {
            (8 * band + lane / 4, 32 * j + 8 * (lane % 4))
        } else {
            (0, 256 * j + 8 * lane)
        }
    }

    /// All units of a tile in the order of the plane (*Plane*); those of one lane are in the order
    /// of the lane.
    fn units(&self, tile: u64) -> Vec<Unit> {
        let (bands, js) = if self.tile_columns == 256 { (4, 8) } else { (1, 32) };
        let (first_row, first_column) =
            (self.tile_rows() * (tile / self.across()), self.tile_columns * (tile % self.across()));
        let twos = (0..bands).flat_map(|band| (0..js / 2).map(move |k| (band, k)));
        let units = twos.flat_map(|(band, k)| {
            (0..LANES).flat_map(move |l| [2 * k, 2 * k + 1].map(|j| (band, j, l)))
        });
        let unit = |(band, j, lane)| {
            let (row, column) = self.place(band, j, lane);
            let (row, column) = (first_row + row, first_column + column);
            let exists = row < self.rows && column < self.columns;
            let element = row * self.columns + column;
            exists.then(|| Unit { lane, element, weights: (self.columns - column).min(8) })
        };
        units.filter_map(unit).collect()
    }
}

/// The lengths that a tensor's arrays must have (6.4), given that of its codebook.
pub(crate) fn array_lengths(
    codebook: u64,
    elements: u64,
    parameters: [u64; 3],
) -> Result<[u64; 4]> {
    let [tile_columns, columns, bit_count] = parameters;
    // The plane is no longer than the file, hence far below this.
    Corrupt.unless((1..1 << 59).contains(&elements), "6.4: elements")?;
    let matrix = Matrix::new(tile_columns, columns, elements)?;
    let bits = elements.div_ceil(2)..1 << 48;
    Corrupt.unless(bits.contains(&bit_count) && bit_count.is_multiple_of(8), "6.4: bit_count")?;
    let pairs = codebook.saturating_sub(26) / 2;
    Corrupt.unless(pairs <= 4096 && codebook == 26 + 2 * pairs, "6.4: length of codebook")?;
    let records = RECORD_BYTES * (matrix.tile_count() + 1);
    Ok([codebook, records, 16 * bit_count.div_ceil(128), elements])
}

/// The codes as a binary tree: the root is node 1, bit `b` leads from node `n` to node `2n + b`. A
/// leaf holds the value of a pair, or `ESCAPE`.
type Tree = Vec<Option<u32>>;

/// The tree of a codebook (*Code*).
fn tree(mut codebook: &[u8]) -> Result<Tree> {
    let escape = u16::read(&mut codebook)?;
    Corrupt.unless(escape <= MAX_CODE_LENGTH, "6.4: length of the escape")?;
    let mut codes = Vec::new();
    for (length, count) in (1..).zip(<[u16; 12]>::read(&mut codebook)?) {
        for _ in 0..count {
            codes.push((length, u32::from(u16::read(&mut codebook)?)));
        }
    }
    Corrupt.unless(codebook.is_empty(), "6.4: the codebook has more values than codes")?;
    Corrupt.unless(codes.is_sorted_by(|a, b| a < b), "6.4: order of the codebook")?;
    let values: BTreeSet<u32> = codes.iter().map(|code| code.1).collect();
    Corrupt.unless(values.len() == codes.len(), "6.4: a pair occurs twice in the codebook")?;
    codes.extend((escape > 0).then_some((escape, ESCAPE)));
    codes.sort_unstable();
    let sum: u32 = codes.iter().map(|&(length, _)| 1 << (MAX_CODE_LENGTH - length)).sum();
    let single = codes.len() == 1 && codes[0].0 == 1;
    Corrupt
        .unless(sum == 1 << MAX_CODE_LENGTH || single, "6.4: the lengths make no complete code")?;
    let mut nodes = vec![None; 2 << MAX_CODE_LENGTH];
    let (mut next, mut before) = (0, 0);
    for (length, value) in codes {
        next <<= length - before;
        nodes[1 << length | next] = Some(value);
        (next, before) = (next + 1, length);
    }
    Ok(nodes)
}

/// A bit (*Bit order*).
fn bit(bytes: &[u8], position: u64) -> Result<u64> {
    Ok(u64::from(item(bytes, position / 8)? >> (position % 8) & 1))
}

/// A number of `count` bits that begins with its least significant one.
fn number(bytes: &[u8], position: u64, count: u64) -> Result<u64> {
    (0..count).try_fold(0, |number, i| Ok(number | bit(bytes, position + i)? << i))
}

/// Reads the value of a pair, bit by bit, and moves `position` past it.
fn pair(nodes: &Tree, bitstream: &[u8], position: &mut u64) -> Result<u32> {
    let mut node = 1;
    for _ in 0..MAX_CODE_LENGTH {
        node = 2 * node + bit(bitstream, *position)?;
        *position += 1;
        match *item(nodes, node)? {
            None => {}
            Some(ESCAPE) => {
                *position += 16;
                return Ok(number(bitstream, *position - 16, 16)? as u32);
            }
            Some(value) => return Ok(value),
        }
    }
    Err(Error { kind: Corrupt, message: "6.4: no code matches" })
}

/// What a tile's record says, and the next one's offset (*Records*).
struct Record {
    offset: u64,
    shift: u64,
    lengths: [u64; LANES as usize],
}

impl Record {
    fn read(bytes: &[u8]) -> Result<Self> {
        let [offset, least, shift] =
            [(0, 48), (48, 13), (61, 3)].map(|(at, count)| number(bytes, at, count));
        let (least, shift) = (least?, shift?);
        let mut lengths = [0; LANES as usize];
        for (lane, length) in (0..).zip(&mut lengths) {
            *length = least + (number(bytes, 64 + 6 * lane, 6)? << shift);
        }
        Ok(Self { offset: offset?, shift, lengths })
    }
}

/// Decodes a tensor: `arrays` and `parameters` are those of section 6, in its order; the plane has
/// a byte for each element. Returns the weights, little-endian.
///
/// # Errors
/// Corrupt where a rule of *Decoding* is broken, or a parameter or the length of an array is wrong.
pub fn decode_tile(arrays: [&[u8]; 4], parameters: [u64; 3]) -> Result<Vec<u8>> {
    let [codebook, records, bitstream, plane] = arrays;
    let [tile_columns, columns, bit_count] = parameters;
    let lengths = array_lengths(codebook.len() as u64, plane.len() as u64, parameters)?;
    Corrupt.unless(arrays.map(|array| array.len() as u64) == lengths, "6.4: length of an array")?;
    let matrix = Matrix::new(tile_columns, columns, plane.len() as u64)?;
    let nodes = tree(codebook)?;
    let mut weights = vec![0; 2 * plane.len()];
    let (mut start, mut plane_start) = (0, 0);
    for tile in 0..matrix.tile_count() {
        let record = Record::read(slice(records, RECORD_BYTES * tile, RECORD_BYTES)?)?;
        // The offsets are multiples of 8 that ascend, since these sums are.
        Corrupt.unless(
            record.offset == start,
            "6.4: a tile does not start where the one before ends",
        )?;
        let units = matrix.units(tile);
        let tile_weights: u64 = units.iter().map(|unit| unit.weights).sum();
        let exponents = tile_exponents(&units, &record, &nodes, bitstream)?;
        let signs_mantissas = slice(plane, plane_start, tile_weights)?;
        put_weights(&units, &exponents, signs_mantissas, &mut weights);
        plane_start += tile_weights;
        start = (start + record.lengths.iter().sum::<u64>()).next_multiple_of(8);
    }
    let last = slice(records, RECORD_BYTES * matrix.tile_count(), RECORD_BYTES)?;
    Corrupt.unless(start == bit_count, "6.4: the last tile does not end at bit_count")?;
    Corrupt.unless(number(last, 0, 48)? == bit_count, "6.4: the last offset is not bit_count")?;
    let zeros = number(last, 48, 16)? == 0 && last[8..].iter().all(|&byte| byte == 0);
    Corrupt.unless(zeros, "6.4: the last record has more than an offset")?;
    Ok(weights)
}

/// The exponents of each unit of a tile.
fn tile_exponents(
    units: &[Unit],
    record: &Record,
    nodes: &Tree,
    bitstream: &[u8],
) -> Result<Vec<[u8; 8]>> {
    let mut exponents = vec![[0; 8]; units.len()];
    let mut end = record.offset;
    for (lane, length) in (0..).zip(record.lengths) {
        let mut position = end;
        end += length;
        for (unit, exponents) in
            units.iter().zip(&mut exponents).filter(|(unit, _)| unit.lane == lane)
        {
            for two in exponents.chunks_exact_mut(2).take(unit.weights.div_ceil(2) as usize) {
                let value = pair(nodes, bitstream, &mut position)?;
                two.copy_from_slice(&(value as u16).to_le_bytes());
            }
            let weights = unit.weights as usize;
            let twice = weights.is_multiple_of(2) || exponents[weights - 1] == exponents[weights];
            Corrupt.unless(twice, "6.4: the last pair of an odd unit has two exponents")?;
        }
        let rest = end.checked_sub(position);
        let right = rest.is_some_and(|rest| rest < 1 << record.shift);
        Corrupt.unless(right, "6.4: a lane is too short or too long")?;
    }
    Ok(exponents)
}

/// Puts the weights of a tile to their elements.
fn put_weights(units: &[Unit], exponents: &[[u8; 8]], signs_mantissas: &[u8], weights: &mut [u8]) {
    let mut signs_mantissas = signs_mantissas.iter();
    for (unit, exponents) in units.iter().zip(exponents) {
        for ((&exponent, element), &byte) in
            exponents[..unit.weights as usize].iter().zip(unit.element..).zip(&mut signs_mantissas)
        {
            let weight =
                u16::from(byte & 0x80) << 8 | u16::from(exponent) << 7 | u16::from(byte & 0x7F);
            let at = 2 * element as usize;
            weights[at..at + 2].copy_from_slice(&weight.to_le_bytes());
        }
    }
}
