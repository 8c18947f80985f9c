"""The reader in spec/python and the library on mutated vectors: the same of each says whether it is
good, needs a newer reader, or is damaged.
"""

import importlib
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from conftest import ROOT

import df11

sys.path.insert(0, str(ROOT / "spec/python"))
read = importlib.import_module("check_vectors").read
spec = importlib.import_module("df11_reader")
Container = spec.Container

VECTORS = ROOT / "spec/vectors/valid"
#: Vectors with files and sections of every kind, aliases, metadata, several shards.
NAMES = ("aliases", "side-files", "side-files-beside", "metadata", "blocks", "unknown-section")
NAMES += ("dtypes", "geometries", "shard-1-of-2", "shard-2-of-2", "names", "file-order")
#: Edges of what kinds, dtypes, encodings, counts and offsets may be.
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 22, 23, 255, 256, 4096, 100_000, 100_001, 2**31 - 1, 2**31)
NUMBERS += (2**32 - 1, 2**63, 2**64 - 1)


def fields(valid: Any) -> Iterator[tuple[int, int, str]]:
    """Place, size and name of each field of the directory."""
    at = valid.header.directory_offset
    for name, layout in type(valid.shard).fields:
        yield at, layout.size, f"directory.{name}"
        at += layout.size
    lists = valid.files, valid.blocks, valid.sections, valid.tensors, valid.arrays
    for records in lists:
        at += 8
        for record in records:
            for name, layout in record.fields:
                yield at, layout.size, f"{record.place}.{name}"
                at += layout.size


def sealed(data: bytearray, valid: Any) -> bytes:
    start, length = valid.header.directory_offset, valid.header.directory_length
    data[56:60] = struct.pack("<I", crc32(data[start : start + length]))
    data[60:64] = struct.pack("<I", crc32(data[:60]))
    data[-64:] = data[:64]
    return bytes(data)


def mutants(data: bytes, generator: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """One or two fields are others, and checksums fit: mostly kinds, dtypes and encodings."""
    valid = Container(data)
    every = list(fields(valid))
    kinds = [field for field in every if field[2].endswith((".kind", ".dtype", ".encoding"))]
    for index in range(count):
        chosen = [generator.choice(kinds if index % 4 else every)]
        chosen += [generator.choice(every)] if index % 3 else []
        mutant, what = bytearray(data), []
        for at, size, name in chosen:
            number = generator.choice(NUMBERS) % 2 ** (8 * min(size, 8))
            mutant[at : at + min(size, 8)] = number.to_bytes(min(size, 8), "little")
            what.append(f"{name}={number}")
        yield ", ".join(what), sealed(mutant, valid)


def answer(work: Callable[[], Any], classes: dict[type[Exception], str]) -> str:
    """The kind of an error, or whether everything could be checked."""
    try:
        unchecked = work()
    except tuple(classes) as error:
        return classes[type(error)]
    return "incomplete" if unchecked else "good"


def of_reader(data: bytes) -> tuple[str, str]:
    words: dict[type[Exception], str] = {spec.Unsupported: "unsupported"}
    words |= {spec.Corrupt: "damaged", spec.Limit: "damaged"}

    def verify() -> Any:
        container = Container(data)
        return container.verify() or container.shard.shard_count > 1

    return answer(lambda: Container(data) and None, words), answer(verify, words)


def of_library(path: Path) -> tuple[str, str]:
    words: dict[type[Exception], str] = {df11.UnsupportedError: "unsupported"}
    words |= {df11.CorruptError: "damaged", df11.LimitError: "damaged"}
    opened = answer(lambda: df11.open(path, memory_map=False) and None, words)
    return opened, answer(lambda: df11.verify(path, device="cpu", progress=False).unchecked, words)


@pytest.mark.parametrize("name", NAMES)
def test_both_say_the_same_of_mutants(name: str, tmp_path: Path) -> None:
    generator = random.Random(name)
    data, path = read(VECTORS / f"{name}.df11.gz"), tmp_path / "x.df11"
    count = int(os.environ.get("DF11_MUTANTS", "150"))
    seen = set()
    for what, mutant in mutants(data, generator, count):
        path.write_bytes(mutant)
        reader, library = of_reader(mutant), of_library(path)
        assert reader == library, f"{what}: {reader}, and the library says {library}"
        seen |= {*reader}
    assert {"unsupported", "damaged"} < seen
