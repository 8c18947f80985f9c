"""The directory of a df11 container: everything that section 9 of spec/format.md checks at `open`.

See df11_reader.py, which loads, restores and verifies.
"""

import os
import struct
from collections import Counter
from itertools import accumulate
from math import prod
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


class Record:
    """A record of a list: its fields by name. A rule is one line: it raises what it names, with the
    field and the field's place in the file, if it is broken.
    """

    LAYOUT = ""  # name:format of each field

    def __init_subclass__(cls) -> None:
        cls.fields, cls.offsets, end = [], {}, 0
        for name, layout in (field.split(":") for field in cls.LAYOUT.split()):
            cls.offsets[name] = end
            cls.fields.append((name, struct.Struct("<" + layout), end))
            end += struct.calcsize("<" + layout)
        cls.size = end

    def __init__(self, data: bytes, place: str, at: int) -> None:
        self.place, self.at = place, at
        for name, layout, offset in self.fields:
            values = layout.unpack_from(data, offset)
            setattr(self, name, values[0] if len(values) == 1 else values)

    def problem(self, kind: type[FormatError], field: str, message: str) -> FormatError:
        return kind(f"{self.place}.{field}", self.at + self.offsets[field], message)

    def corrupt_if(self, broken: object, field: str, message: str = "") -> None:
        if broken:
            raise self.problem(Corrupt, field, message or f"{getattr(self, field)}")

    def limit_if(self, broken: object, field: str, message: str = "") -> None:
        if broken:
            raise self.problem(Limit, field, message or f"{getattr(self, field)}")

    def unsupported_if(self, broken: object, field: str) -> None:
        if broken:
            raise self.problem(Unsupported, field, f"{getattr(self, field)}")


class Header(Record):
    LAYOUT = (
        "magic:8s version_major:H version_minor:H state:I incompatible_features:Q"
        " compatible_features:Q file_length:Q directory_offset:Q directory_length:Q"
        " directory_checksum:I header_checksum:I"
    )


class Shard(Record):
    LAYOUT = "shard_index:Q shard_count:Q identity:32s"


class File(Record):
    LAYOUT = "kind:I reserved:I path:Q path_length:Q length:Q hash:32s first_array:Q array_count:Q"


class Block(Record):
    LAYOUT = "name:Q name_length:Q"


class Section(Record):
    LAYOUT = "kind:I reserved:I block:Q offset:Q length:Q"


class Tensor(Record):
    LAYOUT = (
        "name:Q name_length:Q dtype:I encoding:I block:Q file:Q file_offset:Q dimension_count:Q"
        " shape:8Q first_array:Q array_count:Q parameters:4Q hash:32s"
    )

    @property
    def dimensions(self) -> tuple[int, ...]:
        return self.shape[: self.dimension_count]


class Array(Record):
    LAYOUT = "section:Q offset:Q length:Q"


class Checksum(Record):
    LAYOUT = "value:I"


class Entry(Record):
    LAYOUT = "key:Q key_length:Q value:Q value_length:Q"


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
            for i, t in enumerate(self.tensors):
                ascends = not i or self.names[i - 1].encode() < self.names[i].encode()
                t.corrupt_if(not ascends, "name", "out of order")
                self._check_tensor(t)
            self._check_arrays()
            for t in self.tensors:
                self._check_encoding(t)
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
        data = self._read(0, min(HEADER_BYTES, self.length), "header")
        h = self.header = Header(data.ljust(HEADER_BYTES, b"\0"), "header", 0)
        h.corrupt_if(len(data) < 12 or h.magic != MAGIC, "magic", "not a df11 file")
        h.unsupported_if(h.version_major != 1, "version_major")
        if self.length < HEAD_BYTES + HEADER_BYTES:
            raise Corrupt("file", self.length, "too short for a container")
        h.corrupt_if(crc32(data[:60]) != h.header_checksum, "header_checksum", "wrong checksum")
        h.corrupt_if(h.state != 1, "state", "" if h.state else "incomplete")
        h.unsupported_if(h.incompatible_features, "incompatible_features")
        h.limit_if(h.file_length > MAX_FILE_BYTES, "file_length")
        h.corrupt_if(h.file_length != self.length, "file_length")
        offset, length = h.directory_offset, h.directory_length
        h.limit_if(length > MAX_DIRECTORY_BYTES, "directory_length")
        right = offset % SECTION_ALIGNMENT == 0 and HEAD_BYTES <= offset < h.file_length
        h.corrupt_if(not right, "directory_offset")
        end = offset + length  # both are far below 2^64 here
        footer_at = align(end, ARRAY_ALIGNMENT)
        h.corrupt_if(footer_at + HEADER_BYTES != h.file_length, "directory_length")
        self._zeros(HEADER_BYTES, HEAD_BYTES, "head")
        if self._read(footer_at, HEADER_BYTES, "footer") != data:
            raise Corrupt("footer", footer_at, "differs from the header")
        self._zeros(end, footer_at, "zeros before the footer")
        self.directory_offset, self.directory_length = offset, length

    def _read_directory(self) -> None:
        """Step 8, and the fields and lists of section 3."""
        data = self._read(self.directory_offset, self.directory_length, "directory")
        wrong = crc32(data) != self.header.directory_checksum
        self.header.corrupt_if(wrong, "directory_checksum", "wrong checksum")
        base, pos = self.directory_offset, 0

        def take(n: int, place: str) -> tuple[bytes, int]:
            nonlocal pos
            if n > len(data) - pos:
                raise Corrupt(place, base + pos, "the directory ends early")
            pos += n
            return data[pos - n : pos], base + pos - n

        def records(kind: type[Record], place: str) -> list:
            """A list: that it fits is checked before anything is allocated."""
            count = int.from_bytes(take(8, place)[0], "little")
            rows, at = take(count * kind.size, place)
            starts = range(0, len(rows), kind.size)
            return [
                kind(rows[k : k + kind.size], f"{place}[{i}]", at + k) for i, k in enumerate(starts)
            ]

        shard = Shard(take(Shard.size, "directory")[0], "directory", base)
        self.shard_index, self.shard_count = shard.shard_index, shard.shard_count
        self.identity = shard.identity
        self.files = records(File, "files")
        self.blocks = records(Block, "blocks")
        self.sections = records(Section, "sections")
        self.tensors = records(Tensor, "tensors")
        self.arrays = records(Array, "arrays")
        self.checksums = [checksum.value for checksum in records(Checksum, "checksums")]
        self._entries = records(Entry, "metadata")
        count = int.from_bytes(take(8, "text")[0], "little")
        self._text, self._text_at = take(count, "text")
        if pos != len(data):
            raise Corrupt("directory", base + pos, "bytes left over")
        shard.limit_if(shard.shard_count > MAX_SHARDS, "shard_count")
        shard.corrupt_if(shard.shard_index >= shard.shard_count, "shard_index")

    def _check_unknown_kinds(self) -> None:
        """First, for Corrupt must not be reported of what a newer reader may understand (sections 1
        and 3).
        """
        for f in self.files:
            f.unsupported_if(f.kind not in (WEIGHTS, SIDE_FILE, BESIDE), "kind")
        for s in self.sections:
            s.unsupported_if(not CODEBOOK <= s.kind <= SIDE and s.kind < 2**31, "kind")

    def _check_text(self) -> None:
        """Section 3, Text: the names tile the text."""
        end = 0

        def take(r: Record, field: str, least: int = 1, most: int = MAX_NAME_BYTES) -> str:
            nonlocal end
            offset, length = getattr(r, field), getattr(r, f"{field}_length")
            r.limit_if(length > most, field, f"{length} bytes")
            fits = length >= least and offset == end and length <= len(self._text) - end
            r.corrupt_if(not fits, field, "empty, or not where the text before it ends")
            end += length
            try:
                name = self._text[offset:end].decode("utf-8")
            except UnicodeDecodeError as e:
                raise Corrupt(r.place, self._text_at + offset + e.start, "not UTF-8") from None
            r.corrupt_if("\0" in name, field, "holds NUL")
            return name

        self.paths = [take(f, "path") for f in self.files]
        self.block_names = [take(b, "name") for b in self.blocks]
        self.names = [take(t, "name") for t in self.tensors]
        both = (("key", 1, MAX_KEY_BYTES), ("value", 0, MAX_VALUE_BYTES))
        metadata = [[take(e, *rule) for rule in both] for e in self._entries]
        if end != len(self._text):
            raise Corrupt("text", self._text_at + end, "bytes left over")
        seen: set[str] = set()
        for b, name in zip(self.blocks, self.block_names):
            b.corrupt_if(name in seen, "name", f"{name!r} is taken")
            seen.add(name)
        self.index = {name: i for i, name in enumerate(self.names)}
        # Section 3, Metadata.
        total = 0
        for i, e in enumerate(self._entries):
            total += e.key_length + e.value_length
            ascends = not i or metadata[i - 1][0].encode() < metadata[i][0].encode()
            e.corrupt_if(not ascends, "key", "out of order")
            e.corrupt_if(self.shard_index, "key", "metadata in a later shard")
        for e in self._entries[:1]:
            e.limit_if(total > MAX_METADATA_BYTES, "key", "too many bytes")
        self.metadata = dict(metadata)

    def _check_files(self) -> None:
        """Section 3, File."""
        if len(self.files) > MAX_FILES:
            raise Limit("files", self.directory_offset, f"{len(self.files)} files")
        before, paths, folders = (-1, b""), set(self.paths), set()
        for f, path in zip(self.files, self.paths):
            f.corrupt_if(f.reserved, "reserved")
            parts = path.split("/")
            plain = not any(c in "\\:" or c < " " or "\x7f" <= c <= "\x9f" for c in path)
            plain = plain and not any(part in ("", ".", "..") for part in parts)
            f.corrupt_if(not plain, "path", f"{path!r} is no path")
            f.limit_if(len(parts) > MAX_PATH_COMPONENTS, "path", f"{path!r} is too deep")
            long = any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts)
            f.limit_if(long, "path", f"{path!r} has a component that is too long")
            taken = f.kind == BESIDE and path.endswith(".df11")
            f.corrupt_if(taken, "path", f"{path!r} would be taken for a shard")
            f.corrupt_if(self.shard_index and f.kind != WEIGHTS, "kind", "in a later shard")
            order = (f.kind, path.encode())
            f.corrupt_if(order <= before, "path", "out of order")
            before = order
            count = 1 if f.kind == WEIGHTS or f.kind == SIDE_FILE and f.length else 0
            f.corrupt_if(f.array_count != count, "array_count")
            above = {"/".join(parts[:k]) for k in range(1, len(parts))}
            f.corrupt_if(above & paths, "path", f"{path!r} lies in a file")
            folders |= above
        if len(paths) != len(self.paths):
            raise Corrupt("files", self.directory_offset, "a path occurs twice")
        if len(folders) > MAX_FOLDERS:
            raise Limit("files", self.directory_offset, f"{len(folders)} folders")

    def _check_sections(self) -> None:
        """Section 3, Section, and the positions of section 2."""
        end, before = HEAD_BYTES, (-1, -1)
        for s in self.sections:
            s.corrupt_if(s.reserved, "reserved")
            s.corrupt_if(s.block != NONE and s.block >= len(self.blocks), "block")
            of_none = s.kind in (PREFIX, SIDE)
            s.corrupt_if(s.kind <= SIDE and (s.block == NONE) != of_none, "block")
            s.corrupt_if((s.block, s.kind) <= before, "kind", "out of order")
            before = (s.block, s.kind)
            s.corrupt_if(s.offset != align(end, SECTION_ALIGNMENT), "offset")
            s.corrupt_if(not 0 < s.length <= self.directory_offset - s.offset, "length")
            end = s.offset + s.length
        moved = self.directory_offset != align(end, SECTION_ALIGNMENT)
        self.header.corrupt_if(moved, "directory_offset", "not where the last section ends")

    def _check_tensor(self, t: Tensor) -> None:
        """Section 3, Tensor, and section 5."""
        t.corrupt_if(t.block >= len(self.blocks), "block")
        weights = t.file < len(self.files) and self.files[t.file].kind == WEIGHTS
        t.corrupt_if(not weights, "file")
        t.limit_if(t.dimension_count > MAX_DIMENSIONS, "dimension_count")
        t.corrupt_if(any(t.shape[t.dimension_count :]), "shape", "not zero past the dimensions")
        bits = BITS.get(t.dtype, 0)  # of an unknown dtype nothing is known
        for n in t.dimensions:
            bits *= n or 1
            t.limit_if(bits >= 2**64, "shape", "too many elements")
        bits = 0 if 0 in t.dimensions else bits
        t.corrupt_if(bits % 8, "shape", "the elements do not fill whole bytes")
        end = t.file_offset + bits // 8
        t.corrupt_if(end > self.files[t.file].length, "file_offset", "the tensor exceeds its file")

    def _check_arrays(self) -> None:
        """Section 3, Array: ownership, packing, and the section each array lies in."""
        total, ends = 0, [0] * len(self.sections)
        for owner in (*self.files, *self.tensors):
            owner.corrupt_if(owner.first_array != total, "first_array")
            owner.corrupt_if(owner.array_count > len(self.arrays) - total, "array_count")
            total += owner.array_count
            for a in self._arrays(owner):
                self._check_array(a, owner, ends)
        if total != len(self.arrays):
            raise Corrupt("arrays", self.directory_offset, "arrays without an owner")
        for s, end in zip(self.sections, ends):
            wrong = s.length < end or s.length > end and s.kind <= SIDE
            s.corrupt_if(wrong, "length", "not the end of its last array")

    def _check_array(self, a: Array, owner: File | Tensor, ends: list[int]) -> None:
        a.corrupt_if(a.section >= len(self.sections), "section")
        s = self.sections[a.section]
        a.corrupt_if(a.offset != align(ends[a.section], ARRAY_ALIGNMENT), "offset")
        a.corrupt_if(a.length == 0 or a.offset + a.length > s.length, "length")
        ends[a.section] = a.offset + a.length
        if isinstance(owner, Tensor):
            a.corrupt_if(s.block != owner.block, "section", "of another block")
            return
        a.corrupt_if(s.kind != (PREFIX if owner.kind == WEIGHTS else SIDE), "section", "wrong kind")
        short = owner.kind == SIDE_FILE and a.length < owner.length
        a.corrupt_if(a.length > owner.length or short, "length", "does not fit the file")

    def _check_encoding(self, t: Tensor) -> None:
        """Section 6, as far as the directory tells. An unknown dtype or encoding is met when the
        tensor is loaded.
        """
        if t.encoding == ALIAS:  # whatever its dtype
            self._check_alias(t)
        elif t.dtype not in BITS or t.encoding not in ENCODINGS:
            return
        elif t.encoding == STORED_RAW:
            size = self._size(t)
            self._check_layout(t, 0, (RAW,) if size else (), (size,))
        else:
            elements = self._elements(t)
            right = t.dtype == BF16 and elements > 0
            t.corrupt_if(not right, "encoding", "is for BF16 tensors with elements")
            codebook = self._arrays(t)[0].length if t.array_count else 0
            (self._check_gap if t.encoding == GAP else self._check_tile)(t, elements, codebook)

    def _check_layout(self, t: Tensor, named: int, kinds: tuple, lengths: tuple) -> None:
        """The number of parameters that have a name; of each array kind of section and length."""
        t.corrupt_if(any(t.parameters[named:]), "parameters", "not zero")
        t.corrupt_if(t.array_count != len(kinds), "array_count")
        for a, kind, length in zip(self._arrays(t), kinds, lengths):
            wrong = self.sections[a.section].kind != kind
            a.corrupt_if(wrong, "section", "in the wrong kind of section")
            a.corrupt_if(a.length != length, "length", f"{a.length} bytes, not {length}")

    def _check_alias(self, t: Tensor) -> None:
        """Section 6.1."""
        self._check_layout(t, 1, (), ())
        target = t.parameters[0]
        exists = target < len(self.tensors) and self.tensors[target].encoding != ALIAS
        t.corrupt_if(not exists, "parameters", f"target {target}")
        o = self.tensors[target]
        one, other = ((x.block, x.dtype, x.dimension_count, x.shape, x.hash) for x in (t, o))
        t.corrupt_if(one != other, "parameters", "the target differs")

    def _check_alias_counts(self) -> None:
        counts = Counter(t.parameters[0] for t in self.tensors if t.encoding == ALIAS)
        for target, count in counts.items():
            self.tensors[target].limit_if(count > MAX_ALIASES, "encoding", f"{count} aliases")

    def _check_gap(self, t: Tensor, elements: int, codebook: int) -> None:
        """Section 6.3: parameters, and the lengths that follow from them."""
        thread_bytes, block_threads, bit_count, _ = t.parameters
        t.corrupt_if(thread_bytes not in (8, 16, 32, 64), "parameters", "bytes_per_thread")
        known = block_threads in (64, 128, 256, 512, 1024)
        t.corrupt_if(not known, "parameters", "threads_per_block")
        right = elements <= bit_count <= MAX_CODE_LENGTH * elements
        t.corrupt_if(not right, "parameters", "bit_count")
        threads = ceil_div(bit_count, 8 * thread_bytes)
        luts, rest = divmod(codebook - 256, 512)
        t.corrupt_if(rest or not 1 <= luts <= 128, "first_array", f"codebook of {codebook} bytes")
        offsets = 8 * (ceil_div(threads, block_threads) + 1)
        lengths = (codebook, ceil_div(threads, 2), offsets, thread_bytes * threads, elements)
        self._check_layout(t, 3, GAP_KINDS, lengths)

    def _check_tile(self, t: Tensor, elements: int, codebook: int) -> None:
        """Section 6.4: parameters, and the lengths that follow from them."""
        tile_columns, columns, bit_count, _ = t.parameters
        t.corrupt_if(tile_columns not in (256, 8192), "parameters", "tile_columns")
        matrix = columns >= 8 and columns % 8 == 0 and elements % columns == 0
        right = matrix if tile_columns == 256 else columns == elements
        t.corrupt_if(not right, "parameters", "columns")
        right = bit_count % 8 == 0 and ceil_div(elements, 2) <= bit_count < 2**48
        t.corrupt_if(not right, "parameters", "bit_count")
        strips = ceil_div(elements // columns, 8192 // tile_columns)
        tiles = ceil_div(columns, tile_columns) * strips
        t.corrupt_if(tiles > 2**32 - 1, "parameters", f"{tiles} tiles")
        right = codebook % 2 == 0 and 0 <= (codebook - 26) // 2 <= 4096
        t.corrupt_if(not right, "first_array", f"codebook of {codebook} bytes")
        lengths = (codebook, 32 * (tiles + 1), 16 * ceil_div(bit_count, 128), elements)
        self._check_layout(t, 3, TILE_KINDS, lengths)

    def _check_checksum_count(self) -> None:
        """Section 4."""
        counts = [ceil_div(s.length, CHECKSUM_CHUNK_BYTES) for s in self.sections]
        self._first_checksum = [0, *accumulate(counts)]
        if self._first_checksum[-1] != len(self.checksums):
            raise Corrupt("checksums", self.directory_offset, f"{len(self.checksums)} checksums")

    def _arrays(self, owner: File | Tensor) -> list[Array]:
        return self.arrays[owner.first_array : owner.first_array + owner.array_count]

    def _elements(self, t: Tensor) -> int:
        return prod(t.dimensions)

    def _size(self, t: Tensor) -> int:
        """Decoded bytes."""
        return self._elements(t) * BITS[t.dtype] // 8
