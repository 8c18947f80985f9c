"""A container as a dictionary of tensors on the CPU: compressed ones in its mapping, or decoded.

Loaders treat these tensors like any others. Renaming, stacking, cutting, transposing and tying them
gives windows of the same arrays. Nothing is read until a tensor is decoded or moved to a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import _native
from ._arrays import known_dtype_of, memory_at
from ._dispatch import dense
from ._matrices import TILE_COLUMNS, TILE_ROWS, Part, parts_with_arrays
from ._tensor import CompressedTensor, rebuild

#: Threads that cut tiles out; each copies at the speed of memory.
_THREADS = 8
#: Extra bytes that a GPU may need for a tile of a cut. It copies from a multiple of 16 bytes on,
#: and a cut tile may begin at another distance from it than in the whole tensor.
_MOVED_BYTES = 16

Arrays = list[Tensor]
Range = tuple[int, int]


class Area(NamedTuple):
    name: str
    rows: Range
    columns: Range
    is_whole: bool
    #: As of a part.
    kind: int


class Tensors(Mapping[str, Tensor]):
    """The tensors of a container by their names."""

    def __init__(self, container: Any) -> None:
        self.container = container
        #: Names requested since a caller last cleared the list, in order.
        self.requested: list[str] = []
        #: All names ever requested, and the names whose shapes were requested.
        self.taken: set[str] = set()
        self.used: set[str] = set()
        self._found: dict[str, CompressedTensor] = {}
        self._names: dict[int, str] = {}
        places = sorted(container.mappings)
        self._mapped = [(start, memory_at(start, size, container)) for start, size in places]

    def __len__(self) -> int:
        return len(self.container)

    def __iter__(self) -> Iterator[str]:
        return iter(self.container)

    @torch.inference_mode(False)  # whose tensors could not be used outside of it
    def __getitem__(self, name: str) -> Tensor:
        """A compressed tensor, or one of decoded values that the caller owns. Raises `TypeError` if
        PyTorch does not know its dtype, `CorruptError` for values that are decoded.
        """
        self.requested.append(name)
        self.taken.add(name)
        self.used.add(name)
        stored = self.container[name]
        if (kept := self._compressed(name, stored)) is not None:
            return kept
        known_dtype_of(name, stored.dtype)
        decoded: Tensor = stored.torch()
        return decoded

    def stored(self, name: str) -> Any:
        return self.container[name]

    def _compressed(self, name: str, stored: Any) -> CompressedTensor | None:
        """The tensor as it is stored; None if it is not in tiles of 32 rows."""
        tiles = stored.tiles if name not in self._found and len(stored.shape) > 1 else None
        if tiles is not None:
            arrays = self._arrays(tiles)
            self._names[arrays[0].data_ptr()] = name
            part = Part.whole(tiles.kind, tiles.rows, tiles.columns, tiles.staged_bytes)
            self._found[name] = value = CompressedTensor(arrays, [part], stored.shape)
            if self.container.is_coming:
                value._wait = partial(self.container.check_tiles, [name])
        return self._found.get(name)

    def _arrays(self, tiles: Any) -> Arrays:
        arrays = []
        for address, length in tiles.places:
            at = bisect_right(self._mapped, address, key=lambda pair: pair[0])
            start, memory = self._mapped[at - 1]
            arrays.append(_frombuffer(memory, address - start, length))
        return [*arrays, _frombuffer(b"")]

    def names(self, value: CompressedTensor) -> list[str]:
        return [
            self._names[mine[0].data_ptr()]
            for _, mine in parts_with_arrays(value._places, value.flat_parts)
        ]

    def moved(self, name: str, copy: CompressedTensor) -> None:
        """Records a copy of a whole tensor, on this or another device, for `names`."""
        self._names[copy._arrays[0].data_ptr()] = name

    def describe(self, value: CompressedTensor) -> tuple[list[str], dict[str, Any]]:
        """Names and numbers from which `rebuild` makes the tensor again."""
        return self.names(value), value._state

    def rebuild(self, description: tuple[list[str], dict[str, Any]]) -> CompressedTensor:
        """Makes the tensor that `describe` described. Reads and checks its arrays."""
        names, numbers = description
        self.check(names)
        arrays = [array for name in names for array in self[name]._arrays[:4]]  # type: ignore[attr-defined]
        return rebuild(arrays, numbers)

    def check(self, names: Iterable[str]) -> None:
        """Checks the arrays of tensors in tiles, once. Raises CorruptError."""
        self.container.check_tiles(list(names))

    def enclosing_tiles(
        self, values: Sequence[CompressedTensor]
    ) -> tuple[list[list[tuple[Area, Part]]], list[Area]]:
        """The tiles that enclose the parts of each tensor, with the window of each part in them;
        and all of these areas. A tensor's parts share all its tiles if they need them all.
        Otherwise each window has its own tiles, which `cut` cuts out.
        """
        wanted = [
            [
                (_enclosing(name, part), part)
                for name, part in zip(self.names(v), v.parts, strict=True)
            ]
            for v in values
        ]
        areas: Counter[str] = Counter()
        sizes = {}
        for tiles, part in {(tiles, (p.rows, p.columns)) for mine in wanted for tiles, p in mine}:
            areas[tiles.name] += _area(tiles.rows, tiles.columns)
            sizes[tiles.name] = part
        whole = {name for name, (rows, columns) in sizes.items() if areas[name] >= rows * columns}
        windows = [[_within(tiles, part, whole) for tiles, part in mine] for mine in wanted]
        return windows, list(dict.fromkeys(tiles for mine in windows for tiles, _ in mine))

    def cut(self, some: Iterable[Area]) -> dict[Area, Arrays]:
        """Copies the arrays of tiles that are not whole tensors to new memory. Checks them."""

        def arrays(tiles: Area) -> Arrays:
            _, copies = self.container[tiles.name].tiles.cut(tiles.rows, tiles.columns)
            return [_frombuffer(array) for array in copies]

        own = [tiles for tiles in some if not tiles.is_whole]
        with ThreadPoolExecutor(_THREADS) as threads:
            return dict(zip(own, threads.map(arrays, own), strict=True))

    def on_host(self, some: Sequence[Area]) -> dict[Area, Arrays]:
        """The four arrays of tiles in the mapping, or cut out. Checks them."""
        self.check(tiles.name for tiles in some if tiles.is_whole)
        whole = {tiles: self._found[tiles.name]._arrays[:4] for tiles in some if tiles.is_whole}
        return {**self.cut(some), **whole}

    def lengths(self, some: Sequence[Area]) -> list[Sequence[int]]:
        """The lengths of the four arrays of tiles. Reads records of those that are cut out."""
        with ThreadPoolExecutor(_THREADS) as threads:
            return [*threads.map(self._lengths, some)]

    def _lengths(self, tiles: Area) -> Sequence[int]:
        if not tiles.is_whole:
            stored: _native.Tiles = self.container[tiles.name].tiles
            return stored.cut_lengths(tiles.rows, tiles.columns)
        return [array.numel() for array in self._found[tiles.name]._places[:4]]


def _frombuffer(buffer: Any, offset: int = 0, count: int = -1) -> Tensor:
    if not (count if count >= 0 else len(buffer)):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=offset)


def _enclosing(name: str, part: Part) -> Area:
    rows = _rounded_out((part.row_begin, part.row_end), TILE_ROWS, part.rows)
    columns = _rounded_out((part.column_begin, part.column_end), TILE_COLUMNS, part.columns)
    is_whole = (rows, columns) == ((0, part.rows), (0, part.columns))
    return Area(name, rows, columns, is_whole, part.kind)


def _rounded_out(inner: Range, step: int, end: int) -> Range:
    """The smallest range around another one that begins and ends on multiples, or at the end."""
    return inner[0] // step * step, min(-(-inner[1] // step) * step, end)


def _within(tiles: Area, part: Part, whole: set[str]) -> tuple[Area, Part]:
    if tiles.name in whole:
        whole_area = Area(tiles.name, (0, part.rows), (0, part.columns), True, part.kind)
        return whole_area, part
    (top, bottom), (left, right) = tiles.rows, tiles.columns
    rows = part.row_begin - top, part.row_end - top
    columns = part.column_begin - left, part.column_end - left
    staged = part.staged_bytes + _MOVED_BYTES
    return tiles, Part(part.kind, bottom - top, right - left, staged, *rows, *columns)


def _area(rows: Range, columns: Range) -> int:
    return (rows[1] - rows[0]) * (columns[1] - columns[0])


def share(part: Part) -> float:
    tiles = _enclosing("", part)
    return _area(tiles.rows, tiles.columns) / (part.rows * part.columns)


class Lineage:
    """Finds the container's tensors from which a library made a value by renaming, cutting and
    stacking.
    """

    def __init__(self, tensors: Tensors, values: dict[str, Tensor]) -> None:
        self._tensors = tensors
        #: Kept, so that no other tensor gets their memory.
        self._values = values
        plain = (pair for pair in values.items() if not isinstance(pair[1], CompressedTensor))
        self._names = {value.untyped_storage().data_ptr(): name for name, value in plain}

    def of(self, value: Tensor) -> list[str]:
        """The names of these tensors; none for ordinary values in memory of their own."""
        if isinstance(value, CompressedTensor):
            return list(dict.fromkeys(self._tensors.names(value)))
        name = self._names.get(value.untyped_storage().data_ptr())
        return [] if name is None else [name]


class Unplaced:
    """A tensor that stays in place when a loader moves it, until all tensors are known."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return with_dtype(self.value, dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Unplaced:
        given = tree_map_only(Unplaced, lambda each: each.value, (args, kwargs or {}))
        return cls(func(*given[0], **given[1]))


class Kept(Unplaced):
    """A tensor that also keeps its dtype when the loader converts it."""

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.value


class Sliceable:
    """A tensor for loaders that take slices of safetensors files. `reader` is `Tensors` or has its
    methods, and `wrap` wraps the values that the loader gets.
    """

    def __init__(self, reader: Any, name: str, wrap: Callable[[Tensor], Any] = Unplaced) -> None:
        self.reader, self.name, self.wrap = reader, name, wrap

    def get_shape(self) -> list[int]:
        self.reader.used.add(self.name)
        return list(self.reader.stored(self.name).shape)

    def get_dtype(self) -> str:
        return str(self.reader.stored(self.name).dtype)

    def __getitem__(self, key: Any) -> Any:
        value = self.reader[self.name]
        return self.wrap(value if key is ... else value[key])


def with_dtype(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or dtype == value.dtype:
        return value
    return dense(value).to(dtype)
