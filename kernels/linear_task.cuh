// What the host hands to the kernels that multiply by compressed matrices: y = x W^T (+ bias), x
// and y BF16, sums in f32. Rust mirrors this file: src/gpu/ (sizes and constants are compared with
// those of `df11_linear_constants`).
#pragma once
#include "common.cuh"

namespace df11::tile {
struct TileTable;
}

namespace df11::linear {
using tile::TileTable;

// The fast layout, to the bit in spec/gpu.md, part 6: a matrix as it may lie in GPU memory, never
// in a file. Four arrays:
//
//   data      of each strip of 32 rows, of each step of 32 columns, 1536 bytes: for each lane two
//             words of signs and mantissas and one of codes for each of its four rows
//   heads     of each strip, of each tile of 256 columns (8 steps), a FastHead
//   patches   of each strip, patch_places numbers, then as many products of 16 bytes: what lanes
//             whose product has exceptions have instead of what they decode
//   entries   of weights that no code can express (exceptions), tile by tile, ascending: the weight
//             in bits 0 to 15, step << 10 | lane << 5 | row / 8 << 3 | k in bits 16 to 28
constexpr u32 STRIP_ROWS = 32, STEP_COLUMNS = 32, STEP_BYTES = 1536, TILE_STEPS = 8;
// Patches ascend by their numbers, half << 31 | window << 8 | lane << 3 | product: rows 0 to 15 or
// 16 to 31; a window is what df11_linear_order_* decode during a stage, block 2 w - 1 of 64 columns
// (products 0 to 3) and 2 w (4 to 7). After the last one there is NO_PATCH; a strip with more
// entries than places has MANY_PATCHES first.
constexpr u32 TILE_PATCHES = 4, MOST_PATCHES = 512, PATCH_BYTES = 20;
constexpr u32 NO_PATCH = 0xFFFFFFFF, MANY_PATCHES = 0xFFFFFFFE;
__host__ __device__ constexpr u32 patch_places(u32 columns) {
    const u32 tiles = (columns + TILE_STEPS * STEP_COLUMNS - 1) / (TILE_STEPS * STEP_COLUMNS);
    return tiles < MOST_PATCHES / TILE_PATCHES ? TILE_PATCHES * tiles : MOST_PATCHES;
}
__host__ __device__ constexpr u32 patch_bytes(u32 columns) {
    return PATCH_BYTES * patch_places(columns);
}

struct alignas(8) FastHead {
    u32 first;  // of the tile's entries
    u16 count;  // of them
    u8 steps;   // bit t: step t of the tile has entries
    u8 base;    // the exponent of code 0: of all that are possible the largest with fewest entries
};
static_assert(sizeof(FastHead) == 8, "heads have no padding");

// One matrix of a launch, and where its product goes.
//
// A matrix may be a slice of another one, the *whole*: rows from a multiple of 32 to one, or to the
// last, and columns from a multiple of 256 to one, or to the last. From strip to strip it is as far
// as in the whole.
//
//              fast layout                           tile (spec/format.md 6.4)
//   data       of the first strip, first column      plane of the first strip, column 0
//   index      heads, of the first strip and column  records, of the first strip, column 0
//   rest       entries of the whole                  bitstream of the whole, aligned to 16
//   rest_count how many entries                      bytes of the bitstream, a multiple of 16
//   patches    of the first strip, for all columns   not read
//              of the whole
//   table      not read                              the decode table, aligned to 16
//
// The host promises that the arrays have the bytes that the layout gives for `rows`, the launch's
// `columns` and the whole's, and that y has room for x_rows rows. What the arrays hold may be
// anything.
struct alignas(16) LinearMatrix {
    const u8* data;  // aligned to 16
    const void* index;
    const void* rest;
    union {
        const TileTable* table;
        const u8* patches;  // aligned to 16
    };
    u64 rest_count;
    const u16* bias;           // `rows` of them, or null
    u16* y;                    // row 0, first column of the product
    u64 y_pitch;               // elements from a row of y to the next
    u32 rows;                  // of the matrix: columns of the product; at least 1
    u32 whole_strips, slices;  // linear_split(rows, columns)
    u32 first_item;            // the sum of linear_split(..).items() of all matrices before
    u32 first_strip;           // the sum of strips of all matrices before
    u32 first_partial;         // the sum of linear_split(..).partials() of all matrices before
    u32 whole_columns;         // of the whole; those of the launch unless this is a slice
    u32 first_column;          // of the whole: a multiple of 256
};
static_assert(sizeof(LinearMatrix) == 96, "as Rust has it");

// A launch of df11_linear_fast_{8,16}: one argument, by value. At least one row of x, at most
// LINEAR_ROWS. Any multiple of LINEAR_GROUP blocks, persistent; good is what fits the GPU at once,
// no more than `items`. Threads and dynamic shared memory: df11_linear_constants tells them.
// df11_linear_fast_{32,64,128,192,256} take it too: see below.
//
// Up to 16 rows, bits of y depend on the matrix and on the row of x, and on nothing else: no other
// row, no other matrix, no grid.
//
// Where the constants say so, the launch may have the attribute of programmatic stream
// serialization: then the matrices must have been written before the launch before this one began.
constexpr u32 LINEAR_MATRICES = 8, LINEAR_ROWS = 16;
struct alignas(64) XMap {
    u32 words[32];
};
// Bytes to bring to L2: `pieces` of `bytes` each, a multiple of 16; `splits` of each strip,
// `split_pitch` bytes apart, and strips `strip_pitch` bytes apart. A hint: it changes no output.
constexpr u32 LINEAR_PREFETCHES = 4;
struct LinearPrefetch {
    const u8* data;   // aligned to 16
    u64 strip_pitch;  // a multiple of 16
    u32 split_pitch;  // a multiple of 16
    u32 splits;       // at least 1 if there are pieces
    u32 pieces, bytes;
};
struct alignas(64) LinearLaunch {
    const u16* x;  // row-major
    u64 x_pitch;   // elements from a row of x to the next; slow unless x and pitch are multiples of
                   // 16 bytes
    u32 x_rows;
    u32 columns;       // of x and of all matrices; at least 1
    u32 matrix_count;  // 1 to LINEAR_MATRICES
    u32 items;         // the sum of linear_split(..).items()
    u32* counters;     // one for each strip of the launch, 0 before and after; of no use without
                       // partials
    float* partials;   // the sum of linear_split(..).partials() times LINEAR_PARTIAL_BYTES for each
                       // 16 rows of x, aligned to 16
    u32* status;       // bits are set where what is stored contradicts itself
    // For 17 rows of x and more, and else of no use: splits of each matrix's columns, none of them
    // empty (split_stages).
    u8 splits[LINEAR_MATRICES];
    u32 wide_strips;
    u32 tile_sets;  // of df11_linear_tile_{2,8,16}: items whose sums are on their way at once, 1, 2
    u32 x_mapped;   // for 17 rows of x and more: 1 if x_map is set
    u32 tile_tables;  // of df11_linear_tile_{2,8,16}: tables at once: 1, 2 or 4
    // In the order of a plan of the sum: splits of strips that a block multiplies at once, and of
    // one strip; strips of all matrices that each block multiplies, and how many blocks one more.
    u32 few_units, few_splits, few_each, few_more;
    LinearMatrix matrices[LINEAR_MATRICES];
    u32 tile_slot_bytes;  // of df11_linear_tile_{2,8,16}: what a slot has of the shared memory that
                          // is left, a multiple of 16 (linear_tile_block.cuh)
    u32 share_stages;     // for 129 rows of x and more: see below
    // A CUtensorMap of x, BF16 and row-major, as cuTensorMapEncodeTiled makes it: boxes of
    // WIDE_COLUMNS columns and all rows, or those of a band, 128-byte swizzle, zeros for columns
    // that do not exist. Without it, as if x or pitch is not a multiple of 16 bytes, x is read
    // slowly.
    XMap x_map;
    // In the order of a plan of the sum, and for 17 to 128 rows of x: weights that the next product
    // is expected to read first.
    LinearPrefetch prefetches[LINEAR_PREFETCHES];
};
static_assert(sizeof(LinearLaunch) == 1152, "as Rust has it");
constexpr u32 LINEAR_PARTIAL_BYTES = STRIP_ROWS * LINEAR_ROWS * 4;

// In the order of a plan of the sum: the machine code for compute capability 9.0 has
// df11_linear_order_{8,16}, for at most this many rows of x (linear_few.cuh). Blocks have
// FEW_HELPERS warps and two for each of few_units, which are at most FEW_UNITS; blocks times
// few_each, and few_more, are the strips of all matrices. Counters, partials and items are not
// read. Of a matrix differ from above:
//   slices          splits of its columns; each has some
//   whole_strips    of each split but the last: ceil(ceil(columns / 64) / splits) blocks of 64
//   first_strip     splits at once, at most few_splits: all, or of more than FEW_UNITS some
//   first_item      the sum of strips of all matrices before
//   first_partial   bits 0 to 7: strips at once, of which splits at once are at most few_units;
//                   bits 8 on: 2^16 / splits at once, and one
// x_map is that of 64 columns, x_rows rows and blocks of 64 columns; boxes have 64, 8 or 16, and
// 2; 128-byte swizzle. x_mapped tells whether there is one.
// Bits of y depend on the matrix, its splits and the row of x.
//
// How the strips of a matrix are shared out among blocks: most are an item each; of the last ones,
// if they are too few for a GPU's multiprocessors, each is several items, slices of its columns,
// whose sums meet in memory. By shape alone, for the number of multiprocessors of the GPUs that we
// have.
constexpr u32 LINEAR_GROUP = 4, LINEAR_BLOCKS = 132;
struct LinearSplit {
    u32 whole_strips, tail, slices;  // tail: rounded up to whole groups of items
    __host__ __device__ constexpr u32 items() const { return whole_strips + tail * slices; }
    __host__ __device__ constexpr u32 partials() const { return slices > 1 ? tail * slices : 0; }
};
__host__ __device__ constexpr LinearSplit linear_split(u32 rows, u32 columns) {
    const u32 strips = (rows + STRIP_ROWS - 1) / STRIP_ROWS, tiles = (columns + 255) / 256,
              tail = strips % LINEAR_BLOCKS;
    LinearSplit split = {strips - tail, (tail + LINEAR_GROUP - 1) / LINEAR_GROUP * LINEAR_GROUP, 1};
    while (split.slices < 16 && split.tail * split.slices * 2 <= LINEAR_BLOCKS + 8 &&
           tiles >= split.slices * 4)
        split.slices *= 2;
    // Two slices cost more than they save: their sums meet late.
    if (split.slices < 4) split.slices = 1;
    return split;
}

// 17 rows of x and more: the machine code for compute capability 9.0 has
// df11_linear_fast_{32,64,128}, of blocks with WIDE_THREADS: N rows of x each, or a band of them. A
// launch of `cluster` * wide_bands * (the sum of wide_items) blocks, in clusters of `cluster` that
// the launch says: as many as each matrix has splits, or more, at most WIDE_SPLITS. It may have the
// attribute of programmatic stream serialization. Of a matrix whole_strips, slices, first_item,
// first_strip and first_partial are not read, nor are items, counters and partials. What differs
// from above:
//   wide_strips   of a block: any from 1 to WIDE_STRIPS; good is an even number, as a warpgroup
//                 takes as long for one strip as for two
//   x_map         boxes of wide_band_rows rows
// Bits of y depend on the matrix, its splits and the row of x, and on nothing else: no other kernel
// below has others.
constexpr u32 WIDE_ROWS = 128;    // of x in a band, at most
constexpr u32 WIDE_STRIPS = 8;    // of a block, at most
constexpr u32 WIDE_COLUMNS = 64;  // a stage
constexpr u32 WIDE_SPLITS = 8;    // of a matrix's columns, at most, and blocks of a cluster
__host__ __device__ constexpr u32 strips_of(u32 rows) {
    return rows / STRIP_ROWS + (rows % STRIP_ROWS != 0);
}
__host__ __device__ constexpr u32 wide_stage_count(u32 columns) {
    return columns / WIDE_COLUMNS + (columns % WIDE_COLUMNS != 0);
}
// The order of sums: the stages of all splits but the last, which may have fewer. A split is one
// chain of products of 16 columns, first to last, from 0; splits are added in order, then the bias.
__host__ __device__ constexpr u32 split_stages(u32 columns, u32 splits) {
    return (wide_stage_count(columns) + splits - 1) / splits;
}
// Bands of at most n rows of x, and the rows of each; the last one may have fewer.
__host__ __device__ constexpr u32 wide_bands(u32 x_rows, u32 n) { return (x_rows + n - 1) / n; }
__host__ __device__ constexpr u32 wide_band_rows(u32 x_rows, u32 n) {
    const u32 bands = wide_bands(x_rows, n);
    return ((x_rows + bands - 1) / bands + 7) / 8 * 8;
}
// Clusters for a matrix, for each band.
__host__ __device__ constexpr u32 wide_items(u32 strips, u32 splits, u32 block_strips,
                                             u32 cluster) {
    const u32 groups = (strips + block_strips - 1) / block_strips, each = cluster / splits;
    return (groups + each - 1) / each;
}

// 129 rows of x and more, too: df11_linear_fast_{192,256}, of the same machine code, for bands of
// at most this many rows: large_shares times wide_bands blocks of LARGE_THREADS; the attribute as
// above. Matrices have LARGE_STRIPS strips by all columns as groups; the stages of all groups, one
// after the other, are shared out evenly. A share that cuts a group begins with what it has of the
// last one, and hands its sums to the next share, which ends with the rest. Blocks side by side
// have the bands of one share, so that they read the same weights. What differs from above:
//   share_stages  stages of a share, at least those of a group, so that no group has more than two
//   counters      one for each block, 0 before and after
//   partials      LARGE_PARTIAL_BYTES for each block, aligned to 16
//   wide_strips   not read
constexpr u32 LARGE_ROWS = 256;  // of a band, at most
constexpr u32 LARGE_STRIPS = 4;  // of a group
constexpr u32 LARGE_PARTIAL_BYTES = 3 * LARGE_STRIPS * STRIP_ROWS * LARGE_ROWS * 4;
__host__ __device__ constexpr u32 large_groups(u32 rows) {
    return (strips_of(rows) + LARGE_STRIPS - 1) / LARGE_STRIPS;
}
// Of matrices that have this many groups together.
__host__ __device__ constexpr u32 large_shares(u32 groups, u32 columns, u32 share_stages) {
    return (groups * wide_stage_count(columns) + share_stages - 1) / share_stages;
}

// A mixture of experts: place i of `places`, sorted by expert, is the product of one row of x with
// the matrix of its expert: y[i] = x[x_index[i]] W[e]^T for offsets[e] <= i < offsets[e + 1]. Only
// matrices of experts that have places are read. A launch of df11_linear_grouped: one argument, by
// value; any number of blocks, of as many threads as df11_linear_fast_16; dynamic shared memory:
// df11_linear_constants tells it. Bits of y depend on the matrix and on the row of x alone.
constexpr u32 MOST_EXPERTS = 1024;
struct alignas(16) GroupedLaunch {
    const u16* x;  // row-major
    u64 x_pitch;   // elements from a row of x to the next; slow unless x and pitch are multiples of
                   // 16 bytes
    const u32* x_index;  // `places` of them, or null: place i has row i
    const u32* offsets;  // experts + 1, on the device: ascending, the last at most `places`
    // Null, or `experts` of them, on the device, 16-byte aligned; of their fields those before
    // bias, whole_columns and first_column are used.
    const LinearMatrix* matrices;
    u16* y;
    u64 y_pitch;  // elements from a row of y to the next
    u32* status;
    u32 x_rows,
        columns;  // of x: rows, of which an index at or past them sets the status and counts as 0
    u32 rows;     // of each matrix: columns of y
    u32 places, experts;  // experts: at most MOST_EXPERTS
    u32 reserved[3];
    LinearMatrix whole;  // if `matrices` is null: one with the rows of all experts, one after the
                         // other; `rows` is a multiple of 32
};
static_assert(sizeof(GroupedLaunch) == 192, "as Rust has it");

// A launch of df11_linear_tile_{8,16}, of matrices in tiles of 32 x 256 as stored, whose columns
// are a multiple of 8: the same argument, up to 8 rows of x, and 9 to 16. Any number of blocks,
// persistent, of some warps that do not decode and a multiple of four that do;
// df11_linear_constants tells how many of the former and the most of the latter. Good is one block
// a multiprocessor, no more than `items`. Dynamic shared memory: tile_shared_bytes. Bits of y
// depend on the matrix and on the row of x, and on nothing else.
//
// The machine code for compute capability 9.0 has df11_linear_tile_2 for one or two rows of x: the
// same argument and bits of y, more warps that decode, and x in shared memory besides.
//
// 17 to 64 rows of x: the machine code for compute capability 9.0 has df11_linear_tile_{32,64}, for
// at most this many rows: the same argument, DECODED_THREADS threads, decoded_shared_bytes of
// dynamic shared memory. Good is one block a multiprocessor, no more than the sum of
// RoundSplit.items. Of a matrix whole_strips, slices, first_item, first_strip and first_partial are
// not read, nor are items. What differs from above:
//   counters      LINEAR_BLOCKS for each matrix
//   partials      the sum of RoundSplit.places() times decoded_partial_bytes
//   tile_sets     stages of a set: 2 to MOST_DECODED
// Bits of y depend on the matrix, on the row of x, and on whether there are up to 32 or 64 rows.

// Rows of a matrix by their indices on the device: df11_linear_gather of one in the fast layout,
// df11_linear_tile_gather of one in tiles as stored; one argument by value; UNPACK_WARPS warps in a
// block, count * ceil(columns / 256) in all. An index at or past `rows` sets the status and gives
// zeros.
struct alignas(16) GatherTask {
    const u8* data;  // as in LinearMatrix, to rest_count
    const void* index;
    const void* rest;
    const TileTable* table;
    u64 rest_count;
    const void* indices;  // u32, or i64 where wide is 1
    u16* output;          // row i of it: row indices[i]
    u64 pitch;  // elements from a row of output to the next; slow unless both are multiples of 16
                // bytes
    u32 rows, columns;
    u32 count, wide;
    u32 whole_columns, first_column;  // as in LinearMatrix
    u32* status;
};
static_assert(sizeof(GatherTask) == 96, "as Rust has it");

// Transcoding from BF16, in order: df11_linear_count, df11_linear_scan, df11_linear_pack,
// df11_linear_patch, of a range of whole strips (the last may be partial). Deterministic. One
// argument, by value.
struct alignas(16) PackTask {
    const u16* weights;  // row-major, of the range
    u64 pitch;           // elements from a row to the next
    u32 rows, columns;   // of the range
    FastHead* heads;     // of the range; count writes all but `first`, scan `first`
    u8* data;            // of the range, aligned to 16
    u32* entries;        // of the matrix: the heads' `first` counts from here
    u64 capacity;        // of entries: beyond it pack writes none
    u32* total;          // entries so far: scan begins at it and adds the range's
    u8* patches;         // of the range, aligned to 16
};
static_assert(sizeof(PackTask) == 80, "as Rust has it");
// df11_linear_count and _pack: ceil(tiles / PACK_WARPS) blocks of PACK_WARPS warps; count with
// PACK_SHARED_BYTES of dynamic shared memory, pack with none. scan: one block of 1024 threads.
// patch: ceil(strips / PACK_WARPS) blocks of PACK_WARPS warps.
constexpr u32 PACK_WARPS = 4;

// From the fast layout back to BF16, a part of a matrix: df11_linear_unpack, one argument by value;
// ceil(tiles / UNPACK_WARPS) blocks of UNPACK_WARPS warps. Of each element that is in the range of
// elements and in that of columns.
struct alignas(16) UnpackTask {
    const u8* data;  // of the matrix, as the three that follow
    const FastHead* heads;
    const u32* entries;
    u64 entry_count;
    u16* output;  // of row 0, column 0, wanted or not; modulo 2^64
    u64 pitch;    // elements from a row to the next; slow unless both are multiples of 16 bytes
    u64 element_begin, element_end;
    u32 rows, columns;  // of the matrix
    u32 column_begin, column_end;
    u32 first_strip, first_tile;  // the first tile that holds what is wanted
    u32 across, tiles;            // of them in a strip, and in all
    u32* status;
};
static_assert(sizeof(UnpackTask) == 112, "as Rust has it");
constexpr u32 UNPACK_WARPS = 8;

// Bits of the status word.
constexpr u32 STATUS_ENTRIES = 128;  // a head names entries that do not exist
constexpr u32 STATUS_INDEX = 256;    // an index or an offset names a row that does not exist
}  // namespace df11::linear
