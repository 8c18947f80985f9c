// What all kernels share: what their tasks have in common (Rust mirrors it: src/gpu/task.rs), and
// what a thread, a warp and a CUDA block do.
#pragma once

namespace df11 {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Where the codebook of a tensor is and where its decode table goes.
struct TableTask {
    const u8* codebook;
    void* table;  // aligned to 16
    u64 codebook_bytes;
};

// The bit of the status word that all encodings share; each has more of its own. 0 is success, and
// kernels only set bits.
constexpr u32 STATUS_NO_CODE = 1;  // bits that are no code

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

// Shared memory by its own addresses, which cost no more than 32 bits.
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

// Copies 16-byte words into shared memory; all threads of the block, which synchronise afterwards.
__device__ inline void copy_to_shared(void* to, const void* from, u32 bytes) {
    for (u32 at = threadIdx.x; at < bytes / 16; at += blockDim.x)
        static_cast<uint4*>(to)[at] = __ldg(static_cast<const uint4*>(from) + at);
}

// A barrier of the warps of one group; 0 is the one of the whole block.
__device__ inline void group_barrier(u32 group, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Of the block, in bytes.
__device__ inline u32 dynamic_shared_bytes() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// A weight out of its exponent and its byte of the plane.
__device__ inline u16 merge_one(u32 exponent, u32 plane) {
    return u16((plane & 0x80) << 8 | exponent << 7 | plane & 0x7F);
}
}  // namespace df11
