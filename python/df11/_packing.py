"""Packs BF16 weights into the fast layout while transformers loads them, on the GPU.

That is as fast as loading them, and needs no container: each matrix is packed as soon as the loader
has brought it there. What asks for the containers later (saving) makes them of the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from . import _native
from ._bring import pack_dense
from ._names import Place
from ._online import stamp
from ._parameters import entries
from ._plan import EXCEPTIONS, SMALL, matrix_of
from ._source import Source, Spot, Weight, sum_of
from ._tensor import CompressedTensor

#: About how much of BF16 the fast layout takes.
PACKED = 0.76


class Packer(ConversionOps):
    """To the loader a quantizer and its operation: it is given each parameter, and packs it.

    Such loading is done in turn, one parameter after another.
    """

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype | None, exact: bool
    ) -> None:
        self.folder, self.device, self.dtype, self.exact = folder, device, dtype, exact
        self.stamp = stamp(folder)
        #: By name, why a parameter is ordinary, if it is, and the sum of its bits.
        self._known: dict[str, tuple[str | None, Tensor]] = {}

    # ---- what the loader calls ----

    def param_needs_quantization(self, model: Any, name: str, **_: Any) -> bool:
        """All that have the model's dtype. The loader itself loads the others, of other dtypes."""
        return bool(model.get_parameter_or_buffer(name).dtype == self.dtype)

    def get_quantize_ops(self) -> ConversionOps:
        """The last of the loader's conversions of each parameter."""
        return self

    @torch.inference_mode(False)  # whose tensors could not be used outside of it
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        model: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Packs what the loader would put into the model."""
        return {
            name: self._parameter(model, name, value[0] if isinstance(value, list) else value)
            for name, value in input_dict.items()
        }

    def _parameter(self, model: Any, name: str, value: Tensor) -> Tensor:
        path, _, attribute = name.rpartition(".")
        value = value.to(self.device)
        if attribute in model.get_submodule(path)._buffers:
            return value
        reason = _why_ordinary(value)
        packed = self._packed(value) if reason is None else None
        if reason is None and packed is None:
            reason = "too many exceptions for the fast layout"
        self._known[name] = reason, sum_of(value)
        return nn.Parameter(value if packed is None else packed, requires_grad=False)

    def _packed(self, value: Tensor) -> CompressedTensor | None:
        packed = pack_dense(self.device, value)
        return packed and CompressedTensor(*packed, value.shape, exact=self.exact)

    # ---- afterwards ----

    def finish(self, model: nn.Module) -> Source:
        """Brings the rest of a model to the GPU; what it has of the files."""
        weights = []
        for entry in entries(model):
            places = [place for place in entry.places if place.name in self._known]
            if places:
                reason, total = self._known[places[0].name]
                spots = [Spot(model.get_submodule(place.path), place) for place in entry.places]
                nbytes = entry.value.numel() * entry.value.element_size()
                weights.append(Weight(places[0].name, spots, nbytes, reason, None, int(total)))
            elif not entry.value.is_meta:
                self._move(model, entry.places, entry.value, entry.is_buffer)
        return Source.of_files(self.folder, self.stamp, weights)

    def _move(self, model: nn.Module, places: list[Place], value: Tensor, is_buffer: bool) -> None:
        if not is_buffer:
            value.data = value.data.to(self.device)
            return
        moved = value.to(self.device)
        for place in places:
            model.get_submodule(place.path)._buffers[place.attribute] = moved


def _why_ordinary(value: Tensor) -> str | None:
    """Why a weight is not packed, if it is not."""
    if value.dtype != torch.bfloat16:
        return f"used as {value.dtype}".replace("torch.", "")
    if value.dim() < 2:
        return "a vector"
    rows, columns = matrix_of(value)
    if columns % 8 or not value.numel():
        return "rows of no multiple of eight weights"
    packed = _native.strips_bytes(rows, columns) * (1 + EXCEPTIONS)
    return SMALL if packed >= value.nbytes else None
