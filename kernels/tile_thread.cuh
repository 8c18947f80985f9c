// Shared memory of a block of the tile kernel (the tables and tasks of a round, and one stage per
// warp, for any number of warps), and the work of one thread: windows on its bits, and look-ups.
#pragma once
#include "float.cuh"

namespace df11::tile {
// The second table lies at a multiple of a table's size, so that one logic operation makes an
// entry's offset.
__shared__ __align__(16) TileTable shared_tables[2];

// Work of a block between two barriers: tiles of up to two tasks.
struct Round {
    TileTask tasks[2];
    u32 first;   // the round's first tile, counted in the first task
    u32 count0;  // tiles of the first task
    u32 count;   // tiles of both tasks
    u32 next;    // the first tile that no warp has taken
    u32 after;   // the launch's first tile after the round
};
__shared__ Round shared_round;
constexpr u32 TASK_WORDS = sizeof(TileTask) / 4;

// A stage holds a word that is read but not decoded, a tile's bits, and three words that windows
// past the end read.
constexpr u32 STAGE_BEFORE = 16, STAGE_AFTER = 16;
extern __shared__ __align__(128) u8 stages[];

// A warp's staged bits, by shared address.
struct Bits {
    u32 stage, stage_bytes;
    __device__ u32 room() const { return stage_bytes - STAGE_BEFORE - STAGE_AFTER; }
    // Loads three words from `position` on, but none after the stage.
    __device__ void words(u32 position, u32& w0, u32& w1, u32& w2) const {
        u32 a = stage + min((position >> 5) * 4, room());
        w0 = load_shared(a + STAGE_BEFORE - 4);
        w1 = load_shared(a + STAGE_BEFORE);
        w2 = load_shared(a + STAGE_BEFORE + 4);
    }
};

// Looks up a window. `table`: offset of the task's table from shared_tables, in bytes.
__device__ inline u32 entry_of(u32 table, u32 window) {
    return *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(shared_tables) +
                                         (window & INDEX_MASK | table));
}

// Decodes one pair of any length.
template <class F>
__device__ inline u32 decode_pair(u32 table, const Bits& bits, u32 position) {
    u32 w0, w1, w2;
    bits.words(position, w0, w1, w2);
    u32 e = entry_of(table, __funnelshift_r(w0, w1, position));
    if (int(e) < 0) {
        u32 at = (position & 31) + 2 + flagged(e);
        e = F::escaped(e, __funnelshift_r(at < 32 ? w0 : w1, at < 32 ? w1 : w2, at));
    }
    return e;
}

// Decodes four pairs. An escape's entry has its whole length, so four look-ups find all codes
// without a branch. Escapes are then decoded again alone, for their exponents; all four pairs are,
// one by one, if they do not fit the window.
template <class F>
__device__ inline void decode_unit(u32 table, const Bits& bits, u32& position, u32 (&e)[4],
                                   u32& problems) {
    u32 w0, w1, w2;
    bits.words(position, w0, w1, w2);
    u32 low = __funnelshift_r(w0, w1, position);
    u32 high = __funnelshift_r(w1, w2, position);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        e[i] = entry_of(table, low);
        low = __funnelshift_r(low, high, e[i]);
        high = __funnelshift_r(high, 0, e[i]);
    }
    u32 total = (e[0] + e[1] + e[2] + e[3]) & 127;
    if (int(e[0] | e[1] | e[2] | e[3]) < 0) {
        const bool all = total > WINDOW_BITS;
        total = 0;
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            u32 one = e[0];
            if (all || int(one) < 0) one = decode_pair<F>(table, bits, position + total);
            total += one & LENGTH_MASK;
            e[0] = e[1];
            e[1] = e[2];
            e[2] = e[3];
            e[3] = one;
        }
        if (int(e[0] | e[1] | e[2] | e[3]) < 0) problems |= STATUS_NO_CODE;
    }
    position += total;
}
}  // namespace df11::tile
