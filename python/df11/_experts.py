"""Operators of mixtures of experts, whose matrices are stacked in one compressed tensor.

The operators' schemas are stable; arrays and parts are those of `_ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import _ops
from ._matrices import dtype_of_parts, grouped, lay_out, raw_stream, shape_of, windows
from ._ops import Arrays, Numbers, library, operator
from ._order import Framework, Kernels, order_of

#: Rows of x for each expert, on average, up to which kernels multiply instead of decoding. They are
#: faster up to 256 (benches/record/2026-11-28-experts-h200.md), but each new number of rows is
#: measured, with 5.5 bytes per weight of all experts, and prompts have many.
MAX_ROUTED = 32
_BF16 = torch.bfloat16


def _places_of(
    x: Tensor, offsets: Tensor, rows: Tensor | None, arrays: Arrays, parts: Numbers, experts: int
) -> Tensor:
    height, columns = shape_of(parts)
    numbers = [offsets] if rows is None else [offsets, rows]
    wrong = None
    if x.dim() != 2 or x.shape[1] != columns or x.dtype != _BF16:
        wrong = f"x is BF16 [rows, {columns}], and not {x.dtype} of shape {tuple(x.shape)}"
    elif experts < 1 or height % experts:
        wrong = f"{height} rows are not {experts} experts of equal size"
    elif offsets.dtype != torch.int32 or tuple(offsets.shape) != (experts + 1,):
        shape = tuple(offsets.shape)
        wrong = f"offsets are int32 [{experts + 1}], and not {offsets.dtype} {shape}"
    elif rows is not None and (rows.dtype != torch.int32 or rows.dim() != 1):
        wrong = "rows are int32 and of one dimension"
    elif any(one.device != x.device for one in numbers):
        wrong = f"offsets and rows lie on {x.device}, as x does"
    if wrong is not None:
        raise RuntimeError(wrong)
    return x.new_empty((x.shape[0] if rows is None else rows.shape[0], height // experts))


@operator(
    "grouped_linear(Tensor x, Tensor offsets, Tensor? rows, Tensor[] arrays, int[] parts,"
    " int experts) -> Tensor",
    _places_of,
)
def grouped_linear(
    x: Tensor, offsets: Tensor, rows: Tensor | None, arrays: Arrays, parts: Numbers, experts: int
) -> Tensor:
    """Products with the experts of a mixture, whose matrices are equal shares of the rows.

    Row i of the result [P, R / E] is `x[rows[i]]` (or `x[i]`) times the matrix of expert e,
    transposed, for each i in `offsets[e]..offsets[e + 1]`; rows from `offsets[E]` on hold anything.
    `offsets` (int32, E + 1, ascending, from 0 to at most P) and `rows` (int32, P) lie on the device
    of x. Raises the errors of `linear`; `IndexError` for other offsets, and for rows that x lacks.

    If the experts are one matrix in the fast layout, this takes one launch, which reads offsets and
    rows on the GPU. Otherwise the host waits for the stream to copy the offsets, and experts with
    rows are decoded, 60 MB at a time.
    """
    y = _places_of(x, offsets, rows, arrays, parts, experts)
    if not len(y):
        return y
    kernels = grouped(arrays, parts, experts, x.device.index) if x.is_cuda else None
    if kernels is None:
        ends = _ends(offsets, len(y))
        routed = x if rows is None else x[_checked_rows(rows[: ends[-1]], len(x))]
        for places, some, w in _each_routed(ends, arrays, parts, y.shape[1], x):
            y[places] = products(routed[places], w.mT, some)
            del w
        return y
    flat = x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
    offsets, rows = offsets.contiguous(), None if rows is None else rows.contiguous()
    given = (flat.data_ptr(), flat.shape[0], flat.stride(0))
    routes = (offsets.data_ptr(), y.shape[0], 0 if rows is None else rows.data_ptr())
    kernels.multiply(*given, *routes, y.data_ptr(), y.stride(0), raw_stream(x.device.index))
    return y


def _ends(offsets: Tensor, most: int) -> list[int]:
    """Copies offsets of places to the host, and waits. Raises `IndexError` if they do not ascend
    from 0, or exceed the number of places.
    """
    ends: list[int] = offsets.tolist()
    if ends[0] != 0 or ends[-1] > most or any(a > b for a, b in pairwise(ends)):
        raise IndexError(f"offsets ascend from 0 to at most {most} places, and not as {ends[:9]}")
    return ends


def _checked_rows(rows: Tensor, most: int) -> Tensor:
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < most:
        raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {most}")
    return rows


def _routed(ends: list[int]) -> list[tuple[int, int, int]]:
    """Experts with places, and the begin and end of these."""
    return [(e, a, b) for e, (a, b) in enumerate(pairwise(ends)) if a < b]


def decode_experts(
    arrays: Arrays, parts: Numbers, height: int, routed: list[tuple[int, int, int]], on: Tensor
) -> Tensor:
    ranges = ((e * height, (e + 1) * height) for e, _, _ in routed)
    held = list(windows(arrays, parts, ranges))
    some = [array for mine, _ in held for array in mine]
    dense = _ops.decode(some, [number for _, cut in held for number in cut], on.device)
    return dense.view(len(routed), height, -1)


def _each_routed(
    ends: list[int], arrays: Arrays, parts: Numbers, height: int, on: Tensor
) -> Iterator[tuple[slice, list[int], Tensor]]:
    """Decodes the experts with places, as many at once as `TEMPORARY_BYTES` hold. Yields their
    places, the end of each expert's places among these, and their matrices. The caller must drop
    the matrices before it takes the next ones.
    """
    routed = _routed(ends)
    expert_bytes = dtype_of_parts(parts).itemsize * height * shape_of(parts)[1]
    most = max(1, _ops.TEMPORARY_BYTES // expert_bytes)
    for at in range(0, len(routed), most):
        some = routed[at : at + most]
        places = slice(some[0][1], some[-1][2])
        inner = [end - places.start for _, _, end in some]
        yield places, inner, decode_experts(arrays, parts, height, some, on)


def products(x: Tensor, w: Tensor, ends: list[int]) -> Tensor:
    """Rows of x up to each end times a matrix of w, [E, K, N]."""
    if x.is_cuda and w.shape[1] % 8 == 0 and w.shape[2] % 8 == 0:
        offs = torch.tensor(ends, dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x.contiguous(), w, offs=offs)
    lengths = [b - a for a, b in pairwise([0, *ends])]
    return torch.cat([a @ b for a, b in zip(torch.split(x, lengths), w, strict=True)])


@operator(
    # Private, because it has no gradients, which callers of `torch._grouped_mm` may need.
    "_grouped_mm(Tensor x, Tensor offs, Tensor[] arrays, int[] parts, int[] shape,"
    " bool transposed, bool flipped) -> Tensor",
    lambda x, offs, arrays, parts, shape, *_: x.new_empty((x.shape[0], shape[2])),
)
def grouped_mm(
    x: Tensor,
    offs: Tensor,
    arrays: Arrays,
    parts: Numbers,
    shape: Numbers,
    transposed: bool,
    flipped: bool,
) -> Tensor:
    """Gives the bits of PyTorch's `grouped_mm` of x and a compressed w of this shape, [E, K, N].
    Kernels multiply if x has few rows and they add in PyTorch's order. Otherwise the function waits
    for the GPU to name the experts with rows, and decodes only these; while a CUDA graph is
    captured, it decodes all. Raises the errors of `grouped_linear`.
    """
    height, rest = divmod(shape_of(parts)[0], max(1, *shape[:1]))
    if len(shape) != 3 or prod(shape) != prod(shape_of(parts)) or rest:
        raise RuntimeError(f"{list(shape)} is not the shape of experts in {shape_of(parts)}")
    if offs.dtype != torch.int32 or tuple(offs.shape) != (shape[0],) or offs.device != x.device:
        raise RuntimeError(f"offs are int32 [{shape[0]}] on {x.device}")
    if transposed and flipped:
        product = _grouped_in_order(x, offs, arrays, parts, shape[0])
        if product is not None:
            return product
    routed = [(e, 0, 0) for e in range(shape[0])]
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        routed = _routed(_ends(functional.pad(offs, (1, 0)), len(x))) or routed[:1]
        if len(routed) < shape[0]:
            offs = offs.new_tensor([end for _, _, end in routed])
    dense = decode_experts(arrays, parts, height, routed, x)
    w = lay_out(dense.flatten(0, 1), (len(routed), *shape[1:]), transposed, flipped)
    return torch._grouped_mm(x, w, offs=offs).contiguous()


def _grouped_in_order(
    x: Tensor, offs: Tensor, arrays: Arrays, parts: Numbers, experts: int
) -> Tensor | None:
    """`torch._grouped_mm` by kernels that add in its order. None if that order is not known, or x
    has too many rows for them.
    """
    if not x.is_cuda or x.dtype != _BF16 or offs.dtype != torch.int32:
        return None
    if not 0 < x.shape[0] <= MAX_ROUTED * experts:
        return None
    if grouped(arrays, parts, experts, x.device.index) is None:
        return None
    framework, kernels = _of_experts(experts)
    address = arrays[0].data_ptr()
    if order_of(x, shape_of(parts)[0], None, framework, kernels, address).splits != 1:
        return None
    offsets = torch.cat([offs.new_zeros(1), offs])
    return grouped_linear(x, offsets, None, arrays, parts, experts)


@cache
def _of_experts(experts: int) -> tuple[Framework, Kernels]:
    """PyTorch's product with this many experts, and the kernels' in one chain."""

    def offsets(x: Tensor) -> Tensor:
        """The first expert gets half of the rows, the next one none, the others equal shares."""
        rest = torch.arange(experts, device=x.device) * (x.shape[0] - x.shape[0] // 2)
        ends = x.shape[0] // 2 + rest // max(1, experts - 1)
        ends[-1], ends[1:2] = x.shape[0], ends[0]
        return torch.cat([ends.new_zeros(1), ends]).int()

    def multiply(x: Tensor, w: Tensor, _: Tensor | None) -> Tensor:
        w = w.view(experts, -1, w.shape[1])
        return torch._grouped_mm(x, w.mT, offs=offsets(x)[1:].contiguous())

    def kernels(x: Tensor, packed: Any, _: Tensor | None, splits: int) -> Tensor | None:
        arrays, (part,) = packed
        if splits != 1 or grouped(arrays, part, experts, x.device.index) is None:
            return None
        return grouped_linear(x, offsets(x), None, arrays, part, experts)

    return Framework(f"torch._grouped_mm of {experts}", multiply, experts=experts), kernels


def _grouped_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, offsets, rows, arrays, ctx.parts, ctx.experts = inputs
    ctx.save_for_backward(offsets, rows, *arrays)
    ctx.x_rows = x.shape[0]


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, rows, *arrays = ctx.saved_tensors
    to_x = None
    if ctx.needs_input_grad[0]:
        to_x = torch.ops.df11.grouped_linear_backward(
            grad, offsets, rows, arrays, ctx.parts, ctx.experts, ctx.x_rows
        )
    return to_x, None, None, [None] * len(arrays), None, None


@operator(
    "grouped_linear_backward(Tensor grad, Tensor offsets, Tensor? rows, Tensor[] arrays,"
    " int[] parts, int experts, int x_rows) -> Tensor",
    lambda grad, _, __, ___, parts, ____, x_rows: grad.new_empty((x_rows, shape_of(parts)[1])),
)
def grouped_linear_backward(
    grad: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    arrays: Arrays,
    parts: Numbers,
    experts: int,
    x_rows: int,
) -> Tensor:
    """The gradient of `grouped_linear` to x, which has `x_rows` rows. Waits for the GPU."""
    to_x = grad.new_zeros((x_rows, shape_of(parts)[1]))
    y = _places_of(to_x, offsets, rows, arrays, parts, experts)
    if (grad.dtype, grad.shape, grad.device) != (y.dtype, y.shape, y.device):
        raise RuntimeError(f"a gradient is {y.dtype} {tuple(y.shape)}, not {tuple(grad.shape)}")
    ends = _ends(offsets, len(y))
    if rows is not None:
        rows = _checked_rows(rows[: ends[-1]], x_rows)
    for places, some, w in _each_routed(ends, arrays, parts, y.shape[1], grad):
        if rows is None:
            to_x[places] = products(grad[places], w, some)
        else:
            to_x.index_add_(0, rows[places], products(grad[places], w, some))
        del w
    return to_x


torch.library.register_autograd(
    "df11::grouped_linear", _grouped_backward, setup_context=_grouped_setup, lib=library
)
