// One block's part of a product with matrices in the fast layout, for up to 16 rows of x.
#pragma once
#include "linear_work.cuh"

namespace df11::linear {
extern __shared__ __align__(128) u8 linear_shared[];

// Warps that multiply. They split the sums: another number of warps gives other bits.
constexpr u32 LINEAR_WARPS = 16;
// Steps that a warp has in flight.
constexpr u32 LINEAR_DEPTH = 2;

// Sums of a warp in shared memory: for each of eight rows of x, those of a strip's 32 rows, padded
// so that lanes never conflict in a bank.
constexpr u32 SUMS_PITCH = STRIP_ROWS + 4;
// A slot of a warp's ring: a step's weights, its columns of 8 or 16 rows of x, its tile's head.
__host__ __device__ constexpr u32 slot_bytes(u32 eights) { return STEP_BYTES + 512 * eights + 16; }
constexpr u32 SUMS_BYTES = LINEAR_WARPS * 8 * SUMS_PITCH * 4;
__host__ __device__ constexpr u32 linear_shared_bytes(u32 eights) {
    return LINEAR_WARPS * LINEAR_DEPTH * slot_bytes(eights) + SUMS_BYTES;
}

// Goes through the steps of the launch that a warp has still to request.
template <class Work>
struct Cursor {
    u32 item, step;
    const u8* data;         // the lane's, in the strip
    const FastHead* heads;  // the strip's
    Range at;

    __device__ void begin(const Work& work, u32 first, u32 lane, u32 warp) {
        for (item = first; item < work.items(); item += gridDim.x) {
            at = work.range(item);
            step = at.begin + warp;
            if (step >= at.end || !at.exists) continue;
            const auto& m = work.matrix(at);
            data = m.data + u64(at.strip) * steps_of(m.whole_columns) * STEP_BYTES + lane * 16;
            heads = static_cast<const FastHead*>(m.index) +
                    u64(at.strip) * tiles_across(m.whole_columns);
            return;
        }
    }
    __device__ void advance(const Work& work, u32 lane, u32 warp) {
        step += LINEAR_WARPS;
        if (step >= at.end) begin(work, item + gridDim.x, lane, warp);
    }
};

// Loads eight columns of a row of x if copies of 16 bytes are not aligned.
__device__ __noinline__ uint4 load_x_slow(const u16* from, u32 count) {
    return load_few(from, count);
}

// Requests a step: its weights, its head, its columns of the rows of x.
template <u32 EIGHTS, class Work>
__device__ __forceinline__ void ask_for_step(const Work& work, const Cursor<Work>& at, u32 slot,
                                             u32 lane, bool aligned) {
    // Lane l has row l / 4 of x, columns from l % 4 * 8 on; x is stored as four 8 x 8 matrices.
    const u32 mine = slot + lane * 16;
    const u32 column = at.step * STEP_COLUMNS + lane % 4 * 8;
    const u32 x_place = slot + STEP_BYTES + (lane % 4 * 8 + lane / 4) * 16;
    const u8* data = at.data + u64(at.step) * STEP_BYTES;
    copy_line_async(mine, data);
    copy_line_async(mine + 512, data + 512);
    copy_line_async(mine + 1024, data + 1024);
    if (lane == 0)
        copy_head_async(slot + STEP_BYTES + 512 * EIGHTS, at.heads + at.step / TILE_STEPS);
    const u32 count = min(max(work.launch.columns, column) - column, 8u);
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        const u32 row = lane / 4 + 8 * i, to = x_place + 512 * i;
        if (row >= at.at.rows) continue;
        const u16* from = work.x(at.at, row) + (count ? column : 0);
        if (aligned)
            copy_part_async(to, from, count * 2);
        else
            store_shared_16(to, load_x_slow(from, count));
    }
}

template <class Work>
__device__ __forceinline__ void store_product(const Work& work, const Range& at, u32 x_row, u32 row,
                                              float sum) {
    row += at.strip * STRIP_ROWS;
    if (row >= work.matrix_rows(at)) return;
    if (work.bias(at)) sum += widen_bf16(__ldg(work.bias(at) + row));
    work.y(at, x_row)[row] = round_to_bf16(work.scale(at, x_row, sum));
}

// Adds the warps' sums of 32 x 8 numbers, for eight rows of x, in the order of the warps. All warps
// of the group call it together.
template <class Work>
__device__ __forceinline__ void add_warps(const Work& work, const Range& at, float* partials,
                                          float* all, const float (&low)[4], const float (&high)[4],
                                          u32 first_row, u32 warp, u32 lane) {
    group_barrier(0, LINEAR_WARPS * LANES);  // the earlier sums have been read
    float* const mine = all + warp * 8 * SUMS_PITCH + lane / 4;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        float* const to = mine + (lane % 4 * 2 + k % 2) * SUMS_PITCH + 8 * (k / 2);
        to[0] = low[k];
        to[16] = high[k];
    }
    group_barrier(0, LINEAR_WARPS * LANES);
    const u32 x_row = first_row + threadIdx.x / STRIP_ROWS;
    const u32 row = threadIdx.x % STRIP_ROWS;
    if (threadIdx.x >= 8 * STRIP_ROWS || x_row >= at.rows) return;
    float sum = 0;
#pragma unroll
    for (u32 w = 0; w < LINEAR_WARPS; w++)
        sum += all[(w * 8 + x_row - first_row) * SUMS_PITCH + row];
    if (at.slices == 1)
        store_product(work, at, x_row, row, sum);
    else
        __stcg(partials + u64(at.partial) * partial_floats(at.rows) + x_row * STRIP_ROWS + row,
               sum);
}

// If a strip has slices, the last block to arrive adds their sums, in order. All threads of a group
// call it; they meet at the group's barrier.
template <u32 GROUP, class Launch>
__device__ __forceinline__ void add_slices(const Shared<Launch>& work, const Range& at, u32 thread,
                                           u32 threads) {
    if (at.slices == 1) return;
    __shared__ u32 before;
    const Launch& launch = work.launch;
    u32* counter = launch.counters + work.matrix(at).first_strip + at.strip;
    __threadfence();
    group_barrier(GROUP, threads);
    if (thread == 0) before = atomicAdd(counter, 1);
    group_barrier(GROUP, threads);
    if (before + 1 != at.slices) return;
    __threadfence();
    if (thread == 0) *counter = 0;
    const u32 size = partial_floats(at.rows);
    for (u32 i = thread; i < at.rows * STRIP_ROWS; i += threads) {
        const float* partial = launch.partials + u64(at.first_partial) * size + i;
        float sum = 0;
        for (u32 k = 0; k < at.slices; k++) sum += __ldcg(partial + u64(k) * at.stride * size);
        store_product(work, at, i / STRIP_ROWS, i % STRIP_ROWS, sum);
    }
}
template <u32 GROUP, u32 ROWS>
__device__ inline void add_slices(const Grouped<ROWS>&, const Range&, u32, u32) {}
template <class Launch>
__device__ inline float* partials_of(const Shared<Launch>& work) {
    return work.launch.partials;
}
template <u32 ROWS>
__device__ inline float* partials_of(const Grouped<ROWS>&) {
    return nullptr;
}

// Turns the warps' sums of an item into y, or into a slice's part of it.
template <u32 EIGHTS, class Work>
__device__ __forceinline__ void add_item(const Work& work, const Range& at, float* all,
                                         const float (&sums)[2][EIGHTS][4], u32 warp, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++)
        if (8 * i < at.rows)
            add_warps(work, at, partials_of(work), all, sums[0][i], sums[1][i], 8 * i, warp, lane);
    add_slices<0>(work, at, threadIdx.x, LINEAR_WARPS * LANES);
}

// Multiplies a step: 32 rows of weights by eight rows of x.
__device__ __forceinline__ void multiply_step(float (&low)[4], float (&high)[4],
                                              const u32 (&weights)[4][4], const uint4& x) {
    multiply(low, weights[0][0], weights[1][0], weights[0][1], weights[1][1], x.x, x.y);
    multiply(high, weights[2][0], weights[3][0], weights[2][1], weights[3][1], x.x, x.y);
    multiply(low, weights[0][2], weights[1][2], weights[0][3], weights[1][3], x.z, x.w);
    multiply(high, weights[2][2], weights[3][2], weights[2][3], weights[3][3], x.z, x.w);
}

template <u32 EIGHTS, class Work>
__device__ __forceinline__ void linear_fast(const Work& work) {
    constexpr u32 SLOT = slot_bytes(EIGHTS);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 ring = shared_address(linear_shared) + warp * LINEAR_DEPTH * SLOT;
    float* const all_sums =
        reinterpret_cast<float*>(linear_shared + LINEAR_WARPS * LINEAR_DEPTH * SLOT);
    const bool aligned = has_aligned_x(work.launch);
    Cursor<Work> cursor;
    cursor.begin(work, blockIdx.x, lane, warp);
#pragma unroll 1
    for (u32 i = 0; i < LINEAR_DEPTH; i++) {
        if (cursor.item < work.items()) {
            ask_for_step<EIGHTS>(work, cursor, ring + i * SLOT, lane, aligned);
            cursor.advance(work, lane, warp);
        }
        commit_copies();
    }
    u32 slot = 0, problems = 0;
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        const auto& m = work.matrix(at);
        if (!at.exists) continue;
        float sums[2][EIGHTS][4] = {};
#pragma unroll 1
        for (u32 step = at.begin + warp; step < at.end; step += LINEAR_WARPS) {
            const u32 place = ring + slot, mine = place + lane * 16;
            wait_for_all_but<LINEAR_DEPTH - 1>();
            __syncwarp();
            const uint4 p0 = load_shared_16(mine);
            const uint4 p1 = load_shared_16(mine + 512);
            const uint4 codes = load_shared_16(mine + 1024);
            uint4 x[EIGHTS];
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) x[i] = load_matrices(mine + STEP_BYTES + 512 * i);
            const Head head = {load_shared_8(place + STEP_BYTES + 512 * EIGHTS)};
            __syncwarp();
            if (cursor.item < work.items()) {
                ask_for_step<EIGHTS>(work, cursor, place, lane, aligned);
                cursor.advance(work, lane, warp);
            }
            commit_copies();
            slot = slot + SLOT == LINEAR_DEPTH * SLOT ? 0 : slot + SLOT;
            u32 weights[4][4];
            decode_step(weights, p0, p1, codes, head.base());
            if (head.has_entries(step % TILE_STEPS))
                problems |= place_entries(weights, head, step % TILE_STEPS,
                                          static_cast<const u32*>(m.rest), m.rest_count, lane);
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) multiply_step(sums[0][i], sums[1][i], weights, x[i]);
        }
        add_item<EIGHTS>(work, at, all_sums, sums, warp, lane);
    }
    if (problems) atomicOr(work.launch.status, problems);
}
}  // namespace df11::linear
