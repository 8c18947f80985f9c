"""Parts 1 to 7 of spec/gpu.md in plain Python: as they say, part by part.

    python3 spec/gpu_check.py            prints the blocks of numbers of gpu.md
    python3 spec/gpu_check.py --check    compares them with gpu.md; fails if one differs
    python3 spec/gpu_check.py --write    writes them into gpu.md

Each also decodes every `tile` tensor of spec/vectors as gpu.md says, cuts slices of it, makes the
fast layout of it and decodes that, and gives damaged tensors to the decoder.
"""

import json
import random
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

SPEC = Path(__file__).resolve().parent
sys.path.insert(0, str(SPEC / "python"))

from check_vectors import read
from df11_reader import Container, Corrupt, FormatError
from df11_tile import LANES, Record
from gpu_fast import Fast, check_fast, check_products, columns_of, decode_row, exponents_of
from gpu_tile import (
    Run,
    Tensor,
    build_in_parallel,
    build_table,
    check_slices,
    cut,
    decode,
    look_up,
    merge_pair,
    require,
    runs,
    units,
    words,
)

TILE, BF16 = 3, 15


# --- the vectors


def tensors(data: bytes) -> Iterator[tuple[str, Tensor]]:
    container = Container(data)
    for name, t in container.names.items():
        if t.encoding == TILE and t.dtype == BF16:
            arrays = [container.read_array(array) for array in container.arrays_of(t)]
            yield name, Tensor(arrays, *t.parameters[:3])


def vector(file: str, name: str) -> Tensor:
    return dict(tensors(read(SPEC / f"vectors/valid/{file}.df11.gz")))[name]


def check_valid(data: bytes, row: dict, found: dict[str, int]) -> None:
    for name, t in tensors(data):
        same = build_in_parallel(t.codebook) == build_table(t.codebook)
        require(same, "a table that is built in parallel")
        weights, status = decode(t)
        digest = sha256(struct.pack(f"<{len(weights)}H", *weights)).hexdigest()
        right = status == 0 and digest == row["tensors"][name]
        require(right, f"{row['file']}: status {status}, or other weights of {name}")
        found["tensors decoded"] += 1
        found["weights"] += len(weights)
        check_fast(weights, t.rows, t.columns)
        found["slices"] += check_slices(t, weights)


def is_refused(data: bytes) -> bool:
    """Whether the checks of parts 1 to 3 find something, in a container that opens."""
    try:
        return any(decode(t)[1] for _, t in tensors(data))
    except Corrupt:
        return True


def check_vectors(found: dict[str, int]) -> None:
    for row in json.loads((SPEC / "vectors/manifest.json").read_text())["vectors"]:
        data = read(SPEC / "vectors" / row["file"])
        if row["expect"] == "valid":
            check_valid(data, row, found)
        elif "/tile-" in row["file"] and row["level"] == "load":
            require(is_refused(data), f"{row['file']} is not refused")
            found["damaged tensors refused"] += 1


def check_hostile(found: dict[str, int]) -> None:
    """Any content: every weight is written, and nothing else happens."""
    t, made = vector("tile-edges", "both"), random.Random(11)
    for _ in range(20):
        arrays = [bytearray(t.records), bytearray(t.bitstream)]
        for _ in range(made.randrange(1, 9)):
            array = made.choice(arrays)
            array[made.randrange(len(array) - 32)] = made.randrange(256)
        arrays[0][:6] = bytes(6)
        records, bitstream = map(bytes, arrays)
        arrays = [t.codebook, records, bitstream, t.plane]
        decode(Tensor(arrays, t.tile_columns, t.columns, t.bit_count))
        found["hostile tensors decoded"] += 1


def check_shapes(found: dict[str, int]) -> None:
    """The fast layout of small matrices of any bits, and of exponents at either end."""
    made = random.Random(13)
    for rows, columns in ((1, 1), (3, 5), (33, 40), (7, 300)):
        for low, high in ((0, 0x10000), (0x7F80, 0x8000), (0, 0x800), (0x7800, 0x8000)):
            check_fast([made.randrange(low, high) for _ in range(rows * columns)], rows, columns)
            found["small matrices in the fast layout"] += 1


# --- the blocks of numbers


def hexadecimal(data: bytes) -> str:
    return " ".join(f"{b:02x}" for b in data)


def stream(t: Tensor, p: int, n: int) -> str:
    return "".join(str(t.bits(p + i, 1)) for i in range(n))


def block_slices(t: Tensor) -> str:
    def line(r: Run) -> str:
        spans = (("records", r.records), ("bitstream", r.bitstream), ("plane", r.plane))
        where = "  ".join(f"{name} {f'{s.start}..{s.stop}':<12}" for name, s in spans)
        return f"strip {r.strip}: tiles {r.tiles.start}..{r.tiles.stop}  {where}".rstrip()

    columns = list(runs(t, 0, t.rows, 256, 512))
    rows = list(runs(t, 32, 64, 0, t.columns))
    own = cut(t, 0, t.rows, 256, 512)
    offsets = ", ".join(str(own.offset(i)) for i in range(own.tile_count + 1))
    lines = ["columns 256..512", *map(line, columns), f"as a tensor of its own: offsets {offsets}"]
    return "\n".join([*lines, "", "rows 32..64", *map(line, rows)])


def block_codebook(t: Tensor) -> str:
    numbers = words(t.codebook, "H")
    pairs = [" ".join(f"{n:04x}" for n in numbers[i : i + 13]) for i in range(13, len(numbers), 13)]
    counts = " ".join(f"{n:04x}" for n in numbers[1:13])
    lines = [f"escape  {numbers[0]:04x}", f"counts  {counts}"]
    return "\n".join(lines + [f"{'pairs' if i == 0 else '':6}  {p}" for i, p in enumerate(pairs)])


def block_table(t: Tensor) -> str:
    """The first entry of some lengths, and of the escape."""
    table, lines = build_table(t.codebook), ["index         number  entry     says"]
    first = {e & 63: index for index, e in reversed([*enumerate(table)])}
    for length, index in sorted(first.items()):
        e = table[index]
        says = f"{e >> 7 & 255}, {e >> 23 & 255}: {length} bits"
        if e >> 31:
            says = f"the escape, {e >> 15 & 31} bits"
        elif 5 <= length <= 11:
            continue
        order = f"{index:012b}"[::-1]
        lines.append(f"{order}  {index:6}  {e:08x}  {says}")
    return "\n".join(lines)


def block_record(t: Tensor) -> str:
    data, at = t.records[32:64], Record.read(t.records[32:64])
    numbers = f"offset {at.offset}, least {at.least}, shift {at.shift}; next offset {t.offset(2)}"
    lines = [hexadecimal(data[:16]), hexadecimal(data[16:]), "", numbers, ""]
    lines.append("lanes     excess                         start")
    for first in range(0, LANES, 8):
        excess = " ".join(f"{e:2}" for e in at.excess[first : first + 8])
        start = " ".join(str(at.start(lane)) for lane in range(first, first + 8))
        lines.append(f"{first:2} to {first + 7:2}  {excess}        {start}")
    total = f"lengths together {sum(at.lengths)}; {at.offset} + that, aligned to 8: {at.end()}"
    return "\n".join([*lines, "", total])


def block_lane(t: Tensor) -> str:
    lane, table, at = 22, build_table(t.codebook), Record.read(t.records[32:64])
    p = at.start(lane)
    lines = [f"start {p} = bit {p % 8} of byte {p // 8}, length {at.lengths[lane]}"]
    for u, unit in zip(range(2), units(t, 1, lane)):
        columns = f"columns {unit.column} to {unit.column + 7}"
        lines.append(f"\nunit {u}: row {unit.row}, {columns} of the tile")
        plane = t.plane[unit.source : unit.source + 8]
        lines.append(f"plane bytes {unit.source}..{unit.source + 8}: {hexadecimal(plane)}")
        lines.append("bit    bits                        entry     exponents  weights")
        for k in range(0, 8, 2):
            raw, (e, _) = table[t.bits(p, 12)], look_up(t, table, p)
            taken = stream(t, p, e & 63)
            if raw >> 31:
                taken = f"{taken[: raw >> 15 & 31]} {taken[raw >> 15 & 31 :]}"
            two = merge_pair(e, *t.plane[unit.source + k :][:2])
            says = f"{e >> 7 & 255}, {e >> 23 & 255}   {two & 0xFFFF:04X} {two >> 16:04X}"
            lines.append(f"{p}  {taken:27} {raw:08x}  {says}")
            p += e & 63
    for _ in range(120):
        p += look_up(t, table, p)[0] & 63
    left = at.start(lane) + at.lengths[lane] - p
    lines.append(f"\nafter 32 units: bit {p}; {left} left, less than 2^shift = {1 << at.shift}")
    return "\n".join(lines)


def block_step(f: Fast, weights: list[int]) -> str:
    lane, tile, t = 22, 1, 8
    first, count, mask, base = struct.unpack("<IHBB", f.heads[8:16])
    begin = 1536 * t
    head = hexadecimal(f.heads[8:16])
    lines = [f"head of tile 1, bytes 8..16: {head}: base {base}, {count} exceptions"]
    lines.append(f"step 0 of tile 1 is step {t} of strip 0: data from byte {begin} on\n")
    titles = ("row", "weights", "codes", "word 0", "word 1", "codes")
    lines.append("{}  {:39}  {:23}  {:8}  {:8}  {}".format(*titles))
    at = words(f.data[begin : begin + 1536], "I")
    for r in range(4):
        row = lane // 4 + 8 * r
        w = [weights[row * f.columns + 256 * tile + c] for c in columns_of(lane)]
        low = 128 * (r // 2) + 4 * lane + 2 * (r % 2)
        codes = " ".join(f"{base - (x >> 7 & 255):2}" for x in w)
        stored = f"{at[low]:08x}  {at[low + 1]:08x}  {at[256 + 4 * lane + r]:08x}"
        lines.append(f"{row:3}  {' '.join(f'{x:04X}' for x in w)}  {codes}  {stored}")
    word0, word1, packed = at[4 * lane], at[4 * lane + 1], at[256 + 4 * lane]
    x, pairs = exponents_of(packed, base), decode_row(word0, word1, packed, base)
    lines.append(f"\nB {base * 0x00800080:08x}, row 5: X {' '.join(f'{e:08x}' for e in x)}")
    lines.append(f"                  P {' '.join(f'{p:08x}' for p in pairs)}")
    lines.append(f"\nbits per weight of w, {f.rows} x {f.columns}: {f.bits_per_weight()}")
    return "\n".join(lines)


def block_exception(f: Fast, weights: list[int]) -> str:
    changed = list(weights)
    changed[5 * f.columns + 256 + columns_of(22)[0]] = 0x7F80
    g = check_fast(changed, f.rows, f.columns)
    (e,) = words(g.exceptions, "I")
    row = words(g.data[1536 * 8 :][:1536], "I")
    stored = f"{row[88]:08x}  {row[89]:08x}  {row[256 + 88]:08x}"
    return f"head {hexadecimal(g.heads[8:16])}\nrow 5 {stored}\nexception 0: {e:08x}"


def blocks() -> dict[str, str]:
    t = vector("tile-whole", "w")
    weights, _ = decode(t)
    f = check_fast(weights, t.rows, t.columns)
    check_products(t, weights, f)
    return {
        "slices": block_slices(t),
        "codebook": block_codebook(t),
        "table": block_table(t),
        "record": block_record(t),
        "lane": block_lane(t),
        "step": block_step(f, weights),
        "exception": block_exception(f, weights),
    }


def place_blocks(text: str, made: dict[str, str]) -> str:
    for name, block in made.items():
        before, mark, after = text.partition(f"<!-- gpu_check: {name} -->\n```\n")
        require(bool(mark), f"gpu.md has no place for the block {name}")
        text = before + mark + block + "\n```" + after.partition("```")[2]
    return text


def main(arguments: list[str]) -> int:
    found: dict[str, int] = defaultdict(int)
    path = SPEC / "gpu.md"
    try:
        made = blocks()
        check_vectors(found)
        check_hostile(found)
        check_shapes(found)
        text = path.read_text()
        placed = place_blocks(text, made)
        stale = arguments == ["--check"] and text != placed
        require(not stale, "numbers of gpu.md are stale: python3 spec/gpu_check.py --write")
    except (AssertionError, FormatError) as e:
        print(f"FAILED {e}")
        return 1
    if arguments == ["--write"]:
        path.write_text(placed)
    elif not arguments:
        for name, block in made.items():
            print(f"== {name}\n{block}\n")
    print(", ".join(f"{count} {what}" for what, count in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
