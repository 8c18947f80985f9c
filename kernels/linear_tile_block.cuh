// What the warps of a block of products with tiles as stored share (linear_tile.cuh), and how they
// wait for each other.
#pragma once
#include "linear_tile_walk.cuh"

namespace df11::linear {
// Waits until a barrier's phase of this parity, the last one or the one before, is complete.
__device__ inline void wait_parity(u32 barrier, u32 parity) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    wait_for(barrier, parity);
#else
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, "
            "0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
}

// What all warps of a block share, besides dynamic shared memory.
struct TileShared {
    u64 set_full[MOST_RUN_SETS], set_empty[MOST_RUN_SETS];  // sums of an item: there; added
    u64 slot_full[MOST_TILE_WARPS][TILE_SLOTS], slot_empty[MOST_TILE_WARPS][TILE_SLOTS];
    u64 filled[MOST_TABLES];  // a table, again
    u32 added;                // items whose sums have been added
    u32 fills;                // how many tables have been filled, besides the first
};
// Of which parity a phase of a barrier is does not tell how far it is, and a warp may be several
// items or tables before others: a count tells first. One warp counts.
__device__ inline void tell(u32* count, u32 value, u64* barrier, u32 lane) {
    arrive(shared_address(barrier));
    __syncwarp();
    if (lane == 0) atomicExch(count, value);
}
__device__ inline void wait_until(u32* count, u32 least, u64* barrier, u32 phase, u32 lane) {
    if (lane == 0)
        while (atomicOr(count, 0) < least) __nanosleep(32);
    __syncwarp();
    wait_parity(shared_address(barrier), phase % 2);
}
// Of one, two or four places taken in turns: which one the n-th has, and how many had it before.
__device__ inline u32 place_of(u32 n, u32 places) { return n & (places - 1); }
__device__ inline u32 turns_of(u32 n, u32 places) { return n >> places / 2; }
// The table of the block's n-th matrix: bytes before it, of entry_at.
__device__ inline u32 table_of(u32 fill, u32 tables) {
    return place_of(fill, tables) * u32(sizeof(TileTable));
}
// Until it is there. The first one is, and is not counted.
__device__ inline void wait_for_table(TileShared& common, u32 fill, u32 tables, u32 lane) {
    wait_until(&common.fills, fill, common.filled + place_of(fill, tables),
               turns_of(fill - 1, tables), lane);
}
// Until the sums of the item may be written.
__device__ inline void wait_for_set(TileShared& common, u32 number, u32 sets, u32 lane) {
    if (number < sets) return;
    wait_until(&common.added, number + 1 - sets, common.set_empty + place_of(number, sets),
               turns_of(number, sets) - 1, lane);
}

// Lanes of a warp that arrive at a slot after it has been written, or read: one, after __syncwarp,
// except for racecheck (WIDE_ARRIVALS).
constexpr u32 SLOT_LANES = WIDE_ARRIVALS;
// Arrivals at a slot that is filled. On 9.0 one of them tells how many bytes come by a bulk copy;
// else there are those of all lanes' copies besides.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr u32 SLOT_ARRIVALS = SLOT_LANES;
__device__ inline void copy_bits(u32 to, const u8* from, u32 bytes, u32 full, u32 lane) {
    if (bytes && lane == 0) copy_bulk_once(to, from, bytes, full);
}
__device__ inline void arrive_with_bits(u32 full, u32 bytes) { arrive_expecting(full, bytes); }
// To the copies, after they have been made.
__device__ inline void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
#else
__device__ inline void show_barriers() {}
constexpr u32 SLOT_ARRIVALS = LANES + SLOT_LANES;
__device__ inline void copy_bits(u32 to, const u8* from, u32 bytes, u32 full, u32 lane) {
#pragma unroll 1
    for (u32 i = lane * 16; i < bytes; i += LANES * 16) copy_async(to + i, from + i);
    arrive_with_copies(full);
}
__device__ inline void arrive_with_bits(u32 full, u32) { arrive(full); }
#endif
// All lanes of the warp, which have written to a slot. `bytes`: that come.
__device__ inline void show_slot(u32 full, u32 bytes, u32 lane) {
    __syncwarp();
    if (lane == 0)
        arrive_with_bits(full, bytes);
    else if (SLOT_LANES > 1)
        arrive(full);
}

// Dynamic shared memory, and the barriers, by shared addresses.
struct TileBlock {
    u32 table, table_count, sets, set_count, xs, slots, slot_bytes;
    u32 set_full, slot_full, slot_empty;
    __device__ u32 bits_bytes() const { return slot_bytes - SLOT_HEAD; }
    __device__ u32 sums(const TileWalk& walk, u32 x_rows) const {
        return sets + place_of(walk.number, set_count) * run_set_bytes(x_rows) +
               walk.run * x_rows * RUN_PITCH * 4;
    }
};

// Copies a matrix's table to its place, later.
__device__ __forceinline__ void ask_for_table(const TileTable* from, u32 to, u32 thread,
                                              u32 threads) {
    for (u32 i = thread; i < sizeof(TileTable) / 16; i += threads)
        copy_async(to + 16 * i, reinterpret_cast<const u8*>(from) + 16 * i);
    commit_copies();
}

// All warps of the block together: one after the other they would take 2 us.
__device__ __forceinline__ void make_barriers(TileShared& common, u32 warp, u32 lane) {
    auto make = [](u64& barrier, u32 arrivals) {
        init_barrier(shared_address(&barrier), arrivals);
    };
    const u32 of_slots = warp - TILE_HELPERS;
    if (warp >= TILE_HELPERS && lane < TILE_SLOTS)
        make(common.slot_full[of_slots][lane], SLOT_ARRIVALS),
            make(common.slot_empty[of_slots][lane], SLOT_LANES);
    if (warp == 0) {
        if (lane < MOST_RUN_SETS)
            make(common.set_full[lane], MOST_RUNS * LANES), make(common.set_empty[lane], LANES);
        if (lane < MOST_TABLES) make(common.filled[lane], LANES);
        if (lane == 0) common.added = common.fills = 0;
    }
    show_barriers();
}
}  // namespace df11::linear
