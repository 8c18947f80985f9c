// (header to come)
#pragma once
#include "linear_tile.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Strips of an item, and blocks that share its columns.
constexpr u32 PAIR = 2;
__host__ __device__ constexpr u32 pair_runs(u32 columns) {
    return runs_before<PAIR>(Runs(tiles_across(columns)).count, 1);
}
__host__ __device__ constexpr u32 pair_set_bytes(u32 x_rows, u32 runs) {
    return PAIR * runs * x_rows * RUN_PITCH * 4;
}
__host__ __device__ constexpr u32 pair_fixed_bytes(u32 x_rows, u32 runs, u32 tables, u32 sets) {
    return tables * u32(sizeof(TileTable)) + sets * pair_set_bytes(x_rows, runs);
}
constexpr u32 PAIR_HEAD = TICKET_BYTES + PAIR * LANES * 8;
constexpr u32 TICKET_SECOND = 64;
// Warps that decode, their registers, and those of the others.
#ifndef PAIR_WARPS_8
#define PAIR_WARPS_8 12
#endif
#ifndef PAIR_WARPS_16
#define PAIR_WARPS_16 12
#endif
#ifndef PAIR_INC
#define PAIR_INC 144
#define PAIR_DEC 80
#endif
#define TEXT_OF(a) #a
#define TEXT(a) TEXT_OF(a)
#ifndef PAIR_AHEAD
#define PAIR_AHEAD 1
#endif

__host__ __device__ constexpr u32 pair_shared_bytes(u32 warps, u32 x_rows, u32 columns,
                                                    u32 staged_bytes, u32 tables, u32 sets) {
    return pair_fixed_bytes(x_rows, pair_runs(columns), tables, sets) +
           warps * TILE_SLOTS * (PAIR_HEAD + PAIR * (staged_bytes + BITS_AFTER));
}

// A row of x of B's columns 2 q and 2 q + 1: q and q + 4, so that lanes never meet in a bank.
__device__ inline u32 x_row_of(u32 g) { return g % 2 * 4 + g / 2; }

__device__ inline void arrive_of_cluster(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
__device__ inline void wait_of_cluster(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}
__device__ inline u32 address_of(u32 address, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ inline float4 load_of_cluster(u32 mapped) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(mapped)
                 : "memory");
    return v;
}

// Until the sums of the item may be written.
__device__ inline void wait_for_pair_set(TileShared& common, u32 number, u32 sets, u32 lane) {
    if (number < sets) return;
    const u32 phase = turns_of(number, sets) - 1;
    wait_until(&common.added, number + 1 - sets, common.set_empty + place_of(number, sets), phase,
               lane);
    wait_of_cluster(shared_address(common.set_empty + place_of(number, sets)), phase % 2);
}
__device__ __forceinline__ void make_pair_barriers(TileShared& common, u32 runs, u32 warp,
                                                   u32 lane) {
    auto make = [](u64& barrier, u32 arrivals) {
        init_barrier(shared_address(&barrier), arrivals);
    };
    const u32 of_slots = warp - TILE_HELPERS;
    if (warp >= TILE_HELPERS && lane < TILE_SLOTS)
        make(common.slot_full[of_slots][lane], SLOT_ARRIVALS),
            make(common.slot_empty[of_slots][lane], SLOT_LANES);
    if (warp == 0) {
        if (lane < 4)
            make(common.set_full[lane], runs * SLOT_LANES),
                make(common.other_full[lane], SLOT_LANES),
                make(common.set_empty[lane], PAIR * SLOT_LANES);
        if (lane < MOST_TABLES) make(common.filled[lane], LANES);
        if (lane == 0) common.added = common.fills = 0;
    }
    show_barriers();
}

// Two records, or one twice.
struct PairRecords {
    Record first, second;
    __device__ __forceinline__ void load(const Shared& work, const TileWalk<PAIR>& walk, u32 lane) {
        const LinearMatrix& m = work.launch.matrices[walk.at.matrix];
        const TileRecord* at = walk.records + walk.at.tile;
        first = load_record(at, lane);
        const bool both = (walk.at.strip + 1) * STRIP_ROWS < m.rows;
        second = load_record(at + (both ? tiles_across(m.whole_columns) : 0), lane);
    }
};

struct PairTicket {
    Ticket ticket;
    const u8* second;  // plane
};
__device__ __forceinline__ PairTicket pair_ticket(const Shared& work, const TileBlock& block,
                                                  const TileWalk<PAIR>& walk, bool aligned) {
    PairTicket p;
    Ticket& t = p.ticket;
    t = {};
    const LinearMatrix& m = work.launch.matrices[walk.at.matrix];
    t.plane = walk.plane + walk.at.tile * TILE_WIDTH * walk.rows;
    t.tile = walk.at.tile, t.number = walk.number, t.fill = walk.fill;
    t.sums = block.sets + place_of(walk.number, block.set_count) * pair_set_bytes(work.launch.x_rows, block.runs) +
             walk.run * work.launch.x_rows * RUN_PITCH * 4;
    t.arrivals = walk.arrivals(), t.matrix = walk.at.matrix, t.strip = walk.at.strip;
    const u32 next = (t.strip + 1) * STRIP_ROWS;
    const bool both = next < m.rows;
    if (aligned && (both ? next + STRIP_ROWS <= m.rows : walk.rows == STRIP_ROWS) &&
        columns_left(work, walk.at) == TILE_WIDTH)
        t.flags = TICKET_WHOLE;
    if (walk.turn == 0) t.flags |= TICKET_FIRST;
    if (both) t.flags |= TICKET_SECOND;
    p.second = t.plane + (both ? u64(STRIP_ROWS) * m.whole_columns : 0);
    return p;
}

__device__ __forceinline__ void bring_pair(const Shared& work, const TileBlock& block,
                                           const PairTicket& p, const PairRecords& records,
                                           u32 place, u32 lane, u32& problems) {
    const Ticket& ticket = p.ticket;
    const LinearMatrix& m = work.launch.matrices[ticket.matrix];
    const u32 slot = block.slots + place * block.slot_bytes, full = block.slot_full + place * 8;
    if ((ticket.flags & TICKET_WHOLE) && lane < 2 * PLANE_BAND / 128)
        prefetch_l2((lane < PLANE_BAND / 128 ? ticket.plane : p.second - PLANE_BAND) + lane * 128);
    const TileBits a = find_bits(records.first, m.rest_count, lane, problems),
                   b = find_bits(records.second, m.rest_count, lane, problems);
    const u32 room = block.pair_room();
    const bool first = a.bytes + BITS_AFTER <= room, second = b.bytes + BITS_AFTER <= room;
    const u32 flags = first && second ? ticket.flags : ticket.flags & ~TICKET_WHOLE;
    const u32 first_bytes = first ? (a.bytes + 15) / 16 * 16 : 0,
              second_bytes = second ? (b.bytes + 15) / 16 * 16 : 0;
    const u8* const rest = static_cast<const u8*>(m.rest);
    copy_bits(slot + PAIR_HEAD, rest + a.byte, first_bytes, full, lane);
    copy_bits(slot + PAIR_HEAD + room, rest + b.byte, second_bytes, full, lane);
    store_shared_8(slot + TICKET_BYTES + lane * 8, make_uint2(a.lane.position, a.lane.end));
    store_shared_8(slot + TICKET_BYTES + (LANES + lane) * 8,
                   make_uint2(b.lane.position, b.lane.end));
    if (lane == 0) {
        const u64 at = reinterpret_cast<u64>(ticket.plane), other = reinterpret_cast<u64>(p.second);
        store_shared_16(slot, make_uint4(u32(at), u32(at >> 32), ticket.tile, ticket.number));
        store_shared_16(slot + 16, make_uint4(ticket.sums, ticket.fill, ticket.arrivals, flags));
        store_shared_16(slot + 32,
                        make_uint4(ticket.matrix, ticket.strip, u32(other), u32(other >> 32)));
    }
    show_slot(full, first_bytes + second_bytes, lane);
}

__device__ __forceinline__ void bring_pairs(const Shared& work, const TileBlock& block, u32 bringer,
                                            u32 warps, u32 lane) {
    const bool aligned = work.aligned();
    const u32 of_bringer = 0x49249249u << bringer;
    u32 problems = 0, begun = 0;
    Brought brought;
    TileWalk<PAIR> walk;
    walk.start(work);
    PairTicket ticket;
    PairRecords records;
    u32 place = ~0u, emptied = 0;
#pragma unroll 1
    for (;; walk.advance(work, warps)) {
        const u32 warp = walk.warp, one = 1u << warp;
        const u32 at = warp * TILE_SLOTS + brought.slot(warp), parity = brought.parity(warp);
        PairRecords after;
        if (walk.exists) {
            brought.count(warp);
            const bool mine = begun & of_bringer & one;
            begun |= one;
            if (!mine) continue;
            after.load(work, walk, lane);
        }
        if (place != ~0u) {
            wait_parity(block.slot_empty + place * 8, emptied);
            bring_pair(work, block, ticket, records, place, lane, problems);
        }
        if (!walk.exists) break;
        ticket = pair_ticket(work, block, walk, aligned), records = after;
        place = at, emptied = parity;
    }
    for (u32 warp = bringer; warp < warps; warp += TILE_BRINGERS) {
        const u32 at = warp * TILE_SLOTS + brought.slot(warp);
        wait_parity(block.slot_empty + at * 8, brought.parity(warp));
        if (lane == 0)
            store_shared_16(block.slots + at * block.slot_bytes + 16,
                            make_uint4(0, 0, 0, TICKET_END));
        show_slot(block.slot_full + at * 8, 0, lane);
    }
    if (problems) atomicOr(work.status(), problems);
}

// A warp's first tiles, for which it asks itself.
struct FirstPair {
    TileWalk<PAIR> walk;
    PairRecords records;
    u32 first;
    __device__ __forceinline__ void ask(const Shared& work, u32 warp, u32 warps, u32 lane) {
        walk.start(work);
        first = walk.exists ? walk.at.matrix : ~0u;
        walk.skip_to(work, warp, warps);
        if (walk.exists) records.load(work, walk, lane);
    }
    __device__ __forceinline__ u32 bring(const Shared& work, const TileBlock& block, u32 warp,
                                         u32 warps, u32 lane, u32& problems) {
        if (first != ~0u)
            ask_for_table(work.launch.matrices[first].table, block.table, warp * LANES + lane,
                          warps * LANES);
        if (!walk.exists) return ~0u;
        const bool aligned = work.aligned();
        bring_pair(work, block, pair_ticket(work, block, walk, aligned), records,
                   warp * TILE_SLOTS, lane, problems);
        return aligned && columns_left(work, walk.at) == TILE_WIDTH ? walk.at.tile : ~0u;
    }
};

// Weights are A: rows g of the first tile, and g + 8 of the second. x is B.
template <u32 EIGHTS>
struct PairSums {
    float even[EIGHTS][4] = {}, odd[EIGHTS][4] = {};
    __device__ __forceinline__ void add(const uint4& a, const uint4& b, const uint4 (&x)[EIGHTS]) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) multiply(even[i], a.x, b.x, a.z, b.z, x[i].x, x[i].y);
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) multiply(odd[i], a.y, b.y, a.w, b.w, x[i].z, x[i].w);
    }
    __device__ __forceinline__ void keep(u32 to, u32 other, u32 band, bool first, u32 x_rows,
                                         u32 lane) const {
        const u32 g = lane / 4, q = lane % 4;
        to += (q * RUN_PITCH + ((band ^ q) * BAND_ROWS + g)) * 4;
#pragma unroll
        for (u32 i = 0; i < 2 * EIGHTS; i++, to += 4 * RUN_PITCH * 4) {
            if (q + 4 * i >= x_rows) continue;
            float a = even[i / 2][i % 2] + odd[i / 2][i % 2],
                  b = even[i / 2][2 + i % 2] + odd[i / 2][2 + i % 2];
            if (!first)
                a += __uint_as_float(load_shared(to)), b += __uint_as_float(load_shared(to + other));
            store_shared(to, __float_as_uint(a)), store_shared(to + other, __float_as_uint(b));
        }
    }
};

// x of a tile in registers: of each unit words 0, 2, 1, 3, as B has them.
template <u32 EIGHTS>
__device__ __forceinline__ void load_pair_x(const Shared& work, u32 tile, u32 lane,
                                            uint4 (&x)[BAND_UNITS][EIGHTS]) {
    const u32 row = x_row_of(lane / 4), rows = work.launch.x_rows;
    const u32 same = 0x3210 | rows >> 8;  // so that the compiler moves words here
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        const u64 from = reinterpret_cast<u64>(work.launch.x + (row + 8 * i) * work.launch.x_pitch +
                                               tile * TILE_WIDTH + lane % 4 * 8);
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            x[unit][i] = make_uint4(0, 0, 0, 0);
            load_x_where(x[unit][i], from + unit * STEP_COLUMNS * 2, row + 8 * i < rows);
        }
    }
#pragma unroll
    for (u32 unit = 0; unit < BAND_UNITS; unit++)
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            const uint4 v = x[unit][i];
            x[unit][i] = make_uint4(__byte_perm(v.x, 0, same), __byte_perm(v.z, 0, same),
                                    __byte_perm(v.y, 0, same), __byte_perm(v.w, 0, same));
        }
}

template <class T>
__device__ __forceinline__ void exchange(T& a, T& b) {
    const T c = a;
    a = b, b = c;
}
__device__ __forceinline__ void decode_two(Window& a, Window& b, u32 (&ea)[4], u32 (&eb)[4],
                                           u32& problems) {
    UnitLookups of_a, of_b;
    of_a.begin(a), of_b.begin(b);
#pragma unroll
    for (u32 i = 0; i < 4; i++) of_a.look_up(a, ea, i), of_b.look_up(b, eb, i);
    u32 at_a = of_a.position(a, ea), at_b = of_b.position(b, eb);
#ifndef NO_RARE
    if (__builtin_expect(of_a.is_rare(at_a | at_b), 0)) {
#ifdef STRAIGHT
        const u32 of_first = of_a.settle_escapes(a, ea, at_a, problems),
                  of_second = of_b.settle_escapes(b, eb, at_b, problems);
        if (max(of_first, of_second) > WINDOW_BITS) {
            bool is_long = of_first > WINDOW_BITS, other = of_second > WINDOW_BITS;
#pragma unroll 1
            for (u32 k = 0; k < PAIR; k++) {
                if (is_long) {
                    decode_long_unit(a, ea);
                    at_a = a.position;
                    if (int(ea[0] | ea[1] | ea[2] | ea[3]) < 0) problems |= STATUS_NO_CODE;
                }
                exchange(a, b), exchange(at_a, at_b), exchange(is_long, other);
#pragma unroll
                for (u32 i = 0; i < 4; i++) exchange(ea[i], eb[i]);
            }
        }
        if (at_a >= 64) at_a -= 32, a.refill();
        if (at_b >= 64) at_b -= 32, b.refill();
#elif !defined SMALL_RARE
        if (of_a.is_rare(at_a)) of_a.settle_rare(a, ea, at_a, problems);
        if (of_b.is_rare(at_b)) of_b.settle_rare(b, eb, at_b, problems);
#else
        // Again, pair by pair; once for each, so that there is less code.
#pragma unroll 1
        for (u32 k = 0; k < PAIR; k++) {
            if (of_a.is_rare(at_a)) {
                decode_long_unit(a, ea);
                at_a = a.position;
                if (int(ea[0] | ea[1] | ea[2] | ea[3]) < 0) problems |= STATUS_NO_CODE;
            }
            exchange(a, b), exchange(at_a, at_b);
#pragma unroll
            for (u32 i = 0; i < 4; i++) exchange(ea[i], eb[i]);
        }
#endif
    }
#endif
    of_a.advance(a, at_a), of_b.advance(b, at_b);
}

template <u32 EIGHTS>
__device__ __forceinline__ void multiply_pairs(const Shared& work, const TileBlock& block,
                                               TileShared& common, FirstPair& tile, u32 warp,
                                               u32 warps, u32 lane) {
    constexpr u32 AHEAD = PAIR_AHEAD, PAIRS = BAND_UNITS / 2;
    lane = __shfl_sync(ALL_LANES, lane, lane);
    u32 problems = 0, fill = 0;
    u32 held = tile.bring(work, block, warp, warps, lane, problems);
    wait_for_launch_before();
    uint4 x[BAND_UNITS][EIGHTS];
    if (held != ~0u) load_pair_x(work, held, lane, x);
    wait_for_copies();
    group_barrier(1, warps * LANES);
    wait_for_cluster();
    const u32 room = block.pair_room(),
              stride = block.runs * work.launch.x_rows * RUN_PITCH * 4;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        const u32 place = warp * TILE_SLOTS + turn % TILE_SLOTS,
                  slot = block.slots + place * block.slot_bytes;
        wait_parity(block.slot_full + place * 8, turn / TILE_SLOTS % 2);
        const uint4 one = load_shared_16(slot), two = load_shared_16(slot + 16),
                    three = load_shared_16(slot + 32);
        if (two.w & TICKET_END) break;
        const bool first = two.w & TICKET_FIRST;
        const u8* plane[PAIR] = {reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16,
                                 reinterpret_cast<const u8*>(u64(three.w) << 32 | three.z) +
                                     lane * 16};
        uint4 ahead[AHEAD][PAIR];
        if (two.w & TICKET_WHOLE)
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++)
#pragma unroll
                for (u32 k = 0; k < PAIR; k++) ahead[i][k] = load_plane(plane[k] + i * PLANE_PAIR);
        if (two.y != fill) fill = two.y, wait_for_table(common, fill, block.table_count, lane);
        if (!(two.w & TICKET_WHOLE)) {
            if (first) wait_for_pair_set(common, one.w, block.set_count, lane);
            const u32 more = (two.w & TICKET_SECOND) != 0;
#pragma unroll 1
            for (u32 k = 0; k <= more; k++)
                problems |= multiply_edge<EIGHTS>(
                    work, {three.x, three.y + k, one.z}, table_of(fill, block.table_count),
                    slot + PAIR_HEAD + k * room, room, two.x + k * stride, first, lane);
            held = ~0u;
#pragma unroll
            for (u32 unit = 0; unit < BAND_UNITS; unit++)
#pragma unroll
                for (u32 i = 0; i < EIGHTS; i++) x[unit][i] = make_uint4(0, 0, 0, 0);
        } else {
            if (one.z != held) held = one.z, load_pair_x(work, held, lane, x);
            Window a, b;
            a.begin(table_of(fill, block.table_count), slot + PAIR_HEAD, room,
                    load_shared(slot + TICKET_BYTES + lane * 8));
            b.begin(table_of(fill, block.table_count), slot + PAIR_HEAD + room, room,
                    load_shared(slot + TICKET_BYTES + (LANES + lane) * 8));
#pragma unroll 1
            for (u32 band = 0; band < TILE_BANDS; band++) {
                PairSums<EIGHTS> sums;
                const bool more = band + 1 < TILE_BANDS;
                if (more && lane < 2 * PLANE_BAND / 128)
                    prefetch_l2((lane < PLANE_BAND / 128 ? plane[0] : plane[1] - PLANE_BAND) +
                                PLANE_BAND + lane * 112);
#pragma unroll
                for (u32 unit = 0; unit < BAND_UNITS; unit += 2) {
                    const u32 pair = unit / 2;
                    uint4 &p = ahead[pair % AHEAD][0], &r = ahead[pair % AHEAD][1];
                    u32 ea[4], eb[4];
                    decode_two(a, b, ea, eb, problems);
                    sums.add(merge_words(ea, p.x, p.y), merge_words(eb, r.x, r.y), x[unit]);
                    decode_two(a, b, ea, eb, problems);
                    const uint4 wa = merge_words(ea, p.z, p.w), wb = merge_words(eb, r.z, r.w);
                    load_plane_where(p, plane[0] + (pair + AHEAD) * PLANE_PAIR,
                                     pair + AHEAD < PAIRS || more);
                    load_plane_where(r, plane[1] + (pair + AHEAD) * PLANE_PAIR,
                                     pair + AHEAD < PAIRS || more);
                    sums.add(wa, wb, x[unit + 1]);
                }
                plane[0] += PLANE_BAND, plane[1] += PLANE_BAND;
                if (first && band == 0)
                    wait_for_pair_set(common, load_shared(slot + 12), block.set_count, lane);
                sums.keep(load_shared(slot + 16), stride, band, first, work.launch.x_rows, lane);
            }
            const uint2 of_a = load_shared_8(slot + TICKET_BYTES + lane * 8),
                        of_b = load_shared_8(slot + TICKET_BYTES + (LANES + lane) * 8);
            problems |= check_end({of_a.x, of_a.y}, a.place(slot + PAIR_HEAD)) |
                        check_end({of_b.x, of_b.y}, b.place(slot + PAIR_HEAD + room));
        }
        const u32 number = load_shared(slot + 12), arrivals = load_shared(slot + 24),
                  set = block.set_full + 8 * place_of(number, block.set_count);
        leave_slot(block.slot_empty + place * 8, lane);
        if (lane < SLOT_LANES)
            for (u32 i = 0; i < arrivals; i++) arrive(set);
    }
    if (problems) atomicOr(work.status(), problems);
}

// Adds the runs' sums of one strip of item after item, in order.
__device__ __forceinline__ void add_pairs(const Shared& work, const TileBlock& block,
                                          TileShared& common) {
    const u32 lane = threadIdx.x, x_rows = work.launch.x_rows, sets = block.set_count,
              rank = blockIdx.x % PAIR;
    u32 number = 0, fills = 0;
    MatrixWalk filled;
    filled.start(work, blockIdx.x - rank);
    u32 matrix = filled.matrix;
    for (u32 i = 1; i < block.table_count; i++)
        fill_table(work, block, common, filled, fills, lane);
    wait_for_launch_before();
    wait_for_cluster();
    for (u32 item = blockIdx.x - rank; item < work.items(); item += gridDim.x) {
        const Range both = work.range(item);
        if (!both.exists) continue;
        if (both.matrix != matrix) {
            // All runs of the matrix before have been added.
            matrix = both.matrix;
            fill_table(work, block, common, filled, fills, lane);
        }
        const Runs runs((both.end + TILE_STEPS - 1) / TILE_STEPS - both.begin / TILE_STEPS);
        const Range at = work.range(item + rank);
        const u32 place = place_of(number, sets), half = runs_before<PAIR>(runs.count, 1);
        const u32 phase = turns_of(number, sets) % 2;
        if (rank == 0 || runs.count > half) wait_parity(block.set_full + 8 * place, phase);
        __syncwarp();
        if (lane < SLOT_LANES) arrive_of_cluster(block.other_full + 8 * place, rank ^ 1);
        wait_of_cluster(block.other_full + 8 * place, phase);
        const u32 pitch = x_rows * RUN_PITCH * 4,
                  mine = block.sets + (place * PAIR + rank) * block.runs * pitch;
        for (u32 first = 0; first < x_rows; first += 4) {
            const u32 x_row = first + lane / 8, row = lane % 8 * 4,
                      read = min(x_row, x_rows - 1);
            float4 sum = {};
            u32 run = 0;
#pragma unroll 1
            for (u32 k = 0; k < PAIR; k++) {
                const u32 end = k ? runs.count : half;
                u32 from = address_of(mine + (read * RUN_PITCH + run_place(read, row)) * 4, k);
#pragma unroll 1
                while (run < end) {
                    float4 v[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (run + i < end) v[i] = load_of_cluster(from + i * pitch);
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (run + i < end)
                            sum.x += v[i].x, sum.y += v[i].y, sum.z += v[i].z, sum.w += v[i].w;
                    run += min(4, end - run), from += 4 * pitch;
                }
            }
            if (x_row >= x_rows || !at.exists) continue;
            const float of[4] = {sum.x, sum.y, sum.z, sum.w};
            if (at.slices == 1)
#pragma unroll
                for (u32 i = 0; i < 4; i++) store_product(work, at, x_row, row + i, of[i]);
            else
                __stcg(reinterpret_cast<float4*>(work.launch.partials +
                                                 u64(at.partial) * partial_floats(x_rows) +
                                                 x_row * STRIP_ROWS + row),
                       sum);
        }
        __syncwarp();
        if (lane < SLOT_LANES)
            arrive_of_cluster(block.set_empty + 8 * place, rank),
                arrive_of_cluster(block.set_empty + 8 * place, rank ^ 1);
        // Until the other block has read what is here.
        wait_of_cluster(block.set_empty + 8 * place, phase);
        number++;
        __syncwarp();
        if (lane == 0) atomicExch(&common.added, number);
        if (at.exists) add_slices<1>(work, at);
    }
}

template <u32 ROWS>
__device__ __forceinline__ void linear_pair(const Shared& work) {
    constexpr u32 EIGHTS = (ROWS + 7) / 8;
    const u32 lane = threadIdx.x % LANES,
#ifdef UNIFORM
              warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0),
#else
              warp = threadIdx.x / LANES,
#endif
             
              warps = blockDim.x / LANES - TILE_HELPERS;
    __shared__ TileShared common;
    const bool decodes = warp >= TILE_HELPERS;
    FirstPair first;
    if (decodes) first.ask(work, warp - TILE_HELPERS, warps, lane);
    TileBlock block;
    block.runs = pair_runs(work.columns());
    block.set_full = shared_address(common.set_full),
    block.other_full = shared_address(common.other_full),
    block.set_empty = shared_address(common.set_empty),
    block.slot_full = shared_address(common.slot_full),
    block.slot_empty = shared_address(common.slot_empty);
    make_pair_barriers(common, block.runs, warp, lane);
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    __syncthreads();
    let_next_launch_begin();
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    const u32 tables = work.launch.tile_tables, sets = work.launch.tile_sets,
              fixed = pair_fixed_bytes(work.launch.x_rows, block.runs, tables, sets);
    block.table = shared_address(linear_shared), block.table_count = tables,
    block.sets = block.table + tables * u32(sizeof(TileTable)), block.set_count = sets,
    block.slots = block.table + fixed,
    // Two tiles of as many bits.
    block.slot_bytes = ((room - fixed) / (warps * TILE_SLOTS) - PAIR_HEAD) / 32 * 32 + PAIR_HEAD;
    if (!decodes) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(PAIR_DEC) ";");
        if (warp == 0)
            add_pairs(work, block, common);
        else {
            bring_pairs(work, block, warp - 1, warps, lane);
            wait_for_cluster();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(PAIR_INC) ";");
        multiply_pairs<EIGHTS>(work, block, common, first, warp - TILE_HELPERS, warps, lane);
    }
    // Until no block reads here any more.
    meet_cluster();
}
#endif
