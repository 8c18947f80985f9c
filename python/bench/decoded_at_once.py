#!/usr/bin/env python3
"""Products with many rows of x in the fast layout, decoded before by some MB at once, and cuBLAS's.

    python bench/decoded_at_once.py [--rows 193,512] [--megabytes 60,120]

Microseconds for the four matrices of a layer of Llama-3.1-8B together: a CUDA graph of the four,
ten times, the best of three. Weights N(0, 0.02²).
"""

from __future__ import annotations

from collections.abc import Callable

import tools
import torch
from decode_step import capture, replays
from tools import numbers

from df11 import _ops
from df11._engine import pack_rows

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def main() -> None:
    """Prints a table."""
    parser = tools.parser(__doc__)
    parser.add_argument("--rows", type=numbers, default=[193, 384, 512, 1024, 4096, 16384])
    parser.add_argument("--megabytes", type=numbers, default=[20, 40, 60, 120, 240])
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(1)
    weights, packed = [], []
    for shape in SHAPES:
        weight = torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)
        weights.append(weight := weight.to(torch.bfloat16))
        result = pack_rows(device, *shape, lambda a, b, weight=weight: weight[a:b])
        assert result is not None
        packed.append(result)
    print("rows  cuBLAS  " + "  ".join(f"{size} MB" for size in options.megabytes))
    for rows in options.rows:
        xs = [torch.randn(rows, shape[1], device=device).to(torch.bfloat16) for shape in SHAPES]

        def dense(xs: list[torch.Tensor] = xs) -> torch.Tensor:
            for x, weight in zip(xs, weights, strict=True):
                y = torch.nn.functional.linear(x, weight)
            return y

        def decoded(xs: list[torch.Tensor] = xs) -> torch.Tensor:
            for x, (arrays, (part,)) in zip(xs, packed, strict=True):
                y = torch.ops.df11.linear(x, arrays, part, None, False)
            return y

        found = [timed(dense)]
        for size in options.megabytes:
            _ops.TEMPORARY_BYTES = size * 10**6
            found.append(timed(decoded))
        print(rows, *(f"{us:.0f}" for us in found), sep="  ", flush=True)


def timed(work: Callable[[], torch.Tensor]) -> float:
    """Microseconds of one replay of a graph."""
    graph, _ = capture(work)
    return 1000 * min(replays(graph, 10) for _ in range(3))


if __name__ == "__main__":
    main()
