"""Decoding ahead: the next unit is decoded on a stream of its own while one runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._runtime import Runtime


class Ahead:
    """The units of one GPU, in the order of use.

    When a unit begins, all work that used the memory of the one after it is on the caller's stream already,
    so that an event recorded then is what decoding that one has to wait for. Nothing is decoded beyond the
    last unit: a forward that ends has joined the stream, as the capture of a CUDA graph demands.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        #: The unit that is decoded ahead, and whether a graph captured that.
        self.pending: tuple[int, bool] | None = None
        mine = [at for at, other in enumerate(runtime.unit_devices) if other == device]
        spans = {at: (runtime.offsets[at], runtime.offsets[at] + runtime.units[at].nbytes) for at in mine}
        self.next: dict[int, int] = {}
        for at, after in pairwise(mine):
            (begin, end), (start, stop) = spans[at], spans[after]
            if end <= start or stop <= begin:
                self.next[at] = after
        self.decode = {at: runtime._programs[at] for at in mine}

    def decoder(self, at: int) -> Callable[[], None]:
        """Has a unit decoded for the current stream, and starts with the next one."""
        return lambda: self.take(at)

    def take(self, at: int) -> None:
        """As :meth:`decoder` says."""
        stream = torch.cuda.current_stream(self.device)
        capturing = torch.cuda.is_current_stream_capturing()
        ahead = None
        # What was decoded ahead outside of a capture was waited for before the capture began, or will be
        # decoded again.
        if self.pending is not None and self.pending[1] == capturing:
            stream.wait_event(self.ready)
            ahead = self.pending[0]
        if ahead != at:
            self.decode[at]()
        self.pending = None
        following = self.next.get(at)
        if following is None:
            return
        self.begun.record(stream)
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            self.decode[following]()
        self.ready.record(self.stream)
        self.pending = (following, capturing)
