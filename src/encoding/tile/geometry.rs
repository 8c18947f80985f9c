//! How a tensor is cut into strips, tiles, lanes and units.

use std::ops::Range;

use crate::{Error, Result};

/// Weights of a whole tile.
pub(super) const TILE_ELEMENTS: u64 = 8192;
/// The two widths of a tile.
pub(super) const TILE_COLUMNS: [u64; 2] = [256, TILE_ELEMENTS];
/// Weights of a whole unit.
pub(super) use crate::float::UNIT;
/// Lanes of a tile.
pub(super) const LANES: usize = 32;
/// Weights of a lane of a whole tile.
pub(super) const LANE_ELEMENTS: usize = TILE_ELEMENTS as usize / LANES;
/// Units of a lane of a whole tile.
pub(super) const LANE_UNITS: usize = LANE_ELEMENTS / UNIT;
/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 32;
/// The longest code, in bits.
pub(super) const MAX_CODE_BITS: u8 = 12;
/// Bits of a value after the code of the escape.
pub(super) const VALUE_BITS: u8 = 16;
/// The most bits of a pair.
pub(super) const MAX_PAIR_BITS: usize = (MAX_CODE_BITS + VALUE_BITS) as usize;
/// The most bits that a lane's pairs have.
pub(super) const MAX_LANE_BITS: usize = LANE_ELEMENTS / 2 * MAX_PAIR_BITS;
/// A lane is longer than its pairs by at most this many bits: a step of 2^7, less one.
pub(super) const MAX_SLACK: usize = 127;
/// The most bytes of a tile, padding included.
pub(super) const MAX_TILE_BYTES: usize = (LANES * (MAX_LANE_BITS + MAX_SLACK)).div_ceil(8);
/// The number of different pairs.
pub(super) const PAIRS: usize = 1 << 16;
/// The bitstream is stored in multiples of this many bytes.
pub(super) const STREAM_ALIGNMENT: u64 = 16;

/// Lanes that share a row of a narrow tile.
pub(super) const ROW_LANES: usize = 4;
/// Weights that four lanes, a *group*, have side by side.
pub(super) const RUN: usize = UNIT * ROW_LANES;
/// Units of a step of a group: two of each lane.
pub(super) const GROUP_UNITS: usize = 2 * ROW_LANES;
/// Rows of a band, the rows that the 32 lanes of a narrow tile have side by side.
pub(super) const BAND_ROWS: usize = LANES / ROW_LANES;
/// The most tiles, so less than 2^45 weights.
const MAX_TILES: u64 = u32::MAX as u64;
/// Matrices with fewer columns or rows are cut as vectors: their tiles would be partial ones,
/// mostly.
const MIN_COLUMNS: u64 = 128;
const MIN_ROWS: u64 = 16;

/// The matrix that a tensor is taken for, and the shape of its tiles; every place follows.
///
/// Always consistent: no method overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileGeometry {
    tile_columns: u64,
    columns: u64,
    elements: u64,
}

impl TileGeometry {
    /// The geometry that the directory of a file states.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if `tile_columns` is neither 256 nor 8192, where `columns` does not suit
    /// it or the number of elements, if there are no elements, and from 2^32 tiles on.
    pub fn new(tile_columns: u64, columns: u64, elements: u64) -> Result<Self> {
        let corrupt = |problem: String| Err(Error::corrupt("tile geometry", 0, problem));
        if !TILE_COLUMNS.contains(&tile_columns) {
            let problem = format!("tiles of {tile_columns} columns where 256 and 8192 are allowed");
            return corrupt(problem);
        }
        if elements == 0 {
            return corrupt("a tensor without elements must be raw".into());
        }
        let unit = UNIT as u64;
        let suits = if tile_columns == TILE_ELEMENTS {
            columns == elements
        } else {
            columns >= unit && columns.is_multiple_of(unit) && elements.is_multiple_of(columns)
        };
        if !suits {
            return corrupt(format!(
                "{columns} columns suit neither {elements} elements nor tiles of {tile_columns}"
            ));
        }
        let geometry = Self { tile_columns, columns, elements };
        match geometry.tile_count() {
            0..=MAX_TILES => Ok(geometry),
            tiles => corrupt(format!("{tiles} tiles where at most {MAX_TILES} are allowed")),
        }
    }

    /// The geometry that a writer gives a tensor of this shape: narrow tiles over its last
    /// dimension (over all but the first one of four or more), unless it is narrow, odd or low;
    /// then tiles of a vector.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a shape without elements or with too many.
    pub fn choose(shape: &[u64]) -> Result<Self> {
        let product =
            |dimensions: &[u64]| dimensions.iter().fold(1, |a: u64, &b| a.saturating_mul(b));
        let elements = product(shape);
        if elements == 0 {
            return Err(Error::parameter("a tensor without elements has no tiles", "store it raw"));
        }
        let row = if shape.len() >= 4 { 1 } else { shape.len().saturating_sub(1) };
        let columns = product(&shape[row..]);
        let narrow = columns.is_multiple_of(UNIT as u64)
            && columns >= MIN_COLUMNS
            && elements / columns >= MIN_ROWS;
        let geometry = if narrow {
            Self::new(TILE_COLUMNS[0], columns, elements)
        } else {
            Self::vector(elements)
        };
        geometry.map_err(|_| {
            Error::parameter("a tensor has too many weights for tiles", "store it otherwise")
        })
    }

    /// Whether it is tiles of 32 x 256 whose rows are rows of a tensor of this shape: one or more
    /// of its innermost dimensions.
    pub(crate) fn is_matrix_of(&self, shape: &[u64]) -> bool {
        let mut product = 1;
        let has_rows = shape.iter().rev().any(|size| {
            product *= size;
            product == self.columns
        });
        has_rows && !self.is_vector()
    }

    /// The geometry of a vector.
    ///
    /// # Errors
    /// Like [`new`](Self::new).
    pub fn vector(elements: u64) -> Result<Self> {
        Self::new(TILE_ELEMENTS, elements, elements)
    }

    /// Columns of a whole tile, 256 or 8192.
    pub const fn tile_columns(&self) -> u64 {
        self.tile_columns
    }

    /// Rows of a whole tile, 32 or 1.
    pub const fn tile_rows(&self) -> u64 {
        TILE_ELEMENTS / self.tile_columns
    }

    /// Columns of the matrix.
    pub const fn columns(&self) -> u64 {
        self.columns
    }

    /// Rows of the matrix.
    pub const fn rows(&self) -> u64 {
        self.elements / self.columns
    }

    /// The number of weights.
    pub const fn elements(&self) -> u64 {
        self.elements
    }

    /// The number of tiles.
    pub const fn tile_count(&self) -> u64 {
        self.columns.div_ceil(self.tile_columns) * self.rows().div_ceil(self.tile_rows())
    }

    /// The number of strips.
    pub const fn strip_count(&self) -> u64 {
        self.elements.div_ceil(self.strip_elements())
    }

    /// Weights of a strip; the last one may have fewer.
    pub const fn strip_elements(&self) -> u64 {
        if self.is_vector() { TILE_ELEMENTS } else { self.tile_rows() * self.columns }
    }

    /// Tiles of a strip.
    pub const fn strip_tiles(&self) -> u64 {
        if self.is_vector() { 1 } else { self.columns.div_ceil(self.tile_columns) }
    }

    const fn is_vector(&self) -> bool {
        self.tile_columns == TILE_ELEMENTS
    }

    /// Checks that there are such rows and columns, one or more of each.
    pub(super) fn check_window(&self, rows: &Range<u64>, columns: &Range<u64>) -> Result<()> {
        let (height, width) = (self.rows(), self.columns());
        let within = |range: &Range<u64>, count| range.start < range.end && range.end <= count;
        Error::unless(within(rows, height) && within(columns, width), || {
            let problem = format!("{rows:?} x {columns:?} of {height} x {width} weights");
            Error::parameter(problem, "ask for one or more rows and columns that exist")
        })
    }

    /// The tiles of a strip that exists, in order.
    pub(super) fn tiles(&self, strip: u64) -> impl Iterator<Item = Tile> + use<> {
        let elements =
            self.strip_elements().min(self.elements - strip * self.strip_elements()) as usize;
        let (is_vector, tile_columns) = (self.is_vector(), self.tile_columns as usize);
        let columns = if is_vector { elements } else { self.columns as usize };
        let height = elements / columns;
        let (row, column) =
            if is_vector { (0, strip * TILE_ELEMENTS) } else { (strip * self.tile_rows(), 0) };
        (0..self.strip_tiles() as usize).map(move |index| {
            let first = index * tile_columns;
            let width = tile_columns.min(columns - first);
            let column = column + first as u64;
            Tile { is_vector, row, column, width, height, stride: columns, first }
        })
    }
}

/// A tile, and where its weights lie in its strip.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) is_vector: bool,
    /// Where its first weight lies in the matrix.
    pub(super) row: u64,
    pub(super) column: u64,
    pub(super) width: usize,
    pub(super) height: usize,
    /// Weights from one row to the next.
    pub(super) stride: usize,
    /// The tile's first weight, counted from that of the strip.
    pub(super) first: usize,
}

/// Eight neighbouring weights of a row, or the fewer ones that exist of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    /// The first weight, counted from that of the tile, in rows of the tile's stride.
    pub(super) at: usize,
    /// The number of weights, 1..=8.
    pub(super) count: usize,
}

impl Tile {
    /// The number of weights.
    pub(super) const fn elements(&self) -> usize {
        self.width * self.height
    }

    /// The units that exist with their lanes, in the order of the plane: band by band, two
    /// neighbouring units of each lane. `for_each` makes plain loops of it.
    pub(super) fn units(self) -> impl Iterator<Item = (usize, Unit)> {
        let (bands, pairs) = if self.is_vector { (1, 16) } else { (BAND_ROWS / 2, 4) };
        let steps = (0..bands).flat_map(move |band| (0..pairs).map(move |k| (band, k)));
        let lanes = steps.flat_map(|(band, k)| (0..LANES).map(move |lane| (band, k, lane)));
        lanes.flat_map(move |(band, k, lane)| {
            let unit = move |j| self.unit(band, j, lane).map(|unit| (lane, unit));
            [2 * k, 2 * k + 1].into_iter().filter_map(unit)
        })
    }

    /// Unit `j` of a band in a lane, if it exists.
    const fn unit(&self, band: usize, j: usize, lane: usize) -> Option<Unit> {
        let (row, column) = if self.is_vector {
            (0, LANES * UNIT * j + UNIT * lane)
        } else {
            (BAND_ROWS * band + lane / ROW_LANES, ROW_LANES * UNIT * j + UNIT * (lane % ROW_LANES))
        };
        if row >= self.height || column >= self.width {
            return None;
        }
        let rest = self.width - column;
        let (at, count) = (row * self.stride + column, if rest < UNIT { rest } else { UNIT });
        Some(Unit { at, count })
    }

    /// The places of a tile in which every lane has the same number of units, an even one in each
    /// band.
    pub(super) const fn places(&self) -> Option<Places> {
        let pair = if self.is_vector { 2 * LANES * UNIT } else { 2 * ROW_LANES * UNIT };
        if !self.width.is_multiple_of(pair) {
            return None;
        }
        let pairs = self.width / pair;
        if self.is_vector {
            let group = ROW_LANES * UNIT;
            return Some(Places { bands: pairs, pairs: 1, pair, band: pair, group });
        }
        if !self.height.is_multiple_of(BAND_ROWS) {
            return None;
        }
        let band = BAND_ROWS * self.stride;
        Some(Places { bands: self.height / BAND_ROWS, pairs, pair, band, group: self.stride })
    }
}

/// Where the units of a regular tile lie: unit `2k` of band `b` and lane `4g + q` at
/// `b × band + k × pair + g × group + 8q`, the one after it half a pair later. In a vector, each
/// two units of a lane are a band.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) bands: usize,
    /// Pairs of units in a band of a lane.
    pub(super) pairs: usize,
    pub(super) pair: usize,
    pub(super) band: usize,
    pub(super) group: usize,
}

impl Places {
    /// Pairs of units of a lane.
    pub(super) const fn steps(&self) -> usize {
        self.bands * self.pairs
    }

    /// The first weight of a run, counted from that of its step: of the first or second unit of
    /// each lane of a group.
    #[inline]
    pub(super) const fn run(&self, group: usize, half: usize) -> usize {
        group * self.group + half * self.pair / 2
    }

    /// The weights of the first lane of each step's first units, in the order of the plane.
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        (0..self.bands)
            .flat_map(move |band| (0..self.pairs).map(move |k| band * self.band + k * self.pair))
    }
}

#[cfg(test)]
mod tests {
    use super::TileGeometry;

    #[test]
    fn rows_are_innermost_dimensions() {
        let has_rows = |shape: &[u64], columns| {
            let geometry = TileGeometry::new(256, columns, shape.iter().product());
            geometry.unwrap().is_matrix_of(shape)
        };
        assert!(has_rows(&[7, 96, 264], 264) && has_rows(&[7, 96, 264], 96 * 264));
        assert!(!has_rows(&[70, 1312], 2 * 1312) && !has_rows(&[70, 1312], 656));
        assert!(!TileGeometry::vector(264).unwrap().is_matrix_of(&[264]));
    }
}
