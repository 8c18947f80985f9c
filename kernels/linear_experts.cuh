// Multiplies experts' rows by their matrices in the fast layout on compute capability 9.0, up to 64
// or 128 rows of an expert at once, by wgmma (linear_fast_128.cuh). The order of sums is that of
// one split, as in linear_order.cuh, which is faster for few rows of each expert.
//
//   piece     up to eight strips of an expert's matrix, by up to N of its rows of x. Block b of B
//             takes pieces b, b + B, ...: blocks that read the same rows of x, or that read an
//             expert again for more rows, do so at the same time, from L2
//   warps     as in linear_fast_128.cuh. Those that request go on to the next piece while the
//             others still multiply
//   x         rows lie anywhere, so a warp that requests copies each by itself, 16 bytes a lane, to
//             their swizzled places, and waits: products read shared memory through the async
//             proxy, which sees these copies after a fence of the thread that made them
//
// Budget (kernels/ptx/linear.sm_90a.cubin, no spills): as in linear_fast_128.cuh, with 6 stages for
// 64 rows and 5 for 128. With 64 rows DRAM is the limit, 4.1 TB/s on an H200. With 128 it is not: a
// stage of full rows takes twice as long. benches/record/2026-11-28-experts-h200.md has the times,
// and what was tried.
//
// Safety: as in linear.cu.
#pragma once
#include "linear_fast_128.cuh"

namespace df11::linear {
using ExpertsRing = StageRing<8>;
constexpr u32 EXPERTS_X_PLACE = FAST128_STRIPS * FAST128_STRIP_BYTES;  // in a stage

// Like copy_async, for 16 bytes if `exists`, else zeros.
__device__ inline void copy_or_clear_async(u32 to, const u16* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}

// Copies 64 columns of a row of x word by word, zeros where there are none. One warp.
__device__ __noinline__ void copy_words_of_row(const u16* row, u32 column, u32 columns, u32 to) {
    u32 word = 0;
    if (column < columns) word = row[column];
    if (column + 1 < columns) word |= u32(row[column + 1]) << 16;
    store_shared(to, word);
}

template <u32 N>
struct Fast128Grouped : Grouped<N> {
    using Base = Grouped<N>;
    using Base::launch;
    u32 groups, pieces;  // groups of strips of an expert; pieces of all
    // The present piece's rows of x, of which each lane knows those from `lane` on, 32 apart.
    u32 x_rows[N / LANES];
    LinearMatrix of_piece;

    // Call it after the batches are counted.
    __device__ Fast128Grouped(const GroupedLaunch& l, const u32* b)
        : Base{l, b},
          groups((Base::strips() + FAST128_STRIPS - 1) / FAST128_STRIPS),
          pieces(b[l.experts] * groups) {}
    // Goes to a piece. All lanes of a warp call it together.
    __device__ Fast128Piece find(u32 number) {
        const u32 group = number % groups;
        const Range at = Base::range(number / groups * Base::strips());
        of_piece = Base::matrix(at);
        Fast128Piece piece = {};
        piece.matrix = at.matrix;
        piece.first_strip = group * FAST128_STRIPS;
        piece.strips = min(Base::strips() - piece.first_strip, FAST128_STRIPS);
        piece.end = fast128_stage_count(launch.columns);
        piece.x_first = at.first_row, piece.x_rows = at.rows;
        return piece;
    }
    __device__ const LinearMatrix& matrix(const Fast128Piece&) const { return of_piece; }
    // The place of a row of the piece, or of its last one.
    __device__ static u32 place_of(const Fast128Piece& piece, u32 row) {
        return piece.x_first + min(row, max(piece.x_rows, 1) - 1);
    }
    __device__ void find_x(const Fast128Piece& piece, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < N / LANES; i++)
            x_rows[i] = Base::x_row(place_of(piece, i * LANES + lane));
    }
    __device__ __forceinline__ void ask_for_x(const Fast128Piece& piece, u32 stage, u32 to,
                                              u32 barrier, u32 lane) const {
        const u32 begin = stage * FAST128_COLUMNS;
        if (has_aligned_x(launch)) {
            // Eight lanes bring 64 columns of a row.
            const u32 place = lane % 8, column = begin + 8 * place;
            const bool exists = column < launch.columns;
            const u16* const from = launch.x + (exists ? column : 0);
#pragma unroll
            for (u32 first = 0; first < N; first += 4) {
                if (first >= piece.x_rows) break;
                const u32 row = first + lane / 8;
                const u32 x_row =
                    __shfl_sync(ALL_LANES, x_rows[first / LANES], first % LANES + lane / 8);
                copy_or_clear_async(to + row * 128 + (place ^ row % 8) * 16,
                                    from + x_row * launch.x_pitch, exists);
            }
            commit_copies();
            wait_for_copies();
        } else {
#pragma unroll 1
            for (u32 row = 0; row < piece.x_rows; row++) {
                const u16* const from =
                    launch.x + u64(Base::x_row(piece.x_first + row)) * launch.x_pitch;
                copy_words_of_row(from, begin + 2 * lane, launch.columns,
                                  ((to + lane * 4) ^ row % 8 * 16) + row * 128);
            }
        }
        fence_shared();
        if (WARP_ARRIVALS > 1) arrive(barrier);
        __syncwarp();
        arrive_expecting_once(barrier, 0);
    }
    // Stores a warp's products: 16 rows of a strip by the piece's rows of x.
    __device__ __forceinline__ void store(const Fast128Piece& piece, const Fast128Share& share,
                                          u32 lane, const float (&sums)[N / 2]) const {
        const u32 row = (piece.first_strip + share.strip) * STRIP_ROWS + share.half * 16;
        const u32 rows = share.strip < piece.strips && row < launch.rows ? launch.rows - row : 0;
        const bool is_none = launch.blocks && Base::expert(piece.x_first) == NO_EXPERT;
        const bool pairs_fit =
            rows >= 16 && (reinterpret_cast<u64>(launch.y) | launch.y_pitch * 2) % 4 == 0;
        const u32 column = lane % 4 * 2;
        // Each lane loads for rows of x that are 32 apart; one load after the other would take
        // longer than the ring's stages hide.
        u32 y_rows[N / LANES];
        float factors[N / LANES];
#pragma unroll
        for (u32 i = 0; i < N / LANES; i++)
            y_rows[i] = Base::y_row(place_of(piece, i * LANES + lane));
#pragma unroll
        for (u32 i = 0; i < N / LANES; i++)
            // Without rows of x, y_rows may be anything.
            factors[i] = launch.factors && piece.x_rows ? __ldg(launch.factors + y_rows[i]) : 1;
#pragma unroll
        for (u32 i = 0; i < N / 8; i++) {
            if (8 * i >= piece.x_rows) break;
            const u32 from = 8 * i % LANES;
            const float low = __shfl_sync(ALL_LANES, factors[i / 4], from + column),
                        high = __shfl_sync(ALL_LANES, factors[i / 4], from + column + 1);
            const u32 y_row = __shfl_sync(ALL_LANES, y_rows[i / 4], from + lane / 4);
            u32 pairs[2];
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const float* const of = sums + 4 * i + 2 * k;
                pairs[k] =
                    Fast128Output::transposed(Fast128Output::round_two(of[0] * low, of[1] * high));
                if (is_none) pairs[k] = 0;
            }
            if (8 * i + lane / 4 >= piece.x_rows) continue;
            u16* const to = launch.y + y_row * launch.y_pitch + row + column;
            if (pairs_fit)
                Fast128Output::store_pairs<true>(to, pairs, column, rows);
            else
                Fast128Output::store_pairs<false>(to, pairs, column, rows);
        }
    }
};

template <u32 N>
__device__ __forceinline__ void linear_experts(Fast128Grouped<N> work) {
    // Broadcast from lane 0, so that the compiler knows that all lanes have the same.
    const u32 lane = kept(threadIdx.x % LANES);
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / LANES, 0);
    ExpertsRing ring(kept(shared_address(linear_shared)), dynamic_shared_bytes(),
                     fast128_stage_bytes(N, FAST128_STRIPS));
    ring.init_barriers(FAST128_WARPS);
    __syncthreads();
    // Registers as in linear_fast_128, which build.py checks.
    if (warp >= FAST128_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        u32 turn = warp - FAST128_WARPS;  // stages of other warps before this warp's next one
        for (u32 i = 0; i < turn; i++) ring.next();
#pragma unroll 1
        for (u32 number = blockIdx.x; number < work.pieces; number += gridDim.x) {
            const Fast128Piece piece = work.find(number);
            work.find_x(piece, lane);
            const Fast128Asking<Fast128Grouped<N>, ExpertsRing> asking(work, piece, turn, lane);
            asking.ask(0, ring, EXPERTS_X_PLACE, false);
            turn = (turn - piece.end) % FAST128_ASKING;
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const Fast128Share share;
#pragma unroll 1
    for (u32 number = blockIdx.x; number < work.pieces; number += gridDim.x) {
        const Fast128Piece piece = work.find(number);
        float sums[N / 2] = {};
        const u32 last =
            multiply_stages<N>(work.of_piece.rest, piece, EXPERTS_X_PLACE, ring, share, sums);
        release(last, lane);
        work.store(piece, share, lane, sums);
    }
}
}  // namespace df11::linear
