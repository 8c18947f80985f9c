//! Programs: tensors of one GPU, or slices of them, decoded to places of one output. Tasks are made
//! once, and run on the caller's stream any number of times.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaViewMut, DevicePtrMut, DeviceSlice, sys::CUdeviceptr};

use super::{
    device::Device,
    driver::capture_of,
    fault::refuse,
    launches::{Launches, ProgramDraft},
    memory::Buffer,
    part::DevicePart,
    status::{Status, check_contexts},
    stored::{Addresses, Stored},
    task::DecodeTask,
};
use crate::{Result, open::Slice};

/// A slice of a tensor's bytes, and where in the output it goes.
#[derive(Debug)]
pub(super) struct Cut<'s> {
    pub(super) stored: &'s Stored,
    pub(super) slice: Slice,
    pub(super) to: u64,
}

/// The launches that decode some cuts.
#[derive(Debug)]
pub(super) struct Route {
    /// From where the sections lie: in device memory, or on the host, over the bus.
    in_place: Launches,
    /// From the slots of the streamed block with this turn, except where a graph is captured, since
    /// a slot belongs to whoever decodes next: launches for each slot.
    streamed: Option<(usize, Vec<Launches>)>,
}

impl Route {
    /// Of tensors on a part, all of them of the streamed block with this turn, if it is given.
    /// Appends to the tasks.
    pub(super) fn new(
        part: &DevicePart,
        turn: Option<usize>,
        cuts: &[Cut<'_>],
        tasks: &mut Vec<DecodeTask>,
    ) -> Result<Self> {
        let mut launches = |addresses: &Addresses<'_>| {
            let mut draft = ProgramDraft::default();
            for cut in cuts {
                draft.add(cut.stored, &cut.slice, cut.to, addresses)?;
            }
            draft.finish(&part.device, tasks)
        };
        let in_place = launches(&part.in_place())?;
        let Some(turn) = turn else { return Ok(Self { in_place, streamed: None }) };
        let slots = part.in_slots(turn).map(|addresses| launches(&addresses));
        Ok(Self { in_place, streamed: Some((turn, slots.collect::<Result<_>>()?)) })
    }
}

/// Tensors of a model on one GPU, or slices of them, ready to be decoded to chosen places of one
/// output. Keeps what it reads alive.
///
/// From [`GpuModel::program`](super::GpuModel::program) and
/// [`GpuModel::rows`](super::GpuModel::rows).
#[derive(Debug)]
pub struct GpuProgram {
    pub(super) route: Route,
    /// To which [`Route::new`] appended.
    pub(super) tasks: Arc<Buffer>,
    pub(super) part: Arc<DevicePart>,
}

impl GpuProgram {
    /// The GPU on which it decodes.
    pub fn device(&self) -> &Device {
        &self.part.device
    }

    /// Bytes of the output: to the end of the last piece.
    pub fn bytes(&self) -> u64 {
        self.route.in_place.bytes
    }

    /// Whether it decodes tensors of a streamed block out of its slots, which the next such block
    /// is copied into meanwhile.
    pub fn is_streamed(&self) -> bool {
        self.turn().is_some()
    }

    /// When the streamed block has its turn through whose slots it decodes; `None` if it needs
    /// none.
    pub(super) fn turn(&self) -> Option<usize> {
        self.route.streamed.as_ref().map(|&(turn, _)| turn)
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
        let Self { route, part, tasks } = self;
        check_contexts(&part.device, stream, status)?;
        // SAFETY: the caller's promise, and the check above; `self` keeps the tasks, and the part
        // sections and tables.
        let run = |launches: &Launches| unsafe {
            launches.run(&part.device, tasks.pointer(), output, stream, status)
        };
        match (&route.streamed, &part.streamer) {
            (Some((turn, launches)), Some(streamer)) if capture_of(stream)?.is_none() => {
                streamer.with_block(*turn, stream, |slot| run(&launches[slot]))
            }
            _ => run(&route.in_place),
        }
    }
}
