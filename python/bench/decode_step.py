#!/usr/bin/env python3
"""One decode step of a language model: BF16 beside compressed weights in each mode, in turns.

    python bench/decode_step.py --compile                 # Llama-3.1-8B geometry, seeded weights
    python bench/decode_step.py --layers 4 --batches 1    # a smaller model
    python bench/decode_step.py --kinds bf16,exact-fast,fast --apart   # and each layer by itself
    python bench/decode_step.py --geometry qwen3-30b-a3b --layers 6 --batches 1,8,64 --eager
    python bench/decode_step.py --kinds bf16,exact-fast,fast,glyd,glyd-exact   # beside a peer

| figure | what it is |
|---|---|
| load | seconds from the call to a model on the GPU and to its first token; memory it holds |
| temporary | most bytes that an eager step takes besides, after the first of them |
| graph | median milliseconds of a step captured in a CUDA graph, static cache of 512 tokens |
| logits | of that step: whether they are BF16's, or how far off, as a part of the largest |
| kernels | milliseconds of all kernels in an eager step with a cache of 16 tokens and more |
| compiled | with --compile, batch 1: as graph, of `torch.compile(fullgraph=True)` |

Weights: bf16 as they are; exact as stored, mode exact; exact-fast in the fast layout, mode exact;
stored as stored, mode fused; fast in the fast layout, mode fused. With --apart also the same models
with a launch for each layer, where others have one for all layers that share x; their kinds end
with "-apart". The checkpoint and its container stay in --work for the next run. The kinds glyd and
glyd-exact are models of the package glyd (`pip install "glyd[gpu]"`), which packs the checkpoint
while it loads it; official_llm.py does the same for DFloat11's package.
"""

import argparse
import copy
import time
from typing import Any

import tools
import torch
import transformers
from llm import MODES, Bench
from tools import Step, capture, free, in_turns, numbers, replays, words

from df11._siblings import joined_siblings

PROMPT_TOKENS = 16
#: Options of the package glyd, by kind.
PEERS: dict[str, dict[str, bool]] = {"glyd": {}, "glyd-exact": {"exact": True}}


def main() -> None:
    options = arguments()
    options.device, options.layout = "cuda:0", None
    steps = Steps(options)
    steps.make()
    models = {kind: steps.loaded(kind) for kind in options.kinds}
    if options.apart:
        some = {kind: model for kind, model in models.items() if kind in MODES and kind != "bf16"}
        models |= {f"{kind}-apart": steps.apart(kind, model) for kind, model in some.items()}
    for batch in options.batches:
        steps.measure(models, batch)
    if options.compile:
        for kind, model in models.items():
            steps.compiled(kind, model)


def arguments() -> argparse.Namespace:
    parser = tools.parser(__doc__, "--geometry", "--layers", "--work", "--out")
    parser.add_argument("--kinds", type=words, default=list(MODES))
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--apart", action="store_true", help="also with a launch for each layer")
    return parser.parse_args()


class Steps(Bench):
    """All kinds of one model on one GPU."""

    def load_model(self, kind: str, **options: Any) -> Any:
        if kind not in PEERS:
            return super().load_model(kind, **options)
        import glyd

        return glyd.from_pretrained(str(self.folders["bf16"]), **PEERS[kind], compile=False)

    @torch.no_grad()
    def loaded(self, kind: str) -> Any:
        """A model, what loading it took, and what it holds."""
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        model = self.load_model(kind)
        tools.synchronize(self.device)
        loaded = time.perf_counter() - start
        model(self.prompt(1, PROMPT_TOKENS)).logits[:, -1].argmax().item()
        first = time.perf_counter() - start
        free()
        held = torch.cuda.memory_allocated() - before
        self.row("load", kind=kind, seconds=loaded, first_token=first, held=held)
        return model

    def apart(self, kind: str, model: Any) -> Any:
        """A copy, with the same compressed arrays, that multiplies by each layer by itself."""
        products = [*joined_siblings(model)]
        self.row("siblings", kind=kind, products=len(products), matrices=sum(map(len, products)))
        made = copy.deepcopy(model)
        for module in made.modules():
            if "_df11_siblings" in vars(type(module)):
                module.__class__ = type(module).__mro__[1]
        return made

    def measure(self, models: dict[str, Any], batch: int) -> None:
        """Graphs in turns, their logits, and kernels and memory of eager steps."""
        if not self.options.eager:
            steps = {kind: self.decode_step(model, batch) for kind, model in models.items()}
            self.distances(batch, self.graphs(steps, batch))
            del steps
            free()
        eager = {kind: self.short_step(model, batch) for kind, model in models.items()}
        for kind, step in eager.items():
            self.row("temporary", kind=kind, batch=batch, bytes=temporary(step))
        taken = {kind: tools.kernels(self.device, step) for kind, step in eager.items()}
        self.tell(
            "kernels", batch, {kind: 1e3 * sum(each.values()) for kind, each in taken.items()}
        )

    def distances(self, batch: int, logits: dict[str, torch.Tensor]) -> None:
        if (expected := logits.get("bf16")) is None:
            return
        for kind, found in logits.items():
            same = torch.equal(found.view(torch.int16), expected.view(torch.int16))
            far = float((found.float() - expected.float()).abs().max() / expected.abs().max())
            self.row("logits", kind=kind, batch=batch, identical=same, away=far)

    @torch.no_grad()
    def short_step(self, model: Any, batch: int) -> Step:
        """An eager step after a short prompt, whose attention takes little."""
        cache = transformers.DynamicCache(config=self.config)
        model(self.prompt(batch, PROMPT_TOKENS), past_key_values=cache, logits_to_keep=1)
        ids = self.prompt(batch, 1)

        @torch.no_grad()
        def step() -> torch.Tensor:
            return model(ids, past_key_values=cache).logits

        return step

    def compiled(self, kind: str, model: Any) -> None:
        start = time.perf_counter()
        torch._dynamo.reset()
        graph, _ = capture(self.decode_step(torch.compile(model, fullgraph=True), 1))
        found = in_turns(self.options.rounds, {"milliseconds": lambda: replays(graph)})
        self.row("compiled", kind=kind, batch=1, **found, seconds=time.perf_counter() - start)


def temporary(step: Step) -> int:
    """Most bytes of PyTorch's allocator that a step takes besides what stays."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
