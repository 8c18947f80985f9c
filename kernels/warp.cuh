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

// Calls the 32 bytes around an address into the L2 cache.
__device__ inline void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
