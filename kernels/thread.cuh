// What one thread does alone: a window on its bits, look-ups, and weights out of exponents.
#pragma once
#include "gap_task.cuh"

// Rows of a warp's bits: word j of lane l is in bits[(j + 1) * 32 + l], so that lanes never meet in a bank. Row 0 is never
// decoded, and exists because positions are counted from two bits before the word: a window shifted by two is an index
// times the four bytes of an entry.
constexpr u32 POSITION_OF_BIT_0 = 30;
constexpr u32 POSITION_MASK = 0x3FF;    // 64-byte threads: 512 bits + 15 of gap + 30 + two pairs of 32
constexpr u32 INDEX_MASK = (TABLE_ENTRIES - 1) << 2;
constexpr u32 PAIR_LENGTH_MASK = 0x3F;

struct Bits {
    const u32* rows;       // this lane's column
    const GapTable* table; // in shared memory

    // The bits from a position on, above two that precede them. Carries above POSITION_MASK are ignored.
    __device__ u32 window(u32 position) const {
        const u32* row = rows + (position & POSITION_MASK & ~31u);
        return __funnelshift_r(row[0], row[32], position);
    }
    __device__ u32 entry(u32 window) const {
        return *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(table->pairs) + (window & INDEX_MASK));
    }
};

__device__ inline u32 first_length(u32 entry) { return entry >> 10 & 31; }

// A code of any length: exponent << 16 | length << 10 | length. Bits that are no code make it `no_code` and count one bit,
// so that decoding ends.
__device__ inline u32 decode_one(const Bits& bits, u32 position, bool& no_code) {
    u32 window = bits.window(position);
    u32 entry = bits.entry(window);
    u32 length = first_length(entry), symbol = entry >> 16 & 0xFF;
    if (length == 0) {
        u32 code = __brev(window >> 2) >> 16;
        for (length = 1; length < MAX_CODE_LENGTH && code >= bits.table->limits[length]; length++) {}
        if (code < bits.table->limits[length]) {
            symbol = bits.table->symbols[(code >> (MAX_CODE_LENGTH - length)) + bits.table->bases[length] & 0xFF];
        } else {
            no_code = true;
            length = 1;
        }
    }
    return symbol << 16 | length << 10 | length;
}

// The entry of a pair that the table does not hold.
__device__ inline u32 decode_pair(const Bits& bits, u32 position, bool& no_code) {
    u32 first = decode_one(bits, position, no_code);
    u32 second = decode_one(bits, position + first_length(first), no_code);
    return (second >> 16) << 24 | first + first_length(second);
}

// Two weights of exponents `low` and `low + 1` of four, and the same bytes of the plane: s eeeeeeee mmmmmmm twice.
template <u32 LOW>
__device__ inline u32 merge_pair(u32 exponents, u32 plane) {
    constexpr u32 twice = LOW ? 0x3322 : 0x1100, once = LOW ? 0x4342 : 0x4140;
    u32 fields = __byte_perm(exponents, 0, once) << 7;
    return __byte_perm(plane, 0, twice) & 0x807F807Fu | fields;
}

__device__ inline u16 merge_one(u32 exponent, u32 plane) {
    return u16((plane & 0x80) << 8 | exponent << 7 | plane & 0x7F);
}

// Copies four bytes from global to shared memory, later; zeros where there is nothing to read.
__device__ inline void copy_word_async(u32* to, const u8* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from),
                 "r"(exists ? 4u : 0u) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
