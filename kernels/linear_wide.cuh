// Products of 33 to 128 rows of x, for compute capability 9.0: wgmma, with decoded weights as the A
// operand from registers, x as B from shared memory.
//
//   arrange   a kernel of its own before: x in wgmma's order, once, rather than in each block
//   item      256 rows of a matrix: two blocks of a cluster, four strips each, which share x
//   split     ranges of stages (128 columns) as long as each other, one a cluster (linear_task.cuh)
//   block     16 warps that multiply, 4 that ask for stages, one a strip, without waiting for the
//             launch before; x comes by a copy to both blocks, of which each asks for half
//
//      a stage of a strip   | step 0 | step 1 | step 2 | step 3 |
//        rows g, g + 8        warpgroup 0       warpgroup 2
//        rows g + 16, g + 24  warpgroup 1       warpgroup 3      warp i of each: strip i
//
//   At the end of a part two warpgroups exchange halves of their sums in shared memory; parts of an
//   item meet in memory, and the block that comes last adds them, in order.
//
// Budget (kernels/ptx/linear.sm_90a.cubin; benches/record/2026-11-22-linear-wide.md): 96 registers
// (104 for those that multiply, 64 for those that ask), 80 bytes of spills with 128 rows of x; 20
// warps, a block a multiprocessor, 218 KiB of shared memory with 64 rows of x, 214 KiB with 128.
// About 155 instructions of a warp for 1,024 weights, of them 64 to load and decode.
// cuBLASLt's best divided by ours, sum of 6144 x 4096, 4096 x 4096, 28672 x 4096, 4096 x 14336:
//   rows of x        48      64      96      128
//   H200             0.87    0.86    0.71    0.70
// What limits it. With 64 rows those that multiply take 0.75 to 0.80 us for a stage, as DRAM does:
// so they never catch up after the end of a part, where they stand still for 3 to 5 us (exchange 1,
// sums to memory 1.2, those of others 2, next part 1). Schedulers issue in 55 % of the cycles; a
// warp waits for its group's others before a product (15 %), for the barrier of a stage (11 %), for
// branches (9 %). Between two launches are 1.6 us, and 4.5 us with arrange there.
//
// Rejected, in the record with their figures:
//   two warpgroups with 16 rows of each strip; stages of 64 columns for 64 rows of x; one warp for
//   all copies; 17 to 32 rows of x by this kernel
//
// Safety: as linear.cu has it. No block waits for another cluster.
#pragma once
#include "linear_bulk.cuh"
#include "linear_wgmma.cuh"

constexpr u32 WIDE_CLUSTER = 2, WIDE_STRIPS = WIDE_ITEM_ROWS / WIDE_CLUSTER / STRIP_ROWS;
constexpr u32 WIDE_STEPS = WIDE_COLUMNS / STEP_COLUMNS;
// Four warpgroups multiply: two by the first 16 rows of each strip, two by the others; of these one
// has the first half of a stage's columns, one the second. Four more warps ask for stages.
constexpr u32 WIDE_WARPS = 4 * WIDE_STRIPS, WIDE_THREADS = (WIDE_WARPS + WIDE_STRIPS) * LANES;
constexpr u32 ARRANGE_THREADS = 64;
static_assert(WIDE_STRIPS == 4 && WIDE_STEPS == 4, "a warpgroup has four warps, a strip each");

// A stage of the ring: the weights, strip by strip, and x as `arranged` has it; with 128 rows of x
// half of a stage of the split, so that enough are on their way. First the barriers, full and
// empty, and a word; then room for sums that warpgroups exchange. Stages are aligned to 1024.
constexpr u32 WIDE_EXCHANGE = WIDE_WARPS * LANES * 32;
constexpr u32 WIDE_FIRST_BYTES = 2 * MOST_STAGES * 8 + 16 + WIDE_EXCHANGE,
              WIDE_SLACK = WIDE_FIRST_BYTES + 1008;
__host__ __device__ constexpr u32 wide_steps(u32 n) { return n == 128 ? 2 : 4; }
__host__ __device__ constexpr u32 wide_weights(u32 n) {
    return WIDE_STRIPS * wide_steps(n) * STEP_BYTES;
}
__host__ __device__ constexpr u32 wide_stage_bytes(u32 n) {
    return wide_weights(n) + n * wide_steps(n) * STEP_COLUMNS * 2;
}
__host__ __device__ constexpr u32 wide_stages(u32 n) { return n == 64 ? 5 : 7; }
__host__ __device__ constexpr u32 wide_shared_bytes(u32 n) {
    return WIDE_SLACK + wide_stages(n) * wide_stage_bytes(n);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// x in the order in which the products want it: for each 64 columns, for each row, 128 bytes. The
// lane (g, q) of a warp has the columns 8 q to 8 q + 7 of a step, and gives the product of 16
// columns the k of 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. So k of the product j of a step's two is
//   k = 2 q + i       column 8 q + 4 j + i
//   k = 2 q + i + 8   column 8 q + 4 j + i + 2
// A piece of 16 bytes is eight k: a thread makes the two of a j, of a step of a row of x. Rows and
// columns that do not exist are zero.
__device__ __forceinline__ void arrange_x(const LinearLaunch& launch) {
    let_next_launch_begin();
    wait_for_launch_before();
    const u32 n = wide_class(launch.x_rows), columns = launch.columns;
    const u32 count = (columns + WIDE_COLUMNS - 1) / WIDE_COLUMNS * WIDE_STEPS * n * 2;
    const bool aligned = (reinterpret_cast<u64>(launch.x) | launch.x_pitch * 2) % 8 == 0;
#pragma unroll 1
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const u32 place = i / 4, row = place % n,
                  column = place / n * 64 + i / 2 % 2 * STEP_COLUMNS + i % 2 * 4;
        const u16* from = launch.x + row * launch.x_pitch + column;
        uint2 all[4] = {};
        if (row < launch.x_rows && aligned && column + STEP_COLUMNS <= columns) {
#pragma unroll
            for (u32 q = 0; q < 4; q++) all[q] = reinterpret_cast<const uint2*>(from)[2 * q];
        } else if (row < launch.x_rows) {
#pragma unroll
            for (u32 q = 0; q < 4; q++) {
                u32 words[2] = {};
#pragma unroll
                for (u32 k = 0; k < 4; k++)
                    if (column + 8 * q + k < columns)
                        words[k / 2] |= u32(from[8 * q + k]) << 16 * (k % 2);
                all[q] = make_uint2(words[0], words[1]);
            }
        }
        uint4* const to = reinterpret_cast<uint4*>(launch.arranged) + u64(place) * 8;
        const u32 piece = i % 4 * 2 ^ row % 8;
        to[piece] = make_uint4(all[0].x, all[1].x, all[2].x, all[3].x);
        to[piece ^ 1] = make_uint4(all[0].y, all[1].y, all[2].y, all[3].y);
    }
}

// A range of a launch, from the stage `at` on: first its share of a matrix, up to `share_end`, then
// whole items.
struct WideRange {
    WideSplit split;
    u32 matrix, number, first_range;  // number: of the matrix; first_range: of all matrices before
    u32 at, share_end, end, first_partial;

    __device__ bool find(const LinearLaunch& launch, u32 of_launch) {
        first_range = 0, first_partial = 0, number = of_launch;
        for (matrix = 0; matrix < launch.matrix_count; matrix++) {
            split = wide_split(launch.matrices[matrix].rows, launch.columns);
            if (number < split.ranges) {
                at = split.share_begin(number), share_end = split.share_begin(number + 1);
                end = share_end + split.whole * split.stages;
                return true;
            }
            number -= split.ranges, first_range += split.ranges, first_partial += split.partials();
        }
        return false;
    }
};
// The part of an item that comes next.
struct WidePart {
    u32 item, begin, end;  // stages
    u32 first, last;       // ranges that have parts of the item
    u32 strip;             // the block's first
    __device__ explicit WidePart(const WideRange& range) {
        const WideSplit& split = range.split;
        if (range.at < range.share_end) {
            item = range.at / split.stages, begin = range.at % split.stages;
            end = min(begin + range.share_end - range.at, split.stages);
            first = split.range_of(item * split.stages);
            last = split.range_of((item + 1) * split.stages - 1);
        } else {
            item = split.shared + range.number +
                   (range.at - range.share_end) / split.stages * split.ranges;
            begin = 0, end = split.stages, first = last = range.number;
        }
        strip = (item * WIDE_CLUSTER + blockIdx.x % WIDE_CLUSTER) * WIDE_STRIPS;
    }
};

template <u32 N>
struct WideStages {
    u32 first, barriers;
    u32 place, full, phase = 0;
    __device__ u32 empty() const { return full + MOST_STAGES * 8; }
    __device__ void next() {
        place += wide_stage_bytes(N), full += 8;
        if (full == barriers + 8 * wide_stages(N)) place = first, full = barriers, phase ^= 1;
    }
};

// Parts of items, one after another; all threads alike. Until one says that it is the last.
template <class Do>
__device__ __forceinline__ void for_each_part(const LinearLaunch& launch, Do each) {
    WideRange range;
    for (u32 number = blockIdx.x / WIDE_CLUSTER; range.find(launch, number);
         number += gridDim.x / WIDE_CLUSTER)
        while (range.at < range.end) {
            const WidePart part(range);
            if (!each(range, part)) return;
            range.at += part.end - part.begin;
        }
}

// Half of x of a stage, to both blocks. One thread.
template <u32 N>
__device__ __forceinline__ void ask_for_x(const LinearLaunch& launch, u32 stage,
                                          const WideStages<N>& to) {
    constexpr u32 BYTES = N * wide_steps(N) * STEP_COLUMNS * 2 / WIDE_CLUSTER;
    const u32 rank = blockIdx.x % WIDE_CLUSTER;
    copy_bulk_to_all<WIDE_CLUSTER>(
        to.place + wide_weights(N) + rank * BYTES,
        reinterpret_cast<const u8*>(launch.arranged) + u64(stage * WIDE_CLUSTER + rank) * BYTES,
        BYTES, to.full);
}
// A warp for each strip, the last one for x too. Weights fill the ring before anything is waited
// for.
template <u32 N>
__device__ __forceinline__ void ask_for_stages(const LinearLaunch& launch, WideStages<N> ring,
                                               u32 strip, u32 lane) {
    constexpr u32 STEPS = wide_steps(N), OF_SPLIT = WIDE_STEPS / STEPS;
    const WideStages<N> start = ring;
    const u32 steps = steps_of(launch.columns);
    const bool has_x = strip == WIDE_STRIPS - 1;
    u32 asked = 0;
    auto ask_for_first_x = [&] {
        wait_for_cluster();
        wait_for_launch_before();
        if (!has_x) return;
        WideStages<N> to = start;
        u32 i = 0;
        for_each_part(launch, [&](const WideRange&, const WidePart& part) {
            for (u32 stage = part.begin * OF_SPLIT; stage < part.end * OF_SPLIT && i < asked;
                 stage++, i++, to.next())
                if (lane == 0) ask_for_x(launch, stage, to);
            return i < asked;
        });
    };
    for_each_part(launch, [&](const WideRange& range, const WidePart& part) {
        const LinearMatrix& m = launch.matrices[range.matrix];
        const bool exists = (part.strip + strip) * STRIP_ROWS < m.rows;
        u32 step = part.begin * WIDE_STEPS;
        const u8* from =
            m.data +
            (u64(part.strip + strip) * steps_of(m.whole_columns) + step) * STEP_BYTES;
        for (u32 stage = part.begin * OF_SPLIT; stage < part.end * OF_SPLIT; stage++) {
            const u32 bytes =
                exists ? min(max(steps, step) - step, STEPS) * STEP_BYTES : 0;
            const bool filled = asked >= wide_stages(N);
            if (lane == 0) {
                if (filled) wait_for(ring.empty(), ring.phase ^ 1);
                arrive_expecting(ring.full, bytes + (has_x ? N * STEPS * STEP_COLUMNS * 2 : 0));
                if (bytes)
                    copy_bulk_once(ring.place + strip * STEPS * STEP_BYTES, from, bytes, ring.full);
                if (filled && has_x) ask_for_x(launch, stage, ring);
            }
            from += STEPS * STEP_BYTES, step += STEPS;
            ring.next();
            if (++asked == wide_stages(N)) {
                __syncwarp();
                ask_for_first_x();
            }
        }
        return true;
    });
    __syncwarp();
    if (asked < wide_stages(N)) ask_for_first_x();
}

// The heads of a strip: loaded two tiles before they are needed, and their entries brought to L1
// one tile before.
struct WideTiles {
    Head head, next_head;
    uint2 after_next;
    u32 base;  // of the tile
    u32 rare;  // bit i: the step i from the warpgroup's next one on has entries, or does not exist

    __device__ static uint2 load_head(const LinearMatrix& m, u32 strip, u32 tile, u32 tiles) {
        if (strip * STRIP_ROWS >= m.rows || tile >= tiles) return make_uint2(0, 0);
        return __ldg(static_cast<const uint2*>(m.index) +
                     u64(strip) * tiles_across(m.whole_columns) + tile);
    }
    __device__ static void prefetch_entries(const LinearMatrix& m, Head of) {
        if (of.count() && of.first() < m.rest_count)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<const u32*>(m.rest) +
                                                          of.first()));
    }
    __device__ WideTiles(const LinearMatrix& m, u32 strip, u32 tile, u32 tiles) {
        next_head.words = load_head(m, strip, tile, tiles);
        after_next = load_head(m, strip, tile + 1, tiles);
    }
    __device__ void next(const LinearMatrix& m, u32 strip, u32 tile, u32 tiles, u32 step,
                         u32 columns) {
        head = next_head, next_head.words = after_next;
        prefetch_entries(m, next_head);
        after_next = load_head(m, strip, tile + 2, tiles);
        base = kept(head.base());
        const u32 left = min(steps_of(columns) - tile * TILE_STEPS, TILE_STEPS);
        rare = kept(((head.words.y >> 16 & 0xFF) | 0xFFu << left) >> step);
    }
};
// As place_entries, for the half of the rows of a strip that a warpgroup has.
__device__ inline void place_entries_wide(u32 (&weights)[2][4], Head head, u32 step,
                                          const LinearMatrix& m, u32 half, u32 lane, u32* status) {
#pragma unroll 1
    for (u32 begin = 0; begin < head.count(); begin += LANES) {
        const u64 at = u64(head.first()) + begin + lane;
        const bool mine = begin + lane < head.count();
        if (mine && at >= m.rest_count) atomicOr(status, STATUS_ENTRIES);
        const u32 entry =
            mine && at < m.rest_count ? __ldg(static_cast<const u32*>(m.rest) + at) : 0xFFFFFFFFu;
        u32 left = __ballot_sync(ALL_LANES, entry >> 26 == step && (entry >> 20 & 1) == half);
        while (left) {
            const u32 one = __shfl_sync(ALL_LANES, entry, __ffs(left) - 1);
            left &= left - 1;
            const u32 place = one >> 16 & 15, order = place & 1 ? 0x5410 : 0x3254;
            if ((one >> 21 & 31) != lane) continue;
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                if (place / 2 == i)
                    weights[i / 4][i % 4] = __byte_perm(weights[i / 4][i % 4], one, order);
        }
    }
}

// Weights of a step: 16 rows of a strip, by x. The sums follow later.
template <u32 COUNT>
__device__ __forceinline__ void multiply_step_wide(float (&sums)[COUNT], const u32 (&weights)[2][4],
                                                   u32 x) {
    fence_products();
    multiply_wide(sums, weights[0][0], weights[1][0], weights[0][1], weights[1][1], x);
    multiply_wide(sums, weights[0][2], weights[1][2], weights[0][3], weights[1][3], x + 2);
    commit_products();
}
// Lets both blocks write to a stage again; a barrier's address, or 0.
__device__ inline void release(u32 empty, u32 lane) {
    __syncwarp();
    if (empty && lane < WIDE_CLUSTER) arrive_at(empty, lane);
}

// Which part of a stage a thread's warpgroup has.
struct WideShare {
    u32 strip, rows, columns;  // of the block's four; the half of its rows; the half of the columns
    __device__ WideShare() {
        // By lane 0, so that the compiler takes it for the same in all lanes.
        const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
        strip = warp % 4, rows = warp / 4 % 2, columns = warp / 8;
    }
};

template <u32 N>
__device__ __forceinline__ void multiply_part(const LinearLaunch& launch, const LinearMatrix& m,
                                             const WidePart& part, WideStages<N>& ring,
                                             float (&sums)[N / 2]) {
    constexpr u32 STEPS = wide_steps(N), OF_SPLIT = WIDE_STEPS / STEPS;
    constexpr u32 TILE_STAGES = TILE_STEPS / STEPS;
    const WideShare share;
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 first = share.columns * STEPS / 2,
              mine = (share.strip * STEPS + first) * STEP_BYTES + lane * 16;
    const u32 planes = kept(mine + share.rows * 512), codes = kept(mine + 1024 + share.rows * 8),
              x_place = kept(wide_weights(N) + (STEPS == 4 ? share.columns * N * 128 : 0)),
              x_first = STEPS == 4 ? 0 : share.columns * 4;
    const u32 last_step = steps_of(launch.columns) - 1;
    const u32 strip = part.strip + share.strip, tile_count = tiles_across(launch.columns);
    WideTiles tiles(m, strip, part.begin * OF_SPLIT / TILE_STAGES, tile_count);
    u32 to_release = 0;
    auto repair = [&](u32 (&weights)[2][4], u32 of_tile, u32 step) {
        place_entries_wide(weights, tiles.head, of_tile, m, share.rows, lane, launch.status);
        // What is there where no step is may be infinite.
        if (step > last_step)
#pragma unroll
            for (u32 i = 0; i < 8; i++) weights[i / 4][i % 4] = 0;
    };
#pragma unroll 1
    for (u32 stage = part.begin * OF_SPLIT; stage < part.end * OF_SPLIT; stage++) {
        const u32 step = stage % TILE_STAGES * STEPS + first;
        if (stage % TILE_STAGES == 0 || stage == part.begin * OF_SPLIT)
            tiles.next(m, strip, stage / TILE_STAGES, tile_count, step, launch.columns);
        const u32 base = tiles.base;
        wait_for(ring.full, ring.phase);
        const uint4 p0 = load_shared_16(ring.place + planes);
        const uint2 c0 = load_shared_8(ring.place + codes);
        const u32 x = describe_x(ring.place + x_place) + x_first;
        uint4 p1;
        uint2 c1;
        if (STEPS == 4)
            p1 = load_shared_16(ring.place + planes + STEP_BYTES),
            c1 = load_shared_8(ring.place + codes + STEP_BYTES);
        u32 even[2][4], odd[2][4];
        decode_codes(even[0], p0.x, p0.y, c0.x, base);
        decode_codes(even[1], p0.z, p0.w, c0.y, base);
        if (tiles.rare & 1) repair(even, step, stage * STEPS + first);
        multiply_step_wide(sums, even, x);
        if (STEPS == 2) {
            // The other warpgroups use the time.
            tiles.rare = kept(tiles.rare >> STEPS);
            wait_for_products<0>();
            release(ring.empty(), lane);
            ring.next();
            continue;
        }
        wait_for_products<1>();  // those of the stage before
        release(to_release, lane);
        decode_codes(odd[0], p1.x, p1.y, c1.x, base);
        decode_codes(odd[1], p1.z, p1.w, c1.y, base);
        if (tiles.rare & 2) repair(odd, step + 1, stage * STEPS + first + 1);
        multiply_step_wide(sums, odd, x + 4);
        wait_for_products<1>();
        tiles.rare = kept(tiles.rare >> STEPS);
        to_release = ring.empty();
        ring.next();
    }
    wait_for_products<0>();
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    release(to_release, lane);
}

__device__ inline void store_shared_16(u32 address, const float* v) {
    store_shared_16(address, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]),
                                        __float_as_uint(v[2]), __float_as_uint(v[3])));
}
// Two warpgroups have sums of the same places: each gets those of half the rows of x.
template <u32 N>
__device__ __forceinline__ void exchange_sums(u32 room, const float (&sums)[N / 2],
                                              float (&mine)[N / 4], const WideShare& share) {
    constexpr u32 AT_ONCE = WIDE_EXCHANGE / (WIDE_WARPS * LANES * 16);
    const u32 to = room + threadIdx.x * 16,
              from = room + (threadIdx.x ^ WIDE_WARPS * LANES / 2) * 16;
#pragma unroll
    for (u32 begin = 0; begin < N / 16; begin += AT_ONCE) {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            float other[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const u32 at = (begin + i) * 4 + k;
                other[k] = share.columns ? sums[at] : sums[N / 4 + at];
                mine[at] = share.columns ? sums[N / 4 + at] : sums[at];
            }
            store_shared_16(to + i * WIDE_WARPS * LANES * 16, other);
        }
        group_barrier(1 + share.rows, WIDE_WARPS * LANES / 2);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const uint4 other = load_shared_16(from + i * WIDE_WARPS * LANES * 16);
            float* const sum = mine + (begin + i) * 4;
            sum[0] += __uint_as_float(other.x), sum[1] += __uint_as_float(other.y);
            sum[2] += __uint_as_float(other.z), sum[3] += __uint_as_float(other.w);
        }
        group_barrier(1 + share.rows, WIDE_WARPS * LANES / 2);
    }
}

// One more at a counter: what was there before. All that the block has written before is there for
// whom sees it, and the other way around.
__device__ inline u32 count_arrival(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

// The block that comes last to an item adds its parts, in order. All threads that multiply; whether
// the sums are those of the item.
template <u32 N>
__device__ __forceinline__ bool add_parts(const LinearLaunch& launch, const WideRange& range,
                                          const WidePart& part, u32 word, float (&sums)[N / 4]) {
    if (part.first == part.last) return true;
    constexpr u32 SIZE = WIDE_ITEM_ROWS / WIDE_CLUSTER * N;
    const u32 rank = blockIdx.x % WIDE_CLUSTER;
    auto place_of = [&](u32 number) {
        const u32 place = range.first_partial + number + part.item;
        return reinterpret_cast<float4*>(launch.partials +
                                         u64(place * WIDE_CLUSTER + rank) * SIZE) +
               threadIdx.x;
    };
    float4* const mine = place_of(range.number);
#pragma unroll
    for (u32 i = 0; i < N / 16; i++)
        __stcg(mine + i * WIDE_WARPS * LANES, make_float4(sums[4 * i], sums[4 * i + 1],
                                                          sums[4 * i + 2], sums[4 * i + 3]));
    u32* const counter = launch.counters + (range.first_range + part.first) * WIDE_CLUSTER + rank;
    group_barrier(0, WIDE_WARPS * LANES);
    if (threadIdx.x == 0) store_shared(word, count_arrival(counter));
    group_barrier(0, WIDE_WARPS * LANES);
    if (load_shared(word) != part.last - part.first) return false;
    if (threadIdx.x == 0) *counter = 0;
    // Loads of some parts at once, as many as registers hold.
    constexpr u32 AT_ONCE = 2;
#pragma unroll
    for (u32 i = 0; i < N / 4; i++) sums[i] = 0;
#pragma unroll 1
    for (u32 number = part.first; number <= part.last; number += AT_ONCE) {
        float4 sum[AT_ONCE][N / 16];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            const float4* const from = place_of(min(number + k, part.last));
#pragma unroll
            for (u32 i = 0; i < N / 16; i++) sum[k][i] = __ldcg(from + i * WIDE_WARPS * LANES);
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++) {
            if (number + k > part.last) break;
#pragma unroll
            for (u32 i = 0; i < N / 16; i++) {
                sums[4 * i] += sum[k][i].x, sums[4 * i + 1] += sum[k][i].y;
                sums[4 * i + 2] += sum[k][i].z, sums[4 * i + 3] += sum[k][i].w;
            }
        }
    }
    return true;
}

template <u32 N>
__device__ __forceinline__ void store_sums(const LinearLaunch& launch, const LinearMatrix& m,
                                           u32 first_strip, const float (&sums)[N / 4],
                                           const WideShare& share) {
    const u32 lane = threadIdx.x % LANES;
    const u32 row = (first_strip + share.strip) * STRIP_ROWS + share.rows * 16 + lane / 4;
    float bias[2] = {};
#pragma unroll
    for (u32 k = 0; k < 2; k++)
        if (m.bias && row + 8 * k < m.rows) bias[k] = widen_bf16(__ldg(m.bias + row + 8 * k));
    u32 x_row = share.columns * (N / 2) + lane % 4 * 2;
    u16* to = m.y + x_row * m.y_pitch + row;
#pragma unroll
    for (u32 i = 0; i < N / 4; i++) {
        const u32 k = i / 2 % 2;
        const float sum = m.bias ? sums[i] + bias[k] : sums[i];
        if (x_row + i % 2 < launch.x_rows && row + 8 * k < m.rows)
            to[i % 2 * m.y_pitch + 8 * k] = round_to_bf16(sum);
        if (i % 4 == 3) x_row += 8, to += 8 * m.y_pitch;
    }
}

template <u32 N>
__device__ __forceinline__ void multiply_ranges(const LinearLaunch& launch, WideStages<N> ring,
                                                u32 word) {
    u32 number = blockIdx.x / WIDE_CLUSTER, done = 0;  // stages of the range
    for (;;) {
        float sums[N / 2] = {}, mine[N / 4];
        {
            WideRange range;
            if (!range.find(launch, number)) break;
            range.at += done;
            multiply_part<N>(launch, launch.matrices[range.matrix], WidePart(range), ring, sums);
        }
        // Found again: meanwhile the registers had other use.
        number = kept(number), done = kept(done);
        WideRange range;
        range.find(launch, number);
        range.at += done;
        const WidePart part(range);
        const LinearMatrix& m = launch.matrices[range.matrix];
        done += part.end - part.begin;
        if (range.at + part.end - part.begin == range.end)
            number += gridDim.x / WIDE_CLUSTER, done = 0;
        if (part.strip * STRIP_ROWS >= m.rows) continue;
        const WideShare share;
        exchange_sums<N>(word + 16, sums, mine, share);
        if (add_parts<N>(launch, range, part, word, mine))
            store_sums<N>(launch, m, part.strip, mine, share);
    }
}

template <u32 N>
__device__ __forceinline__ void linear_wide(const LinearLaunch& launch) {
    const u32 lane = kept(threadIdx.x % LANES), warp = kept(threadIdx.x / LANES);
    const u32 barriers = kept(shared_address(linear_shared)), word = barriers + 2 * MOST_STAGES * 8,
              first = kept((barriers + WIDE_FIRST_BYTES + 1023) / 1024 * 1024);
    const WideStages<N> ring = {first, barriers, first, barriers};
    if (threadIdx.x == WIDE_WARPS * LANES) {
        for (u32 i = 0; i < wide_stages(N); i++) {
            init_barrier(barriers + 8 * i, WIDE_STRIPS);
            init_barrier(ring.empty() + 8 * i, WIDE_WARPS * WIDE_CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    arrive_at_cluster();
    let_next_launch_begin();
    // Together as many registers as the block begins with, which build.py compares: with fewer
    // a warp would wait for ever.
    if (warp >= WIDE_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        ask_for_stages<N>(launch, ring, warp - WIDE_WARPS, lane);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        wait_for_cluster();
        wait_for_launch_before();
        multiply_ranges<N>(launch, ring, word);
    }
    // Until the other block neither writes nor arrives here any more.
    arrive_at_cluster();
    wait_for_cluster();
}
#endif
