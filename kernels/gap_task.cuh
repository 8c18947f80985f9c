// Tasks and tables of the gap kernels. Rust mirrors this file in src/gpu/; a test compares sizes
// and constants with `df11_gap_constants`.
#pragma once
#include "common.cuh"

namespace df11::gap {
// Number of bits that index the pair table.
constexpr u32 TABLE_BITS = 12;
constexpr u32 TABLE_ENTRIES = 1u << TABLE_BITS;
constexpr u32 MAX_CODE_LENGTH = 16;
constexpr u32 SYMBOLS = 256;

// The decode table of one tensor, derived from its 256 code lengths by `df11_gap_tables`.
//
//   pairs[next TABLE_BITS bits]
//     31      24 23      16 15 14      10 9    6 5            0
//     | second  |  first   |0 | length 1 |  0   | both lengths |    both codes fit the index
//     |   0     |  first   |0 | length 1 |  0   |      0       |    only the first one fits
//     |                         0                              |    the first one does not fit
//
// The other arrays hold the canonical code: a code has at most L bits if the next 16 bits, first
// bit highest, are below limits[L]; its exponent is symbols[(these bits >> (16 - L)) + bases[L]].
struct alignas(16) GapTable {
    u32 pairs[TABLE_ENTRIES];
    u32 limits[MAX_CODE_LENGTH + 1];
    u32 bases[MAX_CODE_LENGTH + 1];
    u8 symbols[SYMBOLS];
    u32 padding[26];
};

// A tensor, or a range of its elements, to decode. 128 bytes, aligned to 16.
//
// The host guarantees that each array has the size that section 6.3 of the format gives for
// `elements`, `bit_count`, T (the kernel's) and `threads_per_block`, that `element_begin <
// element_end <= elements`, and that output has room for the range. The arrays may hold anything.
// Decoding is slow if plane or element_begin is not a multiple of 16. All tasks of a launch have
// the kernel's T.
//
// Launch: any number of blocks, each of whole warps, at most as many as df11_gap_constants says;
// dynamic shared memory is the warps of a block times a warp's bytes, also in df11_gap_constants.
// unit_count is the sum of thread_blocks. Blocks are persistent; those that do not fit the GPU at
// once wait. The kernel adds the launch's `output` to the output of each task, so that one array of
// tasks serves any buffer.
struct alignas(16) GapTask {
    const u8* gaps;
    const u64* output_offsets;
    const u8* bitstream;  // aligned to 16
    const u8* plane;
    const GapTable* table;  // aligned to 16
    // Address of element_begin, minus the launch's `output`; their sum is aligned to 16 bytes (by
    // convention to 256).
    u16* output;
    u64 elements;
    u64 bit_count;
    u64 element_begin;
    u64 element_end;
    u64 first_thread_block;  // thread block that holds element_begin
    u64 thread_blocks;       // thread blocks that hold the range
    u64 first_unit;          // sum of thread_blocks of the tasks before
    u32 threads_per_block;   // B: 64 to 1024
    u32 reserved;
    u64 reserved2[2];
};

// Bits of the status word.
constexpr u32 STATUS_THREAD_END = 2;  // a thread does not end where the next one starts
constexpr u32 STATUS_BLOCK_END = 4;   // a thread block's codes differ in number from its offsets
constexpr u32 STATUS_OFFSETS = 8;     // output offsets do not start at 0 or end at `elements`
}  // namespace df11::gap
