"""Changes of a module's memory since its containers were loaded.

The origin of each weight describes its loaded value: windows of tensors of the container, which are
decoded again to be compared, or a digest of its values. Names count too: a layer that took another
layer's place has that layer's name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._matrices import FAST
from ._modules import Entry, entries, local
from ._origin import Origin, Weight, digest, settled
from ._tensor import CompressedTensor, dense

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
    kept = {name: entry for name, entry in now.items() if entry.is_persistent}
    seen: dict[tuple[int, int], bool] = {}

    def is_same(name: str, entry: Entry, weight: Weight) -> bool:
        key = id(entry.value), id(weight)
        if key not in seen:
            seen[key] = is_as_loaded(origin, weight, entry.value, name)
        return seen[key]

    differing = [
        name
        for name, entry in kept.items()
        if name in held and not is_same(name, entry, held[name])
    ]
    new = {name: entry.value for name, entry in kept.items() if name not in held}
    return Changes([name for name in held if name not in now], differing, new)


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
    if value.dtype != torch.bfloat16:
        return False
    expected = origin.tensors.rebuild(weight.description)
    if expected.shape != value.shape or _has_arrays(value, expected):
        return expected.shape == value.shape
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
    if isinstance(value, CompressedTensor) and any(part.residence == FAST for part in value.parts):
        value = value.decode()
    return value.cpu()


def _bits(value: Tensor) -> Tensor:
    return dense(value).reshape(-1).view(torch.uint8)
