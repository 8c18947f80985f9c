"""Workers of vLLM in service, if some weights of a model are compressed.

They raise before they return tokens from damaged weights. Kernels report damage in host memory
(`_watch`), so reading a report needs no wait. The reports of a step's kernels are complete as soon
as the step's tokens are: when a worker returns them, or when `get_output` of its result has waited
for them. With several workers, vLLM asks most of them for no output (with tensor parallelism, all
except one), and only logs their exceptions. So a worker in its own process ends with the exception,
at the latest when its next step begins, and vLLM stops an engine that has lost a worker.

They refuse to load, drop, write or hash weights, because vLLM does this through a model's
parameters. Compressed weights are not parameters, and compiled graphs have the addresses of their
arrays. So these calls would leave old weights, or write files without weights, some of them
silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing import parent_process
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

from .._watch import check_gpus, raise_if_damaged
from .._wrapping import wrap, wrap_listed
from ._layers import NAMES

logger = init_logger("vllm.plugins.df11")

_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_Call = Callable[[], Any]
#: Kinds of outputs that wait for their tokens and check.
_checked: set[type] = set()


def watch_steps() -> None:
    """Makes all workers of this process check. Raises `ImportError` if this vLLM lacks a step."""
    steps = {"execute_model": _step, "sample_tokens": _step, "compile_or_warm_up_model": _start}
    wrap_listed({f"{_WORKER}.{name}": each for name, each in steps.items()})


def _check(worker: Any) -> None:
    try:
        raise_if_damaged()
    except Exception as error:
        if worker.parallel_config.world_size == 1 or parent_process() is None:
            raise
        logger.exception("df11: this worker ends")
        raise SystemExit(f"df11: {error}") from error


def _step(call: _Call, arguments: dict[str, Any]) -> Any:
    _check(arguments["self"])
    output = call()
    if not isinstance(output, AsyncModelRunnerOutput):
        _check(arguments["self"])
    elif (kind := type(output)) not in _checked:
        wrap((kind, "get_output", _take))
        _checked.add(kind)
    return output


def _take(call: _Call, arguments: dict[str, Any]) -> Any:
    output = call()
    raise_if_damaged()
    return output


def _start(call: _Call, arguments: dict[str, Any]) -> Any:
    """Checks after a warm-up, which multiplies by every weight. Waits for the warm-up."""
    output = call()
    if torch.cuda.is_available():
        check_gpus([torch.device("cuda", torch.cuda.current_device())])
    return output


_LOADED = (
    "compressed weights cannot be loaded again in service; start a new server, or serve the BF16 "
    "checkpoint if its weights change"
)
_DROPPED = (
    "compressed weights cannot be loaded again in service, so they are not dropped; sleep at level "
    "1, which keeps them, or start a new server"
)
_WRITTEN = (
    "vLLM does not write compressed weights; copy the folder that is served, of which each rank "
    "reads its own part"
)
_HASHED = "vLLM has no checksums of compressed weights; run df11 verify on the folder"
#: Methods of workers, and what they would do with weights.
_METHODS = {
    **dict.fromkeys(("start_weight_update", "start_draft_weight_update"), _LOADED),
    **dict.fromkeys(("save_sharded_state", "save_tensorized_model"), _WRITTEN),
}
#: Methods that releases after 0.26 have.
_NEWER = {"compute_weight_checksums": _HASHED, "reset_weights": _DROPPED}
_RELOADS = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
)


def refuse_in_service() -> None:
    """Makes workers of this process refuse. Raises `ImportError` if this vLLM lacks a method."""
    methods = {f"{_WORKER}.{name}": partial(_refuse, because) for name, because in _METHODS.items()}
    reloads = dict.fromkeys(_RELOADS, partial(_refuse, _LOADED))
    wrap_listed({**methods, **reloads, f"{_WORKER}.sleep": _sleep})
    for name, because in _NEWER.items():
        wrap_listed({f"{_WORKER}.{name}": partial(_refuse, because)})


def guard(model: nn.Module) -> None:
    """Makes a loaded model refuse to reload weights, as trainers request, and to list them."""
    if not holds_compressed(model):
        return

    def load_weights(*_: Any, **__: Any) -> None:
        raise ValueError(_LOADED)

    model.load_weights = load_weights  # type: ignore[assignment]
    for module in model.modules():
        if _is_compressed(module):
            module.register_state_dict_pre_hook(_list)


def holds_compressed(model: nn.Module) -> bool:
    return any(map(_is_compressed, model.modules()))


def _is_compressed(module: nn.Module) -> bool:
    return any(module._parameters.get(f"{name}_key") is not None for name in NAMES)


def _list(*_: Any) -> None:
    raise ValueError(_WRITTEN)


def _refuse(because: str, call: _Call, arguments: dict[str, Any]) -> Any:
    caller = arguments["self"]
    runner = getattr(caller, "model_runner", caller)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    models = runner.get_model(), getattr(drafter, "model", None)
    if any(isinstance(model, nn.Module) and holds_compressed(model) for model in models):
        raise ValueError(because)
    return call()


def _sleep(call: _Call, arguments: dict[str, Any]) -> Any:
    return _refuse(_DROPPED, call, arguments) if arguments.get("level", 1) > 1 else call()
