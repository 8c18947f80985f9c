"""Makes weights of dense values: in the fast layout on a GPU, ordinary ones on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.logger import init_logger

from .._engine import CompressedTensor, pack_rows
from ._deferred import Piece, Target

logger = init_logger("vllm.plugins.df11")


def pack(target: Target, because: str | None = None) -> None:
    """Makes a target what its dense pieces say: packed on a GPU; an ordinary weight on the CPU."""
    pieces = target.ordered()
    value: Tensor | None = _packed(target, pieces) if _is_packed(target) else None
    if value is None:
        value = _rows(target, pieces, 0, target.rows).view(target.shape)
        because = because or "it is small, on the CPU, or has too many exceptions"
        logger.info_once("df11: a weight of shape %s stays BF16: %s", target.shape, because)
    target.value = value


def _is_packed(target: Target) -> bool:
    small = target.rows * target.columns < 1 << 16
    fits = target.dtype == torch.bfloat16 and target.columns % 8 == 0
    return target.device.type == "cuda" and fits and not small


def _packed(target: Target, pieces: list[Piece]) -> CompressedTensor | None:
    """In the fast layout; None if exceptions are too many for that."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = without_padding(target, pieces)
    result = pack_rows(
        device,
        rows,
        target.columns,
        lambda begin, end: _rows(target, pieces, begin, end, device),
    )
    if result is None:
        return None
    shape = target.shape if rows == target.rows else (rows, target.columns)
    return CompressedTensor(*result, shape)


def without_padding(target: Target, pieces: list[Piece]) -> int:
    """Rows before those of zeros at the end, which would be exceptions in the fast layout."""
    rows = target.rows
    for piece in reversed(pieces):
        if piece.values is not None or piece.columns != target.columns:
            break
        rows = piece.row
    return rows or target.rows


def _rows(
    target: Target, pieces: list[Piece], begin: int, end: int, device: torch.device | None = None
) -> Tensor:
    """Some rows of a target."""
    device = device or target.device
    rows = torch.zeros(end - begin, target.columns, dtype=target.dtype, device=device)
    for piece in pieces:
        first, last = max(begin, piece.row), min(end, piece.row + piece.rows)
        if first >= last or piece.values is None:
            continue
        skipped = first - piece.row
        some = piece._replace(
            row=first,
            rows=last - first,
            source_row=piece.source_row + skipped,
            values=piece.values[skipped : skipped + last - first]
            if isinstance(piece.values, Tensor)
            else piece.values,
        )
        place = rows[first - begin : last - begin, piece.column : piece.column + piece.columns]
        place.copy_(some.dense())
    return rows
