"""Translates the bytes of weights on a GPU by a table for each block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _translate(weight, table, chosen, columns, strips, side: tl.constexpr):  # type: ignore[no-untyped-def]
    strip, band = tl.program_id(0), tl.program_id(1)
    if tl.load(chosen + strip // strips) != 0:
        rows, inner = strip * side + tl.arange(0, side), band * side + tl.arange(0, side)
        places = weight + rows[:, None].to(tl.int64) * columns + inner[None, :]
        block = (strip * tl.num_programs(1) + band).to(tl.int64)
        bytes_ = tl.load(places).to(tl.int32)
        tl.store(places, tl.load(table + block * 256 + bytes_))


def translate(weight: Tensor, table: Tensor, side: int, chosen: Tensor | None) -> None:
    """Replaces each byte of a matrix, in place. `table`: 256 bytes for each block of `side` rows
    by `side` columns, by rows of blocks. `chosen`: for each of equal shares of the rows, and one
    more, whether they are replaced.
    """
    rows, columns = weight.shape
    grid = rows // side, columns // side
    if chosen is None:
        chosen = weight.new_ones(2, dtype=torch.int32)
    strips = grid[0] // (len(chosen) - 1)
    _translate[grid](weight, table, chosen, columns, strips, side=side, num_warps=8)
