//! The directory: everything that a container says about itself (spec/format.md, section 3).
//!
//! ```text
//! shard_index | shard_count | identity | files | blocks | sections | tensors | arrays | checksums
//!     u64           u64         32 B      list     list      list       list     list      list
//! | metadata | text
//!     list     list
//! ```
//! A list is a u64 count and that many fixed-width records. bincode's legacy configuration reads
//! and writes the same bytes (`tests/spec/bincode_witness.rs`).

use std::ops::Deref;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use super::records::{
    ArrayRecord, BlockRecord, ENCODING_DELTA, ENCODING_FLOAT, ENCODING_GAP, ENCODING_TILE,
    FILE_WEIGHTS, FileRecord, MetadataRecord, SectionRecord, TensorRecord, record,
};
use crate::{
    Dtype, Error, Result,
    constants::{CHECKSUM_CHUNK_BYTES, VERSION_MINOR},
    dtype,
    encoding::{delta, delta::DeltaSizes, gap::GapSizes, stored::CodedSizes, tile},
    float::FloatSplit,
};

record! {
    /// The fixed-width start of the directory.
    ShardRecord {
        /// Index of this container among the shards of its model.
        shard_index: U64,
        /// The number of shards of the model.
        shard_count: U64,
        /// The model's identity (section 8).
        identity: [u8; 32],
    }
}

impl ShardRecord {
    /// Makes the record of shard `shard_index` of `shard_count`.
    pub fn new(shard_index: u64, shard_count: u64, identity: [u8; 32]) -> Self {
        Self { shard_index: shard_index.into(), shard_count: shard_count.into(), identity }
    }
}

/// A container's directory.
///
/// [`Directory::parse`] returns only validated ones: every index, offset and name in it can be used
/// as it is. A directory that was put together by hand is validated when its bytes are parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// Which shard of which model this is.
    pub shard: ShardRecord,
    /// Original files: weights files, stored side files, and those that lie beside the container.
    pub files: Vec<FileRecord>,
    /// Blocks, in the order in which the model runs them.
    pub blocks: Vec<BlockRecord>,
    /// Sections, in the order of the file.
    pub sections: Vec<SectionRecord>,
    /// Tensors, ascending by name.
    pub tensors: Vec<TensorRecord>,
    /// Arrays of files, then of tensors.
    pub arrays: Vec<ArrayRecord>,
    /// CRC-32 of every chunk of every section.
    pub checksums: Vec<U32>,
    /// Keys and values for runtimes, ascending by key.
    pub metadata: Vec<MetadataRecord>,
    /// Paths, names, keys and values, back to back.
    pub text: Vec<u8>,
}

impl Directory {
    /// The directory's bytes. Nothing is validated.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.shard.as_bytes().to_vec();
        put_list(&mut bytes, &self.files);
        put_list(&mut bytes, &self.blocks);
        put_list(&mut bytes, &self.sections);
        put_list(&mut bytes, &self.tensors);
        put_list(&mut bytes, &self.arrays);
        put_list(&mut bytes, &self.checksums);
        put_list(&mut bytes, &self.metadata);
        put_list(&mut bytes, &self.text);
        bytes
    }

    /// The minor version of the format that first had all that is in it.
    pub fn version_minor(&self) -> u16 {
        let newer = [ENCODING_FLOAT, ENCODING_DELTA];
        let is_new = |tensor: &TensorRecord| newer.contains(&tensor.encoding.get());
        if self.tensors.iter().any(is_new) { VERSION_MINOR } else { 0 }
    }

    /// A path or name in text. Right for the fields of a validated directory; empty for others.
    pub fn text_at(&self, offset: U64, length: U64) -> &str {
        let start = offset.get() as usize;
        let range = start..start.saturating_add(length.get() as usize);
        self.text.get(range).and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default()
    }

    /// The name of a tensor.
    pub fn tensor_name(&self, tensor: &TensorRecord) -> &str {
        self.text_at(tensor.name_offset, tensor.name_length)
    }

    /// The name of a block.
    pub fn block_name(&self, block: &BlockRecord) -> &str {
        self.text_at(block.name_offset, block.name_length)
    }

    /// The path of an original file.
    pub fn file_path(&self, file: &FileRecord) -> &str {
        self.text_at(file.path_offset, file.path_length)
    }

    /// Keys and values of the metadata, ascending by key.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.metadata.iter().map(|entry| {
            let key = self.text_at(entry.key_offset, entry.key_length);
            (key, self.text_at(entry.value_offset, entry.value_length))
        })
    }

    /// The number of checksums of all sections.
    pub fn chunk_count(&self) -> u64 {
        self.sections.iter().map(|section| chunk_count(section.length.get())).sum()
    }

    /// The index of the tensor with this name, by binary search.
    pub fn find_tensor(&self, name: &str) -> Option<usize> {
        self.tensors
            .binary_search_by(|tensor| self.tensor_name(tensor).as_bytes().cmp(name.as_bytes()))
            .ok()
    }
}

fn put_list<T: IntoBytes + Immutable>(bytes: &mut Vec<u8>, records: &[T]) {
    bytes.extend_from_slice(&(records.len() as u64).to_le_bytes());
    bytes.extend_from_slice(records.as_bytes());
}

/// The number of checksums of a section with this length in bytes.
pub const fn chunk_count(section_length: u64) -> u64 {
    section_length.div_ceil(CHECKSUM_CHUNK_BYTES)
}

/// The sizes of a coded tensor, in any of the encodings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Coded {
    Gap(GapSizes),
    Tile(tile::TileSizes),
    /// Tiles of other floats than BF16.
    Float(tile::TileSizes),
    /// Differences from a base.
    Delta(DeltaSizes),
}

impl Deref for Coded {
    type Target = dyn CodedSizes;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Gap(sizes) => sizes,
            Self::Tile(sizes) | Self::Float(sizes) => sizes,
            Self::Delta(sizes) => sizes,
        }
    }
}

impl Coded {
    /// Whether tensors of the encoding with this number are coded.
    pub(crate) fn is_coded(encoding: u32) -> bool {
        [ENCODING_GAP, ENCODING_TILE, ENCODING_FLOAT, ENCODING_DELTA].contains(&encoding)
    }

    /// A tensor's split, if tensors of its dtype can have its encoding, which is a coded one.
    pub(crate) fn split(tensor: &TensorRecord) -> Option<FloatSplit> {
        let dtype = Dtype::from_id(tensor.dtype.get())?;
        match tensor.encoding.get() {
            ENCODING_FLOAT => FloatSplit::of(dtype, tensor.parameters[3].get()),
            _ => (dtype == Dtype::BF16).then_some(FloatSplit::BF16),
        }
    }

    /// Reads the sizes of a tensor, whose shape must exist, from its record; `None` if it is not
    /// coded.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) and [`Error::Limit`](crate::Error::Limit) if no
    /// such tensor can be.
    pub(crate) fn of(directory: &Directory, tensor: &TensorRecord) -> Result<Option<Self>> {
        let encoding = tensor.encoding.get();
        if !Self::is_coded(encoding) {
            return Ok(None);
        }
        let [parameters @ .., zero_bits] = tensor.parameters.map(U64::get);
        let elements = dtype::elements(&tensor.dimensions())?;
        let arrays = &directory.arrays[tensor.array_range()];
        let length = |at: usize| arrays.get(at).map_or(0, |array| array.length.get());
        let codebook = length(0);
        Ok(Some(match encoding {
            ENCODING_GAP => Self::Gap(GapSizes::of_record(parameters, elements, codebook)?),
            ENCODING_TILE => {
                Self::Tile(tile::TileSizes::of_record(parameters, elements, codebook)?)
            }
            ENCODING_FLOAT => {
                let split = Self::split(tensor).ok_or_else(|| {
                    let problem = format!("no such float has {zero_bits} zero bits");
                    Error::corrupt("float layout", 0, problem)
                })?;
                let sizes = tile::TileSizes::of_record(parameters, elements, codebook)?;
                Self::Float(sizes.split_as(split))
            }
            ENCODING_DELTA => {
                let base: Vec<u8> = tensor.parameters.as_bytes().to_vec();
                let base = base.try_into().expect("four numbers are 32 bytes");
                let of = (&tensor.dimensions()[..], elements);
                Self::Delta(DeltaSizes::new(base, of, codebook, length(delta::BITSTREAM))?)
            }
            _ => return Ok(None),
        }))
    }

    /// Its number.
    pub(crate) fn encoding(&self) -> u32 {
        match self {
            Self::Gap(_) => ENCODING_GAP,
            Self::Tile(_) => ENCODING_TILE,
            Self::Float(_) => ENCODING_FLOAT,
            Self::Delta(_) => ENCODING_DELTA,
        }
    }
}

/// An original file as the identity sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdentifiedFile<'a> {
    /// Its path.
    pub path: &'a str,
    /// Whether it is a weights file.
    pub is_weights: bool,
    /// Its length in bytes.
    pub length: u64,
    /// Its BLAKE3 hash.
    pub hash: [u8; 32],
}

impl<'a> IdentifiedFile<'a> {
    /// The files of a directory, in its order.
    pub fn of(directory: &'a Directory) -> impl Iterator<Item = Self> {
        let file = |file: &FileRecord| Self {
            path: directory.file_path(file),
            is_weights: file.kind == FILE_WEIGHTS,
            length: file.length.get(),
            hash: file.hash,
        };
        directory.files.iter().map(file)
    }
}

/// The hash by which the shards of a model know each other: over all original files, weights and
/// side files alike, wherever they are stored. They come in any order.
pub fn identity<'a>(files: impl Iterator<Item = IdentifiedFile<'a>>) -> [u8; 32] {
    let mut files: Vec<_> = files.collect();
    files.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(&[u8::from(file.is_weights)]);
        hasher.update(&(file.path.len() as u64).to_le_bytes());
        hasher.update(file.path.as_bytes());
        hasher.update(&file.length.to_le_bytes());
        hasher.update(&file.hash);
    }
    *hasher.finalize().as_bytes()
}
