#!/usr/bin/env python3
"""One decode step of a language model: BF16 beside compressed weights, in one process, in turns.

    python bench/decode_step.py --compile                 # Llama-3.1-8B geometry, seeded, GPU 0
    python bench/decode_step.py --layers 4 --batches 1    # a smaller model
    python bench/decode_step.py --geometry tiny --device cpu    # tries it

For each batch: medians of a step, launched by Python or captured in a CUDA graph, with a static
cache of 512 tokens; how far logits are from those of BF16; and the sum of all kernels' time in
three eager steps. With --compile also a step that `torch.compile(fullgraph=True)` made, captured in
a graph. The checkpoint and its containers stay in --work for the next run.

| kind | weights |
|---|---|
| bf16 | as they are |
| exact | as stored, mode exact |
| stored | as stored, mode fused |
| fast | fast layout, mode fused |
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from llm import GEOMETRIES, Bench, free, numbers, scratch
from torch.profiler import ProfilerActivity, profile

import df11

KINDS: dict[str, dict[str, str] | None] = {
    "bf16": None,
    "exact": {"mode": "exact", "residence": "stored"},
    "stored": {"mode": "fused", "residence": "stored"},
    "fast": {"mode": "fused", "residence": "fast"},
}
CACHE_TOKENS = 512
Step = Callable[[], torch.Tensor]


def main() -> None:
    """Runs all parts."""
    options = parser(__doc__, "cuda:0", [1, 8, 32, 128])
    options.add_argument("--compile", action="store_true")
    bench = Steps(options.parse_args())
    bench.make()
    bench.run()


def parser(text: str | None, gpu: str, batches: list[int]) -> argparse.ArgumentParser:
    """The options of benchmarks of a step."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.set_defaults(layout=None)
    made.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    made.add_argument("--layers", type=int, help="this many layers instead of the geometry's")
    made.add_argument("--device", default=gpu if torch.cuda.is_available() else "cpu")
    made.add_argument("--kinds", type=lambda names: names.split(","), default=list(KINDS))
    made.add_argument("--batches", type=numbers, default=batches)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--work", type=Path, default=scratch() / "df11-bench")
    made.add_argument("--out", type=Path, help="rows are appended to this file")
    return made


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
    return float(ordered[len(ordered) // 2])


class Steps(Bench):
    """All kinds of one model, in turns."""

    def run(self) -> None:
        """Loads all kinds, and measures a step of them."""
        models = {kind: self.loaded(kind) for kind in self.options.kinds}
        for batch in self.options.batches:
            self.time(models, batch)
        if self.options.compile:
            self.compiled(models)

    def kind(self, kind: str, **how: Any) -> Any:
        """A model of this kind."""
        if (words := KINDS[kind]) is not None:
            how["quantization_config"] = df11.Df11Config(**words)
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folders["bf16" if words is None else "df11"], dtype=torch.bfloat16, **how
        )

    def loaded(self, kind: str) -> Any:
        """A model on the device, and what loading it took."""
        before, start = self.allocated(), time.perf_counter()
        model = self.kind(kind, device_map=self.options.device)
        self.sync()
        seconds = time.perf_counter() - start
        self.row("load", kind=kind, seconds=seconds, allocated=self.allocated() - before)
        return model

    def allocated(self) -> int:
        """Bytes that PyTorch has given out on the GPU."""
        free()
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0

    def time(self, models: dict[str, Any], batch: int) -> None:
        """A decode step of each kind, in turns."""
        steps = {kind: self.step(model, batch) for kind, model in models.items()}
        logits = {kind: step() for kind, step in steps.items()}
        eager = {kind: self.rounds(lambda s=s: self.milliseconds(s)) for kind, s in steps.items()}
        self.tell("eager", batch, eager)
        if self.on_gpu:
            graphs = {kind: capture(step) for kind, step in steps.items()}
            logits = {kind: found for kind, (_, found) in graphs.items()}
            times: dict[str, list[float]] = {kind: [] for kind in graphs}
            for _ in range(self.options.rounds):
                for kind, (graph, _) in graphs.items():
                    times[kind].append(replays(graph))
            self.tell("graph", batch, {kind: median(each) for kind, each in times.items()})
        self.logits(logits, batch)
        if self.on_gpu:
            self.tell("kernels", batch, {kind: kernels(step) for kind, step in steps.items()})

    def logits(self, logits: dict[str, torch.Tensor], batch: int) -> None:
        """How far those of each kind are from those of BF16, of the largest."""
        expected = logits["bf16"].float() if "bf16" in logits else None
        for kind, found in logits.items() if expected is not None else ():
            away = float((found.float() - expected).abs().max() / expected.abs().max())
            self.row("logits", kind=kind, batch=batch, identical=away == 0, away=away)

    def compiled(self, models: dict[str, Any]) -> None:
        """A step of one row that `torch.compile` made."""
        for kind, model in models.items():
            start = time.perf_counter()
            torch._dynamo.reset()
            step = self.step(torch.compile(model, fullgraph=True), 1)
            if self.on_gpu:
                graph, _ = capture(step)
                found = self.rounds(lambda graph=graph: replays(graph))
            else:
                step()
                found = self.rounds(lambda step=step: self.milliseconds(step))
            self.row("compiled", kind=kind, milliseconds=found, took=time.perf_counter() - start)

    def rounds(self, once: Callable[[], float]) -> float:
        """The median of some."""
        return median(once() for _ in range(self.options.rounds))

    def milliseconds(self, step: Step) -> float:
        """Of five steps, each of them."""
        return 1e3 * self.seconds(lambda: [step() for _ in range(5)]) / 5

    def step(self, model: Any, batch: int) -> Step:
        """A decode step at position 64, with a cache of its own."""
        cache = transformers.StaticCache(config=self.config, max_cache_len=CACHE_TOKENS)
        ids = self.prompt(batch, 1)
        place = torch.tensor([64], device=self.device)

        @torch.no_grad()
        def step() -> torch.Tensor:
            output = model(
                input_ids=ids, past_key_values=cache, cache_position=place, position_ids=place[None]
            )
            return output.logits

        return step

    def tell(self, what: str, batch: int, times: dict[str, float]) -> None:
        """Milliseconds, and how many times as fast as BF16 each is."""
        for kind, value in times.items():
            ratio = times["bf16"] / value if "bf16" in times else None
            self.row(what, kind=kind, batch=batch, milliseconds=value, of_bf16=ratio)


def kernels(step: Step, count: int = 3) -> float:
    """Milliseconds of all kernels in an eager step."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    return sum(float(event.device_time_total) for event in found.key_averages()) / count / 1e3


if __name__ == "__main__":
    main()
