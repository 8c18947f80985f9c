"""Small models of many architectures, from configs, with seeded random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 511,
}
# Of fewer equal layers, an arena takes what compression saves; of smaller experts, their codebooks.
MOE: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 320,
}

#: What an encoder is asked for of these.
_OF_BERT = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)

#: The config's class, and what is not as in SMALL.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-wide": (
        "Qwen3Config",
        {"vocab_size": 4096, "num_hidden_layers": 6, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 32, "sliding_window": 16}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**MOE, "decoder_sparse_step": 1, "tie_word_embeddings": False},
    ),
    "qwen3-moe-mixed": (
        "Qwen3MoeConfig",
        {**MOE, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "num_hidden_layers": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 320,
        },
    ),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "olmo2": ("Olmo2Config", {}),
}


def config_of(name: str) -> Any:
    """The configuration of one of CAUSAL."""
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
    """Saves a model of one of CAUSAL as BF16, and returns the folder."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    seeded(model).save_pretrained(folder)
    return folder


def bert_config(**options: Any) -> Any:
    """Of a small encoder."""
    sizes = {name: SMALL[name] for name in _OF_BERT}
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


def greedy(model: Any, prompt: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits of a prompt and of greedy steps after it, with a cache."""
    out = []
    cache = None
    tokens = prompt.to(model.device)
    with torch.no_grad():
        for _ in range(steps):
            answer = model(tokens, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            out.append(answer.logits.cpu())
            tokens = answer.logits[:, -1:].argmax(-1)
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
