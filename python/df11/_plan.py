"""Plans which weights of a module stay compressed, on which GPU and in which residence."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from . import _native
from ._arrays import dtype_of
from ._container import share
from ._devices import CPU, Devices
from ._encoding import MIN_BYTES, MIN_COLUMNS, matrix_for
from ._matrices import TABLE_BYTES, Part, parts_with_arrays
from ._modules import Spot, common, look_up, outer
from ._tensor import CompressedTensor

#: On a GPU, weights are `stored` or `fast` (spec/terms.md, residence). Plans also count weights
#: that a GPU reads from host memory as `streamed`, and uncompressed parameters as `ordinary`.
Residence = Literal["stored", "fast", "streamed", "ordinary"]

SMALL = "not smaller when compressed"
GAP = "stored in the layout gap, which is decoded; df11 convert makes tiles of it"
NARROW = "too narrow for the kernels, which read rows of at least 128 weights"
ODD = "not a multiple of 8 wide, as the kernels need"
MADE = "made by the loader from other tensors, and only BF16 is compressed again"
EXCEPTIONAL = "too many exceptions for the fast layout"
#: Arrays begin on multiples of this many bytes.
ALIGNMENT = 256
#: Bytes that compression must save; a weight that saves less stays ordinary.
MIN_SAVED = 1
#: Share of the fast layout that exceptions may add, until they are counted.
EXCEPTIONS = 0.01


@dataclass(eq=False)
class Item:
    """A weight that a loader made from tensors of a container, and its possible residences."""

    name: str
    #: On the CPU: compressed, a window of tensors of the container; or decoded.
    value: Tensor
    #: Tensors of the container from which it is made; empty if that is not known.
    tensor_names: list[str]
    spots: list[Spot] = field(default_factory=list)
    reason: str | None = None
    #: Whether it is uncompressed and can be encoded as stored on its device.
    is_encodable: bool = False

    def residence_if(self, wanted: Residence) -> Residence:
        """Its own residence if its block has the wanted one."""
        if self.reason is not None:
            return "ordinary"
        if not isinstance(self.value, CompressedTensor):
            # A weight that is not compressed yet is whole in memory, and cannot be streamed.
            is_stored = wanted == "stored" or self.value.shape[-1] % 8
            return "stored" if is_stored and self.is_encodable else "fast"
        is_bf16 = self.value.dtype == torch.bfloat16
        slow = not is_bf16 or self.value.matrix_shape[1] % 8 or self.value.transposed
        return "stored" if wanted == "fast" and slow else wanted

    def nbytes(self, residence: Residence) -> int:
        """Bytes on a GPU."""
        if residence == "ordinary":
            return whole_bytes(self.value)
        if residence == "fast" or not self.is_compressed:
            return fast_bytes(self.value)
        return self.table_bytes + (self.stored_bytes if residence == "stored" else 0)

    @property
    def is_compressed(self) -> bool:
        return isinstance(self.value, CompressedTensor)

    @cached_property
    def table_bytes(self) -> int:
        return TABLE_BYTES * len({id(mine[0]) for _, mine in self._parts})

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the arrays of its tensors, or of the tiles that enclose its windows."""
        by_window = {(id(mine[0]), part): mine for part, mine in self._parts}
        shares = ((share(part), mine) for (_, part), mine in by_window.items())
        return sum(aligned(int(array.numel() * some)) for some, mine in shares for array in mine)

    @property
    def _parts(self) -> Iterable[tuple[Part, Sequence[Tensor]]]:
        value = self.value
        return (
            parts_with_arrays(value._places, value.flat_parts)
            if isinstance(value, CompressedTensor)
            else ()
        )


def whole_bytes(value: Tensor) -> int:
    """Bytes of its decoded weights."""
    return value.numel() * value.element_size()


def matrix_of(value: Tensor) -> tuple[int, int]:
    if isinstance(value, CompressedTensor):
        return value.matrix_shape
    return value.numel() // value.shape[-1], value.shape[-1]


def fast_bytes(value: Tensor) -> int:
    return int(_native.strips_bytes(*matrix_of(value)) * (1 + EXCEPTIONS))


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def why_ordinary(item: Item, container: Any, is_buffer: bool, on_gpu: bool) -> str | None:
    stored, value = [container[name] for name in item.tensor_names], item.value
    other = [kind for one in stored if (kind := dtype_of(one.dtype)) != value.dtype]
    if other:
        return f"stored as {other[0]}, used as {value.dtype}".replace("torch.", "")
    if is_buffer:
        return "a buffer"
    if value.dim() < 2:
        return "a vector"
    if any(one.encoding == "delta" for one in stored):
        return "stored as differences from a base, decoded at load"
    if any(one.encoding == "raw" for one in stored):
        return "stored as it is"
    if isinstance(value, CompressedTensor):
        tables = item.table_bytes if on_gpu else 0
        return SMALL if whole_bytes(value) - item.stored_bytes - tables < MIN_SAVED else None
    if value.dtype != torch.bfloat16:
        return why_no_matrix(value, MADE)
    is_gap = any(one.encoding == "gap" for one in stored)
    item.is_encodable = not is_gap and matrix_for(value) is not None
    if item.is_encodable:
        return None
    if on_gpu and value.numel() and value.shape[-1] % 8 == 0:
        return SMALL if whole_bytes(value) - fast_bytes(value) < MIN_SAVED else None
    return GAP if is_gap else why_no_matrix(value)


def why_no_matrix(value: Tensor, otherwise: str = NARROW) -> str:
    """The reason why a tensor of several dimensions cannot be compressed in memory."""
    if value.numel() * value.element_size() < MIN_BYTES:
        return SMALL
    if value.shape[-1] % 8 and value.shape[-1] > MIN_COLUMNS:
        return ODD
    return NARROW if value.shape[-1] < MIN_COLUMNS else otherwise


@dataclass
class WeightBlock:
    """The weights of a block, which share a device and a residence."""

    items: list[Item] = field(default_factory=list)
    device: torch.device = CPU
    residence: Residence = "stored"

    def nbytes(self, wanted: Residence) -> int:
        """Bytes on a GPU."""
        return sum(each.nbytes(each.residence_if(wanted)) for each in self.items)

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(spot.path for each in self.items for spot in each.spots))


def by_block(items: list[Item], container: Any) -> list[WeightBlock]:
    blocks = {block.name: WeightBlock() for block in container.blocks}
    for item in items:
        block = (
            container[item.tensor_names[0]].block if item.tensor_names else container.blocks[0].name
        )
        blocks[block].items.append(item)
    return [each for each in blocks.values() if each.items]


def place(blocks: list[WeightBlock], placement: Devices, wanted: str) -> None:
    """Gives each block its device and residence.
    Raises `ValueError` if a GPU is too small, or a `device_map` contradicts itself about a block.
    """
    devices, memory = placement.devices, placement.memory
    if devices[0].type != "cuda":
        return
    if placement.where is not None:
        _place_by_modules(blocks, placement.where, devices[0])
    elif len(devices) > 1:
        _spread(blocks, placement, wanted)
    else:
        for each in blocks:
            each.device = devices[0]
    for at, device in enumerate(devices):
        mine = [each for each in blocks if each.device == device and each.residence != "streamed"]
        budget = None if memory is None else memory[at]
        limits = placement.auto_limits(at) if wanted == "auto" else (budget, budget)
        residences: list[Residence] = ["streamed", "stored", "fast"]
        table = [{residence: each.nbytes(residence) for residence in residences} for each in mine]
        settled = settle(table, *limits, wanted)
        for each, residence in zip(mine, settled, strict=True):
            each.residence = residence


def _spread(blocks: list[WeightBlock], placement: Devices, wanted: str) -> None:
    if wanted == "streamed":
        raise ValueError("streamed puts all weights on one GPU; name one device")
    assert placement.memory is not None
    memory = placement.memory
    tries: dict[Residence, list[int]] = {"fast": memory, "stored": memory}
    if wanted == "stored":
        del tries["fast"]
    elif wanted == "auto" and placement.fast_memory is not None:
        tries["fast"] = placement.fast_memory
    sizes, places = [0], None
    for residence, caps in tries.items():
        if places is None:
            sizes = [each.nbytes(residence) for each in blocks]
            places = spread(sizes, balance(caps, placement.order, partial(_fits, sizes)))
    # The last GPU streams the rest if all are too small.
    places = places or spread(sizes, [*memory[:-1], sum(sizes)])
    assert places is not None
    for each, at in zip(blocks, places, strict=True):
        each.device = placement.devices[at]


def _place_by_modules(
    blocks: list[WeightBlock], where: dict[str, torch.device], main: torch.device
) -> None:
    for each in blocks:
        said: dict[torch.device, str] = {}
        for item in each.items:
            for spot in item.spots if item.reason is None else ():
                device = look_up(where, spot.name)
                if device is None:
                    raise ValueError(
                        f'device_map names no device for {spot.name}; name one, or one for "", '
                        "which is all that it does not name"
                    )
                said.setdefault(device, spot.name)
        (first, one), *others = said.items() or [(main, "")]
        for second, other in others:
            raise ValueError(
                f"device_map puts {one} on {first} and {other} on {second}, which are weights of "
                "one block, or tied; give both the same device"
            )
        each.device = main if first.type == "cpu" else first
        each.residence = "streamed" if first.type == "cpu" else "stored"


def spread(sizes: list[int], caps: list[int]) -> list[int] | None:
    """The first place with room for each size, in turn; None if a size fits nowhere."""
    at, used, result = 0, 0, []
    for size in sizes:
        while at < len(caps) and used + size > caps[at]:
            at, used = at + 1, 0
        if at == len(caps):
            return None
        used += size
        result.append(at)
    return result


def _fits(sizes: list[int], caps: list[int]) -> bool:
    return spread(sizes, caps) is not None


def balance(caps: list[int], wanted: str, fits: Callable[[list[int]], bool]) -> list[int]:
    """The smallest equal sizes, up to the caps, that hold all. To fill GPUs in turn: the caps."""
    low_first = wanted == "balanced_low_0"

    def sizes(level: int) -> list[int]:
        levels = [level // 2 if low_first and at == 0 else level for at in range(len(caps))]
        return [min(cap, own) for cap, own in zip(caps, levels, strict=True)]

    if wanted == "sequential" or len(caps) == 1 or not fits(caps):
        return caps
    levels = range(2 * max(caps))
    return sizes(bisect_left(levels, True, key=lambda level: fits(sizes(level))))


def settle(
    sizes: list[dict[Residence, int]],
    budget: int | None,
    fast_budget: int | None,
    wanted: str,
) -> list[Residence]:
    """The residence of each block of one GPU, in order, by its bytes in each residence and the
    bytes of all together. If all blocks fit as stored, `auto` makes as many fast as its budget
    allows. Raises ValueError if the GPU is too small.
    """
    if budget is None or fast_budget is None:
        assert wanted in ("stored", "fast", "streamed")
        return [wanted] * len(sizes)  # type: ignore[list-item]
    result: list[Residence] = ["streamed"] * len(sizes)
    total = sum(size["streamed"] for size in sizes)
    if total > budget:
        raise ValueError(
            f"{budget:,} bytes of GPU memory are too little: parts that are never streamed take "
            f"{total:,}; allow more, or load onto the CPU"
        )
    steps: tuple[Residence, ...] = ("stored", "fast")
    for step in steps[: {"streamed": 0, "stored": 1}.get(wanted, 2)]:
        for at, size in enumerate(sizes):
            more = size[step] - size[result[at]]
            if total + more > (fast_budget if step == "fast" else budget):
                if wanted == "fast":
                    raise ValueError(
                        f"the fast layout does not fit into {budget:,} bytes of GPU memory; "
                        'residence="auto" uses it as far as it fits'
                    )
                return result
            total += more
            result[at] = step
    return result


def homes(blocks: list[WeightBlock], is_callable: Callable[[str], bool]) -> dict[str, torch.device]:
    """The device of each module that runs on a single one: it encloses a block and no other."""
    paths = [each.paths for each in blocks]
    #: How many blocks have weights in each module.
    held = Counter(path for mine in paths for path in {a for p in mine for a in outer(p)})
    result: dict[str, torch.device] = {}
    for each, mine in zip(blocks, paths, strict=True):
        path = common(mine)
        while path and not is_callable(path):
            path = path.rpartition(".")[0]
        alone = path and held[path] == 1
        result.update(dict.fromkeys([path] if alone else mine, each.device))
    return result
