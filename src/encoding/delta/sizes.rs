//! The parameters of a `delta` tensor, and the segments and lengths of arrays that follow from
//! them.

use std::ops::Range;

use super::codebook::{MAX_BYTES, MIN_BYTES};
use crate::{Error, Result};

/// The number of the codebook among a tensor's arrays.
pub const CODEBOOK: usize = 0;
/// The number of the records: where each segment starts, and the last one ends.
pub const RECORDS: usize = 1;
/// The number of the bitstream: all segments.
pub const BITSTREAM: usize = 2;

/// Bytes of a record.
pub(super) const RECORD_BYTES: u64 = 8;
/// The fewest bytes of a segment: the number of its words, and its states.
pub(super) const MIN_SEGMENT_BYTES: u64 = 4 + 4 * 8;
/// Alignment of segments, in bytes.
pub(super) const SEGMENT_ALIGNMENT: u64 = 4;
/// Weights of a segment, or up to as many rows more as are decoded together.
const SEGMENT_ELEMENTS: u64 = 1 << 18;
/// Rows that other encodings decode together.
const ROWS: u64 = 32;
/// Wider matrices have segments that do not end with rows.
const MAX_ROWS_ELEMENTS: u64 = 1 << 23;

/// Weights of each segment but the last, of a tensor of this shape: whole strips of its base.
pub fn segment_elements(shape: &[u64]) -> u64 {
    let row = if shape.len() >= 4 { 1 } else { shape.len().saturating_sub(1) };
    let rows = shape[row..].iter().fold(ROWS, |product: u64, &size| product.saturating_mul(size));
    if rows > MAX_ROWS_ELEMENTS {
        SEGMENT_ELEMENTS
    } else {
        SEGMENT_ELEMENTS.next_multiple_of(rows)
    }
}

/// How many weights and bytes a tensor has; every size follows.
///
/// Always consistent: no method overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSizes {
    base: [u8; 32],
    pub(super) elements: u64,
    segment_elements: u64,
    pub(super) codebook_bytes: u64,
    pub(super) bitstream_bytes: u64,
}

impl DeltaSizes {
    /// The sizes of a tensor of this shape and number of weights, whose base has this hash and
    /// whose arrays have these lengths in bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it has no weights, or no such arrays can be.
    pub fn new(
        base: [u8; 32],
        (shape, elements): (&[u64], u64),
        codebook_bytes: u64,
        bitstream_bytes: u64,
    ) -> Result<Self> {
        let corrupt = |problem: String| Error::corrupt("delta layout", 0, problem);
        Error::unless(elements > 0, || corrupt("a tensor without elements must be raw".into()))?;
        let fits = (MIN_BYTES..=MAX_BYTES).contains(&codebook_bytes);
        Error::unless(fits, || corrupt(format!("a codebook of {codebook_bytes} bytes")))?;
        let segment_elements = segment_elements(shape);
        let segments = elements.div_ceil(segment_elements);
        // Fewer than 2^46, so this does not overflow.
        let fits = bitstream_bytes.is_multiple_of(SEGMENT_ALIGNMENT)
            && bitstream_bytes >= segments * MIN_SEGMENT_BYTES;
        Error::unless(fits, || {
            corrupt(format!("{bitstream_bytes} bytes of codes in {segments} segments"))
        })?;
        Ok(Self { base, elements, segment_elements, codebook_bytes, bitstream_bytes })
    }

    /// The hash of the base.
    pub const fn base(&self) -> [u8; 32] {
        self.base
    }

    /// The number of segments.
    pub const fn segment_count(&self) -> u64 {
        self.elements.div_ceil(self.segment_elements)
    }

    /// The weights of a segment that exists.
    pub fn segment(&self, segment: u64) -> Range<u64> {
        let start = segment * self.segment_elements;
        start..self.elements.min(start + self.segment_elements)
    }

    /// Weights of each segment but the last.
    pub const fn segment_elements(&self) -> u64 {
        self.segment_elements
    }

    /// Where a segment lies in the bitstream, by its record and the next.
    pub(super) fn place(&self, segment: u64, records: &[[u8; 8]; 2]) -> Result<Range<u64>> {
        let [start, end] = records.map(u64::from_le_bytes);
        let is_aligned = start.is_multiple_of(SEGMENT_ALIGNMENT);
        let is_long = end.checked_sub(start).is_some_and(|bytes| bytes >= MIN_SEGMENT_BYTES);
        let is_first = segment != 0 || start == 0;
        let is_last = segment + 1 != self.segment_count() || end == self.bitstream_bytes;
        let is_within = end.is_multiple_of(SEGMENT_ALIGNMENT) && end <= self.bitstream_bytes;
        Error::unless(is_aligned && is_long && is_first && is_last && is_within, || {
            let problem = "offsets must ascend from 0 to the end by whole segments";
            Error::corrupt("records", segment * RECORD_BYTES, problem)
        })?;
        Ok(start..end)
    }
}
