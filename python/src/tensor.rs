//! Tensors, and rows of them.

use std::{ops::Range, sync::Arc};

use df11::Dtype;
use pyo3::{
    IntoPyObjectExt, intern,
    prelude::*,
    types::{PyCapsule, PyTuple},
};

use crate::{dlpack, error::OrRaise, memory::Output, work};

/// A tensor of an open model.
#[pyclass(frozen, module = "df11", from_py_object)]
#[derive(Clone)]
pub(crate) struct Tensor {
    model: Arc<df11::Model>,
    name: String,
}

/// Rows of a tensor.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Rows {
    tensor: Tensor,
    range: Range<u64>,
    shape: Vec<u64>,
    bytes: u64,
}

impl Tensor {
    pub(crate) fn new(model: &Arc<df11::Model>, tensor: &df11::Tensor<'_>) -> Self {
        Self { model: Arc::clone(model), name: tensor.name().to_owned() }
    }

    fn view(&self) -> df11::Tensor<'_> {
        self.model.tensor(&self.name).expect("a tensor of the model")
    }

    /// Decodes on the CPU, all or some rows.
    fn decode(&self, rows: Option<Range<u64>>, bytes: &mut [u8]) -> df11::Result<()> {
        match rows {
            None => self.view().decode_bytes_into(bytes),
            Some(rows) => self.view().decode_row_bytes(rows, bytes),
        }
    }

    fn capsule<'py>(
        &self,
        py: Python<'py>,
        rows: Option<Range<u64>>,
        shape: &[u64],
        bytes: u64,
        versioned: bool,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let decoded = work::briefly(py, || {
            self.view().check_known()?;
            let mut decoded = dlpack::Decoded::new(&self.name, self.view().dtype(), shape, bytes)?;
            self.decode(rows, decoded.bytes())?;
            Ok(decoded)
        })?;
        decoded.capsule(py, versioned)
    }
}

/// Whether a caller of `__dlpack__` knows DLPack 1.
fn is_versioned(max_version: Option<(u32, u32)>) -> bool {
    max_version.is_some_and(|(major, _)| major >= 1)
}

/// What `df11/_arrays.py` makes of a tensor or its rows.
fn array<'py>(of: &Bound<'py, PyAny>, library: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = of.py();
    py.import(intern!(py, "df11._arrays"))?.call_method1(library, (of,))
}

#[pymethods]
impl Tensor {
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn block(&self) -> &str {
        self.view().block_name()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.view().dtype().map_or("unknown", Dtype::name)
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.view().shape())
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.view().byte_length().or_raise(py)
    }

    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.view().stored_bytes()
    }

    #[getter]
    fn bits_per_element(&self) -> f64 {
        self.view().bits_per_element()
    }

    #[getter]
    fn encoding(&self) -> &'static str {
        self.view().target().encoding().name()
    }

    #[getter]
    fn target(&self) -> &str {
        self.view().target().name()
    }

    #[getter]
    fn hash(&self) -> String {
        self.view().hash().to_string()
    }

    fn decode_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut output = Output::new(buffer, self.nbytes(py)?)?;
        let bytes = output.bytes();
        work::briefly(py, || self.decode(None, bytes))
    }

    fn decode_rows_into(
        &self,
        py: Python<'_>,
        start: u64,
        stop: u64,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.rows(py, start, stop)?.decode_into(py, buffer)
    }

    fn rows(&self, py: Python<'_>, start: u64, stop: u64) -> PyResult<Rows> {
        let rows = start..stop;
        let range = self.view().row_bytes(rows.clone()).or_raise(py)?;
        let mut shape = self.view().shape();
        if let Some(first) = shape.first_mut() {
            *first = stop - start;
        }
        Ok(Rows { tensor: self.clone(), range: rows, shape, bytes: range.end - range.start })
    }

    fn numpy(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        array(slf.as_any(), "numpy")
    }

    fn torch(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        array(slf.as_any(), "torch")
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // Nobody else has what is decoded for the caller, and it is there when the call returns.
        let _ = (stream, copy);
        dlpack::check_device(py, dl_device)?;
        self.capsule(py, None, &self.view().shape(), self.nbytes(py)?, is_versioned(max_version))
    }

    #[expect(clippy::unused_self, reason = "a method by protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    fn __repr__(&self) -> String {
        let (shape, encoding) = (self.view().shape(), self.encoding());
        format!("<df11.Tensor {:?} {} {shape:?} {encoding}>", self.name, self.dtype())
    }
}

#[pymethods]
impl Rows {
    #[getter]
    fn tensor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.tensor.clone().into_bound_py_any(py)
    }

    #[getter]
    fn start(&self) -> u64 {
        self.range.start
    }

    #[getter]
    fn stop(&self) -> u64 {
        self.range.end
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    fn decode_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut output = Output::new(buffer, self.bytes)?;
        let bytes = output.bytes();
        work::briefly(py, || self.tensor.decode(Some(self.range.clone()), bytes))
    }

    fn numpy(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        array(slf.as_any(), "numpy")
    }

    fn torch(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        array(slf.as_any(), "torch")
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _ = (stream, copy);
        dlpack::check_device(py, dl_device)?;
        let rows = Some(self.range.clone());
        self.tensor.capsule(py, rows, &self.shape, self.bytes, is_versioned(max_version))
    }

    #[expect(clippy::unused_self, reason = "a method by protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    fn __repr__(&self) -> String {
        let Range { start, end } = self.range;
        format!("<df11.Rows {start}..{end} of {:?}, {} {:?}>", self.tensor.name, self.dtype(), self.shape)
    }
}
