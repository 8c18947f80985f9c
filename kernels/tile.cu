// Decodes the `tile` layout into BF16 (tile_decode.cuh).
//
// Budget (kernels/ptx/tile.sm_90.cubin: 80 registers, no spills), BF16 out / copy rate, H200, L2
// cold:
//   warps x blocks per SM  218 M weights, 7 tensors, one launch    4096 x 4096 alone
//   8 x 3                  0.510   204.1 us, 2,138 of 4,189 GB/s    0.361   22.2 us
//   12 x 2                 0.508                                    0.362
//   24 x 1                 0.509                                    0.352
// A block may have any number of warps up to 24. The host chooses the number with which most warps
// run at once, as near to 8 as possible (src/gpu/fit.rs): 12 x 2 on compute capability 8.0, 24 x 1
// on 8.6, 8.9 and 12.0; fewer if a tile of the launch has many bits. Half of the columns, or of the
// rows, of all seven tensors: 0.488 (benches/record/2026-11-22-tile-columns-h200.md). Limits, and
// what was tried and rejected: benches/record/2026-11-20-tile-kernel-h200.md.
#include "tile_decode.cuh"

namespace df11::tile {
extern "C" __global__ void __launch_bounds__(WARPS<Bf16>* LANES, 1)
    df11_tile_decode(const TileTask* __restrict__ tasks, u32 task_count, u64 unit_count,
                     u32* status, u64 output) {
    decode_tasks<Bf16>(tasks, task_count, unit_count, status, output);
}
// The same kernel with tasks by value, for matrices in memory that the caller may move: nothing of
// the launch lies in device memory.
extern "C" __global__ void __launch_bounds__(WARPS<Bf16>* LANES, 1)
    df11_tile_decode_few(const __grid_constant__ TileTasks tasks, u32 task_count, u64 unit_count,
                         u32* status, u64 output) {
    decode_tasks<Bf16>(tasks.tasks, task_count, unit_count, status, output);
}
extern "C" __global__ void df11_tile_tables(const TableTask* tasks) { build_tables<Bf16>(tasks); }

// Values that the host needs; src/gpu/module.rs has the same fields.
struct Constants {
    struct {
        u32 task = sizeof(TileTask);
        u32 table = sizeof(TileTable);
        u32 table_task = sizeof(TableTask);
    } bytes;
    u32 few_tasks = FEW_TASKS;
    u32 warp = STAGE_BEFORE + STAGE_AFTER;  // bytes of a stage besides a tile's bits
    u32 max_warps = WARPS<Bf16>;           // most warps per block
    u32 good_warps = TILE_GOOD_WARPS;
};
extern "C" {
__constant__ Constants df11_tile_constants = {};
}
}  // namespace df11::tile
