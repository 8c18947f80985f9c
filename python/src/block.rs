//! Blocks.

use std::sync::Arc;

use df11::BlockLayout;
use pyo3::{prelude::*, types::PyDict};

use crate::{error::OrRaise, memory::Output, tensor::Tensor, work};

/// The tensors that a model uses together.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Block {
    model: Arc<df11::Model>,
    #[pyo3(get)]
    name: String,
}

impl Block {
    pub(crate) fn new(model: &Arc<df11::Model>, block: &df11::Block<'_>) -> Self {
        Self { model: Arc::clone(model), name: block.name().to_owned() }
    }

    fn view(&self) -> df11::Block<'_> {
        self.model.block(&self.name).expect("a block of the model")
    }
}

#[pymethods]
impl Block {
    #[getter]
    fn tensors(&self) -> Vec<Tensor> {
        self.view().tensors().map(|tensor| Tensor::new(&self.model, &tensor)).collect()
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.view().layout().or_raise(py)?.bytes)
    }

    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.view().stored_bytes()
    }

    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let layout = self.view().layout().or_raise(py)?;
        ranges(py, self.view().tensors().map(|tensor| tensor.name()), &layout)
    }

    fn decode_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut output = Output::new(buffer, self.nbytes(py)?)?;
        let bytes = output.bytes();
        work::briefly(py, || self.view().decode_into(bytes))
    }

    fn __repr__(&self) -> String {
        format!("<df11.Block {:?} of {} tensors>", self.name, self.view().tensors().len())
    }
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
