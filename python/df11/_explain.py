"""Has `from_pretrained` of a single container say what loads it.

Imported as soon as transformers reads configs, which it does before it knows of any quantizer.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from ._errors import unfit


def explain_containers() -> None:
    """Has `from_pretrained` of a single container say what loads it, instead of that it is no
    repository, or no JSON. Where transformers finds files otherwise, nothing changes.
    """
    from transformers import configuration_utils
    from transformers.utils import hub

    config: Any = configuration_utils.PreTrainedConfig
    find, read = (getattr(hub, "cached_files", None), getattr(config, "get_config_dict", None))
    if find is None or read is None or hasattr(find, "_df11"):
        return

    @functools.wraps(find)
    def find_or_explain(path_or_repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_container(path_or_repo_id)
        return find(path_or_repo_id, *args, **kwargs)

    @functools.wraps(read.__func__)
    def read_or_explain(cls: Any, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        _refuse_container(pretrained_model_name_or_path)
        return read.__func__(cls, pretrained_model_name_or_path, **kwargs)

    find_or_explain._df11 = True  # type: ignore[attr-defined]
    hub.cached_files = find_or_explain
    method: Any = read_or_explain
    config.get_config_dict = classmethod(method)


def _refuse_container(source: Any) -> None:
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source).endswith(".df11"):
        return
    path = Path(source)
    if path.is_file():
        folder = f"{path.with_suffix('')}-df11"
        raise unfit(
            f"{path} is one container, and transformers loads folders",
            f"df11 convert {path} {folder} makes one; df11.attach(module, {str(path)!r}) "
            "gives a module its weights",
        )


explain_containers()
