// linear_fast_16.cuh for compute capability 9.0: one warp of its own requests the weights, in bulk,
// and another one x. The blocks of a cluster have neighbouring strips and share x: each requests a
// part of its rows, for all of them.
#pragma once
#include "linear_fast_16.cuh"

namespace df11::linear {
constexpr u32 MAX_STAGES = 16;
// The barriers, full and empty, precede the stages. Rows of x in a stage are 16 bytes apart modulo
// 128, so that the rows of a matrix never conflict in a bank.
constexpr u32 BULK_X_PLACE = LINEAR_WARPS * STEP_BYTES, BULK_X_PITCH = LINEAR_WARPS * 64 + 16;
__host__ __device__ constexpr u32 stage_bytes(u32 eights) {
    return (BULK_X_PLACE + eights * 8 * BULK_X_PITCH + LINEAR_WARPS + 127) / 128 * 128;
}
constexpr u32 BULK_FIRST_BYTES = 3 * MAX_STAGES * 8 + SUMS_BYTES;
// Stages that a block has in flight; blocks per cluster.
constexpr u32 LINEAR_STAGES = 4, LINEAR_CLUSTER = 2;
static_assert(LINEAR_GROUP % LINEAR_CLUSTER == 0 && LINEAR_STAGES <= MAX_STAGES, "a ring");
__host__ __device__ constexpr u32 bulk_shared_bytes(u32 eights) {
    return BULK_FIRST_BYTES + LINEAR_STAGES * stage_bytes(eights);
}

// Waits for everything that earlier launches have written; returns at once unless two launches
// overlap. Only then does it let the next launch begin: a kernel that waits for this one alone, as
// compilers make them, may read what was written before this one.
__device__ inline void wait_for_launch_before() {
    if constexpr (HOPPER) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
}

__device__ inline void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive(u32 barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(barrier) : "memory");
}
// Whether the last phase of this parity, the current or the previous one, is complete.
__device__ inline u32 test_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
// Arrives when the copies that this thread has started so far are complete.
__device__ inline void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile(
        "{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
// Waits until the last phase of this parity, the current or the previous one, is complete.
__device__ inline void wait_for(u32 barrier, u32 parity) {
    if constexpr (HOPPER)
        asm volatile(
            "{ .reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra "
            "DONE;\nbra AGAIN;\nDONE: }" ::"r"(barrier),
            "r"(parity)
            : "memory");
    else
        while (!test_parity(barrier, parity)) {
        }
}
// Shows initialised barriers to asynchronous copies.
__device__ inline void show_barriers() {
    if constexpr (HOPPER) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes writes to shared memory that this thread knows of visible to later copies and products.
__device__ inline void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Copies multiples of 16 bytes, aligned to 16. `once`: the bytes are not read again.
template <u32 CLUSTER>
__device__ inline void copy_bulk_to_all(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (CLUSTER == 1)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(to),
            "l"(from), "r"(bytes), "r"(barrier)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1], %2, [%3], %4;" ::"r"(to),
            "l"(from), "r"(bytes), "r"(barrier), "h"(u16((1 << CLUSTER) - 1))
            : "memory");
}
__device__ inline u64 once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ inline void copy_bulk_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(once_policy())
        : "memory");
}
// Arrives at the barrier of block `rank` of the cluster that has the same place as `barrier` here.
__device__ inline void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; mbarrier.arrive.shared::cluster.b64 _, "
        "[a]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
__device__ inline void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// A place in the ring of stages: the stage, its barriers, and the parity of the rounds through the
// ring.
struct Stages {
    u32 first, end, bytes, first_full;
    u32 place, full, phase = 0;
    __device__ u32 empty() const { return full + MAX_STAGES * 8; }
    __device__ u32 x_empty() const { return full + 2 * MAX_STAGES * 8; }
    __device__ void next() {
        place += bytes;
        full += 8;
        if (place == end) {
            place = first;
            full = first_full;
            phase ^= 1;
        }
    }
};
// Keeps a value in a register: the compiler would compute it again in each step.
__device__ inline u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

template <class Work>
__device__ __forceinline__ void ask_for_weights(const Work& work, Stages stages, u32 lane) {
    if (lane) return;
    const u32 tiles = tiles_across(work.launch.columns);
    bool filled = false;
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        const auto& m = work.matrix(at);
        const u8* data = m.data + u64(at.strip) * steps_of(m.whole_columns) * STEP_BYTES;
        const FastHead* heads =
            static_cast<const FastHead*>(m.index) + u64(at.strip) * tiles_across(m.whole_columns);
        for (u32 step = at.begin; step < at.end; step += LINEAR_WARPS) {
            const u32 place = stages.place;
            const u32 full = stages.full;
            const u32 bytes = min(at.end - step, LINEAR_WARPS) * STEP_BYTES;
            if (filled) wait_for(stages.empty(), stages.phase ^ 1);
            arrive_expecting(full, at.exists ? bytes : 0);
            if (at.exists) copy_bulk_once(place, data + u64(step) * STEP_BYTES, bytes, full);
            const u32 to = place + stages.bytes - LINEAR_WARPS;
#pragma unroll
            for (u32 i = 0; i < LINEAR_WARPS / TILE_STEPS; i++)
                if (at.exists && step / TILE_STEPS + i < tiles)
                    copy_head_async(to + 8 * i, heads + step / TILE_STEPS + i);
            arrive_with_copies(full);
            stages.next();
            filled |= stages.place == stages.first;
        }
    }
}

// Copies columns of a row of x that copies of 16 bytes cannot take, up to whole steps; columns that
// do not exist become zero.
__device__ __noinline__ void copy_x_slow(const u16* from, u32 count, u32 to, u32 lane) {
    for (u32 i = lane; i < (count + STEP_COLUMNS - 1) / STEP_COLUMNS * STEP_COLUMNS; i += LANES) {
        const u16 value = i < count ? __ldg(from + i) : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * i), "h"(value) : "memory");
    }
}

// Writes zeros for the columns after the last one of x, up to a whole step.
__device__ __noinline__ void clear_x(u32 to, u32 rows, u32 pitch, u32 first, u32 lane) {
    for (u32 row = lane; row < rows; row += LANES)
        for (u32 i = first; i % STEP_COLUMNS; i += 8)
            store_shared_16(to + row * pitch + 2 * i, make_uint4(0, 0, 0, 0));
    fence_shared();
}

template <u32 CLUSTER, class Work>
__device__ __forceinline__ void ask_for_x(const Work& work, Stages stages, u32 lane, bool aligned) {
    wait_for_launch_before();
    bool filled = false;
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        for (u32 step = at.begin; step < at.end; step += LINEAR_WARPS) {
            const u32 place = stages.place, full = stages.full;
            if (filled) {
                wait_for(stages.empty(), stages.phase ^ 1);
                if (CLUSTER > 1) {
                    // Waits until all blocks of the cluster have emptied the stage.
                    if (lane < CLUSTER) arrive_at(stages.x_empty(), lane);
                    wait_for(stages.x_empty(), stages.phase ^ 1);
                }
            }
            const u32 count = min(min(at.end - step, LINEAR_WARPS) * STEP_COLUMNS,
                                  work.launch.columns - step * STEP_COLUMNS);
            const u32 bytes = aligned ? count * 2 : 0;
            if (!aligned)
                for (u32 row = 0; row < at.rows; row++)
                    copy_x_slow(work.x(at, row) + step * STEP_COLUMNS, count,
                                place + BULK_X_PLACE + row * BULK_X_PITCH, lane);
            else if (count % STEP_COLUMNS)
                clear_x(place + BULK_X_PLACE, at.rows, BULK_X_PITCH, count, lane);
            __syncwarp();
            if (lane == 0) arrive_expecting(full, bytes * at.rows);
            __syncwarp();
            if (bytes)
                for (u32 row = lane * CLUSTER + blockIdx.x % CLUSTER; row < at.rows;
                     row += LANES * CLUSTER)
                    copy_bulk_to_all<CLUSTER>(place + BULK_X_PLACE + row * BULK_X_PITCH,
                                              work.x(at, row) + step * STEP_COLUMNS, bytes, full);
            stages.next();
            filled |= stages.place == stages.first;
        }
    }
}

template <u32 EIGHTS, class Work>
__device__ __forceinline__ void multiply_items(const Work& work, Stages stages, u32 warp,
                                               u32 lane) {
    wait_for_launch_before();
    float* const all_sums = reinterpret_cast<float*>(linear_shared + 3 * MAX_STAGES * 8);
    const u32 weights_place = kept(warp * STEP_BYTES + lane * 16);
    const u32 head_place = kept(stages.bytes - LINEAR_WARPS + warp / TILE_STEPS * 8);
    const u32 x_place = kept(BULK_X_PLACE + warp * 64 + lane % 8 * BULK_X_PITCH + lane / 8 * 16);
    u32 problems = 0;
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        const auto& m = work.matrix(at);
        float sums[2][EIGHTS][4] = {};
        const u32 end = kept(at.exists ? at.end : 0);
        const u32 rounds_end = kept(at.end + warp);
#pragma unroll 1
        for (u32 step = at.begin + warp; step < rounds_end; step += LINEAR_WARPS) {
            wait_for(stages.full, stages.phase);
            const bool has = step < end;
            // Rows that do not exist contain whatever is there: their sums are not used and affect
            // no others.
            auto load_x = [&](u32 i) {
                return load_matrices(stages.place + x_place + 8 * i * BULK_X_PITCH);
            };
            uint4 p0, p1, codes, x[EIGHTS];
            Head head = {};
            if (has) {
                const u32 mine = stages.place + weights_place;
                p0 = load_shared_16(mine);
                p1 = load_shared_16(mine + 512);
                codes = load_shared_16(mine + 1024);
                head.words = load_shared_8(stages.place + head_place);
#pragma unroll
                for (u32 i = 0; i < EIGHTS; i++) x[i] = load_x(i);
            }
            __syncwarp();
            if (lane == 0) arrive(stages.empty());
            stages.next();
            if (has) {
                u32 weights[4][4];
                decode_step(weights, p0, p1, codes, head.base());
                if (head.has_entries(step % TILE_STEPS))
                    problems |= place_entries(weights, head, step % TILE_STEPS,
                                              static_cast<const u32*>(m.rest), m.rest_count, lane);
#pragma unroll
                for (u32 i = 0; i < EIGHTS; i++)
                    multiply_step(sums[0][i], sums[1][i], weights, x[i]);
            }
        }
        if (!at.exists) continue;
        add_item<EIGHTS>(work, at, all_sums, sums, warp, lane);
    }
    if (problems) atomicOr(work.launch.status, problems);
}

template <u32 EIGHTS, u32 CLUSTER, class Work>
__device__ __forceinline__ void linear_bulk(const Work& work) {
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 warp = kept(threadIdx.x / LANES);
    const u32 room = dynamic_shared_bytes();
    const u32 base = kept(shared_address(linear_shared));
    const u32 first = base + BULK_FIRST_BYTES;
    const u32 bytes = stage_bytes(EIGHTS);
    const u32 count = min((room - BULK_FIRST_BYTES) / bytes, MAX_STAGES);
    const Stages stages = {first, first + count * bytes, bytes, base, first, base};
    const bool aligned = has_aligned_x(work.launch);
    // The weights' warp initialises the barriers and requests at once; the block's other warps wait
    // for these barriers, and the warp that writes x into other blocks waits for theirs too.
    if (warp == LINEAR_WARPS) {
        if (lane == 0) {
            for (u32 i = 0; i < count; i++)
                init_barrier(base + 8 * i, 3), init_barrier(stages.empty() + 8 * i, LINEAR_WARPS),
                    init_barrier(stages.x_empty() + 8 * i, CLUSTER);
            show_barriers();
        }
        __syncwarp();
        asm volatile("bar.arrive 2, %0;" ::"n"((LINEAR_WARPS + 2) * LANES) : "memory");
        if (CLUSTER > 1) arrive_at_cluster();
        ask_for_weights(work, stages, lane);
        __syncwarp();
    } else {
        if (CLUSTER > 1) arrive_at_cluster();
        asm volatile("bar.sync 2, %0;" ::"n"((LINEAR_WARPS + 2) * LANES) : "memory");
        if (warp == LINEAR_WARPS + 1) {
            if (CLUSTER > 1) wait_for_cluster();
            ask_for_x<CLUSTER>(work, stages, lane, aligned);
        } else {
            multiply_items<EIGHTS>(work, stages, warp, lane);
        }
        __syncwarp();
    }
    if (CLUSTER == 1) return;
    // Waits until no block of the cluster writes here any more.
    if (warp != LINEAR_WARPS + 1) wait_for_cluster();
    arrive_at_cluster();
    wait_for_cluster();
}
}  // namespace df11::linear
