// Bench, check and hostile streams of the tile kernel: see README.md.
//   tile_bench bench REPEATS MODE [WARPS..]    one Llama-3.1-8B block and 4096x4096 alone; medians,
//                                              cold L2
//   tile_bench edges                           the speed of matrices that are no whole tiles
//   tile_bench check                           odd shapes, every pattern, ranges
//   tile_bench encode                          bits a weight of the shapes of check; needs no GPU
//   tile_bench hostile COUNT SEED              changed bits, records and codebooks
// MODE: 0 N(0, 0.02^2); 1 a sigma for each row; 2 random bits; 3 as 0, one of 1000 random bits.
#include <random>
#include <tuple>

#include "../tile.cu"
using namespace df11;
using namespace tile;
#include "bench.hpp"
#ifdef WITH_NVCOMP
#include "nvcomp.hpp"
#endif
#include "tile_host.hpp"

// A tensor in the layout.
struct Stored {
    u64 rows, columns;
    bool linear;
    std::vector<TileRecord> index;
    std::vector<u8> bits, plane, codebook;
    std::vector<u32> table;
    u64 tiles_across, tiles, most_bytes = 0;
    u64 elements() const { return rows * columns; }
    u64 bytes() const {
        return index.size() * sizeof(TileRecord) + bits.size() + plane.size() + codebook.size();
    }
};
// The weights of a lane in a tile, unit by unit: f(row, column, count).
template <class F>
void lane_units(const Stored& s, u64 ty, u64 tx, u32 lane, F f) {
    const u32 wide = s.linear ? 32 : 4, across = s.linear ? TILE_WEIGHTS : 256;
    for (u32 group = 0; group < (s.linear ? 1 : GROUPS); group++)
        for (u32 unit = 0; unit < (s.linear ? UNITS : UNITS_A_GROUP); unit++) {
            u64 row = ty * 32 + group * 8 + lane / wide;
            u64 column = tx * across + unit * 8 * wide + 8 * (lane % wide);
            if (s.linear) row = 0;
            if (row < s.rows && column < s.columns)
                f(row, column, u32(std::min<u64>(8, s.columns - column)), unit);
        }
}
static u32 pair_of(const u16* w, u32 i, u32 count) {
    return exponent(w[i]) | exponent(w[i + 1 < count ? i + 1 : i]) << 8;
}

static Stored store(const Matrix& m, const Code& c, bool linear) {
    Stored s{linear ? 1 : m.rows, linear ? m.elements() : m.cols, linear};
    s.tiles_across =
        (s.columns + (linear ? TILE_WEIGHTS : 256) - 1) / (linear ? TILE_WEIGHTS : 256);
    const u64 down = linear ? 1 : (s.rows + 31) / 32;
    s.tiles = s.tiles_across * down;
    s.index.resize(s.tiles + 1);
    s.plane.resize(s.elements());
    s.table = c.table;
    s.codebook = c.codebook;
    struct Part {
        std::vector<u8> bytes;
        u64 bits = 0;
    };
    const u64 group = 64, groups = (s.tiles + group - 1) / group;
    std::vector<Part> parts(groups);
    parallel(groups, [&](size_t gi) {
        Part& part = parts[gi];
        BitWriter w{part.bytes};
        for (u64 tile = gi * group; tile < std::min(s.tiles, (gi + 1) * group); tile++) {
            const u64 ty = tile / s.tiles_across, tx = tile % s.tiles_across;
            u32 length[32];
            for (u32 l = 0; l < 32; l++) {
                length[l] = 0;
                lane_units(s, ty, tx, l, [&](u64 r, u64 col, u32 n, u32) {
                    for (u32 i = 0; i < n; i += 2)
                        length[l] += pair_code(c, pair_of(&m.w[r * s.columns + col], i, n)).length;
                });
            }
            u32 least = *std::min_element(length, length + 32),
                most = *std::max_element(length, length + 32), shift = 0;
            while ((most - least + (1u << shift) - 1) >> shift > 63) shift++;
            TileRecord& rec = s.index[tile];
            rec = {};
            rec.head = part.bits | u64(least) << 48 | u64(shift) << 61;
            for (u32 l = 0; l < 32; l++) {
                lane_units(s, ty, tx, l, [&](u64 r, u64 col, u32 n, u32) {
                    for (u32 i = 0; i < n; i += 2) {
                        PairCode x = pair_code(c, pair_of(&m.w[r * s.columns + col], i, n));
                        w.put_long(x.code, x.length);
                    }
                });
                u32 excess = (length[l] - least + (1u << shift) - 1) >> shift,
                    full = least + (excess << shift);
                w.put_long(0, full - length[l]);
                part.bits += full;
                u64 at = 6 * l;
                rec.excess[at >> 5] |= excess << (at & 31);
                if ((at & 31) > 26) rec.excess[(at >> 5) + 1] |= excess >> (32 - (at & 31));
            }
            // Each tile begins at a whole byte.
            const u32 padding = u32(-part.bits & 7);
            w.put(0, padding);
            part.bits += padding;
            u8* to = &s.plane[linear ? tx * TILE_WEIGHTS
                                     : ty * 32 * s.columns +
                                           tx * 256 * std::min<u64>(32, s.rows - ty * 32)];
            // pairs of units, in each of them lanes
            for (u32 g = 0; g < (linear ? 1 : GROUPS); g++)
                for (u32 two = 0; two < (linear ? UNITS : UNITS_A_GROUP); two += 2)
                    for (u32 l = 0; l < 32; l++)
                        lane_units(s, ty, tx, l, [&](u64 r, u64 col, u32 n, u32 unit) {
                            if ((linear || (r - ty * 32) / 8 == g) && unit / 2 * 2 == two)
                                for (u32 i = 0; i < n; i++)
                                    *to++ = sign_mantissa(m.w[r * s.columns + col + i]);
                        });
        }
    });
    u64 total = 0;
    for (auto& p : parts) total += p.bits;
    u64 at = 0;
    for (u64 gi = 0; gi < groups; gi++) {
        for (u64 tile = gi * group; tile < std::min(s.tiles, (gi + 1) * group); tile++)
            s.index[tile].head += at;
        s.bits.insert(s.bits.end(), parts[gi].bytes.begin(), parts[gi].bytes.end());
        at += parts[gi].bits;
    }
    s.bits.resize(std::max<u64>((total + 127) / 128, 1) * 16);
    s.index[s.tiles] = {};
    s.index[s.tiles].head = total;
    for (u64 t = 0; t < s.tiles; t++) {
        u64 a = (s.index[t].head & OFFSET_MASK) / 128 * 16;
        u64 b = ((s.index[t + 1].head & OFFSET_MASK) + 7) / 8;
        s.most_bytes = std::max(s.most_bytes, (b - a + 15) / 16 * 16);
    }
    return s;
}

static const void* decode_kernel() {
    return kernel_of("df11_tile_decode", (const void*)df11_tile_decode);
}

// A tensor on the device, every array an allocation of its exact size, so that memcheck sees each
// step outside.
struct Resident {
    const Stored* s;
    u8 *bits, *plane, *codebook;
    TileRecord* records;
    TileTable* table;
    explicit Resident(const Stored& x)
        : s(&x),
          bits(upload(x.bits)),
          plane(upload(x.plane)),
          codebook(upload(x.codebook)),
          records(upload(x.index)) {
        CUDA(cudaMalloc(&table, sizeof(TileTable)));
        build_table("df11_tile_tables", (const void*)df11_tile_tables,
                    {codebook, table, x.codebook.size()});
    }
    void free() {
        for (void* p : {(void*)bits, (void*)plane, (void*)codebook, (void*)records, (void*)table})
            CUDA(cudaFree(p));
    }
    // A range of elements, and of them some columns of a matrix so wide, which is the tensor's own
    // unless its tiles are 1 x 8192.
    TileTask task(u64 begin, u64 end, u64 columns, u64 column_begin, u64 column_end,
                  u16* out) const {
        TileTask t{};
        t.bits = bits;
        t.records = records;
        t.plane = plane;
        t.table = table;
        t.bits_bytes = s->bits.size();
        t.rows = s->elements() / columns;
        t.columns = columns;
        t.element_begin = begin;
        t.element_end = end;
        t.column_begin = column_begin;
        t.column_end = column_end;
        t.pitch = column_end - column_begin;
        t.output = out - (begin / columns * t.pitch + begin % columns);
        if (s->linear) {
            t.first_column = u32(begin / TILE_WEIGHTS);
            t.tiles = t.across = u32((end + TILE_WEIGHTS - 1) / TILE_WEIGHTS) - t.first_column;
            return t;
        }
        const u64 strip = TILE_ROWS * columns;
        t.first_row = u32(begin / strip);
        t.first_column = u32(column_begin / TILE_COLUMNS);
        t.across = u32((column_end + TILE_COLUMNS - 1) / TILE_COLUMNS) - t.first_column;
        t.tiles = (u32((end + strip - 1) / strip) - t.first_row) * t.across;
        t.tiles_across = u32(s->tiles_across);
        return t;
    }
    TileTask task(u64 begin, u64 end, u16* out) const {
        return task(begin, end, s->columns, 0, s->columns, out);
    }
    TileTask task(u16* out) const { return task(0, s->elements(), out); }
};
static u32 shared_limit() {
    int n;
    CUDA(cudaDeviceGetAttribute(&n, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    cudaFuncAttributes a;
    CUDA(cudaFuncGetAttributes(&a, decode_kernel()));
    return u32(n - a.sharedSizeBytes);
}
struct Launch {
    std::vector<TileTask> tasks;
    TileTask* device = nullptr;
    u32 total = 0, stage, warps, blocks;
    u32* status;
    explicit Launch(u64 most_bytes, u32 warps_wanted = TILE_GOOD_WARPS) {
        stage = u32((most_bytes + STAGE_BEFORE + STAGE_AFTER + 127) / 128 * 128);
        warps = std::max(1u, std::min(warps_wanted, shared_limit() / stage));
        CUDA(cudaMalloc(&status, 4));
        const void* kernel = decode_kernel();
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  shared_limit()));
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
        int n;
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, warps * LANES,
                                                           warps * stage));
        blocks = u32(n) * sm_count();
    }
    void add(TileTask t) {
        t.first_unit = total;
        total += t.tiles;
        tasks.push_back(t);
    }
    void prepare() {
        device = upload(tasks);
        CUDA(cudaMemset(status, 0, 4));
    }
    void start() {
        u32 count = u32(tasks.size());
        u64 units = total, output = 0;  // the tasks' outputs are addresses
        void* arguments[] = {&device, &count, &units, &status, &output};
        CUDA(cudaLaunchKernel(decode_kernel(), std::min(blocks, total), warps * LANES, arguments,
                              warps * stage, nullptr));
    }
    u32 result() {
        CUDA(cudaDeviceSynchronize());
        u32 s;
        CUDA(cudaMemcpy(&s, status, 4, cudaMemcpyDeviceToHost));
        return s;
    }
    void free() {
        CUDA(cudaFree(status));
        if (device) CUDA(cudaFree(device));
    }
};

static void* flush_buffer;
static const size_t FLUSH = 512 << 20;
template <class F>
double once(F f) {
    static cudaEvent_t a = nullptr, b;
    if (!a) {
        CUDA(cudaEventCreate(&a));
        CUDA(cudaEventCreate(&b));
    }
    CUDA(cudaMemsetAsync(flush_buffer, 1, FLUSH));
    CUDA(cudaEventRecord(a));
    f();
    CUDA(cudaEventRecord(b));
    CUDA(cudaEventSynchronize(b));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, a, b));
    return ms / 1e3;
}
static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
// Matrices whose edges are not whole tiles.
static void bench_edges(int reps) {
    for (auto [rows, columns, linear] : {std::tuple<u32, u32, bool>{4096, 4096, false},
                                         {4096, 3968, false},
                                         {4096, 1408, false},
                                         {4096, 896, false},
                                         {50257, 768, false},
                                         {4096, 4096, true},
                                         {4095, 4095, true}}) {
        Matrix m = make_matrix(rows, columns, 5, 0);
        Stored s = store(m, make_code(m, TABLE_BITS), linear);
        Resident r(s);
        u16* out;
        CUDA(cudaMalloc(&out, m.elements() * 2));
        Launch l(s.most_bytes);
        l.add(r.task(out));
        l.prepare();
        std::vector<double> t;
        for (int i = 0; i < reps; i++) t.push_back(once([&] { l.start(); }));
        std::vector<u16> back(m.elements());
        u32 status = l.result();
        CUDA(cudaMemcpy(back.data(), out, back.size() * 2, cudaMemcpyDeviceToHost));
        printf("%u x %u %s: %.4f bits, %.1f us, %.0f GB/s, %s status %u\n", rows, columns,
               linear ? "linear" : "2-D", s.bytes() * 8.0 / m.elements(), median(t) * 1e6,
               m.elements() * 2 / median(t) / 1e9, back == m.w ? "right" : "WRONG", status);
        r.free();
        l.free();
        CUDA(cudaFree(out));
    }
}

// The share of one of two GPUs that split every matrix by its columns, or by its rows.
static int bench_columns(const std::vector<Resident>& residents, const std::vector<Matrix>& ms,
                         const u16* original, u16* out, u64 most, u32 warps, int reps) {
    Launch columns(most, warps), rows(most, warps);
    u64 half = 0, wrong = 0;
    for (size_t i = 0; i < residents.size(); half += ms[i++].elements() / 2) {
        const u64 width = ms[i].cols, elements = ms[i].elements();
        columns.add(residents[i].task(width / 2, elements, width, width / 2, width, out + half));
        rows.add(residents[i].task(elements / 2, elements, out + half));
    }
    columns.prepare();
    rows.prepare();
    std::vector<double> c, r, copy;
    for (int i = 0; i < reps + 2; i++) {
        double x = once([&] { columns.start(); }), y = once([&] { rows.start(); }),
               z = once([&] {
                   CUDA(cudaMemcpyAsync(out, original, half * 2, cudaMemcpyDeviceToDevice));
               });
        if (i > 1) c.push_back(x), r.push_back(y), copy.push_back(z);
    }
    columns.start();
    u32 status = columns.result() | rows.result();
    std::vector<u16> back(half);
    CUDA(cudaMemcpy(back.data(), out, half * 2, cudaMemcpyDeviceToHost));
    u64 at = 0;
    for (auto& m : ms)
        for (u64 row = 0; row < m.rows; row++, at += m.cols / 2)
            wrong += memcmp(&back[at], &m.w[row * m.cols + m.cols / 2], m.cols) != 0;
    printf(
        "    half of all columns: %6.1f us %5.0f GB/s %.4f of copy; half of all rows %.4f | wrong "
        "rows %llu status %u\n",
        median(c) * 1e6, half * 2 / median(c) / 1e9, median(copy) / median(c) / 2,
        median(copy) / median(r) / 2, (unsigned long long)wrong, status);
    columns.free();
    rows.free();
    return wrong || status;
}

static int bench(int reps, int mode, std::vector<u32> warps) {
    const u32 shapes[7][2] = {{4096, 4096},  {1024, 4096},  {1024, 4096}, {4096, 4096},
                              {14336, 4096}, {14336, 4096}, {4096, 14336}};
    std::vector<Stored> stored;
    u64 elements = 0, bytes = 0, most = 0;
    u16 *original, *out;
    std::vector<Matrix> ms;
    double book = 0;
    for (int i = 0; i < 7; i++) {
        ms.push_back(make_matrix(shapes[i][0], shapes[i][1], 77 + i, mode));
        elements += ms.back().elements();
    }
    for (auto& m : ms) {
        Code c = make_code(m, TABLE_BITS);
        stored.push_back(store(m, c, false));
        bytes += stored.back().bytes();
        book += c.codebook.size();
        most = std::max(most, stored.back().most_bytes);
    }
    CUDA(cudaMalloc(&flush_buffer, FLUSH));
    CUDA(cudaMalloc(&original, elements * 2));
    CUDA(cudaMalloc(&out, elements * 2));
    u64 at = 0;
    std::vector<Resident> residents;
    for (size_t i = 0; i < 7; i++) {
        CUDA(cudaMemcpy(original + at, ms[i].w.data(), ms[i].elements() * 2,
                        cudaMemcpyHostToDevice));
        at += ms[i].elements();
        residents.emplace_back(stored[i]);
    }
#ifdef WITH_NVCOMP
    Nvcomp peer(original, out, elements * 2);
    CUDA(cudaMemset(out, 0xA5, elements * 2));
    peer.start();
    printf("nvCOMP %d.%d.%d: %.4f bits a weight, %.2f %% of BF16, wrong %llu\n", NVCOMP_VER_MAJOR,
           NVCOMP_VER_MINOR, NVCOMP_VER_PATCH, peer.bytes * 8.0 / elements,
           50.0 * peer.bytes / elements, wrong_words(out, original, elements));
#endif
    printf("mode %d: %.4f bits a weight (codebooks %.5f), largest tile %llu bytes\n", mode,
           bytes * 8.0 / elements, book * 8 / elements, (unsigned long long)most);
    int failed = 0;
    if (warps.empty()) warps.push_back(TILE_GOOD_WARPS);
    for (u32 w : warps) {
        Launch block(most, w), alone(most, w);
        at = 0;
        for (auto& r : residents) {
            block.add(r.task(out + at));
            at += r.s->elements();
        }
        alone.add(residents[0].task(out));
        block.prepare();
        alone.prepare();
        CUDA(cudaMemset(out, 0xA5, elements * 2));
        block.start();
        u32 status = block.result();
        unsigned long long wrong = wrong_words(out, original, elements);
        CUDA(cudaMemset(out, 0xA5, elements * 2));
        alone.start();
        status |= alone.result();
        wrong += wrong_words(out, original, ms[0].elements());
        std::vector<double> c, b, a, n;
        for (int i = 0; i < reps + 2; i++) {
            double x = once([&] {
                CUDA(cudaMemcpyAsync(out, original, elements * 2, cudaMemcpyDeviceToDevice));
            }),
                   y = once([&] { block.start(); }), z = once([&] { alone.start(); });
            if (i > 1) c.push_back(x), b.push_back(y), a.push_back(z);
#ifdef WITH_NVCOMP
            double peers = once([&] { peer.start(); });
            if (i > 1) n.push_back(peers);
#endif
        }
        double cr = elements * 4 / median(c);
        double br = elements * 2 / median(b);
        double ar = ms[0].elements() * 2 / median(a);
        printf(
            "T%u prefetch %d: warps %2u x %u stage %u  copy %4.0f  block %6.1f us %5.0f GB/s %.4f "
            "| 4096x4096 %5.1f "
            "us %5.0f GB/s %.4f | wrong %llu status %u\n",
            TABLE_BITS, TILE_PREFETCH, block.warps, block.blocks / sm_count(), block.stage,
            cr / 1e9, median(b) * 1e6, br / 1e9, br / cr, median(a) * 1e6, ar / 1e9, ar / cr, wrong,
            status);
        failed |= bench_columns(residents, ms, original, out, most, w, reps);
        if (!n.empty()) {
            double nr = elements * 2 / median(n);
            printf(
                "    nvCOMP in the same run: block %6.1f us %5.0f GB/s %.4f of copy; this kernel "
                "%.3f times as fast\n",
                median(n) * 1e6, nr / 1e9, nr / cr, br / nr);
        }
        fflush(stdout);
        failed |= wrong || status;
        block.free();
        alone.free();
    }
    return failed;
}

struct Case {
    Matrix m;
    bool linear;
};
static std::vector<Case> cases() {
    std::vector<Case> all;
    u64 seed = 1;
    auto add = [&](u32 r, u32 c, int mode, bool linear) {
        all.push_back({make_matrix(r, c, seed++, mode), linear});
    };
    for (int mode : {0, 2, 3}) {
        for (auto [r, c] : {std::pair<u32, u32>{32, 256},
                            {64, 512},
                            {1, 256},
                            {33, 264},
                            {31, 248},
                            {40, 8},
                            {7, 1000},
                            {96, 384},
                            {129, 776},
                            {8, 520},
                            {100, 16},
                            {32, 4096}})
            add(r, c, mode, false);
        for (u32 n : {1u, 2u, 7u, 8u, 9u, 255u, 256u, 257u, 511u, 513u, 8191u, 8192u, 8193u, 8448u,
                      16384u, 20001u})
            add(1, n, mode, true);
        for (auto [r, c] : {std::pair<u32, u32>{33, 77}, {300, 64}, {5000, 3}, {9, 2000}})
            add(r, c, mode, true);
    }
    add(64, 256, 0, false);
    for (auto& w : all.back().m.w) w = 0x3F80;  // one pair
    add(256, 256, 0, false);
    for (size_t i = 0; i < 65536; i++) all.back().m.w[i] = u16(i);  // every pattern
    add(1, 65536, 0, true);
    for (size_t i = 0; i < 65536; i++) all.back().m.w[i] = u16(i * 40503);
    add(512, 512, 0, false);
    for (auto& w : all.back().m.w)
        w = u16((w & 0x807F) | (120 + __builtin_ctz(w * 2654435761u | 1 << 20))
                                   << 7);  // codes of many lengths
    return all;
}
// What is decoded: a range of elements, and of them some columns of a matrix.
struct Part {
    u64 begin, end, columns, column_begin, column_end;
    std::vector<u16> of(const Matrix& m) const {
        std::vector<u16> wanted;
        for (u64 i = begin; i < end; i++)
            if (i % columns >= column_begin && i % columns < column_end) wanted.push_back(m.w[i]);
        return wanted;
    }
};
// Decodes a part between guards of poison.
static bool decodes(const Resident& r, const Matrix& m, const Part& p, u32 warps, u32* status_out,
                    bool guard = true) {
    const std::vector<u16> wanted = p.of(m);
    const size_t count = wanted.size(), around = guard ? 128 : 0;
    u16* device;
    CUDA(cudaMalloc(&device, (count + 2 * around) * 2));
    CUDA(cudaMemset(device, 0xA5, (count + 2 * around) * 2));
    Launch l(r.s->most_bytes, warps);
    l.add(r.task(p.begin, p.end, p.columns, p.column_begin, p.column_end, device + around));
    l.prepare();
    l.start();
    u32 status = l.result();
    l.free();
    std::vector<u16> out(count + 2 * around);
    CUDA(cudaMemcpy(out.data(), device, out.size() * 2, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(device));
    bool good = true;
    for (size_t i = 0; i < around; i++)
        good &= out[i] == 0xA5A5 && out[out.size() - 1 - i] == 0xA5A5;
    const bool same = !memcmp(&out[around], wanted.data(), count * 2);
    if (status_out) {
        *status_out = status;
        return good && same;
    }
    return good && same && !status;
}
// Whether the device derives the table that the host does.
static bool same_table(const Resident& r) {
    std::vector<u32> entries(TABLE_ENTRIES);
    CUDA(cudaMemcpy(entries.data(), r.table, sizeof(TileTable), cudaMemcpyDeviceToHost));
    return entries == r.s->table;
}
// All of it; whole rows; any range, from a unit on or from anywhere; columns of rows, at tiles, at
// units or anywhere.
static Part part(int kind, const Stored& s, const Matrix& m, std::mt19937_64& random) {
    Part p = {0, s.elements(), s.columns, 0, s.columns};
    const u64 row = m.cols;
    const u64 first = random() % m.rows;
    const u64 rows = 1 + random() % (m.rows - first);
    if (kind == 1 || kind == 2) {
        p.begin = first * row;
        p.end = p.begin + rows * row;
    }
    if (kind == 3 || kind == 4) {
        p.begin = random() % s.elements();
        p.end = p.begin + 1 + random() % (s.elements() - p.begin);
    }
    if (kind == 3) p.begin -= p.begin % 8;
    if (kind < 5 || (s.linear && m.rows == 1)) return p;
    const u64 unit = kind == 5 ? TILE_COLUMNS : kind == 6 ? UNIT : 1;
    p.columns = row;
    p.column_begin = random() % row / unit * unit;
    p.column_end = std::min(
        row, p.column_begin + (1 + random() % ((row - p.column_begin + unit - 1) / unit)) * unit);
    p.begin = first * row + p.column_begin;
    p.end = (first + rows - 1) * row + p.column_end;
    return p;
}
static int check() {
    size_t tests = 0, failures = 0;
    std::mt19937_64 random(3);
    std::vector<Case> all = cases();
    std::vector<Stored> stored;
    std::vector<Resident> residents;
    stored.reserve(all.size());
    for (auto& c : all) {
        stored.push_back(store(c.m, make_code(c.m, TABLE_BITS), c.linear));
        const Stored& s = stored.back();
        residents.emplace_back(s);
        tests++;
        failures += !same_table(residents.back());
        for (int i = 0; i < 9; i++) {
            const Part p = part(i, s, c.m, random);
            tests++;
            if (!decodes(residents.back(), c.m, p, i == 1 ? 2 : TILE_GOOD_WARPS, nullptr) &&
                failures++ < 20)
                printf("FAIL %llu x %llu linear %d: %llu..%llu, columns %llu..%llu of %llu\n",
                       s.rows, s.columns, s.linear, p.begin, p.end, p.column_begin, p.column_end,
                       p.columns);
        }
    }
    u64 size = 0, most = 0;
    for (auto& s : stored) {
        size += (s.elements() + 127) / 128 * 128;
        most = std::max(most, s.most_bytes);
    }  // all in one launch
    u16* device;
    CUDA(cudaMalloc(&device, size * 2));
    CUDA(cudaMemset(device, 0xA5, size * 2));
    Launch l(most);
    u64 at = 0;
    for (auto& r : residents) {
        l.add(r.task(device + at));
        at += (r.s->elements() + 127) / 128 * 128;
    }
    l.prepare();
    l.start();
    bool good = l.result() == 0;
    std::vector<u16> out(size);
    CUDA(cudaMemcpy(out.data(), device, size * 2, cudaMemcpyDeviceToHost));
    at = 0;
    for (size_t i = 0; i < all.size(); i++) {
        good &= !memcmp(&out[at], all[i].m.w.data(), all[i].m.w.size() * 2);
        at += (all[i].m.w.size() + 127) / 128 * 128;
    }
    tests++;
    failures += !good;
    printf("check: %zu decodings of %zu tensors, %zu wrong\n", tests, all.size(), failures);
    return failures != 0;
}
static int hostile(int count, u64 seed) {
    std::mt19937_64 random(seed);
    std::vector<Case> all = cases();
    size_t refused = 0, same = 0, other = 0, missed = 0;
    std::vector<Stored> stored;
    for (auto& c : all) stored.push_back(store(c.m, make_code(c.m, TABLE_BITS), c.linear));
    for (int i = 0; i < count; i++) {
        size_t which = random() % all.size();
        Stored s = stored[which];
        const int kind = random() % 4;
        auto flip = [&](u8* p, size_t n) {
            if (!n) return;
            u64 changes = 1 + random() % 4;
            switch (random() % 3) {
                case 0:
                    while (changes--) p[random() % n] ^= 1 << random() % 8;
                    break;
                case 1:
                    while (changes--) p[random() % n] = u8(random());
                    break;
                default:
                    for (size_t k = 0; k < n; k++) p[k] = u8(random());
            }
        };
        if (kind == 0 || kind == 3) flip(s.bits.data(), s.bits.size());
        if (kind == 1 || kind == 3) flip((u8*)s.index.data(), s.index.size() * sizeof(TileRecord));
        if (kind == 2 || kind == 3) {
            if (random() % 2)
                s.codebook = stored[random() % all.size()].codebook;
            else
                flip(s.codebook.data(), s.codebook.size());
        }
        Resident r(s);
        u32 status;
        const Part p = part(random() % 2 ? 0 : random() % 9, s, all[which].m, random);
        bool equal = decodes(r, all[which].m, p, 1 + random() % TILE_GOOD_WARPS, &status, false);
        if (status)
            refused++;
        else if (equal)
            same++;
        else {
            other++;
            missed += kind == 1 && p.of(all[which].m).size() == s.elements();
        }
        r.free();
    }
    printf(
        "hostile: %d streams: %zu refused, %zu decoded right, %zu another valid stream, %zu of "
        "them all of a tensor with changed records\n",
        count, refused, same, other, missed);
    return missed != 0;
}
int main(int argc, char** argv) {
    if (argc > 2 && std::string(argv[1]) == "--kernels") {
        load_kernels(argv[2], "df11_tile_decode");
        argc -= 2;
        argv += 2;
    }
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "bench") {
        std::vector<u32> w;
        for (int i = 4; i < argc; i++) w.push_back(atoi(argv[i]));
        return bench(atoi(argv[2]), atoi(argv[3]), w);
    }
    if (mode == "check") return check();
    if (mode == "edges") {
        CUDA(cudaMalloc(&flush_buffer, FLUSH));
        bench_edges(15);
        return 0;
    }
    if (mode == "encode") {
        for (auto& c : cases()) {
            Stored s = store(c.m, make_code(c.m, TABLE_BITS), c.linear);
            printf("%llu x %llu %d: %.3f\n", (unsigned long long)s.rows,
                   (unsigned long long)s.columns, s.linear, s.bytes() * 8.0 / s.elements());
        }
        return 0;
    }
    if (mode == "hostile") return hostile(atoi(argv[2]), strtoull(argv[3], nullptr, 10));
    return 2;
}
