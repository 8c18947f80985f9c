"""The tile encoding (section 6.4 of spec/format.md): how a tensor is cut into tiles, its code, and
the decoding of one tile.

See df11_reader.py, which reads the arrays.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from df11_directory import Corrupt, ceil_div

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
        self.across, self.down = (
            ceil_div(columns, tile_columns),
            ceil_div(self.rows, self.tile_rows),
        )
        self.tile_count = self.across * self.down
        # A strip: consecutive weights that are whole tiles.
        self.strip_tiles = self.across if tile_columns == 256 else 1
        self.strip_elements = self.tile_rows * columns if tile_columns == 256 else TILE_WEIGHTS

    def tile_corner(self, i: int) -> tuple[int, int]:
        return self.tile_rows * (i // self.across), self.tile_columns * (i % self.across)

    def plane_start(self, i: int) -> int:
        """Where the bytes of a tile begin in the plane; for tile_count, where the last one ends."""
        if i == self.tile_count:
            return self.elements
        row, column = self.tile_corner(i)
        return row * self.columns + column * min(self.tile_rows, self.rows - row)

    def units(self, i: int) -> Iterator[Unit]:
        """The units of a tile in the order of the plane. Those of one lane come in the order of the
        lane.
        """
        first_row, first_column = self.tile_corner(i)
        bands, js = (4, 8) if self.tile_columns == 256 else (1, 32)
        for band in range(bands):
            for k in range(js // 2):
                for lane in range(LANES):
                    for j in (2 * k, 2 * k + 1):
                        if self.tile_columns == 256:
                            row, column = 8 * band + lane // 4, 32 * j + 8 * (lane % 4)
                        else:
                            row, column = 0, 256 * j + 8 * lane
                        row, column = first_row + row, first_column + column
                        if row < self.rows and column < self.columns:
                            yield Unit(
                                lane, row * self.columns + column, min(8, self.columns - column)
                            )


class PairCode:
    """The code of a tensor: a table from the next 12 bits of the bitstream to code length and value
    of a pair, or ESCAPE.
    """

    def __init__(self, codebook: bytes, at: int) -> None:
        def require(holds: bool, word: int, message: str) -> None:
            if not holds:
                raise Corrupt("codebook", at + 2 * word, message)

        numbers = struct.unpack(f"<{len(codebook) // 2}H", codebook)
        escape, counts, self.values = numbers[0], numbers[1:13], numbers[13:]
        require(escape <= MAX_PAIR_CODE_LENGTH, 0, f"an escape of {escape} bits")
        require(
            sum(counts) == len(self.values), 1, f"{len(self.values)} values for {sum(counts)} codes"
        )
        lengths = [length for length, count in enumerate(counts, start=1) for _ in range(count)]
        codes = list(zip(lengths, self.values))
        for k, (before, code) in enumerate(zip(codes, codes[1:]), start=14):
            require(before < code, k, "values do not ascend")
        self.coded = set(self.values)
        require(len(self.coded) == len(self.values), 13, "a pair occurs twice")
        if escape:
            codes = sorted([*codes, (escape, ESCAPE)])
        whole = 1 << MAX_PAIR_CODE_LENGTH
        total = sum(whole >> length for length, _ in codes)
        require(
            total == whole or [length for length, _ in codes] == [1],
            0,
            "the code lengths do not form a code",
        )
        self.length_of, self.value_of = [0] * whole, [0] * whole
        code, before_length = 0, 0
        for length, value in codes:
            code <<= length - before_length
            mirrored = int(f"{code:0{length}b}"[::-1], 2)
            for index in range(mirrored, whole, 1 << length):
                self.length_of[index], self.value_of[index] = length, value
            code, before_length = code + 1, length


class Record(NamedTuple):
    offset: int
    least: int
    shift: int
    excess: tuple[int, ...]

    @staticmethod
    def read(data: bytes) -> "Record":
        bits = int.from_bytes(data, "little")
        excess = tuple(bits >> 64 + 6 * lane & 63 for lane in range(LANES))
        return Record(bits & (1 << 48) - 1, bits >> 48 & 0x1FFF, bits >> 61 & 7, excess)

    def lengths(self) -> list[int]:
        return [self.least + (excess << self.shift) for excess in self.excess]

    def start(self, lane: int) -> int:
        return self.offset + sum(self.lengths()[:lane])

    def end(self) -> int:
        return ceil_div(self.offset + sum(self.lengths()), 8) * 8


class TileBits:
    """The pairs of one tile, decoded: exponents by unit, and what verification needs."""

    def __init__(
        self, units: list[Unit], code: PairCode, record: Record, data: bytes, origin: int, at: int
    ) -> None:
        """`data` begins at bit `origin` of the bitstream, at byte `at` of the file."""
        self.record, self._data, self._origin, self._at = record, data, origin, at
        self.escaped: set[int] = set()
        self.used: list[int] = []  # bits of the pairs of each lane
        self.exponents: dict[int, bytes] = {}  # by the unit's element
        self._code = code
        by_lane: list[list[Unit]] = [[] for _ in range(LANES)]
        for unit in units:
            by_lane[unit.lane].append(unit)
        start = record.offset - origin
        for lane, length in enumerate(record.lengths()):
            pos = start
            for unit in by_lane[lane]:
                pos = self._unit(unit, pos)
            self.used.append(pos - start)
            if not 0 <= length - self.used[-1] < 1 << record.shift:
                raise Corrupt(
                    f"lane {lane}", self._byte(start), f"{length} bits for pairs of {self.used[-1]}"
                )
            start += length

    def _byte(self, pos: int) -> int:
        return self._at + pos // 8

    def _bits(self, pos: int, count: int) -> int:
        """Bits past the end of the data are zero."""
        return (
            int.from_bytes(self._data[pos >> 3 : (pos + count + 7) >> 3], "little") >> (pos & 7)
            & (1 << count) - 1
        )

    def _unit(self, unit: Unit, pos: int) -> int:
        exponents = bytearray()
        for _ in range(ceil_div(unit.weights, 2)):
            index = self._bits(pos, MAX_PAIR_CODE_LENGTH)
            value, length = self._code.value_of[index], self._code.length_of[index]
            if not length:
                raise Corrupt("bitstream", self._byte(pos), "no code matches")
            pos += length
            if value == ESCAPE:
                value = self._bits(pos, 16)
                self.escaped.add(value)
                pos += 16
            exponents += value.to_bytes(2, "little")
        if unit.weights % 2 and exponents[-1] != exponents[-2]:
            raise Corrupt(
                "bitstream", self._byte(pos), "the last pair of an odd unit has two exponents"
            )
        self.exponents[unit.element] = bytes(exponents[: unit.weights])
        return pos

    def verify(self) -> None:
        """What 6.4 leaves to verification, except the zeros from bit_count on."""
        record, pos = self.record, self.record.offset - self._origin
        if self.escaped & self._code.coded:
            raise Corrupt("bitstream", self._byte(pos), "a pair that has a code is escaped")
        least = min(self.used)
        shift = 0
        while any(ceil_div(bits - least, 1 << shift) > 63 for bits in self.used):
            shift += 1
        if (record.least, record.shift) != (least, shift):
            found = f"least {record.least} and shift {record.shift}, not {least} and {shift}"
            raise Corrupt("records", self._at, found)
        for lane, (length, used) in enumerate(zip(record.lengths(), self.used)):
            if self._bits(pos + used, length - used):
                raise Corrupt(f"lane {lane}", self._byte(pos), "not zero behind its last pair")
            pos += length
        if self._bits(pos, -pos % 8):
            raise Corrupt("bitstream", self._byte(pos), "not zero behind the last lane of a tile")
