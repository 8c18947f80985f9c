// Shared memory by its own addresses, which cost no more than 32 bits.
#pragma once
#include "task.cuh"

namespace df11 {
__device__ inline u32 shared_address(const void* place) {
    return u32(__cvta_generic_to_shared(place));
}
__device__ inline u32 load_shared(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
__device__ inline void store_shared(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
}  // namespace df11
