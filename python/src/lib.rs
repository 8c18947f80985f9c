//! The native module of the Python package `df11`: a thin layer over the library's API.
//!
//! Long work runs without the interpreter's lock, and ends on Ctrl-C (`work`). Parts that are
//! easier to write in Python (exceptions, progress bars, arrays) are in `python/df11`, and called
//! from here.

#![allow(clippy::needless_pass_by_value, reason = "what comes from Python comes by value")]

mod context;
mod gpu;
mod matrix;
mod memory;
mod model;
mod placement;
mod raw;
mod temporary;
mod tensor;
mod work;
mod write;

use pyo3::prelude::*;

/// Opened, decoded and written by Rust.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        gpu::{DeviceBlock, DeviceModel, Program, devices},
        matrix::{Experts, Matrix, decode_all},
        model::{Block, Model, ReadAhead, fetch_side_files, open, plan},
        raw::{
            Grouped, Linear, Packer, PinnedMemory, build_tables, capture_id, check, check_done,
            fits, pin, strips_bytes, upload,
        },
        temporary::TemporaryFolder,
        tensor::{Slice, Tensor, Tiles, code_of},
        write::{compress, convert, decompress, estimate, install, tensor_hashes, verify},
    };
    use std::{ffi::OsString, path::PathBuf};

    use pyo3::{prelude::*, types::PyTuple};

    /// Runs the command `df11` with these arguments, of which the first is its name; its exit code.
    #[pyfunction]
    fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
        py.detach(|| df11::cli::run(arguments))
    }

    /// What `df11 inspect --json` says of a model, whose weights it does not read.
    #[pyfunction]
    fn describe(
        py: Python<'_>,
        model: &Bound<'_, Model>,
        source: PathBuf,
        tensors: bool,
    ) -> PyResult<String> {
        let model = &model.get().inner;
        crate::work::briefly(py, || df11::cli::describe(model, &source, tensors))
    }

    /// Text in which every character shows.
    #[pyfunction]
    fn printable(text: &str) -> String {
        df11::hazmat::printable(text)
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        df11::hazmat::end_waits_when(crate::work::is_stopped);
        module.add("KINDS", PyTuple::new(module.py(), crate::matrix::dtypes())?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
