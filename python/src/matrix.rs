//! Matrices in memory of other libraries, on the CPU and on GPUs.
#![expect(unsafe_code, reason = "memory and streams of other libraries")]

use df11::gpu::Indices;
use pyo3::{exceptions::PyIndexError, prelude::*};

use crate::{
    error::OrRaise,
    raw::DeviceMatrix,
    tiles::{HostMatrix, Part},
    work,
};

/// A matrix that the caller holds. Owns nothing.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Matrix {
    inner: Inner,
}

enum Inner {
    Host(HostMatrix),
    Device(DeviceMatrix),
}

#[pymethods]
impl Matrix {
    #[new]
    fn new(
        py: Python<'_>,
        device: Option<usize>,
        part: Vec<u64>,
        pointers: Vec<u64>,
        lengths: Vec<u64>,
    ) -> PyResult<Self> {
        let part = Part::new(&part).or_raise(py)?;
        let inner = match device {
            None => Inner::Host(HostMatrix::new(part, &pointers, &lengths).or_raise(py)?),
            Some(ordinal) => {
                Inner::Device(DeviceMatrix::new(ordinal, part, &pointers, &lengths).or_raise(py)?)
            }
        };
        Ok(Self { inner })
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.part().row_count()
    }

    #[getter]
    fn columns(&self) -> u64 {
        self.part().column_count()
    }

    #[pyo3(signature = (output, stream=0))]
    fn decode(&self, py: Python<'_>, output: u64, stream: usize) -> PyResult<()> {
        match &self.inner {
            // SAFETY: the method's contract, which python/df11/_native.pyi states.
            Inner::Host(matrix) => work::briefly(py, || unsafe { matrix.decode(output) }),
            // SAFETY: the same.
            Inner::Device(matrix) => unsafe { matrix.decode(output, stream) }.or_raise(py),
        }
    }

    #[pyo3(signature = (indices, count, wide, output, stream=0))]
    fn gather(
        &self,
        py: Python<'_>,
        indices: u64,
        count: usize,
        wide: bool,
        output: u64,
        stream: usize,
    ) -> PyResult<()> {
        match &self.inner {
            Inner::Host(matrix) => {
                // SAFETY: the method's contract: as many indices lie there.
                let all = unsafe { host_indices(indices, count, wide) };
                let rows = self.part().row_count();
                if let Some(index) = all.iter().find(|&&index| index >= rows) {
                    return Err(PyIndexError::new_err(format!(
                        "row {} of {rows}",
                        index.cast_signed()
                    )));
                }
                // SAFETY: the method's contract.
                work::briefly(py, || unsafe { matrix.gather(&all, output) })
            }
            Inner::Device(matrix) => {
                let indices = if wide { Indices::I64(indices) } else { Indices::U32(indices) };
                // SAFETY: the method's contract.
                unsafe { matrix.gather(indices, count as u64, output, stream) }.or_raise(py)
            }
        }
    }
}

impl Matrix {
    fn part(&self) -> &Part {
        match &self.inner {
            Inner::Host(matrix) => matrix.part(),
            Inner::Device(matrix) => matrix.part(),
        }
    }

    /// If it lies on a GPU.
    pub(crate) fn on_gpu(&self) -> Option<&DeviceMatrix> {
        match &self.inner {
            Inner::Host(_) => None,
            Inner::Device(matrix) => Some(matrix),
        }
    }
}

/// Indices, of which negative ones come out as large numbers.
///
/// # Safety
/// As many lie there, of 64 bits each if `wide`, else of 32.
unsafe fn host_indices(address: u64, count: usize, wide: bool) -> Vec<u64> {
    if count == 0 {
        return Vec::new();
    }
    if wide {
        // SAFETY: the caller's promise.
        return unsafe { std::slice::from_raw_parts(address as *const u64, count) }.to_vec();
    }
    // SAFETY: the caller's promise.
    let narrow = unsafe { std::slice::from_raw_parts(address as *const u32, count) };
    narrow.iter().map(|&index| index.into()).collect()
}
