"""The encodings tile and float (sections 6.4 and 6.5 of spec/format.md): how a tensor is cut into
tiles, its code, and the decoding of tiles.

See df11_reader.py, which reads the arrays.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from df11_directory import Corrupt, ceil_div, require
from df11_gap import Read, code_table

TILE_WEIGHTS = 8192
LANES = 32
RECORD_BYTES = 32
MAX_PAIR_CODE_LENGTH = 12
ESCAPE = 1 << 16


class Unit(NamedTuple):
    """Eight neighbouring weights of one row, or fewer."""

    lane: int
    element: int
    weights: int


class Matrix:
    """The tensor as a matrix of tiles. The parameters have been checked."""

    def __init__(self, tile_columns: int, columns: int, elements: int) -> None:
        self.tile_columns, self.columns, self.elements = tile_columns, columns, elements
        self.rows, self.tile_rows = elements // columns, TILE_WEIGHTS // tile_columns
        self.across = ceil_div(columns, tile_columns)
        self.tile_count = self.across * ceil_div(self.rows, self.tile_rows)
        # A strip: consecutive weights that are whole tiles.
        self.strip_tiles = self.across if tile_columns == 256 else 1
        self.strip_elements = self.tile_rows * columns if tile_columns == 256 else TILE_WEIGHTS

    def tile_corner(self, i: int) -> tuple[int, int]:
        return self.tile_rows * (i // self.across), self.tile_columns * (i % self.across)

    def plane_start(self, i: int) -> int:
        """The first byte of a tile in the plane; for tile_count, the end of the last one."""
        if i == self.tile_count:
            return self.elements
        row, column = self.tile_corner(i)
        return row * self.columns + column * min(self.tile_rows, self.rows - row)

    def units(self, i: int) -> Iterator[Unit]:
        """The units of a tile in the order of the plane. The units of one lane keep their
        order.
        """
        first_row, first_column = self.tile_corner(i)
        for place in range(1024):
            twos, lane, odd = place // 64, place // 2 % LANES, place % 2
            row, column = 0, 256 * (2 * twos + odd) + 8 * lane
            if self.tile_columns == 256:
                row = 8 * (twos // 4) + lane // 4
                column = 32 * (2 * (twos % 4) + odd) + 8 * (lane % 4)
            row, column = first_row + row, first_column + column
            if row < self.rows and column < self.columns:
                yield Unit(lane, row * self.columns + column, min(8, self.columns - column))


class Split(NamedTuple):
    """How a float is split: its bits, and those of its exponent and of what is kept."""

    bits: int
    exponent: int
    kept: int

    def plane_bytes(self, elements: int) -> int:
        return ceil_div(elements * self.kept, 8)

    def join(self, exponents: bytes, plane: bytes, verify: bool) -> bytes:
        """The weights of a unit, of their exponents and its part of the plane."""
        rest, out, low = int.from_bytes(plane, "little"), bytearray(), self.kept - 1
        for exponent in exponents:
            require(exponent < 1 << self.exponent, f"an exponent of {exponent}")
            kept, rest = rest & (1 << self.kept) - 1, rest >> self.kept
            magnitude = exponent << low | kept & (1 << low) - 1
            zero_bits = self.bits - self.exponent - self.kept
            weight = kept >> low << self.bits - 1 | magnitude << zero_bits
            out += weight.to_bytes(self.bits // 8, "little")
        require(not verify or not rest, "bits after the last weight of a unit are not zero")
        return bytes(out)


class PairCode:
    """The code of a tensor: lengths and values of pairs, or ESCAPE, by the next 12 bits."""

    def __init__(self, codebook: bytes) -> None:
        numbers = struct.unpack(f"<{len(codebook) // 2}H", codebook)
        escape, counts, values = numbers[0], numbers[1:13], numbers[13:]
        require(escape <= MAX_PAIR_CODE_LENGTH, f"an escape of {escape} bits")
        require(sum(counts) == len(values), f"{len(values)} values for {sum(counts)} codes")
        lengths = [length for length, count in enumerate(counts, start=1) for _ in range(count)]
        codes, self.coded = list(zip(lengths, values)), set(values)
        require(codes == sorted(codes), "values do not ascend")
        require(len(self.coded) == len(values), "a pair occurs twice")
        codes = sorted([*codes, *([(escape, ESCAPE)] if escape else [])])
        self.length_of, self.value_of = code_table(codes, MAX_PAIR_CODE_LENGTH)


class Record(NamedTuple):
    """The record of a tile, with the lengths of its lanes in bits."""

    offset: int
    least: int
    shift: int
    excess: list[int]
    lengths: list[int]

    @staticmethod
    def read(data: bytes) -> "Record":
        bits = int.from_bytes(data, "little")
        offset, least, shift = bits & (1 << 48) - 1, bits >> 48 & 0x1FFF, bits >> 61 & 7
        excess = [bits >> 64 + 6 * lane & 63 for lane in range(LANES)]
        return Record(offset, least, shift, excess, [least + (e << shift) for e in excess])

    def start(self, lane: int) -> int:
        return self.offset + sum(self.lengths[:lane])

    def end(self) -> int:
        return ceil_div(self.start(LANES), 8) * 8


class Tile:
    """A tile or float tensor, whose parameters have been checked."""

    def __init__(
        self, parameters: tuple[int, ...], elements: int, split: Split, read: Read
    ) -> None:
        tile_columns, columns, self.bit_count, _ = parameters
        self.matrix, self._read = Matrix(tile_columns, columns, elements), read
        self.split, self.size = split, split.bits // 8
        self.code = PairCode(read(0))

    def decode(self, start: int, end: int, verify: bool = False) -> bytes:
        """The weights of some elements, of the strips that hold them."""
        m = self.matrix
        low, high = start // m.strip_elements, ceil_div(end, m.strip_elements)
        first, last = low * m.strip_tiles, min(high * m.strip_tiles, m.tile_count)
        records, base = self._records(first, last), low * m.strip_elements
        out = bytearray(self.size * (m.plane_start(last) - base))
        for i, record in zip(range(first, last), records):
            units = list(m.units(i))
            exponents = self._exponents(units, record, verify)
            part = (self.split.plane_bytes(m.plane_start(at)) for at in (i, i + 1))
            plane = self._read(3, *part)
            for unit in units:
                place, own = self.size * (unit.element - base), self.split.plane_bytes(unit.weights)
                made = self.split.join(exponents[unit], plane[:own], verify)
                out[place : place + len(made)], plane = made, plane[own:]
        return bytes(out[self.size * (start - base) : self.size * (end - base)])

    def verify(self, _: bytes) -> None:
        """Checks that decoding does not make."""
        self.decode(0, self.matrix.elements, verify=True)
        tail = self._read(2, self.bit_count // 8)
        require(not tail.strip(b"\0"), "bits from bit_count on are not zero")

    def _records(self, first: int, last: int) -> list[Record]:
        """The records of tiles `first` to `last` and the one after them, checked."""
        data = self._read(1, RECORD_BYTES * first, RECORD_BYTES * (last + 1))
        records = [Record.read(data[at : at + 32]) for at in range(0, len(data), RECORD_BYTES)]
        require(first or records[0].offset == 0, "the first tile is not at bit 0")
        for record, after in zip(records, records[1:]):
            right = record.offset % 8 == 0 and after.offset <= self.bit_count
            require(right and record.end() == after.offset, "a tile does not end at the next one")
        if last == self.matrix.tile_count:
            end = int.from_bytes(data[-RECORD_BYTES:], "little")
            require(end == self.bit_count, "the last record is not bit_count and zeros")
        return records

    def _exponents(self, units: list[Unit], record: Record, verify: bool) -> dict[Unit, bytes]:
        first, by_lane = record.offset // 8, [[] for _ in range(LANES)]
        data = self._read(2, first, record.end() // 8)
        for unit in units:
            by_lane[unit.lane].append(unit)
        exponents, used, pos = {}, [], 0
        for mine, length in zip(by_lane, record.lengths):
            start = pos
            for unit in mine:
                exponents[unit], pos = self._unit(unit, data, pos, verify)
            used.append(pos - start)
            require(0 <= length - used[-1] < 1 << record.shift, f"{length} bits for {used[-1]}")
            require(not verify or not bits_at(data, pos, length - used[-1]), "after a lane")
            pos = start + length
        if verify:
            require(not bits_at(data, pos, -pos % 8), "bits after the last lane are not zero")
            shift = 0
            while any(ceil_div(bits - min(used), 1 << shift) > 63 for bits in used):
                shift += 1
            require((record.least, record.shift) == (min(used), shift), "least and shift")
        return exponents

    def _unit(self, unit: Unit, data: bytes, pos: int, verify: bool) -> tuple[bytes, int]:
        """The exponents of a unit, and the bit after it."""
        exponents = bytearray()
        for _ in range(ceil_div(unit.weights, 2)):
            index = bits_at(data, pos, MAX_PAIR_CODE_LENGTH)
            value, length = self.code.value_of[index], self.code.length_of[index]
            if not length:
                raise Corrupt("no code matches")
            pos += length
            if value == ESCAPE:
                value = bits_at(data, pos, 16)
                pos += 16
                require(not verify or value not in self.code.coded, "a pair with a code is escaped")
            exponents += value.to_bytes(2, "little")
        odd = unit.weights % 2 and exponents[-1] != exponents[-2]
        require(not odd, "the last pair of an odd unit has two exponents")
        return bytes(exponents[: unit.weights]), pos


def bits_at(data: bytes, pos: int, count: int) -> int:
    """Bits past the end of the data are zero."""
    word = int.from_bytes(data[pos >> 3 : (pos + count + 7) >> 3], "little")
    return word >> (pos & 7) & (1 << count) - 1
