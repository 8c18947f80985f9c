//! Tensors whose four arrays lie in memory: encoded, decoded or cut without a container.

use std::{borrow::Cow, ops::Range};

use rayon::prelude::*;

use super::{
    codebook::Codebook,
    decode::{Span, TileDecoder},
    encode::{EncodedStrips, Encoder},
    geometry::{Geometry, RECORD_BYTES, TILE_COLUMNS},
    histogram::PairHistogram,
    record,
    sizes::{Sizes, check_offsets},
    stored::{BITSTREAM, CODEBOOK, PLANE, RECORDS},
};
use crate::{Error, Result, encoding::stored::part, parallel};

/// The arrays of a BF16 matrix, in their order in the format, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub struct Arrays<'a> {
    sizes: Sizes,
    arrays: [&'a [u8]; 4],
}

/// The arrays of a matrix of its own, in their order in the format.
pub type OwnedArrays = [Vec<u8>; 4];

impl<'a> Arrays<'a> {
    /// Of a matrix with these rows and columns. Looks at lengths and at the last record, not at the
    /// rest.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no matrix in tiles of 32 x 256 has such a shape, or arrays of such
    /// lengths.
    pub fn new(rows: u64, columns: u64, arrays: [&'a [u8]; 4]) -> Result<Self> {
        let [codebook, records, bitstream, plane] = arrays;
        let corrupt = |problem: String| Err(Error::corrupt("tile layout", 0, problem));
        let Some(elements) = rows.checked_mul(columns) else {
            return corrupt(format!("{rows} x {columns} weights"));
        };
        let geometry = Geometry::new(TILE_COLUMNS[0], columns, elements)?;
        let Some(last) = records.last_chunk::<RECORD_BYTES>() else {
            return corrupt("no records".into());
        };
        let sizes = Sizes::new(geometry, record::offset(last), codebook.len() as u64)?;
        let lengths = [records, bitstream, plane].map(|array| array.len() as u64);
        let expected = [sizes.records_bytes(), sizes.bitstream_bytes(), sizes.plane_bytes()];
        if lengths != expected {
            return corrupt(format!("arrays of {lengths:?} bytes where {expected:?} are expected"));
        }
        Ok(Self { sizes, arrays })
    }

    /// The number of rows.
    pub const fn rows(&self) -> u64 {
        self.sizes.geometry().rows()
    }

    /// The number of columns.
    pub const fn columns(&self) -> u64 {
        self.sizes.geometry().columns()
    }

    /// The most bytes of the bitstream that a tile takes, from the 16 bytes with its first bit to
    /// those with its last one: what kernels need to know.
    pub fn staged_bytes(&self) -> u32 {
        // No truncation: it is less than a tile has at most.
        record::staged_bytes(self.arrays[RECORDS]) as u32
    }

    /// Checks what kernels rely on: the codebook, and that offsets ascend.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn check(&self) -> Result<()> {
        Codebook::from_bytes(self.arrays[CODEBOOK])?;
        check_offsets(&self.sizes, self.arrays[RECORDS])
    }

    /// Decodes some columns of some rows into little-endian BF16, row by row, on the current pool.
    /// Tiles that hold none of them are not decoded.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the arrays contradict themselves: then `weights` holds anything.
    /// [`Error::Parameter`] for rows or columns that do not exist, and another size of `weights`.
    pub fn decode(&self, rows: Range<u64>, columns: Range<u64>, weights: &mut [u8]) -> Result<()> {
        self.sizes.geometry().check_window(&rows, &columns)?;
        let each = self.sizes.geometry().tile_rows();
        self.decode_runs(parallel::cut(rows, each, each).collect(), &columns, weights)
    }

    /// Decodes some columns of rows by their numbers, one after the other, as
    /// [`decode`](Self::decode) does.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn gather(&self, rows: &[u64], columns: Range<u64>, weights: &mut [u8]) -> Result<()> {
        let rows: Vec<_> = rows.iter().map(|&row| row..row.saturating_add(1)).collect();
        let geometry = self.sizes.geometry();
        rows.iter().try_for_each(|row| geometry.check_window(row, &columns))?;
        self.decode_runs(rows, &columns, weights)
    }

    /// Decodes columns of runs of rows, each within a strip.
    fn decode_runs(
        &self,
        runs: Vec<Range<u64>>,
        columns: &Range<u64>,
        weights: &mut [u8],
    ) -> Result<()> {
        let row_bytes = 2 * (columns.end - columns.start);
        let rows: u64 = runs.iter().map(|rows| rows.end - rows.start).sum();
        Error::unless(weights.len() as u64 == rows * row_bytes, || {
            let problem = format!("{} bytes for {rows} rows x {columns:?}", weights.len());
            Error::parameter(problem, "pass two bytes for each weight")
        })?;
        let decoder = self.decoder()?;
        let lengths = runs.iter().map(|rows| row_bytes * (rows.end - rows.start));
        let outs: Vec<_> = parallel::split(weights, lengths).collect();
        runs.into_par_iter().zip(outs).try_for_each(|(rows, out)| {
            let strip = rows.start / self.sizes.geometry().tile_rows();
            decoder.decode_columns(&self.span(strip..strip + 1)?, rows, columns.clone(), out)
        })
    }

    fn decoder(&self) -> Result<TileDecoder> {
        Ok(TileDecoder::new(&Codebook::from_bytes(self.arrays[CODEBOOK])?, &self.sizes))
    }

    /// Some rows and columns as a matrix of its own, without decoding: rows from a multiple of 32
    /// to one or to the end, columns likewise of 256. A valid tensor, as `spec/gpu.md`, part 4,
    /// says.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows or columns; [`Error::Corrupt`] if offsets contradict
    /// themselves.
    pub fn cut(&self, rows: Range<u64>, columns: Range<u64>) -> Result<OwnedArrays> {
        let [codebook, records, ..] = self.arrays;
        let read = |array: usize, range| part(self.arrays[array], range).map(Cow::Borrowed);
        cut(&self.sizes, (codebook, records), rows, columns, read)
    }

    fn span(&self, strips: Range<u64>) -> Result<Span<'a>> {
        let [_, records, bitstream, plane] = self.arrays;
        let records = part(records, self.sizes.records_of(&strips)?)?;
        let bitstream = part(bitstream, self.sizes.bitstream_of(records, &strips)?)?;
        let plane = part(plane, self.sizes.plane_of(&strips)?)?;
        Ok(Span { strips, records, bitstream, plane })
    }
}

/// As [`Arrays::cut`], of arrays that are read some bytes at a time: `read`, which gets an array's
/// number, is asked for nothing else than what the result holds, strip by strip.
///
/// # Errors
/// As [`Arrays::cut`], and those of `read`.
pub(crate) fn cut<'a>(
    sizes: &Sizes,
    (codebook, records): (&[u8], &[u8]),
    rows: Range<u64>,
    columns: Range<u64>,
    mut read: impl FnMut(usize, Range<u64>) -> Result<Cow<'a, [u8]>>,
) -> Result<OwnedArrays> {
    let geometry = sizes.geometry();
    geometry.check_window(&rows, &columns)?;
    let between = |range: &Range<u64>, grain: u64, count| {
        range.start.is_multiple_of(grain) && (range.end.is_multiple_of(grain) || range.end == count)
    };
    let (high, wide) = (geometry.tile_rows(), geometry.tile_columns());
    let is_between =
        between(&rows, high, geometry.rows()) && between(&columns, wide, geometry.columns());
    Error::unless(is_between, || {
        let problem = format!("rows {rows:?} and columns {columns:?} begin or end within tiles");
        Error::parameter(problem, "cut at multiples of 32 rows and 256 columns")
    })?;
    check_offsets(sizes, records)?;
    let all = records.as_chunks::<RECORD_BYTES>().0;
    let weights = (rows.end - rows.start) * (columns.end - columns.start);
    let (mut kept, mut bitstream) = (Vec::new(), Vec::with_capacity(weights as usize / 3));
    let mut plane = Vec::with_capacity(weights as usize);
    for strip in rows.start / high..rows.end.div_ceil(high) {
        let first = (strip * geometry.strip_tiles() + columns.start / wide) as usize;
        let end = (strip * geometry.strip_tiles() + columns.end.div_ceil(wide)) as usize;
        let bytes = [first, end].map(|at| record::offset(&all[at]) / 8);
        for mut one in all[first..end].iter().copied() {
            let offset = record::offset(&one) - 8 * bytes[0] + 8 * bitstream.len() as u64;
            record::set_offset(&mut one, offset);
            kept.extend(one);
        }
        bitstream.extend_from_slice(&read(BITSTREAM, bytes[0]..bytes[1])?);
        let height = high.min(geometry.rows() - strip * high);
        let from = strip * high * geometry.columns() + columns.start * height;
        plane.extend_from_slice(&read(PLANE, from..from + (columns.end - columns.start) * height)?);
    }
    kept.extend(record::last(8 * bitstream.len() as u64));
    bitstream.resize(bitstream.len().next_multiple_of(16), 0);
    Ok([codebook.to_vec(), kept, bitstream, plane])
}

/// The four arrays of a tensor, and the numbers that its directory record holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedTensor {
    /// Elements, bits, tiles.
    pub sizes: Sizes,
    /// The code.
    pub codebook: Vec<u8>,
    /// 32 bytes a tile, and 32 more.
    pub records: Vec<u8>,
    /// The bits of all tiles.
    pub bitstream: Vec<u8>,
    /// One byte a weight.
    pub plane: Vec<u8>,
}

/// Encodes `n` little-endian BF16 weights (`2n` bytes), strip by strip.
///
/// # Errors
/// [`Error::Parameter`] if `weights` are not as many as the geometry's elements.
pub fn encode_tensor(weights: &[u8], geometry: Geometry) -> Result<EncodedTensor> {
    if weights.len() as u64 != 2 * geometry.elements() {
        let problem = "the weights are not those of the geometry";
        return Err(Error::parameter(problem, "pass a whole tensor"));
    }
    let mut histogram = PairHistogram::new();
    histogram.add(weights);
    let codebook = Codebook::from_histogram(&histogram)?;
    let encoder = Encoder::new(&codebook, geometry);
    let mut output = EncodedStrips::default();
    let mut bytes = 0;
    for (strip, weights) in (0..).zip(weights.chunks(2 * geometry.strip_elements() as usize)) {
        encoder.encode_strip(strip, weights, bytes, &mut output)?;
        bytes += encoder.strip_bytes(strip, weights)?;
    }
    let codebook = codebook.to_bytes();
    let sizes = Sizes::new(geometry, 8 * bytes, codebook.len() as u64)?;
    let EncodedStrips { records, bitstream, plane } = output;
    Ok(EncodedTensor { sizes, codebook, records, bitstream, plane })
}

impl EncodedTensor {
    fn arrays(&self) -> Arrays<'_> {
        let Self { sizes, codebook, records, bitstream, plane } = self;
        Arrays { sizes: *sizes, arrays: [codebook, records, bitstream, plane] }
    }

    /// The parts of the arrays that some strips need.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the strips are none or reach beyond the tensor, or an array is
    /// shorter than its size; [`Error::Corrupt`] as [`Sizes::bitstream_of`].
    pub fn span(&self, strips: Range<u64>) -> Result<Span<'_>> {
        self.arrays().span(strips)
    }

    /// Decodes a range of weights into little-endian BF16.
    ///
    /// # Errors
    /// As [`TileDecoder::decode_strips`], [`Codebook::from_bytes`] and [`span`](Self::span).
    pub fn decode(&self, elements: Range<u64>) -> Result<Vec<u8>> {
        let span = self.span(self.sizes.strips_of(&elements)?)?;
        let mut weights = vec![0; 2 * (elements.end - elements.start) as usize];
        self.arrays().decoder()?.decode_strips(&span, elements, &mut weights)?;
        Ok(weights)
    }

    /// Verifies all strips, `strips_a_span` at a time.
    ///
    /// # Errors
    /// As [`TileDecoder::verify_strips`], [`Codebook::from_bytes`] and [`span`](Self::span).
    pub fn verify(&self, strips_a_span: u64) -> Result<()> {
        let decoder = self.arrays().decoder()?;
        parallel::cut(0..self.sizes.strip_count(), strips_a_span, 1)
            .try_for_each(|strips| decoder.verify_strips(&self.span(strips)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(rows: u64, columns: u64) -> Vec<u8> {
        // Mostly common exponents, some of all others.
        let weight = |at: u64| {
            let noise = (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u16;
            if at.is_multiple_of(97) { noise } else { noise & 0x81FF | 0x3C00 }
        };
        (0..rows * columns).flat_map(|at| weight(at).to_le_bytes()).collect()
    }

    fn encoded(rows: u64, columns: u64) -> (Vec<u8>, OwnedArrays) {
        let weights = weights(rows, columns);
        let tensor =
            encode_tensor(&weights, Geometry::new(256, columns, rows * columns).unwrap()).unwrap();
        (weights, [tensor.codebook, tensor.records, tensor.bitstream, tensor.plane])
    }

    fn view(arrays: &OwnedArrays) -> [&[u8]; 4] {
        arrays.each_ref().map(Vec::as_slice)
    }

    fn part(
        weights: &[u8],
        columns: u64,
        rows: &std::ops::Range<u64>,
        of: &std::ops::Range<u64>,
    ) -> Vec<u8> {
        let row = |row| {
            (2 * (row * columns + of.start)) as usize..(2 * (row * columns + of.end)) as usize
        };
        rows.clone().flat_map(|at| weights[row(at)].to_vec()).collect()
    }

    #[test]
    fn any_window_is_decoded() {
        let (weights, arrays) = encoded(77, 1000);
        let matrix = Arrays::new(77, 1000, view(&arrays)).unwrap();
        matrix.check().unwrap();
        for (rows, columns) in
            [(0..77, 0..1000), (5..6, 0..1000), (31..70, 250..520), (64..77, 992..1000)]
        {
            let mut out =
                vec![0; (2 * (rows.end - rows.start) * (columns.end - columns.start)) as usize];
            matrix.decode(rows.clone(), columns.clone(), &mut out).unwrap();
            assert!(out == part(&weights, 1000, &rows, &columns), "{rows:?} {columns:?}");
        }
        assert!(
            matrix.decode(0..78, 0..1000, &mut []).is_err()
                && matrix.decode(3..3, 0..8, &mut []).is_err()
        );
        assert!(matrix.decode(0..1, 0..8, &mut [0; 15]).is_err());
    }

    #[test]
    fn rows_are_gathered_by_their_numbers() {
        let (weights, arrays) = encoded(77, 1000);
        let matrix = Arrays::new(77, 1000, view(&arrays)).unwrap();
        for (rows, columns) in
            [(&[3, 76, 0, 3, 40][..], 0..1000), (&[64, 1], 250..520), (&[], 0..8)]
        {
            let mut out = vec![0; rows.len() * 2 * (columns.end - columns.start) as usize];
            matrix.gather(rows, columns.clone(), &mut out).unwrap();
            let row = |&row: &u64| part(&weights, 1000, &(row..row + 1), &columns);
            assert!(out == rows.iter().flat_map(row).collect::<Vec<u8>>(), "{rows:?} {columns:?}");
        }
        assert!(matrix.gather(&[77], 0..8, &mut [0; 16]).is_err());
        assert!(matrix.gather(&[u64::MAX], 0..8, &mut [0; 16]).is_err());
        assert!(matrix.gather(&[0], 0..8, &mut [0; 15]).is_err());
    }

    #[test]
    fn cuts_are_tensors_of_their_own() {
        let (weights, arrays) = encoded(77, 1000);
        let matrix = Arrays::new(77, 1000, view(&arrays)).unwrap();
        for (rows, columns) in
            [(0..77, 0..1000), (32..77, 0..1000), (32..64, 256..768), (64..77, 768..1000)]
        {
            let cut = matrix.cut(rows.clone(), columns.clone()).unwrap();
            let (high, wide) = (rows.end - rows.start, columns.end - columns.start);
            let own = Arrays::new(high, wide, view(&cut)).unwrap();
            own.check().unwrap();
            let mut out = vec![0; (2 * high * wide) as usize];
            own.decode(0..high, 0..wide, &mut out).unwrap();
            assert!(out == part(&weights, 1000, &rows, &columns), "{rows:?} {columns:?}");
        }
        assert!(matrix.cut(0..33, 0..1000).is_err() && matrix.cut(0..32, 8..256).is_err());
    }

    #[test]
    fn arrays_of_other_lengths_are_refused() {
        let (_, arrays) = encoded(40, 264);
        assert!(Arrays::new(40, 264, view(&arrays)).is_ok());
        assert!(
            Arrays::new(48, 264, view(&arrays)).is_err()
                && Arrays::new(40, 272, view(&arrays)).is_err()
        );
        assert!(
            Arrays::new(u64::MAX, 264, view(&arrays)).is_err()
                && Arrays::new(40, 260, view(&arrays)).is_err()
        );
        for array in 1..4 {
            let mut short = arrays.clone();
            short[array].pop();
            assert!(Arrays::new(40, 264, view(&short)).is_err());
            short[array].clear();
            assert!(Arrays::new(40, 264, view(&short)).is_err());
        }
    }
}
