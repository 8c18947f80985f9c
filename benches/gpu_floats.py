#!/usr/bin/env python3
"""Decoding on the GPU by dtype: bytes written per second, beside BF16 and a plain copy, in one run.

    cargo build --release
    python3 -m venv .venv && .venv/bin/pip install --no-deps numpy ml_dtypes
    .venv/bin/python benches/gpu_floats.py --df11 target/release/df11 --out DIR

Writes a folder of seeded normal weights to DIR, which should lie outside the repository: a file for
each dtype with one square matrix, whose rows tell F32 from what was BF16 or F16. `df11 bench --gpu`
compares each on the GPU with the CPU, then measures. Series have the names of shape and dtype. It
compresses with all cores; a single launch decodes each matrix.
"""

import argparse
import pathlib
import subprocess
import sys

import numpy
from floats import KINDS
from matrices import write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--df11", default="target/release/df11")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--side", type=int, default=8192, help="columns, and the fewest rows")
    parser.add_argument("rest", nargs="*", help="more options of df11 bench, after --")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(1)
    print("| weights | matrix |\n|---|---|")
    for at, (name, (dtype, make)) in enumerate(KINDS.items()):
        rows = arguments.side + 32 * at
        values = random.standard_normal((rows, arguments.side), numpy.float32) * 0.02
        write(arguments.out / f"{name}.safetensors", dtype, {f"{name}.weight": make(values)})
        print(f"| {name} | {rows}x{arguments.side} |", flush=True)
    command = [arguments.df11, "bench", str(arguments.out), "--gpu", *arguments.rest]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
