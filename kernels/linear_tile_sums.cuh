// Sums of products of 17 to 64 rows of x with tiles as stored (linear_tile_64.cuh). A group's
// sums go to y, or, if several items have its rounds, to memory, where they meet.
#pragma once
#include "linear_tile_rounds.cuh"

namespace df11::linear {
// A group's sums, held by all warps that multiply.
template <u32 N>
struct GroupSums {
    float of[BANDS][N / 2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 band = 0; band < BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) of[band][i] = 0;
    }
    __device__ __forceinline__ void settle() {
        wait_for_products<0>();
#pragma unroll
        for (u32 band = 0; band < BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(of[band][i])::"memory");
    }
    // Rounds the sums of a band by COUNT rows of x, from `first` on, and stores them to y.
    template <u32 COUNT>
    __device__ static __forceinline__ void store(const Tile64Launch& launch, u32 matrix, u32 group,
                                                 u32 band, u32 first, const float* sums) {
        const ProductMatrix& m = launch.matrices[matrix];
        const u32 lane = threadIdx.x % LANES, q = lane % 4, r = lane / 4;
        // The row of the band whose sums the lane has, and the first of the two rows that it
        // stores.
        const u32 mine = r % 4 * 2 + r / 4, stored = q % 2 * 4 + q / 2 * 2;
        const bool aligned = (reinterpret_cast<u64>(m.y) | m.y_pitch * 2) % 4 == 0;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 strip = group * GROUP_STRIPS + threadIdx.x / LANES * 2 + half;
            const u32 row = strip * STRIP_ROWS + band * BAND_ROWS, own = row + mine;
            const float bias = m.bias && own < m.rows ? widen_bf16(__ldg(m.bias + own)) : 0;
#pragma unroll
            for (u32 i = 0; i < COUNT / 8; i++) {
                float a = sums[4 * i + 2 * half], b = sums[4 * i + 2 * half + 1];
                if (m.bias) a += bias, b += bias;
                const u32 pair = Fast128Output::transposed(Fast128Output::round_two(a, b)),
                          other = __shfl_xor_sync(ALL_LANES, pair, 2),
                          both = q < 2 ? __byte_perm(pair, other, 0x5410)
                                       : __byte_perm(other, pair, 0x7632);
                const u32 x_row = first + 8 * i + r, to_row = row + stored;
                u16* const to = m.y + x_row * m.y_pitch + to_row;
                const bool one = x_row < launch.x_rows && to_row < m.rows,
                           two = one && to_row + 1 < m.rows;
                if (two && aligned)
                    *reinterpret_cast<u32*>(to) = both;
                else if (one)
                    to[0] = u16(both);
                if (two && !aligned) to[1] = u16(both >> 16);
            }
        }
    }
    __device__ __forceinline__ void store(const Tile64Launch& launch, u32 matrix, u32 group) const {
#pragma unroll
        for (u32 band = 0; band < BANDS; band++) store<N>(launch, matrix, group, band, 0, of[band]);
    }
    // Writes the sums to memory, where `add` reads them.
    __device__ __forceinline__ void keep(float* to) const {
        float4* const all = reinterpret_cast<float4*>(to) + threadIdx.x;
#pragma unroll
        for (u32 band = 0; band < BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < N / 8; i++)
                all[(band * (N / 8) + i) * MULTIPLIERS * LANES] = make_float4(
                    of[band][4 * i], of[band][4 * i + 1], of[band][4 * i + 2], of[band][4 * i + 3]);
    }
    // A piece of the group's sums: a band by PIECE_ROWS rows of x.
    static constexpr u32 PIECE_ROWS = 32, PIECES = BANDS * (N / PIECE_ROWS);
    // Adds a piece over the group's items, in order, and stores it. `place`: where an item's sums
    // are.
    template <class Place>
    __device__ static __forceinline__ void add(const Tile64Launch& launch, const Rounds& at,
                                               u32 piece, u32 first_item, u32 last_item,
                                               Place place) {
        constexpr u32 COUNT = PIECE_ROWS / 8, FLOAT4S = tile64_partial_bytes(N) / 16;
        const u32 band = piece % BANDS, part = piece / BANDS;
        const float4* const all = reinterpret_cast<const float4*>(launch.partials) +
                                  (band * (N / 8) + part * COUNT) * MULTIPLIERS * LANES +
                                  threadIdx.x;
        // Items whose loads are in flight at once: as many as registers allow.
        constexpr u32 ITEMS = 4;
        float sum[PIECE_ROWS / 2] = {};
#pragma unroll 1
        for (u32 first = first_item; first <= last_item; first += ITEMS) {
            float4 v[ITEMS][COUNT];
#pragma unroll
            for (u32 k = 0; k < ITEMS; k++)
#pragma unroll
                for (u32 i = 0; i < COUNT; i++) {
                    v[k][i] = make_float4(0, 0, 0, 0);
                    if (first + k <= last_item)
                        v[k][i] = all[u64(place(first + k)) * FLOAT4S + i * MULTIPLIERS * LANES];
                }
#pragma unroll
            for (u32 k = 0; k < ITEMS; k++)
#pragma unroll
                for (u32 i = 0; i < COUNT; i++)
                    sum[4 * i] += v[k][i].x, sum[4 * i + 1] += v[k][i].y,
                        sum[4 * i + 2] += v[k][i].z, sum[4 * i + 3] += v[k][i].w;
        }
        store<PIECE_ROWS>(launch, at.matrix, at.group, band, part * PIECE_ROWS, sum);
    }
};

// Progress of a group whose items meet: a word in memory, 0 before and after. Each field counts to
// less than 256.
constexpr u32 MEETING_ARRIVED = 1, MEETING_CLAIMED = 1 << 8, MEETING_LEFT = 1 << 16;
// Most clocks that an item waits for the others in order to take some of the pieces. No item has to
// wait: the last one to arrive takes all pieces that nobody else takes.
constexpr u32 MEETING_PATIENCE = 100000, NO_PIECE = ~0u;
// Adds after everything that the block has written, and before everything that it reads next.
__device__ inline u32 add_ordered(u32* to, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(to), "r"(value)
                 : "memory");
    return before;
}
__device__ inline u32 claim_piece(u32* word) { return atomicAdd(word, MEETING_CLAIMED) >> 8 & 255; }
// One thread calls it after all have written. Returns its first piece if all `count` items have
// arrived in time.
__device__ __forceinline__ u32 meet(u32* word, u32 count, bool has_time) {
    u32 arrived = (add_ordered(word, MEETING_ARRIVED) & 255) + 1;
    const u32 begin = u32(clock());
    while (arrived < count && has_time && u32(clock()) - begin < MEETING_PATIENCE)
        arrived = load_acquired(word) & 255;
    return arrived == count ? claim_piece(word) : NO_PIECE;
}

// Finishes the block's part of a group: stores it if it is the whole group, otherwise adds it to
// other blocks' parts. `has_time`: the block has nothing else to do.
template <u32 N>
__device__ __forceinline__ void finish_group(GroupSums<N>& sums, const Tile64Launch& launch,
                                             const Rounds& at, Tile64Shared& common,
                                             bool has_time) {
    const ProductMatrix& m = launch.matrices[at.matrix];
    const RoundSplit split(m.rows, launch.columns);
    const u32 first = at.group * split.of_group / split.of_item,
              last = ((at.group + 1) * split.of_group - 1) / split.of_item;
    if (first == last) return sums.store(launch, at.matrix, at.group);
    constexpr u32 FLOATS = tile64_partial_bytes(N) / 4;
    // No other part has this place: of a group's parts only the first is not its item's first one.
    auto place = [&](u32 item) {
        return at.places_before + (split.by_group() ? item + at.group : 2 * item + (item == first));
    };
    sums.keep(launch.partials + u64(place(at.item_of_matrix)) * FLOATS);
    // Nor has another group this counter: no other group in several items has the same first item.
    u32* const counter = launch.counters + at.matrix * LINEAR_BLOCKS + first;
    group_barrier(0, MULTIPLIERS * LANES);
    u32 next = 0;
    if (threadIdx.x == 0) common.piece = meet(counter, last - first + 1, has_time);
    group_barrier(0, MULTIPLIERS * LANES);
    // All items have arrived: the blocks that are still here take piece after piece.
    for (u32 piece = common.piece; piece < sums.PIECES; piece = common.piece) {
        if (threadIdx.x == 0) next = claim_piece(counter);
        sums.add(launch, at, piece, first, last, place);
        group_barrier(0, MULTIPLIERS * LANES);
        if (threadIdx.x == 0) common.piece = next;
        group_barrier(0, MULTIPLIERS * LANES);
    }
    // The last block to leave resets the word.
    if (threadIdx.x == 0 && (atomicAdd(counter, MEETING_LEFT) >> 16) == last - first) *counter = 0;
}
}  // namespace df11::linear
