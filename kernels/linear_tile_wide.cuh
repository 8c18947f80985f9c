// Products with matrices in tiles as stored, up to 64 rows of x, for compute capability 9.0: tiles
// are decoded to shared memory, band by band, and multiplied there by wgmma, so that each weight is
// decoded once for all rows of x.
//
//   group     eight strips of a matrix, 256 rows
//   round     a group's two tiles side by side in each strip: a tile for each warp that decodes
//   item      some rounds one after the other, by shape alone; a block takes item after item
//   stage     of a set of eight warps, which have the same columns: eight rows of each of the eight
//             strips (a band of their tiles) by 64 columns, as wgmma's A; a ring of them for a set
//   block     persistent, one a multiprocessor:
//             warps 0 to 3   multiply stage after stage: sums of 256 rows by the rows of x
//             warps 4 to 6   bring tiles, as in linear_tile.cuh
//             warp 7         brings x
//             warps 8 to 15  decode the first of a round's tiles, of strips 0 to 7 of the group
//             the others     decode the second
//
//      shared memory   | table | ring of set 0 | ring of set 1 | x of 512 columns | slots |
//
//   sums      of a group whose rounds are in several items meet in memory: the last block to come
//             adds them in order
//   rows      of a band are in another order in a stage, so that lanes never meet in a bank
//   edges     partial tiles and those with more bits than a slot takes are decoded slowly
//
// Safety on any content: as linear_tile.cuh has it.
#pragma once
#include "linear_tile.cuh"
#include "linear_wide.cuh"

// Warps that decode, in two sets; that multiply, that bring tiles, that bring x.
constexpr u32 DECODERS = 16, SET_WARPS = 8, SETS = DECODERS / SET_WARPS, MULTIPLIERS = 4;
constexpr u32 DECODED_THREADS = (DECODERS + TILE_HELPERS + MULTIPLIERS) * LANES;
// An atom: what a warp has of a stage, eight rows of 64 columns, as wgmma has them; of a set.
constexpr u32 ATOM_COLUMNS = 64, ATOM_BYTES = BAND_ROWS * ATOM_COLUMNS * 2,
              SET_ATOMS = SET_WARPS * ATOM_BYTES;
#ifndef STAGE_ATOMS
#define STAGE_ATOMS 2
#endif
constexpr u32 TILE_ATOMS = TILE_WIDTH / ATOM_COLUMNS, MOST_DECODED = 4;
// Of a stage, side by side, with so many rows of x; bytes of a set.
__host__ __device__ constexpr u32 stage_atoms(u32 n) { return n == 64 ? 1 : STAGE_ATOMS; }
__host__ __device__ constexpr u32 decoded_stage(u32 n) { return stage_atoms(n) * SET_ATOMS; }
// Rows of x, at most; strips and tiles of a strip in a round.
constexpr u32 DECODED_ROWS = 64, GROUP_STRIPS = SET_WARPS, ROUND_TILES = SETS;
__host__ __device__ constexpr u32 decoded_class(u32 x_rows) {
    return x_rows <= 32 ? 32 : 64;
}
// As many rounds, or one more, if groups are then whole: their sums need not meet.
__host__ __device__ constexpr u32 rounds_of_item(u32 least, u32 of_group) {
#ifdef V_WHOLE
    return (least + 1) / of_group * of_group >= least ? (least + 1) / of_group * of_group : least;
#else
    return least;
#endif
}
// Of a matrix: groups, rounds of a group, rounds of an item, items.
struct RoundSplit {
    u32 groups, of_group, of_item, items;
    __host__ __device__ constexpr RoundSplit(u32 rows, u32 columns)
        : groups((rows + GROUP_STRIPS * STRIP_ROWS - 1) / (GROUP_STRIPS * STRIP_ROWS)),
          of_group((columns + ROUND_TILES * TILE_WIDTH - 1) / (ROUND_TILES * TILE_WIDTH)),
          of_item(rounds_of_item((groups * of_group + LINEAR_BLOCKS - 1) / LINEAR_BLOCKS,
                                 of_group)),
          items((groups * of_group + of_item - 1) / of_item) {}
    // Places for sums that meet: of each item's part of each group, or of each item's first and
    // last part.
    __host__ __device__ constexpr bool by_group() const { return groups < items; }
    __host__ __device__ constexpr u32 places() const { return items + (by_group() ? groups : items); }
};
__host__ __device__ constexpr u32 decoded_partial_bytes(u32 n) {
    return GROUP_STRIPS * STRIP_ROWS * n * 4;
}
// The table, and what aligning takes.
constexpr u32 DECODED_FIRST_BYTES = u32(sizeof(TileTable)) + 1024;
// Dynamic shared memory with this many stages of a set.
__host__ __device__ constexpr u32 decoded_fixed_bytes(u32 n, u32 stages) {
    return DECODED_FIRST_BYTES + SETS * (stages * decoded_stage(n) + TILE_ATOMS * n * 128);
}
__host__ __device__ constexpr u32 decoded_shared_bytes(u32 n, u32 stages, u32 staged_bytes) {
    return decoded_fixed_bytes(n, stages) +
           DECODERS * TILE_SLOTS * (staged_bytes + SLOT_HEAD + BITS_AFTER);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr u32 TICKET_TABLE = 8, TICKET_NO_ROWS = 16, TICKET_NO_COLUMNS = 32;

// 64 rows of weights by N rows of x, both in shared memory.
#define PRODUCT_OF_TWO(N, PLACES, W, X)                                                    \
    "{ .reg .pred add;\n.reg .b64 w, x;\nsetp.eq.u32 add, 0, 0;\nmov.b64 w, {" W             \
    ", 0x40000040};\nmov.b64 x, {" X                                                       \
    ", 0x40000040};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" PLACES     \
    "}, w, x, add, 1, 1, 0, 0; }"
__device__ inline void multiply_stored(float (&d)[16], u32 w, u32 x) {
    asm volatile(PRODUCT_OF_TWO("32", PLACES_16, "%16", "%17") : SUMS_16(0) : "r"(w), "r"(x));
}
__device__ inline void multiply_stored(float (&d)[32], u32 w, u32 x) {
    asm volatile(PRODUCT_OF_TWO("64", PLACES_32, "%32", "%33")
                 : SUMS_16(0), SUMS_16(16)
                 : "r"(w), "r"(x));
}

// An item's rounds, one after the other.
struct Rounds {
    u32 matrix, of_group, item_of_matrix;
    u32 places_before;  // of the matrices before
    u32 round, end;    // of the matrix
    u32 group, pair;   // of the matrix; of the group

    // `item`: of the launch; false if there is none.
    __device__ bool find(const LinearLaunch& launch, u32 item) {
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
// All rounds of a block.
struct BlockRounds : Rounds {
    u32 item;
    bool exists;
    __device__ explicit BlockRounds(const LinearLaunch& launch) {
        item = blockIdx.x, exists = find(launch, item);
    }
    __device__ void advance(const LinearLaunch& launch) {
        next();
        if (round < end) return;
        item += gridDim.x, exists = find(launch, item);
    }
};

// Barriers, and where things are, by shared addresses.
struct DecodedShared {
    u64 stage_full[SETS][MOST_DECODED], stage_empty[SETS][MOST_DECODED];
    u64 x_full[SETS][TILE_ATOMS], x_empty[SETS][TILE_ATOMS];
    u64 slot_full[DECODERS][TILE_SLOTS], slot_empty[DECODERS][TILE_SLOTS];
    u32 piece;
};
struct DecodedBlock {
    u32 stages, bytes, count;  // of set 0; of a stage; of a set
    u32 xs, stage_full, stage_empty, x_full, x_empty;
    __device__ u32 stage(u32 set, u32 place) const {
        return stages + (set * count + place) * bytes;
    }
};
// A place in a ring, and how often it has been gone through, modulo 2.
struct RingPlace {
    u32 place = 0, phase = 0;
    __device__ void next(u32 count) {
        if (++place == count) place = 0, phase ^= 1;
    }
};

// Of a warp's tile in a round; `flags` besides.
__device__ __forceinline__ Ticket ticket_of(const LinearLaunch& launch, const Rounds& at, u32 warp,
                                            u32 flags) {
    Ticket t = {};
    const LinearMatrix& m = launch.matrices[at.matrix];
    t.matrix = at.matrix, t.strip = at.group * GROUP_STRIPS + warp % SET_WARPS,
    t.tile = at.pair * ROUND_TILES + warp / SET_WARPS, t.flags = flags;
    if (t.tile * TILE_WIDTH >= launch.columns) {
        t.flags |= TICKET_NO_COLUMNS;
    } else if (t.strip * STRIP_ROWS >= m.rows) {
        t.flags |= TICKET_NO_ROWS;
    } else {
        const u32 rows = min(m.rows - t.strip * STRIP_ROWS, STRIP_ROWS);
        t.plane = plane_of(m.data, m.whole_columns, m.first_column, t.strip, t.tile, rows);
        if (rows == STRIP_ROWS && (t.tile + 1) * TILE_WIDTH <= launch.columns)
            t.flags |= TICKET_WHOLE;
    }
    return t;
}
constexpr u32 TICKET_NONE = TICKET_NO_ROWS | TICKET_NO_COLUMNS;
__device__ __forceinline__ Record record_of(const LinearLaunch& launch, const Ticket& t, u32 lane) {
    if (t.flags & TICKET_NONE) return {};
    return load_record(record_of(launch.matrices[t.matrix], t.strip, t.tile), lane);
}
// Brings a tile, or the news that there is none, to a slot.
__device__ __forceinline__ void bring_ticket(const Shared& work, const TileBlock& block,
                                             const Ticket& ticket, const Record& record, u32 place,
                                             u32 lane, u32& problems) {
    const u32 slot = block.slots + place * block.slot_bytes, full = block.slot_full + place * 8;
    if (!(ticket.flags & TICKET_NONE))
        return bring_tile(work, block, ticket, record, slot, full, lane, problems);
    if (lane) return;
    store_shared_16(slot + 16, make_uint4(0, 0, 0, ticket.flags));
    store_shared_16(slot + 32, make_uint4(ticket.matrix, 0, 0, 0));
    arrive(full);
}

// Asks for the tiles of a third of the warps that decode, round after round; those of the first
// round they ask for themselves.
__device__ __forceinline__ void bring_rounds(const Shared& work, const TileBlock& block,
                                             u32 bringer, u32 lane) {
    const LinearLaunch& launch = work.launch;
    BlockRounds at(launch);
    u32 problems = 0, warp = bringer, turn = 0, matrix = at.matrix;
    if (at.exists) at.advance(launch), turn++;
    // A tile is brought when the record of the one after has been asked for.
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
    for (warp = bringer; warp < DECODERS; warp += TILE_BRINGERS) {
        const u32 last = warp * TILE_SLOTS + turn % TILE_SLOTS;
        wait_for(block.slot_empty + last * 8, turn / TILE_SLOTS % 2 ^ 1);
        if (lane == 0) {
            store_shared_16(block.slots + last * block.slot_bytes + 16,
                            make_uint4(0, 0, 0, TICKET_END));
            arrive(block.slot_full + last * 8);
        }
    }
    if (problems) atomicOr(work.status(), problems);
}

// Copies 64 columns of x, rows in the order of the 128-byte swizzle (linear_wgmma.cuh), by a warp,
// four rows at once.
__device__ __forceinline__ void copy_x(const LinearLaunch& launch, u32 first_column, u32 to,
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
__device__ __forceinline__ void bring_x(const LinearLaunch& launch, const DecodedBlock& block,
                                        u32 lane) {
    wait_for_launch_before();
    u32 turns[SETS] = {};
    for (BlockRounds at(launch); at.exists; at.advance(launch)) {
#pragma unroll
        for (u32 set = 0; set < SETS; set++) {
            const u32 tile = at.pair * ROUND_TILES + set;
            if (tile * TILE_WIDTH >= launch.columns) continue;
#pragma unroll 1
            for (u32 i = 0; i < TILE_ATOMS; i++) {
                const u32 barrier = (set * TILE_ATOMS + i) * 8;
                wait_for(block.x_empty + barrier, turns[set] % 2 ^ 1);
                copy_x(launch, tile * TILE_WIDTH + i * ATOM_COLUMNS,
                       block.xs + (set * TILE_ATOMS + i) * N * 128, lane);
                arrive_with_copies(block.x_full + barrier);
                __syncwarp();
                if (lane == 0) arrive(block.x_full + barrier);
            }
            turns[set]++;
        }
    }
}

// Whether a barrier's phase of this parity is complete; the same for all lanes.
__device__ inline bool is_full(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return __all_sync(ALL_LANES, done);
}

// A band's row g is row `staged_row` of a stage.
__device__ inline u32 staged_row(u32 g) { return g % 2 * 4 + g / 2; }

// A warp's place in the ring of its set.
template <u32 ATOMS>
struct StageWriter {
    u32 full, empty;    // barriers of place 0
    u32 first, count;   // where the lane's first 16 bytes of place 0 are; places
    RingPlace at;
    // Whether the stage is empty already.
    __device__ u32 is_empty() const {
        u32 done;
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
            "p; }"
            : "=r"(done)
            : "r"(empty + at.place * 8), "r"(at.phase ^ 1)
            : "memory");
        return done;
    }
    // Before an atom, whose number in the tile is this modulo those of a stage: waits until the stage
    // is empty; where the lane's 16 bytes are, those of the unit after 64 bytes further or back.
    __device__ u32 begin(u32 atom, u32 is_empty = 0) const {
        if (atom % ATOMS == 0 && !is_empty) wait_for(empty + at.place * 8, at.phase ^ 1);
        return first + (at.place * ATOMS + atom % ATOMS) * SET_ATOMS;
    }
    // After it.
    __device__ void finish(u32 atom, u32 lane) {
        if (atom % ATOMS + 1 < ATOMS) return;
        __syncwarp();
        if (lane == 0) arrive(full + at.place * 8);
        at.next(count);
    }
};

// A tile at an edge, or with more bits than the slot takes, which are then read where they are
// stored. Problems.
template <u32 ATOMS>
__device__ __noinline__ u32 decode_edge(const Shared work, TilePlace at, u32 bits, u32 bits_bytes,
                                        StageWriter<ATOMS> stage, u32 lane) {
    const LinearMatrix& m = work.launch.matrices[at.matrix];
    const u32 height = rows_left(work, at), width = columns_left(work, at), g = lane / 4,
              q = lane % 4;
    const u8* plane = plane_of(m.data, m.whole_columns, m.first_column, at.strip, at.tile, height);
    u32 problems = 0;
    const TileBits found =
        find_bits(load_record(record_of(m, at.strip, at.tile), lane), m.rest_count, lane, problems);
    const u32* words = static_cast<const u32*>(m.rest) + found.byte / 4;
    if (found.bytes + BITS_AFTER <= bits_bytes)
        words =
            reinterpret_cast<const u32*>(linear_shared + (bits - shared_address(linear_shared)));
    const u32 count = (found.bytes + 3) / 4;
    u32 position = found.lane.position - POSITION_OF_BIT_0;
    auto word = [&](u32 i) { return i < count ? words[i] : 0; };
#pragma unroll 1
    for (u32 unit = 0; unit < TILE_BANDS * BAND_UNITS; unit++) {
        const u32 band = unit / BAND_UNITS, first = unit % BAND_UNITS * STEP_COLUMNS + 8 * q,
                  rows = min(max(height, band * BAND_ROWS) - band * BAND_ROWS, BAND_ROWS);
        uint4 w = make_uint4(0, 0, 0, 0);
        if (g < rows && first < width) {
            const uint2 p = load_unit_plane(plane, width, rows, band, unit % BAND_UNITS, lane);
            u32 e[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 window =
                    __funnelshift_r(word(position / 32), word(position / 32 + 1), position);
                e[i] = entry_at(window << 2);
                if (int(e[i]) < 0) e[i] = escaped(e[i], window >> (e[i] >> 15 & 31));
                if (int(e[i]) < 0) problems |= STATUS_NO_CODE;
                position += e[i] & LENGTH_MASK;
            }
            w = merge_words(e, p.x, p.y);
        }
        __syncwarp();
        const u32 atom = unit / 2;
        store_shared_16(stage.begin(atom, unit % 2) ^ unit % 2 * 64, w);
        if (unit % 2) stage.finish(atom, lane);
    }
    return problems | check_end(found.lane, position + POSITION_OF_BIT_0);
}

template <u32 AHEAD, u32 ATOMS>
__device__ __forceinline__ void decode_tiles(const Shared& work, const TileBlock& block,
                                             StageWriter<ATOMS> stage, u32 warp, u32 lane) {
    constexpr u32 PAIRS = BAND_UNITS / 2;
    const u32 thread = warp * LANES + lane;
    u32 problems = 0;
    const BlockRounds first(work.launch);
    if (first.exists) {
        ask_for_table(work.launch.matrices[first.matrix].table, block.table, thread,
                      DECODERS * LANES);
        const Ticket ticket = ticket_of(work.launch, first, warp, 0);
        bring_ticket(work, block, ticket, record_of(work.launch, ticket, lane), warp * TILE_SLOTS,
                     lane, problems);
    }
    wait_for_copies();
    group_barrier(1, DECODERS * LANES);
    asm volatile("" ::: "memory");
    // Of the plane, and whether that of the tile is on its way.
    uint4 ahead[AHEAD];
    bool begun = false;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        const u32 place = warp * TILE_SLOTS + turn % TILE_SLOTS,
                  slot = block.slots + place * block.slot_bytes;
        wait_for(block.slot_full + place * 8, turn / TILE_SLOTS % 2);
        const uint4 one = load_shared_16(slot);
        const u32 flags = load_shared(slot + 28);
        if (flags & TICKET_END) break;
        if (flags & TICKET_TABLE) {
            group_barrier(1, DECODERS * LANES);
            ask_for_table(work.launch.matrices[load_shared(slot + 32)].table, block.table, thread,
                          DECODERS * LANES);
            wait_for_copies();
            group_barrier(1, DECODERS * LANES);
        }
        if (flags & TICKET_NO_ROWS) {
            // Of those sums nothing is used.
            for (u32 i = 0; i < TILE_BANDS * TILE_ATOMS; i++)
                stage.begin(i), stage.finish(i, lane);
        } else if (flags & TICKET_WHOLE) {
            const u8* plane = reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16;
            if (!begun)
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) ahead[i] = load_plane(plane + i * PLANE_PAIR);
            begun = false;
            Window bits;
            bits.begin(slot + SLOT_HEAD, block.bits_bytes(),
                       load_shared(slot + TICKET_BYTES + lane * 8));
#pragma unroll 1
            for (u32 band = 0; band < TILE_BANDS; band++) {
                const bool more = band + 1 < TILE_BANDS;
                if (more && lane < PLANE_BAND / 128) prefetch_l2(plane + PLANE_BAND + lane * 112);
                // Where the plane goes on after the band, if that is known.
                const u8* then = plane + PLANE_BAND;
                bool goes_on = more;
                if (!more) {
                    const u32 after = warp * TILE_SLOTS + (turn + 1) % TILE_SLOTS,
                              at = block.slots + after * block.slot_bytes;
                    if (is_full(block.slot_full + after * 8, (turn + 1) / TILE_SLOTS % 2) &&
                        (load_shared(at + 28) & TICKET_WHOLE)) {
                        const uint2 plane_after = load_shared_8(at);
                        then = reinterpret_cast<const u8*>(u64(plane_after.y) << 32 |
                                                           plane_after.x) + lane * 16;
                        goes_on = begun = true;
                    }
                }
#pragma unroll
                for (u32 pair = 0; pair < PAIRS; pair++) {
                    uint4& p = ahead[pair % AHEAD];
                    u32 e[4];
                    const u32 is_empty = pair % ATOMS ? 0 : stage.is_empty();
                    decode_unit(bits, e, problems);
                    const u32 to = stage.begin(pair, is_empty);
                    store_shared_16(to, merge_words(e, p.x, p.y));
                    decode_unit(bits, e, problems);
                    store_shared_16(to ^ 64, merge_words(e, p.z, p.w));
                    if (pair + AHEAD < PAIRS)
                        load_plane_where(p, plane + (pair + AHEAD) * PLANE_PAIR, true);
                    else
                        load_plane_where(p, then + (pair + AHEAD - PAIRS) * PLANE_PAIR, goes_on);
                    stage.finish(pair, lane);
                }
                plane += PLANE_BAND;
            }
            const uint2 ends = load_shared_8(slot + TICKET_BYTES + lane * 8);
            problems |= check_end({ends.x, ends.y}, bits.place(slot + SLOT_HEAD));
        } else if (!(flags & TICKET_NO_COLUMNS)) {
            const uint4 three = load_shared_16(slot + 32);
            problems |= decode_edge(work, {three.x, three.y, one.z}, slot + SLOT_HEAD,
                                    block.bits_bytes(), stage, lane);
            for (u32 i = 0; i < TILE_BANDS * TILE_ATOMS / ATOMS; i++) stage.at.next(stage.count);
        }
        __syncwarp();
        if (lane == 0) arrive(block.slot_empty + place * 8);
    }
    if (problems) atomicOr(work.status(), problems);
}

// Where a warp's sums of a group go.
template <u32 N>
struct GroupSums {
    float of[TILE_BANDS][N / 2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) of[band][i] = 0;
    }
    __device__ __forceinline__ void settle() {
        wait_for_products<0>();
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) asm volatile("" : "+f"(of[band][i])::"memory");
    }
    // Those of a band by some rows of x, from `first` on, rounded, to y.
    template <u32 COUNT>
    __device__ static __forceinline__ void store(const LinearLaunch& launch, u32 matrix, u32 group,
                                                 u32 band, u32 first, const float* sums) {
        const LinearMatrix& m = launch.matrices[matrix];
        const u32 lane = threadIdx.x % LANES, q = lane % 4, r = lane / 4;
        // The row of the band of which the lane has sums, and of the first of two that it stores.
        const u32 mine = r % 4 * 2 + r / 4, stored = q % 2 * 4 + q / 2 * 2;
        const bool aligned = (reinterpret_cast<u64>(m.y) | m.y_pitch * 2) % 4 == 0;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 strip = group * GROUP_STRIPS + threadIdx.x / LANES * 2 + half;
            const u32 row = strip * STRIP_ROWS + band * BAND_ROWS, own = row + mine;
            const float bias = m.bias && own < m.rows ? widen_bf16(__ldg(m.bias + own)) : 0;
#pragma unroll
            for (u32 i = 0; i < COUNT / 8; i++) {
                float a = sums[4 * i + 2 * half], b = sums[4 * i + 2 * half + 1];
                if (m.bias) a += bias, b += bias;
                const u32 pair = WideOutput::transposed(WideOutput::round_two(a, b)),
                          other = __shfl_xor_sync(ALL_LANES, pair, 2),
                          both = q < 2 ? __byte_perm(pair, other, 0x5410)
                                       : __byte_perm(other, pair, 0x7632);
                const u32 x_row = first + 8 * i + r, to_row = row + stored;
                u16* const to = m.y + x_row * m.y_pitch + to_row;
                const bool one = x_row < launch.x_rows && to_row < m.rows,
                           two = one && to_row + 1 < m.rows;
                if (two && aligned)
                    *reinterpret_cast<u32*>(to) = both;
                else if (one)
                    to[0] = u16(both);
                if (two && !aligned) to[1] = u16(both >> 16);
            }
        }
    }
    __device__ __forceinline__ void store(const LinearLaunch& launch, u32 matrix, u32 group) const {
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
            store<N>(launch, matrix, group, band, 0, of[band]);
    }
    // To memory, and from there added.
    __device__ __forceinline__ void keep(float* to) const {
        float4* const all = reinterpret_cast<float4*>(to) + threadIdx.x;
#pragma unroll
        for (u32 band = 0; band < TILE_BANDS; band++)
#pragma unroll
            for (u32 i = 0; i < N / 8; i++)
#ifdef E_KEEP
                asm volatile("" ::"f"(of[band][4 * i]), "f"(of[band][4 * i + 1]),
                             "f"(of[band][4 * i + 2]), "f"(of[band][4 * i + 3]));
#else
                all[(band * (N / 8) + i) * MULTIPLIERS * LANES] =
                    make_float4(of[band][4 * i], of[band][4 * i + 1], of[band][4 * i + 2],
                                of[band][4 * i + 3]);
#endif
    }
    // A piece of the group's sums: those of a band by PIECE_ROWS rows of x.
    static constexpr u32 PIECE_ROWS = N < 32 ? N : 32, PIECES = TILE_BANDS * (N / PIECE_ROWS);
    // Adds those of a group's items, in order, and stores them. `place`: of an item's.
    template <class Place>
    __device__ static __forceinline__ void add(const LinearLaunch& launch, const Rounds& at,
                                               u32 piece, u32 first_item, u32 last_item,
                                               Place place) {
        constexpr u32 COUNT = PIECE_ROWS / 8, FLOAT4S = decoded_partial_bytes(N) / 16;
        const u32 band = piece % TILE_BANDS, part = piece / TILE_BANDS;
        const float4* const all = reinterpret_cast<const float4*>(launch.partials) +
                                  (band * (N / 8) + part * COUNT) * MULTIPLIERS * LANES +
                                  threadIdx.x;
        // As many loads at once as there are registers for: of so many items.
        constexpr u32 ITEMS = 4;
        float sum[PIECE_ROWS / 2] = {};
#pragma unroll 1
        for (u32 first = first_item; first <= last_item; first += ITEMS) {
            float4 v[ITEMS][COUNT];
#pragma unroll
            for (u32 k = 0; k < ITEMS; k++)
#pragma unroll
                for (u32 i = 0; i < COUNT; i++) {
                    v[k][i] = make_float4(0, 0, 0, 0);
                    if (first + k <= last_item)
                        v[k][i] = all[u64(place(first + k)) * FLOAT4S + i * MULTIPLIERS * LANES];
                }
#pragma unroll
            for (u32 k = 0; k < ITEMS; k++)
#pragma unroll
                for (u32 i = 0; i < COUNT; i++)
                    sum[4 * i] += v[k][i].x, sum[4 * i + 1] += v[k][i].y,
                        sum[4 * i + 2] += v[k][i].z, sum[4 * i + 3] += v[k][i].w;
        }
        store<PIECE_ROWS>(launch, at.matrix, at.group, band, part * PIECE_ROWS, sum);
    }
};

// How far the items of a group are that meet: a word in memory, 0 before and after. Each field
// counts to less than 256.
constexpr u32 MEETING_ARRIVED = 1, MEETING_CLAIMED = 1 << 8, MEETING_LEFT = 1 << 16;
// How long an item waits for the others, at most, to take some of the pieces: in clocks. Nobody has
// to wait: the last one to come takes all that nobody else takes.
#ifndef PATIENCE
#define PATIENCE 100000
#endif
constexpr u32 MEETING_PATIENCE = PATIENCE, NO_PIECE = ~0u;
__device__ inline u32 load_acquired(const u32* from) {
    u32 word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}
// Adds, after all that the block has written, and before all that it reads then.
__device__ inline u32 add_ordered(u32* to, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(to), "r"(value)
                 : "memory");
    return before;
}
__device__ inline u32 claim_piece(u32* word) {
    return atomicAdd(word, MEETING_CLAIMED) >> 8 & 255;
}
// By one thread, after all have written. The first piece, if all of `count` have arrived in time.
__device__ __forceinline__ u32 meet(u32* word, u32 count, bool has_time) {
    u32 arrived = (add_ordered(word, MEETING_ARRIVED) & 255) + 1;
    const u32 begin = u32(clock());
    while (arrived < count && has_time && u32(clock()) - begin < MEETING_PATIENCE)
        arrived = load_acquired(word) & 255;
    return arrived == count ? claim_piece(word) : NO_PIECE;
}

// What a block has of a group is done: stored, if that is all; else it meets what others have.
// `has_time`: the block has nothing else to do.
template <u32 N>
__device__ __forceinline__ void finish_group(GroupSums<N>& sums, const LinearLaunch& launch,
                                             const Rounds& at, DecodedShared& common,
                                             bool has_time) {
    const LinearMatrix& m = launch.matrices[at.matrix];
    const RoundSplit split(m.rows, launch.columns);
    const u32 first = at.group * split.of_group / split.of_item,
              last = ((at.group + 1) * split.of_group - 1) / split.of_item;
    if (first == last) return sums.store(launch, at.matrix, at.group);
    constexpr u32 FLOATS = decoded_partial_bytes(N) / 4;
    // No other part has the same: of a group's parts only the first is not its item's first one.
    auto place = [&](u32 item) {
        return at.places_before +
               (split.by_group() ? item + at.group : 2 * item + (item == first));
    };
    sums.keep(launch.partials + u64(place(at.item_of_matrix)) * FLOATS);
    // Likewise: no other group that is in several items has the same first one.
    u32* const counter = launch.counters + at.matrix * LINEAR_BLOCKS + first;
    group_barrier(0, MULTIPLIERS * LANES);
    u32 next = 0;
    if (threadIdx.x == 0) common.piece = meet(counter, last - first + 1, has_time);
    group_barrier(0, MULTIPLIERS * LANES);
    // All are there: whoever is still here takes piece after piece.
    for (u32 piece = common.piece; piece < sums.PIECES; piece = common.piece) {
        if (threadIdx.x == 0) next = claim_piece(counter);
#ifndef E_ADD
        sums.add(launch, at, piece, first, last, place);
#endif
        group_barrier(0, MULTIPLIERS * LANES);
        if (threadIdx.x == 0) common.piece = next;
        group_barrier(0, MULTIPLIERS * LANES);
    }
    // The last one to leave.
    if (threadIdx.x == 0 && (atomicAdd(counter, MEETING_LEFT) >> 16) == last - first) *counter = 0;
}

template <u32 N>
__device__ __forceinline__ void multiply_rounds(const LinearLaunch& launch,
                                                const DecodedBlock& block, DecodedShared& common,
                                                u32 lane) {
    constexpr u32 ATOMS = stage_atoms(N);
    GroupSums<N> sums;
    RingPlace ring[SETS];
    // done: barriers of what the last products but those on their way have read.
    u32 turns[SETS] = {}, done = 0, x_done = 0;
    wait_for_launch_before();
    for (BlockRounds at(launch); at.exists;) {
        sums.clear();
        const u32 group = at.group, item = at.item;
        Rounds here;
        do {
            here = at;
            const u32 tile = at.pair * ROUND_TILES,
                      sets = (tile + 1) * TILE_WIDTH < launch.columns ? 2 : 1;
#pragma unroll
            for (u32 band = 0; band < TILE_BANDS; band++) {
#pragma unroll 1
                for (u32 i = 0; i < TILE_ATOMS; i += ATOMS)
#pragma unroll
                    for (u32 set = 0; set < SETS; set++) {
                        if (set >= sets) continue;
                        const u32 place = ring[set].place,
                                  barrier = (set * MOST_DECODED + place) * 8,
                                  x_barrier = (set * TILE_ATOMS + i) * 8;
                        wait_for(block.stage_full + barrier, ring[set].phase);
#pragma unroll
                        for (u32 atom = 0; atom < ATOMS; atom++)
                            if (band == 0)
                                wait_for(block.x_full + x_barrier + atom * 8, turns[set] % 2);
                        fence_shared();
                        fence_products();
                        const u32 w = describe_x(block.stage(set, place)),
                                  x = describe_x(block.xs + (set * TILE_ATOMS + i) * N * 128);
#pragma unroll
                        for (u32 k = 0; k < ATOMS * (ATOM_COLUMNS / 16); k++)
                            multiply_stored(sums.of[band],
                                            w + k / 4 * (SET_ATOMS / 16) + k % 4 * 2,
                                            x + k / 4 * (N * 128 / 16) + k % 4 * 2);
                        commit_products();
                        wait_for_products<1>();
                        release(done, lane);
#pragma unroll
                        for (u32 atom = 0; atom < ATOMS; atom++)
                            release(x_done + (x_done ? atom * 8 : 0), lane);
                        done = block.stage_empty + barrier;
                        x_done = band + 1 == TILE_BANDS ? block.x_empty + x_barrier : 0;
                        ring[set].next(block.count);
                    }
            }
#pragma unroll
            for (u32 set = 0; set < SETS; set++) turns[set] += set < sets;
            at.advance(launch);
        } while (at.exists && at.item == item && at.group == group);
        sums.settle();
        release(done, lane);
        for (u32 atom = 0; atom < ATOMS; atom++)
            release(x_done + (x_done ? atom * 8 : 0), lane);
        done = x_done = 0;
        finish_group(sums, launch, here, common, !at.exists);
    }
}

template <u32 N>
__device__ __forceinline__ void linear_tile_wide(const LinearLaunch& launch) {
    const u32 lane = kept(threadIdx.x % LANES),
              warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    __shared__ DecodedShared common;
    if (threadIdx.x == 0) {
        for (u32 set = 0; set < SETS; set++) {
            for (u32 i = 0; i < MOST_DECODED; i++)
                init_barrier(shared_address(&common.stage_full[set][i]), SET_WARPS),
                    init_barrier(shared_address(&common.stage_empty[set][i]), MULTIPLIERS);
            for (u32 i = 0; i < TILE_ATOMS; i++)
                init_barrier(shared_address(&common.x_full[set][i]), X_ARRIVALS),
                    init_barrier(shared_address(&common.x_empty[set][i]), MULTIPLIERS);
        }
        for (u32 i = 0; i < DECODERS * TILE_SLOTS; i++)
            init_barrier(shared_address(&common.slot_full[0][0] + i), SLOT_ARRIVALS),
                init_barrier(shared_address(&common.slot_empty[0][0] + i), 1);
        show_barriers();
    }
    __syncthreads();
    let_next_launch_begin();
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    TileBlock tiles = {};
    DecodedBlock block;
    tiles.table = shared_address(linear_shared);
    block.count = launch.tile_sets;
    block.stages = (tiles.table + u32(sizeof(TileTable)) + 1023) / 1024 * 1024;
    block.bytes = decoded_stage(N);
    block.xs = block.stages + SETS * block.count * block.bytes;
    tiles.slots = block.xs + SETS * TILE_ATOMS * N * 128;
    tiles.slot_bytes = (tiles.table + room - tiles.slots) / (DECODERS * TILE_SLOTS * 16) * 16;
    tiles.slot_full = shared_address(common.slot_full);
    tiles.slot_empty = shared_address(common.slot_empty);
    block.stage_full = shared_address(common.stage_full);
    block.stage_empty = shared_address(common.stage_empty);
    block.x_full = shared_address(common.x_full), block.x_empty = shared_address(common.x_empty);
    const Shared work = {launch};
    // Together as many registers as the block begins with, which build.py compares.
    if (warp < MULTIPLIERS) {
        if (N == 64)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
        else
            asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        multiply_rounds<N>(launch, block, common, lane);
    } else if (warp < MULTIPLIERS + TILE_HELPERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp < MULTIPLIERS + TILE_BRINGERS)
            bring_rounds(work, tiles, warp - MULTIPLIERS, lane);
        else
            bring_x<N>(launch, block, lane);
    } else {
        if (N == 64)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        else
            asm volatile("setmaxnreg.inc.sync.aligned.u32 80;");
        const u32 mine = warp - MULTIPLIERS - TILE_HELPERS, set = mine / SET_WARPS;
        const u32 row = staged_row(lane / 4);
        StageWriter<stage_atoms(N)> stage;
        stage.full = block.stage_full + set * MOST_DECODED * 8;
        stage.empty = block.stage_empty + set * MOST_DECODED * 8;
        stage.first = block.stage(set, 0) + mine % SET_WARPS * ATOM_BYTES + row * 128 +
                      (lane % 4 ^ row) * 16;
        stage.count = block.count;
        decode_tiles<N == 64 ? 1 : 2>(work, tiles, stage, mine, lane);
    }
}
#endif
