"""Merging an adapter of PEFT into compressed weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ._errors import unfit
from ._native import compress, decompress
from ._report import Report

_CONFIG = "adapter_config.json"


def merge_adapter(
    source: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Any = None,
) -> Report:
    """Compress a model into which an adapter is merged.

    `source` is a compressed folder, `adapter` what PEFT's `save_pretrained` wrote, `out` the new
    compressed folder. Weights are those of `merge_and_unload()` on the BF16 model; all others, and
    the side files, stay as they are. The BF16 model is in the host's memory meanwhile, and twice on
    the disk of `out`. `overwrite` and `progress` are as in `df11.compress`.

    Raises `ParameterError` if `adapter` is none, or `out` exists and `overwrite` is not given.
    """
    import peft
    import transformers

    source, adapter, out = Path(source), Path(adapter), Path(out)
    if not (adapter / _CONFIG).is_file():
        raise unfit(f"{adapter} has no {_CONFIG}", "save the adapter by save_pretrained()")
    if out.exists() and not overwrite:
        raise unfit(f"{out} exists", "choose another output, or replace it with overwrite=True")
    with TemporaryDirectory(dir=out.absolute().parent, prefix=".df11-merge-") as folder:
        bf16, merged = Path(folder, "bf16"), Path(folder, "merged")
        decompress(source, bf16, progress=progress)
        config = json.loads((bf16 / "config.json").read_text())
        kind = getattr(transformers, config["architectures"][0])
        base = kind.from_pretrained(bf16, device_map="cpu", dtype="auto")
        model = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
        model.save_pretrained(merged)
        _carry(bf16, merged)
        return compress(merged, out, overwrite=overwrite, progress=progress)


def _carry(source: Path, target: Path) -> None:
    """Copies side files, such as the tokenizer's, that `target` does not have."""
    for path in source.rglob("*"):
        place = target / path.relative_to(source)
        weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not weights and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
