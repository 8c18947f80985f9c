//! A model whose sections are resident on a GPU.

use std::{collections::HashMap, num::NonZero, ops::Range, sync::Arc, thread};

use cudarc::driver::{CudaStream, CudaViewMut, DevicePtrMut, DeviceSlice, sys::CUdeviceptr};
use rayon::prelude::*;

use super::{
    Device, Status,
    memory::Buffer,
    plan::{Draft, Plan, Resident, ResidentGap},
    task::{GapTableTask, TABLE_BYTES},
    upload::{self, Placement},
};
use crate::{
    BlockLayout, Dtype, Encoding, Error, Model, Result, Tensor, encoding::gap::Layout, huffman,
    open::row_bytes,
};

/// How a model is loaded onto a GPU.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    readers: Option<NonZero<usize>>,
    validate: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LoadOptions {
    /// A reader for each core, up to 16.
    pub const fn new() -> Self {
        Self { readers: None, validate: true }
    }

    /// How many threads read the containers, each with 12 MiB of pinned memory that the [`Device`] keeps for the next load.
    #[must_use]
    pub const fn readers(mut self, readers: NonZero<usize>) -> Self {
        self.readers = Some(readers);
        self
    }

    /// Leaves out the host's validation of codebooks and output offsets, so that tests bring hostile streams to the kernels, which
    /// must bear them.
    #[doc(hidden)]
    #[must_use]
    pub const fn without_validation(mut self) -> Self {
        self.validate = false;
        self
    }

    fn reader_count(&self) -> usize {
        let cores = || thread::available_parallelism().map_or(1, |cores| cores.get().min(16));
        self.readers.map_or_else(cores, NonZero::get)
    }
}

/// A model whose blocks lie compressed in the memory of one GPU, ready to be decoded.
///
/// It holds what the sections take in the containers, 17 kB of decode table a tensor, and on the host 8 bytes a thread block (0.2 % of
/// the containers). It does not need the [`Model`] any more. `Send` and `Sync`: any number of threads may decode on any streams at once.
/// Dropping it waits for the GPU.
#[derive(Clone, Debug)]
pub struct GpuModel {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    blocks: Vec<BlockEntry>,
    block_names: HashMap<String, usize>,
    tensors: HashMap<String, TensorEntry>,
    /// All sections of blocks, and the decode tables: what plans point to.
    sections: Buffer,
    tables: Buffer,
}

#[derive(Debug)]
struct BlockEntry {
    name: String,
    tensors: Vec<String>,
    layout: BlockLayout,
    plan: Plan,
}

#[derive(Debug)]
struct TensorEntry {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
    resident: Arc<Resident>,
}

impl Model {
    /// Loads all blocks onto a GPU, where they stay compressed.
    ///
    /// Codebooks and output offsets are validated first; checksums are checked while the sections pass through pinned memory, unless the
    /// model was [opened without](crate::OpenOptions::checksums). Returns when everything is in place. Host memory: a few MiB a reader.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the memory does not suffice or the GPU fails; [`Error::Corrupt`] where the container is damaged;
    /// [`Error::Unsupported`] for a tensor of a newer version; [`Error::Io`].
    pub fn load(&self, device: &Device, options: &LoadOptions) -> Result<GpuModel> {
        let loader = Loader::new(self, device, options)?;
        loader.upload(options.reader_count())?;
        loader.finish()
    }
}

/// A load under way.
struct Loader<'m> {
    model: &'m Model,
    device: &'m Device,
    indexes: Vec<(Tensor<'m>, Layout, Box<[u8]>)>,
    placements: Vec<Placement>,
    sections: Buffer,
    tables: Buffer,
}

impl<'m> Loader<'m> {
    /// Validates what the host can, and allocates.
    fn new(model: &'m Model, device: &'m Device, options: &LoadOptions) -> Result<Self> {
        let tensors: Vec<Tensor<'m>> = model.tensors().collect();
        tensors.iter().try_for_each(Tensor::check_known)?;
        let gap: Vec<Tensor<'m>> =
            tensors.into_iter().filter(|tensor| tensor.encoding() == Encoding::Gap).collect();
        let indexes =
            gap.into_par_iter().map(|tensor| index(tensor, options.validate)).collect::<Result<Vec<_>>>()?;
        let (placements, bytes) = upload::place(model.shards());
        let table_bytes = indexes.len() as u64 * TABLE_BYTES;
        let sections = device.allocate(bytes, "the model")?;
        let tables = device.allocate(table_bytes, "the model's decode tables")?;
        Ok(Self { model, device, indexes, placements, sections, tables })
    }

    fn upload(&self, readers: usize) -> Result<()> {
        let (shards, base) = (self.model.shards(), self.sections.pointer());
        // SAFETY: `new` allocated the bytes that `place` said.
        #[expect(unsafe_code, reason = "device addresses")]
        unsafe {
            upload::upload(self.device, shards, &self.placements, base, readers)
        }
    }

    /// The device address of a tensor's array, counted from its first one.
    fn address(&self, tensor: &Tensor<'_>, array: usize) -> CUdeviceptr {
        let shards = self.model.shards();
        let shard =
            shards.iter().position(|shard| std::ptr::eq(shard, tensor.shard())).expect("its own shard");
        let directory = shards[shard].directory();
        let record = &directory.arrays[tensor.record().array_range().start + array];
        let section = self.placements[shard].offsets[record.section.get() as usize];
        self.sections.pointer() + section.expect("sections of tensors belong to blocks") + record.offset.get()
    }

    fn finish(mut self) -> Result<GpuModel> {
        let residents = self.residents()?;
        let mut tensors = HashMap::new();
        for tensor in self.model.tensors() {
            let entry = TensorEntry {
                dtype: tensor.dtype().expect("known, as checked"),
                shape: tensor.shape(),
                bytes: tensor.byte_length()?,
                resident: Arc::clone(&residents[tensor.target().name()]),
            };
            tensors.insert(tensor.name().to_owned(), entry);
        }
        let blocks = self.blocks(&tensors)?;
        let block_names = blocks.iter().enumerate().map(|(at, block)| (block.name.clone(), at)).collect();
        let Self { device, sections, tables, .. } = self;
        let device = device.clone();
        Ok(GpuModel { inner: Arc::new(Inner { device, blocks, block_names, tensors, sections, tables }) })
    }

    /// Where the arrays of each tensor are, by name, aliases aside; builds the decode tables.
    fn residents(&mut self) -> Result<HashMap<&'m str, Arc<Resident>>> {
        let mut residents = HashMap::new();
        let mut tasks = Vec::new();
        for (tensor, layout, host_offsets) in std::mem::take(&mut self.indexes) {
            let table = self.tables.pointer() + tasks.len() as u64 * TABLE_BYTES;
            let [lengths, gaps, output_offsets, bitstream, plane] =
                [0, 1, 2, 3, 4].map(|array| self.address(&tensor, array));
            tasks.push(GapTableTask { lengths, table });
            let gap = ResidentGap { layout, gaps, output_offsets, bitstream, plane, table, host_offsets };
            residents.insert(tensor.name(), Arc::new(Resident::Gap(Box::new(gap))));
        }
        for tensor in self.model.tensors().filter(|tensor| tensor.encoding() == Encoding::Raw) {
            let resident = match tensor.byte_length()? {
                0 => Resident::Empty,
                _ => Resident::Raw { bytes: self.address(&tensor, 0) },
            };
            residents.insert(tensor.name(), Arc::new(resident));
        }
        let tasks = Buffer::of(self.device.context(), &tasks)?;
        self.device.kernels().build_tables(&self.device.streams()[0], &tasks)?;
        Ok(residents)
    }

    fn blocks(&self, tensors: &HashMap<String, TensorEntry>) -> Result<Vec<BlockEntry>> {
        let blocks = self.model.blocks().map(|block| {
            let layout = block.layout()?;
            let names: Vec<String> = block.tensors().map(|tensor| tensor.name().to_owned()).collect();
            let mut draft = Draft::default();
            for (name, range) in names.iter().zip(&layout.tensors) {
                let tensor = &tensors[name];
                draft.add(&tensor.resident, &(0..tensor.bytes), range.start)?;
            }
            let plan = draft.finish(self.device)?;
            Ok(BlockEntry { name: block.name().to_owned(), tensors: names, layout, plan })
        });
        blocks.collect()
    }
}

/// The layout and the output offsets of a tensor.
fn index(tensor: Tensor<'_>, validate: bool) -> Result<(Tensor<'_>, Layout, Box<[u8]>)> {
    let index = tensor.gap_index()?;
    if validate {
        let checked = huffman::read_codebook(&index.codebook)
            .and_then(|_| index.layout.check_output_offsets(&index.output_offsets));
        checked.map_err(|error| tensor.locate(error))?;
    }
    Ok((tensor, index.layout, index.output_offsets.into_owned().into()))
}

impl GpuModel {
    /// The GPU that holds it.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Device memory that it holds for sections and decode tables, in bytes.
    pub fn device_bytes(&self) -> u64 {
        self.inner.sections.bytes() + self.inner.tables.bytes()
    }

    /// All blocks, in the order in which the model runs them.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = GpuBlock<'_>> {
        self.inner.blocks.iter().map(|entry| GpuBlock { model: &self.inner, entry })
    }

    /// The block with this name. Constant time.
    pub fn block(&self, name: &str) -> Option<GpuBlock<'_>> {
        let &at = self.inner.block_names.get(name)?;
        Some(GpuBlock { model: &self.inner, entry: &self.inner.blocks[at] })
    }

    /// The tensor with this name. Constant time.
    pub fn tensor(&self, name: &str) -> Option<GpuTensor<'_>> {
        self.inner.tensors.get_key_value(name).map(|(name, entry)| GpuTensor { name, entry })
    }

    /// The size of a buffer into which any block can be decoded, in bytes.
    pub fn largest_block_bytes(&self) -> u64 {
        self.inner.blocks.iter().map(|block| block.layout.bytes).max().unwrap_or(0)
    }

    /// Prepares decoding of rows of a tensor: all weights whose index in the first dimension lies in `rows`. Allocates some device
    /// memory; the result can be used any number of times.
    ///
    /// # Errors
    /// [`Error::Parameter`] where there is no such tensor or row, or a row does not fill whole bytes; [`Error::Gpu`].
    pub fn rows(&self, tensor: &str, rows: Range<u64>) -> Result<GpuRows> {
        let entry = self.inner.tensors.get(tensor).ok_or_else(|| {
            Error::parameter(format!("there is no tensor {tensor:?}"), "name one that the model has")
        })?;
        let range = row_bytes(tensor, &entry.shape, entry.bytes, rows)?;
        let mut draft = Draft::default();
        draft.add(&entry.resident, &range, 0)?;
        Ok(GpuRows { model: Arc::clone(&self.inner), plan: draft.finish(&self.inner.device)? })
    }
}

/// A tensor of a model on a GPU. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct GpuTensor<'m> {
    name: &'m str,
    entry: &'m TensorEntry,
}

impl<'m> GpuTensor<'m> {
    /// Its name.
    pub fn name(&self) -> &'m str {
        self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Its dimensions, outermost first.
    pub fn shape(&self) -> &'m [u64] {
        &self.entry.shape
    }

    /// The size of its decoded bytes.
    pub fn byte_length(&self) -> u64 {
        self.entry.bytes
    }
}

/// A block of a model on a GPU. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct GpuBlock<'m> {
    model: &'m Inner,
    entry: &'m BlockEntry,
}

impl<'m> GpuBlock<'m> {
    /// Its name.
    pub fn name(&self) -> &'m str {
        &self.entry.name
    }

    /// Its tensors, in the order of [`GpuBlock::layout`].
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = GpuTensor<'m>> + use<'m> {
        let tensors = &self.model.tensors;
        self.entry.tensors.iter().map(|name| GpuTensor { name, entry: &tensors[name] })
    }

    /// Where each tensor goes in the output: as [`Block::layout`](crate::Block::layout).
    pub fn layout(&self) -> &'m BlockLayout {
        &self.entry.layout
    }

    /// Puts the decoding of all its tensors on a stream: one launch for each number of bytes a thread that its tensors have (usually
    /// one), and a copy for each tensor that is stored as it is.
    ///
    /// Neither allocates nor waits. The first [`BlockLayout::bytes`] of `output` get the tensors, as [`GpuBlock::layout`] says; bytes
    /// between tensors stay as they are. A malformed stream sets `status`, and the output then holds anything; the call itself cannot
    /// see it.
    ///
    /// # Errors
    /// [`Error::Parameter`] where the output is too small, misaligned (256 bytes), or not of the stream's context, or the stream is not
    /// of the model's device; [`Error::Gpu`] where the driver refuses.
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        decode(&self.entry.plan, &self.model.device, output, stream, status)
    }

    /// As [`GpuBlock::decode_into`], to any device address: a buffer that another library owns, or work that a CUDA graph captures.
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into`], but that the buffer's size and context are not known.
    ///
    /// # Safety
    /// `output` has [`BlockLayout::bytes`] of memory that the model's device may write, and nobody else uses it until the work is
    /// done. Of a captured graph, each replay needs that, and that the model and the status word still live.
    #[expect(unsafe_code, reason = "a foreign device address")]
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { decode_raw(&self.entry.plan, &self.model.device, output, stream, status) }
    }
}

/// Rows of a tensor of a model on a GPU, ready to be decoded. Keeps the model alive.
#[derive(Debug)]
pub struct GpuRows {
    plan: Plan,
    model: Arc<Inner>,
}

impl GpuRows {
    /// Bytes of the decoded rows.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// Puts the decoding of the rows on a stream, as [`GpuBlock::decode_into`]. Where the rows start on a multiple of 16 elements it is
    /// faster.
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into`].
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        decode(&self.plan, &self.model.device, output, stream, status)
    }

    /// As [`GpuBlock::decode_into_raw`].
    ///
    /// # Errors
    /// As [`GpuBlock::decode_into_raw`].
    ///
    /// # Safety
    /// As [`GpuBlock::decode_into_raw`], with [`GpuRows::bytes`] of output, and this value in the place of the model.
    #[expect(unsafe_code, reason = "a foreign device address")]
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { decode_raw(&self.plan, &self.model.device, output, stream, status) }
    }
}

fn decode(
    plan: &Plan,
    device: &Device,
    output: &mut CudaViewMut<'_, u8>,
    stream: &CudaStream,
    status: &Status,
) -> Result<()> {
    if (output.len() as u64) < plan.bytes() {
        let problem = format!("the output has {} bytes of {}", output.len(), plan.bytes());
        return Err(Error::parameter(problem, "ask for the size"));
    }
    // Streams and buffers of two wrappers of one context do not wait for each other.
    if !Arc::ptr_eq(output.stream().context(), stream.context()) {
        let problem = "output and stream come from different contexts";
        return Err(Error::parameter(problem, "make both with Device::context of one device"));
    }
    let (pointer, _record) = output.device_ptr_mut(stream);
    // SAFETY: the output is as large and exclusively borrowed, and its events order what else is done with it. Buffers of the plan,
    // the model and the status wait for the context before they are freed.
    #[expect(unsafe_code, reason = "launches")]
    unsafe {
        decode_raw(plan, device, pointer, stream, status)
    }
}

/// # Safety
/// As [`Plan::run`], but for the stream, which is checked.
#[expect(unsafe_code, reason = "a device address")]
unsafe fn decode_raw(
    plan: &Plan,
    device: &Device,
    output: CUdeviceptr,
    stream: &CudaStream,
    status: &Status,
) -> Result<()> {
    let context = device.context().cu_ctx();
    if stream.context().cu_ctx() != context || status.context().cu_ctx() != context {
        let problem = "the stream or the status belongs to another device or context than the model";
        return Err(Error::parameter(problem, "make it with the context of the model's device"));
    }
    // SAFETY: the caller's promise, and the check above.
    unsafe { plan.run(device, output, stream, status) }
}
