"""A reader of the df11 container, version 1.0, in plain Python.

Written from spec/format.md alone, to find out whether that text suffices; section numbers in
comments are those of that text. It is slow and meant to be read. The words are those of
spec/terms.md.
"""

import json
import os
import struct
from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import isinf
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from blake3 import blake3
from df11_directory import (
    ALIAS,
    BESIDE,
    BITS,
    CHECKSUM_CHUNK_BYTES,
    ENCODINGS,
    GAP,
    MAX_CODE_LENGTH,
    MAX_DIMENSIONS,
    NAMES,
    STORED_RAW,
    TILE,
    WEIGHTS,
    Array,
    Corrupt,
    Directory,
    FormatError,
    Limit,
    Tensor,
    Unsupported,
    ceil_div,
    row_size,
)
from df11_tile import RECORD_BYTES, Matrix, PairCode, Record, TileBits

__all__ = ["Container", "Corrupt", "FormatError", "Limit", "Unsupported"]


# Arrays and objects of a safetensors header in each other (7).
MAX_DEPTH = 100


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, in which no key may occur twice."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


class HeaderTensor(NamedTuple):
    """A tensor as a safetensors header has it (7)."""

    dtype: str
    shape: list[int]
    start: int
    end: int


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _number(text: str) -> float:
    """A number, which a double must be able to hold."""
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:40]} is beyond the range of a double")
    return value


def _integer(text: str) -> float | int:
    """`-0` is an integer to Python, and a number with a sign to the format."""
    value = _number(text)
    return value if text.startswith("-") else int(text)


def _depth(value: object) -> int:
    """How many arrays and objects lie in each other."""
    inner = value.values() if type(value) is dict else value if type(value) is list else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _numbers(value: object) -> list[int]:
    """A list of integers of 64 bits; Python takes booleans for integers too."""
    if type(value) is not list or not all(type(n) is int and 0 <= n < 2**64 for n in value):
        raise ValueError("no list of integers")
    return value


def _header_tensor(entry: object) -> HeaderTensor:
    if type(entry) is not dict or type(entry["dtype"]) is not str:
        raise ValueError("no entry of a tensor")
    start, end = _numbers(entry["data_offsets"])
    return HeaderTensor(entry["dtype"], _numbers(entry["shape"]), start, end)


def parse_header(prefix: bytes) -> dict[str, HeaderTensor]:
    """The tensors of a safetensors header (7); ValueError or the like where it is none."""
    if len(prefix) < 8 or int.from_bytes(prefix[:8], "little") != len(prefix) - 8:
        raise ValueError("not of the length that it says")
    text = prefix[8:].decode("utf-8")
    header = json.loads(
        text,
        object_pairs_hook=_unique,
        parse_constant=_no_constant,
        parse_int=_integer,
        parse_float=_number,
    )
    if _depth(header) > MAX_DEPTH:
        raise ValueError("nested too deep")
    # Fails if an escape is half a surrogate pair.
    json.dumps(header, ensure_ascii=False).encode()
    metadata = header.pop("__metadata__", None)
    if metadata is not None and (
        type(metadata) is not dict or any(type(v) is not str for v in metadata.values())
    ):
        raise ValueError("__metadata__ is no object of strings")
    return {name: _header_tensor(entry) for name, entry in header.items()}


# What transformers needs to find in the config.json of a folder (8).
MARK = b'\n  "quantization_config": {"quant_method": "df11"},'


def unmarked(data: bytes) -> bytes:
    """The file without the mark (8), or as it is."""
    brace = len(data) - len(data.lstrip(b" \t\n\r")) + 1
    if data[brace - 1 : brace] == b"{" and data.startswith(MARK, brace):
        return data[:brace] + data[brace + len(MARK) :]
    return data


def weights(exponents: bytes, signs_mantissas: bytes) -> bytes:
    """The weights of exponents and sign/mantissa bytes (6.3)."""
    out = bytearray(2 * len(exponents))
    out[::2] = bytes((e & 1) << 7 | s & 0x7F for e, s in zip(exponents, signs_mantissas))
    out[1::2] = bytes(s & 0x80 | e >> 1 for e, s in zip(exponents, signs_mantissas))
    return bytes(out)


class Code:
    """The code of a tensor (6.3): a table from the next 16 bits of the bitstream to code length and
    exponent.
    """

    def __init__(self, lengths: bytes, place: str, at: int) -> None:
        used = [e for e in range(256) if lengths[e]]
        for e in used:
            if lengths[e] > MAX_CODE_LENGTH:
                raise Corrupt(place, at + e, f"code length {lengths[e]}")
        whole = 1 << MAX_CODE_LENGTH
        total = sum(whole >> lengths[e] for e in used)
        if total != whole and not (len(used) == 1 and lengths[used[0]] == 1):
            raise Corrupt(place, at, "the code lengths do not form a code")
        self.lengths = lengths
        self.length_of, self.exponent_of = bytearray(whole), bytearray(whole)
        # (code with its first bit lowest, length, exponent)
        self.codes: list[tuple[int, int, int]] = []
        code, before = 0, 0
        for length, e in sorted((lengths[e], e) for e in used):
            code <<= length - before
            mirrored = int(f"{code:0{length}b}"[::-1], 2)
            self.codes.append((mirrored, length, e))
            # All indices whose low `length` bits are the code.
            self.length_of[mirrored :: 1 << length] = bytes([length]) * (whole >> length)
            self.exponent_of[mirrored :: 1 << length] = bytes([e]) * (whole >> length)
            code, before = code + 1, length

    def luts(self) -> bytes:
        """The LUTs that the code lengths imply (6.3, LUTs)."""
        long_prefixes = sorted({code & 0xFF for code, length, _ in self.codes if length > 8})
        number = {prefix: k for k, prefix in enumerate(long_prefixes, start=1)}
        tables = [[0] * 256 for _ in range(1 + len(number))]
        for prefix, k in number.items():
            tables[0][prefix] = k
        for code, length, e in self.codes:
            table, rest = (
                (tables[0], length) if length <= 8 else (tables[number[code & 0xFF]], length - 8)
            )
            for index in range(code if length <= 8 else code >> 8, 256, 1 << rest):
                table[index] = length * 256 + e
        return b"".join(struct.pack("<256H", *table) for table in tables)

    def exponents(
        self, data: bytes, start: int, end: int, count: int, place: str, at: int
    ) -> bytes:
        """`count` exponents from bit `start` of `data` on, which must end exactly at bit `end`
        (6.3, Decoding).
        """
        if start > end or count > end - start:  # every code has at least one bit
            raise Corrupt(place, at, "the thread block has too few bits for its elements")
        length_of, exponent_of = self.length_of, self.exponent_of
        out, pos = bytearray(count), start
        try:
            for i in range(count):
                byte = pos >> 3
                bits = (data[byte] | data[byte + 1] << 8 | data[byte + 2] << 16) >> (
                    pos & 7
                ) & 0xFFFF
                out[i] = exponent_of[bits]
                if not length_of[bits]:
                    raise Corrupt(
                        place, at, f"no code matches at bit {pos} of the thread blocks read"
                    )
                pos += length_of[bits]
        except IndexError:  # `data` reaches well past `end`, so the element does not belong here
            pos = -1
        if pos != end:
            raise Corrupt(place, at, "a thread block does not end where the next one starts")
        return bytes(out)


class GapIndex(NamedTuple):
    """What decoding any part of a gap tensor needs (6.3)."""

    code: Code
    offsets: tuple[int, ...]
    thread_bytes: int
    block_threads: int
    bit_count: int
    thread_count: int


class Container(Directory):
    """An open container: the directory and what it describes. Side files beside it are looked for
    in `folder`, the folder of its model.
    """

    def __init__(
        self, source: bytes | str | os.PathLike, folder: str | os.PathLike | None = None
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        super().__init__(source)

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resolve(self, name: str) -> Tensor:
        """The record that holds the bytes of a tensor: its own, or its alias target's."""
        t = self.tensors[self.index[name]]
        self._supported(t)
        if t.encoding == ALIAS:
            t = self.tensors[t.parameters[0]]
            self._supported(t)
        return t

    def _supported(self, t: Tensor) -> None:
        t.unsupported_if(t.dtype not in BITS, "dtype")
        t.unsupported_if(t.encoding not in ENCODINGS, "encoding")

    def _array_at(self, a: Array) -> int:
        return self.sections[a.section].offset + a.offset

    def _read_array(self, a: Array, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of an array."""
        end = a.length if end is None else end
        return self._read_section(a.section, a.offset + start, a.offset + end)

    def _read_section(self, i: int, start: int, end: int) -> bytes:
        """Bytes of a section, after the checksums of all chunks that they touch (section 4)."""
        s = self.sections[i]
        chunk = start - start % CHECKSUM_CHUNK_BYTES
        parts = []
        while chunk < end:
            data = self._read(
                s.offset + chunk, min(CHECKSUM_CHUNK_BYTES, s.length - chunk), "section"
            )
            number = self._first_checksum[i] + chunk // CHECKSUM_CHUNK_BYTES
            if crc32(data) != self.checksums[number]:
                raise Corrupt(s.place, s.offset + chunk, "wrong checksum")
            parts.append(data[max(0, start - chunk) : end - chunk])
            chunk += CHECKSUM_CHUNK_BYTES
        return b"".join(parts)

    def tensor(self, name: str) -> bytes:
        """The decoded bytes of a tensor (section 6)."""
        t = self._resolve(name)
        if t.encoding == STORED_RAW:
            return b"".join(self._read_array(a) for a in self._arrays(t))
        if t.encoding == TILE:
            return self._decode_strips(t, 0, self._elements(t))
        index = self._gap_index(t)
        return self._decode(t, index, 0, len(index.offsets) - 1)

    def rows(self, name: str, first: int, count: int) -> bytes:
        """The decoded bytes of some rows; of a gap or tile tensor, only the thread blocks or strips
        that hold them are decoded.
        """
        t = self._resolve(name)
        rows, per_row = row_size(t.dimensions)
        if first < 0 or count < 0 or first + count > rows:
            raise IndexError(f"rows {first} to {first + count} of {rows}")
        start, end = first * per_row, (first + count) * per_row
        if start == end:
            return b""
        if t.encoding == STORED_RAW:
            bits = BITS[t.dtype]
            if start * bits % 8 or end * bits % 8:
                raise ValueError("the rows do not fill whole bytes")
            return self._read_array(self._arrays(t)[0], start * bits // 8, end * bits // 8)
        if t.encoding == TILE:
            return self._decode_strips(t, start, end)
        index = self._gap_index(t)
        low, high = bisect_right(index.offsets, start) - 1, bisect_left(index.offsets, end)
        base = index.offsets[low]
        return self._decode(t, index, low, high)[2 * (start - base) : 2 * (end - base)]

    def _gap_index(self, t: Tensor) -> GapIndex:
        """Code lengths and output offsets of a gap tensor, checked (6.3)."""
        codebook, _, output_offsets, _, _ = self._arrays(t)
        code = Code(self._read_array(codebook, 0, 256), "codebook", self._array_at(codebook))
        data = self._read_array(output_offsets)
        offsets = struct.unpack(f"<{len(data) // 8}Q", data)
        if offsets[0] != 0 or offsets[-1] != self._elements(t) or list(offsets) != sorted(offsets):
            at = self._array_at(output_offsets)
            raise Corrupt("output_offsets", at, "not from 0 up to the number of elements")
        thread_bytes, block_threads, bit_count, _ = t.parameters
        threads = ceil_div(bit_count, 8 * thread_bytes)
        return GapIndex(code, offsets, thread_bytes, block_threads, bit_count, threads)

    def _decode(self, t: Tensor, g: GapIndex, low: int, high: int) -> bytes:
        """The weights of thread blocks `low` up to `high` (6.3, Decoding)."""
        _, gaps, _, bitstream, plane = self._arrays(t)
        first, end = low * g.block_threads, min(high * g.block_threads, g.thread_count)
        # One thread more: the last thread block ends where the one after it starts. A block's first
        # thread is an even one.
        gap_bytes = self._read_array(gaps, first // 2, min(end // 2 + 1, gaps.length))
        # A code may reach two bytes into the next thread; the zeros are for reading past the end of
        # the bitstream.
        data = self._read_array(
            bitstream, first * g.thread_bytes, min(end * g.thread_bytes + 2, bitstream.length)
        ) + bytes(3)
        origin = 8 * first * g.thread_bytes

        def start_bit(b: int) -> int:
            thread = b * g.block_threads
            if thread >= g.thread_count:
                return g.bit_count - origin
            return 8 * thread * g.thread_bytes + (gap_bytes[(thread - first) // 2] & 15) - origin

        if low == 0 and gap_bytes[0] & 15:
            raise Corrupt("gaps", self._array_at(gaps), "the first code does not start at bit 0")
        parts = []
        for b in range(low, high):
            count = g.offsets[b + 1] - g.offsets[b]
            start, stop = start_bit(b), start_bit(b + 1)
            parts.append(
                g.code.exponents(
                    data, start, stop, count, f"thread block {b}", self._array_at(bitstream)
                )
            )
        signs = self._read_array(plane, g.offsets[low], g.offsets[high])
        return weights(b"".join(parts), signs)

    def _decode_strips(self, t: Tensor, start: int, end: int, verify: bool = False) -> bytes:
        """The weights from element `start` to `end` of a tile tensor, of which only the strips that
        hold them are read (6.4).
        """
        codebook, records, bitstream, plane = self._arrays(t)
        tile_columns, columns, bit_count, _ = t.parameters
        m = Matrix(tile_columns, columns, self._elements(t))
        code = PairCode(self._read_array(codebook), self._array_at(codebook))
        low, high = start // m.strip_elements, ceil_div(end, m.strip_elements)
        first, last = low * m.strip_tiles, min(high * m.strip_tiles, m.tile_count)
        table = self._tile_records(records, first, last, m.tile_count, bit_count)
        origin = table[0].offset
        data = self._read_array(bitstream, origin // 8, ceil_div(table[-1].offset, 8))
        base, at = low * m.strip_elements, self._array_at(bitstream) + origin // 8
        out = bytearray(2 * (m.plane_start(last) - base))
        for i, record in zip(range(first, last), table):
            units = list(m.units(i))
            tile = TileBits(units, code, record, data, origin, at)
            if verify:
                tile.verify()
            signs = self._read_array(plane, m.plane_start(i), m.plane_start(i + 1))
            for unit in units:
                place, mine = 2 * (unit.element - base), signs[: unit.weights]
                made = weights(tile.exponents[unit.element], mine)
                out[place : place + len(made)], signs = made, signs[unit.weights :]
        return bytes(out[2 * (start - base) : 2 * (end - base)])

    def _tile_records(
        self, records: Array, first: int, last: int, count: int, bit_count: int
    ) -> list[Record]:
        """The records of tiles `first` to `last` and the one after them, checked (6.4)."""
        data = self._read_array(records, RECORD_BYTES * first, RECORD_BYTES * (last + 1))
        at = self._array_at(records)
        table = [Record.read(data[i : i + RECORD_BYTES]) for i in range(0, len(data), RECORD_BYTES)]
        for i, record in enumerate(table, start=first):
            if record.offset % 8 or record.offset > bit_count or i == 0 and record.offset:
                raise Corrupt(f"records[{i}]", at + RECORD_BYTES * i, f"offset {record.offset}")
        for i, (record, after) in enumerate(zip(table, table[1:]), start=first):
            if record.end() != after.offset:
                raise Corrupt(f"records[{i}]", at + RECORD_BYTES * i, f"ends at {record.end()}")
        if last == count and int.from_bytes(data[-RECORD_BYTES:], "little") != bit_count:
            raise Corrupt(f"records[{count}]", at + RECORD_BYTES * count, "not bit_count and zeros")
        return table

    # --- files ------------------------------------------------------------------------------------

    def _pieces(self, i: int) -> list[tuple[int, int, int]]:
        """Section 7: (file_offset, bytes, tensor) of a weights file, after checking that they cover
        it.
        """
        f = self.files[i]
        position = self._arrays(f)[0].length
        pieces = []
        for k, t in enumerate(self.tensors):
            if t.file == i:
                self._supported(t)
                pieces.append((t.file_offset, self._size(t), k))
        for offset, size, k in sorted(pieces):
            t = self.tensors[k]
            t.corrupt_if(offset != position, "file_offset", "overlaps, or leaves a hole")
            position += size
        f.corrupt_if(position != f.length, "length", "the tensors do not cover the file")
        return sorted(pieces)

    def restore(self, path: str) -> bytes:
        """The bytes of an original file."""
        i = self.paths.index(path)
        if self.files[i].kind == BESIDE:
            return self._beside(i)
        parts = [self._read_array(a) for a in self._arrays(self.files[i])]
        if self.files[i].kind == WEIGHTS:
            parts += [self.tensor(self.names[k]) for _, _, k in self._pieces(i)]
        return b"".join(parts)

    def _beside(self, i: int) -> bytes:
        """The original of a side file beside the container (8)."""
        f, path = self.files[i], self.paths[i]
        f.unsupported_if(self.folder is None, "kind")
        try:
            data = (self.folder / path).read_bytes()
        except OSError as e:
            raise Corrupt(f"file {path}", f.at, f"missing: {e}") from None
        candidates = [data, unmarked(data)] if path.split("/")[-1] == "config.json" else [data]
        for original in candidates:
            if len(original) == f.length and blake3(original) == f.hash:
                return original
        raise Corrupt(f"file {path}", f.at, "changed")

    def restore_to(self, folder: str | os.PathLike) -> None:
        """Writes all original files; an existing file is never overwritten."""
        for path in self.paths:
            target = Path(folder) / path
            data = self.restore(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "xb") as out:
                out.write(data)

    # --- verify -----------------------------------------------------------------------------------

    def verify(self) -> list[str]:
        """Everything of section 9. Returns what could not be checked: what is Unsupported."""
        skipped: list[str] = []
        self._verify_stored()
        for i, name in enumerate(self.names):
            try:
                self._verify_tensor(i)
            except Unsupported:
                skipped.append(f"tensor {name}")
        for i, path in enumerate(self.paths):
            try:
                self._verify_file(i)
            except Unsupported:
                skipped.append(f"file {path}")
        if self.shard_count == 1:
            self._verify_identity()
        return skipped

    def _verify_stored(self) -> None:
        """All checksums, and the zeros between sections and between arrays (2, 3 and 4)."""
        for i, s in enumerate(self.sections):
            self._read_section(i, 0, s.length)
            following = (
                self.sections[i + 1].offset if i + 1 < len(self.sections) else self.directory_offset
            )
            self._zeros(s.offset + s.length, following, "zeros after a section")
        ends = [0] * len(self.sections)
        for a in self.arrays:
            base = self.sections[a.section].offset
            self._zeros(base + ends[a.section], base + a.offset, "zeros between arrays")
            ends[a.section] = a.offset + a.length

    def _verify_tensor(self, i: int) -> None:
        t, name = self.tensors[i], self.names[i]
        data = self.tensor(name)
        if t.encoding == GAP:
            self._verify_gap(t, data)
        elif t.encoding == TILE:
            self._verify_tile(t)
        t.corrupt_if(blake3(data) != t.hash, "hash", f"wrong hash of {name}")

    def _verify_gap(self, t: Tensor, data: bytes) -> None:
        """6.3: LUTs, every gap and output offset, and the bits from bit_count on, from the weights
        just decoded.
        """
        codebook, gaps, output_offsets, bitstream, _ = self._arrays(t)
        g = self._gap_index(t)

        def check(right: bool, place: str, a: Array, message: str) -> None:
            if not right:
                raise Corrupt(place, self._array_at(a), message)

        luts = self._read_array(codebook, 256)
        check(luts == g.code.luts(), "LUTs", codebook, "do not follow from the code lengths")
        exponents = ((high & 0x7F) << 1 | low >> 7 for low, high in zip(data[::2], data[1::2]))
        boundaries = [0, *accumulate(g.code.lengths[e] for e in exponents)]
        bits = 8 * g.thread_bytes
        firsts = [bisect_left(boundaries, bits * i) for i in range(g.thread_count)]
        nibbles = [boundaries[first] - bits * i for i, first in enumerate(firsts)] + [0] * (
            g.thread_count % 2
        )
        expected = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2]))
        follow = "do not follow from the bitstream"
        check(self._read_array(gaps) == expected, "gaps", gaps, follow)
        offsets = (*firsts[:: g.block_threads], len(boundaries) - 1)
        check(g.offsets == offsets, "output_offsets", output_offsets, follow)
        tail = int.from_bytes(self._read_array(bitstream, g.bit_count // 8), "little")
        check(not tail >> g.bit_count % 8, "bitstream", bitstream, "not zero from bit_count on")

    def _verify_tile(self, t: Tensor) -> None:
        """6.4: what decoding does not find."""
        self._decode_strips(t, 0, self._elements(t), verify=True)
        bitstream, end = self._arrays(t)[2], t.parameters[2] // 8
        if self._read_array(bitstream, end).strip(b"\0"):
            raise Corrupt(
                "bitstream", self._array_at(bitstream) + end, "not zero from bit_count on"
            )

    def _verify_file(self, i: int) -> None:
        f, path = self.files[i], self.paths[i]
        if f.kind == WEIGHTS:
            self._verify_prefix(i)
            self._pieces(i)
        f.corrupt_if(blake3(self.restore(path)) != f.hash, "hash", f"wrong hash of {path}")

    def _verify_prefix(self, i: int) -> None:
        """Section 7: the header of a weights file has the tensors of the directory, also those that
        are Unsupported.
        """
        f, array = self.files[i], self._arrays(self.files[i])[0]
        prefix, at = self._read_array(array), self._array_at(array)
        try:
            header = parse_header(prefix)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise Corrupt("prefix", at + 8, f"no safetensors header: {e}") from None
        end = 0
        for name, h in sorted(header.items(), key=lambda item: (item[1].start, item[1].end)):
            if h.start != end or h.end < h.start or len(h.shape) > MAX_DIMENSIONS:
                raise Corrupt("prefix", at + 8, f"{name!r} overlaps, or leaves a hole")
            end = h.end
        if len(prefix) + end != f.length:
            raise Corrupt("prefix", at + 8, "its tensors do not cover the file")
        members = {self.names[k]: t for k, t in enumerate(self.tensors) if t.file == i}
        if set(header) != set(members):
            raise Corrupt("prefix", at + 8, "its tensors are not those of the directory")
        for name, t in members.items():
            h = header[name]
            dtype = NAMES.get(t.dtype)
            right_dtype = h.dtype == dtype if dtype else h.dtype not in NAMES.values()
            right_size = not dtype or h.end - h.start == self._size(t)
            place = t.file_offset - len(prefix) == h.start and list(t.dimensions) == h.shape
            if not (right_dtype and right_size and place):
                raise Corrupt("prefix", at + 8, f"{name!r} differs from the directory")

    def _verify_identity(self) -> None:
        """Section 8."""
        digest = b"".join(
            bytes([f.kind == WEIGHTS])
            + struct.pack("<Q", f.path_length)
            + path
            + struct.pack("<Q", f.length)
            + f.hash
            for path, f in sorted((path.encode(), f) for f, path in zip(self.files, self.paths))
        )
        if blake3(digest) != self.identity:
            raise Corrupt("identity", self.directory_offset + 16, "wrong identity")
