//! The records of header and directory (2, 3): their fields and nothing else; and places in lists.

use crate::{Error, Kind, Result, require};

/// The smallest multiple of `a` that is at least `x` (1). Sums of u64 numbers in u128 do not
/// overflow, and no u64 field equals one that exceeds 2^64 - 1.
pub(crate) fn align(x: u128, a: u64) -> u128 {
    x.next_multiple_of(a.into())
}

/// The `length` items from `offset` on.
pub(crate) fn slice<T>(items: &[T], offset: u64, length: u64) -> Result<&[T]> {
    let end = offset.checked_add(length).filter(|&end| end <= items.len() as u64).ok_or(OUTSIDE)?;
    Ok(&items[offset as usize..end as usize])
}

/// The item with this index.
pub(crate) fn item<T>(items: &[T], index: u64) -> Result<&T> {
    Ok(&slice(items, index, 1)?[0])
}

const OUTSIDE: Error =
    Error { kind: Kind::Corrupt, message: "an index, an offset or a count leads outside" };

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
            let (first, rest) = bytes.split_first_chunk().ok_or(OUTSIDE)?;
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
        require(count <= bytes.len() as u64 / T::SIZE, "3: a list exceeds the directory")?;
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

// Fields that start with an underscore have no rule that a reader without BLAKE3 could check.
records! {
    Header {
        _magic: [u8; 8], _version_major: u16, _version_minor: u16, state: u32,
        incompatible_features: u64, _compatible_features: u64, file_length: u64,
        directory_offset: u64, directory_length: u64, directory_checksum: u32, header_checksum: u32,
    }
    Directory {
        shard_index: u64, shard_count: u64, _identity: [u8; 32], files: Vec<File>,
        blocks: Vec<Name>, sections: Vec<Section>, tensors: Vec<Tensor>, arrays: Vec<Array>,
        checksums: Vec<u32>, metadata: Vec<Entry>, text: Vec<u8>,
    }
    File {
        kind: u32, reserved: u32, path: Name, length: u64, _hash: [u8; 32], first_array: u64,
        array_count: u64,
    }
    Name { offset: u64, length: u64 }
    Section { kind: u32, reserved: u32, block: u64, offset: u64, length: u64 }
    Tensor {
        name: Name, dtype: u32, encoding: u32, block: u64, file: u64, file_offset: u64,
        dimension_count: u64, shape: [u64; 8], first_array: u64, array_count: u64,
        parameters: [u64; 4], hash: [u8; 32],
    }
    Array { section: u64, offset: u64, length: u64 }
    Entry { key: Name, value: Name }
}
