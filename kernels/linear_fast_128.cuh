// Multiplies 17 or more rows of x on compute capability 9.0, in the order of a plan of the sum
// (spec/gpu.md, part 7), by wgmma: decoded weights are the A operand, in registers; x is B, in
// shared memory. In the same order, linear_order.cuh multiplies up to 32 rows of x if there are one
// or two splits, and up to 64 in small matrices; linear_fast_256.cuh 129 or more.
//
//   item      a cluster's work for a band of up to 32, 64 or 128 rows of x. A block has up to eight
//             strips of a matrix and one split of its columns: with s splits, the blocks of a
//             cluster have as many groups of strips as s goes into its size
//   stage     64 columns, two steps of each strip; a ring of stages is filled with weights before
//             the previous launch has ended
//   block     16 warps that multiply, 16 rows of a strip each, and four that request, a stage each
//             in turn
//
//      warpgroup 0 | strips 0, 1 |  warp 0: rows 0 to 15 of strip 0, warp 1: rows 16 to 31, ...
//      ...         | ...         |  each warpgroup reads the x of a stage from shared memory
//      warpgroup 3 | strips 6, 7 |
//
//   chain     a warpgroup's products of a split, first to last, from zero; the next stage's first
//             step is loaded while this stage's second step is multiplied
//   x         comes in boxes of 64 columns by the rows of a band, a copy each, by a tensor map that
//             the host makes. x keeps the order that wgmma wants, because the fast layout orders
//             columns to match. If x is not aligned, it comes word by word, and a fence makes it
//             visible to products
//   entries   requesting warps put one entry for each product of 16 rows and 16 columns in a place
//             of its own in a stage, and tell which products have some. If a product has several,
//             or a tile more than six, the multiplying warps load all of the tile's
//   prefetch  after its last request a block brings some of the next product's weights to L2
//   splits    of an item meet in the cluster's shared memory: each block adds the sums of some rows
//             of x from all blocks, in the order of splits. No workspace
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills): 96 registers (104 in warps that multiply, 64
// in those that request), 20 warps, one block per multiprocessor, 227 KiB of shared memory: with
// eight strips 6 stages for 64 rows of x, 5 for 128. A warp takes about 115 instructions for 1,024
// weights. In PyTorch's order on an H100, microseconds, F.linear / this kernel
// (benches/record/2026-11-26-exact-order-wide.md):
//   rows of x             32              64              128
//   6144 x 4096           21.8 / 18.5     21.1 / 19.0     21.8 / 22.8     one split
//   4096 x 4096           14.8 / 17.0     15.0 / 17.8     15.3 / 21.5     one
//   28672 x 4096          86.0 / 64.1     87.9 / 65.1     90.8 / 69.4     one
//   4096 x 14336          46.8 / 35.0     48.0 / 35.6     54.6 / 40.2     two; with 128 rows three
// Limits. DRAM limits large matrices. The chain limits small ones: a lone warpgroup takes 0.22,
// 0.24 and 0.29 us per stage with 32, 64 and 128 rows, of which products need 0.04, 0.07 and 0.15;
// each scheduler then has one warp, which waits for its own instructions. That record and
// 2026-11-22-linear-wide.md tell what was tried and rejected.
//
// Safety: as in linear.cu. Blocks wait only for those of their cluster, which run at the same time.
#pragma once
#include "linear_stages.cuh"

namespace df11::linear {
// Decodes weights of 16 columns of 16 rows of a strip: product `j` of a step's two, from the signs
// and mantissas of two rows and their codes.
__device__ __forceinline__ void decode_product(u32 (&weights)[4], u32 j, const uint4& planes,
                                               const uint2& codes, u32 base) {
    constexpr u32 PLACES = 0x07800780u;
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        const u32 of_row = row ? codes.y : codes.x;
        const u32 own = j ? __byte_perm(of_row, 0, 0x0321) : of_row;
        const u32 plane = row ? (j ? planes.w : planes.z) : (j ? planes.y : planes.x);
        weights[row] = merge_fields(plane, base - (own & PLACES));
        weights[row + 2] =
            merge_fields(__byte_perm(plane, 0, 0x2103), less_shifted(base, own & PLACES >> 4));
    }
}
// Puts an entry in its place if it is `mine`, of this lane and product.
__device__ __forceinline__ void place_entry(u32 (&weights)[4], u32 entry, bool mine) {
    const u32 place = (entry >> 19 & 1) + (entry >> 16 & 2);
    const u32 order = entry >> 16 & 1 ? 0x5410 : 0x3254;
#pragma unroll
    for (u32 n = 0; n < 4; n++)
        if (mine && place == n) weights[n] = __byte_perm(weights[n], entry, order);
}
// Bits 18, 20, and 26 and up of an entry of this product.
__device__ inline u32 entry_of(u32 step, u32 half, u32 product) {
    return step << 26 | half << 20 | product << 18;
}
// Places a product's entries among those that each lane has. All lanes call it together.
__device__ __forceinline__ void place_from(u32 (&weights)[4], u32 entry, u32 wanted, u32 lane) {
    u32 left = __ballot_sync(ALL_LANES, !((entry ^ wanted) & 0xFC140000u));
#pragma unroll 1
    while (left) {
        const u32 one = __shfl_sync(ALL_LANES, entry, __ffs(left) - 1);
        left &= left - 1;
        place_entry(weights, one, (one >> 21 & 31) == lane);
    }
}
// Places a product's several entries, out of all of the tile's, of which each lane loads one.
// `head`: the warp's half of the stage's head.
__device__ __forceinline__ void place_entries_of_tile(u32 (&weights)[4], u32 head,
                                                      const u32* entries, u32 half, u32 step,
                                                      u32 product, u32 lane) {
#pragma unroll 1
    for (u32 begin = 0;; begin += LANES) {
        // Loaded again each time: there are few registers.
        const uint2 all = load_shared_8(head + (half ? 1 : 2) * FAST128_HALF_HEAD);
        if (begin >= all.y) break;
        u32 entry = ~0u;
        if (begin + lane < all.y) entry = __ldg(entries + all.x + begin + lane);
        place_from(weights, entry, entry_of(step, half, product), lane);
    }
}

// The rows of the block's strips that a warp has.
struct Fast128Share {
    u32 warpgroup, strip, half;
    __device__ Fast128Share() {
        // Broadcast from lane 0, so that the compiler knows that all lanes have the same.
        const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
        warpgroup = warp / 4;
        strip = warp / 2;
        half = warp % 2;
    }
};

// Multiplies all stages of a piece, with x at `x_place` in each. `rest`: the matrix's entries.
// Returns the barrier of the last stage, which the caller releases.
template <u32 N, class Ring>
__device__ __forceinline__ u32 multiply_stages(const void* rest, const Fast128Piece& item,
                                               u32 x_place, Ring& ring, const Fast128Share& share,
                                               float (&sums)[N / 2]) {
    const u32* const entries = static_cast<const u32*>(rest);
    const u32 lane = kept(threadIdx.x % LANES);
    // A warpgroup's second strip may not exist: it then repeats the last one, and nobody uses the
    // result.
    const u32 strip = min(share.strip, item.strips - 1);
    const u32 planes = kept(strip * FAST128_STRIP_BYTES + share.half * 512 + lane * 16);
    const u32 codes = kept(strip * FAST128_STRIP_BYTES + 1024 + share.half * 8 + lane * 16);
    // Broadcast from lane 0, so that the compiler does not compute it again in each stage.
    const u32 heads =
        __shfl_sync(ALL_LANES,
                    ring.heads() - ring.full * (FAST128_HEADS / 8) +
                        min(threadIdx.x / (2 * LANES), item.strips - 1) * FAST128_HEAD +
                        threadIdx.x / LANES % 2 * FAST128_HALF_HEAD,
                    0);
    const u32 x_first = kept(describe_x(x_place));
    const u32 end = kept(item.end);
    u32 to_release = 0;
    // Two buffers of weights, of one product each if there are many sums.
    constexpr u32 PRODUCTS = N >= 128 ? 1 : 2;
    constexpr u32 GROUPS = 2 * FAST128_STEPS / PRODUCTS;
    uint4 plane[FAST128_STEPS];
    uint2 code[FAST128_STEPS];
    auto load = [&](u32 i) {
        plane[i] = load_shared_16(ring.place + planes + i * STEP_BYTES);
        code[i] = load_shared_8(ring.place + codes + i * STEP_BYTES);
    };
    auto head_place = [&] { return ring.full * (FAST128_HEADS / 8) + heads; };
    uint2 base_and_more;
    if (item.begin < end) {
        wait_for(ring.full, ring.phase);
        base_and_more = load_shared_8(head_place());
        load(0);
    }
#pragma unroll 1
    for (u32 stage = item.begin; stage < end; stage++) {
        const u32 head = head_place();
        const u32 x = (ring.place >> 4) + x_first;
        const u32 base = base_and_more.x;
        const u32 more = base_and_more.y;
        const u32 empty = ring.empty();
        u32 weights[2][PRODUCTS][4];
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const u32 step = group * PRODUCTS / 2, first = group * PRODUCTS % 2;
            auto& mine = weights[group % 2];
            // Loads the second step some time before it is needed; later it loads the next stage's
            // first step.
            if (group == 0) load(1);
#pragma unroll
            for (u32 j = 0; j < PRODUCTS; j++)
                decode_product(mine[j], first + j, plane[step], code[step], base);
            constexpr u32 ALL = (1 << PRODUCTS) - 1;
            if (more >> 2 * step >> first & ALL)
#pragma unroll
                for (u32 j = 0; j < PRODUCTS; j++) {
                    const u32 place = 2 * step + first + j;
                    if (!(more >> place & 1)) continue;
                    if (more >> (4 + place) & 1) {
                        place_entries_of_tile(mine[j], head, entries, share.half,
                                              (stage * FAST128_STEPS + step) % TILE_STEPS,
                                              first + j, lane);
                    } else {
                        const u32 entry = load_shared(head + 8 + 4 * place);
                        place_entry(mine[j], entry, (entry >> 21 & 31) == lane);
                    }
                }
            fence_products();
#pragma unroll
            for (u32 j = 0; j < PRODUCTS; j++)
                multiply_wide(sums, mine[j][0], mine[j][1], mine[j][2], mine[j][3],
                              x + 2 * (group * PRODUCTS + j));
            commit_products();
            if (group == GROUPS / 2 - 1) {
                ring.next();
                if (stage + 1 < end) {
                    wait_for(ring.full, ring.phase);
                    base_and_more = load_shared_8(head_place());
                    load(0);
                }
            }
            wait_for_products<1>();
            // The previous stage is no longer needed.
            if (group == 0) ring.release(to_release, lane);
        }
        to_release = empty;
    }
    wait_for_products<0>();
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    return to_release;
}

// Destination of sums, eight rows of x at a time, and the form of their stores.
struct Fast128Output {
    u16* to;  // this lane's, in the first eight rows of x
    u64 pitch;
    u32 rows, x_rows;  // rows: of the matrix, from the warp's first one on
    float bias[2];     // -0 if there is none, which changes no sum
    bool whole;        // all 16 rows exist, and pairs are aligned
    bool eights;       // this too, and groups of eight rows are aligned

    __device__ Fast128Output(const SplitMatrix& m, const Fast128Piece& item,
                             const Fast128Share& share) {
        const u32 lane = threadIdx.x % LANES;
        const u32 row = (item.first_strip + share.strip) * STRIP_ROWS + share.half * 16;
        pitch = m.y_pitch;
        to = m.y + row + lane % 4 * 2 + (item.x_first + lane / 4) * pitch;
        rows = share.strip < item.strips && row < m.rows ? m.rows - row : 0;
        x_rows = item.x_rows;
        const u64 places = reinterpret_cast<u64>(m.y) | pitch * 2;
        whole = rows >= 16 && places % 4 == 0;
        eights = whole && places % 16 == 0;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const u32 at = lane / 4 + 8 * k;
            bias[k] = m.bias && at < rows ? widen_bf16(__ldg(m.bias + row + at)) : -0.f;
        }
    }
    // Stores COUNT fragments of 16 rows of a strip by eight rows of x, from row `first` of x on.
    // With BY_EIGHTS one store writes eight rows of a strip, if they are aligned.
    template <u32 COUNT, bool BY_EIGHTS = false>
    __device__ __forceinline__ void store(u32 first, const float* sums) const {
        if constexpr (BY_EIGHTS)
            if (eights) return store_eights<COUNT>(first, sums);
        if (whole)
            store_as<COUNT, true>(first, sums);
        else
            store_as<COUNT, false>(first, sums);
    }
    template <u32 COUNT, bool WHOLE>
    __device__ __forceinline__ void store_as(u32 first, const float* sums) const {
        const u32 column = threadIdx.x % 4 * 2;
        u16* at = to + first * pitch;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++, at += 8 * pitch) {
            u32 pairs[2];
#pragma unroll
            for (u32 k = 0; k < 2; k++) pairs[k] = pair_of(sums + 4 * i, k);
            if (first + 8 * i + threadIdx.x % LANES / 4 >= x_rows) continue;
            store_pairs<WHOLE>(at, pairs, column, rows);
        }
    }
    // Stores a lane's pairs of rows `column` and `column` + 8 of the warp's 16, of which `rows`
    // exist. WHOLE: all do, and pairs are aligned.
    template <bool WHOLE>
    __device__ __forceinline__ static void store_pairs(u16* at, const u32 (&pairs)[2], u32 column,
                                                       u32 rows) {
        if (WHOLE) {
            reinterpret_cast<u32*>(at)[0] = pairs[0], reinterpret_cast<u32*>(at)[4] = pairs[1];
        } else {
            // Stores those that exist, one by one.
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                if (column + k / 2 * 8 + k % 2 < rows)
                    at[k / 2 * 8 + k % 2] = u16(pairs[k / 2] >> k % 2 * 16);
        }
    }
    // From two fragments, lanes 0 and 1 of a quad store the first one, lanes 2 and 3 the second.
    template <u32 COUNT>
    __device__ __forceinline__ void store_eights(u32 first, const float* sums) const {
        static_assert(COUNT % 2 == 0, "two at once");
        const u32 lane = threadIdx.x % LANES, q = lane % 4;
        u32 row = first + lane / 4 + q / 2 * 8;
        u16* at = to - q * 2 + (first + q / 2 * 8) * pitch + q % 2 * 8;
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 2, row += 16, at += 16 * pitch) {
            u32 words[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) words[k] = pair_of(sums + 4 * (i + k / 2), k % 2);
            transpose_quads(words, lane);
            if (row >= x_rows) continue;
            // The compiler would use four stores.
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words[0]),
                         "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }
    // Rounds half of a fragment's rows of the strip, in the order of y.
    __device__ u32 pair_of(const float* sums, u32 half) const {
        return transposed(round_two(sums[2 * half] + bias[half], sums[2 * half + 1] + bias[half]));
    }
    __device__ static u32 round_two(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    // Transposes the warp's 8 x 8 numbers: lane (g, q) has row g, columns 2 q and 2 q + 1.
    __device__ static u32 transposed(u32 pair) {
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(pair));
        return pair;
    }
};

// Adds the sums of some rows of x over all splits, in order, from the shared memory of the blocks
// that have them. For SPLITS splits; with FEWER for up to that many, eight rows of x after the
// other.
template <u32 N, u32 SPLITS, bool FEWER = false>
__device__ __forceinline__ void add_splits(const Fast128Item& item, u32 room,
                                           const Fast128Output& output) {
    constexpr u32 ALL = N / 8, EIGHTS = FEWER ? 1 : (ALL + SPLITS - 1) / SPLITS;
    const u32 each = FEWER ? (ALL + item.splits - 1) / item.splits : EIGHTS;
    const u32 first = item.split * each, end = min(min(first + each, ALL), (item.x_rows + 7) / 8);
    const u32 from = room + threadIdx.x * 16;
#pragma unroll 1
    for (u32 at = first; at < end; at += EIGHTS) {
        float sums[EIGHTS][SPLITS][4];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
#pragma unroll
            for (u32 k = 0; k < SPLITS; k++)
                if (at + i < end && (!FEWER || k < item.splits))
                    load_of_cluster(sums[i][k], from + (at + i) * FAST128_WARPS * LANES * 16,
                                    item.rank - item.split + k);
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            if (at + i >= end) break;
#pragma unroll
            for (u32 k = 1; k < SPLITS; k++)
#pragma unroll
                for (u32 n = 0; n < 4; n++)
                    if (!FEWER || k < item.splits) sums[i][0][n] += sums[i][k][n];
            output.store<1>((at + i) * 8, sums[i][0]);
        }
    }
}

template <u32 N>
__device__ __forceinline__ void linear_fast_128(const Fast128Launch& launch) {
    // Broadcast from lane 0, so that the compiler knows that all lanes have the same.
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    const Fast128Item item(launch, N);
    const u32 room = dynamic_shared_bytes();
    Fast128Ring ring(kept(shared_address(linear_shared)), room,
                     fast128_stage_bytes(N, max(item.strips, 1)));
    const u32 warpgroups = (item.strips + 1) / 2;
    ring.init_barriers(max(warpgroups, 1) * 4);
    __syncthreads();
    // All warps together take as many registers as the block begins with, which build.py checks:
    // with fewer a warp would wait for ever.
    if (warp >= FAST128_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (item.strips) ask_for_stages(launch, item, ring, warp - FAST128_WARPS, lane);
        prefetch_next(launch.prefetches, warp - FAST128_WARPS, FAST128_ASKING);
        __syncwarp();
        if (item.splits > 1) {
            meet_cluster();
            arrive_at_cluster();
            wait_for_cluster();
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const Fast128Share share;
    const bool active = share.warpgroup < warpgroups;
    if (active) {
        float sums[N / 2] = {};
        wait_for_launch_before();
        multiply_stages<N>(launch.matrices[item.matrix].rest, item,
                           item.strips * FAST128_STRIP_BYTES, ring, share, sums);
        if (item.splits == 1) {
            const Fast128Output output(launch.matrices[item.matrix], item, share);
            output.store<N / 8>(0, sums);
            return;
        }
        // The stages are no longer needed; sums take their place.
        group_barrier(1, warpgroups * 4 * LANES);
#pragma unroll
        for (u32 i = 0; i < N / 8; i++)
            store_shared_16(
                ring.first + (i * FAST128_WARPS * LANES + threadIdx.x) * 16,
                make_uint4(__float_as_uint(sums[4 * i]), __float_as_uint(sums[4 * i + 1]),
                           __float_as_uint(sums[4 * i + 2]), __float_as_uint(sums[4 * i + 3])));
    }
    if (item.splits == 1) return;
    meet_cluster();
    if (active) {
        const Fast128Output output(launch.matrices[item.matrix], item, share);
        if (item.splits == 2)
            add_splits<N, 2>(item, ring.first, output);
        else if (item.splits == 3)
            add_splits<N, 3>(item, ring.first, output);
        else if (item.splits == 4)
            add_splits<N, 4>(item, ring.first, output);
        else
            add_splits<N, FAST128_SPLITS, true>(item, ring.first, output);
    }
    // Waits until no block reads this one's memory any more.
    arrive_at_cluster();
    wait_for_cluster();
}
}  // namespace df11::linear
