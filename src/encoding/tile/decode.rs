//! Decoding spans of strips: which weights are wanted, and where they go.

use std::ops::Range;

use super::{
    codebook::Codebook,
    coded::{BandBuffer, CodedTile},
    geometry::{Geometry, LANES, MAX_TILE_BYTES, RECORD_BYTES, TILE_ELEMENTS, Tile},
    lanes::{Lookup, Window},
    record::{self, Lengths},
    sizes::Sizes,
};
use crate::{Error, Result, huffman::bits::is_zero_from};

/// Consecutive strips of a tensor, with just the bytes that decoding them needs.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Which strips of the tensor.
    pub strips: Range<u64>,
    /// The bytes [`Sizes::records_of`] of the records.
    pub records: &'a [u8],
    /// The bytes [`Sizes::bitstream_of`] of the bitstream.
    pub bitstream: &'a [u8],
    /// The bytes [`Sizes::plane_of`] of the plane.
    pub plane: &'a [u8],
}

/// Decodes the weights of one tensor; share it between threads.
///
/// Any bytes are safe to decode: every read stays in its array, every write in the output, and each
/// step consumes a bit or more.
#[derive(Clone, Debug)]
pub struct TileDecoder {
    lookup: Lookup,
    sizes: Sizes,
}

impl TileDecoder {
    /// Derives the table of a tensor: some microseconds.
    pub fn new(codebook: &Codebook, sizes: &Sizes) -> Self {
        Self { lookup: Lookup::new(codebook), sizes: *sizes }
    }

    /// Decodes a range of weights of the span's strips into little-endian BF16, two bytes each.
    ///
    /// Tiles that hold none of them are not decoded; the cost is that of the others.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the records contradict themselves or the codes, or a code is none;
    /// then `weights` holds anything. [`Error::Parameter`] if a slice has another size than the
    /// range or the span asks for.
    pub fn decode_strips(
        &self,
        span: &Span<'_>,
        elements: Range<u64>,
        weights: &mut [u8],
    ) -> Result<()> {
        self.decode(span, &Wanted::elements(&self.sizes.geometry(), elements), weights)
    }

    /// Decodes some columns of some rows of the matrix, all of them in the span's strips, into
    /// little-endian BF16, row by row.
    ///
    /// Tiles that hold none of them are not decoded; the cost is that of the others. At multiples
    /// of 32 rows and 256 columns they are decoded straight into the output.
    ///
    /// # Errors
    /// As [`decode_strips`](Self::decode_strips).
    pub fn decode_columns(
        &self,
        span: &Span<'_>,
        rows: Range<u64>,
        columns: Range<u64>,
        weights: &mut [u8],
    ) -> Result<()> {
        self.decode(span, &Wanted::columns(&self.sizes.geometry(), &rows, &columns)?, weights)
    }

    fn decode(&self, span: &Span<'_>, wanted: &Wanted, weights: &mut [u8]) -> Result<()> {
        let (held, range) = (self.sizes.elements_of(&span.strips)?, &wanted.elements);
        let is_held =
            held.start <= range.start && range.start <= range.end && range.end <= held.end;
        Error::unless(is_held && weights.len() as u64 == 2 * wanted.count(), || {
            let problem = "the span or the output does not fit the weights asked for";
            Error::parameter(problem, "pass the strips that hold them, and two bytes for each")
        })?;
        let geometry = self.sizes.geometry();
        let mut stage = BandBuffer::new();
        self.walk(span, wanted, |strip, coded, plane| {
            let corner = Corner::of(&geometry, strip, &coded.tile);
            if let Some(place) = wanted.whole(corner, &coded.tile) {
                let coded = coded.with_stride(wanted.pitch() as usize);
                return coded.decode(&self.lookup, &mut stage, plane, &mut weights[2 * place..]);
            }
            // Some of its weights are wanted: decode them all, copy those row by row.
            let mut buffer = vec![0; 2 * TILE_ELEMENTS as usize];
            coded.with_stride(coded.tile.width).decode(
                &self.lookup,
                &mut stage,
                plane,
                &mut buffer,
            )?;
            for run in wanted.runs(corner, &coded.tile) {
                let decoded = &buffer[2 * run.from..2 * (run.from + run.count)];
                weights[2 * run.to..2 * (run.to + run.count)].copy_from_slice(decoded);
            }
            Ok(())
        })
    }

    /// Checks everything about a span's strips that the specification demands, with what
    /// [`decode_strips`](Self::decode_strips) checks; costs about as much as decoding.
    ///
    /// # Errors
    /// As [`decode_strips`](Self::decode_strips).
    pub fn verify_strips(&self, span: &Span<'_>) -> Result<()> {
        let held = self.sizes.elements_of(&span.strips)?;
        let mut stage = BandBuffer::new();
        let all = Wanted::elements(&self.sizes.geometry(), held);
        self.walk(span, &all, |_, coded, _| coded.verify(&self.lookup, &mut stage))?;
        let bytes = self.sizes.bitstream_of(span.records, &span.strips)?;
        let end = self.sizes.bit_count() / 8;
        let behind = 8 * end.saturating_sub(bytes.start) as usize;
        let is_last = span.strips.end == self.sizes.strip_count();
        Error::unless(!is_last || is_zero_from(span.bitstream, behind), || {
            Error::corrupt("bitstream", end, "the bits behind the last tile are not zero")
        })
    }

    /// Hands on the tiles of a span that hold wanted weights, each with its strip and its part of
    /// the plane, once their records are found to be right.
    fn walk(
        &self,
        span: &Span<'_>,
        wanted: &Wanted,
        mut hand: impl FnMut(u64, &CodedTile<'_>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.check(span)?;
        let mut window = Window::new();
        let geometry = self.sizes.geometry();
        let (records, _) = span.records.as_chunks::<RECORD_BYTES>();
        let first_byte = record::offset(&records[0]) / 8;
        let mut pairs = (span.strips.start * geometry.strip_tiles()..).zip(records.windows(2));
        let strips = span
            .strips
            .clone()
            .flat_map(|strip| geometry.tiles(strip).map(move |tile| (strip, tile)));
        for ((strip, tile), (index, pair)) in strips.zip(&mut pairs) {
            if !wanted.reaches(Corner::of(&geometry, strip, &tile), &tile) {
                continue;
            }
            let (start, end) = (record::offset(&pair[0]), record::offset(&pair[1]));
            let lengths = Lengths::read(&pair[0]);
            let mut starts = [0; LANES + 1];
            for (lane, length) in lengths.lanes().into_iter().enumerate() {
                starts[lane + 1] = starts[lane] + length;
            }
            let bytes = starts[LANES].div_ceil(8);
            let byte = start / 8;
            let corrupt = |problem| Error::corrupt("records", index * RECORD_BYTES as u64, problem);
            if start % 8 != 0 || end.checked_sub(start) != Some(8 * bytes as u64) {
                return Err(corrupt("the lanes do not add up to the distance of two offsets"));
            }
            let from = byte.checked_sub(first_byte).and_then(|from| usize::try_from(from).ok());
            let rest =
                from.and_then(|from| span.bitstream.get(from..)).filter(|rest| bytes <= rest.len());
            let rest = rest.ok_or_else(|| corrupt("an offset is not within the strips"))?;
            if bytes > MAX_TILE_BYTES {
                return Err(corrupt("the lanes have more bits than any pairs"));
            }
            window.take(rest, bytes);
            let strip_plane =
                ((strip - span.strips.start) * geometry.strip_elements()) as usize + tile.plane;
            let plane = &span.plane[strip_plane..strip_plane + tile.elements()];
            let (window, behind) = (&window, &rest[bytes..]);
            let coded = CodedTile { tile, lengths, starts, window, behind, index, byte };
            hand(strip, &coded, plane)?;
        }
        Ok(())
    }

    /// Checks that the arrays have the sizes that they should, and the last record.
    fn check(&self, span: &Span<'_>) -> Result<()> {
        let fits = |array: &[u8], range: Range<u64>| array.len() as u64 == range.end - range.start;
        let fit = fits(span.bitstream, self.sizes.bitstream_of(span.records, &span.strips)?)
            && fits(span.plane, self.sizes.plane_of(&span.strips)?);
        Error::unless(fit, || {
            let problem = "the arrays of a span have other sizes than its strips";
            Error::parameter(problem, "pass the parts that they name")
        })?;
        let last = span.records.last_chunk::<RECORD_BYTES>();
        let is_last = span.strips.end == self.sizes.strip_count();
        Error::unless(!is_last || last == Some(&record::last(self.sizes.bit_count())), || {
            let at = self.sizes.records_bytes() - RECORD_BYTES as u64;
            Error::corrupt("records", at, "the last record must be the bit count alone")
        })
    }
}

/// A range of weights, and of them those in some columns of the matrix. They go to a dense output,
/// row by row.
///
/// Where columns are left out the range is of whole rows.
#[derive(Clone, Debug)]
struct Wanted {
    elements: Range<u64>,
    columns: Range<u64>,
    /// Columns of the matrix.
    width: u64,
    /// The place in the output of row 0, column 0, less than 0: what is subtracted of places.
    origin: u64,
}

/// A wanted row of a tile, or its part, in weights.
struct Run {
    /// From the first weight of the tile, in rows as wide as the tile.
    from: usize,
    /// In the output.
    to: usize,
    count: usize,
}

impl Wanted {
    /// A range of weights, with all columns.
    fn elements(geometry: &Geometry, elements: Range<u64>) -> Self {
        let width = geometry.columns();
        Self { origin: elements.start, elements, columns: 0..width, width }
    }

    /// Some columns of some rows.
    fn columns(geometry: &Geometry, rows: &Range<u64>, columns: &Range<u64>) -> Result<Self> {
        geometry.check_window(rows, columns)?;
        let width = geometry.columns();
        let elements = rows.start * width..rows.end * width;
        let origin = rows.start * (columns.end - columns.start) + columns.start;
        Ok(Self { elements, columns: columns.clone(), width, origin })
    }

    /// The size of the output, in weights.
    fn count(&self) -> u64 {
        if self.pitch() == self.width {
            return self.elements.end - self.elements.start;
        }
        (self.elements.end - self.elements.start) / self.width * self.pitch()
    }

    /// Weights of the output from one row to the next.
    const fn pitch(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    /// Whether a tile of a strip has any of them.
    fn reaches(&self, corner: Corner, tile: &Tile) -> bool {
        let (first, behind) = self.reach(corner, tile);
        behind > self.elements.start
            && first < self.elements.end
            && corner.column < self.columns.end
            && corner.column + tile.width as u64 > self.columns.start
    }

    /// Where in the output a tile begins of which all weights are wanted; `None` for others.
    fn whole(&self, corner: Corner, tile: &Tile) -> Option<usize> {
        let (first, behind) = self.reach(corner, tile);
        let is_whole = first >= self.elements.start
            && behind <= self.elements.end
            && corner.column >= self.columns.start
            && corner.column + tile.width as u64 <= self.columns.end;
        is_whole.then(|| self.place(corner.row, corner.column))
    }

    /// The wanted weights of a tile, row by row.
    fn runs(&self, corner: Corner, tile: &Tile) -> impl Iterator<Item = Run> {
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
struct Corner {
    row: u64,
    column: u64,
}

impl Corner {
    fn of(geometry: &Geometry, strip: u64, tile: &Tile) -> Self {
        if tile.is_vector {
            Self { row: 0, column: strip * geometry.strip_elements() }
        } else {
            Self { row: strip * geometry.tile_rows(), column: tile.first as u64 }
        }
    }
}
