"""Loads the weights of a container into a module: compressed tensors, and ordinary ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._names import inside, look_up
from ._parallel import like, shard
from ._parameters import Weight
from ._place import SHARE, Placement
from ._plan import Group, Item, Residence, group, homes, settle, spread
from ._progress import Bar
from ._source import Source, set_source
from ._tensor import CompressedTensor, arrays_of_tiles

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
    source: Source,
    placement: Placement,
    *,
    mode: str = "exact",
    residence: str = "stored",
    streamed: bool = False,
) -> None:
    """Puts the weights of a source into a module, on the devices of a placement.

    Reads and checks all of the container. On the CPU compressed weights stay in its mapping.
    """
    check_options(mode, residence)
    on_gpu = placement.devices[0].type == "cuda"
    shard(root, source)
    groups = group(source.weights, source.container, on_gpu)
    _place(groups, placement, "streamed" if streamed else residence)
    where = placement.where or homes(groups, lambda path: _is_callable(root.get_submodule(path)))
    main = placement.devices[0]
    where = {
        path: main if on_gpu and device.type == "cpu" else device for path, device in where.items()
    }
    set_source(root, source)
    order = {path: at for at, (path, _) in enumerate(root.named_modules())}
    total = sum(item.read_bytes(source.container) for each in groups for item in each.items)
    loader = _Loader(source, mode == "exact", where, order, main, total)
    with loader.bar:
        for each in groups:
            loader.load(each)
    _place_others(root, source, loader)
    if len({*where.values()}) > 1:
        _dispatch(root, where)


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
        found = None
        for form in forms_of(wanted):
            sizes = [each.nbytes(form) for each in groups]
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


def sizes_of(source: Source, residence: str) -> list[int]:
    """Bytes of a GPU that each block takes, as it shall lie."""
    groups = group(source.weights, source.container, on_gpu=True)
    return [each.nbytes(forms_of(residence)[0]) for each in groups]


def forms_of(residence: str) -> list[Residence]:
    """How weights shall lie, if there is room, and how else."""
    return ["stored"] if residence in ("stored", "streamed") else ["fast", "stored"]


def _place_by_modules(
    groups: list[Group], where: dict[str, torch.device], main: torch.device
) -> None:
    for each in groups:
        said: dict[torch.device, str] = {}
        for item in each.items:
            for place in item.weight.places if item.reason is None else ():
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

    source: Source
    exact: bool
    #: Of modules that run on one device, that device.
    where: dict[str, torch.device]
    #: Of each module its number, in the order in which the model has them.
    order: dict[str, int]
    #: Where modules run of which nothing else is known.
    main: torch.device
    #: Stored bytes of all weights.
    total: int

    def __post_init__(self) -> None:
        self.container = self.source.container
        pairs = zip(self.source.weights, self.source.spots, strict=True)
        self.spots = {id(weight): spots for weight, spots in pairs}
        self.bar = Bar(self.total)

    def load(self, each: Group) -> None:
        """Puts the weights of a group into their places."""
        if each.device.type == "cuda":
            from ._gpu import upload

            for item, tensor in upload(self.container, each, self.exact, self.bar):
                if tensor is None:
                    item.reason = "too many exceptions for the fast layout"
                else:
                    self.put(item.weight, tensor)
        for item in each.items:
            if item.reason is not None:
                item.weight.ordinary_because = item.reason
                device = self.device_at(item.weight.places[0].path)
                self.put(item.weight, item.weight.decode(self.container).to(device))
            elif each.device.type == "cpu":
                self.put(item.weight, on_cpu(item, self.exact, self.bar))

    def put(self, weight: Weight, value: torch.Tensor) -> None:
        """Makes it what the module has in all places of the weight."""
        spots = self.spots[id(weight)]
        value, weight.parts = like(value, spots[0].value), None
        parameter = value if weight.is_buffer else nn.Parameter(value, requires_grad=False)
        for spot in spots:
            spot.value = parameter

    def device_at(self, path: str) -> torch.device:
        """Where a module runs: with the one around it, or else with the one before it."""
        device = look_up(self.where, path)
        if device is not None:
            return device
        before = [p for p in self.where if self.order.get(p, 0) <= self.order.get(path, 0)]
        return self.where[max(before, key=lambda p: self.order.get(p, 0))] if before else self.main


def on_cpu(item: Item, exact: bool, bar: Bar) -> torch.Tensor:
    """A compressed weight whose arrays are the container's own memory, after a check of them."""
    for tiles in item.tiles.values():
        tiles.check()
        bar.add(sum(tiles.lengths))
    arrays = {name: arrays_of_tiles(tiles) for name, tiles in item.tiles.items()}
    return compressed(item, arrays, exact)


def compressed(
    item: Item,
    arrays: dict[str, list[torch.Tensor]],
    exact: bool,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The tensor of a weight as it is stored, of the arrays of its tensors."""
    return CompressedTensor(
        [array for name, _ in item.parts for array in arrays[name]],
        [part for _, part in item.parts],
        item.weight.shape,
        exact=exact,
        transposed=item.weight.transposed,
        device=device,
    )


def _place_others(root: nn.Module, source: Source, loader: _Loader) -> None:
    """Buffers and parameters that the container lacks go where their module runs."""
    held = {spot.key for spots in source.spots for spot in spots}
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
