"""Adds df11 to modules of transformers and diffusers after their import (`_df11_autoload`)."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._errors import unfit
from ._hub import wrap_resolution
from ._link import is_far
from ._wrapping import wrap_listed


def register_with(name: str) -> None:
    """Registers df11 with a library, one of whose awaited modules has run."""
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


#: The awaited modules, and the functions that register df11 with them: the lists of quantizers;
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
