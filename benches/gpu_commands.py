#!/usr/bin/env python3
"""Times `df11 verify` with the CPU and with a GPU decoding, for models of some sizes: from which
size on a GPU is sooner done, which is what `--device auto` goes by (SMALL_BYTES in
src/open/verify.rs).

    cargo build --release
    cargo run --release --example weights -- /dev/shm/df11/base.safetensors rows 2
    python3 benches/gpu_commands.py --df11 target/release/df11 --runs 5 \
        /dev/shm/df11/base.safetensors

Each size is a model of as many layers of seven matrices, whose weights are those of BASE in another
order, beside BASE; put it on a tmpfs, or the disk is timed. Seconds are those of whole processes,
the start of the GPU and the load of the model included; rates are bytes of BF16 per second. Each
round runs every command once, in turn; the first one warms the page cache and does not count.
"""

import argparse
import json
import pathlib
import statistics
import struct
import typing

from commands import machine, run

MATRICES_A_LAYER = 7
# Weights by which the matrices of a model are turned against each other.
TURN = 997


def copy(source: typing.BinaryIO, start: int, end: int, target: typing.BinaryIO) -> None:
    """In pieces: what this process has in memory is counted for those that it starts."""
    source.seek(start)
    while start < end:
        piece = source.read(min(end - start, 1 << 20))
        target.write(piece)
        start += len(piece)


def make(path: pathlib.Path, base: pathlib.Path, size: int) -> None:
    """Writes a checkpoint of about `size` bytes."""
    with base.open("rb") as weights, path.open("wb") as file:
        (length,) = struct.unpack("<Q", weights.read(8))
        first, last = 8 + length, base.stat().st_size
        bytes_ = last - first
        count = max(1, size // bytes_)
        header = {}
        for index in range(count):
            name = f"model.layers.{index // MATRICES_A_LAYER}.{index % MATRICES_A_LAYER}.weight"
            place = [index * bytes_, (index + 1) * bytes_]
            header[name] = {"dtype": "BF16", "shape": [bytes_ // 2], "data_offsets": place}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)
        for index in range(count):
            middle = first + 2 * TURN * index % bytes_
            copy(weights, middle, last, file)
            copy(weights, first, middle, file)


class Bench:
    """The commands on a model of one size."""

    def __init__(
        self, df11: str, base: pathlib.Path, size: int, threads: list[int], devices: list[str]
    ) -> None:
        self.df11, self.threads, self.devices = df11, threads, devices
        source = base.with_name(f"{size}.safetensors")
        self.container = source.with_suffix(".df11")
        make(source, base, size)
        self.size = source.stat().st_size
        self.container.unlink(missing_ok=True)
        run([df11, "compress", str(source), "-o", str(self.container), "--no-verify", "-q"])
        source.unlink()
        self.rows: list[dict] = []

    def round(self) -> None:
        for threads in self.threads:
            for device in self.devices:
                command = [self.df11, "verify", str(self.container), "--device", device]
                command += ["--threads", str(threads), "--json"]
                wall, cpu, peak, output = run(command)
                by = json.loads(output)["device"]
                row = {"bytes": self.size, "device": device, "threads": threads, "wall_s": wall}
                row |= {"cpu_s": cpu, "peak_bytes": peak, "decoded_by": by["name"] or by["kind"]}
                self.rows.append(row)

    def summary(self) -> list[dict]:
        """The medians of each command."""
        groups: dict[tuple, list[dict]] = {}
        for row in self.rows:
            groups.setdefault((row["threads"], row["device"]), []).append(row)
        rows = []
        for (threads, device), mine in sorted(groups.items()):
            wall, cpu = (statistics.median(row[key] for row in mine) for key in ("wall_s", "cpu_s"))
            row = {"bytes": self.size, "threads": threads, "device": device}
            row |= {"wall_s": round(wall, 4), "cpu_s": round(cpu, 4)}
            row["gb_s"] = round(self.size / wall / 1e9, 3)
            row["peak_mib"] = round(max(row["peak_bytes"] for row in mine) / 2**20)
            rows.append(row)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=pathlib.Path)
    parser.add_argument("--df11", default="target/release/df11")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gib", default="0.25,0.5,1,2,4,8", help="sizes of the models")
    parser.add_argument("--threads", default="2,16")
    parser.add_argument("--devices", default="cpu,gpu")
    parser.add_argument("--json", type=pathlib.Path, help="write all rows here")
    arguments = parser.parse_args()
    threads = [int(count) for count in arguments.threads.split(",")]
    rows, summary = [], []
    for gib in map(float, arguments.gib.split(",")):
        bench = Bench(
            arguments.df11, arguments.base, int(gib * 2**30), threads, arguments.devices.split(",")
        )
        bench.round()
        bench.rows.clear()
        for _ in range(arguments.runs):
            bench.round()
        for row in bench.summary():
            print(
                f"{row['bytes'] / 1e9:7.3f} GB  {row['threads']:3} threads  {row['device']:4}"
                f" {row['wall_s']:8.3f} s wall {row['cpu_s']:8.3f} s CPU"
                f" {row['gb_s']:8.2f} GB/s  peak {row['peak_mib']} MiB",
                flush=True,
            )
        rows += bench.rows
        summary += bench.summary()
        bench.container.unlink()
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**machine(), "summary": summary, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
