// Times of linear_bench.cu. Included after linear_host.hpp.
#pragma once

// Measures in interleaved rounds, each of all copies in a graph; seconds per launch.
static void measure(const Context& c, std::vector<Contender>& all, int copies, int rounds) {
    std::vector<cudaGraphExec_t> graphs(all.size());
    for (size_t i = 0; i < all.size(); i++) {
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeGlobal));
        for (int k = 0; k < copies; k++) all[i].launch(k);
        CUDA(cudaStreamEndCapture(c.stream, &graph));
        CUDA(cudaGraphInstantiate(&graphs[i], graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    measure_rounds(all, rounds, 1, [&](size_t i) {
        auto launch = [&] { CUDA(cudaGraphLaunch(graphs[i], c.stream)); };
        return timer().seconds(c.stream, launch) / copies;
    });
    for (auto graph : graphs) CUDA(cudaGraphExecDestroy(graph));
}
static double seconds_of(const Context& c, int copies, int rounds,
                         const std::function<void(int)>& launch) {
    std::vector<Contender> one = {{"", 0, launch}};
    measure(c, one, copies, rounds);
    return one[0].median();
}

struct Shape {
    u32 rows, columns;
};
// Llama 3.1 8B's, whose sums are reported, and one more.
static const std::vector<Shape> SHAPES = {
    {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {25600, 5120}};
constexpr size_t SUMMED = 4;

// As many copies of a matrix as no L2 holds, with x and y; a scope of its own.
template <class Form>
struct Copies : Scope {
    const Context& c;
    const u32 rows, columns;
    const int count;
    std::vector<u16*> weights;
    std::vector<Form> forms;
    u16 *x, *y;
    Copies(const Context& context, Shape s, u32 x_rows, bool with_weights = false)
        : c(context),
          rows(s.rows),
          columns(s.columns),
          count(std::max<int>(4, int(500e6 / (u64(s.rows) * s.columns *
                                              (std::is_same_v<Form, Fast> ? 1.5 : 1.3))))) {
        weights = {make_weights(rows, columns, 3, 0)};
        forms = {form_of<Form>(weights[0], rows, columns)};
        for (int i = 1; i < count; i++) {
            forms.push_back(forms[0].copy());
            if (with_weights) weights.push_back(copy_of(weights[0], u64(rows) * columns));
        }
        x = make_weights(x_rows, columns, 9, 4), y = allocate<u16>(u64(x_rows) * rows);
    }
    // Product of copy `k` by some rows of x.
    Product product(int k, u32 x_rows, u32 first_row = 0) const {
        Product p = c.product(x + u64(first_row) * columns, columns, x_rows, columns);
        add_matrix(p, forms[k], y + u64(first_row) * rows, rows);
        return p;
    }
    void run(int k, u32 x_rows, bool begins_early) const {
        launch_form<Form>(c, product(k, x_rows), staged_of(forms[k]), begins_early);
    }
};

// A small kernel, as an engine runs between two products. EARLY: it lets the next launch begin
// before it has ended, as compilers for engines can do.
template <bool EARLY>
__global__ void small_kernel(float* to) {
    if (EARLY) wait_for_launch_before();
    if (threadIdx.x == 0) to[blockIdx.x] += 1;
}
enum class Spaces { NONE, PLAIN, EARLY };
static void launch_small(Spaces spaces, float* to, cudaStream_t stream) {
    if (spaces == Spaces::NONE) return;
    const void* kernel = spaces == Spaces::EARLY ? (const void*)small_kernel<true>
                                                 : (const void*)small_kernel<false>;
    launch_kernel(kernel, 8, 128, 0, to, stream, spaces == Spaces::EARLY);
}

// A way to multiply by some rows of x.
template <class Form>
struct Way {
    std::string name;
    std::function<void(const Copies<Form>&, int)> run;
};
// Measures each way beside cuBLASLt's best; `spaces` puts a small kernel before each product. The
// time that small kernels take waiting for each other is not counted.
template <class Form>
static void bench(const Context& c, int rounds, const std::vector<u32>& batches,
                  const std::function<std::vector<Way<Form>>(u32)>& ways_of,
                  Spaces spaces = Spaces::NONE) {
    struct Row {
        u32 x_rows;
        std::string name;
        double peers, ours;
    };
    std::vector<Row> sums;
    float* const counted = allocate_filled<float>(8, 0);
    auto space = [&] { launch_small(spaces, counted, c.stream); };
    for (auto& shape : SHAPES) {
        const Copies<Form> m(c, shape, *std::max_element(batches.begin(), batches.end()), true);
        const double n = double(m.rows) * m.columns;
        printf("%ux%u: %.4f bits a weight\n", m.rows, m.columns, m.forms[0].bytes() * 8 / n);
        for (u32 x_rows : batches) {
            std::vector<Contender> all;
            const Lt lt(c, m.rows, x_rows, m.columns, m.columns);
            for (int i = 0; i < lt.count; i++)
                all.push_back({"", n * 2, [&, i](int k) {
                                   space(), lt.run(i, m.weights[k], m.x, m.y, c.stream);
                               }});
            const size_t peers = all.size();
            for (auto& way : ways_of(x_rows))
                all.push_back({way.name, double(m.forms[0].bytes()),
                               [&, way](int k) { space(), way.run(m, k); }});
            const size_t end = all.size();
            if (end == peers) continue;
            if (spaces != Spaces::NONE)
                all.push_back(
                    {"", 0, [&](int) { launch_small(Spaces::PLAIN, counted, c.stream); }});
            measure(c, all, m.count, rounds);
            const double not_counted = spaces != Spaces::NONE ? all.back().median() : 0;
            double best = 1;
            for (size_t i = 0; i < peers; i++) best = std::min(best, all[i].median() - not_counted);
            for (size_t i = peers; i < end; i++) {
                const double s = all[i].median() - not_counted;
                const std::string& name = all[i].name;
                printf(
                    "%5ux%-5u x %2u %-36s %7.2f us %5.0f GB/s; cuBLASLt %7.2f us %5.0f GB/s; ratio "
                    "%.3f\n",
                    m.rows, m.columns, x_rows, name.c_str(), s * 1e6, all[i].bytes / s / 1e9,
                    best * 1e6, n * 2 / best / 1e9, best / s);
                if (&shape - &SHAPES[0] >= SUMMED) continue;
                auto row = std::find_if(sums.begin(), sums.end(), [&](auto& r) {
                    return r.x_rows == x_rows && r.name == name;
                });
                if (row == sums.end()) row = sums.insert(row, {x_rows, name, 0, 0});
                row->peers += best, row->ours += s;
            }
        }
    }
    printf("== sums of four\n");
    for (auto& r : sums)
        printf("x %2u %-36s %.3f (%.1f / %.1f us)\n", r.x_rows, r.name.c_str(), r.peers / r.ours,
               r.peers * 1e6, r.ours * 1e6);
}

// Measures rows by index, without peers, which linear_peers.py measures.
template <class Form>
static void bench_gather(const Context& c, int rounds) {
    const Scope scope;
    const u32 rows = 128256, columns = 4096, sets = 16;
    const Form f = form_of<Form>(make_weights(rows, columns, 31, 0), rows, columns);
    u16* const out = allocate<u16>(64 * columns);
    for (u32 count : {1u, 16u, 64u}) {
        std::vector<u32*> indices;
        for (u32 s = 0; s < sets; s++) {
            std::vector<u32> of;
            for (u32 i = 0; i < count; i++) of.push_back((s * 7919 + i * 104729) % rows);
            indices.push_back(upload(of));
        }
        const double s = seconds_of(c, sets, rounds, [&](int k) {
            gather(c, f, indices[k % sets], count, 0, out, columns);
        });
        printf("gather %u rows of %ux%u%s: %.2f us\n", count, rows, columns,
               std::is_same_v<Form, Tiles> ? " as stored" : "", s * 1e6);
    }
}
// Measures experts, also without peers.
static void bench_grouped(const Context& c, int rounds) {
    for (auto [rows, columns] : {Shape{1536, 2048}, Shape{2048, 768}}) {
        const Scope scope;
        const u32 experts = 128;
        const Experts all(experts, rows, columns);
        for (u32 batch : {1u, 8u, 64u}) {
            // As many sets of routed experts as copies; each row has eight experts of its own.
            const u32 places = batch * 8, sets = 12;
            std::vector<GroupedLaunch> launches;
            const u16* x = make_weights(batch, columns, 7, 4);
            u16* y = allocate<u16>(u64(places) * rows);
            double used = 0;
            for (u32 s = 0; s < sets; s++) {
                std::vector<std::vector<u32>> of(experts);
                for (u32 b = 0; b < batch; b++)
                    for (u32 k = 0; k < 8; k++)
                        of[((s * 8 + k) * 5 + b * 13 + (b * b * 7 + s) % 11 * 16) % experts]
                            .push_back(b);
                std::vector<u32> offsets = {0}, index;
                for (auto& rows_of : of) {
                    index.insert(index.end(), rows_of.begin(), rows_of.end());
                    offsets.push_back(u32(index.size()));
                    used += !rows_of.empty();
                }
                launches.push_back(grouped_of(c, x, columns, batch, upload(index), upload(offsets),
                                              experts, places, all.matrices, rows, columns, y));
            }
            const double s = seconds_of(
                c, sets, rounds, [&](int k) { launch_grouped(launches[k % sets], c.stream); });
            const double weights = used / sets * rows * columns;
            printf(
                "grouped %u experts of %ux%u, batch %2u: %.1f experts used, %.2f us, %.0f GB/s, "
                "BF16 bytes %.1f MB\n",
                experts, rows, columns, batch, used / sets, s * 1e6, weights * 1.5 / s / 1e9,
                weights * 2e-6);
        }
    }
}
static void bench_transcoding(const Context& c) {
    const Scope scope;
    const u32 rows = 128256, columns = 4096;
    PackTask task = {};
    task.weights = make_weights(rows, columns, 31, 0), task.pitch = columns;
    task.rows = rows, task.columns = columns;
    const Fast f = pack(task.weights, rows, columns);
    task.heads = f.heads, task.data = f.data, task.entries = f.entries, task.capacity = f.count;
    task.patches = f.patches;
    task.total = allocate<u32>(1);
    const double s = seconds_of(c, 1, 5, [&](int) {
        CUDA(cudaMemsetAsync(task.total, 0, 4, c.stream));
        launch_count(task, c.stream);
        launch_pack(task, c.stream);
    });
    printf("transcoding %ux%u from BF16: %.1f us, %.0f GB/s of BF16\n", rows, columns, s * 1e6,
           rows * 2.0 * columns / s / 1e9);
}

// Measures without cuBLASLt, to compare kernels of files: each matrix, and the sum of the first
// four.
template <class Form>
static void sums(const Context& c, int rounds, const std::vector<u32>& batches) {
    std::vector<std::vector<double>> times(batches.size());
    for (auto& shape : SHAPES) {
        const Copies<Form> m(c, shape, *std::max_element(batches.begin(), batches.end()));
        std::vector<Contender> all;
        for (u32 x_rows : batches)
            all.push_back({"", 0, [&, x_rows](int k) { m.run(k, x_rows, early); }});
        measure(c, all, m.count, rounds);
        for (size_t i = 0; i < all.size(); i++) times[i].push_back(all[i].median() * 1e6);
    }
    for (size_t i = 0; i < batches.size(); i++) {
        printf("x %3u", batches[i]);
        for (double us : times[i]) printf(" %7.2f", us);
        printf(" sum %.1f us\n", std::accumulate(times[i].begin(), times[i].begin() + SUMMED, 0.0));
    }
}

// Measures matrices as stored with tables of their own in one launch: q, k, v and gate, up, beside
// the merged matrix that they would be.
static void several(const Context& c, int rounds) {
    for (auto& rows : {std::vector<u32>{4096, 1024, 1024}, {14336, 14336}}) {
        const Scope scope;
        const u32 columns = 4096, all_rows = std::accumulate(rows.begin(), rows.end(), 0u);
        const int copies = std::max<int>(4, int(500e6 / (u64(all_rows) * columns * 1.3)));
        std::vector<std::vector<Tiles>> ts(copies);
        u32 staged = 0;
        for (size_t i = 0; i < rows.size(); i++) {
            ts[0].push_back(
                store_tiles(make_weights(rows[i], columns, 3 + i, 0), rows[i], columns));
            staged = std::max(staged, ts[0][i].staged);
            for (int k = 1; k < copies; k++) ts[k].push_back(ts[0][i].copy());
        }
        const u16* x = make_weights(16, columns, 9, 4);
        u16* y = allocate<u16>(16 * all_rows);
        printf("%zu matrices, %u rows:", rows.size(), all_rows);
        for (u32 x_rows : {1u, 8u, 16u}) {
            const double s = seconds_of(c, copies, rounds, [&](int k) {
                Product l = c.product(x, columns, x_rows, columns);
                u32 row = 0;
                for (auto& t : ts[k]) add_matrix(l, t, y + row, all_rows), row += t.rows;
                launch_stored(c, l, staged, true);
            });
            printf(" x %u %.2f us", x_rows, s * 1e6);
        }
        printf("\n");
    }
}

// Finds the rows of x from which on decoding to memory and cuBLASLt are faster than fused products
// in parts of `most` rows.
static void crossover(const Context& c, int rounds, u32 most, std::vector<u32> batches) {
    if (batches.empty()) batches = {1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048};
    const u32 all_rows = *std::max_element(batches.begin(), batches.end());
    // Fused, decoded, cuBLASLt alone, decoding alone; in seconds.
    std::vector<double> sums(4 * batches.size());
    for (size_t s = 0; s < SUMMED; s++) {
        const Copies<Fast> m(c, SHAPES[s], all_rows, true);
        for (size_t b = 0; b < batches.size(); b++) {
            const u32 x_rows = batches[b];
            const Lt lt(c, m.rows, x_rows, m.columns, m.columns);
            auto multiply = [&](int which, int k) {
                lt.run(which, m.weights[k], m.x, m.y, c.stream);
            };
            std::vector<Contender> all;
            for (int i = 0; i < lt.count; i++)
                all.push_back({"", 0, [&, i](int k) { multiply(i, k); }});
            measure(c, all, m.count, 3);
            const int best =
                int(std::min_element(all.begin(), all.end(),
                                     [](auto& a, auto& b) { return a.median() < b.median(); }) -
                    all.begin());
            // Decodes to where cuBLASLt reads, over this copy's own weights.
            auto decode = [&](int k) {
                unpack(m.forms[k], m.weights[k], m.columns, c.status, c.stream);
            };
            std::vector<Contender> ways = {
                {"fused", 0,
                 [&](int k) {
                     for (u32 from = 0; from < x_rows; from += most)
                         launch_product(c, m.product(k, std::min(most, x_rows - from), from),
                                        early);
                 }},
                {"decoded", 0, [&](int k) { decode(k), multiply(best, k); }},
                {"cublasLt", 0, [&](int k) { multiply(best, k); }},
                {"decode", 0, decode}};
            measure(c, ways, m.count, rounds);
            printf("%5ux%-5u x %4u:", m.rows, m.columns, x_rows);
            for (size_t i = 0; i < ways.size(); i++) {
                printf("  %s %.2f", ways[i].name.c_str(), ways[i].median() * 1e6);
                sums[4 * b + i] += ways[i].median();
            }
            printf("\n");
        }
    }
    printf("sums of four in us; fused in parts of %u rows\n", most);
    for (size_t b = 0; b < batches.size(); b++) {
        const double* s = &sums[4 * b];
        printf(
            "x %4u: fused %8.1f, decoded %8.1f, cuBLASLt alone %8.1f (ratio %.3f), decoding alone "
            "%6.1f: %s\n",
            batches[b], s[0] * 1e6, s[1] * 1e6, s[2] * 1e6, s[2] / s[0], s[3] * 1e6,
            s[0] <= s[1] ? "fused" : "decode");
    }
}

// Measures all ways for blocks to share a matrix.
static void ways(const Context& c, int rounds) {
    for (auto& shape : SHAPES) {
        const Copies<Fast> m(c, shape, 128);
        for (u32 x_rows : {32u, 64u, 128u}) {
            std::vector<Contender> all;
            for (u32 splits = 1; splits <= 4; splits++)
                for (u32 strips = 1; strips <= FAST128_STRIPS; strips++) {
                    const u32 blocks =
                        fast128_items(strips_of(m.rows), splits, strips, splits) * splits;
                    if (blocks > 3 * LINEAR_BLOCKS || blocks < LINEAR_BLOCKS / 2) continue;
                    char name[64];
                    snprintf(name, sizeof name, "splits %u, strips %u, blocks %u", splits, strips,
                             blocks);
                    all.push_back({name, 0, [&, splits, strips](int k) {
                                       forced_splits = splits, forced_strips = strips;
                                       m.run(k, x_rows, early);
                                       forced_splits = forced_strips = 0;
                                   }});
                }
            measure(c, all, m.count, rounds);
            for (auto& one : all)
                printf("%ux%u x %u %s: %.2f us\n", m.rows, m.columns, x_rows, one.name.c_str(),
                       one.median() * 1e6);
        }
    }
}
