// Work of the warps that do not decode (linear_tile_16.cuh): they bring tiles to those that do,
// turn sums of runs into y, and bring tables.
#pragma once
#include "linear_tile_unit.cuh"

namespace df11::linear {
// A tile, described for the warp that decodes it.
struct alignas(16) Ticket {
    const u8* plane;
    u32 tile;    // tile of the strip
    u32 number;  // number of the item
    u32 sums;    // shared address of the run's sums
    u32 fill, arrivals, flags;
    u32 matrix, strip, reserved[2];
};
static_assert(sizeof(Ticket) == TICKET_BYTES, "three words of 16 bytes");
constexpr u32 TICKET_WHOLE = 1, TICKET_FIRST = 2, TICKET_END = 4;

// Makes the ticket of the walk's tile; only its bits tell whether it fits the slot, so bring_tile
// may clear TICKET_WHOLE.
__device__ __forceinline__ Ticket ticket_of(const SharedTiles& work, const TileBlock& block,
                                            const TileWalk& walk, bool aligned) {
    Ticket t = {};
    t.plane = walk.plane + walk.at.tile * TILE_COLUMNS * walk.rows;
    t.tile = walk.at.tile, t.number = walk.number, t.fill = walk.fill;
    t.sums = block.sums(walk, work.launch.x_rows), t.arrivals = walk.arrivals();
    t.matrix = walk.at.matrix, t.strip = walk.at.strip;
    if (aligned && walk.rows == STRIP_ROWS && columns_left(work, walk.at) == TILE_COLUMNS)
        t.flags = TICKET_WHOLE;
    if (walk.turn == 0) t.flags |= TICKET_FIRST;
    return t;
}

// Brings a tile to a slot.
template <class Launch>
__device__ __forceinline__ void bring_tile(const Shared<Launch>& work, const TileBlock& block,
                                           const Ticket& ticket, const Record& record, u32 place,
                                           u32 lane, u32& problems) {
    const u32 slot = block.slot(place), full = block.slot_full + place * 8;
    const LinearMatrix& m = work.launch.matrices[ticket.matrix];
    if ((ticket.flags & TICKET_WHOLE) && lane < PLANE_BAND / 128)
        prefetch_l2(ticket.plane + lane * 128);
    const TileBits bits = find_bits(record, m.rest_count, lane, problems);
    const bool fits = bits.bytes + BITS_AFTER <= block.bits_bytes();
    const u32 flags = fits ? ticket.flags : ticket.flags & ~TICKET_WHOLE;
    const u32 bytes = fits ? (bits.bytes + 15) / 16 * 16 : 0;
    copy_bits(slot + SLOT_HEAD, static_cast<const u8*>(m.rest) + bits.byte, bytes, full, lane);
    store_shared_8(slot + TICKET_BYTES + lane * 8, make_uint2(bits.lane.position, bits.lane.end));
    if (lane == 0) {
        const u64 at = reinterpret_cast<u64>(ticket.plane);
        store_shared_16(slot, make_uint4(u32(at), u32(at >> 32), ticket.tile, ticket.number));
        store_shared_16(slot + 16, make_uint4(ticket.sums, ticket.fill, ticket.arrivals, flags));
        store_shared_16(slot + 32, make_uint4(ticket.matrix, ticket.strip, 0, 0));
    }
    show_slot(full, bytes, lane);
}

// Brings to a slot, once it is empty, the message that there are no more tiles.
__device__ __forceinline__ void bring_end(const TileBlock& block, u32 place, u32 emptied,
                                          u32 lane) {
    wait_for(block.slot_empty + place * 8, emptied);
    if (lane == 0) store_shared_16(block.slot(place) + 16, make_uint4(0, 0, 0, TICKET_END));
    copy_bits(0, nullptr, 0, block.slot_full + place * 8, lane);
    show_slot(block.slot_full + place * 8, 0, lane);
}

// How many tiles each warp has been brought, modulo four, with one bit of each word per warp.
struct Brought {
    u32 low = 0, high = 0;
    // The slot of the warp's next tile, and the parity of the phase that empties it.
    __device__ u32 slot(u32 warp) const { return low >> warp & 1; }
    __device__ u32 parity(u32 warp) const { return ~(high >> warp) & 1; }
    __device__ void count(u32 warp) { high ^= low & (1u << warp), low ^= 1u << warp; }
};
static_assert(TILE_SLOTS == 2, "a bit tells the slot");

// Brings all tiles except the first one of each warp. Each of TILE_BRINGERS warps calls it. Returns
// how many items the block has.
__device__ __forceinline__ u32 bring_tiles(const SharedTiles& work, const TileBlock& block,
                                           u32 bringer, u32 warps, u32 lane) {
    const bool aligned = has_aligned_x(work.launch);
    // One bit per warp: those that this warp serves, and those that have their first tile.
    const u32 of_bringer = 0x49249249u << bringer;
    static_assert(TILE_BRINGERS == 3, "every third bit");
    u32 problems = 0, begun = 0;
    Brought brought;
    TileWalk walk;
    walk.start(work);
    // A tile is brought after the next tile's record has been requested.
    Ticket ticket;
    Record record;
    u32 place = ~0u, emptied = 0;
#pragma unroll 1
    for (;; walk.advance(work, warps)) {
        const u32 warp = walk.warp, one = 1u << warp;
        const u32 at = warp * TILE_SLOTS + brought.slot(warp), parity = brought.parity(warp);
        Record after;
        if (walk.exists) {
            brought.count(warp);
            const bool mine = begun & of_bringer & one;
            begun |= one;
            if (!mine) continue;
            after = load_record(walk.records + walk.at.tile, lane);
        }
        if (place != ~0u) {
            wait_for(block.slot_empty + place * 8, emptied);
            bring_tile(work, block, ticket, record, place, lane, problems);
        }
        if (!walk.exists) break;
        ticket = ticket_of(work, block, walk, aligned), record = after;
        place = at, emptied = parity;
    }
    for (u32 warp = bringer; warp < warps; warp += TILE_BRINGERS) {
        const u32 at = warp * TILE_SLOTS + brought.slot(warp);
        bring_end(block, at, brought.parity(warp), lane);
    }
    if (problems) atomicOr(work.launch.status, problems);
    return walk.number;
}

// A warp's first tile, which it requests itself. Its record is in flight while barriers are made.
struct FirstTile {
    TileWalk walk;
    Record record;
    u32 first;  // the block's first matrix, or none
    __device__ __forceinline__ void ask(const SharedTiles& work, u32 warp, u32 lane) {
        walk.start(work);
        first = walk.exists ? walk.at.matrix : ~0u;
        walk.skip_to(work, warp);
        if (walk.exists) record = load_record(walk.records + walk.at.tile, lane);
    }
    // Returns the tile's number in the strip if the warp can hold its x, otherwise ~0.
    __device__ __forceinline__ u32 whole(const SharedTiles& work) const {
        const bool is_whole = walk.exists && has_aligned_x(work.launch) &&
                              columns_left(work, walk.at) == TILE_COLUMNS;
        return is_whole ? walk.at.tile : ~0u;
    }
    __device__ __forceinline__ void bring(const SharedTiles& work, const TileBlock& block, u32 warp,
                                          u32 lane, u32& problems) {
        if (!walk.exists) return;
        bring_tile(work, block, ticket_of(work, block, walk, has_aligned_x(work.launch)), record,
                   warp * TILE_SLOTS, lane, problems);
    }
};

// Walks through the block's matrices.
struct MatrixWalk {
    u32 item, matrix;  // item of the launch; its matrix, if there is one
    __device__ void start(const SharedTiles& work) {
        item = blockIdx.x, matrix = ~0u;
        next(work);
    }
    __device__ bool exists(const SharedTiles& work) const { return item < work.items(); }
    __device__ void next(const SharedTiles& work) {
        for (; item < work.items(); item += gridDim.x) {
            const Range range = work.range(item);
            if (!range.exists || range.matrix == matrix) continue;
            matrix = range.matrix;
            return;
        }
    }
};
// Fills the next place for a table, if the block has another matrix.
__device__ __forceinline__ void fill_table(const SharedTiles& work, const TileBlock& block,
                                           TileShared& common, MatrixWalk& last, u32& fills,
                                           u32 lane) {
    if (last.exists(work)) last.next(work);
    if (!last.exists(work)) return;
    fills++;
    ask_for_table(work.launch.matrices[last.matrix].table,
                  block.table + table_of(fills, block.table_count), lane, LANES);
    wait_for_copies();
    tell(&common.fills, fills, common.filled + place_of(fills, block.table_count), lane);
}

// Destination of a lane's sums of an item: in each row of x that the lane has, QUAD rows of the
// strip, from `row` on.
constexpr u32 QUAD = 4, QUADS = STRIP_ROWS / QUAD, LANE_X_ROWS = LANES / QUADS;
struct ItemOutput {
    u16* y;          // first row that exists
    float* partial;  // a slice's, which is added to others later; null if there are no slices
    u64 y_pitch;
    u32 rows;  // rows that exist
    bool aligned;
    float bias[QUAD];

    __device__ __forceinline__ ItemOutput(const SharedTiles& work, const Range& at, u32 row) {
        const ItemMatrix& m = work.matrix(at);
        const u32 first = at.strip * STRIP_ROWS + row;
        rows = min(max(m.rows, first) - first, QUAD);
        y = m.y + first, y_pitch = m.y_pitch;
        aligned = (reinterpret_cast<u64>(m.y) | m.y_pitch * 2) % 8 == 0 && rows == QUAD;
#pragma unroll
        for (u32 i = 0; i < QUAD; i++)
            bias[i] = m.bias && i < rows ? widen_bf16(__ldg(m.bias + first + i)) : 0;
        partial = at.slices == 1 ? nullptr
                                 : work.launch.partials +
                                       u64(at.partial) * partial_floats(work.launch.x_rows) + row;
    }
    __device__ __forceinline__ void store(u32 x_row, const float (&sum)[QUAD]) const {
        if (partial) {
            __stcg(reinterpret_cast<float4*>(partial + x_row * STRIP_ROWS),
                   make_float4(sum[0], sum[1], sum[2], sum[3]));
            return;
        }
        u16 rounded[QUAD];
#pragma unroll
        for (u32 i = 0; i < QUAD; i++) rounded[i] = round_to_bf16(sum[i] + bias[i]);
        u16* const to = y + x_row * y_pitch;
        if (aligned) {
            *reinterpret_cast<uint2*>(to) =
                make_uint2(u32(rounded[1]) << 16 | rounded[0], u32(rounded[3]) << 16 | rounded[2]);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < QUAD; i++)
            if (i < rows) to[i] = rounded[i];
    }
};
// Adds an item's sums over its runs, in order, for those of LANE_X_ROWS rows of x, from `first` on,
// that exist. One warp; `set`: shared address of the sums.
__device__ __forceinline__ void add_rows(const ItemOutput& to, u32 set, u32 runs, u32 first,
                                         u32 x_rows, u32 lane) {
    const u32 x_row = first + lane / QUADS;
    if (x_row >= x_rows) return;
    u32 from = set + (x_row * RUN_PITCH + run_place(x_row, lane % QUADS * QUAD)) * 4;
    float sum[QUAD] = {};
#pragma unroll 8
    for (u32 run = 0; run < runs; run++, from += x_rows * RUN_PITCH * 4) {
        const uint4 v = load_shared_16(from);
        sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
        sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
    }
    to.store(x_row, sum);
}
// Address of the sums of the item that has place `place`.
__device__ inline u32 sums_of_item(const SharedTiles& work, u32 place) {
    const u32 tables = MAX_TABLES == 1 ? 1 : work.launch.tables;
    return shared_address(linear_shared) + tables * u32(sizeof(TileTable)) +
           place * run_set_bytes(work.launch.x_rows);
}
__device__ inline u32 runs_of(const Range& at) {
    return Runs((at.end + TILE_STEPS - 1) / TILE_STEPS - at.begin / TILE_STEPS).count;
}

// Returns the block's last item; there is one.
__device__ __forceinline__ u32 last_item(const SharedTiles& work) {
    u32 item = work.items() - 1 - (work.items() - 1 - blockIdx.x) % gridDim.x;
    while (!work.range(item).exists) item -= gridDim.x;
    return item;
}
// Adds the sums of item after item except the last one, and fills tables when their places become
// free. Only the first warp calls it. Returns how many items the block has.
__device__ __forceinline__ u32 add_runs(const SharedTiles& work, const TileBlock& block,
                                        TileShared& common) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows, sets = block.set_count;
    u32 number = 0, fills = 0;
    MatrixWalk filled;
    filled.start(work);
    u32 matrix = filled.matrix;
    if (matrix == ~0u) return 0;
    for (u32 i = 1; i < block.table_count; i++)
        fill_table(work, block, common, filled, fills, lane);
    wait_for_launch_before();
    const u32 last = last_item(work);
    for (u32 item = blockIdx.x;; item += gridDim.x) {
        const Range at = work.range(item);
        if (!at.exists) continue;
        if (at.matrix != matrix) {
            // All runs of the previous matrix have been added.
            matrix = at.matrix;
            fill_table(work, block, common, filled, fills, lane);
        }
        if (item == last) return number + 1;
        const ItemOutput to(work, at, lane % QUADS * QUAD);
        const u32 runs = runs_of(at), place = place_of(number, sets);
        wait_for(block.set_full + 8 * place, turns_of(number, sets) % 2);
        for (u32 first = 0; first < x_rows; first += LANE_X_ROWS)
            add_rows(to, sums_of_item(work, place), runs, first, x_rows, lane);
        __syncwarp();
        number++;
        tell(&common.added, number, common.set_empty + place, lane);
        add_slices<0>(work, at, lane, LANES);
    }
}
// Adds the sums of the block's last item, which is number `number`. All helpers call it together:
// they have nothing else to do, and find the destination of the sums before the sums are there. It
// is a function of its own, so that the loops before it keep fewer registers.
__device__ __noinline__ void add_last(const SharedTiles work, TileShared& common, u32 number) {
    static_assert(TILE_HELPERS * LANE_X_ROWS >= LINEAR_ROWS, "each helper has some rows of x");
    const u32 x_rows = work.launch.x_rows, sets = work.launch.sets, place = place_of(number, sets),
              lane = threadIdx.x % LANES, first = threadIdx.x / LANES * LANE_X_ROWS;
    const Range at = work.range(last_item(work));
    // The previous launch may have written the bias.
    wait_for_launch_before();
    const ItemOutput to(work, at, lane % QUADS * QUAD);
    const u32 runs = runs_of(at);
    if (first < x_rows) {
        // Warps that bring tiles may be a turn ahead of the sums.
        wait_for_set(common, number, sets, lane);
        wait_for(shared_address(common.set_full + place), turns_of(number, sets) % 2);
        add_rows(to, sums_of_item(work, place), runs, first, x_rows, lane);
        __syncwarp();
    }
    add_slices<2>(work, at, threadIdx.x, TILE_HELPERS * LANES);
}
}  // namespace df11::linear
