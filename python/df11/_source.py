"""What a module with compressed weights has from which containers."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _native
from ._container import Tensors
from ._names import Place
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return Source(self.tensors, deepcopy(self.weights, memo), self.unused)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "path": self.tensors.container.path}
        del state["tensors"]
        return state

    def __getattr__(self, name: str) -> Any:
        # A pickled model has its weights with it; the container is opened if it is asked for.
        if name != "tensors":
            raise AttributeError(name)
        self.tensors = Tensors(_native.open(self.path))
        return self.tensors

    @property
    def container(self) -> Any:
        """The open container."""
        return self.tensors.container

    def found(self) -> Iterator[tuple[Weight, Tensor]]:
        """Each weight with what is in its place now; none that were taken away since."""
        for weight in self.weights:
            if (value := weight.value) is not None:
                yield weight, value


def sources(model: Any) -> list[tuple[str, Source]]:
    """The sources in a module or in the components of a pipeline, with their module's path."""
    if isinstance(model, nn.Module):
        parts: Iterable[Any] = [model]
    else:
        components = getattr(model, "components", None)
        parts = components.values() if isinstance(components, dict) else [model]
        parts = [
            part if isinstance(part, nn.Module) else getattr(part, "model", None) for part in parts
        ]
    modules = [
        pair for part in parts if isinstance(part, nn.Module) for pair in part.named_modules()
    ]
    found = ((path, module.__dict__.get(KEY)) for path, module in modules)
    return [(path, source) for path, source in found if source is not None]


def copy_containers(container: Any, folder: Path) -> None:
    """Puts copies of all containers of a model into a folder."""
    for shard in container.shards:
        source = Path(shard["path"])
        target = folder / source.name
        if target.exists() and target.samefile(source):
            continue
        # Under its name only when it is whole.
        part = target.with_name(f".{target.name}.part")
        try:
            shutil.copyfile(source, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
