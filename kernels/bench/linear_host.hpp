// Host side of linear_bench.cu: weights, the fast layout, references. Loaded after the kernels, for
// their types.
#pragma once
#include <cublasLt.h>
#include <vector>

static const size_t LT_ROOM = 64 << 20;

inline float from_bf16(u16 v) {
    u32 word = u32(v) << 16;
    float f;
    memcpy(&f, &word, 4);
    return f;
}

__device__ inline u64 random_bits(u64 s) {
    s = s * 0x9E3779B97F4A7C15ull + 0x9E3779B97F4A7C15ull;
    s = (s ^ s >> 30) * 0xBF58476D1CE4E5B9ull;
    s = (s ^ s >> 27) * 0x94D049BB133111EBull;
    return s ^ s >> 31;
}
// mode 0: N(0, 0.02^2); 1: a sigma for each row, heavy tails; 2: random bits, all patterns; 3: as
// 0, one of 1000 of any size that is finite; 4: N(0, 1); 5: as 0 with infinities, NaN and zeros; 6:
// as 4 with infinities and NaN in some rows; 7: as 0, every third row zero
__global__ void fill(u16* to, u32 rows, u32 columns, u64 seed, int mode) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < u64(rows) * columns;
         i += u64(gridDim.x) * blockDim.x) {
        const u64 z = random_bits(random_bits(seed) + i), z2 = random_bits(z + 1);
        const float u = (u32(z) + 0.5f) * 2.3283064e-10f, v = u32(z >> 32) * 2.3283064e-10f;
        const u32 row = u32(i / columns);
        float sigma = mode == 4 || mode == 6 ? 1.f : 0.02f;
        if (mode == 1) sigma *= expf(0.6f * sinf(row * 12.9898f)) * (u32(z2) % 64 ? 1.f : 8.f);
        u16 w = round_to_bf16(sigma * sqrtf(-2 * logf(fminf(u, 0.9999999f))) * cospif(2 * v));
        if (mode == 2) w = u16(z2);
        if (mode == 3 && u32(z2) % 1000 == 0)
            w = u16(z2 >> 32) & 0x80FF | u16((z2 >> 48) % 160) << 7;
        if (mode == 5 && u32(z2) % 3000 == 0)
            w = (z2 >> 40) % 8 == 0 ? ((z2 >> 32) % 2 ? 0x7F80 : 0xFFC1)
                : (z2 >> 33) % 2    ? 0
                                    : 0x8000;
        if (mode == 6 && row % 5 == 3 && u32(z2) % 3000 == 0) w = (z2 >> 32) % 2 ? 0x7F80 : 0xFFC1;
        if (mode == 7 && row % 3 == 1) w = 0;
        to[i] = w;
    }
}
static u16* make_weights(u32 rows, u32 columns, u64 seed, int mode) {
    u16* to;
    CUDA(cudaMalloc(&to, u64(rows) * columns * 2));
    fill<<<1024, 256>>>(to, rows, columns, seed, mode);
    CUDA(cudaDeviceSynchronize());
    return to;
}
template <class T>
static std::vector<T> from_device(const T* from, u64 count) {
    std::vector<T> to(count);
    CUDA(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}
template <class T>
static T* copy_of(const T* from, u64 bytes) {
    T* to;
    CUDA(cudaMalloc(&to, std::max<u64>(bytes, 16)));
    CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
    return to;
}
__global__ void count_differences(const u16* a, const u16* b, u64 count, u64* sum) {
    u64 mine = 0;
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count;
         i += u64(gridDim.x) * blockDim.x)
        mine += a[i] != b[i];
    if (mine) atomicAdd(sum, mine);
}
static bool same_bits(const u16* a, const u16* b, u64 count) {
    u64 *sum, different;
    CUDA(cudaMalloc(&sum, 8));
    CUDA(cudaMemset(sum, 0, 8));
    count_differences<<<256, 256>>>(a, b, count, sum);
    CUDA(cudaMemcpy(&different, sum, 8, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(sum));
    return different == 0;
}

// A matrix in the fast layout, each array an allocation of its exact size.
struct Fast {
    u32 rows = 0, columns = 0, count = 0;
    u64 tiles = 0, data_bytes = 0;
    u8* data = nullptr;
    FastHead* heads = nullptr;
    u32* entries = nullptr;
    u64 bytes() const { return data_bytes + tiles * sizeof(FastHead) + u64(count) * 4; }
    Fast copy() const {
        Fast f = *this;
        f.data = copy_of(data, data_bytes), f.heads = copy_of(heads, tiles * 8),
        f.entries = copy_of(entries, u64(count) * 4);
        return f;
    }
    void free() const {
        for (void* p : {(void*)data, (void*)heads, (void*)entries}) CUDA(cudaFree(p));
    }
};
static void launch_pack(const char* name, const void* compiled_in, u32 blocks, u32 threads,
                        u32 shared, PackTask task) {
    void* arguments[] = {&task};
    const void* kernel = kernel_of(name, compiled_in);
    if (shared)
        CUDA(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    CUDA(cudaLaunchKernel(kernel, blocks, threads, arguments, shared, nullptr));
    CUDA(cudaDeviceSynchronize());
}
static Fast pack(const u16* weights, u32 rows, u32 columns) {
    Fast f;
    const u32 strips = (rows + 31) / 32, steps = (columns + 31) / 32;
    f.rows = rows, f.columns = columns, f.tiles = u64(strips) * ((columns + 255) / 256),
    f.data_bytes = u64(strips) * steps * STEP_BYTES;
    CUDA(cudaMalloc(&f.data, f.data_bytes));
    CUDA(cudaMalloc(&f.heads, f.tiles * 8));
    u32* total;
    CUDA(cudaMalloc(&total, 4));
    CUDA(cudaMemset(total, 0, 4));
    PackTask task = {};
    task.weights = weights, task.pitch = columns, task.rows = rows, task.columns = columns,
    task.heads = f.heads, task.data = f.data, task.total = total;
    const u32 blocks = u32((f.tiles + PACK_WARPS - 1) / PACK_WARPS);
    launch_pack("df11_linear_count", (const void*)df11_linear_count, blocks, PACK_WARPS * LANES,
                PACK_SHARED_BYTES, task);
    launch_pack("df11_linear_scan", (const void*)df11_linear_scan, 1, 1024, 0, task);
    CUDA(cudaMemcpy(&f.count, total, 4, cudaMemcpyDeviceToHost));
    CUDA(cudaMalloc(&f.entries, std::max<u64>(u64(f.count) * 4, 4)));
    task.entries = f.entries, task.capacity = f.count;
    launch_pack("df11_linear_pack", (const void*)df11_linear_pack, blocks, PACK_WARPS * LANES, 0,
                task);
    CUDA(cudaFree(total));
    return f;
}
static void unpack_on(const Fast& f, u16* to, u64 pitch, u32* status, cudaStream_t stream) {
    const u32 across = (f.columns + 255) / 256;
    UnpackTask task = {f.data,  f.heads, f.entries, f.count, to, pitch, 0, u64(f.rows) * f.columns,
                       f.rows, f.columns, 0, f.columns, 0, 0, across, u32(f.tiles), status};
    void* arguments[] = {&task};
    const u32 blocks = u32((f.tiles + UNPACK_WARPS - 1) / UNPACK_WARPS);
    CUDA(cudaLaunchKernel(kernel_of("df11_linear_unpack", (const void*)df11_linear_unpack), blocks,
                          UNPACK_WARPS * LANES, arguments, 0, stream));
}
static void unpack(const Fast& f, u16* to, u64 pitch, u32* status) {
    unpack_on(f, to, pitch, status, nullptr);
    CUDA(cudaDeviceSynchronize());
}

// The product in f64, and for each output the root of the sum of squares of its products.
__global__ void multiply_exactly(const u16* w, u32 rows, u32 columns, const u16* x, u64 pitch,
                                 u32 x_rows, double* y, double* scale) {
    const u64 i = blockIdx.x;
    const u32 row = u32(i % rows), x_row = u32(i / rows), lane = threadIdx.x;
    double sum = 0, squares = 0;
    for (u32 k = lane; k < columns; k += 32) {
        const double p = double(widen_bf16(w[u64(row) * columns + k])) *
                         double(widen_bf16(x[x_row * pitch + k]));
        sum += p, squares += p * p;
    }
    for (u32 step = 16; step; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step), squares += __shfl_xor_sync(~0u, squares, step);
    if (lane == 0) y[i] = sum, scale[i] = sqrt(squares);
}
static void exact_product(const u16* w, u32 rows, u32 columns, const u16* x, u64 pitch, u32 x_rows,
                          std::vector<double>& y, std::vector<double>& scale) {
    double *dy, *ds;
    const u64 n = u64(rows) * x_rows;
    CUDA(cudaMalloc(&dy, n * 8));
    CUDA(cudaMalloc(&ds, n * 8));
    multiply_exactly<<<u32(n), 32>>>(w, rows, columns, x, pitch, x_rows, dy, ds);
    CUDA(cudaDeviceSynchronize());
    y = from_device(dy, n), scale = from_device(ds, n);
    CUDA(cudaFree(dy));
    CUDA(cudaFree(ds));
}

// cuBLASLt's heuristics for y = x W^T.
struct Lt {
    static constexpr int WANTED = 24;
    cublasLtHandle_t handle;
    void* room;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[WANTED];
    int count = 0;
    Lt(cublasLtHandle_t h, void* r, u32 rows, u32 x_rows, u32 columns, u64 x_pitch)
        : handle(h), room(r) {
        const cublasOperation_t transposed = CUBLAS_OP_T;
        const size_t bytes = LT_ROOM;
        cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                       sizeof transposed);
        cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, columns, rows, columns);
        cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, columns, x_rows, x_pitch);
        cublasLtMatrixLayoutCreate(&d, CUDA_R_16BF, rows, x_rows, rows);
        cublasLtMatmulPreferenceCreate(&preference);
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &bytes, sizeof bytes);
        if (cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, d, d, preference, WANTED, found,
                                           &count) != CUBLAS_STATUS_SUCCESS)
            count = 0;
    }
    void run(int which, const u16* w, const u16* x, u16* y, cudaStream_t stream) const {
        const float one = 1, zero = 0;
        const auto done = cublasLtMatmul(handle, operation, &one, w, a, x, b, &zero, y, d, y, d,
                                         &found[which].algo, room, LT_ROOM, stream);
        if (done != CUBLAS_STATUS_SUCCESS) {
            fprintf(stderr, "cublasLt: %d\n", int(done));
            exit(3);
        }
    }
};
