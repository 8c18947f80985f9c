//! What the rest of the library knows of an encoding: its arrays, and how they are decoded.
//!
//! To read another encoding: a folder with these traits for its sizes, and a line in
//! [`Coded`](crate::format::Coded), which knows all of them. ARCHITECTURE.md says what writing it
//! and GPUs need besides.

use std::{borrow::Cow, fmt::Debug, ops::Range};

use crate::{Error, Result};

/// What an array holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrayKind {
    Codebook,
    Index,
    Bitstream,
    Plane,
}

/// The numbers of one coded tensor, from which the sizes of its arrays follow.
pub(crate) trait CodedSizes: Debug {
    /// As in the tensor's record.
    fn parameters(&self) -> [u64; 3];

    /// Its arrays with their lengths in bytes: the codebook first, the plane last.
    fn arrays(&self) -> Vec<(ArrayKind, u64)>;

    /// Decoded bytes that are made together: parts that are cut at multiples of it decode nothing
    /// twice.
    fn grain(&self) -> u64 {
        2
    }

    /// Rows of this width in bytes that are decoded together, if columns of them can be decoded
    /// without the others.
    fn grain_rows(&self, _width: u64) -> Option<u64> {
        None
    }

    /// Reads and checks what all decoding of the tensor needs.
    ///
    /// # Errors
    /// [`Error::Corrupt`], and what reading answers.
    fn prepare<'m>(&self, arrays: &dyn ReadArrays<'m>) -> Result<Box<dyn DecodeArrays + 'm>>;

    /// Checks the whole codebook, and what of the index belongs to no weight.
    ///
    /// # Errors
    /// [`Error::Corrupt`], and what reading answers.
    fn verify_codebook(&self, arrays: &dyn ReadArrays<'_>) -> Result<()>;
}

/// The arrays of one coded tensor, by their number in its list.
pub(crate) trait ReadArrays<'m> {
    /// A range of an array's bytes; they are where the container is mapped, or a copy.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Corrupt`] if a checksum differs.
    fn read(&self, array: usize, range: Range<u64>) -> Result<Cow<'m, [u8]>>;

    /// As [`read`](Self::read), into scratch if they are not mapped.
    fn read_with<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &'s mut Vec<u8>,
    ) -> Result<&'s [u8]>;

    /// The same error, with the tensor and its container.
    fn locate(&self, error: Error) -> Error;
}

/// Decodes ranges of a tensor's weights, which are not empty, each on the thread that asks.
pub(crate) trait DecodeArrays: Send + Sync {
    /// Decodes weights into little-endian BF16.
    ///
    /// # Errors
    /// [`Error::Corrupt`], and what reading answers; so for the others.
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()>;

    /// Decodes some columns of some rows of this width, all in weights.
    fn decode_columns(
        &self,
        arrays: &dyn ReadArrays<'_>,
        part: (Range<u64>, Range<u64>, u64),
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        decode_rows(self, arrays, part, scratch, out)
    }

    /// Checks the whole index of some weights against their codes.
    fn verify(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<()>;
}

/// [`DecodeArrays::decode_columns`] out of whole rows: where codes have no columns, each row alone
/// would decode its neighbours too.
pub(crate) fn decode_rows<D: DecodeArrays + ?Sized>(
    decoder: &D,
    arrays: &dyn ReadArrays<'_>,
    (rows, columns, width): (Range<u64>, Range<u64>, u64),
    scratch: &mut Scratch,
    out: &mut [u8],
) -> Result<()> {
    let mut whole = vec![0; 2 * ((rows.end - rows.start) * width) as usize];
    decoder.decode(arrays, rows.start * width..rows.end * width, scratch, &mut whole)?;
    let wanted = 2 * columns.start as usize..2 * columns.end as usize;
    let rows = whole.chunks(2 * width as usize).zip(out.chunks_mut(wanted.len()));
    rows.for_each(|(row, out)| out.copy_from_slice(&row[wanted.clone()]));
    Ok(())
}

/// What a thread keeps of each buffer.
const KEPT_BYTES: usize = 4 << 20;

/// Where a thread reads what is not mapped, piece after piece: at most two chunks and the index,
/// some 4 MiB. Strips of more than a MiB need more, which is given back.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Gaps, or records of tiles.
    pub(crate) index: Vec<u8>,
    pub(crate) bitstream: Vec<u8>,
    pub(crate) plane: Vec<u8>,
}

impl Scratch {
    /// Frees what is more than a thread keeps.
    pub(crate) fn give_back(&mut self) {
        for buffer in [&mut self.index, &mut self.bitstream, &mut self.plane] {
            if buffer.capacity() > KEPT_BYTES {
                *buffer = Vec::new();
            }
        }
    }
}

/// Some bytes of an array that lies in memory as a whole.
pub(crate) fn part(array: &[u8], range: Range<u64>) -> Result<&[u8]> {
    let range = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
    range
        .and_then(|(start, end)| array.get(start..end))
        .ok_or_else(|| Error::parameter("an array is shorter than its size", "pass whole arrays"))
}

/// Checks that a range names one or more of `count` things, and none beyond them.
pub(crate) fn check_range(things: &str, range: &Range<u64>, count: u64) -> Result<()> {
    Error::unless(range.start < range.end && range.end <= count, || {
        Error::parameter(
            format!("{things} {}..{} of {count}", range.start, range.end),
            format!("ask for one or more {things} that exist"),
        )
    })
}
