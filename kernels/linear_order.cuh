// Multiplies 1 to 64 rows of x by matrices in the fast layout, and up to 16 rows of each expert by
// its matrix, on compute capability 9.0, in the order of a plan of the sum: K is cut into splits,
// and each split is one chain of products of 16 columns from zero; the sums of splits are added in
// order, then the bias, then rounded once. With the splits of cuBLAS the results have its bits
// (spec/gpu.md, part 7).
//
//   block     one per multiprocessor, persistent: an even share of the strips of all matrices
//   piece     some strips of one matrix with all of their splits: up to ORDER_UNITS units at once;
//             if there are more splits, some at a time, in passes
//   unit      one split of one strip: two warps, 16 rows each, walk through its columns alone. More
//             than 32 rows of x are two bands, and a unit has two warps for each
//   stage     128 columns of each unit, two blocks of 64; a ring of stages fills shared memory
//   warps     two per unit and band multiply; ORDER_ASKING request weights, and share each stage;
//             one requests x; ORDER_TELLING fill tables
//
//      stage | unit 0: block, block | unit 1: block, block | ... | x, each split: block, block |
//              warps 0, 1              warps 2, 3                 64 columns of all rows of x
//
//      block (64 columns of 32 rows, 3072 bytes) | step 0 | step 1 |. The warp of rows 0 to 15 has
//      bytes 0 to 511 of a step, and codes 0 and 1 of each lane's four; the warp of rows 16 to 31
//      has the others
//
//   begin     a block is as late as its first requests, and a warp runs new code slowly: eight
//             instructions in 90 clocks. So all warps run the first lines together, barriers are
//             initialised by all, 60 clocks each, and the first requests wait for few of them
//   early     weights and tables do not wait for the previous launch to end; x does. All copies go
//             through one queue, so a warp of its own requests x between the requests of the others
//   order     the warps that request weights share each stage, so that stages arrive in order
//   chain     blocks are loaded two ahead and decoded one ahead; a stage has no branch except one
//             to what is rare: a wait, if its successor has not arrived a stage early, and patches
//   x         for each split a box of 128 columns by 8, 16, 32 or 64 rows, by a tensor map; for
//             experts a copy per row, because their rows lie anywhere; word by word if x is not
//             aligned, and where columns end within a block
//   patches   a warp that put entries in their places itself would run code that no other warp
//             runs: that code is fetched from far away, and the slowest warp ends the launch. So
//             packing decodes each lane's product that has entries and puts these in. The result is
//             a patch, which the lane loads over what it has decoded. Tables of patches are loaded
//             before weights are requested: after them a load waits 5 us or more
//   prefetch  when its last weights and x have arrived, a block brings some of the next product's
//             weights to L2
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills): 68, 78 and 94 registers for 8, 16 and more
// rows, 20 warps. A stage is 216, 227 or 249 instructions of a warp in a straight line: 120 decode;
// 8, 16 or 32 multiply. kernels/bench/stalls.py estimates its clocks from the machine code: 384,
// 386, 440. Products wait for each other (33 clocks each), which makes 264 of them. Orders of
// statements with fewer estimated clocks were no faster.
// Limit of several bands: each warp loads the x of its band, 8 KiB a stage. With two units and two
// bands these loads take as long as linear_fast_128.cuh, so products with more than one strip in a
// block go there (benches/record/2026-11-27-chain.md).
#pragma once
#include "linear_fast_128.cuh"

namespace df11::linear {
// Warps that request weights, that request x, and that fill tables.
constexpr u32 ORDER_ASKING = 4, ORDER_ASKING_X = 1, ORDER_TELLING = 3;
constexpr u32 ORDER_UNITS = 6, ORDER_STAGES = LANES;
constexpr u32 ORDER_BLOCKS = 2;  // blocks per stage
constexpr u32 ORDER_BAND = 32;   // most rows of x that a warp multiplies
constexpr u32 ORDER_HELPERS = ORDER_ASKING + ORDER_ASKING_X + ORDER_TELLING;
constexpr u32 ORDER_THREADS = (ORDER_HELPERS + 2 * ORDER_UNITS) * LANES;
constexpr u32 ORDER_COLUMNS = 64, ORDER_BLOCK_BYTES = ORDER_COLUMNS / STEP_COLUMNS * STEP_BYTES;
constexpr u32 ORDER_SHARED_BYTES = 227 * 1024;
constexpr u32 ORDER_GROUPED_BYTES = ORDER_SHARED_BYTES - 5 * 1024;  // batches of experts are static
// Most blocks of a unit in a piece; a longer split takes several pieces. The blocks lie in up to
// ORDER_TILES tiles. All columns begin with a tile; splits begin anywhere.
constexpr u32 ORDER_TILES = LANES, ORDER_WHOLE_PART = 4 * ORDER_TILES,
              ORDER_PART = ORDER_WHOLE_PART - 4;
static_assert((3 + ORDER_PART + 3) / 4 <= ORDER_TILES && ORDER_PART % ORDER_BLOCKS == 0,
              "whole stages");
static_assert(ORDER_BLOCKS == 2, "two buffers, half a tile");
// A unit's table. Pieces use two of them in turn:
//   word      number of patches of rows 0 to 15, or ORDER_MANY; 16 bytes
//   bases     one per stage, in the exponent places of two weights
//   patches   8 bytes each: the number (linear_task.cuh), and the address that the words of product
//             0 would have; NO_PATCH follows the last one
//   words     four per patch; those of one lane and window are as far apart as their products
constexpr u32 ORDER_TABLES = 2, ORDER_MANY = 0xFFFFFFFF;
struct OrderTable {
    u32 at, tiles;
    __device__ u32 bases() const { return at + 16; }
    __device__ u32 numbers() const { return bases() + tiles * 8; }
    __device__ u32 places() const { return TILE_PATCHES * tiles; }
    __device__ u32 words() const { return numbers() + places() * 8 + 16; }
    __device__ static u32 bytes(u32 tiles) { return 32 + tiles * (8 + TILE_PATCHES * 24); }
};

__device__ inline u32 order_blocks_of(u32 columns) {
    return columns / ORDER_COLUMNS + (columns % ORDER_COLUMNS != 0);
}

// A piece: what a block multiplies at once.
struct OrderPiece {
    const u8* data;  // data of the first strip
    const FastHead* heads;
    const u8* patches;
    const u32* entries;
    u64 entry_count;
    u16* y;  // product of the first row of x and the first row of the matrix
    u64 y_pitch;
    const u16* bias;
    u32 rows, whole_columns, first_strip, strips;
    u32 first_window;                     // the patches' window of the first column
    u32 all_splits, first_split, splits;  // splits: those of this pass
    u32 pass_splits, inverse;             // splits per pass but the last; 2^16 / that, or more
    u32 length;                           // blocks of each split but the last
    u32 first_block, stages;              // first block in each split, stages of the piece
    u32 x_first, x_rows;                  // experts: the first place; rows of x
    u32 left;                             // the block's strips of the matrix after these

    // A unit's strip; its split in the pass; whether the unit exists.
    __device__ u32 strip_of(u32 unit) const { return unit * inverse >> 16; }
    __device__ u32 split_of(u32 unit) const { return unit - strip_of(unit) * pass_splits; }
    __device__ bool has(u32 unit) const {
        return strip_of(unit) < strips && split_of(unit) < splits;
    }
    __device__ u32 part() const { return all_splits > 1 ? ORDER_PART : ORDER_WHOLE_PART; }
    __device__ bool is_last_part() const { return first_block + part() >= length; }
    __device__ bool is_last_pass() const { return first_split + splits == all_splits; }
    // The first and the end block of a split of the pass; its stages start at an even block.
    __device__ u32 begin_of(u32 split) const {
        return (first_split + split) * length + first_block;
    }
    __device__ u32 end_of(u32 split, u32 blocks) const {
        const u32 end = min(first_block + part(), length);
        return min((first_split + split) * length + end, blocks);
    }
    __device__ void begin_part(u32 block) {
        first_block = block;
        const u32 is_odd = all_splits > 1 ? length % ORDER_BLOCKS : 0;  // a split may begin odd
        stages = (min(length - block, part()) + is_odd + ORDER_BLOCKS - 1) / ORDER_BLOCKS;
    }
};

// Iterates over a block's pieces.
template <class Work>
struct OrderPieces {
    const Work& work;
    // The piece's first strip, and the end of the block's strips, among those of all matrices.
    u32 strip, end;
    OrderPiece piece = {};

    __device__ explicit OrderPieces(const Work& w) : work(w) {
        const u32 each = work.each(), more = work.more();
        strip = each * blockIdx.x + min(blockIdx.x, more);
        end = strip + each + (blockIdx.x < more);
    }
    // Goes to the next piece; false if there is none.
    __device__ bool next() {
        if (piece.strips && !piece.is_last_part()) {
            piece.begin_part(piece.first_block + piece.part());
            return true;
        }
        piece.begin_part(0);
        if (piece.strips && !piece.is_last_pass()) {
            piece.first_split += piece.splits;
            piece.splits = min(piece.splits, piece.all_splits - piece.first_split);
            return true;
        }
        strip += piece.strips;
        if (strip >= end) return false;
        if (piece.left) {
            piece.data += u64(piece.strips) * steps_of(piece.whole_columns) * STEP_BYTES;
            piece.heads += u64(piece.strips) * tiles_across(piece.whole_columns);
            piece.patches += u64(piece.strips) * patch_bytes(piece.whole_columns);
            piece.first_strip += piece.strips;
        } else {
            work.find(strip, end, piece);
            // Takes as many strips at once as there is room for, evenly. These numbers are small: a
            // division would be more code at the beginning.
            const u32 most = piece.strips;
            u32 times = 1;
            while (times * most < piece.left) times++;
            while ((piece.strips - 1) * times >= piece.left) piece.strips--;
            piece.begin_part(0);
        }
        piece.first_split = 0;
        piece.splits = piece.pass_splits;
        piece.strips = min(piece.strips, piece.left);
        piece.left -= piece.strips;
        return true;
    }
};

// Matrices that share x, which comes in boxes of ROWS rows.
template <u32 ROWS>
struct OrderShared {
    static constexpr bool BOXES = true;
    static constexpr bool SPLITS = true;  // whether a matrix may have several
    static constexpr u32 BANDS = (ROWS + ORDER_BAND - 1) / ORDER_BAND, EIGHTS = ROWS / BANDS / 8;
    static constexpr u32 X_ALIGNED = 1024;
    // Bytes of a split's x in a stage; from one block to the next; from eight rows to the next
    // eight.
    static constexpr u32 X_BYTES = ORDER_BLOCKS * ROWS * 128, X_BLOCK = ROWS * 128, X_EIGHT = 1024;
    const OrderLaunch& launch;
    __device__ u32 unit_count() const { return launch.units; }
    __device__ u32 x_count() const { return launch.splits; }
    __device__ u32 each() const { return launch.each; }
    __device__ u32 more() const { return launch.more; }
    __device__ void find(u32 strip, u32 end, OrderPiece& piece) const {
        u32 matrix = 0;
        while (matrix + 1 < launch.matrix_count && launch.matrices[matrix + 1].first_strip <= strip)
            matrix++;
        const OrderMatrix& m = launch.matrices[matrix];
        piece.whole_columns = m.whole_columns;
        piece.first_strip = strip - m.first_strip;
        piece.left = min(m.first_strip + strips_of(m.rows), end) - strip;
        piece.data = m.data + u64(piece.first_strip) * steps_of(m.whole_columns) * STEP_BYTES;
        piece.heads = static_cast<const FastHead*>(m.index) +
                      u64(piece.first_strip) * tiles_across(m.whole_columns);
        piece.patches = m.patches + u64(piece.first_strip) * patch_bytes(m.whole_columns);
        piece.first_window = m.first_column / (ORDER_BLOCKS * ORDER_COLUMNS);
        piece.entries = static_cast<const u32*>(m.rest);
        piece.entry_count = m.rest_count;
        piece.y = m.y;
        piece.y_pitch = m.y_pitch;
        piece.bias = m.bias;
        piece.rows = m.rows;
        piece.all_splits = m.splits;
        piece.length = m.length;
        piece.pass_splits = m.pass_splits;
        piece.inverse = m.strips >> 8;
        piece.strips = m.strips & 255;
        piece.x_rows = launch.x_rows;
    }
    __device__ const u16* x(const OrderPiece&, u32 row) const {
        return launch.x + row * launch.x_pitch;
    }
    __device__ float bias(const OrderPiece& piece, u32 row) const {
        return piece.bias ? widen_bf16(piece.bias[row]) : 0;
    }
    __device__ void store(const OrderPiece& piece, u32 x_row, u32 row, float sum,
                          float bias) const {
        if (piece.bias) sum += bias;
        piece.y[x_row * piece.y_pitch + row] = round_to_bf16(sum);
    }
    // A lane's place for a load of eight rows of x by 32 columns, and the place in the block's
    // second half.
    __device__ static u32 x_place(u32 lane) {
        return lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16;
    }
    __device__ static u32 second(u32 place) { return place ^ 64; }
};

// Experts, each with its own rows of x. Rows lie anywhere, so each has a copy of its own.
struct OrderGrouped : Grouped<LINEAR_ROWS> {
    static constexpr bool BOXES = false;
    static constexpr bool SPLITS = false;
    static constexpr u32 BANDS = 1, EIGHTS = LINEAR_ROWS / 8, X_ALIGNED = 128;
    static constexpr u32 X_PITCH = ORDER_BLOCKS * 128 + 16;  // no bank conflicts within a load
    static constexpr u32 X_BYTES = LINEAR_ROWS * X_PITCH, X_BLOCK = 128, X_EIGHT = 8 * X_PITCH;
    using Base = Grouped<LINEAR_ROWS>;
    u32 units, each_, more_;
    // Call it after the batches are counted.
    __device__ OrderGrouped(const GroupedLaunch& l, const u32* b) : Base{l, b} {
        each_ = items() / gridDim.x;
        more_ = items() - each_ * gridDim.x;
        units = max(min(each_ + (more_ > 0), ORDER_UNITS), 1);
    }
    __device__ u32 unit_count() const { return units; }
    __device__ u32 x_count() const { return 1; }
    __device__ u32 each() const { return each_; }
    __device__ u32 more() const { return more_; }
    __device__ void find(u32 strip, u32 end, OrderPiece& piece) const {
        const Range at = range(strip);
        const LinearMatrix m = matrix(at);
        piece.whole_columns = m.whole_columns;
        piece.first_strip = at.strip;
        piece.left = min(strips() - at.strip, end - strip);
        piece.data = m.data + u64(at.strip) * steps_of(m.whole_columns) * STEP_BYTES;
        piece.heads =
            static_cast<const FastHead*>(m.index) + u64(at.strip) * tiles_across(m.whole_columns);
        piece.patches = m.patches + u64(at.strip) * patch_bytes(m.whole_columns);
        piece.first_window = m.first_column / (ORDER_BLOCKS * ORDER_COLUMNS);
        piece.entries = static_cast<const u32*>(m.rest);
        piece.entry_count = m.rest_count;
        piece.rows = launch.rows;
        piece.all_splits = piece.pass_splits = 1;
        piece.inverse = 1 << 16;
        piece.length = order_blocks_of(launch.columns);
        piece.strips = units;
        piece.x_first = at.first_row;
        piece.x_rows = at.rows;
    }
    __device__ const u16* x(const OrderPiece& piece, u32 row) const {
        Range at = {};
        at.first_row = piece.x_first;
        return Base::x(at, row);
    }
    __device__ float bias(const OrderPiece&, u32) const { return 0; }
    __device__ void store(const OrderPiece& piece, u32 x_row, u32 row, float sum, float) const {
        Range at = {};
        at.first_row = piece.x_first;
        y(at, x_row)[row] = round_to_bf16(scale(at, x_row, sum));
    }
    __device__ static u32 x_place(u32 lane) { return lane % 8 * X_PITCH + lane / 8 * 16; }
    __device__ static u32 second(u32 place) { return place + 64; }
};

// Warps of a unit: one for each half of its strip and each band of x.
template <class Work>
constexpr u32 ORDER_HALVES = 2 * Work::BANDS;

// Where warps meet after they have initialised barriers. Warps that request weights initialise
// those that their first requests need, and meet among themselves; they wait for the other warps
// later.
enum OrderMeeting { ALL_BARRIERS = 1, OTHER_BARRIERS = 2, FULL_BARRIERS = 3 };
__device__ __forceinline__ void arrive_at(OrderMeeting meeting) {
    asm volatile("bar.arrive %0, %1;" ::"r"(meeting + 1), "r"(blockDim.x) : "memory");
}
// Waits until all barriers are initialised. Each of the other warps calls it once.
__device__ __forceinline__ void meet_barriers() {
    group_barrier(ALL_BARRIERS, blockDim.x);
    arrive_at(OTHER_BARRIERS);
}

// Broadcasts a number from lane 0, so that the compiler knows that all lanes have the same.
__device__ __forceinline__ u32 same(u32 number) { return __shfl_sync(ALL_LANES, number, 0); }

// Layout of shared memory: barriers, tables, sums of splits, then stages, each with weights and x.
template <class Work>
struct OrderRing {
    u32 barriers, tables, tiles, table_bytes, sums, first, bytes, x, count;
    u32 asking;  // warps that request weights
    u32 place, full, phase = 0;
    __device__ OrderRing(const Work& work, u32 at, u32 room) : barriers(at) {
        const u32 units = work.unit_count(), splits = work.x_count();
        tables = at + 8 * (2 * ORDER_STAGES + 2 * ORDER_TABLES);
        tiles = min((tiles_across(work.launch.columns) + 1) / 2 * 2, ORDER_TILES);
        table_bytes = units * OrderTable::bytes(tiles);
        sums = tables + ORDER_TABLES * table_bytes;
        // One per warp, and one for the strip whose splits come in passes.
        const u32 sum_bytes =
            splits > 1 ? (units + 1) * ORDER_HALVES<Work> * Work::EIGHTS * 512 : 0;
        first = (sums + sum_bytes + 1023) / 1024 * 1024;
        x = units * ORDER_BLOCKS * ORDER_BLOCK_BYTES;
        asking = min(units, ORDER_ASKING);
        bytes =
            (x + splits * Work::X_BYTES + Work::X_ALIGNED - 1) / Work::X_ALIGNED * Work::X_ALIGNED;
        count = min((at + room - first) / bytes, ORDER_STAGES);
        // Kept: the compiler would compute them again in each stage.
        first = same(first), bytes = same(bytes), count = same(count);
        place = first, full = barriers;
    }
    __device__ u32 empty() const { return full + 8 * ORDER_STAGES; }
    // A unit's table for piece number `piece`.
    __device__ OrderTable table(u32 piece, u32 unit) const {
        return {tables + piece % ORDER_TABLES * table_bytes + unit * OrderTable::bytes(tiles),
                tiles};
    }
    __device__ u32 table_full(u32 piece) const {
        return barriers + 8 * (2 * ORDER_STAGES + piece % ORDER_TABLES);
    }
    __device__ u32 table_empty(u32 piece) const { return table_full(piece) + 8 * ORDER_TABLES; }
    __device__ void next() {
        place += bytes, full += 8;
        if (full == barriers + 8 * count) full = barriers, place = first, phase ^= 1;
    }
    // All warps call it, and meet afterwards. One barrier takes a warp 60 clocks, whichever lanes
    // ask for it, so each warp initialises some.
    __device__ void init_barriers(u32 consumers, u32 warp, u32 lane) const {
        if (lane == 0) {
            const u32 number = warp - consumers;
            if (warp < consumers) {
                for (u32 i = warp; i < count; i += consumers)
                    init_barrier(barriers + 8 * (ORDER_STAGES + i), consumers * WARP_ARRIVALS);
            } else if (number < ORDER_ASKING) {
                // One after the last stage's may be tested.
                for (u32 i = number; i < min(count + 1, ORDER_STAGES); i += ORDER_ASKING)
                    init_barrier(barriers + 8 * i, FAST128_FILLING - 1 + asking);
            } else if (number < ORDER_ASKING + ORDER_TABLES) {
                init_barrier(table_full(number - ORDER_ASKING), ORDER_TELLING * WARP_ARRIVALS);
                init_barrier(table_empty(number - ORDER_ASKING), consumers * WARP_ARRIVALS);
            }
            show_barriers();
        }
        __syncwarp();
    }
};

// Copies a box of x: columns, rows, blocks of 64 columns. One lane copies; all lanes call it
// together with the same arguments.
__device__ inline void copy_blocks(u32 to, const XMap& map, u32 block, u32 barrier) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %2, %3}], [%4]; }" ::"r"(to),
        "l"(&map), "r"(0), "r"(block), "r"(barrier)
        : "memory");
}

// Copies some blocks of x word by word; the 16-byte pieces are swizzled (linear_wgmma.cuh). One
// warp.
__device__ __noinline__ void copy_blocks_slowly(const u16* x, u64 pitch, u32 rows, u32 columns,
                                                u32 begin, u32 end, u32 to, u32 block_bytes) {
    const u32 lane = threadIdx.x % LANES;
    for (u32 block = begin; block < end; block++, to += block_bytes) {
        const u32 mine = block * ORDER_COLUMNS + 2 * lane;
        copy_words_slowly(x + mine, pitch, rows, max(columns, mine) - mine, to + lane * 4);
    }
    fence_shared();
}
// Writes the elements of a row of x after those that a copy brings, and zeros up to the stage's
// end.
__device__ __noinline__ void copy_row_slowly(const u16* from, u32 count, u32 copied, u32 to) {
    for (u32 i = copied / 2; i < ORDER_BLOCKS * ORDER_COLUMNS; i++) {
        const u16 value = i < count ? __ldg(from + i) : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * i), "h"(value) : "memory");
    }
    fence_shared();
}

// Policy for the few bytes that all products read: they should stay in L2.
__device__ inline u64 keep_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ inline u32 load_kept(const u32* from, u64 policy) {
    u32 v;
    asm volatile("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(from), "l"(policy));
    return v;
}
__device__ inline uint4 load_kept(const uint4* from, u64 policy) {
    uint4 v;
    asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from), "l"(policy));
    return v;
}

// A warp that fills the tables of units `number`, `number + ORDER_TELLING`, ... of each piece: each
// lane takes a tile's base, then a patch.
struct OrderTelling {
    static constexpr u32 UNITS = (ORDER_UNITS + ORDER_TELLING - 1) / ORDER_TELLING;
    // Patches of a strip that each lane loads before it knows how many there are.
    static constexpr u32 FIRST = 2;
    struct Patch {
        u32 number;
        uint4 words;
    };
    // First loads of a unit: the last word of a tile's head, and patches.
    struct Loaded {
        u32 head;
        Patch patches[FIRST];
    };
    // Patches that a table has so far.
    struct Written {
        u32 all, first_half, places, last;
    };
    u32 number, lane, blocks;
    u64 policy;
    Loaded loaded[UNITS];

    __device__ Patch load_patch(const OrderPiece& piece, u32 unit, u32 place,
                                bool is_wanted) const {
        const u32 places = patch_places(piece.whole_columns);
        const u32* const numbers = reinterpret_cast<const u32*>(
            piece.patches + u64(piece.strip_of(unit)) * patch_bytes(piece.whole_columns));
        if (!is_wanted || place >= places) return {NO_PATCH, make_uint4(0, 0, 0, 0)};
        const uint4* const words = reinterpret_cast<const uint4*>(numbers + places);
        return {load_kept(numbers + place, policy), load_kept(words + place, policy)};
    }
    __device__ void load(const OrderPiece& piece) {
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = number + i * ORDER_TELLING, split = piece.split_of(unit);
            const u32 begin = piece.begin_of(split), end = piece.end_of(split, blocks);
            const u32 tile = begin * 2 / TILE_STEPS + lane;
            const u64 before = u64(piece.strip_of(unit)) * tiles_across(piece.whole_columns);
            const u32* from = reinterpret_cast<const u32*>(piece.heads + before + tile) + 1;
            const bool exists = piece.has(unit) && begin < end;
            loaded[i].head = exists && tile * TILE_STEPS < 2 * end ? load_kept(from, policy) : 0;
#pragma unroll
            for (u32 k = 0; k < FIRST; k++)
                loaded[i].patches[k] = load_patch(piece, unit, k * LANES + lane, exists);
        }
    }
    // Writes those of 32 patches that are in windows `first` to `last`. False if one of them has no
    // place.
    __device__ bool take(Written& written, const Patch& patch, u32 first, u32 last,
                         const OrderTable& table) const {
        const u32 window = patch.number << 1 >> 9, product = patch.number & 7;
        const bool is_wanted = patch.number != NO_PATCH && window >= first && window <= last;
        const u32 wanted = __ballot_sync(ALL_LANES, is_wanted);
        u32 before = __shfl_up_sync(ALL_LANES, patch.number, 1);
        if (lane == 0) before = written.last;
        const bool is_next = before >> 3 == patch.number >> 3 && before < patch.number;
        const u32 step = !is_wanted ? 0 : is_next ? patch.number - before : 1;
        const u32 sum = inclusive_sum(step, lane), place = written.places + sum - 1;
        const u32 rank = written.all + __popc(wanted & ((1u << lane) - 1));
        const u32 to = table.words() + place * 16;
        const bool has_place = rank < table.places() && place < table.places();
        if (is_wanted && has_place) {
            store_shared_8(table.numbers() + rank * 8, make_uint2(patch.number, to - product * 16));
            store_shared_16(to, patch.words);
        }
        written.all += __popc(wanted);
        written.first_half += __popc(__ballot_sync(ALL_LANES, is_wanted && !(patch.number >> 31)));
        written.places += __shfl_sync(ALL_LANES, sum, LANES - 1);
        written.last = __shfl_sync(ALL_LANES, patch.number, LANES - 1);
        return !__any_sync(ALL_LANES, is_wanted && !has_place);
    }
    __device__ void write_patches(const OrderPiece& piece, u32 unit, const Loaded& from, u32 begin,
                                  u32 end, const OrderTable& table) const {
        const u32 first = piece.first_window + begin / 2, last = piece.first_window + end / 2;
        Written written = {0, 0, 0, NO_PATCH};
        bool fits = __shfl_sync(ALL_LANES, from.patches[0].number, 0) != MANY_PATCHES;
        Patch patch = from.patches[0];
        bool are_more = true;
#pragma unroll 1
        for (u32 k = 1; fits && are_more; k++) {
            fits = take(written, patch, first, last, table);
            are_more = __shfl_sync(ALL_LANES, patch.number, LANES - 1) != NO_PATCH;
            if (are_more)
                patch = k < FIRST ? from.patches[FIRST - 1]
                                  : load_patch(piece, unit, k * LANES + lane, true);
        }
        if (lane) return;
        store_shared(table.at, fits ? written.first_half : ORDER_MANY);
        if (fits) store_shared(table.numbers() + written.all * 8, NO_PATCH);
    }
    template <class Ring>
    __device__ void write(const OrderPiece& piece, u32 piece_number, const Ring& ring) {
#pragma unroll 1
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = number + i * ORDER_TELLING, split = piece.split_of(unit);
            const u32 begin = piece.begin_of(split), end = piece.end_of(split, blocks);
            if (!piece.has(unit) || begin >= end) continue;
            const OrderTable table = ring.table(piece_number, unit);
            const Loaded from = i ? loaded[UNITS - 1] : loaded[0];
            if (lane < ring.tiles) {
                // A tile has two stages; the first one may belong to another unit.
                const u32 skipped = begin / 2 % 2, to = table.bases() + (2 * lane - skipped) * 4;
                const u32 base = Head{make_uint2(0, from.head)}.base();
                if (lane || !skipped) store_shared(to, base);
                store_shared(to + 4, base);
            }
            write_patches(piece, unit, from, begin, end, table);
        }
        __syncwarp();
        release(ring.table_full(piece_number), lane);
    }
    template <class Work>
    __device__ void tell(const Work& work, const OrderRing<Work>& ring, OrderPieces<Work>& pieces,
                         bool exists) {
        // The first loads start while barriers are initialised, and before all weights.
        if (exists) load(pieces.piece);
        meet_barriers();
        for (u32 piece_number = 0; exists; exists = pieces.next(), piece_number++) {
            if (piece_number) load(pieces.piece);
            if (piece_number >= ORDER_TABLES)
                wait_for(ring.table_empty(piece_number), piece_number / ORDER_TABLES % 2 ^ 1);
            write(pieces.piece, piece_number, ring);
        }
    }
};
static_assert(OrderTelling::UNITS == 2 && OrderTelling::FIRST == 2, "the first one, and the last");

// A warp that requests weights or x. All lanes do the same together.
template <class Work>
struct OrderAsking {
    const Work& work;
    u32 lane, blocks, steps;  // blocks of 64 columns, steps of 32
    u64 policy;
    const u16* row;  // for experts: row `lane` of x

    __device__ OrderAsking(const Work& w, u32 lane_)
        : work(w),
          lane(lane_),
          blocks(order_blocks_of(w.launch.columns)),
          steps(steps_of(w.launch.columns)),
          policy(once_policy()) {}
    // The blocks of a stage; those before `begin` and from `end` on are not the split's.
    struct Blocks {
        u32 first, begin, end;
    };
    __device__ Blocks blocks_of(const OrderPiece& piece, u32 split, u32 stage) const {
        const u32 begin = piece.begin_of(split);
        const u32 first = (begin & ~1u) + stage * ORDER_BLOCKS;
        return {first, max(begin, first), min(piece.end_of(split, blocks), first + ORDER_BLOCKS)};
    }
    // A unit's weights; blocks `begin` to `end` of all columns. Its next stage begins at `block`.
    struct Weights {
        const u8* from;  // of that block
        u32 to;          // in each stage
        u32 block, begin, end;
    };
    __device__ __forceinline__ Weights weights_of(const OrderPiece& piece, u32 unit) const {
        const u32 split = piece.split_of(unit), begin = piece.begin_of(split), first = begin & ~1u;
        const u64 strip_bytes = u64(steps_of(piece.whole_columns)) * STEP_BYTES;
        return {piece.data + piece.strip_of(unit) * strip_bytes + u64(first) * ORDER_BLOCK_BYTES,
                unit * (ORDER_BLOCKS * ORDER_BLOCK_BYTES), first, begin,
                piece.has(unit) ? piece.end_of(split, blocks) : 0};
    }
    // Requests those of the next stage; returns their bytes.
    __device__ __forceinline__ u32 ask_for_weights(Weights& at, const OrderRing<Work>& ring) const {
        const u32 begin = max(at.block, at.begin), end = min(at.block + ORDER_BLOCKS, at.end);
        const u32 skipped = (begin - at.block) * ORDER_BLOCK_BYTES;
        const u32 bytes = begin < end ? (min(2 * end, steps) - 2 * begin) * STEP_BYTES : 0;
        if (bytes) {
            const u32 to = ring.place + at.to + skipped;
            copy_bulk_by_one(to, at.from + skipped, bytes, ring.full, policy);
            // A block's second step that does not exist gets finite weights.
            if (bytes % ORDER_BLOCK_BYTES) {
                if (lane == 0) clear_step(to + bytes - STEP_BYTES);
                __syncwarp();
            }
        }
        at.block += ORDER_BLOCKS, at.from += ORDER_BLOCKS * ORDER_BLOCK_BYTES;
        return bytes;
    }
    __device__ __forceinline__ void ask_for_x(const OrderPiece& piece, u32 stage,
                                              const OrderRing<Work>& ring) const {
        if constexpr (Work::BOXES)
            ask_for_boxes(piece, stage, ring);
        else
            ask_for_rows(piece, stage, ring);
    }
    __device__ __forceinline__ void ask_for_boxes(const OrderPiece& piece, u32 stage,
                                                  const OrderRing<Work>& ring) const {
        const u32 mapped = work.launch.x_mapped ? work.launch.columns / ORDER_COLUMNS : 0;
        u32 boxes = 0, to = ring.place + ring.x;
        for (u32 split = 0; split < piece.splits; split++, to += Work::X_BYTES) {
            const Blocks at = blocks_of(piece, split, stage);
            if (at.begin >= at.end) continue;
            if (at.end > mapped) {  // boxes cannot bring these
                copy_blocks_slowly(work.launch.x, work.launch.x_pitch, piece.x_rows,
                                   work.launch.columns, at.first, at.end, to, Work::X_BLOCK);
            } else {
                copy_blocks(to, work.launch.x_map, at.first, ring.full);
                boxes++;
            }
        }
        if (WARP_ARRIVALS > 1) arrive(ring.full);
        __syncwarp();
        arrive_expecting_once(ring.full, boxes * Work::X_BYTES);
    }
    // Requests row `lane` of x.
    __device__ void ask_for_rows(const OrderPiece& piece, u32 stage,
                                 const OrderRing<Work>& ring) const {
        const u32 full = ring.full, block = piece.first_block + stage * ORDER_BLOCKS;
        const u32 first_column = block * ORDER_COLUMNS, last = min(blocks, block + ORDER_BLOCKS);
        const u32 count = min(last * ORDER_COLUMNS, work.launch.columns) - first_column;
        const u32 to = ring.place + ring.x + lane * Work::X_PITCH;
        const bool mine = lane < piece.x_rows;
        const u32 bytes = has_aligned_x(work.launch) ? count * 2 : 0;
        if (mine && bytes < (last - block) * 128)
            copy_row_slowly(row + first_column, count, bytes, to);
        if (WARP_ARRIVALS > 1) arrive(full);
        __syncwarp();
        arrive_expecting_once(full, bytes * piece.x_rows);
        __syncwarp();
        if (mine && bytes) copy_bulk_to_all<1>(to, row + first_column, bytes, full);
    }
    // Requests the weights of units `number` and `number` + ORDER_ASKING, before the previous
    // launch has ended. The warps share each stage: if they took turns, the first stage would come
    // as late as the fourth.
    __device__ void ask_for_all_weights(OrderRing<Work> ring, u32 number, OrderPieces<Work>& pieces,
                                        bool exists) const {
        static_assert(ORDER_UNITS <= 2 * ORDER_ASKING, "two units per warp");
        u32 place = 0, last_full = 0, last_phase = 0;
        bool have_met = false;
        group_barrier(FULL_BARRIERS, ORDER_ASKING * LANES);
        arrive_at(ALL_BARRIERS);
        for (; exists && number < ring.asking; exists = pieces.next()) {
            Weights first = weights_of(pieces.piece, number);
            Weights second = weights_of(pieces.piece, number + ORDER_ASKING);
#pragma unroll 1
            for (u32 stage = 0; stage < pieces.piece.stages; stage++, place++, ring.next()) {
                if (place >= ring.count) {
                    if (!have_met) group_barrier(OTHER_BARRIERS, blockDim.x);
                    have_met = true;
                    wait_for(ring.empty(), ring.phase ^ 1);
                }
                // Bytes may arrive before they are expected: the barrier waits for this arrival.
                const u32 bytes = ask_for_weights(first, ring) + ask_for_weights(second, ring);
                arrive_expecting_once(ring.full, bytes);
                last_full = ring.full, last_phase = ring.phase;
            }
        }
        if (!have_met) group_barrier(OTHER_BARRIERS, blockDim.x);
        if constexpr (Work::BOXES) {
            if (number >= ring.asking) return;
            // Waits for this block's weights: those of other blocks come before prefetches.
            if (last_full) wait_for(last_full, last_phase);
            prefetch_next(work.launch.prefetches, number, ring.asking);
        }
    }
    // Requests the x of all stages.
    __device__ void ask_for_all_x(OrderRing<Work> ring, OrderPieces<Work>& pieces, bool exists) {
        if constexpr (Work::BOXES)
            asm volatile("prefetch.tensormap [%0];" ::"l"(&work.launch.x_map) : "memory");
        meet_barriers();
        if constexpr (Work::BOXES) wait_for_launch_before();
        u32 place = 0;
        for (; exists; exists = pieces.next()) {
            const OrderPiece& piece = pieces.piece;
            if constexpr (!Work::BOXES) row = work.x(piece, min(lane, max(piece.x_rows, 1) - 1));
#pragma unroll 1
            for (u32 stage = 0; stage < piece.stages; stage++, place++, ring.next()) {
                if (place >= ring.count) wait_for(ring.empty(), ring.phase ^ 1);
                ask_for_x(piece, stage, ring);
            }
        }
    }
};

// A block of 16 rows as loaded.
struct OrderRaw {
    uint4 planes[2];
    uint2 codes[2];
    __device__ __forceinline__ void load(u32 plane, u32 code) {
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            planes[i] = load_shared_16(plane + i * STEP_BYTES),
            codes[i] = load_shared_8(code + i * STEP_BYTES);
    }
    // Decodes product `k` of four, as the A operand.
    __device__ __forceinline__ void decode(u32 (&weights)[4], u32 k, u32 base) const {
        decode_product(weights, k % 2, planes[k / 2], codes[k / 2], base);
    }
};

// A strip's entries, tile by tile. Each lane has one of a tile's first 32. They are loaded while
// the tile before is multiplied, their head while the one before that is.
struct OrderEntries {
    const uint2* heads;  // of the tile after next
    const u32* entries;
    u64 entry_count;
    u32* status;
    u32 tiles, lane;  // tiles: from that one on
    Head head, after;
    u32 entry, entry_after;

    __device__ OrderEntries(const OrderPiece& piece, u32 strip, u32 begin, u32 end, u32 lane_,
                            u32* status_)
        : heads(reinterpret_cast<const uint2*>(piece.heads) +
                u64(strip) * tiles_across(piece.whole_columns) + begin / 4),
          entries(piece.entries),
          entry_count(piece.entry_count),
          status(status_),
          tiles((end + 3) / 4 - begin / 4),
          lane(lane_),
          head(load_head()),
          after(load_head()),
          entry(load_entry(head)),
          entry_after(load_entry(after)) {}
    __device__ Head load_head() {
        if (!tiles) return {make_uint2(0, 0)};
        tiles--;
        return {__ldg(heads++)};
    }
    // A head may name entries that do not exist.
    __device__ u32 load_entry(Head& of) const {
        if (of.count() && u64(of.first()) + of.count() > entry_count) {
            atomicOr(status, STATUS_ENTRIES);
            of.words.y &= 0xFF000000u;
        }
        return lane < of.count() ? __ldg(entries + of.first() + lane) : ~0u;
    }
    __device__ void next() {
        head = after, entry = entry_after;
        after = load_head();
        entry_after = load_entry(after);
    }
    // Places the entries of a product. All lanes call it together.
    __device__ void place(u32 (&weights)[4], u32 wanted) const {
        place_from(weights, entry, wanted, lane);
#pragma unroll 1
        for (u32 i = LANES + lane; i - lane < head.count(); i += LANES)
            place_from(weights, i < head.count() ? __ldg(entries + head.first() + i) : ~0u, wanted,
                       lane);
    }
};

// Loads the patch of product P over `words`, if there is one.
template <u32 P>
__device__ __forceinline__ void take_patch(u32 (&words)[4], u32 products, u32 from) {
    asm volatile(
        "{ .reg .pred p;\n.reg .b32 bit;\nand.b32 bit, %5, %6;\nsetp.ne.u32 p, bit, 0;\n"
        "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %7]; }"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "r"(from), "r"(products), "n"(1 << P), "n"(16 * P));
}

// sums += a b, if `is_wanted`.
__device__ __forceinline__ void multiply_if(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                            u32 b0, u32 b1, bool is_wanted) {
    asm("{ .reg .pred p;\nsetp.ne.u32 p, %10, 0;\n@p "
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3}; }"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(u32(is_wanted)));
}

// A warp that multiplies half a strip by one split of x.
template <class Work>
struct OrderChain {
    static constexpr u32 EIGHTS = Work::EIGHTS;
    const OrderPiece& piece;
    u32 lane, half, band;
    u32 planes, codes, x[2];  // offsets in a stage; x: one per step of a block
    // In the unit's table: the bases; the next patch, its number and address, and its window.
    u32 bases, numbers;
    uint2 patch;
    u32 patch_window;
    float sums[EIGHTS][4];
    OrderRaw raw[2];
    uint4 v[2][EIGHTS][2];
    u32 w[2][4][4];  // weights of this block and of the next one

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < 4 * EIGHTS; i++) sums[i / 4][i % 4] = 0;
    }
    __device__ __forceinline__ void load_x(uint4 (&to)[EIGHTS][2], u32 place) const {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            to[i][0] = load_matrices(place + x[0] + i * Work::X_EIGHT);
            to[i][1] = load_matrices(place + x[1] + i * Work::X_EIGHT);
        }
    }
    // Adds product `k` of the four of a block; `CONDITIONAL`: only if it is wanted.
    template <bool CONDITIONAL>
    __device__ __forceinline__ void add(u32 b, u32 k, bool is_wanted) {
        const u32(&a)[4] = w[b][k];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            const uint4& x_of = v[b][i][k / 2];
            const u32 b0 = k % 2 ? x_of.z : x_of.x, b1 = k % 2 ? x_of.w : x_of.y;
            if constexpr (CONDITIONAL)
                multiply_if(sums[i], a[0], a[1], a[2], a[3], b0, b1, is_wanted);
            else
                multiply(sums[i], a[0], a[1], a[2], a[3], b0, b1);
        }
    }
    // Finds the lane's patches of the next window that has any: bit p tells whether product p has
    // one; its words are at from + 16 p.
    __device__ __forceinline__ u32 find_patches(u32& from) {
        u32 products = 0;
        const u32 window = patch_window;
        do {
            if ((patch.x >> 3 & 31) == lane) {
                if (!products) from = patch.y;
                products |= 1 << (patch.x & 7);
            }
            next_patch(numbers + 8);
        } while (patch_window == window);
        return products;
    }
    __device__ __forceinline__ void next_patch(u32 at) {
        numbers = at;
        patch = load_shared_8(at);
        patch_window = patch.x >> 8;
    }
    __device__ __forceinline__ void begin_patches(const OrderTable& table) {
        next_patch(table.numbers() + 8 * (half ? load_shared(table.at) : 0));
    }
    __device__ __forceinline__ void load(u32 b, u32 place) {
        raw[b].load(place + planes + b * ORDER_BLOCK_BYTES, place + codes + b * ORDER_BLOCK_BYTES);
    }
    // Decodes product K of a block (4 B + K of its window), or takes the lane's patch.
    template <u32 B, u32 K>
    __device__ __forceinline__ void decode(u32 base, u32 products, u32 from) {
        raw[1 - B].decode(w[1 - B][K], K, base);
        take_patch<4 * B + K>(w[1 - B][K], products, from);
    }
    // Product K of block B of a stage: decodes that of the next block, then adds its own. A second
    // block may not exist.
    template <u32 B, u32 K>
    __device__ __forceinline__ void step(u32 base, u32 products, u32 from, bool is_wanted = true) {
        decode<B, K>(base, products, from);
        add<B == 1>(B, K, is_wanted);
    }
    // Loads the first stage and decodes its first block, which is zero if it is not the unit's.
    __device__ __forceinline__ void begin_walk(u32 place, u32 base, u32 products, u32 from,
                                               bool has_first) {
        load(0, place), load(1, place);
        load_x(v[0], place);
        decode<1, 0>(base, products, from), decode<1, 1>(base, products, from);
        decode<1, 2>(base, products, from), decode<1, 3>(base, products, from);
        if (has_first) return;
#pragma unroll
        for (u32 i = 0; i < 16; i++) w[0][i / 4][i % 4] = 0;
#pragma unroll
        for (u32 i = 0; i < 2 * EIGHTS; i++) v[0][i / 2][i % 2] = make_uint4(0, 0, 0, 0);
    }
    // Adds the products of blocks `begin` to `end` of the unit, at least one, by stages of two
    // blocks.
    __device__ __forceinline__ void walk(OrderRing<Work>& ring, u32 begin, u32 end) {
        // The compiler must know that all lanes do the same.
        const u32 first = same(ring.first), bytes = same(ring.bytes);
        const u32 barriers = same(ring.barriers), ring_end = barriers + 8 * same(ring.count);
        u32 here = same(ring.place), full = same(ring.full), phase = same(ring.phase);
        u32 left = same((end + 1) / 2 - begin / 2), base_at = same(bases);
        u32 window = same(half << 23 | (piece.first_window + begin / 2));
        wait_for(full, phase);
        u32 base = load_shared(base_at), from = 0;
        u32 products = patch_window == window ? find_patches(from) : 0;
        begin_walk(here, base, products, from, begin % 2 == 0);
        products = 0;
        u32 next = here + bytes, next_full = full + 8, is_full = left == 1;
        if (next_full == ring_end) next = first, next_full = barriers, phase ^= 1;
        // A stage is one straight piece of code, in the order of statements that ptxas makes the
        // fewest stalls of (benches/record/2026-11-27-chain.md); only a wait and patches are
        // outside. A barrier is tested a stage before it is needed. What the last stage loads is
        // not used.
#pragma unroll 1
        do {
            window++;
            if (!is_full || patch_window == window) {
                if (!is_full) wait_for(next_full, phase);
                if (patch_window == window) products = find_patches(from);
            }
            const bool has_second = left > 1 || end % 2 == 0;
            const bool begins_again = next_full + 8 == ring_end;
            const u32 after = begins_again ? first : next + bytes;
            const u32 after_full = begins_again ? barriers : next_full + 8;
            const u32 after_phase = phase ^ u32(begins_again);
            base_at += 4;
            const u32 next_base = load_shared(base_at);
            load_x(v[1], here + Work::X_BLOCK);
            step<0, 0>(base, products, from);
            load(0, next);
            step<0, 1>(base, products, from);
            is_full = test_parity(after_full, after_phase) | u32(left == 2);
            step<0, 2>(base, products, from);
            step<0, 3>(base, products, from);
            step<1, 0>(next_base, products, from, has_second);
            step<1, 1>(next_base, products, from, has_second);
            load_x(v[0], next);
            step<1, 2>(next_base, products, from, has_second);
            load(1, next);
            release(full + 8 * ORDER_STAGES, lane);
            step<1, 3>(next_base, products, from, has_second);
            here = next, full = next_full, base = next_base, products = 0;
            next = after, next_full = after_full, phase = after_phase;
        } while (--left);
        ring.place = here, ring.full = full;
        ring.phase = phase ^ u32(next_full == barriers);
    }
    // Like walk, for a unit with more entries than its table has places for patches: takes those of
    // each product from those of the tile.
    __device__ __forceinline__ void walk_slowly(OrderRing<Work>& ring, u32 strip, u32 begin,
                                                u32 end, u32* status) {
        OrderEntries tile(piece, strip, begin, end, lane, status);
#pragma unroll 1
        for (u32 at = begin & ~1u; at < end; at += 2) {
            wait_for(ring.full, ring.phase);
#pragma unroll 1
            for (u32 block = max(at, begin); block < min(at + 2, end); block++) {
                const u32 place = ring.place + (block - at) * ORDER_BLOCK_BYTES;
                raw[0].load(place + planes, place + codes);
                load_x(v[0], ring.place + (block - at) * Work::X_BLOCK);
                if (block % 4 == 0 && block != begin) tile.next();
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    const u32 step = block % 4 * 2 + k / 2;
                    raw[0].decode(w[0][k], k, tile.head.base());
                    if (tile.head.has_entries(step))
                        tile.place(w[0][k], entry_of(step, half, k % 2));
                    add<false>(0, k, true);
                }
            }
            release(ring.empty(), lane);
            ring.next();
        }
    }
    __device__ __forceinline__ void store(const Work& work, u32 strip) const {
        const u32 first = strip * STRIP_ROWS + half * 16 + lane / 4;
#pragma unroll
        for (u32 high = 0; high < 2; high++) {
            const u32 row = first + 8 * high;
            if (row >= piece.rows) continue;
            const float bias = work.bias(piece, row);
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    const u32 x_row = 8 * (band * EIGHTS + i) + lane % 4 * 2 + k;
                    if (x_row < piece.x_rows)
                        work.store(piece, x_row, row, sums[i][2 * high + k], bias);
                }
        }
    }
    __device__ __forceinline__ void save(u32 to) const {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            store_shared_16(to + i * 512 + lane * 16,
                            make_uint4(__float_as_uint(sums[i][0]), __float_as_uint(sums[i][1]),
                                       __float_as_uint(sums[i][2]), __float_as_uint(sums[i][3])));
    }
    // Adds saved sums to these; the order of the two does not matter.
    __device__ __forceinline__ void add_saved(u32 from) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            const uint4 saved = load_shared_16(from + i * 512 + lane * 16);
            sums[i][0] += __uint_as_float(saved.x), sums[i][1] += __uint_as_float(saved.y);
            sums[i][2] += __uint_as_float(saved.z), sums[i][3] += __uint_as_float(saved.w);
        }
    }
};

// Adds the sums of a strip's splits, in order. All warps that multiply call it together.
template <class Work>
__device__ __forceinline__ void add_splits(const Work& work, OrderChain<Work>& chain,
                                           const OrderPiece& piece, const OrderRing<Work>& ring,
                                           u32 unit, u32 threads, bool active) {
    constexpr u32 BYTES = Work::EIGHTS * 512;
    constexpr u32 HALVES = ORDER_HALVES<Work>;
    const u32 place = 2 * chain.band + chain.half;  // among the unit's warps
    const u32 mine = ring.sums + (HALVES * unit + place) * BYTES;
    const u32 before = ring.sums + (threads / LANES + place) * BYTES;
    group_barrier(0, threads);  // the sums saved before have been read
    if (active) chain.save(mine);
    group_barrier(0, threads);
    if (!active || piece.split_of(unit)) return;
    // Earlier passes come first: addition is commutative, so this adds to their sum.
    if (piece.first_split) chain.add_saved(before);
    for (u32 i = 1; i < piece.splits; i++) chain.add_saved(mine + HALVES * i * BYTES);
    if (piece.is_last_pass())
        chain.store(work, piece.first_strip + piece.strip_of(unit));
    else
        chain.save(before);
}

template <class Work>
__device__ __forceinline__ void multiply_pieces(const Work& work, OrderRing<Work> ring, u32 warp,
                                                u32 lane, u32 threads, OrderPieces<Work>& pieces,
                                                bool exists) {
    const u32 unit = warp / ORDER_HALVES<Work>, blocks = order_blocks_of(work.launch.columns);
    meet_barriers();
    if constexpr (Work::BOXES) wait_for_launch_before();
    OrderChain<Work> chain = {pieces.piece, lane, warp % 2, warp / 2 % Work::BANDS};
    const u32 place = unit * ORDER_BLOCKS * ORDER_BLOCK_BYTES + lane * 16;
    chain.planes = kept(place + chain.half * 512);
    chain.codes = kept(place + 1024 + chain.half * 8);
    for (u32 number = 0; exists; exists = pieces.next(), number++) {
        const OrderPiece& piece = pieces.piece;
        const u32 split = piece.split_of(unit), first = piece.begin_of(split);
        const u32 end = piece.end_of(split, blocks);
        const bool active = piece.has(unit);
        const u32 count = active && first < end ? end - first : 0;
        const u32 x_place = ring.x + split * Work::X_BYTES +
                            chain.band * (Work::EIGHTS * Work::X_EIGHT) + Work::x_place(lane);
        chain.x[0] = kept(x_place), chain.x[1] = kept(Work::second(x_place));
        const OrderTable table = ring.table(number, unit);
        chain.bases = table.bases();
        if (piece.first_block == 0) chain.clear();
        wait_for(ring.table_full(number), number / ORDER_TABLES % 2);
        if (count && load_shared(table.at) == ORDER_MANY) {
            chain.walk_slowly(ring, piece.strip_of(unit), first, end, work.launch.status);
        } else if (count) {
            chain.begin_patches(table);
            chain.walk(ring, first, end);
        }
        // Stages that only other units have.
        for (u32 stage = count ? (end + 1) / 2 - first / 2 : 0; stage < piece.stages; stage++) {
            wait_for(ring.full, ring.phase);
            release(ring.empty(), lane);
            ring.next();
        }
        release(ring.table_empty(number), lane);
        if (!piece.is_last_part()) continue;
        if (Work::SPLITS && piece.all_splits > 1)
            add_splits(work, chain, piece, ring, unit, threads, active);
        else if (active)
            chain.store(work, piece.first_strip + unit);
    }
}

template <class Work>
__device__ __forceinline__ void linear_order(const Work& work) {
    // Broadcast from lane 0, so that the compiler knows that all lanes have the same.
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
    const u32 consumers = blockDim.x / LANES - ORDER_HELPERS;
    const OrderRing<Work> ring(work, kept(shared_address(linear_shared)), dynamic_shared_bytes());
    // All warps find the first piece together: code that each ran by itself would come later.
    OrderPieces<Work> pieces(work);
    const bool exists = pieces.next();
    ring.init_barriers(consumers, warp, lane);
    const u32 helper = warp - consumers;
    if (warp < consumers)
        multiply_pieces(work, ring, warp, lane, consumers * LANES, pieces, exists);
    else if (helper < ORDER_ASKING)
        OrderAsking<Work>(work, lane).ask_for_all_weights(ring, helper, pieces, exists);
    else if (helper < ORDER_ASKING + ORDER_TELLING)
        OrderTelling{helper - ORDER_ASKING, lane, order_blocks_of(work.launch.columns),
                     keep_policy()}
            .tell(work, ring, pieces, exists);
    else
        OrderAsking<Work>(work, lane).ask_for_all_x(ring, pieces, exists);
}
}  // namespace df11::linear
