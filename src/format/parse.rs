//! Bytes become a directory: read, then validated.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned, little_endian::U64};

use super::{
    directory::Directory,
    validate::{Places, validate},
};
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

    /// A list, and where its first record lies. Nothing is allocated before the count is known to
    /// fit.
    fn list<T>(&mut self, name: &str) -> Result<(Vec<T>, usize)>
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
        let start = self.position;
        self.position += size_of_val(records);
        Ok((records.to_vec(), start))
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
        let shard = cursor.record("its first fields")?;
        let (files, files_at) = cursor.list("files")?;
        let (blocks, blocks_at) = cursor.list("blocks")?;
        let (sections, sections_at) = cursor.list("sections")?;
        let (tensors, tensors_at) = cursor.list("tensors")?;
        let (arrays, arrays_at) = cursor.list("arrays")?;
        let (checksums, checksums_at) = cursor.list("checksums")?;
        let (metadata, metadata_at) = cursor.list("entries of metadata")?;
        let (text, text_at) = cursor.list("bytes of text")?;
        if cursor.position != bytes.len() {
            return Err(cursor
                .corrupt(format_args!("{} bytes are left over", bytes.len() - cursor.position)));
        }
        let places = Places {
            files: files_at,
            blocks: blocks_at,
            sections: sections_at,
            tensors: tensors_at,
            arrays: arrays_at,
            checksums: checksums_at,
            metadata: metadata_at,
            text: text_at,
        };
        let directory =
            Self { shard, files, blocks, sections, tensors, arrays, checksums, metadata, text };
        validate(&directory, places, directory_offset)?;
        Ok(directory)
    }
}
