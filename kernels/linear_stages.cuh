// A block's piece of a product with more than 16 rows of x, and the ring of stages that brings it
// weights, heads and x (linear_fast_128.cuh).
#pragma once
#include "linear_bulk.cuh"
#include "linear_wgmma.cuh"

namespace df11::linear {
constexpr u32 FAST128_WARPS = 2 * FAST128_STRIPS;
constexpr u32 FAST128_ASKING = 4;
constexpr u32 FAST128_THREADS = (FAST128_WARPS + FAST128_ASKING) * LANES;
constexpr u32 FAST128_STEPS = FAST128_COLUMNS / STEP_COLUMNS;
static_assert(FAST128_STEPS == 2 && FAST128_WARPS == 16, "two buffers of weights, four warpgroups");

// Shared memory has first the barriers, full and empty; then the heads of each stage's strips; then
// the stages, aligned to 1024 bytes: weights, strip by strip, and x, 128 bytes per row.
//
// A strip's head of a stage has, for each half of its rows: the base; which of its products have
// entries (bits 0 to 3: 2 step + product; bits 4 to 7: several entries); and for each product a
// place for one entry. The tile's first entry and the number of its entries follow.
constexpr u32 FAST128_STRIP_BYTES = FAST128_STEPS * STEP_BYTES;
constexpr u32 FAST128_HALF_HEAD = 8 + 4 * 2 * FAST128_STEPS;
constexpr u32 FAST128_HEAD = 64;
constexpr u32 FAST128_HEADS = FAST128_STRIPS * FAST128_HEAD;
constexpr u32 FAST128_ENTRIES = 6;
static_assert(2 * FAST128_HALF_HEAD + 8 <= FAST128_HEAD, "a head");
constexpr u32 FAST128_FIRST_BYTES = 2 * 8 + FAST128_HEADS;  // bytes per stage
__host__ __device__ constexpr u32 fast128_stage_bytes(u32 n, u32 strips) {
    return strips * FAST128_STRIP_BYTES + n * FAST128_COLUMNS * 2;
}
constexpr u32 FAST128_SHARED_BYTES = 227 * 1024;

// Number of a warp's lanes that arrive at a barrier for what all of them have read or written: one,
// after __syncwarp. This orders what the other lanes did, too: bar.warp.sync synchronizes them with
// the arriving lane (release), this lane synchronizes with the waiting ones (acquire), and
// causality is transitive (PTX ISA, memory consistency model). Racecheck does not follow it; for it
// each lane arrives.
#ifdef EVERY_LANE_ARRIVES
constexpr u32 WARP_ARRIVALS = LANES, FAST128_FILLING = 2 + LANES;
#else
constexpr u32 WARP_ARRIVALS = 1, FAST128_FILLING = 2;
#endif
// A block that shares no stages with another one.
struct Alone {
    __device__ void arrive_beside(u32) const {}
};
// Lets the warps that fill a stage or a slot write to it again, those of the other block of a pair
// too. `empty`: a barrier's address, or 0.
template <class Pair = Alone>
__device__ inline void release(u32 empty, u32 lane, const Pair& pair = {}) {
    __syncwarp();
    if (!empty || lane >= WARP_ARRIVALS) return;
    arrive(empty);
    pair.arrive_beside(empty);
}

// Strips and columns that a block multiplies at once.
struct Fast128Piece {
    u32 matrix, first_strip, strips;  // strips: 0 if the group is after the last one
    u32 begin, end;                   // stages
    u32 x_first, x_rows, x_box;       // rows of x, and how many of them one copy has
};
// Number of blocks in this block's cluster.
__device__ inline u32 cluster_blocks() {
    u32 count;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
    return count;
}
// A block's split of an item.
struct Fast128Item : Fast128Piece {
    u32 splits, split, rank;  // rank: in the cluster

    // Makes bands of up to `n` rows of x.
    __device__ Fast128Item(const Fast128Launch& launch, u32 n) {
        const u32 cluster = cluster_blocks(), most = launch.strips;
        const u32 bands = fast128_bands(launch.x_rows, n), place = blockIdx.x / cluster;
        u32 item = place / bands, all = 0;
        rank = blockIdx.x % cluster;
        for (matrix = 0; matrix < launch.matrix_count; matrix++) {
            splits = launch.matrices[matrix].splits;
            all = strips_of(launch.matrices[matrix].rows);
            const u32 items = fast128_items(all, splits, most, cluster);
            if (item < items) break;
            item -= items;
        }
        // If splits do not fill a cluster, some of its blocks have no strips.
        const u32 each = cluster / splits, group = rank / splits;
        split = rank % splits;
        first_strip = (item * each + group) * most;
        strips = group < each ? min(max(all, first_strip) - first_strip, most) : 0;
        const u32 stages = fast128_stage_count(launch.columns);
        const u32 length = split_stages(launch.columns, splits);
        begin = min(split * length, stages);
        end = min(begin + length, stages);
        x_box = fast128_band_rows(launch.x_rows, n);
        x_first = place % bands * x_box;
        x_rows = min(max(launch.x_rows, x_first) - x_first, x_box);
    }
};

// A ring of at most STAGES stages.
template <u32 STAGES>
struct StageRing {
    u32 barriers, first, bytes, count;
    u32 place, full, phase = 0;
    __device__ StageRing(u32 at, u32 room, u32 stage_bytes) : barriers(at), bytes(stage_bytes) {
        first = (at + STAGES * FAST128_FIRST_BYTES + 1023) / 1024 * 1024;
        count = min((at + room - first) / bytes, STAGES);
        place = first;
        full = at;
    }
    __device__ u32 empty() const { return full + STAGES * 8; }
    __device__ u32 heads() const {
        return barriers + STAGES * 16 + (full - barriers) * (FAST128_HEADS / 8);
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
    // Lets the warps that fill a stage write to it again.
    __device__ static void release(u32 empty, u32 lane) { linear::release(empty, lane); }
    // All warps call it, and meet afterwards: each initialises some barriers, 60 clocks each. Warps
    // that fill a stage arrive twice, for weights and for x; each of `warps` that multiply once.
    __device__ void init_barriers(u32 warps) const {
        if (threadIdx.x % LANES) return;
        for (u32 i = threadIdx.x / LANES; i < count; i += blockDim.x / LANES) {
            init_barrier(barriers + 8 * i, FAST128_FILLING);
            init_barrier(empty() + 8 * i, warps * WARP_ARRIVALS);
        }
        show_barriers();
    }
};
using Fast128Ring = StageRing<MAX_STAGES>;

// Like copy_bulk_once, by one lane; all lanes call it together with the same arguments.
__device__ inline void copy_bulk_by_one(u32 to, const void* from, u32 bytes, u32 barrier,
                                        u64 policy) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4; }" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// Prefetches to L2, by one lane; all lanes call it together with the same arguments.
__device__ inline void prefetch_bulk(const void* from, u32 bytes) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.prefetch.L2.global [%0], %1; }" ::"l"(from),
        "r"(bytes)
        : "memory");
}
// Brings to L2 this block's share of what the next product reads first. `turn` warps do so; this
// one is `number`.
__device__ inline void prefetch_next(const LinearPrefetch (&prefetches)[LINEAR_PREFETCHES],
                                     u32 number, u32 turn) {
#pragma unroll 1
    for (const LinearPrefetch& next : prefetches)
        for (u32 k = blockIdx.x + gridDim.x * number; k < next.pieces; k += gridDim.x * turn)
            prefetch_bulk(next.data + k / next.splits * next.strip_pitch +
                              u64(k % next.splits) * next.split_pitch,
                          next.bytes);
}
// Like arrive_expecting, by one lane; all lanes call it together with the same arguments.
__device__ inline void arrive_expecting_once(u32 barrier, u32 bytes) {
    asm volatile(
        "{ .reg .pred p;\n.reg .b64 s;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
// All threads of the cluster meet; what they wrote to shared memory before is visible afterwards.
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Loads from the shared memory of block `rank` of the cluster; `address` is this block's own.
__device__ inline void load_of_cluster(float (&to)[4], u32 address, u32 rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, "
        "%3}, [a]; }"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(address), "r"(rank)
        : "memory");
}

// Copies a column of words, of `rows` rows of x; columns that do not exist become zero.
__device__ __noinline__ void copy_words_slowly(const u16* from, u64 pitch, u32 rows, u32 count,
                                               u32 to) {
#pragma unroll 1
    for (u32 i = 0; i < rows; i++, from += pitch) {
        u32 word = count > 0 ? from[0] : 0;
        if (count > 1) word |= u32(from[1]) << 16;
        store_shared((to ^ i % 8 * 16) + i * 128, word);
    }
}
// Copies 64 columns of rows of x from `row` on, zeros where there are none, by one lane; all lanes
// call it together with the same arguments.
__device__ inline void copy_x_by_one(u32 to, const XMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %3}], [%4]; }" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Like copy_x_by_one, into this block and the other one of a pair.
__device__ inline void copy_x_to_pair(u32 to, const XMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "{ .reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p "
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5; }" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(u16(3))
        : "memory");
}

// Data about a strip, tile by tile, that the multiplying warps need; each lane of a requesting warp
// has one strip. Heads are loaded two tiles before they are needed, first entries one tile before.
struct Fast128Heads {
    const uint2* next;  // head of the tile after next
    const u32* entries;
    u64 entry_count;
    u32 tiles;  // number of tiles from that one on
    Head head, after;
    u32 first[FAST128_ENTRIES];

    __device__ Fast128Heads(const LinearMatrix& m, u32 columns, u32 strip, u32 stage, u32* status) {
        const u32 tile = stage * FAST128_STEPS / TILE_STEPS;
        next =
            static_cast<const uint2*>(m.index) + u64(strip) * tiles_across(m.whole_columns) + tile;
        entries = static_cast<const u32*>(m.rest);
        entry_count = m.rest_count;
        tiles = tiles_across(columns) - tile;
        load_head(head), load_entries(status), load_head(after);
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
        for (u32 i = 0; i < FAST128_ENTRIES; i++)
            if (i < head.count()) first[i] = __ldg(entries + at + i);
    }
    // Writes the entries to the places of their products. Returns which products have some, with
    // the bits of the second half 16 higher.
    __device__ u32 tell_entries(u32 stage, u32 to) const {
        constexpr u32 STAGES = TILE_STEPS / FAST128_STEPS;
        const u32 steps = head.words.y >> (16 + stage % STAGES * FAST128_STEPS) & 3;
        u32 products = 0;
        if (!steps) return products;
        if (head.count() > FAST128_ENTRIES) return (steps >> 1) * 0xCC00CC | (steps & 1) * 0x330033;
#pragma unroll
        for (u32 i = 0; i < FAST128_ENTRIES; i++) {
            const u32 entry = first[i];
            if (i >= head.count() || entry >> 27 != stage % STAGES) continue;
            const u32 half = entry >> 20 & 1;
            const u32 place = (entry >> 25 & 2) + (entry >> 18 & 1);
            const u32 bit = 16 * half + place;
            products |= (products >> bit & 1) << (4 + bit) | 1u << bit;
            store_shared(to + half * FAST128_HALF_HEAD + 8 + 4 * place, entry);
        }
        return products;
    }
    // Writes the head of a stage, then goes on to the next tile.
    __device__ void tell(u32 stage, u32 to, u32* status) {
        const u32 products = tell_entries(stage, to);
        store_shared_8(to, make_uint2(head.base(), products & 0xFFFF));
        store_shared_8(to + FAST128_HALF_HEAD, make_uint2(head.base(), products >> 16));
        store_shared_8(to + 2 * FAST128_HALF_HEAD, make_uint2(head.first(), head.count()));
        head = after;
        load_entries(status), load_head(after);
    }
};
// Gives a strip's second step, if it does not exist, finite weights.
__device__ __noinline__ void clear_step(u32 to) {
#pragma unroll 1
    for (u32 i = 0; i < STEP_BYTES; i += 16) {
        const u32 word = i < 1024 ? 0 : ~0u;  // codes 15
        store_shared_16(to + STEP_BYTES + i, make_uint4(word, word, word, word));
    }
}

// Matrices that share x: the matrix of a piece, and requests of x by a warp.
template <class Launch>
struct Fast128Shared {
    const Launch& launch;
    __device__ const SplitMatrix& matrix(const Fast128Piece& piece) const {
        return launch.matrices[piece.matrix];
    }
    // Requests a stage's x, and arrives at its barrier.
    __device__ __forceinline__ void ask_for_x(const Fast128Piece& piece, u32 stage, u32 to,
                                              u32 barrier, u32 lane) const {
        if (!launch.x_mapped) {
            // Word by word; the 16-byte pieces are swizzled (linear_wgmma.cuh).
            const u32 mine = stage * FAST128_COLUMNS + 2 * lane;
            copy_words_slowly(launch.x + piece.x_first * launch.x_pitch + mine, launch.x_pitch,
                              piece.x_rows, max(launch.columns, mine) - mine, to + lane * 4);
            fence_shared();
        }
        if (WARP_ARRIVALS > 1) arrive(barrier);
        __syncwarp();
        arrive_expecting_once(barrier, launch.x_mapped ? piece.x_box * FAST128_COLUMNS * 2 : 0);
        if (launch.x_mapped)
            copy_x_by_one(to, launch.x_map, stage * FAST128_COLUMNS, piece.x_first, barrier);
    }
};

// Work of a requesting warp for a piece. The warps take turns, a stage each.
template <class Work, class Ring>
struct Fast128Asking {
    static_assert(FAST128_ASKING * FAST128_STEPS == TILE_STEPS, "a turn is a tile further");
    const Work& work;
    const Fast128Piece piece;
    u32 first, lane;  // first: first stage of this warp
    u64 policy, strip_bytes;
    const u8* data;

    __device__ Fast128Asking(const Work& w, const Fast128Piece& p, u32 first_stage, u32 lane_)
        : work(w), piece(p), first(first_stage), lane(lane_) {
        const LinearMatrix& m = work.matrix(piece);
        policy = once_policy();
        strip_bytes = u64(steps_of(m.whole_columns)) * STEP_BYTES;
        data = m.data + piece.first_strip * strip_bytes;
    }
    __device__ u32 weight_bytes(u32 stage) const {
        return min(steps_of(work.launch.columns) - stage * FAST128_STEPS, FAST128_STEPS) *
               STEP_BYTES;
    }
    __device__ __forceinline__ void ask_for_weights(u32 stage, const Ring& ring) const {
        const u32 bytes = weight_bytes(stage);
        const u8* from = data + u64(stage) * FAST128_STRIP_BYTES;
        arrive_expecting_once(ring.full, piece.strips * bytes);
#pragma unroll
        for (u32 i = 0; i < FAST128_STRIPS; i++, from += strip_bytes)
            if (i < piece.strips)
                copy_bulk_by_one(ring.place + i * FAST128_STRIP_BYTES, from, bytes, ring.full,
                                 policy);
    }
    __device__ static void next(Ring& ring) {
#pragma unroll
        for (u32 i = 0; i < FAST128_ASKING; i++) ring.next();
    }
    // Requests the weights of the stages before `filled`, which wait for no other stage to be
    // empty.
    __device__ __forceinline__ void fill(u32 filled, Ring ring) const {
#pragma unroll 1
        for (u32 stage = first; stage < filled; stage += FAST128_ASKING, next(ring))
            ask_for_weights(stage, ring);
    }
    // Requests all stages, with x at `x_place` in each; `fill` has requested the weights of those
    // before `filled`. If `early`, it did so before the previous launch had ended, for which this
    // then waits.
    __device__ __forceinline__ void ask(u32 filled, Ring& ring, u32 x_place, bool early) const {
        const bool has_strip = lane < piece.strips;
        Fast128Heads heads(work.matrix(piece), work.launch.columns,
                           piece.first_strip + (has_strip ? lane : 0), first, work.launch.status);
        if (early) wait_for_launch_before();
#pragma unroll 1
        for (u32 stage = first; stage < piece.end; stage += FAST128_ASKING, next(ring)) {
            if (stage >= filled) {
                wait_for(ring.empty(), ring.phase ^ 1);
                ask_for_weights(stage, ring);
            }
            if (has_strip) {
                heads.tell(stage, ring.heads() + lane * FAST128_HEAD, work.launch.status);
                if (weight_bytes(stage) < FAST128_STRIP_BYTES)
                    clear_step(ring.place + lane * FAST128_STRIP_BYTES);
            }
            work.ask_for_x(piece, stage, ring.place + x_place, ring.full, lane);
        }
    }
};

// Requests all stages; fills the ring with weights before the previous launch has ended.
__device__ __forceinline__ void ask_for_stages(const Fast128Launch& launch, const Fast128Item& item,
                                               Fast128Ring ring, u32 warp, u32 lane) {
    const u32 filled = min(item.begin + ring.count, item.end);
    for (u32 i = 0; i < warp; i++) ring.next();
    const Fast128Shared<Fast128Launch> work = {launch};
    const Fast128Asking<Fast128Shared<Fast128Launch>, Fast128Ring> asking(work, item,
                                                                          item.begin + warp, lane);
    asking.fill(filled, ring);
    asking.ask(filled, ring, item.strips * FAST128_STRIP_BYTES, true);
}
}  // namespace df11::linear
