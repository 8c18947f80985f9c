"""Which weights of a module stay compressed, and which GPU holds them in which form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from . import _native
from ._container import share
from ._matrices import TABLE_BYTES, Part
from ._matrices import each as pieces
from ._names import Place, common, inside
from ._tensor import CompressedTensor
from ._torch import dtype_of

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


@dataclass(eq=False)
class Item:
    """What a loader has made of tensors of a container, and in which forms it can lie."""

    name: str
    #: On the CPU: a window of tensors of the container, compressed, or decoded.
    value: Tensor
    #: The tensors of the container that it was made of.
    sources: list[str]
    #: Where the module has it.
    places: list[Place] = field(default_factory=list)
    #: Why it is an ordinary parameter, if it is.
    reason: str | None = None

    def form(self, wanted: Residence) -> Residence:
        """How it lies if its group lies as is wanted."""
        if self.reason is not None:
            return "ordinary"
        if not isinstance(self.value, CompressedTensor):
            return "fast"
        slow = self.value.matrix_shape[1] % 8 or self.value.transposed
        return "stored" if wanted == "fast" and slow else wanted

    def nbytes(self, form: Residence) -> int:
        """Bytes of a GPU."""
        if form == "ordinary":
            return 2 * self.value.numel() if self._is_compressed else self.value.nbytes
        if form == "fast":
            rows, columns = matrix_of(self.value)
            return int(_native.strips_bytes(rows, columns) * (1 + EXCEPTIONS))
        return self.table_bytes + (self.stored_bytes if form == "stored" else 0)

    @property
    def _is_compressed(self) -> bool:
        return isinstance(self.value, CompressedTensor)

    @cached_property
    def table_bytes(self) -> int:
        """Of the decode tables that it needs on a GPU."""
        return TABLE_BYTES * len({id(mine[0]) for _, mine in self._pieces()})

    @cached_property
    def stored_bytes(self) -> int:
        """Of the arrays of its tensors, or of the tiles around its windows of them."""
        found = {(id(mine[0]), part): mine for part, mine in self._pieces()}
        shares = ((share(part), mine) for (_, part), mine in found.items())
        return sum(aligned(int(array.numel() * some)) for some, mine in shares for array in mine)

    def _pieces(self) -> Iterator[tuple[Part, Sequence[Tensor]]]:
        if isinstance(self.value, CompressedTensor):
            yield from pieces(self.value.arrays, self.value.flat_parts)


def matrix_of(value: Tensor) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is, compressed or not."""
    if isinstance(value, CompressedTensor):
        return value.matrix_shape
    return value.numel() // value.shape[-1], value.shape[-1]


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def why_ordinary(item: Item, container: Any, is_buffer: bool, on_gpu: bool) -> str | None:
    """Why a weight does not stay compressed, if it does not."""
    stored, value = [container[name] for name in item.sources], item.value
    other = [kind for one in stored if (kind := dtype_of(one)) != value.dtype]
    if other:
        return f"stored as {other[0]}, used as {value.dtype}".replace("torch.", "")
    if is_buffer:
        return "a buffer"
    if value.dim() < 2:
        return "a vector"
    if any(one.encoding == "raw" or one.dtype != "BF16" for one in stored):
        return "stored as it is"
    if isinstance(value, CompressedTensor):
        tables = item.table_bytes if on_gpu else 0
        return SMALL if 2 * value.numel() - item.stored_bytes - tables < LEAST_SAVED else None
    if all(one.tiles is not None for one in stored):
        return "made of other tensors by transformers"
    is_packed = on_gpu and value.numel() and value.shape[-1] % 8 == 0
    return None if is_packed else "stored in another way than tiles of 32 rows"


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
        places = (place.path for each in self.items for place in each.places)
        return list(dict.fromkeys(places))


def group(items: list[Item], container: Any) -> list[Group]:
    """Items by the block of their first tensor, in the order in which the model runs."""
    groups = {block.name: Group() for block in container.blocks}
    for item in items:
        groups[container[item.sources[0]].block].items.append(item)
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
