#!/usr/bin/env python3
"""Experts of one layer of vLLM: BF16 beside compressed ones, in CUDA graphs, in turns, on a GPU.

    python bench/vllm_experts.py                                  # Qwen3-30B-A3B and Mixtral
    python bench/vllm_experts.py --shapes 128x1536x4096x8 --tokens 1,8 --out rows.jsonl

A shape is experts x inner size x hidden size x experts per token. Routes are drawn at random; each
replay has eight of them.

| figure | what it is |
|---|---|
| bf16 | microseconds of vLLM's experts, in BF16 |
| exact | of compressed experts in mode exact, over BF16's time |
| kernels | of compressed experts with any number of tokens, over BF16's time |
| decoded | of decoding all experts, and multiplying as vLLM does, over BF16's time |
| differing | outputs of exact, and of kernels, with other bits than BF16's |
| order | whether exact multiplies without decoding, since the order of vLLM's sums is known |
"""

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools import capture, free, in_turns, numbers, parser, replays, tell, words
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers import fused_moe
from vllm.v1.worker.workspace import init_workspace_manager

from df11.vllm import register
from df11.vllm._config import Df11Config

ROUTES = 8
NUMBERS = itertools.count()
SHAPES = "128x768x2048x8,8x14336x4096x2"


def main() -> None:
    options = parser(__doc__, "--out")
    options.add_argument("--shapes", type=words, default=SHAPES.split(","))
    options.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    options.add_argument("--rounds", type=int, default=9)
    chosen = options.parse_args()
    register()
    device = torch.device("cuda", 0)
    os.environ["VLLM_DIST_IDENT"] = "29541"
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()), torch.no_grad(), torch.device(device):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29541", 0, "gloo")
        initialize_model_parallel(1)
        init_workspace_manager(device)
        for shape in chosen.shapes:
            measure(shape, chosen.tokens, chosen.rounds, chosen.out)
            free()


def measure(shape: str, tokens: list[int], rounds: int, out: Path | None) -> None:
    experts, inner, hidden, top = map(int, shape.split("x"))
    original, packed = (
        made(config, experts, inner, hidden, top) for config in (None, Df11Config())
    )
    for name in ("w13_weight", "w2_weight"):
        getattr(original, name).data.copy_(getattr(packed, name).decode())
    original.quant_method.process_weights_after_loading(original)
    for count in tokens:
        x = torch.randn(count, hidden)
        routes = [torch.randn(count, experts).float().softmax(-1).topk(top) for _ in range(ROUTES)]
        layers: dict[str, Callable[..., Any]] = {
            "bf16": original.quant_method.apply,
            "exact": packed.quant_method.apply,
            "kernels": partial(multiplied, False),
            "decoded": partial(multiplied, True),
        }
        of = {"bf16": original, "exact": packed, "kernels": packed, "decoded": packed}
        ready = {
            kind: capture(partial(replay, apply, of[kind], x, routes))
            for kind, apply in layers.items()
        }
        times = in_turns(
            rounds, {kind: partial(replays, graph) for kind, (graph, _) in ready.items()}
        )
        bits = {kind: y.view(torch.int16) for kind, (_, y) in ready.items()}
        differing = [int((bits[kind] != bits["bf16"]).sum()) for kind in ("exact", "kernels")]
        figures = {
            "tokens": count,
            "bf16": 1000 * times["bf16"] / ROUTES,
            **{kind: times[kind] / times["bf16"] for kind in ("exact", "kernels", "decoded")},
            "differing": differing,
            "order": packed.quant_method.multiplies(packed, count, top),
        }
        tell(out, "experts", figures, shape=shape)


def made(config: Any, experts: int, inner: int, hidden: int, top: int) -> Any:
    """A layer, with seeded weights if it is compressed."""
    # vLLM 0.26 calls it so.
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    name = f"experts.{next(NUMBERS)}"  # vLLM wants one for each layer
    layer = make(experts, top, hidden, inner, renormalize=True, quant_config=config, prefix=name)
    layer = layer.routed_experts
    if config is None:
        return layer
    generator = torch.Generator("cuda").manual_seed(1)
    for expert in range(experts):
        for shard, rows, columns in (
            ("w1", inner, hidden),
            ("w3", inner, hidden),
            ("w2", hidden, inner),
        ):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            value = 0.02 * torch.randn(rows, columns, generator=generator)
            layer.weight_loader(getattr(layer, name), value, name, shard, expert)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def replay(
    apply: Callable[..., Any], layer: Any, x: torch.Tensor, routes: list[Any]
) -> torch.Tensor:
    done = [apply(layer, x, weights, ids.int(), None, None) for weights, ids in routes]
    return torch.stack(done)


def multiplied(
    decodes: bool, layer: Any, x: torch.Tensor, weights: Any, ids: Any, *_: Any
) -> torch.Tensor:
    done: torch.Tensor = layer.quant_method.run(layer, x, weights, ids, decodes)
    return done


if __name__ == "__main__":
    main()
