//! Which weights of a tensor are decoded, and where they go.

use std::ops::Range;

use super::geometry::{Geometry, Tile};
use crate::Result;

/// A range of weights, and of them those in some columns of the matrix. They go to a dense output,
/// row by row.
///
/// Where columns are left out the range is of whole rows.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    elements: Range<u64>,
    columns: Range<u64>,
    /// Columns of the matrix.
    width: u64,
    /// The place in the output of row 0, column 0, less than 0: what is subtracted of places.
    origin: u64,
}

/// A wanted row of a tile, or its part, in weights.
pub(super) struct Run {
    /// From the first weight of the tile, in rows as wide as the tile.
    pub(super) from: usize,
    /// In the output.
    pub(super) to: usize,
    pub(super) count: usize,
}

impl Wanted {
    /// A range of weights, with all columns.
    pub(super) fn elements(geometry: &Geometry, elements: Range<u64>) -> Self {
        let width = geometry.columns();
        Self { origin: elements.start, elements, columns: 0..width, width }
    }

    /// Some columns of some rows.
    pub(super) fn columns(
        geometry: &Geometry,
        rows: &Range<u64>,
        columns: &Range<u64>,
    ) -> Result<Self> {
        geometry.check_window(rows, columns)?;
        let width = geometry.columns();
        let origin = rows.start * (columns.end - columns.start) + columns.start;
        Ok(Self {
            elements: rows.start * width..rows.end * width,
            columns: columns.clone(),
            width,
            origin,
        })
    }

    /// The range in which all of them are.
    pub(super) const fn range(&self) -> &Range<u64> {
        &self.elements
    }

    /// The size of the output, in weights.
    pub(super) fn count(&self) -> u64 {
        if self.pitch() == self.width {
            return self.elements.end - self.elements.start;
        }
        (self.elements.end - self.elements.start) / self.width * self.pitch()
    }

    /// Weights of the output from one row to the next.
    pub(super) const fn pitch(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    /// Whether a tile of a strip has any of them.
    pub(super) fn reaches(&self, corner: Corner, tile: &Tile) -> bool {
        let (first, behind) = self.reach(corner, tile);
        behind > self.elements.start
            && first < self.elements.end
            && corner.column < self.columns.end
            && corner.column + tile.width as u64 > self.columns.start
    }

    /// Where in the output a tile begins of which all weights are wanted; `None` for others.
    pub(super) fn whole(&self, corner: Corner, tile: &Tile) -> Option<usize> {
        let (first, behind) = self.reach(corner, tile);
        let is_whole = first >= self.elements.start
            && behind <= self.elements.end
            && corner.column >= self.columns.start
            && corner.column + tile.width as u64 <= self.columns.end;
        is_whole.then(|| self.place(corner.row, corner.column))
    }

    /// The wanted weights of a tile, row by row.
    pub(super) fn runs(&self, corner: Corner, tile: &Tile) -> impl Iterator<Item = Run> {
        let width = tile.width as u64;
        (0..tile.height as u64).filter_map(move |at| {
            let row = corner.row + at;
            let start = row * self.width;
            let wanted = self.elements.start.max(start + self.columns.start)
                ..self.elements.end.min(start + self.columns.end);
            let (first, behind) = (start + corner.column, start + corner.column + width);
            let (from, to) = (first.max(wanted.start), behind.min(wanted.end));
            (from < to).then(|| Run {
                from: (at * width + from - first) as usize,
                to: self.place(row, from - start),
                count: (to - from) as usize,
            })
        })
    }

    /// The first weight of a tile, and that after its last one.
    fn reach(&self, corner: Corner, tile: &Tile) -> (u64, u64) {
        let first = corner.row * self.width + corner.column;
        (first, first + (tile.height as u64 - 1) * self.width + tile.width as u64)
    }

    fn place(&self, row: u64, column: u64) -> usize {
        (row * self.pitch() + column - self.origin) as usize
    }
}

/// Row and column of a tile's first weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Corner {
    pub(super) row: u64,
    pub(super) column: u64,
}

impl Corner {
    pub(super) fn of(geometry: &Geometry, strip: u64, tile: &Tile) -> Self {
        if tile.is_vector {
            Self { row: 0, column: strip * geometry.strip_elements() }
        } else {
            Self { row: strip * geometry.tile_rows(), column: tile.first as u64 }
        }
    }
}
