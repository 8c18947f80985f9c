// Products of 1 to 16 rows of x by matrices in the fast layout, and grouped ones, for compute
// capability 9.0, in the order of a plan of the sum: K in splits, each one chain of products of 16
// columns from zero; the sums of splits are added in order, then the bias, then rounded once. With
// the splits of cuBLAS they have its bits (spec/gpu.md, part 7).
//
//   block     one a multiprocessor, persistent: an even share of the strips of all matrices
//   piece     some strips of one matrix, all of their splits: up to FEW_UNITS units at once; of
//             more splits some at a time, in passes
//   unit      one split of one strip: two warps, 16 rows each, walk through its columns alone
//   stage     128 columns of each unit, two blocks of 64; a ring of stages fills shared memory
//   warps     FEW_ASKING warps ask for stages, a stage each in turn; two warps a unit multiply
//
//      stage | unit 0: block, block | unit 1: block, block | ... | x, each split: block, block |
//              warps 0, 1              warps 2, 3                 64 columns of all rows of x
//
//      block (64 columns of 32 rows, 3072 bytes) | step 0 | step 1 |; of a step the warp of rows 0
//      to 15 has bytes 0 to 511 and codes 0 and 1 of each lane's four, that of 16 to 31 the others
//
//   early     the weights of the whole ring are asked for before the launch before has ended; x
//             comes after. All copies go through one queue
//   chain     blocks are loaded two ahead, decoded one ahead, and a stage has no branch but the
//             rare one of entries
//   x         a box of 128 columns by 1, 8 or 16 rows for each split, by a tensor map; grouped, a
//             copy for each row, since rows lie anywhere; word by word if it is not aligned, and
//             where columns end within a block
//   tables    heads and entries of each unit of a piece, which those that ask load before all but
//             the first weights: behind the whole ring's they would come last
#pragma once
#include "linear_wide.cuh"

namespace df11::linear {
constexpr u32 FEW_ASKING = 4, FEW_UNITS = 6, FEW_STAGES = 32, FEW_BLOCKS = 2;  // blocks: a stage's
constexpr u32 FEW_THREADS = (FEW_ASKING + 2 * FEW_UNITS) * LANES;
constexpr u32 FEW_COLUMNS = 64, FEW_BLOCK_BYTES = FEW_COLUMNS / STEP_COLUMNS * STEP_BYTES;
constexpr u32 FEW_SHARED_BYTES = 227 * 1024;
constexpr u32 FEW_GROUPED_BYTES = FEW_SHARED_BYTES - 5 * 1024;  // batches of experts are static
// Blocks of a unit, at most, in a piece: longer splits are several pieces. They lie in up to 32
// tiles.
constexpr u32 FEW_PART = 124;
static_assert((3 + FEW_PART + 3) / 4 <= LANES && FEW_PART % FEW_BLOCKS == 0, "a tile each lane");
// A unit's table: of each tile a head, whose bits 16 to 23 tell which halves of which blocks have
// entries; the first entries; which one is the first.
constexpr u32 FEW_ENTRIES = 64, FEW_TABLE_ENTRIES = 8 * LANES;
constexpr u32 FEW_TABLE_FIRST = FEW_TABLE_ENTRIES + 4 * FEW_ENTRIES;
constexpr u32 FEW_TABLE_BYTES = FEW_TABLE_FIRST + 16, FEW_TABLES = 2;

__device__ inline u32 few_blocks_of(u32 columns) {
    return columns / FEW_COLUMNS + (columns % FEW_COLUMNS != 0);
}

// What a block multiplies at once.
struct FewPiece {
    const u8* data;  // of the first strip
    const FastHead* heads;
    const u32* entries;
    u64 entry_count;
    u16* y;  // of the first row of x, and of the matrix
    u64 y_pitch;
    const u16* bias;
    u32 rows, whole_columns, first_strip, strips;
    u32 all_splits, first_split, splits;  // splits: in this pass
    u32 pass_splits, inverse;             // in each pass but the last; 2^16 / that, rounded up
    u32 length;                           // of a split, but the last: blocks
    u32 first_block, stages;              // of each split, in this piece
    u32 x_first, x_rows;                  // grouped: the first place; rows of x
    u32 left;                             // strips of the matrix after these that are the block's

    // Of a unit: the strip, and the split in the pass; whether there is such a unit.
    __device__ u32 strip_of(u32 unit) const { return unit * inverse >> 16; }
    __device__ u32 split_of(u32 unit) const { return unit - strip_of(unit) * pass_splits; }
    __device__ bool has(u32 unit) const {
        return strip_of(unit) < strips && split_of(unit) < splits;
    }
    __device__ bool is_last_part() const { return first_block + FEW_PART >= length; }
    __device__ bool is_last_pass() const { return first_split + splits == all_splits; }
    // Blocks of a split of the pass.
    __device__ u32 begin_of(u32 split) const {
        return (first_split + split) * length + first_block;
    }
    __device__ u32 end_of(u32 split, u32 blocks) const {
        const u32 end = min(first_block + FEW_PART, length);
        return min((first_split + split) * length + end, blocks);
    }
    __device__ void begin_part(u32 block) {
        first_block = block;
        stages = (min(length - block, FEW_PART) + FEW_BLOCKS - 1) / FEW_BLOCKS;
    }
};

// A block's pieces, one after the other.
template <class Work>
struct FewPieces {
    const Work& work;
    u32 strip, end;  // of all matrices', of the piece
    FewPiece piece = {};

    __device__ explicit FewPieces(const Work& w) : work(w) {
        const u32 each = work.each(), more = work.more();
        strip = each * blockIdx.x + min(blockIdx.x, more);
        end = strip + each + (blockIdx.x < more);
    }
    // The next one, if there is one.
    __device__ bool next() {
        if (piece.strips && !piece.is_last_part()) {
            piece.begin_part(piece.first_block + FEW_PART);
            return true;
        }
        piece.begin_part(0);
        if (piece.strips && !piece.is_last_pass()) {
            piece.first_split += piece.splits;
            piece.splits = min(piece.splits, piece.all_splits - piece.first_split);
            return true;
        }
        strip += piece.strips;
        if (strip >= end) return false;
        if (piece.left) {
            piece.data += u64(piece.strips) * steps_of(piece.whole_columns) * STEP_BYTES;
            piece.heads += u64(piece.strips) * tiles_across(piece.whole_columns);
            piece.first_strip += piece.strips;
        } else {
            work.find(strip, end, piece);
            // As many strips at once as there is room for, evenly.
            const u32 most = piece.strips;
            if (piece.left > most) {
                const u32 times = (piece.left + most - 1) / most;
                piece.strips = (piece.left + times - 1) / times;
            }
            piece.begin_part(0);
        }
        piece.first_split = 0;
        piece.splits = piece.pass_splits;
        piece.strips = min(piece.strips, piece.left);
        piece.left -= piece.strips;
        return true;
    }
};

// Some matrices that share x, which comes in boxes of ROWS rows.
template <u32 ROWS>
struct FewShared {
    static constexpr bool BOXES = true;
    static constexpr u32 EIGHTS = (ROWS + 7) / 8;
    // A split's x of a stage; from a block to the next; from eight rows to the next; between the
    // columns of the two steps of a block.
    static constexpr u32 X_BYTES = FEW_BLOCKS * ROWS * 128, X_BLOCK = ROWS * 128, X_EIGHT = 1024;
    const LinearLaunch& launch;
    __device__ u32 unit_count() const { return launch.few_units; }
    __device__ u32 x_count() const { return launch.few_splits; }
    __device__ u32 each() const { return launch.few_each; }
    __device__ u32 more() const { return launch.few_more; }
    __device__ void find(u32 strip, u32 end, FewPiece& piece) const {
        u32 matrix = 0;
        while (matrix + 1 < launch.matrix_count && launch.matrices[matrix + 1].first_item <= strip)
            matrix++;
        const LinearMatrix& m = launch.matrices[matrix];
        piece.whole_columns = m.whole_columns;
        piece.first_strip = strip - m.first_item;
        piece.left = min(m.first_item + strips_of(m.rows), end) - strip;
        piece.data =
            m.data + u64(piece.first_strip) * steps_of(m.whole_columns) * STEP_BYTES;
        piece.heads = static_cast<const FastHead*>(m.index) +
                      u64(piece.first_strip) * tiles_across(m.whole_columns);
        piece.entries = static_cast<const u32*>(m.rest);
        piece.entry_count = m.rest_count;
        piece.y = m.y;
        piece.y_pitch = m.y_pitch;
        piece.bias = m.bias;
        piece.rows = m.rows;
        piece.all_splits = m.slices;
        piece.length = m.whole_strips;
        piece.pass_splits = m.first_strip;
        piece.inverse = m.first_partial >> 8;
        piece.strips = m.first_partial & 255;
        piece.x_rows = launch.x_rows;
    }
    __device__ const u16* x(const FewPiece&, u32 row) const {
        return launch.x + row * launch.x_pitch;
    }
    // Of a lane, for a load of eight rows of x by 32 columns; its second half.
    __device__ static u32 x_place(u32 lane) {
        if (ROWS == 1) return lane / 8 * 16;
        return lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16;
    }
    __device__ static u32 second(u32 place) { return place ^ 64; }
};

// Experts, each with its own rows of x, which lie anywhere: a copy for each.
struct FewGrouped : Grouped {
    static constexpr bool BOXES = false;
    static constexpr u32 EIGHTS = GROUPED_ROWS / 8;
    static constexpr u32 X_PITCH = FEW_BLOCKS * 128 + 16;  // rows of a load never meet in a bank
    static constexpr u32 X_BYTES = GROUPED_ROWS * X_PITCH, X_BLOCK = 128, X_EIGHT = 8 * X_PITCH;
    u32 units, each_, more_;
    // After the batches are counted.
    __device__ FewGrouped(const GroupedLaunch& l, const u32* b) : Grouped{l, b} {
        each_ = items() / gridDim.x;
        more_ = items() - each_ * gridDim.x;
        units = max(min(each_ + (more_ > 0), FEW_UNITS), 1);
    }
    __device__ u32 unit_count() const { return units; }
    __device__ u32 x_count() const { return 1; }
    __device__ u32 each() const { return each_; }
    __device__ u32 more() const { return more_; }
    __device__ void find(u32 strip, u32 end, FewPiece& piece) const {
        const Range at = range(strip);
        const LinearMatrix m = matrix(at);
        piece.whole_columns = m.whole_columns;
        piece.first_strip = at.strip;
        piece.left = min(strips() - at.strip, end - strip);
        piece.data = m.data + u64(at.strip) * steps_of(m.whole_columns) * STEP_BYTES;
        piece.heads =
            static_cast<const FastHead*>(m.index) + u64(at.strip) * tiles_across(m.whole_columns);
        piece.entries = static_cast<const u32*>(m.rest);
        piece.entry_count = m.rest_count;
        piece.y = y(at, 0);
        piece.y_pitch = launch.y_pitch;
        piece.bias = nullptr;
        piece.rows = launch.rows;
        piece.all_splits = piece.pass_splits = 1;
        piece.inverse = 1 << 16;
        piece.length = few_blocks_of(launch.columns);
        piece.strips = units;
        piece.x_first = at.first_row;
        piece.x_rows = at.rows;
    }
    __device__ const u16* x(const FewPiece& piece, u32 row) const {
        Range at = {};
        at.first_row = piece.x_first;
        return Grouped::x(at, row);
    }
    __device__ static u32 x_place(u32 lane) { return lane % 8 * X_PITCH + lane / 8 * 16; }
    __device__ static u32 second(u32 place) { return place + 64; }
};

// Where things are in shared memory: barriers, tables, sums of splits, then stages, each with
// weights and x.
template <class Work>
struct FewRing {
    u32 barriers, tables, table_bytes, sums, first, bytes, x, count;
    u32 place, full, phase = 0;
    __device__ FewRing(const Work& work, u32 at, u32 room) : barriers(at) {
        const u32 units = work.unit_count(), splits = work.x_count();
        tables = at + 8 * (2 * FEW_STAGES + 2 * FEW_TABLES);
        table_bytes = units * FEW_TABLE_BYTES;
        sums = tables + FEW_TABLES * table_bytes;
        // Of a warp, and of the strip whose splits come in passes.
        const u32 sum_bytes = splits > 1 ? (2 * units + 2) * Work::EIGHTS * 512 : 0;
        first = (sums + sum_bytes + 1023) / 1024 * 1024;
        x = units * FEW_BLOCKS * FEW_BLOCK_BYTES;
        bytes = (x + splits * Work::X_BYTES + 1023) / 1024 * 1024;
        count = min((at + room - first) / bytes, FEW_STAGES);
        // Kept in registers: the compiler would make them again in each stage.
        first = kept(first), bytes = kept(bytes), count = kept(count);
        place = first, full = barriers;
    }
    __device__ u32 empty() const { return full + 8 * FEW_STAGES; }
    // Of the table of a piece, which has this number.
    __device__ u32 table(u32 piece) const { return tables + piece % FEW_TABLES * table_bytes; }
    __device__ u32 table_full(u32 piece) const {
        return barriers + 8 * (2 * FEW_STAGES + piece % FEW_TABLES);
    }
    __device__ u32 table_empty(u32 piece) const { return table_full(piece) + 8 * FEW_TABLES; }
    __device__ void next(u32 by = 1) {
        place += by * bytes, full += by * 8;
        while (full >= barriers + 8 * count)
            full -= 8 * count, place -= count * bytes, phase ^= 1;
    }
    __device__ void next_one() {
        place += bytes, full += 8;
        if (full == barriers + 8 * count) full = barriers, place = first, phase ^= 1;
    }
    // One warp.
    __device__ void init_barriers(u32 warps, u32 lane) const {
        for (u32 i = lane; i < count; i += LANES) {
            init_barrier(barriers + 8 * i, WIDE_FILLING);
            init_barrier(barriers + 8 * (FEW_STAGES + i), warps * WIDE_ARRIVALS);
        }
        if (lane < FEW_TABLES) {
            init_barrier(table_full(lane), FEW_ASKING * WIDE_ARRIVALS);
            init_barrier(table_empty(lane), warps * WIDE_ARRIVALS);
        }
        show_barriers();
    }
};

// As copy_bulk_once.
__device__ inline void copy_with(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// A box of x: columns, rows, blocks of 64 columns.
__device__ inline void copy_blocks(u32 to, const XMap& map, u32 block, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(0), "r"(block), "r"(barrier)
        : "memory");
}

// Word by word, some blocks of x; pieces of 16 bytes are swizzled (linear_wgmma.cuh). One warp.
__device__ __noinline__ void copy_blocks_slowly(const u16* x, u64 pitch, u32 rows, u32 columns,
                                                u32 begin, u32 end, u32 to, u32 block_bytes) {
    const u32 lane = threadIdx.x % LANES;
    for (u32 block = begin; block < end; block++, to += block_bytes) {
        const u32 mine = block * FEW_COLUMNS + 2 * lane;
        copy_words_slowly(x + mine, pitch, rows, max(columns, mine) - mine, to + lane * 4);
    }
    fence_shared();
}
// The elements of a row of x after those that a copy brings, and zeros up to the end of a stage.
__device__ __noinline__ void copy_row_slowly(const u16* from, u32 count, u32 copied, u32 to) {
    for (u32 i = copied / 2; i < FEW_BLOCKS * FEW_COLUMNS; i++) {
        const u16 value = i < count ? __ldg(from + i) : 0;
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * i), "h"(value) : "memory");
    }
    fence_shared();
}

// Nearly no bytes, which all products read: they had better stay in L2.
__device__ inline u64 keep_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ inline uint2 load_kept(const uint2* from, u64 policy) {
    uint2 v;
    asm volatile("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(from), "l"(policy));
    return v;
}
__device__ inline u32 load_kept(const u32* from, u64 policy) {
    u32 v;
    asm volatile("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(from), "l"(policy));
    return v;
}

// The tables of units `number`, `number + FEW_ASKING`, ... of a piece, a tile each lane.
struct FewTelling {
    static constexpr u32 UNITS = (FEW_UNITS + FEW_ASKING - 1) / FEW_ASKING;
    u32 number, lane;
    u64 policy;
    const u32* entries;
    u64 entry_count;
    u32* status;
    bool mine[UNITS];
    Head heads[UNITS];
    u32 firsts[UNITS];  // entries: of all tiles of the unit
    u32 loaded[UNITS][FEW_ENTRIES / LANES];

    __device__ void load_heads(const FewPiece& piece, u32 blocks) {
        entries = piece.entries;
        entry_count = piece.entry_count;
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = number + i * FEW_ASKING, split = piece.split_of(unit);
            mine[i] = piece.has(unit);
            const u32 begin = piece.begin_of(split), end = piece.end_of(split, blocks);
            const u32 tile = begin * 2 / TILE_STEPS + lane;
            const u64 before = u64(piece.strip_of(unit)) * tiles_across(piece.whole_columns);
            const uint2* from = reinterpret_cast<const uint2*>(piece.heads) + before + tile;
            const bool exists = mine[i] && begin < end && tile * TILE_STEPS < 2 * end;
            heads[i].words = exists ? load_kept(from, policy) : make_uint2(0, 0);
        }
    }
    __device__ void load_entries() {
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            Head& head = heads[i];
            const u32 at = head.first(), count = head.count();
            // A head may name entries that do not exist.
            if (count && u64(at) + count > entry_count) {
                atomicOr(status, STATUS_ENTRIES);
                head.words.y = (head.words.y & 0xFFFF0000u) | u32(max(entry_count, u64(at)) - at);
            }
            firsts[i] = __shfl_sync(ALL_LANES, at, 0);
            const u32 after = at - firsts[i] + head.count();
            const u32 some = head.count() && after <= FEW_ENTRIES ? after : 0;
            const u32 end = __reduce_max_sync(ALL_LANES, some);
#pragma unroll
            for (u32 k = 0; k < FEW_ENTRIES / LANES; k++) {
                const u64 entry = u64(firsts[i]) + k * LANES + lane;
                const bool exists = k * LANES + lane < end && entry < entry_count;
                loaded[i][k] = exists ? load_kept(entries + entry, policy) : 0;
            }
        }
    }
    // Which halves of which blocks of a tile have entries: bit 2 * block + half.
    __device__ static u32 halves_of(const Head& head, u32 list, bool has_all) {
        u32 halves = 0;
        const u32 steps = head.words.y >> 16 & 255;
        if (!has_all || head.count() > 8) {
            halves = (steps | steps >> 1) & 0x55;
            return halves | halves << 1;
        }
        for (u32 i = 0; i < head.count(); i++) {
            const u32 entry = load_shared(list + 4 * i);
            halves |= 1 << ((entry >> 26 & 6) + (entry >> 20 & 1));
        }
        return halves;
    }
    __device__ void write(u32 tables, u32 full) const {
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = number + i * FEW_ASKING;
            if (!mine[i]) continue;
            const u32 table = tables + unit * FEW_TABLE_BYTES, list = table + FEW_TABLE_ENTRIES;
#pragma unroll
            for (u32 k = 0; k < FEW_ENTRIES / LANES; k++)
                store_shared(list + 4 * (k * LANES + lane), loaded[i][k]);
            if (lane == 0) store_shared(table + FEW_TABLE_FIRST, firsts[i]);
            __syncwarp();
            const Head& head = heads[i];
            const u32 from = head.first() - firsts[i];
            const bool has_all = from < FEW_ENTRIES && from + head.count() <= FEW_ENTRIES;
            const u32 halves = head.count() ? halves_of(head, list + 4 * from, has_all) : 0;
            store_shared_8(table + 8 * lane, make_uint2(head.first(), (head.words.y & 0xFF00FFFFu) |
                                                                          halves << 16));
        }
        release(full, lane);
    }
};

// What a warp that asks does for the stages of a piece: lane u has what unit u needs of them.
template <class Work>
struct FewAsking {
    const Work& work;
    u32 lane, blocks, steps;  // of 64 and 32 columns
    u64 policy;
    // Of the lane's unit: the first block and the end of the split, and where the first one lies;
    // none if there is no such unit. Of its x, if it is the first unit of a split: likewise.
    u32 first, end;
    const u8* from;
    const u16* row;  // of x, `lane`
    u32 number, turn;  // of this warp; how many take turns
    FewPieces<Work> pieces;
    FewTelling telling;
    bool has_any;

    // Before there are barriers.
    __device__ FewAsking(const Work& w, u32 number_, u32 lane_)
        : work(w), lane(lane_), blocks(few_blocks_of(w.launch.columns)),
          steps(steps_of(w.launch.columns)), policy(once_policy()), number(number_), pieces(w),
          telling{number_, lane_, keep_policy()} {
        telling.status = work.launch.status;
        has_any = pieces.next();
        if (has_any) telling.load_heads(pieces.piece, blocks);
    }
    __device__ void begin(const FewPiece& piece) {
        const u32 split = piece.split_of(lane);
        first = piece.begin_of(split);
        end = piece.has(lane) ? piece.end_of(split, blocks) : 0;
        from = piece.data + u64(piece.strip_of(lane)) * steps_of(piece.whole_columns) * STEP_BYTES +
               u64(first) * FEW_BLOCK_BYTES;
    }
    __device__ void ask_for_weights(u32 stage, const FewRing<Work>& ring) const {
        const u32 begin = first + stage * FEW_BLOCKS, full = ring.full;
        const u32 last = min(2 * min(end, begin + FEW_BLOCKS), steps);
        const u32 bytes = begin < end ? (last - 2 * begin) * STEP_BYTES : 0;
        const u32 all = __reduce_add_sync(ALL_LANES, bytes);
        arrive_expecting_once(full, all);
        __syncwarp();
        if (bytes)
            copy_with(ring.place + lane * (FEW_BLOCKS * FEW_BLOCK_BYTES),
                           from + u64(stage) * (FEW_BLOCKS * FEW_BLOCK_BYTES), bytes, full, policy);
        // The second step of the last block, where it does not exist: weights that are finite.
        if (steps % 2 && begin < end && end == blocks && begin + FEW_BLOCKS >= blocks)
            clear_step(ring.place +
                       (lane * FEW_BLOCKS + blocks - 1 - begin) * FEW_BLOCK_BYTES);
    }
    __device__ void ask_for_x(const FewPiece& piece, u32 stage, const FewRing<Work>& ring) const {
        if constexpr (Work::BOXES)
            ask_for_boxes(piece, stage, ring);
        else
            ask_for_rows(piece, stage, ring);
    }
    __device__ void ask_for_boxes(const FewPiece& piece, u32 stage,
                                  const FewRing<Work>& ring) const {
        const LinearLaunch& launch = work.launch;
        const u32 full = ring.full, mapped = launch.x_mapped ? launch.columns / FEW_COLUMNS : 0;
        const u32 begin = first + stage * FEW_BLOCKS, to = ring.place + ring.x;
        const bool has = lane < piece.splits && begin < end;
        const bool slow = has && min(end, begin + FEW_BLOCKS) > mapped;
        const u32 boxes = __popc(__ballot_sync(ALL_LANES, has && !slow));
        if (__any_sync(ALL_LANES, slow)) copy_slowly(piece, stage, to, mapped);
        if (WIDE_ARRIVALS > 1) arrive(full);
        __syncwarp();
        arrive_expecting_once(full, boxes * Work::X_BYTES);
        __syncwarp();
        if (has && !slow) copy_blocks(to + lane * Work::X_BYTES, launch.x_map, begin, full);
    }
    // What boxes cannot bring.
    __device__ void copy_slowly(const FewPiece& piece, u32 stage, u32 to, u32 mapped) const {
        const LinearLaunch& launch = work.launch;
        for (u32 split = 0; split < piece.splits; split++, to += Work::X_BYTES) {
            const u32 begin = piece.begin_of(split) + stage * FEW_BLOCKS;
            const u32 last = min(piece.end_of(split, blocks), begin + FEW_BLOCKS);
            if (last > mapped)
                copy_blocks_slowly(launch.x, launch.x_pitch, piece.x_rows, launch.columns, begin,
                                   last, to, Work::X_BLOCK);
        }
    }
    // Row `lane` of x.
    __device__ void ask_for_rows(const FewPiece& piece, u32 stage,
                                 const FewRing<Work>& ring) const {
        const u32 full = ring.full, block = piece.first_block + stage * FEW_BLOCKS;
        const u32 first_column = block * FEW_COLUMNS, last = min(blocks, block + FEW_BLOCKS);
        const u32 count = min(last * FEW_COLUMNS, work.launch.columns) - first_column;
        const u32 to = ring.place + ring.x + lane * FewGrouped::X_PITCH;
        const bool mine = lane < piece.x_rows;
        const u32 bytes = has_aligned_x(work.launch) ? count * 2 : 0;
        if (mine && bytes < (last - block) * 128)
            copy_row_slowly(row + first_column, count, bytes, to);
        if (WIDE_ARRIVALS > 1) arrive(full);
        __syncwarp();
        arrive_expecting_once(full, bytes * piece.x_rows);
        __syncwarp();
        if (mine && bytes) copy_bulk_to_all<1>(to, row + first_column, bytes, full);
    }
    // Asks for the weights of the stages of warp `number` in the first places of the ring, which do
    // not wait for the launch before.
    __device__ void ask_early(FewRing<Work> ring, u32 to) {
        u32 stage = number, place = number;
        ring.next(number);
        FewPieces<Work> all(work);
        for (; place < to && all.next(); stage -= all.piece.stages) {
            begin(all.piece);
            for (; stage < all.piece.stages && place < to;
                 stage += turn, place += turn, ring.next(turn))
                ask_for_weights(stage, ring);
        }
    }
    // All stages of the warp.
    __device__ void ask(FewRing<Work> ring) {
        if (!has_any) return wait_for_launch_before();
        turn = min(ring.count, FEW_ASKING);
        ask_early(ring, ring.count);
        telling.load_entries();
        telling.write(ring.table(0), ring.table_full(0));
        if constexpr (Work::BOXES) {
            asm volatile("prefetch.tensormap [%0];" ::"l"(&work.launch.x_map) : "memory");
            wait_for_launch_before();
        }
        // Never, if stages are fewer than warps that ask: then as many take turns. A stage that
        // others have still to ask for once more would look free.
        u32 stage = number < turn ? number : ~0u, place = number, piece_number = 0;
        ring.next(number);
        do {
            const FewPiece& piece = pieces.piece;
            if (piece_number) {
                telling.load_heads(piece, blocks), telling.load_entries();
                if (piece_number >= FEW_TABLES)
                    wait_for(ring.table_empty(piece_number), piece_number / FEW_TABLES % 2 ^ 1);
                telling.write(ring.table(piece_number), ring.table_full(piece_number));
            }
            piece_number++;
            begin(piece);
            if constexpr (!Work::BOXES) row = work.x(piece, min(lane, piece.x_rows - 1));
#pragma unroll 1
            for (; stage < piece.stages;
                 stage += turn, place += turn, ring.next(turn)) {
                if (place >= ring.count) {
                    wait_for(ring.empty(), ring.phase ^ 1);
                    ask_for_weights(stage, ring);
                }
                ask_for_x(piece, stage, ring);
            }
            stage -= piece.stages;
        } while (pieces.next());
    }
};

// A block of 16 rows as loaded.
struct FewRaw {
    uint4 planes[2];
    uint2 codes[2];
    __device__ __forceinline__ void load(u32 plane, u32 code) {
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            planes[i] = load_shared_16(plane + i * STEP_BYTES),
            codes[i] = load_shared_8(code + i * STEP_BYTES);
    }
    // The weights of product `k` of four, as the A operand.
    __device__ __forceinline__ void decode(u32 (&weights)[4], u32 k, u32 base) const {
        decode_product(weights, k % 2, planes[k / 2], codes[k / 2], base);
    }
};

// What a warp that multiplies does: half a strip, one split.
template <class Work>
struct FewChain {
    static constexpr u32 EIGHTS = Work::EIGHTS, NONE = 0xFFFFFFFF;
    const FewPiece& piece;
    u32 lane, half;
    u32 planes, codes, x;  // in a stage
    u32 table;             // of the unit
    float sums[EIGHTS][4];
    FewRaw raw[2];
    uint4 v[2][EIGHTS][2];
    u32 w[2][4];  // of a product, and of the next one

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < 4 * EIGHTS; i++) sums[i / 4][i % 4] = 0;
    }
    __device__ __forceinline__ void load_x(uint4 (&to)[EIGHTS][2], u32 place) const {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            to[i][0] = load_matrices(place + i * Work::X_EIGHT);
            to[i][1] = load_matrices(Work::second(place) + i * Work::X_EIGHT);
        }
    }
    // Product `k` of the four of a block.
    __device__ __forceinline__ void add(u32 b, u32 k) {
        const u32(&a)[4] = w[k % 2];
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            multiply(sums[i], a[0], a[1], a[2], a[3], k % 2 ? v[b][i][k / 2].z : v[b][i][k / 2].x,
                     k % 2 ? v[b][i][k / 2].w : v[b][i][k / 2].y);
    }
    // What the table says of a block. `at`: its place there, twice, and the half of the rows.
    __device__ __forceinline__ u32 load_head(u32 at) const {
        return load_shared(table + (at & ~7u) + 4);
    }
    __device__ __forceinline__ static u32 base_of(u32 head) { return (head >> 24) * 0x00800080u; }
    __device__ __forceinline__ static bool has_entries(u32 head, u32 at) {
        return head >> (16 + at % 8) & 1;
    }
    // Entry `i` of a tile, if it has as many.
    __device__ __forceinline__ u32 load_entry(u32 head, u32 at, u32 i) const {
        const u32 first = load_shared(table + (at & ~7u)), count = head & 0xFFFF;
        const u32 from = first - load_shared(table + FEW_TABLE_FIRST);
        if (i >= count) return NONE;
        return from < FEW_ENTRIES && from + count <= FEW_ENTRIES
                   ? load_shared(table + FEW_TABLE_ENTRIES + 4 * (from + i))
                   : __ldg(piece.entries + first + i);
    }
    __device__ __forceinline__ bool is_of(u32 entry, u32 at) const {
        return entry != NONE && (entry >> 20 & 1) == half && (entry >> 27 & 3) == at / 2 % 4;
    }
    // A block's entry, if this lane has it; whether there are several.
    __device__ __forceinline__ u32 find_entry(u32 head, u32 at, bool& several) const {
        const u32 entry = load_entry(head, at, lane);
        const u32 all = __ballot_sync(ALL_LANES, is_of(entry, at));
        several |= (head & 0xFFFF) > LANES || (all & (all - 1));
        const u32 one = __shfl_sync(ALL_LANES, entry, __ffs(all) - 1);
        return all && (one >> 21 & 31) == lane ? one : NONE;
    }
    __device__ __forceinline__ static u32 product_of(u32 entry) {
        return (entry >> 25 & 2) + (entry >> 18 & 1);
    }
    // Puts a block's entries of product `k` in their places.
    __device__ __forceinline__ void put_entries(u32 k, u32 head, u32 at) {
        if (!has_entries(head, at)) return;
#pragma unroll 1
        for (u32 i = 0; i < (head & 0xFFFF); i++) {
            const u32 entry = load_entry(head, at, i);
            const bool mine = is_of(entry, at) && (entry >> 21 & 31) == lane;
            place_entry(w[k % 2], entry, mine && product_of(entry) == k);
        }
    }
    // The products of the stage at `here`. Meanwhile what comes after is loaded, and each product
    // decoded during the one before, up to the first one of the stage at `next`.
    template <bool ENTRIES>
    __device__ __forceinline__ void step(u32 here, u32 next, u32 at, const u32 (&heads)[3]) {
        // The entry that this lane has of each block, if it is one.
        u32 found[3] = {NONE, NONE, NONE};
        bool several = false;
        if (ENTRIES) {
#pragma unroll
            for (u32 of = 0; of < 3; of++)
                if (has_entries(heads[of], at + 2 * of))
                    found[of] = find_entry(heads[of], at + 2 * of, several);
        }
#pragma unroll
        for (u32 b = 0; b < 2; b++) {
            load_x(v[1 - b], (b ? next : here + Work::X_BLOCK) + x);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                add(b, k);
                const u32 of = k < 3 ? b : b + 1, product = (k + 1) % 4;
                raw[of % 2].decode(w[product % 2], product, base_of(heads[of]));
                if (ENTRIES && several)
                    put_entries(product, heads[of], at + 2 * of);
                else if (ENTRIES)
                    place_entry(w[product % 2], found[of],
                                found[of] != NONE && product_of(found[of]) == product);
                if (k == 2)
                    raw[b].load(next + b * FEW_BLOCK_BYTES + planes,
                                next + b * FEW_BLOCK_BYTES + codes);
            }
        }
    }
    // The products of the last stage.
    __device__ __forceinline__ void finish(u32 here, u32 blocks, u32 at, const u32 (&heads)[3]) {
        load_x(v[1], here + Work::X_BLOCK + x);
#pragma unroll
        for (u32 b = 0; b < 2; b++) {
            if (b == blocks) break;
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                add(b, k);
                const u32 of = k < 3 ? b : b + 1, product = (k + 1) % 4;
                if (of == 2) break;
                raw[of].decode(w[product % 2], product, base_of(heads[of]));
                if (of < blocks) put_entries(product, heads[of], at + 2 * of);
            }
        }
    }
    // `blocks` of the unit, one at least; the stage with the last one is released.
    __device__ __forceinline__ void walk(FewRing<Work>& ring, u32 blocks, u32 at) {
        wait_for(ring.full, ring.phase);
        u32 here = ring.place, empty = ring.empty();
        raw[0].load(here + planes, here + codes);
        raw[1].load(here + planes + FEW_BLOCK_BYTES, here + codes + FEW_BLOCK_BYTES);
        load_x(v[0], here + x);
        u32 heads[3] = {load_head(at), load_head(at + 2), load_head(at + 4)};
        raw[0].decode(w[0], 0, base_of(heads[0]));
        put_entries(0, heads[0], at);
#pragma unroll 1
        for (; blocks > 2; blocks -= 2) {
            ring.next_one();
            wait_for(ring.full, ring.phase);
            const u32 next = ring.place, later[2] = {load_head(at + 6), load_head(at + 8)};
            const bool has = has_entries(heads[0], at) | has_entries(heads[1], at + 2) |
                             has_entries(heads[2], at + 4);
            if (__builtin_expect(has, 0))
                step<true>(here, next, at, heads);
            else
                step<false>(here, next, at, heads);
            release(empty, lane);
            empty = ring.empty();
            here = next;
            at += 4;
            heads[0] = heads[2], heads[1] = later[0], heads[2] = later[1];
        }
        finish(here, blocks, at, heads);
        release(empty, lane);
        ring.next_one();
    }
    __device__ __forceinline__ void store(u32 strip) const {
        const u32 first = strip * STRIP_ROWS + half * 16 + lane / 4;
#pragma unroll
        for (u32 high = 0; high < 2; high++) {
            const u32 row = first + 8 * high;
            if (row >= piece.rows) continue;
            const float bias = piece.bias ? widen_bf16(piece.bias[row]) : 0;
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
#pragma unroll
                for (u32 k = 0; k < 2; k++) {
                    const u32 x_row = 8 * i + lane % 4 * 2 + k;
                    float sum = sums[i][2 * high + k];
                    if (piece.bias) sum += bias;
                    if (x_row < piece.x_rows)
                        piece.y[x_row * piece.y_pitch + row] = round_to_bf16(sum);
                }
        }
    }
    __device__ __forceinline__ void save(u32 to) const {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            store_shared_16(to + i * 512 + lane * 16,
                            make_uint4(__float_as_uint(sums[i][0]), __float_as_uint(sums[i][1]),
                                       __float_as_uint(sums[i][2]), __float_as_uint(sums[i][3])));
    }
    // Adds what was saved there, after these sums, or before.
    __device__ __forceinline__ void add_saved(u32 from) {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            const uint4 saved = load_shared_16(from + i * 512 + lane * 16);
            sums[i][0] += __uint_as_float(saved.x), sums[i][1] += __uint_as_float(saved.y);
            sums[i][2] += __uint_as_float(saved.z), sums[i][3] += __uint_as_float(saved.w);
        }
    }
};

// The sums of a strip's splits, in order. All warps that multiply together, `units` of them two by
// two.
template <class Work>
__device__ __forceinline__ void add_splits(FewChain<Work>& chain, const FewPiece& piece,
                                           const FewRing<Work>& ring, u32 unit, u32 threads,
                                           bool active) {
    constexpr u32 BYTES = Work::EIGHTS * 512;
    const u32 mine = ring.sums + (2 * unit + chain.half) * BYTES;
    const u32 before = ring.sums + (threads / LANES + chain.half) * BYTES;
    group_barrier(0, threads);  // those before have been read
    if (active) chain.save(mine);
    group_barrier(0, threads);
    if (!active || piece.split_of(unit)) return;
    // Addition is commutative: what was before comes first.
    if (piece.first_split) chain.add_saved(before);
    for (u32 i = 1; i < piece.splits; i++) chain.add_saved(mine + 2 * i * BYTES);
    if (piece.is_last_pass())
        chain.store(piece.first_strip + piece.strip_of(unit));
    else
        chain.save(before);
}

template <class Work>
__device__ __forceinline__ void multiply_pieces(const Work& work, FewRing<Work> ring, u32 warp,
                                                u32 lane, u32 threads) {
    if constexpr (Work::BOXES) wait_for_launch_before();
    const u32 unit = warp / 2, blocks = few_blocks_of(work.launch.columns);
    FewPieces<Work> pieces(work);
    FewChain<Work> chain = {pieces.piece, lane, warp % 2};
    const u32 place = unit * FEW_BLOCKS * FEW_BLOCK_BYTES + lane * 16;
    chain.planes = kept(place + chain.half * 512);
    chain.codes = kept(place + 1024 + chain.half * 8);
    for (u32 number = 0; pieces.next(); number++) {
        const FewPiece& piece = pieces.piece;
        const u32 split = piece.split_of(unit), first = piece.begin_of(split);
        const u32 end = piece.end_of(split, blocks);
        const bool active = piece.has(unit);
        const u32 count = active && first < end ? end - first : 0;
        chain.x = kept(ring.x + split * Work::X_BYTES + Work::x_place(lane));
        chain.table = ring.table(number) + unit * FEW_TABLE_BYTES;
        if (piece.first_block == 0) chain.clear();
        wait_for(ring.table_full(number), number / FEW_TABLES % 2);
        if (count) chain.walk(ring, count, first % 4 * 2 + chain.half);
        // Stages of others.
        for (u32 stage = (count + FEW_BLOCKS - 1) / FEW_BLOCKS; stage < piece.stages; stage++) {
            wait_for(ring.full, ring.phase);
            release(ring.empty(), lane);
            ring.next_one();
        }
        release(ring.table_empty(number), lane);
        if (!piece.is_last_part()) continue;
        if (piece.all_splits > 1)
            add_splits(chain, piece, ring, unit, threads, active);
        else if (active)
            chain.store(piece.first_strip + unit);
    }
}

// Brings the launch to the cache of constants, a line a warp: one after the other they would take
// longer.
template <class Launch>
__device__ __forceinline__ void touch(const Launch& launch, u32 warp, u32 warps) {
    constexpr u32 WORDS = 16;
    const u32* const words = reinterpret_cast<const u32*>(&launch);
    for (u32 i = warp * WORDS; i < sizeof(Launch) / 4; i += warps * WORDS) kept(words[i]);
}

template <class Work>
__device__ __forceinline__ void linear_few(const Work& work) {
    // By lane 0, so that the compiler takes it for the same in all lanes.
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
    const u32 consumers = blockDim.x / LANES - FEW_ASKING;
    touch(work.launch, warp, blockDim.x / LANES);
    const FewRing<Work> ring(work, kept(shared_address(linear_shared)), dynamic_shared_bytes());
    if (warp < consumers) {
        if (warp == 0) ring.init_barriers(consumers, lane);
        __syncthreads();
        multiply_pieces(work, ring, warp, lane, consumers * LANES);
    } else {
        FewAsking<Work> asking(work, warp - consumers, lane);
        __syncthreads();
        asking.ask(ring);
    }
}
}  // namespace df11::linear
