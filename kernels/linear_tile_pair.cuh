// Prototype: products with tiles as stored, a warp decodes two tiles at once.
#pragma once
#include "linear_tile.cuh"

constexpr u32 PAIR_ROWS = 2 * STRIP_ROWS;
// Ticket, and of both tiles where lanes' bits are.
constexpr u32 PAIR_TICKET = 64, PAIR_HEAD = PAIR_TICKET + 2 * LANES * 8;
// Rows of x so that lanes never meet in a bank.
constexpr u32 PAIR_X_PITCH = TILE_WIDTH * 2 + 64, PAIR_ARRIVALS = 2;
__host__ __device__ constexpr u32 pair_x_bytes(u32 x_rows) { return x_rows * PAIR_X_PITCH; }
__host__ __device__ constexpr u32 pair_set_bytes(u32 x_rows, u32 most_runs) {
    return most_runs * x_rows * PAIR_ROWS * 4;
}
__host__ __device__ constexpr u32 pair_shared_bytes(u32 warps, u32 x_rows, u32 staged_bytes,
                                                    u32 slots, u32 most_runs, u32 sets) {
    return u32(sizeof(TileTable)) + sets * pair_set_bytes(x_rows, most_runs) +
           warps * slots * (PAIR_HEAD + pair_x_bytes(x_rows) + 2 * (staged_bytes + BITS_AFTER));
}

// How the pairs of strips of a matrix are shared out.
struct PairSplit {
    u32 whole, tail, slices;
    __host__ __device__ constexpr u32 items() const { return whole + tail * slices; }
    __host__ __device__ constexpr u32 partials() const { return slices > 1 ? 2 * tail * slices : 0; }
};
__host__ __device__ constexpr PairSplit pair_split(u32 rows, u32 columns) {
    const u32 pairs = (rows + PAIR_ROWS - 1) / PAIR_ROWS, tiles = (columns + 255) / 256,
              tail = pairs % LINEAR_BLOCKS;
    PairSplit split = {pairs - tail, tail, 1};
    // In 1/16 of a pair of strips; meeting costs something, and small items more.
    u32 least = tail ? 16 : 0;
    for (u32 slices = 2; slices <= 16 && slices <= tiles; slices *= 2) {
        const u32 time = (tail * slices + LINEAR_BLOCKS - 1) / LINEAR_BLOCKS * (16 / slices) + 1 +
                         slices / 8;
        if (time < least) least = time, split.slices = slices;
    }
    return split;
}

struct PairRange {
    u32 matrix, pair, slices, begin, end;  // tiles
    u32 partial, first_partial, stride;
};
__device__ inline PairRange pair_range(const LinearLaunch& launch, u32 item) {
    PairRange at = {};
    while (at.matrix + 1 < launch.matrix_count &&
           launch.matrices[at.matrix + 1].first_item <= item)
        at.matrix++;
    const LinearMatrix& m = launch.matrices[at.matrix];
    const u32 tiles = tiles_across(launch.columns);
    at.pair = item - m.first_item, at.slices = 1, at.end = tiles;
    if (at.pair >= m.whole_strips && m.slices > 1) {
        const u32 number = at.pair - m.whole_strips,
                  tail = (m.rows + PAIR_ROWS - 1) / PAIR_ROWS - m.whole_strips,
                  slice = number / tail;
        at.slices = m.slices, at.stride = 2 * tail;
        at.pair = m.whole_strips + number % tail;
        at.partial = m.first_partial + 2 * number;
        at.first_partial = m.first_partial + 2 * (number % tail);
        at.begin = tiles * slice / m.slices, at.end = tiles * (slice + 1) / m.slices;
    }
    return at;
}

struct PairRuns {
    u32 length, count;
    __device__ PairRuns(u32 tiles, u32 most)
        : length(max((tiles + most - 1) / most, 1u)), count((tiles + length - 1) / length) {}
};

struct PairWalk {
    u32 matrix, pair, tile;
    u32 number, fill, run, turn, warp, item, end, length, count, begin, first_warp;
    bool exists;
    __device__ void find_item(const LinearLaunch& launch, u32 most) {
        exists = item < launch.items;
        if (!exists) return;
        const PairRange range = pair_range(launch, item);
        fill += range.matrix != matrix;
        matrix = range.matrix, pair = range.pair, begin = range.begin, end = range.end;
        const PairRuns runs(end - begin, most);
        length = runs.length, count = runs.count, run = 0, turn = 0, tile = begin,
        warp = first_warp;
    }
    __device__ void start(const LinearLaunch& launch, u32 most) {
        item = blockIdx.x, number = 0, fill = 0, first_warp = 0, matrix = 0;
        if (item < launch.items) matrix = pair_range(launch, item).matrix;
        find_item(launch, most);
    }
    __device__ void advance(const LinearLaunch& launch, u32 warps, u32 most) {
        run++, tile += length, warp = warp + 1 == warps ? 0 : warp + 1;
        if (tile < end) return;
        turn++, run = 0, warp = first_warp, tile = begin + turn;
        if (turn < length) return;
        for (first_warp += count; first_warp >= warps;) first_warp -= warps;
        number++, item += gridDim.x;
        find_item(launch, most);
    }
    __device__ u32 arrivals(u32 most) const {
        if (turn + 1 < length && tile + 1 < end) return 0;
        return run + 1 == count ? most + 1 - count : 1;
    }
    // The second strip, or the first once more where there is none.
    __device__ u32 strip(const LinearLaunch& launch, u32 half) const {
        const u32 strip = 2 * pair + half;
        return strip * STRIP_ROWS < launch.matrices[matrix].rows ? strip : 2 * pair;
    }
};

struct PairRecords { Record of[2]; };
__device__ __forceinline__ PairRecords load_pair(const LinearLaunch& launch, const PairWalk& walk,
                                                 u32 lane) {
    const LinearMatrix& m = launch.matrices[walk.matrix];
    PairRecords r;
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        r.of[half] = load_record(record_of(m, walk.strip(launch, half), walk.tile), lane);
    return r;
}

struct PairBlock {
    u32 table, sets, set_count, set_bytes, slots, slot_bytes, slot_count, half_bytes, most;
    u32 set_full, slot_full, slot_empty;
    __device__ u32 slot(u32 warp, u32 number) const {
        return slots + (warp * slot_count + number) * slot_bytes;
    }
    __device__ u32 barrier(u32 warp, u32 number) const { return (warp * TILE_SLOTS + number) * 8; }
};

// `wait`: for the launch before, before x.
__device__ __forceinline__ void bring_pair(const Shared& work, const PairBlock& block,
                                           const PairWalk& walk, const PairRecords& records,
                                           u32 slot, u32 full, bool aligned, bool wait, u32 lane,
                                           u32& problems) {
    const LinearMatrix& m = work.launch.matrices[walk.matrix];
    const bool full_width = work.columns() - walk.tile * TILE_WIDTH >= TILE_WIDTH;
    bool whole = aligned && full_width;
    u64 planes[2];
    TileBits bits[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 strip = walk.strip(work.launch, half),
                  height = min(m.rows - strip * STRIP_ROWS, STRIP_ROWS);
        whole = whole && height == STRIP_ROWS;
        planes[half] = reinterpret_cast<u64>(
            plane_of(m.data, m.whole_columns, m.first_column, strip, walk.tile, height));
        bits[half] = find_bits(records.of[half], m.rest_count, lane, problems);
        whole = whole && bits[half].bytes + BITS_AFTER <= block.half_bytes;
    }
    if (whole) {
        prefetch_l2(reinterpret_cast<const u8*>(lane < 16 ? planes[0] : planes[1]) + lane % 16 * 128);
        const u32 bytes[2] = {(bits[0].bytes + 15) & ~15u, (bits[1].bytes + 15) & ~15u};
        if (lane == 0) {
            arrive_expecting(full, bytes[0] + bytes[1] + work.launch.x_rows * TILE_WIDTH * 2);
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                if (bytes[half])
                    copy_bulk_once(slot + PAIR_HEAD + half * block.half_bytes,
                                   static_cast<const u8*>(m.rest) + bits[half].byte, bytes[half],
                                   full);
        }
        if (wait) wait_for_launch_before();
        if (lane < work.launch.x_rows)
            copy_bulk_to_all<1>(slot + PAIR_HEAD + 2 * block.half_bytes + lane * PAIR_X_PITCH,
                                work.launch.x + lane * work.launch.x_pitch + walk.tile * TILE_WIDTH,
                                TILE_WIDTH * 2, full);
    } else {
        if (wait) wait_for_launch_before();
        if (lane == 0) arrive(full);
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(slot + PAIR_TICKET + half * 256 +
                                                             lane * 8),
                     "r"(bits[half].lane.position), "r"(bits[half].lane.end)
                     : "memory");
    if (lane == 0) {
        store_shared_16(slot, make_uint4(u32(planes[0]), u32(planes[0] >> 32), u32(planes[1]),
                                         u32(planes[1] >> 32)));
        const u32 sums = block.sets + walk.number % block.set_count * block.set_bytes +
                         walk.run * work.launch.x_rows * PAIR_ROWS * 4;
        store_shared_16(slot + 16,
                        make_uint4(sums, walk.fill, walk.arrivals(block.most),
                                   (whole ? TICKET_WHOLE : 0) |
                                       (walk.turn == 0 ? TICKET_FIRST : 0)));
        store_shared_16(slot + 32, make_uint4(walk.tile, walk.number, walk.matrix, walk.pair));
    }
    __syncwarp();
    if (lane == 0) arrive(full);
}

__device__ __forceinline__ void bring_pairs(const Shared& work, const PairBlock& block, u32 bringer,
                                            u32 bringers, u32 warps, u32 lane) {
    const bool aligned = work.aligned();
    u32 problems = 0, begun = 0;
    Brought brought;
    PairWalk walk;
    walk.start(work.launch, block.most);
    auto find = [&](u32& number) {
        for (; walk.exists; walk.advance(work.launch, warps, block.most)) {
            const u32 warp = walk.warp;
            number = brought.of(warp);
            brought.count(warp);
            if (!(begun >> warp & 1)) {
                begun |= 1u << warp;
                continue;
            }
            if (warp % bringers == bringer) return;
        }
    };
    u32 number = 0;
    find(number);
    PairRecords records;
    if (walk.exists) records = load_pair(work.launch, walk, lane);
    wait_for_launch_before();
    while (walk.exists) {
        const PairWalk one = walk;
        const PairRecords mine = records;
        const u32 of = number, in = of % block.slot_count, at = block.barrier(one.warp, in);
        walk.advance(work.launch, warps, block.most);
        find(number);
        if (walk.exists) records = load_pair(work.launch, walk, lane);
        if (block.slot_count == 1) {
            // So that it comes from L2 once there is room.
            const LinearMatrix& m = work.launch.matrices[one.matrix];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u64 byte = (mine.of[half].head & OFFSET_MASK) / 8 + lane * 128;
                if (lane < 24 && byte < m.rest_count)
                    prefetch_l2(static_cast<const u8*>(m.rest) + byte);
            }
        }
        wait_parity(block.slot_empty + at, of / block.slot_count % 2 ^ 1);
        bring_pair(work, block, one, mine, block.slot(one.warp, in), block.slot_full + at, aligned,
                   false, lane, problems);
    }
    for (u32 warp = bringer; warp < warps; warp += bringers) {
        const u32 of = brought.of(warp), in = of % block.slot_count, at = block.barrier(warp, in);
        wait_parity(block.slot_empty + at, of / block.slot_count % 2 ^ 1);
        if (lane == 0)
            store_shared_16(block.slot(warp, in) + 16, make_uint4(0, 0, 0, TICKET_END));
        if (lane == 0) arrive(block.slot_full + at), arrive(block.slot_full + at);
    }
    if (problems) atomicOr(work.status(), problems);
}

// Where a row of W is in the sums of a row of x.
__device__ inline u32 pair_place(u32 x_row, u32 row) { return row ^ x_row / 2 % 4 * 8; }

__device__ __forceinline__ void add_pair_slices(const Shared& work, const PairRange& at, u32 lane) {
    if (at.slices == 1) return;
    const LinearLaunch& launch = work.launch;
    const LinearMatrix& m = launch.matrices[at.matrix];
    u32* counter = launch.counters + m.first_strip + at.pair * 2;
    __threadfence();
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = atomicAdd(counter, 1);
    before = __shfl_sync(ALL_LANES, before, 0);
    if (before + 1 != at.slices) return;
    __threadfence();
    if (lane == 0) *counter = 0;
    const u32 x_rows = launch.x_rows, size = partial_floats(x_rows);
    const float* partial = launch.partials + u64(at.first_partial) * size + lane;
    for (u32 first = 0; first < x_rows; first += 8) {
        float sum[8][2] = {};
#pragma unroll 2
        for (u32 k = 0; k < at.slices; k++)
#pragma unroll
            for (u32 i = 0; i < 8; i++)
#pragma unroll
                for (u32 half = 0; half < 2; half++)
                    if (first + i < x_rows)
                        sum[i][half] += __ldcg(partial + (u64(k) * at.stride + half) * size +
                                               (first + i) * STRIP_ROWS);
#pragma unroll
        for (u32 i = 0; i < 8; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                Range range = {};
                range.matrix = at.matrix, range.strip = at.pair * 2 + half;
                if (first + i < x_rows) store_product(work, range, first + i, lane, sum[i][half]);
            }
    }
}

__device__ inline void wait_for_pair_set(TileShared& common, u32 number, u32 sets, u32 lane) {
    if (number < sets) return;
    wait_until(&common.added, number + 1 - sets, common.set_empty + number % sets,
               number / sets - 1, lane);
}

__device__ __forceinline__ void add_pair_runs(const Shared& work, const PairBlock& block,
                                              const float* sets, TileShared& common) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows;
    wait_for_launch_before();
    u32 number = 0, fills = 0,
        matrix = blockIdx.x < work.items() ? pair_range(work.launch, blockIdx.x).matrix : 0;
    for (u32 item = blockIdx.x; item < work.items(); item += gridDim.x) {
        const PairRange at = pair_range(work.launch, item);
        if (at.matrix != matrix) {
            matrix = at.matrix;
            ask_for_table(work.launch.matrices[matrix].table, block.table, lane, LANES);
            wait_for_copies();
            tell(&common.fills, ++fills, &common.filled, lane);
        }
        const PairRuns runs(at.end - at.begin, block.most);
        const u32 in = number % block.set_count;
        wait_parity(block.set_full + 8 * in, number / block.set_count % 2);
        const float* const set = sets + in * (block.set_bytes / 4);
        constexpr u32 ROWS = 2;
        for (u32 first = 0; first < x_rows; first += ROWS) {
            float sum[ROWS][2] = {};
            const float* from[ROWS];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                const u32 row = min(first + i, x_rows - 1);
                from[i] = set + row * PAIR_ROWS + pair_place(row, lane);
            }
#pragma unroll 4
            for (u32 run = 0; run < runs.count; run++)
#pragma unroll
                for (u32 i = 0; i < ROWS; i++)
#pragma unroll
                    for (u32 half = 0; half < 2; half++)
                        sum[i][half] += from[i][run * x_rows * PAIR_ROWS + half * STRIP_ROWS];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                if (first + i >= x_rows) break;
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    Range range = {};
                    range.matrix = at.matrix, range.strip = at.pair * 2 + half;
                    if (at.slices == 1)
                        store_product(work, range, first + i, lane, sum[i][half]);
                    else
                        __stcg(work.launch.partials +
                                   u64(at.partial + half) * partial_floats(x_rows) +
                                   (first + i) * STRIP_ROWS + lane,
                               sum[i][half]);
                }
            }
        }
        number++;
        tell(&common.added, number, common.set_empty + (number - 1) % block.set_count, lane);
        add_pair_slices(work, at, lane);
    }
}

template <u32 EIGHTS>
__device__ __forceinline__ void multiply_pair(float (&sums)[EIGHTS][4], const uint4& t,
                                              const uint4& u, const uint4 (&x)[EIGHTS]) {
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) multiply(sums[i], t.x, u.x, t.y, u.y, x[i].x, x[i].y);
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) multiply(sums[i], t.z, u.z, t.w, u.w, x[i].z, x[i].w);
}
// Adds a band's sums, of both strips or of one (`halves`: bits), to those of the run.
template <u32 EIGHTS>
__device__ __forceinline__ void keep_pair(u32 to, const float (&sums)[EIGHTS][4], u32 band,
                                          bool first, u32 x_rows, u32 lane) {
    const u32 q = lane % 4;
    to += (q * 2 * PAIR_ROWS + (lane / 4 + (band ^ q) * 8)) * 4;
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++)
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            if (i * 8 + q * 2 + k >= x_rows) continue;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 at = to + ((i * 8 + k) * PAIR_ROWS + half * STRIP_ROWS) * 4;
                float sum = sums[i][half * 2 + k];
                if (!first) sum += __uint_as_float(load_shared(at));
                store_shared(at, __float_as_uint(sum));
            }
        }
}

template <u32 EIGHTS>
__device__ __noinline__ u32 multiply_pair_edge(const Shared work, TilePlace at, u32 to, bool first,
                                               u32 lane) {
    const LinearMatrix& m = work.launch.matrices[at.matrix];
    const u32 g = lane / 4, q = lane % 4, width = columns_left(work, at);
    const bool aligned = work.aligned();
    u32 problems = 0;
    const u32 pair = at.strip;
    u32 position[2], count[2], ends[2], height[2];
    const u32* words[2];
    const u8* planes[2];
#pragma unroll 1
    for (u32 half = 0; half < 2; half++) {
        u32 strip = 2 * pair + half;
        if (strip * STRIP_ROWS >= m.rows) strip--;
        height[half] = min(m.rows - strip * STRIP_ROWS, STRIP_ROWS);
        planes[half] =
            plane_of(m.data, m.whole_columns, m.first_column, strip, at.tile, height[half]);
        const TileBits found = find_bits(load_record(record_of(m, strip, at.tile), lane),
                                         m.rest_count, lane, problems);
        words[half] = static_cast<const u32*>(m.rest) + found.byte / 4;
        count[half] = (found.bytes + 3) / 4, position[half] = found.lane.position - POSITION_OF_BIT_0,
        ends[half] = found.lane.end;
    }
#pragma unroll 1
    for (u32 band = 0; band < TILE_BANDS; band++) {
        float sums[EIGHTS][4] = {};
#pragma unroll 1
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            const u32 begin = unit * STEP_COLUMNS + 8 * q;
            uint4 w[2], x[EIGHTS];
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                x[i] = begin < width
                           ? load_x(work, g + 8 * i, at.tile * TILE_WIDTH + begin, aligned)
                           : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                w[half] = make_uint4(0, 0, 0, 0);
                const u32 rows = min(max(height[half], band * BAND_ROWS) - band * BAND_ROWS,
                                     BAND_ROWS);
                if (g < rows && begin < width) {
                    const uint2 p =
                        load_unit_plane(planes[half], width, rows, band, unit, lane);
                    u32 e[4];
                    auto word = [&](u32 i) { return i < count[half] ? words[half][i] : 0; };
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 window = __funnelshift_r(word(position[half] / 32),
                                                           word(position[half] / 32 + 1),
                                                           position[half]);
                        e[i] = entry_at(window << 2);
                        if (int(e[i]) < 0) e[i] = escaped(e[i], window >> (e[i] >> 15 & 31));
                        if (int(e[i]) < 0) problems |= STATUS_NO_CODE;
                        position[half] += e[i] & LENGTH_MASK;
                    }
                    w[half] = merge_words(e, p.x, p.y);
                }
            }
            __syncwarp();
            multiply_pair<EIGHTS>(sums, w[0], w[1], x);
        }
        keep_pair<EIGHTS>(to, sums, band, first, work.launch.x_rows, lane);
    }
    for (u32 half = 0; half < 2; half++)
        problems |= check_end({0, ends[half]}, position[half] + POSITION_OF_BIT_0);
    return problems;
}

struct Chain {
    u32 w0, w1, w2, position, next;
    __device__ __forceinline__ void begin(u32 bits, u32 bytes, u32 from) {
        const u32 at = bits - 4 + min(from >> 5, (bytes - 16) / 4) * 4;
        w0 = load_shared(at), w1 = load_shared(at + 4), w2 = load_shared(at + 8);
        next = at + 12, position = from;
    }
    __device__ __forceinline__ void refill(u32 last) {
        w0 = w1, w1 = w2, w2 = load_shared(next), next = min(next + 4, last);
    }
    __device__ u32 place(u32 bits, u32 last) const {
        return next == last ? ~0u : (next - 12 - (bits - 4)) * 8 + (position & 31);
    }
};

__device__ __forceinline__ void decode_long(Chain& bits, u32 last, u32 (&e)[4]) {
#pragma unroll 1
    for (u32 i = 0; i < 4; i++) {
        const u32 low = __funnelshift_r(bits.w0, bits.w1, bits.position);
        u32 entry = entry_at(low), length = entry & LENGTH_MASK;
        if (int(entry) < 0) entry = escaped(entry, low >> ((entry >> 15 & 31) + 2));
        length += bits.position & 31, bits.position = length;
        if (length >= 32) bits.refill(last);
        e[0] = e[1], e[1] = e[2], e[2] = e[3], e[3] = entry;
    }
}

// A unit of each of two tiles.
__device__ __forceinline__ void decode_two(Chain (&bits)[2], u32 last, u32 (&e)[2][4],
                                           u32& problems) {
    u32 low[2][4], high[2], before[2], position[2];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        before[k] = bits[k].position & 31;
        low[k][0] = __funnelshift_r(bits[k].w0, bits[k].w1, bits[k].position);
        high[k] = __funnelshift_r(bits[k].w1, bits[k].w2, bits[k].position);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#pragma unroll
        for (u32 k = 0; k < 2; k++) e[k][i] = entry_at(low[k][i]);
        if (i == 3) break;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            low[k][i + 1] = __funnelshift_r(low[k][i], high[k], e[k][i]);
            high[k] = __funnelshift_r(high[k], 0, e[k][i]);
        }
    }
    u32 any = 0;
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        position[k] = e[k][0] + e[k][1] + before[k] + e[k][2] + e[k][3];
        any |= e[k][0] | e[k][1] | e[k][2] | e[k][3] | position[k] << 25;
    }
    if (__builtin_expect(int(any) < 0, 0)) {
        u32 total[2], none = 0;
        bool all = false;
#pragma unroll
        for (u32 k = 0; k < 2; k++)
            total[k] = (position[k] - before[k]) & 127, all = all || total[k] > WINDOW_BITS;
        if (all) {
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                decode_long(bits[k], last, e[k]);
                position[k] = bits[k].position & 31;
                if (int(e[k][0] | e[k][1] | e[k][2] | e[k][3]) < 0) problems |= STATUS_NO_CODE;
            }
        } else {
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 one = e[k][i], raw = __funnelshift_r(low[k][i], 0, one >> 15);
                    const u32 fixed = (raw << 5 & 0x7F80) | (raw << 13 & 0x7F800000);
                    none |= one & one << 12;  // NO_CODE alone has 16 or more bits
                    e[k][i] = int(one) < 0 ? fixed : one;
                }
            }
            problems |= none >> 31;
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                position[k] = before[k] + total[k];
                if (position[k] >= 64) position[k] -= 32, bits[k].refill(last);
            }
        }
    }
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        bits[k].position = position[k];
        if (position[k] & 32) bits[k].refill(last);
    }
}

// 16 bytes, or what was there.
__device__ __forceinline__ void load_shared_where(uint4& to, u32 from, bool exists) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
        : "r"(from), "r"(u32(exists)));
}

template <u32 EIGHTS, u32 UNROLL, u32 AHEAD = UNROLL>
__device__ __forceinline__ void multiply_pairs(const Shared& work, const PairBlock& block,
                                               TileShared& common, u32 warp, u32 warps,
                                               u32 first_thread, u32 lane) {
    lane = __shfl_sync(ALL_LANES, lane, lane);
    u32 problems = 0, fill = 0;
    {
        PairWalk walk;
        walk.start(work.launch, block.most);
        if (walk.exists)
            ask_for_table(work.launch.matrices[walk.matrix].table, block.table,
                          threadIdx.x - first_thread, warps * LANES);
        while (walk.exists && walk.warp != warp) walk.advance(work.launch, warps, block.most);
        if (walk.exists)
            bring_pair(work, block, walk, load_pair(work.launch, walk, lane), block.slot(warp, 0),
                       block.slot_full + block.barrier(warp, 0), work.aligned(), true, lane,
                       problems);
        else
            wait_for_launch_before();
    }
    wait_for_copies();
    group_barrier(1, warps * LANES);
    asm volatile("" ::: "memory");
    const u32 g = lane / 4, q = lane % 4;
    const u32 x_place = PAIR_HEAD + 2 * block.half_bytes + g * PAIR_X_PITCH + q * 16;
    // Of the rows from the lane's own on.
    const u32 x_rows = kept(max(work.launch.x_rows, g) - g);
    uint4 x[EIGHTS] = {};
    u32 turn = 0;
#pragma unroll 1
    for (u32 in = 0, phase = 0;; turn++) {
        const u32 at = block.barrier(warp, in), slot = block.slot(warp, in);
        wait_parity(block.slot_full + at, phase);
        const uint4 one = load_shared_16(slot), two = load_shared_16(slot + 16);
        if (two.w & TICKET_END) break;
        const bool first = two.w & TICKET_FIRST, whole = two.w & TICKET_WHOLE;
        const u8* planes[2] = {
            reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16,
            reinterpret_cast<const u8*>(u64(one.w) << 32 | one.z) + lane * 16};
        uint4 p[AHEAD][2];
        if (whole)
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++)
#pragma unroll
                for (u32 k = 0; k < 2; k++) p[i][k] = load_plane(planes[k] + i * PLANE_PAIR);
        if (two.y != fill) fill = two.y, wait_for_table(common, fill, lane);
        if (first && !whole)
            wait_for_pair_set(common, load_shared(slot + 36), block.set_count, lane);
        if (!whole) {
            const uint4 three = load_shared_16(slot + 32);
            problems |= multiply_pair_edge<EIGHTS>(work, {three.z, three.w, three.x}, two.x, first,
                                                   lane);
        } else {
            Chain bits[2];
            const u32 last = slot + PAIR_HEAD + 2 * block.half_bytes - 4;
#pragma unroll
            for (u32 k = 0; k < 2; k++)
                bits[k].begin(slot + PAIR_HEAD + k * block.half_bytes, block.half_bytes,
                              load_shared(slot + PAIR_TICKET + k * 256 + lane * 8));
            float sums[EIGHTS][4] = {};
            u32 x_at = slot + x_place;
#pragma unroll 1
            for (u32 step = 0; step < 16; step += UNROLL) {
                const u32 more = kept(step < 12);
                if (step % 4 == 0 && more)
                    prefetch_l2((lane < 16 ? planes[0] : planes[1]) + PLANE_BAND +
                                lane % 16 * 128 - lane * 16);
#pragma unroll
                for (u32 pair = 0; pair < UNROLL; pair++) {
                    u32 e[2][4];
                    decode_two(bits, last, e, problems);
#pragma unroll
                    for (u32 i = 0; i < EIGHTS; i++)
                        load_shared_where(x[i], x_at + i * 8 * PAIR_X_PITCH + pair * 128, x_rows > 8 * i);
                    multiply_pair<EIGHTS>(sums, merge_words(e[0], p[pair % AHEAD][0].x, p[pair % AHEAD][0].y),
                                          merge_words(e[1], p[pair % AHEAD][1].x, p[pair % AHEAD][1].y), x);
                    decode_two(bits, last, e, problems);
#pragma unroll
                    for (u32 i = 0; i < EIGHTS; i++)
                        load_shared_where(x[i], x_at + i * 8 * PAIR_X_PITCH + pair * 128 + 64, x_rows > 8 * i);
                    const uint4 t = merge_words(e[0], p[pair % AHEAD][0].z, p[pair % AHEAD][0].w),
                                u = merge_words(e[1], p[pair % AHEAD][1].z, p[pair % AHEAD][1].w);
#pragma unroll
                    for (u32 k = 0; k < 2; k++)
                        load_plane_where(p[pair % AHEAD][k], planes[k] + (pair + AHEAD) * PLANE_PAIR,
                                         step + pair + AHEAD < 16);
                    multiply_pair<EIGHTS>(sums, t, u, x);
                }
                planes[0] += UNROLL * PLANE_PAIR, planes[1] += UNROLL * PLANE_PAIR;
                x_at += UNROLL * 128;
                if ((step + UNROLL) % 4) continue;
                x_at -= 512;
                if (first && step < 4)
                    wait_for_pair_set(common, load_shared(slot + 36), block.set_count, lane);
                keep_pair<EIGHTS>(two.x, sums, step / 4, first, work.launch.x_rows, lane);
#pragma unroll
                for (u32 i = 0; i < EIGHTS; i++)
#pragma unroll
                    for (u32 k = 0; k < 4; k++) sums[i][k] = 0;
            }
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const uint2 ends = load_shared_8(slot + PAIR_TICKET + k * 256 + lane * 8);
                problems |= check_end({ends.x, ends.y},
                                      bits[k].place(slot + PAIR_HEAD + k * block.half_bytes, last));
            }
        }
        const u32 number = load_shared(slot + 36), arrivals = load_shared(slot + 24);
        __syncwarp();
        if (lane == 0) arrive(block.slot_empty + at);
        for (u32 i = 0; i < arrivals; i++) arrive(block.set_full + 8 * (number % block.set_count));
        if (++in == block.slot_count) in = 0, phase ^= 1;
    }
    if (problems) atomicOr(work.status(), problems);
}

template <u32 EIGHTS, u32 HELPERS, u32 MORE, u32 LESS, u32 UNROLL>
__device__ __forceinline__ void linear_pair(const Shared& work) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES,
              warps = blockDim.x / LANES - HELPERS;
    __shared__ TileShared common;
    PairBlock block;
    block.set_full = shared_address(common.set_full),
    block.slot_full = shared_address(common.slot_full),
    block.slot_empty = shared_address(common.slot_empty);
    block.slot_count = work.launch.reserved[0], block.most = work.launch.reserved[1],
    block.set_count = work.launch.reserved[2];
    if (warp == 0) {
        for (u32 i = lane; i < warps * TILE_SLOTS; i += LANES)
            init_barrier(block.slot_full + 8 * i, PAIR_ARRIVALS),
                init_barrier(block.slot_empty + 8 * i, 1);
        if (lane < MOST_RUN_SETS)
            init_barrier(block.set_full + 8 * lane, block.most * LANES),
                init_barrier(shared_address(common.set_empty + lane), LANES);
        if (lane == 0)
            init_barrier(shared_address(&common.filled), LANES), common.added = common.fills = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_launch_begin();
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    block.set_bytes = pair_set_bytes(work.launch.x_rows, block.most);
    const u32 fixed = u32(sizeof(TileTable)) + block.set_count * block.set_bytes;
    block.table = shared_address(linear_shared), block.sets = block.table + u32(sizeof(TileTable));
    block.slots = block.table + fixed;
    block.slot_bytes = (room - fixed) / (warps * block.slot_count * 16) * 16;
    block.half_bytes = (block.slot_bytes - PAIR_HEAD - pair_x_bytes(work.launch.x_rows)) / 32 * 16;
    float* const sets = reinterpret_cast<float*>(linear_shared + sizeof(TileTable));
    if (warp < HELPERS) {
        if (LESS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LESS ? LESS : 24));
        if (warp == 0)
            add_pair_runs(work, block, sets, common);
        else
            bring_pairs(work, block, warp - 1, HELPERS - 1, warps, lane);
    } else {
        if (LESS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(LESS ? MORE : 24));
        multiply_pairs<EIGHTS, UNROLL>(work, block, common, warp - HELPERS, warps, HELPERS * LANES,
                                       lane);
    }
}
