// Arguments and layouts of the kernels that multiply by compressed matrices: y = x W^T (+ bias), x
// and y BF16, sums in f32. Rust mirrors this file in src/gpu/ and compares sizes and constants with
// `df11_linear_constants`.
#pragma once
#include "common.cuh"

namespace df11::tile {
struct TileTable;
}

namespace df11::linear {
using tile::TileTable;

// The fast layout: a matrix as it may lie in GPU memory, never in a file. spec/gpu.md, part 6,
// defines each bit. Four arrays:
//
//   data      for each strip of 32 rows and each step of 32 columns, 1536 bytes: per lane, two
//             words of signs and mantissas and one of codes for each of its four rows
//   heads     for each strip and each tile of 256 columns (8 steps), a FastHead
//   patches   for each strip, patch_places numbers, then as many products of 16 bytes; a lane whose
//             product has exceptions takes these instead of what it decodes
//   entries   weights that no code can express (exceptions), tile by tile, ascending: the weight in
//             bits 0 to 15, step << 10 | lane << 5 | row / 8 << 3 | k in bits 16 to 28
constexpr u32 STRIP_ROWS = 32, STEP_COLUMNS = 32, STEP_BYTES = 1536, TILE_STEPS = 8;
// Patches ascend by their numbers, half << 31 | window << 8 | lane << 3 | product. Half 0 is rows 0
// to 15, half 1 rows 16 to 31. A window is what df11_linear_order_* decode during one stage: of
// blocks of 64 columns, number 2 w - 1 (products 0 to 3) and 2 w (4 to 7). NO_PATCH follows the
// last patch; a strip with more entries than places begins with MANY_PATCHES.
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
    u32 first;  // index of the tile's first entry
    u16 count;  // number of its entries
    u8 steps;   // bit t: step t of the tile has entries
    u8 base;    // exponent of code 0: of all bases with the fewest entries, the largest
};
static_assert(sizeof(FastHead) == 8, "heads have no padding");

// A matrix of a launch, and the place of its product.
//
// A matrix may be a slice of another one, the *whole*. A slice begins at a multiple of 32 rows and
// of 256 columns; it ends at such multiples or at the last row and column. Its strips are as far
// apart as those of the whole.
//
//              fast layout                           tile (spec/format.md 6.4)
//   data       first strip, first column             plane of the first strip, column 0
//   index      heads, first strip and column         records, first strip, column 0
//   rest       entries of the whole                  bitstream of the whole, aligned to 16
//   rest_count number of entries                     bytes of the bitstream, a multiple of 16
//   patches    first strip, all columns of the       not read
//              whole
//   table      not read                              the decode table, aligned to 16
//
// The host guarantees that the arrays have the sizes that the layout gives for `rows`, the launch's
// `columns` and the whole's columns, and that y has room for x_rows rows. The arrays may hold
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
    u32 rows;                  // rows of the matrix, columns of the product; at least 1
    u32 whole_strips, slices;  // linear_split(rows, columns)
    u32 first_item;            // sum of linear_split(..).items() of all matrices before
    u32 first_strip;           // strips of all matrices before
    u32 first_partial;         // sum of linear_split(..).partials() of all matrices before
    u32 whole_columns;         // columns of the whole; the launch's columns unless this is a slice
    u32 first_column;          // column of the whole: a multiple of 256
};
static_assert(sizeof(LinearMatrix) == 96, "as Rust has it");

// The argument of df11_linear_fast_{8,16}, by value: 1 to LINEAR_ROWS rows of x. The launch has any
// multiple of LINEAR_GROUP blocks, persistent; best are as many as fit the GPU at once, but no more
// than `items`. df11_linear_constants gives the threads and the dynamic shared memory.
// df11_linear_fast_{32,64,128,192,256} take this argument too: see below.
//
// Up to 16 rows, the bits of y depend only on the matrix and the row of x, not on other rows, other
// matrices or the grid.
//
// If the constants allow it, the launch may have the attribute of programmatic stream
// serialization. The matrices must then have been written before the previous launch began.
constexpr u32 LINEAR_MATRICES = 8, LINEAR_ROWS = 16;
struct alignas(64) XMap {
    u32 words[32];
};
// Bytes to bring to L2, in `pieces` pieces of `bytes` bytes, a multiple of 16: one for each of the
// `splits` splits of each strip. Splits are `split_pitch` bytes apart, strips `strip_pitch`. A
// hint: it changes no output.
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
    u64 x_pitch;   // elements from one row of x to the next; slow unless x and pitch are multiples
                   // of 16 bytes
    u32 x_rows;
    u32 columns;       // columns of x and of all matrices; at least 1
    u32 matrix_count;  // 1 to LINEAR_MATRICES
    u32 items;         // sum of linear_split(..).items()
    u32* counters;     // one per strip of the launch, 0 before and after; unused without partials
    float* partials;   // LINEAR_PARTIAL_BYTES for each of linear_split(..).partials() and each 16
                       // rows of x, aligned to 16
    u32* status;       // the kernel sets bits where stored data contradicts itself
    // For 17 or more rows of x, otherwise unused: splits of each matrix's columns, none of them
    // empty (split_stages).
    u8 splits[LINEAR_MATRICES];
    u32 wide_strips;
    u32 tile_sets;    // df11_linear_tile_{2,8,16}: items whose sums are in flight at once, 1 or 2
    u32 x_mapped;     // in the order of a plan, and for 17 or more rows: 1 if x_map is set
    u32 tile_tables;  // df11_linear_tile_{2,8,16}: tables at once: 1, 2 or 4
    // For df11_linear_order_{8,16,32,64}. few_units: splits of strips that a block multiplies at
    // once; few_splits: the most of one strip; few_each: strips of all matrices that each block
    // multiplies; few_more: how many blocks multiply one more.
    u32 few_units, few_splits, few_each, few_more;
    LinearMatrix matrices[LINEAR_MATRICES];
    u32 tile_slot_bytes;  // df11_linear_tile_{2,8,16}: bytes of a slot in the shared memory that is
                          // left, a multiple of 16 (linear_tile_block.cuh)
    u32 share_stages;     // for 129 or more rows of x: see below
    // A CUtensorMap of x, BF16 and row-major, made by cuTensorMapEncodeTiled: boxes of WIDE_COLUMNS
    // columns by all rows or by those of a band, 128-byte swizzle, zeros for columns that do not
    // exist. Without a map, the kernel reads x slowly, as if x or its pitch were not a multiple of
    // 16 bytes.
    XMap x_map;
    // For df11_linear_order_{8,16,32,64}, and for 17 to 128 rows of x: weights that the next
    // product is expected to read first.
    LinearPrefetch prefetches[LINEAR_PREFETCHES];
};
static_assert(sizeof(LinearLaunch) == 1152, "as Rust has it");
constexpr u32 LINEAR_PARTIAL_BYTES = STRIP_ROWS * LINEAR_ROWS * 4;

// df11_linear_order_{8,16,32,64} multiply in the order of a plan of the sum (linear_few.cuh), by
// at most 8, 16, 32 and 64 rows of x. Only the machine code for compute capability 9.0 has them. A
// block has FEW_HELPERS warps, and two for each of few_units and each band of 32 rows of x; units
// times bands are at most FEW_UNITS. Blocks times few_each, plus few_more, are the strips of all
// matrices. The kernels do not read counters, partials and items. A matrix differs from above:
//   slices          splits of its columns, none empty
//   whole_strips    blocks of 64 in each split but the last: ceil(ceil(columns / 64) / splits)
//   first_strip     splits at once, at most few_splits: all of them if they are at most FEW_UNITS
//   first_item      strips of all matrices before
//   first_partial   bits 0 to 7: strips at once, so that strips times splits at once are at most
//                   few_units; bits 8 and up: 2^16 / splits at once, plus one
// x_map has the dimensions 64 columns, x_rows rows and blocks of 64 columns; its boxes 64, as many
// rows as the kernel multiplies, and 2; 128-byte swizzle. x_mapped tells whether there is one. The
// bits of y depend on the matrix, its splits and the row of x.
//
// How blocks share the strips of a matrix. Most strips are one item each. If the last strips are
// too few for a GPU's multiprocessors, each of them becomes several items, slices of its columns,
// whose sums meet in memory. Only the shape decides, for the number of multiprocessors of the GPUs
// that we have.
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
    // Two slices cost more than they save, because their sums meet late.
    if (split.slices < 4) split.slices = 1;
    return split;
}

// df11_linear_fast_{32,64,128} multiply by 17 or more rows of x, in bands of at most 32, 64 and
// 128. Only the machine code for compute capability 9.0 has them. A launch has `cluster` *
// wide_bands * (the sum of wide_items) blocks of WIDE_THREADS, in clusters of `cluster`: at least
// as many as each matrix has splits, at most WIDE_SPLITS. It may have the attribute of programmatic
// stream serialization. The kernels do not read whole_strips, slices, first_item, first_strip and
// first_partial of a matrix, nor items, counters and partials. Differences from above:
//   wide_strips   strips per block, 1 to WIDE_STRIPS; best is an even number, because a warpgroup
//                 takes as long for one strip as for two
//   x_map         boxes of wide_band_rows rows
// The bits of y depend only on the matrix, its splits and the row of x; all kernels below give the
// same.
constexpr u32 WIDE_ROWS = 128;    // rows of x per band, at most
constexpr u32 WIDE_STRIPS = 8;    // strips per block, at most
constexpr u32 WIDE_COLUMNS = 64;  // columns per stage
constexpr u32 WIDE_SPLITS = 8;    // splits of a matrix's columns, and blocks per cluster, at most
__host__ __device__ constexpr u32 strips_of(u32 rows) {
    return rows / STRIP_ROWS + (rows % STRIP_ROWS != 0);
}
__host__ __device__ constexpr u32 wide_stage_count(u32 columns) {
    return columns / WIDE_COLUMNS + (columns % WIDE_COLUMNS != 0);
}
// Stages of every split but the last, which may have fewer. They fix the order of sums: a split is
// one chain of products of 16 columns, first to last, from 0; splits are added in order, then the
// bias.
__host__ __device__ constexpr u32 split_stages(u32 columns, u32 splits) {
    return (wide_stage_count(columns) + splits - 1) / splits;
}
// Bands of at most n rows of x, and rows per band; the last band may have fewer.
__host__ __device__ constexpr u32 wide_bands(u32 x_rows, u32 n) { return (x_rows + n - 1) / n; }
__host__ __device__ constexpr u32 wide_band_rows(u32 x_rows, u32 n) {
    const u32 bands = wide_bands(x_rows, n);
    return ((x_rows + bands - 1) / bands + 7) / 8 * 8;
}
// Clusters per matrix and band.
__host__ __device__ constexpr u32 wide_items(u32 strips, u32 splits, u32 block_strips,
                                             u32 cluster) {
    const u32 groups = (strips + block_strips - 1) / block_strips, each = cluster / splits;
    return (groups + each - 1) / each;
}

// df11_linear_fast_{192,256} and df11_linear_half_{192,256}, in the same machine code, multiply by
// 129 or more rows of x, in bands of at most 192 and 256. A launch has large_shares times
// wide_bands blocks of threads_of_large; it may have the same attribute. A group is LARGE_STRIPS or
// HALF_STRIPS strips by all columns. The stages of all groups, one after the other, are shared out
// evenly. A share that ends inside a group begins with its part of that group and hands the sums to
// the next share, which ends with the rest. Neighbouring blocks take the bands of one share, so
// that they read the same weights. Differences from above:
//   share_stages  stages per share, at least those of a group, so that at most two shares have
//                 parts of one group
//   counters      one per block, 0 before and after
//   partials      large_partial_bytes per block, aligned to 16
//   x_map         boxes of wide_band_rows rows, or of half as many for a launch in clusters of two,
//                 whose blocks share x. Then share_stages are whole groups, all blocks have equally
//                 many stages, the number of shares is even, and wide_band_rows a multiple of 16
//   wide_strips   not read
constexpr u32 LARGE_ROWS = 256;  // rows of x per band, at most
constexpr u32 LARGE_STRIPS = 4;  // strips per group of df11_linear_fast_{192,256}
constexpr u32 HALF_STRIPS = 2;   // strips per group of df11_linear_half_{192,256}
__host__ __device__ constexpr u32 large_partial_bytes(u32 group_strips) {
    return 3 * group_strips * STRIP_ROWS * LARGE_ROWS * 4;
}
__host__ __device__ constexpr u32 large_groups(u32 rows, u32 group_strips) {
    return (strips_of(rows) + group_strips - 1) / group_strips;
}
// Shares of matrices that have `groups` groups together.
__host__ __device__ constexpr u32 large_shares(u32 groups, u32 columns, u32 share_stages) {
    return (groups * wide_stage_count(columns) + share_stages - 1) / share_stages;
}

// A mixture of experts. Each place multiplies one row of x by its expert's matrix. There are two
// ways to route rows:
//
// - With `offsets`, places are sorted by expert: y[i] = x[x_index[i]] W[e]^T for
//   offsets[e] <= i < offsets[e + 1].
// - With `blocks`, `slots` slots have an expert each, and slot s gives row s of y: row s / share of
//   x times the expert's matrix. Without x_index, place i is slot i, and blocks[i] its expert. With
//   it, places come in blocks of as many as the kernel's name says: the expert of block b is
//   blocks[b], and place i is slot x_index[i]; indices of `slots` or more pad the end of a block
//   that has slots. vLLM's operator moe_align_block_size writes such lists. The rows of y of expert
//   NO_EXPERT are 0.
//
// Sums are multiplied by the factor of their row of y, if there are factors, and then rounded.
// The kernels read only the matrices of experts that have places, once for each block of an
// expert's places, of at most 16, 64 or 128: df11_linear_grouped_{16,64,128}, or
// df11_linear_grouped_8 without compute capability 9.0. Each takes this one argument by value, in
// any number of blocks; df11_linear_constants gives the threads and the dynamic shared memory. The
// bits of y depend only on the matrix, the row of x and the factor.
constexpr u32 MOST_EXPERTS = 1024;
constexpr u32 NO_EXPERT = ~0u;
struct alignas(16) GroupedLaunch {
    const u16* x;  // row-major
    u64 x_pitch;   // elements from one row of x to the next; slow unless x and pitch are multiples
                   // of 16 bytes
    const u32* x_index;  // `places` of them, or null: place i then has row i
    const u32* offsets;  // experts + 1 on the device: ascending, the last at most `places`
    const u32* blocks;   // experts of blocks, or null: offsets route
    const u32* end;      // with blocks and x_index, on the device: number of places that count
    const float* factors;  // one for each row of y, or null
    // Null, or `experts` of them on the device, aligned to 16 bytes. The kernel reads the fields
    // before bias, whole_columns and first_column.
    const LinearMatrix* matrices;
    u16* y;
    u64 y_pitch;  // elements from one row of y to the next
    u32* status;
    u32 x_rows,
        columns;          // size of x; an index at or past x_rows sets the status and counts as 0
    u32 rows;             // rows of each matrix, columns of y
    u32 places, experts;  // at most MOST_EXPERTS experts
    u32 slots, share;     // with blocks; share is at least 1
    u32 reserved;
    LinearMatrix whole;  // if `matrices` is null: the rows of all experts, one after the other;
                         // `rows` is a multiple of 32
};
static_assert(sizeof(GroupedLaunch) == 224, "as Rust has it");

// df11_linear_tile_{8,16} multiply by matrices in tiles of 32 x 256 as stored, whose columns are a
// multiple of 8. They take a LinearLaunch too, with up to 8 and with 9 to 16 rows of x. Any number
// of blocks, persistent, of some warps that do not decode and a multiple of four that do;
// df11_linear_constants gives the number of the former and the most of the latter. Best is one
// block per multiprocessor, but no more than `items`. Dynamic shared memory: tile_shared_bytes. The
// bits of y depend only on the matrix and the row of x.
//
// df11_linear_tile_2, only in the machine code for compute capability 9.0, is for one or two rows
// of x: the same argument and bits of y, with more warps that decode, and x in shared memory
// besides.
//
// df11_linear_tile_{32,64}, also only there, are for 17 to 64 rows of x, at most 32 and 64: the
// same argument, DECODED_THREADS threads, decoded_shared_bytes of dynamic shared memory. Best is
// one block per multiprocessor, but no more than the sum of RoundSplit.items. The kernels do not
// read whole_strips, slices, first_item, first_strip and first_partial of a matrix, nor items.
// Differences from above:
//   counters      LINEAR_BLOCKS for each matrix
//   partials      the sum of RoundSplit.places() times decoded_partial_bytes
//   tile_sets     stages of a set: 2 to MOST_DECODED
// The bits of y depend on the matrix, the row of x, and whether x has up to 32 or up to 64 rows.

// Gathers rows of a matrix by indices on the device: df11_linear_gather from the fast layout,
// df11_linear_tile_gather from tiles as stored. One argument by value; blocks of UNPACK_WARPS
// warps, count * ceil(columns / 256) warps in all. An index at or past `rows` sets the status and
// gives zeros.
struct alignas(16) GatherTask {
    const u8* data;  // as in LinearMatrix, to rest_count
    const void* index;
    const void* rest;
    const TileTable* table;
    u64 rest_count;
    const void* indices;  // u32, or i64 if wide is 1
    u16* output;          // row i is row indices[i] of the matrix
    u64 pitch;  // elements from one row of output to the next; slow unless both are multiples of 16
                // bytes
    u32 rows, columns;
    u32 count, wide;
    u32 whole_columns, first_column;  // as in LinearMatrix
    u32* status;
};
static_assert(sizeof(GatherTask) == 96, "as Rust has it");

// Transcodes from BF16 a range of whole strips (the last may be partial). Four kernels run in
// order: df11_linear_count, df11_linear_scan, df11_linear_pack, df11_linear_patch. Deterministic.
// One argument, by value.
struct alignas(16) PackTask {
    const u16* weights;  // row-major, of the range
    u64 pitch;           // elements from one row to the next
    u32 rows, columns;   // size of the range
    FastHead* heads;     // the range's; count writes all fields but `first`, scan writes `first`
    u8* data;            // the range's, aligned to 16
    u32* entries;        // the matrix's: `first` in heads counts from here
    u64 capacity;        // room for entries: pack writes none beyond it
    u32* total;          // entries so far: scan begins at this and adds the range's
    u8* patches;         // the range's, aligned to 16
};
static_assert(sizeof(PackTask) == 80, "as Rust has it");
// df11_linear_count and _pack run in ceil(tiles / PACK_WARPS) blocks of PACK_WARPS warps; count
// needs PACK_SHARED_BYTES of dynamic shared memory, pack none. scan runs in one block of 1024
// threads, patch in ceil(strips / PACK_WARPS) blocks of PACK_WARPS warps.
constexpr u32 PACK_WARPS = 4;

// Decodes a part of a matrix from the fast layout to BF16: the elements that are in the range of
// elements and in that of columns. df11_linear_unpack; one argument by value; ceil(tiles /
// UNPACK_WARPS) blocks of UNPACK_WARPS warps.
struct alignas(16) UnpackTask {
    const u8* data;  // the matrix's, like the next three
    const FastHead* heads;
    const u32* entries;
    u64 entry_count;
    u16* output;  // address of row 0, column 0, wanted or not; modulo 2^64
    u64 pitch;    // elements from one row to the next; slow unless both are multiples of 16 bytes
    u64 element_begin, element_end;
    u32 rows, columns;  // size of the matrix
    u32 column_begin, column_end;
    u32 first_strip, first_tile;  // the first tile that holds wanted elements
    u32 across, tiles;            // tiles that hold wanted elements: per strip, and in all
    u32* status;
};
static_assert(sizeof(UnpackTask) == 112, "as Rust has it");
constexpr u32 UNPACK_WARPS = 8;

// Bits of the status word.
constexpr u32 STATUS_ENTRIES = 128;  // a head names entries that do not exist
constexpr u32 STATUS_INDEX = 256;    // an index or an offset names a row that does not exist
}  // namespace df11::linear
