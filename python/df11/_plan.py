"""Which weights of a module stay compressed, and which GPU holds them in which form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from . import _native
from ._matrices import STORED, TABLE_BYTES, Part
from ._names import common, inside
from ._parameters import Weight

#: How a weight lies: `stored` as in the container, `fast` in the fast layout, `streamed` as in the
#: container and in host memory, from where the GPU reads it; or as an ordinary parameter.
Residence = Literal["stored", "fast", "streamed", "ordinary"]

CPU = torch.device("cpu")
#: Why a weight is ordinary of which compression, as stored, saves nothing.
SMALL = "as small as it is"
#: Arrays begin on multiples of this many bytes.
ALIGNMENT = 256
#: Bytes that compression saves of a weight, or it is left as it is.
LEAST_SAVED = 1
#: Of the fast layout, what exceptions may add, until they are counted.
EXCEPTIONS = 0.01


@dataclass
class Item:
    """A weight, and in which forms it can lie."""

    weight: Weight
    #: Of each of its pieces the tensor and the part of it, if operators can read all as they are.
    parts: list[tuple[str, Part]]
    #: Of these tensors.
    tiles: dict[str, Any]
    #: Why it is an ordinary parameter, if it is.
    reason: str | None = None

    def form(self, wanted: Residence) -> Residence:
        """How it lies if its group lies as is wanted."""
        if self.reason is not None:
            return "ordinary"
        if not self.parts:
            return "fast"
        slow = self.weight.shape[-1] % 8 or self.weight.transposed
        return "stored" if wanted == "fast" and slow else wanted

    def nbytes(self, form: Residence) -> int:
        """Bytes of a GPU."""
        tables = TABLE_BYTES * len(self.tiles)
        if form == "streamed":
            return tables
        if form == "stored":
            return tables + self.stored_bytes
        if form == "ordinary":
            return self.weight.nbytes
        columns = self.weight.shape[-1]
        bytes_ = _native.strips_bytes(prod(self.weight.shape) // columns, columns)
        return int(bytes_ * (1 + EXCEPTIONS))

    @property
    def stored_bytes(self) -> int:
        """Of the arrays of its tensors."""
        return sum(aligned(length) for tiles in self.tiles.values() for length in tiles.lengths)

    def read_bytes(self, container: Any) -> int:
        """What is read of its container to load it."""
        names = self.weight.tensors
        return self.stored_bytes or sum(container[name].stored_bytes for name in names)


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def item(weight: Weight, container: Any, on_gpu: bool) -> Item:
    """What can become of a weight."""
    found = weight.parts or (parts_of(weight, container) if len(weight.shape) > 1 else None)
    if found is not None and weight.parts is None and not all(p.is_aligned for _, p in found[0]):
        found = None
    made = Item(weight, *(found or ([], {})))
    made.reason = _why_ordinary(made, container, on_gpu)
    return made


def _why_ordinary(made: Item, container: Any, on_gpu: bool) -> str | None:
    weight = made.weight
    if weight.ordinary_because is not None:
        return weight.ordinary_because
    if weight.is_buffer:
        return "a buffer"
    if len(weight.shape) < 2:
        return "a vector"
    tensors = [container[name] for name in weight.tensors]
    if any(tensor.encoding == "raw" or tensor.dtype != "BF16" for tensor in tensors):
        return "stored as it is"
    if not made.parts:
        if not on_gpu or weight.shape[-1] % 8 or weight.transposed:
            return "stored in another way than tiles of 32 rows"
    elif weight.nbytes - made.stored_bytes - TABLE_BYTES * len(made.tiles) * on_gpu < LEAST_SAVED:
        return SMALL
    return None


def parts_of(
    weight: Weight, container: Any
) -> tuple[list[tuple[str, Part]], dict[str, Any]] | None:
    """Its pieces as parts of tensors in tiles, and these; None if they are stored otherwise."""
    tiles = {name: container[name].tiles for name in weight.tensors if weight.pieces}
    if not tiles or None in tiles.values() or len({each.columns for each in tiles.values()}) != 1:
        return None
    parts = []
    for name, _, rows in weight.pieces:
        each = tiles[name]
        begin, end = rows or (0, container[name].shape[0])
        per_row = each.rows // max(1, container[name].shape[0])
        part = Part.whole(STORED, each.rows, each.columns, each.staged_bytes)
        part = part._replace(row_begin=begin * per_row, row_end=end * per_row)
        parts.append((name, part))
    return parts, tiles


@dataclass
class Group:
    """The weights of a block of the container, which lie alike on one device."""

    items: list[Item] = field(default_factory=list)
    device: torch.device = CPU
    residence: Residence = "stored"

    def nbytes(self, wanted: Residence) -> int:
        """Bytes of a GPU."""
        return sum(each.nbytes(each.form(wanted)) for each in self.items)

    @property
    def paths(self) -> list[str]:
        """The modules that have its weights."""
        places = (place.path for each in self.items for place in each.weight.places)
        return list(dict.fromkeys(places))


def group(weights: list[Weight], container: Any, on_gpu: bool) -> list[Group]:
    """Weights by the block of their first tensor, in the order in which the model runs.

    About 40 microseconds a tensor.
    """
    groups = {block.name: Group() for block in container.blocks}
    for weight in weights:
        block = container[weight.tensors[0]].block
        groups[block].items.append(item(weight, container, on_gpu))
    return [each for each in groups.values() if each.items]


def spread(sizes: list[int], caps: list[int]) -> list[int] | None:
    """For each of some sizes, in turn, the first place with room; None if there is too little."""
    at, used, result = 0, 0, []
    for size in sizes:
        while at < len(caps) and used + size > caps[at]:
            at, used = at + 1, 0
        if at == len(caps):
            return None
        used += size
        result.append(at)
    return result


def balance(caps: list[int], wanted: str, fits: Callable[[list[int]], bool]) -> list[int]:
    """The least equal sizes, up to the caps, that hold all; the caps to fill GPUs in turn."""
    low_first = wanted == "balanced_low_0"

    def sizes(level: int) -> list[int]:
        levels = [level // 2 if low_first and at == 0 else level for at in range(len(caps))]
        return [min(cap, own) for cap, own in zip(caps, levels, strict=True)]

    if wanted == "sequential" or len(caps) == 1 or not fits(caps):
        return caps
    levels = range(2 * max(caps))
    return sizes(bisect_left(levels, True, key=lambda level: fits(sizes(level))))


def settle(sizes: list[dict[Residence, int]], budget: int | None, wanted: str) -> list[Residence]:
    """The residence of each group of one GPU, from the first on.

    `sizes`: bytes of each group by residence. `budget`: bytes that all may take. `wanted`:
    `stored`, `fast`, `streamed`, or `auto`: fast if all that is stored fits, and as far as the
    budget goes.

    Raises ValueError if the GPU is too small.
    """
    if budget is None:
        assert wanted in ("stored", "fast", "streamed")
        return [wanted] * len(sizes)  # type: ignore[list-item]
    result: list[Residence] = ["streamed"] * len(sizes)
    total = sum(size["streamed"] for size in sizes)
    if total > budget:
        raise ValueError(
            f"{budget:,} bytes of GPU memory are too little: what cannot be streamed takes "
            f"{total:,}; allow more, or load onto the CPU"
        )
    steps: tuple[Residence, ...] = ("stored", "fast")
    steps = steps[: {"streamed": 0, "stored": 1}.get(wanted, 2)]
    for step in steps:
        for at, size in enumerate(sizes):
            more = size[step] - size[result[at]]
            if total + more > budget:
                if wanted == "fast":
                    raise ValueError(
                        f"the fast layout does not fit into {budget:,} bytes of GPU memory; "
                        'residence="auto" uses it as far as it fits'
                    )
                return result
            total += more
            result[at] = step
    return result


def homes(groups: list[Group], is_callable: Callable[[str], bool]) -> dict[str, torch.device]:
    """For modules that run on one device, that device: around a group if no other is in there."""
    outer = [common(each.paths) for each in groups]
    result: dict[str, torch.device] = {}
    for at, each in enumerate(groups):
        path = outer[at]
        while path and not is_callable(path):
            path = path.rpartition(".")[0]
        others = (p for other in groups if other is not each for p in other.paths)
        alone = path and not any(inside(other, path) for other in others)
        result.update(dict.fromkeys([path] if alone else each.paths, each.device))
    return result
