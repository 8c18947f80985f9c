"""Tells transformers and diffusers of df11 as soon as they are imported, before or after; never
imports them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

#: The modules that keep a library's list of quantizers, and what puts df11 there; and the one that
#: reads configs, and what explains containers there.
_MODULES = {
    "transformers.configuration_utils": "_explain",
    "transformers.quantizers.auto": "_quantizer",
    "diffusers.quantizers.auto": "_diffusers",
}


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for a module."""

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register_now(name)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_now(name: str) -> None:
    library = name.partition(".")[0]
    try:
        importlib.import_module(f".{_MODULES[name]}", __package__)
    except Exception as error:  # the library itself must stay importable
        from ._versions import TESTED

        oldest, newest = TESTED[library]
        warnings.warn(
            f"df11 could not register with {library}: {error}; it is tested with {oldest} to "
            f"{newest}",
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Once for each process; importing twice changes nothing."""
    waiting = {finder.awaited for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name in _MODULES:
        if name in sys.modules:
            _register_now(name)
        elif name not in waiting:
            sys.meta_path.insert(0, _Finder(name))
