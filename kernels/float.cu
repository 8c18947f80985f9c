// Decodes tiles of other floats than BF16 (tile_decode.cuh, float.cuh): for each split of
// src/float.rs a kernel, the same one with tasks by value (tile.cu says why), and one for its
// decode tables. Not measured yet.
#include "tile_decode.cuh"

namespace df11::tile {
typedef Float<1, 4, 4> E4m3;
typedef Float<1, 5, 3> E5m2;
typedef Float<2, 5, 11> F16;
typedef Float<2, 8, 4> Bf16OfE4m3;
typedef Float<4, 8, 24> F32;
typedef Float<4, 8, 11> F32OfF16;
typedef Float<4, 8, 8> F32OfBf16;

#define KERNELS(NAME, F)                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS<F>* LANES, 1) df11_float_decode_##NAME(     \
        const TileTask* __restrict__ tasks, u32 task_count, u64 unit_count, u32* status,           \
        u64 output) {                                                                              \
        decode_tasks<F>(tasks, task_count, unit_count, status, output);                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS<F>* LANES, 1) df11_float_decode_few_##NAME( \
        const __grid_constant__ TileTasks tasks, u32 task_count, u64 unit_count, u32* status,      \
        u64 output) {                                                                              \
        decode_tasks<F>(tasks.tasks, task_count, unit_count, status, output);                      \
    }                                                                                              \
    extern "C" __global__ void df11_float_tables_##NAME(const TableTask* tasks) {                  \
        build_tables<F>(tasks);                                                                    \
    }

KERNELS(e4m3, E4m3)
KERNELS(e5m2, E5m2)
KERNELS(f16, F16)
KERNELS(bf16_of_e4m3, Bf16OfE4m3)
KERNELS(f32, F32)
KERNELS(f32_of_f16, F32OfF16)
KERNELS(f32_of_bf16, F32OfBf16)

#define SPLIT(F) {F::BYTES, F::EXPONENT, F::KEPT}

// Values that the host needs, the last ones for each kernel; src/gpu/module.rs has the same fields.
struct Constants {
    struct {
        u32 task = sizeof(TileTask);
        u32 table = sizeof(TileTable);
        u32 table_task = sizeof(TableTask);
    } bytes;
    u32 few_tasks = FEW_TASKS;
    u32 warp = STAGE_BEFORE + STAGE_AFTER;  // bytes of a stage besides a tile's bits
    u32 good_warps = TILE_GOOD_WARPS;
    // Most warps per block.
    u32 most_warps[7] = {WARPS<E4m3>, WARPS<E5m2>,     WARPS<F16>,      WARPS<Bf16OfE4m3>,
                         WARPS<F32>,  WARPS<F32OfF16>, WARPS<F32OfBf16>};
    // How each float is split: bytes, bits of the exponent, kept bits.
    u32 splits[7][3] = {SPLIT(E4m3), SPLIT(E5m2),     SPLIT(F16),      SPLIT(Bf16OfE4m3),
                        SPLIT(F32),  SPLIT(F32OfF16), SPLIT(F32OfBf16)};
};
extern "C" {
__constant__ Constants df11_float_constants = {};
}
}  // namespace df11::tile
