"""Loads the recorded weights: from containers in one pass, or from dense values.

```text
 patches of one container, whole rows ──▶ as stored, or in the fast layout
 other patches (dense ones, windows beside each other) ──▶ packed into the fast layout on a GPU,
                                                          ordinary weights on the CPU
```
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from .._bring import bring
from .._container import Tensors
from .._devices import FAST_SHARE
from .._matrices import TILE_COLUMNS, TILE_ROWS, Part
from .._plan import SMALL, Item, Residence, WeightBlock, why_ordinary
from .._progress import Bar
from .._tensor import CompressedTensor
from ._deferred import Deferred, Stored, Target, lacking
from ._layers import (
    FP8,
    NAMES,
    Df11EmbeddingMethod,
    Df11LinearMethod,
    Options,
    give,
    pack,
    target_of,
    without_padding,
)

logger = init_logger("vllm.plugins.df11")

#: Methods of layers whose parameters are all in a checkpoint.
_COMPLETE = (
    *(Df11LinearMethod, Df11EmbeddingMethod),
    *(UnquantizedLinearMethod, UnquantizedEmbeddingMethod),
)
#: Layers that have a target: its name in the model, the layer, its name there.
_Layers = list[tuple[str, nn.Module, str]]


@dataclass(eq=False, kw_only=True)
class _Tiled(Item):
    """A target that consists of tiles of a container."""

    target: Target
    layers: _Layers
    tensors: Tensors
    repacked_because: str | None = None


def fill(model: nn.Module, options: Options, device: torch.device, memory: int | None) -> None:
    """Loads all targets of a model whose values are in a container. `memory`: bytes of the GPU that
    vLLM may use, for `auto`. Raises `ValueError` if a checkpoint lacks weights; the
    errors of `df11.open`.
    """
    blocks: dict[tuple[int, str], list[_Tiled]] = {}
    for target, layers in _targets(model).items():
        if target.value is not None:
            continue
        if (tiled := _find(target, layers, device, options.exact)) is None:
            pack(target, "not all of it is stored in tiles, as whole rows")
            continue
        block = tiled.tensors.container[tiled.tensor_names[0]].block
        blocks.setdefault((id(tiled.tensors), block), []).append(tiled)
    held = list(blocks.values())
    residences: list[Residence] = ["stored"] * len(held)
    if device.type == "cuda" and options.residence != "stored":
        residences = _chosen(held, options, memory)
    read = sum(weight.stored_bytes for block in held for weight in block)
    with (bar := Bar(read)):
        _load(held, residences, options, device, bar)
    _log(held, residences, read)


def check_loaded(model: nn.Module, loaded: set[str] | None) -> None:
    """Raises a `ValueError` that names a model's parameters without values.

    `loaded`: names that the model's loading code returned, one of each shared parameter; for None,
    only recorded weights are checked. As in vLLM's own check, parameters that a module makes after
    loading may be missing, such as scales of a KV cache.
    """
    made: set[str] = set()
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, _COMPLETE) and hasattr(method, "process_weights_after_loading"):
            made |= {name for name, _ in module.named_parameters(path)}
    names: dict[nn.Parameter, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(value, []).append(name)
    counts = {}
    for value, (name, *others) in names.items():
        if isinstance(value, Deferred):
            lacks = value.backing.lacks if isinstance(value.backing, Target) else None
        else:
            is_there = loaded is None or not (loaded | made).isdisjoint((name, *others))
            lacks = None if is_there else ""
        if lacks is not None:
            counts[name] = lacks
    if counts:
        raise lacking(counts)


def _targets(model: nn.Module) -> dict[Target, _Layers]:
    layers_of: dict[Target, _Layers] = {}
    for path, module in model.named_modules():
        for name in NAMES:
            if (target := target_of(module, name)) is not None:
                layers_of.setdefault(target, []).append((f"{path}.{name}", module, name))
    return layers_of


def _find(target: Target, layers: _Layers, device: torch.device, exact: bool) -> _Tiled | None:
    """The tiles of a container that form the target; None if it must be made from dense values."""
    on_gpu = device.type == "cuda"
    because, (name, *_) = None, layers[0]
    patches = target.ordered(name)
    rows = without_padding(target, patches)
    patches = [patch for patch in patches if patch.row < rows]
    windows = [patch.values for patch in patches if isinstance(patch.values, Deferred)]
    if len(windows) < len(patches) or any(p.columns != target.columns for p in patches):
        return None
    sources = [window.backing for window in windows if isinstance(window.backing, Stored)]
    is_bf16, is_fp8 = target.dtype == torch.bfloat16, target.dtype in FP8
    is_known = is_bf16 or (is_fp8 and rows == target.rows)
    if len({id(source.tensors) for source in sources}) != 1 or not is_known:
        return None
    tensors = sources[0].tensors
    value = _stacked(windows, target.shape if rows == target.rows else (rows, target.columns))
    names = list(dict.fromkeys(source.name for source in sources))
    tiled = _Tiled(name, value, names, target=target, layers=layers, tensors=tensors)
    tiled.reason = why_ordinary(tiled, tensors.container, False, on_gpu)
    if is_fp8:
        return tiled  # to be decoded, which works for any window
    is_mixture = len(target.shape) > 2
    if not all(part.is_aligned for part in value.parts):
        because = f"a slice is no multiple of {TILE_ROWS} rows, {TILE_COLUMNS} columns"
    elif is_mixture:
        because = "experts are multiplied in the fast layout"
    if because is not None and on_gpu and tiled.reason == SMALL:
        # The tiles that enclose a slice are larger than the packed slice.
        is_smaller = tiled.nbytes("fast") < tiled.nbytes("ordinary")
        tiled.reason = None if is_smaller else SMALL
    # A GPU whose kernels do not keep the order of sums decodes experts in exact mode, and the CPU
    # decodes always. That works for any window as stored.
    decodes = exact and is_mixture and on_gpu and not _keeps_order(device)
    if on_gpu and not decodes:
        tiled.repacked_because = because
    return tiled


def _keeps_order(device: torch.device) -> bool:
    """Whether the kernels of a GPU can add in the order of others (docs/exact.md)."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _stacked(windows: list[Deferred], shape: tuple[int, ...]) -> CompressedTensor:
    arrays, parts = [], []
    for each in windows:
        assert isinstance(each.backing, Stored) and each.window is not None
        (row, rows, column, width), whole = each.window, each.backing.compressed()
        arrays += whole._arrays
        parts.append(Part(*whole.parts[0][:4], row, row + rows, column, column + width))
    return CompressedTensor(arrays, parts, shape)


def _chosen(blocks: list[list[_Tiled]], options: Options, memory: int | None) -> list[Residence]:
    sizes = [WeightBlock([*block]).nbytes("fast") for block in blocks]
    budget = sum(sizes)
    if options.residence == "auto" and memory is not None:
        budget = int(FAST_SHARE * memory)
    lefts = [budget - taken for taken in accumulate(sizes)]
    return ["fast" if left >= 0 else "stored" for left in lefts]


def _load(
    blocks: list[list[_Tiled]],
    residences: list[Residence],
    options: Options,
    device: torch.device,
    bar: Bar,
) -> None:
    jobs: dict[tuple[int, Residence], tuple[Tensors, list[WeightBlock]]] = {}
    for block, residence in zip(blocks, residences, strict=True):
        possible: list[Residence] = [residence, "fast"]
        for is_repacked, actual in enumerate(possible):
            some = [each for each in block if (each.repacked_because is not None) == is_repacked]
            key = id(block[0].tensors), actual
            _, mine = jobs.setdefault(key, (block[0].tensors, []))
            # The arrays of a block share their memory, and vLLM may replace an FP8 weight.
            apart = [each for each in some if each.target.dtype in FP8]
            together = [each for each in some if each not in apart]
            mine += [WeightBlock([*them], device, actual) for them in (together, *zip(apart))]
    for tensors, mine in jobs.values():
        for weight, value in bring(tensors, mine, options.exact, bar):
            assert isinstance(weight, _Tiled)
            target = weight.target
            if weight.reason is not None:
                dense = value.view(-1, target.columns)
                if padding := target.rows - dense.shape[0]:
                    dense = nn.functional.pad(dense, (0, 0, 0, padding))
                value = dense.view(target.shape).to(device)
            for _, layer, name in weight.layers:
                give(layer, name, value, target)
            target.patches.clear()


def _log(blocks: list[list[_Tiled]], residences: list[Residence], read: int) -> None:
    whole = ", ".join(f"{count} blocks {kind}" for kind, count in Counter(residences).items())
    logger.info("df11: %s; %s bytes of compressed matrices read", whole or "nothing", f"{read:,}")
    reasons: Counter[str] = Counter()
    for weight in (weight for block in blocks for weight in block):
        if weight.repacked_because is not None:
            reasons[f"repacked into the fast layout: {weight.repacked_because}"] += 1
        if weight.reason is not None:
            reasons[f"uncompressed: {weight.reason}"] += 1
    for reason, count in reasons.items():
        logger.info("df11: %d weights %s", count, reason)
