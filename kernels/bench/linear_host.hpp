// Host side of linear_bench.cu: the fast layout, launches of all kernels, references. Included
// after the kernels and tiles.hpp.
#pragma once
#include <cublasLt.h>
#include <cudaTypedefs.h>

static const size_t LT_ROOM = 64 << 20;
// Whether the kernels are those of the PTX; whether launches begin early.
static bool ring = false, early = true;
// For checks. Strips per block for 17 or more rows of x, and splits of the columns (0: the
// fastest); blocks per launch by tiles up to 16 rows of x (0: one per multiprocessor); whether
// slots hold fewer bytes than tiles have.
static u32 forced_strips = 0, forced_splits = 0, few_blocks = 0;
static bool small_stages = false;
// Most tables of a launch of several matrices.
static u32 most_tables = MOST_TABLES;

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
    LinearLaunch launch(const u16* x, u64 pitch, u32 x_rows, u32 columns) const {
        LinearLaunch l = {};
        l.x = x, l.x_pitch = pitch, l.x_rows = x_rows, l.columns = columns, l.counters = counters;
        l.partials = partials, l.status = status;
        return l;
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
    m.patches = f.patches + strip * patch_bytes(f.columns),
    m.rest_count = f.count, m.whole_columns = f.columns, m.first_column = p.first_column;
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
static void add_matrix(LinearLaunch& l, const Form& form, u16* y, u64 y_pitch, const u16* bias,
                       Part f) {
    LinearMatrix& m = l.matrices[l.matrix_count];
    m = part_of(form, f);
    m.bias = bias, m.y = y, m.y_pitch = y_pitch;
    const LinearSplit split = linear_split(f.rows, f.columns);
    m.rows = f.rows, m.whole_strips = split.whole_strips, m.slices = split.slices,
    m.first_item = l.items;
    if (l.matrix_count) {
        const LinearMatrix& last = l.matrices[l.matrix_count - 1];
        m.first_strip = last.first_strip + (last.rows + 31) / 32;
        m.first_partial = last.first_partial + linear_split(last.rows, f.columns).partials();
    }
    l.items += split.items(), l.matrix_count++;
}
template <class Form>
static void add_matrix(LinearLaunch& l, const Form& form, u16* y, u64 y_pitch,
                       const u16* bias = nullptr) {
    add_matrix(l, form, y, y_pitch, bias, all_of(form));
}

// --- launches by the fast layout

struct Variant {
    std::string name;
    const void* kernel;
    u32 eights, depth;
    bool bulk, early;  // early: begins while the previous launch ends
};
static Variant standard(u32 x_rows) {
    const bool few = x_rows <= 8;
    return {few ? "df11_linear_fast_8" : "df11_linear_fast_16",
            few ? KERNEL(df11_linear_fast_8) : KERNEL(df11_linear_fast_16),
            (x_rows + 7) / 8,
            ring ? LINEAR_DEPTH : LINEAR_STAGES,
            !ring,
            !ring && early};
}
static void launch_fast(const Variant& v, const LinearLaunch& l, cudaStream_t stream) {
    const u32 shared =
        v.bulk ? BULK_FIRST_BYTES + v.depth * stage_bytes(v.eights) : linear_shared_bytes(v.eights);
    const u32 threads = (LINEAR_WARPS + 2 * v.bulk) * LANES;
    CUDA(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    int blocks = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, v.kernel, threads, shared));
    if (!blocks) printf("%s does not fit\n", v.name.c_str()), exit(1);
    const u32 good = std::min<u32>(l.items, blocks * sm_count()) / LINEAR_GROUP * LINEAR_GROUP;
    launch_kernel(v.kernel, std::max(good, LINEAR_GROUP), threads, shared, l, stream, v.early);
}

// Makes the map of x, if there can be one.
static void map_x(LinearLaunch& l, u32 band_rows) {
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
    const cuuint32_t box[] = {WIDE_COLUMNS, band_rows}, every[] = {1, 1};
    const auto done =
        encode(reinterpret_cast<CUtensorMap*>(&l.x_map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
               const_cast<u16*>(l.x), sizes, &pitch, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (done != CUDA_SUCCESS) printf("cuTensorMapEncodeTiled: %d\n", int(done)), exit(3);
}

// For 17 or more rows of x: how blocks share strips and columns, as src/gpu/linear/many.rs decides.
struct Many {
    u32 n, strips, cluster, share_stages;  // n: most rows of x per band; strips: per block or group
    u64 blocks, time;                      // nanoseconds
};
static Many many_of(const LinearLaunch& l, u32 processors) {
    static const u32 AT_ONCE[] = {132, 66, 39, 30, 22, 17, 15, 15};
    static const u32 CLASSES[] = {32, 64, 128}, LEAST[] = {110, 110, 120}, EACH[] = {53, 64, 84};
    const u32 group = wide_stage_count(l.columns);
    u32 most = 1;
    for (u32 i = 0; i < l.matrix_count; i++) most = std::max<u32>(most, l.splits[i]);
    Many best = {0, 0, 0, 0, 0, ~0ull};
    auto take = [&](Many m) {
        if (m.time < best.time) best = m;
    };
    for (u32 c = 0; c < 3; c++)
        for (u32 cluster = most; cluster <= WIDE_SPLITS; cluster++)
            for (u32 strips = 2; strips <= WIDE_STRIPS; strips += 2) {
                if (forced_strips && strips != 2) continue;
                const u32 own = forced_strips ? forced_strips : strips;
                u64 clusters = 0, block = 0;
                for (u32 i = 0; i < l.matrix_count; i++) {
                    const u32 splits = l.splits[i];
                    clusters += wide_items(strips_of(l.matrices[i].rows), splits, own, cluster);
                    block = std::max<u64>(block, u64(split_stages(l.columns, splits)) *
                                                         (LEAST[c] + EACH[c] * own) +
                                                     (splits > 1 ? 5500 : 4000));
                }
                clusters *= wide_bands(l.x_rows, CLASSES[c]);
                const u64 once = std::max(AT_ONCE[cluster - 1] * processors / 132, 1u);
                take({CLASSES[c], own, cluster, 0, clusters * cluster,
                      (clusters + once - 1) / once * block});
            }
    static const char* const way = getenv("WAY");  // "256x2": only this one
    for (u32 strips : {HALF_STRIPS, LARGE_STRIPS})
        for (u32 n : {192u, 256u}) {
            if (l.x_rows <= WIDE_ROWS || forced_strips) break;
            u32 groups = 0;
            for (u32 i = 0; i < l.matrix_count; i++)
                groups += large_groups(l.matrices[i].rows, strips);
            const u32 bands = wide_bands(l.x_rows, n), all = groups * group,
                      teams = std::max(processors / bands, 1u),
                      stage = strips == HALF_STRIPS ? (n == 192 ? 340 : 440) : n == 192 ? 600 : 720,
                      even = std::max((all + teams - 1) / teams, group),
                      whole = (even + group - 1) / group * group;
            const bool cuts = u64(even) * stage + 15000 < u64(whole) * stage;
            const u32 share = cuts ? even : whole;
            const bool paired = !cuts && all % (2 * share) == 0 &&
                                wide_band_rows(l.x_rows, n) % 16 == 0;
            Many m = {n, strips, paired ? 2u : 1u, share, u64(all + share - 1) / share * bands,
                      u64(share) * stage + 4000 + (cuts ? 15000 : 0)};
            if (way && std::to_string(n) + "x" + std::to_string(strips) == way) m.time = 0;
            if (!way || !m.time) take(m);
        }
    return best;
}
static void launch_wide(LinearLaunch l, bool begins_early, cudaStream_t stream) {
    // Forced strips change the time of a launch, and no splits.
    const u32 strips = std::exchange(forced_strips, 0);
    for (u32 i = 0; i < l.matrix_count; i++) {
        LinearLaunch one = l;
        one.matrix_count = 1, one.matrices[0] = l.matrices[i];
        u64 least = ~0ull;
        for (u32 splits = 1; splits <= 4; splits++) {
            one.splits[0] = u8(splits);
            const u32 stages = split_stages(l.columns, splits);
            if ((splits - 1) * stages >= wide_stage_count(l.columns)) continue;
            const u64 time = many_of(one, 132).time;
            if (time < least) least = time, l.splits[i] = u8(splits);
        }
        if (forced_splits) l.splits[i] = u8(forced_splits);
    }
    forced_strips = strips;
    const Many many = many_of(l, sm_count());
    map_x(l, wide_band_rows(l.x_rows, many.n) / (many.share_stages ? many.cluster : 1));
    l.wide_strips = many.strips, l.share_stages = many.share_stages;
    const void* kernel = many.n == 32    ? KERNEL(df11_linear_fast_32)
                         : many.n == 64  ? KERNEL(df11_linear_fast_64)
                         : many.n == 128 ? KERNEL(df11_linear_fast_128)
                         : many.strips == HALF_STRIPS
                             ? many.n == 192 ? KERNEL(df11_linear_half_192)
                                             : KERNEL(df11_linear_half_256)
                         : many.n == 192 ? KERNEL(df11_linear_fast_192)
                                         : KERNEL(df11_linear_fast_256);
    launch_kernel(kernel, u32(many.blocks),
                  many.n > 128 ? threads_of_large(many.strips) : WIDE_THREADS,
                  WIDE_SHARED_BYTES, l, stream, begins_early, many.cluster);
}
static void launch_product(const LinearLaunch& l, bool begins_early, cudaStream_t stream) {
    if (l.x_rows > LINEAR_ROWS) return launch_wide(l, begins_early, stream);
    Variant v = standard(l.x_rows);
    v.early &= begins_early;
    launch_fast(v, l, stream);
}

// --- launches by tiles as stored, the largest of which has `staged` bytes

// For 17 to 64 rows of x.
static void launch_decoded(LinearLaunch l, u32 staged, bool begins_early, cudaStream_t stream) {
    const u32 n = decoded_class(l.x_rows);
    const void* kernel = n == 32 ? KERNEL(df11_linear_tile_32) : KERNEL(df11_linear_tile_64);
    const u32 room = most_shared(kernel) / 16 * 16;
    // As many stages as fit beside the largest tile.
    l.tile_sets = MOST_DECODED;
    while (l.tile_sets > 2 && decoded_shared_bytes(n, l.tile_sets, staged) > room) l.tile_sets--;
    u32 items = 0;
    for (u32 i = 0; i < l.matrix_count; i++)
        items += RoundSplit(l.matrices[i].rows, l.columns).items;
    launch_kernel(kernel, std::min(items, sm_count()), DECODED_THREADS,
                  std::min(decoded_shared_bytes(n, l.tile_sets, staged), room), l, stream,
                  begins_early);
}
// Launches with `warps` decoding warps, if there is room; `xs`: bytes of x that they share.
static bool launch_tile(const void* kernel, u32 warps, u32 xs, LinearLaunch l, u32 staged,
                        bool begins_early, cudaStream_t stream) {
    const u32 room = most_shared(kernel) / 16 * 16;
    auto bytes = [&](u32 tables, u32 sets) {
        return tile_shared_bytes(warps, l.x_rows, staged, tables, sets) + xs;
    };
    if (xs && bytes(1, 1) > room) return false;
    // Sums of two items if a block has as many, and tables of its matrices, if there is room for
    // the largest tile: sums first, unless each item has another matrix (src/gpu/linear).
    const u32 blocks = few_blocks ? few_blocks : sm_count(), each = (l.items + blocks - 1) / blocks,
              wanted = std::min({l.matrix_count, ring ? 1 : most_tables, each});
    l.tile_tables = l.tile_sets = 1;
    auto more_sets = [&] {
        if (each > 1 && bytes(l.tile_tables, 2) <= room) l.tile_sets = 2;
    };
    if (each > l.matrix_count) more_sets();
    while (l.tile_tables < wanted && bytes(l.tile_tables * 2, l.tile_sets) <= room)
        l.tile_tables *= 2;
    more_sets();
    const u32 shared = std::min(bytes(l.tile_tables, l.tile_sets), room);
    l.tile_slot_bytes = tile_slot_bytes(shared, warps, l.x_rows, l.tile_tables, l.tile_sets, xs);
    launch_kernel(kernel, std::min(l.items, blocks), (warps + TILE_HELPERS) * LANES, shared, l,
                  stream, !ring && begins_early);
    return true;
}
static const char* stored_name(u32 x_rows) {
    return x_rows > 32   ? "df11_linear_tile_64"
           : x_rows > 16 ? "df11_linear_tile_32"
           : x_rows > 8  ? "df11_linear_tile_16"
                         : "df11_linear_tile_8";
}
static void launch_stored(const LinearLaunch& l, u32 staged, bool begins_early,
                          cudaStream_t stream) {
    if (l.x_rows > LINEAR_ROWS) return launch_decoded(l, staged, begins_early, stream);
    if (l.x_rows <= FEWEST_ROWS && !ring &&
        launch_tile(KERNEL(df11_linear_tile_2), MOST_TILE_WARPS,
                    l.x_rows * shared_x_pitch(l.columns), l, staged, begins_early, stream))
        return;
    // The PTX's kernels have 12 warps.
    launch_tile(l.x_rows <= 8 ? KERNEL(df11_linear_tile_8) : KERNEL(df11_linear_tile_16),
                ring ? 12 : tile_warps(LINEAR_ROWS), 0, l, staged, begins_early, stream);
}

// The same functions for either form: bytes of the largest tile, and a launch.
static u32 staged_of(const Fast&) { return 0; }
static u32 staged_of(const Tiles& t) { return t.staged; }
template <class Form>
static void launch_form(const LinearLaunch& l, u32 staged, bool begins_early, cudaStream_t stream) {
    if constexpr (std::is_same_v<Form, Fast>)
        launch_product(l, begins_early, stream);
    else
        launch_stored(l, small_stages ? staged / 32 * 16 : staged, begins_early, stream);
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
    const void* kernel = ring           ? kernel_of("df11_linear_grouped_8", nullptr)
                         : block == 16  ? KERNEL(df11_linear_grouped_16)
                         : block == 64  ? KERNEL(df11_linear_grouped_64)
                                        : KERNEL(df11_linear_grouped_128);
    const u32 shared = ring ? linear_shared_bytes(1) : FEW_GROUPED_BYTES;
    const u32 threads = ring ? LINEAR_WARPS * LANES : FEW_THREADS;
    launch_kernel(kernel, sm_count(), threads, shared, l, stream);
}
template <class Form>
static void gather(const Context& c, const Form& f, const void* indices, u32 count, u32 wide,
                   u16* output, u64 pitch) {
    const LinearMatrix m = part_of(f, all_of(f));
    const GatherTask task = {m.data,  m.index, m.rest,          m.table,        m.rest_count,
                             indices, output,  pitch,           f.rows,         f.columns,
                             count,   wide,    m.whole_columns, m.first_column, c.status};
    const u64 warps = u64(count) * tiles_across(f.columns);
    launch_kernel(m.table ? KERNEL(df11_linear_tile_gather) : KERNEL(df11_linear_gather),
                  u32((warps + UNPACK_WARPS - 1) / UNPACK_WARPS), UNPACK_WARPS * LANES, 0, task,
                  c.stream);
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
