//! A tensor of an open model.

use std::{borrow::Cow, ops::Range};

use half::bf16;
use rayon::prelude::*;
use zerocopy::IntoBytes;

use super::{
    Shard,
    columns::read_slice,
    decoder::{ranges, read_parallel},
    reader::TensorReader,
    slice::Slice,
};
use crate::{
    Dtype, Error, Result, dtype,
    encoding::tile,
    format::records::{ENCODING_ALIAS, ENCODING_GAP, ENCODING_RAW, ENCODING_TILE, TensorRecord},
    huffman::{self, CodeLengths, Histogram},
};

/// How a tensor is stored (spec/format.md, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// As a reference to another tensor with the same bytes.
    Alias,
    /// As it is.
    Raw,
    /// Huffman-coded exponents with a gap array.
    Gap,
    /// Huffman-coded pairs of exponents, in tiles.
    Tile,
    /// In a way that this version does not know; the tensor cannot be decoded.
    Unknown(u32),
}

impl Encoding {
    fn from_id(id: u32) -> Self {
        match id {
            ENCODING_ALIAS => Self::Alias,
            ENCODING_RAW => Self::Raw,
            ENCODING_GAP => Self::Gap,
            ENCODING_TILE => Self::Tile,
            id => Self::Unknown(id),
        }
    }

    /// The name in spec and command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alias => "alias",
            Self::Raw => "raw",
            Self::Gap => "gap",
            Self::Tile => "tile",
            Self::Unknown(_) => "unknown",
        }
    }
}

/// A tensor of an open model: its description, and the way to its bytes. Cheap to copy.
///
/// Decoding works on all threads of the current rayon pool and checks the checksum of each chunk that it reads for
/// the first time.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// let model = df11::open(&path)?;
/// let tensor = model.tensor("model.embed_tokens.weight").unwrap();
/// let weights: Vec<half::bf16> = tensor.decode()?;
/// let mut rows = vec![half::bf16::ZERO; 3 * tensor.shape()[1] as usize];
/// tensor.decode_rows(10..13, &mut rows)?;
/// assert_eq!(rows, weights[10 * tensor.shape()[1] as usize..][..rows.len()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'m> {
    shard: &'m Shard,
    index: usize,
}

impl<'m> Tensor<'m> {
    pub(super) fn new(shard: &'m Shard, index: usize) -> Self {
        Self { shard, index }
    }

    pub(crate) fn shard(&self) -> &'m Shard {
        self.shard
    }

    /// Its index in the directory of its shard.
    #[cfg(feature = "cudarc")]
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn record(&self) -> &'m TensorRecord {
        &self.shard.directory().tensors[self.index]
    }

    /// The same error, with this tensor and its container.
    pub(crate) fn locate(&self, error: Error) -> Error {
        error.within(format_args!("tensor {:?}", self.name())).in_file(self.shard.path())
    }

    /// Its name.
    pub fn name(&self) -> &'m str {
        self.shard.directory().tensor_name(self.record())
    }

    /// The name of its block.
    pub fn block_name(&self) -> &'m str {
        let directory = self.shard.directory();
        directory.block_name(&directory.blocks[self.record().block.get() as usize])
    }

    /// The type of its elements, or `None` where this version does not know it.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::from_id(self.record().dtype.get())
    }

    /// Its dimensions, outermost first; none for a scalar.
    pub fn shape(&self) -> Vec<u64> {
        self.record().dimensions()
    }

    /// The number of its elements; 2^64 − 1 where more do not fit, which only an unknown dtype allows.
    pub fn elements(&self) -> u64 {
        dtype::elements(&self.shape()).unwrap_or(u64::MAX)
    }

    /// The size of its decoded bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown dtype.
    pub fn byte_length(&self) -> Result<u64> {
        self.known_dtype()?.bytes(&self.shape())
    }

    fn known_dtype(&self) -> Result<Dtype> {
        let id = self.record().dtype.get();
        self.dtype().ok_or_else(|| self.locate(Error::unsupported(format_args!("dtype {id}"), "update df11")))
    }

    /// How it is stored; [`Encoding::Unknown`] for an unknown dtype too, since nothing is known of its arrays then.
    pub fn encoding(&self) -> Encoding {
        let id = self.record().encoding.get();
        if self.dtype().is_some() { Encoding::from_id(id) } else { Encoding::Unknown(id) }
    }

    /// That its bytes are stored in a way that this version knows: before anything is allocated, since the size of a tensor that cannot be
    /// decoded is bounded by nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where they are not.
    pub fn check_known(&self) -> Result<()> {
        self.target().known_dtype()?;
        match self.target().encoding() {
            Encoding::Unknown(id) => {
                Err(self.locate(Error::unsupported(format_args!("encoding {id}"), "update df11")))
            }
            _ => Ok(()),
        }
    }

    /// The tensor that holds its bytes: itself, but for an alias.
    #[must_use]
    pub fn target(&self) -> Self {
        if self.encoding() == Encoding::Alias {
            Self { shard: self.shard, index: self.record().parameters[0].get() as usize }
        } else {
            *self
        }
    }

    /// Bytes of its arrays; 0 for an alias.
    pub fn stored_bytes(&self) -> u64 {
        let directory = self.shard.directory();
        directory.arrays[self.record().array_range()].iter().map(|array| array.length.get()).sum()
    }

    /// Stored bits an element; 0 for a tensor without elements.
    pub fn bits_per_element(&self) -> f64 {
        8.0 * self.stored_bytes() as f64 / self.elements().max(1) as f64
    }

    /// The BLAKE3 hash of its decoded bytes, as stored.
    pub fn hash(&self) -> blake3::Hash {
        blake3::Hash::from_bytes(self.record().hash)
    }

    /// The code lengths of its exponents, for the `gap` encoding; other encodings have no code for single exponents.
    ///
    /// # Errors
    /// [`Error::Corrupt`] or [`Error::Io`].
    pub fn code_lengths(&self) -> Result<Option<CodeLengths>> {
        let target = self.target();
        if target.encoding() != Encoding::Gap {
            return Ok(None);
        }
        let array = target.record().array_range().start;
        let length = self.shard.directory().arrays[array].length.get();
        let codebook = self.shard.read_array(array, 0..length)?;
        huffman::read_codebook(&codebook).map(Some).map_err(|error| self.locate(error))
    }

    /// How often each exponent occurs. Decodes the tensor, piece by piece.
    ///
    /// # Errors
    /// As [`Tensor::decode_into`].
    pub fn histogram(&self) -> Result<Histogram> {
        self.require_bf16()?;
        let reader = TensorReader::new(self)?;
        ranges(0..self.byte_length()?, reader.unit())
            .par_bridge()
            .map(|range| {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                reader.read(range, &mut bytes)?;
                Ok(Histogram::of(&bytes))
            })
            .try_reduce(Histogram::default, |mut sum, histogram| {
                sum.merge(&histogram);
                Ok(sum)
            })
    }

    /// All weights of a BF16 tensor.
    ///
    /// # Errors
    /// As [`Tensor::decode_into`].
    pub fn decode(&self) -> Result<Vec<bf16>> {
        self.require_bf16()?;
        // Before anything is allocated, as in `decode_bytes`.
        let reader = TensorReader::new(self)?;
        let mut weights = vec![bf16::ZERO; self.elements() as usize];
        read_parallel(&reader, 0..self.byte_length()?, weights.as_mut_bytes())?;
        to_native(&mut weights);
        Ok(weights)
    }

    /// All weights of a BF16 tensor, in row-major order, into a slice of as many elements.
    ///
    /// # Errors
    /// [`Error::Parameter`] for another dtype or a slice of another length; [`Error::Unsupported`] for an encoding of a newer version;
    /// [`Error::Corrupt`] where the container is damaged, then the slice holds anything; [`Error::Io`].
    pub fn decode_into(&self, weights: &mut [bf16]) -> Result<()> {
        self.decode_slice(&[], weights)
    }

    /// Rows of a BF16 tensor: all weights whose index in the first dimension lies in `rows`. A vector's rows are its elements. Only
    /// the thread blocks, or the tiles (of 32 rows, or of 8192 weights), that hold them are decoded.
    ///
    /// # Errors
    /// As [`Tensor::decode_into`], and [`Error::Parameter`] for rows that do not exist.
    pub fn decode_rows(&self, rows: Range<u64>, weights: &mut [bf16]) -> Result<()> {
        self.decode_slice(&[rows], weights)
    }

    /// A slice of a BF16 tensor, as indexing with ranges gives it: of the first dimensions the indices in `ranges`, of the others all. The
    /// weights come dense, in row-major order.
    ///
    /// Where a matrix is stored in tiles of 32 rows × 256 columns ([`Encoding::Tile`], from 16 rows and 128 columns on), only the tiles that
    /// hold wanted weights are decoded, which is what tensor parallelism needs; at multiples of these numbers nothing is decoded in vain. Of
    /// other coded tensors all columns of the wanted rows are decoded, piece by piece; and where indices are left out of a middle
    /// dimension too, each run of rows by itself.
    ///
    /// ```
    /// # fn main() -> df11::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
    /// let model = df11::open(&path)?;
    /// let tensor = model.tensor("model.layers.0.mlp.down_proj.weight").unwrap();
    /// let (rows, columns) = (tensor.shape()[0], tensor.shape()[1]);
    /// // The second of two parts of all rows.
    /// let mut part = vec![half::bf16::ZERO; (rows * columns / 2) as usize];
    /// tensor.decode_slice(&[0..rows, columns / 2..columns], &mut part)?;
    /// assert_eq!(part[0], tensor.decode()?[columns as usize / 2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::decode_into`], and [`Error::Parameter`] for more ranges than dimensions, and for indices that do not exist.
    pub fn decode_slice(&self, ranges: &[Range<u64>], weights: &mut [bf16]) -> Result<()> {
        self.require_bf16()?;
        self.read_into(&self.slice(ranges)?, weights.as_mut_bytes())?;
        to_native(weights);
        Ok(())
    }

    /// All bytes of a tensor of any dtype, little-endian, as in the original file.
    ///
    /// # Errors
    /// As [`Tensor::decode_into`], but for the dtype.
    pub fn decode_bytes(&self) -> Result<Vec<u8>> {
        // Before anything is allocated: the size of a tensor that cannot be decoded is bounded by nothing.
        let reader = TensorReader::new(self)?;
        let length = self.byte_length()?;
        let mut bytes = vec![0; length as usize];
        read_parallel(&reader, 0..length, &mut bytes)?;
        Ok(bytes)
    }

    /// All bytes of a tensor of any dtype, into a slice of [`Tensor::byte_length`].
    ///
    /// # Errors
    /// As [`Tensor::decode_into`], but for the dtype.
    pub fn decode_bytes_into(&self, bytes: &mut [u8]) -> Result<()> {
        self.decode_slice_bytes(&[], bytes)
    }

    /// Rows of a tensor of any dtype, as bytes.
    ///
    /// # Errors
    /// As [`Tensor::decode_rows`], but for the dtype; [`Error::Parameter`] where a row does not fill whole bytes.
    pub fn decode_row_bytes(&self, rows: Range<u64>, bytes: &mut [u8]) -> Result<()> {
        self.decode_slice_bytes(&[rows], bytes)
    }

    /// A slice of a tensor of any dtype, as bytes.
    ///
    /// # Errors
    /// As [`Tensor::decode_slice`], but for the dtype; [`Error::Parameter`] where wanted elements do not fill whole bytes.
    pub fn decode_slice_bytes(&self, ranges: &[Range<u64>], bytes: &mut [u8]) -> Result<()> {
        self.read_into(&self.slice(ranges)?, bytes)
    }

    /// The size of a slice in bytes, for [`Tensor::decode_slice_bytes`].
    ///
    /// # Errors
    /// As [`Tensor::decode_slice_bytes`], but that nothing is read.
    pub fn slice_bytes(&self, ranges: &[Range<u64>]) -> Result<u64> {
        Ok(self.slice(ranges)?.bytes())
    }

    /// The bytes of a range of rows, among those of the tensor; 0..0 where it has none.
    ///
    /// # Errors
    /// [`Error::Parameter`] for rows that do not exist, or that do not fill whole bytes; [`Error::Unsupported`] for an unknown dtype.
    pub fn row_bytes(&self, rows: Range<u64>) -> Result<Range<u64>> {
        Ok(self.slice(&[rows])?.runs().next().unwrap_or(0..0))
    }

    /// Bytes that are decoded together: ranges that begin and end at multiples of it cost the least.
    pub(crate) fn unit(&self) -> u64 {
        let target = self.target();
        let sizes =
            (target.encoding() == Encoding::Tile).then(|| super::reader::tile_sizes(&target).ok()).flatten();
        sizes.map_or(2, |sizes| 2 * sizes.geometry().strip_elements())
    }

    /// The rows and columns of a BF16 matrix in tiles of 32 x 256; `None` for any other tensor. Columns are the last dimension or
    /// the product of some last ones. Of an alias those of its target.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if its record contradicts itself.
    pub fn tile_shape(&self) -> Result<Option<(u64, u64)>> {
        let target = self.target();
        if self.dtype() != Some(Dtype::BF16) || target.encoding() != Encoding::Tile {
            return Ok(None);
        }
        let geometry = super::reader::tile_sizes(&target).map_err(|error| target.locate(error))?.geometry();
        let is_matrix = geometry.is_matrix_of(&self.shape());
        Ok(is_matrix.then_some((geometry.rows(), geometry.columns())))
    }

    /// The lengths of the four arrays of a tensor that [has such a shape](Self::tile_shape), in bytes.
    pub fn tile_array_lengths(&self) -> [u64; 4] {
        let target = self.target();
        let directory = target.shard().directory();
        let first = target.record().array_range().start;
        [0, 1, 2, 3].map(|at| directory.arrays[first + at].length.get())
    }

    /// One of these arrays: codebook, records, bitstream, plane; checked against its checksums. Where the container is mapped into
    /// memory, it is the mapping's.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a checksum differs; [`Error::Io`].
    ///
    /// # Panics
    /// For a tensor without [such a shape](Self::tile_shape), or another array.
    pub fn tile_array(&self, array: usize) -> Result<Cow<'m, [u8]>> {
        let target = self.target();
        assert!(target.encoding() == Encoding::Tile && array < 4, "an array of a tensor in tiles");
        let length = self.tile_array_lengths()[array];
        target.shard().read_array(target.record().array_range().start + array, 0..length)
    }

    /// All four in the mapping of the container, unread and unchecked
    /// ([`check_tiles`](Self::check_tiles) checks them); None if it is not mapped.
    ///
    /// # Panics
    /// For a tensor without [such a shape](Self::tile_shape).
    pub fn tile_views(&self) -> Option<[&'m [u8]; 4]> {
        let target = self.target();
        assert!(target.encoding() == Encoding::Tile, "a tensor in tiles");
        let first = target.record().array_range().start;
        let view = |at| target.shard().view_array(first + at);
        Some([view(0)?, view(1)?, view(2)?, view(3)?])
    }

    /// The most bytes of its bitstream that a tile takes, of a tensor that [has such a shape](Self::tile_shape); reads its records.
    ///
    /// # Errors
    /// As [`Tensor::tile_array`].
    pub fn tile_staged_bytes(&self) -> Result<u32> {
        // No truncation: it is less than a tile has at most.
        Ok(tile::staged_bytes(&self.tile_array(1)?) as u32)
    }

    /// Checks what kernels rely on, of a tensor that [has such a shape](Self::tile_shape): the
    /// checksums of its arrays, its codebook, and that the offsets of its tiles ascend.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; [`Error::Io`].
    ///
    /// # Panics
    /// For a tensor without such a shape.
    pub fn check_tiles(&self) -> Result<()> {
        let target = self.target();
        let first = target.record().array_range().start;
        (first..first + 4).try_for_each(|array| target.shard().check_array(array))?;
        let (codebook, records) = (target.tile_array(0)?, target.tile_array(1)?);
        let checked = super::reader::tile_sizes(&target).and_then(|sizes| {
            tile::Codebook::from_bytes(&codebook)?;
            tile::check_offsets(&sizes, &records)
        });
        checked.map_err(|error| target.locate(error))
    }

    /// Some of its rows and columns as a matrix of its own, of a tensor that [has such a shape](Self::tile_shape): rows from a
    /// multiple of 32 to one or to the end, columns likewise of 256. Decodes nothing, and reads the chunks of 1 MiB alone that
    /// hold some of it, whose checksums are checked.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows or columns; [`Error::Corrupt`], [`Error::Io`].
    ///
    /// # Panics
    /// For a tensor without such a shape.
    pub fn cut_tiles(&self, rows: Range<u64>, columns: Range<u64>) -> Result<tile::OwnedArrays> {
        let target = self.target();
        let sizes = super::reader::tile_sizes(&target).map_err(|error| target.locate(error))?;
        let (codebook, records) = (target.tile_array(0)?, target.tile_array(1)?);
        let first = target.record().array_range().start;
        let read = |part, range| {
            let array = match part {
                tile::Part::Bitstream => first + 2,
                tile::Part::Plane => first + 3,
            };
            target.shard().read_array(array, range)
        };
        tile::cut(&sizes, (&codebook, &records), rows, columns, read).map_err(|error| target.locate(error))
    }

    /// What the GPU needs to decode it, of a tensor in the `gap` encoding.
    #[cfg(feature = "cudarc")]
    pub(crate) fn gap_index(&self) -> Result<super::reader::GapIndex<'m>> {
        super::reader::gap_index(self).map_err(|error| self.locate(error))
    }

    /// What the GPU needs to decode it, of a tensor in the `tile` encoding.
    #[cfg(feature = "cudarc")]
    pub(crate) fn tile_index(&self) -> Result<super::reader::TileIndex<'m>> {
        super::reader::tile_index(self).map_err(|error| self.locate(error))
    }

    /// What the record of a `tile` tensor says of its sizes.
    #[cfg(feature = "cudarc")]
    pub(crate) fn tile_sizes(&self) -> Result<crate::encoding::tile::Sizes> {
        super::reader::tile_sizes(self).map_err(|error| self.locate(error))
    }

    fn slice(&self, ranges: &[Range<u64>]) -> Result<Slice> {
        self.byte_length()?;
        let dtype = self.dtype().expect("its size is known");
        Slice::new(self.name(), dtype, &self.shape(), ranges)
    }

    fn read_into(&self, slice: &Slice, out: &mut [u8]) -> Result<()> {
        let length = slice.bytes();
        if out.len() as u64 != length {
            return Err(Error::parameter(
                format!("tensor {:?} needs an output of {length} bytes, not {}", self.name(), out.len()),
                "pass a slice of the right length",
            ));
        }
        read_slice(&TensorReader::new(self)?, slice, out)
    }

    fn require_bf16(&self) -> Result<()> {
        if self.dtype() == Some(Dtype::BF16) {
            return Ok(());
        }
        let dtype = self.dtype().map_or("unknown", Dtype::name);
        Err(Error::parameter(
            format!("tensor {:?} has dtype {dtype}, not BF16", self.name()),
            "decode its bytes instead",
        ))
    }
}

/// Containers are little-endian.
fn to_native(weights: &mut [bf16]) {
    if cfg!(target_endian = "big") {
        for weight in weights {
            *weight = bf16::from_bits(weight.to_bits().swap_bytes());
        }
    }
}
