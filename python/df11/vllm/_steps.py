"""Makes workers of vLLM raise before they return tokens from damaged weights.

Kernels report damage in host memory (`_watch`), so reading it waits for nothing. The reports of a
step's kernels are there as soon as the step's tokens are: when a worker returns them, or when
`get_output` of its result has waited for them. With several workers vLLM asks most of them for no
output, under tensor parallelism all but one, and only logs their exceptions. So a worker in its own
process ends with the exception, at the latest when its next step begins, and vLLM stops an engine
that lost a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

from .._watch import check_gpus, raise_if_damaged
from .._wrapping import wrap, wrap_listed

logger = init_logger("vllm.plugins.df11")

WORKER = "vllm.v1.worker.gpu_worker:Worker"
_Step = Callable[[], Any]
#: Kinds of outputs that wait for their tokens and check.
_checked: set[type] = set()


def watch_steps() -> None:
    """Makes all workers of this process check. Raises `ImportError` if this vLLM lacks a step."""
    steps = {"execute_model": _step, "sample_tokens": _step, "compile_or_warm_up_model": _start}
    wrap_listed({f"{WORKER}.{name}": each for name, each in steps.items()})


def _check(worker: Any) -> None:
    try:
        raise_if_damaged()
    except Exception as error:
        if worker.parallel_config.world_size == 1 or parent_process() is None:
            raise
        logger.exception("df11: this worker ends")
        raise SystemExit(f"df11: {error}") from error


def _step(call: _Step, arguments: dict[str, Any]) -> Any:
    _check(arguments["self"])
    output = call()
    if not isinstance(output, AsyncModelRunnerOutput):
        _check(arguments["self"])
    elif (kind := type(output)) not in _checked:
        wrap((kind, "get_output", _take))
        _checked.add(kind)
    return output


def _take(call: _Step, arguments: dict[str, Any]) -> Any:
    output = call()
    raise_if_damaged()
    return output


def _start(call: _Step, arguments: dict[str, Any]) -> Any:
    """Checks after a warm-up, which multiplies by each weight. Waits for it."""
    output = call()
    if torch.cuda.is_available():
        check_gpus([torch.device("cuda", torch.cuda.current_device())])
    return output
