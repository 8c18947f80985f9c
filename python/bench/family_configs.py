"""Configs of transformers with small sizes, for `families.py`."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto

#: Makes a smaller config of the same class.
Shrink = Callable[[Any], Any]
#: Fields and their values.
Sizes = dict[str, int]
HIDDEN, LAYERS, HEADS, VOCABULARY = 128, 4, 4, 512
#: Small sizes, and fields of configs that get them.
SMALL: list[tuple[int, str]] = [
    (HIDDEN, "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim emb_dim"),
    (HIDDEN, "mlp_hidden_size shared_expert_intermediate_size attention_hidden_size"),
    (HIDDEN, "text_hidden_size"),
    # Smaller experts are not coded.
    (3 * HIDDEN, "moe_intermediate_size intermediate_size ffn_dim n_inner d_ff ffn_hidden_size"),
    (3 * HIDDEN, "intermediate_size_mlp expert_ffn_hidden_size"),
    (2 * HIDDEN, "encoder_ffn_dim decoder_ffn_dim"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads mamba_n_heads mamba_num_heads"),
    (HEADS, "encoder_attention_heads decoder_attention_heads linear_num_value_heads"),
    (HIDDEN // HEADS, "head_dim d_head v_head_dim global_head_dim swa_head_dim index_head_dim"),
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
#: Depth and vocabulary alone.
DEPTHS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers",
    "decoder_layers", "num_kv_shared_layers", "first_k_dense_replace",
}  # fmt: skip
SHALLOW = {
    name: size for name, size in SIZES.items() if name in DEPTHS or name.startswith("vocab_size")
}
#: Ends of the names of widths.
WIDTHS = ("_size", "_dim", "_channels", "_width")
#: Fields of backbones that name layers by number.
NUMBERED = {"stage_names", "out_features", "out_indices"}
#: Rotations with a section each for time, height and width.
ROTATIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
#: Fields of some model types for which these rules find no value, or one that does not fit.
FIXED: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "bamba": {"mamba_n_groups": 1},
    "blip-2": {"image_token_index": 3},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTATIONS}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "deepseek_v3": {"topk_method": "noaux_tc"},  # for vLLM, as published configs have it
    "diffusion_gemma_text": {
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 3 * HIDDEN,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "head_dim": HIDDEN // HEADS, "num_key_value_heads": HEADS,
        "per_layer_config": {
            at: {
                "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 64,
                "kv_lora_rank": 64, "head_dim": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                "v_head_dim": 32,
            }
            for at in (2, 3)
        },
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": ROTATIONS | {"mrope_section": [5, 5, 6]}},
    "edgetam_vision_model": {
        "backbone_config": {
            "model_type": "timm_wrapper", "architecture": "repvit_m1",
            "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
        },
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "gemma4_assistant": {"backbone_hidden_size": HIDDEN},
    "gemma4_unified_assistant": {"backbone_hidden_size": HIDDEN},
    "glm4_moe": {"head_dim": HIDDEN // HEADS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 2], "downsample_rate": "1/2",
    },
    "hy_v4_vl_text": {"rope_parameters": ROTATIONS | {"mrope_section": [4, 2, 2]}},
    "informer": {"prediction_length": 24},
    "instructblip": {"image_token_index": 3},
    "instructblipvideo": {"video_token_index": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 2 * SIZES["qk_rope_head_dim"]},
    "mamba2": {"head_dim": 2 * HIDDEN // HEADS},
    "mistral4": {"head_dim": 2 * SIZES["qk_rope_head_dim"]},
    "molmo2_adapter": {"vision_feature_layer": [-2, -4]},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "nemotron": {"num_key_value_heads": 2},
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "vit_pe_lang_large_patch14_448",
            "model_args": {"embed_dim": HIDDEN, "depth": LAYERS, "num_heads": HEADS},
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HIDDEN // HEADS,
        "indexer_budget": 32, "indexer_compress_ratio": 4, "hc_lowrank": HIDDEN // 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [HIDDEN // 4, 3 * HIDDEN // 4]},
    "step3p5": {"sliding_window": 16},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "timm_backbone": {"backbone": "resnet18"},
    "time_series_transformer": {"prediction_length": 24},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2,
        "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS,
    },
    "zamba2": {"n_mamba_heads": HEADS},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
#: The same of the text model of an assistant, all of whose layers share keys and values.
SHARED = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
    "use_double_wide_mlp": False, "num_kv_shared_layers": LAYERS,
}  # fmt: skip
#: The first arguments of configs whose defaults are no model.
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
    return type(config)(**shrunk(config.to_dict(), lambda _: SIZES))


def linked(config: Any) -> Any:
    """A config with small sizes, where fields that equal the width of a part are as small as it."""
    fields = config.to_dict()
    sizes = SIZES | links(fields)
    return type(config)(**shrunk(fields, lambda _: sizes))


def fresh(config: Any) -> Any:
    """A config made from small sizes alone, which derives its other fields from them."""
    return type(config)(**declared(config, SIZES | links(config.to_dict())))


def declared(config: Any, sizes: Sizes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in {each for kind in type(config).__mro__ for each in inspect.get_annotations(kind)}:
        value = vars(config).get(name)
        if isinstance(value, PreTrainedConfig):
            parts = type(config).sub_configs_defaults
            given = parts[name].init_kwargs if name in parts else {}
            found[name] = given | declared(value, sizes) | {"model_type": value.model_type}
        elif (size := resized(name, value, sizes)) is not None:
            found[name] = size
    return found | FIXED.get(config.model_type, {})


def texts(config: Any) -> Any:
    """A config with small sizes in the parts that have a vocabulary, and few layers in others."""
    fields = config.to_dict()
    sizes = SIZES | links(fields)
    return type(config)(**shrunk(fields, lambda part: sizes if "vocab_size" in part else SHALLOW))


def shallow(config: Any) -> Any:
    """A config of the same class with few layers and a small vocabulary."""
    return type(config)(**shrunk(config.to_dict(), lambda _: SHALLOW))


def whole(config: Any) -> Any:
    return config


#: Ways to shrink a config, in the order to try.
LADDER: tuple[Shrink, ...] = (small, linked, fresh, texts, shallow, whole)


def links(fields: dict[str, Any]) -> Sizes:
    return dict.fromkeys(equal(fields, set(widths(fields))), HIDDEN)


def widths(fields: dict[str, Any]) -> Iterator[int]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from widths(value)
        elif key in ("hidden_size", "d_model", "embed_dim") and isinstance(value, int):
            yield value


def is_width(name: str) -> bool:
    return "image" not in name and ("hidden_size" in name or name.endswith(WIDTHS))


def equal(fields: dict[str, Any], wide: set[int]) -> Iterator[str]:
    """Names of sizes that equal one of `wide`."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from equal(value, wide)
        elif type(value) is int and value in wide and is_width(key):
            yield key


def resized(name: str, value: Any, sizes: Sizes) -> int | None:
    """A field's new value, if it gets one."""
    if value is None:
        return sizes.get(name) if name in FILLED else None
    if type(value) is not int:
        return None
    if value and (name in sizes or name.endswith(("vocab_size", "_vocab"))):
        return sizes.get(name, VOCABULARY)
    if name.endswith("_token_id"):
        return value if value < 3 else VOCABULARY - 1 - sum(map(ord, name)) % 99
    return None


def shrunk(fields: dict[str, Any], chosen: Callable[[dict[str, Any]], Sizes]) -> dict[str, Any]:
    """Fields with the sizes chosen for them and for each part."""
    sizes = chosen(fields)
    depths = "num_hidden_layers", "n_layer", "num_layers"
    before = next((fields[key] for key in depths if fields.get(key)), None)
    if isinstance(fields.get("num_heads"), (list, tuple)):
        sizes = {name: size for name, size in sizes.items() if name != "embed_dim"}
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if key in ("transformers_version", "architectures", *NUMBERED):
            continue
        if isinstance(value, dict) and value and all(str(at).isdigit() for at in value):
            found[key] = {at: one for at, one in value.items() if int(at) < LAYERS}
        elif isinstance(value, dict):
            found[key] = shrunk(value, chosen)
        elif isinstance(value, (list, tuple)) and key.endswith("_section") and sizes is not SHALLOW:
            found[key] = sections(fields)[: len(value)]
        elif isinstance(value, list) and len(value) == before:
            found[key] = value[:LAYERS]
        elif (size := resized(key, value, sizes)) is not None:
            found[key] = size
        else:
            found[key] = value
    if sizes is SHALLOW:
        return found
    if groups and groups == heads:
        found["num_key_value_heads"] = HEADS
    if fields.get("qk_rope_head_dim") and "head_dim" in found:
        found["head_dim"] = sizes["qk_rope_head_dim"]  # of rotations alone
    kind = fields.get("model_type", "")
    rotations = found.get("rope_parameters")
    if has_sections(kind) and isinstance(rotations, dict):
        nested = all(isinstance(each, dict) for each in rotations.values())
        for each in rotations.values() if nested else (rotations,):
            each["mrope_section"] = sections(each)
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
