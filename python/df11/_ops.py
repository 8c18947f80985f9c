"""Operators of compressed matrices, for PyTorch and for engines that call them themselves.

Their schemas are stable. `arrays` and `parts` describe matrices with the same
columns, stacked row after row into one of R rows and C columns (see `_matrices`). Arrays lie on the
device of the work, or in pinned memory of the host, from which a GPU reads them over the bus.

Kernels bound every access, whatever the arrays contain. The CPU raises errors of arrays and indices
at once: `CorruptError`, `IndexError`. A GPU raises the same when the kernel is done: at the next
operator, at the end of `generate`, or by `_watch.check_gpus`, which waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import _native
from ._matrices import (
    PART,
    STORED,
    TABLE_BYTES,
    TILE_ROWS,
    Function,
    check,
    grouped,
    lay_out,
    matrices,
    parts_with_arrays,
    product,
    raw_stream,
    shape_of,
    windows,
)
from ._order import LINEAR, Framework, Kernels, order_of, prepare, summary
from ._workspaces import workspace

#: The most bytes decoded at once if no caller needs a whole matrix. With the rounding of PyTorch's
#: allocator and workspaces of cuBLAS, a product takes at most 64 MB.
TEMPORARY_BYTES = 60_000_000
#: Rows of x for each expert, on average, up to which kernels multiply instead of decoding.
MOST_ROUTED = 8
_BF16 = torch.bfloat16

Arrays = Sequence[Tensor]
Biases = Sequence[Tensor | None]
Numbers = Sequence[int]

library = torch.library.Library("df11", "DEF")  # type: ignore[no-untyped-call]


def operator(
    schema: str, fake: Callable[..., Any], to: torch.library.Library = library
) -> Callable[[Function], Function]:
    """Makes a function an operator; `fake` gives its results without reading arrays."""
    name, _, arguments = schema.partition("(")
    types = [argument.split()[0] for argument in arguments.split(", ")]

    def checked(*given: Any) -> Any:
        _check_memory_alike(given)
        if "Tensor[]" in types:
            at = types.index("Tensor[]")
            check(*given[at : at + 2])
        return fake(*given)

    def register(function: Function) -> Function:
        # One function for both devices: arrays of a GPU's work may be on the host.
        # `torch.library.custom_op` took 10 to 22 us per call on the CPU, and these take 4 to 5.
        to.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            to.impl(name, function, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{to.ns}::{name}", checked, lib=to)
        return function

    return register


def _check_memory_alike(given: Iterable[Any]) -> None:
    """Checks that either all given tensors have memory, or none. Tensors without memory give
    results without memory, never memory with unknown contents. Raises `ValueError` for a mixture.
    """
    kinds = set()
    for each in given:
        several = each if isinstance(each, list | tuple) else [each]
        kinds |= {one.is_meta for one in several if isinstance(one, Tensor)}
        if isinstance(each, torch.device):
            kinds.add(each.type == "meta")
    if len(kinds) > 1:
        raise ValueError("some tensors are on the meta device, and others have memory; move all")


#: Larger matrices are read in place, so a copy never takes more memory than this.
MOST_BROUGHT_BYTES = 256 << 20


def _copied_to_gpu(arrays: Arrays, parts: Numbers, index: int) -> Arrays:
    """Copies arrays in pinned memory to the GPU for kernels. The others stay in place.

    A copy moves 52 GB/s over the bus; kernels that read host memory move 37. The copy runs in the
    order of the stream, and its memory is free again after the kernels that read it. So nothing is
    shared, and a CUDA graph captures it like any other copy. Two things are not copied: codebooks,
    because kernels read the table made from them, and a matrix of which these parts have less than
    half, such as one expert of many.
    """
    if arrays and arrays[0].is_cuda:
        return arrays
    check(arrays, parts)
    copies: list[Tensor] = []
    for part, mine in parts_with_arrays(arrays, parts):
        some = part.height * part.width * 2 < part.rows * part.columns
        large = sum(array.nbytes for array in mine) > MOST_BROUGHT_BYTES
        if some or large or part.residence != STORED:
            copies += mine
        else:
            copies.append(mine[0])
            copies += (array.to(f"cuda:{index}", non_blocking=True) for array in mine[1:])
    return copies


def _decode_fake(arrays: Arrays, parts: Numbers, device: torch.device) -> Tensor:
    return torch.empty(shape_of(parts), dtype=_BF16, device=device)


@operator("decode(Tensor[] arrays, int[] parts, Device device) -> Tensor", _decode_fake)
def decode(arrays: Arrays, parts: Numbers, device: torch.device) -> Tensor:
    """All rows of all parts, row after row: a dense BF16 matrix [R, C] on `device`.

    Takes one launch on a GPU's current stream for each residence among up to eight parts, and
    neither waits nor synchronises. The CPU decodes 1 to 3 GB/s per core, on all cores.
    Raises the errors of `_matrices.check`; `ParameterError` if lengths of arrays contradict their
    part; `CorruptError`.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weights are decoded on NVIDIA GPUs and on the CPU, and not on {device}")
    index = device.index if device.type == "cuda" else None
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", index := torch.cuda.current_device())
    if index is not None:
        arrays = _copied_to_gpu(arrays, parts, index)
    native = matrices(arrays, parts, index)
    out = _decode_fake(arrays, parts, device)
    places = torch.split(out, [matrix.rows for matrix in native]) if len(native) > 1 else (out,)
    if index is None:
        for matrix, place in zip(native, places, strict=True):
            matrix.decode(place.data_ptr())
        return out
    # Kernels write whole words; rows of few columns end between them.
    aside = [torch.empty_like(place) if place.data_ptr() % 16 else place for place in places]
    _native.decode_all(native, [mine.data_ptr() for mine in aside], raw_stream(index))
    for place, mine in zip(places, aside, strict=True):
        if mine is not place:
            place.copy_(mine)
    return out


def linear(x: Tensor, arrays: Arrays, parts: Numbers, bias: Tensor | None, exact: bool) -> Tensor:
    """y = x Wᵀ (+ bias), for x of [..., C]: [..., R].

    With `exact`, and always on the CPU, y has the bits of `torch.nn.functional.linear` with the
    BF16 weights. If x has few rows and that function's order of additions is known (`_order`),
    kernels multiply in this order without decoding to memory. Otherwise W is decoded (2 R C bytes,
    freed after the product) and PyTorch multiplies. Without `exact` kernels multiply in their
    fastest order; for many rows of x at most 60 MB at a time are decoded before each product, and x
    and bias must be BF16. Gradients flow to x and bias; the backward pass decodes W anew. Raises
    the errors of `decode`; `RuntimeError` for x or bias of a wrong shape or dtype.
    """
    return _multiply(x, arrays, parts, (len(parts) // PART,), (bias,), exact)[0]


library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor[] arrays, int[] parts, Tensor? bias, bool exact) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _linear(x: Tensor, arrays: Arrays, parts: Numbers, bias: Tensor | None, exact: bool) -> Any:
    if bias is not None and not bias.numel():
        raise RuntimeError("a bias has an element for each row of the weight; None is none")
    biases = [] if bias is None else [bias]
    return torch.ops.df11.linears(x, arrays, parts, [len(parts) // PART], biases, exact)[0]


library.impl("linear", _linear, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _products(x: Tensor, parts: Numbers, counts: Numbers, biases: Biases) -> list[Tensor]:
    """Memory for the products. Raises `RuntimeError` if x or a bias does not match."""
    heights = _heights(parts, counts)
    for height, bias in zip(heights, biases, strict=True):
        if fault := _fault(x, parts, height, bias):
            raise RuntimeError(fault)
    return [x.new_empty((*x.shape[:-1], height)) for height in heights]


@operator(
    "linears(Tensor x, Tensor[] arrays, int[] parts, int[] counts, Tensor[] biases, bool exact)"
    " -> Tensor[]",
    lambda x, _, parts, counts, biases, __: _products(x, parts, counts, _added(biases, counts)),
)
def linears(
    x: Tensor, arrays: Arrays, parts: Numbers, counts: Numbers, biases: Arrays, exact: bool
) -> list[Tensor]:
    """Like `linear`, for several weights that share x: weight i has the next `counts[i]` parts.
    `biases` has one tensor for each weight, empty if the weight has no bias; or it is empty itself.
    One launch multiplies by all weights if kernels take that many rows of x; otherwise each is
    multiplied separately. The bits are those of `linear` with each.
    """
    return _multiply(x, arrays, parts, counts, _added(biases, counts), exact)


def _added(biases: Arrays, counts: Numbers) -> Biases:
    if biases and len(biases) != len(counts):
        raise ValueError(f"{len(biases)} biases for {len(counts)} weights")
    return [bias if bias.numel() else None for bias in biases] or [None] * len(counts)


def _heights(parts: Numbers, counts: Numbers) -> list[int]:
    if len(counts) == 1 and PART * counts[0] == len(parts):
        return [shape_of(parts)[0]]
    if min(counts, default=0) < 1 or PART * sum(counts) != len(parts):
        raise ValueError(f"counts {list(counts)} for {len(parts) // PART} parts")
    ends = [PART * end for end in accumulate(counts, initial=0)]
    return [shape_of(parts[begin:end])[0] for begin, end in pairwise(ends)]


def _multiply(
    x: Tensor, arrays: Arrays, parts: Numbers, counts: Numbers, biases: Biases, exact: bool
) -> list[Tensor]:
    """Multiplies by kernels if they can; otherwise decodes each weight first."""
    as_pytorch = exact or not x.is_cuda
    given = (x, arrays, parts, counts, biases)
    products = in_order(*given, LINEAR) if as_pytorch else _in_fastest_order(*given)
    if products is not None:
        return products
    if len(counts) > 1:
        ranges = pairwise(accumulate(_heights(parts, counts), initial=0))
        return [
            _multiply(x, mine, flat, (len(flat) // PART,), (bias,), exact)[0]
            for (mine, flat), bias in zip(windows(arrays, parts, ranges), biases, strict=True)
        ]
    if as_pytorch:
        return [functional.linear(x, decode(arrays, parts, x.device), biases[0])]
    return [_multiply_decoded(x, _copied_to_gpu(arrays, parts, x.device.index), parts, biases[0])]


def _in_fastest_order(
    x: Tensor, arrays: Arrays, parts: Numbers, counts: Numbers, biases: Biases
) -> list[Tensor] | None:
    """Products by kernels in their own order; None if decoding first is faster."""
    index = x.device.index
    kernels = product(arrays, parts, index)
    if kernels is None or _rows_of_x(x) >= kernels.crossover_rows:
        return None
    arrays = _copied_to_gpu(arrays, parts, index)
    kernels = product(arrays, parts, index) or kernels
    return _multiply_in_kernels(kernels, x, parts, counts, biases, [0] * len(counts))


def in_order(
    x: Tensor,
    arrays: Arrays,
    parts: Numbers,
    counts: Numbers,
    biases: Biases,
    framework: Framework,
    padding: int = 0,
) -> list[Tensor] | None:
    """Products with the bits of a framework's, by kernels that add in its order. None if that order
    is not known, no kernel keeps it, or decoding first is faster. `padding`: rows of zeros at the
    end of the framework's W, which y lacks.
    """
    if not x.is_cuda:
        return None
    heights = _heights(parts, counts)
    if any(map(partial(_fault, x, parts), heights, biases)):
        return None
    index, rows = x.device.index, _rows_of_x(x)
    kernels = product(arrays, parts, index)
    if kernels is None or not 0 < rows < kernels.crossover_rows:
        return None
    orders = [
        order_of(x, height + padding, bias, framework, _trial)
        for height, bias in zip(heights, biases, strict=True)
    ]
    splits = [order.splits for order in orders]
    if not all(splits) or not kernels.keeps_order(rows, _of_parts(splits, counts)):
        return None
    inner = [
        None if order.is_bias_apart else bias for order, bias in zip(orders, biases, strict=True)
    ]
    arrays = _copied_to_gpu(arrays, parts, index)
    if not arrays[0].is_cuda:
        kernels = product(arrays, parts, index) or kernels
    outputs = _multiply_in_kernels(kernels, x, parts, counts, inner, splits)
    return [
        y + bias if bias is not None and order.is_bias_apart else y
        for y, bias, order in zip(outputs, biases, orders, strict=True)
    ]


def _trial(x: Tensor, packed: Any, bias: Tensor | None, splits: int) -> Tensor | None:
    """A product in a given order, for comparison; None if no kernel keeps the order."""
    arrays, parts = packed
    kernels = product(arrays, flat := [number for part in parts for number in part], x.device.index)
    if kernels is None or not kernels.keeps_order(_rows_of_x(x), [splits]):
        return None
    return _multiply_in_kernels(kernels, x, flat, (1,), (bias,), [splits])[0]


def orders(
    arrays: Arrays,
    parts: Numbers,
    x_rows: Iterable[int] = (),
    *,
    with_bias: bool = False,
    framework: Framework = LINEAR,
    padding: int = 0,
) -> dict[int, bool]:
    """For each number of rows of x, whether the order of a framework's products with a weight on a
    GPU is known. Numbers: these (or one) up to the kernels' limit, and all requested before.
    Measures unknown orders, as `_order.prepare` says. Empty if no kernel multiplies by the weight.
    """
    device = next(array.device for array in reversed(arrays) if array.is_cuda)
    rows, columns = shape_of(parts)
    shape, kernels = (rows + padding, columns), product(arrays, parts, device.index)
    if kernels is None:
        return {}
    counts = [count for count in x_rows if count < kernels.crossover_rows]
    if counts or not summary(device.index, *shape):
        prepare(device, shape, counts or [1], with_bias, framework, _trial)
    return summary(device.index, *shape)


def _rows_of_x(x: Tensor) -> int:
    return prod(x.shape[:-1])


def _of_parts(splits: Sequence[int], counts: Numbers) -> list[int]:
    return [mine for mine, count in zip(splits, counts, strict=True) for _ in range(count)]


def _multiply_in_kernels(
    kernels: _native.Linear,
    x: Tensor,
    parts: Numbers,
    counts: Numbers,
    biases: Biases,
    splits: Sequence[int],
) -> list[Tensor]:
    """Products in these numbers of splits, one for each weight; 0: the fastest order."""
    index, columns = x.device.index, parts[7] - parts[6]
    outputs = _products(x, parts, counts, biases)
    flat = x if x.dim() == 2 else x.reshape(-1, columns)
    rows = flat.shape[0]
    if flat.stride(1) != 1 or (rows > 1 and flat.stride(0) < columns):
        flat = flat.contiguous()
    if rows == 0:
        return outputs
    stream, size = raw_stream(index), kernels.workspace_bytes(rows)
    memory = workspace(index, stream, size) if size else None
    address = 0 if memory is None else memory.data_ptr()
    places = _places(parts, counts, outputs, biases, splits)
    pitch = flat.stride(0) if rows > 1 else columns
    kernels.multiply(flat.data_ptr(), rows, pitch, places, address, stream)
    return outputs


def _fault(x: Tensor, parts: Numbers, rows: int, bias: Tensor | None) -> str | None:
    """The reason why kernels cannot multiply these."""
    columns = parts[7] - parts[6]
    if x.dtype != _BF16 or x.dim() == 0 or x.shape[-1] != columns:
        return (
            f"x is {x.dtype} of shape {tuple(x.shape)}, and the weight BF16 of {columns} columns; "
            "cast x, or use exact mode, which multiplies as PyTorch does"
        )
    if bias is None or (
        (bias.dtype, bias.device, tuple(bias.shape)) == (_BF16, x.device, (rows,))
        and bias.is_contiguous()
    ):
        return None
    return (
        f"a bias is contiguous BF16 of {rows} elements on {x.device}, and not {bias.dtype} of "
        f"shape {tuple(bias.shape)} on {bias.device}"
    )


def _places(
    parts: Numbers, counts: Numbers, outputs: Arrays, biases: Biases, splits: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """For each part, the address of its columns of y, the pitch of y in elements, the address of
    its bias, and the splits of its columns.
    """
    places, at = [], 0
    for count, y, bias, mine in zip(counts, outputs, biases, splits, strict=True):
        out, add = y.data_ptr(), bias.data_ptr() if bias is not None else 0
        for _ in range(count):
            places.append((out, y.shape[-1], add, mine))
            step = 2 * (parts[at + 5] - parts[at + 4])
            out, add, at = out + step, add + step if add else 0, at + PART
    return places


def _multiply_decoded(x: Tensor, arrays: Arrays, parts: Numbers, bias: Tensor | None) -> Tensor:
    """Decodes before multiplying, some rows at a time, into columns of the output."""
    (y,) = _products(x, parts, (len(parts) // PART,), (bias,))
    height, columns = shape_of(parts)
    x = x.reshape(-1, columns)
    most = max(TILE_ROWS, TEMPORARY_BYTES // (2 * columns) // TILE_ROWS * TILE_ROWS)
    ranges = [(begin, min(begin + most, height)) for begin in range(0, height, most)]
    for (begin, end), mine in zip(ranges, windows(arrays, parts, ranges), strict=True):
        out = y.view(-1, height)[:, begin:end]
        # The decoded rows get no name, so their memory is free before the next rows.
        if bias is None:
            torch.mm(x, decode(*mine, x.device).t(), out=out)
        else:
            torch.addmm(bias[begin:end], x, decode(*mine, x.device).t(), out=out)
    return y


def _linears_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, arrays, ctx.parts, counts, biases, _ = inputs
    ctx.save_for_backward(*arrays)
    ctx.shape, ctx.heights = x.shape, _heights(ctx.parts, counts)
    ctx.has_bias = [bias.numel() > 0 for bias in biases]


def _linears_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    arrays, ends = ctx.saved_tensors, accumulate(ctx.heights, initial=0)
    to_x: Tensor | None = None
    of_each = windows(arrays, ctx.parts, pairwise(ends))
    for mine, height, grad in zip(of_each, ctx.heights, grads, strict=True):
        if grad is not None and ctx.needs_input_grad[0]:
            more = grad.reshape(-1, height) @ torch.ops.df11.decode(*mine, grad.device)
            to_x = more if to_x is None else to_x + more
    to_x = to_x.view(ctx.shape) if to_x is not None else None
    to_biases = [
        grad.reshape(-1, grad.shape[-1]).sum(0) if has and grad is not None else None
        for grad, has in zip(grads, ctx.has_bias, strict=False)
    ]
    return to_x, [None] * len(arrays), None, None, to_biases, None


torch.library.register_autograd(
    "df11::linears", _linears_backward, setup_context=_linears_setup, lib=library
)


def _check_indices(indices: Tensor) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices are int32 or int64, and not {indices.dtype}")


def _rows_of(indices: Tensor, arrays: Arrays, parts: Numbers) -> Tensor:
    _check_indices(indices)
    return indices.new_empty((*indices.shape, shape_of(parts)[1]), dtype=_BF16)


@operator("embedding(Tensor indices, Tensor[] arrays, int[] parts) -> Tensor", _rows_of)
def embedding(indices: Tensor, arrays: Arrays, parts: Numbers) -> Tensor:
    """Rows by their numbers: [..., C] for indices of shape [...], int32 or int64. Decodes the tiles
    that hold these rows, on a GPU once for each index. Parts begin and end on multiples of 32 rows
    and 256 columns of their matrix, or at its end. Raises the errors of `decode`; `TypeError` for
    other indices; `IndexError` for a row that does not exist.
    """
    _check_indices(indices)
    some, back = indices, None
    if not indices.is_cuda:
        some, back = torch.unique(indices, return_inverse=True)
    out = _rows_of(some, arrays, parts)
    if out.numel():
        _gather_all(some.reshape(-1).contiguous(), arrays, parts, out.view(-1, out.shape[-1]))
    else:
        check(arrays, parts)
    return out if back is None else out[back]


def _gather_all(indices: Tensor, arrays: Arrays, parts: Numbers, out: Tensor) -> None:
    """Rows of stacked parts. Each part gathers all indices, and its own rows replace the others."""
    index = indices.device.index if indices.is_cuda else None
    stream = raw_stream(index) if index is not None else 0
    native = matrices(arrays, parts, index)
    first, last = 0, len(native) - 1
    for at, matrix in enumerate(native):
        local = mine = indices - first if first else indices
        if last:
            # An index outside of all parts is outside of the first or last one, which report it.
            mine = local.clamp(0 if at else None, None if at == last else matrix.rows - 1)
        rows = out if at == 0 else torch.empty_like(out)
        wide = indices.dtype == torch.int64
        matrix.gather(mine.data_ptr(), mine.numel(), wide, rows.data_ptr(), stream)
        if at:
            torch.where((local >= 0)[:, None], rows, out, out=out)
        first += matrix.rows


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

    Experts in the fast layout, in one matrix, take one launch, which reads offsets and rows on the
    GPU. Otherwise offsets are copied to the host, which waits for the stream, and experts with rows
    are decoded, 60 MB at a time.
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


def _decode_experts(
    arrays: Arrays, parts: Numbers, height: int, routed: list[tuple[int, int, int]], on: Tensor
) -> Tensor:
    ranges = ((e * height, (e + 1) * height) for e, _, _ in routed)
    held = list(windows(arrays, parts, ranges))
    some = [array for mine, _ in held for array in mine]
    dense = decode(some, [number for _, cut in held for number in cut], on.device)
    return dense.view(len(routed), height, -1)


def _each_routed(
    ends: list[int], arrays: Arrays, parts: Numbers, height: int, on: Tensor
) -> Iterator[tuple[slice, list[int], Tensor]]:
    """Decodes the experts with places, as many at once as `TEMPORARY_BYTES` hold. Yields their
    places, the end of each expert's places among these, and their matrices. The caller must drop
    the matrices before it takes the next ones.
    """
    routed = _routed(ends)
    most = max(1, TEMPORARY_BYTES // (2 * height * shape_of(parts)[1]))
    for at in range(0, len(routed), most):
        some = routed[at : at + most]
        places = slice(some[0][1], some[-1][2])
        inner = [end - places.start for _, _, end in some]
        yield places, inner, _decode_experts(arrays, parts, height, some, on)


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
    """The bits of PyTorch's `grouped_mm` of x and a compressed w of this shape, [E, K, N]. Kernels
    multiply if x has few rows and they add in its order. Otherwise it waits for the GPU to name the
    experts with rows, and decodes these alone; while a CUDA graph is captured, it decodes all.
    Raises the errors of `grouped_linear`.
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
    dense = _decode_experts(arrays, parts, height, routed, x)
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
    if not 0 < x.shape[0] <= MOST_ROUTED * experts:
        return None
    if grouped(arrays, parts, experts, x.device.index) is None:
        return None
    framework, kernels = _of_experts(experts)
    if order_of(x, shape_of(parts)[0], None, framework, kernels).splits != 1:
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

    return Framework(f"torch._grouped_mm of {experts}", multiply), kernels


def _table_fake(codebook: Tensor) -> Tensor:
    return codebook.new_empty(TABLE_BYTES if codebook.device.type == "cuda" else 0)


@operator("table(Tensor codebook) -> Tensor", _table_fake)
def table(codebook: Tensor) -> Tensor:
    """The decode table of a matrix as stored: 16 KiB on the codebook's GPU; empty on the CPU. Waits
    for the GPU's current stream.
    """
    if codebook.dtype != torch.uint8 or codebook.dim() != 1 or not codebook.is_contiguous():
        raise TypeError("a codebook is a contiguous uint8 tensor of one dimension")
    made = _table_fake(codebook)
    if codebook.is_cuda:
        torch.cuda.current_stream(codebook.device).synchronize()
        place = (codebook.data_ptr(), codebook.nbytes, made.data_ptr())
        _native.build_tables(codebook.device.index, [place])
    return made


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
