"""What operators of PyTorch do with compressed tensors.

Views of rows or columns, and those that exchange the last two dimensions, are compressed tensors of
the same arrays. Products and look-ups go to the operators of `_ops`. Everything else is done with
decoded weights; a view is then a copy. What would write to a compressed tensor is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ._matrices import FAST, PART, Part, lay_out, window
from ._ops import TEMPORARY_BYTES
from ._tensor import CompressedTensor, refuse_writing, with_tables

aten = torch.ops.aten
Handler = Callable[..., Any]
_HANDLERS: dict[Any, Handler] = {}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator of which some argument is a compressed tensor."""
    if func.is_view and torch.is_inference_mode_enabled():
        # PyTorch gives a view the version of its base, which tensors of inference mode have not.
        with torch.inference_mode(False):
            return _run(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(func)
    if handler is not None:
        done = handler(*args, **kwargs)
        if done is not NotImplemented:
            return done
    if func._schema.is_mutable:
        _refuse_writes(func, args, kwargs)
    # In inference mode functions come whole that are otherwise taken to pieces before.
    if (done := func.decompose(*args, **kwargs)) is not NotImplemented:
        return done
    return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, CompressedTensor) else value


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(value, CompressedTensor) for value in values):
            refuse_writing(str(func))


def _handles(*funcs: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


# ---- copies ----


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(self: Any) -> Any:
    return self.like()


@_handles(aten.clone.default)
def _clone(self: Any, *, memory_format: Any = None) -> Any:
    if memory_format is torch.contiguous_format:
        return self.like(flipped=False, transposed=self.transposed)
    # An alias: nothing can write to the arrays of either.
    return self.like() if memory_format in (None, torch.preserve_format) else NotImplemented


@_handles(aten._to_copy.default)
def _to_copy(self: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, torch.bfloat16):
        warnings.warn(
            "a compressed weight is converted to another dtype, which decodes it: the result is an "
            "ordinary tensor, with all of its memory",
            stacklevel=2,
        )
        return NotImplemented
    if device is None or device == self.device:
        return self.like()
    return _moved(self, torch.device(device), bool(options.get("non_blocking")))


def _moved(self: CompressedTensor, device: torch.device, non_blocking: bool) -> Any:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device == self.device:
        return self.like()
    if device.type not in ("cpu", "cuda", "meta"):
        return NotImplemented
    if device.type == "cpu" and any(part.form == FAST for part in self.parts):
        raise RuntimeError(
            "a matrix in the fast layout can only be on a GPU; load it as stored to move it to the "
            "host, or decode it first: .decode().cpu()"
        )
    moved: dict[int, Tensor] = {}

    def move(array: Tensor) -> Tensor:
        if id(array) not in moved:
            moved[id(array)] = array.to(device, non_blocking=non_blocking)
        return moved[id(array)]

    kept = [move(array) for array in self.kept]
    return self.like(with_tables(kept, self.parts), device=None)


@_handles(aten._pin_memory.default)
def _pin_memory(self: Any, device: Any = None) -> Any:
    return self.like([array.pin_memory() if array.numel() else array for array in self.arrays])


@_handles(aten.is_pinned.default)
def _is_pinned(self: Any, device: Any = None) -> bool:
    return bool(self.arrays[0].is_pinned())


@_handles(aten.copy_.default)
def _copy(self: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(self, CompressedTensor):
        return NotImplemented
    if not isinstance(source, CompressedTensor) or not _is_same(self, source):
        raise RuntimeError(
            "other weights cannot be copied into a compressed tensor, which is read only; "
            "to load compressed ones, use load_state_dict(..., assign=True)"
        )
    return self


def _is_same(a: CompressedTensor, b: CompressedTensor) -> bool:
    """Whether two have the same compressed bytes."""
    if (a.parts, a.shape, a.transposed, a.flipped) != (b.parts, b.shape, b.transposed, b.flipped):
        return False
    return all(
        mine.data_ptr() == other.data_ptr() or torch.equal(mine, other.to(mine.device))
        for mine, other in zip(a.kept, b.kept, strict=True)
    )


def _ordinary_like(func: Any, self: CompressedTensor, *args: Any, **kwargs: Any) -> Any:
    """A function of shapes alone, which gives ordinary tensors."""
    if kwargs.get("device") is None:
        kwargs["device"] = self.device
    meta = torch.device("meta")
    pattern = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=meta)
    return func(pattern, *args, **kwargs)


for _func in (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
):
    _HANDLERS[_func] = partial(_ordinary_like, _func)


# ---- views ----


def _stored_dimension(self: CompressedTensor, dimension: int) -> tuple[int, list[int]]:
    """A dimension as arrays have it, and the shape as they have it."""
    shape = list(self.shape)
    if self.transposed:
        shape[-1], shape[-2] = shape[-2], shape[-1]
        last = self.dim() - 1
        dimension = {last: last - 1, last - 1: last}.get(dimension, dimension)
    return dimension, shape


def _leading(shape: list[int], rows: int) -> int | None:
    """How many of the first dimensions together count rows."""
    return next((at for at in range(len(shape) + 1) if prod(shape[:at]) == rows), None)


def _narrowed(
    self: CompressedTensor, dimension: int, begin: int, end: int, drop: bool = False
) -> Any:
    """Indices `begin..end` of a dimension, if whole rows or columns of the parts are that.

    With `drop` the result is without this dimension, of which one index is left.
    """
    stored, shape = _stored_dimension(self, dimension)
    rows, columns = self.matrix_shape
    leading = _leading(shape, rows)
    sizes = list(self.shape)
    sizes[dimension : dimension + 1] = [] if drop else [end - begin]
    if leading is None or end <= begin:
        return NotImplemented
    if begin == 0 and end == shape[stored]:
        return self.like(shape=sizes)
    if stored < leading and prod(shape[:stored]) == 1:
        height = rows // shape[stored]
        arrays, flat = window(self.arrays, self.flat_parts, begin * height, end * height)
        return self.like(arrays, [flat[at : at + PART] for at in range(0, len(flat), PART)], sizes)
    if stored >= leading and prod(shape[leading:stored]) == 1:
        width = columns // shape[stored]
        cut = [_columns(part, begin * width, end * width) for part in self.parts]
        return self.like(None, cut, sizes)
    return NotImplemented


def _columns(part: Part, begin: int, end: int) -> Part:
    first = part.column_begin
    return part._replace(column_begin=first + begin, column_end=first + end)


@_handles(aten.slice.Tensor)
def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    dim %= self.dim()
    begin, stop, _ = slice(start, end).indices(self.shape[dim])
    return _narrowed(self, dim, begin, stop)


@_handles(aten.split.Tensor)
def _split(self: Any, size: int, dim: int = 0) -> Any:
    whole = self.shape[dim]
    return _split_with_sizes(self, [min(size, whole - at) for at in range(0, whole, size)], dim)


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(self: Any, sizes: list[int], dim: int = 0) -> Any:
    found, begin, dim = [], 0, dim % self.dim()
    for size in sizes:
        found.append(_narrowed(self, dim, begin, begin + size))
        begin += size
    return NotImplemented if any(one is NotImplemented for one in found) else found


@_handles(aten.select.int)
def _select(self: Any, dim: int, index: int) -> Any:
    dim, index = dim % self.dim(), index % self.shape[dim]
    # A row or column of an exchanged matrix has no dimensions left to exchange.
    if dim >= self.dim() - 2 and (self.transposed or self.flipped):
        return NotImplemented
    return _narrowed(self, dim, index, index + 1, drop=True)


@_handles(aten.unbind.int)
def _unbind(self: Any, dim: int = 0) -> Any:
    found = [_select(self, dim, at) for at in range(self.shape[dim])]
    return NotImplemented if any(one is NotImplemented for one in found) else found


def _reshaped(self: CompressedTensor, shape: list[int]) -> Any:
    rows = self.matrix_shape[0]
    if self.transposed or self.flipped:
        able = shape[-2:] == list(self.shape[-2:])
        able = able and prod(shape[:-2]) == prod(self.shape[:-2])
    else:
        able = _leading(shape, rows) is not None
    return self.like(shape=shape) if able else NotImplemented


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(self: Any, shape: Any) -> Any:
    sizes = [int(size) for size in shape]
    if -1 in sizes:
        sizes[sizes.index(-1)] = self.numel() // -prod(sizes)
    return _reshaped(self, sizes) if prod(sizes) == self.numel() else NotImplemented


@_handles(aten.unsqueeze.default)
def _unsqueeze(self: Any, dim: int) -> Any:
    shape = list(self.shape)
    shape.insert(dim % (self.dim() + 1), 1)
    return _reshaped(self, shape)


@_handles(aten.squeeze.dim)
def _squeeze(self: Any, dim: int) -> Any:
    if self.shape[dim] != 1:
        return self.like()
    return _reshaped(self, [size for at, size in enumerate(self.shape) if at != dim % self.dim()])


@_handles(aten.transpose.int)
def _transpose(self: Any, first: int, second: int) -> Any:
    last = self.dim() - 1
    if {first % self.dim(), second % self.dim()} != {last - 1, last}:
        return NotImplemented
    if not self.transposed and _leading(list(self.shape), self.matrix_shape[0]) != last:
        return NotImplemented
    shape = [*self.shape[:-2], self.shape[-1], self.shape[-2]]
    return self.like(shape=shape, transposed=not self.transposed, flipped=not self.flipped)


@_handles(aten.t.default)
def _t(self: Any) -> Any:
    return _transpose(self, 0, 1) if self.dim() == 2 else NotImplemented


@_handles(aten.permute.default)
def _permute(self: Any, dims: list[int]) -> Any:
    order, same = [at % self.dim() for at in dims], list(range(self.dim()))
    if order == same:
        return self.like()
    exchanged = [*same[:-2], same[-1], same[-2]]
    return _transpose(self, -1, -2) if order == exchanged else NotImplemented


@_handles(aten.cat.default)
def _cat(tensors: Any, dim: int = 0) -> Any:
    first = tensors[0]
    if not all(isinstance(one, CompressedTensor) for one in tensors) or dim % first.dim():
        return NotImplemented

    def kind(one: CompressedTensor) -> Any:
        return one.shape[1:], one.matrix_shape[1], one.device, one.exact, one.is_streamed

    if any(one.transposed or one.flipped or kind(one) != kind(first) for one in tensors):
        return NotImplemented
    return first.like(
        [array for one in tensors for array in one.arrays],
        [part for one in tensors for part in one.parts],
        [sum(one.shape[0] for one in tensors), *first.shape[1:]],
    )


# ---- look-ups ----


def _can_gather(self: CompressedTensor) -> bool:
    return not (self.transposed or self.flipped) and all(part.is_aligned for part in self.parts)


@_handles(aten.embedding.default)
def _embedding(self: Any, indices: Tensor, *_: Any, **__: Any) -> Any:
    if not (isinstance(self, CompressedTensor) and self.is_matrix and _can_gather(self)):
        return NotImplemented
    return torch.ops.df11.embedding(indices, self.arrays, self.flat_parts)


@_handles(aten.index.Tensor)
def _index(self: Any, indices: Any) -> Any:
    if not isinstance(self, CompressedTensor) or len(indices) != 1 or indices[0] is None:
        return NotImplemented
    chosen = indices[0]
    if chosen.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    return _rows(self, torch.where(chosen < 0, chosen + self.shape[0], chosen))


@_handles(aten.index_select.default)
def _index_select(self: Any, dim: int, indices: Tensor) -> Any:
    if not isinstance(self, CompressedTensor) or dim % self.dim():
        return NotImplemented
    return _rows(self, indices)


def _rows(self: CompressedTensor, chosen: Tensor) -> Any:
    """Elements of the first dimension by their numbers: only these are decoded."""
    outer = self.dim() - 2 if self.transposed or self.flipped else self.dim() - 1
    rows, columns = self.matrix_shape
    height, rest = divmod(rows, self.shape[0])
    if outer < 1 or rest or not all(part.is_aligned for part in self.parts):
        return NotImplemented
    if chosen.device != self.device:
        chosen = chosen.to(self.device)
    shape = (*chosen.shape, *self.shape[1:])
    if height == 1:
        return torch.ops.df11.embedding(chosen, self.arrays, self.flat_parts).view(shape)
    if type(chosen) is Tensor and not chosen.is_cuda:
        return _blocks(self, chosen.reshape(-1), height).view(shape)
    # Row by row, so that the host need not wait for the numbers.
    within = torch.arange(height, device=chosen.device, dtype=chosen.dtype)
    rows_of_all = chosen.reshape(-1, 1) * height + within
    found = torch.ops.df11.embedding(rows_of_all, self.arrays, self.flat_parts)
    return lay_out(found.view(-1, columns), shape, self.transposed, self.flipped)


def _blocks(self: CompressedTensor, chosen: Tensor, height: int) -> Tensor:
    """Elements of several rows each, by numbers that the host has: each is decoded once."""
    some, back = torch.unique(chosen, return_inverse=True)
    numbers = some.tolist()
    if numbers and not 0 <= numbers[0] <= numbers[-1] < self.shape[0]:
        raise IndexError(f"indices {numbers[0]} to {numbers[-1]} of {self.shape[0]}")
    decoded = [_select(self, 0, number).decode() for number in numbers]
    empty = torch.empty((0, *self.shape[1:]), dtype=self.dtype)
    return (torch.stack(decoded) if decoded else empty)[back]


# ---- products ----


def _weight(self: Any) -> bool:
    """Whether it is the matrix of a linear layer, as the right side of a product has it."""
    return (
        isinstance(self, CompressedTensor)
        and self.dim() == 2
        and self.transposed
        and (self.flipped or not self.exact)
    )


def _product(x: Tensor, w: CompressedTensor, bias: Tensor | None) -> Any:
    return torch.ops.df11.linear(x, w.arrays, w.flat_parts, bias, w.exact)


@_handles(aten.linear.default)
def _linear(x: Any, w: Any, bias: Any = None) -> Any:
    able = isinstance(w, CompressedTensor) and w.is_matrix
    if not able or isinstance(x, CompressedTensor) or isinstance(bias, CompressedTensor):
        return NotImplemented
    return _product(x, w, bias)


@_handles(aten.mm.default, aten.matmul.default)
def _matmul(x: Any, w: Any) -> Any:
    if isinstance(x, CompressedTensor) or not _weight(w) or x.dim() < 1:
        return NotImplemented
    return _product(x, w, None)


@_handles(aten.addmm.default)
def _addmm(bias: Any, x: Any, w: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if isinstance(x, CompressedTensor) or not _weight(w) or (beta, alpha) != (1, 1):
        return NotImplemented
    if isinstance(bias, CompressedTensor) or tuple(bias.shape) != (w.shape[1],):
        return NotImplemented
    return _product(x, w, bias)


@_handles(aten.bmm.default)
def _bmm(x: Any, w: Any) -> Any:
    if isinstance(x, CompressedTensor) or w.exact or w.shape[0] < 2:
        return NotImplemented
    some = max(1, TEMPORARY_BYTES // (2 * w.shape[1] * w.shape[2]))
    out = x.new_empty((x.shape[0], x.shape[1], w.shape[2]))
    for at in range(0, w.shape[0], some):
        torch.bmm(x[at : at + some], w[at : at + some].decode(), out=out[at : at + some])
    return out


@_handles(aten._grouped_mm.default)
def _grouped_mm(x: Any, w: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    plain = offs is not None and bias is None and out_dtype in (None, torch.bfloat16)
    if isinstance(x, CompressedTensor) or not plain or x.dim() != 2 or w.dim() != 3:
        return NotImplemented
    if not w.exact and w.transposed and x.is_cuda:
        offsets = torch.cat([offs.new_zeros(1), offs])
        return torch.ops.df11.grouped_linear(x, offsets, None, w.arrays, w.flat_parts, w.shape[0])
    return torch.ops.df11._grouped_mm(
        x, offs, w.arrays, w.flat_parts, list(w.shape), w.transposed, w.flipped
    )
