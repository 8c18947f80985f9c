"""Geometries of models that people serve, and checkpoints of them: seeded weights, N(0, 0.02²), in
BF16, or with linear layers in FP8 and a scale for each block.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_MOE = {
    **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_TINY = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 2048,
    "max_position_embeddings": 4096, "rope_theta": 1e4,
}  # fmt: skip
#: Configs of transformers, except `rope_theta`.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "rope_theta": 5e5, "max_position_embeddings": 131072,
    },
    "llama-3.2-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "rope_theta": 5e5, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **_QWEN, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
        "rope_theta": 1e6, "max_position_embeddings": 40960,
    },
    # With one dense layer before the mixtures, of three, and rotations that are not stretched.
    "deepseek-v3": {
        **_LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 59,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "vocab_size": 129280,
        "rope_theta": 1e4, "max_position_embeddings": 4096,
    },
    "tiny": {**_LLAMA, **_TINY},
    "tiny-moe": {
        **_MOE, **_TINY, "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARDS = 8
SCALE = 0.02
BLOCK = 128


def config_of(geometry: str, layers: int | None, dtype: str = "bf16") -> dict[str, Any]:
    """The config of a geometry, with another number of layers if one is given. `dtype`: "bf16" or
    "fp8".
    """
    config = dict(GEOMETRIES[geometry])
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    if dtype == "fp8":
        routers = [f"model.layers.{at}.mlp.gate" for at in range(config["num_hidden_layers"])]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *routers],
        }
    return config


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint."""
    width = config["hidden_size"]
    attention = latent(config) if "kv_lora_rank" in config else by_heads(config)
    experts = config.get("num_experts", config.get("n_routed_experts", 0))
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}.weight", (width,)
        for name, shape in attention.items():
            yield f"{at}.self_attn.{name}.weight", shape
        blocks = {f"{at}.mlp": config["intermediate_size"]}
        if experts and layer >= config.get("first_k_dense_replace", 0):
            yield f"{at}.mlp.gate.weight", (experts, width)
            inner = config["moe_intermediate_size"]
            blocks = {f"{at}.mlp.experts.{expert}": inner for expert in range(experts)}
            if "n_shared_experts" in config:
                yield f"{at}.mlp.gate.e_score_correction_bias", (experts,)
                blocks[f"{at}.mlp.shared_experts"] = inner * config["n_shared_experts"]
        for block, inner in blocks.items():
            for name in ("gate_proj", "up_proj"):
                yield f"{block}.{name}.weight", (inner, width)
            yield f"{block}.down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def by_heads(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of an attention."""
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
    shapes |= {"o_proj": (width, queries)}
    norms = {"q_norm": (head,), "k_norm": (head,)}
    return shapes | (norms if config["model_type"].startswith("qwen3") else {})


def latent(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a multi-head latent attention."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    queries, keys, rotated = (
        config[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    )
    plain, values = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "q_a_proj": (queries, width),
        "q_a_layernorm": (queries,),
        "q_b_proj": (heads * (plain + rotated), queries),
        "kv_a_proj_with_mqa": (keys + rotated, width),
        "kv_a_layernorm": (keys,),
        "kv_b_proj": (heads * (plain + values), keys),
        "o_proj": (width, heads * values),
    }


def stored(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> dict[str, Any]:
    """The tensors in which a file has a weight: for each name, dtype, shape and bytes."""
    is_matrix = name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    if not ("quantization_config" in config and is_matrix):
        return {name: ("BF16", shape, 2 * torch.Size(shape).numel())}
    blocks = tuple(-(-side // BLOCK) for side in shape)
    scales = f"{name}_scale_inv", ("F32", blocks, 4 * torch.Size(blocks).numel())
    return dict([(name, ("F8_E4M3", shape, torch.Size(shape).numel())), scales])


def write(folder: Path, config: dict[str, Any], device: torch.device | str) -> None:
    """Writes a checkpoint: `config.json`, and weights in files of about the same size.

    They are drawn on the device, and written by threads, which halves the time.
    """
    (folder / "config.json").write_text(json.dumps(config))
    shapes = list(tensors(config))
    seeds = {name: seed for seed, (name, _) in enumerate(shapes)}
    files: list[dict[str, tuple[int, ...]]] = [{} for _ in range(SHARDS)]
    sizes = [0] * SHARDS
    for name, shape in sorted(shapes, key=lambda one: -torch.Size(one[1]).numel()):
        at = sizes.index(min(sizes))
        files[at][name] = shape
        sizes[at] += sum(one[2] for one in stored(name, shape, config).values())

    def write_file(at: int) -> str:
        file, header, end = f"model-{at + 1:05}.safetensors", {}, 0
        for name, shape in files[at].items():
            for each, (dtype, sides, size) in stored(name, shape, config).items():
                begin, end = end, end + size
                header[each] = {"dtype": dtype, "shape": sides, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, shape in files[at].items():
                value = drawn(shape, 1.0 if "norm" in name else 0.0, seeds[name], device)
                is_whole = len(stored(name, shape, config)) == 1
                for one in [value] if is_whole else in_blocks(value):
                    out.write(one.cpu().view(torch.uint8).numpy().data)
        return file

    with ThreadPoolExecutor(SHARDS) as threads:
        names = list(threads.map(write_file, range(SHARDS)))
    places = {
        each: file
        for file, mine in zip(names, files, strict=True)
        for name, shape in mine.items()
        for each in stored(name, shape, config)
    }
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))


def drawn(
    shape: tuple[int, ...], mean: float, seed: int, device: torch.device | str
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(17 + seed)
    value = torch.empty(shape, device=device)
    return value.normal_(mean, SCALE, generator=generator).to(torch.bfloat16)


def in_blocks(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weights, and a scale for each block, with which the largest is the largest of FP8."""
    rows = len(value)
    whole = functional.pad(value.float(), (0, 0, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    made = (blocks / scales).to(torch.float8_e4m3fn).view(whole.shape)[:rows]
    return made, scales[:, 0, :, 0].contiguous()
