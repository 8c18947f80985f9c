"""Loads the weights of a container into a module: compressed tensors, and ordinary ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import _native
from ._bring import bring
from ._container import Tensors
from ._names import look_up, outer
from ._parallel import like
from ._parameters import entries
from ._place import Placement
from ._plan import Item, group, homes, place, why_ordinary
from ._progress import Bar
from ._source import KEY, Source, Spot, Weight, sum_of
from ._tensor import CompressedTensor
from ._torch import raw_stream

MODES = ("exact", "fused")
RESIDENCES = ("stored", "fast", "auto")


def check_options(mode: str, residence: str) -> None:
    """Raises ValueError for words that mean nothing."""
    for name, value, known in (("mode", mode, MODES), ("residence", residence, RESIDENCES)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


@torch.inference_mode(False)  # whose tensors could not be used outside of it
def load(
    root: nn.Module,
    tensors: Tensors,
    items: list[Item],
    placement: Placement,
    *,
    mode: str = "exact",
    residence: str = "stored",
) -> None:
    """Puts what was made of a container's tensors into a module, on the devices of a placement.

    Reads and checks all of these tensors, once. On the CPU compressed ones stay in the mapping.

    # Errors
    `CorruptError` if a tensor is damaged; `ValueError` if a GPU is too small.
    """
    main = placement.devices[0]
    modules = dict(root.named_modules(remove_duplicate=False))
    items = _known(root, items, tensors.container, main.type == "cuda")
    groups = group(items, tensors.container)
    place(groups, placement, residence)
    where = placement.where or homes(groups, lambda path: _is_callable(modules[path]))
    if main.type == "cuda":
        where = {path: main if home.type == "cpu" else home for path, home in where.items()}
    runs_on = _devices(modules, where, main)
    source = Source(tensors, unused=[name for name in tensors if name not in tensors.used])
    root.__dict__[KEY] = source
    with (bar := Bar(sum(item.stored_bytes for item in items))):
        # Of these only decoded values were taken, unchecked so far.
        held = {name for item in items if item.is_compressed for name in item.sources}
        tensors.check(tensors.taken - held)
        for item, value in bring(tensors, groups, mode == "exact", bar):
            path = item.places[0].path
            spots = [Spot(modules[place.path], place) for place in item.places]
            value = value if item.reason is None else value.to(runs_on[path])
            source.weights.append(_put(item, value, spots, tensors))
    place_others(root, source, runs_on)
    if len({*where.values()}) > 1:
        _dispatch(root, where)
    source.tensors = Tensors(tensors.container)  # without all that loading has made
    check_gpus(each.device for each in groups)
    for weight in source.weights:
        weight.total = None if weight.total is None else int(weight.total)


def check_gpus(devices: Iterable[torch.device]) -> None:
    """Waits for those that are GPUs. Raises CorruptError if a kernel met damaged arrays there."""
    for device in set(devices):
        if device.type == "cuda":
            _native.check(device.index, raw_stream(device.index))


def _known(root: nn.Module, items: list[Item], container: Any, on_gpu: bool) -> list[Item]:
    """Items with all places where the module has them, each parameter once, and why ordinary."""
    entries_by_name = {place.name: entry for entry in entries(root) for place in entry.places}
    found: dict[int, Item] = {}
    for item in items:
        entry = entries_by_name[item.name]
        if found.setdefault(id(entry.value), item) is item:
            item.places = list(entry.places)
            item.reason = why_ordinary(item, container, entry.is_buffer, on_gpu)
    return list(found.values())


def _is_callable(module: nn.Module) -> bool:
    """Whether it has a forward, so that hooks of it run."""
    return type(module).forward is not nn.Module.forward


def _devices(
    modules: dict[str, nn.Module], where: dict[str, torch.device], main: torch.device
) -> dict[str, torch.device]:
    """Where each module runs: with the one around it, or else with the one before it."""
    found, before = {}, main
    for path in modules:
        before = where.get(path, before)
        found[path] = look_up(where, path) or before
    return found


def _put(item: Item, value: Tensor, spots: list[Spot], tensors: Tensors) -> Weight:
    """Makes a tensor what the module has in all places of a weight, and tells what it was."""
    weight = Weight(item.name, spots, value.numel() * value.element_size(), item.reason)
    if isinstance(item.value, CompressedTensor):
        weight.told = tensors.told(item.value)
    else:
        weight.total = sum_of(item.value if isinstance(value, CompressedTensor) else value)
    value = like(value, spots[0].value)
    if not spots[0].is_buffer:
        value = nn.Parameter(value, requires_grad=False)
    for spot in spots:
        spot.value = value
    item.value = _NOTHING
    return weight


#: What an item has when it is in its place, so that no decoded weights are kept.
_NOTHING = torch.empty(0)


def place_others(root: nn.Module, source: Source, runs_on: Mapping[str, torch.device]) -> None:
    """Buffers and parameters that are none of its weights go where their module runs."""
    held = {spot.key for spot in source.spots}
    for entry in entries(root):
        spots = [Spot(root.get_submodule(each.path), each) for each in entry.places]
        if entry.value.is_meta or not held.isdisjoint(spot.key for spot in spots):
            continue
        devices = {runs_on[spot.place.path] for spot in spots}
        moved = {device: entry.value.to(device) for device in devices}
        for spot in spots:
            value = moved[runs_on[spot.place.path]]
            if entry.is_buffer:
                spot.value = value
            else:
                entry.value.data = value.data


def _dispatch(root: nn.Module, where: dict[str, torch.device]) -> None:
    """Has accelerate move activations between several devices."""
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    result: dict[str, Any] = dict(where)
    around = {path for home in where for path in outer(home)}
    for path, module in root.named_modules():
        if look_up(where, path) is not None:
            continue
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, value in tensors:
            key = path if path not in around else f"{path}.{name}" if path else name
            result[key] = value.device
    skip = getattr(root, "_skip_keys_device_placement", None)
    dispatch_model(
        root, device_map={path: device.index for path, device in result.items()}, skip_keys=skip
    )
