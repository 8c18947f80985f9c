"""Packs BF16 matrices into the fast layout, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from . import _native
from ._matrices import FAST, TILE_ROWS, Part, raw_stream

#: BF16 bytes that are on the GPU at once.
SLICE_BYTES = 64 << 20

Packed = tuple[list[Tensor], list[Part]]


def pack(device: torch.device, rows: int, columns: int, some: Iterable[Tensor]) -> Packed | None:
    """Packs a BF16 matrix on a GPU: arrays and their part. `some` gives its rows in turn, dense on
    that GPU: whole strips at a time, or the last rows. None if it has too many exceptions.
    """
    size, stream = _native.strips_bytes(rows, columns), raw_stream(device.index)
    strips = torch.empty(size, dtype=torch.uint8, device=device)
    packer = _native.Packer(device.index, rows, columns, strips.data_ptr(), stream)
    done = 0
    for weights in some:
        packer.pack(done, weights.shape[0], weights.data_ptr(), stream)
        done += weights.shape[0]
    if (count := packer.finish(stream)) is None:
        return None
    entries = torch.empty(4 * count, dtype=torch.uint8, device=device)
    if count:
        packer.take(entries.data_ptr(), stream)
    return [strips, entries], [Part.whole(FAST, rows, columns)]


def pack_rows(
    device: torch.device, rows: int, columns: int, values: Callable[[int, int], Tensor]
) -> Packed | None:
    """Like `pack`, for rows that `values(first, last)` gives on any device."""
    some = (values(first, last).to(device) for first, last in row_ranges(0, rows, columns))
    return pack(device, rows, columns, some)


def pack_dense(device: torch.device, value: Tensor) -> Packed | None:
    """Like `pack`, for a dense BF16 tensor on any device, with rows of its last dimension."""
    dense = value.reshape(-1, value.shape[-1])
    rows, columns = dense.shape
    return pack_rows(device, rows, columns, lambda first, last: dense[first:last])


def row_ranges(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows: whole strips, as many at a time as `SLICE_BYTES` hold."""
    step = max(1, SLICE_BYTES // (2 * columns * TILE_ROWS)) * TILE_ROWS
    for first in range(begin, end, step):
        yield first, min(first + step, end)
