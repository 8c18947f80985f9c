"""What leaves a model with compressed weights: its containers, decoded copies, merged adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ._errors import unfit
from ._modules import Ref, entries, gathered, join, local
from ._native import compress, decompress
from ._report import Report
from ._source import KEY, Source, sources
from ._tensor import CompressedTensor
from ._watch import check_gpus

#: As `df11 compress` inserts it and `df11 decompress` takes it out (src/open/beside.rs).
MARK = '\n  "quantization_config": {"quant_method": "df11"},'
_ADAPTER = "adapter_config.json"


def save(model: Any, folder: str | Path) -> None:
    """Copies the containers of a model with compressed weights into a folder, byte for byte."""
    found = [source for _, source in sources(model)]
    if not found:
        raise ValueError("the model has no compressed weights of df11")
    paths = {shard["path"] for source in found for shard in source.container.shards}
    if len({Path(path).name for path in paths}) < len(paths):
        raise ValueError(
            "containers of the model's modules have the same names; save each module by itself"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    for source in found:
        copy_containers(source, Path(folder))


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Decoded copies of all weights, in host memory: as large as the BF16 model.

    Names are those of `model.state_dict()`; what an adapter wraps has its own name, without the
    wrapper's. All processes of a distributed model must call it at once, and each gets whole
    weights. Raises `CorruptError` if a kernel met damaged weights.
    """
    names = {
        spot.key: join(path, spot.name) for path, source in sources(model) for spot in source.spots
    }
    out: dict[str, torch.Tensor] = {}
    found = [entry for entry in entries(model) if entry.is_persistent]
    for entry in found:
        value = gathered(entry.value.detach())
        value = value.decode() if isinstance(value, CompressedTensor) else value
        copy = value.cpu().clone()
        out |= {names.get(spot.key, spot.name): copy for spot in entry.spots}
    check_gpus(entry.value.device for entry in found)
    return out


def copy_containers(source: Source, folder: Path) -> None:
    """Puts copies of all containers of a model into a folder, and of the files that belong to them
    and are not there, such as the tokenizer.
    """
    was_open = source.held is not None
    for shard in source.container.shards:
        path, made = Path(shard["path"]), source.made
        target = folder / path.name
        if made is None and target.exists() and target.samefile(path):
            continue
        # Under its name only when it is whole.
        partial = target.with_name(f".{target.name}.part")
        try:
            shutil.copyfile(path if made is None else made.file(shard["path"]), partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    for name in source.container.side_files:
        _carry(Path(source.path, name), folder / name)
    if source.made is not None and not was_open:
        source.close()


class Save(Ref):
    """`save_pretrained` of a model, without keeping it; a copy of the model has its own."""

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if self.module is None:
            raise ReferenceError("the model is gone; keep it in a variable while it is saved")
        self.write(self.module, save_directory, *args, **kwargs)

    def write(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def changed(model: Any) -> list[str]:
    found = ((weight, local(value)) for weight, value in model.__dict__[KEY].found())
    return [w.name for w, v in found if w.reason is None and not isinstance(v, CompressedTensor)]


def others(model: Any) -> dict[str, torch.Tensor]:
    """Parameters that the containers lack, such as a new head."""
    held = {spot.key for spot in model.__dict__[KEY].spots}
    return {
        join(path, attribute): gathered(value.detach()).cpu().contiguous()
        for path, module in model.named_modules()
        for attribute, value in module._parameters.items()
        if value is not None and (id(module), attribute) not in held
    }


def save_others(others: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    if others:
        save_file(others, path, metadata={"format": "pt"})
    else:
        path.unlink(missing_ok=True)


def mark_config(path: Path) -> None:
    """Writes the line of the compression as `df11 compress` does; `df11 decompress` removes it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is None:
        return
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    path.write_text(text.replace("{", "{" + MARK, 1), encoding="utf-8")


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
    if not (adapter / _ADAPTER).is_file():
        raise unfit(f"{adapter} has no {_ADAPTER}", "save the adapter by save_pretrained()")
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
        for path in bf16.rglob("*"):
            if not path.name.endswith((".safetensors", ".safetensors.index.json")):
                _carry(path, merged / path.relative_to(bf16))
        return compress(merged, out, overwrite=overwrite, progress=progress)


def _carry(path: Path, target: Path) -> None:
    if path.is_file() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
