//! Temporary folders that the next run removes if this one is killed.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use df11::hazmat;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::work::OrRaise;

/// A folder that exists within `with`.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct TemporaryFolder {
    path: PathBuf,
    held: Mutex<Option<hazmat::TemporaryFolder>>,
}

#[pymethods]
impl TemporaryFolder {
    #[new]
    fn new(py: Python<'_>, parent: PathBuf) -> PyResult<Self> {
        let folder = py.detach(|| hazmat::TemporaryFolder::new_in(&parent)).or_raise(py)?;
        Ok(Self { path: folder.path().to_owned(), held: Mutex::new(Some(folder)) })
    }

    fn __enter__(&self) -> PathBuf {
        self.path.clone()
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: Bound<'_, PyTuple>) {
        py.detach(|| drop(self.held.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}
