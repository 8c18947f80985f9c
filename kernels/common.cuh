// Types, task fields and primitives that all kernels share. Rust mirrors the task fields:
// src/gpu/task.rs.
#pragma once

namespace df11 {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The codebook of a tensor, and the place of the decode table made from it.
struct TableTask {
    const u8* codebook;
    void* table;  // aligned to 16 bytes
    u64 codebook_bytes;
};

// The status bit that all encodings share; each encoding adds its own. 0 means success; kernels
// only set bits.
constexpr u32 STATUS_NO_CODE = 1;  // bits match no code

constexpr u32 LANES = 32;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

// Returns the sum of the values of lanes 0 to `lane`.
__device__ inline u32 inclusive_sum(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < LANES; step *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Starts an asynchronous copy of 16 bytes from global to shared memory.
__device__ inline void copy_async(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Accesses shared memory by its own 32-bit addresses; generic addresses take 64 bits.
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

// Copies 16-byte words into shared memory. All threads of the block call it and synchronise
// afterwards.
__device__ inline void copy_to_shared(void* to, const void* from, u32 bytes) {
    for (u32 at = threadIdx.x; at < bytes / 16; at += blockDim.x)
        static_cast<uint4*>(to)[at] = __ldg(static_cast<const uint4*>(from) + at);
}

// Synchronises the warps of one group. The whole block uses barrier 0, group g barrier g + 1.
__device__ inline void group_barrier(u32 group, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Returns the block's dynamic shared memory in bytes.
__device__ inline u32 dynamic_shared_bytes() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// Merges an exponent and a byte of the plane into a weight.
__device__ inline u16 merge_one(u32 exponent, u32 plane) {
    return u16((plane & 0x80) << 8 | exponent << 7 | plane & 0x7F);
}
}  // namespace df11
