// Multiplies by matrices in the fast layout, and makes that layout of BF16.
#include "linear_fast.cuh"
#include "linear_pack.cuh"

#ifndef LINEAR_WARPS
#define LINEAR_WARPS 8
#endif
#ifndef LINEAR_DEPTH
#define LINEAR_DEPTH 4
#endif

extern "C" __global__ void __launch_bounds__(LINEAR_WARPS* LANES, 3) df11_linear_fast_8(const __grid_constant__ LinearLaunch launch) {
    linear_fast<1, LINEAR_DEPTH>(launch);
}
extern "C" __global__ void __launch_bounds__(LINEAR_WARPS* LANES, 2) df11_linear_fast_16(const __grid_constant__ LinearLaunch launch) {
    linear_fast<2, LINEAR_DEPTH>(launch);
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
