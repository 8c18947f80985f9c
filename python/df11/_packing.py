"""Compresses BF16 weights while transformers loads them, on the GPU: as stored, or fast.

This takes about as long as loading BF16 weights, and needs no container: each matrix is compressed
as soon as it is on the GPU. Saving later makes the containers from the same files.

Tensors are read ahead of the loader. PyTorch copies from a mapped file to a GPU at 7 GB/s. Pinned
memory is several times as fast, and files that are read take no memory of the process.

```text
files ──THREADS──▶ two pinned buffers each ──a stream of its own──▶ tensors, until they are taken
```
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from ._arrays import known_dtype_of
from ._bring import compress
from ._container import Sliceable
from ._encoding import MIN_BYTES
from ._load import place_others
from ._modules import entries
from ._origin import Digest, Origin, Weight, digest, settled, stamp
from ._parameters import warn_of_conversions
from ._plan import SMALL, Item, Residence, why_ordinary
from ._pretrained import LastConversion, zeroed_row
from ._tensor import CompressedTensor

#: Approximate share of BF16 that the fast layout, the larger one, takes.
PACKED = 0.76
_Event: Any = torch.cuda.Event
THREADS = 4
BUFFER_BYTES = 8 << 20
#: Bytes of tensors that are on the device before they are requested, besides one tensor.
AHEAD_BYTES = 1 << 30


class PackingTaker(LastConversion):
    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None,
        exact: bool,
        residence: Residence,
    ) -> None:
        super().__init__(model, dtype)
        self.folder, self.device, self.exact = folder, device, exact
        self.residence = residence
        self.stamp = stamp(folder)
        #: By name: why a parameter is ordinary, if it is, and the digest of its values.
        self._known: dict[str, tuple[str | None, Digest]] = {}
        self._conversions: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def slices(self, files: list[str]) -> dict[str, Any] | None:
        """Tensors that are already on the device, in place of the checkpoint's. None for files with
        a dtype that PyTorch lacks; the loader reads these itself.
        """
        try:
            ahead = self.reader = Ahead(files, self.device)
        except TypeError:
            return None
        return ahead.slices()

    def take(self, values: dict[str, Tensor], tensor_names: list[str]) -> dict[str, Any]:
        used = next(iter(values.values())).dtype
        for name in tensor_names:
            if (stored := self.reader.stored(name).kind) != used:
                self._conversions[stored, used] += 1
        return {name: self._parameter(name, value) for name, value in values.items()}

    def _parameter(self, name: str, value: Tensor) -> Tensor:
        path, _, attribute = name.rpartition(".")
        value = value.to(self.device)
        if attribute in self.model.get_submodule(path)._buffers:
            return value
        if (row := zeroed_row(self.model, name)) is not None:
            value[row] = 0
        packed = self._compressed(Item(name, value, []))
        reason = packed if isinstance(packed, str) else None
        self._known[name] = reason, digest(value)
        return nn.Parameter(value if isinstance(packed, str) else packed, requires_grad=False)

    def _compressed(self, item: Item) -> CompressedTensor | str:
        """The weight that a container would give, or the reason why it stays uncompressed."""
        value = item.value
        if value.dtype != torch.bfloat16:
            return f"used as {value.dtype}".replace("torch.", "")
        if (reason := why_ordinary(item, {}, False, value.is_cuda)) is not None:
            return reason
        if value.nbytes < MIN_BYTES:
            return SMALL
        return compress(value, item.residence_if(self.residence), self.device, self.exact)

    def finish(self) -> Origin:
        """Brings the rest of the model to the GPU. Returns the origin of its weights."""
        if self.reader is not None:
            self.reader.close()
        warn_of_conversions(self._conversions)
        model, weights = self.model, []
        for entry in entries(model):
            name = next((spot.name for spot in entry.spots if spot.name in self._known), None)
            if name is not None:
                reason, loaded = self._known[name]
                nbytes = entry.value.numel() * entry.value.element_size()
                weights.append(Weight(name, entry.spots, nbytes, reason, None, settled(loaded)))
        origin = Origin(self.folder, weights, identity=self.stamp, is_of_files=True, is_packed=True)
        paths = (path for path, _ in model.named_modules(remove_duplicate=False))
        place_others(model, origin, dict.fromkeys(paths, self.device))
        return origin


class _InFile(NamedTuple):
    path: str
    offset: int
    nbytes: int
    dtype: str
    kind: torch.dtype
    shape: list[int]


class Ahead:
    """Reads tensors of some files ahead, in the order in which transformers loads them. Takes
    `AHEAD_BYTES` and one tensor of device memory, and `2 * THREADS * BUFFER_BYTES` of host memory.
    """

    def __init__(self, files: Sequence[str], device: torch.device) -> None:
        """Reads the headers of files. Raises `SafetensorError` for other files, and `TypeError` for
        a dtype that PyTorch lacks.
        """
        self.device = device
        self._entries = {name: entry for file in files for name, entry in _header(file)}
        self._waiting = dict.fromkeys(sorted(self._entries, key=dot_natural_key))
        self._read: dict[str, Future[Tensor]] = {}
        self._ahead = 0
        #: Names of tensors that were taken since a caller last cleared the list.
        self.requested: list[str] = []
        #: Names whose shapes were requested.
        self.used: set[str] = set()
        self._own = threading.local()
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(THREADS)

    def slices(self) -> dict[str, Any]:
        return {name: Sliceable(self, name, lambda value: value) for name in self._entries}

    def stored(self, name: str) -> _InFile:
        return self._entries[name]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, which the caller owns. Other tensors are read meanwhile. Raises `OSError` if it
        cannot be read.
        """
        self.requested.append(name)
        if name not in self._read:
            self._begin(name)
        read = self._read.pop(name)
        self._ahead -= self._entries[name].nbytes
        while self._waiting and self._ahead < AHEAD_BYTES:
            self._begin(next(iter(self._waiting)))
        value = read.result()
        if value.is_cuda:
            # The memory belongs to the other stream.
            value.record_stream(torch.cuda.current_stream(self.device))
        return value

    def close(self) -> None:
        self._waiting.clear()
        self._threads.shutdown(cancel_futures=True)
        self._read.clear()

    def _begin(self, name: str) -> None:
        self._waiting.pop(name, None)
        self._read[name] = self._threads.submit(self._bring, self._entries[name])
        self._ahead += self._entries[name].nbytes

    def _bring(self, entry: _InFile) -> Tensor:
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream, Path(entry.path).open("rb", buffering=0) as file:
            file.seek(entry.offset)
            data = torch.empty(entry.nbytes, dtype=torch.uint8, device=self.device)
            if self._stream is None:
                _fill(data, file)
            else:
                self._fill_by_copies(data, file)
        return data.view(entry.kind).view(entry.shape)

    def _fill_by_copies(self, data: Tensor, file: BinaryIO) -> None:
        own = self._own
        if not hasattr(own, "buffers"):
            empty = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in (0, 1)]
            own.buffers = deque((buffer, _Event()) for buffer in empty)
        for room in torch.split(data, BUFFER_BYTES):
            buffer, copied = own.buffers[0]
            own.buffers.rotate()
            copied.synchronize()
            _fill(buffer[: len(room)], file)
            room.copy_(buffer[: len(room)], non_blocking=True)
            copied.record()
        for _, copied in own.buffers:
            copied.synchronize()


def _header(path: str) -> Iterator[tuple[str, _InFile]]:
    with safe_open(path, "pt"), Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, one in header.items():
        begin, end = one["data_offsets"]
        kind = known_dtype_of(name, one["dtype"])
        yield name, _InFile(path, 8 + length + begin, end - begin, one["dtype"], kind, one["shape"])


def _fill(buffer: Tensor, file: BinaryIO) -> None:
    view = buffer.numpy().data
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends too early; it was changed while it was read")
        view = view[count:]
