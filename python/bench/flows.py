#!/usr/bin/env python3
"""What people do with a language model: train a LoRA on it, and compress it while it is loaded.

    python bench/llm.py --only make                        # makes the checkpoint and compresses it
    python bench/flows.py --out rows.jsonl                 # 8B geometry, GPU 0
    python bench/llm.py --only make --geometry tiny --device cpu --work WORK
    python bench/flows.py --model WORK/tiny-3 --device cpu --tokens 64   # tries the script itself

| part | what it measures |
|---|---|
| lora | seconds of a training step with checkpointing, memory of weights, and losses bit for bit |
| online | seconds from `from_pretrained` to the first token, and the host memory that it took |

Each kind of weights is measured in a process of its own, which has made its CUDA context and read
all files before it begins. `online` compares the BF16 model with the same folder compressed while
it is loaded, as stored and in the fast layout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from llm import scratch, show
from torch.nn.attention import SDPBackend, sdpa_kernel

import df11

PARTS = ("lora", "online")
#: For each part the kinds of weights; the first one is what the others are compared with.
KINDS = {"lora": ("bf16", "exact"), "online": ("bf16", "stored", "fast")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--model", type=Path, default=scratch() / "df11-bench/llama-3.1-8b-32")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a training step")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--steps", type=int, default=6, help="timed training steps")
    parser.add_argument("--out", type=Path, help="rows are appended to this file")
    parser.add_argument("--child", nargs=2, metavar=("PART", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        part, kind = options.child
        print(json.dumps({"lora": lora, "online": online}[part](kind, options)))
        return 0
    return max(compare(part, options) for part in options.only)


def compare(part: str, options: argparse.Namespace) -> int:
    """Runs all kinds of a part, and prints their rows; 1 if bits differ."""
    rows: dict[str, dict[str, Any]] = {}
    for kind in KINDS[part]:
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, __file__, *sys.argv[1:], "--child", part, kind]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment, check=False
        )
        if done.returncode:
            print(f"{part} {kind}: exit status {done.returncode}")
            return 1
        row = rows[kind] = json.loads(done.stdout.splitlines()[-1])
        first = rows[KINDS[part][0]]
        more = {
            f"{name}_ratio": row[name] / first[name]
            for name in ("seconds", "weights", "host_peak")
            if first.get(name)
        }
        row = {"part": part, "kind": kind, **row, **more}
        row["identical"] = row.pop("bits") == first["bits"]
        print("   " + "  ".join(f"{name}={show(value)}" for name, value in row.items()), flush=True)
        if options.out:
            with options.out.open("a") as out:
                print(json.dumps(row), file=out)
        if not row["identical"] and kind != "fast":
            return 1
    return 0


def lora(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Training steps of a LoRA of rank 16 on all projections."""
    import peft

    folder = options.model / ("bf16" if kind == "bf16" else "df11-default")
    model = load(folder, options)
    weights = bytes_of(model)
    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    torch.manual_seed(5)
    adapters = peft.LoraConfig(r=16, target_modules=projections, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.requires_grad_(False), adapters)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    generator = torch.Generator().manual_seed(3)
    size = (options.batch, options.tokens)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=generator)
    tokens = tokens.to(options.device)
    losses, seconds = [], []
    for step in range(options.steps + 4):
        # The first steps are compared bit by bit, which needs gradients that are reproducible.
        torch.use_deterministic_algorithms(step < 3, warn_only=True)
        synchronize(options)
        start = time.perf_counter()
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(options)
        if step > 3:
            seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    on_gpu = options.device.startswith("cuda")
    return {
        "weights": weights,
        "seconds": statistics.median(seconds),
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "losses": losses,
        "bits": losses[:4],
    }


def online(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """From the call to the first token, of the same BF16 folder."""
    folder = options.model / "bf16"
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 26):
                pass
    # The code of the model and the context of the GPU are there before.
    getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    if options.device.startswith("cuda"):
        torch.zeros(1, device=options.device)
    how = {"stored": {}, "fast": {"mode": "fused", "residence": "fast"}}.get(kind)
    extra = {} if how is None else {"quantization_config": df11.Config(**how)}
    tokens = torch.arange(1, 129)[None].to(options.device)
    before = resident()
    start = time.perf_counter()
    model = load(folder, options, **extra)
    loaded = time.perf_counter() - start
    with torch.no_grad(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        first = model(tokens).logits[0, -1]
        token = int(first.argmax())
    seconds = time.perf_counter() - start
    bits = first.view(torch.int16).tolist()
    return {
        "loaded": loaded,
        "seconds": seconds,
        "weights": bytes_of(model),
        # Mapped files count as memory of a process; BF16's own load maps all of them.
        "host_peak": resident("VmHWM") - before,
        "host_after": resident("RssAnon") + resident("RssShmem"),
        "token": token,
        "bits": [hash(tuple(bits))],
    }


def load(folder: Path, options: argparse.Namespace, **extra: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map=options.device, dtype=torch.bfloat16, **extra
    )


def bytes_of(model: Any) -> int:
    """What the weights take."""
    report = df11.report(model)
    return report.device_bytes if report else sum(p.nbytes for p in model.parameters())


def resident(which: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which + ":"))


def synchronize(options: argparse.Namespace) -> None:
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
