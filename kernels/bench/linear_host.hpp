// Host side of linear_bench.cu: the fast layout, launches of all kernels, references. Included
// after the kernels and tiles.hpp. src/gpu/linear plans launches: examples/linear_plan.rs.
#pragma once
#include <cublasLt.h>
#include <cudaTypedefs.h>

static const size_t LT_ROOM = 64 << 20;
// Whether the kernels are those of the PTX; whether launches begin early.
static bool ring = false, early = true;
// Strips per block for 17 or more rows of x, and splits of the columns (0: the fastest); for 129
// or more, rows of x per band and strips per group (0: the fastest); blocks per launch by tiles up
// to 16 rows of x (0: one per multiprocessor); whether slots hold fewer bytes than tiles have.
static u32 forced_strips = 0, forced_splits = 0, forced_rows = 0, forced_group = 0,
           forced_blocks = 0;
static bool small_stages = false;

// --- the planner

struct BandProduct {
    u32 rows[LINEAR_MATRICES], splits[LINEAR_MATRICES], matrices, columns, x_rows, processors;
};
struct BandPlan {
    u8 splits[LINEAR_MATRICES];
    u64 n, band_rows, blocks, cluster, strips, share_stages, time;  // n: most rows of x per band
};
struct ItemsPlan {
    u32 whole_strips, slices, items, partials;
};
struct TileProduct {
    u32 x_rows, columns, staged, room;
};
struct TileWork {
    u32 items, matrices;
};
struct TilePlan {
    u32 is_tile_2, warps, tables, sets, shared, slot_bytes;
};
struct Tile64Plan {
    u32 stages, shared;
};
extern "C" {
BandPlan df11_plan_bands(BandProduct);
ItemsPlan df11_plan_items(u32 rows, u32 columns);
TilePlan df11_plan_tile(linear::Constants::TileDemand, linear::Constants::Tile2, TileWork,
                        TileProduct);
Tile64Plan df11_plan_tile_64(linear::Constants::Tile64Demand, TileProduct);
}
// Constants of the kernels that are launched.
static linear::Constants& constants() {
    static linear::Constants* all = nullptr;
    if (!all) {
        void* from;
        size_t bytes = sizeof *all;
        if (library)
            CUDA(cudaLibraryGetGlobal(&from, &bytes, library, "df11_linear_constants"));
        else
            CUDA(cudaGetSymbolAddress(&from, df11_linear_constants));
        if (bytes != sizeof *all) printf("kernels with other constants\n"), exit(3);
        all = new linear::Constants;
        CUDA(cudaMemcpy(all, from, bytes, cudaMemcpyDeviceToHost));
    }
    return *all;
}

// Matrices and their products, without how blocks share them.
using Product = LinearLaunch<ProductMatrix>;

struct Context {
    static constexpr u64 COUNTERS = 1 << 16;
    cublasLtHandle_t lt;
    void* room = allocate<u8>(LT_ROOM);
    cudaStream_t stream;
    u32 *counters = allocate_filled<u32>(COUNTERS, 0), *status = allocate_filled<u32>(1, 0);
    float* partials = allocate_filled<float>(32 << 20, 0xFF);
    Context() {
        cublasLtCreate(&lt);
        CUDA(cudaStreamCreate(&stream));
    }
    void wait() const { CUDA(cudaStreamSynchronize(stream)); }
    u32 take_status() const {
        const u32 s = from_device(status, 1)[0];
        CUDA(cudaMemset(status, 0, 4));
        return s;
    }
    // Whether kernels have left the counters as they were.
    bool has_clear_counters() const {
        const std::vector<u32> all = from_device(counters, COUNTERS);
        return std::all_of(all.begin(), all.end(), [](u32 n) { return n == 0; });
    }
    Product product(const u16* x, u64 pitch, u32 x_rows, u32 columns) const {
        Product p = {};
        p.x = x, p.x_pitch = pitch, p.x_rows = x_rows, p.columns = columns, p.status = status;
        return p;
    }
};

// --- the fast layout

struct Fast {
    u32 rows = 0, columns = 0, count = 0;
    u64 tiles = 0, data_bytes = 0;
    u8* data = nullptr;
    FastHead* heads = nullptr;
    u8* patches = nullptr;
    u32* entries = nullptr;
    u64 patches_bytes() const { return u64(strips_of(rows)) * patch_bytes(columns); }
    u64 bytes() const {
        return data_bytes + tiles * sizeof(FastHead) + patches_bytes() + u64(count) * 4;
    }
    Fast copy() const {
        Fast f = *this;
        f.data = copy_of(data, data_bytes), f.heads = copy_of(heads, tiles);
        f.patches = copy_of(patches, patches_bytes());
        f.entries = copy_of(entries, count);
        return f;
    }
};
// Runs in order: count and scan find how many entries there are, pack writes them.
static void launch_packing(const void* kernel, u32 shared, const PackTask& task,
                           cudaStream_t stream) {
    const u64 tiles = u64(strips_of(task.rows)) * tiles_across(task.columns);
    launch_kernel(kernel, u32((tiles + PACK_WARPS - 1) / PACK_WARPS), PACK_WARPS * LANES, shared,
                  task, stream);
}
static void launch_count(const PackTask& task, cudaStream_t stream) {
    launch_packing(KERNEL(df11_linear_count), PACK_SHARED_BYTES, task, stream);
    launch_kernel(KERNEL(df11_linear_scan), 1, 1024, 0, task, stream);
}
static void launch_pack(const PackTask& task, cudaStream_t stream) {
    launch_packing(KERNEL(df11_linear_pack), 0, task, stream);
    const u32 blocks = (strips_of(task.rows) + PACK_WARPS - 1) / PACK_WARPS;
    launch_kernel(KERNEL(df11_linear_patch), blocks, PACK_WARPS * LANES, 0, task, stream);
}
static Fast pack(const u16* weights, u32 rows, u32 columns) {
    Fast f;
    f.rows = rows, f.columns = columns, f.tiles = u64(strips_of(rows)) * tiles_across(columns);
    f.data_bytes = u64(strips_of(rows)) * steps_of(columns) * STEP_BYTES;
    f.data = allocate<u8>(f.data_bytes), f.heads = allocate<FastHead>(f.tiles);
    PackTask task = {};
    task.weights = weights, task.pitch = columns, task.rows = rows, task.columns = columns;
    task.heads = f.heads, task.data = f.data, task.total = allocate_filled<u32>(1, 0);
    task.patches = f.patches = allocate<u8>(f.patches_bytes());
    launch_count(task, nullptr);
    f.count = from_device(task.total, 1)[0];
    task.entries = f.entries = allocate<u32>(f.count), task.capacity = f.count;
    launch_pack(task, nullptr);
    CUDA(cudaDeviceSynchronize());
    return f;
}
static void unpack(const Fast& f, u16* to, u64 pitch, u32* status, cudaStream_t stream) {
    const UnpackTask task = {f.data,
                             f.heads,
                             f.entries,
                             f.count,
                             to,
                             pitch,
                             0,
                             u64(f.rows) * f.columns,
                             f.rows,
                             f.columns,
                             0,
                             f.columns,
                             0,
                             0,
                             tiles_across(f.columns),
                             u32(f.tiles),
                             status};
    launch_kernel(KERNEL(df11_linear_unpack), u32((f.tiles + UNPACK_WARPS - 1) / UNPACK_WARPS),
                  UNPACK_WARPS * LANES, 0, task, stream);
}
static bool right_weights(const Context& c, const Fast& f, const u16* w) {
    const Scope scope;
    const u64 n = u64(f.rows) * f.columns;
    u16* const back = allocate_filled<u16>(n + 1, 0xA5);
    unpack(f, back, f.columns, c.status, c.stream);
    c.wait();
    return same_bits(w, back, n) && from_device(back + n, 1)[0] == Output::POISON;
}
static bool right_weights(const Context&, const Tiles&, const u16*) { return true; }
template <class Form>
static Form form_of(const u16* w, u32 rows, u32 columns) {
    if constexpr (std::is_same_v<Form, Fast>)
        return pack(w, rows, columns);
    else
        return store_tiles(w, rows, columns);
}

// A part of a matrix, with its rows and columns.
struct Part {
    u32 first_row, rows, first_column, columns;
};
static LinearMatrix part_of(const Fast& f, Part p) {
    LinearMatrix m = {};
    const u64 strip = p.first_row / 32;
    m.data = f.data + (strip * steps_of(f.columns) + p.first_column / STEP_COLUMNS) * STEP_BYTES,
    m.index = f.heads + strip * tiles_across(f.columns) + p.first_column / 256, m.rest = f.entries,
    m.patches = f.patches + strip * patch_bytes(f.columns), m.rest_count = f.count,
    m.whole_columns = f.columns, m.first_column = p.first_column;
    return m;
}
static LinearMatrix part_of(const Tiles& t, Part p) {
    LinearMatrix m = {};
    m.data = t.plane + u64(p.first_row) * t.columns,
    m.index = t.records + u64(p.first_row / 32) * tiles_across(t.columns), m.rest = t.bits,
    m.rest_count = t.bits_bytes, m.table = t.table, m.whole_columns = t.columns,
    m.first_column = p.first_column;
    return m;
}
template <class Form>
static Part all_of(const Form& f) {
    return {0, f.rows, 0, f.columns};
}
template <class Form>
static void add_matrix(Product& p, const Form& form, u16* y, u64 y_pitch, const u16* bias, Part f) {
    ProductMatrix& m = p.matrices[p.matrix_count++];
    static_cast<LinearMatrix&>(m) = part_of(form, f);
    m.y = y, m.y_pitch = y_pitch, m.bias = bias, m.rows = f.rows;
}
template <class Form>
static void add_matrix(Product& p, const Form& form, u16* y, u64 y_pitch,
                       const u16* bias = nullptr) {
    add_matrix(p, form, y, y_pitch, bias, all_of(form));
}
// A kernel's argument, without what its family alone reads.
template <class Launch>
static Launch argument_of(const Product& p) {
    Launch l = {};
    l.x = p.x, l.x_pitch = p.x_pitch, l.x_rows = p.x_rows, l.columns = p.columns;
    l.matrix_count = p.matrix_count, l.status = p.status;
    for (u32 i = 0; i < p.matrix_count; i++)
        static_cast<ProductMatrix&>(l.matrices[i]) = p.matrices[i];
    return l;
}
// The same with items, for up to 16 rows of x.
template <class Launch>
static Launch items_of(const Context& c, const Product& p) {
    Launch l = argument_of<Launch>(p);
    l.counters = c.counters, l.partials = c.partials;
    u32 strips = 0, partials = 0;
    for (u32 i = 0; i < p.matrix_count; i++) {
        ItemMatrix& m = l.matrices[i];
        const ItemsPlan plan = df11_plan_items(m.rows, p.columns);
        m.whole_strips = plan.whole_strips, m.slices = plan.slices;
        m.first_item = l.items, m.first_strip = strips, m.first_partial = partials;
        l.items += plan.items, strips += strips_of(m.rows), partials += plan.partials;
    }
    return l;
}

// --- launches by the fast layout

struct Variant {
    std::string name;
    const void* kernel;
    u32 eights, shared;
    bool early;  // begins while the previous launch ends
};
static Variant standard(u32 x_rows) {
    const bool few = x_rows <= 8;
    return {few ? "df11_linear_fast_8" : "df11_linear_fast_16",
            few ? KERNEL(df11_linear_fast_8) : KERNEL(df11_linear_fast_16), (x_rows + 7) / 8,
            constants().fast_bytes[!few], !ring && early};
}
static void launch_fast(const Context& c, const Variant& v, const Product& p) {
    const Fast16Launch l = items_of<Fast16Launch>(c, p);
    const u32 threads = constants().threads;
    CUDA(
        cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(v.shared)));
    int blocks = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, v.kernel, threads, v.shared));
    if (!blocks) printf("%s does not fit\n", v.name.c_str()), exit(1);
    const u32 good = std::min<u32>(l.items, blocks * sm_count()) / LINEAR_GROUP * LINEAR_GROUP;
    launch_kernel(v.kernel, std::max(good, LINEAR_GROUP), threads, v.shared, l, c.stream, v.early);
}

// Makes the map of x, if there can be one.
template <class Launch>
static void map_x(Launch& l, u32 box_rows) {
    l.x_mapped = (reinterpret_cast<u64>(l.x) | l.x_pitch * 2) % 16 == 0;
    if (!l.x_mapped) return;
    static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled",
                                              reinterpret_cast<void**>(&encode), 12000,
                                              cudaEnableDefault, &found));
    }
    const cuuint64_t sizes[] = {l.columns, l.x_rows}, pitch = l.x_pitch * 2;
    const cuuint32_t box[] = {FAST128_COLUMNS, box_rows}, every[] = {1, 1};
    const auto done =
        encode(reinterpret_cast<CUtensorMap*>(&l.x_map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
               const_cast<u16*>(l.x), sizes, &pitch, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (done != CUDA_SUCCESS) printf("cuTensorMapEncodeTiled: %d\n", int(done)), exit(3);
}

// The plan for 17 or more rows of x.
static BandPlan band_plan_of(const Product& p) {
    BandProduct product = {{}, {}, p.matrix_count, p.columns, p.x_rows, sm_count()};
    for (u32 i = 0; i < p.matrix_count; i++)
        product.rows[i] = p.matrices[i].rows, product.splits[i] = forced_splits;
    BandPlan plan = df11_plan_bands(product);
    // The same splits with other blocks.
    if (forced_rows && p.x_rows > FAST128_ROWS && !forced_strips) {
        const u32 bands = fast128_bands(p.x_rows, forced_rows),
                  group = fast128_stage_count(p.columns);
        u32 groups = 0;
        for (u32 i = 0; i < p.matrix_count; i++)
            groups += fast256_groups(p.matrices[i].rows, forced_group);
        const u32 teams = std::max(sm_count() / bands, 1u), each = (groups + teams - 1) / teams;
        plan.n = forced_rows, plan.strips = forced_group, plan.cluster = 1;
        plan.share_stages = each * group, plan.blocks = (groups + each - 1) / each * bands;
    }
    if (!forced_strips) return plan;
    plan.n = p.x_rows <= 32 ? 32 : p.x_rows <= 64 ? 64 : 128;
    plan.strips = forced_strips, plan.share_stages = 0, plan.blocks = 0;
    plan.cluster = *std::max_element(plan.splits, plan.splits + p.matrix_count);
    for (u32 i = 0; i < p.matrix_count; i++)
        plan.blocks += fast128_items(strips_of(p.matrices[i].rows), plan.splits[i], forced_strips,
                                     u32(plan.cluster));
    plan.blocks *= plan.cluster * fast128_bands(p.x_rows, u32(plan.n));
    return plan;
}
template <class Launch>
static Launch band_argument(const Product& p, const BandPlan& plan, u32 box_rows) {
    Launch l = argument_of<Launch>(p);
    for (u32 i = 0; i < p.matrix_count; i++) l.matrices[i].splits = plan.splits[i];
    map_x(l, box_rows);
    return l;
}
static void launch_bands(const Context& c, const Product& p, bool begins_early) {
    const BandPlan plan = band_plan_of(p);
    const u32 n = u32(plan.n), band = fast128_band_rows(p.x_rows, n);
    auto launch = [&](const void* kernel, u32 threads, const auto& l) {
        launch_kernel(kernel, u32(plan.blocks), threads, FAST128_SHARED_BYTES, l, c.stream,
                      begins_early, u32(plan.cluster));
    };
    if (!plan.share_stages) {
        auto l = band_argument<Fast128Launch>(p, plan, band);
        l.strips = u32(plan.strips);
        return launch(n == 32   ? KERNEL(df11_linear_fast_32)
                      : n == 64 ? KERNEL(df11_linear_fast_64)
                                : KERNEL(df11_linear_fast_128),
                      FAST128_THREADS, l);
    }
    auto l = band_argument<Fast256Launch>(p, plan, band / u32(plan.cluster));
    l.counters = c.counters, l.partials = c.partials, l.share_stages = u32(plan.share_stages);
    const bool half = plan.strips == HALF_STRIPS;
    launch(n == 192 ? half ? KERNEL(df11_linear_half_192) : KERNEL(df11_linear_fast_192)
           : half   ? KERNEL(df11_linear_half_256)
                    : KERNEL(df11_linear_fast_256),
           threads_of_fast256(u32(plan.strips)), l);
}
static void launch_product(const Context& c, const Product& p, bool begins_early) {
    if (p.x_rows > LINEAR_ROWS) return launch_bands(c, p, begins_early);
    Variant v = standard(p.x_rows);
    v.early &= begins_early;
    launch_fast(c, v, p);
}

// --- launches by tiles as stored, the largest of which has `staged` bytes

// For 17 to 64 rows of x.
static void launch_tile_64(const Context& c, const Product& p, u32 staged, bool begins_early) {
    const void* kernel = p.x_rows <= 32 ? KERNEL(df11_linear_tile_32) : KERNEL(df11_linear_tile_64);
    const Tile64Plan plan =
        df11_plan_tile_64(constants().tile_64, {p.x_rows, p.columns, staged, max_shared(kernel)});
    Tile64Launch l = argument_of<Tile64Launch>(p);
    l.counters = c.counters, l.partials = c.partials, l.stages = plan.stages;
    u32 items = 0;
    for (u32 i = 0; i < l.matrix_count; i++)
        items += RoundSplit(l.matrices[i].rows, l.columns).items;
    launch_kernel(kernel, std::min(items, sm_count()), TILE64_THREADS, plan.shared, l, c.stream,
                  begins_early);
}
// For up to 16.
static void launch_tile_16(const Context& c, const Product& p, u32 staged, bool begins_early) {
    const void* const most = KERNEL(df11_linear_tile_16);
    const void* const few = p.x_rows <= 8 ? KERNEL(df11_linear_tile_8) : most;
    const void* const fewest = ring ? few : KERNEL(df11_linear_tile_2);
    Tile16Launch l = items_of<Tile16Launch>(c, p);
    const u32 blocks = forced_blocks ? forced_blocks : sm_count();
    const TilePlan plan = df11_plan_tile(
        constants().tile, constants().tile_2, {(l.items + blocks - 1) / blocks, l.matrix_count},
        {p.x_rows, p.columns, staged,
         std::min({max_shared(most), max_shared(few), max_shared(fewest)})});
    if (!plan.warps) printf("tiles do not fit\n"), exit(1);
    l.sets = plan.sets, l.tables = plan.tables, l.slot_bytes = plan.slot_bytes;
    launch_kernel(plan.is_tile_2 ? fewest : few, std::min(l.items, blocks),
                  (plan.warps + TILE_HELPERS) * LANES, plan.shared, l, c.stream,
                  !ring && begins_early);
}
static const char* stored_name(u32 x_rows) {
    return x_rows > 32   ? "df11_linear_tile_64"
           : x_rows > 16 ? "df11_linear_tile_32"
           : x_rows > 8  ? "df11_linear_tile_16"
                         : "df11_linear_tile_8";
}
static void launch_stored(const Context& c, const Product& p, u32 staged, bool begins_early) {
    (p.x_rows > LINEAR_ROWS ? launch_tile_64 : launch_tile_16)(c, p, staged, begins_early);
}

// The same functions for either form: bytes of the largest tile, and a launch.
static u32 staged_of(const Fast&) { return 0; }
static u32 staged_of(const Tiles& t) { return t.staged; }
template <class Form>
static void launch_form(const Context& c, const Product& p, u32 staged, bool begins_early) {
    if constexpr (std::is_same_v<Form, Fast>)
        launch_product(c, p, begins_early);
    else
        launch_stored(c, p, small_stages ? staged / 32 * 16 : staged, begins_early);
}

// --- experts, and rows by index

// Matrices of experts, each in the fast layout.
struct Experts {
    std::vector<u16*> weights;
    LinearMatrix* matrices;
    Experts(u32 count, u32 rows, u32 columns) {
        std::vector<LinearMatrix> all;
        for (u32 e = 0; e < count; e++) {
            weights.push_back(make_weights(rows, columns, 1000 + e, 0));
            const Fast f = pack(weights[e], rows, columns);
            all.push_back(part_of(f, all_of(f)));
        }
        matrices = upload(all);
    }
};
// `matrices`: those of the experts, on the device.
static GroupedLaunch grouped_of(const Context& c, const u16* x, u64 pitch, u32 x_rows,
                                const u32* index, const u32* offsets, u32 experts, u32 places,
                                const LinearMatrix* matrices, u32 rows, u32 columns, u16* y) {
    GroupedLaunch l = {};
    l.x = x, l.x_pitch = pitch, l.x_index = index, l.offsets = offsets, l.matrices = matrices;
    l.y = y, l.y_pitch = rows, l.status = c.status, l.share = 1;
    l.x_rows = x_rows, l.columns = columns, l.rows = rows, l.places = places, l.experts = experts;
    return l;
}
// `block`: the most places of an expert that a block multiplies at once; 8 with the PTX.
static void launch_grouped(const GroupedLaunch& l, cudaStream_t stream, u32 block = 16) {
    const void* kernel = ring          ? kernel_of("df11_linear_grouped_8", nullptr)
                         : block == 16 ? KERNEL(df11_linear_grouped_16)
                         : block == 64 ? KERNEL(df11_linear_grouped_64)
                                       : KERNEL(df11_linear_grouped_128);
    launch_kernel(kernel, sm_count(), constants().grouped_threads, constants().grouped_bytes, l,
                  stream);
}
template <class Form>
static void gather(const Context& c, const Form& f, const void* indices, u32 count, u32 wide,
                   u16* output, u64 pitch) {
    GatherTask task = {};
    static_cast<LinearMatrix&>(task) = part_of(f, all_of(f));
    task.indices = indices, task.output = output, task.pitch = pitch, task.status = c.status;
    task.rows = f.rows, task.columns = f.columns, task.count = count, task.wide = wide;
    const u64 warps = u64(count) * tiles_across(f.columns);
    launch_kernel(
        std::is_same_v<Form, Tiles> ? KERNEL(df11_linear_tile_gather) : KERNEL(df11_linear_gather),
        u32((warps + UNPACK_WARPS - 1) / UNPACK_WARPS), UNPACK_WARPS * LANES, 0, task, c.stream);
}

// --- references

inline float from_bf16(u16 v) {
    u32 word = u32(v) << 16;
    float f;
    memcpy(&f, &word, 4);
    return f;
}
// Multiplies in f64; also returns, for each output, the root of the sum of squares of its products.
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
struct Exact {
    std::vector<double> y, scale;
    Exact(const u16* w, u32 rows, u32 columns, const u16* x, u64 pitch, u32 x_rows) {
        const Scope scope;
        const u64 n = u64(rows) * x_rows;
        double *products = allocate<double>(n), *scales = allocate<double>(n);
        multiply_exactly<<<u32(n), 32>>>(w, rows, columns, x, pitch, x_rows, products, scales);
        y = from_device(products, n), scale = from_device(scales, n);
    }
};

// The algorithms of cuBLASLt's heuristics for y = x W^T.
struct Lt {
    static constexpr int WANTED = 24;
    cublasLtHandle_t handle;
    void* room;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[WANTED];
    int count = 0;
    Lt(const Context& c, u32 rows, u32 x_rows, u32 columns, u64 x_pitch)
        : handle(c.lt), room(c.room) {
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
