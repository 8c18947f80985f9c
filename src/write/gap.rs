//! A tensor on its way into the `gap` encoding: what the first pass counts, and the sizes that
//! follow.
//!
//! Q: Why portions with histograms of their own? Once the code is known, a portion's histogram
//! gives the bits of its codes, so that the second pass can encode all portions at the same time,
//! each to its final place.

use crate::{
    Result,
    encoding::gap::{GapSizes, Geometry},
    huffman::{CodeLengths, Histogram, Luts},
};

/// Bytes of a portion in a tensor of up to [`MAX_PORTIONS`] of them; larger tensors have larger
/// portions.
pub(super) const MIN_PORTION_BYTES: u64 = 1 << 20;
/// Bounds the histograms of one tensor to 8 MiB, whatever its size.
const MAX_PORTIONS: u64 = 4096;

/// Histograms of a tensor's portions while they are being counted.
pub(super) struct Counting {
    geometry: Geometry,
    piece_bytes: u64,
    portion_bytes: u64,
    histograms: Vec<Histogram>,
}

/// A tensor's code, and where each portion's codes go.
#[derive(Debug)]
pub(super) struct GapCoding {
    pub(super) lengths: CodeLengths,
    pub(super) sizes: GapSizes,
    /// Of the exponents, in bits.
    pub(super) entropy_bits: f64,
    /// Bytes that are best read together.
    pub(super) piece_bytes: u64,
    /// Bytes of a portion but the last, a multiple of them.
    pub(super) portion_bytes: u64,
    /// The first bit of each portion's codes, and `bit_count`.
    pub(super) portion_bits: Vec<u64>,
}

impl Counting {
    /// Prepares for a tensor of `length` bytes that is counted in pieces of `piece_bytes`.
    pub(super) fn new(geometry: Geometry, length: u64, piece_bytes: u64) -> Self {
        let portion_bytes =
            MIN_PORTION_BYTES.max(length.div_ceil(MAX_PORTIONS)).next_multiple_of(piece_bytes);
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

    pub(super) fn finish(self) -> Result<GapCoding> {
        let mut histogram = Histogram::default();
        for portion in &self.histograms {
            histogram.merge(portion);
        }
        let lengths = CodeLengths::from_histogram(&histogram)?;
        let sizes = GapSizes::plan(&lengths, &histogram, self.geometry)?;
        let mut portion_bits = vec![0];
        let mut bits = 0;
        for portion in &self.histograms {
            bits += lengths.bits(portion)?;
            portion_bits.push(bits);
        }
        let Self { piece_bytes, portion_bytes, .. } = self;
        let entropy_bits = histogram.entropy() * sizes.elements() as f64;
        Ok(GapCoding { lengths, sizes, entropy_bits, piece_bytes, portion_bytes, portion_bits })
    }
}

impl GapCoding {
    /// The coding of a tensor that nobody has read, whose codes take this many bits; the code
    /// itself is a made-up one.
    pub(super) fn assume(geometry: Geometry, elements: u64, bits: u64) -> Result<Self> {
        // Each exponent half as frequent as the next one, over as many as trained models have.
        let counts = std::array::from_fn(|exponent| {
            if (88..128).contains(&exponent) { 1 << (exponent - 88) } else { 0 }
        });
        let lengths = CodeLengths::from_histogram(&Histogram::from(counts))?;
        let sizes = GapSizes::new(geometry, elements, bits, Luts::new(&lengths).len() as u64)?;
        Ok(Self {
            lengths,
            sizes,
            entropy_bits: bits as f64,
            piece_bytes: 0,
            portion_bytes: 0,
            portion_bits: vec![0],
        })
    }
}
