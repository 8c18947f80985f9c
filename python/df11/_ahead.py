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
    so that an event recorded then is what decoding that one has to wait for. A forward that ends, also one
    that fails or that is only a part of the model, has joined the stream, as the capture of a CUDA graph
    demands, and nothing is ahead any more: who knows what is decoded there before the next one. Without a
    forward around, nothing is decoded ahead.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.device = device
        self.turn = runtime._turn
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
        if self.join() != at:
            self.decode[at]()
        following = self.next.get(at)
        if following is None or not self.turn.depth:
            return
        self.begun.record(stream)
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            self.decode[following]()
        self.ready.record(self.stream)
        self.pending = (following, torch.cuda.is_current_stream_capturing())

    def join(self) -> int | None:
        """Has the caller's stream wait for what was decoded ahead, which is so no more; returns the unit."""
        pending, self.pending = self.pending, None
        # What was decoded ahead outside of a capture was waited for before the capture began, or will be
        # decoded again.
        if pending is None or pending[1] != torch.cuda.is_current_stream_capturing():
            return None
        torch.cuda.current_stream(self.device).wait_event(self.ready)
        return pending[0]
