// Shared by the benches of all kernels: memory, launches, times, broken streams. Included after the
// kernels, for their types.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <functional>
#include <random>
#include <string>
#include <vector>

#define CUDA(call)                                                                    \
    do {                                                                              \
        cudaError_t e = (call);                                                       \
        if (e != cudaSuccess) {                                                       \
            fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
            exit(3);                                                                  \
        }                                                                             \
    } while (0)

// --- kernels

// Kernels of a file of PTX or machine code, loaded as the crate loads them; null: those compiled
// in.
static cudaLibrary_t library = nullptr;

static const void* kernel_of(const char* name, const void* compiled_in) {
    if (!library) return compiled_in;
    cudaKernel_t kernel;
    CUDA(cudaLibraryGetKernel(&kernel, library, name));
    return kernel;
}
#define KERNEL(name) kernel_of(#name, (const void*)name)

// If the arguments begin with --kernels FILE, takes them off and loads the file, which must have
// this kernel. Returns the file's path, or null.
static const char* load_kernels(int& argc, char**& argv, const char* name) {
    if (argc < 3 || strcmp(argv[1], "--kernels")) return nullptr;
    const char* path = argv[2];
    argc -= 2, argv += 2;
    CUDA(cudaFree(nullptr));
    auto begin = std::chrono::steady_clock::now();
    CUDA(cudaLibraryLoadFromFile(&library, path, nullptr, nullptr, 0, nullptr, nullptr, 0));
    kernel_of(name, nullptr);
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    printf("kernels of %s, loaded in %.3f s\n", path, took.count());
    return path;
}

// Launches a kernel with one argument, by value. `begins_early`: it may begin while the previous
// launch ends.
template <class T>
static void launch_kernel(const void* kernel, u32 blocks, u32 threads, u32 shared,
                          const T& argument, cudaStream_t stream, bool begins_early = false,
                          u32 cluster = 1) {
    T copy = argument;
    void* arguments[] = {&copy};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    if (begins_early) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {cluster, 1, 1};
    }
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared;
    config.stream = stream, config.attrs = attributes;
    if (shared)
        CUDA(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    CUDA(cudaLaunchKernelExC(&config, kernel, arguments));
}

static u32 attribute_of(cudaDeviceAttr attribute) {
    int n;
    CUDA(cudaDeviceGetAttribute(&n, attribute, 0));
    return u32(n);
}
static u32 sm_count() { return attribute_of(cudaDevAttrMultiProcessorCount); }
// Most dynamic shared memory that a block may have, in bytes.
static u32 max_shared(const void* kernel) {
    cudaFuncAttributes a;
    CUDA(cudaFuncGetAttributes(&a, kernel));
    return attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin) - u32(a.sharedSizeBytes);
}

// --- memory: each array is an allocation of its exact size, so that memcheck sees every overrun

static std::vector<void*> allocated;
// Frees, at its end, everything that was allocated since its beginning.
struct Scope {
    const size_t begin = allocated.size();
    ~Scope() {
        for (; allocated.size() > begin; allocated.pop_back()) CUDA(cudaFree(allocated.back()));
    }
};
template <class T>
static T* allocate(u64 count) {
    T* to;
    CUDA(cudaMalloc(&to, std::max<u64>(count * sizeof(T), 1)));
    allocated.push_back(to);
    return to;
}
// Sets each byte to `byte`.
template <class T>
static T* allocate_filled(u64 count, int byte) {
    T* to = allocate<T>(count);
    CUDA(cudaMemset(to, byte, count * sizeof(T)));
    return to;
}
template <class T>
static T* upload(const std::vector<T>& values) {
    T* to = allocate<T>(values.size());
    CUDA(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
}
template <class T>
static T* copy_of(const T* from, u64 count) {
    T* to = allocate<T>(count);
    CUDA(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyDeviceToDevice));
    return to;
}
template <class T>
static std::vector<T> from_device(const T* from, u64 count) {
    std::vector<T> to(count);
    CUDA(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

__global__ void count_differences(const u16* a, const u16* b, u64 count, unsigned long long* sum) {
    u64 mine = 0;
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count;
         i += u64(gridDim.x) * blockDim.x)
        mine += a[i] != b[i];
    if (mine) atomicAdd(sum, mine);
}
// Counts the weights in which two arrays differ.
static u64 differences(const u16* a, const u16* b, u64 count) {
    const Scope scope;
    auto* sum = allocate_filled<unsigned long long>(1, 0);
    count_differences<<<1024, 256>>>(a, b, count, sum);
    return from_device(sum, 1)[0];
}
static bool same_bits(const u16* a, const u16* b, u64 count) {
    return differences(a, b, count) == 0;
}

// Room for weights, filled with poison, and poison around it.
struct Output {
    static constexpr u16 POISON = 0xA5A5;
    const u64 count, around;
    u16* const all;
    explicit Output(u64 n, u64 guard = 128)
        : count(n), around(guard), all(allocate_filled<u16>(n + 2 * guard, 0xA5)) {}
    u16* begin() const { return all + around; }
    // Whether it holds these weights, and nothing was written around it.
    bool holds(const u16* weights) const {
        const std::vector<u16> found = from_device(all, count + 2 * around);
        for (u64 i = 0; i < around; i++)
            if (found[i] != POISON || found[found.size() - 1 - i] != POISON) {
                printf("guard overwritten\n");
                return false;
            }
        return !memcmp(found.data() + around, weights, count * 2);
    }
};

// --- tasks of the kernels that decode

// Derives one decode table.
static void build_table(const void* kernel, TableTask task) {
    const Scope scope;
    launch_kernel(kernel, 1, 256, 0, upload(std::vector<TableTask>{task}), nullptr);
    CUDA(cudaDeviceSynchronize());
}

// Tasks of one launch.
template <class Task>
struct Tasks {
    std::vector<Task> tasks;
    Task* on_device = nullptr;
    u32* const status = allocate_filled<u32>(1, 0);
    u64 units = 0;

    void add(Task task, u64 units_of_task) {
        task.first_unit = decltype(task.first_unit)(units);
        units += units_of_task;
        tasks.push_back(task);
    }
    void start(const void* kernel, u64 blocks, u32 warps, u32 shared) {
        if (!on_device) on_device = upload(tasks);
        u32 count = u32(tasks.size());
        u64 output = 0;  // the tasks' outputs are addresses
        void* arguments[] = {&on_device, &count, &units, const_cast<u32**>(&status), &output};
        CUDA(cudaLaunchKernel(kernel, u32(std::min(units, blocks)), warps * LANES, arguments,
                              shared, nullptr));
    }
    u32 result() const { return from_device(status, 1)[0]; }
};

// Gives each block as much shared memory as it may have.
static void give_shared_memory(const void* kernel) {
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              int(max_shared(kernel))));
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
}

// Changes some bits, some bytes, or all.
static void flip(u8* bytes, size_t count, std::mt19937_64& random) {
    if (!count) return;
    u64 changes = 1 + random() % 4;
    switch (random() % 3) {
        case 0:
            while (changes--) bytes[random() % count] ^= 1 << random() % 8;
            break;
        case 1:
            while (changes--) bytes[random() % count] = u8(random());
            break;
        default:
            for (size_t i = 0; i < count; i++) bytes[i] = u8(random());
    }
}
// Does so to an array on the device.
template <class T>
static void flip_on_device(T* array, size_t count, std::mt19937_64& random) {
    std::vector<u8> bytes = from_device(reinterpret_cast<const u8*>(array), count * sizeof(T));
    flip(bytes.data(), bytes.size(), random);
    CUDA(cudaMemcpy(array, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
}

// --- times

static double median_of(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
struct Timer {
    cudaEvent_t from, to;
    Timer() {
        CUDA(cudaEventCreate(&from));
        CUDA(cudaEventCreate(&to));
    }
    template <class F>
    double seconds(cudaStream_t stream, F run) const {
        CUDA(cudaEventRecord(from, stream));
        run();
        CUDA(cudaEventRecord(to, stream));
        CUDA(cudaEventSynchronize(to));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, from, to));
        return ms / 1e3;
    }
};
static void empty_l2() {
    static const size_t BYTES = 512 << 20;
    static void* buffer = nullptr;
    if (!buffer) CUDA(cudaMalloc(&buffer, BYTES));
    CUDA(cudaMemsetAsync(buffer, 1, BYTES));
}
static const Timer& timer() {
    static const Timer one;
    return one;
}
// Something to measure, and the seconds of its rounds.
struct Contender {
    std::string name;
    double bytes;
    std::function<void(int)> launch;  // launches one of the copies
    std::vector<double> seconds = {};
    double median() const { return median_of(seconds); }
};
// Measures in interleaved rounds, after some that do not count. `seconds_of`: those of a round of
// the contender with this number.
template <class F>
static void measure_rounds(std::vector<Contender>& all, int rounds, int not_counted, F seconds_of) {
    for (int round = 0; round < rounds + not_counted; round++)
        for (size_t i = 0; i < all.size(); i++) {
            const double seconds = seconds_of(i);
            if (round >= not_counted) all[i].seconds.push_back(seconds);
        }
}
// The same, each round a launch that finds nothing in L2.
static void measure_cold(std::vector<Contender>& all, int rounds, int not_counted) {
    measure_rounds(all, rounds, not_counted, [&](size_t i) {
        empty_l2();
        return timer().seconds(nullptr, [&] { all[i].launch(0); });
    });
}
// The modes' arguments that follow `first`, as numbers.
static std::vector<u32> numbers_after(int first, int argc, char** argv) {
    std::vector<u32> all;
    for (int i = first; i < argc; i++) all.push_back(u32(atoi(argv[i])));
    return all;
}
