//! Errors as codes and texts, and the boundary that no panic crosses.
#![expect(unsafe_code, reason = "a name that C knows")]

use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{any::Any, cell::RefCell};

use df11::{Error, hazmat::io_remedy};

/// Return code of a function. Later versions may add values.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The operating system refused to read.
    Io = 1,
    /// The file needs something that this version does not know.
    Unsupported = 2,
    /// The file is damaged or truncated, or is not a container.
    Corrupt = 3,
    /// A limit of the format is exceeded.
    Limit = 4,
    /// The caller asked for something impossible: a null pointer, a wrong size, rows that do not
    /// exist.
    Parameter = 5,
    /// The GPU or its driver failed or is missing.
    Gpu = 6,
    /// There is no tensor with this index or name.
    NotFound = 7,
    /// A bug in the library, which stays usable.
    Internal = 8,
}

/// A code with its text.
pub(crate) struct Failure(Status, String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Io { .. } => Status::Io,
            Error::Unsupported { .. } => Status::Unsupported,
            Error::Corrupt { .. } => Status::Corrupt,
            Error::Limit { .. } => Status::Limit,
            Error::Parameter { .. } | Error::Exists { .. } | Error::NoBase { .. } => {
                Status::Parameter
            }
            Error::Gpu { .. } => Status::Gpu,
            _ => Status::Internal,
        };
        let remedy = if let Error::Io { source, .. } = &error { io_remedy(source) } else { None };
        let end = remedy.map_or_else(String::new, |remedy| format!("; {remedy}"));
        Self(status, format!("{error}{end}"))
    }
}

pub(crate) fn refuse<T>(problem: impl Into<String>) -> Result<T, Failure> {
    Err(Failure(Status::Parameter, problem.into()))
}

pub(crate) fn not_found<T>(problem: impl Into<String>) -> Result<T, Failure> {
    Err(Failure(Status::NotFound, problem.into()))
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a function of the interface: its error becomes a code, its text the thread's last one.
pub(crate) fn call(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    // Work that a panic leaves half-done is dropped, or is under a lock that the library can
    // recover.
    let answer = catch_unwind(AssertUnwindSafe(work));
    let (status, text) = match answer {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(Failure(status, text))) => (status, text),
        Err(panic) => (Status::Internal, format!("df11 failed: {}", said(&*panic))),
    };
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    LAST.with(|last| last.replace(text));
    status
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given")
}

/// The text of the calling thread's last error: one line of UTF-8 with the remedy, empty if there
/// was no error. Valid until the next failing call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn df11_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::{Status, call, df11_last_error};

    #[test]
    fn a_panic_is_a_code() {
        let text = "of\0a test";
        assert_eq!(call(|| panic!("{text}")), Status::Internal);
        // SAFETY: the text of this thread, which fails at nothing meanwhile.
        let said = unsafe { CStr::from_ptr(df11_last_error()) };
        assert_eq!(said.to_str(), Ok("df11 failed: of?a test"));
    }
}
