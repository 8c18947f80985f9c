// Multiplies 129 or more rows of x on compute capability 9.0, with the stages, decoding, stores and
// order of sums of linear_fast_128.cuh, but decodes each weight once for 192 or 256 rows.
//
//   group     four strips by all columns, or two (df11_linear_half_*), for matrices of which four
//             would be too few groups for all multiprocessors; its stages follow those of the group
//             before
//   band      up to 256 rows of x, those of a block; all bands but the last have equally many
//   share     as many stages as others have, at least a group's (src/gpu/linear/many.rs).
//             Neighbouring blocks have the bands of one share, so that weights come from DRAM once
//   block     two warps that multiply for each strip of a group, 16 rows each, with 96 or 128 sums
//             per thread, and four that request; while one of two warpgroups decodes, the products
//             of the other run
//
//      group 0          | group 1          | group 2          | ...
//      share 0                    | share 1                       | ...
//        first this ----^ piece, handed over; last the rest of group 1
//
//   relay     a share that ends inside a group begins with that piece, and hands the chain's sums
//             to the next share, which continues the chain after all its other work: sums of one
//             chain are never added to each other. Only the end of a share waits for the block
//             before, whose beginning waits for nothing
//   splits    of a group follow each other in a block; memory keeps the sum of those before
//   pair      two blocks of a cluster, with one band and neighbouring shares of equally many whole
//             groups: each requests half of x, for both
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills): 168 registers (216 in warps that multiply,
// 72 in those that request), 12 warps, one block per multiprocessor, 227 KiB of shared memory: 5
// stages of 44 KiB, or 6 of 36. With groups of two strips 174 and 196 registers, 8 warps, 5 stages
// of 38 KiB or 7 of 30. In PyTorch's order on an H100, one split, microseconds, F.linear / groups
// of four strips (benches/record/2026-11-26-exact-order-wide.md):
//   rows of x             256             1024            2048
//   6144 x 4096                           70.7 / 80.5     134.9 / 142.0
//   4096 x 4096                           46.5 / 48.8     90.4 / 95.9
//   28672 x 4096          107.0 / 98.6    316.2 / 331.8   629.7 / 674.1
//   4096 x 14336                          153.8 / 161.4   302.8 / 321.9
// Limits. A stage of 256 rows takes 0.72 us, of which products take 0.58 at 1.755 GHz. A relay adds
// about 15 us to a launch. With groups of two strips, L2: most of what it gives is x, which each
// block reads for itself (2026-11-29-half-groups-h200.md). That record, that of the wide kernels,
// 2026-11-23-linear-bands.md and 2026-11-23-linear-large.md tell what was tried and rejected.
//
// Safety: as in linear.cu. A block waits only for the other one of its pair, which runs at the same
// time, and for the block before, which began earlier: GPUs begin blocks in the order of their
// numbers.
#pragma once
#include "linear_fast_128.cuh"

namespace df11::linear {
// Warps that multiply a group.
__host__ __device__ constexpr u32 fast256_warps(u32 strips) { return 2 * strips; }
__host__ __device__ constexpr u32 threads_of_fast256(u32 strips) {
    return (fast256_warps(strips) + FAST128_ASKING) * LANES;
}
constexpr u32 FAST256_RING = 8;  // stages, at most

// This block's place in its pair, if it has one.
struct Fast256Pair {
    u32 blocks, rank;
    __device__ Fast256Pair() : blocks(cluster_blocks()), rank(blockIdx.x % blocks) {}
    __device__ bool exists() const { return blocks > 1; }
    __device__ void arrive_beside(u32 barrier) const {
        if (exists()) arrive_at(barrier, rank ^ 1);
    }
    // All threads of both meet.
    __device__ void meet() const {
        if (exists()) meet_cluster();
    }
};
struct Fast256Stages : StageRing<FAST256_RING> {
    Fast256Pair pair;
    using StageRing::StageRing;
    __device__ void release(u32 empty, u32 lane) const { linear::release(empty, lane, pair); }
};
struct Fast256Shared : Fast128Shared<Fast256Launch> {
    Fast256Pair pair;
    __device__ __forceinline__ void ask_for_x(const Fast128Piece& piece, u32 stage, u32 to,
                                              u32 barrier, u32 lane) const {
        if (!pair.exists() || !launch.x_mapped)
            return Fast128Shared::ask_for_x(piece, stage, to, barrier, lane);
        if (WARP_ARRIVALS > 1) arrive(barrier);
        __syncwarp();
        arrive_expecting_once(barrier, piece.x_box * FAST128_COLUMNS * 2);
        const u32 first = piece.x_box / 2 * pair.rank;
        copy_x_to_pair(to + first * FAST128_COLUMNS * 2, launch.x_map, stage * FAST128_COLUMNS,
                       piece.x_first + first, barrier);
    }
};

// Iterates over a block's work: pieces of groups, each within a split.
template <u32 STRIPS>
struct Fast256Cursor {
    u32 stages;      // stages per group
    u32 begin, end;  // the share, in stages of all groups, one after the other
    u32 at, limit;   // the rest of the present part
    u32 part;        // HEAD, WHOLE, TAIL; past TAIL nothing is left
    u32 band;
    enum { HEAD, WHOLE, TAIL };

    __device__ Fast256Cursor(const Fast256Launch& launch, u32 n) : part(HEAD) {
        const Fast256Pair pair;
        const u32 bands = fast128_bands(launch.x_rows, n), place = blockIdx.x / pair.blocks;
        const u32 share = place / bands * pair.blocks + pair.rank;
        band = place % bands;
        stages = fast128_stage_count(launch.columns);
        u32 groups = 0;
        for (u32 i = 0; i < launch.matrix_count; i++)
            groups += fast256_groups(launch.matrices[i].rows, STRIPS);
        const u32 all = groups * stages;
        begin = min(share * launch.share_stages, all);
        end = min(begin + launch.share_stages, all);
        // HEAD: the beginning of a group that the next share ends.
        at = end - end % stages, limit = end;
        skip_empty();
    }
    __device__ u32 first_whole() const { return (begin + stages - 1) / stages * stages; }
    __device__ void skip_empty() {
        while (at == limit && part <= TAIL) {
            if (part == HEAD) at = first_whole(), limit = end - end % stages;
            if (part == WHOLE) at = begin, limit = first_whole();
            part++;
        }
    }
    __device__ bool has() const { return part <= TAIL; }
    // Whether the previous share has begun the group, and this is the group's next piece.
    __device__ bool resumes() const { return part == TAIL && at == begin; }
    // The present piece, within a split. `split`: stages per split of the piece's matrix.
    __device__ Fast128Piece piece(const Fast256Launch& launch, u32 n, u32& split) const {
        Fast128Piece p;
        u32 group = at / stages;
        for (p.matrix = 0; p.matrix + 1 < launch.matrix_count; p.matrix++) {
            const u32 groups = fast256_groups(launch.matrices[p.matrix].rows, STRIPS);
            if (group < groups) break;
            group -= groups;
        }
        const u32 all = strips_of(launch.matrices[p.matrix].rows);
        p.first_strip = group * STRIPS;
        p.strips = min(max(all, p.first_strip) - p.first_strip, STRIPS);
        split = split_stages(launch.columns, launch.matrices[p.matrix].splits);
        p.begin = at % stages;
        p.end = min(min(stages, p.begin + (limit - at)), (p.begin / split + 1) * split);
        p.x_box = fast128_band_rows(launch.x_rows, n);
        p.x_first = band * p.x_box;
        p.x_rows = min(max(launch.x_rows, p.x_first) - p.x_first, p.x_box);
        return p;
    }
    __device__ void next(const Fast128Piece& p) {
        at += p.end - p.begin;
        skip_empty();
    }
};

template <u32 N, u32 STRIPS>
__device__ __forceinline__ void ask_for_pieces(const Fast256Launch& launch, Fast256Stages ring,
                                               u32 warp, u32 lane) {
    constexpr u32 X_PLACE = STRIPS * FAST128_STRIP_BYTES;
    for (u32 i = 0; i < warp; i++) ring.next();
    const Fast256Shared work = {{launch}, ring.pair};
    u32 turn = warp;  // stages of other warps before this warp's next one
    bool first = true;
#pragma unroll 1
    for (Fast256Cursor<STRIPS> cursor(launch, N); cursor.has();) {
        u32 split;
        const Fast128Piece piece = cursor.piece(launch, N, split);
        const u32 count = piece.end - piece.begin;
        const Fast128Asking<Fast256Shared, Fast256Stages> asking(work, piece, piece.begin + turn,
                                                                 lane);
        const u32 filled = first ? min(piece.begin + ring.count, piece.end) : 0;
        asking.fill(filled, ring);
        asking.ask(filled, ring, X_PLACE, first);
        first = false;
        turn = (turn - count) % FAST128_ASKING;
        cursor.next(piece);
    }
}

// Sums of a block in memory. A fragment is four numbers of each thread that multiplies: eight rows
// of x by the warp's 16 rows of a strip.
__host__ __device__ constexpr u32 fragment_floats(u32 strips) {
    return fast256_warps(strips) * LANES * 4;
}
__host__ __device__ constexpr u32 sums_of_group(u32 strips) {
    return fast256_partial_bytes(strips) / 3 / 4;
}
__device__ inline void store_partial(float* to, const float* v) {
    __stcg(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
}
// Volatile, so that loads stay together. Loads from global or shared memory.
__device__ inline void load_partial(float* to, const float* from) {
    asm volatile("ld.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(from));
}
// Sums of groups that a block keeps in memory, and that it exchanges with the blocks before and
// after it that have the same band.
template <u32 STRIPS>
struct Fast256Memory {
    enum { HANDED, HANDED_TOTAL, TOTAL };
    static constexpr u32 SUMS = sums_of_group(STRIPS);
    u32* counter;
    float* own;
    u32 bands;
    __device__ Fast256Memory(const Fast256Launch& launch, u32 n)
        : counter(launch.counters + blockIdx.x),
          own(launch.partials + blockIdx.x * u64(3 * SUMS) + threadIdx.x * 4),
          bands(fast128_bands(launch.x_rows, n)) {}
    __device__ float* place(u32 which) const { return own + which * SUMS; }
    __device__ const float* before(u32 which) const {
        return own - u64(bands) * (3 * SUMS) + which * SUMS;
    }
    __device__ static void meet() { group_barrier(1, fast256_warps(STRIPS) * LANES); }
    // All warps that multiply call it together; what they stored before is visible to the block
    // after.
    __device__ void hand_over() const {
        meet();
        if (threadIdx.x == 0) __threadfence(), atomicExch(counter, 1);
    }
    __device__ void wait_for_block_before() const {
        if (threadIdx.x == 0) {
            while (!load_acquired(counter - bands)) {
            }
            __threadfence();
        }
        meet();
    }
    __device__ void release_block_before() const {
        meet();
        if (threadIdx.x == 0) atomicExch(counter - bands, 0);
    }
};
template <u32 N, u32 STRIPS>
__device__ __forceinline__ void store_sums(float* to, const float (&sums)[N / 2], u32 x_rows) {
#pragma unroll
    for (u32 i = 0; i < N / 8; i++)
        if (8 * i < x_rows) store_partial(to + i * fragment_floats(STRIPS), sums + 4 * i);
}
// Loads fragments that are `step` apart.
template <u32 N>
__device__ __forceinline__ void load_sums(float (&sums)[N / 2], const float* from, u32 step) {
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) load_partial(sums + 4 * i, from + i * step);
}
// Adds the sum of the earlier splits to a split.
template <u32 N, u32 STRIPS>
__device__ __forceinline__ void add_total(float (&sums)[N / 2], const float* from, u32 x_rows) {
    constexpr u32 FRAGMENTS = 4;
#pragma unroll
    for (u32 first = 0; first < N / 8; first += FRAGMENTS) {
        if (8 * first >= x_rows) break;
        float total[FRAGMENTS][4];
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; i++)
            load_partial(total[i], from + (first + i) * fragment_floats(STRIPS));
#pragma unroll
        for (u32 i = 0; i < 4 * FRAGMENTS; i++)
            sums[4 * first + i] = total[i / 4][i % 4] + sums[4 * first + i];
    }
}

// With 192 rows, stores of 4 bytes are faster (see the record).
template <u32 N>
constexpr bool BY_EIGHTS = N == FAST256_ROWS;

template <u32 N, u32 STRIPS>
__device__ __forceinline__ void multiply_pieces(const Fast256Launch& launch, Fast256Stages& ring,
                                                u32 lane) {
    const Fast128Share share;
    using Memory = Fast256Memory<STRIPS>;
    using Cursor = Fast256Cursor<STRIPS>;
    const Memory memory(launch, N);
    const float* total = nullptr;  // sum of the earlier splits, in memory
#pragma unroll 1
    for (Cursor cursor(launch, N); cursor.has();) {
        u32 split;
        const Fast128Piece piece = cursor.piece(launch, N, split);
        const bool is_head = cursor.part == Cursor::HEAD, is_tail = cursor.part == cursor.TAIL;
        // A chain begins at zeros, or continues where it was cut. Both are loaded: with a branch
        // ptxas would wait for each product (C7515).
        const float* from = reinterpret_cast<const float*>(linear_shared);
        if (cursor.resumes()) {
            memory.wait_for_block_before();
            total = memory.before(Memory::HANDED_TOTAL);
            if (piece.begin % split) from = memory.before(Memory::HANDED);
        }
        float sums[N / 2];
        load_sums<N>(sums, from, piece.begin % split ? fragment_floats(STRIPS) : 0);
        const u32 last = multiply_stages<N>(launch.matrices[piece.matrix].rest, piece,
                                            STRIPS * FAST128_STRIP_BYTES, ring, share, sums);
        ring.release(last, lane);
        const bool ends_group = piece.end == cursor.stages;
        const bool ends_split = ends_group || piece.end % split == 0;
        if (ends_split && piece.end > split) add_total<N, STRIPS>(sums, total, piece.x_rows);
        if (ends_group) {
            const Fast128Output output(launch.matrices[piece.matrix], piece, share);
            output.store<N / 8, BY_EIGHTS<N>>(0, sums);
            if (is_tail) memory.release_block_before();
        } else {
            const u32 which = !ends_split ? Memory::HANDED
                              : is_head   ? Memory::HANDED_TOTAL
                                          : Memory::TOTAL;
            store_sums<N, STRIPS>(memory.place(which), sums, piece.x_rows);
            if (ends_split) total = memory.place(which);
        }
        cursor.next(piece);
        if (is_head && cursor.part != Cursor::HEAD) memory.hand_over();
    }
}

template <u32 N, u32 STRIPS>
__device__ __forceinline__ void linear_fast_256(const Fast256Launch& launch) {
    constexpr u32 WARPS = fast256_warps(STRIPS);
    // Broadcast from lane 0, so that the compiler knows that all lanes have the same.
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    // Shared memory begins with zeros, the sums of a chain that begins.
    constexpr u32 ZEROS = 16;
    Fast256Stages ring(kept(shared_address(linear_shared) + ZEROS), dynamic_shared_bytes() - ZEROS,
                       fast128_stage_bytes(N, STRIPS));
    if (threadIdx.x == 0) store_shared_16(shared_address(linear_shared), make_uint4(0, 0, 0, 0));
    ring.init_barriers(WARPS * ring.pair.blocks);
    __syncthreads();
    ring.pair.meet();
    if (warp >= WARPS) {
        if constexpr (STRIPS == FAST256_STRIPS) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        ask_for_pieces<N, STRIPS>(launch, ring, warp - WARPS, lane);
        __syncwarp();
        ring.pair.meet();
        return;
    }
    if constexpr (STRIPS == FAST256_STRIPS) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    wait_for_launch_before();
    multiply_pieces<N, STRIPS>(launch, ring, lane);
    // Waits until the other block writes and arrives here no more.
    ring.pair.meet();
}
}  // namespace df11::linear
