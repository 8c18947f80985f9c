// Multiplies 17 to 64 rows of x by matrices in tiles as stored, on compute capability 9.0. Tiles
// are decoded to shared memory, band by band, and multiplied there by wgmma, so that each weight is
// decoded once for all rows of x.
//
//   group     eight strips of a matrix, 256 rows
//   round     two neighbouring tiles of each strip of a group: one tile for each decoding warp
//   item      consecutive rounds, by shape alone; a block takes item after item
//   atom      eight rows of a strip (a band) by 64 columns, as wgmma reads them
//   stage     of a set of eight warps, which have the same columns: one atom per warp, or two with
//             up to 32 rows of x; each set has a ring of stages
//   block     persistent, one per multiprocessor:
//             warps 0 to 3   multiply stage after stage: sums of 256 rows by all rows of x
//             warps 4 to 6   bring tiles, as in linear_tile_16.cuh
//             warp 7         brings x
//             warps 8 to 15  decode the first tile of a round in strips 0 to 7 of the group
//             the others     decode the second
//
//      shared memory   | table | ring of set 0 | ring of set 1 | x of 512 columns | slots |
//
//   sums      of a group whose rounds are in several items meet in memory; blocks with nothing else
//             to do wait for the others, for some time, and add a piece each, in order
//   rows      of a band have another order in an atom, so that lanes never conflict in a bank
//   table     of the matrix in use; for another matrix all decoding warps fill it again
//   edges     partial tiles and tiles with more bits than a slot takes are decoded slowly
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills): 24 warps, which begin with 80 registers.
// Those that multiply take 168 (104 up to 32 rows), those that decode 64 (80), the others 56.
// Shared memory for tiles of at most 2704 bytes of bits: 224 KiB with 64 rows of x, 208 KiB with
// 32. Sum of 6144 x 4096, 4096 x 4096, 28672 x 4096, 4096 x 14336 in microseconds, nvcc 13.5
// (benches/record/2026-11-23-linear-tile.md; decoding to memory: the record of 2026-11-22):
//   rows of x                          32     64
//   H100                              179    212
//   H100, decode to memory, cuBLASLt         464
//   H200                              177    209
//   H200, decode to memory, cuBLASLt  364    362
// Limits. With 64 rows on an H100, the meeting of sums took 27 us of then 218. Decoding takes about
// 30 wavefronts of shared memory per unit, of 34 clocks: look-ups 14, an atom's way in and out 8, x
// 4. The record tells what was tried and rejected.
//
// Safety on any content: as in linear_tile_16.cuh.
#pragma once
#include "linear_tile_sums.cuh"

namespace df11::linear {
// Whether the barrier's phase of this parity is complete; the same for all lanes.
__device__ inline bool is_full(u32 barrier, u32 parity) {
    return __all_sync(ALL_LANES, test_parity(barrier, parity));
}

// Row `g` of a band is row `staged_row(g)` of a stage.
__device__ inline u32 staged_row(u32 g) { return g % 2 * 4 + g / 2; }

// A warp's place in the ring of its set.
template <u32 ATOMS>
struct StageWriter {
    u32 full, empty;   // barriers of the ring's first place
    u32 first, count;  // address of the lane's first 16 bytes in that place; number of places
    RingPlace at;
    // Whether the stage is already empty.
    __device__ u32 is_empty() const { return test_parity(empty + at.place * 8, at.phase ^ 1); }
    // Waits, before the tile's atom number `atom`, until its stage is empty. Returns the address of
    // the lane's 16 bytes; those of the next unit are 64 bytes before or after.
    __device__ u32 begin(u32 atom, u32 is_empty = 0) const {
        if (atom % ATOMS == 0 && !is_empty) wait_for(empty + at.place * 8, at.phase ^ 1);
        return first + (at.place * ATOMS + atom % ATOMS) * SET_ATOMS;
    }
    // Ends an atom.
    __device__ void finish(u32 atom, u32 lane) {
        if (atom % ATOMS + 1 < ATOMS) return;
        __syncwarp();
        if (lane == 0) arrive(full + at.place * 8);
        at.next(count);
    }
};

// Decodes an EdgeTile. Returns problems.
template <u32 ATOMS>
__device__ __noinline__ u32 decode_edge(const Shared<Tile64Launch> work, TilePlace at, u32 bits,
                                        u32 bits_bytes, StageWriter<ATOMS> stage, u32 lane) {
    const u32 g = lane / 4, q = lane % 4;
    u32 problems = 0;
    EdgeTile tile(work, at, bits, bits_bytes, lane, problems);
#pragma unroll 1
    for (u32 unit = 0; unit < BANDS * BAND_UNITS; unit++) {
        const u32 band = unit / BAND_UNITS, first = unit % BAND_UNITS * STEP_COLUMNS + 8 * q,
                  rows = tile.rows(band);
        uint4 w = make_uint4(0, 0, 0, 0);
        if (g < rows && first < tile.width) {
            const uint2 p =
                load_unit_plane(tile.plane, tile.width, rows, band, unit % BAND_UNITS, lane);
            u32 e[4];
            tile.decode_unit(0, e, problems);
            w = merge_words(e, p.x, p.y);
        }
        __syncwarp();
        const u32 atom = unit / 2;
        store_shared_16(stage.begin(atom, unit % 2) ^ unit % 2 * 64, w);
        if (unit % 2) stage.finish(atom, lane);
    }
    return problems | tile.check();
}

template <u32 AHEAD, u32 ATOMS>
__device__ __forceinline__ void decode_tiles(const Shared<Tile64Launch>& work,
                                             const TileBlock& block, StageWriter<ATOMS> stage,
                                             u32 warp, u32 lane) {
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
    // Plane bytes in flight, and whether the next tile's are.
    uint4 ahead[AHEAD];
    bool begun = false;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        const u32 place = warp * TILE_SLOTS + turn % TILE_SLOTS, slot = block.slot(place);
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
            // Nothing uses these rows' sums.
            for (u32 i = 0; i < BANDS * TILE_ATOMS; i++) stage.begin(i), stage.finish(i, lane);
        } else if (flags & TICKET_WHOLE) {
            const u8* plane = reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16;
            if (!begun)
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) ahead[i] = load_plane(plane + i * PLANE_PAIR);
            begun = false;
            Window bits;
            bits.begin(0, slot + SLOT_HEAD, block.bits_bytes(),
                       load_shared(slot + TICKET_BYTES + lane * 8));
#pragma unroll 1
            for (u32 band = 0; band < BANDS; band++) {
                const bool more = band + 1 < BANDS;
                if (more && lane < PLANE_BAND / 128) prefetch_l2(plane + PLANE_BAND + lane * 112);
                // The address at which the plane continues after the band, if known.
                const u8* then = plane + PLANE_BAND;
                bool goes_on = more;
                if (!more) {
                    const u32 after = warp * TILE_SLOTS + (turn + 1) % TILE_SLOTS,
                              at = block.slot(after);
                    if (is_full(block.slot_full + after * 8, (turn + 1) / TILE_SLOTS % 2) &&
                        (load_shared(at + 28) & TICKET_WHOLE)) {
                        const uint2 plane_after = load_shared_8(at);
                        then =
                            reinterpret_cast<const u8*>(u64(plane_after.y) << 32 | plane_after.x) +
                            lane * 16;
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
            for (u32 i = 0; i < BANDS * TILE_ATOMS / ATOMS; i++) stage.at.next(stage.count);
        }
        release(block.slot_empty + place * 8, lane);
    }
    if (problems) atomicOr(work.launch.status, problems);
}

template <u32 N>
__device__ __forceinline__ void multiply_rounds(const Tile64Launch& launch,
                                                const Tile64Block& block, Tile64Shared& common,
                                                u32 lane) {
    constexpr u32 ATOMS = stage_atoms(N);
    GroupSums<N> sums;
    RingPlace ring[SETS];
    // done, x_done: barriers of what the last products, except those in flight, have read.
    u32 turns[SETS] = {}, done = 0, x_done = 0;
    wait_for_launch_before();
    for (BlockRounds at(launch); at.exists;) {
        sums.clear();
        const u32 group = at.group, item = at.item;
        Rounds here;
        do {
            here = at;
            const u32 tile = at.pair * ROUND_TILES,
                      sets = (tile + 1) * TILE_COLUMNS < launch.columns ? 2 : 1;
#pragma unroll
            for (u32 band = 0; band < BANDS; band++) {
#pragma unroll 1
                for (u32 i = 0; i < TILE_ATOMS; i += ATOMS)
#pragma unroll
                    for (u32 set = 0; set < SETS; set++) {
                        if (set >= sets) continue;
                        const u32 place = ring[set].place,
                                  barrier = (set * TILE64_STAGES + place) * 8,
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
                            multiply_stored(sums.of[band], w + k / 4 * (SET_ATOMS / 16) + k % 4 * 2,
                                            x + k / 4 * (N * 128 / 16) + k % 4 * 2);
                        commit_products();
                        wait_for_products<1>();
                        release(done, lane);
#pragma unroll
                        for (u32 atom = 0; atom < ATOMS; atom++)
                            release(x_done + (x_done ? atom * 8 : 0), lane);
                        done = block.stage_empty + barrier;
                        x_done = band + 1 == BANDS ? block.x_empty + x_barrier : 0;
                        ring[set].next(block.count);
                    }
            }
#pragma unroll
            for (u32 set = 0; set < SETS; set++) turns[set] += set < sets;
            at.advance(launch);
        } while (at.exists && at.item == item && at.group == group);
        sums.settle();
        release(done, lane);
        for (u32 atom = 0; atom < ATOMS; atom++) release(x_done + (x_done ? atom * 8 : 0), lane);
        done = x_done = 0;
        finish_group(sums, launch, here, common, !at.exists);
    }
}

// All warps call it together; one after the other they would take 2 us.
__device__ __forceinline__ void make_barriers(Tile64Shared& common, u32 warp, u32 lane) {
    constexpr u32 OF_WARP = 2, OF_SLOTS = DECODERS * TILE_SLOTS, OF_STAGES = SETS * TILE64_STAGES,
                  OF_X = SETS * TILE_ATOMS;
    static_assert(OF_SLOTS + OF_STAGES + OF_X <= TILE64_THREADS / LANES * OF_WARP, "all");
    auto make = [](u64* full, u32 arrivals, u64* empty, u32 back, u32 i) {
        init_barrier(shared_address(full + i), arrivals);
        init_barrier(shared_address(empty + i), back);
    };
    const u32 i = warp * OF_WARP + lane;
    if (lane < OF_WARP) {
        if (i < OF_SLOTS)
            make(common.slot_full[0], SLOT_ARRIVALS, common.slot_empty[0], SLOT_LANES, i);
        else if (i < OF_SLOTS + OF_STAGES)
            make(common.stage_full[0], SET_WARPS, common.stage_empty[0],
                 MULTIPLIERS * WARP_ARRIVALS, i - OF_SLOTS);
        else if (i < OF_SLOTS + OF_STAGES + OF_X)
            make(common.x_full[0], X_ARRIVALS, common.x_empty[0], MULTIPLIERS * WARP_ARRIVALS,
                 i - OF_SLOTS - OF_STAGES);
    }
    show_barriers();
}

template <u32 N>
__device__ __forceinline__ void linear_tile_64(const Tile64Launch& launch) {
    const u32 lane = kept(threadIdx.x % LANES),
              warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    __shared__ Tile64Shared common;
    make_barriers(common, warp, lane);
    __syncthreads();
    const u32 room = dynamic_shared_bytes();
    TileBlock tiles = {};
    Tile64Block block;
    tiles.table = shared_address(linear_shared);
    block.count = launch.stages;
    block.stages = (tiles.table + u32(sizeof(TileTable)) + 1023) / 1024 * 1024;
    block.bytes = tile64_stage(N);
    block.xs = block.stages + SETS * block.count * block.bytes;
    tiles.slots = block.xs + SETS * TILE_ATOMS * N * 128;
    tiles.slot_bytes = (tiles.table + room - tiles.slots) / (DECODERS * TILE_SLOTS * 16) * 16;
    tiles.slot_full = shared_address(common.slot_full);
    tiles.slot_empty = shared_address(common.slot_empty);
    block.stage_full = shared_address(common.stage_full);
    block.stage_empty = shared_address(common.stage_empty);
    block.x_full = shared_address(common.x_full), block.x_empty = shared_address(common.x_empty);
    const Shared work = {launch};
    // All warps together take as many registers as the block begins with, which build.py checks.
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
        stage.full = block.stage_full + set * TILE64_STAGES * 8;
        stage.empty = block.stage_empty + set * TILE64_STAGES * 8;
        stage.first =
            block.stage(set, 0) + mine % SET_WARPS * ATOM_BYTES + row * 128 + (lane % 4 ^ row) * 16;
        stage.count = block.count;
        decode_tiles<N == 64 ? 1 : 2>(work, tiles, stage, mine, lane);
    }
}
}  // namespace df11::linear
