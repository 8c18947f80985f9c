//! First pass over a weights file: hashes of the file and of each tensor, histograms, and from them the code and
//! the exact size of everything. After it the whole container can be laid out.
//!
//! ```text
//! file    | prefix | tensor 0            | tensor 1     | ...
//! chunks           |0     |1     |2      |0     |1      |      one histogram each: where each chunk's codes start
//! batches |   |   |   |   |   |   |   |   |   |   |   |        read, counted and hashed while in the cache
//! ```
//! Q: Why chunks with histograms of their own? Once the code is known, a chunk's histogram gives the bits of its codes, so
//! that the second pass can encode all chunks at the same time, each to its final place.

use blake3::Hasher;
use rayon::prelude::*;

use crate::{
    Dtype, Error, Result,
    encoding::gap::{Geometry, Layout},
    huffman::{CodeLengths, Histogram},
    open::hash,
    progress::Observer,
    source::{SourceTensor, WeightsFile},
};

/// Bytes that are read, counted and hashed in one go; small enough for the second-level cache.
const PIECE_BYTES: u64 = 256 << 10;
/// Bytes of a chunk in a tensor of up to [`MAX_CHUNKS`] of them; larger tensors have larger chunks.
pub(super) const MIN_CHUNK_BYTES: u64 = 1 << 20;
/// Bounds the histograms of one tensor to 8 MiB, whatever its size.
const MAX_CHUNKS: u64 = 4096;

/// What the first pass found out about a weights file.
#[derive(Debug)]
pub(super) struct FileAnalysis {
    pub(super) hash: [u8; 32],
    /// In the order of the file.
    pub(super) tensors: Vec<TensorAnalysis>,
}

/// What the first pass found out about a tensor.
#[derive(Debug)]
pub(super) struct TensorAnalysis {
    /// Hash of its bytes.
    pub(super) hash: [u8; 32],
    /// How its exponents would be coded; `None` for other dtypes and for tensors without elements.
    pub(super) coding: Option<Coding>,
}

/// A tensor's code, and where each chunk's codes go.
#[derive(Debug)]
pub(super) struct Coding {
    pub(super) lengths: CodeLengths,
    pub(super) layout: Layout,
    pub(super) histogram: Histogram,
    /// Bytes of a chunk but the last.
    pub(super) chunk_bytes: u64,
    /// The first bit of each chunk's codes, and `bit_count`.
    pub(super) chunk_bits: Vec<u64>,
}

/// Bytes of each chunk of a tensor of `length` bytes, but the last.
fn chunk_bytes(length: u64) -> u64 {
    length.div_ceil(MAX_CHUNKS).next_power_of_two().max(MIN_CHUNK_BYTES)
}

/// Histograms of a tensor's chunks while they are being counted.
struct Counting {
    chunk_bytes: u64,
    histograms: Vec<Histogram>,
}

/// Part of a tensor that lies in the current batch.
struct Piece {
    tensor: usize,
    /// Where it starts in its tensor, in bytes.
    start: u64,
    /// Where it starts in the file, in bytes.
    offset: u64,
    length: u64,
}

/// Makes the first pass over one file.
pub(super) fn analyse(
    file: &WeightsFile,
    geometry: Geometry,
    observer: &dyn Observer,
) -> Result<FileAnalysis> {
    let mut file_hasher = Hasher::new();
    file_hasher.update(&file.prefix);
    let mut progress = TensorProgress::default();
    let mut analyses = Vec::with_capacity(file.tensors.len());
    let mut buffer = Vec::new();
    let threads = rayon::current_num_threads();
    for batch in batches(pieces(&file.tensors), if threads == 1 { 1 } else { 4 * threads }) {
        if observer.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let histograms = read_batch(file, &batch, &mut buffer)?;
        rayon::join(
            || hash(&mut file_hasher, &buffer),
            || progress.take(&file.tensors, &batch, &buffer, histograms, geometry, &mut analyses),
        )
        .1?;
        observer.advance(buffer.len() as u64);
    }
    progress.finish_until(&file.tensors, file.tensors.len(), geometry, &mut analyses)?;
    Ok(FileAnalysis { hash: *file_hasher.finalize().as_bytes(), tensors: analyses })
}

/// All pieces of a file, in its order.
fn pieces(tensors: &[SourceTensor]) -> impl Iterator<Item = Piece> {
    tensors.iter().enumerate().flat_map(|(index, tensor)| {
        (0..tensor.length).step_by(PIECE_BYTES as usize).map(move |start| Piece {
            tensor: index,
            start,
            offset: tensor.offset + start,
            length: PIECE_BYTES.min(tensor.length - start),
        })
    })
}

/// Consecutive pieces of up to `count` times the size of one; tensors are contiguous in their file, and so is a batch.
fn batches(pieces: impl Iterator<Item = Piece>, count: usize) -> impl Iterator<Item = Vec<Piece>> {
    let mut pieces = pieces.peekable();
    std::iter::from_fn(move || {
        let first = pieces.peek()?.offset;
        let mut batch = Vec::with_capacity(count);
        while let Some(piece) =
            pieces.next_if(|piece| piece.offset + piece.length <= first + PIECE_BYTES * count as u64)
        {
            batch.push(piece);
        }
        Some(batch)
    })
}

/// Reads a batch into `buffer`, and counts the exponents of its BF16 pieces.
fn read_batch(file: &WeightsFile, batch: &[Piece], buffer: &mut Vec<u8>) -> Result<Vec<Option<Histogram>>> {
    let length: u64 = batch.iter().map(|piece| piece.length).sum();
    buffer.resize(length as usize, 0);
    let mut parts = Vec::with_capacity(batch.len());
    let mut rest = &mut buffer[..];
    for piece in batch {
        let part;
        (part, rest) = rest.split_at_mut(piece.length as usize);
        parts.push((piece, part));
    }
    parts
        .into_par_iter()
        .map(|(piece, part)| {
            file.read_exact_at(piece.offset, part)?;
            Ok((file.tensors[piece.tensor].dtype == Dtype::BF16).then(|| Histogram::of(part)))
        })
        .collect()
}

/// The tensor that the pass is in.
#[derive(Default)]
struct TensorProgress {
    hasher: Hasher,
    counting: Option<Counting>,
}

impl TensorProgress {
    fn take(
        &mut self,
        tensors: &[SourceTensor],
        batch: &[Piece],
        bytes: &[u8],
        histograms: Vec<Option<Histogram>>,
        geometry: Geometry,
        analyses: &mut Vec<TensorAnalysis>,
    ) -> Result<()> {
        let base = batch[0].offset;
        for (piece, histogram) in batch.iter().zip(histograms) {
            self.finish_until(tensors, piece.tensor, geometry, analyses)?;
            let start = (piece.offset - base) as usize;
            hash(&mut self.hasher, &bytes[start..start + piece.length as usize]);
            if let Some(histogram) = histogram {
                let chunk_bytes = chunk_bytes(tensors[piece.tensor].length);
                let counting =
                    self.counting.get_or_insert_with(|| Counting { chunk_bytes, histograms: Vec::new() });
                if piece.start.is_multiple_of(chunk_bytes) {
                    counting.histograms.push(histogram);
                } else {
                    counting.histograms.last_mut().expect("a chunk has begun").merge(&histogram);
                }
            }
        }
        Ok(())
    }

    /// Completes the tensors before `index`; those without bytes have no pieces and are completed on the way.
    fn finish_until(
        &mut self,
        tensors: &[SourceTensor],
        index: usize,
        geometry: Geometry,
        analyses: &mut Vec<TensorAnalysis>,
    ) -> Result<()> {
        while analyses.len() < index.min(tensors.len()) {
            let hash = *self.hasher.finalize().as_bytes();
            let coding = self.counting.take().map(|counting| counting.finish(geometry)).transpose()?;
            analyses.push(TensorAnalysis { hash, coding });
            self.hasher.reset();
        }
        Ok(())
    }
}

impl Counting {
    fn finish(self, geometry: Geometry) -> Result<Coding> {
        let mut histogram = Histogram::default();
        for chunk in &self.histograms {
            histogram.merge(chunk);
        }
        let lengths = CodeLengths::from_histogram(&histogram)?;
        let layout = Layout::plan(&lengths, &histogram, geometry)?;
        let mut chunk_bits = vec![0];
        let mut bits = 0;
        for chunk in &self.histograms {
            bits += lengths.bits(chunk)?;
            chunk_bits.push(bits);
        }
        Ok(Coding { lengths, layout, histogram, chunk_bytes: self.chunk_bytes, chunk_bits })
    }
}
