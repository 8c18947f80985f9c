"""Imports the node as ComfyUI does: from its folder, under the name `df11_node`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NODE = Path(__file__).resolve().parents[1]


def import_node() -> None:
    spec = importlib.util.spec_from_file_location(
        "df11_node", NODE / "__init__.py", submodule_search_locations=[str(NODE)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["df11_node"] = module
    spec.loader.exec_module(module)
