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
constexpr u32 TILE_PATCHES = 4, MAX_PATCHES = 512, PATCH_BYTES = 20;
constexpr u32 NO_PATCH = 0xFFFFFFFF, MANY_PATCHES = 0xFFFFFFFE;
__host__ __device__ constexpr u32 patch_places(u32 columns) {
    const u32 tiles = (columns + TILE_STEPS * STEP_COLUMNS - 1) / (TILE_STEPS * STEP_COLUMNS);
    return tiles < MAX_PATCHES / TILE_PATCHES ? TILE_PATCHES * tiles : MAX_PATCHES;
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

// A matrix of a launch.
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
// The host guarantees that the arrays have the sizes that the layout gives for the rows, the
// launch's `columns` and the whole's columns. The arrays may hold anything.
struct alignas(16) LinearMatrix {
    const u8* data;  // aligned to 16
    const void* index;
    const void* rest;
    union {
        const TileTable* table;
        const u8* patches;  // aligned to 16
    };
    u64 rest_count;
    u32 whole_columns;  // columns of the whole; the launch's columns unless this is a slice
    u32 first_column;   // column of the whole: a multiple of 256
};
static_assert(sizeof(LinearMatrix) == 48, "as Rust has it");
// A matrix and the place of its product, which has room for the rows of x.
struct ProductMatrix : LinearMatrix {
    u16* y;           // row 0, first column of the product
    u64 y_pitch;      // elements from a row of y to the next
    const u16* bias;  // `rows` of them, or null
    u32 rows;         // rows of the matrix, columns of the product; at least 1
};
static_assert(sizeof(ProductMatrix) == 80, "as Rust has it");

// What the arguments of all kernels that multiply begin with; each takes its own by value. The name
// of an argument has the layout and the most rows of x. df11_linear_constants gives the threads and
// the dynamic shared memory.
//
// If the constants allow it, a launch may have the attribute of programmatic stream serialization.
// The matrices must then have been written before the previous launch began.
constexpr u32 LINEAR_MATRICES = 8, LINEAR_ROWS = 16;
template <class Matrix>
struct LinearLaunch {
    const u16* x;  // row-major
    u64 x_pitch;   // elements from one row of x to the next; slow unless x and pitch are multiples
                   // of 16 bytes
    u32 x_rows;
    u32 columns;       // columns of x and of all matrices; at least 1
    u32 matrix_count;  // 1 to LINEAR_MATRICES
    u32* status;       // the kernel sets bits where stored data contradicts itself
    Matrix matrices[LINEAR_MATRICES];
};
// A CUtensorMap of x, BF16 and row-major, made by cuTensorMapEncodeTiled: boxes of 64 columns by
// all rows or by those of a band, 128-byte swizzle, zeros for columns that do not exist. Without a
// map, a kernel reads x slowly, as if x or its pitch were not a multiple of 16 bytes.
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

// Blocks share the strips of matrices as items: most strips are one item each. If the last strips
// are too few for a GPU's multiprocessors, each of them becomes several items, slices of its
// columns, whose sums meet in memory (Split, src/gpu/linear/split.rs).
constexpr u32 LINEAR_GROUP = 4, LINEAR_BLOCKS = 132;
struct ItemMatrix : ProductMatrix {
    u32 first_item;            // items of all matrices before
    u32 whole_strips, slices;  // strips of one item each; items of each strip after them
    u32 first_strip;           // strips of all matrices before
    u32 first_partial;         // items in slices of all matrices before
};
static_assert(sizeof(ItemMatrix) == 96, "as Rust has it");
constexpr u32 LINEAR_PARTIAL_BYTES = STRIP_ROWS * LINEAR_ROWS * 4;

// df11_linear_fast_{8,16}: 1 to LINEAR_ROWS rows of x. Any multiple of LINEAR_GROUP blocks,
// persistent; best are as many as fit the GPU at once, but no more than `items`. The bits of y
// depend only on the matrix and the row of x, not on other rows, other matrices or the grid.
struct alignas(16) Fast16Launch : LinearLaunch<ItemMatrix> {
    u32* counters;    // one per strip of the launch, 0 before and after; unused without slices
    float* partials;  // LINEAR_PARTIAL_BYTES for each item in slices, aligned to 16
    u32 items;
};
static_assert(sizeof(Fast16Launch) == 848, "as Rust has it");

// df11_linear_tile_{8,16} multiply by matrices in tiles of 32 x 256 as stored, whose columns are a
// multiple of 8, up to 8 and 16 rows of x. Any number of blocks, persistent, of some warps that do
// not decode and a multiple of four that do; df11_linear_constants gives the number of the former
// and the most of the latter. Best is one block per multiprocessor, but no more than `items`.
// Dynamic shared memory: tile_shared_bytes. The bits of y depend only on the matrix and the row of
// x.
//
// df11_linear_tile_2, only in the machine code for compute capability 9.0, is for one or two rows
// of x: the same argument and bits of y, with more warps that decode, and x in shared memory
// besides.
struct alignas(16) Tile16Launch : LinearLaunch<ItemMatrix> {
    u32* counters;  // as in Fast16Launch, like the next two
    float* partials;
    u32 items;
    u32 sets;        // items whose sums are in flight at once, 1 or 2
    u32 tables;      // tables at once: 1, 2 or 4
    u32 slot_bytes;  // bytes of a slot in the shared memory that is left, a multiple of 16
                     // (linear_tile_block.cuh)
};
static_assert(sizeof(Tile16Launch) == 848, "as Rust has it");

// df11_linear_tile_{32,64}: 17 to 64 rows of x, by matrices in tiles as stored; only in the machine
// code for compute capability 9.0. TILE64_THREADS threads, tile64_shared_bytes of dynamic shared
// memory. Best is one block per multiprocessor, but no more than the sum of RoundSplit.items. The
// bits of y depend on the matrix, the row of x, and whether x has up to 32 or up to 64 rows.
struct alignas(16) Tile64Launch : LinearLaunch<ProductMatrix> {
    u32* counters;    // LINEAR_BLOCKS for each matrix, 0 before and after
    float* partials;  // the sum of RoundSplit.places() times tile64_partial_bytes, aligned to 16
    u32 stages;       // of a set: 2 to TILE64_STAGES
};
static_assert(sizeof(Tile64Launch) == 720, "as Rust has it");

// df11_linear_order_{8,16,32,64} multiply in the order of a plan of the sum (linear_order.cuh), by
// at most 8, 16, 32 and 64 rows of x. Only the machine code for compute capability 9.0 has them. A
// block has ORDER_HELPERS warps, and two for each of `units` and each band of 32 rows of x; units
// times bands are at most ORDER_UNITS. Blocks times `each`, plus `more`, are the strips of all
// matrices. The bits of y depend on the matrix, its splits and the row of x.
struct OrderMatrix : ProductMatrix {
    u32 first_strip;  // strips of all matrices before
    u32 splits;       // of its columns, none empty
    u32 length;       // blocks of 64 in each split but the last: ceil(ceil(columns / 64) / splits)
    u32 pass_splits;  // splits at once, at most the launch's: all of them if at most ORDER_UNITS
    u32 strips;  // bits 0 to 7: strips at once, so that strips times splits at once are at most
                 // `units`; bits 8 and up: 2^16 / pass_splits, plus one
};
static_assert(sizeof(OrderMatrix) == 96, "as Rust has it");
struct alignas(64) OrderLaunch : LinearLaunch<OrderMatrix> {
    // Dimensions: 64 columns, x_rows rows, blocks of 64 columns. Boxes: 64, as many rows as the
    // kernel multiplies, 2.
    XMap x_map;
    LinearPrefetch prefetches[LINEAR_PREFETCHES];  // what the next product will read first
    u32 x_mapped;                                  // 1 if x_map is set
    u32 units, splits;  // splits of strips that a block multiplies at once; the most of one strip
    u32 each, more;     // strips of each block; how many blocks multiply one more
};
static_assert(sizeof(OrderLaunch) == 1152, "as Rust has it");

// df11_linear_fast_{32,64,128} multiply by 17 or more rows of x, in bands of at most 32, 64 and
// 128. Only the machine code for compute capability 9.0 has them. A launch has `cluster` *
// fast128_bands * (the sum of fast128_items) blocks of FAST128_THREADS, in clusters of `cluster`:
// at least as many as each matrix has splits, at most FAST128_SPLITS. The bits of y depend only on
// the matrix, its splits and the row of x; all kernels below give the same.
struct SplitMatrix : ProductMatrix {
    u32 splits;  // of its columns, none of them empty (split_stages)
};
static_assert(sizeof(SplitMatrix) == 80, "as Rust has it");
struct alignas(64) Fast128Launch : LinearLaunch<SplitMatrix> {
    XMap x_map;                                    // boxes of fast128_band_rows rows
    LinearPrefetch prefetches[LINEAR_PREFETCHES];  // what the next product will read first
    u32 x_mapped;                                  // 1 if x_map is set
    u32 strips;  // per block, 1 to FAST128_STRIPS; best is an even number, because a warpgroup
                 // takes as long for one strip as for two
};
static_assert(sizeof(Fast128Launch) == 1024, "as Rust has it");
constexpr u32 FAST128_ROWS = 128;    // rows of x per band, at most
constexpr u32 FAST128_STRIPS = 8;    // strips per block, at most
constexpr u32 FAST128_COLUMNS = 64;  // columns per stage
constexpr u32 FAST128_SPLITS = 8;  // splits of a matrix's columns, and blocks per cluster, at most
__host__ __device__ constexpr u32 strips_of(u32 rows) {
    return rows / STRIP_ROWS + (rows % STRIP_ROWS != 0);
}
__host__ __device__ constexpr u32 fast128_stage_count(u32 columns) {
    return columns / FAST128_COLUMNS + (columns % FAST128_COLUMNS != 0);
}
// Stages of every split but the last, which may have fewer. They fix the order of sums: a split is
// one chain of products of 16 columns, first to last, from 0; splits are added in order, then the
// bias.
__host__ __device__ constexpr u32 split_stages(u32 columns, u32 splits) {
    return (fast128_stage_count(columns) + splits - 1) / splits;
}
// Bands of at most n rows of x, and rows per band; the last band may have fewer.
__host__ __device__ constexpr u32 fast128_bands(u32 x_rows, u32 n) { return (x_rows + n - 1) / n; }
__host__ __device__ constexpr u32 fast128_band_rows(u32 x_rows, u32 n) {
    const u32 bands = fast128_bands(x_rows, n);
    return ((x_rows + bands - 1) / bands + 7) / 8 * 8;
}
// Clusters per matrix and band.
__host__ __device__ constexpr u32 fast128_items(u32 strips, u32 splits, u32 block_strips,
                                                u32 cluster) {
    const u32 groups = (strips + block_strips - 1) / block_strips, each = cluster / splits;
    return (groups + each - 1) / each;
}

// df11_linear_fast_{192,256} and df11_linear_half_{192,256}, in the same machine code, multiply by
// 129 or more rows of x, in bands of at most 192 and 256, in as many blocks of threads_of_fast256
// as there are shares, times fast128_bands. A group is FAST256_STRIPS or HALF_STRIPS strips by all
// columns. The stages of all groups, one after the other, are shared out evenly. A share that ends
// inside a group begins with its part of that group and hands the sums to the next share, which
// ends with the rest. Neighbouring blocks take the bands of one share, so that they read the same
// weights. In clusters of two, blocks share x: share_stages are then whole groups, all blocks have
// equally many stages, the number of shares is even, and fast128_band_rows a multiple of 16.
struct alignas(64) Fast256Launch : LinearLaunch<SplitMatrix> {
    XMap x_map;        // boxes of fast128_band_rows rows, in clusters of two of half as many
    u32* counters;     // one per block, 0 before and after
    float* partials;   // fast256_partial_bytes per block, aligned to 16
    u32 x_mapped;      // 1 if x_map is set
    u32 share_stages;  // per share, at least those of a group, so that at most two shares have
                       // parts of one group
};
static_assert(sizeof(Fast256Launch) == 896, "as Rust has it");
constexpr u32 FAST256_ROWS = 256;  // rows of x per band, at most
constexpr u32 FAST256_STRIPS = 4;  // strips per group of df11_linear_fast_{192,256}
constexpr u32 HALF_STRIPS = 2;     // strips per group of df11_linear_half_{192,256}
__host__ __device__ constexpr u32 fast256_partial_bytes(u32 group_strips) {
    return 3 * group_strips * STRIP_ROWS * FAST256_ROWS * 4;
}
__host__ __device__ constexpr u32 fast256_groups(u32 rows, u32 group_strips) {
    return (strips_of(rows) + group_strips - 1) / group_strips;
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
constexpr u32 MAX_EXPERTS = 1024;
constexpr u32 NO_EXPERT = ~0u;
struct alignas(16) GroupedLaunch {
    const u16* x;  // row-major
    u64 x_pitch;   // elements from one row of x to the next; slow unless x and pitch are multiples
                   // of 16 bytes
    const u32* x_index;    // `places` of them, or null: place i then has row i
    const u32* offsets;    // experts + 1 on the device: ascending, the last at most `places`
    const u32* blocks;     // experts of blocks, or null: offsets route
    const u32* end;        // with blocks and x_index, on the device: number of places that count
    const float* factors;  // one for each row of y, or null
    const LinearMatrix* matrices;  // null, or `experts` of them on the device, aligned to 16 bytes
    u16* y;
    u64 y_pitch;  // elements from one row of y to the next
    u32* status;
    u32 x_rows,
        columns;          // size of x; an index at or past x_rows sets the status and counts as 0
    u32 rows;             // rows of each matrix, columns of y
    u32 places, experts;  // at most MAX_EXPERTS experts
    u32 slots, share;     // with blocks; share is at least 1
    u32 reserved;
    LinearMatrix whole;  // if `matrices` is null: the rows of all experts, one after the other;
                         // `rows` is a multiple of 32
};
static_assert(sizeof(GroupedLaunch) == 176, "as Rust has it");

// Gathers rows of a matrix by indices on the device: df11_linear_gather from the fast layout,
// df11_linear_tile_gather from tiles as stored. One argument by value; blocks of UNPACK_WARPS
// warps, count * ceil(columns / 256) warps in all. An index at or past `rows` sets the status and
// gives zeros.
struct GatherTask : LinearMatrix {
    const void* indices;  // u32, or i64 if wide is 1
    u16* output;          // row i is row indices[i] of the matrix
    u64 pitch;  // elements from one row of output to the next; slow unless both are multiples of 16
                // bytes
    u32* status;
    u32 rows, columns;
    u32 count, wide;
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
