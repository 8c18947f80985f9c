"""A container as a dictionary of tensors on the CPU: compressed ones in its mapping, or decoded.

Loaders take these as any others: they rename, stack, cut, transpose and tie them, which gives
windows of the same arrays. Nothing is read before a tensor is decoded or brought to a device.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ._arrays import known_dtype_of, memory_at
from ._errors import damaged, unfit
from ._matrices import STORED, TILE_COLUMNS, TILE_ROWS, Part, pieces
from ._native import TemporaryFolder
from ._tensor import CompressedTensor, rebuild

#: Threads that cut tiles out; each copies at the speed of memory.
_THREADS = 8
#: Bytes that a GPU may need more for a tile of a cut: it copies from multiples of 16 bytes on, and
#: tiles begin elsewhere between them than in the whole tensor.
_MOVED_BYTES = 16

Arrays = list[Tensor]
Range = tuple[int, int]


class Area(NamedTuple):
    name: str
    rows: Range
    columns: Range
    is_whole: bool


class Tensors(Mapping[str, Tensor]):
    """The tensors of a container by their names."""

    def __init__(self, container: Any) -> None:
        self.container = container
        #: Names that were asked for since somebody looked, in order.
        self.asked: list[str] = []
        #: Names that were ever asked for, and those of which somebody wanted to know the shape.
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
        """A compressed tensor, or one of decoded values that are the caller's own. Raises
        `TypeError` if PyTorch does not know its dtype, `CorruptError` for values that are decoded.
        """
        self.asked.append(name)
        self.taken.add(name)
        self.used.add(name)
        stored = self.container[name]
        if (found := self._compressed(name, stored)) is not None:
            return found
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
            part = Part.whole(STORED, tiles.rows, tiles.columns, tiles.staged_bytes)
            self._found[name] = CompressedTensor(arrays, [part], stored.shape)
        return self._found.get(name)

    def _arrays(self, tiles: Any) -> Arrays:
        found = []
        for address, length in tiles.places:
            at = bisect_right(self._mapped, address, key=lambda pair: pair[0])
            start, memory = self._mapped[at - 1]
            found.append(_frombuffer(memory, address - start, length))
        return [*found, _frombuffer(b"")]

    def names(self, value: CompressedTensor) -> list[str]:
        return [
            self._names[mine[0].data_ptr()] for _, mine in pieces(value._arrays, value.flat_parts)
        ]

    def told(self, value: CompressedTensor) -> tuple[list[str], dict[str, Any]]:
        """Names and numbers that tell a tensor's place in the container, for `again`."""
        return self.names(value), value._told

    def again(self, told: tuple[list[str], dict[str, Any]]) -> CompressedTensor:
        """The tensor of which `told` gave this. Reads and checks its arrays."""
        names, numbers = told
        self.check(names)
        arrays = [array for name in names for array in self[name]._arrays[:4]]  # type: ignore[attr-defined]
        return rebuild(arrays, numbers)

    def check(self, names: Iterable[str]) -> None:
        """Checks the arrays of tensors in tiles, once. Raises CorruptError."""
        self.container.check_tiles(list(names))

    def around(
        self, values: Sequence[CompressedTensor]
    ) -> tuple[list[list[tuple[Area, Part]]], list[Area]]:
        """The tiles of the parts of each tensor, with the windows of these; and all tiles. All
        tiles of a tensor if these parts need them all; else each window has its own, which `cut`
        cuts out.
        """
        wanted = [
            [(_around(name, part), part) for name, part in zip(self.names(v), v.parts, strict=True)]
            for v in values
        ]
        areas: Counter[str] = Counter()
        sizes = {}
        for tiles, part in {(tiles, (p.rows, p.columns)) for mine in wanted for tiles, p in mine}:
            areas[tiles.name] += _area(tiles.rows, tiles.columns)
            sizes[tiles.name] = part
        whole = {name for name, (rows, columns) in sizes.items() if areas[name] >= rows * columns}
        found = [[_within(tiles, part, whole) for tiles, part in mine] for mine in wanted]
        return found, list(dict.fromkeys(tiles for mine in found for tiles, _ in mine))

    def cut(self, some: Iterable[Area]) -> dict[Area, Arrays]:
        """The arrays of tiles that are not whole tensors, in memory of their own. Checks them."""

        def arrays(tiles: Area) -> Arrays:
            _, found = self.container[tiles.name].tiles.cut(tiles.rows, tiles.columns)
            return [_frombuffer(array) for array in found]

        own = [tiles for tiles in some if not tiles.is_whole]
        with ThreadPoolExecutor(_THREADS) as threads:
            return dict(zip(own, threads.map(arrays, own), strict=True))

    def on_host(self, some: Sequence[Area]) -> dict[Area, Arrays]:
        """The four arrays of tiles in the mapping, or cut out. Checks them."""
        self.check(tiles.name for tiles in some if tiles.is_whole)
        whole = {tiles: self._found[tiles.name]._arrays[:4] for tiles in some if tiles.is_whole}
        return {**self.cut(some), **whole}

    def lengths(self, tiles: Area) -> list[int]:
        return [array.numel() for array in self._found[tiles.name]._arrays[:4]]


def _frombuffer(buffer: Any, offset: int = 0, count: int = -1) -> Tensor:
    if not (count if count >= 0 else len(buffer)):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=offset)


def _around(name: str, part: Part) -> Area:
    rows = _rounded_out((part.row_begin, part.row_end), TILE_ROWS, part.rows)
    columns = _rounded_out((part.column_begin, part.column_end), TILE_COLUMNS, part.columns)
    return Area(name, rows, columns, (rows, columns) == ((0, part.rows), (0, part.columns)))


def _rounded_out(inner: Range, step: int, end: int) -> Range:
    """The smallest range around another one that begins and ends on multiples, or at the end."""
    return inner[0] // step * step, min(-(-inner[1] // step) * step, end)


def _within(tiles: Area, part: Part, whole: set[str]) -> tuple[Area, Part]:
    if tiles.name in whole:
        return Area(tiles.name, (0, part.rows), (0, part.columns), True), part
    (top, bottom), (left, right) = tiles.rows, tiles.columns
    rows = part.row_begin - top, part.row_end - top
    columns = part.column_begin - left, part.column_end - left
    staged = part.staged_bytes + _MOVED_BYTES
    return tiles, Part(STORED, bottom - top, right - left, staged, *rows, *columns)


def _area(rows: Range, columns: Range) -> int:
    return (rows[1] - rows[0]) * (columns[1] - columns[0])


def share(part: Part) -> float:
    tiles = _around("", part)
    return _area(tiles.rows, tiles.columns) / (part.rows * part.columns)


class Origins:
    """The tensors of a container that values come from, after a library has renamed, cut and
    stacked these.
    """

    def __init__(self, tensors: Tensors, values: dict[str, Tensor]) -> None:
        self._tensors = tensors
        #: Kept, so that no other tensor gets their memory.
        self._values = values
        plain = (pair for pair in values.items() if not isinstance(pair[1], CompressedTensor))
        self._names = {value.untyped_storage().data_ptr(): name for name, value in plain}

    def of(self, value: Tensor) -> list[str]:
        """Their names; none for ordinary values in memory of their own."""
        if isinstance(value, CompressedTensor):
            return list(dict.fromkeys(self._tensors.names(value)))
        name = self._names.get(value.untyped_storage().data_ptr())
        return [] if name is None else [name]


class Unplaced:
    """A tensor that a loader would move to its device: it stays where it is until all are known."""

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
    """One that also keeps its dtype, whatever the loader makes it."""

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.value


class Sliceable:
    """A tensor for loaders that take slices of safetensors files, of `Tensors` or of what is like
    them. `wrap`: what they get it in.
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


class Handed:
    """A file of PyTorch that stands for tensors: whoever loads it gets these, once. It is there as
    long as this is. `beside` is read too, if there is such a file. Raises `ValueError` if that has
    one of these tensors, or is no regular file.
    """

    _all: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, tensors: dict[str, Any], beside: Path | None) -> None:
        from safetensors.torch import load_file

        self._folder = TemporaryFolder(tempfile.gettempdir())
        self._key = os.fspath(folder := self._folder.__enter__())
        self.file = folder / "tensors.bin"
        others = {}
        if beside is not None and is_there(beside):
            with naming(beside):
                others = load_file(beside)
        if doubled := next((name for name in others if name in tensors), None):
            raise in_both(beside, doubled)
        #: Names of what was read there.
        self.added = list(others)
        self._all[self._key] = {**tensors, **others}
        torch.save(self, self.file)

    def __reduce__(self) -> tuple[Any, ...]:
        return handed, (self._key,)

    def __del__(self) -> None:
        self._all.pop(self._key, None)


def is_there(file: Path) -> bool:
    """Whether there is such a file. Raises `ParameterError` if anything else has its name: opening
    a pipe would wait, and a device has no end.
    """
    if os.path.lexists(file) and not file.is_file():
        raise unfit(f"{file} is not a regular file", "remove it, or put the file itself there")
    return file.is_file()


@contextmanager
def naming(beside: Path) -> Iterator[None]:
    """Reads a file of safetensors, whose own errors do not name it. Raises `CorruptError`."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        remedy = "remove the file, or save the model again with save_pretrained"
        raise damaged(beside, str(error), remedy) from error


def in_both(beside: Path | None, name: str) -> ValueError:
    return ValueError(
        f"{beside} has {name}, which the containers hold too; it may hold only what they lack: "
        "remove the file, or save the model again with save_pretrained"
    )


def handed(key: str) -> dict[str, Any]:
    return Handed._all.pop(key)


torch.serialization.add_safe_globals([handed])


def with_dtype(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or dtype == value.dtype:
        return value
    return (value.decode() if isinstance(value, CompressedTensor) else value).to(dtype)
