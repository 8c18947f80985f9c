//! Weights on a GPU, on candle's stream.
#![expect(unsafe_code, reason = "launches and device memory, each with its proof")]

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail,
};
use df11::gpu::{
    Device, GpuModel, GpuProgram, Indices, LinearInput, LinearOutput, LoadOptions, Matrix, Piece,
    Status,
    cudarc::driver::{CudaSlice, DevicePtr as _, DevicePtrMut as _},
};
use half::bf16;

use crate::{Mode, Weights, weights::failed};

/// A model in the memory of a GPU, compressed.
pub(crate) struct Gpu {
    /// Decoding of each BF16 tensor.
    programs: HashMap<String, GpuProgram>,
    model: GpuModel,
    mode: Mode,
    status: Status,
    /// Workspace of products: zeros at first, it grows with what they need. They come one after the
    /// other on candle's stream.
    workspace: Mutex<CudaSlice<u8>>,
    candle: CudaDevice,
}

impl Gpu {
    pub(crate) fn load(model: &df11::Model, candle: &CudaDevice, mode: Mode) -> Result<Self> {
        let ordinal = candle.cuda_stream().context().ordinal();
        let device = Device::open(ordinal).map_err(failed)?;
        let loaded = model.load(&device, &LoadOptions::new()).map_err(failed)?;
        let of_bf16 = model.tensors().filter(|tensor| tensor.dtype() == Some(df11::Dtype::BF16));
        let program = |tensor: df11::Tensor<'_>| {
            let program = loaded.program(&[Piece::new(tensor.name(), 0)]).map_err(failed)?;
            Ok((tensor.name().to_owned(), program))
        };
        Ok(Self {
            programs: of_bf16.map(program).collect::<Result<_>>()?,
            status: Status::new(&device).map_err(failed)?,
            workspace: Mutex::new(candle.alloc_zeros::<u8>(1)?),
            model: loaded,
            mode,
            candle: candle.clone(),
        })
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.status.check(&self.candle.cuda_stream()).map_err(failed)
    }

    /// Decodes a BF16 tensor to all of a storage.
    pub(crate) fn decode(&self, name: &str, storage: &mut CudaStorage) -> Result<()> {
        let Some(program) = self.programs.get(name) else { bail!("{name} is no BF16 tensor") };
        let stream = self.candle.cuda_stream();
        let output = storage.as_cuda_slice_mut::<bf16>()?;
        if 2 * output.len() as u64 != program.bytes() {
            bail!("{name} has {} bytes, and the output {} elements", program.bytes(), output.len());
        }
        let (output, _written) = output.device_ptr_mut(&stream);
        // SAFETY: the output has the program's bytes, which candle uses on this stream alone;
        // `self` keeps program and status, and is dropped after the stream's work, since freeing
        // waits for it.
        unsafe { program.decode_into_raw(output, &stream, &self.status) }.map_err(failed)
    }

    /// The matrix of this name; none if decoding all of it is the only way, as of one that is too
    /// small to be coded.
    pub(crate) fn matrix(&self, name: &str) -> Result<Option<Matrix>> {
        match self.model.matrix(name) {
            Ok(matrix) => Ok(Some(matrix)),
            Err(df11::Error::Parameter { .. }) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Rows of a matrix by contiguous indices, and how many columns they have.
    pub(crate) fn gather(
        &self,
        matrix: &Matrix,
        ids: &CudaStorage,
        layout: &Layout,
    ) -> Result<(CudaStorage, usize)> {
        let (count, columns) = (layout.shape().elem_count(), matrix.column_count());
        let stream = self.candle.cuda_stream();
        let ids =
            ids.as_cuda_slice::<u32>()?.slice(layout.start_offset()..layout.start_offset() + count);
        let mut output = self.candle.alloc_zeros::<bf16>(count * columns as usize)?;
        {
            let (ids, _read) = ids.device_ptr(&stream);
            let (to, _written) = output.device_ptr_mut(&stream);
            // SAFETY: there are as many indices, and room for as many rows; all live until the
            // stream's work is done, since it frees them.
            unsafe {
                matrix.gather(Indices::U32(ids), count as u64, (to, columns), &stream, &self.status)
            }
            .map_err(failed)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(output, self.candle.clone()), columns as usize))
    }
}

/// A product without decoding to memory.
pub(crate) struct Fused {
    linear: df11::gpu::Linear,
    weights: Weights,
}

impl Fused {
    /// None in the exact mode, on the CPU, and for what is not stored in tiles of its own.
    ///
    /// The matrix in the fast layout would be faster, and takes more memory
    /// ([`Matrix::to_fast_or_stored`]).
    pub(crate) fn new(weights: &Weights, name: &str) -> Result<Option<Arc<Self>>> {
        let Some(gpu) = weights.gpu().filter(|gpu| gpu.mode == Mode::Fused) else {
            return Ok(None);
        };
        let Some(matrix) = gpu.matrix(name)? else { return Ok(None) };
        let linear = df11::gpu::Linear::new(&[matrix]).map_err(failed)?;
        let needed = linear.workspace_bytes(linear.crossover_rows() - 1) as usize;
        let mut workspace = gpu.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        if workspace.len() < needed {
            *workspace = gpu.candle.alloc_zeros::<u8>(needed)?;
        }
        drop(workspace);
        Ok(Some(Arc::new(Self { linear, weights: weights.clone() })))
    }

    /// None if there are enough rows that decoding first is faster, and for dtypes other than BF16.
    pub(crate) fn multiply(&self, x: &Tensor) -> Result<Option<Tensor>> {
        let columns = *x.dims().last().unwrap_or(&1);
        let rows = x.elem_count() / columns.max(1);
        if x.dtype() != DType::BF16 || rows as u64 >= self.linear.crossover_rows() {
            return Ok(None);
        }
        x.contiguous()?.apply_op1_no_bwd(self).map(Some)
    }
}

impl CustomOp1 for Fused {
    fn name(&self) -> &'static str {
        "df11-linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("the weights are on a GPU, and x is not")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Some(gpu) = self.weights.gpu() else { bail!("the weights are not on a GPU") };
        let (matrix, stream) = (&self.linear.matrices()[0], gpu.candle.cuda_stream());
        let (columns, width) = (matrix.column_count(), matrix.row_count());
        let (count, start) = (layout.shape().elem_count(), layout.start_offset());
        let mut dims = layout.shape().dims().to_vec();
        if dims.last().is_none_or(|&last| last as u64 != columns) {
            bail!("x has shape {dims:?}, and {} {columns} columns", matrix.name());
        }
        let rows = count as u64 / columns;
        dims.pop();
        dims.push(width as usize);
        let x = x.as_cuda_slice::<bf16>()?.slice(start..start + count);
        let mut y = gpu.candle.alloc_zeros::<bf16>((rows * width) as usize)?;
        let mut workspace = gpu.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let (x, _read) = x.device_ptr(&stream);
            let (to, _written) = y.device_ptr_mut(&stream);
            let (space, _used) = workspace.device_ptr_mut(&stream);
            let (x, to) = (LinearInput::new(x, rows, columns), LinearOutput::new(to, width));
            // SAFETY: x and y have the rows; the workspace is as large as `new` made it, for fewer
            // rows than the crossover, was zeros, and is used by products on this stream alone. The
            // stream frees them after the product; `self` keeps the matrix.
            unsafe { self.linear.multiply(x, &[to], space, &stream, &gpu.status) }
                .map_err(failed)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(y, gpu.candle.clone()), dims.into()))
    }
}
