//! How tensors are stored: one folder an encoding, with pure functions between weights and the
//! arrays of a section. What reads stored tensors knows an encoding by the traits in [`stored`].

pub mod gap;
pub(crate) mod stored;
pub mod tile;

use std::ops::Range;

use crate::{Error, Result};

/// Checks that a range names one or more of `count` things, and none beyond them.
fn check_range(things: &str, range: &Range<u64>, count: u64) -> Result<()> {
    if range.start < range.end && range.end <= count {
        return Ok(());
    }
    Err(Error::parameter(
        format!("{things} {}..{} of {count}", range.start, range.end),
        format!("ask for one or more {things} that exist"),
    ))
}

/// Some bytes of an array that lies in memory as a whole.
fn part(array: &[u8], range: Range<u64>) -> Result<&[u8]> {
    let range = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
    range
        .and_then(|(start, end)| array.get(start..end))
        .ok_or_else(|| Error::parameter("an array is shorter than its size", "pass whole arrays"))
}
