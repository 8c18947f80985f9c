"""Has workers of vLLM raise before they hand out tokens that damaged weights made.

Kernels tell damage in memory of the host (`_watch`), so nothing waits for it. What kernels of a
step told is there as soon as the step's tokens are: when a worker returns them, or when
`get_output` of what it returns has waited for them. A worker whose outputs nobody takes, as in
tensor parallelism all except one, raises when its next step begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from .._doctor import mismatch
from .._hub import wrap
from .._watch import check_gpus, raise_if_damaged

_Step = Callable[[], Any]
#: Kinds of outputs that wait for their tokens and check.
_checked: set[type] = set()


def watch_steps() -> None:
    """Has all workers of this process check. Raises `ImportError` if this vLLM's lack a step."""
    steps = [(Worker, name, _step) for name in ("execute_model", "sample_tokens")]
    lacking = wrap(*steps, (Worker, "compile_or_warm_up_model", _start))
    if lacking is not None:
        raise ImportError(mismatch("vllm", vllm.__version__, f"Worker.{lacking}"))


def _step(call: _Step, asked: dict[str, Any]) -> Any:
    raise_if_damaged()
    output = call()
    if not isinstance(output, AsyncModelRunnerOutput):
        raise_if_damaged()
    elif (kind := type(output)) not in _checked:
        wrap((kind, "get_output", _take))
        _checked.add(kind)
    return output


def _take(call: _Step, asked: dict[str, Any]) -> Any:
    output = call()
    raise_if_damaged()
    return output


def _start(call: _Step, asked: dict[str, Any]) -> Any:
    """After a warm-up, which multiplies by each weight. Waits for it."""
    output = call()
    if torch.cuda.is_available():
        check_gpus([torch.device("cuda", torch.cuda.current_device())])
    return output
