"""Tensor parallelism: what each process holds of weights that are sharded over several (DTensor).

transformers makes a DTensor of each parameter in its plan before weights are loaded, without
memory, and puts hooks on modules that compute with the shards. Here such a parameter gets its own
rows and columns as a compressed tensor, cut out of the container without decoding:

```text
 placements of the DTensor ──▶ ranges of each dimension ──▶ rows and columns of container tensors
                           ──▶ the tiles around them, cut out ──▶ windows of these tiles
```
So the same code computes with the same bits as with BF16 shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from ._matrices import ARRAYS, STORED, TILE_COLUMNS, TILE_ROWS, Part, each, windows
from ._parameters import Weight
from ._plan import parts_of
from ._source import Source

#: From the first index to the one after the last one.
Range = tuple[int, int]
#: Threads that cut tiles out; each copies at the speed of memory.
_THREADS = 8


# ---- what transformers is told ----


def prepare(model: nn.Module) -> None:
    """Refuses what is not supported, and has the input embedding sharded as other weights are.

    Plans of some releases leave it whole on each process. A look-up gives the same values if it is
    sharded by rows: all processes except one add zeros.

    # Errors
    `ValueError` if the model shall be distributed in another way.
    """
    told = getattr(model.config, "distributed_config", None)
    if told is None:
        return
    sizes = {
        name: getattr(told, name, None) or 1
        for name in ("fsdp_size", "pp_size", "dp_replicate_size")
    }
    if wrong := [name for name, size in sizes.items() if size > 1]:
        raise ValueError(
            f"compressed weights are distributed by tensor and expert parallelism, and not by "
            f"{' and '.join(wrong)}; leave it out of distributed_config"
        )
    plan = getattr(model, "tp_plan", None)
    if not plan or (getattr(told, "tp_size", None) or 1) == 1:
        return
    try:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        return
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, module in model.named_modules():
        is_it = module is embedding and type(module) is nn.Embedding
        if is_it and f"{name}.weight" not in {*tied, *tied.values()}:
            plan.setdefault(name, "embedding_rowwise")


# ---- DTensors ----


def is_sharded(value: Any) -> bool:
    """Whether a parameter is a DTensor."""
    if not _is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local(value: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter: itself, or its shard."""
    return value._local_tensor if is_sharded(value) else value  # type: ignore[attr-defined]


def like(value: torch.Tensor, other: Any) -> torch.Tensor:
    """A shard as the DTensor that another one is, or as it is if that is none."""
    if not is_sharded(other):
        return value
    from torch.distributed.tensor import DTensor

    shape, strides = other.shape, other.stride()
    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=shape, stride=tuple(strides)
    )


def gathered(value: torch.Tensor) -> torch.Tensor:
    """A parameter as a whole. Of a DTensor: decoded, and all processes must ask for it at once."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shard(root: nn.Module, source: Source) -> None:
    """Has the weights of a source be the shards that the parameters of the module have room for."""
    if not _is_distributed():
        return
    source.weights = [
        _shard(weight, value, source.container)
        if is_sharded(value := _parameter(root, weight))
        else weight
        for weight in source.weights
    ]


def _parameter(root: nn.Module, weight: Weight) -> Any:
    place = weight.places[0]
    return root.get_submodule(place.path)._parameters.get(place.attribute)


def _shard(weight: Weight, value: Any, container: Any) -> Weight:
    """The part of a weight that this process holds."""
    held = _held(value)
    shape = tuple(sum(end - begin for begin, end in ranges) for ranges in held)
    if shape != tuple(value._local_tensor.shape):
        raise ValueError(
            f"{weight.name} is sharded as {value.placements}, in a way that this release does not "
            "know; leave it out of the plan"
        )
    if shape == weight.shape:
        return weight
    made = replace(weight, shape=shape, pieces=[], make=lambda: _taken(weight, container, held))
    if not prod(shape):
        made.ordinary_because = "empty"
    elif made.ordinary_because is None and len(shape) > 1:
        made.parts = _parts(weight, container, held)
    return made


def _held(value: Any) -> list[list[Range]]:
    """Of each dimension of a DTensor the ranges that this process holds."""
    mesh = value.device_mesh
    if mesh.ndim > 1:
        raise ValueError(
            f"a weight is sharded over a mesh of {mesh.ndim} dimensions; compressed weights are "
            "sharded over one"
        )
    held = [[(0, size)] for size in value.shape]
    (placement,) = value.placements
    if placement.is_replicate():
        return held
    dim = placement.dim % value.dim()
    groups = getattr(placement, "split_factor", 1)
    whole = (0, value.shape[dim])
    parts = (_chunk(whole, at, groups) for at in range(groups))
    mine = (_chunk(part, mesh.get_local_rank(), mesh.size()) for part in parts)
    held[dim] = [part for part in mine if part[0] < part[1]]
    return held


def _chunk(whole: Range, at: int, count: int) -> Range:
    """One of this many chunks, of which the last ones may be shorter, as of `torch.chunk`."""
    begin, end = whole
    step = -(-(end - begin) // count)
    return min(begin + at * step, end), min(begin + (at + 1) * step, end)


def _taken(weight: Weight, container: Any, held: list[list[Range]]) -> torch.Tensor:
    """These ranges of a weight, decoded."""
    value = weight.decode(container)
    for dim, ranges in enumerate(held):
        value = torch.cat([value.narrow(dim, begin, end - begin) for begin, end in ranges], dim)
    return value


# ---- rows and columns of container tensors ----


def _parts(
    weight: Weight, container: Any, held: list[list[Range]]
) -> tuple[list[tuple[str, Part]], dict[str, Any]] | None:
    """Windows of tiles that are these ranges, and the tiles; None if they cannot be such."""
    if (found := parts_of(weight, container)) is None:
        return None
    whole, tiles = found
    shape = weight.pieces_shape
    if weight.transposed:
        held = [*held[:-2], held[-1], held[-2]]
    columns = whole[0][1].columns
    depth = next(at for at in range(len(shape)) if prod(shape[at:]) <= columns)
    wide = _flat(shape[depth:], held[depth:])
    if prod(shape[depth:]) != columns or len(wide) != 1:
        return None
    parts: list[tuple[str, Part]] = []
    cuts: dict[str, Any] = {}
    names = [name for name, _ in whole for _ in ARRAYS[STORED]]
    numbers = [number for _, part in whole for number in part]
    for some, cut in windows(names, numbers, _flat(shape[:depth], held[:depth])):
        for part, (name, *_) in each(some, cut):
            rows = (part.row_begin, part.row_end)
            key, tile, part = tiles_around(name, tiles[name], rows, wide[0])
            parts.append((key, part))
            cuts[key] = tile
    return parts, cuts


def _flat(shape: Sequence[int], held: list[list[Range]]) -> list[Range]:
    """Ranges of the elements of a shape, in row-major order; those that meet are one."""
    found = [(0, 1)]
    for size, ranges in zip(shape, held, strict=True):
        if ranges == [(0, size)]:
            found = [(begin * size, end * size) for begin, end in found]
        else:
            indices = [at for begin, end in found for at in range(begin, end)]
            found = [
                (at * size + begin, at * size + end) for at in indices for begin, end in ranges
            ]
    merged: list[Range] = []
    for begin, end in found:
        if merged and merged[-1][1] == begin:
            begin = merged.pop()[0]
        merged.append((begin, end))
    return merged


def tiles_around(name: str, tiles: Any, rows: Range, columns: Range) -> tuple[str, Any, Part]:
    """A name for the tiles around a window of a tensor, those tiles, and the window of them."""
    high, wide = _around(rows, TILE_ROWS, tiles.rows), _around(columns, TILE_COLUMNS, tiles.columns)
    if (high, wide) != ((0, tiles.rows), (0, tiles.columns)):
        name = f"{name}[{high[0]}:{high[1]}, {wide[0]}:{wide[1]}]"
        tiles = Cut(tiles, high, wide)
    window = [edge - high[0] for edge in rows] + [edge - wide[0] for edge in columns]
    return name, tiles, Part(STORED, tiles.rows, tiles.columns, tiles.staged_bytes, *window)


def _around(inner: Range, unit: int, end: int) -> Range:
    """The smallest range of whole units around another one."""
    return inner[0] // unit * unit, min(-(-inner[1] // unit) * unit, end)


class Cut:
    """Some rows and columns of a tensor in tiles, as `Tiles` are: cut out when they are needed."""

    def __init__(self, tiles: Any, rows: Range, columns: Range) -> None:
        self._tiles, self._window = tiles, (rows, columns)
        self.rows, self.columns = rows[1] - rows[0], columns[1] - columns[0]
        #: No less than the most bytes of a tile in here.
        self.staged_bytes: int = tiles.staged_bytes
        self._arrays: tuple[Any, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of the arrays; about that until they are cut out."""
        if self._arrays is not None:
            return tuple(len(array) for array in self._arrays)
        share = self.rows * self.columns / (self._tiles.rows * self._tiles.columns)
        codebook, *others = self._tiles.lengths
        return codebook, *(int(length * share) for length in others)

    def check(self) -> None:
        """Cuts the arrays out, which checks them. Raises CorruptError."""
        if self._arrays is None:
            _, self._arrays = self._tiles.cut(*self._window)

    def array(self, at: int) -> memoryview:
        """One of the arrays, in memory of its own."""
        self.check()
        assert self._arrays is not None
        return memoryview(self._arrays[at])

    def release(self) -> None:
        """Lets the arrays go, once they are elsewhere."""
        self._arrays = None


def cuts(tiles: dict[str, Any]) -> dict[str, Cut]:
    """Those of some tiles that are cut out of others, after that was done."""
    found = {name: each for name, each in tiles.items() if isinstance(each, Cut)}
    if found:
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(Cut.check, found.values()):
                pass
    return found
