"""Which bytes of a container the parameters of a transformers model are.

transformers renames tensors of a checkpoint when it loads them, and fuses or splits some (all
experts of a layer become one parameter). Its own tables say how; here they are asked the same
questions, in the same order, as in
`transformers.core_model_loading.convert_and_load_state_dict_in_model`. To see where the rows of a
fused parameter come from, its conversion is run on tensors that hold the numbers of their rows
instead of weights.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from . import _native
from ._parameters import Piece, Weight, entries, planned, wanted_by, whole
from ._torch import dtype_of

#: Pieces of a weight, for each of its tensors, up to which it is decoded from pieces.
MOST_PIECES = 4


def weights_of(
    model: Any, container: Any, conversions: list[Any], dtype: torch.dtype | None
) -> tuple[list[Weight], list[str]]:
    """The weights of a model that the container holds, and tensors that belong to none."""
    mapping = _Mapping(model, container, conversions, dtype)
    for name in sorted(container, key=dot_natural_key):
        mapping.add(name)
    return mapping.finish()


def checkpoint_dtype(container: Any) -> torch.dtype:
    """What transformers takes for the dtype of a checkpoint whose config names none: that of its
    first float tensor.

    Asked of the first weights file alone, in the order of its names, as transformers reads them.
    """
    from transformers.modeling_utils import get_state_dict_dtype

    first = _native.open(min(shard["path"] for shard in container.shards))
    kinds = {name: dtype_of(first[name]) for name in sorted(first)}
    state = {
        name: torch.empty(0, dtype=kind, device="meta")
        for name, kind in kinds.items()
        if kind is not None
    }
    chosen: Callable[[Any], torch.dtype] = get_state_dict_dtype
    return chosen(state)


class _Mapping:
    def __init__(
        self, model: Any, container: Any, conversions: list[Any], dtype: torch.dtype | None
    ) -> None:
        self.model = model
        self.container = container
        self.renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self.by_pattern = {
            pattern: entry for entry in self.converters for pattern in entry.source_patterns
        }
        self.entries = {place.name: entry for entry in entries(model) for place in entry.places}
        self.state = {
            name: entry.value for name, entry in self.entries.items() if entry.is_persistent
        }
        self.dtype = dtype
        self.kept = wanted_by(model)
        self.plan = model._get_dtype_plan(dtype) if dtype is not None else {}
        self.converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        self.found: dict[str, Weight] = {}
        self.unused: list[str] = []

    def add(self, name: str) -> None:
        """Files a tensor of the container with the parameter that it goes into."""
        prefix = self.model.base_model_prefix
        renamed, pattern = rename_source_key(
            name, self.renamings, self.converters, prefix, self.state
        )
        if renamed not in self.state and name in self.state:
            renamed, pattern = rename_source_key(
                name, [], [], base_model_prefix=prefix, meta_state_dict=self.state
            )
        if renamed not in self.state:
            self.unused.append(name)
        elif pattern is None:
            self.found[renamed] = whole(
                self.container,
                self.entries[renamed],
                name,
                self.target_dtype(renamed, dtype_of(self.container[name])),
            )
        else:
            converter = self.by_pattern[pattern]
            self.converted.setdefault(renamed, (converter, []))[1].append((pattern, name))

    def target_dtype(self, name: str, stored: torch.dtype | None) -> torch.dtype | None:
        """What transformers would make of a parameter; unasked, of a model of the stored dtype."""
        if self.dtype is None:
            return self.kept(name, stored)
        return planned(self.plan, name) or self.state[name].dtype

    def finish(self) -> tuple[list[Weight], list[str]]:
        """Converts, and ties."""
        for first, (converter, sources) in self.converted.items():
            self._convert(first, converter, sources)
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        for target, source in tied.items():
            for missing, present in ((target, source), (source, target)):
                if missing in self.entries and present in self.found:
                    if not self._may_tie(missing, present):
                        continue
                    weight = self.found[missing] = self.found[present]
                    places = [*weight.places, *self.entries[missing].places]
                    weight.places[:] = dict.fromkeys(places)
                    break
        return list({id(weight): weight for weight in self.found.values()}.values()), self.unused

    def _may_tie(self, missing: str, present: str) -> bool:
        """Where a checkpoint has both, they are tied if they are the same."""
        one, other = self.found.get(missing), self.found[present]
        if one is None or one is other:
            return one is None
        if one.make or other.make or len(one.pieces) != 1 or len(other.pieces) != 1:
            return False
        hashes = [self.container[weight.pieces[0].tensor].hash for weight in (one, other)]
        return bool(hashes[0] == hashes[1])

    # ---- conversions ----

    def _convert(self, first: str, converter: Any, sources: list[tuple[str, str]]) -> None:
        if len(sources) == 1 and self._is_left_as_it_is(first, converter, sources):
            name = sources[0][1]
            dtype = self.target_dtype(first, dtype_of(self.container[name]))
            self.found[first] = whole(self.container, self.entries[first], name, dtype)
            return
        if made := self._made_of_rows(first, converter, sources):
            self.found.update(made)
        else:
            self._make_once(first, converter, sources)

    def _is_left_as_it_is(self, first: str, converter: Any, sources: list[tuple[str, str]]) -> bool:
        """Whether a conversion looks at the shape of its tensor, and finds nothing to do."""
        value = torch.empty(tuple(self.container[sources[0][1]].shape), device="meta")
        result = _converted(self.model, first, converter, sources, lambda _: value)
        return [*result] == [first] and result[first] is value

    def _made_of_rows(
        self, first: str, converter: Any, sources: list[tuple[str, str]]
    ) -> dict[str, Weight] | None:
        """Weights as a conversion makes them of tensors that hold the numbers of their rows."""
        ids: dict[str, torch.Tensor] = {}
        starts: list[tuple[int, str]] = []
        base = 0
        for _, name in sources:
            outer = self.container[name].shape[:-1]
            if not outer:
                return None
            ids[name] = torch.arange(base, base + prod(outer)).reshape((*outer, 1))
            starts.append((base, name))
            base += prod(outer)
        try:
            results = _converted(self.model, first, converter, sources, ids.__getitem__)
        except Exception:
            return None
        made: dict[str, Weight] = {}
        for name, rows in results.items():
            weight = self._from_rows(name, rows, starts) if name in self.entries else None
            if weight is None:
                return None
            made[name] = weight
        return made

    def _from_rows(
        self, name: str, ids: torch.Tensor, starts: list[tuple[int, str]]
    ) -> Weight | None:
        """A weight whose rows have these numbers; None where pieces are no way to make it."""
        entry = self.entries[name]
        tensors = [self.container[source] for _, source in starts]
        widths = {int(tensor.shape[-1]) for tensor in tensors}
        kinds = {dtype_of(tensor) for tensor in tensors}
        shape = tuple(entry.value.shape)
        if len(widths) != 1 or len(kinds) != 1:
            return None
        width, kind = widths.pop(), kinds.pop()
        if kind is None or kind != self.target_dtype(name, kind):
            return None
        transposed = shape != (*ids.shape[:-1], width)
        if transposed:
            # Of equal shapes nobody knows whether the conversion would have transposed them.
            alike = any(tuple(tensor.shape) == shape for tensor in tensors)
            if alike or ids.dim() < 2 or (*ids.shape[:-1], shape[-2]) != (*shape[:-2], 1, width):
                return None
            if ids.shape[-1] != shape[-1]:
                return None
            ids = ids.transpose(-2, -1)
        flat = ids.reshape(-1)
        begins = [start for start, _ in starts]
        # A run of numbers may go from one tensor on into the next.
        is_first = torch.zeros(max(begins[-1], int(flat.max())) + 1, dtype=torch.bool)
        is_first[begins] = True
        breaks = (flat.diff() != 1) | is_first[flat[1:]]
        cuts = [0, *breaks.nonzero().reshape(-1).add(1).tolist(), flat.numel()]
        if len(cuts) - 1 > MOST_PIECES * len(starts):
            return None
        pieces = []
        for begin, end in pairwise(cuts):
            number = int(flat[begin])
            start, source = starts[bisect_right(begins, number) - 1]
            first, *inner = self.container[source].shape[:-1]
            # Rows of the first dimension, which are some rows each.
            row, rest = divmod(number - start, prod(inner))
            count, more = divmod(end - begin, prod(inner))
            if rest or more:
                return None
            rows = None if count == first else (row, row + count)
            pieces.append(Piece(source, begin * width * kind.itemsize, rows))
        return entry.weight(shape, kind, pieces, transposed=transposed)

    def _make_once(self, first: str, converter: Any, sources: list[tuple[str, str]]) -> None:
        made: dict[str, torch.Tensor] = {}
        container, model = self.container, weakref.ref(self.model)
        wanted = self.target_dtype(first, None)

        def converted(source: str) -> torch.Tensor:
            # Converted before operations, as transformers does: they may compute.
            tensor: torch.Tensor = container[source].torch()
            return tensor if wanted is None else tensor.to(wanted)

        def make(name: str, dtype: torch.dtype) -> torch.Tensor:
            if name not in made:
                made.update(_converted(model(), first, converter, sources, converted))
            return made.pop(name).to(dtype).contiguous()

        # Which parameters come of it is known from tensors without memory.
        def empty(source: str) -> torch.Tensor:
            tensor = container[source]
            return torch.empty(tuple(tensor.shape), dtype=dtype_of(tensor), device="meta")

        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        for name, value in _converted(self.model, first, converter, sources, empty).items():
            entry = self.entries.get(name)
            if entry is None:
                self.unused.extend(source for _, source in sources)
                continue
            if tuple(value.shape) != tuple(entry.value.shape):
                raise ValueError(
                    f"{name} has shape {tuple(entry.value.shape)}, and what the container's "
                    f"tensors make has {tuple(value.shape)}; use the config that belongs to the "
                    "container"
                )
            dtype = self.target_dtype(name, value.dtype)
            assert dtype is not None
            weight = self.found[name] = entry.weight(tuple(value.shape), dtype, [])
            weight.tensors = [source for _, source in sources]
            weight.make = partial(make, name, dtype)
            weight.ordinary_because = f"made of several tensors by {operations}"


def _converted(
    model: Any,
    first: str,
    converter: Any,
    sources: list[tuple[str, str]],
    value: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What a conversion makes of its sources' values."""
    mapping = deepcopy(converter)
    for pattern, name in sources:
        mapping.add_tensor(first, name, pattern, value(name))
    made = mapping.convert(first, model=model, config=model.config)
    return {
        name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
    }
