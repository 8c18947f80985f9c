// x of the warps that decode (linear_tile.cuh).
#pragma once
#include "linear_tile_block.cuh"
#include "linear_tile_unit.cuh"

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
