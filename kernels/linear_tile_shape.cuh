// What a block has of products with tiles as stored (linear_tile.cuh), by the rows of x: warps,
// and where things are in shared memory.
#pragma once
#include "linear_bulk.cuh"
#include "linear_wide.cuh"
#include "tile_code.cuh"

namespace df11::linear {
using namespace tile;

constexpr u32 TILE_BANDS = 4, BAND_ROWS = 8, BAND_UNITS = 8, TILE_WIDTH = TILE_STEPS * STEP_COLUMNS;
// Bytes of the plane that a warp loads at once, two units of each lane; those of a band.
constexpr u32 PLANE_PAIR = LANES * 16, PLANE_BAND = PLANE_PAIR * BAND_UNITS / 2;
// Sums of a run in shared memory: for each row of x those of 32 rows of the strip.
constexpr u32 MOST_RUNS = 16, RUN_PITCH = STRIP_ROWS;
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
// Warps that decode, at most, by the rows of x.
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
    return eights > 1 ? 1 : 2;
}
// Units of a tile whose x a warp holds in registers. It has the others in shared memory, each lane
// its own words.
__host__ __device__ constexpr u32 units_held(u32 eights) {
    return SHARES_X && eights > 1 ? 5 : BAND_UNITS;
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
// What each slot has of a block's dynamic shared memory: what sums, tables and x leave. `xs`: bytes
// of x that all warps share.
__host__ __device__ constexpr u32 tile_slot_bytes(u32 shared, u32 warps, u32 x_rows, u32 tables,
                                                  u32 sets, u32 xs) {
    const u32 own = xs ? 0 : x_bytes_of_warp((x_rows + 7) / 8),
              left = shared - tile_fixed_bytes(x_rows, tables, sets) - xs - warps * own;
    return left / (warps * TILE_SLOTS * 16) * 16;
}
}  // namespace df11::linear
