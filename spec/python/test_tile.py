"""Tests of the tile encoding: what the tiny encoder of build_tile.py makes is read back, and what
breaks a rule is refused at its level.

Run: python3 -m unittest discover -s spec/python
"""

import random
import struct
import unittest
from collections.abc import Callable

from build import Draft, Source, draft
from build_tile import Tiles
from df11_reader import Container, Corrupt, FormatError
from test_reader import ALL_PATTERNS, weights

BIG = 2**64 - 1


def one(
    tiles: Tiles, data: bytes, shape: tuple[int, ...] | None = None, change: Callable | None = None
) -> Draft:
    """A container of one tensor; `change` may edit its arrays and parameters."""
    arrays, parameters = tiles.arrays()
    if change:
        change([array for _, array in arrays], parameters)
    return draft([Source("t", "BF16", shape or (len(data) // 2,), data, tile=(arrays, parameters))])


def spread(rows: int, columns: int) -> bytes:
    """Rows with few exponents and with many, so that shift is not 0."""
    r = random.Random(5)
    spreads = [r.choice((0.05, 0.1, 3.0)) for _ in range(rows)]
    return b"".join(weights(columns, i, s) for i, s in enumerate(spreads))


class RoundTrip(unittest.TestCase):
    def check(self, data: bytes, tile_columns: int, columns: int, **options: object) -> Container:
        c = Container(one(Tiles(data, tile_columns, columns, **options), data).pack())
        self.assertEqual(c.tensor("t"), data)
        self.assertEqual(c.verify(), [])
        return c

    def test_matrices(self) -> None:
        for rows, columns in [
            (32, 256),
            (33, 264),
            (31, 248),
            (1, 8),
            (70, 8),
            (2, 1000),
            (64, 16),
        ]:
            for least in (1, 3):
                self.check(weights(rows * columns, rows), 256, columns, least=least)

    def test_rows_of_any_length(self) -> None:
        for count in [*range(1, 20), 255, 256, 257, 511, 513, 8191, 8192, 8193, 8200]:
            self.check(weights(count, count), 8192, count)

    def test_all_patterns(self) -> None:
        self.check(ALL_PATTERNS, 256, 256)
        self.check(ALL_PATTERNS[:40000], 8192, 20000)

    def test_one_pair_and_the_escape_alone(self) -> None:
        data = struct.pack("<100H", *(127 << 7 | i for i in range(100)))
        self.assertEqual(self.check(data, 8192, 100).arrays[1].length, 28)
        self.assertEqual(self.check(data, 8192, 100, least=BIG).arrays[1].length, 26)
        self.check(weights(300), 8192, 300, least=BIG)

    def test_4096_codes_of_12_bits(self) -> None:
        pairs = [(12, e | f << 8) for e in range(64) for f in range(64)]
        data = struct.pack("<8200H", *((i * 37 % 64) << 7 | i % 128 for i in range(8200)))
        self.check(data, 8192, 8200, pairs=pairs)

    def test_unused_codes(self) -> None:
        data = weights(100)
        (_, first), *_, (_, last) = Tiles(data, 8192, 100, least=1).pairs
        self.check(data, 8192, 100, pairs=[(2, 65536), (2, 5), (2, first), (2, last)])
        pair = struct.pack("<100H", *[127 << 7] * 100)
        self.check(pair, 8192, 100, pairs=[(1, 65536), (1, 127 * 257)])

    def test_shift(self) -> None:
        data = spread(64, 256)
        tiles = Tiles(data, 256, 256)
        self.assertGreater(max(tile.shift for tile in tiles.tiles), 0)
        self.check(data, 256, 256)

    def test_rows(self) -> None:
        data = weights(100 * 264, 5)
        c = Container(one(Tiles(data, 256, 264), data, (100, 264)).pack())
        linear = Container(one(Tiles(data, 8192, 26400), data, (100, 264)).pack())
        other = Container(one(Tiles(data, 256, 24), data, (100, 264)).pack())
        for container in (c, linear, other):
            for first, count in [(0, 1), (31, 1), (31, 2), (64, 36), (99, 1), (5, 0)]:
                part = data[528 * first : 528 * (first + count)]
                self.assertEqual(container.rows("t", first, count), part)

    def test_rows_touch_only_their_strips(self) -> None:
        data = weights(100 * 264, 5)

        def change(arrays: list[bytearray], _: list[int]) -> None:
            arrays[1][32 * 2 : 32 * 3] = bytes(32)  # the first tile of the second strip
            arrays[1][-1] = 1

        c = Container(one(Tiles(data, 256, 264), data, (100, 264), change).pack())
        self.assertEqual(c.rows("t", 70, 20), data[528 * 70 : 528 * 90])
        for first in (31, 32, 97):  # the offset after the first strip, the record, the last record
            with self.assertRaises(Corrupt):
                c.rows("t", first, 1)


# Broken rules on 64 x 512 weights, four tiles. Arrays: codebook 0, records 1, bitstream 2, plane 3.
Change = Callable[[list[bytearray], list[int]], None]


def cut(array: int, length: int) -> Change:
    return lambda arrays, _: arrays[array].__delitem__(slice(length, None))


def grow(array: int, length: int) -> Change:
    return lambda arrays, _: arrays[array].extend(bytes(length))


def parameter(k: int, value: int) -> Change:
    return lambda _, parameters: parameters.__setitem__(k, value)


def byte(array: int, at: int, change: Callable[[int], int]) -> Change:
    return lambda arrays, _: arrays[array].__setitem__(at, change(arrays[array][at]))


def codebook(escape: int, counts: dict[int, int], values: list[int]) -> Change:
    numbers = [escape, *(counts.get(length, 0) for length in range(1, 13)), *values]

    def change(arrays: list[bytearray], _: list[int]) -> None:
        arrays[0][:] = struct.pack(f"<{len(numbers)}H", *numbers)

    return change


BROKEN_AT_OPEN: list[tuple[str, Change]] = [
    ("tile_columns", parameter(0, 128)),
    ("tile_columns of a row", parameter(0, 8192)),
    ("columns 0", parameter(1, 0)),
    ("columns no multiple of 8", parameter(1, 4)),
    ("columns no divisor", parameter(1, 24)),
    ("columns huge", parameter(1, 2**63)),
    ("bit_count 0", parameter(2, 0)),
    (
        "bit_count less than pairs",
        lambda a, p: (p.__setitem__(2, 16376), a[2].__delitem__(slice(2048, None))),
    ),
    ("bit_count no multiple of 8", lambda _, p: p.__setitem__(2, p[2] - 4)),
    ("bit_count 2^48", parameter(2, 2**48)),
    ("bit_count of a longer bitstream", lambda _, p: p.__setitem__(2, p[2] + 128)),
    ("a fourth parameter", parameter(3, 1)),
    ("codebook too short", cut(0, 24)),
    ("codebook odd", grow(0, 1)),
    ("codebook too long", lambda a, _: a[0].__setitem__(slice(None), bytes(26 + 2 * 4097))),
    ("records too short", cut(1, 128)),
    ("records too long", grow(1, 32)),
    ("bitstream too long", grow(2, 16)),
    ("plane too short", cut(3, 64 * 512 - 1)),
]

BROKEN_AT_LOAD: list[tuple[str, Change]] = [
    ("no codes", codebook(0, {}, [])),
    ("escape of 13 bits", codebook(13, {1: 2}, [5, 6])),
    ("single code of 2 bits", codebook(0, {2: 1}, [5])),
    ("single escape of 2 bits", codebook(2, {}, [])),
    ("too many codes", codebook(1, {1: 2}, [5, 6])),
    ("too few codes", codebook(1, {2: 1}, [5])),
    ("fewer codes than values", codebook(0, {1: 2}, [5, 6, 7])),
    ("more codes than values", codebook(0, {1: 3}, [5, 6])),
    ("values descend", codebook(0, {1: 2}, [6, 5])),
    ("values are equal", codebook(0, {1: 2}, [6, 6])),
    ("a value with two codes", codebook(0, {1: 1, 2: 2}, [6, 5, 6])),
    ("a single code for many", codebook(0, {1: 1}, [6])),
    ("first offset", byte(1, 0, lambda _: 8)),
    ("offset between bytes", byte(1, 32, lambda v: v + 1)),
    ("offset too large", byte(1, 32 + 5, lambda _: 255)),
    ("offset of another tile", byte(1, 64, lambda v: v ^ 8)),
    ("last offset", byte(1, 128, lambda v: v ^ 8)),
    ("last record has least", byte(1, 128 + 6, lambda _: 1)),
    ("last record has an excess", byte(1, 159, lambda _: 128)),
    ("least", byte(1, 32 + 6, lambda v: v ^ 1)),
    ("an excess", byte(1, 32 + 8, lambda v: v ^ 1)),
    ("bit_count one tile less", lambda _, p: p.__setitem__(2, p[2] - 8)),
]


class Broken(unittest.TestCase):
    def setUp(self) -> None:
        self.data = spread(64, 512)
        self.tiles = Tiles(self.data, 256, 512)

    def assert_at(self, level: str, d: Draft) -> None:
        if level == "open":
            with self.assertRaises(Corrupt):
                Container(d.pack())
            return
        c = Container(d.pack())
        if level == "load":
            with self.assertRaises(Corrupt):
                c.tensor("t")
            return
        c.tensor("t")
        with self.assertRaises(Corrupt):
            c.verify()

    def test_open(self) -> None:
        for about, change in BROKEN_AT_OPEN:
            with self.subTest(about):
                self.assert_at("open", one(self.tiles, self.data, change=change))

    def test_other_tensors(self) -> None:
        d = one(self.tiles, self.data)
        d.tensors[0]["dtype"] = 14
        self.assert_at("open", d)
        d = one(self.tiles, self.data)
        d.tensors[0]["shape"][0] = 0
        self.assert_at("open", d)

    def test_load(self) -> None:
        for about, change in BROKEN_AT_LOAD:
            with self.subTest(about):
                self.assert_at("load", one(self.tiles, self.data, change=change))

    def test_lengths_of_lanes(self) -> None:
        tile = self.tiles.tiles[1]
        self.assertGreater(tile.shift, 0)
        low = tile.excess.index(0)
        tile.excess[low] += 1
        self.assert_at("load", one(self.tiles, self.data))
        tile.describe()
        tile.excess[tile.excess.index(max(tile.excess))] -= 1
        self.assert_at("load", one(self.tiles, self.data))

    def test_odd_units(self) -> None:
        def fix(values: list[list[list[int]]], _: set) -> None:
            values[0][0][-1] ^= 256

        data = weights(3)
        self.assert_at("load", one(Tiles(data, 8192, 3, least=1, fix=fix), data))

    def test_a_bit_without_a_code(self) -> None:
        data = struct.pack("<6H", *[127 << 7] * 6)
        self.assert_at("load", one(Tiles(data, 8192, 6), data, change=byte(2, 0, lambda v: v | 2)))

    def test_verify(self) -> None:
        tile = self.tiles.tiles[1]
        room = next(
            l
            for l, e in enumerate(tile.excess)
            if tile.least + (e << tile.shift) > len(tile.lanes[l])
        )

        def least() -> None:
            if max(tile.excess) < 63:
                tile.least -= 1 << tile.shift
                tile.excess = [e + 1 for e in tile.excess]
            else:
                tile.least -= 1
                tile.excess = [-(-(len(lane) - tile.least) >> tile.shift) for lane in tile.lanes]

        def padding() -> None:
            tile.lanes[room] += "1"

        changes: list[tuple[str, Callable[[], None]]] = [
            ("shift is one more", lambda: tile.describe(tile.shift + 1)),
            ("shift is 7", lambda: tile.describe(7)),
            ("least", least),
            ("a bit behind the last pair of a lane", padding),
        ]
        for about, change in changes:
            with self.subTest(about):
                self.setUp()
                tile = self.tiles.tiles[1]
                change()
                self.assert_at("verify", one(self.tiles, self.data))

    def test_bits_behind_a_tile_and_behind_all(self) -> None:
        data = weights(3)
        tiles = Tiles(data, 8192, 3, least=1)
        self.assertEqual(tiles.arrays()[1][2], 8)
        self.assert_at("verify", one(tiles, data, change=byte(2, 0, lambda v: v | 128)))
        self.assert_at("verify", one(tiles, data, change=byte(2, 1, lambda v: v | 1)))
        self.assert_at("verify", one(tiles, data, change=byte(2, 15, lambda v: v | 128)))

    def test_a_pair_that_has_a_code_is_escaped(self) -> None:
        data = weights(600)

        def fix(values: list[list[list[int]]], forced: set) -> None:
            forced.add((0, 3, 1))

        self.assert_at("verify", one(Tiles(data, 8192, 600, least=1, fix=fix), data))

    def test_random_contents_are_safe(self) -> None:
        """Hostile arrays with checksums that fit: a typed error, or some bytes of the right length.
        """
        r = random.Random(7)
        data = weights(3000, 9)
        arrays, parameters = Tiles(data, 8192, 3000).arrays()
        for _ in range(300):
            changed = [(kind, bytearray(array)) for kind, array in arrays]
            content = changed[r.randrange(3)][1]
            for _ in range(r.choice((1, 2, 50))):
                content[r.randrange(len(content))] = r.choice((0, 1, 255, r.randrange(256)))
            c = Container(
                draft([Source("t", "BF16", (3000,), data, tile=(changed, parameters))]).pack()
            )
            try:
                self.assertEqual(len(c.tensor("t")), len(data))
            except FormatError:
                pass


if __name__ == "__main__":
    unittest.main()
