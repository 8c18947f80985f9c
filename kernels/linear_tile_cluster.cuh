// (header to come)
#pragma once
#include "linear_tile.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Blocks that share the columns of as many strips.
constexpr u32 PAIR = 2;
constexpr u32 CLUSTER_WARPS = 16;
// x of a tile, for two warps: fragments of 16 rows, 16 bytes of each lane.
constexpr u32 X_FRAGMENT = LANES * 16, X_TILE = BAND_UNITS * 2 * X_FRAGMENT;
#ifndef EARLY_X
#define EARLY_X 1
#endif
#ifndef CLUSTER_AHEAD
#define CLUSTER_AHEAD 2
#endif

__host__ __device__ constexpr u32 cluster_set_bytes(u32 x_rows, u32 columns) {
    return PAIR * most_runs<PAIR>(columns) * x_rows * RUN_PITCH * 4;
}
__host__ __device__ constexpr u32 cluster_fixed_bytes(u32 warps, u32 x_rows, u32 columns,
                                                      u32 tables, u32 sets) {
    return tables * u32(sizeof(TileTable)) + sets * cluster_set_bytes(x_rows, columns) +
           warps / PAIR * X_TILE;
}
__host__ __device__ constexpr u32 cluster_shared_bytes(u32 warps, u32 x_rows, u32 columns,
                                                       u32 staged_bytes, u32 tables, u32 sets) {
    return cluster_fixed_bytes(warps, x_rows, columns, tables, sets) +
           warps * TILE_SLOTS * (staged_bytes + SLOT_HEAD + BITS_AFTER);
}

__device__ inline void arrive_of_cluster(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
__device__ inline void wait_of_cluster(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}
__device__ inline u32 address_of(u32 address, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ inline float4 load_of_cluster(u32 mapped) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(mapped)
                 : "memory");
    return v;
}

// Until the sums of the item may be written.
__device__ inline void wait_for_cluster_set(TileShared& common, u32 number, u32 sets, u32 lane) {
    if (number < sets) return;
    const u32 phase = turns_of(number, sets) - 1;
    wait_until(&common.added, number + 1 - sets, common.set_empty + place_of(number, sets), phase,
               lane);
    wait_of_cluster(shared_address(common.set_empty + place_of(number, sets)), phase % 2);
}
__device__ __forceinline__ void make_cluster_barriers(TileShared& common, u32 runs, u32 warp,
                                                      u32 lane) {
    auto make = [](u64& barrier, u32 arrivals) {
        init_barrier(shared_address(&barrier), arrivals);
    };
    const u32 of_slots = warp - TILE_HELPERS;
    if (warp >= TILE_HELPERS && lane < TILE_SLOTS)
        make(common.slot_full[of_slots][lane], SLOT_ARRIVALS),
            make(common.slot_empty[of_slots][lane], SLOT_LANES);
    if (warp == 0) {
        if (lane < MOST_RUN_SETS)
            make(common.set_full[lane], PAIR * runs * SLOT_LANES),
                make(common.other_full[lane], SLOT_LANES),
                make(common.set_empty[lane], PAIR * SLOT_LANES);
        if (lane < MOST_TABLES) make(common.filled[lane], LANES);
        if (lane == 0) common.added = common.fills = 0;
    }
    show_barriers();
}

// x of a tile in shared memory, for the two warps that have it of a strip each.
struct PairX {
    u32 held = ~0u;  // the tile
    u32 area;        // shared address of the lane's first 16 bytes
    u32 warp;

    // Both warps ask for the same tiles, in the same order.
    __device__ __forceinline__ void move_to(const Shared& work, u32 tile, u32 lane) {
        if (tile == held) return;
        constexpr u32 UNITS = BAND_UNITS / PAIR;
        const u32 row = lane / 4, rows = work.launch.x_rows, first = warp % PAIR * UNITS;
        uint4 x[UNITS][2] = {};
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u64 from = reinterpret_cast<u64>(
                work.launch.x + (row + 8 * i) * work.launch.x_pitch + tile * TILE_WIDTH +
                first * STEP_COLUMNS + lane % 4 * 8);
#pragma unroll
            for (u32 unit = 0; unit < UNITS; unit++)
                load_x_where(x[unit][i], from + unit * STEP_COLUMNS * 2, row + 8 * i < rows);
        }
        const u32 group = 2 + warp / PAIR;
        if (held != ~0u) group_barrier(group, PAIR * LANES);
#pragma unroll
        for (u32 unit = 0; unit < UNITS; unit++) {
            make_fragments(x[unit]);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                store_shared_16(area + ((first + unit) * 2 + i) * X_FRAGMENT, x[unit][i]);
        }
        held = tile;
        group_barrier(group, PAIR * LANES);
        asm volatile("" ::: "memory");
    }
    __device__ __forceinline__ void take(uint4 (&to)[2], u32 unit) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) to[i] = load_shared_16(area + (unit * 2 + i) * X_FRAGMENT);
    }
};

// Sums of a run, in registers until it ends.
struct RunSums {
    float of[TILE_BANDS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) of[band][i] = 0;
    }
    __device__ __forceinline__ void add(u32 to_band, const Sums<2>& sums) {
        const float2 a = sums.of(0), b = sums.of(1);
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
            if (band == to_band)
                of[band][0] += a.x, of[band][1] += a.y, of[band][2] += b.x, of[band][3] += b.y;
    }
    // `to`: shared address of those of the run.
    __device__ __forceinline__ u32 place(u32 to, u32 band, u32 eight, u32 lane) const {
        return to + (sums_place(lane) ^ band * BAND_ROWS * 4) + eight * 8 * RUN_PITCH * 4;
    }
    __device__ __forceinline__ void load(u32 from, u32 x_rows, u32 lane) {
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                if (lane / 4 + 8 * i >= x_rows) continue;
                const uint2 v = load_shared_8(place(from, band, i, lane));
                of[band][2 * i] = __uint_as_float(v.x), of[band][2 * i + 1] = __uint_as_float(v.y);
            }
    }
    __device__ __forceinline__ void store(u32 to, u32 x_rows, u32 lane) const {
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                if (lane / 4 + 8 * i < x_rows)
                    store_shared_8(place(to, band, i, lane),
                                   make_uint2(__float_as_uint(of[band][2 * i]),
                                              __float_as_uint(of[band][2 * i + 1])));
    }
};

__device__ __forceinline__ void multiply_shared(const Shared& work, const TileBlock& block,
                                                TileShared& common, FirstTile<PAIR>& tile, u32 warp,
                                                u32 warps, u32 lane) {
    constexpr u32 AHEAD = CLUSTER_AHEAD, PAIRS = BAND_UNITS / 2;
    lane = __shfl_sync(ALL_LANES, lane, lane);
    u32 problems = 0, fill = 0;
    const u32 first_tile = tile.bring(work, block, warp, warps, lane, problems);
    wait_for_launch_before();
    PairX x;
    x.area = block.xs + warp / PAIR * X_TILE + lane * 16, x.warp = warp;
    if (first_tile != ~0u) x.move_to(work, first_tile, lane);
    wait_for_copies();
    group_barrier(1, warps * LANES);
    asm volatile("" ::: "memory");
    wait_for_cluster();
    RunSums run;
    bool in_registers = false;  // sums of the run so far
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        const u32 place = warp * TILE_SLOTS + turn % TILE_SLOTS,
                  slot = block.slots + place * block.slot_bytes;
        wait_parity(block.slot_full + place * 8, turn / TILE_SLOTS % 2);
        const uint4 one = load_shared_16(slot), two = load_shared_16(slot + 16);
        if (two.w & TICKET_END) break;
        const bool first = two.w & TICKET_FIRST;
        const u8* plane = reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16;
        uint4 ahead[AHEAD];
        if (two.w & TICKET_WHOLE)
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) ahead[i] = load_plane(plane + i * PLANE_PAIR);
        if (two.w & TICKET_HAS_X) x.move_to(work, one.z, lane);
        if (two.y != fill) fill = two.y, wait_for_table(common, fill, block.table_count, lane);
        if (two.w & TICKET_ABSENT) {
            run.clear();  // nobody adds these sums
        } else if (!(two.w & TICKET_WHOLE)) {
            wait_for_cluster_set(common, one.w, block.set_count, lane);
            if (in_registers) run.store(two.x, work.launch.x_rows, lane), in_registers = false;
            const uint4 three = load_shared_16(slot + 32);
            problems |= multiply_edge<2>(work, {three.x, three.y, one.z},
                                         table_of(fill, block.table_count), slot + SLOT_HEAD,
                                         block.bits_bytes(), two.x, first, lane);
            run.clear();  // not kept over the call
        } else {
            if (first)
                run.clear();
            else if (!in_registers)
                run.load(two.x, work.launch.x_rows, lane);
            Window bits;
            bits.begin(table_of(fill, block.table_count), slot + SLOT_HEAD, block.bits_bytes(),
                       load_shared(slot + TICKET_BYTES + lane * 8));
#pragma unroll 1
            for (u32 band = 0; band < TILE_BANDS; band++) {
                Sums<2> sums;
                const bool more = band + 1 < TILE_BANDS;
                if (more && lane < PLANE_BAND / 128) prefetch_l2(plane + PLANE_BAND + lane * 112);
#pragma unroll
                for (u32 unit = 0; unit < BAND_UNITS; unit += 2) {
                    const u32 pair = unit / 2;
                    uint4& p = ahead[pair % AHEAD];
                    uint4 of_unit[2];
                    u32 e[4];
                    if (EARLY_X) x.take(of_unit, unit);
                    decode_unit(bits, e, problems);
                    if (!EARLY_X) x.take(of_unit, unit);
                    sums.add(merge_words(e, p.x, p.y), of_unit);
                    if (EARLY_X) x.take(of_unit, unit + 1);
                    decode_unit(bits, e, problems);
                    if (!EARLY_X) x.take(of_unit, unit + 1);
                    const uint4 w = merge_words(e, p.z, p.w);
                    load_plane_where(p, plane + (pair + AHEAD) * PLANE_PAIR,
                                     pair + AHEAD < PAIRS || more);
                    sums.add(w, of_unit);
                }
                plane += PLANE_BAND;
                run.add(band, sums);
            }
            const uint2 ends = load_shared_8(slot + TICKET_BYTES + lane * 8);
            problems |= check_end({ends.x, ends.y}, bits.place(slot + SLOT_HEAD));
            in_registers = true;
        }
        const uint4 last = load_shared_16(slot + 16);
        const u32 number = load_shared(slot + 12),
                  set = block.set_full + 8 * place_of(number, block.set_count);
        leave_slot(block.slot_empty + place * 8, lane);
        if (in_registers && (last.z || !(last.w & TICKET_ONE_RUN))) {
            wait_for_cluster_set(common, number, block.set_count, lane);
            run.store(last.x, work.launch.x_rows, lane);
            in_registers = false;
        }
        __syncwarp();
        if (lane < SLOT_LANES)
            for (u32 i = 0; i < last.z; i++) arrive(set);
    }
    if (problems) atomicOr(work.status(), problems);
}

// Adds the runs' sums of one strip of item after item, in order.
__device__ __forceinline__ void add_cluster(const Shared& work, const TileBlock& block,
                                            TileShared& common) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows, sets = block.set_count,
              rank = blockIdx.x % PAIR;
    u32 number = 0, fills = 0;
    MatrixWalk filled;
    filled.start(work, blockIdx.x - rank);
    u32 matrix = filled.matrix;
    for (u32 i = 1; i < block.table_count; i++)
        fill_table(work, block, common, filled, fills, lane);
    wait_for_launch_before();
    wait_for_cluster();
    for (u32 item = blockIdx.x - rank; item < work.items(); item += gridDim.x) {
        const Range both = work.range(item);
        if (!both.exists) continue;
        if (both.matrix != matrix) {
            // All runs of the matrix before have been added.
            matrix = both.matrix;
            fill_table(work, block, common, filled, fills, lane);
        }
        const Runs runs((both.end + TILE_STEPS - 1) / TILE_STEPS - both.begin / TILE_STEPS);
        const Range at = work.range(item + rank);
        const u32 place = place_of(number, sets), half = runs_before<PAIR>(runs.count, 1),
                  phase = turns_of(number, sets) % 2;
        if (rank == 0 || runs.count > half) wait_parity(block.set_full + 8 * place, phase);
        __syncwarp();
        if (lane < SLOT_LANES) arrive_of_cluster(block.other_full + 8 * place, rank ^ 1);
        wait_of_cluster(block.other_full + 8 * place, phase);
        const u32 pitch = x_rows * RUN_PITCH * 4,
                  mine = block.sets + (place * PAIR + rank) * block.runs * pitch;
        for (u32 first = 0; first < x_rows; first += 4) {
            const u32 x_row = first + lane / 8, row = lane % 8 * 4, read = min(x_row, x_rows - 1);
            float4 sum = {};
            u32 run = 0;
#pragma unroll 1
            for (u32 k = 0; k < PAIR; k++) {
                const u32 end = k ? runs.count : half;
                u32 from = address_of(mine + (read * RUN_PITCH + run_place(read, row)) * 4, k);
#pragma unroll 1
                while (run < end) {
                    float4 v[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (run + i < end) v[i] = load_of_cluster(from + i * pitch);
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (run + i < end)
                            sum.x += v[i].x, sum.y += v[i].y, sum.z += v[i].z, sum.w += v[i].w;
                    run += min(4, end - run), from += 4 * pitch;
                }
            }
            if (x_row >= x_rows || !at.exists) continue;
            const float of[4] = {sum.x, sum.y, sum.z, sum.w};
            if (at.slices == 1)
#pragma unroll
                for (u32 i = 0; i < 4; i++) store_product(work, at, x_row, row + i, of[i]);
            else
                __stcg(reinterpret_cast<float4*>(work.launch.partials +
                                                 u64(at.partial) * partial_floats(x_rows) +
                                                 x_row * STRIP_ROWS + row),
                       sum);
        }
        __syncwarp();
        if (lane < SLOT_LANES)
            arrive_of_cluster(block.set_empty + 8 * place, rank),
                arrive_of_cluster(block.set_empty + 8 * place, rank ^ 1);
        // Until the other block has read what is here.
        wait_of_cluster(block.set_empty + 8 * place, phase);
        number++;
        __syncwarp();
        if (lane == 0) atomicExch(&common.added, number);
        if (at.exists) add_slices<1>(work, at);
    }
}

__device__ __forceinline__ void linear_tile_cluster(const Shared& work) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES,
              warps = blockDim.x / LANES - TILE_HELPERS;
    __shared__ TileShared common;
    const bool decodes = warp >= TILE_HELPERS;
    FirstTile<PAIR> first;
    if (decodes) first.ask(work, warp - TILE_HELPERS, lane);
    TileBlock block;
    block.runs = most_runs<PAIR>(work.columns());
    block.set_full = shared_address(common.set_full),
    block.other_full = shared_address(common.other_full),
    block.set_empty = shared_address(common.set_empty),
    block.slot_full = shared_address(common.slot_full),
    block.slot_empty = shared_address(common.slot_empty);
    make_cluster_barriers(common, block.runs, warp, lane);
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    __syncthreads();
    let_next_launch_begin();
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    const u32 tables = work.launch.tile_tables, sets = work.launch.tile_sets,
              fixed = cluster_fixed_bytes(warps, work.launch.x_rows, work.columns(), tables, sets);
    block.table = shared_address(linear_shared), block.table_count = tables,
    block.sets = block.table + tables * u32(sizeof(TileTable)), block.set_count = sets,
    block.xs = block.sets + sets * cluster_set_bytes(work.launch.x_rows, work.columns());
    block.slots = block.table + fixed,
    block.slot_bytes = (room - fixed) / (warps * TILE_SLOTS * 16) * 16;
    if (!decodes) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (warp == 0)
            add_cluster(work, block, common);
        else {
            bring_tiles<PAIR>(work, block, warp - 1, warps, lane);
            wait_for_cluster();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        multiply_shared(work, block, common, first, warp - TILE_HELPERS, warps, lane);
    }
    // Until no block reads here any more.
    meet_cluster();
}
#endif
