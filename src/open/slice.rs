//! Slices of tensors: the wanted indices in each of the first dimensions.
//!
//! ```text
//!            columns             the last dimension that is not wanted whole, with those after it
//!          ┌────┬──────┬────┐
//!     rows │    │wanted│    │        the dimensions before it
//!          └────┴──────┴────┘
//!            width
//! ```
//! Decoders see a tensor of any rank as such a matrix. A [`Slice::rects`] item has consecutive
//! wanted rows, and [`Rect::runs`] gives its ranges of bytes, one per row. Only tiles that hold a
//! wanted element are decoded.

use std::ops::Range;

use crate::{Dtype, Error, Result};

/// A slice of a tensor. Decoded, it is dense: its elements in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Columns in bytes, rows, and what is around these, the innermost first. None is whole but the
    /// last one.
    levels: Vec<Dimension>,
}

/// One dimension, or several that are wanted whole except for the outermost of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Dimension {
    wanted: Range<u64>,
    size: u64,
}

/// Rows that follow each other, and in bytes their width and the columns wanted of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rect {
    pub(crate) rows: Range<u64>,
    pub(crate) columns: Range<u64>,
    pub(crate) width: u64,
}

impl Slice {
    /// Takes a slice of a tensor with this name, type and shape. The tensor's size must be a whole
    /// number of bytes below 2^64.
    pub(crate) fn new(
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        ranges: &[Range<u64>],
    ) -> Result<Self> {
        // A scalar is one row.
        let shape = if shape.is_empty() { &[1] } else { shape };
        check(name, shape, ranges)?;
        if shape.contains(&0) || ranges.iter().any(Range::is_empty) {
            return Ok(Self::of_bytes(0..0));
        }
        let mut levels = vec![Dimension { wanted: 0..dtype.bits(), size: dtype.bits() }];
        for (dimension, &size) in shape.iter().enumerate().rev() {
            let wanted = ranges.get(dimension).cloned().unwrap_or(0..size);
            match levels.last_mut() {
                Some(inner) if inner.is_whole() => *inner = inner.times(&wanted, size),
                _ => levels.push(Dimension { wanted, size }),
            }
        }
        let columns = &mut levels[0];
        let bits = [columns.wanted.start, columns.wanted.end, columns.size];
        if bits.iter().any(|bits| bits % 8 != 0) {
            let problem =
                format!("a slice of tensor {name:?} does not begin and end between bytes");
            return Err(Error::parameter(problem, "decode the whole tensor"));
        }
        *columns = Dimension { wanted: bits[0] / 8..bits[1] / 8, size: bits[2] / 8 };
        Ok(Self { levels })
    }

    /// A range of a tensor's bytes.
    pub(crate) fn of_bytes(range: Range<u64>) -> Self {
        Self { levels: vec![Dimension { size: range.end, wanted: range }] }
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.levels.iter().map(Dimension::count).product()
    }

    /// Its rows, in order, cut where they do not follow each other; none if it is empty.
    pub(crate) fn rects(&self) -> impl Iterator<Item = Rect> + '_ {
        let (columns, outer) = self.levels.split_first().expect("there is a level");
        let (rows, around) = outer
            .split_first()
            .map_or((0..1, outer), |(rows, around)| (rows.wanted.clone(), around));
        let count =
            if columns.count() == 0 { 0 } else { around.iter().map(Dimension::count).product() };
        (0..count).map(move |index: u64| {
            let (mut rest, mut each, mut first) =
                (index, outer.first().map_or(1, |rows| rows.size), 0);
            for level in around {
                first += (level.wanted.start + rest % level.count()) * each;
                rest /= level.count();
                each *= level.size;
            }
            Rect {
                rows: first + rows.start..first + rows.end,
                columns: columns.wanted.clone(),
                width: columns.size,
            }
        })
    }
}

impl Dimension {
    fn is_whole(&self) -> bool {
        self.wanted == (0..self.size)
    }

    fn count(&self) -> u64 {
        self.wanted.end - self.wanted.start
    }

    /// Wanted indices of a dimension whose elements are this level.
    fn times(&self, wanted: &Range<u64>, size: u64) -> Self {
        Self { wanted: wanted.start * self.size..wanted.end * self.size, size: size * self.size }
    }
}

impl Rect {
    /// Its ranges of the tensor's bytes, one a row.
    pub(crate) fn runs(self) -> impl Iterator<Item = Range<u64>> {
        let Self { rows, columns, width } = self;
        rows.map(move |row| row * width + columns.start..row * width + columns.end)
    }

    /// Whether it lies in one piece.
    pub(crate) fn is_run(&self) -> bool {
        self.rows.end - self.rows.start == 1
    }

    /// All its rows at once, if it may be so, or one by one.
    #[cfg(feature = "cudarc")]
    pub(crate) fn split(self, at_once: impl FnOnce(&Self) -> bool) -> impl Iterator<Item = Self> {
        let each = if at_once(&self) { self.rows.end - self.rows.start } else { 1 };
        let Self { rows, columns, width } = self;
        let starts = rows.clone().step_by(each as usize);
        starts.map(move |start| Self { rows: start..start + each, columns: columns.clone(), width })
    }

    /// The weights from its first one to its last one, of a tensor whose weights have `each` bytes.
    #[cfg(feature = "cudarc")]
    pub(crate) fn elements(&self, each: u64) -> Range<u64> {
        let Self { rows, columns, width } = self;
        let first = rows.start * width + columns.start;
        let end = (rows.end - 1) * width + columns.end;
        first / each..end / each
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.rows.end - self.rows.start) * (self.columns.end - self.columns.start)
    }
}

fn check(name: &str, shape: &[u64], ranges: &[Range<u64>]) -> Result<()> {
    if ranges.len() > shape.len() {
        let (count, rank) = (ranges.len(), shape.len());
        let problem = format!("{count} ranges for the {rank} dimensions of tensor {name:?}");
        let remedy = "name one for each dimension, or for the first ones";
        return Err(Error::parameter(problem, remedy));
    }
    for (dimension, (range, count)) in ranges.iter().zip(shape).enumerate() {
        if range.start > range.end || range.end > *count {
            let (start, end) = (range.start, range.end);
            let problem =
                format!("tensor {name:?} has no indices {start}..{end} in dimension {dimension}");
            return Err(Error::parameter(problem, format!("they are 0..{count}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proptest::prelude::*;

    use super::{Rect, Slice};
    use crate::{Dtype, Error};

    /// The bytes of a slice of elements of a byte each, index by index.
    fn one_by_one(shape: &[u64], ranges: &[Range<u64>]) -> Vec<u64> {
        let is_wanted = |index: &u64| {
            let mut rest = *index;
            shape.iter().enumerate().rev().all(|(dimension, size)| {
                let at = rest % size;
                rest /= size;
                ranges.get(dimension).is_none_or(|range| range.contains(&at))
            })
        };
        (0..shape.iter().product()).filter(is_wanted).collect()
    }

    proptest! {
        #[test]
        fn runs_are_the_wanted_bytes(
            dimensions in prop::collection::vec((0u64..5, 0u64..5, 0u64..5), 0..6),
            named in 0usize..6,
        ) {
            let shape: Vec<u64> = dimensions.iter().map(|&(size, ..)| size).collect();
            let ranges: Vec<_> = dimensions.iter().take(named).map(|&(size, a, b)| {
                let (a, b) = (a.min(size), b.min(size));
                // Often whole.
                if a > b { 0..size } else { a..b }
            }).collect();
            let slice = Slice::new("t", Dtype::U8, &shape, &ranges).unwrap();
            let runs: Vec<_> = slice.rects().flat_map(Rect::runs).collect();
            prop_assert!(runs.iter().all(|run| !run.is_empty()));
            let expected = one_by_one(&shape, &ranges);
            prop_assert_eq!(slice.bytes(), expected.len() as u64);
            prop_assert_eq!(slice.rects().map(|rect| rect.bytes()).sum::<u64>(), slice.bytes());
            prop_assert_eq!(runs.into_iter().flatten().collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn whole_dimensions_are_joined() {
        let rects = |shape: &[u64], ranges: &[Range<u64>]| {
            let slice = Slice::new("t", Dtype::BF16, shape, ranges).unwrap();
            slice.rects().map(|rect| (rect.rows, rect.columns, rect.width)).collect::<Vec<_>>()
        };
        assert_eq!(rects(&[4, 6, 10], &[]), [(0..1, 0..480, 480)]);
        assert_eq!(rects(&[4, 6, 10], &[1..3]), [(0..1, 120..360, 480)]);
        assert_eq!(rects(&[4, 6, 10], &[0..4, 1..3]), [(0..4, 20..60, 120)]);
        assert_eq!(rects(&[4, 6, 10], &[1..3, 0..6, 2..3]), [(6..18, 4..6, 20)]);
        assert_eq!(
            rects(&[4, 6, 10], &[1..3, 4..6, 2..3]),
            [(10..12, 4..6, 20), (16..18, 4..6, 20)]
        );
        assert_eq!(rects(&[], &[]), [(0..1, 0..2, 2)]);
        assert_eq!(rects(&[4, 0, 10], &[1..3]), []);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let slice = |dtype, ranges: &[Range<u64>]| Slice::new("t", dtype, &[4, 6], ranges);
        let reversed = Range { start: 3, end: 2 };
        for wrong in [&[0..4, 0..6, 0..1][..], &[0..5], &[0..4, 6..7], &[0..4, reversed]] {
            assert!(matches!(slice(Dtype::BF16, wrong), Err(Error::Parameter { .. })), "{wrong:?}");
        }
        // Elements of F4 have four bits each.
        assert!(slice(Dtype::F4, &[0..4, 2..4]).is_ok_and(|slice| slice.bytes() == 4));
        assert!(matches!(slice(Dtype::F4, &[0..4, 1..3]), Err(Error::Parameter { .. })));
    }
}
