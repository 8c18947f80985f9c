//! Traits by which the rest of the library reads and decodes an encoding's arrays.
//!
//! A new encoding needs a folder that implements these traits for its sizes, and a variant of
//! `Coded` (`format/directory.rs`), which lists all encodings. `encoding/mod.rs` lists every place
//! to change.

use std::{borrow::Cow, fmt::Debug, ops::Range};

use crate::{Error, Result, io::ReadAt};

/// Kind of a section: codes, with the LUTs of `gap`.
pub const SECTION_CODEBOOK: u32 = 1;
/// Kind of a section: gap arrays and output offsets, records of tiles.
pub const SECTION_INDEX: u32 = 2;
/// Kind of a section: codes of weights.
pub const SECTION_BITSTREAM: u32 = 3;
/// Kind of a section: sign/mantissa planes.
pub const SECTION_PLANE: u32 = 4;

/// The numbers of one coded tensor, from which the sizes of its arrays follow.
pub trait CodedSizes: Debug {
    /// As in the tensor's record.
    fn parameters(&self) -> [u64; 4];

    /// The number of weights.
    fn elements(&self) -> u64;

    /// Bytes of a decoded weight.
    fn weight_bytes(&self) -> u64 {
        2
    }

    /// The kinds of its arrays' sections with their lengths in bytes: the codebook first, the plane
    /// last.
    fn arrays(&self) -> Vec<(u32, u64)>;

    /// All bytes of one of its arrays.
    ///
    /// # Errors
    /// Errors of reading.
    fn read_whole<'m>(&self, arrays: &dyn ReadArrays<'m>, array: usize) -> Result<Cow<'m, [u8]>> {
        arrays.read(array, 0..self.arrays()[array].1)
    }

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
pub trait ReadArrays<'m> {
    /// A range of an array's bytes; they are where the container is mapped, or a copy.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Corrupt`] if a checksum differs; [`Error::Parameter`] if an array in
    /// memory is too short.
    ///
    /// # Panics
    /// If there are fewer arrays.
    fn read(&self, array: usize, range: Range<u64>) -> Result<Cow<'m, [u8]>>;

    /// Like [`read`](Self::read), into scratch if they are not mapped.
    ///
    /// # Errors
    /// Like [`read`](Self::read).
    fn read_with<'s>(
        &'s self,
        array: usize,
        range: Range<u64>,
        scratch: &'s mut Vec<u8>,
    ) -> Result<&'s [u8]>
    where
        'm: 's,
    {
        Ok(match self.read(array, range)? {
            Cow::Borrowed(bytes) => bytes,
            Cow::Owned(bytes) => {
                *scratch = bytes;
                scratch
            }
        })
    }

    /// The weights that the tensor is a difference from.
    ///
    /// # Errors
    /// [`Error::NoBase`] if they are not known.
    fn base(&self) -> Result<Box<dyn ReadBase + 'm>> {
        Err(Error::no_base("arrays without their base", "pass the base too"))
    }
}

/// Weights from which others are differences.
pub trait ReadBase: Send + Sync {
    /// Reads weights, little-endian, to `out`, which is as long.
    ///
    /// # Errors
    /// Errors of reading.
    fn read(&self, elements: Range<u64>, out: &mut [u8]) -> Result<()>;
}

/// Arrays that lie in memory.
#[doc(hidden)]
impl<'m, const N: usize> ReadArrays<'m> for [&'m [u8]; N] {
    fn read(&self, array: usize, range: Range<u64>) -> Result<Cow<'m, [u8]>> {
        part(self[array], range).map(Cow::Borrowed)
    }
}

/// Decodes ranges of a tensor's weights, each on the thread that asks. Reads only those parts of
/// its arrays that a range needs.
///
/// Any bytes are safe to decode: every read stays in its array, every write in the output, each
/// step consumes a bit or more, and codes that do not end where the index says are an error.
pub trait DecodeArrays: Send + Sync {
    /// Decodes weights, little-endian.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the arrays contradict themselves: then `out` holds anything;
    /// [`Error::Parameter`] for weights that do not exist, or none; what reading answers.
    ///
    /// # Panics
    /// If `out` has another size.
    fn decode(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()>;

    /// Decodes some columns of some rows of this width, all in weights.
    ///
    /// # Errors
    /// Like [`decode`](Self::decode).
    ///
    /// # Panics
    /// Like [`decode`](Self::decode), and if there are no such rows or columns.
    fn decode_columns(
        &self,
        arrays: &dyn ReadArrays<'_>,
        part: (Range<u64>, Range<u64>, u64),
        scratch: &mut Scratch,
        out: &mut [u8],
    ) -> Result<()> {
        decode_rows(self, 2, arrays, part, scratch, out)
    }

    /// Checks the whole index of some weights against their codes; costs at most about twice as
    /// much as decoding.
    ///
    /// # Errors
    /// Like [`decode`](Self::decode).
    fn verify(
        &self,
        arrays: &dyn ReadArrays<'_>,
        elements: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<()>;
}

/// [`DecodeArrays::decode_columns`] out of whole rows: where codes have no columns, each row alone
/// would decode its neighbours too. Weights have `each` bytes.
pub(crate) fn decode_rows<D: DecodeArrays + ?Sized>(
    decoder: &D,
    each: u64,
    arrays: &dyn ReadArrays<'_>,
    (rows, columns, width): (Range<u64>, Range<u64>, u64),
    scratch: &mut Scratch,
    out: &mut [u8],
) -> Result<()> {
    let mut whole = vec![0; (each * (rows.end - rows.start) * width) as usize];
    decoder.decode(arrays, rows.start * width..rows.end * width, scratch, &mut whole)?;
    let wanted = (each * columns.start) as usize..(each * columns.end) as usize;
    let rows = whole.chunks((each * width) as usize).zip(out.chunks_mut(wanted.len()));
    rows.for_each(|(row, out)| out.copy_from_slice(&row[wanted.clone()]));
    Ok(())
}

/// Bytes of each buffer that a thread keeps, at most.
const KEPT_BYTES: usize = 4 << 20;

/// Buffers into which a thread reads arrays that are not mapped: at most two chunks and the index,
/// some 4 MiB. Strips of more than a MiB need more, which is freed afterwards.
#[derive(Debug, Default)]
pub struct Scratch {
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

/// A tensor whose arrays lie in memory, and the numbers that its directory record holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedTensor<S, const N: usize> {
    /// Its sizes, from which the lengths of the arrays follow.
    pub sizes: S,
    /// Its arrays, in the order of its record.
    pub arrays: [Vec<u8>; N],
}

impl<S: CodedSizes, const N: usize> EncodedTensor<S, N> {
    /// Its arrays, to read from.
    pub fn views(&self) -> [&[u8]; N] {
        self.arrays.each_ref().map(Vec::as_slice)
    }

    /// Decodes a range of weights, little-endian.
    ///
    /// # Errors
    /// Like [`CodedSizes::prepare`] and [`DecodeArrays::decode`].
    pub fn decode(&self, elements: Range<u64>) -> Result<Vec<u8>> {
        check_range("elements", &elements, self.sizes.elements())?;
        let each = self.sizes.weight_bytes();
        let mut weights = vec![0; (each * (elements.end - elements.start)) as usize];
        let decoder = self.sizes.prepare(&self.views())?;
        decoder.decode(&self.views(), elements, &mut Scratch::default(), &mut weights)?;
        Ok(weights)
    }
}

/// Some bytes of an array that lies in memory as a whole.
fn part(array: &[u8], range: Range<u64>) -> Result<&[u8]> {
    let length = range.end.checked_sub(range.start);
    let part = length.and_then(|length| array.view(range.start, length));
    part.ok_or_else(|| Error::parameter("an array is shorter than its size", "pass whole arrays"))
}

/// A pass over weights finds others than the pass from which their code comes.
pub(super) fn changed() -> Error {
    Error::parameter(
        "the weights are not those of their code",
        "keep the source unchanged while it is read",
    )
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
