"""A product of FP8 matrices in Triton, which reads the memory of its weight."""

from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 16


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    x, w, y, x_scales, w_scales, M, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * B + tl.arange(0, B)
    inner, is_row = tl.arange(0, B), rows < M
    total = tl.zeros((R, B), tl.float32)
    for k in range(K // B):
        at = k * B + inner
        a = tl.load(x + rows[:, None] * K + at[None, :], mask=is_row[:, None], other=0.0)
        b = tl.load(w + columns[None, :] * K + at[:, None])
        scale = tl.load(x_scales + rows * (K // B) + k, mask=is_row, other=0.0)
        scale *= tl.load(w_scales + tl.program_id(1) * (K // B) + k)
        total += tl.dot(a, b) * scale[:, None]
    places = y + rows[:, None] * N + columns[None, :]
    tl.store(places, total.to(y.dtype.element_ty), mask=is_row[:, None])


def product(x: torch.Tensor, w: Any, w_scales: torch.Tensor, block: int) -> torch.Tensor:
    """x Wᵀ for x in BF16 and W in FP8, whose sides are multiples of the block's side."""
    rows, columns = w.shape
    parts = x.reshape(-1, columns // block, block).float()
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    a = (parts / scales).to(torch.float8_e4m3fn).view(-1, columns)
    y = x.new_empty(len(a), rows)
    grid = triton.cdiv(len(a), ROWS), rows // block
    sides = len(a), rows, columns
    _multiply[grid](a, w, y, scales, w_scales.contiguous(), *sides, R=ROWS, B=block)
    return y.view(*x.shape[:-1], rows)
