#!/usr/bin/env python3
"""vLLM with compressed weights beside ordinary: tokens, time per token, throughput, start, memory.

    python bench/vllm_serve.py --out DIR                                  # Llama-3.1-8B geometry
    python bench/vllm_serve.py --geometry qwen3-30b-a3b --layers 8 --out DIR    # a mixture
    python bench/vllm_serve.py --gpus 2 --out DIR                         # tensor parallelism
    python bench/vllm_serve.py --memory 20 --length -1 --parts throughput --out DIR    # GB for vLLM
    python bench/vllm_serve.py --together 13 --out DIR                    # starts side by side
    python bench/vllm_serve.py --dtype fp8 --kinds fp8,exact --out DIR    # FP8, a scale a block
    python bench/vllm_serve.py --store 2 --parts tokens --out DIR         # from a store, 2 GB/s

Weights are seeded (`checkpoints`), made once in --work. Each kind is an engine in a process of its
own with time limits; all have the same flags. Rows of JSON go to DIR/results.jsonl, what vLLM says
to a file for each engine, a table to standard output.

Engines start one after another; with `--together` side by side, each with a KV cache of that many
GiB. Either way one alone is measured while others wait. With `--store` checkpoints lie in an S3
server on the loopback, and vLLM brings uncompressed ones by the Run:ai streamer.

| part | what it measures |
|---|---|
| latency | milliseconds per output token with 1, 8 and 64 requests |
| throughput | requests/s of 512 requests at once (`--requests`), 128 tokens in and 128 out |
| tokens | greedy tokens of 128 prompts, with log-probabilities: one at a time, 64 at once |
| profile | microseconds of each kernel, with 1 and 64 requests, at saturation, for prompts alone |

A part that fails or runs out of time says so; earlier measurements count.

A kind with `-invariant` at its end, such as `exact-fast-invariant`, runs with
VLLM_BATCH_INVARIANT=1. Ratios are to `bf16`, of these kinds to `bf16-invariant`; with `--dtype fp8`
to `fp8` and `fp8-invariant`. Tokens of 64
requests at once depend on how many requests a step takes together. An engine in a process of its
own takes those that have come; with VLLM_ENABLE_V1_MULTIPROCESSING=0 all have come.

Tokens are the same in two engines only if both add in the same order. By default inductor compiles
the norms, and chooses how they add (the whole row at once, or in steps) by timing them, for each
compiled graph anew. `--norms vllm` takes vLLM's own kernels of norms instead.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoints
import tools
import torch
from tools import numbers, words

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
import store_server

#: Options of each kind for --model-loader-extra-config; None: the checkpoint without df11.
KINDS: dict[str, dict[str, str] | None] = {
    "bf16": None,
    "fp8": None,
    "exact": {"mode": "exact", "residence": "stored"},
    "exact-fast": {"mode": "exact", "residence": "fast"},
    "stored": {"mode": "fused", "residence": "stored"},
    "fast": {"mode": "fused", "residence": "fast"},
    "online": {"mode": "fused", "residence": "fast"},
}
PARTS = ("latency", "throughput", "tokens")
#: The end of kinds that are batch invariant.
INVARIANT = "-invariant"
#: Requests at once in the part "tokens".
AT_ONCE = 64
#: Lines of vLLM's log about a start.
LOG = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "loading_s": r"Model loading took [\d.]+ GiB (?:memory )?and ([\d.]+) seconds",
    "cache_tokens": r"KV cache size: ([\d,]+) tokens",
    "longest": r"Auto-fit max_model_len: (?:reduced from \d+ to|full model context length) (\d+)",
    "compile_s": r"torch.compile took ([\d.]+) s",
    "engine_s": r"init engine .* took ([\d.]+) s",
}
_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_LOGS": "recompiles",
}


def main() -> int:
    options = arguments(sys.argv[1:])
    if options.phase is None:
        return drive(options)
    {"make": make, "warm": warm, "serve": serve}[options.phase](options)
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = tools.parser(__doc__, "--geometry", "--layers")
    parser.add_argument("--kinds", type=words, default=["bf16", "exact", "stored", "fast"])
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16", help="of layers")
    parser.add_argument("--store", type=float, help="GB/s of a store from which engines load")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--experts", action="store_true", help="of mixtures: parallel experts")
    parser.add_argument("--eager", action="store_true", help="without compilation and CUDA graphs")
    parser.add_argument("--parts", type=words, default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--memory", type=float, help="GB of a GPU that vLLM may use")
    parser.add_argument("--together", type=float, help="GiB of KV cache; engines start together")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a request; -1: all")
    parser.add_argument("--graphs", type=int, help="tokens of the largest CUDA graph")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--requests", type=numbers, default=[512])
    parser.add_argument("--norms", choices=["inductor", "vllm"], default="inductor")
    parser.add_argument("--limit", type=int, default=170, help="seconds that a phase may take")
    parser.add_argument("--total", type=int, default=3600, help="seconds that all may take")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/df11-vllm"))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--phase", choices=["make", "warm", "serve"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.argv = argv
    return options


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    return checkpoints.config_of(options.geometry, options.layers, options.dtype)


def folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """The checkpoint, and the compressed one."""
    root = options.work / f"{options.geometry}-{config_of(options)['num_hidden_layers']}"
    return root / options.dtype, root / ("df11" if options.dtype == "bf16" else "df11-fp8")


# ---- the driver ----


def drive(options: argparse.Namespace) -> int:
    if options.store is None:
        return measure_all(options)
    root = folders(options)[0].parent
    root.mkdir(parents=True, exist_ok=True)
    with store_server.running(root, options.store) as port:
        os.environ.update(store_server.environment(port))
        options.argv += ["--port", str(port)]
        return measure_all(options)


def measure_all(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.total
    configure(options)
    made, warmed = Phase(options, "make"), Phase(options, "warm")
    # They import vLLM meanwhile.
    serving = [Phase(options, "serve", kind) for kind in options.kinds]
    if not made.reach(None, options.limit) or not warmed.reach(None, options.limit):
        for phase in serving:
            phase.end()
        return 1
    for phase in serving:
        shutil.copytree(warmed.cache, phase.cache, dirs_exist_ok=True)
    rows: list[dict[str, Any]] = []
    for group in [serving] if options.together else [[phase] for phase in serving]:
        measure(group, options.limit, end)
        for phase in group:
            phase.end()
            rows.append(phase.row())
    table(rows)
    return int(any("error" in row for row in rows))


def measure(group: list[Phase], limit: int, end: float) -> None:
    """Starts engines together, and lets them measure one after another."""
    for phase in group:
        if phase.reach("imported", min(limit, end - time.monotonic())):
            phase.proceed()
    ready = [p for p in group if p.reach("ready", min(limit, end - time.monotonic()))]
    for phase in ready:
        phase.proceed()
        phase.reach("measured", min(limit, end - time.monotonic()))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The common fields of rows."""
    told = "geometry dtype layers gpus experts store memory together length graphs eager norms"
    found = {name: getattr(options, name) for name in (*told.split(), "requests")}
    return {name: value for name, value in found.items() if value is not None}


class Phase:
    """A process of the benchmark, in a session of its own, that stops at stages until told on."""

    def __init__(self, options: argparse.Namespace, name: str, kind: str = "") -> None:
        self.options, self.kind, self.error = options, kind, ""
        title = "-".join(part for part in (options.geometry, name, kind) if part)
        self.log = options.out / f"{title}.txt"
        # Engines that start together would write compiled graphs into one folder. Those of an
        # earlier run would shorten the start.
        self.cache = options.work / "cache" / title
        shutil.rmtree(self.cache, ignore_errors=True)
        self.begin = time.monotonic()
        options.out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, *options.argv, "--phase", name]
        told = {**_ENVIRONMENT, "VLLM_CACHE_ROOT": str(self.cache), **os.environ}
        told["VLLM_BATCH_INVARIANT"] = str(int(kind.endswith(INVARIANT)))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command + (["--kinds", kind] if kind else []),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=told,
                text=True,
                start_new_session=True,
            )

    def proceed(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def reach(self, stage: str | None, limit: float) -> bool:
        """Waits until it is at a stage, or has ended well; after the limit it is stopped."""
        until = time.monotonic() + limit
        while not self.error:
            code = self.process.poll()
            if (code == 0) if stage is None else f"STAGE {stage}\n" in self.text():
                break
            if code is not None:
                self.error = f"exit {code}: {self.reason()}"
            elif time.monotonic() > until:
                self.error = f"stopped after {limit:.0f} s, before it was {stage or 'done'}"
            time.sleep(0.1)
        seconds = time.monotonic() - self.begin
        print(f"-- {seconds:.0f} s: {self.log.stem} {stage or 'done'} {self.error}", flush=True)
        if self.error:
            self.end()
        return not self.error

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(1)  # until the driver has its memory

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def reason(self) -> str:
        text = self.text()
        errors = [line for line in text.splitlines() if re.search(r"\w+Error\b", line)]
        return (errors or [text[-300:]])[-1][-300:]

    def row(self) -> dict[str, Any]:
        """Its results, which go to a file too."""
        text, result = self.text(), {"kind": self.kind, **settings(self.options)}
        for found in re.findall(r"^RESULT (.*)$", text, re.MULTILINE):
            result |= json.loads(found)
        for name, pattern in LOG.items():
            if hit := re.search(pattern, text):
                result[name] = float(hit[1].replace(",", ""))
        result["df11"] = [line[-200:] for line in text.splitlines() if "df11: " in line][:12]
        result["recompiled"] = len(re.findall("Recompiling function", text))
        if self.error:
            result["error"] = self.error
        with (self.options.out / "results.jsonl").open("a") as out:
            print(json.dumps(result), file=out)
        return result


def table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        wanted = row["dtype"] + INVARIANT * row["kind"].endswith(INVARIANT)
        base = next((each for each in rows if each["kind"] == wanted), {})
        cells = [row["kind"].ljust(8)]
        if "alone" in row and "alone" in base:
            cells += [f"{part} {same(row[part], base[part])}" for part in ("alone", "at_once")]
            cells.append(f"alone and at once {same(row['alone'], row['at_once'])}")
        for batch, value in row.get("latency_ms", {}).items():
            other = base.get("latency_ms", {}).get(batch)
            cells.append(f"b{batch} {value:.2f} ms" + (f" ({value / other:.2f})" if other else ""))
        for requests, value in row.get("requests_s", {}).items():
            other = base.get("requests_s", {}).get(requests)
            ratio = f" ({value / other:.2f})" if other else ""
            cells.append(f"{requests} at once {value:.1f} req/s{ratio}")
        cells += [f"{name} {row[name]:g}" for name in LOG if name in row]
        cells.append(row.get("error", ""))
        print("  ".join(cells), flush=True)


def same(some: list[Any], others: list[Any]) -> str:
    """How many prompts have the same tokens, and how many the same log-probabilities too."""
    pairs = list(zip(some, others, strict=True))
    tokens = sum(one[0] == other[0] for one, other in pairs)
    return f"{tokens} and {sum(one == other for one, other in pairs)}/{len(pairs)}"


# ---- the model ----


def configure(options: argparse.Namespace) -> None:
    """Writes the config, which is all that warming up needs, unless it is there."""
    plain, _ = folders(options)
    if (plain / "config.json").exists():
        return
    plain.mkdir(parents=True, exist_ok=True)
    (plain / "config.json").write_text(json.dumps(config_of(options)))


def warm(options: argparse.Namespace) -> None:
    """Has vLLM look at the model's class, which it remembers."""
    from vllm.engine.arg_utils import EngineArgs

    plain, _ = folders(options)
    EngineArgs(str(plain), skip_tokenizer_init=True, dtype="bfloat16").create_model_config()


def make(options: argparse.Namespace) -> None:
    import df11

    configure(options)
    plain, compressed = folders(options)
    begin = time.perf_counter()
    if not (plain / checkpoints.INDEX).exists():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpoints.write(plain, config_of(options), device)
    tell({"written_s": time.perf_counter() - begin})
    if not compressed.exists():
        report = df11.compress(plain, compressed, verify=False, progress=False)
        tell({"ratio": report.ratio, "source_bytes": report.source_bytes})


# ---- an engine ----


def serve(options: argparse.Namespace) -> None:
    from vllm import LLM

    stage("imported")
    kind = options.kinds[0]
    traces = options.work.resolve() / "traces" / kind
    kind = kind.removesuffix(INVARIANT)
    plain, compressed = folders(options)
    served = compressed if KINDS[kind] and kind != "online" else plain
    name = f"s3://{store_server.BUCKET}/{served.name}" if options.port else str(served)
    begin = time.perf_counter()
    llm = LLM(
        name,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options.length,
        tensor_parallel_size=options.gpus,
        kernel_config=kernel_config(options),
        **engine_options(options, kind, traces),
    )
    engine = Engine(llm, config_of(options)["vocab_size"], traces)
    tell({"start_s": round(time.perf_counter() - begin, 1)})
    engine.generate(1, 16, 4)
    stage("ready")
    for part in options.parts:
        try:
            tell(getattr(engine, part)(options))
        except Exception as error:
            tell({"error": f"{part}: {type(error).__name__}: {error}"[:300]})
    stage("measured")


def engine_options(options: argparse.Namespace, kind: str, traces: Path) -> dict[str, Any]:
    """Options that differ from vLLM's defaults."""
    from vllm.platforms import current_platform

    extra: dict[str, Any] = {"model_loader_extra_config": KINDS[kind]} if KINDS[kind] else {}
    if kind == "online":
        extra["quantization"] = "df11"
    if options.port and not extra:
        extra["load_format"] = "runai_streamer"
    if options.experts:
        extra["enable_expert_parallel"] = True
    if options.memory is not None:
        # By NVML: a process that has used CUDA cannot fork the engine.
        total = current_platform.get_device_total_memory()
        extra["gpu_memory_utilization"] = options.memory * 1e9 / total
    if options.together is not None:
        extra["kv_cache_memory_bytes"] = int(options.together * 2**30)
        extra["gpu_memory_utilization"] = 0.1  # which must be free at the start
    if options.eager:
        extra["enforce_eager"] = True
    if options.graphs is not None:
        extra["max_cudagraph_capture_size"] = options.graphs
    if options.gpus > 1:
        # FlashInfer would compile the fused kernel at the start, for which machines need its tools.
        extra["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if "profile" in options.parts:
        told = {"torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
        extra["profiler_config"] = {"profiler": "torch", **told}
    return extra


def kernel_config(options: argparse.Namespace) -> dict[str, Any]:
    """Which kernels vLLM takes, instead of its own choice."""
    config: dict[str, Any] = {}
    if {"num_experts", "n_routed_experts"} & config_of(options).keys():
        config["moe_backend"] = "triton"
    if options.norms == "vllm":
        config["ir_op_priority"] = {"rms_norm": "vllm_c", "fused_add_rms_norm": "vllm_c"}
    return config


def tell(result: dict[str, Any]) -> None:
    print("\nRESULT " + json.dumps(result), flush=True)


def stage(name: str) -> None:
    """Says where it is, and waits for the driver."""
    print(f"\nSTAGE {name}", flush=True)
    sys.stdin.readline()


class Engine:
    """Requests of seeded tokens."""

    def __init__(self, llm: Any, vocabulary: int, traces: Path) -> None:
        self.llm, self.vocabulary, self.traces = llm, vocabulary, traces

    def prompts(self, requests: int, inputs: int, seed: int = 0) -> list[dict[str, list[int]]]:
        generator = torch.Generator().manual_seed(1000 * requests + seed)
        size = (requests, inputs)
        ids = torch.randint(2, self.vocabulary, size, generator=generator).tolist()
        return [{"prompt_token_ids": row} for row in ids]

    def answers(self, prompts: list[Any], outputs: int, logprobs: int | None = None) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        found = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [answer.outputs[0] for answer in found]

    def generate(self, requests: int, inputs: int, outputs: int, seed: int = 0) -> float:
        """Seconds."""
        prompts = self.prompts(requests, inputs, seed)
        begin = time.perf_counter()
        self.answers(prompts, outputs)
        return time.perf_counter() - begin

    def latency(self, options: argparse.Namespace) -> dict[str, Any]:
        """Milliseconds per output token after the first ones: the best of some rounds."""
        found, steps = {}, 128
        for batch in options.batches:
            self.generate(batch, 128, 2)
            first = min(self.generate(batch, 128, 1) for _ in range(options.rounds))
            whole = min(self.generate(batch, 128, 1 + steps) for _ in range(options.rounds))
            found[str(batch)] = round(1000 * (whole - first) / steps, 4)
            tell({"latency_ms": found})
        return {"latency_ms": found}

    def throughput(self, options: argparse.Namespace) -> dict[str, Any]:
        """The best rate of each number of requests."""
        rates = {}
        for requests in options.requests:
            self.generate(requests, 128, 8, 1)
            rounds = range(options.rounds)
            seconds = min(self.generate(requests, 128, 128, 2 + one) for one in rounds)
            rates[requests] = requests / seconds
        return {"requests_s": rates}

    def tokens(self, options: argparse.Namespace) -> dict[str, Any]:
        """The tokens of each prompt, and the log-probability of each."""
        prompts = self.prompts(options.prompts, 32)
        groups = [prompts[at : at + AT_ONCE] for at in range(0, len(prompts), AT_ONCE)]
        alone = [self.answers([prompt], 12, logprobs=1)[0] for prompt in prompts]
        at_once = [answer for group in groups for answer in self.answers(group, 12, logprobs=1)]
        return {"alone": logged(alone), "at_once": logged(at_once)}

    def profile(self, options: argparse.Namespace) -> dict[str, Any]:
        """For some kinds of steps, the kernels that take most: launches, and microseconds each."""
        found, steps = {}, 24
        windows = {
            "1 request": (1, 8, steps),
            "64 requests": (64, 8, steps),
            "saturation": (max(options.requests), 8, steps),
            "16384 tokens of prompts": (64, 256, 1),
        }
        for window, (requests, inputs, outputs) in windows.items():
            self.generate(requests, inputs, outputs, 7)
            before = set(self.traces.glob("**/*.gz"))
            self.llm.start_profile()
            self.generate(requests, inputs, outputs, 8)
            self.llm.stop_profile()
            found[window] = kernels(sorted(set(self.traces.glob("**/*.gz")) - before))
        return {"profile": found}


def logged(answers: list[Any]) -> list[Any]:
    return [
        [
            list(answer.token_ids),
            [
                at[token].logprob
                for token, at in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
        ]
        for answer in answers
    ]


def kernels(traces: list[Path]) -> dict[str, Any]:
    """From traces of PyTorch's profiler: total time on a GPU, and the kernels that took most."""
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for trace in traces:
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
            if event.get("cat") == "kernel":
                name = event["name"][:120]
                counts[name] += 1
                times[name] += event["dur"]
    most = [[name, counts[name], round(us / counts[name], 1)] for name, us in times.most_common(16)]
    return {"busy_ms": round(sum(times.values()) / 1000, 1), "kernels": most}


if __name__ == "__main__":
    sys.exit(main())
