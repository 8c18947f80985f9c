/* Lists a model and decodes all of it on the CPU: one line a tensor, with a hash of its bytes. */
#include <df11.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void check(df11_status status) {
    if (status != DF11_STATUS_OK) {
        fprintf(stderr, "df11: %s (%d)\n", df11_last_error(), (int)status);
        exit(1);
    }
}

/* FNV-1a. */
static uint64_t hash(const unsigned char *bytes, uint64_t length) {
    uint64_t value = UINT64_C(0xcbf29ce484222325);
    for (uint64_t at = 0; at < length; at++) value = (value ^ bytes[at]) * UINT64_C(0x100000001b3);
    return value;
}

static void describe(const df11_model *model, const df11_tensor *tensor) {
    unsigned char *bytes = malloc(tensor->bytes ? tensor->bytes : 1);
    if (!bytes) exit(1);
    check(df11_decode(model, tensor->index, 0, DF11_ALL_ROWS, bytes, tensor->bytes));
    printf("%" PRIu64 " %s %s %s %s [", tensor->index, tensor->name, tensor->block, tensor->dtype,
           tensor->encoding);
    for (uint64_t at = 0; at < tensor->rank; at++)
        printf("%s%" PRIu64, at ? "," : "", tensor->shape[at]);
    printf("] %" PRIu64 " of %" PRIu64 " bytes, as %" PRIu64 ", ", tensor->stored_bytes,
           tensor->bytes, tensor->target);
    printf("%" PRIu64 "x%" PRIu64 ", %016" PRIx64 "\n", tensor->matrix_rows, tensor->matrix_columns,
           hash(bytes, tensor->bytes));
    free(bytes);
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    if (df11_version() >> 16 != DF11_VERSION_MAJOR) return 3;
    df11_model *model;
    check(df11_open(arguments[1], 0, &model));
    df11_tensor tensor = {.size = sizeof tensor};
    df11_status status;
    for (uint64_t at = 0; (status = df11_tensor_at(model, at, &tensor)) == DF11_STATUS_OK; at++)
        describe(model, &tensor);
    if (status != DF11_STATUS_NOT_FOUND) check(status);
    df11_close(model);
    return 0;
}
