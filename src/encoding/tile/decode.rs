//! Decodes strips: finds which weights are wanted, and stores them in their places.

use std::ops::Range;

use super::{
    codebook::Codebook,
    coded::CodedTile,
    geometry::{LANES, MAX_TILE_BYTES, RECORD_BYTES, TILE_ELEMENTS, Tile, TileGeometry},
    lanes::{Lookup, Window},
    plane::{BandBuffer, ends_with_zeros},
    record::{self, Lengths},
    sizes::{BITSTREAM, CODEBOOK, PLANE, RECORDS, TileSizes},
};
use crate::{
    Error, Result,
    encoding::stored::{
        CodedSizes, DecodeArrays, ReadArrays, SECTION_BITSTREAM, SECTION_CODEBOOK, SECTION_INDEX,
        SECTION_PLANE, Scratch, decode_rows,
    },
    float::with_float,
    huffman::bits::is_zero_from,
};

impl CodedSizes for TileSizes {
    fn parameters(&self) -> [u64; 4] {
        let (geometry, zero_bits) = (self.geometry(), self.split().zero_bits());
        [geometry.tile_columns(), geometry.columns(), self.bit_count(), zero_bits.into()]
    }

    fn elements(&self) -> u64 {
        self.geometry().elements()
    }

    fn weight_bytes(&self) -> u64 {
        self.split().bytes() as u64
    }

    fn arrays(&self) -> Vec<(u32, u64)> {
        let kinds = [SECTION_CODEBOOK, SECTION_INDEX, SECTION_BITSTREAM, SECTION_PLANE];
        kinds.into_iter().zip(self.array_lengths()).collect()
    }

    fn grain(&self) -> u64 {
        self.weight_bytes() * self.geometry().strip_elements()
    }

    fn grain_rows(&self, width: u64) -> Option<u64> {
        let is_own = self.weight_bytes() * self.geometry().columns() == width;
        is_own.then(|| self.geometry().tile_rows())
    }

    fn prepare<'m>(&self, arrays: &dyn ReadArrays<'m>) -> Result<Box<dyn DecodeArrays + 'm>> {
        let codebook = Codebook::from_bytes(&self.read_whole(arrays, CODEBOOK)?)?;
        Ok(Box::new(TileDecoder { lookup: Lookup::new(&codebook), sizes: *self }))
    }

    fn verify_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<()> {
        Codebook::from_bytes(&self.read_whole(arrays, CODEBOOK)?).map(drop)
    }
}

/// Consecutive strips of a tensor, with just the bytes that decoding them needs.
struct StripArrays<'a> {
    range: Range<u64>,
    records: &'a [[u8; RECORD_BYTES]],
    /// Where in the array its part starts.
    first_byte: u64,
    bitstream: &'a [u8],
    plane: &'a [u8],
}

/// A tensor prepared for decoding.
struct TileDecoder {
    lookup: Lookup,
    sizes: TileSizes,
}

/// Tiles that hold none of the weights are not decoded; the cost is that of the others. At
/// multiples of 32 rows and 256 columns they are decoded straight into the output.
impl DecodeArrays for TileDecoder {
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        let wanted = Wanted::elements(&self.sizes.geometry(), elements);
        self.decode_wanted(arrays, &wanted, scratch, out)
    }

    fn decode_columns(
        &self,
        arrays: &dyn ReadArrays<'_>,
        (rows, columns, width): (Range<u64>, Range<u64>, u64),
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        let each = self.sizes.weight_bytes();
        if self.sizes.grain_rows(each * width).is_none() {
            return decode_rows(self, each, arrays, (rows, columns, width), scratch, out);
        }
        let wanted = Wanted::columns(&self.sizes.geometry(), &rows, &columns)?;
        self.decode_wanted(arrays, &wanted, scratch, out)
    }

    fn verify(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let strips = self.strips(arrays, &elements, scratch)?;
        let mut stage = BandBuffer::new();
        let all = Wanted::elements(&self.sizes.geometry(), self.sizes.elements_of(&strips.range)?);
        self.walk(&strips, &all, |coded, plane| {
            coded.verify(&self.lookup, &mut stage)?;
            Error::unless(ends_with_zeros(self.sizes.split(), coded.tile, plane), || {
                let problem = "the bits after the last weight of a unit are not zero";
                Error::corrupt("plane", self.plane_start(&coded.tile), problem)
            })
        })?;
        let end = self.sizes.bit_count() / 8;
        let after = 8 * end.saturating_sub(strips.first_byte) as usize;
        Error::unless(!self.has_last(&strips) || is_zero_from(strips.bitstream, after), || {
            Error::corrupt("bitstream", end, "the bits after the last tile are not zero")
        })
    }
}

impl TileDecoder {
    /// The strips that hold these weights. Records are read with them, so that a tensor's are never
    /// all in memory.
    fn strips<'s>(
        &self,
        arrays: &'s dyn ReadArrays<'_>,
        elements: &Range<u64>,
        scratch: &'s mut Scratch,
    ) -> Result<StripArrays<'s>> {
        let Scratch { index, bitstream, plane } = scratch;
        let range = self.sizes.strips_of(elements)?;
        let records = arrays.read_with(RECORDS, self.sizes.records_of(&range)?, index)?;
        let bytes = self.sizes.bitstream_of(records, &range)?;
        let first_byte = bytes.start;
        let bitstream = arrays.read_with(BITSTREAM, bytes, bitstream)?;
        let plane = arrays.read_with(PLANE, self.sizes.plane_of(&range)?, plane)?;
        let records = records.as_chunks().0;
        let strips = StripArrays { range, records, first_byte, bitstream, plane };
        let last = record::last(self.sizes.bit_count());
        Error::unless(!self.has_last(&strips) || records.last() == Some(&last), || {
            let at = self.sizes.array_lengths()[RECORDS] - RECORD_BYTES as u64;
            Error::corrupt("records", at, "the last record must be the bit count alone")
        })?;
        Ok(strips)
    }

    fn has_last(&self, strips: &StripArrays<'_>) -> bool {
        strips.range.end == self.sizes.geometry().strip_count()
    }

    fn decode_wanted(
        &self,
        arrays: &dyn ReadArrays<'_>,
        wanted: &Wanted,
        scratch: &mut Scratch,
        weights: &mut [u8],
    ) -> Result<()> {
        let strips = self.strips(arrays, &wanted.elements, scratch)?;
        let each = self.sizes.split().bytes();
        assert_eq!(weights.len() as u64, each as u64 * wanted.count(), "all bytes of each weight");
        let mut stage = BandBuffer::new();
        self.walk(&strips, wanted, |coded, plane| {
            let tile = &coded.tile;
            if let Some(place) = wanted.whole(tile) {
                let (out, stride) = (&mut weights[each * place..], wanted.pitch() as usize);
                return self.decode_tile(coded, &mut stage, plane, out, stride);
            }
            // Some of its weights are wanted: decode them all, copy those row by row.
            let mut buffer = vec![0; each * TILE_ELEMENTS as usize];
            self.decode_tile(coded, &mut stage, plane, &mut buffer, tile.width)?;
            for run in wanted.runs(tile) {
                let decoded = &buffer[each * run.from..each * (run.from + run.count)];
                weights[each * run.to..each * (run.to + run.count)].copy_from_slice(decoded);
            }
            Ok(())
        })
    }

    /// Decodes a tile to `out`, whose rows are this many weights apart.
    fn decode_tile(
        &self,
        coded: &CodedTile<'_>,
        stage: &mut BandBuffer,
        plane: &[u8],
        out: &mut [u8],
        stride: usize,
    ) -> Result<()> {
        with_float!(self.sizes.split(), F => {
            coded.decode::<F>(&self.lookup, stage, plane, out, stride)
        })
    }

    /// The byte of the plane at which a tile starts.
    fn plane_start(&self, tile: &Tile) -> u64 {
        let before = tile.row * self.sizes.geometry().columns() + tile.column * tile.height as u64;
        self.sizes.split().plane_bytes(before)
    }

    /// Hands on the tiles that hold wanted weights, each with its part of the plane, once their
    /// records are found to be right.
    fn walk(
        &self,
        strips: &StripArrays<'_>,
        wanted: &Wanted,
        mut hand: impl FnMut(&CodedTile<'_>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut window = Window::new();
        let geometry = self.sizes.geometry();
        let tiles = strips.range.clone().flat_map(|strip| geometry.tiles(strip));
        let first = strips.range.start * geometry.strip_tiles();
        let mut planes = strips.plane;
        for ((tile, index), pair) in tiles.zip(first..).zip(strips.records.windows(2)) {
            let bytes = self.sizes.split().plane_bytes(tile.elements() as u64) as usize;
            let plane = planes.split_off(..bytes).expect("the plane has all weights");
            if wanted.runs(&tile).next().is_none() {
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
            let from =
                byte.checked_sub(strips.first_byte).and_then(|from| usize::try_from(from).ok());
            let rest = from
                .and_then(|from| strips.bitstream.get(from..))
                .filter(|rest| bytes <= rest.len());
            let rest = rest.ok_or_else(|| corrupt("an offset is not within the strips"))?;
            if bytes > MAX_TILE_BYTES {
                return Err(corrupt("the lanes have more bits than any pairs"));
            }
            window.take(rest, bytes);
            let (window, rest) = (&window, &rest[bytes..]);
            let coded = CodedTile { tile, lengths, starts, window, rest, index, byte };
            hand(&coded, plane)?;
        }
        Ok(())
    }
}

/// The weights of a range that lie in some columns of the matrix. They go to a dense output, row by
/// row. If columns are left out, the range consists of whole rows.
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
    /// Its first weight, counted from the tile's first one, in rows as wide as the tile.
    from: usize,
    /// Its place in the output.
    to: usize,
    count: usize,
}

impl Wanted {
    /// A range of weights, with all columns.
    fn elements(geometry: &TileGeometry, elements: Range<u64>) -> Self {
        let width = geometry.columns();
        Self { origin: elements.start, elements, columns: 0..width, width }
    }

    /// Some columns of some rows.
    fn columns(geometry: &TileGeometry, rows: &Range<u64>, columns: &Range<u64>) -> Result<Self> {
        geometry.check_window(rows, columns)?;
        let width = geometry.columns();
        let elements = rows.start * width..rows.end * width;
        let origin = rows.start * (columns.end - columns.start) + columns.start;
        Ok(Self { elements, columns: columns.clone(), width, origin })
    }

    /// Weights of the output from one row to the next.
    const fn pitch(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    /// The place in the output of a tile whose weights are all wanted; `None` for others.
    fn whole(&self, tile: &Tile) -> Option<usize> {
        let (first, last) = (self.run(tile, 0)?, self.run(tile, tile.height - 1)?);
        (first.count == tile.width && last.count == tile.width).then_some(first.to)
    }

    /// How many weights go to the output.
    const fn count(&self) -> u64 {
        let elements = self.elements.end - self.elements.start;
        if self.pitch() == self.width { elements } else { elements / self.width * self.pitch() }
    }

    /// The wanted weights of a tile, row by row. Costs next to nothing if the tile has none.
    fn runs(&self, tile: &Tile) -> impl Iterator<Item = Run> {
        let reaches =
            tile.column < self.columns.end && tile.column + tile.width as u64 > self.columns.start;
        let row_of = |row: u64| row.saturating_sub(tile.row).min(tile.height as u64) as usize;
        let first = row_of(self.elements.start / self.width);
        let end = if reaches { row_of(self.elements.end.div_ceil(self.width)) } else { 0 };
        (first..end).filter_map(|row| self.run(tile, row))
    }

    /// The wanted weights of a row of a tile, if there are any.
    fn run(&self, tile: &Tile, row: usize) -> Option<Run> {
        let start = (tile.row + row as u64) * self.width;
        let (first, end) = (start + tile.column, start + tile.column + tile.width as u64);
        let from = first.max(self.elements.start).max(start + self.columns.start);
        let to = end.min(self.elements.end).min(start + self.columns.end);
        (from < to).then(|| Run {
            from: row * tile.width + (from - first) as usize,
            to: ((tile.row + row as u64) * self.pitch() + from - start - self.origin) as usize,
            count: (to - from) as usize,
        })
    }
}
