"""Loads the weights of a container into a module: compressed tensors, and ordinary ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import _native
from ._container import Tensors, of_windows
from ._names import Place, inside, look_up
from ._parallel import like
from ._parameters import entries
from ._place import SHARE, Placement
from ._plan import Group, Item, Residence, balance, group, homes, settle, spread, why_ordinary
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
    on_gpu = main.type == "cuda"
    items = _known(root, items)
    for item in items:
        is_buffer = _spot(root, item.places[0]).is_buffer
        item.reason = item.reason or why_ordinary(item, tensors.container, is_buffer, on_gpu)
    groups = group(items, tensors.container)
    _place(groups, placement, residence)
    where = placement.where or homes(groups, lambda path: _is_callable(root.get_submodule(path)))
    where = {
        path: main if on_gpu and device.type == "cpu" else device for path, device in where.items()
    }
    order = {path: at for at, (path, _) in enumerate(root.named_modules())}
    bar = Bar(sum(item.stored_bytes for item in items))
    source = Source(tensors, unused=[name for name in tensors if name not in tensors.used])
    loader = _Loader(root, source, mode == "exact", where, order, main, bar)
    root.__dict__[KEY] = source
    compressed = [item for item in items if item.reason is None]
    with bar:
        # Of these only decoded values were taken, unchecked so far.
        tensors.check(tensors.taken - {name for item in compressed for name in item.sources})
        for each in groups:
            loader.load(each)
    _place_others(root, loader)
    if len({*where.values()}) > 1:
        _dispatch(root, where)
    source.tensors = Tensors(tensors.container)  # without all that loading has made
    check_gpus(each.device for each in groups)


def check_gpus(devices: Iterable[torch.device]) -> None:
    """Waits for those that are GPUs. Raises CorruptError if a kernel met damaged arrays there."""
    for device in set(devices):
        if device.type == "cuda":
            _native.check(device.index, raw_stream(device.index))


def _known(root: nn.Module, items: list[Item]) -> list[Item]:
    """Items with all places where the module has them, each parameter once."""
    entries_by_name = {place.name: entry for entry in entries(root) for place in entry.places}
    found: dict[int, Item] = {}
    for item in items:
        entry = entries_by_name[item.name]
        item.places = list(entry.places)
        found.setdefault(id(entry.value), item)
    return list(found.values())


def _spot(root: nn.Module, place: Place) -> Spot:
    return Spot(root.get_submodule(place.path), place)


def _is_callable(module: nn.Module) -> bool:
    """Whether it has a forward, so that hooks of it run."""
    return type(module).forward is not nn.Module.forward


def _place(groups: list[Group], placement: Placement, wanted: str) -> None:
    """Gives each group its device and residence."""
    devices, memory = placement.devices, placement.memory
    if devices[0].type != "cuda":
        return
    if placement.where is not None:
        _place_by_modules(groups, placement.where, devices[0])
    elif len(devices) > 1:
        if wanted == "streamed":
            raise ValueError("streamed puts all weights on one GPU; name one device")
        assert memory is not None
        by_form = [[each.nbytes(form) for each in groups] for form in forms_of(wanted)]
        memory = balance(memory, placement.order, lambda caps: spread(by_form[0], caps) is not None)
        found = None
        for sizes in by_form:
            found = found or spread(sizes, memory)
        # What is too much for all is for the last one to stream.
        found = found or spread(sizes, [*memory[:-1], sum(sizes)])
        assert found is not None
        for each, at in zip(groups, found, strict=True):
            each.device = devices[at]
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


def forms_of(residence: str) -> list[Residence]:
    """How weights shall lie, if there is room, and how else."""
    return ["stored"] if residence in ("stored", "streamed") else ["fast", "stored"]


def _place_by_modules(
    groups: list[Group], where: dict[str, torch.device], main: torch.device
) -> None:
    for each in groups:
        said: dict[torch.device, str] = {}
        for item in each.items:
            for place in item.places if item.reason is None else ():
                device = look_up(where, place.name)
                if device is None:
                    raise ValueError(
                        f'device_map names no device for {place.name}; name one, or one for "", '
                        "which is all that it does not name"
                    )
                said.setdefault(device, place.name)
        (first, one), *others = said.items() or [(main, "")]
        for second, other in others:
            raise ValueError(
                f"device_map puts {one} on {first} and {other} on {second}, which are weights of "
                "one block, or tied; give both the same device"
            )
        each.device = main if first.type == "cpu" else first
        each.residence = "streamed" if first.type == "cpu" else "stored"


@dataclass
class _Loader:
    """Makes parameters, group by group."""

    root: nn.Module
    source: Source
    exact: bool
    #: Of modules that run on one device, that device.
    where: dict[str, torch.device]
    #: Of each module its number, in the order in which the model has them.
    order: dict[str, int]
    #: Where modules run of which nothing else is known.
    main: torch.device
    bar: Bar
    #: What an item has when it is in its place, so that no decoded weights are kept.
    nothing: Tensor = field(default_factory=lambda: torch.empty(0))

    def load(self, each: Group) -> None:
        """Puts the weights of a group into their places."""
        left = [item for item in each.items if item.reason is not None]
        for item, tensor in self._compressed(each):
            if tensor is not None:
                self._put(item, tensor)
            else:
                item.reason = "too many exceptions for the fast layout"
                left.append(item)
        for item in left:
            value = item.value
            device = self.device_at(item.places[0].path)
            value = value.decode() if isinstance(value, CompressedTensor) else value
            self._put(item, value.to(device))

    def _compressed(self, each: Group) -> Iterator[tuple[Item, CompressedTensor | None]]:
        tensors, exact, bar = self.source.tensors, self.exact, self.bar
        if each.device.type == "cuda":
            from ._gpu import upload

            return upload(tensors, each.items, each.device, each.residence, exact, bar)
        return on_cpu(tensors, [item for item in each.items if item.reason is None], exact, bar)

    def _put(self, item: Item, value: Tensor) -> None:
        """Makes it what the module has in all places of the weight."""
        spots = [_spot(self.root, place) for place in item.places]
        nbytes = value.numel() * value.element_size()
        weight = Weight(item.name, spots, nbytes, item.reason)
        if isinstance(item.value, CompressedTensor) and item.reason is None:
            weight.told = self.source.tensors.told(item.value)
        else:
            weight.total = sum_of(item.value if isinstance(value, CompressedTensor) else value)
        self.source.weights.append(weight)
        value = like(value, spots[0].value)
        parameter = value if spots[0].is_buffer else nn.Parameter(value, requires_grad=False)
        for spot in spots:
            spot.value = parameter
        item.value = self.nothing

    def device_at(self, path: str) -> torch.device:
        """Where a module runs: with the one around it, or else with the one before it."""
        device = look_up(self.where, path)
        if device is not None:
            return device
        before = [p for p in self.where if self.order.get(p, 0) <= self.order.get(path, 0)]
        return self.where[max(before, key=lambda p: self.order.get(p, 0))] if before else self.main


def on_cpu(
    tensors: Tensors, items: list[Item], exact: bool, bar: Bar
) -> Iterator[tuple[Item, CompressedTensor]]:
    """Compressed weights whose arrays are the container's own memory, after a check of them."""
    values = [item.value for item in items if isinstance(item.value, CompressedTensor)]
    windows, tiles = tensors.around(values)
    arrays = tensors.on_host(tiles)
    bar.add(sum(array.numel() for mine in arrays.values() for array in mine))
    for mine in arrays.values():
        mine.append(torch.empty(0, dtype=torch.uint8))
    for item, value, some in zip(items, values, windows, strict=True):
        yield item, of_windows(value, some, arrays, exact=exact)


def _place_others(root: nn.Module, loader: _Loader) -> None:
    """Buffers and parameters that the container lacks go where their module runs."""
    held = {spot.key for weight in loader.source.weights for spot in weight.spots}
    for path, module in root.named_modules():
        for attribute, value in module._buffers.items():
            if value is not None and not value.is_meta and (id(module), attribute) not in held:
                module._buffers[attribute] = value.to(loader.device_at(path))
        for attribute, parameter in module._parameters.items():
            here = parameter is None or parameter.is_meta or (id(module), attribute) in held
            if not here:
                parameter.data = parameter.data.to(loader.device_at(path))


def _dispatch(root: nn.Module, where: dict[str, torch.device]) -> None:
    """Has accelerate move activations between several devices."""
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    result: dict[str, Any] = dict(where)
    for path, module in root.named_modules():
        if look_up(where, path) is not None:
            continue
        around = any(inside(home, path) for home in where)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, value in tensors:
            result[(f"{path}.{name}" if path else name) if around else path] = value.device
    skip = getattr(root, "_skip_keys_device_placement", None)
    dispatch_model(
        root, device_map={path: device.index for path, device in result.items()}, skip_keys=skip
    )
