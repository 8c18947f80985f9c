// Bench and check of the kernels that multiply by compressed matrices: see README.md.
//   linear_bench check                 odd shapes, every pattern, errors beside cuBLAS's, equal
//                                      bits in every run; `check bands`: only 17 or more rows of x
//   linear_bench hostile COUNT SEED    changed data, heads and entries, for compute-sanitizer
//   linear_bench bench ROUNDS          Llama 3.1 8B's matrices and 25600 x 5120 beside cuBLASLt's
//                                      best; `bands`: only 17 to 256 rows of x
//   linear_bench ways ROUNDS           32, 64 and 128 rows of x with all ways for blocks to share
//                                      strips and columns
//   linear_bench sums ROUNDS [X_ROWS ...]    16 to 1024 rows of x, or X_ROWS, without cuBLASLt:
//                                      each matrix, and the sum of the first four
//   linear_bench one ROWS COLUMNS X_ROWS    three launches, for a profiler
//   linear_bench variants ROUNDS       other depths and clusters
//   linear_bench stored MODE ...       tiles as stored. MODE: check, hostile COUNT SEED, bench
//                                      ROUNDS, sums ROUNDS (1 to 64 rows of x), as above; spaced
//                                      ROUNDS: like bench, each product after a small kernel;
//                                      spaced ROUNDS early: that kernel lets the product begin
//                                      before it ends; several ROUNDS: several matrices in one
//                                      launch; profile X_ROWS: some launches. Environment:
//                                      CODE_BITS=N limits the code lengths; ESCAPE_COST=N is what
//                                      an escape counts in addition to its bits; TABLES=1 gives a
//                                      launch one table at once
//   linear_bench crossover ROUNDS [X_ROWS ...]    from how many rows of x on decoding first is
//                                                 faster
// Environment, for the fast layout and 17 or more rows of x: SPLITS=N splits all columns in N; for
// 129 or more, WAY=192x2 takes bands of 192 rows and whole groups of two strips (192x4, 256x2 and
// 256x4 too). ZEROS=N: one weight of N is zero, and an exception; there are others.
#include <cmath>

#include "../linear.cu"
#include "../tile.cu"
using namespace df11;
using namespace linear;
#include "bench.hpp"
#include "tiles.hpp"
#include "linear_host.hpp"
#include "linear_times.hpp"

// Rows of x that a launch multiplies at most (src/gpu/linear/bands.rs).
static constexpr u32 LAUNCH_ROWS = 12 * FAST256_ROWS;

// --- other depths and clusters

// Eights, stages, blocks per cluster.
#define BULK(EIGHTS, STAGES, CLUSTER)                                                       \
    __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(LINEAR_THREADS, 1)    \
        bulk_##EIGHTS##_##STAGES##_##CLUSTER(const __grid_constant__ Fast16Launch launch) { \
        linear_bulk<EIGHTS, CLUSTER>(Shared{launch});                                       \
    }
#define BULKS(X) X(1, 4, 1) X(1, 3, 2) X(1, 6, 2) X(2, 4, 1)
BULKS(BULK)

static std::vector<Variant> variants() {
#define BULK_ROW(EIGHTS, STAGES, CLUSTER)                       \
    {#EIGHTS " eights, " #STAGES " stages, 16 x 1 " #CLUSTER,   \
     (const void*)bulk_##EIGHTS##_##STAGES##_##CLUSTER, EIGHTS, \
     BULK_FIRST_BYTES + STAGES * stage_bytes(EIGHTS), false},
    std::vector<Variant> all;
    const std::vector<Variant> bulks = {BULKS(BULK_ROW)};
    for (bool begins_early : {false, true})
        for (Variant v : bulks) {
            v.name = (begins_early ? "early " : "bulk ") + v.name, v.early = begins_early;
            all.push_back(v);
        }
    return all;
}

// --- check

// Largest number of rows of x with the same splits of the fast layout, for more than LINEAR_ROWS.
static u32 class_of(u32 x_rows) {
    for (u32 rows : {LINEAR_ROWS, 32u, 64u, 128u, 192u})
        if (x_rows <= rows) return rows;
    return (x_rows + 255) / 256 * 256;
}

struct Errors {
    double rms = 0, worst = 0;
    u64 classes = 0;  // one is finite and the other is not, or the infinities or NaN differ
};
// Compares with the reference; scale: the root of the sum of squares of products.
static Errors errors_of(const std::vector<u16>& y, const std::vector<double>& reference,
                        const std::vector<double>& scale) {
    Errors e;
    double sum = 0;
    u64 n = 0;
    for (size_t i = 0; i < y.size(); i++) {
        const double v = from_bf16(y[i]), r = reference[i];
        // A sum that can overflow f32 in one order and not in another is an error of neither.
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
static bool check_one(const Context& c, u32 rows, u32 columns, int mode, u32 x_rows, u32 seed) {
    const Scope scope;
    const u64 n = u64(rows) * columns, outputs = u64(x_rows) * rows;
    u16* w = make_weights(rows, columns, seed, mode);
    const Form f = form_of<Form>(w, rows, columns);
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
    u16 *y = allocate<u16>(x_rows * y_pitch), *y2 = allocate<u16>(x_rows * y_pitch),
        *yb = allocate<u16>(outputs), *bias = make_weights(1, rows, seed + 99, 0);
    auto run = [&](u16* to, const u16* from, u64 pitch, u32 count, const u16* b) {
        CUDA(cudaMemset(to, 0xA5, x_rows * y_pitch * 2));
        Product l = c.product(from, pitch, count, columns);
        add_matrix(l, f, to, y_pitch, b);
        launch_form<Form>(c, l, staged_of(f), early);
        c.wait();
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
    // An x that is not aligned: the same numbers one element later.
    u16* shifted = allocate<u16>(x_rows * (x_pitch + 1) + 1);
    CUDA(cudaMemcpy2D(shifted + 1, (x_pitch + 1) * 2, x, x_pitch * 2, columns * 2, x_rows,
                      cudaMemcpyDeviceToDevice));
    run(y2, shifted + 1, x_pitch + 1, x_rows, nullptr);
    expect(same_bits(y, y2, x_rows * y_pitch), "an unaligned x has other bits");
    // Bias.
    run(y2, x, x_pitch, x_rows, bias);
    std::vector<u16> biased = from_device(y2, x_rows * y_pitch), hb = from_device(bias, rows);
    const auto [reference, scale] = Exact(w, rows, columns, x, x_pitch, x_rows);
    std::vector<double> with_bias = reference;
    std::vector<u16> mine_biased(outputs);
    for (u64 i = 0; i < outputs; i++)
        with_bias[i] += from_bf16(hb[i % rows]),
            mine_biased[i] = biased[i / rows * y_pitch + i % rows];
    const Lt lt(c, rows, x_rows, columns, x_pitch);
    Errors cublas;
    if (lt.count) {
        lt.run(0, w, x, yb, c.stream);
        c.wait();
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
        rows, columns, mode, x_rows, f.bytes() * 8.0 / n, ours.rms, cublas.rms, lt.count,
        ours.worst, cublas.worst, (unsigned long long)ours.classes,
        (unsigned long long)cublas.classes, good ? "" : "  WRONG");
    return good;
}
// Checks each shape with each number of rows of x.
template <class Form>
static bool check_each(const Context& c, const std::vector<Shape>& shapes,
                       const std::vector<u32>& x_rows, const std::vector<int>& modes, u32& seed) {
    bool good = true;
    for (auto& s : shapes)
        for (u32 count : x_rows)
            good &= check_one<Form>(c, s.rows, s.columns, modes[seed % modes.size()], count, seed),
                seed++;
    return good;
}
// Checks each mode in turn.
template <class Form>
static bool check_modes(const Context& c, Shape shape, const std::vector<u32>& x_rows,
                        const std::vector<int>& modes, u32& seed) {
    bool good = true;
    for (int mode : modes) good &= check_each<Form>(c, {shape}, x_rows, {mode}, seed);
    return good;
}

// Compares slices of rows and columns, and several matrices in one launch, bit by bit with the same
// matrices made of their own weights, alone, because sums are split alike. In the fast layout, for
// more than 16 rows of x, with any number of strips per block.
template <class Form>
static bool check_parts(const Context& c, const std::vector<u32>& rows, u32 whole_columns,
                        u32 first_column, u32 columns, u32 x_rows) {
    const Scope scope;
    const u32 first_row = 64, all_rows = std::accumulate(rows.begin(), rows.end(), 0u),
              y_pitch = all_rows + 8;
    std::vector<u16*> weights, biases;
    u16 *x = make_weights(x_rows, columns, 12, 4), *y = allocate<u16>(u64(x_rows) * y_pitch);
    Product l = c.product(x, columns, x_rows, columns);
    u32 staged = 0, row = 0;
    for (size_t i = 0; i < rows.size(); row += rows[i++]) {
        weights.push_back(make_weights(rows[i] + first_row, whole_columns, 400 + i, i % 3 * i % 4));
        biases.push_back(i ? nullptr : make_weights(1, rows[i], 6, 0));
        const Form form = form_of<Form>(weights[i], rows[i] + first_row, whole_columns);
        add_matrix(l, form, y + row, y_pitch, biases[i],
                   {first_row, rows[i], first_column, columns});
        staged = std::max(staged, staged_of(form));
    }
    const bool by_strips = std::is_same_v<Form, Fast> && x_rows > LINEAR_ROWS;
    bool good = true;
    for (u32 strips : by_strips ? std::vector<u32>{0, 1, 3, 8, 0} : std::vector<u32>{0}) {
        const Scope round;
        CUDA(cudaMemset(y, 0xA5, u64(x_rows) * y_pitch * 2));
        forced_strips = strips;
        launch_form<Form>(c, l, staged, early);
        c.wait();
        forced_strips = row = 0;
        for (size_t i = 0; i < rows.size(); row += rows[i++]) {
            u16 *own = allocate<u16>(u64(rows[i]) * columns),
                *alone = allocate<u16>(u64(rows[i]) * x_rows);
            CUDA(cudaMemcpy2D(own, columns * 2,
                              weights[i] + u64(first_row) * whole_columns + first_column,
                              whole_columns * 2, columns * 2, rows[i], cudaMemcpyDeviceToDevice));
            const Form form = form_of<Form>(own, rows[i], columns);
            Product one = c.product(x, columns, x_rows, columns);
            add_matrix(one, form, alone, rows[i], biases[i]);
            launch_form<Form>(c, one, staged_of(form), early);
            c.wait();
            bool same = true;
            for (u64 k = 0; k < x_rows; k++)
                same &= same_bits(y + k * y_pitch + row, alone + k * rows[i], rows[i]);
            if (!same) printf("WRONG part %zu of %u rows\n", i, rows[i]);
            good &= same;
        }
        for (u64 k = 0; k < x_rows; k++)
            good &= from_device(y + k * y_pitch + all_rows, 1)[0] == Output::POISON;
    }
    good &= c.take_status() == 0 && c.has_clear_counters();
    printf("%zu matrices, columns %u to %u of %u, x %u%s\n", rows.size(), first_column,
           first_column + columns, whole_columns, x_rows, good ? "" : "  WRONG");
    return good;
}
static bool check_parts_of_tiles(const Context& c) {
    bool good = true;
    for (u32 x_rows : {1u, 8u, 13u, 17u, 60u}) {
        if (ring && x_rows > LINEAR_ROWS) break;
        good &= check_parts<Tiles>(c, {4096, 1024, 1000}, 4096, 0, 4096, x_rows);
        good &= check_parts<Tiles>(c, {4096}, 4096, 1024, 2048, x_rows);
        good &= check_parts<Tiles>(c, {100, 5, 32, 77, 640, 9, 33, 2000}, 1000, 256, 744, x_rows);
        good &= check_parts<Tiles>(c, {8200, 32, 4300, 6000}, 776, 256, 256, x_rows);
    }
    return good;
}

static bool check_grouped(const Context& c, u32 experts, u32 rows, u32 columns,
                          std::vector<u32> counts, bool indexed, bool shifted, u32 block) {
    const Scope scope;
    const Experts all(experts, rows, columns);
    std::vector<u32> offsets(experts + 1), index;
    for (u32 e = 0; e < experts; e++) offsets[e + 1] = offsets[e] + counts[e % counts.size()];
    const u32 places = offsets[experts], x_rows = indexed ? 7 : std::max(places, 1u);
    for (u32 i = 0; i < places; i++) index.push_back(indexed ? (i * 5 + 3) % x_rows : i);
    const u64 pitch = columns + 8 + shifted;
    const u16* x = make_weights(x_rows + 1, u32(pitch), 5, 4) + shifted;
    u16* y = allocate_filled<u16>((places + 1) * u64(rows), 0xA5);
    launch_grouped(grouped_of(c, x, pitch, x_rows, indexed ? upload(index) : nullptr,
                              upload(offsets), experts, places, all.matrices, rows, columns, y),
                   c.stream, block);
    c.wait();
    bool good = c.take_status() == 0 && from_device(y + places * u64(rows), 1)[0] == Output::POISON;
    double worst = 0;
    for (u32 e = 0; e < experts; e++)
        for (u32 i = offsets[e]; i < offsets[e + 1]; i++) {
            const Exact exact(all.weights[e], rows, columns, x + index[i] * pitch, pitch, 1);
            const Errors error =
                errors_of(from_device(y + i * u64(rows), rows), exact.y, exact.scale);
            worst = std::max(worst, error.rms);
            good &= error.rms < 0.01 && error.classes == 0;
        }
    printf("grouped %u experts of %ux%u, %u places, indexed %d, shifted %d, blocks of %u: ",
           experts, rows, columns, places, indexed, shifted, block);
    printf("worst rms %.2e%s\n", worst, good ? "" : "  WRONG");
    return good;
}

template <class Form>
static bool check_gather(const Context& c, u32 rows, u32 columns, int mode) {
    const Scope scope;
    const u16* w = make_weights(rows, columns, 31, mode);
    const Form f = form_of<Form>(w, rows, columns);
    bool good = true;
    for (u32 wide : {0u, 1u}) {
        const u32 count = 67;
        std::vector<u64> indices(count);
        for (u32 i = 0; i < count; i++) indices[i] = (i * 7919ull + i * i) % rows;
        std::vector<u32> narrow(indices.begin(), indices.end());
        void* on_device = wide ? (void*)upload(indices) : (void*)upload(narrow);
        const u64 pitch = columns + 3 + wide * 5;
        u16* out = allocate_filled<u16>(count * pitch, 0xA5);
        gather(c, f, on_device, count, wide, out, pitch);
        c.wait();
        for (u32 i = 0; i < count; i++) {
            good &= same_bits(out + i * pitch, w + indices[i] * columns, columns);
            good &= from_device(out + i * pitch + columns, 1)[0] == Output::POISON;
        }
        good &= c.take_status() == 0;
    }
    u16* out = allocate_filled<u16>(2 * columns, 0xA5);
    gather(c, f, upload(std::vector<u64>{rows, ~0ull}), 2, 1, out, columns);
    c.wait();
    for (u16 v : from_device(out, 2 * columns)) good &= v == 0;
    good &= c.take_status() == STATUS_INDEX;
    printf("gather of %ux%u mode %d%s\n", rows, columns, mode, good ? "" : "  WRONG");
    return good;
}

// Checks 17 or more rows of x with the fast layout.
static bool check_bands(const Context& c) {
    bool good = true;
    u32 seed = 500;
    const std::vector<Shape> shapes = {
        {32, 256}, {1, 8},       {5, 7},     {33, 264},   {100, 1000}, {257, 384},  {1024, 4096},
        {31, 33},  {1000, 5120}, {2048, 96}, {512, 2048}, {768, 2080}, {300, 4096}, {20000, 256}};
    good &= check_each<Fast>(c, shapes,
                             {17, 24, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 200, 255, 256},
                             {1, 0}, seed);
    good &= check_modes<Fast>(c, {500, 2056}, {32, 64, 128, 256}, {1, 2, 3, 5, 7}, seed);
    good &= check_each<Fast>(c, {{4096, 14336}, {6144, 4096}}, {32, 64, 128, 256}, {0, 1}, seed);
    good &= check_each<Fast>(c, {{28672, 4096}}, {48, 256}, {0}, seed);
    good &= check_each<Fast>(c, {{100, 65536}}, {256}, {0}, seed);
    good &= check_each<Fast>(c, {{512, 2048}, {300, 4096}, {33, 264}}, {257, 300, 384, 512, 700},
                             {1, 0}, seed);
    good &= check_each<Fast>(c, {{4096, 4096}}, {384}, {0}, seed);
    good &= check_each<Fast>(c, {{1024, 4096}}, {LAUNCH_ROWS}, {0}, seed);
    for (u32 x_rows : {17u, 64u, 128u, 192u, 500u})
        good &= check_parts<Fast>(c, {1000, 992, 520}, 2100, 512, 1588, x_rows),
            good &= check_parts<Fast>(c, {320, 64, 160}, 4096, 256, 1024, x_rows);
    return good;
}
static const std::vector<u32> UP_TO_16 = {1, 3, 8, 9, 16};
static bool check_fast(const Context& c) {
    bool good = true;
    const std::vector<Shape> shapes = {{4096, 4096}, {32, 256},   {1, 8},     {5, 7},
                                       {33, 264},    {100, 1000}, {257, 384}, {1024, 4096},
                                       {768, 2048},  {64, 14336}, {31, 33},   {1000, 5120}};
    u32 seed = 1;
    good &= check_each<Fast>(c, shapes, UP_TO_16, {1, 0}, seed);
    good &= check_modes<Fast>(c, {512, 2048}, {1, 16}, {1, 3, 5, 7}, seed);
    good &= check_each<Fast>(c, {{4096, 14336}}, {4}, {0}, seed);
    good &= check_each<Fast>(c, {{6144, 4096}}, {16}, {0}, seed);
    if (!ring) good &= check_bands(c);
    for (u32 block : {16, 64, 128}) {
        good &= check_grouped(c, 8, 1536, 2048, {1, 0, 3, 16, 0, 17, 2, 33}, false, false, block);
        good &= check_grouped(c, 2, 320, 768, {150, 60}, true, false, block);
        good &= check_grouped(c, 40, 100, 264, {1, 0, 0, 9}, true, false, block);
        good &= check_grouped(c, 5, 64, 768, {0}, false, false, block);
        good &= check_grouped(c, 3, 96, 768, {2, 70}, true, true, block);
    }
    good &= check_gather<Fast>(c, 1000, 4096, 0);
    good &= check_gather<Fast>(c, 77, 1000, 3);
    good &= check_gather<Fast>(c, 77, 250, 5);
    // Every pattern: packed and unpacked.
    for (u32 rows : {256u, 37u}) {
        const Scope scope;
        const u16* w = make_weights(rows, 512, 5, 2);
        const Fast f = pack(w, rows, 512);
        const bool same = right_weights(c, f, w);
        printf("all patterns, %u rows: %.2f bits%s\n", rows, f.bytes() * 8.0 / (rows * 512),
               same ? "" : "  WRONG");
        good &= same;
    }
    return good;
}
static bool check_stored(const Context& c) {
    bool good = true;
    const std::vector<Shape> shapes = {{4096, 4096}, {32, 256},   {1, 8},     {5, 16},
                                       {33, 264},    {100, 1000}, {257, 384}, {1024, 4096},
                                       {768, 2048},  {64, 14336}, {31, 40},   {1000, 5120}};
    u32 seed = 1;
    good &= check_each<Tiles>(c, shapes, UP_TO_16, {0, 1, 3}, seed);
    good &= check_modes<Tiles>(c, {512, 2048}, {1, 16}, {1, 3, 5, 7}, seed);
    good &= check_each<Tiles>(c, {{4096, 14336}}, {4}, {0}, seed);
    good &= check_each<Tiles>(c, {{6144, 4096}}, {16}, {0}, seed);
    if (!ring) {
        good &= check_each<Tiles>(c, shapes, {17, 32, 50, 64}, {0, 1, 3}, seed);
        good &= check_modes<Tiles>(c, {512, 2048}, {32, 64}, {1, 3, 5, 7}, seed);
        good &= check_each<Tiles>(c, {{28672, 4096}}, {64}, {0}, seed);
    }
    // Slots that no tile fits.
    small_stages = true;
    good &= check_each<Tiles>(c, {{256, 2048}}, {1, 9, ring ? 8u : 40u}, {0}, seed);
    small_stages = false;
    // Many items and matrices per block.
    for (u32 blocks : {0u, 1u, 5u}) forced_blocks = blocks, good &= check_parts_of_tiles(c);
    forced_blocks = 0;
    good &= check_gather<Tiles>(c, 1000, 4096, 0);
    good &= check_gather<Tiles>(c, 77, 1000, 3);
    good &= check_gather<Tiles>(c, 77, 248, 2);
    return good;
}
// Checks with launches that begin early, and without.
static int check(const Context& c, bool (*checks)(const Context&)) {
    bool good = true;
    for (bool begin : {true, false}) early = begin, good &= checks(c);
    printf("check: %s\n", good ? "all right" : "WRONG");
    return !good;
}

// --- hostile

static void flip_arrays(Fast& f, std::mt19937_64& random) {
    if (random() % 2) flip_on_device(f.data, f.data_bytes, random);
    if (random() % 2) flip_on_device(f.heads, f.tiles, random);
    if (random() % 2) flip_on_device(f.entries, f.count, random);
}
static void flip_arrays(Tiles& t, std::mt19937_64& random) {
    if (random() % 2) flip_on_device(t.bits, t.bits_bytes, random);
    if (random() % 2) flip_on_device(t.records, t.tiles() + 1, random);
    if (random() % 2) flip_on_device(t.plane, t.elements(), random);
    if (random() % 2) flip_on_device(t.codebook, t.codebook_bytes, random);
    t.make_table();
}
// Runs the other kernels that read the fast layout.
static void read_otherwise(const Context& c, const Fast& f, const u16* x, u32 x_rows,
                           std::mt19937_64& random) {
    unpack(f, allocate<u16>(u64(f.rows) * f.columns), f.columns, c.status, c.stream);
    const LinearMatrix m = part_of(f, all_of(f));
    const u32* offsets =
        upload(std::vector<u32>{0, u32(random() % 9), u32(random() % 40), u32(random())});
    const u32* index = upload(std::vector<u32>{0, 1, 2, u32(random()), 0, 1, 2, 0});
    for (u32 block : {16, 64, 128})
        launch_grouped(grouped_of(c, x, f.columns, x_rows, index, offsets, 3, 8,
                                  upload(std::vector<LinearMatrix>{m, m, m}), f.rows, f.columns,
                                  allocate<u16>(8 * u64(f.rows))),
                       c.stream, block);
}
static void read_otherwise(const Context&, const Tiles&, const u16*, u32, std::mt19937_64&) {}

// Runs with arrays and indices that hold anything, under compute-sanitizer.
template <class Form>
static int hostile(const Context& c, int count, u64 seed) {
    const Shape shapes[] = {{100, 520}, {33, 264}, {64, 1000}, {5, 40}};
    const bool fast = std::is_same_v<Form, Fast>;
    std::mt19937_64 random(seed);
    u64 refused = 0;
    for (int i = 0; i < count; i++) {
        const Scope scope;
        const auto [rows, columns] = shapes[i % 4];
        const u32 most = ring    ? LINEAR_ROWS
                         : !fast ? TILE64_ROWS
                                 : FAST256_ROWS * (i % 8 ? 1 : 3),
                  x_rows = 1 + random() % most, matrices = 1 + random() % 6;
        Form f =
            form_of<Form>(make_weights(rows, columns, random(), i % (fast ? 3 : 2)), rows, columns);
        flip_arrays(f, random);
        const u16* x = make_weights(x_rows, columns, 3, 4);
        u16 *y = allocate<u16>(u64(x_rows) * rows * matrices), *out = allocate<u16>(8 * columns);
        Product l = c.product(x, columns, x_rows, columns);
        for (u32 k = 0; k < matrices; k++) add_matrix(l, f, y + u64(k) * x_rows * rows, rows);
        forced_blocks = random() % 2 ? 1 + random() % 3 : 0, small_stages = random() % 2;
        launch_form<Form>(c, l, staged_of(f), early);
        read_otherwise(c, f, x, x_rows, random);
        const u32* index = upload(std::vector<u32>{0, 1, 2, u32(random()), 0, rows - 1, 2, 4});
        gather(c, f, index, 8, 0, out, columns);
        c.wait();
        refused += c.take_status() != 0;
    }
    printf("hostile: %d streams, %llu with a status\n", count, refused);
    return 0;
}

// --- bench

static void bench_fast(const Context& c, int rounds, const std::vector<u32>& batches,
                       bool with_variants) {
    bench<Fast>(c, rounds, batches, [&](u32 x_rows) {
        std::vector<Way<Fast>> ways;
        auto add = [&](const Variant& v) {
            ways.push_back({v.name, [=](const Copies<Fast>& m, int k) {
                                launch_fast(m.c, v, m.product(k, x_rows));
                            }});
        };
        if (x_rows > LINEAR_ROWS) {
            if (ring) return ways;
            const std::string name = "up to " + std::to_string(class_of(x_rows)) + " rows";
            for (bool begins_early : {true, false})
                ways.push_back(
                    {begins_early ? name : "the same, launched plainly",
                     [=](const Copies<Fast>& m, int k) { m.run(k, x_rows, begins_early); }});
            return ways;
        }
        Variant v = standard(x_rows);
        add(v);
        v.name = "the same, launched plainly", v.early = false;
        if (!ring) add(v);
        if (with_variants)
            for (auto& other : variants())
                if (x_rows <= other.eights * 8 && (x_rows > other.eights * 4 || other.eights == 1))
                    add(other);
        return ways;
    });
}
static void bench_stored(const Context& c, int rounds, Spaces spaces) {
    auto ways_of = [](u32 x_rows) {
        std::vector<Way<Tiles>> ways;
        if (ring && x_rows > LINEAR_ROWS) return ways;
        for (bool begins_early : {true, false})
            ways.push_back(
                {std::string(stored_name(x_rows)) + (begins_early ? "" : ", plain"),
                 [=](const Copies<Tiles>& m, int k) { m.run(k, x_rows, begins_early); }});
        return ways;
    };
    bench<Tiles>(c, rounds, {1, 8, 16, 32, 64}, ways_of, spaces);
}

// Runs a few launches of one kernel, for a profiler.
template <class Form>
static int profile(const Context& c, Shape shape, u32 x_rows, bool begins_early) {
    const Form f =
        form_of<Form>(make_weights(shape.rows, shape.columns, 3, 0), shape.rows, shape.columns);
    const u16* x = make_weights(x_rows, shape.columns, 9, 4);
    Product l = c.product(x, shape.columns, x_rows, shape.columns);
    add_matrix(l, f, allocate<u16>(u64(x_rows) * shape.rows), shape.rows);
    for (int i = 0; i < 3; i++) {
        launch_form<Form>(c, l, staged_of(f), begins_early);
        c.wait();
    }
    return 0;
}

// Runs a mode for tiles as stored; returns 2 if none has this name.
static int stored(const Context& c, const std::string& mode, int number, int argc, char** argv) {
    if (const char* bits = getenv("CODE_BITS")) code_limit = atoi(bits);
    if (const char* bits = getenv("ESCAPE_COST")) escape_cost = atof(bits);
    if (const char* tables = getenv("TABLES")) constants().tile.max_tables = atoi(tables);
    if (mode == "profile") return profile<Tiles>(c, {28672, 4096}, number, false);
    if (mode == "check") return check(c, check_stored);
    if (mode == "hostile") return hostile<Tiles>(c, number, strtoull(argv[3], nullptr, 10));
    if (mode == "bench") {
        bench_stored(c, number, Spaces::NONE), bench_gather<Tiles>(c, number);
        return 0;
    }
    if (mode == "spaced")
        return bench_stored(c, number, argc > 3 ? Spaces::EARLY : Spaces::PLAIN), 0;
    if (mode == "sums") return sums<Tiles>(c, number, {1, 8, 16, 32, 64}), 0;
    if (mode == "several") return several(c, number), 0;
    return 2;
}
// Runs a mode for the fast layout.
static int fast(const Context& c, const std::string& mode, int number, int argc, char** argv) {
    std::vector<u32> rows = numbers_after(3, argc, argv);  // of x
    if (mode == "check")
        return check(c, argc > 2 && !strcmp(argv[2], "bands") ? check_bands : check_fast);
    if (mode == "hostile") return hostile<Fast>(c, number, strtoull(argv[3], nullptr, 10));
    if (mode == "bench") {
        bench_fast(c, number, {1, 2, 4, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 256}, false);
        bench_grouped(c, number), bench_gather<Fast>(c, number), bench_transcoding(c);
        return 0;
    }
    if (mode == "variants") return bench_fast(c, number, {1, 8, 16}, true), 0;
    if (mode == "bands")
        return bench_fast(c, number, {17, 24, 32, 48, 64, 96, 128, 192, 256}, false), 0;
    if (mode == "ways") return ways(c, number), 0;
    if (mode == "one") return profile<Fast>(c, {u32(number), rows[0]}, rows[1], early);
    if (rows.empty() && mode == "sums") rows = {16, 32, 64, 128, 192, 256, 384, 512, 1024};
    if (mode == "sums") return sums<Fast>(c, number, rows), 0;
    if (mode == "crossover") return crossover(c, number, ring ? LINEAR_ROWS : LAUNCH_ROWS, rows), 0;
    return 2;
}
int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
    load_kernels(argc, argv, "df11_linear_fast_8");
    ring = !constants().early;
    tables_of_file = false;
    if (const char* splits = getenv("SPLITS")) forced_splits = atoi(splits);
    if (const char* count = getenv("ZEROS")) zeros = atoi(count);
    if (const char* way = getenv("WAY"))
        if (sscanf(way, "%ux%u", &forced_rows, &forced_group) != 2) return 2;
    auto modes = fast;
    if (argc > 1 && !strcmp(argv[1], "stored")) argc--, argv++, modes = stored;
    const int answer =
        modes(Context(), argc > 1 ? argv[1] : "", argc > 2 ? atoi(argv[2]) : 0, argc, argv);
    if (answer == 2) fprintf(stderr, "see the head of linear_bench.cu\n");
    return answer;
}
