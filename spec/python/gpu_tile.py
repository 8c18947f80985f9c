"""Parts 1 to 4 of spec/gpu.md, written from that text and spec/format.md: arrays of `tile` tensors,
decode tables, lanes, slices. See spec/gpu_check.py.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from check_vectors import require
from df11_directory import ceil_div
from df11_directory import require as accept
from df11_tile import ESCAPE, LANES, Matrix, PairCode, Record

# The status.
NO_CODE, RECORDS, LANE_END, LAST_PAIR, EXCEPTIONS = 1, 2, 4, 8, 16


def words(data: bytes, letter: str) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data)


# --- part 1: arrays


class Tensor(Matrix):
    """The arrays and parameters of a tile tensor."""

    def __init__(
        self, arrays: list[bytes], tile_columns: int, columns: int, bit_count: int
    ) -> None:
        self.codebook, self.records, self.bitstream, self.plane = arrays
        super().__init__(tile_columns, columns, len(self.plane))
        self.bit_count = bit_count

    def offset(self, i: int) -> int:
        return int.from_bytes(self.records[32 * i : 32 * i + 6], "little")

    def bits(self, p: int, n: int) -> int:
        data = self.bitstream[p // 8 : (p + n + 7) // 8]
        return int.from_bytes(data, "little") >> p % 8 & (1 << n) - 1


# --- part 2: the decode table


UNREACHED = 1 << 31 | 31 << 15 | 1


def entry_of(length: int, value: int) -> int:
    if value == ESCAPE:
        return 1 << 31 | length << 15 | length + 16
    return value >> 8 << 23 | (value & 255) << 7 | length


def build_table(codebook: bytes) -> list[int]:
    """Builds the table of a codebook, which is checked."""
    code = PairCode(codebook)
    entries = zip(code.length_of, code.value_of)
    return [entry_of(length, value) if length else UNREACHED for length, value in entries]


def build_in_parallel(codebook: bytes) -> list[int]:
    """The same, each entry by itself; of any codebook."""
    numbers = words(codebook, "H")
    escape, counts, pairs = numbers[0], numbers[1:13], numbers[13:]
    codes, code, pair = [], 0, 0
    for length, count in enumerate(counts, 1):
        number = count + (length == escape)
        codes.append((length, code, number, pair, count))
        code, pair = 2 * (code + number), pair + count
    table = []
    for index in range(4096):
        v, entry = int(f"{index:012b}"[::-1], 2), UNREACHED
        for length, first, number, pair, count in codes:
            if v < first + number << 12 - length:
                k = (v >> 12 - length) - first
                entry = entry_of(length, pairs[pair + k] if k < count else ESCAPE)
                break
        table.append(entry)
    return table


# --- part 3: one lane


class Unit(NamedTuple):
    row: int  # in the tile, as column
    column: int
    source: int  # in the tensor's plane
    weights: int


def units(t: Tensor, i: int, lane: int) -> Iterator[Unit]:
    """The units of a lane of tile i that exist, in its order."""
    r0, c0 = t.tile_corner(i)
    h, w = min(t.tile_rows, t.rows - r0), min(t.tile_columns, t.columns - c0)
    a, g, q = (4, lane // 4, lane % 4) if t.tile_columns == 256 else (32, 0, lane)
    for u in range(32):
        b, j = (u // 8, u % 8) if t.tile_columns == 256 else (0, u)
        row, column = 8 * b + g, 8 * a * j + 8 * q
        if row >= h or column >= w:
            continue
        k = j // 2
        high, both = min(8, h - 8 * b), min(w - 16 * a * k, 16 * a)
        source = 8 * b * w + 16 * a * k * high + g * both
        source += 8 * q + min(8 * q, max(0, both - 8 * a)) + 8 * (j % 2)
        if h == t.tile_rows and w == t.tile_columns:
            require(source == 512 * (u // 2) + 16 * lane + 8 * (u % 2), "places in a whole tile")
        yield Unit(row, column, r0 * t.columns + c0 * h + source, min(8, w - column))


def merge(exponent: int, plane: int) -> int:
    return (plane & 0x80) << 8 | exponent << 7 | plane & 0x7F


def merge_pair(entry: int, s0: int, s1: int) -> int:
    twice = s0 | s0 << 8 | s1 << 16 | s1 << 24
    return twice & 0x807F807F | entry & 0x7F807F80


def look_up(t: Tensor, table: list[int], p: int) -> tuple[int, int]:
    """An entry with exponents and length, and problems."""
    e = table[t.bits(p, 12)]
    if e >> 31:
        n = e >> 15 & 31
        if n == 31:
            return 1, NO_CODE
        v = t.bits(p + n, 16)
        e = n + 16 | (v & 255) << 7 | v >> 8 << 23
    return e, 0


def decode_lane(t: Tensor, table: list[int], i: int, lane: int, at: Record, out: list[int]) -> int:
    (r0, c0), begin, status = t.tile_corner(i), at.start(lane), 0
    p = begin
    for unit in units(t, i, lane):
        to = (r0 + unit.row) * t.columns + c0 + unit.column
        for k in range(0, unit.weights, 2):
            e, problems = look_up(t, table, p)
            p += e & 63
            status |= problems
            first, second = e >> 7 & 255, e >> 23 & 255
            out[to + k] = merge(first, t.plane[unit.source + k])
            if k + 1 < unit.weights:
                s0, s1 = t.plane[unit.source + k : unit.source + k + 2]
                out[to + k + 1] = merge(second, s1)
                both = out[to + k] | out[to + k + 1] << 16
                require(merge_pair(e, s0, s1) == both, "two weights at once")
            elif first != second:
                status |= LAST_PAIR
    left = begin + at.lengths[lane] - p
    return status if 0 <= left < 1 << at.shift else status | LANE_END


def decode(t: Tensor) -> tuple[list[int], int]:
    """All weights, and the status."""
    accept(len(t.records) == 32 * (t.tile_count + 1), "records")
    accept(len(t.bitstream) == 16 * ceil_div(t.bit_count, 128), "bitstream")
    accept(t.rows * t.columns == t.elements, "plane")
    accept(t.offset(0) == 0, "the first offset")
    accept(int.from_bytes(t.records[-32:], "little") == t.bit_count, "the last record")
    table, out, status = build_table(t.codebook), [-1] * len(t.plane), 0
    for i in range(t.tile_count):
        at = Record.read(t.records[32 * i : 32 * i + 32])
        right = at.offset % 8 == 0 and at.offset <= t.offset(i + 1) <= t.bit_count
        if not right or at.end() != t.offset(i + 1):
            status |= RECORDS
        for lane in range(LANES):
            status |= decode_lane(t, table, i, lane, at, out)
    require(-1 not in out, "a weight that no lane has")
    return out, status


# --- part 4: slices


class Run(NamedTuple):
    """A slice's share of a strip: tiles, and bytes of records, bitstream, plane."""

    strip: int
    tiles: range
    records: range
    bitstream: range
    plane: range


def runs(t: Tensor, a: int, b: int, c: int, d: int) -> Iterator[Run]:
    """Rows a..b and columns c..d."""
    high, wide = t.tile_rows, t.tile_columns
    for s in range(a // high, ceil_div(b, high)):
        i, k = s * t.across + c // wide, s * t.across + ceil_div(d, wide)
        rows = min(high, t.rows - high * s)
        begin = high * s * t.columns + c * rows
        bits = range(t.offset(i) // 8, t.offset(k) // 8)
        plane = range(begin, begin + (d - c) * rows)
        yield Run(s, range(i, k), range(32 * i, 32 * (k + 1)), bits, plane)


def cut(t: Tensor, a: int, b: int, c: int, d: int) -> Tensor:
    """A slice as a tensor of its own."""
    records, bitstream, plane = b"", b"", b""
    for run in runs(t, a, b, c, d):
        for i in run.tiles:
            moved = t.offset(i) // 8 - run.bitstream.start + len(bitstream)
            records += (8 * moved).to_bytes(6, "little") + t.records[32 * i + 6 : 32 * i + 32]
        bitstream += t.bitstream[run.bitstream.start : run.bitstream.stop]
        plane += t.plane[run.plane.start : run.plane.stop]
    bit_count = 8 * len(bitstream)
    records += bit_count.to_bytes(32, "little")
    bitstream += bytes(-len(bitstream) % 16)
    return Tensor([t.codebook, records, bitstream, plane], t.tile_columns, d - c, bit_count)


def ways_to_cut(count: int, unit: int) -> list[tuple[int, int]]:
    """The whole, the first part, the last one, and one from the middle."""
    ends = [*range(0, count, unit), count]
    return sorted(
        {(0, count), (0, ends[1]), (ends[-2], count), tuple(ends[len(ends) // 2 - 1 :][:2])}
    )


def check_slices(t: Tensor, weights: list[int]) -> int:
    found = 0
    for a, b in ways_to_cut(t.rows, t.tile_rows):
        for c, d in ways_to_cut(t.columns, t.tile_columns):
            part, status = decode(cut(t, a, b, c, d))
            whole = [w for r in range(a, b) for w in weights[r * t.columns + c : r * t.columns + d]]
            require(status == 0 and part == whole, f"slice {a}..{b}, {c}..{d}")
            found += 1
    return found
