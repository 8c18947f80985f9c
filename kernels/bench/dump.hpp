// Reads the files of examples/gap_arrays.rs: tensors back to back. Each consists of eight u64 (T,
// B, elements, bit_count, and the bytes of gaps, output offsets, bitstream, weights), then 256 code
// lengths, gaps, output offsets, bitstream, plane, weights.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

typedef std::vector<unsigned char> Bytes;

struct Dump {
    unsigned long long t, b, elements, bit_count;
    Bytes lengths, gaps, offsets, bitstream, plane, weights;
};

inline Bytes read_file(const std::string& path) {
    FILE* file = fopen(path.c_str(), "rb");
    if (!file) {
        fprintf(stderr, "cannot open %s\n", path.c_str());
        exit(2);
    }
    fseek(file, 0, SEEK_END);
    Bytes bytes(size_t(ftell(file)));
    fseek(file, 0, SEEK_SET);
    if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) exit(2);
    fclose(file);
    return bytes;
}

inline std::vector<Dump> read_dumps(const std::string& path) {
    Bytes bytes = read_file(path);
    const unsigned char* at = bytes.data();
    std::vector<Dump> dumps;
    while (at < bytes.data() + bytes.size()) {
        unsigned long long numbers[8];
        memcpy(numbers, at, 64);
        at += 64;
        Dump dump{numbers[0], numbers[1], numbers[2], numbers[3], {}, {}, {}, {}, {}, {}};
        auto take = [&](Bytes& array, size_t length) {
            array.assign(at, at + length);
            at += length;
        };
        take(dump.lengths, 256);
        take(dump.gaps, numbers[4]);
        take(dump.offsets, numbers[5]);
        take(dump.bitstream, numbers[6]);
        take(dump.plane, dump.elements);
        take(dump.weights, numbers[7]);
        dumps.push_back(std::move(dump));
    }
    return dumps;
}
