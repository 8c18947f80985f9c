#!/usr/bin/env python3
"""What a product costs on the host: calls of a linear layer, BF16 and df11, on a GPU.

    python bench/host.py --out rows.jsonl

The matrix is so small that the GPU is done before the next call comes. Microseconds of a call
without waiting, medians of rounds in turns.
"""

import time
from functools import partial

import torch
from tools import in_turns, numbers, parser, tell
from torch import Tensor, nn

from df11._encoding import pack_dense
from df11._tensor import CompressedTensor

GPU = torch.device("cuda", 0)
ROWS, COLUMNS, CALLS = 256, 256, 2000


def main() -> None:
    options = parser(__doc__, "--out")
    options.add_argument("--x-rows", type=numbers, default=[1, 8, 64])
    options.add_argument("--rounds", type=int, default=9)
    chosen = options.parse_args()
    torch.cuda.set_device(GPU)
    weight = (0.02 * torch.randn(ROWS, COLUMNS, device=GPU)).bfloat16()
    packed = pack_dense(GPU, weight)
    assert packed is not None
    weights = {"bf16": weight, "fast": CompressedTensor(*packed, weight.shape)}
    with torch.inference_mode():
        for x_rows in chosen.x_rows:
            x = torch.randn(1, x_rows, COLUMNS, device=GPU).bfloat16()
            works = {kind: partial(call, layer(one), x) for kind, one in weights.items()}
            taken = in_turns(chosen.rounds, works)
            tell(chosen.out, "host", {"x_rows": x_rows, **taken})


def layer(weight: Tensor) -> nn.Linear:
    made = nn.Linear(COLUMNS, ROWS, bias=False, device=GPU, dtype=torch.bfloat16)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def call(module: nn.Linear, x: Tensor) -> float:
    """Microseconds of a call."""
    for _ in range(10):  # also measures the order
        module(x)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        module(x)
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * taken / CALLS


if __name__ == "__main__":
    main()
