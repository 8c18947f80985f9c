//! Decoding on a GPU into host memory, for verification.
//!
//! ```text
//! container → sections on the device → a block decoded there → pinned buffers → caller's memory
//!             once, at load            when its tensor is read  a thread each, some MiB at a time
//! ```
//!
//! Two output buffers take decoded blocks in turn. The CPU makes the checks of tiles that only
//! verification needs: records, and bits between lanes.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use cudarc::driver::CudaStream;

use super::fault::{gpu, refuse};
use super::model::{GpuModel, LoadedTensor};
use super::{
    device::Device,
    distribution::OUTPUTS,
    load::{LoadOptions, share_of},
    memory::Buffer,
    pinned::Pinned,
    placement::Plan,
    status::Status,
};
use crate::open::{Cpu, Decoder, PIECE_BYTES, PreparedTensor};
use crate::{Encoding, Error, Model, Result, Tensor, parallel};

/// Decodes the tensors of one model on a GPU into host memory: for [`Model::verify_with`] and
/// [`Block::decode_with`](crate::Block::decode_with).
///
/// Device memory: as much as [`GpuModel`] takes, and two outputs of the largest block's size. Host
/// memory: 1 MiB pinned for each thread that reads at once.
///
/// The GPU decoded every byte that it hands out, or copied it there if it is stored as it is; and
/// in the byte's whole block the kernels found neither bits that are not a code, nor a gap or an
/// output offset that contradicts the codes. So a full verification with it proves that the GPU's
/// decoding has the hashes of the originals and that the whole index is right; it proves nothing
/// about the CPU's decoding. The CPU decodes tensors in `delta` at the load. In full verifications
/// it checks the records of tensors in `tile` and `float`, and the bits between their codes.
///
/// It refuses tensors of a block that the plan leaves out, even empty ones.
#[derive(Debug)]
pub struct GpuDecoder<'m> {
    original: &'m Model,
    model: GpuModel,
    /// Output i holds the blocks whose index modulo the number of outputs is i.
    outputs: Vec<RwLock<OutputSlot>>,
    readbacks: Mutex<Vec<Readback>>,
}

/// Device memory for one decoded block.
#[derive(Debug)]
struct OutputSlot {
    memory: Buffer,
    stream: Arc<CudaStream>,
    status: Status,
    block: Option<usize>,
}

/// Stream and pinned buffer with which one thread at a time copies to the host.
type Readback = (Arc<CudaStream>, Pinned);

impl<'m> GpuDecoder<'m> {
    /// Loads a model onto a GPU like [`Model::load`], and allocates what decoding needs there.
    ///
    /// # Errors
    /// Same as [`Model::load`].
    pub fn load(model: &'m Model, device: &Device, options: &LoadOptions) -> Result<Self> {
        let sizes = model.blocks().map(|block| Ok(block.layout()?.bytes));
        let sizes: Vec<u64> = sizes.collect::<Result<_>>()?;
        let largest = sizes.iter().copied().max().unwrap_or(0);
        // Outputs come before the model, which takes longer: an error comes at once.
        let output = |_| {
            let memory = device.allocate(largest, "a decoded block of the model")?;
            let (stream, status) = (device.new_stream()?, Status::new(device)?);
            Ok(RwLock::new(OutputSlot { memory, stream, status, block: None }))
        };
        let outputs = (0..sizes.len().min(OUTPUTS)).map(output).collect::<Result<_>>()?;
        let (original, model) = (model, model.load(device, options)?);
        Ok(Self { original, model, outputs, readbacks: Mutex::default() })
    }

    /// Loads as much of a model as fits into 90 % of the GPU's free memory and streams the rest.
    ///
    /// # Errors
    /// Same as [`Model::load`]; also [`Error::Gpu`] if streaming all of it takes more than is free.
    pub fn fit(model: &'m Model, device: &Device) -> Result<Self> {
        let free = device.free_memory()?;
        let plan = Plan::fit(model, &[share_of(free)]).map_err(|error| {
            // The caller gave no sizes.
            let Error::Parameter { problem, .. } = error else { return error };
            let problem = format!("{problem}; {} has {free} free", device.info().name);
            gpu(problem, "free memory on the GPU, or decode on the CPU")
        })?;
        Self::load(model, device, &LoadOptions::new().plan(plan))
    }

    /// The GPU that decodes.
    pub fn device(&self) -> &Device {
        &self.model.inner.parts[0].device
    }

    /// Copies decoded bytes of a block, from `start` on; decodes the block first if necessary.
    fn read(&self, block: usize, start: u64, out: &mut [u8]) -> Result<()> {
        let output = &self.outputs[block % self.outputs.len()];
        loop {
            {
                let output = output.read().unwrap_or_else(PoisonError::into_inner);
                if output.block == Some(block) {
                    return self.fetch(&output, start, out);
                }
            }
            // Another thread may decode another block before this one reads; this one then tries
            // again.
            let mut output = output.write().unwrap_or_else(PoisonError::into_inner);
            if output.block != Some(block) {
                self.decode(block, &mut output)?;
            }
        }
    }

    fn decode(&self, block: usize, output: &mut OutputSlot) -> Result<()> {
        output.block = None;
        let gpu_block = self.model.block_at(block);
        let pointer = output.memory.pointer();
        // SAFETY: the output has room for the largest block and is on the model's device. It is
        // borrowed mutably, and nothing is in flight to or from it: readers wait, and so does the
        // check below.
        #[expect(unsafe_code, reason = "a device address")]
        let launched =
            unsafe { gpu_block.decode_into_raw(pointer, &output.stream, &output.status) };
        let checked = output.status.check(&output.stream);
        if checked.is_err() {
            // Clears it for the next block; a GPU that has failed says so again.
            output.status.clear(&output.stream).ok();
        }
        launched
            .and(checked)
            .map_err(|error| error.within(format_args!("block {:?}", gpu_block.name())))?;
        output.block = Some(block);
        Ok(())
    }

    /// Copies decoded bytes to the host.
    fn fetch(&self, output: &OutputSlot, start: u64, out: &mut [u8]) -> Result<()> {
        let (device, piece) = (self.device(), PIECE_BYTES as usize);
        let free = parallel::lock(&self.readbacks).pop();
        let mut readback = match free {
            Some(free) => free,
            None => (device.new_stream()?, Pinned::new(device.context(), piece)?),
        };
        let (stream, pinned) = &mut readback;
        for (at, out) in (start..).step_by(piece).zip(out.chunks_mut(piece)) {
            let bytes = &mut pinned.bytes()?[..out.len()];
            output.memory.read_at(at, stream, bytes)?;
            out.copy_from_slice(bytes);
        }
        parallel::lock(&self.readbacks).push(readback);
        Ok(())
    }
}

impl Decoder for GpuDecoder<'_> {
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>> {
        if !self.original.shards().iter().any(|shard| std::ptr::eq(shard, tensor.shard())) {
            let problem =
                format!("tensor {:?} is of another model than the GPU holds", tensor.name());
            return refuse(problem, "load its own model");
        }
        let (entry, _) = self.model.inner.tensor(tensor.name())?;
        let cpu = matches!(tensor.target().encoding(), Encoding::Tile | Encoding::Float);
        let cpu = cpu.then(|| Cpu.prepare(tensor)).transpose()?;
        Ok(Box::new(PreparedOnGpu { decoder: self, tensor, entry, cpu }))
    }
}

struct PreparedOnGpu<'a> {
    decoder: &'a GpuDecoder<'a>,
    tensor: Tensor<'a>,
    entry: &'a LoadedTensor,
    /// The CPU's reader of tiles, because the kernels do not verify their padding and records.
    cpu: Option<Box<dyn PreparedTensor + 'a>>,
}

impl PreparedTensor for PreparedOnGpu<'_> {
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let (place, length) = (&self.entry.place, range.end - range.start);
        assert!(
            range.end <= place.end - place.start && length == out.len() as u64,
            "range of the tensor"
        );
        if length == 0 {
            return Ok(());
        }
        self.decoder
            .read(self.entry.block, place.start + range.start, out)
            .map_err(|error| error.in_file(self.tensor.shard().path()))
    }

    fn grain(&self) -> u64 {
        self.cpu.as_ref().map_or(2, |cpu| cpu.grain())
    }

    /// Checks nothing more for `gap`: each GPU thread starts at its gap, and the status word tells
    /// if one does not end at the next one's, or if a thread block's codes differ in number from
    /// its output offsets.
    fn verify_index(&self, range: Range<u64>) -> Result<()> {
        self.cpu.as_ref().map_or(Ok(()), |cpu| cpu.verify_index(range))
    }
}
