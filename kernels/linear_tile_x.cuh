// x of the warps that decode (linear_tile.cuh).
#pragma once
#include "linear_tile_block.cuh"
#include "linear_tile_unit.cuh"

namespace df11::linear {
// Where a lane has eight rows of a unit that is not held. `rest`: of the first one.
template <u32 EIGHTS>
__device__ __forceinline__ u32 rest_place(u32 rest, u32 unit, u32 eight) {
    return rest + ((unit - units_held(EIGHTS)) * EIGHTS + eight) * LANES * 16;
}
// Where a lane's columns of a tile of x begin, in one of each eight rows.
template <u32 EIGHTS>
struct XColumns {
    u64 from[EIGHTS];
    u32 row, rows;  // the first of the lane's rows; all of them
    __device__ __forceinline__ XColumns(const Shared& work, u32 tile, u32 lane)
        : row(lane / 4), rows(work.launch.x_rows) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            from[i] = reinterpret_cast<u64>(work.launch.x + (row + 8 * i) * work.launch.x_pitch +
                                            tile * TILE_WIDTH + lane % 4 * 8);
    }
    __device__ __forceinline__ bool exists(u32 eight) const { return row + 8 * eight < rows; }
    __device__ __forceinline__ u64 of(u32 unit, u32 eight) const {
        return from[eight] + unit * STEP_COLUMNS * 2;
    }
};

// x of a warp that decodes: an A fragment, or two, for each unit of a tile; of the first units in
// registers, of the others in shared memory, each lane its own words; until it has a tile of other
// columns. Each unit waits for its own x alone.
template <u32 EIGHTS>
struct HeldX {
    static constexpr u32 HELD = units_held(EIGHTS);
    // Before the bits of the first tile: of 16 rows all multiprocessors together ask L2 for 17 MB.
    static constexpr bool COMES_FIRST = HELD < BAND_UNITS;
    u32 held, rest;  // the tile; the lane's place for the units that are not held
    bool raw;        // x has been asked for, and is as it lies
    uint4 x[HELD][EIGHTS] = {};

    __device__ __forceinline__ void place(const TileBlock& block, u32 warp, u32 lane) {
        rest = block.xs + warp * x_bytes_of_warp(EIGHTS) + lane * 16, held = ~0u, raw = false;
    }
    // For what registers hold; none of tile ~0u.
    __device__ __forceinline__ void ask(const Shared& work, u32 tile, u32, u32, u32 lane) {
        held = tile, raw = EIGHTS > 1;
        if (held == ~0u) return;
        const XColumns<EIGHTS> columns(work, held, lane);
#pragma unroll
        for (u32 unit = 0; unit < HELD; unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) {
                x[unit][i] = make_uint4(0, 0, 0, 0);
                load_x_where(x[unit][i], columns.of(unit, i), columns.exists(i));
            }
    }
    // For the rest, after the bits: it is needed later.
    __device__ __forceinline__ void ask_rest(const Shared& work, u32 lane) {
        if (held == ~0u) return;
        const XColumns<EIGHTS> columns(work, held, lane);
#pragma unroll
        for (u32 unit = HELD; unit < BAND_UNITS; unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                if (columns.exists(i))
                    copy_async(rest_place<EIGHTS>(rest, unit, i),
                               reinterpret_cast<const u8*>(columns.of(unit, i)));
    }
    __device__ __forceinline__ void move_to(const Shared& work, u32 tile, u32 lane) {
        if (tile == held) return;
        ask(work, tile, 0, 0, lane);
        ask_rest(work, lane);
    }
    __device__ __forceinline__ void forget() {
        if (HELD < BAND_UNITS) wait_for_copies();
        held = ~0u, raw = false;
#pragma unroll
        for (u32 unit = 0; unit < HELD; unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) x[unit][i] = make_uint4(0, 0, 0, 0);
    }
    // In the order of the units, from the first band on.
    __device__ __forceinline__ void take(uint4 (&to)[EIGHTS], u32 unit, u32 lane) {
        if (unit < HELD) {
            if (raw) make_fragments(x[unit], lane);
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) to[i] = x[unit][i];
        } else {
            if (raw && unit == HELD) commit_copies(), wait_for_copies();
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                to[i] = load_shared_16(rest_place<EIGHTS>(rest, unit, i));
            if (raw) {
                make_fragments(to, lane);
#pragma unroll
                for (u32 i = 0; i < EIGHTS; i++)
                    store_shared_16(rest_place<EIGHTS>(rest, unit, i), to[i]);
            }
        }
        if (unit + 1 == BAND_UNITS) raw = false;
    }
};
// x of all warps: in shared memory as it lies, with pitch shared_x_pitch.
struct SharedX {
    static constexpr bool COMES_FIRST = false;
    u32 row, at;  // shared addresses: of the lane's columns of the first tile, and of the tile
    bool exists;  // the lane's row

    __device__ __forceinline__ void place(const TileBlock& block, u32, u32) { row = block.xs; }
    __device__ __forceinline__ void ask_rest(const Shared&, u32) {}
    __device__ __forceinline__ void ask(const Shared& work, u32, u32 warp, u32 warps, u32 lane) {
        const u32 first = row;
        row += lane / 4 * shared_x_pitch(work.columns()) + lane % 4 * 16;
        exists = lane / 4 < work.launch.x_rows;
        const LinearLaunch& l = work.launch;
        if (!work.aligned()) return;
        for (u32 r = 0; r < l.x_rows; r++)
            for (u32 i = (warp * LANES + lane) * 8; i < l.columns; i += warps * LANES * 8)
                copy_async(first + r * shared_x_pitch(l.columns) + i * 2,
                           reinterpret_cast<const u8*>(l.x + r * l.x_pitch + i));
        commit_copies();
    }
    __device__ __forceinline__ void move_to(const Shared&, u32 tile, u32) {
        at = row + tile * (TILE_WIDTH * 2);
    }
    __device__ __forceinline__ void forget() {}
    // Of a row that does not exist what was there, of which nothing is used.
    __device__ __forceinline__ void take(uint4 (&to)[1], u32 unit, u32) const {
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
}  // namespace df11::linear
