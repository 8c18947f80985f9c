"""Loads what vLLM's code has recorded: from containers in one pass, or of dense values.

```text
 pieces of one container, whole rows ──▶ as stored, or in the fast layout
 other pieces (dense ones, windows beside each other) ──▶ packed into the fast layout on a GPU,
                                                          ordinary weights on the CPU
```
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from .._engine import (
    SMALL,
    TILE_COLUMNS,
    TILE_ROWS,
    Bar,
    CompressedTensor,
    Group,
    Item,
    Residence,
    Tensors,
    bring,
    why_ordinary,
)
from ._deferred import Piece, Source, Target
from ._layers import NAMES, give, target_of
from ._options import Options
from ._packing import pack, without_padding

logger = init_logger("vllm.plugins.df11")

#: Of a GPU's memory that vLLM may use, what weights in the fast layout may take with `auto`.
_SHARE = 2 / 3
_CPU = torch.device("cpu")


@dataclass
class _Entry:
    """A target, and the layers that have it."""

    target: Target
    layers: list[tuple[nn.Module, str]]
    name: str
    item: Item | None = None
    tensors: Tensors | None = None
    #: Why it cannot stay as it is stored.
    repacked_because: str | None = None


@dataclass
class _Groups:
    """Entries of a block of a container; those that must be packed by themselves."""

    tensors: Tensors
    stored: list[_Entry] = field(default_factory=list)
    repacked: list[_Entry] = field(default_factory=list)


def fill(model: nn.Module, options: Options, device: torch.device, memory: int | None) -> None:
    """Loads all targets of a model whose values a container has.

    `memory`: bytes of the GPU that vLLM may use, by which `auto` decides.

    # Errors
    `ValueError` if a checkpoint lacks weights; those of `df11.open`.
    """
    entries = [entry for entry in _entries(model) if entry.target.value is None]
    on_gpu = device.type == "cuda"
    packed = [entry for entry in entries if not _prepare(entry, on_gpu)]
    for entry in packed:
        pack(entry.target, "not all of it is stored in tiles, as whole rows")
    groups = _grouped([e for e in entries if e.item is not None], on_gpu, options.exact)
    residences = _residences(groups, options, device, memory)
    read = sum(e.item.stored_bytes for e in entries if e.item is not None)
    with (bar := Bar(read)):
        _load(groups, residences, options, device, bar)
    _tell(groups, residences, read)


def _entries(model: nn.Module) -> list[_Entry]:
    """Targets in the order of the model."""
    found: dict[int, _Entry] = {}
    for path, module in model.named_modules():
        for name in NAMES:
            if (target := target_of(module, name)) is not None:
                entry = found.setdefault(id(target), _Entry(target, [], f"{path}.{name}"))
                entry.layers.append((module, name))
    return list(found.values())


# ---- what a target is of a container ----


def _prepare(entry: _Entry, on_gpu: bool) -> bool:
    """Finds which tiles of a container it is; False if it has to be made of dense values."""
    target = entry.target
    try:
        pieces = target.ordered()
    except ValueError as error:
        raise ValueError(f"the checkpoint lacks weights of {entry.name}: {error}") from None
    rows = without_padding(target, pieces)
    pieces = [piece for piece in pieces if piece.row < rows]
    sources = [piece.values for piece in pieces if isinstance(piece.values, Source)]
    if len(sources) < len(pieces) or any(p.columns != target.columns for p in pieces):
        return False
    if len({id(source.tensors) for source in sources}) != 1 or target.dtype != torch.bfloat16:
        return False
    entry.tensors = sources[0].tensors
    shape = target.shape if rows == target.rows else (rows, target.columns)
    value = _stacked(pieces, shape)
    entry.item = Item(entry.name, value, list(dict.fromkeys(source.name for source in sources)))
    entry.item.reason = why_ordinary(entry.item, entry.tensors.container, False, on_gpu)
    if not all(part.is_aligned for part in value.parts):
        entry.repacked_because = (
            f"a slice is no multiple of {TILE_ROWS} rows, {TILE_COLUMNS} columns"
        )
    elif len(target.shape) > 2:
        entry.repacked_because = "experts are multiplied in the fast layout"
    if entry.repacked_because is not None and on_gpu and entry.item.reason == SMALL:
        # Tiles around a slice are larger than what it is packed into.
        is_smaller = entry.item.nbytes("fast") < entry.item.nbytes("ordinary")
        entry.item.reason = None if is_smaller else SMALL
    return True


def _stacked(pieces: list[Piece], shape: tuple[int, ...]) -> CompressedTensor:
    """Windows of a container's tensors below each other, as a tensor in the container."""
    arrays, parts = [], []
    for piece in pieces:
        assert isinstance(piece.values, Source)
        whole = piece.values.compressed()
        (top, bottom), (left, right) = piece.source_rows, piece.source_columns
        arrays += whole.arrays
        parts.append(
            whole.parts[0]._replace(
                row_begin=top, row_end=bottom, column_begin=left, column_end=right
            )
        )
    return CompressedTensor(arrays, parts, shape)


# ---- residence ----


def _grouped(entries: list[_Entry], on_gpu: bool, exact: bool) -> list[_Groups]:
    """By blocks of their containers, in the order in which these are stored."""
    groups: dict[tuple[int, str], _Groups] = {}
    for entry in entries:
        assert entry.item is not None and entry.tensors is not None
        block = entry.tensors.container[entry.item.sources[0]].block
        group = groups.setdefault((id(entry.tensors), block), _Groups(entry.tensors))
        # What is decoded can be any window, and experts as they are stored.
        is_decoded = not on_gpu or (exact and len(entry.target.shape) > 2)
        repacked = entry.repacked_because is not None and not is_decoded
        (group.repacked if repacked else group.stored).append(entry)
    return list(groups.values())


def _residences(
    groups: list[_Groups], options: Options, device: torch.device, memory: int | None
) -> list[Residence]:
    """How each group lies."""
    if device.type != "cuda" or options.residence == "stored":
        return ["stored"] * len(groups)
    sizes = [_nbytes(group) for group in groups]
    total = sum(sizes)
    budget = total if options.residence == "fast" or memory is None else int(_SHARE * memory)
    found: list[Residence] = []
    for size in sizes:
        found.append("fast" if budget >= size else "stored")
        budget -= size
    return found


def _nbytes(group: _Groups) -> int:
    items = [e.item for e in (*group.stored, *group.repacked) if e.item is not None]
    return sum(each.nbytes(each.form("fast")) for each in items)


# ---- loading ----


def _load(
    groups: list[_Groups],
    residences: list[Residence],
    options: Options,
    device: torch.device,
    bar: Bar,
) -> None:
    """Gives layers their weights, container by container and form by form."""
    entries: dict[int, _Entry] = {}
    jobs: dict[tuple[int, Residence], tuple[Tensors, list[Group]]] = {}
    for group, residence in zip(groups, residences, strict=True):
        forms: list[tuple[list[_Entry], Residence]]
        forms = [(group.stored, residence), (group.repacked, "fast")]
        for some, form in forms:
            entries |= {id(entry.item): entry for entry in some}
            items = [entry.item for entry in some if entry.item is not None]
            _, mine = jobs.setdefault((id(group.tensors), form), (group.tensors, []))
            mine.append(Group(items, device, form))
    for tensors, mine in jobs.values():
        for item, value in bring(tensors, mine, options.exact, bar):
            entry = entries[id(item)]
            if item.reason is not None:
                value = _padded(value, entry.target).to(device)
            for layer, name in entry.layers:
                give(layer, name, value, entry.target)
            entry.target.pieces.clear()


def _padded(dense: Tensor, target: Target) -> Tensor:
    """The values of a weight that is to be ordinary, with the shape of its target."""
    dense = dense.view(-1, target.columns)
    padding = target.rows - dense.shape[0]
    return nn.functional.pad(dense, (0, 0, 0, padding)).view(target.shape)


def _tell(groups: list[_Groups], residences: list[Residence], read: int) -> None:
    """One line for each way in which weights lie, and why."""
    forms: Counter[str] = Counter(residences)
    whole = ", ".join(f"{count} blocks {form}" for form, count in forms.items())
    logger.info("df11: %s; %s bytes of compressed matrices read", whole or "nothing", f"{read:,}")
    reasons: Counter[str] = Counter()
    for group in groups:
        for entry in group.repacked:
            reasons[f"repacked into the fast layout: {entry.repacked_because}"] += 1
        for entry in (*group.stored, *group.repacked):
            if entry.item is not None and entry.item.reason is not None:
                reasons[f"BF16: {entry.item.reason}"] += 1
    for reason, count in reasons.items():
        logger.info("df11: %d weights %s", count, reason)
