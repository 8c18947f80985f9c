//! A tensor of an open model.

use std::ops::Range;

use super::{
    Shard,
    reader::TensorArrays,
    tensor_slice::{Element, TensorSlice},
};
use crate::{
    Dtype, Error, Result, dtype,
    format::{
        Coded,
        records::{ENCODING_ALIAS, ENCODING_GAP, ENCODING_RAW, ENCODING_TILE, TensorRecord},
    },
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

    /// The type of its elements, or `None` if this version does not know it.
    pub fn dtype(&self) -> Option<Dtype> {
        Dtype::from_id(self.record().dtype.get())
    }

    /// Its dimensions, outermost first; none for a scalar.
    pub fn shape(&self) -> Vec<u64> {
        self.record().dimensions()
    }

    /// The number of its elements; 2^64 − 1 where more do not fit, which only an unknown dtype
    /// allows.
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

    /// How it is stored; [`Encoding::Unknown`] for an unknown dtype too, since nothing is known of
    /// its arrays then.
    pub fn encoding(&self) -> Encoding {
        let id = self.record().encoding.get();
        if self.dtype().is_some() { Encoding::from_id(id) } else { Encoding::Unknown(id) }
    }

    /// That its bytes are stored in a way that this version knows: before anything is allocated,
    /// since the size of a tensor that cannot be decoded is bounded by nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they are not.
    pub fn check_known(&self) -> Result<()> {
        self.target().known_dtype()?;
        match self.target().encoding() {
            Encoding::Unknown(id) => {
                Err(self.locate(Error::unsupported(format_args!("encoding {id}"), "update df11")))
            }
            _ => Ok(()),
        }
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

    /// Stored bits an element; 0 for a tensor without elements.
    pub fn bits_per_element(&self) -> f64 {
        8.0 * self.stored_bytes() as f64 / self.elements().max(1) as f64
    }

    /// The BLAKE3 hash of its decoded bytes, as stored.
    pub fn hash(&self) -> blake3::Hash {
        blake3::Hash::from_bytes(self.record().hash)
    }

    /// Compares the hash of bytes that should be its own.
    pub(crate) fn check_hash(&self, hash: blake3::Hash) -> Result<()> {
        if hash == self.hash() {
            return Ok(());
        }
        Err(self.shard.wrong_hash(format_args!("tensor {:?}", self.name())))
    }

    /// A slice of it, as indexing with ranges gives it: of the first dimensions the indices in
    /// `ranges`, of the others all. The one index of a scalar is 0. Decodes nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`] for more ranges than dimensions, for indices that do not exist, and for
    /// elements that do not fill whole bytes; [`Error::Unsupported`] for an unknown dtype.
    pub fn slice(&self, ranges: &[Range<u64>]) -> Result<TensorSlice<'m>> {
        TensorSlice::new(*self, ranges)
    }

    /// All of it: weights of a BF16 tensor (`Vec<bf16>`), or bytes of any (`Vec<u8>`),
    /// little-endian, as in the original file.
    ///
    /// # Errors
    /// As [`TensorSlice::decode`].
    pub fn decode<E: Element>(&self) -> Result<Vec<E>> {
        self.slice(&[])?.decode()
    }

    /// As [`Tensor::decode`], into memory of the caller: as many elements, or bytes, as it has.
    ///
    /// # Errors
    /// As [`TensorSlice::decode_into`].
    pub fn decode_into<E: Element>(&self, out: &mut [E]) -> Result<()> {
        self.slice(&[])?.decode_into(out)
    }

    /// Bytes that are decoded together: ranges that begin and end at multiples of it cost the
    /// least.
    pub(crate) fn grain(&self) -> u64 {
        self.target().coded().ok().flatten().map_or(2, |sizes| sizes.grain())
    }

    /// The sizes of a coded tensor, which is no alias; `None` for all others.
    pub(crate) fn coded(&self) -> Result<Option<Coded>> {
        if self.dtype().is_none() {
            return Ok(None);
        }
        Coded::of(self.shard.directory(), self.record()).map_err(|error| self.locate(error))
    }

    /// Its arrays, or its target's.
    pub(crate) fn arrays(&self) -> TensorArrays<'m> {
        TensorArrays::of(self)
    }
}
