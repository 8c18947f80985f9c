// What a warp does together with the fast layout: heads, steps out of codes, entries in their
// places.
#pragma once
#include "linear_thread.cuh"

namespace df11::linear {
// A FastHead as loaded.
struct Head {
    uint2 words;
    __device__ u32 first() const { return words.x; }
    __device__ u32 count() const { return words.y & 0xFFFF; }
    __device__ bool has_entries(u32 step) const { return words.y >> (16 + step) & 1; }
    // In the exponents' places of two weights. Codes above it borrow from the sign: only in streams
    // that say nonsense.
    __device__ u32 base() const { return (words.y >> 24) * 0x00800080u; }
};

// Puts the entries of a step of a tile in their places. All lanes together; rare. Problems.
template <u32 ROWS>
__device__ inline u32 place_entries(u32 (&weights)[ROWS][4], Head head, u32 step,
                                    const u32* entries, u64 entry_count, u32 lane) {
    u32 problems = 0;
#pragma unroll 1
    for (u32 begin = 0; begin < head.count(); begin += LANES) {
        const u64 at = u64(head.first()) + begin + lane;
        const bool mine = begin + lane < head.count();
        if (mine && at >= entry_count) problems = STATUS_ENTRIES;
        const u32 entry = mine && at < entry_count ? __ldg(entries + at) : 0xFFFFFFFFu;
        u32 left = __ballot_sync(ALL_LANES, entry >> 26 == step);
        while (left) {
            const u32 one = __shfl_sync(ALL_LANES, entry, __ffs(left) - 1);
            left &= left - 1;
            const u32 place = one >> 16 & 31, half = place & 1 ? 0x5410 : 0x3254;
            if ((one >> 21 & 31) != lane) continue;
#pragma unroll
            for (u32 row = 0; row < ROWS; row++)
#pragma unroll
                for (u32 pair = 0; pair < 4; pair++)
                    if (place / 2 == row * 4 + pair)
                        weights[row][pair] = __byte_perm(weights[row][pair], one, half);
        }
    }
    return problems;
}

// Four words of each lane of a quad, from the order of one to that of the other: lane q gets the
// words q of all. All lanes of the warp together.
__device__ inline uint4 transpose_quads(uint4 v, u32 lane) {
    const bool odd = lane & 1, high = lane & 2;
    const u32 a = __shfl_xor_sync(ALL_LANES, odd ? v.x : v.y, 1);
    const u32 b = __shfl_xor_sync(ALL_LANES, odd ? v.z : v.w, 1);
    if (odd) {
        v.x = a;
        v.z = b;
    } else {
        v.y = a;
        v.w = b;
    }
    const u32 c = __shfl_xor_sync(ALL_LANES, high ? v.x : v.z, 2);
    const u32 d = __shfl_xor_sync(ALL_LANES, high ? v.y : v.w, 2);
    if (high) {
        v.x = c;
        v.y = d;
    } else {
        v.z = c;
        v.w = d;
    }
    return v;
}
__device__ inline void transpose_quads(u32 (&words)[4], u32 lane) {
    const uint4 v = transpose_quads(make_uint4(words[0], words[1], words[2], words[3]), lane);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
}
}  // namespace df11::linear
