"""Registers df11 with transformers and diffusers, imported before or after df11; never imports
them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ._errors import unfit
from ._hub import wrap_resolution
from ._link import is_far
from ._wrapping import wrap_listed


class _Finder(importlib.abc.MetaPathFinder):
    """Registers df11 right after a module has run. Stays until then, since libraries also look for
    modules that they do not import (`importlib.util.find_spec`).
    """

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.awaited:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register_now(name)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_now(name: str) -> None:
    library = name.partition(".")[0]
    try:
        _MODULES[name]()
    except Exception as error:  # the library itself must stay importable
        from ._doctor import TESTED

        oldest, newest = TESTED[library]
        warnings.warn(
            f"df11 could not register with {library}: {error}; it is tested with {oldest} to "
            f"{newest}",
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Registers df11 once per process; importing twice changes nothing."""
    waiting = {finder.awaited for finder in sys.meta_path if isinstance(finder, _Finder)}
    for name in _MODULES:
        if name in sys.modules:
            _register_now(name)
        elif name not in waiting:
            sys.meta_path.insert(0, _Finder(name))


def _explain_containers() -> None:
    """Makes `from_pretrained` of a single container, or of a name in a store, name the call that
    loads it, instead of "no repository" or "no JSON". Changes nothing if transformers finds files
    by another function.
    """

    def explain(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        source = arguments.get("path_or_repo_id", arguments.get("pretrained_model_name_or_path"))
        _refuse_container(source)
        return call()

    config = "transformers.configuration_utils:PreTrainedConfig.get_config_dict"
    wrap_listed({"transformers.utils.hub:cached_files": explain, config: explain})


def _refuse_container(source: Any) -> None:
    if isinstance(source, str) and is_far(source) and not source.lower().startswith("http"):
        raise unfit(
            f"transformers knows no stores, such as that of {source}",
            "df11.link gives it a folder that stands for one there",
        )
    path = Path(source) if isinstance(source, (str, os.PathLike)) else Path()
    if path.suffix == ".df11" and path.is_file():
        from ._platform import quoted

        folder, given = path.parent, quoted(path)
        made = quoted(f"{path.with_suffix('')}-df11")
        # A container of a folder, which the config marks, does not hold the config.
        remedy = f"name {str(folder)!r}" if _is_marked(folder) else None
        raise unfit(
            f"{path} is one container, and transformers loads folders",
            f"{remedy or f'df11 convert {given} -o {made} makes one'}; "
            f"df11.attach(module, {str(path)!r}) gives a module its weights",
        )


def _is_marked(folder: Path) -> bool:
    """Whether the config of a folder names df11."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return bool(config["quantization_config"]["quant_method"] == "df11")
    except (OSError, ValueError, LookupError, TypeError):
        return False


#: Modules, and the functions that register df11 when they are imported: the lists of quantizers;
#: the module that reads configs, which transformers does before it knows any quantizer; the one
#: that finds files of weights; and the module by which diffusers loads single files.
_MODULES: dict[str, Callable[[], object]] = {
    "transformers.configuration_utils": _explain_containers,
    "transformers.modeling_utils": wrap_resolution,
    "transformers.quantizers.auto": lambda: importlib.import_module("df11._quantizer"),
    "diffusers.quantizers.auto": lambda: importlib.import_module("df11._diffusers"),
    "diffusers.loaders.single_file_model": lambda: importlib.import_module(
        "df11._diffusers"
    ).wrap_single_files(),
}
