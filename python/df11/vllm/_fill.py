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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from .._bring import bring
from .._container import Tensors
from .._matrices import TILE_COLUMNS, TILE_ROWS
from .._plan import SMALL, Group, Item, Residence, why_ordinary
from .._progress import Bar
from .._tensor import CompressedTensor
from ._deferred import Patch, Source, Target
from ._layers import NAMES, Options, give, pack, target_of, without_padding

logger = init_logger("vllm.plugins.df11")

#: Of a GPU's memory that vLLM may use, what weights in the fast layout may take with `auto`.
_SHARE = 2 / 3
_CPU = torch.device("cpu")


class _Entry(NamedTuple):
    """A target, its name, and the layers that have it."""

    target: Target
    name: str
    layers: list[tuple[nn.Module, str]]


class _Stored(NamedTuple):
    """What an entry is of a container."""

    entry: _Entry
    item: Item
    tensors: Tensors
    #: Why it cannot stay as it is stored.
    repacked_because: str | None


@dataclass
class _Block:
    """What there is of a block of a container; `repacked`: what must be packed by itself."""

    tensors: Tensors
    stored: list[_Stored] = field(default_factory=list)
    repacked: list[_Stored] = field(default_factory=list)
    residence: Residence = "stored"

    @property
    def items(self) -> list[Item]:
        return [each.item for each in (*self.stored, *self.repacked)]


def fill(model: nn.Module, options: Options, device: torch.device, memory: int | None) -> None:
    """Loads all targets of a model whose values a container has.

    `memory`: bytes of the GPU that vLLM may use, by which `auto` decides.

    # Errors
    `ValueError` if a checkpoint lacks weights; those of `df11.open`.
    """
    entries = [entry for entry in _entries(model) if entry.target.value is None]
    on_gpu = device.type == "cuda"
    found = [(entry, _stored(entry, on_gpu)) for entry in entries]
    for entry, stored in found:
        if stored is None:
            pack(entry.target, "not all of it is stored in tiles, as whole rows")
    held = [stored for _, stored in found if stored is not None]
    blocks = _blocks(held, on_gpu, options.exact)
    if on_gpu:
        _choose(blocks, options, memory)
    read = sum(each.item.stored_bytes for each in held)
    with (bar := Bar(read)):
        _load(blocks, options, device, bar)
    _tell(blocks, read)


def _entries(model: nn.Module) -> list[_Entry]:
    """Targets in the order of the model."""
    found: dict[int, _Entry] = {}
    for path, module in model.named_modules():
        for name in NAMES:
            if (target := target_of(module, name)) is not None:
                entry = found.setdefault(id(target), _Entry(target, f"{path}.{name}", []))
                entry.layers.append((module, name))
    return list(found.values())


# ---- what a target is of a container ----


def _stored(entry: _Entry, on_gpu: bool) -> _Stored | None:
    """Finds which tiles of a container it is; None if it has to be made of dense values."""
    target = entry.target
    patches = target.ordered(entry.name)
    rows = without_padding(target, patches)
    patches = [patch for patch in patches if patch.row < rows]
    sources = [patch.values for patch in patches if isinstance(patch.values, Source)]
    if len(sources) < len(patches) or any(p.columns != target.columns for p in patches):
        return None
    if len({id(source.tensors) for source in sources}) != 1 or target.dtype != torch.bfloat16:
        return None
    tensors, because = sources[0].tensors, None
    shape = target.shape if rows == target.rows else (rows, target.columns)
    value = _stacked(patches, shape)
    item = Item(entry.name, value, list(dict.fromkeys(source.name for source in sources)))
    item.reason = why_ordinary(item, tensors.container, False, on_gpu)
    if not all(part.is_aligned for part in value.parts):
        because = f"a slice is no multiple of {TILE_ROWS} rows, {TILE_COLUMNS} columns"
    elif len(target.shape) > 2:
        because = "experts are multiplied in the fast layout"
    if because is not None and on_gpu and item.reason == SMALL:
        # Tiles around a slice are larger than what it is packed into.
        is_smaller = item.nbytes("fast") < item.nbytes("ordinary")
        item.reason = None if is_smaller else SMALL
    return _Stored(entry, item, tensors, because)


def _stacked(patches: list[Patch], shape: tuple[int, ...]) -> CompressedTensor:
    """Windows of a container's tensors below each other, as a tensor in the container."""
    arrays, parts = [], []
    for patch in patches:
        assert isinstance(patch.values, Source)
        whole = patch.values.compressed()
        (top, bottom), (left, right) = patch.source_rows, patch.source_columns
        arrays += whole.arrays
        parts.append(
            whole.parts[0]._replace(
                row_begin=top, row_end=bottom, column_begin=left, column_end=right
            )
        )
    return CompressedTensor(arrays, parts, shape)


# ---- residence ----


def _blocks(held: list[_Stored], on_gpu: bool, exact: bool) -> list[_Block]:
    """By blocks of their containers, in the order in which these are stored."""
    blocks: dict[tuple[int, str], _Block] = {}
    for each in held:
        name = each.tensors.container[each.item.sources[0]].block
        block = blocks.setdefault((id(each.tensors), name), _Block(each.tensors))
        # What is decoded can be any window, and experts as they are stored.
        is_decoded = not on_gpu or (exact and len(each.entry.target.shape) > 2)
        repacked = each.repacked_because is not None and not is_decoded
        (block.repacked if repacked else block.stored).append(each)
    return list(blocks.values())


def _choose(blocks: list[_Block], options: Options, memory: int | None) -> None:
    """Has blocks lie in the fast layout as far as is wanted, from the first on."""
    if options.residence == "stored":
        return
    sizes = [Group(block.items).nbytes("fast") for block in blocks]
    budget = sum(sizes)
    if options.residence == "auto" and memory is not None:
        budget = int(_SHARE * memory)
    for block, size in zip(blocks, sizes, strict=True):
        block.residence = "fast" if budget >= size else "stored"
        budget -= size


# ---- loading ----


def _load(blocks: list[_Block], options: Options, device: torch.device, bar: Bar) -> None:
    """Gives layers their weights, container by container and form by form."""
    entries: dict[int, _Entry] = {}
    jobs: dict[tuple[int, Residence], tuple[Tensors, list[Group]]] = {}
    for block in blocks:
        entries |= {id(each.item): each.entry for each in (*block.stored, *block.repacked)}
        forms: list[Residence] = [block.residence, "fast"]
        for some, form in zip((block.stored, block.repacked), forms, strict=True):
            _, mine = jobs.setdefault((id(block.tensors), form), (block.tensors, []))
            mine.append(Group([each.item for each in some], device, form))
    for tensors, mine in jobs.values():
        for item, value in bring(tensors, mine, options.exact, bar):
            target, _, layers = entries[id(item)]
            if item.reason is not None:
                value = _padded(value, target).to(device)
            for layer, name in layers:
                give(layer, name, value, target)
            target.patches.clear()


def _padded(dense: Tensor, target: Target) -> Tensor:
    """The values of a weight that is to be ordinary, with the shape of its target."""
    dense = dense.view(-1, target.columns)
    padding = target.rows - dense.shape[0]
    return nn.functional.pad(dense, (0, 0, 0, padding)).view(target.shape)


def _tell(blocks: list[_Block], read: int) -> None:
    """One line for each way in which weights lie, and why."""
    forms = Counter(block.residence for block in blocks)
    whole = ", ".join(f"{count} blocks {form}" for form, count in forms.items())
    logger.info("df11: %s; %s bytes of compressed matrices read", whole or "nothing", f"{read:,}")
    reasons: Counter[str] = Counter()
    for block in blocks:
        for each in block.repacked:
            reasons[f"repacked into the fast layout: {each.repacked_because}"] += 1
        for item in block.items:
            if item.reason is not None:
                reasons[f"BF16: {item.reason}"] += 1
    for reason, count in reasons.items():
        logger.info("df11: %d weights %s", count, reason)
