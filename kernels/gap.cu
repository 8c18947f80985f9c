// Decodes the `gap` layout (spec/format.md 6.3) into BF16: any set of tensors or element ranges in
// one launch.
//
//   grid      one persistent CUDA block per slot; each takes one contiguous share of all thread
//             blocks ("units") of all tasks
//   warp      decodes a thread block of the file alone, 32 of its threads per round; a group of
//             four warps shares each of the last ones
//   round     1 load     bits: global -> registers, one round ahead -> rows; word j of lane l in
//                        bank l
//             2 decode   two codes per look-up, four exponents per word -> slots; word k of lane l
//                        in bank l; counts codes
//             3 sum      adds up the lanes' counts to find where each lane's weights go: the
//                        paper's two phases with one decoding
//             4 copy     meanwhile brings the plane by cp.async, over the rows
//             5 join     slots -> registers -> one run of bytes, in place
//             6 merge    run + plane -> 16-byte stores, contiguous over the warp
//
//   shared memory per warp, T = 32:  stage 4160 | rows 1536 or plane 3584          7744 bytes
//                 per block:         BlockMemory                                  17136 bytes
//
// Budget (kernels/ptx/gap.sm_90.cubin; H200, one launch, L2 cold, B = 128):
//   T    warps x blocks per SM  registers   spilled     BF16 out / copy rate
//   8    16 x 2                  61         none        0.318
//   16   16 x 2                  64         none        0.427
//   32   12 x 2                  80         32 bytes    0.433   1,816 of 4,190 GB/s; the default
//   64   12 x 1                 145         none        0.350
// A block may also have fewer warps than these. The host chooses the number with which most warps
// run at once (src/gpu/fit.rs). On the same H200, limited to the shared memory of compute
// capability
//   8.0                T = 32:  8 x 2  0.382     T = 64:  9 x 1  0.290
//   8.6, 8.9, 12.0     T = 32: 10 x 1  0.287     T = 64:  5 x 1  0.186     T = 16: 16 x 1  0.333
// Limits, and what was tried and rejected: benches/record/2026-11-20-gap-kernel-h200.md.
//
// Safety on any content: loads are bounded by thread_count, elements and thread_blocks, window
// positions by POSITION_MASK, stores by element_begin and element_end, slots by Shape::slots; each
// step consumes a bit. Contradictions set bits of the status word. A tensor has at most 2^32 thread
// blocks (2 TiB of bitstream).
#include "gap_thread.cuh"

namespace df11::gap {
// T: bytes per thread.
template <u32 T>
struct Shape {
    static constexpr u32 bits = 8 * T;
    static constexpr u32 words = T / 4;
    // Rows of a column: one unused, the thread's words, and three more for windows past its end.
    static constexpr u32 rows = 1 + words + 3;
    // Slots of four codes that a thread stages: enough for two bits per code or more. The slow path
    // decodes shorter codes.
    static constexpr u32 slots = T;
    // Plane bytes that a warp stages; it reads the rest of a longer run from global memory.
    static constexpr u32 plane_bytes = T * 112;
    // Most warps per block, and blocks per multiprocessor that its registers allow.
    static constexpr u32 max_warps = T <= 16 ? 16 : 12;
    static constexpr u32 blocks = T == 64 ? 1 : 2;
    static constexpr u32 group_warps = 4;
    static_assert(max_warps <= MAX_WARPS && max_warps / group_warps < 16,
                  "room for all, and a barrier for each group");
};

// Shared memory of a warp. Its plane overwrites its bits, which are decoded by then.
template <u32 T>
struct alignas(16) WarpMemory {
    u32 stage[Shape<T>::slots * LANES + 16];
    union {
        u32 rows[Shape<T>::rows * LANES];
        u8 plane[Shape<T>::plane_bytes];
    };
};

// WarpMemory of all warps of the block.
extern __shared__ uint4 shared_warps[];

// Extent of one thread's codes, in bits from the thread's first bit; start = end if there is
// nothing to decode.
struct Extent {
    u32 start, end;
};

// A thread's bits on their way to shared memory, and the word after them; zeros after the tensor's
// end.
template <u32 T>
struct Fetched {
    u32 words[Shape<T>::words + 1];
    u32 gaps, next_gaps;  // bytes that hold the gaps of this thread and the next
};

template <u32 T>
__device__ inline void fetch(const GapTask& task, u64 thread, u32 lane, Fetched<T>& to) {
    const u64 thread_count = (task.bit_count + (Shape<T>::bits - 1)) / Shape<T>::bits;
    const u8* from = task.bitstream + thread * T;
#pragma unroll
    for (u32 word = 0; word <= Shape<T>::words; word++) to.words[word] = 0;
    to.gaps = to.next_gaps = 0;
    if (thread < thread_count) {
        if constexpr (T == 8) {
            uint2 part = __ldcs(reinterpret_cast<const uint2*>(from));
            to.words[0] = part.x;
            to.words[1] = part.y;
        } else {
#pragma unroll
            for (u32 i = 0; i < T / 16; i++) {
                uint4 part = __ldcs(reinterpret_cast<const uint4*>(from) + i);
                to.words[4 * i] = part.x;
                to.words[4 * i + 1] = part.y;
                to.words[4 * i + 2] = part.z;
                to.words[4 * i + 3] = part.w;
            }
        }
        to.gaps = __ldg(task.gaps + (thread >> 1));
    }
    if (lane == LANES - 1 && thread + 1 < thread_count) {
        to.words[Shape<T>::words] = __ldg(reinterpret_cast<const u32*>(from + T));
        to.next_gaps = __ldg(task.gaps + (thread + 1 >> 1));
    }
}

// Stores a thread's bits in its column and returns the extent of its codes.
template <u32 T>
__device__ inline Extent place(const GapTask& task, u64 thread, u32 lane, Fetched<T>& from,
                               u32 column) {
    // The word and the gap after a thread's own are its neighbour's first. Even threads, in even
    // lanes, have their gap in the low half of a byte.
    u32 next_word = __shfl_down_sync(ALL_LANES, from.words[0], 1);
    u32 next_gaps = __shfl_down_sync(ALL_LANES, from.gaps, 1);
    if (lane < LANES - 1) {
        from.words[Shape<T>::words] = next_word;
        from.next_gaps = next_gaps;
    }
    const u32 shift = lane % 2 * 4;
    const u32 gap = from.gaps >> shift & 15;
    const u32 next_gap = from.next_gaps >> (shift ^ 4) & 15;
#pragma unroll
    for (u32 word = 0; word <= Shape<T>::words; word++)
        store_shared(column + (word + 1) * 128, from.words[word]);
    const u64 first_bit = thread * Shape<T>::bits;
    if (task.bit_count > first_bit + Shape<T>::bits) return {gap, Shape<T>::bits + next_gap};
    return {gap, task.bit_count > first_bit ? u32(task.bit_count - first_bit) : 0};
}

// Decodes a lane's codes into its slots, four per slot. Returns how many codes start before its
// end.
template <u32 T>
__device__ inline u32 decode_lane(const Bits& bits, const Extent& mine, u32 slot, u32& problems) {
    if (mine.start >= mine.end) {
        if (mine.start != mine.end) problems |= STATUS_THREAD_END;
        return 0;
    }
    u32 position = POSITION_OF_BIT_0 + mine.start;
    const u32 end = POSITION_OF_BIT_0 + mine.end;
    const u32 first_slot = slot;
    const u32 slots_end = slot + Shape<T>::slots * 128;
    u32 one, two;
    do {
        u32 window = bits.window(position);
        one = bits.entry(window);
        u32 rest = __funnelshift_r(window, 0, one);
        two = bits.entry(rest);
        // A pair that does not fit has length 0, so the second look-up repeats it.
        if (pair_length(two) == 0) {
            u32 after = position + pair_length(one);
            if (pair_length(one) == 0) {
                one = decode_long_pair(bits, position, window, one, problems);
                after = position + pair_length(one);
                two = bits.entry(bits.window(after));
            }
            if (pair_length(two) == 0)
                two = decode_long_pair(bits, after, bits.window(after), two, problems);
        }
        if (slot < slots_end) store_shared(slot, __byte_perm(one, two, 0x7632));
        slot += 128;
        position += one + two;
    } while ((position & POSITION_MASK) < end);
    // One of the last four codes must end where the next thread starts.
    u32 fourth = position & POSITION_MASK;
    u32 second = fourth - pair_length(two), third = second + first_length(two);
    u32 first = second - pair_length(one) + first_length(one);
    if (first != end && second != end && third != end && fourth != end)
        problems |= STATUS_THREAD_END;
    // It must start in this thread's bits: a gap names the first code of the next thread, though a
    // gap that names a later code would decode to the same weights.
    u32 last = fourth == end   ? third
               : third == end  ? second
               : second == end ? first
                               : second - pair_length(one);
    if (last >= POSITION_OF_BIT_0 + Shape<T>::bits) problems |= STATUS_THREAD_END;
    return (slot - first_slot) / 32 - (first >= end) - (second >= end) - (third >= end);
}

// Joins the lanes' slots into one run of bytes; this lane's begins at byte `start` of the stage.
template <u32 T>
__device__ inline void join_lanes(u32* stage, u32 lane, u32 count, u32 start) {
    constexpr u32 slots = Shape<T>::slots;
    u32 words[slots];
#pragma unroll
    for (u32 slot = 0; slot < slots; slot++)
        words[slot] = 4 * slot < count ? stage[slot * LANES + lane] : 0;
    __syncwarp();
    // A word belongs to the lane of its first byte; bytes of later lanes are overwritten below.
    const u32 inside = start & 3, shift = inside * 8;
    u32* to = stage + (start >> 2);
    if (inside == 0 && count > 0) to[0] = words[0];
#pragma unroll
    for (u32 slot = 1; slot < slots; slot++)
        if (4 * slot < inside + count)
            to[slot] = __funnelshift_l(words[slot - 1], words[slot], shift);
    if (4 * slots < inside + count) to[slots] = words[slots - 1] >> (32 - shift);
    __syncwarp();
    u8* bytes = reinterpret_cast<u8*>(stage) + start;
#pragma unroll
    for (u32 byte = 0; byte < 3; byte++)
        if (inside != 0 && inside + byte < 4 && byte < count)
            bytes[byte] = u8(words[0] >> 8 * byte);
    __syncwarp();
}

// Destination of a run of decoded exponents. Bytes `begin` to `end` of the stage are wanted; its
// first byte belongs to the first one of `plane` and of `output`. `aligned` tells whether the plane
// allows copies of 16 bytes.
struct Run {
    u32 begin, end;
    const u8* plane;
    u16* output;
    u32 staged;  // plane bytes that are staged, a multiple of 16
    bool aligned;
};

template <u32 T>
__device__ inline Run clip(const GapTask& task, u64 element, u32 skip, u32 count) {
    Run run;
    run.begin = skip;
    run.end = skip + count;
    if (element < task.element_begin) {
        u64 before = task.element_begin - element;
        run.begin = before < count ? skip + u32(before) : run.end;
    }
    u64 left = element < task.element_end ? task.element_end - element : 0;
    if (left < count) run.end = skip + u32(left);
    run.plane = task.plane + (element - skip);
    run.output = task.output + (element - skip - task.element_begin);
    const u64 in_array = task.elements - (element - skip);
    run.staged = in_array < Shape<T>::plane_bytes ? u32(in_array) / 16 * 16 : Shape<T>::plane_bytes;
    run.aligned = (reinterpret_cast<u64>(task.plane) | task.element_begin) % 16 == 0;
    return run;
}

// Starts copying the plane of a run into shared memory, 16 bytes per lane.
__device__ inline void stage_plane(const Run& run, u32 plane, u32 lane) {
    if (run.begin >= run.end) return;
    const u32 end = min(run.end, run.staged);
    for (u32 at = run.begin / 16 * 16 + lane * 16; at < end; at += LANES * 16)
        copy_async(plane + at, run.plane + at);
    commit_copies();
}

__device__ inline uint4 merge_eight(uint2 exponents, uint2 plane) {
    return {merge_pair<0>(exponents.x, plane.x), merge_pair<1>(exponents.x, plane.x),
            merge_pair<0>(exponents.y, plane.y), merge_pair<1>(exponents.y, plane.y)};
}

// Merges a run with its staged plane, eight weights per store.
template <u32 T>
__device__ inline void write_run(const Run& run, const WarpMemory<T>& mine, u32 lane) {
    const u8* exponents = reinterpret_cast<const u8*>(mine.stage);
    if (run.begin >= run.end) return;
    if (!run.aligned) {
        for (u32 at = run.begin + lane; at < run.end; at += LANES)
            run.output[at] = merge_one(exponents[at], __ldg(run.plane + at));
        return;
    }
    const u32 first = (run.begin + 7) / 8;
    const u32 last = run.end / 8;
    const u32 staged = min(last, run.staged / 8);
    const uint2* stage = reinterpret_cast<const uint2*>(mine.stage);
    uint4* output = reinterpret_cast<uint4*>(run.output);
    u32 unit = first + lane;
#pragma unroll 4
    for (; unit < staged; unit += LANES)
        output[unit] =
            merge_eight(stage[unit], reinterpret_cast<const uint2*>(mine.plane)[unit]);
    for (; unit < last; unit += LANES)
        output[unit] =
            merge_eight(stage[unit], __ldcs(reinterpret_cast<const uint2*>(run.plane) + unit));
    // Up to seven weights at each end, one lane each.
    const u32 head_end = min(8 * first, run.end);
    const u32 tail = max(8 * last, head_end);
    const u32 edge = lane < 8 ? run.begin + lane : tail + lane - 8;
    if (lane < 8 ? edge < head_end : lane < 16 && edge < run.end) {
        u32 plane = edge < run.staged ? mine.plane[edge] : __ldg(run.plane + edge);
        run.output[edge] = merge_one(exponents[edge], plane);
    }
}

// Writes a run that overflows the slots because its codes average less than two bits: each lane
// decodes again, code by code, straight into the output.
__device__ __noinline__ void write_slowly(const GapTask& task, u32 column, u32 position,
                                          u64 element, u32 count) {
    const Bits bits = {column, block_address()};
    u32 problems = 0;
    for (u32 i = 0; i < count; i++, element++) {
        u32 code = decode_one(bits, position & POSITION_MASK, problems);
        position += pair_length(code);
        if (element >= task.element_begin && element < task.element_end)
            task.output[element - task.element_begin] =
                merge_one(code >> 16, __ldg(task.plane + element));
    }
}

// Decodes this CUDA block's share of one task, `unit_count` thread blocks, with groups of G warps.
template <u32 T, u32 G>
__device__ inline void decode_units(u32 first_unit, u32 unit_count, u32* status) {
    const u32 address = block_address();
    BlockMemory& block = *static_cast<BlockMemory*>(__cvta_shared_to_generic(address));
    const GapTask& task = block.task;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const u32 group = warp / G;
    const u32 member = warp % G;
    const u32 groups = blockDim.x / (G * LANES);
    WarpMemory<T>& mine = reinterpret_cast<WarpMemory<T>*>(shared_warps)[warp];
    // Kept in a register: the compiler would compute it again at each use.
    u32 column = u32(__cvta_generic_to_shared(mine.rows + lane));
    asm volatile("" : "+r"(column));
    const u32 plane = column - lane * 4;
    const u32 slots = column - u32(sizeof mine.stage);
    const Bits bits = {column, address};
    u32 problems = 0, parity = 0;

    // Warps outside a whole group take no unit.
    u32 unit = group < groups ? group : unit_count, round = 0;
    u64 base = 0;
    u32 left = 0;  // weights of the unit still to decode
    Fetched<T> fetched;
    auto thread_of = [&](u32 unit, u32 round) {
        return (task.first_thread_block + (first_unit + unit)) * task.threads_per_block +
               (round * G + member) * LANES + lane;
    };
    if (unit < unit_count) fetch<T>(task, thread_of(unit, 0), lane, fetched);
    while (unit < unit_count) {
        if (round == 0) {
            const u64* offsets =
                task.output_offsets + task.first_thread_block + (first_unit + unit);
            base = __ldg(offsets);
            const u64 next = __ldg(offsets + 1);
            // Thread blocks' weights follow each other; the first and the last block must reach the
            // ends of the range.
            const u32 block = first_unit + unit;
            if (next > task.elements || (block == 0 && base > task.element_begin) ||
                (block + 1 == u32(task.thread_blocks) && next < task.element_end))
                problems |= STATUS_OFFSETS;
            left = next - base >> 32 ? ~0u : u32(next - base);
        }
        const Extent extent = place<T>(task, thread_of(unit, round), lane, fetched, column);
        const u32 position = POSITION_OF_BIT_0 + extent.start;
        if (extent.start != 0 && thread_of(unit, round) == 0) problems |= STATUS_THREAD_END;
        const u32 count = decode_lane<T>(bits, extent, slots, problems);
        u32 start = inclusive_sum(count, lane);
        const u32 total = __shfl_sync(ALL_LANES, start, LANES - 1);
        start -= count;

        u64 element = base;
        if constexpr (G == 1) {
            base += total;
            left -= total;
        } else {
            u32* totals = block.totals[parity] + group * G;
            if (lane == 0) totals[member] = total;
            group_barrier(group, G * LANES);
            parity ^= 1;
#pragma unroll
            for (u32 other = 0; other < G; other++) {
                base += totals[other];
                left -= totals[other];
                if (other < member) element += totals[other];
            }
        }

        const bool overflow = __any_sync(ALL_LANES, count > 4 * Shape<T>::slots);
        const u32 skip = u32(element - task.element_begin) % 16;
        if (overflow) {
            write_slowly(task, column, position, element + start, count);
        } else {
            const Run run = clip<T>(task, element, skip, total);
            if (run.aligned) stage_plane(run, plane, lane);
            join_lanes<T>(mine.stage, lane, count, skip + start);
        }
        // The next bits travel while the warp writes these weights.
        round++;
        if (round * G * LANES == task.threads_per_block) {
            if (left != 0) problems |= STATUS_BLOCK_END;
            round = 0;
            unit += groups;
        }
        if (unit < unit_count) fetch<T>(task, thread_of(unit, round), lane, fetched);
        wait_for_copies();
        __syncwarp();
        if (!overflow) write_run<T>(clip<T>(task, element, skip, total), mine, lane);
        __syncwarp();
    }
    if (problems != 0) atomicOr(status, problems);
}

// Finds the last task that begins at or before a unit.
__device__ inline u32 find_task(const GapTask* tasks, u32 task_count, u64 unit) {
    u32 low = 0, high = task_count;
    while (low + 1 < high) {
        u32 middle = low + (high - low) / 2;
        if (tasks[middle].first_unit <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <u32 T>
__device__ inline void decode_tasks(const GapTask* tasks, u32 task_count, u64 unit_count,
                                    u32* status, u64 output) {
    // Each block takes one contiguous share of all units.
    u64 each = unit_count / gridDim.x, rest = unit_count % gridDim.x;
    u64 begin = each * blockIdx.x + min(u64(blockIdx.x), rest);
    const u64 end = begin + each + (blockIdx.x < rest);
    u32 index = find_task(tasks, task_count, begin);
    while (begin < end && index < task_count) {
        __syncthreads();
        copy_to_shared(&shared_block.task, tasks + index, sizeof(GapTask));
        copy_to_shared(&shared_block.table, tasks[index].table, sizeof(GapTable));
        __syncthreads();
        if (threadIdx.x == 0)
            shared_block.task.output =
                reinterpret_cast<u16*>(reinterpret_cast<u64>(shared_block.task.output) + output);
        __syncthreads();
        const u64 task_end =
            min(end, shared_block.task.first_unit + shared_block.task.thread_blocks);
        // Each warp takes whole thread blocks while there is one for each warp; then a group of
        // warps shares one, so that no warp idles long. Thread blocks of 64 threads are too small
        // to share; CUDA blocks with fewer warps than a group do not share either.
        const u32 first = u32(begin - shared_block.task.first_unit);
        const u32 units = u32(task_end - begin);
        const u32 group_threads = Shape<T>::group_warps * LANES;
        const bool share =
            shared_block.task.threads_per_block >= group_threads && blockDim.x >= group_threads;
        const u32 alone = share ? units - units % (blockDim.x / LANES) : units;
        decode_units<T, 1>(first, alone, status);
        if (share) decode_units<T, Shape<T>::group_warps>(first + alone, units - alone, status);
        begin = max(begin, task_end);
        index++;
    }
}

#define GAP_KERNEL(T)                                                                          \
    extern "C" __global__ void __launch_bounds__(Shape<T>::max_warps* LANES, Shape<T>::blocks) \
        df11_gap_decode_##T(const GapTask* tasks, u32 task_count, u64 unit_count, u32* status, \
                            u64 output) {                                                      \
        decode_tasks<T>(tasks, task_count, unit_count, status, output);                        \
    }
GAP_KERNEL(8)
GAP_KERNEL(16)
GAP_KERNEL(32)
GAP_KERNEL(64)

// Finds the code at the start of `valid` bits. Returns its length, 0 if there is none.
__device__ inline u32 find_code(const GapTable& table, u32 bits, u32 valid, u32& symbol) {
    u32 code = __brev(bits) >> 16;
    for (u32 length = 1; length <= valid; length++)
        if (code < table.limits[length]) {
            symbol =
                table.symbols[(code >> (MAX_CODE_LENGTH - length)) + table.bases[length] & 0xFF];
            return length;
        }
    return 0;
}

// Derives decode tables from code lengths, the first 256 bytes of each codebook, when a tensor is
// loaded. One block per table, with any number of threads.
extern "C" __global__ void df11_gap_tables(const TableTask* tasks) {
    __shared__ u8 lengths[SYMBOLS];
    GapTable& table = *static_cast<GapTable*>(tasks[blockIdx.x].table);
    for (u32 symbol = threadIdx.x; symbol < SYMBOLS; symbol += blockDim.x) {
        lengths[symbol] = tasks[blockIdx.x].codebook[symbol];
        table.symbols[symbol] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // RFC 1951, 3.2.2, with codes left-aligned in 16 bits.
        u32 code = 0, count = 0;
        table.limits[0] = table.bases[0] = 0;
        for (u32 length = 1; length <= MAX_CODE_LENGTH; length++) {
            table.bases[length] = count - (code >> (MAX_CODE_LENGTH - length));
            for (u32 symbol = 0; symbol < SYMBOLS; symbol++)
                if (lengths[symbol] == length) {
                    table.symbols[count++ & 0xFF] = u8(symbol);
                    code += 1u << (MAX_CODE_LENGTH - length);
                }
            table.limits[length] = code;
        }
    }
    __syncthreads();
    for (u32 index = threadIdx.x; index < TABLE_ENTRIES; index += blockDim.x) {
        u32 first = 0, second = 0, entry = 0;
        u32 one = find_code(table, index, TABLE_BITS, first);
        if (one != 0) {
            u32 two = find_code(table, index >> one, TABLE_BITS - one, second);
            entry = first << 16 | one << 10;
            if (two != 0) entry |= second << 24 | one + two;
        }
        table.pairs[index] = entry;
    }
}

// Values that the host needs; src/gpu/module.rs has the same fields.
struct Constants {
    struct {
        u32 task = sizeof(GapTask);
        u32 table = sizeof(GapTable);
        u32 table_task = sizeof(TableTask);
    } bytes;
    // For each T: bytes of shared memory per warp, and most warps per block.
    u32 warp[4] = {sizeof(WarpMemory<8>), sizeof(WarpMemory<16>), sizeof(WarpMemory<32>),
                   sizeof(WarpMemory<64>)};
    u32 max_warps[4] = {Shape<8>::max_warps, Shape<16>::max_warps, Shape<32>::max_warps,
                         Shape<64>::max_warps};
};
extern "C" {
__constant__ Constants df11_gap_constants = {};
}
}  // namespace df11::gap
