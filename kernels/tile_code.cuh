// Parts of the `tile` layout that need no shared memory: entries, records, weights made of
// exponents.
#pragma once
#include "tile_task.cuh"

namespace df11::tile {
// Shape of a tile of a matrix; BAND_UNITS are the units of one lane in a band.
constexpr u32 TILE_COLUMNS = 256, BANDS = 4, BAND_ROWS = 8, BAND_UNITS = 8;
// The first staged bit has position 30, so that a window shifted by two is an index times four, the
// bytes of an entry.
constexpr u32 POSITION_OF_BIT_0 = 30, WINDOW_BITS = 62;
constexpr u32 INDEX_MASK = (TABLE_ENTRIES - 1) << 2;
// Fields of an entry.
constexpr u32 EXPONENTS = 0x7F807F80u;
constexpr u32 LENGTH_MASK = 63;
constexpr u32 NO_CODE = 31;
constexpr u32 FLAG = 0x80000000u;
// Entries with FLAG have RARE too: a sum of up to four entries has one of the bits of RARE_SUM if
// and only if one of them has RARE, because exponents end at bit 16 of such a sum or begin at bit
// 23.
constexpr u32 RARE = 1u << 20, RARE_SUM = 7u << 20;
// Returns an escape's code length, or NO_CODE, from an entry with FLAG.
__device__ inline u32 flagged(u32 entry) { return entry >> 15 & 31; }

// Makes an escape's entry from the bits after its code; the entry stays flagged if it is no code.
__device__ inline u32 escaped(u32 entry, u32 raw) {
    const u32 kept = flagged(entry) == NO_CODE ? FLAG | LENGTH_MASK : LENGTH_MASK;
    return (entry & kept) | (raw & 255) << 7 | (raw << 15 & 0x7F800000u);
}

constexpr u32 EXCESS_BITS = 6;
constexpr u64 OFFSET_MASK = (1ull << 48) - 1;

// Fields of a tile's record and of the next record that a lane needs, as loaded.
struct Record {
    u64 head, next_head;
    u32 low, high;
};
__device__ inline Record load_record(const TileRecord* at, u32 lane) {
    const u32 word = min(EXCESS_BITS * lane / 32, 4u);
    return {__ldg(&at->head), __ldg(&at[1].head), __ldg(&at->excess[word]),
            __ldg(&at->excess[word + 1])};
}
__device__ inline u32 excess_of(const Record& r, u32 lane) {
    return u32((u64(r.high) << 32 | r.low) >>
               (EXCESS_BITS * lane - 32 * min(EXCESS_BITS * lane / 32, 4u))) &
           63;
}

// Merges an entry's exponents with two plane bytes, each given twice, into a pair of weights.
__device__ inline u32 merge(u32 entry, u32 twice) {
    return (twice & ~EXPONENTS) | (entry & EXPONENTS);
}
__device__ inline uint4 merge_unit(const u32 (&e)[4], u32 p0, u32 p1) {
    return make_uint4(
        merge(e[0], __byte_perm(p0, 0, 0x1100)), merge(e[1], __byte_perm(p0, 0, 0x3322)),
        merge(e[2], __byte_perm(p1, 0, 0x1100)), merge(e[3], __byte_perm(p1, 0, 0x3322)));
}

// Loads 16 plane bytes, which are read only once.
__device__ inline uint4 load_plane(const u8* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ inline void prefetch_l2(const u8* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
}  // namespace df11::tile
