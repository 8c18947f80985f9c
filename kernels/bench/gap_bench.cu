// Bench, check and hostile streams of the gap kernels: see README.md.
#include <algorithm>
#include <random>

#include "../gap.cu"
using namespace df11;
using namespace gap;
#include "bench.hpp"
#include "dump.hpp"

// Instead of the shape with which the kernels fill this GPU, if not 0: warps of a block, and blocks
// of a multiprocessor.
static u32 forced_warps = 0, forced_blocks = 0;

// A tensor on the device, every array an allocation of its exact size, so that memcheck sees each
// step outside.
struct Resident {
    const Dump* dump;
    u8 *lengths, *gaps, *offsets, *bitstream, *plane;
    GapTable* table;

    explicit Resident(const Dump& d) : dump(&d) {
        lengths = upload(d.lengths);
        gaps = upload(d.gaps);
        offsets = upload(d.offsets);
        bitstream = upload(d.bitstream);
        plane = upload(d.plane);
        CUDA(cudaMalloc(&table, sizeof(GapTable)));
        build_table("df11_gap_tables", (const void*)df11_gap_tables,
                    {lengths, table, d.lengths.size()});
    }
    void free() {
        for (void* p : {(void*)lengths, (void*)gaps, (void*)offsets, (void*)bitstream, (void*)plane,
                        (void*)table})
            CUDA(cudaFree(p));
    }
    u64 thread_blocks() const {
        u64 bits = 8 * dump->t * dump->b;
        return (dump->bit_count + bits - 1) / bits;
    }
    GapTask task(u64 begin, u64 end, u16* output) const {
        std::vector<u64> entries(dump->offsets.size() / 8);
        memcpy(entries.data(), dump->offsets.data(), dump->offsets.size());
        u64 first = std::upper_bound(entries.begin(), entries.end() - 1, begin) - entries.begin();
        first = first ? first - 1 : 0;
        u64 last =
            std::lower_bound(entries.begin() + first, entries.end() - 1, end) - entries.begin();
        GapTask t{};
        t.gaps = gaps;
        t.output_offsets = (const u64*)offsets;
        t.bitstream = bitstream;
        t.plane = plane;
        t.table = table;
        t.output = output;
        t.elements = dump->elements;
        t.bit_count = dump->bit_count;
        t.element_begin = begin;
        t.element_end = end;
        t.first_thread_block = first;
        t.thread_blocks = std::max(last, first + 1) - first;
        t.threads_per_block = u32(dump->b);
        return t;
    }
};

// All tasks, of one T, in one launch.
struct Launch {
    std::vector<GapTask> tasks;
    GapTask* on_device = nullptr;
    u32* status;
    u64 units = 0;
    u64 t;

    explicit Launch(u64 t) : t(t) { CUDA(cudaMalloc(&status, 4)); }
    void add(GapTask task) {
        task.first_unit = units;
        units += task.thread_blocks;
        tasks.push_back(task);
    }
    template <u32 T>
    void start(const char* name, void (*compiled_in)(const GapTask*, u32, u64, u32*, u64)) {
        const void* kernel = kernel_of(name, (const void*)compiled_in);
        const u32 warps = forced_warps ? forced_warps : Shape<T>::max_warps;
        const u32 blocks = forced_blocks ? forced_blocks : Shape<T>::blocks;
        const u32 shared = warps * u32(sizeof(WarpMemory<T>));
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
        u32 grid = u32(std::min<u64>(units, u64(sm_count()) * blocks));
        u32 count = u32(tasks.size());
        u64 output = 0;  // the tasks' outputs are addresses
        void* arguments[] = {&on_device, &count, &units, &status, &output};
        CUDA(cudaLaunchKernel(kernel, grid, warps * LANES, arguments, shared, nullptr));
    }
    void prepare() {
        CUDA(cudaMalloc(&on_device, tasks.size() * sizeof(GapTask)));
        CUDA(cudaMemcpy(on_device, tasks.data(), tasks.size() * sizeof(GapTask),
                        cudaMemcpyHostToDevice));
        CUDA(cudaMemset(status, 0, 4));
    }
    void start() {
        if (t == 8) start<8>("df11_gap_decode_8", df11_gap_decode_8);
        if (t == 16) start<16>("df11_gap_decode_16", df11_gap_decode_16);
        if (t == 32) start<32>("df11_gap_decode_32", df11_gap_decode_32);
        if (t == 64) start<64>("df11_gap_decode_64", df11_gap_decode_64);
    }
    u32 result() {
        CUDA(cudaDeviceSynchronize());
        u32 s;
        CUDA(cudaMemcpy(&s, status, 4, cudaMemcpyDeviceToHost));
        return s;
    }
    void free() {
        if (on_device) CUDA(cudaFree(on_device));
        CUDA(cudaFree(status));
    }
};

// Decodes a range between guards of poison; whether every bit is right and the guards stand.
static bool decodes(const Resident& r, u64 begin, u64 end, u32* status_out = nullptr) {
    const size_t guard = 128, count = end - begin;
    Bytes out(2 * (count + 2 * guard));
    u16* device;
    CUDA(cudaMalloc(&device, out.size()));
    CUDA(cudaMemset(device, 0xA5, out.size()));
    Launch launch(r.dump->t);
    launch.add(r.task(begin, end, device + guard));
    launch.prepare();
    launch.start();
    u32 status = launch.result();
    CUDA(cudaMemcpy(out.data(), device, out.size(), cudaMemcpyDeviceToHost));
    CUDA(cudaFree(device));
    launch.free();
    bool good = true;
    for (size_t i = 0; i < 2 * guard; i++)
        good &= out[i] == 0xA5 && out[out.size() - 1 - i] == 0xA5;
    if (!good) printf("guard overwritten\n");
    bool same = memcmp(out.data() + 2 * guard, r.dump->weights.data() + 2 * begin, 2 * count) == 0;
    if (status_out) {
        *status_out = status;
        return good && (same || status != 0);
    }
    return good && same && status == 0;
}

static int check(const std::string& path, int ranges) {
    std::vector<Dump> dumps = read_dumps(path);
    std::mt19937_64 random(1);
    size_t tests = 0, failures = 0;
    std::vector<Resident> residents;
    for (const Dump& d : dumps) {
        Resident r(d);
        for (int i = 0; i <= ranges; i++) {
            u64 begin = i ? random() % d.elements : 0;
            u64 end = i ? begin + 1 + random() % (d.elements - begin) : d.elements;
            tests++;
            if (!decodes(r, begin, end)) {
                if (failures++ < 20)
                    printf("FAIL T=%llu B=%llu elements=%llu bits=%llu range %llu..%llu\n", d.t,
                           d.b, d.elements, d.bit_count, begin, end);
            }
        }
        residents.push_back(r);
    }
    // All tensors of one T in one launch, each on 256 bytes.
    for (u64 t : {8, 16, 32, 64}) {
        Launch launch(t);
        std::vector<std::pair<u64, const Dump*>> places;
        u64 size = 0;
        for (const Resident& r : residents)
            if (r.dump->t == t)
                places.push_back({size, r.dump}), size += (2 * r.dump->elements + 255) / 256 * 256;
        if (places.empty()) continue;
        u8* device;
        CUDA(cudaMalloc(&device, size));
        CUDA(cudaMemset(device, 0xA5, size));
        size_t at = 0;
        for (const Resident& r : residents)
            if (r.dump->t == t)
                launch.add(r.task(0, r.dump->elements, (u16*)(device + places[at++].first)));
        launch.prepare();
        launch.start();
        u32 status = launch.result();
        Bytes out(size);
        CUDA(cudaMemcpy(out.data(), device, size, cudaMemcpyDeviceToHost));
        bool same = status == 0;
        for (auto& [place, dump] : places)
            same &= memcmp(out.data() + place, dump->weights.data(), dump->weights.size()) == 0;
        tests++;
        failures += !same;
        if (!same) printf("FAIL all tensors of T=%llu in one launch, status %u\n", t, status);
        CUDA(cudaFree(device));
        launch.free();
    }
    printf("check: %zu decodings of %zu tensors, %zu wrong\n", tests, dumps.size(), failures);
    return failures != 0;
}

static int hostile(const std::string& path, int count, u64 seed) {
    std::vector<Dump> dumps = read_dumps(path);
    std::mt19937_64 random(seed);
    size_t refused = 0, same = 0, bad = 0, index_missed = 0, mutated[6] = {};
    std::vector<Dump> small;
    for (Dump& d : dumps)
        if (d.elements <= 70000) small.push_back(std::move(d));
    for (int i = 0; i < count; i++) {
        Dump d = small[random() % small.size()];
        auto flip = [&](Bytes& bytes) {
            if (bytes.empty()) return;
            u64 changes = 1 + random() % 4;
            switch (random() % 3) {
                case 0:
                    for (u64 j = 0; j < changes; j++)
                        bytes[random() % bytes.size()] ^= 1 << random() % 8;
                    break;
                case 1:
                    for (u64 j = 0; j < changes; j++) bytes[random() % bytes.size()] = u8(random());
                    break;
                default:
                    for (u8& byte : bytes) byte = u8(random());
            }
        };
        int kind = int(random() % 6);
        mutated[kind]++;
        Bytes true_offsets = d.offsets;
        if (kind == 0) flip(d.gaps);
        if (kind == 1) flip(d.offsets);
        if (kind == 2) flip(d.bitstream);
        if (kind == 3) {  // another code: lengths of another tensor, or anything
            if (random() % 2)
                d.lengths = small[random() % small.size()].lengths;
            else
                flip(d.lengths);
        }
        if (kind == 4) {  // all of them
            flip(d.gaps), flip(d.offsets), flip(d.bitstream), flip(d.lengths);
        }
        if (kind == 5) {  // another bit count with as many threads
            u64 bits = 8 * d.t, threads = (d.bit_count + bits - 1) / bits;
            d.bit_count = (threads - 1) * bits + 1 + random() % bits;
        }
        Resident r(d);
        u64 begin = 0, end = d.elements;
        if (random() % 2) {
            begin = random() % d.elements;
            end = begin + 1 + random() % (d.elements - begin);
        }
        // The thread blocks come from the true offsets, as a host that checked them would choose
        // them.
        u32 status;
        const size_t size = 2 * (end - begin);
        u16* device;
        CUDA(cudaMalloc(&device, size));  // exact: memcheck sees what goes past it
        CUDA(cudaMemset(device, 0xA5, size));
        Launch launch(d.t);
        d.offsets = true_offsets;
        GapTask task = r.task(begin, end, device);
        if (random() % 2) {
            task.first_thread_block = 0;
            task.thread_blocks = r.thread_blocks();
        }
        task.first_thread_block = std::min(task.first_thread_block, r.thread_blocks() - 1);
        task.thread_blocks =
            std::min(task.thread_blocks, r.thread_blocks() - task.first_thread_block);
        launch.add(task);
        launch.prepare();
        launch.start();
        status = launch.result();
        Bytes out(size);
        CUDA(cudaMemcpy(out.data(), device, size, cudaMemcpyDeviceToHost));
        bool equal = memcmp(out.data(), d.weights.data() + 2 * begin, size) == 0;
        if (status != 0)
            refused++;
        else if (equal)
            same++;
        else
            bad++;
        // Other bits or another code may be a valid stream; a changed index of a whole tensor never
        // is.
        if (status == 0 && !equal && (kind == 0 || kind == 1 || kind == 5) &&
            size == 2 * d.elements)
            index_missed++;
        if (status == 0 && !equal && kind != 2 && kind != 3 && bad <= 10)
            printf("wrong and not noticed: kind %d T=%llu B=%llu elements %llu range %llu..%llu\n",
                   kind, d.t, d.b, d.elements, begin, end);
        CUDA(cudaFree(device));
        launch.free();
        r.free();
    }
    printf(
        "hostile: %d streams (gaps %zu, offsets %zu, bits %zu, code %zu, all %zu, bit count %zu): "
        "%zu refused, %zu decoded right, %zu another valid stream, %zu changed indexes missed\n",
        count, mutated[0], mutated[1], mutated[2], mutated[3], mutated[4], mutated[5], refused,
        same, bad, index_missed);
    return index_missed != 0;
}

template <class F>
static double median_seconds(const char* what, int repeats, void* flush, size_t flush_bytes,
                             F run) {
    cudaEvent_t from, to;
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    std::vector<float> times;
    for (int i = 0; i < repeats + 3; i++) {
        CUDA(cudaMemsetAsync(flush, i, flush_bytes));
        CUDA(cudaEventRecord(from));
        run();
        CUDA(cudaEventRecord(to));
        CUDA(cudaEventSynchronize(to));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, from, to));
        if (i >= 3) times.push_back(ms);
    }
    fprintf(stderr, "%s, us:", what);
    for (float ms : times) fprintf(stderr, " %.2f", ms * 1e3);
    fprintf(stderr, "\n");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] / 1e3;
}

static int bench(const std::string& folder, int repeats, int pairs, char** numbers) {
    const size_t flush_bytes = 512 << 20;
    u8 *flush, *original;
    CUDA(cudaMalloc(&flush, flush_bytes));
    Bytes weights = read_file(folder + "/weights.bf16");
    original = upload(weights);
    u16* output;
    CUDA(cudaMalloc(&output, weights.size() + 4096));
    double copy =
        2 * weights.size() / median_seconds("copy", repeats, flush, flush_bytes, [&] {
            CUDA(cudaMemcpyAsync(output, original, weights.size(), cudaMemcpyDeviceToDevice));
        });
    printf("copy %.0f GB/s, table %u bits, groups of %d", copy / 1e9, TABLE_BITS, DF11_GROUP_WARPS);
    if (forced_warps) printf(", %u warps x %u blocks", forced_warps, forced_blocks);
    printf("\n");
    int failed = 0;
    for (int i = 0; i < pairs; i++) {
        u64 t = atoi(numbers[2 * i]), b = atoi(numbers[2 * i + 1]);
        std::vector<Dump> dumps =
            read_dumps(folder + "/block-" + std::to_string(t) + "-" + std::to_string(b) + ".gap");
        std::vector<Resident> residents;
        Launch launch(t);
        u64 at = 0, stored = 0;
        for (const Dump& d : dumps) {
            residents.emplace_back(d);
            launch.add(residents.back().task(0, d.elements, output + at));
            at += d.elements;
            stored += d.gaps.size() + d.offsets.size() + d.bitstream.size() + d.plane.size();
        }
        launch.prepare();
        CUDA(cudaMemset(output, 0xA5, weights.size()));
        launch.start();
        u32 status = launch.result();
        unsigned long long wrong = wrong_words(output, original, weights.size() / 2);
        std::string what = "T " + std::to_string(t) + " B " + std::to_string(b);
        double seconds =
            median_seconds(what.c_str(), repeats, flush, flush_bytes, [&] { launch.start(); });
        double rate = weights.size() / seconds;
        printf(
            "T %2llu B %4llu  %7.1f us  %5.0f GB/s out  %.3f of copy  %.4f bits/weight  status %u  "
            "wrong words %llu\n",
            t, b, seconds * 1e6, rate / 1e9, rate / copy, stored * 8.0 / at, status, wrong);
        fflush(stdout);
        failed |= status || wrong;
        launch.free();
        for (Resident& r : residents) r.free();
    }
    return failed;
}

int main(int argc, char** argv) {
    if (argc > 2 && std::string(argv[1]) == "--kernels") {
        load_kernels(argv[2], "df11_gap_decode_32");
        argc -= 2;
        argv += 2;
    }
    if (argc > 3 && std::string(argv[1]) == "--shape") {
        forced_warps = atoi(argv[2]);
        forced_blocks = atoi(argv[3]);
        argc -= 3;
        argv += 3;
    }
    std::string mode = argc > 2 ? argv[1] : "";
    if (mode == "check") return check(argv[2], argc > 3 ? atoi(argv[3]) : 4);
    if (mode == "hostile") return hostile(argv[2], atoi(argv[3]), strtoull(argv[4], nullptr, 10));
    if (mode == "bench") return bench(argv[2], atoi(argv[3]), (argc - 4) / 2, argv + 4);
    fprintf(stderr,
            "usage: gap_bench [--kernels FILE] [--shape WARPS BLOCKS] check EDGES [RANGES] | "
            "hostile EDGES COUNT SEED | bench FOLDER REPEATS T B [T B ..]\n");
    return 2;
}
