// What a block of the tile kernel keeps in shared memory: tables and tasks of a round, with any
// number of warps, and a stage for each warp.
#pragma once
#include "shared.cuh"
#include "tile_task.cuh"

namespace df11::tile {
// At a multiple of its size, so that one logic op makes an entry's address.
__shared__ __align__(16) TileTable shared_tables[2];

// What a block decodes between two barriers: tiles of up to two tasks.
struct Round {
    TileTask tasks[2];
    u32 first;   // of the first task's tiles, the one that is the round's first
    u32 count0;  // tiles of the first task
    u32 count;   // of both
    u32 next;    // the tile that no warp has yet
    u32 after;   // the tile of the launch after the round
};
__shared__ Round shared_round;
constexpr u32 TASK_WORDS = sizeof(TileTask) / 4;

// A stage holds one word that is not decoded, a tile's bits, and three words that windows after the
// end reach.
constexpr u32 STAGE_BEFORE = 16, STAGE_AFTER = 16;
extern __shared__ __align__(128) u8 stages[];

// Dynamic shared memory of the block, which is its warps' stages.
__device__ inline u32 stages_bytes() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}
}  // namespace df11::tile
