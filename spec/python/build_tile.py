"""A tiny encoder of the tile encoding for tests, written from section 6.4 of spec/format.md; it
shares no code with the reader.

Bits are text, the first one first. A Tile keeps what its record says apart from its bits, so that a
test can change either.
"""

import struct
from collections import Counter
from dataclasses import dataclass, field

from build import code_lengths_of

ESCAPE = 65536


@dataclass
class Tile:
    lanes: list[str]
    plane: bytes
    least: int = 0
    shift: int = 0
    excess: list[int] = field(default_factory=list)
    padding: str = "0"

    def describe(self, shift: int = 0) -> None:
        """The record that a writer must make, except that its shift is at least this."""
        lengths = [len(lane) for lane in self.lanes]
        self.least, self.shift = min(lengths), shift
        while -(-(max(lengths) - self.least) >> self.shift) > 63:
            self.shift += 1
        self.excess = [-(-(length - self.least) >> self.shift) for length in lengths]

    def bits(self) -> str:
        """The lanes, each cut or filled to the length that the record gives it."""
        ends = [self.least + (excess << self.shift) for excess in self.excess]
        out = "".join(
            lane[:end] + self.padding * (end - len(lane)) for lane, end in zip(self.lanes, ends)
        )
        return out + self.padding * (-len(out) % 8)


def number(bits: str) -> int:
    return int(bits[::-1] or "0", 2)


def mirrored(value: int, width: int) -> str:
    return f"{value:0{width}b}"[::-1]


class Tiles:
    """A tensor in tiles. Pairs that occur less than `least` times are escaped; `fix` may change
    values of pairs (by tile and lane) and say which to escape in any case.
    """

    def __init__(
        self,
        data: bytes,
        tile_columns: int,
        columns: int,
        least: int = 2,
        pairs: list | None = None,
        fix=None,
    ) -> None:
        weights = struct.unpack(f"<{len(data) // 2}H", data)
        self.tile_columns, self.columns = tile_columns, columns
        cut = list(self._cut(weights))
        values = [
            [[v for unit in lane for v in self._pairs(unit)] for lane in lanes] for lanes, _ in cut
        ]
        forced: set[tuple[int, int, int]] = set()
        if fix:
            fix(values, forced)
        if pairs is None:
            counts = Counter(v for lanes in values for lane in lanes for v in lane)
            symbols = {v: n for v, n in counts.items() if n >= least}
            rest = sum(counts.values()) - sum(symbols.values())
            lengths = code_lengths_of(symbols | ({ESCAPE: rest} if rest or forced else {}), 12)
        else:
            lengths = {value: length for length, value in pairs}
        self.escape = lengths.pop(ESCAPE, 0)
        self.pairs = sorted((length, value) for value, length in lengths.items())
        code = self._codes()

        def bits(tile: int, lane: int, k: int, value: int) -> str:
            if value in code and (tile, lane, k) not in forced:
                return code[value]
            return code[ESCAPE] + mirrored(value, 16)

        self.tiles = []
        for i, (_, plane) in enumerate(cut):
            lanes = [
                "".join(bits(i, l, k, v) for k, v in enumerate(lane))
                for l, lane in enumerate(values[i])
            ]
            self.tiles.append(Tile(lanes, plane))
            self.tiles[-1].describe()

    def _cut(self, weights: tuple[int, ...]):
        """Units by lane, and the plane, of each tile."""
        rows, tile_rows = len(weights) // self.columns, 8192 // self.tile_columns
        for top in range(0, rows, tile_rows):
            for left in range(0, self.columns, self.tile_columns):
                lanes: list[list[tuple[int, ...]]] = [[] for _ in range(32)]
                plane = bytearray()
                for band, j_even, lane in (
                    (b, j, l) for b in range(4) for j in range(0, 32, 2) for l in range(32)
                ):
                    for j in (j_even, j_even + 1):
                        if self.tile_columns == 256:
                            row, column, there = (
                                top + 8 * band + lane // 4,
                                left + 32 * j + lane % 4 * 8,
                                j < 8,
                            )
                        else:
                            row, column, there = top, left + 256 * j + 8 * lane, band == 0
                        if there and row < rows and column < self.columns:
                            at = row * self.columns + column
                            unit = weights[at : at + min(8, self.columns - column)]
                            lanes[lane].append(unit)
                            plane += bytes(w >> 8 & 0x80 | w & 0x7F for w in unit)
                yield lanes, bytes(plane)

    @staticmethod
    def _pairs(unit: tuple[int, ...]) -> list[int]:
        exponents = [w >> 7 & 0xFF for w in unit]
        exponents += exponents[-1:] * (len(unit) % 2)
        return [a + 256 * b for a, b in zip(exponents[::2], exponents[1::2])]

    def _codes(self) -> dict[int, str]:
        out, code, before = {}, 0, 0
        for length, value in sorted(self.pairs + ([(self.escape, ESCAPE)] if self.escape else [])):
            code <<= length - before
            out[value], code, before = f"{code:0{length}b}", code + 1, length
        return out

    def arrays(self) -> tuple[list[tuple[int, bytearray]], list[int]]:
        """(kind of section, bytes) of the four arrays, and the parameters."""
        counts = [sum(of_pair == length for of_pair, _ in self.pairs) for length in range(1, 13)]
        codebook = struct.pack(
            f"<{13 + len(self.pairs)}H", self.escape, *counts, *(value for _, value in self.pairs)
        )
        records, stream, plane = bytearray(), "", b""
        for tile in self.tiles:
            fields = [
                (len(stream), 48),
                (tile.least, 13),
                (tile.shift, 3),
                *((e, 6) for e in tile.excess),
            ]
            records += number("".join(mirrored(*f) for f in fields)).to_bytes(32, "little")
            stream += tile.bits()
            plane += tile.plane
        records += len(stream).to_bytes(32, "little")
        bits = number(stream).to_bytes(-(-len(stream) // 128) * 16, "little")
        arrays = [
            (1, bytearray(codebook)),
            (2, records),
            (3, bytearray(bits)),
            (4, bytearray(plane)),
        ]
        return arrays, [self.tile_columns, self.columns, len(stream), 0]
