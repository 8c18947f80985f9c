//! Matrices whose four arrays are in memory: decodes or cuts them without a container.

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use super::{
    geometry::{RECORD_BYTES, TILE_COLUMNS, TileGeometry},
    record,
    sizes::{BITSTREAM, CODEBOOK, PLANE, RECORDS, TileSizes, check_offsets},
};
use crate::{
    Error, Result,
    encoding::stored::{CodedSizes, ReadArrays, Scratch},
    float::FloatSplit,
    parallel,
};

/// The arrays of a matrix, in their order in the format, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub struct Arrays<'a> {
    sizes: TileSizes,
    arrays: [&'a [u8]; 4],
}

/// The arrays of a matrix of its own, in their order in the format.
pub type OwnedArrays = [Vec<u8>; 4];

impl<'a> Arrays<'a> {
    /// Takes the arrays of a matrix with these rows and columns, whose weights are split like this.
    /// Checks their lengths and the last record only.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no matrix in tiles of 32 x 256 has such a shape, or arrays of such
    /// lengths.
    pub fn new(rows: u64, columns: u64, split: FloatSplit, arrays: [&'a [u8]; 4]) -> Result<Self> {
        let corrupt = |problem: String| Err(Error::corrupt("tile layout", 0, problem));
        let Some(elements) = rows.checked_mul(columns) else {
            return corrupt(format!("{rows} x {columns} weights"));
        };
        let geometry = TileGeometry::new(TILE_COLUMNS[0], columns, elements)?;
        let Some(last) = arrays[RECORDS].last_chunk::<RECORD_BYTES>() else {
            return corrupt("no records".into());
        };
        let sizes = TileSizes::new(geometry, record::offset(last), arrays[CODEBOOK].len() as u64)?
            .split_as(split);
        let lengths = arrays.map(|array| array.len() as u64);
        let expected = sizes.array_lengths();
        if lengths != expected {
            return corrupt(format!("arrays of {lengths:?} bytes where {expected:?} are expected"));
        }
        Ok(Self { sizes, arrays })
    }

    /// The most bytes of the bitstream that a tile takes, from the 16 bytes with its first bit to
    /// those with its last one: what kernels need to know.
    pub fn staged_bytes(&self) -> u32 {
        record::staged_bytes(self.arrays[RECORDS])
    }

    /// Decodes some columns of some rows into little-endian weights, row by row, on the current
    /// pool. Tiles that hold none of them are not decoded.
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
    /// Like [`decode`](Self::decode).
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
        let row_bytes = self.sizes.weight_bytes() * (columns.end - columns.start);
        let rows: u64 = runs.iter().map(|rows| rows.end - rows.start).sum();
        Error::unless(weights.len() as u64 == rows * row_bytes, || {
            let problem = format!("{} bytes for {rows} rows x {columns:?}", weights.len());
            Error::parameter(problem, "pass as many bytes for each weight as its dtype has")
        })?;
        let decoder = self.sizes.prepare(&self.arrays)?;
        let lengths = runs.iter().map(|rows| row_bytes * (rows.end - rows.start));
        let outs: Vec<_> = parallel::split(weights, lengths).collect();
        runs.into_par_iter().zip(outs).try_for_each(|(rows, out)| {
            let part = (rows, columns.clone(), self.sizes.geometry().columns());
            decoder.decode_columns(&self.arrays, part, &mut Scratch::default(), out)
        })
    }

    /// Some rows and columns as a matrix of its own, without decoding: rows from a multiple of 32
    /// to one or to the end, columns likewise of 256. A valid tensor, as `spec/gpu.md`, part 4,
    /// says.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows or columns; [`Error::Corrupt`] if offsets contradict
    /// themselves.
    pub fn cut(&self, rows: Range<u64>, columns: Range<u64>) -> Result<OwnedArrays> {
        cut(&self.sizes, &self.arrays, rows, columns)
    }
}

/// Like [`Arrays::cut`], of arrays that are read some bytes at a time: besides codebook and records
/// nothing else than what the result holds, strip by strip.
///
/// # Errors
/// Like [`Arrays::cut`], and what reading answers.
pub(crate) fn cut(
    sizes: &TileSizes,
    arrays: &dyn ReadArrays<'_>,
    rows: Range<u64>,
    columns: Range<u64>,
) -> Result<OwnedArrays> {
    let records = records_of_cut(sizes, arrays, &rows, &columns)?;
    let codebook = sizes.read_whole(arrays, CODEBOOK)?;
    let geometry = sizes.geometry();
    let high = geometry.tile_rows();
    let all = records.as_chunks::<RECORD_BYTES>().0;
    let weights = (rows.end - rows.start) * (columns.end - columns.start);
    let (mut kept, mut bitstream) = (Vec::new(), Vec::with_capacity(weights as usize / 3));
    let mut plane = Vec::with_capacity(sizes.split().plane_bytes(weights) as usize);
    for strip in rows.start / high..rows.end.div_ceil(high) {
        let tiles = tiles_of_strip(sizes, strip, &columns);
        let bytes = [tiles.start, tiles.end].map(|at| record::offset(&all[at]) / 8);
        for mut one in all[tiles].iter().copied() {
            let offset = record::offset(&one) - 8 * bytes[0] + 8 * bitstream.len() as u64;
            record::set_offset(&mut one, offset);
            kept.extend(one);
        }
        bitstream.extend_from_slice(&arrays.read(BITSTREAM, bytes[0]..bytes[1])?);
        let height = high.min(geometry.rows() - strip * high);
        let from = strip * high * geometry.columns() + columns.start * height;
        let end = from + (columns.end - columns.start) * height;
        // Whole units, since columns are a multiple of 8.
        let [from, end] = [from, end].map(|weights| sizes.split().plane_bytes(weights));
        plane.extend_from_slice(&arrays.read(PLANE, from..end)?);
    }
    kept.extend(record::last(8 * bitstream.len() as u64));
    bitstream.resize(bitstream.len().next_multiple_of(16), 0);
    Ok([codebook.into_owned(), kept, bitstream, plane])
}

/// The lengths of the arrays of [`cut`]; reads records alone.
///
/// # Errors
/// Like [`cut`].
pub(crate) fn cut_lengths(
    sizes: &TileSizes,
    arrays: &dyn ReadArrays<'_>,
    rows: Range<u64>,
    columns: Range<u64>,
) -> Result<[u64; 4]> {
    let records = records_of_cut(sizes, arrays, &rows, &columns)?;
    let (all, high) = (records.as_chunks::<RECORD_BYTES>().0, sizes.geometry().tile_rows());
    let (mut count, mut bits) = (0, 0);
    for strip in rows.start / high..rows.end.div_ceil(high) {
        let tiles = tiles_of_strip(sizes, strip, &columns);
        count += tiles.len();
        bits += record::offset(&all[tiles.end]) - record::offset(&all[tiles.start]);
    }
    let weights = (rows.end - rows.start) * (columns.end - columns.start);
    let plane = sizes.split().plane_bytes(weights);
    let [codebook, ..] = sizes.array_lengths();
    let records = ((count + 1) * RECORD_BYTES) as u64;
    Ok([codebook, records, (bits / 8).next_multiple_of(16), plane])
}

/// Reads and checks the records of a matrix of which these rows and columns can be cut out.
fn records_of_cut<'a>(
    sizes: &TileSizes,
    arrays: &dyn ReadArrays<'a>,
    rows: &Range<u64>,
    columns: &Range<u64>,
) -> Result<Cow<'a, [u8]>> {
    let geometry = sizes.geometry();
    geometry.check_window(rows, columns)?;
    let between = |range: &Range<u64>, grain: u64, count| {
        range.start.is_multiple_of(grain) && (range.end.is_multiple_of(grain) || range.end == count)
    };
    let (high, wide) = (geometry.tile_rows(), geometry.tile_columns());
    let is_between =
        between(rows, high, geometry.rows()) && between(columns, wide, geometry.columns());
    Error::unless(is_between, || {
        let problem = format!("rows {rows:?} and columns {columns:?} begin or end within tiles");
        Error::parameter(problem, "cut at multiples of 32 rows and 256 columns")
    })?;
    let records = sizes.read_whole(arrays, RECORDS)?;
    check_offsets(sizes, &records)?;
    Ok(records)
}

/// The tiles of a strip that hold these columns.
fn tiles_of_strip(sizes: &TileSizes, strip: u64, columns: &Range<u64>) -> Range<usize> {
    let (geometry, wide) = (sizes.geometry(), sizes.geometry().tile_columns());
    let first = strip * geometry.strip_tiles();
    let [start, end] = [columns.start / wide, columns.end.div_ceil(wide)];
    (first + start) as usize..(first + end) as usize
}

#[cfg(test)]
mod tests {
    use super::{super::encode_floats, *};
    use crate::float::tests::splits;

    const BF16: FloatSplit = FloatSplit::BF16;

    fn weights(split: FloatSplit, rows: u64, columns: u64) -> Vec<u8> {
        // Mostly common exponents, some of all others.
        let weight = |at: u64| {
            let noise = at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 24;
            let all = if at.is_multiple_of(97) { 0xFF } else { 3 };
            let exponent = noise >> 32 & all & ((1 << split.exponent_bits()) - 1);
            split.weight(exponent as u8, noise as u32 & ((1 << split.kept_bits()) - 1))
        };
        let bytes = |at| weight(at).to_le_bytes().into_iter().take(split.bytes());
        (0..rows * columns).flat_map(bytes).collect()
    }

    fn encoded(split: FloatSplit, rows: u64, columns: u64) -> (Vec<u8>, OwnedArrays) {
        let weights = weights(split, rows, columns);
        let geometry = TileGeometry::new(256, columns, rows * columns).unwrap();
        let tensor = encode_floats(&weights, split, geometry).unwrap();
        (weights, tensor.arrays)
    }

    fn view(arrays: &OwnedArrays) -> [&[u8]; 4] {
        arrays.each_ref().map(Vec::as_slice)
    }

    fn part(
        weights: &[u8],
        (each, columns): (u64, u64),
        rows: &std::ops::Range<u64>,
        of: &std::ops::Range<u64>,
    ) -> Vec<u8> {
        let row = |row| {
            let [start, end] = [of.start, of.end].map(|at| (each * (row * columns + at)) as usize);
            start..end
        };
        rows.clone().flat_map(|at| weights[row(at)].to_vec()).collect()
    }

    #[test]
    fn any_window_is_decoded() {
        for split in splits() {
            let (each, (weights, arrays)) = (split.bytes() as u64, encoded(split, 77, 1000));
            let matrix = Arrays::new(77, 1000, split, view(&arrays)).unwrap();
            check_offsets(&matrix.sizes, matrix.arrays[RECORDS]).unwrap();
            for (rows, columns) in
                [(0..77, 0..1000), (5..6, 0..1000), (31..70, 250..520), (64..77, 992..1000)]
            {
                let count = (rows.end - rows.start) * (columns.end - columns.start);
                let mut out = vec![0; (each * count) as usize];
                matrix.decode(rows.clone(), columns.clone(), &mut out).unwrap();
                let expected = part(&weights, (each, 1000), &rows, &columns);
                assert!(out == expected, "{split:?} {rows:?} {columns:?}");
            }
            assert!(
                matrix.decode(0..78, 0..1000, &mut []).is_err()
                    && matrix.decode(3..3, 0..8, &mut []).is_err()
            );
            let mut short = vec![0; 8 * split.bytes() - 1];
            assert!(matrix.decode(0..1, 0..8, &mut short).is_err());
        }
    }

    #[test]
    fn rows_are_gathered_by_their_numbers() {
        for split in splits() {
            let (each, (weights, arrays)) = (split.bytes() as u64, encoded(split, 77, 1000));
            let matrix = Arrays::new(77, 1000, split, view(&arrays)).unwrap();
            for (rows, columns) in
                [(&[3, 76, 0, 3, 40][..], 0..1000), (&[64, 1], 250..520), (&[], 0..8)]
            {
                let count = rows.len() as u64 * (columns.end - columns.start);
                let mut out = vec![0; (each * count) as usize];
                matrix.gather(rows, columns.clone(), &mut out).unwrap();
                let row = |&row: &u64| part(&weights, (each, 1000), &(row..row + 1), &columns);
                let expected = rows.iter().flat_map(row).collect::<Vec<u8>>();
                assert!(out == expected, "{split:?} {rows:?} {columns:?}");
            }
            let mut room = vec![0; 8 * split.bytes()];
            assert!(matrix.gather(&[77], 0..8, &mut room).is_err());
            assert!(matrix.gather(&[u64::MAX], 0..8, &mut room).is_err());
            room.pop();
            assert!(matrix.gather(&[0], 0..8, &mut room).is_err());
        }
    }

    #[test]
    fn cuts_are_tensors_of_their_own() {
        for split in splits() {
            let (each, (weights, arrays)) = (split.bytes() as u64, encoded(split, 77, 1000));
            let matrix = Arrays::new(77, 1000, split, view(&arrays)).unwrap();
            for (rows, columns) in
                [(0..77, 0..1000), (32..77, 0..1000), (32..64, 256..768), (64..77, 768..1000)]
            {
                let cut = matrix.cut(rows.clone(), columns.clone()).unwrap();
                let lengths =
                    cut_lengths(&matrix.sizes, &matrix.arrays, rows.clone(), columns.clone());
                assert_eq!(lengths.unwrap(), cut.each_ref().map(|array| array.len() as u64));
                let (high, wide) = (rows.end - rows.start, columns.end - columns.start);
                let own = Arrays::new(high, wide, split, view(&cut)).unwrap();
                check_offsets(&own.sizes, own.arrays[RECORDS]).unwrap();
                let mut out = vec![0; (each * high * wide) as usize];
                own.decode(0..high, 0..wide, &mut out).unwrap();
                let expected = part(&weights, (each, 1000), &rows, &columns);
                assert!(out == expected, "{split:?} {rows:?} {columns:?}");
            }
            assert!(matrix.cut(0..33, 0..1000).is_err() && matrix.cut(0..32, 8..256).is_err());
        }
    }

    #[test]
    fn arrays_of_other_lengths_are_refused() {
        let (_, arrays) = encoded(BF16, 40, 264);
        let new = |rows, columns, arrays: &OwnedArrays| {
            Arrays::new(rows, columns, BF16, view(arrays)).is_ok()
        };
        assert!(new(40, 264, &arrays));
        assert!(!new(48, 264, &arrays) && !new(40, 272, &arrays));
        assert!(!new(u64::MAX, 264, &arrays) && !new(40, 260, &arrays));
        for array in 1..4 {
            let mut short = arrays.clone();
            short[array].pop();
            assert!(!new(40, 264, &short));
            short[array].clear();
            assert!(!new(40, 264, &short));
        }
        // The plane is that of another split.
        for other in splits().filter(|split| split.kept_bits() != BF16.kept_bits()) {
            assert!(Arrays::new(40, 264, other, view(&arrays)).is_err(), "{other:?}");
        }
    }
}
