/* Decodes a model, and again in a child and a grandchild, which have none of the threads. */
#include <df11.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(df11_status status) {
    if (status == DF11_STATUS_OK) return;
    fprintf(stderr, "df11: %s (%d)\n", df11_last_error(), (int)status);
    _exit(1);
}

static void decode_all(const df11_model *model) {
    df11_tensor tensor = {.size = sizeof tensor};
    for (uint64_t at = 0; df11_tensor_at(model, at, &tensor) == DF11_STATUS_OK; at++) {
        void *bytes = malloc(tensor.bytes ? tensor.bytes : 1);
        check(df11_decode(model, at, 0, DF11_ALL_ROWS, bytes, tensor.bytes));
        free(bytes);
    }
}

/* With the parent's model, and with one of its own. */
static void work(const df11_model *parents, const char *path) {
    df11_model *model;
    decode_all(parents);
    check(df11_open(path, 0, &model));
    decode_all(model);
    df11_close(model);
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    df11_model *model;
    check(df11_open(arguments[1], 0, &model));
    decode_all(model);
    for (int depth = 0; depth < 2; depth++) {
        pid_t child = fork();
        if (child) {
            int status;
            if (child < 0 || waitpid(child, &status, 0) < 0) return 3;
            /* Killed by the alarm if it hangs. */
            if (depth) _exit(status ? 4 : 0);
            df11_close(model);
            return status ? 5 : 0;
        }
        alarm(60);
        work(model, arguments[1]);
    }
    _exit(0);
}
