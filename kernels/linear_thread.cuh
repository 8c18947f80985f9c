// What one thread of the kernels that multiply does alone: copies on their way, products, weights out of codes.
#pragma once
#include "linear_task.cuh"
#include "shared.cuh"
#include "warp.cuh"

// As copy_async, of `bytes` bytes, at most 16; the rest of the 16 becomes zero. Kept in L1, for other warps.
__device__ inline void copy_part_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copy_head_async(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// As copy_async; the rest of the 128 bytes comes to L2 at once.
__device__ inline void copy_line_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Waits until at most COUNT of this thread's groups of copies are on their way.
template <u32 COUNT>
__device__ inline void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

__device__ inline uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
__device__ inline uint2 load_shared_8(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
__device__ inline void store_shared_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// sums (16 x 8) += a (16 x 16) b (16 x 8); BF16, sums in f32.
__device__ inline void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// To the nearest, ties to even; a NaN stays one.
__device__ inline u16 round_to_bf16(float value) {
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
}
__device__ inline float widen_bf16(u16 value) { return __uint_as_float(u32(value) << 16); }

// Eight weights of a row out of 8 plane bytes and a word of codes. `base`: that of the tile, in both exponents' places.
__device__ inline void decode_codes(u32 (&weights)[4], u32 p0, u32 p1, u32 codes, u32 base) {
    constexpr u32 CODES = 0x07800780u, OTHERS = 0x807F807Fu;
    weights[0] = (__byte_perm(p0, 0, 0x1100) & OTHERS) | (base - (codes << 7 & CODES));
    weights[1] = (__byte_perm(p0, 0, 0x3322) & OTHERS) | (base - (codes << 3 & CODES));
    weights[2] = (__byte_perm(p1, 0, 0x1100) & OTHERS) | (base - (codes >> 1 & CODES));
    weights[3] = (__byte_perm(p1, 0, 0x3322) & OTHERS) | (base - (codes >> 5 & CODES));
}
