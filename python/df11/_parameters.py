"""Matches parameters of a module with tensors of a container, by their names."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ._arrays import dtype_of
from ._container import Lineage, Tensors, with_dtype
from ._errors import misshapen
from ._modules import Entry, entries, outer
from ._native import printable
from ._plan import Item


def by_name(root: nn.Module, tensors: Tensors, prefix: str | None = None) -> list[Item]:
    """Matches a container's tensors with a module's parameters by name, except for a prefix.
    `prefix` is added to each name in the container, or removed if it begins with `-`; None finds
    it. Raises `MissingError` if no tensor has such a name, `ValueError` for other shapes.
    """
    container, names = tensors.container, list(tensors)
    known = {spot.name: entry for entry in entries(root) for spot in entry.spots}
    rename = _renaming(known, names, prefix, container)
    wanted = wanted_by(root)
    matched: dict[int, Item] = {}
    for tensor in names:
        entry = known.get(rename(tensor))
        if entry is None:
            continue
        if id(entry.value) in matched:  # tied, and stored under both names
            tensors.used.add(tensor)
            continue
        shape, name = tuple(container[tensor].shape), entry.spots[0].name
        if shape != tuple(entry.value.shape):
            raise misshapen(name, entry.value.shape, shape, f"{container.path} ({tensor})")
        value = tensors[tensor]
        value = with_dtype(value, wanted(name, value.dtype))
        matched[id(entry.value)] = Item(name, value, [tensor])
    return list(matched.values())


def by_conversion(module: Any, tensors: Tensors) -> list[Item] | None:
    """Converts a checkpoint in its original format for a model, as diffusers does. None if
    diffusers has no conversion for the model, or if the checkpoint has the model's own names.
    """
    from diffusers.loaders import single_file_model as single

    find: Any = single._get_single_file_loadable_mapping_class
    kind, own = find(type(module)), module.state_dict()
    if kind is None or own.keys() <= set(tensors):
        return None
    values = {name: tensors[name] for name in tensors}
    lineage = Lineage(tensors, dict(values))
    known: Any = single.SINGLE_FILE_LOADABLE_CLASSES
    convert = known[kind]["checkpoint_mapping_fn"]
    wanted, items = wanted_by(module), []
    for name, value in convert(checkpoint=values, config=dict(module.config)).items():
        if name not in own:
            continue
        if value.shape != own[name].shape:
            raise misshapen(name, own[name].shape, value.shape, tensors.container.path)
        made = with_dtype(value, wanted(name, value.dtype))
        items.append(Item(name, made, lineage.of(value)))
    return items


def check_complete(root: nn.Module, items: list[Item], container: Any) -> None:
    """Checks that the container or the module itself has every value.
    Raises `MissingError` for parameters, `ValueError` for buffers.
    """
    held = {item.name for item in items}
    some = [each for each in entries(root) if held.isdisjoint(spot.name for spot in each.spots)]
    left = {entry.spots[0].name: entry for entry in some}
    optional: Any = getattr(root, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [
        name
        for name, entry in left.items()
        if entry.is_persistent and (entry.value.is_meta or not entry.is_buffer)
        if not any(re.search(pattern, name) for pattern in optional)
    ]
    if missing:
        names = ", ".join(missing[:4])
        names += f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise MissingError(
            f"{printable(container.path)} has no tensor for {printable(names)}; load it into the "
            "class that the checkpoint was made from, or name the part of the module that it "
            "belongs to"
        )
    if lost := [name for name, each in left.items() if each.value.is_meta and each.is_buffer]:
        raise ValueError(
            f"{len(lost)} buffers of the module are on the meta device and in no checkpoint, "
            f"{lost[0]} for one; load it with from_pretrained, or make it with "
            "accelerate.init_empty_weights(), which leaves buffers alone, or on the CPU"
        )


class MissingError(KeyError):
    """The container lacks parameters that the module has."""

    def __str__(self) -> str:
        return str(self.args[0])


def _renaming(
    known: dict[str, Entry], names: list[str], prefix: str | None, container: Any
) -> Callable[[str], str]:
    if prefix is not None:
        return _change(prefix)
    shapes = {name: tuple(entry.value.shape) for name, entry in known.items()}

    def hits(candidate: str) -> int:
        rename = _change(candidate)
        return sum(shapes.get(rename(name)) == tuple(container[name].shape) for name in names)

    # Among the prefixes that fit one tensor, take the one that fits most.
    scores = {"": sum(name in known for name in names)}
    scores |= {candidate: hits(candidate) for candidate in dict.fromkeys(_candidates(known, names))}
    best = max(scores, key=lambda candidate: scores[candidate])
    if scores[best] == 0:
        example = next(iter(known), "none")
        raise MissingError(
            f"no tensor of {container.path} ({names[0] if names else 'it is empty'}, …) belongs to "
            f"a parameter of the module ({example}, …); attach the module that the checkpoint was "
            "made from"
        )
    return _change(best)


def _candidates(known: dict[str, Entry], names: list[str]) -> Iterator[str]:
    for name in names[:: max(1, len(names) // 8)]:
        for other in known:
            if other.endswith("." + name):
                yield other[: -len(name)]
            elif name.endswith("." + other):
                yield "-" + name[: -len(other)]


def _change(prefix: str) -> Callable[[str], str]:
    if prefix.startswith("-"):
        return lambda name: name.removeprefix(prefix[1:])
    return lambda name: prefix + name


_HALVES = (torch.float16, torch.bfloat16)


def wanted_by(root: nn.Module) -> Callable[[str, torch.dtype | None], torch.dtype | None]:
    """Returns a function from a parameter's name and stored dtype to the dtype in which the library
    of its module would load it: the stored one, or F32 for parameters that stay F32 beside weights
    of 16 bits. diffusers lists words of names in `_keep_in_fp32_modules`; transformers has a plan
    of patterns for each dtype. The outermost module with such a list decides, because it is loaded.
    """
    modules = ((path, _keeps(module)) for path, module in root.named_modules())
    said = {path: keeps for path, keeps in modules if keeps is not None}

    def wanted(name: str, stored: torch.dtype | None) -> torch.dtype | None:
        *_, path = "", *(path for path in outer(name) if path in said)
        if stored not in _HALVES or path not in said:
            return stored
        return torch.float32 if said[path](name[len(path) :].lstrip("."), stored) else stored

    return wanted


def _keeps(module: Any) -> Callable[[str, torch.dtype], bool] | None:
    plan = getattr(module, "_get_dtype_plan", None)
    if plan is not None:
        return lambda name, stored: planned(plan(stored), name) is not None
    words = getattr(module, "_keep_in_fp32_modules", None)
    if words is None:
        return None
    named = {words} if isinstance(words, str) else set(words)
    return lambda name, _: not named.isdisjoint(name.split("."))


def planned(plan: dict[str, torch.dtype], name: str) -> torch.dtype | None:
    """A parameter's dtype by a plan of transformers, which maps patterns to dtypes."""
    if not plan:
        return None
    pattern, groups = _pattern(tuple(plan))
    match = pattern.search(name)
    return plan[groups[match.lastgroup]] if match is not None and match.lastgroup else None


@cache
def _pattern(globs: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    from transformers.core_model_loading import build_glob_alternation

    pattern, groups, _ = build_glob_alternation(list(globs))
    return pattern, groups


#: Encodings whose weights are never compressed in memory.
_DECODED = {"raw", "delta"}


def warn_of_converted(items: Iterable[Item], container: Any, dtype: torch.dtype | None) -> None:
    """Warns of weights that are rounded, and of compressed ones that become wider.

    `dtype`: default dtype of parameters; None: the stored one.
    """
    counts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for item in items:
        used = item.value.dtype
        stored = [container[name] for name in item.tensor_names]
        for kind in {kind for one in stored if (kind := dtype_of(one.dtype)) is not None} - {used}:
            is_requested = used == dtype and not {one.encoding for one in stored} <= _DECODED
            if is_requested or torch.promote_types(kind, used) != used:
                counts[kind, used] += 1
    warn_of_conversions(counts)


def warn_of_conversions(counts: Mapping[tuple[torch.dtype, torch.dtype], int]) -> None:
    for (kind, used), count in counts.items():
        words = f"stored as {kind} and used as {used}".replace("torch.", "")
        what = _WIDENED if torch.promote_types(kind, used) == used else _ROUNDED
        warnings.warn(f"df11: {count} weights are {words}, {what}", stacklevel=2)


_ROUNDED = (
    "which rounds them, as with safetensors: the dtype argument of from_pretrained, or else the "
    "config, asks for it; name the stored dtype to keep every bit"
)
_WIDENED = (
    "because the dtype argument of from_pretrained, or else the config, asks for it; these are "
    "decoded once and take their full size; name the stored dtype to keep them compressed"
)
