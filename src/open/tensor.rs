//! A tensor of an open model, and the stored arrays of a matrix in tiles, for kernels and bindings.

use std::{borrow::Cow, ops::Range};

use zerocopy::IntoBytes;

use super::shard::Shard;
use crate::{
    Dtype, Error, Result, dtype,
    encoding::{
        stored::ReadBase,
        tile::{self, OwnedArrays, TileSizes},
    },
    float::FloatSplit,
    format::{
        Coded,
        records::{
            ENCODING_ALIAS, ENCODING_DELTA, ENCODING_FLOAT, ENCODING_GAP, ENCODING_RAW,
            ENCODING_TILE, TensorRecord,
        },
    },
};

/// How a tensor is stored (spec/format.md, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// A reference to another tensor with the same bytes.
    Alias,
    /// The original bytes.
    Raw,
    /// Huffman-coded exponents with a gap array.
    Gap,
    /// Huffman-coded pairs of exponents, in tiles.
    Tile,
    /// Tiles of a float other than BF16: FP8, F16 or F32.
    Float,
    /// Differences from the tensor of the same name in another model, the base.
    Delta,
    /// An encoding that this version does not know; the tensor cannot be decoded.
    Unknown(u32),
}

impl Encoding {
    fn from_id(id: u32) -> Self {
        match id {
            ENCODING_ALIAS => Self::Alias,
            ENCODING_RAW => Self::Raw,
            ENCODING_GAP => Self::Gap,
            ENCODING_TILE => Self::Tile,
            ENCODING_FLOAT => Self::Float,
            ENCODING_DELTA => Self::Delta,
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
            Self::Float => "float",
            Self::Delta => "delta",
            Self::Unknown(_) => "unknown",
        }
    }
}

/// A tensor of an open model: its description, and access to its bytes. Cheap to copy.
///
/// Decoding works on all threads of the current rayon pool and checks the checksum of each chunk
/// that it reads for the first time.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// let model = df11::open(&path)?;
/// let tensor = model.tensor("model.embed_tokens.weight")?;
/// let weights: Vec<half::bf16> = tensor.decode()?;
/// let rows: Vec<half::bf16> = tensor.slice(&[10..13])?.decode()?;
/// assert_eq!(rows, weights[10 * tensor.shape()[1] as usize..][..rows.len()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'m> {
    shard: &'m Shard,
    index: usize,
}

impl Shard {
    /// Its tensors, ascending by name.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        (0..self.directory.tensors.len()).map(|index| Tensor::new(self, index))
    }

    /// The tensor at this index of its directory.
    #[cfg(feature = "cudarc")]
    pub(crate) fn tensor_at(&self, index: usize) -> Tensor<'_> {
        Tensor::new(self, index)
    }

    /// The tensor with this name.
    pub(crate) fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.directory.find_tensor(name).map(|index| Tensor::new(self, index))
    }
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

    /// The index in the directory of the first array that holds its bytes.
    pub(crate) fn first_array(&self) -> usize {
        self.target().record().array_range().start
    }

    /// The same error, with this tensor and its container, unless it names its place in that.
    pub(crate) fn locate(&self, error: Error) -> Error {
        if error.is_in_file(self.shard.path()) {
            return error;
        }
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

    /// The type of its elements, or `None` if this version does not know it.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::from_id(self.record().dtype.get())
    }

    /// Its dimensions, outermost first; none for a scalar.
    pub fn shape(&self) -> Vec<u64> {
        self.record().dimensions()
    }

    /// The number of its elements; 2^64 − 1 if there are more, which only an unknown dtype allows.
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

    pub(super) fn known_dtype(&self) -> Result<Dtype> {
        let id = self.record().dtype.get();
        self.dtype().ok_or_else(|| {
            self.locate(Error::unsupported(format_args!("dtype {id}"), "update df11"))
        })
    }

    /// How it is stored; [`Encoding::Unknown`] also for an unknown dtype, because its arrays are
    /// unknown then.
    pub fn encoding(&self) -> Encoding {
        let id = self.record().encoding.get();
        if self.dtype().is_some() { Encoding::from_id(id) } else { Encoding::Unknown(id) }
    }

    /// Checks that this version can decode its bytes, and that its base is available if it needs
    /// one. Call it before allocating, because nothing bounds the size of a tensor that cannot be
    /// decoded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::NoBase`] if not.
    pub fn check_known(&self) -> Result<()> {
        self.target().known_dtype()?;
        match self.target().encoding() {
            Encoding::Unknown(id) => {
                Err(self.locate(Error::unsupported(format_args!("encoding {id}"), "update df11")))
            }
            Encoding::Delta => {
                let Self { shard, index } = self.target();
                let checked = shard.bases().and_then(|bases| bases.check(shard, index));
                checked.map_err(|error| self.locate(error))
            }
            _ => Ok(()),
        }
    }

    /// The hash of its base, as stored; of a tensor in `delta`.
    pub(super) fn base_hash(&self) -> blake3::Hash {
        let bytes = self.record().parameters.as_bytes().try_into();
        blake3::Hash::from_bytes(bytes.expect("four numbers are 32 bytes"))
    }

    /// Prepares its base; of a tensor in `delta`.
    pub(super) fn prepare_base(&self) -> Result<Box<dyn ReadBase + 'm>> {
        let Self { shard, index } = self.target();
        shard.bases()?.prepare(shard, index)
    }

    /// The tensor that holds its bytes: itself, except for an alias.
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

    /// Stored bits per element; 0 for a tensor without elements.
    pub fn bits_per_element(&self) -> f64 {
        8.0 * self.stored_bytes() as f64 / self.elements().max(1) as f64
    }

    /// The BLAKE3 hash of its decoded bytes, as stored.
    pub fn hash(&self) -> blake3::Hash {
        blake3::Hash::from_bytes(self.record().hash)
    }

    /// Compares the hash of bytes that should be its own.
    pub(crate) fn check_hash(&self, hash: blake3::Hash) -> Result<()> {
        self.shard.check_hash(format_args!("tensor {:?}", self.name()), hash, self.record().hash)
    }

    /// The number of bytes that are decoded together: ranges that begin and end at multiples of it
    /// cost the least.
    pub(crate) fn grain(&self) -> u64 {
        self.target().coded().ok().flatten().map_or(2, |sizes| sizes.grain())
    }

    /// The sizes of a coded tensor; `None` for aliases and all others.
    pub(crate) fn coded(&self) -> Result<Option<Coded>> {
        if self.dtype().is_none() {
            return Ok(None);
        }
        Coded::of(self.shard.directory(), self.record()).map_err(|error| self.locate(error))
    }
}

/// A matrix of a container in tiles of 32 x 256, of BF16 or another float, and its four arrays:
/// codebook, records, bitstream, plane. An alias has the arrays of its target. Cheap to make.
#[derive(Clone, Debug)]
pub struct Tiles<'m> {
    /// The tensor that has the arrays.
    target: Tensor<'m>,
    sizes: TileSizes,
}

impl<'m> Tiles<'m> {
    /// The tiles of a tensor; `None` unless it is such a matrix.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if its record contradicts itself.
    pub fn of(tensor: &Tensor<'m>) -> Result<Option<Self>> {
        let target = tensor.target();
        let Some(Coded::Tile(sizes) | Coded::Float(sizes)) = target.coded()? else {
            return Ok(None);
        };
        let is_matrix = sizes.geometry().is_matrix_of(&tensor.shape());
        Ok(is_matrix.then_some(Self { target, sizes }))
    }

    /// Its rows and columns. Columns are the last dimension, or the product of some last
    /// dimensions.
    pub fn shape(&self) -> (u64, u64) {
        let geometry = self.sizes.geometry();
        (geometry.rows(), geometry.columns())
    }

    /// How its weights are split.
    pub const fn split(&self) -> FloatSplit {
        self.sizes.split()
    }

    /// The lengths of its arrays, in bytes.
    pub fn array_lengths(&self) -> [u64; 4] {
        let directory = self.target.shard().directory();
        self.arrays().map(|array| directory.arrays[array].length.get())
    }

    /// One of its arrays, checked against its checksums. If the container is mapped, the array is
    /// part of the mapping.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a checksum differs; [`Error::Io`].
    ///
    /// # Panics
    /// For an index from 4 on.
    pub fn array(&self, index: usize) -> Result<Cow<'m, [u8]>> {
        self.target.shard().read_whole_array(self.arrays()[index])
    }

    /// Addresses and lengths of all four arrays in the mapping of the container, unread and
    /// unchecked. If they are fetched over a network, they have arrived when [`check`](Self::check)
    /// returns. `None` if the container is not mapped.
    pub fn places(&self) -> Option<[(usize, usize); 4]> {
        let shard = self.target.shard();
        let address = shard.address()?;
        Some(self.arrays().map(|array| {
            let Range { start, end } = shard.place_of(array);
            (address + start as usize, (end - start) as usize)
        }))
    }

    /// The most bytes of its bitstream that one tile takes; reads its records.
    ///
    /// # Errors
    /// Like [`array`](Self::array).
    pub fn staged_bytes(&self) -> Result<u32> {
        Ok(tile::staged_bytes(&self.array(1)?))
    }

    /// Checks what kernels rely on: the checksums of its arrays, its codebook, and that the offsets
    /// of its tiles ascend.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; [`Error::Io`].
    pub fn check(&self) -> Result<()> {
        self.arrays().into_iter().try_for_each(|array| self.target.shard().check_array(array))?;
        let (codebook, records) = (self.array(0)?, self.array(1)?);
        tile::Codebook::from_bytes(&codebook)
            .and_then(|_| tile::check_offsets(&self.sizes, &records))
            .map_err(|error| self.target.locate(error))
    }

    /// Some of its rows and columns as a separate matrix: rows from a multiple of 32 to a multiple
    /// of 32 or to the end, columns likewise with 256. Decodes nothing, and reads only the chunks
    /// of 1 MiB that hold some of it, whose checksums are checked.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows or columns; [`Error::Corrupt`], [`Error::Io`].
    pub fn cut(&self, rows: Range<u64>, columns: Range<u64>) -> Result<OwnedArrays> {
        tile::cut(&self.sizes, &self.target, rows, columns)
            .map_err(|error| self.target.locate(error))
    }

    /// The lengths of the arrays of [`cut`](Self::cut), in bytes; reads its records alone.
    ///
    /// # Errors
    /// Like [`cut`](Self::cut).
    pub fn cut_lengths(&self, rows: Range<u64>, columns: Range<u64>) -> Result<[u64; 4]> {
        tile::cut_lengths(&self.sizes, &self.target, rows, columns)
            .map_err(|error| self.target.locate(error))
    }

    /// Their indices in the directory.
    fn arrays(&self) -> [usize; 4] {
        [0, 1, 2, 3].map(|at| self.target.first_array() + at)
    }

    /// The tensor that has the arrays.
    #[cfg(feature = "cudarc")]
    pub(crate) fn target(&self) -> &Tensor<'m> {
        &self.target
    }
}
