"""Workspaces of products on GPUs: zeroed memory, which each product leaves zeroed.

A product has its workspace for itself while it runs. Products on one stream run one after another,
so one workspace for each stream is enough. A captured graph may be replayed on any stream, together
with anything else: each capture has a workspace of its own.

No workspace is ever freed: kernels in flight and captured graphs have its address. Nor does one
come from the memory pool of a capture: PyTorch's CUDA graph trees refuse memory there that is none
of a graph's results, and a zeroing would be recorded, not done. So workspaces are made by a thread
of their own, whose allocations no pool gets; and as memory cannot be allocated during a capture,
one is made beforehand.
"""

from __future__ import annotations

from threading import Lock, Thread

import torch
from torch import Tensor

from . import _native

_lock = Lock()
#: By GPU, stream and capture (0: none).
_held: dict[tuple[int, int, int], Tensor] = {}
#: Too small by now, but perhaps in use.
_retired: list[Tensor] = []
#: For each GPU one for the next capture, as large as the largest in use.
_spare: dict[int, Tensor] = {}


def workspace(index: int, stream: int, size: int) -> Tensor:
    """A workspace of at least `size` bytes for the next product on this stream of a GPU."""
    # The default stream, 0, cannot be captured.
    capture = _native.capture_id(stream) if stream else 0
    held = _held.get((index, stream, capture))
    if held is not None and held.nbytes >= size and (capture or index in _spare):
        return held
    with _lock:
        if capture:
            return _captured((index, stream, capture), size)
        return _eager((index, stream, 0), size)


def _eager(key: tuple[int, int, int], size: int) -> Tensor:
    index = key[0]
    held = _held.get(key)
    if held is None or held.nbytes < size:
        if held is not None:
            _retired.append(held)
        held = _held[key] = _made(index, size)
    spare = _spare.get(index)
    if spare is None or spare.nbytes < held.nbytes:
        _spare[index] = _made(index, held.nbytes)
    return held


def _captured(key: tuple[int, int, int], size: int) -> Tensor:
    index = key[0]
    spare = _spare.get(index)
    if spare is not None and spare.nbytes >= size:
        if key in _held:
            _retired.append(_held[key])
        _held[key] = _spare.pop(index)
        return _held[key]
    # No product ran before the capture. This one is the graph's: zeroed at each replay, and free
    # for what follows the product on the stream as soon as the caller drops it.
    return torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", index))


def _made(index: int, size: int) -> Tensor:
    made: list[Tensor] = []

    def make() -> None:
        with torch.cuda.device(index):
            room = 1 << (size - 1).bit_length()
            made.append(torch.zeros(room, dtype=torch.uint8, device=torch.device("cuda", index)))
            torch.cuda.current_stream().synchronize()

    thread = Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError(f"no memory for a workspace of {size} bytes on GPU {index}")
    return made[0]
