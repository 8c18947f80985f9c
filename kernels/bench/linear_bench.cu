// Bench and check of the kernels that multiply by compressed matrices: see README.md.
//   linear_bench check                 odd shapes, every pattern, errors beside cuBLAS's, the same
//                                      bits always; `check wide`: of 17 to 256 rows of x alone
//   linear_bench hostile COUNT SEED    changed data, heads and entries, for compute-sanitizer
//   linear_bench bench ROUNDS          Llama 3.1 8B's matrices and 25600 x 5120 beside cuBLASLt's
//                                      best; `wide`: 17 to 256 rows of x alone
//   linear_bench ways ROUNDS           32, 64 and 128 rows of x by all ways to share strips and
//                                      columns out among blocks
//   linear_bench sums ROUNDS [X_ROWS]  16 to 256 rows of x, or X_ROWS, without cuBLASLt: each
//                                      matrix, and all four
//   linear_bench one ROWS COLUMNS X_ROWS    three launches, for a profiler
//   linear_bench variants ROUNDS       other depths and numbers of warps
//   linear_bench stored MODE ...       check, hostile COUNT SEED, bench ROUNDS, sums ROUNDS (1 to
//                                      64 rows of x): the same of tiles as stored; spaced ROUNDS:
//                                      as bench, each product after a small kernel; spaced ROUNDS
//                                      early: which lets it begin before it ends; several ROUNDS:
//                                      of matrices in one launch; profile X_ROWS: some launches. Of
//                                      other codes than the encoder's: CODE_BITS=N of the longest
//                                      one at most, ESCAPE_COST=N bits that an escape counts more
//                                      than it takes. TABLES=1: of a launch one table at once
//   linear_bench crossover ROUNDS [X_ROWS ...]    from how many rows of x on decoding first is
//                                                 faster
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include <cublasLt.h>
#include <cudaTypedefs.h>

#include "../linear.cu"
#include "../tile.cu"
using namespace df11;
using namespace linear;
#include "bench.hpp"
#include "tile_host.hpp"
#include "linear_host.hpp"

#define VARIANT(EIGHTS, DEPTH, WARPS, BLOCKS)               \
    __global__ void __launch_bounds__(WARPS* LANES, BLOCKS) \
        variant_##EIGHTS##_##DEPTH##_##WARPS##_##BLOCKS(    \
            const __grid_constant__ LinearLaunch launch) {  \
        linear_fast<EIGHTS, DEPTH, WARPS>(Shared{launch});  \
    }
#define SHAPES(X) X(1, 2, 16, 1) X(2, 2, 16, 1) X(1, 3, 16, 1)
// By bulk copies: eights, stages, warps, blocks, blocks of a cluster.
#define BULK(EIGHTS, STAGES, WARPS, BLOCKS, CLUSTER)                                               \
    __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS + 2) * LANES, BLOCKS) \
        bulk_##EIGHTS##_##STAGES##_##WARPS##_##BLOCKS##_##CLUSTER(                                 \
            const __grid_constant__ LinearLaunch launch) {                                         \
        linear_bulk<EIGHTS, WARPS, CLUSTER>(Shared{launch});                                       \
    }
#define BULKS(X)                                                                             \
    X(1, 4, 16, 1, 1)                                                                        \
    X(1, 3, 16, 1, 2) X(1, 6, 16, 1, 2) X(1, 9, 8, 1, 2) X(2, 4, 16, 1, 1)
BULKS(BULK)
SHAPES(VARIANT)

struct Variant {
    const char* name;
    const void* kernel;
    u32 eights, depth, warps, blocks;
    bool bulk = false, early = false;
    u32 cluster = 1;  // early: begins while the launch before ends
};
#define ROW(EIGHTS, DEPTH, WARPS, BLOCKS)                          \
    {#EIGHTS " eights, depth " #DEPTH ", " #WARPS " x " #BLOCKS,   \
     (const void*)variant_##EIGHTS##_##DEPTH##_##WARPS##_##BLOCKS, \
     EIGHTS,                                                       \
     DEPTH,                                                        \
     WARPS,                                                        \
     BLOCKS},
#define BULK_ROW(EIGHTS, STAGES, WARPS, BLOCKS, CLUSTER)                                \
    {"bulk " #EIGHTS " eights, " #STAGES " stages, " #WARPS " x " #BLOCKS " " #CLUSTER, \
     (const void*)bulk_##EIGHTS##_##STAGES##_##WARPS##_##BLOCKS##_##CLUSTER,            \
     EIGHTS,                                                                            \
     STAGES,                                                                            \
     WARPS,                                                                             \
     BLOCKS,                                                                            \
     true,                                                                              \
     false,                                                                             \
     CLUSTER},
#define EARLY_ROW(EIGHTS, STAGES, WARPS, BLOCKS, CLUSTER)                                \
    {"early " #EIGHTS " eights, " #STAGES " stages, " #WARPS " x " #BLOCKS " " #CLUSTER, \
     (const void*)bulk_##EIGHTS##_##STAGES##_##WARPS##_##BLOCKS##_##CLUSTER,             \
     EIGHTS,                                                                             \
     STAGES,                                                                             \
     WARPS,                                                                              \
     BLOCKS,                                                                             \
     true,                                                                               \
     true,                                                                               \
     CLUSTER},
static const Variant variants[] = {SHAPES(ROW) BULKS(BULK_ROW) BULKS(EARLY_ROW)};
static bool ring = false, early = true;  // the kernels of the PTX; programmatic launches
static const char* forced = nullptr;     // the variants that a check takes
static Variant standard(u32 x_rows) {
    if (forced)
        for (auto& v : variants)
            if (strstr(v.name, forced) && v.eights * 8 >= x_rows) return v;
    const char* name = x_rows <= 8 ? "df11_linear_fast_8" : "df11_linear_fast_16";
    const void* compiled_in =
        x_rows <= 8 ? (const void*)df11_linear_fast_8 : (const void*)df11_linear_fast_16;
    return {name,
            kernel_of(name, compiled_in),
            (x_rows + 7) / 8,
            ring ? LINEAR_DEPTH : LINEAR_STAGES,
            LINEAR_WARPS,
            1,
            !ring,
            !ring && early};
}

static void launch_fast(const Variant& v, const LinearLaunch& l, cudaStream_t stream) {
    const u32 shared = v.bulk ? bulk_shared_bytes(v.warps, v.eights, v.depth)
                              : linear_shared_bytes(v.warps, v.eights, v.depth);
    const u32 threads = (v.warps + 2 * v.bulk) * LANES;
    CUDA(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    int blocks = 0, clusters = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, v.kernel, threads, shared));
    if (!blocks) {
        printf("%s does not fit\n", v.name);
        exit(1);
    }
    LinearLaunch copy = l;
    void* arguments[] = {&copy};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization,
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = std::max(
        std::min<u32>(l.items, blocks * sm_count()) / LINEAR_GROUP * LINEAR_GROUP, LINEAR_GROUP),
    config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = v.early;
    if (v.cluster > 2) {
        CUDA(cudaOccupancyMaxActiveClusters(&clusters, v.kernel, &config));
        config.gridDim = std::min<u32>(config.gridDim.x, clusters * v.cluster);
    }
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
        CUDA(cudaMalloc(&partials, 128 << 20));
        CUDA(cudaMemset(partials, 0xFF, 128 << 20));
    }
    u32 take_status() {
        u32 s;
        CUDA(cudaMemcpy(&s, status, 4, cudaMemcpyDeviceToHost));
        CUDA(cudaMemset(status, 0, 4));
        return s;
    }
    // Kernels leave counters as they were.
    bool has_clear_counters() const {
        std::vector<u32> all(1 << 16);
        CUDA(cudaMemcpy(all.data(), counters, 4 << 16, cudaMemcpyDeviceToHost));
        return std::all_of(all.begin(), all.end(), [](u32 n) { return n == 0; });
    }
};

static LinearLaunch launch_of(Context& c, const u16* x, u64 pitch, u32 x_rows, u32 columns) {
    LinearLaunch l = {};
    l.x = x, l.x_pitch = pitch, l.x_rows = x_rows, l.columns = columns, l.counters = c.counters,
    l.partials = c.partials, l.status = c.status;
    return l;
}

static void launch_product(const LinearLaunch& l, bool early, cudaStream_t stream);
#include "stored_host.hpp"
// Rows of x up to which the kernels are those of linear_bulk.cuh, and which of them.
constexpr u32 MOST_BY_SHARED = LINEAR_ROWS;
static u32 class_of(u32 x_rows) {
    if (x_rows <= WIDE_ROWS) return x_rows <= MOST_BY_SHARED ? 0 : wide_class(x_rows);
    return large_class(x_rows) + 1000 * large_bands(x_rows);
}

// --- check

struct Errors {
    double rms = 0, worst = 0;
    u64 classes = 0;  // where one is finite and the other is not, or they are infinite otherwise
};
// Against the reference; scale: the root of the sum of squares of products.
static Errors errors_of(const std::vector<u16>& y, const std::vector<double>& reference,
                        const std::vector<double>& scale) {
    Errors e;
    double sum = 0;
    u64 n = 0;
    for (size_t i = 0; i < y.size(); i++) {
        const double v = from_bf16(y[i]), r = reference[i];
        // A sum that can overflow f32 in one order and not in another is no error of either.
        if (std::isfinite(r) && scale[i] * 256 > 3.4e38) continue;
        if (std::isnan(r) != std::isnan(v) || std::isinf(r) != std::isinf(v) ||
            (std::isinf(r) && (r > 0) != (v > 0)))
            e.classes++;
        if (!std::isfinite(r) || !std::isfinite(v) || scale[i] == 0) continue;
        const double d = std::abs(v - r) / scale[i];
        sum += d * d, n++, e.worst = std::max(e.worst, d);
    }
    e.rms = n ? std::sqrt(sum / n) : 0;
    return e;
}

template <class Form>
static bool check_one(Context& c, u32 rows, u32 columns, int mode, u32 x_rows, u32 seed) {
    const u64 n = u64(rows) * columns, outputs = u64(x_rows) * rows;
    u16* w = make_weights(rows, columns, seed, mode);
    Form f = make_form((const Form*)nullptr, w, rows, columns);
    bool good = true;
    auto expect = [&](bool right, const char* what) {
        if (!right)
            printf("WRONG %ux%u mode %d, %u rows: %s\n", rows, columns, mode, x_rows, what),
                good = false;
    };
    expect(right_weights(c, f, w), "unpacked weights differ, or more was written");
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
        launch_form(f, l, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
    };
    run(y, x, x_pitch, x_rows, nullptr);
    std::vector<u16> all = from_device(y, x_rows * y_pitch), mine(outputs);
    for (u32 i = 0; i < x_rows; i++)
        for (u64 k = 0; k < y_pitch; k++) {
            if (k < rows)
                mine[u64(i) * rows + k] = all[i * y_pitch + k];
            else
                expect(all[i * y_pitch + k] == 0xA5A5, "wrote outside y");
        }
    for (int i = 0; i < 3; i++) {
        run(y2, x, x_pitch, x_rows, nullptr);
        expect(same_bits(y, y2, x_rows * y_pitch), "other bits in another run");
    }
    for (u32 one : {0u, x_rows - 1}) {
        if (x_rows > LINEAR_ROWS) break;
        run(y2, x + one * x_pitch, x_pitch, 1, nullptr);
        expect(same_bits(y + one * y_pitch, y2, rows), "a row alone has other bits");
    }
    if (x_rows > LINEAR_ROWS + 1 && class_of(x_rows - 1) == class_of(x_rows)) {
        run(y2, x + x_pitch, x_pitch, x_rows - 1, nullptr);
        expect(same_bits(y + y_pitch, y2, (x_rows - 1) * y_pitch), "other rows change bits");
    }
    // An x that is not aligned: the same numbers one element further.
    u16* shifted;
    CUDA(cudaMalloc(&shifted, x_rows * (x_pitch + 1) * 2 + 2));
    CUDA(cudaMemcpy2D(shifted + 1, (x_pitch + 1) * 2, x, x_pitch * 2, columns * 2, x_rows,
                      cudaMemcpyDeviceToDevice));
    run(y2, shifted + 1, x_pitch + 1, x_rows, nullptr);
    expect(same_bits(y, y2, x_rows * y_pitch), "an unaligned x has other bits");
    // Bias.
    run(y2, x, x_pitch, x_rows, bias);
    std::vector<u16> biased = from_device(y2, x_rows * y_pitch), hb = from_device(bias, rows);
    std::vector<double> reference, scale;
    exact_product(w, rows, columns, x, x_pitch, x_rows, reference, scale);
    std::vector<double> with_bias = reference;
    std::vector<u16> mine_biased(outputs);
    for (u64 i = 0; i < outputs; i++)
        with_bias[i] += from_bf16(hb[i % rows]),
            mine_biased[i] = biased[i / rows * y_pitch + i % rows];
    Lt lt(c.lt, c.room, rows, x_rows, columns, x_pitch);
    Errors cublas;
    if (lt.count) {
        lt.run(0, w, x, yb, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        cublas = errors_of(from_device(yb, outputs), reference, scale);
    }
    const Errors ours = errors_of(mine, reference, scale),
                 biased_error = errors_of(mine_biased, with_bias, scale);
    const double slack = lt.count ? 1.0 : 1e9;
    expect(ours.classes <= (lt.count ? cublas.classes : 0),
           "infinities or NaN not where cuBLAS has them");
    expect(ours.rms <= std::max(cublas.rms, 1e-30) * 1.01 * slack, "larger error than cuBLAS");
    expect(ours.rms < 0.02 && biased_error.rms < 0.02 + ours.rms * 4, "wrong product");
    expect(c.take_status() == 0, "status");
    expect(c.has_clear_counters(), "counters");
    printf(
        "%6ux%-6u mode %d x %2u: %.3f bits, rms %.3e (cuBLAS %.3e, Lt %d), worst "
        "%.2e (%.2e), classes %llu %llu%s\n",
        rows, columns, mode, x_rows, f.bytes() * 8.0 / n, ours.rms, cublas.rms,
        lt.count, ours.worst, cublas.worst, (unsigned long long)ours.classes,
        (unsigned long long)cublas.classes, good ? "" : "  WRONG");
    for (void* p : {(void*)w, (void*)x, (void*)y, (void*)y2, (void*)yb, (void*)bias,
                    (void*)shifted})
        CUDA(cudaFree(p));
    f.free();
    return good;
}

// --- experts, and rows by index

struct Experts {
    std::vector<Fast> fast;
    std::vector<u16*> weights;
    LinearMatrix* matrices;
    u32 rows, columns;
    Experts(u32 count, u32 r, u32 c) : rows(r), columns(c) {
        std::vector<LinearMatrix> all(count);
        for (u32 e = 0; e < count; e++) {
            weights.push_back(make_weights(rows, columns, 1000 + e, 0));
            fast.push_back(pack(weights[e], rows, columns));
            all[e].data = fast[e].data, all[e].index = fast[e].heads, all[e].rest = fast[e].entries,
            all[e].rest_count = fast[e].count, all[e].whole_columns = columns;
        }
        matrices = upload(all);
    }
    void free() {
        for (auto& f : fast) f.free();
        for (auto w : weights) CUDA(cudaFree(w));
        CUDA(cudaFree(matrices));
    }
};
static void launch_grouped(const GroupedLaunch& l, u32 most_items, cudaStream_t stream) {
    const void* kernel = kernel_of("df11_linear_grouped", (const void*)df11_linear_grouped);
    const u32 shared = ring ? linear_shared_bytes(LINEAR_WARPS, 1, LINEAR_DEPTH)
                            : bulk_shared_bytes(LINEAR_WARPS, 2, LINEAR_STAGES);
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    GroupedLaunch copy = l;
    void* arguments[] = {&copy};
    CUDA(cudaLaunchKernel(kernel, std::min<u32>(most_items, sm_count()),
                          (LINEAR_WARPS + (ring ? 0 : 2)) * LANES, arguments, shared, stream));
}
static bool check_grouped(Context& c, u32 experts, u32 rows, u32 columns, std::vector<u32> counts,
                          bool indexed, bool shifted) {
    Experts all(experts, rows, columns);
    std::vector<u32> offsets(experts + 1), index;
    for (u32 e = 0; e < experts; e++) offsets[e + 1] = offsets[e] + counts[e % counts.size()];
    const u32 places = offsets[experts], x_rows = indexed ? 7 : std::max(places, 1u);
    for (u32 i = 0; i < places; i++) index.push_back(indexed ? (i * 5 + 3) % x_rows : i);
    const u64 pitch = columns + 8 + shifted;
    u16* x = make_weights(x_rows + 1, u32(pitch), 5, 4) + shifted;
    u16 *y, *one;
    CUDA(cudaMalloc(&y, (places + 1) * u64(rows) * 2));
    CUDA(cudaMalloc(&one, u64(rows) * 2));
    CUDA(cudaMemset(y, 0xA5, (places + 1) * u64(rows) * 2));
    u32 *d_offsets = upload(offsets), *d_index = upload(index);
    GroupedLaunch l = {x,
                       pitch,
                       indexed ? d_index : nullptr,
                       d_offsets,
                       all.matrices,
                       y,
                       rows,
                       c.status,
                       x_rows,
                       columns,
                       rows,
                       places,
                       experts,
                       {}};
    launch_grouped(l, sm_count(), c.stream);
    CUDA(cudaStreamSynchronize(c.stream));
    bool good = c.take_status() == 0 && from_device(y + places * u64(rows), 1)[0] == 0xA5A5;
    double worst = 0;
    for (u32 e = 0; e < experts; e++)
        for (u32 i = offsets[e]; i < offsets[e + 1]; i++) {
            std::vector<double> reference, scale;
            exact_product(all.weights[e], rows, columns, x + index[i] * pitch, pitch, 1, reference,
                          scale);
            const Errors error = errors_of(from_device(y + i * u64(rows), rows), reference, scale);
            worst = std::max(worst, error.rms);
            good &= error.rms < 0.01 && error.classes == 0;
        }
    printf("grouped %u experts of %ux%u, %u places, indexed %d, shifted %d: worst rms %.2e%s\n",
           experts, rows, columns, places, indexed, shifted, worst, good ? "" : "  WRONG");
    all.free();
    for (void* p : {(void*)(x - shifted), (void*)y, (void*)one, (void*)d_offsets, (void*)d_index})
        CUDA(cudaFree(p));
    return good;
}

template <class Form>
static GatherTask gather_of(const Form& f, const void* indices, u32 count, u32 wide, u16* output,
                            u64 pitch, u32* status) {
    const LinearMatrix m = part_of(f, all_of(f));
    return {m.data, m.index,   m.rest, m.table, m.rest_count,    indices,        output, pitch,
            f.rows, f.columns, count,  wide,    m.whole_columns, m.first_column, status};
}
static void launch_gather(const GatherTask& task, cudaStream_t stream) {
    GatherTask copy = task;
    void* arguments[] = {&copy};
    const u64 warps = u64(task.count) * ((task.columns + 255) / 256);
    const void* kernel =
        task.table ? kernel_of("df11_linear_tile_gather", (const void*)df11_linear_tile_gather)
                   : kernel_of("df11_linear_gather", (const void*)df11_linear_gather);
    CUDA(cudaLaunchKernel(kernel,
                          u32((warps + UNPACK_WARPS - 1) / UNPACK_WARPS), UNPACK_WARPS * LANES,
                          arguments, 0, stream));
}
template <class Form>
static bool check_gather(Context& c, u32 rows, u32 columns, int mode) {
    u16* w = make_weights(rows, columns, 31, mode);
    Form f = make_form((const Form*)nullptr, w, rows, columns);
    bool good = true;
    for (u32 wide : {0u, 1u}) {
        const u32 count = 67;
        std::vector<u64> indices(count);
        for (u32 i = 0; i < count; i++) indices[i] = (i * 7919ull + i * i) % rows;
        std::vector<u32> narrow(indices.begin(), indices.end());
        void* on_device = wide ? (void*)upload(indices) : (void*)upload(narrow);
        const u64 pitch = columns + 3 + wide * 5;
        u16* out;
        CUDA(cudaMalloc(&out, count * pitch * 2));
        CUDA(cudaMemset(out, 0xA5, count * pitch * 2));
        GatherTask task = gather_of(f, on_device, count, wide, out, pitch, c.status);
        launch_gather(task, nullptr);
        CUDA(cudaDeviceSynchronize());
        for (u32 i = 0; i < count; i++) {
            good &= same_bits(out + i * pitch, w + indices[i] * columns, columns);
            good &= from_device(out + i * pitch + columns, 1)[0] == 0xA5A5;
        }
        good &= c.take_status() == 0;
        CUDA(cudaFree(out));
        CUDA(cudaFree(on_device));
    }
    const std::vector<u64> bad = {rows, ~0ull};
    u64* on_device = upload(bad);
    u16* out = upload(std::vector<u16>(2 * columns, 0xA5A5));
    launch_gather(gather_of(f, on_device, 2, 1, out, columns, c.status), nullptr);
    CUDA(cudaDeviceSynchronize());
    for (u16 v : from_device(out, 2 * columns)) good &= v == 0;
    good &= c.take_status() == STATUS_INDEX;
    printf("gather of %ux%u mode %d%s\n", rows, columns, mode, good ? "" : "  WRONG");
    f.free();
    for (void* p : {(void*)w, (void*)out, (void*)on_device}) CUDA(cudaFree(p));
    return good;
}

// --- times

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

#include "linear_wide.hpp"
#include "stored_bench.hpp"

static void launch_product(const LinearLaunch& l, bool early, cudaStream_t stream) {
    if (l.x_rows > MOST_BY_SHARED) return launch_wide(l, early, stream);
    Variant v = standard(l.x_rows);
    v.early &= early;
    launch_fast(v, l, stream);
}
static int check(Context& c, bool wide_only) {
    if (wide_only) return !check_wide(c, early);
    bool good = true;
    const u32 shapes[][2] = {{4096, 4096}, {32, 256},   {1, 8},     {5, 7},
                             {33, 264},    {100, 1000}, {257, 384}, {1024, 4096},
                             {768, 2048},  {64, 14336}, {31, 33},   {1000, 5120}};
    u32 seed = 1;
    for (auto& s : shapes)
        for (u32 x_rows : {1u, 3u, 8u, 9u, 16u})
            good &= check_one<Fast>(c, s[0], s[1], seed % 2 ? 0 : 1, x_rows, seed), seed++;
    for (int mode : {1, 3, 5, 7})
        for (u32 x_rows : {1u, 16u}) good &= check_one<Fast>(c, 512, 2048, mode, x_rows, seed++);
    good &= check_one<Fast>(c, 4096, 14336, 0, 4, seed++);
    good &= check_one<Fast>(c, 6144, 4096, 0, 16, seed++);
    if (!ring) good &= check_wide(c, early);
    good &= check_grouped(c, 8, 1536, 2048, {1, 0, 3, 16, 0, 17, 2, 33}, false, false);
    good &= check_grouped(c, 40, 100, 264, {1, 0, 0, 9}, true, false);
    good &= check_grouped(c, 5, 64, 768, {0}, false, false);
    good &= check_grouped(c, 3, 96, 768, {2, 5}, true, true);
    good &= check_gather<Fast>(c, 1000, 4096, 0);
    good &= check_gather<Fast>(c, 77, 1000, 3);
    good &= check_gather<Fast>(c, 77, 250, 5);
    // Every pattern: packed and unpacked.
    for (u32 rows : {256u, 37u}) {
        u16* w = make_weights(rows, 512, 5, 2);
        Fast f = pack(w, rows, 512);
        u16* back;
        CUDA(cudaMalloc(&back, rows * 1024));
        CUDA(cudaMemset(back, 0xA5, rows * 1024));
        unpack(f, back, 512, c.status);
        const bool same = same_bits(w, back, rows * 512);
        printf("all patterns, %u rows: %.2f bits%s\n", rows, f.bytes() * 8.0 / (rows * 512),
               same ? "" : "  WRONG");
        good &= same;
        CUDA(cudaFree(w));
        CUDA(cudaFree(back));
        f.free();
    }
    printf("check: %s\n", good ? "all right" : "WRONG");
    return !good;
}

// Heads, entries and data that say anything, and indices; every array is an allocation of its exact
// size. Under compute-sanitizer.
static int hostile(Context& c, int count, u64 seed) {
    std::vector<u32> shapes[] = {{100, 520}, {33, 264}, {64, 1000}, {5, 40}};
    auto next = [&] {
        return seed = seed * 6364136223846793005ull + 1442695040888963407ull, seed >> 33;
    };
    u64 refused = 0;
    for (int i = 0; i < count; i++) {
        const u32 rows = shapes[i % 4][0], columns = shapes[i % 4][1],
                  x_rows = 1 + next() % (ring ? LINEAR_ROWS : i % 8 ? LARGE_ROWS : 3 * LARGE_ROWS);
        u16* w = make_weights(rows, columns, next(), i % 3);
        Fast f = pack(w, rows, columns);
        std::vector<u8> heads = from_device((const u8*)f.heads, f.tiles * 8),
                        entries = from_device((const u8*)f.entries, u64(f.count) * 4);
        std::vector<u8> data = from_device(f.data, f.data_bytes);
        for (auto* bytes : {&heads, &entries, &data})
            for (u64 k = 0; k < 1 + bytes->size() / 16 && !bytes->empty(); k++)
                if (next() % 2) (*bytes)[next() % bytes->size()] = u8(next());
        CUDA(cudaMemcpy(f.heads, heads.data(), heads.size(), cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(f.entries, entries.data(), entries.size(), cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(f.data, data.data(), data.size(), cudaMemcpyHostToDevice));
        u16 *x = make_weights(x_rows, columns, 3, 4), *y, *back;
        CUDA(cudaMalloc(&y, u64(x_rows) * rows * 2));
        CUDA(cudaMalloc(&back, u64(rows) * columns * 2));
        LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
        add_matrix(l, f, y, rows, nullptr);
        launch_product(l, early, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        unpack(f, back, columns, c.status);
        LinearMatrix m = {};
        m.data = f.data, m.index = f.heads, m.rest = f.entries, m.rest_count = f.count,
        m.whole_columns = columns;
        LinearMatrix* on_device = upload(std::vector<LinearMatrix>{m, m, m});
        u32* offsets = upload(std::vector<u32>{0, u32(next() % 9), u32(next() % 40), u32(next())});
        u32* index = upload(std::vector<u32>{0, 1, 2, u32(next()), 0, 1, 2, 0});
        u16* out;
        CUDA(cudaMalloc(&out, 8 * u64(std::max(rows, columns)) * 2));
        launch_grouped({x,
                        columns,
                        index,
                        offsets,
                        on_device,
                        out,
                        rows,
                        c.status,
                        x_rows,
                        columns,
                        rows,
                        8,
                        3,
                        {}},
                       sm_count(), c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        launch_gather(gather_of(f, index, 8, 0, out, columns, c.status), c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        refused += c.take_status() != 0;
        f.free();
        for (void* p : {(void*)w, (void*)x, (void*)y, (void*)back, (void*)on_device, (void*)offsets,
                        (void*)index, (void*)out})
            CUDA(cudaFree(p));
    }
    printf("hostile: %d streams, %llu with a status\n", count, (unsigned long long)refused);
    return 0;
}

// --- bench

// Experts and gathered rows, without peers: those are measured by linear_peers.py.
static void bench_others(Context& c, int rounds) {
    for (auto [rows, columns] : {std::pair{1536u, 2048u}, std::pair{2048u, 768u}}) {
        Experts all(128, rows, columns);
        for (u32 batch : {1u, 8u, 64u}) {
            // As many sets of routed experts as copies; every row has eight of its own.
            const u32 places = batch * 8, sets = 12;
            std::vector<GroupedLaunch> launches;
            u16* x = make_weights(batch, columns, 7, 4);
            u16* y;
            CUDA(cudaMalloc(&y, u64(places) * rows * 2));
            double used = 0;
            for (u32 s = 0; s < sets; s++) {
                std::vector<std::vector<u32>> of(128);
                for (u32 b = 0; b < batch; b++)
                    for (u32 k = 0; k < 8; k++)
                        of[((s * 8 + k) * 5 + b * 13 + (b * b * 7 + s) % 11 * 16) % 128].push_back(
                            b);
                std::vector<u32> offsets = {0}, index;
                for (auto& rows_of : of) {
                    index.insert(index.end(), rows_of.begin(), rows_of.end());
                    offsets.push_back(u32(index.size()));
                    used += !rows_of.empty();
                }
                launches.push_back({x,
                                    columns,
                                    upload(index),
                                    upload(offsets),
                                    all.matrices,
                                    y,
                                    rows,
                                    c.status,
                                    batch,
                                    columns,
                                    rows,
                                    places,
                                    128,
                                    {}});
            }
            std::vector<Contender> one = {
                {"grouped", 0,
                 [&](int k) { launch_grouped(launches[k % sets], sm_count(), c.stream); }}};
            measure(c, one, sets, rounds);
            const double s = median_of(one[0].seconds), bytes = used / sets * rows * columns * 1.5;
            printf(
                "grouped 128 experts of %ux%u, batch %2u: %.1f experts used, %.2f us, %.0f GB/s, "
                "BF16 bytes %.1f MB\n",
                rows, columns, batch, used / sets, s * 1e6, bytes / s / 1e9,
                used / sets * rows * columns * 2e-6);
        }
        all.free();
    }
    u16* w = make_weights(128256, 4096, 31, 0);
    Fast f = pack(w, 128256, 4096);
    u16* out;
    CUDA(cudaMalloc(&out, 64 * 4096 * 2));
    for (u32 count : {1u, 16u, 64u}) {
        std::vector<u32*> indices;
        for (u32 s = 0; s < 16; s++) {
            std::vector<u32> of;
            for (u32 i = 0; i < count; i++) of.push_back((s * 7919 + i * 104729) % 128256);
            indices.push_back(upload(of));
        }
        std::vector<Contender> one = {
            {"gather", 0, [&](int k) {
                 launch_gather(gather_of(f, indices[k % 16], count, 0, out, 4096, c.status),
                               c.stream);
             }}};
        measure(c, one, 16, rounds);
        printf("gather %u rows of 128256x4096: %.2f us\n", count, median_of(one[0].seconds) * 1e6);
    }
    std::vector<Contender> one = {
        {"count", 0, [&](int) {
             PackTask task = {};
             task.weights = w, task.pitch = 4096, task.rows = 128256, task.columns = 4096,
             task.heads = f.heads, task.data = f.data, task.entries = f.entries,
             task.capacity = f.count;
             task.total = c.counters + 60000;
             CUDA(cudaMemsetAsync(task.total, 0, 4, c.stream));
             void* arguments[] = {&task};
             const u32 blocks = u32((f.tiles + PACK_WARPS - 1) / PACK_WARPS);
             CUDA(cudaLaunchKernel(kernel_of("df11_linear_count", (const void*)df11_linear_count),
                                   blocks, PACK_WARPS * LANES, arguments, PACK_SHARED_BYTES,
                                   c.stream));
             CUDA(cudaLaunchKernel(kernel_of("df11_linear_scan", (const void*)df11_linear_scan), 1,
                                   1024, arguments, 0, c.stream));
             CUDA(cudaLaunchKernel(kernel_of("df11_linear_pack", (const void*)df11_linear_pack),
                                   blocks, PACK_WARPS * LANES, arguments, 0, c.stream));
         }}};
    measure(c, one, 1, 5);
    CUDA(cudaMemset(c.counters, 0, 4 << 16));
    printf("transcoding 128256x4096 from BF16: %.1f us, %.0f GB/s of BF16\n",
           median_of(one[0].seconds) * 1e6, 128256 * 4096 * 2.0 / median_of(one[0].seconds) / 1e9);
    CUDA(cudaFree(w));
    CUDA(cudaFree(out));
    f.free();
}

static int bench(Context& c, int rounds, bool with_variants, bool wide_only) {
    const u32 shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {25600, 5120}};
    const std::vector<u32> batches =
        wide_only       ? std::vector<u32>{17, 24, 32, 48, 64, 96, 128, 192, 256}
        : with_variants ? std::vector<u32>{1, 8, 16}
                        : std::vector<u32>{1, 2, 4, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 256};
    struct Row {
        u32 x_rows;
        std::string name;
        double sum_cublas, sum_ours;
    };
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
        u16* x = make_weights(LARGE_ROWS, columns, 9, 4);
        u16* y;
        CUDA(cudaMalloc(&y, u64(LARGE_ROWS) * rows * 2));
        for (u32 x_rows : batches) {
            std::vector<Contender> all;
            Lt lt(c.lt, c.room, rows, x_rows, columns, columns);
            for (int i = 0; i < lt.count; i++)
                all.push_back({"cublasLt " + std::to_string(i), n * 2.0,
                               [&, i](int k) { lt.run(i, ws[k], x, y, c.stream); }});
            const int peers = int(all.size());
            auto add = [&](const Variant& v) {
                all.push_back({v.name, double(f.bytes()), [&, v](int k) {
                                   LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
                                   add_matrix(l, fs[k], y, rows, nullptr);
                                   launch_fast(v, l, c.stream);
                               }});
            };
            auto add_wide = [&](const char* name, bool begins_early) {
                all.push_back({name, double(f.bytes()), [&, begins_early](int k) {
                                   LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
                                   add_matrix(l, fs[k], y, rows, nullptr);
                                   launch_wide(l, begins_early, c.stream);
                               }});
            };
            if (x_rows > LINEAR_ROWS && ring) continue;
            if (x_rows > MOST_BY_SHARED) {
                add_wide(("df11_linear_fast_" + std::to_string(wide_class(x_rows))).c_str(), true);
                add_wide("the same, launched plainly", false);
            } else {
                add(standard(x_rows));
            }
            if (early && !ring && x_rows <= MOST_BY_SHARED) {
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
                printf(
                    "%5ux%-5u x %2u %-28s %7.2f us %5.0f GB/s; cuBLASLt %7.2f us %5.0f GB/s; ratio "
                    "%.3f\n",
                    rows, columns, x_rows, all[i].name.c_str(), s * 1e6, all[i].bytes / s / 1e9,
                    best * 1e6, n * 2 / best / 1e9, best / s);
                if (&shape == &shapes[4]) continue;
                auto row = std::find_if(sums.begin(), sums.end(), [&](auto& r) {
                    return r.x_rows == x_rows && r.name == all[i].name;
                });
                if (row == sums.end())
                    sums.push_back({x_rows, all[i].name, best, s});
                else
                    row->sum_cublas += best, row->sum_ours += s;
            }
        }
        for (auto p : ws) CUDA(cudaFree(p));
        for (auto& one : fs) one.free();
        CUDA(cudaFree(x));
        CUDA(cudaFree(y));
    }
    if (!wide_only) bench_others(c, rounds);
    printf("== sums of four\n");
    for (auto& r : sums)
        printf("x %2u %-28s %.3f (%.1f / %.1f us)\n", r.x_rows, r.name.c_str(),
               r.sum_cublas / r.sum_ours, r.sum_cublas * 1e6, r.sum_ours * 1e6);
    return 0;
}

static int one(Context& c, u32 rows, u32 columns, u32 x_rows) {
    const Fast f = pack(make_weights(rows, columns, 3, 0), rows, columns);
    u16 *x = make_weights(x_rows, columns, 9, 4), *y;
    CUDA(cudaMalloc(&y, u64(x_rows) * rows * 2));
    LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
    add_matrix(l, f, y, rows, nullptr);
    for (int i = 0; i < 3; i++) launch_product(l, early, c.stream);
    CUDA(cudaStreamSynchronize(c.stream));
    return 0;
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
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
        const bool wide_only = forced && !strcmp(forced, "wide");
        if (wide_only) forced = nullptr;
        int bad = check(c, wide_only);
        early = false;
        return bad | check(c, wide_only);
    }
    if (mode == "stored") {
        const std::string of = argc > 2 ? argv[2] : "";
        if (const char* bits = getenv("CODE_BITS")) code_limit = atoi(bits);
        if (const char* bits = getenv("ESCAPE_COST")) escape_cost = atof(bits);
        if (const char* tables = getenv("TABLES")) most_tables = atoi(tables);
        if (of == "profile") return profile_stored(c, atoi(argv[3]));
        if (of == "check") {
            const bool good = check_stored(c);
            early = false;
            return !(check_stored(c) && good);
        }
        if (of == "hostile")
            return hostile_stored(c, atoi(argv[3]), strtoull(argv[4], nullptr, 10));
        if (of == "bench") return bench_stored(c, atoi(argv[3]), Spaces::NONE);
        if (of == "spaced")
            return bench_stored(c, atoi(argv[3]), argc > 4 ? Spaces::EARLY : Spaces::PLAIN);
        if (of == "sums") return sums_stored(c, atoi(argv[3]));
        if (of == "several") return several_stored(c, atoi(argv[3]));
    }
    if (mode == "ways") return ways(c, atoi(argv[2]), early);
    if (mode == "one") return one(c, atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
    if (mode == "hostile") return hostile(c, atoi(argv[2]), strtoull(argv[3], nullptr, 10));
    if (mode == "sums") return sums(c, atoi(argv[2]), argc > 3 ? atoi(argv[3]) : 0, early);
    if (mode == "bench" || mode == "variants" || mode == "wide")
        return bench(c, atoi(argv[2]), mode == "variants", mode == "wide");
    if (mode == "crossover")
        return crossover(c, atoi(argv[2]), ring ? LINEAR_ROWS : LARGE_ROWS * LARGE_BANDS,
                         std::vector<const char*>(argv + 3, argv + argc), early);
    fprintf(stderr, "see the head of linear_bench.cu\n");
    return 2;
}
