"""Gathers each compressed tensor in one buffer, which one copy brings to a GPU.

`CompressedTensor.to` copies array by array, then builds decode tables and waits for them. A buffer
also contains the tables. From pinned memory its copy runs at the speed of the bus, and the CPU does
not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._matrices import KEPT, TABLE_BYTES, parts_with_arrays
from ._plan import aligned
from ._tensor import CompressedTensor


class Gathered:
    """A tensor on the host: fills buffers with it, and finds it in copies of these buffers."""

    def __init__(self, value: CompressedTensor, device: torch.device) -> None:
        """Reads nothing yet. `device`: where copies will be. Raises `ValueError` for a tensor that
        is not on the host.
        """
        if value.device.type != "cpu":
            raise ValueError(f"tensors of the host are gathered, and this is on {value.device}")
        self.value, self.device = value, device
        table = TABLE_BYTES if device.type == "cuda" else 0
        self._lengths: list[int] = []
        for _, arrays in parts_with_arrays(value._arrays, value.flat_parts):
            self._lengths += [*(array.nbytes for array in arrays[:KEPT]), table]
        #: Bytes of a buffer.
        self.nbytes = sum(map(aligned, self._lengths))

    def fill(self, buffer: Tensor) -> None:
        """Copies the tensor into a buffer on the host: `nbytes` uint8. Waits for the GPU, which
        builds the decode tables.
        """
        for place, array in zip(self._places(buffer), self._arrays(), strict=True):
            place.copy_(array)

    def within(self, buffer: Tensor) -> CompressedTensor:
        """The tensor in a copy of a filled buffer, whose memory it shares."""
        return self.value.like(self._places(buffer), device=None)

    def _arrays(self) -> Iterator[Tensor]:
        for part, arrays in parts_with_arrays(self.value._arrays, self.value.flat_parts):
            yield from arrays[:KEPT]
            yield torch.ops.df11.table_of_kind(arrays[0].to(self.device), part.kind)

    def _places(self, buffer: Tensor) -> list[Tensor]:
        rooms = torch.split(buffer, [*map(aligned, self._lengths)])
        return [room[:length] for room, length in zip(rooms, self._lengths, strict=True)]
