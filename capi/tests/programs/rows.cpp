// A C++ program: handles that close themselves, and rows that threads decode at once.
#include <df11.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void check(df11_status status) {
    if (status != DF11_STATUS_OK) throw std::runtime_error(df11_last_error());
}

struct Close {
    void operator()(df11_model *model) const { df11_close(model); }
};
using Model = std::unique_ptr<df11_model, Close>;

Model open(const char *path, uint32_t flags) {
    df11_model *model = nullptr;
    check(df11_open(path, flags, &model));
    return Model(model);
}

df11_tensor named(const Model &model, const std::string &name) {
    df11_tensor tensor{};
    tensor.size = sizeof tensor;
    check(df11_tensor_named(model.get(), name.c_str(), &tensor));
    return tensor;
}

std::vector<char> decode(const Model &model, const df11_tensor &tensor, uint64_t first,
                         uint64_t rows) {
    std::vector<char> bytes(tensor.bytes / tensor.rows * rows);
    check(df11_decode(model.get(), tensor.index, first, rows, bytes.data(), bytes.size()));
    return bytes;
}

// Four threads decode a quarter each; all quarters are the whole, also of a file that is not
// mapped.
bool quarters_are_the_whole(const char *path, const std::string &name) {
    Model model = open(path, 0), other = open(path, DF11_OPEN_WITHOUT_MAP);
    const df11_tensor tensor = named(model, name);
    const uint64_t quarter = tensor.rows / 4;
    std::vector<std::vector<char>> parts(4);
    std::vector<std::thread> threads;
    for (uint64_t part = 0; part < 4; part++)
        threads.emplace_back([&, part] {
            const uint64_t rows = part < 3 ? quarter : tensor.rows - 3 * quarter;
            parts[part] = decode(model, tensor, part * quarter, rows);
        });
    for (auto &thread : threads) thread.join();
    std::vector<char> joined;
    for (const auto &part : parts) joined.insert(joined.end(), part.begin(), part.end());
    const df11_tensor same = named(other, name);
    return joined == decode(other, same, 0, same.rows) && joined.size() == tensor.bytes;
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 3) return 2;
    try {
        open("/no such file", 0);
        return 3;
    } catch (const std::runtime_error &error) {
        if (!std::strstr(error.what(), "/no such file")) return 4;
    }
    try {
        return quarters_are_the_whole(arguments[1], arguments[2]) ? 0 : 1;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 5;
    }
}
