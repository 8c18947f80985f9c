// Converts between BF16 and the fast layout, one warp per tile.
#pragma once
#include "linear_fast_16.cuh"

namespace df11::linear {
// A tile. A lane's unit of step t and row r of four is in row lane / 4 + 8 r of the strip. In
// memory it is the eight columns from 32 t + lane % 4 * 8 on; in the fast layout it is two of each
// eight columns.
struct TileOf {
    u32 strip, tile, steps;  // steps: of this tile that exist
};
__device__ inline TileOf tile_of(u32 columns, u64 number) {
    const u32 steps = steps_of(columns), across = (steps + TILE_STEPS - 1) / TILE_STEPS;
    TileOf at;
    at.strip = u32(number / across);
    at.tile = u32(number % across);
    at.steps = min(steps - at.tile * TILE_STEPS, TILE_STEPS);
    return at;
}
__device__ inline u64 tiles_of(u32 rows, u32 columns) {
    return u64((rows + STRIP_ROWS - 1) / STRIP_ROWS) * tiles_across(columns);
}

// Loads a lane's weights of row r of four, and counts those that exist; the others are zero.
__device__ inline uint4 load_weights(const PackTask& task, const TileOf& at, u32 t, u32 r, u32 lane,
                                     u32& count) {
    const u32 row = at.strip * STRIP_ROWS + lane / 4 + 8 * r;
    const u32 column = (at.tile * TILE_STEPS + t) * STEP_COLUMNS + lane % 4 * 8;
    count = row < task.rows && column < task.columns ? min(task.columns - column, 8u) : 0;
    const u16* from = task.weights + row * task.pitch + column;
    if (count == 8 && reinterpret_cast<u64>(from) % 16 == 0)
        return __ldg(reinterpret_cast<const uint4*>(from));
    return load_few(from, count);
}
__device__ inline u32 weight_of(const uint4& unit, u32 k) {
    const u32 word = k / 2 == 0 ? unit.x : k / 2 == 1 ? unit.y : k / 2 == 2 ? unit.z : unit.w;
    return k % 2 ? word >> 16 : word & 0xFFFF;
}
// Whether no code expresses this exponent.
__device__ inline bool is_entry(u32 exponent, u32 base) { return base - exponent > 15; }

// Counts of the 256 exponents in shared memory, per exponent and two lanes, 16 bits for each lane;
// then the sums of these.
constexpr u32 COUNT_WORDS = LANES / 2;
constexpr u32 PACK_COUNTS = 256 * COUNT_WORDS + 256;
constexpr u32 PACK_SHARED_BYTES = PACK_WARPS * PACK_COUNTS * 4;

// Returns the base with the most weights in its 16 exponents; of several, the largest.
__device__ inline u32 best_base(const u32* counts, u32* sums, u32 lane, u32& inside) {
    for (u32 e = lane; e < 256; e += LANES) {
        u32 sum = 0;
        for (u32 i = 0; i < COUNT_WORDS; i++) {
            const u32 two = counts[e * COUNT_WORDS + (i + lane) % COUNT_WORDS];
            sum += (two & 0xFFFF) + (two >> 16);
        }
        sums[e] = sum;
    }
    __syncwarp();
    u32 best = 0;
    for (u32 e = lane; e < 256; e += LANES) {
        u32 sum = 0;
        for (u32 k = 0; k < 16; k++) sum += e >= k ? sums[e - k] : 0;
        best = max(best, sum << 8 | e);
    }
    best = __reduce_max_sync(ALL_LANES, best);
    inside = best >> 8;
    return best & 255;
}

__device__ __forceinline__ void count_tile(const PackTask& task, u32* counts, u32* sums) {
    const u32 lane = threadIdx.x % LANES;
    const u64 number = u64(blockIdx.x) * PACK_WARPS + threadIdx.x / LANES;
    if (number >= tiles_of(task.rows, task.columns)) return;
    const TileOf at = tile_of(task.columns, number);
    for (u32 i = lane; i < 256 * COUNT_WORDS / 4; i += LANES)
        reinterpret_cast<uint4*>(counts)[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    u32 weights = 0;
    for (u32 t = 0; t < at.steps; t++)
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            u32 count;
            const uint4 unit = load_weights(task, at, t, r, lane, count);
            weights += count;
#pragma unroll
            for (u32 k = 0; k < 8; k++)
                if (k < count)
                    atomicAdd(counts + (weight_of(unit, k) >> 7 & 255) * COUNT_WORDS + lane / 2,
                              lane % 2 ? 0x10000 : 1);
        }
    __syncwarp();
    u32 inside;
    const u32 base = best_base(counts, sums, lane, inside);
    const u32 entries = __reduce_add_sync(ALL_LANES, weights) - inside;
    u32 with_entries = 0;
    if (entries)
        for (u32 t = 0; t < at.steps; t++)
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                u32 count;
                const uint4 unit = load_weights(task, at, t, r, lane, count);
#pragma unroll
                for (u32 k = 0; k < 8; k++)
                    if (k < count && is_entry(weight_of(unit, k) >> 7 & 255, base))
                        with_entries |= 1u << t;
            }
    with_entries = __reduce_or_sync(ALL_LANES, with_entries);
    if (lane == 0) {
        task.heads[number] = {0, u16(entries), u8(with_entries), u8(base)};
    }
}

// Needs PACK_SHARED_BYTES of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(PACK_WARPS* LANES)
    df11_linear_count(const __grid_constant__ PackTask task) {
    u32* const counts = reinterpret_cast<u32*>(linear_shared) + threadIdx.x / LANES * PACK_COUNTS;
    count_tile(task, counts, counts + 256 * COUNT_WORDS);
}

// Writes each head's first entry: the total so far plus the counts of the heads before. One block.
extern "C" __global__ void __launch_bounds__(1024)
    df11_linear_scan(const __grid_constant__ PackTask task) {
    __shared__ u32 warp_sums[LANES];
    const u32 lane = threadIdx.x % LANES;
    const u32 warp = threadIdx.x / LANES;
    const u32 warps = blockDim.x / LANES;
    const u64 tiles = tiles_of(task.rows, task.columns);
    u32 before = *task.total;
    for (u64 begin = 0; begin < tiles; begin += blockDim.x) {
        const u64 at = begin + threadIdx.x;
        const u32 count = at < tiles ? task.heads[at].count : 0;
        const u32 sum = inclusive_sum(count, lane);
        __syncthreads();
        if (lane == LANES - 1) warp_sums[warp] = sum;
        __syncthreads();
        u32 mine = before + sum - count;
        for (u32 w = 0; w < warps; w++) {
            if (w < warp) mine += warp_sums[w];
            before += warp_sums[w];
        }
        if (at < tiles) task.heads[at].first = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) *task.total = before;
}

extern "C" __global__ void __launch_bounds__(PACK_WARPS* LANES)
    df11_linear_pack(const __grid_constant__ PackTask task) {
    const u32 lane = threadIdx.x % LANES;
    const u64 number = u64(blockIdx.x) * PACK_WARPS + threadIdx.x / LANES;
    if (number >= tiles_of(task.rows, task.columns)) return;
    const TileOf at = tile_of(task.columns, number);
    const FastHead head = task.heads[number];
    const u32 base = head.base;
    const u32 steps = steps_of(task.columns);
    u64 next = head.first;
    u8* to = task.data + (u64(at.strip) * steps + at.tile * TILE_STEPS) * STEP_BYTES + lane * 16;
    for (u32 t = 0; t < at.steps; t++, to += STEP_BYTES) {
        u32 plane[8], codes[4], outside = 0;
        uint4 units[4];
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            u32 loaded;
            const u32 row = at.strip * STRIP_ROWS + lane / 4 + 8 * r;
            const u32 first = (at.tile * TILE_STEPS + t) * STEP_COLUMNS;
            units[r] = transpose_quads(load_weights(task, at, t, r, lane, loaded), lane);
            u32 each[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u32 exponent = weight_of(units[r], k) >> 7 & 255;
                const bool other = is_entry(exponent, base);
                const bool exists =
                    row < task.rows && first + k / 2 * 8 + lane % 4 * 2 + k % 2 < task.columns;
                if (other && exists) outside |= 1u << (8 * r + k);
                // Weights that do not exist must be finite, because zeros of x multiply them.
                each[k] = !exists ? min(base, 15u) : other ? 0 : base - exponent;
            }
            plane[2 * r] = encode_others(units[r].x, units[r].y);
            plane[2 * r + 1] = encode_others(units[r].z, units[r].w);
            codes[r] = encode_codes(each);
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(plane[0], plane[1], plane[2], plane[3]);
        *reinterpret_cast<uint4*>(to + 512) = make_uint4(plane[4], plane[5], plane[6], plane[7]);
        *reinterpret_cast<uint4*>(to + 1024) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        if (!(head.steps >> t & 1)) continue;
        const u32 count = __popc(outside), sum = inclusive_sum(count, lane);
        u64 place = next + sum - count;
        next += __shfl_sync(ALL_LANES, sum, LANES - 1);
#pragma unroll
        for (u32 i = 0; i < 32; i++)
            if (outside >> i & 1) {
                if (place < task.capacity)
                    task.entries[place] =
                        (t << 10 | lane << 5 | i) << 16 | weight_of(units[i / 8], i % 8);
                place++;
            }
    }
}

__device__ __forceinline__ void unpack_tile(const UnpackTask& task) {
    const u32 lane = threadIdx.x % LANES;
    const u32 number = blockIdx.x * UNPACK_WARPS + threadIdx.x / LANES;
    if (number >= task.tiles) return;
    const u32 steps = steps_of(task.columns);
    TileOf at;
    at.strip = task.first_strip + number / task.across;
    at.tile = task.first_tile + number % task.across;
    at.steps = min(steps - at.tile * TILE_STEPS, TILE_STEPS);
    const Head head = {__ldg(reinterpret_cast<const uint2*>(task.heads) +
                             u64(at.strip) * tiles_across(task.columns) + at.tile)};
    const u8* from =
        task.data + (u64(at.strip) * steps + at.tile * TILE_STEPS) * STEP_BYTES + lane * 16;
    u32 problems = 0;
#pragma unroll 2
    for (u32 t = 0; t < at.steps; t++, from += STEP_BYTES) {
        const uint4 p0 = __ldg(reinterpret_cast<const uint4*>(from));
        const uint4 p1 = __ldg(reinterpret_cast<const uint4*>(from + 512));
        const uint4 codes = __ldg(reinterpret_cast<const uint4*>(from + 1024));
        u32 weights[4][4];
        decode_step(weights, p0, p1, codes, head.base());
        if (head.has_entries(t))
            problems |= place_entries(weights, head, t, task.entries, task.entry_count, lane);
        const u32 column = (at.tile * TILE_STEPS + t) * STEP_COLUMNS + lane % 4 * 8;
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            transpose_quads(weights[r], lane);
            const u32 row = at.strip * STRIP_ROWS + lane / 4 + 8 * r;
            if (row >= task.rows || column >= task.columns) continue;
            u16* to = task.output + row * task.pitch + column;
            const u32(&w)[4] = weights[r];
            const u64 element = u64(row) * task.columns + column;
            if (column >= task.column_begin && column + 8 <= task.column_end &&
                element >= task.element_begin && element + 8 <= task.element_end &&
                reinterpret_cast<u64>(to) % 16 == 0) {
                *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
                continue;
            }
#pragma unroll
            for (u32 k = 0; k < 8; k++)
                if (column + k >= task.column_begin && column + k < task.column_end &&
                    element + k >= task.element_begin && element + k < task.element_end)
                    to[k] = u16(w[k / 2] >> (16 * (k % 2)));
        }
    }
    if (problems) atomicOr(task.status, problems);
}
extern "C" __global__ void __launch_bounds__(UNPACK_WARPS* LANES)
    df11_linear_unpack(const __grid_constant__ UnpackTask task) {
    unpack_tile(task);
}
}  // namespace df11::linear
