//! Tensors on GPUs, in memory of the caller, on streams of the caller.
#![expect(unsafe_code, reason = "memory and streams of the caller")]

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{Arc, OnceLock},
};

use df11::{
    gpu::{
        Device, Linear, LinearInput, LinearOutput, Matrix, Residence,
        cudarc::driver::{
            CudaSlice, CudaStream, DevicePtr as _, DriverError,
            result::{memcpy_dtod_async, memcpy_htod_async},
            sys::{CUdeviceptr, CUstream},
        },
    },
    hazmat::{
        Tiles,
        gpu::{TableAddresses, TileAddresses, Visit},
    },
};

use crate::{
    GPU_FAST, Model, Status,
    error::{Failure, call, refuse},
    model::{check_size, rows_of},
    pointers::{give, shared, take, write},
};

/// What begins on its own, of the memory of a tensor.
const ALIGNMENT: u64 = 256;

/// Where the arrays of a tensor lie in its device memory, from its start on.
pub(crate) struct Places {
    /// Codebook, records, bitstream, plane, decode table: of a matrix that stays compressed.
    arrays: Option<[u64; 5]>,
    /// Of all.
    pub(crate) bytes: u64,
}

impl Places {
    pub(crate) fn of(tensor: &df11::Tensor<'_>) -> df11::Result<Self> {
        let Some(tiles) = Tiles::of(tensor)? else {
            return Ok(Self { arrays: None, bytes: tensor.byte_length()? });
        };
        let [codebook, records, bitstream, plane] = tiles.array_lengths();
        let mut bytes = 0;
        let arrays = [codebook, records, bitstream, plane, Device::table_bytes()].map(|length| {
            let start = bytes;
            // No overflow: a file is shorter than 2^63 bytes.
            bytes += length.next_multiple_of(ALIGNMENT);
            start
        });
        Ok(Self { arrays: Some(arrays), bytes })
    }
}

/// A GPU that is open. Any number of threads may use it at once.
pub struct Gpu(Arc<Opened>);

struct Opened {
    device: Device,
    status: df11::gpu::Status,
}

/// A tensor on a GPU. Any number of threads may use it at once, on any streams.
pub struct GpuTensor {
    gpu: Arc<Opened>,
    name: String,
    rows: u64,
    row_bytes: u64,
    form: Form,
    /// If it is the library's.
    _memory: Option<CudaSlice<u8>>,
}

enum Form {
    Matrix(Matrix, OnceLock<Linear>),
    /// From this address on.
    Decoded(CUdeviceptr),
}

/// A product `y = x Wᵀ (+ bias)`: BF16, row-major, in memory of the GPU. Pitches count elements
/// from the start of a row to that of the next.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `sizeof (df11_product)`: later versions add fields at the end.
    pub size: usize,
    /// Rows of as many elements as W has columns.
    pub x: *const c_void,
    /// Elements from a row of x to the next.
    pub x_pitch: u64,
    /// Rows of x and y.
    pub rows: u64,
    /// Room for `rows` rows of as many elements as W has rows.
    pub y: *mut c_void,
    /// Elements from a row of y to the next.
    pub y_pitch: u64,
    /// As many elements as W has rows, which are added to each row of y; NULL is none.
    pub bias: *const c_void,
    /// Memory that was filled with zeros once, and since then was used by products alone, one after
    /// the other; a multiple of 16. NULL if `df11_gpu_workspace` says 0.
    pub workspace: *mut c_void,
    /// Its size: at least what `df11_gpu_workspace` says.
    pub workspace_bytes: u64,
}

impl Opened {
    /// The caller's stream.
    ///
    /// # Safety
    /// It is one of the device's primary context (NULL is its default stream), and lives as long as
    /// the result.
    unsafe fn stream(&self, stream: *mut c_void) -> Arc<CudaStream> {
        // SAFETY: the caller's promise. Wrapping allocates some bytes and asks the driver nothing.
        unsafe { self.device.context().wrap_borrowed_stream(stream as CUstream) }
    }
}

/// What the driver answers.
fn ask<T>(answer: Result<T, DriverError>, action: &str) -> Result<T, Failure> {
    answer.map_err(|error| {
        let remedy = "the calls before it on this GPU may have failed";
        df11::Error::Gpu { problem: format!("{action}: {error}"), remedy: remedy.into() }.into()
    })
}

fn address(pointer: *const c_void) -> CUdeviceptr {
    pointer as CUdeviceptr
}

/// Opens a GPU by its number and loads the kernels; 0 is the first one that the driver shows. Works
/// in the primary context, which the CUDA runtime uses too. Every function leaves the thread's
/// current context as it was.
///
/// # Safety
/// `gpu` has room for a pointer, which is NULL if the call fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_open(ordinal: u32, gpu: *mut *mut Gpu) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        unsafe { write(gpu, null_mut(), "the place of the GPU") }?;
        // Before the visit, which needs a driver.
        df11::gpu::devices()?;
        let _visit = Visit::new();
        let device = Device::open(ordinal as usize)?;
        let opened = Opened { status: df11::gpu::Status::new(&device)?, device };
        // SAFETY: the caller's promise.
        unsafe { give(gpu, Gpu(Arc::new(opened)), "the place of the GPU") }
    })
}

/// Closes a GPU; tensors that are loaded keep it open until they are freed. NULL is nothing.
///
/// # Safety
/// It is from `df11_gpu_open` and is used no more, by any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_close(gpu: *mut Gpu) {
    call(|| {
        // SAFETY: the caller's promise.
        if let Some(gpu) = unsafe { take(gpu) } {
            let _visit = Visit::new();
            drop(gpu);
        }
        Ok(())
    });
}

/// Brings a tensor to memory of a GPU: a matrix with `matrix_rows` as it is stored, to be decoded
/// and multiplied by there; any other is decoded on the way. Checksums and contents are checked.
/// Done when it returns.
///
/// `pointer` is a multiple of 256 with `bytes` of memory, exactly `gpu_bytes` of `df11_tensor`; or
/// NULL with 0 bytes for memory of the library. With `DF11_GPU_FAST` the library takes that, and
/// transcodes the matrix to the fast layout (about 12.1 bits a weight, the fastest to multiply by);
/// one that has too many exceptions stays as stored.
///
/// # Safety
/// `gpu` and `model` are open; nobody else uses the memory until the tensor is freed; `tensor` has
/// room for a pointer, which is NULL if the call fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_load(
    gpu: *const Gpu,
    model: *const Model,
    index: u64,
    flags: u32,
    pointer: *mut c_void,
    bytes: u64,
    tensor: *mut *mut GpuTensor,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        unsafe { write(tensor, null_mut(), "the place of the tensor") }?;
        // SAFETY: the caller's promise.
        let gpu = Arc::clone(&unsafe { shared(gpu, "the GPU") }?.0);
        // SAFETY: the caller's promise.
        let model = unsafe { shared(model, "the model") }?;
        let _visit = Visit::new();
        // SAFETY: the caller's promise.
        let loaded = unsafe { load(gpu, model, index, flags, (address(pointer), bytes)) }?;
        // SAFETY: the caller's promise.
        unsafe { give(tensor, loaded, "the place of the tensor") }
    })
}

/// # Safety
/// As `df11_gpu_load`.
unsafe fn load(
    gpu: Arc<Opened>,
    model: &Model,
    index: u64,
    flags: u32,
    (mut pointer, given): (CUdeviceptr, u64),
) -> Result<GpuTensor, Failure> {
    let tensor = model.tensor(index)?;
    tensor.check_known()?;
    let (name, places) = (tensor.name(), Places::of(&tensor)?);
    let is_own = pointer == 0 && given == 0;
    if flags & !GPU_FAST != 0 || (flags == GPU_FAST && !is_own) {
        return refuse(format!(
            "flags {flags:#x} of df11_gpu_load, with {given} bytes at {pointer:#x}"
        ));
    }
    if !is_own {
        check_size(given, places.bytes, name)?;
    }
    if !pointer.is_multiple_of(ALIGNMENT) || (pointer == 0 && given > 0) {
        return refuse(format!(
            "memory of a GPU at {pointer:#x}; begin on a multiple of {ALIGNMENT}"
        ));
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
    let form = if let Some(arrays) = places.arrays {
        // SAFETY: the caller's promise, or memory of its own.
        let matrix =
            unsafe { matrix(&gpu.device, model, &tensor, arrays.map(|start| pointer + start)) }?;
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

/// A matrix as it is stored, from the container to these addresses.
///
/// # Safety
/// They have room for codebook, records, bitstream, plane and decode table, and live as long as the
/// result.
unsafe fn matrix(
    device: &Device,
    model: &Model,
    tensor: &df11::Tensor<'_>,
    [codebook, records, bitstream, plane, table]: [CUdeviceptr; 5],
) -> Result<Matrix, Failure> {
    let wanted = [(tensor.name(), [codebook, records, bitstream, plane])];
    // SAFETY: the caller's promise.
    unsafe { model.opened.upload_arrays(device, &wanted, &()) }?;
    let Some(tiles) = Tiles::of(tensor)? else { return refuse("a matrix in tiles") };
    let [codebook_bytes, _, bitstream_bytes, _] = tiles.array_lengths();
    // SAFETY: the caller's promise.
    unsafe { device.build_tables(&[TableAddresses { codebook, codebook_bytes, table }]) }?;
    let staged_bytes = tiles.staged_bytes()?;
    let at = TileAddresses { records, bitstream, bitstream_bytes, plane, table, staged_bytes };
    // SAFETY: the caller's promise.
    Ok(unsafe { Matrix::of_tiles(device, tiles.shape(), at) }?)
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
    fn linear(&self) -> Result<&Linear, Failure> {
        let Form::Matrix(matrix, linear) = &self.form else {
            return refuse(format!(
                "{:?} was decoded when it was loaded, and is multiplied by as any",
                self.name
            ));
        };
        if let Some(linear) = linear.get() {
            return Ok(linear);
        }
        let prepared = Linear::new(std::slice::from_ref(matrix))?;
        Ok(linear.get_or_init(|| prepared))
    }

    /// # Safety
    /// As `df11_gpu_decode`.
    unsafe fn decode(
        &self,
        (first, count): (u64, u64),
        (output, bytes): (CUdeviceptr, u64),
        stream: *mut c_void,
    ) -> Result<(), Failure> {
        let rows = rows_of(&self.name, self.rows, first, count)?;
        let wanted = (rows.end - rows.start) * self.row_bytes;
        check_size(bytes, wanted, &self.name)?;
        if wanted == 0 {
            return Ok(());
        }
        if output == 0 {
            return refuse("the output is NULL");
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.gpu.stream(stream) };
        let start = rows.start * self.row_bytes;
        match &self.form {
            Form::Matrix(matrix, _) => {
                let columns = matrix.column_count();
                let each = matrix.row_count() / self.rows;
                let slice = (rows.start * each..rows.end * each, 0..columns);
                // SAFETY: the caller's promise.
                unsafe { matrix.decode_slice_into_raw(slice, output, &stream, &self.gpu.status) }?;
            }
            Form::Decoded(pointer) => {
                ask(self.gpu.device.context().bind_to_thread(), "copying on the GPU")?;
                // SAFETY: the caller's promise; the rows lie in the tensor's memory.
                let copied = unsafe {
                    memcpy_dtod_async(output, pointer + start, wanted as usize, stream.cu_stream())
                };
                ask(copied, "copying on the GPU")?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As `df11_gpu_multiply`.
    unsafe fn multiply(&self, product: &Product, stream: *mut c_void) -> Result<(), Failure> {
        let linear = self.linear()?;
        let Product { x, x_pitch, rows, y, y_pitch, bias, workspace, workspace_bytes, .. } =
            *product;
        if rows > 0 && (x.is_null() || y.is_null()) {
            return refuse("x or y is NULL");
        }
        let needed = linear.workspace_bytes(rows);
        if workspace_bytes < needed || (workspace.is_null() && needed > 0) {
            return refuse(format!(
                "a workspace of {workspace_bytes} bytes; df11_gpu_workspace says {needed}"
            ));
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.gpu.stream(stream) };
        let x = LinearInput::new(address(x), rows, x_pitch);
        let y = LinearOutput::new(address(y), y_pitch).bias(address(bias));
        // SAFETY: the caller's promise.
        Ok(unsafe { linear.multiply(x, &[y], address(workspace), &stream, &self.gpu.status) }?)
    }
}

/// Frees a tensor, and its memory if that is the library's. NULL is nothing.
///
/// # Safety
/// It is from `df11_gpu_load`, what uses it on the GPU is done, and it is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_free(tensor: *mut GpuTensor) {
    call(|| {
        // SAFETY: the caller's promise.
        if let Some(tensor) = unsafe { take(tensor) } {
            let _visit = Visit::new();
            drop(tensor);
        }
        Ok(())
    });
}

/// Puts the decoding of rows on a stream: dense, as `df11_decode` gives them. Neither allocates nor
/// waits, and can be captured in a graph. `output` is a multiple of 16, and `output_bytes` the size
/// of these rows exactly. A damaged stream shows in `df11_gpu_check` alone.
///
/// # Safety
/// `stream` is a `CUstream` or `cudaStream_t` of the GPU's primary context. `output` has
/// `output_bytes` of memory of the GPU, which nobody else uses until the work is done; until then
/// the tensor is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_decode(
    tensor: *const GpuTensor,
    first_row: u64,
    row_count: u64,
    output: *mut c_void,
    output_bytes: u64,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { shared(tensor, "the tensor") }?;
        let _visit = Visit::new();
        // SAFETY: the caller's promise.
        unsafe { tensor.decode((first_row, row_count), (address(output), output_bytes), stream) }
    })
}

/// The size of the workspace of a product with up to this many rows of x; it may be 0.
///
/// # Safety
/// `tensor` is loaded; `bytes` has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_workspace(
    tensor: *const GpuTensor,
    rows: u64,
    bytes: *mut u64,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { shared(tensor, "the tensor") }?;
        let _visit = Visit::new();
        let needed = tensor.linear()?.workspace_bytes(rows);
        // SAFETY: the caller's promise.
        unsafe { write(bytes, needed, "the place of the size") }
    })
}

/// Puts the product of rows of x with a matrix on a stream, without decoding it to memory. Sums are
/// F32, each is rounded once, and bits are the same in every run, but not those of a BLAS. Neither
/// allocates nor waits, except that the first product with a tensor prepares it
/// (`df11_gpu_workspace` does so too, ahead of a capture).
///
/// # Safety
/// As `df11_gpu_decode`, of all memory that `product` names; that may not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_multiply(
    tensor: *const GpuTensor,
    product: *const Product,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { shared(tensor, "the tensor") }?;
        // SAFETY: the caller's promise: the size comes first, and is there whatever the version.
        let given = *unsafe { shared(product.cast::<usize>(), "the product") }?;
        if given != size_of::<Product>() {
            return refuse(format!(
                "a df11_product of {given} bytes; set its size to sizeof (df11_product)"
            ));
        }
        // SAFETY: the caller's promise: it has as many bytes.
        let product = unsafe { shared(product, "the product") }?;
        let _visit = Visit::new();
        // SAFETY: the caller's promise.
        unsafe { tensor.multiply(product, stream) }
    })
}

/// Waits for what is on the stream, and answers `DF11_STATUS_CORRUPT` if anything that was decoded
/// or multiplied by on this GPU since the last call was damaged: its outputs hold anything.
///
/// # Safety
/// `gpu` is open; `stream` as of `df11_gpu_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_check(gpu: *const Gpu, stream: *mut c_void) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let gpu = &unsafe { shared(gpu, "the GPU") }?.0;
        let _visit = Visit::new();
        // SAFETY: the caller's promise.
        let stream = unsafe { gpu.stream(stream) };
        let found = gpu.status.check(&stream);
        if found.is_err() {
            gpu.status.clear(&stream)?;
        }
        Ok(found?)
    })
}
