"""Registers df11 with transformers and diffusers without `import df11`.

PyTorch calls `install` at the end of `import torch`, by the entry point group `torch.backends`;
transformers and diffusers have no such group. So a Python that imports no PyTorch runs nothing of
this, and one that does gets one finder, which imports df11 right after an awaited module has run.
It is a package of its own because `import torch` fails if an entry point does.
"""

from __future__ import annotations

import sys
from typing import Any

#: Modules whose functions and tables `df11._register` extends.
AWAITED = (
    "transformers.configuration_utils",
    "transformers.modeling_utils",
    "transformers.quantizers.auto",
    "diffusers.quantizers.auto",
    "diffusers.loaders.single_file_model",
)


class _Finder:
    """Finds awaited modules by the other finders, and registers df11 when they have run."""

    def __init__(self) -> None:
        self.waiting = set(AWAITED)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.waiting:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            self.register(name)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec

    def register_loaded(self) -> None:
        for name in AWAITED:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is None or name not in self.waiting:
                continue
            if getattr(spec, "_initializing", False):
                spec.__class__ = _Running
            else:
                self.register(name)

    def register(self, name: str) -> None:
        if name not in self.waiting:
            return
        self.waiting.remove(name)
        try:
            from df11._register import register_with
        except ImportError as error:  # what was to be imported needs no df11
            import warnings

            warnings.warn(f"df11 could not be imported: {error}", RuntimeWarning, stacklevel=2)
        else:
            register_with(name)


class _Running(type(sys.__spec__)):  # type: ignore[misc]
    """The spec of a module that runs already, and imported PyTorch or df11. importlib tells it when
    the module has run.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            install()


def install() -> None:
    """Registers df11 with awaited modules, also with those that will be imported. Calls after the
    first one register only what has been loaded meanwhile.
    """
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    finder.register_loaded()
