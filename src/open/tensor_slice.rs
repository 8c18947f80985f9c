//! Slices of tensors and their decoding: `Tensor → TensorSlice → weights, or bytes`.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::{
    ahead::ReadAhead,
    decoder::{PIECE_BYTES, PreparedTensor, TensorReader, ranges},
    slice::{Rect, Slice},
    tensor::Tensor,
};
use crate::{Dtype, Error, Result, parallel};

/// Type to which a tensor is decoded: [`bf16`] for the weights of a BF16 tensor, `u8` for the bytes
/// of any tensor.
///
/// This trait is sealed: later versions may implement it for more types, but other crates cannot.
pub trait Element: sealed::Element {}

impl Element for bf16 {}
impl Element for u8 {}

mod sealed {
    use super::{Dtype, FromBytes, IntoBytes, bf16};

    pub trait Element: Copy + FromBytes + IntoBytes {
        /// The one dtype that it stands for, unless it stands for bytes.
        const DTYPE: Option<Dtype>;
    }

    impl Element for bf16 {
        const DTYPE: Option<Dtype> = Some(Dtype::BF16);
    }

    impl Element for u8 {
        const DTYPE: Option<Dtype> = None;
    }
}

/// A slice of a [`Tensor`], or all of it: from [`Tensor::slice`].
///
/// Decoded, it is dense: its elements in row-major order. Decoding works on all threads of the
/// current rayon pool.
///
/// If a matrix is stored in tiles of 32 rows × 256 columns
/// ([`Encoding::Tile`](crate::Encoding::Tile), from 16 rows and 128 columns on), only the tiles
/// that hold wanted weights are decoded, as tensor parallelism needs; slices at multiples of these
/// numbers decode no other weights. In other coded tensors, all columns of the wanted rows are
/// decoded, piece by piece; if the slice also restricts a middle dimension, each run of rows is
/// decoded separately.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// use half::bf16;
///
/// let model = df11::open(&path)?;
/// let tensor = model.tensor("model.layers.0.mlp.down_proj.weight")?;
/// let (rows, columns) = (tensor.shape()[0], tensor.shape()[1]);
/// // The second of two parts of all rows, as one of two GPUs needs it.
/// let part = tensor.slice(&[0..rows, columns / 2..columns])?;
/// assert_eq!(part.shape(), [rows, columns / 2]);
/// let weights: Vec<bf16> = part.decode()?;
/// assert_eq!(weights[0], tensor.decode::<bf16>()?[columns as usize / 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TensorSlice<'m> {
    tensor: Tensor<'m>,
    shape: Vec<u64>,
    slice: Slice,
}

impl<'m> Tensor<'m> {
    /// A slice of it, as by indexing with ranges: the indices in `ranges` of the first dimensions,
    /// and all indices of the others. The only index of a scalar is 0. Decodes nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more ranges than dimensions, for indices that do not exist, and for
    /// elements that do not fill whole bytes; [`Error::Unsupported`] for an unknown dtype.
    pub fn slice(&self, ranges: &[Range<u64>]) -> Result<TensorSlice<'m>> {
        TensorSlice::new(*self, ranges)
    }

    /// Decodes all of it: the weights of a BF16 tensor (`Vec<bf16>`), or the bytes of any tensor
    /// (`Vec<u8>`), little-endian, as in the original file.
    ///
    /// # Errors
    /// Like [`TensorSlice::decode`].
    pub fn decode<E: Element>(&self) -> Result<Vec<E>> {
        self.slice(&[])?.decode()
    }

    /// Like [`Tensor::decode`], into the caller's memory, which must have as many elements or
    /// bytes.
    ///
    /// # Errors
    /// Like [`TensorSlice::decode_into`].
    pub fn decode_into<E: Element>(&self, out: &mut [E]) -> Result<()> {
        self.slice(&[])?.decode_into(out)
    }
}

impl<'m> TensorSlice<'m> {
    pub(super) fn new(tensor: Tensor<'m>, ranges: &[Range<u64>]) -> Result<Self> {
        tensor.byte_length()?;
        let mut shape = tensor.shape();
        let slice = Slice::new(tensor.name(), tensor.known_dtype()?, &shape, ranges)?;
        for (size, range) in shape.iter_mut().zip(ranges) {
            *size = range.end - range.start;
        }
        Ok(Self { tensor, shape, slice })
    }

    /// The tensor.
    pub fn tensor(&self) -> Tensor<'m> {
        self.tensor
    }

    /// Its dimensions, outermost first; as many as the tensor has.
    pub fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// The size of its decoded bytes.
    pub fn byte_length(&self) -> u64 {
        self.slice.bytes()
    }

    /// Decodes it: to weights if `E` is [`bf16`], or to bytes, little-endian as in the original
    /// file, if `E` is `u8`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for [`bf16`] of a tensor that is not BF16; [`Error::Unsupported`] for
    /// an encoding of a newer version; [`Error::Corrupt`] if the container is damaged;
    /// [`Error::Io`].
    pub fn decode<E: Element>(&self) -> Result<Vec<E>> {
        // Before anything is allocated: the size of a tensor that cannot be decoded is bounded by
        // nothing.
        let reader = self.reader::<E>()?;
        let mut out = vec![E::new_zeroed(); self.byte_length() as usize / size_of::<E>()];
        self.read(&reader, &mut out)?;
        Ok(out)
    }

    /// Like [`decode`](Self::decode), into the caller's memory. After an error its contents are
    /// undefined.
    ///
    /// # Errors
    /// Like [`decode`](Self::decode); [`Error::Parameter`] for memory of another size.
    pub fn decode_into<E: Element>(&self, out: &mut [E]) -> Result<()> {
        let (given, length) = (size_of_val(out) as u64, self.byte_length());
        if given != length {
            let name = self.tensor.name();
            let problem = format!("tensor {name:?} needs an output of {length} bytes, not {given}");
            return Err(Error::parameter(problem, "pass a slice of the right length"));
        }
        self.read(&self.reader::<E>()?, out)
    }

    /// Starts to fetch its bytes, if it is the whole tensor.
    fn expect(&self) -> ReadAhead {
        let is_whole = self.tensor.byte_length().is_ok_and(|whole| whole == self.byte_length());
        ReadAhead::of(is_whole.then_some(self.tensor))
    }

    fn reader<E: Element>(&self) -> Result<TensorReader<'m>> {
        match self.tensor.dtype() {
            dtype if E::DTYPE.is_some() && dtype != E::DTYPE => {
                let name = dtype.map_or("unknown", Dtype::name);
                let problem = format!("tensor {:?} has dtype {name}, not BF16", self.tensor.name());
                Err(Error::parameter(problem, "decode its bytes instead"))
            }
            _ => TensorReader::new(&self.tensor),
        }
    }

    fn read<E: Element>(&self, reader: &TensorReader<'m>, out: &mut [E]) -> Result<()> {
        let parts: Vec<Rect> = self.slice.rects().flat_map(|rect| parts(reader, rect)).collect();
        let outs: Vec<_> =
            parallel::split(out.as_mut_bytes(), parts.iter().map(Rect::bytes)).collect();
        let _ahead = self.expect();
        // In order, so that what comes from afar is read as it comes.
        let parts = parts.into_iter().zip(outs).par_bridge();
        parts.try_for_each(|(part, out)| reader.read_rect(part, out))?;
        if cfg!(target_endian = "big") {
            out.as_mut_bytes().chunks_exact_mut(size_of::<E>()).for_each(<[u8]>::reverse);
        }
        Ok(())
    }
}

/// Cuts a rect into parts of about [`PIECE_BYTES`], each for one thread.
fn parts(tensor: &TensorReader<'_>, rect: Rect) -> Vec<Rect> {
    let Rect { rows, columns, width } = rect.clone();
    let grain_rows = tensor.grain_rows(width);
    let many = rows.end - rows.start > 1;
    // A single row in tiles needs only the tiles that hold some of it.
    if grain_rows.map_or(many && width <= PIECE_BYTES, |grain| many || grain > 1) {
        // Where codes have no columns, whole rows are decoded.
        let row_bytes = grain_rows.map_or(width, |_| columns.end - columns.start);
        let rows = parallel::cut(rows, PIECE_BYTES / row_bytes, grain_rows.unwrap_or(1));
        return rows.map(|rows| Rect { rows, ..rect.clone() }).collect();
    }
    let grain = tensor.grain();
    let runs = rect.runs().flat_map(|run| ranges(run, grain));
    runs.map(|run| Rect { rows: 0..1, width: run.end, columns: run }).collect()
}
