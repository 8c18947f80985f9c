"""Compressed matrices in tensors: their description, and the native objects for their addresses.

A *matrix* has R rows and C columns of weights, compressed in some arrays (one-dimensional uint8
tensors). Its *kind* is 0 for BF16 as stored, with codebook, records, bits, plane and decode table
(empty on the CPU); 1 for BF16 in the fast layout, with strips and entries; and larger for another
float as stored, with arrays like those of kind 0. A *part* is a window of a matrix, in eight
numbers: kind, R, C, staged bytes, first row, end of rows, first column, end of columns. A flat list
holds the parts one after another, and another list the arrays of their matrices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from . import _native
from ._arrays import known_dtype_of

PART = 8
#: Kinds of BF16 matrices.
STORED, FAST = 0, 1
#: Kinds by which kernels multiply, and whose rows they gather.
MULTIPLIED = STORED, FAST
#: PyTorch's dtype of each kind.
DTYPES = tuple(known_dtype_of("of a kind", name) for name in _native.KINDS)
_KINDS = range(len(DTYPES))
_TILES, _STRIPS = ("codebook", "records", "bits", "plane", "table"), ("strips", "entries")
#: Arrays of a matrix, by kind, in their order.
ARRAYS = tuple(_STRIPS if kind == FAST else _TILES for kind in _KINDS)
#: Number of a matrix's first arrays that cannot be made from others.
KEPT = 4
TABLE_BYTES = 16384
#: Kernels multiply by and gather from windows that begin and end on multiples of these.
TILE_ROWS, TILE_COLUMNS = 32, 256
#: The most entries of a cache here. Entries own nothing and are made again in microseconds.
_MAX = 1 << 15
_ABSENT = object()
#: More than any memory holds. Products of two sides up to it, with all additions, fit 64 bits.
_MAX_WEIGHTS = 1 << 48

Function = TypeVar("Function", bound=Callable[..., Any])


class Part(NamedTuple):
    kind: int
    rows: int
    columns: int
    staged_bytes: int
    row_begin: int
    row_end: int
    column_begin: int
    column_end: int

    @classmethod
    def whole(cls, kind: int, rows: int, columns: int, staged_bytes: int = 0) -> Part:
        return cls(kind, rows, columns, staged_bytes, 0, rows, 0, columns)

    @property
    def is_fast(self) -> bool:
        return self.kind == FAST

    @property
    def height(self) -> int:
        return self.row_end - self.row_begin

    @property
    def width(self) -> int:
        return self.column_end - self.column_begin

    @property
    def is_aligned(self) -> bool:
        """Whether kernels can multiply by it and gather from it. Any window can be decoded."""
        return not (self.row_begin % TILE_ROWS or self.column_begin % TILE_COLUMNS) and (
            (self.row_end % TILE_ROWS == 0 or self.row_end == self.rows)
            and (self.column_end % TILE_COLUMNS == 0 or self.column_end == self.columns)
        )


def parts_of(numbers: Sequence[int]) -> list[Part]:
    return [Part(*numbers[at : at + PART]) for at in range(0, len(numbers), PART)]


def shape_of(parts: Sequence[int]) -> tuple[int, int]:
    if len(parts) == PART:  # the usual case, on the path of every product
        return parts[5] - parts[4], parts[7] - parts[6]
    _check_count(parts)
    heights = (parts[at + 5] - parts[at + 4] for at in range(0, len(parts), PART))
    return sum(heights), parts[7] - parts[6]


def dtype_of_parts(parts: Sequence[int]) -> torch.dtype:
    """The dtype of their weights. Raises `ValueError` for an unknown kind."""
    _check_count(parts)
    if parts[0] not in _KINDS:
        _check_kinds(parts[:1])
    return DTYPES[parts[0]]


def _check_count(parts: Sequence[int]) -> None:
    if not parts or len(parts) % PART:
        raise ValueError(f"parts are {PART} numbers each, and at least one; here are {len(parts)}")


def _check_kinds(kinds: Sequence[Any]) -> None:
    if not kinds or any(kind not in _KINDS for kind in kinds):
        raise ValueError(f"the kind of a part is a number from 0 to {len(DTYPES) - 1}")
    if len(several := {DTYPES[kind] for kind in kinds}) > 1:
        raise ValueError(f"parts of several dtypes: {', '.join(sorted(map(str, several)))}")


def check(arrays: Sequence[Tensor], parts: Sequence[int]) -> None:
    """Checks that this describes a matrix, without reading the arrays. Raises `ValueError` if
    numbers contradict each other or the arrays, `TypeError` for other arrays.
    """
    _check_count(parts)
    _check_kinds(parts[::PART])
    needed = sum(len(ARRAYS[parts[at]]) for at in range(0, len(parts), PART))
    if len(arrays) != needed:
        raise ValueError(f"these parts have {needed} arrays; here are {len(arrays)}")
    for part, _ in parts_with_arrays(arrays, parts):
        if not (0 <= part.row_begin < part.row_end <= part.rows):
            raise ValueError(f"rows {part.row_begin}..{part.row_end} of {part.rows}")
        if not (0 <= part.column_begin < part.column_end <= part.columns):
            raise ValueError(f"columns {part.column_begin}..{part.column_end} of {part.columns}")
        if part.width != parts[7] - parts[6]:
            raise ValueError(f"parts of {parts[7] - parts[6]} and of {part.width} columns")
        if part.rows * part.columns > _MAX_WEIGHTS or not 0 <= part.staged_bytes < 1 << 32:
            raise ValueError(
                f"{part.staged_bytes} staged bytes of {part.rows} x {part.columns} weights"
            )
    _check_arrays(arrays)


def _check_arrays(arrays: Sequence[Any]) -> None:
    for array in arrays:
        if not isinstance(array, Tensor):
            raise TypeError(f"arrays are tensors, and not {type(array).__name__}")
        is_plain = array.layout is torch.strided and array.dim() == 1 and array.is_contiguous()
        if array.dtype != torch.uint8 or not is_plain:
            raise TypeError(
                "arrays are contiguous uint8 tensors of one dimension, and not "
                f"{array.dtype} of shape {tuple(array.shape)}"
            )


def check_kept(arrays: Any, parts: Sequence[Sequence[int]]) -> None:
    """Checks kept arrays, which have no decode tables. Does not check the numbers yet."""
    kinds = [part[0] for part in parts]
    _check_kinds(kinds)
    needed = sum(len(ARRAYS[kind][:KEPT]) for kind in kinds)
    if type(arrays) not in (list, tuple) or len(arrays) != needed:
        raise ValueError(f"these parts are kept as a list of {needed} arrays")
    _check_arrays(arrays)
    if len({array.device for array in arrays}) > 1:
        raise ValueError("the arrays of a compressed tensor lie on one device")


def check_lengths(arrays: Sequence[Tensor], parts: Sequence[int]) -> None:
    """`check`, and checks that the lengths of arrays on any device match their parts. Raises
    `ParameterError` or `ValueError` if they do not.
    """
    check(arrays, parts)
    if any(array.is_meta or type(array) is not Tensor for array in arrays):
        return
    for part, mine in parts_with_arrays(arrays, parts):
        if not part.is_fast:
            matrices(mine, part, mine[0].device.index)
            continue
        strips, entries = mine
        check_memory(mine)
        if strips.nbytes < _native.strips_bytes(part.rows, part.columns) or entries.nbytes % 4:
            raise ValueError(f"{strips.nbytes} bytes of {part.rows} x {part.columns} weights")


def check_memory(arrays: Sequence[Tensor]) -> None:
    """Checks that arrays that passed `check` have the memory that they claim.
    Raises `TypeError` for tensors without memory, `ValueError` if it was freed.
    """
    for array in arrays:
        if type(array) not in (Tensor, torch.nn.Parameter) or array.is_meta:
            raise TypeError(
                f"arrays are ordinary tensors with memory, and not {type(array).__name__} on "
                f"{array.device}"
            )
        if array.untyped_storage().nbytes() < array.storage_offset() + array.nbytes:
            raise ValueError("the memory of an array was freed; load the weights again")


def _cached(make: Function) -> Function:
    """Caches the results of a function of arrays and parts. Keys are addresses, bytes and strides,
    so results must follow from these and own nothing. A full cache is emptied.
    """
    known: dict[Any, Any] = {}

    @wraps(make)
    def cached(arrays: Sequence[Tensor], parts: Sequence[int], *given: int | None) -> Any:
        places = [(array.data_ptr(), array.nbytes, array.stride()) for array in arrays]
        key = (*given, *parts, *places)
        if (value := known.get(key, _ABSENT)) is _ABSENT:
            value = make(arrays, parts, *given)
            if len(known) >= _MAX:
                known.clear()
            known[key] = value
        return value

    cached.known = known  # type: ignore[attr-defined]
    return cast(Function, cached)


@_cached
def matrices(
    arrays: Sequence[Tensor], parts: Sequence[int], index: int | None
) -> list[_native.Matrix]:
    """The native matrices of these parts, for a GPU's index or the CPU (None). Takes about a
    microsecond. Raises the errors of `check`; `ParameterError` if the arrays' lengths contradict a
    part; `ValueError` for arrays that this device cannot read.
    """
    check(arrays, parts)
    check_memory(arrays)
    for array in arrays:
        on_host = array.device.type == "cpu"
        if index is None and not on_host:
            raise ValueError(f"arrays on {array.device} for work on the CPU")
        if index is None or not array.nbytes:
            continue
        if on_host and not array.is_pinned():
            raise ValueError("a GPU reads arrays on the host only if their memory is pinned")
        if not on_host and array.device.index != index:
            raise ValueError(f"arrays on {array.device} for work on GPU {index}")
    return [
        _native.Matrix(index, part, [a.data_ptr() for a in mine], [a.nbytes for a in mine])
        for part, mine in parts_with_arrays(arrays, parts)
    ]


@_cached
def product(arrays: Sequence[Tensor], parts: Sequence[int], index: int) -> _native.Linear | None:
    native = matrices(arrays, parts, index)
    able = _native.fits(index) and all(
        part.kind in MULTIPLIED and part.is_aligned for part, _ in parts_with_arrays(arrays, parts)
    )
    return _native.Linear(native) if able else None


@_cached
def grouped(
    arrays: Sequence[Tensor], parts: Sequence[int], experts: int, index: int
) -> _native.Grouped | None:
    part = Part(*parts[:PART])
    able = len(parts) == PART and part.is_fast and part.width == part.columns
    able = able and part.is_aligned and part.height // experts % TILE_ROWS == 0
    if not (able and _native.fits(index)):
        return None
    return _native.Grouped(matrices(arrays, parts, index)[0], experts)


@lru_cache(maxsize=4096)
def _layout(parts: tuple[int, ...]) -> tuple[list[Part], list[int], list[int]]:
    """Parts, the first row of each among all rows, and its first array."""
    held = parts_of(parts)
    rows = accumulate((part.height for part in held), initial=0)
    firsts = accumulate((len(ARRAYS[part.kind]) for part in held), initial=0)
    return held, [*rows], [*firsts]


def parts_with_arrays(
    arrays: Sequence[Any], parts: Sequence[int]
) -> Iterator[tuple[Part, Sequence[Any]]]:
    held, _, firsts = _layout(tuple(parts))
    for part, (first, end) in zip(held, pairwise(firsts), strict=True):
        yield part, arrays[first:end]


def windows(
    arrays: Sequence[Any], parts: Sequence[int], ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[list[Any], list[int]]]:
    """For each range, arrays and parts that hold rows `begin..end` of the stacked parts. Takes some
    20 us for 256 parts (experts of a mixture), and a microsecond per range.
    """
    held, rows, firsts = _layout(tuple(parts))
    if len(arrays) != firsts[-1]:
        raise ValueError(f"these parts have {firsts[-1]} arrays; here are {len(arrays)}")
    for begin, end in ranges:
        kept: list[Any] = []
        cut: list[int] = []
        at = bisect_right(rows, begin) - 1
        while at < len(held) and rows[at] < end:
            part = held[at]
            low, high = max(begin - rows[at], 0), min(end - rows[at], part.height)
            kept += arrays[firsts[at] : firsts[at + 1]]
            cut += part._replace(row_begin=part.row_begin + low, row_end=part.row_begin + high)
            at += 1
        yield kept, cut


def lay_out(
    dense: Tensor,
    shape: Sequence[int],
    transposed: bool,
    flipped: bool,
    spread: Sequence[int] | None = None,
) -> Tensor:
    if spread is not None:
        held = lay_out(dense, shape, transposed, transposed)
        return dense.new_empty_strided(tuple(shape), tuple(spread)).copy_(held)
    *outer, rows, columns = shape if transposed else (*shape, 0, 0)
    held = dense.view(*outer, columns, rows).mT if transposed else dense.view(tuple(shape))
    if transposed == flipped:
        return held
    return held.mT.contiguous().mT if flipped else held.contiguous()


def raw_stream(index: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(index))


class View(NamedTuple):
    rows: slice
    columns: slice
    shape: torch.Size
    transposed: bool
    #: Its strides if there are gaps between its rows.
    spread: tuple[int, ...] | None = None


def view_of(tensor: Tensor, columns: int) -> View | None:
    """Finds a tensor's elements in a matrix with this many columns; None if they form no part."""
    if not tensor.numel():
        return None
    is_flipped = tensor.dim() > 1 and tensor.stride(-2) < tensor.stride(-1)
    for transposed in (is_flipped, not is_flipped) if tensor.dim() > 1 else (False,):
        held = tensor.mT if transposed else tensor
        sides = [side for side in zip(held.shape, held.stride(), strict=True) if side[0] > 1]
        row, column = divmod(int(tensor.storage_offset()), columns)
        height = width = 1
        while sides and sides[-1][1] == width and width * sides[-1][0] <= columns - column:
            width *= sides.pop()[0]
        while sides and sides[-1][1] == columns * height:
            height *= sides.pop()[0]
        if not sides and not (transposed and width != held.shape[-1]):
            rows = slice(row, row + height)
            return View(rows, slice(column, column + width), tensor.shape, transposed)
    return None


def spread_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides, if there are gaps between the rows that they describe: steps of the last two
    dimensions that are those of neither order.
    """
    for flipped in (False, True) if len(shape) > 1 else (False,):
        steps = zip(shape, strides, contiguous_strides(shape, flipped), strict=True)
        if all(have == dense for side, have, dense in [*steps][-2:] if side > 1):
            return None
    return tuple(strides)


def contiguous_strides(shape: Sequence[int], flipped: bool) -> tuple[int, ...]:
    """Strides of a dense tensor; if `flipped`, with the last two dimensions exchanged."""
    order = list(range(len(shape)))
    if flipped:
        order[-2:] = order[-1], order[-2]
    strides, step = [0] * len(shape), 1
    for at in reversed(order):
        strides[at] = step
        step *= max(shape[at], 1)
    return tuple(strides)
