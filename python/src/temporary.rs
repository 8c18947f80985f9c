//! Temporary folders that the next run removes if this one is killed.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::{mem, process};

use df11::hazmat;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::work::OrRaise;

/// A folder that exists within `with`.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct TemporaryFolder {
    path: PathBuf,
    held: Mutex<Option<hazmat::TemporaryFolder>>,
    process: u32,
}

#[pymethods]
impl TemporaryFolder {
    #[new]
    fn new(py: Python<'_>, parent: PathBuf) -> PyResult<Self> {
        let folder = py.detach(|| {
            // A parent that cannot be listed may be one that can be written.
            let _ = hazmat::remove_leftovers(&parent);
            hazmat::TemporaryFolder::new_in(&parent)
        });
        let folder = folder.or_raise(py)?;
        let (path, held) = (folder.path().to_owned(), Mutex::new(Some(folder)));
        Ok(Self { path, held, process: process::id() })
    }

    fn __enter__(&self) -> PathBuf {
        self.path.clone()
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: Bound<'_, PyTuple>) {
        py.detach(|| self.remove());
    }
}

impl TemporaryFolder {
    /// It is its maker's: a process that was forked leaves it.
    fn remove(&self) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.process == process::id() {
            drop(held);
        } else {
            mem::forget(held);
        }
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        self.remove();
    }
}
