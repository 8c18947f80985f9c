"""Loads the weights of a container into a module: compressed tensors, and ordinary ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import _native, _plan
from ._bring import bring
from ._container import Tensors
from ._devices import Devices, device_of, free_bytes, resolve
from ._doctor import log_newer
from ._errors import unfit
from ._hub import resolve_path
from ._modules import entries, join, like, look_up, outer
from ._origin import KEY, Origin, Weight, digest, origins, settled
from ._parameters import by_conversion, by_name, check_complete
from ._plan import Item
from ._progress import Bar
from ._siblings import join_siblings
from ._tensor import CompressedTensor
from ._watch import check_gpus, watch

Module = TypeVar("Module", bound=nn.Module)
#: Options of a loaded model with their values, for all libraries; the first one is the default.
OPTIONS = {"mode": ("exact", "fused"), "residence": ("auto", "fast", "stored")}


def attach(
    module: Module,
    path: str | Path,
    *,
    device: Any = None,
    mode: str = "exact",
    residence: str = "auto",
    memory: Any = None,
    streamed: bool = False,
    prefix: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    base: str | Path | None = None,
) -> Module:
    """Gives a module the weights of a container, which stay compressed. Returns the module.

    The container's weights, with their dtypes, replace the parameters: matrices stay compressed,
    small parameters are ordinary. Parameters that diffusers or transformers keep in F32 are F32
    here too. A module on the meta device (`accelerate.init_empty_weights()`) never takes memory for
    its own weights.

    `path`: a container, a folder of them, or the name of a repository of the Hub ("org/name"),
    whose containers are fetched into the cache; `subfolder` and `revision` apply to that
    repository. It may also be the name of a store that `df11.open` takes, such as
    "s3://bucket/model"; its containers are fetched into memory. `device`: a GPU, the CPU, a list of
    GPUs, "auto" for all GPUs, or a dict of modules like the `device_map` of transformers. Default:
    the current GPU, or the CPU if there is none. `mode`, `residence`, `memory`, `streamed`: as in
    `df11.Config`. `base`: the model against which this one was compressed, if it has moved since;
    tensors stored as differences are decoded. `prefix`: added to names in the container; found
    automatically unless given.

    Raises MissingError if the container lacks a parameter, ValueError if a shape differs or an
    option is unknown, TypeError if a dtype is unknown.
    """
    if origins(module):
        raise ValueError("the module has compressed weights already; make a new one")
    log_newer()
    check_options(mode=mode, residence=residence)
    place = resolve_path(path, revision, subfolder)
    tensors = Tensors(_native.open(place, in_memory=True, base=base))
    placement = _placement(device, memory)
    items = _converted(module, tensors) if prefix is None else None
    if items is None:
        items = by_name(module, tensors, prefix)
    check_complete(module, items, tensors.container)
    wanted = "streamed" if streamed else residence
    load(module, tensors, items, placement, mode=mode, residence=wanted)
    watch(module)
    return module.eval()


def _converted(module: nn.Module, tensors: Tensors) -> list[Item] | None:
    """Converts a container's tensors like the module's library; None without a library."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" in kinds:
        from ._pretrained import by_loader

        return by_loader(module, tensors)
    if "diffusers.loaders.single_file_model.FromOriginalModelMixin" in kinds:
        return by_conversion(module, tensors)
    return None


def _placement(device: Any, memory: Any) -> Devices:
    if isinstance(device, dict):
        return resolve(device, memory)
    if device == "auto":
        devices = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())]
    else:
        several = device if isinstance(device, (list, tuple)) else [device]
        devices = [device_of(one) for one in several]
        if len(set(devices)) == 1:
            return resolve({"": devices[0]}, memory)
        if any(one.type != "cuda" for one in devices):
            raise ValueError(
                "a list of devices names GPUs; with memory= what does not fit on them is streamed "
                'from the host, and a dict says of modules where they go, to "cpu" too'
            )
    caps = {one.index: free_bytes(one) for one in devices}
    return resolve("auto", memory, caps)


def check_options(**options: Any) -> None:
    for name, value in options.items():
        if value not in (known := OPTIONS[name]):
            raise unfit(f"{name}={value!r} is unknown", f"choose one of {', '.join(known)}")


@torch.inference_mode(False)  # whose tensors could not be used outside of it
def load(
    root: nn.Module,
    tensors: Tensors,
    items: list[Item],
    placement: Devices,
    *,
    mode: str,
    residence: str,
) -> None:
    """Puts the items made from a container's tensors into a module, on the devices of a placement.
    Reads and checks all of these tensors once. On the CPU compressed ones stay in the mapping.
    Raises `CorruptError` if a tensor is damaged; `ValueError` if a GPU is too small.
    """
    main = placement.devices[0]
    modules = dict(root.named_modules(remove_duplicate=False))
    items = _known(root, items, tensors.container, main.type == "cuda")
    blocks = _plan.by_block(items, tensors.container)
    _plan.place(blocks, placement, residence)
    where = placement.where or _plan.homes(blocks, lambda path: _is_callable(modules[path]))
    if main.type == "cuda":
        where = {path: main if home.type == "cpu" else home for path, home in where.items()}
    runs_on = _devices(modules, where, main)
    unused = [name for name in tensors if name not in tensors.used]
    container = tensors.container
    origin = Origin(container.path, unused=unused, held=tensors, identity=container.identity)
    origin.full_path = container.full_path
    root.__dict__[KEY] = origin
    with (bar := Bar(sum(item.stored_bytes for item in items))):
        # Only decoded values of these tensors were used, unchecked so far.
        held = {name for item in items if item.is_compressed for name in item.tensor_names}
        tensors.check(tensors.taken - held)
        for item, value in bring(tensors, blocks, mode == "exact", bar):
            if item.reason is not None:
                value = value.to(runs_on[item.spots[0].path])
            origin.weights.append(_put(item, value, tensors))
    place_others(root, origin, runs_on)
    join_siblings(root)
    if len({*where.values()}) > 1:
        _dispatch(root, where)
    origin.held = Tensors(tensors.container)  # without the objects of loading
    check_gpus(each.device for each in blocks)
    for weight in origin.weights:
        weight.digest = None if weight.digest is None else settled(weight.digest)


def _known(root: nn.Module, items: list[Item], container: Any, on_gpu: bool) -> list[Item]:
    """Adds to each item its spots in the module and, if it is ordinary, the reason."""
    entries_by_name = {spot.name: entry for entry in entries(root) for spot in entry.spots}
    by_parameter: dict[int, Item] = {}
    for item in items:
        entry = entries_by_name[item.name]
        if by_parameter.setdefault(id(entry.value), item) is item:
            item.spots = entry.spots
            item.reason = _plan.why_ordinary(item, container, entry.is_buffer, on_gpu)
    return list(by_parameter.values())


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _devices(
    modules: dict[str, nn.Module], where: dict[str, torch.device], main: torch.device
) -> dict[str, torch.device]:
    home, before = {}, main
    for path in modules:
        before = where.get(path, before)
        home[path] = look_up(where, path) or before
    return home


def _put(item: Item, value: Tensor, tensors: Tensors) -> Weight:
    spots = item.spots
    weight = Weight(item.name, spots, value.numel() * value.element_size(), item.reason)
    if isinstance(item.value, CompressedTensor):
        weight.description = tensors.describe(item.value)
    else:
        weight.digest = digest(item.value if isinstance(value, CompressedTensor) else value)
    value = like(value, spots[0].value)
    if not spots[0].is_buffer:
        value = nn.Parameter(value, requires_grad=False)
    for spot in spots:
        spot.value = value
    item.value = torch.empty(0)  # drops decoded weights
    return weight


def place_others(root: nn.Module, origin: Origin, runs_on: Mapping[str, torch.device]) -> None:
    """Moves buffers and parameters that are not its weights to the device of their module."""
    held = {spot.key for spot in origin.spots}
    for entry in entries(root):
        if entry.value.is_meta or not held.isdisjoint(spot.key for spot in entry.spots):
            continue
        devices = {runs_on[spot.path] for spot in entry.spots}
        moved = {device: entry.value.to(device) for device in devices}
        for spot in entry.spots:
            value = moved[runs_on[spot.path]]
            if entry.is_buffer:
                spot.value = value
            else:
                entry.value.data = value.data


def _dispatch(root: nn.Module, where: dict[str, torch.device]) -> None:
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    result: dict[str, Any] = dict(where)
    enclosing = {path for home in where for path in outer(home)}
    for path, module in root.named_modules():
        if look_up(where, path) is not None:
            continue
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, value in tensors:
            result[join(path, name) if path in enclosing else path] = value.device
    skip = getattr(root, "_skip_keys_device_placement", None)
    dispatch_model(
        root, device_map={path: device.index for path, device in result.items()}, skip_keys=skip
    )
