"""Parameters that a library keeps in F32 when it loads a checkpoint in a 16-bit dtype."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ._names import inside

Wanted = Callable[[str, torch.dtype | None], torch.dtype | None]
_HALVES = (torch.float16, torch.bfloat16)


def wanted_by(root: nn.Module) -> Wanted:
    """Of a parameter's name and its stored dtype, the dtype that the library of its module would
    load it in.

    diffusers names parts of names in `_keep_in_fp32_modules`; transformers has a plan of patterns
    for each dtype. The outermost module that says something counts, for it is what is loaded.
    Everything else is as it is stored.
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
        return lambda name, stored: planned(plan(stored), name) is not None
    parts = getattr(module, "_keep_in_fp32_modules", None)
    if parts is None:
        return None
    named = {parts} if isinstance(parts, str) else set(parts)
    return lambda name, _: not named.isdisjoint(name.split("."))


def planned(plan: dict[str, torch.dtype], name: str) -> torch.dtype | None:
    """The dtype that a plan of transformers, of patterns, has for a parameter."""
    if not plan:
        return None
    pattern, groups = _pattern(tuple(plan))
    match = pattern.search(name)
    return plan[groups[match.lastgroup]] if match is not None and match.lastgroup else None


@cache
def _pattern(globs: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    from transformers.core_model_loading import build_glob_alternation

    pattern, groups, _ = build_glob_alternation(list(globs))
    return pattern, groups
