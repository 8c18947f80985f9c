// Host side of linear_bench.cu for tiles as stored: a matrix in them, parts of matrices, launches.
// Loaded after Context.
#pragma once

// A matrix in tiles as stored, made on the GPU; each array an allocation of its exact size.
struct Tiles {
    u32 rows = 0, columns = 0, staged = 0;  // staged: the most bytes of a tile's bits
    u64 tiles = 0, bits_bytes = 0;
    u8 *bits = nullptr, *plane = nullptr, *codebook = nullptr;
    TileRecord* records = nullptr;
    TileTable* table = nullptr;
    u64 codebook_bytes = 0;
    u64 bytes() const {
        return u64(rows) * columns + (tiles + 1) * 32 + bits_bytes + codebook_bytes;
    }
    void make_table() {
        if (!table) CUDA(cudaMalloc(&table, sizeof(TileTable)));
        TableTask* task = upload(std::vector<TableTask>{{codebook, table, codebook_bytes}});
        df11_tile_tables<<<1, 256>>>(task);
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaFree(task));
    }
    Tiles copy() const {
        Tiles t = *this;
        t.bits = copy_of(bits, bits_bytes), t.plane = copy_of(plane, u64(rows) * columns);
        t.codebook = copy_of(codebook, codebook_bytes), t.table = copy_of(table, sizeof(TileTable));
        t.records = copy_of(records, (tiles + 1) * 32);
        return t;
    }
    void free() const {
        for (void* p : {(void*)bits, (void*)plane, (void*)codebook, (void*)records, (void*)table})
            CUDA(cudaFree(p));
    }
};
__device__ inline u32 pair_of(const u16* two) {
    return (two[0] >> 7 & 255) | (two[1] >> 7 & 255) << 8;
}
__global__ void count_pairs(const u16* w, u64 pairs, u64 step, unsigned long long* counts) {
    for (u64 i = (blockIdx.x * u64(blockDim.x) + threadIdx.x) * step; i < pairs;
         i += u64(gridDim.x) * blockDim.x * step)
        atomicAdd(counts + pair_of(w + 2 * i), 1ull);
}
// A lane's units of a tile that exist: f(weights, band, unit).
template <class F>
__device__ void lane_units_of(const u16* w, u32 rows, u32 columns, u64 strip, u32 tile, u32 lane,
                              F f) {
    for (u32 band = 0; band < 4; band++)
        for (u32 unit = 0; unit < 8; unit++) {
            const u64 row = strip * 32 + band * 8 + lane / 4,
                      column = tile * 256 + unit * 32 + lane % 4 * 8;
            if (row < rows && column < columns) f(w + row * columns + column, band, unit);
        }
}
// codes: of each pair length << 32 | code, escapes with their values. A warp a tile.
__global__ void measure_tiles(const u16* w, u32 rows, u32 columns, const u64* codes,
                              TileRecord* records) {
    const u32 across = (columns + 255) / 256, lane = threadIdx.x;
    u32 length = 0;
    lane_units_of(w, rows, columns, blockIdx.x / across, blockIdx.x % across, lane,
                  [&](const u16* unit, u32, u32) {
                      for (u32 i = 0; i < 8; i += 2) length += u32(codes[pair_of(unit + i)] >> 32);
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
    // The host makes offsets of the tiles' bits.
    if (lane == 0) r->head = ((sum + 7) & ~7u) | u64(least) << 48 | u64(shift) << 61;
}
__global__ void write_tiles(const u16* w, u32 rows, u32 columns, const u64* codes,
                            const TileRecord* records, u32* bits, u8* plane) {
    const u32 across = (columns + 255) / 256, lane = threadIdx.x, strip = blockIdx.x / across,
              tile = blockIdx.x % across;
    const Record r = load_record(records + blockIdx.x, lane);
    const u32 length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << u32(r.head >> 61));
    u64 at = (r.head & OFFSET_MASK) + inclusive_sum(length, lane) - length;
    const u32 height = min(rows - strip * 32, 32u), width = min(columns - tile * 256, 256u);
    plane += u64(strip) * 32 * columns + u64(tile) * 256 * height;
    lane_units_of(w, rows, columns, strip, tile, lane, [&](const u16* unit, u32 band, u32 j) {
        for (u32 i = 0; i < 8; i += 2) {
            const u64 code = codes[pair_of(unit + i)], value = (code & 0xFFFFFFFF) << at % 32;
            atomicOr(bits + at / 32, u32(value));
            if (value >> 32) atomicOr(bits + at / 32 + 1, u32(value >> 32));
            at += code >> 32;
        }
        // In pairs of units, in each of them by lanes (spec/format.md 6.4).
        const u32 band_rows = min(height - band * 8, 8u), first = j / 2 * 64,
                  both = min(width - first, 64u);
        u32 before = band * 8 * width + band_rows * first + lane / 4 * both;
        for (u32 q = 0; q < lane % 4; q++)
            before += (8 * q < both ? 8 : 0) + (32 + 8 * q < both ? 8 : 0);
        before += j % 2 * 8;
        for (u32 i = 0; i < 8; i++)
            plane[before + i] = u8((unit[i] >> 8 & 0x80) | (unit[i] & 0x7F));
    });
}
// Bits of the longest code that the bench makes.
static int code_limit = TABLE_BITS;
static Tiles store_tiles(const u16* w, u32 rows, u32 columns) {
    Tiles t;
    t.rows = rows, t.columns = columns, t.tiles = u64((rows + 31) / 32) * ((columns + 255) / 256);
    const u64 pairs = u64(rows) * columns / 2, step = std::max<u64>(pairs >> 22, 1);
    unsigned long long* counted;
    CUDA(cudaMalloc(&counted, 65536 * 8));
    CUDA(cudaMemset(counted, 0, 65536 * 8));
    count_pairs<<<1024, 256>>>(w, pairs, step, counted);
    std::vector<u64> counts(65536), codes(65536);
    CUDA(cudaMemcpy(counts.data(), counted, 65536 * 8, cudaMemcpyDeviceToHost));
    const Code c = code_of(counts, pairs / step, code_limit);
    for (u32 i = 0; i < 65536; i++) {
        const PairCode one = pair_code(c, i);
        codes[i] = u64(one.length) << 32 | one.code;
    }
    u64* d_codes = upload(codes);
    CUDA(cudaMalloc(&t.records, (t.tiles + 1) * 32));
    CUDA(cudaMemset(t.records, 0, (t.tiles + 1) * 32));
    measure_tiles<<<u32(t.tiles), 32>>>(w, rows, columns, d_codes, t.records);
    std::vector<TileRecord> records = from_device(t.records, t.tiles + 1);
    u64 at = 0;
    for (auto& r : records) {
        const u64 bits = r.head & OFFSET_MASK, end = at + bits;
        r.head = (r.head & ~OFFSET_MASK) | at;
        t.staged = std::max(t.staged, u32((end / 8 - at / 128 * 16 + 15) / 16 * 16));
        at = end;
    }
    CUDA(cudaMemcpy(t.records, records.data(), records.size() * 32, cudaMemcpyHostToDevice));
    t.bits_bytes = (at + 127) / 128 * 16;
    CUDA(cudaMalloc(&t.bits, t.bits_bytes));
    CUDA(cudaMemset(t.bits, 0, t.bits_bytes));
    CUDA(cudaMalloc(&t.plane, u64(rows) * columns));
    write_tiles<<<u32(t.tiles), 32>>>(w, rows, columns, d_codes, t.records, (u32*)t.bits, t.plane);
    CUDA(cudaDeviceSynchronize());
    t.codebook = upload(c.codebook), t.codebook_bytes = c.codebook.size();
    t.make_table();
    CUDA(cudaFree(counted));
    CUDA(cudaFree(d_codes));
    return t;
}

struct StoredVariant {
    const char* name;
    const void* kernel;
    u32 eights, warps;
};
static StoredVariant stored(u32 x_rows) {
    if (x_rows > LINEAR_ROWS)
        return {x_rows > 32 ? "df11_linear_tile_64" : "df11_linear_tile_32", nullptr, 0, 0};
    const char* name = x_rows <= 8 ? "df11_linear_tile_8" : "df11_linear_tile_16";
    const void* compiled_in =
        x_rows <= 8 ? (const void*)df11_linear_tile_8 : (const void*)df11_linear_tile_16;
    // The kernels of the PTX have 12.
    return {name, kernel_of(name, compiled_in), (x_rows + 7) / 8,
            ring ? 12 : tile_warps(LINEAR_ROWS)};
}
// Of a launch of several matrices.
static u32 most_tables = MOST_TABLES;
// Blocks of a launch up to 16 rows of x, at most: of the GPU's multiprocessors, unless a check
// wants that blocks have many items.
static u32 few_blocks = 0;
static u32 most_shared(const void* kernel) {
    int n;
    CUDA(cudaDeviceGetAttribute(&n, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    cudaFuncAttributes a;
    CUDA(cudaFuncGetAttributes(&a, kernel));
    return u32(n - a.sharedSizeBytes);
}
// 17 to 64 rows of x.
static void launch_decoded(const LinearLaunch& l, u32 staged, bool begins_early,
                           cudaStream_t stream) {
    const u32 n = decoded_class(l.x_rows);
    const void* kernel =
        n == 32 ? kernel_of("df11_linear_tile_32", (const void*)df11_linear_tile_32)
                : kernel_of("df11_linear_tile_64", (const void*)df11_linear_tile_64);
    const u32 room = most_shared(kernel) / 16 * 16;
    LinearLaunch copy = l;
    // As many stages as there is room for besides the largest tile.
    copy.tile_sets = MOST_DECODED;
    while (copy.tile_sets > 2 && decoded_shared_bytes(n, copy.tile_sets, staged) > room)
        copy.tile_sets--;
    const u32 shared = std::min(decoded_shared_bytes(n, copy.tile_sets, staged), room);
    u32 items = 0;
    for (u32 i = 0; i < l.matrix_count; i++)
        items += RoundSplit(l.matrices[i].rows, l.columns).items;
    CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    void* arguments[] = {&copy};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization,
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = std::min<u32>(items, sm_count()), config.blockDim = DECODED_THREADS,
    config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = begins_early;
    CUDA(cudaLaunchKernelExC(&config, kernel, arguments));
}
// Bytes of x in shared memory.
static u32 shared_x(const StoredVariant& v, const LinearLaunch& l) {
    return v.warps == MOST_TILE_WARPS ? l.x_rows * shared_x_pitch(l.columns) : 0;
}
static void launch_stored(const StoredVariant& v, const LinearLaunch& l, u32 staged,
                          bool begins_early, cudaStream_t stream) {
    if (l.x_rows > LINEAR_ROWS) return launch_decoded(l, staged, begins_early, stream);
    if (l.x_rows <= FEWEST_ROWS && !ring && v.warps != MOST_TILE_WARPS) {
        const char* name = "df11_linear_tile_2";
        const StoredVariant few = {name, kernel_of(name, (const void*)df11_linear_tile_2), 1,
                                   MOST_TILE_WARPS};
        if (tile_shared_bytes(few.warps, l.x_rows, staged, 1, 1) + shared_x(few, l) <=
            most_shared(few.kernel) / 16 * 16)
            return launch_stored(few, l, staged, begins_early, stream);
    }
    const u32 room = most_shared(v.kernel) / 16 * 16;
    LinearLaunch copy = l;
    auto bytes = [&](u32 tables, u32 sets) {
        return tile_shared_bytes(v.warps, l.x_rows, staged, tables, sets) + shared_x(v, l);
    };
    // Sums of two items if a block has as many, and tables of its matrices, if there is room for
    // the largest tile: sums first, unless each item has another matrix (src/gpu/linear/tiles.rs).
    const u32 blocks = few_blocks ? few_blocks : u32(sm_count()),
              each = (l.items + blocks - 1) / blocks,
              wanted = std::min({l.matrix_count, ring ? 1 : most_tables, each});
    copy.tile_tables = copy.tile_sets = 1;
    auto more_sets = [&] {
        if (each > 1 && bytes(copy.tile_tables, 2) <= room) copy.tile_sets = 2;
    };
    if (each > l.matrix_count) more_sets();
    while (copy.tile_tables < wanted && bytes(copy.tile_tables * 2, copy.tile_sets) <= room)
        copy.tile_tables *= 2;
    more_sets();
    const u32 shared = std::min(bytes(copy.tile_tables, copy.tile_sets), room);
    copy.tile_slot_bytes = tile_slot_bytes(shared, v.warps, l.x_rows, copy.tile_tables,
                                           copy.tile_sets, shared_x(v, l));
    CUDA(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    void* arguments[] = {&copy};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization,
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = std::min(l.items, blocks),
    config.blockDim = (v.warps + TILE_HELPERS) * LANES, config.dynamicSmemBytes = shared,
    config.stream = stream;
    config.attrs = &attribute, config.numAttrs = !ring && begins_early;
    CUDA(cudaLaunchKernelExC(&config, v.kernel, arguments));
}

// A part of a matrix; rows and columns: of it.
struct Part {
    u32 first_row, rows, first_column, columns;
};
static LinearMatrix part_of(const Fast& f, Part p) {
    LinearMatrix m = {};
    const u64 strip = p.first_row / 32;
    m.data = f.data + (strip * steps_of(f.columns) + p.first_column / STEP_COLUMNS) * STEP_BYTES,
    m.index = f.heads + strip * tiles_across(f.columns) + p.first_column / 256, m.rest = f.entries,
    m.rest_count = f.count, m.whole_columns = f.columns, m.first_column = p.first_column;
    return m;
}
static LinearMatrix part_of(const Tiles& t, Part p) {
    LinearMatrix m = {};
    m.data = t.plane + u64(p.first_row) * t.columns,
    m.index = t.records + u64(p.first_row / 32) * tiles_across(t.columns), m.rest = t.bits,
    m.rest_count = t.bits_bytes, m.table = t.table, m.whole_columns = t.columns,
    m.first_column = p.first_column;
    return m;
}
template <class Form>
static Part all_of(const Form& f) {
    return {0, f.rows, 0, f.columns};
}
template <class Form>
static void add_matrix(LinearLaunch& l, const Form& form, u16* y, u64 y_pitch, const u16* bias,
                       Part f) {
    LinearMatrix& m = l.matrices[l.matrix_count];
    m = part_of(form, f);
    m.bias = bias, m.y = y, m.y_pitch = y_pitch;
    const LinearSplit split = linear_split(f.rows, f.columns);
    m.rows = f.rows, m.whole_strips = split.whole_strips, m.slices = split.slices,
    m.first_item = l.items;
    if (l.matrix_count) {
        const LinearMatrix& last = l.matrices[l.matrix_count - 1];
        m.first_strip = last.first_strip + (last.rows + 31) / 32;
        m.first_partial = last.first_partial + linear_split(last.rows, f.columns).partials();
    }
    l.items += split.items(), l.matrix_count++;
}
template <class Form>
static void add_matrix(LinearLaunch& l, const Form& form, u16* y, u64 y_pitch, const u16* bias) {
    add_matrix(l, form, y, y_pitch, bias, all_of(form));
}
// The same by either form.
static void launch_form(const Fast&, const LinearLaunch& l, cudaStream_t stream) {
    launch_product(l, early, stream);
}
static bool small_stages = false;  // fewer bytes than tiles have
static void launch_form(const Tiles& t, const LinearLaunch& l, cudaStream_t stream) {
    launch_stored(stored(l.x_rows), l, small_stages ? t.staged / 32 * 16 : t.staged, early, stream);
}
static bool right_weights(Context& c, const Fast& f, const u16* w) {
    const u64 n = u64(f.rows) * f.columns;
    u16* back;
    CUDA(cudaMalloc(&back, n * 2 + 2));
    CUDA(cudaMemset(back, 0xA5, n * 2 + 2));
    unpack(f, back, f.columns, c.status);
    const bool right = same_bits(w, back, n) && from_device(back + n, 1)[0] == 0xA5A5;
    CUDA(cudaFree(back));
    return right;
}
static bool right_weights(Context&, const Tiles&, const u16*) { return true; }
static Fast make_form(const Fast*, const u16* w, u32 rows, u32 columns) {
    return pack(w, rows, columns);
}
static Tiles make_form(const Tiles*, const u16* w, u32 rows, u32 columns) {
    return store_tiles(w, rows, columns);
}
