#include "linear_bulk.cuh"
#include "linear_tile_pair.cuh"
#if ONLY & 1
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((PAIR_WARPS_16 + TILE_HELPERS) * LANES, 1)
    df11_linear_pair_16(const __grid_constant__ LinearLaunch launch) {
    linear_pair<16>(Shared{launch});
}
#endif
#if ONLY & 2
extern "C" __global__ void __launch_bounds__((tile_warps(2) + TILE_HELPERS) * LANES, 1)
    df11_linear_tile_2(const __grid_constant__ LinearLaunch launch) {
    linear_tile<2>(Shared{launch});
}
#endif
#if ONLY & 4
extern "C" __global__ void __launch_bounds__((tile_warps(8) + TILE_HELPERS) * LANES, 1)
    df11_linear_tile_8(const __grid_constant__ LinearLaunch launch) {
    linear_tile<8>(Shared{launch});
}
#endif
#if ONLY & 8
extern "C" __global__ void __launch_bounds__((tile_warps(16) + TILE_HELPERS) * LANES, 1)
    df11_linear_tile_16(const __grid_constant__ LinearLaunch launch) {
    linear_tile<16>(Shared{launch});
}
#endif
