// Products of 17 to 128 rows of x, for compute capability 9.0.
#pragma once
#include "linear_bulk.cuh"
#include "linear_wgmma.cuh"

constexpr u32 WIDE_CLUSTER = 2, WIDE_STRIPS = WIDE_ITEM_ROWS / WIDE_CLUSTER / STRIP_ROWS;
constexpr u32 WIDE_STEPS = WIDE_COLUMNS / STEP_COLUMNS, WIDE_TILE_STAGES = TILE_STEPS / WIDE_STEPS;
// Two warpgroups multiply, each by half of the rows of all strips; one more warp asks for stages.
constexpr u32 WIDE_WARPS = 2 * WIDE_STRIPS, WIDE_THREADS = (WIDE_WARPS + 1) * LANES;
constexpr u32 ARRANGE_THREADS = 256;
static_assert(WIDE_STRIPS == 4 && WIDE_STEPS == 2, "a warpgroup has four warps, a strip each");

// A stage: the weights, strip by strip, and x as `arranged` has it. First the barriers, full and
// empty, and a word; stages are aligned to 1024.
constexpr u32 WIDE_WEIGHTS = WIDE_STRIPS * WIDE_STEPS * STEP_BYTES;
constexpr u32 WIDE_FIRST_BYTES = 2 * MOST_STAGES * 8 + 16, WIDE_SLACK = WIDE_FIRST_BYTES + 1008;
__host__ __device__ constexpr u32 wide_stage_bytes(u32 n) {
    return WIDE_WEIGHTS + n * WIDE_COLUMNS * 2;
}
__host__ __device__ constexpr u32 wide_stages(u32 n) { return n == 32 ? 13 : n == 64 ? 11 : 7; }
__host__ __device__ constexpr u32 wide_shared_bytes(u32 n) {
    return WIDE_SLACK + wide_stages(n) * wide_stage_bytes(n);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// x in the order in which the products want it: for each stage, for each row, 128 bytes. The lane
// (g, q) of a warp has the columns 8 q to 8 q + 7 of a step, and gives the product of 16 columns
// the k of 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. So k of the product j of a step's two is
//   k = 2 q + i       column 8 q + 4 j + i
//   k = 2 q + i + 8   column 8 q + 4 j + i + 2
// A piece of 16 bytes is eight k. Rows and columns that do not exist are zero.
__device__ __forceinline__ void arrange_x(const LinearLaunch& launch) {
    let_next_launch_begin();
    wait_for_launch_before();
    const u32 n = wide_class(launch.x_rows), columns = launch.columns;
    const u32 count = (columns + WIDE_COLUMNS - 1) / WIDE_COLUMNS * n * 8;
    const bool pairs = (reinterpret_cast<u64>(launch.x) | launch.x_pitch * 2) % 4 == 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const u32 row = i / 8 % n, piece = (i ^ row) % 8;
        const u32 column = i / (8 * n) * WIDE_COLUMNS + piece / 4 * STEP_COLUMNS + piece % 4 * 2;
        const u16* from = launch.x + row * launch.x_pitch + column;
        u32 words[4] = {};
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const u32 at = column + 8 * q;
            if (row >= launch.x_rows || at >= columns) continue;
            if (pairs && at + 1 < columns)
                words[q] = *reinterpret_cast<const u32*>(from + 8 * q);
            else
                words[q] = from[8 * q] | (at + 1 < columns ? u32(from[8 * q + 1]) << 16 : 0);
        }
        reinterpret_cast<uint4*>(launch.arranged)[i] =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// A range of a launch, from `at` on: stages of the items of a matrix, counted through all of them.
struct WideRange {
    WideSplit split;
    u32 matrix, number, first_range;  // number: of the matrix; first_range: of all matrices before
    u32 at, end, first_partial;

    __device__ bool find(const LinearLaunch& launch, u32 of_launch) {
        first_range = 0, first_partial = 0, number = of_launch;
        for (matrix = 0; matrix < launch.matrix_count; matrix++) {
            split = wide_split(launch.matrices[matrix].rows, launch.columns);
            if (number < split.ranges) {
                at = split.begin(number), end = split.begin(number + 1);
                return true;
            }
            number -= split.ranges, first_range += split.ranges, first_partial += split.partials();
        }
        return false;
    }
};
// The part of an item that a range has.
struct WidePart {
    u32 item, begin, end;  // stages
    u32 first, last;       // ranges that have parts of the item
    u32 strip;             // the block's first
    __device__ explicit WidePart(const WideRange& range) {
        const u32 stages = range.split.stages;
        item = range.at / stages, begin = range.at % stages;
        end = min(begin + range.end - range.at, stages);
        first = range.split.range_of(item * stages);
        last = range.split.range_of((item + 1) * stages - 1);
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

// All stages of a block, one after another.
struct WideCursor {
    const LinearLaunch& launch;
    u32 number;
    WideRange range;
    bool exists;
    u32 stage, end, strips;  // strips: of the block that exist
    const u8* data;
    u64 pitch;  // bytes from strip to strip

    __device__ explicit WideCursor(const LinearLaunch& l) : launch(l), number(blockIdx.x / 2) {
        exists = range.find(launch, number);
        if (exists) enter();
    }
    __device__ void enter() {
        const WidePart part(range);
        const LinearMatrix& m = launch.matrices[range.matrix];
        const u32 all = (m.rows + STRIP_ROWS - 1) / STRIP_ROWS;
        strips = min(max(all, part.strip) - part.strip, WIDE_STRIPS);
        pitch = u64(steps_of(m.whole_columns)) * STEP_BYTES, data = m.data + part.strip * pitch;
        stage = part.begin, end = part.end;
        range.at += end - stage;
    }
    __device__ void next() {
        if (++stage < end) return;
        if (range.at == range.end) {
            number += gridDim.x / WIDE_CLUSTER;
            exists = range.find(launch, number);
            if (!exists) return;
        }
        enter();
    }
    template <u32 N>
    __device__ void ask_for_weights(const WideStages<N>& to) const {
        const u32 first = stage * WIDE_STEPS,
                  bytes = min(steps_of(launch.columns) - first, WIDE_STEPS) * STEP_BYTES;
        arrive_expecting(to.full, strips * bytes + N * WIDE_COLUMNS * 2);
        const u8* from = data + u64(first) * STEP_BYTES;
        for (u32 i = 0; i < strips; i++, from += pitch)
            copy_bulk_once(to.place + i * WIDE_STEPS * STEP_BYTES, from, bytes, to.full);
    }
    // Half of the rows of x, to both blocks.
    template <u32 N>
    __device__ void ask_for_x(const WideStages<N>& to) const {
        constexpr u32 BYTES = N * WIDE_COLUMNS * 2 / WIDE_CLUSTER;
        const u32 mine = blockIdx.x % WIDE_CLUSTER * BYTES;
        const u8* from = reinterpret_cast<const u8*>(launch.arranged);
        copy_bulk_to_all<WIDE_CLUSTER>(to.place + WIDE_WEIGHTS + mine,
                                       from + u64(stage) * BYTES * WIDE_CLUSTER + mine, BYTES,
                                       to.full);
    }
};

// By one thread of each block.
template <u32 N>
__device__ __forceinline__ void fill_ring(WideCursor& weights, WideStages<N>& ring) {
    for (u32 i = 0; i < wide_stages(N) && weights.exists; i++, weights.next(), ring.next())
        weights.ask_for_weights(ring);
}
template <u32 N>
__device__ __forceinline__ void ask_for_stages(WideCursor& weights, WideStages<N>& ring,
                                               WideStages<N> from_start) {
    WideCursor x(weights.launch);
    for (u32 i = 0; i < wide_stages(N) && x.exists; i++, x.next(), from_start.next())
        x.ask_for_x(from_start);
    for (; weights.exists; weights.next(), ring.next()) {
        wait_for(ring.empty(), ring.phase ^ 1);
        weights.ask_for_weights(ring);
        weights.ask_for_x(ring);
    }
}

// The heads and entries of a strip, asked for a tile before they are needed.
struct WideTiles {
    const uint2* heads;  // the one to ask for next
    u32 left;            // of them
    Head head, next_head;
    u32 entry, next_entry;  // the lane's of the first 32 of the tile
    uint2 after_next;

    __device__ void load_head() {
        after_next = left ? __ldg(heads) : make_uint2(0, 0);
        if (left) left--, heads++;
    }
    __device__ u32 load_entry(const LinearMatrix& m, Head of, u32 lane) const {
        const u64 at = u64(of.first()) + lane;
        return lane < of.count() && at < m.rest_count
                   ? __ldg(static_cast<const u32*>(m.rest) + at)
                   : 0xFFFFFFFFu;
    }
    __device__ WideTiles(const LinearMatrix& m, u32 strip, u32 tile, u32 tiles, u32 lane) {
        const bool exists = strip * STRIP_ROWS < m.rows;
        heads = static_cast<const uint2*>(m.index) +
                (exists ? u64(strip) * tiles_across(m.whole_columns) + tile : 0);
        left = exists ? tiles - tile : 0;
        load_head();
        next_head.words = after_next;
        load_head();
        next_entry = load_entry(m, next_head, lane);
    }
    __device__ void next(const LinearMatrix& m, u32 lane) {
        head = next_head, entry = next_entry;
        next_head.words = after_next;
        next_entry = load_entry(m, next_head, lane);
        load_head();
    }
};
// As place_entries, for the rows of a strip that a warpgroup has.
__device__ inline u32 place_entries_wide(u32 (&weights)[2][4], const WideTiles& tiles, u32 step,
                                         const LinearMatrix& m, u32 half, u32 lane) {
    u32 problems = 0, entry = tiles.entry;
    const u32 count = tiles.head.count();
    if (u64(tiles.head.first()) + count > m.rest_count) problems = STATUS_ENTRIES;
#pragma unroll 1
    for (u32 begin = 0; begin < count; begin += LANES) {
        const u64 at = u64(tiles.head.first()) + begin + lane;
        if (begin)
            entry = begin + lane < count && at < m.rest_count
                        ? __ldg(static_cast<const u32*>(m.rest) + at)
                        : 0xFFFFFFFFu;
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
    return problems;
}

// Weights of a step: 16 rows of a strip, by x. The sums follow later.
template <u32 COUNT>
__device__ __forceinline__ void multiply_step_wide(float (&sums)[COUNT], const u32 (&weights)[2][4],
                                                   u64 x) {
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

template <u32 N>
__device__ __forceinline__ u32 multiply_part(const LinearLaunch& launch, const LinearMatrix& m,
                                             const WidePart& part, WideStages<N>& ring,
                                             float (&sums)[N / 2], u32 warp, u32 lane) {
    const u32 half = warp / 4, strip = warp % 4;
    const u32 planes = kept(strip * WIDE_STEPS * STEP_BYTES + half * 512 + lane * 16),
              codes = kept(strip * WIDE_STEPS * STEP_BYTES + 1024 + half * 8 + lane * 16);
    const u32 steps = steps_of(launch.columns);
    WideTiles tiles(m, part.strip + strip, part.begin / WIDE_TILE_STAGES,
                    tiles_across(launch.columns), lane);
    u32 problems = 0, to_release = 0;
#pragma unroll 1
    for (u32 stage = part.begin; stage < part.end; stage++) {
        const u32 step = stage % WIDE_TILE_STAGES * WIDE_STEPS;
        if (step == 0 || stage == part.begin) tiles.next(m, lane);
        const u32 base = tiles.head.base();
        wait_for(ring.full, ring.phase);
        const uint4 p0 = load_shared_16(ring.place + planes),
                    p1 = load_shared_16(ring.place + planes + STEP_BYTES);
        const uint2 c0 = load_shared_8(ring.place + codes),
                    c1 = load_shared_8(ring.place + codes + STEP_BYTES);
        const u64 x = describe_x(ring.place + WIDE_WEIGHTS);
        u32 even[2][4], odd[2][4];
        decode_codes(even[0], p0.x, p0.y, c0.x, base);
        decode_codes(even[1], p0.z, p0.w, c0.y, base);
        if (tiles.head.has_entries(step))
            problems |= place_entries_wide(even, tiles, step, m, half, lane);
        multiply_step_wide(sums, even, x);
        wait_for_products<1>();  // those of the stage before
        release(to_release, lane);
        decode_codes(odd[0], p1.x, p1.y, c1.x, base);
        decode_codes(odd[1], p1.z, p1.w, c1.y, base);
        if (tiles.head.has_entries(step + 1))
            problems |= place_entries_wide(odd, tiles, step + 1, m, half, lane);
        // What is there if the last stage has one step alone may be infinite.
        if (stage * WIDE_STEPS + 1 == steps)
#pragma unroll
            for (u32 i = 0; i < 8; i++) odd[i / 4][i % 4] = 0;
        multiply_step_wide(sums, odd, x + 4);
        wait_for_products<1>();
        to_release = ring.empty();
        ring.next();
    }
    wait_for_products<0>();
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    release(to_release, lane);
    return problems;
}

// The block that comes last to an item adds its parts, in order. All threads that multiply; whether
// the sums are those of the item.
template <u32 N>
__device__ __forceinline__ bool add_parts(const LinearLaunch& launch, const WideRange& range,
                                          const WidePart& part, u32 word, float (&sums)[N / 2]) {
    if (part.first == part.last) return true;
    constexpr u32 SIZE = WIDE_ITEM_ROWS / WIDE_CLUSTER * N;
    const u32 rank = blockIdx.x % WIDE_CLUSTER;
    auto place_of = [&](u32 number) {
        const u32 place = range.first_partial + range.split.partial(number, part.item);
        return reinterpret_cast<float4*>(launch.partials + u64(place * WIDE_CLUSTER + rank) * SIZE) +
               threadIdx.x;
    };
    float4* const mine = place_of(range.number);
#pragma unroll
    for (u32 i = 0; i < N / 8; i++)
        if (i * 8 < launch.x_rows)
            __stcg(mine + i * WIDE_WARPS * LANES, make_float4(sums[4 * i], sums[4 * i + 1],
                                                              sums[4 * i + 2], sums[4 * i + 3]));
    u32* const counter = launch.counters + (range.first_range + part.first) * WIDE_CLUSTER + rank;
    __threadfence();
    group_barrier(0, WIDE_WARPS * LANES);
    if (threadIdx.x == 0) store_shared(word, atomicAdd(counter, 1));
    group_barrier(0, WIDE_WARPS * LANES);
    if (load_shared(word) != part.last - part.first) return false;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    constexpr u32 AT_ONCE = 4;  // more would not fit registers
#pragma unroll
    for (u32 begin = 0; begin < N / 8; begin += AT_ONCE) {
        float total[4 * AT_ONCE] = {};
#pragma unroll 1
        for (u32 number = part.first; number <= part.last; number++) {
            const float4* const from = place_of(number) + begin * WIDE_WARPS * LANES;
            const bool own = number == range.number;
            float4 sum[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                sum[i] = !own && (begin + i) * 8 < launch.x_rows
                             ? __ldcg(from + i * WIDE_WARPS * LANES)
                             : make_float4(0, 0, 0, 0);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                const float* const mine_of = sums + 4 * (begin + i);
                total[4 * i] += own ? mine_of[0] : sum[i].x;
                total[4 * i + 1] += own ? mine_of[1] : sum[i].y;
                total[4 * i + 2] += own ? mine_of[2] : sum[i].z;
                total[4 * i + 3] += own ? mine_of[3] : sum[i].w;
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4 * AT_ONCE; i++) sums[4 * begin + i] = total[i];
    }
    return true;
}

template <u32 N>
__device__ __forceinline__ void store_sums(const LinearLaunch& launch, const LinearMatrix& m,
                                           u32 first_strip, const float (&sums)[N / 2], u32 warp,
                                           u32 lane) {
    const u32 row = (first_strip + warp % 4) * STRIP_ROWS + warp / 4 * 16 + lane / 4;
    float bias[2] = {};
#pragma unroll
    for (u32 k = 0; k < 2; k++)
        if (m.bias && row + 8 * k < m.rows) bias[k] = widen_bf16(__ldg(m.bias + row + 8 * k));
    u32 x_row = lane % 4 * 2;
    u16* to = m.y + x_row * m.y_pitch + row;
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) {
        const u32 k = i / 2 % 2;
        const float sum = m.bias ? sums[i] + bias[k] : sums[i];
        if (x_row + i % 2 < launch.x_rows && row + 8 * k < m.rows)
            to[i % 2 * m.y_pitch + 8 * k] = round_to_bf16(sum);
        if (i % 4 == 3) x_row += 8, to += 8 * m.y_pitch;
    }
}

template <u32 N>
__device__ __forceinline__ void multiply_ranges(const LinearLaunch& launch, WideStages<N> ring,
                                                u32 word, u32 warp, u32 lane) {
    u32 problems = 0;
    WideRange range;
    for (u32 number = blockIdx.x / WIDE_CLUSTER; range.find(launch, number);
         number += gridDim.x / WIDE_CLUSTER)
        while (range.at < range.end) {
            const LinearMatrix& m = launch.matrices[range.matrix];
            const WidePart part(range);
            float sums[N / 2] = {};
            problems |= multiply_part<N>(launch, m, part, ring, sums, warp, lane);
            range.at += part.end - part.begin;
            if (part.strip * STRIP_ROWS < m.rows && add_parts<N>(launch, range, part, word, sums))
                store_sums<N>(launch, m, part.strip, sums, warp, lane);
        }
    if (problems) atomicOr(launch.status, problems);
}

template <u32 N>
__device__ __forceinline__ void linear_wide(const LinearLaunch& launch) {
    const u32 lane = kept(threadIdx.x % LANES), warp = kept(threadIdx.x / LANES);
    const u32 barriers = shared_address(linear_shared), word = barriers + 2 * MOST_STAGES * 8,
              first = (barriers + WIDE_FIRST_BYTES + 1023) / 1024 * 1024;
    const WideStages<N> ring = {first, barriers, first, barriers};
    if (threadIdx.x == WIDE_WARPS * LANES) {
        for (u32 i = 0; i < wide_stages(N); i++) {
            init_barrier(barriers + 8 * i, 1);
            init_barrier(ring.empty() + 8 * i, WIDE_WARPS * WIDE_CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    arrive_at_cluster();
    let_next_launch_begin();
    if (warp == WIDE_WARPS) {
        WideStages<N> next = ring;
        WideCursor weights(launch);
        if (lane == 0) fill_ring(weights, next);
        __syncwarp();
        wait_for_cluster();
        wait_for_launch_before();
        if (lane == 0) ask_for_stages(weights, next, ring);
        __syncwarp();
    } else {
        wait_for_cluster();
        wait_for_launch_before();
        multiply_ranges<N>(launch, ring, word, warp, lane);
    }
    // Until the other block neither writes nor arrives here any more.
    arrive_at_cluster();
    wait_for_cluster();
}
#endif
