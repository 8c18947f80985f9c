// Bench, check and hostile streams of the gap kernels: see README.md.
#include "../gap.cu"
using namespace df11;
using namespace gap;
#include "bench.hpp"
#include "dump.hpp"

// Warps per block and blocks per multiprocessor, if not 0; else the shape with which the kernels
// fill this GPU.
static u32 forced_warps = 0, forced_blocks = 0;

// A tensor on the device.
struct Resident {
    const Dump* dump;
    u8 *lengths, *gaps, *offsets, *bitstream, *plane;
    GapTable* table = allocate<GapTable>(1);

    explicit Resident(const Dump& d)
        : dump(&d),
          lengths(upload(d.lengths)),
          gaps(upload(d.gaps)),
          offsets(upload(d.offsets)),
          bitstream(upload(d.bitstream)),
          plane(upload(d.plane)) {
        build_table(KERNEL(df11_gap_tables), {lengths, table, d.lengths.size()});
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
struct Launch : Tasks<GapTask> {
    const u64 t;
    explicit Launch(u64 t) : t(t) {}
    void add(GapTask task) { Tasks::add(task, task.thread_blocks); }
    template <u32 T>
    void start(const void* kernel) {
        const u32 warps = forced_warps ? forced_warps : Shape<T>::max_warps;
        const u32 blocks = forced_blocks ? forced_blocks : Shape<T>::blocks;
        give_shared_memory(kernel);
        Tasks::start(kernel, u64(sm_count()) * blocks, warps, warps * u32(sizeof(WarpMemory<T>)));
    }
    void start() {
        if (t == 8) start<8>(KERNEL(df11_gap_decode_8));
        if (t == 16) start<16>(KERNEL(df11_gap_decode_16));
        if (t == 32) start<32>(KERNEL(df11_gap_decode_32));
        if (t == 64) start<64>(KERNEL(df11_gap_decode_64));
    }
};

static const u16* weights_of(const Dump& d) {
    return reinterpret_cast<const u16*>(d.weights.data());
}

// Decodes a range; whether each bit is right and nothing else is written.
static bool decodes(const Resident& r, u64 begin, u64 end) {
    const Scope scope;
    const Output output(end - begin);
    Launch launch(r.dump->t);
    launch.add(r.task(begin, end, output.begin()));
    launch.start();
    return launch.result() == 0 && output.holds(weights_of(*r.dump) + begin);
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
    // All tensors of one T in one launch.
    for (u64 t : {8, 16, 32, 64}) {
        const Scope scope;
        Launch launch(t);
        std::vector<Output> outputs;
        std::vector<const Dump*> of;
        for (const Resident& r : residents) {
            if (r.dump->t != t) continue;
            outputs.emplace_back(r.dump->elements), of.push_back(r.dump);
            launch.add(r.task(0, r.dump->elements, outputs.back().begin()));
        }
        if (of.empty()) continue;
        launch.start();
        const u32 status = launch.result();
        bool same = status == 0;
        for (size_t i = 0; i < of.size(); i++) same &= outputs[i].holds(weights_of(*of[i]));
        tests++;
        failures += !same;
        if (!same) printf("FAIL all tensors of T=%llu in one launch, status %u\n", t, status);
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
        const Scope scope;
        Dump d = small[random() % small.size()];
        auto flip = [&](Bytes& bytes) { ::flip(bytes.data(), bytes.size(), random); };
        int kind = int(random() % 6);
        mutated[kind]++;
        Bytes true_offsets = d.offsets;
        if (kind == 0) flip(d.gaps);
        if (kind == 1) flip(d.offsets);
        if (kind == 2) flip(d.bitstream);
        if (kind == 3) {  // another code: another tensor's lengths, or any
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
        // The thread blocks come from the true offsets, because a host that checks offsets would
        // choose them.
        const Output output(end - begin, 0);  // exact size: memcheck sees any overrun
        Launch launch(d.t);
        d.offsets = true_offsets;
        GapTask task = r.task(begin, end, output.begin());
        if (random() % 2) {
            task.first_thread_block = 0;
            task.thread_blocks = r.thread_blocks();
        }
        task.first_thread_block = std::min(task.first_thread_block, r.thread_blocks() - 1);
        task.thread_blocks =
            std::min(task.thread_blocks, r.thread_blocks() - task.first_thread_block);
        launch.add(task);
        launch.start();
        const u32 status = launch.result();
        const bool equal = output.holds(weights_of(d) + begin);
        if (status != 0)
            refused++;
        else if (equal)
            same++;
        else
            bad++;
        // Other bits or another code may be a valid stream; a changed index of a whole tensor never
        // is one.
        if (status == 0 && !equal && (kind == 0 || kind == 1 || kind == 5) &&
            end - begin == d.elements)
            index_missed++;
        if (status == 0 && !equal && kind != 2 && kind != 3 && bad <= 10)
            printf("wrong and not noticed: kind %d T=%llu B=%llu elements %llu range %llu..%llu\n",
                   kind, d.t, d.b, d.elements, begin, end);
    }
    printf(
        "hostile: %d streams (gaps %zu, offsets %zu, bits %zu, code %zu, all %zu, bit count %zu): "
        "%zu refused, %zu decoded right, %zu another valid stream, %zu changed indexes missed\n",
        count, mutated[0], mutated[1], mutated[2], mutated[3], mutated[4], mutated[5], refused,
        same, bad, index_missed);
    return index_missed != 0;
}

static double median_seconds(const std::string& what, int repeats,
                             const std::function<void(int)>& run) {
    std::vector<Contender> one = {{what, 0, run}};
    measure_cold(one, repeats, 3);
    fprintf(stderr, "%s, us:", what.c_str());
    for (double seconds : one[0].seconds) fprintf(stderr, " %.2f", seconds * 1e6);
    fprintf(stderr, "\n");
    return one[0].median();
}

static int bench(const std::string& folder, int repeats, int pairs, char** numbers) {
    const Bytes weights = read_file(folder + "/weights.bf16");
    u8* const original = upload(weights);
    u16* const output = allocate<u16>(weights.size() / 2 + 2048);
    const double copy =
        2 * weights.size() / median_seconds("copy", repeats, [&](int) {
            CUDA(cudaMemcpyAsync(output, original, weights.size(), cudaMemcpyDeviceToDevice));
        });
    printf("copy %.0f GB/s, table %u bits, groups of %u", copy / 1e9, TABLE_BITS,
           Shape<8>::group_warps);
    if (forced_warps) printf(", %u warps x %u blocks", forced_warps, forced_blocks);
    printf("\n");
    int failed = 0;
    for (int i = 0; i < pairs; i++) {
        const Scope scope;
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
        CUDA(cudaMemset(output, 0xA5, weights.size()));
        launch.start();
        u32 status = launch.result();
        u64 wrong = differences(output, (const u16*)original, weights.size() / 2);
        std::string what = "T " + std::to_string(t) + " B " + std::to_string(b);
        double seconds = median_seconds(what, repeats, [&](int) { launch.start(); });
        double rate = weights.size() / seconds;
        printf(
            "T %2llu B %4llu  %7.1f us  %5.0f GB/s out  %.3f of copy  %.4f bits/weight  status %u  "
            "wrong weights %llu\n",
            t, b, seconds * 1e6, rate / 1e9, rate / copy, stored * 8.0 / at, status, wrong);
        fflush(stdout);
        failed |= status || wrong;
    }
    return failed;
}

int main(int argc, char** argv) {
    load_kernels(argc, argv, "df11_gap_decode_32");
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
