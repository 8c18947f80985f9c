//! A stored tensor in the `tile` encoding: its four arrays, and how ranges of it are read.

use std::ops::Range;

use super::{
    codebook::Codebook,
    decode::{Span, TileDecoder},
    geometry::Geometry,
    sizes::Sizes,
};
use crate::{
    Result,
    encoding::stored::{ArrayKind, CodedSizes, DecodeArrays, ReadArrays, Scratch, decode_rows},
};

// Its arrays by number, in the order of a tensor's record.
pub(crate) const CODEBOOK: usize = 0;
pub(crate) const RECORDS: usize = 1;
pub(crate) const BITSTREAM: usize = 2;
pub(crate) const PLANE: usize = 3;

impl Sizes {
    /// Of a tensor whose record has these parameters, and whose codebook has as many bytes.
    pub(crate) fn of_record(
        [tile_columns, columns, bit_count]: [u64; 3],
        elements: u64,
        codebook_bytes: u64,
    ) -> Result<Self> {
        Self::new(Geometry::new(tile_columns, columns, elements)?, bit_count, codebook_bytes)
    }

    fn read_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<Codebook> {
        Codebook::from_bytes(&arrays.read(CODEBOOK, 0..self.codebook_bytes())?)
    }
}

impl CodedSizes for Sizes {
    fn parameters(&self) -> [u64; 3] {
        [self.geometry().tile_columns(), self.geometry().columns(), self.bit_count()]
    }

    fn arrays(&self) -> Vec<(ArrayKind, u64)> {
        vec![
            (ArrayKind::Codebook, self.codebook_bytes()),
            (ArrayKind::Index, self.records_bytes()),
            (ArrayKind::Bitstream, self.bitstream_bytes()),
            (ArrayKind::Plane, self.plane_bytes()),
        ]
    }

    fn grain(&self) -> u64 {
        2 * self.geometry().strip_elements()
    }

    fn grain_rows(&self, width: u64) -> Option<u64> {
        (2 * self.geometry().columns() == width).then(|| self.geometry().tile_rows())
    }

    fn prepare<'m>(&self, arrays: &dyn ReadArrays<'m>) -> Result<Box<dyn DecodeArrays + 'm>> {
        let decoder = TileDecoder::new(&self.read_codebook(arrays)?, self);
        Ok(Box::new(TileArrays { sizes: *self, decoder }))
    }

    fn verify_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<()> {
        self.read_codebook(arrays).map(drop)
    }
}

/// A tensor prepared for decoding.
struct TileArrays {
    sizes: Sizes,
    decoder: TileDecoder,
}

impl TileArrays {
    /// Fetches the span of strips that hold these elements. Records are read with it, so that a
    /// tensor's are never all in memory.
    fn with_strips(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: &Range<u64>,
        scratch: &mut Scratch,
        work: impl FnOnce(&Span<'_>) -> Result<()>,
    ) -> Result<()> {
        let Scratch { index, bitstream, plane } = scratch;
        let (sizes, locate) = (&self.sizes, |error| arrays.locate(error));
        let strips = sizes.strips_of(elements)?;
        let records = arrays.read_with(RECORDS, sizes.records_of(&strips)?, index)?;
        let range = sizes.bitstream_of(records, &strips).map_err(locate)?;
        let bitstream = arrays.read_with(BITSTREAM, range, bitstream)?;
        let plane = arrays.read_with(PLANE, sizes.plane_of(&strips)?, plane)?;
        let result = work(&Span { strips, records, bitstream, plane }).map_err(locate);
        scratch.give_back();
        result
    }
}

impl DecodeArrays for TileArrays {
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        self.with_strips(arrays, &elements, scratch, |span| {
            self.decoder.decode_strips(span, elements.clone(), out)
        })
    }

    fn decode_columns(
        &self,
        arrays: &dyn ReadArrays<'_>,
        (rows, columns, width): (Range<u64>, Range<u64>, u64),
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        if self.sizes.grain_rows(2 * width).is_none() {
            return decode_rows(self, arrays, (rows, columns, width), scratch, out);
        }
        let elements = rows.start * width..rows.end * width;
        self.with_strips(arrays, &elements, scratch, |span| {
            self.decoder.decode_columns(span, rows, columns, out)
        })
    }

    fn verify(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.with_strips(arrays, &elements, scratch, |span| self.decoder.verify_strips(span))
    }
}
