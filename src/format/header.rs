//! Header and footer (spec/format.md, section 2).

use std::mem::offset_of;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use super::records::record;
use crate::{
    Error, Result,
    constants::{
        ARRAY_ALIGNMENT, HEAD_BYTES, HEADER_BYTES, MAGIC, MAX_DIRECTORY_BYTES, MAX_FILE_BYTES,
        SECTION_ALIGNMENT, VERSION_MAJOR, align,
    },
};

/// `state` of a container that is being written.
pub const STATE_UNFINISHED: u32 = 0;
/// `state` of a finished container.
pub const STATE_COMPLETE: u32 = 1;

/// The incompatible features that this version knows.
const KNOWN_FEATURES: u64 = 0;

record! {
    /// The first 64 bytes of a container, and, once more, its last.
    Header {
        /// [`MAGIC`].
        magic: [u8; 8],
        /// [`VERSION_MAJOR`].
        version_major: U16,
        /// Any value; informative.
        version_minor: U16,
        /// [`STATE_UNFINISHED`] or [`STATE_COMPLETE`].
        state: U32,
        /// Bits of features without which the file cannot be read.
        incompatible_features: U64,
        /// Bits of features that a reader may ignore.
        compatible_features: U64,
        /// Length of the container, in bytes.
        file_length: U64,
        /// Where the directory starts, in bytes.
        directory_offset: U64,
        /// Length of the directory, in bytes.
        directory_length: U64,
        /// CRC-32 of the directory.
        directory_checksum: U32,
        /// CRC-32 of the 60 bytes before.
        header_checksum: U32,
    }
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES as usize);

fn no_container(why: &str) -> Error {
    let problem = format_args!("this is not a df11 file ({why})");
    corrupt(0, problem).remedied("name another, or fetch it again")
}

fn corrupt(offset: usize, problem: impl std::fmt::Display) -> Error {
    Error::corrupt("header", offset as u64, problem)
}

fn check_file_length(bytes: u64) -> Result<()> {
    Error::check_limit("the file's length in bytes", bytes, MAX_FILE_BYTES)
}

impl Header {
    /// The header of a container that is still being written; every reader rejects it.
    pub fn unfinished() -> Self {
        Self {
            magic: MAGIC,
            version_major: VERSION_MAJOR.into(),
            state: STATE_UNFINISHED.into(),
            ..Self::default()
        }
        .sealed()
    }

    /// The header of a finished container whose directory has this place, these bytes and this
    /// checksum.
    ///
    /// # Errors
    /// [`Error::Limit`] if directory or file would be too large.
    pub fn complete(directory_offset: u64, directory: &[u8]) -> Result<Self> {
        let length = directory.len() as u64;
        let mut header = Self::unfinished();
        header.state = STATE_COMPLETE.into();
        header.directory_offset = directory_offset.into();
        header.directory_length = length.into();
        header.directory_checksum = crc32fast::hash(directory).into();
        let file_length = header.expected_file_length()?;
        check_file_length(file_length)?;
        header.file_length = file_length.into();
        Ok(header.sealed())
    }

    /// The same header with a minor version, which is 0 otherwise.
    #[must_use]
    pub fn with_minor(mut self, minor: u16) -> Self {
        self.version_minor = minor.into();
        self.sealed()
    }

    /// The same header with its checksum made right; for writers and tests that change fields.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.header_checksum = crc32fast::hash(&self.as_bytes()[..Self::checked_bytes()]).into();
        self
    }

    const fn checked_bytes() -> usize {
        offset_of!(Self, header_checksum)
    }

    /// Where the footer starts, in bytes; the zeros after the directory end there. Call it on a
    /// header that [`Header::parse`] accepted, in a file as long as it says; on others it may
    /// overflow.
    pub fn footer_offset(&self) -> u64 {
        self.file_length.get() - HEADER_BYTES
    }

    fn check_directory_length(&self) -> Result<()> {
        let length = self.directory_length.get();
        Error::check_limit("the directory's length in bytes", length, MAX_DIRECTORY_BYTES)
    }

    /// The length of a file whose directory is where and as long as the header says.
    fn expected_file_length(&self) -> Result<u64> {
        self.check_directory_length()?;
        self.directory_offset
            .get()
            .checked_add(self.directory_length.get())
            .and_then(|end| align(end, ARRAY_ALIGNMENT))
            .and_then(|end| end.checked_add(HEADER_BYTES))
            .ok_or_else(|| Error::limit("the file's length in bytes", u64::MAX, MAX_FILE_BYTES))
    }

    /// Checks magic and major version, whose places never change (section 9, steps 1 and 2).
    pub(crate) fn check_version(head: &[u8]) -> Result<()> {
        let start = head.get(..offset_of!(Self, state));
        let start = start.ok_or_else(|| no_container("shorter than the magic"))?;
        Error::unless(start.starts_with(&MAGIC), || no_container("no magic at its start"))?;
        let [major, minor] = [offset_of!(Self, version_major), offset_of!(Self, version_minor)]
            .map(|at| u16::from_le_bytes([start[at], start[at + 1]]));
        Error::unless(major == VERSION_MAJOR, || {
            let what = format_args!("format version {major}.{minor}");
            Error::unsupported(what, "update df11 to read this file")
        })
    }

    /// Reads a header and checks all that can be checked without the rest of the file
    /// (section 9, steps 1 to 5).
    ///
    /// # Errors
    /// [`Error::Corrupt`] for what is no df11 header, a damaged or an unfinished one;
    /// [`Error::Unsupported`] for one of a newer version.
    pub fn parse(bytes: &[u8; HEADER_BYTES as usize]) -> Result<Self> {
        Self::check_version(bytes)?;
        let header: Self = zerocopy::transmute!(*bytes);
        if header != header.sealed() {
            let problem = "the header's checksum does not match";
            return Err(corrupt(Self::checked_bytes(), problem).remedied("the file is damaged"));
        }
        match header.state.get() {
            STATE_COMPLETE => {}
            STATE_UNFINISHED => {
                let error = corrupt(offset_of!(Self, state), "the file was never finished");
                return Err(error.remedied("write it again"));
            }
            state => {
                return Err(corrupt(offset_of!(Self, state), format_args!("state {state}")));
            }
        }
        let unknown = header.incompatible_features.get() & !KNOWN_FEATURES;
        Error::unless(unknown == 0, || {
            let what = format_args!("feature set {unknown:#x} of this file");
            Error::unsupported(what, "update df11 to read this file")
        })?;
        Ok(header)
    }

    /// Checks that the file has the length that the header says and the directory its place (step
    /// 6).
    pub(crate) fn check_placement(&self, actual_length: u64) -> Result<()> {
        let stated = self.file_length.get();
        check_file_length(stated)?;
        if stated != actual_length {
            let problem = format!(
                "the file has {actual_length} bytes and its header says {stated}; it is truncated \
                or has trailing bytes"
            );
            return Err(corrupt(offset_of!(Self, file_length), problem).remedied("fetch it again"));
        }
        self.check_directory_length()?;
        let offset = self.directory_offset.get();
        if offset < HEAD_BYTES || !offset.is_multiple_of(SECTION_ALIGNMENT) {
            let problem =
                format!("directory_offset {offset} is not aligned to {SECTION_ALIGNMENT} bytes");
            return Err(corrupt(offset_of!(Self, directory_offset), problem));
        }
        let expected = self.expected_file_length()?;
        Error::unless(expected == stated, || {
            let problem =
                format!("the directory ends such that the file has {expected} bytes, not {stated}");
            corrupt(offset_of!(Self, directory_length), problem)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(header: Header) -> [u8; 64] {
        zerocopy::transmute!(header)
    }

    /// A flipped bit of the version is no damage. Vectors test all other headers.
    #[test]
    fn every_flipped_bit_is_found() {
        let good = bytes(Header::complete(4096, b"directory").unwrap());
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let unsupported = (8 * 8..10 * 8).contains(&bit);
            match Header::parse(&bad) {
                Err(Error::Unsupported { .. }) if unsupported => {}
                Err(Error::Corrupt { .. }) if !unsupported => {}
                other => panic!("bit {bit}: {other:?}"),
            }
        }
    }
}
