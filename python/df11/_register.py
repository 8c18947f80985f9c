"""Tells transformers of df11 as soon as it is imported, before or after; never imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_QUANTIZERS = "transformers.quantizers.auto"


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the module that keeps transformers' list of quantizers."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _QUANTIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register_now()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_now() -> None:
    try:
        from . import _quantizer  # noqa: F401
    except Exception as error:  # transformers itself must stay importable
        from ._versions import TESTED

        oldest, newest = TESTED["transformers"]
        warnings.warn(
            f"df11 could not register with transformers: {error}; it is tested with {oldest} to "
            f"{newest}",
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Once for each process; importing twice changes nothing."""
    if _QUANTIZERS in sys.modules:
        _register_now()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
