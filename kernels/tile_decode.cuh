// Decodes the layouts `tile` (spec/format.md 6.4) and `float` (6.5): any set of tensors of one
// float, element ranges, or columns of rows in one launch. Kernels of BF16 are in tile.cu, those of
// others in float.cu.
//
//   tile      8192 weights: 32 rows x 256 columns of a matrix, or 8192 in a row; 32 lanes, each
//             with its own stretch of bits
//   unit      8 neighbouring weights: four codes of pairs, and a plane byte for each kept bit of a
//             weight; BF16 has 8 and one 16-byte store
//   band      8 units per lane: 8 rows x 256 columns of a matrix, or a quarter of the spec's band
//             if 8192 weights are in a row; a tile has 4 bands
//
//      lane l, unit j of a band of a matrix: row l / 4, columns 32 j + 8 (l % 4) to + 7
//                  j = 0                     j = 1            ...  j = 7
//      row 0  | l0 | l1 | l2 | l3 | l0 | l1 | l2 | l3 |  ...       256 columns: 512 bytes of BF16
//      row 1  | l4 | l5 | l6 | l7 | l4 | ...
//      A lane has one row, and four lanes share it, which is the B fragment of mma.m16n8k16 (the
//      order of k is free).
//
//   grid      one persistent CUDA block per slot; each takes one contiguous share of all tiles of
//             all tasks, in rounds of up to two tasks
//   warp      takes tile after tile of the round:
//             1 look up  reads the record, 32 bytes: where the bits start, how many each lane has;
//                        forms the prefix sum over the lanes
//             2 stage    brings the tile's bits to shared memory by cp.async, and the plane to
//                        registers, two units per lane, PREFETCH loads ahead
//             3 decode   takes four look-ups of 12 bits from a window of 62 bits; entries have both
//                        exponents at their places in the weights
//             4 store    writes a band at a time, or half of one if weights have 32 bits: 4 or 8
//                        stores of 16 bytes one after the other, so that the 256 or 512 bytes of a
//                        row leave together. Two neighbouring lanes exchange words for that if
//                        weights have 8 or 32 bits
//             Tiles that do not exist whole or are not wanted whole go unit by unit instead
//             (decode_edge).
//
//   shared memory: one stage per warp, 2.8 KiB on common weights, 14.2 KiB at most; per block 33
//   KiB for two tables and the round
//
// Safety on any content: tiles come from the task, so that records and plane are loaded inside
// their arrays. The bitstream and the stage bound staging; the stage bounds windows; the geometry
// and the range alone bound stores, because a tile decodes as many weights as it has, whatever its
// bits. Contradictions set bits of the status word. Tables can be built of any codebook: its length
// bounds the loads.
#pragma once
#include "tile_thread.cuh"

namespace df11::tile {
// Most warps per block: what a multiprocessor has registers for. Floats of 32 bits take more
// registers, and as many bytes are in flight with fewer warps.
template <class F>
constexpr u32 WARPS = F::BYTES == 4 && F::KEPT > 8 ? 20 : 24;
// Among shapes with as many warps at once, the host takes the one whose blocks have about this many
// (src/gpu/fit.rs).
constexpr u32 TILE_GOOD_WARPS = 8;
constexpr u32 UNITS = BAND_UNITS * BANDS;
constexpr u32 TILE_WEIGHTS = LANES * UNITS * UNIT;
constexpr u32 TILE_ROWS = 32;

// Units that a lane decodes before it stores them: their weights take 32 registers at most.
template <class F>
constexpr u32 GROUP = F::WORDS > 4 ? BAND_UNITS * 4 / F::WORDS : BAND_UNITS;
// Loads of a lane's kept bits in flight, each of two units.
template <class F>
constexpr u32 PREFETCH = F::KEPT > 8 ? 1 : 2;
// Plane bytes of two units of every lane.
template <class F>
constexpr u32 TWO_UNITS = LANES * 2 * F::KEPT;

__device__ inline void store_vector(u64 address, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x), "r"(y), "r"(z),
                 "r"(w)
                 : "memory");
}

template <class F, u32 STEP>
__device__ inline u32 lane_offset(u32 lane) {
    return F::BYTES == 1 ? lane % 2 * STEP : F::BYTES == 4 ? lane % 2 * 16 : 0;
}

// Stores a lane's units of a group, STEP bytes apart, one after the other. If other work comes
// between the stores, the 512 bytes of a row reach L2 in pieces, and the kernel loses up to a third
// of its speed.
//
// All stores have 16 bytes. A unit of two neighbouring lanes has 16 bytes if floats have 8 bits:
// the even lane stores even units of both, the odd lane odd units. It has 64 bytes if floats have
// 32 bits, and each store of both lanes writes one sector. `address` is that of the even lane's
// unit, and lane_offset more.
template <class F, u32 STEP>
__device__ inline void store_group(u64 address, u32 (&weights)[GROUP<F>][F::WORDS], u32 lane) {
    if constexpr (F::BYTES == 2) {
        __syncwarp();
#pragma unroll
        for (u32 unit = 0; unit < GROUP<F>; unit++) {
            const u32(&w)[F::WORDS] = weights[unit];
            store_vector(address + STEP * unit, w[0], w[1], w[2], w[3]);
        }
        return;
    }
    // Halves that a lane and its neighbour have: of two units, or of one.
    constexpr u32 UNITS_EACH = F::BYTES == 1 ? 2 : 1, HALF = F::BYTES == 1 ? 2 : 4;
    const bool odd = lane % 2;
    u32 first[GROUP<F> / UNITS_EACH][HALF], second[GROUP<F> / UNITS_EACH][HALF];
#pragma unroll
    for (u32 at = 0; at < GROUP<F> / UNITS_EACH; at++) {
#pragma unroll
        for (u32 i = 0; i < HALF; i++) {
            const u32 low = weights[at * UNITS_EACH][i];
            const u32 high = F::BYTES == 1 ? weights[at * UNITS_EACH + UNITS_EACH - 1][i]
                                           : weights[at][F::WORDS - HALF + i];
            const u32 other = __shfl_xor_sync(ALL_LANES, odd ? low : high, 1);
            first[at][i] = odd ? other : low;
            second[at][i] = odd ? high : other;
        }
    }
#pragma unroll
    for (u32 at = 0; at < GROUP<F> / UNITS_EACH; at++) {
        const u64 to = address + STEP * UNITS_EACH * at;
        const u32(&a)[HALF] = first[at];
        const u32(&b)[HALF] = second[at];
        if constexpr (F::BYTES == 1) {
            store_vector(to, a[0], a[1], b[0], b[1]);
        } else {
            store_vector(to, a[0], a[1], a[2], a[3]);
            store_vector(to + 32, b[0], b[1], b[2], b[3]);
        }
    }
}

__device__ inline u32 share_begin(u32 total, u32 block) {
    return u32(u64(total) * block / gridDim.x);
}

// Finds the task that holds the share's next tile, and the task after it; starts the copies of
// their tables.
__device__ __forceinline__ void begin_round(const TileTask* tasks, u32 task_count, u32 at,
                                            u32 share_end, u32 guess, u32 lane) {
    u32 task = 0;  // number of tasks that begin at or before the tile
    for (u32 base = 0; base < task_count; base += LANES) {
        const TileTask* candidate = tasks + min(base + lane, task_count - 1);
        task += __popc(
            __ballot_sync(ALL_LANES, base + lane < task_count && candidate->first_unit <= at));
    }
    task--;
    const u32 more = task + 1 < task_count;
    const u32* words = reinterpret_cast<const u32*>(tasks + task);
    for (u32 i = threadIdx.x; i < TASK_WORDS << more; i += blockDim.x)
        reinterpret_cast<u32*>(shared_round.tasks)[i] =
            task == 0 && i == threadIdx.x ? guess : words[i];
    __syncthreads();
    const u32 first = at - shared_round.tasks[0].first_unit;
    const u32 count0 = min(shared_round.tasks[0].tiles - first, share_end - at);
    const u32 count1 = more ? min(shared_round.tasks[1].tiles, share_end - at - count0) : 0;
    for (u32 i = threadIdx.x; i < TABLE_ENTRIES / 4; i += blockDim.x) {
        copy_async(shared_address(&shared_tables[0]) + 16 * i,
                   reinterpret_cast<const u8*>(shared_round.tasks[0].table) + 16 * i);
        if (count1)
            copy_async(shared_address(&shared_tables[1]) + 16 * i,
                       reinterpret_cast<const u8*>(shared_round.tasks[1].table) + 16 * i);
    }
    commit_copies();
    if (threadIdx.x == 0) {
        shared_round.first = first;
        shared_round.count0 = count0;
        shared_round.count = count0 + count1;
        shared_round.next = blockDim.x / LANES;
        shared_round.after = at + count0 + count1;
    }
    __syncthreads();
}

__device__ inline u32 take_tile(u32 lane) {
    u32 n = 0;
    if (lane == 0) n = atomicAdd(&shared_round.next, 1);
    return __shfl_sync(ALL_LANES, n, 0);
}

// A tile has at most 32 * (0x1FFF + (63 << 7)) bits.
constexpr u32 SLACK_SHIFT = 20, END_MASK = (1u << SLACK_SHIFT) - 1;

// A warp's tile, and the extent of its lane's bits in the stage.
struct Tile {
    u32 task;         // index in the round
    u32 row, column;  // position in tiles
    u32 position;     // position of the lane's first bit
    // End of the lane's bits; from SLACK_SHIFT on, how many of them may remain after the last code.
    u32 end;
    bool whole;       // all of it exists and is wanted, in units that 16-byte stores can write
    u64 place;        // index of its first element in the task's output
    const u8* plane;  // the tile's, or the lane's if the tile is whole
    __device__ const TileTask& from() const { return shared_round.tasks[task]; }
    __device__ u32 table() const { return task * u32(sizeof(TileTable)); }
};

// Return the row and the column of the tile's first element.
__device__ inline u64 row_of(const Tile& tile) { return u64(tile.row) * TILE_ROWS; }
__device__ inline u64 column_of(const Tile& tile) {
    return u64(tile.column) * (tile.from().linear() ? TILE_WEIGHTS : TILE_COLUMNS);
}
// Sets `place` and `whole`.
template <class F>
__device__ inline void place_tile(Tile& tile) {
    const TileTask& t = tile.from();
    const u64 column = column_of(tile);
    const u64 first = row_of(tile) * t.columns + column;
    const u64 last =
        first + (t.linear() ? TILE_WEIGHTS : (TILE_ROWS - 1) * t.columns + TILE_COLUMNS);
    const u64 aligned = reinterpret_cast<u64>(t.output) | (t.linear() ? 0 : F::BYTES * t.pitch);
    tile.place = row_of(tile) * t.pitch + column;
    tile.whole = aligned % 16 == 0 && first >= t.element_begin && last <= t.element_end &&
                 (t.linear() ? t.pitch == t.columns
                             : column >= t.column_begin && column + TILE_COLUMNS <= t.column_end);
}

// Returns where a tile's plane starts. It holds pairs of units one after the other, and of each
// pair lane after lane; it leaves out absent weights.
template <class F>
__device__ inline const u8* plane_of(const Tile& tile) {
    const TileTask& t = tile.from();
    if (t.linear()) return t.plane + F::plane_bytes(column_of(tile));
    return t.plane + F::plane_bytes(row_of(tile) * t.columns +
                                    column_of(tile) * min(u64(TILE_ROWS), t.rows - row_of(tile)));
}

__device__ inline Record load_record(const Tile& tile, u32 lane) {
    const TileRecord* at =
        tile.from().records + (u64(tile.row) * tile.from().tiles_across + tile.column);
    return load_record(at, lane);
}

// Starts the copy of a tile's bits, and finds where the lane's bits begin and end.
__device__ inline void stage_tile(Tile& tile, const Record& r, const Bits& bits, u32 lane,
                                  u32& problems) {
    const u64 begin = r.head & OFFSET_MASK, end = r.next_head & OFFSET_MASK;
    const u32 shift = u32(r.head >> 61);
    const u32 length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << shift);
    const u64 byte = begin >> 3 & ~15ull;
    const u64 left = max(tile.from().bits_bytes, byte) - byte;
    const u64 wanted = end > begin ? ((end + 7) >> 3) - byte : 0;
    const u32 bytes = u32(min(min(wanted, left), u64(bits.room())));
    const u8* from = tile.from().bits + byte;
#pragma unroll 4
    for (u32 i = lane * 16; i < bytes; i += LANES * 16)
        copy_async(bits.stage + STAGE_BEFORE + i, from + i);
    commit_copies();
    const u32 sum = inclusive_sum(length, lane);
    if (bytes != wanted || begin % 8 != 0 || (lane == LANES - 1 && (sum + 7 & ~7u) != end - begin))
        problems |= STATUS_RECORDS;
    tile.position = (u32(begin) & 127) + sum - length + POSITION_OF_BIT_0;
    tile.end = tile.position + length | (1u << shift) - 1 << SLACK_SHIFT;
}

// Begins tile n of the round: loads its record, and its first plane bytes if it is whole, and
// starts the copy of its bits to the stage.
template <class F>
__device__ __forceinline__ Tile begin_tile(u32 n, const Bits& bits, u32 lane,
                                           KeptPair<F> (&ahead)[PREFETCH<F>], u32& problems) {
    Tile tile;
    tile.task = n >= shared_round.count0;
    const u32 number = tile.task ? n - shared_round.count0 : shared_round.first + n;
    const u32 across = tile.from().across;
    tile.row = tile.from().first_row + number / across;
    tile.column = tile.from().first_column + number % across;
    const Record record = load_record(tile, lane);
    place_tile<F>(tile);
    tile.plane = plane_of<F>(tile);
    if (tile.whole) {
        tile.plane += KeptPair<F>::offset(lane);
#pragma unroll
        for (u32 i = 0; i < PREFETCH<F>; i++) ahead[i].load(tile.plane + i * TWO_UNITS<F>);
    }
    __syncwarp();  // all lanes have left the stage
    stage_tile(tile, record, bits, lane, problems);
    return tile;
}

template <class F>
__device__ __forceinline__ void decode_whole(Tile& tile, const Bits& bits, u32 lane,
                                             typename F::Word* to,
                                             KeptPair<F> (&ahead)[PREFETCH<F>], u32& problems) {
    static_assert(GROUP<F> / 2 % PREFETCH<F> == 0, "pairs of units");
    constexpr u32 LINEAR_STEP = F::BYTES * LANES * UNIT, STEP = F::BYTES * 4 * UNIT;
    const TileTask& t = tile.from();
    const u8* plane = tile.plane;
    const u32 table = tile.table();
    const bool linear = t.linear();
    const u32 first_lane = F::BYTES == 2 ? lane : lane & ~1u;
    to += tile.place +
          (linear ? first_lane * UNIT : lane / 4 * t.pitch + first_lane % 4 * UNIT);
    u64 address = reinterpret_cast<u64>(to);
    if constexpr (F::BYTES != 2)
        address += linear ? lane_offset<F, LINEAR_STEP>(lane) : lane_offset<F, STEP>(lane);
    u32 position = tile.position;
#pragma unroll 1
    for (u32 group = 0; group < UNITS / GROUP<F>; group++) {
        u32 weights[GROUP<F>][F::WORDS];
#pragma unroll
        for (u32 unit = 0; unit < GROUP<F>; unit += 2) {
            // `ahead` does not rotate: to move a value still in flight would wait for it.
            KeptPair<F>& slot = ahead[unit / 2 % PREFETCH<F>];
            KeptPair<F> p = slot;
            const u32 next = group * (GROUP<F> / 2) + unit / 2 + PREFETCH<F>;
            if (next < UNITS / 2) slot.load(plane + next * TWO_UNITS<F>);
            p.align(lane);
            u32 e[4];
            decode_unit<F>(table, bits, position, e, problems);
            F::template merge_unit<0>(e, p.words, weights[unit]);
            decode_unit<F>(table, bits, position, e, problems);
            F::template merge_unit<UNIT * F::KEPT>(e, p.words, weights[unit + 1]);
        }
        if (linear)
            store_group<F, LINEAR_STEP>(address, weights, lane);
        else
            store_group<F, STEP>(address, weights, lane);
        if constexpr (GROUP<F> == BAND_UNITS) {
            // Read again from shared memory, which is cheaper than to keep it in registers.
            address += linear ? LINEAR_STEP * GROUP<F> : F::BYTES * BAND_ROWS * t.pitch;
        } else {
            static_assert(GROUP<F> == BAND_UNITS / 2, "two groups in a band");
            address += linear || group % 2 == 0
                           ? u64((linear ? LINEAR_STEP : STEP) * GROUP<F>)
                           : F::BYTES * BAND_ROWS * t.pitch - STEP * GROUP<F>;
        }
    }
    tile.position = position;
}

// Merges a unit's exponents with its plane bytes, and stores it.
template <class F>
__device__ inline void take_unit(const u32 (&e)[4], const u8* from, typename F::Word* to) {
    if constexpr (F::BYTES == 2 && F::KEPT == 8) {
        const uint2 p = __ldg(reinterpret_cast<const uint2*>(from));
        *reinterpret_cast<uint4*>(to) = merge_unit(e, p.x, p.y);
    } else {
        u32 kept[F::KEPT_WORDS], w[F::WORDS];
        load_kept<F>(from, kept);
        F::template merge_unit<0>(e, kept, w);
        if constexpr (F::BYTES == 1)
            *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
        else
            for (u32 i = 0; i < F::WORDS; i += 4)
                reinterpret_cast<uint4*>(to)[i / 4] =
                    make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
    }
}

// Decodes a tile at the edge of its tensor or of the wanted range, unit by unit: decodes every
// weight that exists, and stores the wanted ones. Returns the position after the lane's last code;
// the upper 32 bits hold problems.
template <class F>
__device__ __noinline__ u64 decode_edge(Tile tile, Bits bits, u32 lane,
                                        typename F::Word* output) {
    u32 position = tile.position, problems = 0;
    const TileTask& t = tile.from();
    const bool linear = t.linear();
    const u32 lanes_a_row = linear ? LANES : 4;
    const u32 half = UNIT * lanes_a_row;  // columns that one unit of all lanes of a row covers
    const u32 g = lane / lanes_a_row;
    const u32 l = lane % lanes_a_row;
    const u32 units = linear ? UNITS : BAND_UNITS;
    const u64 row0 = row_of(tile), column0 = column_of(tile);
    const u32 height = linear ? 1 : u32(min(u64(TILE_ROWS), t.rows - row0));
    const u32 width =
        u32(min(u64(half * units), (linear ? t.rows * t.columns : t.columns) - column0));
    // Whether the whole tile is in the range of elements. A vector may represent a matrix, whose
    // rows then end within units.
    const u64 first_element = row0 * t.columns + column0;
    const bool inside = first_element >= t.element_begin &&
                        first_element + (height - 1) * t.columns + width <= t.element_end;
    const bool split = linear && t.rows > 1;
    // Rows and columns count from the tile's first one, except in such a matrix.
    const u64 column_begin = t.column_begin - (split ? 0 : min(t.column_begin, column0));
    const u64 column_end = t.column_end - (split ? 0 : column0);
    if (!split) output += row0 * t.pitch + column0;
    const u8* plane = tile.plane;
    for (u32 i = lane * 128; i < F::plane_bytes(height * width); i += LANES * 128)
        prefetch_l2(plane + i);
#pragma unroll 1
    for (u32 i = 0; i < UNITS; i++) {
        const u32 band = i / units;
        const u32 unit = i % units;
        const u32 first = unit * half + UNIT * l;
        const u32 row_of_tile = band * BAND_ROWS + g;
        if (row_of_tile >= height || first >= width) continue;
        const u32 count = min(width - first, UNIT);
        const u32 rows = min(height - band * BAND_ROWS, LANES / lanes_a_row);
        // In each row of the band, the pair of units begins after `before` columns and has `both`
        // columns.
        const u32 before = unit / 2 * 2 * half;
        const u32 both = min(width - before, 2 * half);
        const u32 of_lanes_before = min(UNIT * l, both) + min(max(both, half) - half, UNIT * l);
        const u32 of_first_unit = unit % 2 ? min(both - UNIT * l, UNIT) : 0;
        // Only the unit before may have fewer than eight weights, in a whole number of bytes.
        const u8* from = plane + F::plane_bytes(band * BAND_ROWS * width) +
                         F::plane_bytes(rows * before) + F::plane_bytes(g * both) +
                         F::plane_bytes(of_lanes_before) + F::plane_bytes(of_first_unit);
        const u64 element = first_element + row_of_tile * t.columns + first;
        u32 row = row_of_tile, column = first;
        // 64-bit arithmetic would cost a call and spills here.
        if (split) {
            row = u32(element) / u32(t.columns);
            column = u32(element) % u32(t.columns);
        }
        typename F::Word* to = output + (row * t.pitch + column);
        const bool wanted =
            (inside || (element >= t.element_begin && element + UNIT <= t.element_end)) &&
            column >= column_begin && column + UNIT <= column_end;
        if (count == UNIT && wanted && reinterpret_cast<u64>(to) % F::VECTOR == 0 &&
            reinterpret_cast<u64>(from) % F::KEPT_ALIGNMENT == 0) {
            u32 e[4];
            decode_unit<F>(tile.table(), bits, position, e, problems);
            take_unit<F>(e, from, to);
            continue;
        }
#pragma unroll 1
        for (u32 k = 0; k < count; k += 2) {
            const u32 e = decode_pair<F>(tile.table(), bits, position);
            if (int(e) < 0) problems |= STATUS_NO_CODE;
            if (k + 1 == count &&
                (e >> F::FIRST & F::MAX_EXPONENT) != (e >> F::SECOND & F::MAX_EXPONENT))
                problems |= STATUS_LAST_PAIR;
            position += e & LENGTH_MASK;
            for (u32 j = k; j < min(k + 2, count); j++, column++) {
                const u32 exponent = (j == k ? e >> F::FIRST : e >> F::SECOND) & F::MAX_EXPONENT;
                if (split && column == t.columns) {
                    row++;
                    column = 0;
                }
                const bool wanted =
                    inside || (element + j >= t.element_begin && element + j < t.element_end);
                if (wanted && column >= column_begin && column < column_end)
                    output[row * t.pitch + column] =
                        F::merge_one(exponent, load_one_kept<F>(from, j));
            }
        }
    }
    return u64(problems) << 32 | position;
}

template <class F>
__device__ __forceinline__ void decode_tasks(const TileTask* __restrict__ tasks, u32 task_count,
                                             u64 unit_count, u32* status, u64 output) {
    const u32 lane = threadIdx.x % LANES;
    const u32 warp = threadIdx.x / LANES;
    const u32 total = u32(unit_count);
    const u32 stage_bytes = dynamic_shared_bytes() / (blockDim.x / LANES);
    const Bits bits = {shared_address(stages) + warp * stage_bytes, stage_bytes};
    u32 at = share_begin(total, blockIdx.x), problems = 0;
    // Loads the first two tasks at once, in case the share begins in the first: this saves one
    // latency.
    const u32 guess = threadIdx.x < min(task_count, 2u) * TASK_WORDS
                          ? reinterpret_cast<const u32*>(tasks)[threadIdx.x]
                          : 0;
    for (u32 share_end; at < (share_end = share_begin(total, blockIdx.x + 1));) {
        begin_round(tasks, task_count, at, share_end, guess, lane);
        u32 number = warp;
        Tile tile = {};
        KeptPair<F> ahead[PREFETCH<F>] = {};
        if (number < shared_round.count) tile = begin_tile<F>(number, bits, lane, ahead, problems);
        wait_for_copies();
        __syncthreads();
        while (number < shared_round.count) {
            typename F::Word* to =
                reinterpret_cast<typename F::Word*>(tile.from().output) + output / F::BYTES;
            if (tile.whole)
                decode_whole<F>(tile, bits, lane, to, ahead, problems);
            else {
                const u64 edge = decode_edge<F>(tile, bits, lane, to);
                tile.position = u32(edge);
                problems |= u32(edge >> 32);
            }
            if ((tile.end & END_MASK) - tile.position > tile.end >> SLACK_SHIFT)
                problems |= STATUS_LANE_END;
            number = take_tile(lane);
            if (number < shared_round.count)
                tile = begin_tile<F>(number, bits, lane, ahead, problems);
            wait_for_copies();
            __syncwarp();
        }
        at = shared_round.after;
        __syncthreads();
    }
    if (problems) atomicOr(status, problems);
}

// Derives decode tables from codebooks when a tensor is loaded. One block per table, with any
// number of threads.
//
// A codebook consists of words of two bytes: the escape's code length, the number of codes of each
// of 12 lengths, and the pairs. Words after its end read as 0.
constexpr u32 COUNTS_AT = 1, PAIRS_AT = COUNTS_AT + 12;
static_assert(TABLE_BITS <= 12, "a codebook's lengths");

template <class F>
__device__ __forceinline__ void build_tables(const TableTask* tasks) {
    // For each length: the first code, the first bits whose codes are longer, and the index of the
    // first pair's word.
    __shared__ u32 codes[TABLE_BITS + 1], limits[TABLE_BITS + 1], pairs[TABLE_BITS + 1];
    const TableTask task = tasks[blockIdx.x];
    const u16* words = reinterpret_cast<const u16*>(task.codebook);
    const u64 count = task.codebook_bytes / 2;
    auto word = [&](u64 at) { return at < count ? u32(__ldg(words + at)) : 0; };
    const u32 escape = word(0);
    if (threadIdx.x == 0) {
        // RFC 1951, 3.2.2. No overflow: each length has at most 2^16 codes, so that the codes of 12
        // bits are below 2^29.
        u32 code = 0, pair = PAIRS_AT;
        for (u32 length = 1; length <= TABLE_BITS; length++) {
            const u32 here = word(COUNTS_AT + length - 1);
            codes[length] = code;
            pairs[length] = pair;
            pair += here;
            code += here + (length == escape);
            limits[length] = code << (TABLE_BITS - length);
            code *= 2;
        }
    }
    __syncthreads();
    TileTable& table = *static_cast<TileTable*>(task.table);
    for (u32 index = threadIdx.x; index < TABLE_ENTRIES; index += blockDim.x) {
        const u32 bits = __brev(index) >> (32 - TABLE_BITS);
        u32 entry = FLAG | RARE | NO_CODE << 15 | 1;
        for (u32 length = TABLE_BITS; length > 0; length--) {
            if (bits >= limits[length]) break;
            // Bits below the next shorter length's limit have a shorter code.
            if (length > 1 && bits < limits[length - 1]) continue;
            // The escape is the last code of its length.
            const u32 at = (bits >> (TABLE_BITS - length)) - codes[length];
            const u32 pair = word(pairs[length] + at);
            if (length == escape && at == word(COUNTS_AT + length - 1))
                entry = FLAG | RARE | length << 15 | length + 16;
            // Else no code: the dtype has no such exponent.
            else if (F::has(pair & 255, pair >> 8))
                entry = F::pair_entry(pair & 255, pair >> 8, length);
            break;
        }
        table.entries[index] = entry;
    }
}
}  // namespace df11::tile
