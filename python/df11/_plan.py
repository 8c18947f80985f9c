"""Which weights of a module stay compressed, and which GPU holds them in which form."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import _native
from ._arrays import dtype_of
from ._container import share
from ._encoding import LEAST_BYTES, LEAST_COLUMNS, matrix_for
from ._matrices import TABLE_BYTES, Part, pieces
from ._modules import Spot, common, look_up, outer
from ._tensor import CompressedTensor

#: How a weight lies: as in the container, in the fast layout, as in the container and in host
#: memory, from where the GPU reads it; or as an ordinary parameter.
Residence = Literal["stored", "fast", "streamed", "ordinary"]

CPU = torch.device("cpu")
SMALL = "as small as it is"
GAP = "stored in the layout gap, which is decoded; df11 convert makes tiles of it"
NARROW = "too narrow for the kernels, which read rows of at least 128 weights"
ODD = "not a multiple of 8 wide, as the kernels need"
EXCEPTIONAL = "too many exceptions for the fast layout"
#: Arrays begin on multiples of this many bytes.
ALIGNMENT = 256
#: Bytes that compression must save of a weight; with less it is left as it is.
LEAST_SAVED = 1
#: Share of the fast layout that exceptions may add, until they are counted.
EXCEPTIONS = 0.01
#: Share of the free memory of a GPU that a model may take unless told otherwise; the rest is for
#: caches.
SHARE = 0.9


@dataclass(eq=False)
class Item:
    """A weight that a loader made of tensors of a container, and the forms it can lie in."""

    name: str
    #: On the CPU: a window of tensors of the container, compressed, or decoded.
    value: Tensor
    #: Tensors of the container that it is made of; none if that is not known.
    sources: list[str]
    spots: list[Spot] = field(default_factory=list)
    reason: str | None = None
    #: Whether it is not compressed, and can be encoded as stored on its device.
    is_encodable: bool = False

    def form(self, wanted: Residence) -> Residence:
        """How it lies if its group lies as is wanted."""
        if self.reason is not None:
            return "ordinary"
        if not isinstance(self.value, CompressedTensor):
            # A weight that is not compressed yet is in memory whole, and cannot be streamed.
            return "stored" if wanted == "stored" and self.is_encodable else "fast"
        slow = self.value.matrix_shape[1] % 8 or self.value.transposed
        return "stored" if wanted == "fast" and slow else wanted

    def nbytes(self, form: Residence) -> int:
        """Bytes of a GPU."""
        if form == "ordinary":
            return 2 * self.value.numel() if self.is_compressed else self.value.nbytes
        if form == "fast" or not self.is_compressed:
            return fast_bytes(self.value)
        return self.table_bytes + (self.stored_bytes if form == "stored" else 0)

    @property
    def is_compressed(self) -> bool:
        return isinstance(self.value, CompressedTensor)

    @cached_property
    def table_bytes(self) -> int:
        return TABLE_BYTES * len({id(mine[0]) for _, mine in self._pieces})

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the arrays of its tensors, or of the tiles around its windows of them."""
        found = {(id(mine[0]), part): mine for part, mine in self._pieces}
        shares = ((share(part), mine) for (_, part), mine in found.items())
        return sum(aligned(int(array.numel() * some)) for some, mine in shares for array in mine)

    @property
    def _pieces(self) -> Iterable[tuple[Part, Sequence[Tensor]]]:
        value = self.value
        return (
            pieces(value._arrays, value.flat_parts) if isinstance(value, CompressedTensor) else ()
        )


def matrix_of(value: Tensor) -> tuple[int, int]:
    if isinstance(value, CompressedTensor):
        return value.matrix_shape
    return value.numel() // value.shape[-1], value.shape[-1]


def fast_bytes(value: Tensor) -> int:
    return int(_native.strips_bytes(*matrix_of(value)) * (1 + EXCEPTIONS))


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def why_ordinary(item: Item, container: Any, is_buffer: bool, on_gpu: bool) -> str | None:
    stored, value = [container[name] for name in item.sources], item.value
    other = [kind for one in stored if (kind := dtype_of(one.dtype)) != value.dtype]
    if other:
        return f"stored as {other[0]}, used as {value.dtype}".replace("torch.", "")
    if is_buffer:
        return "a buffer"
    if value.dim() < 2:
        return "a vector"
    if any(one.encoding == "float" for one in stored):
        return "of a dtype that is decoded at load"
    if any(one.encoding == "raw" or one.dtype != "BF16" for one in stored):
        return "stored as it is"
    if isinstance(value, CompressedTensor):
        tables = item.table_bytes if on_gpu else 0
        return SMALL if 2 * value.numel() - item.stored_bytes - tables < LEAST_SAVED else None
    is_gap = any(one.encoding == "gap" for one in stored)
    item.is_encodable = not is_gap and matrix_for(value) is not None
    if item.is_encodable or (on_gpu and value.numel() and value.shape[-1] % 8 == 0):
        return None
    return GAP if is_gap else why_no_matrix(value)


def why_no_matrix(value: Tensor) -> str:
    """Why a BF16 tensor of several dimensions cannot be compressed in memory."""
    if value.numel() * value.element_size() < LEAST_BYTES:
        return SMALL
    return ODD if value.shape[-1] % 8 and value.shape[-1] > LEAST_COLUMNS else NARROW


class Devices(NamedTuple):
    """Devices, and the bytes that weights may take of each; None: all that they need."""

    devices: list[torch.device]
    memory: list[int] | None = None
    #: The device of each module that a device_map names, if these are several; weights on the CPU
    #: are streamed to the first GPU.
    where: dict[str, torch.device] | None = None
    #: How several GPUs share what there is, as device_map says it.
    order: str = "sequential"

    @property
    def rest(self) -> Any:
        return self.devices[0] if len(self.devices) == 1 else "cpu"


def byte_count(size: int | float | str) -> int:
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"([0-9.]+)\s*(?:([KMGT])(I?))?B?", size.strip().upper())
    if match is None:
        raise ValueError(
            f'{size!r} is no number of bytes; write it as 9000000000, "9GB" or "8.5GiB"'
        )
    power = "KMGT".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def device_of(device: Any) -> torch.device:
    """The device that is named so; of None the current GPU, or the CPU if there is none."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                "there is no CUDA device that PyTorch can use; load onto the CPU with "
                'device_map="cpu" (slow)'
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ValueError(f"weights are decoded on NVIDIA GPUs and on the CPU, and not on {device}")
    return CPU


def resolve(wanted: Any, memory: Any, max_memory: dict[Any, Any] | None = None) -> Devices:
    if isinstance(wanted, dict):
        return _by_modules(wanted, memory)
    given = (max_memory or {}).items()
    caps = {gpu: int(cap) for gpu, cap in given if isinstance(gpu, int) and cap}
    if not caps or not torch.cuda.is_available():
        return Devices([CPU])
    most = [
        min(cap, int(SHARE * torch.cuda.mem_get_info(gpu)[0]))
        for gpu, cap in limited(caps, memory).items()
    ]
    return Devices([torch.device("cuda", gpu) for gpu in caps], most, None, wanted)


def _by_modules(wanted: dict[Any, Any], memory: Any) -> Devices:
    if "disk" in wanted.values():
        raise ValueError(
            'compressed weights are on disk anyway; use "cpu" in the place of "disk" to stream '
            'them from the host, or device_map="auto" with max_memory to stream what does not fit'
        )
    if None in wanted.values():
        raise ValueError('device_map names None; name a device, as 0, "cuda" or "cpu"')
    where = {str(path): device_of(device) for path, device in wanted.items()}
    devices = list(dict.fromkeys(where.values()))
    if len(devices) == 1:
        if memory is None or devices[0].type == "cpu":
            return Devices(devices)
        sizes = memory if isinstance(memory, list) else [memory]
        return Devices(devices, [byte_count(size) for size in sizes])
    if memory is not None:
        raise ValueError(
            "device_map says of each module where it is, and memory how much of a GPU they may "
            'take; give one of them: device_map="auto" places blocks by memory, or max_memory'
        )
    return Devices([device for device in devices if device.type == "cuda"], None, where)


def limited(caps: dict[int, int], memory: Any) -> dict[int, int]:
    """Limits the bytes of each GPU by `memory`: one size for all, or a list of sizes."""
    if memory is None:
        return caps
    sizes = memory if isinstance(memory, list) else [memory] * len(caps)
    if len(sizes) != len(caps):
        raise ValueError(
            f"memory has {len(sizes)} sizes for {len(caps)} GPUs; name one for each, or a single "
            "one for all"
        )
    pairs = zip(caps.items(), sizes, strict=True)
    return {gpu: min(cap, byte_count(size)) for (gpu, cap), size in pairs}


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
        return list(dict.fromkeys(spot.path for each in self.items for spot in each.spots))


def group(items: list[Item], container: Any) -> list[Group]:
    groups = {block.name: Group() for block in container.blocks}
    for item in items:
        block = container[item.sources[0]].block if item.sources else container.blocks[0].name
        groups[block].items.append(item)
    return [each for each in groups.values() if each.items]


def place(groups: list[Group], placement: Devices, wanted: str) -> None:
    """Gives each group its device and residence.
    Raises `ValueError` if a GPU is too small, or a `device_map` says several things of one group.
    """
    devices, memory = placement.devices, placement.memory
    if devices[0].type != "cuda":
        return
    if placement.where is not None:
        _place_by_modules(groups, placement.where, devices[0])
    elif len(devices) > 1:
        _spread(groups, placement, wanted)
    else:
        for each in groups:
            each.device = devices[0]
    for at, device in enumerate(devices):
        mine = [each for each in groups if each.device == device and each.residence != "streamed"]
        budget = None if memory is None else memory[at]
        if budget is None and wanted == "auto":
            budget = int(SHARE * torch.cuda.mem_get_info(device)[0])
        forms: list[Residence] = ["streamed", "stored", "fast"]
        table = [{form: each.nbytes(form) for form in forms} for each in mine]
        for each, form in zip(mine, settle(table, budget, wanted), strict=True):
            each.residence = form


def _spread(groups: list[Group], placement: Devices, wanted: str) -> None:
    if wanted == "streamed":
        raise ValueError("streamed puts all weights on one GPU; name one device")
    assert placement.memory is not None
    forms: list[Residence] = ["stored"] if wanted == "stored" else ["fast", "stored"]
    sizes = [[each.nbytes(form) for each in groups] for form in forms]

    def fits(caps: list[int]) -> bool:
        return spread(sizes[0], caps) is not None

    memory = balance(placement.memory, placement.order, fits)
    found = next((some for each in sizes if (some := spread(each, memory)) is not None), None)
    # The last one streams what is too much for all.
    found = found or spread(sizes[-1], [*memory[:-1], sum(sizes[-1])])
    assert found is not None
    for each, at in zip(groups, found, strict=True):
        each.device = placement.devices[at]


def _place_by_modules(
    groups: list[Group], where: dict[str, torch.device], main: torch.device
) -> None:
    for each in groups:
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
    """The first place with room for each of some sizes, in turn; None if there is too little."""
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
    """The residence of each group of one GPU, from the first on, by bytes of each group in each
    residence, and the bytes that all may take. `auto` is fast if all that is stored fits, and as
    far as the budget goes. Raises ValueError if the GPU is too small.
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
    for step in steps[: {"streamed": 0, "stored": 1}.get(wanted, 2)]:
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
    """The device of each module that runs on one: around a group if no other is in there."""
    paths = [each.paths for each in groups]
    #: How many groups have weights in each module.
    held = Counter(around for mine in paths for around in {a for p in mine for a in outer(p)})
    result: dict[str, torch.device] = {}
    for each, mine in zip(groups, paths, strict=True):
        path = common(mine)
        while path and not is_callable(path):
            path = path.rpartition(".")[0]
        alone = path and held[path] == 1
        result.update(dict.fromkeys([path] if alone else mine, each.device))
    return result
