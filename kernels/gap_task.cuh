// What the host hands to the gap kernels. Rust mirrors this file: src/gpu/ (a test compares sizes
// and constants with those of `df11_gap_constants`).
#pragma once
#include "common.cuh"

namespace df11::gap {
// Bits that index the pair table.
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
// The canonical code in this form: a code has at most L bits if the next 16 bits, first bit
// highest, are below limits[L]; its exponent is symbols[(these bits >> (16 - L)) + bases[L]].
struct alignas(16) GapTable {
    u32 pairs[TABLE_ENTRIES];
    u32 limits[MAX_CODE_LENGTH + 1];
    u32 bases[MAX_CODE_LENGTH + 1];
    u8 symbols[SYMBOLS];
    u32 padding[26];
};

// One tensor, or a range of its elements, to decode. 128 bytes, aligned to 16.
//
// The host promises that each pointer has the bytes that section 6.3 of the format gives for
// `elements`, `bit_count`, T (the kernel's) and `threads_per_block`, that `element_begin <
// element_end <= elements`, and that output has room for the range. The contents of the arrays may
// be anything. Decoding is slow if plane or element_begin is no multiple of 16. All tasks of a
// launch have the kernel's T.
//
// Launch: any number of blocks, of any number of whole warps up to the most that df11_gap_constants
// tells, with as many times a warp's bytes of dynamic shared memory; unit_count = the sum of
// thread_blocks. Blocks are persistent, so more than fit the GPU at once only wait. The launch's
// `output` is added to the output of each task, so that one array of tasks serves any buffer.
struct alignas(16) GapTask {
    const u8* gaps;
    const u64* output_offsets;
    const u8* bitstream;  // aligned to 16
    const u8* plane;
    const GapTable* table;  // aligned to 16
    // Of element_begin, less the launch's `output`; their sum is aligned to 16 (256 by rule of the
    // house).
    u16* output;
    u64 elements;
    u64 bit_count;
    u64 element_begin;
    u64 element_end;
    u64 first_thread_block;  // that holds element_begin
    u64 thread_blocks;       // that hold the range
    u64 first_unit;          // thread blocks of all tasks before
    u32 threads_per_block;   // B: 64 to 1024
    u32 reserved;
    u64 reserved2[2];
};

// Bits of the status word.
constexpr u32 STATUS_THREAD_END = 2;  // a thread does not end where the next one starts
constexpr u32 STATUS_BLOCK_END = 4;   // a thread block has not as many codes as its offsets say
constexpr u32 STATUS_OFFSETS = 8;     // output offsets do not start at 0 or end at `elements`
}  // namespace df11::gap
