// Tasks and tables of the tile kernels. Rust mirrors this file in src/gpu/; a test compares sizes
// and constants with `df11_tile_constants`.
#pragma once
#include "common.cuh"

namespace df11::tile {
// Number of bits that index the table, and of the longest code.
constexpr u32 TABLE_BITS = 12;
constexpr u32 TABLE_ENTRIES = 1u << TABLE_BITS;

// The decode table of one tensor, derived from its codebook by `df11_tile_tables`.
//
//   entries[next TABLE_BITS bits]
//     31 30       23 22    20 19       15 14     7 6      6 5       0
//     |0|  second   |    0   |     0     |  first |   0    | length  |    a pair
//     |1|     0     |    1   |  length   |    0   |   0    | + 16    |    the escape
//     |1|     0     |    1   |    31     |    0   |   0    |   1     |    no code
//
// A pair's exponents have the places that they have in two BF16 weights. An escape has two lengths:
// of its code alone, and of its code and the 16 bits after it.
struct alignas(16) TileTable {
    u32 entries[TABLE_ENTRIES];
};

// The record of one tile (spec/format.md 6.4): where its bits start (48 bits), the fewest bits of a
// lane (13), a shift (3), and six bits for each lane, which has `least + (excess << shift)` bits.
struct TileRecord {
    u64 head;
    u32 excess[6];
};
static_assert(sizeof(TileRecord) == 32, "one sector");

// A tensor, or a part of it, to decode: the elements that are in a range of elements and in a range
// of columns. 128 bytes, aligned to 16.
//
// The host guarantees that each array has the size that section 6.4 of the format gives for `rows`,
// `columns` and `bits_bytes`; that `element_begin < element_end <= rows * columns` and
// `column_begin < column_end <= columns`; that the tiles are those that hold wanted elements
// (`across` in each of some rows of tiles); and that output has room for these at `pitch`. The
// arrays may hold anything. Decoding is slow if output and pitch are not multiples of 16 bytes.
//
// Launch: any number of blocks of 1 to `max_warps` warps (df11_tile_constants), with one stage of
// dynamic shared memory per warp. A stage is a multiple of 16 bytes: the `warp` bytes of
// df11_tile_constants, and the most bytes of bitstream that a tile of the launch takes, from the 16
// bytes with its first bit to the 16 bytes with its last one. A tile that takes more is decoded
// wrongly and sets the status. unit_count is the sum of `tiles`, less than 2^32. Blocks are
// persistent; those that do not fit the GPU at once wait. The kernel adds the launch's `output`, a
// multiple of 16, to the output of each task, so that one array of tasks serves any buffer.
struct alignas(16) TileTask {
    const u8* bits;             // aligned to 16
    const TileRecord* records;  // one more than the tensor has tiles
    const u8* plane;            // aligned to 16
    const TileTable* table;     // aligned to 16
    // Address of row 0, column 0, wanted or not, minus the launch's `output`; modulo 2^64.
    u16* output;
    u64 bits_bytes;  // a multiple of 16
    // If tiles have one row: the shape of any matrix with as many elements; of one row if these are
    // 2^32 or more.
    u64 rows, columns;
    u64 element_begin;
    u64 element_end;
    u64 column_begin;
    u64 column_end;
    u64 pitch;                    // elements from one row of the output to the next
    u32 first_unit;               // sum of `tiles` of the tasks before
    u32 tiles;                    // tiles that hold wanted elements
    u32 first_row, first_column;  // place of the first one, in tiles
    u32 across;                   // how many there are in a row of tiles
    // Tiles in a row of tiles of the tensor if they are 32 x 256; 0 if they are 1 x 8192, all in
    // row 0.
    u32 tiles_across;
    __device__ bool linear() const { return tiles_across == 0; }
};
static_assert(sizeof(TileTask) == 128, "as a GapTask");

// Tasks of a launch of df11_tile_decode_few, which reads the first `task_count`.
constexpr u32 FEW_TASKS = 8;
struct TileTasks {
    TileTask tasks[FEW_TASKS];
};

// Bits of the status word.
constexpr u32 STATUS_LANE_END = 16;   // a lane's codes differ in bits from its record
constexpr u32 STATUS_RECORDS = 32;    // a tile's lanes differ in bits from its offsets
constexpr u32 STATUS_LAST_PAIR = 64;  // the pair of a single weight has two exponents
}  // namespace df11::tile
