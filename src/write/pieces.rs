//! Pieces of tensors, the work of the first pass on each, and the batches in which they are read.

use std::ops::Range;

use super::{base::base_of, coding, input::Weights, options::Layout};
use crate::{
    Dtype,
    encoding::{delta::segment_elements, gap::GapGeometry},
    float::is_coded,
    open::Base,
    parallel,
    source::SourceTensor,
};

/// Bytes that are read, counted and hashed in one go; small enough for the second-level cache.
const PIECE_BYTES: u64 = 256 << 10;

/// Bytes of the smallest tensor that is coded. Smaller ones are stored raw: norms and biases would
/// save a few KiB each, and on a GPU one warp would decode such a tensor for longer than all others
/// take for the matrices of the block.
pub const MIN_CODED_BYTES: u64 = 32 << 10;

/// Part of a tensor that lies in the current batch.
#[derive(Clone)]
pub(super) struct SourcePiece {
    pub(super) tensor: usize,
    /// Its bytes in its tensor.
    pub(super) range: Range<u64>,
    /// Where it starts in the file, in bytes.
    pub(super) offset: u64,
    pub(super) work: PieceWork,
}

impl SourcePiece {
    pub(super) fn length(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// The work on a piece, except for hashing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceWork {
    /// Nothing.
    None,
    /// Count its exponents.
    Exponents(GapGeometry),
    /// It is a whole tensor: count pairs, and measure strips.
    Whole,
    /// Count its pairs. Other tensors are in other batches, since the counts of all pieces of a
    /// batch become one.
    Pairs,
    /// Count its differences from the base, in batches of its own too.
    Differences,
}

impl PieceWork {
    /// Whether a batch has pieces of one tensor only.
    pub(super) const fn is_alone(self) -> bool {
        matches!(self, Self::Pairs | Self::Differences)
    }
}

/// Consecutive pieces for all threads; tensors are contiguous in their file, and so is a batch.
pub(super) fn batches(
    pieces: impl Iterator<Item = SourcePiece>,
    threads: u64,
) -> impl Iterator<Item = Vec<SourcePiece>> {
    let mut pieces = pieces.peekable();
    std::iter::from_fn(move || {
        let first = pieces.next()?;
        let each = match first.work {
            _ if threads == 1 => PIECE_BYTES,
            // Each thread is to have a tensor.
            PieceWork::Whole => coding::WHOLE_BYTES,
            _ => first.length().max(4 * PIECE_BYTES),
        };
        let (tensor, work) = (first.tensor, first.work);
        let shared = |piece: &SourcePiece| !piece.work.is_alone() && !work.is_alone();
        let end = first.offset + each * threads;
        let mut batch = vec![first];
        while let Some(piece) = pieces.next_if(|piece| {
            piece.offset + piece.length() <= end && (piece.tensor == tensor || shared(piece))
        }) {
            batch.push(piece);
        }
        Some(batch)
    })
}

/// The work on a tensor.
pub(super) fn work(layout: Layout, base: Option<&Base>, tensor: &SourceTensor) -> PieceWork {
    match layout {
        _ if tensor.length < MIN_CODED_BYTES => PieceWork::None,
        Layout::Raw => PieceWork::None,
        _ if base_of(base, tensor).is_some() => PieceWork::Differences,
        Layout::Gap(geometry) if tensor.dtype == Dtype::BF16 => PieceWork::Exponents(geometry),
        _ if !is_coded(tensor.dtype) => PieceWork::None,
        _ if tensor.length <= coding::WHOLE_BYTES => PieceWork::Whole,
        _ => PieceWork::Pairs,
    }
}

/// Bytes of a tensor's pieces, except for the last one: whole grains of where they are read from.
pub(super) fn piece_bytes(file: &Weights<'_>, tensor: usize, work: PieceWork) -> u64 {
    if work == PieceWork::Differences {
        return 2 * segment_elements(&file.file.tensors[tensor].shape);
    }
    let grain = file.grain(tensor);
    (PIECE_BYTES / grain * grain).max(grain)
}

/// All pieces of a file, in its order.
pub(super) fn pieces(
    file: &Weights<'_>,
    layout: Layout,
    base: Option<&Base>,
) -> impl Iterator<Item = SourcePiece> {
    file.file.tensors.iter().enumerate().flat_map(move |(index, tensor)| {
        let work = work(layout, base, tensor);
        let is_whole = work == PieceWork::Whole;
        let most = if is_whole { tensor.length } else { piece_bytes(file, index, work) };
        parallel::cut(0..tensor.length, most, 1).map(move |range| {
            let offset = tensor.offset + range.start;
            SourcePiece { tensor: index, range, offset, work }
        })
    })
}
