"""Tests of the reader: what the tiny writer of build.py makes is read back, and what breaks a rule
is refused as the text says.

Run: python3 -m unittest discover -s spec/python
"""

import gzip
import random
import struct
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from build import Draft, Source, code_lengths, codes, draft
from df11_reader import MARK, Code, Container, Corrupt, FormatError, Limit, Unsupported

BIG = 2**64 - 1
ALL_PATTERNS = struct.pack("<65536H", *range(65536))


def weights(count: int, seed: int = 1, spread: float = 0.3) -> bytes:
    """Weights with exponents like those of a model: few are frequent."""
    r = random.Random(seed)

    def weight() -> int:
        return (
            r.getrandbits(1) << 15
            | max(0, 120 - int(r.expovariate(spread))) << 7
            | r.getrandbits(7)
        )

    return struct.pack(f"<{count}H", *(weight() for _ in range(count)))


def skewed() -> bytes:
    """Exponents with Fibonacci counts, for codes up to the limit of 16 bits and more than one LUT.
    """
    counts = [1, 1]
    while len(counts) < 19:
        counts.append(counts[-1] + counts[-2])
    values = [e << 7 | e for e, n in enumerate(counts) for _ in range(n)]
    random.Random(2).shuffle(values)
    return struct.pack(f"<{len(values)}H", *values)


def model() -> list[Source]:
    """A bit of everything: encodings, dtypes, shapes, blocks, two weights files."""
    tied = weights(600)
    return [
        Source("a.weight", "BF16", (20, 30), tied, "b0", gap=(8, 64)),
        Source("b.head", "BF16", (20, 30), tied, "b0", alias="a.weight"),
        Source("c.bias", "F32", (3,), struct.pack("<3f", 1, 2, 3), "b0"),
        Source("d.weight", "BF16", (7, 100), weights(700, 3), "b1", gap=(16, 128)),
        Source("e.scalar", "BF16", (), b"\x80\x3f", "b1", gap=(64, 1024)),
        Source("f.empty", "BF16", (0, 4), b"", "b1"),
        Source("g.four", "F4", (3, 2), b"\x12\x34\x56", "b1", file="other.safetensors"),
        Source("h.six", "F6_E2M3", (4,), b"\x12\x34\x56", "b1", file="other.safetensors"),
        Source("ü.flag", "BOOL", (1, 1, 1, 1, 1, 1, 1, 1), b"\1", "b0", file="other.safetensors"),
    ]


SIDE = {"config.json": b"{}", "sub/tokenizer.model": b"x" * 5000, "empty.txt": b""}


class RoundTrip(unittest.TestCase):
    def check(self, sources: list[Source], side: dict[str, bytes] | None = None) -> Container:
        container = Container(draft(sources, side).pack())
        for s in sources:
            self.assertEqual(container.tensor(s.name), s.data, s.name)
        self.assertEqual(container.verify(), [])
        return container

    def test_a_bit_of_everything(self) -> None:
        c = self.check(model(), SIDE)
        for path, data in SIDE.items():
            self.assertEqual(c.restore(path), data)
        prefix_length = 8 + int.from_bytes(c.restore("model.safetensors")[:8], "little")
        self.assertEqual(
            c.restore("model.safetensors")[prefix_length:], b"".join(s.data for s in model()[:6])
        )

    def test_files_are_restored_to_a_folder_and_read_from_a_path(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.df11"
            path.write_bytes(draft(model(), SIDE).pack())
            with Container(path) as c:
                c.restore_to(Path(folder) / "out")
                self.assertEqual(c.verify(), [])
                for name in c.paths:
                    self.assertEqual((Path(folder) / "out" / name).read_bytes(), c.restore(name))
                with self.assertRaises(FileExistsError):
                    c.restore_to(Path(folder) / "out")

    def test_all_patterns(self) -> None:
        self.check([Source("t", "BF16", (256, 256), ALL_PATTERNS, gap=(32, 256))])

    def test_single_exponents(self) -> None:
        for e in (0, 1, 127, 255):
            data = struct.pack("<200H", *(e << 7 | i % 128 | (i & 1) << 15 for i in range(200)))
            self.check([Source("t", "BF16", (200,), data, gap=(8, 64))])

    def test_two_exponents_at_exact_ends_of_threads(self) -> None:
        for count in (
            63,
            64,
            65,
            4095,
            4096,
            4097,
        ):  # one bit each: a thread of 8 bytes holds 64, a thread block 4096
            data = struct.pack(f"<{count}H", *((i & 1) << 7 for i in range(count)))
            self.check([Source("t", "BF16", (count,), data, gap=(8, 64))])

    def test_all_parameters(self) -> None:
        data = skewed()
        for thread_bytes in (8, 16, 32, 64):
            for block_threads in (64, 128, 256, 512, 1024):
                self.check(
                    [
                        Source(
                            "t", "BF16", (len(data) // 2,), data, gap=(thread_bytes, block_threads)
                        )
                    ]
                )

    def test_limited_codes_have_several_luts(self) -> None:
        lengths = code_lengths({e: 2**e for e in range(60)})
        self.assertEqual(max(lengths), 16)
        values = [e << 7 | e for e in range(200)] + [
            (200 + k) << 7 for k in range(8) for _ in range(64 << k)
        ]
        random.Random(4).shuffle(values)
        c = self.check(
            [
                Source(
                    "t",
                    "BF16",
                    (len(values),),
                    struct.pack(f"<{len(values)}H", *values),
                    gap=(8, 64),
                )
            ]
        )
        self.assertGreaterEqual(c.arrays[1].length, 256 + 3 * 512)

    def test_rows(self) -> None:
        data = weights(64 * 300, 5)
        c = self.check(
            [
                Source("t", "BF16", (64, 3, 100), data, gap=(8, 64)),
                Source("r", "BF16", (64, 3, 100), data),
            ]
        )
        self.assertGreater(len(c._gap_index(c.tensors[1]).offsets), 10)
        for name in "tr":
            for first, count in [(0, 64), (0, 0), (64, 0), (63, 1), (0, 1)] + [
                (i, 64 // (i + 1)) for i in range(20)
            ]:
                self.assertEqual(
                    c.rows(name, first, count), data[600 * first : 600 * (first + count)]
                )
        with self.assertRaises(IndexError):
            c.rows("t", 60, 5)

    def test_rows_touch_only_their_thread_blocks(self) -> None:
        data = weights(64 * 300, 5)
        d = draft([Source("t", "BF16", (64, 300), data, gap=(8, 64))])
        d.contents[2][-8:] = bytes(8)  # of the last thread block
        c = Container(d.pack())
        self.assertEqual(c.rows("t", 0, 60), data[: 600 * 60])
        with self.assertRaises(Corrupt):
            c.rows("t", 0, 64)

    def test_nothing_at_all(self) -> None:
        c = Container(draft([]).pack())
        self.assertEqual((c.length, c.names, c.paths, c.verify()), (4096 + 256 + 64, [], [], []))

    def test_chunks(self) -> None:
        data = bytes(range(256)) * 10000
        good = draft(
            [Source("t", "U8", (10, 256000), data), Source("u", "U8", (3,), b"abc")]
        ).pack()
        c = Container(good)
        self.assertEqual((c.tensor("t"), c.rows("t", 3, 5)), (data, data[768000:2048000]))
        bad = bytearray(good)
        bad[4096 + 2000000] ^= 1  # the second chunk
        c = Container(bytes(bad))
        self.assertEqual((c.tensor("u"), c.rows("t", 0, 4)), (b"abc", data[:1024000]))
        with self.assertRaises(Corrupt):
            c.tensor("t")

    def test_what_a_reader_must_ignore(self) -> None:
        d = draft(model())
        d.header = {"minor": 7, "compatible": BIG}
        d.sections.insert(5, dict(kind=2**31, reserved=0, block=0, offset=0, length=5))
        d.contents.insert(5, bytearray(b"hello"))
        end = 4096
        for s in d.sections:
            s["offset"] = end + -end % 4096
            end = s["offset"] + s["length"]
        for a in d.arrays:
            a["section"] += a["section"] >= 5
        c = Container(d.pack())
        self.assertEqual([c.tensor(s.name) for s in model()], [s.data for s in model()])
        self.assertEqual(c.verify(), [])

    def test_unknown_dtype_and_encoding_spoil_one_tensor(self) -> None:
        for key, value in (("dtype", 99), ("encoding", 77)):
            d = draft(model())
            d.tensors[3][key] = value
            c = Container(d.pack())
            with self.assertRaises(Unsupported):
                c.tensor("d.weight")
            self.assertEqual(c.tensor("a.weight"), model()[0].data)
            if key == "encoding":
                self.assertEqual(c.verify(), ["tensor d.weight", "file model.safetensors"])
            else:  # the header names a dtype that is known
                self.assertRaises(Corrupt, c.verify)

    def test_files_beside_the_container(self) -> None:
        data = gzip.decompress(
            (Path(__file__).parent.parent / "vectors/valid/side-files-beside.df11.gz").read_bytes()
        )
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            c = Container(data, root)
            self.assertRaises(Corrupt, c.verify)
            (root / "tokenizer").mkdir()
            (root / "tokenizer/empty.txt").write_bytes(b"")
            for config in (b"{}", b"{" + MARK + b"}"):
                (root / "config.json").write_bytes(config)
                self.assertEqual(c.verify(), [])
                self.assertEqual(c.restore("config.json"), b"{}")
            (root / "config.json").write_bytes(b"{ }")
            self.assertRaises(Corrupt, c.verify)
            self.assertEqual(
                Container(data).verify(), ["file config.json", "file tokenizer/empty.txt"]
            )

    def test_alias_of_an_unsupported_tensor(self) -> None:
        d = draft(model())
        d.tensors[0]["encoding"] = 77
        with self.assertRaises(Unsupported):
            Container(d.pack()).tensor("b.head")


def put(records: str, i: int, key: str, value: object) -> Callable[[Draft], None]:
    return lambda d: getattr(d, records)[i].__setitem__(key, value)


def head(**fields: object) -> Callable[[Draft], None]:
    return lambda d: d.header.update(fields)


def parameter(i: int, k: int, value: int) -> Callable[[Draft], None]:
    return lambda d: d.tensors[i]["parameters"].__setitem__(k, value)


def section_byte(i: int, at: int, change: Callable[[int], int]) -> Callable[[Draft], None]:
    return lambda d: d.contents[i].__setitem__(at, change(d.contents[i][at]))


def text(
    paths: list[bytes] | None = None,
    blocks: list[bytes] | None = None,
    names: list[bytes] | None = None,
) -> Callable[[Draft], None]:
    def change(d: Draft) -> None:
        def old(records: list[dict], key: str) -> list[bytes]:
            return [d.text[r[f"{key}_offset"] :][: r[f"{key}_length"]] for r in records]

        d.set_text(
            paths or old(d.files, "path"),
            blocks or old(d.blocks, "name"),
            names or old(d.tensors, "name"),
        )

    return change


def grow(section: int) -> Callable[[Draft], None]:
    def change(d: Draft) -> None:
        d.contents[section] += b"\0"
        d.sections[section]["length"] += 1

    return change


def longer(array: int, section: int, n: int) -> Callable[[Draft], None]:
    """Makes the last array of a section longer, and the section with it."""

    def change(d: Draft) -> None:
        d.arrays[array]["length"] += n
        for _ in range(n):
            grow(section)(d)

    return change


def path(first: bytes) -> Callable[[Draft], None]:
    return text(paths=[first, b"zz", b"config.json", b"empty.txt", b"sub/tokenizer.model"])


def drop_array(d: Draft) -> None:
    d.arrays.pop()


# Sections of model(): block 0: codebook 0, index 1, bitstream 2, plane 3, raw 4; block 1: the same,
# 5 to 9; prefix 10; side 11. Tensors: a.weight 0, b.head 1 (alias), c.bias 2, d.weight 3, e.scalar
# 4, f.empty 5, g.four 6, h.six 7, ü.flag 8. Files: two weights files 0 and 1, then config.json,
# empty.txt, sub/tokenizer.model.
BROKEN_AT_OPEN: list[tuple[str, type[FormatError], Callable[[Draft], None]]] = [
    ("magic", Corrupt, head(magic=b"\xdf\x44\x46\x31\x31\x0a\x0d\x1a")),
    ("major version", Unsupported, head(major=2)),
    ("major version 0", Unsupported, head(major=0)),
    (
        "incomplete",
        Corrupt,
        head(state=0, incompatible=0, compatible=0, file_length=0, offset=0, length=0, checksum=0),
    ),
    ("unknown state", Corrupt, head(state=2)),
    ("state before features", Corrupt, head(state=0, incompatible=1)),
    ("incompatible feature", Unsupported, head(incompatible=1 << 63)),
    ("feature before file length", Unsupported, head(incompatible=1, file_length=0)),
    ("file length", Corrupt, head(file_length=4160)),
    ("file length beyond the limit", Limit, head(file_length=2**63)),
    ("directory beyond the limit", Limit, head(length=268435457)),
    ("directory too long", Corrupt, head(length=100000)),
    ("directory empty", Corrupt, head(length=0)),
    ("directory in the head", Corrupt, head(offset=0)),
    ("directory offset at the end of numbers", Corrupt, head(offset=BIG - 4095)),
    ("directory unaligned", Corrupt, head(offset=4097)),
    ("directory checksum", Corrupt, head(checksum=0)),
    ("directory with bytes left over", Corrupt, lambda d: setattr(d, "directory_tail", b"\0")),
    ("no shards", Corrupt, lambda d: setattr(d, "shard_count", 0)),
    ("too many shards", Limit, lambda d: setattr(d, "shard_count", 100001)),
    ("shard index", Corrupt, lambda d: setattr(d, "shard_index", 1)),
    ("file kind", Unsupported, put("files", 0, "kind", 3)),
    ("file reserved", Corrupt, put("files", 0, "reserved", 1)),
    ("file without prefix", Corrupt, put("files", 0, "array_count", 0)),
    ("side file length", Corrupt, put("files", 2, "length", 3)),
    ("empty side file with bytes", Corrupt, put("files", 3, "length", 1)),
    ("file shorter than its prefix", Corrupt, put("files", 0, "length", 20)),
    ("path upwards", Corrupt, path(b"a/../b")),
    ("path absolute", Corrupt, path(b"/a")),
    ("path with a drive", Corrupt, path(b"c:a")),
    ("path with a backslash", Corrupt, path(b"a\\b")),
    ("path with a control character", Corrupt, path("a\u0085b".encode())),
    ("path with a control character", Corrupt, path(b"a\x1fb")),
    ("path ends in a slash", Corrupt, path(b"a/")),
    ("path with NUL", Corrupt, path(b"a\0b")),
    ("path not UTF-8", Corrupt, path(b"\xed\xa0\x80")),
    ("path overlong UTF-8", Corrupt, path(b"\xc0\xae\xc0\xae/a")),
    ("paths out of order", Corrupt, path(b"zzz")),
    ("path empty", Corrupt, path(b"")),
    ("path too long", Limit, path(b"a" * 4097)),
    (
        "path twice",
        Corrupt,
        text(paths=[b"config.json", b"zz", b"config.json", b"empty.txt", b"sub/tokenizer.model"]),
    ),
    ("path offset", Corrupt, put("files", 0, "path_offset", 1)),
    ("path length overflows", Limit, put("files", 0, "path_length", BIG)),
    ("block names twice", Corrupt, text(blocks=[b"x", b"x"])),
    ("text left over", Corrupt, lambda d: setattr(d, "text", d.text + b"x")),
    ("section kind", Unsupported, put("sections", 4, "kind", 8)),
    ("section kind 0", Unsupported, put("sections", 0, "kind", 0)),
    ("section reserved", Corrupt, put("sections", 0, "reserved", 1)),
    ("section block out of range", Corrupt, put("sections", 9, "block", 2)),
    ("section without block", Corrupt, put("sections", 9, "block", BIG)),
    ("section with block", Corrupt, put("sections", 10, "block", 1)),
    ("section offset", Corrupt, put("sections", 1, "offset", 4096)),
    ("section offset unaligned", Corrupt, put("sections", 1, "offset", 8193)),
    ("section length 0", Corrupt, put("sections", 1, "length", 0)),
    ("section length overflows", Corrupt, put("sections", 1, "length", BIG)),
    ("section longer than its arrays", Corrupt, grow(0)),
    (
        "tensors out of order",
        Corrupt,
        lambda d: text(names=[b"b", b"a", b"c", b"d", b"e", b"f", b"g", b"h", b"i"])(d),
    ),
    (
        "tensors of one name",
        Corrupt,
        lambda d: text(names=[b"a", b"a", b"c", b"d", b"e", b"f", b"g", b"h", b"i"])(d),
    ),
    (
        "tensor name too long",
        Limit,
        lambda d: text(names=[b"a" * 4097, b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"i"])(d),
    ),
    ("tensor block", Corrupt, put("tensors", 5, "block", 2)),
    ("tensor block NONE", Corrupt, put("tensors", 5, "block", BIG)),
    ("tensor of a side file", Corrupt, put("tensors", 5, "file", 2)),
    ("tensor beyond its file", Corrupt, put("tensors", 0, "file_offset", 10**6)),
    ("tensor offset overflows", Corrupt, put("tensors", 0, "file_offset", BIG)),
    ("nine dimensions", Limit, put("tensors", 8, "dimension_count", 9)),
    ("shape past the dimensions", Corrupt, put("tensors", 2, "shape", [3, 1, 0, 0, 0, 0, 0, 0])),
    (
        "overflow beside a zero",
        Limit,
        lambda d: d.tensors[5].update(dimension_count=3, shape=[0, 2**32, 2**32, 0, 0, 0, 0, 0]),
    ),
    (
        "bits overflow beside a zero",
        Limit,
        put("tensors", 5, "shape", [0, 2**60, 0, 0, 0, 0, 0, 0]),
    ),
    ("bits not whole bytes", Corrupt, put("tensors", 6, "shape", [3, 3, 0, 0, 0, 0, 0, 0])),
    ("first array", Corrupt, put("tensors", 5, "first_array", 0)),
    ("array count overflows", Corrupt, put("tensors", 0, "array_count", BIG)),
    ("array missing", Corrupt, drop_array),
    ("array section", Corrupt, put("arrays", 0, "section", 12)),
    ("array in another block", Corrupt, put("arrays", 6, "section", 5)),
    ("array offset", Corrupt, put("arrays", 0, "offset", 256)),
    ("array length 0", Corrupt, put("arrays", 0, "length", 0)),
    ("array length overflows", Corrupt, put("arrays", 0, "length", BIG)),
    ("plane too long", Corrupt, longer(8, 3, 1)),
    ("raw too long", Corrupt, longer(9, 4, 3)),
    ("gap of another dtype", Corrupt, put("tensors", 0, "dtype", 14)),
    ("gap without elements", Corrupt, put("tensors", 5, "encoding", 2)),
    ("alias of an alias", Corrupt, parameter(1, 0, 1)),
    ("alias of nothing", Corrupt, parameter(1, 0, BIG)),
    ("alias of another shape", Corrupt, put("tensors", 1, "shape", [30, 20, 0, 0, 0, 0, 0, 0])),
    ("alias of another hash", Corrupt, put("tensors", 1, "hash", bytes(32))),
    ("alias of another block", Corrupt, put("tensors", 1, "block", 1)),
    ("alias with a second parameter", Corrupt, parameter(1, 1, 1)),
    ("raw with a parameter", Corrupt, parameter(2, 0, 1)),
    ("gap with a fourth parameter", Corrupt, parameter(0, 3, 1)),
    ("bytes per thread", Corrupt, parameter(0, 0, 4)),
    ("threads per block", Corrupt, parameter(0, 1, 32)),
    ("fewer bits than elements", Corrupt, parameter(0, 2, 599)),
    ("more bits than codes can have", Corrupt, parameter(0, 2, 16 * 600 + 1)),
    ("bits overflow", Corrupt, parameter(0, 2, BIG)),
    ("bit count of more threads", Corrupt, parameter(0, 2, 16 * 600)),
    ("a checksum too few", Corrupt, lambda d: setattr(d, "checksums", [0] * 11)),
    ("a checksum too many", Corrupt, lambda d: setattr(d, "checksums", [0] * 13)),
]


BROKEN_AT_LOAD: list[tuple[str, type[FormatError], str, Callable[[Draft], None]]] = [
    ("section checksum", Corrupt, "c.bias", lambda d: setattr(d, "checksums", [0] * 12)),
    ("a code length above 16", Corrupt, "a.weight", section_byte(0, 0, lambda _: 17)),
    ("a code length of 255", Corrupt, "a.weight", section_byte(0, 0, lambda _: 255)),
    ("too many codes", Corrupt, "a.weight", section_byte(0, 0, lambda _: 16)),
    (
        "no code lengths",
        Corrupt,
        "a.weight",
        lambda d: d.contents[0].__setitem__(slice(0, 256), bytes(256)),
    ),
    ("single code length 2", Corrupt, "e.scalar", section_byte(5, 127 - 768, lambda _: 2)),
    ("no code matches", Corrupt, "e.scalar", section_byte(7, -64, lambda _: 1)),
    ("first output offset", Corrupt, "a.weight", section_byte(1, 256, lambda _: 1)),
    ("last output offset", Corrupt, "a.weight", section_byte(1, 264, lambda v: v ^ 1)),
    ("first gap", Corrupt, "a.weight", section_byte(1, 0, lambda v: v + 1)),
    (
        "bit count one less",
        Corrupt,
        "a.weight",
        lambda d: parameter(0, 2, d.tensors[0]["parameters"][2] - 1)(d),
    ),
    (
        "bit count one more",
        Corrupt,
        "a.weight",
        lambda d: parameter(0, 2, d.tensors[0]["parameters"][2] + 1)(d),
    ),
]

BROKEN_AT_VERIFY: list[tuple[str, Callable[[Draft], None]]] = [
    ("a gap that nobody uses", section_byte(1, 2, lambda v: v ^ 1)),
    ("LUT 0", section_byte(0, 256, lambda v: v ^ 1)),
    ("bits after the end", section_byte(2, -1, lambda v: v | 128)),
    ("sign/mantissa byte", section_byte(3, 5, lambda v: v ^ 1)),
    ("zeros between arrays", section_byte(1, 255, lambda v: 1)),
    ("tensor hash", put("tensors", 2, "hash", bytes(32))),
    ("weights file hash", put("files", 0, "hash", bytes(32))),
    ("side file hash", put("files", 2, "hash", bytes(32))),
    ("weights file length", lambda d: d.files[0].update(length=d.files[0]["length"] + 1)),
    (
        "overlap in a weights file",
        lambda d: d.tensors[2].update(file_offset=d.tensors[2]["file_offset"] - 1),
    ),
    ("empty tensor in the prefix", put("tensors", 5, "file_offset", 0)),
    ("prefix", section_byte(10, 9, lambda v: v ^ 1)),
    ("identity", lambda d: setattr(d, "identity", bytes(32))),
]


class Broken(unittest.TestCase):
    """Every draft breaks one rule and has checksums that fit."""

    def test_open(self) -> None:
        Container(draft(model(), SIDE).pack())
        for about, kind, change in BROKEN_AT_OPEN:
            with self.subTest(about):
                d = draft(model(), SIDE)
                change(d)
                with self.assertRaises(FormatError) as raised:
                    Container(d.pack())
                self.assertIs(type(raised.exception), kind, str(raised.exception))

    def test_load(self) -> None:
        for about, kind, name, change in BROKEN_AT_LOAD:
            with self.subTest(about):
                d = draft(model(), SIDE)
                change(d)
                c = Container(d.pack())
                with self.assertRaises(FormatError) as raised:
                    c.tensor(name)
                self.assertIs(type(raised.exception), kind, str(raised.exception))

    def test_verify(self) -> None:
        for about, change in BROKEN_AT_VERIFY:
            with self.subTest(about):
                d = draft(model(), SIDE)
                change(d)
                c = Container(d.pack())
                for name in c.names:
                    c.tensor(name)
                with self.assertRaises(Corrupt):
                    c.verify()

    def test_zeros_outside_sections(self) -> None:
        good = draft(model(), SIDE).pack()
        c = Container(good)
        for s in c.sections:
            bad = bytearray(good)
            bad[s.offset + s.length] = 1
            with self.assertRaises(Corrupt):
                Container(bytes(bad)).verify()
        for at in (
            64,
            4095,
            c.directory_offset + c.directory_length,
            len(good) - 65,
            len(good) - 1,
        ):
            bad = bytearray(good)
            bad[at] ^= 1
            with self.assertRaises(Corrupt):
                Container(bytes(bad))

    def test_long_counts_allocate_nothing(self) -> None:
        d = draft([])
        good = d._directory()
        for at in range(48, 48 + 7 * 8, 8):
            for count in (1, 2**32, BIG):
                directory = good[:at] + struct.pack("<Q", count) + good[at + 8 :]
                d._directory = lambda value=directory: value  # type: ignore[method-assign]
                with self.assertRaises(Corrupt):
                    Container(d.pack())


class Accidents(unittest.TestCase):
    """A small file, cut short at every length and changed at every byte."""

    def setUp(self) -> None:
        self.sources = [
            Source("t", "BF16", (9,), weights(9), gap=(8, 64)),
            Source("u", "U8", (2,), b"ab"),
        ]
        self.data = draft(self.sources, {"s": b"side"}).pack()

    def test_every_truncation(self) -> None:
        for length in range(len(self.data)):
            with self.assertRaises(FormatError):
                Container(self.data[:length])

    def test_every_byte(self) -> None:
        c = Container(self.data)
        stored = [range(s.offset, s.offset + s.length) for s in c.sections]
        for at in range(len(self.data)):
            for change in (
                (0x01, 0xFF) if at < 64 or at >= c.directory_offset else (0x01 << at % 8,)
            ):
                data = bytearray(self.data)
                data[at] ^= change
                self.check(
                    bytes(data),
                    opens=4096 <= at < c.directory_offset,
                    loads=not any(at in r for r in stored[:5]),
                )

    def check(self, data: bytes, opens: bool, loads: bool) -> None:
        try:
            c = Container(data)
        except FormatError:
            self.assertFalse(opens)
            return
        self.assertTrue(opens)
        good = True
        for s in self.sources:
            try:
                self.assertEqual(c.tensor(s.name), s.data)
            except FormatError:
                good = False
        self.assertEqual(good, loads)

    def test_verify_finds_every_byte(self) -> None:
        end = Container(self.data).directory_offset
        for at in sorted({*range(4096, end, 61), *range(4096, 4096 + 300)}):
            data = bytearray(self.data)
            data[at] ^= 0x10
            with self.assertRaises(Corrupt):
                Container(bytes(data)).verify()

    def test_random_contents_are_safe(self) -> None:
        """Hostile sections with checksums that fit: a typed error, or some bytes of the right
        length.
        """
        r = random.Random(7)
        data = weights(3000, 9)
        d = draft([Source("t", "BF16", (3000,), data, gap=(8, 64))])
        clean = [bytes(c) for c in d.contents]
        for _ in range(400):
            d.contents = [bytearray(c) for c in clean]
            content = d.contents[r.randrange(4)]
            for _ in range(r.choice((1, 2, 50))):
                content[r.randrange(len(content))] = r.choice((0, 1, 255, r.randrange(256)))
            c = Container(d.pack())
            try:
                self.assertEqual(len(c.tensor("t")), len(data))
            except FormatError:
                pass

    def test_random_directories_are_safe(self) -> None:
        r = random.Random(8)
        d = draft(model(), SIDE)
        clean = d._directory()
        outcomes = set()
        for _ in range(1500):
            directory = bytearray(clean)
            at = r.randrange(len(directory) // 4) * 4
            directory[at : at + 4] = r.choice(
                (bytes(4), b"\xff" * 4, r.randbytes(4), struct.pack("<I", r.randrange(20)))
            )
            d._directory = lambda value=bytes(directory): value  # type: ignore[method-assign]
            try:
                c = Container(d.pack())
                for name in c.names:
                    c.tensor(name)
                c.verify()
                outcomes.add("valid")
            except FormatError as e:
                outcomes.add(type(e).__name__)
        self.assertEqual(outcomes, {"valid", "Corrupt", "Limit", "Unsupported"})


class Codes(unittest.TestCase):
    def test_the_two_ways_to_number_codes_agree(self) -> None:
        lengths = code_lengths({e: 1 + e * e % 97 for e in range(256)})
        expected = {e: int(c[::-1], 2) for e, c in codes(lengths).items()}
        self.assertEqual({e: code for code, _, e in Code(lengths, "", 0).codes}, expected)

    def test_hash_of_nothing(self) -> None:
        self.assertEqual(draft([]).identity, blake3(b""))


if __name__ == "__main__":
    unittest.main()
