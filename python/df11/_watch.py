"""Raises errors for problems that GPU kernels found: damaged weights, indices out of range.

Kernels record problems in a word of pinned host memory. Reading the word needs neither a wait nor a
copy, so every operator reads it first. `generate` reads it before it returns a token, and pipelines
of transformers and diffusers read it before they return a result; tokens and results are on the
host only after the kernels that made them. Problems of a process's last operator are printed when
the process ends.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable
from typing import Any

import torch

from . import _native
from ._matrices import raw_stream
from ._origin import KEY
from ._tensor import CompressedTensor
from ._wrapping import wrap, wrap_listed


def raise_if_damaged(device: torch.device | int | None = None) -> None:
    """Raises problems of kernels that are done by now, on one GPU or all. Takes nanoseconds.

    Raises `CorruptError` if weights contradicted themselves, `IndexError` if an index of a row was
    out of range.
    """
    _native.check_done(device.index if isinstance(device, torch.device) else device)


def check_gpus(devices: Iterable[torch.device]) -> None:
    """Like `raise_if_damaged`, for all started kernels: waits for the GPUs among the devices."""
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
    """Makes a model's `generate` (if any) and pipelines raise before they return wrong results, and
    its `get_memory_footprint` count compressed bytes. Changes the defining classes once, without
    effect on other models.
    """
    for name, replacement in (("generate", _generate), ("get_memory_footprint", _footprint)):
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if owner is not None:
            wrap((owner, name, replacement))
    if "transformers.modeling_utils" in sys.modules:
        wrap_listed({"transformers.pipelines.base:Pipeline.forward": _forward})
    if "diffusers" in sys.modules:
        pipeline = "diffusers.pipelines.pipeline_utils:DiffusionPipeline"
        wrap_listed({f"{pipeline}.maybe_free_model_hooks": _end})


def _footprint(call: Any, arguments: dict[str, Any]) -> Any:
    """Corrects the footprint: libraries multiply numbers of elements by the size of one."""
    some = {id(value): value for value in arguments["self"].parameters()}.values()
    compressed = (value for value in some if isinstance(value, CompressedTensor))
    return call() - sum(value.numel() * value.element_size() - value.nbytes for value in compressed)


def _forward(call: Any, arguments: dict[str, Any]) -> Any:
    outputs = call()  # on the host
    raise_if_damaged()
    return outputs


def _end(call: Any, arguments: dict[str, Any]) -> None:
    """Checks in the last call that a pipeline of diffusers makes before it returns."""
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
