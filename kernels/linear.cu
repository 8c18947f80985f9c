// Multiplies by matrices in the fast layout, and makes that layout of BF16.
#include "linear_bulk.cuh"
#include "linear_fast.cuh"
#include "linear_pack.cuh"

// Warps that multiply: how sums are split, so that another number gives other bits.
constexpr u32 LINEAR_WARPS = 16;
// Steps that a warp, or stages that a block has on their way.
constexpr u32 LINEAR_DEPTH = 2, LINEAR_STAGES = 4, LINEAR_CLUSTER = 2;
static_assert(LINEAR_DEPTH > 0 && LINEAR_GROUP % LINEAR_CLUSTER == 0 && LINEAR_STAGES <= MOST_STAGES, "a ring");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr u32 LINEAR_THREADS = (LINEAR_WARPS + 2) * LANES, LINEAR_EARLY = 1, GROUPED_EIGHTS = 2;
__host__ __device__ constexpr u32 shared_for(u32 x_rows) { return bulk_shared_bytes(LINEAR_WARPS, x_rows, LINEAR_STAGES); }
template <u32 EIGHTS, u32 CLUSTER, class Work>
__device__ __forceinline__ void linear(const Work& work) { linear_bulk<EIGHTS, LINEAR_WARPS, CLUSTER>(work); }
#define CLUSTERS __cluster_dims__(LINEAR_CLUSTER, 1, 1)
#else
#define CLUSTERS
constexpr u32 LINEAR_THREADS = LINEAR_WARPS * LANES, LINEAR_EARLY = 0, GROUPED_EIGHTS = 1;
__host__ __device__ constexpr u32 shared_for(u32 x_rows) { return linear_shared_bytes(LINEAR_WARPS, (x_rows + 7) / 8, LINEAR_DEPTH); }
template <u32 EIGHTS, u32 CLUSTER, class Work>
__device__ __forceinline__ void linear(const Work& work) { linear_fast<EIGHTS, LINEAR_DEPTH, LINEAR_WARPS>(work); }
#endif

extern "C" __global__ void __launch_bounds__(LINEAR_THREADS, 1) df11_linear_fast_8(const __grid_constant__ LinearLaunch launch) {
    linear<1, 1>(Shared{launch});
}
extern "C" __global__ void CLUSTERS __launch_bounds__(LINEAR_THREADS, 1) df11_linear_fast_16(const __grid_constant__ LinearLaunch launch) {
    linear<2, LINEAR_CLUSTER>(Shared{launch});
}
// The router's result is what the launch before has written, so that this one waits for it first.
extern "C" __global__ void __launch_bounds__(LINEAR_THREADS, 1) df11_linear_grouped(const __grid_constant__ GroupedLaunch launch) {
    __shared__ u32 chunks[MOST_EXPERTS + 1];
    wait_for_launch_before();
    const Grouped<GROUPED_EIGHTS * 8> work = {launch, chunks};
    work.count_chunks(chunks);
    __syncthreads();
    linear<GROUPED_EIGHTS, 1>(work);
}
extern "C" __global__ void __launch_bounds__(UNPACK_WARPS* LANES) df11_linear_gather(const __grid_constant__ GatherTask task) {
    gather_tile(task);
}

// With PACK_SHARED_BYTES of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(PACK_WARPS* LANES) df11_linear_count(const __grid_constant__ PackTask task) {
    u32* const counts = reinterpret_cast<u32*>(linear_shared) + threadIdx.x / LANES * PACK_COUNTS;
    count_tile(task, counts, counts + 256 * COUNT_WORDS);
}
extern "C" __global__ void __launch_bounds__(1024) df11_linear_scan(const __grid_constant__ PackTask task) { scan_heads(task); }
extern "C" __global__ void __launch_bounds__(PACK_WARPS* LANES) df11_linear_pack(const __grid_constant__ PackTask task) {
    pack_tile(task);
}
extern "C" __global__ void __launch_bounds__(UNPACK_WARPS* LANES) df11_linear_unpack(const __grid_constant__ UnpackTask task) {
    unpack_tile(task);
}

// What the host must know; build.py copies it into the manifest.
__constant__ u32 linear_constants[] = {
    sizeof(LinearLaunch), sizeof(LinearMatrix), sizeof(PackTask), sizeof(UnpackTask),
    sizeof(GroupedLaunch), sizeof(GatherTask),
    // Threads of a block of df11_linear_fast_*, and whether a launch of it may begin while the one before ends
    // (programmatic stream serialization): the kernel waits before it touches anything but the matrices.
    LINEAR_THREADS, LINEAR_EARLY,
    // Warps of a block and dynamic shared memory of df11_linear_count, _pack, _unpack.
    PACK_WARPS, PACK_SHARED_BYTES, UNPACK_WARPS,
    LINEAR_PARTIAL_BYTES, LINEAR_MATRICES, LINEAR_GROUP, MOST_EXPERTS,
    // Dynamic shared memory of df11_linear_grouped.
    shared_for(8 * GROUPED_EIGHTS),
    // Dynamic shared memory of df11_linear_fast_* by rows of x, from 1 to 16.
    shared_for(1), shared_for(2), shared_for(3), shared_for(4), shared_for(5), shared_for(6), shared_for(7), shared_for(8),
    shared_for(9), shared_for(10), shared_for(11), shared_for(12), shared_for(13), shared_for(14), shared_for(15), shared_for(16),
};

extern "C" __global__ void df11_linear_constants(u32* out) {
    constexpr u32 count = sizeof linear_constants / sizeof(u32);
#pragma unroll 1
    for (u32 i = 0; i < count; i++) out[i] = linear_constants[i];
}
