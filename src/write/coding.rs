//! A tensor's code, in either encoding, and what the plan asks it for; and how a tensor gets its
//! code in the `gap` encoding. The `tile` encoding's way is [`tile`](super::tile).
//!
//! Q: Why portions with histograms of their own? Once the code is known, a portion's histogram
//! gives the bits of its codes, so that the second pass can encode all portions at the same time,
//! each to its final place.

use crate::{
    Result,
    encoding::gap::{GapGeometry, GapSizes},
    format::Coded,
    huffman::{self, CodeLengths, Histogram},
};

/// Bytes of a portion in a tensor of up to [`MAX_PORTIONS`] of them; larger tensors have larger
/// portions.
pub(super) const MIN_PORTION_BYTES: u64 = 1 << 20;
/// Bounds the histograms of one tensor to 8 MiB, whatever its size.
const MAX_PORTIONS: u64 = 4096;

/// How a tensor would be coded, with the size of everything and the place of each portion.
#[derive(Debug)]
pub(super) struct Coding {
    pub(super) sizes: Coded,
    /// As stored; a tensor's share of the memory of a plan.
    pub(super) codebook: Vec<u8>,
    /// Of the exponents, in bits.
    pub(super) entropy_bits: f64,
    /// Where the codes of each portion begin, and where the last ones end: in `gap` the bit, in
    /// `tile` the byte.
    pub(super) portion_starts: Vec<u64>,
    /// In `gap` bytes that are best read together, and those of a portion but the last, a multiple
    /// of them. In `tile` both follow from the geometry.
    pub(super) piece_bytes: u64,
    pub(super) portion_bytes: u64,
}

impl Coding {
    /// The encoding and its parameters, as the tensor's record has them; section kind and length in
    /// bytes of each array, of which the first is the codebook.
    pub(super) fn stored(&self) -> (u32, [u64; 4], Vec<(u32, u64)>) {
        let [first, second, third] = self.sizes.parameters();
        (self.sizes.encoding(), [first, second, third, 0], self.sizes.arrays())
    }

    /// Parts that are encoded alone, numbered in order.
    pub(super) fn portion_count(&self) -> usize {
        self.portion_starts.len() - 1
    }
}

/// Histograms of a tensor's portions while they are being counted.
pub(super) struct Counting {
    geometry: GapGeometry,
    piece_bytes: u64,
    portion_bytes: u64,
    histograms: Vec<Histogram>,
}

impl Counting {
    /// Prepares for a tensor of `length` bytes that is counted in pieces of `piece_bytes`.
    pub(super) fn new(geometry: GapGeometry, length: u64, piece_bytes: u64) -> Self {
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

    pub(super) fn finish(self) -> Result<Coding> {
        let Self { geometry, piece_bytes, portion_bytes, histograms } = self;
        let mut histogram = Histogram::default();
        for portion in &histograms {
            histogram.merge(portion);
        }
        let lengths = CodeLengths::from_histogram(&histogram)?;
        let codebook = huffman::codebook(&lengths);
        let (mut portion_starts, mut bits) = (vec![0], 0);
        for portion in &histograms {
            bits += lengths.bits(portion)?;
            portion_starts.push(bits);
        }
        let sizes = GapSizes::new(geometry, histogram.total(), bits, codebook.len() as u64)?;
        Ok(Coding {
            codebook,
            entropy_bits: histogram.entropy() * sizes.elements() as f64,
            sizes: Coded::Gap(sizes),
            portion_starts,
            piece_bytes,
            portion_bytes,
        })
    }
}

/// The `gap` coding of a tensor that nobody has read, whose codes take this many bits; the code
/// itself is a made-up one, and there are no portions to encode.
pub(super) fn assume(geometry: GapGeometry, elements: u64, bits: u64) -> Result<Coding> {
    // Each exponent half as frequent as the next one, over as many as trained models have.
    let counts =
        std::array::from_fn(
            |exponent| {
                if (88..128).contains(&exponent) { 1 << (exponent - 88) } else { 0 }
            },
        );
    let codebook = huffman::codebook(&CodeLengths::from_histogram(&Histogram::from(counts))?);
    let sizes = GapSizes::new(geometry, elements, bits, codebook.len() as u64)?;
    Ok(Coding {
        sizes: Coded::Gap(sizes),
        codebook,
        entropy_bits: bits as f64,
        portion_starts: vec![0],
        piece_bytes: 0,
        portion_bytes: 0,
    })
}
