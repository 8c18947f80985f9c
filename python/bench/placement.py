#!/usr/bin/env python3
"""Whether a model over several GPUs lies where `df11 estimate --gpus` says, and takes the memory
that it says.

    python bench/llm.py --only make && python bench/placement.py --gpus 7GB,8GB --out rows.jsonl

--gpus is what each GPU may use, as of `df11 estimate`; as many GPUs are needed. The plan is made
from the directories alone, without a GPU; then the model is loaded over the GPUs and generates, and
its logits are compared with those of the BF16 model.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import llm
import tools
import torch
from torch.nn.attention import SDPBackend

import df11


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gpus", default="7GB,8GB", help="memory of each GPU, as of df11 estimate")
    own, rest = parser.parse_known_args()
    if "-h" in rest or "--help" in rest:
        print(__doc__)
        return 0
    sys.argv = [sys.argv[0], *rest]
    bench = llm.Bench(llm.arguments())
    said = estimate(bench.folders["df11"], own.gpus)
    memory = {gpu["gpu"]: gpu["memory_bytes"] for gpu in said["gpus"]}
    wanted = {
        name: (at["gpu"], name in at["streamed"]) for at in said["gpus"] for name in at["blocks"]
    }
    model = df11.open(bench.folders["df11"])
    before = [tools.used(gpu) for gpu in memory]
    loaded = model.load(devices=list(memory), memory=list(memory.values()))
    taken = [tools.used(gpu) - start for gpu, start in zip(memory, before, strict=True)]
    found = {name: (place.device, place.streamed) for name, place in loaded.placements.items()}
    largest = [max(b.nbytes for b in loaded.blocks if b.device == gpu) for gpu in memory]
    same = found == wanted
    for gpu, bytes_, most in zip(said["gpus"], taken, largest, strict=True):
        planned = gpu["taken_bytes"] - 2 * most
        figures = {name: len(gpu[name]) for name in ("blocks", "streamed")}
        figures |= {"limit": gpu["memory_bytes"], "planned": planned, "taken": bytes_}
        bench.row("placement", gpu=gpu["gpu"], **figures)
    bench.row("placement", blocks_where_planned=same, blocks=len(found))
    del loaded, model
    tools.free()
    identical = generates(bench, memory)
    return 0 if same and identical else 1


def estimate(container: Path, gpus: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "df11", "estimate", str(container), "--gpus", gpus, "--json"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    placement: dict[str, Any] = json.loads(answer)["placement"]
    print(f"   fits: {placement['fits']}, {placement['host_bytes']} bytes streamed")
    return placement


@torch.no_grad()
def generates(bench: llm.Bench, memory: dict[int, int]) -> bool:
    """Whether the model over all GPUs answers as the BF16 model on one of them."""
    model = bench.load_model("df11", device_map="auto", max_memory={**memory, "cpu": 10**12})
    report = df11.report(model)
    print(tools.told(report))
    tokens = bench.prompt(2, 37)
    with tools.attention(bench.device, SDPBackend.FLASH_ATTENTION):
        mine = model(tokens).logits.to(bench.device)
        speed = llm.best([bench.time_generate(model, 1, 16)])
        del model
        tools.free()
        theirs = bench.load_model("bf16")(tokens).logits
    identical = torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    figures = {"tokens_per_second": speed, "devices": len(report.devices)}
    bench.row("placement", identical=identical, **figures)
    return identical


if __name__ == "__main__":
    sys.exit(main())
