// What a warp does together.
#pragma once
#include "gap_task.cuh"

constexpr u32 LANES = 32;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

// The sum of the values of all lanes up to this one.
__device__ inline u32 inclusive_sum(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < LANES; step *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Copies up to 16 bytes from global to shared memory, later; zeros fill the 16.
__device__ inline void copy_async(u32 to, const u8* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#ifdef DF11_STCS
__device__ inline void store_weights(uint4* to, uint4 weights) { __stcs(to, weights); }
#else
__device__ inline void store_weights(uint4* to, uint4 weights) { *to = weights; }
#endif
