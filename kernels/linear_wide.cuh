// Products of 17 to 128 rows of x, for compute capability 9.0: wgmma, with decoded weights as the A
// operand from registers, x as B from shared memory.
//
//   item      a cluster's work, four blocks. A block has up to eight strips of a matrix, and of the
//             columns all, a half or a quarter (parts, by shape alone: linear_task.cuh): the blocks
//             of a cluster have four groups of strips, two in halves, or one in quarters
//   stage     64 columns, two steps of each strip; a ring of them, filled with weights before the
//             launch before has ended
//   block     16 warps that multiply, 16 rows of a strip each, and four that ask, a stage each in
//             turn
//
//      warpgroup 0 | strips 0, 1 |  warp 0: rows 0 to 15 of strip 0, warp 1: rows 16 to 31, ...
//      ...         | ...         |  each warpgroup reads the x of a stage from shared memory
//      warpgroup 3 | strips 6, 7 |
//
//   x         comes in boxes of 64 columns by all rows, a copy each, by a tensor map that the host
//             makes: its order is wgmma's, as the fast layout has columns. If it is not aligned,
//             word by word, and a fence makes it visible to products
//   entries   those that ask put one for each product of 16 rows and 16 columns in a place of its
//             own in a stage, and tell which have some; of products with several, or tiles with
//             more than six, those that multiply load all of the tile
//   parts     of an item meet in the cluster's shared memory: each block adds the sums of some rows
//             of x, in the order of parts, out of all blocks. No workspace
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills; benches/record/2026-11-22-linear-wide.md): 96
// registers (104 for those that multiply, 64 for those that ask), 20 warps, a block a
// multiprocessor, 227 KiB of shared memory: with eight strips 6 stages for 64 rows of x, 5 for 128.
// About 125 instructions of a warp for 1,024 weights with 64 rows, of them 66 to load and decode.
// Sum of 6144 x 4096, 4096 x 4096, 28672 x 4096, 4096 x 14336 on an H200, in microseconds:
//   rows of x                            64      128
//   this, nvcc's build                   111.0   132.4
//   x by cp.async of 16 bytes            110.7   138.9
//   entries by a list                    111.9   143.9
//   entries by steps, not by products    112.1   150.3
//   x word by word besides               118.4   168.7
// cuBLASLt's best takes 122 and 129 to 131 there; on an H100 this is 1.26, 1.22 and 1.15 times as
// fast with 32, 64 and 128 rows (benches/record/2026-11-23-linear-large.md).
// What limits it. With 32 rows DRAM in large matrices (28672 x 4096: 3.80 TB/s), and about 5 us at
// the ends of a launch in small ones. With 128 rows issue slots and entries: beside products of 64
// clocks each a scheduler has room for about 16 instructions of a warp, and decoding takes as many.
// Without entries 133.8 us; without copies of x, and with entries by steps, 139.2.
//
// Rejected, in the record with their figures:
//   x word by word, or put in order in place, for a layout with columns in another order; x by
//   cp.async, or by loads and stores, of 16 bytes; x by the warps that multiply; a warp for weights
//   beside two or three for x; the fence by those that multiply; sums of parts through memory; x
//   arranged by a kernel before; clusters that share x; two warpgroups of 128 rows each; mma.sync
//   for 17 to 32 rows
//
// Safety: as linear.cu has it. Blocks wait for those of their cluster alone, which run at once.
#pragma once
#include "linear_bulk.cuh"
#include "linear_wgmma.cuh"

namespace df11::linear {
constexpr u32 WIDE_WARPS = 2 * WIDE_STRIPS;
constexpr u32 WIDE_ASKING = 4;
constexpr u32 WIDE_THREADS = (WIDE_WARPS + WIDE_ASKING) * LANES;
constexpr u32 WIDE_STEPS = WIDE_COLUMNS / STEP_COLUMNS;
static_assert(WIDE_STEPS == 2 && WIDE_WARPS == 16, "two buffers of weights, four warpgroups");

// First the barriers, full and empty; then heads of each stage's strips; then stages, aligned to
// 1024: weights, strip by strip, and x, 128 bytes for each row.
// A strip's head of a stage: for each half of its rows the base, which of its products have entries
// (bits 0 to 3: 2 step + product; bits 4 to 7: several), and a place for the one of each product;
// then the tile's first entry and the count.
constexpr u32 WIDE_STRIP_BYTES = WIDE_STEPS * STEP_BYTES;
constexpr u32 WIDE_HALF_HEAD = 8 + 4 * 2 * WIDE_STEPS;
constexpr u32 WIDE_HEAD = 64;
constexpr u32 WIDE_HEADS = WIDE_STRIPS * WIDE_HEAD;
constexpr u32 WIDE_ENTRIES = 6;
static_assert(2 * WIDE_HALF_HEAD + 8 <= WIDE_HEAD, "a head");
constexpr u32 WIDE_FIRST_BYTES = 2 * 8 + WIDE_HEADS;  // a stage
__host__ __device__ constexpr u32 wide_stage_bytes(u32 n, u32 strips) {
    return strips * WIDE_STRIP_BYTES + n * WIDE_COLUMNS * 2;
}
constexpr u32 WIDE_SHARED_BYTES = 227 * 1024;

// Lanes of a warp that arrive at a barrier for what all of them have read or written: one, after
// __syncwarp. That orders what the others did, too: bar.warp.sync synchronizes them with the lane
// that arrives (release), that with those that wait (acquire), and causality is transitive (PTX
// ISA, memory consistency model). Racecheck does not follow it; for it each lane arrives.
#ifdef EVERY_LANE_ARRIVES
constexpr u32 WIDE_ARRIVALS = LANES, WIDE_FILLING = 2 + LANES;
#else
constexpr u32 WIDE_ARRIVALS = 1, WIDE_FILLING = 2;
#endif
// Lets those that fill a stage, or a slot, write to it again; a barrier's address, or 0.
__device__ inline void release(u32 empty, u32 lane) {
    __syncwarp();
    if (empty && lane < WIDE_ARRIVALS) arrive(empty);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Strips and columns that a block multiplies at once.
struct WidePiece {
    u32 matrix, first_strip, strips;  // strips: none if the group is after the last
    u32 begin, end;                   // stages
    u32 x_first, x_rows, x_box;       // rows of x, and how many a copy of them has
};
// A block's part of an item.
struct WideItem : WidePiece {
    u32 parts, part;

    __device__ explicit WideItem(const LinearLaunch& launch) {
        const u32 rank = blockIdx.x % WIDE_CLUSTER, most = launch.wide_strips;
        u32 item = blockIdx.x / WIDE_CLUSTER, all = 0;
        for (matrix = 0; matrix < launch.matrix_count; matrix++) {
            parts = launch.wide_parts[matrix];
            all = strips_of(launch.matrices[matrix].rows);
            const u32 items = wide_items(all, parts, most);
            if (item < items) break;
            item -= items;
        }
        part = rank % parts;
        first_strip = (item * (WIDE_CLUSTER / parts) + rank / parts) * most;
        strips = min(max(all, first_strip) - first_strip, most);
        const u32 stages = wide_stage_count(launch.columns);
        begin = stages * part / parts;
        end = stages * (part + 1) / parts;
        x_first = 0;
        x_rows = x_box = launch.x_rows;
    }
};

// Of at most STAGES.
template <u32 STAGES>
struct StageRing {
    u32 barriers, first, bytes, count;
    u32 place, full, phase = 0;
    __device__ StageRing(u32 at, u32 room, u32 stage_bytes) : barriers(at), bytes(stage_bytes) {
        first = (at + STAGES * WIDE_FIRST_BYTES + 1023) / 1024 * 1024;
        count = min((at + room - first) / bytes, STAGES);
        place = first;
        full = at;
    }
    __device__ u32 empty() const { return full + STAGES * 8; }
    __device__ u32 heads() const {
        return barriers + STAGES * 16 + (full - barriers) * (WIDE_HEADS / 8);
    }
    __device__ void next() {
        place += bytes;
        full += 8;
        if (full == barriers + 8 * count) {
            place = first;
            full = barriers;
            phase ^= 1;
        }
    }
    // Those that fill a stage arrive twice, for weights and x, and those that multiply once a warp.
    __device__ void init_barriers(u32 warps) const {
        for (u32 i = 0; i < count; i++) {
            init_barrier(barriers + 8 * i, WIDE_FILLING);
            init_barrier(empty() + 8 * i, warps * WIDE_ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};
using WideRing = StageRing<MOST_STAGES>;

__device__ inline u64 once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
// As copy_bulk_once and arrive_expecting, by one lane; all together, alike.
__device__ inline void copy_bulk_by_one(u32 to, const void* from, u32 bytes, u32 barrier,
                                        u64 policy) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4; }" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ inline void arrive_expecting_once(u32 barrier, u32 bytes) {
    asm volatile(
        "{ .reg .pred p;\n.reg .b64 s;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
// What is known to be written to shared memory is there for products that come after.
__device__ inline void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// All of the cluster meet; what they have written to shared memory is there.
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// From where this block has an address, in the shared memory of a block of the cluster.
__device__ inline void load_of_cluster(float (&to)[4], u32 address, u32 rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, "
        "%3}, [a]; }"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(address), "r"(rank)
        : "memory");
}

// A column of words, of `rows` rows of x; columns that do not exist are zero.
__device__ __noinline__ void copy_words_slowly(const u16* from, u64 pitch, u32 rows, u32 count,
                                               u32 to) {
#pragma unroll 1
    for (u32 i = 0; i < rows; i++, from += pitch) {
        u32 word = count > 0 ? from[0] : 0;
        if (count > 1) word |= u32(from[1]) << 16;
        store_shared((to ^ i % 8 * 16) + i * 128, word);
    }
}
// The 64 columns of x of a stage, by a warp, word by word; pieces of 16 bytes are swizzled
// (linear_wgmma.cuh).
__device__ __forceinline__ void copy_x_slowly(const LinearLaunch& launch, const WidePiece& piece,
                                              u32 stage, u32 place, u32 lane) {
    const u32 mine = stage * WIDE_COLUMNS + 2 * lane;
    copy_words_slowly(launch.x + piece.x_first * launch.x_pitch + mine, launch.x_pitch,
                      piece.x_rows, max(launch.columns, mine) - mine, place + lane * 4);
    fence_shared();
}
// Rows of x from `row` on, 64 columns, zeros where there are none, by one lane; all together,
// alike.
__device__ inline void copy_x_by_one(u32 to, const XMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %3}], [%4]; }" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// What the warps that multiply must know of a strip, tile by tile, for a lane of those that ask.
// Heads are loaded two tiles before they are needed, and first entries one tile before.
struct WideHeads {
    const uint2* next;  // of the tile after next
    const u32* entries;
    u64 entry_count;
    u32 tiles;  // from the one after next on
    Head head, after;
    u32 first[WIDE_ENTRIES];

    __device__ WideHeads(const LinearLaunch& launch, const WidePiece& item, u32 strip, u32 stage) {
        const LinearMatrix& m = launch.matrices[item.matrix];
        const u32 tile = stage * WIDE_STEPS / TILE_STEPS;
        next = static_cast<const uint2*>(m.index) +
               u64(item.first_strip + strip) * tiles_across(m.whole_columns) + tile;
        entries = static_cast<const u32*>(m.rest);
        entry_count = m.rest_count;
        tiles = tiles_across(launch.columns) - tile;
        load_head(head), load_entries(launch.status), load_head(after);
    }
    __device__ void load_head(Head& to) {
        to.words = tiles ? __ldg(next) : make_uint2(0, 0);
        if (tiles) tiles--, next++;
    }
    __device__ void load_entries(u32* status) {
        const u32 at = head.first();
        // A head may name entries that do not exist.
        if (head.count() && u64(at) + head.count() > entry_count) {
            atomicOr(status, STATUS_ENTRIES);
            head.words.y = (head.words.y & 0xFFFF0000u) | u32(max(entry_count, u64(at)) - at);
        }
#pragma unroll
        for (u32 i = 0; i < WIDE_ENTRIES; i++)
            if (i < head.count()) first[i] = __ldg(entries + at + i);
    }
    // Writes the entries to the places of their products. Which have some, of the second half 16
    // bits higher.
    __device__ u32 tell_entries(u32 stage, u32 to) const {
        constexpr u32 STAGES = TILE_STEPS / WIDE_STEPS;
        const u32 steps = head.words.y >> (16 + stage % STAGES * WIDE_STEPS) & 3;
        u32 products = 0;
        if (!steps) return products;
        if (head.count() > WIDE_ENTRIES) return (steps >> 1) * 0xCC00CC | (steps & 1) * 0x330033;
#pragma unroll
        for (u32 i = 0; i < WIDE_ENTRIES; i++) {
            const u32 entry = first[i];
            if (i >= head.count() || entry >> 27 != stage % STAGES) continue;
            const u32 half = entry >> 20 & 1;
            const u32 place = (entry >> 25 & 2) + (entry >> 18 & 1);
            const u32 bit = 16 * half + place;
            products |= (products >> bit & 1) << (4 + bit) | 1u << bit;
            store_shared(to + half * WIDE_HALF_HEAD + 8 + 4 * place, entry);
        }
        return products;
    }
    // Writes the head of a stage. Then goes on to the next tile.
    __device__ void tell(u32 stage, u32 to, u32* status) {
        const u32 products = tell_entries(stage, to);
        store_shared_8(to, make_uint2(head.base(), products & 0xFFFF));
        store_shared_8(to + WIDE_HALF_HEAD, make_uint2(head.base(), products >> 16));
        store_shared_8(to + 2 * WIDE_HALF_HEAD, make_uint2(head.first(), head.count()));
        head = after;
        load_entries(status), load_head(after);
    }
};
// The second step of a strip, where it does not exist: weights that are finite.
__device__ __noinline__ void clear_step(u32 to) {
#pragma unroll 1
    for (u32 i = 0; i < STEP_BYTES; i += 16) {
        const u32 word = i < 1024 ? 0 : ~0u;  // codes 15
        store_shared_16(to + STEP_BYTES + i, make_uint4(word, word, word, word));
    }
}

// What a warp that asks does for a piece. The warps take turns, a stage each.
template <class Ring>
struct WideAsking {
    static_assert(WIDE_ASKING * WIDE_STEPS == TILE_STEPS, "a turn is a tile further");
    const LinearLaunch& launch;
    const WidePiece piece;
    u32 first, lane;  // first: stage of this warp
    u64 policy, strip_bytes;
    const u8* data;

    __device__ WideAsking(const LinearLaunch& l, const WidePiece& p, u32 first_stage, u32 lane_)
        : launch(l), piece(p), first(first_stage), lane(lane_) {
        const LinearMatrix& m = launch.matrices[piece.matrix];
        policy = once_policy();
        strip_bytes = u64(steps_of(m.whole_columns)) * STEP_BYTES;
        data = m.data + piece.first_strip * strip_bytes;
    }
    __device__ u32 weight_bytes(u32 stage) const {
        return min(steps_of(launch.columns) - stage * WIDE_STEPS, WIDE_STEPS) * STEP_BYTES;
    }
    __device__ __forceinline__ void ask_for_weights(u32 stage, const Ring& ring) const {
        const u32 bytes = weight_bytes(stage);
        const u8* from = data + u64(stage) * WIDE_STRIP_BYTES;
        arrive_expecting_once(ring.full, piece.strips * bytes);
#pragma unroll
        for (u32 i = 0; i < WIDE_STRIPS; i++, from += strip_bytes)
            if (i < piece.strips)
                copy_bulk_by_one(ring.place + i * WIDE_STRIP_BYTES, from, bytes, ring.full, policy);
    }
    __device__ __forceinline__ void ask_for_x(u32 stage, const Ring& ring, u32 x_place) const {
        const u32 to = ring.place + x_place;
        if (!launch.x_mapped) copy_x_slowly(launch, piece, stage, to, lane);
        if (WIDE_ARRIVALS > 1) arrive(ring.full);
        __syncwarp();
        arrive_expecting_once(ring.full, launch.x_mapped ? piece.x_box * WIDE_COLUMNS * 2 : 0);
        if (launch.x_mapped)
            copy_x_by_one(to, launch.x_map, stage * WIDE_COLUMNS, piece.x_first, ring.full);
    }
    __device__ static void next(Ring& ring) {
#pragma unroll
        for (u32 i = 0; i < WIDE_ASKING; i++) ring.next();
    }
    // Weights of the stages before `filled`, which nobody must make room for.
    __device__ __forceinline__ void fill(u32 filled, Ring ring) const {
#pragma unroll 1
        for (u32 stage = first; stage < filled; stage += WIDE_ASKING, next(ring))
            ask_for_weights(stage, ring);
    }
    // All stages, with x at `x_place` in each; of those before `filled` the weights were asked for.
    // They are there before the launch before has ended, if `early`.
    __device__ __forceinline__ void ask(u32 filled, Ring& ring, u32 x_place, bool early) const {
        const bool has_strip = lane < piece.strips;
        WideHeads heads(launch, piece, has_strip ? lane : 0, first);
        if (early) wait_for_launch_before();
#pragma unroll 1
        for (u32 stage = first; stage < piece.end; stage += WIDE_ASKING, next(ring)) {
            if (stage >= filled) {
                wait_for(ring.empty(), ring.phase ^ 1);
                ask_for_weights(stage, ring);
            }
            if (has_strip) {
                heads.tell(stage, ring.heads() + lane * WIDE_HEAD, launch.status);
                if (weight_bytes(stage) < WIDE_STRIP_BYTES)
                    clear_step(ring.place + lane * WIDE_STRIP_BYTES);
            }
            ask_for_x(stage, ring, x_place);
        }
    }
};

// They fill the ring with weights before the launch before has ended.
__device__ __forceinline__ void ask_for_stages(const LinearLaunch& launch, const WideItem& item,
                                               WideRing ring, u32 warp, u32 lane) {
    const u32 filled = min(item.begin + ring.count, item.end);
    for (u32 i = 0; i < warp; i++) ring.next();
    const WideAsking<WideRing> asking(launch, item, item.begin + warp, lane);
    asking.fill(filled, ring);
    asking.ask(filled, ring, item.strips * WIDE_STRIP_BYTES, true);
}

// Weights of 16 columns of 16 rows of a strip: product `j` of a step's two, out of the signs and
// mantissas of two rows, and their codes.
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
// Puts an entry in its place, if it is of this lane and product.
__device__ __forceinline__ void place_entry(u32 (&weights)[4], u32 entry, bool mine) {
    const u32 place = (entry >> 19 & 1) + (entry >> 16 & 2);
    const u32 order = entry >> 16 & 1 ? 0x5410 : 0x3254;
#pragma unroll
    for (u32 n = 0; n < 4; n++)
        if (mine && place == n) weights[n] = __byte_perm(weights[n], entry, order);
}
// Several of a product, out of all of the tile. `head`: the warp's half of it; `which`: bits 20 on
// of an entry that is this lane's, in the step and the half.
__device__ __forceinline__ void place_entries_slowly(u32 (&weights)[4], u32 head,
                                                     const u32* entries, u32 which, u32 product) {
    const uint2 all = load_shared_8(head + (which & 1 ? 1 : 2) * WIDE_HALF_HEAD);
#pragma unroll 1
    for (u32 i = 0; i < all.y; i++) {
        const u32 entry = __ldg(entries + all.x + i);
        place_entry(weights, entry, entry >> 20 == which && (entry >> 18 & 1) == product);
    }
}

// Which rows of the block's strips a warp has.
struct WideShare {
    u32 warpgroup, strip, half;
    __device__ WideShare() {
        // By lane 0, so that the compiler takes it for the same in all lanes.
        const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
        warpgroup = warp / 4;
        strip = warp / 2;
        half = warp % 2;
    }
};

// All stages of a piece, of which x is at `x_place`. The last one is released afterwards.
template <u32 N, class Ring>
__device__ __forceinline__ u32 multiply_stages(const LinearLaunch& launch, const WidePiece& item,
                                               u32 x_place, Ring& ring, const WideShare& share,
                                               float (&sums)[N / 2]) {
    const u32* const entries = static_cast<const u32*>(launch.matrices[item.matrix].rest);
    const u32 lane = kept(threadIdx.x % LANES);
    // A warpgroup's second strip may not exist: then nobody uses what it has of the first one.
    const u32 strip = min(share.strip, item.strips - 1);
    const u32 planes = kept(strip * WIDE_STRIP_BYTES + share.half * 512 + lane * 16);
    const u32 codes = kept(strip * WIDE_STRIP_BYTES + 1024 + share.half * 8 + lane * 16);
    // By lane 0, so that the compiler does not make it again in each stage.
    const u32 heads = __shfl_sync(ALL_LANES,
                                  ring.heads() - ring.full * (WIDE_HEADS / 8) +
                                      min(threadIdx.x / (2 * LANES), item.strips - 1) * WIDE_HEAD +
                                      threadIdx.x / LANES % 2 * WIDE_HALF_HEAD,
                                  0);
    const u32 x_first = kept(describe_x(x_place));
    const u32 end = kept(item.end);
    u32 to_release = 0;
    // Two buffers of weights, of one product where there are many sums.
    constexpr u32 PRODUCTS = N == 128 ? 1 : 2;
    constexpr u32 GROUPS = 2 * WIDE_STEPS / PRODUCTS;
#pragma unroll 1
    for (u32 stage = item.begin; stage < end; stage++) {
        wait_for(ring.full, ring.phase);
        const u32 head = ring.full * (WIDE_HEADS / 8) + heads;
        const uint2 base_and_more = load_shared_8(head);
        const u32 x = (ring.place >> 4) + x_first;
        const u32 base = base_and_more.x;
        const u32 more = base_and_more.y;
        uint4 plane[WIDE_STEPS];
        uint2 code[WIDE_STEPS];
        auto load = [&](u32 i) {
            plane[i] = load_shared_16(ring.place + planes + i * STEP_BYTES);
            code[i] = load_shared_8(ring.place + codes + i * STEP_BYTES);
        };
        u32 weights[2][PRODUCTS][4];
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const u32 step = group * PRODUCTS / 2, first = group * PRODUCTS % 2;
            auto& mine = weights[group % 2];
            // The second step's some time before they are needed.
            if (group == 0) load(0);
            if (group == (PRODUCTS == 1 ? 1 : 0)) load(1);
#pragma unroll
            for (u32 j = 0; j < PRODUCTS; j++)
                decode_product(mine[j], first + j, plane[step], code[step], base);
#pragma unroll
            for (u32 j = 0; j < PRODUCTS; j++) {
                const u32 place = 2 * step + first + j;
                if (!(more >> place & 1)) continue;
                if (more >> (4 + place) & 1) {
                    const u32 which =
                        (stage * WIDE_STEPS + step) % TILE_STEPS << 6 | lane << 1 | share.half;
                    place_entries_slowly(mine[j], head, entries, which, first + j);
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
            wait_for_products<1>();
            // The stage before is done with.
            if (group == 0) release(to_release, lane);
        }
        to_release = ring.empty();
        ring.next();
    }
    wait_for_products<0>();
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    return to_release;
}

// Where sums of eight rows of x go, and how.
struct WideOutput {
    u16* to;  // of this lane, in the first eight rows of x
    u64 pitch;
    u32 rows, x_rows;  // rows: of the matrix, from the warp's first one on
    float bias[2];     // without one -0, which changes no sum
    bool whole;        // all 16 rows exist, and pairs are aligned
    bool eights;       // likewise, and eight rows are aligned

    __device__ WideOutput(const LinearLaunch& launch, const WidePiece& item,
                          const WideShare& share) {
        const LinearMatrix& m = launch.matrices[item.matrix];
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
    // COUNT fragments of 16 rows of a strip by eight rows of x, from row `first` of x on.
    // BY_EIGHTS: eight rows of a strip by one store, if they are aligned.
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
            if (WHOLE) {
                reinterpret_cast<u32*>(at)[0] = pairs[0], reinterpret_cast<u32*>(at)[4] = pairs[1];
            } else {
                // One by one, what exists.
#pragma unroll
                for (u32 k = 0; k < 4; k++)
                    if (column + k / 2 * 8 + k % 2 < rows)
                        at[k / 2 * 8 + k % 2] = u16(pairs[k / 2] >> k % 2 * 16);
            }
        }
    }
    // Of two fragments lanes 0 and 1 of a quad store the first one's, 2 and 3 the second one's.
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
            // The compiler would take four stores.
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words[0]),
                         "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }
    // Half of a fragment's rows of the strip, rounded, in the order of y.
    __device__ u32 pair_of(const float* sums, u32 half) const {
        return transposed(round_two(sums[2 * half] + bias[half], sums[2 * half + 1] + bias[half]));
    }
    __device__ static u32 round_two(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    // Of the warp's 8 x 8: lane (g, q) has row g, columns 2 q and 2 q + 1.
    __device__ static u32 transposed(u32 pair) {
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(pair));
        return pair;
    }
};

__device__ inline void store_sums(u32 address, const float* v) {
    store_shared_16(address, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]),
                                        __float_as_uint(v[2]), __float_as_uint(v[3])));
}
// Sums of some rows of x by all parts, in order, out of the shared memory of the blocks that have
// them.
template <u32 N, u32 PARTS>
__device__ __forceinline__ void add_parts(const WideItem& item, u32 room,
                                          const WideOutput& output) {
    constexpr u32 EIGHTS = N / 8 / PARTS;
    const u32 first_rank = blockIdx.x % WIDE_CLUSTER - item.part;
    const u32 from = room + (item.part * EIGHTS * WIDE_WARPS * LANES + threadIdx.x) * 16;
    float sums[EIGHTS][PARTS][4];
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++)
#pragma unroll
        for (u32 k = 0; k < PARTS; k++)
            load_of_cluster(sums[i][k], from + i * WIDE_WARPS * LANES * 16, first_rank + k);
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
#pragma unroll
        for (u32 k = 1; k < PARTS; k++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) sums[i][0][n] += sums[i][k][n];
        output.store<1>((item.part * EIGHTS + i) * 8, sums[i][0]);
    }
}

template <u32 N>
__device__ __forceinline__ void linear_wide(const LinearLaunch& launch) {
    // By lane 0, so that the compiler takes it for the same in all lanes.
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    const WideItem item(launch);
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    WideRing ring(kept(shared_address(linear_shared)), room,
                  wide_stage_bytes(N, max(item.strips, 1)));
    const u32 warpgroups = (item.strips + 1) / 2;
    if (threadIdx.x == 0) ring.init_barriers(max(warpgroups, 1) * 4);
    __syncthreads();
    // Together as many registers as the block begins with, which build.py compares: with fewer
    // a warp would wait for ever.
    if (warp >= WIDE_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (item.strips) ask_for_stages(launch, item, ring, warp - WIDE_WARPS, lane);
        __syncwarp();
        if (item.parts > 1) {
            meet_cluster();
            arrive_at_cluster();
            wait_for_cluster();
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const WideShare share;
    const bool active = share.warpgroup < warpgroups;
    if (active) {
        float sums[N / 2] = {};
        wait_for_launch_before();
        multiply_stages<N>(launch, item, item.strips * WIDE_STRIP_BYTES, ring, share, sums);
        if (item.parts == 1) {
            const WideOutput output(launch, item, share);
            output.store<N / 8>(0, sums);
            return;
        }
        // The stages are done with: sums take their place.
        group_barrier(1, warpgroups * 4 * LANES);
#pragma unroll
        for (u32 i = 0; i < N / 8; i++)
            store_sums(ring.first + (i * WIDE_WARPS * LANES + threadIdx.x) * 16, sums + 4 * i);
    }
    if (item.parts == 1) return;
    meet_cluster();
    if (active) {
        const WideOutput output(launch, item, share);
        if (item.parts == 2)
            add_parts<N, 2>(item, ring.first, output);
        else
            add_parts<N, 4>(item, ring.first, output);
    }
    // Until no block reads here any more.
    arrive_at_cluster();
    wait_for_cluster();
}
#endif
}  // namespace df11::linear
