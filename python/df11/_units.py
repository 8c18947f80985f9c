"""Units: modules whose weights are decoded together, just before the module's forward.

The container's blocks say which weights are used together; a unit is the smallest module around all weights
of one block. Where that module holds others' weights too (a head that is tied to the embedding has the whole
model around both), or is a mere list, the weights go to the modules further in. So no unit lies in another
one, and what is decoded for one is not needed while another one runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ._parameters import Place, Weight

#: Weights start on a multiple of this many bytes, as PyTorch's own allocations do: which kernel a library
#: picks may depend on it.
ALIGNMENT = 256
#: Vectors up to this many bytes are ordinary parameters: norms and biases, used everywhere and too small to
#: matter.
SMALL_VECTOR = 1 << 20
#: What is stored as it is costs nothing to keep up to this many bytes.
SMALL_RAW = 64 << 10


@dataclass
class Unit:
    """A module and the weights that are decoded before it runs."""

    path: str
    weights: list[Weight] = field(default_factory=list)
    #: Where each weight begins in the unit's memory, in bytes.
    starts: list[int] = field(default_factory=list)
    nbytes: int = 0
    blocks: set[str] = field(default_factory=set)

    def lay_out(self) -> None:
        """Gives each weight its place; tied ones come first, so that they lie the same in each unit."""
        self.weights.sort(key=lambda weight: len(weight.places) == 1)
        end = 0
        for weight in self.weights:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.starts.append(start)
            end = start + weight.nbytes
        self.nbytes = end


def settle_residents(weights: Iterable[Weight], container: Any) -> None:
    """Marks the weights that are ordinary parameters: small ones, and uncompressed ones."""
    for weight in weights:
        if weight.resident_because is not None:
            continue
        if weight.is_buffer:
            weight.resident_because = "a buffer"
        elif (len(weight.shape) < 2 and weight.nbytes <= SMALL_VECTOR) or (
            all(container[name].encoding == "raw" for name in weight.tensors) and weight.nbytes <= SMALL_RAW
        ):
            weight.resident_because = "small"


def find_units(root: nn.Module, weights: list[Weight], container: Any) -> list[Unit]:
    """Units of all weights that are not resident, in the order of modules. Marks what fits in none."""
    settle_residents(weights, container)
    _settle_raw(weights, container)
    groups: dict[tuple[str, ...], list[tuple[str, Weight]]] = defaultdict(list)
    for weight in weights:
        if weight.resident_because is not None:
            continue
        blocks = tuple(sorted({container[name].block for name in weight.tensors}))
        for path in {id(_module(root, place)): place.path for place in reversed(weight.places)}.values():
            groups[blocks].append((_callable_path(root, path), weight))
    all_paths = [path for members in groups.values() for path, _ in members]
    units: dict[str, Unit] = {}
    for members in groups.values():
        _split(root, members, all_paths, units)
    order = {path: at for at, (path, _) in enumerate(root.named_modules())}
    result = sorted(
        (unit for unit in units.values() if unit.weights), key=lambda unit: order.get(unit.path, 0)
    )
    for unit in result:
        unit.blocks = {container[name].block for weight in unit.weights for name in weight.tensors}
        unit.lay_out()
    return result


def _module(root: nn.Module, place: Place) -> nn.Module:
    return root.get_submodule(place.path)


def _settle_raw(weights: list[Weight], container: Any) -> None:
    """Weights of blocks in which nothing is coded are better left alone."""
    coded = {container[name].block for name in container if container[name].encoding != "raw"}
    for weight in weights:
        if weight.resident_because is None and not any(
            container[name].block in coded for name in weight.tensors
        ):
            weight.resident_because = "stored as it is"


def is_callable(module: nn.Module) -> bool:
    """Whether it has a forward, so that hooks of it run."""
    return type(module).forward is not nn.Module.forward


def _callable_path(root: nn.Module, path: str) -> str:
    while path and not is_callable(root.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def inside(path: str, outer: str) -> bool:
    """Whether a module is another one, or lies in it."""
    return outer == "" or path == outer or path.startswith(outer + ".")


def _common(paths: list[str]) -> str:
    common = paths[0].split(".") if paths[0] else []
    for path in paths[1:]:
        parts = path.split(".") if path else []
        same = 0
        while same < min(len(common), len(parts)) and common[same] == parts[same]:
            same += 1
        common = common[:same]
    return ".".join(common)


def _split(
    root: nn.Module, members: list[tuple[str, Weight]], all_paths: list[str], units: dict[str, Unit]
) -> None:
    outer = _common([path for path, _ in members])
    here = [weight for path, weight in members if path == outer]
    own = {path for path, _ in members}
    others = any(inside(path, outer) and path not in own for path in all_paths)
    if is_callable(root.get_submodule(outer)) and not others and (outer or len(own) == 1):
        unit = units.setdefault(outer, Unit(outer))
        known = {id(weight) for weight in unit.weights}
        unit.weights.extend({id(w): w for _, w in members if id(w) not in known}.values())
        return
    nested = any(path != outer and inside(path, outer) for path in all_paths)
    for weight in here:
        if nested:
            weight.resident_because = "used by a module around other blocks"
        else:
            unit = units.setdefault(outer, Unit(outer))
            if all(weight is not known for known in unit.weights):
                unit.weights.append(weight)
    deeper: dict[str, list[tuple[str, Weight]]] = defaultdict(list)
    for path, weight in members:
        if path != outer:
            deeper[path[len(outer) :].lstrip(".").split(".")[0]].append((path, weight))
    for inner in deeper.values():
        _split(root, inner, all_paths, units)
