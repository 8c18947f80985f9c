//! How tensors of one GPU are decoded: tasks that are made once, and run on the caller's stream any
//! number of times.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ptr::null_mut, sync::Arc};

use cudarc::driver::{
    CudaStream, CudaViewMut, DevicePtrMut, DeviceSlice,
    sys::{self, CUdeviceptr, CUstreamCaptureStatus},
};

use super::{
    Device, Status, driver,
    fault::OrFault,
    launches::{Draft, Launches},
    part::Part,
    stored::{Addresses, Stored},
    task::Task,
};
use crate::{Error, Result, open::Slice};

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
    /// From the slots of a streamed block, but where a graph is captured, since a slot belongs to
    /// whoever decodes next.
    streamed: Option<Streamed>,
}

#[derive(Debug)]
struct Streamed {
    turn: usize,
    /// For each slot.
    launches: Vec<Launches>,
}

impl Route {
    /// Of tensors on a part, all of them of the streamed block with this turn, if it is given.
    /// Appends to the tasks.
    pub(super) fn new(
        part: &Part,
        turn: Option<usize>,
        cuts: &[Cut<'_>],
        tasks: &mut Vec<Task>,
    ) -> Result<Self> {
        let mut launches = |addresses: &dyn Addresses| {
            let mut draft = Draft::default();
            for cut in cuts {
                draft.add(cut.stored, &cut.slice, cut.to, addresses)?;
            }
            draft.finish(&part.device, tasks)
        };
        let in_place = launches(part)?;
        let mut of_slots = |turn| -> Result<Streamed> {
            let maps = part.slot_maps(turn);
            Ok(Streamed {
                turn,
                launches: maps.iter().map(|map| launches(map)).collect::<Result<_>>()?,
            })
        };
        Ok(Self { in_place, streamed: turn.map(&mut of_slots).transpose()? })
    }

    /// Bytes of the output.
    pub(super) fn bytes(&self) -> u64 {
        self.in_place.bytes()
    }

    /// When the streamed block has its turn through whose slots it decodes; `None` if it needs
    /// none.
    pub(super) fn turn(&self) -> Option<usize> {
        self.streamed.as_ref().map(|streamed| streamed.turn)
    }
}

/// A route with all that it takes to go there.
#[derive(Clone, Copy)]
pub(super) struct Ready<'m> {
    pub(super) route: &'m Route,
    pub(super) part: &'m Part,
    /// The device address of the tasks that [`Route::new`] appended to.
    pub(super) tasks: CUdeviceptr,
}

impl Ready<'_> {
    /// Decodes into a buffer of [`cudarc`], if it is large enough and of the stream's context.
    ///
    /// # Safety
    /// What `self` is made of lives until the work is done.
    pub(super) unsafe fn decode_into(
        self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let bytes = self.route.bytes();
        if (output.len() as u64) < bytes {
            let problem = format!("the output has {} bytes of {bytes}", output.len());
            return Err(Error::parameter(problem, "ask for the size"));
        }
        // Streams and buffers of two wrappers of one context do not wait for each other.
        if !Arc::ptr_eq(output.stream().context(), stream.context()) {
            let problem = "output and stream come from different contexts";
            return Err(Error::parameter(problem, "make both with Device::context of one device"));
        }
        let (pointer, _record) = output.device_ptr_mut(stream);
        // SAFETY: the buffer has the size, and is lent until its events say that the work is done;
        // the rest is the caller's promise.
        unsafe { self.decode_into_raw(pointer, stream, status) }
    }

    /// Decodes to a device address.
    ///
    /// # Safety
    /// `output` has [`Route::bytes`] of memory that the part's device may write, and nobody else
    /// uses it until the work is done. Until then, and until the last replay of a graph that
    /// captured it, what `self` is made of and the status word live.
    pub(super) unsafe fn decode_into_raw(
        self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Self { route, part, tasks } = self;
        check_contexts(&part.device, stream, status)?;
        // SAFETY: the caller's promise, and the check above; the part keeps sections and tables.
        let run = |launches: &Launches| unsafe {
            launches.run(&part.device, tasks, output, stream, status)
        };
        match (&route.streamed, &part.streamer) {
            (Some(Streamed { turn, launches }), Some(streamer))
                if capture_of(stream)?.is_none() =>
            {
                streamer.with_block(*turn, stream, |slot| run(&launches[slot]))
            }
            _ => run(&route.in_place),
        }
    }
}

pub(super) fn check_contexts(device: &Device, stream: &CudaStream, status: &Status) -> Result<()> {
    let context = device.context().cu_ctx();
    if stream.context().cu_ctx() == context && status.context().cu_ctx() == context {
        return Ok(());
    }
    let problem =
        "the stream or the status belongs to another device or context than what is decoded";
    Err(Error::parameter(problem, "make it with the context of the same device"))
}

/// The number of the CUDA graph capture that takes what is put on the stream, if there is one.
pub(super) fn capture_of(stream: &CudaStream) -> Result<Option<u64>> {
    stream.context().bind_to_thread().or_fault("asking whether a graph is captured")?;
    // SAFETY: a stream of a context that is current.
    unsafe { capture_of_raw(stream.cu_stream()) }
}

/// The same of a stream of any library: the number is another one for each capture of the process.
///
/// # Errors
/// [`Error::Gpu`] if the driver refuses.
///
/// # Safety
/// The stream exists, and its context is the calling thread's current one.
pub unsafe fn capture_of_raw(stream: sys::CUstream) -> Result<Option<u64>> {
    let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY: the function's type, as CUDA 11.3 to 12.9 declare it.
    let ask = unsafe { driver::function::<CaptureInfo>("cuStreamGetCaptureInfo_v2") }?;
    // SAFETY: the driver writes a status and a number, for which there is room; the other results
    // may be left out.
    let answer =
        unsafe { ask(stream, &raw mut status, &raw mut id, null_mut(), null_mut(), null_mut()) };
    answer.result().or_fault("asking whether a graph is captured")?;
    Ok((status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE).then_some(id))
}

/// `cuStreamGetCaptureInfo_v2`, which bindings of CUDA 13 lack and its drivers have.
type CaptureInfo = unsafe extern "C" fn(
    sys::CUstream,
    *mut CUstreamCaptureStatus,
    *mut sys::cuuint64_t,
    *mut sys::CUgraph,
    *mut *const sys::CUgraphNode,
    *mut usize,
) -> sys::CUresult;
