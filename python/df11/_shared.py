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
from ._matrices import PART, shape_of
from ._torch import raw_stream

#: Weights of one product, at most: what a launch takes.
_MOST = 8
#: The most bytes that are decoded together in exact mode.
_MOST_DECODED = 256 << 20
#: How often results may be left over.
_MOST_LEFT = 2


class _Moment(NamedTuple):
    """What must be the same for two products with one x to be one."""

    #: There is one such reference to a tensor at a time, so it tells tensors apart.
    x: weakref.ref[Tensor]
    version: int
    stream: int
    capture: int

    def is_same(self, other: _Moment) -> bool:
        """Whether nothing has changed."""
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
    """What products need of a weight, which keeps it.

    Weak references point to this and never to the weight: PyTorch exchanges tensors in place when a
    module moves (`torch.utils.swap_tensors`), and refuses those that have some.
    """

    __slots__ = ("__weakref__", "arrays", "device", "exact", "parts", "shared")

    def __init__(
        self, arrays: list[Tensor], parts: tuple[int, ...], exact: bool, device: torch.device
    ) -> None:
        self.arrays, self.parts, self.exact, self.device = arrays, parts, exact, device
        #: What it is multiplied together with: nothing yet (None), or nothing ever (False).
        self.shared: SharedInput | bool | None = None

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded weight."""
        rows, columns = shape_of(self.parts)
        return 2 * rows * columns


class SharedInput:
    """Some weights, with their biases, that are multiplied by the same x."""

    def __init__(
        self, weights: list[weakref.ref[Operand]], biases: list[weakref.ref[Tensor] | None]
    ) -> None:
        self.weights, self.biases = weights, biases
        #: Of the last product: results by the identity of their weight.
        self._left: tuple[_Moment, dict[int, Tensor], tuple[int, ...]] | None = None
        #: The product of its thread with which results were left.
        self._left_at = (0, 0)
        self._times_left = 0

    def multiply(self, x: Tensor, weight: Operand, bias: Tensor | None) -> Tensor | None:
        """The product with a weight, one of these; None if they cannot be multiplied together."""
        now = _Moment.of(x)
        weights = [ref() for ref in self.weights]
        biases = [None if ref is None else ref() for ref in self.biases]
        at = next((at for at, other in enumerate(weights) if other is weight), None)
        alive = [other for other in weights if other is not None]
        if now is None or at is None or len(alive) < len(weights) or biases[at] is not bias:
            return None
        if any(ref is not None and ref() is None for ref in self.biases):
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
                self.part()
                return None
        arrays = [array for other in alive for array in other.arrays]
        parts = [number for other in alive for number in other.parts]
        counts = [len(other.parts) // PART for other in alive]
        added = [x.new_empty(0) if b is None else b for b in biases]
        products = _ops.linears(
            x,
            arrays,
            parts,
            counts,
            added if any(b is not None for b in biases) else [],
            weight.exact,
        )
        results = {id(other): y for other, y in zip(alive, products, strict=True)}
        y = results.pop(id(weight))
        self._left = now, results, versions
        return y

    def part(self) -> None:
        """Has each weight multiplied by itself for ever."""
        self._left = None
        for ref in self.weights:
            if (weight := ref()) is not None:
                weight.shared = False


class _Last(threading.local):
    """The last product with one weight of this thread, and those with the same x before it."""

    def __init__(self) -> None:
        #: The thread, and how many products it has made.
        self.product = (threading.get_ident(), 0)
        self.moment: _Moment | None = None
        self.weights: list[weakref.ref[Operand]] = []
        self.biases: list[weakref.ref[Tensor] | None] = []


_last = _Last()


def multiply(x: Tensor, weight: Operand, bias: Tensor | None) -> Tensor:
    """`_ops.linear`, together with those weights that share x."""
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
        _last.moment, _last.weights, _last.biases = now, [], []
    _last.weights.append(weakref.ref(weight))
    _last.biases.append(None if bias is None else weakref.ref(bias))
    if not is_same:
        return
    known = [ref() for ref in _last.weights]
    weights = [other for other in known if other is not None]
    if len(weights) == len(known) and _suit(weights):
        shared = SharedInput(list(_last.weights), list(_last.biases))
        for other in weights:
            other.shared = shared
    else:
        _last.moment = None


def _suit(weights: list[Operand]) -> bool:
    """Whether one product is right for all of them, and of use."""
    if len({id(weight) for weight in weights}) < len(weights) or len(weights) > _MOST:
        return False
    if any(weight.shared is False for weight in weights):
        return False
    alike = {(weight.exact, weight.device, shape_of(weight.parts)[1]) for weight in weights}
    decoded = sum(weight.decoded_bytes for weight in weights)
    return len(alike) == 1 and not (weights[0].exact and decoded > _MOST_DECODED)
