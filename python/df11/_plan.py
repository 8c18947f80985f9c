"""Plans which weights of a module stay compressed, on which GPU and in which residence."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    """Gives each block its device and residence. (`Plan` in Rust also counts slots and outputs.)
    Raises `ValueError` if a GPU is too small, or a `device_map` contradicts itself about a block.
    """
    devices = placement.devices
    if devices[0].type != "cuda":
        return
    limits = [placement.limits(at, wanted) for at in range(len(devices))]
    if placement.where is not None:
        _place_by_modules(blocks, placement.where, devices[0])
    else:
        _spread(blocks, placement, limits, wanted)
    for device, (memory, fast_memory) in zip(devices, limits, strict=True):
        mine = [each for each in blocks if each.device == device and each.residence != "streamed"]
        settle(mine, memory, fast_memory, wanted)


def _spread(
    blocks: list[WeightBlock], placement: Devices, limits: list[tuple[int, int]], wanted: str
) -> None:
    if wanted == "streamed" and len(limits) > 1:
        raise ValueError("streamed puts all weights on one GPU; name one device")
    memory, fast_memory = map(list, zip(*limits, strict=True))
    tries: list[tuple[Residence, list[int]]] = [("fast", fast_memory), ("stored", memory)]
    for residence, caps in tries[wanted == "stored" :]:
        sizes = [each.nbytes(residence) for each in blocks]
        if places := balance(sizes, caps, placement.order):
            break
    # The last GPU streams the rest if all are too small.
    for each, at in zip(blocks, places or fill(sizes, [*memory[:-1], sum(sizes)]), strict=True):
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


def fill(sizes: list[int], caps: list[int]) -> list[int]:
    """The first place with room for each size, in turn; none if a size fits nowhere."""
    at, used, result = 0, 0, []
    for size in sizes:
        while at < len(caps) and used + size > caps[at]:
            at, used = at + 1, 0
        if at == len(caps):
            return []
        used += size
        result.append(at)
    return result


def balance(sizes: list[int], caps: list[int], order: str) -> list[int]:
    """Like `fill`, into the smallest equal caps that hold all. `sequential` keeps the caps."""

    def filled(level: int) -> list[int]:
        first = level // 2 if order == "balanced_low_0" else level
        return fill(sizes, [min(caps[0], first), *(min(cap, level) for cap in caps[1:])])

    in_turn = fill(sizes, caps)
    if order == "sequential" or len(caps) == 1 or not in_turn:
        return in_turn
    return filled(bisect_left(range(2 * max(caps)), True, key=lambda level: bool(filled(level))))


def settle(blocks: list[WeightBlock], memory: int, fast_memory: int, wanted: str) -> None:
    """Gives each block of one GPU its residence: makes as many resident as fit into `memory`, and
    then as many fast as fit into `fast_memory`. Blocks with a single weight come last: it may be an
    embedding, of which only some rows are read. Raises `ValueError` if the GPU is too small.
    """
    total = sum(each.nbytes("streamed") for each in blocks)
    if total > memory:
        raise ValueError(
            f"{memory:,} bytes of GPU memory are too little: parts that are never streamed take "
            f"{total:,}; allow more, or load onto the CPU"
        )
    for each in blocks:
        each.residence = "streamed"
    steps: list[tuple[Residence, int]] = [("stored", memory), ("fast", fast_memory)]
    for step, limit in steps[: {"streamed": 0, "stored": 1}.get(wanted, 2)]:
        for each in sorted(blocks, key=lambda each: len(each.items) < 2):
            more = each.nbytes(step) - each.nbytes(each.residence)
            if total + more <= limit:
                total += more
                each.residence = step
            elif wanted == "fast":
                raise ValueError(
                    f"the fast layout does not fit into {memory:,} bytes of GPU memory; "
                    'residence="auto" uses it as far as it fits'
                )


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
