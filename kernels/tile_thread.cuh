// What a block of the tile kernel keeps in shared memory: tables and tasks of a round, with any
// number of warps, and a stage for each warp; and what one of its threads does alone: a window on
// its bits, and look-ups.
#pragma once
#include "tile_code.cuh"

namespace df11::tile {
// At a multiple of its size, so that one logic op makes an entry's address.
__shared__ __align__(16) TileTable shared_tables[2];

// What a block decodes between two barriers: tiles of up to two tasks.
struct Round {
    TileTask tasks[2];
    u32 first;   // of the first task's tiles, the one that is the round's first
    u32 count0;  // tiles of the first task
    u32 count;   // of both
    u32 next;    // the tile that no warp has yet
    u32 after;   // the tile of the launch after the round
};
__shared__ Round shared_round;
constexpr u32 TASK_WORDS = sizeof(TileTask) / 4;

// A stage holds one word that is not decoded, a tile's bits, and three words that windows after the
// end reach.
constexpr u32 STAGE_BEFORE = 16, STAGE_AFTER = 16;
extern __shared__ __align__(128) u8 stages[];

// A warp's staged bits, by shared address.
struct Bits {
    u32 stage, stage_bytes;
    __device__ u32 room() const { return stage_bytes - STAGE_BEFORE - STAGE_AFTER; }
    // Loads three words from a position on; none after the stage.
    __device__ void words(u32 position, u32& w0, u32& w1, u32& w2) const {
        u32 a = stage + min((position >> 5) * 4, room());
        w0 = load_shared(a + STAGE_BEFORE - 4);
        w1 = load_shared(a + STAGE_BEFORE);
        w2 = load_shared(a + STAGE_BEFORE + 4);
    }
};

// `table`: the bytes to the task's table from shared_tables.
__device__ inline u32 entry_of(u32 table, u32 window) {
    return *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(shared_tables) +
                                         (window & INDEX_MASK | table));
}

// Decodes one pair, wherever it ends.
__device__ inline u32 decode_pair(u32 table, const Bits& bits, u32 position) {
    u32 w0, w1, w2;
    bits.words(position, w0, w1, w2);
    u32 e = entry_of(table, __funnelshift_r(w0, w1, position));
    if (int(e) < 0) {
        u32 at = (position & 31) + 2 + flagged(e);
        e = escaped(e, __funnelshift_r(at < 32 ? w0 : w1, at < 32 ? w1 : w2, at));
    }
    return e;
}

// Decodes four pairs. Entries of escapes hold their whole length, so four look-ups find their codes
// without a branch. Afterwards escapes are decoded again alone, for their exponents; and all four
// are, one by one, if they do not fit the window.
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
            if (all || int(one) < 0) one = decode_pair(table, bits, position + total);
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
