// Which tiles a block of products with tiles as stored has (linear_tile.cuh), in which order, and
// which of its warps decodes each.
#pragma once
#include "linear_tile_shape.cuh"

namespace df11::linear {
// How a range of tiles is shared out among warps: by its length alone, as sums are added run by
// run.
struct Runs {
    u32 length, count;
    __device__ explicit Runs(u32 tiles)
        : length(max((tiles + MOST_RUNS - 1) / MOST_RUNS, 1u)),
          // Without a division if there is a tile a run: blocks begin with this.
          count(length == 1 ? tiles : (tiles + length - 1) / length) {}
};

// A tile of the launch, the same for all lanes of a warp.
struct TilePlace {
    u32 matrix, strip;  // of the launch, of the matrix
    u32 tile;           // of the strip
};

__device__ inline u32 rows_left(const Shared& work, const TilePlace& at) {
    return min(work.launch.matrices[at.matrix].rows - at.strip * STRIP_ROWS, STRIP_ROWS);
}
__device__ inline u32 columns_left(const Shared& work, const TilePlace& at) {
    return min(work.columns() - at.tile * TILE_WIDTH, TILE_WIDTH);
}
__device__ inline const TileRecord* record_of(const LinearMatrix& m, u32 strip, u32 tile) {
    return static_cast<const TileRecord*>(m.index) + u64(strip) * tiles_across(m.whole_columns) +
           m.first_column / TILE_WIDTH + tile;
}
// `rows`: of the strip.
__device__ inline const u8* plane_of(const u8* plane, u32 whole_columns, u32 first_column,
                                     u32 strip, u32 tile, u32 rows) {
    return plane + u64(strip) * STRIP_ROWS * whole_columns +
           u64(first_column + tile * TILE_WIDTH) * rows;
}

// The tiles of a block in the order in which they are brought: of item after item first the first
// tile of each run, then the second of each, ... Run after run takes the next warp.
struct TileWalk {
    TilePlace at;
    u32 number;                 // of the item, among the block's that exist
    u32 fill;                   // how often the table must have been filled again
    u32 run, turn;              // of the item; of the run's tiles
    u32 warp;                   // that decodes it
    u32 item, end;              // of the launch; tiles of the item end here
    u32 length, count;          // Runs
    u32 begin;                  // tiles of the item begin here
    u32 first_warp;             // that has the first run of the item
    u32 rows;                   // of the strip
    const TileRecord* records;  // of the strip, from its first tile on
    const u8* plane;            // likewise
    bool exists;

    __device__ void find_item(const Shared& work) {
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
    __device__ void start(const Shared& work) {
        at = {}, item = blockIdx.x, number = 0, fill = 0, first_warp = 0;
        find_item(work);
        fill = 0;  // whichever matrix is the first, as MatrixWalk counts
    }
    // From the start to the first tile of a warp.
    __device__ void skip_to(const Shared& work, u32 of_warp) {
        while (exists && (of_warp - first_warp) * length >= end - begin)
            first_warp += count, number++, item += gridDim.x, find_item(work);
        run = of_warp - first_warp, at.tile = begin + run * length, warp = of_warp;
    }
    __device__ void advance(const Shared& work, u32 warps) {
        run++, at.tile += length, warp = warp + 1 == warps ? 0 : warp + 1;
        if (at.tile < end) return;
        // The last run may be shorter.
        turn++, run = 0, warp = first_warp, at.tile = begin + turn;
        if (turn < length) return;
        for (first_warp += count; first_warp >= warps;) first_warp -= warps;
        number++, item += gridDim.x;
        find_item(work);
    }
    // How often a warp arrives at the item's barrier after the tile: MOST_RUNS times for all runs.
    __device__ u32 arrivals() const {
        if (turn + 1 < length && at.tile + 1 < end) return 0;
        return run + 1 == count ? MOST_RUNS + 1 - count : 1;
    }
};
}  // namespace df11::linear
