"""Compares bits of exact products with PyTorch's, for the linear layers of well-known models.

    python python/bench/exact_bits.py --out results [--quick]

For each shape of W, each number of rows of x, with and without a bias: whether the order of
`torch.nn.functional.linear` is known, with how many splits, and for three kinds of inputs how many
outputs differ (0, or the run fails). Weights are in the fast layout. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from df11 import _native, _ops, _order
from df11._encoding import pack_dense
from df11._matrices import product
from df11._tensor import CompressedTensor

GPU = torch.device("cuda", 0)
#: Rows and columns of merged and single layers.
MODELS: dict[str, list[tuple[int, int]]] = {
    "Llama 3.1 8B": [
        *((4096, 4096), (1024, 4096), (6144, 4096), (14336, 4096), (28672, 4096)),
        *((4096, 14336), (128256, 4096)),
    ],
    "Llama 3.1 70B": [
        *((8192, 8192), (1024, 8192), (10240, 8192), (28672, 8192), (57344, 8192)),
        *((8192, 28672), (128256, 8192)),
    ],
    "Qwen3 4B": [(4096, 2560), (1024, 2560), (2560, 4096), (9728, 2560), (2560, 9728)],
    "Qwen3 14B": [(5120, 5120), (1024, 5120), (17408, 5120), (5120, 17408), (151936, 5120)],
    "Qwen3 32B": [(8192, 5120), (5120, 8192), (25600, 5120), (5120, 25600)],
    "Gemma 3 12B": [(4096, 3840), (2048, 3840), (3840, 4096), (15360, 3840), (3840, 15360)],
    "Mixtral 8x7B": [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (32000, 4096)],
}
X_ROWS = [*range(1, 65), 96, 128, 256, 512, 1024, 2048]
QUICK = [1, 2, 8, 16, 17, 32, 64, 128, 256]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU)


def bits(y: Tensor, expected: Tensor) -> int:
    return int((y.view(torch.int16) != expected.view(torch.int16)).sum())


def inputs(columns: int, rows: int, at: Tensor) -> dict[str, Tensor]:
    """Normal inputs, magnitudes up to e to ±9, and inputs whose pairs of columns cancel."""
    wide = (3 * normal(rows, columns)).clamp(-9, 9).exp() * normal(rows, columns)
    half = wide[:, : columns // 2]
    cancelling = torch.cat([half, -half], 1)[:, at]
    found = {"normal": normal(rows, columns), "wide": wide, "cancelling": cancelling}
    return {kind: x.bfloat16().contiguous() for kind, x in found.items()}


def weight(rows: int, columns: int, at: Tensor) -> Tensor:
    w = torch.empty(rows, columns, dtype=torch.bfloat16, device=GPU)
    for some in torch.split(w, 4096):
        half = 0.02 * normal(len(some), columns // 2)
        some.copy_(torch.cat([half, half], 1)[:, at])
    return w


#: A number for each weight that an operator decodes.
decoded: list[int] = []


def watch() -> None:
    """Counts what operators decode."""

    def decode(*given: Any) -> Tensor:
        decoded.append(1)
        return real(*given)

    real = _ops.decode
    _ops.decode = decode


class Shape:
    """A weight of one shape, compressed and not."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.at = torch.randperm(columns, device=GPU)
        self.w = weight(rows, columns, self.at)
        packed = pack_dense(GPU, self.w)
        assert packed is not None
        self.tensor = CompressedTensor(*packed, self.w.shape)
        self.kernels = product(packed[0], self.tensor.flat_parts, 0)
        self.bias = normal(rows).bfloat16()

    def check(self, x_rows: int, with_bias: bool) -> dict[str, Any]:
        bias = self.bias if with_bias else None
        # Measures the order now; with many rows, products would only do so at their second call.
        shape, product_of = (self.rows, self.columns), (with_bias, _order.LINEAR, _ops._trial)
        (order,) = _order.prepare(GPU, shape, [x_rows], *product_of)
        different = {}
        decoded.clear()
        for kind, x in inputs(self.columns, x_rows, self.at).items():
            expected = functional.linear(x, self.w, bias)
            different[kind] = bits(functional.linear(x, self.tensor, bias), expected)
        early = self.kernels is not None and x_rows < self.kernels.crossover_rows
        return {
            "rows": self.rows,
            "columns": self.columns,
            "x_rows": x_rows,
            "bias": with_bias,
            "splits": order.splits,
            "early": early,
            "keeps": not decoded,
            "different": different,
        }


def spans(counts: list[int]) -> str:
    """Numbers with neighbours joined, as far as they are neighbours in what was asked."""
    held: list[list[int]] = []
    for count in counts:
        if held and X_ROWS.index(count) == X_ROWS.index(held[-1][-1]) + 1:
            held[-1].append(count)
        else:
            held.append([count])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in held)


def show(found: list[dict[str, Any]]) -> None:
    print(
        "| rows x columns | bias | splits: rows of x | decoded: order not known | decoded: faster |"
    )
    print("|---|---|---|---|---|")
    for (rows, columns, bias), group in itertools.groupby(
        found, lambda one: (one["rows"], one["columns"], one["bias"])
    ):
        cases = list(group)
        by: dict[int, list[int]] = {}
        for one in cases:
            if one["keeps"]:
                by.setdefault(one["splits"], []).append(one["x_rows"])
        told = "; ".join(f"{splits}: {spans(counts)}" for splits, counts in sorted(by.items()))
        unknown = spans([one["x_rows"] for one in cases if one["early"] and not one["keeps"]])
        late = spans([one["x_rows"] for one in cases if not one["early"]])
        print(f"| {rows} x {columns} | {'yes' if bias else 'no'} | {told} | {unknown} | {late} |")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--most", type=int, default=max(X_ROWS), help="rows of x")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DF11_ORDER_CACHE", str(options.out / "orders"))
    torch.manual_seed(1)
    watch()
    found, begin = [], time.perf_counter()
    shapes = dict.fromkeys(shape for of in MODELS.values() for shape in of)
    for rows, columns in shapes:
        shape = Shape(rows, columns)
        for with_bias in (False, True):
            for x_rows in QUICK if options.quick else X_ROWS:
                if x_rows > options.most:
                    break
                found.append(shape.check(x_rows, with_bias))
        _native.check(0, 0)
        del shape
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    show(found)
    wrong = [one for one in found if any(one["different"].values())]
    outputs = sum(3 * one["rows"] * one["x_rows"] for one in found)
    print(f"{len(found)} cases, {outputs:,} outputs, {len(wrong)} cases with other bits")
    print(f"{time.perf_counter() - begin:.1f} s; cuBLAS {_order._caches[0].about['cublas']}")
    for one in wrong[:20]:
        print("WRONG", one)
    (options.out / "exact_bits.json").write_text(json.dumps(found))
    return len(wrong)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(min(main(), 1))
