"""What a module with compressed weights has from which containers."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _native
from ._container import Tensors
from ._names import Place
from ._online import Made, Stamp, again
from ._parallel import local
from ._tensor import CompressedTensor
from ._torch import bytes_of

#: Under which a module keeps its `Source`.
KEY = "_df11"


class Ref:
    """A module that this does not keep alive; a copy of a model has references to its own."""

    def __init__(self, module: nn.Module | None) -> None:
        self._held = None if module is None else weakref.ref(module)

    @property
    def module(self) -> Any:
        """The module, while it lives, or None."""
        return None if self._held is None else self._held()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        return type(self)(deepcopy(self.module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)


class Spot(Ref):
    """Where a module has a parameter or buffer: by the module, whatever wraps it later."""

    def __init__(self, module: nn.Module | None, place: Place) -> None:
        super().__init__(module)
        self.place = place

    @property
    def key(self) -> tuple[int, str]:
        """What no other spot has."""
        return id(self.module), self.place.attribute

    @property
    def _table(self) -> dict[str, Any]:
        module: Any = self.module
        if module is None:
            return {}
        found = module._buffers if self.place.attribute in module._buffers else module._parameters
        return cast(dict[str, Any], found)

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter."""
        return self.place.attribute in getattr(self.module, "_buffers", ())

    @property
    def value(self) -> Tensor | None:
        """What is there now."""
        return self._table.get(self.place.attribute)

    @value.setter
    def value(self, value: Tensor) -> None:
        self._table[self.place.attribute] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Spot:
        return Spot(deepcopy(self.module, memo), self.place)

    def __reduce__(self) -> tuple[Any, ...]:
        return Spot, (self.module, self.place)


@dataclass
class Weight:
    """What a module has of a container, in one place or, tied, in several."""

    name: str
    spots: list[Spot]
    #: Its decoded size.
    nbytes: int
    #: Why it is an ordinary parameter and does not stay compressed.
    reason: str | None
    #: What it is of the container (`Tensors.told`), or else `sum_of` its bits when it was loaded.
    told: Any = None
    total: Any = None

    @property
    def value(self) -> Tensor | None:
        """What is in its place now, if anything."""
        return next((value for spot in self.spots if (value := spot.value) is not None), None)


def sum_of(value: Tensor) -> Tensor:
    """The sum of a tensor's bits as numbers, where the tensor is. Reads it once."""
    flat = bytes_of(value.detach())
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = nn.functional.pad(flat, (0, -flat.numel() % 8))
    return flat.view(torch.int64).sum()


@dataclass
class Source:
    """The weights of a module that came from a container."""

    tensors: Tensors
    weights: list[Weight] = field(default_factory=list)
    #: Tensors of the container that belong to no parameter.
    unused: list[str] = field(default_factory=list)
    #: What made the container while the model was loaded.
    made: Made | None = None
    #: While the container is not open: where it is, or what it was made of.
    path: str | Path = ""
    #: The identity of a container that has to be made again, or of its files.
    identity: str | Stamp | None = None
    #: Whether weights were packed from BF16, and no container was there.
    is_packed: bool = False

    @classmethod
    def of_files(cls, folder: Path, files: Stamp, weights: list[Weight]) -> Source:
        """Of weights whose container has not been made, and is if it is asked for."""
        source = object.__new__(cls)
        source.__dict__.update(
            weights=weights, unused=[], made=None, path=folder, identity=files, is_packed=True
        )
        return source

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        copy = self._copy()
        copy.weights = deepcopy(self.weights, memo)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        copy = self._copy()
        copy.close()
        return copy.__dict__

    def _copy(self) -> Source:
        copy = object.__new__(Source)
        copy.__dict__.update(self.__dict__)
        return copy

    def close(self) -> None:
        """Lets go of the container, which is opened or made again if it is asked for."""
        if self.made is not None:
            self.identity = self.container.identity
        self.path = self.place
        self.made = None
        self.__dict__.pop("tensors", None)

    @property
    def is_open(self) -> bool:
        """Whether the container is open."""
        return "tensors" in self.__dict__

    @property
    def place(self) -> str | Path:
        """Where the weights came from."""
        if not self.is_open:
            return self.path
        return self.container.path if self.made is None else self.made.folder

    def __getattr__(self, name: str) -> Any:
        if name != "tensors":
            raise AttributeError(name)
        if self.identity is not None:
            self.made = again(Path(self.path), self.identity)
        container = _native.open(self.path) if self.made is None else self.made.container
        self.tensors = Tensors(container)
        return self.tensors

    @property
    def container(self) -> Any:
        """The open container."""
        return self.tensors.container

    @property
    def spots(self) -> Iterator[Spot]:
        """Where its weights are."""
        return (spot for weight in self.weights for spot in weight.spots)

    def found(self) -> Iterator[tuple[Weight, Tensor]]:
        """Each weight with what is in its place now; none that were taken away since."""
        for weight in self.weights:
            if (value := weight.value) is not None:
                yield weight, value


def sources(model: Any) -> list[tuple[str, Source]]:
    """The sources in a module or in the components of a pipeline, with their module's path."""
    is_module = isinstance(model, nn.Module)
    components = None if is_module else getattr(model, "components", None)
    members = components.values() if isinstance(components, dict) else [model]
    inner = (one if isinstance(one, nn.Module) else getattr(one, "model", None) for one in members)
    modules = (pair for one in inner if isinstance(one, nn.Module) for pair in one.named_modules())
    found = ((path, module.__dict__.get(KEY)) for path, module in modules)
    return [(path, source) for path, source in found if source is not None]


def keep(source: Source, made: Made | None) -> None:
    """Has a source keep what its containers are made by, as long as weights are read there."""
    if made is None:
        return
    source.made = made
    values = (local(value) for _, value in source.found())
    compressed = [value for value in values if isinstance(value, CompressedTensor)]
    if not any(value.is_streamed or value.device.type == "cpu" for value in compressed):
        source.close()


def copy_containers(source: Source, folder: Path) -> None:
    """Puts copies of all containers of a model into a folder, and of the files that belong to them
    and are not there, such as the tokenizer.
    """
    was_open = source.is_open
    _copy(source, folder)
    for name in source.container.side_files:
        path, target = Path(source.place, name), folder / name
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if source.made is not None and not was_open:
        source.close()


def _copy(source: Source, folder: Path) -> None:
    for shard in source.container.shards:
        path, made = Path(shard["path"]), source.made
        target = folder / path.name
        if made is None and target.exists() and target.samefile(path):
            continue
        # Under its name only when it is whole.
        partial = target.with_name(f".{target.name}.part")
        try:
            shutil.copyfile(path if made is None else made.file(shard["path"]), partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
