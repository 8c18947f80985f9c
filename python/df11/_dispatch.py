"""Operators of PyTorch on compressed tensors.

Views of rows or columns, and transposed views, are compressed tensors of the same arrays. Products
and look-ups call the operators of `_ops`. All other operators work on decoded weights, and then a
view is a copy. Operators that would write to a compressed tensor are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import _experts  # noqa: F401, which registers operators that are called here
from ._matrices import (
    View,
    contiguous_strides,
    lay_out,
    parts_of,
    spread_of,
    view_of,
    windows,
)
from ._ops import TEMPORARY_BYTES

REMEDY = (
    "load the model in BF16 to change its weights, take a decoded copy with .decode(), or merge an "
    "adapter by df11.merge_adapter, or in diffusers by fuse_lora(safe_fusing=True)"
)
aten = torch.ops.aten
Handler = Callable[..., Any]
Value = TypeVar("Value")
_HANDLERS: dict[Any, Handler] = {}


class Compressed(Tensor):
    """Base of `_tensor.CompressedTensor`; operators on it are dispatched here."""


def is_compressed(value: Any) -> bool:
    return isinstance(value, Compressed)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.is_view and torch.is_inference_mode_enabled():
        # PyTorch gives a view the version of its base, but inference tensors have no version.
        with torch.inference_mode(False):
            return _run(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _HANDLERS and (done := _HANDLERS[func](*args, **kwargs)) is not NotImplemented:
        return done
    if func._schema.is_mutable:
        _refuse_writes(func, args, kwargs)
    # Inference mode passes whole functions that PyTorch otherwise decomposes first.
    if (done := func.decompose(*args, **kwargs)) is not NotImplemented:
        return done
    if args and is_compressed(args[0]):
        if func.is_view and (done := _viewed(func, *args, **kwargs)) is not NotImplemented:
            return done
        if func._opname.endswith("_like") or func._opname.startswith("new_"):
            return _ordinary_like(func, *args, **kwargs)
    return func(*tree_map(dense, args), **tree_map(dense, kwargs))


def dense(value: Value) -> Value:
    """The decoded weights of a compressed tensor; any other value itself."""
    given: Any = value
    decoded: Value = given.decode() if is_compressed(given) else given
    return decoded


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        if any(is_compressed(value) for value in values):
            refuse_writing(str(func))


def refuse_writing(what: str) -> None:
    raise RuntimeError(f"{what} would change a compressed tensor, which is read only; {REMEDY}")


def _handles(*funcs: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


@_handles(aten.clone.default)
def _clone(self: Any, *, memory_format: Any = None) -> Any:
    if memory_format is torch.contiguous_format:
        return self.like(flipped=False, spread=None)
    # An alias: nothing can write to the arrays of either.
    return self.without_gaps() if memory_format in (None, torch.preserve_format) else NotImplemented


@_handles(aten._to_copy.default)
def _to_copy(self: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, self.dtype):
        warnings.warn(
            "a compressed weight is converted to another dtype, which decodes it: the result is an "
            "ordinary tensor, with all of its memory",
            stacklevel=2,
        )
        return NotImplemented
    device = torch.device(self.device if device is None else device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    self = self.without_gaps()
    if device == self.device:
        return self
    if device.type not in ("cpu", "cuda", "meta"):
        return NotImplemented
    if device.type == "cpu" and any(part.is_fast for part in self.parts):
        raise RuntimeError(
            "a matrix in the fast layout can only be on a GPU; load it as stored "
            "(residence='stored') to move it to the host, or decode it first: .decode().cpu()"
        )
    some = {id(array): array for array in self._kept}  # each once
    non_blocking = bool(options.get("non_blocking"))
    moved = {key: array.to(device, non_blocking=non_blocking) for key, array in some.items()}
    return self._with_kept([moved[id(array)] for array in self._kept])


@_handles(aten._pin_memory.default)
def _pin_memory(self: Any, device: Any = None) -> Any:
    return self.like([array.pin_memory() if array.numel() else array for array in self._arrays])


@_handles(aten.copy_.default)
def _copy(self: Any, source: Any, non_blocking: bool = False) -> Any:
    if not is_compressed(self):
        return NotImplemented
    if not is_compressed(source) or not _is_same(self, source):
        raise RuntimeError(
            "other weights cannot be copied into a compressed tensor, which is read only; "
            "to load compressed ones, use load_state_dict(..., assign=True)"
        )
    return self


@_handles(aten.zero_.default)
def _zero(self: Any) -> Any:
    """Libraries clear loaded rows of padding, which are usually zero already."""
    content = self.decode().flatten().contiguous().view(torch.uint8)
    return NotImplemented if content.any() else self


def _is_same(a: Any, b: Any) -> bool:
    if (a.parts, a.shape, a.transposed, a.flipped) != (b.parts, b.shape, b.transposed, b.flipped):
        return False
    return all(
        mine.data_ptr() == other.data_ptr() or torch.equal(mine, other.to(mine.device))
        for mine, other in zip(a._kept, b._kept, strict=True)
    )


def _ordinary_like(func: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that uses only shapes and returns ordinary tensors."""
    if kwargs.get("device") is None:
        kwargs["device"] = self.device
    meta = torch.device("meta")
    pattern = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=meta)
    return func(pattern, *args, **kwargs)


def _viewed(func: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """One or several views, if rows and columns of the arrays form them."""
    columns = self.matrix_shape[1]
    # Strides describe the decoded tensor. A file may name zero columns.
    if func is aten.as_strided.default or columns < 1:
        return NotImplemented
    held = self.shape, self.stride(), self.transposed, columns, self.dtype
    try:
        result = _views(func, *held, args, *kwargs.items())
    except TypeError:  # lists and symbolic numbers have no hash
        result = _views(func, *held, _plain(args), *_plain(tuple(kwargs.items())))
    if isinstance(result, list):
        return [_cut(self, view) for view in result]
    if result is None and func is aten.slice.Tensor:
        return _rows_within(self, *args, **kwargs)
    return NotImplemented if result is None else _cut(self, result)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, torch.SymInt) else value


@lru_cache(maxsize=1 << 12)
def _views(
    func: Any,
    shape: tuple[int, ...],
    decoded: tuple[int, ...],
    transposed: bool,
    columns: int,
    dtype: torch.dtype,
    args: tuple[Any, ...],
    *kwargs: tuple[str, Any],
) -> View | list[View] | None:
    """Lets PyTorch view a tensor without memory whose elements have the order of the arrays, and
    one with the strides of the decoded tensor.
    """
    strides = contiguous_strides(shape, transposed)
    pattern = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    outer = torch.empty_strided(shape, decoded, dtype=dtype, device="meta")
    try:
        like_pattern = func(pattern, *args, **dict(kwargs))
        like_decoded = func(outer, *args, **dict(kwargs))
    except RuntimeError:  # no such view; decoded weights may have one
        return None
    several = [like_pattern] if isinstance(like_pattern, Tensor) else like_pattern
    laid = [like_decoded] if isinstance(like_decoded, Tensor) else like_decoded
    memory = pattern.untyped_storage()._cdata
    plain = pattern.dtype, False, memory
    if any((one.dtype, one.is_neg(), one.untyped_storage()._cdata) != plain for one in several):
        return None
    found = [view_of(one, columns) for one in several]
    known = [
        view._replace(spread=spread_of(view.shape, one.stride()))
        for view, one in zip(found, laid, strict=True)
        if view is not None
    ]
    if len(known) < len(several):
        return None
    return known[0] if isinstance(like_pattern, Tensor) else known


def _cut(self: Any, view: View) -> Any:
    # If a tensor decodes to other strides than the arrays have, its views do, too.
    flipped = view.transposed != (self.transposed != self.flipped) and len(view.shape) > 1
    options: dict[str, Any] = {"transposed": view.transposed, "flipped": flipped}
    options["spread"] = view.spread
    rows, columns = self.matrix_shape
    if (view.rows, view.columns) == (slice(0, rows), slice(0, columns)):
        return self.like(shape=view.shape, **options)
    ranges = [(view.rows.start, view.rows.stop)]
    ((arrays, flat),) = windows(self._arrays, self.flat_parts, ranges)
    cut = []
    for part in parts_of(flat):
        begin, end = (part.column_begin + side for side in (view.columns.start, view.columns.stop))
        cut.append(part._replace(column_begin=begin, column_end=end))
    return self.like(arrays, cut, view.shape, **options)


def _rows_within(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Some rows of each of several matrices, such as experts: a window of each."""
    dim %= self.dim()
    outer, inner = prod(self.shape[:dim]), prod(self.shape[dim + 1 :])
    columns = self.matrix_shape[1]
    begin, stop, _ = slice(start, end).indices(self.shape[dim])
    if step != 1 or begin >= stop or inner % columns:
        return NotImplemented
    if self.transposed or self.flipped or self.spread is not None:
        return NotImplemented
    whole, one = self.shape[dim] * inner // columns, inner // columns
    ranges = [(at * whole + begin * one, at * whole + stop * one) for at in range(outer)]
    shape = [*self.shape[:dim], stop - begin, *self.shape[dim + 1 :]]
    return _of(self, windows(self._arrays, self.flat_parts, ranges), shape)


def _of(self: Any, some: Iterable[Any], shape: Sequence[int]) -> Any:
    arrays, flat = [], []
    for mine, numbers in some:
        arrays += mine
        flat += numbers
    return self.like(arrays, parts_of(flat), shape, spread=None)


@_handles(aten.stack.default)
def _stack(tensors: Any, dim: int = 0) -> Any:
    first = tensors[0]
    if dim or any(one.shape != first.shape for one in tensors):
        return torch.cat([one.unsqueeze(dim) for one in tensors], dim)
    # Experts arrive like this, so build no view of each.
    return torch.cat(tensors).view(len(tensors), *first.shape)


@_handles(aten.cat.default)
def _cat(tensors: Any, dim: int = 0) -> Any:
    """Rows of all tensors, in turn for each index of the leading dimensions."""
    first = tensors[0]
    dim %= first.dim()

    def kind(one: Any) -> Any:
        sides = one.shape[:dim], one.shape[dim + 1 :], one.matrix_shape[1]
        is_turned = one.transposed or one.flipped
        return sides, one.dtype, one.device, one.exact, one.is_streamed, is_turned

    if not all(is_compressed(one) and kind(one) == kind(first) for one in tensors):
        return NotImplemented
    outer = prod(first.shape[:dim])
    heights = [one.matrix_shape[0] // outer for one in tensors]
    is_rows = all(
        height * outer == one.matrix_shape[0] and height % one.shape[dim] == 0
        for height, one in zip(heights, tensors, strict=True)
    )
    if not is_rows or first.transposed or first.flipped:
        return NotImplemented
    cut = [
        windows(one._arrays, one.flat_parts, [(at * rows, (at + 1) * rows) for at in range(outer)])
        for one, rows in zip(tensors, heights, strict=True)
    ]
    shape = [*first.shape[:dim], sum(one.shape[dim] for one in tensors), *first.shape[dim + 1 :]]
    return _of(first, (window for in_turn in zip(*cut, strict=True) for window in in_turn), shape)


@_handles(aten.index.Tensor)
def _index(self: Any, indices: Any) -> Any:
    chosen, *others = indices
    if not is_compressed(self) or others or chosen is None:
        return NotImplemented
    if chosen.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    return _rows(self, torch.where(chosen < 0, chosen + self.shape[0], chosen))


@_handles(aten.index_select.default)
def _index_select(self: Any, dim: int, indices: Tensor) -> Any:
    return NotImplemented if not is_compressed(self) or dim % self.dim() else _rows(self, indices)


def _rows(self: Any, chosen: Tensor) -> Any:
    outer = self.dim() - 2 if self.transposed or self.flipped else self.dim() - 1
    rows, columns = self.matrix_shape
    height, rest = divmod(rows, self.shape[0])
    if outer < 1 or rest or not all(part.is_aligned for part in self.parts):
        return NotImplemented
    if chosen.device != self.device:
        chosen = chosen.to(self.device)
    shape = (*chosen.shape, *self.shape[1:])
    if height == 1:
        return torch.ops.df11.embedding(chosen, self._arrays, self.flat_parts).view(shape)
    if type(chosen) is Tensor and not chosen.is_cuda:
        return _decoded_once(self, chosen.reshape(-1)).view(shape)
    # Row by row, so the host need not wait for the numbers.
    within = torch.arange(height, device=chosen.device)
    # A number out of range stays out of range, and row numbers do not wrap.
    known = chosen.reshape(-1, 1).long().clamp(-1, self.shape[0])
    rows_of_all = known * height + within
    gathered = torch.ops.df11.embedding(rows_of_all, self._arrays, self.flat_parts)
    return lay_out(gathered.view(-1, columns), shape, self.transposed, self.without_gaps().flipped)


def _decoded_once(self: Any, chosen: Tensor) -> Tensor:
    """Elements of several rows each, by numbers on the host. Decodes each element once."""
    some, back = torch.unique(chosen, return_inverse=True)
    numbers = some.tolist()
    if numbers and not 0 <= numbers[0] <= numbers[-1] < self.shape[0]:
        raise IndexError(f"indices {numbers[0]} to {numbers[-1]} of {self.shape[0]}")
    decoded = [_viewed(aten.select.int, self, 0, number).decode() for number in numbers]
    empty = torch.empty((0, *self.shape[1:]), dtype=self.dtype)
    return (torch.stack(decoded) if decoded else empty)[back]


@_handles(aten.linear.default)
def _linear(x: Any, w: Any, bias: Any = None) -> Any:
    if not (is_compressed(w) and w.is_matrix) or is_compressed(x) or is_compressed(bias):
        return NotImplemented
    return torch.ops.df11.linear(x, w._arrays, w.flat_parts, bias, w.exact)


@_handles(aten.mm.default, aten.matmul.default)
def _matmul(x: Any, w: Any, bias: Any = None) -> Any:
    """Multiplies by the transposed matrix of a linear layer."""
    if is_compressed(x) or x.dim() < 1 or w.dim() != 2:
        return NotImplemented
    if not w.transposed or (w.exact and (w.spread is not None or not w.flipped)):
        return NotImplemented
    return torch.ops.df11.linear(x, w._arrays, w.flat_parts, bias, w.exact)


@_handles(aten.addmm.default)
def _addmm(bias: Any, x: Any, w: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    is_bias = not is_compressed(bias) and tuple(bias.shape) == (w.shape[1],)
    return _matmul(x, w, bias) if is_bias and (beta, alpha) == (1, 1) else NotImplemented


@_handles(aten.bmm.default)
def _bmm(x: Any, w: Any) -> Any:
    if is_compressed(x) or w.exact or w.shape[0] < 2 or x.shape[:1] != w.shape[:1]:
        return NotImplemented
    some = max(1, TEMPORARY_BYTES // (w.dtype.itemsize * w.shape[1] * w.shape[2]))
    out = x.new_empty((x.shape[0], x.shape[1], w.shape[2]))
    for at in range(0, w.shape[0], some):
        torch.bmm(x[at : at + some], w[at : at + some].decode(), out=out[at : at + some])
    return out


@_handles(aten._grouped_mm.default)
def _grouped_mm(x: Any, w: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    plain = offs is not None and bias is None and out_dtype in (None, w.dtype)
    if is_compressed(x) or not plain or x.dim() != 2 or w.dim() != 3 or w.spread is not None:
        return NotImplemented
    if not w.exact and w.transposed and x.is_cuda and w.dtype == torch.bfloat16:
        offsets = torch.cat([offs.new_zeros(1), offs])
        return torch.ops.df11.grouped_linear(x, offsets, None, w._arrays, w.flat_parts, w.shape[0])
    return torch.ops.df11._grouped_mm(
        x, offs, w._arrays, w.flat_parts, list(w.shape), w.transposed, w.flipped
    )


_HANDLERS |= {
    aten.detach.default: lambda self: self.like(),
    aten.alias.default: lambda self: self.like(),
    aten.is_pinned.default: lambda self, device=None: bool(self._arrays[0].is_pinned()),
    aten._unsafe_view.default: partial(_viewed, aten.view.default),
    aten.embedding.default: lambda self, indices, *_, **__: _rows(self, indices),
}
