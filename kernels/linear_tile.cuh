// Products with matrices in tiles as stored (spec/format.md 6.4), up to 16 rows of x: 10.6 bits are
// read for each weight, and nothing is decoded to memory. For compute capability 8.0 and newer; on
// 9.0 the launch may begin while the one before ends, and warps exchange registers.
//
//   item      as in the fast layout: a strip, or of the last strips a slice of the columns
//   run       tiles of an item side by side, at most 16 runs an item: a warp decodes one and adds
//             its sums in shared memory; bits of y depend on runs, not on which warp had which
//   unit      eight weights of each lane: B of two mma.m16n8k16, whose k has any order; x is A
//   block     persistent, one a multiprocessor:
//             warp 0         adds the sums of the runs of item after item, in order; stores y
//             warps 1 to 3   bring tiles: record, where each lane's bits begin, and the bits, by
//                            a bulk copy of one lane on 9.0, else by cp.async, into a slot of the
//                            warp that decodes the tile
//             the others     decode slot after slot
//
//      item 0  | run 0  | run 1  | ...  | run 15 |    each of 16 warps that decode has a column
//      item 1  | run 0  | run 1  | ...  | run 15 |    of tiles of 4096 columns, and keeps its x
//
//      shared memory   | tables | sums of two items | warp 4: slot, slot | warp 5: slot, slot | ...
//                      | tables | sums of one or two | x: warp 4, warp 5, ... | slots |   9-16 rows
//      slot            | ticket | 32 lanes: where their bits begin and end | bits |
//
//   tables    of the matrices of a block, one after another, in as many places as the launch says;
//             warp 0 fills a place again when all sums by its table have been added
//   plane     from global memory to registers one or two pairs of units ahead; to L2 a band ahead
//   x         of one or two rows on 9.0 all in shared memory, for all warps, if there is room; else
//             of a tile in registers, until a tile of other columns comes; of 9 to 16 rows on 9.0
//             three of the tile's eight units of columns in shared memory instead
//   sums      of an item meet when all its runs have been decoded; two items are on their way, or
//             one, as the launch says: if blocks have one item, or the largest tile needs the room;
//             a run waits for an item before after its first band
//   edges     partial tiles, tiles with more bits than a slot takes, and x that is not aligned go
//             unit by unit, with the same bits of y
//
// Budget (kernels/ptx/linear.sm_90a.cubin): 20 warps, which begin with 96 registers; the 16 that
// decode take 104, the others 64. Words that are needed between tiles or bands are spilled: 76
// bytes, with 16 rows of x 80. With x in shared memory 24 warps of 80 registers, of which 20 decode
// (128 bytes). Shared memory for tiles of at most 2704 bytes of bits: 143 KiB at 8 rows of x, 223
// KiB at 16, or 191 KiB with sums of one item, where it suffices for tiles of 3840 bytes; 16 KiB
// more for each further table; at one row of 4096 columns 146 KiB. PTX for compute capability 8.0:
// 12 warps that decode, 128 registers.
// Microseconds on an H200, sum of 6144 x 4096, 4096 x 4096, 28672 x 4096, 4096 x 14336
// (benches/record/2026-11-22-linear-tile.md):
//   rows of x         1       8       16
//                     129.6   139.9   178.9
// What limits it: one warp alone on each scheduler takes 353 clocks for a unit, four of them 485: a
// chain of four look-ups, and what is between tiles; and tensor cores lower the clock of the GPU,
// from 1.97 to 1.81 GHz. With 16 rows besides x of each tile, 8 KiB, for which all warps wait at
// once.
//
// Rejected, in the record with their figures: all of 16 rows of x in registers, which spills, and
// fragments of it out of two loads, which are moved together for each product; tables in copies, so
// that lanes do not meet in a bank; escapes fixed without a branch, in a function, or by one piece
// of code for all units; x loaded for each unit, or brought with each tile, and more warps; other
// splits of the registers; tiles brought by the warp that decodes them; one branch for two units,
// for which the loop has an eighth fewer instructions; the next unit's look-up before the branch;
// one product a unit, of both halves of its columns by up to four rows of x
//
// Safety on any content: tiles are those of the launch; copies are bounded by the bitstream and by
// the slot, windows by the slot, an edge's words by the tile's bytes, look-ups by the table. A tile
// decodes as many weights as it has, whatever its bits. Contradictions set bits of the status word,
// as in the decoder.
#pragma once
#include "linear_bulk.cuh"
#include "linear_wide.cuh"
#include "tile_code.cuh"

#ifndef SAME
#define SAME 0
#endif
#ifndef AHEAD_16
#define AHEAD_16 1
#endif
#ifndef X_HELD
#define X_HELD 5
#endif
constexpr u32 TILE_BANDS = 4, BAND_ROWS = 8, BAND_UNITS = 8, TILE_WIDTH = TILE_STEPS * STEP_COLUMNS;
// Bytes of the plane that a warp loads at once, two units of each lane; those of a band.
constexpr u32 PLANE_PAIR = LANES * 16, PLANE_BAND = PLANE_PAIR * BAND_UNITS / 2;
// Sums of a run in shared memory: for each row of x those of 32 rows of the strip.
#ifndef RUNS
#define RUNS 16
#endif
constexpr u32 MOST_RUNS = RUNS, RUN_PITCH = STRIP_ROWS;
// Whether of 16 rows of x some are in shared memory, so that registers suffice.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool SHARES_X = true;
#else
constexpr bool SHARES_X = false;
#endif
// Items whose sums are on their way at once, at most: the launch tells how many.
constexpr u32 MOST_RUN_SETS = 2;
// Tables at once, at most, so that the one of the next matrix is there before it is needed: the
// launch tells how many, one, two or four.
constexpr u32 MOST_TABLES = SHARES_X ? 4 : 1;
// Warps besides those that decode: one adds sums, the others bring tiles. A group of warps, as
// those that decode are groups: groups exchange registers.
constexpr u32 TILE_BRINGERS = 3, TILE_HELPERS = 1 + TILE_BRINGERS;
static_assert(TILE_HELPERS == 4, "a group of warps");
// Slots of each warp that decodes: tiles that are there or on their way.
constexpr u32 TILE_SLOTS = 2, MOST_TILE_WARPS = 20;
// Rows of x that a block may have in shared memory, for all warps. More warps decode then.
constexpr u32 FEWEST_ROWS = 2;
// Warps that decode, at most, with up to so many rows of x.
__host__ __device__ constexpr u32 tile_warps(u32 x_rows) {
    return x_rows <= FEWEST_ROWS ? MOST_TILE_WARPS : SHARES_X ? 16 : 12;
}
// From a row of x in shared memory to the next: 64 bytes modulo 128, so that lanes never meet in a
// bank.
constexpr u32 SHARED_X_UNIT = 128, SHARED_X_AFTER = 64;
__host__ __device__ constexpr u32 shared_x_pitch(u32 columns) {
    return (columns * 2 + SHARED_X_UNIT - 1) / SHARED_X_UNIT * SHARED_X_UNIT + SHARED_X_AFTER;
}
// Pairs of units whose plane bytes are on their way.
__host__ __device__ constexpr u32 plane_ahead(u32 eights) {
    return eights > 1 ? AHEAD_16 : 2;
}
// Units of a tile whose x a warp holds in registers. It has the others in shared memory, each lane
// its own words.
__host__ __device__ constexpr u32 units_held(u32 eights) {
    return SHARES_X && eights > 1 ? X_HELD : BAND_UNITS;
}
__host__ __device__ constexpr u32 x_bytes_of_warp(u32 eights) {
    return (BAND_UNITS - units_held(eights)) * eights * LANES * 16;
}
// Before the bits of a slot: what is decoded, and where each lane's bits are. The last word of it
// is loaded with the first bits, and not decoded. After them: what windows reach.
constexpr u32 TICKET_BYTES = 48, SLOT_HEAD = TICKET_BYTES + LANES * 8, BITS_AFTER = 16;

__host__ __device__ constexpr u32 run_set_bytes(u32 x_rows) {
    return MOST_RUNS * x_rows * RUN_PITCH * 4;
}
// Tables, and the sums of runs.
__host__ __device__ constexpr u32 tile_fixed_bytes(u32 x_rows, u32 tables, u32 sets) {
    return tables * u32(sizeof(TileTable)) + sets * run_set_bytes(x_rows);
}
// Dynamic shared memory of a block with this many warps that decode. `staged_bytes`: the most bytes
// that a tile takes of its bitstream, from the 16 bytes with its first bit to those with its last
// one. With less memory tiles with more bits are slow, and as exact; at least for 0. `tables`,
// `sets`: the launch's tile_tables and tile_sets.
__host__ __device__ constexpr u32 tile_shared_bytes(u32 warps, u32 x_rows, u32 staged_bytes,
                                                    u32 tables, u32 sets) {
    const u32 eights = (x_rows + 7) / 8,
              slots = TILE_SLOTS * (staged_bytes + SLOT_HEAD + BITS_AFTER);
    return tile_fixed_bytes(x_rows, tables, sets) + warps * (x_bytes_of_warp(eights) + slots);
}

// How a range of tiles is shared out among warps: by its length alone, as sums are added run by
// run.
struct Runs {
    u32 length, count;
    __host__ __device__ constexpr explicit Runs(u32 tiles)
        : length(tiles ? (tiles + MOST_RUNS - 1) / MOST_RUNS : 1),
          count((tiles + length - 1) / length) {}
};

// Runs of the blocks of a cluster before one of them.
template <u32 BLOCKS>
__host__ __device__ constexpr u32 runs_before(u32 runs, u32 rank) {
    return (runs * rank + BLOCKS - 1) / BLOCKS;
}

// A tile of the launch, the same for all lanes of a warp.
struct TilePlace {
    u32 matrix, strip;  // of the launch, of the matrix
    u32 tile;           // of the strip
};

__device__ inline u32 rows_left(const Shared& work, const TilePlace& at) {
    return min(work.launch.matrices[at.matrix].rows - at.strip * STRIP_ROWS, STRIP_ROWS);
}
__device__ inline u32 columns_left(const Shared& work, const TilePlace& at) {
    return min(work.columns() - at.tile * TILE_WIDTH, TILE_WIDTH);
}
__device__ inline const TileRecord* record_of(const LinearMatrix& m, u32 strip, u32 tile) {
    return static_cast<const TileRecord*>(m.index) + u64(strip) * tiles_across(m.whole_columns) +
           m.first_column / TILE_WIDTH + tile;
}
// `rows`: of the strip.
__device__ inline const u8* plane_of(const u8* plane, u32 whole_columns, u32 first_column,
                                     u32 strip, u32 tile, u32 rows) {
    return plane + u64(strip) * STRIP_ROWS * whole_columns +
           u64(first_column + tile * TILE_WIDTH) * rows;
}

// The tiles of a block in the order in which they are brought: of item after item first the first
// tile of each run, then the second of each, ... Run after run takes the next warp. BLOCKS of a
// cluster share the runs of an item.
template <u32 BLOCKS>
struct TileWalk {
    TilePlace at;
    u32 number;                 // of the item, among the block's that exist
    u32 fill;                   // how often the table must have been filled again
    u32 run, turn;              // of the item; of the run's tiles
    u32 warp;                   // that decodes it
    u32 item, end;              // of the launch; tiles of the item end here
    u32 length, count, runs;    // of a run; of the block's and of all runs of the item
    u32 first_run;              // of the block's
    u32 begin;                  // tiles of the block begin here
    u32 first_warp;             // that has the first run of the item
    u32 rows;                   // of the strip
    const TileRecord* records;  // of the strip, from its first tile on
    const u8* plane;            // likewise
    u32 most;                   // runs of an item that a block has
    bool exists;

    __device__ void find_item(const Shared& work) {
        exists = false;
        for (; item < work.items(); item += gridDim.x) {
            const Range range = work.range(item);
            if (!range.exists) continue;
            fill += range.matrix != at.matrix;
            at.matrix = range.matrix, at.strip = range.strip, begin = range.begin / TILE_STEPS,
            end = (range.end + TILE_STEPS - 1) / TILE_STEPS;
            const Runs all(end - begin);
            const u32 rank = blockIdx.x % BLOCKS;
            length = all.length, runs = all.count, run = 0, turn = 0;
            first_run = runs_before<BLOCKS>(runs, rank);
            count = runs_before<BLOCKS>(runs, rank + 1) - first_run;
            begin += first_run * length, end = min(end, begin + count * length);
            if (BLOCKS > 1 && count == 0) {
                number++;
                continue;
            }
            at.tile = begin, exists = true;
            const LinearMatrix& m = work.launch.matrices[at.matrix];
            rows = rows_left(work, at), records = record_of(m, at.strip, 0);
            plane = plane_of(m.data, m.whole_columns, m.first_column, at.strip, 0, rows);
            return;
        }
    }
    __device__ void start(const Shared& work) {
        // The first matrix of the block, whichever it is, is 0, as MatrixWalk counts.
        at = {}, item = blockIdx.x / BLOCKS * BLOCKS, number = 0, first_warp = 0;
        at.matrix = fill = ~0u, warp = 0;
        most = BLOCKS == 1 ? MOST_RUNS
                           : runs_before<BLOCKS>(Runs(tiles_across(work.columns())).count, 1);
        find_item(work);
    }
    // Twelve warps for eight runs of each item: two thirds of them have tiles of the same columns
    // in all items, and keep their x.
    __device__ bool by_thirds(u32 warps) const { return BLOCKS > 1 && warps == 12 && count == 8; }
    __device__ u32 warp_of_run(u32 warps) const {
        const u32 in_turn = first_warp + run, third = number % 3, odd = run % 2;
        if (by_thirds(warps)) return run / 2 * 3 + (third == 0 ? 2 * odd : third == 1 ? odd + 1 : odd);
        return in_turn < warps ? in_turn : in_turn - warps;
    }
    // The first run that the warp has of the item, or none.
    __device__ u32 run_of(u32 of_warp, u32 warps) const {
        if (!by_thirds(warps)) return of_warp >= first_warp ? of_warp - first_warp : count;
        const u32 third = number % 3, place = of_warp % 3;
        const u32 odd = third == 0 ? place / 2 : third == 1 ? place - 1 : place;
        const bool has = third == 0 ? place != 1 : third == 1 ? place != 0 : place != 2;
        return has ? of_warp / 3 * 2 + odd : count;
    }
    // From the start to the first tile of a warp.
    __device__ void skip_to(const Shared& work, u32 of_warp, u32 warps) {
        for (; exists; number++, item += gridDim.x, find_item(work)) {
            run = run_of(of_warp, warps);
            if (run < count) break;
            first_warp += count;
        }
        at.tile = begin + run * length, warp = of_warp;
    }
    __device__ void advance(const Shared& work, u32 warps) {
        run++, at.tile += length, warp = warp_of_run(warps);
        if (at.tile < end) return;
        // The last run may be shorter.
        turn++, run = 0, warp = warp_of_run(warps), at.tile = begin + turn;
        if (turn < length) return;
        for (first_warp += count; first_warp >= warps;) first_warp -= warps;
        number++, item += gridDim.x;
        find_item(work);
        warp = warp_of_run(warps);
    }
    // How often a warp arrives at the item's barrier after the tile: MOST_RUNS times for all runs.
    __device__ u32 arrivals() const {
        if (turn + 1 < length && at.tile + 1 < end) return 0;
        return run + 1 == count ? most + 1 - count : 1;
    }
};

// Where a lane's bits lie, counted from 30 bits before those that are staged; and its end, with the
// bits that may be left after its last code from bit 20 on.
struct LaneBits {
    u32 position, end;
};
constexpr u32 LEFT_SHIFT = 20;
// Whether the lane's codes end where its record says.
__device__ inline u32 check_end(LaneBits bits, u32 position) {
    const u32 end = bits.end & (1u << LEFT_SHIFT) - 1;
    return end - position > bits.end >> LEFT_SHIFT ? STATUS_LANE_END : 0;
}

// A tile's bits in the bitstream.
struct TileBits {
    u64 byte;   // with the first bit, a multiple of 16
    u32 bytes;  // that exist, from there on
    LaneBits lane;
};
__device__ inline TileBits find_bits(const Record& r, u64 bits_bytes, u32 lane, u32& problems) {
    const u64 begin = r.head & OFFSET_MASK, end = r.next_head & OFFSET_MASK;
    const u32 shift = u32(r.head >> 61),
              length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << shift);
    TileBits at;
    at.byte = min(begin >> 3 & ~15ull, bits_bytes);
    const u64 wanted = end > begin ? ((end + 7) >> 3) - (begin >> 3 & ~15ull) : 0;
    at.bytes = u32(min(min(wanted, bits_bytes - at.byte), u64(1) << 20));
    const u32 sum = inclusive_sum(length, lane);
    if (at.bytes != wanted || begin % 8 != 0 ||
        (lane == LANES - 1 && ((sum + 7) & ~7u) != end - begin))
        problems |= STATUS_RECORDS;
    at.lane.position = (u32(begin) & 127) + sum - length + POSITION_OF_BIT_0;
    at.lane.end = at.lane.position + length | (1u << shift) - 1 << LEFT_SHIFT;
    return at;
}

// The entry of the code with which a window begins, two bits above its end. `table`: bytes before
// its table.
__device__ __forceinline__ u32 entry_at(u32 table, u32 window) {
    return *reinterpret_cast<const u32*>(linear_shared + ((window & INDEX_MASK) | table));
}

// A lane's next bits, 96 of them from the word with `position` on: it is read in order.
struct Window {
    u32 w0, w1, w2;
    u32 position;    // of the next one in w0
    u32 next, last;  // shared addresses: of the word after, and of the last one there is
    u32 table;       // of entry_at
    // `bits`: the shared address of the first staged bits.
    __device__ void begin(u32 of_table, u32 bits, u32 bytes, u32 from) {
        table = of_table;
        const u32 at = bits - 4 + min(from >> 5, (bytes - 16) / 4) * 4;
        w0 = load_shared(at), w1 = load_shared(at + 4), w2 = load_shared(at + 8);
        next = at + 12, last = bits + bytes - 4, position = from & 31;
    }
    __device__ void refill() {
        w0 = w1, w1 = w2, w2 = load_shared(next), next = min(next + 4, last);
    }
    // Counted as LaneBits; none where the end of the slot was met.
    __device__ u32 place(u32 bits) const {
        return next == last ? ~0u : (next - 12 - (bits - 4)) * 8 + position;
    }
};

// Four pairs one by one, however many bits they take.
__device__ __forceinline__ void decode_long_unit(Window& bits, u32 (&e)[4]) {
#pragma unroll 1
    for (u32 i = 0; i < 4; i++) {
        const u32 low = __funnelshift_r(bits.w0, bits.w1, bits.position);
        u32 entry = entry_at(bits.table, low), length = entry & LENGTH_MASK;
        if (int(entry) < 0) entry = escaped(entry, low >> (flagged(entry) + 2));
        length += bits.position, bits.position = length & 31;
        if (length >= 32) bits.refill();
        e[0] = e[1], e[1] = e[2], e[2] = e[3], e[3] = entry;
    }
}

// Four pairs: 48 bits at most, except with escapes.
struct UnitLookups {
    u32 low[4], high;
    __device__ __forceinline__ void begin(const Window& bits) {
        high = __funnelshift_r(bits.w1, bits.w2, bits.position);
        low[0] = __funnelshift_r(bits.w0, bits.w1, bits.position);
    }
    __device__ __forceinline__ void look_up(const Window& bits, u32 (&e)[4], u32 i) {
        e[i] = entry_at(bits.table, low[i]);
        if (i == 3) return;
        low[i + 1] = __funnelshift_r(low[i], high, e[i]), high = __funnelshift_r(high, 0, e[i]);
    }
    // Right in seven bits, unless there are several escapes.
    __device__ __forceinline__ static u32 position(const Window& bits, const u32 (&e)[4]) {
        return e[0] + e[1] + bits.position + e[2] + e[3];
    }
    // Rarely: an escape, or more bits than one word more makes up for.
    __device__ __forceinline__ static bool is_rare(u32 position) {
        return position & (RARE_SUM | 64);
    }
    // Escapes, if the four fit the window.
    __device__ __forceinline__ u32 settle_escapes(Window& bits, u32 (&e)[4], u32& position,
                                                  u32& problems) const {
        const u32 before = bits.position, total = (position - before) & 127;
        // NO_CODE has a bit that the length of an escape has not.
        problems |= (e[0] | e[1] | e[2] | e[3]) >> 19 & STATUS_NO_CODE;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 raw = __funnelshift_r(low[i], 0, e[i] >> 15);  // less two bits
            const u32 escape = (raw << 5 & 0x7F80) | (raw << 13 & 0x7F800000);
            e[i] = int(e[i]) < 0 ? escape : e[i];
        }
        position = before + total;
        return total;
    }
    __device__ __forceinline__ void settle_rare(Window& bits, u32 (&e)[4], u32& position,
                                                u32& problems) const {
        const u32 before = bits.position, total = (position - before) & 127;
        if (total > WINDOW_BITS) {
            decode_long_unit(bits, e);
            position = bits.position;
            if (int(e[0] | e[1] | e[2] | e[3]) < 0) problems |= STATUS_NO_CODE;
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (int(e[i]) >= 0) continue;
            const u32 raw = __funnelshift_r(low[i], 0, e[i] >> 15);  // less two bits
            if (flagged(e[i]) == NO_CODE) problems |= STATUS_NO_CODE;
            e[i] = (raw << 5 & 0x7F80) | (raw << 13 & 0x7F800000);
        }
        position = before + total;
        if (position >= 64) position -= 32, bits.refill();
    }
    __device__ __forceinline__ static void advance(Window& bits, u32 position) {
        bits.position = position & 31;
        if (position & 32) bits.refill();
    }
};
__device__ __forceinline__ void decode_unit(Window& bits, u32 (&e)[4], u32& problems) {
    UnitLookups unit;
    unit.begin(bits);
#pragma unroll
    for (u32 i = 0; i < 4; i++) unit.look_up(bits, e, i);
    u32 position = unit.position(bits, e);
#ifdef STRAIGHT
    if (unit.is_rare(position)) {
        if (unit.settle_escapes(bits, e, position, problems) > WINDOW_BITS) {
            decode_long_unit(bits, e);
            position = bits.position;
            if (int(e[0] | e[1] | e[2] | e[3]) < 0) problems |= STATUS_NO_CODE;
        }
        if (position >= 64) position -= 32, bits.refill();
    }
#else
    if (unit.is_rare(position)) unit.settle_rare(bits, e, position, problems);
#endif
    unit.advance(bits, position);
}

// A unit of x as A fragments. Of eight rows the lane's 16 bytes are a whole one as they are: one
// product is right in the first eight rows of sums, the other in the last eight, and the others
// are of no use. Of 16 rows two fragments have the same pairs in the same places, so that a row has
// the same bits in either.
template <u32 EIGHTS>
__device__ __forceinline__ void make_fragments(uint4 (&x)[EIGHTS]) {
    if (EIGHTS == 1) return;
    const uint4 low = x[0], high = x[EIGHTS - 1];
    x[0] = make_uint4(low.x, high.x, low.z, high.z);
    x[EIGHTS - 1] = make_uint4(low.y, high.y, low.w, high.w);
    // Kept: the compiler would make them again for each product.
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++)
        asm volatile("" : "+r"(x[i].x), "+r"(x[i].y), "+r"(x[i].z), "+r"(x[i].w));
}
template <u32 EIGHTS>
struct Sums {
    float even[4] = {}, odd[4] = {};
    // `x`: of make_fragments.
    __device__ __forceinline__ void add(const uint4& w, const uint4 (&x)[EIGHTS]) {
        const uint4 &a = x[0], &b = x[EIGHTS - 1];
        multiply(even, a.x, a.y, a.z, a.w, w.x, w.z);
        multiply(odd, b.x, b.y, b.z, b.w, w.y, w.w);
    }
    // Those of two weights' rows by a row of x.
    __device__ __forceinline__ float2 of(u32 eight) const {
        const u32 at = eight * 2, other = EIGHTS == 1 ? 2 : at;
        return make_float2(even[at] + odd[other], even[at + 1] + odd[other + 1]);
    }
};
__device__ inline uint4 merge_words(const u32 (&e)[4], u32 p0, u32 p1) {
    return make_uint4(merge_fields(__byte_perm(p0, 0, 0x1100), e[0]),
                      merge_fields(__byte_perm(p0, 0, 0x3322), e[1]),
                      merge_fields(__byte_perm(p1, 0, 0x1100), e[2]),
                      merge_fields(__byte_perm(p1, 0, 0x3322), e[3]));
}

// Where the sums of a row of the strip are in those of a row of x: so that lanes never meet in a
// bank.
__device__ inline u32 run_place(u32 x_row, u32 row) { return row ^ x_row % 4 * BAND_ROWS; }
// Where a lane's sums of the first band are.
__device__ inline u32 sums_place(u32 lane) {
    return (lane / 4 * RUN_PITCH + run_place(lane / 4, 0) + lane % 4 * 2) * 4;
}

// Adds a band's sums to those of the run. `to`: shared address of those of the run; `place`: of
// sums_place.
template <u32 EIGHTS>
__device__ __forceinline__ void keep_sums(u32 to, u32 place, const Sums<EIGHTS>& sums, u32 band,
                                          bool first, u32 x_rows, u32 lane) {
    to += place ^ band * BAND_ROWS * 4;
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        const u32 two = to + i * 8 * RUN_PITCH * 4;
        if (lane / 4 + 8 * i >= x_rows) continue;
        float2 sum = sums.of(i);
        if (!first) {
            const uint2 before = load_shared_8(two);
            sum.x += __uint_as_float(before.x), sum.y += __uint_as_float(before.y);
        }
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(two), "f"(sum.x), "f"(sum.y)
                     : "memory");
    }
}

// 16 bytes of the plane, or what was there.
__device__ __forceinline__ void load_plane_where(uint4& to, const u8* from, bool exists) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p "
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
        : "l"(from), "r"(u32(exists)));
}

// 16 bytes of x, if that row exists: else what was there, of which nothing is used.
__device__ __forceinline__ void load_x_where(uint4& x, u64 from, bool exists) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
        : "l"(from), "r"(u32(exists)));
}

// A lane's eight columns of a row of x from a column on.
__device__ __forceinline__ uint4 load_x(const Shared& work, u32 row, u32 column, bool aligned) {
    if (row >= work.launch.x_rows) return make_uint4(0, 0, 0, 0);
    const u16* from = work.launch.x + row * work.launch.x_pitch + column;
    if (aligned) return __ldg(reinterpret_cast<const uint4*>(from));
    return load_x_slow(from, 8);
}

// The plane bytes of a lane's unit of any tile, which has `width` columns and `rows` of the band.
__device__ inline uint2 load_unit_plane(const u8* plane, u32 width, u32 rows, u32 band, u32 unit,
                                        u32 lane) {
    const u32 g = lane / 4, q = lane % 4;
    // The pair of units has `both` columns of each row of the band, after `before`.
    const u32 before = unit / 2 * 2 * STEP_COLUMNS, both = min(width - before, 2 * STEP_COLUMNS);
    const u32 of_lanes = min(8 * q, both) + min(max(both, STEP_COLUMNS) - STEP_COLUMNS, 8 * q);
    const u32 of_lane = unit % 2 ? min(both - 8 * q, 8u) : 0;
    plane += band * BAND_ROWS * width + rows * before + g * both + of_lanes + of_lane;
    return __ldg(reinterpret_cast<const uint2*>(plane));
}

// A tile at an edge, or of an x that is not aligned, or with more bits than the slot takes, which
// are then read where they are stored. Problems.
template <u32 EIGHTS>
__device__ __noinline__ u32 multiply_edge(const Shared work, TilePlace at, u32 table, u32 bits,
                                          u32 bits_bytes, u32 to, bool first, u32 lane) {
    const LinearMatrix& m = work.launch.matrices[at.matrix];
    const u32 height = rows_left(work, at), width = columns_left(work, at), g = lane / 4,
              q = lane % 4;
    const u8* plane = plane_of(m.data, m.whole_columns, m.first_column, at.strip, at.tile, height);
    const bool aligned = work.aligned();
    u32 problems = 0;
    const TileBits found =
        find_bits(load_record(record_of(m, at.strip, at.tile), lane), m.rest_count, lane, problems);
    const u32* words = static_cast<const u32*>(m.rest) + found.byte / 4;
    if (found.bytes + BITS_AFTER <= bits_bytes)
        words =
            reinterpret_cast<const u32*>(linear_shared + (bits - shared_address(linear_shared)));
    const u32 count = (found.bytes + 3) / 4;
    u32 position = found.lane.position - POSITION_OF_BIT_0;
    auto word = [&](u32 i) { return i < count ? words[i] : 0; };
#pragma unroll 1
    for (u32 band = 0; band < TILE_BANDS; band++) {
        const u32 rows = min(max(height, band * BAND_ROWS) - band * BAND_ROWS, BAND_ROWS);
        Sums<EIGHTS> sums;
        uint2 p[BAND_UNITS];
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            if (g < rows && unit * STEP_COLUMNS + 8 * q < width)
                p[unit] = load_unit_plane(plane, width, rows, band, unit, lane);
        }
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            const u32 first = unit * STEP_COLUMNS + 8 * q;
            uint4 w = make_uint4(0, 0, 0, 0), x[EIGHTS];
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                x[i] = first < width
                           ? load_x(work, g + 8 * i, at.tile * TILE_WIDTH + first, aligned)
                           : w;
            make_fragments(x);
            if (g < rows && first < width) {
                u32 e[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 window =
                        __funnelshift_r(word(position / 32), word(position / 32 + 1), position);
                    e[i] = entry_at(table, window << 2);
                    if (int(e[i]) < 0) e[i] = escaped(e[i], window >> flagged(e[i]));
                    if (int(e[i]) < 0) problems |= STATUS_NO_CODE;
                    position += e[i] & LENGTH_MASK;
                }
                w = merge_words(e, p[unit].x, p[unit].y);
            }
            __syncwarp();
            sums.add(w, x);
        }
        keep_sums<EIGHTS>(to, sums_place(lane), sums, band, first, work.launch.x_rows, lane);
    }
    return problems | check_end(found.lane, position + POSITION_OF_BIT_0);
}

// Waits until a barrier's phase of this parity, the last one or the one before, is complete.
__device__ inline void wait_parity(u32 barrier, u32 parity) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    wait_for(barrier, parity);
#else
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, "
            "0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
}

// What all warps of a block share, besides dynamic shared memory.
struct TileShared {
    u64 set_full[4], set_empty[4], other_full[4];  // sums of an item: there; added
    u64 slot_full[MOST_TILE_WARPS][TILE_SLOTS], slot_empty[MOST_TILE_WARPS][TILE_SLOTS];
    u64 filled[MOST_TABLES];  // a table, again
    u32 added;                // items whose sums have been added
    u32 fills;                // how many tables have been filled, besides the first
};
// Of which parity a phase of a barrier is does not tell how far it is, and a warp may be several
// items or tables before others: a count tells first. One warp counts.
__device__ inline void tell(u32* count, u32 value, u64* barrier, u32 lane) {
    arrive(shared_address(barrier));
    __syncwarp();
    if (lane == 0) atomicExch(count, value);
}
__device__ inline void wait_until(u32* count, u32 least, u64* barrier, u32 phase, u32 lane) {
    if (lane == 0)
        while (atomicOr(count, 0) < least) __nanosleep(32);
    __syncwarp();
    wait_parity(shared_address(barrier), phase % 2);
}
// Of one, two or four places taken in turns: which one the n-th has, and how many had it before.
__device__ inline u32 place_of(u32 n, u32 places) { return n & (places - 1); }
__device__ inline u32 turns_of(u32 n, u32 places) { return n >> places / 2; }
// The table of the block's n-th matrix: bytes before it, of entry_at.
__device__ inline u32 table_of(u32 fill, u32 tables) {
    return place_of(fill, tables) * u32(sizeof(TileTable));
}
// Until it is there. The first one is, and is not counted.
__device__ inline void wait_for_table(TileShared& common, u32 fill, u32 tables, u32 lane) {
    wait_until(&common.fills, fill, common.filled + place_of(fill, tables),
               turns_of(fill - 1, tables), lane);
}
// Until the sums of the item may be written.
__device__ inline void wait_for_set(TileShared& common, u32 number, u32 sets, u32 lane) {
    if (number < sets) return;
    wait_until(&common.added, number + 1 - sets, common.set_empty + place_of(number, sets),
               turns_of(number, sets) - 1, lane);
}

// Lanes of a warp that arrive at a slot after it has been written, or read: one, after __syncwarp,
// except for racecheck (WIDE_ARRIVALS).
constexpr u32 SLOT_LANES = WIDE_ARRIVALS;
// Arrivals at a slot that is filled. On 9.0 one of them tells how many bytes come by a bulk copy;
// else there are those of all lanes' copies besides.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr u32 SLOT_ARRIVALS = SLOT_LANES;
__device__ inline void copy_bits(u32 to, const u8* from, u32 bytes, u32 full, u32 lane) {
    if (bytes && lane == 0) copy_bulk_once(to, from, bytes, full);
}
__device__ inline void arrive_with_bits(u32 full, u32 bytes) { arrive_expecting(full, bytes); }
// To the copies, after they have been made.
__device__ inline void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
#else
__device__ inline void show_barriers() {}
constexpr u32 SLOT_ARRIVALS = LANES + SLOT_LANES;
__device__ inline void copy_bits(u32 to, const u8* from, u32 bytes, u32 full, u32 lane) {
#pragma unroll 1
    for (u32 i = lane * 16; i < bytes; i += LANES * 16) copy_async(to + i, from + i);
    arrive_with_copies(full);
}
__device__ inline void arrive_with_bits(u32 full, u32) { arrive(full); }
#endif
// All lanes of the warp, which have written to a slot, or read it. `bytes`: that come.
__device__ inline void show_slot(u32 full, u32 bytes, u32 lane) {
    __syncwarp();
    if (lane == 0)
        arrive_with_bits(full, bytes);
    else if (SLOT_LANES > 1)
        arrive(full);
}
__device__ inline void leave_slot(u32 empty, u32 lane) {
    __syncwarp();
    if (lane < SLOT_LANES) arrive(empty);
}

// Dynamic shared memory, and the barriers, by shared addresses.
struct TileBlock {
    u32 table, table_count, sets, set_count, xs, slots, slot_bytes;
    u32 runs;  // of an item, that the block has
    u32 set_full, other_full, set_empty, slot_full, slot_empty;
    // For the bits of each of two tiles.
    __device__ u32 pair_room() const { return (slot_bytes - TICKET_BYTES - LANES * 16) / 2; }
    __device__ u32 bits_bytes() const { return slot_bytes - SLOT_HEAD; }
    __device__ u32 sums(const TileWalk<1>& walk, u32 x_rows) const {
        return sets + place_of(walk.number, set_count) * run_set_bytes(x_rows) +
               walk.run * x_rows * RUN_PITCH * 4;
    }
};

// Copies a matrix's table to its place, later.
__device__ __forceinline__ void ask_for_table(const TileTable* from, u32 to, u32 thread,
                                              u32 threads) {
    for (u32 i = thread; i < sizeof(TileTable) / 16; i += threads)
        copy_async(to + 16 * i, reinterpret_cast<const u8*>(from) + 16 * i);
    commit_copies();
}

// What a warp that decodes needs of a tile.
struct alignas(16) Ticket {
    const u8* plane;
    u32 tile;    // of the strip
    u32 number;  // of the item
    u32 sums;    // shared address of the run's
    u32 fill, arrivals, flags;
    u32 matrix, strip, reserved[2];
};
static_assert(sizeof(Ticket) == TICKET_BYTES, "three words of 16 bytes");
constexpr u32 TICKET_WHOLE = 1, TICKET_FIRST = 2, TICKET_END = 4;

// Of the tile at which the walk is; whether it is whole is not known before its bits.
__device__ __forceinline__ Ticket ticket_of(const Shared& work, const TileBlock& block,
                                            const TileWalk<1>& walk, bool aligned) {
    Ticket t = {};
    t.plane = walk.plane + walk.at.tile * TILE_WIDTH * walk.rows;
    t.tile = walk.at.tile, t.number = walk.number, t.fill = walk.fill;
    t.sums = block.sums(walk, work.launch.x_rows), t.arrivals = walk.arrivals();
    t.matrix = walk.at.matrix, t.strip = walk.at.strip;
    if (aligned && walk.rows == STRIP_ROWS && columns_left(work, walk.at) == TILE_WIDTH)
        t.flags = TICKET_WHOLE;
    if (walk.turn == 0) t.flags |= TICKET_FIRST;
    return t;
}

// Brings a tile into a slot.
__device__ __forceinline__ void bring_tile(const Shared& work, const TileBlock& block,
                                           const Ticket& ticket, const Record& record, u32 slot,
                                           u32 full, u32 lane, u32& problems) {
    const LinearMatrix& m = work.launch.matrices[ticket.matrix];
    if ((ticket.flags & TICKET_WHOLE) && lane < PLANE_BAND / 128)
        prefetch_l2(ticket.plane + lane * 128);
    const TileBits bits = find_bits(record, m.rest_count, lane, problems);
    const bool fits = bits.bytes + BITS_AFTER <= block.bits_bytes();
    const u32 flags = fits ? ticket.flags : ticket.flags & ~TICKET_WHOLE;
    const u32 bytes = fits ? (bits.bytes + 15) / 16 * 16 : 0;
    copy_bits(slot + SLOT_HEAD, static_cast<const u8*>(m.rest) + bits.byte, bytes, full, lane);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(slot + TICKET_BYTES + lane * 8),
                 "r"(bits.lane.position), "r"(bits.lane.end)
                 : "memory");
    if (lane == 0) {
        const u64 at = reinterpret_cast<u64>(ticket.plane);
        store_shared_16(slot, make_uint4(u32(at), u32(at >> 32), ticket.tile, ticket.number));
        store_shared_16(slot + 16, make_uint4(ticket.sums, ticket.fill, ticket.arrivals, flags));
        store_shared_16(slot + 32, make_uint4(ticket.matrix, ticket.strip, 0, 0));
    }
    show_slot(full, bytes, lane);
}

// How many tiles each warp has been brought, modulo four: a bit of each warp.
struct Brought {
    u32 low = 0, high = 0;
    // The slot of the next one, and of which parity the phase is in which it has been emptied.
    __device__ u32 slot(u32 warp) const { return low >> warp & 1; }
    __device__ u32 parity(u32 warp) const { return ~(high >> warp) & 1; }
    __device__ void count(u32 warp) { high ^= low & (1u << warp), low ^= 1u << warp; }
};
static_assert(TILE_SLOTS == 2, "a bit tells the slot");

// Brings all tiles but the first of each warp. One of TILE_BRINGERS warps.
__device__ __forceinline__ void bring_tiles(const Shared& work, const TileBlock& block, u32 bringer,
                                            u32 warps, u32 lane) {
    const bool aligned = work.aligned();
    // Bits of warps: this one's, and those that have their first tile.
    const u32 of_bringer = 0x49249249u << bringer;
    static_assert(TILE_BRINGERS == 3, "every third bit");
    u32 problems = 0, begun = 0;
    Brought brought;
    TileWalk<1> walk;
    walk.start(work);
    // A tile is brought when the record of the one after has been asked for.
    Ticket ticket;
    Record record;
    u32 place = ~0u, emptied = 0;
#pragma unroll 1
    for (;; walk.advance(work, warps)) {
        const u32 warp = walk.warp, one = 1u << warp;
        const u32 at = warp * TILE_SLOTS + brought.slot(warp), parity = brought.parity(warp);
        Record after;
        if (walk.exists) {
            brought.count(warp);
            const bool mine = begun & of_bringer & one;
            begun |= one;
            if (!mine) continue;
            after = load_record(walk.records + walk.at.tile, lane);
        }
        if (place != ~0u) {
            wait_parity(block.slot_empty + place * 8, emptied);
            bring_tile(work, block, ticket, record, block.slots + place * block.slot_bytes,
                       block.slot_full + place * 8, lane, problems);
        }
        if (!walk.exists) break;
        ticket = ticket_of(work, block, walk, aligned), record = after;
        place = at, emptied = parity;
    }
    for (u32 warp = bringer; warp < warps; warp += TILE_BRINGERS) {
        const u32 at = warp * TILE_SLOTS + brought.slot(warp);
        wait_parity(block.slot_empty + at * 8, brought.parity(warp));
        if (lane == 0)
            store_shared_16(block.slots + at * block.slot_bytes + 16,
                            make_uint4(0, 0, 0, TICKET_END));
        copy_bits(0, nullptr, 0, block.slot_full + at * 8, lane);
        show_slot(block.slot_full + at * 8, 0, lane);
    }
    if (problems) atomicOr(work.status(), problems);
}

// The block's matrices, one after the other.
struct MatrixWalk {
    u32 item, matrix;  // of the launch; an item of the matrix, if there is one
    __device__ void start(const Shared& work, u32 first) {
        item = first, matrix = ~0u;
        next(work);
    }
    __device__ bool exists(const Shared& work) const { return item < work.items(); }
    __device__ void next(const Shared& work) {
        for (; item < work.items(); item += gridDim.x) {
            const Range range = work.range(item);
            if (!range.exists || range.matrix == matrix) continue;
            matrix = range.matrix;
            return;
        }
    }
};
// Fills the place of the table after the last one, if the block has another matrix.
__device__ __forceinline__ void fill_table(const Shared& work, const TileBlock& block,
                                           TileShared& common, MatrixWalk& last, u32& fills,
                                           u32 lane) {
    if (last.exists(work)) last.next(work);
    if (!last.exists(work)) return;
    fills++;
    ask_for_table(work.launch.matrices[last.matrix].table,
                  block.table + table_of(fills, block.table_count), lane, LANES);
    wait_for_copies();
    tell(&common.fills, fills, common.filled + place_of(fills, block.table_count), lane);
}

// Adds the runs' sums of item after item, in order, and fills tables as their places become free.
// One warp, the first.
__device__ __forceinline__ void add_runs(const Shared& work, const TileBlock& block,
                                         const float* sums, TileShared& common) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows, sets = block.set_count;
    u32 number = 0, fills = 0;
    MatrixWalk filled;
    filled.start(work, blockIdx.x);
    u32 matrix = filled.matrix;
    for (u32 i = 1; i < block.table_count; i++)
        fill_table(work, block, common, filled, fills, lane);
    wait_for_launch_before();
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        if (!at.exists) continue;
        if (at.matrix != matrix) {
            // All runs of the matrix before have been added.
            matrix = at.matrix;
            fill_table(work, block, common, filled, fills, lane);
        }
        const Runs runs((at.end + TILE_STEPS - 1) / TILE_STEPS - at.begin / TILE_STEPS);
        const u32 place = place_of(number, sets);
        wait_parity(block.set_full + 8 * place, turns_of(number, sets) % 2);
        const float* const set = sums + place * (run_set_bytes(x_rows) / 4);
        // Four rows of x at once: each adds in order, and waits.
        constexpr u32 ROWS = 4;
        for (u32 first = 0; first < x_rows; first += ROWS) {
            float sum[ROWS] = {};
            const float* from[ROWS];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                const u32 row = min(first + i, x_rows - 1);
                from[i] = set + row * RUN_PITCH + run_place(row, lane);
            }
#pragma unroll 4
            for (u32 run = 0; run < runs.count; run++)
#pragma unroll
                for (u32 i = 0; i < ROWS; i++) sum[i] += from[i][run * x_rows * RUN_PITCH];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                if (first + i >= x_rows) break;
                if (at.slices == 1)
                    store_product(work, at, first + i, lane, sum[i]);
                else
                    __stcg(work.launch.partials + u64(at.partial) * partial_floats(x_rows) +
                               (first + i) * STRIP_ROWS + lane,
                           sum[i]);
            }
        }
        number++;
        tell(&common.added, number, common.set_empty + place, lane);
        add_slices<1>(work, at);
    }
}

// Volatile: the assembler would take the registers that were stored there.
__device__ __forceinline__ uint4 load_stored(u32 address) {
    uint4 v;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
// Where a lane has eight rows of a unit that is not held. `rest`: of the first one.
template <u32 EIGHTS>
__device__ __forceinline__ u32 rest_place(u32 rest, u32 unit, u32 eight) {
    return rest + ((unit - units_held(EIGHTS)) * EIGHTS + eight) * LANES * 16;
}
// A lane's columns of a tile of x, for all rows: an A fragment, or two, for each unit. `rest`: the
// lane's place for the units that are not held.
template <u32 EIGHTS>
__device__ __forceinline__ void load_x_tile(const Shared& work, u32 tile, u32 lane, u32 rest,
                                            uint4 (&x)[units_held(EIGHTS)][EIGHTS]) {
    constexpr u32 HELD = units_held(EIGHTS);
    u64 from[EIGHTS];
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++)
        from[i] = reinterpret_cast<u64>(work.launch.x + (lane / 4 + 8 * i) * work.launch.x_pitch +
                                        tile * TILE_WIDTH + lane % 4 * 8);
#pragma unroll
    for (u32 unit = 0; unit < BAND_UNITS; unit++) {
        uint4 one[EIGHTS];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            one[i] = make_uint4(0, 0, 0, 0);
            load_x_where(one[i], from[i] + unit * STEP_COLUMNS * 2,
                         lane / 4 + 8 * i < work.launch.x_rows);
        }
        make_fragments(one);
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            if (HELD == BAND_UNITS) {
                x[unit][i] = one[i];
                continue;
            }
            // Those held go by shared memory too: each fragment is then one load. Words of two
            // would be moved together for each product, which costs eight instructions a unit.
            const u32 at = rest_place<EIGHTS>(rest, max(unit, HELD), i);
            store_shared_16(at, one[i]);
            if (unit < HELD) x[unit][i] = load_stored(at);
        }
    }
}

// A warp's first tile, for which it asks itself. Its record is on its way while barriers are made.
struct FirstTile {
    TileWalk<1> walk;
    Record record;
    u32 first;  // the block's first matrix, or none
    __device__ __forceinline__ void ask(const Shared& work, u32 warp, u32 warps, u32 lane) {
        walk.start(work);
        first = walk.exists ? walk.at.matrix : ~0u;
        walk.skip_to(work, warp, warps);
        if (walk.exists) record = load_record(walk.records + walk.at.tile, lane);
    }
    // With the block's first table. Its number in the strip if its x can be held, else none.
    __device__ __forceinline__ u32 bring(const Shared& work, const TileBlock& block, u32 warp,
                                         u32 warps, u32 lane, u32& problems) {
        if (first != ~0u)
            ask_for_table(work.launch.matrices[first].table, block.table, warp * LANES + lane,
                          warps * LANES);
        if (!walk.exists) return ~0u;
        const bool aligned = work.aligned();
        bring_tile(work, block, ticket_of(work, block, walk, aligned), record,
                   block.slots + warp * TILE_SLOTS * block.slot_bytes,
                   block.slot_full + warp * TILE_SLOTS * 8, lane, problems);
        return aligned && columns_left(work, walk.at) == TILE_WIDTH ? walk.at.tile : ~0u;
    }
};

// x of a warp that decodes: of a tile in registers, until it has one of other columns.
template <u32 EIGHTS>
struct HeldX {
    u32 held, rest;  // the tile; see load_x_tile
    uint4 x[units_held(EIGHTS)][EIGHTS] = {};

    // `tile`: the first one, if it is whole.
    __device__ __forceinline__ HeldX(const Shared& work, const TileBlock& block, u32 tile, u32 warp,
                                     u32, u32 lane)
        : held(tile), rest(block.xs + warp * x_bytes_of_warp(EIGHTS) + lane * 16) {
        if (held != ~0u) load_x_tile(work, held, lane, rest, x);
    }
    __device__ __forceinline__ void move_to(const Shared& work, u32 tile, u32 lane) {
        if (tile != held) held = tile, load_x_tile(work, held, lane, rest, x);
    }
    __device__ __forceinline__ void forget() {
        held = ~0u;
#pragma unroll
        for (u32 unit = 0; unit < units_held(EIGHTS); unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) x[unit][i] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void take(uint4 (&to)[EIGHTS], u32 unit) const {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            to[i] = unit < units_held(EIGHTS) ? x[unit][i]
                                              : load_shared_16(rest_place<EIGHTS>(rest, unit, i));
    }
};
// x of all warps: in shared memory as it lies, with pitch shared_x_pitch.
struct SharedX {
    u32 row, at;  // shared addresses: of the lane's columns of the first tile, and of the tile
    bool exists;  // the lane's row

    __device__ __forceinline__ SharedX(const Shared& work, const TileBlock& block, u32, u32 warp,
                                       u32 warps, u32 lane)
        : row(block.xs + lane / 4 * shared_x_pitch(work.columns()) + lane % 4 * 16),
          exists(lane / 4 < work.launch.x_rows) {
        const LinearLaunch& l = work.launch;
        if (!work.aligned()) return;
        for (u32 r = 0; r < l.x_rows; r++)
            for (u32 i = (warp * LANES + lane) * 8; i < l.columns; i += warps * LANES * 8)
                copy_async(block.xs + r * shared_x_pitch(l.columns) + i * 2,
                           reinterpret_cast<const u8*>(l.x + r * l.x_pitch + i));
        commit_copies();
    }
    __device__ __forceinline__ void move_to(const Shared&, u32 tile, u32) {
        at = row + tile * (TILE_WIDTH * 2);
    }
    __device__ __forceinline__ void forget() {}
    // Of a row that does not exist what was there, of which nothing is used.
    __device__ __forceinline__ void take(uint4 (&to)[1], u32 unit) const {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(to[0].x), "+r"(to[0].y), "+r"(to[0].z), "+r"(to[0].w)
            : "r"(at + unit * (STEP_COLUMNS * 2)), "r"(u32(exists)));
    }
};

template <u32 EIGHTS, bool SHARES>
struct WarpX {
    using Type = HeldX<EIGHTS>;
};
template <>
struct WarpX<1, true> {
    using Type = SharedX;
};

template <u32 EIGHTS, class X>
__device__ __forceinline__ void multiply_tiles(const Shared& work, const TileBlock& block,
                                               TileShared& common, FirstTile& tile, u32 warp,
                                               u32 warps, u32 lane) {
    constexpr u32 AHEAD = plane_ahead(EIGHTS), PAIRS = BAND_UNITS / 2;
    // So that it stays in a register: the assembler would read it again in each band.
    lane = __shfl_sync(ALL_LANES, lane, lane);
    u32 problems = 0, fill = 0;
    const u32 whole = tile.bring(work, block, warp, warps, lane, problems);
    wait_for_launch_before();
    X x(work, block, whole, warp, warps, lane);
    wait_for_copies();
    group_barrier(1, warps * LANES);
    asm volatile("" ::: "memory");
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        const u32 place = warp * TILE_SLOTS + turn % TILE_SLOTS,
                  slot = block.slots + place * block.slot_bytes;
        wait_parity(block.slot_full + place * 8, turn / TILE_SLOTS % 2);
        const uint4 one = load_shared_16(slot);
        uint4 two = load_shared_16(slot + 16);
#if SAME & 1
        two.w = __shfl_sync(ALL_LANES, two.w, 0);
#endif
#if SAME & 2
        two.y = __shfl_sync(ALL_LANES, two.y, 0);
#endif
#if SAME & 4
        two.x = __shfl_sync(ALL_LANES, two.x, 0);
#endif
#if SAME & 8
        const u32 tile_of = __shfl_sync(ALL_LANES, one.z, 0);
#else
        const u32 tile_of = one.z;
#endif
        if (two.w & TICKET_END) break;
        const bool first = two.w & TICKET_FIRST;
        // Of the lane, and the pairs of units that are on their way.
        const u8* plane = reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16;
        uint4 ahead[AHEAD];
        if (two.w & TICKET_WHOLE)
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) ahead[i] = load_plane(plane + i * PLANE_PAIR);
        if (two.y != fill) fill = two.y, wait_for_table(common, fill, block.table_count, lane);
        if (!(two.w & TICKET_WHOLE)) {
            if (first) wait_for_set(common, one.w, block.set_count, lane);
            const uint4 three = load_shared_16(slot + 32);
            problems |= multiply_edge<EIGHTS>(work, {three.x, three.y, one.z},
                                              table_of(fill, block.table_count), slot + SLOT_HEAD,
                                              block.bits_bytes(), two.x, first, lane);
            x.forget();  // not kept over the call
        } else {
            x.move_to(work, tile_of, lane);
            uint4 of_unit[EIGHTS] = {};
            Window bits;
            bits.begin(table_of(fill, block.table_count), slot + SLOT_HEAD, block.bits_bytes(),
                       load_shared(slot + TICKET_BYTES + lane * 8));
#pragma unroll 1
            for (u32 band = 0; band < TILE_BANDS; band++) {
                Sums<EIGHTS> sums;
                const bool more = band + 1 < TILE_BANDS;
                if (more && lane < PLANE_BAND / 128) prefetch_l2(plane + PLANE_BAND + lane * 112);
#ifdef ROLL
#pragma unroll 1
                for (u32 begin = 0; begin < BAND_UNITS; begin += 2 * AHEAD)
#pragma unroll
                for (u32 u = 0; u < 2 * AHEAD; u += 2) {
                    const u32 unit = begin + u, pair = unit / 2;
                    uint4& p = ahead[u / 2];
#else
#pragma unroll
                for (u32 unit = 0; unit < BAND_UNITS; unit += 2) {
                    const u32 pair = unit / 2;
                    uint4& p = ahead[pair % AHEAD];
#endif
                    u32 e[4];
                    decode_unit(bits, e, problems);
                    // Not before: it would take registers while the unit is decoded.
                    x.take(of_unit, unit);
                    sums.add(merge_words(e, p.x, p.y), of_unit);
                    decode_unit(bits, e, problems);
                    x.take(of_unit, unit + 1);
                    const uint4 w = merge_words(e, p.z, p.w);
                    // Of the band after, if there is one.
                    load_plane_where(p, plane + (pair + AHEAD) * PLANE_PAIR,
                                     pair + AHEAD < PAIRS || more);
                    sums.add(w, of_unit);
                }
                plane += PLANE_BAND;
                // Late, so that other warps may be after this one.
#ifdef RELOAD
                const bool first = load_shared(slot + 28) & TICKET_FIRST;
#endif
                if (first && band == 0)
                    wait_for_set(common, load_shared(slot + 12), block.set_count, lane);
#ifdef RELOAD
                keep_sums<EIGHTS>(load_shared(slot + 16), sums_place(lane), sums, band,
                                  load_shared(slot + 28) & TICKET_FIRST, work.launch.x_rows, lane);
#else
                keep_sums<EIGHTS>(two.x, sums_place(lane), sums, band, first, work.launch.x_rows,
                                  lane);
#endif
            }
            const uint2 ends = load_shared_8(slot + TICKET_BYTES + lane * 8);
            problems |= check_end({ends.x, ends.y}, bits.place(slot + SLOT_HEAD));
        }
        const u32 number = load_shared(slot + 12), arrivals = load_shared(slot + 24),
                  set = block.set_full + 8 * place_of(number, block.set_count);
        leave_slot(block.slot_empty + place * 8, lane);
        for (u32 i = 0; i < arrivals; i++) arrive(set);
    }
    if (problems) atomicOr(work.status(), problems);
}

// All warps of the block together: one after the other they would take 2 us.
__device__ __forceinline__ void make_barriers(TileShared& common, u32 warp, u32 lane) {
    auto make = [](u64& barrier, u32 arrivals) {
        init_barrier(shared_address(&barrier), arrivals);
    };
    const u32 of_slots = warp - TILE_HELPERS;
    if (warp >= TILE_HELPERS && lane < TILE_SLOTS)
        make(common.slot_full[of_slots][lane], SLOT_ARRIVALS),
            make(common.slot_empty[of_slots][lane], SLOT_LANES);
    if (warp == 0) {
        if (lane < MOST_RUN_SETS)
            make(common.set_full[lane], MOST_RUNS * LANES), make(common.set_empty[lane], LANES);
        if (lane < MOST_TABLES) make(common.filled[lane], LANES);
        if (lane == 0) common.added = common.fills = 0;
    }
    show_barriers();
}

// ROWS: of x, at most.
template <u32 ROWS>
__device__ __forceinline__ void linear_tile(const Shared& work) {
    constexpr u32 EIGHTS = (ROWS + 7) / 8;
    constexpr bool shares = ROWS <= FEWEST_ROWS;
    const u32 lane = threadIdx.x % LANES,
#ifdef UNIFORM
              warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0),
#else
              warp = threadIdx.x / LANES,
#endif
             
              warps = blockDim.x / LANES - TILE_HELPERS;
    __shared__ TileShared common;
    const bool decodes = warp >= TILE_HELPERS;
    FirstTile first;
    if (decodes) first.ask(work, warp - TILE_HELPERS, warps, lane);
    TileBlock block;
    block.set_full = shared_address(common.set_full),
    block.slot_full = shared_address(common.slot_full),
    block.slot_empty = shared_address(common.slot_empty);
    make_barriers(common, warp, lane);
    __syncthreads();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    let_next_launch_begin();
#endif
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    const u32 tables = MOST_TABLES == 1 ? 1 : work.launch.tile_tables, sets = work.launch.tile_sets,
              xs = tile_fixed_bytes(work.launch.x_rows, tables, sets),
              fixed = xs + (shares ? work.launch.x_rows * shared_x_pitch(work.columns())
                                   : warps * x_bytes_of_warp(EIGHTS));
    block.table = shared_address(linear_shared), block.table_count = tables,
    block.sets = block.table + tables * u32(sizeof(TileTable)), block.set_count = sets,
    block.xs = block.table + xs,
    block.slots = block.table + fixed,
    block.slot_bytes = (room - fixed) / (warps * TILE_SLOTS * 16) * 16;
    const float* const sums = reinterpret_cast<float*>(linear_shared + tables * sizeof(TileTable));
    // Together as many registers as the block begins with, which build.py compares.
    constexpr bool exchanges = SHARES_X && !shares;
    if (!decodes) {
        if constexpr (exchanges) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (warp == 0)
            add_runs(work, block, sums, common);
        else
            bring_tiles(work, block, warp - 1, warps, lane);
    } else {
        if constexpr (exchanges) asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        using X = typename WarpX<EIGHTS, shares>::Type;
        multiply_tiles<EIGHTS, X>(work, block, common, first, warp - TILE_HELPERS, warps, lane);
    }
}
