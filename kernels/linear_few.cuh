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
//   block     FEW_ASKING warps ask for stages, a stage each in turn; two warps a unit multiply
//
//      stage | unit 0: block, block | unit 1: block, block | ... | x, each split: block, block | ...
//              warps 0, 1              warps 2, 3                 64 columns of all rows of x
//            ... | heads, each unit: block, block |
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
//   entries   those that ask load a tile's head and first entries two turns ahead, and write those
//             of each block to its head; if they are many, those that multiply load them
#pragma once
#include "linear_stages.cuh"

namespace df11::linear {
constexpr u32 FEW_ASKING = 4, FEW_UNITS = 6, FEW_STAGES = 32, FEW_BLOCKS = 2;  // blocks: a stage's
constexpr u32 FEW_THREADS = (FEW_ASKING + 2 * FEW_UNITS) * LANES;
constexpr u32 FEW_COLUMNS = 64, FEW_BLOCK_BYTES = FEW_COLUMNS / STEP_COLUMNS * STEP_BYTES;
constexpr u32 FEW_SHARED_BYTES = 226 * 1024;
// A head of a block of a unit: the base; how many entries there are, in bits 8 and 9 which halves of
// the rows have some, in bits 16 and 17 the block's number in its tile; then the entries. MANY: the
// first one in the array, and the count, of all of the tile instead.
constexpr u32 FEW_HEAD_BYTES = 32, FEW_ENTRIES = 6, FEW_MANY = 255;

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
    u32 pass_splits;                      // in each pass but the last
    u32 length, stages;                   // of a split, but the last: blocks; stages
    u32 x_first, x_rows;                  // grouped: the first place; rows of x
    u32 left;                             // strips of the matrix after these that are the block's

    __device__ bool is_last_pass() const { return first_split + splits == all_splits; }
    // Of a split, from stage `stage` on, at most FEW_BLOCKS.
    __device__ u32 begin_of(u32 split, u32 stage) const {
        return (first_split + split) * length + stage * FEW_BLOCKS;
    }
    __device__ u32 end_of(u32 split, u32 blocks) const {
        return min((first_split + split + 1) * length, blocks);
    }
};

// A block's pieces, one after the other.
template <class Work>
struct FewPieces {
    const Work& work;
    u32 strip, end;  // of all matrices', of the piece
    FewPiece piece = {};

    __device__ explicit FewPieces(const Work& w) : work(w) {
        const u32 all = work.strip_count(), each = all / gridDim.x, more = all % gridDim.x;
        strip = each * blockIdx.x + min(blockIdx.x, more);
        end = strip + each + (blockIdx.x < more);
    }
    // The next one, if there is one.
    __device__ bool next() {
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
            share_out();
        }
        piece.first_split = 0;
        piece.splits = piece.pass_splits;
        piece.strips = min(piece.strips, piece.left);
        piece.left -= piece.strips;
        return true;
    }
    // As many strips at once as there is room for, evenly.
    __device__ void share_out() {
        const u32 passes = (piece.all_splits + FEW_UNITS - 1) / FEW_UNITS;
        piece.pass_splits = (piece.all_splits + passes - 1) / passes;
        piece.length = (few_blocks_of(work.launch.columns) + piece.all_splits - 1) / piece.all_splits;
        piece.stages = (piece.length + FEW_BLOCKS - 1) / FEW_BLOCKS;
        const u32 most = passes > 1 ? 1 : work.unit_count() / piece.pass_splits;
        const u32 times = (piece.left + most - 1) / most;
        piece.strips = (piece.left + times - 1) / times;
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
    __device__ u32 strip_count() const {
        u32 all = 0;
        for (u32 i = 0; i < launch.matrix_count; i++) all += strips_of(launch.matrices[i].rows);
        return all;
    }
    __device__ void find(u32 strip, u32 end, FewPiece& piece) const {
        u32 matrix = 0, first = 0, strips = strips_of(launch.matrices[0].rows);
        while (strip >= first + strips)
            first += strips, strips = strips_of(launch.matrices[++matrix].rows);
        const LinearMatrix& m = launch.matrices[matrix];
        piece.whole_columns = m.whole_columns;
        piece.first_strip = strip - first;
        piece.left = min(first + strips, end) - strip;
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
        piece.all_splits = launch.splits[matrix];
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
    u32 units;
    // After the batches are counted.
    __device__ FewGrouped(const GroupedLaunch& l, const u32* b) : Grouped{l, b} {
        units = max(min((items() + gridDim.x - 1) / gridDim.x, FEW_UNITS), 1);
    }
    __device__ u32 unit_count() const { return units; }
    __device__ u32 x_count() const { return 1; }
    __device__ u32 strip_count() const { return items(); }
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
        piece.all_splits = 1;
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

// Where things are in shared memory: barriers, sums of splits, then stages, each with weights, x
// and heads.
template <class Work>
struct FewRing {
    u32 barriers, sums, first, bytes, x, heads, count;
    u32 slot = 0, phase = 0;
    __device__ FewRing(const Work& work, u32 at, u32 room) : barriers(at) {
        const u32 units = work.unit_count(), splits = work.x_count();
        sums = at + 2 * 8 * FEW_STAGES;
        // Of a warp, and of the strip whose splits come in passes.
        const u32 sum_bytes = splits > 1 ? (2 * units + 2) * Work::EIGHTS * 512 : 0;
        first = (sums + sum_bytes + 1023) / 1024 * 1024;
        x = units * FEW_BLOCKS * FEW_BLOCK_BYTES;
        heads = x + splits * Work::X_BYTES;
        bytes = (heads + units * FEW_BLOCKS * FEW_HEAD_BYTES + 1023) / 1024 * 1024;
        count = min((at + room - first) / bytes, FEW_STAGES);
    }
    __device__ u32 place() const { return first + slot * bytes; }
    __device__ u32 full() const { return barriers + 8 * slot; }
    __device__ u32 empty() const { return full() + 8 * FEW_STAGES; }
    __device__ void next(u32 by = 1) {
        slot += by;
        while (slot >= count) slot -= count, phase ^= 1;
    }
    __device__ void init_barriers(u32 warps) const {
        for (u32 i = 0; i < count; i++) {
            init_barrier(barriers + 8 * i, WIDE_FILLING);
            init_barrier(barriers + 8 * (FEW_STAGES + i), warps * WIDE_ARRIVALS);
        }
        show_barriers();
    }
};

// A box of x: columns, rows, blocks of 64 columns.
__device__ inline void copy_blocks(u32 to, const XMap& map, u32 block, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(0), "r"(block), "r"(barrier)
        : "memory");
}

// What those that multiply must know of a block of a unit, turn by turn, for a lane of those that
// ask. Heads are loaded two turns before they are needed, and first entries one turn before.
struct FewHeads {
    static constexpr u32 TILES = FEW_ASKING * FEW_BLOCKS * 2 / TILE_STEPS;  // of a turn
    static_assert(FEW_ASKING * FEW_BLOCKS * 2 % TILE_STEPS == 0, "a block keeps its place in tiles");
    const uint2* next;  // of the turn after next
    const u32* entries;
    u64 entry_count;
    u32 block, end;  // of this turn; of the split
    u32 ahead;       // the block of the turn after next
    Head head, after;
    u32 first[FEW_ENTRIES];

    __device__ FewHeads(const FewPiece& piece, u32 blocks, u32 stage, u32 lane, u32* status) {
        const u32 unit = lane / FEW_BLOCKS, split = unit % piece.splits;
        block = piece.begin_of(split, stage) + lane % FEW_BLOCKS;
        end = unit < piece.strips * piece.splits ? piece.end_of(split, blocks) : 0;
        ahead = block;
        next = reinterpret_cast<const uint2*>(piece.heads) +
               u64(unit / piece.splits) * tiles_across(piece.whole_columns) +
               block * 2 / TILE_STEPS;
        entries = piece.entries;
        entry_count = piece.entry_count;
        load_head(head), load_entries(status), load_head(after);
    }
    __device__ void load_head(Head& to) {
        to.words = ahead < end ? __ldg(next) : make_uint2(0, 0);
        next += TILES, ahead += FEW_ASKING * FEW_BLOCKS;
    }
    __device__ void load_entries(u32* status) {
        const u32 at = head.first();
        // A head may name entries that do not exist.
        if (head.count() && u64(at) + head.count() > entry_count) {
            atomicOr(status, STATUS_ENTRIES);
            head.words.y = (head.words.y & 0xFFFF0000u) | u32(max(entry_count, u64(at)) - at);
        }
#pragma unroll
        for (u32 i = 0; i < FEW_ENTRIES; i++)
            if (i < head.count()) first[i] = __ldg(entries + at + i);
    }
    // Writes the head of the block. Then goes on to the next turn.
    __device__ void tell(u32 to, u32* status) {
        const u32 of_tile = block % (TILE_STEPS / 2);
        u32 more = of_tile << 16;
        if (head.words.y >> (16 + 2 * of_tile) & 3) {
            if (head.count() > FEW_ENTRIES) {
                store_shared_8(to + 8, make_uint2(head.first(), head.count()));
                more |= 0x300 | FEW_MANY;
            } else {
                u32 count = 0;
#pragma unroll
                for (u32 i = 0; i < FEW_ENTRIES; i++)
                    if (i < head.count() && (first[i] >> 27 & 3) == of_tile) {
                        store_shared(to + 8 + 4 * count++, first[i]);
                        more |= 0x100 << (first[i] >> 20 & 1);
                    }
                more |= count;
            }
        }
        store_shared_8(to, make_uint2(head.base(), more));
        block += FEW_ASKING * FEW_BLOCKS;
        head = after;
        load_entries(status), load_head(after);
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

    __device__ FewAsking(const Work& w, u32 lane_)
        : work(w), lane(lane_), blocks(few_blocks_of(w.launch.columns)),
          steps(steps_of(w.launch.columns)), policy(once_policy()) {}
    __device__ void begin(const FewPiece& piece) {
        const u32 strip = lane / piece.splits, split = lane % piece.splits;
        first = piece.begin_of(split, 0);
        end = strip < piece.strips ? piece.end_of(split, blocks) : 0;
        from = piece.data + u64(strip) * steps_of(piece.whole_columns) * STEP_BYTES +
               u64(first) * FEW_BLOCK_BYTES;
    }
    __device__ void ask_for_weights(u32 stage, const FewRing<Work>& ring) const {
        const u32 begin = first + stage * FEW_BLOCKS, full = ring.full();
        const u32 last = min(2 * min(end, begin + FEW_BLOCKS), steps);
        const u32 bytes = begin < end ? (last - 2 * begin) * STEP_BYTES : 0;
        const u32 all = __reduce_add_sync(ALL_LANES, bytes);
        arrive_expecting_once(full, all);
        __syncwarp();
        if (bytes)
            copy_bulk_once(ring.place() + lane * (FEW_BLOCKS * FEW_BLOCK_BYTES),
                           from + u64(stage) * (FEW_BLOCKS * FEW_BLOCK_BYTES), bytes, full, policy);
        // The second step of the last block, where it does not exist: weights that are finite.
        if (steps % 2 && begin < end && end == blocks && begin + FEW_BLOCKS >= blocks)
            clear_step(ring.place() +
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
        const u32 full = ring.full(), mapped = launch.x_mapped ? launch.columns / FEW_COLUMNS : 0;
        const u32 begin = first + stage * FEW_BLOCKS, to = ring.place() + ring.x;
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
    // Word by word, what boxes cannot bring; pieces of 16 bytes are swizzled (linear_wgmma.cuh).
    __device__ __noinline__ void copy_slowly(const FewPiece& piece, u32 stage, u32 to,
                                             u32 mapped) const {
        const LinearLaunch& launch = work.launch;
        for (u32 split = 0; split < piece.splits; split++, to += Work::X_BYTES) {
            const u32 begin = piece.begin_of(split, stage);
            const u32 last = min(piece.end_of(split, blocks), begin + FEW_BLOCKS);
            if (last <= mapped) continue;
            for (u32 block = begin; block < last; block++) {
                const u32 mine = block * FEW_COLUMNS + 2 * lane;
                copy_words_slowly(launch.x + mine, launch.x_pitch, piece.x_rows,
                                  max(launch.columns, mine) - mine,
                                  to + (block - begin) * Work::X_BLOCK + lane * 4);
            }
        }
        fence_shared();
    }
    // Row `lane` of x.
    __device__ void ask_for_rows(const FewPiece& piece, u32 stage,
                                 const FewRing<Work>& ring) const {
        const u32 full = ring.full(), block = stage * FEW_BLOCKS, first_column = block * FEW_COLUMNS;
        const u32 last = min(blocks, block + FEW_BLOCKS);
        const u32 count = min(last * FEW_COLUMNS, work.launch.columns) - first_column;
        const u32 to = ring.place() + ring.x + lane * FewGrouped::X_PITCH;
        const bool mine = lane < piece.x_rows;
        const u32 bytes = has_aligned_x(work.launch) ? count * 2 : 0;
        if (mine && bytes < (last - block) * 128)
            copy_row_slowly(row + first_column, count, bytes, to);
        if (WIDE_ARRIVALS > 1) arrive(full);
        __syncwarp();
        arrive_expecting_once(full, bytes * piece.x_rows);
        __syncwarp();
        if (mine && bytes) copy_bulk(to, row + first_column, bytes, full);
    }
    // The elements of a row after those that a copy brings, and zeros up to the end of the stage.
    __device__ static __noinline__ void copy_row_slowly(const u16* from, u32 count, u32 copied,
                                                        u32 to) {
        for (u32 i = copied / 2; i < FEW_BLOCKS * FEW_COLUMNS; i++) {
            const u16 value = i < count ? __ldg(from + i) : 0;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * i), "h"(value) : "memory");
        }
        fence_shared();
    }
    // Asks for the weights of the stages of warp `number` that the ring has room for, which do not
    // wait for the launch before. The first stage that it leaves.
    __device__ u32 ask_early(FewRing<Work> ring, u32 number) {
        u32 stage = number, place = number;
        ring.next(number);
        for (FewPieces<Work> pieces(work); place < ring.count && pieces.next();
             stage -= pieces.piece.stages) {
            begin(pieces.piece);
            for (; stage < pieces.piece.stages && place < ring.count;
                 stage += FEW_ASKING, place += FEW_ASKING, ring.next(FEW_ASKING))
                ask_for_weights(stage, ring);
        }
        return place;
    }
    // All stages of warp `number`.
    __device__ void ask(FewRing<Work> ring, u32 number) {
        u32 asked = 0, stage = number, place = number;
        if constexpr (Work::BOXES) asked = ask_early(ring, number);
        ring.next(number);
        bool waited = !Work::BOXES;
        for (FewPieces<Work> pieces(work); pieces.next(); stage -= pieces.piece.stages) {
            const FewPiece& piece = pieces.piece;
            if (stage >= piece.stages) continue;
            begin(piece);
            FewHeads heads(piece, blocks, stage, lane, work.launch.status);
            if constexpr (!Work::BOXES) row = work.x(piece, min(lane, piece.x_rows - 1));
            if (!waited) wait_for_launch_before();
            waited = true;
#pragma unroll 1
            for (; stage < piece.stages;
                 stage += FEW_ASKING, place += FEW_ASKING, ring.next(FEW_ASKING)) {
                if (place >= ring.count) wait_for(ring.empty(), ring.phase ^ 1);
                if (place >= asked) ask_for_weights(stage, ring);
                if (heads.block < heads.end)
                    heads.tell(ring.place() + ring.heads + lane * FEW_HEAD_BYTES,
                               work.launch.status);
                ask_for_x(piece, stage, ring);
            }
        }
        if (!waited) wait_for_launch_before();
    }
};

// A block of 16 rows as loaded, and its head.
struct FewRaw {
    uint4 p0, p1;
    uint2 c0, c1, head;
    __device__ __forceinline__ void load(u32 planes, u32 codes, u32 at) {
        p0 = load_shared_16(planes), p1 = load_shared_16(planes + STEP_BYTES);
        c0 = load_shared_8(codes), c1 = load_shared_8(codes + STEP_BYTES);
        head = load_shared_8(at);
    }
    // A row of a step: 0 and 1 of the first, 2 and 3 of the second.
    __device__ __forceinline__ void decode(u32 (&weights)[4][4], u32 row) const {
        const uint4& p = row / 2 ? p1 : p0;
        const uint2& c = row / 2 ? c1 : c0;
        if (row % 2 == 0)
            decode_codes(weights[row], p.x, p.y, c.x, head.x);
        else
            decode_codes(weights[row], p.z, p.w, c.y, head.x);
    }
};

// What a warp that multiplies does: half a strip, one split.
template <class Work>
struct FewChain {
    static constexpr u32 EIGHTS = Work::EIGHTS;
    const FewPiece& piece;
    u32 lane, half;
    u32 planes, codes, head, x;  // in a stage
    float sums[EIGHTS][4];

    __device__ __forceinline__ void load_x(uint4 (&to)[EIGHTS][2], u32 place) const {
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++) {
            to[i][0] = load_matrices(place + i * Work::X_EIGHT);
            to[i][1] = load_matrices(Work::second(place) + i * Work::X_EIGHT);
        }
    }
    // Product `k` of the four of a block.
    __device__ __forceinline__ void add(const u32 (&w)[4][4], const uint4 (&v)[EIGHTS][2], u32 k) {
        const u32 row = k / 2 * 2, pair = k % 2 * 2;
#pragma unroll
        for (u32 i = 0; i < EIGHTS; i++)
            multiply(sums[i], w[row][pair], w[row + 1][pair], w[row][pair + 1],
                     w[row + 1][pair + 1], k % 2 ? v[i][k / 2].z : v[i][k / 2].x,
                     k % 2 ? v[i][k / 2].w : v[i][k / 2].y);
    }
    // Puts a block's entries in their places. Rare.
    __device__ __forceinline__ void place(u32 (&w)[4][4], uint2 words, u32 at) const {
        if (!(words.y >> (8 + half) & 1)) return;
        u32 count = words.y & 255;
        const u32* many = nullptr;
        if (count == FEW_MANY) {
            const uint2 all = load_shared_8(at + 8);
            many = piece.entries + all.x, count = all.y;
        }
        const u32 mine = lane << 1 | half, block = words.y >> 16 & 3;
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            const u32 entry = many ? __ldg(many + i) : load_shared(at + 8 + 4 * i);
            const bool is_mine = (entry >> 20 & 63) == mine && (entry >> 27 & 3) == block;
            const u32 to = (entry >> 22 & 16) + (entry >> 16 & 8) + (entry >> 16 & 6);
            const u32 order = entry >> 16 & 1 ? 0x5410 : 0x3254;
#pragma unroll
            for (u32 k = 0; k < 16; k++)
                if (is_mine && to == 2 * k)
                    w[k / 4][k % 4] = __byte_perm(w[k / 4][k % 4], entry, order);
        }
    }
    // `blocks` of the unit, one at least; the stage with the last one is released.
    __device__ __forceinline__ void walk(FewRing<Work>& ring, u32 blocks) {
        FewRaw raw[2];
        uint4 v[2][EIGHTS][2];
        u32 w[2][4][4];
        wait_for(ring.full(), ring.phase);
        u32 here = ring.place(), empty = ring.empty();
        raw[0].load(here + planes, here + codes, here + head);
        raw[1].load(here + planes + FEW_BLOCK_BYTES, here + codes + FEW_BLOCK_BYTES,
                    here + head + FEW_HEAD_BYTES);
        load_x(v[0], here + x);
#pragma unroll
        for (u32 k = 0; k < 4; k++) raw[0].decode(w[0], k);
        place(w[0], raw[0].head, here + head);
        // What is loaded after the last block is not used.
#pragma unroll 1
        for (; blocks > 1; blocks -= 2) {
            u32 next = here;
            if (blocks > 2) {
                ring.next();
                wait_for(ring.full(), ring.phase);
                next = ring.place();
            }
#pragma unroll
            for (u32 b = 0; b < 2; b++) {
                const u32 far = next + b * FEW_BLOCK_BYTES;
                const u32 near = (b ? next : here + FEW_HEAD_BYTES) + head;
                FewRaw& ready = raw[1 - b];
                raw[b].load(far + planes, far + codes, next + head + b * FEW_HEAD_BYTES);
                load_x(v[1 - b], (b ? next : here + Work::X_BLOCK) + x);
#pragma unroll
                for (u32 k = 0; k < 4; k++) add(w[b], v[b], k), ready.decode(w[1 - b], k);
                place(w[1 - b], ready.head, near);
            }
            release(empty, lane);
            empty = ring.empty();
            here = next;
        }
        if (blocks) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) add(w[0], v[0], k);
            release(empty, lane);
        }
        ring.next();
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
    if (!active || unit % piece.splits) return;
    // Addition is commutative: what was before comes first.
    if (piece.first_split) chain.add_saved(before);
    for (u32 i = 1; i < piece.splits; i++) chain.add_saved(mine + 2 * i * BYTES);
    if (piece.is_last_pass())
        chain.store(piece.first_strip + unit / piece.splits);
    else
        chain.save(before);
}

template <class Work>
__device__ __forceinline__ void multiply_pieces(const Work& work, FewRing<Work> ring, u32 warp,
                                                u32 lane, u32 threads) {
    if constexpr (Work::BOXES) wait_for_launch_before();
    const u32 unit = warp / 2, blocks = few_blocks_of(work.launch.columns);
    for (FewPieces<Work> pieces(work); pieces.next();) {
        const FewPiece& piece = pieces.piece;
        FewChain<Work> chain = {piece, lane, warp % 2};
        const u32 split = unit % piece.splits, first = piece.begin_of(split, 0);
        const bool active = unit < piece.strips * piece.splits;
        const u32 count = active ? piece.end_of(split, blocks) - first : 0;
        chain.planes = kept(unit * FEW_BLOCKS * FEW_BLOCK_BYTES + lane * 16 + chain.half * 512);
        chain.codes =
            kept(unit * FEW_BLOCKS * FEW_BLOCK_BYTES + lane * 16 + 1024 + chain.half * 8);
        chain.head = kept(ring.heads + unit * FEW_BLOCKS * FEW_HEAD_BYTES);
        chain.x = kept(ring.x + split * Work::X_BYTES + Work::x_place(lane));
        if (count) chain.walk(ring, count);
        // Stages of others.
        for (u32 stage = (count + FEW_BLOCKS - 1) / FEW_BLOCKS; stage < piece.stages; stage++) {
            wait_for(ring.full(), ring.phase);
            release(ring.empty(), lane);
            ring.next();
        }
        if (piece.all_splits > 1)
            add_splits(chain, piece, ring, unit, threads, active);
        else if (active)
            chain.store(piece.first_strip + unit);
    }
}

template <class Work>
__device__ __forceinline__ void linear_few(const Work& work) {
    // By lane 0, so that the compiler takes it for the same in all lanes.
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
    const u32 consumers = blockDim.x / LANES - FEW_ASKING;
    const FewRing<Work> ring(work, kept(shared_address(linear_shared)), dynamic_shared_bytes());
    if (threadIdx.x == 0) ring.init_barriers(consumers);
    __syncthreads();
    if (warp < consumers)
        multiply_pieces(work, ring, warp, lane, consumers * LANES);
    else
        FewAsking<Work>(work, lane).ask(ring, warp - consumers);
}
}  // namespace df11::linear
