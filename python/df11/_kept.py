"""Parameters that a library keeps in F32 when it loads a checkpoint in a 16-bit dtype."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._names import inside

Wanted = Callable[[str, torch.dtype | None], torch.dtype | None]
_HALVES = (torch.float16, torch.bfloat16)


def wanted_by(root: nn.Module) -> Wanted:
    """Of a parameter's name and its stored dtype, the dtype that the library of its module would load it in.

    diffusers names parts of names in `_keep_in_fp32_modules`; transformers has a plan of patterns for each dtype.
    The outermost module that says something counts, for it is what is loaded. Everything else is as it is stored.
    """
    said = [
        (path, keeps)
        for path, module in root.named_modules()
        if (keeps := _keeps(module)) is not None
    ]

    def wanted(name: str, stored: torch.dtype | None) -> torch.dtype | None:
        if stored not in _HALVES:
            return stored
        for path, keeps in said:
            if inside(name, path):
                return torch.float32 if keeps(name[len(path) :].lstrip("."), stored) else stored
        return stored

    return wanted


def _keeps(module: Any) -> Callable[[str, torch.dtype], bool] | None:
    plan = getattr(module, "_get_dtype_plan", None)
    if plan is not None:
        return lambda name, stored: _is_planned(plan(stored), name)
    parts = getattr(module, "_keep_in_fp32_modules", None)
    if parts is None:
        return None
    named = {parts} if isinstance(parts, str) else set(parts)
    return lambda name, _: not named.isdisjoint(name.split("."))


def _is_planned(plan: dict[str, torch.dtype], name: str) -> bool:
    if not plan:
        return False
    from transformers.core_model_loading import build_glob_alternation

    pattern: re.Pattern[str] = build_glob_alternation(list(plan))[0]
    return pattern.search(name) is not None
