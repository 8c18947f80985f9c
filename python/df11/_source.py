"""What a module with compressed weights has from which containers."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _native
from ._parameters import Weight

#: Under which a module keeps its `Source`.
KEY = "_df11"


class Spot:
    """Where a module has a parameter or buffer: by the module, whatever wraps it later.

    A copy of the model has copies of its spots. A spot does not keep its module alive.
    """

    def __init__(self, module: nn.Module | None, attribute: str) -> None:
        self._module = None if module is None else weakref.ref(module)
        self.attribute = attribute

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return None if self._module is None else self._module()

    @property
    def key(self) -> tuple[int, str]:
        """What no other spot has."""
        return id(self.module), self.attribute

    @property
    def value(self) -> torch.Tensor | None:
        """What is there now."""
        module = self.module
        if module is None:
            return None
        found = module._parameters.get(self.attribute)
        return module._buffers.get(self.attribute) if found is None else found

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        module = self.module
        assert module is not None
        table: dict[str, Any] = module._parameters
        (module._buffers if self.attribute in module._buffers else table)[self.attribute] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Spot:
        return Spot(deepcopy(self.module, memo), self.attribute)

    def __reduce__(self) -> tuple[Any, ...]:
        return Spot, (self.module, self.attribute)


@dataclass
class Source:
    """The weights of a module that came from a container."""

    container: Any
    weights: list[Weight]
    #: Of each weight.
    spots: list[list[Spot]] = field(default_factory=list)
    #: Tensors of the container that belong to no parameter.
    unused: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return Source(self.container, self.weights, deepcopy(self.spots, memo), self.unused)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "path": self.container.path}
        del state["container"]
        return state

    def __getattr__(self, name: str) -> Any:
        # A pickled model has its weights with it; the container is opened if it is asked for.
        if name != "container":
            raise AttributeError(name)
        self.container = _native.open(self.path)
        return self.container

    def found(self) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Each weight with what is in its place now; none that were taken away since."""
        for weight, spots in zip(self.weights, self.spots, strict=True):
            value = next((spot.value for spot in spots if spot.value is not None), None)
            if value is not None:
                yield weight, value


def set_source(root: nn.Module, source: Source) -> None:
    """Has a module know where its weights came from."""
    source.spots = [
        [Spot(root.get_submodule(place.path), place.attribute) for place in weight.places]
        for weight in source.weights
    ]
    root.__dict__[KEY] = source


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
