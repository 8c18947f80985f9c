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

use crate::{
    Error, Result,
    encoding::tile::{Codebook, EncodedStrips, Encoder, Geometry, PairHistogram, Sizes},
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

/// A tensor's code, and where each portion's bits go.
#[derive(Debug)]
pub(super) struct TileCoding {
    pub(super) sizes: Sizes,
    /// As stored; a tensor's share of the memory of a plan.
    pub(super) codebook: Vec<u8>,
    /// Of the exponents, in bits.
    pub(super) entropy_bits: f64,
    portions: Portions,
    /// The first byte of each portion's bits, and the byte after the last one's.
    portion_starts: Vec<u64>,
}

/// How a tensor is cut into portions of strips.
#[derive(Clone, Copy, Debug)]
struct Portions {
    geometry: Geometry,
    /// Of a portion but the last.
    strips: u64,
}

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

/// The geometry of a tensor.
pub(super) fn geometry(shape: &[u64]) -> Result<Geometry> {
    let geometry = Geometry::choose(shape)?;
    if 2 * geometry.strip_elements() <= MAX_STRIP_BYTES {
        Ok(geometry)
    } else {
        Geometry::vector(geometry.elements())
    }
}

impl Portions {
    fn new(geometry: Geometry) -> Self {
        let least = MIN_PORTION_BYTES.div_ceil(2 * geometry.strip_elements());
        Self { geometry, strips: geometry.strip_count().div_ceil(MAX_PORTIONS).max(least) }
    }

    /// The strips that are read in one go.
    fn group(geometry: Geometry) -> u64 {
        (GROUP_BYTES / (2 * geometry.strip_elements())).max(1)
    }

    fn count(&self) -> usize {
        self.geometry.strip_count().div_ceil(self.strips) as usize
    }

    /// The strips of a portion, in groups, each with the bytes of its weights in the tensor.
    fn groups(&self, portion: usize) -> impl Iterator<Item = (Range<u64>, Range<u64>)> + use<> {
        let (geometry, group) = (self.geometry, Self::group(self.geometry));
        let first = portion as u64 * self.strips;
        let end = geometry.strip_count().min(first + self.strips);
        parallel::cut(first..end, group, 1).map(move |strips| {
            let byte = |strip: u64| 2 * geometry.elements().min(strip * geometry.strip_elements());
            (strips.clone(), byte(strips.start)..byte(strips.end))
        })
    }
}

/// The weights of each strip of a group.
fn strips(
    geometry: Geometry,
    strips: Range<u64>,
    weights: &[u8],
) -> impl Iterator<Item = (u64, &[u8])> {
    strips.zip(weights.chunks(2 * geometry.strip_elements() as usize))
}

/// Reads a range of a tensor's bytes.
pub(super) type Read<'a> = &'a (dyn Fn(Range<u64>, &mut Vec<u8>) -> Result<()> + Sync);

/// A code, and what measuring with it needs.
struct Measuring {
    codebook: Codebook,
    encoder: Encoder,
    portions: Portions,
}

impl Measuring {
    /// Makes the code of a tensor; `None` where coding makes it no smaller anyway.
    fn new(geometry: Geometry, histogram: &PairHistogram) -> Result<Option<Self>> {
        let codebook = Codebook::from_histogram(histogram)?;
        let bits = codebook.expected_bits(histogram);
        if bits.is_none_or(|bits| bits >= 8 * geometry.elements()) {
            return Ok(None);
        }
        let encoder = Encoder::new(&codebook, geometry);
        Ok(Some(Self { codebook, encoder, portions: Portions::new(geometry) }))
    }

    /// The bytes that the bits of a group take.
    fn group(&self, group: Range<u64>, weights: &[u8]) -> Result<u64> {
        strips(self.portions.geometry, group, weights).try_fold(0, |sum, (strip, weights)| {
            Ok(sum + self.encoder.strip_bytes(strip, weights)?)
        })
    }

    fn finish(
        self,
        histogram: &PairHistogram,
        portion_bytes: impl Iterator<Item = u64>,
    ) -> Result<TileCoding> {
        let mut portion_starts = vec![0];
        let mut end = 0;
        for bytes in portion_bytes {
            end += bytes;
            portion_starts.push(end);
        }
        let (codebook, geometry) = (self.codebook.to_bytes(), self.portions.geometry);
        Ok(TileCoding {
            sizes: Sizes::new(geometry, 8 * end, codebook.len() as u64)?,
            codebook,
            entropy_bits: histogram.exponents().entropy() * geometry.elements() as f64,
            portions: self.portions,
            portion_starts,
        })
    }
}

impl TileCoding {
    /// Measures a tensor that is in memory, on this thread.
    pub(super) fn of_whole(
        geometry: Geometry,
        histogram: &PairHistogram,
        weights: &[u8],
    ) -> Result<Option<Self>> {
        let Some(measuring) = Measuring::new(geometry, histogram)? else { return Ok(None) };
        let mut bytes = vec![0; measuring.portions.count()];
        for (portion, bytes) in bytes.iter_mut().enumerate() {
            for (group, range) in measuring.portions.groups(portion) {
                *bytes +=
                    measuring.group(group, &weights[range.start as usize..range.end as usize])?;
            }
        }
        measuring.finish(histogram, bytes.into_iter()).map(Some)
    }

    /// Measures a tensor of any size, on all threads, and tells the observer of all its bytes.
    pub(super) fn of_read(
        geometry: Geometry,
        histogram: &PairHistogram,
        read: Read<'_>,
        observer: &dyn Observer,
    ) -> Result<Option<Self>> {
        let Some(measuring) = Measuring::new(geometry, histogram)? else {
            observer.advance(2 * geometry.elements());
            return Ok(None);
        };
        let portions = measuring.portions;
        let bytes: Vec<AtomicU64> = (0..portions.count()).map(|_| AtomicU64::new(0)).collect();
        parallel::for_each(bytes.len(), Vec::new, |weights, portion| {
            for (group, range) in portions.groups(portion) {
                read(range, weights)?;
                bytes[portion].fetch_add(measuring.group(group, weights)?, Ordering::Relaxed);
                advance(observer, weights.len() as u64)?;
            }
            Ok(())
        })?;
        measuring.finish(histogram, bytes.into_iter().map(AtomicU64::into_inner)).map(Some)
    }

    /// The coding of a tensor that nobody has read, whose codes take this many bits; no portions
    /// to encode.
    pub(super) fn assume(shape: &[u64], bits: u64) -> Result<Self> {
        let geometry = geometry(shape)?;
        let codebook = vec![0; TYPICAL_CODEBOOK_BYTES];
        Ok(Self {
            sizes: Sizes::new(geometry, bits.next_multiple_of(8), codebook.len() as u64)?,
            codebook,
            entropy_bits: bits as f64,
            portions: Portions::new(geometry),
            portion_starts: vec![0],
        })
    }

    /// The number of portions.
    pub(super) fn portion_count(&self) -> usize {
        self.portion_starts.len() - 1
    }

    /// The encoder of its strips.
    pub(super) fn encoder(&self) -> Result<Encoder> {
        Ok(Encoder::new(&Codebook::from_bytes(&self.codebook)?, self.sizes.geometry()))
    }

    /// Encodes a portion, a group of strips at a time: `read` brings their weights, `write` takes
    /// what they add to the arrays, at these bytes of records, bitstream and plane.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the weights are not those that were measured, and what `read` and
    /// `write` answer.
    pub(super) fn encode_portion(
        &self,
        encoder: &Encoder,
        portion: usize,
        scratch: &mut Scratch,
        read: Read<'_>,
        write: &mut dyn FnMut([u64; 3], &EncodedStrips) -> Result<()>,
    ) -> Result<()> {
        let Scratch { weights, output } = scratch;
        let mut byte = self.portion_starts[portion];
        // The last portion ends with the array, which is a number of whole words.
        let end = match portion + 1 {
            next if next == self.portion_count() => self.sizes.bitstream_bytes(),
            next => self.portion_starts[next],
        };
        for (group, range) in self.portions.groups(portion) {
            output.clear();
            read(range, weights)?;
            for (strip, weights) in strips(self.portions.geometry, group.clone(), weights) {
                let at = byte + output.bitstream.len() as u64;
                encoder.encode_strip(strip, weights, at, output)?;
            }
            let next = byte + output.bitstream.len() as u64;
            if next > end {
                return Err(changed());
            }
            let (records, plane) = (self.sizes.records_of(&group)?, self.sizes.plane_of(&group)?);
            write([records.start, byte, plane.start], output)?;
            byte = next;
        }
        if byte == end { Ok(()) } else { Err(changed()) }
    }
}

/// What a thread keeps from portion to portion: the weights of a group of strips and what they
/// become, about 1 MiB; more for matrices whose strips are longer.
#[derive(Default)]
pub(super) struct Scratch {
    weights: Vec<u8>,
    output: EncodedStrips,
}

fn changed() -> Error {
    Error::parameter("strips take other bits than were measured", "leave the source alone")
}
