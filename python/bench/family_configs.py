"""Configs of transformers with small sizes, for `families.py`."""

from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import configuration_auto

HIDDEN, LAYERS, HEADS, VOCABULARY = 128, 4, 4, 512
#: Small sizes, and fields of configs that get them.
SMALL: list[tuple[int, str]] = [
    (HIDDEN, "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim emb_dim"),
    (HIDDEN, "mlp_hidden_size shared_expert_intermediate_size attention_hidden_size"),
    (HIDDEN, "text_hidden_size"),
    # Smaller experts are not coded.
    (3 * HIDDEN, "moe_intermediate_size intermediate_size ffn_dim n_inner d_ff ffn_hidden_size"),
    (3 * HIDDEN, "intermediate_size_mlp"),
    (2 * HIDDEN, "encoder_ffn_dim decoder_ffn_dim"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads mamba_n_heads mamba_num_heads"),
    (HEADS, "encoder_attention_heads decoder_attention_heads linear_num_value_heads"),
    (HIDDEN // HEADS, "head_dim v_head_dim global_head_dim swa_head_dim index_head_dim"),
    (HIDDEN // HEADS, "linear_key_head_dim linear_value_head_dim"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (8, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk index_n_heads"),
    (2, "num_key_value_heads swa_num_key_value_heads num_kv_heads linear_num_key_heads"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace"),
    (64, "q_lora_rank kv_lora_rank hidden_size_per_layer_input"),
    (16, "qk_rope_head_dim qk_nope_head_dim index_topk sliding_window attention_chunk_size"),
    (16, "mamba_d_state state_size ssm_state_size rotary_dim"),
    # Twice the width by the number of heads.
    (2 * HIDDEN // HEADS, "mamba_d_head mamba_head_dim mamba_headdim"),
    (2 * HIDDEN, "mamba_d_ssm"),
    (1, "n_groups mamba_n_groups mamba_ngroups"),
    (256, "max_position_embeddings n_positions max_sequence_length"),
    # Layers that share must have a partner of their kind.
    (0, "num_kv_shared_layers"),
]
#: Fields that some models need although their configs leave them out.
FILLED = {"head_dim", "num_experts_per_tok"}
SIZES = {name: size for size, names in SMALL for name in names.split()}
#: Fields of backbones that name layers by number.
NUMBERED = {"stage_names", "out_features", "out_indices"}
#: Fields of some model types for which these rules find no value, or one that does not fit.
FIXED: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_groups": 1},
    "deepseek_v3": {"topk_method": "noaux_tc"},  # for vLLM, as published configs have it
    "gemma4_assistant": {"backbone_hidden_size": HIDDEN},
    "gemma4_unified_assistant": {"backbone_hidden_size": HIDDEN},
    "glm4_moe": {"head_dim": HIDDEN // HEADS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"head_dim": 2 * HIDDEN // HEADS},
    "mistral4": {"head_dim": 2 * SIZES["qk_rope_head_dim"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HIDDEN // HEADS,
        "indexer_budget": 32, "indexer_compress_ratio": 4, "hc_lowrank": HIDDEN // 2,
    },
    "zamba2": {"n_mamba_heads": HEADS},
}  # fmt: skip
#: The same of the text model of an assistant, all of whose layers share keys and values.
SHARED = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
    "use_double_wide_mlp": False, "num_kv_shared_layers": LAYERS,
}  # fmt: skip
#: What configs whose defaults are no model are first made from.
FIRST = {
    name: {"text_config": SHARED | {"num_hidden_layers": LAYERS}}
    for name in ("gemma4_assistant", "gemma4_unified_assistant")
}


def default(kind: Any) -> Any:
    """A config, with small sizes where it needs some."""
    try:
        return kind(**FIRST.get(kind.model_type, {}))
    except (TypeError, ValueError):
        fields = {name for each in kind.__mro__ for name in vars(each).get("__annotations__", ())}
        return kind(**{name: SIZES[name] for name in fields & SIZES.keys()})


def small(config: Any) -> Any:
    """A config of the same class with small sizes, in parts of it too."""
    return type(config)(**shrunk(config.to_dict()))


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    before = next(
        (fields[key] for key in ("num_hidden_layers", "n_layer") if fields.get(key)), None
    )
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    found = {}
    for key, value in fields.items():
        if key in ("model_type", "transformers_version", "architectures", *NUMBERED):
            continue
        if isinstance(value, dict) and value and all(str(at).isdigit() for at in value):
            found[key] = {at: one for at, one in value.items() if int(at) < LAYERS}
        elif isinstance(value, dict):
            found[key] = shrunk(value)
        elif isinstance(value, (list, tuple)) and key.endswith("_section"):
            found[key] = sections(fields)[: len(value)]
        elif isinstance(value, list) and len(value) == before:
            found[key] = value[:LAYERS]
        elif value is None and key in FILLED:
            found[key] = SIZES[key]
        elif type(value) is int and value and (key in SIZES or key.endswith("vocab_size")):
            found[key] = SIZES.get(key, VOCABULARY)
        elif type(value) is int and key.endswith("_token_id"):
            found[key] = value if value < 3 else VOCABULARY - 1 - sum(map(ord, key)) % 99
        else:
            found[key] = value
    if groups and groups == heads:
        found["num_key_value_heads"] = HEADS
    if fields.get("qk_rope_head_dim") and "head_dim" in found:
        found["head_dim"] = SIZES["qk_rope_head_dim"]  # of rotations alone
    kind = fields.get("model_type", "")
    rotations = found.get("rope_parameters")
    if has_sections(kind) and isinstance(rotations, dict):
        rotations["mrope_section"] = sections(rotations)
    if kind in FIRST:
        found["text_config"] |= SHARED
    return found | FIXED.get(kind, {})


def sections(rotations: dict[str, Any]) -> list[int]:
    """How many of a head's frequencies belong to time, height and width."""
    half = int(HIDDEN // HEADS * rotations.get("partial_rotary_factor", 1)) // 2
    return [half - half // 3 * 2, half // 3, half // 3]


def has_sections(kind: str) -> bool:
    """Whether the code of a model type has sections of its own where the config names none."""
    package = configuration_auto.model_type_to_module_name(kind) if kind else ""
    code = Path(transformers.__file__).parent / "models" / package / f"modeling_{package}.py"
    return code.is_file() and 'get("mrope_section", [' in code.read_text(encoding="utf-8")
