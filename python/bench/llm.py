#!/usr/bin/env python3
"""A language model with compressed weights beside the same in BF16: bits, memory, speed, what fits.

    python bench/llm.py --out rows.jsonl               # Llama-3.1-8B geometry, seeded, on GPU 0
    python bench/llm.py --only make,exact --layers 4   # some parts, a smaller model
    python bench/llm.py --geometry tiny --device cpu   # tries the script itself

Parts run in this order, each on its own: what fails says so, and the next one begins. Weights are
drawn from N(0, 0.02²) on the device and are kept in --work (/dev/shm) for the next run; `--only
clean` deletes them. Rows of JSON go to --out, a table to standard output. Bits are compared with
PyTorch's flash attention (its plain one in CUDA graphs): cuDNN's, the default on Hopper, gives one
model other bits from run to run.

| part | what it measures |
|---|---|
| write | writes the BF16 checkpoint |
| make | compresses it |
| load | seconds until the first token, with files in the page cache |
| memory | bytes that weights take on the GPU |
| exact | logits of both models, bit for bit, at each greedy step |
| speed | tokens/s of generate() |
| graph | tokens/s of a decode step as a CUDA graph, with a static cache; logits as in `exact` |
| budget | tokens/s with 60 % of BF16's memory: streamed weights beside accelerate's offload |
| capacity | tokens of one sequence before memory ends, with a budget for weights and cache |
"""

import argparse
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import checkpoints
import tools
import torch
import transformers
from tools import free, numbers
from torch.nn.attention import SDPBackend

import df11

# How weights are held: arguments of `df11.Config`, except of BF16.
MODES: dict[str, dict[str, str]] = {
    "bf16": {},
    "exact": {"mode": "exact", "residence": "stored"},
    "exact-fast": {"mode": "exact", "residence": "fast"},
    "stored": {"mode": "fused", "residence": "stored"},
    "fast": {"mode": "fused", "residence": "fast"},
}
#: In their order; the first one and the last one are left out by default.
PARTS = ["write", "make", "load", "memory", "exact"]
PARTS += ["speed", "graph", "budget", "capacity", "clean"]
ON_GPUS = {"graph", "budget", "capacity"}
KINDS = ("bf16", "df11")
ATTENTION: dict[str, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "plain": [SDPBackend.MATH],
    "default": [],
}
CACHE_TOKENS = 512


def main() -> int:
    options = arguments()
    bench = Bench(options)
    failed = []
    for part in options.only:
        if part in ON_GPUS and not bench.on_gpu:
            print(f"== {part} needs a GPU")
            continue
        start = time.perf_counter()
        print(f"== {part}", flush=True)
        try:
            getattr(bench, part)()
        except Exception as error:
            failed.append(part)
            traceback.print_exc()
            bench.row(part, error=f"{type(error).__name__}: {error}")
        free()
        print(f"   {time.perf_counter() - start:.1f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = tools.parser(__doc__, *tools.OPTIONS)
    add = parser.add_argument
    add("--only", type=tools.words, default=PARTS[1:-1], metavar="PART,…")
    add("--steps", type=int, default=256, help="greedy steps that are compared")
    add("--tokens", type=int, default=64, help="tokens of a timed generate()")
    add("--rounds", type=int, default=3, help="of each timed generate(), both models in turns")
    add("--batches", type=numbers, default=[1, 8, 32, 128])
    add("--against", choices=KINDS, default="df11", help="of `exact`; bf16 as a control")
    add("--attention", choices=ATTENTION, default="flash", help="PyTorch's attention in `exact`")
    add("--exact-batches", type=numbers, default=[1, 32])
    add("--prompts", type=numbers, default=[1, 37, 2048])
    add("--share", type=float, default=0.6, help="of BF16 weights, the memory of `budget`")
    add("--capacity", type=float, default=1.25, help="of BF16 weights, the memory of `capacity`")
    options = parser.parse_args()
    if unknown := [part for part in options.only if part not in PARTS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    return options


def best(timings: list[tuple[int, float, float]]) -> float:
    """Tokens a second after the first ones, by the best of each part of `Bench.time_generate`."""
    seconds = min(whole for _, _, whole in timings) - min(first for _, first, _ in timings)
    return timings[0][0] / max(seconds, 1e-9)


class Bench:
    """The parts, one method each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.told = checkpoints.config_of(options.geometry, options.layers)
        self.config = transformers.AutoConfig.for_model(**self.told)
        name = f"{options.geometry}-{self.config.num_hidden_layers}"
        self.folders = {
            "bf16": options.work / name / "bf16",
            "df11": options.work / name / f"df11-{options.layout or 'default'}",
        }
        #: Rows and tokens of what was generated.
        self.planned: set[tuple[int, int]] = set()
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    # ---- tools ----

    def row(self, part: str, **figures: Any) -> None:
        told = {"geometry": self.options.geometry, "layers": self.config.num_hidden_layers}
        tools.tell(self.options.out, part, figures, **told)

    def tell(self, what: str, batch: int, times: dict[str, float]) -> None:
        """Milliseconds, and how many times as fast as BF16 each is."""
        for kind, value in times.items():
            ratio = times["bf16"] / value if "bf16" in times else None
            self.row(what, kind=kind, batch=batch, milliseconds=value, of_bf16=ratio)

    def load_model(self, kind: str, **options: Any) -> Any:
        """A model in BF16, compressed as the options say ("df11"), or held in one of MODES; alone
        on its device unless told otherwise.
        """
        folder = self.folders["bf16" if kind == "bf16" else "df11"]
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: run the part make first")
        if kind == "df11":
            how = {"mode": self.options.mode, "residence": self.options.residence}
            options["quantization_config"] = df11.Config(**how)
        elif kind != "bf16":
            options["quantization_config"] = df11.Config(**MODES[kind])
        options = {"device_map": self.options.device, "dtype": torch.bfloat16} | options
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)

    def models(self, **options: Any) -> Iterator[tuple[str, Any]]:
        """Both, one after the other; who has deleted one has its memory for the next."""
        for kind in KINDS:
            yield kind, self.load_model(kind, **options)
            free()

    def decode_step(self, model: Any, batch: int) -> Callable[[], torch.Tensor]:
        """A decode step at position 64 of a static cache of its own; it returns logits."""
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

    def graphs(self, steps: dict[str, tools.Step], batch: int) -> dict[str, torch.Tensor]:
        """Times steps as CUDA graphs, in turns; their logits."""
        graphs = {kind: tools.capture(step) for kind, step in steps.items()}
        works = {kind: partial(tools.replays, graph) for kind, (graph, _) in graphs.items()}
        self.tell("graph", batch, tools.in_turns(self.options.rounds, works))
        return {kind: logits for kind, (_, logits) in graphs.items()}

    def seconds(self, work: Callable[[], Any]) -> float:
        return tools.seconds(self.device, work)

    def prompt(self, rows: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows * 10007 + length)
        tokens = torch.randint(0, self.config.vocab_size, (rows, length), generator=generator)
        return tokens.to(self.device)

    @property
    def bf16_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folders["bf16"].glob("*.safetensors"))

    # ---- parts ----

    def write(self) -> None:
        bf16 = self.folders["bf16"]
        if not bf16.exists():
            part = bf16.with_name("bf16.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            seconds = self.seconds(lambda: checkpoints.write(part, self.told, self.device))
            part.rename(bf16)
            self.row("make", step="write", bytes=self.bf16_bytes, seconds=seconds)

    def make(self) -> None:
        bf16, compressed = self.folders["bf16"], self.folders["df11"]
        self.write()
        if not compressed.exists():
            layout = {"layout": self.options.layout} if self.options.layout else {}
            start = time.perf_counter()
            # Decoded weights are compared bit for bit below, and by `memory`.
            report = df11.compress(bf16, compressed, verify=False, progress=False, **layout)
            seconds = time.perf_counter() - start
            figures = {"bytes": report.stored_bytes, "ratio": report.ratio, "seconds": seconds}
            self.row("make", step="compress", **figures)

    @torch.no_grad()
    def load(self) -> None:
        tokens = self.prompt(1, 16)
        for kind in KINDS:
            start = time.perf_counter()
            model = self.load_model(kind)
            tools.synchronize(self.device)
            loaded = time.perf_counter() - start
            model(tokens).logits[:, -1].argmax().item()
            self.row("load", kind=kind, seconds=loaded, first_token=time.perf_counter() - start)
            del model
            free()

    def memory(self) -> None:
        taken, before = [], tools.used(self.device)
        for kind, model in self.models():
            free()
            figures: dict[str, Any] = {"used": tools.used(self.device) - before}
            figures["torch_allocated"] = (
                torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
            )
            if kind == "df11":
                report = df11.report(model, verify=True)
                print(tools.told(report))
                figures |= {"weights": report.device_bytes, "ratio": report.ratio}
                figures |= {"verified": report.verified, "mode": self.options.mode}
                figures |= {"residence": self.options.residence}
            else:
                figures["weights"] = sum(p.nbytes for p in model.parameters())
            self.row("memory", kind=kind, **figures)
            taken.append(figures["weights"])
            del model
            free()
            before = tools.used(self.device)
        self.row("memory", kind="both", ratio=taken[1] / taken[0])

    def exact(self) -> None:
        models = self.load_model("bf16"), self.load_model(self.options.against)
        for rows in self.options.exact_batches:
            for length in self.options.prompts:
                with tools.attention(self.device, *ATTENTION[self.options.attention]):
                    self.compare(models, rows, length)
                free()

    @torch.no_grad()
    def compare(self, models: tuple[Any, Any], rows: int, length: int) -> None:
        tokens = self.prompt(rows, length)
        caches: list[Any] = [None, None]
        each = []
        for _ in range(self.options.steps):
            logits = []
            for at, model in enumerate(models):
                out = model(tokens, past_key_values=caches[at], use_cache=True, logits_to_keep=1)
                caches[at] = out.past_key_values
                logits.append(out.logits)
            # NaN would differ from itself: bits are compared.
            each.append((logits[0].view(torch.int16) == logits[1].view(torch.int16)).all())
            tokens = logits[0][:, -1:].argmax(-1)
        options, std = self.options, float(logits[0].float().std())
        described = {"prompt": length, "against": options.against, "attention": options.attention}
        self.tell_first_difference("exact", each, batch=rows, **described, std_of_logits=std)

    def tell_first_difference(self, part: str, each: list[torch.Tensor], **figures: Any) -> None:
        """A row about logits of which `each` says whether a step's are the same."""
        first = next((at for at, equal in enumerate(each) if not equal), None)
        figures |= {"steps": len(each), "identical": first is None, "first_difference": first}
        self.row(part, **figures)

    def speed(self) -> None:
        models = {kind: self.load_model(kind) for kind in KINDS}
        for rows in self.options.batches:
            self.tell_rates("speed", rows, self.rates(models, rows, self.options.tokens))

    def tell_rates(self, part: str, rows: int, rates: dict[str, float]) -> None:
        for kind, value in rates.items():
            self.row(part, kind=kind, batch=rows, tokens_per_second=value)
        self.row(part, batch=rows, df11_of_bf16=rates["df11"] / rates["bf16"])
        free()

    def time_generate(self, model: Any, rows: int, count: int) -> tuple[int, float, float]:
        """Tokens after the first ones of a generate() after a prompt of 32, and the seconds until
        the first ones and until all.

        Each length was there before: cuDNN's attention, PyTorch's default on Hopper, makes a plan
        for each length that it meets first, which takes tens of milliseconds of a process.
        """
        prompt = self.prompt(rows, 32)
        fixed = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}

        def run(new: int) -> None:
            model.generate(prompt, min_new_tokens=new, max_new_tokens=new, **fixed)

        run(1 if (rows, count) in self.planned else count + 1)
        self.planned.add((rows, count))
        first, whole = (self.seconds(partial(run, new)) for new in (1, count + 1))
        return rows * count, first, whole

    def rates(self, models: dict[str, Any], rows: int, count: int) -> dict[str, float]:
        """Tokens a second after the first one, of models in turns: the best of each part."""
        timings = [
            {kind: self.time_generate(model, rows, count) for kind, model in models.items()}
            for _ in range(self.options.rounds)
        ]
        return {kind: best([each[kind] for each in timings]) for kind in models}

    def graph(self) -> None:
        models = {kind: self.load_model(kind) for kind in KINDS}
        for rows in self.options.batches:
            rates = {
                kind: self.replay(model, rows, self.options.tokens)
                for kind, model in models.items()
            }
            self.tell_rates("graph", rows, rates)
        for rows in self.options.exact_batches:
            with tools.attention(self.device, SDPBackend.MATH):
                self.compare_graphs(models, rows)
            free()

    @torch.no_grad()
    def compare_graphs(self, models: dict[str, Any], rows: int) -> None:
        """Logits of both models' graphs, bit for bit, at each greedy step of BF16's tokens."""
        steps, warm = self.options.steps, 5
        token = torch.empty(rows, 1, dtype=torch.int64, device=self.device)
        graphs, caches = [], []  # graphs do not keep the caches that they write to
        for model in models.values():
            first, cache = self.begin(model, rows, warm + steps)
            token.copy_(first)
            graphs.append(tools.capture(partial(self.one_step, model, token, cache)))
            caches.append(cache)
        each = []
        for _ in range(steps):
            for graph, _ in graphs:
                graph.replay()
            logits = [logits for _, logits in graphs]
            each.append((logits[0].view(torch.int16) == logits[1].view(torch.int16)).all())
            token.copy_(logits[0][:, -1:].argmax(-1))
        self.tell_first_difference("graph", each, batch=rows, prompt=32, attention="plain")
        for graph, _ in graphs:
            graph.reset()

    def begin(self, model: Any, rows: int, room: int) -> tuple[torch.Tensor, Any]:
        """The token after a prompt of 32, and a static cache with room for more tokens."""
        cache = transformers.StaticCache(config=model.config, max_cache_len=32 + room)
        prompt = self.prompt(rows, 32)
        first = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return first[:, -1:].argmax(-1), cache

    def one_step(self, model: Any, token: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(token, past_key_values=cache, use_cache=True).logits
        return logits

    @torch.no_grad()
    def replay(self, model: Any, rows: int, count: int) -> float:
        """Tokens a second of a captured decode step."""
        token, cache = self.begin(model, rows, 8 + 3 * count)
        graph, _ = tools.capture(partial(self.one_step, model, token, cache))
        best = min(self.seconds(lambda: [graph.replay() for _ in range(count)]) for _ in range(3))
        graph.reset()
        return rows * count / best

    def budget(self) -> None:
        """Tokens a second, in each round, of a model of which not all fits."""
        limit, rates = int(self.options.share * self.bf16_bytes), {}
        memory = {self.device.index or 0: limit, "cpu": 10**12}
        counts = {"bf16": 4, "df11": 32}
        for kind, model in self.models(device_map="auto", max_memory=memory):
            timings = (
                self.time_generate(model, 1, counts[kind]) for _ in range(self.options.rounds)
            )
            rates[kind] = [best([timing]) for timing in timings]
            figures: dict[str, Any] = {"limit": limit, "tokens_per_second": rates[kind]}
            if report := df11.report(model):
                figures |= {"weights": report.device_bytes, "streamed": report.host_bytes}
            else:
                # No list of them: it would keep them for the next model.
                sizes = (p.nbytes for p in model.parameters() if p.device.type == "cuda")
                figures["weights"] = sum(sizes)
            self.row("budget", kind=kind, **figures)
            del model
        ratios = [a / b for a, b in zip(rates["df11"], rates["bf16"], strict=True)]
        self.row("budget", df11_of_bf16=ratios)

    @torch.no_grad()
    def capacity(self) -> None:
        """Tokens of one sequence that fit beside the model."""
        limit, fits = int(self.options.capacity * self.bf16_bytes), {}
        total = torch.cuda.get_device_properties(self.device).total_memory
        for kind, model in self.models():
            torch.cuda.set_per_process_memory_fraction(limit / total, self.device)
            try:
                fits[kind] = self.longest(model, 1024)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            self.row("capacity", kind=kind, limit=limit, tokens=fits[kind])
            del model
        self.row("capacity", df11_of_bf16=fits["df11"] / max(1, fits["bf16"]))

    def longest(self, model: Any, count: int) -> int:
        """Tokens of one sequence until memory ends, `count` at a time."""
        cache, done = transformers.DynamicCache(config=model.config), 0
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        start = time.perf_counter()
        try:
            while time.perf_counter() - start < 120:
                model(self.prompt(1, count), **options)
                tools.synchronize(self.device)
                done += count
            print("   stopped after 120 s")
        except torch.cuda.OutOfMemoryError:
            pass
        return done

    def clean(self) -> None:
        shutil.rmtree(self.options.work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
