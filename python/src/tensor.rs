//! Tensors, slices of them, and their arrays, which other libraries hold.

use std::{borrow::Cow, ops::Range, sync::Arc};

use df11::Dtype;
use df11::hazmat::{
    Shard,
    tile::{Arrays, Codebook, PairHistogram},
};
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::types::{PyByteArray, PyBytes, PyCapsule, PyMemoryView, PySlice, PyTuple};
use pyo3::{intern, prelude::*};

use crate::matrix;
use crate::memory::{self, Dense, Output};
use crate::work::{self, OrRaise};

/// A tensor of an open model.
#[pyclass(frozen, module = "df11", from_py_object)]
#[derive(Clone)]
pub(crate) struct Tensor {
    model: Arc<df11::Model>,
    #[pyo3(get)]
    name: String,
}

/// A slice of a tensor.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Slice {
    #[pyo3(get)]
    tensor: Tensor,
    /// Ranges of indices in the first dimensions.
    ranges: Vec<Range<u64>>,
    shape: Vec<u64>,
    #[pyo3(get, name = "nbytes")]
    bytes: u64,
}

/// Index of one dimension.
#[derive(FromPyObject)]
enum DimensionIndex<'py> {
    One(isize),
    Range(Bound<'py, PySlice>),
}

impl DimensionIndex<'_> {
    /// The indices, and whether the dimension stays.
    fn of(&self, size: u64) -> PyResult<(Range<u64>, bool)> {
        let length = isize::try_from(size)?;
        match self {
            Self::One(index) => {
                let at = if *index < 0 { index + length } else { *index };
                let Some(at) = u64::try_from(at).ok().filter(|&at| at < size) else {
                    return Err(PyIndexError::new_err(format!("index {index} of {size}")));
                };
                Ok((at..at + 1, false))
            }
            Self::Range(slice) => {
                let found = slice.indices(length)?;
                if found.step != 1 {
                    let remedy = "a slice of a tensor has steps of 1; decode it and index that";
                    return Err(PyTypeError::new_err(remedy));
                }
                let start = u64::try_from(found.start)?;
                Ok((start..start.max(u64::try_from(found.stop)?), true))
            }
        }
    }
}

impl Tensor {
    pub(crate) fn new(model: &Arc<df11::Model>, tensor: &df11::Tensor<'_>) -> Self {
        Self { model: Arc::clone(model), name: tensor.name().to_owned() }
    }

    fn view(&self) -> df11::Tensor<'_> {
        self.model.tensor(&self.name).expect("a tensor of the model")
    }

    fn slice(&self, ranges: Vec<Range<u64>>, shape: Vec<u64>) -> df11::Result<Slice> {
        let bytes = self.view().slice(&ranges)?.byte_length();
        Ok(Slice { tensor: self.clone(), ranges, shape, bytes })
    }

    /// All of the tensor, as a slice.
    fn whole(&self, py: Python<'_>) -> PyResult<Slice> {
        self.slice(Vec::new(), self.view().shape()).or_raise(py)
    }
}

impl Slice {
    fn decode(&self, bytes: &mut [u8]) -> df11::Result<()> {
        self.tensor.view().slice(&self.ranges)?.decode_into(bytes)
    }

    /// Decodes it into new memory.
    fn decode_new(&self) -> df11::Result<Dense> {
        let (tensor, shape) = (self.tensor.view(), &self.shape);
        tensor.check_known()?;
        let mut decoded = Dense::new(tensor.name(), tensor.dtype(), shape, self.bytes)?;
        self.decode(decoded.bytes())?;
        Ok(decoded)
    }
}

/// Makes an array of a tensor or a slice with `df11/_arrays.py`.
fn array<'py>(of: &Bound<'py, PyAny>, library: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = of.py();
    py.import(intern!(py, "df11._arrays"))?.call_method1(library, (of,))
}

/// Its values as an array of `numpy`, by the protocol of `__array__`.
fn values<'py>(
    of: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = of.py();
    py.import(intern!(py, "df11._arrays"))?.call_method1("values", (of, dtype, copy))
}

#[pymethods]
impl Tensor {
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
    fn tiles(&self, py: Python<'_>) -> PyResult<Option<Tiles>> {
        if self.model.shards().iter().any(Shard::is_coming) {
            return work::briefly(py, || Tiles::of(self));
        }
        // Here, without the pool: to wake it takes longer.
        py.detach(|| Tiles::of(self)).or_raise(py)
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
        self.whole(py)?.decode_into(py, buffer)
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

    fn rows(&self, py: Python<'_>, start: u64, stop: u64) -> PyResult<Slice> {
        let mut shape = self.view().shape();
        if let Some(first) = shape.first_mut() {
            *first = stop.saturating_sub(start);
        }
        self.slice(vec![start..stop], shape).or_raise(py)
    }

    fn __getitem__(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<Slice> {
        let indices = match index.cast::<PyTuple>() {
            Ok(tuple) => tuple.extract::<Vec<DimensionIndex<'_>>>()?,
            Err(_) => vec![index.extract()?],
        };
        let all = self.view().shape();
        if indices.len() > all.len() {
            let (given, has) = (indices.len(), all.len());
            return Err(PyIndexError::new_err(format!("{given} indices for {has} dimensions")));
        }
        let (mut ranges, mut shape) = (Vec::new(), Vec::new());
        for (index, &size) in indices.iter().zip(&all) {
            let (range, stays) = index.of(size)?;
            shape.extend(stays.then(|| range.end - range.start));
            ranges.push(range);
        }
        shape.extend(&all[indices.len()..]);
        self.slice(ranges, shape).or_raise(py)
    }

    fn numpy(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        array(slf.as_any(), "numpy")
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        values(slf.as_any(), dtype, copy)
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
        self.whole(py)?.__dlpack__(py, stream, max_version, dl_device, copy)
    }

    #[expect(clippy::unused_self, reason = "a method by protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        memory::CPU
    }

    fn __repr__(&self) -> String {
        let (shape, encoding) = (self.view().shape(), self.encoding());
        format!("<df11.Tensor {:?} {} {shape:?} {encoding}>", self.name, self.dtype())
    }
}

#[pymethods]
impl Slice {
    #[getter]
    fn ranges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.ranges.iter().map(|range| (range.start, range.end)))
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    fn decode_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut output = Output::new(buffer, self.bytes)?;
        let bytes = output.bytes();
        work::briefly(py, || self.decode(bytes))
    }

    fn numpy(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        array(slf.as_any(), "numpy")
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        values(slf.as_any(), dtype, copy)
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
        memory::check_device(py, dl_device)?;
        let decoded = work::briefly(py, || self.decode_new())?;
        decoded.capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    #[expect(clippy::unused_self, reason = "a method by protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        memory::CPU
    }

    fn __repr__(&self) -> String {
        let Self { tensor, ranges, shape, .. } = self;
        format!("<df11.Slice {ranges:?} of {:?}, {} {shape:?}>", tensor.name, tensor.dtype())
    }
}

/// A matrix of a container in tiles of 32 x 256.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Tiles {
    tensor: Tensor,
    #[pyo3(get)]
    rows: u64,
    #[pyo3(get)]
    columns: u64,
    #[pyo3(get)]
    staged_bytes: u32,
    /// The number of its kind (`matrix`).
    #[pyo3(get)]
    kind: u64,
}

impl Tiles {
    /// None if the tensor is no such matrix.
    fn of(tensor: &Tensor) -> df11::Result<Option<Self>> {
        let Some(tiles) = df11::hazmat::Tiles::of(&tensor.view())? else { return Ok(None) };
        let ((rows, columns), staged_bytes) = (tiles.shape(), tiles.staged_bytes()?);
        let Some(kind) = matrix::kind_of(tiles.split()) else { return Ok(None) };
        Ok(Some(Self { tensor: tensor.clone(), rows, columns, staged_bytes, kind }))
    }

    fn view(&self) -> df11::hazmat::Tiles<'_> {
        let tiles = df11::hazmat::Tiles::of(&self.tensor.view());
        tiles.expect("its record was read before").expect("it was such a matrix before")
    }
}

#[pymethods]
impl Tiles {
    #[getter]
    fn lengths(&self) -> (u64, u64, u64, u64) {
        self.view().array_lengths().into()
    }

    #[getter]
    fn places(&self) -> Option<[(usize, usize); 4]> {
        self.view().places()
    }

    fn array<'py>(slf: &Bound<'py, Self>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        if index >= 4 {
            return Err(PyIndexError::new_err(format!("array {index} of 4")));
        }
        let (py, tiles) = (slf.py(), slf.get());
        match work::briefly(py, || tiles.view().array(index))? {
            // The tiles keep the mapping.
            Cow::Borrowed(view) => py
                .import(intern!(py, "df11._arrays"))?
                .call_method1(intern!(py, "readable"), (view.as_ptr() as usize, view.len(), slf)),
            Cow::Owned(copy) => {
                Ok(PyMemoryView::from(PyBytes::new(py, &copy).as_any())?.into_any())
            }
        }
    }

    fn cut<'py>(
        &self,
        py: Python<'py>,
        rows: (u64, u64),
        columns: (u64, u64),
    ) -> PyResult<(u32, Bound<'py, PyTuple>)> {
        let (staged, arrays) = work::briefly(py, || {
            let arrays = self.view().cut(rows.0..rows.1, columns.0..columns.1)?;
            let view = arrays.each_ref().map(Vec::as_slice);
            let split = self.view().split();
            let cut = Arrays::new(rows.1 - rows.0, columns.1 - columns.0, split, view)?;
            Ok((cut.staged_bytes(), arrays))
        })?;
        Ok((staged, PyTuple::new(py, arrays.iter().map(|array| PyByteArray::new(py, array)))?))
    }

    fn cut_lengths(
        &self,
        py: Python<'_>,
        rows: (u64, u64),
        columns: (u64, u64),
    ) -> PyResult<(u64, u64, u64, u64)> {
        let lengths = || self.view().cut_lengths(rows.0..rows.1, columns.0..columns.1);
        work::briefly(py, lengths).map(Into::into)
    }

    fn __repr__(&self) -> String {
        format!("<df11.Tiles of {:?}, {} x {}>", self.tensor.name, self.rows, self.columns)
    }
}

/// Codebook and entries of a matrix with these counts of its pairs of exponents; None if codes make
/// it no smaller.
#[pyfunction]
pub(crate) fn code_of<'py>(
    py: Python<'py>,
    counts: &[u8],
) -> PyResult<Option<(Bound<'py, PyByteArray>, Bound<'py, PyByteArray>)>> {
    let found = work::briefly(py, || {
        let (counts, _) = counts.as_chunks();
        let counts: Vec<u64> = counts.iter().map(|&count| u64::from_le_bytes(count)).collect();
        let weights = 2 * counts.iter().sum::<u64>();
        let histogram = PairHistogram::from_counts(counts)?;
        let codebook = Codebook::from_histogram(&histogram)?;
        let is_smaller = codebook.expected_bits(&histogram).is_some_and(|bits| bits < 8 * weights);
        let entries =
            || codebook.entries().into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>();
        Ok(is_smaller.then(|| (codebook.to_bytes(), entries())))
    })?;
    Ok(found.map(|(book, entries)| (PyByteArray::new(py, &book), PyByteArray::new(py, &entries))))
}
