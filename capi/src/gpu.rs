//! GPU functions that C calls.
#![expect(unsafe_code, reason = "memory and streams of the caller")]

use std::{ffi::c_void, sync::Arc};

use df11::gpu::cudarc::driver::result::memcpy_dtod_async;
use df11::gpu::{Device, LinearInput, LinearOutput};
use df11::hazmat::gpu::Visit;

use crate::device::{Form, Gpu, GpuTensor, Product, address, ask, load};
use crate::error::{call, refuse};
use crate::pointers::{check_size, give, rows_of, shared, take, write};
use crate::{Model, Status};

/// Opens a GPU by its number and loads the kernels; 0 is the first GPU that the driver reports.
/// Uses the primary context, as the CUDA runtime does. Every function leaves the thread's current
/// context as it was.
///
/// # Safety
/// `gpu` has room for a pointer, which is NULL if the call fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_open(ordinal: u32, gpu: *mut *mut Gpu) -> Status {
    call(|| {
        let open = || {
            // Before the visit, which needs a driver.
            df11::gpu::devices()?;
            let _visit = Visit::new();
            let device = Device::open(ordinal as usize)?;
            let status = Arc::new(df11::gpu::Status::new(&device)?);
            Ok(Gpu { status, device, process: std::process::id() })
        };
        // SAFETY: the caller's promise.
        unsafe { give(gpu, "the place of the GPU", open) }
    })
}

/// Closes a GPU; loaded tensors keep it open until they are freed. NULL does nothing.
///
/// # Safety
/// It is from `df11_gpu_open` and is used no more, by any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_close(gpu: *mut Gpu) {
    // SAFETY: the caller's promise.
    unsafe { free(gpu) }
}

/// Copies a tensor to GPU memory. A matrix with `matrix_rows` stays as stored, to be decoded or
/// multiplied by there; any other tensor is decoded on the way. Checks checksums and contents. The
/// copy is complete when it returns.
///
/// `pointer` is a multiple of 256 with `bytes` of memory, exactly `gpu_bytes` of `df11_tensor`; or
/// NULL with 0 bytes, and then the library allocates the memory. With `DF11_GPU_FAST` the library
/// always allocates it, and transcodes the matrix to the fast layout (about 12.1 bits per weight,
/// the fastest to multiply by); a matrix with too many exceptions stays as stored.
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
        let load = || {
            // SAFETY: the caller's promise.
            let gpu = unsafe { shared(gpu, "the GPU") }?.clone();
            // SAFETY: the caller's promise.
            let model = unsafe { shared(model, "the model") }?;
            let _visit = Visit::new();
            // SAFETY: the caller's promise.
            unsafe { load(gpu, model, index, flags, (address(pointer), bytes)) }
        };
        // SAFETY: the caller's promise.
        unsafe { give(tensor, "the place of the tensor", load) }
    })
}

/// Frees a tensor, and its memory if the library allocated it. NULL does nothing.
///
/// # Safety
/// It is from `df11_gpu_load`, what uses it on the GPU is done, and it is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_free(tensor: *mut GpuTensor) {
    // SAFETY: the caller's promise.
    unsafe { free(tensor) }
}

/// # Safety
/// Like [`take`].
unsafe fn free<T>(handle: *mut T) {
    call(|| {
        // SAFETY: the caller's promise.
        if let Some(held) = unsafe { take(handle) } {
            let _visit = Visit::new();
            drop(held);
        }
        Ok(())
    });
}

/// Puts the decoding of rows on a stream: dense, as by `df11_decode`. Neither allocates nor waits,
/// and can be captured in a graph. `output` is a multiple of 16, and `output_bytes` is the exact
/// size of these rows. Only `df11_gpu_check` reports a damaged bitstream.
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
        tensor.gpu.check_process()?;
        let rows = rows_of(&tensor.name, tensor.rows, first_row, row_count)?;
        let wanted = (rows.end - rows.start) * tensor.row_bytes;
        check_size(output_bytes, wanted, &tensor.name)?;
        if wanted == 0 {
            return Ok(());
        }
        if output.is_null() {
            return refuse("the output is NULL");
        }
        let (output, _visit) = (address(output), Visit::new());
        // SAFETY: the caller's promise.
        let stream = unsafe { tensor.gpu.stream(stream) };
        match &tensor.form {
            Form::Matrix(matrix, _) => {
                let each = matrix.row_count() / tensor.rows;
                let slice = (rows.start * each..rows.end * each, 0..matrix.column_count());
                let status = &tensor.gpu.status;
                // SAFETY: the caller's promise.
                Ok(unsafe { matrix.decode_slice_into_raw(slice, output, &stream, status) }?)
            }
            Form::Decoded(pointer) => {
                ask(tensor.gpu.device.context().bind_to_thread(), "copying on the GPU")?;
                let (rows, stream) = (pointer + rows.start * tensor.row_bytes, stream.cu_stream());
                // SAFETY: the caller's promise; the rows lie in the tensor's memory.
                let copied = unsafe { memcpy_dtod_async(output, rows, wanted as usize, stream) };
                ask(copied, "copying on the GPU")
            }
        }
    })
}

/// The size in bytes of the workspace for a product with up to this many rows of x; it may be 0.
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
        tensor.gpu.check_process()?;
        let _visit = Visit::new();
        let needed = tensor.linear()?.workspace_bytes(rows);
        // SAFETY: the caller's promise.
        unsafe { write(bytes, needed, "the place of the size") }
    })
}

/// Whether a product of this many rows of x can add in the order of a BLAS library that cuts the
/// columns of W into `splits`. Split i has the columns from i * U to before (i + 1) * U, with U =
/// ceil(ceil(columns / 64) / splits) * 64; it is one chain of tensor-core products of 16 columns,
/// first to last, from an F32 zero. Splits are added in order, then the bias; the sum is rounded
/// once.
///
/// # Safety
/// `tensor` is loaded; `keeps` has room for an answer, 1 or 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_keeps_order(
    tensor: *const GpuTensor,
    rows: u64,
    splits: u64,
    keeps: *mut u8,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { shared(tensor, "the tensor") }?;
        let _visit = Visit::new();
        let answer = u8::from(tensor.linear()?.keeps_order(rows, &[splits]));
        // SAFETY: the caller's promise.
        unsafe { write(keeps, answer, "the place of the answer") }
    })
}

/// Puts the product of rows of x with a matrix on a stream, without decoding it to memory. Sums are
/// F32, each is rounded once, and the bits are the same in every run. They are the bits of a BLAS
/// that adds in the order of `splits`; `splits` are refused unless `df11_gpu_keeps_order` gives 1.
/// Neither allocates nor waits, except that the first product with a tensor prepares it
/// (`df11_gpu_workspace` does so too, before a capture).
///
/// # Safety
/// As for `df11_gpu_decode`, for all memory that `product` names; it may not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_multiply(
    tensor: *const GpuTensor,
    product: *const Product,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { shared(tensor, "the tensor") }?;
        tensor.gpu.check_process()?;
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
        let linear = tensor.linear()?;
        let Product { x, x_pitch, rows, y, y_pitch, bias, workspace, .. } = *product;
        let Product { workspace_bytes, splits, .. } = *product;
        if rows > 0 && (x.is_null() || y.is_null()) {
            return refuse("x or y is NULL");
        }
        let needed = linear.workspace_bytes(rows);
        if workspace_bytes < needed || (workspace.is_null() && needed > 0) {
            let remedy = format!("df11_gpu_workspace says {needed}");
            return refuse(format!("a workspace of {workspace_bytes} bytes; {remedy}"));
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { tensor.gpu.stream(stream) };
        let x = LinearInput::new(address(x), rows, x_pitch);
        let y = LinearOutput::new(address(y), y_pitch).bias(address(bias)).splits(splits);
        // SAFETY: the caller's promise.
        Ok(unsafe { linear.multiply(x, &[y], address(workspace), &stream, &tensor.gpu.status) }?)
    })
}

/// Waits for the work on the stream, and returns `DF11_STATUS_CORRUPT` if anything that was decoded
/// or multiplied by on this GPU since the last call was damaged; its outputs are then undefined.
///
/// # Safety
/// `gpu` is open; `stream` as of `df11_gpu_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_gpu_check(gpu: *const Gpu, stream: *mut c_void) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let gpu = unsafe { shared(gpu, "the GPU") }?;
        gpu.check_process()?;
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
