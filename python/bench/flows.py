#!/usr/bin/env python3
"""What people do with a language model: train a LoRA on it, and compress it while it is loaded.

    python bench/llm.py --only make                        # makes the checkpoint and compresses it
    python bench/flows.py --out rows.jsonl                 # 8B geometry, GPU 0
    python bench/llm.py --only write                       # enough for gradients and online
    python bench/flows.py --only gradients,online --out rows.jsonl
    python bench/llm.py --only make --geometry tiny --device cpu --work WORK
    python bench/flows.py --model WORK/tiny-2 --device cpu --tokens 64   # tries the script itself

| part | what it measures |
|---|---|
| lora | seconds of a training step with checkpointing, memory of weights |
| gradients | losses and gradients of a LoRA on the first four layers, bit for bit |
| online | seconds from `from_pretrained` to the first token, and the host memory that it took |

Each kind of weights is measured in a process of its own, which has made its CUDA context before it
begins; files have been read. `online` and `gradients` compare the BF16 model with the same folder
compressed while it is loaded, as stored and in the fast layout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tools
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import df11

PARTS = ("lora", "gradients", "online")
#: For each part the kinds of weights; the first one is what the others are compared with.
KINDS = {
    "lora": ("bf16", "exact"),
    "gradients": ("bf16", "again", "exact"),
    "online": ("bf16", "stored", "fast"),
}
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def main() -> int:
    parser = tools.parser(__doc__, "--device", "--out")
    parser.add_argument("--only", type=tools.words, default=list(PARTS))
    model = tools.scratch() / "df11-bench/llama-3.1-8b-32"
    parser.add_argument("--model", type=Path, default=model)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a training step")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--steps", type=int, default=6, help="timed training steps")
    parser.add_argument("--compared", type=int, default=200, help="steps of `gradients`")
    parser.add_argument("--child", nargs=2, metavar=("PART", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        part, kind = options.child
        run = {"lora": lora, "gradients": gradients, "online": online}[part]
        print(json.dumps(run(kind, options)))
        return 0
    return max(compare(part, options) for part in options.only)


def compare(part: str, options: argparse.Namespace) -> int:
    """Runs all kinds of a part, and prints their rows; 1 if bits differ."""
    rows: dict[str, dict[str, Any]] = {}
    if part == "online":
        for path in (options.model / "bf16").glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 26):
                    pass
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
        row = {"kind": kind, **row, **more}
        row["identical"] = row.pop("bits") == first["bits"]
        tools.tell(options.out, part, row)
        if not row["identical"] and kind != "fast":
            return 1
    return 0


def lora(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Training steps of a LoRA of rank 16 on all projections."""
    folder = options.model / ("bf16" if kind == "bf16" else "df11-default")
    model = load(folder, options)
    weights = bytes_of(model)
    model, adapters = adapted(model)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-4)
    tokens = examples(model, (options.batch, options.tokens), options)
    losses, seconds, device = [], [], torch.device(options.device)
    for step in range(options.steps + 1):
        tools.synchronize(device)
        start = time.perf_counter()
        with sdpa_kernel(FLASH):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tools.synchronize(device)
        if step:
            seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return {
        "weights": weights,
        "seconds": statistics.median(seconds),
        "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "losses": losses,
        # Later ones depend on the order in which flash attention adds in its backward pass.
        "bits": losses[:1],
    }


def gradients(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps with kernels that are reproducible: the loss of each, and a hash of all gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    extra = {"quantization_config": df11.Config()} if kind == "exact" else {}
    folder = options.model / "bf16"
    layers = min(4, transformers.AutoConfig.from_pretrained(folder).num_hidden_layers)
    model = load(folder, options, num_hidden_layers=layers, **extra)
    model, adapters = adapted(model)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-4)
    tokens = examples(model, (2, min(256, options.tokens)), options)
    losses, bits = [], hashlib.blake2b()
    start = time.perf_counter()
    for _ in range(options.compared):
        with sdpa_kernel(FLASH):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        flat = torch.cat([value.grad.flatten() for value in adapters.values()])
        bits.update(flat.cpu().view(torch.uint8).numpy().data)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "steps": options.compared,
        "seconds": (time.perf_counter() - start) / options.compared,
        "weights": bytes_of(model),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "bits": [losses, bits.hexdigest()],
    }


def adapted(model: Any) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """A model with a LoRA of rank 16 on all projections, and what is trained of it."""
    import peft

    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    torch.manual_seed(5)
    adapters = peft.LoraConfig(r=16, target_modules=projections, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.requires_grad_(False), adapters)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    return model, {name: p for name, p in model.named_parameters() if p.requires_grad}


def examples(model: Any, size: tuple[int, int], options: argparse.Namespace) -> torch.Tensor:
    """Tokens to train on."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=generator)
    return tokens.to(options.device)


def online(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """From the call to the first token, of the same BF16 folder."""
    folder = options.model / "bf16"
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
    with torch.no_grad(), sdpa_kernel(FLASH):
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


if __name__ == "__main__":
    sys.exit(main())
