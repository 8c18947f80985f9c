//! Bytes become a directory: read, then validated.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned, little_endian::U64};

use super::{directory::Directory, validate::validate};
use crate::{Error, Result};

struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl Cursor<'_> {
    fn corrupt(&self, problem: impl std::fmt::Display) -> Error {
        Error::corrupt("directory", self.position as u64, problem)
    }

    fn record<T: FromBytes + Unaligned + Immutable + KnownLayout>(
        &mut self,
        name: &str,
    ) -> Result<T> {
        let rest = &self.bytes[self.position..];
        let (record, _) = T::read_from_prefix(rest)
            .map_err(|_| self.corrupt(format_args!("it ends within {name}")))?;
        self.position += size_of::<T>();
        Ok(record)
    }

    /// A list. Nothing is allocated before the count is known to fit.
    fn list<T>(&mut self, name: &str) -> Result<Vec<T>>
    where
        T: FromBytes + Unaligned + Immutable + KnownLayout + Clone,
    {
        let count = self.record::<U64>(name)?.get();
        let rest = &self.bytes[self.position..];
        let most = rest.len() / size_of::<T>();
        let count =
            usize::try_from(count).ok().filter(|&count| count <= most).ok_or_else(|| {
                self.corrupt(format_args!("it says {count} {name}, and there is room for {most}"))
            })?;
        let (records, _) = <[T]>::ref_from_prefix_with_elems(rest, count)
            .map_err(|_| self.corrupt(format_args!("it ends within {name}")))?;
        self.position += size_of_val(records);
        Ok(records.to_vec())
    }
}

impl Directory {
    /// Reads and validates a directory. The cost is linear in its length.
    ///
    /// `directory_offset` is where the directory starts in the container, in bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Limit`] or [`Error::Unsupported`] as section 9 of the spec
    /// says, step 9.
    pub fn parse(bytes: &[u8], directory_offset: u64) -> Result<Self> {
        let mut cursor = Cursor { bytes, position: 0 };
        let directory = Self {
            shard: cursor.record("its first fields")?,
            files: cursor.list("files")?,
            blocks: cursor.list("blocks")?,
            sections: cursor.list("sections")?,
            tensors: cursor.list("tensors")?,
            arrays: cursor.list("arrays")?,
            checksums: cursor.list("checksums")?,
            metadata: cursor.list("entries of metadata")?,
            text: cursor.list("bytes of text")?,
        };
        if cursor.position != bytes.len() {
            let left = bytes.len() - cursor.position;
            return Err(cursor.corrupt(format_args!("{left} bytes are left over")));
        }
        validate(&directory, directory_offset)?;
        Ok(directory)
    }
}
