//! The parameters of a `tile` tensor, and the lengths of arrays and the parts of strips that follow
//! from them.

use std::ops::Range;

use super::{
    codebook::{HEAD_BYTES, VALUE_BYTES},
    geometry::{MAX_TILE_BYTES, RECORD_BYTES, STREAM_ALIGNMENT, TileGeometry},
    record,
};
use crate::{
    Error, Result,
    encoding::stored::{self, check_range},
    float::FloatSplit,
};

/// The number of the codebook among a tensor's arrays: which pairs have which codes.
pub const CODEBOOK: usize = 0;
/// The number of the records: 32 bytes per tile, and 32 more.
pub const RECORDS: usize = 1;
/// The number of the bitstream: the bits of all tiles, a multiple of 16 bytes.
pub const BITSTREAM: usize = 2;
/// The number of the plane: one byte per weight, or the kept bits of another float than BF16.
pub const PLANE: usize = 3;

/// A tensor whose arrays lie in memory.
pub type EncodedTensor = stored::EncodedTensor<TileSizes, 4>;

/// The most bits of a tensor, and one.
const BIT_COUNT_END: u64 = 1 << 48;
/// The most pairs with codes.
const MAX_CODES: u64 = 4096;

/// How many weights, bits, tiles and strips a tensor has; every size follows.
///
/// Always consistent: no method overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileSizes {
    geometry: TileGeometry,
    bit_count: u64,
    codebook_bytes: u64,
    split: FloatSplit,
}

impl TileSizes {
    /// The sizes that the directory of a file states of a BF16 tensor.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no codebook has this size, where the bit count is not a multiple of 8,
    /// less than the number of pairs or reaches 2^48.
    pub fn new(geometry: TileGeometry, bit_count: u64, codebook_bytes: u64) -> Result<Self> {
        let corrupt = |problem: String| Err(Error::corrupt("tile layout", 0, problem));
        let values = codebook_bytes.checked_sub(HEAD_BYTES as u64);
        let value = VALUE_BYTES as u64;
        if values.is_none_or(|bytes| !bytes.is_multiple_of(value) || bytes / value > MAX_CODES) {
            return corrupt(format!("a codebook of {codebook_bytes} bytes"));
        }
        // Only the last pair of a tensor can have one weight.
        let pairs = geometry.elements().div_ceil(2);
        if bit_count < pairs || !bit_count.is_multiple_of(8) || bit_count >= BIT_COUNT_END {
            return corrupt(format!(
                "{bit_count} bits where a multiple of 8 from {pairs} to below 2^48 is allowed"
            ));
        }
        Ok(Self { geometry, bit_count, codebook_bytes, split: FloatSplit::BF16 })
    }

    /// The same, of a tensor whose floats are split in another way.
    #[must_use]
    pub const fn split_as(self, split: FloatSplit) -> Self {
        Self { split, ..self }
    }

    /// Sizes of a tensor whose record has these parameters, and whose codebook has
    /// `codebook_bytes`.
    ///
    /// # Errors
    /// Like [`TileGeometry::new`] and [`new`](Self::new).
    pub fn of_record(
        [tile_columns, columns, bit_count]: [u64; 3],
        elements: u64,
        codebook_bytes: u64,
    ) -> Result<Self> {
        Self::new(TileGeometry::new(tile_columns, columns, elements)?, bit_count, codebook_bytes)
    }

    /// Tiles and strips.
    pub const fn geometry(&self) -> TileGeometry {
        self.geometry
    }

    /// The number of weights.
    pub const fn elements(&self) -> u64 {
        self.geometry.elements()
    }

    /// How its weights are split.
    pub const fn split(&self) -> FloatSplit {
        self.split
    }

    /// The bits of all tiles, a multiple of 8.
    pub const fn bit_count(&self) -> u64 {
        self.bit_count
    }

    /// The lengths of its arrays in bytes.
    pub const fn array_lengths(&self) -> [u64; 4] {
        [
            self.codebook_bytes,
            RECORD_BYTES as u64 * (self.geometry.tile_count() + 1),
            self.bit_count.div_ceil(8 * STREAM_ALIGNMENT) * STREAM_ALIGNMENT,
            self.split.plane_bytes(self.elements()),
        ]
    }

    /// The strips that hold a range of weights.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the range is empty or reaches beyond the tensor.
    pub fn strips_of(&self, elements: &Range<u64>) -> Result<Range<u64>> {
        check_range("elements", elements, self.elements())?;
        let each = self.geometry.strip_elements();
        Ok(elements.start / each..elements.end.div_ceil(each))
    }

    /// The weights of some strips.
    ///
    /// # Errors
    /// [`Error::Parameter`] if there are no strips, or they exceed the tensor; the other three
    /// functions give the same errors.
    pub fn elements_of(&self, strips: &Range<u64>) -> Result<Range<u64>> {
        check_range("strips", strips, self.geometry.strip_count())?;
        let each = self.geometry.strip_elements();
        Ok(strips.start * each..(strips.end * each).min(self.elements()))
    }

    /// The bytes of the plane of some strips.
    ///
    /// # Errors
    /// As [`elements_of`](Self::elements_of).
    pub fn plane_of(&self, strips: &Range<u64>) -> Result<Range<u64>> {
        let Range { start, end } = self.elements_of(strips)?;
        Ok(self.split.plane_bytes(start)..self.split.plane_bytes(end))
    }

    /// The bytes of the records that some strips need: those of their tiles and the one after.
    ///
    /// # Errors
    /// Like [`elements_of`](Self::elements_of).
    pub fn records_of(&self, strips: &Range<u64>) -> Result<Range<u64>> {
        self.elements_of(strips)?;
        let (tiles, record) = (self.geometry.strip_tiles(), RECORD_BYTES as u64);
        Ok(strips.start * tiles * record..(strips.end * tiles + 1) * record)
    }

    /// The bytes of the bitstream that some strips need, by their records: those of their tiles,
    /// with the last strip all to the end of the array.
    ///
    /// # Errors
    /// Like [`elements_of`](Self::elements_of), and where the records have another size;
    /// [`Error::Corrupt`] if the offsets of the first tile and of the end contradict each other or
    /// the bit count.
    pub fn bitstream_of(&self, records: &[u8], strips: &Range<u64>) -> Result<Range<u64>> {
        let bytes = self.records_of(strips)?;
        let ends = records.first_chunk().zip(records.last_chunk());
        let ends = ends.filter(|_| records.len() as u64 == bytes.end - bytes.start);
        let (first, last) = ends.ok_or_else(|| {
            let problem = "the records are not those of the strips";
            Error::parameter(problem, "pass the part that they name")
        })?;
        let corrupt = |at, problem: &str| Err(Error::corrupt("records", at, problem));
        let (start, end) = (record::offset(first), record::offset(last));
        if !start.is_multiple_of(8) || (strips.start == 0 && start != 0) {
            return corrupt(bytes.start, "offsets must start at 0 and be multiples of 8");
        }
        let is_last = strips.end == self.geometry.strip_count();
        let ascends = start <= end && end <= self.bit_count && end.is_multiple_of(8);
        if !ascends || (is_last && end != self.bit_count) {
            let at = bytes.end - RECORD_BYTES as u64;
            return corrupt(at, "offsets must ascend to the bit count, by whole bytes");
        }
        Ok(start / 8..if is_last { self.array_lengths()[BITSTREAM] } else { end / 8 })
    }
}

/// Checks the offsets of all records, which kernels rely on.
///
/// # Errors
/// [`Error::Corrupt`] if they do not ascend from 0 to the bit count by whole bytes, where a tile
/// has more bits than any has, or the last record has another bit.
pub(crate) fn check_offsets(sizes: &TileSizes, records: &[u8]) -> Result<()> {
    let corrupt = |at: usize, problem: &str| {
        Err(Error::corrupt("records", (at * RECORD_BYTES) as u64, problem))
    };
    let (records, rest) = records.as_chunks::<RECORD_BYTES>();
    if !rest.is_empty() || records.len() as u64 != sizes.geometry.tile_count() + 1 {
        return corrupt(records.len(), "must be one a tile, and one more");
    }
    if record::offset(&records[0]) != 0 {
        return corrupt(0, "offsets must start at 0");
    }
    for (at, pair) in records.windows(2).enumerate() {
        let (start, end) = (record::offset(&pair[0]), record::offset(&pair[1]));
        if !end.is_multiple_of(8) || end < start || end - start > 8 * MAX_TILE_BYTES as u64 {
            let problem = "offsets must ascend by whole bytes, and by no more than a tile's bits";
            return corrupt(at + 1, problem);
        }
    }
    if records.last() == Some(&record::last(sizes.bit_count())) {
        return Ok(());
    }
    corrupt(records.len() - 1, "the last record must be the bit count alone")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(offsets: &[u64]) -> Vec<u8> {
        offsets.iter().flat_map(|&offset| record::last(offset)).collect()
    }

    #[test]
    fn offsets_are_those_of_the_sizes() {
        let sizes =
            TileSizes::new(TileGeometry::new(8192, 20_000, 20_000).unwrap(), 16_000, 26 + 4)
                .unwrap();
        let right = [0, 4000, 8000, 16_000];
        check_offsets(&sizes, &records(&right)).unwrap();
        for (at, wrong) in [(0, 8), (1, 4001), (1, 9000), (2, 1 << 40), (3, 15_992)] {
            let mut offsets = right;
            offsets[at] = wrong;
            assert!(check_offsets(&sizes, &records(&offsets)).is_err(), "{offsets:?}");
        }
        let mut last = records(&right);
        last[3 * RECORD_BYTES + 31] = 1;
        assert!(check_offsets(&sizes, &last).is_err());
        assert!(check_offsets(&sizes, &last[..RECORD_BYTES * 3]).is_err());
    }
}
