#!/usr/bin/env python3
"""One decode step of a language model: BF16 beside compressed weights in each mode, in one process, in turns.

    python bench/decode_step.py --layers 32 --compile     # Llama-3.1-8B geometry, seeded weights, GPU 0
    python bench/decode_step.py --layers 4 --batches 1    # a smaller model

For each batch: medians of a step captured in a CUDA graph with a static cache of 512 tokens; whether logits
are those of BF16; and the sum of all kernels' time in three eager steps. With --compile also a step that
`torch.compile(fullgraph=True)` made, captured in a graph. The checkpoint and its containers stay in --work
for the next run.

| kind | weights |
|---|---|
| bf16 | as they are |
| exact | as stored, mode exact |
| stored | as stored, mode fused |
| fast | fast layout, mode fused |
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

import df11

KINDS = {
    "bf16": None,
    "exact": {"mode": "exact", "residence": "stored"},
    "stored": {"mode": "fused", "residence": "stored"},
    "fast": {"mode": "fused", "residence": "fast"},
}
SHARD_BYTES = 4 << 30
CACHE_TOKENS = 512
Step = Callable[[], torch.Tensor]


def main() -> None:
    """Runs all parts."""
    options = arguments()
    config = make(options)
    models = {kind: load(kind, options.work) for kind in options.kinds}
    for batch in options.batches:
        measure(models, config, batch, options.rounds)
    if options.compile:
        for kind, model in models.items():
            start = time.perf_counter()
            torch._dynamo.reset()
            step = step_of(torch.compile(model, fullgraph=True), config, 1)
            time_of = median(replays(capture(step)[0]) for _ in range(options.rounds))
            print(
                f"compiled, batch 1: {kind} {time_of:.3f} ms ({time.perf_counter() - start:.0f} s)"
            )


def arguments() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 32, 128],
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/df11-step"))
    options = parser.parse_args()
    options.work = options.work / str(options.layers)
    return options


def make(options: argparse.Namespace) -> Any:
    """The checkpoint and its containers, unless they are there; the config."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=options.layers,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rope_theta=5e5,
        max_position_embeddings=131072, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    folder = options.work / "bf16"
    if (folder / "config.json").exists():
        return config
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    files: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    for name, value in shapes.items():
        if sum(tensor.nbytes for tensor in held.values()) > SHARD_BYTES:
            write(folder, held, files)
        drawn = torch.randn(value.shape, device="cuda") * 0.02
        held[name] = (torch.ones_like(drawn) if "norm" in name else drawn).bfloat16().cpu()
    write(folder, held, files)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    df11.compress(folder, options.work / "df11", progress=False)
    return config


def write(folder: Path, held: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    """A file of the checkpoint."""
    name = f"model-{len(set(files.values())):05d}.safetensors"
    save_file(held, folder / name, metadata={"format": "pt"})
    files.update(dict.fromkeys(held, name))
    held.clear()


def load(kind: str, work: Path) -> Any:
    """A model on GPU 0."""
    start, before = time.perf_counter(), torch.cuda.memory_allocated()
    how = KINDS[kind]
    more = {} if how is None else {"quantization_config": df11.Df11Config(**how)}
    folder = work / ("bf16" if how is None else "df11")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map="cuda:0", dtype=torch.bfloat16, **more
    )
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_allocated() - before
    print(f"{kind}: {time.perf_counter() - start:.2f} s to load, {taken / 1e9:.3f} GB", flush=True)
    return model


def step_of(model: Any, config: Any, batch: int) -> Step:
    """A decode step at position 64."""
    cache = transformers.StaticCache(config=config, max_cache_len=CACHE_TOKENS)
    seed = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(0, 1000, (batch, 1), device="cuda", generator=seed)
    place = torch.tensor([64], device="cuda")

    @torch.no_grad()
    def step() -> torch.Tensor:
        output = model(
            input_ids=ids, past_key_values=cache, cache_position=place, position_ids=place[None]
        )
        return output.logits

    return step


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


def median(values: Any) -> float:
    """The middle one."""
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])


def measure(models: dict[str, Any], config: Any, batch: int, rounds: int) -> None:
    """Graphs in turns, logits, and kernels of eager steps."""
    steps = {kind: step_of(model, config, batch) for kind, model in models.items()}
    graphs = {kind: capture(step) for kind, step in steps.items()}
    times: dict[str, list[float]] = {kind: [] for kind in graphs}
    for _ in range(rounds):
        for kind, (graph, _) in graphs.items():
            times[kind].append(replays(graph))
    tell(f"batch {batch}, graph", {kind: median(values) for kind, values in times.items()})
    if "bf16" in graphs:
        expected = graphs["bf16"][1].float()
        for kind, (_, logits) in graphs.items():
            far = float((logits.float() - expected).abs().max() / expected.abs().max())
            print(f"batch {batch}, logits: {kind} {'identical' if far == 0 else f'{far:.1e} away'}")
    tell(f"batch {batch}, kernels", {kind: kernels(step) for kind, step in steps.items()})


def kernels(step: Step, count: int = 3) -> float:
    """Milliseconds of all kernels in an eager step."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    return sum(float(event.device_time_total) for event in found.key_averages()) / count / 1e3


def tell(what: str, times: dict[str, float]) -> None:
    """A line of times, and how much faster than BF16 each is."""
    line = "  ".join(f"{kind} {value:.3f}" for kind, value in times.items())
    if "bf16" in times:
        ratios = (f"{kind} {times['bf16'] / value:.3f}" for kind, value in times.items())
        line += "  of bf16: " + "  ".join(ratios)
    print(f"{what}, ms: {line}", flush=True)


if __name__ == "__main__":
    main()
