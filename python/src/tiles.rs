//! Tensors in tiles as arrays that other libraries hold: what the container has of one, and
//! matrices in anyone's memory.
#![expect(unsafe_code, reason = "memory of other libraries")]

use std::{borrow::Cow, ops::Range, sync::Arc};

use df11::{
    Error,
    hazmat::tile::{Arrays, Codebook, PairHistogram},
};
use pyo3::{
    exceptions::PyIndexError,
    intern,
    prelude::*,
    types::{PyByteArray, PyTuple},
};

use crate::work;

/// A BF16 matrix of a container in tiles of 32 x 256.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Tiles {
    model: Arc<df11::Model>,
    name: String,
    #[pyo3(get)]
    rows: u64,
    #[pyo3(get)]
    columns: u64,
    #[pyo3(get)]
    staged_bytes: u32,
}

/// An array of it, where it lies: what keeps its bytes in place.
#[pyclass(frozen, module = "df11._native")]
struct Held {
    /// If the container is not mapped.
    copy: Option<Vec<u8>>,
    _model: Arc<df11::Model>,
}

impl Tiles {
    /// None if the tensor is no such matrix.
    pub(crate) fn new(
        model: &Arc<df11::Model>,
        tensor: &df11::Tensor<'_>,
    ) -> df11::Result<Option<Self>> {
        let Some(tiles) = df11::hazmat::Tiles::of(tensor)? else { return Ok(None) };
        let (rows, columns) = tiles.shape();
        let (model, name) = (Arc::clone(model), tensor.name().to_owned());
        Ok(Some(Self { model, name, rows, columns, staged_bytes: tiles.staged_bytes()? }))
    }

    fn tiles(&self) -> df11::hazmat::Tiles<'_> {
        let tensor = self.model.tensor(&self.name).expect("a tensor of the model");
        let tiles = df11::hazmat::Tiles::of(&tensor).expect("its record was read before");
        tiles.expect("it was such a matrix before")
    }
}

#[pymethods]
impl Tiles {
    #[getter]
    fn lengths(&self) -> (u64, u64, u64, u64) {
        self.tiles().array_lengths().into()
    }

    #[getter]
    fn places(&self) -> Option<[(usize, usize); 4]> {
        Some(self.tiles().views()?.map(|view| (view.as_ptr() as usize, view.len())))
    }

    fn array<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        if index >= 4 {
            return Err(PyIndexError::new_err(format!("array {index} of 4")));
        }
        let (address, length, copy) = work::briefly(py, || {
            Ok(match self.tiles().array(index)? {
                Cow::Borrowed(view) => (view.as_ptr() as usize, view.len(), None),
                Cow::Owned(copy) => (copy.as_ptr() as usize, copy.len(), Some(copy)),
            })
        })?;
        let owner = Py::new(py, Held { copy, _model: Arc::clone(&self.model) })?;
        debug_assert!(
            owner.get().copy.as_ref().is_none_or(|copy| copy.as_ptr() as usize == address)
        );
        let helper = py.import(intern!(py, "df11._memory"))?;
        helper.call_method1(intern!(py, "readable"), (address, length, owner))
    }

    fn cut<'py>(
        &self,
        py: Python<'py>,
        rows: (u64, u64),
        columns: (u64, u64),
    ) -> PyResult<(u32, Bound<'py, PyTuple>)> {
        let (staged, arrays) = work::briefly(py, || {
            let arrays = self.tiles().cut(rows.0..rows.1, columns.0..columns.1)?;
            let view = arrays.each_ref().map(Vec::as_slice);
            let cut = Arrays::new(rows.1 - rows.0, columns.1 - columns.0, view)?;
            Ok((cut.staged_bytes(), arrays))
        })?;
        Ok((staged, PyTuple::new(py, arrays.iter().map(|array| PyByteArray::new(py, array)))?))
    }

    fn __repr__(&self) -> String {
        format!("<df11.Tiles of {:?}, {} x {}>", self.name, self.rows, self.columns)
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

/// A piece in one of two forms, and a window of it: eight numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) is_fast: bool,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    pub(crate) staged_bytes: u32,
    pub(crate) row_range: Range<u64>,
    pub(crate) column_range: Range<u64>,
}

impl Part {
    pub(crate) fn new(numbers: &[u64]) -> df11::Result<Self> {
        let refuse = |problem: String| {
            Err(Error::parameter(problem, "pass eight numbers that fit each other"))
        };
        let &[form, rows, columns, staged, r0, r1, c0, c1] = numbers else {
            return refuse(format!("{} numbers of a part", numbers.len()));
        };
        let Ok(staged_bytes) = u32::try_from(staged) else {
            return refuse(format!("{staged} staged bytes"));
        };
        if form > 1 || r0 >= r1 || r1 > rows || c0 >= c1 || c1 > columns {
            return refuse(format!("{r0}..{r1} x {c0}..{c1} of {rows} x {columns} in form {form}"));
        }
        Ok(Self {
            is_fast: form == 1,
            rows,
            columns,
            staged_bytes,
            row_range: r0..r1,
            column_range: c0..c1,
        })
    }

    pub(crate) fn row_count(&self) -> u64 {
        self.row_range.end - self.row_range.start
    }

    pub(crate) fn column_count(&self) -> u64 {
        self.column_range.end - self.column_range.start
    }
}

/// Arrays of a part in the memory of the process.
pub(crate) struct HostMatrix {
    part: Part,
    arrays: [(usize, usize); 4],
}

impl HostMatrix {
    pub(crate) fn new(part: Part, pointers: &[u64], lengths: &[u64]) -> df11::Result<Self> {
        if part.is_fast || pointers.len() < 4 || lengths.len() != pointers.len() {
            let problem = "on the CPU a matrix is in tiles as stored, of four arrays";
            return Err(Error::parameter(problem, "keep it stored, or load it onto a GPU"));
        }
        let arrays = [0, 1, 2, 3].map(|at| (pointers[at] as usize, lengths[at] as usize));
        let matrix = Self { part, arrays };
        matrix.arrays()?;
        Ok(matrix)
    }

    pub(crate) fn part(&self) -> &Part {
        &self.part
    }

    fn arrays(&self) -> df11::Result<Arrays<'_>> {
        let view = |(address, length): (usize, usize)| {
            // SAFETY: the contract of `Matrix` in `_native.pyi`: the caller's arrays lie there,
            // with these lengths, and live during each call. Bytes may be anything.
            unsafe { std::slice::from_raw_parts(address as *const u8, length) }
        };
        Arrays::new(self.part.rows, self.part.columns, self.arrays.map(view))
    }

    /// # Safety
    /// `output` has two bytes for each weight of the part, which nobody else uses meanwhile.
    pub(crate) unsafe fn decode(&self, output: u64) -> df11::Result<()> {
        let bytes = 2 * self.part.row_count() * self.part.column_count();
        // SAFETY: the caller's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(output as *mut u8, bytes as usize) };
        self.arrays()?.decode(self.part.row_range.clone(), self.part.column_range.clone(), out)
    }

    /// # Safety
    /// As [`decode`](Self::decode), with a row for each index.
    pub(crate) unsafe fn gather(&self, indices: &[u64], output: u64) -> df11::Result<()> {
        let (arrays, columns) = (self.arrays()?, self.part.column_range.clone());
        let bytes = 2 * self.part.column_count() as usize;
        // SAFETY: the caller's promise.
        let out =
            unsafe { std::slice::from_raw_parts_mut(output as *mut u8, bytes * indices.len()) };
        let rows: Vec<u64> =
            indices.iter().map(|index| self.part.row_range.start + index).collect();
        arrays.gather(&rows, columns, out)
    }
}
