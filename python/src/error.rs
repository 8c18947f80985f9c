//! The library's errors as the exceptions of `df11/_errors.py`.

use df11::Error;
use pyo3::{exceptions::PyKeyboardInterrupt, intern, prelude::*};

/// Results of the library, on their way to Python.
pub(crate) trait OrRaise<T> {
    /// The exception that says the same.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for df11::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}

/// Who is at fault decides the class.
fn raise(py: Python<'_>, error: &Error) -> PyErr {
    if matches!(error, Error::Cancelled) {
        return PyKeyboardInterrupt::new_err(());
    }
    let exception = || -> PyResult<Bound<'_, PyAny>> {
        let class = py.import(intern!(py, "df11._errors"))?.getattr(class(error))?;
        if let Error::Exists { path } = error {
            let remedy = "choose another output, or replace it with overwrite=True";
            let exception = class.call1((format!("{path} exists; {remedy}"),))?;
            exception.setattr("remedy", remedy)?;
            return Ok(exception);
        }
        let exception = class.call1((error.to_string(),))?;
        match error {
            Error::Io { source, .. } => exception.setattr("errno", source.raw_os_error())?,
            Error::Corrupt { place, offset, .. } => {
                exception.setattr("place", place)?;
                exception.setattr("offset", offset)?;
            }
            Error::Unsupported { remedy, .. }
            | Error::Parameter { remedy, .. }
            | Error::Gpu { remedy, .. } => {
                exception.setattr("remedy", remedy)?;
            }
            _ => {}
        }
        Ok(exception)
    };
    exception().map_or_else(|failure| failure, PyErr::from_value)
}

const fn class(error: &Error) -> &'static str {
    match error {
        Error::Io { .. } => "IoError",
        Error::Unsupported { .. } => "UnsupportedError",
        Error::Corrupt { .. } => "CorruptError",
        Error::Limit { .. } => "LimitError",
        Error::Parameter { .. } | Error::Exists { .. } => "ParameterError",
        Error::Gpu { .. } => "GpuError",
        _ => "Error",
    }
}

/// A word of the caller that is none of those that there are.
pub(crate) fn unknown_word(py: Python<'_>, what: &str, word: &str, words: &str) -> PyErr {
    raise(py, &Error::parameter(format!("{what} {word:?} is not known"), format!("choose {words}")))
}
