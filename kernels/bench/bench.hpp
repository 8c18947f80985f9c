// What the benches of all kernels share: loaded after one of them, for its types.
#pragma once
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

#define CUDA(call)                                                                    \
    do {                                                                              \
        cudaError_t e = (call);                                                       \
        if (e != cudaSuccess) {                                                       \
            fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
            exit(3);                                                                  \
        }                                                                             \
    } while (0)

// Kernels of a file of PTX or machine code, as the crate loads them, instead of those compiled in.
static cudaLibrary_t library = nullptr;

static const void* kernel_of(const char* name, const void* compiled_in) {
    if (!library) return compiled_in;
    cudaKernel_t kernel;
    CUDA(cudaLibraryGetKernel(&kernel, library, name));
    return kernel;
}

static void load_kernels(const char* path, const char* name) {
    CUDA(cudaFree(nullptr));
    auto begin = std::chrono::steady_clock::now();
    CUDA(cudaLibraryLoadFromFile(&library, path, nullptr, nullptr, 0, nullptr, nullptr, 0));
    kernel_of(name, nullptr);
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    printf("kernels of %s, loaded in %.3f s\n", path, took.count());
}

template <class T>
static T* upload(const std::vector<T>& values) {
    T* to;
    CUDA(cudaMalloc(&to, std::max<size_t>(values.size() * sizeof(T), 1)));
    CUDA(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return to;
}

// Derives one decode table.
static void build_table(const char* name, const void* compiled_in, TableTask task) {
    TableTask* on_device = upload(std::vector<TableTask>{task});
    void* arguments[] = {&on_device};
    CUDA(cudaLaunchKernel(kernel_of(name, compiled_in), 1, 256, arguments, 0, nullptr));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(on_device));
}

static int sm_count() {
    int count;
    CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

__global__ void differences(const u32* a, const u32* b, u64 count, u64* sum) {
    u64 mine = 0;
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count;
         i += u64(gridDim.x) * blockDim.x)
        mine += a[i] != b[i];
    if (mine) atomicAdd(sum, mine);
}

// Words of four bytes in which two arrays of `elements` weights differ.
inline unsigned long long wrong_words(const void* a, const void* b, u64 elements) {
    unsigned long long *sum, wrong;
    CUDA(cudaMalloc(&sum, 8));
    CUDA(cudaMemset(sum, 0, 8));
    differences<<<1024, 256>>>(static_cast<const u32*>(a), static_cast<const u32*>(b), elements / 2,
                               (u64*)sum);
    CUDA(cudaMemcpy(&wrong, sum, 8, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(sum));
    return wrong;
}
