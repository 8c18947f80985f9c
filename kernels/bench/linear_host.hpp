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
static void unpack(const Fast& f, u16* to, u64 pitch, u32* status) {
    UnpackTask task = {f.data, f.heads,   f.entries, f.count, to, pitch,
                       f.rows, f.columns, f.columns, {},      status};
    void* arguments[] = {&task};
    const u32 blocks = u32((f.tiles + UNPACK_WARPS - 1) / UNPACK_WARPS);
    CUDA(cudaLaunchKernel(kernel_of("df11_linear_unpack", (const void*)df11_linear_unpack), blocks,
                          UNPACK_WARPS * LANES, arguments, 0, nullptr));
    CUDA(cudaDeviceSynchronize());
}

// A matrix in tiles as stored, made on the GPU; each array an allocation of its exact size.
struct Tiles {
    u32 rows = 0, columns = 0, staged = 0;  // staged: the most bytes of a tile's bits
    u64 tiles = 0, bits_bytes = 0;
    u8 *bits = nullptr, *plane = nullptr, *codebook = nullptr;
    TileRecord* records = nullptr;
    TileTable* table = nullptr;
    u64 codebook_bytes = 0;
    u64 bytes() const { return u64(rows) * columns + (tiles + 1) * 32 + bits_bytes + codebook_bytes; }
    void make_table() {
        if (!table) CUDA(cudaMalloc(&table, sizeof(TileTable)));
        TableTask* task = upload(std::vector<TableTask>{{codebook, table, codebook_bytes}});
        df11_tile_tables<<<1, 256>>>(task);
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaFree(task));
    }
    Tiles copy() const {
        Tiles t = *this;
        t.bits = copy_of(bits, bits_bytes), t.plane = copy_of(plane, u64(rows) * columns);
        t.codebook = copy_of(codebook, codebook_bytes), t.table = copy_of(table, sizeof(TileTable));
        t.records = copy_of(records, (tiles + 1) * 32);
        return t;
    }
    void free() const {
        for (void* p : {(void*)bits, (void*)plane, (void*)codebook, (void*)records, (void*)table})
            CUDA(cudaFree(p));
    }
};
__device__ inline u32 pair_of(const u16* two) { return (two[0] >> 7 & 255) | (two[1] >> 7 & 255) << 8; }
__global__ void count_pairs(const u16* w, u64 pairs, u64 step, unsigned long long* counts) {
    for (u64 i = (blockIdx.x * u64(blockDim.x) + threadIdx.x) * step; i < pairs;
         i += u64(gridDim.x) * blockDim.x * step)
        atomicAdd(counts + pair_of(w + 2 * i), 1ull);
}
// A lane's units of a tile that exist: f(weights, band, unit).
template <class F>
__device__ void lane_units_of(const u16* w, u32 rows, u32 columns, u64 strip, u32 tile, u32 lane, F f) {
    for (u32 band = 0; band < 4; band++)
        for (u32 unit = 0; unit < 8; unit++) {
            const u64 row = strip * 32 + band * 8 + lane / 4, column = tile * 256 + unit * 32 + lane % 4 * 8;
            if (row < rows && column < columns) f(w + row * columns + column, band, unit);
        }
}
// codes: of each pair length << 32 | code, escapes with their values. A warp a tile.
__global__ void measure_tiles(const u16* w, u32 rows, u32 columns, const u64* codes,
                              TileRecord* records) {
    const u32 across = (columns + 255) / 256, lane = threadIdx.x;
    u32 length = 0;
    lane_units_of(w, rows, columns, blockIdx.x / across, blockIdx.x % across, lane,
                  [&](const u16* unit, u32, u32) {
                      for (u32 i = 0; i < 8; i += 2) length += u32(codes[pair_of(unit + i)] >> 32);
                  });
    const u32 least = __reduce_min_sync(~0u, length), most = __reduce_max_sync(~0u, length);
    u32 shift = 0;
    while ((most - least + (1u << shift) - 1) >> shift > 63) shift++;
    const u32 excess = (length - least + (1u << shift) - 1) >> shift;
    const u32 sum = __reduce_add_sync(~0u, least + (excess << shift));
    TileRecord* r = records + blockIdx.x;
    for (u32 i = 0; i < 6; i++) {
        const int at = int(6 * lane) - int(32 * i);
        const u32 word = __reduce_or_sync(~0u, at <= -6 || at >= 32 ? 0 : at < 0 ? excess >> -at : excess << at);
        if (lane == 0) r->excess[i] = word;
    }
    // The host makes offsets of the tiles' bits.
    if (lane == 0) r->head = ((sum + 7) & ~7u) | u64(least) << 48 | u64(shift) << 61;
}
__global__ void write_tiles(const u16* w, u32 rows, u32 columns, const u64* codes,
                            const TileRecord* records, u32* bits, u8* plane) {
    const u32 across = (columns + 255) / 256, lane = threadIdx.x, strip = blockIdx.x / across,
              tile = blockIdx.x % across;
    const Record r = load_record(records + blockIdx.x, lane);
    const u32 length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << u32(r.head >> 61));
    u64 at = (r.head & OFFSET_MASK) + inclusive_sum(length, lane) - length;
    const u32 height = min(rows - strip * 32, 32u), width = min(columns - tile * 256, 256u);
    plane += u64(strip) * 32 * columns + u64(tile) * 256 * height;
    lane_units_of(w, rows, columns, strip, tile, lane, [&](const u16* unit, u32 band, u32 j) {
        for (u32 i = 0; i < 8; i += 2) {
            const u64 code = codes[pair_of(unit + i)], value = (code & 0xFFFFFFFF) << at % 32;
            atomicOr(bits + at / 32, u32(value));
            if (value >> 32) atomicOr(bits + at / 32 + 1, u32(value >> 32));
            at += code >> 32;
        }
        // In pairs of units, in each of them by lanes (spec/format.md 6.4).
        const u32 band_rows = min(height - band * 8, 8u), first = j / 2 * 64, both = min(width - first, 64u);
        u32 before = band * 8 * width + band_rows * first + lane / 4 * both;
        for (u32 q = 0; q < lane % 4; q++)
            before += (8 * q < both ? 8 : 0) + (32 + 8 * q < both ? 8 : 0);
        before += j % 2 * 8;
        for (u32 i = 0; i < 8; i++) plane[before + i] = u8((unit[i] >> 8 & 0x80) | (unit[i] & 0x7F));
    });
}
static Tiles store_tiles(const u16* w, u32 rows, u32 columns) {
    Tiles t;
    t.rows = rows, t.columns = columns, t.tiles = u64((rows + 31) / 32) * ((columns + 255) / 256);
    const u64 pairs = u64(rows) * columns / 2, step = std::max<u64>(pairs >> 22, 1);
    unsigned long long* counted;
    CUDA(cudaMalloc(&counted, 65536 * 8));
    CUDA(cudaMemset(counted, 0, 65536 * 8));
    count_pairs<<<1024, 256>>>(w, pairs, step, counted);
    std::vector<u64> counts(65536), codes(65536);
    CUDA(cudaMemcpy(counts.data(), counted, 65536 * 8, cudaMemcpyDeviceToHost));
    const Code c = code_of(counts, pairs / step, TABLE_BITS);
    for (u32 i = 0; i < 65536; i++) {
        const PairCode one = pair_code(c, i);
        codes[i] = u64(one.length) << 32 | one.code;
    }
    u64* d_codes = upload(codes);
    CUDA(cudaMalloc(&t.records, (t.tiles + 1) * 32));
    CUDA(cudaMemset(t.records, 0, (t.tiles + 1) * 32));
    measure_tiles<<<u32(t.tiles), 32>>>(w, rows, columns, d_codes, t.records);
    std::vector<TileRecord> records = from_device(t.records, t.tiles + 1);
    u64 at = 0;
    for (auto& r : records) {
        const u64 bits = r.head & OFFSET_MASK, end = at + bits;
        r.head = (r.head & ~OFFSET_MASK) | at;
        t.staged = std::max(t.staged, u32((end / 8 - at / 128 * 16 + 15) / 16 * 16));
        at = end;
    }
    CUDA(cudaMemcpy(t.records, records.data(), records.size() * 32, cudaMemcpyHostToDevice));
    t.bits_bytes = (at + 127) / 128 * 16;
    CUDA(cudaMalloc(&t.bits, t.bits_bytes));
    CUDA(cudaMemset(t.bits, 0, t.bits_bytes));
    CUDA(cudaMalloc(&t.plane, u64(rows) * columns));
    write_tiles<<<u32(t.tiles), 32>>>(w, rows, columns, d_codes, t.records, (u32*)t.bits, t.plane);
    CUDA(cudaDeviceSynchronize());
    t.codebook = upload(c.codebook), t.codebook_bytes = c.codebook.size();
    t.make_table();
    CUDA(cudaFree(counted));
    CUDA(cudaFree(d_codes));
    return t;
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
