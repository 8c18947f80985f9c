"""Small models of many architectures, from configs, with seeded random weights."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import df11

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 511,
}  # fmt: skip
# With fewer equal layers an arena takes the savings, with smaller experts their codebooks.
MOE: dict[str, Any] = {
    "num_hidden_layers": 5, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 320,
}  # fmt: skip
MIXTRAL = {"num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

#: The config's class, and what is not as in SMALL.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", UNTIED),
    "llama-tied": ("LlamaConfig", TIED),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3Config", UNTIED),
    "qwen3-tied": ("Qwen3Config", TIED),
    "qwen3-wide": ("Qwen3Config", {"vocab_size": 4096, "num_hidden_layers": 6, **TIED}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 32, "sliding_window": 16}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "decoder_sparse_step": 1, **UNTIED}),
    "qwen3-moe-mixed": ("Qwen3MoeConfig", {**MOE, "mlp_only_layers": [1], **TIED}),
    "mixtral": ("MixtralConfig", MIXTRAL),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "olmo2": ("Olmo2Config", {}),
}


def config_of(name: str) -> Any:
    kind, changes = CAUSAL[name]
    return getattr(transformers, kind)(**{**SMALL, **changes}, dtype="bfloat16")


def seeded(model: torch.nn.Module, seed: int = 7) -> torch.nn.Module:
    """Weights that differ everywhere, in norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.05 * noise)
    return model.to(torch.bfloat16).eval()


def causal(name: str, folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    seeded(model).save_pretrained(folder)
    return folder


class Folders:
    """Models of CAUSAL as folders, each made once for all tests; nobody writes to them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def bf16(self, name: str) -> Path:
        folder = self.root / name / "bf16"
        return folder if folder.exists() else causal(name, folder)

    def df11(self, name: str, layout: str = "tile") -> Path:
        """The compressed folder, by `df11.compress`."""
        folder = self.root / name / layout
        return folder if folder.exists() else compressed(self.bf16(name), folder, layout=layout)

    def both(self, name: str) -> tuple[Path, Path]:
        return self.bf16(name), self.df11(name)

    def pair(self, name: str, device: Any = "cpu", **options: Any) -> tuple[Any, Any]:
        original, model = (load(folder, device, **options) for folder in self.both(name))
        return original.requires_grad_(False), model

    def worded(self, name: str) -> tuple[Path, Path]:
        """Like `both`, with a tokenizer."""
        bf16, folder = self.root / name / "worded", self.root / name / "worded-df11"
        if not folder.exists():
            tokenizer().save_pretrained(causal(name, bf16))
            compressed(bf16, folder)
        return bf16, folder


def compressed(source: Path, out: Path, **options: Any) -> Path:
    df11.compress(source, out, progress=False, **options)
    return out


def saved(model: Any, root: Path, **options: Any) -> tuple[Path, Path]:
    """Saves a model, and compresses what was saved: both folders."""
    model.save_pretrained(root / "bf16", **options)
    return root / "bf16", compressed(root / "bf16", root / "df11")


def with_head_apart(source: Path, place: Path, is_same: bool = True) -> Path:
    """A copy of a tied model whose head is in a shard of its own, with the embedding's values or
    with others.
    """
    shutil.copytree(source, place)
    state = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    head = state["model.embed_tokens.weight"].clone()
    if not is_same:
        head = head.roll(1, 0).contiguous()
    shards = {"model-00001-of-00002.safetensors": state}
    shards["model-00002-of-00002.safetensors"] = {"lm_head.weight": head}
    for file, some in shards.items():
        save_file(some, place / file, {"format": "pt"})
    places = {name: file for file, some in shards.items() for name in some}
    index = {"metadata": {}, "weight_map": places}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def adapted(model: Any, config: Any = None, **options: Any) -> Any:
    """A model with an adapter whose values matter, if not told a LoRA; nothing else is trained."""
    import peft

    if config is None:
        projections = ["q_proj", "v_proj", "up_proj", "down_proj"]
        default = {"r": 4, "target_modules": projections, "init_lora_weights": False}
        config = peft.LoraConfig(**{**default, "task_type": "CAUSAL_LM", **options})
    torch.manual_seed(5)
    return peft.get_peft_model(model.requires_grad_(False), config)


def load(folder: Path, device: Any = "cpu", **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=device, **options)


def equal(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def same_weights(model: Any, original: Any) -> bool:
    """Whether the decoded weights of a model have the names and bits of those of another one."""
    found, expected = df11.state_dict(model), original.state_dict()
    assert found.keys() == expected.keys()
    return equal(found.values(), (expected[name].cpu() for name in found))


def bert_config(**options: Any) -> Any:
    others = ("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id")
    sizes = {name: size for name, size in SMALL.items() if name not in others}
    return transformers.BertConfig(**sizes, **options, dtype="bfloat16")


def sentence_encoder(folder: Path) -> Path:
    """Saves an encoder of sentence-transformers in BF16, with a tokenizer."""
    from sentence_transformers import SentenceTransformer, models

    config, bert = bert_config(), folder.with_name("bert")
    seeded(transformers.BertModel(config)).save_pretrained(bert)
    tokenizer().save_pretrained(bert)
    parts = [models.Transformer(str(bert)), models.Pooling(config.hidden_size)]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    return folder


def prompt(rows: int = 2, length: int = 37) -> torch.Tensor:
    """Rows of tokens, the same ones each time, for models of SMALL."""
    return torch.randint(1, 500, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def greedy(
    model: Any, prompt: torch.Tensor, steps: int, like: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Logits of a prompt and of greedy steps after it, with a cache; or of the steps of another
    model that had these logits.
    """
    out, cache, tokens = [], None, prompt.to(model.device)
    for _ in range(steps):
        answer = model(tokens, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        out.append(answer.logits.cpu())
        best = answer.logits if like is None else like[len(out) - 1]
        tokens = best[:, -1:].argmax(-1).to(model.device)
    return out


def tokenizer() -> Any:
    """A tokenizer of whole words and their parts, trained here, for models of SMALL."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=["input_ids", "attention_mask"], **names
    )
