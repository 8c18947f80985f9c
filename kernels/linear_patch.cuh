// Makes the patches of strips in the fast layout from their entries: one warp per strip, after
// df11_linear_pack.
#pragma once
#include "linear_pack.cuh"
#include "linear_fast_128.cuh"

namespace df11::linear {
// The number of the patch to which an entry of a tile belongs.
__device__ inline u32 patch_of(u32 entry, u32 tile) {
    const u32 step = tile * TILE_STEPS + (entry >> 26 & 7), block = step / 2;
    const u32 product = (block % 2 ? 0 : 4) + step % 2 * 2 + (entry >> 18 & 1);
    return (entry >> 20 & 1) << 31 | (block + 1) / 2 << 8 | (entry >> 21 & 31) << 3 | product;
}

// A strip's patches. `numbers`, in shared memory, has the patch numbers of its `count` entries.
struct StripPatches {
    const FastHead* heads;
    const u8* data;
    const u32* entries;
    u32 count, lane;
    u32* numbers;
    u32* repeated;  // one bit per entry: whether an earlier one has the same number

    __device__ void find(u32 tiles) const {
        const u32 first = heads[0].first;
        for (u32 tile = lane; tile < tiles; tile += LANES)
            for (u32 k = 0; k < heads[tile].count; k++) {
                const u32 place = heads[tile].first - first + k;
                if (place < count) numbers[place] = patch_of(entries[place], tile);
            }
        __syncwarp();
        for (u32 begin = 0; begin < count; begin += LANES) {
            const u32 i = begin + lane;
            bool is_repeated = false;
            for (u32 k = 0; i < count && k < i; k++) is_repeated |= numbers[k] == numbers[i];
            const u32 mask = __ballot_sync(ALL_LANES, is_repeated);
            if (lane == 0) repeated[begin / LANES] = mask;
        }
        __syncwarp();
    }
    __device__ bool is_repeated(u32 i) const { return repeated[i / LANES] >> i % LANES & 1; }
    // Decodes a lane's product and puts its entries in.
    __device__ uint4 words_of(u32 number) const {
        const u32 product = number & 7, half = number >> 31, lane_of = number >> 3 & 31;
        const u32 block = (number << 1 >> 9) * 2 - (product < 4 ? 1 : 0);
        const u32 step = block * 2 + product / 2 % 2;
        const u8* const from = data + u64(step) * STEP_BYTES + lane_of * 16;
        const uint4 planes = *reinterpret_cast<const uint4*>(from + half * 512);
        const uint2 codes = *reinterpret_cast<const uint2*>(from + 1024 + half * 8);
        const u32 base = heads[step / TILE_STEPS].base * 0x00800080u;
        u32 words[4];
        if (product % 2)
            decode_product(words, 1, planes, codes, base);
        else
            decode_product(words, 0, planes, codes, base);
        for (u32 k = 0; k < count; k++) place_entry(words, entries[k], numbers[k] == number);
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    // Writes the patches, ascending, and returns how many there are.
    __device__ u32 write(u32* to_numbers, uint4* to_words) const {
        u32 all = 0;
        for (u32 begin = 0; begin < count; begin += LANES) {
            const u32 i = begin + lane;
            const bool is_patch = i < count && !is_repeated(i);
            u32 rank = 0;
            for (u32 k = 0; is_patch && k < count; k++)
                rank += !is_repeated(k) && numbers[k] < numbers[i];
            if (is_patch) to_numbers[rank] = numbers[i], to_words[rank] = words_of(numbers[i]);
            all += __popc(__ballot_sync(ALL_LANES, is_patch));
        }
        return all;
    }
};

extern "C" __global__ void __launch_bounds__(PACK_WARPS* LANES)
    df11_linear_patch(const __grid_constant__ PackTask task) {
    __shared__ u32 all_numbers[PACK_WARPS][MAX_PATCHES + MAX_PATCHES / LANES];
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 strip = blockIdx.x * PACK_WARPS + warp;
    if (strip >= (task.rows + STRIP_ROWS - 1) / STRIP_ROWS) return;
    const u32 tiles = tiles_across(task.columns), places = patch_places(task.columns);
    const FastHead* const heads = task.heads + u64(strip) * tiles;
    u32* const to = reinterpret_cast<u32*>(task.patches + u64(strip) * patch_bytes(task.columns));
    uint4* const words = reinterpret_cast<uint4*>(to + places);
    u32 count = 0;
    for (u32 tile = lane; tile < tiles; tile += LANES) count += heads[tile].count;
    count = __reduce_add_sync(ALL_LANES, count);
    const bool fits = count <= places && u64(heads[0].first) + count <= task.capacity;
    u32 all = 1;
    if (fits) {
        const StripPatches patches = {heads,
                                      task.data + u64(strip) * steps_of(task.columns) * STEP_BYTES,
                                      task.entries + heads[0].first,
                                      count,
                                      lane,
                                      all_numbers[warp],
                                      all_numbers[warp] + MAX_PATCHES};
        patches.find(tiles);
        all = patches.write(to, words);
    } else if (lane == 0) {
        to[0] = MANY_PATCHES;
    }
    if (!fits && lane == 0) words[0] = make_uint4(0, 0, 0, 0);
    // Fills the other places, so that each run writes the same bytes.
    for (u32 i = all + lane; i < places; i += LANES)
        to[i] = NO_PATCH, words[i] = make_uint4(0, 0, 0, 0);
}
}  // namespace df11::linear
