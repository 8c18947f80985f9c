//! What is read of a container when it is opened.

use std::{borrow::Cow, ops::Range, path::Path};

use crate::{
    Error, Result,
    constants::{HEAD_BYTES, HEADER_BYTES},
    format::{Directory, Header},
    io::ReadAt,
};

/// Bytes of a container, without copying where it is mapped. The caller has checked the range
/// against its size.
pub(super) fn fetch<'a>(
    reader: &'a dyn ReadAt,
    path: &Path,
    range: Range<u64>,
) -> Result<Cow<'a, [u8]>> {
    let length = range.end - range.start;
    if let Some(view) = reader.view(range.start, length) {
        return Ok(Cow::Borrowed(view));
    }
    let mut bytes = vec![0; length as usize];
    reader
        .read_exact_at(range.start, &mut bytes)
        .map_err(|error| Error::io("reading", path, error))?;
    Ok(Cow::Owned(bytes))
}

/// Steps 1 to 9 of level open.
pub(super) fn open_directory(reader: &dyn ReadAt, path: &Path) -> Result<(Header, Directory)> {
    let size = reader.size();
    let head = fetch(reader, path, 0..size.min(HEAD_BYTES))?;
    Header::check_version(&head)?;
    if size < HEAD_BYTES + HEADER_BYTES {
        let problem =
            format!("{size} bytes are too few for a df11 file; it is truncated, fetch it again");
        return Err(Error::corrupt("file", 0, problem));
    }
    let (header_bytes, rest) =
        head.split_first_chunk().expect("the head is longer than the header");
    let header = Header::parse(header_bytes)?;
    header.check_placement(size)?;
    check_zero("head", HEADER_BYTES, rest)?;
    let start = header.directory_offset.get();
    let tail = fetch(reader, path, start..size)?;
    let (directory, padding) = tail.split_at(header.directory_length.get() as usize);
    let (padding, footer) = padding.split_at(padding.len() - HEADER_BYTES as usize);
    if footer != header_bytes {
        let problem = "it is no copy of the header";
        return Err(Error::corrupt("footer", header.footer_offset(), problem));
    }
    check_zero("space after the directory", start + directory.len() as u64, padding)?;
    if crc32fast::hash(directory) != header.directory_checksum.get() {
        return Err(Error::corrupt("directory", 0, "its checksum does not match")
            .remedied("the file is damaged"));
    }
    Ok((header, Directory::parse(directory, start)?))
}

/// Padding must be zero.
pub(super) fn check_zero(place: &str, offset: u64, bytes: &[u8]) -> Result<()> {
    match bytes.iter().position(|&byte| byte != 0) {
        Some(position) => {
            Err(Error::corrupt(place, offset + position as u64, "padding is not zero"))
        }
        None => Ok(()),
    }
}
