"""A tiny writer of df11 containers for tests, written from spec/format.md; it shares no code with
the reader.

A Draft holds every record as a dict, so that a test can change any field; `pack` then writes the
container with checksums that fit. Nothing here is fast.
"""

import json
import struct
from dataclasses import dataclass, field
from zlib import crc32

from blake3 import blake3

MAGIC = b"\xdf\x44\x46\x31\x31\x0d\x0a\x1a"
NONE = 2**64 - 1
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "U8": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "C64": 64,
    "I64": 64,
}
DTYPE_IDS = {
    "BOOL": 1,
    "F4": 2,
    "F6_E2M3": 3,
    "U8": 5,
    "F16": 14,
    "BF16": 15,
    "F32": 18,
    "C64": 19,
    "I64": 21,
}

FILE = ("<IIQQQ32sQQ", "kind reserved path_offset path_length length hash first_array array_count")
BLOCK = ("<QQ", "name_offset name_length")
SECTION = ("<IIQQQ", "kind reserved block offset length")
TENSOR = (
    "<QQIIQQQQ64sQQ32s32s",
    "name_offset name_length dtype encoding block file file_offset dimension_count shape "
    "first_array array_count parameters hash",
)
ARRAY = ("<QQQ", "section offset length")


def align(x: int, a: int) -> int:
    return x + -x % a


@dataclass
class Source:
    """A tensor to store. `alias` names the tensor it shares its bytes with."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    block: str = "b0"
    gap: tuple[int, int] | None = None  # bytes_per_thread, threads_per_block
    tile: tuple[list[tuple[int, bytes]], list[int]] | None = (
        None  # arrays and parameters, of build_tile.py
    )
    alias: str | None = None
    file: str = "model.safetensors"


@dataclass
class Draft:
    files: list[dict] = field(default_factory=list)
    blocks: list[dict] = field(default_factory=list)
    sections: list[dict] = field(default_factory=list)
    tensors: list[dict] = field(default_factory=list)
    arrays: list[dict] = field(default_factory=list)
    contents: list[bytearray] = field(default_factory=list)  # of the sections
    text: bytes = b""
    identity: bytes = bytes(32)
    shard_index: int = 0
    shard_count: int = 1
    checksums: list[int] | None = None  # instead of the right ones
    header: dict = field(default_factory=dict)  # fields to overwrite, before header_checksum
    directory_tail: bytes = b""

    def pack(self) -> bytes:
        out = bytearray(4096)
        for section, content in zip(self.sections, self.contents):
            out += bytes(-len(out) % 4096) + content
        out += bytes(-len(out) % 4096)
        directory, offset = self._directory(), len(out)
        out += directory + bytes(-len(directory) % 256)
        fields = {
            "magic": MAGIC,
            "major": 1,
            "minor": 0,
            "state": 1,
            "incompatible": 0,
            "compatible": 0,
            "file_length": len(out) + 64,
            "offset": offset,
            "length": len(directory),
            "checksum": crc32(directory),
        }
        fields.update(self.header)
        head = struct.pack("<8sHHIQQQQQI", *fields.values())
        head += struct.pack("<I", crc32(head))
        out[:64] = head
        return bytes(out + head)

    def _directory(self) -> bytes:
        checksums = self.checksums
        if checksums is None:
            checksums = [
                crc32(c[i : i + 2**20]) for c in self.contents for i in range(0, len(c), 2**20)
            ]
        out = struct.pack("<QQ", self.shard_index, self.shard_count) + self.identity
        lists = self.files, self.blocks, self.sections, self.tensors, self.arrays
        for records, (layout, names) in zip(lists, (FILE, BLOCK, SECTION, TENSOR, ARRAY)):
            out += struct.pack("<Q", len(records))
            for record in records:
                values = [record[name] for name in names.split()]
                out += struct.pack(
                    layout,
                    *(struct.pack(f"<{len(v)}Q", *v) if isinstance(v, list) else v for v in values),
                )
        out += struct.pack(f"<Q{len(checksums)}I", len(checksums), *checksums)
        no_metadata = struct.pack("<Q", 0)
        return (
            out + no_metadata + struct.pack("<Q", len(self.text)) + self.text + self.directory_tail
        )

    def set_text(self, paths: list[bytes], blocks: list[bytes], names: list[bytes]) -> None:
        """Lays out the text, and the fields that point into it."""
        self.text = b""
        for records, values, key in (
            (self.files, paths, "path"),
            (self.blocks, blocks, "name"),
            (self.tensors, names, "name"),
        ):
            for record, value in zip(records, values):
                record[f"{key}_offset"], record[f"{key}_length"] = len(self.text), len(value)
                self.text += value


def code_lengths(counts: dict[int, int], limit: int = 16) -> bytes:
    """Optimal code lengths of exponents."""
    lengths = code_lengths_of(counts, limit)
    return bytes(lengths.get(e, 0) for e in range(256))


def code_lengths_of(counts: dict[int, int], limit: int) -> dict[int, int]:
    """Optimal code lengths of at most `limit` bits, by package-merge."""
    leaves = sorted((n, (e,)) for e, n in counts.items())
    if len(leaves) == 1:
        return {leaves[0][1][0]: 1}
    lengths = dict.fromkeys(counts, 0)
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(limit):
        merged = sorted(leaves + packages)
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(merged[::2], merged[1::2])]
    for _, members in packages[: len(leaves) - 1]:
        for e in members:
            lengths[e] += 1
    return lengths


def codes(lengths: bytes) -> dict[int, str]:
    """RFC 1951, section 3.2.2: codes as text, first bit first."""
    out, code = {}, 0
    for length in range(1, 17):
        for e in range(256):
            if lengths[e] == length:
                out[e] = f"{code:0{length}b}"
                code += 1
        code <<= 1
    return out


def luts(code: dict[int, str]) -> bytes:
    """The LUTs, entry by entry: index bits are written first bit first and reversed into a number.
    """
    prefixes = sorted({c[:8] for c in code.values() if len(c) > 8}, key=lambda p: int(p[::-1], 2))
    tables = [[0] * 256 for _ in range(1 + len(prefixes))]
    for k, prefix in enumerate(prefixes, start=1):
        tables[0][int(prefix[::-1], 2)] = k
    for e, c in code.items():
        table, rest = (tables[0], c) if len(c) <= 8 else (tables[1 + prefixes.index(c[:8])], c[8:])
        for index in range(256):
            if f"{index:08b}"[::-1].startswith(rest):
                table[index] = len(c) * 256 + e
    return b"".join(struct.pack("<256H", *table) for table in tables)


def gap_arrays(
    data: bytes, thread_bytes: int, block_threads: int
) -> tuple[list[tuple[int, bytes]], int]:
    """(kind of section, bytes) of the five arrays of a gap tensor, and bit_count."""
    weights = struct.unpack(f"<{len(data) // 2}H", data)
    exponents = [w >> 7 & 0xFF for w in weights]
    lengths = code_lengths({e: exponents.count(e) for e in set(exponents)})
    code = codes(lengths)
    boundaries = [0]
    for e in exponents:
        boundaries.append(boundaries[-1] + lengths[e])
    bit_count, bits = boundaries[-1], 8 * thread_bytes
    threads = -(-bit_count // bits)
    stream = int("".join(code[e] for e in exponents)[::-1], 2).to_bytes(
        thread_bytes * threads, "little"
    )
    gaps, firsts, k = [], [], 0
    for i in range(threads):
        while boundaries[k] < bits * i:
            k += 1
        gaps.append(boundaries[k] - bits * i)
        if i % block_threads == 0:
            firsts.append(k)
    firsts.append(len(weights))
    gaps.append(0)
    packed = bytes(gaps[i] | gaps[i + 1] << 4 for i in range(0, threads, 2))
    offsets = struct.pack(f"<{len(firsts)}Q", *firsts)
    plane = bytes(w >> 8 & 0x80 | w & 0x7F for w in weights)
    return [
        (1, lengths + luts(code)),
        (2, packed),
        (2, offsets),
        (3, stream),
        (4, plane),
    ], bit_count


def safetensors(tensors: list[Source]) -> tuple[bytes, bytes]:
    """Prefix and data of a safetensors file with the tensors in the order given."""
    position, header = 0, {}
    for t in tensors:
        header[t.name] = {
            "dtype": t.dtype,
            "shape": t.shape,
            "data_offsets": [position, position + len(t.data)],
        }
        position += len(t.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, b"".join(t.data for t in tensors)


def draft(
    sources: list[Source],
    side: dict[str, bytes] | None = None,
    block_names: list[str] | None = None,
) -> Draft:
    """A complete draft: records, sections and text."""
    side = side or {}
    d = Draft()
    block_names = block_names or sorted({s.block for s in sources})
    paths = sorted({s.file for s in sources}, key=str.encode)
    ordered = sorted(sources, key=lambda s: s.name.encode())
    stored: list[tuple[int, int, bytes]] = []  # block, kind, bytes of each array

    def store(block: int, kind: int, data: bytes) -> None:
        stored.append((block, kind, data))

    positions: dict[str, int] = {}
    for path in paths:
        members = [s for s in sources if s.file == path]
        prefix, data = safetensors(members)
        position = len(prefix)
        for s in members:
            positions[s.name] = position
            position += len(s.data)
        d.files.append(
            dict(
                kind=0,
                reserved=0,
                length=position,
                hash=blake3(prefix + data),
                first_array=len(stored),
                array_count=1,
            )
        )
        store(NONE, 6, prefix)
    for path in sorted(side, key=str.encode):
        data = side[path]
        d.files.append(
            dict(
                kind=1,
                reserved=0,
                length=len(data),
                hash=blake3(data),
                first_array=len(stored),
                array_count=int(bool(data)),
            )
        )
        if data:
            store(NONE, 7, data)
    for s in ordered:
        block, first, parameters, encoding = block_names.index(s.block), len(stored), [0] * 4, 1
        if s.alias is not None:
            encoding, parameters = 0, [[o.name for o in ordered].index(s.alias), 0, 0, 0]
        elif s.gap:
            arrays, bit_count = gap_arrays(s.data, *s.gap)
            encoding, parameters = 2, [*s.gap, bit_count, 0]
            for kind, data in arrays:
                store(block, kind, data)
        elif s.tile:
            arrays, parameters = s.tile
            encoding = 3
            for kind, data in arrays:
                store(block, kind, bytes(data))
        elif s.data:
            store(block, 5, s.data)
        d.tensors.append(
            dict(
                dtype=DTYPE_IDS[s.dtype],
                encoding=encoding,
                block=block,
                file=paths.index(s.file),
                file_offset=positions[s.name],
                dimension_count=len(s.shape),
                shape=[*s.shape, *[0] * (8 - len(s.shape))],
                first_array=first,
                array_count=len(stored) - first,
                parameters=parameters,
                hash=blake3(s.data),
            )
        )
    d.blocks = [{} for _ in block_names]
    _lay_out(d, stored)
    texts = [paths + sorted(side, key=str.encode), block_names, [s.name for s in ordered]]
    d.set_text(*([value.encode() for value in values] for values in texts))
    files = sorted((path.encode(), f) for path, f in zip(texts[0], d.files))
    d.identity = blake3(
        b"".join(
            bytes([f["kind"] == 0])
            + struct.pack("<Q", len(path))
            + path
            + struct.pack("<Q", f["length"])
            + f["hash"]
            for path, f in files
        )
    )
    return d


def _lay_out(d: Draft, stored: list[tuple[int, int, bytes]]) -> None:
    """Sections and arrays (sections 2 and 3)."""
    keys = sorted({(block, kind) for block, kind, _ in stored})
    d.contents = [bytearray() for _ in keys]
    for block, kind, data in stored:
        i = keys.index((block, kind))
        d.contents[i] += bytes(-len(d.contents[i]) % 256)
        d.arrays.append(dict(section=i, offset=len(d.contents[i]), length=len(data)))
        d.contents[i] += data
    end = 4096
    for (block, kind), content in zip(keys, d.contents):
        offset = align(end, 4096)
        d.sections.append(
            dict(kind=kind, reserved=0, block=block, offset=offset, length=len(content))
        )
        end = offset + len(content)
