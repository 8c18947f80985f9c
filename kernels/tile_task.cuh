// What the host hands to the tile kernels. Rust mirrors this file: src/gpu/ (a test compares sizes
// and constants with those of `df11_tile_constants`).
#pragma once
#include "common.cuh"

namespace df11::tile {
// Bits of the longest code, which index the table.
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
// A pair's exponents are at their places in two BF16 weights. The escape has its length alone, and
// with the 16 bits after it.
struct alignas(16) TileTable {
    u32 entries[TABLE_ENTRIES];
};

// One record a tile (spec/format.md 6.4): where its bits start (48 bits), the fewest bits of a lane
// (13), a shift (3), and six bits for each lane, which has `least + (excess << shift)` bits.
struct TileRecord {
    u64 head;
    u32 excess[6];
};
static_assert(sizeof(TileRecord) == 32, "one sector");

// One tensor, or a part of it, to decode: a range of its elements, and of them those in a range of
// columns. 128 bytes, aligned to 16.
//
// The host promises that each pointer has the bytes that section 6.4 of the format gives for
// `rows`, `columns` and `bits_bytes`, that `element_begin < element_end <= rows * columns` and
// `column_begin < column_end <= columns`, that the tiles are those that hold what is wanted
// (`across` of each of some rows of tiles), and that output has room for it at `pitch`. The
// contents of the arrays may be anything. Decoding is slow if output and pitch are no multiples of
// 16 bytes.
//
// Launch: any number of blocks of 1 to `max_warps` warps (df11_tile_constants), with as many times
// a stage of dynamic shared memory. A stage is a multiple of 16 and has what df11_tile_constants
// tells besides the most bytes that a tile of the launch takes of its bitstream, from the 16 bytes
// with its first bit to those with its last one. Tiles with more are not decoded right, and set the
// status. unit_count = the sum of tiles, less than 2^32. Blocks are persistent, so more than fit
// the GPU at once only wait. The launch's `output`, a multiple of 16, is added to the output of
// each task, so that one array of tasks serves any buffer.
struct alignas(16) TileTask {
    const u8* bits;             // aligned to 16
    const TileRecord* records;  // one more than tiles of the tensor
    const u8* plane;            // aligned to 16
    const TileTable* table;     // aligned to 16
    u16* output;     // of row 0, column 0, wanted or not, less the launch's `output`; modulo 2^64
    u64 bits_bytes;  // a multiple of 16
    // If tiles have one row: of any matrix with as many elements, of one row if these are 2^32 or
    // more.
    u64 rows, columns;
    u64 element_begin;
    u64 element_end;
    u64 column_begin;
    u64 column_end;
    u64 pitch;                    // elements of the output from one row to the next
    u32 first_unit;               // tiles of all tasks before
    u32 tiles;                    // that hold what is wanted
    u32 first_row, first_column;  // the first of them, in tiles
    u32 across;                   // of them in a row of tiles
    // Of the tensor in a row of tiles of 32 x 256; 0 if tiles are 1 x 8192, all in row 0.
    u32 tiles_across;
    __device__ bool linear() const { return tiles_across == 0; }
};
static_assert(sizeof(TileTask) == 128, "as a GapTask");

// Those of a launch of df11_tile_decode_few; as many as `task_count` says.
constexpr u32 FEW_TASKS = 8;
struct TileTasks {
    TileTask tasks[FEW_TASKS];
};

// Bits of the status word.
constexpr u32 STATUS_LANE_END = 16;   // a lane's codes have not as many bits as its record says
constexpr u32 STATUS_RECORDS = 32;    // a tile's lanes have not as many bits as its offsets say
constexpr u32 STATUS_LAST_PAIR = 64;  // a pair of one weight has two exponents
}  // namespace df11::tile
