// Host side of tile_bench.cu: weights, codes, bits. Loaded after the kernel, for its types.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

inline int cpu_threads() { return std::max(1u, std::thread::hardware_concurrency()); }
inline void parallel(size_t n, const std::function<void(size_t)>& f) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> ts;
    for (int t = 0; t < cpu_threads(); t++)
        ts.emplace_back([&] {
            for (size_t i; (i = next++) < n;) f(i);
        });
    for (auto& t : ts) t.join();
}

struct Matrix {
    u32 rows, cols;
    std::vector<u16> w;
    u64 elements() const { return u64(rows) * cols; }
};

struct Rng {
    u64 s;
    u64 next() {
        s += 0x9E3779B97F4A7C15ull;
        u64 z = s;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    }
};
inline u16 to_bf16(float f) {
    u32 b;
    memcpy(&b, &f, 4);
    return u16((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
// mode 0: N(0, sigma^2); 1: a sigma for each row; 2: uniform random bits (all patterns); 3: like 0
// with 1 in 1000 random patterns
inline Matrix make_matrix(u32 rows, u32 cols, u64 seed, int mode) {
    Matrix m{rows, cols, std::vector<u16>(u64(rows) * cols)};
    parallel(rows, [&](size_t r) {
        Rng g{seed * 1000003 + r * 7919 + 17};
        float sigma = mode == 1 ? 0.02f * expf(0.6f * sinf(float(r) * 12.9898f)) : 0.02f;
        u16* to = &m.w[r * cols];
        for (u32 c = 0; c < cols; c += 2) {
            float x, y, q;
            do {
                u64 z = g.next();
                x = float(int32_t(z)) * 4.656613e-10f;
                y = float(int32_t(z >> 32)) * 4.656613e-10f;
                q = x * x + y * y;
            } while (q >= 1 || q == 0);
            float k = sigma * sqrtf(-2 * logf(q) / q);
            to[c] = to_bf16(x * k);
            if (c + 1 < cols) to[c + 1] = to_bf16(y * k);
            if (mode == 2) {
                u64 z = g.next();
                to[c] = u16(z);
                if (c + 1 < cols) to[c + 1] = u16(z >> 16);
            }
            if (mode == 3 && g.next() % 1000 == 0) to[c] = u16(g.next());
        }
    });
    return m;
}
inline u32 exponent(u16 w) { return w >> 7 & 0xFF; }
inline u8 sign_mantissa(u16 w) { return u8(w >> 8 & 0x80 | w & 0x7F); }

// Lengths of an optimal code of at most `limit` bits (package-merge).
inline std::vector<u8> code_lengths(const std::vector<u64>& counts, int limit) {
    std::vector<u8> lengths(counts.size(), 0);
    std::vector<u32> used;
    for (u32 i = 0; i < counts.size(); i++)
        if (counts[i]) used.push_back(i);
    if (used.size() == 1) {
        lengths[used[0]] = 1;
        return lengths;
    }
    std::stable_sort(used.begin(), used.end(), [&](u32 a, u32 b) { return counts[a] < counts[b]; });
    size_t n = used.size();
    std::vector<std::pair<u64, std::vector<u16>>> prev, cur;
    for (int level = 0; level < limit; level++) {
        std::vector<std::pair<u64, std::vector<u16>>> packages;
        for (size_t i = 0; i + 1 < prev.size(); i += 2) {
            auto v = prev[i].second;
            v.insert(v.end(), prev[i + 1].second.begin(), prev[i + 1].second.end());
            packages.push_back({prev[i].first + prev[i + 1].first, std::move(v)});
        }
        cur.clear();
        size_t a = 0, b = 0;
        while (a < n || b < packages.size()) {
            if (b == packages.size() || (a < n && counts[used[a]] <= packages[b].first)) {
                cur.push_back({counts[used[a]], {u16(a)}});
                a++;
            } else
                cur.push_back(std::move(packages[b++]));
        }
        if (cur.size() > 2 * n) cur.resize(2 * n);
        prev = std::move(cur);
        cur = {};
    }
    for (size_t i = 0; i < 2 * n - 2; i++)
        for (u16 leaf : prev[i].second) lengths[used[leaf]]++;
    return lengths;
}
// Canonical codes, bit-reversed: the first bit of a code is its bit 0.
inline std::vector<u32> reversed_codes(const std::vector<u8>& lengths) {
    std::vector<u32> codes(lengths.size(), 0);
    u32 code = 0;
    for (int l = 1; l <= 16; l++) {
        for (u32 s = 0; s < lengths.size(); s++)
            if (lengths[s] == l) {
                u32 r = 0;
                for (int i = 0; i < l; i++) r |= (code >> i & 1) << (l - 1 - i);
                codes[s] = r;
                code++;
            }
        code <<= 1;
    }
    return codes;
}

// A code over pairs of exponents, e0 | e1 << 8. Length 0: no code, an escape and 16 bits.
constexpr u32 ESCAPE = 65536;
struct Code {
    std::vector<u8> lengths;  // 65536
    std::vector<u32> codes;
    u32 escape_length = 0, escape_code = 0;
    std::vector<u32> table;  // the kernel's, 2^limit entries
    std::vector<u8> codebook;
    double bits_a_weight = 0;
};

inline Code code_of(const std::vector<u64>& counts, u64 pairs, int limit);
inline Code make_code(const Matrix& m, int limit) {
    std::vector<u64> counts(65536, 0);
    std::vector<std::vector<u64>> parts(cpu_threads(), counts);
    const size_t pairs = m.elements() / 2;
    const size_t per = (pairs + parts.size() - 1) / parts.size();
    parallel(parts.size(), [&](size_t t) {
        for (size_t i = t * per; i < std::min(pairs, (t + 1) * per); i++)
            parts[t][exponent(m.w[2 * i]) | exponent(m.w[2 * i + 1]) << 8]++;
    });
    for (auto& part : parts)
        for (u32 i = 0; i < 65536; i++) counts[i] += part[i];
    return code_of(counts, pairs, limit);
}
// Bits that an escape counts more than it takes, as in the crate's encoder.
static double escape_cost = 20;
// Of this many pairs.
inline Code code_of(const std::vector<u64>& counts, u64 pairs, int limit) {
    Code c;
    std::vector<u32> order;
    for (u32 i = 0; i < 65536; i++)
        if (counts[i]) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](u32 a, u32 b) { return counts[a] > counts[b]; });
    // The rarest pairs share the escape. Eight thresholds, the best one counts.
    double best = 1e30;
    std::vector<u8> best_lengths;
    size_t kept = 0;
    for (double factor : {1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125}) {
        const u64 least = u64(pairs / double(1u << limit) * factor);
        std::vector<u64> symbols;
        u64 escaped = 0;
        for (u32 pair : order)
            if (counts[pair] > least)
                symbols.push_back(counts[pair]);
            else
                escaped += counts[pair];
        const size_t k = symbols.size();
        symbols.push_back(std::max<u64>(escaped, 1));
        if (symbols.size() > 1u << limit) continue;
        std::vector<u8> lengths = code_lengths(symbols, limit);
        double bits = (16.0 + escape_cost) * escaped;
        for (size_t i = 0; i < symbols.size(); i++) bits += double(symbols[i]) * lengths[i];
        if (bits < best) {
            best = bits;
            best_lengths = lengths;
            kept = k;
        }
    }
    // Canonical order within a length: that of the values, the escape last.
    std::vector<std::pair<u32, u8>> symbols;
    for (size_t i = 0; i < kept; i++) symbols.push_back({order[i], best_lengths[i]});
    std::sort(symbols.begin(), symbols.end());
    symbols.push_back({ESCAPE, best_lengths[kept]});
    std::vector<u8> lengths;
    for (auto& [value, length] : symbols) lengths.push_back(length);
    const std::vector<u32> codes = reversed_codes(lengths);
    c.lengths.assign(65536, 0), c.codes.assign(65536, 0);
    c.table.assign(size_t(1) << limit, 0x80000000u | 31u << 15 | 1);  // no code
    for (size_t i = 0; i < symbols.size(); i++) {
        const auto [value, length] = symbols[i];
        u32 entry = (value >> 8) << 23 | (value & 255) << 7 | length;
        if (value == ESCAPE) {
            c.escape_length = length;
            c.escape_code = codes[i];
            entry = 0x80000000u | u32(length) << 15 | (length + 16u);
        } else {
            c.lengths[value] = length;
            c.codes[value] = codes[i];
        }
        for (u32 at = codes[i]; at < c.table.size(); at += 1u << length) c.table[at] = entry;
    }
    auto put = [&](u32 word) {
        c.codebook.push_back(u8(word)), c.codebook.push_back(u8(word >> 8));
    };
    put(c.escape_length);
    for (u32 length = 1; length <= 12; length++)
        put(u32(std::count(lengths.begin(), lengths.end() - 1, length)));
    for (u32 length = 1; length <= 12; length++)
        for (size_t i = 0; i < kept; i++)
            if (symbols[i].second == length) put(symbols[i].first);
    c.bits_a_weight = best / double(2 * pairs);
    return c;
}

struct BitWriter {
    std::vector<u8>& to;
    u64 acc = 0;
    u32 n = 0;
    void put(u32 code, u32 len) {
        acc |= u64(code) << n;
        n += len;
        while (n >= 8) to.push_back(u8(acc)), acc >>= 8, n -= 8;
    }
    void put_long(u64 code, u32 len) {
        put(u32(code & 0xFFFF), std::min(len, 16u));
        if (len > 16) put_long(code >> 16, len - 16);
    }
};

struct PairCode {
    u64 code;
    u32 length;
};
inline PairCode pair_code(const Code& c, u32 pair) {
    if (c.lengths[pair]) return {c.codes[pair], c.lengths[pair]};
    return {u64(c.escape_code) | u64(pair) << c.escape_length, c.escape_length + 16};
}
