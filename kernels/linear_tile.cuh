// Products with matrices in tiles as stored (spec/format.md 6.4), up to 16 rows of x: 10.6 bits are
// read for each weight, and nothing is decoded to memory. For compute capability 8.0 and newer; on
// 9.0 the launch may begin while the one before ends.
//
//   item      as in the fast layout: a strip, or of the last strips a slice of the columns
//   run       tiles of an item side by side, at most 16 runs an item: a warp decodes one and adds
//             its sums in shared memory; bits of y depend on runs, not on which warp had which
//   unit      eight weights of each lane: B of two mma.m16n8k16, whose k has any order; x is A
//   block     persistent, one a multiprocessor:
//             warp 0         adds the sums of the runs of item after item, in order, and stores y
//             the others     decode run after run, without waiting for each other
//
//      item 0  | run 0  | run 1  | ...  | run 15 |    warp 1 has run 0, ..., warp 15 run 14,
//      item 1  | run 0  | run 1  | ...                warp 1 run 15, warp 2 run 0 of item 1, ...
//
//      shared memory   | table, or two | sums of two items | warp 1: bits, next bits, plane | ...
//
//   tables    of the matrix in use, and with several matrices of the next one, on its way
//   bits      of a warp's next tile come while it decodes one, by cp.async; the plane comes 2 units
//             of each lane at once, three such ahead, each lane its own bytes
//   x         of a tile in registers, for all four bands
//   sums      of an item meet when all warps have passed it (mbarrier); two items are on their way
//   edges     partial tiles, tiles with more bits than the stage takes, and x that is not aligned
//             go unit by unit, with the same bits of y
//
// Budget (kernels/ptx/linear.sm_90a.cubin): 16 warps of 125 registers, no spills; with 16 rows of x
// 128, and 160 bytes of spills, words that are needed between tiles. Shared memory, one matrix whose
// tiles have at most 2704 bytes of bits: 146 KiB at one row of x, 174 KiB at 8, 206 KiB at 16.
// cuBLASLt's best divided by ours, H200, sum of 6144 x 4096, 4096 x 4096, 28672 x 4096,
// 4096 x 14336 (benches/record/2026-11-22-linear-tile.md):
//   rows of x         1      8      16
//                     0.72   0.66   0.49
// What limits it (ncu, 28672 x 4096, one row, 19 warps): latency. 83 instructions a unit of 256
// weights, of them 56 in the loop, 21 once a tile and 7 for escapes; issue slots 56 % busy; 24.7
// wavefronts of shared memory a unit, 14.3 for look-ups, of the 39 cycles that a unit takes. Of the
// warps' time 59 % goes to the loop, a third of that to waiting for look-ups; 26 % to what is done
// once a tile, 9 % to the launch's beginning, 6 % to escapes.
//
// Rejected, in the record with their figures: x loaded for each unit; plane bytes prefetched into
// registers; look-ups through an address that is added; escapes decoded one by one; 19 and 23 warps
//
// Safety on any content: tiles are those of the launch; staging is bounded by the bitstream and by
// the stage, windows by the stage, an edge's words by the tile's bytes, look-ups by the table. A
// tile decodes as many weights as it has, whatever its bits. Contradictions set bits of the status
// word, as in the decoder.
#pragma once
#include "linear_bulk.cuh"
#include "tile_code.cuh"

constexpr u32 TILE_BANDS = 4, BAND_ROWS = 8, BAND_UNITS = 8, TILE_WIDTH = TILE_STEPS * STEP_COLUMNS;
// Bytes of the plane that a warp loads at once, two units of each lane; those of a band.
constexpr u32 PLANE_PAIR = LANES * 16, PLANE_BAND = PLANE_PAIR * BAND_UNITS / 2;
// Sums of a run in shared memory: for each row of x those of 32 rows of the strip.
constexpr u32 MOST_RUNS = 16, RUN_SETS = 2, RUN_PITCH = STRIP_ROWS;
// Bytes of a stage besides a tile's bits: a word that is not decoded before them, and the three
// that windows reach after them.
constexpr u32 BITS_BEFORE = 16, BITS_AFTER = 16, TILE_STAGES = 2;
// Pairs of units whose plane is on its way, or read.
constexpr u32 PLANE_AHEAD = BAND_UNITS / 2;

__host__ __device__ constexpr u32 run_set_bytes(u32 x_rows) {
    return MOST_RUNS * x_rows * RUN_PITCH * 4;
}
// Tables, with room to begin at a multiple of their size, and the sums of runs.
__host__ __device__ constexpr u32 tile_fixed_bytes(u32 x_rows, u32 matrices) {
    return (1 + (matrices > 1 ? 2 : 1)) * u32(sizeof(TileTable)) + RUN_SETS * run_set_bytes(x_rows);
}
// Dynamic shared memory of a block with this many warps that decode. `staged_bytes`: the most bytes
// that a tile takes of its bitstream, from the 16 bytes with its first bit to those with its last
// one. With less memory tiles with more bits are slow, and as exact; at least for 0.
__host__ __device__ constexpr u32 tile_shared_bytes(u32 warps, u32 x_rows, u32 matrices,
                                                    u32 staged_bytes) {
    return tile_fixed_bytes(x_rows, matrices) +
           warps *
               (TILE_STAGES * (staged_bytes + BITS_BEFORE + BITS_AFTER) + PLANE_AHEAD * PLANE_PAIR);
}

// How a range of tiles is shared out among warps: by its length alone, as sums are added run by
// run.
struct Runs {
    u32 length, count;
    __device__ explicit Runs(u32 tiles)
        : length(max((tiles + MOST_RUNS - 1) / MOST_RUNS, 1u)),
          count((tiles + length - 1) / length) {}
};

// A tile of the launch, the same for all lanes of a warp.
struct TilePlace {
    u32 number;         // of the item, among the block's that exist
    u32 run;            // of the item
    bool first;         // of the run
    u32 matrix, strip;  // of the launch, of the matrix
    u32 tile;           // of the strip
};

// The tiles of one of the block's warps: each takes the run after that of the warp before.
struct TileCursor {
    TilePlace at;
    u32 item, begin, end;       // tiles of the item
    u32 run_length, run_count;  // Runs
    u32 first_warp;             // that takes the first run of the item
    bool exists;

    __device__ bool find_item(const Shared& work) {
        for (; item < work.items(); item += gridDim.x) {
            const Range range = work.range(item);
            if (!range.exists) continue;
            at.matrix = range.matrix, at.strip = range.strip, begin = range.begin / TILE_STEPS,
            end = (range.end + TILE_STEPS - 1) / TILE_STEPS;
            const Runs runs(end - begin);
            run_length = runs.length, run_count = runs.count;
            return true;
        }
        return false;
    }
    // The warp's next run from at.run on.
    __device__ void find_run(const Shared& work, u32 warp, u32 warps) {
        while (exists) {
            if (at.run < run_count) {
                at.tile = begin + at.run * run_length, at.first = true;
                return;
            }
            for (first_warp += run_count; first_warp >= warps;) first_warp -= warps;
            at.number++, item += gridDim.x;
            at.run = warp - first_warp + (warp < first_warp ? warps : 0);
            exists = find_item(work);
        }
    }
    __device__ void start(const Shared& work, u32 warp, u32 warps) {
        at = {}, item = blockIdx.x, first_warp = 0, at.run = warp;
        exists = find_item(work);
        find_run(work, warp, warps);
    }
    __device__ void advance(const Shared& work, u32 warp, u32 warps) {
        at.tile++, at.first = false;
        if (at.tile < min(begin + (at.run + 1) * run_length, end)) return;
        at.run += warps;
        find_run(work, warp, warps);
    }
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

// A lane's next bits, 96 of them from the word with `position` on: it is read in order.
struct Window {
    u32 w0, w1, w2, position;  // less than 32
    u32 next, last;            // shared addresses: of the word after, and of the last one there is
    __device__ void begin(u32 stage, u32 stage_bytes, u32 from) {
        const u32 at = stage + BITS_BEFORE - 4 + min(from >> 5, (stage_bytes - 32) / 4) * 4;
        w0 = load_shared(at), w1 = load_shared(at + 4), w2 = load_shared(at + 8);
        next = at + 12, last = stage + stage_bytes - 4, position = from & 31;
    }
    __device__ void refill() {
        w0 = w1, w1 = w2, w2 = load_shared(next), next = min(next + 4, last);
    }
    __device__ void advance(u32 bits) {
        position += bits;
        if (position >= 32) position -= 32, refill();
    }
    // Counted as LaneBits; none where the end of the stage was met.
    __device__ u32 place(u32 stage) const {
        return next == last ? ~0u : (next - 12 - (stage + BITS_BEFORE - 4)) * 8 + position;
    }
};

// `table`: its shared address, a multiple of its size, so that one logic op makes an entry's.
__device__ inline u32 tile_entry(u32 table, u32 window) {
    return load_shared((window & INDEX_MASK) | table);
}

// Four pairs one by one, however many bits they take.
__device__ __forceinline__ void decode_long_unit(u32 table, Window& bits, u32 (&e)[4]) {
#pragma unroll 1
    for (u32 i = 0; i < 4; i++) {
        const u32 low = __funnelshift_r(bits.w0, bits.w1, bits.position);
        u32 entry = tile_entry(table, low);
        if (int(entry) < 0) entry = escaped(entry, low >> ((entry >> 15 & 31) + 2));
        bits.advance(entry & LENGTH_MASK);
        e[0] = e[1], e[1] = e[2], e[2] = e[3], e[3] = entry;
    }
}

// Four pairs: 48 bits at most, except with escapes.
__device__ __forceinline__ void decode_unit(u32 table, Window& bits, u32 (&e)[4], u32& problems) {
    u32 low[5], high = __funnelshift_r(bits.w1, bits.w2, bits.position);
    low[0] = __funnelshift_r(bits.w0, bits.w1, bits.position);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        e[i] = tile_entry(table, low[i]);
        low[i + 1] = __funnelshift_r(low[i], high, e[i]), high = __funnelshift_r(high, 0, e[i]);
    }
    const u32 total = (e[0] + e[1] + e[2] + e[3]) & 127;
    u32 position = bits.position + total;
    // Rarely: an escape, or more bits than one word more makes up for.
    if (int(e[0] | e[1] | e[2] | e[3]) < 0 || position >= 64) {
        if (total > WINDOW_BITS) {
            decode_long_unit(table, bits, e);
            position = bits.position;
            if (int(e[0] | e[1] | e[2] | e[3]) < 0) problems |= STATUS_NO_CODE;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (int(e[i]) >= 0) continue;
                const u32 raw = __funnelshift_r(low[i], 0, e[i] >> 15);  // less two bits
                if (e[i] >> 15 == (0x10000 | NO_CODE)) problems |= STATUS_NO_CODE;
                e[i] = (raw << 5 & 0x7F80) | (raw << 13 & 0x7F800000);
            }
            if (position >= 64) position -= 32, bits.refill();
        }
    }
    bits.position = position;
    if (bits.position >= 32) bits.position -= 32, bits.refill();
}

// A unit's product: eight rows of weights by eight of x. The lane's 16 bytes of x are a whole A
// fragment as they are: the one product is right in the first eight rows of sums, the other in the
// last eight, and the others are of no use.
__device__ __forceinline__ void multiply_unit(float (&even)[4], float (&odd)[4], const uint4& w,
                                              const uint4& x) {
    multiply(even, x.x, x.y, x.z, x.w, w.x, w.z);
    multiply(odd, x.x, x.y, x.z, x.w, w.y, w.w);
}
template <u32 EIGHTS>
struct Sums {
    float even[EIGHTS][4] = {}, odd[EIGHTS][4] = {};
    __device__ __forceinline__ void add(const uint4& w, const uint4 (&x)[EIGHTS]) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) multiply_unit(even[i], odd[i], w, x[i]);
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

// Adds a band's sums to those of the run; `to`: those of the run.
template <u32 EIGHTS>
__device__ __forceinline__ void keep_sums(float* to, const Sums<EIGHTS>& sums, u32 band, bool first,
                                          u32 x_rows, u32 lane) {
    to += lane / 4 * RUN_PITCH + run_place(lane / 4, band * BAND_ROWS) + lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        if (lane / 4 + 8 * i >= x_rows) continue;
        float2* const two = reinterpret_cast<float2*>(to + 8 * i * RUN_PITCH);
        float2 sum =
            make_float2(sums.even[i][0] + sums.odd[i][2], sums.even[i][1] + sums.odd[i][3]);
        if (!first) sum.x += two->x, sum.y += two->y;
        *two = sum;
    }
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

// A tile at an edge, or of an x that is not aligned, or with more bits than the stage takes, which
// are then read where they are stored. Problems.
template <u32 EIGHTS>
__device__ __noinline__ u32 multiply_edge(const Shared work, const TilePlace& place, u32 stage,
                                          u32 stage_bytes, u32 table, float* to, u32 lane) {
    const TilePlace at = place;
    const LinearMatrix& m = work.launch.matrices[at.matrix];
    const u32 height = rows_left(work, at), width = columns_left(work, at), g = lane / 4,
              q = lane % 4;
    const u8* plane = plane_of(m.data, m.whole_columns, m.first_column, at.strip, at.tile, height);
    const bool aligned = work.aligned();
    u32 problems = 0;
    const TileBits found =
        find_bits(load_record(record_of(m, at.strip, at.tile), lane), m.rest_count, lane, problems);
    const bool fits = found.bytes <= stage_bytes - BITS_BEFORE - BITS_AFTER;
    const u32* words = static_cast<const u32*>(m.rest) + found.byte / 4;
    if (fits)
        words = reinterpret_cast<const u32*>(linear_shared + BITS_BEFORE +
                                             (stage - shared_address(linear_shared)));
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
            if (g < rows && first < width) {
                u32 e[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 window =
                        __funnelshift_r(word(position / 32), word(position / 32 + 1), position);
                    e[i] = tile_entry(table, window << 2);
                    if (int(e[i]) < 0) e[i] = escaped(e[i], window >> (e[i] >> 15 & 31));
                    if (int(e[i]) < 0) problems |= STATUS_NO_CODE;
                    position += e[i] & LENGTH_MASK;
                }
                w = merge_words(e, p[unit].x, p[unit].y);
            }
            __syncwarp();
            sums.add(w, x);
        }
        keep_sums<EIGHTS>(to, sums, band, at.first, work.launch.x_rows, lane);
    }
    return problems | check_end(found.lane, position + POSITION_OF_BIT_0);
}

// Full: the sums of an item are there; empty: they have been added.
struct RunBarriers {
    u32 full, empty;
    __device__ static void wait(u32 barrier, u32 phase) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        wait_for(barrier, phase);
#else
        u32 done = 0;
        while (!done)
            asm volatile(
                "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, "
                "0, p; }"
                : "=r"(done)
                : "r"(barrier), "r"(phase)
                : "memory");
#endif
    }
    // Until an item may have its sums there.
    __device__ void wait_empty(u32 number) const {
        if (number >= RUN_SETS) wait(empty + 8 * (number % RUN_SETS), (number / RUN_SETS - 1) % 2);
    }
    __device__ void wait_full(u32 number) const {
        wait(full + 8 * (number % RUN_SETS), number / RUN_SETS % 2);
    }
};

// The decode tables of the matrices of which the block has items, one after the other: the one in
// use, and the next one on its way.
struct Tables {
    u32 matrix, address;         // of the one in use
    u32 first;                   // address of the first place
    u32 next_item, next_number;  // the first item of the next one's matrix; its number in the
                                 // block
    __device__ u32 other() const { return 2 * first + u32(sizeof(TileTable)) - address; }
    __device__ void ask(const Shared& work, u32 of, u32 to) const {
        const u8* from = reinterpret_cast<const u8*>(work.launch.matrices[of].table);
        for (u32 i = threadIdx.x - LANES; i < sizeof(TileTable) / 16; i += blockDim.x - LANES)
            copy_async(to + 16 * i, from + 16 * i);
    }
    __device__ void find_next(const Shared& work) {
        for (; next_item < work.items(); next_item += gridDim.x) {
            const Range at = work.range(next_item);
            if (at.matrix != matrix) return;
            next_number += at.exists;
        }
    }
    __device__ void begin(const Shared& work) {
        next_number = 0;
        if (blockIdx.x >= work.items()) {
            next_item = work.items();
            return;
        }
        matrix = work.range(blockIdx.x).matrix, address = first;
        next_item = blockIdx.x;
        ask(work, matrix, address);
        ask_next(work);
    }
    __device__ void ask_next(const Shared& work) {
        if (matrix + 1 == work.launch.matrix_count) next_item = work.items(), next_number = ~0u;
        find_next(work);
        if (next_item < work.items()) ask(work, work.range(next_item).matrix, other());
    }
    // All warps that decode together.
    __device__ void advance(const Shared& work) {
        commit_copies();
        wait_for_copies();
        group_barrier(1, blockDim.x - LANES);
        matrix = work.range(next_item).matrix, address = other();
        ask_next(work);
    }
};

// Adds the runs' sums of item after item, in order. One warp, the first.
__device__ __forceinline__ void add_runs(const Shared& work, const float* sets,
                                         RunBarriers barriers) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows;
    wait_for_launch_before();
    u32 number = 0;
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        if (!at.exists) continue;
        const Runs runs((at.end + TILE_STEPS - 1) / TILE_STEPS - at.begin / TILE_STEPS);
        barriers.wait_full(number);
        const float* from = sets + number % RUN_SETS * (run_set_bytes(x_rows) / 4);
        for (u32 x_row = 0; x_row < x_rows; x_row++, from += RUN_PITCH) {
            float sum = 0;
#pragma unroll 4
            for (u32 run = 0; run < runs.count; run++)
                sum += from[run * x_rows * RUN_PITCH + run_place(x_row, lane)];
            if (at.slices == 1)
                store_product(work, at, x_row, lane, sum);
            else
                __stcg(work.launch.partials + u64(at.partial) * partial_floats(x_rows) +
                           x_row * STRIP_ROWS + lane,
                       sum);
        }
        __syncwarp();
        if (lane == 0) arrive(barriers.empty + 8 * (number % RUN_SETS));
        add_slices<1>(work, at);
        number++;
    }
}

template <u32 EIGHTS, bool HOLDS_X>
__device__ __forceinline__ void multiply_tiles(const Shared& work, TileCursor& cursor, float* sets,
                                               u32 table, u32 stage, u32 stage_bytes,
                                               RunBarriers barriers, u32 warp, u32 lane) {
    const u32 x_rows = work.launch.x_rows, stages = 2 * stage + stage_bytes;
    const bool aligned = work.aligned();
    Tables tables;
    tables.first = table;
    u32 problems = 0, arrived = 0;
    LaneBits next;         // of the cursor's tile, whose bits are on their way
    const u8* next_plane;  // of it, of the lane
    bool whole;            // no edge
    auto move_cursor = [&] {
        __syncwarp();
        if (lane == 0) {
            TileCursor moved = cursor;
            moved.advance(work, warp, blockDim.x / LANES - 1);
            cursor = moved;
        }
        __syncwarp();
        if (!cursor.exists) return;
        const LinearMatrix& m = work.launch.matrices[cursor.at.matrix];
        prefetch_l2(reinterpret_cast<const u8*>(record_of(m, cursor.at.strip, cursor.at.tile)));
    };
    u32 ring = stages + stage_bytes - stage + lane * 16;
    asm volatile("" : "+r"(ring));
    auto ask_for_bits = [&] {
        const LinearMatrix& m = work.launch.matrices[cursor.at.matrix];
        const TileBits at =
            find_bits(load_record(record_of(m, cursor.at.strip, cursor.at.tile), lane),
                      m.rest_count, lane, problems);
        const u8* from = static_cast<const u8*>(m.rest) + at.byte;
        const u32 height = rows_left(work, cursor.at);
        const bool fits = at.bytes <= stage_bytes - BITS_BEFORE - BITS_AFTER;
        next = at.lane;
        next_plane = plane_of(m.data, m.whole_columns, m.first_column, cursor.at.strip,
                              cursor.at.tile, height) +
                     lane * 16;
        whole =
            fits && aligned && height == STRIP_ROWS && columns_left(work, cursor.at) == TILE_WIDTH;
        if (fits)
#pragma unroll 1
            for (u32 i = lane * 16; i < at.bytes; i += LANES * 16)
                copy_async(stage + BITS_BEFORE + i, from + i);
    };
    // Each lane copies what it reads itself: its 16 bytes of the plane of two units, so that no
    // other has to wait. A group of copies each.
    auto ask_for_plane = [&] {
#pragma unroll
        for (u32 i = 0; i < PLANE_AHEAD - 1; i++) {
            if (whole) copy_line_async(ring + i * PLANE_PAIR, next_plane + i * PLANE_PAIR);
            commit_copies();
        }
    };
    auto arrive_before = [&](u32 number) {
        for (; arrived < number; arrived++) {
            while (arrived == tables.next_number) tables.advance(work);
            barriers.wait_empty(arrived);
            __syncwarp();
            if (lane == 0) arrive(barriers.full + 8 * (arrived % RUN_SETS));
        }
    };
    if (lane == 0) {
        TileCursor first;
        first.start(work, warp, blockDim.x / LANES - 1);
        cursor = first;
    }
    __syncwarp();
    tables.begin(work);
    if (cursor.exists) ask_for_bits();
    commit_copies();
    wait_for_copies();
    if (cursor.exists) ask_for_plane();
    group_barrier(1, blockDim.x - LANES);
    wait_for_launch_before();
    while (cursor.exists) {
        arrive_before(cursor.at.number);
        while (cursor.at.number == tables.next_number) tables.advance(work);
        barriers.wait_empty(cursor.at.number);
        // The tile's bits are older than the copies of the plane.
        wait_for_all_but<PLANE_AHEAD - 1>();
        __syncwarp();
        float* const to = sets + cursor.at.number % RUN_SETS * (run_set_bytes(x_rows) / 4) +
                          cursor.at.run * x_rows * RUN_PITCH;
        if (!whole) {
            problems |= multiply_edge<EIGHTS>(work, cursor.at, stage, stage_bytes, tables.address,
                                              to, lane);
            move_cursor();
            if (!cursor.exists) break;
            ask_for_bits();
            commit_copies();
            ask_for_plane();
            continue;
        }
        const bool first = cursor.at.first;
        u64 x_from[EIGHTS];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            x_from[i] =
                reinterpret_cast<u64>(work.launch.x + (lane / 4 + 8 * i) * work.launch.x_pitch +
                                      cursor.at.tile * TILE_WIDTH + lane % 4 * 8);
            // Kept: the compiler would make it again in each unit.
            asm volatile("" : "+l"(x_from[i]));
        }
        auto load_x_unit = [&](u32 unit, uint4(&x)[EIGHTS]) {
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                load_x_where(x[i], x_from[i] + unit * STEP_COLUMNS * 2, lane / 4 + 8 * i < x_rows);
        };
        uint4 x[HOLDS_X ? BAND_UNITS : 1][EIGHTS] = {};
        if (HOLDS_X)
#pragma unroll
            for (u32 unit = 0; unit < BAND_UNITS; unit++) load_x_unit(unit, x[HOLDS_X ? unit : 0]);
        const LaneBits mine = next;
        const u8* plane = next_plane;
        Window bits;
        bits.begin(stage, stage_bytes, mine.position);
        // The other stage takes the next tile's bits.
        stage = stages - stage;
        move_cursor();
        const bool more = cursor.exists;
#pragma unroll 1
        for (u32 band = 0; band < TILE_BANDS; band++) {
            Sums<EIGHTS> sums;
            // Where the plane goes on after the band; anywhere after the warp's last tile.
            const u8* after = plane + PLANE_BAND;
            if (band == TILE_BANDS - 1) after = more && whole ? next_plane : plane;
#pragma unroll
            for (u32 unit = 0; unit < BAND_UNITS; unit += 2) {
                constexpr u32 PAIRS = BAND_UNITS / 2;
                const u32 pair = unit / 2, wanted = pair + PLANE_AHEAD - 1;
                wait_for_all_but<PLANE_AHEAD - 2>();
                const uint4 p = load_shared_16(ring + pair * PLANE_PAIR);
                // Into the place of the pair before.
                copy_line_async(ring + wanted % PAIRS * PLANE_PAIR,
                                (wanted < PAIRS ? plane : after) + wanted % PAIRS * PLANE_PAIR);
                commit_copies();
                u32 e[4];
                if (!HOLDS_X) load_x_unit(unit, x[0]);
                decode_unit(tables.address, bits, e, problems);
                sums.add(merge_words(e, p.x, p.y), x[HOLDS_X ? unit : 0]);
                if (!HOLDS_X) load_x_unit(unit + 1, x[0]);
                decode_unit(tables.address, bits, e, problems);
                sums.add(merge_words(e, p.z, p.w), x[HOLDS_X ? unit + 1 : 0]);
            }
            plane += PLANE_BAND;
            keep_sums<EIGHTS>(to, sums, band, first, x_rows, lane);
            if (band == 0 && more) ask_for_bits();
        }
        problems |= check_end(mine, bits.place(stages - stage));
        __syncwarp();
    }
    arrive_before(cursor.at.number);
    while (tables.next_item < work.items()) tables.advance(work);
    if (problems) atomicOr(work.status(), problems);
}

template <u32 EIGHTS, bool HOLDS_X>
__device__ __forceinline__ void linear_tile(const Shared& work) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES,
              warps = blockDim.x / LANES - 1;
    __shared__ __align__(8) u64 barriers[2 * RUN_SETS];
    __shared__ TileCursor cursors[32];
    const RunBarriers at = {shared_address(barriers), shared_address(barriers + RUN_SETS)};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < RUN_SETS; i++)
            init_barrier(at.full + 8 * i, warps), init_barrier(at.empty + 8 * i, 1);
    }
    __syncthreads();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    let_next_launch_begin();
#endif
    // Tables begin at a multiple of their size, whatever lies before.
    const u32 base = shared_address(linear_shared), size = sizeof(TileTable),
              table = (base + size - 1) / size * size,
              fixed = tile_fixed_bytes(work.launch.x_rows, work.launch.matrix_count);
    float* const sets = reinterpret_cast<float*>(linear_shared + (table - base) +
                                                 (work.launch.matrix_count > 1 ? 2 : 1) * size);
    if (warp == 0) {
        add_runs(work, sets, at);
        return;
    }
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    const u32 bytes = ((room - fixed) / warps - PLANE_AHEAD * PLANE_PAIR) / (TILE_STAGES * 16) * 16,
              each = TILE_STAGES * bytes + PLANE_AHEAD * PLANE_PAIR;
    const u32 first =
        shared_address(sets) + RUN_SETS * run_set_bytes(work.launch.x_rows) + (warp - 1) * each;
    multiply_tiles<EIGHTS, HOLDS_X>(work, cursors[warp], sets, table, first, bytes, at, warp - 1,
                                    lane);
}
