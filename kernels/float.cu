// Decodes tiles of other floats than BF16 (tile_decode.cuh, float.cuh): for each split of
// src/float.rs a kernel, the same one with tasks by value (tile.cu says why), and one for its
// decode tables. A launch of 0 tasks takes those of the experts that df11_float_choose has chosen:
// of floats of 8 bits alone, because others have no registers left.
#include "tile_decode.cuh"

namespace df11::tile {
typedef Float<1, 4, 4> E4m3;
typedef Float<1, 5, 3> E5m2;
typedef Float<2, 5, 11> F16;
typedef Float<2, 8, 4> Bf16OfE4m3;
typedef Float<4, 8, 24> F32;
typedef Float<4, 8, 11> F32OfF16;
typedef Float<4, 8, 8> F32OfBf16;

// Precedes tasks that df11_float_choose has copied: the numbers of their launch.
struct alignas(16) Chosen {
    u64 unit_count;
    u32 task_count;
    u32 unused[29];
};
static_assert(sizeof(Chosen) == sizeof(TileTask), "tasks after it are aligned");

// Most experts of a mixture.
constexpr u32 MAX_EXPERTS = 1024;

// Tasks of the experts of a mixture, and the experts that a router chose: an argument by value.
struct ChooseTask {
    const TileTask* tasks;
    const u32* experts;  // that of each task, less than `expert_count`
    Chosen* chosen;      // and room for all tasks after it
    const void* ids;     // of experts: `id_count` numbers of 64 bits if `wide`, otherwise of 32
    const u32* map;      // if not null: for each of `map_count` ids, the expert
    u64 id_count, map_count;
    u32 task_count, expert_count, wide;
};

// Takes chosen tasks if the launch has no others.
template <class F>
__device__ inline void take_chosen(const TileTask* tasks, u32& task_count, u64& unit_count) {
    if (F::BYTES > 1 || task_count) return;
    const Chosen* chosen = reinterpret_cast<const Chosen*>(tasks) - 1;
    task_count = chosen->task_count;
    unit_count = chosen->unit_count;
}

// Copies the tasks of experts that a router chose, in their order, for a decode kernel on the same
// stream. One block. Ids that name no expert choose none.
constexpr u32 CHOOSE_WARPS = 16;
extern "C" __global__ void __launch_bounds__(CHOOSE_WARPS* LANES)
    df11_float_choose(const __grid_constant__ ChooseTask choice) {
    __shared__ u32 is_chosen[MAX_EXPERTS];
    __shared__ uint2 sums[CHOOSE_WARPS];  // tasks and tiles that warps have chosen
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    for (u32 expert = threadIdx.x; expert < choice.expert_count; expert += blockDim.x)
        is_chosen[expert] = 0;
    __syncthreads();
    for (u64 at = threadIdx.x; at < choice.id_count; at += blockDim.x) {
        u64 expert = choice.wide ? static_cast<const u64*>(choice.ids)[at]
                                 : static_cast<const u32*>(choice.ids)[at];
        if (choice.map) expert = expert < choice.map_count ? choice.map[expert] : ~0u;
        if (expert < choice.expert_count) is_chosen[expert] = 1;
    }
    __syncthreads();
    TileTask* to = reinterpret_cast<TileTask*>(choice.chosen + 1);
    u32 tasks = 0, tiles = 0;
    for (u32 base = 0; base < choice.task_count; base += blockDim.x) {
        const u32 at = base + threadIdx.x;
        const bool wanted = at < choice.task_count && is_chosen[choice.experts[at]];
        const u32 own = wanted ? choice.tasks[at].tiles : 0;
        const u32 wanting = __ballot_sync(ALL_LANES, wanted);
        const u32 sum = inclusive_sum(own, lane);
        if (lane == LANES - 1) sums[warp] = make_uint2(__popc(wanting), sum);
        __syncthreads();
        u32 place = tasks + __popc(wanting & ((1u << lane) - 1)), first = tiles + sum - own;
        for (u32 each = 0; each < CHOOSE_WARPS; each++) {
            const uint2 some = sums[each];
            if (each < warp) {
                place += some.x;
                first += some.y;
            }
            tasks += some.x;
            tiles += some.y;
        }
        if (wanted) {
            TileTask task = choice.tasks[at];
            task.first_unit = first;
            to[place] = task;
        }
        __syncthreads();  // before sums are written again
    }
    if (threadIdx.x == 0) {
        choice.chosen->unit_count = tiles;
        choice.chosen->task_count = tasks;
    }
}

#define KERNELS(NAME, F)                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS<F>* LANES, 1) df11_float_decode_##NAME(     \
        const TileTask* __restrict__ tasks, u32 task_count, u64 unit_count, u32* status,           \
        u64 output) {                                                                              \
        take_chosen<F>(tasks, task_count, unit_count);                                             \
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
    u32 max_warps[7] = {WARPS<E4m3>, WARPS<E5m2>,     WARPS<F16>,      WARPS<Bf16OfE4m3>,
                         WARPS<F32>,  WARPS<F32OfF16>, WARPS<F32OfBf16>};
    // How each float is split: bytes, bits of the exponent, kept bits.
    u32 splits[7][3] = {SPLIT(E4m3), SPLIT(E5m2),     SPLIT(F16),      SPLIT(Bf16OfE4m3),
                        SPLIT(F32),  SPLIT(F32OfF16), SPLIT(F32OfBf16)};
    u32 choose_task = sizeof(ChooseTask);
    u32 choose_warps = CHOOSE_WARPS;
    u32 max_experts = MAX_EXPERTS;
};
extern "C" {
__constant__ Constants df11_float_constants = {};
}
}  // namespace df11::tile
