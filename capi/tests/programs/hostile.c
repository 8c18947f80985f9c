/* What no program should do: each call is refused with a code and a text, and writes nothing. */
#include <df11.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect(df11_status status, df11_status wanted, const char *part, int line) {
    const char *text = df11_last_error();
    if (status == wanted && (wanted == DF11_STATUS_OK || strstr(text, part))) return;
    fprintf(stderr, "line %d: %d instead of %d: %s\n", line, (int)status, (int)wanted, text);
    exit(1);
}

#define OK(call) expect(call, DF11_STATUS_OK, "", __LINE__)
#define REFUSED(call, part) expect(call, DF11_STATUS_PARAMETER, part, __LINE__)
#define FAILS(call, code, part) expect(call, DF11_STATUS_##code, part, __LINE__)

static void opening(const char *path) {
    df11_model *model = (df11_model *)&model;
    REFUSED(df11_open(NULL, 0, &model), "path is NULL");
    if (model) exit(2);
    REFUSED(df11_open(path, 0, NULL), "model is NULL");
    REFUSED(df11_open(path, 6, &model), "flags 0x6");
    REFUSED(df11_open("/dev/null", 0, &model), "not a regular file");
    FAILS(df11_open("/no such file", 0, &model), IO, "/no such file");
    FAILS(df11_open("\xff\xfe", 0, &model), IO, "opening");
    df11_close(NULL);
}

static void listing(const df11_model *model) {
    df11_tensor tensor;
    memset(&tensor, 7, sizeof tensor);
    df11_tensor before = tensor;
    tensor.size = before.size = sizeof tensor - 1;
    REFUSED(df11_tensor_at(model, 0, &tensor), "set its size");
    tensor.size = before.size = 0;
    REFUSED(df11_tensor_named(model, "model.norm.weight", &tensor), "set its size");
    tensor.size = before.size = sizeof tensor;
    FAILS(df11_tensor_at(model, 1000000, &tensor), NOT_FOUND, "no tensor 1000000");
    FAILS(df11_tensor_at(model, UINT64_MAX, &tensor), NOT_FOUND, "no tensor");
    FAILS(df11_tensor_named(model, "", &tensor), NOT_FOUND, "no tensor");
    FAILS(df11_tensor_named(model, "\xff", &tensor), NOT_FOUND, "no tensor");
    REFUSED(df11_tensor_named(model, NULL, &tensor), "name is NULL");
    REFUSED(df11_tensor_at(NULL, 0, &tensor), "model is NULL");
    REFUSED(df11_tensor_at(model, 0, NULL), "tensor is NULL");
    if (memcmp(&tensor, &before, sizeof tensor)) exit(3);
    /* A program that was compiled with a later header. */
    struct { df11_tensor tensor; uint64_t later; } larger;
    larger.tensor.size = sizeof larger, larger.later = 42;
    OK(df11_tensor_at(model, 0, &larger.tensor));
    if (larger.tensor.size != sizeof tensor || larger.later != 42) exit(4);
}

static void decoding(const df11_model *model, const char *name) {
    df11_tensor tensor = {.size = sizeof tensor};
    OK(df11_tensor_named(model, name, &tensor));
    uint64_t index = tensor.index, row = tensor.bytes / tensor.rows;
    unsigned char *output = malloc(tensor.bytes + 16), *end = output + tensor.bytes;
    memset(output, 0x5a, tensor.bytes + 16);
    REFUSED(df11_decode(NULL, index, 0, DF11_ALL_ROWS, output, tensor.bytes), "model is NULL");
    REFUSED(df11_decode(model, index, 0, DF11_ALL_ROWS, NULL, tensor.bytes), "output is NULL");
    REFUSED(df11_decode(model, index, 0, DF11_ALL_ROWS, output, tensor.bytes - 1), "bytes of");
    REFUSED(df11_decode(model, index, 0, DF11_ALL_ROWS, output, tensor.bytes + 1), "bytes of");
    REFUSED(df11_decode(model, index, 0, 1, output, tensor.bytes), "bytes of");
    REFUSED(df11_decode(model, index, tensor.rows, 1, output, row), "rows from");
    REFUSED(df11_decode(model, index, tensor.rows + 1, DF11_ALL_ROWS, output, 0), "rows from");
    REFUSED(df11_decode(model, index, 2, UINT64_MAX - 1, output, row), "rows from");
    REFUSED(df11_decode(model, index, UINT64_MAX, DF11_ALL_ROWS, output, row), "rows from");
    FAILS(df11_decode(model, UINT64_MAX, 0, 1, output, row), NOT_FOUND, "no tensor");
    for (unsigned char *at = output; at < end + 16; at++)
        if (*at != 0x5a) exit(5);
    OK(df11_decode(model, index, tensor.rows, 0, NULL, 0));
    OK(df11_decode(model, index, tensor.rows - 1, DF11_ALL_ROWS, output, row));
    OK(df11_decode(model, index, 0, DF11_ALL_ROWS, output, tensor.bytes));
    for (unsigned char *at = end; at < end + 16; at++)
        if (*at != 0x5a) exit(6);
    free(output);
}

/* Files that end early, and files with one bit changed. */
static void damaged(const char *path, const char *scratch) {
    FILE *file = fopen(path, "rb");
    fseek(file, 0, SEEK_END);
    size_t length = (size_t)ftell(file);
    unsigned char *bytes = malloc(length);
    rewind(file);
    if (fread(bytes, 1, length, file) != length) exit(7);
    fclose(file);
    for (size_t at = 0; at < 32; at++) {
        size_t kept = length * at / 32;
        file = fopen(scratch, "wb");
        if (fwrite(bytes, 1, kept, file) != kept) exit(8);
        fclose(file);
        for (uint32_t flags = 0; flags < 2; flags++) {
            df11_model *model;
            df11_status status = df11_open(scratch, flags, &model);
            if (status == DF11_STATUS_OK || model || !*df11_last_error()) exit(9);
        }
    }
    unsigned refused = 0;
    for (size_t at = 0; at < 32; at++) {
        size_t place = (length - 1) * at / 31;
        bytes[place] ^= 0x10;
        file = fopen(scratch, "wb");
        if (fwrite(bytes, 1, length, file) != length) exit(8);
        fclose(file);
        bytes[place] ^= 0x10;
        df11_model *model;
        df11_status status = df11_open(scratch, 0, &model);
        df11_tensor tensor = {.size = sizeof tensor};
        for (uint64_t index = 0; status == DF11_STATUS_OK; index++) {
            if ((status = df11_tensor_at(model, index, &tensor)) == DF11_STATUS_NOT_FOUND) break;
            unsigned char *output = malloc(tensor.bytes + 1);
            if (status == DF11_STATUS_OK)
                status = df11_decode(model, index, 0, DF11_ALL_ROWS, output, tensor.bytes);
            free(output);
        }
        df11_close(model);
        refused += status == DF11_STATUS_CORRUPT;
    }
    /* Padding, side files and the footer are in no tensor. */
    if (refused < 20) fprintf(stderr, "%u of 32 changes are seen\n", refused), exit(10);
    free(bytes);
}

static void gpu(const df11_model *model, const char *name, int is_there) {
    df11_gpu *gpu = (df11_gpu *)&gpu;
    df11_gpu_tensor *tensor;
    uint64_t bytes;
    REFUSED(df11_gpu_open(0, NULL), "NULL");
    REFUSED(df11_gpu_load(NULL, model, 0, 0, NULL, 0, &tensor), "GPU is NULL");
    REFUSED(df11_gpu_load(NULL, model, 0, 0, NULL, 0, NULL), "NULL");
    REFUSED(df11_gpu_decode(NULL, 0, 1, NULL, 0, NULL), "tensor is NULL");
    REFUSED(df11_gpu_workspace(NULL, 1, &bytes), "tensor is NULL");
    REFUSED(df11_gpu_multiply(NULL, NULL, NULL), "tensor is NULL");
    REFUSED(df11_gpu_check(NULL, NULL), "GPU is NULL");
    df11_gpu_free(NULL);
    df11_gpu_close(NULL);
    if (!is_there) {
        FAILS(df11_gpu_open(0, &gpu), GPU, "driver");
        if (gpu) exit(11);
        return;
    }
    REFUSED(df11_gpu_open(1000, &gpu), "no GPU 1000");
    OK(df11_gpu_open(0, &gpu));
    df11_tensor of = {.size = sizeof of};
    OK(df11_tensor_named(model, name, &of));
    /* Nobody reads or writes there before it is refused. */
    void *place = (void *)(uintptr_t)4096;
    REFUSED(df11_gpu_load(gpu, NULL, 0, 0, NULL, 0, &tensor), "model is NULL");
    FAILS(df11_gpu_load(gpu, model, UINT64_MAX, 0, NULL, 0, &tensor), NOT_FOUND, "no tensor");
    REFUSED(df11_gpu_load(gpu, model, of.index, 0, place, of.gpu_bytes - 1, &tensor), "bytes of");
    void *odd = (char *)place + 16;
    REFUSED(df11_gpu_load(gpu, model, of.index, 0, odd, of.gpu_bytes, &tensor), "256");
    REFUSED(df11_gpu_load(gpu, model, of.index, 0, NULL, of.gpu_bytes, &tensor), "256");
    REFUSED(df11_gpu_load(gpu, model, of.index, 2, NULL, 0, &tensor), "flags 0x2");
    REFUSED(df11_gpu_load(gpu, model, of.index, DF11_GPU_FAST, place, of.gpu_bytes, &tensor),
            "flags");
    if (tensor) exit(12);
    OK(df11_gpu_load(gpu, model, of.index, 0, NULL, 0, &tensor));
    df11_gpu_close(gpu);
    REFUSED(df11_gpu_decode(tensor, 0, DF11_ALL_ROWS, place, of.bytes - 1, NULL), "bytes of");
    REFUSED(df11_gpu_decode(tensor, of.rows, 1, place, of.bytes, NULL), "rows from");
    REFUSED(df11_gpu_decode(tensor, 0, DF11_ALL_ROWS, NULL, of.bytes, NULL), "output is NULL");
    REFUSED(df11_gpu_decode(tensor, 0, DF11_ALL_ROWS, (char *)place + 8, of.bytes, NULL), "16");
    REFUSED(df11_gpu_workspace(tensor, 1, NULL), "NULL");
    OK(df11_gpu_workspace(tensor, 1, &bytes));
    if (!bytes) exit(14);
    df11_product product = {.size = sizeof product, .x = place, .y = place, .rows = 1};
    REFUSED(df11_gpu_multiply(tensor, NULL, NULL), "product is NULL");
    product.workspace_bytes = bytes - 1, product.workspace = place;
    REFUSED(df11_gpu_multiply(tensor, &product, NULL), "workspace of");
    product.workspace_bytes = bytes, product.workspace = NULL;
    REFUSED(df11_gpu_multiply(tensor, &product, NULL), "workspace of");
    product.workspace = (char *)place + 8;
    REFUSED(df11_gpu_multiply(tensor, &product, NULL), "misaligned");
    product.workspace = place, product.x = NULL;
    REFUSED(df11_gpu_multiply(tensor, &product, NULL), "x or y is NULL");
    product.x = place, product.rows = 2;
    product.workspace_bytes = UINT64_MAX;
    REFUSED(df11_gpu_multiply(tensor, &product, NULL), "overlap");
    product.size = sizeof product - 8;
    REFUSED(df11_gpu_multiply(tensor, &product, NULL), "set its size");
    df11_gpu_free(tensor);
}

/* hostile CONTAINER MATRIX SCRATCH [gpu] */
int main(int count, char **arguments) {
    if (count < 4) return 2;
    if (*df11_last_error()) return 13;
    opening(arguments[1]);
    df11_model *model;
    OK(df11_open(arguments[1], 0, &model));
    listing(model);
    decoding(model, arguments[2]);
    gpu(model, arguments[2], count > 4);
    df11_close(model);
    if (count == 4) damaged(arguments[1], arguments[3]);
    return 0;
}
