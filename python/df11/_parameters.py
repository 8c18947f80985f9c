"""Which bytes of a container a module's parameters are.

A *weight* is a parameter or buffer of the module, wherever it is reachable (tied ones in several
places), and the pieces of container tensors that its memory consists of, in order. Most weights are
one tensor. If a library fuses tensors when it loads a checkpoint (all experts of a layer in one
parameter, say), they are several tensors or rows of them, one after another. A weight that is made
of its tensors in another way is made once, and is then an ordinary parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ._names import Place, inside
from ._torch import as_buffer, bytes_of, dtype_of


class Piece(NamedTuple):
    """Rows of a tensor of the container, or all of it, at a byte offset in the weight."""

    tensor: str
    offset: int
    rows: tuple[int, int] | None = None


@dataclass
class Weight:
    """A parameter or buffer whose values the container holds."""

    places: list[Place]
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]
    is_buffer: bool = False
    #: What pieces are stored as, if that is not `dtype`.
    stored: torch.dtype | None = None
    #: Makes the weight if pieces alone do not.
    make: Callable[[], torch.Tensor] | None = None
    #: Why it is an ordinary parameter and does not stay compressed.
    ordinary_because: str | None = None
    #: Whether pieces hold its last two dimensions the other way round.
    transposed: bool = False
    tensors: list[str] = field(default_factory=list)
    #: Parts of tensors that it is, and tiles of these, if pieces do not tell them (`_parallel`).
    parts: Any = None

    def __post_init__(self) -> None:
        if not self.tensors:
            self.tensors = list(dict.fromkeys(piece.tensor for piece in self.pieces))

    @property
    def name(self) -> str:
        """Its full name, at its first place."""
        return self.places[0].name

    @property
    def nbytes(self) -> int:
        """Its decoded size."""
        return prod(self.shape) * self.dtype.itemsize

    def decode(self, container: Any) -> torch.Tensor:
        """Decodes it on the CPU, into memory of its own."""
        if self.make is not None:
            return self.make()
        out = torch.empty(self.pieces_shape, dtype=self.stored or self.dtype)
        memory = bytes_of(out)
        for tensor, offset, rows in self.pieces if out.numel() else ():
            part = container[tensor] if rows is None else container[tensor].rows(*rows)
            part.decode_into(as_buffer(memory[offset : offset + part.nbytes]))
        if self.transposed:
            out = out.transpose(-2, -1).contiguous()
        return out.to(self.dtype)

    @property
    def pieces_shape(self) -> tuple[int, ...]:
        """The shape of its pieces, one after another."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "make": None, "parts": None}


class Entry(NamedTuple):
    """A parameter or buffer of a module, with all places at which it is reachable."""

    value: torch.Tensor
    places: list[Place]
    is_buffer: bool
    is_persistent: bool

    def weight(
        self, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece], **more: Any
    ) -> Weight:
        """The weight that is this, of these pieces."""
        return Weight(list(self.places), shape, dtype, pieces, self.is_buffer, **more)


def entries(root: nn.Module) -> list[Entry]:
    """All parameters and buffers, each once."""
    found: dict[int, Entry] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for attribute, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                is_buffer = attribute in module._buffers
                persistent = attribute not in module._non_persistent_buffers_set
                entry = found.setdefault(id(value), Entry(value, [], is_buffer, persistent))
                entry.places.append(Place(path, attribute))
    return list(found.values())


def whole(container: Any, entry: Entry, tensor: str, dtype: torch.dtype | None = None) -> Weight:
    """A weight that is one tensor. `dtype`: what the module wants, if not what is stored."""
    stored = container[tensor]
    kind = dtype_of(stored)
    shape = tuple(stored.shape)
    if shape != tuple(entry.value.shape):
        raise ValueError(
            f"{entry.places[0].name} has shape {tuple(entry.value.shape)}, and {tensor} in "
            f"{container.path} has {shape}; make the module with the config that belongs to the "
            "container"
        )
    if kind is None:
        raise TypeError(f"tensor {tensor!r} has dtype {stored.dtype}, which PyTorch does not know")
    weight = entry.weight(shape, kind, [Piece(tensor, 0)])
    if dtype is not None and dtype != kind:
        weight.dtype, weight.stored = dtype, kind
        weight.ordinary_because = f"stored as {kind}, used as {dtype}".replace("torch.", "")
    return weight


def by_name(
    root: nn.Module, container: Any, prefix: str | None = None
) -> tuple[list[Weight], list[str]]:
    """Weights of a module whose parameters have the container's names, except for a prefix.

    Also the names of tensors that belong to no parameter. `prefix` goes before each name in the
    container to give the module's name, or with a leading `-` is taken away; None finds it.
    """
    names = list(container)
    known = {place.name: entry for entry in entries(root) for place in entry.places}
    rename = _renaming(known, names, prefix, container)
    wanted = wanted_by(root)
    found: dict[int, Weight] = {}
    unused = []
    for tensor in names:
        entry = known.get(rename(tensor))
        if entry is None:
            unused.append(tensor)
        elif id(entry.value) not in found:
            kind = wanted(entry.places[0].name, dtype_of(container[tensor]))
            found[id(entry.value)] = whole(container, entry, tensor, kind)
    return list(found.values()), unused


def check_complete(root: nn.Module, weights: list[Weight], container: Any) -> None:
    """Refuses a module of which neither a container nor the module itself has all values.

    # Errors
    `MissingError` for parameters, `ValueError` for buffers.
    """
    held = {place.name for weight in weights for place in weight.places}
    left = {
        entry.places[0].name: entry
        for entry in entries(root)
        if held.isdisjoint(place.name for place in entry.places)
    }
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
            f"{container.path} has no tensor for {names}; load it into the class that the "
            "checkpoint was made from, or name the part of the module that it belongs to"
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
    # Of the prefixes that fit one tensor, the one that fits most.
    best, score = "", sum(name in known for name in names)
    for candidate in _candidates(known, names):
        rename = _change(candidate)
        shapes = ((known.get(rename(name)), container[name].shape) for name in names)
        hits = sum(
            entry is not None and tuple(entry.value.shape) == tuple(shape)
            for entry, shape in shapes
        )
        if hits > score:
            best, score = candidate, hits
    if score == 0:
        example = next(iter(known), "none")
        raise MissingError(
            f"no tensor of {container.path} ({names[0] if names else 'it is empty'}, …) belongs to "
            f"a parameter of the module ({example}, …); attach the module that the checkpoint was "
            "made from"
        )
    return _change(best)


def _candidates(known: dict[str, Entry], names: list[str]) -> Iterable[str]:
    candidates: dict[str, None] = {}
    for name in names[:: max(1, len(names) // 8)]:
        for other in known:
            if other.endswith("." + name):
                candidates[other[: -len(name)]] = None
            elif name.endswith("." + other):
                candidates["-" + name[: -len(other)]] = None
    return candidates


def _change(prefix: str) -> Callable[[str], str]:
    if prefix.startswith("-"):
        return lambda name: name.removeprefix(prefix[1:])
    return lambda name: prefix + name


# ---- dtypes of what a library keeps in F32 beside weights of 16 bits ----

_HALVES = (torch.float16, torch.bfloat16)


def wanted_by(root: nn.Module) -> Callable[[str, torch.dtype | None], torch.dtype | None]:
    """Of a parameter's name and its stored dtype, the dtype that the library of its module would
    load it in.

    diffusers names parts of names in `_keep_in_fp32_modules`; transformers has a plan of patterns
    for each dtype. The outermost module that says something counts, for it is what is loaded.
    Everything else is as it is stored.
    """
    said = [
        (path, keeps)
        for path, module in root.named_modules()
        if (keeps := _keeps(module)) is not None
    ]

    def wanted(name: str, stored: torch.dtype | None) -> torch.dtype | None:
        if stored not in _HALVES:
            return stored
        for path, keeps in said:
            if inside(name, path):
                return torch.float32 if keeps(name[len(path) :].lstrip("."), stored) else stored
        return stored

    return wanted


def _keeps(module: Any) -> Callable[[str, torch.dtype], bool] | None:
    plan = getattr(module, "_get_dtype_plan", None)
    if plan is not None:
        return lambda name, stored: planned(plan(stored), name) is not None
    parts = getattr(module, "_keep_in_fp32_modules", None)
    if parts is None:
        return None
    named = {parts} if isinstance(parts, str) else set(parts)
    return lambda name, _: not named.isdisjoint(name.split("."))


def planned(plan: dict[str, torch.dtype], name: str) -> torch.dtype | None:
    """The dtype that a plan of transformers, of patterns, has for a parameter."""
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
