"""Workspaces for products on GPUs: zeroed memory, which each product leaves zeroed.

Each running product needs its own workspace. Products on one stream run one after another, so one
workspace per stream is enough. A captured graph may be replayed on any stream, together with
anything else, so each capture has its own workspace.

No workspace is ever freed, because running kernels and captured graphs have its address. No
workspace comes from the memory pool of a capture: PyTorch's CUDA graph trees refuse memory there
that is not a graph's result, and zeroing would be recorded instead of executed. So a separate
thread allocates workspaces, and its allocations go to no pool. Memory cannot be allocated during a
capture, so a spare workspace is allocated beforehand.

An engine captures hundreds of graphs and replays them one after another. If it calls
`share_between_captures`, captures on a stream share the stream's workspace.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from . import _native

_lock = Lock()
#: Workspaces by GPU, stream and capture (0: none).
_held: dict[tuple[int, int, int], Tensor] = {}
#: Workspaces that became too small, but may be in use.
_retired: list[Tensor] = []
#: Large workspaces are multiples of this, in bytes; others are powers of two.
_STEP = 16 << 20
#: Workspaces for the next capture, by GPU and whether it is large: the largest size of products
#: outside captures. A capture of small products alone leaves the large one.
_spare: dict[tuple[int, bool], Tensor] = {}
_is_shared = False


def share_between_captures() -> None:
    """The caller promises that this process never runs two graphs, or a graph and other work, at
    the same time. A branch of a stream inside a graph is another stream with its own workspace.
    """
    global _is_shared
    _is_shared = True


def workspace(index: int, stream: int, size: int) -> Tensor:
    """A workspace of at least `size` bytes for the next product on this stream of a GPU."""
    # The default stream, 0, cannot be captured.
    capture = _native.capture_id(stream) if stream and not _is_shared else 0
    key, room = (index, stream, capture), _room(size)
    held = _held.get(key)
    has_spare = capture or _is_shared or _has_spare(index, room)
    if held is not None and held.nbytes >= room and has_spare:
        return held
    with _lock:
        if capture or (stream and _native.capture_id(stream)):
            return _captured(key, room)
        return _eager(key, room)


def _room(size: int) -> int:
    return -(-size // _STEP) * _STEP if size > _STEP else 1 << (size - 1).bit_length()


def _has_spare(index: int, room: int) -> bool:
    spare = _spare.get((index, room > _STEP))
    return spare is not None and spare.nbytes >= room


def _eager(key: tuple[int, int, int], room: int) -> Tensor:
    index, *_ = key
    held = _held.get(key)
    if held is None or held.nbytes < room:
        held = _hold(key, _allocate(index, room))
    if not _has_spare(index, room):
        kind = (index, room > _STEP)
        # Nobody got the smaller one, so it may be freed.
        _spare.pop(kind, None)
        _spare[kind] = _allocate(index, room)
    return held


def _captured(key: tuple[int, int, int], room: int) -> Tensor:
    index = key[0]
    for is_large in (False, True):
        spare = _spare.get((index, is_large))
        if spare is not None and spare.nbytes >= room:
            return _hold(key, _spare.pop((index, is_large)))
    # No such product ran before the capture. This memory belongs to the graph: zeroed at each
    # replay, and free for later work on the stream as soon as the caller drops it.
    return torch.zeros(room, dtype=torch.uint8, device=torch.device("cuda", index))


def _hold(key: tuple[int, int, int], made: Tensor) -> Tensor:
    if key in _held:
        _retired.append(_held[key])
    _held[key] = made
    return made


def _allocate(index: int, room: int) -> Tensor:
    def make() -> Tensor:
        with torch.cuda.device(index):
            zeros = torch.zeros(room, dtype=torch.uint8, device=torch.device("cuda", index))
            torch.cuda.current_stream().synchronize()
        return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
