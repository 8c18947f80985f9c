// Floats in tiles: how a weight of each dtype is split (spec/format.md 6.5), and how weights are
// made of the exponents of an entry and kept bits. src/float.rs has the same table.
//
//   Float<BYTES, EXPONENT, KEPT>, from the most significant bit on:
//     sign | EXPONENT bits | KEPT - 1 bits of mantissa | zero bits, as many as are left
//   kept bits of a unit: KEPT bytes; weight i has bits KEPT * i to KEPT * i + KEPT - 1
//
// An entry (tile_task.cuh) has its exponents at their places in a pair of weights of 16 bits. It
// has them in its upper half at those in two weights of 8 bits; and of 32 bits, the second one at
// its place, the first one 16 bits below.
#pragma once
#include "tile_code.cuh"

namespace df11::tile {
constexpr u32 UNIT = 8;

template <u32 BYTES>
struct WordOf;
template <>
struct WordOf<1> {
    typedef u8 Word;
};
template <>
struct WordOf<2> {
    typedef u16 Word;
};
template <>
struct WordOf<4> {
    typedef u32 Word;
};

// Returns COUNT bits from bit AT on.
template <u32 AT, u32 COUNT>
__device__ inline u32 bits_of(const u32* words) {
    constexpr u32 WORD = AT / 32, SHIFT = AT % 32;
    const u32 bits = SHIFT + COUNT <= 32
                         ? words[WORD] >> SHIFT
                         : __funnelshift_r(words[WORD], words[(AT + COUNT - 1) / 32], SHIFT);
    return COUNT == 32 ? bits : bits & ((1ull << COUNT) - 1);
}

template <u32 BYTES_, u32 EXPONENT_, u32 KEPT_>
struct Float {
    static constexpr u32 BYTES = BYTES_, EXPONENT = EXPONENT_, KEPT = KEPT_;
    typedef typename WordOf<BYTES>::Word Word;
    static constexpr u32 BITS = 8 * BYTES, ZERO = BITS - EXPONENT - KEPT;
    static constexpr u32 MANTISSA = KEPT - 1 + ZERO;  // the exponent's lowest bit
    static constexpr u32 MAX_EXPONENT = (1u << EXPONENT) - 1;
    static constexpr u32 MAGNITUDE = (1u << (KEPT - 1)) - 1;  // kept bits without the sign
    // The lowest bits of the two exponents of an entry.
    static constexpr u32 FIRST = BYTES == 1 ? 16 + MANTISSA : BYTES == 2 ? MANTISSA : MANTISSA - 16;
    static constexpr u32 SECOND = BYTES == 1 ? 24 + MANTISSA : FIRST + 16;
    static_assert(FIRST > 6 && FIRST + EXPONENT <= SECOND && SECOND + EXPONENT < 32, "an entry");
    static constexpr u32 WORDS = UNIT * BYTES / 4;         // of a unit's weights
    static constexpr u32 KEPT_WORDS = (UNIT * KEPT + 31) / 32;  // of a unit's kept bits
    // take_unit wants a unit's address in the output, and in the plane, to be a multiple of these.
    static constexpr u32 VECTOR = BYTES == 1 ? 8 : 16;
    static constexpr u32 KEPT_ALIGNMENT = KEPT == 8 ? 8 : KEPT % 4 == 0 ? 4 : 1;

    // Bytes of the plane of `weights` consecutive weights from the beginning of a unit on.
    template <class T>
    static __device__ T plane_bytes(T weights) {
        if constexpr (KEPT == 8)
            return weights;
        else
            return weights / UNIT * KEPT + (weights % UNIT * KEPT + 7) / 8;
    }

    static __device__ u32 pair_entry(u32 first, u32 second, u32 length) {
        return second << SECOND | first << FIRST | length;
    }
    static __device__ bool has(u32 first, u32 second) {
        return EXPONENT == 8 || (first | second) <= MAX_EXPONENT;
    }

    // Makes an escape's entry from the bits after its code; the entry stays flagged if it is no
    // code, or if the dtype has no such exponent.
    static __device__ u32 escaped(u32 entry, u32 raw) {
        if constexpr (BYTES == 2 && EXPONENT == 8) return tile::escaped(entry, raw);
        const u32 first = raw & 255, second = raw >> 8 & 255;
        const bool is_code = flagged(entry) != NO_CODE && has(first, second);
        return (entry & (is_code ? LENGTH_MASK : FLAG | LENGTH_MASK)) |
               pair_entry(first & MAX_EXPONENT, second & MAX_EXPONENT, 0);
    }

    // Makes a weight of its exponent and its kept bits.
    static __device__ Word merge_one(u32 exponent, u32 kept) {
        if constexpr (BYTES == 2 && KEPT == 8) return df11::merge_one(exponent, kept);
        return Word(kept >> (KEPT - 1) << (BITS - 1) | exponent << MANTISSA |
                    (kept & MAGNITUDE) << ZERO);
    }

    // Makes a unit's weights of its entries and its kept bits, which begin at bit AT.
    template <u32 AT>
    static __device__ void merge_unit(const u32 (&e)[4], const u32* kept, u32 (&weights)[WORDS]) {
        if constexpr (BYTES == 2 && KEPT == 8) {
            const uint4 w = tile::merge_unit(e, kept[AT / 32], kept[AT / 32 + 1]);
            weights[0] = w.x;
            weights[1] = w.y;
            weights[2] = w.z;
            weights[3] = w.w;
        } else if constexpr (BYTES == 1) {
            merge_four(e[0], e[1], bits_of<AT, 4 * KEPT>(kept), weights[0]);
            merge_four(e[2], e[3], bits_of<AT + 4 * KEPT, 4 * KEPT>(kept), weights[1]);
        } else {
            merge_pair<AT>(e[0], kept, weights);
            merge_pair<AT + 2 * KEPT>(e[1], kept, weights + WORDS / 4);
            merge_pair<AT + 4 * KEPT>(e[2], kept, weights + WORDS / 2);
            merge_pair<AT + 6 * KEPT>(e[3], kept, weights + WORDS / 4 * 3);
        }
    }

   private:
    // Spreads four groups of kept bits over the bytes of a word.
    static __device__ void merge_four(u32 e0, u32 e1, u32 kept, u32& weights) {
        constexpr u32 EACH = 0x01010101u;
        kept = (kept | kept << (16 - 2 * KEPT)) & ((1u << 2 * KEPT) - 1) * 0x00010001u;
        kept |= kept << (8 - KEPT);
        weights = __byte_perm(e0, e1, 0x7632) | (kept & MAGNITUDE * EACH) << ZERO |
                  (kept << (8 - KEPT) & 0x80 * EACH);
    }

    template <u32 AT>
    static __device__ void merge_pair(u32 entry, const u32* kept, u32* weights) {
        if constexpr (BYTES == 2) {
            const u32 both = bits_of<AT, 2 * KEPT>(kept);
            constexpr u32 EXPONENT_BITS = MAX_EXPONENT << FIRST | MAX_EXPONENT << SECOND;
            weights[0] = (entry & EXPONENT_BITS) | (both & MAGNITUDE) << ZERO |
                         (both & MAGNITUDE << KEPT) << (16 + ZERO - KEPT) |
                         (both << (16 - KEPT) & 0x8000u) | (both << (32 - 2 * KEPT) & 0x80000000u);
        } else {
            weights[0] = merge_word(entry << 16, bits_of<AT, KEPT>(kept));
            weights[1] = merge_word(entry, bits_of<AT + KEPT, KEPT>(kept));
        }
    }
    static __device__ u32 merge_word(u32 exponent, u32 kept) {
        return (exponent & MAX_EXPONENT << SECOND) | (kept & MAGNITUDE) << ZERO |
               (kept << (32 - KEPT) & 0x80000000u);
    }
};

typedef Float<2, 8, 8> Bf16;

// Kept bits of two units of a lane, as loaded. A lane's begin between words if KEPT is odd: then in
// odd lanes the first half word belongs to the lane before.
template <class F>
struct KeptPair {
    static constexpr u32 BYTES = 2 * F::KEPT, WORDS = (BYTES + 3) / 4;
    u32 words[WORDS];

    // Where a lane begins to load, in bytes.
    static __device__ u32 offset(u32 lane) {
        return BYTES % 4 == 0 ? lane * BYTES : lane * BYTES & ~3u;
    }
    // Starts to load. `p` is a multiple of 16, 8 or 4, as BYTES is; the last of several loads from
    // one sector finds it in L1.
    __device__ void load(const u8* p) {
        if constexpr (BYTES == 16) {
            const uint4 v = load_plane(p);
            words[0] = v.x;
            words[1] = v.y;
            words[2] = v.z;
            words[3] = v.w;
        } else if constexpr (BYTES % 16 == 0) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4)
                asm volatile("ld.global.nc.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]),
                               "=r"(words[i + 3])
                             : "l"(p + 4 * i));
        } else if constexpr (BYTES == 8) {
            asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                         : "=r"(words[0]), "=r"(words[1])
                         : "l"(p));
        } else {
#pragma unroll
            for (u32 i = 0; i < WORDS; i++)
                asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];"
                             : "=r"(words[i])
                             : "l"(p + 4 * i));
        }
    }
    // Lets the lane's bits begin at bit 0.
    __device__ void align(u32 lane) {
        if constexpr (BYTES % 4 != 0) {
            const u32 shift = lane % 2 * 16;
#pragma unroll
            for (u32 i = 0; i < WORDS; i++)
                words[i] = __funnelshift_r(words[i], i + 1 < WORDS ? words[i + 1] : 0, shift);
        }
    }
};

// Loads the kept bits of a unit, from a multiple of KEPT_ALIGNMENT.
template <class F>
__device__ inline void load_kept(const u8* from, u32 (&kept)[F::KEPT_WORDS]) {
    if constexpr (F::KEPT % 4 == 0) {
#pragma unroll
        for (u32 i = 0; i < F::KEPT_WORDS; i++)
            kept[i] = __ldg(reinterpret_cast<const u32*>(from) + i);
    } else {
#pragma unroll
        for (u32 i = 0; i < F::KEPT_WORDS; i++) kept[i] = 0;
#pragma unroll
        for (u32 i = 0; i < F::KEPT; i++) kept[i / 4] |= u32(__ldg(from + i)) << 8 * (i % 4);
    }
}

// Loads the kept bits of weight `at` of a unit whose bytes begin at `from`, and no other bytes.
template <class F>
__device__ inline u32 load_one_kept(const u8* from, u32 at) {
    if constexpr (F::KEPT == 8) return __ldg(from + at);
    const u32 begin = at * F::KEPT, last = begin + F::KEPT - 1;
    u32 bits = 0;
    for (u32 i = begin / 8; i <= last / 8; i++) bits |= u32(__ldg(from + i)) << 8 * (i - begin / 8);
    return bits >> begin % 8 & (2 * F::MAGNITUDE + 1);
}
}  // namespace df11::tile
