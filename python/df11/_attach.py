"""Compressed weights for any module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from . import _native
from ._hub import brought
from ._parameters import MissingError, Weight, by_name, missing_error
from ._place import Placement, byte_count, default_device, device_of, resolve, set_up
from ._runtime import KEY, Runtime, runtimes

Module = TypeVar("Module", bound=nn.Module)


def attach(
    module: Module,
    path: str | Path,
    *,
    device: Any = None,
    memory: Any = None,
    streamed: bool = False,
    prefetch: bool = False,
    prefix: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Module:
    """Gives a module the weights of a container, compressed until they are used. Returns the module.

    Parameters are replaced by those of the container, with its dtypes, and those of each block are decoded
    just before its forward; which ones these are is found from the container. What diffusers or transformers
    would keep in F32 beside weights of 16 bits is F32 here as well. The module may be on the meta
    device (`accelerate.init_empty_weights()`), so that its own weights never take memory.

    `path`: a container, a folder of them, or the name of a repository of the Hub ("org/name"), whose
    containers are fetched into its cache; `subfolder` of it, and `revision` there. `device`: a GPU, the CPU,
    a list of GPUs, or "auto" for all; a dict of modules as `device_map` of transformers takes it; the current
    GPU unless named, or the CPU where there is none. `memory`: bytes of GPU memory for weights and decoded
    blocks, such as "9GB" (a list for several GPUs); blocks that do not fit are streamed from pinned host
    memory, all of them with `streamed`. `prefetch`: decode a block while the one before it runs, which takes
    memory for two. `prefix`: what goes before names in the container, found unless given.

    Raises MissingError where the container lacks a parameter, ValueError where a shape differs, TypeError
    where a dtype is unknown.
    """
    if runtimes(module):
        raise ValueError("the module has compressed weights already; make a new one")
    container = _native.open(brought(path, revision, subfolder))
    weights, unused = _weights(module, container, prefix)
    placement = _placement(device, memory, container)
    runtime = Runtime(module, container, weights, prefetch=prefetch)
    runtime.unused_tensors = unused
    set_up(runtime, placement, streamed)
    return module.eval()


def _placement(device: Any, memory: Any, container: Any) -> Placement:
    options = SimpleNamespace(memory=memory)
    if device == "auto":
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        return resolve("auto", options, container, {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in gpus})
    if isinstance(device, dict):
        return resolve(device, options)
    if isinstance(device, (list, tuple)):
        devices = [device_of(one) for one in device]
        if len(set(devices)) == 1:
            return resolve({"": devices[0]}, options)
        if any(one.type != "cuda" for one in devices):
            raise ValueError(
                "a list of devices names GPUs; with memory= what does not fit on them is streamed from the host, "
                'and a dict says of modules where they go, to "cpu" too'
            )
        caps = {one.index: torch.cuda.mem_get_info(one.index)[0] for one in devices}
        return resolve("auto", options, container, caps)
    chosen = default_device() if device is None else device_of(device)
    budgets = None if memory is None or chosen.type != "cuda" else [byte_count(memory)]
    return Placement([chosen], budgets)


def _weights(module: nn.Module, container: Any, prefix: str | None) -> tuple[list[Weight], list[str]]:
    if prefix is not None or not _is_pretrained(module):
        return by_name(module, container, prefix)
    # transformers has tables of its own for names.
    from transformers.conversion_mapping import get_model_conversion_mapping

    from ._pretrained import missing, weights_of

    pretrained: Any = module
    weights, unused = weights_of(pretrained, container, get_model_conversion_mapping(pretrained), None)
    if lacking := missing(pretrained, weights):
        raise missing_error(lacking, container)
    held = {place.name for weight in weights for place in weight.places}
    if lost := [name for name, value in module.named_buffers() if value.is_meta and name not in held]:
        raise ValueError(
            f"buffer {lost[0]} is on the meta device and in no checkpoint; load with from_pretrained, or "
            "make the module with "
            "accelerate.init_empty_weights()"
        )
    return weights, unused


def _is_pretrained(module: nn.Module) -> bool:
    return any(
        f"{kind.__module__}.{kind.__name__}" == "transformers.modeling_utils.PreTrainedModel"
        for kind in type(module).__mro__
    )


def save(model: Any, folder: str | Path) -> None:
    """Copies the containers of a model with compressed weights into a folder, byte for byte."""
    from ._copy import copy_containers

    found = runtimes(model)
    if not found:
        raise ValueError("the model has no compressed weights of df11")
    paths = {shard["path"] for runtime in found for shard in runtime.container.shards}
    if len({Path(path).name for path in paths}) < len(paths):
        raise ValueError("containers of the model's parts have the same names; save each part by itself")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for runtime in found:
        copy_containers(runtime.container, Path(folder))


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Decoded copies of all weights, in host memory: as large as the BF16 model."""
    out: dict[str, torch.Tensor] = {}
    found = runtimes(model)
    for path, module in model.named_modules():
        runtime = module.__dict__.get(KEY)
        if runtime is None or runtime.root is not module:
            continue
        for weight in runtime.weights:
            value = weight.decode(runtime.container)
            if weight.is_persistent:
                out.update({f"{path}.{place.name}" if path else place.name: value for place in weight.places})
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        module = model.get_submodule(name.rpartition(".")[0])
        # Adapters give what they wrap another name; here it has its own.
        is_there = name in out or any(runtime.holds(value) for runtime in found)
        if not is_there and name.rpartition(".")[2] not in module._non_persistent_buffers_set:
            out[name] = value.detach().cpu().clone()
    return out


__all__ = ["MissingError", "attach", "save", "state_dict"]
