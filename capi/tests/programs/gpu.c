/*
 * All tensors of a model on a GPU, in memory of this program and of the library, as stored and in
 * the fast layout: decoded there, compared with the CPU's bytes, and multiplied by.
 * Prints one line. Exit code 77 if there is no GPU.
 */
#include <df11.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3 };

/* The calls of the driver that a runtime has anyway. */
static int (*primary)(void **, int), (*set_current)(void *), (*get_current)(void **);
static int (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
static int (*fill)(uint64_t, unsigned char, size_t);
static int (*up)(uint64_t, const void *, size_t), (*down)(void *, uint64_t, size_t);
static int (*make_stream)(void **, unsigned);

static void need(int answer, int line) {
    if (answer) fprintf(stderr, "line %d: %d, %s\n", line, answer, df11_last_error()), exit(1);
}
#define NEED(call) need((int)(call), __LINE__)

static void driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) exit(77);
#define FIND(pointer, name) NEED(!(*(void **)(&pointer) = dlsym(library, name)))
    FIND(primary, "cuDevicePrimaryCtxRetain");
    FIND(set_current, "cuCtxSetCurrent");
    FIND(get_current, "cuCtxGetCurrent");
    FIND(allocate, "cuMemAlloc_v2");
    FIND(release, "cuMemFree_v2");
    FIND(fill, "cuMemsetD8_v2");
    FIND(up, "cuMemcpyHtoD_v2");
    FIND(down, "cuMemcpyDtoH_v2");
    FIND(make_stream, "cuStreamCreate");
}

static void *take(uint64_t bytes, unsigned char value) {
    uint64_t pointer;
    NEED(allocate(&pointer, bytes ? bytes : 1));
    NEED(fill(pointer, value, bytes ? bytes : 1));
    return (void *)(uintptr_t)pointer;
}

static void give_back(void *pointer) { NEED(release((uint64_t)(uintptr_t)pointer)); }

static float value(const unsigned char *weight) {
    uint32_t bits = (uint32_t)weight[0] << 16 | (uint32_t)weight[1] << 24;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Decodes on the GPU, all rows and then the second half of them. */
static void compare(const df11_gpu *gpu, const df11_gpu_tensor *loaded, const df11_tensor *tensor,
                    const unsigned char *expected, void *stream) {
    unsigned char *found = malloc(tensor->bytes + 1);
    void *output = take(tensor->bytes + 256, 0x5a);
    NEED(df11_gpu_decode(loaded, 0, DF11_ALL_ROWS, output, tensor->bytes, stream));
    NEED(df11_gpu_check(gpu, stream));
    NEED(down(found, (uint64_t)(uintptr_t)output, tensor->bytes));
    NEED(memcmp(found, expected, tensor->bytes));
    uint64_t first = tensor->rows / 2, row = tensor->rows ? tensor->bytes / tensor->rows : 0;
    uint64_t part = (tensor->rows - first) * row;
    NEED(fill((uint64_t)(uintptr_t)output, 0x5a, tensor->bytes));
    NEED(df11_gpu_decode(loaded, first, tensor->rows - first, output, part, stream));
    NEED(df11_gpu_check(gpu, stream));
    NEED(down(found, (uint64_t)(uintptr_t)output, part));
    NEED(memcmp(found, expected + first * row, part));
    give_back(output);
    free(found);
}

/*
 * The largest difference from sums in double, as a share of what rounding to BF16 and sums in float
 * may lose.
 */
static double multiply(const df11_gpu *gpu, const df11_gpu_tensor *loaded,
                       const df11_tensor *tensor, const unsigned char *weights, void *stream) {
    uint64_t height = tensor->matrix_rows, width = tensor->matrix_columns, bytes;
    unsigned char *x = malloc(ROWS * width * 2), *y = malloc(ROWS * height * 2);
    for (uint64_t at = 0; at < ROWS * width; at++) {
        float number = (float)((int)(at * 37 % 101) - 50) / 64;
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        x[2 * at] = (unsigned char)(bits >> 16), x[2 * at + 1] = (unsigned char)(bits >> 24);
    }
    NEED(df11_gpu_workspace(loaded, ROWS, &bytes));
    void *device_x = take(ROWS * width * 2, 0), *device_y = take(ROWS * height * 2, 0x5a);
    void *workspace = bytes ? take(bytes, 0) : NULL;
    NEED(up((uint64_t)(uintptr_t)device_x, x, ROWS * width * 2));
    df11_product product = {.size = sizeof product, .x = device_x, .x_pitch = width, .rows = ROWS};
    product.y = device_y, product.y_pitch = height;
    product.workspace = workspace, product.workspace_bytes = bytes;
    NEED(df11_gpu_multiply(loaded, &product, stream));
    NEED(df11_gpu_check(gpu, stream));
    NEED(down(y, (uint64_t)(uintptr_t)device_y, ROWS * height * 2));
    double worst = 0;
    for (uint64_t row = 0; row < ROWS; row++)
        for (uint64_t at = 0; at < height; at++) {
            double sum = 0, size = 0;
            for (uint64_t column = 0; column < width; column++) {
                double term = (double)value(x + 2 * (row * width + column)) *
                              (double)value(weights + 2 * (at * width + column));
                sum += term, size += fabs(term);
            }
            double allowed = fabs(sum) / 256 + size / (1 << 18);
            double found = (double)value(y + 2 * (row * height + at));
            double error = fabs(found - sum) / (allowed + 1e-30);
            if (error > worst) worst = error;
        }
    give_back(device_x), give_back(device_y);
    if (workspace) give_back(workspace);
    free(x), free(y);
    return worst;
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    driver();
    df11_model *model;
    df11_gpu *gpu;
    NEED(df11_open(arguments[1], 0, &model));
    if (df11_gpu_open(0, &gpu) != DF11_STATUS_OK) {
        fprintf(stderr, "%s\n", df11_last_error());
        return 77;
    }
    void *before = NULL, *context, *stream;
    NEED(get_current(&before));
    NEED(before != NULL); /* The thread had none, and has none. */
    NEED(primary(&context, 0));
    NEED(set_current(context));
    NEED(make_stream(&stream, 1));
    uint64_t tensors = 0, matrices = 0, stored = 0;
    double worst = 0;
    df11_tensor tensor = {.size = sizeof tensor};
    for (uint64_t at = 0; df11_tensor_at(model, at, &tensor) == DF11_STATUS_OK; at++, tensors++) {
        unsigned char *expected = malloc(tensor.bytes + 1);
        NEED(df11_decode(model, at, 0, DF11_ALL_ROWS, expected, tensor.bytes));
        void *memory = take(tensor.gpu_bytes + 256, 0x5a);
        df11_gpu_tensor *loaded, *other;
        NEED(df11_gpu_load(gpu, model, at, 0, memory, tensor.gpu_bytes, &loaded));
        compare(gpu, loaded, &tensor, expected, stream);
        unsigned char end[256];
        NEED(down(end, (uint64_t)(uintptr_t)memory + tensor.gpu_bytes, sizeof end));
        for (size_t byte = 0; byte < sizeof end; byte++) NEED(end[byte] != 0x5a);
        NEED(df11_gpu_load(gpu, model, at, DF11_GPU_FAST, NULL, 0, &other));
        compare(gpu, other, &tensor, expected, stream);
        if (tensor.matrix_rows) {
            uint64_t bytes;
            df11_status answer = df11_gpu_workspace(loaded, 1, &bytes);
            if (answer == DF11_STATUS_OK)
                worst = fmax(worst, multiply(gpu, loaded, &tensor, expected, stream)), stored++;
            else /* BF16 that was FP8 */
                NEED(answer != DF11_STATUS_PARAMETER);
            worst = fmax(worst, multiply(gpu, other, &tensor, expected, stream)), matrices++;
        } else {
            uint64_t bytes;
            NEED(df11_gpu_workspace(loaded, 1, &bytes) != DF11_STATUS_PARAMETER);
        }
        df11_gpu_free(loaded), df11_gpu_free(other);
        give_back(memory);
        free(expected);
    }
    void *now;
    NEED(get_current(&now));
    NEED(now != context);
    df11_gpu_close(gpu);
    df11_close(model);
    printf("%" PRIu64 " tensors equal the CPU's, %" PRIu64 " of them multiplied by, %" PRIu64
           " as stored; error at most %.4f of what rounding may lose\n", tensors, matrices, stored,
           worst);
    return worst <= 1.01 ? 0 : 1;
}
