"""What benchmarks share: options, rows of figures, seconds."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from checkpoints import GEOMETRIES

Step = Callable[[], torch.Tensor]


def scratch() -> Path:
    """Memory, if there is enough of it, for files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 40e9 else Path("/tmp")


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def device_of(text: str) -> str:
    """A device. Asked for alone: to look for GPUs keeps processes from forking (vLLM's engine)."""
    return text if text != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"


#: Options of several benchmarks.
OPTIONS: dict[str, dict[str, Any]] = {
    "--geometry": {"choices": GEOMETRIES, "default": "llama-3.1-8b"},
    "--layers": {"type": int, "help": "layers, instead of the geometry's"},
    "--device": {"type": device_of, "default": "auto", "help": "a GPU, if there is one"},
    "--layout": {"choices": ["gap", "tile"], "help": "how weights are stored"},
    "--mode": {"choices": ["exact", "fused"], "default": "exact"},
    "--residence": {"choices": ["stored", "fast", "auto"], "default": "stored"},
    "--work": {"type": Path, "default": scratch() / "df11-bench", "help": "where models are kept"},
    "--out": {"type": Path, "help": "rows are appended to this file"},
}


def parser(text: str | None, *names: str) -> argparse.ArgumentParser:
    """A parser that explains itself by `text`, with some of OPTIONS."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in names:
        made.add_argument(name, **OPTIONS[name])
    return made


def show(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(show, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and value > 10**7:
        return f"{value / 1e9:.3f}G"
    return str(value)


def tell(out: Path | None, part: str, figures: dict[str, Any], **common: Any) -> None:
    """Prints a row, and appends it to a file, there with what rows have in common."""
    shown = "  ".join(f"{name}={show(value)}" for name, value in figures.items())
    print(f"   {part}  {shown}", flush=True)
    if out:
        with out.open("a") as file:
            print(json.dumps({"part": part, **common, **figures}), file=file)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Of some work on a device, which waits for nothing else."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(step: Step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The step as a graph, and its logits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    graph.replay()
    return graph, logits


def replays(graph: torch.cuda.CUDAGraph, count: int = 5) -> float:
    """Milliseconds of a replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def median(values: Iterable[float]) -> float:
    """The middle one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
