"""Operators on compressed matrices, for PyTorch and for engines that call them directly.

Their schemas are stable. `arrays` and `parts` describe matrices with the same columns, stacked row
after row into one of R rows and C columns (see `_matrices`). Arrays are on the device that works on
them, or in pinned host memory, from which a GPU reads them over the bus.

Kernels bound every access, whatever the arrays contain. The CPU raises `CorruptError` and
`IndexError` for invalid arrays and indices at once. For a GPU, the same errors are raised after the
kernel: by the next operator, at the end of `generate`, or by `_watch.check_gpus`, which waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from . import _native
from ._ahead import ahead_of
from ._matrices import (
    MULTIPLIED,
    PART,
    STORED,
    TABLE_BYTES,
    TILE_ROWS,
    Function,
    check,
    dtype_of_parts,
    matrices,
    parts_with_arrays,
    product,
    raw_stream,
    shape_of,
    windows,
)
from ._order import LINEAR, Framework, layout_of, layout_of_bias, order_of, prepare, summary
from ._workspaces import workspace

#: The most bytes decoded at once if no caller needs a whole matrix. With the rounding of PyTorch's
#: allocator and workspaces of cuBLAS, a product takes at most 64 MB.
TEMPORARY_BYTES = 60_000_000
_BF16 = torch.bfloat16

Arrays = Sequence[Tensor]
Biases = Sequence[Tensor | None]
Numbers = Sequence[int]


class Multiplication(NamedTuple):
    """How kernels multiply by some weights that share x."""

    kernels: _native.Linear
    parts: Numbers
    #: Parts of each weight, its rows, and the splits of its columns.
    counts: Numbers
    heights: Numbers
    splits: Sequence[int]
    #: Whether a bias is added to its rounded product.
    is_apart: Sequence[bool]


#: Multiplications in a framework's order, by what decides them; empty if no kernel keeps that
#: order, or decoding first is faster. To find one again takes 10 microseconds and more.
_known: dict[tuple[Any, ...], Multiplication | tuple[()]] = {}
_MAX_KNOWN = 1 << 15

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
MAX_BROUGHT_BYTES = 256 << 20


def _copied_to_gpu(arrays: Arrays, parts: Numbers, index: int) -> Arrays:
    """Copies arrays in pinned memory to the GPU for kernels. The others stay in place.

    A copy moves 52 GB/s over the bus; kernels that read host memory move 37 GB/s. The copy runs in
    the order of the stream, and its memory is freed after the kernels that read it. So nothing is
    shared, and a CUDA graph captures it like any other copy. Two things are not copied: codebooks,
    because kernels read the table made from them, and matrices of which these parts have less than
    half, such as one expert of many.
    """
    if arrays and arrays[0].is_cuda:
        return arrays
    check(arrays, parts)
    copies: list[Tensor] = []
    for part, mine in parts_with_arrays(arrays, parts):
        some = part.height * part.width * 2 < part.rows * part.columns
        large = sum(array.nbytes for array in mine) > MAX_BROUGHT_BYTES
        if some or large or part.is_fast:
            copies += mine
        else:
            copies.append(mine[0])
            copies += (array.to(f"cuda:{index}", non_blocking=True) for array in mine[1:])
    return copies


def _decode_fake(arrays: Arrays, parts: Numbers, device: torch.device) -> Tensor:
    return torch.empty(shape_of(parts), dtype=dtype_of_parts(parts), device=device)


@operator("decode(Tensor[] arrays, int[] parts, Device device) -> Tensor", _decode_fake)
def decode(arrays: Arrays, parts: Numbers, device: torch.device) -> Tensor:
    """All rows of all parts, row after row: a dense matrix [R, C] on `device`, of their dtype.

    On a GPU this takes one launch on the current stream for each kind among up to eight parts, and
    neither waits nor synchronises. The CPU decodes 1 to 5 GB/s per core, on all cores. Raises the
    errors of `_matrices.check`; `ParameterError` if lengths of arrays contradict their part;
    `CorruptError`.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weights are decoded on NVIDIA GPUs and on the CPU, and not on {device}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _decode(arrays, parts, device)


def _decode(
    arrays: Arrays,
    parts: Numbers,
    device: torch.device,
    out: Tensor | None = None,
    stream: Any = None,
) -> Tensor:
    """`decode`, into memory [R, C] if there is some, on another stream than the current one."""
    index = device.index if device.type == "cuda" else None
    if stream is not None and (len(parts) > PART or not arrays[0].is_cuda):
        with torch.cuda.stream(stream):
            return _decode(arrays, parts, device, out)
    if index is not None:
        arrays = _copied_to_gpu(arrays, parts, index)
    native = matrices(arrays, parts, index)
    out = _decode_fake(arrays, parts, device) if out is None else out
    places = torch.split(out, [matrix.rows for matrix in native]) if len(native) > 1 else (out,)
    if index is None:
        for matrix, place in zip(native, places, strict=True):
            matrix.decode(place.data_ptr())
        return out
    # Kernels write whole words; rows of few columns end between them.
    aside = [torch.empty_like(place) if place.data_ptr() % 16 else place for place in places]
    to = raw_stream(index) if stream is None else stream.cuda_stream
    _native.decode_all(native, [mine.data_ptr() for mine in aside], to)
    for place, mine in zip(places, aside, strict=True):
        if mine is not place:
            place.copy_(mine)
    return out


def linear(x: Tensor, arrays: Arrays, parts: Numbers, bias: Tensor | None, exact: bool) -> Tensor:
    """y = x Wᵀ (+ bias), for x of [..., C]: [..., R].

    With `exact`, and always on the CPU, y has the bits of `torch.nn.functional.linear` with the
    decoded weights. If that function's order of additions is known (`_order`), and decoding first
    is not faster, kernels multiply in this order without decoding to memory. Otherwise W is decoded
    (to all of its bytes, freed after the product) and PyTorch multiplies; on a GPU's default stream
    the next W is decoded meanwhile (`_ahead`). Without `exact` kernels multiply in their fastest
    order; for many rows of x, and by other floats than BF16, at most 60 MB at a time are decoded
    before each product, and x and bias must have the dtype of the weights. Gradients flow to x and
    bias; the backward pass decodes W anew. Raises the errors of `decode`; `RuntimeError` for x or
    bias of a wrong shape or dtype.
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
    """Allocates memory for the products. Raises `RuntimeError` if x or a bias does not match."""
    heights = _heights(parts, counts)
    _check_products(x, parts, heights, biases)
    return _outputs(x, heights)


def _check_products(x: Tensor, parts: Numbers, heights: Numbers, biases: Biases) -> None:
    for height, bias in zip(heights, biases, strict=True):
        if fault := _fault(x, parts, height, bias):
            raise RuntimeError(fault)


def _outputs(x: Tensor, heights: Numbers) -> list[Tensor]:
    before = x.shape[:-1]
    return [x.new_empty((*before, height)) for height in heights]


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
    """Multiplies with kernels if possible; otherwise decodes each weight first."""
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
        if (ahead := ahead_of(x.device)) is not None:
            return [ahead.linear(x, arrays, parts, biases[0], _decode)]
        return [functional.linear(x, decode(arrays, parts, x.device), biases[0])]
    return [_multiply_decoded(x, _copied_to_gpu(arrays, parts, x.device.index), parts, biases[0])]


def _in_fastest_order(
    x: Tensor, arrays: Arrays, parts: Numbers, counts: Numbers, biases: Biases
) -> list[Tensor] | None:
    """Products by kernels that add in their own order; None if decoding first is faster."""
    index = x.device.index
    kernels = product(arrays, parts, index)
    if kernels is None or _rows_of_x(x) >= kernels.crossover_rows:
        return None
    heights = _heights(parts, counts)
    _check_products(x, parts, heights, biases)
    arrays = _copied_to_gpu(arrays, parts, index)
    kernels = product(arrays, parts, index) or kernels
    return _multiply_in_kernels(x, biases, kernels, parts, counts, heights, [0] * len(counts))


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
    index, key = x.device.index, None
    kernels = product(arrays, parts, index)
    if kernels is not None and x.dtype is _BF16 and arrays[0].is_cuda:
        layouts = tuple(map(layout_of_bias, biases))
        key = (kernels, *layout_of(x), tuple(counts), layouts, framework.name, padding)
        if (known := _known.get(key)) is not None:
            return _multiply_as_known(x, biases, known) if known else None
    heights = _heights(parts, counts)
    if any(map(partial(_fault, x, parts), heights, biases)):
        return None
    rows = _rows_of_x(x)
    if kernels is None or not 0 < rows < kernels.crossover_rows:
        _remember(key, ())
        return None
    address = arrays[0].data_ptr()
    orders = [
        order_of(x, height + padding, bias, framework, _trial, address + at)
        for at, (height, bias) in enumerate(zip(heights, biases, strict=True))
    ]
    splits = [order.splits for order in orders]
    if not all(splits):
        return None
    if not kernels.keeps_order(rows, _of_parts(splits, counts)):
        _remember(key, ())
        return None
    if not arrays[0].is_cuda:
        arrays = _copied_to_gpu(arrays, parts, index)
        kernels = product(arrays, parts, index) or kernels
    is_apart = [order.is_bias_apart for order in orders]
    how = Multiplication(kernels, tuple(parts), tuple(counts), heights, splits, is_apart)
    _remember(key, how)
    return _multiply_as_known(x, biases, how)


def _multiply_as_known(x: Tensor, biases: Biases, how: Multiplication) -> list[Tensor]:
    given = how.kernels, how.parts, how.counts, how.heights, how.splits
    if not any(how.is_apart):
        return _multiply_in_kernels(x, biases, *given)
    apart = list(zip(biases, how.is_apart, strict=True))
    inner = [None if is_after else bias for bias, is_after in apart]
    outputs = _multiply_in_kernels(x, inner, *given)
    return [
        y + bias if bias is not None and is_after else y
        for y, (bias, is_after) in zip(outputs, apart, strict=True)
    ]


def _remember(key: tuple[Any, ...] | None, how: Multiplication | tuple[()]) -> None:
    if key is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = how


def _trial(x: Tensor, packed: Any, bias: Tensor | None, splits: int) -> Tensor | None:
    """A product in a given order, for comparison; None if no kernel keeps the order."""
    arrays, parts = packed
    kernels = product(arrays, flat := [number for part in parts for number in part], x.device.index)
    if kernels is None or not kernels.keeps_order(_rows_of_x(x), [splits]):
        return None
    given = (x, (bias,), kernels, flat, (1,), _heights(flat, (1,)), [splits])
    return _multiply_in_kernels(*given)[0]


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
    GPU is known. Numbers: these (or one) up to the kernels' limit, and all measured before.
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
    return x.shape[:-1].numel()


def _of_parts(splits: Sequence[int], counts: Numbers) -> list[int]:
    return [mine for mine, count in zip(splits, counts, strict=True) for _ in range(count)]


def _multiply_in_kernels(
    x: Tensor,
    biases: Biases,
    kernels: _native.Linear,
    parts: Numbers,
    counts: Numbers,
    heights: Numbers,
    splits: Sequence[int],
) -> list[Tensor]:
    """Multiplies without checking x and biases. `splits`: one number for each weight; 0 is the
    fastest order.
    """
    index, columns = x.device.index, parts[7] - parts[6]
    outputs = _outputs(x, heights)
    rows, pitch = _rows_of_x(x), columns
    if not x.is_contiguous():
        x = x.reshape(-1, columns)
        if x.stride(1) != 1 or (rows > 1 and x.stride(0) < columns):
            x = x.contiguous()
        pitch = x.stride(0) if rows > 1 else columns
    if rows == 0:
        return outputs
    stream, size = raw_stream(index), kernels.workspace_bytes(rows)
    memory = workspace(index, stream, size) if size else None
    address = 0 if memory is None else memory.data_ptr()
    places = _places(parts, counts, outputs, biases, splits)
    kernels.multiply(x.data_ptr(), rows, pitch, places, address, stream)
    return outputs


def _fault(x: Tensor, parts: Numbers, rows: int, bias: Tensor | None) -> str | None:
    """The reason why kernels cannot multiply these."""
    columns, dtype = parts[7] - parts[6], dtype_of_parts(parts)
    if x.dtype != dtype or x.dim() == 0 or x.shape[-1] != columns:
        return (
            f"x is {x.dtype} of shape {tuple(x.shape)}, and the weight {dtype} of {columns} "
            "columns; cast x, or use exact mode, which multiplies as PyTorch does"
        )
    if bias is None or (
        (bias.dtype, bias.device, tuple(bias.shape)) == (dtype, x.device, (rows,))
        and bias.is_contiguous()
    ):
        return None
    return (
        f"a bias is contiguous {dtype} of {rows} elements on {x.device}, and not {bias.dtype} of "
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
    for (begin, end), mine in _slices(arrays, parts):
        out = y.view(-1, height)[:, begin:end]
        # The decoded rows get no name, so their memory is free before the next rows.
        if bias is None:
            torch.mm(x, decode(*mine, x.device).t(), out=out)
        else:
            torch.addmm(bias[begin:end], x, decode(*mine, x.device).t(), out=out)
    return y


def _slices(
    arrays: Arrays, parts: Numbers
) -> Iterator[tuple[tuple[int, int], tuple[list[Tensor], list[int]]]]:
    """Ranges of rows that take at most `TEMPORARY_BYTES` each, with their arrays and parts."""
    height, columns = shape_of(parts)
    most = TEMPORARY_BYTES // (dtype_of_parts(parts).itemsize * columns)
    most = max(TILE_ROWS, most // TILE_ROWS * TILE_ROWS)
    ranges = [(begin, min(begin + most, height)) for begin in range(0, height, most)]
    return zip(ranges, windows(arrays, parts, ranges), strict=True)


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
    return indices.new_empty((*indices.shape, shape_of(parts)[1]), dtype=dtype_of_parts(parts))


@operator("embedding(Tensor indices, Tensor[] arrays, int[] parts) -> Tensor", _rows_of)
def embedding(indices: Tensor, arrays: Arrays, parts: Numbers) -> Tensor:
    """Rows by their numbers: [..., C] for indices of shape [...], int32 or int64. Decodes the tiles
    that hold these rows, on a GPU once for each index. Parts begin and end on multiples of 32 rows
    and 256 columns of their matrix, or at its end. No kernel gathers rows of other floats than
    BF16: a GPU decodes the whole matrix for them, 60 MB at a time. Raises the errors of `decode`;
    `TypeError` for other indices; `IndexError` for a row that does not exist, which on a GPU for
    those floats is an assertion of the device, as in PyTorch.
    """
    _check_indices(indices)
    some, back = indices, None
    if not indices.is_cuda:
        some, back = torch.unique(indices, return_inverse=True)
    out = _rows_of(some, arrays, parts)
    if out.numel() and indices.is_cuda and any(kind not in MULTIPLIED for kind in parts[::PART]):
        gather_decoded(some.reshape(-1), arrays, parts, out.view(-1, out.shape[-1]))
    elif out.numel():
        _gather_all(some.reshape(-1).contiguous(), arrays, parts, out.view(-1, out.shape[-1]))
    else:
        check(arrays, parts)
    return out if back is None else out.view(torch.uint8)[back].view(out.dtype)


def gather_decoded(indices: Tensor, arrays: Arrays, parts: Numbers, out: Tensor) -> None:
    """Gathers rows by their numbers from slices that are decoded in turn. Does not wait."""
    torch._assert_async(((indices >= 0) & (indices < shape_of(parts)[0])).all())
    rows = out.view(torch.uint8).zero_()
    for (begin, end), mine in _slices(arrays, parts):
        is_here = (indices >= begin) & (indices < end)
        local = (indices - begin).clamp(0, end - begin - 1)
        found = decode(*mine, out.device).view(torch.uint8)[local]
        torch.where(is_here[:, None], found, rows, out=rows)


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


def _table_fake(codebook: Tensor, kind: int = STORED) -> Tensor:
    return codebook.new_empty(TABLE_BYTES if codebook.device.type == "cuda" else 0)


@operator("table(Tensor codebook) -> Tensor", _table_fake)
def table(codebook: Tensor) -> Tensor:
    """`table_of_kind` of a BF16 matrix as stored."""
    return table_of_kind(codebook, STORED)


@operator("table_of_kind(Tensor codebook, int kind) -> Tensor", _table_fake)
def table_of_kind(codebook: Tensor, kind: int) -> Tensor:
    """The decode table of a matrix of a kind in tiles: 16 KiB on the codebook's GPU; empty on the
    CPU. Waits for the GPU's current stream.
    """
    if codebook.dtype != torch.uint8 or codebook.dim() != 1 or not codebook.is_contiguous():
        raise TypeError("a codebook is a contiguous uint8 tensor of one dimension")
    made = _table_fake(codebook)
    if codebook.is_cuda:
        torch.cuda.current_stream(codebook.device).synchronize()
        place = (codebook.data_ptr(), codebook.nbytes, made.data_ptr())
        _native.build_tables(codebook.device.index, [place], kind)
    return made
