// The warpgroup's product of compute capability 9.0: 64 rows of weights, in registers, by N rows of
// x, in shared memory, over 16 columns. Sums in f32.
#pragma once
#include "common.cuh"

namespace df11::linear {
// Call it before the first product, and after registers of weights or sums have been written.
__device__ inline void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most COUNT groups of products are in flight. Their registers must not be touched
// before.
template <u32 COUNT>
__device__ inline void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

// Returns the lower word of the descriptor of rows of x in shared memory: 128 bytes each, eight in
// 1024 bytes, the 16-byte pieces of a row in the order of the 128-byte swizzle. Adding 2 gives the
// next 16 columns.
__device__ inline u32 describe_x(u32 address) { return address >> 4 | 1 << 16; }

#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_64(i) SUMS_16(i), SUMS_16(i + 16), SUMS_16(i + 32), SUMS_16(i + 48)
#define PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_32 \
    PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64                                                                       \
    PLACES_32                                                                           \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
    " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_96                                                                       \
    PLACES_64                                                                           \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79," \
    " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PLACES_128                                                                      \
    PLACES_96                                                                           \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109," \
    " %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122,"    \
    " %123, %124, %125, %126, %127"
// The descriptor's upper word says: 1024 bytes from eight rows to the next eight, 128-byte swizzle.
#define PRODUCT(N, PLACES, WEIGHTS, X)                                                 \
    "{ .reg .pred add;\n.reg .b64 x;\nsetp.eq.u32 add, 0, 0;\nmov.b64 x, {" X          \
    ", 0x40000040};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" PLACES \
    "}, {" WEIGHTS "}, x, add, 1, 1, 0; }"
#define WEIGHTS_AND_X "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x)

__device__ inline void multiply_wide(float (&d)[16], u32 a0, u32 a1, u32 a2, u32 a3, u32 x) {
    asm volatile(PRODUCT("32", PLACES_16, "%16, %17, %18, %19", "%20")
                 : SUMS_16(0)
                 : WEIGHTS_AND_X);
}
__device__ inline void multiply_wide(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u32 x) {
    asm volatile(PRODUCT("64", PLACES_32, "%32, %33, %34, %35", "%36")
                 : SUMS_16(0), SUMS_16(16)
                 : WEIGHTS_AND_X);
}
__device__ inline void multiply_wide(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u32 x) {
    asm volatile(PRODUCT("128", PLACES_64, "%64, %65, %66, %67", "%68")
                 : SUMS_64(0)
                 : WEIGHTS_AND_X);
}
__device__ inline void multiply_wide(float (&d)[96], u32 a0, u32 a1, u32 a2, u32 a3, u32 x) {
    asm volatile(PRODUCT("192", PLACES_96, "%96, %97, %98, %99", "%100")
                 : SUMS_64(0), SUMS_16(64), SUMS_16(80)
                 : WEIGHTS_AND_X);
}
__device__ inline void multiply_wide(float (&d)[128], u32 a0, u32 a1, u32 a2, u32 a3, u32 x) {
    asm volatile(PRODUCT("256", PLACES_128, "%128, %129, %130, %131", "%132")
                 : SUMS_64(0), SUMS_64(64)
                 : WEIGHTS_AND_X);
}

// Multiplies 64 rows of weights by N rows of x, both in shared memory.
#define PRODUCT_OF_TWO(N, PLACES, W, X)                                                    \
    "{ .reg .pred add;\n.reg .b64 w, x;\nsetp.eq.u32 add, 0, 0;\nmov.b64 w, {" W           \
    ", 0x40000040};\nmov.b64 x, {" X ", 0x40000040};\nwgmma.mma_async.sync.aligned.m64n" N \
    "k16.f32.bf16.bf16 {" PLACES "}, w, x, add, 1, 1, 0, 0; }"
__device__ inline void multiply_stored(float (&d)[16], u32 w, u32 x) {
    asm volatile(PRODUCT_OF_TWO("32", PLACES_16, "%16", "%17") : SUMS_16(0) : "r"(w), "r"(x));
}
__device__ inline void multiply_stored(float (&d)[32], u32 w, u32 x) {
    asm volatile(PRODUCT_OF_TWO("64", PLACES_32, "%32", "%33")
                 : SUMS_16(0), SUMS_16(16)
                 : "r"(w), "r"(x));
}
}  // namespace df11::linear
