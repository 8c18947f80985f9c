//! Decoding ahead: the next block is decoded into a second buffer while one is used.
#![expect(unsafe_code, reason = "decoding into buffers that several streams use")]

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys::CUdeviceptr};

use super::{Device, GpuBlock, GpuModel, Status, fault::OrFault, memory::Buffer, route::capture_of};
use crate::{Error, Result};

const BUFFERS: usize = 2;

/// Decodes the blocks of one GPU ahead of their use, into two buffers.
///
/// [`Prefetch::get`] makes the caller's stream wait for a block, and starts to decode the one after it on a stream of its own as soon as
/// the work that uses the buffer is done. Events order all of it on the GPU: the host neither waits nor allocates. A CUDA graph may
/// capture it: then nothing is decoded ahead beyond the last block.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use df11::gpu::{Device, Prefetch, Status};
///
/// let device = Device::open(0)?;
/// let model = df11::OpenOptions::new().device(&device).open("model.df11")?;
/// let stream = device.context().new_stream()?;
/// let status = Status::new(&device)?;
/// let mut prefetch = Prefetch::new(&model, 0)?;
/// for _step in 0..10 {
///     for index in 0..model.blocks().len() {
///         let block = prefetch.get(index, &stream, &status)?;
///         // … kernels on `stream` that read `block.pointer` …
///     }
/// }
/// status.check(&stream)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Prefetch {
    model: GpuModel,
    device: Device,
    /// The model's blocks on this GPU, by index.
    order: Vec<usize>,
    pointers: [CUdeviceptr; BUFFERS],
    /// What `pointers` point to, if it is ours. Freed once the context is idle.
    _buffers: Vec<Buffer>,
    stream: Arc<CudaStream>,
    /// All that was on the caller's stream when its use began.
    begun: CudaEvent,
    /// For each buffer: its block is decoded.
    decoded: [CudaEvent; BUFFERS],
    /// For each buffer: what used it is done.
    used: [CudaEvent; BUFFERS],
    state: State,
}

/// What the buffers hold, or will hold when what is on the streams is done.
#[derive(Debug, Default)]
struct State {
    /// The stream of the last call, and the capture that it was part of.
    caller: Option<(usize, Option<u64>)>,
    holds: [Option<usize>; BUFFERS],
    /// Whether `used` was recorded since the use of this stream began.
    was_used: [bool; BUFFERS],
    /// The buffer that was handed out last.
    current: Option<usize>,
}

/// A decoded block in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Decoded<'m> {
    /// The block; its layout says where each tensor lies.
    pub block: GpuBlock<'m>,
    /// The device address of its first byte. Valid for work on the stream until the next [`Prefetch::get`].
    pub pointer: CUdeviceptr,
}

impl Prefetch {
    /// For the blocks on the GPU of this index among the model's. Allocates two buffers of its largest block.
    ///
    /// # Errors
    /// [`Error::Parameter`] where the model has no such GPU; [`Error::Gpu`] where the memory does not suffice.
    pub fn new(model: &GpuModel, device: usize) -> Result<Self> {
        let (device, bytes) = share(model, device)?;
        let buffer = || device.allocate(bytes, "an output of decoding");
        let buffers = vec![buffer()?, buffer()?];
        let pointers = [buffers[0].pointer(), buffers[1].pointer()];
        Self::over(model, device, pointers, buffers)
    }

    /// As [`Prefetch::new`], into buffers of the caller.
    ///
    /// # Errors
    /// As [`Prefetch::new`].
    ///
    /// # Safety
    /// Both are device memory of that GPU, with [`GpuModel::largest_block_bytes`], which nobody else writes while this lives, and which
    /// outlive all work that is put on streams meanwhile, replays of captured graphs included.
    pub unsafe fn with_buffers(model: &GpuModel, device: usize, pointers: [CUdeviceptr; 2]) -> Result<Self> {
        let (device, _) = share(model, device)?;
        Self::over(model, device, pointers, Vec::new())
    }

    fn over(
        model: &GpuModel,
        device: Device,
        pointers: [CUdeviceptr; BUFFERS],
        buffers: Vec<Buffer>,
    ) -> Result<Self> {
        let events = || Ok::<_, Error>([device.new_event()?, device.new_event()?]);
        let (begun, decoded, used) = (device.new_event()?, events()?, events()?);
        let stream = device.new_stream()?;
        let blocks = model.blocks().enumerate();
        let order = blocks.filter(|(_, block)| block.device().is(&device)).map(|(at, _)| at).collect();
        let (model, state) = (model.clone(), State::default());
        Ok(Self { model, device, order, pointers, _buffers: buffers, stream, begun, decoded, used, state })
    }

    /// The block with this index, decoded, for work that is put on the stream until the next call. Starts to decode the next one of the
    /// GPU; after the last one the first, unless a graph is captured.
    ///
    /// Any order works; the model's order decodes nothing twice. A stream other than the last one starts anew behind what is on it, and
    /// so does the first call of a capture.
    ///
    /// # Errors
    /// [`Error::Parameter`] where the block lies on another GPU, the stream belongs to another context, or a capture begins while a
    /// block is decoded ahead ([`Prefetch::join`] first); [`Error::Gpu`] where the driver refuses.
    pub fn get(&mut self, index: usize, stream: &CudaStream, status: &Status) -> Result<Decoded<'_>> {
        let Ok(turn) = self.order.binary_search(&index) else {
            let problem = format!("block {index} does not lie on this GPU");
            return Err(Error::parameter(problem, "get it from the Prefetch of its own"));
        };
        let capture = capture_of(stream)?;
        self.begin(stream, capture)?;
        let slot = self.take(index, stream, status)?;
        let next = match self.order.get(turn + 1) {
            Some(&next) => Some(next),
            None if capture.is_some() => None,
            None => Some(self.order[0]),
        };
        if let Some(next) = next.filter(|&next| !self.state.holds.contains(&Some(next))) {
            self.decode(next, 1 - slot, status)?;
        }
        Ok(Decoded { block: self.model.block_at(index), pointer: self.pointers[slot] })
    }

    /// Makes the stream wait for what is decoded ahead: before a capture begins, or ends short of the last block. The next call starts
    /// anew.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn join(&mut self, stream: &CudaStream) -> Result<()> {
        for (held, decoded) in self.state.holds.iter().zip(&self.decoded) {
            if held.is_some() {
                stream.wait(decoded).or_fault("waiting for a decoded block")?;
            }
        }
        self.state = State::default();
        Ok(())
    }

    /// Starts anew where the caller's stream is another one than the last, or is captured since.
    fn begin(&mut self, stream: &CudaStream, capture: Option<u64>) -> Result<()> {
        let caller = (stream.cu_stream() as usize, capture);
        if self.state.caller == Some(caller) {
            return Ok(());
        }
        if capture.is_some() && matches!(self.state.caller, Some((_, None))) {
            let problem = "a capture begins while a block is decoded ahead outside of it";
            return Err(Error::parameter(problem, "call Prefetch::join before the capture"));
        }
        let action = "ordering streams";
        self.begun.record(stream).or_fault(action)?;
        self.stream.wait(&self.begun).or_fault(action)?;
        self.state = State { caller: Some(caller), ..State::default() };
        Ok(())
    }

    /// The buffer that holds the block, which is decoded now if it was not ahead; the stream waits for it.
    fn take(&mut self, index: usize, stream: &CudaStream, status: &Status) -> Result<usize> {
        let action = "ordering streams";
        if let Some(current) = self.state.current {
            self.used[current].record(stream).or_fault(action)?;
            self.state.was_used[current] = true;
        }
        let held = self.state.holds.iter().position(|&held| held == Some(index));
        let slot = held.unwrap_or_else(|| self.state.current.map_or(0, |current| 1 - current));
        if held.is_none() {
            self.decode(index, slot, status)?;
        }
        stream.wait(&self.decoded[slot]).or_fault(action)?;
        self.state.current = Some(slot);
        Ok(slot)
    }

    /// Puts the decoding of a block into a buffer on the own stream, behind what uses the buffer.
    fn decode(&mut self, index: usize, slot: usize, status: &Status) -> Result<()> {
        let action = "ordering streams";
        if self.state.was_used[slot] {
            self.stream.wait(&self.used[slot]).or_fault(action)?;
        }
        self.state.holds[slot] = None;
        // SAFETY: the buffer has room for every block of the GPU. The stream waits for all that used it, and callers of `get` for the
        // event below. The buffer is freed once the context is idle, or outlives the work by `with_buffers`' promise.
        unsafe { self.model.block_at(index).decode_into_raw(self.pointers[slot], &self.stream, status) }?;
        self.decoded[slot].record(&self.stream).or_fault(action)?;
        self.state.holds[slot] = Some(index);
        Ok(())
    }

    /// The GPU whose blocks it decodes.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// A GPU of the model, and the bytes of the largest block on it.
fn share(model: &GpuModel, device: usize) -> Result<(Device, u64)> {
    let count = model.devices().len();
    let Some(device) = model.devices().nth(device) else {
        let problem = format!("the model lies on {count} GPUs, and there is none of number {device}");
        return Err(Error::parameter(problem, "count from 0, as the plan does"));
    };
    let mine = model.blocks().filter(|block| block.device().is(device));
    Ok((device.clone(), mine.map(|block| block.layout().bytes).max().unwrap_or(0)))
}
