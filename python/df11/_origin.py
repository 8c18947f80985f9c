"""Records from which containers a module's compressed weights came, and finds what has changed
since.

The origin of each weight describes its loaded value: as windows of the container's tensors, which
are decoded again for comparison, or as a digest of its values. Names count too: a layer that took
another layer's place has that layer's name.

Containers made from BF16 files while a model loads have no names: each file is deleted as soon as
it is open, and its memory is freed when nothing uses it any longer, even if the process is killed.
If the process is killed before that, the next run removes the files. Windows does not delete mapped
files: there a file stays in a temporary folder, which the next run removes.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _native
from ._container import Tensors
from ._dispatch import dense
from ._modules import Entry, Spot, entries, local
from ._platform import TEMPORARY, places, quoted, unlink_mapped
from ._tensor import CompressedTensor

KEY = "_df11"
#: Folders for these containers: in memory, or among temporary files if memory is too small.
PLACES = places()
_SUFFIX = ".safetensors"
#: Remedy for a checkpoint that cannot be compressed while it is loaded.
SAVE_AGAIN = "load it in BF16, save it with save_pretrained(FOLDER), and load FOLDER"


class Made:
    """The containers of a folder with BF16 weights, or of one file, as `df11 compress` writes them:
    on all cores, 1 GB/s each. Raises `OSError` if there is no room for them, and the errors of
    `df11.compress`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        held = ExitStack()
        weakref.finalize(self, held.close)
        name = f"{folder.stem}.df11" if folder.is_file() else "model"
        # Side files stay there, so the containers can be verified.
        out = held.enter_context(_native.TemporaryFolder(_place(folder))) / name
        _native.compress(folder, out, verify=False)
        self.container: Any = _native.open(out, in_memory=True)
        for shard in self.container.shards:
            unlink_mapped(Path(shard["path"]))


Stamp = tuple[tuple[str, int, int], ...]
Digest = tuple[str, tuple[int, ...], Any]
#: Words that one product takes, which bounds the memory of a digest.
_WORDS = 1 << 22
_CARRY = -0x61C8864680B583EB


def stamp(folder: Path) -> Stamp:
    files = [folder] if folder.is_file() else sorted(folder.rglob(f"*{_SUFFIX}"))
    stats = ((path, path.stat()) for path in files)
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def remake(folder: Path, identity: str | Stamp) -> Made:
    """Makes the containers once more.
    Raises `ValueError` if the folder, or the containers' identity, has changed.
    """
    if isinstance(identity, str) or stamp(folder) == identity:
        made = Made(folder)
        if identity in (made.container.identity, stamp(folder)):
            return made
    raise ValueError(
        f"{folder} holds other weights than when the model was loaded; load the model again"
    )


def bf16_folder(files: Sequence[str] | None) -> Path:
    """The folder of a checkpoint's weights files, if they can be compressed. Raises `ValueError` if
    they cannot, or in one of several distributed processes.
    """
    if not files:
        raise ValueError("df11 compresses the files of a checkpoint; name it in from_pretrained")
    first = Path(files[0])
    if first.suffix != _SUFFIX:
        raise ValueError(
            f"df11 compresses safetensors files, and the checkpoint is {first.name}; {SAVE_AGAIN}"
        )
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "several processes would each compress the whole model; run "
            f"`df11 compress {quoted(first.parent)} -o FOLDER` once and load FOLDER"
        )
    return first.parent


def made_of(files: Sequence[str] | None) -> Made:
    """Compresses the weights files of a checkpoint. Raises the errors of `bf16_folder` and `Made`;
    `ValueError` if a file is not compressed, such as that of a variant.
    """
    made = Made(bf16_folder(files))
    taken = {Path(name).name for name in made.container.weights_files}
    left = [Path(file).name for file in files or () if Path(file).name not in taken]
    if left:
        raise ValueError(
            f"df11 compresses the weights that load by default, and {left[0]} is not among them; "
            "run `df11 compress MODEL -o FOLDER --variant …` and load FOLDER"
        )
    return made


def _place(folder: Path) -> Path:
    count = sum(size for _, size, _ in stamp(folder))
    roomy = next((place for place in PLACES if place.is_dir() and _free(place) > count), None)
    if roomy is None:
        where = " and ".join(map(str, PLACES))
        raise OSError(
            f"{where} have no room for {count:,} bytes, which is the most that compressed weights "
            f"take while they are loaded; set {TEMPORARY} to a folder that has"
        )
    return roomy


def _free(place: Path) -> int:
    return shutil.disk_usage(place).free


@dataclass
class Weight:
    name: str
    spots: list[Spot]
    nbytes: int
    #: Why it is an ordinary parameter and does not stay compressed.
    reason: str | None
    #: Its place in the container (`Tensors.describe`), or else the `digest` of its loaded values.
    description: Any = None
    digest: Digest | None = None

    @property
    def value(self) -> Tensor | None:
        return next((value for spot in self.spots if (value := spot.value) is not None), None)


def digest(value: Tensor) -> Digest:
    """Computes a digest that differs for different values: dtype, shape, and the sum of all 16-bit
    words, each times a number of its place. Other or moved values give another sum, except by
    chance (less than once in 2^40 cases) or on purpose. Computed on the tensor's device, without
    waiting.
    """
    flat = dense(value.detach()).contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 2 or flat.storage_offset() % 2:
        flat = nn.functional.pad(flat, (0, flat.numel() % 2))
    words, total = flat.view(torch.int16), torch.zeros((), dtype=torch.int64, device=flat.device)
    factors = _factors(min(len(words), _WORDS), flat.device)
    for some in torch.split(words, _WORDS) if len(words) else ():
        total = total * _CARRY + some.to(torch.int64).mul_(factors[: len(some)]).sum()
    return str(value.dtype), tuple(value.shape), total


def settled(digest: Digest) -> Digest:
    """The digest as Python numbers. Waits for the device."""
    return (*digest[:2], int(digest[2]))


def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits without a pattern (SplitMix64), the same ones each time."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_CARRY)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31).bitwise_or_(1)


@dataclass
class Origin:
    #: A container, or the files from which it is made.
    path: str | Path
    weights: list[Weight] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    held: Tensors | None = None
    made: Made | None = None
    #: The container's identity, or the stamp of the files if no container was made.
    identity: str | Stamp | None = None
    #: The name in a store that opens it, if `path` leaves its signature out.
    full_path: str | None = field(default=None, repr=False)
    #: Whether the container must be made again from the files at `path`.
    is_of_files: bool = False
    #: Whether weights were packed from BF16, and no container was there.
    is_packed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return replace(self, weights=deepcopy(self.weights, memo))

    def __getstate__(self) -> dict[str, Any]:
        copy = replace(self)
        copy.close()
        return copy.__dict__

    def add(self, root: nn.Module, names: Container[str]) -> None:
        """Adds the weights that a loader itself made from the containers, with their values now."""
        held = {spot.key for spot in self.spots}
        for entry in entries(root):
            name = next((spot.name for spot in entry.spots if spot.name in names), None)
            if name is None or not held.isdisjoint(spot.key for spot in entry.spots):
                continue
            reason = f"used as {entry.value.dtype}".replace("torch.", "")
            loaded, nbytes = settled(digest(entry.value)), entry.value.nbytes
            self.weights.append(Weight(name, entry.spots, nbytes, reason, None, loaded))

    def keep(self, made: Made) -> None:
        """Keeps the made containers while weights are read from them."""
        self.made, self.path, self.is_of_files = made, made.folder, True
        values = (local(value) for _, value in self.live_weights())
        compressed = [value for value in values if isinstance(value, CompressedTensor)]
        if not any(value.is_streamed or value.device.type == "cpu" for value in compressed):
            self.close()

    def close(self) -> None:
        """Releases the container. The next use opens it, or makes it again."""
        self.made = self.held = None

    @property
    def tensors(self) -> Tensors:
        if self.held is None:
            self.held = Tensors(self._open())
        return self.held

    def _open(self) -> Any:
        if self.is_of_files:
            assert self.identity is not None
            self.made = remake(Path(self.path), self.identity)
            return self.made.container
        container = _native.open(self.full_path or self.path, in_memory=True)
        if container.identity != self.identity:
            raise ValueError(
                f"{self.path} holds another model than when this one was loaded from it; load the "
                "model again"
            )
        return container

    @property
    def container(self) -> Any:
        return self.tensors.container

    @property
    def spots(self) -> Iterator[Spot]:
        return (spot for weight in self.weights for spot in weight.spots)

    def live_weights(self) -> Iterator[tuple[Weight, Tensor]]:
        for weight in self.weights:
            if (value := weight.value) is not None:
                yield weight, value


def members(model: Any) -> list[nn.Module]:
    """The module itself, the modules of a pipeline, or the module in a wrapper."""
    is_module = isinstance(model, nn.Module)
    components = None if is_module else getattr(model, "components", None)
    some = components.values() if isinstance(components, dict) else [model]
    inner = (one if isinstance(one, nn.Module) else getattr(one, "model", None) for one in some)
    return [one for one in inner if isinstance(one, nn.Module)]


def rooted(model: Any) -> list[tuple[str, nn.Module, Origin]]:
    """The modules with compressed weights: path, module, and origin of the weights."""
    modules = (pair for one in members(model) for pair in one.named_modules())
    loaded = ((path, module, module.__dict__.get(KEY)) for path, module in modules)
    return [(path, module, origin) for path, module, origin in loaded if origin is not None]


def origins(model: Any) -> list[tuple[str, Origin]]:
    return [(path, origin) for path, _, origin in rooted(model)]


#: Attributes that are equal for views of the same arrays.
_COMPARED = ("flat_parts", "transposed", "shape")


class Changes(NamedTuple):
    """Names that the module has now."""

    #: Weights of the containers that the module no longer has.
    gone: list[str]
    #: Weights with other values, another shape or dtype.
    differing: list[str]
    #: Parameters and persistent buffers that the containers lack.
    new: dict[str, Tensor]

    @property
    def names(self) -> list[str]:
        return [*self.differing, *self.gone, *self.new]


def changes_of(root: nn.Module, origin: Origin) -> Changes:
    """Compares all weights of a module with their loaded values. Reads each once, and decodes
    compressed ones twice, one after another. Raises `ValueError` for weights without memory, and
    for a container that was replaced.
    """
    held = {spot.name: weight for weight in origin.weights for spot in weight.spots}
    now = {spot.name: entry for entry in entries(root) for spot in entry.spots}
    seen: dict[tuple[int, int], bool] = {}

    def is_same(name: str, entry: Entry, weight: Weight) -> bool:
        key = id(entry.value), id(weight)
        if key not in seen:
            seen[key] = is_as_loaded(origin, weight, entry.value, name)
        return seen[key]

    differing = [
        name
        for name, entry in now.items()
        if name in held and (not is_same(name, entry, held[name]) or _is_untied(held[name], now))
    ]
    new = {
        name: entry.value for name, entry in now.items() if name not in held and entry.is_persistent
    }
    return Changes([name for name in held if name not in now], differing, new)


def _is_untied(weight: Weight, now: dict[str, Entry]) -> bool:
    """Whether tied parameters are now separate. The containers have only one of them, even if all
    are equal.
    """
    names = (spot.name for spot in weight.spots)
    return len({id(now[name].value) for name in names if name in now}) > 1


@torch.no_grad()
def is_as_loaded(origin: Origin, weight: Weight, value: Tensor, name: str = "") -> bool:
    """Whether a value equals the loaded value of a weight, bit for bit."""
    value = local(value.detach())
    if value.is_meta:
        raise ValueError(
            f"{name or weight.name} has no memory here: it was offloaded; bring it back first, as "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) does"
        )
    if weight.description is None:
        return settled(digest(value)) == weight.digest
    expected = origin.tensors.rebuild(weight.description)
    if (expected.shape, expected.dtype) != (value.shape, value.dtype):
        return False
    if _has_arrays(value, expected):
        return True
    return torch.equal(_bits(_on_cpu(value)), _bits(expected))


def _has_arrays(value: Tensor, expected: CompressedTensor) -> bool:
    """Whether it is a view of the same compressed arrays; nobody can write to these."""
    if not isinstance(value, CompressedTensor):
        return False
    if any(getattr(value, name) != getattr(expected, name) for name in _COMPARED):
        return False
    first, second = (
        [(array.data_ptr(), array.numel()) for array in one._kept] for one in (value, expected)
    )
    return first == second


def _on_cpu(value: Tensor) -> Tensor:
    """A value on the CPU. A GPU decodes the fast layout, which no CPU can."""
    if isinstance(value, CompressedTensor) and any(part.is_fast for part in value.parts):
        value = value.decode()
    return value.cpu()


def _bits(value: Tensor) -> Tensor:
    return dense(value).reshape(-1).view(torch.uint8)
