// Makes weights, and matrices and vectors in tiles as stored, on the GPU. Included after bench.hpp.
#pragma once
#include <numeric>

__device__ inline u16 to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
__device__ inline u64 random_bits(u64 s) {
    s = s * 0x9E3779B97F4A7C15ull + 0x9E3779B97F4A7C15ull;
    s = (s ^ s >> 30) * 0xBF58476D1CE4E5B9ull;
    s = (s ^ s >> 27) * 0x94D049BB133111EBull;
    return s ^ s >> 31;
}
// Modes. 0: N(0, 0.02^2); 1: a sigma for each row, heavy tails; 2: random bits, all patterns; 3:
// like 0, but one weight of 1000 has any finite size; 4: N(0, 1); 5: like 0 with infinities, NaN
// and zeros; 6: like 4 with infinities and NaN in some rows; 7: like 0, every third row zero.
// `zeros`: in mode 0 one weight of this many is zero; none, if it is 0.
__global__ void fill(u16* to, u32 rows, u32 columns, u64 seed, int mode, u32 zeros) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < u64(rows) * columns;
         i += u64(gridDim.x) * blockDim.x) {
        const u64 z = random_bits(random_bits(seed) + i), z2 = random_bits(z + 1);
        const float u = (u32(z) + 0.5f) * 2.3283064e-10f, v = u32(z >> 32) * 2.3283064e-10f;
        const u32 row = u32(i / columns);
        float sigma = mode == 4 || mode == 6 ? 1.f : 0.02f;
        if (mode == 1) sigma *= expf(0.6f * sinf(row * 12.9898f)) * (u32(z2) % 64 ? 1.f : 8.f);
        u16 w = to_bf16(sigma * sqrtf(-2 * logf(fminf(u, 0.9999999f))) * cospif(2 * v));
        if (mode == 0 && zeros && u32(z2) % zeros == 0) w = 0;
        if (mode == 2) w = u16(z2);
        if (mode == 3 && u32(z2) % 1000 == 0)
            w = u16(z2 >> 32) & 0x80FF | u16((z2 >> 48) % 160) << 7;
        if (mode == 5 && u32(z2) % 3000 == 0)
            w = (z2 >> 40) % 8 == 0 ? ((z2 >> 32) % 2 ? 0x7F80 : 0xFFC1)
                : (z2 >> 33) % 2    ? 0
                                    : 0x8000;
        if (mode == 6 && row % 5 == 3 && u32(z2) % 3000 == 0) w = (z2 >> 32) % 2 ? 0x7F80 : 0xFFC1;
        if (mode == 7 && row % 3 == 1) w = 0;
        to[i] = w;
    }
}
static u32 zeros = 0;
static u16* make_weights(u32 rows, u32 columns, u64 seed, int mode) {
    u16* to = allocate<u16>(u64(rows) * columns);
    fill<<<1024, 256>>>(to, rows, columns, seed, mode, zeros);
    CUDA(cudaDeviceSynchronize());
    return to;
}

// Returns the lengths of an optimal code of at most `limit` bits (package-merge).
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
// Returns canonical codes, bit-reversed: the first bit of a code is its bit 0.
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

// A code over pairs of exponents, e0 | e1 << 8.
constexpr u32 ESCAPE = 65536;
constexpr u32 NO_PAIR = 1u << 31 | 1u << 20;  // flags in an entry of the kernel's table
struct Code {
    std::vector<u64> codes;  // per pair: length << 32 | code, escapes with their values
    std::vector<u32> table;  // the kernel's, 2^limit entries
    std::vector<u8> codebook;
};

// Bits that an escape counts in addition to those that it takes, as in the crate's encoder.
static double escape_cost = 20;
// Makes the code for `pairs` pairs.
static Code code_of(const std::vector<u64>& counts, u64 pairs, int limit) {
    Code c;
    std::vector<u32> order;
    for (u32 i = 0; i < 65536; i++)
        if (counts[i]) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](u32 a, u32 b) { return counts[a] > counts[b]; });
    // The rarest pairs share the escape. Of eight thresholds, the best is taken.
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
    // Canonical order within a length is that of the values, with the escape last.
    std::vector<std::pair<u32, u8>> symbols;
    for (size_t i = 0; i < kept; i++) symbols.push_back({order[i], best_lengths[i]});
    std::sort(symbols.begin(), symbols.end());
    symbols.push_back({ESCAPE, best_lengths[kept]});
    std::vector<u8> lengths;
    for (auto& [value, length] : symbols) lengths.push_back(length);
    const std::vector<u32> codes = reversed_codes(lengths);
    u64 escape = 0;
    c.codes.assign(65536, 0);
    c.table.assign(size_t(1) << limit, NO_PAIR | 31u << 15 | 1);  // no code
    for (size_t i = 0; i < symbols.size(); i++) {
        const auto [value, length] = symbols[i];
        u32 entry = (value >> 8) << 23 | (value & 255) << 7 | length;
        const u64 of_value = u64(length) << 32 | codes[i];
        if (value == ESCAPE) {
            escape = of_value;
            entry = NO_PAIR | u32(length) << 15 | (length + 16u);
        } else {
            c.codes[value] = of_value;
        }
        for (u32 at = codes[i]; at < c.table.size(); at += 1u << length) c.table[at] = entry;
    }
    auto put = [&](u32 word) {
        c.codebook.push_back(u8(word)), c.codebook.push_back(u8(word >> 8));
    };
    // Pairs without a code have the escape and 16 bits.
    const u32 escape_length = u32(escape >> 32);
    for (u32 pair = 0; pair < 65536; pair++)
        if (!c.codes[pair]) c.codes[pair] = escape + (16ull << 32) + (u64(pair) << escape_length);
    put(escape_length);
    for (u32 length = 1; length <= 12; length++)
        put(u32(std::count(lengths.begin(), lengths.end() - 1, length)));
    for (u32 length = 1; length <= 12; length++)
        for (size_t i = 0; i < kept; i++)
            if (symbols[i].second == length) put(symbols[i].first);
    return c;
}

// Rows and columns in tiles of 32 x 256, or one row in tiles of 8192 (`linear`).
struct Geometry {
    u32 rows = 0, columns = 0;
    bool linear = false;
    __host__ __device__ u32 width() const { return linear ? 8192 : 256; }  // columns of a tile
    __host__ __device__ u32 across() const { return (columns + width() - 1) / width(); }
    __host__ __device__ u32 row_lanes() const { return linear ? 32 : 4; }  // lanes per row
    u64 tiles() const { return u64((rows + 31) / 32) * across(); }
    u64 elements() const { return u64(rows) * columns; }
};
// Whether the kernel that derives tables comes from the file of kernels, if there is one: a file of
// kernels that multiply has none.
static bool tables_of_file = true;
// A tensor in tiles, on the device.
struct Tiles : Geometry {
    u32 staged = 0;  // most bytes of a tile's bits
    u64 bits_bytes = 0, codebook_bytes = 0;
    u8 *bits = nullptr, *plane = nullptr, *codebook = nullptr;
    TileRecord* records = nullptr;
    TileTable* table = nullptr;
    std::vector<u32> entries;  // the table's, as the host derives them
    u64 bytes() const { return elements() + (tiles() + 1) * 32 + bits_bytes + codebook_bytes; }
    void make_table() {
        const void* own = (const void*)df11_tile_tables;
        build_table(tables_of_file ? kernel_of("df11_tile_tables", own) : own,
                    {codebook, table, codebook_bytes});
    }
    Tiles copy() const {
        Tiles t = *this;
        t.bits = copy_of(bits, bits_bytes), t.plane = copy_of(plane, elements());
        t.codebook = copy_of(codebook, codebook_bytes), t.table = copy_of(table, 1);
        t.records = copy_of(records, tiles() + 1);
        return t;
    }
};

// Returns the pair of two weights; a last weight alone counts twice.
__device__ inline u32 pair_at(const u16* w, u32 count) {
    return (w[0] >> 7 & 255) | (w[count > 1] >> 7 & 255) << 8;
}
__global__ void count_pairs(const u16* w, u64 pairs, u64 step, unsigned long long* counts) {
    for (u64 i = (blockIdx.x * u64(blockDim.x) + threadIdx.x) * step; i < pairs;
         i += u64(gridDim.x) * blockDim.x * step)
        atomicAdd(counts + pair_at(w + 2 * i, 2), 1ull);
}
// Calls f(weights, how many, band, unit) for each unit of a lane that exists in a tile.
template <class F>
__device__ void lane_units_of(const u16* w, Geometry g, u32 strip, u32 tile, u32 lane, F f) {
    const u32 lanes = g.row_lanes(), bands = g.linear ? 1 : 4;
    for (u32 band = 0; band < bands; band++)
        for (u32 unit = 0; unit < 32 / bands; unit++) {
            const u64 row = strip * 32 + band * 8 + lane / lanes,
                      column = tile * g.width() + (unit * lanes + lane % lanes) * 8;
            if (row < g.rows && column < g.columns)
                f(w + row * g.columns + column, u32(min(g.columns - column, u64(8))), band, unit);
        }
}
// One warp per tile.
__global__ void measure_tiles(const u16* w, Geometry g, const u64* codes, TileRecord* records) {
    const u32 lane = threadIdx.x;
    u32 length = 0;
    lane_units_of(w, g, blockIdx.x / g.across(), blockIdx.x % g.across(), lane,
                  [&](const u16* unit, u32 count, u32, u32) {
                      for (u32 i = 0; i < count; i += 2)
                          length += u32(codes[pair_at(unit + i, count - i)] >> 32);
                  });
    const u32 least = __reduce_min_sync(~0u, length), most = __reduce_max_sync(~0u, length);
    u32 shift = 0;
    while ((most - least + (1u << shift) - 1) >> shift > 63) shift++;
    const u32 excess = (length - least + (1u << shift) - 1) >> shift;
    const u32 sum = __reduce_add_sync(~0u, least + (excess << shift));
    TileRecord* r = records + blockIdx.x;
    for (u32 i = 0; i < 6; i++) {
        const int at = int(6 * lane) - int(32 * i);
        const u32 word = __reduce_or_sync(~0u, at <= -6 || at >= 32 ? 0
                                               : at < 0             ? excess >> -at
                                                                    : excess << at);
        if (lane == 0) r->excess[i] = word;
    }
    // The host turns this into offsets of the tiles' bits.
    if (lane == 0) r->head = ((sum + 7) & ~7u) | u64(least) << 48 | u64(shift) << 61;
}
// Number of the eight columns from `at` on that exist.
__device__ inline u32 existing(u32 columns, u32 at) { return min(max(columns, at) - at, 8u); }
__global__ void write_tiles(const u16* w, Geometry g, const u64* codes, const TileRecord* records,
                            u32* bits, u8* plane) {
    const u32 lane = threadIdx.x, strip = blockIdx.x / g.across(), tile = blockIdx.x % g.across(),
              lanes = g.row_lanes(), row = lane / lanes, mine = lane % lanes * 8,
              half = lanes * 8;  // columns of a unit of all lanes
    const Record r = load_record(records + blockIdx.x, lane);
    const u32 length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << u32(r.head >> 61));
    u64 at = (r.head & OFFSET_MASK) + inclusive_sum(length, lane) - length;
    const u32 height = min(g.rows - strip * 32, 32u),
              width = min(g.columns - tile * g.width(), g.width());
    plane += u64(strip) * 32 * g.columns + u64(tile) * g.width() * height;
    lane_units_of(w, g, strip, tile, lane, [&](const u16* unit, u32 count, u32 band, u32 j) {
        for (u32 i = 0; i < count; i += 2) {
            const u64 code = codes[pair_at(unit + i, count - i)], value = (code & 0xFFFFFFFF)
                                                                          << at % 32;
            atomicOr(bits + at / 32, u32(value));
            if (value >> 32) atomicOr(bits + at / 32 + 1, u32(value >> 32));
            at += code >> 32;
        }
        // The plane has pairs of units, each of them lane by lane (spec/format.md 6.4).
        const u32 first = j / 2 * 2 * half, both = min(width - first, 2 * half);
        u32 before = band * 8 * width + min(height - band * 8, 8u) * first + row * both;
        for (u32 c = 0; c < mine; c += 8) before += existing(both, c) + existing(both, half + c);
        if (j % 2) before += existing(both, mine);
        for (u32 i = 0; i < count; i++)
            plane[before + i] = u8((unit[i] >> 8 & 0x80) | (unit[i] & 0x7F));
    });
}
// Most bits of a code that the bench makes.
static int code_limit = TABLE_BITS;
static Tiles store_tiles(const u16* w, u32 rows, u32 columns, bool linear = false) {
    Tiles t;
    t.rows = linear ? 1 : rows, t.columns = linear ? rows * columns : columns, t.linear = linear;
    const u64 pairs = t.elements() / 2, step = std::max<u64>(pairs >> 22, 1);
    auto* counted = allocate_filled<unsigned long long>(65536, 0);
    count_pairs<<<1024, 256>>>(w, pairs, step, counted);
    const auto counts = from_device(reinterpret_cast<const u64*>(counted), 65536);
    const Code c = code_of(counts, pairs / step, code_limit);
    const u64* const codes = upload(c.codes);
    t.records = allocate_filled<TileRecord>(t.tiles() + 1, 0);
    measure_tiles<<<u32(t.tiles()), 32>>>(w, t, codes, t.records);
    std::vector<TileRecord> records = from_device(t.records, t.tiles() + 1);
    u64 at = 0;
    for (auto& r : records) {
        const u64 bits = r.head & OFFSET_MASK, end = at + bits;
        r.head = (r.head & ~OFFSET_MASK) | at;
        t.staged = std::max(t.staged, u32((end / 8 - at / 128 * 16 + 15) / 16 * 16));
        at = end;
    }
    CUDA(cudaMemcpy(t.records, records.data(), records.size() * 32, cudaMemcpyHostToDevice));
    t.bits_bytes = std::max<u64>((at + 127) / 128, 1) * 16;
    t.bits = allocate_filled<u8>(t.bits_bytes, 0), t.plane = allocate<u8>(t.elements());
    write_tiles<<<u32(t.tiles()), 32>>>(w, t, codes, t.records, (u32*)t.bits, t.plane);
    CUDA(cudaDeviceSynchronize());
    t.codebook = upload(c.codebook), t.codebook_bytes = c.codebook.size(), t.entries = c.table;
    t.table = allocate<TileTable>(1);
    t.make_table();
    return t;
}
