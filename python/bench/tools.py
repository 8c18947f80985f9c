"""Common parts of benchmarks: options, rows of figures, seconds."""

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from checkpoints import GEOMETRIES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], torch.Tensor]


def scratch() -> Path:
    """Memory, if there is enough of it, for files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 40e9 else Path("/tmp")


def attention(device: torch.device, *backends: SDPBackend) -> Any:
    """Attention that gives the same bits for the same input, on GPUs: cuDNN's, PyTorch's default on
    Hopper, does not.
    """
    return sdpa_kernel(list(backends)) if device.type == "cuda" and backends else nullcontext()


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
    "--layout": {"choices": ["tile", "gap"], "help": "how weights are stored"},
    "--mode": {"choices": ["exact", "fused"], "default": "exact"},
    "--residence": {
        "choices": ["stored", "fast", "auto"],
        "default": "auto",
        "help": "in records before 2026-11-28: stored",
    },
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
    is_large = type(value) is int and value > 10**7
    return f"{value / 1e9:.3f}G" if is_large else str(value)


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


def used(device: torch.device | int) -> int:
    """Bytes in use on a GPU, by whatever allocated them."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free_bytes, total = torch.cuda.mem_get_info(device)
    return total - free_bytes


def told(report: Any) -> str:
    return "   " + str(report).replace("\n", "\n   ")


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds of some work on a device, which waits for nothing else."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels(device: torch.device, step: Callable[[], Any], count: int = 3) -> dict[str, float]:
    """Seconds of each kernel of a GPU in one of `count` steps, those that take the most first."""
    if device.type != "cuda":
        return {}
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            step()
        synchronize(device)
    spent = {row.key: row.self_device_time_total / count / 1e6 for row in found.key_averages()}
    return dict(sorted(spent.items(), key=lambda row: -row[1]))


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


def in_turns(rounds: int, works: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of what each answers: in turns, as machines are not equally fast all the time."""
    found = [{kind: work() for kind, work in works.items()} for _ in range(rounds)]
    return {kind: sorted(each[kind] for each in found)[rounds // 2] for kind in works}
