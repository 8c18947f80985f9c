// Bench, check and hostile streams of the tile kernel: see README.md.
//   tile_bench bench REPEATS MODE [WARPS..]    one Llama-3.1-8B block and 4096x4096 alone; medians,
//                                              cold L2
//   tile_bench edges                           the speed of matrices that are not whole tiles
//   tile_bench check                           odd shapes, every pattern, ranges
//   tile_bench hostile COUNT SEED              changed bits, records and codebooks
// MODE: 0 N(0, 0.02^2); 1 a sigma for each row; 2 random bits; 3 like 0, but one of 1000 of any
// size.
#include <tuple>

#include "../tile.cu"
using namespace df11;
using namespace tile;
#include "bench.hpp"
#ifdef WITH_NVCOMP
#include "nvcomp.hpp"
#endif
#include "tiles.hpp"

// A range of elements, restricted to some columns of a matrix with `columns` columns. These are the
// tensor's own unless its tiles are 1 x 8192.
static TileTask task_of(const Tiles& tiles, u64 begin, u64 end, u64 columns, u64 column_begin,
                        u64 column_end, u16* out) {
    TileTask t{};
    t.bits = tiles.bits;
    t.records = tiles.records;
    t.plane = tiles.plane;
    t.table = tiles.table;
    t.bits_bytes = tiles.bits_bytes;
    t.rows = tiles.elements() / columns;
    t.columns = columns;
    t.element_begin = begin;
    t.element_end = end;
    t.column_begin = column_begin;
    t.column_end = column_end;
    t.pitch = column_end - column_begin;
    t.output = out - (begin / columns * t.pitch + begin % columns);
    if (tiles.linear) {
        t.first_column = u32(begin / TILE_WEIGHTS);
        t.tiles = t.across = u32((end + TILE_WEIGHTS - 1) / TILE_WEIGHTS) - t.first_column;
        return t;
    }
    const u64 strip = TILE_ROWS * columns;
    t.first_row = u32(begin / strip);
    t.first_column = u32(column_begin / TILE_COLUMNS);
    t.across = u32((column_end + TILE_COLUMNS - 1) / TILE_COLUMNS) - t.first_column;
    t.tiles = (u32((end + strip - 1) / strip) - t.first_row) * t.across;
    t.tiles_across = tiles.across();
    return t;
}
static TileTask task_of(const Tiles& t, u64 begin, u64 end, u16* out) {
    return task_of(t, begin, end, t.columns, 0, t.columns, out);
}
static TileTask task_of(const Tiles& t, u16* out) { return task_of(t, 0, t.elements(), out); }

struct Launch : Tasks<TileTask> {
    const void* kernel = KERNEL(df11_tile_decode);
    u32 stage, warps, blocks;
    explicit Launch(u32 staged, u32 warps_wanted = TILE_GOOD_WARPS) {
        stage = (staged + STAGE_BEFORE + STAGE_AFTER + 127) / 128 * 128;
        warps = std::max(1u, std::min(warps_wanted, max_shared(kernel) / stage));
        give_shared_memory(kernel);
        int n;
        CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, warps * LANES,
                                                           warps * stage));
        blocks = u32(n) * sm_count();
    }
    void add(TileTask t) { Tasks::add(t, t.tiles); }
    void start() { Tasks::start(kernel, blocks, warps, warps * stage); }
};

// Measures matrices whose edges are not whole tiles.
static void bench_edges(int reps) {
    for (auto [rows, columns, linear] : {std::tuple<u32, u32, bool>{4096, 4096, false},
                                         {4096, 3968, false},
                                         {4096, 1408, false},
                                         {4096, 896, false},
                                         {50257, 768, false},
                                         {4096, 4096, true},
                                         {4095, 4095, true}}) {
        const Scope scope;
        const u16* w = make_weights(rows, columns, 5, 0);
        const Tiles tiles = store_tiles(w, rows, columns, linear);
        const u64 n = tiles.elements();
        u16* out = allocate<u16>(n);
        Launch l(tiles.staged);
        l.add(task_of(tiles, out));
        std::vector<Contender> one = {{"", 0, [&](int) { l.start(); }}};
        measure_cold(one, reps, 0);
        const double seconds = one[0].median();
        const u32 status = l.result();
        printf("%u x %u %s: %.4f bits, %.1f us, %.0f GB/s, %s status %u\n", rows, columns,
               linear ? "linear" : "2-D", tiles.bytes() * 8.0 / n, seconds * 1e6,
               n * 2 / seconds / 1e9, same_bits(out, w, n) ? "right" : "WRONG", status);
    }
}

// Measures one GPU's share if two GPUs split each matrix by its columns, or by its rows.
static int bench_columns(const std::vector<Tiles>& all, const u16* original, u16* out, u32 staged,
                         u32 warps, int reps) {
    const Scope scope;
    Launch columns(staged, warps), rows(staged, warps);
    u64 elements = 0, half = 0;
    for (auto& t : all) elements += t.elements();
    u16* expected = allocate<u16>(elements / 2);
    for (auto& t : all) {
        const u64 width = t.columns, n = t.elements();
        columns.add(task_of(t, width / 2, n, width, width / 2, width, out + half));
        rows.add(task_of(t, n / 2, n, out + half));
        CUDA(cudaMemcpy2D(expected + half, width, original + 2 * half + width / 2, 2 * width, width,
                          t.rows, cudaMemcpyDeviceToDevice));
        half += n / 2;
    }
    std::vector<Contender> times = {
        {"", 0, [&](int) { columns.start(); }},
        {"", 0, [&](int) { rows.start(); }},
        {"", 0,
         [&](int) { CUDA(cudaMemcpyAsync(out, original, half * 2, cudaMemcpyDeviceToDevice)); }}};
    measure_cold(times, reps, 2);
    const double c = times[0].median(), r = times[1].median(), copy = times[2].median();
    columns.start();
    const u32 status = columns.result() | rows.result();
    const u64 wrong = differences(out, expected, half);
    printf(
        "    half of all columns: %6.1f us %5.0f GB/s %.4f of copy; half of all rows %.4f | wrong "
        "%llu status %u\n",
        c * 1e6, half * 2 / c / 1e9, copy / c / 2, copy / r / 2, wrong, status);
    return wrong || status;
}

static int bench(int reps, int mode, std::vector<u32> warps) {
    const u32 shapes[7][2] = {{4096, 4096},  {1024, 4096},  {1024, 4096}, {4096, 4096},
                              {14336, 4096}, {14336, 4096}, {4096, 14336}};
    std::vector<Tiles> all;
    u64 elements = 0, bytes = 0, book = 0;
    u32 staged = 0;
    for (auto& s : shapes) elements += u64(s[0]) * s[1];
    u16 *original = allocate<u16>(elements), *out = allocate<u16>(elements), *to = original;
    for (int i = 0; i < 7; i++) {
        const u16* w = make_weights(shapes[i][0], shapes[i][1], 77 + i, mode);
        const Tiles t = store_tiles(w, shapes[i][0], shapes[i][1]);
        CUDA(cudaMemcpy(to, w, t.elements() * 2, cudaMemcpyDeviceToDevice));
        to += t.elements(), bytes += t.bytes(), book += t.codebook_bytes;
        staged = std::max(staged, t.staged);
        all.push_back(t);
    }
#ifdef WITH_NVCOMP
    Nvcomp peer(original, out, elements * 2);
    CUDA(cudaMemset(out, 0xA5, elements * 2));
    peer.start();
    printf("nvCOMP %d.%d.%d: %.4f bits a weight, %.2f %% of BF16, wrong %llu\n", NVCOMP_VER_MAJOR,
           NVCOMP_VER_MINOR, NVCOMP_VER_PATCH, peer.bytes * 8.0 / elements,
           50.0 * peer.bytes / elements, differences(out, original, elements));
#endif
    printf("mode %d: %.4f bits a weight (codebooks %.5f), largest tile %u bytes\n", mode,
           bytes * 8.0 / elements, book * 8.0 / elements, staged);
    int failed = 0;
    if (warps.empty()) warps.push_back(TILE_GOOD_WARPS);
    for (u32 w : warps) {
        const Scope scope;
        Launch block(staged, w), alone(staged, w);
        const u64 first = all[0].elements();
        to = out;
        for (auto& t : all) block.add(task_of(t, to)), to += t.elements();
        alone.add(task_of(all[0], out));
        u64 wrong = 0;
        for (auto [launch, count] : {std::pair{&block, elements}, {&alone, first}}) {
            CUDA(cudaMemset(out, 0xA5, elements * 2));
            launch->start();
            wrong += differences(out, original, count);
        }
        const u32 status = block.result() | alone.result();
        std::vector<Contender> times = {
            {"", 0,
             [&](int) {
                 CUDA(cudaMemcpyAsync(out, original, elements * 2, cudaMemcpyDeviceToDevice));
             }},
            {"", 0, [&](int) { block.start(); }},
            {"", 0, [&](int) { alone.start(); }}};
#ifdef WITH_NVCOMP
        times.push_back({"", 0, [&](int) { peer.start(); }});
#endif
        measure_cold(times, reps, 2);
        const double c = times[0].median(), b = times[1].median(), a = times[2].median(),
                     cr = elements * 4 / c, br = elements * 2 / b, ar = first * 2 / a;
        printf(
            "T%u prefetch %d: warps %2u x %u stage %u  copy %4.0f  block %6.1f us %5.0f GB/s %.4f "
            "| 4096x4096 %5.1f "
            "us %5.0f GB/s %.4f | wrong %llu status %u\n",
            TABLE_BITS, PREFETCH<Bf16>, block.warps, block.blocks / sm_count(), block.stage,
            cr / 1e9, b * 1e6, br / 1e9, br / cr, a * 1e6, ar / 1e9, ar / cr, wrong, status);
        failed |= bench_columns(all, original, out, staged, w, reps);
        if (times.size() > 3) {
            const double n = times[3].median(), nr = elements * 2 / n;
            printf(
                "    nvCOMP in the same run: block %6.1f us %5.0f GB/s %.4f of copy; this kernel "
                "%.3f times as fast\n",
                n * 1e6, nr / 1e9, nr / cr, br / nr);
        }
        fflush(stdout);
        failed |= wrong || status;
    }
    return failed;
}

// Weights, and the same weights in tiles.
struct Case {
    u32 rows, columns;
    std::vector<u16> w;
    Tiles tiles;
    Case(u32 r, u32 c, std::vector<u16> weights, bool linear)
        : rows(r), columns(c), w(std::move(weights)), tiles(store_tiles(upload(w), r, c, linear)) {}
};
static std::vector<Case> cases() {
    std::vector<Case> all;
    u64 seed = 1;
    auto weights = [&](u32 r, u32 c, int mode) {
        return from_device(make_weights(r, c, seed++, mode), u64(r) * c);
    };
    auto add = [&](u32 r, u32 c, int mode, bool linear) {
        all.emplace_back(r, c, weights(r, c, mode), linear);
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
    all.emplace_back(64, 256, std::vector<u16>(64 * 256, 0x3F80), false);  // one pair
    // Every pattern, in order and shuffled.
    std::vector<u16> w(65536);
    for (u32 i = 0; i < 65536; i++) w[i] = u16(i);
    all.emplace_back(256, 256, w, false);
    for (u32 i = 0; i < 65536; i++) w[i] = u16(i * 40503);
    all.emplace_back(1, 65536, w, true);
    // Codes of many lengths.
    w = weights(512, 512, 0);
    for (auto& one : w)
        one = u16((one & 0x807F) | (120 + __builtin_ctz(one * 2654435761u | 1 << 20)) << 7);
    all.emplace_back(512, 512, w, false);
    return all;
}
// A part to decode: a range of elements, restricted to some columns of a matrix.
struct Part {
    u64 begin, end, columns, column_begin, column_end;
    std::vector<u16> of(const Case& c) const {
        std::vector<u16> wanted;
        for (u64 i = begin; i < end; i++)
            if (i % columns >= column_begin && i % columns < column_end) wanted.push_back(c.w[i]);
        return wanted;
    }
};
struct Decoded {
    bool right;  // the weights are right, and nothing else was written
    u32 status;
};
static Decoded decode(const Tiles& t, const Part& p, const std::vector<u16>& wanted, u32 warps,
                      u64 guard) {
    const Scope scope;
    const Output output(wanted.size(), guard);
    Launch l(t.staged, warps);
    l.add(task_of(t, p.begin, p.end, p.columns, p.column_begin, p.column_end, output.begin()));
    l.start();
    const u32 status = l.result();
    return {output.holds(wanted.data()), status};
}
// All elements; whole rows; any range, from a unit on or from anywhere; columns of rows, at tiles,
// at units or anywhere.
static Part part(int kind, const Case& c, std::mt19937_64& random) {
    const u64 elements = c.w.size(), row = c.columns;
    Part p = {0, elements, c.tiles.columns, 0, c.tiles.columns};
    const u64 first = random() % c.rows;
    const u64 rows = 1 + random() % (c.rows - first);
    if (kind == 1 || kind == 2) {
        p.begin = first * row;
        p.end = p.begin + rows * row;
    }
    if (kind == 3 || kind == 4) {
        p.begin = random() % elements;
        p.end = p.begin + 1 + random() % (elements - p.begin);
    }
    if (kind == 3) p.begin -= p.begin % 8;
    if (kind < 5 || (c.tiles.linear && c.rows == 1)) return p;
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
    auto expect = [&](bool right, const char* what, const Case* c) {
        tests++;
        if (!right && failures++ < 20)
            printf("FAIL %s, %u x %u linear %d\n", what, c ? c->rows : 0, c ? c->columns : 0,
                   c && c->tiles.linear);
    };
    std::mt19937_64 random(3);
    const std::vector<Case> all = cases();
    u32 staged = 0;
    for (auto& c : all) {
        const auto* entries = reinterpret_cast<const u32*>(c.tiles.table);
        expect(from_device(entries, TABLE_ENTRIES) == c.tiles.entries, "the table", &c);
        staged = std::max(staged, c.tiles.staged);
        for (int i = 0; i < 9; i++) {
            const Part p = part(i, c, random);
            const Decoded d = decode(c.tiles, p, p.of(c), i == 1 ? 2 : TILE_GOOD_WARPS, 128);
            const std::string range = std::to_string(p.begin) + ".." + std::to_string(p.end) +
                                      ", columns " + std::to_string(p.column_begin) + ".." +
                                      std::to_string(p.column_end);
            expect(d.right && !d.status, range.c_str(), &c);
        }
    }
    Launch l(staged);
    std::vector<Output> outputs;
    for (auto& c : all) {
        outputs.emplace_back(c.w.size());
        l.add(task_of(c.tiles, outputs.back().begin()));
    }
    l.start();
    bool good = l.result() == 0;
    for (size_t i = 0; i < all.size(); i++) good &= outputs[i].holds(all[i].w.data());
    expect(good, "all in one launch", nullptr);
    printf("check: %zu decodings of %zu tensors, %zu wrong\n", tests, all.size(), failures);
    return failures != 0;
}
static int hostile(int count, u64 seed) {
    std::mt19937_64 random(seed);
    const std::vector<Case> all = cases();
    size_t refused = 0, same = 0, other = 0, missed = 0;
    for (int i = 0; i < count; i++) {
        const Scope scope;
        const Case& c = all[random() % all.size()];
        Tiles t = c.tiles.copy();
        const int kind = random() % 4;
        if (kind == 0 || kind == 3) flip_on_device(t.bits, t.bits_bytes, random);
        if (kind == 1 || kind == 3) flip_on_device(t.records, t.tiles() + 1, random);
        if (kind == 2 || kind == 3) {
            if (random() % 2) {
                const Tiles& from = all[random() % all.size()].tiles;
                t.codebook = from.codebook, t.codebook_bytes = from.codebook_bytes;
            } else {
                flip_on_device(t.codebook, t.codebook_bytes, random);
            }
        }
        t.make_table();
        const Part p = part(random() % 2 ? 0 : random() % 9, c, random);
        const std::vector<u16> wanted = p.of(c);
        const Decoded d = decode(t, p, wanted, 1 + random() % TILE_GOOD_WARPS, 0);
        refused += d.status != 0, same += !d.status && d.right;
        if (d.status || d.right) continue;
        other++;
        missed += kind == 1 && wanted.size() == c.w.size();
    }
    printf(
        "hostile: %d streams: %zu refused, %zu decoded right, %zu another valid stream, %zu of "
        "them all of a tensor with changed records\n",
        count, refused, same, other, missed);
    return missed != 0;
}
int main(int argc, char** argv) {
    load_kernels(argc, argv, "df11_tile_decode");
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "bench") return bench(atoi(argv[2]), atoi(argv[3]), numbers_after(4, argc, argv));
    if (mode == "check") return check();
    if (mode == "edges") {
        bench_edges(15);
        return 0;
    }
    if (mode == "hostile") return hostile(atoi(argv[2]), strtoull(argv[3], nullptr, 10));
    return 2;
}
