// Runs nvCOMP's ANS beside our kernels: one batch of chunks of 256 KiB, as its documentation
// advises, in its 16-bit float mode, which codes exponents.
#pragma once
#include <nvcomp/ans.h>
#include <nvcomp/version.h>

#include "bench.hpp"

#define NVCOMP(call)                                                               \
    do {                                                                           \
        nvcompStatus_t s = (call);                                                 \
        if (s != nvcompSuccess) {                                                  \
            fprintf(stderr, "%s:%d nvCOMP says %d\n", __FILE__, __LINE__, int(s)); \
            exit(3);                                                               \
        }                                                                          \
    } while (0)

// A buffer, compressed on the device, that is decompressed to another place.
class Nvcomp {
    static constexpr size_t CHUNK = 256 << 10;
    size_t chunks, temp_bytes = 0;
    void* temp = nullptr;
    nvcompBatchedANSDecompressOpts_t options = nvcompBatchedANSDecompressDefaultOpts;
    void **compressed, **outputs;
    size_t *compressed_bytes, *sizes, *decoded;
    nvcompStatus_t* statuses;

  public:
    size_t bytes = 0;  // compressed

    Nvcomp(const void* from, void* to, size_t length) : chunks((length + CHUNK - 1) / CHUNK) {
        nvcompBatchedANSCompressOpts_t compress = nvcompBatchedANSCompressDefaultOpts;
        compress.data_type = NVCOMP_TYPE_FLOAT16;
        options.data_type = NVCOMP_TYPE_FLOAT16;
        size_t most, needed;
        NVCOMP(nvcompBatchedANSCompressGetMaxOutputChunkSize(CHUNK, compress, &most));
        NVCOMP(
            nvcompBatchedANSCompressGetTempSize(chunks, CHUNK, compress, &needed, length, nullptr));
        most = (most + 255) / 256 * 256;
        char *space, *scratch;
        CUDA(cudaMalloc(&space, chunks * most));
        CUDA(cudaMalloc(&scratch, std::max<size_t>(needed, 1)));
        std::vector<const void*> in(chunks);
        std::vector<void*> out(chunks), back(chunks);
        std::vector<size_t> length_of(chunks, CHUNK);
        for (size_t i = 0; i < chunks; i++) {
            in[i] = static_cast<const char*>(from) + i * CHUNK;
            out[i] = space + i * most;
            back[i] = static_cast<char*>(to) + i * CHUNK;
        }
        length_of.back() = length - (chunks - 1) * CHUNK;
        sizes = upload(length_of);
        compressed = upload(out);
        outputs = upload(back);
        compressed_bytes = upload(length_of);
        decoded = upload(length_of);
        statuses = upload(std::vector<nvcompStatus_t>(chunks));
        NVCOMP(nvcompBatchedANSCompressAsync(upload(in), sizes, CHUNK, chunks, scratch, needed,
                                             compressed, compressed_bytes, compress, statuses,
                                             nullptr));
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaFree(scratch));
        std::vector<size_t> took(chunks);
        CUDA(cudaMemcpy(took.data(), compressed_bytes, chunks * sizeof(size_t),
                        cudaMemcpyDeviceToHost));
        for (size_t n : took) bytes += n;
        NVCOMP(nvcompBatchedANSDecompressGetTempSize(chunks, CHUNK, options, &temp_bytes, length,
                                                     nullptr));
        CUDA(cudaMalloc(&temp, std::max<size_t>(temp_bytes, 1)));
    }

    // Starts one decompression of everything on the default stream.
    void start() {
        NVCOMP(nvcompBatchedANSDecompressAsync(compressed, compressed_bytes, sizes, decoded, chunks,
                                               temp, temp_bytes, outputs, options, statuses,
                                               nullptr));
    }
};
