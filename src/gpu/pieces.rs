//! What programs decode to where: any tensors of one GPU, or slices of them.

use std::{ops::Range, sync::Arc};

use super::{
    fault::refuse,
    launches::OUTPUT_ALIGNMENT,
    memory::Buffer,
    model::{GpuModel, LoadedBlock, LoadedTensor},
    program::{Cut, GpuProgram, Route},
    stored::Stored,
};
use crate::{
    Result,
    open::{Rect, Slice},
};

/// What a [`GpuProgram`] decodes to one place: a tensor, or a slice of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<'n> {
    tensor: &'n str,
    /// Of the first dimensions.
    ranges: Vec<Range<u64>>,
    offset: u64,
}

impl<'n> Piece<'n> {
    /// All of a tensor, from this byte of the output on: a multiple of 16, unless the tensor is
    /// stored as it is.
    #[must_use]
    pub const fn new(tensor: &'n str, offset: u64) -> Self {
        Self { tensor, ranges: Vec::new(), offset }
    }

    /// Of it only the weights whose index in the first dimension lies in `rows`. Faster where they
    /// start on a multiple of 16 elements.
    #[must_use]
    pub fn rows(self, rows: Range<u64>) -> Self {
        self.slice(&[rows])
    }

    /// Of it only a slice, dense, as [`Tensor::slice`](crate::Tensor::slice) gives it.
    ///
    /// Of a matrix in tiles, only the tiles that hold the slice are decoded, all in the launch of
    /// the others: fastest at multiples of 32 rows and 256 columns, and where a row of the slice
    /// has a multiple of 8 weights. Of other coded tensors each row of a slice that does not lie in
    /// one piece is decoded by itself, which costs a thread block or more a row and is refused
    /// where it has no multiple of 8 weights; convert such containers to the `tile` layout.
    #[must_use]
    pub fn slice(self, ranges: &[Range<u64>]) -> Self {
        Self { ranges: ranges.to_vec(), ..self }
    }
}

/// A piece with what it names.
struct FoundPiece<'m> {
    entry: &'m LoadedTensor,
    block: &'m LoadedBlock,
    slice: Slice,
    to: u64,
}

impl<'m> FoundPiece<'m> {
    fn new(model: &'m GpuModel, piece: &Piece<'_>) -> Result<Self> {
        let (entry, block) = model.inner.tensor(piece.tensor)?;
        let slice = Slice::new(piece.tensor, entry.dtype, &entry.shape, &piece.ranges)?;
        Ok(Self { entry, block, slice, to: piece.offset })
    }

    fn cut(self) -> Result<Cut<'m>> {
        let Self { entry: LoadedTensor { name, stored, .. }, slice, to, .. } = self;
        if stored.coded().is_some() {
            check_alignment(name, stored, &slice, to)?;
        }
        if to.checked_add(slice.bytes()).is_none() {
            let problem = format!("tensor {name:?} would end behind byte 2^64 of the output");
            return refuse(problem, "choose a smaller offset");
        }
        Ok(Cut { stored, slice, to })
    }
}

/// That what kernels decode begins where they can store it.
fn check_alignment(tensor: &str, stored: &Stored, slice: &Slice, to: u64) -> Result<()> {
    if !to.is_multiple_of(OUTPUT_ALIGNMENT) {
        let problem = format!("tensor {tensor:?} would go to byte {to} of the output");
        return refuse(problem, format!("choose a multiple of {OUTPUT_ALIGNMENT}"));
    }
    let row_bytes = |rect: Rect| rect.columns.end - rect.columns.start;
    let mut alone = slice.rects().filter(|rect| !stored.takes(rect)).map(row_bytes);
    if alone.any(|bytes| !bytes.is_multiple_of(OUTPUT_ALIGNMENT)) {
        let problem = format!(
            "rows of a slice of tensor {tensor:?} would not begin on multiples of \
            {OUTPUT_ALIGNMENT} bytes"
        );
        let remedy = "take a multiple of 8 columns, or convert the container to the tile layout";
        return refuse(problem, remedy);
    }
    Ok(())
}

impl GpuModel {
    /// Prepares decoding of tensors that lie on one GPU, of any blocks, to chosen places of one
    /// output: as many launches as for a block. Allocates some device memory, 128 bytes a piece
    /// (three times that if streamed), and waits for its upload; the result can be used any number
    /// of times.
    ///
    /// Tensors of one streamed block come through its slots, as
    /// [`GpuBlock::decode_into`](super::GpuBlock::decode_into) says; those of several, and less
    /// than half of a block where rows are asked for, are read in place, over the bus.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if there is no piece, no such tensor or no
    /// such row, a tensor is not loaded, a row does not fill whole bytes, the tensors lie on
    /// several GPUs, or an offset is no multiple of 16; [`Error::Gpu`](crate::Error::Gpu).
    pub fn program(&self, pieces: &[Piece<'_>]) -> Result<GpuProgram> {
        let found =
            pieces.iter().map(|piece| FoundPiece::new(self, piece)).collect::<Result<Vec<_>>>()?;
        let Some(first) = found.first() else {
            return refuse("there is nothing to decode", "name one tensor or more");
        };
        let part = &first.block.program.part;
        if let Some(other) =
            found.iter().find(|other| !Arc::ptr_eq(&other.block.program.part, part))
        {
            let (one, other) = (&first.entry.name, &other.entry.name);
            let problem = format!("the tensors {one:?} and {other:?} lie on different GPUs");
            return refuse(problem, "make a program for each GPU");
        }
        let turn = if is_worth_a_slot(pieces, &found) { first.block.program.turn() } else { None };
        let (part, mut tasks) = (Arc::clone(part), Vec::new());
        let cuts = found.into_iter().map(FoundPiece::cut).collect::<Result<Vec<_>>>()?;
        let route = Route::new(&part, turn, &cuts, &mut tasks)?;
        let tasks = Arc::new(Buffer::of(part.device.copies(), &tasks)?);
        Ok(GpuProgram { route, tasks, part })
    }

    /// As [`GpuModel::program`], for rows of one tensor: all weights whose index in the first
    /// dimension lies in `rows`.
    ///
    /// # Errors
    /// As [`GpuModel::program`].
    pub fn rows(&self, tensor: &str, rows: Range<u64>) -> Result<GpuProgram> {
        self.program(&[Piece::new(tensor, 0).rows(rows)])
    }
}

/// Whether tensors, if they are streamed, come through a slot, which takes a copy of their whole
/// block: where they are of one block, and more than a few rows. (What else is in the block is then
/// there for the next program.)
fn is_worth_a_slot(pieces: &[Piece<'_>], found: &[FoundPiece<'_>]) -> bool {
    let first = &found[0];
    let wanted = found.iter().fold(0, |sum: u64, found| sum.saturating_add(found.slice.bytes()));
    let few = pieces.iter().any(|piece| !piece.ranges.is_empty())
        && wanted < first.block.layout.bytes / 2;
    found.iter().all(|found| found.entry.block == first.entry.block) && !few
}
