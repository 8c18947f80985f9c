//! Memory of Python objects that decoding writes.
#![expect(unsafe_code, reason = "memory that the buffer protocol lends")]

use df11::Error;
use pyo3::{intern, prelude::*};

use crate::error::OrRaise;

/// A writable buffer of the caller.
pub(crate) struct Output<'py> {
    address: usize,
    length: usize,
    /// The buffer is not moved or freed while this lives.
    _owner: Bound<'py, PyAny>,
}

impl<'py> Output<'py> {
    /// Of exactly this many bytes.
    pub(crate) fn new(buffer: &Bound<'py, PyAny>, expected: u64) -> PyResult<Self> {
        let py = buffer.py();
        let helper = py.import(intern!(py, "df11._memory"))?;
        let (address, length, owner): (usize, usize, Bound<'py, PyAny>) =
            helper.call_method1(intern!(py, "writable"), (buffer,))?.extract()?;
        if length as u64 == expected {
            return Ok(Self { address, length, _owner: owner });
        }
        let problem = format!("the buffer has {length} bytes, and {expected} are decoded");
        Err(Error::parameter(problem, "pass a buffer of exactly that many")).or_raise(py)
    }

    /// Its bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        if self.length == 0 {
            return &mut [];
        }
        // SAFETY: `df11/_memory.py` got address and length from the buffer protocol, by which
        // `_owner` holds a writable, contiguous export: the memory stays while it is held. It was
        // initialised by its owner. That nothing else reads or writes it while it is decoded to is
        // the contract of every method that takes a buffer and releases the interpreter's lock, as
        // of `readinto`.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.length) }
    }
}
