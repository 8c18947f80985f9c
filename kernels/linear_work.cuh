// Items of a launch: the strip, the columns and the rows of x of each.
#pragma once
#include "common.cuh"
#include "linear_warp.cuh"

namespace df11::linear {
__host__ __device__ constexpr u32 steps_of(u32 columns) {
    return (columns + STEP_COLUMNS - 1) / STEP_COLUMNS;
}
__host__ __device__ constexpr u32 tiles_across(u32 columns) {
    return (columns + TILE_STEPS * STEP_COLUMNS - 1) / (TILE_STEPS * STEP_COLUMNS);
}
__device__ inline u32 partial_floats(u32 x_rows) {
    return (x_rows + LINEAR_ROWS - 1) / LINEAR_ROWS * (LINEAR_PARTIAL_BYTES / 4);
}

// An item: steps `begin` to `end` of a strip, from the start of a tile. Warp w of W has steps w, w
// + W, w + 2 W, ... of them.
struct Range {
    u32 matrix, strip, slices, begin, end;
    u32 partial;  // this slice's; the strip's other slices are `stride` apart
    u32 first_partial, stride;
    u32 first_row, rows;  // rows of x
    bool exists;          // false: the strip is after the last one, since groups of items are whole
};

// Whether copies of 16 bytes can bring x.
template <class Launch>
__device__ inline bool has_aligned_x(const Launch& l) {
    return (reinterpret_cast<u64>(l.x) | l.x_pitch * 2 | l.columns * 2) % 16 == 0;
}

// Matrices that share x.
template <class Launch>
struct Shared {
    const Launch& launch;
    __device__ u32 items() const { return launch.items; }
    __device__ const auto& matrix(const Range& at) const { return launch.matrices[at.matrix]; }
    __device__ const u16* x(const Range&, u32 row) const { return launch.x + row * launch.x_pitch; }
    __device__ u16* y(const Range& at, u32 row) const {
        return matrix(at).y + row * matrix(at).y_pitch;
    }
    __device__ const u16* bias(const Range& at) const { return matrix(at).bias; }
    __device__ float scale(const Range&, u32, float sum) const { return sum; }
    __device__ u32 matrix_rows(const Range& at) const { return matrix(at).rows; }
    __device__ Range range(u32 item) const {
        Range at = {};
        while (at.matrix + 1 < launch.matrix_count &&
               launch.matrices[at.matrix + 1].first_item <= item)
            at.matrix++;
        const ItemMatrix& m = launch.matrices[at.matrix];
        at.strip = item - m.first_item;
        at.slices = 1;
        at.end = steps_of(launch.columns);
        at.rows = launch.x_rows;
        if (at.strip >= m.whole_strips && m.slices > 1) {
            const u32 number = at.strip - m.whole_strips;
            const u32 strips = (m.rows + STRIP_ROWS - 1) / STRIP_ROWS - m.whole_strips;
            at.slices = m.slices;
            at.stride = (strips + LINEAR_GROUP - 1) / LINEAR_GROUP * LINEAR_GROUP;
            const u32 slice = number / at.stride;
            const u32 strip = number % at.stride;
            const u32 tiles = tiles_across(launch.columns);
            at.first_partial = m.first_partial + strip;
            at.partial = m.first_partial + number;
            at.strip = m.whole_strips + strip;
            at.begin = tiles * slice / m.slices * TILE_STEPS;
            at.end = min(tiles * (slice + 1) / m.slices * TILE_STEPS, at.end);
        }
        at.exists = at.strip * STRIP_ROWS < m.rows;
        return at;
    }
};
template <class Launch>
Shared(const Launch&) -> Shared<Launch>;

// Experts, each with its own rows of x. batches[e], in shared memory: batches of all experts before
// e, each of up to ROWS places.
template <u32 ROWS>
struct Grouped {
    const GroupedLaunch& launch;
    const u32* batches;
    __device__ u32 strips() const { return (launch.rows + STRIP_ROWS - 1) / STRIP_ROWS; }
    __device__ u32 items() const { return batches[launch.experts] * strips(); }
    __device__ LinearMatrix matrix(const Range& at) const {
        LinearMatrix m = launch.matrices ? launch.matrices[at.matrix] : launch.whole;
        if (launch.matrices) return m;
        const u64 strips = u64(at.matrix) * (launch.rows / STRIP_ROWS);
        m.data += strips * steps_of(m.whole_columns) * STEP_BYTES;
        m.index = static_cast<const FastHead*>(m.index) + strips * tiles_across(m.whole_columns);
        m.patches += strips * patch_bytes(m.whole_columns);
        return m;
    }
    __device__ u32 index(u32 place) const {
        return launch.x_index ? __ldg(launch.x_index + place) : place;
    }
    // The row of x of a place.
    __device__ u32 x_row(u32 place) const {
        u32 row = index(place);
        if (launch.blocks) row /= launch.share;
        if (row < launch.x_rows) return row;
        atomicOr(launch.status, STATUS_INDEX);
        return 0;
    }
    __device__ const u16* x(const Range& at, u32 row) const {
        return launch.x + x_row(at.first_row + row) * launch.x_pitch;
    }
    // The row of y of a place.
    __device__ u32 y_row(u32 place) const { return launch.blocks ? index(place) : place; }
    __device__ u16* y(const Range& at, u32 row) const {
        return launch.y + y_row(at.first_row + row) * launch.y_pitch;
    }
    // The expert of a place with blocks.
    __device__ u32 expert(u32 place) const {
        return __ldg(launch.blocks + (launch.x_index ? place / ROWS : place));
    }
    __device__ float scale(const Range& at, u32 row, float sum) const {
        if (launch.blocks && expert(at.first_row + row) == NO_EXPERT) return 0;
        return launch.factors ? sum * __ldg(launch.factors + y_row(at.first_row + row)) : sum;
    }
    __device__ const u16* bias(const Range&) const { return nullptr; }
    __device__ u32 matrix_rows(const Range&) const { return launch.rows; }
    // The first place of an expert, clamped whatever the offsets hold.
    __device__ u32 place(u32 expert) const {
        return min(__ldg(launch.offsets + expert), launch.places);
    }
    // Writes the batches to the block's shared `to`. All threads of the block call it and
    // synchronise afterwards.
    __device__ void count_batches(u32* to) const {
        if (threadIdx.x >= LANES) return;
        if (launch.blocks) {
            u32 count = launch.places;
            if (launch.x_index) {
                const u32 end = __ldg(launch.end);
                count = min(end, launch.places) / ROWS;
                // The list has blocks of another size.
                if (end <= launch.places && end % ROWS) atomicOr(launch.status, STATUS_INDEX);
            }
            if (threadIdx.x == 0) to[launch.experts] = count;
            return;
        }
        u32 before = 0;
        for (u32 begin = 0; begin < launch.experts; begin += LANES) {
            const u32 expert = begin + threadIdx.x;
            u32 count = 0;
            if (expert < launch.experts) {
                const u32 first = place(expert), end = place(expert + 1);
                count = (max(end, first) - first + ROWS - 1) / ROWS;
                if (end < first || __ldg(launch.offsets + expert + 1) > launch.places)
                    atomicOr(launch.status, STATUS_INDEX);
            }
            const u32 sum = inclusive_sum(count, threadIdx.x);
            if (expert < launch.experts) to[expert] = before + sum - count;
            before += __shfl_sync(ALL_LANES, sum, LANES - 1);
        }
        if (threadIdx.x == 0) to[launch.experts] = before;
    }
    // The expert and the places of a batch that is a block, or a single place. All lanes of a warp
    // call it together.
    __device__ void find_block(u32 batch, Range& at) const {
        at.matrix = __ldg(launch.blocks + batch);
        at.first_row = batch, at.rows = 1;
        u32 problems = at.matrix < launch.experts || at.matrix == NO_EXPERT ? 0 : STATUS_INDEX;
        if (at.matrix >= launch.experts) at.matrix = 0;  // any one: its sums are not used
        if (launch.x_index) {
            at.first_row = batch * ROWS, at.rows = 0;
            bool ends = false;
#pragma unroll
            for (u32 first = 0; first < ROWS; first += LANES) {
                const u32 i = first + threadIdx.x % LANES;
                const bool is_slot = i < ROWS && index(at.first_row + i) < launch.slots;
                const u32 slots = __ballot_sync(ALL_LANES, is_slot);
                const u32 begin = ~slots ? __ffs(~slots) - 1 : LANES;  // of padding
                // Padding is not at the end.
                if ((ends && slots) || (begin < LANES && slots >> begin)) problems = STATUS_INDEX;
                if (!ends) at.rows += begin;
                ends = ends || begin < LANES;
            }
            if (at.rows == 0) problems = STATUS_INDEX;
        }
        if (problems) atomicOr(launch.status, problems);
    }
    __device__ Range range(u32 item) const {
        Range at = {};
        const u32 batch = item / strips();
        at.strip = item % strips();
        at.slices = 1;
        at.end = steps_of(launch.columns);
        at.exists = true;
        if (launch.blocks) {
            find_block(batch, at);
            return at;
        }
        u32 low = 0, high = launch.experts;  // the last expert with no more batches before it
        while (low + 1 < high) {
            const u32 middle = (low + high) / 2;
            if (batches[middle] <= batch)
                low = middle;
            else
                high = middle;
        }
        at.matrix = low;
        at.first_row = place(low) + (batch - batches[low]) * ROWS;
        at.rows = min(place(low + 1) - at.first_row, ROWS);
        return at;
    }
};
}  // namespace df11::linear
