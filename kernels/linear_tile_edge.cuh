// Tiles that are decoded slowly (linear_tile.cuh): with the same bits of y.
#pragma once
#include "linear_tile_unit.cuh"
#include "linear_tile_walk.cuh"

namespace df11::linear {
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
            make_fragments(x, lane);
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
}  // namespace df11::linear
