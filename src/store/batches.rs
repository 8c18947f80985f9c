//! Ranges in the order of reading, cut into batches, and each batch into pieces: one request brings
//! one piece.

use std::{collections::BTreeMap, mem, ops::Range};

use crate::parallel;

/// The longest piece: one request.
const PIECE_BYTES: u64 = 16 << 20;
/// The pieces of a whole object, and the shortest of them: requests that run at once share the rate
/// of the server, so the first bytes of few pieces come no sooner than the last.
const WHOLE_PIECES: u64 = 128;
pub(super) const SHORT_PIECE_BYTES: u64 = 4 << 20;
/// Bytes between two ranges that are fetched with them, since another request would take longer.
const GAP_BYTES: u64 = 64 << 10;

/// A range that one request brings, and the batch that it is of.
pub(super) struct QueuePiece {
    pub(super) range: Range<u64>,
    pub(super) batch: usize,
}

/// Cuts ranges into batches of this many bytes, and each batch into pieces: what lies side by side
/// in the object is one piece, up to [`PIECE_BYTES`]. No byte is in two pieces.
pub(super) fn plan(ranges: &[Range<u64>], least: u64) -> (Vec<QueuePiece>, Vec<Vec<usize>>) {
    let mut plan = QueuePlan::new(PIECE_BYTES);
    for range in ranges.iter().flat_map(|range| parallel::cut(range.clone(), least, 1)) {
        plan.add(range, least);
    }
    plan.end_batch();
    let QueuePlan { mut pieces, count, .. } = plan;
    pieces.sort_by_key(|piece| piece.range.start);
    let mut batches = vec![Vec::new(); count];
    for (index, piece) in pieces.iter().enumerate() {
        batches[piece.batch].push(index);
    }
    (pieces, batches)
}

/// Cuts a whole object into pieces, in the order of their bytes, and tells which of them hold the
/// ranges that are wanted `first`.
pub(super) fn plan_whole(first: &[Range<u64>], size: u64) -> (Vec<Range<u64>>, Vec<bool>) {
    let most = (size / WHOLE_PIECES).clamp(SHORT_PIECE_BYTES, PIECE_BYTES);
    let mut plan = QueuePlan::new(most);
    for range in first {
        plan.add(range.clone(), u64::MAX);
    }
    plan.end_batch();
    let count = plan.count;
    plan.add(0..size, u64::MAX);
    plan.end_batch();
    let mut pieces = plan.pieces;
    pieces.sort_by_key(|piece| piece.range.start);
    pieces.into_iter().map(|piece| (piece.range, piece.batch < count)).unzip()
}

/// A plan that grows by ranges.
struct QueuePlan {
    /// Bytes of a piece, at most.
    most: u64,
    pieces: Vec<QueuePiece>,
    /// Whole batches.
    count: usize,
    /// The batch that grows, and its bytes.
    batch: Vec<Range<u64>>,
    bytes: u64,
    /// The bytes that some batch has: starts and ends of ranges that do not touch.
    taken: BTreeMap<u64, u64>,
}

impl QueuePlan {
    fn new(most: u64) -> Self {
        let (pieces, batch, taken) = Default::default();
        Self { most, pieces, count: 0, batch, bytes: 0, taken }
    }

    fn add(&mut self, range: Range<u64>, least: u64) {
        for part in self.take(range) {
            self.bytes += part.end - part.start;
            self.batch.push(part);
        }
        if self.bytes >= least {
            self.end_batch();
        }
    }

    /// The parts of a range that no batch has; now one has them.
    fn take(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut parts, mut at) = (Vec::new(), range.start);
        let mut whole = range.clone();
        while let Some((&start, &end)) = self.taken.range(..=range.end).next_back() {
            if end < range.start {
                break;
            }
            self.taken.remove(&start);
            parts.push(start..end);
            whole = whole.start.min(start)..whole.end.max(end);
        }
        self.taken.insert(whole.start, whole.end);
        let mut free = Vec::new();
        for part in parts.into_iter().rev() {
            free.push(at..part.start.max(at));
            at = part.end.max(at);
        }
        free.push(at..range.end.max(at));
        free.retain(|part| !part.is_empty());
        free
    }

    fn is_free(&self, range: &Range<u64>) -> bool {
        let before = self.taken.range(..range.end).next_back();
        before.is_none_or(|(_, &end)| end <= range.start)
    }

    /// Joins the ranges of a batch to pieces.
    fn end_batch(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let mut batch = mem::take(&mut self.batch);
        batch.sort_by_key(|range| range.start);
        let mut whole: Vec<Range<u64>> = Vec::new();
        for range in batch {
            match whole.last_mut() {
                Some(last) if self.is_near(last.end..range.start) => last.end = range.end,
                _ => whole.push(range),
            }
        }
        let pieces = whole.into_iter().flat_map(|range| parallel::cut(range, self.most, 1));
        self.pieces.extend(pieces.map(|range| QueuePiece { range, batch: self.count }));
        (self.bytes, self.count) = (0, self.count + 1);
    }

    /// Whether to fetch the bytes between two ranges with them.
    fn is_near(&mut self, gap: Range<u64>) -> bool {
        if gap.is_empty() {
            return true;
        }
        let is_near = gap.end - gap.start <= GAP_BYTES && self.is_free(&gap);
        if is_near {
            self.take(gap);
        }
        is_near
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn ranges_of(ranges: &[Range<u64>], least: u64) -> Vec<(usize, Range<u64>)> {
        let (pieces, _) = plan(ranges, least);
        pieces.into_iter().map(|piece| (piece.batch, piece.range)).collect()
    }

    #[test]
    fn neighbours_are_one_piece_and_no_byte_is_fetched_twice() {
        let near = [0..1000, 900..2000, 5000..6000, 10 * MIB..10 * MIB + 1, 1500..5500];
        assert_eq!(ranges_of(&near, MIB), [(0, 0..6000), (0, 10 * MIB..10 * MIB + 1)]);
        let apart = [0..MIB, 2 * MIB..3 * MIB, MIB / 2..5 * MIB / 2];
        let found = ranges_of(&apart, MIB);
        assert_eq!(found, [(0, 0..MIB), (2, MIB..2 * MIB), (1, 2 * MIB..3 * MIB)]);
    }

    #[test]
    fn long_ranges_are_several_batches_and_pieces() {
        let found = ranges_of(&[7..7 + 80 * MIB], 32 * MIB);
        let batches: Vec<_> = found.iter().map(|(batch, _)| *batch).collect();
        assert_eq!(batches, [0, 0, 1, 1, 2]);
        assert!(found.windows(2).all(|pair| pair[0].1.end == pair[1].1.start));
        assert_eq!((found[0].1.start, found[4].1.end), (7, 7 + 80 * MIB));
    }

    #[test]
    fn a_whole_object_is_cut_once() {
        let size = 40 * MIB + 7;
        for first in [vec![], vec![5..9], vec![20 * MIB..20 * MIB + 3, 0..9], vec![0..size]] {
            let (pieces, wanted) = plan_whole(&first, size);
            let mut end = 0;
            for piece in &pieces {
                let length = piece.end - piece.start;
                assert!(piece.start == end && length <= SHORT_PIECE_BYTES, "{first:?}");
                end = piece.end;
            }
            assert_eq!(end, size);
            let is_first = |piece: &Range<u64>| {
                first.iter().any(|range| piece.start < range.end && range.start < piece.end)
            };
            assert_eq!(wanted, pieces.iter().map(is_first).collect::<Vec<_>>(), "{first:?}");
        }
        let longest =
            |size| plan_whole(&[], size).0.iter().map(|piece| piece.end - piece.start).max();
        assert_eq!(longest(1 << 30), Some(8 * MIB));
        assert_eq!(longest(1 << 40), Some(PIECE_BYTES));
    }

    #[test]
    fn random_ranges_are_covered_once() {
        let mut seed = 1u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let ranges: Vec<_> = (0..20)
                .map(|_| {
                    let start = next(3000) * 1000;
                    start..start + next(200_000)
                })
                .collect();
            let found = ranges_of(&ranges, 100_000);
            assert!(found.windows(2).all(|pair| pair[0].1.end <= pair[1].1.start));
            for at in ranges.iter().flat_map(|range| range.clone().step_by(997)) {
                assert!(found.iter().any(|(_, piece)| piece.contains(&at)), "{at}");
            }
        }
    }
}
