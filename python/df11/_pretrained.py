"""Takes the parameters that transformers' loader makes from a container's tensors.

The loader's own code renames, converts, stacks, cuts and ties the tensors, as for any checkpoint.
df11 takes each result before the loader moves it to a device. The model's parameters have no memory
until all results are known.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, convert_and_load_state_dict_in_model

from . import _native
from ._added import in_both
from ._arrays import dtype_of
from ._container import Kept, Sliceable, Tensors, with_dtype
from ._errors import misshapen
from ._modules import is_sharded, local
from ._parameters import wanted_by
from ._plan import Item
from ._tensor import CompressedTensor


def checkpoint_dtype(container: Any) -> torch.dtype:
    """The dtype that transformers chooses if a checkpoint's config names none: that of the first
    float tensor by name in the first weights file.
    """
    from transformers.modeling_utils import get_state_dict_dtype

    path = min(shard["path"] for shard in container.shards)
    first = _native.open(path.replace(container.path, container.full_path, 1))
    kinds = {name: dtype_of(first[name].dtype) for name in sorted(first)}
    state = {name: torch.empty(0, dtype=kind) for name, kind in kinds.items() if kind is not None}
    return cast(torch.dtype, cast(Any, get_state_dict_dtype)(state))


class LastConversion(ConversionOps):
    """Acts as the loader's quantizer and as the quantizer's operation, and gets every result last.
    The loader then works on one parameter after another.
    """

    pre_quantized = False
    #: Reader of the loader. Keeps the names requested since a caller last cleared them.
    reader: Any = None

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        self.model = model
        #: Default dtype of the model's parameters; None: the stored one.
        self.dtype = dtype
        self._dtypes: dict[str, torch.dtype] = {}

    def param_needs_quantization(self, model: Any, name: str, **_: Any) -> bool:
        """Whether it has the model's dtype. The loader itself loads parameters of other dtypes."""
        if self.dtype is None:
            return True
        if name not in self._dtypes:  # experts are stored apart, many for one parameter
            self._dtypes[name] = model.get_parameter_or_buffer(name).dtype
        return self._dtypes[name] == self.dtype

    def get_quantize_ops(self) -> ConversionOps:
        return self

    @torch.inference_mode(False)  # whose tensors could not be used outside of it
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, Any]:
        requested: list[str] = []
        if self.reader is not None:
            requested, self.reader.requested = self.reader.requested, requested
        # The pattern of a tensor that is only renamed is its name. The loader may have requested
        # others that it takes itself.
        tensor_names = [name for name in requested if name in source_patterns] or [
            name for name in requested if any(re.search(each, name) for each in source_patterns)
        ]
        tensor_names = tensor_names or requested
        pairs = input_dict.items()
        values = {name: each[0] if isinstance(each, list) else each for name, each in pairs}
        return self.take(values, tensor_names)

    def take(self, values: dict[str, Tensor], tensor_names: list[str]) -> dict[str, Any]:
        """Takes the results of some tensors, and returns the parameters for the model."""
        raise NotImplementedError


def zeroed_row(model: Any, name: str) -> int | None:
    """The row of a weight that a model's class zeroes at each load, such as the row of padding. It
    is found by running the class's code on an embedding that is marked as loaded.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(module, nn.Embedding) or module.padding_idx is None:
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        probe = nn.Embedding(2, 1, padding_idx=0, device="cpu")
        probe.weight.fill_(1)
        probe.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        model._init_weights(probe)
    return None if probe.weight[0].item() else module.padding_idx


class Taker(LastConversion):
    """Keeps the results, and returns the model's own parameters to the loader."""

    def __init__(self, model: Any, tensors: Tensors, dtype: torch.dtype | None, rest: Any) -> None:
        super().__init__(model, dtype)
        self.tensors = self.reader = tensors
        self.rest = rest
        #: The file beside the containers, and the names in it.
        self.added: tuple[Path | None, list[str]] = None, []
        #: How many tensors are loaded into each parameter.
        self._fed: Counter[str] = Counter()
        self._items: list[Item] = []
        self._wrong: ValueError | None = None

    def param_needs_quantization(self, model: Any, name: str, **_: Any) -> bool:
        self._fed[name] += 1
        return super().param_needs_quantization(model, name)

    def slices(self) -> dict[str, Any]:
        return {name: Sliceable(self.tensors, name) for name in self.tensors}

    def take(self, values: dict[str, Tensor], tensor_names: list[str]) -> dict[str, Any]:
        return {name: self._take(name, value, tensor_names) for name, value in values.items()}

    def _take(self, name: str, value: Tensor, tensor_names: list[str]) -> Tensor:
        try:
            room = self.model.get_parameter_or_buffer(name)
        except AttributeError:
            return value
        if not tensor_names:  # a file beside the containers has it
            return value
        if tuple(value.shape) != tuple(local(room).shape):
            wrong = misshapen(name, local(room).shape, value.shape, self.tensors.container.path)
            self._wrong = self._wrong or wrong
        if isinstance(value, CompressedTensor):
            tensor_names = list(dict.fromkeys(self.tensors.names(value)))
        kinds = {self.tensors.container[name].encoding for name in tensor_names}
        is_gap = value.dim() > 1 and "gap" in kinds
        if not isinstance(value, CompressedTensor) and not is_gap:
            value = value.to(self.rest)
        self._items.append(Item(name, value, tensor_names))
        return nn.Parameter(room._local_tensor, requires_grad=False) if is_sharded(room) else room

    def finish(self) -> list[Item]:
        """Returns the items made, with tied weights once. Raises `ValueError` if shapes differ from
        the model's, if the model has none of the tensors, or if a file beside the containers
        repeats one of them.
        """
        self._check_added()
        if self._wrong is not None:
            raise self._wrong
        if not self._items:
            raise ValueError(
                f"no tensor of {self.tensors.container.path} belongs to a "
                f"{type(self.model).__name__}; use the class it was made for"
            )
        self._tie()
        for item in self._items:
            row = zeroed_row(self.model, item.name)
            if row is not None and item.value[row].view(torch.int16).any():
                dense = item.value.clone()  # decodes a compressed one
                dense[row] = 0
                item.value = dense
        return self._items

    def take_beside(self, path: Path | None, names: list[str]) -> None:
        """Records a file beside the containers. Raises `ValueError` if it has a tensor that is tied
        to one of theirs.
        """
        self.added = path, names
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        partners = {**tied, **{source: target for target, source in tied.items()}}
        for name in partners.keys() & names:
            if partners[name] in self.tensors:
                raise in_both(path, name)

    def left(self) -> set[str]:
        """Names of tensors that the loader itself took from the containers, in another dtype."""
        return self._fed.keys() - {item.name for item in self._items} - set(self.added[1])

    def _check_added(self) -> None:
        """Refuses a file beside the containers that has weights of theirs by other names."""
        path, names = self.added
        doubled = [f".{name}" for name, count in self._fed.items() if count > 1]
        for name in names:
            if any(fed.endswith(f".{name}") for fed in doubled):
                raise in_both(path, name)

    def _tie(self) -> None:
        known = {item.name: item for item in self._items}
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        for target, source in list(tied.items()):
            one, other = known.get(target), known.get(source)
            if one is None and other is None:
                continue
            if one is not None and other is not None:
                # The loader does not compare parameters without memory.
                if not self._is_same(one.value, other.value):
                    del tied[target]
                    continue
                self._items.remove(one)
            into, held = (target, source) if other is not None else (source, target)
            path, _, attribute = into.rpartition(".")
            module = self.model.get_submodule(path)
            setattr(module, attribute, self.model.get_parameter_or_buffer(held))

    def _described(self, value: CompressedTensor) -> tuple[list[str], dict[str, Any]]:
        """Equal tensors of several containers have other names, and the same hash."""
        names, numbers = self.tensors.describe(value)
        return [self.tensors.container[name].hash for name in names], numbers

    def _is_same(self, one: Tensor, other: Tensor) -> bool:
        if isinstance(one, CompressedTensor) and isinstance(other, CompressedTensor):
            return self._described(one) == self._described(other)
        return torch.equal(one, other)


def by_loader(model: Any, tensors: Tensors) -> list[Item]:
    """Runs transformers' loader on a container for an existing model. Dtypes are those of the
    container, and F32 for parameters that transformers keeps in F32 beside weights of 16 bits.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    taker = Taker(model, tensors, None, "cpu")
    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(hf_quantizer=cast(Any, taker), weight_mapping=mapping)
    state = {name: Sliceable(tensors, name, Kept) for name in tensors}
    convert_and_load_state_dict_in_model(model, state, config)
    wanted, items = wanted_by(model), taker.finish()
    for item in items:
        item.value = with_dtype(item.value, wanted(item.name, item.value.dtype))
    return items
