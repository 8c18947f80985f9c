//! Timing of decoding on a GPU.

use std::{collections::BTreeMap, sync::Arc};

use df11::{
    Error,
    gpu::{
        GpuBlock, GpuModel, GpuProgram, Status,
        cudarc::driver::{CudaSlice, CudaStream},
    },
    hazmat::gpu::{seconds_between, timestamp},
};

use crate::cli::Failure;

/// Times that a repetition decodes all blocks. The last pass is timed: the GPU runs at its full
/// clock then, and has work queued while the host launches more.
const PASSES: usize = 5;
/// Tensors smaller than this take as long as a launch does, whatever their shape.
const LARGE_BYTES: u64 = 1 << 20;

/// A stream with an output for any block, and a status.
pub(super) struct BlockDecoder {
    stream: Arc<CudaStream>,
    status: Status,
    output: CudaSlice<u8>,
}

/// All rows of a tensor that stands for its shape.
pub(super) struct ShapeRows {
    pub(super) name: String,
    pub(super) rows: GpuProgram,
}

/// One coded tensor of each shape, largest first.
pub(super) fn shapes(model: &GpuModel) -> Result<Vec<ShapeRows>, Failure> {
    let mut shapes = BTreeMap::new();
    for tensor in model.blocks().flat_map(|block| block.tensors()) {
        if tensor.byte_length() >= LARGE_BYTES {
            shapes
                .entry((std::cmp::Reverse(tensor.byte_length()), tensor.shape()))
                .or_insert(tensor.name());
        }
    }
    let rows = shapes.into_iter().map(|((_, shape), name)| {
        let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
        Ok(ShapeRows {
            name: format!("decode {}", sizes.join("×")),
            rows: model.rows(name, 0..shape.first().copied().unwrap_or(1))?,
        })
    });
    rows.collect()
}

impl BlockDecoder {
    pub(super) fn new(model: &GpuModel, stream: &Arc<CudaStream>) -> Result<Self, Failure> {
        let device = model.devices().next().expect("a model lies on a GPU");
        let output = stream.alloc_zeros::<u8>(model.largest_block_bytes() as usize);
        let output = output.map_err(Error::from)?;
        Ok(Self { stream: Arc::clone(stream), status: Status::new(device)?, output })
    }

    /// The bytes of a block.
    pub(super) fn decode_to_host(&mut self, block: GpuBlock<'_>) -> Result<Vec<u8>, Failure> {
        block.decode_into(&mut self.output.as_view_mut(), &self.stream, &self.status)?;
        self.status.check(&self.stream)?;
        let bytes = self.output.slice(..block.layout().bytes as usize);
        Ok(self.stream.clone_dtoh(&bytes).map_err(Error::from)?)
    }

    /// Seconds of all blocks, one after the other into one buffer, and of the largest one among
    /// them. What one block leaves in the cache is none of the next one's.
    pub(super) fn time_blocks(&mut self, model: &GpuModel) -> Result<(f64, f64), Failure> {
        let blocks: Vec<GpuBlock<'_>> = model.blocks().collect();
        let times = self.time(blocks.len(), |at, output, stream, status| {
            blocks[at].decode_into(&mut output.as_view_mut(), stream, status)
        })?;
        let largest = (0..blocks.len()).max_by_key(|&at| blocks[at].layout().bytes);
        Ok((times.iter().sum(), largest.map_or(0.0, |at| times[at])))
    }

    /// Seconds of each shape alone in a launch.
    pub(super) fn time_shapes(&mut self, shapes: &[ShapeRows]) -> Result<Vec<f64>, Failure> {
        self.time(shapes.len(), |at, output, stream, status| {
            shapes[at].rows.decode_into(&mut output.as_view_mut(), stream, status)
        })
    }

    /// Seconds of each of `count` pieces of work, in their last pass.
    fn time(
        &mut self,
        count: usize,
        mut work: impl FnMut(usize, &mut CudaSlice<u8>, &CudaStream, &Status) -> df11::Result<()>,
    ) -> Result<Vec<f64>, Failure> {
        let mut marks = Vec::new();
        for _ in 0..PASSES {
            marks.clear();
            marks.push(timestamp(&self.stream)?);
            for at in 0..count {
                work(at, &mut self.output, &self.stream, &self.status)?;
                marks.push(timestamp(&self.stream)?);
            }
        }
        self.status.check(&self.stream)?;
        marks.windows(2).map(|pair| Ok(seconds_between(&pair[0], &pair[1])?)).collect()
    }
}
