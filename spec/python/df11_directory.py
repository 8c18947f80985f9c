"""The directory of a df11 container: everything that section 9 of spec/format.md checks at `open`.

See df11_reader.py, which loads, restores and verifies.
"""

import os
import struct
from collections import Counter
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

# Section 1, constants.
MAGIC = bytes.fromhex("DF44463131 0D0A1A")
NONE = 2**64 - 1
HEAD_BYTES = 4096
HEADER_BYTES = 64
SECTION_ALIGNMENT = 4096
ARRAY_ALIGNMENT = 256
CHECKSUM_CHUNK_BYTES = 1 << 20
MAX_DIRECTORY_BYTES = 268435456
MAX_FILE_BYTES = 2**63 - 1
MAX_NAME_BYTES = 4096
MAX_COMPONENT_BYTES = 255
MAX_PATH_COMPONENTS = 32
MAX_FILES = 10000
MAX_FOLDERS = 10000
MAX_ALIASES = 15
MAX_KEY_BYTES = 255
MAX_VALUE_BYTES = 65536
MAX_METADATA_BYTES = 1048576
MAX_DIMENSIONS = 8
MAX_SHARDS = 100000
MAX_CODE_LENGTH = 16

WEIGHTS, SIDE_FILE, BESIDE = 0, 1, 2
CODEBOOK, INDEX, BITSTREAM, PLANE, RAW, PREFIX, SIDE = range(1, 8)
ALIAS, STORED_RAW, GAP, TILE = 0, 1, 2, 3
ENCODINGS = (ALIAS, STORED_RAW, GAP, TILE)
BF16 = 15
# Section 5: bits of an element by dtype.
BITS = dict(
    enumerate(
        [8, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64], start=1
    )
)
# Section 5: names by dtype.
NAMES = dict(
    enumerate(
        (
            "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
            "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
        ).split(),
        start=1,
    )
)
# Section 6: kinds of the sections that hold the arrays of each encoding, in order.
GAP_KINDS = (CODEBOOK, INDEX, INDEX, BITSTREAM, PLANE)
TILE_KINDS = (CODEBOOK, INDEX, BITSTREAM, PLANE)


class FormatError(Exception):
    """A problem with a container: where (in words), and the byte offset in the file."""

    def __init__(self, place: str, offset: int, message: str) -> None:
        super().__init__(f"{place}, byte {offset}: {message}")
        self.place, self.offset = place, offset


class Unsupported(FormatError):
    """The file may be valid, but needs a newer reader."""


class Corrupt(FormatError):
    """A rule of the specification is broken."""


class Limit(FormatError):
    """A limit is exceeded, or arithmetic overflows."""


class File(NamedTuple):
    at: int
    kind: int
    reserved: int
    path_offset: int
    path_length: int
    length: int
    hash: bytes
    first_array: int
    array_count: int


class Block(NamedTuple):
    at: int
    name_offset: int
    name_length: int


class Section(NamedTuple):
    at: int
    kind: int
    reserved: int
    block: int
    offset: int
    length: int


class Tensor(NamedTuple):
    at: int
    name_offset: int
    name_length: int
    dtype: int
    encoding: int
    block: int
    file: int
    file_offset: int
    dimension_count: int
    shape: tuple[int, ...]
    first_array: int
    array_count: int
    parameters: tuple[int, ...]
    hash: bytes


class Entry(NamedTuple):
    at: int
    key_offset: int
    key_length: int
    value_offset: int
    value_length: int


class Array(NamedTuple):
    at: int
    section: int
    offset: int
    length: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(x: int, a: int) -> int:
    return ceil_div(x, a) * a


def row_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows of a tensor and elements of each; a scalar is one row."""
    rows, elements = (shape[0] if shape else 1), 1
    for n in shape[1:]:
        elements *= n
    return rows, elements


class Cursor:
    """Walks over the directory record (section 3)."""

    def __init__(self, data: bytes, base: int) -> None:
        self.data, self.base, self.pos = data, base, 0

    def take(self, n: int, place: str) -> bytes:
        if n > len(self.data) - self.pos:
            raise Corrupt(place, self.base + self.pos, "the directory ends early")
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def u64(self, place: str) -> int:
        return int.from_bytes(self.take(8, place), "little")

    def records(self, layout: str, place: str) -> list[tuple]:
        """A list: the count is checked against the bytes that remain before anything is allocated.
        """
        size, at = struct.calcsize(layout), self.base + self.pos
        count = self.u64(place)
        if count > (len(self.data) - self.pos) // size:
            raise Corrupt(place, at, f"{count} records do not fit")
        start = self.base + self.pos
        rows = struct.iter_unpack(layout, self.take(count * size, place))
        return [(start + i * size, *row) for i, row in enumerate(rows)]


class Directory:
    """An open container. Everything of section 9, `open`, is checked when the object exists."""

    def __init__(self, source: bytes | str | os.PathLike) -> None:
        self._file = None if isinstance(source, bytes) else open(source, "rb")
        self._bytes = source if isinstance(source, bytes) else b""
        try:
            self.length = os.fstat(self._file.fileno()).st_size if self._file else len(self._bytes)
            self._check_header()
            self._read_directory()
            self._check_unknown_kinds()
            self._check_text()
            self._check_files()
            self._check_sections()
            for i in range(len(self.tensors)):
                self._check_tensor(i)
            self._check_arrays()
            for i in range(len(self.tensors)):
                self._check_encoding(i)
            self._check_alias_counts()
            self._check_checksum_count()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _read(self, offset: int, length: int, place: str) -> bytes:
        if self._file:
            self._file.seek(offset)
            data = self._file.read(length)
        else:
            data = self._bytes[offset : offset + length]
        if len(data) != length:
            raise Corrupt(place, offset, "the file ends early")
        return data

    def _zeros(self, start: int, end: int, place: str) -> None:
        data = self._read(start, end - start, place)
        if data.strip(b"\0"):
            raise Corrupt(place, start + len(data) - len(data.lstrip(b"\0")), "not zero")

    # --- open -------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        """Section 2, in the order of section 9: steps 1 to 7."""
        start = self._read(0, min(12, self.length), "header")
        if len(start) < 12 or start[:8] != MAGIC:
            raise Corrupt("header.magic", 0, "not a df11 file")
        major = int.from_bytes(start[8:10], "little")
        if major != 1:
            raise Unsupported("header.version_major", 8, f"version {major}")
        if self.length < HEAD_BYTES + HEADER_BYTES:
            raise Corrupt("file", self.length, "too short for a container")
        header = self._read(0, HEADER_BYTES, "header")
        _, _, self.version_minor, state, incompatible, self.compatible_features, *rest = (
            struct.unpack("<8sHHIQQQQQII", header)
        )
        file_length, offset, length, self._directory_checksum, header_checksum = rest
        if crc32(header[:60]) != header_checksum:
            raise Corrupt("header.header_checksum", 60, "wrong checksum")
        if state != 1:
            raise Corrupt("header.state", 12, "incomplete" if state == 0 else f"state {state}")
        if incompatible:
            raise Unsupported("header.incompatible_features", 16, f"features {incompatible:#x}")
        if file_length > MAX_FILE_BYTES:
            raise Limit("header.file_length", 32, f"{file_length}")
        if file_length != self.length:
            raise Corrupt(
                "header.file_length", 32, f"{file_length}, but the file has {self.length} bytes"
            )
        if length > MAX_DIRECTORY_BYTES:
            raise Limit("header.directory_length", 48, f"{length}")
        if offset % SECTION_ALIGNMENT or not HEAD_BYTES <= offset < file_length:
            raise Corrupt("header.directory_offset", 40, f"{offset}")
        end = offset + length  # both are far below 2^64 here
        if align(end, ARRAY_ALIGNMENT) + HEADER_BYTES != file_length:
            raise Corrupt("header.directory_length", 48, "the directory does not end at the footer")
        self._zeros(HEADER_BYTES, HEAD_BYTES, "head")
        footer_at = file_length - HEADER_BYTES
        if self._read(footer_at, HEADER_BYTES, "footer") != header:
            raise Corrupt("footer", footer_at, "differs from the header")
        self._zeros(end, footer_at, "zeros before the footer")
        self.directory_offset, self.directory_length = offset, length

    def _read_directory(self) -> None:
        """Step 8, and the fields and lists of section 3."""
        data = self._read(self.directory_offset, self.directory_length, "directory")
        if crc32(data) != self._directory_checksum:
            raise Corrupt("directory", self.directory_offset, "wrong checksum")
        c = Cursor(data, self.directory_offset)
        self.shard_index, self.shard_count = c.u64("shard_index"), c.u64("shard_count")
        self.identity = c.take(32, "identity")
        self.files = [File(*r) for r in c.records("<IIQQQ32sQQ", "files")]
        self.blocks = [Block(*r) for r in c.records("<QQ", "blocks")]
        self.sections = [Section(*r) for r in c.records("<IIQQQ", "sections")]
        self.tensors = [
            Tensor(*r[:9], r[9:17], r[17], r[18], r[19:23], r[23])
            for r in c.records("<QQIIQQQQ8QQQ4Q32s", "tensors")
        ]
        self.arrays = [Array(*r) for r in c.records("<QQQ", "arrays")]
        self.checksums = [value for _, value in c.records("<I", "checksums")]
        self._entries = [Entry(*r) for r in c.records("<QQQQ", "metadata")]
        count = c.u64("text")
        self._text_at = c.base + c.pos
        self._text = c.take(count, "text")
        if c.pos != len(data):
            raise Corrupt("directory", c.base + c.pos, "bytes left over")
        if self.shard_count > MAX_SHARDS:
            raise Limit("shard_count", c.base + 8, f"{self.shard_count}")
        if self.shard_count == 0 or self.shard_index >= self.shard_count:
            raise Corrupt("shard_index", c.base, f"shard {self.shard_index} of {self.shard_count}")

    def _check_unknown_kinds(self) -> None:
        """First, for Corrupt must not be reported of what a newer reader may understand (sections 1
        and 3).
        """
        for i, f in enumerate(self.files):
            if f.kind not in (WEIGHTS, SIDE_FILE, BESIDE):
                raise Unsupported(f"files[{i}].kind", f.at, f"kind {f.kind}")
        for i, s in enumerate(self.sections):
            if not CODEBOOK <= s.kind <= SIDE and s.kind < 2**31:
                raise Unsupported(f"sections[{i}].kind", s.at, f"kind {s.kind}")

    def _check_text(self) -> None:
        """Section 3, Text: the names tile the text."""
        end = 0

        def take(
            place: str,
            at: int,
            offset: int,
            length: int,
            least: int = 1,
            most: int = MAX_NAME_BYTES,
        ) -> str:
            nonlocal end
            if length > most:
                raise Limit(place, at, f"{length} bytes")
            if length < least or offset != end or length > len(self._text) - end:
                raise Corrupt(place, at, "empty, or not where the text before it ends")
            end += length
            try:
                name = self._text[offset:end].decode("utf-8")
            except UnicodeDecodeError as e:
                raise Corrupt(place, self._text_at + offset + e.start, "not UTF-8") from None
            if "\0" in name:
                raise Corrupt(place, self._text_at + offset, "holds NUL")
            return name

        self.paths = [
            take(f"files[{i}]", f.at + 8, f.path_offset, f.path_length)
            for i, f in enumerate(self.files)
        ]
        self.block_names = [
            take(f"blocks[{i}]", b.at, b.name_offset, b.name_length)
            for i, b in enumerate(self.blocks)
        ]
        self.names = [
            take(f"tensors[{i}]", t.at, t.name_offset, t.name_length)
            for i, t in enumerate(self.tensors)
        ]
        metadata = []
        for i, e in enumerate(self._entries):
            key = take(f"metadata[{i}]", e.at, e.key_offset, e.key_length, most=MAX_KEY_BYTES)
            value = take(
                f"metadata[{i}]", e.at + 16, e.value_offset, e.value_length, 0, MAX_VALUE_BYTES
            )
            metadata.append((key, value))
        self._check_metadata(metadata)
        if end != len(self._text):
            raise Corrupt("text", self._text_at + end, "bytes left over")
        seen: set[str] = set()
        for i, name in enumerate(self.block_names):
            if name in seen:
                raise Corrupt(f"blocks[{i}]", self.blocks[i].at, "name is taken")
            seen.add(name)
        self.index = {name: i for i, name in enumerate(self.names)}

    def _check_metadata(self, entries: list[tuple[str, str]]) -> None:
        """Section 3, Metadata."""
        keys = [key.encode() for key, _ in entries]
        if any(a >= b for a, b in zip(keys, keys[1:])):
            raise Corrupt("metadata", self._entries[0].at, "keys out of order")
        if sum(e.key_length + e.value_length for e in self._entries) > MAX_METADATA_BYTES:
            raise Limit("metadata", self._entries[0].at, "too many bytes")
        self.metadata = dict(entries)

    def _check_files(self) -> None:
        """Section 3, File."""
        before = (-1, b"")
        if len(self.files) > MAX_FILES:
            raise Limit("files", self.directory_offset, f"{len(self.files)} files")
        if self.shard_index and (self._entries or any(f.kind != WEIGHTS for f in self.files)):
            raise Corrupt("files", self.directory_offset, "side files or metadata in a later shard")
        for i, f in enumerate(self.files):
            place, path = f"files[{i}]", self.paths[i]
            if f.reserved:
                raise Corrupt(f"{place}.reserved", f.at + 4, "not zero")
            if any(c in ("", ".", "..") for c in path.split("/")) or any(
                c in "\\:" or c < " " or "\x7f" <= c <= "\x9f" for c in path
            ):
                raise Corrupt(f"{place}.path", f.at + 8, f"{path!r} is no path")
            parts = path.split("/")
            if len(parts) > MAX_PATH_COMPONENTS or any(
                len(p.encode()) > MAX_COMPONENT_BYTES for p in parts
            ):
                raise Limit(
                    f"{place}.path",
                    f.at + 8,
                    f"{path!r} is too deep, or has a component that is too long",
                )
            if f.kind == BESIDE and path.endswith(".df11"):
                raise Corrupt(f"{place}.path", f.at + 8, f"{path!r} would be taken for a shard")
            order = (f.kind, path.encode())
            if order <= before:
                raise Corrupt(place, f.at, "out of order")
            before = order
            if f.array_count != (1 if f.kind == WEIGHTS or f.kind == SIDE_FILE and f.length else 0):
                raise Corrupt(f"{place}.array_count", f.at + 72, f"{f.array_count}")
        paths = set(self.paths)
        if len(paths) != len(self.paths):
            raise Corrupt("files", self.directory_offset, "a path occurs twice")
        folders = set()
        for i, path in enumerate(self.paths):
            parts = path.split("/")
            above = {"/".join(parts[:k]) for k in range(1, len(parts))}
            if above & paths:
                raise Corrupt(f"files[{i}].path", self.files[i].at + 8, f"{path!r} lies in a file")
            folders |= above
        if len(folders) > MAX_FOLDERS:
            raise Limit("files", self.directory_offset, f"{len(folders)} folders")

    def _check_sections(self) -> None:
        """Section 3, Section, and the positions of section 2."""
        end, before = HEAD_BYTES, (-1, -1)
        for i, s in enumerate(self.sections):
            place = f"sections[{i}]"
            if s.reserved:
                raise Corrupt(f"{place}.reserved", s.at + 4, "not zero")
            if s.block != NONE and s.block >= len(self.blocks):
                raise Corrupt(f"{place}.block", s.at + 8, f"{s.block}")
            if s.kind <= SIDE and (s.block == NONE) != (s.kind in (PREFIX, SIDE)):
                raise Corrupt(f"{place}.block", s.at + 8, "a block where none belongs, or none")
            if (s.block, s.kind) <= before:
                raise Corrupt(place, s.at, "out of order")
            before = (s.block, s.kind)
            if s.offset != align(end, SECTION_ALIGNMENT):
                raise Corrupt(f"{place}.offset", s.at + 16, f"{s.offset}")
            if s.length == 0 or s.length > self.directory_offset - s.offset:
                raise Corrupt(f"{place}.length", s.at + 24, f"{s.length}")
            end = s.offset + s.length
        if self.directory_offset != align(end, SECTION_ALIGNMENT):
            raise Corrupt("header.directory_offset", 40, "not where the last section ends")

    def _check_tensor(self, i: int) -> None:
        """Section 3, Tensor, and section 5."""
        t, place = self.tensors[i], f"tensors[{i}]"
        if i and self.names[i - 1].encode() >= self.names[i].encode():
            raise Corrupt(place, t.at, "out of order")
        if t.block >= len(self.blocks):
            raise Corrupt(f"{place}.block", t.at + 24, f"{t.block}")
        if t.file >= len(self.files) or self.files[t.file].kind != WEIGHTS:
            raise Corrupt(f"{place}.file", t.at + 32, f"{t.file}")
        if t.dimension_count > MAX_DIMENSIONS:
            raise Limit(f"{place}.dimension_count", t.at + 48, f"{t.dimension_count}")
        if any(t.shape[t.dimension_count :]):
            raise Corrupt(f"{place}.shape", t.at + 56, "not zero past the dimensions")
        bytes_needed = 0  # of an unknown dtype nothing is known, but the start must lie in the file
        if t.dtype in BITS:
            bits = BITS[t.dtype]
            for n in t.shape[: t.dimension_count]:
                bits *= n or 1
                if bits >= 2**64:
                    raise Limit(f"{place}.shape", t.at + 56, "too many elements")
            bits = 0 if 0 in t.shape[: t.dimension_count] else bits
            if bits % 8:
                raise Corrupt(f"{place}.shape", t.at + 56, "the elements do not fill whole bytes")
            bytes_needed = bits // 8
        if t.file_offset + bytes_needed > self.files[t.file].length:
            raise Corrupt(f"{place}.file_offset", t.at + 40, "the tensor exceeds its file")

    def _check_arrays(self) -> None:
        """Section 3, Array: ownership, packing, and the section each array lies in."""
        owners: list[tuple[str, int, File | Tensor]] = [
            (f"files[{i}]", f.at + 64, f) for i, f in enumerate(self.files)
        ]
        owners += [(f"tensors[{i}]", t.at + 120, t) for i, t in enumerate(self.tensors)]
        total, ends = 0, [0] * len(self.sections)
        for place, at, owner in owners:
            if owner.first_array != total:
                raise Corrupt(f"{place}.first_array", at, f"{owner.first_array}")
            if owner.array_count > len(self.arrays) - total:
                raise Corrupt(f"{place}.array_count", at + 8, f"{owner.array_count}")
            for k in range(total, total + owner.array_count):
                self._check_array(k, owner, ends)
            total += owner.array_count
        if total != len(self.arrays):
            raise Corrupt("arrays", self.directory_offset, "arrays without an owner")
        for i, s in enumerate(self.sections):
            if s.length < ends[i] or (s.length > ends[i] and s.kind <= SIDE):
                raise Corrupt(f"sections[{i}].length", s.at + 24, "not the end of its last array")

    def _check_array(self, k: int, owner: File | Tensor, ends: list[int]) -> None:
        a, place = self.arrays[k], f"arrays[{k}]"
        if a.section >= len(self.sections):
            raise Corrupt(f"{place}.section", a.at, f"{a.section}")
        s = self.sections[a.section]
        if a.offset != align(ends[a.section], ARRAY_ALIGNMENT):
            raise Corrupt(f"{place}.offset", a.at + 8, f"{a.offset}")
        if a.length == 0 or a.offset + a.length > s.length:
            raise Corrupt(f"{place}.length", a.at + 16, f"{a.length}")
        ends[a.section] = a.offset + a.length
        if isinstance(owner, Tensor):
            if s.block != owner.block:
                raise Corrupt(f"{place}.section", a.at, "of another block")
        elif s.kind != (PREFIX if owner.kind == WEIGHTS else SIDE):
            raise Corrupt(f"{place}.section", a.at, "wrong kind of section")
        elif a.length > owner.length or (owner.kind == SIDE_FILE and a.length < owner.length):
            raise Corrupt(f"{place}.length", a.at + 16, "does not fit the file")

    def _check_encoding(self, i: int) -> None:
        """Section 6, as far as the directory tells. An unknown dtype or encoding is met when the
        tensor is loaded.
        """
        t, place = self.tensors[i], f"tensors[{i}]"
        if t.encoding == ALIAS:  # whatever its dtype
            self._check_parameters(t, place, 1)
            self._check_alias(t, place)
            self._check_layout(t, place, (), ())
        elif t.dtype not in BITS or t.encoding not in ENCODINGS:
            return
        elif t.encoding == STORED_RAW:
            self._check_parameters(t, place, 0)
            size = self._size(t)
            self._check_layout(t, place, *(((RAW,), (size,)) if size else ((), ())))
        else:
            self._check_parameters(t, place, 3)
            (self._check_gap if t.encoding == GAP else self._check_tile)(t, place)

    def _check_parameters(self, t: Tensor, place: str, named: int) -> None:
        if any(t.parameters[named:]):
            raise Corrupt(f"{place}.parameters", t.at + 136 + 8 * named, "not zero")

    def _check_layout(
        self, t: Tensor, place: str, kinds: tuple[int, ...], lengths: tuple[int, ...]
    ) -> None:
        if t.array_count != len(kinds):
            raise Corrupt(
                f"{place}.array_count", t.at + 128, f"{t.array_count} arrays, not {len(kinds)}"
            )
        for a, kind, length in zip(self._arrays(t), kinds, lengths):
            if self.sections[a.section].kind != kind:
                raise Corrupt(f"{place}: array", a.at, "in the wrong kind of section")
            if a.length != length:
                raise Corrupt(f"{place}: array", a.at + 16, f"{a.length} bytes, not {length}")

    def _check_alias(self, t: Tensor, place: str) -> None:
        """Section 6.1."""
        target = t.parameters[0]
        if target >= len(self.tensors) or self.tensors[target].encoding == ALIAS:
            raise Corrupt(f"{place}.target", t.at + 136, f"{target}")
        o = self.tensors[target]
        same = [(x.block, x.dtype, x.dimension_count, x.shape, x.hash) for x in (t, o)]
        if same[0] != same[1]:
            raise Corrupt(f"{place}.target", t.at + 136, "the target differs")

    def _check_alias_counts(self) -> None:
        counts = Counter(t.parameters[0] for t in self.tensors if t.encoding == ALIAS)
        for target, count in counts.items():
            if count > MAX_ALIASES:
                raise Limit(f"tensors[{target}]", self.tensors[target].at, f"{count} aliases")

    def _check_gap(self, t: Tensor, place: str) -> None:
        """Section 6.3: parameters, and the lengths that follow from them."""
        thread_bytes, block_threads, bit_count, _ = t.parameters
        elements = self._elements(t)
        if t.dtype != BF16 or elements == 0:
            raise Corrupt(f"{place}.encoding", t.at + 20, "gap is for BF16 tensors with elements")
        if thread_bytes not in (8, 16, 32, 64):
            raise Corrupt(f"{place}.bytes_per_thread", t.at + 136, f"{thread_bytes}")
        if block_threads not in (64, 128, 256, 512, 1024):
            raise Corrupt(f"{place}.threads_per_block", t.at + 144, f"{block_threads}")
        if not elements <= bit_count <= MAX_CODE_LENGTH * elements:
            raise Corrupt(f"{place}.bit_count", t.at + 152, f"{bit_count}")
        threads = ceil_div(bit_count, 8 * thread_bytes)
        codebook = self._arrays(t)[0].length if t.array_count else 0
        if (codebook - 256) % 512 or not 1 <= (codebook - 256) // 512 <= 128:
            raise Corrupt(f"{place}: codebook", t.at + 120, f"{codebook} bytes")
        offsets = 8 * (ceil_div(threads, block_threads) + 1)
        lengths = (codebook, ceil_div(threads, 2), offsets, thread_bytes * threads, elements)
        self._check_layout(t, place, GAP_KINDS, lengths)

    def _check_tile(self, t: Tensor, place: str) -> None:
        """Section 6.4: parameters, and the lengths that follow from them."""
        tile_columns, columns, bit_count, _ = t.parameters
        elements = self._elements(t)
        if t.dtype != BF16 or elements == 0:
            raise Corrupt(f"{place}.encoding", t.at + 20, "tile is for BF16 tensors with elements")
        if tile_columns not in (256, 8192):
            raise Corrupt(f"{place}.tile_columns", t.at + 136, f"{tile_columns}")
        matrix = columns >= 8 and columns % 8 == 0 and elements % columns == 0
        if not (matrix if tile_columns == 256 else columns == elements):
            raise Corrupt(f"{place}.columns", t.at + 144, f"{columns}")
        if bit_count % 8 or not ceil_div(elements, 2) <= bit_count < 2**48:
            raise Corrupt(f"{place}.bit_count", t.at + 152, f"{bit_count}")
        tiles = ceil_div(columns, tile_columns) * ceil_div(
            elements // columns, 8192 // tile_columns
        )
        if tiles > 2**32 - 1:
            raise Corrupt(f"{place}.columns", t.at + 144, f"{tiles} tiles")
        codebook = self._arrays(t)[0].length if t.array_count else 0
        if codebook % 2 or not 0 <= (codebook - 26) // 2 <= 4096:
            raise Corrupt(f"{place}: codebook", t.at + 120, f"{codebook} bytes")
        lengths = (codebook, 32 * (tiles + 1), 16 * ceil_div(bit_count, 128), elements)
        self._check_layout(t, place, TILE_KINDS, lengths)

    def _check_checksum_count(self) -> None:
        """Section 4."""
        counts = [ceil_div(s.length, CHECKSUM_CHUNK_BYTES) for s in self.sections]
        self._first_checksum = [0, *accumulate(counts)]
        if self._first_checksum[-1] != len(self.checksums):
            raise Corrupt("checksums", self.directory_offset, f"{len(self.checksums)} checksums")

    def _arrays(self, owner: File | Tensor) -> list[Array]:
        return self.arrays[owner.first_array : owner.first_array + owner.array_count]

    def _elements(self, t: Tensor) -> int:
        rows, elements = row_size(t.shape[: t.dimension_count])
        return rows * elements

    def _size(self, t: Tensor) -> int:
        """Decoded bytes."""
        return self._elements(t) * BITS[t.dtype] // 8
