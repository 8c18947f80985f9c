//! Models: opens them, lists their tensors, and decodes on the CPU.
#![expect(unsafe_code, reason = "memory of the caller")]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};

use df11::hazmat::{Tiles, platform::path_of_c, pool};
use df11::{OpenOptions, gpu::Device};

use crate::error::{Failure, call, not_found, refuse};
use crate::pointers::{bytes, check_size, give, rows_of, shared, take, text, write};
use crate::{OPEN_WITHOUT_MAP, Status};

/// An open model. Any number of threads may use it at once.
pub struct Model {
    pub(crate) opened: df11::Model,
    entries: Vec<Entry>,
    indices: HashMap<String, u64>,
}

/// Strings and shape of a tensor as C sees them, where they stay.
struct Entry {
    name: CString,
    block: CString,
    dtype: CString,
    encoding: CString,
    shape: Vec<u64>,
}

/// A tensor of a model. Pointers live until the model is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// `sizeof (df11_tensor)`, which the caller sets: later versions add fields at the end.
    pub size: usize,
    /// Its index among all tensors, from 0 on.
    pub index: u64,
    /// Its name.
    pub name: *const c_char,
    /// The name of its block, usually a transformer layer.
    pub block: *const c_char,
    /// The type of its elements as safetensors names it, such as BF16; empty if this version does
    /// not know it.
    pub dtype: *const c_char,
    /// How it is stored: tile, gap, float, delta, raw, alias or unknown.
    pub encoding: *const c_char,
    /// Its dimensions, outermost first.
    pub shape: *const u64,
    /// The number of its dimensions; 0 for a scalar.
    pub rank: u64,
    /// The size of its first dimension; 1 for a scalar.
    pub rows: u64,
    /// Its decoded size in bytes.
    pub bytes: u64,
    /// Its size in the container in bytes; 0 for an alias.
    pub stored_bytes: u64,
    /// The index of the tensor that has its bytes: its own, except for an alias (tied weights).
    pub target: u64,
    /// Rows of the matrix, if the tensor stays compressed on a GPU and can be multiplied by; 0 if
    /// it is decoded when it is loaded.
    pub matrix_rows: u64,
    /// Columns of that matrix, or 0.
    pub matrix_columns: u64,
    /// Bytes of device memory that it takes after `df11_gpu_load`.
    pub gpu_bytes: u64,
}

/// Alignment of each part of a tensor's memory, in bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// How a tensor lies in its device memory.
pub(crate) struct Places<'m> {
    /// A matrix that stays compressed, and where its codebook, records, bitstream, plane and decode
    /// table begin.
    pub(crate) matrix: Option<(Tiles<'m>, [u64; 5])>,
    /// Bytes of the tensor's device memory.
    pub(crate) bytes: u64,
}

impl<'m> Places<'m> {
    pub(crate) fn of(tensor: &df11::Tensor<'m>) -> df11::Result<Self> {
        let is_bf16 = |tiles: &Tiles<'_>| tiles.split().is_bf16();
        let Some(tiles) = Tiles::of(tensor)?.filter(is_bf16) else {
            return Ok(Self { matrix: None, bytes: tensor.byte_length()? });
        };
        let [codebook, records, bitstream, plane] = tiles.array_lengths();
        let mut bytes = 0;
        let starts = [codebook, records, bitstream, plane, Device::table_bytes()].map(|length| {
            let start = bytes;
            // No overflow: a file is shorter than 2^63 bytes.
            bytes += length.next_multiple_of(ALIGNMENT);
            start
        });
        Ok(Self { matrix: Some((tiles, starts)), bytes })
    }
}

impl Model {
    fn new(model: df11::Model) -> Self {
        let text = |text: &str| CString::new(text).expect("the format has no NUL in names");
        let entry = |tensor: df11::Tensor<'_>| Entry {
            name: text(tensor.name()),
            block: text(tensor.block_name()),
            dtype: text(tensor.dtype().map_or("", df11::Dtype::name)),
            encoding: text(tensor.encoding().name()),
            shape: tensor.shape(),
        };
        let entries = model.tensors().map(entry).collect();
        let names = model.tensors().map(|tensor| tensor.name().to_owned());
        let indices = names.zip(0..).collect();
        Self { opened: model, entries, indices }
    }

    /// The entry at this index and its tensor.
    fn at(&self, index: u64) -> Result<(&Entry, df11::Tensor<'_>), Failure> {
        let entry = usize::try_from(index).ok().and_then(|index| self.entries.get(index));
        let tensor = |entry: &Entry| self.opened.tensor(entry.name.to_str().ok()?).ok();
        let found = entry.and_then(|entry| Some((entry, tensor(entry)?)));
        let count = self.entries.len();
        found.map_or_else(|| not_found(format!("there is no tensor {index} of {count}")), Ok)
    }

    pub(crate) fn tensor(&self, index: u64) -> Result<df11::Tensor<'_>, Failure> {
        Ok(self.at(index)?.1)
    }

    fn describe(&self, index: u64) -> Result<Tensor, Failure> {
        let (entry, tensor) = self.at(index)?;
        // Nothing more is known of a tensor whose dtype a later version defines.
        let places = tensor.dtype().map(|_| Places::of(&tensor)).transpose()?;
        let matrix = places.as_ref().and_then(|places| places.matrix.as_ref());
        let (matrix_rows, matrix_columns) = matrix.map_or((0, 0), |(tiles, _)| tiles.shape());
        Ok(Tensor {
            size: size_of::<Tensor>(),
            index,
            name: entry.name.as_ptr(),
            block: entry.block.as_ptr(),
            dtype: entry.dtype.as_ptr(),
            encoding: entry.encoding.as_ptr(),
            shape: entry.shape.as_ptr(),
            rank: entry.shape.len() as u64,
            rows: entry.shape.first().copied().unwrap_or(1),
            bytes: if places.is_some() { tensor.byte_length()? } else { 0 },
            stored_bytes: tensor.stored_bytes(),
            target: self.indices.get(tensor.target().name()).copied().unwrap_or(index),
            matrix_rows,
            matrix_columns,
            gpu_bytes: places.map_or(0, |places| places.bytes),
        })
    }
}

/// Opens a model: a container, or a folder with all its shards. Reads and validates headers and
/// directories; the cost grows with the number of tensors. Do not truncate mapped files while the
/// model is open: that would end the process with SIGBUS. With `DF11_OPEN_WITHOUT_MAP` it is a read
/// error instead.
///
/// # Safety
/// `path` is a text that ends with a zero byte; `model` has room for a pointer, which is NULL
/// if the call fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_open(
    path: *const c_char,
    flags: u32,
    model: *mut *mut Model,
) -> Status {
    call(|| {
        let open = || {
            // SAFETY: the caller's promise.
            let path = path_of_c(unsafe { text(path, "the path") }?);
            if flags & !OPEN_WITHOUT_MAP != 0 {
                return refuse(format!("flags {flags:#x} of df11_open"));
            }
            let options = OpenOptions::new().memory_map(flags & OPEN_WITHOUT_MAP == 0);
            Ok(Model::new(options.open(path)?))
        };
        // SAFETY: the caller's promise.
        unsafe { give(model, "the place of the model", open) }
    })
}

/// Closes a model and frees its names and shapes; tensors that were loaded onto a GPU stay. NULL
/// does nothing.
///
/// # Safety
/// The model is from `df11_open` and is used no more, by any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_close(model: *mut Model) {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { take(model) });
        Ok(())
    });
}

/// Describes the tensor at an index. After the last one it returns `DF11_STATUS_NOT_FOUND`, which
/// ends a loop over all.
///
/// # Safety
/// `model` is open. `tensor` is a `df11_tensor` whose `size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_tensor_at(
    model: *const Model,
    index: u64,
    tensor: *mut Tensor,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let model = unsafe { shared(model, "the model") }?;
        // SAFETY: the caller's promise.
        unsafe { tell(tensor, model, index) }
    })
}

/// Describes the tensor with a name, in constant time.
///
/// # Safety
/// Like `df11_tensor_at`, by name; `name` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_tensor_named(
    model: *const Model,
    name: *const c_char,
    tensor: *mut Tensor,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let model = unsafe { shared(model, "the model") }?;
        // SAFETY: the caller's promise.
        let name = unsafe { text(name, "the name") }?.to_string_lossy();
        let Some(&index) = model.indices.get(&*name) else {
            return not_found(format!("there is no tensor {name:?}"));
        };
        // SAFETY: the caller's promise.
        unsafe { tell(tensor, model, index) }
    })
}

/// # Safety
/// As `df11_tensor_at`.
unsafe fn tell(tensor: *mut Tensor, model: &Model, index: u64) -> Result<(), Failure> {
    if tensor.is_null() {
        return refuse("the tensor is NULL");
    }
    // SAFETY: the caller's promise: the size comes first, and is there whatever the version.
    let given = unsafe { tensor.cast::<usize>().read() };
    if given < size_of::<Tensor>() {
        return refuse(format!(
            "a df11_tensor of {given} bytes; set its size to sizeof (df11_tensor)"
        ));
    }
    // SAFETY: the caller's promise: it has as many bytes.
    unsafe { write(tensor, model.describe(index)?, "the tensor") }
}

/// Decodes rows of a tensor of any dtype on the CPU: little-endian, as in the original file. Uses
/// all cores, also in a forked process; checksums are checked when bytes are read for the first
/// time. `output_bytes` is the exact size of these rows; with `DF11_ALL_ROWS` from row 0 on, it is
/// `bytes` of `df11_tensor`. After an error the contents of the output are undefined.
///
/// # Safety
/// `model` is open; `output` has `output_bytes`, which nobody else uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn df11_decode(
    model: *const Model,
    index: u64,
    first_row: u64,
    row_count: u64,
    output: *mut c_void,
    output_bytes: u64,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { shared(model, "the model") }?.tensor(index)?;
        let all = tensor.shape().first().copied().unwrap_or(1);
        let rows = rows_of(tensor.name(), all, first_row, row_count)?;
        let rows = if tensor.shape().is_empty() { &[][..] } else { &[rows][..] };
        let rows = tensor.slice(rows)?;
        check_size(output_bytes, rows.byte_length(), tensor.name())?;
        // SAFETY: the caller's promise.
        let output = unsafe { bytes(output.cast(), output_bytes) }?;
        Ok(pool()?.install(|| rows.decode_into(output))?)
    })
}
