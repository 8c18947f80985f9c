"""Compresses BF16 weights while transformers loads them, on the GPU: as stored, or fast.

That takes about as long as loading them, and needs no container: each matrix is compressed as soon
as the loader has brought it there. What asks for the containers later (saving) makes them of the
same files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from . import _native, _plan
from ._bring import pack_dense
from ._encoding import LEAST_BYTES, encode, is_encodable
from ._names import Place
from ._online import stamp
from ._parameters import entries, warn_of_conversions
from ._plan import EXCEPTIONS, NO_TILES, SMALL, aligned, matrix_of
from ._reading import Ahead
from ._source import Source, Spot, Weight, sum_of
from ._tensor import CompressedTensor

#: About how much of BF16 the larger one, the fast layout, takes.
PACKED = 0.76


class Packer(ConversionOps):
    """To the loader a quantizer and its operation: it is given each parameter, and compresses it.

    Such loading is done in turn, one parameter after another.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None,
        exact: bool,
        residence: str,
    ) -> None:
        self.folder, self.device, self.dtype, self.exact = folder, device, dtype, exact
        self.is_fast = residence == "fast"
        self.stamp = stamp(folder)
        #: By name, why a parameter is ordinary, if it is, and the sum of its bits.
        self._known: dict[str, tuple[str | None, Tensor]] = {}
        #: Where decode tables are to be made.
        self._tables: list[tuple[int, int, int]] = []
        self._ahead: Ahead | None = None
        #: How many weights have another dtype than in their file.
        self._conversions: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def slices(self, files: list[str]) -> dict[str, Any] | None:
        """What the loader takes for the checkpoint: tensors that are on the device already. None
        for files with a dtype that PyTorch lacks, which the loader reads by itself.
        """
        try:
            self._ahead = Ahead(files, self.device)
        except KeyError:
            return None
        return self._ahead.slices()

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
        """Compresses what the loader would put into the model."""
        values = {
            name: value[0] if isinstance(value, list) else value
            for name, value in input_dict.items()
        }
        self._count(source_patterns, next(iter(values.values())).dtype)
        return {name: self._parameter(model, name, value) for name, value in values.items()}

    def _count(self, sources: list[str], used: torch.dtype) -> None:
        """Counts weights that are not used as they are stored."""
        if self._ahead is None:
            return
        asked, self._ahead.asked = self._ahead.asked, []
        # Of a tensor that is only renamed, the pattern is its name.
        for name in [name for name in asked if name in sources] or asked:
            if (stored := self._ahead.dtype(name)) != used:
                self._conversions[stored, used] += 1

    def _parameter(self, model: Any, name: str, value: Tensor) -> Tensor:
        path, _, attribute = name.rpartition(".")
        value = value.to(self.device)
        if attribute in model.get_submodule(path)._buffers:
            return value
        found = _why_ordinary(value) or (self._fast(value) if self.is_fast else self._stored(value))
        reason = found if isinstance(found, str) else None
        self._known[name] = reason, sum_of(value)
        return nn.Parameter(value if isinstance(found, str) else found, requires_grad=False)

    def _fast(self, value: Tensor) -> CompressedTensor | str:
        """The weight in the fast layout, or why it is not."""
        rows, columns = matrix_of(value)
        if columns % 8:
            return "rows of no multiple of eight weights"
        if _native.strips_bytes(rows, columns) * (1 + EXCEPTIONS) >= value.nbytes:
            return SMALL
        if (packed := pack_dense(self.device, value)) is None:
            return "too many exceptions for the fast layout"
        return CompressedTensor(*packed, value.shape, exact=self.exact)

    def _stored(self, value: Tensor) -> CompressedTensor | str:
        """The weight in tiles, or why it is not. The fast layout is for what writers do not cut
        into tiles of 32 rows.
        """
        if value.nbytes < LEAST_BYTES:
            return SMALL
        matrix = value.flatten(1) if value.dim() > 3 else value.reshape(matrix_of(value))
        if not is_encodable(matrix):
            return self._fast(value) if value.is_cuda else NO_TILES
        arrays, part = encode(matrix) or ([], None)
        nbytes = sum(aligned(array.numel()) for array in arrays)
        if part is None or value.nbytes - nbytes < _plan.LEAST_SAVED:
            return SMALL
        if value.is_cuda:
            book, table = arrays[0], arrays[-1]
            self._tables.append((book.data_ptr(), book.nbytes, table.data_ptr()))
        return CompressedTensor(arrays, [part], value.shape, exact=self.exact)

    # ---- afterwards ----

    def finish(self, model: nn.Module) -> Source:
        """Brings the rest of a model to the GPU; what it has of the files."""
        if self._ahead is not None:
            self._ahead.close()
        warn_of_conversions(self._conversions)
        if self._tables:
            torch.cuda.current_stream(self.device).synchronize()
            _native.build_tables(self.device.index, self._tables)
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
    """Why a weight is not compressed, if it is not."""
    if value.dtype != torch.bfloat16:
        return f"used as {value.dtype}".replace("torch.", "")
    return "a vector" if value.dim() < 2 or not value.numel() else None
