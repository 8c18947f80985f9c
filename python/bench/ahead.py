#!/usr/bin/env python3
"""Products of many rows of x in FLUX.1's order, with the next weight decoded meanwhile or not.

    python bench/ahead.py --out rows.jsonl

Six matrices of FLUX.1, six of each in turn, and layer norms and GELU between them, as a diffusion
transformer has; `--bare` leaves these out. Milliseconds, medians of rounds in turns. Outputs are
compared bit by bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tools import in_turns, numbers, parser, seconds, tell
from torch import Tensor, nn
from torch.nn import functional

from df11 import _ops
from df11._encoding import pack_dense
from df11._tensor import CompressedTensor

GPU = torch.device("cuda", 0)
SHAPES = [(9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072), (3072, 15360)]
COUNT = 6


def main() -> None:
    options = parser(__doc__, "--out")
    options.add_argument("--x-rows", type=numbers, default=[4096, 4608])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--bare", action="store_true", help="products alone")
    chosen = options.parse_args()
    torch.cuda.set_device(GPU)
    dense = [(0.02 * torch.randn(shape, device=GPU)).bfloat16() for shape in SHAPES * COUNT]
    weights = {"bf16": dense, "fast": [packed(weight) for weight in dense]}
    with torch.inference_mode():
        for x_rows in chosen.x_rows:
            model = Model(x_rows, chosen.bare)
            works: dict[str, Callable[[], float]] = {
                "bf16": partial(model.seconds, weights["bf16"]),
                "fast": partial(model.seconds, weights["fast"], is_ahead=False),
                "fast_ahead": partial(model.seconds, weights["fast"]),
            }
            in_turns(2, works)
            taken = {f"{kind}_ms": 1e3 * of for kind, of in in_turns(chosen.rounds, works).items()}
            tell(chosen.out, "ahead", {"x_rows": x_rows, "bare": chosen.bare, **taken})
            assert all(map(torch.equal, *map(model.outputs, weights.values())))


def packed(weight: Tensor) -> CompressedTensor:
    made = pack_dense(GPU, weight)
    assert made is not None
    return CompressedTensor(*made, weight.shape)


class Model:
    def __init__(self, x_rows: int, is_bare: bool) -> None:
        columns = {columns for _, columns in SHAPES}
        self.x = {each: torch.randn(x_rows, each, device=GPU).bfloat16() for each in columns}
        self.norm = None if is_bare else nn.LayerNorm(3072, device=GPU, dtype=torch.bfloat16)

    def run(self, weights: list[Any]) -> None:
        for weight in weights:
            y = functional.linear(self.x[weight.shape[1]], weight)
            if self.norm is not None:
                self.norm(self.x[3072])
                functional.gelu(y)

    def seconds(self, weights: list[Any], is_ahead: bool = True) -> float:
        used = _ops.ahead_of
        if not is_ahead:
            _ops.ahead_of = lambda _: None
        try:
            return seconds(GPU, partial(self.run, weights))
        finally:
            _ops.ahead_of = used

    def outputs(self, weights: list[Any]) -> list[Tensor]:
        return [functional.linear(self.x[weight.shape[1]], weight) for weight in weights]


if __name__ == "__main__":
    main()
