"""Reports what kernels on GPUs met and could not raise: damaged weights, indices out of range.

Kernels tell it in a word of pinned host memory. Whoever reads that waits for nothing and copies
nothing, so every operator does before it begins. So do `generate`, before a token leaves it, and
pipelines of transformers and diffusers, before a result does: these are on the host only when the
kernels before them are done. Damage that the last operator of a process met is told when it ends.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable
from typing import Any

import torch

from . import _native
from ._hub import wrap
from ._matrices import raw_stream
from ._origin import KEY
from ._tensor import CompressedTensor


def raise_if_damaged(device: torch.device | int | None = None) -> None:
    """Raises what kernels told that are done by now, of one GPU or of all. Takes nanoseconds.

    Raises `CorruptError` if weights contradicted themselves, `IndexError` if an index of a row was
    out of range.
    """
    _native.check_done(device.index if isinstance(device, torch.device) else device)


def check_gpus(devices: Iterable[torch.device]) -> None:
    """As `raise_if_damaged`, of all that was started: waits for those devices that are GPUs."""
    for device in set(devices):
        if device.type == "cuda":
            _native.check(device.index, raw_stream(device.index))


class _Streamer:
    """A streamer of transformers, whose tokens are on the host."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer

    def put(self, value: Any) -> None:
        raise_if_damaged()
        self._streamer.put(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)


def watch(model: Any) -> None:
    """Has a model's `generate`, if it has one, and pipelines raise before they hand out wrong
    results, and its `get_memory_footprint` count what compressed weights take. The classes that
    define them are changed once, and no other model by that.
    """
    for name, around in (("generate", _generate), ("get_memory_footprint", _footprint)):
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if owner is not None:
            wrap((owner, name, around))
    if "transformers.modeling_utils" in sys.modules:
        from transformers.pipelines import base

        wrap((base.Pipeline, "forward", _forward))
    if "diffusers" in sys.modules:
        from diffusers import DiffusionPipeline

        wrap((DiffusionPipeline, "maybe_free_model_hooks", _end))


def _footprint(call: Any, arguments: dict[str, Any]) -> Any:
    """Libraries multiply numbers of elements by the size of one."""
    some = {id(value): value for value in arguments["self"].parameters()}.values()
    compressed = (value for value in some if isinstance(value, CompressedTensor))
    return call() - sum(value.numel() * value.element_size() - value.nbytes for value in compressed)


def _forward(call: Any, arguments: dict[str, Any]) -> Any:
    outputs = call()  # on the host
    raise_if_damaged()
    return outputs


def _end(call: Any, arguments: dict[str, Any]) -> None:
    """The last that a pipeline of diffusers does before it returns."""
    call()
    modules = arguments["self"].components.values()
    check_gpus(value.device for one in modules for value in getattr(one, "parameters", list)())


def _generate(call: Any, arguments: dict[str, Any]) -> Any:
    model = arguments["self"]
    if KEY not in vars(model):
        return call()
    if call.keywords.get("streamer") is not None:
        call.keywords["streamer"] = _Streamer(call.keywords["streamer"])
    tokens = call()
    check_gpus({value.device for value in model.parameters()})
    return tokens


atexit.register(raise_if_damaged)
