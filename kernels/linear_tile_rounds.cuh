// How products of 17 to 64 rows of x with tiles as stored (linear_tile_wide.cuh) are shared out,
// and what their blocks have in shared memory.
#pragma once
#include "linear_tile.cuh"
#include "linear_wide.cuh"

namespace df11::linear {
// Warps that decode, in two sets; that multiply, that bring tiles, that bring x.
constexpr u32 DECODERS = 16, SET_WARPS = 8, SETS = DECODERS / SET_WARPS, MULTIPLIERS = 4;
constexpr u32 DECODED_THREADS = (DECODERS + TILE_HELPERS + MULTIPLIERS) * LANES;
// An atom: what a warp has of a stage, eight rows of 64 columns, as wgmma has them; of a set.
constexpr u32 ATOM_COLUMNS = 64, ATOM_BYTES = BAND_ROWS * ATOM_COLUMNS * 2,
              SET_ATOMS = SET_WARPS * ATOM_BYTES;
constexpr u32 TILE_ATOMS = TILE_WIDTH / ATOM_COLUMNS, MOST_DECODED = 4;
// Of a stage, side by side, with up to n rows of x; bytes of a set.
__host__ __device__ constexpr u32 stage_atoms(u32 n) { return n == 64 ? 1 : 2; }
__host__ __device__ constexpr u32 decoded_stage(u32 n) { return stage_atoms(n) * SET_ATOMS; }
// Rows of x, at most; strips and tiles of a strip in a round.
constexpr u32 DECODED_ROWS = 64, GROUP_STRIPS = SET_WARPS, ROUND_TILES = SETS;
__host__ __device__ constexpr u32 decoded_class(u32 x_rows) { return x_rows <= 32 ? 32 : 64; }
// Of a matrix: groups, rounds of a group, rounds of an item, items.
struct RoundSplit {
    u32 groups, of_group, of_item, items;
    __host__ __device__ constexpr RoundSplit(u32 rows, u32 columns)
        : groups((rows + GROUP_STRIPS * STRIP_ROWS - 1) / (GROUP_STRIPS * STRIP_ROWS)),
          of_group((columns + ROUND_TILES * TILE_WIDTH - 1) / (ROUND_TILES * TILE_WIDTH)),
          of_item((groups * of_group + LINEAR_BLOCKS - 1) / LINEAR_BLOCKS),
          items((groups * of_group + of_item - 1) / of_item) {}
    // Places for sums that meet: of each item's part of each group, or of each item's first and
    // last part.
    __host__ __device__ constexpr bool by_group() const { return groups < items; }
    __host__ __device__ constexpr u32 places() const {
        return items + (by_group() ? groups : items);
    }
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
#endif
}  // namespace df11::linear
