"""The directory of a df11 container: everything that section 9 of spec/format.md checks at `open`.

See df11_reader.py, which loads, restores and verifies.
"""

import struct
from collections import Counter
from itertools import accumulate
from math import prod
from os import PathLike
from pathlib import Path
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
ENCODINGS = ALIAS, STORED_RAW, GAP, TILE, FLOAT, DELTA = range(6)
BF16 = 15
# Section 5: names and bits of an element by dtype.
NAMES = dict(
    enumerate(
        (
            "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
            "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
        ).split(),
        start=1,
    )
)
BITS = dict(enumerate([8, 4, 6, 6] + [8] * 7 + [16] * 4 + [32] * 3 + [64] * 4, start=1))
# Section 6: kinds of the sections that hold the arrays of each encoding, in order.
KINDS = {
    STORED_RAW: [RAW],
    GAP: [CODEBOOK, INDEX, INDEX, BITSTREAM, PLANE],
    TILE: [CODEBOOK, INDEX, BITSTREAM, PLANE],
    FLOAT: [CODEBOOK, INDEX, BITSTREAM, PLANE],
    DELTA: [CODEBOOK, INDEX, BITSTREAM],
}
# Section 6.5: bits of the exponent by dtype, and the numbers of zero bits.
EXPONENT_BITS = {7: 5, 8: 4, 14: 5, BF16: 8, 18: 8}
ZERO_BITS = {7: (0,), 8: (0,), 14: (0,), BF16: (4,), 18: (0, 13, 16)}


class FormatError(Exception):
    """A problem with a container."""


class Unsupported(FormatError):
    """The file may be valid, but needs a newer reader."""


class Corrupt(FormatError):
    """A rule of the specification is broken."""


class Limit(FormatError):
    """A limit is exceeded, or arithmetic overflows."""


def require(holds: object, rule: str, kind: type[FormatError] = Corrupt) -> None:
    if not holds:
        raise kind(rule)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(x: int, a: int) -> int:
    return ceil_div(x, a) * a


class Record:
    """A record of a list: its fields by name."""

    LAYOUT = ""  # name:format of each field

    def __init_subclass__(cls) -> None:
        fields = [field.split(":") for field in cls.LAYOUT.split()]
        cls.fields = [(name, struct.Struct("<" + layout)) for name, layout in fields]
        cls.size = sum(layout.size for _, layout in cls.fields)

    def __init__(self, data: bytes, place: str, number: int = 0) -> None:
        self.place, self.number, at = place, number, 0
        for name, layout in self.fields:
            values = layout.unpack_from(data, at)
            setattr(self, name, values[0] if len(values) == 1 else values)
            at += layout.size

    def require(self, holds: object, field: str, kind: type[FormatError] = Corrupt) -> None:
        """A rule of a field: raises what it names if it is broken."""
        if not holds:
            raise kind(f"{self.place}.{field} is {getattr(self, field)}")


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

    @property
    def elements(self) -> int:
        return prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Decoded bytes; 0 if the dtype is unknown."""
        return self.elements * BITS.get(self.dtype, 0) // 8


class Array(Record):
    LAYOUT = "section:Q offset:Q length:Q"


class Checksum(Record):
    LAYOUT = "value:I"


class Entry(Record):
    LAYOUT = "key:Q key_length:Q value:Q value_length:Q"


class Directory:
    """An open container, with `names` of tensors and `paths` of files, and their records.
    Everything of section 9, `open`, is checked when the object exists.
    """

    def __init__(self, source: bytes | str | PathLike) -> None:
        self.data = source if isinstance(source, bytes) else Path(source).read_bytes()
        self._check_header()
        self._read_directory()
        # Step 10, before any rule of step 11: Corrupt must not be reported of what a newer reader
        # may understand.
        for f in self.files:
            f.require(f.kind in (WEIGHTS, SIDE_FILE, BESIDE), "kind", Unsupported)
        for s in self.sections:
            s.require(CODEBOOK <= s.kind <= SIDE or s.kind >= 2**31, "kind", Unsupported)
        self.shard.require(self.shard.shard_count <= MAX_SHARDS, "shard_count", Limit)
        self.shard.require(self.shard.shard_index < self.shard.shard_count, "shard_index")
        self._check_text()
        self._check_files()
        self._check_sections()
        self._check_tensors()
        self._check_arrays()
        for t in self.tensors:
            self._check_encoding(t)
        targets = Counter(t.parameters[0] for t in self.tensors if t.encoding == ALIAS)
        require(max(targets.values(), default=0) <= MAX_ALIASES, "aliases of one tensor", Limit)

    def _check_header(self) -> None:
        """Section 2, in the order of section 9: steps 1 to 7."""
        data = self.data
        h = self.header = Header(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), "header")
        h.require(len(data) >= 12 and h.magic == MAGIC, "magic")
        h.require(h.version_major == 1, "version_major", Unsupported)
        require(len(data) >= HEAD_BYTES + HEADER_BYTES, "too short for a container")
        h.require(crc32(data[:60]) == h.header_checksum, "header_checksum")
        h.require(h.state == 1, "state")
        h.require(h.incompatible_features == 0, "incompatible_features", Unsupported)
        h.require(h.file_length <= MAX_FILE_BYTES, "file_length", Limit)
        h.require(h.file_length == len(data), "file_length")
        offset, length = h.directory_offset, h.directory_length
        h.require(length <= MAX_DIRECTORY_BYTES, "directory_length", Limit)
        h.require(offset >= HEAD_BYTES and offset % SECTION_ALIGNMENT == 0, "directory_offset")
        footer = align(offset + length, ARRAY_ALIGNMENT)
        h.require(footer + HEADER_BYTES == len(data), "directory_length")
        self._zeros(HEADER_BYTES, HEAD_BYTES)
        self._zeros(offset + length, footer)
        require(data[footer:] == data[:HEADER_BYTES], "the footer differs from the header")

    def _zeros(self, start: int, end: int) -> None:
        require(not self.data[start:end].strip(b"\0"), f"zeros from byte {start} to {end}")

    def _read_directory(self) -> None:
        """Step 8, and the fields and lists of section 3."""
        h = self.header
        data = self.data[h.directory_offset : h.directory_offset + h.directory_length]
        h.require(crc32(data) == h.directory_checksum, "directory_checksum")
        pos = 0

        def take(size: int) -> bytes:
            nonlocal pos
            require(size <= len(data) - pos, "the directory ends early")
            pos += size
            return data[pos - size : pos]

        def records(kind: type[Record], place: str) -> list:
            """A list: that it fits is checked before anything is allocated."""
            rows = take(int.from_bytes(take(8), "little") * kind.size)
            starts = range(0, len(rows), kind.size)
            each = enumerate(rows[at : at + kind.size] for at in starts)
            return [kind(row, f"{place}[{i}]", i) for i, row in each]

        self.shard = Shard(take(Shard.size), "directory")
        self.files = records(File, "files")
        self.blocks = records(Block, "blocks")
        self.sections = records(Section, "sections")
        self.tensors = records(Tensor, "tensors")
        self.arrays = records(Array, "arrays")
        self.checksums = [checksum.value for checksum in records(Checksum, "checksums")]
        self._entries = records(Entry, "metadata")
        self._text = take(int.from_bytes(take(8), "little"))
        require(pos == len(data), "bytes left over in the directory")

    def _check_text(self) -> None:
        """Section 3, Text: the names tile the text. Also Block and Metadata."""
        end = 0

        def take(r: Record, field: str, least: int = 1, most: int = MAX_NAME_BYTES) -> str:
            nonlocal end
            offset, length = getattr(r, field), getattr(r, f"{field}_length")
            r.require(length <= most, f"{field}_length", Limit)
            r.require(least <= length <= len(self._text) - end, f"{field}_length")
            r.require(offset == end, field)
            end += length
            try:
                name = self._text[offset:end].decode("utf-8")
            except UnicodeDecodeError as e:
                raise Corrupt(f"{r.place}.{field} is not UTF-8: {e}") from None
            require("\0" not in name, f"{r.place}.{field} holds NUL")
            return name

        self.paths = {take(f, "path"): f for f in self.files}
        block_names = [take(b, "name") for b in self.blocks]
        names = [take(t, "name") for t in self.tensors]
        both = (("key", 1, MAX_KEY_BYTES), ("value", 0, MAX_VALUE_BYTES))
        metadata = [[take(e, *rule) for rule in both] for e in self._entries]
        require(end == len(self._text), "bytes left over in the text")
        require(len(set(block_names)) == len(block_names), "two blocks have one name")
        self.metadata, self.names = dict(metadata), dict(zip(names, self.tensors))
        ascend(names, "tensors")
        ascend([key for key, _ in metadata], "keys of the metadata")
        require(not (metadata and self.shard.shard_index), "metadata in a later shard")
        total = sum(e.key_length + e.value_length for e in self._entries)
        require(total <= MAX_METADATA_BYTES, f"{total} bytes of metadata", Limit)

    def _check_files(self) -> None:
        """Section 3, File."""
        require(len(self.files) <= MAX_FILES, f"{len(self.files)} files", Limit)
        require(len(self.paths) == len(self.files), "a path occurs twice")
        paths, folders = set(self.paths), set()
        for path, f in self.paths.items():
            f.require(f.reserved == 0, "reserved")
            parts = path.split("/")
            plain = not any(c in "\\:" or c < " " or "\x7f" <= c <= "\x9f" for c in path)
            plain = plain and not any(part in ("", ".", "..") for part in parts)
            require(plain, f"{path!r} is no path")
            require(len(parts) <= MAX_PATH_COMPONENTS, f"{path!r} is too deep", Limit)
            long = any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts)
            require(not long, f"{path!r} has a component that is too long", Limit)
            require(f.kind != BESIDE or not path.endswith(".df11"), f"{path!r} seems a shard")
            f.require(self.shard.shard_index == 0 or f.kind == WEIGHTS, "kind")
            stored = f.kind == WEIGHTS or f.kind == SIDE_FILE and f.length > 0
            f.require(f.array_count == stored, "array_count")
            above = {"/".join(parts[:k]) for k in range(1, len(parts))}
            require(not above & paths, f"{path!r} lies in a file")
            folders |= above
        ascend([f"{f.kind}{path}" for path, f in self.paths.items()], "files")
        require(len(folders) <= MAX_FOLDERS, f"{len(folders)} folders", Limit)

    def _check_sections(self) -> None:
        """Section 3, Section, the positions of section 2, and the count of section 4."""
        end, before, directory = HEAD_BYTES, (-1, -1), self.header.directory_offset
        for s in self.sections:
            s.require(s.reserved == 0, "reserved")
            s.require(s.block == NONE or s.block < len(self.blocks), "block")
            s.require(s.kind > SIDE or (s.block == NONE) == (s.kind in (PREFIX, SIDE)), "block")
            s.require((s.block, s.kind) > before, "kind")
            before = (s.block, s.kind)
            s.require(s.offset == align(end, SECTION_ALIGNMENT), "offset")
            s.require(0 < s.length <= directory - s.offset, "length")
            end = s.offset + s.length
        self.header.require(directory == align(end, SECTION_ALIGNMENT), "directory_offset")
        counts = [ceil_div(s.length, CHECKSUM_CHUNK_BYTES) for s in self.sections]
        self._first_checksum = [0, *accumulate(counts)]
        require(sum(counts) == len(self.checksums), f"{len(self.checksums)} checksums")

    def _check_tensors(self) -> None:
        """Section 3, Tensor, and section 5."""
        for t in self.tensors:
            t.require(t.block < len(self.blocks), "block")
            t.require(t.file < len(self.files) and self.files[t.file].kind == WEIGHTS, "file")
            t.require(t.dimension_count <= MAX_DIMENSIONS, "dimension_count", Limit)
            t.require(not any(t.shape[t.dimension_count :]), "shape")
            bits = BITS.get(t.dtype, 0)  # of an unknown dtype nothing is known
            t.require(bits * prod(n or 1 for n in t.dimensions) < 2**64, "shape", Limit)
            t.require(bits * t.elements % 8 == 0, "shape")
            t.require(t.file_offset + t.bytes <= self.files[t.file].length, "file_offset")

    def _check_arrays(self) -> None:
        """Section 3, Array: ownership, packing, and the section each array lies in."""
        total, ends = 0, [0] * len(self.sections)
        for owner in (*self.files, *self.tensors):
            owner.require(owner.first_array == total, "first_array")
            owner.require(owner.array_count <= len(self.arrays) - total, "array_count")
            total += owner.array_count
            for a in self.arrays_of(owner):
                a.require(a.section < len(self.sections), "section")
                s = self.sections[a.section]
                a.require(a.offset == align(ends[a.section], ARRAY_ALIGNMENT), "offset")
                a.require(0 < a.length <= s.length - a.offset, "length")
                ends[a.section] = a.offset + a.length
                if isinstance(owner, Tensor):
                    a.require(s.block == owner.block, "section")
                else:
                    a.require(s.kind == (PREFIX if owner.kind == WEIGHTS else SIDE), "section")
                    least = owner.length if owner.kind == SIDE_FILE else 0
                    a.require(least <= a.length <= owner.length, "length")
        require(total == len(self.arrays), "arrays without an owner")
        for s, end in zip(self.sections, ends):
            s.require(s.length == end or s.length > end and s.kind > SIDE, "length")

    def _check_encoding(self, t: Tensor) -> None:
        """Section 6, as far as the directory tells. An unknown dtype or encoding is met when the
        tensor is loaded.
        """
        named, kinds, lengths = 0, KINDS.get(t.encoding, []), [t.bytes]
        if t.encoding == ALIAS:  # whatever its dtype
            named = 1
            t.require(t.parameters[0] < len(self.tensors), "parameters")
            o = self.tensors[t.parameters[0]]
            one, other = ((x.block, x.dtype, x.dimension_count, x.shape, x.hash) for x in (t, o))
            t.require(one == other and o.encoding != ALIAS, "parameters")
        elif t.dtype not in BITS or t.encoding not in ENCODINGS:
            return
        elif t.encoding == STORED_RAW:
            kinds = kinds if t.bytes else []
        elif t.encoding == DELTA:
            named, lengths = 4, self._delta_lengths(t)
        else:
            of = ZERO_BITS.get(t.dtype, ()) if t.encoding == FLOAT else (0,) * (t.dtype == BF16)
            zero_bits, named = t.parameters[3], 4 if t.encoding == FLOAT else 3
            t.require(t.elements > 0 and bool(of), "dtype")
            t.require(zero_bits in of, "parameters")
            t.require(t.array_count == len(kinds), "array_count")
            codebook = self.arrays_of(t)[0].length
            lengths = (self._gap_lengths if t.encoding == GAP else self._tile_lengths)(t, codebook)
        t.require(not any(t.parameters[named:]), "parameters")
        t.require(t.array_count == len(kinds), "array_count")
        for a, kind, length in zip(self.arrays_of(t), kinds, lengths):
            a.require(self.sections[a.section].kind == kind, "section")
            a.require(a.length == length, "length")

    def _gap_lengths(self, t: Tensor, codebook: int) -> list[int]:
        """Section 6.3: parameters, and the lengths that follow from them."""
        thread_bytes, block_threads, bit_count, _ = t.parameters
        t.require(thread_bytes in (8, 16, 32, 64), "parameters")
        t.require(block_threads in (64, 128, 256, 512, 1024), "parameters")
        t.require(t.elements <= bit_count <= MAX_CODE_LENGTH * t.elements, "parameters")
        threads = ceil_div(bit_count, 8 * thread_bytes)
        luts, rest = divmod(codebook - 256, 512)
        require(rest == 0 and 1 <= luts <= 128, f"{t.place}: a codebook of {codebook} bytes")
        offsets = 8 * (ceil_div(threads, block_threads) + 1)
        return [codebook, ceil_div(threads, 2), offsets, thread_bytes * threads, t.elements]

    def _tile_lengths(self, t: Tensor, codebook: int) -> list[int]:
        """Sections 6.4 and 6.5: parameters, and the lengths that follow from them."""
        tile_columns, columns, bit_count, _ = t.parameters
        t.require(tile_columns in (256, 8192), "parameters")
        matrix = columns >= 8 and columns % 8 == 0 and t.elements % columns == 0
        t.require(matrix if tile_columns == 256 else columns == t.elements, "parameters")
        t.require(bit_count % 8 == 0, "parameters")
        t.require(ceil_div(t.elements, 2) <= bit_count < 2**48, "parameters")
        strips = ceil_div(t.elements // columns, 8192 // tile_columns)
        tiles = ceil_div(columns, tile_columns) * strips
        t.require(tiles < 2**32, "parameters")
        right = codebook % 2 == 0 and 26 <= codebook <= 26 + 2 * 4096
        require(right, f"{t.place}: a codebook of {codebook} bytes")
        plane = ceil_div(t.elements * kept_bits(t), 8)
        return [codebook, 32 * (tiles + 1), 16 * ceil_div(bit_count, 128), plane]

    def _delta_lengths(self, t: Tensor) -> list[int]:
        """Section 6.6: the lengths, of which only one follows from the shape."""
        t.require(t.elements > 0 and t.dtype == BF16, "dtype")
        t.require(t.array_count == 3, "array_count")
        codebook, _, bitstream = (a.length for a in self.arrays_of(t))
        segments = ceil_div(t.elements, segment_elements(t.dimensions))
        require(6 <= codebook <= 5058, f"{t.place}: a codebook of {codebook} bytes")
        right = bitstream % 4 == 0 and bitstream >= 36 * segments
        require(right, f"{t.place}: a bitstream of {bitstream} bytes")
        return [codebook, 8 * (segments + 1), bitstream]

    def arrays_of(self, owner: File | Tensor) -> list[Array]:
        return self.arrays[owner.first_array : owner.first_array + owner.array_count]


def kept_bits(t: Tensor) -> int:
    """Bits of a weight in the plane of a tile or float tensor."""
    return BITS[t.dtype] - EXPONENT_BITS[t.dtype] - t.parameters[3]


def segment_elements(shape: tuple[int, ...]) -> int:
    """Weights of each segment of a delta tensor but the last (6.6, *Segments*)."""
    rows = 32 * prod(shape[1:] if len(shape) > 3 else shape[-1:])
    return 1 << 18 if rows > 1 << 23 else align(1 << 18, rows)


def ascend(names: list[str], what: str) -> None:
    """Strictly, compared bytewise."""
    keys = [name.encode() for name in names]
    require(all(a < b for a, b in zip(keys, keys[1:])), f"{what} out of order")
