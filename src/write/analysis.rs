//! First pass over a weights file: hashes of the file and of each tensor, histograms, and from them
//! the code and the exact size of everything. After it the whole container can be laid out.
//!
//! ```text
//! file    | prefix | tensor 0            | tensor 1     | ...
//! pieces           |0 |1 |2 |3 |4 |5 |6  |0 |1 |2 |3 |4 |
//! batches |        |           |         |        |     |   read, counted, hashed in the cache
//! ```

use blake3::Hasher;
use rayon::prelude::*;

use super::{Layout, coding::Coding, fingerprint::Fingerprint, gap, input::Weights, tile};
use crate::{
    Dtype, Error, Result, encoding::tile::PairHistogram, huffman::Histogram, open::hash, parallel,
    progress::Observer, source::SourceTensor,
};

/// Bytes that are read, counted and hashed in one go; small enough for the second-level cache.
const PIECE_BYTES: u64 = 256 << 10;

/// Bytes of the smallest tensor that is coded. Smaller ones are stored raw: norms and biases would
/// save a few KiB each, and on a GPU one warp would decode such a tensor for longer than all others
/// take for the matrices of the block.
pub const MIN_CODED_BYTES: u64 = 32 << 10;

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
    /// Of its bytes, for the second pass.
    pub(super) fingerprint: Fingerprint,
    /// How it would be coded; `None` if it is stored raw whatever comes out.
    pub(super) coding: Option<Coding>,
}

/// Part of a tensor that lies in the current batch.
#[derive(Clone, Copy)]
struct BatchPiece {
    tensor: usize,
    /// Where it starts in its tensor, in bytes.
    start: u64,
    /// Where it starts in the file, in bytes.
    offset: u64,
    length: u64,
    work: Work,
}

/// What is to be done with a piece, except for hashing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Nothing.
    None,
    /// Count its exponents.
    Exponents,
    /// It is a whole tensor: count pairs, and measure strips.
    Whole,
    /// Count its pairs. Other tensors are in other batches, since the counts of all pieces of a
    /// batch become one.
    Pairs,
}

/// What was found in a piece.
enum Finding {
    Nothing,
    Exponents(Box<Histogram>),
    Whole(Option<tile::TileCoding>),
}

/// The bytes that the first pass over all files tells the observer of: all tensors, and once more
/// those that are measured on their own.
pub(super) fn bytes(files: &[Weights<'_>], layout: Layout) -> u64 {
    let times = |tensor| if work(layout, tensor) == Work::Pairs { 2 } else { 1 };
    let tensors = files.iter().flat_map(|file| &file.file.tensors);
    tensors.map(|tensor| times(tensor) * tensor.length).sum()
}

/// Makes the first pass over one file.
pub(super) fn analyse(
    file: &Weights<'_>,
    layout: Layout,
    observer: &dyn Observer,
) -> Result<FileAnalysis> {
    let mut file_hasher = Hasher::new();
    file_hasher.update(&file.file.prefix);
    let pass = Pass { file, layout, observer };
    let mut progress = Progress::default();
    let mut buffer = Vec::new();
    for batch in batches(pass.pieces(), rayon::current_num_threads() as u64) {
        if observer.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let found = pass.read_batch(&batch, &progress.pairs, &mut buffer)?;
        rayon::join(
            || hash(&mut file_hasher, &buffer),
            || progress.take(&pass, &batch, &buffer, found),
        )
        .1?;
        observer.advance(buffer.len() as u64);
    }
    progress.finish_until(&pass, file.file.tensors.len())?;
    let analysis =
        FileAnalysis { hash: *file_hasher.finalize().as_bytes(), tensors: progress.analyses };
    let hashes: Vec<_> = analysis.tensors.iter().map(|tensor| &tensor.hash).collect();
    file.check_hashes(&analysis.hash, &hashes)?;
    Ok(analysis)
}

/// What the first pass would find where codes take this many bits a weight. Hashes are those of
/// names, so that no tensor equals another.
pub(super) fn assume(file: &Weights, layout: Layout, exponent_bits: f64) -> Result<FileAnalysis> {
    #[expect(clippy::cast_sign_loss, reason = "the caller checked that it is positive")]
    let bits = |elements: u64| (elements as f64 * exponent_bits) as u64;
    let tensors = file.file.tensors.iter().map(|tensor| {
        let elements = tensor.length / 2;
        let coding = match (work(layout, tensor), layout) {
            (Work::None, _) | (_, Layout::Raw) => None,
            (_, Layout::Gap(geometry)) => Some(Coding::Gap(
                gap::GapCoding::assume(geometry, elements, bits(elements))?.into(),
            )),
            (_, Layout::Tile) => {
                Some(Coding::Tile(tile::TileCoding::assume(&tensor.shape, bits(elements))?))
            }
        };
        let hash = *blake3::hash(tensor.name.as_bytes()).as_bytes();
        Ok(TensorAnalysis { hash, fingerprint: Fingerprint::default(), coding })
    });
    let hash = *blake3::hash(file.file.path.as_bytes()).as_bytes();
    Ok(FileAnalysis { hash, tensors: tensors.collect::<Result<_>>()? })
}

/// Consecutive pieces for all threads; tensors are contiguous in their file, and so is a batch.
fn batches(
    pieces: impl Iterator<Item = BatchPiece>,
    threads: u64,
) -> impl Iterator<Item = Vec<BatchPiece>> {
    let mut pieces = pieces.peekable();
    std::iter::from_fn(move || {
        let first = pieces.next()?;
        let each = match first.work {
            _ if threads == 1 => PIECE_BYTES,
            // Each thread is to have a tensor.
            Work::Whole => tile::WHOLE_BYTES,
            _ => first.length.max(4 * PIECE_BYTES),
        };
        let shared = |piece: &BatchPiece| piece.work != Work::Pairs && first.work != Work::Pairs;
        let end = first.offset + each * threads;
        let mut batch = vec![first];
        while let Some(piece) = pieces.next_if(|piece| {
            piece.offset + piece.length <= end && (piece.tensor == first.tensor || shared(piece))
        }) {
            batch.push(piece);
        }
        Some(batch)
    })
}

/// What is to be done with a tensor.
fn work(layout: Layout, tensor: &SourceTensor) -> Work {
    match layout {
        _ if tensor.dtype != Dtype::BF16 || tensor.length < MIN_CODED_BYTES => Work::None,
        Layout::Raw => Work::None,
        Layout::Gap(_) => Work::Exponents,
        Layout::Tile if tensor.length <= tile::WHOLE_BYTES => Work::Whole,
        Layout::Tile => Work::Pairs,
    }
}

struct Pass<'a> {
    file: &'a Weights<'a>,
    layout: Layout,
    observer: &'a dyn Observer,
}

impl Pass<'_> {
    fn tensor(&self, index: usize) -> &SourceTensor {
        &self.file.file.tensors[index]
    }

    /// Bytes of a tensor's pieces, except for the last one: whole grains of where they are read
    /// from.
    fn piece_bytes(&self, index: usize) -> u64 {
        let grain = self.file.grain(index);
        (PIECE_BYTES / grain * grain).max(grain)
    }

    /// All pieces of the file, in its order.
    fn pieces(&self) -> impl Iterator<Item = BatchPiece> {
        self.file.file.tensors.iter().enumerate().flat_map(|(index, tensor)| {
            let work = work(self.layout, tensor);
            let most = if work == Work::Whole { tensor.length } else { self.piece_bytes(index) };
            parallel::cut(0..tensor.length, most, 1).map(move |range| BatchPiece {
                tensor: index,
                start: range.start,
                offset: tensor.offset + range.start,
                length: range.end - range.start,
                work,
            })
        })
    }

    /// Reads a batch into `buffer`, and does the work of its pieces.
    fn read_batch(
        &self,
        batch: &[BatchPiece],
        pairs: &tile::Counts,
        buffer: &mut Vec<u8>,
    ) -> Result<Vec<(Fingerprint, Finding)>> {
        let lengths = batch.iter().map(|piece| piece.length);
        buffer.resize(lengths.clone().sum::<u64>() as usize, 0);
        let parts: Vec<_> = batch.iter().zip(parallel::split(buffer, lengths)).collect();
        let found = parts.into_par_iter().map(|(piece, part)| {
            self.file.read(piece.offset, part)?;
            let found = match piece.work {
                Work::None => Finding::Nothing,
                Work::Exponents => Finding::Exponents(Histogram::of(part).into()),
                Work::Whole => Finding::Whole(whole(self.tensor(piece.tensor), part)?),
                Work::Pairs => {
                    pairs.add(part);
                    Finding::Nothing
                }
            };
            Ok((Fingerprint::of(piece.start, part), found))
        });
        found.collect()
    }

    /// Measures a tensor whose pairs are counted.
    fn measure(
        &self,
        tensor: &SourceTensor,
        histogram: &PairHistogram,
    ) -> Result<Option<tile::TileCoding>> {
        let geometry = tile::geometry(&tensor.shape)?;
        let read = |range: std::ops::Range<u64>, weights: &mut Vec<u8>| {
            weights.resize((range.end - range.start) as usize, 0);
            self.file.read(tensor.offset + range.start, weights)
        };
        tile::TileCoding::of_read(geometry, histogram, &read, self.observer)
    }
}

/// Counts and measures a tensor that is in memory.
fn whole(tensor: &SourceTensor, weights: &[u8]) -> Result<Option<tile::TileCoding>> {
    let mut histogram = PairHistogram::new();
    histogram.add(weights);
    let geometry = tile::geometry(&tensor.shape)?;
    tile::TileCoding::of_whole(geometry, &histogram, weights)
}

/// The tensor that the pass is in, and those before.
#[derive(Default)]
struct Progress {
    hasher: Hasher,
    fingerprint: Fingerprint,
    exponents: Option<gap::Counting>,
    pairs: tile::Counts,
    coding: Option<Coding>,
    analyses: Vec<TensorAnalysis>,
}

impl Progress {
    fn take(
        &mut self,
        pass: &Pass<'_>,
        batch: &[BatchPiece],
        bytes: &[u8],
        found: Vec<(Fingerprint, Finding)>,
    ) -> Result<()> {
        let base = batch[0].offset;
        for (piece, (fingerprint, found)) in batch.iter().zip(found) {
            self.finish_until(pass, piece.tensor)?;
            self.fingerprint.add(fingerprint);
            let start = (piece.offset - base) as usize;
            hash(&mut self.hasher, &bytes[start..start + piece.length as usize]);
            let tensor = pass.tensor(piece.tensor);
            match (found, pass.layout) {
                (Finding::Exponents(histogram), Layout::Gap(geometry)) => self
                    .exponents
                    .get_or_insert_with(|| {
                        gap::Counting::new(geometry, tensor.length, pass.piece_bytes(piece.tensor))
                    })
                    .add(piece.start, &histogram),
                (Finding::Whole(coding), _) => self.coding = coding.map(Coding::Tile),
                _ => {}
            }
            if piece.work == Work::Pairs && piece.start + piece.length == tensor.length {
                self.coding = pass.measure(tensor, &self.pairs.take())?.map(Coding::Tile);
            }
        }
        Ok(())
    }

    /// Completes the tensors before `index`; those without bytes have no pieces and are completed
    /// on the way.
    fn finish_until(&mut self, pass: &Pass<'_>, index: usize) -> Result<()> {
        while self.analyses.len() < index.min(pass.file.file.tensors.len()) {
            let hash = *self.hasher.finalize().as_bytes();
            if let Some(counting) = self.exponents.take() {
                self.coding = Some(Coding::Gap(counting.finish()?.into()));
            }
            let fingerprint = std::mem::take(&mut self.fingerprint);
            self.analyses.push(TensorAnalysis { hash, fingerprint, coding: self.coding.take() });
            self.hasher.reset();
        }
        Ok(())
    }
}
