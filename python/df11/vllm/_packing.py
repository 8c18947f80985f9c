"""Makes weights of dense values: in the fast layout on a GPU, ordinary ones on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.logger import init_logger

from .._engine import CompressedTensor, pack_rows
from ._deferred import Patch, Target

logger = init_logger("vllm.plugins.df11")


def pack(target: Target, because: str | None = None) -> None:
    """Makes a target what its dense patches say: packed on a GPU; an ordinary weight on the CPU."""
    patches = target.ordered()
    value: Tensor | None = _packed(target, patches) if _is_packed(target) else None
    if value is None:
        value = _rows(target, patches, 0, target.rows).view(target.shape)
        because = because or "it is small, on the CPU, or has too many exceptions"
        logger.info_once("df11: a weight of shape %s stays BF16: %s", target.shape, because)
    target.value = value


def _is_packed(target: Target) -> bool:
    small = target.rows * target.columns < 1 << 16
    fits = target.dtype == torch.bfloat16 and target.columns % 8 == 0
    return target.device.type == "cuda" and fits and not small


def _packed(target: Target, patches: list[Patch]) -> CompressedTensor | None:
    """In the fast layout; None if exceptions are too many for that."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = without_padding(target, patches)
    result = pack_rows(
        device,
        rows,
        target.columns,
        lambda begin, end: _rows(target, patches, begin, end, device),
    )
    if result is None:
        return None
    shape = target.shape if rows == target.rows else (rows, target.columns)
    return CompressedTensor(*result, shape)


def without_padding(target: Target, patches: list[Patch]) -> int:
    """Rows before those of zeros at the end, which would be exceptions in the fast layout."""
    rows = target.rows
    for patch in reversed(patches):
        if patch.values is not None or patch.columns != target.columns:
            break
        rows = patch.row
    return rows or target.rows


def _rows(
    target: Target, patches: list[Patch], begin: int, end: int, device: torch.device | None = None
) -> Tensor:
    """Some rows of a target."""
    device = device or target.device
    rows = torch.zeros(end - begin, target.columns, dtype=target.dtype, device=device)
    for patch in patches:
        first, last = max(begin, patch.row), min(end, patch.row + patch.rows)
        if first >= last or patch.values is None:
            continue
        skipped = first - patch.row
        some = patch._replace(
            row=first,
            rows=last - first,
            source_row=patch.source_row + skipped,
            values=patch.values[skipped : skipped + last - first]
            if isinstance(patch.values, Tensor)
            else patch.values,
        )
        place = rows[first - begin : last - begin, patch.column : patch.column + patch.columns]
        place.copy_(some.dense())
    return rows
