//! Products on GPUs and their preparation, with other libraries' streams and addresses.
#![expect(unsafe_code, reason = "streams and addresses of other libraries")]

use std::{ffi::c_void, sync::Arc};

use df11::Error;
use df11::gpu::{
    CutArrays, GroupedLinear, Linear as GpuLinear, LinearInput, LinearOutput, Matrix as GpuMatrix,
    Routing, cudarc::driver::sys::CUstream,
};
use df11::hazmat::gpu::{FastPacker, PinnedRange, TableAddresses, Visit};
use pyo3::prelude::*;

use crate::context::{Gpu, OnGpu};
use crate::work::{self, OrRaise};
use crate::{matrix, matrix::Matrix, model::Model};

/// Products with matrices of one GPU that share x.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Linear {
    gpu: Arc<Gpu>,
    inner: GpuLinear,
}

#[pymethods]
impl Linear {
    #[new]
    fn new(py: Python<'_>, matrices: Vec<PyRef<'_, Matrix>>) -> PyResult<Self> {
        let gpu = Matrix::gpu_of(&matrices).or_raise(py)?;
        let _visit = Visit::new();
        let windows: df11::Result<Vec<_>> = matrices.iter().map(|matrix| matrix.window()).collect();
        let inner = windows.and_then(|windows| GpuLinear::new(&windows)).or_raise(py)?;
        Ok(Self { gpu: Arc::clone(gpu), inner })
    }

    fn workspace_bytes(&self, rows: u64) -> u64 {
        self.inner.workspace_bytes(rows)
    }

    #[getter]
    fn crossover_rows(&self) -> u64 {
        self.inner.crossover_rows()
    }

    #[expect(clippy::needless_pass_by_value, reason = "what Python passes")]
    fn keeps_order(&self, rows: u64, splits: Vec<u64>) -> bool {
        self.inner.keeps_order(rows, &splits)
    }

    #[expect(clippy::too_many_arguments, reason = "addresses by name")]
    fn multiply(
        &self,
        py: Python<'_>,
        x: u64,
        rows: u64,
        pitch: u64,
        outputs: Vec<(u64, u64, u64, u64)>,
        workspace: u64,
        stream: usize,
    ) -> PyResult<()> {
        let output = |&(pointer, pitch, bias, splits): &(u64, u64, u64, u64)| {
            LinearOutput::new(pointer, pitch).bias(bias).splits(splits)
        };
        let outputs: Vec<LinearOutput> = outputs.iter().map(output).collect();
        let x = LinearInput::new(x, rows, pitch);
        self.gpu.raise_told(py)?;
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.gpu.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.multiply(x, &outputs, workspace, &on.stream, on.status) }.or_raise(py)
    }
}

/// Products with equal parts of the rows of a matrix, as a router says on the device.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Grouped {
    gpu: Arc<Gpu>,
    inner: GroupedLinear,
}

#[pymethods]
impl Grouped {
    #[new]
    fn new(py: Python<'_>, matrix: PyRef<'_, Matrix>, experts: u64) -> PyResult<Self> {
        let matrices = [matrix];
        let gpu = Matrix::gpu_of(&matrices).or_raise(py)?;
        let _visit = Visit::new();
        let window = matrices[0].window();
        let inner = window.and_then(|window| GroupedLinear::of_parts(&window, experts));
        Ok(Self { gpu: Arc::clone(gpu), inner: inner.or_raise(py)? })
    }

    #[getter]
    fn keeps_order(&self) -> bool {
        self.inner.keeps_order()
    }

    fn block_places(&self, slots: u64) -> u64 {
        self.inner.block_places(slots)
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
        unsafe { self.run(py, x, routing, y, stream) }
    }

    #[expect(clippy::too_many_arguments, reason = "addresses by name")]
    fn multiply_slots(
        &self,
        py: Python<'_>,
        x: u64,
        x_rows: u64,
        experts: u64,
        slots: u64,
        blocks: Option<(u64, u64, u64, u64)>,
        factors: u64,
        y: u64,
        stream: usize,
    ) -> PyResult<()> {
        let share = slots.checked_div(x_rows).unwrap_or(0);
        let mut routing = Routing::slots(experts, slots, share).factors(factors);
        if let Some((each, indices, places, end)) = blocks {
            routing = routing.in_blocks(each, indices, places, end);
        }
        let (rows, columns) = self.inner.shape();
        let (x, y) = (LinearInput::new(x, x_rows, columns), LinearOutput::new(y, rows));
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        unsafe { self.run(py, x, routing, y, stream) }
    }
}

impl Grouped {
    /// # Safety
    /// As `GroupedLinear::multiply`; the stream is one of the GPU's.
    unsafe fn run(
        &self,
        py: Python<'_>,
        x: LinearInput,
        routing: Routing,
        y: LinearOutput,
        stream: usize,
    ) -> PyResult<()> {
        self.gpu.raise_told(py)?;
        // SAFETY: the caller's promise.
        let on = unsafe { self.gpu.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.multiply(x, routing, y, &on.stream, on.status) }.or_raise(py)
    }
}

/// BF16 weights on a GPU to the fast layout.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Packer {
    gpu: Arc<Gpu>,
    inner: OnGpu<FastPacker>,
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
        let gpu = Gpu::kept(device).or_raise(py)?;
        // SAFETY: the class's contract, which python/df11/_native.pyi states.
        let on = unsafe { gpu.on(stream) };
        // SAFETY: as above.
        let inner = unsafe { FastPacker::new(&gpu.device, (rows, columns), strips, &on.stream) };
        drop(on);
        Ok(Self { inner: OnGpu::new(inner.or_raise(py)?), gpu })
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
        let on = unsafe { self.gpu.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.pack(rows, weights, &on.stream) }.or_raise(py)
    }

    fn finish(&self, py: Python<'_>, stream: usize) -> PyResult<Option<u64>> {
        py.detach(|| {
            // SAFETY: the method's contract, which python/df11/_native.pyi states.
            let on = unsafe { self.gpu.on(stream) };
            self.inner.exceptions(&on.stream)
        })
        .or_raise(py)
    }

    fn take(&self, py: Python<'_>, entries: u64, stream: usize) -> PyResult<()> {
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.gpu.on(stream) };
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

/// Rows and columns of a tensor, and the address and length of each array of their tiles.
type Cut = (String, (u64, u64), (u64, u64), [(u64, u64); 4]);

/// Copies arrays of rows and columns of tensors to addresses on a GPU.
#[pyfunction]
#[pyo3(signature = (model, device, items, progress=None))]
pub(crate) fn upload(
    py: Python<'_>,
    model: &Bound<'_, Model>,
    device: usize,
    items: Vec<Cut>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let model = &model.get().inner;
    let cuts = items.iter().map(|&(ref name, (top, bottom), (left, right), to)| CutArrays {
        name,
        rows: top..bottom,
        columns: left..right,
        to,
    });
    let cuts: Vec<CutArrays<'_>> = cuts.collect();
    work::watched(py, progress, |observer| {
        let gpu = Gpu::kept(device)?;
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        unsafe { model.upload_arrays(&gpu.device, &cuts, observer) }
    })
}

/// Builds decode tables of matrices of a kind on a GPU.
#[pyfunction]
#[pyo3(signature = (device, items, kind=0))]
pub(crate) fn build_tables(
    py: Python<'_>,
    device: usize,
    items: Vec<(u64, u64, u64)>,
    kind: u64,
) -> PyResult<()> {
    let table = |&(codebook, codebook_bytes, table): &(u64, u64, u64)| TableAddresses {
        codebook,
        codebook_bytes,
        table,
    };
    let tables: Vec<TableAddresses> = items.iter().map(table).collect();
    let build = || {
        let split = matrix::split_of(kind).ok_or_else(|| {
            Error::parameter(format!("there is no kind {kind}"), "pass that of the part")
        })?;
        let gpu = Gpu::kept(device)?;
        let _visit = Visit::new();
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        unsafe { gpu.device.build_tables(split, &tables) }
    };
    py.detach(build).or_raise(py)
}

/// Memory of the host that is pinned until this is dropped.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct PinnedMemory {
    _range: OnGpu<PinnedRange>,
}

/// Pins memory of the host.
#[pyfunction]
pub(crate) fn pin(py: Python<'_>, address: usize, bytes: usize) -> PyResult<PinnedMemory> {
    let pin = || {
        let gpu = Gpu::kept(0)?;
        let _visit = Visit::new();
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        unsafe { gpu.device.pin(address as *mut c_void, bytes) }
    };
    Ok(PinnedMemory { _range: OnGpu::new(py.detach(pin).or_raise(py)?) })
}

/// The number of the capture that takes what is put on a stream; 0 if there is none.
#[pyfunction]
pub(crate) fn capture_id(py: Python<'_>, stream: usize) -> PyResult<u64> {
    // SAFETY: the function's contract, which python/df11/_native.pyi states.
    let capture = unsafe { df11::hazmat::gpu::capture_of_raw(stream as CUstream) };
    Ok(capture.or_raise(py)?.unwrap_or(0))
}

/// Checks that no kernel met a contradiction.
#[pyfunction]
pub(crate) fn check(py: Python<'_>, device: usize, stream: usize) -> PyResult<()> {
    let check = || {
        let gpu = Gpu::kept(device)?;
        // SAFETY: the function's contract, which python/df11/_native.pyi states.
        let on = unsafe { gpu.on(stream) };
        on.status.read(&on.stream)?;
        Ok(gpu)
    };
    py.detach(check).or_raise(py)?.raise_told(py)
}

/// Like `check`, for work that has ended by now; on all open GPUs unless one is named.
#[pyfunction]
#[pyo3(signature = (device=None))]
pub(crate) fn check_done(py: Python<'_>, device: Option<usize>) -> PyResult<()> {
    let mut gpus = Gpu::all_kept().into_iter();
    gpus.try_for_each(|gpu| {
        if device.is_none_or(|device| device == gpu.ordinal()) {
            gpu.raise_told(py)
        } else {
            Ok(())
        }
    })
}

/// Whether a GPU has the kernels that multiply.
#[pyfunction]
pub(crate) fn fits(py: Python<'_>, device: usize) -> PyResult<bool> {
    match py.detach(|| Gpu::kept(device)) {
        Ok(_) => Ok(true),
        Err(Error::Gpu { .. }) => Ok(false),
        Err(error) => Err(error).or_raise(py),
    }
}
