//! Every number that spec/format.md fixes, in one place.

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
/// The most LUTs of one codebook: the first, and 127 that two codes of 9 bits share (128 would leave no code
/// for the other half of the code space).
pub const MAX_LUTS: usize = LUT_ENTRIES / 2;

/// The numbers of bitstream bytes a thread that the `gap` encoding allows.
pub const GAP_BYTES_PER_THREAD: [u32; 4] = [8, 16, 32, 64];
/// The numbers of threads a thread block that the `gap` encoding allows.
pub const GAP_THREADS_PER_BLOCK: [u32; 5] = [64, 128, 256, 512, 1024];
/// The bytes a thread that writers use unless told otherwise.
pub const GAP_DEFAULT_BYTES_PER_THREAD: u32 = 16;
/// The threads a thread block that writers use unless told otherwise.
pub const GAP_DEFAULT_THREADS_PER_BLOCK: u32 = 256;
/// The number of threads whose gaps share a byte.
pub const GAP_THREADS_PER_BYTE: u64 = 2;
/// The size of an output offset, in bytes.
pub const OUTPUT_OFFSET_BYTES: usize = 8;
