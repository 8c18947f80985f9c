// Bench and check of the kernels that multiply by compressed matrices: see README.md.
//   linear_bench check                 odd shapes, every pattern, errors beside cuBLAS's, the same bits always
//   linear_bench bench ROUNDS          Llama 3.1 8B's matrices and 25600 x 5120 beside cuBLASLt's best
//   linear_bench variants ROUNDS       other depths and numbers of warps
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include <cublasLt.h>

#include "../linear.cu"
#include "bench.hpp"
#include "linear_host.hpp"

#define VARIANT(EIGHTS, DEPTH, WARPS, BLOCKS)                                                                                   \
    __global__ void __launch_bounds__(WARPS* LANES, BLOCKS)                                                                     \
        variant_##EIGHTS##_##DEPTH##_##WARPS##_##BLOCKS(const __grid_constant__ LinearLaunch launch) {                          \
        linear_fast<EIGHTS, DEPTH, WARPS>(launch);                                                                                     \
    }
#define SHAPES(X) X(1, 2, 16, 1) X(2, 2, 16, 1) X(1, 3, 16, 1)
// By bulk copies: eights, stages, warps, blocks, blocks of a cluster.
#define BULK(EIGHTS, STAGES, WARPS, BLOCKS, CLUSTER)                                                                            \
    __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS + 2) * LANES, BLOCKS)                              \
        bulk_##EIGHTS##_##STAGES##_##WARPS##_##BLOCKS##_##CLUSTER(const __grid_constant__ LinearLaunch launch) {                \
        linear_bulk<EIGHTS, WARPS, CLUSTER>(launch);                                                                            \
    }
#define BULKS(X) X(1, 4, 16, 1, 1) X(1, 4, 16, 1, 2) X(1, 6, 16, 1, 2) X(1, 4, 16, 1, 4) X(2, 4, 16, 1, 1) X(2, 4, 16, 1, 2) X(2, 4, 16, 1, 4) X(4, 3, 16, 1, 2) X(4, 3, 16, 1, 4) X(4, 6, 8, 1, 2) X(8, 4, 8, 1, 2) X(8, 4, 8, 1, 4)
BULKS(BULK)
SHAPES(VARIANT)

struct Variant {
    const char* name;
    const void* kernel;
    u32 eights, depth, warps, blocks;
    bool bulk = false, early = false;  // early: begins while the launch before ends
};
#define ROW(EIGHTS, DEPTH, WARPS, BLOCKS) \
    {#EIGHTS " eights, depth " #DEPTH ", " #WARPS " x " #BLOCKS, (const void*)variant_##EIGHTS##_##DEPTH##_##WARPS##_##BLOCKS, EIGHTS, DEPTH, WARPS, BLOCKS},
#define BULK_ROW(EIGHTS, STAGES, WARPS, BLOCKS, CLUSTER) \
    {"bulk " #EIGHTS " eights, " #STAGES " stages, " #WARPS " x " #BLOCKS " " #CLUSTER, (const void*)bulk_##EIGHTS##_##STAGES##_##WARPS##_##BLOCKS##_##CLUSTER, EIGHTS, STAGES, WARPS, BLOCKS, true},
#define EARLY_ROW(EIGHTS, STAGES, WARPS, BLOCKS, CLUSTER) \
    {"early " #EIGHTS " eights, " #STAGES " stages, " #WARPS " x " #BLOCKS " " #CLUSTER, (const void*)bulk_##EIGHTS##_##STAGES##_##WARPS##_##BLOCKS##_##CLUSTER, EIGHTS, STAGES, WARPS, BLOCKS, true, true},
static const Variant variants[] = {SHAPES(ROW) BULKS(BULK_ROW) BULKS(EARLY_ROW)};
static bool ring = false, early = true;  // the kernels of the PTX; programmatic launches
static const char* forced = nullptr;  // the variants that a check takes
static Variant standard(u32 x_rows) {
    if (forced)
        for (auto& v : variants)
            if (strstr(v.name, forced) && v.eights * 8 >= x_rows) return v;
    const char* name = x_rows <= 8 ? "df11_linear_fast_8" : "df11_linear_fast_16";
    const void* compiled_in = x_rows <= 8 ? (const void*)df11_linear_fast_8 : (const void*)df11_linear_fast_16;
    return {name, kernel_of(name, compiled_in), (x_rows + 7) / 8, ring ? LINEAR_DEPTH : LINEAR_STAGES, LINEAR_WARPS, 1, !ring, !ring && early};
}

static void launch_fast(const Variant& v, const LinearLaunch& l, cudaStream_t stream) {
    const u32 shared = v.bulk ? bulk_shared_bytes(v.warps, l.x_rows, v.depth) : linear_shared_bytes(v.warps, v.eights, v.depth);
    const u32 threads = (v.warps + 2 * v.bulk) * LANES;
    CUDA(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    int blocks;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, v.kernel, threads, shared));
    if (!blocks) { printf("%s does not fit\n", v.name); exit(1); }
    LinearLaunch copy = l;
    void* arguments[] = {&copy};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = std::max(std::min<u32>(l.items, blocks * sm_count()) / LINEAR_GROUP * LINEAR_GROUP, LINEAR_GROUP), config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = v.early;
    CUDA(cudaLaunchKernelExC(&config, v.kernel, arguments));
}

struct Context {
    cublasLtHandle_t lt;
    void* room;
    cudaStream_t stream;
    u32 *counters, *status;
    float* partials;
    Context() {
        cublasLtCreate(&lt);
        CUDA(cudaMalloc(&room, LT_ROOM));
        CUDA(cudaStreamCreate(&stream));
        CUDA(cudaMalloc(&counters, 4 << 16));
        CUDA(cudaMemset(counters, 0, 4 << 16));
        CUDA(cudaMalloc(&status, 4));
        CUDA(cudaMemset(status, 0, 4));
        CUDA(cudaMalloc(&partials, size_t(1024) * LINEAR_PARTIAL_BYTES));
    }
    u32 take_status() {
        u32 s;
        CUDA(cudaMemcpy(&s, status, 4, cudaMemcpyDeviceToHost));
        CUDA(cudaMemset(status, 0, 4));
        return s;
    }
};

static void add_matrix(LinearLaunch& l, const Fast& f, u16* y, u64 y_pitch, const u16* bias) {
    LinearMatrix& m = l.matrices[l.matrix_count];
    m = {};
    m.data = f.data, m.index = f.heads, m.rest = f.entries, m.rest_count = f.count, m.bias = bias, m.y = y, m.y_pitch = y_pitch;
    const LinearSplit split = linear_split(f.rows, f.columns);
    m.rows = f.rows, m.whole_strips = split.whole_strips, m.slices = split.slices, m.first_item = l.items;
    if (l.matrix_count) {
        const LinearMatrix& last = l.matrices[l.matrix_count - 1];
        m.first_strip = last.first_strip + (last.rows + 31) / 32;
        m.first_partial = last.first_partial + linear_split(last.rows, f.columns).partials();
    }
    m.tiles_across = (f.columns + 255) / 256;
    l.items += split.items(), l.matrix_count++;
}
static LinearLaunch launch_of(Context& c, const u16* x, u64 pitch, u32 x_rows, u32 columns) {
    LinearLaunch l = {};
    l.x = x, l.x_pitch = pitch, l.x_rows = x_rows, l.columns = columns, l.counters = c.counters, l.partials = c.partials, l.status = c.status;
    return l;
}

// --- check

struct Errors {
    double rms = 0, worst = 0;
    u64 classes = 0;  // where one is finite and the other is not, or they are infinite otherwise
};
// Against the reference; scale: the root of the sum of squares of products.
static Errors errors_of(const std::vector<u16>& y, const std::vector<double>& reference, const std::vector<double>& scale) {
    Errors e;
    double sum = 0;
    u64 n = 0;
    for (size_t i = 0; i < y.size(); i++) {
        const double v = from_bf16(y[i]), r = reference[i];
        if (std::isnan(r) != std::isnan(v) || std::isinf(r) != std::isinf(v) || (std::isinf(r) && (r > 0) != (v > 0))) e.classes++;
        if (!std::isfinite(r) || !std::isfinite(v) || scale[i] == 0) continue;
        const double d = std::abs(v - r) / scale[i];
        sum += d * d, n++, e.worst = std::max(e.worst, d);
    }
    e.rms = n ? std::sqrt(sum / n) : 0;
    return e;
}

static bool check_one(Context& c, u32 rows, u32 columns, int mode, u32 x_rows, u32 seed) {
    const u64 n = u64(rows) * columns, outputs = u64(x_rows) * rows;
    u16* w = make_weights(rows, columns, seed, mode);
    Fast f = pack(w, rows, columns);
    bool good = true;
    auto expect = [&](bool right, const char* what) {
        if (!right) printf("WRONG %ux%u mode %d, %u rows: %s\n", rows, columns, mode, x_rows, what), good = false;
    };
    u16* back;
    CUDA(cudaMalloc(&back, n * 2 + 2));
    CUDA(cudaMemset(back, 0xA5, n * 2 + 2));
    unpack(f, back, columns, c.status);
    expect(same_bits(w, back, n), "unpacked weights differ");
    expect(from_device(back + n, 1)[0] == 0xA5A5, "unpack wrote past the end");
    const u64 x_pitch = (columns + 7) / 8 * 8 + 8;
    u16* x = make_weights(x_rows, u32(x_pitch), seed + 77, mode == 5 ? 6 : 4);
    const u64 y_pitch = rows + 5;
    u16 *y, *y2, *yb, *bias = make_weights(1, rows, seed + 99, 0);
    CUDA(cudaMalloc(&y, x_rows * y_pitch * 2));
    CUDA(cudaMalloc(&y2, x_rows * y_pitch * 2));
    CUDA(cudaMalloc(&yb, outputs * 2));
    auto run = [&](u16* to, const u16* from, u64 pitch, u32 count, const u16* b) {
        CUDA(cudaMemset(to, 0xA5, x_rows * y_pitch * 2));
        LinearLaunch l = launch_of(c, from, pitch, count, columns);
        add_matrix(l, f, to, y_pitch, b);
        launch_fast(standard(count), l, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
    };
    run(y, x, x_pitch, x_rows, nullptr);
    std::vector<u16> all = from_device(y, x_rows * y_pitch), mine(outputs);
    for (u32 i = 0; i < x_rows; i++)
        for (u64 k = 0; k < y_pitch; k++) {
            if (k < rows) mine[u64(i) * rows + k] = all[i * y_pitch + k];
            else expect(all[i * y_pitch + k] == 0xA5A5, "wrote outside y");
        }
    for (int i = 0; i < 3; i++) {
        run(y2, x, x_pitch, x_rows, nullptr);
        expect(same_bits(y, y2, x_rows * y_pitch), "other bits in another run");
    }
    for (u32 one : {0u, x_rows - 1}) {
        if (x_rows > 16) break;
        run(y2, x + one * x_pitch, x_pitch, 1, nullptr);
        expect(same_bits(y + one * y_pitch, y2, rows), "a row alone has other bits");
    }
    // An x that is not aligned: the same numbers one element further.
    u16* shifted;
    CUDA(cudaMalloc(&shifted, x_rows * (x_pitch + 1) * 2 + 2));
    CUDA(cudaMemcpy2D(shifted + 1, (x_pitch + 1) * 2, x, x_pitch * 2, columns * 2, x_rows, cudaMemcpyDeviceToDevice));
    run(y2, shifted + 1, x_pitch + 1, x_rows, nullptr);
    expect(same_bits(y, y2, x_rows * y_pitch), "an unaligned x has other bits");
    // Bias.
    run(y2, x, x_pitch, x_rows, bias);
    std::vector<u16> biased = from_device(y2, x_rows * y_pitch), hb = from_device(bias, rows);
    std::vector<double> reference, scale;
    exact_product(w, rows, columns, x, x_pitch, x_rows, reference, scale);
    std::vector<double> with_bias = reference;
    std::vector<u16> mine_biased(outputs);
    for (u64 i = 0; i < outputs; i++) with_bias[i] += from_bf16(hb[i % rows]), mine_biased[i] = biased[i / rows * y_pitch + i % rows];
    Lt lt(c.lt, c.room, rows, x_rows, columns, x_pitch);
    Errors cublas;
    if (lt.count) {
        lt.run(0, w, x, yb, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        cublas = errors_of(from_device(yb, outputs), reference, scale);
    }
    const Errors ours = errors_of(mine, reference, scale), biased_error = errors_of(mine_biased, with_bias, scale);
    const double slack = lt.count ? 1.0 : 1e9;
    expect(ours.classes <= (lt.count ? cublas.classes : 0), "infinities or NaN not where cuBLAS has them");
    expect(ours.rms <= std::max(cublas.rms, 1e-30) * 1.01 * slack, "larger error than cuBLAS");
    expect(ours.rms < 0.02 && biased_error.rms < 0.02 + ours.rms * 4, "wrong product");
    expect(c.take_status() == 0, "status");
    printf("%6ux%-6u mode %d x %2u: %.3f bits, entries %.1e, rms %.3e (cuBLAS %.3e, Lt %d), worst %.2e (%.2e), classes %llu %llu%s\n", rows, columns, mode,
           x_rows, f.bytes() * 8.0 / n, double(f.count) / n, ours.rms, cublas.rms, lt.count, ours.worst, cublas.worst, (unsigned long long)ours.classes,
           (unsigned long long)cublas.classes, good ? "" : "  WRONG");
    for (void* p : {(void*)w, (void*)back, (void*)x, (void*)y, (void*)y2, (void*)yb, (void*)bias, (void*)shifted}) CUDA(cudaFree(p));
    f.free();
    return good;
}

static int check(Context& c) {
    bool good = true;
    const u32 shapes[][2] = {{4096, 4096}, {32, 256}, {1, 8}, {5, 7}, {33, 264}, {100, 1000}, {257, 384}, {1024, 4096}, {768, 2048}, {64, 14336}, {31, 33}, {1000, 5120}};
    u32 seed = 1;
    for (auto& s : shapes)
        for (u32 x_rows : {1u, 3u, 8u, 9u, 16u}) good &= check_one(c, s[0], s[1], seed % 2 ? 0 : 1, x_rows, seed), seed++;
    for (int mode : {1, 3, 5, 7})
        for (u32 x_rows : {1u, 16u}) good &= check_one(c, 512, 2048, mode, x_rows, seed++);
    good &= check_one(c, 4096, 14336, 0, 4, seed++);
    good &= check_one(c, 6144, 4096, 0, 16, seed++);
    if (forced)
        for (u32 x_rows : {17u, 31u, 32u, 33u, 64u}) good &= check_one(c, 512, 2048, 0, x_rows, seed++), good &= check_one(c, 4096, 4096, 0, x_rows, seed++), good &= check_one(c, 100, 1000, 1, x_rows, seed++);
    // Every pattern: packed and unpacked.
    for (u32 rows : {256u, 37u}) {
        u16* w = make_weights(rows, 512, 5, 2);
        Fast f = pack(w, rows, 512);
        u16* back;
        CUDA(cudaMalloc(&back, rows * 1024));
        CUDA(cudaMemset(back, 0xA5, rows * 1024));
        unpack(f, back, 512, c.status);
        const bool same = same_bits(w, back, rows * 512);
        printf("all patterns, %u rows: %.2f bits%s\n", rows, f.bytes() * 8.0 / (rows * 512), same ? "" : "  WRONG");
        good &= same;
        CUDA(cudaFree(w)); CUDA(cudaFree(back)); f.free();
    }
    printf("check: %s\n", good ? "all right" : "WRONG");
    return !good;
}

// --- bench

struct Contender {
    std::string name;
    double bytes;
    std::function<void(int)> launch;  // on the context's stream
    cudaGraphExec_t graph = nullptr;
    std::vector<double> seconds = {};
};
static double median_of(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
// Medians of interleaved rounds, each of all copies in a graph; seconds a launch.
static void measure(Context& c, std::vector<Contender>& all, int copies, int rounds) {
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (auto& one : all) {
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeGlobal));
        for (int k = 0; k < copies; k++) one.launch(k);
        CUDA(cudaStreamEndCapture(c.stream, &graph));
        CUDA(cudaGraphInstantiate(&one.graph, graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    for (int round = 0; round < rounds + 1; round++)
        for (auto& one : all) {
            CUDA(cudaEventRecord(a, c.stream));
            CUDA(cudaGraphLaunch(one.graph, c.stream));
            CUDA(cudaEventRecord(b, c.stream));
            CUDA(cudaEventSynchronize(b));
            float ms;
            CUDA(cudaEventElapsedTime(&ms, a, b));
            if (round) one.seconds.push_back(ms / 1e3 / copies);
        }
    for (auto& one : all) CUDA(cudaGraphExecDestroy(one.graph));
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
}

static int bench(Context& c, int rounds, bool with_variants) {
    const u32 shapes[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {25600, 5120}};
    const std::vector<u32> batches = with_variants ? std::vector<u32>{1, 8, 16, 32, 64} : std::vector<u32>{1, 2, 4, 8, 12, 16};
    struct Row { u32 x_rows; std::string name; double sum_cublas, sum_ours; };
    std::vector<Row> sums;
    for (auto& shape : shapes) {
        const u32 rows = shape[0], columns = shape[1];
        const u64 n = u64(rows) * columns;
        const int copies = std::max<int>(4, int(500e6 / (n * 1.5)));
        u16* w = make_weights(rows, columns, 3, 0);
        Fast f = pack(w, rows, columns);
        std::vector<u16*> ws = {w};
        std::vector<Fast> fs = {f};
        for (int i = 1; i < copies; i++) ws.push_back(copy_of(w, n * 2)), fs.push_back(f.copy());
        u16* x = make_weights(128, columns, 9, 4);
        u16* y;
        CUDA(cudaMalloc(&y, u64(128) * rows * 2));
        for (u32 x_rows : batches) {
            std::vector<Contender> all;
            Lt lt(c.lt, c.room, rows, x_rows, columns, columns);
            for (int i = 0; i < lt.count; i++)
                all.push_back({"cublasLt " + std::to_string(i), n * 2.0, [&, i](int k) { lt.run(i, ws[k], x, y, c.stream); }});
            const int peers = int(all.size());
            auto add = [&](const Variant& v) {
                all.push_back({v.name, double(f.bytes()), [&, v](int k) {
                                   LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
                                   add_matrix(l, fs[k], y, rows, nullptr);
                                   launch_fast(v, l, c.stream);
                               }});
            };
            if (x_rows <= 16) add(standard(x_rows));
            if (early && !ring && x_rows <= 16) {
                Variant plain = standard(x_rows);
                plain.name = "the same, launched plainly", plain.early = false;
                add(plain);
            }
            if (with_variants)
                for (auto& v : variants)
                    if (x_rows <= v.eights * 8 && (x_rows > v.eights * 4 || v.eights == 1)) add(v);
            measure(c, all, copies, rounds);
            double best = 1;
            for (int i = 0; i < peers; i++) best = std::min(best, median_of(all[i].seconds));
            for (size_t i = peers; i < all.size(); i++) {
                const double s = median_of(all[i].seconds);
                printf("%5ux%-5u x %2u %-28s %7.2f us %5.0f GB/s; cuBLASLt %7.2f us %5.0f GB/s; ratio %.3f\n", rows, columns, x_rows, all[i].name.c_str(), s * 1e6,
                       all[i].bytes / s / 1e9, best * 1e6, n * 2 / best / 1e9, best / s);
                if (&shape == &shapes[4]) continue;
                auto row = std::find_if(sums.begin(), sums.end(), [&](auto& r) { return r.x_rows == x_rows && r.name == all[i].name; });
                if (row == sums.end()) sums.push_back({x_rows, all[i].name, best, s});
                else row->sum_cublas += best, row->sum_ours += s;
            }
        }
        for (auto p : ws) CUDA(cudaFree(p));
        for (auto& one : fs) one.free();
        CUDA(cudaFree(x)); CUDA(cudaFree(y));
    }
    printf("== sums of four\n");
    for (auto& r : sums) printf("x %2u %-28s %.3f (%.1f / %.1f us)\n", r.x_rows, r.name.c_str(), r.sum_cublas / r.sum_ours, r.sum_cublas * 1e6, r.sum_ours * 1e6);
    return 0;
}

int main(int argc, char** argv) {
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
    if (argc > 2 && !strcmp(argv[1], "--kernels")) {
        load_kernels(argv[2], "df11_linear_fast_8");
        ring = strstr(argv[2], ".ptx");
        argc -= 2, argv += 2;
    }
    const std::string mode = argc > 1 ? argv[1] : "";
    Context c;
    if (mode == "check") {
        if (argc > 2) forced = argv[2];
        int bad = check(c);
        early = false;
        return bad | check(c);
    }
    if (mode == "bench" || mode == "variants") return bench(c, atoi(argv[2]), mode == "variants");
    fprintf(stderr, "see the head of linear_bench.cu\n");
    return 2;
}
