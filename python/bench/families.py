#!/usr/bin/env python3
"""Which families of transformers give BF16's bits: a small seeded model of each, compressed.

    python bench/families.py --rows families.jsonl --out families.md   # all; goes on where it was
    python bench/families.py --only qwen3_next,gpt_oss                 # some
    python bench/families.py --jobs 16                                 # on 16 cores

For each model type that transformers has a class of `LISTS` for, a config is shrunk by the names of
its fields, a model with seeded weights is saved and compressed, and everything that it returns for
one input (a text, or an image or sound if it takes no text) is compared with what the BF16 model
returns, bit for bit. Each type has a process of its own. Takes 5 to 10 s a type and core.

| result | meaning |
|---|---|
| identical | all outputs have BF16's bits |
| BF16 differs | the BF16 model itself gives other bits when it is loaded a second time |
| no model | transformers makes, saves, loads or runs no BF16 model of the shrunk config |
| FAILED | anything else |

The note of an identical model tells why matrices are not compressed in memory, if some are not.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import resource
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.generation import utils as _  # noqa: F401 (what each process would import)
from transformers.models.auto import configuration_auto, modeling_auto

import df11

#: Classes that make models, and lists of their model types; the first that has a type makes it.
LISTS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "AutoModel": "MODEL",
}
#: Model types whose names begin so come first: this year's.
FIRST = ("qwen3_next", "qwen3_5", "qwen4", "gemma4", "deepseek_v3", "deepseek_v4", "glm4", "glm5")
FIRST += (
    "kimi",
    "minimax",
    "gpt_oss",
    "llama4",
    "mistral",
    "ministral",
    "inkling",
    "youtu",
    "rwkv",
)
#: Reasons for which small parameters are ordinary in every model; the note tells all others.
USUAL = {"a vector", "as small as it is", "a buffer", "not in the containers"}
#: Types whose main input is an image, and which take a text alone too.
TAKE_TEXT = ("idefics3", "smolvlm")
HIDDEN, LAYERS, HEADS, VOCABULARY = 128, 4, 4, 512
#: Larger ones were not shrunk.
MOST_WEIGHTS = 120_000_000
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
    (16, "mamba_d_state state_size ssm_state_size mamba_d_head"),
    (256, "max_position_embeddings n_positions max_sequence_length"),
    # Layers that share must have a partner of their kind.
    (0, "num_kv_shared_layers"),
]
#: Fields that some models need although their configs leave them out.
FILLED = {"head_dim", "num_experts_per_tok"}
SIZES = {name: size for size, names in SMALL for name in names.split()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--rows", type=Path, help="where rows are kept; types there are not run")
    parser.add_argument("--out", type=Path, help="where the table goes; printed otherwise")
    parser.add_argument("--jobs", type=int, default=1, help="how many types at once")
    parser.add_argument("--seconds", type=int, default=120, help="the most that one type may take")
    parser.add_argument("--memory", type=float, default=8, help="GB that one type may allocate")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = kept(options.rows)
    known = {row[0] for row in rows}
    wanted = [
        each
        for each in listed()
        if each[1] not in known and (not options.only or each[1] in options.only)
    ]
    with ThreadPool(options.jobs) as pool:
        for row in pool.imap_unordered(lambda each: [each[1], *result(*each, options)], wanted):
            rows.append(row)
            print(" | ".join(row), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    print(json.dumps(row), file=file)
    table = in_markdown(sorted(rows))
    if options.out:
        options.out.write_text(table)
    else:
        print(table)
    return sum(row[1] == "FAILED" for row in rows)


def kept(path: Path | None) -> list[list[str]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def listed() -> list[tuple[str, str]]:
    """The class and the name of each model type that has a config: `FIRST`, then by lists."""
    found: dict[str, str] = {}
    for kind, names in LISTS.items():
        for name in getattr(modeling_auto, f"{names}_MAPPING_NAMES"):
            if name in configuration_auto.CONFIG_MAPPING_NAMES:
                found.setdefault(name, kind)
    kinds = list(LISTS)

    def order(name: str) -> tuple[bool, int, str]:
        return not name.startswith(FIRST), kinds.index(found[name]), name

    return [(found[name], name) for name in sorted(found, key=order)]


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


def result(kind: str, name: str, options: argparse.Namespace) -> tuple[str, str, str]:
    """The answer of a separate process: the result, compressed of all parameters, why not."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    arguments = kind, name, theirs, int(options.memory * 1e9)
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    theirs.close()
    late = f"not done in {options.seconds} s"
    try:
        said = ours.recv() if ours.poll(options.seconds) else ("no model", "", late)
    except EOFError:
        said = ("FAILED", "", "the process ended")
    process.kill()
    process.join()
    return said


def work(kind: str, name: str, answer: Connection, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(1)
    stage = "no model"
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            bf16, compressed = Path(folder, "bf16"), Path(folder, "df11")
            made = getattr(transformers, kind)
            save(made, name, bf16)
            expected, again = (run(made, bf16)[0] for _ in range(2))
            stage = "FAILED"
            df11.compress(bf16, compressed, progress=False)
            found, model = run(made, compressed)
            held = df11.report(model)
            count = sum(form == "stored" for form in held.residences.values())
            told = f"{count} of {len(held.residences)}"
            why = "; ".join(f"{held.ordinary[why][0]} {why}" for why in {*held.ordinary} - USUAL)
            if same(expected, found):
                answer.send(("identical", told, why))
            elif not same(expected, again):
                answer.send(("BF16 differs", told, why))
            else:
                answer.send(("FAILED", told, "other outputs"))
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1].name
            text = f"{type(error).__name__} in {place}: {error}".replace("|", "/")
            text = text.replace(f"{sys.prefix}/", "")
            answer.send((stage, "", " ".join(text.split())[:160]))


def save(made: Any, name: str, folder: Path) -> None:
    config = small(default(configuration_auto.CONFIG_MAPPING[name]))
    with torch.device("meta"):
        count = sum(value.numel() for value in made.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count:,} weights are too many")
    model, generator = made.from_config(config), torch.Generator().manual_seed(7)
    for key, value in model.named_parameters():
        centre = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        value.copy_(centre + 0.05 * torch.randn(value.shape, generator=generator))
    model.to(torch.bfloat16).save_pretrained(folder)


def default(kind: Any) -> Any:
    """A config, with small sizes where it needs some."""
    try:
        return kind()
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
        if key in ("model_type", "transformers_version", "architectures"):
            continue
        if isinstance(value, dict) and value and all(str(at).isdigit() for at in value):
            found[key] = {at: one for at, one in value.items() if int(at) < LAYERS}
        elif isinstance(value, dict):
            found[key] = shrunk(value)
        elif isinstance(value, (list, tuple)) and key.endswith("_section"):
            found[key] = [HIDDEN // HEADS // 2 - 10, 5, 5][: len(value)]
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
    return found


def run(made: Any, folder: Path) -> tuple[list[torch.Tensor], Any]:
    model = made.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    for each in (model.config, *model.config.sub_configs):
        part = getattr(model.config, each, None) if isinstance(each, str) else each
        if hasattr(part, "use_cache"):
            part.use_cache = False
    torch.manual_seed(11)  # of models that draw noise
    found = tree_leaves(dict(model(**inputs(model))))
    return [value for value in found if isinstance(value, torch.Tensor)], model


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """A text of 96 tokens, or as many values of what the model takes instead of text."""
    tokens = torch.arange(3, 99).remainder(300)[None]
    given, config, name = {}, model.config, model.main_input_name
    generator = torch.Generator().manual_seed(13)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    if name == "pixel_values" and config.model_type not in TAKE_TEXT:
        size = getattr(config, "image_size", None) or 224
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        given[name] = drawn(1, getattr(config, "num_channels", 3), *sides)
    elif name == "input_values":
        given[name] = drawn(1, 16000)
    elif name == "input_features":
        length = 2 * getattr(config, "max_source_positions", 150)
        given[name] = drawn(1, getattr(config, "num_mel_bins", 80), length)
    else:
        given["input_ids"] = tokens
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens[:, :24]
    return given


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return bool(one) and all(a.dtype == b.dtype and bits(a).equal(bits(b)) for a, b in pairs)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


if __name__ == "__main__":
    raise SystemExit(main())
