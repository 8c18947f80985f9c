//! The records of the directory (spec/format.md, section 3), as plain structs over bytes.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::constants::NONE;
pub use crate::encoding::stored::{
    SECTION_BITSTREAM, SECTION_CODEBOOK, SECTION_INDEX, SECTION_PLANE,
};

/// `kind` of a [`FileRecord`]: an original safetensors file.
pub const FILE_WEIGHTS: u32 = 0;
/// `kind` of a [`FileRecord`]: any other file, stored in the container.
pub const FILE_SIDE: u32 = 1;
/// `kind` of a [`FileRecord`]: any other file, which lies beside the container.
pub const FILE_BESIDE: u32 = 2;

/// `kind` of a [`SectionRecord`]: tensors stored raw.
pub const SECTION_RAW: u32 = 5;
/// `kind` of a [`SectionRecord`]: prefixes of weights files.
pub const SECTION_PREFIX: u32 = 6;
/// `kind` of a [`SectionRecord`]: side files.
pub const SECTION_SIDE: u32 = 7;
/// Section kinds from here on may be ignored by a reader that does not know them.
pub const SECTION_SKIPPABLE: u32 = 1 << 31;

/// `encoding` of a [`TensorRecord`]: the bytes of another tensor.
pub const ENCODING_ALIAS: u32 = 0;
/// `encoding` of a [`TensorRecord`]: the bytes as they are.
pub const ENCODING_RAW: u32 = 1;
/// `encoding` of a [`TensorRecord`]: Huffman-coded exponents with a gap array.
pub const ENCODING_GAP: u32 = 2;
/// `encoding` of a [`TensorRecord`]: Huffman-coded pairs of exponents, in tiles.
pub const ENCODING_TILE: u32 = 3;
/// `encoding` of a [`TensorRecord`]: as tiles, of another float than BF16.
pub const ENCODING_FLOAT: u32 = 4;
/// `encoding` of a [`TensorRecord`]: differences from a tensor of another model.
pub const ENCODING_DELTA: u32 = 5;

/// The name of a section kind of this version, or `None`.
pub const fn section_name(kind: u32) -> Option<&'static str> {
    Some(match kind {
        SECTION_CODEBOOK => "codebook",
        SECTION_INDEX => "index",
        SECTION_BITSTREAM => "bitstream",
        SECTION_PLANE => "plane",
        SECTION_RAW => "raw",
        SECTION_PREFIX => "prefix",
        SECTION_SIDE => "side",
        _ => return None,
    })
}

macro_rules! record {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$field_about])* pub $field: $type,)* }

        impl $name {
            /// Name, offset and size in bytes of every field.
            pub const FIELDS: &[(&str, usize, usize)] =
                &[$((
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    size_of::<$type>(),
                )),*];
        }
    };
}

pub(super) use record;

record! {
    /// An original file of the model.
    FileRecord {
        /// [`FILE_WEIGHTS`], [`FILE_SIDE`] or [`FILE_BESIDE`].
        kind: U32,
        /// Zero.
        reserved: U32,
        /// Offset of the path in text, in bytes.
        path_offset: U64,
        /// Length of the path, in bytes.
        path_length: U64,
        /// Length of the original file, in bytes.
        length: U64,
        /// BLAKE3 hash of the original file.
        hash: [u8; 32],
        /// Index of its array.
        first_array: U64,
        /// 1, or 0 for a side file that is empty or lies beside the container.
        array_count: U64,
    }
}

record! {
    /// A block of tensors.
    BlockRecord {
        /// Offset of the name in text, in bytes.
        name_offset: U64,
        /// Length of the name, in bytes.
        name_length: U64,
    }
}

record! {
    /// A section.
    SectionRecord {
        /// One of the `SECTION_` constants.
        kind: U32,
        /// Zero.
        reserved: U32,
        /// Index of its block, or [`NONE`].
        block: U64,
        /// Offset in the file, in bytes.
        offset: U64,
        /// Length, in bytes.
        length: U64,
    }
}

record! {
    /// A tensor.
    TensorRecord {
        /// Offset of the name in text, in bytes.
        name_offset: U64,
        /// Length of the name, in bytes.
        name_length: U64,
        /// Id of a [`Dtype`](crate::Dtype).
        dtype: U32,
        /// One of the `ENCODING_` constants.
        encoding: U32,
        /// Index of its block.
        block: U64,
        /// Index of the weights file that it came from.
        file: U64,
        /// Where it starts in that file, in bytes.
        file_offset: U64,
        /// The number of dimensions.
        dimension_count: U64,
        /// The dimensions, outermost first; zero from `dimension_count` on.
        shape: [U64; 8],
        /// Index of its first array.
        first_array: U64,
        /// The number of its arrays.
        array_count: U64,
        /// Parameters of the encoding; otherwise zero.
        parameters: [U64; 4],
        /// BLAKE3 hash of the decoded bytes.
        hash: [u8; 32],
    }
}

record! {
    /// A run of bytes in a section.
    ArrayRecord {
        /// Index of its section.
        section: U64,
        /// Offset in the section, in bytes.
        offset: U64,
        /// Length, in bytes.
        length: U64,
    }
}

record! {
    /// An entry of the metadata: a key and its value.
    MetadataRecord {
        /// Offset of the key in text, in bytes.
        key_offset: U64,
        /// Length of the key, in bytes.
        key_length: U64,
        /// Offset of the value in text, in bytes.
        value_offset: U64,
        /// Length of the value, in bytes.
        value_length: U64,
    }
}

impl SectionRecord {
    /// The index of its block, if it belongs to one.
    pub fn block_index(&self) -> Option<u64> {
        Some(self.block.get()).filter(|&block| block != NONE)
    }

    /// Where it ends in the file, in bytes. Right for validated records; saturates for others.
    pub fn end(&self) -> u64 {
        self.offset.get().saturating_add(self.length.get())
    }
}

impl TensorRecord {
    /// The dimensions. Right for validated records; the first eight for others.
    pub fn dimensions(&self) -> Vec<u64> {
        let count = self.dimension_count.get().min(self.shape.len() as u64) as usize;
        self.shape[..count].iter().map(|dimension| dimension.get()).collect()
    }

    /// The range of its arrays in the directory's list. Right for validated records; empty for
    /// others.
    pub fn array_range(&self) -> std::ops::Range<usize> {
        range(self.first_array, self.array_count)
    }
}

impl FileRecord {
    /// The range of its arrays in the directory's list. Right for validated records; empty for
    /// others.
    pub fn array_range(&self) -> std::ops::Range<usize> {
        range(self.first_array, self.array_count)
    }
}

fn range(first: U64, count: U64) -> std::ops::Range<usize> {
    let first = first.get() as usize;
    first..first.saturating_add(count.get() as usize)
}
