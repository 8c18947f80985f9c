// Prototype of the kernel of the `tile` layout (spec/format.md, 6.4, but tiles begin at any bit here): BF16 out of Huffman-coded pairs of exponents and raw
// sign/mantissa bytes; any set of tensors, or rectangles of them, in one launch. Bench and checks: tile_bench.cu.
//
//   tile      8192 weights: 32 rows x 256 columns of a matrix, or 8192 in a row; 32 lanes, each with its own stretch of bits
//   unit      8 weights side by side: four codes, 8 plane bytes, one 16-byte store
//   group     8 units of each lane: 8 rows x 256 columns, or 2048 in a row; a tile is 4 groups
//
//      lane l, unit j of a group of a matrix: row l / 4, columns 32 j + 8 (l % 4) to + 7
//                  j = 0                     j = 1            ...  j = 7
//      row 0  | l0 | l1 | l2 | l3 | l0 | l1 | l2 | l3 |  ...        256 columns: 512 bytes of output
//      row 1  | l4 | l5 | l6 | l7 | l4 | ...
//      Each lane has one row, and four lanes have it together, as the B fragment of mma.m16n8k16 wants it (the order of k is free).
//
//   warp      takes tile after tile of its block's share:
//             1 index    one record of 32 bytes: where the bits start, how many each lane has; prefix sum over the lanes
//             2 stage    the tile's bits to shared memory, cp.async; the plane to registers, 16 bytes a lane, PREFETCH loads ahead
//             3 decode   62 bits of window for four look-ups of 12 bits, entries with both exponents in their BF16 places
//             4 store    a group at a time: 8 stores one after the other, so that the 512 bytes of a row leave together
//
// Budget (sm_90, nvcc 13.0, no spills), BF16 out / copy rate, H200, L2 cold (benches/record/2026-11-20-tile-prototypes-h200.md):
//   warps x blocks an SM   registers   218 M weights, 7 tensors   4096 x 4096 alone
//   8 x 3                  80          0.512   2,148 GB/s         0.356 (0.332 where an empty kernel takes 4.5 us)
//   12 x 2                 80          0.510                      0.357
//   24 x 1                 80          0.512                      0.352
//   8 x 3, PREFETCH 1, 4   78, 80      0.507, 0.502               0.341, 0.349
// A kernel that only streams the same bytes makes 0.49. Where the rest goes (ncu): L2 81 % busy, DRAM 74 %, issue slots 35 %, data
// pipe 19 %; half of all warp time waits for the plane. The chip is not short of instructions, but of order among its memory accesses.
//
// Rejected, each against the version of its day (0.50 to 0.52):
//   8 rows x 64 bytes a store, stored as decoded (16 x 64 steps)      0.30 to 0.40; with st.cs 0.45
//   4 rows x 128 bytes; 8 x 256 bytes, four stores together          0.45; 0.48
//   1 row x 512 bytes a store (another order of symbols)              0.50 to 0.51: no better, and no fragment of an mma
//   rows gathered in shared memory, bulk copies (TMA) of 256 bytes     0.500, and 5 KiB a warp
//   other instructions between the stores of a group                  0.34 to 0.49
//   codes of single exponents, look-ups of two                        0.429, alone 0.231: 29 % of the units of a warp need more look-ups
//   words handed out to lanes in turn, no lane lengths at all          0.46 and 10.64 bits (16-bit words), 0.44 and 10.77 (32-bit)
//   tiles of 16,384 weights; of 4,096                                 0.500, alone 0.275; 0.504 at 10.65 bits
//   bits of the next tile staged meanwhile                            0.507 (20 warps; with 24 it spills: 0.34 to 0.48)
//   the plane's registers rotated by moves                            0.502, alone 0.336: a move waits for its load
//   st.cs                                                             0.508, alone 0.351
//   table of 11, 10 bits                                              0.511, 0.507 and 10.611, 10.623 bits
//
// Safety on any content: staging is bounded by the array and by the stage, windows by the stage, stores by the geometry alone: a
// tile decodes as many weights as it has, whatever its bits. Contradictions set bits of the status word.
#include <cstdint>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;

#ifndef TILE_TABLE_BITS
#define TILE_TABLE_BITS 12
#endif
#ifndef TILE_WARPS
#define TILE_WARPS 8
#endif
#ifndef TILE_BLOCKS
#define TILE_BLOCKS 3
#endif
#ifndef TILE_PREFETCH
#define TILE_PREFETCH 2
#endif

static_assert(8 / 2 % TILE_PREFETCH == 0, "a group has four pairs of units");

constexpr u32 LANES = 32, ALL_LANES = 0xFFFFFFFFu;
constexpr u32 UNIT = 8, UNITS_A_GROUP = 8, GROUPS = 4, UNITS = UNITS_A_GROUP * GROUPS, TILE_WEIGHTS = LANES * UNITS * UNIT;
constexpr u32 TILE_ROWS = 32, TILE_COLUMNS = 256, GROUP_ROWS = 8, CHUNK = LANES * 2 * UNIT;  // CHUNK: plane bytes of a pair of units
constexpr u32 EXCESS_BITS = 6;
constexpr u32 TABLE_BITS = TILE_TABLE_BITS, TABLE_ENTRIES = 1u << TABLE_BITS, INDEX_MASK = (TABLE_ENTRIES - 1) << 2;
// Staged bits lie behind one unused word, and before three that windows behind the end reach.
constexpr u32 STAGE_BEFORE = 16, STAGE_AFTER = 16;
constexpr u64 OFFSET_MASK = (1ull << 48) - 1;

// A look-up's entry: second exponent << 23 | escape length << 15 | first exponent << 7 | bits of the code, escaped exponents
// included. Flagged are escapes and bits that are no code (escape length 31).
constexpr u32 EXPONENTS = 0x7F807F80u, NO_CODE = 31;

// One record a tile: offset (48 bits) | least bits of a lane (13) | shift (3), then 32 times 6 bits. A lane has
// least + (its six bits << shift) bits.
struct TileRecord { u64 head; u32 excess[6]; };
static_assert(sizeof(TileRecord) == 32, "one sector");

struct alignas(16) TileTask {
    const u8* bits;           // aligned to 16
    const TileRecord* index;  // one more than tiles: the last one's offset is the end
    const u8* plane;          // aligned to 16
    const u32* table;         // aligned to 16; TABLE_ENTRIES
    u16* output;              // of row_begin, column_begin, less the launch's `output`; aligned to 16
    u64 bits_bytes;           // a multiple of 16
    u64 rows, columns;        // of the tensor; one row if linear
    u64 row_begin, row_end, column_begin, column_end;
    u64 output_stride;        // weights; a multiple of 8 if not linear
    u64 first_unit;           // tiles of all tasks before
    u32 tiles;                // of this task
    u32 tiles_across;         // of the tensor
    u32 first_row, first_column, wide;  // the task's tiles: their corner and width, in tiles
    u32 linear;
};

constexpr u32 STATUS_NO_CODE = 1, STATUS_LANE_END = 2, STATUS_INDEX = 4;

__device__ inline u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ inline u32 load_shared(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
__device__ inline void copy_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ inline uint4 load_plane(const u8* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// A lane's units of a group, STEP bytes apart, one after the other: where other work comes between them, the rows' 512 bytes
// reach L2 in pieces, and the kernel loses up to a third of its speed.
template <u32 STEP>
__device__ inline void store_group(u64 address, const uint4 (&weights)[UNITS_A_GROUP]) {
    __syncwarp();
#pragma unroll
    for (u32 unit = 0; unit < UNITS_A_GROUP; unit++) {
        const uint4& w = weights[unit];
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(address + STEP * unit), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
    }
}

__device__ inline void prefetch_l2(const u8* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ inline u32 inclusive_sum(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < LANES; step *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// A pair of weights: the entry's exponents and two plane bytes, each twice.
__device__ inline u32 merge(u32 entry, u32 twice) { return (twice & ~EXPONENTS) | (entry & EXPONENTS); }
__device__ inline uint4 merge_unit(const u32 (&e)[4], u32 p0, u32 p1) {
    return make_uint4(merge(e[0], __byte_perm(p0, 0, 0x1100)), merge(e[1], __byte_perm(p0, 0, 0x3322)),
                      merge(e[2], __byte_perm(p1, 0, 0x1100)), merge(e[3], __byte_perm(p1, 0, 0x3322)));
}

__shared__ __align__(16) u32 shared_tables[2][TABLE_ENTRIES];

// A warp's staged bits. Positions count from 30 bits before the first staged one, so that a window shifted by two is an index
// times the four bytes of an entry.
struct Bits {
    u32 stage, stage_bytes;
    __device__ u32 room() const { return stage_bytes - STAGE_BEFORE - STAGE_AFTER; }
    __device__ void words(u32 position, u32& w0, u32& w1, u32& w2) const {
        u32 a = stage + min((position >> 5) * 4, room());
        w0 = load_shared(a + STAGE_BEFORE - 4), w1 = load_shared(a + STAGE_BEFORE), w2 = load_shared(a + STAGE_BEFORE + 4);
    }
};
// A tile has at most 32 * (0x1FFF + (63 << 7)) bits.
constexpr u32 SLACK_SHIFT = 20, END_MASK = (1u << SLACK_SHIFT) - 1;
constexpr u32 POSITION_OF_BIT_0 = 30, WINDOW_BITS = 62;

// `table`: the bytes to the task's table from shared_tables, a multiple of its size, so that one logic op makes the address.
__device__ inline u32 entry_of(u32 table, u32 window) {
    return *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(shared_tables) + (window & INDEX_MASK | table));
}
// The entry of an escape, from the window behind its code; still flagged where the bits are no code.
__device__ inline u32 escaped(u32 entry, u32 raw) {
    const u32 kept = entry >> 15 == (0x10000 | NO_CODE) ? 0x8000003Fu : 63;
    return (entry & kept) | (raw & 255) << 7 | (raw << 15 & 0x7F800000u);
}
// One pair, wherever it ends.
__device__ inline u32 decode_pair(u32 table, const Bits& bits, u32 position) {
    u32 w0, w1, w2;
    bits.words(position, w0, w1, w2);
    u32 e = entry_of(table, __funnelshift_r(w0, w1, position));
    if (int(e) < 0) {
        u32 at = (position & 31) + 2 + (e >> 15 & 31);
        e = escaped(e, __funnelshift_r(at < 32 ? w0 : w1, at < 32 ? w1 : w2, at));
    }
    return e;
}
// Four pairs. Entries of escapes hold their whole length, so four look-ups find their codes without a branch. Afterwards escapes
// are decoded again by themselves, for their exponents; and everything is, one by one, where the four do not fit the window.
__device__ inline void decode_unit(u32 table, const Bits& bits, u32& position, u32 (&e)[4], u32& problems) {
    u32 w0, w1, w2;
    bits.words(position, w0, w1, w2);
    u32 low = __funnelshift_r(w0, w1, position), high = __funnelshift_r(w1, w2, position);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        e[i] = entry_of(table, low);
        low = __funnelshift_r(low, high, e[i]), high = __funnelshift_r(high, 0, e[i]);
    }
    u32 total = (e[0] + e[1] + e[2] + e[3]) & 127;
    if (int(e[0] | e[1] | e[2] | e[3]) < 0) {
        const bool all = total > WINDOW_BITS;
        total = 0;
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            u32 one = e[0];
            if (all || int(one) < 0) one = decode_pair(table, bits, position + total);
            total += one & 63;
            e[0] = e[1], e[1] = e[2], e[2] = e[3], e[3] = one;
        }
        if (int(e[0] | e[1] | e[2] | e[3]) < 0) problems |= STATUS_NO_CODE;
    }
    position += total;
}

// What a block decodes between two barriers: tiles of up to two tasks.
struct Round {
    TileTask tasks[2];
    u32 first;      // of the first task's tiles, the one that is the round's first
    u32 count0;     // tiles of the first task
    u32 count;      // of both
    u32 next;       // the tile that no warp has yet
    u32 behind;     // the tile of the launch behind the round
};
extern __shared__ __align__(128) u8 stages[];
__shared__ Round shared_round;
constexpr u32 TASK_WORDS = sizeof(TileTask) / 4;

__device__ inline u32 share_begin(u32 total, u32 block) { return u32(u64(total) * block / gridDim.x); }

// Finds the task that holds the share's next tile, and the one after; starts the copies of their tables.
__device__ __forceinline__ void begin_round(const TileTask* tasks, u32 task_count, u32 at, u32 share_end, u32 guess, u32 lane) {
    u32 task = 0;  // as many begin at or before the tile
    for (u32 base = 0; base < task_count; base += LANES) {
        const TileTask* candidate = tasks + min(base + lane, task_count - 1);
        task += __popc(__ballot_sync(ALL_LANES, base + lane < task_count && candidate->first_unit <= at));
    }
    task--;
    const u32 more = task + 1 < task_count;
    const u32* words = reinterpret_cast<const u32*>(tasks + task);
    for (u32 i = threadIdx.x; i < TASK_WORDS << more; i += blockDim.x)
        reinterpret_cast<u32*>(shared_round.tasks)[i] = task == 0 && i == threadIdx.x ? guess : words[i];
    __syncthreads();
    const u32 first = at - u32(shared_round.tasks[0].first_unit);
    const u32 count0 = min(shared_round.tasks[0].tiles - first, share_end - at);
    const u32 count1 = more ? min(shared_round.tasks[1].tiles, share_end - at - count0) : 0;
    for (u32 i = threadIdx.x; i < TABLE_ENTRIES / 4; i += blockDim.x) {
        copy_async(shared_address(shared_tables[0]) + 16 * i, shared_round.tasks[0].table + 4 * i);
        if (count1) copy_async(shared_address(shared_tables[1]) + 16 * i, shared_round.tasks[1].table + 4 * i);
    }
    commit_copies();
    if (threadIdx.x == 0) {
        shared_round.first = first, shared_round.count0 = count0, shared_round.count = count0 + count1;
        shared_round.next = blockDim.x / LANES, shared_round.behind = at + count0 + count1;
    }
    __syncthreads();
}

__device__ inline u32 take_tile(u32 lane) {
    u32 n = 0;
    if (lane == 0) n = atomicAdd(&shared_round.next, 1);
    return __shfl_sync(ALL_LANES, n, 0);
}

// A tile of a warp, and where its lane's bits lie in the stage.
struct Tile {
    u32 task;            // of the round
    u32 row, column;     // in tiles
    u32 position;        // of the lane's bits
    u32 end;             // of them; in the bits from SLACK_SHIFT on, how many of them may be left behind the last code
    __device__ const TileTask& from() const { return shared_round.tasks[task]; }
    __device__ u32 table() const { return task * TABLE_ENTRIES * 4; }
};

// Whether all of the tile exists and is wanted, with rows that 16-byte stores can write.
__device__ inline bool is_whole(const Tile& tile) {
    const TileTask& t = tile.from();
    const u64 row = u64(tile.row) * TILE_ROWS, column = u64(tile.column) * (t.linear ? TILE_WEIGHTS : TILE_COLUMNS);
    if (t.column_begin % UNIT != 0 || column < t.column_begin) return false;
    if (t.linear) return column + TILE_WEIGHTS <= t.column_end;
    return t.output_stride % UNIT == 0 && column + TILE_COLUMNS <= t.column_end && row >= t.row_begin && row + TILE_ROWS <= t.row_end;
}

// Where a tile's plane starts. Within it, pairs of units follow each other, in each of them lanes; absent weights are left out.
__device__ inline const u8* plane_of(const Tile& tile) {
    const TileTask& t = tile.from();
    if (t.linear) return t.plane + u64(tile.column) * TILE_WEIGHTS;
    const u64 row = u64(tile.row) * TILE_ROWS;
    return t.plane + row * t.columns + u64(tile.column) * TILE_COLUMNS * min(u64(TILE_ROWS), t.rows - row);
}

// What a lane needs of a tile's record and the next one's, as loaded.
struct Record { u64 head, next_head; u32 low, high; };
__device__ inline Record load_record(const Tile& tile, u32 lane) {
    const TileRecord* at = tile.from().index + (u64(tile.row) * tile.from().tiles_across + tile.column);
    const u32 word = min(EXCESS_BITS * lane / 32, 4u);
    return {__ldg(&at->head), __ldg(&at[1].head), __ldg(&at->excess[word]), __ldg(&at->excess[word + 1])};
}
__device__ inline u32 excess_of(const Record& r, u32 lane) {
    return u32((u64(r.high) << 32 | r.low) >> (EXCESS_BITS * lane - 32 * min(EXCESS_BITS * lane / 32, 4u))) & 63;
}

// Starts the copy of a tile's bits, and finds where the lane's begin and end.
__device__ inline void stage_tile(Tile& tile, const Record& r, const Bits& bits, u32 lane, u32& problems) {
    const u64 begin = r.head & OFFSET_MASK, end = r.next_head & OFFSET_MASK;
    const u32 shift = u32(r.head >> 61), length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << shift);
    const u64 byte = begin >> 3 & ~15ull, left = max(tile.from().bits_bytes, byte) - byte;
    const u64 wanted = end > begin ? ((end + 7) >> 3) - byte : 0;
    const u32 bytes = u32(min(min(wanted, left), u64(bits.room())));
    const u8* from = tile.from().bits + byte;
#pragma unroll 4
    for (u32 i = lane * 16; i < bytes; i += LANES * 16) copy_async(bits.stage + STAGE_BEFORE + i, from + i);
    commit_copies();
    const u32 sum = inclusive_sum(length, lane);
    if (bytes != wanted || (lane == LANES - 1 && sum != end - begin)) problems |= STATUS_INDEX;
    tile.position = (u32(begin) & 127) + sum - length + POSITION_OF_BIT_0;
    tile.end = tile.position + length | (1u << shift) - 1 << SLACK_SHIFT;
}

// The n-th tile of the round: its record, its first plane bytes if it is whole, and its bits on their way to the stage.
__device__ __forceinline__ Tile begin_tile(u32 n, const Bits& bits, u32 lane, uint4 (&ahead)[TILE_PREFETCH], u32& problems) {
    Tile tile;
    tile.task = n >= shared_round.count0;
    const u32 number = tile.task ? n - shared_round.count0 : shared_round.first + n, wide = tile.from().wide;
    tile.row = tile.from().first_row + number / wide, tile.column = tile.from().first_column + number % wide;
    const Record record = load_record(tile, lane);
    if (is_whole(tile)) {
        const u8* plane = plane_of(tile) + lane * 16;
#pragma unroll
        for (u32 i = 0; i < TILE_PREFETCH; i++) ahead[i] = load_plane(plane + i * CHUNK);
    }
    __syncwarp();  // all lanes have left the stage
    stage_tile(tile, record, bits, lane, problems);
    return tile;
}

__device__ __forceinline__ void decode_whole(Tile& tile, const Bits& bits, u32 lane, u16* to, uint4 (&ahead)[TILE_PREFETCH],
                                             u32& problems) {
    const TileTask& t = tile.from();
    const u8* plane = plane_of(tile) + lane * 16;
    const u32 table = tile.table();
    const bool linear = t.linear;
    u32 group_bytes;
    if (linear) {
        group_bytes = 2 * LANES * UNIT * UNITS_A_GROUP;
        to += u64(tile.column) * TILE_WEIGHTS - t.column_begin + UNIT * lane;
    } else {
        group_bytes = 2 * GROUP_ROWS * u32(t.output_stride);
        to += (u64(tile.row) * TILE_ROWS + lane / 4 - t.row_begin) * t.output_stride;
        to += u64(tile.column) * TILE_COLUMNS - t.column_begin + lane % 4 * UNIT;
    }
    u32 position = tile.position;
#pragma unroll 1
    for (u32 group = 0; group < GROUPS; group++) {
        uint4 weights[UNITS_A_GROUP];
#pragma unroll
        for (u32 unit = 0; unit < UNITS_A_GROUP; unit += 2) {
            // No rotation of `ahead`: a move of what is still on its way would wait for it.
            uint4& slot = ahead[unit / 2 % TILE_PREFETCH];
            const uint4 p = slot;
            const u32 next = group * (UNITS_A_GROUP / 2) + unit / 2 + TILE_PREFETCH;
            if (next < UNITS / 2) slot = load_plane(plane + next * CHUNK);
            u32 e[4];
            decode_unit(table, bits, position, e, problems);
            weights[unit] = merge_unit(e, p.x, p.y);
            decode_unit(table, bits, position, e, problems);
            weights[unit + 1] = merge_unit(e, p.z, p.w);
        }
        const u64 address = reinterpret_cast<u64>(to) + u64(group) * group_bytes;
        if (linear) store_group<2 * LANES * UNIT>(address, weights); else store_group<2 * 4 * UNIT>(address, weights);
    }
    tile.position = position;
}

// A tile at the edge of its tensor or of the range asked for, unit by unit. Every weight that exists is decoded, those wanted are
// stored. The position behind the lane's last code, and problems in the upper half.
__device__ __noinline__ u64 decode_edge(Tile tile, Bits bits, u32 lane, u16* output) {
    u32 position = tile.position, problems = 0;
    const TileTask& t = tile.from();
    const u32 lanes_a_row = t.linear ? LANES : 4, half = UNIT * lanes_a_row;  // columns that a unit of all its lanes has
    const u32 g = lane / lanes_a_row, l = lane % lanes_a_row, units = t.linear ? UNITS : UNITS_A_GROUP;
    const u64 row0 = u64(tile.row) * TILE_ROWS, column0 = u64(tile.column) * (half * units);
    const u32 height = t.linear ? 1 : u32(min(u64(TILE_ROWS), t.rows - row0)), width = u32(min(u64(half * units), t.columns - column0));
    const u8* plane = plane_of(tile);
    for (u32 i = lane * 128; i < height * width; i += LANES * 128) prefetch_l2(plane + i);
#pragma unroll 1
    for (u32 i = 0; i < UNITS; i++) {
        const u32 group = i / units, unit = i % units, first = unit * half + UNIT * l, row_of_tile = group * GROUP_ROWS + g;
        if (row_of_tile >= height || first >= width) continue;
        const u32 count = min(width - first, UNIT), rows = min(height - group * GROUP_ROWS, LANES / lanes_a_row);
        // The pair of units begins behind `before` columns of as many rows as the group has; it has `both` columns of each.
        const u32 before = unit / 2 * 2 * half, both = min(width - before, 2 * half);
        const u32 of_lanes_before = min(UNIT * l, both) + min(max(both, half) - half, UNIT * l);
        const u32 of_first_unit = unit % 2 ? min(both - UNIT * l, UNIT) : 0;
        const u8* from = plane + group * GROUP_ROWS * width + rows * before + g * both + of_lanes_before + of_first_unit;
        const u64 row = row0 + row_of_tile, column = column0 + first;
        u16* to = output + (row - t.row_begin) * t.output_stride + (column - t.column_begin);
        const bool row_wanted = row >= t.row_begin && row < t.row_end;
        const bool wanted = row_wanted && column >= t.column_begin && column + UNIT <= t.column_end;
        if (count == UNIT && wanted && reinterpret_cast<u64>(to) % 16 == 0 && reinterpret_cast<u64>(from) % 8 == 0) {
            u32 e[4];
            decode_unit(tile.table(), bits, position, e, problems);
            const uint2 p = __ldg(reinterpret_cast<const uint2*>(from));
            *reinterpret_cast<uint4*>(to) = merge_unit(e, p.x, p.y);
            continue;
        }
#pragma unroll 1
        for (u32 k = 0; k < count; k += 2) {
            const u32 e = decode_pair(tile.table(), bits, position);
            if (int(e) < 0) problems |= STATUS_NO_CODE;
            position += e & 63;
            for (u32 j = k; j < min(k + 2, count); j++) {
                const u32 exponent = (j == k ? e >> 7 : e >> 23) & 255, byte = __ldg(from + j);
                if (row_wanted && column + j >= t.column_begin && column + j < t.column_end)
                    to[j] = u16((byte & 0x80) << 8 | exponent << 7 | byte & 0x7F);
            }
        }
    }
    return u64(problems) << 32 | position;
}

// total: tiles of all tasks. stage_bytes: STAGE_BEFORE + STAGE_AFTER + the most bytes that a tile of the launch stages (from the 16
// bytes that hold its first bit to its last byte, rounded up to 16): the host knows them from the index. Dynamic shared memory: that
// for each warp. Launch: as many blocks as fit the device, at most `total`.
extern "C" __global__ void __launch_bounds__(TILE_WARPS * LANES, TILE_BLOCKS)
df11_tile_decode(const TileTask* __restrict__ tasks, u32 task_count, u32 total, u32 stage_bytes, u32* status, u64 output) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const Bits bits = {shared_address(stages) + warp * stage_bytes, stage_bytes};
    u32 at = share_begin(total, blockIdx.x), problems = 0;
    // The first two tasks at once, should the share begin in the first: one latency less.
    const u32 guess = threadIdx.x < min(task_count, 2u) * TASK_WORDS ? reinterpret_cast<const u32*>(tasks)[threadIdx.x] : 0;
    for (u32 share_end; at < (share_end = share_begin(total, blockIdx.x + 1));) {
        begin_round(tasks, task_count, at, share_end, guess, lane);
        u32 number = warp;
        Tile tile = {};
        uint4 ahead[TILE_PREFETCH] = {};
        if (number < shared_round.count) tile = begin_tile(number, bits, lane, ahead, problems);
        wait_for_copies();
        __syncthreads();
        while (number < shared_round.count) {
            u16* to = tile.from().output + output / 2;
            if (is_whole(tile)) decode_whole(tile, bits, lane, to, ahead, problems);
            else {
                const u64 edge = decode_edge(tile, bits, lane, to);
                tile.position = u32(edge), problems |= u32(edge >> 32);
            }
            if ((tile.end & END_MASK) - tile.position > tile.end >> SLACK_SHIFT) problems |= STATUS_LANE_END;
            number = take_tile(lane);
            if (number < shared_round.count) tile = begin_tile(number, bits, lane, ahead, problems);
            wait_for_copies();
            __syncwarp();
        }
        at = shared_round.behind;
        __syncthreads();
    }
    if (problems) atomicOr(status, problems);
}
