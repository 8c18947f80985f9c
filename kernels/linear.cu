// Multiplies by matrices in the fast layout (spec/gpu.md), and makes that layout from BF16: y = x
// W^T (+ bias), up to 3072 rows of x. Nothing is decoded to memory: the kernels read 12.02 bits per
// weight, a BF16 product 16. This head describes the kernels for up to 16 rows. Files with heads of
// their own have the others: linear_fast_128.cuh and linear_fast_256.cuh more rows;
// linear_order.cuh the order of a plan of the sum, and few rows of experts on compute capability
// 9.0; linear_experts.cuh more rows of experts; linear_tile_16.cuh matrices in tiles as stored.
//
//   item      a strip of a matrix, 32 rows; if few strips are last, a slice of their columns
//   step      32 rows x 32 columns, 1536 bytes: A fragments (16 x 16) of mma.m16n8k16, two by two;
//             x is B, eight rows per fragment
//   grid      one persistent block per multiprocessor, which takes item after item
//   block     16 warps that multiply; warp w takes steps w, w + 16, ... of an item; then the warps'
//             sums meet in shared memory, in order
//
//      strip  | step 0 | step 1 | ... | step 15 | step 16 | ...    a stage of the ring: 16 steps,
//               warp 0   warp 1   ...   warp 15   warp 0           24 KiB
//
//   compute capability 9.0 (linear_bulk.cuh)
//             Two more warps request stages: one the weights, with one bulk copy each, which waits
//             for nothing, and one x. The launch may begin while the previous one ends
//             (programmatic stream serialization). Two blocks form a cluster, have
//             neighbouring strips, and write x into both.
//   others (linear_fast_16.cuh)
//             Each warp requests its own steps with cp.async, two ahead.
//   entries   weights that no code can express; a tile's head tells which of its steps have some,
//             and the warp puts them in place before it multiplies
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills; benches/record/2026-11-22-linear-kernel.md):
// 96 registers, 18 warps; 149 KiB of shared memory for up to 8 rows of x, 183 KiB for 16. A step
// with 16 rows takes about 115 instructions; 60 of them decode, 15 for the eight weights of a row.
// cuBLASLt's best time divided by ours, sum of 6144 x 4096, 4096 x 4096, 28672 x 4096, 4096 x
// 14336:
//   rows of x             1       8       16
//   H100                  1.40    1.39    1.34    (benches/record/2026-11-23-linear-large.md)
//   H100, plain launches  1.29    1.30    1.26
//   H200                  1.31    1.32    1.21
// Limits. At one row, DRAM: 4.10 TB/s on 28672 x 4096 on an H200, where cuBLASLt reaches 4.22; and
// about 2 us at the ends of each launch, which an early launch hides. From 16 rows on, x: L2 and
// shared memory bring 16 rows of it at 2/3 of the bytes of the weights, of which a cluster of two
// spares half. The record of linear-kernel tells what was tried and rejected.
//
// Safety on any content: the launch gives strips, tiles and steps; entries are loaded inside their
// array and placed inside their step; the decoder is arithmetic. Heads that name entries that do
// not exist set the status, and so do indices and offsets out of range. linear_order.cuh reads
// patches instead of entries: whatever these hold, it stays in its shared memory, but it does not
// detect wrong ones.
#include "linear_experts.cuh"
#include "linear_order.cuh"
#include "linear_gather.cuh"
#include "linear_fast_256.cuh"
#include "linear_patch.cuh"
#include "linear_tile_64.cuh"

namespace df11::linear {
constexpr u32 LINEAR_THREADS = (LINEAR_WARPS + 2 * HOPPER) * LANES;
constexpr u32 GROUPED_THREADS = HOPPER ? ORDER_THREADS : LINEAR_THREADS;
static_assert(ORDER_THREADS == FAST128_THREADS, "kernels for experts have the same threads");
__host__ __device__ constexpr u32 shared_for(u32 x_rows) {
    return HOPPER ? bulk_shared_bytes((x_rows + 7) / 8) : linear_shared_bytes((x_rows + 7) / 8);
}
template <u32 ROWS, u32 CLUSTER, class Work>
__device__ __forceinline__ void linear(const Work& work) {
    if constexpr (HOPPER)
        linear_bulk<ROWS / 8, CLUSTER>(work);
    else
        linear_fast<ROWS / 8>(work);
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTERS __cluster_dims__(LINEAR_CLUSTER, 1, 1)
#else
#define CLUSTERS
#endif

extern "C" __global__ void CLUSTERS __launch_bounds__(LINEAR_THREADS, 1)
    df11_linear_fast_8(const __grid_constant__ Fast16Launch launch) {
    linear<8, LINEAR_CLUSTER>(Shared{launch});
}
extern "C" __global__ void CLUSTERS __launch_bounds__(LINEAR_THREADS, 1)
    df11_linear_fast_16(const __grid_constant__ Fast16Launch launch) {
    linear<16, LINEAR_CLUSTER>(Shared{launch});
}
// The previous launch writes the router's result, so this one waits for it first. ROWS: the most
// places of one expert that a block multiplies at once.
template <u32 ROWS>
__device__ __forceinline__ void multiply_experts(const GroupedLaunch& launch) {
    __shared__ u32 batches[MAX_EXPERTS + 1];
    wait_for_launch_before();
    const Grouped<ROWS> work = {launch, batches};
    work.count_batches(batches);
    __syncthreads();
    if constexpr (!HOPPER)
        linear_fast<ROWS / 8>(work);
    else if constexpr (ROWS == LINEAR_ROWS)
        linear_order(OrderGrouped(launch, batches));
    else
        linear_experts(Fast128Grouped<ROWS>(launch, batches));
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    df11_linear_grouped_8(const __grid_constant__ GroupedLaunch launch) {
    multiply_experts<8>(launch);
}
#else
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    df11_linear_grouped_16(const __grid_constant__ GroupedLaunch launch) {
    multiply_experts<16>(launch);
}
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    df11_linear_grouped_64(const __grid_constant__ GroupedLaunch launch) {
    multiply_experts<64>(launch);
}
extern "C" __global__ void __launch_bounds__(GROUPED_THREADS, 1)
    df11_linear_grouped_128(const __grid_constant__ GroupedLaunch launch) {
    multiply_experts<128>(launch);
}
#endif
// Matrices in tiles as stored: TILE_HELPERS warps and up to tile_warps more, in groups of four.
extern "C" __global__ void __launch_bounds__((tile_warps(8) + TILE_HELPERS) * LANES, 1)
    df11_linear_tile_8(const __grid_constant__ Tile16Launch launch) {
    linear_tile<1, HeldX<1>>(Shared{launch});
}
extern "C" __global__ void __launch_bounds__((tile_warps(16) + TILE_HELPERS) * LANES, 1)
    df11_linear_tile_16(const __grid_constant__ Tile16Launch launch) {
    linear_tile<2, HeldX<2>>(Shared{launch});
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The order of a plan of the sum (linear_order.cuh).
extern "C" __global__ void __launch_bounds__(ORDER_THREADS, 1)
    df11_linear_order_8(const __grid_constant__ OrderLaunch launch) {
    linear_order(OrderShared<8>{launch});
}
extern "C" __global__ void __launch_bounds__(ORDER_THREADS, 1)
    df11_linear_order_16(const __grid_constant__ OrderLaunch launch) {
    linear_order(OrderShared<16>{launch});
}
extern "C" __global__ void __launch_bounds__(ORDER_THREADS, 1)
    df11_linear_order_32(const __grid_constant__ OrderLaunch launch) {
    linear_order(OrderShared<32>{launch});
}
extern "C" __global__ void __launch_bounds__(ORDER_THREADS, 1)
    df11_linear_order_64(const __grid_constant__ OrderLaunch launch) {
    linear_order(OrderShared<64>{launch});
}
// 17 or more rows of x (linear_fast_128.cuh).
extern "C" __global__ void __launch_bounds__(FAST128_THREADS, 1)
    df11_linear_fast_32(const __grid_constant__ Fast128Launch launch) {
    linear_fast_128<32>(launch);
}
extern "C" __global__ void __launch_bounds__(FAST128_THREADS, 1)
    df11_linear_fast_64(const __grid_constant__ Fast128Launch launch) {
    linear_fast_128<64>(launch);
}
extern "C" __global__ void __launch_bounds__(FAST128_THREADS, 1)
    df11_linear_fast_128(const __grid_constant__ Fast128Launch launch) {
    linear_fast_128<128>(launch);
}
// 129 or more rows of x (linear_fast_256.cuh).
extern "C" __global__ void __launch_bounds__(threads_of_fast256(FAST256_STRIPS), 1)
    df11_linear_fast_192(const __grid_constant__ Fast256Launch launch) {
    linear_fast_256<192, FAST256_STRIPS>(launch);
}
extern "C" __global__ void __launch_bounds__(threads_of_fast256(FAST256_STRIPS), 1)
    df11_linear_fast_256(const __grid_constant__ Fast256Launch launch) {
    linear_fast_256<256, FAST256_STRIPS>(launch);
}
extern "C" __global__ void __launch_bounds__(threads_of_fast256(HALF_STRIPS), 1)
    df11_linear_half_192(const __grid_constant__ Fast256Launch launch) {
    linear_fast_256<192, HALF_STRIPS>(launch);
}
extern "C" __global__ void __launch_bounds__(threads_of_fast256(HALF_STRIPS), 1)
    df11_linear_half_256(const __grid_constant__ Fast256Launch launch) {
    linear_fast_256<256, HALF_STRIPS>(launch);
}
// One or two rows of x, if shared memory has room for all of x.
extern "C" __global__ void __launch_bounds__((tile_warps(2) + TILE_HELPERS) * LANES, 1)
    df11_linear_tile_2(const __grid_constant__ Tile16Launch launch) {
    linear_tile<1, SharedX>(Shared{launch});
}
// 17 to 64 rows of x (linear_tile_64.cuh).
extern "C" __global__ void __launch_bounds__(TILE64_THREADS, 1)
    df11_linear_tile_32(const __grid_constant__ Tile64Launch launch) {
    linear_tile_64<32>(launch);
}
extern "C" __global__ void __launch_bounds__(TILE64_THREADS, 1)
    df11_linear_tile_64(const __grid_constant__ Tile64Launch launch) {
    linear_tile_64<64>(launch);
}
#endif

// Values that the host needs. src/gpu/linear/kernels.rs, tiles.rs and tile64.rs have the same
// fields and explain them. 0 means that this target has no such kernel.
struct Constants {
    // Values that both sides compute with.
    struct {
        u32 structures[11] = {sizeof(Fast16Launch),  sizeof(Tile16Launch),  sizeof(Tile64Launch),
                              sizeof(OrderLaunch),   sizeof(Fast128Launch), sizeof(Fast256Launch),
                              sizeof(GroupedLaunch), sizeof(LinearMatrix),  sizeof(PackTask),
                              sizeof(UnpackTask),    sizeof(GatherTask)};
        u32 warps[2] = {PACK_WARPS, UNPACK_WARPS};
        u32 partial_bytes = LINEAR_PARTIAL_BYTES;
        u32 matrices = LINEAR_MATRICES;
        u32 group = LINEAR_GROUP;
        u32 max_experts = MAX_EXPERTS;
        u32 order_split[2] = {ORDER_UNITS, ORDER_HELPERS};
        u32 many_split[7] = {FAST128_STRIPS,
                             FAST256_STRIPS,
                             HALF_STRIPS,
                             FAST128_COLUMNS,
                             FAST128_SPLITS,
                             FAST256_ROWS,
                             fast256_partial_bytes(FAST256_STRIPS)};
    } agreed;
    // df11_linear_fast_{8,16}; df11_linear_grouped_*; df11_linear_order_{8,16,32,64}.
    u32 threads = LINEAR_THREADS;
    u32 early = HOPPER;
    u32 fast_bytes[2] = {shared_for(8), shared_for(16)};
    u32 grouped_threads = GROUPED_THREADS;
    u32 grouped_bytes = HOPPER ? ORDER_GROUPED_BYTES : shared_for(8);
    u32 grouped_rows[3] = {HOPPER ? 16 : 8, HOPPER * 64, HOPPER * 128};
    u32 order_threads = HOPPER * ORDER_THREADS;
    u32 order_bytes = HOPPER * ORDER_SHARED_BYTES;
    u32 count_bytes = PACK_SHARED_BYTES;
    // df11_linear_fast_{32,64,128}; df11_linear_{half,fast}_{192,256}, threads of half first.
    u32 fast_128_bytes = HOPPER * FAST128_SHARED_BYTES;
    u32 fast_128_threads = HOPPER * FAST128_THREADS;
    u32 fast_256_bytes = HOPPER * FAST128_SHARED_BYTES;
    u32 fast_256_threads[2] = {HOPPER * threads_of_fast256(HALF_STRIPS),
                               HOPPER * threads_of_fast256(FAST256_STRIPS)};
    // df11_linear_tile_{8,16}: tile_shared_bytes.
    struct TileDemand {
        u32 helpers = TILE_HELPERS;
        u32 max_warps = tile_warps(LINEAR_ROWS);
        u32 table = sizeof(TileTable);
        u32 row = run_set_bytes(1);
        u32 warp = TILE_SLOTS * (SLOT_HEAD + BITS_AFTER);
        u32 stages = TILE_SLOTS;
        u32 max_sets = MAX_RUN_SETS;
        u32 max_warp = x_bytes_of_warp(2);
        u32 max_tables = MAX_TABLES;
    } tile;
    // df11_linear_tile_2: shared_x_pitch.
    struct Tile2 {
        u32 warps = HOPPER * tile_warps(TILE2_ROWS);
        u32 rows = TILE2_ROWS;
        u32 unit = SHARED_X_UNIT;
        u32 after = SHARED_X_AFTER;
    } tile_2;
    // df11_linear_tile_{32,64}: tile64_shared_bytes.
    struct Tile64Demand {
        u32 threads = HOPPER * TILE64_THREADS;
        u32 fixed = TILE64_FIRST_BYTES;
        u32 stages[2] = {SETS * tile64_stage(32), SETS * tile64_stage(64)};
        u32 row = SETS * TILE_ATOMS * ATOM_COLUMNS * 2;
        u32 slots = DECODERS * TILE_SLOTS;
        u32 slot = SLOT_HEAD + BITS_AFTER;
        u32 max_stages = TILE64_STAGES;
    } tile_64;
};
extern "C" {
__constant__ Constants df11_linear_constants = {};
}
}  // namespace df11::linear
