//! Tensors on GPUs, in the caller's memory and on the caller's streams.
#![expect(unsafe_code, reason = "memory and streams of the caller")]

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use df11::gpu::cudarc::driver::result::memcpy_htod_async;
use df11::gpu::cudarc::driver::sys::{CUdeviceptr, CUstream};
use df11::gpu::cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DriverError};
use df11::gpu::{CutArrays, Device, Linear, Matrix, Residence};
use df11::hazmat::gpu::{TableAddresses, TileAddresses};

use crate::error::{Failure, refuse};
use crate::model::{ALIGNMENT, Places};
use crate::pointers::check_size;
use crate::{GPU_FAST, Model};

/// An open GPU. Any number of threads may use it at once.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) device: Device,
    /// The status that its kernels set.
    pub(crate) status: Arc<df11::gpu::Status>,
    /// The process that opened it.
    pub(crate) process: u32,
}

/// A tensor on a GPU. Any number of threads may use it at once, on any streams.
pub struct GpuTensor {
    pub(crate) gpu: Gpu,
    pub(crate) name: String,
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) form: Form,
    /// If it is the library's.
    _memory: Option<CudaSlice<u8>>,
}

pub(crate) enum Form {
    Matrix(Matrix, OnceLock<Linear>),
    /// Decoded weights at this address.
    Decoded(CUdeviceptr),
}

/// A product `y = x Wᵀ (+ bias)`: BF16, row-major, in GPU memory. A pitch is the number of elements
/// from the start of one row to the start of the next.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `sizeof (df11_product)`: later versions add fields at the end.
    pub size: usize,
    /// Rows with one element for each column of W.
    pub x: *const c_void,
    /// Pitch of x.
    pub x_pitch: u64,
    /// Rows of x and y.
    pub rows: u64,
    /// Room for `rows` rows with one element for each row of W.
    pub y: *mut c_void,
    /// Pitch of y.
    pub y_pitch: u64,
    /// One element for each row of W, added to each row of y; NULL for no bias.
    pub bias: *const c_void,
    /// Memory that was filled with zeros once, and since then was used only by products, one after
    /// the other; its address is a multiple of 16. NULL if `df11_gpu_workspace` says 0.
    pub workspace: *mut c_void,
    /// Its size in bytes: at least what `df11_gpu_workspace` says.
    pub workspace_bytes: u64,
    /// The number of splits of W's columns, which fixes the order of sums; `df11_gpu_keeps_order`
    /// says which numbers are possible. 0 chooses the fastest order.
    pub splits: u64,
}

impl Gpu {
    /// Refuses a process that was forked after it was opened: CUDA works in none of these.
    pub(crate) fn check_process(&self) -> Result<(), Failure> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let problem =
            "the GPU was opened before this process was forked, and CUDA does not work here";
        refuse(format!("{problem}; open it after the fork alone, or start the process anew"))
    }

    /// The caller's stream.
    ///
    /// # Safety
    /// It is one of the device's primary context (NULL is its default stream), and lives as long as
    /// the result.
    pub(crate) unsafe fn stream(&self, stream: *mut c_void) -> Arc<CudaStream> {
        // SAFETY: the caller's promise. Wrapping allocates some bytes and asks the driver nothing.
        unsafe { self.device.context().wrap_borrowed_stream(stream as CUstream) }
    }
}

/// Turns an error of the driver into a failure of `action`.
pub(crate) fn ask<T>(answer: Result<T, DriverError>, action: &str) -> Result<T, Failure> {
    answer.map_err(|error| {
        let remedy = "the calls before it on this GPU may have failed";
        df11::Error::Gpu { problem: format!("{action}: {error}"), remedy: remedy.into() }.into()
    })
}

pub(crate) fn address(pointer: *const c_void) -> CUdeviceptr {
    pointer as CUdeviceptr
}

/// # Safety
/// As `df11_gpu_load`.
pub(crate) unsafe fn load(
    gpu: Gpu,
    model: &Model,
    index: u64,
    flags: u32,
    (mut pointer, given): (CUdeviceptr, u64),
) -> Result<GpuTensor, Failure> {
    gpu.check_process()?;
    let tensor = model.tensor(index)?;
    tensor.check_known()?;
    let (name, places) = (tensor.name(), Places::of(&tensor)?);
    let is_own = pointer == 0 && given == 0;
    if flags & !GPU_FAST != 0 || (flags == GPU_FAST && !is_own) {
        let memory = format!("with {given} bytes at {pointer:#x}");
        return refuse(format!("flags {flags:#x} of df11_gpu_load, {memory}"));
    }
    if !is_own {
        check_size(given, places.bytes, name)?;
    }
    if !pointer.is_multiple_of(ALIGNMENT) || (pointer == 0 && given > 0) {
        let remedy = format!("begin on a multiple of {ALIGNMENT}");
        return refuse(format!("memory of a GPU at {pointer:#x}; {remedy}"));
    }
    let context = gpu.device.context();
    let stream = ask(context.new_stream(), "making a stream")?;
    let mut memory = None;
    if is_own {
        // SAFETY: all of it is written below, before anyone reads it.
        let taken = unsafe { stream.alloc::<u8>(places.bytes.max(1) as usize) };
        let taken = memory.insert(ask(taken, "taking memory of the GPU")?);
        pointer = taken.device_ptr(&stream).0;
        ask(stream.synchronize(), "taking memory of the GPU")?;
    }
    let rows = tensor.shape().first().copied().unwrap_or(1);
    let row_bytes = tensor.byte_length()?.checked_div(rows).unwrap_or(0);
    let form = if let Some((tiles, starts)) = places.matrix {
        let [codebook, records, bitstream, plane, table] = starts.map(|start| pointer + start);
        let ((rows, columns), lengths) = (tiles.shape(), tiles.array_lengths());
        let arrays = [codebook, records, bitstream, plane];
        let to = std::array::from_fn(|at| (arrays[at], lengths[at]));
        let wanted = [CutArrays { name, rows: 0..rows, columns: 0..columns, to }];
        // SAFETY: the caller's promise, or memory of its own: it has room for all of them, and
        // lives as long as the tensor.
        unsafe { model.opened.upload_arrays(&gpu.device, &wanted, &()) }?;
        let [codebook_bytes, _, bitstream_bytes, _] = lengths;
        let table_at = TableAddresses { codebook, codebook_bytes, table };
        // SAFETY: the same.
        unsafe { gpu.device.build_tables(tiles.split(), &[table_at]) }?;
        let staged_bytes = tiles.staged_bytes()?;
        let at = TileAddresses { records, bitstream, bitstream_bytes, plane, table, staged_bytes };
        // SAFETY: the same.
        let matrix = unsafe { Matrix::of_tiles(&gpu.device, tiles.shape(), tiles.split(), at) }?;
        Form::Matrix(matrix, OnceLock::new())
    } else {
        let bytes = tensor.decode::<u8>()?;
        // SAFETY: the memory has as many bytes, and both live until the copy is done.
        let copied = unsafe { memcpy_htod_async(pointer, &bytes, stream.cu_stream()) };
        ask(copied.and_then(|()| stream.synchronize()), "copying to the GPU")?;
        Form::Decoded(pointer)
    };
    let name = name.to_owned();
    let loaded = GpuTensor { gpu, name, rows, row_bytes, form, _memory: memory };
    if flags == GPU_FAST { loaded.into_fast() } else { Ok(loaded) }
}

impl GpuTensor {
    /// In the fast layout if it is a matrix and has few exceptions; its memory as stored is freed
    /// then.
    fn into_fast(self) -> Result<Self, Failure> {
        let Form::Matrix(stored, _) = &self.form else { return Ok(self) };
        let fast = stored.to_fast_or_stored()?;
        if fast.residence() != Residence::Fast {
            return Ok(self);
        }
        Ok(Self { form: Form::Matrix(fast, OnceLock::new()), _memory: None, ..self })
    }

    /// Its product, prepared the first time.
    pub(crate) fn linear(&self) -> Result<&Linear, Failure> {
        let Form::Matrix(matrix, linear) = &self.form else {
            let why = "was decoded when it was loaded, and is multiplied by as any";
            return refuse(format!("{:?} {why}", self.name));
        };
        if let Some(linear) = linear.get() {
            return Ok(linear);
        }
        let prepared = Linear::new(std::slice::from_ref(matrix))?;
        Ok(linear.get_or_init(|| prepared))
    }
}
