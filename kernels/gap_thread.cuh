// Static shared memory of a block of the gap kernels, and the work of one thread: windows on its
// bits, look-ups, and weights made of exponents.
#pragma once
#include "gap_task.cuh"

namespace df11::gap {
// Most warps that a block of any gap kernel has.
constexpr u32 MAX_WARPS = 16;

struct BlockMemory {
    GapTable table;  // the task's; first, so that its entries start at the block's address
    GapTask task;
    u32 totals[2][MAX_WARPS];  // one per warp, for this round and the previous one
};
__shared__ BlockMemory shared_block;

// Returns the address of shared_block, held in a register. Compute capability 9.0 has no immediate
// for it: the compiler would derive it, at each use, from the block's place in its cluster.
__device__ inline u32 block_address() {
    u32 address = u32(__cvta_generic_to_shared(&shared_block));
    asm volatile("" : "+r"(address));
    return address;
}

// Layout of a warp's bits: word j of lane l is in bits[(j + 1) * 32 + l], so that lanes never
// conflict in a bank. Row 0 is never decoded. It exists because positions count from two bits
// before the first word: a window shifted by two is then an index times four, the bytes of an
// entry.
constexpr u32 POSITION_OF_BIT_0 = 30;
// Covers threads of 64 bytes: 512 bits + 15 of gap + 30 + two pairs of 32.
constexpr u32 POSITION_MASK = 0x3FF;
constexpr u32 INDEX_MASK = (TABLE_ENTRIES - 1) << 2;
constexpr u32 PAIR_LENGTH_MASK = 0x3F;

// Shared addresses of a lane's bits (its column's word in row 0) and of the table (its first
// entry).
struct Bits {
    u32 column, table;

    // Returns the bits from `position` on, above the two bits that precede it. Ignores carries
    // above POSITION_MASK.
    __device__ u32 window(u32 position) const {
        // One instruction; the compiler would use two, and mask after the shift.
        u32 row = position & POSITION_MASK & ~31u;
        asm("mad.lo.u32 %0, %0, 4, %1;" : "+r"(row) : "r"(column));
        return __funnelshift_r(load_shared(row), load_shared(row + 128), position);
    }

    // Returns the table's entry for a window.
    __device__ u32 entry(u32 window) const { return load_shared(table + (window & INDEX_MASK)); }
};

__device__ inline u32 first_length(u32 entry) { return entry >> 10 & 31; }
__device__ inline u32 pair_length(u32 entry) { return entry & PAIR_LENGTH_MASK; }

// Decodes one code of any length into exponent << 16 | length << 10 | length. Bits that match no
// code are a problem and count as one bit, so that decoding ends.
__device__ inline u32 decode_one(const Bits& bits, u32 position, u32& problems) {
    u32 window = bits.window(position), entry = bits.entry(window);
    u32 length = first_length(entry), symbol = entry >> 16 & 0xFF;
    if (length == 0) {
        const GapTable& table = shared_block.table;
        u32 code = __brev(window >> 2) >> 16;
        length = TABLE_BITS;
#pragma unroll 1
        do length++;
        while (length < MAX_CODE_LENGTH && code >= table.limits[length]);
        symbol = table.symbols[(code >> (MAX_CODE_LENGTH - length)) + table.bases[length] & 0xFF];
        if (code >= table.limits[length]) {
            problems |= STATUS_NO_CODE;
            length = 1;
        }
    }
    return symbol << 16 | length << 10 | length;
}

// Makes the entry of any pair; the upper 32 bits hold problems.
__device__ __noinline__ u64 decode_any_pair(u32 column, u32 position) {
    const Bits bits = {column, block_address()};
    u32 problems = 0;
    u32 first = decode_one(bits, position, problems);
    u32 second = decode_one(bits, position + first_length(first), problems);
    return u64(problems) << 32 | ((second >> 16) << 24 | first + first_length(second));
}

// Makes the entry of a pair that does not fit the table's index.
__device__ inline u32 decode_long_pair(const Bits& bits, u32 position, u32 window, u32 entry,
                                       u32& problems) {
    u32 length = first_length(entry);
    u32 next = bits.entry(window >> length);
    u32 next_length = first_length(next);
    if (length == 0 || next_length == 0) {
        u64 any = decode_any_pair(bits.column, position);
        problems |= u32(any >> 32);
        return u32(any);
    }
    return entry + (next << 8 & 0xFF000000u) + length + next_length;
}

// Merges the first or last two of four exponents with the matching two bytes of the plane into two
// weights: s eeeeeeee mmmmmmm twice.
template <u32 LOW>
__device__ inline u32 merge_pair(u32 exponents, u32 plane) {
    constexpr u32 twice = LOW ? 0x3322 : 0x1100, once = LOW ? 0x4342 : 0x4140;
    u32 fields = __byte_perm(exponents, 0, once) << 7;
    return __byte_perm(plane, 0, twice) & 0x807F807Fu | fields;
}
}  // namespace df11::gap
