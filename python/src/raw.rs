//! GPUs on which other libraries hold matrices: what they do, with streams and addresses of those.
#![expect(unsafe_code, reason = "streams and addresses of other libraries")]

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, Mutex, PoisonError},
};

use df11::{
    Error,
    gpu::{
        Device, GroupedLinear, Indices, Linear as GpuLinear, LinearInput, LinearOutput,
        Matrix as GpuMatrix, Routing, Status, cudarc::driver::sys::CUstream,
    },
    hazmat::{
        gpu::{FastPacker, PinnedRange, TableAddresses, TileAddresses, Visit},
        tile::{Geometry, Sizes},
    },
};
use pyo3::prelude::*;

use crate::{context::OnStream, error::OrRaise, matrix::Matrix, model::Model, tiles::Part, work};

/// A GPU that stays open: matrices of other libraries have no owner here.
pub(crate) struct Opened {
    pub(crate) device: Device,
    status: Status,
}

static OPENED: Mutex<Option<HashMap<usize, Arc<Opened>>>> = Mutex::new(None);

impl Opened {
    /// Opens it the first time.
    pub(crate) fn get(ordinal: usize) -> df11::Result<Arc<Self>> {
        let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        if let Some(opened) = all.get(&ordinal) {
            return Ok(Arc::clone(opened));
        }
        // Before the visit, which needs a driver.
        df11::gpu::devices()?;
        let _visit = Visit::new();
        let device = Device::open(ordinal)?;
        let opened = Arc::new(Self { status: Status::new(&device)?, device });
        all.insert(ordinal, Arc::clone(&opened));
        Ok(opened)
    }

    /// Goes to a stream of the caller.
    ///
    /// # Safety
    /// The stream is one of the device's primary context (0 is its default stream), and lives as
    /// long as the result.
    unsafe fn on(&self, stream: usize) -> OnStream<'_> {
        // SAFETY: the caller's promise.
        unsafe { OnStream::new(&self.device, &self.status, stream) }
    }
}

/// A part on a GPU.
pub(crate) struct DeviceMatrix {
    part: Part,
    opened: Arc<Opened>,
    whole: GpuMatrix,
}

impl DeviceMatrix {
    pub(crate) fn new(
        ordinal: usize,
        part: Part,
        pointers: &[u64],
        lengths: &[u64],
    ) -> df11::Result<Self> {
        let refuse = |problem: String| {
            Err(Error::parameter(problem, "pass the arrays of the part, as _native.pyi says"))
        };
        let opened = Opened::get(ordinal)?;
        let (shape, device) = ((part.rows, part.columns), &opened.device);
        let whole = match (pointers, lengths) {
            (
                &[_, records, bitstream, plane, table],
                &[codebook_bytes, record_bytes, bitstream_bytes, plane_bytes, table_bytes],
            ) if !part.is_fast => {
                // The bit count, which is not known, may be as high as the bitstream is long.
                let bits = bitstream_bytes.saturating_mul(8);
                let sizes = part
                    .rows
                    .checked_mul(part.columns)
                    .and_then(|elements| Geometry::new(256, part.columns, elements).ok())
                    .and_then(|geometry| Sizes::new(geometry, bits, codebook_bytes).ok());
                let expected = sizes.map(|sizes| {
                    (sizes.records_bytes(), sizes.plane_bytes(), Device::table_bytes())
                });
                if expected != Some((record_bytes, plane_bytes, table_bytes)) {
                    return refuse(format!("arrays of {lengths:?} bytes of {shape:?} weights"));
                }
                let staged_bytes = part.staged_bytes;
                let at = TileAddresses {
                    records,
                    bitstream,
                    bitstream_bytes,
                    plane,
                    table,
                    staged_bytes,
                };
                // SAFETY: the contract of `Matrix` in `_native.pyi`; the lengths were compared.
                unsafe { GpuMatrix::of_tiles(device, shape, at) }?
            }
            (&[strips, entries], &[strip_bytes, entry_bytes]) if part.is_fast => {
                if strip_bytes < GpuMatrix::fast_bytes(part.rows, part.columns)
                    || !entry_bytes.is_multiple_of(4)
                {
                    return refuse(format!("arrays of {lengths:?} bytes of {shape:?} weights"));
                }
                // SAFETY: as above.
                unsafe { GpuMatrix::of_fast(device, shape, strips, (entries, entry_bytes / 4)) }?
            }
            _ => return refuse(format!("{} arrays, {} lengths", pointers.len(), lengths.len())),
        };
        Ok(Self { part, opened, whole })
    }

    pub(crate) fn part(&self) -> &Part {
        &self.part
    }

    /// The window as a matrix, which begins and ends between tiles.
    fn window(&self) -> df11::Result<GpuMatrix> {
        self.whole.rows(self.part.row_range.clone())?.columns(self.part.column_range.clone())
    }

    /// # Safety
    /// As [`GpuMatrix::decode_slice_into_raw`], on a stream as [`Opened::on`] says.
    pub(crate) unsafe fn decode(&self, output: u64, stream: usize) -> df11::Result<()> {
        let slice = (self.part.row_range.clone(), self.part.column_range.clone());
        // SAFETY: the caller's promise.
        let on = unsafe { self.opened.on(stream) };
        // SAFETY: the caller's promise.
        unsafe { self.whole.decode_slice_into_raw(slice, output, &on.stream, on.status) }
    }

    /// # Safety
    /// As [`GpuMatrix::gather`], on a stream as [`Opened::on`] says.
    pub(crate) unsafe fn gather(
        &self,
        indices: Indices,
        count: u64,
        output: u64,
        stream: usize,
    ) -> df11::Result<()> {
        let window = self.window()?;
        let output = (output, self.part.column_count());
        // SAFETY: the caller's promise.
        let on = unsafe { self.opened.on(stream) };
        // SAFETY: the caller's promise.
        unsafe { window.gather(indices, count, output, &on.stream, on.status) }
    }
}

fn on_gpu<'m>(
    py: Python<'_>,
    matrices: &'m [PyRef<'_, Matrix>],
) -> PyResult<Vec<&'m DeviceMatrix>> {
    let found = matrices.iter().map(|matrix| {
        let problem = || Error::parameter("a matrix lies on the CPU", "decode it there");
        matrix.on_gpu().ok_or_else(problem)
    });
    let found: df11::Result<Vec<_>> = found.collect();
    let found = found.or_raise(py)?;
    if found.is_empty() {
        return Err(Error::parameter("there is no matrix", "name one or more")).or_raise(py);
    }
    Ok(found)
}

/// Decodes several matrices of one GPU.
#[pyfunction]
pub(crate) fn decode_all(
    py: Python<'_>,
    matrices: Vec<PyRef<'_, Matrix>>,
    outputs: Vec<u64>,
    stream: usize,
) -> PyResult<()> {
    let found = on_gpu(py, &matrices)?;
    if outputs.len() != found.len() {
        return Err(Error::parameter(
            "as many outputs as matrices are needed",
            "name one for each",
        ))
        .or_raise(py);
    }
    let decode = || {
        let (mut windows, mut others) = (Vec::new(), Vec::new());
        for (matrix, &output) in found.iter().zip(&outputs) {
            match matrix.window() {
                Ok(window) => windows.push((window, output)),
                // It begins or ends within a tile.
                Err(Error::Parameter { .. }) => others.push((matrix, output)),
                Err(error) => return Err(error),
            }
        }
        let all: Vec<_> = windows.iter().map(|(window, output)| (window, *output)).collect();
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        let on = unsafe { found[0].opened.on(stream) };
        // SAFETY: as above.
        unsafe { GpuMatrix::decode_all_into_raw(&all, &on.stream, on.status) }?;
        // SAFETY: as above.
        others.into_iter().try_for_each(|(matrix, output)| unsafe { matrix.decode(output, stream) })
    };
    decode().or_raise(py)
}

/// Products with matrices of one GPU that share x.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Linear {
    opened: Arc<Opened>,
    inner: GpuLinear,
}

#[pymethods]
impl Linear {
    #[new]
    fn new(py: Python<'_>, matrices: Vec<PyRef<'_, Matrix>>) -> PyResult<Self> {
        let found = on_gpu(py, &matrices)?;
        let _visit = Visit::new();
        let windows: df11::Result<Vec<_>> = found.iter().map(|matrix| matrix.window()).collect();
        let inner = GpuLinear::new(&windows.or_raise(py)?).or_raise(py)?;
        Ok(Self { opened: Arc::clone(&found[0].opened), inner })
    }

    fn workspace_bytes(&self, rows: u64) -> u64 {
        self.inner.workspace_bytes(rows)
    }

    #[getter]
    fn crossover_rows(&self) -> u64 {
        self.inner.crossover_rows()
    }

    #[expect(clippy::too_many_arguments, reason = "addresses by name")]
    fn multiply(
        &self,
        py: Python<'_>,
        x: u64,
        rows: u64,
        pitch: u64,
        outputs: Vec<(u64, u64, u64)>,
        workspace: u64,
        stream: usize,
    ) -> PyResult<()> {
        let output = |&(pointer, pitch, bias): &(u64, u64, u64)| {
            LinearOutput::new(pointer, pitch).bias(bias)
        };
        let outputs: Vec<LinearOutput> = outputs.iter().map(output).collect();
        let x = LinearInput::new(x, rows, pitch);
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.opened.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.multiply(x, &outputs, workspace, &on.stream, on.status) }.or_raise(py)
    }
}

/// Products with equal parts of the rows of a matrix, as a router says on the device.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Grouped {
    opened: Arc<Opened>,
    inner: GroupedLinear,
}

#[pymethods]
impl Grouped {
    #[new]
    fn new(py: Python<'_>, matrix: PyRef<'_, Matrix>, experts: u64) -> PyResult<Self> {
        let matrices = [matrix];
        let found = on_gpu(py, &matrices)?[0];
        let _visit = Visit::new();
        let inner = found
            .window()
            .and_then(|window| GroupedLinear::of_parts(&window, experts))
            .or_raise(py)?;
        Ok(Self { opened: Arc::clone(&found.opened), inner })
    }

    #[expect(clippy::too_many_arguments, reason = "addresses by name")]
    fn multiply(
        &self,
        py: Python<'_>,
        x: u64,
        x_rows: u64,
        pitch: u64,
        offsets: u64,
        places: u64,
        rows: u64,
        y: u64,
        y_pitch: u64,
        stream: usize,
    ) -> PyResult<()> {
        let routing = Routing::new(offsets, places).rows(rows);
        let (x, y) = (LinearInput::new(x, x_rows, pitch), LinearOutput::new(y, y_pitch));
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.opened.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.multiply(x, routing, y, &on.stream, on.status) }.or_raise(py)
    }
}

/// BF16 weights on a GPU to the fast layout.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Packer {
    opened: Arc<Opened>,
    inner: FastPacker,
}

#[pymethods]
impl Packer {
    #[new]
    fn new(
        py: Python<'_>,
        device: usize,
        rows: u64,
        columns: u64,
        strips: u64,
        stream: usize,
    ) -> PyResult<Self> {
        let opened = Opened::get(device).or_raise(py)?;
        // SAFETY: the class's contract, which python/df11/_native.pyi states.
        let on = unsafe { opened.on(stream) };
        // SAFETY: as above.
        let inner = unsafe { FastPacker::new(&opened.device, (rows, columns), strips, &on.stream) };
        drop(on);
        Ok(Self { inner: inner.or_raise(py)?, opened })
    }

    fn pack(
        &self,
        py: Python<'_>,
        first_row: u64,
        rows: u64,
        weights: u64,
        stream: usize,
    ) -> PyResult<()> {
        let rows = first_row..first_row + rows;
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.opened.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.pack(rows, weights, &on.stream) }.or_raise(py)
    }

    fn finish(&self, py: Python<'_>, stream: usize) -> PyResult<Option<u64>> {
        py.detach(|| {
            // SAFETY: the method's contract, which python/df11/_native.pyi states.
            let on = unsafe { self.opened.on(stream) };
            self.inner.exceptions(&on.stream)
        })
        .or_raise(py)
    }

    fn take(&self, py: Python<'_>, entries: u64, stream: usize) -> PyResult<()> {
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.opened.on(stream) };
        let count = self.inner.exceptions(&on.stream).or_raise(py)?.unwrap_or(0);
        // SAFETY: as above; there is room for as many as `finish` told.
        unsafe { self.inner.take(count, entries, &on.stream) }.or_raise(py)
    }
}

/// Bytes of a matrix in the fast layout, except its exceptions.
#[pyfunction]
pub(crate) fn strips_bytes(rows: u64, columns: u64) -> u64 {
    GpuMatrix::fast_bytes(rows, columns)
}

/// Copies arrays of tensors to addresses on a GPU.
#[pyfunction]
#[pyo3(signature = (model, device, items, progress=None))]
pub(crate) fn upload(
    py: Python<'_>,
    model: &Bound<'_, Model>,
    device: usize,
    items: Vec<(String, [u64; 4])>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let model = &model.get().inner;
    let items: Vec<(&str, [u64; 4])> =
        items.iter().map(|(name, to)| (name.as_str(), *to)).collect();
    work::watched(py, progress, |observer| {
        let opened = Opened::get(device)?;
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        unsafe { model.upload_arrays(&opened.device, &items, observer) }
    })
}

/// Builds decode tables on a GPU.
#[pyfunction]
pub(crate) fn build_tables(
    py: Python<'_>,
    device: usize,
    items: Vec<(u64, u64, u64)>,
) -> PyResult<()> {
    let table = |&(codebook, codebook_bytes, table): &(u64, u64, u64)| TableAddresses {
        codebook,
        codebook_bytes,
        table,
    };
    let tables: Vec<TableAddresses> = items.iter().map(table).collect();
    let build = || {
        let opened = Opened::get(device)?;
        let _visit = Visit::new();
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        unsafe { opened.device.build_tables(&tables) }
    };
    py.detach(build).or_raise(py)
}

/// What [`pin`] pinned, by address.
static PINNED: Mutex<Option<HashMap<usize, PinnedRange>>> = Mutex::new(None);

/// Pins memory of the host.
#[pyfunction]
pub(crate) fn pin(py: Python<'_>, address: usize, bytes: usize) -> PyResult<()> {
    let pin = || {
        let opened = Opened::get(0)?;
        let _visit = Visit::new();
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        let range = unsafe { opened.device.pin(address as *mut c_void, bytes) }?;
        let mut all = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        all.get_or_insert_default().insert(address, range);
        Ok(())
    };
    py.detach(pin).or_raise(py)
}

/// Pins it no longer.
#[pyfunction]
pub(crate) fn unpin(address: usize) {
    let mut all = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(range) = all.get_or_insert_default().remove(&address) else { return };
    let _visit = Visit::new();
    drop(range);
}

/// The number of the capture that takes what is put on a stream; 0 if there is none.
#[pyfunction]
pub(crate) fn capture_id(py: Python<'_>, stream: usize) -> PyResult<u64> {
    // SAFETY: the function's contract, which python/df11/_native.pyi states.
    let capture = unsafe { df11::hazmat::gpu::capture_of_raw(stream as CUstream) };
    Ok(capture.or_raise(py)?.unwrap_or(0))
}

/// That no kernel met a contradiction.
#[pyfunction]
pub(crate) fn check(py: Python<'_>, device: usize, stream: usize) -> PyResult<()> {
    let check = || {
        let opened = Opened::get(device)?;
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        let on = unsafe { opened.on(stream) };
        let found = on.status.check(&on.stream);
        on.status.clear(&on.stream)?;
        found
    };
    py.detach(check).or_raise(py)
}

/// Whether a GPU has the kernels that multiply.
#[pyfunction]
pub(crate) fn fits(py: Python<'_>, device: usize) -> PyResult<bool> {
    match py.detach(|| Opened::get(device)) {
        Ok(_) => Ok(true),
        Err(Error::Gpu { .. }) => Ok(false),
        Err(error) => Err(error).or_raise(py),
    }
}
