// Tiles come to the warps that decode them (linear_tile.cuh).
#pragma once
#include "linear_tile_block.cuh"
#include "linear_tile_unit.cuh"

namespace df11::linear {
// What a warp that decodes needs of a tile.
struct alignas(16) Ticket {
    const u8* plane;
    u32 tile;    // of the strip
    u32 number;  // of the item
    u32 sums;    // shared address of the run's
    u32 fill, arrivals, flags;
    u32 matrix, strip, reserved[2];
};
static_assert(sizeof(Ticket) == TICKET_BYTES, "three words of 16 bytes");
constexpr u32 TICKET_WHOLE = 1, TICKET_FIRST = 2, TICKET_END = 4;

// Of the tile at which the walk is; whether it is whole is not known before its bits.
__device__ __forceinline__ Ticket ticket_of(const Shared& work, const TileBlock& block,
                                            const TileWalk& walk, bool aligned) {
    Ticket t = {};
    t.plane = walk.plane + walk.at.tile * TILE_WIDTH * walk.rows;
    t.tile = walk.at.tile, t.number = walk.number, t.fill = walk.fill;
    t.sums = block.sums(walk, work.launch.x_rows), t.arrivals = walk.arrivals();
    t.matrix = walk.at.matrix, t.strip = walk.at.strip;
    if (aligned && walk.rows == STRIP_ROWS && columns_left(work, walk.at) == TILE_WIDTH)
        t.flags = TICKET_WHOLE;
    if (walk.turn == 0) t.flags |= TICKET_FIRST;
    return t;
}

// Brings a tile into a slot.
__device__ __forceinline__ void bring_tile(const Shared& work, const TileBlock& block,
                                           const Ticket& ticket, const Record& record, u32 slot,
                                           u32 full, u32 lane, u32& problems) {
    const LinearMatrix& m = work.launch.matrices[ticket.matrix];
    if ((ticket.flags & TICKET_WHOLE) && lane < PLANE_BAND / 128)
        prefetch_l2(ticket.plane + lane * 128);
    const TileBits bits = find_bits(record, m.rest_count, lane, problems);
    const bool fits = bits.bytes + BITS_AFTER <= block.bits_bytes();
    const u32 flags = fits ? ticket.flags : ticket.flags & ~TICKET_WHOLE;
    const u32 bytes = fits ? (bits.bytes + 15) / 16 * 16 : 0;
    copy_bits(slot + SLOT_HEAD, static_cast<const u8*>(m.rest) + bits.byte, bytes, full, lane);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(slot + TICKET_BYTES + lane * 8),
                 "r"(bits.lane.position), "r"(bits.lane.end)
                 : "memory");
    if (lane == 0) {
        const u64 at = reinterpret_cast<u64>(ticket.plane);
        store_shared_16(slot, make_uint4(u32(at), u32(at >> 32), ticket.tile, ticket.number));
        store_shared_16(slot + 16, make_uint4(ticket.sums, ticket.fill, ticket.arrivals, flags));
        store_shared_16(slot + 32, make_uint4(ticket.matrix, ticket.strip, 0, 0));
    }
    show_slot(full, bytes, lane);
}

// How many tiles each warp has been brought, modulo four: a bit of each warp.
struct Brought {
    u32 low = 0, high = 0;
    // The slot of the next one, and of which parity the phase is in which it has been emptied.
    __device__ u32 slot(u32 warp) const { return low >> warp & 1; }
    __device__ u32 parity(u32 warp) const { return ~(high >> warp) & 1; }
    __device__ void count(u32 warp) { high ^= low & (1u << warp), low ^= 1u << warp; }
};
static_assert(TILE_SLOTS == 2, "a bit tells the slot");

// Brings all tiles except the first of each warp. One of TILE_BRINGERS warps. How many items the
// block has.
__device__ __forceinline__ u32 bring_tiles(const Shared& work, const TileBlock& block, u32 bringer,
                                           u32 warps, u32 lane) {
    const bool aligned = work.aligned();
    // Bits of warps: this one's, and those that have their first tile.
    const u32 of_bringer = 0x49249249u << bringer;
    static_assert(TILE_BRINGERS == 3, "every third bit");
    u32 problems = 0, begun = 0;
    Brought brought;
    TileWalk walk;
    walk.start(work);
    // A tile is brought when the record of the one after has been asked for.
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
            wait_parity(block.slot_empty + place * 8, emptied);
            bring_tile(work, block, ticket, record, block.slots + place * block.slot_bytes,
                       block.slot_full + place * 8, lane, problems);
        }
        if (!walk.exists) break;
        ticket = ticket_of(work, block, walk, aligned), record = after;
        place = at, emptied = parity;
    }
    for (u32 warp = bringer; warp < warps; warp += TILE_BRINGERS) {
        const u32 at = warp * TILE_SLOTS + brought.slot(warp);
        wait_parity(block.slot_empty + at * 8, brought.parity(warp));
        if (lane == 0)
            store_shared_16(block.slots + at * block.slot_bytes + 16,
                            make_uint4(0, 0, 0, TICKET_END));
        copy_bits(0, nullptr, 0, block.slot_full + at * 8, lane);
        show_slot(block.slot_full + at * 8, 0, lane);
    }
    if (problems) atomicOr(work.status(), problems);
    return walk.number;
}

// A warp's first tile, for which it asks itself. Its record is on its way while barriers are made.
struct FirstTile {
    TileWalk walk;
    Record record;
    u32 first;  // the block's first matrix, or none
    __device__ __forceinline__ void ask(const Shared& work, u32 warp, u32 lane) {
        walk.start(work);
        first = walk.exists ? walk.at.matrix : ~0u;
        walk.skip_to(work, warp);
        if (walk.exists) record = load_record(walk.records + walk.at.tile, lane);
    }
    __device__ __forceinline__ void ask_for_first_table(const Shared& work, const TileBlock& block,
                                                        u32 warp, u32 warps, u32 lane) const {
        if (first != ~0u)
            ask_for_table(work.launch.matrices[first].table, block.table, warp * LANES + lane,
                          warps * LANES);
    }
    // Its number in the strip if its x can be held, else none.
    __device__ __forceinline__ u32 whole(const Shared& work) const {
        const bool is_whole = walk.exists && work.aligned() &&
                              columns_left(work, walk.at) == TILE_WIDTH;
        return is_whole ? walk.at.tile : ~0u;
    }
    __device__ __forceinline__ void bring(const Shared& work, const TileBlock& block, u32 warp,
                                          u32 lane, u32& problems) {
        if (!walk.exists) return;
        bring_tile(work, block, ticket_of(work, block, walk, work.aligned()), record,
                   block.slots + warp * TILE_SLOTS * block.slot_bytes,
                   block.slot_full + warp * TILE_SLOTS * 8, lane, problems);
    }
};
}  // namespace df11::linear
