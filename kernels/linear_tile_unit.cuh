// Work of a warp on the tiles that it decodes (linear_tile_16.cuh): the place of each lane's bits,
// weights from bits, products, and their sums.
#pragma once
#include "linear_tile_block.cuh"

namespace df11::linear {
// Extent of a lane's bits; position 30 is the first staged bit. From bit 20 on, `end` has the
// number of bits that may remain after the last code.
struct LaneBits {
    u32 position, end;
};
constexpr u32 LEFT_SHIFT = 20;
// Checks that the lane's codes end where its record says.
__device__ inline u32 check_end(LaneBits bits, u32 position) {
    const u32 end = bits.end & (1u << LEFT_SHIFT) - 1;
    return end - position > bits.end >> LEFT_SHIFT ? STATUS_LANE_END : 0;
}

// A tile's bits in the bitstream.
struct TileBits {
    u64 byte;   // byte of the first bit, rounded down to a multiple of 16
    u32 bytes;  // bytes that exist from there on
    LaneBits lane;
};
__device__ inline TileBits find_bits(const Record& r, u64 bits_bytes, u32 lane, u32& problems) {
    const u64 begin = r.head & OFFSET_MASK, end = r.next_head & OFFSET_MASK;
    const u32 shift = u32(r.head >> 61),
              length = (u32(r.head >> 48) & 0x1FFF) + (excess_of(r, lane) << shift);
    TileBits at;
    at.byte = min(begin >> 3 & ~15ull, bits_bytes);
    const u64 wanted = end > begin ? ((end + 7) >> 3) - (begin >> 3 & ~15ull) : 0;
    at.bytes = u32(min(min(wanted, bits_bytes - at.byte), u64(1) << 20));
    const u32 sum = inclusive_sum(length, lane);
    if (at.bytes != wanted || begin % 8 != 0 ||
        (lane == LANES - 1 && ((sum + 7) & ~7u) != end - begin))
        problems |= STATUS_RECORDS;
    at.lane.position = (u32(begin) & 127) + sum - length + POSITION_OF_BIT_0;
    at.lane.end = at.lane.position + length | (1u << shift) - 1 << LEFT_SHIFT;
    return at;
}

// Returns the entry of a window's first code, which begins two bits above the window's end.
// `table`: offset of its table in bytes.
__device__ __forceinline__ u32 entry_at(u32 table, u32 window) {
    return *reinterpret_cast<const u32*>(linear_shared + ((window & INDEX_MASK) | table));
}

// A lane's next bits, 96 of them from the word with `position` on. Words are read in order.
struct Window {
    u32 w0, w1, w2;
    u32 position;    // position of the next bit in w0
    u32 next, last;  // shared addresses: of the word after w2, and of the last word there is
    u32 table;       // offset for entry_at
    // `bits`: shared address of the first staged bits.
    __device__ void begin(u32 of_table, u32 bits, u32 bytes, u32 from) {
        table = of_table;
        const u32 at = bits - 4 + min(from >> 5, (bytes - 16) / 4) * 4;
        w0 = load_shared(at), w1 = load_shared(at + 4), w2 = load_shared(at + 8);
        next = at + 12, last = bits + bytes - 4, position = from & 31;
    }
    __device__ void refill() {
        w0 = w1, w1 = w2, w2 = load_shared(next), next = min(next + 4, last);
    }
    // Returns the position, counted as in LaneBits; none if the window met the end of the slot.
    __device__ u32 place(u32 bits) const {
        return next == last ? ~0u : (next - 12 - (bits - 4)) * 8 + position;
    }
};

// Decodes four pairs one by one, however many bits they take.
__device__ __forceinline__ void decode_long_unit(Window& bits, u32 (&e)[4]) {
#pragma unroll 1
    for (u32 i = 0; i < 4; i++) {
        const u32 low = __funnelshift_r(bits.w0, bits.w1, bits.position);
        u32 entry = entry_at(bits.table, low), length = entry & LENGTH_MASK;
        if (int(entry) < 0) entry = escaped(entry, low >> (flagged(entry) + 2));
        length += bits.position, bits.position = length & 31;
        if (length >= 32) bits.refill();
        e[0] = e[1], e[1] = e[2], e[2] = e[3], e[3] = entry;
    }
}

// The bit that, of entries with FLAG, only NO_CODE has: escapes have at most TABLE_BITS bits.
constexpr u32 NO_CODE_BIT = 1u << 19;
static_assert(TABLE_BITS < 16 && (NO_CODE & 16) && STATUS_NO_CODE == 1, "a bit tells");

// Decodes four pairs, which take at most 48 bits without escapes.
__device__ __forceinline__ void decode_unit(Window& bits, u32 (&e)[4], u32& problems) {
    const u32 before = bits.position;
    u32 low[4], high = __funnelshift_r(bits.w1, bits.w2, bits.position);
    low[0] = __funnelshift_r(bits.w0, bits.w1, bits.position);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        e[i] = entry_at(bits.table, low[i]);
        if (i == 3) break;
        low[i + 1] = __funnelshift_r(low[i], high, e[i]), high = __funnelshift_r(high, 0, e[i]);
    }
    // Correct in seven bits, unless there are several escapes.
    u32 position = e[0] + e[1] + before + e[2] + e[3];
    // Rare: an escape, or more bits than one refill makes up for.
    if (position & (RARE_SUM | 64)) {
        const u32 total = (position - before) & 127;
        const bool fits = total <= WINDOW_BITS;
        if (fits) problems |= (e[0] | e[1] | e[2] | e[3]) / NO_CODE_BIT & STATUS_NO_CODE;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 raw = __funnelshift_r(low[i], 0, e[i] >> 15),  // two bits short
                escape = (raw << 5 & 0x7F80) | (raw << 13 & 0x7F800000);
            e[i] = int(e[i]) < 0 ? escape : e[i];
        }
        position = before + total;
        if (!fits) {
            decode_long_unit(bits, e);
            position = bits.position;
            if (int(e[0] | e[1] | e[2] | e[3]) < 0) problems |= STATUS_NO_CODE;
        }
        if (position >= 64) position -= 32, bits.refill();
    }
    bits.position = position & 31;
    if (position & 32) bits.refill();
}

// Makes A fragments of a unit of x. With eight rows, the lane's 16 bytes are a whole fragment as
// they are: one product is right in the first eight rows of sums, the other in the last eight, and
// the other halves are unused. With 16 rows, two fragments have the same pairs in the same places,
// so that a row has the same bits in either case.
template <u32 EIGHTS>
__device__ __forceinline__ void make_fragments(uint4 (&x)[EIGHTS], u32 lane) {
    if (EIGHTS == 1) return;
    // A zero that the assembler cannot recognise: it would otherwise move words again for each
    // product, because the registers of a fragment are side by side.
    const u32 zero = lane >> 5;
    const uint4 low = x[0], high = x[EIGHTS - 1];
    x[0] = make_uint4(low.x | zero, high.x | zero, low.z | zero, high.z | zero);
    x[EIGHTS - 1] = make_uint4(low.y | zero, high.y | zero, low.w | zero, high.w | zero);
}
template <u32 EIGHTS>
struct Sums {
    float even[4] = {}, odd[4] = {};
    // `x`: from make_fragments.
    __device__ __forceinline__ void add(const uint4& w, const uint4 (&x)[EIGHTS]) {
        const uint4 &a = x[0], &b = x[EIGHTS - 1];
        multiply(even, a.x, a.y, a.z, a.w, w.x, w.z);
        multiply(odd, b.x, b.y, b.z, b.w, w.y, w.w);
    }
    // Returns the sums of two rows of weights by a row of x.
    __device__ __forceinline__ float2 of(u32 eight) const {
        const u32 at = eight * 2, other = EIGHTS == 1 ? 2 : at;
        return make_float2(even[at] + odd[other], even[at + 1] + odd[other + 1]);
    }
};
__device__ inline uint4 merge_words(const u32 (&e)[4], u32 p0, u32 p1) {
    return make_uint4(merge_fields(__byte_perm(p0, 0, 0x1100), e[0]),
                      merge_fields(__byte_perm(p0, 0, 0x3322), e[1]),
                      merge_fields(__byte_perm(p1, 0, 0x1100), e[2]),
                      merge_fields(__byte_perm(p1, 0, 0x3322), e[3]));
}

// Place of a row of the strip among the sums of a row of x; rotated, so that lanes never conflict
// in a bank.
__device__ inline u32 run_place(u32 x_row, u32 row) { return row ^ x_row % 4 * BAND_ROWS; }
// Offset of a lane's sums of the first band.
__device__ inline u32 sums_place(u32 lane) {
    return (lane / 4 * RUN_PITCH + run_place(lane / 4, 0) + lane % 4 * 2) * 4;
}

// Adds a band's sums to the run's. `to`: shared address of the run's sums; `place`: from
// sums_place.
template <u32 EIGHTS>
__device__ __forceinline__ void keep_sums(u32 to, u32 place, const Sums<EIGHTS>& sums, u32 band,
                                          bool first, u32 x_rows, u32 lane) {
    to += place ^ band * BAND_ROWS * 4;
#pragma unroll
    for (u32 i = 0; i < EIGHTS; i++) {
        const u32 two = to + i * 8 * RUN_PITCH * 4;
        if (lane / 4 + 8 * i >= x_rows) continue;
        float2 sum = sums.of(i);
        if (!first) {
            const uint2 before = load_shared_8(two);
            sum.x += __uint_as_float(before.x), sum.y += __uint_as_float(before.y);
        }
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(two), "f"(sum.x), "f"(sum.y)
                     : "memory");
    }
}

// Loads 16 bytes of the plane if they exist; otherwise `to` stays.
__device__ __forceinline__ void load_plane_where(uint4& to, const u8* from, bool exists) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p "
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
        : "l"(from), "r"(u32(exists)));
}

// Loads 16 bytes of x if that row exists; otherwise `x` stays, and nothing of it is used.
__device__ __forceinline__ void load_x_where(uint4& x, u64 from, bool exists) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
        : "l"(from), "r"(u32(exists)));
}

// Tiles that are decoded slowly, with the same bits of y.

// Loads a lane's eight columns of a row of x.
__device__ __forceinline__ uint4 load_x(const SharedTiles& work, u32 row, u32 column,
                                        bool aligned) {
    if (row >= work.launch.x_rows) return make_uint4(0, 0, 0, 0);
    const u16* from = work.launch.x + row * work.launch.x_pitch + column;
    if (aligned) return __ldg(reinterpret_cast<const uint4*>(from));
    return load_x_slow(from, 8);
}

// Loads the plane bytes of a lane's unit of any tile that has `width` columns, and `rows` in the
// band.
__device__ inline uint2 load_unit_plane(const u8* plane, u32 width, u32 rows, u32 band, u32 unit,
                                        u32 lane) {
    const u32 g = lane / 4, q = lane % 4;
    // In each row of the band, the pair of units has `both` columns after `before`.
    const u32 before = unit / 2 * 2 * STEP_COLUMNS, both = min(width - before, 2 * STEP_COLUMNS);
    const u32 of_lanes = min(8 * q, both) + min(max(both, STEP_COLUMNS) - STEP_COLUMNS, 8 * q);
    const u32 of_lane = unit % 2 ? min(both - 8 * q, 8u) : 0;
    plane += band * BAND_ROWS * width + rows * before + g * both + of_lanes + of_lane;
    return __ldg(reinterpret_cast<const uint2*>(plane));
}

// A lane's part of a tile that is at an edge, has an x that is not aligned, or has more bits than
// the slot takes. Reads the bits from the slot, or from where they are stored.
struct EdgeTile {
    u32 height, width;
    const u8* plane;
    bool aligned;  // whether x is aligned
    const u32* words;
    u32 count, position;
    LaneBits lane;
    template <class Launch>
    __device__ __forceinline__ EdgeTile(const Shared<Launch>& work, const TilePlace& at, u32 bits,
                                        u32 bits_bytes, u32 of_lane, u32& problems)
        : height(rows_left(work, at)), width(columns_left(work, at)) {
        const LinearMatrix& m = work.launch.matrices[at.matrix];
        plane = plane_of(m.data, m.whole_columns, m.first_column, at.strip, at.tile, height);
        aligned = has_aligned_x(work.launch);
        const TileBits found = find_bits(load_record(record_of(m, at.strip, at.tile), of_lane),
                                         m.rest_count, of_lane, problems);
        words = static_cast<const u32*>(m.rest) + found.byte / 4;
        if (found.bytes + BITS_AFTER <= bits_bytes)
            words = reinterpret_cast<const u32*>(linear_shared +
                                                 (bits - shared_address(linear_shared)));
        count = (found.bytes + 3) / 4, lane = found.lane;
        position = found.lane.position - POSITION_OF_BIT_0;
    }
    __device__ u32 word(u32 i) const { return i < count ? words[i] : 0; }
    __device__ __forceinline__ void decode_unit(u32 table, u32 (&e)[4], u32& problems) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 window =
                __funnelshift_r(word(position / 32), word(position / 32 + 1), position);
            e[i] = entry_at(table, window << 2);
            if (int(e[i]) < 0) e[i] = escaped(e[i], window >> flagged(e[i]));
            if (int(e[i]) < 0) problems |= STATUS_NO_CODE;
            position += e[i] & LENGTH_MASK;
        }
    }
    // Rows of a band that exist.
    __device__ u32 rows(u32 band) const {
        return min(max(height, band * BAND_ROWS) - band * BAND_ROWS, BAND_ROWS);
    }
    __device__ u32 check() const { return check_end(lane, position + POSITION_OF_BIT_0); }
};

// Multiplies by an EdgeTile. Returns problems.
template <u32 EIGHTS>
__device__ __noinline__ u32 multiply_edge(const SharedTiles work, TilePlace at, u32 table, u32 bits,
                                          u32 bits_bytes, u32 to, bool first, u32 lane) {
    const u32 g = lane / 4, q = lane % 4;
    u32 problems = 0;
    EdgeTile tile(work, at, bits, bits_bytes, lane, problems);
    const u32 width = tile.width;
#pragma unroll 1
    for (u32 band = 0; band < BANDS; band++) {
        const u32 rows = tile.rows(band);
        Sums<EIGHTS> sums;
        uint2 p[BAND_UNITS];
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            if (g < rows && unit * STEP_COLUMNS + 8 * q < width)
                p[unit] = load_unit_plane(tile.plane, width, rows, band, unit, lane);
        }
#pragma unroll
        for (u32 unit = 0; unit < BAND_UNITS; unit++) {
            const u32 first = unit * STEP_COLUMNS + 8 * q;
            uint4 w = make_uint4(0, 0, 0, 0), x[EIGHTS];
#pragma unroll
            for (u32 i = 0; i < EIGHTS; i++)
                x[i] = first < width
                           ? load_x(work, g + 8 * i, at.tile * TILE_COLUMNS + first, tile.aligned)
                           : w;
            make_fragments(x, lane);
            if (g < rows && first < width) {
                u32 e[4];
                tile.decode_unit(table, e, problems);
                w = merge_words(e, p[unit].x, p[unit].y);
            }
            __syncwarp();
            sums.add(w, x);
        }
        keep_sums<EIGHTS>(to, sums_place(lane), sums, band, first, work.launch.x_rows, lane);
    }
    return problems | tile.check();
}
}  // namespace df11::linear
