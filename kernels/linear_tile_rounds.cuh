// How blocks share products of 17 to 64 rows of x with tiles as stored (linear_tile_64.cuh), the
// layout of their shared memory, and how tiles and x get there.
#pragma once
#include "linear_tile_16.cuh"
#include "linear_fast_128.cuh"

namespace df11::linear {
// Warps that decode, in two sets, and warps that multiply.
constexpr u32 DECODERS = 16, SET_WARPS = 8, SETS = DECODERS / SET_WARPS, MULTIPLIERS = 4;
constexpr u32 TILE64_THREADS = (DECODERS + TILE_HELPERS + MULTIPLIERS) * LANES;
// An atom: a warp's part of a stage, eight rows of 64 columns, in wgmma's order. SET_ATOMS bytes
// hold a set's.
constexpr u32 ATOM_COLUMNS = 64, ATOM_BYTES = BAND_ROWS * ATOM_COLUMNS * 2,
              SET_ATOMS = SET_WARPS * ATOM_BYTES;
constexpr u32 TILE_ATOMS = TILE_COLUMNS / ATOM_COLUMNS, TILE64_STAGES = 4;
// Atoms side by side in a stage, with up to n rows of x; bytes of a set's stage.
__host__ __device__ constexpr u32 stage_atoms(u32 n) { return n == 64 ? 1 : 2; }
__host__ __device__ constexpr u32 tile64_stage(u32 n) { return stage_atoms(n) * SET_ATOMS; }
// Most rows of x; strips, and tiles of each strip, in a round.
constexpr u32 TILE64_ROWS = 64, GROUP_STRIPS = SET_WARPS, ROUND_TILES = SETS;
__host__ __device__ constexpr u32 tile64_class(u32 x_rows) { return x_rows <= 32 ? 32 : 64; }
// How a matrix is split: its groups, rounds per group, rounds per item, its items.
struct RoundSplit {
    u32 groups, of_group, of_item, items;
    __host__ __device__ constexpr RoundSplit(u32 rows, u32 columns)
        : groups((rows + GROUP_STRIPS * STRIP_ROWS - 1) / (GROUP_STRIPS * STRIP_ROWS)),
          of_group((columns + ROUND_TILES * TILE_COLUMNS - 1) / (ROUND_TILES * TILE_COLUMNS)),
          of_item((groups * of_group + LINEAR_BLOCKS - 1) / LINEAR_BLOCKS),
          items((groups * of_group + of_item - 1) / of_item) {}
    // Places for sums that meet: one per item and group that it has a part of, or two per item, for
    // its first and its last part.
    __host__ __device__ constexpr bool by_group() const { return groups < items; }
    __host__ __device__ constexpr u32 places() const {
        return items + (by_group() ? groups : items);
    }
};
__host__ __device__ constexpr u32 tile64_partial_bytes(u32 n) {
    return GROUP_STRIPS * STRIP_ROWS * n * 4;
}
// Bytes of the table and of alignment.
constexpr u32 TILE64_FIRST_BYTES = u32(sizeof(TileTable)) + 1024;
// Dynamic shared memory with `stages` stages per set.
__host__ __device__ constexpr u32 tile64_fixed_bytes(u32 n, u32 stages) {
    return TILE64_FIRST_BYTES + SETS * (stages * tile64_stage(n) + TILE_ATOMS * n * 128);
}
__host__ __device__ constexpr u32 tile64_shared_bytes(u32 n, u32 stages, u32 staged_bytes) {
    return tile64_fixed_bytes(n, stages) +
           DECODERS * TILE_SLOTS * (staged_bytes + SLOT_HEAD + BITS_AFTER);
}

// Walks through an item's rounds.
struct Rounds {
    u32 matrix, of_group, item_of_matrix;
    u32 places_before;  // sum over the matrices before
    u32 round, end;     // rounds of the matrix
    u32 group, pair;    // group of the matrix, round of the group

    // `item`: its number in the launch. False if there is none.
    __device__ bool find(const Tile64Launch& launch, u32 item) {
        places_before = 0;
        for (matrix = 0; matrix < launch.matrix_count; matrix++) {
            const RoundSplit split(launch.matrices[matrix].rows, launch.columns);
            if (item < split.items) {
                of_group = split.of_group, item_of_matrix = item;
                round = item_of_matrix * split.of_item;
                end = min(round + split.of_item, split.groups * split.of_group);
                group = round / of_group, pair = round % of_group;
                return true;
            }
            item -= split.items, places_before += split.places();
        }
        return false;
    }
    __device__ void next() {
        round++, pair++;
        if (pair == of_group) pair = 0, group++;
    }
};
// Walks through all rounds of a block.
struct BlockRounds : Rounds {
    u32 item;
    bool exists;
    __device__ explicit BlockRounds(const Tile64Launch& launch) {
        item = blockIdx.x, exists = find(launch, item);
    }
    __device__ void advance(const Tile64Launch& launch) {
        next();
        if (round < end) return;
        item += gridDim.x, exists = find(launch, item);
    }
};

// Barriers, and the shared addresses of a block's parts.
struct Tile64Shared {
    u64 stage_full[SETS][TILE64_STAGES], stage_empty[SETS][TILE64_STAGES];
    u64 x_full[SETS][TILE_ATOMS], x_empty[SETS][TILE_ATOMS];
    u64 slot_full[DECODERS][TILE_SLOTS], slot_empty[DECODERS][TILE_SLOTS];
    u32 piece;
};
struct Tile64Block {
    u32 stages, bytes, count;  // set 0's; bytes per stage; stages per set
    u32 xs, stage_full, stage_empty, x_full, x_empty;
    __device__ u32 stage(u32 set, u32 place) const {
        return stages + (set * count + place) * bytes;
    }
};
// A place in a ring, and the parity of the rounds through it.
struct RingPlace {
    u32 place = 0, phase = 0;
    __device__ void next(u32 count) {
        if (++place == count) place = 0, phase ^= 1;
    }
};

constexpr u32 TICKET_TABLE = 8, TICKET_NO_ROWS = 16, TICKET_NO_COLUMNS = 32;

// Makes the ticket of a warp's tile in a round, with `flags` added.
__device__ __forceinline__ Ticket ticket_of(const Tile64Launch& launch, const Rounds& at, u32 warp,
                                            u32 flags) {
    Ticket t = {};
    const ProductMatrix& m = launch.matrices[at.matrix];
    t.matrix = at.matrix, t.strip = at.group * GROUP_STRIPS + warp % SET_WARPS,
    t.tile = at.pair * ROUND_TILES + warp / SET_WARPS, t.flags = flags;
    if (t.tile * TILE_COLUMNS >= launch.columns) {
        t.flags |= TICKET_NO_COLUMNS;
    } else if (t.strip * STRIP_ROWS >= m.rows) {
        t.flags |= TICKET_NO_ROWS;
    } else {
        const u32 rows = min(m.rows - t.strip * STRIP_ROWS, STRIP_ROWS);
        t.plane = plane_of(m.data, m.whole_columns, m.first_column, t.strip, t.tile, rows);
        if (rows == STRIP_ROWS && (t.tile + 1) * TILE_COLUMNS <= launch.columns)
            t.flags |= TICKET_WHOLE;
    }
    return t;
}
constexpr u32 TICKET_NONE = TICKET_NO_ROWS | TICKET_NO_COLUMNS;
__device__ __forceinline__ Record record_of(const Tile64Launch& launch, const Ticket& t, u32 lane) {
    if (t.flags & TICKET_NONE) return {};
    return load_record(record_of(launch.matrices[t.matrix], t.strip, t.tile), lane);
}
// Brings a tile to a slot, or the message that there is none.
__device__ __forceinline__ void bring_ticket(const Shared<Tile64Launch>& work,
                                             const TileBlock& block, const Ticket& ticket,
                                             const Record& record, u32 place, u32 lane,
                                             u32& problems) {
    const u32 slot = block.slot(place), full = block.slot_full + place * 8;
    if (!(ticket.flags & TICKET_NONE))
        return bring_tile(work, block, ticket, record, place, lane, problems);
    if (lane == 0) {
        store_shared_16(slot + 16, make_uint4(0, 0, 0, ticket.flags));
        store_shared_16(slot + 32, make_uint4(ticket.matrix, 0, 0, 0));
    }
    show_slot(full, 0, lane);
}

// Requests the tiles of a third of the decoding warps, round after round. Decoding warps request
// those of the first round themselves.
__device__ __forceinline__ void bring_rounds(const Shared<Tile64Launch>& work,
                                             const TileBlock& block, u32 bringer, u32 lane) {
    const Tile64Launch& launch = work.launch;
    BlockRounds at(launch);
    u32 problems = 0, warp = bringer, turn = 0, matrix = at.matrix;
    if (at.exists) at.advance(launch), turn++;
    // A tile is brought after the next tile's record has been requested.
    Ticket ticket;
    Record record;
    u32 place = ~0u, emptied = 0;
    while (true) {
        Ticket next = {};
        Record after = {};
        if (at.exists) {
            next = ticket_of(launch, at, warp, at.matrix != matrix ? TICKET_TABLE : 0);
            after = record_of(launch, next, lane);
        }
        if (place != ~0u) {
            wait_for(block.slot_empty + place * 8, emptied);
            bring_ticket(work, block, ticket, record, place, lane, problems);
        }
        if (!at.exists) break;
        ticket = next, record = after, place = warp * TILE_SLOTS + turn % TILE_SLOTS;
        emptied = turn / TILE_SLOTS % 2 ^ 1;
        warp += TILE_BRINGERS;
        if (warp >= DECODERS) matrix = at.matrix, warp = bringer, turn++, at.advance(launch);
    }
    for (warp = bringer; warp < DECODERS; warp += TILE_BRINGERS)
        bring_end(block, warp * TILE_SLOTS + turn % TILE_SLOTS, turn / TILE_SLOTS % 2 ^ 1, lane);
    if (problems) atomicOr(work.launch.status, problems);
}

// Copies 64 columns of x, with rows in the order of the 128-byte swizzle (linear_wgmma.cuh). One
// warp copies four rows at once.
__device__ __forceinline__ void copy_x(const Tile64Launch& launch, u32 first_column, u32 to,
                                       u32 lane) {
    const u32 rows = launch.x_rows;
    if ((reinterpret_cast<u64>(launch.x) | launch.x_pitch * 2) % 16 ||
        first_column + ATOM_COLUMNS > launch.columns) {
        const u32 mine = first_column + 2 * lane;
        return copy_words_slowly(launch.x + mine, launch.x_pitch, rows,
                                 max(launch.columns, mine) - mine, to + lane * 4);
    }
    const u64 step = launch.x_pitch * 8;
    const u8* row = reinterpret_cast<const u8*>(launch.x + first_column + lane % 8 * 8) +
                    lane / 8 * launch.x_pitch * 2;
    to += lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
#pragma unroll 4
    for (u32 i = lane / 8; i < rows; i += 4, row += step, to = (to ^ 64) + 512) copy_async(to, row);
}

constexpr u32 X_ARRIVALS = LANES + 1;
template <u32 N>
__device__ __forceinline__ void bring_x(const Tile64Launch& launch, const Tile64Block& block,
                                        u32 lane) {
    wait_for_launch_before();
    u32 turns[SETS] = {};
    for (BlockRounds at(launch); at.exists; at.advance(launch)) {
#pragma unroll
        for (u32 set = 0; set < SETS; set++) {
            const u32 tile = at.pair * ROUND_TILES + set;
            if (tile * TILE_COLUMNS >= launch.columns) continue;
#pragma unroll 1
            for (u32 i = 0; i < TILE_ATOMS; i++) {
                const u32 barrier = (set * TILE_ATOMS + i) * 8;
                wait_for(block.x_empty + barrier, turns[set] % 2 ^ 1);
                copy_x(launch, tile * TILE_COLUMNS + i * ATOM_COLUMNS,
                       block.xs + (set * TILE_ATOMS + i) * N * 128, lane);
                arrive_with_copies(block.x_full + barrier);
                __syncwarp();
                if (lane == 0) arrive(block.x_full + barrier);
            }
            turns[set]++;
        }
    }
}
}  // namespace df11::linear
