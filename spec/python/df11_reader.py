"""A reader of the df11 container, versions 1.0 and 1.1, in plain Python.

Written from spec/format.md alone, to find out whether that text suffices; section numbers in
comments are those of that text. It is slow and meant to be read. The words are those of
spec/terms.md.
"""

import json
import struct
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from blake3 import blake3
from df11_directory import (
    ALIAS,
    BESIDE,
    BITS,
    CHECKSUM_CHUNK_BYTES,
    DELTA,
    ENCODINGS,
    EXPONENT_BITS,
    GAP,
    MAX_DIMENSIONS,
    NAMES,
    STORED_RAW,
    WEIGHTS,
    Array,
    Corrupt,
    Directory,
    File,
    FormatError,
    Limit,
    Tensor,
    Unsupported,
    kept_bits,
    require,
)
from df11_delta import Delta
from df11_gap import Gap
from df11_tile import Split, Tile

__all__ = ["Container", "Corrupt", "FormatError", "Limit", "Unsupported"]


# Arrays and objects of a safetensors header in each other (7).
MAX_DEPTH = 100


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, in which no key may occur twice."""
    require(len({key for key, _ in pairs}) == len(pairs), "a key occurs twice in a header")
    return dict(pairs)


class HeaderTensor(NamedTuple):
    """A tensor as a safetensors header has it (7)."""

    dtype: str
    shape: list[int]
    start: int
    end: int


def _number(text: str) -> float:
    """A number, which a double must be able to hold."""
    require(isfinite(float(text)), f"{text[:40]} is no number that a double holds")
    return float(text)


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
    right = type(value) is list and all(type(n) is int and 0 <= n < 2**64 for n in value)
    require(right, "a tensor of a header lacks a list of integers")
    return value


def _header_tensor(entry: object) -> HeaderTensor:
    right = type(entry) is dict and type(entry["dtype"]) is str
    require(right, "a member of a header is no tensor")
    start, end = _numbers(entry["data_offsets"])
    return HeaderTensor(entry["dtype"], _numbers(entry["shape"]), start, end)


def parse_header(prefix: bytes) -> dict[str, HeaderTensor]:
    """The tensors of a safetensors header (7); Corrupt, ValueError or the like where it is none."""
    size = int.from_bytes(prefix[:8], "little")
    require(len(prefix) == 8 + size, "a header is not of the length that it says")
    header = json.loads(
        prefix[8:].decode("utf-8"),
        object_pairs_hook=_unique,
        parse_constant=_number,
        parse_int=_integer,
        parse_float=_number,
    )
    require(_depth(header) <= MAX_DEPTH, "a header is nested too deep")
    # Fails if an escape is half a surrogate pair.
    json.dumps(header, ensure_ascii=False).encode()
    metadata = header.pop("__metadata__", None)
    strings = type(metadata) is dict and all(type(v) is str for v in metadata.values())
    require(metadata is None or strings, "__metadata__ is no object of strings")
    return {name: _header_tensor(entry) for name, entry in header.items()}


# The mark that transformers finds in the config.json of a folder (8).
MARK = b'\n  "quantization_config": {"quant_method": "df11"},'


def unmarked(data: bytes) -> bytes:
    """The file without the mark (8), or as it is."""
    brace = len(data) - len(data.lstrip(b" \t\n\r")) + 1
    if data[brace - 1 : brace] == b"{" and data.startswith(MARK, brace):
        return data[:brace] + data[brace + len(MARK) :]
    return data


class Container(Directory):
    """An open container: the directory and what it describes. Side files beside it are looked for
    in `folder`, the folder of its model; `base` has the bases of its tensors in delta.
    """

    def __init__(
        self,
        source: bytes | str | PathLike,
        folder: str | PathLike | None = None,
        base: "Container | None" = None,
    ) -> None:
        self.folder, self.base = None if folder is None else Path(folder), base
        self._right: set[int] = set()  # chunks that were checked
        super().__init__(source)

    def array_at(self, a: Array) -> int:
        return self.sections[a.section].offset + a.offset

    def read_array(self, a: Array, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of an array, as far as it goes, after the checksums of all chunks that they touch
        (section 4).
        """
        end = a.length if end is None else min(end, a.length)
        size = CHECKSUM_CHUNK_BYTES
        for chunk in range((a.offset + start) // size, -(-(a.offset + end) // size)):
            self._check_chunk(a.section, chunk)
        return self.data[self.array_at(a) + start : self.array_at(a) + end]

    def _check_chunk(self, section: int, chunk: int) -> None:
        s, number = self.sections[section], self._first_checksum[section] + chunk
        if number not in self._right:
            start = s.offset + chunk * CHECKSUM_CHUNK_BYTES
            data = self.data[start : min(start + CHECKSUM_CHUNK_BYTES, s.offset + s.length)]
            require(crc32(data) == self.checksums[number], f"{s.place}: checksum {chunk}")
            self._right.add(number)

    def _resolve(self, name: str) -> Tensor:
        """The record that holds the bytes of a tensor: its own, or its alias target's."""
        t = self.names[name]
        if t.encoding == ALIAS:
            t = self.tensors[t.parameters[0]]
        t.require(t.dtype in BITS, "dtype", Unsupported)
        t.require(t.encoding in ENCODINGS, "encoding", Unsupported)
        t.require(t.encoding != DELTA or self._base_name(t) is not None, "encoding", Unsupported)
        return t

    def _base_name(self, t: Tensor) -> str | None:
        """The name of a delta tensor, if the base model has its base (6.6)."""
        name = list(self.names)[t.number]
        base = self.base.names.get(name) if self.base else None
        same = base and (base.dtype, base.dimensions) == (t.dtype, t.dimensions)
        return name if same and base.hash == struct.pack("<4Q", *t.parameters) else None

    def _coded(self, t: Tensor) -> Gap | Tile | Delta:
        arrays = self.arrays_of(t)

        def read(i: int, *part: int) -> bytes:
            return self.read_array(arrays[i], *part)

        if t.encoding == DELTA:
            return Delta(t.dimensions, read, lambda: self.base.tensor(self._base_name(t)))
        if t.encoding == GAP:
            return Gap(t.parameters, t.elements, read)
        split = Split(BITS[t.dtype], EXPONENT_BITS[t.dtype], kept_bits(t))
        return Tile(t.parameters, t.elements, split, read)

    def tensor(self, name: str) -> bytes:
        """The decoded bytes of a tensor (section 6)."""
        t = self._resolve(name)
        if t.encoding == STORED_RAW:
            return b"".join(self.read_array(a) for a in self.arrays_of(t))
        return self._coded(t).decode(0, t.elements)

    def rows(self, name: str, first: int, count: int) -> bytes:
        """The decoded bytes of some rows; of a coded tensor, only the thread blocks or strips that
        hold them are decoded. A tensor without dimensions is one row.
        """
        t = self._resolve(name)
        rows = t.shape[0] if t.dimensions else 1
        if first < 0 or count < 0 or first + count > rows:
            raise IndexError(f"rows {first} to {first + count} of {rows}")
        start, end = (n * t.elements // max(rows, 1) for n in (first, first + count))
        if start == end:
            return b""
        if t.encoding != STORED_RAW:
            return self._coded(t).decode(start, end)
        bits = BITS[t.dtype]
        if start * bits % 8 or end * bits % 8:
            raise ValueError("the rows do not fill whole bytes")
        return self.read_array(self.arrays_of(t)[0], start * bits // 8, end * bits // 8)

    # --- files ------------------------------------------------------------------------------------

    def _members(self, f: File) -> dict[str, Tensor]:
        return {name: t for name, t in self.names.items() if t.file == f.number}

    def _pieces(self, f: File) -> list[str]:
        """Section 7: the tensors of a weights file, after checking that they cover it."""
        position = self.arrays_of(f)[0].length
        members = self._members(f).items()
        pieces = sorted((t.file_offset, t.bytes, name) for name, t in members)
        for offset, size, name in pieces:
            self._resolve(name)
            require(offset == position, f"{name!r} overlaps, or leaves a hole")
            position += size
        f.require(position == f.length, "length")
        return [name for _, _, name in pieces]

    def restore(self, path: str) -> bytes:
        """The bytes of an original file."""
        f = self.paths[path]
        if f.kind == BESIDE:
            return self._beside(f, path)
        parts = [self.read_array(a) for a in self.arrays_of(f)]
        if f.kind == WEIGHTS:
            parts += map(self.tensor, self._pieces(f))
        return b"".join(parts)

    def _beside(self, f: File, path: str) -> bytes:
        """The original of a side file beside the container (8)."""
        f.require(self.folder is not None, "kind", Unsupported)
        try:
            data = (self.folder / path).read_bytes()
        except OSError as e:
            raise Corrupt(f"file {path} is missing: {e}") from None
        candidates = [data, unmarked(data)] if path.split("/")[-1] == "config.json" else [data]
        for original in candidates:
            if len(original) == f.length and blake3(original) == f.hash:
                return original
        raise Corrupt(f"file {path} changed")

    def restore_to(self, folder: str | PathLike) -> None:
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
        self._verify_stored()
        checks = [(f"tensor {name}", self._verify_tensor, name) for name in self.names]
        checks += [(f"file {path}", self._verify_file, path) for path in self.paths]
        skipped: list[str] = []
        for what, check, name in checks:
            try:
                check(name)
            except Unsupported:
                skipped.append(what)
        if self.shard.shard_count == 1:
            self._verify_identity()
        return skipped

    def _verify_stored(self) -> None:
        """All checksums, and the zeros between sections and between arrays (2, 3 and 4)."""
        following = [*(s.offset for s in self.sections[1:]), self.header.directory_offset]
        for i, (s, after) in enumerate(zip(self.sections, following)):
            for chunk in range(-(-s.length // CHECKSUM_CHUNK_BYTES)):
                self._check_chunk(i, chunk)
            self._zeros(s.offset + s.length, after)
        ends = [s.offset for s in self.sections]
        for a in self.arrays:
            self._zeros(ends[a.section], self.array_at(a))
            ends[a.section] = self.array_at(a) + a.length

    def _verify_tensor(self, name: str) -> None:
        t, data = self._resolve(name), self.tensor(name)
        if t.encoding != STORED_RAW:
            self._coded(t).verify(data)
        require(blake3(data) == t.hash, f"wrong hash of {name}")

    def _verify_file(self, path: str) -> None:
        f = self.paths[path]
        if f.kind == WEIGHTS:
            self._verify_prefix(f)
        require(blake3(self.restore(path)) == f.hash, f"wrong hash of {path}")

    def _verify_prefix(self, f: File) -> None:
        """Section 7: the header of a weights file has the tensors of the directory, also those that
        are Unsupported.
        """
        prefix = self.read_array(self.arrays_of(f)[0])
        try:
            header = parse_header(prefix)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise Corrupt(f"no safetensors header: {e}") from None
        end = 0
        for h in sorted(header.values(), key=lambda h: (h.start, h.end)):
            right = h.start == end <= h.end and len(h.shape) <= MAX_DIMENSIONS
            require(right, "a tensor of a header overlaps, or leaves a hole")
            end = h.end
        require(len(prefix) + end == f.length, "the tensors of a header do not cover the file")
        members = self._members(f)
        require(set(header) == set(members), "the tensors of a header are not the directory's")
        for name, t in members.items():
            h, dtype = header[name], NAMES.get(t.dtype)
            right_dtype = h.dtype == dtype if dtype else h.dtype not in NAMES.values()
            right_size = not dtype or h.end - h.start == t.bytes
            place = t.file_offset - len(prefix) == h.start and list(t.dimensions) == h.shape
            require(right_dtype and right_size and place, f"{name!r} differs in the header")

    def _verify_identity(self) -> None:
        """Section 8."""
        records = bytearray()
        for path, f in sorted((path.encode(), f) for path, f in self.paths.items()):
            records += struct.pack("<?Q", f.kind == WEIGHTS, len(path)) + path
            records += struct.pack("<Q32s", f.length, f.hash)
        require(blake3(bytes(records)) == self.shard.identity, "wrong identity")
