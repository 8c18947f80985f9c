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

from . import _native, _plan
from ._bring import pack_dense
from ._encoding import LEAST_BYTES, encode, is_encodable
from ._load import place_others
from ._online import stamp
from ._parameters import entries, warn_of_conversions
from ._plan import EXCEPTIONAL, NO_TILES, SMALL, aligned, fast_bytes, matrix_of
from ._pretrained import LastConversion
from ._reading import Ahead
from ._source import Source, Spot, Weight, sum_of
from ._tensor import CompressedTensor

#: About how much of BF16 the larger one, the fast layout, takes.
PACKED = 0.76


class Packer(LastConversion):
    """Compresses each parameter on its device."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None,
        exact: bool,
        residence: str,
    ) -> None:
        super().__init__(model, dtype)
        self.folder, self.device, self.exact = folder, device, exact
        self.is_fast = residence == "fast"
        self.stamp = stamp(folder)
        #: By name, why a parameter is ordinary, if it is, and the sum of its bits.
        self._known: dict[str, tuple[str | None, Tensor]] = {}
        #: Where decode tables are to be made.
        self._tables: list[tuple[int, int, int]] = []
        #: How many weights have another dtype than in their file.
        self._conversions: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def slices(self, files: list[str]) -> dict[str, Any] | None:
        """What the loader takes for the checkpoint: tensors that are on the device already. None
        for files with a dtype that PyTorch lacks, which the loader reads by itself.
        """
        try:
            ahead = self.reader = Ahead(files, self.device)
        except TypeError:
            return None
        return ahead.slices()

    # ---- what the loader calls ----

    def take(self, values: dict[str, Tensor], sources: list[str]) -> dict[str, Any]:
        """Compresses what the loader would put into the model."""
        used = next(iter(values.values())).dtype
        for name in sources:
            if (stored := self.reader.stored(name).kind) != used:
                self._conversions[stored, used] += 1
        return {name: self._parameter(name, value) for name, value in values.items()}

    def _parameter(self, name: str, value: Tensor) -> Tensor:
        path, _, attribute = name.rpartition(".")
        value = value.to(self.device)
        if attribute in self.model.get_submodule(path)._buffers:
            return value
        found = _why_ordinary(value) or (self._fast(value) if self.is_fast else self._stored(value))
        reason = found if isinstance(found, str) else None
        self._known[name] = reason, sum_of(value)
        return nn.Parameter(value if isinstance(found, str) else found, requires_grad=False)

    def _fast(self, value: Tensor) -> CompressedTensor | str:
        """The weight in the fast layout, or why it is not."""
        if value.shape[-1] % 8:
            return "rows of no multiple of eight weights"
        if fast_bytes(value) >= value.nbytes:
            return SMALL
        if (packed := pack_dense(self.device, value)) is None:
            return EXCEPTIONAL
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

    def finish(self) -> Source:
        """Brings the rest of the model to the GPU; what it has of the files."""
        if self.reader is not None:
            self.reader.close()
        warn_of_conversions(self._conversions)
        if self._tables:
            torch.cuda.current_stream(self.device).synchronize()
            _native.build_tables(self.device.index, self._tables)
        model, weights = self.model, []
        for entry in entries(model):
            name = next((each.name for each in entry.places if each.name in self._known), None)
            if name is not None:
                reason, total = self._known[name]
                spots = [Spot(model.get_submodule(place.path), place) for place in entry.places]
                nbytes = entry.value.numel() * entry.value.element_size()
                weights.append(Weight(name, spots, nbytes, reason, None, int(total)))
        source = Source.of_files(self.folder, self.stamp, weights)
        paths = (path for path, _ in model.named_modules(remove_duplicate=False))
        place_others(model, source, dict.fromkeys(paths, self.device))
        return source


def _why_ordinary(value: Tensor) -> str | None:
    """Why a weight is not compressed, if it is not."""
    if value.dtype != torch.bfloat16:
        return f"used as {value.dtype}".replace("torch.", "")
    return "a vector" if value.dim() < 2 or not value.numel() else None
