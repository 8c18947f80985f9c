"""Reads tensors of safetensors files onto a device, ahead of the loader that asks for them.

PyTorch copies from a mapped file to a GPU at 7 GB/s, whoever asks for it; pinned memory is several
times as fast, and files that are read take no memory of the process.

```text
files ──THREADS──▶ two pinned buffers each ──a stream of its own──▶ tensors, until they are taken
```
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from ._container import Slice
from ._torch import known_dtype_of

_Event: Any = torch.cuda.Event
THREADS = 4
#: Of each of the two buffers that a thread has.
BUFFER_BYTES = 8 << 20
#: Tensors that are on the device before they are asked for, except for one.
AHEAD_BYTES = 1 << 30


class _Entry(NamedTuple):
    """Where a tensor is."""

    path: str
    offset: int
    nbytes: int
    dtype: str
    kind: torch.dtype
    shape: list[int]


class Ahead:
    """Tensors of some files, which are read in the order in which transformers loads them.

    Takes `AHEAD_BYTES` of the device, a tensor, and `2 * THREADS * BUFFER_BYTES` of the host.
    """

    def __init__(self, files: Sequence[str], device: torch.device) -> None:
        """Reads the headers of files.

        # Errors
        `SafetensorError` for what is no such file; `TypeError` for a dtype that PyTorch lacks.
        """
        self.device = device
        self._entries = {name: entry for file in files for name, entry in _header(file)}
        self._waiting = dict.fromkeys(sorted(self._entries, key=dot_natural_key))
        self._read: dict[str, Future[Tensor]] = {}
        self._ahead = 0
        #: Names of what was taken, for whoever empties this.
        self.asked: list[str] = []
        #: Names of which somebody wanted to know the shape.
        self.used: set[str] = set()
        self._own = threading.local()
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(THREADS)

    def slices(self) -> dict[str, Any]:
        """What a loader takes for a checkpoint."""
        return {name: Slice(self, name, lambda value: value) for name in self._entries}

    def stored(self, name: str) -> _Entry:
        """Where a tensor is."""
        return self._entries[name]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, which is the caller's; others are read meanwhile.

        # Errors
        `OSError` if it cannot be read.
        """
        entry = self._entries[name]
        self.asked.append(name)
        read = self._read.pop(name, None)
        if read is None:
            self._waiting.pop(name, None)
            read = self._threads.submit(self._bring, entry)
        else:
            self._ahead -= entry.nbytes
        self._start()
        value = read.result()
        if value.is_cuda:
            # Its memory is the other stream's.
            value.record_stream(torch.cuda.current_stream(self.device))
        return value

    def close(self) -> None:
        """Ends reading."""
        self._waiting.clear()
        self._threads.shutdown(cancel_futures=True)
        self._read.clear()

    def _start(self) -> None:
        while self._waiting and self._ahead < AHEAD_BYTES:
            name = next(iter(self._waiting))
            del self._waiting[name]
            entry = self._entries[name]
            self._read[name] = self._threads.submit(self._bring, entry)
            self._ahead += entry.nbytes

    # ---- in a thread ----

    def _bring(self, entry: _Entry) -> Tensor:
        """A tensor that is there when this returns."""
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


def _header(path: str) -> list[tuple[str, _Entry]]:
    """The tensors of a file that safetensors has found to be right."""
    with safe_open(path, "pt"), Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = []
    for name, one in header.items():
        begin, end = one["data_offsets"]
        kind = known_dtype_of(name, one["dtype"])
        place = (path, 8 + length + begin, end - begin)
        entries.append((name, _Entry(*place, one["dtype"], kind, one["shape"])))
    return entries


def _fill(buffer: Tensor, file: BinaryIO) -> None:
    """Fills memory of the host with what follows in a file."""
    view = buffer.numpy().data
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends too early; it was changed while it was read")
        view = view[count:]
