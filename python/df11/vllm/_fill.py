"""Loads what vLLM's code has recorded: from containers in one pass, or of dense values.

```text
 patches of one container, whole rows ──▶ as stored, or in the fast layout
 other patches (dense ones, windows beside each other) ──▶ packed into the fast layout on a GPU,
                                                          ordinary weights on the CPU
```
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from .._bring import bring
from .._container import Tensors
from .._matrices import TILE_COLUMNS, TILE_ROWS, Part
from .._plan import SMALL, Group, Item, Residence, why_ordinary
from .._progress import Bar
from .._tensor import CompressedTensor
from ._deferred import Patch, Source, Target
from ._layers import NAMES, Options, give, pack, target_of, without_padding

logger = init_logger("vllm.plugins.df11")

#: Of a GPU's memory that vLLM may use, what weights in the fast layout may take with `auto`.
_SHARE = 2 / 3


@dataclass(eq=False)
class _Entry:
    """A target, its name, and the layers that have it; what it is of a container, if it is."""

    target: Target
    name: str
    layers: list[tuple[nn.Module, str]] = field(default_factory=list)
    item: Any = None
    tensors: Any = None
    repacked_because: str | None = None


def fill(model: nn.Module, options: Options, device: torch.device, memory: int | None) -> None:
    """Loads all targets of a model whose values a container has. `memory`: bytes of the GPU that
    vLLM may use, by which `auto` decides. Raises `ValueError` if a checkpoint lacks weights; the
    errors of `df11.open`.
    """
    blocks: dict[tuple[int, str], list[_Entry]] = {}
    for entry in _entries(model):
        if entry.target.value is not None:
            continue
        if not _find(entry, device.type == "cuda", options.exact):
            pack(entry.target, "not all of it is stored in tiles, as whole rows")
            continue
        block = entry.tensors.container[entry.item.sources[0]].block
        blocks.setdefault((id(entry.tensors), block), []).append(entry)
    held = list(blocks.values())
    residences: list[Residence] = ["stored"] * len(held)
    if device.type == "cuda" and options.residence != "stored":
        residences = _chosen(held, options, memory)
    read = sum(entry.item.stored_bytes for block in held for entry in block)
    with (bar := Bar(read)):
        _load(held, residences, options, device, bar)
    _tell(held, residences, read)


def _entries(model: nn.Module) -> list[_Entry]:
    found: dict[int, _Entry] = {}
    for path, module in model.named_modules():
        for name in NAMES:
            if (target := target_of(module, name)) is not None:
                entry = found.setdefault(id(target), _Entry(target, f"{path}.{name}"))
                entry.layers.append((module, name))
    return list(found.values())


def _find(entry: _Entry, on_gpu: bool, exact: bool) -> bool:
    """Finds which tiles of a container it is; False if it has to be made of dense values."""
    target, because = entry.target, None
    patches = target.ordered(entry.name)
    rows = without_padding(target, patches)
    patches = [patch for patch in patches if patch.row < rows]
    sources = [patch.values for patch in patches if isinstance(patch.values, Source)]
    if len(sources) < len(patches) or any(p.columns != target.columns for p in patches):
        return False
    if len({id(source.tensors) for source in sources}) != 1 or target.dtype != torch.bfloat16:
        return False
    tensors = sources[0].tensors
    value = _stacked(patches, target.shape if rows == target.rows else (rows, target.columns))
    item = Item(entry.name, value, list(dict.fromkeys(source.name for source in sources)))
    item.reason = why_ordinary(item, tensors.container, False, on_gpu)
    is_mixture = len(target.shape) > 2
    if not all(part.is_aligned for part in value.parts):
        because = f"a slice is no multiple of {TILE_ROWS} rows, {TILE_COLUMNS} columns"
    elif is_mixture:
        because = "experts are multiplied in the fast layout"
    if because is not None and on_gpu and item.reason == SMALL:
        # Tiles around a slice are larger than what it is packed into.
        is_smaller = item.nbytes("fast") < item.nbytes("ordinary")
        item.reason = None if is_smaller else SMALL
    if not on_gpu or (exact and is_mixture):
        because = None  # what is decoded can be any window, and experts as they are stored
    entry.item, entry.tensors, entry.repacked_because = item, tensors, because
    return True


def _stacked(patches: list[Patch], shape: tuple[int, ...]) -> CompressedTensor:
    arrays, parts = [], []
    for patch in patches:
        assert isinstance(patch.values, Source)
        whole = patch.values.compressed()
        arrays += whole.arrays
        parts.append(Part(*whole.parts[0][:4], *patch.source_rows, *patch.source_columns))
    return CompressedTensor(arrays, parts, shape)


def _chosen(blocks: list[list[_Entry]], options: Options, memory: int | None) -> list[Residence]:
    sizes = [Group([entry.item for entry in block]).nbytes("fast") for block in blocks]
    budget = sum(sizes)
    if options.residence == "auto" and memory is not None:
        budget = int(_SHARE * memory)
    lefts = [budget - taken for taken in accumulate(sizes)]
    return ["fast" if left >= 0 else "stored" for left in lefts]


def _load(
    blocks: list[list[_Entry]],
    residences: list[Residence],
    options: Options,
    device: torch.device,
    bar: Bar,
) -> None:
    entries = {id(entry.item): entry for block in blocks for entry in block}
    jobs: dict[tuple[int, Residence], tuple[Tensors, list[Group]]] = {}
    for block, residence in zip(blocks, residences, strict=True):
        forms: list[Residence] = [residence, "fast"]
        for is_repacked, form in enumerate(forms):
            some = [each for each in block if (each.repacked_because is not None) == is_repacked]
            key = id(block[0].tensors), form
            _, mine = jobs.setdefault(key, (block[0].tensors, []))
            mine.append(Group([entry.item for entry in some], device, form))
    for tensors, mine in jobs.values():
        for item, value in bring(tensors, mine, options.exact, bar):
            entry = entries[id(item)]
            if item.reason is not None:
                dense = value.view(-1, entry.target.columns)
                padding = entry.target.rows - dense.shape[0]
                dense = nn.functional.pad(dense, (0, 0, 0, padding))
                value = dense.view(entry.target.shape).to(device)
            for layer, name in entry.layers:
                give(layer, name, value, entry.target)
            entry.target.patches.clear()


def _tell(blocks: list[list[_Entry]], residences: list[Residence], read: int) -> None:
    whole = ", ".join(f"{count} blocks {form}" for form, count in Counter(residences).items())
    logger.info("df11: %s; %s bytes of compressed matrices read", whole or "nothing", f"{read:,}")
    reasons: Counter[str] = Counter()
    for entry in (entry for block in blocks for entry in block):
        if entry.repacked_because is not None:
            reasons[f"repacked into the fast layout: {entry.repacked_because}"] += 1
        if entry.item.reason is not None:
            reasons[f"BF16: {entry.item.reason}"] += 1
    for reason, count in reasons.items():
        logger.info("df11: %d weights %s", count, reason)
