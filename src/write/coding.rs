//! Makes a tensor's code: counts exponents for `gap`; counts pairs and then measures strips for
//! `tile`. All sizes follow, and the place of each portion, so that the second pass (`encode`) can
//! encode all portions at the same time.
//!
//! ```text
//! strips    | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
//! portions  |0          |1          |2  |     where each portion's codes start
//! ```
//! Q: Why are strips measured, while in `gap` a portion's histogram gives the bits of its codes?
//! The bits of a strip depend on how its weights are distributed over lanes, which no histogram
//! shows. So when the code is known, the weights are read once more before anything is written.
//! Tensors of up to [`WHOLE_BYTES`] are still in memory then; larger ones are read again, usually
//! from the system's cache.

use std::{
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::spill::Spilled;
use crate::{
    Dtype, Result,
    constants::ARRAY_ALIGNMENT,
    encoding::{
        gap::{GapGeometry, GapSizes},
        tile::{Codebook, Encoder, PairHistogram, TileGeometry, TileSizes},
    },
    float::FloatSplit,
    format::Coded,
    huffman::{self, CodeLengths, Histogram},
    parallel,
    progress::{Observer, advance},
};

/// Bytes of a portion in a tensor of up to [`MAX_PORTIONS`] of them; larger tensors have larger
/// portions.
pub(super) const MIN_PORTION_BYTES: u64 = 1 << 20;
/// Bounds the histograms of one tensor to 8 MiB, whatever its size.
const MAX_PORTIONS: u64 = 4096;
/// Tensors of up to this many bytes are counted and measured at once, by one thread.
pub(super) const WHOLE_BYTES: u64 = 4 << 20;
/// Bytes of the strips that are read, measured or encoded in one go; small enough for the
/// second-level cache.
const GROUP_BYTES: u64 = 256 << 10;
/// A strip is 32 rows, and a thread holds one whole: wider matrices are cut as vectors. No matrix
/// of today's models has rows of 262,144 weights.
const MAX_STRIP_BYTES: u64 = 16 << 20;
/// A codebook of 900 pairs, as large matrices have.
const TYPICAL_CODEBOOK_BYTES: usize = 26 + 2 * 900;

/// How a tensor would be coded, with the size of everything and the place of each portion.
#[derive(Debug)]
pub(super) struct Coding {
    pub(super) sizes: Coded,
    /// As stored; a tensor's share of the memory of a plan.
    pub(super) codebook: Vec<u8>,
    /// Entropy of all its exponents, in bits.
    pub(super) entropy_bits: f64,
    /// Where the codes of each portion begin, and where the last ones end: in `gap` the bit, in
    /// `tile` and `delta` the byte. A portion of `delta` is a segment.
    pub(super) portion_starts: Vec<u64>,
    /// In `gap` the bytes of a piece of the first pass, which are best read together; 0 in `tile`,
    /// where the geometry tells.
    pub(super) piece_bytes: u64,
    /// Where each segment of `delta` is in the spill.
    pub(super) spilled: Vec<Spilled>,
}

impl Coding {
    /// `portions` are the bits or bytes of each.
    pub(super) fn new(
        sizes: Coded,
        codebook: Vec<u8>,
        entropy_bits: f64,
        portions: &[u64],
    ) -> Self {
        let ends = portions.iter().scan(0, |end, portion| {
            *end += portion;
            Some(*end)
        });
        let portion_starts = std::iter::once(0).chain(ends).collect();
        let spilled = Vec::new();
        Self { sizes, codebook, entropy_bits, portion_starts, piece_bytes: 0, spilled }
    }

    /// Bytes of all its arrays, with their alignment.
    pub(super) fn bytes(&self) -> u64 {
        let arrays = self.sizes.arrays().into_iter();
        arrays.map(|(_, bytes)| bytes.next_multiple_of(ARRAY_ALIGNMENT)).sum()
    }

    /// Parts that are encoded alone, numbered in order.
    pub(super) fn portion_count(&self) -> usize {
        self.portion_starts.len() - 1
    }
}

/// The bytes of a portion but the last, in `gap`: whole pieces.
pub(super) fn portion_bytes(length: u64, piece_bytes: u64) -> u64 {
    MIN_PORTION_BYTES.max(length.div_ceil(MAX_PORTIONS)).next_multiple_of(piece_bytes)
}

/// Histograms of a tensor's portions while they are being counted.
pub(super) struct ExponentCounts {
    geometry: GapGeometry,
    piece_bytes: u64,
    portion_bytes: u64,
    histograms: Vec<Histogram>,
}

impl ExponentCounts {
    /// Prepares for a tensor of `length` bytes that is counted in pieces of `piece_bytes`.
    pub(super) fn new(geometry: GapGeometry, length: u64, piece_bytes: u64) -> Self {
        let portion_bytes = portion_bytes(length, piece_bytes);
        Self { geometry, piece_bytes, portion_bytes, histograms: Vec::new() }
    }

    /// Takes the histogram of the next piece, which starts at this byte of the tensor.
    pub(super) fn add(&mut self, start: u64, histogram: &Histogram) {
        if start.is_multiple_of(self.portion_bytes) {
            self.histograms.push(histogram.clone());
        } else {
            self.histograms.last_mut().expect("a portion has begun").merge(histogram);
        }
    }

    pub(super) fn finish(self) -> Result<Coding> {
        let mut histogram = Histogram::default();
        self.histograms.iter().for_each(|portion| histogram.merge(portion));
        let lengths = CodeLengths::from_histogram(&histogram)?;
        let portions = self.histograms.iter().map(|portion| lengths.bits(portion));
        let portions = portions.collect::<Result<Vec<_>>>()?;
        let codebook = huffman::codebook(&lengths);
        let (bits, length) = (portions.iter().sum(), codebook.len() as u64);
        let sizes = GapSizes::new(self.geometry, histogram.total(), bits, length)?;
        let entropy_bits = histogram.entropy() * sizes.elements() as f64;
        let coding = Coding::new(Coded::Gap(sizes), codebook, entropy_bits, &portions);
        Ok(Coding { piece_bytes: self.piece_bytes, ..coding })
    }
}

/// The `gap` coding of a tensor that nobody has read, whose codes take this many bits; the code
/// itself is a made-up one, and there are no portions to encode.
pub(super) fn assume_gap(geometry: GapGeometry, elements: u64, bits: u64) -> Result<Coding> {
    // Each exponent half as frequent as the next one, over as many as trained models have.
    let counts =
        std::array::from_fn(
            |exponent| {
                if (88..128).contains(&exponent) { 1 << (exponent - 88) } else { 0 }
            },
        );
    let lengths = CodeLengths::from_histogram(&Histogram::from(counts))?;
    let codebook = huffman::codebook(&lengths);
    let sizes = GapSizes::new(geometry, elements, bits, codebook.len() as u64)?;
    Ok(Coding::new(Coded::Gap(sizes), codebook, bits as f64, &[]))
}

/// Counts of a tensor, those of each thread by themselves.
pub(super) struct Counts<H>(Vec<Mutex<Option<H>>>);

impl<H> Default for Counts<H> {
    fn default() -> Self {
        Self((0..rayon::current_num_threads()).map(|_| Mutex::default()).collect())
    }
}

impl<H: Default> Counts<H> {
    /// Adds to the counts of this thread.
    pub(super) fn add(&self, count: impl FnOnce(&mut H)) {
        let slot = rayon::current_thread_index().unwrap_or(0) % self.0.len();
        count(parallel::lock(&self.0[slot]).get_or_insert_default());
    }

    /// Takes the sum of the counts made since the last time.
    pub(super) fn take(&mut self, merge: impl Fn(&mut H, &H)) -> H {
        let histograms =
            self.0.iter_mut().map(|slot| slot.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut counted = histograms.filter_map(Option::take);
        let mut sum = counted.next().unwrap_or_default();
        counted.for_each(|histogram| merge(&mut sum, &histogram));
        sum
    }
}

/// Counts consecutive weights of a tensor, from an even element on. All splits of a dtype have the
/// same exponents.
pub(super) fn count(histogram: &mut PairHistogram, dtype: Dtype, weights: &[u8]) {
    histogram.add_floats(least_zeros(dtype), weights);
}

/// The split of a dtype with the fewest zero bits, which all weights allow.
fn least_zeros(dtype: Dtype) -> FloatSplit {
    match dtype {
        Dtype::BF16 => FloatSplit::BF16,
        _ => *FloatSplit::all_of(dtype).last().expect("a dtype that is coded"),
    }
}

/// How the weights that are counted are split.
fn split(dtype: Dtype, histogram: &PairHistogram) -> FloatSplit {
    // `float` has no split for BF16 without zero bits.
    FloatSplit::choose(dtype, histogram.set_bits()).unwrap_or(FloatSplit::BF16)
}

/// The sizes of a tensor in tiles, as its encoding has them.
fn coded(sizes: TileSizes, split: FloatSplit) -> Coded {
    match split {
        FloatSplit::BF16 => Coded::Tile(sizes),
        _ => Coded::Float(sizes.split_as(split)),
    }
}

/// How a tensor is cut into tiles.
fn geometry(dtype: Dtype, shape: &[u64]) -> Result<TileGeometry> {
    let geometry = TileGeometry::choose(shape)?;
    if dtype.bits() / 8 * geometry.strip_elements() <= MAX_STRIP_BYTES {
        Ok(geometry)
    } else {
        TileGeometry::vector(geometry.elements())
    }
}

/// The strips of a portion but the last.
fn portion_strips(geometry: TileGeometry, split: FloatSplit) -> u64 {
    let strip_bytes = split.bytes() as u64 * geometry.strip_elements();
    let least = MIN_PORTION_BYTES.div_ceil(strip_bytes);
    geometry.strip_count().div_ceil(MAX_PORTIONS).max(least)
}

/// The strips of a portion, in groups that are read in one go, each with the bytes of its weights
/// in the tensor.
pub(super) fn groups(
    geometry: TileGeometry,
    split: FloatSplit,
    portion: usize,
) -> impl Iterator<Item = (Range<u64>, Range<u64>)> {
    let (each, bytes) = (portion_strips(geometry, split), split.bytes() as u64);
    let first = portion as u64 * each;
    let end = geometry.strip_count().min(first + each);
    let group = (GROUP_BYTES / (bytes * geometry.strip_elements())).max(1);
    parallel::cut(first..end, group, 1).map(move |strips| {
        let byte = |strip: u64| bytes * geometry.elements().min(strip * geometry.strip_elements());
        (strips.clone(), byte(strips.start)..byte(strips.end))
    })
}

/// The weights of each strip of a group.
pub(super) fn strips(
    geometry: TileGeometry,
    split: FloatSplit,
    strips: Range<u64>,
    weights: &[u8],
) -> impl Iterator<Item = (u64, &[u8])> {
    strips.zip(weights.chunks(split.bytes() * geometry.strip_elements() as usize))
}

/// A code, and what measuring with it needs.
struct Measuring {
    codebook: Codebook,
    encoder: Encoder,
    geometry: TileGeometry,
    split: FloatSplit,
}

impl Measuring {
    /// Makes the code of a tensor; `None` where coding makes it no smaller anyway.
    fn new(dtype: Dtype, shape: &[u64], histogram: &PairHistogram) -> Result<Option<Self>> {
        let (geometry, split) = (geometry(dtype, shape)?, split(dtype, histogram));
        let codebook = Codebook::from_histogram(histogram)?;
        let bits = codebook.expected_bits(histogram);
        let saved = dtype.bits() - u64::from(split.kept_bits());
        if bits.is_none_or(|bits| bits >= saved * geometry.elements()) {
            return Ok(None);
        }
        let encoder = Encoder::new(&codebook, geometry).split_as(split);
        Ok(Some(Self { codebook, encoder, geometry, split }))
    }

    fn portion_count(&self) -> usize {
        let each = portion_strips(self.geometry, self.split);
        self.geometry.strip_count().div_ceil(each) as usize
    }

    /// The bytes that the bits of a group take.
    fn group(&self, group: Range<u64>, weights: &[u8]) -> Result<u64> {
        strips(self.geometry, self.split, group, weights).try_fold(0, |sum, (strip, weights)| {
            Ok(sum + self.encoder.strip_bytes(strip, weights)?)
        })
    }

    /// The coding, from the bytes of each portion.
    fn finish(self, histogram: &PairHistogram, portions: &[u64]) -> Result<Coding> {
        let (codebook, bits) = (self.codebook.to_bytes(), 8 * portions.iter().sum::<u64>());
        let sizes = TileSizes::new(self.geometry, bits, codebook.len() as u64)?;
        let entropy_bits = histogram.exponents().entropy() * self.geometry.elements() as f64;
        let sizes = coded(sizes, self.split);
        Ok(Coding::new(sizes, codebook, entropy_bits, portions))
    }
}

/// Counts and measures a tensor that is in memory, on this thread.
pub(super) fn measure_whole(
    (dtype, shape): (Dtype, &[u64]),
    weights: &[u8],
) -> Result<Option<Coding>> {
    let mut histogram = PairHistogram::default();
    count(&mut histogram, dtype, weights);
    let Some(measuring) = Measuring::new(dtype, shape, &histogram)? else { return Ok(None) };
    let mut bytes = vec![0; measuring.portion_count()];
    for (portion, bytes) in bytes.iter_mut().enumerate() {
        for (group, range) in groups(measuring.geometry, measuring.split, portion) {
            *bytes += measuring.group(group, &weights[range.start as usize..range.end as usize])?;
        }
    }
    measuring.finish(&histogram, &bytes).map(Some)
}

/// Measures a tensor of any size, on all threads, and tells the observer of all its bytes. `read`
/// reads a range of them.
pub(super) fn measure(
    (dtype, shape): (Dtype, &[u64]),
    histogram: &PairHistogram,
    read: impl Fn(Range<u64>, &mut Vec<u8>) -> Result<()> + Sync,
    observer: &dyn Observer,
) -> Result<Option<Coding>> {
    let Some(measuring) = Measuring::new(dtype, shape, histogram)? else {
        observer.advance(dtype.bytes(shape)?);
        return Ok(None);
    };
    let count = measuring.portion_count();
    let bytes: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
    parallel::for_each(bytes.len(), Vec::new, |weights, portion| {
        for (group, range) in groups(measuring.geometry, measuring.split, portion) {
            read(range, weights)?;
            bytes[portion].fetch_add(measuring.group(group, weights)?, Ordering::Relaxed);
            advance(observer, weights.len() as u64)?;
        }
        Ok(())
    })?;
    let bytes: Vec<u64> = bytes.into_iter().map(AtomicU64::into_inner).collect();
    measuring.finish(histogram, &bytes).map(Some)
}

/// The coding in tiles of a tensor that nobody has read, whose codes take this many bits, and which
/// has no zero bits; no portions to encode.
pub(super) fn assume_tile(dtype: Dtype, shape: &[u64], bits: u64) -> Result<Coding> {
    let codebook = vec![0; TYPICAL_CODEBOOK_BYTES];
    let (geometry, length) = (geometry(dtype, shape)?, codebook.len() as u64);
    let sizes = TileSizes::new(geometry, bits.next_multiple_of(8), length)?;
    let sizes = coded(sizes, least_zeros(dtype));
    Ok(Coding::new(sizes, codebook, bits as f64, &[]))
}
