//! The native module of the Python package `df11`: the library's API, as thin as it can be.
//!
//! Long work runs without the interpreter's lock, and ends on Ctrl-C ([`work`]). What is easier said in Python (exceptions, progress
//! bars, arrays) is said there, in `python/df11`, and called from here.

mod block;
mod dlpack;
mod error;
mod memory;
mod model;
mod tensor;
mod work;
mod write;

use pyo3::prelude::*;

/// Opened, decoded and written by Rust.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        block::Block,
        model::{Model, open, verify},
        tensor::{Rows, Tensor},
        write::{compress, convert, decompress, estimate},
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
