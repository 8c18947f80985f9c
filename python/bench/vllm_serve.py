#!/usr/bin/env python3
"""vLLM with compressed weights beside BF16: tokens, time per token, throughput, start, memory.

    python bench/vllm_serve.py --out DIR                                  # Llama-3.1-8B geometry
    python bench/vllm_serve.py --geometry qwen3-30b-a3b --layers 12 --out DIR   # a mixture
    python bench/vllm_serve.py --gpus 2 --out DIR                         # tensor parallelism
    python bench/vllm_serve.py --memory 20 --parts throughput --out DIR   # GB that vLLM may use

Weights are seeded, N(0, 0.02²), made once in --work. Each kind is an engine in a process of its
own with a time limit; all have the same flags. Rows of JSON go to DIR/results.jsonl, what vLLM says
to DIR/log.txt, a table to standard output.

| part | what it measures |
|---|---|
| latency | milliseconds per output token with 1, 8 and 64 requests |
| throughput | requests/s of 512 requests at once, 128 tokens in and 128 out |
| tokens | greedy tokens of 128 prompts, one request at a time: how many prompts have BF16's |

What fails or runs out of time says so; what was measured before counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

#: Options of each kind for --model-loader-extra-config; None: BF16.
KINDS: dict[str, dict[str, str] | None] = {
    "bf16": None,
    "exact": {"mode": "exact", "residence": "stored"},
    "stored": {"mode": "fused", "residence": "stored"},
    "fast": {"mode": "fused", "residence": "fast"},
    "online": {"mode": "fused", "residence": "fast"},
}
PARTS = ("latency", "throughput", "tokens")
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_MOE = {
    **_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "qwen3-30b-a3b": {
        **_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "tiny": {
        **_LLAMA,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
    },
    "tiny-moe": {
        **_MOE,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
    },
}
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
MIXTURES = [name for name, config in GEOMETRIES.items() if "num_experts" in config]
#: What vLLM's log tells of a start.
LOG = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "loading_s": r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds",
    "cache_tokens": r"KV cache size: ([\d,]+) tokens",
    "compile_s": r"torch.compile took ([\d.]+) s",
    "engine_s": r"init engine .* took ([\d.]+) s",
}


def main() -> int:
    """Drives phases, or is one."""
    options = arguments()
    if options.phase == "make":
        make(options)
    elif options.phase == "serve":
        serve(options, options.kinds[0])
    elif options.phase == "warm":
        warm(options)
    else:
        return drive(options)
    return 0


def arguments() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="layers, instead of the geometry's")
    parser.add_argument("--kinds", type=words, default=["bf16", "exact", "stored", "fast"])
    parser.add_argument("--parts", type=words, default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--memory", type=float, help="GB of a GPU that vLLM may use")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest request")
    parser.add_argument(
        "--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 64]
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--limit", type=int, default=170, help="seconds that a phase may take")
    parser.add_argument("--total", type=int, default=3600, help="seconds that all may take")
    parser.add_argument("--rounds", type=int, default=3, help="of latency; the best counts")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/df11-vllm"))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--phase", choices=["make", "warm", "serve"], help=argparse.SUPPRESS)
    return parser.parse_args()


def words(text: str) -> list[str]:
    """A list of words."""
    return text.split(",")


def folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """The checkpoint in BF16, and the compressed one."""
    layers = options.layers or GEOMETRIES[options.geometry]["num_hidden_layers"]
    root = options.work / f"{options.geometry}-{layers}"
    return root / "bf16", root / "df11"


# ---- the driver ----


def drive(options: argparse.Namespace) -> int:
    """Runs all phases, and prints a table."""
    end = time.monotonic() + options.total
    options.out.mkdir(parents=True, exist_ok=True)
    configure(options)
    with ThreadPoolExecutor() as threads:
        warmed = threads.submit(run, options, "warm", [], min(options.limit, 75))
        run(options, "make", [], options.limit)
        print(json.dumps(warmed.result()), flush=True)
    rows = []
    for kind in options.kinds:
        row: dict[str, Any] = {"kind": kind, **settings(options)}
        left = int(end - time.monotonic())
        if left < 45:
            row["error"] = "no time left"
        else:
            row |= run(options, "serve", [kind], min(options.limit, left))
        rows.append(row)
        with (options.out / "results.jsonl").open("a") as out:
            print(json.dumps(row), file=out)
        shown = {name: value for name, value in row.items() if name not in ("tokens", "log")}
        print(json.dumps(shown), flush=True)
    table(rows)
    return int(any("error" in row for row in rows))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What rows have in common."""
    told = {name: getattr(options, name) for name in ("geometry", "layers", "gpus", "memory")}
    return {name: value for name, value in told.items() if value is not None}


def run(options: argparse.Namespace, phase: str, kinds: list[str], limit: int) -> dict[str, Any]:
    """One phase in a process of its own; what it found, or why it did not."""
    command = [sys.executable, __file__, *sys.argv[1:], "--phase", phase]
    if kinds:
        command += ["--kinds", ",".join(kinds)]
    environment = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_LOGS": "recompiles",
        **os.environ,
    }
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        start_new_session=True,
    )
    result: dict[str, Any] = {}
    try:
        text = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        # vLLM's engine is a process of that session too.
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0]
        result["error"] = f"stopped after {limit} s"
    seconds = time.perf_counter() - begin
    with (options.out / "log.txt").open("a") as log:
        print(f"==== {phase} {kinds} {options.geometry}\n{text[-200_000:]}", file=log)
    for found in re.findall(r"^RESULT (.*)$", text, re.MULTILINE):
        result |= json.loads(found)
    for name, pattern in LOG.items():
        if hit := re.search(pattern, text):
            result[name] = float(hit[1].replace(",", ""))
    result["df11"] = [line[-160:] for line in text.splitlines() if "df11: " in line][:12]
    result["recompiled"] = len(re.findall("Recompiling function", text))
    result["seconds"] = round(seconds, 1)
    if process.returncode and "error" not in result:
        errors = [line for line in text.splitlines() if re.search(r"\w+Error\b", line)]
        result["error"] = f"exit {process.returncode}: {(errors or [text[-300:]])[-1][-300:]}"
    print(f"-- {phase} {' '.join(kinds)}: {seconds:.0f} s {result.get('error', '')}", flush=True)
    return result


def table(rows: list[dict[str, Any]]) -> None:
    """Kinds beside BF16."""
    base = next((row for row in rows if row["kind"] == "bf16"), {})
    for row in rows:
        cells = [row["kind"].ljust(8)]
        if "tokens" in row and "tokens" in base:
            same = sum(a == b for a, b in zip(row["tokens"], base["tokens"], strict=True))
            cells.append(f"same {same}/{len(row['tokens'])}")
        for batch, value in row.get("latency_ms", {}).items():
            other = base.get("latency_ms", {}).get(batch)
            cells.append(f"b{batch} {value:.2f} ms" + (f" ({value / other:.2f})" if other else ""))
        if "requests_s" in row:
            other = base.get("requests_s")
            ratio = f" ({row['requests_s'] / other:.2f})" if other else ""
            cells.append(f"{row['requests_s']:.1f} req/s{ratio}")
        cells += [f"{name} {row[name]:g}" for name in LOG if name in row]
        cells.append(row.get("error", ""))
        print("  ".join(cells), flush=True)


# ---- the model ----


def configure(options: argparse.Namespace) -> None:
    """Writes the config, which is all that warming up needs."""
    bf16, _ = folders(options)
    bf16.mkdir(parents=True, exist_ok=True)
    config = dict(GEOMETRIES[options.geometry])
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    (bf16 / "config.json").write_text(json.dumps(config))


def warm(options: argparse.Namespace) -> None:
    """Has vLLM look at the model's class, which it remembers; tests layers on the GPU."""
    from vllm.engine.arg_utils import EngineArgs

    bf16, _ = folders(options)
    EngineArgs(str(bf16), skip_tokenizer_init=True, dtype="bfloat16").create_model_config()
    layers = Path(__file__).parent.parent / "tests" / "vllm_layers.py"
    if torch.cuda.is_available() and layers.exists():
        sys.exit(subprocess.run([sys.executable, str(layers)], check=False).returncode)


def make(options: argparse.Namespace) -> None:
    """Writes the checkpoint, and compresses it."""
    import df11

    bf16, compressed = folders(options)
    if not (bf16 / INDEX).exists():
        write(bf16, json.loads((bf16 / "config.json").read_text()))
    if not compressed.exists():
        report = df11.compress(bf16, compressed, verify=False, progress=False)
        print(f"{report.ratio:.4f} of {report.source_bytes}")


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a checkpoint."""
    width, heads = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}.weight", (width,)
        yield f"{at}.self_attn.q_proj.weight", (queries, width)
        yield f"{at}.self_attn.k_proj.weight", (keys, width)
        yield f"{at}.self_attn.v_proj.weight", (keys, width)
        yield f"{at}.self_attn.o_proj.weight", (width, queries)
        inner, blocks = config["intermediate_size"], [f"{at}.mlp"]
        if "num_experts" in config:
            for name in ("q_norm", "k_norm"):
                yield f"{at}.self_attn.{name}.weight", (heads,)
            yield f"{at}.mlp.gate.weight", (config["num_experts"], width)
            inner = config["moe_intermediate_size"]
            blocks = [f"{at}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
        for block in blocks:
            yield f"{block}.gate_proj.weight", (inner, width)
            yield f"{block}.up_proj.weight", (inner, width)
            yield f"{block}.down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (config["vocab_size"], width)


def write(folder: Path, config: dict[str, Any]) -> None:
    """Seeded weights in files of some GB."""
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(17)
    shard: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        file = f"model-{len(set(names.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard.clear()
        size = 0

    for name, shape in shapes(config):
        value = torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)
        shard[name] = (value + 1 if "norm" in name else value).to(torch.bfloat16).cpu()
        size += shard[name].nbytes
        if size > SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index))


# ---- an engine ----


def serve(options: argparse.Namespace, kind: str) -> None:
    """Prints what one kind does, part by part."""
    from vllm import LLM

    bf16, compressed = folders(options)
    extra: dict[str, Any] = {}
    if KINDS[kind] is not None:
        extra["model_loader_extra_config"] = KINDS[kind]
    if kind == "online":
        extra["quantization"] = "df11"
    if options.memory is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        extra["gpu_memory_utilization"] = options.memory * 1e9 / total
    begin = time.perf_counter()
    llm = LLM(
        str(bf16 if kind in ("bf16", "online") else compressed),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options.length,
        tensor_parallel_size=options.gpus,
        enforce_eager=options.eager,
        kernel_config={"moe_backend": "triton"} if options.geometry in MIXTURES else {},
        **extra,
    )
    engine = Engine(llm, GEOMETRIES[options.geometry]["vocab_size"])
    tell({"start_s": round(time.perf_counter() - begin, 1)})
    engine.generate(1, 16, 4)
    for part in options.parts:
        try:
            tell(getattr(engine, part)(options))
        except Exception as error:
            tell({"error": f"{part}: {type(error).__name__}: {error}"[:300]})


def tell(result: dict[str, Any]) -> None:
    """A part of the result, for the driver."""
    print("\nRESULT " + json.dumps(result), flush=True)


class Engine:
    """Requests of seeded tokens."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.llm, self.vocabulary = llm, vocabulary

    def generate(
        self, requests: int, inputs: int, outputs: int, seed: int = 0
    ) -> tuple[float, list[list[int]]]:
        """Seconds, and greedy tokens of each request."""
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(1000 * requests + seed)
        size = (requests, inputs)
        ids = torch.randint(2, self.vocabulary, size, generator=generator).tolist()
        sampling = SamplingParams(
            temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        prompts = [{"prompt_token_ids": row} for row in ids]
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return seconds, [list(answer.outputs[0].token_ids) for answer in answers]

    def latency(self, options: argparse.Namespace) -> dict[str, Any]:
        """Milliseconds per output token after the first ones: the best of some rounds."""
        found, steps = {}, 128
        for batch in options.batches:
            self.generate(batch, 128, 2)
            first = min(self.generate(batch, 128, 1)[0] for _ in range(options.rounds))
            whole = min(self.generate(batch, 128, 1 + steps)[0] for _ in range(options.rounds))
            found[str(batch)] = round(1000 * (whole - first) / steps, 4)
            tell({"latency_ms": found})
        return {"latency_ms": found}

    def throughput(self, options: argparse.Namespace) -> dict[str, Any]:
        """Requests a second, many at once."""
        self.generate(options.requests, 128, 8, 1)
        seconds, _ = self.generate(options.requests, 128, 128, 2)
        return {"requests_s": options.requests / seconds}

    def tokens(self, options: argparse.Namespace) -> dict[str, Any]:
        """Greedy tokens, one request at a time."""
        seeds = range(options.prompts)
        return {"tokens": [self.generate(1, 32, 24, seed)[1][0] for seed in seeds]}


if __name__ == "__main__":
    sys.exit(main())
