// Warps, shared memory and the order of tiles of a block that multiplies by tiles as stored
// (linear_tile_16.cuh), for a number of rows of x; and how its warps wait for each other.
#pragma once
#include "linear_stages.cuh"
#include "tile_code.cuh"

namespace df11::linear {
using namespace tile;
using SharedTiles = Shared<Tile16Launch>;

static_assert(TILE_COLUMNS == TILE_STEPS * STEP_COLUMNS, "tiles of both layouts are as wide");
// Bytes of the plane that a warp loads at once (two units of each lane), and those of a band.
constexpr u32 PLANE_PAIR = LANES * 16, PLANE_BAND = PLANE_PAIR * BAND_UNITS / 2;
// Sums of a run in shared memory: for each row of x, those of the strip's 32 rows.
constexpr u32 MAX_RUNS = 16, RUN_PITCH = STRIP_ROWS;
// Most items whose sums are in flight at once; the launch gives the number.
constexpr u32 MAX_RUN_SETS = 2;
// Most tables at once, so that the next matrix's table is there before it is needed; the launch
// gives the number: one, two or four.
constexpr u32 MAX_TABLES = HOPPER ? 4 : 1;
// Warps that do not decode: one adds sums, the others bring tiles. They form a group, like those
// that decode: groups exchange registers.
constexpr u32 TILE_BRINGERS = 3, TILE_HELPERS = 1 + TILE_BRINGERS;
static_assert(TILE_HELPERS == 4, "a group of warps");
// Slots of each decoding warp, for tiles that are there or in flight.
constexpr u32 TILE_SLOTS = 2, MAX_TILE_WARPS = 20;
// Most rows of x that a block keeps in shared memory for all warps. More warps decode then.
constexpr u32 TILE2_ROWS = 2;
// Most decoding warps, by the rows of x.
__host__ __device__ constexpr u32 tile_warps(u32 x_rows) {
    return x_rows <= TILE2_ROWS ? MAX_TILE_WARPS : HOPPER ? 16 : 12;
}
// Bytes from one row of x in shared memory to the next: 64 modulo 128, so that lanes never conflict
// in a bank.
constexpr u32 SHARED_X_UNIT = 128, SHARED_X_AFTER = 64;
__host__ __device__ constexpr u32 shared_x_pitch(u32 columns) {
    return (columns * 2 + SHARED_X_UNIT - 1) / SHARED_X_UNIT * SHARED_X_UNIT + SHARED_X_AFTER;
}
// Pairs of units whose plane bytes are in flight.
__host__ __device__ constexpr u32 plane_ahead(u32 eights) { return eights > 1 ? 1 : 2; }
// Units of a tile whose x a warp holds in registers. On 9.0, registers do not suffice for 16 rows:
// the warp has the other units' x in shared memory, each lane its own words.
__host__ __device__ constexpr u32 units_held(u32 eights) {
    return HOPPER && eights > 1 ? 5 : BAND_UNITS;
}
__host__ __device__ constexpr u32 x_bytes_of_warp(u32 eights) {
    return (BAND_UNITS - units_held(eights)) * eights * LANES * 16;
}
// Bytes of a slot before its bits: the ticket, and where each lane's bits are. The last word of
// these is loaded with the first bits, but not decoded. Bytes after its bits: what windows reach.
constexpr u32 TICKET_BYTES = 48, SLOT_HEAD = TICKET_BYTES + LANES * 8, BITS_AFTER = 16;

__host__ __device__ constexpr u32 run_set_bytes(u32 x_rows) {
    return MAX_RUNS * x_rows * RUN_PITCH * 4;
}
// Bytes of tables and of the sums of runs.
__host__ __device__ constexpr u32 tile_fixed_bytes(u32 x_rows, u32 tables, u32 sets) {
    return tables * u32(sizeof(TileTable)) + sets * run_set_bytes(x_rows);
}
// Dynamic shared memory of a block with `warps` warps that decode. `staged_bytes`: the most bytes
// of bitstream that a tile takes, from the 16 bytes with its first bit to the 16 bytes with its
// last one. Less memory, down to that for 0, makes tiles with more bits slow, and as exact.
// `tables`, `sets`: the launch's.
__host__ __device__ constexpr u32 tile_shared_bytes(u32 warps, u32 x_rows, u32 staged_bytes,
                                                    u32 tables, u32 sets) {
    const u32 eights = (x_rows + 7) / 8,
              slots = TILE_SLOTS * (staged_bytes + SLOT_HEAD + BITS_AFTER);
    return tile_fixed_bytes(x_rows, tables, sets) + warps * (x_bytes_of_warp(eights) + slots);
}
// Bytes of each slot: an even share of what sums, tables and x leave of the dynamic shared memory.
// `xs`: bytes of x that all warps share.
__host__ __device__ constexpr u32 tile_slot_bytes(u32 shared, u32 warps, u32 x_rows, u32 tables,
                                                  u32 sets, u32 xs) {
    const u32 own = xs ? 0 : x_bytes_of_warp((x_rows + 7) / 8),
              left = shared - tile_fixed_bytes(x_rows, tables, sets) - xs - warps * own;
    return left / (warps * TILE_SLOTS * 16) * 16;
}

// How warps share a range of tiles. Only its length decides, because sums are added run by run.
struct Runs {
    u32 length, count;
    __device__ explicit Runs(u32 tiles)
        : length(max((tiles + MAX_RUNS - 1) / MAX_RUNS, 1u)),
          // No division if a run is one tile: blocks begin with this.
          count(length == 1 ? tiles : (tiles + length - 1) / length) {}
};

// A tile of the launch, the same for all lanes of a warp.
struct TilePlace {
    u32 matrix, strip;  // matrix of the launch, strip of the matrix
    u32 tile;           // tile of the strip
};

template <class Launch>
__device__ inline u32 rows_left(const Shared<Launch>& work, const TilePlace& at) {
    return min(work.launch.matrices[at.matrix].rows - at.strip * STRIP_ROWS, STRIP_ROWS);
}
template <class Launch>
__device__ inline u32 columns_left(const Shared<Launch>& work, const TilePlace& at) {
    return min(work.launch.columns - at.tile * TILE_COLUMNS, TILE_COLUMNS);
}
__device__ inline const TileRecord* record_of(const LinearMatrix& m, u32 strip, u32 tile) {
    return static_cast<const TileRecord*>(m.index) + u64(strip) * tiles_across(m.whole_columns) +
           m.first_column / TILE_COLUMNS + tile;
}
// `rows`: those of the strip.
__device__ inline const u8* plane_of(const u8* plane, u32 whole_columns, u32 first_column,
                                     u32 strip, u32 tile, u32 rows) {
    return plane + u64(strip) * STRIP_ROWS * whole_columns +
           u64(first_column + tile * TILE_COLUMNS) * rows;
}

// Walks through the tiles of a block in the order in which they are brought: of each item, the
// first tile of each run, then the second of each, and so on. The next run belongs to the next
// warp.
struct TileWalk {
    TilePlace at;
    u32 number;                 // number of the item, among the block's that exist
    u32 fill;                   // how many table fills after the first the tile needs
    u32 run, turn;              // run of the item, tile of the run
    u32 warp;                   // warp that decodes the tile
    u32 item, end;              // item of the launch, end of its tiles
    u32 length, count;          // Runs
    u32 begin;                  // first tile of the item
    u32 first_warp;             // warp of the item's first run
    u32 rows;                   // rows of the strip
    const TileRecord* records;  // the strip's records
    const u8* plane;            // the strip's plane
    bool exists;

    __device__ void find_item(const SharedTiles& work) {
        exists = false;
        for (; item < work.items(); item += gridDim.x) {
            const Range range = work.range(item);
            if (!range.exists) continue;
            fill += range.matrix != at.matrix;
            at.matrix = range.matrix, at.strip = range.strip, begin = range.begin / TILE_STEPS,
            end = (range.end + TILE_STEPS - 1) / TILE_STEPS;
            const Runs runs(end - begin);
            length = runs.length, count = runs.count, run = 0, turn = 0;
            at.tile = begin, warp = first_warp, exists = true;
            const LinearMatrix& m = work.launch.matrices[at.matrix];
            rows = rows_left(work, at), records = record_of(m, at.strip, 0);
            plane = plane_of(m.data, m.whole_columns, m.first_column, at.strip, 0, rows);
            return;
        }
    }
    __device__ void start(const SharedTiles& work) {
        at = {}, item = blockIdx.x, number = 0, fill = 0, first_warp = 0;
        find_item(work);
        fill = 0;  // whichever matrix is first, like MatrixWalk
    }
    // Goes from the start to the first tile of a warp.
    __device__ void skip_to(const SharedTiles& work, u32 of_warp) {
        while (exists && (of_warp - first_warp) * length >= end - begin)
            first_warp += count, number++, item += gridDim.x, find_item(work);
        run = of_warp - first_warp, at.tile = begin + run * length, warp = of_warp;
    }
    __device__ void advance(const SharedTiles& work, u32 warps) {
        run++, at.tile += length, warp = warp + 1 == warps ? 0 : warp + 1;
        if (at.tile < end) return;
        // The last run may be shorter.
        turn++, run = 0, warp = first_warp, at.tile = begin + turn;
        if (turn < length) return;
        for (first_warp += count; first_warp >= warps;) first_warp -= warps;
        number++, item += gridDim.x;
        find_item(work);
    }
    // How often a warp arrives at the item's barrier after the tile; MAX_RUNS times for all runs
    // together.
    __device__ u32 arrivals() const {
        if (turn + 1 < length && at.tile + 1 < end) return 0;
        return run + 1 == count ? MAX_RUNS + 1 - count : 1;
    }
};

// Static shared memory of a block: barriers and counts.
struct TileShared {
    u64 set_full[MAX_RUN_SETS], set_empty[MAX_RUN_SETS];  // an item's sums: complete; added
    u64 slot_full[MAX_TILE_WARPS][TILE_SLOTS], slot_empty[MAX_TILE_WARPS][TILE_SLOTS];
    u64 filled[MAX_TABLES];  // phase: a table has been filled again
    u32 added;                // items whose sums have been added
    u32 fills;                // tables filled after the first
};
// A phase's parity does not tell how far a barrier is, and a warp may be several items or tables
// ahead of others: so a count tells first. One warp counts.
__device__ inline void tell(u32* count, u32 value, u64* barrier, u32 lane) {
    arrive(shared_address(barrier));
    __syncwarp();
    if (lane == 0) atomicExch(count, value);
}
__device__ inline void wait_until(u32* count, u32 least, u64* barrier, u32 phase, u32 lane) {
    if (lane == 0)
        while (atomicOr(count, 0) < least) __nanosleep(32);
    __syncwarp();
    wait_for(shared_address(barrier), phase % 2);
}
// For one, two or four places taken in turns: the place of the n-th, and how many had it before.
__device__ inline u32 place_of(u32 n, u32 places) { return n & (places - 1); }
__device__ inline u32 turns_of(u32 n, u32 places) { return n >> places / 2; }
// Offset, for entry_at, of the table of the block's n-th matrix, in bytes.
__device__ inline u32 table_of(u32 fill, u32 tables) {
    return place_of(fill, tables) * u32(sizeof(TileTable));
}
// Waits until a table is there. The first one always is, and is not counted.
__device__ inline void wait_for_table(TileShared& common, u32 fill, u32 tables, u32 lane) {
    wait_until(&common.fills, fill, common.filled + place_of(fill, tables),
               turns_of(fill - 1, tables), lane);
}
// Waits until the sums of the item may be written.
__device__ inline void wait_for_set(TileShared& common, u32 number, u32 sets, u32 lane) {
    if (number < sets) return;
    wait_until(&common.added, number + 1 - sets, common.set_empty + place_of(number, sets),
               turns_of(number, sets) - 1, lane);
}

// Lanes of a warp that arrive at a slot after the warp has written or read it: one, after
// __syncwarp, except for racecheck (WARP_ARRIVALS).
constexpr u32 SLOT_LANES = WARP_ARRIVALS;
// Arrivals at a slot that is being filled. On 9.0 one of them tells how many bytes a bulk copy
// brings; elsewhere the copies of all lanes arrive too.
constexpr u32 SLOT_ARRIVALS = SLOT_LANES + (HOPPER ? 0 : LANES);
__device__ inline void copy_bits(u32 to, const u8* from, u32 bytes, u32 full, u32 lane) {
    if constexpr (HOPPER) {
        if (bytes && lane == 0) copy_bulk_once(to, from, bytes, full);
    } else {
#pragma unroll 1
        for (u32 i = lane * 16; i < bytes; i += LANES * 16) copy_async(to + i, from + i);
        arrive_with_copies(full);
    }
}
// All lanes of the warp call it after they have written to a slot. `bytes`: those still to come.
__device__ inline void show_slot(u32 full, u32 bytes, u32 lane) {
    __syncwarp();
    if (HOPPER && lane == 0)
        arrive_expecting(full, bytes);
    else if (lane < SLOT_LANES)
        arrive(full);
}

// Shared addresses of dynamic shared memory and of the barriers.
struct TileBlock {
    u32 table, table_count, sets, set_count, xs, slots, slot_bytes;
    u32 set_full, slot_full, slot_empty;
    __device__ u32 slot(u32 place) const { return slots + place * slot_bytes; }
    __device__ u32 bits_bytes() const { return slot_bytes - SLOT_HEAD; }
    __device__ u32 sums(const TileWalk& walk, u32 x_rows) const {
        return sets + place_of(walk.number, set_count) * run_set_bytes(x_rows) +
               walk.run * x_rows * RUN_PITCH * 4;
    }
};

// Starts the copy of a matrix's table to its place.
__device__ __forceinline__ void ask_for_table(const TileTable* from, u32 to, u32 thread,
                                              u32 threads) {
    for (u32 i = thread; i < sizeof(TileTable) / 16; i += threads)
        copy_async(to + 16 * i, reinterpret_cast<const u8*>(from) + 16 * i);
    commit_copies();
}

// All warps of the block call it together; one after the other they would take 2 us.
__device__ __forceinline__ void make_barriers(TileShared& common, u32 warp, u32 lane) {
    auto make = [](u64& barrier, u32 arrivals) {
        init_barrier(shared_address(&barrier), arrivals);
    };
    const u32 of_slots = warp - TILE_HELPERS;
    if (warp >= TILE_HELPERS && lane < TILE_SLOTS)
        make(common.slot_full[of_slots][lane], SLOT_ARRIVALS),
            make(common.slot_empty[of_slots][lane], SLOT_LANES);
    if (warp == 0) {
        if (lane < MAX_RUN_SETS)
            make(common.set_full[lane], MAX_RUNS * LANES), make(common.set_empty[lane], LANES);
        if (lane < MAX_TABLES) make(common.filled[lane], LANES);
        if (lane == 0) common.added = common.fills = 0;
    }
    show_barriers();
}
}  // namespace df11::linear
