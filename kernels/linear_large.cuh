// Products of 129 rows of x and more, for compute capability 9.0: as linear_wide.cuh, of which they
// take stages, decoding and stores, but each weight is decoded once for 192 or 256 rows.
//
//   group     four strips by all columns; its stages lie after those of the group before
//   band      up to 256 rows of x, those of a block; all bands but the last have as many
//   share     as many stages as others have (linear_task.cuh), by shape and number of bands alone:
//             pieces of one group or several. A persistent block takes one band of a share or
//             several; blocks side by side have the bands of one share, so that weights come from
//             DRAM once
//   block     eight warps that multiply, 16 rows of a strip each, with 96 or 128 sums a thread, and
//             four that ask; two warpgroups' products hide what each of them decodes
//
//      group 0                 | group 1                 | ...    28672 x 4096: groups of 64 stages
//      share 0        | share 1        | share 2         | ...                    shares of 112
//        whole group 0, then a piece of group 1 | its other piece, ...
//
//   sums      of a group's pieces meet in memory, at a counter: see LargeMeeting
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills; benches/record/2026-11-23-linear-bands.md):
// 168 registers (216 for those that multiply, 72 for those that ask), 12 warps, a block a
// multiprocessor, 227 KiB of shared memory: 5 stages of 44 KiB, or 6 of 36. Sum of 6144 x 4096,
// 4096 x 4096, 28672 x 4096, 4096 x 14336 on an H200, in microseconds, nvcc's build:
//   rows of x                   192     256     384     512     1024
//   this                        166.8   200.3   275.2   336.3   618.0
//   y by 4 bytes, all stored    165.9   201.1   281.1   346.6   623.8
//   cuBLASLt's best             159.7   178.6   237.2   302.8   607.8
// What limits it. A stage of 256 rows takes 0.70 to 0.77 us, of which products take 0.58 at 1.755
// GHz. About 10 us are the ends of a launch whose columns are shared out: sums go to L2 and come
// back. What was tried and rejected is in that record and in 2026-11-23-linear-large.md.
//
// Safety: as linear.cu has it. A block waits for others no longer than LARGE_LOOKS looks at a
// counter.
#pragma once
#include "linear_wide.cuh"

namespace df11::linear {
constexpr u32 LARGE_WARPS = 2 * LARGE_STRIPS;
constexpr u32 LARGE_THREADS = (LARGE_WARPS + WIDE_ASKING) * LANES;
// Most stages of a ring, and the slices of a group's sums.
constexpr u32 LARGE_RING = 8, LARGE_SLICES = 8;
// A warp's sums of eight rows of x by 16 rows of a strip are a fragment; a slice is some of them.
__host__ __device__ constexpr u32 slice_fragments(u32 n) { return n / 8 / LARGE_SLICES; }

// What a block has to do, piece by piece.
struct LargeCursor {
    u32 item, matrix, share;
    u32 bands, band;
    u32 at, end;  // stages of the matrix, group after group

    __device__ explicit LargeCursor(const LinearLaunch& launch)
        : item(blockIdx.x), bands(large_bands(launch.x_rows)) {
        enter(launch);
    }
    __device__ void enter(const LinearLaunch& launch) {
        share = item / bands;
        band = item % bands;
        at = end = 0;
        for (matrix = 0; matrix < launch.matrix_count; matrix++) {
            const u32 rows = launch.matrices[matrix].rows;
            const u32 length = large_length(rows, launch.columns, bands);
            const u32 shares = large_shares(rows, launch.columns, bands);
            if (share >= shares) {
                share -= shares;
                continue;
            }
            at = share * length;
            end = min(at + length, large_groups(rows) * wide_stage_count(launch.columns));
            return;
        }
    }
    __device__ bool has(const LinearLaunch& launch) const { return matrix < launch.matrix_count; }
    __device__ WidePiece piece(const LinearLaunch& launch) const {
        const u32 stages = wide_stage_count(launch.columns), group = at / stages;
        WidePiece p;
        p.matrix = matrix;
        p.first_strip = group * LARGE_STRIPS;
        p.strips = min(strips_of(launch.matrices[matrix].rows) - p.first_strip, LARGE_STRIPS);
        p.begin = at % stages;
        p.end = min(stages, p.begin + (end - at));
        p.x_box = large_band_rows(launch.x_rows);
        p.x_first = band * p.x_box;
        p.x_rows = min(launch.x_rows - p.x_first, p.x_box);
        return p;
    }
    __device__ void next(const LinearLaunch& launch, const WidePiece& p) {
        at += p.end - p.begin;
        if (at == end) {
            item += gridDim.x;
            enter(launch);
        }
    }
};

__device__ __forceinline__ void ask_for_pieces(const LinearLaunch& launch,
                                               StageRing<LARGE_RING> ring, u32 warp, u32 lane) {
    constexpr u32 X_PLACE = LARGE_STRIPS * WIDE_STRIP_BYTES;
    for (u32 i = 0; i < warp; i++) ring.next();
    u32 turn = warp;  // stages of others before the next one of this warp
    bool first = true;
#pragma unroll 1
    for (LargeCursor cursor(launch); cursor.has(launch);) {
        const WidePiece piece = cursor.piece(launch);
        const u32 count = piece.end - piece.begin;
        const WideAsking<StageRing<LARGE_RING>> asking(launch, piece, piece.begin + turn, lane);
        const u32 filled = first ? min(piece.begin + ring.count, piece.end) : 0;
        asking.fill(filled, ring);
        asking.ask(filled, ring, X_PLACE, first);
        first = false;
        turn = (turn - count) % WIDE_ASKING;
        cursor.next(launch, piece);
    }
}

// Blocks that have pieces of a group meet at a counter: how many have come (bits 0 to 7), how many
// slices are done (8 to 15), and which of them are left to the last one that comes (16 on). Each
// stores its sums, and adds those of a slice of its own when all have come, in the order of
// columns; of two pieces it does not store what it is to add. It does not wait long: then it stores
// that, too, and leaves the slice to the last one. So no block depends on another one to run at the
// same time.
struct LargeMeeting {
    u32* counter;
    const float* first;   // of the first piece, this thread's place
    const float* others;  // of the second piece; the others come one after the other
    float* mine;
    u32 pieces, number, slices, stride;  // stride: from a piece to the next, in floats
    bool owns;

    __device__ LargeMeeting(const LinearLaunch& launch, const LargeCursor& cursor,
                            const WidePiece& piece) {
        const LinearMatrix& m = launch.matrices[piece.matrix];
        const u32 stages = wide_stage_count(launch.columns);
        const u32 length = large_length(m.rows, launch.columns, cursor.bands);
        const u32 all = large_groups(m.rows) * stages;
        const u32 begin = cursor.at - piece.begin;
        const u32 end = begin + stages;
        const u32 first_share = begin / length;
        const u32 last_share = (end - 1) / length;
        pieces = last_share - first_share + 1;
        number = cursor.share - first_share;
        // A share that has more after the last piece comes early: it owns nothing.
        const u32 owners = pieces - (end < min((last_share + 1) * length, all));
        slices = max(min(owners, LARGE_SLICES), 1);
        owns = number < slices;
        const u32 item = cursor.item - number * cursor.bands;  // of the first piece
        counter = launch.counters + item;
        constexpr u64 PARTIAL = LARGE_PARTIAL_BYTES / 8;
        float* const partials = launch.partials + threadIdx.x * 4;
        first = partials + (2 * u64(item) + 1) * PARTIAL;
        stride = 2 * cursor.bands * PARTIAL;
        others = partials + 2 * u64(item) * PARTIAL + stride;
        mine = partials + (2 * u64(cursor.item) + (number == 0)) * PARTIAL;
    }
    __device__ const float* partial(u32 piece) const {
        return piece ? others + u64(piece - 1) * stride : first;
    }
    __device__ u32 own_slice() const { return owns ? 1u << number : 0; }
    // The first fragment of a slice, with `n` rows of x.
    __device__ u32 fragment(u32 slice, u32 n) const {
        return slice * LARGE_SLICES / slices * slice_fragments(n);
    }
};
constexpr u32 LARGE_FRAGMENT_FLOATS = LARGE_WARPS * LANES * 4;

__device__ inline void store_partial(float* to, const float* v) {
    __stcg(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
}
// Volatile, so that loads stay together.
__device__ inline void load_partial(float (&to)[4], const float* from) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(from));
}
__device__ inline void barrier_of_large() { group_barrier(1, LARGE_WARPS * LANES); }

// With 192 rows stores of 4 bytes are faster (the record).
template <u32 N>
constexpr bool BY_EIGHTS = N == LARGE_ROWS;

// The sums of a slice by all pieces, in order.
template <u32 N>
__device__ __forceinline__ void add_slice(const LargeMeeting& meeting, u32 slice,
                                          const WideOutput& output) {
    constexpr u32 FRAGMENTS = slice_fragments(N), OTHERS = 3;
    const u32 end = min(meeting.fragment(slice + 1, N), (output.x_rows + 7) / 8);
#pragma unroll 1
    for (u32 i = meeting.fragment(slice, N); i < end; i += FRAGMENTS) {
        float sums[FRAGMENTS][4];
        auto load = [&](float (&to)[FRAGMENTS][4], u32 piece) {
            const float* const from = meeting.partial(piece) + i * LARGE_FRAGMENT_FLOATS;
#pragma unroll
            for (u32 k = 0; k < FRAGMENTS; k++)
                load_partial(to[k], from + k * LARGE_FRAGMENT_FLOATS);
        };
        load(sums, 0);
#pragma unroll 1
        for (u32 piece = 1; piece < meeting.pieces; piece += OTHERS) {
            float more[OTHERS][FRAGMENTS][4];
#pragma unroll
            for (u32 p = 0; p < OTHERS; p++) load(more[p], min(piece + p, meeting.pieces - 1));
#pragma unroll
            for (u32 p = 0; p < OTHERS; p++)
                if (piece + p < meeting.pieces)
#pragma unroll
                    for (u32 n = 0; n < FRAGMENTS * 4; n++)
                        sums[n / 4][n % 4] += more[p][n / 4][n % 4];
        }
        output.store<FRAGMENTS, BY_EIGHTS<N>>(8 * i, sums[0]);
    }
}

// How often a block looks whether the others have come, about a microsecond each.
constexpr u32 LARGE_LOOKS = 50;

// Comes to a meeting. Which slices this block is to add; LEAVE: others have not come. By one
// thread.
constexpr u32 LEAVE = 1u << 31;
__device__ __forceinline__ u32 come(const LargeMeeting& meeting) {
    // What all have stored before the barrier is there for those who see this one's arrival.
    __threadfence();
    const u32 own_slice = meeting.own_slice();
    const u32 state = atomicAdd(meeting.counter, 1);
    if ((state & 0xFF) + 1 == meeting.pieces) return state >> 16 | own_slice;
    if (!own_slice) return 0;
#pragma unroll 1
    for (u32 i = 0; i < LARGE_LOOKS; i++)
        if ((load_acquired(meeting.counter) & 0xFF) == meeting.pieces) return own_slice;
    return LEAVE;
}
// Leaves its own slice to the last one that comes; if that one has come, it does not.
__device__ __forceinline__ u32 leave(const LargeMeeting& meeting) {
    __threadfence();
    const u32 own_slice = meeting.own_slice();
    const u32 state = atomicOr(meeting.counter, own_slice << 16);
    return (state & 0xFF) == meeting.pieces ? own_slice : 0;
}

// All that multiply together. `word`: of shared memory.
template <u32 N>
__device__ __forceinline__ void add_pieces(const LargeMeeting& meeting, volatile u32* word,
                                           const WideOutput& output, float (&sums)[N / 2]) {
    auto tell = [&](u32 value) {
        // One expression: of two statements the compiler makes other code.
        if (threadIdx.x == 0) __threadfence(), *word = value;
        barrier_of_large();
        value = *word;
        barrier_of_large();  // all have read it before another one is written
        return value;
    };
    // Of two pieces a block keeps what it is to add, unless the other one comes late.
    auto kept_here = [&](u32 fragment) {
        return meeting.pieces == 2 && meeting.owns &&
               (meeting.slices == 1 || fragment / (N / 16) == meeting.number);
    };
    auto store = [&](bool keeps) {
#pragma unroll
        for (u32 i = 0; i < N / 8; i++)
            if (8 * i < output.x_rows && kept_here(i) == keeps)
                store_partial(meeting.mine + i * LARGE_FRAGMENT_FLOATS, sums + 4 * i);
        barrier_of_large();
    };
    u32 todo = 0;
    if (meeting.pieces > 1) {
        store(false);
        todo = tell(threadIdx.x == 0 ? come(meeting) : 0);
        if (todo == LEAVE) {
            if (meeting.pieces == 2) store(true);
            todo = tell(threadIdx.x == 0 ? leave(meeting) : 0);
        }
        if (!todo) return;
    }
    const u32 done = __popc(todo);
    if (meeting.pieces <= 2) {
        // What is kept here. FRAGMENTS at once: a half has two or more of them.
        constexpr u32 FRAGMENTS = N / 32;
#pragma unroll
        for (u32 first = 0; first < N / 8; first += FRAGMENTS) {
            if (8 * first >= output.x_rows) break;
            if (meeting.pieces == 2) {
                if (!kept_here(first)) continue;
                const float* const other = meeting.partial(1 - meeting.number);
                float more[FRAGMENTS][4];
#pragma unroll
                for (u32 i = 0; i < FRAGMENTS; i++)
                    load_partial(more[i], other + (first + i) * LARGE_FRAGMENT_FLOATS);
#pragma unroll
                for (u32 i = 0; i < 4 * FRAGMENTS; i++) sums[4 * first + i] += more[i / 4][i % 4];
            }
            output.store<FRAGMENTS, BY_EIGHTS<N>>(8 * first, sums + 4 * first);
        }
        if (meeting.pieces == 1) return;
        todo &= ~meeting.own_slice();
    }
#pragma unroll 1
    for (u32 slice = 0; slice < LARGE_SLICES; slice++)
        if (todo >> slice & 1) add_slice<N>(meeting, slice, output);
    barrier_of_large();
    if (threadIdx.x == 0) {
        const u32 state = atomicAdd(meeting.counter, done << 8);
        if ((state >> 8 & 0xFF) + done == meeting.slices) atomicExch(meeting.counter, 0);
    }
}

template <u32 N>
__device__ __forceinline__ void linear_large(const LinearLaunch& launch) {
    // By lane 0, so that the compiler takes it for the same in all lanes.
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    const u32 room = dynamic_shared_bytes();
    // A word for meetings comes before all.
    const u32 base = kept(shared_address(linear_shared) + 16);
    StageRing<LARGE_RING> ring(base, room - 16, wide_stage_bytes(N, LARGE_STRIPS));
    if (threadIdx.x == 0) ring.init_barriers(LARGE_WARPS);
    __syncthreads();
    if (warp >= LARGE_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        ask_for_pieces(launch, ring, warp - LARGE_WARPS, lane);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const WideShare share;
    wait_for_launch_before();
#pragma unroll 1
    for (LargeCursor cursor(launch); cursor.has(launch);) {
        const WidePiece piece = cursor.piece(launch);
        float sums[N / 2] = {};
        const u32 last =
            multiply_stages<N>(launch, piece, LARGE_STRIPS * WIDE_STRIP_BYTES, ring, share, sums);
        release(last, lane);
        const WideOutput output(launch, piece, share);
        const LargeMeeting meeting(launch, cursor, piece);
        add_pieces<N>(meeting, reinterpret_cast<u32*>(linear_shared), output, sums);
        cursor.next(launch, piece);
    }
}
}  // namespace df11::linear
