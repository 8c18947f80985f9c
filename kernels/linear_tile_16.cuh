// Multiplies up to 16 rows of x by matrices in tiles as stored (spec/format.md 6.4): reads 10.6
// bits per weight, and decodes nothing to memory. For compute capability 8.0 and newer; on 9.0 the
// launch may begin while the previous one ends, and warps exchange registers.
//
//   item      as in the fast layout: a strip, or a slice of the columns of one of the last strips
//   run       neighbouring tiles of an item, at most 16 runs per item: a warp decodes a run and
//             adds its sums in shared memory; the bits of y depend on runs, not on which warp had
//             which
//   unit      eight weights of each lane: B of two mma.m16n8k16, whose k has any order; x is A
//   block     persistent, one per multiprocessor:
//             warp 0         adds the sums of the runs of item after item, in order; stores y; does
//                            so for the last item together with the next three warps
//             warps 1 to 3   bring tiles: the record, where each lane's bits begin, and the bits,
//                            by a bulk copy of one lane on 9.0, elsewhere by cp.async, to a slot
//                            of the warp that decodes the tile
//             the others     decode slot after slot
//
//      item 0  | run 0  | run 1  | ...  | run 15 |    each of 16 decoding warps has a column of
//      item 1  | run 0  | run 1  | ...  | run 15 |    tiles of 4096 columns, and keeps its x
//
//      shared memory   | tables | sums of two items | warp 4: slot, slot | warp 5: slot, slot | ...
//                      | tables | sums of one or two | x: warp 4, warp 5, ... | slots |   9-16 rows
//      slot            | ticket | 32 lanes: where their bits begin and end | bits |
//
//   tables    of the block's matrices in turn, in as many places as the launch says; warp 0 fills a
//             place again when all sums by its table have been added
//   plane     from global memory to registers one or two pairs of units ahead; to L2 a band ahead
//   x         on 9.0, one or two rows are in shared memory, for all warps, if there is room.
//             Otherwise a warp has x of one tile in registers until it gets a tile of other
//             columns. With 9 to 16 rows on 9.0, x of three of the tile's eight units of columns is
//             in shared memory instead. Each unit waits only for its own x
//   sums      of an item meet when all its runs have been decoded. Two items are in flight, or one,
//             as the launch says: one if blocks have one item, or if the largest tile needs the
//             room. A run waits for an earlier item only after its first band
//   edges     partial tiles, tiles with more bits than a slot takes, and x that is not aligned go
//             unit by unit, with the same bits of y
//
// Budget (kernels/ptx/linear.sm_90a.cubin): 20 warps, which begin with 96 registers; the 16 that
// decode take 104, the others 64. Words that are needed between tiles or bands are spilled: 40
// bytes, with 16 rows of x 32; each costs a load of local memory, which L1 seldom has. With x in
// shared memory, 24 warps of 80 registers, of which 20 decode (116 bytes, most of them at edges).
// Shared memory for tiles of at most 2704 bytes of bits: 143 KiB with 8 rows of x, 223 KiB with 16,
// or 191 KiB with sums of one item, which suffices for tiles of 3840 bytes; 16 KiB more for each
// further table; 146 KiB with one row of 4096 columns. PTX for compute capability 8.0: 12 warps
// that decode, 128 registers.
//
// Microseconds, sum of 6144 x 4096, 4096 x 4096, 28672 x 4096, 4096 x 14336
// (benches/record/2026-11-23-linear-tile.md):
//   rows of x         1       8       16
//   H200              126.3   127.4   153.6
//   H100              138.2   138.2   165.4
// Limits. Latency: a lone warp on each scheduler takes 353 clocks per unit, for a chain of four
// look-ups and the work between tiles. Tensor cores lower the GPU's clock from 1.97 to 1.81 GHz.
// With 16 rows, also x of each tile, 8 KiB, which all multiprocessors request from L2. The records
// tell what was tried and rejected.
//
// Safety on any content: tiles come from the launch; the bitstream and the slot bound copies, the
// slot bounds windows, the tile's bytes bound an edge's words, the table bounds look-ups. A tile
// decodes as many weights as it has, whatever its bits. Contradictions set bits of the status word,
// as in the decoder.
#pragma once
#include "linear_tile_helpers.cuh"

namespace df11::linear {
// Addresses of a lane's columns of a tile of x, in one row of each eight.
template <u32 EIGHTS>
struct XColumns {
    u64 from[EIGHTS];
    u32 row, rows;  // the lane's first row; the rows of x
    __device__ __forceinline__ XColumns(const SharedTiles& work, u32 tile, u32 lane)
        : row(lane / 4), rows(work.launch.x_rows) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            from[i] = reinterpret_cast<u64>(work.launch.x + (row + 8 * i) * work.launch.x_pitch +
                                            tile * TILE_COLUMNS + lane % 4 * 8);
    }
    __device__ __forceinline__ bool exists(u32 eight) const { return row + 8 * eight < rows; }
    __device__ __forceinline__ u64 of(u32 unit, u32 eight) const {
        return from[eight] + unit * STEP_COLUMNS * 2;
    }
};

// x of a decoding warp: one or two A fragments for each unit of a tile. Those of the first units
// are in registers, the others in shared memory, each lane's words its own. They stay until the
// warp gets a tile of other columns. Each unit waits only for its own x.
template <u32 EIGHTS>
struct HeldX {
    static constexpr u32 HELD = units_held(EIGHTS);
    static constexpr bool IS_SHARED = false;
    // Whether x precedes the bits of the first tile: with 16 rows all multiprocessors together
    // request 17 MB from L2.
    static constexpr bool COMES_FIRST = HELD < BAND_UNITS;
    u32 held, rest;  // the tile; the lane's place for the units that registers do not hold
    bool raw;        // x has been requested, and is still as it lies
    uint4 x[HELD][EIGHTS] = {};

    // Place of the lane's eight rows of a unit that registers do not hold.
    __device__ __forceinline__ u32 rest_place(u32 unit, u32 eight) const {
        return rest + ((unit - HELD) * EIGHTS + eight) * LANES * 16;
    }
    __device__ __forceinline__ void place(const TileBlock& block, u32 warp, u32 lane) {
        rest = block.xs + warp * x_bytes_of_warp(EIGHTS) + lane * 16, held = ~0u, raw = false;
    }
    // Requests what registers hold; nothing for tile ~0.
    __device__ __forceinline__ void ask(const SharedTiles& work, u32 tile, u32, u32, u32 lane) {
        held = tile, raw = EIGHTS > 1;
        if (held == ~0u) return;
        const XColumns<EIGHTS> columns(work, held, lane);
#pragma unroll
        for (u32 unit = 0; unit < HELD; unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) {
                x[unit][i] = make_uint4(0, 0, 0, 0);
                load_x_where(x[unit][i], columns.of(unit, i), columns.exists(i));
            }
    }
    // Requests the rest, after the bits, because it is needed later.
    __device__ __forceinline__ void ask_rest(const SharedTiles& work, u32 lane) {
        if (held == ~0u) return;
        const XColumns<EIGHTS> columns(work, held, lane);
#pragma unroll
        for (u32 unit = HELD; unit < BAND_UNITS; unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                if (columns.exists(i))
                    copy_async(rest_place(unit, i),
                               reinterpret_cast<const u8*>(columns.of(unit, i)));
    }
    __device__ __forceinline__ void move_to(const SharedTiles& work, u32 tile, u32 lane) {
        if (tile == held) return;
        ask(work, tile, 0, 0, lane);
        ask_rest(work, lane);
    }
    __device__ __forceinline__ void forget() {
        if (HELD < BAND_UNITS) wait_for_copies();
        held = ~0u, raw = false;
#pragma unroll
        for (u32 unit = 0; unit < HELD; unit++)
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) x[unit][i] = make_uint4(0, 0, 0, 0);
    }
    // Call it in the order of the units, from the first band on.
    __device__ __forceinline__ void take(uint4 (&to)[EIGHTS], u32 unit, u32 lane) {
        if (unit < HELD) {
            if (raw) make_fragments(x[unit], lane);
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) to[i] = x[unit][i];
        } else {
            if (raw && unit == HELD) commit_copies(), wait_for_copies();
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++) to[i] = load_shared_16(rest_place(unit, i));
            if (raw) {
                make_fragments(to, lane);
#pragma unroll
                for (u32 i = 0; i < EIGHTS; i++) store_shared_16(rest_place(unit, i), to[i]);
            }
        }
        if (unit + 1 == BAND_UNITS) raw = false;
    }
};
// x of all warps: in shared memory as it lies, with pitch shared_x_pitch.
struct SharedX {
    static constexpr bool IS_SHARED = true, COMES_FIRST = false;
    u32 row, at;  // shared addresses of the lane's columns of the first and of the current tile
    bool exists;  // whether the lane's row of x exists

    __device__ __forceinline__ void place(const TileBlock& block, u32, u32) { row = block.xs; }
    __device__ __forceinline__ void ask_rest(const SharedTiles&, u32) {}
    __device__ __forceinline__ void ask(const SharedTiles& work, u32, u32 warp, u32 warps,
                                        u32 lane) {
        const u32 first = row;
        row += lane / 4 * shared_x_pitch(work.launch.columns) + lane % 4 * 16;
        exists = lane / 4 < work.launch.x_rows;
        const Tile16Launch& l = work.launch;
        if (!has_aligned_x(work.launch)) return;
        for (u32 r = 0; r < l.x_rows; r++)
            for (u32 i = (warp * LANES + lane) * 8; i < l.columns; i += warps * LANES * 8)
                copy_async(first + r * shared_x_pitch(l.columns) + i * 2,
                           reinterpret_cast<const u8*>(l.x + r * l.x_pitch + i));
        commit_copies();
    }
    __device__ __forceinline__ void move_to(const SharedTiles&, u32 tile, u32) {
        at = row + tile * (TILE_COLUMNS * 2);
    }
    __device__ __forceinline__ void forget() {}
    // If the row does not exist, `to` stays, and nothing of it is used.
    __device__ __forceinline__ void take(uint4 (&to)[1], u32 unit, u32) const {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(to[0].x), "+r"(to[0].y), "+r"(to[0].z), "+r"(to[0].w)
            : "r"(at + unit * (STEP_COLUMNS * 2)), "r"(u32(exists)));
    }
};

template <u32 EIGHTS, class X>
__device__ __forceinline__ void multiply_tiles(const SharedTiles& work, const TileBlock& block,
                                               TileShared& common, FirstTile& tile, u32 warp,
                                               u32 warps, u32 lane) {
    constexpr u32 AHEAD = plane_ahead(EIGHTS), PAIRS = BAND_UNITS / 2;
    // Keeps `lane` in a register: the assembler would read it again in each band.
    lane = __shfl_sync(ALL_LANES, lane, lane);
    u32 problems = 0, fill = 0;
    X x;
    x.place(block, warp, lane);
    if (tile.first != ~0u)
        ask_for_table(work.launch.matrices[tile.first].table, block.table, warp * LANES + lane,
                      warps * LANES);
    const u32 whole = tile.whole(work);
    // Requests first what takes longer.
    if (X::COMES_FIRST) {
        wait_for_launch_before();
        x.ask(work, whole, warp, warps, lane);
    }
    tile.bring(work, block, warp, lane, problems);
    if (!X::COMES_FIRST) {
        wait_for_launch_before();
        x.ask(work, whole, warp, warps, lane);
    }
    x.ask_rest(work, lane);
    // Waits for the table, which was requested first.
    if (X::COMES_FIRST)
        commit_copies(), wait_for_all_but<1>();
    else
        wait_for_copies();
    group_barrier(1, warps * LANES);
    asm volatile("" ::: "memory");
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        const u32 place = warp * TILE_SLOTS + turn % TILE_SLOTS, slot = block.slot(place);
        wait_for(block.slot_full + place * 8, turn / TILE_SLOTS % 2);
        const uint4 one = load_shared_16(slot), two = load_shared_16(slot + 16);
        if (two.w & TICKET_END) break;
        const bool first = two.w & TICKET_FIRST;
        // The lane's plane, and the pairs of units in flight.
        const u8* plane = reinterpret_cast<const u8*>(u64(one.y) << 32 | one.x) + lane * 16;
        uint4 ahead[AHEAD];
        if (two.w & TICKET_WHOLE)
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) ahead[i] = load_plane(plane + i * PLANE_PAIR);
        if (two.y != fill) fill = two.y, wait_for_table(common, fill, block.table_count, lane);
        if (!(two.w & TICKET_WHOLE)) {
            if (first) wait_for_set(common, one.w, block.set_count, lane);
            const uint4 three = load_shared_16(slot + 32);
            problems |= multiply_edge<EIGHTS>(work, {three.x, three.y, one.z},
                                              table_of(fill, block.table_count), slot + SLOT_HEAD,
                                              block.bits_bytes(), two.x, first, lane);
            x.forget();  // not kept across the call
        } else {
            x.move_to(work, one.z, lane);
            uint4 of_unit[EIGHTS] = {};
            Window bits;
            bits.begin(table_of(fill, block.table_count), slot + SLOT_HEAD, block.bits_bytes(),
                       load_shared(slot + TICKET_BYTES + lane * 8));
#pragma unroll 1
            for (u32 band = 0; band < BANDS; band++) {
                Sums<EIGHTS> sums;
                const bool more = band + 1 < BANDS;
                if (more && lane < PLANE_BAND / 128) prefetch_l2(plane + PLANE_BAND + lane * 112);
#pragma unroll
                for (u32 unit = 0; unit < BAND_UNITS; unit += 2) {
                    const u32 pair = unit / 2;
                    uint4& p = ahead[pair % AHEAD];
                    u32 e[4];
                    decode_unit(bits, e, problems);
                    // Not earlier: x would take registers while the unit is decoded.
                    x.take(of_unit, unit, lane);
                    sums.add(merge_words(e, p.x, p.y), of_unit);
                    decode_unit(bits, e, problems);
                    x.take(of_unit, unit + 1, lane);
                    const uint4 w = merge_words(e, p.z, p.w);
                    // Loads plane bytes of the next band, if there is one.
                    load_plane_where(p, plane + (pair + AHEAD) * PLANE_PAIR,
                                     pair + AHEAD < PAIRS || more);
                    sums.add(w, of_unit);
                }
                plane += PLANE_BAND;
                // Waits late, so that other warps may be behind this one.
                if (first && band == 0)
                    wait_for_set(common, load_shared(slot + 12), block.set_count, lane);
                keep_sums<EIGHTS>(two.x, sums_place(lane), sums, band, first, work.launch.x_rows,
                                  lane);
            }
            const uint2 ends = load_shared_8(slot + TICKET_BYTES + lane * 8);
            problems |= check_end({ends.x, ends.y}, bits.place(slot + SLOT_HEAD));
        }
        const u32 number = load_shared(slot + 12), arrivals = load_shared(slot + 24),
                  set = block.set_full + 8 * place_of(number, block.set_count);
        release(block.slot_empty + place * 8, lane);
        for (u32 i = 0; i < arrivals; i++) arrive(set);
    }
    if (problems) atomicOr(work.launch.status, problems);
}

// EIGHTS: most rows of x, in eights. X: x of all warps or of each.
template <u32 EIGHTS, class X>
__device__ __forceinline__ void linear_tile(const SharedTiles& work) {
    // The warp comes from lane 0, so that the assembler knows that all lanes have the same: values
    // that depend on it need no registers of each lane.
    const u32 lane = threadIdx.x % LANES, warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0),
              warps = blockDim.x / LANES - TILE_HELPERS;
    __shared__ TileShared common;
    const bool decodes = warp >= TILE_HELPERS;
    FirstTile first;
    if (decodes) first.ask(work, warp - TILE_HELPERS, lane);
    TileBlock block;
    block.set_full = shared_address(common.set_full),
    block.slot_full = shared_address(common.slot_full),
    block.slot_empty = shared_address(common.slot_empty);
    make_barriers(common, warp, lane);
    __syncthreads();
    const u32 tables = MAX_TABLES == 1 ? 1 : work.launch.tables, sets = work.launch.sets,
              xs = tile_fixed_bytes(work.launch.x_rows, tables, sets),
              fixed = xs + (X::IS_SHARED ? work.launch.x_rows * shared_x_pitch(work.launch.columns)
                                         : warps * x_bytes_of_warp(EIGHTS));
    block.table = shared_address(linear_shared), block.table_count = tables,
    block.sets = block.table + tables * u32(sizeof(TileTable)), block.set_count = sets,
    block.xs = block.table + xs, block.slots = block.table + fixed,
    block.slot_bytes = work.launch.slot_bytes;
    // All warps together take as many registers as the block begins with, which build.py checks.
    constexpr bool exchanges = HOPPER && !X::IS_SHARED;
    if (!decodes) {
        if constexpr (exchanges) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        const u32 items = warp == 0 ? add_runs(work, block, common)
                                    : bring_tiles(work, block, warp - 1, warps, lane);
        if (items) add_last(work, common, items - 1);
    } else {
        if constexpr (exchanges) asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        multiply_tiles<EIGHTS, X>(work, block, common, first, warp - TILE_HELPERS, warps, lane);
    }
}
}  // namespace df11::linear
