"""Merges adapters into compressed models.

PEFT merges into the BF16 model. The model's class may not know all tensors of the checkpoint (such
as layers that predict several tokens), and loads the others in one dtype. So only the tensors that
the adapter changed are copied from PEFT's result into the original files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._added import load_beside
from ._errors import unfit
from ._link import WEIGHTS, is_far
from ._native import TemporaryFolder, compress, decompress
from ._report import Report

_ADAPTER = "adapter_config.json"
_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"


def merge_adapter(
    source: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Any = None,
) -> Report:
    """Compress a model into which an adapter is merged.

    `source` is a compressed folder, `adapter` a folder that PEFT's `save_pretrained` wrote, and
    `out` the new compressed folder. Changed weights equal the result of `merge_and_unload()` on the
    BF16 model. Side files and all other weights stay the same, also weights that the model's class
    does not know or that are beside the containers. Takes host memory for the BF16 model, and twice
    that on the disk of `out`. `overwrite` and `progress` are as in `df11.compress`.

    Raises `ParameterError` if `adapter` is not an adapter, `source` is not a local folder, or `out`
    exists and `overwrite` is not given; `ValueError` if the adapter changes weights whose stored
    dtype is not the one that it computes, or if its file lacks weights that its config describes or
    has additional ones (PEFT would silently merge those that fit).
    """
    import peft
    import transformers

    if is_far(source):
        raise unfit(f"{source} is no local folder", "fetch it first, and name the folder")
    source, adapter, out = Path(source), Path(adapter), Path(out)
    if not (adapter / _ADAPTER).is_file():
        raise unfit(f"{adapter} has no {_ADAPTER}", "save the adapter by save_pretrained()")
    if out.exists() and not overwrite:
        raise unfit(f"{out} exists", "choose another output, or replace it with overwrite=True")
    with TemporaryFolder(out.absolute().parent) as folder:
        bf16, merged = folder / "bf16", folder / "merged"
        decompress(source, bf16, progress=progress)
        _take_added(source / WEIGHTS, bf16)
        config = json.loads((bf16 / "config.json").read_text(encoding="utf-8"))
        kind = getattr(transformers, config["architectures"][0])
        base = kind.from_pretrained(bf16, device_map="cpu", dtype="auto")
        adapted = peft.PeftModel.from_pretrained(base, adapter)
        _check_whole(adapted, adapter)
        model = adapted.merge_and_unload()
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        model.save_pretrained(merged)
        del base, adapted, model
        _take_over(bf16, merged, tied)
        for path in merged.iterdir():
            if path.is_file() and not path.name.endswith((_SUFFIX, _INDEX)):
                shutil.copyfile(path, bf16 / path.name)
        return compress(bf16, out, overwrite=overwrite, progress=progress)


def _check_whole(adapted: Any, adapter: Path) -> None:
    """Compares the names in an adapter's file with those of the loaded adapter."""
    from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights

    wanted: set[str] = {*get_peft_model_state_dict(adapted, save_embedding_layers=False)}
    found = {*load_peft_weights(str(adapter), device="cpu")}
    for what, names in (
        ("lacks", wanted - found),
        ("has, beside the model's,", found - wanted - {*adapted.state_dict()}),
    ):
        if names:
            raise ValueError(
                f"{adapter} {what} {min(names)}, one of {len(names)} weights; fetch it again, or "
                "merge it into the model that it was trained with"
            )


def _take_added(added: Path, checkpoint: Path) -> None:
    """Writes the weights from beside the containers, if any, into a file of a checkpoint."""
    if not (tensors := load_beside(added, _Checkpoint(checkpoint).places)):
        return
    file = _files(checkpoint)[-1]
    _rewrite(file, lambda others: {**others, **tensors})
    _add_to_index(file, tensors)


def _take_over(original: Path, merged: Path, tied: Mapping[str, str]) -> None:
    """Writes the changed tensors of a checkpoint into the files of another one."""
    results = _Checkpoint(merged)
    files = _files(original)
    new = results.places.keys() - _Checkpoint(original).places.keys()
    for at, file in enumerate(files, start=1):
        # The last file gets tensors that the original lacks: the head of an adapter.
        more = {name: results[name] for name in sorted(new)} if at == len(files) else {}
        _rewrite(file, partial(_with_results, results=results, tied=tied, more=more))
        _add_to_index(file, more)


def _with_results(
    tensors: dict[str, Tensor],
    results: _Checkpoint,
    tied: Mapping[str, str],
    more: dict[str, Tensor],
) -> dict[str, Tensor]:
    return {name: _merged(name, value, results, tied) for name, value in tensors.items()} | more


def _merged(name: str, value: Tensor, results: _Checkpoint, tied: Mapping[str, str]) -> Tensor:
    merged = name if name in results.places else tied.get(name, name)
    if merged not in results.places:
        return value
    result = results[merged]
    if result.shape == value.shape and torch.equal(_bits(value.to(result.dtype)), _bits(result)):
        return value
    if result.dtype != value.dtype:
        kinds = f"stored as {value.dtype}, and the adapter's result is {result.dtype}"
        raise ValueError(
            f"{name} is {kinds.replace('torch.', '')}; merge with peft in that dtype, and "
            "compress the result"
        )
    return result


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


class _Checkpoint:
    """The tensors of a folder of safetensors files, read on request."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._open = safe_open
        self.places: dict[str, Path] = {}
        for file in _files(folder):
            with safe_open(file, "pt") as opened:
                self.places |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        with self._open(self.places[name], "pt") as opened:
            value: Tensor = opened.get_tensor(name)
            return value


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{_SUFFIX}"))


def _rewrite(file: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replaces the tensors of a safetensors file. The old tensors are mapped, and Windows does not
    replace a mapped file, so they are dropped before the new file takes its name.
    """
    written = file.with_name(f"{file.name}.new")
    _write_changed(file, written, change)
    written.replace(file)


def _write_changed(
    file: Path, written: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        metadata = opened.metadata()
    whole = {name: value.contiguous() for name, value in change(tensors).items()}
    save_file(whole, written, metadata=metadata)


def _add_to_index(file: Path, names: Iterable[str]) -> None:
    for path in file.parent.glob(f"*{_INDEX}"):
        index = json.loads(path.read_text(encoding="utf-8"))
        if file.name in index["weight_map"].values():
            index["weight_map"] |= dict.fromkeys(names, file.name)
            path.write_bytes((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
