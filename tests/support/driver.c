// A stand-in for the library of the NVIDIA driver, for tests/stand_in.rs: GPUs whose memory is the
// host's and which compute nothing.
//
// The environment of the process says how it answers:
//   DRIVER_<function>    the CUresult with which this function of the driver fails
//   DRIVER_<symbol>      numbers that a module has under this name, with commas between them
//   DRIVER_machine_code  the CUresult with which it refuses kernels that are not PTX
//   DRIVER_version, DRIVER_devices, DRIVER_capability, DRIVER_memory, DRIVER_bus_width
//
// It has the functions that src/gpu/driver.rs lists. One that the crate calls anew is added to
// both.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, END_OF_KNOWN = 1000 };
enum { PROCESSORS = 16, BUS_WIDTH = 37, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
enum { SHARED_MEMORY_OPTIN = 97, MEMORY_POOLS = 115 };

typedef uint64_t Address;
typedef void *Handle;

static const char *text_setting(const char *name) {
    char variable[64];
    snprintf(variable, sizeof variable, "DRIVER_%s", name);
    return getenv(variable);
}

static long setting(const char *name, long otherwise) {
    const char *value = text_setting(name);
    return value ? strtol(value, NULL, 10) : otherwise;
}

// Each function starts with it.
#define FAIL_IF_TOLD                       \
    do {                                   \
        int answer = setting(__func__, 0); \
        if (answer) return answer;         \
    } while (0)

// The body of a function that answers so.
#define ANSWERS(answer) \
    {                   \
        FAIL_IF_TOLD;   \
        return answer;  \
    }

// The body of a function that does so and answers that all is well.
#define DOES(statement) \
    {                   \
        FAIL_IF_TOLD;   \
        statement;      \
        return 0;       \
    }

// --- errors

// The driver has no words for numbers that are not its own.
static int tell(int number, const char *format, char *text, const char **to) {
    if (number >= END_OF_KNOWN) return INVALID_VALUE;
    sprintf(text, format, number);
    *to = text;
    return 0;
}

int cuGetErrorName(int number, const char **to) {
    FAIL_IF_TOLD;
    static _Thread_local char text[32];
    return tell(number, "CUDA_ERROR_%d", text, to);
}

int cuGetErrorString(int number, const char **to) {
    FAIL_IF_TOLD;
    static _Thread_local char text[32];
    return tell(number, "words for %d", text, to);
}

// --- the driver and its GPUs

int cuDriverGetVersion(int *to) DOES(*to = setting("version", 12000))

int cuInit(unsigned flags) {
    FAIL_IF_TOLD;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible && !*visible ? NO_DEVICE : 0;
}

int cuDeviceGetCount(int *to) DOES(*to = setting("devices", 1))
int cuDeviceGet(int *to, int ordinal) DOES(*to = ordinal)
int cuDeviceGetName(char *to, int size, int device) DOES(snprintf(to, size, "Stand-in %d", device))
int cuDeviceTotalMem_v2(size_t *to, int device) DOES(*to = setting("memory", 1 << 30))

int cuDeviceGetAttribute(int *to, int attribute, int device) {
    FAIL_IF_TOLD;
    int capability = setting("capability", 80);
    switch (attribute) {
        case PROCESSORS: *to = 4; return 0;
        case CAPABILITY_MAJOR: *to = capability / 10; return 0;
        case CAPABILITY_MINOR: *to = capability % 10; return 0;
        case SHARED_MEMORY_OPTIN: *to = 227 << 10; return 0;
        case BUS_WIDTH: *to = setting("bus_width", 384); return 0;
        case MEMORY_POOLS: *to = 1; return 0;
        default: return INVALID_VALUE;
    }
}

// --- contexts, streams, events: everything is done at once

static _Thread_local Handle current;

int cuDevicePrimaryCtxRetain(Handle *to, int device) DOES(*to = "the context")
int cuCtxGetCurrent(Handle *to) DOES(*to = current)
int cuCtxSetCurrent(Handle context) DOES(current = context)
int cuDevicePrimaryCtxRelease_v2(int device) ANSWERS(0)
int cuCtxSynchronize(void) ANSWERS(0)
int cuStreamCreate(Handle *to, unsigned flags) DOES(*to = "a stream")
int cuStreamDestroy_v2(Handle stream) ANSWERS(0)
int cuStreamSynchronize(Handle stream) ANSWERS(0)
// Nothing is ever captured.
int cuStreamGetCaptureInfo_v2(Handle stream, int *status, uint64_t *id, Handle graph,
                              Handle dependencies, size_t *count)
    DOES(*status = 0)
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) ANSWERS(0)
int cuEventCreate(Handle *to, unsigned flags) DOES(*to = "an event")
int cuEventElapsedTime(float *to, Handle start, Handle end) DOES(*to = 1)
int cuEventDestroy_v2(Handle event) ANSWERS(0)
int cuEventRecord(Handle event, Handle stream) ANSWERS(0)
int cuEventSynchronize(Handle event) ANSWERS(0)

// --- memory

int cuMemGetInfo_v2(size_t *available, size_t *total)
    DOES(*available = *total = setting("memory", 1 << 30))

static int allocate(void *to, size_t bytes) {
    if (bytes > (size_t)setting("memory", 1 << 30)) return OUT_OF_MEMORY;
    return posix_memalign(to, 256, bytes) ? OUT_OF_MEMORY : 0;
}

int cuMemAlloc_v2(Address *to, size_t bytes) ANSWERS(allocate(to, bytes))
int cuMemAllocAsync(Address *to, size_t bytes, Handle stream) ANSWERS(allocate(to, bytes))
int cuMemHostRegister_v2(Handle memory, size_t bytes, unsigned flags) ANSWERS(0)
int cuMemHostUnregister(Handle memory) ANSWERS(0)

int cuMemHostGetDevicePointer_v2(Address *to, Handle memory, unsigned flags)
    DOES(*to = (Address)memory)

static int release(Address memory) {
    free((Handle)memory);
    return 0;
}

int cuMemFree_v2(Address memory) ANSWERS(release(memory))
int cuMemFreeAsync(Address memory, Handle stream) ANSWERS(release(memory))

static int copy(Address to, Address from, size_t bytes) {
    memcpy((Handle)to, (Handle)from, bytes);
    return 0;
}

int cuMemcpyHtoDAsync_v2(Address to, Address from, size_t bytes, Handle stream)
    ANSWERS(copy(to, from, bytes))

int cuMemcpyDtoHAsync_v2(Address to, Address from, size_t bytes, Handle stream)
    ANSWERS(copy(to, from, bytes))

int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Handle stream)
    ANSWERS(copy(to, from, bytes))

int cuMemcpyAsync(Address to, Address from, size_t bytes, Handle stream)
    ANSWERS(copy(to, from, bytes))

// As cuda.h has it; memory is unified.
struct Rows {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    Address from;
    Handle from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    Address to;
    Handle to_array;
    size_t to_pitch, width, height;
};

int cuMemcpy2DAsync_v2(const struct Rows *rows, Handle stream) {
    FAIL_IF_TOLD;
    for (size_t row = 0; row < rows->height; row++)
        copy(rows->to + row * rows->to_pitch, rows->from + row * rows->from_pitch, rows->width);
    return 0;
}

int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Handle stream)
    DOES(memset((Handle)to, value, bytes))

// --- kernels: a function is its name, and lives as long as the process

int cuModuleLoadData(Handle *to, const void *image) {
    FAIL_IF_TOLD;
    *to = "a module";
    return memcmp(image, "\177ELF", 4) ? 0 : setting("machine_code", 0);
}

int cuModuleGetFunction(Handle *to, Handle module, const char *name) DOES(*to = strdup(name))
int cuFuncGetAttribute(int *to, int attribute, Handle function) DOES(*to = 0)
int cuTensorMapEncodeTiled(void *map) ANSWERS(0)
int cuModuleUnload(Handle module) ANSWERS(0)
int cuFuncSetAttribute(Handle function, int attribute, int value) ANSWERS(0)

static int global(Address *to, size_t *bytes, const char *name) {
    static _Thread_local uint32_t numbers[256];
    *to = (Address)numbers, *bytes = 0;
    for (const char *next = text_setting(name); next; next = strchr(next, ',')) {
        next += *next == ',';
        numbers[*bytes / 4] = strtoul(next, NULL, 10), *bytes += 4;
    }
    return 0;
}

int cuModuleGetGlobal_v2(Address *to, size_t *bytes, Handle module, const char *name)
    ANSWERS(global(to, bytes, name))

int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *to, Handle function, int threads,
                                                         size_t shared_bytes, unsigned flags)
    DOES(*to = 1)

int cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared_bytes, Handle stream,
                   void **parameters, void **extra)
    ANSWERS(0)

// As cuda.h has them.
struct Attribute {
    int id, pad, value[16];
};
struct Config {
    unsigned grid[3], block[3], shared_bytes;
    Handle stream;
    const struct Attribute *attributes;
    unsigned count;
};

// With the attributes that the crate uses: programmatic stream serialization, allowed (6), and the
// blocks of a cluster (4).
int cuLaunchKernelEx(const struct Config *config, Handle function, void **parameters,
                     void **extra) {
    FAIL_IF_TOLD;
    if (!config->count) return INVALID_VALUE;
    for (unsigned i = 0; i < config->count; i++) {
        const struct Attribute *attribute = &config->attributes[i];
        const int *value = attribute->value;
        if (attribute->id == 6 ? value[0] != 1 : attribute->id != 4 || value[0] < 1)
            return INVALID_VALUE;
    }
    if (!config->block[0] || !config->grid[0]) return INVALID_VALUE;
    return 0;
}
