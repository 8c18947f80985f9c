#!/usr/bin/env python3
"""Tensor parallelism: BF16 beside compressed weights in each mode, the same plan for all, in turns.

    torchrun --nproc-per-node 2 bench/parallel.py     # 8B geometry, seeded weights, 2 GPUs
    torchrun --nproc-per-node 2 bench/parallel.py --geometry tiny --device cpu    # tries it

| figure | what it is |
|---|---|
| held | bytes that a process holds, and their share of the containers (or of the checkpoint). |
|      | As stored these are the bytes that it has read |
| touched | share of the containers' pages that the kernel has mapped for it: it maps all pages |
|         | within 64 KiB of one, unless fault_around_bytes of debugfs is 4096 |
| steps | share of greedy steps whose logits are BF16's, bit for bit, on all processes |
| eager, graph | milliseconds of a decode step, launched by Python or replayed as a CUDA graph |

Each process appends rows of JSON to OUT with its rank at the end; the first one prints a table.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import tools
import torch
from llm import MODES, Bench
from tools import in_turns, numbers, words
from torch import distributed
from torch.nn.attention import SDPBackend
from transformers.distributed import DistributedConfig

import df11


def main() -> None:
    options = arguments()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = options.device == "cuda"
    device = torch.device(options.device, local if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    backend, own = ("nccl", device) if on_gpu else ("gloo", None)
    distributed.init_process_group(backend, device_id=own)
    options.device, options.layout, options.only = str(device), None, []
    options.out = options.out and options.out.with_name(f"{options.out.name}.{rank}")
    bench = Parallel(options)
    if rank == 0:
        bench.make()
    distributed.barrier()
    bench.run()
    distributed.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = tools.parser(__doc__, "--geometry", "--layers", "--work", "--out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", type=words, default=list(MODES))
    parser.add_argument("--steps", type=int, default=64, help="greedy steps that are compared")
    parser.add_argument("--prompt", type=int, default=37, help="tokens before them")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


class Parallel(Bench):
    """All kinds of one model, each over all processes."""

    def row(self, part: str, **figures: Any) -> None:
        """Prints a row of the first process, and keeps those of all."""
        if distributed.get_rank() == 0 or self.options.out:
            super().row(part, rank=distributed.get_rank(), **figures)

    def run(self) -> None:
        models = {kind: self.loaded(kind) for kind in self.options.kinds}
        self.compare(models)
        for batch in self.options.batches:
            self.time(models, batch)

    def loaded(self, kind: str) -> Any:
        """A model, and what loading it took."""
        folder = self.folders["bf16" if kind == "bf16" else "df11"]
        before, touched = tools.used(self.device), _touched(folder)
        start = time.perf_counter()
        told = DistributedConfig(tp_size=distributed.get_world_size(), tp_plan="auto")
        model = self.load_model(kind, distributed_config=told, device_map=None)
        tools.synchronize(self.device)
        figures: dict[str, Any] = {"kind": kind, "seconds": time.perf_counter() - start}
        suffix = "*.safetensors" if kind == "bf16" else "*.df11"
        whole = sum(path.stat().st_size for path in folder.glob(suffix))
        parts = {*model.parameters(), *model.buffers()}
        bf16 = sum(int(getattr(value, "_local_tensor", value).nbytes) for value in parts)
        held = bf16 if kind == "bf16" else df11.report(model).device_bytes
        figures |= {"held": held, "held_part": held / whole}
        figures["used"] = tools.used(self.device) - before
        # Pages that an earlier model touched stay in the mapping of this one.
        self.row("load", **figures, touched_part=max(0, _touched(folder) - touched) / whole)
        return model

    @torch.no_grad()
    def compare(self, models: dict[str, Any]) -> None:
        """Greedy steps of BF16, and the same tokens for all others."""
        tokens = self.prompt(1, self.options.prompt)
        expected: list[torch.Tensor] = []
        inputs = [tokens]
        for kind, model in models.items():
            same, cache = 0, None
            with tools.attention(self.device, SDPBackend.FLASH_ATTENTION):
                for at in range(self.options.steps):
                    out = model(inputs[at], past_key_values=cache, use_cache=True)
                    cache = out.past_key_values
                    if kind == "bf16":
                        expected.append(out.logits)
                    if len(inputs) == at + 1:
                        inputs.append(out.logits[:, -1:].argmax(-1))
                    same += bool(expected) and torch.equal(out.logits, expected[at])
            count = torch.tensor(same, device=tokens.device)
            distributed.all_reduce(count, distributed.ReduceOp.MIN)
            self.row("steps", kind=kind, identical=int(count), of=self.options.steps)

    def time(self, models: dict[str, Any], batch: int) -> None:
        """A decode step of each kind, in turns."""
        steps = {kind: self.decode_step(model, batch) for kind, model in models.items()}
        for step in steps.values():
            step()
        works = {
            kind: lambda step=step: 200 * self.seconds(lambda: [step() for _ in range(5)])
            for kind, step in steps.items()
        }
        self.tell("eager", batch, in_turns(self.options.rounds, works))
        if self.on_gpu:
            self.graphs(steps, batch)


def _touched(folder: Path) -> int:
    """Bytes of the files of a folder whose pages this process has mapped and read."""
    total, mine = 0, False
    smaps = Path("/proc/self/smaps")
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            mine = bool(rest) and rest[-1].startswith(os.fspath(folder))
        elif mine and first == "Rss:":
            total += 1024 * int(rest[0])
    return total


if __name__ == "__main__":
    main()
