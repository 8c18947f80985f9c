"""Containers with damaged weights whose checksums are right, by the reader of `spec/python`."""

import struct
import sys
from pathlib import Path
from zlib import crc32

from conftest import ROOT

sys.path.insert(0, str(ROOT / "spec/python"))
import df11_directory as spec

_CHUNK = spec.CHECKSUM_CHUNK_BYTES


def damage(file: Path, kind: int = spec.BITSTREAM, first: int = 0, count: int = 64) -> None:
    """Inverts bytes of the first section of a kind, and makes all checksums right."""
    found = spec.Directory(file)
    data = bytearray(found.data)
    begin = next(s.offset for s in found.sections if s.kind == kind) + first
    data[begin : begin + count] = bytes(255 - byte for byte in data[begin : begin + count])
    ends = ((s.offset, s.offset + s.length) for s in found.sections)
    sums = [
        crc32(data[at : min(at + _CHUNK, end)])
        for start, end in ends
        for at in range(start, end, _CHUNK)
    ]
    before, after = (struct.pack(f"<{len(sums)}I", *values) for values in (found.checksums, sums))
    place = found.header.directory_offset
    directory = data[place : place + found.header.directory_length]
    assert directory.count(before) == 1
    directory = directory.replace(before, after)
    data[place : place + len(directory)] = directory
    header = data[:56] + struct.pack("<I", crc32(directory))
    header += struct.pack("<I", crc32(header))
    data[: len(header)] = data[-len(header) :] = header
    file.write_bytes(data)
