"""Compressed folders whose config names another quantization, such as MXFP4 or FP8.

Their quantizer loads the model as without df11: it gets each tensor as the checkpoint had it,
decoded when the loader asks for it.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from ._arrays import known_dtype_of
from ._container import Sliceable, Tensors
from ._link import open_folder

#: Files of weights that transformers would load without df11.
_ORDINARY = ("*.safetensors", "*.bin", "*.gguf")


class _Decoded(Sliceable):
    """A tensor that is decoded each time a loader asks for its values."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        super().__init__(tensors, name)
        self.dtype = known_dtype_of(name, self.get_dtype())

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, key: Any) -> Tensor:
        values: Tensor = self.reader.stored(self.name).torch()
        return values if key is ... else values[key]


def folder_for_others(source: str | os.PathLike[str], subfolder: str | None) -> Path | None:
    """The folder, if it is local, holds no other weights than containers, and its config names
    another quantization than df11's.
    """
    folder = Path(source, subfolder or "")
    config = folder / "config.json"
    if not config.is_file() or next(folder.glob("*.df11"), None) is None:
        return None
    if any(next(folder.glob(kind), None) for kind in _ORDINARY):
        return None
    said = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
    return folder if said.get("quant_method", "df11") != "df11" else None


def decoded_tensors(folder: Path) -> dict[str, Any]:
    """The tensors of a folder's containers, for transformers' loader."""
    tensors = Tensors(open_folder(folder))
    warnings.warn(
        f"df11: {folder} is compressed beside another quantization, whose quantizer loads it: it "
        "decodes all weights, which take as much memory as without df11",
        stacklevel=2,
    )
    return {name: _Decoded(tensors, name) for name in tensors}
