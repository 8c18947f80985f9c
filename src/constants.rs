//! The constants that the spec fixes (spec/format.md, section 1); a test compares the two.

/// First eight bytes of header and footer.
pub const MAGIC: [u8; 8] = [0xDF, b'D', b'F', b'1', b'1', b'\r', b'\n', 0x1A];
/// The major version that this crate reads and writes.
pub const VERSION_MAJOR: u16 = 1;
/// The minor version that this crate writes.
pub const VERSION_MINOR: u16 = 0;
/// Bytes before the first section.
pub const HEAD_BYTES: u64 = 4096;
/// Bytes of the header, and of the footer.
pub const HEADER_BYTES: u64 = 64;
/// Every section, and the directory, starts on a multiple of this many bytes.
pub const SECTION_ALIGNMENT: u64 = 4096;
/// Every array starts on a multiple of this many bytes within its section.
pub const ARRAY_ALIGNMENT: u64 = 256;
/// Bytes of a section that one checksum covers.
pub const CHECKSUM_CHUNK_BYTES: u64 = 1 << 20;
/// The largest directory, in bytes.
pub const MAX_DIRECTORY_BYTES: u64 = 256 << 20;
/// The largest container, in bytes.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;
/// The longest name or path, in bytes.
pub const MAX_NAME_BYTES: u64 = 4096;
/// The most dimensions of a tensor.
pub const MAX_DIMENSIONS: u64 = 8;
/// The most shards of a model.
pub const MAX_SHARDS: u64 = 100_000;
/// The longest code, in bits.
pub const MAX_CODE_LENGTH: u64 = 16;
/// Where an index is expected: none.
pub const NONE: u64 = u64::MAX;

/// The smallest multiple of `alignment` (a power of two) that is at least `value`; `None` where it exceeds 2^64 − 1.
pub const fn align(value: u64, alignment: u64) -> Option<u64> {
    match value.checked_add(alignment - 1) {
        Some(sum) => Some(sum & !(alignment - 1)),
        None => None,
    }
}
