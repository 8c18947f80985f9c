"""Compressed tensors in one buffer each, which one copy brings to a GPU.

`CompressedTensor.to` copies array by array, then builds decode tables, for which it waits. A buffer
has the tables too. Out of pinned memory its copy is as fast as the bus, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._matrices import TABLE_BYTES, parts_with_arrays
from ._plan import aligned
from ._tensor import CompressedTensor


class Gathered:
    """Fills such buffers with a tensor on the host, and finds it in them and in their copies."""

    def __init__(self, value: CompressedTensor) -> None:
        """Reads nothing yet. Raises `ValueError` for a tensor that is on a GPU."""
        if value.device.type != "cpu":
            raise ValueError(f"a tensor on the host is gathered, and this is on {value.device}")
        self.value = value
        mine = [arrays for _, arrays in parts_with_arrays(value._arrays, value.flat_parts)]
        self._lengths = [n for kept in mine for n in (*(a.nbytes for a in kept[:-1]), TABLE_BYTES)]
        #: Bytes of a buffer.
        self.nbytes = sum(map(aligned, self._lengths))

    def fill(self, buffer: Tensor, device: torch.device) -> None:
        """Copies the tensor into `nbytes` of memory on the host. `device`: a GPU that builds the
        decode tables, for which this waits. Other GPUs can use them.
        """
        for place, array in zip(self._places(buffer), self._whole(device), strict=True):
            place.copy_(array)

    def within(self, buffer: Tensor) -> CompressedTensor:
        """The tensor in a copy of a filled buffer on a GPU, whose memory it shares."""
        return self.value.like(self._places(buffer), device=None)

    def _places(self, buffer: Tensor) -> list[Tensor]:
        rooms = torch.split(buffer[: self.nbytes], [*map(aligned, self._lengths)])
        return [room[:length] for room, length in zip(rooms, self._lengths, strict=True)]

    def _whole(self, device: torch.device) -> Iterator[Tensor]:
        for part, arrays in parts_with_arrays(self.value._arrays, self.value.flat_parts):
            yield from arrays[:-1]
            yield torch.ops.df11.table_of_kind(arrays[0].to(device), part.kind)
