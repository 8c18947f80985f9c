#!/usr/bin/env python3
"""Which families of transformers give BF16's bits: a small seeded model of each, compressed.

    python bench/families.py --out families.md            # all language and image-text models
    python bench/families.py --only qwen3_next,gpt_oss    # some

For each model type that `AutoModelForCausalLM` and `AutoModelForImageTextToText` know, a config is
shrunk by the names of its fields, a model with seeded weights is saved and compressed, and the
logits of a text are compared with those of the BF16 model, bit for bit. Each type has a process of
its own. Takes 5 s a type and core.

| result | meaning |
|---|---|
| identical | all logits have BF16's bits |
| BF16 differs | the BF16 model itself gives other bits when it is loaded a second time |
| no model | transformers makes, saves, loads or runs no BF16 model of the shrunk config |
| FAILED | anything else |
"""

import argparse
import importlib.metadata
import multiprocessing
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

import df11

LISTS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
HIDDEN, LAYERS, HEADS, VOCABULARY = 128, 4, 4, 512
#: Larger ones were not shrunk.
MOST_WEIGHTS = 40_000_000
#: Small sizes, and fields of configs that get them.
SMALL: list[tuple[int, str]] = [
    (HIDDEN, "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim emb_dim"),
    (HIDDEN, "mlp_hidden_size moe_intermediate_size shared_expert_intermediate_size"),
    (2 * HIDDEN, "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size intermediate_size_mlp"),
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
    (16, "mamba_d_state state_size ssm_state_size mamba_d_head"),
    (256, "max_position_embeddings n_positions max_sequence_length"),
    (2, "num_kv_shared_layers"),
]
SIZES = {name: size for size, names in SMALL for name in names.split()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="where the table goes; printed otherwise")
    parser.add_argument("--seconds", type=int, default=120, help="the most that one type may take")
    options = parser.parse_args()
    rows = []
    for kind, name in listed():
        if options.only and name not in options.only:
            continue
        rows.append((name, *result(kind, name, options.seconds)))
        print(" | ".join(map(str, rows[-1])), flush=True)
    table = in_markdown(rows)
    if options.out:
        options.out.write_text(table)
    else:
        print(table)
    return sum(row[1] == "FAILED" for row in rows)


def listed() -> list[tuple[str, str]]:
    """The list of each model type that has a config, and its name; in two lists once."""
    found: dict[str, str] = {}
    for kind in LISTS:
        for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES"):
            if name in configuration_auto.CONFIG_MAPPING_NAMES:
                found.setdefault(name, kind)
    return [(kind, name) for name, kind in sorted(found.items())]


def in_markdown(rows: list[tuple[Any, ...]]) -> str:
    counts = {
        said: sum(row[1] == said for row in rows) for said in dict.fromkeys(r[1] for r in rows)
    }
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    told = ", ".join(f"{count} {said}" for said, count in counts.items())
    lines = [f"{len(rows)} model types, {' and '.join(versions)}, on the CPU: {told}.", ""]
    lines += ["| model type | result | compressed parameters | note |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def result(kind: str, name: str, seconds: int) -> tuple[str, str, str]:
    """What a process of its own says: the result, compressed of all parameters, why not."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(kind, name, theirs))
    process.start()
    theirs.close()
    try:
        said = ours.recv() if ours.poll(seconds) else ("no model", "", f"not done in {seconds} s")
    except EOFError:
        said = ("FAILED", "", "the process ended")
    process.kill()
    process.join()
    return said


def work(kind: str, name: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    stage = "no model"
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            bf16, compressed = Path(folder, "bf16"), Path(folder, "df11")
            auto = {"CAUSAL_LM": "CausalLM", "IMAGE_TEXT_TO_TEXT": "ImageTextToText"}[kind]
            made = getattr(transformers, f"AutoModelFor{auto}")
            save(made, name, bf16)
            expected, again = (run(made, bf16)[0] for _ in range(2))
            stage = "FAILED"
            df11.compress(bf16, compressed, progress=False)
            found, model = run(made, compressed)
            held = df11.report(model)
            count = sum(form == "stored" for form in held.residences.values())
            told = f"{count} of {len(held.residences)}"
            if same(expected, found):
                answer.send(("identical", told, ""))
            elif not same(expected, again):
                answer.send(("BF16 differs", told, ""))
            else:
                answer.send(("FAILED", told, "other logits"))
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1].name
            text = f"{type(error).__name__} in {place}: {error}".replace("|", "/")
            answer.send((stage, "", " ".join(text.split())[:160]))


def save(made: Any, name: str, folder: Path) -> None:
    config = small(configuration_auto.CONFIG_MAPPING[name]())
    with torch.device("meta"):
        count = sum(value.numel() for value in made.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count:,} weights are too many")
    model, generator = made.from_config(config), torch.Generator().manual_seed(7)
    for key, value in model.named_parameters():
        centre = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        value.copy_(centre + 0.05 * torch.randn(value.shape, generator=generator))
    model.to(torch.bfloat16).save_pretrained(folder)


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
        if key in ("model_type", "transformers_version", "architectures"):
            continue
        if isinstance(value, dict) and value and all(str(at).isdigit() for at in value):
            found[key] = {at: one for at, one in value.items() if int(at) < LAYERS}
        elif isinstance(value, dict):
            found[key] = shrunk(value)
        elif isinstance(value, list) and key.endswith("_section"):
            found[key] = [HIDDEN // HEADS // 2 - 10, 5, 5][: len(value)]
        elif isinstance(value, list) and len(value) == before:
            found[key] = value[:LAYERS]
        elif type(value) is int and key in SIZES:
            found[key] = SIZES[key]
        elif type(value) is int and key.endswith("_token_id"):
            found[key] = value if value < 3 else VOCABULARY - 1 - sum(map(ord, key)) % 99
        else:
            found[key] = value
    if groups and groups == heads:
        found["num_key_value_heads"] = HEADS
    return found


def run(made: Any, folder: Path) -> tuple[torch.Tensor, Any]:
    model = made.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    tokens = torch.arange(3, 99).remainder(300)[None]
    return model(input_ids=tokens).logits, model


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


if __name__ == "__main__":
    raise SystemExit(main())
