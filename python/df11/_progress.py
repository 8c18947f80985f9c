"""Progress of long calls: a bar on a terminal or in a notebook, or the caller's callable."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

Progress = bool | Callable[[str, int, int], object] | None


def _word(stage: str) -> str:
    return stage.removesuffix("e") + "ing"


class Watcher:
    def __init__(self, show: Callable[[str, int, int], object]) -> None:
        self.show = show

    def __call__(self, stage: str, done: int, total: int) -> object:
        """`done` of `total` bytes, over all stages."""
        return self.show(stage, done, total)

    def close(self) -> None:
        """The work has ended, successfully or not."""


class _Line(Watcher):
    def __init__(self) -> None:
        self.start, self.width = time.monotonic(), 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        seconds = max(time.monotonic() - self.start, 1e-9)
        share = 100 * done / total if total else 0
        text = f"{_word(stage)} {share:3.0f} %  {done / seconds / 1e6:,.0f} MB/s"
        sys.stderr.write("\r" + text.ljust(self.width))
        sys.stderr.flush()
        self.width = len(text)

    def close(self) -> None:
        sys.stderr.write("\r" + " " * self.width + "\r")
        sys.stderr.flush()


class _Tqdm(Watcher):
    def __init__(self, tqdm: Any) -> None:
        self.bar, self.stage = tqdm(unit="B", unit_scale=True, leave=False), ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        if stage != self.stage:
            self.stage = stage
            self.bar.set_description(_word(stage))

    def close(self) -> None:
        self.bar.close()


def watcher(progress: Progress) -> Watcher | None:
    """Makes the watcher that an argument `progress` asks for; `None` watches nothing."""
    if callable(progress):
        return Watcher(progress)
    if progress is None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        in_notebook = type(shell).__name__ == "ZMQInteractiveShell" or "google.colab" in sys.modules
        progress = sys.stderr is not None and (sys.stderr.isatty() or in_notebook)
    if not progress:
        return None
    try:
        return _Tqdm(importlib.import_module("tqdm.auto").tqdm)
    except ImportError:
        return _Line()


class Bar:
    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.watcher: Watcher | None = None

    def __enter__(self) -> None:
        self.watcher = watcher(None)

    def __exit__(self, error: object, *_: object) -> None:
        if self.watcher is not None:
            if error is None:  # decoded and newly encoded weights count no bytes
                self.watcher("load", self.total, self.total)
            self.watcher.close()

    def add(self, count: int) -> None:
        """This many stored bytes more are loaded."""
        self.done += count
        self.show("load", 0, 0)

    def show(self, stage: str, done: int, total: int) -> None:
        """Shows this many bytes more; `add` counts them when their tensors are loaded."""
        if self.watcher is not None:
            self.watcher("load", min(self.done + done, self.total), self.total)
