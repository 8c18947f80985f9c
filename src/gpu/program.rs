//! Programs: tensors of one GPU, or slices of them, decoded to places of one output. Tasks are made
//! once, and run on the caller's stream any number of times.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{iter, ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, CudaViewMut, DevicePtrMut, DeviceSlice, sys::CUdeviceptr};

use super::launches::{Launches, OUTPUT_ALIGNMENT, ProgramDraft};
use super::status::{Status, check_contexts};
use super::stored::{Addresses, Stored};
use super::{device::Device, driver::capture_of, fault::refuse, memory::Buffer, part::DevicePart};
use crate::Result;
use crate::open::{Rect, Slice};

/// A slice of a tensor's bytes, and where in the output it goes.
#[derive(Debug)]
pub(super) struct Cut<'s> {
    pub(super) stored: &'s Stored,
    pub(super) slice: Slice,
    pub(super) to: u64,
}

/// Tensors of a model on one GPU, or slices of them, ready to be decoded to chosen places of one
/// output. Keeps what it reads alive.
///
/// From [`GpuModel::program`](super::GpuModel::program) and
/// [`GpuModel::rows`](super::GpuModel::rows).
#[derive(Debug)]
pub struct GpuProgram {
    /// From where the sections lie: in device memory, or on the host, over the bus. Then from each
    /// slot of the streamed block with `turn`, except where a graph is captured, since a slot
    /// belongs to whoever decodes next.
    launches: Vec<Launches>,
    /// That of the streamed block through whose slots it decodes, if it needs one.
    pub(super) turn: Option<usize>,
    pub(super) tasks: Buffer,
    pub(super) part: Arc<DevicePart>,
}

impl GpuProgram {
    /// Of tensors on a part, all of them of the streamed block with this turn, if it is given.
    pub(super) fn new(
        part: &Arc<DevicePart>,
        turn: Option<usize>,
        cuts: &[Cut<'_>],
    ) -> Result<Self> {
        let mut tasks = Vec::new();
        let launches = |addresses: Addresses<'_>| {
            let mut draft = ProgramDraft::default();
            for cut in cuts {
                draft.add(cut.stored, &cut.slice, cut.to, &addresses)?;
            }
            draft.finish(&part.device, &mut tasks)
        };
        let in_slots = turn.into_iter().flat_map(|turn| part.in_slots(turn));
        let all = iter::once(part.in_place()).chain(in_slots);
        let launches = all.map(launches).collect::<Result<_>>()?;
        let tasks = Buffer::of(part.device.copies(), &tasks)?;
        Ok(Self { launches, turn, tasks, part: Arc::clone(part) })
    }

    /// The GPU on which it decodes.
    pub fn device(&self) -> &Device {
        &self.part.device
    }

    /// Bytes of the output: to the end of the last piece.
    pub fn bytes(&self) -> u64 {
        self.launches[0].bytes
    }

    /// Whether it decodes tensors of a streamed block out of its slots, which the next such block
    /// is copied into meanwhile.
    pub fn is_streamed(&self) -> bool {
        self.turn.is_some()
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
        let bytes = self.bytes();
        if (output.len() as u64) < bytes {
            let problem = format!("the output has {} bytes of {bytes}", output.len());
            return refuse(problem, "ask for the size");
        }
        // Streams and buffers of two wrappers of one context do not wait for each other.
        if !Arc::ptr_eq(output.stream().context(), stream.context()) {
            let problem = "output and stream come from different contexts";
            return refuse(problem, "make both with Device::context of one device");
        }
        let (pointer, _record) = output.device_ptr_mut(stream);
        // SAFETY: the buffer has the size, and is lent until its events say that the work is done.
        // This value keeps the tasks and what they point to; all of it and the status wait for the
        // context before they are freed.
        unsafe { self.decode_into_raw(pointer, stream, status) }
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
        let Self { launches, turn, tasks, part } = self;
        check_contexts(&part.device, stream, status)?;
        // SAFETY: the caller's promise, and the check above; `self` keeps the tasks, and the part
        // sections and tables.
        let run = |launches: &Launches| unsafe {
            launches.run(&part.device, tasks.pointer(), output, stream, status)
        };
        let (in_place, in_slots) = (&launches[0], &launches[1..]);
        match (turn, &part.streamer) {
            (Some(turn), Some(streamer)) if capture_of(stream)?.is_none() => {
                streamer.with_block(*turn, stream, |slot| run(&in_slots[slot]))
            }
            _ => run(in_place),
        }
    }
}

/// What a [`GpuProgram`] decodes to one place: a tensor, or a slice of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<'n> {
    pub(super) tensor: &'n str,
    /// Of the first dimensions.
    pub(super) ranges: Vec<Range<u64>>,
    pub(super) offset: u64,
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

impl Cut<'_> {
    /// That what kernels decode begins where they can store it.
    pub(super) fn check(&self, tensor: &str) -> Result<()> {
        let Self { stored, slice, to } = self;
        let is_coded = stored.coded().is_some();
        if is_coded && !to.is_multiple_of(OUTPUT_ALIGNMENT) {
            let problem = format!("tensor {tensor:?} would go to byte {to} of the output");
            return refuse(problem, format!("choose a multiple of {OUTPUT_ALIGNMENT}"));
        }
        let row_bytes = |rect: Rect| rect.columns.end - rect.columns.start;
        let mut alone = slice.rects().filter(|rect| !stored.takes(rect)).map(row_bytes);
        if is_coded && alone.any(|bytes| !bytes.is_multiple_of(OUTPUT_ALIGNMENT)) {
            let problem = format!(
                "rows of a slice of tensor {tensor:?} would not begin on multiples of \
                {OUTPUT_ALIGNMENT} bytes"
            );
            let remedy =
                "take a multiple of 8 columns, or convert the container to the tile layout";
            return refuse(problem, remedy);
        }
        if to.checked_add(slice.bytes()).is_none() {
            let problem = format!("tensor {tensor:?} would end after byte 2^64 of the output");
            return refuse(problem, "choose a smaller offset");
        }
        Ok(())
    }
}
