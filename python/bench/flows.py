#!/usr/bin/env python3
"""Two uses of a language model: training a LoRA on it, and compressing it while it loads.

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

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tools
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import df11

PARTS = ("lora", "gradients", "online")
Step = Callable[[], tuple[float, list[torch.Tensor]]]
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
    add, model = parser.add_argument, tools.scratch() / "df11-bench/llama-3.1-8b-32"
    add("--model", type=Path, default=model)
    add("--batch", type=int, default=4, help="sequences of a training step")
    add("--tokens", type=int, default=2048, help="of a sequence")
    add("--steps", type=int, default=6, help="timed training steps")
    add("--compared", type=int, default=200, help="steps of `gradients`")
    add("--child", nargs=2, metavar=("PART", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        part, kind = options.child
        print(json.dumps(globals()[part](kind, options)))
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
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            print(f"{part} {kind}: exit status {done.returncode}")
            return 1
        row = rows[kind] = json.loads(done.stdout.splitlines()[-1])
        first = rows[KINDS[part][0]]
        names = [name for name in ("seconds", "weights", "host_peak") if first.get(name)]
        row = {"kind": kind, **row} | {f"{name}_ratio": row[name] / first[name] for name in names}
        row["identical"] = row.pop("bits") == first["bits"]
        tools.tell(options.out, part, row)
        if not row["identical"] and kind != "fast":
            return 1
    return 0


def lora(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Training steps of a LoRA of rank 16 on all projections."""
    extra = {} if kind == "bf16" else {"quantization_config": df11.Config(residence="stored")}
    model = load(options.model / ("bf16" if kind == "bf16" else "df11-default"), options, **extra)
    weights, device = bytes_of(model), torch.device(options.device)
    step = training(model, (options.batch, options.tokens), options)
    seconds, losses = [], []
    for _ in range(options.steps + 1):
        seconds.append(tools.seconds(device, lambda: losses.append(step()[0])))
    return {
        "weights": weights,
        "seconds": statistics.median(seconds[1:]),
        "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "losses": losses,
        # Later ones depend on the order in which flash attention adds in its backward pass.
        "bits": losses[:1],
    }


def gradients(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps with kernels that are reproducible: the loss of each, and a hash of all gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = df11.Config(residence="stored")
    extra = {"quantization_config": config} if kind == "exact" else {}
    folder = options.model / "bf16"
    layers = min(4, transformers.AutoConfig.from_pretrained(folder).num_hidden_layers)
    model = load(folder, options, num_hidden_layers=layers, **extra)
    step = training(model, (2, min(256, options.tokens)), options)
    losses, bits = [], hashlib.blake2b()
    start = time.perf_counter()
    for _ in range(options.compared):
        loss, grads = step()
        flat = torch.cat([grad.flatten() for grad in grads])
        bits.update(flat.cpu().view(torch.uint8).numpy().data)
        losses.append(loss)
    return {
        "steps": options.compared,
        "seconds": (time.perf_counter() - start) / options.compared,
        "weights": bytes_of(model),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "bits": [losses, bits.hexdigest()],
    }


def training(model: Any, size: tuple[int, int], options: argparse.Namespace) -> Step:
    """A step of training a LoRA of rank 16 on all projections: its loss, and all gradients."""
    import peft

    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    torch.manual_seed(5)
    adapters = peft.LoraConfig(r=16, target_modules=projections, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.requires_grad_(False), adapters)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=generator)
    tokens = tokens.to(options.device)

    def step() -> tuple[float, list[torch.Tensor]]:
        with sdpa_kernel(FLASH):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        grads = [value.grad for value in trained]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), grads

    return step


def online(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """From the call to the first token, of the same BF16 folder."""
    folder = options.model / "bf16"
    # The code of the model and the context of the GPU are there before.
    getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    if options.device.startswith("cuda"):
        torch.zeros(1, device=options.device)
    mode = {"stored": "exact", "fast": "fused"}.get(kind)
    config = None if mode is None else df11.Config(mode=mode, residence=kind)
    extra = {} if config is None else {"quantization_config": config}
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
    report = df11.report(model)
    return report.device_bytes if report else sum(p.nbytes for p in model.parameters())


def resident(which: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which + ":"))


if __name__ == "__main__":
    sys.exit(main())
