// What a block of the gap kernels keeps in static shared memory, with any number of warps, and how
// it is reached.
#pragma once
#include "gap_task.cuh"
#include "shared.cuh"

namespace df11::gap {
constexpr u32 MAX_WARPS = 16;

struct BlockMemory {
    GapTable table;  // of the task; first, so that the block's address is that of its entries
    GapTask task;
    u32 totals[2][MAX_WARPS];  // of a round, and of the one before
};
__shared__ BlockMemory shared_block;

// Its address, in a register. Compute capability 9.0 has no immediate for it: at each use the
// compiler would make it of the block's place in its cluster.
__device__ inline u32 block_address() {
    u32 address = u32(__cvta_generic_to_shared(&shared_block));
    asm volatile("" : "+r"(address));
    return address;
}
}  // namespace df11::gap
