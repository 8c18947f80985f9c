//! Programs: any tensors of one GPU, or slices of them, to any places of one output.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, CudaViewMut, sys::CUdeviceptr};

use super::{
    Device, Status,
    launches::OUTPUT_ALIGNMENT,
    loaded::{Inner, TensorEntry},
    memory::Buffer,
    route::{Cut, Ready, Route},
    stored::Stored,
};
use crate::{
    Error, Result,
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

    /// Its entry in the model, and its bytes there.
    fn find<'m>(&self, model: &'m Inner) -> Result<(&'m TensorEntry, Slice)> {
        let tensor = self.tensor;
        let entry = model.entry(tensor)?;
        Ok((entry, Slice::new(tensor, entry.dtype, &entry.shape, &self.ranges)?))
    }

    /// That what kernels decode begins where they can store it.
    fn check_alignment(&self, stored: &Stored, slice: &Slice) -> Result<()> {
        let (tensor, to) = (self.tensor, self.offset);
        if !to.is_multiple_of(OUTPUT_ALIGNMENT) {
            let problem = format!("tensor {tensor:?} would go to byte {to} of the output");
            return Err(Error::parameter(
                problem,
                format!("choose a multiple of {OUTPUT_ALIGNMENT}"),
            ));
        }
        let row_bytes = |rect: Rect| rect.columns.end - rect.columns.start;
        let mut alone = slice.rects().filter(|rect| !stored.takes(rect)).map(row_bytes);
        if alone.any(|bytes| !bytes.is_multiple_of(OUTPUT_ALIGNMENT)) {
            let problem = format!(
                "rows of a slice of tensor {tensor:?} would not begin on multiples of \
                {OUTPUT_ALIGNMENT} bytes"
            );
            let remedy =
                "take a multiple of 8 columns, or convert the container to the tile layout";
            return Err(Error::parameter(problem, remedy));
        }
        Ok(())
    }

    fn cut<'m>(&self, entry: &'m TensorEntry, slice: Slice) -> Result<Cut<'m>> {
        let (tensor, to) = (self.tensor, self.offset);
        if entry.stored.coded().is_some() {
            self.check_alignment(&entry.stored, &slice)?;
        }
        if to.checked_add(slice.bytes()).is_none() {
            let problem = format!("tensor {tensor:?} would end behind byte 2^64 of the output");
            return Err(Error::parameter(problem, "choose a smaller offset"));
        }
        Ok(Cut { stored: &entry.stored, slice, to })
    }
}

/// Tensors of a model on one GPU, or slices of them, ready to be decoded to chosen places of one
/// output. Keeps the model alive.
///
/// From [`GpuModel::program`](super::GpuModel::program) and
/// [`GpuModel::rows`](super::GpuModel::rows).
#[derive(Debug)]
pub struct GpuProgram {
    route: Route,
    tasks: Buffer,
    part: usize,
    model: Arc<Inner>,
}

impl GpuProgram {
    pub(super) fn new(model: &Arc<Inner>, pieces: &[Piece<'_>]) -> Result<Self> {
        let found = pieces.iter().map(|piece| piece.find(model)).collect::<Result<Vec<_>>>()?;
        let Some((first, _)) = found.first() else {
            return Err(Error::parameter("there is nothing to decode", "name one tensor or more"));
        };
        let part = model.block(first.block).part;
        for (piece, (entry, _)) in pieces.iter().zip(&found) {
            if model.block(entry.block).part != part {
                let (one, other) = (pieces[0].tensor, piece.tensor);
                let problem = format!("the tensors {one:?} and {other:?} lie on different GPUs");
                return Err(Error::parameter(problem, "make a program for each GPU"));
            }
        }
        let turn = if is_worth_a_slot(model, pieces, &found) {
            model.block(first.block).route.turn()
        } else {
            None
        };
        let cuts = pieces.iter().zip(found).map(|(piece, (entry, slice))| piece.cut(entry, slice));
        let (cuts, mut tasks) = (cuts.collect::<Result<Vec<_>>>()?, Vec::new());
        let (on, _) = model.part(part);
        let route = Route::new(on, turn, &cuts, &mut tasks)?;
        let tasks = Buffer::of(on.device.copies(), &tasks)?;
        Ok(Self { route, tasks, part, model: Arc::clone(model) })
    }

    /// The GPU on which it decodes.
    pub fn device(&self) -> &Device {
        &self.model.part(self.part).0.device
    }

    /// Bytes of the output: to the end of the last piece.
    pub fn bytes(&self) -> u64 {
        self.route.bytes()
    }

    /// Whether it decodes tensors of a streamed block out of its slots, which the next such block
    /// is copied into meanwhile.
    pub fn is_streamed(&self) -> bool {
        self.route.turn().is_some()
    }

    /// Puts the decoding of all pieces on a stream, as
    /// [`GpuBlock::decode_into`](super::GpuBlock::decode_into) that of a block. Bytes between
    /// pieces stay as they are; where pieces overlap, bytes are those of any of them.
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into`](super::GpuBlock::decode_into).
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: this value keeps the tasks, and the model what they point to; all of it and the
        // status wait for the context before they are freed.
        unsafe { self.ready().decode_into(output, stream, status) }
    }

    /// As [`GpuBlock::decode_into_raw`](super::GpuBlock::decode_into_raw).
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into_raw`](super::GpuBlock::decode_into_raw).
    ///
    /// # Safety
    /// As [`GpuBlock::decode_into_raw`](super::GpuBlock::decode_into_raw), with
    /// [`GpuProgram::bytes`] of output, and this value in the place of the model.
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the caller's promise; this value keeps the tasks, and the model what they point
        // to.
        unsafe { self.ready().decode_into_raw(output, stream, status) }
    }

    fn ready(&self) -> Ready<'_> {
        let (part, _) = self.model.part(self.part);
        Ready { route: &self.route, part, tasks: self.tasks.pointer() }
    }
}

/// Whether tensors, if they are streamed, come through a slot, which takes a copy of their whole
/// block: where they are of one block, and more than a few rows. (What else is in the block is then
/// there for the next program.)
fn is_worth_a_slot(model: &Inner, pieces: &[Piece<'_>], found: &[(&TensorEntry, Slice)]) -> bool {
    let block = found[0].0.block;
    let wanted = found.iter().fold(0, |sum: u64, (_, slice)| sum.saturating_add(slice.bytes()));
    let few = pieces.iter().any(|piece| !piece.ranges.is_empty())
        && wanted < model.block(block).layout.bytes / 2;
    found.iter().all(|(entry, _)| entry.block == block) && !few
}
