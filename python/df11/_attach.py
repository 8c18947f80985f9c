"""Compressed weights for any module."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from . import _native
from ._container import Tensors
from ._hub import brought
from ._load import check_gpus, check_options, load
from ._names import join
from ._parallel import gathered
from ._parameters import by_name, check_complete, entries
from ._place import Placement, default_device, device_of, resolve
from ._source import copy_containers, sources
from ._tensor import CompressedTensor

Module = TypeVar("Module", bound=nn.Module)


def attach(
    module: Module,
    path: str | Path,
    *,
    device: Any = None,
    mode: str = "exact",
    residence: str = "stored",
    memory: Any = None,
    streamed: bool = False,
    prefix: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Module:
    """Gives a module the weights of a container, which stay compressed. Returns the module.

    Parameters are replaced by those of the container, with its dtypes: matrices by tensors that are
    decoded as they are used, small ones as they are. What diffusers or transformers would keep in
    F32 beside weights of 16 bits is F32 here as well. The module may be on the meta device
    (`accelerate.init_empty_weights()`), so that its own weights never take memory.

    `path`: a container, a folder of them, or the name of a repository of the Hub ("org/name"),
    whose containers are fetched into its cache; `subfolder` of it, and `revision` there.
    `device`: a GPU, the CPU, a list of GPUs, or "auto" for all; a dict of modules as `device_map`
    of transformers takes it; the current GPU unless named, or the CPU if there is none.
    `mode`: "exact" multiplies decoded weights as PyTorch does, for the BF16 module's bits; "fused"
    multiplies while it decodes, which is faster and rounds otherwise.
    `residence`: how weights lie on a GPU: "stored", in the "fast" layout, which is larger and
    faster, or "auto", fast as far as memory goes.
    `memory`: bytes of GPU memory for weights, such as "9GB" (a list for several GPUs); what does
    not fit stays in pinned host memory, from where the GPU reads it, and all of it with `streamed`.
    `prefix`: what goes before names in the container, found unless given.

    Raises MissingError if the container lacks a parameter, ValueError if a shape differs or an
    option is unknown, TypeError if a dtype is unknown.
    """
    if sources(module):
        raise ValueError("the module has compressed weights already; make a new one")
    check_options(mode, residence)
    tensors = Tensors(_native.open(brought(path, revision, subfolder)))
    placement = _placement(device, memory)
    if prefix is not None or not _is_pretrained(module):
        items = by_name(module, tensors, prefix)
    else:
        from ._pretrained import by_loader

        items = by_loader(module, tensors)
    check_complete(module, items, tensors.container)
    form = "streamed" if streamed else residence
    load(module, tensors, items, placement, mode=mode, residence=form)
    return module.eval()


def _placement(device: Any, memory: Any) -> Placement:
    if isinstance(device, dict):
        return resolve(device, memory)
    if device == "auto":
        devices = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())]
    else:
        several = device if isinstance(device, (list, tuple)) else [device]
        devices = [default_device() if one is None else device_of(one) for one in several]
        if len(set(devices)) == 1:
            return resolve({"": devices[0]}, memory)
        if any(one.type != "cuda" for one in devices):
            raise ValueError(
                "a list of devices names GPUs; with memory= what does not fit on them is streamed "
                'from the host, and a dict says of modules where they go, to "cpu" too'
            )
    caps = {one.index: torch.cuda.mem_get_info(one.index)[0] for one in devices}
    return resolve("auto", memory, caps)


def _is_pretrained(module: nn.Module) -> bool:
    return any(
        f"{kind.__module__}.{kind.__name__}" == "transformers.modeling_utils.PreTrainedModel"
        for kind in type(module).__mro__
    )


def save(model: Any, folder: str | Path) -> None:
    """Copies the containers of a model with compressed weights into a folder, byte for byte."""
    found = [source for _, source in sources(model)]
    if not found:
        raise ValueError("the model has no compressed weights of df11")
    paths = {shard["path"] for source in found for shard in source.container.shards}
    if len({Path(path).name for path in paths}) < len(paths):
        raise ValueError(
            "containers of the model's modules have the same names; save each module by itself"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    for source in found:
        copy_containers(source, Path(folder))


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Decoded copies of all weights, in host memory: as large as the BF16 model.

    Names are those of `model.state_dict()`; what an adapter wraps has its own name, without the
    wrapper's. All processes of a distributed model must call it at once, and each gets whole
    weights.

    # Errors
    `CorruptError` if a kernel met damaged weights.
    """
    names = {
        spot.key: join(path, spot.place.name)
        for path, source in sources(model)
        for spot in source.spots
    }
    out: dict[str, torch.Tensor] = {}
    found = [entry for entry in entries(model) if entry.is_persistent]
    for entry in found:
        copy = plain(entry.value)
        for place in entry.places:
            key = (id(model.get_submodule(place.path)), place.attribute)
            out[names.get(key, place.name)] = copy
    check_gpus(entry.value.device for entry in found)
    return out


def plain(value: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, decoded."""
    value = gathered(value.detach())
    return (value.decode() if isinstance(value, CompressedTensor) else value).cpu().clone()
