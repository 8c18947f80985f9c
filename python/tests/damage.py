"""Containers with damaged weights whose checksums are right, by the reader of `spec/python`."""

import struct
import sys
from pathlib import Path
from zlib import crc32

from conftest import ROOT


def damage(file: Path, count: int = 64) -> None:
    """Inverts the first bytes of the first bitstream, and makes all checksums right."""
    sys.path.insert(0, str(ROOT / "spec/python"))
    import df11_directory as spec

    found, chunk = spec.Directory(file), spec.CHECKSUM_CHUNK_BYTES
    data = bytearray(found.data)
    begin = next(section.offset for section in found.sections if section.kind == spec.BITSTREAM)
    data[begin : begin + count] = bytes(255 - byte for byte in data[begin : begin + count])
    ends = ((section.offset, section.offset + section.length) for section in found.sections)
    chunks = [(at, min(at + chunk, end)) for start, end in ends for at in range(start, end, chunk)]
    sums = [crc32(data[start:end]) for start, end in chunks]
    packed = [struct.pack(f"<{len(sums)}I", *values) for values in (found.checksums, sums)]
    place = found.header.directory_offset
    directory = data[place : place + found.header.directory_length]
    assert directory.count(packed[0]) == 1
    data[place : place + len(directory)] = directory = directory.replace(*packed)
    header = data[:56] + struct.pack("<I", crc32(directory))
    header += struct.pack("<I", crc32(header))
    data[: len(header)] = data[-len(header) :] = header
    file.write_bytes(data)
