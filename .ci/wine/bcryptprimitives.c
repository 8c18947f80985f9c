/* Random bytes for programs of Rust, which Wine before 9.0 has no function for. */
#include <stddef.h>
unsigned char __stdcall SystemFunction036(void *buffer, unsigned long length);

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char *buffer, size_t length) {
    while (length) {
        unsigned long part = length < 1 << 30 ? length : 1 << 30;
        if (!SystemFunction036(buffer, part)) return 0;
        buffer += part;
        length -= part;
    }
    return 1;
}
