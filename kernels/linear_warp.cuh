// What a warp does together with the fast layout: heads, steps out of codes, entries in their
// places.
#pragma once
#include "linear_thread.cuh"

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
