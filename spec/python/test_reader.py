"""Tests of what the vectors do not show (check_vectors.py reads those): parts of tensors, folders,
damage anywhere in a file, and hostile content under checksums that fit.

Run: python3 -m unittest discover -s spec/python
"""

import random
import struct
import tempfile
import unittest
from pathlib import Path
from zlib import crc32

from check_vectors import FOLDER, first_failure, read
from df11_reader import MARK, Container, Corrupt

CHUNK = 2**20
INTERESTING = (bytes(4), b"\xff" * 4, bytes([1, 0, 0, 0]), bytes([9, 0, 0, 0]))


def vector(name: str) -> bytes:
    return read(FOLDER / f"valid/{name}.df11.gz")


def directory(valid: Container) -> range:
    start = valid.header.directory_offset
    return range(start, start + valid.header.directory_length)


def sealed(data: bytearray, valid: Container) -> bytes:
    """With checksums that fit, in the places of a valid container."""
    lists = valid.files, valid.blocks, valid.sections, valid.tensors, valid.arrays
    place = directory(valid)
    at = place.start + 48 + 8 * 6 + sum(record.size for records in lists for record in records)
    for section in valid.sections:
        end = section.offset + section.length
        for start in range(section.offset, end, CHUNK):
            data[at : at + 4] = struct.pack("<I", crc32(data[start : min(start + CHUNK, end)]))
            at += 4
    data[56:60] = struct.pack("<I", crc32(data[place.start : place.stop]))
    data[60:64] = struct.pack("<I", crc32(data[:60]))
    data[-64:] = data[:64]
    return bytes(data)


class Parts(unittest.TestCase):
    """Damage elsewhere does not matter."""

    def check(self, damaged: bytes, good: Container, name: str, right: tuple, wrong: tuple) -> None:
        c, whole = Container(damaged), good.tensor(name)
        size = len(whole) // good.names[name].shape[0]
        for first, count in right:
            self.assertEqual(c.rows(name, first, count), whole[first * size :][: count * size])
        for first, count in wrong:
            self.assertRaises(Corrupt, c.rows, name, first, count)
        self.assertRaises(Corrupt, c.tensor, name)

    def test_rows_touch_only_their_thread_blocks(self) -> None:
        data = bytearray(vector("thread-blocks"))
        good = Container(bytes(data))
        rows = good.tensors[0].shape[0]
        end = good.array_at(good.arrays[4]) + good.arrays[4].length
        data[end - 8 : end] = bytes(8)  # of the last thread block
        right, wrong = ((0, 3), (rows // 2, 10)), ((rows - 1, 1), (0, rows))
        self.check(sealed(data, good), good, "w", right, wrong)

    def test_rows_touch_only_their_strips(self) -> None:
        data = bytearray(vector("tile-whole"))
        good = Container(bytes(data))
        at = good.array_at(good.arrays[2]) + 32 * 2  # the first tile of the second strip
        data[at + 8 : at + 32] = b"\xff" * 24
        right, wrong = ((0, 32), (31, 1), (5, 20)), ((32, 1), (31, 2), (63, 1))
        self.check(sealed(data, good), good, "w", right, wrong)

    def test_rows_touch_only_their_chunks(self) -> None:
        data = bytearray(vector("two-chunks"))
        good = Container(bytes(data))
        data[good.sections[0].offset + CHUNK] ^= 1
        self.check(bytes(data), good, "x", ((1, CHUNK - 1),), ((1, CHUNK), (CHUNK, 1)))

    def test_rows_that_are_none(self) -> None:
        c = Container(vector("tile-whole"))
        self.assertEqual((c.rows("w", 0, 0), c.rows("w", 64, 0)), (b"", b""))
        for first, count in ((0, 65), (64, 1), (-1, 1), (1, -1)):
            self.assertRaises(IndexError, c.rows, "w", first, count)
        c = Container(vector("sub-byte-rows"))
        for name in c.names:
            self.assertRaises(ValueError, c.rows, name, 0, 1)
            self.assertRaises(ValueError, c.rows, name, 1, 1)


class Folders(unittest.TestCase):
    def test_files_are_restored_to_a_folder_and_read_from_a_path(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path, out = Path(folder) / "m.df11", Path(folder) / "out"
            path.write_bytes(vector("side-files"))
            c = Container(path)
            c.restore_to(out)
            self.assertEqual(c.verify(), [])
            for name in c.paths:
                self.assertEqual((out / name).read_bytes(), c.restore(name))
            self.assertRaises(FileExistsError, c.restore_to, out)

    def test_files_beside_the_container(self) -> None:
        data = vector("side-files-beside")
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
        unchecked = ["file config.json", "file tokenizer/empty.txt"]
        self.assertEqual(Container(data).verify(), unchecked)


class Damage(unittest.TestCase):
    """Any damage of a file gives a typed error, which `first_failure` distinguishes from others."""

    def test_every_truncation(self) -> None:
        data = vector("one-weight")
        for length in range(len(data)):
            self.assertEqual(first_failure(data[:length])[0], "open")

    def test_every_byte(self) -> None:
        for name in ("one-weight", "tile-one-weight", "side-files"):
            data = bytearray(vector(name))
            c = Container(bytes(data))
            stored = [range(s.offset, s.offset + s.length) for s in c.sections]
            for at in range(len(data)):
                outside = at < 4096 or at >= directory(c).start
                zero = 64 <= at < directory(c).start and not any(at in part for part in stored)
                if zero and at % 61:  # of the zeros between sections some
                    continue
                data[at] ^= 1 << at % 8
                level, _ = first_failure(bytes(data))
                self.assertIn(level, ["open"] if outside else ["load", "verify"], f"{name}, {at}")
                data[at] ^= 1 << at % 8

    def test_hostile_content(self) -> None:
        """Sections and directories with checksums that fit."""
        r, levels = random.Random(7), set()
        names = "one-thread-more", "aliases", "side-files", "metadata", "tile-edges", "tile-mixed"
        for name in names:
            good = Container(vector(name))
            parts = [range(s.offset, s.offset + s.length) for s in good.sections]
            parts += [directory(good)] * len(parts)
            for _ in range(100):
                data = bytearray(vector(name))
                for _ in range(r.choice((1, 1, 2, 50))):
                    part = r.choice(parts)
                    at = part.start + r.randrange(len(part)) // 4 * 4
                    data[at : at + 4] = r.choice((*INTERESTING, r.randbytes(4)))
                levels.add(first_failure(sealed(data, good))[0])
        self.assertLessEqual({"open", "load", "verify"}, levels)


if __name__ == "__main__":
    unittest.main()
