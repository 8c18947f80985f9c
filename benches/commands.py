#!/usr/bin/env python3
"""Times whole commands: `df11 compress` and `df11 decompress`, and zipnn beside them, on one thread
and on all.

    cargo build --release
    cargo run --release --example weights -- DIR/normal.safetensors normal
    cargo run --release --example weights -- DIR/rows.safetensors rows
    python3 -m venv .venv && .venv/bin/pip install zipnn torch
    .venv/bin/python benches/commands.py --df11 target/release/df11 --runs 7 \
        DIR/normal.safetensors DIR/rows.safetensors

Each round runs every command once, in turn, so that a drift of the machine's speed meets all of
them. Rates are bytes of BF16 per second; CPU time is user + system of the process as the kernel
accounts it. `cp` shows what reading and writing the same file costs. zipnn is timed in two ways:
the call alone, between bytes in memory, and with its file read and written, as df11 does. DIR
should be on a tmpfs, or the disk is timed.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ZIPNN = r"""
import sys, time
from zipnn import ZipNN
verb, source, target = sys.argv[1:]
codec = ZipNN(bytearray_dtype="bfloat16", threads=1)
start = time.process_time(), time.perf_counter()
data = bytearray(open(source, "rb").read())
call = time.process_time(), time.perf_counter()
result = codec.compress(data) if verb == "compress" else codec.decompress(bytes(data))
called = time.process_time(), time.perf_counter()
with open(target, "wb") as file:
    file.write(result)
end = time.process_time(), time.perf_counter()
print(called[0] - call[0], called[1] - call[1], end[0] - start[0], end[1] - start[1])
"""


def run(command: list[str]) -> tuple[float, float, int, str]:
    """Wall seconds, CPU seconds, peak resident bytes and output of one process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output


def machine() -> dict:
    """The machine of the measurements."""
    model = platform.processor() or platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "processor": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def remove(path: pathlib.Path) -> None:
    path.unlink(missing_ok=True)


class Bench:
    def __init__(
        self, df11: str, source: pathlib.Path, threads: list[int], layouts: list[str]
    ) -> None:
        self.df11, self.source, self.threads, self.layouts = df11, source, threads, layouts
        self.size = source.stat().st_size
        self.containers = {layout: source.with_suffix(f".{layout}.df11") for layout in layouts}
        self.restored = source.with_name(source.stem + "-restored.safetensors")
        self.zipped = source.with_suffix(".znn")
        self.rows: list[dict] = []

    def note(self, name: str, wall: float, cpu: float, peak: int = 0) -> None:
        row = {"source": self.source.name, "command": name}
        self.rows.append(row | {"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak})

    def time(self, name: str, *command: object) -> None:
        self.note(name, *run([str(word) for word in command])[:3])

    def round(self, zipnn: bool) -> None:
        for threads in self.threads:
            for layout, container in self.containers.items():
                remove(container)
                remove(self.restored)
                what = f"{layout}, {threads} threads"
                options = ["-q", "--threads", threads]
                compress = ["compress", self.source, "-o", container, "--no-verify"]
                for verb, command in (
                    ("compress", [*compress, "--layout", layout]),
                    ("decompress", ["decompress", container, "-o", self.restored]),
                    ("verify", ["verify", container]),
                ):
                    self.time(f"df11 {verb} {what}", self.df11, *command, *options)
        remove(self.restored)
        self.time("cp, the cost of the files alone", "cp", self.source, self.restored)
        if zipnn:
            for verb, source, target in (
                ("compress", self.source, self.zipped),
                ("decompress", self.zipped, self.restored),
            ):
                remove(target)
                command = [sys.executable, "-c", ZIPNN, verb, str(source), str(target)]
                _, _, peak, output = run(command)
                cpu, wall, cpu_files, wall_files = map(float, output.split())
                self.note(f"zipnn {verb}, the call", wall, cpu, peak)
                self.note(f"zipnn {verb}, with files", wall_files, cpu_files, peak)

    def ratio(self, one: str, other: str) -> float:
        """How many times the rate of another command, round by round."""
        seconds = [
            [row["cpu_s"] for row in self.rows if row["command"] == name] for name in (one, other)
        ]
        return statistics.median(theirs / ours for ours, theirs in zip(*seconds))

    def table(self) -> list[dict]:
        rows = []
        for name in dict.fromkeys(row["command"] for row in self.rows):
            mine = [row for row in self.rows if row["command"] == name]
            wall = [self.size / row["wall_s"] / 1e6 for row in mine]
            cpu = [self.size / row["cpu_s"] / 1e6 for row in mine]
            figures = {
                "wall_mb_s": round(statistics.median(wall)),
                "cpu_mb_s": round(statistics.median(cpu)),
                "cpu_mb_s_range": [round(min(cpu)), round(max(cpu))],
                "peak_mib": round(max(row["peak_bytes"] for row in mine) / 2**20),
            }
            rows.append({"source": self.source.name, "command": name} | figures)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=pathlib.Path)
    parser.add_argument("--df11", default="target/release/df11")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--layout", default="gap", help="one or more, with commas; the first is compared with zipnn"
    )
    parser.add_argument("--threads", default="1," + str(os.cpu_count()))
    parser.add_argument("--no-zipnn", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="write all rows here")
    arguments = parser.parse_args()
    threads = [int(count) for count in arguments.threads.split(",")]
    layouts = arguments.layout.split(",")
    benches = [Bench(arguments.df11, source, threads, layouts) for source in arguments.sources]
    for round_ in range(arguments.runs + 1):
        for bench in benches:
            bench.round(not arguments.no_zipnn)
            if round_ == 0:
                bench.rows.clear()  # The first round warms the page cache.
    about = machine()
    summary = []
    for bench in benches:
        zipped = bench.zipped.stat().st_size if bench.zipped.exists() else 0
        print(f"{bench.source.name}: {bench.size} bytes; bits per weight:", end="")
        for layout, container in bench.containers.items():
            print(f" {layout} {16 * container.stat().st_size / bench.size:.4f}", end="")
        print(f", zipnn {16 * zipped / bench.size:.4f}" if zipped else "")
        for row in bench.table():
            summary.append(row)
            print(
                f"  {row['command']:30} {row['wall_mb_s']:6} MB/s wall {row['cpu_mb_s']:6} MB/s CPU"
                f" {row['cpu_mb_s_range']} peak {row['peak_mib']} MiB"
            )
        for other in () if arguments.no_zipnn else ("the call", "with files"):
            for verb in ("compress", "decompress"):
                one, theirs = f"df11 {verb} {layouts[0]}, 1 threads", f"zipnn {verb}, {other}"
                print(
                    f"  df11 {verb} / {theirs}: {bench.ratio(one, theirs):.2f} times the rate, "
                    "CPU time, median of rounds"
                )
    if arguments.json:
        rows = [row for bench in benches for row in bench.rows]
        arguments.json.write_text(
            json.dumps({**about, "summary": summary, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
