//! Open GPUs, and other libraries' streams on them.
#![expect(unsafe_code, reason = "streams of other libraries")]

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use df11::Error;
use df11::gpu::cudarc::driver::{CudaStream, sys::CUstream};
use df11::gpu::{Device, Status};
use df11::hazmat::gpu::Visit;
use pyo3::{exceptions::PyIndexError, prelude::*};

use crate::work::OrRaise;

/// A GPU, and the status that its kernels set.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    status: Status,
}

/// A stream of the caller, for as long as a call lasts, and the status of its device.
pub(crate) struct OnStream<'s> {
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) status: &'s Status,
    _visit: Visit,
}

/// GPUs that stay open: matrices of other libraries have no owner here.
static KEPT: Mutex<BTreeMap<usize, Arc<Gpu>>> = Mutex::new(BTreeMap::new());

impl Gpu {
    pub(crate) fn open(ordinal: usize) -> df11::Result<Self> {
        let device = Device::open(ordinal)?;
        Ok(Self { status: Status::new(&device)?, device })
    }

    /// Opens it the first time.
    pub(crate) fn kept(ordinal: usize) -> df11::Result<Arc<Self>> {
        let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = all.get(&ordinal) {
            return Ok(Arc::clone(gpu));
        }
        // Before the visit, which needs a driver.
        df11::gpu::devices()?;
        let _visit = Visit::new();
        let gpu = Arc::new(Self::open(ordinal)?);
        all.insert(ordinal, Arc::clone(&gpu));
        Ok(gpu)
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.device.info().ordinal
    }

    /// The open ones.
    pub(crate) fn all_kept() -> Vec<Arc<Self>> {
        let all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().map(Arc::clone).collect()
    }

    /// Raises the problems that finished kernels have reported. Does not wait.
    pub(crate) fn raise_told(&self, py: Python<'_>) -> PyResult<()> {
        raise_found(py, self.status.check_done())
    }

    /// Goes to a stream of the caller.
    ///
    /// # Safety
    /// The stream is one of the device's primary context (0 is its default stream), and lives as
    /// long as the result.
    pub(crate) unsafe fn on(&self, stream: usize) -> OnStream<'_> {
        let visit = Visit::new();
        // SAFETY: the caller's promise. Wrapping allocates some bytes and asks the driver nothing.
        let stream = unsafe { self.device.context().wrap_borrowed_stream(stream as CUstream) };
        OnStream { stream, status: &self.status, _visit: visit }
    }
}

/// The error for a status word, as the CPU would raise it.
pub(crate) fn raise_found(py: Python<'_>, found: df11::Result<()>) -> PyResult<()> {
    match found {
        Err(error @ Error::Parameter { .. }) => Err(PyIndexError::new_err(error.to_string())),
        other => other.or_raise(py),
    }
}

/// An object that GPUs use. Freeing it may wait for them, so it is freed without the interpreter's
/// lock.
pub(crate) struct OnGpu<T: Send>(Option<T>);

impl<T: Send> OnGpu<T> {
    pub(crate) const fn new(held: T) -> Self {
        Self(Some(held))
    }
}

impl<T: Send> Deref for OnGpu<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send> Drop for OnGpu<T> {
    fn drop(&mut self) {
        let mut free = || {
            let _visit = Visit::new();
            drop(self.0.take());
        };
        // If the interpreter is ending, there is no lock to release.
        if Python::try_attach(|py| py.detach(&mut free)).is_none() {
            free();
        }
    }
}
