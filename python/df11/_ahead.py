"""Decoding ahead: while a product runs, the weight of the next one is decoded on a second stream.

A product of many rows of x multiplies by a decoded weight. Its last thread blocks leave
multiprocessors idle, and decoding uses these. The first pass through a model shows which weight
comes next. The last product of a pass decodes nothing ahead, so no decoded weight remains between
passes.

Only products on a GPU's default stream do this. Graphs are captured on other streams, where a
weight that waits for its product would take memory of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from ._matrices import dtype_of_parts, raw_stream, shape_of

#: Addresses of arrays, and parts.
Key = tuple[tuple[int, ...], tuple[int, ...]]
#: `_ops._decode`.
Decode = Callable[..., Tensor]

#: Larger weights, such as those of vocabularies, are not decoded ahead.
MAX_BYTES = 256 << 20
_MAX_KNOWN = 1 << 15


class _Weight(NamedTuple):
    key: Key
    #: Weak, so that a model's memory is free once nobody else has it.
    arrays: list[Any]
    shape: tuple[int, int]
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def of(cls, key: Key, arrays: Sequence[Tensor]) -> _Weight:
        _, parts = key
        (rows, columns), dtype = shape_of(parts), dtype_of_parts(parts)
        size = rows * columns * dtype.itemsize
        return cls(key, [*map(ref, arrays)], (rows, columns), dtype, size)


class _Decoded(NamedTuple):
    key: Key
    #: Held until the product, so that no other weight gets their addresses.
    arrays: list[Tensor]
    weight: Tensor


class Ahead:
    """Products of many rows of x on a GPU's default stream."""

    def __init__(self, index: int) -> None:
        self.main: Any = torch.cuda.default_stream(index)
        self.side: Any = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        #: The last decoding may begin, and has ended.
        self._begun: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock = Lock()
        self._after: dict[Key, _Weight] = {}
        #: Weights of this pass.
        self._used: set[Key] = set()
        self._last: Key | None = None
        self._pending: _Decoded | None = None

    def linear(
        self,
        x: Tensor,
        arrays: Sequence[Tensor],
        parts: Sequence[int],
        bias: Tensor | None,
        decode: Decode,
    ) -> Tensor:
        """`functional.linear` with the decoded weight."""
        key = (tuple([array.data_ptr() for array in arrays]), tuple(parts))
        weight = self._take(key)
        self._learn(key, arrays)
        if weight is None:
            weight = decode(arrays, parts, x.device)
        following = self._prepare(key, x.device)
        # Launched first, so that decoding gets the multiprocessors that this product leaves idle.
        y = functional.linear(x, weight, bias)
        if following is not None:
            self._begin(following, decode)
        return y

    def _take(self, key: Key) -> Tensor | None:
        """The weight, if it was decoded ahead."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None:
                return None
            self.main.wait_event(self._ended)
        return pending.weight if pending.key == key else None

    def _learn(self, key: Key, arrays: Sequence[Tensor]) -> None:
        if key in self._used:  # a pass begins
            self._used.clear()
            if self._last is not None:
                self._after.pop(self._last, None)
        elif self._last is not None:
            known = self._after.get(self._last)
            if known is None or known.key != key or known.arrays[0]() is None:
                if len(self._after) >= _MAX_KNOWN:
                    self._after.clear()
                self._after[self._last] = _Weight.of(key, arrays)
        self._used.add(key)
        self._last = key

    def _prepare(self, key: Key, device: torch.device) -> _Decoded | None:
        """Memory for the next weight, which from now on the stream uses for nothing else."""
        following = self._after.get(key)
        if following is None:
            return None
        arrays = [array() for array in following.arrays]
        if following.nbytes > MAX_BYTES or any(array is None for array in arrays):
            return None
        try:
            weight = torch.empty(following.shape, dtype=following.dtype, device=device)
        except torch.OutOfMemoryError:
            return None
        self._begun.record(self.main)
        return _Decoded(following.key, arrays, weight)

    def _begin(self, following: _Decoded, decode: Decode) -> None:
        with self._lock:
            if self._pending is not None:  # another thread's
                self.main.wait_event(self._ended)
            self._pending = following
            self.side.wait_event(self._begun)
            try:
                _, parts = following.key
                weight = following.weight
                decode(following.arrays, parts, weight.device, weight, self.side)
            finally:
                self._ended.record(self.side)


_aheads: dict[int, Ahead] = {}


def ahead_of(device: torch.device) -> Ahead | None:
    """The object that multiplies on a GPU's current stream; None if nothing is decoded ahead
    there."""
    if device.type != "cuda" or raw_stream(device.index):
        return None
    if device.index not in _aheads:
        _aheads[device.index] = Ahead(device.index)
    return _aheads[device.index]
