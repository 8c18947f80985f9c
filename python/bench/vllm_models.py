"""Geometries of models that people serve, and seeded weights for them, N(0, 0.02²)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

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
