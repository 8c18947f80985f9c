// What the warps of a CUDA block do together.
#pragma once
#include "warp.cuh"

namespace df11 {
// Copies 16-byte words into shared memory; all threads of the block, which synchronise afterwards.
__device__ inline void copy_to_shared(void* to, const void* from, u32 bytes) {
    for (u32 at = threadIdx.x; at < bytes / 16; at += blockDim.x)
        static_cast<uint4*>(to)[at] = __ldg(static_cast<const uint4*>(from) + at);
}

// A barrier of the warps of one group; 0 is the one of the whole block.
__device__ inline void group_barrier(u32 group, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}
}  // namespace df11
