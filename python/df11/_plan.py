"""Which weights of a module stay compressed, and which GPU holds them in which form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from . import _native
from ._names import common, inside
from ._parameters import Weight

#: How a weight lies: `stored` as in the container, `fast` in the fast layout, `streamed` as in the
#: container and in host memory, from where the GPU reads it; or as an ordinary parameter.
Residence = Literal["stored", "fast", "streamed", "ordinary"]

#: What is decoded from a tensor's codebook, on a GPU.
TABLE_BYTES = 16384
#: Arrays begin on multiples of this many bytes.
ALIGNMENT = 256
#: Bytes that compression saves of a weight, or it is left as it is.
LEAST_SAVED = 1
#: Of the fast layout, what exceptions may add, until they are counted.
EXCEPTIONS = 0.01


def why_ordinary(weight: Weight, container: Any, on_gpu: bool) -> str | None:
    """Why a weight does not stay compressed; None if it does."""
    tensors = [container[name] for name in weight.tensors]
    if weight.ordinary_because is not None:
        return weight.ordinary_because
    if weight.is_buffer:
        return "a buffer"
    if len(weight.shape) < 2:
        return "a vector"
    if any(tensor.encoding == "raw" or tensor.dtype != "BF16" for tensor in tensors):
        return "stored as it is"
    if not is_tiled(weight, container):
        if not on_gpu or weight.shape[-1] % 8 or weight.transposed:
            return "stored in another way than tiles of 32 rows"
    elif weight.nbytes - stored_bytes(weight, container, on_gpu) < LEAST_SAVED:
        return "as small as it is"
    return None


def is_tiled(weight: Weight, container: Any) -> bool:
    """Whether all of its pieces are whole tiles, which operators read as they are."""
    columns = set()
    for piece in weight.pieces:
        tiles = container[piece.tensor].tiles
        if tiles is None:
            return False
        columns.add(tiles.columns)
        begin, end = rows_of(container[piece.tensor], tiles, piece.rows)
        if begin % 32 or (end % 32 and end != tiles.rows):
            return False
    return len(columns) == 1


def rows_of(tensor: Any, tiles: Any, rows: tuple[int, int] | None) -> tuple[int, int]:
    """Rows of the matrix that a piece is, from those of the tensor's first dimension."""
    each = tiles.rows // max(1, tensor.shape[0])
    return (0, tiles.rows) if rows is None else (rows[0] * each, rows[1] * each)


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def stored_bytes(weight: Weight, container: Any, on_gpu: bool) -> int:
    """What its tensors take as they are stored, their tables on a GPU included."""
    tables = TABLE_BYTES if on_gpu else 0
    sizes = (container[name].tiles.lengths for name in weight.tensors)
    return sum(sum(map(aligned, lengths)) + tables for lengths in sizes)


def fast_bytes(weight: Weight) -> int:
    """What it takes in the fast layout, with some exceptions."""
    columns = weight.shape[-1]
    return int(_native.strips_bytes(prod(weight.shape) // columns, columns) * (1 + EXCEPTIONS))


@dataclass
class Group:
    """The weights of a block of the container, which lie alike on one device."""

    container: Any
    weights: list[Weight] = field(default_factory=list)
    #: Of each weight, why it is ordinary, or None.
    reasons: list[str | None] = field(default_factory=list)
    device: torch.device = torch.device("cpu")
    residence: Residence = "stored"

    def forms(self, wanted: Residence | None = None) -> Iterator[tuple[Weight, Residence]]:
        """How each of its weights lies, if the group lies as is wanted."""
        wanted = wanted or self.residence
        for weight, reason in zip(self.weights, self.reasons, strict=True):
            if reason is not None:
                yield weight, "ordinary"
            elif not is_tiled(weight, self.container):
                yield weight, "fast"
            else:
                slow = weight.shape[-1] % 8 or weight.transposed
                yield weight, "stored" if wanted == "fast" and slow else wanted

    def nbytes(self, wanted: Residence) -> int:
        """Bytes of a GPU."""
        total = 0
        for weight, form in self.forms(wanted):
            if form == "ordinary":
                total += weight.nbytes
            elif form == "streamed":
                total += TABLE_BYTES * len(weight.tensors)
            else:
                total += (
                    fast_bytes(weight)
                    if form == "fast"
                    else stored_bytes(weight, self.container, True)
                )
        return total

    @property
    def paths(self) -> list[str]:
        """The modules that have its weights."""
        return list(dict.fromkeys(place.path for weight in self.weights for place in weight.places))


def group(weights: list[Weight], container: Any, on_gpu: bool) -> list[Group]:
    """Weights by the block of their first tensor, in the order in which the model runs."""
    groups = {block.name: Group(container) for block in container.blocks}
    for weight in weights:
        found = groups[container[weight.tensors[0]].block]
        found.weights.append(weight)
        found.reasons.append(why_ordinary(weight, container, on_gpu))
    return [each for each in groups.values() if each.weights]


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
    """The least equal sizes, up to the caps, that hold all; the caps if they are to be filled in turn."""
    low_first = wanted == "balanced_low_0"

    def sizes(level: int) -> list[int]:
        levels = [level // 2 if low_first and at == 0 else level for at in range(len(caps))]
        return [min(cap, own) for cap, own in zip(caps, levels, strict=True)]

    if wanted == "sequential" or len(caps) == 1 or not fits(caps):
        return caps
    low, high = 0, 2 * max(caps)
    while high - low > max(1, high >> 10):
        middle = (low + high) // 2
        if fits(sizes(middle)):
            high = middle
        else:
            low = middle
    return sizes(high)


def settle(sizes: list[dict[Residence, int]], budget: int | None, wanted: str) -> list[Residence]:
    """The residence of each group of one GPU, from the first on.

    `sizes`: bytes of each group by residence. `budget`: bytes that all may take. `wanted`: `stored`,
    `fast`, `streamed`, or `auto`: fast if all that is stored fits, and as far as the budget goes.

    Raises ValueError if the GPU is too small.
    """
    if budget is None:
        assert wanted in ("stored", "fast", "streamed")
        return [wanted] * len(sizes)  # type: ignore[list-item]
    result: list[Residence] = ["streamed"] * len(sizes)
    total = sum(size["streamed"] for size in sizes)
    if total > budget:
        raise ValueError(
            f"{budget:,} bytes of GPU memory are too little: what cannot be streamed takes {total:,}; "
            "allow more, or load onto the CPU"
        )
    steps: list[Residence] = ["stored", "fast"][: {"streamed": 0, "stored": 1}.get(wanted, 2)]  # type: ignore[assignment]
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
