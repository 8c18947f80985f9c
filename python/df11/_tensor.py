"""Compressed matrices as tensors.

To PyTorch, a `CompressedTensor` is a tensor: it has a shape, a device and a dtype, and may be a
parameter. It holds the compressed arrays, which are ordinary uint8 tensors. Products, embedding
look-ups, views and moves work on the arrays (`_dispatch`). All other functions get decoded weights
for their call. It cannot be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, _tensor_str, nn
from torch.autograd import forward_ad
from torch.nn import functional

from . import _ops
from ._dispatch import Compressed, dense, dispatch
from ._functions import FUNCTIONS, refuse_gradients
from ._matrices import (
    ARRAYS,
    KEPT,
    PART,
    Part,
    check_kept,
    check_lengths,
    contiguous_strides,
    dtype_of_parts,
    lay_out,
    parts_with_arrays,
    shape_of,
)

#: PyTorch's own tensor classes.
PLAIN = (Tensor, nn.Parameter)
_FLAGS = ("exact", "transposed", "flipped")
_STATE = (*_FLAGS, "spread")
_NEEDED = {"parts", "shape"}
#: Version of the fast layout (spec/gpu.md, part 6), increased when the meaning of its bytes
#: changes. Version 3 has patches.
FAST_VERSION = 3

Numbers = Sequence[int]


class CompressedTensor(Compressed):
    """A tensor whose memory is the compressed arrays of some matrices (see `_matrices`).

    Its elements in row-major order are the stacked rows of all parts. In a tensor of any rank the
    leading dimensions count rows, and the others columns. It does not require gradients.
    """

    parts: tuple[Part, ...]
    flat_parts: tuple[int, ...]
    exact: bool
    #: Whether arrays hold the last two dimensions exchanged.
    transposed: bool
    #: Whether it is a view with exchanged last dimensions, which decodes to such strides.
    flipped: bool
    #: Strides of a view with gaps between its rows, to which it decodes; None of any other tensor.
    spread: tuple[int, ...] | None
    #: Whether arrays are in pinned memory of the host, and a GPU reads them there.
    is_streamed: bool
    #: Whether products are those of the matrix in the arrays, and the sides of that matrix.
    is_matrix: bool
    matrix_shape: tuple[int, int]
    _names: tuple[str, ...]
    #: Waits for its arrays, if they come over a network.
    _wait: Callable[[], None] | None = None
    #: Its device. PyTorch needs some microseconds to find that of a subclass.
    _place: torch.device

    @staticmethod
    def __new__(
        cls,
        arrays: CompressedTensor | Tensor | Sequence[Tensor],
        parts: Sequence[Numbers] = (),
        shape: Sequence[int] = (),
        *,
        exact: bool = True,
        transposed: bool = False,
        flipped: bool = False,
        spread: Sequence[int] | None = None,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> CompressedTensor:
        """Makes a tensor from arrays, which it keeps; or an alias with the same arrays.

        `arrays` and `parts` are as `_matrices` says, with eight numbers for each part.
        `shape` has as many elements as the parts. `device`: the GPU that uses pinned arrays on the
        host. `transposed`: arrays hold the last two dimensions exchanged, and decoding gives a
        contiguous copy. `spread`: the strides of decoded weights, if there are gaps between rows.
        Raises `ValueError` for another number of elements, `RuntimeError` for `requires_grad`.

        With an ordinary tensor it returns an ordinary parameter: accelerate calls a weight's class
        with the tensor that it has read from its own files on disk.
        """
        if requires_grad:
            refuse_gradients()
        if isinstance(arrays, CompressedTensor):
            kept = arrays.flipped, arrays.spread
            made = _wrapper(arrays.shape, *kept, arrays.device, arrays.dtype)
            return made._take(arrays, _is_param=getattr(arrays, "_is_param", False))
        if isinstance(arrays, Tensor):
            return nn.Parameter(arrays, requires_grad=False)  # type: ignore[return-value]
        held = tuple(part if type(part) is Part else Part(*part) for part in parts)
        flat = tuple(chain.from_iterable(held))
        spread = None if spread is None else tuple(spread)
        place = device or arrays[0].device
        self = _wrapper(shape, flipped, spread, place, dtype_of_parts(flat))
        self.parts, self.flat_parts = held, flat
        self.exact, self.transposed, self.flipped = exact, transposed, flipped
        self.spread = spread
        self._names = _names(tuple(part.kind for part in self.parts))
        self.__dict__.update(zip(self._names, arrays, strict=True))
        self._place = place
        self.is_streamed = self._place.type == "cuda" and arrays[0].device.type == "cpu"
        self.matrix_shape = rows, columns = shape_of(self.flat_parts)
        if prod(shape) != rows * columns:
            raise ValueError(f"parts of {rows} x {columns} weights for a tensor of shape {shape}")
        return self._ready(shape)

    def _ready(self, shape: Sequence[int]) -> CompressedTensor:
        # The strides of a matrix change the order of additions in PyTorch's product.
        is_plain = not (self.transposed or self.flipped or (self.exact and self.spread))
        self.is_matrix = is_plain and tuple(shape) == self.matrix_shape
        return self

    def _take(self, other: CompressedTensor, **changes: Any) -> CompressedTensor:
        """Becomes an alias of another tensor on the same device, with these changes."""
        for name in getattr(self, "_names", ()):
            delattr(self, name)
        is_parameter = getattr(self, "_is_param", False)
        self.__dict__.update({**other.__dict__, "_is_param": is_parameter, **changes})
        self.__dict__.pop("_arrays", None)
        return self._ready(self.shape)

    @cached_property
    def _arrays(self) -> list[Tensor]:
        """Its arrays, after `_come`. Do not write to them: they may be in a read-only mapping."""
        self._come()
        return self._places

    def _come(self) -> None:
        """Waits for arrays that arrive over a network. Raises the errors of reading them."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    @property
    def _places(self) -> list[Tensor]:
        """Its arrays, for callers that use only lengths and addresses: does not wait."""
        return [getattr(self, name) for name in self._names]

    @property
    def arrays(self) -> list[Tensor]:
        """Copies of its compressed arrays, in the order of `_matrices.ARRAYS`."""
        return [array.clone() for array in self._arrays]

    @property
    def _kept(self) -> list[Tensor]:
        self._come()
        return [getattr(self, f"_{label}{at}") for at, label in _kept(self.parts)]

    def _with_kept(self, kept: Sequence[Tensor]) -> CompressedTensor:
        return self.like(with_tables(kept, self.parts), device=None)

    @property
    def nbytes_stored(self) -> int:
        """Bytes of its arrays, each counted once. A window counts whole arrays."""
        return sum({id(array): array.nbytes for array in self._places}.values())

    @property
    def _nbytes(self) -> int:
        """Its share of the arrays, in bytes. Windows share in proportion to their numbers of
        weights, so that all windows of a matrix add up to its arrays.
        """
        total = 0.0
        for part, mine in parts_with_arrays(self._places, self.flat_parts):
            share = part.height * part.width / (part.rows * part.columns)
            total += share * sum(array.numel() for array in mine)
        return round(total)

    def like(
        self,
        arrays: Sequence[Tensor] | None = None,
        parts: Sequence[Numbers] | None = None,
        shape: Sequence[int] | None = None,
        **changes: Any,
    ) -> CompressedTensor:
        """A copy with these changes. New arrays need new `parts`."""
        options = {**self._options, **changes}
        shape = self.shape if shape is None else shape
        if arrays is not None:
            return CompressedTensor(arrays, parts or self.parts, shape, **options)
        del options["device"]
        made = _wrapper(shape, options["flipped"], options["spread"], self._place, self.dtype)
        return made._take(self, **options)

    def without_gaps(self) -> CompressedTensor:
        """An alias with the strides that PyTorch gives to a copy."""
        strides = self.spread
        if strides is None:
            return self.like()
        return self.like(flipped=len(strides) > 1 and strides[-2] < strides[-1], spread=None)

    @property
    def _options(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _STATE}
        return {**options, "device": self._place if self.is_streamed else None}

    def decode(self) -> Tensor:
        """The weights as an ordinary tensor of the same dtype, shape, strides and device.

        Takes new memory for all weights, with `spread` for the gaps too, briefly twice that if
        `transposed` or with `spread`, and the time of `df11::decode`.
        Raises `CorruptError` on the CPU if arrays contradict themselves.
        """
        dense = torch.ops.df11.decode(self._arrays, self.flat_parts, self.device)
        return lay_out(dense, self.shape, self.transposed, self.flipped, self.spread)

    def with_mode(self, exact: bool) -> CompressedTensor:
        """An alias whose products are exact, or the fastest ones."""
        return self.like(exact=exact)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        self._come()
        return list(self._names), (self.parts, tuple(self._options.items()))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: tuple[Any, ...], size: Any, stride: Any
    ) -> CompressedTensor:
        parts, options = meta
        return CompressedTensor(list(inner.values()), parts, size, **dict(options))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        residence = "fast layout" if any(part.is_fast for part in self.parts) else "as stored"
        where = ", streamed" if self.is_streamed else ""
        mode = "exact" if self.exact else "fused"
        head = (
            f"CompressedTensor(shape={tuple(self.shape)}, {self.dtype}, "
            f"device={str(self.device)!r}, {mode}, {residence}{where}, {self.nbytes_stored} bytes)"
        )
        return f"{head} containing:\n{self._values_shown()}" if self._has_values() else head

    def _has_values(self) -> bool:
        """Whether its weights can be decoded now."""
        if self.is_meta or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return False
        if any(type(array) is not Tensor for array in self._arrays):
            return False
        return not (self.is_cuda and torch.cuda.is_current_stream_capturing())

    @torch.no_grad()
    def _values_shown(self) -> str:
        """The weights as PyTorch prints a tensor. A large one decodes only the weights at the ends
        of each dimension.
        """
        options = _tensor_str.PRINT_OPTS
        if self.numel() <= options.threshold:
            return repr(self.decode())
        shown: Tensor = self
        for dim, size in enumerate(self.shape):
            if size > 2 * options.edgeitems:
                edges = (
                    shown.narrow(dim, 0, options.edgeitems + 1),
                    shown.narrow(dim, size - options.edgeitems, options.edgeitems),
                )
                shown = torch.cat([dense(edge) for edge in edges], dim)
        with _tensor_str.printoptions(threshold=0):
            return repr(dense(shown))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedTensor:
        # Nothing can write to the arrays, so a copy may share them.
        copy = memo[id(self)] = CompressedTensor(self)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self._kept, self._state, bool(getattr(self, "_is_param", False)))

    @property
    def _state(self) -> dict[str, Any]:
        """Its state besides its arrays, in numbers. Gaps between rows are not kept: a file could
        name any, and decoding takes memory for them.
        """
        whole = self.without_gaps()
        options = {name: getattr(whole, name) for name in _FLAGS}
        parts, shape = [list(part) for part in self.parts], list(self.shape)
        return {"parts": parts, "shape": shape, **options, "fast": FAST_VERSION}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            if func is functional.linear and (y := _linear_now(*args, **kwargs or {})) is not None:
                return y
            if (special := FUNCTIONS.get(func)) is not None:
                return special(*args, **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


@cache
def _names(kinds: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"_{name}{at}" for at, kind in enumerate(kinds) for name in ARRAYS[kind])


def _wrapper(
    shape: Sequence[int],
    flipped: bool,
    spread: tuple[int, ...] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> CompressedTensor:
    made: CompressedTensor = Tensor._make_wrapper_subclass(
        CompressedTensor,
        tuple(shape),
        strides=contiguous_strides(shape, flipped) if flipped and spread is None else spread,
        dtype=dtype,
        device=device,
        requires_grad=False,
        storage_size=0,
    )
    # Code that bypasses this class for memory, as DLPack in C does, gets an error and no address.
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def _linear_now(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """The product at once, if that is possible; otherwise None.

    Multiplies by only one weight. This function cannot know whether other weights will get the same
    x, and PyTorch's version counter does not show all changes of x (`x.data`, NumPy, graphs).
    """
    if not is_at_once(x, weight, bias):
        return None
    return _ops.linear(x, weight._arrays, weight.flat_parts, bias, weight.exact)


def is_at_once(x: Any, weight: Any, bias: Any) -> bool:
    """Whether nothing watches or changes operators, so that a product may be called as a function.
    This saves about 25 us of dispatch per call, and a decode step has some hundred calls.
    """
    if type(weight) is not CompressedTensor or type(x) not in PLAIN or not weight.is_matrix:
        return False
    if bias is not None and type(bias) not in PLAIN:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or weight._place != x.device
        or x.is_meta
        or torch.is_autocast_enabled(x.device.type)
    )


def _kept(parts: Sequence[Numbers]) -> list[tuple[int, str]]:
    """Part number and name of each array that cannot be made from others."""
    return [(at, label) for at, part in enumerate(parts) for label in ARRAYS[part[0]][:KEPT]]


def with_tables(arrays: Sequence[Tensor], parts: Sequence[Numbers]) -> list[Tensor]:
    """Adds the decode tables that their device needs to arrays."""
    whole: list[Tensor] = []
    for (at, label), array in zip(_kept(parts), arrays, strict=True):
        whole.append(array)
        if label == "plane":
            whole.append(torch.ops.df11.table_of_kind(whole[-4], parts[at][0]))
    return whole


def rebuild(
    arrays: list[Tensor], state: dict[str, Any], is_parameter: bool = False
) -> CompressedTensor:
    """Makes a tensor from its kept arrays and state, on the device of the arrays. `torch.load`
    calls it with a file's data, so everything is checked; decoding checks the contents of arrays.
    Raises `TypeError` and `ValueError` for data of no tensor, or in the fast layout of another
    release; `ParameterError` if lengths of arrays contradict their part.
    """
    state = _checked(state)
    version = state.pop("fast", 1)
    if any(Part(*part).is_fast for part in state["parts"]) and version != FAST_VERSION:
        raise ValueError(
            "this tensor was kept in the fast layout of another release; load the container again, "
            "and keep it as stored (residence='stored') for other releases"
        )
    check_kept(arrays, state["parts"])
    made = CompressedTensor(with_tables(arrays, state["parts"]), **state)
    check_lengths(made._arrays, made.flat_parts)
    made._is_param = bool(is_parameter)
    return made


def _checked(state: Any) -> dict[str, Any]:
    """Checks the state of a tensor, without its arrays, and returns it."""
    if not isinstance(state, dict) or not _NEEDED <= {*state} <= {*_NEEDED, *_FLAGS, "fast"}:
        raise ValueError("no compressed tensor was kept with these names")
    parts, shape = (_listed(state[name]) for name in ("parts", "shape"))
    if any(len(_listed(part)) != PART for part in parts):
        raise ValueError(f"parts are {PART} numbers each")
    if any(type(number) is not int for number in chain(*parts, shape)):
        raise TypeError("sides and parts of a compressed tensor are whole numbers")
    flags = (state.get(name, True) for name in _FLAGS)
    if min(shape, default=0) < 0 or any(type(flag) is not bool for flag in flags):
        raise ValueError(f"no compressed tensor of shape {shape} has this state: {state}")
    return dict(state)


def _listed(value: Any) -> Any:
    if type(value) not in (list, tuple):
        raise TypeError(f"a list was kept, and not a {type(value).__name__}")
    return value


torch.serialization.add_safe_globals([rebuild])
