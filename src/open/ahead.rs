//! Tells remote containers which bytes will be read next, so that they arrive before they are
//! needed. This costs nothing if containers are local files.

use std::{any::Any, ops::Range};

use super::{shard::Shard, tensor::Tensor};
use crate::constants::CHECKSUM_CHUNK_BYTES;

/// Bytes of a tensor's arrays that are fetched together: all arrays of one part of its weights, and
/// then those of the next part.
const PART_BYTES: u64 = 16 << 20;

/// Fetches bytes until it is dropped.
#[derive(Default)]
#[must_use]
pub struct ReadAhead {
    plans: Vec<Box<dyn Any + Send + Sync>>,
}

impl ReadAhead {
    /// Tensors that will be read from end to end, in this order. The cost grows with their number.
    pub fn of<'m>(tensors: impl IntoIterator<Item = Tensor<'m>>) -> Self {
        Self::parts(tensors, |shard, tensor, ranges| shard.add_parts(tensor, ranges))
    }

    /// Codebooks that will be read, and then all of these tensors.
    pub(super) fn after_codebooks<'m, I: Iterator<Item = Tensor<'m>>>(
        tensors: impl Fn() -> I,
    ) -> Self {
        let mut plans = Self::codebooks(tensors()).plans;
        plans.extend(Self::of(tensors()).plans);
        Self { plans }
    }

    fn codebooks<'m>(tensors: impl Iterator<Item = Tensor<'m>>) -> Self {
        Self::parts(tensors, |shard, tensor, ranges| {
            if matches!(tensor.target().coded(), Ok(Some(_))) {
                ranges.extend(shard.widened(&shard.place_of(tensor.first_array())));
            }
        })
    }

    fn parts<'m>(
        tensors: impl IntoIterator<Item = Tensor<'m>>,
        add: impl Fn(&Shard, &Tensor<'m>, &mut Vec<Range<u64>>),
    ) -> Self {
        let mut shards: Vec<(&Shard, Vec<Range<u64>>)> = Vec::new();
        for tensor in tensors {
            let shard = tensor.shard();
            if !shard.is_far {
                continue;
            }
            // Tensors of one shard mostly follow each other.
            let at = shards.iter().rposition(|(other, _)| std::ptr::eq(*other, shard));
            let at = at.unwrap_or_else(|| {
                shards.push((shard, Vec::new()));
                shards.len() - 1
            });
            add(shard, &tensor, &mut shards[at].1);
        }
        let plans = shards.into_iter().filter_map(|(shard, ranges)| shard.bring(&ranges));
        Self { plans: plans.collect() }
    }
}

impl Shard {
    #[cfg(not(feature = "remote"))]
    fn bring(&self, ranges: &[Range<u64>]) -> Option<Box<dyn Any + Send + Sync>> {
        self.reader.read_ahead(ranges)
    }

    /// Places that will be read in this order, and not from a cache.
    pub(super) fn expect(&self, places: &[Range<u64>]) -> ReadAhead {
        let plan = if self.is_far { self.reader.read_ahead(places) } else { None };
        ReadAhead { plans: plan.into_iter().collect() }
    }

    /// A place of one section, with the chunks that it touches.
    pub(super) fn expect_place(&self, place: &Range<u64>) -> ReadAhead {
        let places = self.widened(place).filter(|_| self.is_far);
        ReadAhead { plans: places.and_then(|place| self.bring(&[place])).into_iter().collect() }
    }

    /// The codebooks of all tensors.
    pub(super) fn expect_codebooks(&self) -> ReadAhead {
        ReadAhead::codebooks(self.tensors())
    }

    /// All chunks in their order.
    pub(super) fn expect_chunks(&self) -> ReadAhead {
        self.expect(&self.chunks)
    }

    /// A place with all of the chunks that it touches, which are checked whole.
    fn widened(&self, place: &Range<u64>) -> Option<Range<u64>> {
        if place.is_empty() || !self.check_checksums {
            return (!place.is_empty()).then(|| place.clone());
        }
        let mut chunks = self.chunks_of(place).map(|chunk| &self.chunks[chunk]);
        let first = chunks.next()?;
        Some(first.start..chunks.last().unwrap_or(first).end)
    }

    /// Adds the arrays of a tensor, part by part.
    fn add_parts(&self, tensor: &Tensor<'_>, ranges: &mut Vec<Range<u64>>) {
        let arrays = tensor.target().record().array_range();
        let places: Vec<_> =
            arrays.filter_map(|array| self.widened(&self.place_of(array))).collect();
        let bytes: u64 = places.iter().map(|place| place.end - place.start).sum();
        let count = bytes.div_ceil(PART_BYTES);
        for part in 0..count {
            ranges.extend(places.iter().map(|place| share(place, part, count)));
        }
    }
}

/// One of equal shares of a place, cut at chunks.
fn share(place: &Range<u64>, part: u64, count: u64) -> Range<u64> {
    let chunks = (place.end - place.start).div_ceil(CHECKSUM_CHUNK_BYTES);
    let cut = |part: u64| place.end.min(place.start + chunks * part / count * CHECKSUM_CHUNK_BYTES);
    cut(part)..cut(part + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_a_place_once() {
        for length in [1, 1 << 20, (1 << 20) + 1, 70 << 20] {
            for count in [1, 3, 100] {
                let place = 4096..4096 + length;
                let mut end = place.start;
                for part in 0..count {
                    let share = share(&place, part, count);
                    assert_eq!(share.start, end);
                    end = share.end;
                }
                assert_eq!(end, place.end);
            }
        }
    }
}
