// Gathers rows of a matrix by indices on the device: each warp has one row's part of one tile.
//
//   fast      lane l has four pairs of step l / 4, columns l % 4 * 8
//   stored    four lanes of the tile have a row: they decode as far as the row, up to 32 units
//             each; other warps have the other tiles of the strip. A block has 8 warps and the
//             table, 24 KiB of shared memory; 48 registers. The kernel does not check where lanes
//             end, because these ends lie after what it decodes
#pragma once
#include "linear_pack.cuh"
#include "linear_tile_16.cuh"

namespace df11::linear {
__device__ inline u64 row_at(const GatherTask& task, u32 place) {
    return task.wide ? __ldg(static_cast<const u64*>(task.indices) + place)
                     : __ldg(static_cast<const u32*>(task.indices) + place);
}

__device__ __forceinline__ void gather_tile(const GatherTask& task) {
    const u32 lane = threadIdx.x % LANES, across = tiles_across(task.columns);
    const u64 number = u64(blockIdx.x) * UNPACK_WARPS + threadIdx.x / LANES;
    if (number >= u64(task.count) * across) return;
    const u32 place = u32(number / across);
    const u32 tile = u32(number % across);
    const u32 column = tile * 256 + lane * 8;
    const u64 row = row_at(task, place);
    u32 weights[1][4] = {}, problems = row < task.rows ? 0 : STATUS_INDEX;
    const u32 strip = u32(row / STRIP_ROWS);
    const u32 of_strip = u32(row % STRIP_ROWS);
    const u32 owner = of_strip % 8 * 4 + lane % 4;
    const u32 band = of_strip / 8;
    if (!problems) {
        const Head head = {__ldg(static_cast<const uint2*>(task.index) +
                                 u64(strip) * tiles_across(task.whole_columns) + tile)};
        const u32 step = tile * TILE_STEPS + lane / 4;
        if (step < steps_of(task.columns)) {
            const u8* from = task.data +
                             (u64(strip) * steps_of(task.whole_columns) + step) * STEP_BYTES +
                             owner * 16;
            const uint2 plane =
                __ldg(reinterpret_cast<const uint2*>(from + band / 2 * 512 + band % 2 * 8));
            decode_codes(weights[0], plane.x, plane.y,
                         __ldg(reinterpret_cast<const u32*>(from + 1024 + band * 4)), head.base());
        }
        for (u32 i = 0; i < head.count(); i++) {
            const u64 at = u64(head.first()) + i;
            if (at >= task.rest_count) {
                problems = STATUS_ENTRIES;
                break;
            }
            const u32 entry = __ldg(static_cast<const u32*>(task.rest) + at);
            if (entry >> 26 != lane / 4 || (entry >> 21 & 31) != owner || (entry >> 19 & 3) != band)
                continue;
#pragma unroll
            for (u32 pair = 0; pair < 4; pair++)
                if ((entry >> 17 & 3) == pair)
                    weights[0][pair] =
                        __byte_perm(weights[0][pair], entry, entry >> 16 & 1 ? 0x5410 : 0x3254);
        }
    }
    if (problems) atomicOr(task.status, problems);
    transpose_quads(weights[0], lane);
    if (column >= task.columns) return;
    u16* to = task.output + place * task.pitch + column;
    const u32(&w)[4] = weights[0];
    if (column + 8 <= task.columns && reinterpret_cast<u64>(to) % 16 == 0) {
        *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 8; k++)
        if (column + k < task.columns) to[k] = u16(w[k / 2] >> (16 * (k % 2)));
}
extern "C" __global__ void __launch_bounds__(UNPACK_WARPS* LANES)
    df11_linear_gather(const __grid_constant__ GatherTask task) {
    gather_tile(task);
}

// Bytes that a warp stages of the bits of four lanes; it reads more than these from global memory.
constexpr u32 GATHER_STAGE = 1024;

// Reads a lane's pairs, one by one, wherever its bits lie.
struct PairReader {
    const u32* words;
    u32 count, next;  // number of words; index of the one after w2
    u32 w0, w1, w2, position;
    __device__ u32 word(u32 i) const { return i < count ? words[i] : 0; }
    __device__ void begin(u32 at) {
        next = at / 32, position = at % 32;
        w0 = word(next), w1 = word(next + 1), w2 = word(next + 2), next += 3;
    }
    // Returns the next entry; flagged if the bits are no code.
    __device__ u32 take(const TileTable& table) {
        const u32 window = __funnelshift_r(w0, w1, position);
        u32 entry = table.entries[window & (TABLE_ENTRIES - 1)];
        if (int(entry) < 0) entry = escaped(entry, window >> flagged(entry));
        position += entry & LENGTH_MASK;
        if (position >= 32) w0 = w1, w1 = w2, w2 = word(next++), position -= 32;
        return entry;
    }
};

// Gathers one row's part of one tile: the four lanes that have the row decode as far as it.
extern "C" __global__ void __launch_bounds__(UNPACK_WARPS* LANES)
    df11_linear_tile_gather(const __grid_constant__ GatherTask task) {
    __shared__ __align__(16) TileTable table;
    __shared__ __align__(16) u8 stages[UNPACK_WARPS][GATHER_STAGE];
    copy_to_shared(&table, task.table, sizeof(TileTable));
    __syncthreads();
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, q = lane % 4,
              across = tiles_across(task.columns);
    const u64 number = u64(blockIdx.x) * UNPACK_WARPS + warp;
    if (number >= u64(task.count) * across) return;
    const u32 place = u32(number / across), tile = u32(number % across);
    const u64 row = row_at(task, place);
    const u32 width = min(task.columns - tile * TILE_COLUMNS, TILE_COLUMNS);
    // Units of this lane in a band.
    const u32 units = (max(width, 8 * q) - 8 * q + STEP_COLUMNS - 1) / STEP_COLUMNS;
    u16* to = task.output + place * task.pitch + tile * TILE_COLUMNS + 8 * q;
    u32 problems = row < task.rows ? 0 : STATUS_INDEX;
    const u32 strip = u32(row / STRIP_ROWS), band = u32(row % STRIP_ROWS) / BAND_ROWS,
              g = u32(row % BAND_ROWS);
    uint2 plane[BAND_UNITS] = {};
    PairReader bits = {};
    if (!problems) {
        const u32 height = min(task.rows - strip * STRIP_ROWS, STRIP_ROWS),
                  rows = min(height - band * BAND_ROWS, BAND_ROWS);
        const TileRecord* record = static_cast<const TileRecord*>(task.index) +
                                   u64(strip) * tiles_across(task.whole_columns) +
                                   task.first_column / TILE_COLUMNS + tile;
        const TileBits found =
            find_bits(load_record(record, lane), task.rest_count, lane, problems);
        const u8* from =
            plane_of(task.data, task.whole_columns, task.first_column, strip, tile, height);
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++)
            if (lane / 4 == g && unit < units)
                plane[unit] = load_unit_plane(from, width, rows, band, unit, lane);
        // The bits of the four lanes, from a multiple of 16 bytes on.
        const u32 position = found.lane.position - POSITION_OF_BIT_0,
                  end = (found.lane.end & (1u << LEFT_SHIFT) - 1) - POSITION_OF_BIT_0;
        const u32 first_byte = min(__shfl_sync(ALL_LANES, position, 4 * g) / 128 * 16, found.bytes),
                  end_byte = min((__shfl_sync(ALL_LANES, end, 4 * g + 3) + 7) / 8, found.bytes);
        const u8* stored = static_cast<const u8*>(task.rest) + found.byte + first_byte;
        const u32 bytes = max(end_byte, first_byte) - first_byte;
        bits.words = reinterpret_cast<const u32*>(stored), bits.count = (bytes + 3) / 4;
        if (bytes <= GATHER_STAGE) {
            for (u32 i = lane * 16; i < bytes; i += LANES * 16)
                *reinterpret_cast<uint4*>(stages[warp] + i) =
                    __ldg(reinterpret_cast<const uint4*>(stored + i));
            bits.words = reinterpret_cast<const u32*>(stages[warp]);
        }
        __syncwarp();
        if (lane / 4 == g) bits.begin(position - first_byte * 8);
    }
    if (lane / 4 == g) {
        if (!(problems & STATUS_INDEX))
#pragma unroll 1
            for (u32 i = 0; i < band * units * 4; i++)
                if (int(bits.take(table)) < 0) problems |= STATUS_NO_CODE;
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            if (unit >= units) break;
            u32 e[4] = {};
            if (!(problems & STATUS_INDEX))
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    e[i] = bits.take(table);
                    if (int(e[i]) < 0) problems |= STATUS_NO_CODE;
                }
            const uint4 w = merge_words(e, plane[unit].x, plane[unit].y);
            u16* at = to + unit * STEP_COLUMNS;
            if (reinterpret_cast<u64>(at) % 16 == 0) {
                *reinterpret_cast<uint4*>(at) = w;
                continue;
            }
#pragma unroll
            for (u32 k = 0; k < 8; k++) at[k] = u16(weight_of(w, k));
        }
    }
    if (problems) atomicOr(task.status, problems);
}
}  // namespace df11::linear
