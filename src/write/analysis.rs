//! First pass over a weights file: computes hashes of the file and of each tensor, and histograms;
//! from them follow the codes and all exact sizes. Then the whole container can be laid out.
//!
//! The first pass also computes a [`fingerprint`] of 64 bits of each tensor. The second pass
//! computes it again; if the two differ, the error names the source that changed.
//!
//! ```text
//! file    | prefix | tensor 0            | tensor 1     | ...
//! pieces           |0 |1 |2 |3 |4 |5 |6  |0 |1 |2 |3 |4 |
//! batches |        |           |         |        |     |   read, counted, hashed in the cache
//! ```

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use blake3::Hasher;
use rayon::prelude::*;

use super::{
    base::{self, BaseReader, base_of},
    coding::{self, Coding, Counts, ExponentCounts},
    fingerprint::fingerprint,
    input::{Weights, changed},
    options::Layout,
    pieces::{PieceWork, SourcePiece, batches, piece_bytes, pieces, work},
    spill::Spill,
};
use crate::{
    Error, Result,
    encoding::{delta::Differences, tile::PairHistogram},
    huffman::Histogram,
    open::{Base, hash},
    parallel,
    progress::Observer,
    source::SourceTensor,
};

/// A tensor is a difference from its base only if this saves a share of 1 / this, so that a model
/// does not need a second one for next to nothing.
const MIN_GAIN: u64 = 16;
/// The file is hashed in multiples of this: 16 chunks of BLAKE3, as many as one vector has. Others
/// take 13 % longer, since their ends are hashed chunk by chunk.
const HASHED_BYTES: usize = 16 << 10;

/// Result of the first pass over a weights file.
#[derive(Debug)]
pub(super) struct FileAnalysis {
    pub(super) hash: [u8; 32],
    /// In the order of the file.
    pub(super) tensors: Vec<TensorAnalysis>,
}

/// Result of the first pass for a tensor.
#[derive(Debug)]
pub(super) struct TensorAnalysis {
    /// Hash of its bytes.
    pub(super) hash: [u8; 32],
    /// Fingerprint of its bytes, for the second pass: see [`fingerprint`].
    pub(super) fingerprint: u64,
    /// How it would be coded; `None` if it is stored raw whatever comes out.
    pub(super) coding: Option<Coding>,
}

/// Findings on a piece.
#[derive(Default)]
struct PieceAnalysis {
    fingerprint: u64,
    exponents: Option<Box<Histogram>>,
    /// Coding of a whole tensor; `None` for a part.
    coding: Option<Coding>,
}

/// The bytes that the first pass and `more` further ones tell the observer of: all tensors in each,
/// and in the first those that are measured on their own once more.
pub(super) fn bytes(files: &[Weights<'_>], layout: Layout, base: Option<&Base>, more: u64) -> u64 {
    let times = |tensor| more + if work(layout, base, tensor).is_alone() { 2 } else { 1 };
    let tensors = files.iter().flat_map(|file| &file.file.tensors);
    tensors.map(|tensor| times(tensor) * tensor.length).sum()
}

/// Makes the first pass over one file. With a base may come a spill, for what is encoded already.
pub(super) fn analyse(
    file: &Weights<'_>,
    layout: Layout,
    base: Option<(&Base, Option<&Spill>)>,
    observer: &dyn Observer,
) -> Result<FileAnalysis> {
    let mut file_hasher = Hasher::new();
    let prefix = &file.file.prefix;
    let (whole, rest) = prefix.split_at(prefix.len() / HASHED_BYTES * HASHED_BYTES);
    file_hasher.update(whole);
    // A batch begins here; what the file's hasher has not taken yet ends here.
    let at = HASHED_BYTES;
    let (mut buffer, mut from) = (vec![0; at], at - rest.len());
    buffer[from..].copy_from_slice(rest);
    let (base, spill) = base.unzip();
    let mut pass = Pass::new(file, layout, (base, spill.flatten()), observer);
    for batch in batches(pieces(file, layout, base), rayon::current_num_threads() as u64) {
        if observer.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let length: u64 = batch.iter().map(SourcePiece::length).sum();
        buffer.resize(at + length as usize, 0);
        let found = pass.read(&batch, &mut buffer[at..])?;
        let end = buffer.len() - (buffer.len() - from) % HASHED_BYTES;
        let hash_file = || hash(&mut file_hasher, &buffer[from..end]);
        rayon::join(hash_file, || pass.take(&batch, &buffer[at..], found)).1?;
        observer.advance(length);
        from = at - (buffer.len() - end);
        buffer.copy_within(end.., from);
    }
    let hash = *file_hasher.update(&buffer[from..at]).finalize().as_bytes();
    let analysis = FileAnalysis { hash, tensors: pass.analyses };
    let hashes: Vec<_> = analysis.tensors.iter().map(|tensor| &tensor.hash).collect();
    file.check_hashes(&analysis.hash, &hashes)?;
    Ok(analysis)
}

/// The result that the first pass would have if codes took this many bits per weight. Hashes are
/// those of names, so that no tensor equals another.
pub(super) fn assume(file: &Weights, layout: Layout, exponent_bits: f64) -> Result<FileAnalysis> {
    #[expect(clippy::cast_sign_loss, reason = "the caller checked that it is positive")]
    let bits = |elements: u64| (elements as f64 * exponent_bits) as u64;
    let tensors = file.file.tensors.iter().map(|tensor| {
        let (dtype, shape) = (tensor.dtype, &tensor.shape);
        let elements = 8 * tensor.length / dtype.bits();
        let coding = match work(layout, None, tensor) {
            PieceWork::None => None,
            PieceWork::Exponents(geometry) => {
                Some(coding::assume_gap(geometry, elements, bits(elements))?)
            }
            _ => Some(coding::assume_tile(dtype, shape, bits(elements))?),
        };
        let hash = *blake3::hash(tensor.name.as_bytes()).as_bytes();
        Ok(TensorAnalysis { hash, fingerprint: 0, coding })
    });
    let hash = *blake3::hash(file.file.path.as_bytes()).as_bytes();
    Ok(FileAnalysis { hash, tensors: tensors.collect::<Result<_>>()? })
}

struct Pass<'a> {
    file: &'a Weights<'a>,
    layout: Layout,
    base: Option<&'a Base>,
    /// Where segments go that are encoded.
    spill: Option<&'a Spill>,
    observer: &'a dyn Observer,
    /// The hash of the current tensor so far; so are its counts below.
    hasher: Hasher,
    exponents: Option<ExponentCounts>,
    pairs: Counts<PairHistogram>,
    differences: Counts<Differences>,
    /// Analyses of all tensors; tensors without bytes have no pieces.
    analyses: Vec<TensorAnalysis>,
}

impl<'a> Pass<'a> {
    fn new(
        file: &'a Weights<'a>,
        layout: Layout,
        (base, spill): (Option<&'a Base>, Option<&'a Spill>),
        observer: &'a dyn Observer,
    ) -> Self {
        let empty =
            || TensorAnalysis { hash: *blake3::hash(&[]).as_bytes(), fingerprint: 0, coding: None };
        let analyses = file.file.tensors.iter().map(|_| empty()).collect();
        Self {
            file,
            layout,
            base,
            spill,
            observer,
            hasher: Hasher::new(),
            exponents: None,
            pairs: Counts::default(),
            differences: Counts::default(),
            analyses,
        }
    }

    /// Reads a batch into `buffer`, which is as long, and does the work of its pieces.
    fn read(&self, batch: &[SourcePiece], buffer: &mut [u8]) -> Result<Vec<PieceAnalysis>> {
        let lengths = batch.iter().map(SourcePiece::length);
        let parts: Vec<_> = batch.iter().zip(parallel::split(buffer, lengths)).collect();
        let found = parts.into_par_iter().map(|(piece, part)| {
            self.file.read(piece.offset, part)?;
            let mut found = PieceAnalysis::default();
            match piece.work {
                PieceWork::None => {}
                PieceWork::Exponents(_) => found.exponents = Some(Histogram::of(part).into()),
                PieceWork::Whole => {
                    let SourceTensor { dtype, shape, .. } = self.tensor(piece);
                    found.coding = coding::measure_whole((*dtype, shape), part)?;
                }
                PieceWork::Pairs => self.count_pairs(self.tensor(piece), part),
                PieceWork::Differences => self.count_differences(piece, part)?,
            }
            found.fingerprint = fingerprint(piece.range.start, part);
            Ok(found)
        });
        found.collect()
    }

    fn count_pairs(&self, tensor: &SourceTensor, weights: &[u8]) {
        self.pairs.add(|histogram| coding::count(histogram, tensor.dtype, weights));
    }

    fn count_differences(&self, piece: &SourcePiece, weights: &[u8]) -> Result<()> {
        let base = base_of(self.base, self.tensor(piece)).expect("it was found before");
        let mut reader = BaseReader::new(&base)?;
        let base = reader.read(&piece.range)?;
        self.differences.add(|differences| differences.add(base, weights));
        Ok(())
    }

    fn tensor(&self, piece: &SourcePiece) -> &'a SourceTensor {
        &self.file.file.tensors[piece.tensor]
    }

    /// Takes what was found in a batch, in order, and completes the tensors that end in it.
    fn take(
        &mut self,
        batch: &[SourcePiece],
        mut bytes: &[u8],
        found: Vec<PieceAnalysis>,
    ) -> Result<()> {
        for (piece, found) in batch.iter().zip(found) {
            let tensor = self.tensor(piece);
            let own = bytes.split_off(..piece.length() as usize).expect("a batch has its pieces");
            hash(&mut self.hasher, own);
            if let (PieceWork::Exponents(geometry), Some(histogram)) = (piece.work, found.exponents)
            {
                let each = piece_bytes(self.file, piece.tensor, piece.work);
                let new = || ExponentCounts::new(geometry, tensor.length, each);
                self.exponents.get_or_insert_with(new).add(piece.range.start, &histogram);
            }
            self.analyses[piece.tensor].fingerprint ^= found.fingerprint;
            if piece.range.end < tensor.length {
                continue;
            }
            let coding = match piece.work {
                PieceWork::Pairs => self.measure(tensor, self.observer)?,
                PieceWork::Differences => self.measure_differences(piece.tensor)?,
                _ => self.exponents.take().map(ExponentCounts::finish).transpose()?,
            };
            let analysis = &mut self.analyses[piece.tensor];
            analysis.hash = *self.hasher.finalize().as_bytes();
            analysis.coding = coding.or(found.coding);
            self.hasher.reset();
        }
        Ok(())
    }

    /// Measures a tensor whose pairs are counted.
    fn measure(
        &mut self,
        tensor: &SourceTensor,
        observer: &dyn Observer,
    ) -> Result<Option<Coding>> {
        let pairs = self.pairs.take(PairHistogram::merge);
        let read = |range, weights: &mut Vec<u8>| self.read_part(tensor, range, weights);
        let of = (tensor.dtype, &tensor.shape[..]);
        coding::measure(of, &pairs, read, observer)
    }

    fn read_part(
        &self,
        tensor: &SourceTensor,
        range: Range<u64>,
        weights: &mut Vec<u8>,
    ) -> Result<()> {
        weights.resize((range.end - range.start) as usize, 0);
        self.file.read(tensor.offset + range.start, weights)
    }

    /// Measures a tensor whose differences are counted; if its plane alone might be smaller, as it
    /// is without a base too.
    fn measure_differences(&mut self, index: usize) -> Result<Option<Coding>> {
        let tensor = &self.file.file.tensors[index];
        let differences = self.differences.take(Differences::merge);
        let base = base_of(self.base, tensor).expect("it was found before");
        let (seen, spilled) = (AtomicU64::new(0), self.spill.map(Spill::end));
        let read = |range: Range<u64>, weights: &mut Vec<u8>| {
            self.read_part(tensor, range.clone(), weights)?;
            seen.fetch_xor(fingerprint(range.start, weights), Ordering::Relaxed);
            Ok(())
        };
        let coding = base::measure(tensor, base, &differences, self.spill, read)?;
        Error::unless(seen.into_inner() == self.analyses[index].fingerprint, || {
            changed(format_args!("{}: tensor {:?}", self.file.file.path, tensor.name))
        })?;
        self.observer.advance(tensor.length);
        if coding.bytes() <= tensor.length / 2 {
            return Ok(Some(coding));
        }
        let alone = self.measure_alone(index)?;
        let is_near = |alone: &Coding| alone.bytes() <= coding.bytes() / MIN_GAIN * (MIN_GAIN + 1);
        let Some(alone) = alone.filter(is_near) else { return Ok(Some(coding)) };
        self.spill.into_iter().zip(spilled).for_each(|(spill, from)| spill.forget(from));
        Ok(Some(alone))
    }

    /// Counts and measures a tensor as without a base; the observer does not count these reads.
    fn measure_alone(&mut self, index: usize) -> Result<Option<Coding>> {
        let tensor = &self.file.file.tensors[index];
        let each = piece_bytes(self.file, index, PieceWork::None);
        let parts: Vec<_> = parallel::cut(0..tensor.length, each, 1).collect();
        if let Layout::Gap(geometry) = self.layout {
            let (mut counts, mut weights) =
                (ExponentCounts::new(geometry, tensor.length, each), Vec::new());
            for part in parts {
                let start = part.start;
                self.read_part(tensor, part, &mut weights)?;
                counts.add(start, &Histogram::of(&weights));
            }
            return counts.finish().map(Some);
        }
        parallel::for_each(parts.len(), Vec::new, |weights, part| {
            self.read_part(tensor, parts[part].clone(), weights)?;
            self.count_pairs(tensor, weights);
            Ok(())
        })?;
        self.measure(tensor, &())
    }
}
