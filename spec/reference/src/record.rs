//! Checked arithmetic (1), and the records of header and directory (2, 3): their fields and nothing else.

use crate::Kind::{Corrupt, Limit};
use crate::Result;

pub(crate) fn add(a: u64, b: u64) -> Result<u64> {
    a.checked_add(b).ok_or_else(|| Limit.error("1: a sum exceeds 2^64 - 1"))
}

pub(crate) fn mul(a: u64, b: u64) -> Result<u64> {
    a.checked_mul(b).ok_or_else(|| Limit.error("1: a product exceeds 2^64 - 1"))
}

pub(crate) fn align(x: u64, alignment: u64) -> Result<u64> {
    x.checked_next_multiple_of(alignment).ok_or_else(|| Limit.error("1: an alignment exceeds 2^64 - 1"))
}

/// The `length` items from `offset` on.
pub(crate) fn slice<T>(items: &[T], offset: u64, length: u64) -> Result<&[T]> {
    let range = usize::try_from(offset).ok().zip(usize::try_from(add(offset, length)?).ok());
    let slice = range.and_then(|(start, end)| items.get(start..end));
    slice.ok_or_else(|| Corrupt.error("an offset and a length lead outside"))
}

/// The item with this index.
pub(crate) fn item<T>(items: &[T], index: u64) -> Result<&T> {
    let item = usize::try_from(index).ok().and_then(|index| items.get(index));
    item.ok_or_else(|| Corrupt.error("an index leads outside"))
}

/// Something with a fixed number of bytes in a file; a list has one as well, that of its count.
pub(crate) trait Field: Sized {
    const SIZE: u64;
    /// Reads it from the start of `bytes`, and leaves what follows.
    fn read(bytes: &mut &[u8]) -> Result<Self>;
}

macro_rules! integers {
    ($($integer:ty)*) => { $(impl Field for $integer {
        const SIZE: u64 = size_of::<Self>() as u64;
        fn read(bytes: &mut &[u8]) -> Result<Self> {
            let (first, rest) = bytes.split_first_chunk().ok_or_else(|| Corrupt.error("3: a field ends outside"))?;
            *bytes = rest;
            Ok(Self::from_le_bytes(*first))
        }
    })* };
}

integers! { u8 u16 u32 u64 }

impl<T: Field + Copy + Default, const N: usize> Field for [T; N] {
    const SIZE: u64 = N as u64 * T::SIZE;
    fn read(bytes: &mut &[u8]) -> Result<Self> {
        let mut array = [T::default(); N];
        array.iter_mut().try_for_each(|item| T::read(bytes).map(|value| *item = value))?;
        Ok(array)
    }
}

/// A *list* (3). Its count is checked against the bytes that remain before anything is allocated.
impl<T: Field> Field for Vec<T> {
    const SIZE: u64 = u64::SIZE;
    fn read(bytes: &mut &[u8]) -> Result<Self> {
        let count = u64::read(bytes)?;
        Corrupt.unless(count <= bytes.len() as u64 / T::SIZE, "3: a list is longer than the directory")?;
        (0..count).map(|_| T::read(bytes)).collect()
    }
}

macro_rules! records {
    ($($record:ident { $($field:ident: $type:ty),* $(,)? })*) => { $(
        #[derive(Debug)]
        pub(crate) struct $record { $(pub(crate) $field: $type),* }
        impl Field for $record {
            const SIZE: u64 = 0 $(+ <$type>::SIZE)*;
            fn read(bytes: &mut &[u8]) -> Result<Self> {
                Ok(Self { $($field: <$type>::read(bytes)?),* })
            }
        }
    )* };
}

// Fields that start with an underscore have no rule that a reader without BLAKE3 could check, or are checked before the record.
records! {
    Header {
        _magic: [u8; 8], _version_major: u16, _version_minor: u16, state: u32, incompatible_features: u64,
        _compatible_features: u64, file_length: u64, directory_offset: u64, directory_length: u64,
        directory_checksum: u32, header_checksum: u32,
    }
    Directory {
        shard_index: u64, shard_count: u64, _identity: [u8; 32], files: Vec<File>, blocks: Vec<Name>,
        sections: Vec<Section>, tensors: Vec<Tensor>, arrays: Vec<Array>, checksums: Vec<u32>, text: Vec<u8>,
    }
    File {
        kind: u32, reserved: u32, path: Name, length: u64, _hash: [u8; 32], first_array: u64, array_count: u64,
    }
    Name { offset: u64, length: u64 }
    Section { kind: u32, reserved: u32, block: u64, offset: u64, length: u64 }
    Tensor {
        name: Name, dtype: u32, encoding: u32, block: u64, file: u64, file_offset: u64, dimension_count: u64,
        shape: [u64; 8], first_array: u64, array_count: u64, parameters: [u64; 4], hash: [u8; 32],
    }
    Array { section: u64, offset: u64, length: u64 }
}
