// Sums of runs become y, and tables come (linear_tile.cuh).
#pragma once
#include "linear_tile_block.cuh"
#include "linear_tile_unit.cuh"

// The block's matrices, one after the other.
struct MatrixWalk {
    u32 item, matrix;  // of the launch; an item of the matrix, if there is one
    __device__ void start(const Shared& work) {
        item = blockIdx.x, matrix = ~0u;
        next(work);
    }
    __device__ bool exists(const Shared& work) const { return item < work.items(); }
    __device__ void next(const Shared& work) {
        for (; item < work.items(); item += gridDim.x) {
            const Range range = work.range(item);
            if (!range.exists || range.matrix == matrix) continue;
            matrix = range.matrix;
            return;
        }
    }
};
// Fills the place of the table after the last one, if the block has another matrix.
__device__ __forceinline__ void fill_table(const Shared& work, const TileBlock& block,
                                           TileShared& common, MatrixWalk& last, u32& fills,
                                           u32 lane) {
    if (last.exists(work)) last.next(work);
    if (!last.exists(work)) return;
    fills++;
    ask_for_table(work.launch.matrices[last.matrix].table,
                  block.table + table_of(fills, block.table_count), lane, LANES);
    wait_for_copies();
    tell(&common.fills, fills, common.filled + place_of(fills, block.table_count), lane);
}

// Adds the runs' sums of item after item, in order, and fills tables as their places become free.
// One warp, the first.
__device__ __forceinline__ void add_runs(const Shared& work, const TileBlock& block,
                                         const float* sums, TileShared& common) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows, sets = block.set_count;
    u32 number = 0, fills = 0;
    MatrixWalk filled;
    filled.start(work);
    u32 matrix = filled.matrix;
    for (u32 i = 1; i < block.table_count; i++)
        fill_table(work, block, common, filled, fills, lane);
    wait_for_launch_before();
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const Range at = work.range(item);
        if (!at.exists) continue;
        if (at.matrix != matrix) {
            // All runs of the matrix before have been added.
            matrix = at.matrix;
            fill_table(work, block, common, filled, fills, lane);
        }
        const Runs runs((at.end + TILE_STEPS - 1) / TILE_STEPS - at.begin / TILE_STEPS);
        const u32 place = place_of(number, sets);
        wait_parity(block.set_full + 8 * place, turns_of(number, sets) % 2);
        const float* const set = sums + place * (run_set_bytes(x_rows) / 4);
        // Four rows of x at once: each adds in order, and waits.
        constexpr u32 ROWS = 4;
        for (u32 first = 0; first < x_rows; first += ROWS) {
            float sum[ROWS] = {};
            const float* from[ROWS];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                const u32 row = min(first + i, x_rows - 1);
                from[i] = set + row * RUN_PITCH + run_place(row, lane);
            }
#pragma unroll 4
            for (u32 run = 0; run < runs.count; run++)
#pragma unroll
                for (u32 i = 0; i < ROWS; i++) sum[i] += from[i][run * x_rows * RUN_PITCH];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                if (first + i >= x_rows) break;
                if (at.slices == 1)
                    store_product(work, at, first + i, lane, sum[i]);
                else
                    __stcg(work.launch.partials + u64(at.partial) * partial_floats(x_rows) +
                               (first + i) * STRIP_ROWS + lane,
                           sum[i]);
            }
        }
        number++;
        tell(&common.added, number, common.set_empty + place, lane);
        add_slices<1>(work, at);
    }
}
