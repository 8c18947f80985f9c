// Work of a thread and a warp of the kernels that multiply: asynchronous copies, products, decoding
// of weights, placing of entries.
#pragma once
#include "linear_task.cuh"

namespace df11::linear {
// Whether the target has the features that only compute capability 9.0 has.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool HOPPER = true;
#else
constexpr bool HOPPER = false;
#endif

// Like copy_async, for `bytes` bytes, at most 16; the rest of the 16 becomes zero. L1 keeps them
// for other warps.
__device__ inline void copy_part_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void copy_head_async(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// Like copy_async; also brings the rest of the 128 bytes to L2 at once.
__device__ inline void copy_line_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
// Waits until at most COUNT of this thread's groups of copies are in flight.
template <u32 COUNT>
__device__ inline void wait_for_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// Loads a word with acquire order: what others wrote before this word is visible afterwards.
__device__ inline u32 load_acquired(const u32* from) {
    u32 word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}
__device__ inline uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}
__device__ inline uint2 load_shared_8(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
// Loads four matrices of 8 x 8 numbers of 16 bits. Lane l passes the address of row l % 8 of matrix
// l / 8, and gets columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each.
__device__ inline uint4 load_matrices(u32 address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}
__device__ inline void store_shared_8(u32 address, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void store_shared_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// Loads the first `count` of eight numbers of 16 bits that are not aligned to 16 bytes; the others
// are zero.
__device__ inline uint4 load_few(const u16* from, u32 count) {
    u32 words[4] = {};
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        if (i < count) words[i / 2] |= u32(__ldg(from + i)) << (16 * (i % 2));
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// sums (16 x 8) += a (16 x 16) b (16 x 8); BF16, sums in f32.
__device__ inline void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
__device__ inline u16 round_to_bf16(float value) {
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
}
__device__ inline float widen_bf16(u16 value) { return __uint_as_float(u32(value) << 16); }

// Sign and mantissa bits of two weights.
constexpr u32 OTHERS = 0x807F807Fu;
__host__ __device__ constexpr u32 rotate_right(u32 word, u32 bits) {
    return word >> bits | word << (32 - bits);
}

// Merges a word with the signs and mantissas of two weights and a word with their exponents, in
// their places.
__device__ inline u32 merge_fields(u32 others, u32 exponents) {
    // (others & OTHERS) | (exponents & ~OTHERS): one instruction; the compiler would use two.
    u32 merged;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(merged) : "r"(others), "r"(exponents), "r"(OTHERS));
    return merged;
}
// Subtracts codes, which lie four bits below their places, from a base: one instruction besides the
// mask.
__device__ inline u32 less_shifted(u32 base, u32 codes) {
    asm("mad.lo.u32 %0, %1, 0xFFFFFFF0, %2;" : "=r"(codes) : "r"(codes), "r"(base));
    return codes;
}

// Decodes eight weights of a row from two words of signs and mantissas and one of codes
// (spec/gpu.md, part 6): 15 instructions. `base`: the tile's, in the exponent places of two
// weights.
__device__ inline void decode_codes(u32 (&weights)[4], u32 p0, u32 p1, u32 codes, u32 base) {
    constexpr u32 PLACES = 0x07800780u;
    const u32 others = __byte_perm(codes, 0, 0x0321);
    weights[0] = merge_fields(p0, base - (codes & PLACES));
    weights[1] = merge_fields(__byte_perm(p0, 0, 0x2103), less_shifted(base, codes & PLACES >> 4));
    weights[2] = merge_fields(p1, base - (others & PLACES));
    weights[3] = merge_fields(__byte_perm(p1, 0, 0x2103), less_shifted(base, others & PLACES >> 4));
}
// Decodes the four rows of a step that a lane has.
__device__ inline void decode_step(u32 (&weights)[4][4], const uint4& p0, const uint4& p1,
                                   const uint4& codes, u32 base) {
    decode_codes(weights[0], p0.x, p0.y, codes.x, base);
    decode_codes(weights[1], p0.z, p0.w, codes.y, base);
    decode_codes(weights[2], p1.x, p1.y, codes.z, base);
    decode_codes(weights[3], p1.z, p1.w, codes.w, base);
}
// The inverse of decode_codes: words of signs and mantissas, and a word of codes.
__device__ inline u32 encode_others(u32 first, u32 second) {
    return (first & OTHERS) | rotate_right(second & OTHERS, 8);
}
__device__ inline u32 encode_codes(const u32 (&codes)[8]) {
    u32 fields[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) fields[i] = codes[2 * i] << 7 | codes[2 * i + 1] << 23;
    return fields[0] | fields[1] >> 4 | rotate_right(fields[2], 24) |
           rotate_right(fields[3] >> 4, 24);
}

// A FastHead as loaded.
struct Head {
    uint2 words;
    __device__ u32 first() const { return words.x; }
    __device__ u32 count() const { return words.y & 0xFFFF; }
    __device__ bool has_entries(u32 step) const { return words.y >> (16 + step) & 1; }
    // The base, in the exponent places of two weights. Codes above it borrow from the sign; only
    // invalid data has such codes.
    __device__ u32 base() const { return (words.y >> 24) * 0x00800080u; }
};

// Puts a step's entries in their places; returns problems. All lanes call it together; rarely
// needed.
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

// Transposes four words of each lane within its quad: lane q gets word q of all four lanes. All
// lanes of the warp call it together.
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
