// What a warp does together.
#pragma once
#include "task.cuh"

namespace df11 {
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

// Copies 16 bytes from global to shared memory, later.
__device__ inline void copy_async(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
}  // namespace df11
