//! Memory to which decoding writes: buffers that Python lends, and tensors in CPU memory that other
//! libraries take without a copy, as structures of DLPack 1.0 (`dlpack.h`).
#![expect(unsafe_code, reason = "memory that Python lends, structures that their receiver frees")]

use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null_mut};

use df11::{BlockLayout, Dtype, Error};
use pyo3::types::{PyCapsule, PyDict};
use pyo3::{ffi, intern, prelude::*};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::work::OrRaise;

/// A writable buffer of the caller.
pub(crate) struct Output<'py> {
    address: usize,
    length: usize,
    /// The buffer is not moved or freed while this lives.
    _owner: Bound<'py, PyAny>,
}

impl<'py> Output<'py> {
    /// Takes the memory of a buffer, which must have exactly `expected` bytes.
    pub(crate) fn new(buffer: &Bound<'py, PyAny>, expected: u64) -> PyResult<Self> {
        let py = buffer.py();
        let helper = py.import(intern!(py, "df11._arrays"))?;
        let (address, length, owner): (usize, usize, Bound<'py, PyAny>) =
            helper.call_method1(intern!(py, "writable"), (buffer,))?.extract()?;
        if length as u64 == expected {
            return Ok(Self { address, length, _owner: owner });
        }
        let problem = format!("the buffer has {length} bytes, and {expected} are decoded");
        Err(Error::parameter(problem, "pass a buffer of exactly that many")).or_raise(py)
    }

    /// Its bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        if self.length == 0 {
            return &mut [];
        }
        // SAFETY: `df11/_arrays.py` got address and length from the buffer protocol, by which
        // `_owner` holds a writable, contiguous export: the memory stays while it is held. It was
        // initialised by its owner. That nothing else reads or writes it while it is decoded to is
        // the contract of every method that takes a buffer and releases the lock, as of `readinto`.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.length) }
    }
}

/// The type and index of the CPU.
pub(crate) const CPU: (i32, i32) = (1, 0);
const VERSION: (u32, u32) = (1, 0);
/// The memory is the receiver's alone.
const IS_COPIED: u64 = 1 << 1;

/// Memory for decoded tensors, aligned as DLPack asks.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(256))]
struct Chunk([u8; 256]);

/// A decoded tensor on the CPU, to which the structures point.
pub(crate) struct Dense {
    chunks: Vec<Chunk>,
    bytes: usize,
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: DataType,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: (i32, i32),
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Plain {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: (u32, u32),
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// A structure with the tensor to which it points, until its deleter is called.
#[repr(C)]
struct Owned<M> {
    managed: M,
    _decoded: Dense,
}

/// A structure that tells of a tensor.
trait Managed: Sized {
    /// The name of its capsule.
    const NAME: &'static CStr;

    fn new(tensor: DlTensor) -> Self;
}

impl Managed for Plain {
    const NAME: &'static CStr = c"dltensor";

    fn new(tensor: DlTensor) -> Self {
        Self { tensor, context: null_mut(), deleter: Some(delete) }
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn new(tensor: DlTensor) -> Self {
        let (context, deleter) = (null_mut(), Some(delete as unsafe extern "C" fn(*mut Self)));
        Self { version: VERSION, context, deleter, flags: IS_COPIED, tensor }
    }
}

impl Dense {
    /// Memory of zeros for a tensor of this type and shape.
    pub(crate) fn new(
        name: &str,
        dtype: Option<Dtype>,
        shape: &[u64],
        bytes: u64,
    ) -> df11::Result<Self> {
        let code = dtype.and_then(data_type);
        let shape: Result<Vec<i64>, _> = shape.iter().map(|&n| i64::try_from(n)).collect();
        let (Some(dtype), Ok(shape)) = (code, shape) else {
            let problem =
                format!("tensor {name:?} has a dtype or a shape that DLPack does not know");
            return Err(Error::parameter(problem, "decode its bytes with decode_into"));
        };
        let chunks = Chunk::new_vec_zeroed(bytes.div_ceil(size_of::<Chunk>() as u64) as usize);
        let chunks = chunks.map_err(|_| {
            Error::parameter(format!("no memory for {bytes} bytes"), "decode fewer rows at once")
        })?;
        let mut strides = vec![1; shape.len()];
        for axis in (1..strides.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis].max(1);
        }
        Ok(Self { chunks, bytes: bytes as usize, shape, strides, dtype })
    }

    /// The bytes that it is decoded into.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.chunks.as_mut_bytes()[..self.bytes]
    }

    /// The capsule that `__dlpack__` answers with; `versioned` if the caller knows DLPack 1.
    pub(crate) fn capsule(self, py: Python<'_>, versioned: bool) -> PyResult<Bound<'_, PyCapsule>> {
        if versioned { capsule::<Versioned>(py, self) } else { capsule::<Plain>(py, self) }
    }
}

fn capsule<M: Managed>(py: Python<'_>, decoded: Dense) -> PyResult<Bound<'_, PyCapsule>> {
    let pointer = release::<M>(decoded);
    // SAFETY: the pointer is that of the structure which the name promises, and the destructor
    // takes it from its capsule.
    unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, pointer, M::NAME, Some(drop_capsule::<M>))
    }
}

/// Makes a structure that owns the tensor, until its deleter is called.
fn release<M: Managed>(mut decoded: Dense) -> NonNull<c_void> {
    let chunks = &mut decoded.chunks;
    let data = if chunks.is_empty() { null_mut() } else { chunks.as_mut_ptr().cast() };
    let tensor = DlTensor {
        data,
        device: CPU,
        // No truncation: the format allows few dimensions.
        ndim: i32::try_from(decoded.shape.len()).unwrap_or(i32::MAX),
        dtype: decoded.dtype,
        shape: decoded.shape.as_mut_ptr(),
        strides: decoded.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    // Memory of the vectors stays where it is when they move.
    let owned = Owned { managed: M::new(tensor), _decoded: decoded };
    NonNull::from(Box::leak(Box::new(owned))).cast()
}

/// # Safety
/// `managed` was made by `release`, and is not used afterwards.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: the caller's promise: `release` leaked it, and it begins with the structure.
    drop(unsafe { Box::from_raw(managed.cast::<Owned<M>>()) });
}

/// # Safety
/// Called by Python, of a capsule that `capsule` made.
unsafe extern "C" fn drop_capsule<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is alive while its destructor runs, and the name is static.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 1 {
        // SAFETY: the same; a receiver that took the tensor would have changed the name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
        // SAFETY: nobody took it, so that it is still the one of `release`.
        unsafe { delete::<M>(managed.cast()) }
    }
}

/// `DLDataTypeCode` and bits.
fn data_type(dtype: Dtype) -> Option<DataType> {
    let code = match dtype {
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => 0,
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => 1,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => 2,
        Dtype::BF16 => 4,
        Dtype::C64 => 5,
        Dtype::BOOL => 6,
        Dtype::F8_E4M3 => 10,
        Dtype::F8_E4M3FNUZ => 11,
        Dtype::F8_E5M2 => 12,
        Dtype::F8_E5M2FNUZ => 13,
        Dtype::F8_E8M0 => 14,
        _ => return None,
    };
    Some(DataType { code, bits: dtype.bits() as u8, lanes: 1 })
}

/// Checks that a caller of `__dlpack__` wants memory of the CPU, the only kind there is.
pub(crate) fn check_device(py: Python<'_>, device: Option<(i32, i32)>) -> PyResult<()> {
    if device.is_none_or(|device| device == CPU) {
        return Ok(());
    }
    let remedy = "load the model onto the GPU with Model.load, or copy the tensor there";
    Err(Error::parameter("tensors are decoded to the CPU", remedy)).or_raise(py)
}

/// Start and end of each tensor in a block's buffer, by name.
pub(crate) fn ranges<'py, 'm>(
    py: Python<'py>,
    names: impl Iterator<Item = &'m str>,
    layout: &BlockLayout,
) -> PyResult<Bound<'py, PyDict>> {
    let ranges = PyDict::new(py);
    for (name, range) in names.zip(&layout.tensors) {
        ranges.set_item(name, (range.start, range.end))?;
    }
    Ok(ranges)
}
