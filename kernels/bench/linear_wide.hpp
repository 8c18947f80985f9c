// Host side of linear_bench.cu: launches of 17 to 256 rows of x, their checks, and the crossover.
// Loaded after Context.
#pragma once

// Strips of a block, for checks, and parts of the columns; 0: what is good.
static u32 forced_strips = 0, forced_parts = 0;

static void launch_with(const void* kernel, u32 blocks, u32 threads, u32 shared, bool early,
                        LinearLaunch l, cudaStream_t stream) {
    void* arguments[] = {&l};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization,
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared,
    config.stream = stream, config.attrs = &attribute, config.numAttrs = early;
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    CUDA(cudaLaunchKernelExC(&config, kernel, arguments));
}

// The map of x, if there can be one.
static void map_x(LinearLaunch& l) {
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
    const u32 at_once = l.x_rows > WIDE_ROWS ? large_band_rows(l.x_rows) : l.x_rows;
    const cuuint32_t box[] = {WIDE_COLUMNS, at_once}, every[] = {1, 1};
    const auto done =
        encode(reinterpret_cast<CUtensorMap*>(&l.x_map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
               const_cast<u16*>(l.x), sizes, &pitch, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (done != CUDA_SUCCESS) printf("cuTensorMapEncodeTiled: %d\n", int(done)), exit(3);
}

static const void* wide_kernel(u32 n) {
    return n == 32   ? kernel_of("df11_linear_fast_32", (const void*)df11_linear_fast_32)
           : n == 64 ? kernel_of("df11_linear_fast_64", (const void*)df11_linear_fast_64)
                     : kernel_of("df11_linear_fast_128", (const void*)df11_linear_fast_128);
}
static u32 items_of(const LinearLaunch& l, u32 strips) {
    u32 items = 0;
    for (u32 i = 0; i < l.matrix_count; i++)
        items += wide_items(strips_of(l.matrices[i].rows), l.wide_parts[i], strips);
    return items;
}
// Those of a block with which the launch takes the least time.
static u32 wide_strips(const LinearLaunch& l) {
    u32 best = WIDE_STRIPS;
    u64 least = ~0ull;
    // Even: a warpgroup takes as long for one strip as for two.
    for (u32 strips = 2; strips <= WIDE_STRIPS; strips += 2) {
        u64 time = 0;
        for (u32 i = 0; i < l.matrix_count; i++)
            time = std::max(time, wide_time(items_of(l, strips), wide_stage_count(l.columns),
                                            l.wide_parts[i], strips, wide_clusters(sm_count())));
        if (time < least) least = time, best = strips;
    }
    return best;
}
// 129 rows and more.
static const void* large_kernel(u32 n) {
    return n == 192 ? kernel_of("df11_linear_fast_192", (const void*)df11_linear_fast_192)
                    : kernel_of("df11_linear_fast_256", (const void*)df11_linear_fast_256);
}
static void launch_large(const LinearLaunch& launch, bool early, cudaStream_t stream) {
    LinearLaunch l = launch;
    map_x(l);
    l.items = 0;
    const u32 bands = large_bands(l.x_rows);
    for (u32 i = 0; i < l.matrix_count; i++)
        l.items += large_shares(l.matrices[i].rows, l.columns, bands) * bands;
    const u32 blocks = forced_strips ? forced_strips * 7 : u32(sm_count());
    launch_with(large_kernel(large_class(l.x_rows)),
                std::min(l.items, blocks), LARGE_THREADS, WIDE_SHARED_BYTES, early, l, stream);
}
static void launch_wide(const LinearLaunch& launch, bool early, cudaStream_t stream) {
    if (launch.x_rows > WIDE_ROWS) return launch_large(launch, early, stream);
    const u32 n = wide_class(launch.x_rows);
    LinearLaunch l = launch;
    map_x(l);
    l.counters = nullptr, l.partials = nullptr, l.items = 0;
    for (u32 i = 0; i < l.matrix_count; i++)
        l.wide_parts[i] =
            u8(forced_parts ? forced_parts : wide_parts(l.matrices[i].rows, l.columns));
    l.wide_strips = forced_strips ? forced_strips : wide_strips(l);
    launch_with(wide_kernel(n), WIDE_CLUSTER * items_of(l, l.wide_strips), WIDE_THREADS,
                WIDE_SHARED_BYTES, early, l, stream);
}

// Some matrices in one launch, slices of columns and of rows of one: the bits of each alone, packed
// from its own weights, with any number of strips a block.
static bool check_wide_launch(Context& c, u32 rows, u32 whole_columns, u32 first, u32 columns,
                              u32 x_rows, bool early) {
    u16 *w = make_weights(rows, whole_columns, 17, 3), *own, *y, *one;
    const Fast whole = pack(w, rows, whole_columns);
    CUDA(cudaMalloc(&own, u64(rows) * columns * 2));
    CUDA(cudaMemcpy2D(own, columns * 2, w + first, whole_columns * 2, columns * 2, rows,
                      cudaMemcpyDeviceToDevice));
    u16 *x = make_weights(x_rows, columns, 5, 4), *bias = make_weights(1, rows, 6, 0);
    const u32 begins[] = {0, 32, rows / 64 * 32},
              ends[] = {rows, std::max(64u, rows / 32 * 32), rows};
    u64 y_pitch = 3;
    for (u32 i = 0; i < 3; i++) y_pitch += ends[i] - begins[i];
    CUDA(cudaMalloc(&y, x_rows * y_pitch * 2));
    CUDA(cudaMalloc(&one, u64(x_rows) * rows * 2));
    LinearLaunch l = launch_of(c, x, columns, x_rows, columns);
    u64 offset = 0;
    for (u32 i = 0; i < 3; i++) {
        Fast slice = whole;
        slice.rows = ends[i] - begins[i], slice.columns = columns;
        slice.data += u64(begins[i] / 32) * steps_of(whole_columns) * STEP_BYTES +
                      first / 32 * STEP_BYTES;
        slice.heads += u64(begins[i] / 32) * tiles_across(whole_columns) + first / 256;
        add_matrix(l, slice, y + offset, y_pitch, i ? nullptr : bias);
        l.matrices[i].whole_columns = whole_columns, l.matrices[i].first_column = first;
        offset += slice.rows;
    }
    bool good = true;
    for (u32 strips : {0u, 1u, 3u, 8u, 0u}) {
        forced_strips = strips;
        CUDA(cudaMemset(y, 0xA5, x_rows * y_pitch * 2));
        launch_wide(l, early, c.stream);
        CUDA(cudaStreamSynchronize(c.stream));
        offset = 0;
        for (u32 i = 0; i < 3; i++) {
            const u32 count = ends[i] - begins[i];
            const Fast alone = pack(own + u64(begins[i]) * columns, count, columns);
            LinearLaunch single = launch_of(c, x, columns, x_rows, columns);
            add_matrix(single, alone, one, count, i ? nullptr : bias);
            forced_strips = 0;
            launch_wide(single, early, c.stream);
            CUDA(cudaStreamSynchronize(c.stream));
            for (u32 k = 0; k < x_rows; k++)
                good &= same_bits(y + k * y_pitch + offset, one + u64(k) * count, count);
            offset += count;
            alone.free();
        }
        for (u32 k = 0; k < x_rows; k++)
            good &= from_device(y + k * y_pitch + offset, 1)[0] == 0xA5A5;
    }
    good &= c.take_status() == 0 && c.has_clear_counters();
    printf("slices of %ux%u, columns %u to %u, %u rows of x%s\n", rows, whole_columns, first,
           first + columns, x_rows, good ? "" : "  WRONG");
    whole.free();
    for (void* p : {(void*)w, (void*)own, (void*)x, (void*)bias, (void*)y, (void*)one})
        CUDA(cudaFree(p));
    return good;
}

static bool check_wide(Context& c, bool early) {
    bool good = true;
    u32 seed = 500;
    const u32 shapes[][2] = {{32, 256},   {1, 8},       {5, 7},      {33, 264},    {100, 1000},
                             {257, 384},  {1024, 4096}, {31, 33},    {1000, 5120}, {2048, 96},
                             {512, 2048}, {768, 2080},  {300, 4096}, {20000, 256}};
    for (auto& s : shapes)
        for (u32 x_rows :
             {17u, 24u, 31u, 32u, 33u, 47u, 64u, 65u, 100u, 127u, 128u, 129u, 200u, 255u, 256u})
            good &= check_one<Fast>(c, s[0], s[1], seed % 2 ? 0 : 1, x_rows, seed), seed++;
    for (int mode : {1, 2, 3, 5, 7})
        for (u32 x_rows : {32u, 64u, 128u, 256u})
            good &= check_one<Fast>(c, 500, 2056, mode, x_rows, seed++);
    for (u32 x_rows : {32u, 64u, 128u, 256u})
        good &= check_one<Fast>(c, 4096, 14336, 0, x_rows, seed++),
            good &= check_one<Fast>(c, 6144, 4096, 1, x_rows, seed++);
    good &= check_one<Fast>(c, 28672, 4096, 0, 48, seed++);
    good &= check_one<Fast>(c, 28672, 4096, 0, 256, seed++);
    good &= check_one<Fast>(c, 100, 65536, 0, 256, seed++);
    for (u32 x_rows : {257u, 300u, 384u, 512u, 700u})
        good &= check_one<Fast>(c, 512, 2048, seed % 2 ? 0 : 1, x_rows, seed), seed++,
            good &= check_one<Fast>(c, 300, 4096, 0, x_rows, seed++),
            good &= check_one<Fast>(c, 33, 264, 1, x_rows, seed++);
    good &= check_one<Fast>(c, 4096, 4096, 0, 384, seed++);
    good &= check_one<Fast>(c, 1024, 4096, 0, LARGE_ROWS * LARGE_BANDS, seed++);
    for (u32 x_rows : {17u, 64u, 128u, 192u, 500u})
        good &= check_wide_launch(c, 1000, 2100, 512, 1588, x_rows, early),
            good &= check_wide_launch(c, 320, 4096, 256, 1024, x_rows, early);
    return good;
}

// From how many rows of x on decoding to memory and cuBLASLt are faster than fused products, in
// parts of `most` rows.
static int crossover(Context& c, int rounds, u32 most, const std::vector<const char*>& wanted,
                     bool early) {
    const u32 shapes[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
    std::vector<u32> batches;
    for (auto number : wanted) batches.push_back(u32(atoi(number)));
    if (batches.empty()) batches = {1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048};
    const u32 all_rows = *std::max_element(batches.begin(), batches.end());
    // Fused, decoded, cuBLASLt alone, decoding alone; in seconds.
    std::vector<double> sums(4 * batches.size());
    for (auto& shape : shapes) {
        const u32 rows = shape[0], columns = shape[1];
        const u64 n = u64(rows) * columns;
        const int copies = std::max<int>(4, int(500e6 / (n * 1.5)));
        std::vector<u16*> ws = {make_weights(rows, columns, 3, 0)};
        std::vector<Fast> fs = {pack(ws[0], rows, columns)};
        for (int i = 1; i < copies; i++)
            ws.push_back(copy_of(ws[0], n * 2)), fs.push_back(fs[0].copy());
        u16 *x = make_weights(all_rows, columns, 9, 4), *y;
        CUDA(cudaMalloc(&y, u64(all_rows) * rows * 2));
        for (size_t b = 0; b < batches.size(); b++) {
            const u32 x_rows = batches[b];
            std::vector<Contender> all;
            Lt lt(c.lt, c.room, rows, x_rows, columns, columns);
            for (int i = 0; i < lt.count; i++)
                all.push_back({"cublasLt", 0, [&, i](int k) { lt.run(i, ws[k], x, y, c.stream); }});
            measure(c, all, copies, 3);
            int best = 0;
            for (int i = 1; i < lt.count; i++)
                if (median_of(all[i].seconds) < median_of(all[best].seconds)) best = i;
            std::vector<Contender> ways;
            ways.push_back({"fused", 0, [&](int k) {
                                for (u32 from = 0; from < x_rows; from += most) {
                                    const u32 count = std::min(most, x_rows - from);
                                    LinearLaunch l = launch_of(c, x + u64(from) * columns, columns,
                                                               count, columns);
                                    add_matrix(l, fs[k], y + u64(from) * rows, rows, nullptr);
                                    launch_product(l, early, c.stream);
                                }
                            }});
            ways.push_back({"decoded", 0, [&](int k) {
                                // To where cuBLASLt reads: the weights of this copy, as they are.
                                unpack_on(fs[k], ws[k], columns, c.status, c.stream);
                                lt.run(best, ws[k], x, y, c.stream);
                            }});
            ways.push_back({"cublasLt", 0, [&](int k) { lt.run(best, ws[k], x, y, c.stream); }});
            ways.push_back({"decode", 0, [&](int k) {
                                unpack_on(fs[k], ws[k], columns, c.status, c.stream);
                            }});
            measure(c, ways, copies, rounds);
            printf("%5ux%-5u x %4u:", rows, columns, x_rows);
            for (size_t i = 0; i < ways.size(); i++) {
                const double seconds = median_of(ways[i].seconds);
                printf("  %s %.2f", ways[i].name.c_str(), seconds * 1e6);
                sums[4 * b + i] += seconds;
            }
            printf("\n");
        }
        for (auto p : ws) CUDA(cudaFree(p));
        for (auto& one : fs) one.free();
        CUDA(cudaFree(x));
        CUDA(cudaFree(y));
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
    return 0;
}

// Times of all ways to share a matrix out among blocks.
static int ways(Context& c, int rounds, bool early) {
    const u32 shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {25600, 5120}};
    for (auto& shape : shapes) {
        const u32 rows = shape[0], columns = shape[1];
        const u64 n = u64(rows) * columns;
        const int copies = std::max<int>(4, int(500e6 / (n * 1.5)));
        u16* w = make_weights(rows, columns, 3, 0);
        std::vector<Fast> fs = {pack(w, rows, columns)};
        for (int i = 1; i < copies; i++) fs.push_back(fs[0].copy());
        u16 *x = make_weights(128, columns, 9, 4), *y;
        CUDA(cudaMalloc(&y, u64(128) * rows * 2));
        for (u32 x_rows : {32u, 64u, 128u}) {
            std::vector<Contender> all;
            for (u32 parts = 1; parts <= WIDE_CLUSTER; parts *= 2)
                for (u32 strips = 1; strips <= WIDE_STRIPS; strips++) {
                    const u32 items = wide_items(strips_of(rows), parts, strips);
                    if (items > 3 * WIDE_CLUSTERS || items < WIDE_CLUSTERS / 2) continue;
                    const std::string name = "parts " + std::to_string(parts) + ", strips " +
                                             std::to_string(strips) + ", items " +
                                             std::to_string(items);
                    all.push_back({name, 0, [&, parts, strips](int k) {
                                       forced_parts = parts, forced_strips = strips;
                                       LinearLaunch l =
                                           launch_of(c, x, columns, x_rows, columns);
                                       add_matrix(l, fs[k], y, rows, nullptr);
                                       launch_wide(l, early, c.stream);
                                       forced_parts = forced_strips = 0;
                                   }});
                }
            measure(c, all, copies, rounds);
            for (auto& one : all)
                printf("%ux%u x %u %s: %.2f us\n", rows, columns, x_rows, one.name.c_str(),
                       median_of(one.seconds) * 1e6);
        }
        for (auto& one : fs) one.free();
        for (auto p : {w, x, y}) CUDA(cudaFree(p));
    }
    return 0;
}

// Times of 16 to 256 rows of x, or of `wanted` alone, to compare kernels of files.
static int sums(Context& c, int rounds, u32 wanted, bool early) {
    const u32 shapes[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
    for (u32 x_rows : {16u, 32u, 64u, 128u, 192u, 256u, 384u, 512u, 1024u}) {
        if (wanted && wanted != x_rows) continue;
        double sum = 0;
        printf("x %3u:", x_rows);
        for (auto& shape : shapes) {
            const u32 rows = shape[0], columns = shape[1];
            const u64 n = u64(rows) * columns;
            const int copies = std::max<int>(4, int(500e6 / (n * 1.5)));
            u16* w = make_weights(rows, columns, 3, 0);
            std::vector<Fast> fs = {pack(w, rows, columns)};
            for (int i = 1; i < copies; i++) fs.push_back(fs[0].copy());
            u16 *x = make_weights(x_rows, columns, 9, 4), *y;
            CUDA(cudaMalloc(&y, u64(x_rows) * rows * 2));
            std::vector<Contender> one = {{"", 0, [&](int k) {
                                               LinearLaunch l =
                                                   launch_of(c, x, columns, x_rows, columns);
                                               add_matrix(l, fs[k], y, rows, nullptr);
                                               launch_product(l, early, c.stream);
                                           }}};
            measure(c, one, copies, rounds);
            const double us = median_of(one[0].seconds) * 1e6;
            printf("  %ux%u %.2f", rows, columns, us);
            sum += us;
            for (auto& f : fs) f.free();
            for (auto p : {w, x, y}) CUDA(cudaFree(p));
        }
        printf("  sum %.1f us\n", sum);
    }
    return 0;
}
