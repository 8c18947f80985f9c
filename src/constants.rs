//! The constants that the spec fixes (spec/format.md, section 1); a test compares the two.

/// First eight bytes of header and footer.
pub const MAGIC: [u8; 8] = [0xDF, b'D', b'F', b'1', b'1', b'\r', b'\n', 0x1A];
/// The major version that this crate reads and writes.
pub const VERSION_MAJOR: u16 = 1;
/// The newest minor version that this crate writes, into files that need it.
pub const VERSION_MINOR: u16 = 1;
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
/// The longest component of a path, in bytes.
pub const MAX_COMPONENT_BYTES: u64 = 255;
/// The most components of a path.
pub const MAX_PATH_COMPONENTS: u64 = 32;
/// The most original files of one container.
pub const MAX_FILES: u64 = 10_000;
/// The most folders that the paths of one container name.
pub const MAX_FOLDERS: u64 = 10_000;
/// The most aliases of one tensor.
pub const MAX_ALIASES: u64 = 15;
/// The longest key of metadata, in bytes.
pub const MAX_KEY_BYTES: u64 = 255;
/// The longest value of metadata, in bytes.
pub const MAX_VALUE_BYTES: u64 = 64 << 10;
/// All keys and values of metadata together, in bytes.
pub const MAX_METADATA_BYTES: u64 = 1 << 20;
/// The most dimensions of a tensor.
pub const MAX_DIMENSIONS: u64 = 8;
/// The most shards of a model.
pub const MAX_SHARDS: u64 = 100_000;
/// The number of symbols of the exponent code: all values of a BF16 exponent.
pub const SYMBOLS: usize = 256;
/// The longest code, in bits.
pub const MAX_CODE_LENGTH: u8 = 16;
/// The size of the code lengths at the start of a codebook array, in bytes: one byte a symbol.
pub const CODE_LENGTHS_BYTES: usize = SYMBOLS;
/// The number of bits that index a LUT.
pub const LUT_BITS: u8 = 8;
/// The number of entries in a LUT.
pub const LUT_ENTRIES: usize = 1 << LUT_BITS;
/// The size of a LUT entry in a codebook array, in bytes.
pub const LUT_ENTRY_BYTES: usize = 2;
/// The size of a LUT in a codebook array, in bytes.
pub const LUT_BYTES: usize = LUT_ENTRIES * LUT_ENTRY_BYTES;
/// The most LUTs of one codebook: the first, and 127 that two codes of 9 bits share (128 would
/// leave no code for the other half of the code space).
pub const MAX_LUTS: usize = LUT_ENTRIES / 2;

/// The numbers of bitstream bytes per thread that the `gap` encoding allows.
pub const GAP_BYTES_PER_THREAD: [u32; 4] = [8, 16, 32, 64];
/// The numbers of threads per thread block that the `gap` encoding allows.
pub const GAP_THREADS_PER_BLOCK: [u32; 5] = [64, 128, 256, 512, 1024];
/// The bytes per thread that writers use unless told otherwise: spec/rationale.md, "Gap".
pub const GAP_DEFAULT_BYTES_PER_THREAD: u32 = 32;
/// The threads per thread block that writers use unless told otherwise.
pub const GAP_DEFAULT_THREADS_PER_BLOCK: u32 = 128;
/// The number of threads whose gaps share a byte.
pub const GAP_THREADS_PER_BYTE: u64 = 2;
/// The size of an output offset, in bytes.
pub const OUTPUT_OFFSET_BYTES: usize = 8;

/// Stands for "none" in the place of an index.
pub const NONE: u64 = u64::MAX;

/// The smallest multiple of `alignment` that is at least `value`; `None` if it exceeds 2^64 − 1.
pub const fn align(value: u64, alignment: u64) -> Option<u64> {
    value.checked_next_multiple_of(alignment)
}
