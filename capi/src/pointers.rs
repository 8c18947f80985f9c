//! Checks the caller's pointers, sizes and rows before they are used.
#![expect(unsafe_code, reason = "memory of the caller")]

use std::ffi::{CStr, c_char};
use std::{ops::Range, ptr::null_mut};

use crate::ALL_ROWS;
use crate::error::{Failure, refuse};

/// # Safety
/// It is null, or points to such a value, which lives as long as the result.
pub(crate) unsafe fn shared<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    let value = unsafe { pointer.as_ref() };
    value.map_or_else(|| refuse(format!("{what} is NULL")), Ok)
}

/// # Safety
/// It is null, or has room for such a value.
pub(crate) unsafe fn write<T>(pointer: *mut T, value: T, what: &str) -> Result<(), Failure> {
    if pointer.is_null() {
        return refuse(format!("{what} is NULL"));
    }
    // SAFETY: the caller's promise.
    unsafe { pointer.write(value) };
    Ok(())
}

/// # Safety
/// It is null, or a text that ends with a zero byte and lives as long as the result.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a CStr, Failure> {
    // SAFETY: the caller's promise.
    unsafe { shared(pointer, what) }?;
    // SAFETY: as above.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// # Safety
/// It is null, or has this many bytes, which nobody else uses as long as the result lives.
pub(crate) unsafe fn bytes<'a>(pointer: *mut u8, length: u64) -> Result<&'a mut [u8], Failure> {
    let Ok(length) = usize::try_from(length) else {
        return refuse("the output is larger than the memory");
    };
    if length == 0 {
        return Ok(&mut []);
    }
    if pointer.is_null() {
        return refuse("the output is NULL");
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, length) })
}

/// Makes a handle of a value, which is null if there is none.
///
/// # Safety
/// Like [`write`].
pub(crate) unsafe fn give<T>(
    to: *mut *mut T,
    what: &str,
    make: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe { write(to, null_mut(), what) }?;
    let value = Box::into_raw(Box::new(make()?));
    // SAFETY: the same.
    unsafe { write(to, value, what) }
}

/// Takes a handle back; null is nothing.
///
/// # Safety
/// It is null or from [`give`], and is used no more.
pub(crate) unsafe fn take<T>(pointer: *mut T) -> Option<Box<T>> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { Box::from_raw(pointer) })
}

/// The rows that a caller asks for.
pub(crate) fn rows_of(name: &str, all: u64, first: u64, count: u64) -> Result<Range<u64>, Failure> {
    let end = if count == ALL_ROWS { Some(all) } else { first.checked_add(count) };
    match end.filter(|&end| first <= end && end <= all) {
        Some(end) => Ok(first..end),
        None => refuse(format!("{count} rows from {first} on of {name:?}, which has {all}")),
    }
}

/// Checks that an output has the size of what goes there.
pub(crate) fn check_size(given: u64, needed: u64, name: &str) -> Result<(), Failure> {
    if given == needed {
        return Ok(());
    }
    refuse(format!("an output of {given} bytes for {needed} bytes of {name:?}"))
}
