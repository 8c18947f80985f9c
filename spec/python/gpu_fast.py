"""Parts 6 and 7 of spec/gpu.md, written from that text: the fast layout, and products by the
fragments of mma.m16n8k16. See spec/gpu_check.py.
"""

import random
import struct
from typing import NamedTuple

from df11_directory import ceil_div
from df11_tile import LANES
from gpu_tile import EXCEPTIONS, Tensor, require, words

WORD = 0xFFFFFFFF

# --- part 6: the fast layout

M, K = 0x807F807F, 0x07800780


def rotl(x: int, n: int) -> int:
    return (x << n | x >> 32 - n) & WORD


def rotr(x: int, n: int) -> int:
    return rotl(x, 32 - n)


class Fast(NamedTuple):
    rows: int
    columns: int
    data: bytes
    heads: bytes
    exceptions: bytes
    patches: bytes = b""

    @property
    def steps(self) -> int:
        return ceil_div(self.columns, 32)

    @property
    def tiles(self) -> int:
        return ceil_div(self.columns, 256)

    @property
    def places(self) -> int:
        return min(4 * self.tiles, 512)

    def bits_per_weight(self) -> float:
        stored = len(self.data) + len(self.heads) + len(self.patches) + len(self.exceptions)
        return 8 * stored / (self.rows * self.columns)


def encode_row(pairs: list[int], codes: list[int]) -> tuple[int, int, int]:
    """Word 0, word 1 and codes of eight weights."""
    f = [codes[2 * i] << 7 | codes[2 * i + 1] << 23 for i in range(4)]
    word0 = pairs[0] & M | rotr(pairs[1] & M, 8)
    word1 = pairs[2] & M | rotr(pairs[3] & M, 8)
    return word0, word1, f[0] | f[1] >> 4 | rotl(f[2], 8) | rotl(f[3] >> 4, 8)


def exponents_of(codes: int, base: int) -> list[int]:
    """The exponents of four double weights, in their places; other bits hold anything."""
    b, o, low = base * 0x00800080, rotr(codes, 8), K >> 4
    x = [b - (codes & K), b - ((codes & low) << 4), b - (o & K), b - ((o & low) << 4)]
    return [word & WORD for word in x]


def decode_row(word0: int, word1: int, codes: int, base: int) -> list[int]:
    """Four pairs."""
    others = [word0, rotl(word0, 8), word1, rotl(word1, 8)]
    return [s & M | e & (M ^ WORD) for s, e in zip(others, exponents_of(codes, base))]


def best_base(exponents: list[int]) -> int:
    counts = [0] * 256
    for exponent in exponents:
        counts[exponent] += 1
    return max((sum(counts[b - 15 : b + 1]), b) for b in range(15, 256))[1]


def columns_of(lane: int) -> list[int]:
    """Columns of a step that a lane has, ascending."""
    return [8 * (k // 2) + 2 * (lane % 4) + k % 2 for k in range(8)]


def pack_step(rows: list[list[list[int]]], base: int) -> tuple[bytes, list[int]]:
    """Data of a step, and its exceptions: weight, and place in the step. rows[lane][r]: as many of
    eight weights as exist."""
    words0, words1, words2, outside = [], [], [], []
    for lane in range(LANES):
        packed = []
        for r, w in enumerate(rows[lane]):
            codes = [15] * 8
            for k, weight in enumerate(w):
                codes[k] = base - (weight >> 7 & 255)
                if not 0 <= codes[k] <= 15:
                    codes[k] = 0
                    outside.append((lane << 5 | r << 3 | k) << 16 | weight)
            eight = w + [0] * (8 - len(w))
            pairs = [eight[i] | eight[i + 1] << 16 for i in (0, 2, 4, 6)]
            packed.append(encode_row(pairs, codes))
        words0 += [*packed[0][:2], *packed[1][:2]]
        words1 += [*packed[2][:2], *packed[3][:2]]
        words2 += [p[2] for p in packed]
    return struct.pack("<384I", *words0, *words1, *words2), outside


def rows_of_step(
    weights: list[int], rows: int, columns: int, s: int, t: int
) -> list[list[list[int]]]:
    def eight(row: int, lane: int) -> list[int]:
        exist = [32 * t + c for c in columns_of(lane) if 32 * t + c < columns]
        return [weights[row * columns + c] for c in exist] if row < rows else []

    return [[eight(32 * s + lane // 4 + 8 * r, lane) for r in range(4)] for lane in range(LANES)]


def make_fast(weights: list[int], rows: int, columns: int) -> Fast:
    data: list[bytes] = []
    heads: list[bytes] = []
    exceptions: list[int] = []
    for s in range(ceil_div(rows, 32)):
        for tile in range(ceil_div(columns, 256)):
            steps = range(8 * tile, min(8 * tile + 8, ceil_div(columns, 32)))
            each = [rows_of_step(weights, rows, columns, s, t) for t in steps]
            exist = [w >> 7 & 255 for step in each for lane in step for row in lane for w in row]
            base, first, mask = best_base(exist), len(exceptions), 0
            for t, step in enumerate(each):
                packed, outside = pack_step(step, base)
                data.append(packed)
                mask |= bool(outside) << t
                exceptions += [t << 26 | e for e in outside]
            heads.append(struct.pack("<IHBB", first, len(exceptions) - first, mask, base))
    tail = struct.pack(f"<{len(exceptions)}I", *exceptions)
    made = Fast(rows, columns, b"".join(data), b"".join(heads), tail)
    return made._replace(patches=b"".join(patches_of(made, s) for s in range(ceil_div(rows, 32))))


def exceptions_of(f: Fast, s: int) -> list[tuple[int, int]]:
    """The exceptions of a strip, each after its tile."""
    found, all_exceptions = [], words(f.exceptions, "I")
    for tile in range(f.tiles):
        at = 8 * (s * f.tiles + tile)
        first, count, _, _ = struct.unpack("<IHBB", f.heads[at : at + 8])
        found += [(tile, e) for e in all_exceptions[first : first + count]]
    return found


def patch_of(tile: int, e: int) -> int:
    """The number of the patch that has an exception."""
    step, lane, r, k = 8 * tile + (e >> 26), e >> 21 & 31, e >> 19 & 3, e >> 16 & 7
    block = step // 2
    product = (0 if block % 2 else 4) + 2 * (step % 2) + k // 4
    return r // 2 << 31 | (block + 1) // 2 << 8 | lane << 3 | product


def words_of_patch(f: Fast, s: int, number: int) -> list[int]:
    half, window, lane, product = number >> 31, number >> 8 & 0x7FFFFF, number >> 3 & 31, number & 7
    block = 2 * window - (product < 4)
    pairs = unpack_step(f, s, 2 * block + product // 2 % 2)[0][lane]
    return [pairs[2 * half + i % 2][2 * (product % 2) + i // 2] for i in range(4)]


def patches_of(f: Fast, s: int) -> bytes:
    exceptions = exceptions_of(f, s)
    numbers = sorted({patch_of(tile, e) for tile, e in exceptions})
    if len(exceptions) > f.places:
        numbers = []
    products = [word for number in numbers for word in words_of_patch(f, s, number)]
    numbers = numbers or ([0xFFFFFFFE] if exceptions else [])
    numbers += [WORD] * (f.places - len(numbers))
    products += [0] * (4 * f.places - len(products))
    return struct.pack(f"<{5 * f.places}I", *numbers, *products)


def unpack_step(f: Fast, s: int, t: int) -> tuple[list[list[list[int]]], int]:
    """Pairs by lane and r, and the status."""
    at = 8 * (s * f.tiles + t // 8)
    first, count, mask, base = struct.unpack("<IHBB", f.heads[at : at + 8])
    words_of = words(f.data[1536 * (s * f.steps + t) :][:1536], "I")
    lanes, status = [], 0
    for lane in range(LANES):
        w = words_of[4 * lane : 4 * lane + 4] + words_of[128 + 4 * lane : 132 + 4 * lane]
        codes = words_of[256 + 4 * lane : 260 + 4 * lane]
        lanes.append([decode_row(w[2 * r], w[2 * r + 1], codes[r], base) for r in range(4)])
    if mask >> t % 8 & 1:
        exceptions = words(f.exceptions, "I")
        for i in range(first, first + count):
            if i >= len(exceptions):
                return lanes, EXCEPTIONS
            e = exceptions[i]
            if e >> 26 != t % 8:
                continue
            lane, r, k = e >> 21 & 31, e >> 19 & 3, e >> 16 & 7
            other = lanes[lane][r][k // 2] & 0xFFFF << 16 * (1 - k % 2)
            lanes[lane][r][k // 2] = other | (e & 0xFFFF) << 16 * (k % 2)
    return lanes, status


def decode_fast(f: Fast) -> tuple[list[int], int]:
    out, problems = [-1] * (f.rows * f.columns), 0
    for s in range(ceil_div(f.rows, 32)):
        for t in range(f.steps):
            lanes, status = unpack_step(f, s, t)
            problems |= status
            for lane, rows in enumerate(lanes):
                columns = [32 * t + c for c in columns_of(lane)]
                for r, pairs in enumerate(rows):
                    row = 32 * s + lane // 4 + 8 * r
                    w = [half for p in pairs for half in (p & 0xFFFF, p >> 16)]
                    for weight, column in zip(w, columns):
                        if row < f.rows and column < f.columns:
                            out[row * f.columns + column] = weight
                        else:
                            require(weight >> 7 & 255 != 255, "what does not exist is finite")
    return out, problems


def check_patches(f: Fast, s: int) -> None:
    """A strip decoded with patches in place of exceptions."""
    numbers = words(f.patches[20 * s * f.places :][: 4 * f.places], "I")
    products = words(f.patches[4 * f.places * (5 * s + 1) :][: 16 * f.places], "I")
    if numbers[0] == 0xFFFFFFFE:
        require(len(exceptions_of(f, s)) > f.places, "more exceptions than places")
        return
    bare = f._replace(exceptions=b"", heads=b"".join(bare_heads(f)))
    found: dict[tuple[int, int], list[list[int]]] = {}
    for i, number in enumerate(numbers[: numbers.index(WORD)]):
        half, window, lane, product = (
            number >> 31,
            number >> 8 & 0x7FFFFF,
            number >> 3 & 31,
            number & 7,
        )
        require(i == 0 or numbers[i - 1] < number, "patches ascend")
        step = (2 * window - (product < 4)) * 2 + product // 2 % 2
        lanes = found.setdefault((s, step), unpack_step(bare, s, step)[0])
        for k in range(4):
            lanes[lane][2 * half + k % 2][2 * (product % 2) + k // 2] = products[4 * i + k]
    for t in range(f.steps):
        patched = found.get((s, t)) or unpack_step(bare, s, t)[0]
        require(patched == unpack_step(f, s, t)[0], "a strip by its patches")


def bare_heads(f: Fast) -> list[bytes]:
    """Heads without exceptions."""
    bases = f.heads[7::8]
    return [struct.pack("<IHBB", 0, 0, 0, base) for base in bases]


def check_cut(f: Fast, weights: list[int]) -> None:
    """The last strip, and the columns from the second tile on."""
    strips, (rows, columns) = ceil_div(f.rows, 32), (f.rows, f.columns)
    if strips > 1:
        s = strips - 1
        data, heads = f.data[1536 * f.steps * s :], f.heads[8 * f.tiles * s :]
        part = Fast(rows - 32 * s, columns, data, heads, f.exceptions)
        require(decode_fast(part) == (weights[32 * s * columns :], 0), "rows of the fast layout")
    if columns > 256:
        data, heads = b"", b""
        for s in range(strips):
            data += f.data[1536 * (s * f.steps + 8) : 1536 * (s + 1) * f.steps]
            heads += f.heads[8 * (s * f.tiles + 1) : 8 * (s + 1) * f.tiles]
        part = Fast(rows, columns - 256, data, heads, f.exceptions)
        wanted = [w for r in range(rows) for w in weights[r * columns + 256 : (r + 1) * columns]]
        require(decode_fast(part) == (wanted, 0), "columns of the fast layout")


def check_fast(weights: list[int], rows: int, columns: int) -> Fast:
    f = make_fast(weights, rows, columns)
    back, status = decode_fast(f)
    require(status == 0 and back == weights, f"fast layout, {rows} x {columns}")
    count = len(f.exceptions) // 4
    strips = ceil_div(rows, 32)
    size = strips * (1536 * f.steps + 8 * f.tiles + 20 * f.places) + 4 * count
    require(f.bits_per_weight() == 8 * size / (rows * columns), "bits per weight")
    if rows % 32 == columns % 256 == 0:
        near = 12 + 11 / 128 + 32 * count / (rows * columns)
        require(abs(f.bits_per_weight() - near) < 1e-9, "bits per weight of whole tiles")
    check_cut(f, weights)
    for s in range(strips):
        check_patches(f, s)
    return f


# --- parts 3 and 7: fragments of mma.m16n8k16


def number(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return float(value)


def mma(sums: list[list[float]], a: list[list[int]], b: list[list[int]]) -> None:
    """sums (16 x 8) += a (16 x 16) b (16 x 8), in the fragments of PTX's documentation."""
    left, right = [[0.0] * 16 for _ in range(16)], [[0.0] * 16 for _ in range(8)]
    for lane in range(LANES):
        g, q = lane // 4, lane % 4
        for i, register in enumerate(a[lane]):
            row, k = left[g + 8 * (i % 2)], 2 * q + 8 * (i // 2)
            row[k : k + 2] = number(register & 0xFFFF), number(register >> 16)
        for i, register in enumerate(b[lane]):
            k = 2 * q + 8 * i
            right[g][k : k + 2] = number(register & 0xFFFF), number(register >> 16)
    for row, out in zip(left, sums):
        for n, column in enumerate(right):
            out[n] += sum(v * w for v, w in zip(row, column))


def pair_of(row: list[int], column: int) -> int:
    return row[column] | row[column + 1] << 16


def multiply_tile(matrix: list[list[int]], x: list[list[int]]) -> list[list[float]]:
    """32 x 256 weights, 16 rows of x, with units as B: y[x row][weight row]."""
    y: list[list[float]] = [[] for _ in range(16)]
    for band in range(4):
        sums = [[0.0] * 8 for _ in range(16)]
        for step in range(16):
            a, b = [], []
            for lane in range(LANES):
                g, column = lane // 4, 32 * (step // 2) + lane % 4 * 8 + 4 * (step % 2)
                unit = matrix[8 * band + g]
                b.append([pair_of(unit, column), pair_of(unit, column + 2)])
                a.append([pair_of(x[g + 8 * (i % 2)], column + i // 2 * 2) for i in range(4)])
            mma(sums, a, b)
        y = [before + more for before, more in zip(y, sums)]
    return y


def multiply_fast(f: Fast, s: int, tile: int, x: list[list[int]]) -> list[list[float]]:
    """A tile of the fast layout as A, eight rows of x."""
    sums = [[0.0] * 8 for _ in range(32)]
    for t in range(8):
        lanes, _ = unpack_step(f, s, 8 * tile + t)
        for n in range(2):
            b = []
            for lane in range(LANES):
                column = 32 * t + 16 * n + lane % 4 * 2
                b.append([pair_of(x[lane // 4], column + 8 * i) for i in range(2)])
            for half in range(2):
                places = [(2 * half + i % 2, 2 * n + i // 2) for i in range(4)]
                mma(sums[16 * half :][:16], [[p[r][k] for r, k in places] for p in lanes], b)
    return [list(row) for row in zip(*sums)]


def check_products(t: Tensor, weights: list[int], f: Fast) -> None:
    """Tile 1, times 16 rows of x of both signs."""
    made, (r0, c0) = random.Random(7), t.tile_corner(1)
    matrix = [weights[(r0 + r) * t.columns + c0 :][:256] for r in range(32)]
    signs = (0, 0x8000)
    x = [
        [made.choice(signs) | made.randrange(0x3C00, 0x4100) for _ in range(256)] for _ in range(16)
    ]
    wide = [[number(w) for w in row] for row in matrix]
    wide_x = [[number(v) for v in row] for row in x]
    for y in (multiply_tile(matrix, x), multiply_fast(f, r0 // 32, c0 // 256, x)):
        for sums, row in zip(y, wide_x):
            for found, w in zip(sums, wide):
                products = [a * b for a, b in zip(w, row)]
                scale = sum(map(abs, products))
                require(abs(found - sum(products)) < 1e-12 * scale, "a product of fragments")
