// Checks, hostile streams and times of products with tiles as stored. Loaded after measure.
#pragma once

// Slices of rows and columns, and several matrices in one launch, each with its own table, against
// the same matrices made of their own weights, alone: bit by bit if sums are split alike.
template <class Form>
static bool check_parts(Context& c, std::vector<u32> rows, u32 whole_columns, u32 first_column,
                        u32 columns, u32 x_rows) {
    const u32 first_row = 64;
    std::vector<u16*> weights, ys;
    std::vector<Form> forms;
    u16* x = make_weights(x_rows, columns, 12, 4);
    LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
    u32 staged = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        weights.push_back(make_weights(rows[i] + first_row, whole_columns, 400 + i, i % 3 * i % 4));
        forms.push_back(
            make_form((const Form*)nullptr, weights[i], rows[i] + first_row, whole_columns));
        ys.push_back(make_weights(x_rows, rows[i], 1, 4));
        add_matrix(l, forms[i], ys[i], rows[i], nullptr,
                   {first_row, rows[i], first_column, columns});
        if constexpr (std::is_same_v<Form, Tiles>) staged = std::max(staged, forms[i].staged);
    }
    if constexpr (std::is_same_v<Form, Tiles>)
        launch_stored(stored(x_rows), l, staged, early, c.stream);
    else
        launch_form(forms[0], l, c.stream);
    CUDA(cudaStreamSynchronize(c.stream));
    bool good = c.take_status() == 0;
    for (size_t i = 0; i < rows.size(); i++) {
        u16 *own, *y;
        CUDA(cudaMalloc(&own, u64(rows[i]) * columns * 2));
        CUDA(cudaMalloc(&y, u64(rows[i]) * x_rows * 2));
        CUDA(cudaMemcpy2D(own, columns * 2,
                          weights[i] + u64(first_row) * whole_columns + first_column,
                          whole_columns * 2, columns * 2, rows[i], cudaMemcpyDeviceToDevice));
        Form alone = make_form((const Form*)nullptr, own, rows[i], columns);
        LinearLaunch one = launch_of(c, x, columns, x_rows, columns);
        add_matrix(one, alone, y, rows[i], nullptr);
        launch_form(alone, one, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        const bool same = same_bits(y, ys[i], u64(rows[i]) * x_rows);
        if (!same) printf("WRONG part %zu of %u rows\n", i, rows[i]);
        good &= same && c.take_status() == 0;
        alone.free();
        for (void* p : {own, y}) CUDA(cudaFree(p));
    }
    printf("%zu matrices, columns %u to %u of %u, x %u%s\n", rows.size(), first_column,
           first_column + columns, whole_columns, x_rows, good ? "" : "  WRONG");
    for (auto& f : forms) f.free();
    for (auto& list : {weights, ys})
        for (auto p : list) CUDA(cudaFree(p));
    CUDA(cudaFree(x));
    return good;
}
template <class Form>
static bool check_all_parts(Context& c) {
    bool good = true;
    for (u32 x_rows : {1u, 8u, 13u, 17u, 60u}) {
        if (ring && x_rows > LINEAR_ROWS) break;
        good &= check_parts<Form>(c, {4096, 1024, 1000}, 4096, 0, 4096, x_rows);
        good &= check_parts<Form>(c, {4096}, 4096, 1024, 2048, x_rows);
        good &= check_parts<Form>(c, {100, 5, 32, 77, 640, 9, 33, 2000}, 1000, 256, 744, x_rows);
        good &= check_parts<Form>(c, {8200, 32, 4300, 6000}, 776, 256, 256, x_rows);
    }
    return good;
}

static bool check_stored(Context& c) {
    bool good = true;
    const u32 shapes[][2] = {{4096, 4096}, {32, 256},   {1, 8},     {5, 16},
                             {33, 264},    {100, 1000}, {257, 384}, {1024, 4096},
                             {768, 2048},  {64, 14336}, {31, 40},   {1000, 5120}};
    u32 seed = 1;
    for (auto& s : shapes)
        for (u32 x_rows : {1u, 3u, 8u, 9u, 16u})
            good &= check_one<Tiles>(c, s[0], s[1], seed % 3 == 2 ? 3 : seed % 3, x_rows, seed),
                seed++;
    for (int mode : {1, 3, 5, 7})
        for (u32 x_rows : {1u, 16u}) good &= check_one<Tiles>(c, 512, 2048, mode, x_rows, seed++);
    good &= check_one<Tiles>(c, 4096, 14336, 0, 4, seed++);
    good &= check_one<Tiles>(c, 6144, 4096, 0, 16, seed++);
    if (!ring) {
        for (auto& s : shapes)
            for (u32 x_rows : {17u, 32u, 50u, 64u})
                good &= check_one<Tiles>(c, s[0], s[1], seed % 3 == 2 ? 3 : seed % 3, x_rows, seed),
                    seed++;
        for (int mode : {1, 3, 5, 7})
            for (u32 x_rows : {32u, 64u})
                good &= check_one<Tiles>(c, 512, 2048, mode, x_rows, seed++);
        good &= check_one<Tiles>(c, 28672, 4096, 0, 64, seed++);
    }
    // Stages that no tile fits.
    small_stages = true;
    for (u32 x_rows : {1u, 9u, ring ? 8u : 40u})
        good &= check_one<Tiles>(c, 256, 2048, 0, x_rows, seed++);
    small_stages = false;
    good &= check_all_parts<Tiles>(c);
    // Many items and matrices a block.
    for (u32 blocks : {1u, 5u}) few_blocks = blocks, good &= check_all_parts<Tiles>(c);
    few_blocks = 0;
    good &= check_gather<Tiles>(c, 1000, 4096, 0);
    good &= check_gather<Tiles>(c, 77, 1000, 3);
    good &= check_gather<Tiles>(c, 77, 248, 2);
    printf("stored: %s\n", good ? "all right" : "WRONG");
    return good;
}

// Bits, records, plane or codebook that say anything, through products and gathered rows; every
// array is an allocation of its exact size. Under compute-sanitizer.
static int hostile_stored(Context& c, int count, u64 seed) {
    const u32 shapes[][2] = {{100, 520}, {33, 264}, {64, 1024}, {5, 40}};
    auto next = [&] {
        return seed = seed * 6364136223846793005ull + 1442695040888963407ull, seed >> 33;
    };
    u64 refused = 0;
    for (int i = 0; i < count; i++) {
        const u32 rows = shapes[i % 4][0], columns = shapes[i % 4][1],
                  x_rows = 1 + next() % (ring ? LINEAR_ROWS : DECODED_ROWS);
        u16* w = make_weights(rows, columns, next(), i % 2);
        Tiles t = store_tiles(w, rows, columns);
        const u64 sizes[] = {t.bits_bytes, (t.tiles + 1) * 32, u64(rows) * columns,
                             t.codebook_bytes};
        u8* arrays[] = {t.bits, (u8*)t.records, t.plane, t.codebook};
        for (u32 a = 0; a < 4; a++) {
            if (next() % 2) continue;
            std::vector<u8> bytes = from_device(arrays[a], sizes[a]);
            for (u64 k = next() % 4 ? 1 : bytes.size() / 4 + 1; k--;)
                bytes[next() % bytes.size()] = u8(next());
            CUDA(cudaMemcpy(arrays[a], bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
        }
        t.make_table();
        u16 *x = make_weights(x_rows, columns, 3, 4), *y, *out;
        const u32 matrices = 2 + next() % 5;
        few_blocks = next() % 2 ? 1 + next() % 3 : 0;
        CUDA(cudaMalloc(&y, u64(x_rows) * rows * 2 * matrices));
        CUDA(cudaMalloc(&out, 8 * u64(columns) * 2));
        LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
        for (u32 k = 0; k < matrices; k++)
            add_matrix(l, t, y + u64(k) * x_rows * rows, rows, nullptr);
        small_stages = next() % 2;
        launch_form(t, l, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        u32* index = upload(std::vector<u32>{0, 1, 2, u32(next()), 0, rows - 1, 2, 4});
        launch_gather(gather_of(t, index, 8, 0, out, columns, c.status), c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        refused += c.take_status() != 0;
        t.free();
        for (void* p : {(void*)w, (void*)x, (void*)y, (void*)out, (void*)index}) CUDA(cudaFree(p));
    }
    small_stages = false, few_blocks = 0;
    printf("hostile: %d streams, %llu with a status\n", count, (unsigned long long)refused);
    return 0;
}

static void bench_stored_gather(Context& c, int rounds) {
    u16 *w = make_weights(128256, 4096, 31, 0), *out;
    Tiles t = store_tiles(w, 128256, 4096);
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
                 launch_gather(gather_of(t, indices[k % 16], count, 0, out, 4096, c.status),
                               c.stream);
             }}};
        measure(c, one, 16, rounds);
        printf("gather %u rows of 128256x4096 as stored: %.2f us\n", count,
               median_of(one[0].seconds) * 1e6);
        for (auto p : indices) CUDA(cudaFree(p));
    }
    t.free();
    for (auto p : {w, out}) CUDA(cudaFree(p));
}

// A few launches of one kernel, for a profiler.
static int profile_stored(Context& c, u32 x_rows) {
    const u32 rows = 28672, columns = 4096;
    u16 *w = make_weights(rows, columns, 3, 0), *x = make_weights(x_rows, columns, 9, 4), *y;
    const Tiles t = store_tiles(w, rows, columns);
    CUDA(cudaMalloc(&y, u64(x_rows) * rows * 2));
    for (u32 i = 0; i < 3; i++) {
        LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
        add_matrix(l, t, y, rows, nullptr);
        launch_stored(stored(x_rows), l, t.staged, false, c.stream);
        CUDA(cudaDeviceSynchronize());
    }
    return 0;
}

// Times of 1 to 64 rows of x without cuBLASLt, to compare kernels of files: each matrix, and the
// sum of the first four.
static int sums_stored(Context& c, int rounds) {
    const u32 shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {25600, 5120}};
    const u32 counts[] = {1, 8, 16, 32, 64};
    double sums[5] = {}, times[5][5];
    for (u32 s = 0; s < 5; s++) {
        const u32 rows = shapes[s][0], columns = shapes[s][1];
        const int copies = std::max<int>(4, int(500e6 / (u64(rows) * columns * 1.3)));
        u16* w = make_weights(rows, columns, 3, 0);
        std::vector<Tiles> ts = {store_tiles(w, rows, columns)};
        for (int i = 1; i < copies; i++) ts.push_back(ts[0].copy());
        u16 *x = make_weights(64, columns, 9, 4), *y;
        CUDA(cudaMalloc(&y, u64(64) * rows * 2));
        std::vector<Contender> all;
        for (u32 count : counts)
            all.push_back({"", 0, [&, count](int k) {
                               LinearLaunch l = launch_of(c, x, columns, count, columns);
                               add_matrix(l, ts[k], y, rows, nullptr);
                               launch_stored(stored(count), l, ts[k].staged, true, c.stream);
                           }});
        measure(c, all, copies, rounds);
        for (u32 i = 0; i < 5; i++) {
            times[i][s] = median_of(all[i].seconds) * 1e6;
            if (s < 4) sums[i] += times[i][s];
        }
        for (auto& t : ts) t.free();
        for (auto p : {w, x, y}) CUDA(cudaFree(p));
    }
    for (u32 i = 0; i < 5; i++)
        printf("x %2u %7.2f %7.2f %7.2f %7.2f %7.2f sum %.1f us\n", counts[i], times[i][0],
               times[i][1], times[i][2], times[i][3], times[i][4], sums[i]);
    return 0;
}

// Times of matrices with tables of their own in one launch: q, k, v and gate, up of the first and
// third of the matrices above, which a merged one would be.
static int several_stored(Context& c, int rounds) {
    const std::vector<std::vector<u32>> launches = {{4096, 1024, 1024}, {14336, 14336}};
    const u32 columns = 4096, counts[] = {1, 8, 16};
    for (auto& rows : launches) {
        u32 all_rows = 0, staged = 0;
        for (u32 n : rows) all_rows += n;
        const int copies = std::max<int>(4, int(500e6 / (u64(all_rows) * columns * 1.3)));
        std::vector<std::vector<Tiles>> ts(copies);
        for (size_t i = 0; i < rows.size(); i++) {
            u16* w = make_weights(rows[i], columns, 3 + i, 0);
            ts[0].push_back(store_tiles(w, rows[i], columns));
            staged = std::max(staged, ts[0][i].staged);
            for (int k = 1; k < copies; k++) ts[k].push_back(ts[0][i].copy());
            CUDA(cudaFree(w));
        }
        u16 *x = make_weights(16, columns, 9, 4), *y;
        CUDA(cudaMalloc(&y, u64(16) * all_rows * 2));
        std::vector<Contender> all;
        for (u32 count : counts)
            all.push_back({"", 0, [&, count](int k) {
                               LinearLaunch l = launch_of(c, x, columns, count, columns);
                               u32 row = 0;
                               for (auto& t : ts[k])
                                   add_matrix(l, t, y + row, all_rows, nullptr), row += t.rows;
                               launch_stored(stored(count), l, staged, true, c.stream);
                           }});
        measure(c, all, copies, rounds);
        printf("%zu matrices, %u rows: x 1 %.2f, x 8 %.2f, x 16 %.2f us\n", rows.size(), all_rows,
               median_of(all[0].seconds) * 1e6, median_of(all[1].seconds) * 1e6,
               median_of(all[2].seconds) * 1e6);
        for (auto& of : ts)
            for (auto& t : of) t.free();
        for (auto p : {x, y}) CUDA(cudaFree(p));
    }
    return 0;
}

// As an engine has between two products. EARLY: it lets the next launch begin before it has ended,
// as compilers for engines can have it.
template <bool EARLY>
__global__ void small_kernel(float* to) {
    if (EARLY) wait_for_launch_before();
    if (threadIdx.x == 0) to[blockIdx.x] += 1;
}
enum class Spaces { NONE, PLAIN, EARLY };
static void launch_small(Spaces spaces, float* to, cudaStream_t stream) {
    if (spaces == Spaces::NONE) return;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization,
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = 8, config.blockDim = 128, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = spaces == Spaces::EARLY;
    auto kernel = spaces == Spaces::EARLY ? small_kernel<true> : small_kernel<false>;
    CUDA(cudaLaunchKernelEx(&config, kernel, to));
}

// Each product after a small kernel, if `spaces` says so. Not counted is what small kernels take
// that wait for each other.
static int bench_stored(Context& c, int rounds, Spaces spaces) {
    const u32 shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {25600, 5120}};
    std::vector<std::string> names;
    std::vector<double> peers_sum, ours_sum;
    float* counted;
    CUDA(cudaMalloc(&counted, 8 * sizeof(float)));
    auto space = [&] { launch_small(spaces, counted, c.stream); };
    for (auto& shape : shapes) {
        const u32 rows = shape[0], columns = shape[1];
        const u64 n = u64(rows) * columns;
        const int copies = std::max<int>(4, int(500e6 / (n * 1.3)));
        std::vector<u16*> ws = {make_weights(rows, columns, 3, 0)};
        std::vector<Tiles> ts = {store_tiles(ws[0], rows, columns)};
        printf("%ux%u: %.4f bits a weight\n", rows, columns, ts[0].bytes() * 8.0 / n);
        for (int i = 1; i < copies; i++)
            ws.push_back(copy_of(ws[0], n * 2)), ts.push_back(ts[0].copy());
        u16 *x = make_weights(64, columns, 9, 4), *y;
        CUDA(cudaMalloc(&y, u64(64) * rows * 2));
        size_t row = 0;
        for (u32 x_rows : {1u, 8u, 16u, 32u, 64u}) {
            std::vector<Contender> all;
            Lt lt(c.lt, c.room, rows, x_rows, columns, columns);
            for (int i = 0; i < lt.count; i++)
                all.push_back({"", n * 2.0, [&, i](int k) {
                                   space(), lt.run(i, ws[k], x, y, c.stream);
                               }});
            const size_t peers = all.size();
            auto add = [&](const StoredVariant& v, bool begins_early) {
                all.push_back({std::string(v.name) + (begins_early ? "" : ", plain"),
                               double(ts[0].bytes()), [&, v, begins_early](int k) {
                                   LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
                                   add_matrix(l, ts[k], y, rows, nullptr);
                                   space();
                                   launch_stored(v, l, ts[k].staged, begins_early, c.stream);
                               }});
            };
            if (ring && x_rows > LINEAR_ROWS) continue;
            add(stored(x_rows), true);
            add(stored(x_rows), false);
            const size_t ours_end = all.size();
            if (spaces != Spaces::NONE)
                all.push_back({"", 0, [&](int) {
                                   launch_small(Spaces::PLAIN, counted, c.stream);
                               }});
            measure(c, all, copies, rounds);
            const double not_counted =
                spaces != Spaces::NONE ? median_of(all.back().seconds) : 0;
            double best = 1;
            for (size_t i = 0; i < peers; i++)
                best = std::min(best, median_of(all[i].seconds) - not_counted);
            for (size_t i = peers; i < ours_end; i++, row++) {
                const double s = median_of(all[i].seconds) - not_counted;
                printf("%5ux%-5u x %2u %-36s %7.2f us %5.0f GB/s; cuBLASLt %7.2f us; ratio %.3f\n",
                       rows, columns, x_rows, all[i].name.c_str(), s * 1e6, all[i].bytes / s / 1e9,
                       best * 1e6, best / s);
                if (&shape == &shapes[4]) continue;
                if (row == names.size()) {
                    names.push_back("x " + std::to_string(x_rows) + " " + all[i].name);
                    peers_sum.push_back(0), ours_sum.push_back(0);
                }
                peers_sum[row] += best, ours_sum[row] += s;
            }
        }
        for (auto p : ws) CUDA(cudaFree(p));
        for (auto& t : ts) t.free();
        for (auto p : {x, y}) CUDA(cudaFree(p));
    }
    CUDA(cudaFree(counted));
    if (spaces == Spaces::NONE) bench_stored_gather(c, rounds);
    printf("== sums of four\n");
    for (size_t i = 0; i < names.size(); i++)
        printf("%-44s %.3f (%.1f / %.1f us)\n", names[i].c_str(), peers_sum[i] / ours_sum[i],
               peers_sum[i] * 1e6, ours_sum[i] * 1e6);
    return 0;
}
