//! A tensor on its way into the `tile` encoding: pairs are counted, then strips are measured, and
//! all sizes follow.
//!
//! ```text
//! strips    | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
//! portions  |0          |1          |2  |     where each portion's bits start, in bytes
//! ```
//! Q: Why measured, and not computed as in `gap`? The bits of a strip depend on how its weights
//! fall on lanes, which no histogram tells. So the weights are looked at once more when the code is
//! known, before anything is written. Tensors of up to [`WHOLE_BYTES`] are still in memory then;
//! larger ones are read again, from the system's cache more often than not.

use std::{
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::coding::Coding;
use crate::{
    Result,
    encoding::tile::{Codebook, Encoder, PairHistogram, Sizes, TileGeometry},
    format::Coded,
    parallel,
    progress::{Observer, advance},
};

/// Tensors of up to this many bytes are counted and measured at once, by one thread.
pub(super) const WHOLE_BYTES: u64 = 4 << 20;
/// Bytes of a portion in a tensor of up to [`MAX_PORTIONS`] of them.
const MIN_PORTION_BYTES: u64 = 1 << 20;
/// Bytes of the strips that are read, measured or encoded in one go; small enough for the
/// second-level cache.
const GROUP_BYTES: u64 = 256 << 10;
/// Bounds the list of portions of one tensor to 32 KiB, whatever its size.
const MAX_PORTIONS: u64 = 4096;
/// A strip is 32 rows, and a thread holds one whole: wider matrices are cut as vectors. A row of
/// 262,144 weights is none of a matrix of today's models.
const MAX_STRIP_BYTES: u64 = 16 << 20;

/// A codebook of 900 pairs, as large matrices have.
const TYPICAL_CODEBOOK_BYTES: usize = 26 + 2 * 900;

/// Counts pairs, in a histogram for each thread.
pub(super) struct Counts(Vec<Mutex<Option<PairHistogram>>>);

impl Default for Counts {
    fn default() -> Self {
        Self((0..rayon::current_num_threads()).map(|_| Mutex::default()).collect())
    }
}

impl Counts {
    /// Counts consecutive weights of a tensor, from an even element on.
    pub(super) fn add(&self, weights: &[u8]) {
        let slot = rayon::current_thread_index().unwrap_or(0) % self.0.len();
        parallel::lock(&self.0[slot]).get_or_insert_default().add(weights);
    }

    /// What was counted since the last time.
    pub(super) fn take(&mut self) -> PairHistogram {
        let histograms =
            self.0.iter_mut().map(|slot| slot.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut counted = histograms.filter_map(Option::take);
        let mut sum = counted.next().unwrap_or_default();
        counted.for_each(|histogram| sum.merge(&histogram));
        sum
    }
}

fn geometry(shape: &[u64]) -> Result<TileGeometry> {
    let geometry = TileGeometry::choose(shape)?;
    if 2 * geometry.strip_elements() <= MAX_STRIP_BYTES {
        Ok(geometry)
    } else {
        TileGeometry::vector(geometry.elements())
    }
}

/// The strips of a portion but the last.
fn portion_strips(geometry: TileGeometry) -> u64 {
    let least = MIN_PORTION_BYTES.div_ceil(2 * geometry.strip_elements());
    geometry.strip_count().div_ceil(MAX_PORTIONS).max(least)
}

/// The strips of a portion, in groups that are read in one go, each with the bytes of its weights
/// in the tensor.
pub(super) fn groups(
    geometry: TileGeometry,
    portion: usize,
) -> impl Iterator<Item = (Range<u64>, Range<u64>)> {
    let each = portion_strips(geometry);
    let first = portion as u64 * each;
    let end = geometry.strip_count().min(first + each);
    let group = (GROUP_BYTES / (2 * geometry.strip_elements())).max(1);
    parallel::cut(first..end, group, 1).map(move |strips| {
        let byte = |strip: u64| 2 * geometry.elements().min(strip * geometry.strip_elements());
        (strips.clone(), byte(strips.start)..byte(strips.end))
    })
}

/// The weights of each strip of a group.
pub(super) fn strips(
    geometry: TileGeometry,
    strips: Range<u64>,
    weights: &[u8],
) -> impl Iterator<Item = (u64, &[u8])> {
    strips.zip(weights.chunks(2 * geometry.strip_elements() as usize))
}

/// A code, and what measuring with it needs.
struct Measuring {
    codebook: Codebook,
    encoder: Encoder,
    geometry: TileGeometry,
}

impl Measuring {
    /// Makes the code of a tensor; `None` where coding makes it no smaller anyway.
    fn new(shape: &[u64], histogram: &PairHistogram) -> Result<Option<Self>> {
        let geometry = geometry(shape)?;
        let codebook = Codebook::from_histogram(histogram)?;
        let bits = codebook.expected_bits(histogram);
        if bits.is_none_or(|bits| bits >= 8 * geometry.elements()) {
            return Ok(None);
        }
        let encoder = Encoder::new(&codebook, geometry);
        Ok(Some(Self { codebook, encoder, geometry }))
    }

    fn portion_count(&self) -> usize {
        self.geometry.strip_count().div_ceil(portion_strips(self.geometry)) as usize
    }

    /// The bytes that the bits of a group take.
    fn group(&self, group: Range<u64>, weights: &[u8]) -> Result<u64> {
        strips(self.geometry, group, weights).try_fold(0, |sum, (strip, weights)| {
            Ok(sum + self.encoder.strip_bytes(strip, weights)?)
        })
    }

    fn finish(
        self,
        histogram: &PairHistogram,
        portion_bytes: impl Iterator<Item = u64>,
    ) -> Result<Coding> {
        let (mut portion_starts, mut end) = (vec![0], 0);
        for bytes in portion_bytes {
            end += bytes;
            portion_starts.push(end);
        }
        let (codebook, geometry) = (self.codebook.to_bytes(), self.geometry);
        Ok(Coding {
            sizes: Coded::Tile(Sizes::new(geometry, 8 * end, codebook.len() as u64)?),
            codebook,
            entropy_bits: histogram.exponents().entropy() * geometry.elements() as f64,
            portion_starts,
            piece_bytes: 0,
            portion_bytes: 0,
        })
    }
}

/// Measures a tensor that is in memory, on this thread.
pub(super) fn measure_whole(
    shape: &[u64],
    histogram: &PairHistogram,
    weights: &[u8],
) -> Result<Option<Coding>> {
    let Some(measuring) = Measuring::new(shape, histogram)? else { return Ok(None) };
    let mut bytes = vec![0; measuring.portion_count()];
    for (portion, bytes) in bytes.iter_mut().enumerate() {
        for (group, range) in groups(measuring.geometry, portion) {
            *bytes += measuring.group(group, &weights[range.start as usize..range.end as usize])?;
        }
    }
    measuring.finish(histogram, bytes.into_iter()).map(Some)
}

/// Measures a tensor of any size, on all threads, and tells the observer of all its bytes. `read`
/// reads a range of them.
pub(super) fn measure(
    shape: &[u64],
    histogram: &PairHistogram,
    read: impl Fn(Range<u64>, &mut Vec<u8>) -> Result<()> + Sync,
    observer: &dyn Observer,
) -> Result<Option<Coding>> {
    let Some(measuring) = Measuring::new(shape, histogram)? else {
        observer.advance(2 * shape.iter().product::<u64>());
        return Ok(None);
    };
    let count = measuring.portion_count();
    let bytes: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    parallel::for_each(bytes.len(), Vec::new, |weights, portion| {
        for (group, range) in groups(measuring.geometry, portion) {
            read(range, weights)?;
            bytes[portion].fetch_add(measuring.group(group, weights)?, Ordering::Relaxed);
            advance(observer, weights.len() as u64)?;
        }
        Ok(())
    })?;
    measuring.finish(histogram, bytes.into_iter().map(AtomicU64::into_inner)).map(Some)
}

/// The coding of a tensor that nobody has read, whose codes take this many bits; no portions to
/// encode.
pub(super) fn assume(shape: &[u64], bits: u64) -> Result<Coding> {
    let codebook = vec![0; TYPICAL_CODEBOOK_BYTES];
    let bytes = codebook.len() as u64;
    Ok(Coding {
        sizes: Coded::Tile(Sizes::new(geometry(shape)?, bits.next_multiple_of(8), bytes)?),
        codebook,
        entropy_bits: bits as f64,
        portion_starts: vec![0],
        piece_bytes: 0,
        portion_bytes: 0,
    })
}
