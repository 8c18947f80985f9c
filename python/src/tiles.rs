//! Tensors in tiles as arrays that other libraries hold: what the container has of one.

use std::{borrow::Cow, sync::Arc};

use df11::hazmat::tile::{Arrays, Codebook, PairHistogram};
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
        let helper = py.import(intern!(py, "df11._arrays"))?;
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
