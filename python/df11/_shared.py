"""Products that share x: the first of several weights is multiplied together with the others.

Modules multiply the same x by one weight after another: q, k and v; gate and up. One launch for all
of them takes less time than one each. Nothing has to be known of a model: weights that were
multiplied by one x, one right after another, are multiplied together from the next time on, and
results wait for whoever asks for them. Bits do not depend on it: neither kernels nor decoding look
at other weights.

A result is handed out for exactly that x: the same object, unchanged since, on the same stream, in
the same capture of a CUDA graph, right after the others of its group. If results are left over
again and again, the weights go their own ways.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from . import _native, _ops
from ._matrices import PART, raw_stream, shape_of

#: Weights of one product, at most: what a launch takes.
_MOST = 8
#: The most bytes that are decoded together in exact mode.
_MOST_DECODED = 256 << 20
_MOST_LEFT = 2


class _Moment(NamedTuple):
    """What must be the same for two products with one x to be one."""

    #: There is one such reference to a tensor at a time, so it tells tensors apart.
    x: weakref.ref[Tensor]
    version: int
    stream: int
    capture: int

    def is_same(self, other: _Moment) -> bool:
        return self.x is other.x and self[1:] == other[1:]

    @classmethod
    def of(cls, x: Tensor) -> _Moment | None:
        """None for a tensor that does not tell of changes."""
        if x.is_inference():
            return None
        stream = capture = 0
        if x.is_cuda:
            stream = raw_stream(x.device.index)
            if torch.cuda.is_current_stream_capturing():
                capture = _native.capture_id(stream)
        return cls(weakref.ref(x), x._version, stream, capture)


class Operand:
    """What products need of a weight, which keeps it. Weak references point to this and never to
    the weight: PyTorch exchanges tensors in place when a module moves (`torch.utils.swap_tensors`),
    and refuses those that have some.
    """

    __slots__ = ("__weakref__", "arrays", "device", "exact", "parts", "shared")

    def __init__(
        self, arrays: list[Tensor], parts: tuple[int, ...], exact: bool, device: torch.device
    ) -> None:
        self.arrays, self.parts, self.exact, self.device = arrays, parts, exact, device
        #: What it is multiplied together with: nothing yet (None), or nothing ever (False).
        self.shared: SharedInput | bool | None = None


#: A weight and its bias; weak, so that neither is kept alive.
_Pair = tuple["weakref.ref[Operand]", "weakref.ref[Tensor] | None"]


class SharedInput:
    def __init__(self, pairs: list[_Pair]) -> None:
        self.pairs = pairs
        #: Of the last product: results by the identity of their weight.
        self._left: tuple[_Moment, dict[int, Tensor], tuple[int, ...]] | None = None
        #: The product of its thread with which results were left.
        self._left_at = (0, 0)
        self._times_left = 0

    def multiply(self, x: Tensor, weight: Operand, bias: Tensor | None) -> Tensor | None:
        now = _Moment.of(x)
        weights = [other for ref, _ in self.pairs if (other := ref()) is not None]
        biases = [None if ref is None else ref() for _, ref in self.pairs]
        if now is None or len(weights) < len(self.pairs):
            return None
        known = list(zip(self.pairs, weights, biases, strict=True))
        if any(b is None and ref is not None for (_, ref), _, b in known):
            return None
        if not any(w is weight and b is bias for _, w, b in known):
            return None
        versions = tuple(-1 if b is None or b.is_inference() else b._version for b in biases)
        left, before, self._left_at = self._left, self._left_at, _last.product
        # Nothing was multiplied meanwhile: a graph that is replayed writes to x without a version.
        is_next = before == (_last.product[0], _last.product[1] - 1)
        if left is not None and is_next and now.is_same(left[0]) and left[2] == versions:
            y = left[1].pop(id(weight), None)
            if not left[1]:
                self._left = None
            if y is not None:
                return y
        elif left is not None:
            self._times_left += 1
            if self._times_left > _MOST_LEFT:
                self._left = None
                for other in weights:
                    other.shared = False
                return None
        arrays = [array for other in weights for array in other.arrays]
        parts = [number for other in weights for number in other.parts]
        counts = [len(other.parts) // PART for other in weights]
        added = [x.new_empty(0) if b is None else b for b in biases]
        some = added if any(b is not None for b in biases) else []
        products = _ops.linears(x, arrays, parts, counts, some, weight.exact)
        results = dict(zip(map(id, weights), products, strict=True))
        y = results.pop(id(weight))
        self._left = now, results, versions
        return y


class _Last(threading.local):
    """The last product with one weight of this thread, and those with the same x before it."""

    def __init__(self) -> None:
        #: The thread, and how many products it has made.
        self.product = (threading.get_ident(), 0)
        self.moment: _Moment | None = None
        self.pairs: list[_Pair] = []


_last = _Last()


def multiply(x: Tensor, weight: Operand, bias: Tensor | None) -> Tensor:
    _last.product = (_last.product[0], _last.product[1] + 1)
    shared = weight.shared
    if isinstance(shared, SharedInput):
        y = shared.multiply(x, weight, bias)
        if y is not None:
            return y
    y = _ops.linear(x, weight.arrays, weight.parts, bias, weight.exact)
    if shared is None:
        _learn(x, weight, bias)
    return y


def _learn(x: Tensor, weight: Operand, bias: Tensor | None) -> None:
    now = _Moment.of(x)
    is_same = now is not None and _last.moment is not None and now.is_same(_last.moment)
    if not is_same:
        _last.moment, _last.pairs = now, []
    _last.pairs.append((weakref.ref(weight), None if bias is None else weakref.ref(bias)))
    if not is_same:
        return
    weights = [other for ref, _ in _last.pairs if (other := ref()) is not None]
    if len(weights) == len(_last.pairs) and _suit(weights):
        shared = SharedInput(list(_last.pairs))
        for other in weights:
            other.shared = shared
    else:
        _last.moment = None


def _suit(weights: list[Operand]) -> bool:
    if len({id(weight) for weight in weights}) < len(weights) or len(weights) > _MOST:
        return False
    shapes = [shape_of(weight.parts) for weight in weights]
    kinds = {
        (weight.exact, weight.device, columns)
        for weight, (_, columns) in zip(weights, shapes, strict=True)
    }
    decoded = sum(2 * rows * columns for rows, columns in shapes)
    is_small = not weights[0].exact or decoded <= _MOST_DECODED
    return len(kinds) == 1 and is_small and all(weight.shared is not False for weight in weights)
