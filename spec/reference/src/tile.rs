//! The tile encoding (6.4).

use std::collections::BTreeSet;

use crate::code::{Tree, number, symbol, tree, weight};
use crate::record::{Field, slice};
use crate::{Result, require};

const LANES: u64 = 32;
const RECORD_BYTES: u64 = 32;
/// The value of the escape, after all those of pairs.
const ESCAPE: u32 = 1 << 16;

/// The tensor as a matrix, cut into tiles (*Tiles*).
struct Matrix {
    tile_columns: u64,
    columns: u64,
    rows: u64,
    tile_rows: u64,
    across: u64,
    tile_count: u64,
}

/// Neighbouring weights of one row, eight or fewer (*Units*): their first element, and how many
/// weights come before in the order of the plane.
pub(crate) struct Unit {
    lane: u64,
    pub(crate) element: u64,
    pub(crate) plane: u64,
    weights: u64,
}

impl Matrix {
    fn new(tile_columns: u64, columns: u64, elements: u64) -> Result<Self> {
        let right = match tile_columns {
            256 => columns > 0 && columns.is_multiple_of(8) && elements.is_multiple_of(columns),
            8192 => columns == elements,
            _ => false,
        };
        require(right, "6.4: tile_columns or columns")?;
        let (rows, tile_rows) = (elements / columns, 8192 / tile_columns);
        let across = columns.div_ceil(tile_columns);
        let tile_count = across * rows.div_ceil(tile_rows);
        require(tile_count < 1 << 32, "6.4: tile_count")?;
        Ok(Self { tile_columns, columns, rows, tile_rows, across, tile_count })
    }

    /// All units of a tile in the order of the plane (*Plane*); those of one lane are in the order
    /// of the lane.
    fn units(&self, tile: u64) -> Vec<Unit> {
        let first_row = self.tile_rows * (tile / self.across);
        let first_column = self.tile_columns * (tile % self.across);
        let height = self.tile_rows.min(self.rows - first_row);
        let mut plane = first_row * self.columns + first_column * height;
        let mut units = Vec::new();
        for place in 0..1024 {
            // Two units of each lane, one after the other: `j` is 2 * twos, and one more.
            let (twos, lane, odd) = (place / 64, place / 2 % LANES, place % 2);
            let (row, column) = if self.tile_columns == 256 {
                (8 * (twos / 4) + lane / 4, 32 * (2 * (twos % 4) + odd) + 8 * (lane % 4))
            } else {
                (0, 256 * (2 * twos + odd) + 8 * lane)
            };
            let (row, column) = (first_row + row, first_column + column);
            if row < self.rows && column < self.columns {
                let weights = (self.columns - column).min(8);
                units.push(Unit { lane, element: row * self.columns + column, plane, weights });
                plane += weights;
            }
        }
        units
    }
}

/// The lengths that a tensor's arrays must have (6.4), given that of its codebook and the bits of
/// each weight in the plane.
pub(crate) fn array_lengths(
    codebook: u64,
    elements: u64,
    parameters: [u64; 3],
    kept: u64,
) -> Result<[u64; 4]> {
    let [tile_columns, columns, bit_count] = parameters;
    // The plane is no longer than the file, hence far below this.
    require((1..1 << 59).contains(&elements), "6.4: elements")?;
    let matrix = Matrix::new(tile_columns, columns, elements)?;
    let bits = elements.div_ceil(2)..1 << 48;
    require(bits.contains(&bit_count) && bit_count.is_multiple_of(8), "6.4: bit_count")?;
    let pairs = codebook.saturating_sub(26) / 2;
    require(pairs <= 4096 && codebook == 26 + 2 * pairs, "6.4: length of codebook")?;
    let records = RECORD_BYTES * (matrix.tile_count + 1);
    let plane = (elements * kept).div_ceil(8);
    Ok([codebook, records, 16 * bit_count.div_ceil(128), plane])
}

/// The tree of a codebook (*Code*).
fn tree_of(mut codebook: &[u8]) -> Result<Tree> {
    let escape = u16::read(&mut codebook)?;
    let mut codes = Vec::new();
    for (length, count) in (1..).zip(<[u16; 12]>::read(&mut codebook)?) {
        for _ in 0..count {
            codes.push((length, u32::from(u16::read(&mut codebook)?)));
        }
    }
    require(codebook.is_empty(), "6.4: the codebook has more values than codes")?;
    require(codes.is_sorted_by(|a, b| a < b), "6.4: order of the codebook")?;
    let values: BTreeSet<u32> = codes.iter().map(|code| code.1).collect();
    require(values.len() == codes.len(), "6.4: a pair occurs twice in the codebook")?;
    codes.extend((escape > 0).then_some((escape.into(), ESCAPE)));
    tree(codes, 12)
}

/// Reads the exponents of a pair, and moves `position` past it.
fn pair(tree: &Tree, bitstream: &[u8], position: &mut u64) -> Result<[u8; 2]> {
    let mut value = symbol(tree, bitstream, position)?;
    if value == ESCAPE {
        value = number(bitstream, *position, 16)? as u32;
        *position += 16;
    }
    Ok((value as u16).to_le_bytes())
}

/// Decodes a tensor: `arrays` and `parameters` are those of section 6, in its order; the plane has
/// a byte for each element. Returns the weights, little-endian.
///
/// # Errors
/// Corrupt where a rule of *Decoding* is broken, or a parameter or the length of an array is wrong.
pub fn decode_tile(arrays: [&[u8]; 4], parameters: [u64; 3]) -> Result<Vec<u8>> {
    let (codebook, plane) = (arrays[0].len() as u64, arrays[3]);
    let lengths = array_lengths(codebook, plane.len() as u64, parameters, 8)?;
    require(arrays.map(|array| array.len() as u64) == lengths, "6.4: length of an array")?;
    let mut weights = vec![[0; 2]; plane.len()];
    decode(arrays, parameters, plane.len() as u64, |unit, exponents| {
        let (element, source) = (unit.element as usize, unit.plane as usize);
        for (i, &exponent) in exponents.iter().enumerate() {
            weights[element + i] = weight(exponent, plane[source + i]);
        }
        Ok(())
    })?;
    Ok(weights.into_flattened())
}

/// Decodes the exponents of a tensor, unit by unit, from arrays whose lengths are right.
pub(crate) fn decode(
    [codebook, records, bitstream, _]: [&[u8]; 4],
    [tile_columns, columns, bit_count]: [u64; 3],
    elements: u64,
    mut put: impl FnMut(&Unit, &[u8]) -> Result<()>,
) -> Result<()> {
    let matrix = Matrix::new(tile_columns, columns, elements)?;
    let tree = tree_of(codebook)?;
    let mut start = 0;
    for tile in 0..matrix.tile_count {
        let record = slice(records, RECORD_BYTES * tile, RECORD_BYTES)?;
        // The offsets are multiples of 8 that ascend, since these sums are.
        require(number(record, 0, 48)? == start, "6.4: a tile is not where the last one ends")?;
        let (least, shift) = (number(record, 48, 13)?, number(record, 61, 3)?);
        let units = matrix.units(tile);
        for lane in 0..LANES {
            let mut position = start;
            for unit in units.iter().filter(|unit| unit.lane == lane) {
                put(unit, &exponents_of(unit, &tree, bitstream, &mut position)?)?;
            }
            start += least + (number(record, 64 + 6 * lane, 6)? << shift);
            let right = start.checked_sub(position).is_some_and(|rest| rest < 1 << shift);
            require(right, "6.4: a lane is too short or too long")?;
        }
        start = start.next_multiple_of(8);
    }
    let last = slice(records, RECORD_BYTES * matrix.tile_count, RECORD_BYTES)?;
    require(start == bit_count, "6.4: the last tile does not end at bit_count")?;
    require(number(last, 0, 48)? == bit_count, "6.4: the last offset is not bit_count")?;
    let zeros = last[6..].iter().all(|&byte| byte == 0);
    require(zeros, "6.4: the last record has more than an offset")
}

fn exponents_of(unit: &Unit, tree: &Tree, bitstream: &[u8], position: &mut u64) -> Result<Vec<u8>> {
    let mut exponents = Vec::new();
    for i in (0..unit.weights).step_by(2) {
        let [first, second] = pair(tree, bitstream, position)?;
        exponents.push(first);
        if i + 1 < unit.weights {
            exponents.push(second);
        } else {
            require(first == second, "6.4: the last pair of an odd unit has two exponents")?;
        }
    }
    Ok(exponents)
}
